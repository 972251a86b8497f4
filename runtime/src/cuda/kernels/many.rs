//! Kernels over many small tensors in one launch; see [`crate::cuda::table`] for how they find them.

use super::elementwise::adamw_vector;
use super::fold::{Fold, block_sum, fold_range};
use crate::cuda::kernel::{Elem, Lanes, Pack};
use cubecl::prelude::*;

/// The number of column `column` for the row that a block works on; column 0 is the row's first block.
#[cube]
fn of_row(table: &Sequence<u32>, block: u32, #[comptime] column: usize, #[comptime] slots: usize) -> u32 {
    let found = RuntimeCell::<u32>::new(table[comptime!(column * slots)]);
    #[unroll]
    for slot in 1..slots {
        let is_later = block >= table[slot];
        found.store(select(is_later, table[comptime!(column * slots + slot)], found.read()));
    }
    found.read()
}

/// One AdamW update of every row: the columns are the operands `parameter`, `gradient`, `m` and `v`, the
/// results with the cast, and the other operands; the rows' number is their vectors, of which a block takes `chunk`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn adamw_many(
    parameter: &Array<Pack<0>>,
    gradient: &Array<Pack<1>>,
    m: &Array<Pack<2>>,
    v: &Array<Pack<2>>,
    new_parameter: &mut Array<Pack<0>>,
    new_m: &mut Array<Pack<2>>,
    new_v: &mut Array<Pack<2>>,
    cast: &mut Array<Pack<3>>,
    gradient_scale: &Array<f32>,
    learning_rate: &Array<f32>,
    step: &Array<f32>,
    table: &Sequence<u32>,
    log_beta1: f32,
    log_beta2: f32,
    rest1: f32,
    rest2: f32,
    eps: f32,
    weight_decay: f32,
    #[comptime] casts: bool,
    #[comptime] slots: usize,
    #[comptime] chunk: u32,
    #[comptime] threads: u32,
) {
    let block = CUBE_POS as u32;
    let first = (block - of_row(table, block, 0usize, slots)) * chunk;
    let last = min(first + chunk, of_row(table, block, 12usize, slots)) as usize;
    let at_p = of_row(table, block, 1usize, slots) as usize;
    let at_g = of_row(table, block, 2usize, slots) as usize;
    let at_m = of_row(table, block, 3usize, slots) as usize;
    let at_v = of_row(table, block, 4usize, slots) as usize;
    let to_p = of_row(table, block, 5usize, slots) as usize;
    let to_m = of_row(table, block, 6usize, slots) as usize;
    let to_v = of_row(table, block, 7usize, slots) as usize;
    let to_cast = of_row(table, block, 8usize, slots) as usize;
    let scale = gradient_scale[of_row(table, block, 9usize, slots) as usize];
    let rate = learning_rate[of_row(table, block, 10usize, slots) as usize];
    let number = step[of_row(table, block, 11usize, slots) as usize];
    let at = RuntimeCell::<usize>::new((first + UNIT_POS as u32) as usize);
    while at.read() < last {
        let now = at.read();
        adamw_vector(
            parameter,
            gradient,
            m,
            v,
            new_parameter,
            new_m,
            new_v,
            cast,
            at_p + now,
            at_g + now,
            at_m + now,
            at_v + now,
            to_p + now,
            to_m + now,
            to_v + now,
            to_cast + now,
            scale,
            rate,
            number,
            log_beta1,
            log_beta2,
            rest1,
            rest2,
            eps,
            weight_decay,
            casts,
        );
        at.store(now + comptime!(threads as usize));
    }
}

/// The elements of every row in another element type: the columns are the operand and the result, the rows' number
/// is their vectors, of which a block takes `chunk`. Two vectors of a unit are on their way at a time.
#[cube]
pub fn cast_many(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<1>>,
    table: &Sequence<u32>,
    #[comptime] slots: usize,
    #[comptime] chunk: u32,
    #[comptime] threads: u32,
) {
    let block = CUBE_POS as u32;
    let first = (block - of_row(table, block, 0usize, slots)) * chunk;
    let last = min(first + chunk, of_row(table, block, 3usize, slots)) as usize;
    let at_x = of_row(table, block, 1usize, slots) as usize;
    let at_y = of_row(table, block, 2usize, slots) as usize;
    let at = RuntimeCell::<usize>::new((first + UNIT_POS as u32) as usize);
    while at.read() < last {
        let now = at.read();
        let next = now + comptime!(threads as usize);
        let a = x[at_x + now];
        let b = x[at_x + min(next, last - 1)];
        let mut out = Pack::<1>::empty();
        let mut other = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<1>::cast_from(a[lane]);
            other[lane] = Elem::<1>::cast_from(b[lane]);
        }
        y[at_y + now] = out;
        if next < last {
            y[at_y + next] = other;
        }
        at.store(now + comptime!(2 * threads as usize));
    }
}

/// Sums of squares of chunks of every row: the column is the operand, the rows' numbers are their vectors, of
/// which a block takes `chunk`, and where in `partial` the row's sums begin.
#[cube]
pub fn squares_many(
    x: &Array<Pack<0>>,
    partial: &mut Array<f32>,
    table: &Sequence<u32>,
    #[comptime] slots: usize,
    #[comptime] chunk: u32,
    #[comptime] threads: u32,
) {
    let block = CUBE_POS as u32;
    let own = block - of_row(table, block, 0usize, slots);
    let at_x = of_row(table, block, 1usize, slots) as usize;
    let first = own * chunk;
    let last = min(first + chunk, of_row(table, block, 2usize, slots)) as usize;
    let sum = fold_range(x, at_x + first as usize, at_x + last, Fold::SumSquares, threads);
    if UNIT_POS == 0 {
        partial[(of_row(table, block, 3usize, slots) + own) as usize] = sum;
    }
}

/// Block `b` adds the partial sums of row `b` up: the column is the result, one element; the rows' numbers are
/// how many sums there are and where they begin.
#[cube]
pub fn sums_many(
    y: &mut Array<Elem<0>>,
    partial: &Array<f32>,
    table: &Sequence<u32>,
    #[comptime] slots: usize,
    #[comptime] threads: u32,
) {
    let block = CUBE_POS as u32;
    let count = of_row(table, block, 2usize, slots) as usize;
    let first = of_row(table, block, 3usize, slots) as usize;
    let state = RuntimeCell::<f32>::new(f32::new(0.0) * 1.0f32);
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < count {
        state.store(state.read() + partial[first + at.read()]);
        at.store(at.read() + comptime!(threads as usize));
    }
    let sum = block_sum(state.read(), threads);
    if UNIT_POS == 0 {
        y[of_row(table, block, 1usize, slots) as usize] = Elem::<0>::cast_from(sum);
    }
}

/// The sum of the rows, element by element, added to what earlier launches made; the column is the operand,
/// `n` counts vectors. `rows` and `earlier` are the table's last numbers.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn total(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<0>>,
    table: &Sequence<u32>,
    rows: u32,
    earlier: u32,
    #[comptime] n: u32,
    #[comptime] slots: usize,
) {
    let at = ABSOLUTE_POS;
    if at < comptime!(n as usize) {
        let mut sum = Vector::<f32, Lanes>::empty();
        let before = y[at];
        #[unroll]
        for lane in 0..Lanes::value() {
            sum[lane] = select(earlier > 0u32, f32::cast_from(before[lane]), f32::new(0.0) * 1.0f32);
        }
        #[unroll]
        for slot in 0..slots {
            if comptime!(slot as u32) < rows {
                let term = x[table[comptime!(slots + slot)] as usize + at];
                #[unroll]
                for lane in 0..Lanes::value() {
                    sum[lane] += f32::cast_from(term[lane]);
                }
            }
        }
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<0>::cast_from(sum[lane]);
        }
        y[at] = out;
    }
}
