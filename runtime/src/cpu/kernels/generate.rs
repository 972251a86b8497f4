//! Values made from nothing.

use super::{Context, View, ViewMut, by_rows};
use crate::random;
use shardc_ir::ops::{Constant, Iota, Literal, Random};

fn numbers(result: &mut ViewMut<'_>, value: impl Fn(usize) -> f64) -> Result<(), String> {
    let count = result.ty.elements() as usize;
    if result.ty.dtype.is_float() {
        return result.write_f32(|out| out.iter_mut().enumerate().for_each(|(index, out)| *out = value(index) as f32));
    }
    result.round_i64(&(0..count).map(|index| value(index) as i64).collect::<Vec<_>>())
}

pub(super) fn constant(op: &Constant, result: &mut ViewMut<'_>) -> Result<(), String> {
    numbers(result, |_| op.value)
}

pub(super) fn literal(op: &Literal, result: &mut ViewMut<'_>) -> Result<(), String> {
    numbers(result, |index| op.values[index])
}

pub(super) fn iota(op: &Iota, result: &mut ViewMut<'_>) -> Result<(), String> {
    let size = result.ty.shape[op.dim] as usize;
    let inner = result.ty.shape[op.dim + 1..].iter().product::<u64>() as usize;
    numbers(result, |index| (op.start as usize + index / inner % size) as f64)
}

pub(super) fn random(
    op: &Random,
    context: Context,
    operands: &[View<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let step = match operands.first() {
        Some(step) => step.i64s()?.first().map(|step| *step as u64),
        None => None,
    };
    let places = operands.get(1).map(View::i64s).transpose()?;
    let shape = result.ty.shape.clone();
    let row = shape.last().map_or(1, |size| *size as usize);
    result.write_f32(|out| {
        by_rows(context, row, 16 * row, out, |first, out| {
            random::fill(op, step, places.as_deref(), &shape, first, out)
        });
    })
}
