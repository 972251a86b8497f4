//! The verifier of a plan's pipeline.
//!
//! Invariants:
//! * without an axis `pp` in the mesh no node has a chunk; with one, it is one space axis, no strategy
//!   names it, the schedule runs as many chunks a stage as there are, there are at least two microbatches,
//!   and every chunk holds a node of the forward pass;
//! * a node without a chunk reads inputs, constants and other such nodes, or single numbers that exist
//!   after the loop over the microbatches (which are then combined over the stages);
//! * in the loop a value goes on to the same or a later chunk in the forward pass, to the same or an earlier
//!   one in the backward pass, and from the forward pass to any chunk of the backward pass;
//! * what does not depend on the microbatch is read before the loop and in it by any chunk, and what is made after all of
//!   them in its own, but that single numbers of it are combined;
//! * what is added up over the microbatches, in its own chunk, is read after all of them in any;
//! * a parameter and its state lie in a chunk that reads them, and are updated there; an output is a single
//!   number, or an update.

use super::phase::Phase;
use crate::diagnostic::Diagnostics;
use crate::entity::{NodeId, SecondaryMap, ValueId};
use crate::graph::{Node, OutputKind, Role};
use crate::mesh::Family;
use crate::ops::{Op, OpDef};
use crate::pipeline::{MOST_CHUNKS, last_forward};
use crate::plan::Plan;
use crate::units::counted;

/// Checks the pipeline of a plan whose strategies are legal.
pub(super) fn check(plan: &Plan, phases: &SecondaryMap<NodeId, Phase>, found: &mut Diagnostics) {
    if plan.stages() <= 1 {
        let chunked = plan.graph.nodes().find(|(id, _)| plan.pipeline.chunks[*id].is_some());
        if let Some((id, _)) = chunked {
            found.push(place(plan, id), format!("is in a chunk, and the mesh {} has no stages", plan.mesh));
        }
        return;
    }
    let before = found.0.len();
    check_whole(plan, found);
    if found.0.len() > before {
        return;
    }
    let checker = Checker { plan, phases, last_forward: last_forward(&plan.graph) };
    for (id, node) in plan.graph.nodes() {
        let checked = match plan.pipeline.chunks[id] {
            Some(chunk) => node.operands.iter().try_for_each(|value| checker.reads(id, node, chunk, *value)),
            None => checker.reads_nothing_of_chunks(id, node),
        };
        if let Err(message) = checked {
            found.push(place(plan, id), message);
        }
    }
    check_storage(plan, found);
}

fn place(plan: &Plan, id: NodeId) -> String {
    plan.graph.result(id).to_string()
}

/// What concerns no single edge.
fn check_whole(plan: &Plan, found: &mut Diagnostics) {
    let (pipeline, stages) = (&plan.pipeline, plan.stages());
    let axes = plan.mesh.family(Family::Pipeline);
    if axes.len() != 1 {
        found.push("mesh", format!("stages lie along one axis `pp` over the ranks; the mesh is {}", plan.mesh));
    }
    if let Err(message) = pipeline.schedule.check_chunks(pipeline.per_stage) {
        found.push("pipeline", message);
    }
    let microbatches = plan.mesh.microbatches();
    if let Err(message) = pipeline.check_held(stages, microbatches) {
        found.push("pipeline", message);
    }
    if microbatches < 2 {
        found
            .push("pipeline", format!("{stages} stages take at least 2 microbatches, and the step has {microbatches}"));
    }
    let Some(chunks) = stages.checked_mul(pipeline.per_stage).filter(|chunks| *chunks <= MOST_CHUNKS) else {
        let message =
            format!("{} chunks in each of {stages} stages; {MOST_CHUNKS} in all are the most", pipeline.per_stage);
        return found.push("pipeline", message);
    };
    let said = pipeline.lengths.len() as u64;
    if said > 0 && said != chunks {
        found.push("pipeline", format!("it has lengths of {}, and there are {chunks}", counted(said, "chunk")));
    }
    let mut is_used = vec![false; chunks as usize];
    for (id, node) in plan.graph.nodes() {
        let strategy = &plan.strategies[id];
        let mut named = strategy.factors.values().flatten().chain(strategy.pass.keys());
        if named.any(|axis| axes.contains(axis)) {
            found.push(place(plan, id), "its strategy names `pp`; stages are told apart by chunks alone");
        }
        let Some(chunk) = pipeline.chunks[id] else { continue };
        match is_used.get_mut(chunk as usize) {
            Some(used) => *used |= node.role == Role::Forward && !node.op.is_leaf(),
            None => found.push(place(plan, id), format!("chunk {chunk}: the last is {}", chunks.saturating_sub(1))),
        }
    }
    for chunk in is_used.iter().enumerate().filter(|(_, used)| !**used).map(|(chunk, _)| chunk) {
        found.push("pipeline", format!("chunk {chunk} of {chunks} holds no node of the forward pass"));
    }
}

/// How what is wrong begins with a value that no microbatch goes into, which no stage hands on to another.
pub const BEFORE_LOOP: &str = "what is made before the loop";

struct Checker<'a> {
    plan: &'a Plan,
    phases: &'a SecondaryMap<NodeId, Phase>,
    last_forward: NodeId,
}

impl Checker<'_> {
    /// Whether a node runs in the backward pass of its chunk.
    fn is_behind(&self, id: NodeId, node: &Node) -> bool {
        node.role != Role::Forward && id > self.last_forward
    }

    fn is_number(&self, value: ValueId) -> bool {
        self.plan.graph.ty(value).elements() == 1
    }

    /// Whether a node in a chunk may read a value.
    fn reads(&self, id: NodeId, node: &Node, chunk: u32, value: ValueId) -> Result<(), String> {
        let def = self.plan.graph.value(value).def;
        let Some(from) = self.plan.pipeline.chunks[def].filter(|from| *from != chunk) else { return Ok(()) };
        let (made, read) = (self.phases[def], self.phases[id]);
        let maker = self.plan.graph.node(def);
        let say = |what: &str| Err(format!("reads {value} of chunk {from} in chunk {chunk}: {what}"));
        match (made, read) {
            (Phase::After, _) if self.is_number(value) => {
                say("a number that is combined over the stages is read by a node without a chunk")
            }
            (Phase::After, _) => say("what is made after the loop over the microbatches stays in its chunk"),
            (Phase::Loop, Phase::After) => Ok(()),
            (Phase::Invariant, Phase::After) => {
                say(&format!("{BEFORE_LOOP} and read after it is read in its own chunk"))
            }
            (Phase::Invariant, Phase::Invariant | Phase::Loop) => Ok(()),
            (Phase::Loop, _) => match (self.is_behind(def, maker), self.is_behind(id, node)) {
                (false, false) if from > chunk => say("the forward pass goes on to later chunks"),
                (true, true) if from < chunk => say("the backward pass goes back to earlier chunks"),
                (true, false) => say("the forward pass cannot wait for the backward pass"),
                _ => Ok(()),
            },
        }
    }

    /// Whether a node without a chunk is one that every stage can make.
    fn reads_nothing_of_chunks(&self, id: NodeId, node: &Node) -> Result<(), String> {
        if matches!(node.op, Op::Parameter(_) | Op::State(_)) {
            return Err(format!("a {} lies in a chunk", node.op.name()));
        }
        let is_scalar = node.results.iter().all(|value| self.is_number(*value));
        for value in &node.operands {
            let def = self.plan.graph.value(*value).def;
            let Some(chunk) = self.plan.pipeline.chunks[def] else { continue };
            if !is_scalar || !self.is_number(*value) || self.phases[id] != Phase::After {
                let message =
                    "it is in no chunk, and so reads inputs, constants, and numbers that are ready after the loop";
                return Err(format!("reads {value} of chunk {chunk}: {message}"));
            }
        }
        Ok(())
    }
}

/// Parameters lie where they are read, and outputs are made where they are wanted.
fn check_storage(plan: &Plan, found: &mut Diagnostics) {
    let chunks = &plan.pipeline.chunks;
    let users = plan.graph.users();
    for (value, node) in plan.graph.leaves().filter(|(_, node)| !matches!(node.op, Op::Input(_))) {
        let home = chunks[plan.graph.value(value).def];
        let readers = users.get(&value).map_or(&[][..], Vec::as_slice);
        if !readers.is_empty() && readers.iter().all(|(reader, _)| chunks[*reader] != home) {
            let home = home.map_or("no chunk".to_string(), |chunk| format!("chunk {chunk}"));
            found.push(value.to_string(), format!("a {} lies in {home}, where nothing reads it", node.op.name()));
        }
    }
    for output in &plan.graph.outputs {
        let place = format!("output \"{}\"", output.name);
        let made = chunks[plan.graph.value(output.value).def];
        match output.kind {
            OutputKind::Update(leaf) if made.is_some() && made != chunks[plan.graph.value(leaf).def] => {
                found.push(place, format!("{leaf} is updated in another chunk than it lies in"));
            }
            OutputKind::Result if made.is_some() && plan.graph.ty(output.value).elements() != 1 => {
                found.push(
                    place,
                    format!("{} is no single number, and only such are combined over the stages", output.value),
                );
            }
            _ => {}
        }
    }
}
