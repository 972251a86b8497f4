//! What a stage may do for its memory: compute values again, and have some lie away from its devices.
//!
//! Each such choice is a *level*. Those with everything on the devices are in the order of what they cost, so the first
//! that fits is the one to take. Where none does, values leave by one of some ladders, at each step of which more do: a
//! stage takes the first step that fits of the ladder on which that takes it the least, whatever the others take.

use super::problem::{Part, Problem};
use super::{Pins, Recompute, Sums};
use crate::search::away::{ladders, steps};
use crate::search::offload::{Kind, Offload};
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
    /// If one stage had all of it.
    pub whole: Prediction,
}

/// What a stage does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    /// Which of the ways to compute again.
    pub again: usize,
    /// What lies away from its devices, if that is not pinned.
    pub offload: Offload,
}

impl Level {
    /// With everything on the devices.
    pub fn on_device(again: usize) -> Self {
        Self { again, offload: Offload::default() }
    }
}

/// The levels that stages may take.
#[derive(Clone, Debug)]
pub(super) struct Levels {
    pub all: Vec<Level>,
    /// Of them, which are the steps of each ladder; before all of these, everything lies on the devices.
    ladders: Vec<Range<usize>>,
}

impl Levels {
    /// These, with everything on the devices.
    pub fn on_device(all: impl IntoIterator<Item = usize>) -> Self {
        Self { all: all.into_iter().map(Level::on_device).collect(), ladders: Vec::new() }
    }

    /// What is computed again in some of so many ways; and with all of that, what leaves by ladders, where there are so
    /// many blocks.
    pub fn new(ways: usize, ladders: &[&[Kind]], blocks: u64) -> Self {
        let mut own = Self::on_device(0..ways);
        for ladder in ladders {
            let (again, from) = (ways.saturating_sub(1), own.all.len());
            own.all.extend(steps(ladder, blocks).map(|offload| Level { again, offload }));
            own.ladders.push(from..own.all.len());
        }
        own
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
                let Levels { all, ladders } = self.levels;
                let fits = |level: usize| fits(level, mesh.spare);
                let stay = ladders.first().map_or(all.len(), |ladder| ladder.start);
                let first = |ladder: &Range<usize>| first_of(ladder, &fits);
                let leave = || {
                    let found = ladders.iter().filter_map(first).map(|level| (level, self.taken(level, stage, chunks)));
                    found.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(level, _)| level)
                };
                (0..stay).find(|level| fits(*level)).or_else(leave)
            }
        }
    }

    /// Seconds of a stage for a microbatch, with its part of what is moved once in a step.
    pub fn taken(&self, level: usize, stage: usize, chunks: &[Part]) -> f64 {
        let (sums, [each, once]) = (self.sums(level, stage), self.moving(level, stage, chunks));
        let seconds: f64 = chunks.iter().map(|(_, from, to)| sums.seconds(*from, *to)).sum();
        seconds + each + once / self.tries.mesh.placed.microbatches as f64
    }
}

/// The first step of a ladder that fits: the more leaves, the less is held.
fn first_of(ladder: &Range<usize>, fits: &dyn Fn(usize) -> bool) -> Option<usize> {
    let (mut low, mut high) = (ladder.start, ladder.end.checked_sub(1).filter(|last| fits(*last))?);
    while low < high {
        let middle = low.midpoint(high);
        if fits(middle) { high = middle } else { low = middle + 1 }
    }
    Some(high)
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
