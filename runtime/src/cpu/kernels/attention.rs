//! Attention and its derivative, one key/value head at a time and, within it, a block of queries at
//! a time, so that the scores of one block are all that is kept. Matrix products run on Flex.

use super::matmul::{elements, matrix};
use super::{Context, View, ViewMut, by_units};
use burn::tensor::Tensor;
use shardc_ir::ops::Mask;
use std::borrow::Cow;

/// How many queries' scores are kept at once.
const BLOCK: usize = 256;

/// The sizes `b, s, h, d, t, kv, e`.
#[derive(Clone, Copy)]
struct Sizes {
    b: usize,
    s: usize,
    h: usize,
    d: usize,
    t: usize,
    kv: usize,
    e: usize,
    mask: Mask,
}

/// What an operation says of the scores.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    pub mask: Mask,
    pub scale: f64,
}

impl Sizes {
    fn new(q: View<'_>, k: View<'_>, v: View<'_>, of: Scores) -> Self {
        let [b, s, h, d] = [0, 1, 2, 3].map(|dim| q.dim(dim));
        Self { b, s, h, d, t: k.dim(1), kv: k.dim(2), e: v.dim(3), mask: of.mask }
    }

    /// Query heads per key/value head.
    fn group(&self) -> usize {
        self.h / self.kv
    }

    /// How many keys query `i` sees.
    fn seen(&self, i: usize) -> usize {
        self.mask.seen(i as u64, [self.s as u64, self.t as u64]) as usize
    }

    /// The operations of one key/value head.
    fn work(&self) -> usize {
        self.group() * self.s * self.t * (self.d + self.e)
    }
}

/// What is added to the scaled scores: an array of four dimensions, of which any but the last may be copied.
struct Bias<'a> {
    values: Cow<'a, [f32]>,
    /// How far apart batch elements, heads and queries are; 0 where one serves all.
    strides: [usize; 3],
    keys: usize,
}

impl<'a> Bias<'a> {
    fn new(operand: Option<&View<'a>>) -> Result<Option<Self>, String> {
        let Some(operand) = operand else { return Ok(None) };
        let [b, h, s, keys] = [0, 1, 2, 3].map(|dim| operand.dim(dim));
        let stride = |size: usize, inner: usize| if size == 1 { 0 } else { inner };
        let strides = [stride(b, h * s * keys), stride(h, s * keys), stride(s, keys)];
        Ok(Some(Self { values: operand.f32s()?, strides, keys }))
    }

    /// That of one head.
    fn head(&self, batch: usize, head: usize) -> HeadBias<'_> {
        let at = batch * self.strides[0] + head * self.strides[1];
        HeadBias { values: &self.values[at..], stride: self.strides[2], keys: self.keys }
    }
}

/// What is added to the scaled scores of one head.
#[derive(Clone, Copy)]
struct HeadBias<'a> {
    values: &'a [f32],
    stride: usize,
    keys: usize,
}

impl HeadBias<'_> {
    /// Scales the scores of one query and adds the bias, if there is one.
    fn apply(bias: Option<Self>, scores: &mut [f32], scale: f32, query: usize) {
        match bias {
            None => scores.iter_mut().for_each(|score| *score *= scale),
            Some(bias) => {
                let row = &bias.values[query * bias.stride..][..bias.keys];
                scores.iter_mut().zip(row).for_each(|(score, bias)| *score = *score * scale + bias);
            }
        }
    }
}

/// Head `head` of batch `batch` of `[b, s, heads, d]`, as `[s, d]`.
fn head(values: &[f32], batch: usize, head: usize, [s, heads, d]: [usize; 3]) -> Vec<f32> {
    let rows = (0..s).map(|row| ((batch * s + row) * heads + head) * d);
    rows.flat_map(|at| &values[at..at + d]).copied().collect()
}

/// The inverse of [`head`].
fn set_head(values: &mut [f32], batch: usize, head: usize, [s, heads, d]: [usize; 3], part: &[f32]) {
    for (row, part) in (0..s).zip(part.chunks_exact(d)) {
        let at = ((batch * s + row) * heads + head) * d;
        values[at..at + d].copy_from_slice(part);
    }
}

/// The raw scores of queries `first..first + rows` against keys `0..keys`.
fn scores(q: &Tensor<2>, k: &Tensor<2>, first: usize, rows: usize, keys: usize) -> Result<Vec<f32>, String> {
    let (q, k) = (q.clone().narrow(0, first, rows), k.clone().narrow(0, 0, keys));
    elements(q.matmul(k.transpose()))
}

/// The blocks of queries that see some key: the first query, how many, how many keys that sees which sees the most.
fn blocks(sizes: Sizes) -> impl Iterator<Item = (usize, usize, usize)> {
    let starts = (0..sizes.s).step_by(BLOCK);
    let block = move |first: usize| {
        let rows = BLOCK.min(sizes.s - first);
        (first, rows, (first..first + rows).map(|query| sizes.seen(query)).max().unwrap_or(0))
    };
    starts.map(block).filter(|(_, _, keys)| *keys > 0)
}

pub(super) fn forward(
    of: Scores,
    context: Context,
    operands: &[View<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), String> {
    let sizes = Sizes::new(operands[0], operands[1], operands[2], of);
    let Sizes { b, s, h, d, t, kv, e, .. } = sizes;
    let (q, k, v) = (operands[0].f32s()?, operands[1].f32s()?, operands[2].f32s()?);
    let bias = Bias::new(operands.get(3))?;
    let heads = by_units(context, b * kv, sizes.work(), |unit| {
        let (batch, pair) = (unit / kv, unit % kv);
        let k = matrix(head(&k, batch, pair, [t, kv, d]), t, d);
        let v = matrix(head(&v, batch, pair, [t, kv, e]), t, e);
        (0..sizes.group())
            .map(|group| {
                let index = pair * sizes.group() + group;
                let q = matrix(head(&q, batch, index, [s, h, d]), s, d);
                let bias = bias.as_ref().map(|bias| bias.head(batch, index));
                one_head(sizes, of.scale as f32, bias, &q, &k, &v)
            })
            .collect::<Result<Vec<_>, _>>()
    })?;
    let (o, lse) = results.split_at_mut(1);
    let heads: Vec<_> = heads.into_iter().flatten().collect();
    o[0].write_f32(|out| {
        for (index, (o, _)) in heads.iter().enumerate() {
            set_head(out, index / h, index % h, [s, h, e], o);
        }
    })?;
    lse[0].write_f32(|out| {
        for ((_, lse), out) in heads.iter().zip(out.chunks_exact_mut(s)) {
            out.copy_from_slice(lse);
        }
    })
}

/// One query head: `o` `[s, e]` and `lse` `[s]`. A query that sees no key gives zeros and -inf.
fn one_head(
    sizes: Sizes,
    scale: f32,
    bias: Option<HeadBias<'_>>,
    q: &Tensor<2>,
    k: &Tensor<2>,
    v: &Tensor<2>,
) -> Result<(Vec<f32>, Vec<f32>), String> {
    let (mut o, mut lse) = (vec![0.0; sizes.s * sizes.e], vec![f32::NEG_INFINITY; sizes.s]);
    for (first, rows, keys) in blocks(sizes) {
        let mut scores = scores(q, k, first, rows, keys)?;
        let mut sums = vec![0.0f32; rows];
        for (row, scores) in scores.chunks_exact_mut(keys).enumerate() {
            let (seen, hidden) = scores.split_at_mut(sizes.seen(first + row));
            hidden.fill(0.0);
            if seen.is_empty() {
                continue;
            }
            HeadBias::apply(bias, seen, scale, first + row);
            let max = seen.iter().copied().fold(f32::NEG_INFINITY, super::elementwise::maximum);
            seen.iter_mut().for_each(|score| *score = (*score - max).exp());
            sums[row] = seen.iter().sum();
            lse[first + row] = max + sums[row].ln();
        }
        let product = elements(matrix(scores, rows, keys).matmul(v.clone().narrow(0, 0, keys)))?;
        let out = &mut o[first * sizes.e..(first + rows) * sizes.e];
        for ((out, row), sum) in out.chunks_exact_mut(sizes.e).zip(product.chunks_exact(sizes.e)).zip(&sums) {
            if *sum != 0.0 {
                out.iter_mut().zip(row).for_each(|(out, x)| *out = x / sum);
            }
        }
    }
    Ok((o, lse))
}

pub(super) fn backward(
    of: Scores,
    context: Context,
    operands: &[View<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), String> {
    let sizes = Sizes::new(operands[1], operands[2], operands[3], of);
    let Sizes { b, s, h, d, t, kv, e, .. } = sizes;
    let [d_o, q, k, v, o, lse] = [0, 1, 2, 3, 4, 5].map(|index| operands[index].f32s());
    let (d_o, q, k, v, o, lse) = (d_o?, q?, k?, v?, o?, lse?);
    let bias = Bias::new(operands.get(6))?;
    let units = by_units(context, b * kv, 3 * sizes.work(), |unit| {
        let (batch, pair) = (unit / kv, unit % kv);
        let k = matrix(head(&k, batch, pair, [t, kv, d]), t, d);
        let v = matrix(head(&v, batch, pair, [t, kv, e]), t, e);
        let (mut dk, mut dv) = (vec![0.0; t * d], vec![0.0; t * e]);
        let mut dqs = Vec::new();
        for group in 0..sizes.group() {
            let index = pair * sizes.group() + group;
            let lse = &lse[(batch * h + index) * s..][..s];
            let d_o = head(&d_o, batch, index, [s, h, e]);
            let o = head(&o, batch, index, [s, h, e]);
            // The row sums of do * o are those of p * dp (Dao et al., section 3.1).
            let dot = |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            let delta: Vec<f32> = d_o.chunks_exact(e).zip(o.chunks_exact(e)).map(dot).collect();
            let q = matrix(head(&q, batch, index, [s, h, d]), s, d);
            let bias = bias.as_ref().map(|bias| bias.head(batch, index));
            let query = Query { q, d_o: matrix(d_o, s, e), lse, delta: &delta, bias };
            dqs.push(one_head_grad(sizes, of.scale as f32, &query, &k, &v, &mut dk, &mut dv)?);
        }
        Ok((dqs, dk, dv))
    })?;
    let [dq_out, dk_out, dv_out] = results else { return Err("needs three results".to_string()) };
    dq_out.write_f32(|out| {
        let dqs = units.iter().flat_map(|(dqs, _, _)| dqs);
        dqs.enumerate().for_each(|(index, dq)| set_head(out, index / h, index % h, [s, h, d], dq));
    })?;
    dk_out.write_f32(|out| {
        units.iter().enumerate().for_each(|(unit, (_, dk, _))| set_head(out, unit / kv, unit % kv, [t, kv, d], dk));
    })?;
    dv_out.write_f32(|out| {
        units.iter().enumerate().for_each(|(unit, (_, _, dv))| set_head(out, unit / kv, unit % kv, [t, kv, e], dv));
    })
}

/// What the derivative needs of one query head.
struct Query<'a> {
    q: Tensor<2>,
    d_o: Tensor<2>,
    lse: &'a [f32],
    delta: &'a [f32],
    bias: Option<HeadBias<'a>>,
}

/// Adds one query head's terms to `dk` and `dv`; `dq`.
fn one_head_grad(
    sizes: Sizes,
    scale: f32,
    query: &Query<'_>,
    k: &Tensor<2>,
    v: &Tensor<2>,
    dk: &mut [f32],
    dv: &mut [f32],
) -> Result<Vec<f32>, String> {
    let mut dq = vec![0.0; sizes.s * sizes.d];
    let add = |to: &mut [f32], terms: &[f32]| to.iter_mut().zip(terms).for_each(|(to, term)| *to += term);
    for (first, rows, keys) in blocks(sizes) {
        let mut p = scores(&query.q, k, first, rows, keys)?;
        for (row, p) in p.chunks_exact_mut(keys).enumerate() {
            let (seen, hidden) = p.split_at_mut(sizes.seen(first + row));
            hidden.fill(0.0);
            HeadBias::apply(query.bias, seen, scale, first + row);
            seen.iter_mut().for_each(|p| *p = (*p - query.lse[first + row]).exp());
        }
        let d_o = query.d_o.clone().narrow(0, first, rows);
        let mut ds = elements(d_o.clone().matmul(v.clone().narrow(0, 0, keys).transpose()))?;
        for (row, (ds, p)) in ds.chunks_exact_mut(keys).zip(p.chunks_exact(keys)).enumerate() {
            let delta = query.delta[first + row];
            ds.iter_mut().zip(p).for_each(|(ds, p)| *ds = p * (*ds - delta) * scale);
        }
        add(dv, &elements(matrix(p, rows, keys).transpose().matmul(d_o))?);
        let ds = matrix(ds, rows, keys);
        add(dk, &elements(ds.clone().transpose().matmul(query.q.clone().narrow(0, first, rows)))?);
        let block = elements(ds.matmul(k.clone().narrow(0, 0, keys)))?;
        dq[first * sizes.d..(first + rows) * sizes.d].copy_from_slice(&block);
    }
    Ok(dq)
}
