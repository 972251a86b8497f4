//! Root-mean-square normalization over the last dimension (Zhang and Sennrich, 2019), and its
//! derivative.

use super::softmax::rows;
use super::{Arithmetic, Gradient, GradientError, OpDef, arity, expect_float, expect_shape, expect_type, single};
use crate::factor::FactorRule;
use crate::sharding::ReduceKind;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From operands `x` `[…, d]` and `gamma` `[d]`: `y = x * rstd * gamma`, and `rstd` `[…]` in f32,
/// where `rstd = 1 / sqrt(mean(x²) + eps)`. Computed in f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    /// The number added to the mean square.
    pub eps: f64,
}

/// From operands `dy`, `x`, `gamma`, `rstd`: `dx`, and `dgamma` in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmsNormGrad {}

impl OpDef for RmsNorm {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        let x = &operands[0];
        expect_float(x)?;
        let Some((row, leading)) = x.shape.split_last() else {
            return Err(format!("needs a dimension to normalize, not {x}"));
        };
        expect_shape("gamma", &operands[1], &[*row])?;
        Ok(vec![x.clone(), TensorType::new(DType::F32, leading)])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let factors = rows(&mut rule, &operands[0].shape, "d");
        rule.operands = vec![single(&factors), vec![vec![factors[factors.len() - 1]]]];
        rule.results = vec![single(&factors), single(&factors[..factors.len() - 1])];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(5.0 * operands[0].elements() as f64)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        if gradient.cotangents[1].is_some() {
            return Err(gradient.not_differentiable());
        }
        let (dy, x, gamma, rstd) =
            (gradient.cotangent(0)?, gradient.operands[0], gradient.operands[1], gradient.results[1]);
        let parts = gradient.add_many(RmsNormGrad {}, &[dy, x, gamma, rstd], &[])?;
        gradient.set_parts(&parts)?;
        Ok(())
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Narrow
    }
}

impl OpDef for RmsNormGrad {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 4)?;
        let (x, gamma) = (&operands[1], &operands[2]);
        expect_shape("the cotangent", &operands[0], &x.shape)?;
        let Some((row, leading)) = x.shape.split_last() else {
            return Err(format!("needs a dimension to normalize, not {x}"));
        };
        expect_shape("gamma", gamma, &[*row])?;
        expect_type("the reciprocal root mean square", &operands[3], &TensorType::new(DType::F32, leading))?;
        Ok(vec![x.clone(), TensorType::new(DType::F32, [*row])])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let factors = rows(&mut rule, &operands[1].shape, "d");
        for factor in &factors[..factors.len() - 1] {
            rule.factors[*factor].reduce = vec![(1, ReduceKind::Sum)];
        }
        let (d, leading) = (vec![vec![factors[factors.len() - 1]]], single(&factors[..factors.len() - 1]));
        rule.operands = vec![single(&factors), single(&factors), d.clone(), leading];
        rule.results = vec![single(&factors), d];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(10.0 * operands[0].elements() as f64)
    }
}
