//! Scaled dot-product attention with grouped queries, and its derivative.
//!
//! Heads lie next to the head dimension (`[b, s, h, d]`), as projections make them, so no
//! transpose is needed. Query head `i` reads key/value head `i / (h / kv)` (Ainslie et al., "GQA",
//! 2023). The row statistic `lse` (log of the sum of exponentials of the scaled scores) is what the
//! backward pass needs to make the probabilities again (Dao et al., "FlashAttention", 2022).
//!
//! Queries may be divided: each rank then needs all keys and values, and adds its term to their
//! gradients. Where the keys are as many as the queries, both may be divided alike, and keys and values
//! go round a ring of the ranks (Liu et al., "Ring attention", 2023).
//!
//! Under a causal mask the last queries see the most keys. A rank that has early queries of one chunk of the sequence and
//! late ones of the next has as much to do as any other (the "zigzag" of Megatron-LM's context parallelism); so the
//! parts of a chunk's queries may lie in reverse order.
//!
//! A bias is added to the scaled scores. It has no derivative: it says which keys are seen (padding, the documents of
//! a packed sequence) or how far away they are (ALiBi). Where it is minus infinity for all keys of a query, the query's
//! result is not defined.

use super::{
    Arithmetic, Gradient, GradientError, Op, OpDef, Part, expect_float, expect_shape, expect_start, expect_type,
    is_false, number, single,
};
use crate::factor::{Dims, FactorRule};
use crate::sharding::ReduceKind;
use crate::types::{DType, TensorType};
use crate::units::{Bytes, Flops};
use serde::{Deserialize, Serialize};

/// From operands `q` `[b, s, h, d]`, `k` `[b, t, kv, d]`, `v` `[b, t, kv, e]` and, if scores have a bias, that
/// (`[b, h, s, t]` or 1 in the place of any of the first three): `o` `[b, s, h, e]`, and `lse` `[b, h, s]` in f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// Whether query `i` sees keys `0..=i + lead` only.
    #[serde(default, skip_serializing_if = "is_false")]
    pub causal: bool,
    /// The factor of the scores; `1 / sqrt(d)` as a rule.
    #[serde(with = "number")]
    pub scale: f64,
    /// How many keys come before that of the first query held here; `t - s` if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead: Option<i64>,
    /// In how many equal parts the queries lie, the last part first; in order if it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reversed: Option<u64>,
}

/// From operands `do`, `q`, `k`, `v`, `o`, `lse` and the bias, if there is one: `dq`, `dk`, `dv`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionGrad {
    /// As in the forward operation.
    #[serde(default, skip_serializing_if = "is_false")]
    pub causal: bool,
    /// As in the forward operation.
    #[serde(with = "number")]
    pub scale: f64,
    /// As in the forward operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lead: Option<i64>,
    /// As in the forward operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reversed: Option<u64>,
    /// Whether the same operands give the same bits every time. Then the derivative of all scores is written to memory
    /// instead of being added to `dq` in any order.
    #[serde(default, skip_serializing_if = "is_false")]
    pub deterministic: bool,
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

/// How many operands come before the bias, which may be left out.
fn arity(operands: &[TensorType], count: usize) -> Result<(), String> {
    match operands.len() {
        given if given == count || given == count + 1 => Ok(()),
        given => Err(format!("takes {count} operands, or {} with a bias, not {given}", count + 1)),
    }
}

/// Which keys the queries of an attention see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Whether queries see no keys behind their own.
    pub causal: bool,
    /// How many keys come before that of the first query.
    pub lead: Option<i64>,
    /// In how many equal parts the queries lie, the last part first.
    pub reversed: Option<u64>,
}

impl Mask {
    /// Checks how many keys come before the first of `queries`, and that their parts are equal.
    fn check(self, queries: u64) -> Result<(), String> {
        if let Some(parts) = self.reversed
            && (parts < 2 || !queries.is_multiple_of(parts))
        {
            return Err(format!(
                "`reversed` is {parts}; it must be a number of parts, two or more, that divides the {queries} queries"
            ));
        }
        self.lead.map_or(Ok(()), |lead| expect_start("the size of `lead`", lead.unsigned_abs()))
    }

    /// How many keys come before that of the first of `s` queries, of `t`.
    fn before(self, [s, t]: [u64; 2]) -> i64 {
        self.lead.unwrap_or(t as i64 - s as i64)
    }

    /// How many of `t` keys query `index` of `s` sees.
    pub fn seen(self, index: u64, [s, t]: [u64; 2]) -> u64 {
        if !self.causal {
            return t;
        }
        let place = self.reversed.map_or(index, |parts| {
            let size = s / parts;
            (parts - 1 - index / size) * size + index % size
        });
        (place as i64 + 1 + self.before([s, t])).clamp(0, t as i64) as u64
    }

    /// The share of the scores of `s` queries and `t` keys that are seen.
    fn share(self, [s, t]: [f64; 2]) -> f64 {
        match self.lead {
            _ if !self.causal => 1.0,
            None => 0.5,
            // Query `i` sees `i + lead + 1` keys; in the mean, about half of the queries more than the first.
            Some(lead) => ((lead as f64 + 0.5 * s) / t).clamp(0.0, 1.0),
        }
    }

    /// That of a part of the queries, where they are divided under a causal mask: of queries in reverse order, of some of
    /// their parts.
    fn local(self, q: &Part, k: &Part) -> Option<Self> {
        let ((first, queries), [s, t]) = (q.slice[1], [q.shape[1], k.shape[1]]);
        if !self.causal || queries == s {
            return None;
        }
        let place = if self.reversed.is_some() { s - first - queries } else { first };
        let parts = self.reversed.map(|parts| parts * queries / s);
        let lead = Some(self.before([s, t]) + place as i64);
        Some(Self { lead, reversed: parts.filter(|parts| *parts > 1), ..self })
    }
}

/// Checks the bias of scores between these queries, keys and values.
fn expect_bias(bias: Option<&TensorType>, [q, k, v]: [&TensorType; 3]) -> Result<(), String> {
    let Some(bias) = bias else { return Ok(()) };
    let [b, s, h, _, t, ..] = sizes(q, k, v)?;
    let fits = |(size, whole): (&u64, u64)| *size == whole || *size == 1;
    let is_ours = bias.rank() == 4 && bias.shape[3] == t && bias.shape.iter().zip([b, h, s, t]).all(fits);
    if !is_ours || bias.dtype != q.dtype {
        let dtype = q.dtype.name();
        return Err(format!("takes a bias {dtype}[{b} or 1, {h} or 1, {s} or 1, {t}], not {bias}"));
    }
    Ok(())
}

/// The factors of the bias's dimensions; one of size 1 that is read by all has none.
fn bias_dims(bias: &TensorType, rule: &FactorRule) -> Dims {
    let factors: [&[&str]; 4] = [&["b"], &["kv", "g"], &["s", "part"], &["t"]];
    let dims = factors.iter().zip(&bias.shape).map(|(names, size)| {
        let found: Vec<usize> = names.iter().filter_map(|name| rule.find(name)).collect();
        let whole: u64 = found.iter().map(|factor| rule.factors[*factor].size).product();
        if *size == whole { found } else { Vec::new() }
    });
    dims.collect()
}

/// The factors, and the dims of `q`, `k`, `v`, `o`, `lse`. Keys go round a ring without a bias alone; queries in reverse
/// order are divided into their parts.
fn factors(rule: &mut FactorRule, [q, k, v]: [&TensorType; 3], mask: Mask, is_biased: bool) -> [Dims; 5] {
    let [b, s, h, d, t, kv, e] = sizes(q, k, v).unwrap_or([1; 7]);
    let (b, kv, g) = (rule.parallel("b", b), rule.parallel("kv", kv), rule.parallel("g", h / kv));
    let is_self = s == t && !is_biased && mask.reversed.is_none();
    let queries = match mask.reversed {
        None => vec![rule.parallel("s", s)],
        Some(parts) => vec![rule.parallel("s", parts), rule.whole("part", s / parts.max(1))],
    };
    let t = if is_self { rule.ring("t", t, queries[0]) } else { rule.whole("t", t) };
    let (d, e) = (rule.whole("d", d), rule.whole("e", e));
    let heads = vec![kv, g];
    [
        vec![vec![b], queries.clone(), heads.clone(), vec![d]],
        single(&[b, t, kv, d]),
        single(&[b, t, kv, e]),
        vec![vec![b], queries.clone(), heads.clone(), vec![e]],
        vec![vec![b], heads, queries],
    ]
}

/// The scores of the keys that are seen.
fn scores(operands: [&TensorType; 3], mask: Mask) -> f64 {
    let [q, k, v] = operands;
    let [b, s, h, _, t, ..] = sizes(q, k, v).unwrap_or([0; 7]).map(|size| size as f64);
    b * h * s * t * mask.share([s, t])
}

/// Two matmuls over these.
fn score_flops(operands: [&TensorType; 3], mask: Mask) -> f64 {
    let [q, k, v] = operands;
    let [_, _, _, d, _, _, e] = sizes(q, k, v).unwrap_or([0; 7]).map(|size| size as f64);
    2.0 * scores(operands, mask) * (d + e)
}

impl Attention {
    /// Which keys the queries see.
    pub fn mask(&self) -> Mask {
        Mask { causal: self.causal, lead: self.lead, reversed: self.reversed }
    }
}

impl AttentionGrad {
    /// Which keys the queries see.
    pub fn mask(&self) -> Mask {
        Mask { causal: self.causal, lead: self.lead, reversed: self.reversed }
    }

    /// The bytes of the derivative of the scores that are seen, where it is written: once, and read once.
    pub fn written_scores(&self, operands: &[TensorType]) -> Bytes {
        let read = [&operands[1], &operands[2], &operands[3]];
        let bytes = scores(read, self.mask()) * operands[1].dtype.size() as f64;
        Bytes(if self.deterministic { bytes as u64 } else { 0 })
    }
}

impl OpDef for Attention {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 3)?;
        let [b, s, h, _, _, _, e] = sizes(&operands[0], &operands[1], &operands[2])?;
        self.mask().check(s)?;
        expect_bias(operands.get(3), [&operands[0], &operands[1], &operands[2]])?;
        Ok(vec![operands[0].with_shape([b, s, h, e]), TensorType::new(DType::F32, [b, h, s])])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let read = [&operands[0], &operands[1], &operands[2]];
        let [q, k, v, o, lse] = factors(&mut rule, read, self.mask(), operands.len() > 3);
        rule.operands = vec![q, k, v];
        rule.operands.extend(operands.get(3).map(|bias| bias_dims(bias, &rule)));
        rule.results = vec![o, lse];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(score_flops([&operands[0], &operands[1], &operands[2]], self.mask()))
    }
    fn localize(&self, operands: &[Part], _results: &[Part]) -> Option<Op> {
        let Mask { lead, reversed, .. } = self.mask().local(&operands[0], &operands[1])?;
        Some(Self { lead, reversed, ..self.clone() }.into())
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        if gradient.cotangents[1].is_some() || gradient.needed.get(3) == Some(&true) {
            return Err(gradient.not_differentiable());
        }
        let dy = gradient.cotangent(0)?;
        let (read, bias) = gradient.operands.split_at(3);
        let read = [&[dy], read, gradient.results.as_slice(), bias].concat();
        let Self { causal, scale, lead, reversed } = *self;
        let parts =
            gradient.add_many(AttentionGrad { causal, scale, lead, reversed, deterministic: false }, &read, &[])?;
        gradient.set_parts(&parts)?;
        Ok(())
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Narrow
    }
}

impl OpDef for AttentionGrad {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 6)?;
        let [b, s, h, _, _, _, e] = sizes(&operands[1], &operands[2], &operands[3])?;
        expect_shape("the cotangent", &operands[0], &[b, s, h, e])?;
        expect_shape("the result", &operands[4], &[b, s, h, e])?;
        expect_type("the row statistic", &operands[5], &TensorType::new(DType::F32, [b, h, s]))?;
        self.mask().check(s)?;
        expect_bias(operands.get(6), [&operands[1], &operands[2], &operands[3]])?;
        Ok(operands[1..4].to_vec())
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let read = [&operands[1], &operands[2], &operands[3]];
        let [q, k, v, o, lse] = factors(&mut rule, read, self.mask(), operands.len() > 6);
        // Each group of query heads, and each part of the queries, adds its term to the gradients of keys
        // and values.
        for factor in ["g", "s"].iter().filter_map(|name| rule.find(name)).collect::<Vec<_>>() {
            rule.factors[factor].reduce = vec![(1, ReduceKind::Sum), (2, ReduceKind::Sum)];
        }
        rule.operands = vec![o.clone(), q.clone(), k.clone(), v.clone(), o, lse];
        rule.operands.extend(operands.get(6).map(|bias| bias_dims(bias, &rule)));
        rule.results = vec![q, k, v];
        rule
    }
    fn localize(&self, operands: &[Part], _results: &[Part]) -> Option<Op> {
        let Mask { lead, reversed, .. } = self.mask().local(&operands[1], &operands[2])?;
        Some(Self { lead, reversed, ..self.clone() }.into())
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(2.5 * score_flops([&operands[1], &operands[2], &operands[3]], self.mask()))
    }
    fn bytes(&self, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        let read_once: Bytes = operands.iter().chain(results).map(TensorType::bytes).sum();
        read_once + self.written_scores(operands) * 2
    }
}
