//! The maximum of every window, and its derivative.

use super::{Context, View, ViewMut, by_rows};
use shardc_ir::TensorType;
use shardc_ir::ops::{MaxPool, MaxPoolGrad, Window};

/// Calls `each` with every window and channel of a sample, and the place of its first maximum.
fn maxima(kernel: [u64; 2], window: &Window, x: &TensorType, sample: &[f32], mut each: impl FnMut(usize, usize)) {
    let ([height, width], channels) = ([x.shape[1], x.shape[2]], x.shape[3] as usize);
    let Ok([rows, columns]) = window.count([height, width], kernel) else { return };
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        let (_, down, top) = window.overlap(0, height, kernel[0], row);
        let (_, across, left) = window.overlap(1, width, kernel[1], column);
        for channel in 0..channels {
            let place = |line: u64, at: u64| (line * width + at) as usize * channels + channel;
            let mut best = place(top, left);
            for kh in 0..down {
                for kw in 0..across {
                    let place = place(top + kh * window.dilation[0], left + kw * window.dilation[1]);
                    // What is not a number is a maximum, so that it is seen.
                    if sample[place] > sample[best] || (sample[place].is_nan() && !sample[best].is_nan()) {
                        best = place;
                    }
                }
            }
            each((row * columns + column) as usize * channels + channel, best);
        }
    }
}

/// Elements of a sample.
fn each(ty: &TensorType) -> usize {
    ty.shape[1..].iter().product::<u64>() as usize
}

pub(super) fn forward(op: &MaxPool, context: Context, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let (values, ty, of_x, of_y) = (x.f32s()?, x.ty, each(x.ty), each(result.ty));
    let work = of_y * (op.kernel[0] * op.kernel[1]) as usize;
    result.write_f32(|out| {
        by_rows(context, of_y.max(1), work, out, |first, out| {
            for (at, out) in (first..).zip(out.chunks_exact_mut(of_y.max(1))) {
                let sample = &values[at * of_x..(at + 1) * of_x];
                maxima(op.kernel, &op.window, ty, sample, |window, place| out[window] = sample[place]);
            }
        });
    })
}

pub(super) fn backward(
    op: &MaxPoolGrad,
    context: Context,
    operands: &[View<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let (dy, x) = (operands[0].f32s()?, operands[1].f32s()?);
    let (ty, of_x, of_y) = (operands[1].ty, each(operands[1].ty), each(operands[0].ty));
    let work = of_y * (op.kernel[0] * op.kernel[1]) as usize;
    result.write_f32(|out| {
        by_rows(context, of_x.max(1), work, out, |first, out| {
            for (at, out) in (first..).zip(out.chunks_exact_mut(of_x.max(1))) {
                out.fill(0.0);
                let (sample, dy) = (&x[at * of_x..(at + 1) * of_x], &dy[at * of_y..(at + 1) * of_y]);
                maxima(op.kernel, &op.window, ty, sample, |window, place| out[place] += dy[window]);
            }
        });
    })
}
