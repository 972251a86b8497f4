//! Asks for kernels that give the same bits every time.
//!
//! Of the operations only the derivative of attention has a faster kernel that does not: its blocks of keys add to the
//! gradient of the queries in the order in which they end. The other kernel writes the derivative of all scores
//! instead, which the operation's bytes and the kernel's scratch memory count, so the plan knows what it costs.

use crate::error::PassError;
use shardc_ir::ops::AttentionGrad;
use shardc_ir::{Graph, Op};

/// Whether kernels that give the same bits every time are asked for.
pub fn is_deterministic(graph: &Graph) -> bool {
    graph.nodes().any(|(_, node)| matches!(&node.op, Op::AttentionGrad(op) if op.deterministic))
}

/// The graph with every operation that has the choice made deterministic.
///
/// # Errors
/// None but a bug: a node that cannot be added.
pub fn make_deterministic(graph: &Graph) -> Result<Graph, PassError> {
    let rebuilt = graph.rebuild(|new, id, map| {
        let node = graph.node(id);
        let Op::AttentionGrad(op) = &node.op else { return Ok(false) };
        let op = Op::from(AttentionGrad { deterministic: true, ..op.clone() });
        let operands: Vec<_> = node.operands.iter().map(|value| map[value]).collect();
        let added = new.add_as(op, &operands, &graph.result_types(id), node.path.clone(), node.role)?;
        map.extend(node.results.iter().copied().zip(new.node(added).results.clone()));
        Ok(true)
    });
    rebuilt.map_err(PassError::ill_formed("make_deterministic"))
}
