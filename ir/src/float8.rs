//! 8-bit floats: their layout, and what matrix units ask of products of them.
//!
//! The formats are those of OCP, "8-bit floating point specification", 2023, sections 4 and 5; kernels of every
//! device are made from this description.

use crate::types::DType;

/// What both sides of a matrix in 8-bit floats must be multiples of, in every part of it (NVIDIA, "cuBLAS",
/// section "Tensor core usage").
pub const SIDE: u64 = 16;

/// The layout of an 8-bit float: a sign, an exponent, and a mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Format {
    /// Bits of the mantissa.
    pub mantissa: u32,
    /// The exponent of the smallest normal number.
    pub least: i32,
    /// The exponent of the largest power of two.
    pub most: i32,
}

impl Format {
    /// The layout of an element type; `None` if that is no 8-bit float.
    pub const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F8e4m3 => Some(Self { mantissa: 3, least: -6, most: 8 }),
            DType::F8e5m2 => Some(Self { mantissa: 2, least: -14, most: 15 }),
            _ => None,
        }
    }

    /// The largest number: 1.75 times the largest power of two, in both formats.
    pub fn largest(self) -> f32 {
        1.75 * power(self.most)
    }

    /// The smallest normal number.
    pub fn least_normal(self) -> f32 {
        power(self.least)
    }

    /// The smallest number above 0.
    pub fn step(self) -> f32 {
        power(self.least - self.mantissa as i32)
    }

    /// A number in f32 whose last bit is worth [`step`](Self::step): to add it to what is smaller rounds that to
    /// a multiple of the step.
    pub fn rounder(self) -> f32 {
        power(self.least - self.mantissa as i32 + 23)
    }
}

/// A power of two that is a normal number in f32.
fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of the specification's tables 1 and 2.
    #[test]
    fn formats_are_those_of_the_specification() {
        let numbers = |dtype| {
            let format = Format::of(dtype).unwrap();
            [format.largest(), format.least_normal(), format.step()]
        };
        assert_eq!(numbers(DType::F8e4m3), [448.0, 1.0 / 64.0, 1.0 / 512.0]);
        assert_eq!(numbers(DType::F8e5m2), [57344.0, 1.0 / 16384.0, 1.0 / 65536.0]);
        assert_eq!(Format::of(DType::U8), None);
    }
}
