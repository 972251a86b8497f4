//! The elementwise parts of attention where its products are plain matrix products: rows of
//! scores, one block each, for a few heads and a range of `rows` queries. Under causality the range's
//! query `i` sees the keys before `i + offset`.

use super::rows::{block_max, block_sum};
use crate::cuda::kernel::{Elem, Lanes, Pack};
use cubecl::prelude::*;

/// How many of `keys` keys a row sees.
#[cube]
fn visible(rows: u32, keys: u32, offset: u32, #[comptime] causal: bool) -> u32 {
    if comptime!(causal) { CUBE_POS as u32 % rows + offset } else { keys * 1u32 }
}

/// Where a row's statistic lies: heads are `step` elements apart.
#[cube]
fn statistic(rows: u32, step: u32) -> usize {
    let row = CUBE_POS as u32;
    ((row / rows) * step + row % rows) as usize
}

/// `probabilities = softmax(scale * scores)` over the keys that are seen, and its `lse`. `keys` is in
/// elements.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn attention_softmax(
    scores: &Array<Vector<f32, Lanes>>,
    probabilities: &mut Array<Pack<0>>,
    lse: &mut Array<f32>,
    rows: u32,
    keys: u32,
    step: u32,
    offset: u32,
    scale: f32,
    #[comptime] causal: bool,
    #[comptime] threads: u32,
) {
    let columns = keys as usize / Lanes::value();
    let start = CUBE_POS as usize * columns;
    let seen = visible(rows, keys, offset, causal);
    let largest = RuntimeCell::<f32>::new(f32::new(-3.0e38));
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        let a = scores[start + at.read()];
        #[unroll]
        for lane in 0..Lanes::value() {
            if ((at.read() * Lanes::value() + lane) as u32) < seen {
                let value = a[lane] * scale;
                let next = max(largest.read(), value);
                sum.store(sum.read() * (largest.read() - next).exp() + (value - next).exp());
                largest.store(next);
            }
        }
        at.store(at.read() + comptime!(threads as usize));
    }
    let row_max = block_max(largest.read(), threads);
    let row_sum = block_sum(sum.read() * (largest.read() - row_max).exp(), threads);
    let total = row_max + row_sum.ln();
    at.store(UNIT_POS as usize);
    while at.read() < columns {
        let a = scores[start + at.read()];
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let inside = ((at.read() * Lanes::value() + lane) as u32) < seen;
            let value = select(inside, (a[lane] * scale - total).exp(), 0.0f32);
            out[lane] = Elem::<0>::cast_from(value);
        }
        probabilities[start + at.read()] = out;
        at.store(at.read() + comptime!(threads as usize));
    }
    if UNIT_POS == 0 {
        lse[statistic(rows, step)] = total;
    }
}

/// The backward pass's rows: the probabilities again, from scores and `lse`, and
/// `dscores = probabilities * (dprobabilities - delta) * scale`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn attention_scores_grad(
    scores: &Array<Vector<f32, Lanes>>,
    dprobabilities: &Array<Vector<f32, Lanes>>,
    lse: &Array<f32>,
    delta: &Array<f32>,
    probabilities: &mut Array<Pack<0>>,
    dscores: &mut Array<Pack<0>>,
    rows: u32,
    keys: u32,
    step: u32,
    offset: u32,
    scale: f32,
    #[comptime] causal: bool,
    #[comptime] threads: u32,
) {
    let columns = keys as usize / Lanes::value();
    let start = CUBE_POS as usize * columns;
    let seen = visible(rows, keys, offset, causal);
    let total = lse[statistic(rows, step)];
    let shift = delta[statistic(rows, step)];
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        let a = scores[start + at.read()];
        let d = dprobabilities[start + at.read()];
        let mut out = Pack::<0>::empty();
        let mut out_scores = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let inside = ((at.read() * Lanes::value() + lane) as u32) < seen;
            let value = select(inside, (a[lane] * scale - total).exp(), 0.0f32);
            out[lane] = Elem::<0>::cast_from(value);
            out_scores[lane] = Elem::<0>::cast_from(value * (d[lane] - shift) * scale);
        }
        probabilities[start + at.read()] = out;
        dscores[start + at.read()] = out_scores;
        at.store(at.read() + comptime!(threads as usize));
    }
}

/// `delta[b, h, s] = sum over d of do[b, s, h, d] * o[b, s, h, d]`; block `b` is row `b` of
/// `[b, s, h]`, `columns` counts vectors of `d`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn attention_delta(
    cotangent: &Array<Pack<0>>,
    output: &Array<Pack<0>>,
    delta: &mut Array<f32>,
    queries: u32,
    heads: u32,
    columns: u32,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let start = CUBE_POS as usize * columns;
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        let a = cotangent[start + at.read()];
        let b = output[start + at.read()];
        #[unroll]
        for lane in 0..Lanes::value() {
            sum.store(sum.read() + f32::cast_from(a[lane]) * f32::cast_from(b[lane]));
        }
        at.store(at.read() + comptime!(threads as usize));
    }
    let total = block_sum(sum.read(), threads);
    if UNIT_POS == 0 {
        let row = CUBE_POS as u32;
        let head = row % heads;
        let query = (row / heads) % queries;
        let batch = row / heads / queries;
        delta[((batch * heads + head) * queries + query) as usize] = total;
    }
}
