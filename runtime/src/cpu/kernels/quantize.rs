//! Tensors in 8-bit floats, and their products.

use super::float8::encode;
use super::{Context, View, ViewMut, matmul};
use shardc_ir::float8::Format;
use shardc_ir::ops::{QuantizationScale, ScaledMatmul, scale_of};
use shardc_ir::{DType, TensorType};

/// The largest absolute value of each sample, as a scale.
pub(super) fn scale(op: &QuantizationScale, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let values = x.f32s()?;
    let each = values.len() / result.ty.elements().max(1) as usize;
    let largest = |sample: &[f32]| sample.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let scales: Vec<f32> = values.chunks(each.max(1)).map(|sample| scale_of(largest(sample), op.to)).collect();
    result.round_f32(&scales)
}

/// The elements over their scales, as they lie and with the last two dimensions exchanged.
pub(super) fn quantize(operands: &[View<'_>], results: &mut [ViewMut<'_>]) -> Result<(), String> {
    let ([x, scales], [whole, exchanged]) = (operands, results) else {
        return Err("takes a tensor and its scales, and makes two".to_string());
    };
    let format = Format::of(whole.ty.dtype).ok_or_else(|| format!("makes no {}", whole.ty))?;
    let (values, scales) = (x.f32s()?, scales.f32s()?);
    let rank = x.ty.rank();
    let (rows, columns) = (x.dim(rank - 2), x.dim(rank - 1));
    let each = (values.len() / scales.len().max(1)).max(1);
    for (at, value) in values.iter().enumerate() {
        let code = encode(format, value / scales[at / each]);
        let (matrix, row, column) = (at / (rows * columns), at / columns % rows, at % columns);
        whole.bytes[at] = code;
        exchanged.bytes[(matrix * columns + column) * rows + row] = code;
    }
    Ok(())
}

/// The contraction of the elements times their scales, which are powers of two: no product of two elements is
/// rounded, and the sum is in f32.
pub(super) fn contract(
    op: &ScaledMatmul,
    context: Context,
    operands: &[View<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), String> {
    let [a, b, of_a, of_b] = operands else { return Err("takes two operands and their scales".to_string()) };
    let [a, b] = [(a, of_a), (b, of_b)].map(|(x, scales)| scaled(*x, *scales));
    let ((a_type, a), (b_type, b)) = (a?, b?);
    let a = View { ty: &a_type, bytes: bytemuck::cast_slice(&a) };
    let b = View { ty: &b_type, bytes: bytemuck::cast_slice(&b) };
    matmul::contract(&op.product(), context, &[a, b], results)
}

/// The elements times their scales.
fn scaled(x: View<'_>, scales: View<'_>) -> Result<(TensorType, Vec<f32>), String> {
    let (mut values, scales) = (x.f32s()?.into_owned(), scales.f32s()?);
    let each = (values.len() / scales.len().max(1)).max(1);
    let samples = values.chunks_mut(each).zip(scales.iter());
    samples.for_each(|(sample, scale)| sample.iter_mut().for_each(|x| *x *= scale));
    Ok((x.ty.with_dtype(DType::F32), values))
}
