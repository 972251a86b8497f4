//! Bounds below the step of every plan of a mesh, by the same model of cost.
//!
//! **Axes.** An axis that is searched is solved exactly for the bound's objective ([`Objective::Bound`]), or bounded
//! itself where the cost graph is too large. Where there are several, each is solved by itself, as if the others
//! divided every value and all work on it as far as they can, and nodes count for each of them by a share ([`Beside`]):
//! the sum is below the cost of any layout, since a conversion along one axis moves no less than that. Axes that are
//! alike have one solution.
//!
//! **Memory.** Plans that do not fit are kept out by a price on bytes: whatever the price, the least of seconds and
//! priced bytes, less the price of the memory that there is, is below the seconds of every plan that fits (Lagrangian
//! relaxation).
//!
//! **Data ranks.** For each way to share what is stored, their communication counts by the kernels or by the wire,
//! whichever gives more ([`Sharing`]). What they exchange of the batch in the middle of the passes, as statistics of
//! it, no layout along other axes avoids: the starts of that are added, as far as kernels cannot hide them
//! ([`exchanged`]).
//!
//! **Effort.** One price or a few tell of most meshes that they are not worth a solution. A bound that counts in the
//! end is made tighter: price and share are looked for near the best ones, if no more than a few percent are missing
//! ([`MISSING`]).

pub(crate) mod sharing;
pub mod stages;

use crate::cost::collective::Group;
use crate::cost::overlap::spread;
use crate::search::estimate::turns::{beside_kernels, is_in_pass};
use crate::shard::coupled::coupled;
use crate::shard::family::open_axes;
use crate::shard::layout::Turn;
use crate::shard::objective::{Beside, Objective, Pricer, Quote};
use crate::shard::problem::Problem;
use crate::shard::tensor::{Conversion, Placed, Prepared};
use shardc_ir::{AxisId, Bytes, Family, Mesh};
use sharing::{Collectives, Sharing};
use std::collections::{BTreeMap, VecDeque};

/// Prices of memory that are tried, as shares of the whole step for the whole memory, and by how much those beside
/// the best of them differ from it.
const PRICES: [f64; 6] = [0.0, 0.01, 0.05, 0.25, 1.2, 6.0];
const FINER: [f64; 2] = [0.45, 2.2];

/// The place of the price that tells of most meshes which are not worth a solution that they are not; those that tell it
/// of most others, on which little or nothing fits, are higher.
const TELLING: usize = 3;

/// Shares of the bound by a busy wire that are tried.
const BUSY: [f64; 3] = [1.0, 0.6, 0.3];

/// How often it is looked for a tighter bound nearby, where what is missing is between these shares of the bound:
/// nearby there are a few percent to be found.
const ROUNDS: usize = 10;
const MISSING: std::ops::Range<f64> = 0.005..0.1;

/// How many assignments are tried out before a problem is solved, and what rounding may add to a cost at the most, as a
/// share of it.
const MOST_CHOSEN: usize = 4;
const ROUNDING: f64 = 1e-9;

/// What is asked of a bound beyond the mesh.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The ways to store parameters, with the stages of ZeRO.
    pub stored: &'a [(Mesh, Vec<u64>)],
    /// What a plan has to fit in, if that is all there is.
    pub memory: Option<Bytes>,
    /// The seconds beyond which a bound need not be any tighter.
    pub enough: f64,
}

/// No plan of a mesh, of which only the batch is placed, is predicted to take fewer seconds. Of the plans that fit in
/// `memory`, if that is all there is, as far as it takes to see whether they take more than `limit` seconds.
pub fn least(prepared: &Prepared<'_>, placed: &Placed<'_>, memory: Option<Bytes>, limit: f64) -> f64 {
    let mut relaxed = Relaxed::new(prepared, placed, Sharing::least(placed.mesh));
    let whole = scaled(placed, relaxed.cost(0.0));
    let free = memory.map_or(1.0, |memory| memory.0 as f64).max(1.0);
    let unit = whole / free / scaled(placed, 1.0);
    let mut found = whole;
    for price in PRICES[TELLING..].iter().copied().filter(|_| memory.is_some()) {
        if found > limit {
            break;
        }
        // What a price gives is concave in it: where a higher price does worse, so do all that are higher.
        let seconds = relaxed.above(price * unit, free, found);
        if seconds < found {
            break;
        }
        found = seconds;
    }
    found
}

/// The most that one of the [`PRICES`] gives, and the price, as far as it takes to see that it is more than so many seconds.
///
/// The least of functions that are linear in a price is concave in it: where a price does worse than another, so do all
/// that are further away. What a price gives need not be found where it is less than a number that is given with it.
fn highest(at: &mut dyn FnMut(f64, f64) -> f64, enough: f64) -> (f64, f64) {
    let mut best = (at(PRICES[TELLING], f64::NEG_INFINITY), PRICES[TELLING]);
    for price in PRICES[..TELLING].iter().rev().copied() {
        let seconds = if best.0 <= enough { at(price, best.0) } else { f64::NEG_INFINITY };
        if seconds < best.0 {
            break;
        }
        best = (seconds, price);
    }
    let is_lower = best.1 < PRICES[TELLING];
    for price in PRICES[TELLING + 1..].iter().copied().filter(|_| !is_lower) {
        let seconds = if best.0 <= enough { at(price, best.0) } else { f64::NEG_INFINITY };
        if seconds <= best.0 {
            break;
        }
        best = (seconds, price);
    }
    best
}

/// As [`least`], of the plans that fit in memory, with what the data ranks say to each other; `least` is what
/// that gave.
pub fn least_fitting(prepared: &Prepared<'_>, placed: &Placed<'_>, asked: Asked<'_>, least: f64) -> f64 {
    let mut relaxed = Relaxed::new(prepared, placed, Sharing::least(placed.mesh));
    let ways = asked.stored.iter().flat_map(|(mesh, stages)| stages.iter().map(move |zero| (mesh, *zero)));
    let bound = ways.fold(f64::INFINITY, |bound, (mesh, zero)| {
        // The least of the ways counts, so no other need be tighter than that.
        let enough = asked.enough.min(bound);
        if bound <= least {
            bound
        } else {
            let collectives = Collectives::new(prepared, placed, mesh, zero);
            let sharing = |busy: f64| Sharing::new(placed, mesh, zero, collectives, busy);
            let free = asked.memory.map(|memory| memory.0 as f64);
            bound.min(of_way(&mut relaxed, (&sharing, &BUSY), free, [least, enough]))
        }
    });
    bound.max(least)
}

/// Of a way to share what is stored, what is known for each share of the bound by a busy wire, and the shares that are tried.
type Shared<'a> = (&'a dyn Fn(f64) -> Sharing, &'a [f64]);

/// The bound of one way to share what is stored, with so many bytes for all stages if that is all there is: between the
/// first of two numbers of seconds and, nearly, the other.
fn of_way(
    relaxed: &mut Relaxed<'_, '_>,
    (sharing, shares): Shared<'_>,
    free: Option<f64>,
    [least, enough]: [f64; 2],
) -> f64 {
    let placed = relaxed.placed;
    let (is_short, free) = (free.is_some(), free.unwrap_or(1.0).max(1.0));
    let unit = least / free / scaled(placed, 1.0);
    let mut shared = None;
    let mut at = |price: f64, busy: f64, least: f64| {
        if shared.replace(busy) != Some(busy) {
            relaxed.share(sharing(busy));
        }
        relaxed.above(price * unit, free, least)
    };
    let mut found = Found { seconds: least, price: 0.0, busy: 0.0 };
    let (seconds, price) = match is_short {
        true => highest(&mut |price, least| at(price, 0.0, least), enough),
        false => (at(0.0, 0.0, least), 0.0),
    };
    if found.take(seconds, price, 0.0) >= enough {
        return enough;
    }
    for price in FINER.map(|by| found.price * by) {
        if price > 0.0 && found.take(at(price, 0.0, found.seconds), price, 0.0) >= enough {
            return enough;
        }
    }
    for busy in shares.iter().copied() {
        let price = found.price;
        if found.take(at(price, busy, found.seconds), price, busy) >= enough {
            return enough;
        }
    }
    let mut step = [0.35, 0.15];
    for _ in 0..ROUNDS {
        if !MISSING.contains(&(enough / found.seconds - 1.0)) {
            break;
        }
        let before = found;
        let prices = [1.0 - step[0], 1.0 + step[0]].map(|by| (before.price * by, before.busy));
        let nearby = [-step[1], step[1]].map(|by| (before.price, (before.busy + by).clamp(0.0, 1.0)));
        let nearby = nearby.into_iter().filter(|_| !shares.is_empty());
        for (price, busy) in prices.into_iter().chain(nearby).filter(|near| *near != (before.price, before.busy)) {
            if found.take(at(price, busy, found.seconds), price, busy) >= enough {
                return enough;
            }
        }
        if found == before {
            step = step.map(|step| 0.5 * step);
        }
    }
    found.seconds
}

/// A bound, and where it was found.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Found {
    seconds: f64,
    price: f64,
    busy: f64,
}

impl Found {
    /// Takes another bound in, if it is tighter; gives the tightest.
    fn take(&mut self, seconds: f64, price: f64, busy: f64) -> f64 {
        if seconds > self.seconds {
            *self = Self { seconds, price, busy };
        }
        self.seconds
    }
}

/// Stages work beside each other at best, and the slowest takes at least what they take on average; all ranks wait
/// for the slowest.
pub(super) fn scaled(placed: &Placed<'_>, seconds: f64) -> f64 {
    seconds / placed.mesh.degree(Family::Pipeline) as f64 * spread(placed.cluster.ranks())
}

/// Seconds of a step that show at the least of what the ranks that divide the batch exchange within the passes of microbatches:
/// collectives without a byte, beside kernels that no other axis divides.
fn exchanged(prepared: &Prepared<'_>, placed: &Placed<'_>) -> f64 {
    let start = |of: Conversion| Conversion { turn: Turn { wire: of.start, ..Turn::default() }, ..of };
    let all = coupled(prepared, placed, placed.cluster).into_iter();
    let starts: Vec<Conversion> = all.filter(|of| is_in_pass(prepared, placed, of)).map(start).collect();
    if starts.is_empty() {
        return 0.0;
    }
    let seconds = placed.strategies.iter().enumerate().map(|(class, strategy)| {
        placed.local(prepared, class, strategy).emitted(prepared, (class, placed.cluster), true)
    });
    let shown = beside_kernels(prepared, placed, &starts, &seconds.collect::<Vec<_>>());
    placed.microbatches as f64 * shown.iter().map(|(of, _)| of.turn.wire * of.count as f64).sum::<f64>()
}

/// A bound's problem, for every price of a byte and every way to share what is stored.
struct Relaxed<'a, 'b> {
    prepared: &'a Prepared<'b>,
    placed: &'a Placed<'a>,
    /// One for all axes that are alike, and how many they are.
    problems: Vec<(f64, Problem<'a, 'b>)>,
    /// The classes, where there is no axis.
    quotes: Vec<Quote>,
    latency: f64,
    /// See [`exchanged`].
    exchanged: f64,
    /// What was chosen in each problem at the latest prices and shares, the last of them at the end.
    chosen: VecDeque<Vec<Vec<usize>>>,
}

impl<'a, 'b> Relaxed<'a, 'b> {
    fn new(prepared: &'a Prepared<'b>, placed: &'a Placed<'a>, sharing: Sharing) -> Self {
        let axes = open_axes(placed.mesh);
        let all = placed.mesh.extent(axes.iter().copied());
        let objective = |beside: Beside| Objective::Bound { byte: 0.0, beside, sharing };
        // By what an axis may divide and by where its ranks are.
        let mut alike: BTreeMap<_, Vec<AxisId>> = BTreeMap::new();
        for axis in axes.iter().copied() {
            let group = Group::new(placed.mesh, &[axis], placed.cluster);
            alike.entry((placed.mesh.axis(axis).family, group)).or_default().push(axis);
        }
        let problem = |alike: &Vec<AxisId>| {
            let (axis, share) = (alike[0], 1.0 / axes.len() as f64);
            let beside = Beside { axis: Some(axis), parts: (all / placed.mesh.size(axis)) as f64, share };
            (alike.len() as f64, Problem::new(prepared, placed, axis, objective(beside)))
        };
        let problems: Vec<_> = alike.values().map(problem).collect();
        let (quotes, latency) = (Vec::new(), sharing.latency);
        let exchanged = exchanged(prepared, placed);
        let chosen = VecDeque::new();
        let mut own = Self { prepared, placed, problems, quotes, latency, exchanged, chosen };
        own.quote(sharing);
        own
    }

    /// The same where the data ranks share in another way what is stored.
    fn share(&mut self, sharing: Sharing) {
        self.problems.iter_mut().for_each(|(_, problem)| problem.share(sharing));
        self.latency = sharing.latency;
        self.quote(sharing);
    }

    /// Asks what classes cost that no axis divides.
    fn quote(&mut self, sharing: Sharing) {
        if self.problems.is_empty() {
            let objective = Objective::Bound { byte: 0.0, beside: Beside::NONE, sharing };
            let pricer = Pricer::new(self.prepared, self.placed, objective);
            let strategies = self.placed.strategies.iter().enumerate();
            self.quotes = strategies.map(|(class, strategy)| pricer.quote(class, strategy)).collect();
        }
    }

    /// The least cost if a byte costs so many seconds.
    fn cost(&mut self, byte: f64) -> f64 {
        self.reprice(byte);
        self.solved(byte)
    }

    /// The bound at a price of so many seconds for a byte, of which so many are free; or less than `least`, if it is less
    /// than that: what was the best before costs no less than the best, and often tells.
    fn above(&mut self, byte: f64, free: f64, least: f64) -> f64 {
        self.reprice(byte);
        let bound = |cost: f64| scaled(self.placed, cost - byte * free);
        let most = |chosen: &Vec<Vec<usize>>| {
            let costs = self.problems.iter().zip(chosen).map(|((count, of), chosen)| count * of.graph.cost(chosen));
            (1.0 + ROUNDING) * self.sum(costs.sum(), byte)
        };
        if self.chosen.iter().rev().any(|chosen| bound(most(chosen)) < least) {
            return f64::NEG_INFINITY;
        }
        let cost = self.solved(byte);
        scaled(self.placed, cost - byte * free)
    }

    fn reprice(&mut self, byte: f64) {
        self.problems.iter_mut().for_each(|(_, problem)| problem.reprice(byte));
    }

    /// The least cost at the price that problems have.
    fn solved(&mut self, byte: f64) -> f64 {
        let (mut sum, mut chosen) = (0.0, Vec::with_capacity(self.problems.len()));
        for (count, problem) in &self.problems {
            let solution = problem.graph.solve();
            sum += count * solution.bound;
            chosen.push(solution.choices);
        }
        self.chosen.push_back(chosen);
        if self.chosen.len() > MOST_CHOSEN {
            self.chosen.pop_front();
        }
        self.sum(sum, byte)
    }

    /// What problems cost, with all else.
    fn sum(&self, problems: f64, byte: f64) -> f64 {
        self.latency + self.exchanged + problems + self.quotes.iter().map(|quote| quote.at(byte)).sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of concave functions of the price, as far as anybody asks.
    #[test]
    fn the_highest_price_is_found_with_few() {
        let of = |slopes: &[(f64, f64)], price: f64| {
            slopes.iter().map(|(from, slope)| from + slope * price).fold(f64::INFINITY, f64::min)
        };
        let mut asked = 0;
        for falls in [-3.0, -0.5, 0.0, 0.2, 4.0, 90.0] {
            for (from, rises) in [(1.0, 0.0), (1.0, 0.3), (0.5, 2.0), (0.9, 40.0)] {
                let at = |price: f64| of(&[(from, rises), (2.0, -falls)], price);
                let expected = PRICES.map(at).into_iter().fold(f64::NEG_INFINITY, f64::max);
                let mut counted = |price: f64, _: f64| {
                    asked += 1;
                    at(price)
                };
                let (seconds, price) = highest(&mut counted, f64::INFINITY);
                assert_eq!((seconds, at(price)), (expected, expected), "{falls} {from} {rises}");
            }
        }
        assert!(asked < 24 * 4, "{asked}");
        // What the first tells is enough.
        assert_eq!(highest(&mut |price, _| if price == PRICES[TELLING] { 1.0 } else { f64::NAN }, 0.5).0, 1.0);
    }
}
