//! What a stage may do for its memory: compute values again, and have some lie away from its devices.
//!
//! Each such choice is a *level*. Those with everything on the devices are in the order of what they cost: between two ways
//! to compute again, more and more of the first blocks go by the one that keeps less. So the first that fits is the one
//! to take. Where none does, values leave by one of some ladders, at each step of which more do: a
//! stage takes the first step that fits of the ladder on which that takes it the least, whatever the others take.

use super::exposed::Within;
use super::problem::{Part, Problem};
use super::{Pins, Recompute, Sums};
use crate::search::away::{ladders, steps};
use crate::search::choice::offload::{Kind, Offload};
use crate::search::estimate::recompute::Menu;
use shardc_ir::plan::Prediction;
use std::ops::Range;

/// One way to compute again, in whatever stages.
pub(super) struct Again {
    pub recompute: Recompute,
    /// As [`Mesh::seen`](super::Mesh::seen): on the slowest device of each set.
    pub paces: Vec<Pace>,
    /// Of its memory, what does not grow with microbatches.
    pub working: f64,
}

/// What a model takes on one kind of devices.
pub(super) struct Pace {
    /// Along the line.
    pub sums: Sums,
    /// If one stage had all of it, without what is exposed of what data ranks say to each other in its passes.
    pub whole: Prediction,
    /// That, if they say anything to each other there.
    pub within: Option<Within>,
}

/// What a stage does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    /// How it computes again.
    pub recompute: Recompute,
    /// Which of the ways to compute again that is.
    pub again: usize,
    /// The place from which on the line goes by the way before that one, if it does.
    pub until: Option<usize>,
    /// What lies away from its devices, if that is not pinned.
    pub offload: Offload,
}

/// The levels that stages may take.
#[derive(Clone, Debug)]
pub(super) struct Levels {
    pub all: Vec<Level>,
    /// Of them, those at which the whole line goes by one way, with everything on the devices.
    whole: Vec<usize>,
    /// Of them, which are the steps of each ladder; before all of these, everything lies on the devices.
    ladders: Vec<Range<usize>>,
}

impl Levels {
    /// Some ways to compute again, with everything on the devices.
    pub fn whole(ways: impl IntoIterator<Item = (usize, Recompute)>) -> Self {
        let level = |(again, recompute)| Level { recompute, again, until: None, offload: Offload::default() };
        let all: Vec<Level> = ways.into_iter().map(level).collect();
        Self { whole: (0..all.len()).collect(), all, ladders: Vec::new() }
    }

    /// All of some ways to compute again, with everything on the devices; and between a way and the next, as far as a menu
    /// goes from block to block there, those at which the first blocks go by that one already. Of blocks, the places where
    /// they begin and their numbers.
    pub fn by_block(ways: &[Recompute], menu: &Menu, blocks: &[(usize, u64)]) -> Self {
        let mut own = Self { all: Vec::new(), whole: Vec::new(), ladders: Vec::new() };
        let (steps, offload) = (|way: &Recompute| menu.steps_of(*way), Offload::default());
        for (again, recompute) in ways.iter().copied().enumerate() {
            let before = again.checked_sub(1).and_then(|before| steps(&ways[before]));
            if let (Some(from), Some(to)) = (before, steps(&recompute))
                && let Some(steps_before) = menu.by_block(from..to)
            {
                let all = blocks.iter().map(|(place, block)| (*place, steps_before(*block)));
                let partly = all.filter(|(_, steps)| (from + 1..to).contains(steps)).map(|(place, steps)| Level {
                    recompute: Recompute::Values(steps),
                    again,
                    until: Some(place),
                    offload,
                });
                own.all.extend(partly);
            }
            own.whole.push(own.all.len());
            own.all.push(Level { recompute, again, until: None, offload });
        }
        own
    }

    /// The same; and with all that is computed again at the last, what leaves by ladders, where there are so many blocks.
    pub fn and_away(mut self, ladders: &[&[Kind]], blocks: u64) -> Self {
        let Some(last) = self.all.last().copied() else { return self };
        for ladder in ladders {
            let from = self.all.len();
            self.all.extend(steps(ladder, blocks).map(|offload| Level { offload, ..last }));
            self.ladders.push(from..self.all.len());
        }
        self
    }

    /// The last.
    pub fn last(&self) -> usize {
        self.all.len().saturating_sub(1)
    }

    /// The last with everything on the devices.
    pub fn last_on_device(&self) -> usize {
        self.ladders.first().map_or(self.all.len(), |ladder| ladder.start).saturating_sub(1)
    }

    /// The last step of the longest ladder.
    pub fn most(&self) -> usize {
        self.ladders.iter().max_by_key(|ladder| ladder.len()).map_or(self.last(), |ladder| ladder.end - 1)
    }
}

/// Which level each stage takes.
#[derive(Clone, Debug)]
pub(super) enum Choice {
    /// The same for all.
    All(usize),
    /// The first that fits, for each.
    Least,
    /// These.
    Named(Vec<usize>),
}

impl Problem<'_> {
    /// What lies away from the devices of a stage at a level.
    pub fn offload(&self, level: usize, stage: usize) -> Offload {
        self.tries.pinned.get(stage).copied().unwrap_or(self.levels.all[level].offload)
    }

    /// The level of a stage with these chunks; nothing if none fits.
    pub fn level(&self, stage: usize, chunks: &[Part]) -> Option<usize> {
        let mesh = self.tries.mesh;
        let room = mesh.rooms[stage].0 as f64;
        let fits = |level: usize, share: f64| {
            mesh.with_unfit || self.memory(level, stage, chunks).total().0 as f64 <= share * room
        };
        match self.choice {
            Choice::All(level) => Some(*level).filter(|level| fits(*level, 1.0)),
            Choice::Named(levels) => levels.get(stage).copied().filter(|level| fits(*level, 1.0)),
            Choice::Least => {
                let Levels { whole, ladders, .. } = self.levels;
                let fits = |level: usize| fits(level, mesh.spare);
                let near = self.known.level.get();
                let stay = || {
                    let near_whole = whole.partition_point(|level| *level < near);
                    let index = first_of(0..whole.len(), near_whole, &|index| fits(whole[index]))?;
                    let from = index.checked_sub(1).map_or(0, |before| whole[before] + 1);
                    // The last is known to fit.
                    first_of(from..whole[index] + 1, near, &|level| level == whole[index] || fits(level))
                };
                let first = |ladder: &Range<usize>| first_of(ladder.clone(), near, &fits);
                let leave = || {
                    let found = ladders.iter().filter_map(first).map(|level| (level, self.taken(level, stage, chunks)));
                    found.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(level, _)| level)
                };
                let found = stay().or_else(leave);
                self.known.level.set(found.unwrap_or(near));
                found
            }
        }
    }

    /// Seconds of a stage for a microbatch, with its part of what is moved once in a step.
    pub fn taken(&self, level: usize, stage: usize, chunks: &[Part]) -> f64 {
        let [each, once] = self.moving(level, stage, chunks);
        let seconds: f64 = chunks.iter().map(|part| self.passes(level, stage, *part).all()).sum();
        seconds + each + once / self.tries.mesh.placed.microbatches as f64
    }
}

/// The first of some levels that fits, which is likely near one: the more leaves, or is computed again, the less is held.
fn first_of(levels: Range<usize>, near: usize, fits: &dyn Fn(usize) -> bool) -> Option<usize> {
    if levels.is_empty() {
        return None;
    }
    let (mut low, mut high) = (levels.start, levels.end);
    // The one that is near, then the one beside it on the side that is left, then in the middle of the rest.
    let (mut next, mut tries) = (near.clamp(low, high - 1), 0);
    while low < high {
        if fits(next) {
            high = next
        } else {
            low = next + 1
        }
        tries += 1;
        next = match tries {
            1 if high == next => high.saturating_sub(1).max(low),
            1 => low,
            _ => low.midpoint(high),
        };
    }
    Some(high).filter(|first| *first < levels.end)
}

/// The ladders that are no part of another.
pub(super) fn longest(is_recomputed: bool, may_leave: bool) -> Vec<&'static [Kind]> {
    let all: Vec<_> = ladders(is_recomputed, may_leave).collect();
    let is_part = |own: &&[Kind]| all.iter().any(|other| other.len() > own.len() && other.starts_with(own));
    all.iter().copied().filter(|own| !is_part(own)).collect()
}

/// What is pinned to lie away from the devices of each of so many stages; empty, if that is nothing.
pub(super) fn pinned(pins: &Pins, stages: u64) -> Vec<Offload> {
    let pinned = pins.offloads().filter(|pinned| !pinned.is_none());
    pinned.map_or(Vec::new(), |pinned| (0..stages).map(|stage| pinned.of(stage)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Between two ways of which a menu goes from the one to the other block by block, each of the first blocks adds a level;
    /// of two that differ by more than that, there is none between.
    #[test]
    fn more_and_more_blocks_keep_less() {
        let menu =
            Menu::of_steps(&[(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2), (0, 3), (1, 3), (2, 3)], &[3, 6, 9]);
        let ways = [Recompute::None, Recompute::Values(3), Recompute::Values(9)];
        let levels = Levels::by_block(&ways, &menu, &[(0, 0), (4, 1), (9, 2)]);
        let all: Vec<_> = levels.all.iter().map(|level| (level.recompute, level.again, level.until)).collect();
        let partly = |steps: u64, place: usize| (Recompute::Values(steps), 1, Some(place));
        let whole = |again: usize| (ways[again], again, None);
        assert_eq!(all, [whole(0), partly(1, 4), partly(2, 9), whole(1), whole(2)]);
        assert_eq!((levels.whole, levels.ladders.len()), (vec![0, 3, 4], 0));
    }

    #[test]
    fn the_first_that_fits_is_found() {
        for near in 0..12 {
            let find = |least: usize| first_of(2..9, near, &|level| level >= least);
            assert_eq!([0, 2, 5, 8, 9].map(find), [Some(2), Some(2), Some(5), Some(8), None]);
        }
        assert_eq!(first_of(3..3, 3, &|_| true), None);
    }
}
