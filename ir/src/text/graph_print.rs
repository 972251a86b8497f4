//! Printing a graph or a plan.

use super::{is_word, quoted};
use crate::entity::{NodeId, ValueId};
use crate::graph::{Graph, Output, OutputKind, Role};
use crate::ops::Op;
use crate::pipeline::{Length, Pipeline};
use crate::plan::{Plan, Space};
use crate::sharding::{Sharding, Strategy};
use crate::types::TensorType;
use std::fmt;

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        open(f, self)?;
        for (id, _) in self.nodes() {
            write_node(f, self, None, id)?;
        }
        close(f, self)
    }
}

/// The graph with its mesh, its layouts and its strategies; what was asked for and what was
/// predicted are in the plan file ([`Plan::to_json`]).
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        open(f, &self.graph)?;
        writeln!(f, "{}", format!("  mesh {}", self.mesh).trim_end())?;
        if self.reduce_in_loop {
            writeln!(f, "  reduce_in_loop")?;
        }
        let Pipeline { schedule, per_stage, chunks, lengths, .. } = &self.pipeline;
        if self.pipeline != Pipeline::default() || chunks.values().any(Option::is_some) {
            let parts = |of: &Length| format!(" {}/{}/{}/{}", of.forward, of.backward, of.weight, of.message);
            let lengths: String = lengths.iter().map(parts).collect();
            let lengths = if lengths.is_empty() { lengths } else { format!(" lengths{lengths}") };
            let limits = self.pipeline.limits().into_iter();
            let limits: String = limits.filter_map(|(name, chunks)| Some(format!(" {name} {}", chunks?))).collect();
            writeln!(f, "  pipeline {} {per_stage}{limits}{lengths}", schedule.name())?;
        }
        for (id, _) in self.graph.nodes() {
            write_node(f, &self.graph, Some(self), id)?;
        }
        close(f, &self.graph)
    }
}

fn open(f: &mut fmt::Formatter<'_>, graph: &Graph) -> fmt::Result {
    let name = if is_word(&graph.name) { graph.name.clone() } else { quoted(&graph.name) };
    writeln!(f, "graph @{name} {{")
}

fn close(f: &mut fmt::Formatter<'_>, graph: &Graph) -> fmt::Result {
    for Output { name, value, kind } in &graph.outputs {
        let shown = if is_word(name) && name != "update" { name.clone() } else { quoted(name) };
        match kind {
            OutputKind::Result => writeln!(f, "  return {shown} {value}")?,
            OutputKind::Update(leaf) => writeln!(f, "  return update {} {leaf} = {value}", quoted(name))?,
        }
    }
    writeln!(f, "}}")
}

fn write_node(f: &mut fmt::Formatter<'_>, graph: &Graph, plan: Option<&Plan>, id: NodeId) -> fmt::Result {
    let node = graph.node(id);
    // A strategy that does not belong to the rule or the mesh has no text; the verifier says so.
    let annotated = plan.filter(|plan| is_meaningful(plan, id));
    f.write_str("  ")?;
    for (index, value) in node.results.iter().enumerate() {
        let comma = if index > 0 { ", " } else { "" };
        let ty = annotated.map_or_else(|| graph.ty(*value).to_string(), |plan| laid_out(plan, *value));
        let transient = if plan.is_some_and(|plan| plan.transient[*value]) { " transient" } else { "" };
        write!(f, "{comma}{value}: {ty}{transient}")?;
        if let Some(space) = plan.map(|plan| plan.spaces[*value]).filter(|space| *space != Space::Device) {
            write!(f, " in {}", space.name())?;
        }
    }
    write!(f, " = {}", op_text(&node.op, node.operands.iter().map(ToString::to_string).collect()))?;
    if !node.path.is_empty() {
        write!(f, " at {}", quoted(&node.path))?;
    }
    write_role(f, graph, node.role)?;
    if let Some(chunk) = plan.and_then(|plan| plan.pipeline.chunks[id]) {
        write!(f, " chunk {chunk}")?;
    }
    if let Some(plan) = annotated {
        let strategy = plan.rule(id).strategy_text(&plan.strategies[id], &plan.mesh);
        if !strategy.is_empty() {
            write!(f, " by {strategy}")?;
        }
    } else if plan.is_some() {
        write!(f, " by ?")?;
    }
    writeln!(f)
}

fn write_role(f: &mut fmt::Formatter<'_>, graph: &Graph, role: Role) -> fmt::Result {
    let (word, of) = match role {
        Role::Forward => return Ok(()),
        Role::Optimizer => return f.write_str(" optimizer"),
        Role::Backward(of) => ("grad_of", of),
        Role::Recompute(of) => ("recompute_of", of),
    };
    if (of.as_u32() as usize) < graph.node_count() {
        write!(f, " {word} {}", graph.result(of))
    } else {
        write!(f, " {word} ?{of}")
    }
}

/// Whether a strategy names factors, linear sets and axes that exist.
pub(crate) fn is_meaningful(plan: &Plan, id: NodeId) -> bool {
    let (rule, strategy): (_, &Strategy) = (plan.rule(id), &plan.strategies[id]);
    let mut axes = strategy.factors.values().flatten().chain(strategy.pass.keys());
    let factors = strategy.factors.keys().all(|factor| *factor < rule.factors.len());
    let sets = strategy.pass.values().all(|set| *set < rule.linear.len());
    factors && sets && axes.all(|axis| (axis.0 as usize) < plan.mesh.axes.len())
}

fn laid_out(plan: &Plan, value: ValueId) -> String {
    layout_text(plan.graph.ty(value), &plan.sharding(value), plan)
}

/// `bf16[8@dp.mb,4096@tp]/sum(tp)`
pub(super) fn layout_text(ty: &TensorType, sharding: &Sharding, plan: &Plan) -> String {
    let dims = ty.shape.iter().enumerate();
    let dims: Vec<_> = dims.map(|(dim, size)| format!("{size}{}", sharding.dim_text(dim, &plan.mesh))).collect();
    format!("{}[{}]{}", ty.dtype, dims.join(","), sharding.partial_text(&plan.mesh))
}

/// An operation with its operands and attributes, as [`Cursor::op`](super::cursor::Cursor::op)
/// reads it.
pub(super) fn op_text(op: &Op, operands: Vec<String>) -> String {
    let mut text = op.name().to_string();
    let (names, attributes): (Vec<_>, Vec<_>) = op.attributes().into_iter().partition(|(key, _)| key == "name");
    for (_, name) in names {
        text.push_str(&format!(" {name}"));
    }
    if !operands.is_empty() {
        text.push_str(&format!(" {}", operands.join(", ")));
    }
    if !attributes.is_empty() {
        let attributes: Vec<_> = attributes.iter().map(|(key, value)| format!("{key}={value}")).collect();
        text.push_str(&format!(" {{{}}}", attributes.join(", ")));
    }
    text
}
