//! The largest and smallest elements along a dimension, elements in order, products, and running sums and the like.

use super::build::Built;
use super::convert::Converter;
use super::error::TraceError;
use burn::backend::ir::{NumericOperationIr, TensorIr};
use shardc_ir::ValueId;
use shardc_ir::ops::{BinaryKind, Cumsum, TopK, UnaryKind};

impl Converter<'_> {
    /// Converts a choice of elements, a product or a running sum; `None` if it is none of them.
    pub(super) fn ranked(&mut self, op: &NumericOperationIr) -> Option<Built> {
        use NumericOperationIr as Numeric;
        Some(match op {
            Numeric::TopK(op) => self.top_k(&op.input, op.axis, op.out.shape[op.axis]).map(|[values, _]| values),
            Numeric::ArgTopK(op) => self.top_k(&op.input, op.axis, op.out.shape[op.axis]).map(|[_, indices]| indices),
            Numeric::TopKWithIndices(op) => {
                let made = self.top_k(&op.tensor, op.dim, op.k);
                self.both(made, &op.out, &op.out_indices)
            }
            Numeric::ArgMax(op) => self.ordered(&op.input, op.axis, 1, true).map(|[_, indices]| indices),
            Numeric::ArgMin(op) => self.ordered(&op.input, op.axis, 1, false).map(|[_, indices]| indices),
            Numeric::MaxDimWithIndices(op) => {
                let made = self.ordered(&op.tensor, op.dim, 1, true);
                self.both(made, &op.out, &op.out_indices)
            }
            Numeric::MinDimWithIndices(op) => {
                let made = self.ordered(&op.tensor, op.dim, 1, false);
                self.both(made, &op.out, &op.out_indices)
            }
            Numeric::Sort(op) => {
                self.ordered(&op.input, op.dim, op.input.shape[op.dim], op.descending).map(|[values, _]| values)
            }
            Numeric::ArgSort(op) => {
                self.ordered(&op.input, op.dim, op.input.shape[op.dim], op.descending).map(|[_, indices]| indices)
            }
            Numeric::SortWithIndices(op) => {
                let made = self.ordered(&op.input, op.dim, op.input.shape[op.dim], op.descending);
                self.both(made, &op.out, &op.out_indices)
            }
            Numeric::Prod(op) => self.value(&op.input).and_then(|x| {
                let count = self.b.ty(x).elements();
                let row = self.b.reshape(x, &[count])?;
                let product = self.product(row, 0)?;
                self.b.reshape(product, &self.sizes(&op.out))
            }),
            Numeric::ProdDim(op) => self.value(&op.input).and_then(|x| self.product(x, op.axis)),
            Numeric::CumSum(op) => {
                self.value(&op.input).and_then(|x| self.b.emit(Cumsum { dim: op.axis, reverse: false }, &[x], &[]))
            }
            Numeric::CumProd(op) => self.value(&op.input).and_then(|x| self.running(BinaryKind::Mul, x, op.axis)),
            Numeric::CumMax(op) => self.value(&op.input).and_then(|x| self.running(BinaryKind::Max, x, op.axis)),
            Numeric::CumMin(op) => self.value(&op.input).and_then(|x| self.running(BinaryKind::Min, x, op.axis)),
            _ => return None,
        })
    }

    /// What each element and all before it along a dimension make together: first of two, then of four, and so on.
    fn running(&mut self, kind: BinaryKind, mut x: ValueId, dim: usize) -> Built {
        let size = self.b.shape(x)[dim];
        let mut known = 1;
        while known < size {
            let first = self.part(x, dim, (0, known))?;
            let (before, rest) = (self.part(x, dim, (0, size - known))?, self.part(x, dim, (known, size))?);
            let joined = self.b.binary(kind, rest, before)?;
            x = self.concat(dim, &[first, joined])?;
            known *= 2;
        }
        Ok(x)
    }

    /// Remembers the values and the indices of an operation that gives both.
    fn both(&mut self, made: Result<[ValueId; 2], TraceError>, out: &TensorIr, out_indices: &TensorIr) -> Built {
        let [values, indices] = made?;
        self.map.insert(out.id, values);
        self.map.insert(out_indices.id, indices);
        Ok(values)
    }

    /// The first `k` elements along a dimension in their order, and their indices; equal ones as they come.
    fn ordered(
        &mut self,
        input: &TensorIr,
        axis: usize,
        k: usize,
        descending: bool,
    ) -> Result<[ValueId; 2], TraceError> {
        if descending {
            return self.top_k(input, axis, k);
        }
        let x = self.value(input)?;
        let minus = self.b.unary(UnaryKind::Neg, x)?;
        let [values, indices] = self.top_k_of(minus, axis, k)?;
        Ok([self.b.unary(UnaryKind::Neg, values)?, indices])
    }

    /// The `k` largest along a dimension and their indices.
    fn top_k(&mut self, input: &TensorIr, axis: usize, k: usize) -> Result<[ValueId; 2], TraceError> {
        let x = self.value(input)?;
        self.top_k_of(x, axis, k)
    }

    fn top_k_of(&mut self, x: ValueId, axis: usize, k: usize) -> Result<[ValueId; 2], TraceError> {
        let mut order: Vec<usize> = (0..self.b.shape(x).len()).collect();
        let last = order.len() - 1;
        order.swap(axis, last);
        let rows = self.b.transpose(x, &order)?;
        let made = self.b.emit_all(TopK { k: k as u64 }, &[rows], &[])?;
        Ok([self.b.transpose(made[0], &order)?, self.b.transpose(made[1], &order)?])
    }

    /// The product along a dimension, which is kept at size one: of its halves, until one element is left.
    fn product(&mut self, mut x: ValueId, dim: usize) -> Built {
        loop {
            let shape = self.b.shape(x);
            let size = shape[dim];
            match size {
                0 => {
                    let ty = self.b.ty(x);
                    let mut sizes = shape.clone();
                    sizes[dim] = 1;
                    return self.b.constant(1.0, ty.with_shape(sizes));
                }
                1 => return Ok(x),
                _ => {
                    let half = size / 2;
                    let (left, right) = (self.part(x, dim, (0, half))?, self.part(x, dim, (half, 2 * half))?);
                    let product = self.b.binary(BinaryKind::Mul, left, right)?;
                    x = if size.is_multiple_of(2) {
                        product
                    } else {
                        let rest = self.part(x, dim, (2 * half, size))?;
                        if half == 1 {
                            self.b.binary(BinaryKind::Mul, product, rest)?
                        } else {
                            self.concat(dim, &[product, rest])?
                        }
                    };
                }
            }
        }
    }
}
