//! How many copies a stage of a pipeline has of what one pass of a chunk leaves for another.
//!
//! There is a copy for each microbatch that is between the two passes at a time, as the allocator counts them
//! ([`stages`](crate::allocate)). A schedule that splits the backward pass holds for the gradients of weights what
//! they read: activations, from where they are made or computed again, and the gradients of what the weights made.

use crate::allocate::{common, divisor};
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
    /// Counts along the orders of all stages, for each of so many chunks, of which a copy of each kind has so many
    /// `bytes`.
    pub fn of_chunks(pipeline: &Pipeline, orders: &[Vec<Step>], chunks: usize, bytes: [u64; 3]) -> Vec<Self> {
        let splits = pipeline.schedule.splits_backward();
        let (mut done, mut held) = (vec![[0u64; 3]; chunks], vec![Self::default(); chunks]);
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
        held.into_iter().map(|held| held.rounded(bytes)).collect()
    }

    /// The numbers made divisors of one, so that few instances of each pass are needed, as the allocator does.
    fn rounded(self, bytes: [u64; 3]) -> Self {
        let Self { kept, lasting, awaited } = self;
        let all = common(&[(kept, bytes[0]), (lasting, bytes[1]), (awaited, bytes[2])]);
        let round = |copies: u64| divisor(copies, all);
        Self { kept: round(kept), lasting: round(lasting), awaited: round(awaited) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::order::{Lengths, orders};
    use shardc_ir::pipeline::Schedule;

    #[track_caller]
    fn check(schedule: Schedule, per_stage: u64, expect: &[[u64; 3]]) {
        let pipeline = Pipeline { schedule, per_stage, ..Pipeline::default() };
        let orders = orders(&pipeline, 4, 12, Lengths::EQUAL).unwrap();
        let held = Held::of_chunks(&pipeline, &orders, 4 * per_stage as usize, [2, 1, 2]);
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
        let held = [[8, 8, 0], [8, 8, 4], [5, 10, 5], [5, 10, 5], [4, 4, 4], [4, 4, 4], [2, 4, 4], [1, 4, 4]];
        check(Schedule::ZeroBubbleV, 2, &held);
    }
}
