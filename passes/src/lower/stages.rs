//! The stages of a pipeline: what passes between them in which order ([`Stages`]), and what one of them lowers in which
//! part ([`Stage`]). A part is one pass of one chunk; allocation makes it a section for each microbatch in flight.
//!
//! All ranks go by the same edges and events, so what one sends another receives, in one order.

use super::LowerError;
use super::draft::Place;
use crate::pipeline::effort::Efforts;
use crate::pipeline::order::{Pass, orders};
use crate::pipeline::timeline::{Event, Link, timeline};
use shardc_ir::pipeline::last_forward;
use shardc_ir::{AxisId, Family, NodeId, OutputKind, Plan, Role, SecondaryMap, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A value that is made in one stage and read in another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Edge {
    pub value: ValueId,
    /// The first node of the receiving stage that reads it.
    pub reader: NodeId,
    pub from: u64,
    pub to: u64,
    /// The link between two passes, or none if it passes once in a step.
    pub link: Option<usize>,
    /// Where the receiving stage has it first: before the loop, if it does not depend on the microbatch; behind the
    /// loop, if it is added up over all of them.
    pub place: Place,
}

/// How the stages of a pipeline meet, which all of them know.
pub(super) struct Stages {
    /// The axis of the stages.
    axis: AxisId,
    /// The pass of every node of a chunk that is in the loop.
    passes: SecondaryMap<NodeId, Option<(u32, Pass)>>,
    /// What passes between stages, in the order of the values and of the stages that receive them.
    edges: Vec<Edge>,
    /// What each stage does in the loop.
    events: Vec<Vec<Event>>,
}

impl Stages {
    /// The stages of a plan, if it has any; `places` are the sections of its nodes.
    pub fn of(plan: &Plan, places: &SecondaryMap<NodeId, Place>) -> Result<Option<Self>, LowerError> {
        let [axis] = plan.mesh.family(Family::Pipeline)[..] else { return Ok(None) };
        let stages = plan.stages();
        if stages <= 1 {
            return Ok(None);
        }
        let passes = passes(plan, places);
        let (edges, links) = edges(plan, places, &passes);
        let fail = |message: String| LowerError::Pipeline { message };
        let efforts = Efforts::new(plan, &passes, &links);
        let orders =
            orders(&plan.pipeline, stages, plan.mesh.microbatches(), &|chunk| efforts.chunk(chunk)).map_err(fail)?;
        let run = timeline(&plan.pipeline, &orders, &links, &efforts);
        let run = run.ok_or_else(|| fail("its steps wait for each other in a circle".to_string()))?;
        Ok(Some(Self { axis, passes, edges, events: run.events }))
    }

    /// The stage of a rank; the places of its nodes become those of its parts.
    pub fn stage(&self, plan: &Plan, coordinates: &[u64], places: &mut SecondaryMap<NodeId, Place>) -> Stage<'_> {
        let stage = coordinates[self.axis.0 as usize];
        let (parts, here) = (parts(plan, stage), here(plan, stage));
        place_nodes(plan, &here, &self.passes, &parts, places);
        let events = self.events.get(stage as usize).map_or(&[][..], Vec::as_slice);
        Stage { stage, parts, here, edges: &self.edges, events }
    }
}

/// The stage of one rank.
pub(super) struct Stage<'a> {
    /// Its coordinate on the axis of the stages.
    pub stage: u64,
    /// The parts of a microbatch, in their order.
    pub parts: Vec<(u32, Pass)>,
    /// Whether this stage lowers a node.
    pub here: SecondaryMap<NodeId, bool>,
    /// What this stage does in the loop.
    pub events: &'a [Event],
    /// Those of all stages.
    edges: &'a [Edge],
}

impl<'a> Stage<'a> {
    /// The edges by which a value goes from this stage to others.
    pub fn outgoing(&self, value: ValueId) -> impl Iterator<Item = &'a Edge> + use<'a> {
        let first = self.edges.partition_point(|edge| edge.value < value);
        let (edges, stage) = (&self.edges[first..], self.stage);
        edges.iter().take_while(move |edge| edge.value == value).filter(move |edge| edge.from == stage)
    }

    /// The edge by which a value comes to this stage.
    pub fn incoming(&self, value: ValueId) -> Option<&'a Edge> {
        let found = self.edges.binary_search_by_key(&(value, self.stage), |edge| (edge.value, edge.to));
        found.ok().map(|at| &self.edges[at])
    }

    /// The same, of a value that comes once in a step.
    pub fn incoming_once(&self, value: ValueId) -> Option<&'a Edge> {
        self.incoming(value).filter(|edge| edge.link.is_none())
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
    let stage = |id: NodeId| plan.pipeline.chunks[id].map(|chunk| plan.pipeline.stage_of(chunk, stages));
    let parts: Vec<_> = (0..stages).map(|stage| parts(plan, stage)).collect();
    // Gradients of weights may be put off behind other chunks' passes, which may read the same: it is there before.
    let place = |id: NodeId, stage: u64| match passes[id].map(|(chunk, pass)| (chunk, pass.before_weights())) {
        Some(pass) => {
            parts[stage as usize].iter().position(|part| *part == pass).map(|at| Place::Microbatch(at as u16))
        }
        None => Some(places[id]).filter(|place| !matches!(place, Place::Microbatch(_))),
    };
    // Per value and receiving stage, the first reader and where it is read first; what the loop reads is at hand behind
    // it.
    let mut read: BTreeMap<(ValueId, u64), (NodeId, Place)> = BTreeMap::new();
    let ids = graph.nodes().map(|(id, _)| id);
    let (inside, behind): (Vec<NodeId>, Vec<NodeId>) = ids.partition(|id| passes[*id].is_some());
    for id in inside.into_iter().chain(behind) {
        let Some((to, place)) = stage(id).and_then(|stage| Some((stage, place(id, stage)?))) else { continue };
        for value in &graph.node(id).operands {
            let def = graph.value(*value).def;
            let is_made = places[def] != Place::Epilogue && (place != Place::Epilogue || passes[def].is_some());
            if is_made && stage(def).is_some_and(|from| from != to) {
                let place = if passes[def].is_some() { place } else { Place::Prologue };
                let (_, first) = read.entry((*value, to)).or_insert((id, place));
                *first = place.min(*first);
            }
        }
    }
    let link = |value: ValueId, to: u64, place: Place| {
        let Place::Microbatch(at) = place else { return None };
        Some(Link { from: passes[graph.value(value).def]?, to: parts[to as usize][at as usize] })
    };
    let links = read.iter().filter_map(|((value, to), (_, place))| link(*value, *to, *place));
    let links: Vec<Link> = links.collect::<BTreeSet<_>>().into_iter().collect();
    let edge = |((value, to), (reader, place)): (&(ValueId, u64), &(NodeId, Place))| {
        let link = link(*value, *to, *place).and_then(|link| links.iter().position(|known| *known == link));
        let from = stage(graph.value(*value).def).unwrap_or_default();
        Edge { value: *value, reader: *reader, from, to: *to, link, place: *place }
    };
    let edges = read.iter().map(edge).collect();
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
