//! Scaled dot-product attention with grouped queries, and its derivative.
//!
//! Heads lie next to the head dimension (`[b, s, h, d]`), as projections make them, so no
//! transpose is needed. Query head `i` reads key/value head `i / (h / kv)` (Ainslie et al., "GQA",
//! 2023). The row statistic `lse` (log of the sum of exponentials of the scaled scores) is what the
//! backward pass needs to make the probabilities again (Dao et al., "FlashAttention", 2022).

use super::{Gradient, GradientError, OpDef, arity, expect_float, expect_shape, expect_type, is_false, single};
use crate::factor::{Dims, FactorRule};
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From operands `q` `[b, s, h, d]`, `k` `[b, t, kv, d]`, `v` `[b, t, kv, e]`: `o` `[b, s, h, e]`,
/// and `lse` `[b, h, s]` in f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// Whether query `i` sees keys `0..=i + t - s` only.
    #[serde(default, skip_serializing_if = "is_false")]
    pub causal: bool,
    /// The factor of the scores; `1 / sqrt(d)` as a rule.
    pub scale: f64,
}

/// From operands `do`, `q`, `k`, `v`, `o`, `lse`: `dq`, `dk`, `dv`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionGrad {
    /// As in the forward operation.
    #[serde(default, skip_serializing_if = "is_false")]
    pub causal: bool,
    /// As in the forward operation.
    pub scale: f64,
}

/// The sizes `b, s, h, d, t, kv, e`.
fn sizes(q: &TensorType, k: &TensorType, v: &TensorType) -> Result<[u64; 7], String> {
    let wrong =
        || format!("takes q [b, s, h, d], k [b, t, kv, d], v [b, t, kv, e] with kv dividing h, not {q}, {k}, {v}");
    for ty in [q, k, v] {
        expect_float(ty)?;
        if ty.rank() != 4 || ty.dtype != q.dtype {
            return Err(wrong());
        }
    }
    let [b, s, h, d] = [0, 1, 2, 3].map(|dim| q.shape[dim]);
    let (t, kv, e) = (k.shape[1], k.shape[2], v.shape[3]);
    if k.shape != [b, t, kv, d] || v.shape != [b, t, kv, e] || kv == 0 || h % kv != 0 {
        return Err(wrong());
    }
    Ok([b, s, h, d, t, kv, e])
}

/// The factors, and the dims of `q`, `k`, `v`, `o`, `lse`.
fn factors(rule: &mut FactorRule, q: &TensorType, k: &TensorType, v: &TensorType) -> [Dims; 5] {
    let [b, s, h, d, t, kv, e] = sizes(q, k, v).unwrap_or([1; 7]);
    let (b, kv, g) = (rule.parallel("b", b), rule.parallel("kv", kv), rule.parallel("g", h / kv));
    let (s, t, d, e) = (rule.whole("s", s), rule.whole("t", t), rule.whole("d", d), rule.whole("e", e));
    let heads = vec![kv, g];
    [
        vec![vec![b], vec![s], heads.clone(), vec![d]],
        single(&[b, t, kv, d]),
        single(&[b, t, kv, e]),
        vec![vec![b], vec![s], heads.clone(), vec![e]],
        vec![vec![b], heads, vec![s]],
    ]
}

/// Two matmuls over the scores; half of them if causal.
fn score_flops(operands: [&TensorType; 3], causal: bool) -> f64 {
    let [b, s, h, d, t, _, e] = sizes(operands[0], operands[1], operands[2]).unwrap_or([0; 7]).map(|size| size as f64);
    2.0 * b * h * s * t * (d + e) * if causal { 0.5 } else { 1.0 }
}

impl OpDef for Attention {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 3)?;
        let [b, s, h, _, _, _, e] = sizes(&operands[0], &operands[1], &operands[2])?;
        Ok(vec![operands[0].with_shape([b, s, h, e]), TensorType::new(DType::F32, [b, h, s])])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let [q, k, v, o, lse] = factors(&mut rule, &operands[0], &operands[1], &operands[2]);
        rule.operands = vec![q, k, v];
        rule.results = vec![o, lse];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(score_flops([&operands[0], &operands[1], &operands[2]], self.causal))
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        if gradient.cotangents[1].is_some() {
            return Err(gradient.not_differentiable());
        }
        let dy = gradient.cotangent(0)?;
        let read = [&[dy], gradient.operands.as_slice(), gradient.results.as_slice()].concat();
        let parts = gradient.add_many(AttentionGrad { causal: self.causal, scale: self.scale }, &read, &[])?;
        gradient.set_parts(&parts)?;
        Ok(())
    }
}

impl OpDef for AttentionGrad {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 6)?;
        let [b, s, h, _, _, _, e] = sizes(&operands[1], &operands[2], &operands[3])?;
        expect_shape("the cotangent", &operands[0], &[b, s, h, e])?;
        expect_shape("the result", &operands[4], &[b, s, h, e])?;
        expect_type("the row statistic", &operands[5], &TensorType::new(DType::F32, [b, h, s]))?;
        Ok(operands[1..4].to_vec())
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let [q, k, v, o, lse] = factors(&mut rule, &operands[1], &operands[2], &operands[3]);
        // Each group of query heads adds its part to the gradient of its key/value head.
        if let Some(g) = rule.find("g") {
            use crate::sharding::ReduceKind::Sum;
            rule.factors[g].reduce = vec![(1, Sum), (2, Sum)];
        }
        rule.operands = vec![o.clone(), q.clone(), k.clone(), v.clone(), o, lse];
        rule.results = vec![q, k, v];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(2.5 * score_flops([&operands[1], &operands[2], &operands[3]], self.causal))
    }
}
