//! Tensors in the host's memory: what goes into a step and comes out of it.

use crate::types::{DType, TensorType};

/// A dense, row-major tensor in host memory, little-endian.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// The type.
    pub ty: TensorType,
    /// `ty.bytes()` bytes.
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// A tensor of zeros.
    pub fn zeros(ty: TensorType) -> Self {
        let bytes = vec![0; ty.bytes().0 as usize];
        Self { ty, bytes }
    }

    /// An f32 tensor; the number of values must fit the shape.
    pub fn from_f32(shape: impl Into<Vec<u64>>, values: &[f32]) -> Self {
        let ty = TensorType::new(DType::F32, shape);
        debug_assert_eq!(ty.elements(), values.len() as u64);
        Self { ty, bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() }
    }

    /// An i64 tensor; the number of values must fit the shape.
    pub fn from_i64(shape: impl Into<Vec<u64>>, values: &[i64]) -> Self {
        let ty = TensorType::new(DType::I64, shape);
        debug_assert_eq!(ty.elements(), values.len() as u64);
        Self { ty, bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() }
    }

    /// A part: per dimension, the first index and the length; within the tensor.
    pub fn part(&self, slice: &[(u64, u64)]) -> Self {
        let shape: Vec<u64> = slice.iter().map(|(_, length)| *length).collect();
        let mut part = Self::zeros(self.ty.with_shape(shape));
        let mut at = 0;
        for_each_row(&self.ty, slice, |offset, length| {
            part.bytes[at..at + length].copy_from_slice(&self.bytes[offset..offset + length]);
            at += length;
        });
        part
    }

    /// Without what is behind the end of each dimension that is shorter in another type, which [fits
    /// in](TensorType::fits_in) this one.
    pub fn beginning(self, ty: &TensorType) -> Self {
        if self.ty == *ty {
            return self;
        }
        self.part(&ty.shape.iter().map(|size| (0, *size)).collect::<Vec<_>>())
    }

    /// With zeros behind the end of each dimension that is longer in another type, which it [fits
    /// in](TensorType::fits_in).
    pub fn filled(&self, ty: &TensorType) -> Self {
        if self.ty == *ty {
            return self.clone();
        }
        let mut filled = Self::zeros(ty.clone());
        filled.set_part(&self.ty.shape.iter().map(|size| (0, *size)).collect::<Vec<_>>(), self);
        filled
    }

    /// Writes a part where it belongs; the inverse of [`part`](Self::part).
    pub fn set_part(&mut self, slice: &[(u64, u64)], part: &HostTensor) {
        let mut at = 0;
        let bytes = &mut self.bytes;
        for_each_row(&self.ty, slice, |offset, length| {
            bytes[offset..offset + length].copy_from_slice(&part.bytes[at..at + length]);
            at += length;
        });
    }
}

/// Calls `each` with the byte offset and byte length of every contiguous run of a part of a tensor
/// of type `ty`, in order.
pub fn for_each_row(ty: &TensorType, slice: &[(u64, u64)], mut each: impl FnMut(usize, usize)) {
    let size = ty.dtype.size();
    // Trailing dimensions that are taken whole join the run.
    let mut inner = slice.len();
    let mut run = 1;
    while inner > 0 && slice[inner - 1] == (0, ty.shape[inner - 1]) {
        inner -= 1;
        run *= ty.shape[inner];
    }
    let mut strides = vec![1u64; slice.len()];
    for dim in (0..slice.len().saturating_sub(1)).rev() {
        strides[dim] = strides[dim + 1] * ty.shape[dim + 1];
    }
    if slice.iter().any(|(_, length)| *length == 0) {
        return;
    }
    if inner == 0 {
        return each(0, (run * size) as usize);
    }
    let run = run * slice[inner - 1].1;
    let outer = &slice[..inner - 1];
    let mut index = vec![0u64; outer.len()];
    loop {
        let start: u64 =
            outer.iter().zip(&index).zip(&strides).map(|(((first, _), at), stride)| (first + at) * stride).sum();
        let offset = start + slice[inner - 1].0 * strides[inner - 1];
        each((offset * size) as usize, (run * size) as usize);
        let Some(dim) = (0..outer.len()).rev().find(|dim| index[*dim] + 1 < outer[*dim].1) else { return };
        index[dim] += 1;
        index[dim + 1..].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_round_trip() {
        let values: Vec<f32> = (0..24u8).map(f32::from).collect();
        let whole = HostTensor::from_f32([2, 3, 4], &values);
        let slice = [(0, 2), (1, 2), (2, 2)];
        let part = whole.part(&slice);
        assert_eq!(part, HostTensor::from_f32([2, 2, 2], &[6.0, 7.0, 10.0, 11.0, 18.0, 19.0, 22.0, 23.0]));
        let mut copy = HostTensor::zeros(whole.ty.clone());
        for slice in [[(0, 2), (0, 1), (0, 4)], [(0, 2), (1, 2), (0, 2)], [(0, 2), (1, 2), (2, 2)]] {
            copy.set_part(&slice, &whole.part(&slice));
        }
        assert_eq!(copy, whole);
        assert_eq!(whole.part(&[(0, 2), (0, 3), (0, 4)]), whole);
    }
}
