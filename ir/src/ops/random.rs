//! Counter-based random numbers.
//!
//! Element `i` (row-major over the *global* shape) of stream `s` is a function of `(seed, s, i)`
//! and of the step, so every shard makes the same numbers whatever the plan. Where the batch is divided over time as
//! well, the first index is no attribute but data: the numbers of the samples come as an operand. The
//! generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
//! SC11): key `seed`, counter `(i / 4, s)`, lane `i % 4`.

use super::{Op, OpDef, Part, declared_one, dim_factors, expect_start, single};
use crate::factor::FactorRule;
use crate::types::TensorType;
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// What the numbers are distributed as.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// Normal.
    Normal {
        /// The mean.
        mean: f64,
        /// The standard deviation.
        std: f64,
    },
    /// Uniform over `[low, high)`.
    Uniform {
        /// The lower bound.
        low: f64,
        /// The upper bound.
        high: f64,
    },
    /// 1 with probability `p`, else 0.
    Bernoulli {
        /// The probability of 1.
        p: f64,
    },
}

/// Random numbers of the declared type. An optional scalar integer operand (the step) makes the
/// numbers differ from step to step; a vector of integers behind it says where in the global shape each row (index of the
/// first dimension) is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Random {
    /// The distribution.
    pub distribution: Distribution,
    /// The stream: unique to this node in its graph.
    pub stream: u64,
    /// The run's seed.
    pub seed: u64,
    /// The global shape, if this is a shard.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub global: Vec<u64>,
    /// The first index per dimension of this shard in the global shape.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub start: Vec<u64>,
}

impl OpDef for Random {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        match operands {
            [] => {}
            [step] | [step, _] if step.rank() == 0 && step.dtype.is_int() => {}
            _ => return Err("takes nothing, or an integer scalar, or that and the place of each row".to_string()),
        }
        let made = declared_one(declared)?;
        self.start.iter().try_for_each(|start| expect_start("`start`", *start))?;
        match operands.get(1) {
            Some(rows) if !rows.dtype.is_int() || made.rank() == 0 || rows.shape != made.shape[..1] => {
                Err(format!("takes an integer for each row of {made}, not {rows}"))
            }
            _ => Ok(vec![made]),
        }
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let factors = dim_factors(&mut rule, &results[0].shape);
        let of = |(index, _): (usize, &TensorType)| if index == 1 { single(&factors[..1]) } else { Vec::new() };
        rule.operands = operands.iter().enumerate().map(of).collect();
        rule.results = vec![single(&factors)];
        rule
    }
    fn flops(&self, _operands: &[TensorType], results: &[TensorType]) -> Flops {
        Flops(20.0 * results[0].elements() as f64)
    }
    fn counts(&self, dim: usize, operands: usize) -> bool {
        // The second operand says where rows are.
        dim > 0 || operands < 2
    }
    fn localize(&self, operands: &[Part], results: &[Part]) -> Option<Op> {
        let part = &results[0];
        let global = if self.global.is_empty() { part.shape.clone() } else { self.global.clone() };
        let own = |dim: usize| self.start.get(dim).copied().unwrap_or(0);
        let counts = |dim: usize| self.counts(dim, operands.len());
        let start = part.slice.iter().enumerate();
        let start = start.map(|(dim, (start, _))| if counts(dim) { own(dim) + start } else { 0 }).collect();
        Some(Random { global, start, ..self.clone() }.into())
    }
}
