//! Tensors in 8-bit floats: the scale of a tensor, and its elements divided by it.
//!
//! A scale is a power of two, so dividing by it and multiplying by it are exact, and the same on every device; only the
//! 8-bit element is rounded (Micikevicius et al., "FP8 formats for deep learning", 2022; OCP, "8-bit floating point
//! specification", 2023). The scale is that of the tensor as it is now ("current scaling"). The scale of a tensor in
//! parts is the largest of the parts' scales (a factor that reduces by maximum), so a plan does not change what is
//! computed. The leading dimensions of an activation keep scales of their own, so no sample depends on another one,
//! however a batch is divided over ranks or microbatches.

use super::{OpDef, arity, dim_factors, dim_name, expect_float, expect_shape, single};
use crate::factor::FactorRule;
use crate::float8::{Format, SIDE};
use crate::sharding::ReduceKind;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// Per index of the leading dimensions, the smallest power of two by which the elements must be divided to be in
/// the range of an 8-bit float; from one operand, in f32. It grows with the largest element, so that of a
/// tensor in parts is the largest of the parts'. Elements that are not a number do not count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantizationScale {
    /// The 8-bit float.
    pub to: DType,
    /// How many leading dimensions have scales of their own.
    pub lead: usize,
}

/// From operands `x` and its scales: two results, `x` divided by its scale and rounded to nearest even in the
/// declared 8-bit float, and the same with the last two dimensions exchanged. Matrix units for 8-bit floats
/// want the summed index innermost in both operands, and each matrix is summed over either of its two; both sides
/// are divided in multiples of [`SIDE`] alone. What is
/// out of range becomes the largest number, what is not finite a NaN.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantize {}

/// The scale of a tensor whose largest absolute value is `largest`, a number that is at least 0.
pub fn scale_of(largest: f32, to: DType) -> f32 {
    let bits = largest.to_bits();
    // With more than 1.75 before the power of two, the next one is needed.
    let above = i32::from(bits & 0x007F_FFFF > 0x0060_0000);
    let exponent = (bits >> 23) as i32 - 127 - Format::of(to).map_or(0, |format| format.most) + above;
    f32::from_bits(((exponent.clamp(-126, 126) + 127) as u32) << 23)
}

fn expect_f8(ty: &TensorType) -> Result<(), String> {
    if Format::of(ty.dtype).is_some() { Ok(()) } else { Err(format!("makes 8-bit floats, not {ty}")) }
}

/// The factors of a side of a matrix in 8-bit floats: groups of [`SIDE`] indices, which may be divided, and the index
/// in a group, which may not, so that every part is one that matrix units take. `reduced` says that the one result
/// is summed over it.
pub(super) fn side_factors(rule: &mut FactorRule, name: &str, size: u64, reduced: bool) -> Vec<usize> {
    if size <= SIDE || !size.is_multiple_of(SIDE) {
        return vec![rule.whole(name, size)];
    }
    let groups = match reduced {
        true => rule.reduced(name, size / SIDE, 0, ReduceKind::Sum),
        false => rule.parallel(name, size / SIDE),
    };
    vec![groups, rule.whole(format!("{name}_in"), SIDE)]
}

/// The shape with its last two dimensions exchanged.
fn exchanged(shape: &[u64]) -> Vec<u64> {
    let mut shape = shape.to_vec();
    let rank = shape.len();
    shape.swap(rank - 2, rank - 1);
    shape
}

impl OpDef for QuantizationScale {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        let x = &operands[0];
        expect_float(x)?;
        expect_f8(&TensorType::scalar(self.to))?;
        if self.lead >= x.rank() {
            return Err(format!("{} leading dimensions of {x} leave none to scale", self.lead));
        }
        Ok(vec![TensorType::new(DType::F32, &x.shape[..self.lead])])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let shape = &operands[0].shape;
        let mut factors = dim_factors(&mut rule, &shape[..self.lead]);
        rule.results = vec![single(&factors)];
        for (dim, size) in shape.iter().enumerate().skip(self.lead) {
            factors.push(rule.reduced(dim_name(dim), *size, 0, ReduceKind::Max));
        }
        rule.operands = vec![single(&factors)];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(operands[0].elements() as f64)
    }
}

impl OpDef for Quantize {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        let (x, scale) = (&operands[0], &operands[1]);
        expect_float(x)?;
        if x.rank() < 2 || scale.rank() + 2 > x.rank() || scale.dtype != DType::F32 {
            return Err(format!("takes matrices and their scales in f32, not {x} and {scale}"));
        }
        expect_shape("the scale", scale, &x.shape[..scale.rank()])?;
        let [whole, ..] = declared else { return Err("needs its result types declared".to_string()) };
        expect_f8(whole)?;
        Ok(vec![x.with_dtype(whole.dtype), TensorType::new(whole.dtype, exchanged(&x.shape))])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let (leading, sides) = operands[0].shape.split_at(operands[0].rank() - 2);
        let mut dims = single(&dim_factors(&mut rule, leading));
        for (dim, size) in (leading.len()..).zip(sides) {
            dims.push(side_factors(&mut rule, &dim_name(dim), *size, false));
        }
        let mut swapped = dims.clone();
        swapped.swap(leading.len(), leading.len() + 1);
        rule.operands = vec![dims.clone(), dims[..operands[1].rank()].to_vec()];
        rule.results = vec![dims, swapped];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(operands[0].elements() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_the_least_power_of_two_that_fits() {
        for (to, largest) in [(DType::F8e4m3, 448.0), (DType::F8e5m2, 57344.0)] {
            for value in [1e-30f32, 0.013, 1.0, 1.75, 1.750001, 447.9, 448.0, 448.1, 57344.0, 1e30] {
                let scale = scale_of(value, to);
                assert_eq!(scale.to_bits() & 0x007F_FFFF, 0, "{scale} is no power of two");
                assert!(value / scale <= largest && value / (scale / 2.0) > largest, "{value}: {scale}");
            }
            assert!(scale_of(0.0, to) <= scale_of(f32::MIN_POSITIVE, to) && scale_of(0.0, to) > 0.0);
        }
    }
}
