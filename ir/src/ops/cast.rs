//! Another element type.

use super::{Arithmetic, Gradient, GradientError, OpDef, arity, declared_one, elementwise_rule, expect_shape};
use crate::factor::FactorRule;
use crate::types::TensorType;
use serde::{Deserialize, Serialize};

/// The operand's elements, converted to the declared element type: floats round to nearest even,
/// floats to integers truncate, numbers to bool compare with zero.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cast {}

impl OpDef for Cast {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        let ty = declared_one(declared)?;
        expect_shape("the result", &ty, &operands[0].shape)?;
        Ok(vec![ty])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        // Terms of a sum may be widened one by one; narrowing them would round each.
        let (from, to) = (operands[0].dtype, results[0].dtype);
        let widens = from.is_float() && to.is_float() && from.size() <= to.size();
        let linear = if widens { vec![vec![0]] } else { Vec::new() };
        FactorRule { fills: true, ..elementwise_rule(operands, results, linear) }
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, dtype) = (gradient.cotangent(0)?, gradient.wanted_dtype(0));
        let dx = gradient.cast(dy, dtype)?;
        gradient.set(0, dx);
        Ok(())
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }

    fn may_repeat(&self) -> bool {
        true
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::AsIs
    }
}
