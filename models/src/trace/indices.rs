//! Elements at regular places: every second one, in reverse, in windows, beyond a border; and rows added where
//! indices say.

use super::build::Built;
use super::convert::Converter;
use super::shapes::ends;
use burn::backend::ir::{FlipOpIr, PadOpIr, SelectAssignOpIr, UnfoldOpIr};
use burn::tensor::{IndexingUpdateOp, Slice};
use shardc_ir::ValueId;
use shardc_ir::ops::{BinaryKind, Broadcast, Embedding, Iota, Pad, ScatterAdd};
use shardc_ir::{DType, TensorType};

impl Converter<'_> {
    /// A part of a tensor of which some dimensions have a step: of a range, elements from its first one on, or from
    /// its last one back.
    pub(super) fn strided_slice(&mut self, x: ValueId, slices: &[Slice]) -> Built {
        let sizes = self.b.shape(x);
        let whole = Slice::full();
        let of = |dim: usize| slices.get(dim).unwrap_or(&whole);
        let range = |(dim, size): (usize, &u64)| {
            let (start, end) = ends(of(dim), *size);
            (start, end.max(start))
        };
        let ranges: Vec<(u64, u64)> = sizes.iter().enumerate().map(range).collect();
        let mut x = self.slice(x, &ranges)?;
        for dim in 0..sizes.len() {
            let step = of(dim).step;
            if step < 0 {
                x = self.reversed(x, dim)?;
            }
            x = self.every(x, dim, step.unsigned_abs() as u64)?;
        }
        Ok(x)
    }

    /// Every `step`-th element of a dimension, from the first.
    fn every(&mut self, x: ValueId, dim: usize, step: u64) -> Built {
        let ty = self.b.ty(x);
        let size = ty.shape[dim];
        if step <= 1 || size == 0 {
            return Ok(x);
        }
        let count = size.div_ceil(step);
        let mut high = vec![0; ty.rank()];
        high[dim] = count * step - size;
        let low = vec![0; ty.rank()];
        let x = if high[dim] == 0 { x } else { self.b.emit(Pad { low, high, value: 0.0 }, &[x], &[])? };
        let mut split = ty.shape.clone();
        split[dim] = count;
        split.insert(dim + 1, step);
        let x = self.b.reshape(x, &split)?;
        let first = self.part(x, dim + 1, (0, 1))?;
        split.remove(dim + 1);
        self.b.reshape(first, &split)
    }

    /// The elements of a dimension from the last to the first.
    fn reversed(&mut self, x: ValueId, dim: usize) -> Built {
        let size = self.b.shape(x)[dim];
        if size <= 1 {
            return Ok(x);
        }
        let index = self.b.emit(Iota { dim: 0, start: 0 }, &[], &[TensorType::new(DType::I64, [size])])?;
        let index = self.b.affine(index, -1.0, (size - 1) as f64)?;
        self.rows(x, dim, index)
    }

    pub(super) fn flip(&mut self, op: &FlipOpIr) -> Built {
        let mut x = self.value(&op.input)?;
        for dim in &op.axes {
            x = self.reversed(x, *dim)?;
        }
        Ok(x)
    }

    /// Rows along a dimension: a lookup in the tensor as a table.
    pub(super) fn rows(&mut self, x: ValueId, dim: usize, ids: ValueId) -> Built {
        let shape = self.b.shape(x);
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.remove(dim);
        order.insert(0, dim);
        let front = self.b.transpose(x, &order)?;
        let rest: u64 = order[1..].iter().map(|dim| shape[*dim]).product();
        let table = self.b.reshape(front, &[shape[dim], rest])?;
        let rows = self.b.emit(Embedding { start: 0 }, &[table, ids], &[])?;
        let mut sizes: Vec<u64> = order.iter().map(|dim| shape[*dim]).collect();
        sizes[0] = self.b.shape(ids)[0];
        let rows = self.b.reshape(rows, &sizes)?;
        self.b.transpose(rows, &back(&order))
    }

    /// A tensor to whose rows along a dimension others are added.
    pub(super) fn select_assign(&mut self, op: &SelectAssignOpIr) -> Option<Built> {
        if op.update != IndexingUpdateOp::Add {
            return None;
        }
        let run = |c: &mut Self| {
            let (x, ids, value) = (c.value(&op.tensor)?, c.value(&op.indices)?, c.value(&op.value)?);
            let ty = c.b.ty(x);
            let shape = c.b.shape(value);
            let wide = c.b.ty(ids).with_shape(shape.clone());
            let ids = c.b.emit(Broadcast { dims: vec![op.dim] }, &[ids], &[wide])?;
            let added = c.b.emit(ScatterAdd { dim: op.dim }, &[value, ids], &[ty])?;
            c.b.binary(BinaryKind::Add, x, added)
        };
        Some(run(self))
    }

    /// Windows along a dimension, the elements of each in a new last dimension.
    pub(super) fn unfold(&mut self, op: &UnfoldOpIr) -> Built {
        let x = self.value(&op.input)?;
        let (shape, size) = (self.b.shape(x), op.size as u64);
        let count = op.out.shape[op.dim] as u64;
        let ty = TensorType::new(DType::I64, [count, size]);
        let first = self.b.emit(Iota { dim: 0, start: 0 }, &[], std::slice::from_ref(&ty))?;
        let first = self.b.affine(first, op.step as f64, 0.0)?;
        let at = self.b.emit(Iota { dim: 1, start: 0 }, &[], &[ty])?;
        let ids = self.b.binary(BinaryKind::Add, first, at)?;
        let ids = self.b.reshape(ids, &[count * size])?;
        let rows = self.rows(x, op.dim, ids)?;
        let mut split = shape.clone();
        split[op.dim] = count;
        split.insert(op.dim + 1, size);
        let rows = self.b.reshape(rows, &split)?;
        let mut order: Vec<usize> = (0..split.len()).filter(|dim| *dim != op.dim + 1).collect();
        order.push(op.dim + 1);
        self.b.transpose(rows, &order)
    }

    /// A tensor with more of itself around it: mirrored at its borders, or the elements there repeated.
    pub(super) fn pad_with_itself(&mut self, op: &PadOpIr, is_mirrored: bool) -> Built {
        let mut x = self.value(&op.input)?;
        for (dim, (low, high)) in op.padding.iter().enumerate() {
            let (low, high) = (*low as u64, *high as u64);
            let size = self.b.shape(x)[dim];
            let mut parts = Vec::new();
            if low > 0 {
                let first = if is_mirrored { (1, 1 + low) } else { (0, 1) };
                parts.push(self.border(x, dim, first, low, is_mirrored)?);
            }
            parts.push(x);
            if high > 0 {
                let last = if is_mirrored { (size - 1 - high, size - 1) } else { (size - 1, size) };
                parts.push(self.border(x, dim, last, high, is_mirrored)?);
            }
            x = self.concat(dim, &parts)?;
        }
        Ok(x)
    }

    /// A part of a dimension in reverse, or one element of it so many times.
    fn border(&mut self, x: ValueId, dim: usize, range: (u64, u64), count: u64, is_mirrored: bool) -> Built {
        let part = self.part(x, dim, range)?;
        if is_mirrored {
            return self.reversed(part, dim);
        }
        let mut wide = self.b.shape(part);
        wide[dim] = count;
        self.b.broadcast(part, &wide)
    }
}

/// The order that undoes another.
fn back(order: &[usize]) -> Vec<usize> {
    let mut back = vec![0; order.len()];
    for (at, dim) in order.iter().enumerate() {
        back[*dim] = at;
    }
    back
}
