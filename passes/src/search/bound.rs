//! Bounds below the step of every plan of a mesh, by the same model of cost.
//!
//! The first axis that is searched is solved exactly for the bound's objective
//! ([`Objective::Bound`]); further ones are left to suit every node by itself, with nothing to convert
//! along them. Plans that do not fit are kept out by a price on bytes: whatever the price, the least of
//! seconds and priced bytes, less the price of the memory that there is, is below the seconds of every plan
//! that fits. The best of a few prices is taken.

use crate::cost::step;
use crate::shard::family::searched_axes;
use crate::shard::objective::{Objective, Pricer};
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
    let apart = |byte: f64| -> f64 {
        let pricer = Pricer::new(prepared, placed, Objective::Bound { byte });
        (0..placed.strategies.len()).map(|class| pricer.least(class, &placed.strategies[class], &axes)).sum()
    };
    let [axis] = axes[..] else { return bytes.iter().copied().map(apart).collect() };
    let mut problem = Problem::new(prepared, placed, axis, Objective::Bound { byte: 0.0 });
    let exact = |byte: &f64| {
        if *byte > 0.0 {
            problem.reprice(Objective::Bound { byte: *byte });
        }
        let solution = problem.graph.solve();
        if solution.is_exact { solution.cost } else { apart(*byte) }
    };
    bytes.iter().map(exact).collect()
}
