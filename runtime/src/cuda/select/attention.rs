//! Attention: a fused kernel where the types allow it, and plain matrix products.
//!
//! The fused kernel is cuDNN's; the products serve f32, and where the library is missing. Their scores
//! exist for a few heads of one batch element and [`ROWS`] queries at a time, within [`BUDGET`] bytes of
//! scratch memory. The products run over the key/value heads as a batch, once per query head of a group.
//! Under causality a range of queries is multiplied only with the keys that its last query sees.

use super::{Arg, Fused, Gemm, Matrix, OP, RES, Select, Step, lanes, row_threads};
use crate::cuda::cudnn::attention::Attention;
use crate::cuda::kernel::{Kernel, Pack, PackF32};
use crate::cuda::kernels::attention as kernels;
use shardc_ir::{DType, TensorType};

/// Bytes of scratch memory for scores, unless one head needs more.
const BUDGET: u64 = 1 << 27;

/// Queries whose scores exist at once.
const ROWS: u64 = 1024;

/// The sizes of one attention.
#[derive(Clone, Copy)]
struct Sizes {
    b: u64,
    s: u64,
    h: u64,
    d: u64,
    t: u64,
    kv: u64,
    e: u64,
    dtype: DType,
}

impl Sizes {
    fn new(q: &TensorType, k: &TensorType, v: &TensorType) -> Self {
        let [b, s, h, d] = [0, 1, 2, 3].map(|dim: usize| q.shape[dim]);
        Self { b, s, h, d, t: k.shape[1], kv: k.shape[2], e: v.shape[3], dtype: q.dtype }
    }

    /// Query heads per key/value head.
    fn group(&self) -> u64 {
        self.h / self.kv
    }

    /// The ranges of queries, the last first: it sees every key, so what it writes to all keys the
    /// others may add to.
    fn ranges(&self, causal: bool) -> Vec<Range> {
        let count = self.s.div_ceil(ROWS);
        let range = |index: u64| {
            let first = index * ROWS;
            let rows = ROWS.min(self.s - first);
            let offset = first + 1 + self.t.saturating_sub(self.s);
            let seen = (offset + rows - 1).next_multiple_of(8).min(self.t);
            Range { first, rows, keys: if causal { seen } else { self.t }, offset }
        };
        (0..count).rev().map(range).collect()
    }

    /// `[queries, width]` of head `head` of batch element `batch` in a `[b, s, h, width]` tensor, from
    /// query `first` on, with the heads of the next key/value heads as the batch.
    fn queries(&self, at: Arg, batch: u64, head: u64, width: u64, first: u64) -> Matrix {
        let first = ((batch * self.s + first) * self.h + head) * width * self.dtype.size();
        let (row, step) = (self.h * width, self.group() * width);
        Matrix { at: at.offset(first), dtype: self.dtype, row, column: 1, batch: step }
    }

    /// `[keys, width]` of key/value head `head` in a `[b, t, kv, width]` tensor.
    fn keys(&self, at: Arg, batch: u64, head: u64, width: u64) -> Matrix {
        let first = (batch * self.t * self.kv + head) * width * self.dtype.size();
        Matrix { at: at.offset(first), dtype: self.dtype, row: self.kv * width, column: 1, batch: width }
    }

    /// The statistics of head `head` from query `first` on, in `[b, h, s]` of f32.
    fn rows(&self, at: Arg, batch: u64, head: u64, first: u64) -> Arg {
        at.offset(((batch * self.h + head) * self.s + first) * 4)
    }

    /// Key/value heads per chunk, if a score takes `bytes`.
    fn chunk(&self, bytes: u64) -> u64 {
        (BUDGET / (self.s.min(ROWS) * self.t * bytes)).clamp(1, self.kv)
    }

    /// Scores per chunk of heads.
    fn scores(&self, chunk: u64) -> u64 {
        chunk * self.s.min(ROWS) * self.t
    }

    /// The scalars of the row kernels.
    fn numbers(&self, range: Range) -> Vec<u32> {
        [range.rows, range.keys, self.group() * self.s, range.offset].map(|number| number as u32).to_vec()
    }
}

/// A range of queries.
#[derive(Clone, Copy)]
struct Range {
    /// The first query.
    first: u64,
    /// How many.
    rows: u64,
    /// The keys that the last one sees, and a few more.
    keys: u64,
    /// How many keys the first one sees.
    offset: u64,
}

impl Range {
    /// `[rows, keys]` per head of a chunk, dense.
    fn scores(&self, at: Arg, dtype: DType) -> Matrix {
        Matrix { at, dtype, row: self.keys, column: 1, batch: self.rows * self.keys }
    }

    /// The vector width and the threads of a row kernel.
    fn width(&self, dtype: DType) -> (usize, u32) {
        let width = lanes(&[DType::F32, dtype], &[self.keys]);
        (width, row_threads(self.keys / width as u64))
    }
}

fn transposed(matrix: Matrix) -> Matrix {
    Matrix { row: matrix.column, column: matrix.row, ..matrix }
}

/// Batch elements and chunks of their key/value heads: the batch element, the first, how many.
fn chunks(sizes: &Sizes, chunk: u64) -> Vec<(u64, u64, u64)> {
    let of = |batch: u64| {
        let kv = sizes.kv;
        (0..kv).step_by(chunk as usize).map(move |first| (batch, first, chunk.min(kv - first)))
    };
    (0..sizes.b).flat_map(of).collect()
}

impl Select<'_> {
    fn product(&mut self, [a, b, c]: [Matrix; 3], [m, n, k]: [u64; 3], batch: u64, beta: f32) {
        self.gemm(Gemm { a, b, c, m, n, k, batch, addend: (beta != 0.0).then_some(c.at) });
    }

    pub(super) fn attention(&mut self, causal: bool, scale: f64) -> Result<(), String> {
        self.attention_by_products(causal, scale)?;
        let [q, k, v] = [0, 1, 2].map(|index: usize| &self.operands[index]);
        let fused = Attention::new(false, [q, k, v], causal, scale);
        self.fuse(fused, vec![OP(0), OP(1), OP(2), RES(0), RES(1)]);
        Ok(())
    }

    pub(super) fn attention_grad(&mut self, causal: bool, scale: f64) -> Result<(), String> {
        self.attention_grad_by_products(causal, scale)?;
        let [q, k, v] = [1, 2, 3].map(|index: usize| &self.operands[index]);
        let fused = Attention::new(true, [q, k, v], causal, scale);
        self.fuse(fused, vec![OP(0), OP(1), OP(2), OP(3), OP(4), OP(5), RES(0), RES(1), RES(2)]);
        Ok(())
    }

    /// Prefers a fused kernel to the steps chosen so far, if it takes the types.
    fn fuse(&mut self, attention: Attention, mut buffers: Vec<Arg>) {
        if attention.unfit().is_some() {
            return;
        }
        let otherwise = std::mem::take(&mut self.out);
        let scratch = attention.scratch();
        if attention.backward {
            buffers.extend([scratch.dq, scratch.delta].map(|bytes| self.scratch(bytes)));
        }
        let workspace = self.scratch(scratch.workspace);
        let fused = Fused { attention, buffers, workspace, otherwise: otherwise.steps };
        self.out.steps.push(Step::Fused(Box::new(fused)));
        // One or the other uses it.
        self.out.scratch = self.out.scratch.max(otherwise.scratch);
        self.out.workspace = otherwise.workspace;
    }

    fn attention_by_products(&mut self, causal: bool, scale: f64) -> Result<(), String> {
        let sizes = Sizes::new(&self.operands[0], &self.operands[1], &self.operands[2]);
        let Sizes { d, e, dtype, .. } = sizes;
        if causal && sizes.s > sizes.t {
            return Err("causal attention with more queries than keys".to_string());
        }
        let chunk = sizes.chunk(4 + dtype.size());
        let scores = self.scratch(sizes.scores(chunk) * 4);
        let probabilities = self.scratch(sizes.scores(chunk) * dtype.size());
        for (batch, first, heads) in chunks(&sizes, chunk) {
            let (k, v) = (sizes.keys(OP(1), batch, first, d), sizes.keys(OP(2), batch, first, e));
            for head in (0..sizes.group()).map(|inner| first * sizes.group() + inner) {
                for range in sizes.ranges(causal) {
                    let q = sizes.queries(OP(0), batch, head, d, range.first);
                    let o = sizes.queries(RES(0), batch, head, e, range.first);
                    let p = range.scores(probabilities, dtype);
                    let s = range.scores(scores, DType::F32);
                    self.product([q, transposed(k), s], [range.rows, range.keys, d], heads, 0.0);
                    let lse = sizes.rows(RES(1), batch, head, range.first);
                    self.attention_softmax(&sizes, range, [scores, probabilities, lse], heads, (causal, scale));
                    self.product([p, v, o], [range.rows, e, range.keys], heads, 0.0);
                }
            }
        }
        Ok(())
    }

    fn attention_softmax(
        &mut self,
        sizes: &Sizes,
        range: Range,
        buffers: [Arg; 3],
        heads: u64,
        (causal, scale): (bool, f64),
    ) {
        let (width, threads) = range.width(sizes.dtype);
        let kernel = Kernel::new("attention_softmax", &[sizes.dtype], width, threads, &causal, move |d| {
            let (scores, probabilities, lse) = (d.input::<PackF32>(), d.output::<Pack<0>>(), d.output::<f32>());
            let (rows, keys, step, offset) = (d.number(), d.number(), d.number(), d.number());
            let (p, scale) = (probabilities, d.real());
            let scope = d.scope();
            kernels::attention_softmax::expand(scope, scores, p, lse, rows, keys, step, offset, scale, causal, threads);
        });
        let grid = [(heads * range.rows) as u32, 1, 1];
        self.launch(kernel, buffers.to_vec(), sizes.numbers(range), vec![scale as f32], grid);
    }

    fn attention_grad_by_products(&mut self, causal: bool, scale: f64) -> Result<(), String> {
        let sizes = Sizes::new(&self.operands[1], &self.operands[2], &self.operands[3]);
        let Sizes { s, d, t, kv, e, dtype, .. } = sizes;
        if causal && s > t {
            return Err("causal attention with more queries than keys".to_string());
        }
        let size = dtype.size();
        let chunk = sizes.chunk(8 + 2 * size);
        let [scores, dprobabilities] = [4, 4].map(|bytes| self.scratch(sizes.scores(chunk) * bytes));
        let [probabilities, dscores] = [size, size].map(|bytes| self.scratch(sizes.scores(chunk) * bytes));
        let delta = self.scratch(sizes.b * sizes.h * s * 4);
        // Sums over the query heads of a group and over ranges are made in f32 and rounded once.
        let narrow = dtype != DType::F32 && (sizes.group() > 1 || s > ROWS);
        let [dk_sum, dv_sum] =
            [d, e].map(|width| if narrow { self.scratch(t * kv * width * 4 * sizes.b) } else { RES(0) });
        self.attention_delta(&sizes, delta);
        let wide = Sizes { dtype: if narrow { DType::F32 } else { dtype }, ..sizes };
        let [dk_at, dv_at] = if narrow { [dk_sum, dv_sum] } else { [RES(1), RES(2)] };
        for (batch, first, heads) in chunks(&sizes, chunk) {
            let (k, v) = (sizes.keys(OP(2), batch, first, d), sizes.keys(OP(3), batch, first, e));
            let (dk, dv) = (wide.keys(dk_at, batch, first, d), wide.keys(dv_at, batch, first, e));
            for inner in 0..sizes.group() {
                let head = first * sizes.group() + inner;
                for (index, range) in sizes.ranges(causal).into_iter().enumerate() {
                    let beta = if inner == 0 && index == 0 { 0.0 } else { 1.0 };
                    let (rows, keys) = (range.rows, range.keys);
                    let at = |at: Arg, width: u64| sizes.queries(at, batch, head, width, range.first);
                    let (q, cotangent, dq) = (at(OP(1), d), at(OP(0), e), at(RES(0), d));
                    let f32_scores = |at: Arg| range.scores(at, DType::F32);
                    self.product([q, transposed(k), f32_scores(scores)], [rows, keys, d], heads, 0.0);
                    self.product([cotangent, transposed(v), f32_scores(dprobabilities)], [rows, keys, e], heads, 0.0);
                    let [lse, shift] = [OP(5), delta].map(|at| sizes.rows(at, batch, head, range.first));
                    let buffers = [scores, dprobabilities, lse, shift, probabilities, dscores];
                    self.attention_scores_grad(&sizes, range, buffers, heads, (causal, scale));
                    let (p, ds) = (range.scores(probabilities, dtype), range.scores(dscores, dtype));
                    self.product([transposed(p), cotangent, dv], [keys, e, rows], heads, beta);
                    self.product([transposed(ds), q, dk], [keys, d, rows], heads, beta);
                    self.product([ds, k, dq], [rows, d, keys], heads, 0.0);
                }
            }
        }
        if narrow {
            for (from, to, width) in [(dk_sum, RES(1), d), (dv_sum, RES(2), e)] {
                self.cast_elements(from, to, DType::F32, dtype, sizes.b * t * kv * width);
            }
        }
        Ok(())
    }

    fn attention_scores_grad(
        &mut self,
        sizes: &Sizes,
        range: Range,
        buffers: [Arg; 6],
        heads: u64,
        (causal, scale): (bool, f64),
    ) {
        let (width, threads) = range.width(sizes.dtype);
        let kernel = Kernel::new("attention_scores_grad", &[sizes.dtype], width, threads, &causal, move |d| {
            let (scores, dprobabilities) = (d.input::<PackF32>(), d.input::<PackF32>());
            let (lse, delta) = (d.input::<f32>(), d.input::<f32>());
            let (p, ds) = (d.output::<Pack<0>>(), d.output::<Pack<0>>());
            let (rows, keys, step, offset) = (d.number(), d.number(), d.number(), d.number());
            let scale = d.real();
            let scope = d.scope();
            kernels::attention_scores_grad::expand(
                scope,
                scores,
                dprobabilities,
                lse,
                delta,
                p,
                ds,
                rows,
                keys,
                step,
                offset,
                scale,
                causal,
                threads,
            );
        });
        let grid = [(heads * range.rows) as u32, 1, 1];
        self.launch(kernel, buffers.to_vec(), sizes.numbers(range), vec![scale as f32], grid);
    }

    /// The rows' `sum(do * o)`, which is what the softmax's derivative subtracts.
    fn attention_delta(&mut self, sizes: &Sizes, delta: Arg) {
        let width = lanes(&[sizes.dtype], &[sizes.e]);
        let columns = sizes.e / width as u64;
        let threads = row_threads(columns);
        let kernel = Kernel::new("attention_delta", &[sizes.dtype], width, threads, &(), move |d| {
            let (cotangent, output, delta) = (d.input::<Pack<0>>(), d.input::<Pack<0>>(), d.output::<f32>());
            let (queries, heads, columns) = (d.number(), d.number(), d.number());
            let (q, h, c) = (queries, heads, columns);
            kernels::attention_delta::expand(d.scope(), cotangent, output, delta, q, h, c, threads);
        });
        let numbers = vec![sizes.s as u32, sizes.h as u32, columns as u32];
        let grid = [(sizes.b * sizes.s * sizes.h) as u32, 1, 1];
        self.launch(kernel, vec![OP(0), OP(4), delta], numbers, Vec::new(), grid);
    }
}
