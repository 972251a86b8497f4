//! Rotary position embedding (Su et al., "RoFormer", 2021), in the half-split form of Llama.

use super::{
    Arithmetic, Gradient, GradientError, OpDef, arity, expect_float, expect_shape, expect_type, is_false, single,
};
use crate::factor::FactorRule;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From operands `x` `[b, s, h, d]`, `cos` and `sin` `[s, d/2]` in f32: with `x = (x1, x2)` split
/// in the middle of `d`, `(x1 cos - x2 sin, x2 cos + x1 sin)`. Computed in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rotary {
    /// Whether to turn the other way (`-sin`), which is the derivative.
    #[serde(default, skip_serializing_if = "is_false")]
    pub inverse: bool,
}

impl OpDef for Rotary {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 3)?;
        let (x, cos, sin) = (&operands[0], &operands[1], &operands[2]);
        expect_float(x)?;
        if x.rank() != 4 || x.shape[3] % 2 != 0 {
            return Err(format!("takes [b, s, h, d] with even d, not {x}"));
        }
        expect_type("sin", sin, cos)?;
        expect_shape("cos", cos, &[x.shape[1], x.shape[3] / 2])?;
        if cos.dtype != DType::F32 {
            return Err(format!("takes cos and sin in f32, not {cos}"));
        }
        Ok(vec![x.clone()])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let shape = &operands[0].shape;
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let (b, s, h) = (rule.parallel("b", shape[0]), rule.parallel("s", shape[1]), rule.parallel("h", shape[2]));
        let (d, half) = (rule.whole("d", shape[3]), rule.whole("half", shape[3] / 2));
        let table = vec![vec![s], vec![half]];
        rule.operands = vec![single(&[b, s, h, d]), table.clone(), table];
        rule.results = vec![single(&[b, s, h, d])];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(3.0 * operands[0].elements() as f64)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        if gradient.needed[1] || gradient.needed[2] {
            return Err(gradient.not_differentiable());
        }
        let (dy, cos, sin) = (gradient.cotangent(0)?, gradient.operands[1], gradient.operands[2]);
        let dx = gradient.add(Rotary { inverse: !self.inverse }, &[dy, cos, sin], &[])?;
        gradient.set(0, dx);
        Ok(())
    }

    fn may_overwrite(&self, operand: usize, _operands: usize) -> bool {
        operand == 0
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Narrow
    }
}
