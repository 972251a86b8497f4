//! Attention that keeps its scores on the chip, in f32 arithmetic for every element type: tiles of
//! scores are made from tiles of queries and keys, used, and forgotten (Dao et al., "FlashAttention",
//! 2022, algorithms 1 and 4).
//!
//! A block has `side * side` threads and owns a tile of `4 * side` rows; it walks over tiles of the
//! other side. Thread `(y, x)` computes the scores of rows `4 y ..` and columns `4 x ..`, and of its rows'
//! results every `side`th vector of four. In shared memory, rows are one vector longer than they need,
//! and those that serve as columns lie permuted (`place`), so that a warp reads different banks.
//!
//! The derivative is two kernels, one per side that owns: nothing is added across blocks, so the
//! result is the same in every run. `q` is `[b, s, h, d]`, `k` `[b, t, kv, d]`, `v` `[b, t, kv, e]`, of more keys in memory
//! where only the first `t` are seen; a block is one tile, head and batch element. `strides` are three of the bias, and the
//! keys of a batch element in memory.

mod backward;
mod forward;

pub use backward::{attention_delta, attention_keys_grad, attention_queries_grad};
pub use forward::attention;

use crate::cuda::kernel::{Elem, Pack};
use cubecl::prelude::*;

type Four = Vector<f32, Const<4>>;

/// What the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// The square root of the threads.
    pub side: usize,
    /// The elements that are read and written at once, at most four.
    pub lanes: usize,
    /// The size of a query and a key.
    pub d: usize,
    /// The size of a value.
    pub e: usize,
    /// Whether query `i` sees keys `0..=i + t - s` only.
    pub causal: bool,
    /// Whether something is added to the scaled scores.
    pub biased: bool,
}

impl Tiling {
    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        4 * self.side
    }

    /// Vectors of a tile whose rows have this many elements.
    fn tile(&self, size: usize) -> usize {
        self.rows() * (size.div_ceil(4) + 1)
    }

    /// Vectors of a tile of scores.
    fn scores(&self) -> usize {
        self.tile(self.rows())
    }

    /// Bytes of shared memory of the forward kernel.
    pub fn forward_bytes(&self) -> usize {
        16 * (self.tile(self.d) + self.tile(self.d.max(self.e)) + self.scores() + self.side * self.side)
    }

    /// Bytes of shared memory of a backward kernel.
    pub fn backward_bytes(&self) -> usize {
        16 * (2 * self.tile(self.d) + 2 * self.tile(self.e) + self.scores())
    }
}

/// Where a row that serves as a column lies: the four columns of a thread are `side` rows apart.
#[cube]
fn place(row: usize, #[comptime] tiling: Tiling, #[comptime] permuted: bool) -> usize {
    let side = comptime!(tiling.side);
    if comptime!(permuted) { (row % 4) * side + row / 4 } else { row * 1 }
}

/// Copies a tile of rows, from row `first` on, to shared memory; zeros from row `limit` on. Row `r`
/// begins at vector `base + r * stride` of `from`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load(
    from: &Array<Pack<0>>,
    to: &mut SharedMemory<Four>,
    base: usize,
    stride: usize,
    first: usize,
    limit: usize,
    #[comptime] size: usize,
    #[comptime] tiling: Tiling,
    #[comptime] permuted: bool,
) {
    let side = comptime!(tiling.side);
    let width = comptime!(size.div_ceil(4));
    let lanes = comptime!(tiling.lanes);
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < comptime!(4 * side * width) {
        let row = at.read() / width;
        let column = at.read() % width;
        let mut value = Four::new(f32::new(0.0));
        #[unroll]
        for part in 0..comptime!(4 / lanes) {
            let inside = comptime!(part * lanes) + column * 4 < size;
            if first + row < limit && inside {
                let pack = from[base + (first + row) * stride + column * comptime!(4 / lanes) + part];
                #[unroll]
                for lane in 0..lanes {
                    value[comptime!(part * lanes + lane)] = f32::cast_from(pack[lane]);
                }
            }
        }
        to[place(row, tiling, permuted) * comptime!(width + 1) + column] = value;
        at.store(at.read() + comptime!(side * side));
    }
}

/// `scores[4 i + j]` is the product of row `4 y + i` of `a` with the row of `b` that is column `4 x + j`.
#[cube]
fn products(
    a: &SharedMemory<Four>,
    b: &SharedMemory<Four>,
    scores: &mut Array<f32>,
    y: usize,
    x: usize,
    #[comptime] size: usize,
    #[comptime] tiling: Tiling,
) {
    let side = comptime!(tiling.side);
    let width = comptime!(size.div_ceil(4));
    #[unroll]
    for at in 0..16usize {
        scores[at] = f32::new(0.0);
    }
    for column in 0..width {
        let mut left = Array::<Four>::new(4usize);
        let mut right = Array::<Four>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            left[i] = a[(4 * y + i) * comptime!(width + 1) + column];
            right[i] = b[(comptime!(i * side) + x) * comptime!(width + 1) + column];
        }
        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for j in 0..4usize {
                let first = left[i];
                let second = right[j];
                #[unroll]
                for lane in 0..4usize {
                    scores[comptime!(4 * i + j)] += first[lane] * second[lane];
                }
            }
        }
    }
}

/// Adds `weights`' rows `4 y ..` times the tile `b` to `sums`: four rows of every `side`th vector from
/// `x` on.
#[cube]
#[allow(clippy::too_many_arguments)]
fn accumulate(
    weights: &SharedMemory<Four>,
    b: &SharedMemory<Four>,
    sums: &mut Array<Four>,
    y: usize,
    x: usize,
    #[comptime] size: usize,
    #[comptime] tiling: Tiling,
    #[comptime] permuted: bool,
) {
    let side = comptime!(tiling.side);
    let width = comptime!(size.div_ceil(4));
    let columns = comptime!(width.div_ceil(side));
    for group in 0..side {
        let mut left = Array::<Four>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            left[i] = weights[(4 * y + i) * comptime!(side + 1) + group];
        }
        #[unroll]
        for lane in 0..4usize {
            let row = place(4 * group + lane, tiling, permuted);
            #[unroll]
            for j in 0..columns {
                if x + comptime!(j * side) < width {
                    let right = b[row * comptime!(width + 1) + x + comptime!(j * side)];
                    #[unroll]
                    for i in 0..4usize {
                        let weight = left[i];
                        sums[comptime!(i * columns + j)] += Four::new(weight[lane]) * right;
                    }
                }
            }
        }
    }
}

/// Sets the sums that [`accumulate`] adds to, to zero.
#[cube]
fn clear(sums: &mut Array<Four>, #[comptime] count: usize) {
    #[unroll]
    for at in 0..count {
        sums[at] = Four::new(f32::new(0.0));
    }
}

/// Writes the sums times `factors`, one per row; no row from `limit` on.
#[cube]
#[allow(clippy::too_many_arguments)]
fn store(
    sums: &Array<Four>,
    factors: Four,
    to: &mut Array<Pack<0>>,
    base: usize,
    stride: usize,
    first: usize,
    limit: usize,
    x: usize,
    #[comptime] size: usize,
    #[comptime] tiling: Tiling,
) {
    let side = comptime!(tiling.side);
    let width = comptime!(size.div_ceil(4));
    let columns = comptime!(width.div_ceil(side));
    let lanes = comptime!(tiling.lanes);
    #[unroll]
    for i in 0..4usize {
        #[unroll]
        for j in 0..columns {
            let column = x + comptime!(j * side);
            let value = sums[comptime!(i * columns + j)] * Four::new(factors[i]);
            #[unroll]
            for part in 0..comptime!(4 / lanes) {
                let inside = comptime!(part * lanes) + column * 4 < size;
                if first + i < limit && inside {
                    let mut pack = Pack::<0>::empty();
                    #[unroll]
                    for lane in 0..lanes {
                        pack[lane] = Elem::<0>::cast_from(value[comptime!(part * lanes + lane)]);
                    }
                    to[base + (first + i) * stride + column * comptime!(4 / lanes) + part] = pack;
                }
            }
        }
    }
}

/// The scaled score of a query and a key, with the bias. `at` is that of the first query and key of the batch element
/// and head; `stride` is how far apart queries are.
#[cube]
#[allow(clippy::too_many_arguments)]
fn biased(
    score: f32,
    bias: &Array<Elem<0>>,
    at: usize,
    stride: usize,
    query: usize,
    key: usize,
    s: usize,
    t: usize,
    #[comptime] biased: bool,
) -> f32 {
    if comptime!(biased) {
        score + f32::cast_from(bias[at + min(query, s - 1) * stride + min(key, t - 1)])
    } else {
        score
    }
}

/// Whether a query sees a key.
#[cube]
fn seen(query: usize, key: usize, s: usize, t: usize, #[comptime] causal: bool) -> bool {
    if comptime!(causal) { query < s && key < t && key + s <= query + t } else { query < s && key < t }
}
