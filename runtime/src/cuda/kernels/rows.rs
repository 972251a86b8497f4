//! Kernels that work on rows: one block per row, threads striding over its vectors, or one unit per row where that is short.
//! All compute in f32.

use super::elementwise::quick_exp;
use super::fold::{LOWEST, block_max, block_sum};
use crate::cuda::kernel::{Elem, Lanes, Pack, PackF32};
use cubecl::prelude::*;

/// `y = softmax(x)` over rows of `columns` vectors.
#[cube]
pub fn softmax(x: &Array<Pack<0>>, y: &mut Array<Pack<1>>, columns: u32, #[comptime] threads: u32) {
    let start = CUBE_POS as usize * columns as usize;
    let end = start + columns as usize;
    let largest = RuntimeCell::<f32>::new(f32::new(LOWEST));
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let at = RuntimeCell::<usize>::new(start + UNIT_POS as usize);
    while at.read() < end {
        let a = x[at.read()];
        #[unroll]
        for lane in 0..Lanes::value() {
            let value = f32::cast_from(a[lane]);
            let next = max(largest.read(), value);
            sum.store(sum.read() * (largest.read() - next).exp() + (value - next).exp());
            largest.store(next);
        }
        at.store(at.read() + comptime!(threads as usize));
    }
    let row_max = block_max(largest.read(), threads);
    let row_sum = block_sum(sum.read() * (largest.read() - row_max).exp(), threads);
    at.store(start + UNIT_POS as usize);
    while at.read() < end {
        let a = x[at.read()];
        let mut out = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<1>::cast_from((f32::cast_from(a[lane]) - row_max).exp() / row_sum);
        }
        y[at.read()] = out;
        at.store(at.read() + comptime!(threads as usize));
    }
}

/// Vectors of a row that a unit of [`cross_entropy()`] has on their way at once.
pub const AHEAD: usize = 4;

/// Takes [`AHEAD`] vectors, of which the first is vector `at` of its row, into a running maximum and the sum of
/// exponentials below it, which is scaled once. Where they are `masked`, what is behind `live` elements counts nothing.
#[cube]
fn absorb(
    vectors: &Array<Pack<0>>,
    at: usize,
    live: u32,
    largest: &RuntimeCell<f32>,
    sum: &RuntimeCell<f32>,
    #[comptime] masked: bool,
    #[comptime] threads: u32,
) {
    let mut values = Array::<PackF32>::new(AHEAD);
    let next = RuntimeCell::<f32>::new(largest.read());
    #[unroll]
    for ahead in 0..AHEAD {
        let a = vectors[ahead];
        let mut wide = PackF32::empty();
        let first = (at + ahead * comptime!(threads as usize)) * Lanes::value();
        #[unroll]
        for lane in 0..Lanes::value() {
            let value = f32::cast_from(a[lane]);
            if comptime!(masked) {
                wide[lane] = select(((first + lane) as u32) < live, value, f32::new(LOWEST));
            } else {
                wide[lane] = value;
            }
            next.store(max(next.read(), wide[lane]));
        }
        values[ahead] = wide;
    }
    let shifted = RuntimeCell::<f32>::new(sum.read() * quick_exp(largest.read() - next.read()));
    #[unroll]
    for ahead in 0..AHEAD {
        let wide = values[ahead];
        #[unroll]
        for lane in 0..Lanes::value() {
            shifted.store(shifted.read() + quick_exp(wide[lane] - next.read()));
        }
    }
    sum.store(shifted.read());
    largest.store(next.read());
}

/// `lse` and `picked` of rows of logits, of which `live` are not padding; see
/// [`shardc_ir::ops::CrossEntropy`].
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn cross_entropy(
    logits: &Array<Pack<0>>,
    labels: &Array<Elem<1>>,
    lse: &mut Array<f32>,
    picked: &mut Array<f32>,
    columns: u32,
    first: u32,
    live: u32,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let row = CUBE_POS as usize;
    let start = row * columns;
    let step = comptime!(threads as usize);
    // A label below `first` wraps to a large number, so one comparison finds both bounds.
    let label = u32::cast_from(labels[row]) - first;
    let label = select(label < live, label, 0xffff_ffffu32);
    let largest = RuntimeCell::<f32>::new(f32::new(LOWEST));
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    // While some vectors are worked on the next ones are on their way.
    let mut coming = Array::<Pack<0>>::new(AHEAD);
    #[unroll]
    for ahead in 0..AHEAD {
        coming[ahead] = logits[start + min(at.read() + ahead * step, columns - 1)];
    }
    // Up to here no vector has padding.
    let whole = min(columns, live as usize / Lanes::value());
    while at.read() < columns {
        let mut vectors = Array::<Pack<0>>::new(AHEAD);
        #[unroll]
        for ahead in 0..AHEAD {
            vectors[ahead] = coming[ahead];
            let next = at.read() + comptime!((ahead + AHEAD) * threads as usize);
            coming[ahead] = logits[start + min(next, columns - 1)];
        }
        if at.read() + comptime!((AHEAD - 1) * threads as usize) < whole {
            absorb(&vectors, at.read(), live, &largest, &sum, false, threads);
        } else {
            absorb(&vectors, at.read(), live, &largest, &sum, true, threads);
        }
        at.store(at.read() + comptime!(AHEAD * threads as usize));
    }
    let row_max = block_max(largest.read(), threads);
    let row_sum = block_sum(sum.read() * (largest.read() - row_max).exp(), threads);
    if UNIT_POS == 0 {
        lse[row] = row_max + row_sum.ln();
        let found = RuntimeCell::<f32>::new(f32::new(0.0));
        if label < live {
            let a = logits[start + label as usize / Lanes::value()];
            let own = label as usize % Lanes::value();
            #[unroll]
            for lane in 0..Lanes::value() {
                found.store(select(lane == own, f32::cast_from(a[lane]), found.read()));
            }
        }
        picked[row] = found.read();
    }
}

/// A vector of the gradient of logits, of which the `first` of a row is its first; 0 behind `live` where rows are `padded`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn slopes(
    logits: Pack<0>,
    first: u32,
    label: u32,
    live: u32,
    log_sum: f32,
    slope: f32,
    extra: f32,
    #[comptime] padded: bool,
) -> Pack<0> {
    let mut out = Pack::<0>::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        let column = first + lane as u32;
        let soft = (f32::cast_from(logits[lane]) - log_sum).exp() * slope;
        let value = soft + select(column == label, extra, 0.0f32);
        if comptime!(padded) {
            out[lane] = Elem::<0>::cast_from(select(column < live, value, 0.0f32));
        } else {
            out[lane] = Elem::<0>::cast_from(value);
        }
    }
    out
}

/// `dlogits = softmax * dlse + onehot(label) * dpicked`, and 0 where the logits are padding.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn cross_entropy_grad(
    logits: &Array<Pack<0>>,
    labels: &Array<Elem<1>>,
    lse: &Array<f32>,
    dlse: &Array<f32>,
    dpicked: &Array<f32>,
    dlogits: &mut Array<Pack<0>>,
    columns: u32,
    first: u32,
    live: u32,
    #[comptime] padded: bool,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let row = CUBE_POS as usize;
    let start = row * columns;
    let label = u32::cast_from(labels[row]) - first;
    let log_sum = lse[row];
    let slope = dlse[row];
    let extra = dpicked[row];
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        let first = (at.read() * Lanes::value()) as u32;
        let of = logits[start + at.read()];
        dlogits[start + at.read()] = slopes(of, first, label, live, log_sum, slope, extra, padded);
        at.store(at.read() + comptime!(threads as usize));
    }
}

/// [`cross_entropy()`] of `n` rows of few vectors, each of which a unit works on by itself.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn cross_entropy_short(
    logits: &Array<Pack<0>>,
    labels: &Array<Elem<1>>,
    lse: &mut Array<f32>,
    picked: &mut Array<f32>,
    n: u32,
    columns: u32,
    first: u32,
    live: u32,
) {
    let row = ABSOLUTE_POS as usize;
    if row < n as usize {
        let (start, columns) = (row * columns as usize, columns as usize);
        let label = u32::cast_from(labels[row]) - first;
        let largest = RuntimeCell::<f32>::new(f32::new(LOWEST));
        let found = RuntimeCell::<f32>::new(f32::new(0.0));
        for at in 0..columns {
            let a = logits[start + at];
            #[unroll]
            for lane in 0..Lanes::value() {
                let (column, value) = ((at * Lanes::value() + lane) as u32, f32::cast_from(a[lane]));
                largest.store(max(largest.read(), select(column < live, value, f32::new(LOWEST))));
                found.store(select(column < live && column == label, value, found.read()));
            }
        }
        let sum = RuntimeCell::<f32>::new(f32::new(0.0));
        for at in 0..columns {
            let a = logits[start + at];
            #[unroll]
            for lane in 0..Lanes::value() {
                let column = (at * Lanes::value() + lane) as u32;
                let part = (f32::cast_from(a[lane]) - largest.read()).exp();
                sum.store(sum.read() + select(column < live, part, 0.0f32));
            }
        }
        lse[row] = largest.read() + sum.read().ln();
        picked[row] = found.read();
    }
}

/// [`cross_entropy_grad()`] with a unit for each of the `n` vectors of short rows.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn cross_entropy_grad_short(
    logits: &Array<Pack<0>>,
    labels: &Array<Elem<1>>,
    lse: &Array<f32>,
    dlse: &Array<f32>,
    dpicked: &Array<f32>,
    dlogits: &mut Array<Pack<0>>,
    n: u32,
    columns: u32,
    first: u32,
    live: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let row = (at / columns) as usize;
        let label = u32::cast_from(labels[row]) - first;
        let (log_sum, slope, extra) = (lse[row], dlse[row], dpicked[row]);
        let first = at % columns * Lanes::value() as u32;
        let of = logits[at as usize];
        dlogits[at as usize] = slopes(of, first, label, live, log_sum, slope, extra, true);
    }
}
