//! Packing: offsets for storages of known lifetimes.
//!
//! Storages are placed one after the other, each in the tightest gap among those it lives with ("greedy
//! by size", Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020). What
//! comes of it depends on the order, so several are tried: by size, by size times lifetime, by lifetime.
//! Then what lies at the top is placed first, again and again, which lets it find the gaps that others
//! took (the idea of the hill climbing of TensorFlow's planners), in every other attempt with what lies nearly as
//! high. The best attempt is kept. The bytes that live at the busiest instruction are a lower bound; an attempt close
//! to it ends the search.

use shardc_ir::program::ALIGNMENT;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// How many pairs of storages are looked at in all attempts together, beyond the first.
const WORK: usize = 1 << 26;
/// The most attempts from one order.
const ROUNDS: usize = 64;
/// In every other attempt, what reaches into this part of the whole counts as lying at the top.
const HIGH: u64 = 50;
/// Into how many spans the instructions are cut to find what lives together.
const SPANS: usize = 64;
/// The share over the lower bound at which no further attempt is worth its time.
const CLOSE: f64 = 0.002;

/// When a storage lives, both ends included, and how many bytes it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// The first instruction.
    pub start: usize,
    /// The last instruction.
    pub end: usize,
    /// The size.
    pub bytes: u64,
}

impl Life {
    /// The bytes it takes: a multiple of what offsets are multiples of.
    pub fn size(&self) -> u64 {
        self.bytes.max(1).div_ceil(ALIGNMENT) * ALIGNMENT
    }

    fn length(&self) -> u64 {
        (self.end - self.start + 1) as u64
    }
}

/// Offsets for storages, in their order, and the bytes they take together.
pub fn pack(lives: &[Life]) -> (Vec<u64>, u64) {
    let horizon = lives.iter().map(|life| life.end).max().unwrap_or(0);
    let mut offsets = vec![0; lives.len()];
    // What lives for ever lies at the bottom, one after the other.
    let mut bottom = 0;
    let mut others: Vec<usize> = Vec::new();
    for (index, life) in lives.iter().enumerate() {
        if life.start == 0 && life.end == horizon {
            offsets[index] = bottom;
            bottom += life.size();
        } else {
            others.push(index);
        }
    }
    let moving: Vec<Life> = others.iter().map(|index| lives[*index]).collect();
    let (placed, top) = best_of_orders(&moving);
    others.iter().zip(placed).for_each(|(index, offset)| offsets[*index] = bottom + offset);
    (offsets, bottom + top)
}

/// What storages are ordered by, the greatest first.
type Key = fn(&Life) -> (u64, u64);

fn best_of_orders(lives: &[Life]) -> (Vec<u64>, u64) {
    let enough = (live_peak(lives) as f64 * (1.0 + CLOSE)) as u64;
    let mut attempts = 1 + WORK / (lives.len() * lives.len()).max(1);
    let mut best: Option<(Vec<u64>, u64)> = None;
    let keys: [Key; 3] = [
        |life| (life.size(), u64::MAX - life.start as u64),
        |life| (life.size() * life.length(), 0),
        |life| (life.length(), life.size()),
    ];
    for key in keys {
        let mut order: Vec<usize> = (0..lives.len()).collect();
        order.sort_by_key(|index| (Reverse(key(&lives[*index])), *index));
        for round in 0..ROUNDS {
            if attempts == 0 || best.as_ref().is_some_and(|(_, top)| *top <= enough) {
                break;
            }
            attempts -= 1;
            let (offsets, top) = place(lives, &order);
            let high = if round % 2 == 0 { top - 1 } else { top - top / HIGH };
            let at_top = |index: &usize| offsets[*index] + lives[*index].size() > high;
            let (mut first, rest): (Vec<usize>, Vec<usize>) = order.iter().partition(|index| at_top(index));
            first.extend(rest);
            order = first;
            if best.as_ref().is_none_or(|(_, known)| top < *known) {
                best = Some((offsets, top));
            }
        }
    }
    best.unwrap_or_default()
}

/// The first and the last instruction of a life. That they are signed lets four be compared at once.
type Interval = [i32; 2];

fn interval(life: &Life) -> Interval {
    [life.start as i32, life.end as i32]
}

fn meet([start, last]: Interval, [from, to]: Interval) -> bool {
    (from <= last) & (to >= start)
}

/// Storages that have their places, by offset. When they live, which is looked at of all of them, lies apart from where they
/// lie. Those that live at one time and lie one behind the other, with no gap between them, are one.
#[derive(Clone, Default)]
struct Row {
    lives: Vec<Interval>,
    /// Where each begins and ends.
    places: Vec<[u64; 2]>,
}

/// Lives that are compared before any place is looked at.
const LANES: usize = 32;

impl Row {
    fn put(&mut self, life: Interval, [offset, end]: [u64; 2]) {
        let position = self.places.partition_point(|[other, _]| *other <= offset);
        let before = position.checked_sub(1).filter(|at| self.lives[*at] == life && self.places[*at][1] == offset);
        match before {
            Some(before) => self.places[before][1] = end,
            None => {
                self.lives.insert(position, life);
                self.places.insert(position, [offset, end]);
            }
        }
    }

    /// The places of what lives together with this.
    #[inline(always)]
    fn each(&self, life: Interval, mut pass: impl FnMut([u64; 2])) {
        let (lots, rest) = self.lives.as_chunks::<LANES>();
        let (places, of_rest) = self.places.split_at(lots.len() * LANES);
        for (lot, places) in lots.iter().zip(places.chunks_exact(LANES)) {
            let mut met = 0u32;
            for (lane, other) in lot.iter().enumerate() {
                met |= u32::from(meet(life, *other)) << lane;
            }
            while met != 0 {
                pass(places[met.trailing_zeros() as usize]);
                met &= met - 1;
            }
        }
        rest.iter().zip(of_rest).filter(|(other, _)| meet(life, **other)).for_each(|(_, place)| pass(*place));
    }
}

/// What is placed. Most storages live in one of [`SPANS`] spans of instructions, and meet few of the others: those of the
/// same span, and those that live in several.
struct Shelf {
    all: Row,
    /// Those that live in several spans.
    long: Row,
    /// Those that live in one.
    short: Vec<Row>,
    /// Instructions of a span.
    length: usize,
}

impl Shelf {
    fn new(lives: &[Life]) -> Self {
        let horizon = lives.iter().map(|life| life.end + 1).max().unwrap_or(1);
        let (all, long, short) = (Row::default(), Row::default(), vec![Row::default(); SPANS]);
        Self { all, long, short, length: horizon.div_ceil(SPANS) }
    }

    /// The span that a storage lives in, if it is one.
    fn span(&self, life: &Life) -> Option<usize> {
        let (first, last) = (life.start / self.length, life.end / self.length);
        (first == last).then_some(first)
    }

    /// The tightest gap for a storage among those that live with it, or the end of them all.
    fn gap(&self, life: &Life) -> u64 {
        let (size, mut at, mut best) = (life.size(), 0, None);
        let mut pass = |[offset, end]: [u64; 2]| {
            if offset >= at + size && best.is_none_or(|(gap, _)| offset - at < gap) {
                best = Some((offset - at, at));
            }
            at = at.max(end);
        };
        let own = interval(life);
        match self.span(life) {
            None => self.all.each(own, &mut pass),
            Some(span) => {
                let short = &self.short[span];
                let mut rest = short.lives.iter().zip(&short.places).peekable();
                let mut pass_before = |offset: u64, pass: &mut dyn FnMut([u64; 2])| {
                    while let Some((other, place)) = rest.next_if(|(_, [before, _])| *before < offset) {
                        if meet(own, *other) {
                            pass(*place);
                        }
                    }
                };
                self.long.each(own, |place| {
                    pass_before(place[0], &mut pass);
                    pass(place);
                });
                pass_before(u64::MAX, &mut pass);
            }
        }
        best.map_or(at, |(_, at)| at)
    }

    fn put(&mut self, life: &Life, offset: u64) {
        let place = [offset, offset + life.size()];
        let own = match self.span(life) {
            Some(span) => &mut self.short[span],
            None => &mut self.long,
        };
        own.put(interval(life), place);
        self.all.put(interval(life), place);
    }
}

/// Places storages in an order, each in the tightest gap.
fn place(lives: &[Life], order: &[usize]) -> (Vec<u64>, u64) {
    let mut offsets = vec![0; lives.len()];
    let mut shelf = Shelf::new(lives);
    let mut top = 0;
    for index in order {
        let life = &lives[*index];
        let offset = shelf.gap(life);
        offsets[*index] = offset;
        top = top.max(offset + life.size());
        shelf.put(life, offset);
    }
    (offsets, top)
}

/// The bytes that live at the busiest instruction, each storage rounded as it is placed: no packing takes
/// fewer.
pub fn live_peak(lives: &[Life]) -> u64 {
    let mut changes: BTreeMap<usize, i64> = BTreeMap::new();
    for life in lives {
        *changes.entry(life.start).or_default() += life.size() as i64;
        *changes.entry(life.end + 1).or_default() -= life.size() as i64;
    }
    let (mut live, mut peak) = (0, 0);
    for change in changes.values() {
        live += change;
        peak = peak.max(live);
    }
    peak as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lives that begin one after the other and end at random, of random sizes.
    fn random(mut seed: u64, longest: usize) -> Vec<Life> {
        let life = |start| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let (length, bytes) = ((seed >> 33) as usize % longest, 1 + (seed >> 40) % (64 * 256));
            Life { start, end: start + length, bytes }
        };
        (0..400).map(life).collect()
    }

    #[test]
    fn packing_is_disjoint() {
        let lives = random(7, 60);
        let (offsets, top) = pack(&lives);
        for (i, a) in lives.iter().enumerate() {
            assert!(offsets[i].is_multiple_of(ALIGNMENT) && offsets[i] + a.bytes <= top);
            for (j, b) in lives.iter().enumerate().skip(i + 1) {
                let together = a.start <= b.end && b.start <= a.end;
                let apart = offsets[i] + a.bytes <= offsets[j] || offsets[j] + b.bytes <= offsets[i];
                assert!(!together || apart, "{i} {j}");
            }
        }
    }

    #[test]
    fn random_lives_take_little_more_than_live_at_once() {
        // They have none of the nesting of a training step, which packs better.
        let shares = (0..20).map(|seed| {
            let lives = random(seed * 1_000_003 + 7, if seed % 2 == 0 { 60 } else { 200 });
            pack(&lives).1 as f64 / live_peak(&lives) as f64
        });
        let shares: Vec<f64> = shares.collect();
        let (mean, worst) = (shares.iter().sum::<f64>() / 20.0, shares.iter().fold(1.0f64, |a, b| a.max(*b)));
        assert!(shares.iter().all(|share| *share >= 1.0));
        assert!(mean < 1.10 && worst < 1.16, "{mean} on average, {worst} at worst");
    }
}
