//! Where a line is worth a cut: the ends of the chunks that are tried.

use super::levels::Choice;
use super::problem::{Part, Problem};
use crate::pipeline::balance::{Shares, balanced};
use crate::pipeline::cut::{Segments, best_cuts};
use crate::search::measure::COMPARED;

/// By how much longer a stage is taken to be that does not fit, where cuts are moved.
const UNFIT: f64 = 1000.0;

/// A chunk of which a stage has no other, or of which it is not known yet what others it has.
#[derive(Clone, Copy)]
pub(super) struct Alone {
    /// The level of the stage, if one fits.
    level: Option<usize>,
    /// What it takes at that level, or at the most without: of a microbatch, and once in a step.
    seconds: f64,
    once: f64,
}

impl Segments for Problem<'_> {
    fn seconds(&self, chunk: usize, from: usize, to: usize) -> f64 {
        self.alone((chunk, from, to)).seconds
    }

    fn once(&self, chunk: usize, from: usize, to: usize) -> f64 {
        self.alone((chunk, from, to)).once
    }

    fn fits(&self, chunk: usize, from: usize, to: usize) -> bool {
        self.tries.pipeline.per_stage > 1 || self.alone((chunk, from, to)).level.is_some()
    }

    fn least(&self, place: usize) -> f64 {
        let paces = self.agains.iter().flat_map(|again| &again.paces);
        paces.map(|pace| pace.sums.seconds(place, place + 1)).fold(f64::INFINITY, f64::min)
    }

    fn cut(&self, chunk: usize) -> f64 {
        self.lost_at_least(chunk)
    }
}

impl Shares for Problem<'_> {
    fn stage_of(&self, chunk: usize) -> usize {
        self.tries.pipeline.stage_of(chunk as u32, self.tries.stages) as usize
    }

    fn seconds(&self, stage: usize, chunks: &[Part]) -> f64 {
        if let Some(known) = self.known.stages.borrow().get(chunks) {
            return *known;
        }
        let (level, by) = match self.level(stage, chunks) {
            Some(level) => (level, 1.0),
            None => (self.levels.last(), UNFIT),
        };
        let lost = |part: &Part| self.lost(*part);
        let exchanged = self.exchanged(chunks, 0.0) / self.tries.mesh.placed.microbatches as f64;
        let seconds = by * (self.taken(level, stage, chunks) + chunks.iter().map(lost).sum::<f64>() + exchanged);
        self.known.stages.borrow_mut().insert(chunks.to_vec(), seconds);
        seconds
    }
}

/// Where chunks end that take the same share of the whole, each at the place that is nearest.
fn equal(end: usize, chunks: usize, segments: &dyn Segments) -> Option<Vec<usize>> {
    let each: Vec<f64> = (0..end).map(|place| segments.least(place)).collect();
    let whole: f64 = each.iter().sum();
    let (mut ends, mut passed) = (vec![0], 0.0);
    for (place, seconds) in each.into_iter().enumerate() {
        let cut = ends.len();
        if cut == chunks {
            break;
        }
        let share = whole * cut as f64 / chunks as f64;
        let is_nearest = share - passed <= passed + seconds - share;
        // Each chunk behind this one needs a place.
        let is_last = end - place == chunks - cut;
        if place > ends[cut - 1] && (is_nearest || is_last) {
            ends.push(place);
        }
        passed += seconds;
    }
    ends.push(end);
    (ends.len() == chunks + 1).then_some(ends)
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

    fn cut(&self, chunk: usize) -> f64 {
        self.0.cut(chunk)
    }
}

/// Stages that are weighed as if some took longer.
struct Longer<'a> {
    problem: &'a Problem<'a>,
    /// By how many seconds of one microbatch a stage with these chunks does.
    by: &'a dyn Fn(usize, &[Part]) -> f64,
}

impl Segments for Longer<'_> {
    fn seconds(&self, chunk: usize, from: usize, to: usize) -> f64 {
        Segments::seconds(self.problem, chunk, from, to)
    }

    fn fits(&self, chunk: usize, from: usize, to: usize) -> bool {
        self.problem.fits(chunk, from, to)
    }

    fn least(&self, place: usize) -> f64 {
        self.problem.least(place)
    }

    fn cut(&self, chunk: usize) -> f64 {
        self.problem.cut(chunk)
    }
}

impl Shares for Longer<'_> {
    fn stage_of(&self, chunk: usize) -> usize {
        self.problem.stage_of(chunk)
    }

    fn seconds(&self, stage: usize, chunks: &[Part]) -> f64 {
        Shares::seconds(self.problem, stage, chunks) + (self.by)(stage, chunks)
    }
}

/// The seconds outside of the loop from which on cuts are moved by them as well, as a share of those in it.
const OUTSIDE: f64 = 0.01;

impl Problem<'_> {
    /// A chunk by itself, found once: cuts are weighed against each other many times. The memory of several of a stage is
    /// known only when all are cut: until then as much is computed again as may be, with nothing moved for it.
    fn alone(&self, part: Part) -> Alone {
        // Everything about a chunk is asked at once.
        if let Some((_, known)) = self.known.latest.get().filter(|(latest, _)| *latest == part) {
            return known;
        }
        let known = self.known.alone.borrow().get(&part).copied();
        let alone = known.unwrap_or_else(|| self.weighed(part));
        self.known.latest.set(Some((part, alone)));
        alone
    }

    fn weighed(&self, part: Part) -> Alone {
        let ((chunk, ..), parts) = (part, [part]);
        let stage = self.stage_of(chunk);
        let has_one = self.tries.pipeline.per_stage == 1;
        let level = has_one.then(|| self.level(stage, &parts)).flatten();
        let taken = level.unwrap_or(if has_one { self.levels.last() } else { self.levels.last_on_device() });
        let [each, once] = self.moving(taken, stage, &parts);
        let seconds = self.passes(taken, stage, part).all() + self.lost(part) + each;
        let alone = Alone { level, seconds, once };
        self.known.alone.borrow_mut().insert(part, alone);
        alone
    }

    /// Whether cuts are far from fitting wherever they are: by what equal chunks take, of all stages together.
    pub(super) fn lacks(&self) -> bool {
        let (end, chunks) = (self.line().places.len() - 1, self.held.len());
        let Some(ends) = equal(end, chunks, self) else { return false };
        let (stages, _) = self.stages(&ends);
        let taken = |(stage, chunks): (usize, &Vec<Part>)| match self.choice {
            Choice::All(level) => self.memory(*level, stage, chunks).total().0 as f64,
            Choice::Named(levels) => self.memory(levels[stage], stage, chunks).total().0 as f64,
            Choice::Least => self.memory(self.levels.last(), stage, chunks).total().0 as f64,
        };
        let memory = stages.iter().enumerate().map(taken).sum::<f64>();
        let room = self.tries.mesh.rooms.iter().map(|room| room.0 as f64).sum::<f64>();
        memory > COMPARED * room
    }

    /// Whether a place lies between blocks, or at the end of the line.
    fn is_between(&self, place: usize) -> bool {
        let places = &self.line().places;
        place + 1 == places.len() || self.tries.mesh.line.is_between(places[place])
    }

    /// What the stage at which zero-bubble V turns hands to itself, if that were messages: so it gets less to do than the
    /// others, since every microbatch waits for it twice in a row while the pipeline fills.
    fn turned(&self, chunks: &[Part]) -> f64 {
        match chunks {
            [(first, ..), (second, from, _)] if first + 1 == *second => 4.0 * self.turn(*from),
            _ => 0.0,
        }
    }

    /// Each microbatch's part of what a stage does outside of the loop: where there are few, what a large embedding or head
    /// adds to the exchange of gradients and to the update may take longer than what others compute.
    fn once(&self, stage: usize, chunks: &[Part]) -> f64 {
        self.outside(0, stage) * self.share(chunks) / self.tries.mesh.placed.microbatches as f64
    }

    /// Where the first chunk begins and each ends, in the ways that are tried. With several chunks a stage: of chunks of
    /// which the longest is as short as can be, and of equal stages, from there and from equal chunks on; where stages
    /// exchange parameters, those of whole blocks too, since what a parameter is read by at both ends of the line comes
    /// together at once or not at all.
    pub(super) fn ends(&self, microbatches: u64) -> Vec<Vec<usize>> {
        let chunks = (self.tries.stages * self.tries.pipeline.per_stage) as usize;
        let (end, rounds) = (self.line().places.len() - 1, microbatches * self.tries.pipeline.per_stage);
        let of = |segments: &dyn Segments| {
            let (_, cuts) = best_cuts(end, chunks, rounds, segments)?;
            Some([0].into_iter().chain(cuts).chain([end]).collect::<Vec<usize>>())
        };
        let mut all: Vec<Vec<usize>> = of(self).into_iter().collect();
        let in_loop = self.tries.mesh.placed.microbatches as f64 * self.pace(0, 0).sums.whole();
        // What moves is exchanged and updated elsewhere, and its stages take what that takes.
        let is_in_step = !self.tries.mesh.away.moves() && self.outside(0, 0) > OUTSIDE * in_loop;
        let longer = |ends: &Vec<usize>, by: &dyn Fn(usize, &[Part]) -> f64| {
            balanced(ends.clone(), &Longer { problem: self, by })
        };
        let in_step = |ends: &Vec<usize>| is_in_step.then(|| longer(ends, &|stage, chunks| self.once(stage, chunks)));
        if self.tries.pipeline.per_stage == 1 {
            let moved = all.first().and_then(in_step).filter(|ends| !all.contains(ends));
            all.extend(moved);
        } else {
            // Where all places lie between blocks, the cuts would be the same.
            if self.line().has_shared() && !(1..end).all(|place| self.is_between(place)) {
                all.extend(of(&BetweenBlocks(self)));
            }
            // Where one chunk is longer than any other must be, as that of a large head, the others may have any length
            // below: stages that are made equal from there end less equal than from equal parts of the whole.
            let starts = all.iter().cloned().chain(equal(end, chunks, self));
            let mut moved: Vec<Vec<usize>> = Vec::new();
            let turns = self.tries.pipeline.schedule.splits_backward();
            let each = |ends: Vec<usize>| {
                let turned = turns.then(|| longer(&ends, &|_, chunks| self.turned(chunks)));
                let in_step = in_step(&ends);
                [Some(balanced(ends, self)), turned, in_step].into_iter().flatten()
            };
            for ends in starts.flat_map(each) {
                if !all.contains(&ends) && !moved.contains(&ends) {
                    moved.push(ends);
                }
            }
            // Equal stages first: they are likely the best.
            all.splice(0..0, moved);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Seconds of each place.
    struct Places(Vec<f64>);

    impl Segments for Places {
        fn seconds(&self, _: usize, from: usize, to: usize) -> f64 {
            self.0[from..to].iter().sum()
        }

        fn fits(&self, _: usize, _: usize, _: usize) -> bool {
            true
        }

        fn least(&self, place: usize) -> f64 {
            self.0[place]
        }
    }

    #[test]
    fn equal_parts_end_where_their_share_is_reached() {
        let check = |seconds: &[f64], chunks: usize, expect: Option<&[usize]>| {
            let found = equal(seconds.len(), chunks, &Places(seconds.to_vec()));
            assert_eq!(found.as_deref(), expect, "{seconds:?} in {chunks}");
        };
        check(&[1.0; 8], 4, Some(&[0, 2, 4, 6, 8]));
        check(&[1.0, 1.0, 1.0, 1.0, 4.0], 2, Some(&[0, 4, 5]));
        // Before a long place or behind it, whichever is nearer.
        check(&[1.0, 5.0, 1.0, 1.0], 2, Some(&[0, 2, 4]));
        check(&[3.0, 4.0, 1.0, 1.0], 2, Some(&[0, 1, 4]));
        check(&[2.0, 3.0, 3.0, 1.0], 2, Some(&[0, 2, 4]));
        // A long end leaves the others their places.
        check(&[1.0, 1.0, 1.0, 90.0], 4, Some(&[0, 1, 2, 3, 4]));
        check(&[90.0, 1.0, 1.0, 1.0], 4, Some(&[0, 1, 2, 3, 4]));
        check(&[1.0; 3], 4, None);
    }

    proptest! {
        /// Every chunk has a place, and no chunk takes more than its share by more than one place.
        #[test]
        fn equal_parts_are_as_equal_as_places_allow(seconds in prop::collection::vec(0.1f64..10.0, 4..40), chunks in 1usize..9) {
            let places = Places(seconds);
            let count = places.0.len();
            let Some(ends) = equal(count, chunks, &places) else {
                prop_assert!(count < chunks);
                return Ok(());
            };
            prop_assert!(ends.len() == chunks + 1 && ends[0] == 0 && ends[chunks] == count);
            prop_assert!(ends.windows(2).all(|pair| pair[0] < pair[1]));
            let share = places.0.iter().sum::<f64>() / chunks as f64;
            let longest = places.0.iter().copied().fold(0.0, f64::max);
            for pair in ends.windows(2).filter(|pair| pair[1] - pair[0] > 1) {
                prop_assert!(places.seconds(0, pair[0], pair[1]) <= share + longest + 1e-9, "{ends:?} of {share}");
            }
        }
    }
}
