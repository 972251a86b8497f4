//! The graph for Graphviz: one box per module of the folded blocks, coloured by what divides it; of a
//! pipeline, one for each chunk that runs it, coloured by the stage.

use super::names::{folded_path, name_of};
use shardc_ir::{Bytes, Family, NodeId, OpDef, Plan, Role};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Fills by what divides a module's values: nothing, data axes alone, tensor axes too.
const FILLS: [&str; 3] = ["#eceff4", "#d8e9f7", "#fbe3c8"];

/// Fills by stage, in turns.
const STAGES: [&str; 6] = ["#d8e9f7", "#fbe3c8", "#dcefd9", "#ecdcf2", "#f9d9dc", "#f5f0c8"];

#[derive(Default)]
struct Module {
    operations: usize,
    /// Index into [`FILLS`].
    fill: usize,
    stage: Option<u64>,
    strategies: Vec<String>,
}

/// The forward pass of a plan, by modules; equal blocks are one. An edge says how many bytes one rank
/// hands on.
pub fn dot(plan: &Plan) -> String {
    let graph = &plan.graph;
    let mut modules: BTreeMap<String, Module> = BTreeMap::new();
    let mut order: Vec<String> = Vec::new();
    let mut edges: BTreeMap<(String, String), Bytes> = BTreeMap::new();
    let forward = |role: Role| role == Role::Forward;
    for (id, node) in graph.nodes().filter(|(_, node)| forward(node.role) && !node.op.is_leaf()) {
        let name = module_of(plan, id);
        let module = modules.entry(name.clone()).or_insert_with(|| {
            order.push(name.clone());
            Module::default()
        });
        module.operations += 1;
        module.stage = plan.pipeline.chunks[id].map(|chunk| plan.pipeline.stage_of(chunk, plan.stages()));
        let strategy = &plan.strategies[id];
        let used: Vec<Family> = strategy.factors.values().flatten().map(|axis| plan.mesh.axis(*axis).family).collect();
        let fill = if used.contains(&Family::Tensor) { 2 } else { usize::from(!used.is_empty()) };
        module.fill = module.fill.max(fill);
        let text = format!("{} {}", node.op.name(), plan.rule(id).strategy_text(strategy, &plan.mesh));
        if !module.strategies.contains(&text) {
            module.strategies.push(text);
        }
        for value in &node.operands {
            let def = graph.def(*value);
            let from = module_of(plan, graph.value(*value).def);
            if def.op.is_leaf() || from == name {
                continue;
            }
            let bytes = super::names::local(plan, *value).bytes();
            let most = edges.entry((from, name.clone())).or_default();
            *most = (*most).max(bytes);
        }
    }
    let mut text = String::from(
        "digraph plan {\n  rankdir=TB;\n  node [shape=box, style=\"rounded,filled\", fontname=\"Helvetica\", fontsize=10];\n  edge [fontname=\"Helvetica\", fontsize=8, color=\"#66707c\"];\n",
    );
    for name in &order {
        let module = &modules[name];
        let shown = if name.is_empty() { "(model)" } else { name };
        let lines: Vec<String> = module.strategies.iter().take(8).map(|line| escape(line.trim())).collect();
        let by_stage = module.stage.map(|stage| STAGES[stage as usize % STAGES.len()]);
        let (fill, label) = (by_stage.unwrap_or(FILLS[module.fill]), escape(shown));
        let _ = writeln!(
            text,
            "  \"{}\" [label=\"{label}\\n{}\\l\", fillcolor=\"{fill}\"];",
            escape(name),
            lines.join("\\l")
        );
    }
    for ((from, to), bytes) in
        edges.iter().filter(|((from, to), _)| modules.contains_key(from) && modules.contains_key(to))
    {
        let _ = writeln!(text, "  \"{}\" -> \"{}\" [label=\"{bytes}\"];", escape(from), escape(to));
    }
    text.push_str("}\n");
    text
}

/// The module of a node, folded, and its chunk and stage if there are any.
fn module_of(plan: &Plan, id: NodeId) -> String {
    let path = folded_path(name_of(plan.graph.node(id)));
    match plan.pipeline.chunks[id] {
        Some(chunk) => {
            let stage = plan.pipeline.stage_of(chunk, plan.stages());
            format!("{path} (chunk {chunk}, stage {stage})")
        }
        None => path,
    }
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}
