//! Reductions: over a block, over segments, over columns. All compute in f32, in a fixed order, so that
//! results do not depend on timing.

use crate::cuda::kernel::{Elem, Lanes, Pack};
use cubecl::prelude::*;

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

/// The sums over the block of two numbers, with as many waits as for one: of `a`, and in `other` of `b`.
#[cube]
pub fn block_sum_pair(a: f32, b: f32, other: &RuntimeCell<f32>, #[comptime] threads: u32) -> f32 {
    let gather = comptime!(gatherers(threads) as usize);
    let each = comptime!((threads / gatherers(threads)) as usize);
    let all = comptime!(threads as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * threads as usize));
    let mut gathered = SharedMemory::<f32>::new(comptime!(2 * gatherers(threads) as usize));
    let unit = UNIT_POS as usize;
    shared[unit] = a;
    shared[all + unit] = b;
    sync_cube();
    if unit < 2 * gather {
        let start = (unit / gather) * all + unit % gather;
        let sum = RuntimeCell::<f32>::new(shared[start]);
        #[unroll]
        for part in 1..each {
            sum.store(sum.read() + shared[start + part * gather]);
        }
        gathered[unit] = sum.read();
    }
    sync_cube();
    let first = RuntimeCell::<f32>::new(gathered[0]);
    let second = RuntimeCell::<f32>::new(gathered[gather]);
    #[unroll]
    for part in 1..gather {
        first.store(first.read() + gathered[part]);
        second.store(second.read() + gathered[gather + part]);
    }
    sync_cube();
    other.store(second.read());
    first.read()
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
        Fold::Max => f32::new(-3.0e38) * 1.0f32,
        _ => f32::new(0.0) * 1.0f32,
    }
}

#[cube]
fn fold_step(state: f32, value: f32, #[comptime] fold: Fold) -> f32 {
    match fold {
        Fold::Sum => state + value,
        Fold::SumSquares => state + value * value,
        Fold::Max => max(state, value),
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
    while at.read() < last {
        fold_lanes(&state, x[at.read()], fold);
        at.store(at.read() + step);
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

/// Vectors side by side in a block that works on columns.
pub const COLUMNS: u32 = 32;

/// Folds the states of a block's units over its rows, in a fixed order; the units of the first row get the result. The
/// block is `rows` x [`COLUMNS`] units.
#[cube]
pub fn tile_fold(
    state: Vector<f32, Lanes>,
    #[comptime] fold: Fold,
    #[comptime] rows: u32,
    #[comptime] width: usize,
) -> Vector<f32, Lanes> {
    let units = comptime!((rows * COLUMNS) as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!((rows * COLUMNS) as usize * width));
    let unit = UNIT_POS as usize;
    #[unroll]
    for lane in 0..Lanes::value() {
        shared[lane * units + unit] = state[lane];
    }
    sync_cube();
    let mut total = Vector::<f32, Lanes>::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        let sum = RuntimeCell::<f32>::new(state[lane]);
        if unit < comptime!(COLUMNS as usize) {
            #[unroll]
            for row in 1..comptime!(rows as usize) {
                let other = shared[lane * units + row * comptime!(COLUMNS as usize) + unit];
                sum.store(fold_step(sum.read(), other, fold));
            }
        }
        total[lane] = sum.read();
    }
    sync_cube();
    total
}

/// Reduces `x` `[outer, length, inner]` over its middle dimension in chunks: `y` is
/// `[outer, chunks, inner]`. `inner` counts vectors; the grid is (inner / [`COLUMNS`], chunks, outer), the block
/// `rows` x [`COLUMNS`] units.
#[cube]
pub fn reduce_columns(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<1>>,
    length: u32,
    inner: u32,
    chunk: u32,
    #[comptime] fold: Fold,
    #[comptime] rows: u32,
    #[comptime] width: usize,
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * comptime!(COLUMNS as usize) + unit % comptime!(COLUMNS as usize);
    let inner = inner as usize;
    let outer = CUBE_POS_Z as usize;
    let first = (CUBE_POS_Y * chunk) as usize;
    let last = min(first + chunk as usize, length as usize);
    let mut state = Vector::<f32, Lanes>::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        state[lane] = fold_start(fold);
    }
    if column < inner {
        // A unit has four vectors on their way at once.
        let step = comptime!(rows as usize);
        let row = RuntimeCell::<usize>::new(first + unit / comptime!(COLUMNS as usize));
        while row.read() + 3 * step < last {
            let at = (outer * length as usize + row.read()) * inner + column;
            let a = x[at];
            let b = x[at + step * inner];
            let c = x[at + 2 * step * inner];
            let d = x[at + 3 * step * inner];
            #[unroll]
            for lane in 0..Lanes::value() {
                let early =
                    fold_step(fold_step(state[lane], f32::cast_from(a[lane]), fold), f32::cast_from(b[lane]), fold);
                state[lane] = fold_step(fold_step(early, f32::cast_from(c[lane]), fold), f32::cast_from(d[lane]), fold);
            }
            row.store(row.read() + 4 * step);
        }
        while row.read() < last {
            let a = x[(outer * length as usize + row.read()) * inner + column];
            #[unroll]
            for lane in 0..Lanes::value() {
                state[lane] = fold_step(state[lane], f32::cast_from(a[lane]), fold);
            }
            row.store(row.read() + step);
        }
    }
    let again = comptime!(fold.again());
    let total = tile_fold(state, again, rows, width);
    if column < inner && unit < comptime!(COLUMNS as usize) {
        let mut out = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<1>::cast_from(total[lane]);
        }
        y[(outer * CUBE_COUNT_Y as usize + CUBE_POS_Y as usize) * inner + column] = out;
    }
}
