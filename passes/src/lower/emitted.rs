//! What lowering makes of each node of a graph, so that the search can price plans before it lowers them.

use super::{draft_rank, fuse::fuse};
use shardc_ir::program::Action;
use shardc_ir::{BufferId, Graph, NodeId, Op, OpDef, Plan, SecondaryMap, Target, TensorType, verify};

/// The instructions of one node: what is merged into another node's instruction is emitted there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Emitted {
    /// How many there are.
    pub launches: u32,
    /// The bytes they move, over those that the node says it moves.
    pub traffic: f64,
}

/// What a graph on one device is lowered to for a target, node by node; nothing for a graph that is not legal. A region
/// counts for the node of its first step.
pub fn emitted(graph: &Graph, target: &dyn Target) -> SecondaryMap<NodeId, Emitted> {
    let mut emitted: SecondaryMap<NodeId, Emitted> = SecondaryMap::new();
    let plan = Plan { graph: graph.clone(), ..Plan::default() };
    let Ok(plan) = verify::plan(plan) else { return emitted };
    let Ok(mut draft) = draft_rank(&plan, 0) else { return emitted };
    fuse(&mut draft, target);
    for item in draft.sections.iter().flatten() {
        let instruction = &item.instruction;
        let (Action::Compute(op), Some(node)) = (&instruction.action, instruction.source) else { continue };
        if draft.is_view(instruction) {
            continue;
        }
        let types = |buffers: &[BufferId]| buffers.iter().map(|id| draft.buffers[*id].ty.clone()).collect();
        let (operands, results): (Vec<TensorType>, Vec<TensorType>) =
            (types(&instruction.operands), types(&instruction.results));
        let own = bytes(&graph.node(node).op, &graph.operand_types(node), &graph.result_types(node));
        emitted[node].launches += 1;
        emitted[node].traffic += bytes(op, &operands, &results) / own.max(1.0);
    }
    emitted
}

fn bytes(op: &Op, operands: &[TensorType], results: &[TensorType]) -> f64 {
    op.bytes(operands, results).0 as f64
}
