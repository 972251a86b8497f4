//! Bounds below the step of every plan of a mesh, by the same model of cost.
//!
//! An axis that is searched is solved exactly for the bound's objective ([`Objective::Bound`]). Where there are
//! several, each is solved by itself, as if the others divided every value and all work on it as far as they
//! can, and nodes count for each of them by an equal share: the sum is below the cost of any layout, since a
//! conversion along one axis moves no less than that. Plans that do not fit are kept out by a price on bytes: whatever the price, the least of
//! seconds and priced bytes, less the price of the memory that there is, is below the seconds of every plan
//! that fits. The best of a few prices is taken.

use crate::cost::step;
use crate::shard::family::searched_axes;
use crate::shard::objective::{Beside, Objective, Pricer, Quote};
use crate::shard::tensor::{Placed, Prepared, Problem};
use shardc_ir::Bytes;

/// Prices of memory that are tried, as shares of the whole step for the whole memory.
const PRICES: [f64; 5] = [0.02, 0.1, 0.4, 1.5, 6.0];

/// No plan of a mesh, of which only the batch is placed, is predicted to take fewer seconds.
pub fn least(prepared: &Prepared<'_>, placed: &Placed<'_>) -> f64 {
    scaled(placed, relaxed(prepared, placed, &[0.0])[0])
}

/// As [`least`], of the plans that fit in `memory`; `least` is what that gave.
pub fn least_fitting(prepared: &Prepared<'_>, placed: &Placed<'_>, memory: Bytes, least: f64) -> f64 {
    // In a pipeline a rank holds a part of the model, which a bound over all of it does not see.
    if placed.mesh.degree("pp") > 1 {
        return least;
    }
    let free = (memory.0 as f64).max(1.0);
    let bytes = PRICES.map(|share| share * least / free / scaled(placed, 1.0));
    let relaxed = relaxed(prepared, placed, &bytes).into_iter().zip(bytes);
    relaxed.map(|(cost, byte)| scaled(placed, cost - byte * free)).fold(least, f64::max)
}

/// Stages work beside each other at best; all ranks wait for the slowest.
fn scaled(placed: &Placed<'_>, seconds: f64) -> f64 {
    seconds / placed.mesh.degree("pp") as f64 * step::spread(placed.cluster.ranks())
}

/// The least cost for each price of a byte.
fn relaxed(prepared: &Prepared<'_>, placed: &Placed<'_>, bytes: &[f64]) -> Vec<f64> {
    let axes: Vec<_> = searched_axes(placed.mesh).into_iter().filter(|axis| placed.mesh.size(*axis) > 1).collect();
    if axes.is_empty() {
        return apart(prepared, placed, bytes);
    }
    let mut sums = vec![0.0; bytes.len()];
    let all: u64 = axes.iter().map(|axis| placed.mesh.size(*axis)).product();
    for axis in &axes {
        let parts = (all / placed.mesh.size(*axis)) as f64;
        let beside = Beside { parts, share: 1.0 / axes.len() as f64 };
        let mut problem = Problem::new(prepared, placed, *axis, Objective::Bound { byte: 0.0, beside });
        for (sum, byte) in sums.iter_mut().zip(bytes) {
            problem.reprice(*byte);
            let solution = problem.graph.solve();
            *sum += if solution.is_exact { solution.cost } else { problem.graph.least() };
        }
    }
    sums
}

/// The same where nothing is left to place.
fn apart(prepared: &Prepared<'_>, placed: &Placed<'_>, bytes: &[f64]) -> Vec<f64> {
    let pricer = Pricer::new(prepared, placed, Objective::Bound { byte: 0.0, beside: Beside::NONE });
    let quotes: Vec<Quote> =
        placed.strategies.iter().enumerate().map(|(class, strategy)| pricer.quote(class, strategy)).collect();
    bytes.iter().map(|byte| quotes.iter().map(|quote| quote.at(*byte)).sum()).collect()
}
