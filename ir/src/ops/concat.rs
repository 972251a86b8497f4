//! Operands one after the other.

use super::{Gradient, GradientError, OpDef, Slice, dim_name, single};
use crate::factor::FactorRule;
use crate::types::TensorType;
use serde::{Deserialize, Serialize};

/// The operands along dimension `dim`; all other sizes are equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Concat {
    /// The dimension.
    pub dim: usize,
}

impl OpDef for Concat {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let Some(first) = operands.first().filter(|ty| self.dim < ty.rank()) else {
            return Err(format!("needs operands with a dimension {}", self.dim));
        };
        let mut shape = first.shape.clone();
        shape[self.dim] = 0;
        for ty in operands {
            let mut other = ty.shape.clone();
            if ty.dtype != first.dtype || ty.rank() != first.rank() {
                return Err(format!("operands {first} and {ty} differ"));
            }
            let size = std::mem::replace(&mut other[self.dim], first.shape[self.dim]);
            shape[self.dim] = shape[self.dim].saturating_add(size);
            if other != first.shape {
                return Err(format!("operands {first} and {ty} differ outside dimension {}", self.dim));
            }
        }
        Ok(vec![first.with_shape(shape)])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![(0..operands.len()).collect()], ..FactorRule::default() };
        let shared: Vec<usize> =
            results[0]
                .shape
                .iter()
                .enumerate()
                .map(|(dim, size)| {
                    if dim == self.dim { rule.whole(dim_name(dim), *size) } else { rule.parallel(dim_name(dim), *size) }
                })
                .collect();
        for (index, ty) in operands.iter().enumerate() {
            let mut own = shared.clone();
            own[self.dim] = rule.whole(format!("{}_{index}", dim_name(self.dim)), ty.shape[self.dim]);
            rule.operands.push(single(&own));
        }
        rule.results = vec![single(&shared)];
        rule
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let dy = gradient.cotangent(0)?;
        let mut first = 0;
        for index in 0..gradient.operands.len() {
            let part = gradient.operand_type(index);
            let (mut start, mut limit) = (vec![0; part.rank()], part.shape.clone());
            (start[self.dim], limit[self.dim]) = (first, first + part.shape[self.dim]);
            first = limit[self.dim];
            if gradient.needed[index] {
                let slice = gradient.add(Slice { start, limit }, &[dy], &[])?;
                gradient.set(index, slice);
            }
        }
        Ok(())
    }
}
