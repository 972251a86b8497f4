//! Attention and its derivative as graphs that cuDNN's fused engines take.
//!
//! The engines recognise a softmax written out: a matrix product, a factor, a mask, the rows' maximum, the exponential
//! of the difference, its sum and a division, and a second product. Nothing of the size of the scores leaves the
//! multiprocessors (Dao et al., "FlashAttention-2", 2023). The graphs are those of cuDNN's own documentation of
//! attention, in its order of operations, on which the recognition depends.
//!
//! A bias is added to the scaled scores, before the mask. A key/value head serves its group of query heads by
//! broadcasting in the products; the derivatives of a group are added in the engine.
//!
//! Causal attention of a part of the queries is told of the keys before the end of that part alone
//! ([`Attention::led`]). The scratch memory is as much for every part, so that all ranks have their values at the same
//! places. The derivative is two launches, of the keys before the part and of its own ([`Attention::parts`]).

use super::graph::{Graph, Layout, Map, Reduction, Tensor};
use crate::cuda::device::Failure;
use shardc_ir::ops::Mask;
use shardc_ir::{DType, TensorType};

/// Bytes of workspace that engines take beside what [`Attention::scratch`] counts.
const ENGINE: u64 = 1 << 20;

/// What tells one attention's kernel from another's. Names as in `shardc_ir::ops::attention`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Whether it is the derivative.
    pub backward: bool,
    /// Batch elements.
    pub b: u64,
    /// Queries.
    pub s: u64,
    /// Query heads.
    pub h: u64,
    /// The size of a query and a key.
    pub d: u64,
    /// Keys that any query sees.
    pub t: u64,
    /// Keys of a batch element, of which the first are seen.
    pub stored: u64,
    /// Key/value heads.
    pub kv: u64,
    /// The size of a value.
    pub e: u64,
    /// The element type of all but the row statistics.
    pub dtype: DType,
    /// Whether query `i` sees keys `0..=i + t - s` only.
    pub causal: bool,
    /// The factor of the scores.
    pub scale: f32,
    /// The sizes of what is added to the scaled scores, `[b or 1, h or 1, s or 1, t]`.
    pub bias: Option<[u64; 4]>,
    /// Whether the derivative adds in a fixed order, for which it writes that of all scores.
    pub deterministic: bool,
}

/// Scratch memory of a launch, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// The gradient of the queries in f32, to which blocks of keys add; none if it is deterministic.
    pub dq: u64,
    /// The rows' sums of `do * o`.
    pub delta: u64,
    /// The gradients of the queries of another part of the keys, where they are taken in [`Attention::parts`].
    pub beside: u64,
    /// What the engine may use as it likes.
    pub workspace: u64,
}

impl Attention {
    /// The attention of these operands.
    pub fn new(backward: bool, [q, k, v]: [&TensorType; 3], causal: bool, scale: f64) -> Self {
        let [b, s, h, d] = [0, 1, 2, 3].map(|dim: usize| q.shape[dim]);
        let (t, kv, e, dtype, scale) = (k.shape[1], k.shape[2], v.shape[3], q.dtype, scale as f32);
        Self { backward, b, s, h, d, t, stored: t, kv, e, dtype, causal, scale, bias: None, deterministic: false }
    }

    /// The same of a part of the queries, the first of which comes behind so many keys: the last sees as many more as there
    /// are queries, and no others are read.
    ///
    /// # Errors
    /// Why there is no kernel for it: a query would come before the first key, or behind the last, or queries lie in parts
    /// whose order is reversed.
    pub fn led(self, mask: Mask) -> Result<Self, String> {
        if let Some(parts) = mask.reversed.filter(|_| self.causal) {
            return Err(format!("causal attention of queries in {parts} parts, the last first"));
        }
        let Some(lead) = mask.lead.filter(|_| self.causal) else { return Ok(self) };
        let seen = u64::try_from(lead).ok().map(|lead| lead + self.s).filter(|seen| *seen <= self.stored);
        let Self { s, stored, .. } = self;
        let t = seen.ok_or_else(|| format!("causal attention of {s} queries behind {lead} of {stored} keys"))?;
        Ok(Self { t, ..self })
    }

    /// With what is added to the scaled scores, if anything is.
    pub fn biased(self, bias: Option<&TensorType>) -> Self {
        Self { bias: bias.map(|bias| [0, 1, 2, 3].map(|dim: usize| bias.shape[dim])), ..self }
    }

    /// With the derivative's order of additions fixed, or left to the engine.
    pub fn deterministic(self, deterministic: bool) -> Self {
        Self { deterministic, ..self }
    }

    /// The parts of the keys that kernels take one by one, each with its first key. The derivative's engine works on every
    /// tile of a mask that begins behind the first key, as if nothing were masked (cuDNN 9.19, measured): the keys that all
    /// of the queries see are a part without a mask, and the rest is one whose mask begins at its first key. The gradients of the
    /// queries are the sum over the parts.
    pub fn parts(&self) -> Vec<(u64, Self)> {
        let Self { s, t, .. } = *self;
        if !(self.sees_parts() && 1 < s && s < t) {
            return vec![(0, *self)];
        }
        vec![(0, Self { t: t - s, causal: false, ..*self }), (t - s, Self { t: s, ..*self })]
    }

    /// Whether the keys are taken in parts where some of them come before the queries held here.
    fn sees_parts(&self) -> bool {
        self.backward && self.causal && self.bias.is_none() && self.s < self.stored
    }

    /// Why no version of cuDNN takes it, if none does.
    pub fn unfit(&self) -> Option<&'static str> {
        let wide = |size: u64| size > 256 || !size.is_multiple_of(8);
        if !matches!(self.dtype, DType::Bf16 | DType::F16) {
            Some("cuDNN's fused attention takes bf16 and f16")
        } else if wide(self.d) || wide(self.e) {
            Some("cuDNN's fused attention takes heads of 8, 16, .. 256")
        } else if self.s == 1 && self.t == 1 {
            Some("cuDNN's fused attention takes more than one position")
        } else {
            None
        }
    }

    /// Why this version (`10000 major + 100 minor + patch`) does not take it or is known to err.
    pub fn outdated(&self, version: usize) -> Option<&'static str> {
        match version {
            // Earlier versions leave it to the caller to clear the sum of dq.
            ..90_600 => Some("it takes cuDNN 9.6 or later"),
            91_000 | 91_001 => Some("cuDNN 9.10.0 and 9.10.1 have faulty attention"),
            // Earlier versions read beyond a last, shorter block of keys.
            ..91_600 if self.backward && !self.t.is_multiple_of(128) => {
                Some("lengths that are no multiple of 128 take cuDNN 9.16 or later")
            }
            _ => None,
        }
    }

    /// The scratch memory of a launch: as much for every part of the queries.
    pub fn scratch(&self) -> Scratch {
        let Self { b, s, h, d, stored: t, kv, e, dtype, deterministic, .. } = *self;
        if !self.backward {
            return Scratch { dq: 0, delta: 0, beside: 0, workspace: ENGINE };
        }
        // The gradients of a group's keys and values before they are added.
        let groups = if h > kv { b * h * t * (d + e) * dtype.size() } else { 0 };
        // Whole tiles of 64 queries and 128 keys.
        let scores = b * h * s.next_multiple_of(64) * t.next_multiple_of(128) * dtype.size();
        let (dq, scores) = if deterministic { (0, scores) } else { (b * h * s * d * 4, 0) };
        // The first part of the queries needs none.
        let beside = if self.sees_parts() { b * h * s * d * dtype.size() } else { 0 };
        Scratch { dq, delta: b * h * s * 4, beside, workspace: ENGINE + groups + scores }
    }

    fn queries(&self, width: u64) -> Layout {
        Layout::heads([self.b, self.s, self.h, width])
    }

    fn keys(&self, width: u64) -> Layout {
        let mut keys = Layout::heads([self.b, self.stored, self.kv, width]);
        keys.sizes[2] = self.t;
        keys
    }

    /// One number per query and head.
    fn rows(&self) -> Layout {
        Layout::dense([self.b, self.h, self.s, 1])
    }

    fn scores(&self) -> Layout {
        Layout::dense([self.b, self.h, self.s, self.t])
    }

    /// The graph for a version of the library.
    pub fn graph(&self, version: usize) -> Result<Graph, Failure> {
        if self.backward { self.backward_graph(version) } else { self.forward_graph(version) }
    }

    /// Buffers: `q`, `k`, `v`; `o`, `lse`; the bias.
    fn forward_graph(&self, version: usize) -> Result<Graph, Failure> {
        let (mut graph, dtype) = (Graph::default(), self.dtype);
        let g = &mut graph;
        let q = g.buffer(0, dtype, self.queries(self.d))?;
        let k = g.buffer(1, dtype, self.keys(self.d).transposed())?;
        let v = g.buffer(2, dtype, self.keys(self.e))?;
        let o = g.buffer(3, dtype, self.queries(self.e))?;
        let lse = g.buffer(4, DType::F32, self.rows())?;
        let scores = g.inside(DType::F32, self.scores())?;
        g.matmul(q, k, scores)?;
        let scale = g.real(self.scale)?;
        let scores = g.map(Map::Mul, &[scores, scale])?;
        let scores = self.with_bias(g, scores, 5)?;
        let scores = self.masked(g, scores, version)?;
        let most = g.reduce_rows(Reduction::CUDNN_REDUCE_TENSOR_MAX, scores)?;
        let below = g.map(Map::Sub, &[scores, most])?;
        let terms = g.map(Map::Exp, &[below])?;
        let sum = g.reduce_rows(Reduction::CUDNN_REDUCE_TENSOR_ADD, terms)?;
        let logarithm = g.map(Map::Log, &[sum])?;
        g.map_into(Map::Add, &[most, logarithm], lse)?;
        let p = g.inside(dtype, self.scores())?;
        g.map_into(Map::Div, &[terms, sum], p)?;
        g.matmul(p, v, o)?;
        Ok(graph)
    }

    /// Buffers: `do`, `q`, `k`, `v`, `o`, `lse`; `dq`, `dk`, `dv`; the sums of dq (if any) and `delta`; the bias.
    fn backward_graph(&self, version: usize) -> Result<Graph, Failure> {
        let (mut graph, dtype) = (Graph::default(), self.dtype);
        let g = &mut graph;
        let cotangent = g.buffer(0, dtype, self.queries(self.e))?;
        let q = g.buffer(1, dtype, self.queries(self.d))?;
        let k = g.buffer(2, dtype, self.keys(self.d).transposed())?;
        let v = g.buffer(3, dtype, self.keys(self.e).transposed())?;
        let o = g.buffer(4, dtype, self.queries(self.e))?;
        let lse = g.buffer(5, DType::F32, self.rows())?;
        let dq = g.buffer(6, dtype, self.queries(self.d))?;
        let dk = g.buffer(7, dtype, self.keys(self.d))?;
        let dv = g.buffer(8, dtype, self.keys(self.e))?;
        let delta = g.buffer(10, DType::F32, self.rows())?;
        // delta = sum(do * o); the factor of one is dropout's place in the pattern.
        let products = g.map(Map::Mul, &[cotangent, o])?;
        let sums = g.reduce_rows(Reduction::CUDNN_REDUCE_TENSOR_ADD, products)?;
        let one = g.real(1.0)?;
        g.map_into(Map::Mul, &[sums, one], delta)?;
        // p = exp(scale q kT - lse)
        let scores = g.inside(DType::F32, self.scores())?;
        g.matmul(q, k, scores)?;
        let scale = g.real(self.scale)?;
        let scores = g.map(Map::Mul, &[scores, scale])?;
        let scores = self.with_bias(g, scores, 11)?;
        let scores = g.map(Map::Sub, &[scores, lse])?;
        let scores = self.masked(g, scores, version)?;
        let p = g.map(Map::Exp, &[scores])?;
        self.group_sum(g, p, cotangent, dv, self.e)?;
        // ds = scale p (do vT - delta)
        let dp = g.inside(DType::F32, self.scores())?;
        g.matmul(cotangent, v, dp)?;
        let dp = g.map(Map::Sub, &[dp, delta])?;
        let ds = g.map(Map::Mul, &[dp, p])?;
        let ds = g.map(Map::Mul, &[ds, scale])?;
        self.group_sum(g, ds, q, dk, self.d)?;
        let keys = g.reshape(k, DType::F32, self.keys(self.d))?;
        if self.deterministic {
            // Without a sum in memory of its own the engine keeps `ds` and makes `dq` of it in a pass behind.
            g.matmul(ds, keys, dq)?;
        } else {
            let dq_sum = g.buffer(9, DType::F32, Layout::dense([self.b, self.h, self.s, self.d]))?;
            g.matmul(ds, keys, dq_sum)?;
            g.map_into(Map::Identity, &[dq_sum], dq)?;
        }
        Ok(graph)
    }

    /// `to = xT y`, summed over each group of heads; `x` is of the size of the scores.
    fn group_sum(&self, g: &mut Graph, x: Tensor, y: Tensor, to: Tensor, width: u64) -> Result<(), Failure> {
        let Self { b, h, t, kv, dtype, .. } = *self;
        let flipped = Layout::dense([b, h, self.s, t]).transposed();
        let x = g.reshape(x, dtype, flipped)?;
        if h == kv {
            return g.matmul(x, y, to);
        }
        let parts = g.inside(dtype, Layout::dense([b, h, t, width]))?;
        g.matmul(x, y, parts)?;
        g.reduce_into(Reduction::CUDNN_REDUCE_TENSOR_ADD, parts, to)
    }

    /// Scores with the bias in the buffer at `position`, if there is one.
    fn with_bias(&self, g: &mut Graph, scores: Tensor, position: usize) -> Result<Tensor, Failure> {
        let Some(sizes) = self.bias else { return Ok(scores) };
        // The derivative errs, without a word, where the bias has one row for all queries (cuDNN 9.19): it is told of as many
        // rows, which lie on each other.
        let [b, h, s, t] = sizes;
        let mut layout = match (self.backward, s) {
            (true, 1) => Layout { sizes: [b, h, self.s, t], strides: [h * t, t, 0, 1] },
            _ => Layout::dense(sizes),
        };
        layout.sizes[3] = self.t;
        let bias = g.buffer(position, self.dtype, layout)?;
        g.map(Map::Add, &[scores, bias])
    }

    /// Scores that are not seen become minus infinity.
    fn masked(&self, g: &mut Graph, scores: Tensor, version: usize) -> Result<Tensor, Failure> {
        if !self.causal {
            return Ok(scores);
        }
        let (mut query, key) = (g.index(scores, 2)?, g.index(scores, 3)?);
        if self.s != self.t {
            let [s, t] = [self.s, self.t].map(|size| size as i32);
            for (map, size) in [(Map::Add, t), (Map::Sub, s)] {
                let size = g.integer(size)?;
                query = g.shift(map, query, size)?;
            }
        }
        let seen = g.not_below(query, key)?;
        let least = g.real(if version < 91_000 { f32::MIN } else { f32::NEG_INFINITY })?;
        g.map(Map::Select, &[scores, least, seen])
    }
}
