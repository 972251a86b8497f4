//! Softmax over the last dimension.

use super::{BinaryKind, Gradient, GradientError, OpDef, arity, dim_name, expect_float, single};
use crate::factor::FactorRule;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// `exp(x - max x) / sum exp(x - max x)` over the last dimension, computed in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Softmax {}

impl OpDef for Softmax {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        expect_float(&operands[0])?;
        if operands[0].rank() == 0 {
            return Err("needs a dimension to normalize".to_string());
        }
        Ok(vec![operands[0].clone()])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let factors = rows(&mut rule, &operands[0].shape, "d");
        rule.operands = vec![single(&factors)];
        rule.results = vec![single(&factors)];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(5.0 * operands[0].elements() as f64)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        // dx = y (dy - sum(y dy)), in f32.
        let (dy, y, ty) = (gradient.cotangent(0)?, gradient.results[0], gradient.operand_type(0));
        let (dy, y) = (gradient.cast(dy, DType::F32)?, gradient.cast(y, DType::F32)?);
        let last = ty.rank() - 1;
        let product = gradient.binary(BinaryKind::Mul, dy, y)?;
        let total = gradient.sum(product, vec![last], DType::F32)?;
        let total = gradient.broadcast(total, (0..last).collect(), &ty.shape)?;
        let centred = gradient.binary(BinaryKind::Sub, dy, total)?;
        let dx = gradient.binary(BinaryKind::Mul, y, centred)?;
        let dx = gradient.cast(dx, ty.dtype)?;
        gradient.set(0, dx);
        Ok(())
    }
}

/// The factors of an operation on rows: all dimensions parallel but the last, which is whole.
pub(super) fn rows(rule: &mut FactorRule, shape: &[u64], last: &str) -> Vec<usize> {
    let (row, leading) = (shape[shape.len() - 1], &shape[..shape.len() - 1]);
    let mut factors: Vec<usize> =
        leading.iter().enumerate().map(|(dim, size)| rule.parallel(dim_name(dim), *size)).collect();
    factors.push(rule.whole(last, row));
    factors
}
