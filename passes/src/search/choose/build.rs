//! Makes the annotated plan of one candidate.

use super::outcome::breakdown;
use crate::chunk::{Origin, chunk, strategy_for};
use crate::cluster::Cluster;
use crate::error::PassError;
use crate::pipeline::shared::sum_behind_loop;
use crate::rematerialize::rematerialize_from;
use crate::search::candidate::Candidate;
use crate::search::choice::pins::Recompute;
use crate::search::choice::stages::Stages;
use crate::search::error::PlanError;
use crate::search::estimate::Shape;
use crate::search::estimate::recompute::Selected;
use crate::search::placed::place_batch;
use crate::search::stages::line::Line;
use crate::shard::family::{batch_axes, copy_axes};
use crate::shard::place::place_axes;
use crate::shard::prepare::parameter_values;
use crate::shard::tensor::Prepared;
use crate::shard::zero::shard_storage;
use crate::split_batch::order::{Ordered, order};
use crate::split_batch::sequence::{query_parts, sequence_factors};
use crate::split_batch::{Step, split_batch};
use shardc_ir::plan::{Memory, Prediction, Request};
use shardc_ir::verify::BEFORE_LOOP;
use shardc_ir::{Choice, Family, Graph, NodeId, OpDef, Pipeline, Plan, PrimaryMap, Role, SecondaryMap, Strategy};
use std::collections::BTreeMap;

/// Lowers and simulates a plan: what its programs take.
pub type Confirm<'a> = &'a (dyn Fn(&Plan) -> Result<Exact, String> + Sync);

/// Solves the candidate's mesh again and annotates every node with its strategy. Copies of a node, by recomputation or
/// in chunks, keep the strategy of the original: the rewritten graph, solved anew, might get layouts of another memory
/// than was estimated.
pub fn build(
    prepared: &Prepared<'_>,
    line: Option<&Line>,
    cluster: &Cluster,
    request: &Request,
    candidate: &Candidate,
) -> Result<Plan, PlanError> {
    let mesh = candidate.mesh(request.batch);
    let unplaced = || PlanError::Bug(format!("{} cannot be placed again", candidate.choice()));
    let mut placed = place_batch(prepared, &mesh, cluster)?.ok_or_else(unplaced)?;
    let conversions = place_axes(prepared, &mut placed, candidate.prices);
    let meshes = std::slice::from_ref(&mesh);
    let shape = Shape::new(prepared, &placed, &conversions, candidate.loss_chunks, meshes);
    let selected = selected(prepared, line, &shape, candidate, mesh.degree(Family::Pipeline));
    let again = |block: &str| prepared.blocks.named(block).is_some_and(|block| selected.way(block).is_some());
    let keep =
        |id: NodeId| prepared.blocks.of(id).is_none_or(|block| !selected.is_again(block, prepared.folded.class[id]));
    let bug = |error: PassError| PlanError::Bug(error.to_string());
    let (whole, from) = rematerialize_from(prepared.graph, &again, &keep).map_err(bug)?;
    let (graph, origins) = chunk(&whole, candidate.loss_chunks).map_err(bug)?;
    let class = |id: NodeId| prepared.folded.class[from[id]];
    let strategies = in_chunks(&graph, &origins, &whole, &|id| &placed.strategies[class(id)]);
    let mut pipeline = Pipeline::default();
    if let (Some(stages), Some(line)) = (&candidate.stages, line) {
        let chunks = line.chunks(prepared, &stages.cuts);
        for (id, origin) in &origins {
            let (Origin::Node(of) | Origin::Operand(of, _) | Origin::Result(of, _)) = *origin;
            pipeline.chunks[id] = chunks[from[of]];
        }
        (pipeline.schedule, pipeline.per_stage) = (stages.schedule, stages.per_stage);
        (pipeline.in_flight, pipeline.delayed) = (stages.limits.in_flight, stages.limits.delayed);
        pipeline.lengths.clone_from(&stages.lengths);
    }
    let mut plan = Plan {
        graph,
        strategies,
        reduce_in_loop: candidate.zero >= 2,
        request: request.clone(),
        pipeline,
        choice: candidate.choice(),
        prediction: candidate.prediction,
        mesh,
        ..Plan::default()
    };
    if candidate.overlap_chunks > 1 {
        let batch = |id: NodeId| {
            let Origin::Node(of) = origins[id] else { return None };
            if let Choice::Factor(factor) = prepared.batch[class(of)] { Some(factor) } else { None }
        };
        overlap(&mut plan, candidate, &batch, cluster)?;
    }
    if candidate.zero >= 1 {
        shard_storage(&plan.graph, &plan.mesh, &mut plan.strategies);
    }
    if candidate.stages.is_some() {
        sum_behind_loop(&plan.graph, &plan.mesh, &mut plan.pipeline, &mut plan.strategies);
    }
    check(&plan)?;
    if candidate.zero == 3 {
        mark_transient(&mut plan);
    }
    Ok(plan)
}

/// What a candidate recomputes: in each of `count` stages as is said of that stage, or the same in all blocks.
fn selected<'a>(
    prepared: &Prepared<'_>,
    line: Option<&Line>,
    shape: &'a Shape<'_>,
    candidate: &Candidate,
    count: u64,
) -> Selected<'a> {
    let by_stage = candidate.stages.as_ref().filter(|stages| !stages.recompute.is_empty());
    let Some((stages, line)) = by_stage.zip(line) else { return shape.menu().select(candidate.recompute) };
    let of_block = recompute_of_blocks(prepared, line, stages, count);
    shape.menu().select_by(&|block| of_block.get(&block).copied().unwrap_or(Recompute::None))
}

/// The strategies of a graph with its head in chunks, from those of the `whole` graph, by where its nodes come from.
fn in_chunks<'a>(
    graph: &Graph,
    origins: &PrimaryMap<NodeId, Origin>,
    whole: &Graph,
    of_whole: &dyn Fn(NodeId) -> &'a Strategy,
) -> SecondaryMap<NodeId, Strategy> {
    let mut strategies: SecondaryMap<NodeId, Strategy> = SecondaryMap::new();
    for (id, origin) in origins {
        strategies[id] = match *origin {
            Origin::Node(of) => of_whole(of).clone(),
            Origin::Operand(of, index) => {
                strategy_for(graph.rule(id), &whole.rule(of).operand_sharding(index, of_whole(of)))
            }
            Origin::Result(of, index) => {
                strategy_for(graph.rule(id), &whole.rule(of).result_sharding(index, of_whole(of)))
            }
        };
    }
    strategies
}

/// Cuts the blocks of a plan into chunks that overlap: of samples, which `batch` names the factor of, or of the tokens of
/// a single sample.
fn overlap(
    plan: &mut Plan,
    candidate: &Candidate,
    batch: &dyn Fn(NodeId) -> Option<usize>,
    cluster: &Cluster,
) -> Result<(), PlanError> {
    let Plan { graph, strategies, mesh, .. } = &*plan;
    let extent = |id: NodeId, factor: usize| mesh.extent(graph.rule(id).axes(factor, &strategies[id]));
    let tokens = sequence_factors(graph, plan.request.seq, &|id, factor| extent(id, factor) > 1);
    let sequence = |id: NodeId| tokens[id];
    let (factor, parts, reversed): (&dyn Fn(NodeId) -> Option<usize>, u64, u64) = match candidate.degrees.microbatch {
        1 => (&sequence, 1, query_parts(graph, &tokens, &extent)),
        _ => (batch, mesh.extent(batch_axes(mesh)), 1),
    };
    let step = Step { graph, strategies, mesh, factor, parts, reversed, staged: &plan.pipeline.chunks };
    let Ordered { graph, strategies, staged } = overlapped(step, candidate.overlap_chunks, cluster)?;
    (plan.graph, plan.strategies, plan.pipeline.chunks) = (graph, strategies, staged);
    Ok(())
}

/// What a plan takes by its programs, which keep everything on the device.
#[derive(Clone, Debug, PartialEq)]
pub struct Exact {
    /// The step, and the memory of the rank that has the least left.
    pub prediction: Prediction,
    /// The memory of a rank of each stage.
    pub stages: Vec<Memory>,
}

/// For a plan whose ranks all take the same memory.
impl From<Prediction> for Exact {
    fn from(prediction: Prediction) -> Self {
        Self { stages: vec![prediction.memory], prediction }
    }
}

/// A candidate's plan with the prediction of its programs (`exact`); with its estimate if it has no programs.
pub(in crate::search) fn predicted(
    candidate: &Candidate,
    mut plan: Plan,
    exact: Option<Result<Exact, String>>,
    cluster: &Cluster,
) -> Result<Plan, PlanError> {
    let Some(exact) = exact else {
        plan.prediction.host += cluster.on_host(plan.prediction.memory.total());
        candidate.offload.mark(&mut plan);
        return Ok(plan);
    };
    // Programs have everything on the device; what does not lie there is taken off.
    let Exact { prediction, stages } = exact.map_err(|found| unstaged(&plan, found))?;
    let rooms = cluster.rooms(&plan.mesh, plan.request.device_memory);
    plan.prediction = candidate.relief.apply(&prediction, &stages, &rooms);
    let text = |of: &Prediction| {
        let Prediction { step, matmul, memory_bound, optimizer, exposed_communication, communication, .. } = of;
        let kernels = format!("{matmul} products, {memory_bound} bound by memory, {optimizer} optimizer");
        format!("{step} ({kernels}, {exposed_communication} of {communication} exposed), {}", breakdown(&of.memory))
    };
    let (estimate, exact) = (text(&candidate.prediction), text(&plan.prediction));
    tracing::info!(choice = plan.choice, estimate, exact, "lowered");
    candidate.offload.mark(&mut plan);
    Ok(plan)
}

/// Why there is no program of a plan: its stages would have to hand on what they do not, or it is our own mistake.
fn unstaged(plan: &Plan, found: String) -> PlanError {
    if plan.stages() == 1 || !found.contains(BEFORE_LOOP) {
        return PlanError::Bug(found);
    }
    let message = format!(
        "a term that parameters alone make, of the loss say, is read in another stage than it is made in, and stages hand on \
         what they make of microbatches alone ({found}); leave pp out, or have the term made of the samples"
    );
    PlanError::Pin { pin: format!("pp={}", plan.stages()), message }
}

/// The step in chunks that overlap.
fn overlapped(step: Step<'_>, chunks: u64, cluster: &Cluster) -> Result<Ordered, PlanError> {
    let bug = |error: PassError| PlanError::Bug(error.to_string());
    let mut cut = split_batch(step, chunks).map_err(bug)?;
    if cut.is_none() && step.reversed > 1 {
        cut = split_batch(Step { reversed: 1, ..step }, chunks).map_err(bug)?;
    }
    match cut {
        Some(cut) => order(&cut, step.mesh, cluster).map_err(bug),
        None => Err(PlanError::Pin {
            pin: format!("overlap_chunks={chunks}"),
            message: format!(
                "no block of the model can be cut along its samples or tokens into {chunks} chunks here; pin a divisor of \
                 either, or leave it out"
            ),
        }),
    }
}

/// What each block recomputes, by the stage that it is in.
fn recompute_of_blocks(prepared: &Prepared<'_>, line: &Line, stages: &Stages, count: u64) -> BTreeMap<u64, Recompute> {
    let graph = prepared.graph;
    let pipeline = Pipeline { schedule: stages.schedule, per_stage: stages.per_stage, ..Pipeline::default() };
    let chunks = line.chunks(prepared, &stages.cuts);
    let mut of_block = BTreeMap::new();
    for (id, _) in graph.nodes().filter(|(_, node)| node.role == Role::Forward && !node.op.is_leaf()) {
        if let (Some(block), Some(chunk)) = (prepared.blocks.of(id), chunks[id]) {
            let stage = pipeline.stage_of(chunk, count) as usize;
            of_block.entry(block).or_insert(stages.recompute.get(stage).copied().unwrap_or(Recompute::None));
        }
    }
    of_block
}

/// Every strategy must be legal; anything else is our own mistake.
fn check(plan: &Plan) -> Result<(), PlanError> {
    for (id, node) in plan.graph.nodes() {
        let (rule, strategy) = (plan.rule(id), &plan.strategies[id]);
        rule.check(strategy, &plan.mesh).map_err(|message| {
            let strategy = rule.strategy_text(strategy, &plan.mesh);
            PlanError::Bug(format!("{id} ({} of `{}`) with {strategy}: {message}", node.op.name(), node.path))
        })?;
    }
    Ok(())
}

/// ZeRO-3: what is stored in parts (a parameter, its cast, its codes in 8 bits) is gathered at each use that does not
/// read it as it lies.
fn mark_transient(plan: &mut Plan) {
    let (axes, stored) = (copy_axes(&plan.mesh), parameter_values(&plan.graph));
    let mut transient = Vec::new();
    for (id, node) in plan.graph.nodes() {
        for (index, value) in node.operands.iter().enumerate().filter(|(_, value)| stored.contains(value)) {
            let of = plan.graph.value(*value);
            let (rule, strategy) = (plan.rule(of.def), &plan.strategies[of.def]);
            let made = rule.result_sharding(of.index, strategy);
            let is_divided = made.dims.iter().flatten().any(|axis| axes.contains(axis));
            if is_divided && plan.rule(id).operand_sharding(index, &plan.strategies[id]) != made {
                transient.push(*value);
            }
        }
    }
    for value in transient {
        plan.transient[value] = true;
    }
}
