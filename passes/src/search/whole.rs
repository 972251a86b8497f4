//! Plans without stages: layouts that are the fastest, or leaner where those do not fit, with every choice of ZeRO,
//! recomputation and what leaves the device.

use super::away::At;
use super::fitted::{recomputations, unforced};
use super::pins::Recompute;
use super::placed::{Seen, Solved, solved};
use super::visit::Visited;
use super::{Candidate, Degrees, Pins, Point, Space};
use crate::shard::family::copy_axes;
use crate::shard::tensor::Placed;
use shardc_ir::plan::Prediction;
use shardc_ir::{Bytes, Mesh};
use std::cell::OnceCell;

/// Prices of a byte at which leaner layouts are looked for where the fastest do not fit, as shares of the whole step for the whole memory; the highest first.
const LEAN: [f64; 3] = [10.0, 1.0, 0.1];

/// The plans of a mesh without stages, of which the batch is placed.
pub(super) fn solve(space: &Space<'_, '_>, placed: Placed<'_>, point: &Point, visited: &mut Visited) -> Vec<Candidate> {
    let (pins, mut found) = (space.pins, Vec::new());
    let meshes: Vec<Mesh> = point.degrees.iter().map(|degrees| degrees.mesh(space.request.batch)).collect();
    let solve = |byte: f64| solved(space.prepared, placed.clone(), byte, space.others, (&meshes, pins));
    let fastest = solve(0.0);
    extend(&mut found, (&fastest, 0.0), (space, point, &meshes), visited);
    if found.iter().any(|candidate| candidate.offload.is_none() && candidate.prediction.fits()) {
        return found;
    }
    let step = found.iter().map(|candidate| candidate.prediction.step.0).fold(f64::INFINITY, f64::min);
    if !point.away.moves() && !visited.is_open(step) {
        visited.may_fit = true;
        return found;
    }
    let mut known = vec![fastest.own.placed.strategies];
    for share in LEAN {
        let byte = share * step / (point.away.room.device.0 as f64).max(1.0);
        let lean = solve(byte);
        if known.contains(&lean.own.placed.strategies) {
            break;
        }
        extend(&mut found, (&lean, byte), (space, point, &meshes), visited);
        known.push(lean.own.placed.strategies);
    }
    found
}

/// Adds the ZeRO stages and recomputations of a placed mesh, whose layouts were found for a price of a byte. Where
/// something would have to be computed again, the head is cut into smaller chunks as well.
fn extend(
    candidates: &mut Vec<Candidate>,
    (solved, byte): (&Solved<'_>, f64),
    (space, point, meshes): (&Space<'_, '_>, &Point, &[Mesh]),
    visited: &mut Visited,
) {
    let Seen { placed, shape, .. } = &solved.own;
    let (pins, bound) = (space.pins, point.away.room.device);
    let smaller = OnceCell::new();
    for (storage, degrees) in point.degrees.iter().enumerate() {
        for zero in zero_stages(!copy_axes(placed.mesh).is_empty(), placed.microbatches, degrees, pins) {
            // Recomputation takes longer than none.
            let is_open = point.away.moves() || {
                let free = solved.predict(storage, zero, Recompute::None, point.work);
                visited.is_open(free.step.0)
            };
            if !is_open {
                let all = pins.recompute.unwrap_or(Recompute::Values(shape.menu().steps()));
                visited.may_fit |= shape.memory(storage, zero, all).total() <= bound;
            }
            let room = if is_open { bound } else { Bytes(u64::MAX) };
            let of = |solved: &Solved<'_>| {
                let (Seen { placed, shape, .. }, mut found) = (&solved.own, Vec::new());
                let at = |recompute| At { shape, storage, zero, recompute };
                let total = |recompute| point.away.left(&at(recompute));
                for recompute in recomputations(shape.menu().steps(), &total, pins, (room, space.measure)) {
                    let on_device = solved.predict(storage, zero, recompute, point.work);
                    let on_device = Prediction { room: bound, ..on_device };
                    let at = at(recompute);
                    for (offload, relief, prediction) in point.away.choices(&at, &on_device, placed.cluster) {
                        found.push(Candidate {
                            degrees: degrees.clone(),
                            stages: None,
                            zero,
                            recompute,
                            loss_chunks: shape.loss_chunks,
                            overlap_chunks: pins.overlap_chunks.unwrap_or(1),
                            within: shape.within(recompute),
                            byte,
                            offload,
                            relief,
                            prediction,
                        });
                    }
                }
                found
            };
            let is_short = |of: &Solved<'_>| {
                let shape = &of.own.shape;
                shape.memory(storage, zero, unforced(shape.menu().steps(), pins)).total() > bound
            };
            let fastest = |of: &[Candidate]| {
                let fit = of.iter().filter(|candidate| candidate.prediction.fits());
                fit.map(|candidate| candidate.prediction.step.0).fold(f64::INFINITY, f64::min)
            };
            let (mut found, mut leanest) = (of(solved), Vec::new());
            if is_open && is_short(solved) {
                let smaller = smaller.get_or_init(|| solved.in_smaller_chunks(space.prepared, bound, (meshes, pins)));
                for solved in smaller {
                    let others = of(solved);
                    if fastest(&others) < fastest(&found) {
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
            if fastest(&found) == f64::INFINITY {
                found.extend(leanest);
            }
            candidates.extend(found);
        }
    }
}

/// The stages of ZeRO that are tried where parameters are stored in one way.
pub(super) fn zero_stages(has_copies: bool, microbatches: u64, degrees: &Degrees, pins: &Pins) -> Vec<u64> {
    // Where every rank stores all there are no parts to have replicas of; with one microbatch stage 2 is stage 1.
    let is_kept = |zero: u64| match (has_copies, degrees.degree("fsdp") > 1) {
        (false, _) => zero == 0,
        (true, has_parts) => (zero > 0 || !has_parts) && (zero != 2 || microbatches > 1),
    };
    (0..=3).filter(|zero| pins.zero.map_or(is_kept(*zero), |pin| pin == *zero)).collect()
}
