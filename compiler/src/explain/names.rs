//! Names of parts of a plan as reports show them.

use shardc_ir::plan::Space;
use shardc_ir::{Choice, FactorKind, Node, NodeId, OpDef, Plan, Role, Strategy, TensorType, ValueId};
use shardc_passes::fold::{Folded, block, fold, leaf_name};

/// Where a value lies while nothing reads it, if that is not on the device.
pub(super) fn away(space: Space) -> Option<&'static str> {
    match space {
        Space::Device => None,
        Space::Host => Some("the host's memory"),
        Space::Disk => Some("the host's disk"),
    }
}

/// A path whose block number stands for all of its family: `blocks.*.mlp`.
pub(super) fn folded_path(path: &str) -> String {
    let Some(block) = block(path) else { return path.to_string() };
    let family = block.trim_end_matches(|c: char| c.is_ascii_digit());
    format!("{family}*{}", &path[block.len()..])
}

/// Equal nodes: those of equal blocks that do the same with every axis, on one stage.
pub(super) fn folded_nodes(plan: &Plan) -> Folded {
    let graph = &plan.graph;
    fold(graph).split(|id| (plan.strategies[id].clone(), role(graph.node(id).role), stage_of(plan, id)))
}

/// The stage that runs a node, if only one does.
pub(super) fn stage_of(plan: &Plan, node: NodeId) -> Option<u64> {
    plan.pipeline.chunks[node].map(|chunk| plan.pipeline.stage_of(chunk, plan.stages()))
}

/// The module of a node, or the name of a leaf.
pub(super) fn name_of(node: &Node) -> &str {
    if node.op.is_leaf() { leaf_name(&node.op) } else { &node.path }
}

/// `bf16[8@dp,4096@tp]/sum(tp)`
pub(super) fn layout(plan: &Plan, value: ValueId) -> String {
    layout_by(plan, value, &plan.strategies[plan.graph.value(value).def])
}

/// The same if its node had another strategy.
pub(super) fn layout_by(plan: &Plan, value: ValueId, strategy: &Strategy) -> String {
    let (ty, of) = (plan.graph.ty(value), plan.graph.value(value));
    let sharding = plan.rule(of.def).result_sharding(of.index, strategy);
    let dims = ty.shape.iter().enumerate();
    let dims: Vec<String> = dims.map(|(dim, size)| format!("{size}{}", sharding.dim_text(dim, &plan.mesh))).collect();
    format!("{}[{}]{}", ty.dtype, dims.join(","), sharding.partial_text(&plan.mesh))
}

/// What one rank holds of a value.
pub(super) fn local(plan: &Plan, value: ValueId) -> TensorType {
    let ty = plan.graph.ty(value);
    ty.with_shape(plan.sharding(value).local_shape(&ty.shape, &plan.mesh))
}

/// Why a node is there.
pub(super) fn role(role: Role) -> &'static str {
    match role {
        Role::Forward => "forward",
        Role::Backward(_) => "backward",
        Role::Recompute(_) => "recomputed",
        Role::Optimizer => "optimizer",
    }
}

/// What a node does with an axis: `divides k`, `holds copies`.
pub(super) fn choice(plan: &Plan, node: NodeId, choice: Choice) -> String {
    let rule = plan.rule(node);
    match choice {
        Choice::Replicate => "the same on every rank".to_string(),
        // A product passes on those of either operand, which are two choices.
        Choice::Pass(set) if rule.linear.len() > 1 => {
            let operands = &plan.graph.node(node).operands;
            let of: Vec<String> = rule.linear[set].iter().map(|index| operands[*index].to_string()).collect();
            format!("partial sums of {} passed on", of.join(" and "))
        }
        Choice::Pass(_) => "partial sums passed on".to_string(),
        Choice::Factor(factor) => {
            let Some(factor) = rule.factors.get(factor) else { return format!("factor {factor}, which it has not") };
            let then = match factor.kind {
                FactorKind::Ring { .. } => ", round a ring",
                _ if factor.reduce.is_empty() => "",
                _ => ", summed",
            };
            format!("{} divided{then}", factor.name)
        }
    }
}
