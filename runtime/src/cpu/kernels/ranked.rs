//! The largest elements of rows, and running sums.

use super::movement::strides;
use super::{View, ViewMut};
use shardc_ir::ops::{Cumsum, TopK};
use std::cmp::Ordering;

pub(super) fn top_k(op: &TopK, x: View<'_>, results: &mut [ViewMut<'_>]) -> Result<(), String> {
    let [values, indices] = results else { return Err("makes values and indices".to_string()) };
    let chosen = if x.ty.dtype.is_int() {
        largest(&x.i64s()?, x.row(), op.k as usize, Ord::cmp)
    } else {
        largest(&x.f32s()?, x.row(), op.k as usize, |a, b| {
            (a.is_nan().cmp(&b.is_nan())).then(if a.is_nan() { Ordering::Equal } else { a.total_cmp(b) })
        })
    };
    let (size, k) = (x.ty.dtype.size() as usize, (op.k as usize).max(1));
    for (at, (out, column)) in values.bytes.chunks_exact_mut(size).zip(&chosen).enumerate() {
        let place = (at / k * x.row() + *column as usize) * size;
        out.copy_from_slice(&x.bytes[place..place + size]);
    }
    indices.round_i64(&chosen)
}

/// The columns of the largest elements of every row.
fn largest<T: Copy>(values: &[T], row: usize, k: usize, order: impl Fn(&T, &T) -> Ordering) -> Vec<i64> {
    let mut chosen = Vec::with_capacity(values.len() / row.max(1) * k);
    for values in values.chunks_exact(row.max(1)) {
        let mut columns: Vec<usize> = (0..values.len()).collect();
        columns.sort_by(|a, b| order(&values[*b], &values[*a]));
        chosen.extend(columns[..k].iter().map(|column| *column as i64));
    }
    chosen
}

pub(super) fn cumsum(op: &Cumsum, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let (size, step) = (x.dim(op.dim), strides(&x.ty.shape)[op.dim]);
    if x.ty.dtype.is_int() {
        let mut sums = x.i64s()?.into_owned();
        running(&mut sums, size, step, op.reverse, i64::wrapping_add);
        return result.round_i64(&sums);
    }
    let mut sums = x.f32s()?.into_owned();
    running(&mut sums, size, step, op.reverse, |sum, value| sum + value);
    result.round_f32(&sums)
}

/// Adds each element along a dimension of `size` elements, `step` apart, to the one after it.
fn running<T: Copy>(values: &mut [T], size: usize, step: usize, reverse: bool, add: impl Fn(T, T) -> T) {
    for block in values.chunks_exact_mut((size * step).max(1)) {
        for at in 1..size {
            let (to, from) = if reverse { (size - 1 - at, size - at) } else { (at, at - 1) };
            for column in 0..step {
                block[to * step + column] = add(block[to * step + column], block[from * step + column]);
            }
        }
    }
}
