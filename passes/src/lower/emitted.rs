//! What lowering makes of each node of a graph, so that the search can price plans before it lowers them.

use super::{Draft, draft_rank, fuse::fuse, merge_casts, siblings::join_siblings};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{BufferId, Graph, NodeId, Op, OpDef, Plan, SecondaryMap, Target, TensorType, verify};
use std::collections::HashMap;

/// The instructions of one node: what is merged into another node's instruction is emitted there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Emitted {
    /// How many there are; of one that repeats an operation, a part for each node.
    pub launches: f64,
    /// The bytes they move, over those that the node says it moves.
    pub traffic: f64,
    /// Of a product, how many are one instruction with it, itself included.
    pub beside: usize,
}

/// What a graph on one device is lowered to for a target, node by node; nothing for a graph that is not legal. A region
/// counts for the node of its first step.
pub fn emitted(graph: &Graph, target: &dyn Target) -> SecondaryMap<NodeId, Emitted> {
    let mut emitted: SecondaryMap<NodeId, Emitted> = SecondaryMap::new();
    let plan = Plan { graph: graph.clone(), ..Plan::default() };
    let Ok(plan) = verify::plan(plan) else { return emitted };
    let Ok(mut draft) = draft_rank(&plan, 0) else { return emitted };
    fuse(&mut draft, target);
    let sources = sources(&draft);
    join_siblings(&mut draft, target);
    merge_casts(&mut draft);
    for item in draft.sections.iter().flatten().filter(|item| !draft.is_view(&item.instruction)) {
        let Instruction { action: Action::Compute(op), operands, results, .. } = &item.instruction else { continue };
        if let Op::Fused(region) = op
            && region.is_products()
        {
            for node in region.steps.iter().filter_map(|step| step.source) {
                emitted[node] =
                    Emitted { launches: 1.0 / region.steps.len() as f64, traffic: 1.0, beside: region.steps.len() };
            }
            continue;
        }
        let (op, count) = match op {
            Op::Each(each) => (&*each.op, each.count),
            op => (op, 1),
        };
        let parts = operands.chunks((operands.len() / count).max(1)).chain(operands.is_empty().then_some(&[][..]));
        for (operands, results) in parts.zip(results.chunks((results.len() / count).max(1))) {
            let Some(node) = sources.get(&results[0]).copied() else { continue };
            let types = |ids: &[BufferId]| ids.iter().map(|id| draft.buffers[*id].ty.clone()).collect::<Vec<_>>();
            let own = bytes(&graph.node(node).op, &graph.operand_types(node), &graph.result_types(node));
            emitted[node].launches += 1.0 / count as f64;
            emitted[node].traffic += bytes(op, &types(operands), &types(results)) / own.max(1.0);
        }
    }
    emitted
}

/// The node of each instruction, by its first result.
fn sources(draft: &Draft) -> HashMap<BufferId, NodeId> {
    let instructions = draft.sections.iter().flatten().map(|item| &item.instruction);
    instructions.filter_map(|instruction| Some((*instruction.results.first()?, instruction.source?))).collect()
}

fn bytes(op: &Op, operands: &[TensorType], results: &[TensorType]) -> f64 {
    op.bytes(operands, results).0 as f64
}
