//! Cuts where a stage has several chunks: what a stage takes is the sum over them.
//!
//! Cutting into chunks that are all as long as each other ([`cut`](super::cut)) leaves the stages unequal where a
//! chunk is made of a few blocks, or ends in a head. From there cuts are moved, one at a time, as long as the stages
//! get more equal, or the chunks where stages do not get less so. Where no single one helps, the longest stage hands a
//! place on to one that is farther away: each chunk between takes one at one end and gives one at the other.

use super::cut::Segments;

/// What the stages of a cut line cost, beside its chunks.
pub trait Shares: Segments {
    /// The stage of a chunk.
    fn stage_of(&self, chunk: usize) -> usize;
    /// Seconds of one microbatch in a stage with these chunks, each with where it begins and ends; more than any stage
    /// takes if its memory does not suffice. Most are asked about again and again, after each move that helps.
    fn seconds(&self, stage: usize, chunks: &[(usize, usize, usize)]) -> f64;
}

/// The power in which stages are added up: so high that the longest counts most, so low that the others count.
const POWER: i32 = 8;

/// What counts as less: not what rounding makes of the same.
const LESS: f64 = 1.0 - 1e-9;

/// How far a cut is moved in one go.
const MOVES: [isize; 10] = [-16, -8, -4, -2, -1, 1, 2, 4, 8, 16];

/// Moves the cuts between `ends`, where the first chunk begins and each ends.
pub fn balanced(mut ends: Vec<usize>, shares: &dyn Shares) -> Vec<usize> {
    let chunks = ends.len() - 1;
    let stages = (0..chunks).map(|chunk| shares.stage_of(chunk) + 1).max().unwrap_or(0);
    let mut of_stage = vec![Vec::new(); stages];
    (0..chunks).for_each(|chunk| of_stage[shares.stage_of(chunk)].push(chunk));
    let mut own = Balance { shares, of_stage, mean: 1.0 };
    let mut known: Vec<f64> = (0..stages).map(|stage| own.seconds(&ends, stage)).collect();
    own.mean = known.iter().sum::<f64>().max(f64::MIN_POSITIVE) / stages.max(1) as f64;
    // Every move makes the sum of the weights smaller, so it ends; a line has so few places that it ends soon.
    loop {
        let mut is_settled = true;
        for cut in 1..chunks {
            is_settled &= !own.moves(cut, &mut ends, &mut known);
        }
        if !is_settled {
            continue;
        }
        match own.handed_on(&ends, &known) {
            Some(found) => (ends, known) = found,
            None => return ends,
        }
    }
}

/// What cuts are weighed by.
struct Balance<'a> {
    shares: &'a dyn Shares,
    /// The chunks of each stage.
    of_stage: Vec<Vec<usize>>,
    /// What stages take on average.
    mean: f64,
}

impl Balance<'_> {
    fn seconds(&self, ends: &[usize], stage: usize) -> f64 {
        let chunks = self.of_stage[stage].iter().map(|chunk| (*chunk, ends[*chunk], ends[chunk + 1]));
        Shares::seconds(self.shares, stage, &chunks.collect::<Vec<_>>())
    }

    fn weight(&self, seconds: f64) -> f64 {
        (seconds / self.mean).powi(POWER)
    }

    /// Among cuts into stages that are as long as each other, those of chunks of one length wait the least while the
    /// pipeline fills and drains.
    fn of_chunk(&self, ends: &[usize], chunk: usize) -> f64 {
        (Segments::seconds(self.shares, chunk, ends[chunk], ends[chunk + 1]) / self.mean).powi(2)
    }

    /// What counts, of what stages take and what is [`of_chunk`](Self::of_chunk).
    fn all(&self, known: &[f64], of_chunks: &[f64]) -> f64 {
        known.iter().map(|seconds| self.weight(*seconds)).sum::<f64>() + of_chunks.iter().sum::<f64>()
    }

    /// Moves a cut to where that is best; whether it does. `known` is what the stages take.
    fn moves(&self, cut: usize, ends: &mut [usize], known: &mut [f64]) -> bool {
        let uneven = |ends: &[usize]| self.of_chunk(ends, cut - 1) + self.of_chunk(ends, cut);
        let touched = [self.shares.stage_of(cut - 1), self.shares.stage_of(cut)];
        // A stage on both sides counts once, as in [`Self::all`]: what moves make less, handing on must not make more again.
        let alike = usize::from(touched[0] == touched[1]);
        let weight = |of: [f64; 2]| of[alike..].iter().map(|seconds| self.weight(*seconds)).sum::<f64>();
        let mut least = (weight(touched.map(|stage| known[stage])) + uneven(ends)) * LESS;
        let before = ends[cut];
        let mut best = None;
        for by in MOVES {
            let Some(to) = before.checked_add_signed(by).filter(|to| ends[cut - 1] < *to && *to < ends[cut + 1]) else {
                continue;
            };
            ends[cut] = to;
            let moved = touched.map(|stage| self.seconds(ends, stage));
            let sum = weight(moved) + uneven(ends);
            if sum < least {
                (least, best) = (sum, Some((to, moved)));
            }
        }
        ends[cut] = best.map_or(before, |(to, _)| to);
        let moved = best.iter().flat_map(|(_, moved)| touched.into_iter().zip(*moved));
        moved.for_each(|(stage, seconds)| known[stage] = seconds);
        best.is_some()
    }

    /// The cuts, and what the stages take, if the longest stage hands a place on to the stage for which that is best.
    fn handed_on(&self, ends: &[usize], known: &[f64]) -> Option<(Vec<usize>, Vec<f64>)> {
        let chunks = ends.len() - 1;
        let longest = known.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(stage, _)| stage)?;
        let may_give = |chunk: &usize| self.shares.stage_of(*chunk) == longest && ends[chunk + 1] - ends[*chunk] > 1;
        let of_chunks: Vec<f64> = (0..chunks).map(|chunk| self.of_chunk(ends, chunk)).collect();
        let (mut least, mut best) = (self.all(known, &of_chunks) * LESS, None);
        for chunk in (0..chunks).filter(may_give) {
            // The cuts from that behind it on, then those from that before it on.
            for (cuts, by) in [((chunk + 1..chunks).collect::<Vec<_>>(), -1), ((1..=chunk).rev().collect(), 1)] {
                let (mut ends, mut known, mut of_chunks) = (ends.to_vec(), known.to_vec(), of_chunks.clone());
                for cut in cuts {
                    ends[cut] = ends[cut].saturating_add_signed(by);
                    for chunk in [cut - 1, cut] {
                        let stage = self.shares.stage_of(chunk);
                        (known[stage], of_chunks[chunk]) = (self.seconds(&ends, stage), self.of_chunk(&ends, chunk));
                    }
                    let sum = self.all(&known, &of_chunks);
                    if sum < least {
                        (least, best) = (sum, Some((ends.clone(), known.clone())));
                    }
                }
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::cut::best_cuts;
    use proptest::prelude::*;

    /// Places along a line, and the stage of each chunk.
    struct Line {
        seconds: Vec<f64>,
        stages: Vec<usize>,
    }

    /// The same, where chunks that follow each other on a stage take longer by where the cut between them is.
    struct Turning(Line, Vec<f64>);

    impl Shares for Turning {
        fn stage_of(&self, chunk: usize) -> usize {
            self.0.stage_of(chunk)
        }

        fn seconds(&self, stage: usize, chunks: &[(usize, usize, usize)]) -> f64 {
            let follow = chunks.windows(2).filter(|pair| pair[0].2 == pair[1].1);
            Shares::seconds(&self.0, stage, chunks) + follow.map(|pair| self.1[pair[1].1]).sum::<f64>()
        }
    }

    impl Segments for Turning {
        fn seconds(&self, chunk: usize, from: usize, to: usize) -> f64 {
            Segments::seconds(&self.0, chunk, from, to)
        }

        fn fits(&self, _: usize, _: usize, _: usize) -> bool {
            true
        }

        fn least(&self, place: usize) -> f64 {
            Segments::least(&self.0, place)
        }
    }

    impl Shares for Line {
        fn stage_of(&self, chunk: usize) -> usize {
            self.stages[chunk]
        }

        fn seconds(&self, _: usize, chunks: &[(usize, usize, usize)]) -> f64 {
            chunks.iter().map(|(_, from, to)| self.seconds[*from..*to].iter().sum::<f64>()).sum()
        }
    }

    impl Segments for Line {
        fn seconds(&self, _: usize, from: usize, to: usize) -> f64 {
            self.seconds[from..to].iter().sum()
        }

        fn fits(&self, _: usize, _: usize, _: usize) -> bool {
            true
        }

        fn least(&self, place: usize) -> f64 {
            self.seconds[place]
        }
    }

    impl Line {
        fn largest(&self, ends: &[usize]) -> f64 {
            let mut sums = vec![0.0; self.stages.len()];
            for (chunk, stage) in self.stages.iter().enumerate() {
                sums[*stage] += self.seconds[ends[chunk]..ends[chunk + 1]].iter().sum::<f64>();
            }
            sums.into_iter().fold(0.0, f64::max)
        }

        /// The ends that make chunks as equal as can be.
        fn cut(&self) -> Vec<usize> {
            let end = self.seconds.len();
            let (_, cuts) = best_cuts(end, self.stages.len(), 1000, self).expect("there are places enough");
            [0].into_iter().chain(cuts).chain([end]).collect()
        }

        /// The least that the longest stage can take.
        fn least(&self, ends: &mut Vec<usize>) -> f64 {
            let (end, left) = (self.seconds.len(), self.stages.len() - ends.len());
            let last = ends[ends.len() - 1];
            if left == 0 {
                ends.push(end);
                let largest = self.largest(ends);
                ends.pop();
                return largest;
            }
            let mut least = f64::INFINITY;
            for to in last + 1..=end - left {
                ends.push(to);
                least = least.min(self.least(ends));
                ends.pop();
            }
            least
        }
    }

    /// 32 equal blocks behind an embedding, and a longer head, in four stages of two chunks.
    #[test]
    fn stages_are_equal_though_chunks_cannot_be() {
        for head in [0.5, 1.5, 2.5, 3.5, 4.5] {
            let seconds: Vec<f64> = [0.1].into_iter().chain([1.0; 32]).chain([head]).collect();
            let line = Line { seconds, stages: vec![0, 1, 2, 3, 3, 2, 1, 0] };
            let (before, after) = (line.largest(&line.cut()), line.largest(&balanced(line.cut(), &line)));
            // Blocks are whole.
            assert!(after <= before && after < (32.1 + head) / 4.0 + 1.0, "{before} and {after} with a head of {head}");
        }
    }

    /// What no stage beside the longest can take without being as long is handed on to one that can.
    #[test]
    fn places_are_handed_on_to_stages_farther_away() {
        let line = Line { seconds: vec![1.0; 17], stages: vec![0, 1, 2, 3, 4, 5] };
        for ends in [[0, 2, 5, 8, 11, 13, 17], [0, 4, 7, 10, 13, 15, 17], [0, 1, 4, 7, 11, 14, 17]] {
            assert_eq!(line.largest(&ends), 4.0);
            assert_eq!(line.largest(&balanced(ends.to_vec(), &line)), 3.0, "{ends:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

        /// What is found is at most the longest place from the best of all.
        #[test]
        fn the_longest_stage_is_nearly_as_short_as_can_be(
            places in prop::collection::vec(1u32..10, 7..12),
            is_v in any::<bool>(),
        ) {
            let stages = if is_v { vec![0, 1, 2, 2, 1, 0] } else { vec![0, 1, 2, 0, 1, 2] };
            let line = Line { seconds: places.iter().map(|place| f64::from(*place)).collect(), stages };
            let found = balanced(line.cut(), &line);
            prop_assert!(found.windows(2).all(|pair| pair[0] < pair[1]));
            let longest = places.iter().copied().max().map_or(0.0, f64::from);
            prop_assert!(line.largest(&found) <= line.least(&mut vec![0]) + longest);
        }

        /// What one way to move makes less the other does not make more again, wherever a stage turns.
        #[test]
        fn moves_end(places in prop::collection::vec((1u32..10, 0u32..10), 7..24)) {
            let (seconds, turns) = places.iter().map(|(own, turn)| (f64::from(*own), f64::from(*turn))).unzip();
            let line = Turning(Line { seconds, stages: vec![0, 1, 2, 2, 1, 0] }, turns);
            let found = balanced(line.0.cut(), &line);
            prop_assert!(found.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }
}
