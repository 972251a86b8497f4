//! The backward kernels, which make the probabilities again from the rows' `lse`.

use super::{Four, Tiling, accumulate, biased, clear, load, products, seen, store};
use crate::cuda::kernel::{Elem, Lanes, Pack};
use crate::cuda::kernels::fold::block_sum;
use cubecl::prelude::*;

/// From the scores of a tile and `dp = do vT`, makes `p = exp(scale * score - lse)` in `scores` and
/// `ds = scale * p * (dp - delta)` in `gradients`. Rows are queries, or keys.
#[cube]
#[allow(clippy::too_many_arguments)]
fn differentiate(
    scores: &mut Array<f32>,
    gradients: &mut Array<f32>,
    lse: &Array<f32>,
    delta: &Array<f32>,
    bias: &Array<Elem<0>>,
    bias_at: usize,
    bias_stride: usize,
    statistics: usize,
    row: usize,
    column: usize,
    s: usize,
    t: usize,
    scale: f32,
    #[comptime] keys: bool,
    #[comptime] tiling: Tiling,
) {
    #[unroll]
    for i in 0..4usize {
        #[unroll]
        for j in 0..4usize {
            let query = if comptime!(keys) { column + j } else { row + i };
            let key = if comptime!(keys) { row + i } else { column + j };
            let visible = seen(query, key, s, t, tiling.causal);
            let at = statistics + min(query, s - 1);
            let score = scores[comptime!(4 * i + j)] * scale;
            let exponent = biased(score, bias, bias_at, bias_stride, query, key, s, t, tiling.biased) - lse[at];
            let p = select(visible, exponent.exp(), f32::new(0.0));
            scores[comptime!(4 * i + j)] = p;
            let gradient = gradients[comptime!(4 * i + j)];
            gradients[comptime!(4 * i + j)] = select(visible, p * (gradient - delta[at]) * scale, f32::new(0.0));
        }
    }
}

/// Writes a thread's numbers into the tile of weights.
#[cube]
fn share(numbers: &Array<f32>, weights: &mut SharedMemory<Four>, y: usize, x: usize, #[comptime] tiling: Tiling) {
    let side = comptime!(tiling.side);
    #[unroll]
    for i in 0..4usize {
        let mut row = Four::empty();
        #[unroll]
        for j in 0..4usize {
            row[j] = numbers[comptime!(4 * i + j)];
        }
        weights[(4 * y + i) * comptime!(side + 1) + x] = row;
    }
}

/// `dq`, from the blocks that own queries.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn attention_queries_grad(
    cotangent: &Array<Pack<0>>,
    q: &Array<Pack<0>>,
    k: &Array<Pack<0>>,
    v: &Array<Pack<0>>,
    lse: &Array<f32>,
    delta: &Array<f32>,
    dq: &mut Array<Pack<0>>,
    bias: &Array<Elem<0>>,
    s: u32,
    t: u32,
    h: u32,
    kv: u32,
    strides: &Sequence<u32>,
    scale: f32,
    #[comptime] tiling: Tiling,
) {
    let d = comptime!(tiling.d);
    let e = comptime!(tiling.e);
    let side = comptime!(tiling.side);
    let rows = comptime!(tiling.rows());
    let count = comptime!(4 * d.div_ceil(4).div_ceil(side));
    let s = s as usize;
    let t = t as usize;
    let h = h as usize;
    let kv = kv as usize;
    let y = UNIT_POS as usize / side;
    let x = UNIT_POS as usize % side;
    let head = CUBE_POS_Y as usize;
    let batch = CUBE_POS_Z as usize;
    let first = CUBE_POS_X as usize * rows;
    let group = head / (h / kv);
    let keys_at = batch * strides[3] as usize * kv + group;
    let bias_at = batch * strides[0] as usize + head * strides[1] as usize;
    let bias_stride = strides[2] as usize;
    let d_packs = comptime!(d / tiling.lanes);
    let e_packs = comptime!(e / tiling.lanes);
    let mut queries = SharedMemory::<Four>::new(comptime!(tiling.tile(d)));
    let mut cotangents = SharedMemory::<Four>::new(comptime!(tiling.tile(e)));
    let mut keys = SharedMemory::<Four>::new(comptime!(tiling.tile(d)));
    let mut values = SharedMemory::<Four>::new(comptime!(tiling.tile(e)));
    let mut weights = SharedMemory::<Four>::new(comptime!(tiling.scores()));
    let mut scores = Array::<f32>::new(16usize);
    let mut gradients = Array::<f32>::new(16usize);
    let mut sums = Array::<Four>::new(count);
    clear(&mut sums, count);
    load(q, &mut queries, (batch * s * h + head) * d_packs, h * d_packs, first, s, d, tiling, false);
    load(cotangent, &mut cotangents, (batch * s * h + head) * e_packs, h * e_packs, first, s, e, tiling, false);
    let end = RuntimeCell::<usize>::new(t);
    if comptime!(tiling.causal) {
        end.store(min(t, first + rows + t - s));
    }
    let at = RuntimeCell::<usize>::new(0usize);
    while at.read() < end.read() {
        load(k, &mut keys, keys_at * d_packs, kv * d_packs, at.read(), t, d, tiling, true);
        load(v, &mut values, keys_at * e_packs, kv * e_packs, at.read(), t, e, tiling, true);
        sync_cube();
        products(&queries, &keys, &mut scores, y, x, d, tiling);
        products(&cotangents, &values, &mut gradients, y, x, e, tiling);
        let row = first + 4 * y;
        let column = at.read() + 4 * x;
        let statistics = (batch * h + head) * s;
        differentiate(
            &mut scores,
            &mut gradients,
            lse,
            delta,
            bias,
            bias_at,
            bias_stride,
            statistics,
            row,
            column,
            s,
            t,
            scale,
            false,
            tiling,
        );
        share(&gradients, &mut weights, y, x, tiling);
        sync_cube();
        accumulate(&weights, &keys, &mut sums, y, x, d, tiling, true);
        sync_cube();
        at.store(at.read() + rows);
    }
    let one = Four::new(f32::new(1.0));
    store(&sums, one, dq, (batch * s * h + head) * d_packs, h * d_packs, first + 4 * y, s, x, d, tiling);
}

/// `dk` and `dv`, from the blocks that own keys, summed over the query heads of the group.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn attention_keys_grad(
    cotangent: &Array<Pack<0>>,
    q: &Array<Pack<0>>,
    k: &Array<Pack<0>>,
    v: &Array<Pack<0>>,
    lse: &Array<f32>,
    delta: &Array<f32>,
    dk: &mut Array<Pack<0>>,
    dv: &mut Array<Pack<0>>,
    bias: &Array<Elem<0>>,
    s: u32,
    t: u32,
    h: u32,
    kv: u32,
    strides: &Sequence<u32>,
    scale: f32,
    #[comptime] tiling: Tiling,
) {
    let d = comptime!(tiling.d);
    let e = comptime!(tiling.e);
    let side = comptime!(tiling.side);
    let rows = comptime!(tiling.rows());
    let k_count = comptime!(4 * d.div_ceil(4).div_ceil(side));
    let v_count = comptime!(4 * e.div_ceil(4).div_ceil(side));
    let s = s as usize;
    let t = t as usize;
    let h = h as usize;
    let kv = kv as usize;
    let y = UNIT_POS as usize / side;
    let x = UNIT_POS as usize % side;
    let group = CUBE_POS_Y as usize;
    let bias_stride = strides[2] as usize;
    let batch = CUBE_POS_Z as usize;
    let first = CUBE_POS_X as usize * rows;
    let d_packs = comptime!(d / tiling.lanes);
    let e_packs = comptime!(e / tiling.lanes);
    let mut keys = SharedMemory::<Four>::new(comptime!(tiling.tile(d)));
    let mut values = SharedMemory::<Four>::new(comptime!(tiling.tile(e)));
    let mut queries = SharedMemory::<Four>::new(comptime!(tiling.tile(d)));
    let mut cotangents = SharedMemory::<Four>::new(comptime!(tiling.tile(e)));
    let mut weights = SharedMemory::<Four>::new(comptime!(tiling.scores()));
    let mut scores = Array::<f32>::new(16usize);
    let mut gradients = Array::<f32>::new(16usize);
    let mut dk_sums = Array::<Four>::new(k_count);
    let mut dv_sums = Array::<Four>::new(v_count);
    clear(&mut dk_sums, k_count);
    clear(&mut dv_sums, v_count);
    let keys_at = batch * strides[3] as usize * kv + group;
    let k_base = keys_at * d_packs;
    let v_base = keys_at * e_packs;
    load(k, &mut keys, k_base, kv * d_packs, first, t, d, tiling, false);
    load(v, &mut values, v_base, kv * e_packs, first, t, e, tiling, false);
    let head = RuntimeCell::<usize>::new(group * (h / kv));
    while head.read() < (group + 1) * (h / kv) {
        // Queries before this tile see none of the keys.
        let at = RuntimeCell::<usize>::new(0usize);
        if comptime!(tiling.causal) {
            if first + s > t {
                at.store((first + s - t) / rows * rows);
            }
        }
        while at.read() < s {
            let base = batch * s * h + head.read();
            load(q, &mut queries, base * d_packs, h * d_packs, at.read(), s, d, tiling, true);
            load(cotangent, &mut cotangents, base * e_packs, h * e_packs, at.read(), s, e, tiling, true);
            sync_cube();
            products(&keys, &queries, &mut scores, y, x, d, tiling);
            products(&values, &cotangents, &mut gradients, y, x, e, tiling);
            let row = first + 4 * y;
            let column = at.read() + 4 * x;
            let statistics = (batch * h + head.read()) * s;
            let bias_at = batch * strides[0] as usize + head.read() * strides[1] as usize;
            differentiate(
                &mut scores,
                &mut gradients,
                lse,
                delta,
                bias,
                bias_at,
                bias_stride,
                statistics,
                row,
                column,
                s,
                t,
                scale,
                true,
                tiling,
            );
            share(&scores, &mut weights, y, x, tiling);
            sync_cube();
            accumulate(&weights, &cotangents, &mut dv_sums, y, x, e, tiling, true);
            sync_cube();
            share(&gradients, &mut weights, y, x, tiling);
            sync_cube();
            accumulate(&weights, &queries, &mut dk_sums, y, x, d, tiling, true);
            sync_cube();
            at.store(at.read() + rows);
        }
        head.store(head.read() + 1);
    }
    let one = Four::new(f32::new(1.0));
    store(&dk_sums, one, dk, k_base, kv * d_packs, first + 4 * y, t, x, d, tiling);
    store(&dv_sums, one, dv, v_base, kv * e_packs, first + 4 * y, t, x, e, tiling);
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
