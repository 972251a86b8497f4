//! Zero-bubble V: two chunks a stage, down the pipeline and up again, of which the gradients of weights come later.
//!
//! A microbatch follows the one before by a *period*, in which a stage does all it has to do of one. In a steady pipeline
//! every pass of a microbatch begins a fixed *hop* after the same pass on the stage before (Qi et al., "Pipeline parallelism
//! with controllable memory", 2024, section 3). Half a period for a hop lets the passes of all stages be in the same
//! cyclic order, so none ever waits for another, however long its parts are; then a stage holds what forward passes leave
//! of two chunks for each stage there is. Where it is to hold less, hops are as much shorter, and stages wait a little.
//!
//! While the pipeline fills, the first stage could take in microbatches faster than the others pass them on, and more would
//! be held than ever later. So they come in as fast as forward passes of both chunks let a stage pass them on, and of what a
//! stage may hold some is left for the way up ([`Pipeline::on_the_way_down`]), on which no microbatch waits for a later one.
//!
//! So each stage begins, when it is free, of the passes that are ready the one that is due first; of fewer microbatches than
//! stages, which are never steady, a backward pass before a forward pass, and that on the way up first. Gradients of weights
//! follow the backward pass closely as long as there are other passes; when forward passes are through, they fill the gaps
//! in which a stage waits for backward passes, as far as memory is there for what they read.

use super::agenda::Agenda;
use super::order::{Lengths, Pass, Step};
use shardc_ir::Pipeline;

/// Of how many chunks the gradients of weights are delayed before forward passes are through.
pub const CLOSE: u64 = 2;

/// When passes are due.
struct Due {
    period: f64,
    /// After what time the next microbatch may come in.
    pace: f64,
    /// Per chunk and pass, of the first microbatch.
    first: Vec<[f64; 3]>,
}

impl Due {
    /// In a steady pipeline, of chunks that take so long on average, where a stage holds so many.
    fn steady(stages: u64, lengths: &[[f64; 3]], in_flight: u64) -> Self {
        let mean = |pass: Pass| {
            let all = lengths.iter().map(|of| of[pass as usize]);
            all.sum::<f64>() / lengths.len().max(1) as f64
        };
        let [forward, backward, weight] = [Pass::Forward, Pass::Backward, Pass::Weight].map(mean);
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

    /// Of so few microbatches that each pass has one rank at all times.
    fn of_few(stages: u64) -> Self {
        let of_chunk = |chunk: u64| {
            let is_down = f64::from(u8::from(chunk < stages));
            [2.0 + is_down, is_down, is_down]
        };
        Self { period: 0.0, pace: 0.0, first: (0..2 * stages).map(of_chunk).collect() }
    }

    /// When a step is due.
    fn of(&self, Step { chunk, pass, microbatch }: Step) -> f64 {
        microbatch as f64 * self.period + self.first[chunk as usize][pass as usize]
    }

    /// When a microbatch may come in.
    fn comes_in(&self, microbatch: u64) -> f64 {
        microbatch as f64 * self.pace
    }
}

/// The steps of every stage.
///
/// # Errors
/// A bug, if some are left over.
pub(super) fn orders(
    pipeline: &Pipeline,
    stages: u64,
    microbatches: u64,
    lengths: &dyn Fn(u32) -> Lengths,
) -> Result<Vec<Vec<Step>>, String> {
    let (last, most) = ((2 * stages - 1) as u32, pipeline.most_in_flight(stages));
    let (most_down, most_delayed) = (pipeline.on_the_way_down(stages), pipeline.most_delayed(stages));
    let passes = [Pass::Forward, Pass::Backward, Pass::Weight];
    let of_chunk = |chunk: u32| passes.map(|pass| lengths(chunk).of(pipeline.schedule, chunk, pass));
    let lengths: Vec<[f64; 3]> = (0..=last).map(of_chunk).collect();
    let due = if microbatches < stages { Due::of_few(stages) } else { Due::steady(stages, &lengths, most_down) };
    // Per chunk and pass, how many microbatches were begun, and how many are done.
    let mut begun = vec![[0u64; 3]; 2 * stages as usize];
    let mut done = begun.clone();
    let mut is_running = vec![false; stages as usize];
    let mut orders: Vec<Vec<Step>> = vec![Vec::new(); stages as usize];
    let mut agenda = Agenda::default();
    // The stages that may begin something: those that are free, those that wait for what is done, and the first when
    // another microbatch may come in.
    let (mut now, mut ends, mut touched) = (0.0, Vec::new(), (0..stages as u32).collect::<Vec<_>>());
    loop {
        for stage in touched.drain(..) {
            if is_running[stage as usize] {
                continue;
            }
            let (down, up) = (stage, last - stage);
            let count = |of: &[[u64; 3]], chunk: u32, pass: Pass| of[chunk as usize][pass as usize];
            let held = |chunk: u32| count(&begun, chunk, Pass::Forward) - count(&done, chunk, Pass::Weight);
            let is_ready = |chunk: u32, pass: Pass| {
                let waits = match pass {
                    Pass::Forward if chunk == 0 => microbatches,
                    Pass::Forward => count(&done, chunk - 1, Pass::Forward),
                    Pass::Backward if chunk == last => count(&done, chunk, Pass::Forward),
                    Pass::Backward => count(&done, chunk + 1, Pass::Backward),
                    Pass::Weight => count(&done, chunk, Pass::Backward),
                };
                let next = count(&begun, chunk, pass);
                let may_begin = match pass {
                    Pass::Forward if chunk == up => held(down) + held(up) < most,
                    Pass::Forward => held(down) + held(up) < most_down && (chunk > 0 || due.comes_in(next) <= now),
                    Pass::Backward | Pass::Weight => true,
                };
                may_begin && next < waits
            };
            let is_through = count(&begun, down, Pass::Forward) == microbatches;
            let delayed = if is_through { most_delayed } else { most_delayed.min(CLOSE) };
            let waiting = |chunk: u32| count(&begun, chunk, Pass::Backward) - count(&begun, chunk, Pass::Weight);
            let is_late = waiting(down) + waiting(up) >= delayed;
            let steps = [up, down]
                .into_iter()
                .flat_map(|chunk| passes.map(|pass| Step { chunk, pass, microbatch: count(&begun, chunk, pass) }));
            let ready = steps.filter(|step| is_ready(step.chunk, step.pass));
            let rank = |step: &Step| ((step.pass == Pass::Weight) != is_late, due.of(*step));
            let first = ready.min_by(|a, b| {
                let (a, b) = (rank(a), rank(b));
                a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
            });
            if let Some(step) = first {
                let Step { chunk, pass, .. } = step;
                orders[stage as usize].push(step);
                begun[chunk as usize][pass as usize] += 1;
                agenda.add(now + lengths[chunk as usize][pass as usize], (stage, chunk, Some(pass)));
                is_running[stage as usize] = true;
                let next = due.comes_in(begun[0][Pass::Forward as usize]);
                if (chunk, pass) == (0, Pass::Forward) && next > now {
                    agenda.add(next, (stage, chunk, None));
                }
            }
        }
        let Some(next) = agenda.next(&mut ends) else { break };
        now = next;
        for (stage, chunk, pass) in ends.drain(..) {
            touched.push(stage);
            let Some(pass) = pass else { continue };
            is_running[stage as usize] = false;
            done[chunk as usize][pass as usize] += 1;
            let waits = match pass {
                Pass::Forward => (chunk < last).then(|| chunk + 1),
                Pass::Backward => chunk.checked_sub(1),
                Pass::Weight => None,
            };
            touched.extend(waits.map(|chunk| chunk.min(last - chunk)));
        }
    }
    match done.iter().flatten().all(|done| *done == microbatches) {
        true => Ok(orders),
        false => Err(format!("schedule zbv leaves {stages} stages waiting for each other")),
    }
}
