//! Tensors of every element type from numbers, and back.

use shardc_ir::{DType, HostTensor, TensorType};

/// Numbers as a tensor; those of bf16 are rounded.
pub fn tensor(ty: &TensorType, values: &[f64]) -> HostTensor {
    let bytes = match ty.dtype {
        DType::F32 => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|x| half(*x as f32).to_le_bytes()).collect(),
        DType::I64 => values.iter().flat_map(|x| (*x as i64).to_le_bytes()).collect(),
        DType::I32 => values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        DType::Bool => values.iter().map(|x| u8::from(*x != 0.0)).collect(),
        DType::F8e4m3 => values.iter().map(|x| eighth(*x, 3)).collect(),
        DType::F8e5m2 => values.iter().map(|x| eighth(*x, 2)).collect(),
        other => panic!("no test data of {other}"),
    };
    HostTensor { ty: ty.clone(), bytes }
}

/// The code of the nearest 8-bit float that has so many bits of mantissa.
fn eighth(x: f64, mantissa: i32) -> u8 {
    // All codes above are infinite, or no numbers, in one format or the other.
    let distance = |code: &u8| (number(*code, mantissa) - x.abs()).abs();
    let nearest = (0..0x7Cu8).min_by(|a, b| distance(a).total_cmp(&distance(b)));
    nearest.unwrap_or_default() | u8::from(x < 0.0) << 7
}

/// The number of a code, of a format with so many bits of mantissa.
fn number(code: u8, mantissa: i32) -> f64 {
    let (steps, bias) = (f64::from(code & 0x7F), (1 << (6 - mantissa)) - 1);
    let (exponent, part) = ((steps / 2f64.powi(mantissa)).floor(), steps % 2f64.powi(mantissa));
    let one = if exponent > 0.0 { 1.0 } else { 0.0 };
    let sign = if code < 0x80 { 1.0 } else { -1.0 };
    sign * (one + part / 2f64.powi(mantissa)) * 2f64.powf(exponent.max(1.0) - f64::from(bias))
}

/// bf16 by rounding to nearest even, on the bits.
fn half(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

pub fn values(tensor: &HostTensor) -> Vec<f64> {
    let bytes = &tensor.bytes;
    match tensor.ty.dtype {
        DType::F32 => bytes.as_chunks().0.iter().map(|x| f64::from(f32::from_le_bytes(*x))).collect(),
        DType::Bf16 => {
            let widen = |x: &[u8; 2]| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16));
            bytes.as_chunks().0.iter().map(widen).collect()
        }
        DType::I64 => bytes.as_chunks().0.iter().map(|x| i64::from_le_bytes(*x) as f64).collect(),
        DType::I32 => bytes.as_chunks().0.iter().map(|x| f64::from(i32::from_le_bytes(*x))).collect(),
        DType::Bool => bytes.iter().map(|x| f64::from(*x)).collect(),
        DType::F8e4m3 => bytes.iter().map(|code| number(*code, 3)).collect(),
        DType::F8e5m2 => bytes.iter().map(|code| number(*code, 2)).collect(),
        other => panic!("no test data of {other}"),
    }
}
