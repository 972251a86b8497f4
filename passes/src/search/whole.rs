//! Plans without stages: layouts that are the fastest, or leaner where those do not fit, with every choice of ZeRO,
//! recomputation and what leaves the device.
//!
//! Axes are solved one by one, so the layouts found may not be the best. Where a plan is far above its bound
//! ([`LOOSE`]), leaner layouts are tried as well, since they start elsewhere and may end lower. Where anything would
//! have to be computed again, the head is also cut into smaller chunks.

use super::away::At;
use super::candidate::{Candidate, least_step, overlap_chunks};
use super::choice::degrees::zero_stages;
use super::choice::pins::{Pins, Recompute};
use super::choose::overlap;
use super::measure::{CLOSE, Measure};
use super::placed::{Seen, Solved, solved};
use super::space::{Point, Space};
use super::visit::Visited;
use crate::shard::family::copy_axes;
use crate::shard::objective::Prices;
use crate::shard::tensor::Placed;
use shardc_ir::plan::Prediction;
use shardc_ir::{Bytes, Mesh, Seconds};
use std::cell::OnceCell;

/// Prices of memory at which leaner layouts are looked for where the fastest do not fit, the highest first: the share of the
/// step that all of a rank's memory costs.
const LEAN: [f64; 3] = [10.0, 1.0, 0.1];

/// How many times as long as the bound a plan takes where layouts that are not the fastest, one axis after the other, may be
/// faster in the end.
const LOOSE: f64 = 1.05;

/// The plans of a mesh without stages, of which the batch is placed.
pub(super) fn solve(space: &Space<'_, '_>, placed: Placed<'_>, point: &Point, visited: &mut Visited) -> Vec<Candidate> {
    let (pins, mut found) = (space.pins, Vec::new());
    let meshes: Vec<Mesh> = point.degrees.iter().map(|degrees| degrees.mesh(space.request.batch)).collect();
    let solve = |prices: Prices| solved(space.prepared, placed.clone(), prices, space.others, (&meshes, pins));
    let all = Prices::default();
    let fastest = solve(all);
    extend(&mut found, (&fastest, all), (space, point, &meshes), visited);
    let fit = found.iter().filter(|candidate| candidate.offload.is_none() && candidate.prediction.fits());
    let best = fit.map(|candidate| candidate.prediction.step.0).fold(f64::INFINITY, f64::min);
    visited.learn(&fastest, point, best.is_infinite());
    if best < f64::INFINITY {
        if overlap::may_need_layouts(&found, space, (visited.least(), best.min(visited.best))) {
            let hidden = solve(overlap::HIDDEN_WIRE);
            if hidden.own.placed.strategies != fastest.own.placed.strategies {
                // They are worth what they are in chunks, which no estimate sees.
                let unbounded = &mut Visited::within(point.away.room.device, f64::INFINITY);
                extend(&mut found, (&hidden, overlap::HIDDEN_WIRE), (space, point, &meshes), unbounded);
            }
        }
        // Axes are solved one by one: where much is missing to the bound, others start elsewhere, and may end lower.
        let is_loose =
            visited.least() > 0.0 && best > LOOSE * visited.least() && best <= CLOSE * visited.best.min(best);
        if is_loose {
            leaner(&mut found, (&solve, &fastest, best), (space, point, &meshes), visited);
        }
        return found;
    }
    let step = found.iter().map(|candidate| candidate.prediction.step.0).fold(f64::INFINITY, f64::min);
    if !point.away.moves() && !visited.is_open(step) {
        visited.may_fit = true;
        return found;
    }
    leaner(&mut found, (&solve, &fastest, step), (space, point, &meshes), visited);
    found
}

/// Adds plans with layouts that take less memory than the fastest ones, whose best plan takes `step` seconds.
fn leaner<'a>(
    found: &mut Vec<Candidate>,
    (solve, fastest, step): (&dyn Fn(Prices) -> Solved<'a>, &Solved<'_>, f64),
    (space, point, meshes): (&Space<'_, '_>, &Point, &[Mesh]),
    visited: &mut Visited,
) {
    let mut known = vec![fastest.own.placed.strategies.clone()];
    for share in LEAN {
        let prices = Prices::default().with_byte(share * step / (point.away.room.device.0 as f64).max(1.0));
        let lean = solve(prices);
        if known.contains(&lean.own.placed.strategies) {
            break;
        }
        extend(found, (&lean, prices), (space, point, meshes), visited);
        known.push(lean.own.placed.strategies);
    }
}

/// Adds candidates of a placed mesh, whose layouts were found for some prices: every ZeRO stage and way to store parameters.
/// Where something would have to be recomputed, the head is cut into smaller chunks as well.
fn extend(
    candidates: &mut Vec<Candidate>,
    (solved, prices): (&Solved<'_>, Prices),
    (space, point, meshes): (&Space<'_, '_>, &Point, &[Mesh]),
    visited: &mut Visited,
) {
    let placed = &solved.own.placed;
    let (pins, bound) = (space.pins, point.away.room.device);
    let smaller = OnceCell::new();
    for (storage, degrees) in point.degrees.iter().enumerate() {
        for zero in zero_stages(!copy_axes(placed.mesh).is_empty(), placed.microbatches, degrees, pins) {
            // Recomputation takes longer than none.
            let is_open = point.away.moves() || {
                let free = solved.predict(storage, zero, Recompute::None, point.work);
                visited.is_open(free.step.0)
            };
            visited.may_fit |= !is_open;
            let room = if is_open { bound } else { Bytes(u64::MAX) };
            let of = |solved: &Solved<'_>| at_zero(solved, prices, (space, point), (storage, zero), room);
            let is_short = |of: &Solved<'_>| {
                let shape = &of.own.shape;
                shape.memory(storage, zero, unforced(&|| shape.menu().steps(), pins)).total() > bound
            };
            let (mut found, mut leanest) = (of(solved), Vec::new());
            if is_open && is_short(solved) {
                let smaller = smaller.get_or_init(|| solved.in_smaller_chunks(space.prepared, bound, (meshes, pins)));
                for solved in smaller {
                    let others = of(solved);
                    if least_step(&others) < least_step(&found) {
                        found.extend(others.into_iter().filter(|other| other.prediction.fits()));
                    } else {
                        leanest = others;
                    }
                    if !is_short(solved) {
                        break;
                    }
                }
            }
            // Where nothing fits by its estimate, the leanest may by its programs.
            if least_step(&found) == f64::INFINITY {
                found.extend(leanest);
            }
            candidates.extend(found);
        }
    }
}

/// The candidates of a placed mesh for one way to store parameters and one ZeRO stage: each recomputation that may be
/// needed to fit in `room`, with each choice of what lies away from the device.
fn at_zero(
    solved: &Solved<'_>,
    prices: Prices,
    (space, point): (&Space<'_, '_>, &Point),
    (storage, zero): (usize, u64),
    room: Bytes,
) -> Vec<Candidate> {
    let Seen { placed, shape, .. } = &solved.own;
    let at = |recompute| At { shape, storage, zero, recompute };
    let total = |recompute| point.away.left(&at(recompute));
    let mut found = Vec::new();
    for recompute in recomputations(&|| shape.menu().steps(), &total, space.pins, (room, space.measure)) {
        let on_device = solved.predict(storage, zero, recompute, point.work);
        let on_device = Prediction { room: point.away.room.device, ..on_device };
        for (offload, relief, prediction) in point.away.choices(&at(recompute), &on_device, placed.cluster) {
            let of = |(overlap_chunks, uneven): (u64, f64)| Candidate {
                degrees: point.degrees[storage].clone(),
                stages: None,
                zero,
                recompute,
                loss_chunks: shape.loss_chunks,
                overlap_chunks,
                within: shape.within(recompute),
                prices,
                offload: offload.clone(),
                relief: relief.clone(),
                prediction: longer(prediction, uneven),
            };
            found.extend(overlap_chunks(shape.uneven, space.pins).into_iter().map(of));
        }
    }
    found
}

/// A prediction with matrix products that take so many seconds longer.
fn longer(of: Prediction, seconds: f64) -> Prediction {
    let step = Seconds(of.step.0 + seconds);
    Prediction { step, matmul: Seconds(of.matmul.0 + seconds), mfu: of.mfu * of.step.0 / step.0, ..of }
}

/// The recomputations to try, of a menu of `all` steps, where each leaves a `total` on the device: the pinned one; else none,
/// and where that does not fit, the least that fits.
pub(in crate::search) fn recomputations(
    all: &dyn Fn() -> u64,
    total: &dyn Fn(Recompute) -> Bytes,
    pins: &Pins,
    (bound, measure): (Bytes, Measure),
) -> Vec<Recompute> {
    let mut choices = vec![unforced(all, pins)];
    let is_free = pins.recompute.is_none_or(|pin| pin == Recompute::BY_NEED);
    if is_free && total(Recompute::None) > bound {
        let all = all();
        for share in measure.shares {
            let fits = |count| total(Recompute::Values(count)).0 as f64 <= share * bound.0 as f64;
            choices.push(Recompute::Values(least_steps(all, fits).unwrap_or(all)));
        }
        choices.dedup();
    }
    choices
}

/// The recomputation, of a menu of `all` steps, where memory is no limit: the pinned one, or none.
pub(in crate::search) fn unforced(all: &dyn Fn() -> u64, pins: &Pins) -> Recompute {
    let pinned = pins.recompute.filter(|pin| *pin != Recompute::BY_NEED);
    pinned.map_or(Recompute::None, |pin| pin.within(all()))
}

/// The fewest steps of recomputation that fit, by bisection; `None` if not even all do.
fn least_steps(steps: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    if !fits(steps) {
        return None;
    }
    let (mut low, mut high) = (0, steps);
    while low + 1 < high {
        let middle = low.midpoint(high);
        if fits(middle) { high = middle } else { low = middle }
    }
    Some(high)
}
