//! The largest elements of rows, and running sums.

use super::cut::Cut;
use super::{Arg, OP, RES, Select, THREADS, row_threads};
use crate::cuda::kernel::{Elem, Kernel};
use crate::cuda::kernels::fold::Fold;
use crate::cuda::kernels::ranked as kernels;
use shardc_ir::DType;
use shardc_ir::ops::{Cumsum, TopK};

/// The fewest elements of a chunk of a running sum, if there is more than one.
const LEAST_CHUNK: u64 = 8;

/// Into how many chunks of equal length a sum of so many elements is cut: about as many as a chunk has elements, since a unit
/// adds those of one, and another the totals of all.
fn chunks(length: u64) -> u64 {
    let most = length.isqrt().min(length / LEAST_CHUNK);
    (1..=most).rev().find(|count| length.is_multiple_of(*count)).unwrap_or(1)
}

impl Select<'_> {
    pub(super) fn top_k(&mut self, op: &TopK) -> Result<(), String> {
        let x = &self.operands[0];
        if !x.dtype.is_float() {
            return Err("integers".to_string());
        }
        let columns = x.shape.last().copied().unwrap_or(1);
        let (types, rows) = ([x.dtype, self.results[1].dtype], x.elements() / columns.max(1));
        let threads = row_threads(columns);
        let kernel = Kernel::new("top_k", &types, 1, threads, &(), move |d| {
            let (x, values, indices) = (d.input::<Elem<0>>(), d.output::<Elem<0>>(), d.output::<Elem<1>>());
            let (columns, k) = (d.number(), d.number());
            kernels::top_k::expand(d.scope(), x, values, indices, columns, k, threads);
        });
        let buffers = [(OP(0), columns, types[0]), (RES(0), op.k, types[0]), (RES(1), op.k, types[1])];
        let buffers = buffers.map(|(arg, elements, dtype)| (arg, elements * dtype.size()));
        self.launch_cut(kernel, &buffers, vec![columns as u32, op.k as u32], Vec::new(), Cut::rows(rows));
        Ok(())
    }

    pub(super) fn cumsum(&mut self, op: &Cumsum) -> Result<(), String> {
        let (x, result) = (&self.operands[0], &self.results[0]);
        if !x.dtype.is_float() {
            return Err("integers".to_string());
        }
        let (from, to) = ((OP(0), x.dtype), (RES(0), result.dtype));
        let (length, inner) = (x.shape[op.dim], x.shape[op.dim + 1..].iter().product::<u64>());
        let outer = x.elements() / (length * inner).max(1);
        let chunks = chunks(length);
        if chunks == 1 {
            self.running([from, to], [outer, length, inner], op.reverse);
            return Ok(());
        }
        let lines = outer * chunks * inner;
        let [totals, sums] = [(); 2].map(|()| (self.scratch(lines * 4), DType::F32));
        self.fold(Fold::Sum, from, totals, [outer * chunks, length / chunks, inner]);
        self.running([totals, sums], [outer, chunks, inner], op.reverse);
        let reverse = op.reverse;
        let kernel = Kernel::new("cumsum_chunks", &[from.1, to.1], 1, THREADS, &reverse, move |d| {
            let (x, sums, y) = (d.input::<Elem<0>>(), d.input::<f32>(), d.output::<Elem<1>>());
            let (n, length, inner, chunks) = (d.number(), d.number(), d.number(), d.number());
            kernels::cumsum_chunks::expand(d.scope(), x, sums, y, n, length, inner, chunks, reverse);
        });
        let numbers = [lines, length / chunks, inner, chunks].map(|number| number as u32).to_vec();
        let blocks = lines.div_ceil(u64::from(THREADS)) as u32;
        self.launch(kernel, vec![from.0, sums.0, to.0], numbers, Vec::new(), [blocks, 1, 1]);
        Ok(())
    }

    /// Running sums along the middle of `[outer, length, inner]`, a unit for each line.
    fn running(&mut self, [from, to]: [(Arg, DType); 2], [outer, length, inner]: [u64; 3], reverse: bool) {
        let kernel = Kernel::new("cumsum", &[from.1, to.1], 1, THREADS, &reverse, move |d| {
            let (x, y) = (d.input::<Elem<0>>(), d.output::<Elem<1>>());
            let (n, length, inner) = (d.number(), d.number(), d.number());
            kernels::cumsum::expand(d.scope(), x, y, n, length, inner, reverse);
        });
        let lines = outer * inner;
        let numbers = [lines, length, inner].map(|number| number as u32).to_vec();
        let blocks = lines.div_ceil(u64::from(THREADS)) as u32;
        self.launch(kernel, vec![from.0, to.0], numbers, Vec::new(), [blocks, 1, 1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_about_as_many_as_their_elements() {
        assert_eq!([1024, 4096, 96, 100].map(chunks), [32, 64, 8, 10]);
        // Short ones, and those that nothing divides, are one.
        assert_eq!([7, 13, 10_007].map(chunks), [1; 3]);
    }
}
