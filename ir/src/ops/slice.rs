//! A contiguous part.

use super::{Gradient, GradientError, OpDef, Pad, arity, dim_name, single};
use crate::factor::FactorRule;
use crate::types::TensorType;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

/// Elements `start[i]..limit[i]` of each dimension `i`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// The first index per dimension.
    pub start: Vec<u64>,
    /// One past the last index per dimension.
    pub limit: Vec<u64>,
}

impl OpDef for Slice {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        let ty = &operands[0];
        let ranks = self.start.len() == ty.rank() && self.limit.len() == ty.rank();
        let inside = self
            .start
            .iter()
            .zip(&self.limit)
            .zip(&ty.shape)
            .all(|((start, limit), size)| start <= limit && limit <= size);
        if !ranks || !inside {
            return Err(format!("{:?}..{:?} is not inside {ty}", self.start, self.limit));
        }
        let shape: Vec<u64> = self.start.iter().zip(&self.limit).map(|(start, limit)| limit - start).collect();
        Ok(vec![ty.with_shape(shape)])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for (dim, (whole, part)) in operands[0].shape.iter().zip(&results[0].shape).enumerate() {
            if whole == part {
                let factor = rule.parallel(dim_name(dim), *whole);
                from.push(factor);
                to.push(factor);
            } else {
                from.push(rule.whole(dim_name(dim), *whole));
                to.push(rule.whole(format!("{}_part", dim_name(dim)), *part));
            }
        }
        rule.operands = vec![single(&from)];
        rule.results = vec![single(&to)];
        rule
    }
    /// Of the operand only what is kept is read.
    fn bytes(&self, _operands: &[TensorType], results: &[TensorType]) -> Bytes {
        results[0].bytes() * 2
    }
    /// A slice of a shard: dimensions that are cut are never divided, the others are taken whole.
    fn localize(&self, operands: &[super::Part], _results: &[super::Part]) -> Option<super::Op> {
        let part = &operands[0];
        let cut = |dim: usize| self.limit[dim] - self.start[dim] != part.shape[dim];
        let limit = (0..self.limit.len()).map(|dim| if cut(dim) { self.limit[dim] } else { part.slice[dim].1 });
        Some(Slice { start: self.start.clone(), limit: limit.collect() }.into())
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, whole) = (gradient.cotangent(0)?, gradient.operand_type(0));
        let high = whole.shape.iter().zip(&self.limit).map(|(size, limit)| size - limit).collect();
        let dx = gradient.add(Pad { low: self.start.clone(), high, value: 0.0 }, &[dy], &[])?;
        gradient.set(0, dx);
        Ok(())
    }
}
