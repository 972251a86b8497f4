//! The cross-entropy of logits in two halves, so that the vocabulary may be divided.
//!
//! The loss of a row is `lse - picked`, where `lse` is the logarithm of the sum of exponentials of
//! its logits and `picked` the logit of its label. Over a divided vocabulary the first is a partial
//! log-sum-exp and the second a partial sum (the parallel cross-entropy of Shoeybi et al.,
//! "Megatron-LM", 2019, section 3).

use super::{
    Arithmetic, Gradient, GradientError, Op, OpDef, Part, arity, dim_name, expect_float, expect_shape, expect_start,
    expect_type, is_zero, single,
};
use crate::factor::FactorRule;
use crate::sharding::ReduceKind;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From operands `logits` `[…, v]` and integer `labels` `[…]`: `lse` and `picked` `[…]` in f32. A
/// label outside `start..start + v` (also a negative one, which marks an ignored row) picks 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossEntropy {
    /// The first vocabulary entry held here.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start: u64,
    /// The size of the vocabulary, if the logits are padded: entries from here on count for nothing,
    /// and their derivative is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<u64>,
}

/// From operands `logits`, `labels`, `lse`, and the cotangents of `lse` and `picked`:
/// `dlogits = softmax * dlse + onehot(label) * dpicked`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossEntropyGrad {
    /// The first vocabulary entry held here.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start: u64,
    /// The size of the vocabulary, if the logits are padded: entries from here on count for nothing,
    /// and their derivative is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<u64>,
}

/// How many of `columns` logits from entry `start` on are not padding.
pub fn live_columns(columns: u64, start: u64, classes: Option<u64>) -> u64 {
    classes.map_or(columns, |classes| classes.saturating_sub(start).min(columns))
}

fn check(start: u64, logits: &TensorType, labels: &TensorType) -> Result<TensorType, String> {
    expect_float(logits)?;
    expect_start("`start`", start)?;
    let Some((_, leading)) = logits.shape.split_last() else {
        return Err(format!("takes logits […, v], not {logits}"));
    };
    expect_shape("labels", labels, leading)?;
    if !labels.dtype.is_int() {
        return Err(format!("takes integer labels, not {labels}"));
    }
    Ok(TensorType::new(DType::F32, leading))
}

impl OpDef for CrossEntropy {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        let row = check(self.start, &operands[0], &operands[1])?;
        Ok(vec![row.clone(), row])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let (leading, v) = leading_and_vocabulary(&mut rule, &operands[0]);
        rule.factors[v].reduce = vec![(0, ReduceKind::LogSumExp), (1, ReduceKind::Sum)];
        let rows = single(&leading);
        rule.operands = vec![[rows.clone(), vec![vec![v]]].concat(), rows.clone()];
        rule.results = vec![rows.clone(), rows];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(4.0 * operands[0].elements() as f64)
    }
    fn localize(&self, operands: &[Part], _results: &[Part]) -> Option<Op> {
        Some(CrossEntropy { start: self.start + operands[0].slice.last()?.0, ..self.clone() }.into())
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (logits, labels, lse) = (gradient.operands[0], gradient.operands[1], gradient.results[0]);
        let (dlse, dpicked) = (gradient.cotangent(0)?, gradient.cotangent(1)?);
        let read = [logits, labels, lse, dlse, dpicked];
        let derivative = CrossEntropyGrad { start: self.start, classes: self.classes };
        let dlogits = gradient.add(derivative, &read, &[])?;
        gradient.set(0, dlogits);
        Ok(())
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::AsIs
    }
}

fn leading_and_vocabulary(rule: &mut FactorRule, logits: &TensorType) -> (Vec<usize>, usize) {
    let last = logits.rank() - 1;
    let leading = (0..last).map(|dim| rule.parallel(dim_name(dim), logits.shape[dim])).collect();
    let v = rule.parallel("v", logits.shape[last]);
    (leading, v)
}

impl OpDef for CrossEntropyGrad {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 5)?;
        let row = check(self.start, &operands[0], &operands[1])?;
        for (what, ty) in ["lse", "the cotangent of lse", "the cotangent of picked"].iter().zip(&operands[2..]) {
            expect_type(what, ty, &row)?;
        }
        Ok(vec![operands[0].clone()])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![3, 4]], ..FactorRule::default() };
        let (leading, v) = leading_and_vocabulary(&mut rule, &operands[0]);
        let rows = single(&leading);
        let logits = [rows.clone(), vec![vec![v]]].concat();
        rule.operands = vec![logits.clone(), rows.clone(), rows.clone(), rows.clone(), rows];
        rule.results = vec![logits];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(4.0 * operands[0].elements() as f64)
    }
    fn localize(&self, operands: &[Part], _results: &[Part]) -> Option<Op> {
        Some(CrossEntropyGrad { start: self.start + operands[0].slice.last()?.0, ..self.clone() }.into())
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }
}
