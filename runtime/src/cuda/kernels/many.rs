//! Kernels over many small tensors in one launch; see [`crate::cuda::table`] for how they find them.

use super::elementwise::adamw_vector;
use super::fold::{Fold, block_sum, fold_range};
use crate::cuda::kernel::{Elem, Lanes, Pack};
use cubecl::prelude::*;

/// Where in the table this block's row is: its first block, its tensors' places, its numbers.
#[cube]
fn own_row(table: &Array<u32>) -> usize {
    table[CUBE_POS] as usize
}

/// This block's number among those of its row.
#[cube]
fn own_block(table: &Array<u32>, row: usize) -> u32 {
    CUBE_POS as u32 - table[row]
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
    table: &Array<u32>,
    log_beta1: f32,
    log_beta2: f32,
    rest1: f32,
    rest2: f32,
    eps: f32,
    weight_decay: f32,
    #[comptime] casts: bool,
    #[comptime] chunk: u32,
    #[comptime] threads: u32,
) {
    let row = own_row(table);
    let first = own_block(table, row) * chunk;
    let last = min(first + chunk, table[row + 12]) as usize;
    let at_p = table[row + 1] as usize;
    let at_g = table[row + 2] as usize;
    let at_m = table[row + 3] as usize;
    let at_v = table[row + 4] as usize;
    let to_p = table[row + 5] as usize;
    let to_m = table[row + 6] as usize;
    let to_v = table[row + 7] as usize;
    let to_cast = table[row + 8] as usize;
    let scale = gradient_scale[table[row + 9] as usize];
    let rate = learning_rate[table[row + 10] as usize];
    let number = step[table[row + 11] as usize];
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
    table: &Array<u32>,
    #[comptime] chunk: u32,
    #[comptime] threads: u32,
) {
    let row = own_row(table);
    let first = own_block(table, row) * chunk;
    let last = min(first + chunk, table[row + 3]) as usize;
    let at_x = table[row + 1] as usize;
    let at_y = table[row + 2] as usize;
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
    table: &Array<u32>,
    #[comptime] chunk: u32,
    #[comptime] threads: u32,
) {
    let row = own_row(table);
    let own = own_block(table, row);
    let at_x = table[row + 1] as usize;
    let first = own * chunk;
    let last = min(first + chunk, table[row + 2]) as usize;
    let sum = fold_range(x, at_x + first as usize, at_x + last, Fold::SumSquares, threads);
    if UNIT_POS == 0 {
        let at = (table[row + 3] + own) as usize;
        partial[at] = sum;
    }
}

/// Block `b` adds the partial sums of row `b` up: the column is the result, one element; the rows' numbers are
/// how many sums there are and where they begin.
#[cube]
pub fn sums_many(y: &mut Array<Elem<0>>, partial: &Array<f32>, table: &Array<u32>, #[comptime] threads: u32) {
    let row = own_row(table);
    let count = table[row + 2] as usize;
    let first = table[row + 3] as usize;
    let state = RuntimeCell::<f32>::new(f32::new(0.0) * 1.0f32);
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < count {
        state.store(state.read() + partial[first + at.read()]);
        at.store(at.read() + comptime!(threads as usize));
    }
    let sum = block_sum(state.read(), threads);
    if UNIT_POS == 0 {
        let at = table[row + 1] as usize;
        y[at] = Elem::<0>::cast_from(sum);
    }
}

/// The sum of the rows, element by element, added to what earlier launches made: the column is the operand, the table has
/// the rows alone. `n` counts vectors; `terms` rows are on their way at a time.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn total(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<0>>,
    table: &Array<u32>,
    rows: u32,
    earlier: u32,
    #[comptime] n: u32,
    #[comptime] terms: u32,
) {
    let at = ABSOLUTE_POS;
    if at < comptime!(n as usize) {
        let mut sum = Vector::<f32, Lanes>::empty();
        let before = y[at];
        #[unroll]
        for lane in 0..Lanes::value() {
            sum[lane] = select(earlier > 0u32, f32::cast_from(before[lane]), f32::new(0.0) * 1.0f32);
        }
        let row = RuntimeCell::<u32>::new(0u32);
        while row.read() < rows {
            let now = row.read();
            let mut read = Sequence::<Pack<0>>::new();
            #[unroll]
            for term in 0..terms {
                read.push(x[table[(2 * min(now + term, rows - 1) + 1) as usize] as usize + at]);
            }
            #[unroll]
            for term in 0..terms {
                let read = read.index(comptime!(term as usize));
                #[unroll]
                for lane in 0..Lanes::value() {
                    let value = f32::cast_from(read[lane]);
                    sum[lane] += select(now + term < rows, value, f32::new(0.0) * 1.0f32);
                }
            }
            row.store(now + terms);
        }
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<0>::cast_from(sum[lane]);
        }
        y[at] = out;
    }
}

/// [`total()`] where there are few elements and many rows: a block for each element.
#[cube]
pub fn total_of_few(
    x: &Array<Elem<0>>,
    y: &mut Array<Elem<0>>,
    table: &Array<u32>,
    rows: u32,
    earlier: u32,
    #[comptime] threads: u32,
) {
    let at = CUBE_POS;
    let state = RuntimeCell::<f32>::new(f32::new(0.0) * 1.0f32);
    let row = RuntimeCell::<u32>::new(UNIT_POS);
    while row.read() < rows {
        let now = row.read();
        state.store(state.read() + f32::cast_from(x[table[(2 * now + 1) as usize] as usize + at]));
        row.store(now + threads);
    }
    let sum = block_sum(state.read(), threads);
    if UNIT_POS == 0 {
        let before = select(earlier > 0u32, f32::cast_from(y[at]), f32::new(0.0) * 1.0f32);
        y[at] = Elem::<0>::cast_from(before + sum);
    }
}
