//! How many copies a stage of a pipeline has of what one pass of a chunk leaves for another.
//!
//! There is a copy for each microbatch that is between the two passes at a time, as the allocator counts them
//! ([`stages`](crate::allocate)). A schedule that splits the backward pass holds for the gradients of weights what
//! they read: activations, from where they are made or computed again, and the gradients of what the weights made.

use crate::allocate::common;
use crate::divisors::at_least;
use crate::pipeline::order::{Pass, Step};
use shardc_ir::Pipeline;

/// The copies of what a chunk holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// From the forward pass to the backward pass.
    pub kept: u64,
    /// From the forward pass to the gradients of weights.
    pub lasting: u64,
    /// From the backward pass to the gradients of weights; none, where they are one pass.
    pub awaited: u64,
}

impl Held {
    /// Counts along the orders of all stages, for each of the chunks, of which a copy of each kind has so many `bytes`.
    pub fn of_chunks(pipeline: &Pipeline, orders: &[Vec<Step>], bytes: &[[u64; 3]]) -> Vec<Self> {
        let splits = pipeline.schedule.splits_backward();
        let (mut done, mut held) = (vec![[0u64; 3]; bytes.len()], vec![Self::default(); bytes.len()]);
        for step in orders.iter().flatten() {
            // A copy is taken by the pass that makes it, and is free when the pass that reads it is done.
            let (done, own) = (&mut done[step.chunk as usize], &mut held[step.chunk as usize]);
            let pass = step.pass as usize;
            done[pass] += 1;
            let [forward, backward, weight] = *done;
            match step.pass {
                Pass::Forward => {
                    own.kept = own.kept.max(forward - backward);
                    own.lasting = own.lasting.max(forward - if splits { weight } else { backward });
                }
                Pass::Backward if splits => own.awaited = own.awaited.max(backward - weight),
                _ => {}
            }
        }
        if let Some(first) = held.first_mut() {
            *first = Self { kept: first.lasting, lasting: first.lasting, awaited: 0 };
        }
        // Chunks that follow each other on one stage hand what passes between them over in place.
        let stage = |chunk: usize| pipeline.stage_of(chunk as u32, orders.len() as u64);
        let mut from = 0;
        while from < held.len() {
            let to = (from + 1..held.len()).find(|chunk| stage(*chunk) != stage(from)).unwrap_or(held.len());
            round(&mut held[from..to], &bytes[from..to]);
            from = to;
        }
        held
    }
}

/// Makes the numbers divisors of one, so that few instances of each pass are needed, as the allocator does.
fn round(held: &mut [Held], bytes: &[[u64; 3]]) {
    let taken = |(Held { kept, lasting, awaited }, bytes): (&Held, &[u64; 3])| {
        [(*kept, bytes[0]), (*lasting, bytes[1]), (*awaited, bytes[2])]
    };
    let all = common(&held.iter().zip(bytes).flat_map(taken).collect::<Vec<_>>());
    for Held { kept, lasting, awaited } in held {
        [kept, lasting, awaited].into_iter().for_each(|copies| *copies = at_least(*copies, all));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::order::{Lengths, orders};
    use shardc_ir::pipeline::Schedule;

    #[track_caller]
    fn check(schedule: Schedule, per_stage: u64, expect: &[[u64; 3]]) {
        check_with(Pipeline { schedule, per_stage, ..Pipeline::default() }, expect);
    }

    #[track_caller]
    fn check_with(pipeline: Pipeline, expect: &[[u64; 3]]) {
        let per_stage = pipeline.per_stage;
        let orders = orders(&pipeline, 4, 12, &|_| Lengths::EQUAL).unwrap();
        let held = Held::of_chunks(&pipeline, &orders, &vec![[2, 1, 2]; 4 * per_stage as usize]);
        let held: Vec<[u64; 3]> = held.iter().map(|held| [held.kept, held.lasting, held.awaited]).collect();
        assert_eq!(held, expect);
    }

    #[test]
    fn as_many_microbatches_are_held_as_the_schedule_says() {
        check(Schedule::GPipe, 1, &[[12, 12, 0]; 4]);
        check(Schedule::OneForwardOneBackward, 1, &[[4, 4, 0], [3, 3, 0], [2, 2, 0], [1, 1, 0]]);
        // Stage 0 runs 2 (p - 1) + p chunks ahead.
        let interleaved = [8, 8, 7, 5, 4, 4, 3, 1].map(|copies| [copies, copies, 0]);
        check(Schedule::Interleaved, 2, &interleaved);
    }

    #[test]
    fn split_backward_passes_hold_what_weights_wait_for() {
        // The two in the middle follow each other on one stage: the numbers of both are divisors of one.
        let held = [[8, 8, 0], [6, 12, 3], [6, 6, 4], [4, 8, 4], [4, 4, 4], [3, 6, 3], [2, 3, 2], [1, 2, 2]];
        check(Schedule::ZeroBubbleV, 2, &held);
    }

    #[test]
    fn what_is_in_flight_is_what_a_stage_holds() {
        let pipeline =
            Pipeline { schedule: Schedule::ZeroBubbleV, per_stage: 2, in_flight: Some(5), ..Pipeline::default() };
        let held = [[4, 4, 0], [4, 4, 1], [3, 3, 1], [2, 3, 2], [2, 2, 1], [2, 2, 1], [2, 2, 1], [1, 1, 1]];
        check_with(pipeline, &held);
    }
}
