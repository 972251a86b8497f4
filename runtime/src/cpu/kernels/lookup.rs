//! Rows and elements by index, and the transposes of that.

use super::movement::strides;
use super::{View, ViewMut};
use shardc_ir::TensorType;
use shardc_ir::ops::{Embedding, EmbeddingGrad, Gather, ScatterAdd};

/// The row of a shard that starts at `start` and holds `rows` rows, if the id lies in it.
fn local(id: i64, start: u64, rows: usize) -> Option<usize> {
    let row = usize::try_from(id).ok()?.checked_sub(start as usize)?;
    (row < rows).then_some(row)
}

pub(super) fn embedding(op: &Embedding, operands: &[View<'_>], result: &mut ViewMut<'_>) -> Result<(), String> {
    let (table, ids) = (operands[0], operands[1].i64s()?);
    let row = table.row() * table.ty.dtype.size() as usize;
    if row == 0 {
        return Ok(());
    }
    for (out, id) in result.bytes.chunks_exact_mut(row).zip(ids.iter()) {
        match local(*id, op.start, table.dim(0)) {
            Some(at) => out.copy_from_slice(&table.bytes[at * row..(at + 1) * row]),
            None => out.fill(0),
        }
    }
    Ok(())
}

pub(super) fn embedding_grad(
    op: &EmbeddingGrad,
    operands: &[View<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let (dy, ids) = (operands[0].f32s()?, operands[1].i64s()?);
    let (rows, row) = (result.ty.shape[0] as usize, result.ty.shape[1] as usize);
    let summand = operands.get(2).map(|summand| summand.f32s()).transpose()?;
    result.write_f32(|out| {
        match &summand {
            Some(summand) => out.copy_from_slice(summand),
            None => out.fill(0.0),
        }
        if row == 0 {
            return;
        }
        for (dy, id) in dy.chunks_exact(row).zip(ids.iter()) {
            if let Some(at) = local(*id, op.start, rows) {
                out[at * row..(at + 1) * row].iter_mut().zip(dy).for_each(|(out, dy)| *out += dy);
            }
        }
    })
}

/// For every element of `index`, where it points in a tensor of type `whole` along `dim`.
fn places(dim: usize, whole: &TensorType, index: View<'_>) -> Result<Vec<usize>, String> {
    let (to, size) = (strides(&whole.shape), whole.shape[dim]);
    let from = strides(&index.ty.shape);
    let place = |(position, at): (usize, &i64)| {
        let at = usize::try_from(*at).ok().filter(|at| (*at as u64) < size);
        let at = at.ok_or_else(|| format!("index outside dimension {dim} of {whole}"))?;
        let other = |other: usize| position / from[other] % index.dim(other) * to[other];
        Ok((0..to.len()).map(|d| if d == dim { at * to[d] } else { other(d) }).sum())
    };
    index.i64s()?.iter().enumerate().map(place).collect()
}

pub(super) fn gather(op: &Gather, operands: &[View<'_>], result: &mut ViewMut<'_>) -> Result<(), String> {
    let (x, size) = (operands[0], operands[0].ty.dtype.size() as usize);
    let places = places(op.dim, x.ty, operands[1])?;
    for (out, place) in result.bytes.chunks_exact_mut(size).zip(places) {
        out.copy_from_slice(&x.bytes[place * size..(place + 1) * size]);
    }
    Ok(())
}

pub(super) fn scatter_add(op: &ScatterAdd, operands: &[View<'_>], result: &mut ViewMut<'_>) -> Result<(), String> {
    let places = places(op.dim, result.ty, operands[1])?;
    if !result.ty.dtype.is_float() {
        let mut out = vec![0i64; result.ty.elements() as usize];
        let dy = operands[0].i64s()?;
        places.iter().zip(dy.iter()).for_each(|(place, dy)| out[*place] = out[*place].wrapping_add(*dy));
        return result.round_i64(&out);
    }
    let dy = operands[0].f32s()?;
    result.write_f32(|out| {
        out.fill(0.0);
        places.iter().zip(dy.iter()).for_each(|(place, dy)| out[*place] += dy);
    })
}
