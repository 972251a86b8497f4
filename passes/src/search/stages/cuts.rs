//! Where a line is worth a cut: the ends of the chunks that are tried.

use super::Problem;
use crate::pipeline::balance::{Shares, balanced};
use crate::pipeline::cut::{Segments, best_cuts};

/// By how much longer a stage is taken to be that does not fit, where cuts are moved.
const UNFIT: f64 = 1000.0;

impl Segments for Problem<'_> {
    fn seconds(&self, chunk: usize, from: usize, to: usize) -> f64 {
        // The memory of several chunks is known only when all are cut: until then the most is taken.
        let last = self.levels.len() - 1;
        let level = match self.pipeline.per_stage {
            1 => self.level(chunk as u64, &[(chunk, from, to)]).unwrap_or(last),
            _ => last,
        };
        let stage = self.pipeline.stage_of(chunk as u32, self.stages) as usize;
        self.sums(level, stage).seconds(from, to) + 2.0 * (self.message(from) + self.message(to))
    }

    fn fits(&self, chunk: usize, from: usize, to: usize) -> bool {
        self.pipeline.per_stage > 1 || self.level(chunk as u64, &[(chunk, from, to)]).is_some()
    }

    fn least(&self, place: usize) -> f64 {
        let paces = self.levels.iter().flat_map(|level| &level.paces);
        paces.map(|pace| pace.sums.seconds(place, place + 1)).fold(f64::INFINITY, f64::min)
    }
}

impl Shares for Problem<'_> {
    fn stage_of(&self, chunk: usize) -> usize {
        self.pipeline.stage_of(chunk as u32, self.stages) as usize
    }

    fn seconds(&self, stage: usize, chunks: &[(usize, usize, usize)]) -> f64 {
        let (level, by) = match self.level(stage as u64, chunks) {
            Some(level) => (level, 1.0),
            None => (self.levels.len() - 1, UNFIT),
        };
        let sums = self.sums(level, stage);
        let of = |(_, from, to): &(usize, usize, usize)| {
            sums.seconds(*from, *to) + 2.0 * (self.message(*from) + self.message(*to))
        };
        let exchanged = self.exchanged(sums, chunks) / self.mesh.placed.microbatches as f64;
        by * (chunks.iter().map(of).sum::<f64>() + exchanged)
    }
}

/// Cuts between blocks alone.
struct BetweenBlocks<'a>(&'a Problem<'a>);

impl Segments for BetweenBlocks<'_> {
    fn seconds(&self, chunk: usize, from: usize, to: usize) -> f64 {
        Segments::seconds(self.0, chunk, from, to)
    }

    fn fits(&self, chunk: usize, from: usize, to: usize) -> bool {
        self.0.is_between(to) && self.0.fits(chunk, from, to)
    }

    fn least(&self, place: usize) -> f64 {
        self.0.least(place)
    }
}

impl Problem<'_> {
    /// Whether a place lies between blocks, or at the end of the line.
    fn is_between(&self, place: usize) -> bool {
        let places = &self.line().places;
        place + 1 == places.len() || self.mesh.line.is_between(places[place])
    }

    /// Where the first chunk begins and each ends, in the ways that are tried. With several chunks a stage: of equal
    /// chunks, and of equal stages; where stages exchange parameters, those of whole blocks too, since what a parameter
    /// is read by at both ends of the line comes together at once or not at all.
    pub(super) fn ends(&self, microbatches: u64) -> Vec<Vec<usize>> {
        let chunks = (self.stages * self.pipeline.per_stage) as usize;
        let (end, rounds) = (self.line().places.len() - 1, microbatches * self.pipeline.per_stage);
        let of = |segments: &dyn Segments| {
            let (_, cuts) = best_cuts(end, chunks, rounds, segments)?;
            Some([0].into_iter().chain(cuts).chain([end]).collect::<Vec<usize>>())
        };
        let mut all: Vec<Vec<usize>> = of(self).into_iter().collect();
        if self.pipeline.per_stage > 1 {
            // Where all places lie between blocks, the cuts would be the same.
            if self.line().has_shared() && !(1..end).all(|place| self.is_between(place)) {
                all.extend(of(&BetweenBlocks(self)));
            }
            let moved: Vec<_> = all.iter().map(|ends| balanced(ends.clone(), self)).collect();
            all.extend(moved);
        }
        all
    }
}
