//! Plans for people to read.

use crate::nearest::nearest;
use shardc_ir::plan::Memory;
use shardc_ir::{NodeId, Op, Plan, Role, ValueId};
use std::fmt::Write;

/// A plan in a page: the choice, the prediction, memory per rank, the runners-up.
pub fn plan_text(plan: &Plan) -> String {
    let (request, prediction) = (&plan.request, &plan.prediction);
    let mut text = String::new();
    let tokens = request.batch * request.seq.max(1);
    let _ = writeln!(
        text,
        "{} on {}: {} sequences of {} tokens per step, {}",
        request.model, request.cluster, request.batch, request.seq, request.precision
    );
    let _ = writeln!(text, "\nplan     {}", plan.choice);
    let _ = writeln!(
        text,
        "mesh     {}",
        if plan.mesh.axes.is_empty() { "one rank".to_string() } else { plan.mesh.to_string() }
    );
    let rate = tokens as f64 / prediction.step.0;
    let _ = writeln!(
        text,
        "step     {}, {rate:.0} tokens/s, {:.1}% of the devices' peak (predicted)",
        prediction.step,
        prediction.mfu * 100.0
    );
    for (name, seconds) in [
        ("matrix products and attention", prediction.matmul),
        ("bound by memory or launches", prediction.memory_bound),
        ("communication that nothing hides", prediction.exposed_communication),
        ("the optimizer", prediction.optimizer),
    ] {
        let _ = writeln!(text, "         {seconds:>10}  {name}");
    }
    let (total, live) = (prediction.memory.total(), prediction.memory.live());
    let _ = writeln!(text, "memory   {total} per rank, {live} live at its peak, of {}", request.device_memory);
    for (name, bytes) in memory_rows(&prediction.memory) {
        let _ = writeln!(text, "         {bytes:>10}  {name}");
    }
    if request.host_memory.0 > 0 {
        let _ = writeln!(text, "host     {} per host, of {}", prediction.host, request.host_memory);
    }
    if !plan.alternatives.is_empty() {
        let _ = writeln!(text, "\nrunners-up");
    }
    let width = plan.alternatives.iter().map(|other| other.choice.len()).max().unwrap_or(0);
    for other in &plan.alternatives {
        let (step, memory) = (other.step.to_string(), other.memory.to_string());
        let _ = writeln!(text, "  {:width$}  {step:>10}  {memory:>10}  {}", other.choice, other.reason);
    }
    text
}

/// The categories of a rank's memory.
pub fn memory_rows(memory: &Memory) -> [(&'static str, shardc_ir::Bytes); 6] {
    [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer state", memory.optimizer),
        ("activations", memory.activations),
        ("buffers", memory.buffers),
        ("kept for running collectives, and gaps", memory.reserved),
    ]
}

/// What a plan says of the values that `what` names: a value (`%12`), or a part of a leaf's name or
/// of a module path.
///
/// # Errors
/// If nothing has that name; the message suggests the nearest.
pub fn explain_value(plan: &Plan, what: &str) -> Result<String, String> {
    let graph = &plan.graph;
    let is_value = what.starts_with('%');
    let matches = |id: ValueId, node: NodeId| {
        let node = graph.node(node);
        if is_value {
            id.to_string() == what
        } else {
            node.path.contains(what) || leaf_name(&node.op).is_some_and(|name| name.contains(what))
        }
    };
    let mut text = String::new();
    for (id, value) in graph.values().filter(|(id, value)| matches(*id, value.def)) {
        let _ = writeln!(text, "{}", value_text(plan, id, value.def));
    }
    if !text.is_empty() {
        return Ok(text);
    }
    let names: Vec<&str> =
        graph.nodes().flat_map(|(_, node)| [leaf_name(&node.op), Some(node.path.as_str())]).flatten().collect();
    let hint = nearest(what, names).map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
    Err(format!("the plan has no value, leaf or module `{what}`{hint}"))
}

fn leaf_name(op: &Op) -> Option<&str> {
    match op {
        Op::Input(leaf) => Some(&leaf.name),
        Op::Parameter(leaf) => Some(&leaf.name),
        Op::State(leaf) => Some(&leaf.name),
        _ => None,
    }
}

fn value_text(plan: &Plan, id: ValueId, def: NodeId) -> String {
    let (graph, mesh, node) = (&plan.graph, &plan.mesh, plan.graph.node(def));
    let ty = graph.ty(id);
    let sharding = plan.sharding(id);
    let dims: Vec<String> =
        ty.shape.iter().enumerate().map(|(dim, size)| format!("{size}{}", sharding.dim_text(dim, mesh))).collect();
    let local = sharding.local_shape(&ty.shape, mesh);
    let role = match node.role {
        Role::Forward => "forward",
        Role::Backward(_) => "backward",
        Role::Recompute(_) => "recomputed",
        Role::Optimizer => "optimizer",
    };
    let name = leaf_name(&node.op).map(|name| format!(" \"{name}\"")).unwrap_or_default();
    let copies = if plan.transient[id] { ", gathered at each use" } else { "" };
    let elements: u64 = local.iter().product();
    format!(
        "{id}: {}[{}]{} = {}{name}  {role} in `{}`; per rank {local:?}, {}{copies}",
        ty.dtype,
        dims.join(","),
        sharding.partial_text(mesh),
        node.op.name(),
        node.path,
        shardc_ir::Bytes(elements * ty.dtype.size())
    )
}
