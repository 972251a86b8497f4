//! Why a plan is as it is: what the other choices would cost, by the search's own functions.
//!
//! The plan's graph is prepared as the search prepared it. For a tensor axis, the cost graph is solved
//! once per choice of a node, with that choice forced and all others free; what the forced optimum
//! takes longer is what the choice costs. What divides the batch was never a choice of one node, and
//! where parameters are stored is one of the ZeRO stages, which are priced as whole plans.

mod elsewhere;

use super::choice::pins::{Pins, Recompute};
use super::choose::overlap::{HIDDEN_WIRE, is_in_chunks};
use super::error::PlanError;
use super::estimate::Shape;
use super::placed::{paced, place_batch};
use super::prepared;
use super::work::model_work;
use crate::cluster::Cluster;
use crate::error::PassError;
use crate::keep_casts::cast_again;
use crate::rematerialize::without_recomputation;
use crate::shard::family::{copy_axes, searched_axes};
use crate::shard::objective::Prices;
use crate::shard::place::{choices_of, place_axes};
use crate::shard::tensor::{Conversion, Placed, Prepared};
use elsewhere::elsewhere;
use shardc_ir::plan::Prediction;
use shardc_ir::{AxisId, Bytes, Choice, Family, Graph, NodeId, Plan, PrimaryMap, Seconds, Target};
use std::collections::{BTreeMap, BTreeSet};

pub use elsewhere::Elsewhere;

/// What a node might do with one axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The axis.
    pub axis: AxisId,
    /// What the plan does.
    pub chosen: Choice,
    /// Every choice, and what it would cost a step beyond the best; cheapest first.
    pub costs: Vec<(Choice, Seconds)>,
}

/// What a value of the forward pass that the backward pass reads costs, with those alike in all blocks: kept or computed
/// again.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Again {
    /// What it takes in a step to compute them again.
    pub seconds: Seconds,
    /// What a rank holds of them where a microbatch's backward pass begins, if they are kept.
    pub bytes: Bytes,
}

/// The alternatives to some parts of a plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Why {
    /// Per node that was asked for, its options on each tensor axis.
    pub options: BTreeMap<NodeId, Vec<Options>>,
    /// Per node that was asked for, what it does with an axis because that divides the batch. What else it does with
    /// such an axis it does because of how parameters are stored.
    pub batch: BTreeMap<NodeId, Choice>,
    /// Per node that was asked for, what its results that may be computed again cost; of a plan in chunks that overlap,
    /// and of stages of a pipeline, nothing.
    pub again: BTreeMap<NodeId, Again>,
    /// The ZeRO stages on the plan's mesh, with the plan's recomputation; of a plan in chunks that overlap none.
    pub stages: Vec<(u64, Prediction)>,
    /// Where the ranks divide nothing but the batch, the fastest plans whose ranks divide more.
    pub elsewhere: Vec<Elsewhere>,
}

/// The plan's graph as the search saw it, without recomputation and kept casts.
///
/// # Errors
/// Only a bug.
pub fn searched_graph(plan: &Plan) -> Result<Graph, PlanError> {
    searched(plan).map(|(graph, _)| graph)
}

/// The same, and the plan's node of each of its nodes.
pub(super) fn searched(plan: &Plan) -> Result<(Graph, PrimaryMap<NodeId, NodeId>), PlanError> {
    let bug = |error: PassError| PlanError::Bug(error.to_string());
    without_recomputation(&cast_again(&plan.graph).map_err(bug)?).map_err(bug)
}

/// What speaks for a plan's choices at some nodes.
///
/// # Errors
/// A plan that was not made by the search for this cluster and does not divide as it says.
pub fn why(plan: &Plan, cluster: &Cluster, target: &dyn Target, nodes: &BTreeSet<NodeId>) -> Result<Why, PlanError> {
    let (graph, from) = searched(plan)?;
    let prepared = prepared(&graph, &plan.request, target);
    let (paced, _) = &paced(&graph, cluster);
    let Some(mut placed) = place_batch(&prepared, &plan.mesh, paced)? else {
        let message = "the batch of the plan does not divide over its mesh".to_string();
        return Err(PlanError::Pin { pin: plan.choice.clone(), message });
    };
    // A copy that is computed again does as its original.
    let original = |node: &NodeId| match plan.graph.node(*node).role {
        shardc_ir::Role::Recompute(of) => of,
        _ => *node,
    };
    let back: BTreeMap<NodeId, NodeId> = from.iter().map(|(new, old)| (*old, new)).collect();
    let new = |node: &NodeId| back.get(&original(node)).copied();
    let class = |node: &NodeId| new(node).map(|new| prepared.folded.class[new]);
    let classes: Vec<usize> = nodes.iter().filter_map(class).collect::<BTreeSet<_>>().into_iter().collect();
    let batch = nodes.iter().filter_map(|node| Some((*node, prepared.batch[class(node)?]))).collect();
    let asked: Vec<_> = nodes.iter().filter_map(|node| Some((*node, new(node)?))).collect();
    let elsewhere = elsewhere(plan, &prepared, cluster, &asked)?;
    let mut why = Why { batch, elsewhere, ..Why::default() };
    let (conversions, prices) = place_as(plan, (&prepared, &from), &mut placed);
    for axis in searched_axes(&plan.mesh) {
        let costs = choices_of(&prepared, &placed, (axis, prices), &classes);
        for node in nodes {
            let Some(place) = class(node).and_then(|class| classes.binary_search(&class).ok()) else { continue };
            let mut costs: Vec<(Choice, Seconds)> =
                costs[place].iter().map(|(choice, cost)| (*choice, Seconds(*cost))).collect();
            costs.sort_by(|a, b| a.1.0.total_cmp(&b.1.0));
            let chosen = plan.strategies[*node].choice(axis);
            why.options.entry(*node).or_default().push(Options { axis, chosen, costs });
        }
    }
    if is_in_chunks(plan) {
        return Ok(why);
    }
    // Whatever was cut into chunks is cut in the plan's graph already.
    let shape = Shape::new(&prepared, &placed, &conversions, 1, std::slice::from_ref(&plan.mesh));
    if plan.stages() == 1 {
        let of = |node: &NodeId| Some((*node, again(&prepared, &shape, class(node)?)?));
        why.again = nodes.iter().filter_map(of).collect();
    }
    let work = model_work(&graph, paced);
    let recompute = Pins::chosen(plan).recompute.unwrap_or(Recompute::None);
    let is_shared = !copy_axes(&plan.mesh).is_empty();
    let has_parts = !plan.mesh.family(Family::Fsdp).is_empty();
    let stages = if has_parts { 1..=3 } else { 0..=if is_shared { 3 } else { 0 } };
    why.stages = stages.map(|zero| (zero, shape.predict(&placed, 0, zero, recompute, work))).collect();
    Ok(why)
}

/// Places all axes for the prices for which a plan's layouts were found: of one in chunks they may be for these.
fn place_as(
    plan: &Plan,
    (prepared, from): (&Prepared<'_>, &PrimaryMap<NodeId, NodeId>),
    placed: &mut Placed<'_>,
) -> (Vec<Conversion>, Prices) {
    if is_in_chunks(plan) {
        let mut own = placed.clone();
        let conversions = place_axes(prepared, &mut own, HIDDEN_WIRE);
        let is_as_planned =
            |(new, old): (NodeId, &NodeId)| own.strategies[prepared.folded.class[new]] == plan.strategies[*old];
        if from.iter().all(is_as_planned) {
            *placed = own;
            return (conversions, HIDDEN_WIRE);
        }
    }
    (place_axes(prepared, placed, Prices::default()), Prices::default())
}

/// What the results of a class cost that live where the backward pass begins and can be computed again, if any do.
fn again(prepared: &Prepared<'_>, shape: &Shape<'_>, class: usize) -> Option<Again> {
    let alike = prepared.lives.at_turn(class).iter().map(|[_, can_go]| *can_go);
    let bytes: f64 = alike.clone().zip(&shape.sizes()[class]).map(|(count, size)| count * *size as f64).sum();
    let seconds = shape.each(class).seconds() * alike.fold(0.0, f64::max) * shape.microbatches();
    (bytes > 0.0).then_some(Again { seconds: Seconds(seconds), bytes: Bytes(bytes as u64) })
}
