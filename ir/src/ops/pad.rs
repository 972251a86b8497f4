//! More elements at the borders.

use super::{Gradient, GradientError, OpDef, Slice, arity, dim_name, number, single};
use crate::factor::FactorRule;
use crate::types::TensorType;
use serde::{Deserialize, Serialize};

/// `low[i]` elements before and `high[i]` after each dimension `i`, all equal to `value`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pad {
    /// How many elements before, per dimension.
    pub low: Vec<u64>,
    /// How many elements after, per dimension.
    pub high: Vec<u64>,
    /// The new elements.
    #[serde(with = "number")]
    pub value: f64,
}

impl OpDef for Pad {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        let ty = &operands[0];
        if self.low.len() != ty.rank() || self.high.len() != ty.rank() {
            return Err(format!("pads {} dimensions of {ty}", self.low.len()));
        }
        let borders = self.low.iter().zip(&self.high);
        let padded = |(size, (low, high)): (&u64, (&u64, &u64))| size.saturating_add(*low).saturating_add(*high);
        Ok(vec![ty.with_shape(ty.shape.iter().zip(borders).map(padded).collect::<Vec<u64>>())])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let linear = if self.value == 0.0 { vec![vec![0]] } else { Vec::new() };
        let mut rule = FactorRule { linear, ..FactorRule::default() };
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for (dim, (part, whole)) in operands[0].shape.iter().zip(&results[0].shape).enumerate() {
            if whole == part {
                let factor = rule.parallel(dim_name(dim), *whole);
                from.push(factor);
                to.push(factor);
            } else {
                from.push(rule.whole(format!("{}_part", dim_name(dim)), *part));
                to.push(rule.whole(dim_name(dim), *whole));
            }
        }
        rule.operands = vec![single(&from)];
        rule.results = vec![single(&to)];
        rule
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, part) = (gradient.cotangent(0)?, gradient.operand_type(0));
        let limit = part.shape.iter().zip(&self.low).map(|(size, low)| size + low).collect();
        let dx = gradient.add(Slice { start: self.low.clone(), limit }, &[dy], &[])?;
        gradient.set(0, dx);
        Ok(())
    }
}
