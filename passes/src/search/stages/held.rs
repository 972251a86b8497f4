//! How many copies a stage of a pipeline has of what one pass of a chunk leaves for another.
//!
//! There is a copy for each microbatch that is between the two passes at a time, as the allocator counts them
//! ([`stages`](crate::allocate)). A schedule that splits the backward pass holds for the gradients of weights what
//! they read: activations, from where they are made or computed again, and the gradients of what the weights made.
//!
//! What passes between stages has copies at both [ends](Ends): of what is made until the other stage is in the step before
//! the one that reads it, of what came until that is done.

use super::step::chain;
use crate::allocate::{common, under_way};
use crate::divisors::at_least;
use crate::pipeline::order::{Lengths, Pass, Step};
use crate::pipeline::timeline::{Durations, Event, Message, timeline};
use rustc_hash::FxHashMap;
use shardc_ir::Pipeline;
use shardc_ir::pipeline::{Length, Schedule};

/// The copies of what a chunk holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// From the forward pass to the backward pass.
    pub kept: u64,
    /// From the forward pass to the gradients of weights.
    pub lasting: u64,
    /// From the backward pass to the gradients of weights; none, where they are one pass.
    pub awaited: u64,
    /// Of what passes between it and chunks of other stages.
    pub ends: Ends,
}

impl Held {
    /// Counts along the orders of all stages, for each of the chunks, of which a copy of each kind has so many `bytes`, and
    /// a message the last of these; messages have such ends.
    pub fn of_chunks(pipeline: &Pipeline, orders: &[Vec<Step>], bytes: &[[u64; 4]], ends: &[Ends]) -> Vec<Self> {
        let splits = pipeline.schedule.splits_backward();
        let (mut done, mut held) = (vec![[0u64; 3]; bytes.len()], vec![Self::default(); bytes.len()]);
        held.iter_mut().zip(ends).for_each(|(held, ends)| held.ends = *ends);
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
            *first = Self { kept: first.lasting, awaited: 0, ..*first };
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

    /// All numbers, each with its kind.
    fn copies(&mut self) -> [(&mut u64, usize); 7] {
        let Self { kept, lasting, awaited, ends: Ends { comes: [a, b], goes: [c, d] } } = self;
        [(kept, 0), (lasting, 1), (awaited, 2), (a, 3), (b, 3), (c, 3), (d, 3)]
    }
}

/// Makes the numbers divisors of one, so that few instances of each pass are needed, as the allocator does.
fn round(held: &mut [Held], bytes: &[[u64; 4]]) {
    let taken = |(held, bytes): (&mut Held, &[u64; 4])| held.copies().map(|(copies, kind)| (*copies, bytes[kind]));
    let all = common(&held.iter_mut().zip(bytes).flat_map(taken).collect::<Vec<_>>());
    held.iter_mut().flat_map(Held::copies).for_each(|(copies, _)| *copies = at_least(*copies, all));
}

/// The copies of what a chunk receives from chunks of other stages, and of what it sends them: of the forward pass, and of
/// the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    pub comes: [u64; 2],
    pub goes: [u64; 2],
}

/// Passes of chunks that are as long as each other, and messages that take no time.
struct Equal(Schedule);

impl Durations for Equal {
    fn pass(&self, chunk: u32, pass: Pass) -> f64 {
        Lengths::EQUAL.of(self.0, chunk, pass)
    }

    fn message(&self, _: usize) -> f64 {
        0.0
    }
}

impl Ends {
    /// Counts them where stages meet in the order of a run of these steps.
    pub fn of_chunks(pipeline: &Pipeline, orders: &[Vec<Step>]) -> Option<Vec<Self>> {
        let stages = orders.len() as u64;
        let lengths =
            vec![Length { forward: 1, backward: 1, weight: 1, message: 0 }; (stages * pipeline.per_stage) as usize];
        let links = chain(pipeline, stages, &lengths);
        let run = timeline(pipeline, orders, &links, &Equal(pipeline.schedule))?;
        let mut all = vec![Self::default(); lengths.len()];
        for events in &run.events {
            let times = Times::of(events, lengths.len());
            for (link, of) in links.iter().enumerate() {
                for (is_send, (chunk, pass)) in [(false, of.to), (true, of.from)] {
                    let own = &mut all[chunk as usize];
                    let copies = if is_send { &mut own.goes } else { &mut own.comes };
                    copies[pass as usize] = copies[pass as usize].max(times.under_way((link, is_send), (chunk, pass)));
                }
            }
        }
        Some(all)
    }
}

/// When a stage does what, as indices of its events.
struct Times {
    /// Per pass of a chunk, and microbatch.
    steps: Vec<Vec<usize>>,
    /// Per link, and whether it is sent, and microbatch.
    messages: FxHashMap<(usize, bool), Vec<usize>>,
}

impl Times {
    fn of(events: &[Event], chunks: usize) -> Self {
        let mut own = Self { steps: vec![Vec::new(); 2 * chunks], messages: FxHashMap::default() };
        for (at, event) in events.iter().enumerate() {
            // Microbatches of one pass come in their order, and so do their messages.
            let mut note =
                |Message { link, is_send, .. }: &Message| own.messages.entry((*link, *is_send)).or_default().push(at);
            match event {
                Event::Exchange(messages) => messages.iter().for_each(note),
                Event::Step(step, beside) => {
                    beside.iter().for_each(|beside| note(&beside.message));
                    if step.pass != Pass::Weight {
                        own.steps[2 * step.chunk as usize + step.pass as usize].push(at);
                    }
                }
            }
        }
        own
    }

    /// Of how many microbatches there is what passes one end of a link, which a pass of a chunk makes or reads.
    fn under_way(&self, end: (usize, bool), (chunk, pass): (u32, Pass)) -> u64 {
        let Some(messages) = self.messages.get(&end) else { return 0 };
        let steps = &self.steps[2 * chunk as usize + pass as usize];
        let spans = steps.iter().zip(messages).map(|(step, message)| (*step.min(message), *step.max(message)));
        under_way(&spans.collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::order::orders;

    #[track_caller]
    fn check(schedule: Schedule, per_stage: u64, expect: &[[u64; 3]]) {
        check_with(Pipeline { schedule, per_stage, ..Pipeline::default() }, expect);
    }

    #[track_caller]
    fn check_with(pipeline: Pipeline, expect: &[[u64; 3]]) {
        let per_stage = pipeline.per_stage;
        let orders = orders(&pipeline, 4, 12, &|_| Lengths::EQUAL).unwrap();
        let held = Held::of_chunks(&pipeline, &orders, &vec![[2, 1, 2, 0]; 4 * per_stage as usize], &[]);
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

    #[test]
    fn what_passes_between_stages_has_copies_at_both_ends() {
        let ends = |schedule: Schedule, per_stage: u64, in_flight: Option<u64>| {
            let pipeline = Pipeline { schedule, per_stage, in_flight, ..Pipeline::default() };
            let orders = orders(&pipeline, 4, 8, &|_| Lengths::EQUAL).unwrap();
            let ends = Ends::of_chunks(&pipeline, &orders).unwrap();
            // Nothing comes to the first chunk, and nothing back to the last; what comes is read in the next step.
            let last = ends.len() - 1;
            let none = [ends[0].comes[0], ends[0].goes[1], ends[last].comes[1], ends[last].goes[0]];
            assert_eq!(none, [0; 4], "{schedule:?}");
            assert!(ends.iter().flat_map(|of| of.comes).all(|copies| copies <= 2), "{schedule:?}: {ends:?}");
            ends
        };
        ends(Schedule::OneForwardOneBackward, 1, None);
        ends(Schedule::ZeroBubbleV, 2, None);
        // The first stage has all of a round to do before it reads what the last one made of its first microbatch.
        let [few, many] = [None, Some(15)].map(|in_flight| ends(Schedule::Interleaved, 2, in_flight));
        assert!(many[3].goes[0] >= few[3].goes[0] + 3 && many[4].goes[1] > few[4].goes[1], "{few:?} {many:?}");
    }
}
