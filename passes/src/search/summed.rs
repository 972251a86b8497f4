//! Gradients that are added up over microbatches by the instructions that make them, which take other times then.

use crate::cost::{Machine, Pass, is_product};
use crate::shard::tensor::{Placed, Prepared};
use shardc_ir::ops::{BinaryKind, Op};
use shardc_ir::{Graph, NodeId, OpDef, TensorType, ValueId};

/// Seconds that a gradient takes less which the derivative of a table alone makes, where it adds to what was added up:
/// only the rows that tokens name are touched then.
pub(super) fn rows(prepared: &Prepared<'_>, placed: &Placed<'_>, gradient: ValueId) -> Option<f64> {
    let def = prepared.graph.value(gradient).def;
    let class = prepared.folded.class[def];
    let op = prepared.op(class);
    if !op.may_add() || is_product(op) {
        return None;
    }
    let machine = Machine::own(&placed.cluster.device);
    let (mut operands, results) = prepared.local_types(class, &placed.strategies[class], placed.mesh);
    let seconds = |operands: &[TensorType]| machine.seconds(op, operands, &results, Pass::Backward).0.0;
    let whole = seconds(&operands);
    operands.push(results[0].clone());
    Some(whole - seconds(&operands))
}

/// The node that makes a gradient, or what it is a part of; of a sum of several, the product that makes one of them.
pub(super) fn product_of(graph: &Graph, gradient: ValueId) -> NodeId {
    let (id, node) = (graph.value(gradient).def, graph.def(gradient));
    match &node.op {
        Op::Slice(_) => product_of(graph, node.operands[0]),
        Op::Binary(op) if op.kind == BinaryKind::Add => {
            let mut terms = node.operands.iter().map(|term| product_of(graph, *term));
            terms.find(|term| is_product(&graph.node(*term).op)).unwrap_or(id)
        }
        _ => id,
    }
}

/// Seconds that a gradient takes longer than as one of several products that are one instruction: what adds to a
/// summand is an instruction of its own.
pub(super) fn alone(prepared: &Prepared<'_>, placed: &Placed<'_>, gradient: ValueId) -> f64 {
    let class = prepared.folded.class[prepared.graph.value(gradient).def];
    let (op, strategy) = (prepared.op(class), &placed.strategies[class]);
    let (operands, results) = prepared.local_types(class, strategy, placed.mesh);
    if prepared.beside(class, &operands, &results).is_none() {
        return 0.0;
    }
    let alone = Machine::own(&placed.cluster.device).seconds(op, &operands, &results, Pass::Backward).0;
    alone.0 - placed.local(prepared, class, strategy).seconds.0
}
