//! The pipeline stage of a rank: what it lowers, in which part, and what passes between stages.
//!
//! All ranks derive the same edges from the plan, so what one sends another receives, in one order.

use super::{LowerError, Place};
use crate::pipeline::effort::Efforts;
use crate::pipeline::order::{Pass, orders};
use crate::pipeline::timeline::{Event, Link, timeline};
use shardc_ir::pipeline::last_forward;
use shardc_ir::{NodeId, OutputKind, Plan, Role, SecondaryMap, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A value that is made in one stage and read in another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Edge {
    pub value: ValueId,
    /// The first node of the receiving stage that reads it.
    pub reader: NodeId,
    pub from: u64,
    pub to: u64,
    /// The link between two passes, or none if it does not depend on the microbatch.
    pub link: Option<usize>,
    /// The first pass that reads it.
    pub pass: (u32, Pass),
}

/// The stage of one rank.
#[derive(Debug)]
pub(super) struct Stage {
    /// Its coordinate on the axis of the stages.
    pub stage: u64,
    /// The parts of a microbatch, in their order.
    pub parts: Vec<(u32, Pass)>,
    /// Whether this stage lowers a node.
    pub here: SecondaryMap<NodeId, bool>,
    /// What passes between stages, in the order of the values.
    pub edges: Vec<Edge>,
    /// What this stage does in the loop.
    pub events: Vec<Event>,
}

impl Stage {
    /// The stage of a rank, if the plan has any; the places of its nodes become those of its parts.
    pub fn of(
        plan: &Plan,
        coordinates: &[u64],
        places: &mut SecondaryMap<NodeId, Place>,
    ) -> Result<Option<Self>, LowerError> {
        let [axis] = plan.mesh.family("pp")[..] else { return Ok(None) };
        let (stages, stage) = (plan.stages(), coordinates[axis.0 as usize]);
        if stages <= 1 {
            return Ok(None);
        }
        let passes = passes(plan, places);
        let (edges, links) = edges(plan, places, &passes);
        let fail = |message: String| LowerError::Pipeline { message };
        let efforts = Efforts::new(plan, &passes, &links);
        let orders = orders(&plan.pipeline, stages, plan.mesh.microbatches(), efforts.lengths).map_err(fail)?;
        let run = timeline(&plan.pipeline, &orders, &links, &efforts);
        let run = run.ok_or_else(|| fail("its steps wait for each other in a circle".to_string()))?;
        let parts = parts(plan, stage);
        let here = here(plan, stage);
        place_nodes(plan, &here, &passes, &parts, places);
        let events = run.events.into_iter().nth(stage as usize).unwrap_or_default();
        Ok(Some(Self { stage, parts, here, edges, events }))
    }

    /// The edge by which a value comes to this stage.
    pub fn incoming(&self, value: ValueId) -> Option<&Edge> {
        self.edges.iter().find(|edge| edge.value == value && edge.to == self.stage)
    }

    /// The part of a pass on this stage.
    pub fn part(&self, pass: (u32, Pass)) -> Place {
        Place::Microbatch(self.parts.iter().position(|part| *part == pass).unwrap_or(0) as u16)
    }
}

/// The parts of a stage: the forward passes, then from the last chunk back each backward pass, followed by its
/// gradients of weights.
fn parts(plan: &Plan, stage: u64) -> Vec<(u32, Pass)> {
    let chunks = plan.pipeline.chunks_of(stage, plan.stages());
    let mut parts: Vec<(u32, Pass)> = chunks.iter().map(|chunk| (*chunk, Pass::Forward)).collect();
    for chunk in chunks.iter().rev() {
        parts.push((*chunk, Pass::Backward));
        if plan.pipeline.schedule.splits_backward() {
            parts.push((*chunk, Pass::Weight));
        }
    }
    parts
}

/// The pass of every node of a chunk that is in the loop. A gradient that no other chunk waits for is one of
/// weights.
fn passes(plan: &Plan, places: &SecondaryMap<NodeId, Place>) -> SecondaryMap<NodeId, Option<(u32, Pass)>> {
    let (graph, chunks) = (&plan.graph, &plan.pipeline.chunks);
    let behind = last_forward(graph);
    let in_loop = |id: NodeId| matches!(places[id], Place::Microbatch(_));
    let mut is_awaited: SecondaryMap<NodeId, bool> = SecondaryMap::new();
    let mut passes = SecondaryMap::new();
    for (id, node) in graph.nodes().rev().filter(|(id, _)| in_loop(*id)) {
        for def in node.operands.iter().map(|value| graph.value(*value).def) {
            is_awaited[def] |= is_awaited[id] || chunks[def] != chunks[id];
        }
        let pass = match node.role {
            Role::Forward => Pass::Forward,
            _ if id < behind => Pass::Forward,
            _ if plan.pipeline.schedule.splits_backward() && !is_awaited[id] => Pass::Weight,
            _ => Pass::Backward,
        };
        passes[id] = chunks[id].map(|chunk| (chunk, pass));
    }
    passes
}

/// What passes between stages, and the links that it takes in every microbatch.
fn edges(
    plan: &Plan,
    places: &SecondaryMap<NodeId, Place>,
    passes: &SecondaryMap<NodeId, Option<(u32, Pass)>>,
) -> (Vec<Edge>, Vec<Link>) {
    let (graph, stages) = (&plan.graph, plan.stages());
    let stage = |chunk: u32| plan.pipeline.stage_of(chunk, stages);
    // Per value and receiving stage, the first reader and the first pass that reads it.
    let mut read: BTreeMap<(ValueId, u64), (NodeId, (u32, Pass))> = BTreeMap::new();
    for (id, node) in graph.nodes() {
        // Gradients of weights may be put off behind other chunks' passes, which may read the same: it is there before.
        let Some(pass) = passes[id].map(|(chunk, pass)| (chunk, pass.before_weights())) else { continue };
        for value in &node.operands {
            let def = graph.value(*value).def;
            let Some(from) = plan.pipeline.chunks[def].map(stage) else { continue };
            let to = stage(pass.0);
            if from == to || places[def] == Place::Epilogue {
                continue;
            }
            let order = parts(plan, to);
            let at = |pass: &(u32, Pass)| order.iter().position(|part| part == pass);
            let first = read.entry((*value, to)).or_insert((id, pass));
            if at(&pass) < at(&first.1) {
                first.1 = pass;
            }
        }
    }
    let made = |value: ValueId| passes[graph.value(value).def];
    let links = read.iter().filter_map(|((value, _), (_, to))| made(*value).map(|from| Link { from, to: *to }));
    let links: Vec<Link> = links.collect::<BTreeSet<_>>().into_iter().collect();
    let mut edges = Vec::with_capacity(read.len());
    for ((value, to), (reader, pass)) in &read {
        let link = made(*value).and_then(|from| links.iter().position(|link| *link == Link { from, to: *pass }));
        let chunk = plan.pipeline.chunks[graph.value(*value).def].unwrap_or_default();
        edges.push(Edge { value: *value, reader: *reader, from: stage(chunk), to: *to, link, pass: *pass });
    }
    (edges, links)
}

/// The nodes that a stage lowers: those of its chunks, and of those without a chunk what it needs.
fn here(plan: &Plan, stage: u64) -> SecondaryMap<NodeId, bool> {
    let graph = &plan.graph;
    let chunk = |id: NodeId| plan.pipeline.chunks[id];
    let is_own = |chunk: u32| plan.pipeline.stage_of(chunk, plan.stages()) == stage;
    let mut here: SecondaryMap<NodeId, bool> = SecondaryMap::new();
    for output in graph.outputs.iter().filter(|output| output.kind == OutputKind::Result) {
        let def = graph.value(output.value).def;
        here[def] = chunk(def).is_none();
    }
    for (id, node) in graph.nodes().rev() {
        here[id] |= chunk(id).is_some_and(is_own);
        if here[id] {
            for def in node.operands.iter().map(|value| graph.value(*value).def) {
                here[def] |= chunk(def).is_none();
            }
        }
    }
    here
}

/// Nodes of the loop go to the part of their pass; one without a chunk to the first part that reads it.
fn place_nodes(
    plan: &Plan,
    here: &SecondaryMap<NodeId, bool>,
    passes: &SecondaryMap<NodeId, Option<(u32, Pass)>>,
    parts: &[(u32, Pass)],
    places: &mut SecondaryMap<NodeId, Place>,
) {
    let graph = &plan.graph;
    let mut first: SecondaryMap<NodeId, Option<u16>> = SecondaryMap::new();
    for (id, node) in graph.nodes().rev().filter(|(id, _)| here[*id]) {
        let part = match (places[id], passes[id]) {
            (Place::Microbatch(_), Some(pass)) => parts.iter().position(|part| *part == pass).map(|part| part as u16),
            (Place::Microbatch(_), None) => Some(first[id].unwrap_or(0)),
            _ => None,
        };
        let Some(part) = part else { continue };
        places[id] = Place::Microbatch(part);
        for def in node.operands.iter().map(|value| graph.value(*value).def) {
            first[def] = Some(first[def].map_or(part, |known| known.min(part)));
        }
    }
}
