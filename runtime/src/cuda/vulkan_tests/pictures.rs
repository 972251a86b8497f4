//! Convolutions and pooling: kernels on the device, the products between them here.

use super::*;
use crate::cuda::select::{Gemm, Matrix};

/// A product of f32 matrices in a copy of the memory.
pub(super) fn multiply(memory: &mut [u8], gemm: &Gemm, at: impl Fn(Arg) -> u64) {
    let place = |of: &Matrix, batch: u64, row: u64, column: u64| {
        (at(of.at) + 4 * (batch * of.batch + row * of.row + column * of.column)) as usize
    };
    let read = |memory: &[u8], from: usize| f32::from_le_bytes(memory[from..from + 4].try_into().unwrap());
    for (batch, row, column) in (0..gemm.batch)
        .flat_map(|batch| (0..gemm.m).flat_map(move |row| (0..gemm.n).map(move |column| (batch, row, column))))
    {
        let to = place(&gemm.c, batch, row, column);
        let mut sum = if gemm.addend.is_some() { read(memory, to) } else { 0.0 };
        for k in 0..gemm.k {
            sum += read(memory, place(&gemm.a, batch, row, k)) * read(memory, place(&gemm.b, batch, k, column));
        }
        memory[to..to + 4].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Strides, padding, dilation, groups; windows of a picture that are a multiple of eight, and others.
#[test]
fn convolutions_and_pooling() {
    let Some(client) = client() else { return };
    let window = |stride, low, high, dilation| Window { stride, low, high, dilation };
    for (x, filters, groups, window) in [
        ([3, 8, 8, 4], [6, 3, 3, 4], 1, window([1, 1], [1, 1], [1, 1], [1, 1])),
        ([2, 9, 7, 6], [4, 3, 2, 3], 2, window([2, 1], [1, 0], [0, 1], [1, 2])),
        ([2, 4, 4, 4], [6, 1, 1, 4], 1, Window::default()),
        ([2, 3, 3, 4], [6, 1, 1, 2], 2, Window::default()),
        ([2, 8, 8, 3], [5, 4, 4, 3], 1, window([4, 4], [0, 0], [0, 0], [1, 1])),
    ] {
        let [rows, columns] = window.count([x[1], x[2]], [filters[1], filters[2]]).unwrap();
        let y = t(&[x[0], rows, columns, filters[0]]);
        let (x, filters) = (t(&x), t(&filters));
        let convolution = Convolution { window: window.clone(), groups };
        check(&client, convolution, &[x.clone(), filters.clone()], &[y.clone()], 1);
        let transpose = ConvolutionTranspose { window: window.clone(), groups };
        check(&client, transpose, &[y.clone(), filters.clone()], &[x.clone()], 1);
        check(&client, ConvolutionFilterGrad { window, groups }, &[y, x], &[filters], 1);
    }
    for (kernel, window) in [
        ([3, 3], window([2, 2], [1, 1], [1, 1], [1, 1])),
        ([2, 2], window([2, 2], [0, 0], [0, 0], [1, 1])),
        ([2, 3], window([1, 2], [0, 1], [1, 1], [2, 1])),
    ] {
        let [rows, columns] = window.count([8, 9], kernel).unwrap();
        for channels in [3, 8] {
            let (x, y) = (t(&[2, 8, 9, channels]), t(&[2, rows, columns, channels]));
            check(&client, MaxPool { kernel, window: window.clone() }, &[x.clone()], &[y.clone()], 1);
            check(&client, MaxPoolGrad { kernel, window: window.clone() }, &[y, x.clone()], &[x], 1);
        }
    }
}

/// Bit by bit the CPU's results: numbers of which many in a window are equal, windows that lie over each other or leave some of
/// the picture out, vectors of one, two and four channels, and places in windows that take a byte, or two.
#[test]
fn the_first_of_equal_numbers_is_the_largest() {
    let Some(client) = client() else { return };
    let window = |stride, low, high, dilation| Window { stride, low, high, dilation };
    for ([height, width], kernel, window) in [
        ([8, 9], [3, 3], window([2, 2], [1, 1], [1, 1], [1, 1])),
        ([9, 7], [3, 3], window([2, 2], [0, 0], [0, 0], [1, 1])),
        ([7, 6], [3, 2], window([1, 1], [1, 1], [1, 0], [1, 1])),
        ([11, 9], [5, 4], window([2, 3], [2, 1], [2, 2], [1, 1])),
        ([9, 8], [2, 2], window([3, 3], [0, 1], [0, 0], [1, 1])),
        ([10, 11], [3, 3], window([1, 2], [3, 2], [3, 4], [3, 2])),
        ([1, 6], [1, 6], window([1, 1], [0, 0], [0, 0], [1, 1])),
        ([17, 18], [16, 16], window([1, 2], [0, 1], [0, 1], [1, 1])),
        ([17, 18], [16, 17], window([1, 1], [0, 1], [0, 1], [1, 1])),
    ] {
        let [rows, columns] = window.count([height, width], kernel).unwrap();
        for (images, channels) in [(1, 1), (3, 2), (2, 8)] {
            let (ty, of_y) = (t(&[images, height, width, channels]), t(&[images, rows, columns, channels]));
            let few: Vec<f32> = floats(&tensor(&ty, 5, 1)).iter().map(|value| (2.0 * value).round()).collect();
            let (x, dy) = (HostTensor::from_f32(ty.shape.clone(), &few), tensor(&of_y, 6, 1));
            let same = |op: Op, operands: &[HostTensor], ty: &TensorType| {
                let expected = compute_op(&op, operands, &[ty.clone()]).unwrap_or_else(|error| panic!("{error}"));
                assert!(run(&client, &op, operands, &[ty.clone()], u64::MAX) == expected, "{op:?} {ty}");
            };
            same(MaxPool { kernel, window: window.clone() }.into(), &[x.clone()], &of_y);
            same(MaxPoolGrad { kernel, window: window.clone() }.into(), &[dy, x], &ty);
        }
    }
}

/// The first of a window that is none is its maximum, wherever it stands, and has its cotangent.
#[test]
fn what_is_not_a_number_is_the_largest() {
    let Some(client) = client() else { return };
    let (kernel, window) = ([3, 3], Window { stride: [2, 2], low: [1, 1], high: [1, 1], ..Window::default() });
    let (of_x, of_y) = (t(&[2, 9, 8, 4]), t(&[2, 5, 4, 4]));
    let mut values = floats(&tensor(&of_x, 5, 1));
    let other = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
    values.iter_mut().step_by(7).zip(other.iter().cycle()).for_each(|(value, other)| *value = *other);
    let (x, dy) = (HostTensor::from_f32(of_x.shape.clone(), &values), tensor(&of_y, 6, 1));
    let both = |op: Op, operands: &[HostTensor], ty: &TensorType| {
        let expected = compute_op(&op, operands, &[ty.clone()]).unwrap_or_else(|error| panic!("{error}"));
        [run(&client, &op, operands, &[ty.clone()], u64::MAX), expected].map(|made| floats(&made[0]))
    };
    let [actual, expected] = both(MaxPool { kernel, window: window.clone() }.into(), &[x.clone()], &of_y);
    let is_same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
    assert!(expected.iter().any(|value| value.is_nan()) && expected.contains(&f32::INFINITY));
    assert!(actual.iter().zip(&expected).all(is_same), "{actual:?} {expected:?}");
    let [actual, expected] = both(MaxPoolGrad { kernel, window }.into(), &[dy, x], &of_x);
    assert_eq!(actual, expected);
}
