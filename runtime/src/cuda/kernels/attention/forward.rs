//! The forward kernel: an online softmax, so that one walk over the keys suffices.

use super::{Four, Tiling, accumulate, biased, clear, load, products, seen, store};
use crate::cuda::kernel::{Elem, Pack};
use crate::cuda::kernels::fold::LOWEST;
use cubecl::prelude::*;

/// `o = softmax(scale * q kT) v`, and `lse`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn attention(
    q: &Array<Pack<0>>,
    k: &Array<Pack<0>>,
    v: &Array<Pack<0>>,
    o: &mut Array<Pack<0>>,
    lse: &mut Array<f32>,
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
    let columns = comptime!(e.div_ceil(4).div_ceil(side));
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
    let mut others = SharedMemory::<Four>::new(comptime!(tiling.tile(d.max(e))));
    let mut weights = SharedMemory::<Four>::new(comptime!(tiling.scores()));
    let mut parts = SharedMemory::<Four>::new(comptime!(side * side));
    let mut scores = Array::<f32>::new(16usize);
    let mut sums = Array::<Four>::new(comptime!(4 * columns));
    clear(&mut sums, comptime!(4 * columns));
    load(q, &mut queries, (batch * s * h + head) * d_packs, h * d_packs, first, s, d, tiling, false);
    let most = RuntimeCell::<Four>::new(Four::new(f32::new(LOWEST)));
    let total = RuntimeCell::<Four>::new(Four::new(f32::new(0.0)));
    // Keys from here on are seen by no query of the tile.
    let end = RuntimeCell::<usize>::new(t);
    if comptime!(tiling.causal) {
        end.store(min(t, first + rows + t - s));
    }
    let at = RuntimeCell::<usize>::new(0usize);
    while at.read() < end.read() {
        load(k, &mut others, keys_at * d_packs, kv * d_packs, at.read(), t, d, tiling, true);
        sync_cube();
        products(&queries, &others, &mut scores, y, x, d, tiling);
        let mut largest = Four::new(f32::new(LOWEST));
        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for j in 0..4usize {
                let query = first + 4 * y + i;
                let key = at.read() + 4 * x + j;
                let visible = seen(query, key, s, t, tiling.causal);
                let score = scores[comptime!(4 * i + j)] * scale;
                let score = biased(score, bias, bias_at, bias_stride, query, key, s, t, tiling.biased);
                let value = select(visible, score, f32::new(LOWEST));
                scores[comptime!(4 * i + j)] = value;
                largest[i] = max(largest[i], value);
            }
        }
        parts[x * side + y] = largest;
        sync_cube();
        let next = RuntimeCell::<Four>::new(most.read());
        #[unroll]
        for other in 0..side {
            next.store(max(next.read(), parts[comptime!(other * side) + y]));
        }
        let shrink = (most.read() - next.read()).exp();
        let top = next.read();
        let mut added = Four::new(f32::new(0.0));
        #[unroll]
        for i in 0..4usize {
            let mut row = Four::empty();
            #[unroll]
            for j in 0..4usize {
                // What is not seen must not count even in a row that has seen nothing yet.
                let visible = seen(first + 4 * y + i, at.read() + 4 * x + j, s, t, tiling.causal);
                let score = scores[comptime!(4 * i + j)];
                let p = select(visible, (score - top[i]).exp(), f32::new(0.0));
                row[j] = p;
                added[i] += p;
            }
            weights[(4 * y + i) * comptime!(side + 1) + x] = row;
            #[unroll]
            for j in 0..columns {
                sums[comptime!(i * columns + j)] *= Four::new(shrink[i]);
            }
        }
        total.store(total.read() * shrink + added);
        most.store(next.read());
        load(v, &mut others, keys_at * e_packs, kv * e_packs, at.read(), t, e, tiling, false);
        sync_cube();
        accumulate(&weights, &others, &mut sums, y, x, e, tiling, false);
        sync_cube();
        at.store(at.read() + rows);
    }
    parts[x * side + y] = total.read();
    sync_cube();
    let sum = RuntimeCell::<Four>::new(Four::new(f32::new(0.0)));
    #[unroll]
    for other in 0..side {
        sum.store(sum.read() + parts[comptime!(other * side) + y]);
    }
    let mine = first + 4 * y;
    let factors = Four::new(f32::new(1.0)) / sum.read();
    store(&sums, factors, o, (batch * s * h + head) * e_packs, h * e_packs, mine, s, x, e, tiling);
    let statistics = most.read() + sum.read().ln();
    #[unroll]
    for i in 0..4usize {
        if x == 0 && mine + i < s {
            lse[(batch * h + head) * s + mine + i] = statistics[i];
        }
    }
}
