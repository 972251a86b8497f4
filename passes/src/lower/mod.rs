//! Lowering: from a plan to the program of one rank.
//!
//! Nodes fall into three sections by what they read: the *prologue* does not depend on the
//! microbatch, the *microbatch* section runs once per microbatch, the *epilogue* reads what was
//! accumulated. With one microbatch everything is one section, so that reductions of gradients may
//! overlap the backward pass; of several, the first and the last are part of the prologue and the epilogue where
//! collectives can run beside them ([`mod@peel`]). Where a value is made in one layout and read in another, a conversion
//! ([`crate::reshard`]) is inserted before its first reader, or, if it reduces a partial value, behind
//! its maker; readers of one layout share it. Small values move up to what they are made of ([`mod@early`]), and what the target has one
//! kernel for becomes one instruction ([`mod@fuse`]). Then [`crate::schedule`] moves and merges collectives,
//! and [`crate::allocate`] gives every buffer its offset.
//!
//! What the plan alone says is worked out once for all ranks ([`mod@common`]).
//!
//! Invariants: the instructions of all ranks have the same order, actions and types; only the numbers
//! in attributes, groups and slices differ. A value that is partial over time is read by later nodes
//! only through its accumulator.

pub(crate) mod accumulate;
pub(crate) mod casts;
mod collective;
mod common;
mod convert;
pub mod draft;
pub(crate) mod early;
mod emitted;
mod epilogue;
mod fuse;
pub(crate) mod in_place;
mod messages;
mod order;
pub(crate) mod peel;
pub(crate) mod repeat;
mod section;
mod siblings;
mod stages;
pub(crate) mod views;

pub use emitted::{Emitted, emitted};

use crate::allocate::{Abridged, allocate, allocate_abridged};
use crate::schedule::schedule;
use crate::threads;
use accumulate::merge_sums;
use casts::merge_casts;
use common::{Common, Layouts, layouts_of};
use convert::Copies;
use draft::{Draft, Hint, Place, StageDraft};
use early::make_early;
use epilogue::merge_epilogues;
use fuse::fuse;
use peel::peel;
use repeat::merge_repeated;
use shardc_ir::ops::{Op, OpError, Part};
use shardc_ir::program::{Action, Feed, Reading, Slot, Stream};
use shardc_ir::verify::VerifiedPlan;
use shardc_ir::{
    BufferId, Mesh, Node, NodeId, OpDef, Output, OutputKind, Plan, Program, Role, SecondaryMap, Sharding, Target,
    TensorType, ValueId,
};
use siblings::join_siblings;
use stages::Stage;
use std::collections::BTreeMap;
use views::share_parts;

/// Where a node is from, if it is of a module.
fn of_module(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!(" (from `{path}`)") }
}

/// Why a verified plan cannot be lowered.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LowerError {
    /// A value has no conversion to the layout in which it is read.
    #[error("{value}{} lies as {from} and is read as {to} by {reader}: {reason}", of_module(path))]
    NoConversion {
        /// The value.
        value: ValueId,
        /// The module of its node.
        path: String,
        /// Its layout.
        from: String,
        /// The layout in which it is read.
        to: String,
        /// Who reads it.
        reader: String,
        /// What stands against it.
        reason: &'static str,
    },
    /// An operation would need other attributes in every microbatch.
    #[error("{op} {node}{} would be another operation in every microbatch; keep it whole over `mb`", of_module(path))]
    VariesByMicrobatch {
        /// The node.
        node: NodeId,
        /// The operation.
        op: String,
        /// Its module.
        path: String,
    },
    /// A stored tensor becomes what another one was, which is another tensor by then.
    #[error("`{name}` becomes what `{of}` is before the step, which is updated first: copy it (`affine` with scale 1)")]
    OldValue {
        /// The tensor's name.
        name: String,
        /// The other one's.
        of: String,
    },
    /// A pipeline whose stages cannot run: a bug of the plan's verifier.
    #[error("the pipeline cannot be lowered: {message}")]
    Pipeline {
        /// Why.
        message: String,
    },
    /// An operation's local types do not fit: a bug of its factor rule or of the plan.
    #[error("{node} does not fit its shards: a bug of the compiler")]
    IllFormed {
        /// The node.
        node: NodeId,
        /// What is wrong.
        source: OpError,
    },
}

/// The program of one rank, for a target.
pub fn lower_rank(plan: &VerifiedPlan<'_>, rank: u64, target: &dyn Target) -> Result<Program, LowerError> {
    program(&Common::of(plan)?, rank, target)
}

/// The programs of some ranks, in their order.
pub fn lower_ranks(plan: &VerifiedPlan<'_>, ranks: &[u64], target: &dyn Target) -> Result<Vec<Program>, LowerError> {
    let common = Common::of(plan)?;
    threads::map(ranks, |rank| program(&common, *rank, target)).into_iter().collect()
}

/// What comes of the abridged program of each of some ranks, in their order; programs go as soon as it is known.
pub fn lower_each<R: Send>(
    plan: &VerifiedPlan<'_>,
    ranks: &[u64],
    target: &dyn Target,
    of: impl Fn(Abridged) -> R + Sync,
) -> Result<Vec<R>, LowerError> {
    let common = Common::of(plan)?;
    let abridged = |rank: &u64| Ok(allocate_abridged(scheduled(&common, *rank, target)?, target));
    threads::map(ranks, |rank| abridged(rank).map(&of)).into_iter().collect()
}

/// The programs of all ranks, in their order.
pub fn lower_all(plan: &VerifiedPlan<'_>, target: &dyn Target) -> Result<Vec<Program>, LowerError> {
    let ranks: Vec<u64> = (0..plan.mesh.ranks()).collect();
    lower_ranks(plan, &ranks, target)
}

/// A plan on its way to the program of one rank, before scheduling and allocation.
pub fn draft_rank(plan: &VerifiedPlan<'_>, rank: u64, target: &dyn Target) -> Result<Draft, LowerError> {
    draft(&Common::of(plan)?, rank, target)
}

/// The program of one rank of a plan.
fn program(common: &Common<'_>, rank: u64, target: &dyn Target) -> Result<Program, LowerError> {
    Ok(allocate(scheduled(common, rank, target)?, target))
}

/// The same before it is allocated.
fn scheduled(common: &Common<'_>, rank: u64, target: &dyn Target) -> Result<Draft, LowerError> {
    let mut draft = draft(common, rank, target)?;
    make_early(&mut draft, &common.plan.graph);
    fuse(&mut draft, &common.plan.graph, target);
    join_siblings(&mut draft, &|region, operands| target.fuses(region, operands));
    peel(&mut draft);
    schedule(&mut draft);
    Ok(draft)
}

/// The draft of one rank of a plan.
fn draft(common: &Common<'_>, rank: u64, target: &dyn Target) -> Result<Draft, LowerError> {
    let (mut lowering, graph) = (Lowering::new(common, rank), &common.plan.graph);
    let mut deferred: Vec<NodeId> = Vec::new();
    for id in common.order.iter().copied() {
        if !lowering.is_here(id) && !lowering.is_received(id) {
            continue;
        }
        let node = graph.node(id);
        // Sums of the gradient norm wait until something large needs them, so that the scalars
        // they read are reduced in one collective.
        let reads_deferred = node.operands.iter().any(|value| deferred.contains(&graph.value(*value).def));
        let reads_norm = node.operands.iter().any(|v| matches!(graph.def(*v).op, Op::SumSquares(_)));
        let scalar = node.results.iter().all(|value| graph.ty(*value).rank() == 0);
        if node.role == Role::Optimizer && scalar && (reads_norm || reads_deferred) {
            deferred.push(id);
            continue;
        }
        if reads_deferred {
            for id in std::mem::take(&mut deferred) {
                lowering.node(id)?;
            }
        }
        lowering.node(id)?;
    }
    for id in deferred {
        lowering.node(id)?;
    }
    let mut draft = lowering.finish()?;
    merge_sums(&mut draft, target);
    merge_epilogues(&mut draft);
    Ok(draft)
}

fn part(mesh: &Mesh, ty: &TensorType, sharding: &Sharding, coordinates: &[u64]) -> Part {
    Part { shape: ty.shape.clone(), slice: sharding.slice(&ty.shape, mesh, coordinates) }
}

/// The operation that a node is at some coordinates of the mesh, with these layouts of its operands and its results.
pub(crate) fn local_op(plan: &Plan, node: &Node, layouts: [&[Sharding]; 2], coordinates: &[u64]) -> Op {
    let part = |(value, layout): (&ValueId, &Sharding)| part(&plan.mesh, plan.graph.ty(*value), layout, coordinates);
    let [operands, results] = layouts;
    let operands: Vec<Part> = node.operands.iter().zip(operands).map(part).collect();
    let results: Vec<Part> = node.results.iter().zip(results).map(part).collect();
    node.op.localize(&operands, &results).unwrap_or_else(|| node.op.clone())
}

/// What a node is on the first of the ranks that do it: its operation, the types of its operands, those of its results.
pub fn on_first_rank(plan: &Plan, id: NodeId) -> (Op, Vec<TensorType>, Vec<TensorType>) {
    let (graph, node) = (&plan.graph, plan.graph.node(id));
    let Layouts { operands, results } = layouts_of(plan, id, node);
    let op = local_op(plan, node, [&operands, &results], &plan.mesh.coordinates(0, 0));
    let local = |(ty, layout): (&TensorType, &Sharding)| ty.with_shape(layout.local_shape(&ty.shape, &plan.mesh));
    let types = |types: Vec<TensorType>, layouts: &[Sharding]| types.iter().zip(layouts).map(local).collect();
    (op, types(graph.operand_types(id), &operands), types(graph.result_types(id), &results))
}

/// A plan on its way to the draft of one rank.
struct Lowering<'a> {
    /// What is the same on every rank.
    common: &'a Common<'a>,
    plan: &'a Plan,
    mesh: &'a Mesh,
    rank: u64,
    coordinates: Vec<u64>,
    /// The section of each node, in a pipeline with the part that a node of this stage is in.
    places: SecondaryMap<NodeId, Place>,
    copies: Copies,
    /// The stage of a pipeline that this rank is in.
    stage: Option<Stage<'a>>,
    /// Numbers that were summed over the stages.
    summed: Vec<((ValueId, Sharding), BufferId)>,
    draft: Draft,
}

impl<'a> Lowering<'a> {
    fn new(common: &'a Common<'a>, rank: u64) -> Self {
        let (plan, mesh) = (common.plan, &common.plan.mesh);
        let coordinates = mesh.coordinates(rank, 0);
        let mut places = common.places.clone();
        let stage = common.stages.as_ref().map(|stages| stages.stage(plan, &coordinates, &mut places));
        let mut draft = Draft::new(rank, mesh);
        if let Some(Stage { parts, events, .. }) = &stage {
            draft.sections = vec![Vec::new(); parts.len() + 2];
            draft.stage = Some(StageDraft { parts: parts.clone(), events: events.to_vec(), messages: Vec::new() });
        }
        Self {
            common,
            plan,
            mesh,
            rank,
            coordinates,
            places,
            copies: Copies::default(),
            stage,
            summed: Vec::new(),
            draft,
        }
    }

    fn part(&self, ty: &TensorType, sharding: &Sharding, coordinates: &[u64]) -> Part {
        part(self.mesh, ty, sharding, coordinates)
    }

    /// Lowers one node.
    fn node(&mut self, id: NodeId) -> Result<(), LowerError> {
        let node = self.plan.graph.node(id);
        if !self.is_here(id) {
            self.receive_once(id);
            return Ok(());
        }
        if node.op.is_leaf() {
            self.leaf(id, node)?;
            return self.send(node.results[0]);
        }
        let Layouts { operands: operand_layouts, results: result_layouts } = &self.common.layouts[id];
        let mut operands = Vec::with_capacity(node.operands.len());
        for (value, layout) in node.operands.iter().zip(operand_layouts) {
            operands.push(self.operand(*value, layout, Some(id))?);
        }
        let place = self.places[id];
        let op = self.local_op(id, node, operand_layouts, result_layouts)?;
        let mut results = Vec::with_capacity(node.results.len());
        for (value, layout) in node.results.iter().zip(result_layouts) {
            let ty = self.common.local_type(self.plan.graph.ty(*value), layout);
            let category = self.common.category(*value);
            let buffer = if matches!(op, Op::Reshape(_)) {
                self.draft.name(operands[0], ty, place, Some(id))
            } else {
                self.draft.buffer(ty, category)
            };
            self.draft.buffers[buffer].value = Some(*value);
            self.draft.is_common[buffer] = matches!(op, Op::Slice(_));
            results.push(buffer);
            self.copies.made(*value, layout.clone(), buffer, place);
        }
        if !matches!(op, Op::Reshape(_)) {
            self.check_types(id, &op, &operands, &results)?;
            self.draft.push(place, Action::Compute(op), operands, results, Stream::Compute, Some(id), Hint::None);
        }
        node.results.iter().try_for_each(|value| self.resolve_early(*value))?;
        node.results.iter().try_for_each(|value| self.send(*value))
    }

    /// Converts a partial value behind its maker, where a reader needs it whole: the terms die early
    /// and the reduction may run beside what follows.
    fn resolve_early(&mut self, value: ValueId) -> Result<(), LowerError> {
        let made = self.common.made_as(value);
        if made.partial.is_empty() || self.plan.transient[value] {
            return Ok(());
        }
        for (user, index) in self.common.users(value).iter().copied() {
            if !self.is_here(user) || self.is_combined_for(value, Some(user)) {
                continue;
            }
            let wanted = &self.common.layouts[user].operands[index];
            if wanted != made && wanted.partial.len() < made.partial.len() {
                self.operand(value, wanted, Some(user))?;
            }
        }
        Ok(())
    }

    fn local_op(&self, id: NodeId, node: &Node, operands: &[Sharding], results: &[Sharding]) -> Result<Op, LowerError> {
        let at = |coordinates: &[u64]| local_op(self.plan, node, [operands, results], coordinates);
        let op = at(&self.coordinates);
        if !self.common.time.is_empty() && op != node.op {
            let others = 1..self.mesh.microbatches();
            if others.into_iter().any(|microbatch| at(&self.mesh.coordinates(self.rank, microbatch)) != op) {
                let (op, path) = (node.op.name().to_string(), node.path.clone());
                return Err(LowerError::VariesByMicrobatch { node: id, op, path });
            }
        }
        Ok(op)
    }

    fn check_types(
        &self,
        node: NodeId,
        op: &Op,
        operands: &[BufferId],
        results: &[BufferId],
    ) -> Result<(), LowerError> {
        let types =
            |buffers: &[BufferId]| buffers.iter().map(|id| self.draft.buffers[*id].ty.clone()).collect::<Vec<_>>();
        let (operands, declared) = (types(operands), types(results));
        let made = op.infer(&operands, &declared).map_err(|source| LowerError::IllFormed { node, source })?;
        if made != declared {
            let list = |types: &[TensorType]| types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let source = OpError::new(op, format!("a shard is {}, not {}", list(&made), list(&declared)));
            return Err(LowerError::IllFormed { node, source });
        }
        Ok(())
    }

    fn leaf(&mut self, id: NodeId, node: &Node) -> Result<(), LowerError> {
        let value = node.results[0];
        let (ty, layout) = (self.plan.graph.ty(value).clone(), self.common.made_as(value));
        let category = self.common.category(value);
        let buffer = self.draft.buffer(self.common.local_type(&ty, layout), category);
        self.draft.buffers[buffer].value = Some(value);
        let place = self.places[id];
        let slice = self.part(&ty, layout, &self.coordinates).slice;
        let slot = |name: &str, init: f64, cast_of: Option<String>| Slot {
            name: name.to_string(),
            buffer,
            ty: ty.clone(),
            slice: slice.clone(),
            is_parameter: matches!(node.op, Op::Parameter(_)),
            init,
            cast_of,
        };
        match &node.op {
            Op::Parameter(parameter) => self.draft.slots.push(slot(&parameter.name, 0.0, None)),
            Op::State(state) => self.draft.slots.push(slot(&state.name, state.init, state.cast_of.clone())),
            Op::Input(input) => {
                let coordinates = |microbatch| self.mesh.coordinates(self.rank, microbatch);
                let part = |microbatch| self.part(&ty, layout, &coordinates(microbatch)).slice;
                let slices = (0..self.mesh.microbatches()).map(part).collect();
                self.draft.inputs.push(Feed { name: input.name.clone(), ty: ty.clone(), slices });
                let action = Action::Feed { input: self.draft.inputs.len() - 1 };
                self.draft.push(place, action, vec![], vec![buffer], Stream::HostToDevice, Some(id), Hint::None);
            }
            _ => {}
        }
        self.copies.made(value, layout.clone(), buffer, place);
        Ok(())
    }

    /// Readings and updates.
    fn finish(mut self) -> Result<Draft, LowerError> {
        let slots = self.draft.slots.iter().map(|slot| (slot.name.clone(), slot.buffer));
        let slots: BTreeMap<String, BufferId> = slots.collect();
        for output in &self.plan.graph.outputs {
            let buffer = match output.kind {
                OutputKind::Result => {
                    let whole = Sharding::replicated(self.plan.graph.ty(output.value).rank());
                    let buffer = self.output_copy(output, &whole)?;
                    self.draft.readings.push(Reading { name: output.name.clone(), buffer });
                    continue;
                }
                OutputKind::Update(leaf) if !self.is_here(self.plan.graph.value(leaf).def) => continue,
                OutputKind::Update(leaf) => {
                    self.check_old(output, leaf)?;
                    self.own_operand(output.value, self.common.made_as(leaf), None)?
                }
            };
            let Some(slot) = slots.get(&output.name).copied() else { continue };
            if self.draft.storage[slot] != self.draft.storage[buffer] {
                let source = Some(self.plan.graph.value(output.value).def);
                let place = self.last_place();
                self.draft.push(place, Action::Copy, vec![buffer], vec![slot], Stream::Compute, source, Hint::None);
            }
        }
        self.draft.microbatches = self.mesh.microbatches();
        self.draft.repeats = 0..self.draft.microbatches;
        if let Some(stage) = &mut self.draft.stage {
            stage.messages.sort_by_key(|message| (message.value, message.peer));
        }
        Ok(self.draft)
    }

    /// Updates are in place, so none takes what another leaf was before its own.
    fn check_old(&self, output: &Output, leaf: ValueId) -> Result<(), LowerError> {
        let outputs = &self.plan.graph.outputs;
        let replaces = |other: &&Output| other.kind == OutputKind::Update(output.value) && other.value != output.value;
        match outputs.iter().find(replaces).filter(|_| output.value != leaf) {
            Some(other) => Err(LowerError::OldValue { name: output.name.clone(), of: other.name.clone() }),
            None => Ok(()),
        }
    }

    fn output_copy(&mut self, output: &Output, layout: &Sharding) -> Result<BufferId, LowerError> {
        self.operand(output.value, layout, None)
    }

    /// Where outputs are read.
    fn last_place(&self) -> Place {
        if self.common.time.is_empty() { Place::LOOP } else { Place::Epilogue }
    }
}
