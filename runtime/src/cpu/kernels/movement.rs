//! Elements in other places: reshape, transpose, broadcast, slice, pad, concat.
//!
//! They move bytes, whatever the element type.

use super::{View, ViewMut};
use half::{bf16, f16};
use shardc_ir::DType;
use shardc_ir::ops::{Broadcast, Concat, Pad, Slice, Transpose};
use shardc_ir::tensor::for_each_row;

pub(super) fn reshape(x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    result.bytes.copy_from_slice(x.bytes);
    Ok(())
}

/// Row-major strides in elements.
pub(super) fn strides(shape: &[u64]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for dim in (0..shape.len().saturating_sub(1)).rev() {
        strides[dim] = strides[dim + 1] * shape[dim + 1] as usize;
    }
    strides
}

/// Fills `out` of shape `shape` with the elements of `source` at `offset + Σ index[dim] * strides[dim]`.
pub(super) fn strided<T: Copy>(source: &[T], shape: &[u64], steps: &[usize], out: &mut [T]) {
    if out.is_empty() {
        return;
    }
    let Some((row, outer)) = shape.split_last() else {
        out[0] = source[0];
        return;
    };
    let (row, step) = (*row as usize, steps[steps.len() - 1]);
    let mut index = vec![0u64; outer.len()];
    let mut offset = 0;
    for out in out.chunks_exact_mut(row) {
        match step {
            0 => out.fill(source[offset]),
            1 => out.copy_from_slice(&source[offset..offset + row]),
            _ => out.iter_mut().enumerate().for_each(|(at, out)| *out = source[offset + at * step]),
        }
        for dim in (0..outer.len()).rev() {
            index[dim] += 1;
            offset += steps[dim];
            if index[dim] < outer[dim] {
                break;
            }
            offset -= steps[dim] * outer[dim] as usize;
            index[dim] = 0;
        }
    }
}

/// [`strided`] on elements of `size` bytes.
fn strided_bytes(size: u64, source: &[u8], shape: &[u64], steps: &[usize], out: &mut [u8]) {
    fn typed<T: bytemuck::Pod>(source: &[u8], shape: &[u64], steps: &[usize], out: &mut [u8]) {
        strided::<T>(bytemuck::cast_slice(source), shape, steps, bytemuck::cast_slice_mut(out));
    }
    match size {
        8 => typed::<u64>(source, shape, steps, out),
        4 => typed::<u32>(source, shape, steps, out),
        2 => typed::<u16>(source, shape, steps, out),
        _ => typed::<u8>(source, shape, steps, out),
    }
}

pub(super) fn transpose(op: &Transpose, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let from = strides(&x.ty.shape);
    let steps: Vec<usize> = op.permutation.iter().map(|dim| from[*dim]).collect();
    strided_bytes(x.ty.dtype.size(), x.bytes, &result.ty.shape, &steps, result.bytes);
    Ok(())
}

pub(super) fn broadcast(op: &Broadcast, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let from = strides(&x.ty.shape);
    let mut steps = vec![0; result.ty.rank()];
    for (index, dim) in op.dims.iter().enumerate() {
        if x.ty.shape[index] != 1 {
            steps[*dim] = from[index];
        }
    }
    strided_bytes(x.ty.dtype.size(), x.bytes, &result.ty.shape, &steps, result.bytes);
    Ok(())
}

pub(super) fn slice(op: &Slice, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let part: Vec<(u64, u64)> = op.start.iter().zip(&op.limit).map(|(start, limit)| (*start, limit - start)).collect();
    let mut at = 0;
    for_each_row(x.ty, &part, |offset, length| {
        result.bytes[at..at + length].copy_from_slice(&x.bytes[offset..offset + length]);
        at += length;
    });
    Ok(())
}

/// Writes `x` into the part of the result that starts at `start`.
fn place(x: View<'_>, start: &[u64], result: &mut ViewMut<'_>) {
    let part: Vec<(u64, u64)> = start.iter().copied().zip(x.ty.shape.iter().copied()).collect();
    let mut at = 0;
    for_each_row(result.ty, &part, |offset, length| {
        result.bytes[offset..offset + length].copy_from_slice(&x.bytes[at..at + length]);
        at += length;
    });
}

pub(super) fn pad(op: &Pad, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let value = op.value;
    match result.ty.dtype {
        DType::F32 => bytemuck::cast_slice_mut(result.bytes).fill(value as f32),
        DType::Bf16 => bytemuck::cast_slice_mut(result.bytes).fill(bf16::from_f64(value)),
        DType::F16 => bytemuck::cast_slice_mut(result.bytes).fill(f16::from_f64(value)),
        DType::I64 => bytemuck::cast_slice_mut(result.bytes).fill(value as i64),
        DType::I32 => bytemuck::cast_slice_mut(result.bytes).fill(value as i32),
        DType::Bool => result.bytes.fill(u8::from(value != 0.0)),
        DType::F8e4m3 | DType::F8e5m2 | DType::U8 => return Err(super::unsupported(result.ty)),
    }
    place(x, &op.low, result);
    Ok(())
}

pub(super) fn concat(op: &Concat, operands: &[View<'_>], result: &mut ViewMut<'_>) -> Result<(), String> {
    let mut start = vec![0; result.ty.rank()];
    for operand in operands {
        place(*operand, &start, result);
        start[op.dim] += operand.ty.shape[op.dim];
    }
    Ok(())
}
