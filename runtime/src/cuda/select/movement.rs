//! Operations that move elements.

use super::cut::{Cut, LIMIT};
use super::{Arg, OP, RES, Select, Step, THREADS, compute_type, dense, lanes, row_threads};
use crate::cuda::kernel::{Elem, Kernel, Pack, PackF32};
use crate::cuda::kernels::indexing as kernels;
use crate::cuda::kernels::indexing::{Plane, Walk};
use cubecl::prelude::Atomic;
use shardc_ir::ops::Pad;
use shardc_ir::{DType, TensorType};

/// Bytes of the widest vector.
const VECTOR: u64 = 16;

/// Elements of which planes are worth being transposed by tiles, and the side of a tile.
const LEAST_TRANSPOSED: u64 = 1 << 14;
const TILE: u64 = 64;

/// Elements of a row of copies below which it is short.
const SHORT_ROW: u64 = 64;

/// A box of elements, with strides on both sides, in elements.
#[derive(Clone, Debug, Default)]
pub(super) struct Move {
    pub shape: Vec<u64>,
    pub read: Vec<u64>,
    pub read_start: u64,
    pub write: Vec<u64>,
    pub write_start: u64,
}

impl Move {
    /// The same with dimensions of one element dropped and neighbours joined where both sides allow.
    fn joined(&self) -> Self {
        let mut joined = Self { read_start: self.read_start, write_start: self.write_start, ..Self::default() };
        for dim in (0..self.shape.len()).filter(|dim| self.shape[*dim] != 1) {
            let (size, read, write) = (self.shape[dim], self.read[dim], self.write[dim]);
            let last = joined.shape.len().wrapping_sub(1);
            if last < joined.shape.len() && joined.read[last] == read * size && joined.write[last] == write * size {
                joined.shape[last] *= size;
                (joined.read[last], joined.write[last]) = (read, write);
            } else {
                joined.shape.push(size);
                joined.read.push(read);
                joined.write.push(write);
            }
        }
        joined
    }

    /// The elements, if they lie one after the other on both sides.
    fn run(&self) -> Option<u64> {
        let Self { shape, read, write, .. } = self.joined();
        match (&shape[..], &read[..], &write[..]) {
            ([], ..) => Some(1),
            ([count], [1], [1]) => Some(*count),
            _ => None,
        }
    }

    /// The same in elements that are so many times as wide, if rows of them lie together on both sides.
    fn widened(&self, by: u64) -> Option<Self> {
        let last = self.shape.len().checked_sub(1).filter(|last| self.read[*last] == 1)?;
        let mut wide = self.filled(by)?;
        for count in [&mut wide.read_start].into_iter().chain(&mut wide.read[..last]) {
            if !count.is_multiple_of(by) {
                return None;
            }
            *count /= by;
        }
        Some(wide)
    }

    /// The same where so many elements are written at a time, if rows of them lie together there.
    fn filled(&self, by: u64) -> Option<Self> {
        let last = self.shape.len().checked_sub(1).filter(|last| self.write[*last] == 1)?;
        let mut wide = self.clone();
        let counts = [&mut wide.shape[last], &mut wide.write_start].into_iter();
        for count in counts.chain(&mut wide.write[..last]) {
            if !count.is_multiple_of(by) {
                return None;
            }
            *count /= by;
        }
        Some(wide)
    }

    /// The walk of a kernel.
    fn walk(&self) -> Walk {
        let narrow = |values: &[u64]| values.iter().map(|value| *value as u32).collect::<Vec<_>>();
        Walk {
            shape: narrow(&self.shape),
            read: narrow(&self.read),
            read_start: self.read_start as u32,
            write: narrow(&self.write),
            write_start: self.write_start as u32,
        }
    }

    /// The box of planes that are each transposed, if elements of so many bytes lie together along one dimension where
    /// they are read, and along another where they are written; and one plane.
    fn planes(&self, bytes: u64) -> Option<(Self, Plane)> {
        let written = self.shape.len().checked_sub(1).filter(|last| self.write[*last] == 1 && self.read[*last] > 1)?;
        let read = self.read.iter().position(|step| *step == 1)?;
        let elements: u64 = self.shape.iter().product();
        let reach = |steps: &[u64], start: u64| {
            let last: u64 = steps.iter().zip(&self.shape).map(|(step, size)| step * (size - 1)).sum();
            (start + last) * bytes < LIMIT
        };
        let is_small = reach(&self.read, self.read_start) && reach(&self.write, self.write_start);
        if elements < LEAST_TRANSPOSED || !is_small {
            return None;
        }
        let sizes = [self.shape[read], self.shape[written]];
        // As long as the plane is narrow.
        let wide = sizes.map(u64::next_power_of_two);
        let first = wide[0].min(TILE * TILE / wide[1].min(TILE));
        let tile = [first, wide[1].min(TILE * TILE / first)];
        if tile[0] * tile[1] < u64::from(THREADS) {
            return None;
        }
        let plane = Plane {
            sizes: sizes.map(|size| size as u32),
            distances: [self.read[written], self.write[read]].map(|step| step as u32),
            tile: tile.map(|size| size as u32),
            padding: 4u64.div_ceil(bytes) as u32,
            units: THREADS,
        };
        let mut outer = self.clone();
        for dim in [written, read] {
            outer.shape.remove(dim);
            outer.read.remove(dim);
            outer.write.remove(dim);
        }
        Some((outer, plane))
    }

    /// Whether all of a row are one element that is read.
    fn is_spread(&self) -> bool {
        self.read.last() == Some(&0)
    }
}

impl Select<'_> {
    /// Copies a box of elements.
    pub(super) fn strided(&mut self, dtype: DType, from: Arg, to: Arg, whole: &Move) {
        let mut walk = whole.joined();
        // Bytes (the codes of 8-bit floats) move as words; one by one they are numbers without a sign.
        let dtype = match (dtype.size(), walk.widened(4)) {
            (1, Some(words)) => {
                walk = words;
                DType::I32
            }
            (1, None) => DType::U8,
            _ => dtype,
        };
        let elements: u64 = walk.shape.iter().product();
        if elements == 0 {
            return;
        }
        if walk.shape.is_empty() || (walk.shape.len() == 1 && walk.read[0] == 1 && walk.write[0] == 1) {
            let (from, to) = (from.offset(walk.read_start * dtype.size()), to.offset(walk.write_start * dtype.size()));
            return self.out.steps.push(Step::Copy { from, to, bytes: elements * dtype.size() });
        }
        if let Some((outer, plane)) = walk.planes(dtype.size()) {
            return self.transposed(dtype, [from, to], outer, plane);
        }
        let mut width = lanes(&[dtype], &[]);
        let is_spread = walk.is_spread() && dtype.size() > 1;
        while width > 1 {
            let by = width as u64;
            if let Some(wide) = if is_spread { walk.filled(by) } else { walk.widened(by) } {
                walk = wide;
                break;
            }
            width /= 2;
        }
        let vectors = elements / width as u64;
        let vector = width as u64 * dtype.size();
        for (arg, steps, start) in [(from, &walk.read, walk.read_start), (to, &walk.write, walk.write_start)] {
            if start > 0 || steps.iter().any(|step| *step > steps[0]) {
                self.expect_small(arg, 0);
            }
        }
        // A unit is one index of the outermost dimension, along which launches begin: the kernel steps along the others.
        let (outer, read) = (walk.shape[0], if is_spread { dtype.size() } else { vector });
        let steps = [walk.read[0] * read, walk.write[0] * vector];
        let walk = walk.walk();
        let cut = Cut { per_unit: vectors / outer, ..Cut::vectors(vectors, THREADS) };
        let parameters = walk.clone();
        let kernel = if is_spread {
            Kernel::new("spread", &[dtype], width, THREADS, &parameters, move |d| {
                let (x, y, n) = (d.input::<Elem<0>>(), d.output::<Pack<0>>(), d.number());
                kernels::spread::expand(d.scope(), x, y, n, walk.clone());
            })
        } else {
            Kernel::new("strided", &[dtype], width, THREADS, &parameters, move |d| {
                let (x, y, n) = (d.input::<Pack<0>>(), d.output::<Pack<0>>(), d.number());
                kernels::strided::expand(d.scope(), x, y, n, walk.clone());
            })
        };
        self.launch_cut(kernel, &[(from, steps[0]), (to, steps[1])], vec![0], Vec::new(), cut);
    }

    /// Copies planes that are each transposed.
    fn transposed(&mut self, dtype: DType, [from, to]: [Arg; 2], outer: Move, plane: Plane) {
        let tiles = u64::from(plane.tiles(0)) * u64::from(plane.tiles(1));
        let blocks = outer.shape.iter().product::<u64>() * tiles;
        let walk = outer.walk();
        let kernel = Kernel::new("transposed", &[dtype], 1, THREADS, &(walk.clone(), plane), move |d| {
            let (x, y) = (d.input::<Elem<0>>(), d.output::<Elem<0>>());
            kernels::transposed::expand(d.scope(), x, y, walk.clone(), plane);
        });
        self.launch(kernel, vec![from, to], Vec::new(), Vec::new(), [blocks as u32, 1, 1]);
    }

    pub(super) fn copy_whole(&mut self) -> Result<(), String> {
        self.out.steps.push(Step::Copy { from: OP(0), to: RES(0), bytes: self.results[0].bytes().0 });
        Ok(())
    }

    pub(super) fn transpose(&mut self, permutation: &[usize]) -> Result<(), String> {
        let (from, to) = (&self.operands[0], &self.results[0]);
        let strides = dense(&from.shape);
        let read = permutation.iter().map(|dim| strides[*dim]).collect();
        let whole = Move { shape: to.shape.clone(), read, write: dense(&to.shape), ..Move::default() };
        self.strided(to.dtype, OP(0), RES(0), &whole);
        Ok(())
    }

    pub(super) fn broadcast(&mut self, dims: &[usize]) -> Result<(), String> {
        let (from, to) = (self.operands[0].clone(), self.results[0].clone());
        let (mut source, mut dims, mut shape) = (OP(0), dims.to_vec(), from.shape.clone());
        let is_copied = |dim: &usize| !dims.contains(dim);
        // A short row of copies is made once where it is copied along other dimensions as well: those are whole vectors.
        if let Some(last) = to.rank().checked_sub(1).filter(is_copied)
            && to.shape[last] < SHORT_ROW
            && (0..last).any(|dim| is_copied(&dim))
        {
            let (mut read, once) = (dense(&shape), self.scratch(from.bytes().0 * to.shape[last]));
            read.push(0);
            shape.push(to.shape[last]);
            dims.push(last);
            let whole = Move { shape: shape.clone(), read, write: dense(&shape), ..Move::default() };
            self.strided(to.dtype, source, once, &whole);
            source = once;
        }
        let strides = dense(&shape);
        let mut read = vec![0; to.rank()];
        for (from_dim, dim) in dims.iter().enumerate() {
            if shape[from_dim] == to.shape[*dim] {
                read[*dim] = strides[from_dim];
            }
        }
        let whole = Move { shape: to.shape.clone(), read, write: dense(&to.shape), ..Move::default() };
        self.strided(to.dtype, source, RES(0), &whole);
        Ok(())
    }

    pub(super) fn slice(&mut self, start: &[u64]) -> Result<(), String> {
        let (from, to) = (&self.operands[0], &self.results[0]);
        let read = dense(&from.shape);
        let read_start = start.iter().zip(&read).map(|(first, stride)| first * stride).sum();
        let whole = Move { shape: to.shape.clone(), read, read_start, write: dense(&to.shape), ..Move::default() };
        self.strided(to.dtype, OP(0), RES(0), &whole);
        Ok(())
    }

    pub(super) fn pad(&mut self, op: &Pad) -> Result<(), String> {
        let (from, to) = (self.operands[0].clone(), self.results[0].clone());
        let is_behind = |(dim, high): (usize, &u64)| dim + 1 == to.rank() || *high == 0;
        if op.low.iter().all(|low| *low == 0)
            && op.high.iter().enumerate().all(is_behind)
            && self.lengthen((OP(0), &from), (RES(0), &to), op.value as f32)
        {
            return Ok(());
        }
        let write = dense(&to.shape);
        let write_start = op.low.iter().zip(&write).map(|(low, stride)| low * stride).sum();
        let whole = Move { shape: from.shape.clone(), read: dense(&from.shape), write, write_start, ..Move::default() };
        // What lies in one piece has all of the padding before and behind it. Zeros may begin anywhere.
        let is_cleared = op.value == 0.0 && op.value.is_sign_positive();
        let is_aligned = |run: u64| ((write_start + run) * to.dtype.size()).is_multiple_of(VECTOR) || is_cleared;
        match whole.run().filter(|run| is_aligned(*run)) {
            Some(run) => {
                let last = write_start + run;
                for (first, count) in [(0, write_start), (last, to.elements() - last)].into_iter().filter(|of| of.1 > 0)
                {
                    self.fill(RES(0).offset(first * to.dtype.size()), &TensorType::new(to.dtype, [count]), op.value);
                }
            }
            None => self.fill(RES(0), &to, op.value),
        }
        self.strided(to.dtype, OP(0), RES(0), &whole);
        Ok(())
    }

    /// Fills rows up with a number, if vectors of them can be written.
    pub(super) fn lengthen(&mut self, from: (Arg, &TensorType), to: (Arg, &TensorType), fill: f32) -> bool {
        let ((from, narrow), (to, wide)) = (from, to);
        let (Some(columns), Some(longer)) = (narrow.shape.last(), wide.shape.last()) else { return false };
        let (width, elements) = (lanes(&[wide.dtype], &[*longer]), wide.elements());
        if width == 1 || !wide.dtype.is_float() || elements >= 1 << 32 || elements == 0 {
            return false;
        }
        let kernel = Kernel::new("lengthen", &[wide.dtype], width, THREADS, &(), move |d| {
            let (x, y, n) = (d.input::<Elem<0>>(), d.output::<Pack<0>>(), d.number());
            let (columns, vectors, fill) = (d.number(), d.number(), d.real());
            kernels::lengthen::expand(d.scope(), x, y, n, columns, vectors, fill);
        });
        let vectors = elements / width as u64;
        let numbers = [vectors, *columns, longer / width as u64].map(|number| number as u32).to_vec();
        let blocks = vectors.div_ceil(u64::from(THREADS)) as u32;
        self.launch(kernel, vec![from, to], numbers, vec![fill], [blocks, 1, 1]);
        true
    }

    pub(super) fn concat(&mut self, dim: usize) -> Result<(), String> {
        let write = dense(&self.results[0].shape);
        let mut first = 0;
        for index in 0..self.operands.len() {
            let ty = self.operands[index].clone();
            let whole = Move {
                shape: ty.shape.clone(),
                read: dense(&ty.shape),
                read_start: 0,
                write: write.clone(),
                write_start: first * write[dim],
            };
            self.strided(ty.dtype, OP(index), RES(0), &whole);
            first += ty.shape[dim];
        }
        Ok(())
    }

    pub(super) fn embedding(&mut self, start: u64) -> Result<(), String> {
        let (table, ids) = (&self.operands[0], &self.operands[1]);
        let width = lanes(&[table.dtype], &[table.shape[1]]);
        let columns = table.shape[1] / width as u64;
        let threads = row_threads(columns);
        let kernel = Kernel::new("embedding", &[table.dtype, ids.dtype], width, threads, &(), move |d| {
            let (table, ids, y) = (d.input::<Pack<0>>(), d.input::<Elem<1>>(), d.output::<Pack<0>>());
            let (rows, columns, first) = (d.number(), d.number(), d.number());
            kernels::embedding::expand(d.scope(), table, ids, y, rows, columns, first, threads);
        });
        let numbers = vec![table.shape[0] as u32, columns as u32, start as u32];
        let (row, id) = (table.shape[1] * table.dtype.size(), ids.dtype.size());
        let buffers = [(OP(0), 0), (OP(1), id), (RES(0), row)];
        self.launch_cut(kernel, &buffers, numbers, Vec::new(), Cut::rows(ids.elements()));
        Ok(())
    }

    pub(super) fn embedding_grad(&mut self, start: u64) -> Result<(), String> {
        let table = &self.results[0];
        if table.dtype != DType::F32 {
            return Err(format!("the gradient of a table is summed in f32, not {}", table.dtype));
        }
        let rows = table.shape[0];
        let [order, starts, counts] = self.token_order(start);
        let types = [self.operands[0].dtype, DType::F32];
        let width = lanes(&types, &[table.shape[1]]);
        let columns = table.shape[1] / width as u64;
        // Units of as few blocks side by side as there may be, with none to spare but in the last warp.
        let threads = (columns.div_ceil(columns.div_ceil(u64::from(THREADS))) as u32).next_multiple_of(32);
        /// Rows of a block: most have no token, and are written as soon as that is known.
        const EACH: usize = 8;
        let adds = self.operands.len() > 2;
        if adds {
            // Where it is added in place there is nothing to copy.
            self.out.steps.push(Step::Copy { from: OP(2), to: RES(0), bytes: table.bytes().0 });
        }
        let kernel = Kernel::new("embedding_grad", &types[..1], width, threads, &(EACH, adds), move |d| {
            let (dy, order) = (d.input::<Pack<0>>(), d.input::<u32>());
            let (starts, counts) = (d.input::<u32>(), d.input::<u32>());
            let (table, rows, columns, scope) = (d.output::<PackF32>(), d.number(), d.number(), d.scope());
            kernels::embedding_grad::expand(
                scope, dy, order, starts, counts, table, rows, columns, EACH, threads, adds,
            );
        });
        let grid = [1, columns.div_ceil(u64::from(threads)) as u32, 1];
        let cut = Cut { grid, per_block: EACH as u64, number: Some(0), ..Cut::rows(rows) };
        let buffers = [(OP(0), 0), (order, 0), (starts, 4), (counts, 4), (RES(0), table.shape[1] * 4)];
        self.launch_cut(kernel, &buffers, vec![0, columns as u32], Vec::new(), cut);
        Ok(())
    }

    /// The tokens (operand 1) of each row of the table, in their order; where the row's begin, and how many it has. They are
    /// counted and put into places without an order, which a token's number then gives them: that takes less than to sort
    /// them, since most rows have few.
    fn token_order(&mut self, start: u64) -> [Arg; 3] {
        let (ids, rows) = (&self.operands[1], self.results[0].shape[0]);
        let (n, dtype, units) = (ids.elements(), ids.dtype, u64::from(THREADS));
        let [slots, placed, order] = [(); 3].map(|()| self.scratch(n * 4));
        let starts = self.scratch(rows * 4);
        let apart = (rows * 4).next_multiple_of(256);
        let counts = self.scratch(apart + 4);
        let cursor = counts.offset(apart);
        self.out.steps.push(Step::Zero { to: counts, bytes: apart + 4 });
        let numbers = vec![n as u32, rows as u32, start as u32];
        let grid = |count: u64| [count.div_ceil(units) as u32, 1, 1];
        let kernel = Kernel::new("count_tokens", &[dtype], 1, THREADS, &(), |d| {
            let (ids, counts) = (d.input::<Elem<0>>(), d.output::<Atomic<u32>>());
            let (slots, n, rows, first) = (d.output::<u32>(), d.number(), d.number(), d.number());
            kernels::count_tokens::expand(d.scope(), ids, counts, slots, n, rows, first);
        });
        self.launch(kernel, vec![OP(1), counts, slots], numbers.clone(), Vec::new(), grid(n));
        let kernel = Kernel::new("place_rows", &[], 1, THREADS, &(), |d| {
            let (counts, cursor) = (d.input::<u32>(), d.output::<Atomic<u32>>());
            let (starts, rows) = (d.output::<u32>(), d.number());
            kernels::place_rows::expand(d.scope(), counts, cursor, starts, rows, THREADS);
        });
        self.launch(kernel, vec![counts, cursor, starts], vec![rows as u32], Vec::new(), grid(rows));
        let kernel = Kernel::new("place_tokens", &[dtype], 1, THREADS, &(), |d| {
            let (ids, slots, starts) = (d.input::<Elem<0>>(), d.input::<u32>(), d.input::<u32>());
            let (placed, n, rows, first) = (d.output::<u32>(), d.number(), d.number(), d.number());
            kernels::place_tokens::expand(d.scope(), ids, slots, starts, placed, n, rows, first);
        });
        self.launch(kernel, vec![OP(1), slots, starts, placed], numbers.clone(), Vec::new(), grid(n));
        let kernel = Kernel::new("order_tokens", &[dtype], 1, THREADS, &(), |d| {
            let (ids, counts, starts) = (d.input::<Elem<0>>(), d.input::<u32>(), d.input::<u32>());
            let (placed, order) = (d.input::<u32>(), d.output::<u32>());
            let (n, rows, first, scope) = (d.number(), d.number(), d.number(), d.scope());
            kernels::order_tokens::expand(scope, ids, counts, starts, placed, order, n, rows, first);
        });
        self.launch(kernel, vec![OP(1), counts, starts, placed, order], numbers, Vec::new(), grid(n));
        [order, starts, counts]
    }

    /// Of a gather along `dim` of `whole` by an index of shape `index`: the elements inside of that
    /// dimension, and the scalars of the kernels, of which the first is filled in later.
    fn gather_numbers(whole: &[u64], index: &[u64], dim: usize) -> (u64, Vec<u32>) {
        let inner: u64 = whole[dim + 1..].iter().product();
        (inner, vec![0, whole[dim] as u32, index[dim] as u32, inner as u32])
    }

    pub(super) fn gather(&mut self, dim: usize) -> Result<(), String> {
        let (x, index) = (&self.operands[0], &self.operands[1]);
        let (inner, numbers) = Self::gather_numbers(&x.shape, &index.shape, dim);
        let (from, to) = (x.shape[dim] * inner, index.shape[dim] * inner);
        let cut = Cut { per_unit: to, ..Cut::vectors(index.elements(), THREADS) };
        let sizes = [(OP(0), from * x.dtype.size()), (OP(1), to * index.dtype.size()), (RES(0), to * x.dtype.size())];
        let kernel = Kernel::new("gather", &[x.dtype, index.dtype], 1, THREADS, &(), |d| {
            let (x, index, y) = (d.input::<Elem<0>>(), d.input::<Elem<1>>(), d.output::<Elem<0>>());
            let (n, size, count, inner) = (d.number(), d.number(), d.number(), d.number());
            kernels::gather::expand(d.scope(), x, index, y, n, size, count, inner);
        });
        self.launch_cut(kernel, &sizes, numbers, Vec::new(), cut);
        Ok(())
    }

    pub(super) fn scatter_add(&mut self, dim: usize) -> Result<(), String> {
        let (index, y) = (&self.operands[1], &self.results[0]);
        let (inner, numbers) = Self::gather_numbers(&y.shape, &index.shape, dim);
        let (elements, dtype, sum) = (y.elements(), y.dtype, compute_type(y.dtype));
        let (from, into) = (index.shape[dim] * inner, y.shape[dim] * inner * sum.size());
        let lines = index.elements() / index.shape[dim].max(1);
        let cut = Cut { per_unit: inner, ..Cut::vectors(lines, THREADS) };
        let to = if dtype == sum { RES(0) } else { self.scratch(elements * sum.size()) };
        let types = [self.operands[0].dtype, index.dtype, sum];
        let kernel = Kernel::new("scatter_add", &types, 1, THREADS, &(), |d| {
            let (dy, index, dx) = (d.input::<Elem<0>>(), d.input::<Elem<1>>(), d.output::<Elem<2>>());
            let (n, size, count, inner) = (d.number(), d.number(), d.number(), d.number());
            kernels::scatter_add::expand(d.scope(), dy, index, dx, n, size, count, inner);
        });
        let sizes = [(OP(0), from * types[0].size()), (OP(1), from * types[1].size()), (to, into)];
        self.out.steps.push(Step::Zero { to, bytes: elements * sum.size() });
        self.launch_cut(kernel, &sizes, numbers, Vec::new(), cut);
        if dtype != sum {
            self.cast_elements(to, RES(0), sum, dtype, elements);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::select;
    use super::*;

    /// What lies in one piece is copied, and zeros are written beside it alone: every byte once.
    #[test]
    fn padding_of_one_piece_writes_every_byte_once() {
        for columns in [8, 5] {
            let [from, to] = [20, 25].map(|rows| TensorType::new(DType::Bf16, [rows, columns]));
            let pad = Pad { low: vec![3, 0], high: vec![2, 0], value: 0.0 };
            let steps = select(&pad.into(), &[from], std::slice::from_ref(&to)).unwrap().steps;
            let written = |step: &Step| match step {
                Step::Zero { to: Arg::Result(0, at), bytes } | Step::Copy { to: Arg::Result(0, at), bytes, .. } => {
                    (*at, at + bytes)
                }
                other => panic!("{other:?}"),
            };
            let mut ranges: Vec<(u64, u64)> = steps.iter().map(written).collect();
            ranges.sort_unstable();
            let ends = ranges.iter().map(|range| range.1);
            assert!(
                [0].into_iter().chain(ends).eq(ranges.iter().map(|range| range.0).chain([to.bytes().0])),
                "{ranges:?}"
            );
        }
    }
}
