//! Meshes with the batch placed, and with the fastest layouts of all else.
//!
//! Where memory is short, the head and its loss are cut into smaller chunks as well ([`Solved::in_smaller_chunks`]).
//! Each further chunk reads and writes the gradient of the head's weight once more.

use super::candidate::Candidate;
use super::choice::pins::{Pins, Recompute};
use super::error::PlanError;
use super::estimate::Shape;
use super::work::Work;
use crate::cluster::Cluster;
use crate::cost::{Machine, Pass};
use crate::head::Head;
use crate::shard::coupled::needed_whole;
use crate::shard::family::batch_axes;
use crate::shard::objective::Prices;
use crate::shard::place::place_axes_seen;
use crate::shard::tensor::{Conversion, Placed, Prepared};
use shardc_ir::plan::Prediction;
use shardc_ir::{AxisId, Bytes, Family, Graph, Mesh, Node, NodeId, Strategy};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The share of the memory from which the logits and their derivative are worth to be cut further.
const LEAST_HEAD: f64 = 0.02;

/// A placed mesh as one kind of devices sees it, and the sums from which its plans are predicted.
pub(super) struct Seen<'a> {
    pub placed: Placed<'a>,
    conversions: Vec<Conversion>,
    pub shape: Shape<'a>,
}

impl<'a> Seen<'a> {
    /// With the head in so many chunks, and these ways to store parameters.
    fn new(
        prepared: &'a Prepared<'_>,
        placed: Placed<'a>,
        conversions: Vec<Conversion>,
        chunks: u64,
        meshes: &[Mesh],
    ) -> Self {
        let shape = Shape::new(prepared, &placed, &conversions, chunks, meshes);
        Self { placed, conversions, shape }
    }
}

/// A mesh with the fastest layouts, as the kinds of devices see it.
pub(super) struct Solved<'a> {
    /// As that for which the layouts are the fastest.
    pub own: Seen<'a>,
    /// As the others.
    pub others: Vec<Seen<'a>>,
}

impl<'a> Solved<'a> {
    /// The same with the head in more chunks: they take longer, and less lives at a time. None where the head is small
    /// beside a memory of so many bytes, or where the number of chunks is pinned.
    pub fn in_smaller_chunks(
        &self,
        prepared: &'a Prepared<'_>,
        memory: Bytes,
        (meshes, pins): (&[Mesh], &Pins),
    ) -> Vec<Self> {
        let Some(head) = prepared.head.as_ref().filter(|_| pins.loss_chunks.is_none()) else { return Vec::new() };
        let (own, chunks) = (&self.own, self.own.shape.loss_chunks);
        let class = |id: NodeId| prepared.folded.class[id];
        let held: u64 = head.passing(prepared.graph).map(|(id, result)| own.shape.sizes()[class(id)][result]).sum();
        if (held as f64) < LEAST_HEAD * memory.0 as f64 || !is_head_whole(prepared, &own.placed) {
            return Vec::new();
        }
        let finer = |chunks: u64| {
            let seen = |Seen { placed, conversions, .. }: &Seen<'a>| {
                Seen::new(prepared, placed.clone(), conversions.clone(), chunks, meshes)
            };
            Self { own: seen(&self.own), others: self.others.iter().map(seen).collect() }
        };
        head.finer(prepared.graph, chunks, head_tokens(prepared, &own.placed)).into_iter().map(finer).collect()
    }

    /// Time and memory of a step ([`Shape::predict`]) of which every rank does the same part: all take as long as the
    /// slowest kind.
    pub fn predict(&self, storage: usize, zero: u64, recompute: Recompute, work: Work) -> Prediction {
        let of = |Seen { placed, shape, .. }: &Seen<'_>| shape.predict(placed, storage, zero, recompute, work);
        let own = of(&self.own);
        let longer = |a: Prediction, b: Prediction| if b.step.0 > a.step.0 { b } else { a };
        Prediction { memory: own.memory, ..self.others.iter().map(of).fold(own, longer) }
    }
}

/// A mesh of which the batch is placed with the fastest layouts at these prices, and the sums
/// from which its plans are predicted, as kinds of devices see it: its own cluster, and the `others`. `meshes` are the
/// ways to store parameters.
pub(super) fn solved<'a>(
    prepared: &'a Prepared<'_>,
    mut placed: Placed<'a>,
    prices: Prices,
    others: &'a [Cluster],
    (meshes, pins): (&[Mesh], &Pins),
) -> Solved<'a> {
    let (own, of_others) = place_axes_seen(prepared, &mut placed, prices, others);
    let chunks = loss_chunks(prepared, &placed, pins);
    let seen = |(cluster, conversions): (&'a Cluster, Vec<Conversion>)| {
        let locals = if cluster == placed.cluster { Arc::clone(&placed.locals) } else { prepared.locals(cluster) };
        Seen::new(prepared, Placed { cluster, locals, ..placed.clone() }, conversions, chunks, meshes)
    };
    let others = others.iter().zip(of_others).map(seen).collect();
    Solved { own: seen((placed.cluster, own)), others }
}

/// The cluster as that of its devices sees it which takes the longest for the whole of a graph: for it the layouts are
/// to be the fastest. And as the others do.
pub(super) fn paced(graph: &Graph, cluster: &Cluster) -> (Cluster, Vec<Cluster>) {
    let all = (0..cluster.devices().len()).collect();
    let mut seen = cluster.among(&all);
    let slowest = match &seen[..] {
        [_] => 0,
        _ => {
            let seconds = |cluster: &Cluster| -> f64 {
                let of = |(id, node): (NodeId, &Node)| {
                    let (operands, results) = (graph.operand_types(id), graph.result_types(id));
                    Machine::own(&cluster.device).seconds(&node.op, &operands, &results, Pass::of(node.role)).0.0
                };
                graph.nodes().map(of).sum()
            };
            let taken = seen.iter().map(seconds).enumerate();
            // Of equals the first.
            taken.rev().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(index, _)| index)
        }
    };
    (seen.remove(slowest), seen)
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
    let solve =
        |placed| solved(prepared, placed, Prices::default(), &[], (std::slice::from_ref(mesh), &Pins::default())).own;
    Ok(placed.map(solve).map(|Seen { placed, shape, .. }| (placed, shape)))
}

/// Into how many chunks the head is cut: as pinned, or by the tokens of a microbatch on one rank.
fn loss_chunks(prepared: &Prepared<'_>, placed: &Placed<'_>, pins: &Pins) -> u64 {
    let head = prepared.head.as_ref().filter(|_| is_head_whole(prepared, placed));
    let by_tokens = |head: &Head| head.chunks(prepared.graph, head_tokens(prepared, placed));
    head.map_or(1, |head| pins.loss_chunks.unwrap_or_else(|| by_tokens(head)))
}

/// Leaves candidates out whose head is not cut as it is pinned; tells whether there were any.
pub(super) fn drop_unpinned_chunks(candidates: &mut Vec<Candidate>, pins: &Pins) -> bool {
    let all = candidates.len();
    candidates.retain(|candidate| pins.loss_chunks.is_none_or(|pin| pin <= 1 || candidate.loss_chunks == pin));
    candidates.len() < all
}

/// Why pins leave nothing where all candidates were left out.
pub(super) fn uncut_head(pins: &Pins) -> PlanError {
    let pin = format!("loss_chunks={}", pins.loss_chunks.unwrap_or(1));
    let mut pinned = pins.degrees().filter(|(family, degree)| Family::CONTEXT.contains(family) && *degree > 1);
    let pinned = pinned.next().map(|(family, degree)| format!("leave {family}={degree} out"));
    let other = pinned.unwrap_or_else(|| "pin cp=1".to_string());
    let message =
        format!("ranks divide the sequence of the loss, and cut nothing of their parts; leave it out, or {other}");
    PlanError::Pin { pin, message }
}

/// Whether there is a head whose sequence is whole on each rank, so that it can be cut.
fn is_head_whole(prepared: &Prepared<'_>, placed: &Placed<'_>) -> bool {
    let strategy = |id| &placed.strategies[prepared.folded.class[id]];
    prepared.head.as_ref().is_some_and(|head| head.is_cut_whole(prepared.graph, placed.mesh, strategy))
}

/// The tokens of a microbatch on one rank.
fn head_tokens(prepared: &Prepared<'_>, placed: &Placed<'_>) -> u64 {
    let Some(head) = &prepared.head else { return 0 };
    let class = prepared.folded.class[head.entropy];
    let (_, results) = prepared.local_types(class, &placed.strategies[class], placed.mesh);
    results[0].elements()
}

/// The strategies with the batch divided over dp and mb; `None` where some node's batch does not divide.
pub(super) fn place_batch<'a>(
    prepared: &Prepared<'_>,
    mesh: &'a Mesh,
    cluster: &'a Cluster,
) -> Result<Option<Placed<'a>>, PlanError> {
    let Some(strategies) = divide_batch(prepared, mesh) else { return Ok(None) };
    if coupling(prepared, mesh, &strategies).is_some() {
        return Ok(None);
    }
    let (microbatches, locals) = (mesh.microbatches(), prepared.locals(cluster));
    Ok(Some(Placed {
        mesh,
        cluster,
        strategies,
        microbatches,
        handed: BTreeMap::new(),
        locals,
        routes: Arc::default(),
    }))
}

/// What stands against dividing the batch over microbatches as these strategies do.
fn coupling(prepared: &Prepared<'_>, mesh: &Mesh, strategies: &[Strategy]) -> Option<NodeId> {
    mesh.ids().filter(|axis| mesh.is_time(*axis)).find_map(|axis| needed_whole(prepared, strategies, axis))
}

/// Why the batch is not divided over a mesh, if that is not because of sizes: what is needed for all samples at once.
pub(super) fn coupled(prepared: &Prepared<'_>, mesh: &Mesh) -> Option<NodeId> {
    coupling(prepared, mesh, &divide_batch(prepared, mesh)?)
}

/// The strategies with the batch divided over dp and mb, whether or not samples depend on each other.
fn divide_batch(prepared: &Prepared<'_>, mesh: &Mesh) -> Option<Vec<Strategy>> {
    let axes = batch_axes(mesh);
    let divided = prepared.batch.iter().zip(&prepared.rules).map(|(choice, rule)| {
        let add = |strategy: Strategy, axis: &AxisId| strategy.with(*axis, *choice);
        let strategy = axes.iter().fold(Strategy::default(), add);
        rule.check(&strategy, mesh).is_ok().then_some(strategy)
    });
    divided.collect()
}
