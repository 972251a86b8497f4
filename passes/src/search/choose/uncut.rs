//! Plans whose head is whole, where that of the fastest is cut.
//!
//! A head is cut by its tokens whatever the memory: less lives at a time, and what it takes is little in most models.
//! Where it is not, as with few layers, and memory is left, the mesh is solved again with the head whole; programs tell
//! which of the two is faster.

use super::fitted::solved_again;
use super::overstated::NODES;
use crate::cost::Machine;
use crate::search::candidate::{Candidate, is_long};
use crate::search::choice::pins::Pins;
use crate::search::error::PlanError;
use crate::search::measure::CLOSE;
use crate::search::space::Space;
use shardc_ir::Family;

/// The share of a step from which on what cutting the head takes is looked at.
const LEAST: f64 = 0.005;

/// The candidate of another's mesh, ZeRO stage and schedule with the head whole, if that fits by its estimate and is not
/// known to be slower; the other's programs take so many seconds.
///
/// # Errors
/// A bug.
pub(super) fn whole(of: &Candidate, step: f64, space: &Space<'_, '_>) -> Result<Option<Candidate>, PlanError> {
    let is_open = space.pins.loss_chunks.is_none() && space.prepared.graph.node_count() <= NODES;
    if !is_open || of.loss_chunks == 1 || is_long(of, space.request.batch) || again(of, space) < LEAST * step {
        return Ok(None);
    }
    let pins = Pins { loss_chunks: Some(1), ..space.pins.clone() };
    let found = solved_again(of, &Space { pins: &pins, ..*space })?;
    let may_win = |own: &Candidate| own.prediction.fits() && own.prediction.step.0 < CLOSE * of.prediction.step.0;
    Ok(found.into_iter().find(|own| own.offload == of.offload && may_win(own)))
}

/// Seconds of a step in which the sums of a head's parts are read and written again, which a whole head does not.
fn again(of: &Candidate, space: &Space<'_, '_>) -> f64 {
    let graph = space.prepared.graph;
    let sums = space.prepared.head.iter().flat_map(|head| head.sums(graph));
    let bytes: u64 = sums.map(|(id, result)| graph.ty(graph.node(id).results[result]).bytes().0).sum();
    let own = 2.0 * bytes as f64 / of.degrees.degree(Family::Tensor) as f64;
    let times = (of.loss_chunks - 1) * of.mesh(space.request.batch).microbatches();
    own * times as f64 / Machine::own(&space.cluster.device).bandwidth()
}
