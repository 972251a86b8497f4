//! What the kernels of regions are put together from: functions on vectors of f32 in registers.

use super::elementwise::{Pair, apply, combine, derivative, sigmoid};
use super::region::{Joined, Spread};
use crate::cuda::kernel::{Elem, Lanes, Pack, PackF32};
use cubecl::prelude::*;
use shardc_ir::ops::UnaryKind;

/// The elements in f32.
#[cube]
pub fn widen(x: Pack<0>) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = f32::cast_from(x[lane]);
    }
    out
}

/// The elements rounded to the kernel's element type.
#[cube]
pub fn narrow(x: PackF32) -> Pack<0> {
    let mut out = Pack::<0>::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = Elem::<0>::cast_from(x[lane]);
    }
    out
}

/// One number in every lane.
#[cube]
pub fn splat(x: f32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = x;
    }
    out
}

#[cube]
pub fn load_narrow(x: &Array<Pack<0>>, at: usize) -> Pack<0> {
    x[at]
}

#[cube]
pub fn load_wide(x: &Array<PackF32>, at: usize) -> PackF32 {
    x[at]
}

#[cube]
pub fn load_number(x: &Array<f32>, at: usize) -> f32 {
    x[at]
}

#[cube]
pub fn load_element(x: &Array<Elem<0>>) -> f32 {
    f32::cast_from(x[0])
}

/// Where the first element of a vector lies in what is spread.
#[cube]
pub fn spread_place(at: usize, #[comptime] spread: Spread) -> usize {
    let number = at * Lanes::value() / comptime!(spread.inner as usize);
    let low = number % comptime!(spread.low as usize);
    if comptime!(spread.high > 1) {
        let part = number / comptime!((spread.low * spread.between) as usize) % comptime!(spread.high as usize);
        part * comptime!(spread.low as usize) + low
    } else {
        low
    }
}

/// The elements of a vector of what is spread, of which `inner` beside each other are the same.
#[cube]
pub fn gather_narrow(x: &Array<Elem<0>>, first: usize, #[comptime] inner: u32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = f32::cast_from(x[first + lane / comptime!(inner as usize)]);
    }
    out
}

#[cube]
pub fn gather_wide(x: &Array<f32>, first: usize, #[comptime] inner: u32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = x[first + lane / comptime!(inner as usize)];
    }
    out
}

#[cube]
pub fn store_narrow(y: &mut Array<Pack<0>>, at: usize, value: PackF32, is_inside: bool) {
    if is_inside {
        y[at] = narrow(value);
    }
}

#[cube]
pub fn store_wide(y: &mut Array<PackF32>, at: usize, value: PackF32, is_inside: bool) {
    if is_inside {
        y[at] = value;
    }
}

/// The first unit of the block writes a number of the row, where that is there.
#[cube]
pub fn store_number(y: &mut Array<f32>, at: usize, value: f32, is_there: bool) {
    if UNIT_POS == 0 && is_there {
        y[at] = value;
    }
}

/// `f(x)`
#[cube]
pub fn unary(x: PackF32, #[comptime] kind: UnaryKind) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = apply(x[lane], kind);
    }
    out
}

/// `f'(x) * dy`
#[cube]
pub fn unary_grad(dy: PackF32, x: PackF32, #[comptime] kind: UnaryKind) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = derivative(x[lane], kind) * dy[lane];
    }
    out
}

/// `f(a, b)`; the kernel's element type 3 is f32.
#[cube]
pub fn binary(a: PackF32, b: PackF32, #[comptime] pair: Pair) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = f32::cast_from(combine(Elem::<3>::cast_from(a[lane]), Elem::<3>::cast_from(b[lane]), pair));
    }
    out
}

/// `scale * x + offset`
#[cube]
pub fn affine(x: PackF32, #[comptime] scale: f32, #[comptime] offset: f32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = x[lane] * scale + offset;
    }
    out
}

/// `gate * sigmoid(gate) * up`
#[cube]
pub fn swiglu(gate: PackF32, up: PackF32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = gate[lane] * sigmoid(gate[lane]) * up[lane];
    }
    out
}

/// The derivative of [`swiglu()`] with respect to the gate.
#[cube]
pub fn swiglu_grad_gate(dy: PackF32, gate: PackF32, up: PackF32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        let s = sigmoid(gate[lane]);
        out[lane] = dy[lane] * up[lane] * s * (1.0f32 + gate[lane] * (1.0f32 - s));
    }
    out
}

/// The derivative of [`swiglu()`] with respect to `up`.
#[cube]
pub fn swiglu_grad_up(dy: PackF32, gate: PackF32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = dy[lane] * gate[lane] * sigmoid(gate[lane]);
    }
    out
}

#[cube]
pub fn add(a: PackF32, b: PackF32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = a[lane] + b[lane];
    }
    out
}

#[cube]
pub fn multiply(a: PackF32, b: PackF32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = a[lane] * b[lane];
    }
    out
}

/// `sum + x` where the row of `x` is there.
#[cube]
pub fn add_where(sum: PackF32, x: PackF32, is_there: bool) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = sum[lane] + select(is_there, x[lane], 0.0f32);
    }
    out
}

/// Of both.
#[cube]
pub fn both(a: bool, b: bool) -> bool {
    a && b
}

/// `(x - center) * scale`
#[cube]
pub fn normalize(x: PackF32, center: f32, scale: f32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = (x[lane] - center) * scale;
    }
    out
}

/// `scale * (own - mean_own - normal * mean_product)`, the derivative of a norm.
#[cube]
pub fn project(own: PackF32, normal: PackF32, mean_own: f32, mean_product: f32, scale: f32) -> PackF32 {
    let mut out = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        out[lane] = scale * (own[lane] - mean_own - normal[lane] * mean_product);
    }
    out
}

/// The sum of the lanes of `a * b`, or 0 outside.
#[cube]
pub fn dot(a: PackF32, b: PackF32, is_inside: bool) -> f32 {
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    #[unroll]
    for lane in 0..Lanes::value() {
        sum.store(sum.read() + a[lane] * b[lane]);
    }
    select(is_inside, sum.read(), 0.0f32)
}

/// The sum of the lanes, or 0 outside.
#[cube]
pub fn total(a: PackF32, is_inside: bool) -> f32 {
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    #[unroll]
    for lane in 0..Lanes::value() {
        sum.store(sum.read() + a[lane]);
    }
    select(is_inside, sum.read(), 0.0f32)
}

#[cube]
pub fn sum_two(a: f32, b: f32) -> f32 {
    a + b
}

/// `sum / columns`, where a row has so many vectors.
#[cube]
pub fn mean(sum: f32, columns: usize) -> f32 {
    sum / f32::cast_from((columns * Lanes::value()) as u32)
}

/// `1 / sqrt(x + eps)`
#[cube]
pub fn reciprocal_deviation(x: f32, #[comptime] eps: f32) -> f32 {
    1.0f32 / (x + eps).sqrt()
}

/// The vector of a row that a unit begins with, where a block has `wide` of them.
#[cube]
pub fn first_column(#[comptime] wide: u32) -> usize {
    CUBE_POS_X as usize * comptime!(wide as usize) + UNIT_POS as usize
}

#[cube]
pub fn next_column(column: usize, #[comptime] threads: u32) -> usize {
    column + comptime!(threads as usize)
}

#[cube]
pub fn next_index(index: usize) -> usize {
    index + 1
}

#[cube]
pub fn is_below(column: usize, columns: usize) -> bool {
    column < columns
}

/// An index that may be read.
#[cube]
pub fn clamp_column(column: usize, columns: usize) -> usize {
    min(column, columns - 1)
}

/// An index of what comes again after so many.
#[cube]
pub fn remainder(column: usize, #[comptime] period: u32) -> usize {
    column % comptime!(period as usize)
}

/// The sample of a block.
#[cube]
pub fn sample() -> usize {
    CUBE_POS_Z as usize
}

/// The first row of a block's chunk of a sample, which has so many rows.
#[cube]
pub fn first_row(sample: usize, chunk: u32, rows: u32) -> usize {
    sample * rows as usize + (CUBE_POS_Y * chunk) as usize
}

#[cube]
pub fn last_row(sample: usize, first: usize, chunk: u32, rows: u32) -> usize {
    min(first + chunk as usize, (sample + 1) * rows as usize)
}

/// How many groups of `rows` rows there are from `first` to `last`.
#[cube]
pub fn groups(first: usize, last: usize, #[comptime] rows: u32) -> usize {
    (last - first + comptime!(rows as usize - 1)) / comptime!(rows as usize)
}

/// Row `row` of a group.
#[cube]
pub fn group_row(first: usize, group: usize, #[comptime] rows: u32, #[comptime] row: u32) -> usize {
    first + group * comptime!(rows as usize) + comptime!(row as usize)
}

/// A row that may be read.
#[cube]
pub fn clamp_row(row: usize, last: usize) -> usize {
    min(row, last - 1)
}

#[cube]
pub fn place(row: usize, columns: usize, column: usize) -> usize {
    row * columns + column
}

/// The place of a block's partial sum.
#[cube]
pub fn partial_place(sample: usize, columns: usize, column: usize) -> usize {
    (sample * CUBE_COUNT_Y as usize + CUBE_POS_Y as usize) * columns + column
}

#[cube]
pub fn as_index(x: u32) -> usize {
    x as usize
}

#[cube]
pub fn zeros() -> PackF32 {
    splat(f32::new(0.0))
}

/// The sum of what the units have whose vectors are the same of joined rows, in a fixed order.
#[cube]
pub fn joined_sum(sum: PackF32, #[comptime] joined: Joined, #[comptime] threads: u32) -> PackF32 {
    let side = comptime!(threads as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(threads as usize * joined.width));
    let unit = UNIT_POS as usize;
    // The block may still read what an earlier sum left here.
    sync_cube();
    #[unroll]
    for lane in 0..Lanes::value() {
        shared[lane * side + unit] = sum[lane];
    }
    sync_cube();
    let mut all = PackF32::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        let first = lane * side + unit % comptime!(joined.period as usize);
        let total = RuntimeCell::<f32>::new(shared[first]);
        for row in 1..comptime!(joined.rows as usize) {
            total.store(total.read() + shared[first + row * comptime!(joined.period as usize)]);
        }
        all[lane] = total.read();
    }
    all
}

/// Columns that a block of [`sum_partials()`] adds up at a time.
const PARTIAL_COLUMNS: u32 = 16;

/// Units that share a column there.
const PARTIAL_ROWS: u32 = 32;

/// The units of such a block.
pub const PARTIAL_UNITS: u32 = PARTIAL_ROWS * PARTIAL_COLUMNS;

/// The columns of such a block, where a sum is over so many `beside` each other: all of some sums.
pub const fn partial_tile(beside: u32) -> u32 {
    let sums = PARTIAL_COLUMNS / beside;
    if sums > 1 { sums * beside } else { beside }
}

/// What a unit of [`sum_partials()`] adds up of a column, of which each of so many rows has one number from `start` on.
#[cube]
fn partial_sum(x: &Array<f32>, start: usize, rows: usize, columns: usize) -> f32 {
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let row = RuntimeCell::<usize>::new(UNIT_POS as usize / comptime!(PARTIAL_COLUMNS as usize));
    while row.read() < rows {
        // Eight numbers are on their way at once.
        let mut next = Array::<f32>::new(8usize);
        #[unroll]
        for ahead in 0..8usize {
            let at = row.read() + ahead * comptime!(PARTIAL_ROWS as usize);
            next[ahead] = select(at < rows, x[start + min(at, rows - 1) * columns], 0.0f32);
        }
        #[unroll]
        for ahead in 0..8usize {
            sum.store(sum.read() + next[ahead]);
        }
        row.store(row.read() + comptime!(8 * PARTIAL_ROWS as usize));
    }
    sum.read()
}

/// The sums over the rows of a `sample` of `x`, which is `[samples, rows, columns]`, and over `beside` columns each, if
/// the block's second index is `part`; in a fixed order. The grid is (columns / [`partial_tile()`], parts, samples), the
/// block [`PARTIAL_UNITS`].
#[cube]
pub fn sum_partials(
    x: &Array<f32>,
    y: &mut Array<f32>,
    sample: usize,
    rows: u32,
    columns: u32,
    #[comptime] part: u32,
    #[comptime] beside: u32,
) {
    let side = comptime!(PARTIAL_COLUMNS as usize);
    let (tile, wide) = comptime!((partial_tile(beside) as usize, beside as usize));
    if CUBE_POS_Y == part {
        let unit = UNIT_POS as usize;
        let (rows, columns) = (rows as usize, columns as usize);
        let first = CUBE_POS_X as usize * tile;
        let (last, start) = (min(first + tile, columns), sample * rows * columns);
        let sum = RuntimeCell::<f32>::new(f32::new(0.0));
        let column = RuntimeCell::<usize>::new(first + unit % side);
        if comptime!(tile <= side) {
            if column.read() < last {
                sum.store(partial_sum(x, start + column.read(), rows, columns));
            }
        } else {
            while column.read() < last {
                sum.store(sum.read() + partial_sum(x, start + column.read(), rows, columns));
                column.store(column.read() + side);
            }
        }
        let mut shared = SharedMemory::<f32>::new(comptime!(PARTIAL_UNITS as usize));
        shared[unit] = sum.read();
        sync_cube();
        let (sums, place) = (columns / wide, sample * (columns / wide) + first / wide + unit);
        let total = RuntimeCell::<f32>::new(shared[unit % side]);
        if unit < side {
            #[unroll]
            for row in 1..comptime!(PARTIAL_ROWS as usize) {
                total.store(total.read() + shared[row * side + unit]);
            }
        }
        if comptime!(wide == 1) {
            if unit < side && first + unit < columns {
                y[place] = total.read();
            }
        } else {
            if unit < side {
                shared[unit] = total.read();
            }
            sync_cube();
            if unit < comptime!(tile / wide) && first / wide + unit < sums {
                let each = comptime!(wide.min(side));
                let all = RuntimeCell::<f32>::new(shared[unit * each]);
                #[unroll]
                for next in 1..each {
                    all.store(all.read() + shared[unit * each + next]);
                }
                y[place] = all.read();
            }
        }
    }
}
