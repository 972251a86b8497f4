//! Reductions: over a block, over segments, over columns. All compute in f32, in a fixed order, so that
//! results do not depend on timing.

use crate::cuda::kernel::{Elem, Lanes, Pack};
use cubecl::prelude::*;

/// No finite number is smaller: stands for minus infinity without making NaN from a difference.
pub(super) const LOWEST: f32 = f32::MIN;

/// The units that gather the first stage of a block's reduction: about the square root of the block.
const fn gatherers(threads: u32) -> u32 {
    if threads >= 128 { 16 } else { 8 }
}

/// Folds `value` over the block, in two stages and in a fixed order; every unit gets the result. `threads` is the
/// block's size, a multiple of 32.
#[cube]
fn block_fold(value: f32, #[comptime] fold: Fold, #[comptime] threads: u32) -> f32 {
    let gather = comptime!(gatherers(threads) as usize);
    let each = comptime!((threads / gatherers(threads)) as usize);
    let mut all = SharedMemory::<f32>::new(comptime!(threads as usize));
    let mut gathered = SharedMemory::<f32>::new(gather);
    let unit = UNIT_POS as usize;
    all[unit] = value;
    sync_cube();
    if unit < gather {
        let state = RuntimeCell::<f32>::new(all[unit]);
        #[unroll]
        for part in 1..each {
            state.store(fold_step(state.read(), all[unit + part * gather], fold));
        }
        gathered[unit] = state.read();
    }
    sync_cube();
    let state = RuntimeCell::<f32>::new(gathered[0]);
    #[unroll]
    for part in 1..gather {
        state.store(fold_step(state.read(), gathered[part], fold));
    }
    sync_cube();
    state.read()
}

/// The sum over the block of `value`; `threads` is the block's size, a multiple of 32.
#[cube]
pub fn block_sum(value: f32, #[comptime] threads: u32) -> f32 {
    block_fold(value, Fold::Sum, threads)
}

/// The sums over the block of several numbers, with as many waits as for one; every unit gets them.
#[cube]
pub fn block_sums(values: &Sequence<f32>, #[comptime] count: usize, #[comptime] threads: u32) -> Sequence<f32> {
    let gather = comptime!(gatherers(threads) as usize);
    let each = comptime!((threads / gatherers(threads)) as usize);
    // Numbers begin in different banks.
    let stride = comptime!((threads + gatherers(threads)) as usize);
    let rounds = comptime!((count * gatherers(threads) as usize).div_ceil(threads as usize));
    let mut all = SharedMemory::<f32>::new(comptime!(count * (threads + gatherers(threads)) as usize));
    let mut gathered = SharedMemory::<f32>::new(comptime!(count * gatherers(threads) as usize));
    let unit = UNIT_POS as usize;
    #[unroll]
    for number in 0..count {
        all[number * stride + unit] = *values.index(number);
    }
    sync_cube();
    #[unroll]
    for round in 0..rounds {
        let own = unit + round * comptime!(threads as usize);
        if own < count * gather {
            let start = own / gather * stride + own % gather;
            let sum = RuntimeCell::<f32>::new(all[start]);
            #[unroll]
            for part in 1..each {
                sum.store(sum.read() + all[start + part * gather]);
            }
            gathered[own] = sum.read();
        }
    }
    sync_cube();
    let mut sums = Sequence::<f32>::new();
    #[unroll]
    for number in 0..count {
        let sum = RuntimeCell::<f32>::new(gathered[number * gather]);
        #[unroll]
        for part in 1..gather {
            sum.store(sum.read() + gathered[number * gather + part]);
        }
        sums.push(sum.read());
    }
    sync_cube();
    sums
}

/// The maximum over the block of `value`.
#[cube]
pub fn block_max(value: f32, #[comptime] threads: u32) -> f32 {
    block_fold(value, Fold::Max, threads)
}

/// Sum, sum of squares, maximum, or that of absolute values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fold {
    /// The sum.
    Sum,
    /// The sum of the squares.
    SumSquares,
    /// The maximum.
    Max,
    /// The maximum of the absolute values.
    Largest,
}

impl Fold {
    /// How partial results are folded.
    pub fn again(self) -> Self {
        match self {
            Self::Sum | Self::SumSquares => Self::Sum,
            Self::Max | Self::Largest => Self::Max,
        }
    }
}

#[cube]
fn fold_start(#[comptime] fold: Fold) -> f32 {
    match fold {
        // Minus infinity, which is no number to write.
        Fold::Max => f32::reinterpret(UNIT_POS * 0u32 + 0xFF80_0000u32),
        _ => f32::new(0.0) * 1.0f32,
    }
}

#[cube]
fn fold_step(state: f32, value: f32, #[comptime] fold: Fold) -> f32 {
    match fold {
        Fold::Sum => state + value,
        Fold::SumSquares => state + value * value,
        // A number that is none stays.
        Fold::Max => select(state >= value, state, select(value > state, value, state + value)),
        Fold::Largest => max(state, value.abs()),
    }
}

#[cube]
fn fold_lanes(state: &RuntimeCell<f32>, a: Pack<0>, #[comptime] fold: Fold) {
    #[unroll]
    for lane in 0..Lanes::value() {
        state.store(fold_step(state.read(), f32::cast_from(a[lane]), fold));
    }
}

/// Folds the vectors `first .. last` of `x` over a block; every unit gets the result. A unit has four vectors on
/// their way at once.
#[cube]
pub fn fold_range(
    x: &Array<Pack<0>>,
    first: usize,
    last: usize,
    #[comptime] fold: Fold,
    #[comptime] threads: u32,
) -> f32 {
    let step = comptime!(threads as usize);
    let state = RuntimeCell::<f32>::new(fold_start(fold));
    let at = RuntimeCell::<usize>::new(first + UNIT_POS as usize);
    while at.read() + 3 * step < last {
        let now = at.read();
        let a = x[now];
        let b = x[now + step];
        let c = x[now + 2 * step];
        let d = x[now + 3 * step];
        fold_lanes(&state, a, fold);
        fold_lanes(&state, b, fold);
        fold_lanes(&state, c, fold);
        fold_lanes(&state, d, fold);
        at.store(now + 4 * step);
    }
    // Of the last three, too, none waits for another.
    if at.read() < last {
        let now = at.read();
        let a = x[now];
        let b = x[min(now + step, last - 1)];
        let c = x[min(now + 2 * step, last - 1)];
        fold_lanes(&state, a, fold);
        if now + step < last {
            fold_lanes(&state, b, fold);
        }
        if now + 2 * step < last {
            fold_lanes(&state, c, fold);
        }
    }
    block_fold(state.read(), comptime!(fold.again()), threads)
}

/// Block `b` reduces vectors `b * length ..` (at most `length`, none from `n` on) to `y[b]`.
#[cube]
pub fn reduce_segments(
    x: &Array<Pack<0>>,
    y: &mut Array<Elem<1>>,
    length: u32,
    n: u32,
    #[comptime] fold: Fold,
    #[comptime] threads: u32,
) {
    let block = CUBE_POS as usize;
    let start = block * length as usize;
    let end = min(start + length as usize, n as usize);
    let value = fold_range(x, start, end, fold, threads);
    if UNIT_POS == 0 {
        y[block] = Elem::<1>::cast_from(value);
    }
}

/// How a block lies over rows and columns of vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Vectors side by side; a multiple of 8.
    pub columns: u32,
    /// Rows; with the columns a multiple of 32 units.
    pub rows: u32,
}

impl Tile {
    /// The units of the block.
    pub const fn units(self) -> u32 {
        self.columns * self.rows
    }
}

/// Folds the states of a block's units over its rows, in a fixed order; the units of the first row get the result.
/// Each lane of each column is folded by a unit of its own, as far as there are units.
#[cube]
fn tile_fold(
    state: Vector<f32, Lanes>,
    #[comptime] fold: Fold,
    #[comptime] tile: Tile,
    #[comptime] width: usize,
) -> Vector<f32, Lanes> {
    let units = comptime!(tile.units() as usize);
    let columns = comptime!(tile.columns as usize);
    let rounds = comptime!((tile.columns as usize * width).div_ceil(tile.units() as usize));
    let mut shared = SharedMemory::<f32>::new(comptime!(tile.units() as usize * width));
    let unit = UNIT_POS as usize;
    #[unroll]
    for lane in 0..Lanes::value() {
        shared[lane * units + unit] = state[lane];
    }
    sync_cube();
    #[unroll]
    for round in 0..rounds {
        let own = unit + round * units;
        let lane = own / columns;
        if lane < Lanes::value() {
            // What is folded here no other unit reads or writes.
            let first = lane * units + own % columns;
            let sum = RuntimeCell::<f32>::new(shared[first]);
            #[unroll]
            for row in 1..comptime!(tile.rows as usize) {
                sum.store(fold_step(sum.read(), shared[first + row * columns], fold));
            }
            shared[first] = sum.read();
        }
    }
    sync_cube();
    let mut total = Vector::<f32, Lanes>::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        total[lane] = shared[lane * units + unit % columns];
    }
    total
}

/// Rows that a unit of [`reduce_columns()`] has on their way at once.
pub const AHEAD: usize = 8;

/// Reduces `x` `[outer, length, inner]` over its middle dimension in chunks: `y` is
/// `[outer, chunks, inner]`. `inner` counts vectors; the grid is (columns of tiles, chunks, outer), a block is a tile.
#[cube]
pub fn reduce_columns(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<1>>,
    length: u32,
    inner: u32,
    chunk: u32,
    #[comptime] fold: Fold,
    #[comptime] tile: Tile,
    #[comptime] width: usize,
) {
    fold_tile(x, y, length, inner, chunk, CUBE_POS_Z as usize, fold, tile, width);
}

/// [`reduce_columns()`] of one of several tensors `[length, inner]`, if the block's third index is `part`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn reduce_part(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<1>>,
    length: u32,
    inner: u32,
    chunk: u32,
    #[comptime] part: u32,
    #[comptime] fold: Fold,
    #[comptime] tile: Tile,
    #[comptime] width: usize,
) {
    if CUBE_POS_Z == part {
        fold_tile(x, y, length, inner, chunk, 0usize, fold, tile, width);
    }
}

#[cube]
#[allow(clippy::too_many_arguments)]
fn fold_tile(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<1>>,
    length: u32,
    inner: u32,
    chunk: u32,
    outer: usize,
    #[comptime] fold: Fold,
    #[comptime] tile: Tile,
    #[comptime] width: usize,
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * comptime!(tile.columns as usize) + unit % comptime!(tile.columns as usize);
    let inner = inner as usize;
    let first = CUBE_POS_Y * chunk;
    let last = min(first + chunk, length) as usize;
    let mut state = Vector::<f32, Lanes>::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        state[lane] = fold_start(fold);
    }
    let inside = min(column, inner - 1);
    let start = outer * length as usize;
    let step = comptime!(tile.rows as usize);
    let row = RuntimeCell::<usize>::new(first as usize + unit / comptime!(tile.columns as usize));
    while row.read() < last {
        let now = row.read();
        let mut rows = Array::<Pack<0>>::new(AHEAD);
        #[unroll]
        for next in 0..AHEAD {
            rows[next] = x[(start + min(now + next * step, last - 1)) * inner + inside];
        }
        #[unroll]
        for next in 0..AHEAD {
            let a = rows[next];
            let is_there = now + next * step < last;
            #[unroll]
            for lane in 0..Lanes::value() {
                state[lane] = fold_step(state[lane], select(is_there, f32::cast_from(a[lane]), fold_start(fold)), fold);
            }
        }
        row.store(now + comptime!(tile.rows as usize * AHEAD));
    }
    let again = comptime!(fold.again());
    let total = tile_fold(state, again, tile, width);
    if column < inner && unit < comptime!(tile.columns as usize) {
        let mut out = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<1>::cast_from(total[lane]);
        }
        y[(outer * CUBE_COUNT_Y as usize + CUBE_POS_Y as usize) * inner + column] = out;
    }
}
