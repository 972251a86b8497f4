//! The sum of any number of operands of one type: the terms of the global gradient norm.

use super::{Gradient, GradientError, OpDef, elementwise_rule, expect_float, same_type};
use crate::factor::FactorRule;
use crate::types::TensorType;
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// `a + b + …`, in the order of the operands, of which there is at least one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Total {}

impl OpDef for Total {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let first = operands.first().ok_or("takes at least one operand")?;
        expect_float(first)?;
        same_type(operands)?;
        Ok(vec![first.clone()])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        elementwise_rule(operands, results, vec![(0..operands.len()).collect()])
    }
    fn flops(&self, operands: &[TensorType], results: &[TensorType]) -> Flops {
        Flops(operands.len().saturating_sub(1) as f64 * results[0].elements() as f64)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let dy = gradient.cotangent(0)?;
        for index in 0..gradient.operands.len() {
            if gradient.needed[index] {
                gradient.set(index, dy);
            }
        }
        Ok(())
    }
}
