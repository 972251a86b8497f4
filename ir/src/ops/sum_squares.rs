//! The sum of the squares of all elements: a term of the global gradient norm.

use super::{Arithmetic, BinaryKind, Gradient, GradientError, OpDef, arity, dim_name, expect_float, single};
use crate::factor::FactorRule;
use crate::sharding::ReduceKind;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From one operand of any shape: an f32 scalar.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SumSquares {}

impl OpDef for SumSquares {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        expect_float(&operands[0])?;
        Ok(vec![TensorType::scalar(DType::F32)])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { fills: true, ..FactorRule::default() };
        let shape = operands[0].shape.iter().enumerate();
        let factors: Vec<_> = shape.map(|(dim, size)| rule.reduced(dim_name(dim), *size, 0, ReduceKind::Sum)).collect();
        rule.operands = vec![single(&factors)];
        rule.results = vec![Vec::new()];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(2.0 * operands[0].elements() as f64)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, x, ty) = (gradient.cotangent(0)?, gradient.operands[0], gradient.operand_type(0));
        let twice = gradient.scale(dy, 2.0)?;
        let twice = gradient.cast(twice, ty.dtype)?;
        let dx = gradient.binary(BinaryKind::Mul, x, twice)?;
        gradient.set(0, dx);
        Ok(())
    }

    fn may_repeat(&self) -> bool {
        true
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::AsIs
    }
}
