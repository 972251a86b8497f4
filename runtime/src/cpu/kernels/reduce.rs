//! Reductions over dimensions, and the sum of squares.

use super::elementwise::maximum;
use super::movement::strides;
use super::{View, ViewMut};
use shardc_ir::ops::{Reduce, ReduceOp};

/// The sum of `values` in f32 by pairs of blocks, so that the error grows with the logarithm of
/// their number (Higham, "The accuracy of floating point summation", 1993).
pub(super) fn pairwise_sum(values: &[f32], f: &impl Fn(f32) -> f32) -> f32 {
    if values.len() > 512 {
        let (left, right) = values.split_at(values.len() / 2);
        return pairwise_sum(left, f) + pairwise_sum(right, f);
    }
    // Eight running sums, so that the loop becomes vector instructions.
    let mut sums = [0.0f32; 8];
    let (chunks, rest) = values.as_chunks::<8>();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += f(*value);
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|value| f(*value)).sum::<f32>()
}

pub(super) fn sum_squares(x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let sum = pairwise_sum(&x.f32s()?, &|x| x * x);
    result.write_f32(|out| out[0] = sum)
}

pub(super) fn reduce(op: &Reduce, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    if x.ty.dtype.is_float() {
        let x_values = x.f32s()?;
        let rank = x.ty.rank();
        let trailing = op.dims.iter().rev().enumerate().all(|(index, dim)| *dim + index + 1 == rank);
        if trailing && !op.dims.is_empty() {
            let row: usize = op.dims.iter().map(|dim| x.dim(*dim)).product();
            return result.write_f32(|out| {
                for (index, out) in out.iter_mut().enumerate() {
                    let values = &x_values[index * row..(index + 1) * row];
                    *out = match op.kind {
                        ReduceOp::Sum => pairwise_sum(values, &|x| x),
                        ReduceOp::Max => values.iter().copied().fold(f32::NEG_INFINITY, maximum),
                    };
                }
            });
        }
        return match op.kind {
            // Running sums, so in f64.
            ReduceOp::Sum => {
                let mut sums = vec![0.0; result.ty.elements() as usize];
                fold(op, x, &x_values, &mut sums, 0.0, |sum: f64, value| sum + f64::from(value));
                result.write_f32(|out| out.iter_mut().zip(&sums).for_each(|(out, sum)| *out = *sum as f32))
            }
            ReduceOp::Max => result.write_f32(|out| fold(op, x, &x_values, out, f32::NEG_INFINITY, maximum)),
        };
    }
    let values = x.i64s()?;
    let mut out = vec![0; result.ty.elements() as usize];
    match op.kind {
        ReduceOp::Sum => fold(op, x, &values, &mut out, 0, i64::wrapping_add),
        ReduceOp::Max => fold(op, x, &values, &mut out, i64::MIN, i64::max),
    }
    result.round_i64(&out)
}

/// Folds every element into its place, in the order of the operand.
fn fold<T: Copy, S: Copy>(op: &Reduce, x: View<'_>, values: &[T], out: &mut [S], zero: S, f: impl Fn(S, T) -> S) {
    out.fill(zero);
    let kept: Vec<u64> = (0..x.ty.rank()).filter(|dim| !op.dims.contains(dim)).map(|dim| x.ty.shape[dim]).collect();
    let mut kept_strides = strides(&kept).into_iter();
    let steps: Vec<usize> =
        (0..x.ty.rank()).map(|dim| if op.dims.contains(&dim) { 0 } else { kept_strides.next().unwrap_or(0) }).collect();
    let row = x.row();
    if values.is_empty() || row == 0 {
        return;
    }
    let step = steps.last().copied().unwrap_or(0);
    let mut index = vec![0u64; x.ty.rank().saturating_sub(1)];
    let mut offset = 0;
    for values in values.chunks_exact(row) {
        if step == 0 {
            out[offset] = values.iter().copied().fold(out[offset], &f);
        } else {
            for (out, value) in out[offset..offset + row].iter_mut().zip(values) {
                *out = f(*out, *value);
            }
        }
        for dim in (0..index.len()).rev() {
            index[dim] += 1;
            offset += steps[dim];
            if index[dim] < x.ty.shape[dim] {
                break;
            }
            offset -= steps[dim] * x.ty.shape[dim] as usize;
            index[dim] = 0;
        }
    }
}
