//! Where a graph is cut into chunks: exact, by a dynamic program over the places where it may be cut.
//!
//! A step takes each chunk's time once, while the pipeline fills and drains, and the slowest chunk's for every
//! further microbatch: `sum(t) + (rounds - 1) * max(t)`; what it adds once in a step is part of the sum. So of the ways to cut the first part of the graph
//! into so many chunks, those matter that no other beats in both, the sum and the largest; there are few of
//! them, since cuts change the sum by their messages alone. (Narayanan et al., "PipeDream", 2019, section 3.1,
//! minimizes the largest alone.)
//!
//! Most of them lead nowhere: chunks of one length, found by bisection of that length, are a bound, and what is left of
//! the graph takes at least its own time and that of its cuts, in chunks of which the largest is at least the mean (branch
//! and bound).

use std::ops::RangeInclusive;

/// What a chunk between two places costs.
pub trait Segments {
    /// Seconds of one microbatch as the chunk of this number.
    fn seconds(&self, chunk: usize, from: usize, to: usize) -> f64;
    /// Seconds that it adds to a step once, whatever the number of microbatches.
    fn once(&self, _chunk: usize, _from: usize, _to: usize) -> f64 {
        0.0
    }
    /// Whether its memory suffices as the chunk of this number.
    fn fits(&self, chunk: usize, from: usize, to: usize) -> bool;
    /// The fewest seconds of one microbatch that what lies between a place and the next adds to any chunk.
    fn least(&self, place: usize) -> f64;
    /// The fewest seconds of one microbatch that the cut in front of the chunk of this number adds to each chunk beside it,
    /// wherever it is.
    fn cut(&self, _chunk: usize) -> f64 {
        0.0
    }
}

/// How often the length of equal chunks is halved: to a part in ten thousand of the whole.
const HALVINGS: usize = 14;

/// What floating-point sums of the same terms differ by at the most, as a share.
const ROUNDING: f64 = 1e-9;

/// A way to cut a first part of the graph.
#[derive(Clone, Copy, Debug)]
struct Way {
    sum: f64,
    largest: f64,
    /// Where the last chunk begins, and which way leads there.
    from: usize,
    before: usize,
    /// How many were added where it is before it was.
    added: usize,
}

/// The ways to one place that nothing beats: the larger the sum, the smaller the largest.
#[derive(Clone, Default)]
struct Front {
    ways: Vec<Way>,
    added: usize,
}

/// The best cuts of `0..end` into so many chunks, and their objective; none if no cuts fit.
pub fn best_cuts(end: usize, chunks: usize, rounds: u64, segments: &dyn Segments) -> Option<(f64, Vec<usize>)> {
    let further = rounds.saturating_sub(1) as f64;
    let objective = |way: &Way| way.sum + further * way.largest;
    // The least that all takes up to each place.
    let mut least = vec![0.0; end + 1];
    (0..end).for_each(|place| least[place + 1] = least[place] + segments.least(place));
    let enough = objective_of_equal(&least, chunks, further, segments) * (1.0 + ROUNDING);
    // What cuts add at the least: the one in front of each chunk to it, and all to what is behind that.
    let inner = |chunk: usize| if chunk == 0 || chunk == chunks { 0.0 } else { segments.cut(chunk) };
    let cut: Vec<f64> = (0..=chunks).map(inner).collect();
    let mut behind = vec![0.0; chunks + 1];
    (0..chunks).rev().for_each(|chunk| behind[chunk] = behind[chunk + 1] + cut[chunk] + cut[chunk + 1]);
    // Per number of chunks and place, the ways that nothing beats.
    let mut ways: Vec<Vec<Front>> = vec![vec![Front::default(); end + 1]; chunks + 1];
    ways[0][0].insert(Way { sum: 0.0, largest: 0.0, from: 0, before: 0, added: 0 });
    for chunk in 0..chunks {
        for from in chunk..end {
            if ways[chunk][from].ways.is_empty() {
                continue;
            }
            let known = std::mem::take(&mut ways[chunk][from]).into_added();
            let shortest = known.iter().map(|way| way.sum).fold(f64::INFINITY, f64::min);
            let left = chunks - chunk - 1;
            let cuts = cut[chunk] + cut[chunk + 1];
            for to in ends(from, end, left) {
                let (own, rest) = (cuts + least[to] - least[from], behind[chunk + 1] + least[end] - least[to]);
                if shortest + own + further * own > enough {
                    break;
                }
                let mean = rest / left.max(1) as f64;
                let is_open = |sum: f64, largest: f64| sum + rest + further * largest.max(mean) <= enough;
                if !is_open(shortest + own, own) || !segments.fits(chunk, from, to) {
                    continue;
                }
                let (seconds, once) = (segments.seconds(chunk, from, to), segments.once(chunk, from, to));
                // Of the ways whose chunks so far are all shorter than this one, that with the least sum beats the others.
                let shorter = known.iter().filter(|way| way.largest <= seconds).map(|way| way.sum);
                let least_sum = shorter.fold(f64::INFINITY, f64::min) + seconds + once;
                for (before, way) in known.iter().enumerate() {
                    let sum = way.sum + seconds + once;
                    let is_beaten = way.largest <= seconds && sum > least_sum;
                    let way = Way { sum, largest: way.largest.max(seconds), from, before, added: 0 };
                    if !is_beaten && is_open(way.sum, way.largest) {
                        ways[chunk + 1][to].insert(way);
                    }
                }
            }
            ways[chunk][from].ways = known;
        }
    }
    let all = std::mem::take(&mut ways[chunks][end]).into_added();
    let found = all.iter().min_by(|a, b| objective(a).total_cmp(&objective(b)))?;
    let mut cuts = Vec::with_capacity(chunks - 1);
    let mut way = *found;
    for chunk in (1..chunks).rev() {
        cuts.push(way.from);
        way = ways[chunk][way.from].ways[way.before];
    }
    cuts.reverse();
    Some((objective(found), cuts))
}

/// Where a chunk may end that begins at `from`, with so many behind it: as many places are left as there are chunks.
fn ends(from: usize, end: usize, left: usize) -> RangeInclusive<usize> {
    let first = if left == 0 { end } else { from + 1 };
    first..=end - left.min(end)
}

/// The objective of some cuts whose chunks are nearly equal; infinite if none of those that are tried fit. `least` is
/// what all takes at least up to each place.
fn objective_of_equal(least: &[f64], chunks: usize, further: f64, segments: &dyn Segments) -> f64 {
    let end = least.len() - 1;
    // The sum and the largest of chunks, each as long as it may be within so many seconds.
    let within = |limit: f64| {
        let (mut from, mut sum, mut largest) = (0, 0.0, 0.0f64);
        for chunk in 0..chunks {
            // The last that fits is likely the last that is short enough.
            let places = ends(from, end, chunks - chunk - 1);
            let first = *places.start();
            let short = least[first..=*places.end()].partition_point(|until| until - least[from] <= limit);
            let taken = |to: usize| segments.fits(chunk, from, to).then(|| (to, segments.seconds(chunk, from, to)));
            let mut fitting = (first..first + short).rev().filter_map(taken);
            let (to, seconds) = fitting.find(|(_, seconds)| *seconds <= limit)?;
            let once = segments.once(chunk, from, to);
            (from, sum, largest) = (to, sum + seconds + once, largest.max(seconds));
        }
        (from == end).then_some((sum, largest))
    };
    // A chunk may take longer than all places do together: messages come on top.
    let (mut low, mut high) = (0.0, 2.0 * least[end]);
    let mut best = f64::INFINITY;
    for _ in 0..HALVINGS {
        let limit = 0.5 * (low + high);
        match within(limit) {
            Some((sum, largest)) => {
                best = best.min(sum + further * largest);
                high = limit;
            }
            None => low = limit,
        }
    }
    best
}

impl Front {
    /// Adds a way, unless one is known that is no worse in both; drops those that it beats.
    fn insert(&mut self, way: Way) {
        let behind = self.ways.partition_point(|known| known.sum <= way.sum);
        let before = self.ways[..behind].last();
        if before.is_some_and(|known| known.largest <= way.largest) {
            return;
        }
        let first = behind - usize::from(before.is_some_and(|known| known.sum == way.sum));
        let beaten = self.ways[first..].partition_point(|known| known.largest >= way.largest);
        let way = Way { added: self.added, ..way };
        self.added += 1;
        match beaten {
            0 => self.ways.insert(first, way),
            _ => {
                self.ways[first] = way;
                self.ways.drain(first + 1..first + beaten);
            }
        }
    }

    /// The ways in the order in which they were added: of equals the first is taken.
    fn into_added(mut self) -> Vec<Way> {
        self.ways.sort_unstable_by_key(|way| way.added);
        self.ways
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A table of seconds and bytes; messages make a cut dearer.
    struct Table {
        seconds: Vec<f64>,
        message: Vec<f64>,
        bytes: Vec<u64>,
        bound: u64,
        chunks: usize,
    }

    impl Segments for Table {
        /// The first chunk, which holds most, computes again what it makes.
        fn seconds(&self, chunk: usize, from: usize, to: usize) -> f64 {
            let again = if chunk == 0 { 1.5 } else { 1.0 };
            again * self.seconds[from..to].iter().sum::<f64>() + self.message[from] + self.message[to]
        }

        /// Every other chunk moves what it holds, once in a step.
        fn once(&self, chunk: usize, from: usize, to: usize) -> f64 {
            (chunk % 2) as f64 * self.bytes[from..to].iter().sum::<u64>() as f64
        }

        fn fits(&self, chunk: usize, from: usize, to: usize) -> bool {
            (self.chunks - chunk) as u64 * self.bytes[from..to].iter().sum::<u64>() <= self.bound
        }

        fn least(&self, place: usize) -> f64 {
            self.seconds[place]
        }

        fn cut(&self, _: usize) -> f64 {
            let inner = self.message.get(1..self.seconds.len()).unwrap_or_default();
            inner.iter().copied().reduce(f64::min).unwrap_or_default()
        }
    }

    /// Every way to cut.
    fn brute_force(end: usize, from: usize, chunk: usize, table: &Table) -> Vec<(f64, f64)> {
        if chunk + 1 == table.chunks {
            let (seconds, once) = (table.seconds(chunk, from, end), table.once(chunk, from, end));
            return if from < end && table.fits(chunk, from, end) {
                vec![(seconds + once, seconds)]
            } else {
                Vec::new()
            };
        }
        let cuts = (from + 1..end).filter(|to| table.fits(chunk, from, *to));
        let ways = cuts.flat_map(|to| {
            let (seconds, once) = (table.seconds(chunk, from, to), table.once(chunk, from, to));
            let rest = brute_force(end, to, chunk + 1, table).into_iter();
            rest.map(move |(sum, largest)| (sum + seconds + once, largest.max(seconds))).collect::<Vec<_>>()
        });
        ways.collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        /// As if each way were weighed against all others, one after the other.
        #[test]
        fn a_front_has_what_nothing_beats_in_the_order_in_which_it_came(
            ways in prop::collection::vec((0u32..12, 0u32..12), 0..40),
        ) {
            let (mut front, mut all): (Front, Vec<(f64, f64)>) = (Front::default(), Vec::new());
            for (sum, largest) in ways.into_iter().map(|(sum, largest)| (f64::from(sum), f64::from(largest))) {
                front.insert(Way { sum, largest, from: 0, before: 0, added: 0 });
                if !all.iter().any(|known| known.0 <= sum && known.1 <= largest) {
                    all.retain(|known| known.0 < sum || known.1 < largest);
                    all.push((sum, largest));
                }
            }
            let found: Vec<_> = front.into_added().iter().map(|way| (way.sum, way.largest)).collect();
            prop_assert_eq!(found, all);
        }

        #[test]
        fn cuts_are_the_best_of_all(
            places in prop::collection::vec((1u32..100, 0u32..30, 1u64..20), 1..9),
            chunks in 1usize..5,
            rounds in 1u64..20,
            bound in 10u64..200,
        ) {
            let mut message: Vec<f64> = places.iter().map(|(_, message, _)| f64::from(*message)).collect();
            message[0] = 0.0;
            message.push(0.0);
            let seconds = places.iter().map(|(seconds, ..)| f64::from(*seconds)).collect();
            let bytes = places.iter().map(|(.., bytes)| *bytes).collect();
            let table = Table { seconds, message, bytes, bound, chunks };
            let all = brute_force(places.len(), 0, 0, &table);
            let best = all.iter().map(|(sum, largest)| sum + (rounds - 1) as f64 * largest).min_by(f64::total_cmp);
            let found = best_cuts(places.len(), chunks, rounds, &table);
            prop_assert_eq!(found.as_ref().map(|(objective, _)| *objective), best);
            if let Some((objective, cuts)) = found {
                let ends: Vec<usize> = [0].into_iter().chain(cuts).chain([places.len()]).collect();
                let chunks = || ends.windows(2).enumerate().map(|(chunk, pair)| (chunk, pair[0], pair[1]));
                let parts: Vec<f64> = chunks().map(|(chunk, from, to)| table.seconds(chunk, from, to)).collect();
                let once: f64 = chunks().map(|(chunk, from, to)| table.once(chunk, from, to)).sum();
                let largest = parts.iter().copied().fold(0.0, f64::max);
                prop_assert_eq!(parts.iter().sum::<f64>() + once + (rounds - 1) as f64 * largest, objective);
            }
        }
    }
}
