//! Meshes with the batch placed, and with the fastest layouts of all else.

use super::estimate::Shape;
use super::{Pins, PlanError};
use crate::cluster::Cluster;
use crate::shard::coupled::is_possible_over;
use crate::shard::family::batch_axes;
use crate::shard::place::place_axes;
use crate::shard::tensor::{Placed, Prepared};
use shardc_ir::{AxisId, Mesh, Strategy};
use std::collections::BTreeMap;

/// A mesh of which the batch is placed with the fastest layouts if a byte costs so many seconds, and the sums
/// from which its plans are predicted. `meshes` are the ways to store parameters.
pub(super) fn solved<'a>(
    prepared: &'a Prepared<'_>,
    mut placed: Placed<'a>,
    byte: f64,
    meshes: &[Mesh],
    pins: &Pins,
) -> (Placed<'a>, Shape<'a>) {
    let conversions = place_axes(prepared, &mut placed, byte);
    let shape = Shape::new(prepared, &placed, &conversions, loss_chunks(prepared, &placed, pins), meshes);
    (placed, shape)
}

/// A mesh with the layouts that are fastest on it, and the sums from which its plans are predicted; `None`
/// where the batch does not divide.
///
/// # Errors
/// Only a bug.
pub fn fastest<'a>(
    prepared: &'a Prepared<'_>,
    mesh: &'a Mesh,
    cluster: &'a Cluster,
) -> Result<Option<(Placed<'a>, Shape<'a>)>, PlanError> {
    let placed = place_batch(prepared, mesh, cluster)?;
    Ok(placed.map(|placed| solved(prepared, placed, 0.0, std::slice::from_ref(mesh), &Pins::default())))
}

/// Into how many chunks the head is cut: as pinned, or by the tokens of a microbatch on one rank.
pub(super) fn loss_chunks(prepared: &Prepared<'_>, placed: &Placed<'_>, pins: &Pins) -> u64 {
    let strategy = |id| &placed.strategies[prepared.folded.class[id]];
    let Some(head) = &prepared.head else { return 1 };
    if !head.is_cut_whole(prepared.graph, placed.mesh, strategy) {
        return 1;
    }
    let class = prepared.folded.class[head.entropy];
    let (_, results) = prepared.local_types(class, &placed.strategies[class], placed.mesh);
    pins.loss_chunks.unwrap_or_else(|| head.chunks(prepared.graph, results[0].elements()))
}

/// The strategies with the batch divided over dp and mb; `None` where some node's batch does not divide.
pub(super) fn place_batch<'a>(
    prepared: &Prepared<'_>,
    mesh: &'a Mesh,
    cluster: &'a Cluster,
) -> Result<Option<Placed<'a>>, PlanError> {
    let Some(strategies) = divide_batch(prepared, mesh) else { return Ok(None) };
    if mesh.ids().any(|axis| mesh.is_time(axis) && !is_possible_over(prepared, &strategies, axis)) {
        return Ok(None);
    }
    let (microbatches, locals) = (mesh.microbatches(), prepared.locals(cluster));
    Ok(Some(Placed { mesh, cluster, strategies, microbatches, handed: BTreeMap::new(), locals }))
}

/// The strategies with the batch divided over dp and mb, whether or not samples depend on each other.
pub(super) fn divide_batch(prepared: &Prepared<'_>, mesh: &Mesh) -> Option<Vec<Strategy>> {
    let axes = batch_axes(mesh);
    let divided = prepared.batch.iter().zip(&prepared.rules).map(|(choice, rule)| {
        let add = |strategy: Strategy, axis: &AxisId| strategy.with(*axis, *choice);
        let strategy = axes.iter().fold(Strategy::default(), add);
        rule.check(&strategy, mesh).is_ok().then_some(strategy)
    });
    divided.collect()
}
