//! Layer normalization over the last dimension (Ba, Kiros and Hinton, 2016), and its derivative.

use super::softmax::rows;
use super::{Arithmetic, Gradient, GradientError, OpDef, arity, expect_float, expect_shape, expect_type, single};
use crate::factor::FactorRule;
use crate::sharding::ReduceKind;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From operands `x` `[…, d]`, `gamma` `[d]`, `beta` `[d]`: `y = (x - mean) * rstd * gamma + beta`,
/// and the row statistics `mean` and `rstd` `[…]` in f32, where `rstd = 1 / sqrt(var + eps)` with
/// the biased variance. Computed in f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    /// The number added to the variance.
    pub eps: f64,
}

/// From operands `dy`, `x`, `gamma`, `mean`, `rstd`: `dx`, and `dgamma` and `dbeta` in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerNormGrad {}

impl OpDef for LayerNorm {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 3)?;
        let x = &operands[0];
        expect_float(x)?;
        let Some((row, leading)) = x.shape.split_last() else {
            return Err(format!("needs a dimension to normalize, not {x}"));
        };
        expect_shape("gamma", &operands[1], &[*row])?;
        expect_type("beta", &operands[2], &operands[1])?;
        let statistic = TensorType::new(DType::F32, leading);
        Ok(vec![x.clone(), statistic.clone(), statistic])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let factors = rows(&mut rule, &operands[0].shape, "d");
        let (d, leading) = (vec![vec![factors[factors.len() - 1]]], single(&factors[..factors.len() - 1]));
        rule.operands = vec![single(&factors), d.clone(), d];
        rule.results = vec![single(&factors), leading.clone(), leading];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(8.0 * operands[0].elements() as f64)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        if gradient.cotangents[1].is_some() || gradient.cotangents[2].is_some() {
            return Err(gradient.not_differentiable());
        }
        let (dy, x, gamma) = (gradient.cotangent(0)?, gradient.operands[0], gradient.operands[1]);
        let (mean, rstd) = (gradient.results[1], gradient.results[2]);
        let parts = gradient.add_many(LayerNormGrad {}, &[dy, x, gamma, mean, rstd], &[])?;
        gradient.set_parts(&parts)?;
        Ok(())
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Narrow
    }
}

impl OpDef for LayerNormGrad {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 5)?;
        let (x, gamma) = (&operands[1], &operands[2]);
        expect_shape("the cotangent", &operands[0], &x.shape)?;
        let Some((row, leading)) = x.shape.split_last() else {
            return Err(format!("needs a dimension to normalize, not {x}"));
        };
        expect_shape("gamma", gamma, &[*row])?;
        let statistic = TensorType::new(DType::F32, leading);
        expect_type("the mean", &operands[3], &statistic)?;
        expect_type("the reciprocal deviation", &operands[4], &statistic)?;
        let weight = TensorType::new(DType::F32, [*row]);
        Ok(vec![x.clone(), weight.clone(), weight])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let factors = rows(&mut rule, &operands[1].shape, "d");
        for factor in &factors[..factors.len() - 1] {
            rule.factors[*factor].reduce = vec![(1, ReduceKind::Sum), (2, ReduceKind::Sum)];
        }
        let (d, leading) = (vec![vec![factors[factors.len() - 1]]], single(&factors[..factors.len() - 1]));
        rule.operands = vec![single(&factors), single(&factors), d.clone(), leading.clone(), leading];
        rule.results = vec![single(&factors), d.clone(), d];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(14.0 * operands[0].elements() as f64)
    }
}
