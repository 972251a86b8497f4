//! Kernels that work on rows: one block per row, threads striding over its vectors. All compute in f32.

use super::fold::{COLUMNS, Fold, block_max, block_sum, tile_fold};
use crate::cuda::kernel::{Elem, Lanes, Pack};
use cubecl::prelude::*;

/// Smaller than any logit: stands for minus infinity without making NaN from a difference.
const LOWEST: f32 = -3.0e38;

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

/// `y = x * rstd * gamma`, and `rstd = 1 / sqrt(mean(x²) + eps)`, over rows of `columns` vectors.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn rms_norm(
    x: &Array<Pack<0>>,
    gamma: &Array<Pack<1>>,
    y: &mut Array<Pack<0>>,
    rstd: &mut Array<f32>,
    columns: u32,
    eps: f32,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let start = CUBE_POS as usize * columns;
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        let a = x[start + at.read()];
        #[unroll]
        for lane in 0..Lanes::value() {
            let value = f32::cast_from(a[lane]);
            sum.store(sum.read() + value * value);
        }
        at.store(at.read() + comptime!(threads as usize));
    }
    let size = f32::cast_from((columns * Lanes::value()) as u32);
    let scale = 1.0f32 / (block_sum(sum.read(), threads) / size + eps).sqrt();
    at.store(UNIT_POS as usize);
    while at.read() < columns {
        let a = x[start + at.read()];
        let g = gamma[at.read()];
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<0>::cast_from(f32::cast_from(a[lane]) * scale * f32::cast_from(g[lane]));
        }
        y[start + at.read()] = out;
        at.store(at.read() + comptime!(threads as usize));
    }
    if UNIT_POS == 0 {
        rstd[CUBE_POS as usize] = scale;
    }
}

/// The derivative of `rms_norm` with respect to `x`:
/// `dx = rstd * (dy gamma - x * rstd² * mean(dy gamma x))`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn rms_norm_grad(
    dy: &Array<Pack<0>>,
    x: &Array<Pack<0>>,
    gamma: &Array<Pack<1>>,
    rstd: &Array<f32>,
    dx: &mut Array<Pack<0>>,
    columns: u32,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let start = CUBE_POS as usize * columns;
    let scale = rstd[CUBE_POS as usize];
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        let d = dy[start + at.read()];
        let a = x[start + at.read()];
        let g = gamma[at.read()];
        #[unroll]
        for lane in 0..Lanes::value() {
            let term = f32::cast_from(d[lane]) * f32::cast_from(g[lane]) * f32::cast_from(a[lane]);
            sum.store(sum.read() + term);
        }
        at.store(at.read() + comptime!(threads as usize));
    }
    let size = f32::cast_from((columns * Lanes::value()) as u32);
    let mean = block_sum(sum.read(), threads) / size * scale * scale;
    at.store(UNIT_POS as usize);
    while at.read() < columns {
        let d = dy[start + at.read()];
        let a = x[start + at.read()];
        let g = gamma[at.read()];
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let own = f32::cast_from(d[lane]) * f32::cast_from(g[lane]);
            out[lane] = Elem::<0>::cast_from(scale * (own - f32::cast_from(a[lane]) * mean));
        }
        dx[start + at.read()] = out;
        at.store(at.read() + comptime!(threads as usize));
    }
}

/// `y = (x - mean) * rstd * gamma + beta` with the row's mean and reciprocal deviation.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn layer_norm(
    x: &Array<Pack<0>>,
    gamma: &Array<Pack<1>>,
    beta: &Array<Pack<1>>,
    y: &mut Array<Pack<0>>,
    mean: &mut Array<f32>,
    rstd: &mut Array<f32>,
    columns: u32,
    eps: f32,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let start = CUBE_POS as usize * columns;
    let size = f32::cast_from((columns * Lanes::value()) as u32);
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        let a = x[start + at.read()];
        #[unroll]
        for lane in 0..Lanes::value() {
            sum.store(sum.read() + f32::cast_from(a[lane]));
        }
        at.store(at.read() + comptime!(threads as usize));
    }
    let center = block_sum(sum.read(), threads) / size;
    sum.store(f32::new(0.0));
    at.store(UNIT_POS as usize);
    while at.read() < columns {
        let a = x[start + at.read()];
        #[unroll]
        for lane in 0..Lanes::value() {
            let value = f32::cast_from(a[lane]) - center;
            sum.store(sum.read() + value * value);
        }
        at.store(at.read() + comptime!(threads as usize));
    }
    let scale = 1.0f32 / (block_sum(sum.read(), threads) / size + eps).sqrt();
    at.store(UNIT_POS as usize);
    while at.read() < columns {
        let a = x[start + at.read()];
        let g = gamma[at.read()];
        let b = beta[at.read()];
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let normal = (f32::cast_from(a[lane]) - center) * scale;
            out[lane] = Elem::<0>::cast_from(normal * f32::cast_from(g[lane]) + f32::cast_from(b[lane]));
        }
        y[start + at.read()] = out;
        at.store(at.read() + comptime!(threads as usize));
    }
    if UNIT_POS == 0 {
        mean[CUBE_POS as usize] = center;
        rstd[CUBE_POS as usize] = scale;
    }
}

/// The derivative of `layer_norm` with respect to `x`:
/// `dx = rstd * (dy gamma - mean(dy gamma) - n mean(dy gamma n))` with `n = (x - mean) rstd`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn layer_norm_grad(
    dy: &Array<Pack<0>>,
    x: &Array<Pack<0>>,
    gamma: &Array<Pack<1>>,
    mean: &Array<f32>,
    rstd: &Array<f32>,
    dx: &mut Array<Pack<0>>,
    columns: u32,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let start = CUBE_POS as usize * columns;
    let scale = rstd[CUBE_POS as usize];
    let center = mean[CUBE_POS as usize];
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let product = RuntimeCell::<f32>::new(f32::new(0.0));
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        let d = dy[start + at.read()];
        let a = x[start + at.read()];
        let g = gamma[at.read()];
        #[unroll]
        for lane in 0..Lanes::value() {
            let own = f32::cast_from(d[lane]) * f32::cast_from(g[lane]);
            sum.store(sum.read() + own);
            product.store(product.read() + own * (f32::cast_from(a[lane]) - center) * scale);
        }
        at.store(at.read() + comptime!(threads as usize));
    }
    let size = f32::cast_from((columns * Lanes::value()) as u32);
    let mean_own = block_sum(sum.read(), threads) / size;
    let mean_product = block_sum(product.read(), threads) / size;
    at.store(UNIT_POS as usize);
    while at.read() < columns {
        let d = dy[start + at.read()];
        let a = x[start + at.read()];
        let g = gamma[at.read()];
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let own = f32::cast_from(d[lane]) * f32::cast_from(g[lane]);
            let normal = (f32::cast_from(a[lane]) - center) * scale;
            out[lane] = Elem::<0>::cast_from(scale * (own - mean_own - normal * mean_product));
        }
        dx[start + at.read()] = out;
        at.store(at.read() + comptime!(threads as usize));
    }
}

/// A chunk of rows of the derivatives with respect to gamma and beta: `dgamma` and `dbeta` are
/// `[chunks, columns]` partial sums in f32. Without `centered` the mean counts as 0 (RMS norm) and
/// `dbeta` is not written. The grid is (columns / [`COLUMNS`], chunks), the block `tile` x [`COLUMNS`] units.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn norm_weights_grad(
    dy: &Array<Pack<0>>,
    x: &Array<Pack<0>>,
    mean: &Array<f32>,
    rstd: &Array<f32>,
    dgamma: &mut Array<Vector<f32, Lanes>>,
    dbeta: &mut Array<Vector<f32, Lanes>>,
    rows: u32,
    columns: u32,
    chunk: u32,
    #[comptime] centered: bool,
    #[comptime] tile: u32,
    #[comptime] width: usize,
) {
    let unit = UNIT_POS as usize;
    let column = CUBE_POS_X as usize * comptime!(COLUMNS as usize) + unit % comptime!(COLUMNS as usize);
    let columns = columns as usize;
    let first = (CUBE_POS_Y * chunk) as usize;
    let last = min(first + chunk as usize, rows as usize);
    let mut gamma = Vector::<f32, Lanes>::empty();
    let mut beta = Vector::<f32, Lanes>::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        gamma[lane] = 0.0f32;
        beta[lane] = 0.0f32;
    }
    if column < columns {
        let row = RuntimeCell::<usize>::new(first + unit / comptime!(COLUMNS as usize));
        while row.read() < last {
            let at = row.read() * columns + column;
            let d = dy[at];
            let a = x[at];
            let scale = rstd[row.read()];
            #[unroll]
            for lane in 0..Lanes::value() {
                let own = f32::cast_from(d[lane]);
                if comptime!(centered) {
                    gamma[lane] += own * (f32::cast_from(a[lane]) - mean[row.read()]) * scale;
                    beta[lane] += own;
                } else {
                    gamma[lane] += own * f32::cast_from(a[lane]) * scale;
                }
            }
            row.store(row.read() + comptime!(tile as usize));
        }
    }
    let out = CUBE_POS_Y as usize * columns + column;
    let is_first = column < columns && unit < comptime!(COLUMNS as usize);
    let total = tile_fold(gamma, Fold::Sum, tile, width);
    if is_first {
        dgamma[out] = total;
    }
    if comptime!(centered) {
        let total = tile_fold(beta, Fold::Sum, tile, width);
        if is_first {
            dbeta[out] = total;
        }
    }
}

/// `lse` and `picked` of rows of logits, of which `live` are not padding; see
/// [`shardc_ir::ops::CrossEntropy`]. The sum of a vector is scaled once, by its largest element.
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
    #[comptime] padded: bool,
    #[comptime] threads: u32,
) {
    let columns = columns as usize;
    let row = CUBE_POS as usize;
    let start = row * columns;
    // A label below `first` wraps to a large number, so one comparison finds both bounds.
    let label = u32::cast_from(labels[row]) - first;
    let label = select(label < live, label, 0xffff_ffffu32);
    let largest = RuntimeCell::<f32>::new(f32::new(LOWEST));
    let sum = RuntimeCell::<f32>::new(f32::new(0.0));
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < columns {
        let a = logits[start + at.read()];
        let mut values = Vector::<f32, Lanes>::empty();
        let next = RuntimeCell::<f32>::new(largest.read());
        #[unroll]
        for lane in 0..Lanes::value() {
            let column = (at.read() * Lanes::value() + lane) as u32;
            let value = f32::cast_from(a[lane]);
            if comptime!(padded) {
                values[lane] = select(column < live, value, f32::new(LOWEST));
            } else {
                values[lane] = value;
            }
            next.store(max(next.read(), values[lane]));
        }
        let shifted = RuntimeCell::<f32>::new(sum.read() * (largest.read() - next.read()).exp());
        #[unroll]
        for lane in 0..Lanes::value() {
            shifted.store(shifted.read() + (values[lane] - next.read()).exp());
        }
        sum.store(shifted.read());
        largest.store(next.read());
        at.store(at.read() + comptime!(threads as usize));
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
        let a = logits[start + at.read()];
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let column = (at.read() * Lanes::value() + lane) as u32;
            let soft = (f32::cast_from(a[lane]) - log_sum).exp() * slope;
            let value = soft + select(column == label, extra, 0.0f32);
            if comptime!(padded) {
                out[lane] = Elem::<0>::cast_from(select(column < live, value, 0.0f32));
            } else {
                out[lane] = Elem::<0>::cast_from(value);
            }
        }
        dlogits[start + at.read()] = out;
        at.store(at.read() + comptime!(threads as usize));
    }
}
