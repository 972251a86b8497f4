//! A contraction of two tensors in 8-bit floats, each with its scales.

use super::matmul::size_of;
use super::quantize::side_factors;
use super::{Matmul, OpDef, arity, declared_one, expect_shape};
use crate::factor::{Dims, FactorRule};
use crate::float8::Format;
use crate::sharding::ReduceKind;
use crate::types::{DType, TensorType};
use crate::units::{Bytes, Flops};
use serde::{Deserialize, Serialize};

/// From operands `a` and `b` in 8-bit floats and their scales in f32, which are indexed by the leading dimensions
/// of each: the sum of the products of elements times scales, in the declared element type. The last index of
/// each operand is summed over, in the same place of both. The notation is that of [`Matmul`]. The last two indices of
/// either operand are divided in multiples of [`SIDE`](crate::float8::SIDE) alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScaledMatmul {
    /// The notation: one letter per index.
    pub spec: String,
}

/// How many there are of indices of these sizes.
fn count<'a>(sizes: impl Iterator<Item = &'a (char, u64)>) -> u64 {
    sizes.fold(1, |count, (_, size)| count.saturating_mul(*size))
}

impl ScaledMatmul {
    /// The same contraction without scales.
    pub fn product(&self) -> Matmul {
        Matmul::new(self.spec.clone())
    }

    /// The sizes of its products of two matrices, `[m, n, k]`, and how many they are: one per index of the letters
    /// before the last two of either operand, since those may have scales of their own.
    pub fn matrices(&self, operands: &[TensorType]) -> Result<([u64; 3], u64), String> {
        let (sizes, [a, b, _]) = (self.product().sizes(operands)?, self.product().letters()?);
        let (Some((_, of_a)), Some((_, of_b))) = (a.split_last(), b.split_last()) else {
            return Err(format!("`{}` is no product of matrices", self.spec));
        };
        let of = |letter: Option<&char>| letter.map_or(1, |letter| size_of(&sizes, *letter));
        let inner = [of_a.last(), of_b.last(), a.last()].map(of);
        let is_outer = |(letter, _): &&(char, u64)| {
            of_a.split_last().is_some_and(|(_, outer)| outer.contains(letter))
                || of_b.split_last().is_some_and(|(_, outer)| outer.contains(letter))
        };
        Ok((inner, count(sizes.iter().filter(is_outer))))
    }

    /// How many of these products are added up in each element of the result.
    fn terms(&self, operands: &[TensorType]) -> Result<u64, String> {
        let (sizes, [a, b, result]) = (self.product().sizes(operands)?, self.product().letters()?);
        let is_outer = |letter: &char| [&a, &b].iter().any(|of| of.iter().rev().skip(2).any(|own| own == letter));
        let is_summed = |(letter, _): &&(char, u64)| is_outer(letter) && !result.contains(letter);
        Ok(count(sizes.iter().filter(is_summed)))
    }

    /// The letters of the operands, the scales and the result.
    fn all_letters(&self, operands: &[TensorType]) -> Result<[Vec<char>; 5], String> {
        let [a, b, result] = self.product().letters()?;
        let lead = |letters: &[char], scale: usize| letters[..operands[scale].rank().min(letters.len())].to_vec();
        let scales = [lead(&a, 2), lead(&b, 3)];
        let [of_a, of_b] = scales;
        Ok([a, b, of_a, of_b, result])
    }
}

impl OpDef for ScaledMatmul {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 4)?;
        if let Some(other) = operands[..2].iter().find(|ty| Format::of(ty.dtype).is_none()) {
            return Err(format!("takes 8-bit floats, not {other}"));
        }
        let letters = self.product().letters()?;
        for (index, scale) in operands[2..].iter().enumerate() {
            let of = &operands[index];
            if scale.dtype != DType::F32 || scale.rank() + 2 > of.rank() {
                return Err(format!("the scale of {of} is {scale}; it must be f32 along its leading dimensions"));
            }
            expect_shape("the scale", scale, &of.shape[..scale.rank()])?;
        }
        let last = letters[0].last().filter(|letter| !letters[2].contains(letter));
        if last.is_none() || last != letters[1].last() {
            return Err(format!("`{}` does not sum over the last index of both operands", self.spec));
        }
        let sizes = self.product().sizes(operands)?;
        let size = |letter: &char| size_of(&sizes, *letter);
        let result = declared_one(declared)?;
        expect_shape("the result", &result, &letters[2].iter().map(size).collect::<Vec<_>>())?;
        if !result.dtype.is_float() || Format::of(result.dtype).is_some() {
            return Err(format!("sums in 16 or 32 bits, not in {result}"));
        }
        Ok(vec![result])
    }

    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let (Ok(letters), Ok(sizes)) = (self.all_letters(operands), self.product().sizes(operands)) else {
            return rule;
        };
        let is_side = |letter: &char| letters[..2].iter().any(|of| of.iter().rev().take(2).any(|own| own == letter));
        let mut factors = Vec::new();
        for (letter, size) in &sizes {
            let (name, reduced) = (letter.to_string(), !letters[4].contains(letter));
            factors.push(match (is_side(letter), reduced) {
                (true, reduced) => side_factors(&mut rule, &name, *size, reduced),
                (false, true) => vec![rule.reduced(name, *size, 0, ReduceKind::Sum)],
                (false, false) => vec![rule.parallel(name, *size)],
            });
        }
        let index = |letter: &char| sizes.iter().position(|(known, _)| known == letter).unwrap_or(0);
        let dims = |letters: &Vec<char>| letters.iter().map(|letter| factors[index(letter)].clone()).collect::<Dims>();
        rule.operands = letters[..4].iter().map(dims).collect();
        rule.results = vec![dims(&letters[4])];
        rule
    }

    fn flops(&self, operands: &[TensorType], results: &[TensorType]) -> Flops {
        self.product().flops(operands, results)
    }

    /// A result that is the sum of several products is written by each, and read by all but the first.
    fn bytes(&self, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        let moves = self.terms(operands).unwrap_or(1).max(1).saturating_mul(2) - 1;
        let read: Bytes = operands.iter().map(TensorType::bytes).sum();
        let written: Bytes = results.iter().map(TensorType::bytes).sum();
        read + written * moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Family, Mesh};
    use crate::ops::{Op, Quantize};

    fn weight_gradient(samples: u64, seq: u64, rows: u64) -> (Op, Vec<TensorType>, TensorType) {
        let a = TensorType::new(DType::F8e4m3, [samples, rows, seq]);
        let b = TensorType::new(DType::F8e5m2, [samples, 64, seq]);
        let scale = TensorType::new(DType::F32, [samples]);
        let result = TensorType::new(DType::F32, [rows, 64]);
        (ScaledMatmul { spec: "bks,bns->kn".into() }.into(), vec![a, b, scale.clone(), scale], result)
    }

    /// The extents over which some axis may divide a factor.
    fn extents(rule: &FactorRule, factor: &str) -> Vec<u64> {
        let factor = rule.find(factor).unwrap();
        let divides = |extent: &u64| {
            let mut mesh = Mesh::default();
            let axis = mesh.push(Family::Tensor, *extent);
            rule.choices(&Default::default(), axis, &mesh).contains(&crate::Choice::Factor(factor))
        };
        (2..=64).filter(divides).collect()
    }

    #[test]
    fn every_part_of_a_side_is_one_that_matrix_units_take() {
        let (op, operands, result) = weight_gradient(6, 48, 96);
        let rule = op.rule(&operands, std::slice::from_ref(&result));
        // 96 rows are six groups, a sequence of 48 three; samples are divided as they come.
        assert_eq!(extents(&rule, "k"), [2, 3, 6]);
        assert_eq!(extents(&rule, "s"), [3]);
        assert_eq!(extents(&rule, "b"), [2, 3, 6]);
        let [x, scale] = [TensorType::new(DType::Bf16, [6, 48, 96]), TensorType::new(DType::F32, [6])];
        let results = [x.with_dtype(DType::F8e4m3), TensorType::new(DType::F8e4m3, [6, 96, 48])];
        let rule = Op::from(Quantize {}).rule(&[x, scale], &results);
        assert_eq!(["i", "j", "k"].map(|factor| extents(&rule, factor)), [vec![2, 3, 6], vec![3], vec![2, 3, 6]]);
    }

    #[test]
    fn a_sum_over_samples_is_read_and_written_by_each() {
        let bytes = |samples: u64, seq: u64| {
            let (op, operands, result) = weight_gradient(samples, seq, 96);
            let read: u64 = operands.iter().map(|ty| ty.bytes().0).sum();
            (op.bytes(&operands, std::slice::from_ref(&result)).0 - read) / result.bytes().0
        };
        assert_eq!((bytes(1, 256), bytes(8, 32)), (1, 15));
        let op = Op::from(ScaledMatmul { spec: "bsk,nk->bsn".into() });
        let (a, b) = (TensorType::new(DType::F8e4m3, [8, 32, 64]), TensorType::new(DType::F8e4m3, [96, 64]));
        let operands = [a, b, TensorType::new(DType::F32, [8]), TensorType::scalar(DType::F32)];
        let result = TensorType::new(DType::Bf16, [8, 32, 96]);
        let once: u64 = operands.iter().chain([&result]).map(|ty| ty.bytes().0).sum();
        assert_eq!(op.bytes(&operands, &[result]).0, once);
    }
}
