//! Contractions, as batched matrix products on Burn's Flex backend.

use super::super::memory::AlignedBytes;
use super::movement::strides;
use super::{Context, View, ViewMut, by_units, elementwise};
use burn::tensor::{Device, Tensor, TensorData};
use shardc_ir::OpDef;
use shardc_ir::ops::{Epilogue, Matmul, MatmulDims};

/// A matrix on the Flex backend, row-major.
pub(super) fn matrix(values: Vec<f32>, rows: usize, columns: usize) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values, [rows, columns]), &Device::flex())
}

/// The elements of a Flex tensor, row-major.
pub(super) fn elements<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, String> {
    let data = tensor.try_into_data().map_err(|error| format!("the Flex backend: {error}"))?;
    data.try_into_vec::<f32>().map_err(|error| format!("the Flex backend: {error}"))
}

/// An operand as `[outer, rows, columns]`, whatever the order in which it holds them.
fn operand(view: View<'_>, letters: &[char], groups: [&[char]; 3]) -> Result<Tensor<3>, String> {
    let size = |group: &[char]| -> usize {
        group.iter().filter_map(|letter| letters.iter().position(|l| l == letter)).map(|dim| view.dim(dim)).product()
    };
    let sizes = groups.map(size);
    let values = view.f32s()?;
    let device = Device::flex();
    // The strided product reads any order of the three groups, so it is enough that each is in one piece.
    const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for order in ORDERS {
        let concatenated: Vec<char> = order.iter().flat_map(|group| groups[*group]).copied().collect();
        if concatenated == letters {
            let shape = order.map(|group| sizes[group]);
            let place = |group: usize| order.iter().position(|o| *o == group).unwrap_or(group);
            let tensor = Tensor::<3>::from_data(TensorData::new(values.into_owned(), shape), &device);
            return Ok(tensor.permute([place(0) as isize, place(1) as isize, place(2) as isize]));
        }
    }
    let wanted: Vec<char> = groups.concat();
    let values = permuted(&values, &view.ty.shape, letters, &wanted);
    Ok(Tensor::from_data(TensorData::new(values, sizes), &device))
}

/// The elements of a tensor whose dimensions are `from`, in the order `to`.
fn permuted(values: &[f32], shape: &[u64], from: &[char], to: &[char]) -> Vec<f32> {
    let (steps, mut out) = (strides(shape), vec![0.0; values.len()]);
    let dims: Vec<usize> = to.iter().filter_map(|letter| from.iter().position(|l| l == letter)).collect();
    let (sizes, steps): (Vec<u64>, Vec<usize>) = dims.iter().map(|dim| (shape[*dim], steps[*dim])).unzip();
    super::movement::strided(values, &sizes, &steps, &mut out);
    out
}

/// The contraction of the first two operands; a summand and a bias are added, if there are.
pub(super) fn contract(
    op: &Matmul,
    context: Context,
    operands: &[View<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), String> {
    let [result, more @ ..] = results else { return Err("has a result".to_string()) };
    let Some(epilogue) = op.epilogue else { return sum(op, context, operands, result) };
    let plain = Matmul { epilogue: None, ..op.clone() };
    let kind = epilogue.function();
    // Rounded as the product by itself would be.
    let mut bytes = AlignedBytes::zeros(result.ty.bytes().0 as usize);
    let mut product = ViewMut { ty: result.ty, bytes: &mut bytes };
    let count = 2 + usize::from(op.bias);
    sum(&plain, context, &operands[..count.min(operands.len())], &mut product)?;
    let product = View { ty: product.ty, bytes: product.bytes };
    if let [element] = more {
        element.bytes.copy_from_slice(product.bytes);
    }
    match operands.get(2).filter(|_| epilogue == Epilogue::GeluTanhGrad) {
        Some(at) => elementwise::unary_grad(kind, context, product, *at, result),
        None => elementwise::unary(kind, context, product, result),
    }
}

/// The product, and what is added to it.
fn sum(op: &Matmul, context: Context, operands: &[View<'_>], result: &mut ViewMut<'_>) -> Result<(), String> {
    let [lhs, rhs, more @ ..] = operands else { return Err("takes two operands".to_string()) };
    if more.is_empty() {
        return product_of(op, context, *lhs, *rhs, result);
    }
    // The sum is rounded once.
    let ty = result.ty.with_dtype(shardc_ir::DType::F32);
    let mut values = vec![0.0f32; ty.elements() as usize];
    let mut whole = ViewMut { ty: &ty, bytes: bytemuck::cast_slice_mut(&mut values) };
    product_of(op, context, *lhs, *rhs, &mut whole)?;
    if let Some(addend) = op.addend(operands.len()) {
        values.iter_mut().zip(operands[addend].f32s()?.iter()).for_each(|(value, addend)| *value += addend);
    }
    if let Some(bias) = op.bias(operands.len()) {
        let bias = operands[bias].f32s()?;
        let rows = values.chunks_exact_mut(bias.len().max(1));
        rows.for_each(|row| row.iter_mut().zip(bias.iter()).for_each(|(value, bias)| *value += bias));
    }
    result.round_f32(&values)
}

fn product_of(
    op: &Matmul,
    context: Context,
    lhs: View<'_>,
    rhs: View<'_>,
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let [lhs_letters, rhs_letters, result_letters] = op.letters()?;
    let MatmulDims { batch, m, n, k } = op.dims()?;
    if lhs.bytes.is_empty() || rhs.bytes.is_empty() {
        return result.write_f32(|out| out.fill(0.0));
    }
    let lhs = operand(lhs, &lhs_letters, [&batch, &m, &k])?;
    let rhs = operand(rhs, &rhs_letters, [&batch, &k, &n])?;
    let products = product(context, lhs, rhs)?;
    let made: Vec<char> = [&batch[..], &m, &n].concat();
    if made == result_letters {
        return write(products, result);
    }
    // Move the product's dimensions where the result wants them.
    let values = products.concat();
    let sizes: Vec<u64> = made
        .iter()
        .filter_map(|letter| result_letters.iter().position(|l| l == letter))
        .map(|dim| result.ty.shape[dim])
        .collect();
    result.round_f32(&permuted(&values, &sizes, &made, &result_letters))
}

/// Writes consecutive pieces.
fn write(pieces: Vec<Vec<f32>>, result: &mut ViewMut<'_>) -> Result<(), String> {
    match &pieces[..] {
        [whole] => result.round_f32(whole),
        _ => result.write_f32(|out| {
            let mut at = 0;
            for piece in &pieces {
                out[at..at + piece.len()].copy_from_slice(piece);
                at += piece.len();
            }
        }),
    }
}

/// `[b, m, k] × [b, k, n]`, cut into consecutive pieces along `b` or, with one matrix, along `m`.
fn product(context: Context, lhs: Tensor<3>, rhs: Tensor<3>) -> Result<Vec<Vec<f32>>, String> {
    let ([batch, rows, inner], columns) = (lhs.dims(), rhs.dims()[2]);
    let dim = usize::from(batch == 1);
    let units = if batch == 1 { rows } else { batch };
    let work = (rows * inner * columns * batch / units).max(1);
    // Thin pieces would spend their time in packing the other operand.
    let grain = if batch == 1 { 32 } else { 1 };
    let parts = context.parts(units.div_ceil(grain), work.saturating_mul(grain));
    let chunk = units.div_ceil(parts);
    let (lhs, rhs) = (&lhs, &rhs);
    by_units(context, units.div_ceil(chunk), usize::MAX, |part| {
        let (start, length) = (part * chunk, chunk.min(units - part * chunk));
        let lhs = lhs.clone().narrow(dim, start, length);
        let rhs = if batch == 1 { rhs.clone() } else { rhs.clone().narrow(0, start, length) };
        elements(lhs.matmul(rhs))
    })
}
