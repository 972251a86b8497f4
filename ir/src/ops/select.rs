//! One operand or another, by a mask.

use super::{Gradient, GradientError, OpDef, arity, elementwise_rule, expect_shape, same_type};
use crate::factor::FactorRule;
use crate::types::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// `mask ? a : b`, elementwise, from operands `mask` (bool), `a` and `b`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Select {}

impl OpDef for Select {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 3)?;
        same_type(&operands[1..])?;
        if operands[0].dtype != DType::Bool {
            return Err(format!("the mask is {}; it must be bool", operands[0]));
        }
        expect_shape("the mask", &operands[0], &operands[1].shape)?;
        Ok(vec![operands[1].clone()])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        elementwise_rule(operands, results, vec![vec![1, 2]])
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (mask, dy) = (gradient.operands[0], gradient.cotangent(0)?);
        let zero = gradient.constant_like(dy, 0.0)?;
        for (index, sides) in [(1, [mask, dy, zero]), (2, [mask, zero, dy])] {
            if gradient.needed[index] {
                let part = gradient.add(Select {}, &sides, &[])?;
                gradient.set(index, part);
            }
        }
        Ok(())
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }
}
