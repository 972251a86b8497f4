//! Statistics of what is normalized: no pass over memory more than there must be.
//!
//! A norm over samples ([`BatchNorm`](https://arxiv.org/abs/1502.03167), Ioffe and Szegedy, 2015), over groups of
//! channels, or one that a model writes down itself is many small operations: means and variances are sums, what is
//! normalized are differences from the mean. None of these is an operation of its own, since ranks that divide the
//! samples add up their sums in between. What differentiation makes of them, operation by operation, reads
//! and writes more than the formula needs:
//!
//! * [`mod@sums`]: a sum is not made where others tell it: the differences from a mean add up to nothing.
//! * [`mod@differences`]: differences are made where they are read, from what they are the differences of.
//!
//! Invariant: the graph computes the same function; rounding may differ in the last digits.

mod differences;
mod sums;
#[cfg(test)]
pub(crate) mod tests;

use crate::error::PassError;
use shardc_ir::Graph;
use shardc_ir::ops::{Broadcast, Op, ReduceOp};
use shardc_ir::{TensorType, ValueId};

/// A training step whose statistics are made once.
///
/// # Errors
/// None but a bug: a node that cannot be added.
pub fn share_statistics(graph: &Graph) -> Result<Graph, PassError> {
    let told = sums::told(graph).and_then(|graph| differences::made_where_read(&graph));
    told.map_err(PassError::ill_formed("share_statistics"))
}

/// The value of which another is copies along `dims`, without any other change of its shape.
fn copied(graph: &Graph, value: ValueId, dims: &[usize]) -> Option<ValueId> {
    let node = graph.def(value);
    let Op::Broadcast(Broadcast { dims: kept }) = &node.op else { return None };
    let (source, shape) = (node.operands[0], &graph.ty(value).shape);
    let others = (0..shape.len()).filter(|dim| !dims.contains(dim));
    let is_whole = kept.iter().zip(&graph.ty(source).shape).all(|(dim, size)| shape[*dim] == *size);
    (is_whole && kept.iter().copied().eq(others)).then_some(source)
}

/// The value before casts between types of floats.
fn before_casts(graph: &Graph, mut value: ValueId) -> ValueId {
    let is_float = |value: ValueId| graph.ty(value).dtype.is_float();
    while let (Op::Cast(_), [source]) = (&graph.def(value).op, &graph.def(value).operands[..])
        && is_float(value)
        && is_float(*source)
    {
        value = *source;
    }
    value
}

/// Whether a value is the mean of another over `dims`.
fn is_mean(graph: &Graph, value: ValueId, of: ValueId, dims: &[usize]) -> bool {
    let node = graph.def(before_casts(graph, value));
    let (Op::Affine(op), [sum]) = (&node.op, &node.operands[..]) else { return false };
    let sum = graph.def(before_casts(graph, *sum));
    let is_sum = matches!(&sum.op, Op::Reduce(op) if op.kind == ReduceOp::Sum && op.dims == dims);
    let count = copies(graph.ty(of), dims);
    is_sum && sum.operands[..] == [of] && op.offset == 0.0 && (op.scale * count - 1.0).abs() < 1e-6
}

/// How many elements a sum over `dims` has.
fn copies(ty: &TensorType, dims: &[usize]) -> f64 {
    dims.iter().map(|dim| ty.shape[*dim] as f64).product()
}
