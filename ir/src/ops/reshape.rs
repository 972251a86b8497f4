//! The same elements in another shape.

use super::{Gradient, GradientError, OpDef, arity, declared_one, dim_name};
use crate::factor::{Dims, FactorRule};
use crate::types::TensorType;
use crate::units::{Bytes, Flops};
use serde::{Deserialize, Serialize};

/// The operand's elements, row-major, in the declared shape. It moves nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reshape {}

impl OpDef for Reshape {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        let ty = declared_one(declared)?;
        if ty.dtype != operands[0].dtype || ty.elements() != operands[0].elements() {
            return Err(format!("{} cannot become {ty}", operands[0]));
        }
        Ok(vec![ty])
    }

    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let (from, to) = factorize(&mut rule, &operands[0].shape, &results[0].shape);
        rule.operands = vec![from];
        rule.results = vec![to];
        rule
    }
    fn flops(&self, _operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(0.0)
    }
    fn bytes(&self, _operands: &[TensorType], _results: &[TensorType]) -> Bytes {
        Bytes(0)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let dy = gradient.cotangent(0)?;
        let shape = gradient.operand_type(0).shape;
        let dx = gradient.reshape(dy, &shape)?;
        gradient.set(0, dx);
        Ok(())
    }
}

/// Cuts both shapes at their common boundaries: each piece is one factor, or, where one side's
/// boundary falls inside the other's dimension, several. A piece whose boundaries do not nest
/// becomes one factor that is whole on both sides.
fn factorize(rule: &mut FactorRule, from: &[u64], to: &[u64]) -> (Dims, Dims) {
    let (mut left, mut right) = (vec![Vec::new(); from.len()], vec![Vec::new(); to.len()]);
    let (mut i, mut j) = (0, 0);
    let (mut rest_i, mut rest_j) = (from.first().copied().unwrap_or(1), to.first().copied().unwrap_or(1));
    while i < from.len() && j < to.len() {
        if rest_i == 1 || rest_j == 1 {
            if rest_i == 1 {
                i += 1;
                rest_i = from.get(i).copied().unwrap_or(1);
            }
            if rest_j == 1 {
                j += 1;
                rest_j = to.get(j).copied().unwrap_or(1);
            }
            continue;
        }
        let name = dim_name(rule.factors.len());
        // Row-major: the outer piece of both dimensions is the smaller of the two, if it divides.
        let size = rest_i.min(rest_j);
        if size == 0 || rest_i % size != 0 || rest_j % size != 0 {
            return whole(rule, from, to);
        }
        let factor = rule.parallel(name, size);
        left[i].push(factor);
        right[j].push(factor);
        rest_i /= size;
        rest_j /= size;
    }
    (left, right)
}

/// The rule of a reshape whose boundaries do not nest: nothing can be divided.
fn whole(rule: &mut FactorRule, from: &[u64], to: &[u64]) -> (Dims, Dims) {
    rule.factors.clear();
    let mut dims = |shape: &[u64]| {
        shape.iter().map(|size| vec![rule.whole(dim_name(rule.factors.len()), *size)]).collect::<Dims>()
    };
    (dims(from), dims(to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    #[track_caller]
    fn check(from: &[u64], to: &[u64], expect: &str) {
        let (from, to) = (TensorType::new(DType::F32, from), TensorType::new(DType::F32, to));
        assert_eq!(Reshape {}.rule(&[from], &[to]).to_string(), expect);
    }

    #[test]
    fn rules() {
        check(&[4, 6, 8], &[24, 8], "(i,j,k)->((i j),k)");
        check(&[24, 8], &[4, 6, 8], "((i j),k)->(i,j,k)");
        check(&[4, 8], &[1, 4, 8, 1], "(i,j)->(1,i,j,1)");
        check(&[4, 6], &[8, 3], "(i,(j k))->((i j),k)");
        check(&[4, 6], &[3, 8], "(i,j)->(k,l)|whole i|whole j|whole k|whole l");
        check(&[2, 3, 4], &[6, 2, 2], "(i,j,(k l))->((i j),k,l)");
    }
}
