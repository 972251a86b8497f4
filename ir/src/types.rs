//! Element types and tensor types.

use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 8-bit float, 4 exponent bits (OCP 8-bit floating point, E4M3).
    F8e4m3,
    /// 8-bit float, 5 exponent bits (OCP 8-bit floating point, E5M2).
    F8e5m2,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// One byte, 0 or 1.
    Bool,
    /// One byte of any value: scratch memory. No operation computes with it.
    U8,
}

impl DType {
    /// Every element type, in the order of the enum.
    pub const ALL: [DType; 9] =
        [Self::F32, Self::Bf16, Self::F16, Self::F8e4m3, Self::F8e5m2, Self::I64, Self::I32, Self::Bool, Self::U8];

    /// Bytes per element.
    pub fn size(self) -> u64 {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::F8e4m3 | Self::F8e5m2 | Self::Bool | Self::U8 => 1,
        }
    }

    /// Whether the type is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::Bf16 | Self::F16 | Self::F8e4m3 | Self::F8e5m2)
    }

    /// Whether the type is a signed integer type.
    pub fn is_int(self) -> bool {
        matches!(self, Self::I64 | Self::I32)
    }

    /// The name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F8e4m3 => "f8e4m3",
            Self::F8e5m2 => "f8e5m2",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::Bool => "bool",
            Self::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|dtype| dtype.name()).collect();
            format!("unknown element type `{text}`; known are {}", known.join(", "))
        })
    }
}

/// The largest size of a dimension, of a whole tensor in bytes, or of an index: sums and products of a few of them do
/// not overflow.
pub(crate) const LARGEST: u64 = 1 << 56;

/// The type of a value: an element type and a shape. A scalar has rank 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorType {
    /// The element type.
    pub dtype: DType,
    /// The size of each dimension, outermost first; dense and row-major.
    pub shape: Vec<u64>,
}

impl TensorType {
    /// A type from its parts.
    pub fn new(dtype: DType, shape: impl Into<Vec<u64>>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    /// A rank-0 type.
    pub fn scalar(dtype: DType) -> Self {
        Self::new(dtype, [])
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The number of elements (1 for a scalar).
    pub fn elements(&self) -> u64 {
        // Too many to count are the most that there are: what compares sizes with memory refuses them.
        self.shape.iter().fold(1, |elements, size| elements.saturating_mul(*size))
    }

    /// The size of the whole value.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.elements().saturating_mul(self.dtype.size()))
    }

    /// Checks that its dimensions, multiplied in any order, can be counted; where one is 0, so can the others.
    pub(crate) fn expect_countable(&self) -> Result<(), String> {
        let sizes = self.shape.iter().filter(|size| **size > 0);
        match sizes.fold(self.dtype.size(), |bytes, size| bytes.saturating_mul(*size)) {
            bytes if bytes <= LARGEST => Ok(()),
            _ => Err(format!("{self} is larger than {LARGEST} bytes")),
        }
    }

    /// The same shape with another element type.
    pub fn with_dtype(&self, dtype: DType) -> Self {
        Self { dtype, shape: self.shape.clone() }
    }

    /// Whether a tensor of this type is the beginning, in each dimension, of one of another.
    pub fn fits_in(&self, other: &Self) -> bool {
        let is_short = || self.shape.iter().zip(&other.shape).all(|(own, other)| own <= other);
        self.dtype == other.dtype && self.rank() == other.rank() && is_short()
    }

    /// The same element type with another shape.
    pub fn with_shape(&self, shape: impl Into<Vec<u64>>) -> Self {
        Self { dtype: self.dtype, shape: shape.into() }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (index, size) in self.shape.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{size}")?;
        }
        f.write_str("]")
    }
}
