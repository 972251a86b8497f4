//! A contraction of two tensors in 8-bit floats, each with its scales.

use super::matmul::size_of;
use super::{Matmul, OpDef, arity, declared_one, expect_shape};
use crate::factor::{Dims, FactorRule};
use crate::float8::Format;
use crate::sharding::ReduceKind;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From operands `a` and `b` in 8-bit floats and their scales in f32, which are indexed by the leading dimensions
/// of each: the sum of the products of elements times scales, in the declared element type. The last index of
/// each operand is summed over, in the same place of both. The notation is that of [`Matmul`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScaledMatmul {
    /// The notation: one letter per index.
    pub spec: String,
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
        Ok((inner, sizes.iter().filter(is_outer).map(|(_, size)| size).product()))
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
        for (letter, size) in &sizes {
            match letters[4].contains(letter) {
                true => rule.parallel(letter.to_string(), *size),
                false => rule.reduced(letter.to_string(), *size, 0, ReduceKind::Sum),
            };
        }
        let index = |letter: &char| sizes.iter().position(|(known, _)| known == letter).unwrap_or(0);
        let dims = |letters: &Vec<char>| letters.iter().map(|letter| vec![index(letter)]).collect::<Dims>();
        rule.operands = letters[..4].iter().map(dims).collect();
        rule.results = vec![dims(&letters[4])];
        rule
    }

    fn flops(&self, operands: &[TensorType], results: &[TensorType]) -> Flops {
        self.product().flops(operands, results)
    }
}
