//! The steps of every stage, in the order of the schedule.
//!
//! A *step* is one pass of one chunk over one microbatch.
//!
//! * GPipe runs all forward passes, then all backward passes.
//! * 1F1B runs some forward passes ahead ([`Pipeline::ahead`]), then one forward and one backward pass in turns.
//! * Interleaved 1F1B runs any number of microbatches, in [rounds](Pipeline::rounds) of at least as many as there are
//!   stages: a round passes through one chunk of a stage before it passes through the next.
//! * Zero-bubble V makes its order itself ([`zero_bubble`]).
//!
//! The plan says how many chunks a stage has in flight ([`Pipeline::in_flight`]). With more of them stages wait less,
//! for messages or for each other, and need more memory.
//!
//! Invariants of every order: each stage runs each pass of its chunks once per microbatch, microbatches in their order;
//! and if every stage runs its steps as soon as it can, all of them are run: no step waits for one that comes later.

use super::zero_bubble;
use shardc_ir::pipeline::{Length, Pipeline, Schedule};
use std::ops::{Add, Range};

/// Which part of a chunk's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// The backward pass; without the gradients of weights, if the schedule splits it.
    Backward,
    /// The gradients of weights that no other chunk waits for.
    Weight,
}

impl Pass {
    /// Every pass, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::Weight];

    /// The backward pass for the gradients of weights, which come after it; else itself.
    pub fn before_weights(self) -> Self {
        if self == Self::Weight { Self::Backward } else { self }
    }
}

/// One pass of one chunk over one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step {
    /// The chunk.
    pub chunk: u32,
    /// What of it.
    pub pass: Pass,
    /// The microbatch.
    pub microbatch: u64,
}

/// How long the parts of a microbatch are beside each other, on average over the chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    /// The forward pass.
    pub forward: f64,
    /// The backward pass without the gradients of weights.
    pub backward: f64,
    /// The gradients of weights.
    pub weight: f64,
}

impl From<&Length> for Lengths {
    fn from(Length { forward, backward, weight, .. }: &Length) -> Self {
        [forward, backward, weight].map(|part| *part as f64).into()
    }
}

impl From<[f64; 3]> for Lengths {
    fn from([forward, backward, weight]: [f64; 3]) -> Self {
        Self { forward, backward, weight }
    }
}

impl Add for Lengths {
    type Output = Self;

    fn add(self, Self { forward, backward, weight }: Self) -> Self {
        [self.forward + forward, self.backward + backward, self.weight + weight].into()
    }
}

impl Lengths {
    /// All as long as each other.
    pub const EQUAL: Self = Self { forward: 1.0, backward: 1.0, weight: 1.0 };

    /// The whole microbatch.
    pub fn all(self) -> f64 {
        self.forward + self.backward + self.weight
    }

    /// What parts of a microbatch the three are.
    pub fn shares(self) -> [f64; 3] {
        [self.forward, self.backward, self.weight].map(|part| part / self.all().max(f64::MIN_POSITIVE))
    }

    /// Of a pass of a chunk. No chunk waits for what the first one does in its backward pass: where a schedule splits
    /// it, all of it is one with its gradients of weights.
    pub fn of(self, schedule: Schedule, chunk: u32, pass: Pass) -> f64 {
        match (pass, schedule.splits_backward(), chunk) {
            (Pass::Forward, ..) => self.forward,
            (Pass::Backward, false, _) | (Pass::Weight, true, 0) => self.backward + self.weight,
            (Pass::Backward, true, 0) | (Pass::Weight, false, _) => 0.0,
            (Pass::Backward, true, _) => self.backward,
            (Pass::Weight, true, _) => self.weight,
        }
    }
}

/// The steps of every stage.
///
/// # Errors
/// A bug, if steps of zero-bubble V are left over.
pub fn orders(
    pipeline: &Pipeline,
    stages: u64,
    microbatches: u64,
    lengths: &dyn Fn(u32) -> Lengths,
) -> Result<Vec<Vec<Step>>, String> {
    let (p, m) = (stages, microbatches);
    match pipeline.schedule {
        Schedule::GPipe => Ok((0..p).map(|stage| one_chunk(stage, m, m)).collect()),
        Schedule::OneForwardOneBackward => {
            Ok((0..p).map(|stage| one_chunk(stage, pipeline.ahead(stage, p).min(m), m)).collect())
        }
        Schedule::Interleaved => Ok(interleaved(pipeline, p, m)),
        Schedule::ZeroBubbleV => zero_bubble::orders(pipeline, p, m, lengths),
    }
}

/// `ahead` forward passes, then one forward and one backward in turns, then the backward passes that are left.
fn one_chunk(stage: u64, ahead: u64, microbatches: u64) -> Vec<Step> {
    let step = |pass, microbatch| Step { chunk: stage as u32, pass, microbatch };
    let mut steps: Vec<Step> = (0..ahead).map(|m| step(Pass::Forward, m)).collect();
    for m in ahead..microbatches {
        steps.push(step(Pass::Forward, m));
        steps.push(step(Pass::Backward, m - ahead));
    }
    steps.extend((microbatches - ahead..microbatches).map(|m| step(Pass::Backward, m)));
    steps
}

/// Narayanan et al., 2021, section 2.2: microbatches in [rounds](Pipeline::rounds), each through every chunk of the stage
/// before the next one begins.
fn interleaved(pipeline: &Pipeline, stages: u64, microbatches: u64) -> Vec<Vec<Step>> {
    let (turns, rounds) = (pipeline.per_stage, pipeline.rounds(stages, microbatches));
    let begin = |round: u64| (u128::from(round) * u128::from(microbatches) / u128::from(rounds)) as u64;
    // Chunk and microbatch of one pass after the other, of the first stage.
    let passes = |pass: Pass| {
        let of_round = move |round: u64| (0..turns).map(move |turn| (turn, begin(round)..begin(round + 1)));
        let of_turn = move |(turn, round): (u64, Range<u64>)| {
            let turn = if pass == Pass::Forward { turn } else { turns - 1 - turn };
            round.map(move |microbatch| Step { chunk: (turn * stages) as u32, pass, microbatch })
        };
        (0..rounds).flat_map(of_round).flat_map(of_turn).collect::<Vec<_>>()
    };
    let (forward, backward) = (passes(Pass::Forward), passes(Pass::Backward));
    let of_stage = |stage: u64| {
        let here = |step: &Step| Step { chunk: step.chunk + stage as u32, ..*step };
        let ahead = (stages - stage - 1) * 2 + (turns - 1) * microbatches.div_ceil(rounds);
        let (first, rest) = forward.split_at(forward.len().min(ahead as usize));
        let (beside, last) = backward.split_at(rest.len());
        let in_turns = rest.iter().zip(beside).flat_map(|(forward, backward)| [forward, backward]);
        first.iter().chain(in_turns).chain(last).map(here).collect()
    };
    (0..stages).map(of_stage).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn pipeline(schedule: Schedule, per_stage: u64) -> Pipeline {
        Pipeline { schedule, per_stage, ..Pipeline::default() }
    }

    fn text(steps: &[Step]) -> String {
        let name = |step: &Step| match step.pass {
            Pass::Forward => format!("F{}.{}", step.chunk, step.microbatch),
            Pass::Backward => format!("B{}.{}", step.chunk, step.microbatch),
            Pass::Weight => format!("W{}.{}", step.chunk, step.microbatch),
        };
        steps.iter().map(name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn stages_run_as_the_schedules_say() {
        let order = |schedule, per_stage, stage: usize, stages, microbatches| {
            text(&orders(&pipeline(schedule, per_stage), stages, microbatches, &|_| Lengths::EQUAL).unwrap()[stage])
        };
        use Schedule::{GPipe, Interleaved, OneForwardOneBackward};
        assert_eq!(order(GPipe, 1, 0, 2, 3), "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2");
        assert_eq!(order(OneForwardOneBackward, 1, 0, 2, 3), "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2");
        assert_eq!(order(OneForwardOneBackward, 1, 1, 2, 3), "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2");
        assert_eq!(
            order(Interleaved, 2, 1, 2, 4),
            "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
        );
        // Three make one round; five one of two and one of three, for the larger of which passes run ahead.
        assert_eq!(order(Interleaved, 2, 1, 2, 3), "F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 B1.0 B1.1 B1.2");
        assert_eq!(
            order(Interleaved, 2, 1, 2, 5),
            "F1.0 F1.1 F3.0 F3.1 B3.0 F1.2 B3.1 F1.3 B1.0 F1.4 B1.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4 B1.2 B1.3 B1.4"
        );
    }

    /// Every step once, each after what it waits for: a stage that waits for ever has a step that never runs.
    #[test]
    fn every_order_can_be_run() {
        let all =
            Schedule::ALL.into_iter().flat_map(|schedule| schedule.usual_chunks().iter().map(move |n| (schedule, *n)));
        for (schedule, per_stage) in all.chain([(Schedule::Interleaved, 3)]) {
            let sizes = [(2, 2), (2, 6), (3, 3), (4, 12), (5, 10), (2, 3), (4, 2), (4, 9), (5, 14), (3, 16), (16, 48)];
            let longer = Lengths { backward: 1.7, weight: 0.6, ..Lengths::EQUAL };
            let in_flight = match schedule {
                Schedule::ZeroBubbleV => &[None, Some(2), Some(3)][..],
                Schedule::Interleaved => &[None, Some(1), Some(20), Some(1000)],
                Schedule::OneForwardOneBackward => &[None, Some(7), Some(9), Some(1000)],
                Schedule::GPipe => &[None],
            };
            let all = sizes.into_iter().flat_map(|size| [(size, Lengths::EQUAL), (size, longer)]);
            for (((stages, microbatches), lengths), in_flight) in
                all.flat_map(|case| in_flight.iter().map(move |chunks| (case, *chunks)))
            {
                let delayed = in_flight.filter(|_| schedule.splits_backward());
                let pipeline = Pipeline { in_flight, delayed, ..pipeline(schedule, per_stage) };
                let orders = orders(&pipeline, stages, microbatches, &|_| lengths).unwrap();
                let chunks = (stages * per_stage) as u32;
                let mut done: BTreeSet<Step> = BTreeSet::new();
                let mut at = vec![0; orders.len()];
                loop {
                    let before = done.len();
                    for (stage, steps) in orders.iter().enumerate() {
                        while let Some(step) = steps.get(at[stage]) {
                            assert_eq!(pipeline.stage_of(step.chunk, stages), stage as u64);
                            let waits = match step.pass {
                                Pass::Forward => step.chunk.checked_sub(1).map(|chunk| Step { chunk, ..*step }),
                                Pass::Backward if step.chunk + 1 == chunks => {
                                    Some(Step { pass: Pass::Forward, ..*step })
                                }
                                Pass::Backward => Some(Step { chunk: step.chunk + 1, ..*step }),
                                Pass::Weight => Some(Step { pass: Pass::Backward, ..*step }),
                            };
                            if waits.is_some_and(|step| !done.contains(&step)) {
                                break;
                            }
                            assert!(done.insert(*step), "{step:?} twice");
                            at[stage] += 1;
                        }
                    }
                    if done.len() == before {
                        break;
                    }
                }
                let passes = if schedule.splits_backward() { 3 } else { 2 };
                assert_eq!(done.len() as u64, u64::from(chunks) * microbatches * passes, "{schedule:?} {stages}");
            }
        }
    }
}
