//! The largest elements along a dimension, and running sums.

use super::build::Built;
use super::convert::Converter;
use super::model::TraceError;
use burn::backend::ir::{NumericOperationIr, TensorIr};
use shardc_ir::ValueId;
use shardc_ir::ops::{Cumsum, TopK};

impl Converter<'_> {
    /// Converts a choice of the largest or a running sum; `None` if it is neither.
    pub(super) fn ranked(&mut self, op: &NumericOperationIr) -> Option<Built> {
        use NumericOperationIr as Numeric;
        Some(match op {
            Numeric::TopK(op) => self.top_k(&op.input, op.axis, op.out.shape[op.axis]).map(|[values, _]| values),
            Numeric::ArgTopK(op) => self.top_k(&op.input, op.axis, op.out.shape[op.axis]).map(|[_, indices]| indices),
            Numeric::TopKWithIndices(op) => self.top_k(&op.tensor, op.dim, op.k).map(|[values, indices]| {
                self.map.insert(op.out.id, values);
                self.map.insert(op.out_indices.id, indices);
                values
            }),
            Numeric::CumSum(op) => {
                self.value(&op.input).and_then(|x| self.b.emit(Cumsum { dim: op.axis, reverse: false }, &[x], &[]))
            }
            _ => return None,
        })
    }

    /// The `k` largest along a dimension and their indices.
    fn top_k(&mut self, input: &TensorIr, axis: usize, k: usize) -> Result<[ValueId; 2], TraceError> {
        let x = self.value(input)?;
        let mut order: Vec<usize> = (0..self.b.shape(x).len()).collect();
        let last = order.len() - 1;
        order.swap(axis, last);
        let rows = self.b.transpose(x, &order)?;
        let made = self.b.emit_all(TopK { k: k as u64 }, &[rows], &[])?;
        Ok([self.b.transpose(made[0], &order)?, self.b.transpose(made[1], &order)?])
    }
}
