//! The maximum of every window, and its derivative.

use super::{Context, View, ViewMut, by_rows};
use shardc_ir::TensorType;
use shardc_ir::ops::{MaxPool, MaxPoolGrad, Window};

/// Calls `each` with every window of a picture and the place of its first maximum.
fn maxima(kernel: [u64; 2], window: &Window, x: &TensorType, picture: &[f32], mut each: impl FnMut(usize, usize)) {
    let size = [x.shape[2], x.shape[3]];
    let Ok([rows, columns]) = window.count(size, kernel) else { return };
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        let (_, height, top) = window.overlap(0, size[0], kernel[0], row);
        let (_, width, left) = window.overlap(1, size[1], kernel[1], column);
        let mut best = (top * size[1] + left) as usize;
        for kh in 0..height {
            for kw in 0..width {
                let line = top + kh * window.dilation[0];
                let place = (line * size[1] + left + kw * window.dilation[1]) as usize;
                // What is not a number is a maximum, so that it is seen.
                if picture[place] > picture[best] || (picture[place].is_nan() && !picture[best].is_nan()) {
                    best = place;
                }
            }
        }
        each((row * columns + column) as usize, best);
    }
}

/// Elements of a plane.
fn plane(ty: &TensorType) -> usize {
    (ty.shape[2] * ty.shape[3]) as usize
}

pub(super) fn forward(op: &MaxPool, context: Context, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let (values, ty, each) = (x.f32s()?, x.ty, plane(x.ty));
    let (pooled, work) = (plane(result.ty), plane(result.ty) * (op.kernel[0] * op.kernel[1]) as usize);
    result.write_f32(|out| {
        by_rows(context, pooled.max(1), work, out, |first, out| {
            for (at, out) in (first..).zip(out.chunks_exact_mut(pooled.max(1))) {
                let picture = &values[at * each..(at + 1) * each];
                maxima(op.kernel, &op.window, ty, picture, |window, place| out[window] = picture[place]);
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
    let (ty, each, pooled) = (operands[1].ty, plane(operands[1].ty), plane(operands[0].ty));
    let work = pooled * (op.kernel[0] * op.kernel[1]) as usize;
    result.write_f32(|out| {
        by_rows(context, each.max(1), work, out, |first, out| {
            for (at, out) in (first..).zip(out.chunks_exact_mut(each.max(1))) {
                out.fill(0.0);
                let (picture, dy) = (&x[at * each..(at + 1) * each], &dy[at * pooled..(at + 1) * pooled]);
                maxima(op.kernel, &op.window, ty, picture, |window, place| out[place] += dy[window]);
            }
        });
    })
}
