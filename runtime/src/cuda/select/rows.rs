//! Reductions, the softmax and the cross-entropy.

use super::cut::Cut;
use super::{Arg, OP, RES, Select, THREADS, lanes, row_threads};
use crate::cuda::kernel::{Elem, Kernel, Pack};
use crate::cuda::kernels::fold::{AHEAD, Fold, Tile, reduce_columns, reduce_part, reduce_segments};
use crate::cuda::kernels::rows as kernels;
use shardc_ir::DType;
use shardc_ir::ops::{CrossEntropy, CrossEntropyGrad, Reduce, ReduceOp, live_columns};

/// Units that a large device runs at once: 132 multiprocessors, each with 1024 units of at most 64 registers.
const UNITS: u64 = 132 * 1024;

/// The most units of a block.
const MOST: u32 = 512;

/// The tile of a block that folds `length` rows of `vectors` columns: 32 columns if no other number leaves fewer units
/// without one, else the widest of those that leave the fewest.
fn tile(vectors: u64, length: u64) -> Tile {
    let idle = |columns: &u32| vectors.next_multiple_of(u64::from(*columns));
    let columns = [32, 64, 56, 48, 40, 24, 16, 8].into_iter().min_by_key(idle).unwrap_or(32);
    // A multiple of four rows, so that the units are whole warps.
    let most = MOST / columns / 4 * 4;
    let rows = (length.div_ceil(AHEAD as u64).min(u64::from(most)) as u32).next_multiple_of(4).min(most);
    Tile { columns, rows }
}

/// The chunks of `length` rows so that blocks of `columns` side by side fill a large device once; none is empty.
fn chunks(columns: u64, length: u64, tile: Tile) -> u64 {
    let blocks = UNITS / u64::from(tile.units());
    let wanted = (blocks / columns.max(1)).min(length.div_ceil(64)).max(1);
    length.div_ceil(length.div_ceil(wanted).max(1)).max(1)
}

/// Of the runs of dimensions that are all reduced the one with the most elements, the last of several: what is left for the
/// others is the least.
fn longest_reduced(shape: &[u64], dims: &[usize]) -> Option<(usize, usize)> {
    let run = |end: usize| {
        let is_reduced = |dim: &usize| dims.contains(dim) || shape[*dim] == 1;
        let start = (0..end).rev().take_while(is_reduced).last().unwrap_or(end);
        (start, end + 1)
    };
    let runs = dims.iter().filter(|dim| !dims.contains(&(*dim + 1))).map(|dim| run(*dim));
    runs.max_by_key(|(start, end)| shape[*start..*end].iter().product::<u64>())
}

/// The rows that a row kernel works on.
struct Rows {
    count: u64,
    /// Bytes of one.
    bytes: u64,
    /// Vectors of one.
    vectors: u64,
    width: usize,
    threads: u32,
}

/// Vectors of a row up to which one unit works on it by itself.
const SHORT: u64 = 4;

/// Bytes of a row's statistic.
const STATISTIC: u64 = 4;

impl Select<'_> {
    pub(super) fn reduce(&mut self, op: &Reduce) -> Result<(), String> {
        let (source, target) = (&self.operands[0], &self.results[0]);
        if !source.dtype.is_float() {
            return Err("integers".to_string());
        }
        let fold = match op.kind {
            ReduceOp::Sum => Fold::Sum,
            ReduceOp::Max => Fold::Max,
        };
        let (mut shape, mut dims) = (source.shape.clone(), op.dims.clone());
        let (mut from, mut dtype) = (OP(0), source.dtype);
        while let Some((start, end)) = longest_reduced(&shape, &dims) {
            let outer: u64 = shape[..start].iter().product();
            let length: u64 = shape[start..end].iter().product();
            let inner: u64 = shape[end..].iter().product();
            dims.retain(|dim| !(start..end).contains(dim));
            let (to, next) = match dims.is_empty() {
                true => (RES(0), target.dtype),
                false => (self.scratch(outer * inner * 4), DType::F32),
            };
            self.fold(fold, (from, dtype), (to, next), [outer, length, inner]);
            shape[start..end].fill(1);
            (from, dtype) = (to, next);
        }
        if op.dims.is_empty() {
            self.cast(OP(0), RES(0), source.dtype, target.dtype)?;
        }
        Ok(())
    }

    pub(super) fn sum_squares(&mut self) -> Result<(), String> {
        let source = &self.operands[0];
        self.fold(Fold::SumSquares, (OP(0), source.dtype), (RES(0), DType::F32), [1, source.elements(), 1]);
        Ok(())
    }

    /// Folds the middle of `[outer, length, inner]`.
    pub(super) fn fold(&mut self, fold: Fold, from: (Arg, DType), to: (Arg, DType), [outer, length, inner]: [u64; 3]) {
        if inner == 1 {
            return self.fold_segments(fold, from, to, outer, length);
        }
        let vectors = inner / lanes(&[from.1, to.1], &[inner]) as u64;
        let tile = tile(vectors, length);
        let chunks = chunks(vectors.div_ceil(u64::from(tile.columns)) * outer, length, tile);
        if chunks == 1 {
            return self.fold_columns(fold, from, to, [outer, length, inner], 1);
        }
        let middle = (self.scratch(outer * chunks * inner * 4), DType::F32);
        self.fold_columns(fold, from, middle, [outer, length, inner], chunks);
        let again = fold.again();
        self.fold_columns(again, middle, to, [outer, chunks, inner], 1);
    }

    /// Folds the middle of `[outer, length, inner]` in chunks, to `[outer, chunks, inner]`.
    fn fold_columns(
        &mut self,
        fold: Fold,
        from: (Arg, DType),
        to: (Arg, DType),
        [outer, length, inner]: [u64; 3],
        chunks: u64,
    ) {
        let chunk = length.div_ceil(chunks);
        let tiles = |width: usize| {
            let vectors = inner / width as u64;
            let tile = tile(vectors, chunk);
            (vectors, tile, vectors.div_ceil(u64::from(tile.columns)) * u64::from(tile.units()))
        };
        // Narrower vectors where there would be few units.
        let mut width = lanes(&[from.1, to.1], &[inner]);
        while width > 1 && tiles(width).2 * chunks * outer < UNITS / 2 {
            width /= 2;
        }
        let (vectors, tile, _) = tiles(width);
        // A unit of a launch sees all rows of an outer index.
        if outer > 1 && length.saturating_mul(vectors) >= 1 << 32 {
            self.expect_small(from.0, 0);
        }
        let kernel = Kernel::new("reduce_columns", &[from.1, to.1], width, tile.units(), &(fold, tile), move |d| {
            let (x, y) = (d.input::<Pack<0>>(), d.output::<Pack<1>>());
            let (length, inner, chunk) = (d.number(), d.number(), d.number());
            reduce_columns::expand(d.scope(), x, y, length, inner, chunk, fold, tile, width);
        });
        let grid = [vectors.div_ceil(u64::from(tile.columns)) as u32, chunks as u32, 1];
        let row = [from.1, to.1].map(|dtype| inner * dtype.size());
        // A launch takes some of the outer indices, or some chunks of the only one.
        let (cut, sizes) = if outer == 1 {
            let cut = Cut { grid, axis: 1, per_unit: chunk, per_block: chunk, number: Some(0), ..Cut::rows(length) };
            (cut, [row[0] * chunk, row[1]])
        } else {
            (Cut { grid, axis: 2, ..Cut::rows(outer) }, [row[0] * length, row[1] * chunks])
        };
        let numbers = vec![length as u32, vectors as u32, chunk as u32];
        self.launch_cut(kernel, &[(from.0, sizes[0]), (to.0, sizes[1])], numbers, Vec::new(), cut);
    }

    /// The sums over the rows of several tensors of one shape, each by itself, in one launch for all.
    pub(super) fn row_sums(&mut self, tensors: &[usize]) {
        let source = &self.operands[tensors[0]];
        let (dtype, columns) = (source.dtype, source.shape.last().copied().unwrap_or(1));
        let (rows, width) = (source.elements() / columns.max(1), lanes(&[source.dtype, DType::F32], &[columns]));
        let vectors = columns / width as u64;
        let tile = tile(vectors, rows);
        let tiles = vectors.div_ceil(u64::from(tile.columns));
        let parts = tensors.len() as u32;
        let chunks = chunks(tiles * u64::from(parts), rows, tile);
        let chunk = rows.div_ceil(chunks);
        let kernel = Kernel::new("reduce_parts", &[dtype, DType::F32], width, tile.units(), &(tile, parts), move |d| {
            let from: Vec<_> = (0..parts).map(|_| d.input::<Pack<0>>()).collect();
            let to: Vec<_> = (0..parts).map(|_| d.output::<Pack<1>>()).collect();
            let (length, inner, chunk) = (d.number(), d.number(), d.number());
            for (part, (x, y)) in from.into_iter().zip(to).enumerate() {
                let (length, inner, chunk) = (length.clone(), inner.clone(), chunk.clone());
                reduce_part::expand(d.scope(), x, y, length, inner, chunk, part as u32, Fold::Sum, tile, width);
            }
        });
        let from: Vec<Arg> = tensors.iter().map(|index| OP(*index)).collect();
        let partial: Vec<Arg> = tensors.iter().map(|_| self.scratch(chunks * columns * 4)).collect();
        let numbers = vec![rows as u32, vectors as u32, chunk as u32];
        let buffers = from.into_iter().chain(partial.iter().copied()).collect();
        self.launch(kernel, buffers, numbers, Vec::new(), [tiles as u32, chunks as u32, parts]);
        let sums: Vec<(Arg, Arg)> = partial.into_iter().enumerate().map(|(index, from)| (from, RES(index))).collect();
        self.sum_partials(&sums, [1, chunks, columns], 1);
    }

    /// Folds rows of `[outer, length]`; a single long row in two passes.
    fn fold_segments(&mut self, fold: Fold, from: (Arg, DType), to: (Arg, DType), outer: u64, length: u64) {
        let width = lanes(&[from.1], &[length]);
        let vectors = length / width as u64;
        if outer == 1 && vectors > 4096 {
            let segment = vectors.div_ceil(UNITS / u64::from(MOST));
            let count = vectors.div_ceil(segment);
            let middle = self.scratch(count * 4);
            self.segments(fold, width, from, (middle, DType::F32), [segment, vectors]);
            let again = fold.again();
            return self.segments(again, 1, (middle, DType::F32), to, [count, count]);
        }
        self.segments(fold, width, from, to, [vectors, vectors * outer]);
    }

    /// Folds each `segment` vectors of all `vectors`.
    pub(super) fn segments(
        &mut self,
        fold: Fold,
        width: usize,
        from: (Arg, DType),
        to: (Arg, DType),
        [segment, vectors]: [u64; 2],
    ) {
        let threads = row_threads(segment);
        let kernel = Kernel::new("reduce_segments", &[from.1, to.1], width, threads, &fold, move |d| {
            let (x, y) = (d.input::<Pack<0>>(), d.output::<Elem<1>>());
            let (length, n) = (d.number(), d.number());
            reduce_segments::expand(d.scope(), x, y, length, n, fold, threads);
        });
        let cut = Cut { per_unit: segment, per_block: segment, number: Some(1), ..Cut::rows(vectors) };
        let buffers = [(from.0, segment * width as u64 * from.1.size()), (to.0, to.1.size())];
        self.launch_cut(kernel, &buffers, vec![segment as u32, 0], Vec::new(), cut);
    }

    /// The rows of the operand `index`, as a row kernel on elements of these types takes them.
    fn rows_of(&self, index: usize, types: &[DType]) -> Rows {
        let ty = &self.operands[index];
        let columns = ty.shape.last().copied().unwrap_or(1);
        let width = lanes(types, &[columns]);
        let vectors = columns / width as u64;
        let bytes = columns * ty.dtype.size();
        Rows { count: ty.elements() / columns.max(1), bytes, vectors, width, threads: row_threads(vectors) }
    }

    pub(super) fn softmax(&mut self) -> Result<(), String> {
        let types = [self.operands[0].dtype, self.results[0].dtype];
        let Rows { count, bytes, vectors, width, threads } = self.rows_of(0, &types);
        let kernel = Kernel::new("softmax", &types, width, threads, &(), move |d| {
            let (x, y, columns) = (d.input::<Pack<0>>(), d.output::<Pack<1>>(), d.number());
            kernels::softmax::expand(d.scope(), x, y, columns, threads);
        });
        let buffers = [(OP(0), bytes), (RES(0), vectors * width as u64 * types[1].size())];
        self.launch_cut(kernel, &buffers, vec![vectors as u32], Vec::new(), Cut::rows(count));
        Ok(())
    }

    pub(super) fn cross_entropy(&mut self, op: &CrossEntropy) -> Result<(), String> {
        let types = [self.operands[0].dtype, self.operands[1].dtype];
        let Rows { count, bytes, vectors, width, .. } = self.rows_of(0, &types[..1]);
        let (numbers, _) = self.classes(vectors, op.start, op.classes);
        let statistics = [RES(0), RES(1)].map(|arg| (arg, STATISTIC));
        let buffers = [[(OP(0), bytes), (OP(1), types[1].size())], statistics].concat();
        if vectors <= SHORT {
            let kernel = Kernel::new("cross_entropy_short", &types, width, THREADS, &(), move |d| {
                let (logits, labels) = (d.input::<Pack<0>>(), d.input::<Elem<1>>());
                let (lse, picked, n) = (d.output::<f32>(), d.output::<f32>(), d.number());
                let (columns, first, live) = (d.number(), d.number(), d.number());
                let scope = d.scope();
                kernels::cross_entropy_short::expand(scope, logits, labels, lse, picked, n, columns, first, live);
            });
            let numbers = [vec![0], numbers].concat();
            self.launch_cut(kernel, &buffers, numbers, Vec::new(), Cut::vectors(count, THREADS));
            return Ok(());
        }
        let threads = row_threads(vectors.div_ceil(kernels::AHEAD as u64)).min(THREADS);
        let kernel = Kernel::new("cross_entropy", &types, width, threads, &(), move |d| {
            let (logits, labels) = (d.input::<Pack<0>>(), d.input::<Elem<1>>());
            let (lse, picked) = (d.output::<f32>(), d.output::<f32>());
            let (columns, first, live) = (d.number(), d.number(), d.number());
            let scope = d.scope();
            kernels::cross_entropy::expand(scope, logits, labels, lse, picked, columns, first, live, threads);
        });
        self.launch_cut(kernel, &buffers, numbers, Vec::new(), Cut::rows(count));
        Ok(())
    }

    pub(super) fn cross_entropy_grad(&mut self, op: &CrossEntropyGrad) -> Result<(), String> {
        let types = [self.operands[0].dtype, self.operands[1].dtype];
        let Rows { count, bytes, vectors, width, threads } = self.rows_of(0, &types[..1]);
        let (numbers, padded) = self.classes(vectors, op.start, op.classes);
        let statistics = [OP(2), OP(3), OP(4)].map(|arg| (arg, STATISTIC));
        let buffers = [&[(OP(0), bytes), (OP(1), types[1].size())], statistics.as_slice(), &[(RES(0), bytes)]].concat();
        if vectors <= SHORT {
            let kernel = Kernel::new("cross_entropy_grad_short", &types, width, THREADS, &(), move |d| {
                let (logits, labels, lse) = (d.input::<Pack<0>>(), d.input::<Elem<1>>(), d.input::<f32>());
                let (dlse, dpicked, dlogits) = (d.input::<f32>(), d.input::<f32>(), d.output::<Pack<0>>());
                let (n, columns, first, live) = (d.number(), d.number(), d.number(), d.number());
                let scope = d.scope();
                kernels::cross_entropy_grad_short::expand(
                    scope, logits, labels, lse, dlse, dpicked, dlogits, n, columns, first, live,
                );
            });
            let numbers = [vec![0], numbers].concat();
            // A unit of a range is a row.
            let cut = Cut { per_unit: vectors, ..Cut::vectors(count * vectors, THREADS) };
            self.launch_cut(kernel, &buffers, numbers, Vec::new(), cut);
            return Ok(());
        }
        let kernel = Kernel::new("cross_entropy_grad", &types, width, threads, &padded, move |d| {
            let (logits, labels, lse) = (d.input::<Pack<0>>(), d.input::<Elem<1>>(), d.input::<f32>());
            let (dlse, dpicked, dlogits) = (d.input::<f32>(), d.input::<f32>(), d.output::<Pack<0>>());
            let (columns, first, live) = (d.number(), d.number(), d.number());
            let scope = d.scope();
            kernels::cross_entropy_grad::expand(
                scope, logits, labels, lse, dlse, dpicked, dlogits, columns, first, live, padded, threads,
            );
        });
        self.launch_cut(kernel, &buffers, numbers, Vec::new(), Cut::rows(count));
        Ok(())
    }

    /// The unsigned scalars of a cross-entropy of rows of `vectors`, and whether the rows are padded.
    fn classes(&self, vectors: u64, start: u64, classes: Option<u64>) -> (Vec<u32>, bool) {
        let columns = self.operands[0].shape.last().copied().unwrap_or(1);
        let live = live_columns(columns, start, classes);
        (vec![vectors as u32, start as u32, live as u32], live < columns)
    }
}
