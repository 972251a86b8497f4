//! SwiGLU's product (Shazeer, "GLU variants improve transformer", 2020), and its derivative.

use super::{Arithmetic, Gradient, GradientError, OpDef, arity, elementwise_rule, expect_float, same_type};
use crate::factor::FactorRule;
use crate::types::TensorType;
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From operands `gate` and `up` of one type: `gate * sigmoid(gate) * up`. Computed in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Swiglu {}

/// From operands `dy`, `gate`, `up`: `dgate` and `dup`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwigluGrad {}

impl OpDef for Swiglu {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        same_type(operands)?;
        expect_float(&operands[0])?;
        Ok(vec![operands[0].clone()])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        elementwise_rule(operands, results, vec![vec![1]])
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(5.0 * operands[0].elements() as f64)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, gate, up) = (gradient.cotangent(0)?, gradient.operands[0], gradient.operands[1]);
        let parts = gradient.add_many(SwigluGrad {}, &[dy, gate, up], &[])?;
        gradient.set_parts(&parts)?;
        Ok(())
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Narrow
    }
}

impl OpDef for SwigluGrad {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 3)?;
        same_type(operands)?;
        Ok(vec![operands[0].clone(), operands[0].clone()])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        elementwise_rule(operands, results, vec![vec![0]])
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(10.0 * operands[0].elements() as f64)
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }
}
