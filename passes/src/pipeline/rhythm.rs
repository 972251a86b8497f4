//! When passes are due in a steady pipeline of zero-bubble V.
//!
//! A microbatch follows the one before by a *period*, in which a stage runs its six passes of one microbatch: forward,
//! backward and weight gradients of two chunks. A *hop* is the time from a pass on one stage to the same pass on the
//! next. The shorter the hops, the fewer periods a microbatch takes to come back, and the fewer microbatches a stage
//! holds (Qi et al., "Pipeline parallelism with controllable memory", 2024, section 3).
//!
//! Where a stage may hold what 1F1B holds, or half of that, passes have fixed turns ([`Rhythm`]). In these turns no
//! pass waits for another once the pipeline is full, as long as a backward pass takes no longer than a forward pass and
//! the gradients of weights together. Everywhere else the time at which a pass is due follows from how long passes take
//! ([`Due::steady`]).

use super::order::Pass;

/// When passes are due.
pub(super) struct Due {
    /// From a microbatch to the next.
    pub period: f64,
    /// After what time the next microbatch may come in.
    pace: f64,
    /// Per chunk and pass, of the first microbatch.
    pub first: Vec<[f64; 3]>,
}

/// The passes of a stage in a period, in turns: those of its chunk on the way down and of that on the way up.
type Turns = [(Pass, Way); 6];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Down,
    Up,
}

/// In which turns the passes of a stage come, so that none waits for another once the pipeline is full, as long as a backward
/// pass takes no longer than a forward pass and gradients of weights together: those of the last stage before the pipeline
/// turns, of the one before, and so on around.
pub(super) struct Rhythm(&'static [Turns]);

/// Of all stages alike, which hold what forward passes leave of two chunks for each stage there is.
const WHOLE: Rhythm = Rhythm(&[ALIKE]);

const ALIKE: Turns = {
    use Pass::{Backward, Forward, Weight};
    use Way::{Down, Up};
    [(Forward, Down), (Forward, Up), (Backward, Up), (Backward, Down), (Weight, Up), (Weight, Down)]
};

/// A pass goes down and up two stages in a period, so stages hold half as much.
const HALF: Rhythm = {
    use Pass::{Backward, Forward, Weight};
    use Way::{Down, Up};
    Rhythm(&[ALIKE, [(Forward, Down), (Backward, Down), (Backward, Up), (Weight, Down), (Forward, Up), (Weight, Up)]])
};

/// Of how many chunks a stage holds what forward passes leave at the most, by the number of stages, where passes of
/// zero-bubble V have their turns, the most first.
pub fn held_in_turns(stages: u64) -> [u64; 2] {
    [2 * stages, stages + 1 + u64::from(stages.is_multiple_of(2))]
}

/// Whether passes have their turns, of so many microbatches, where a stage holds so many chunks at the most.
pub fn is_in_turns(in_flight: u64, sizes: (u64, u64)) -> bool {
    Rhythm::of(in_flight, sizes).is_some()
}

impl Rhythm {
    /// The turns of passes, if they have any, where a stage holds so many chunks at the most. With a few more than turns take,
    /// begun as they are ready, passes would wait longer; and so they do in turns, where filling and draining is half of the
    /// step.
    pub fn of(in_flight: u64, (stages, microbatches): (u64, u64)) -> Option<Self> {
        if microbatches < 2 * stages {
            return None;
        }
        let is_enough = |least: &u64| (*least..=least + stages / 16).contains(&in_flight);
        let mut known = held_in_turns(stages).into_iter().zip([WHOLE, HALF]);
        known.find(|(least, _)| is_enough(least)).map(|(_, rhythm)| rhythm)
    }
}

impl Due {
    /// Of chunks whose passes take so long on average, where a stage holds so many. Half a period for a hop lets the passes
    /// of all stages be in the same cyclic order, so none ever waits for another, however long its parts are; then a stage
    /// holds what forward passes leave of two chunks for each stage there is. Where it is to hold less, hops are as much
    /// shorter, and stages wait a little.
    pub fn steady(stages: u64, [forward, backward, weight]: [f64; 3], in_flight: u64) -> Self {
        let period = 2.0 * (forward + backward + weight);
        let share = in_flight as f64 / (2 * stages) as f64;
        // While the pipeline fills, three chunks for each stage are held at the most, however fast it does.
        let pace = 2.0 * forward * (3.0 - 2.0 * share).clamp(0.0, 1.0);
        let hop = (0.5 * period * share.min(1.0)).max(forward.max(backward));
        // What turns around on a stage goes on at once.
        let of_chunk = |chunk: u64| {
            let (is_up, back) = (u64::from(chunk >= stages), 2 * stages - 1 - chunk);
            let turn = [backward, 0.0][is_up as usize];
            let comes = (chunk - is_up) as f64 * hop + is_up as f64 * forward;
            let returns = (2 * (stages - 1) + back - (1 - is_up)) as f64 * hop + 2.0 * forward + turn;
            [comes, returns, returns]
        };
        Self { period, pace, first: (0..2 * stages).map(of_chunk).collect() }
    }

    /// In turns of a sixth of a period each, which those of a stage begin one after those of the stage before.
    pub fn in_turns(stages: u64, Rhythm(turns): &Rhythm) -> Self {
        let count = 6;
        let last = 2 * stages - 1;
        let mut first = vec![[0.0; 3]; 2 * stages as usize];
        // The first turn of a pass that is not before a time.
        let turn = |chunk: u64, pass: Pass, time: u64| {
            let (stage, way) = if chunk < stages { (chunk, Way::Down) } else { (last - chunk, Way::Up) };
            let own = &turns[((stages - 1 - stage) % turns.len() as u64) as usize];
            let own = own.iter().position(|turn| *turn == (pass, way)).unwrap_or(0) as u64;
            time + (own + stage + count - time % count) % count
        };
        let mut time = 0;
        let passes = (0..=last).map(|chunk| (chunk, Pass::Forward));
        for (chunk, pass) in passes.chain((0..=last).rev().map(|chunk| (chunk, Pass::Backward))) {
            let due = turn(chunk, pass, time);
            time = due + 1;
            first[chunk as usize][pass as usize] = due as f64;
            if pass == Pass::Backward {
                first[chunk as usize][Pass::Weight as usize] = turn(chunk, Pass::Weight, time) as f64;
            }
        }
        Self { period: count as f64, pace: 0.0, first }
    }

    /// When a microbatch may come in.
    pub fn comes_in(&self, microbatch: u64) -> f64 {
        microbatch as f64 * self.pace
    }

    /// Of so few microbatches that each pass has one rank at all times.
    pub fn of_few(stages: u64) -> Self {
        let of_chunk = |chunk: u64| {
            let is_down = f64::from(u8::from(chunk < stages));
            [2.0 + is_down, is_down, is_down]
        };
        Self { period: 0.0, pace: 0.0, first: (0..2 * stages).map(of_chunk).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::order::{Lengths, orders};
    use super::super::timeline::finish;
    use super::super::timeline::tests::{Parts, chain};
    use super::*;
    use shardc_ir::Pipeline;
    use shardc_ir::pipeline::Schedule;

    /// Stages hold what is said, and wait for nothing once the pipeline is full.
    #[test]
    fn passes_in_their_turns_do_not_wait() {
        let lengths = [[1.0, 1.0], [1.3, 0.9], [1.6, 0.8], [1.1, 0.6]];
        let all = (2..=17).flat_map(|stages| held_in_turns(stages).map(|most| (stages, most)));
        for ((stages, most), [backward, weight]) in all.flat_map(|of| lengths.map(|lengths| (of, lengths))) {
            let lengths = Lengths { forward: 1.0, backward, weight };
            let pipeline = Pipeline {
                schedule: Schedule::ZeroBubbleV,
                per_stage: 2,
                in_flight: Some(most),
                ..Pipeline::default()
            };
            let links = chain(&pipeline, stages);
            let finish = |microbatches: u64| {
                let orders = orders(&pipeline, stages, microbatches, &|_| lengths).expect("orders");
                let held = orders.iter().map(|steps| {
                    let taken = |step: &super::super::order::Step| {
                        i64::from(step.pass == Pass::Forward) - i64::from(step.pass == Pass::Weight)
                    };
                    let held = steps.iter().scan(0, |held, step| {
                        *held += taken(step);
                        Some(*held)
                    });
                    held.max().unwrap_or(0)
                });
                assert_eq!(held.max(), Some(most as i64), "{stages} stages");
                finish(&pipeline, &orders, &links, &Parts(lengths)).expect("all run")
            };
            let waits = finish(128) - finish(64) - 128.0 * lengths.all();
            assert!(waits.abs() < 1.0, "{stages} stages of {lengths:?} wait {waits}");
        }
    }
}
