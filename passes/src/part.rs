//! What an operation is for some elements of a factor.

use shardc_ir::ops::Part;
use shardc_ir::{Graph, NodeId, Op, OpDef, TensorType};

/// The operation of a node for some elements of one of its factors: so many, from a first one on.
pub(crate) fn part_of(graph: &Graph, id: NodeId, factor: usize, (start, count): (u64, u64)) -> Op {
    let (op, rule) = (&graph.node(id).op, graph.rule(id));
    let size = rule.factors[factor].size;
    let of = |types: Vec<TensorType>, held: &[Vec<Vec<usize>>]| -> Vec<Part> {
        let slice = |(size_of, factors): (&u64, &Vec<usize>)| match factors.first() == Some(&factor) {
            true => (start * size_of / size, count * size_of / size),
            false => (0, *size_of),
        };
        let part = |(ty, held): (TensorType, &Vec<Vec<usize>>)| {
            let slice = ty.shape.iter().zip(held).map(slice).collect();
            Part { shape: ty.shape, slice }
        };
        types.into_iter().zip(held).map(part).collect()
    };
    let (takes, makes) = (of(graph.operand_types(id), &rule.operands), of(graph.result_types(id), &rule.results));
    op.localize(&takes, &makes).unwrap_or_else(|| op.clone())
}
