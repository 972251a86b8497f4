//! More dimensions, or copies along them.

use super::{Gradient, GradientError, OpDef, arity, declared_one, dim_factors};
use crate::factor::{Dims, FactorRule};
use crate::types::TensorType;
use serde::{Deserialize, Serialize};

/// The operand copied into the declared shape: operand dimension `i` becomes result dimension
/// `dims[i]`, of the same size, or of any size if the operand's is 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Broadcast {
    /// Per operand dimension, the result dimension; increasing.
    pub dims: Vec<usize>,
}

impl OpDef for Broadcast {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        let (from, to) = (&operands[0], declared_one(declared)?);
        if from.dtype != to.dtype || self.dims.len() != from.rank() {
            return Err(format!("{from} with dims {:?} cannot become {to}", self.dims));
        }
        let increasing = self.dims.windows(2).all(|pair| pair[0] < pair[1]);
        let fits = self
            .dims
            .iter()
            .zip(&from.shape)
            .all(|(dim, size)| to.shape.get(*dim).is_some_and(|target| target == size || *size == 1));
        if !increasing || !fits {
            return Err(format!("{from} with dims {:?} cannot become {to}", self.dims));
        }
        Ok(vec![to])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let factors = dim_factors(&mut rule, &results[0].shape);
        let from: Dims = self
            .dims
            .iter()
            .zip(&operands[0].shape)
            .map(|(dim, size)| if *size == results[0].shape[*dim] { vec![factors[*dim]] } else { Vec::new() })
            .collect();
        rule.operands = vec![from];
        rule.results = vec![factors.iter().map(|factor| vec![*factor]).collect()];
        rule
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let dy = gradient.cotangent(0)?;
        let (from, to) = (gradient.operand_type(0), gradient.graph.ty(dy).clone());
        let kept = |dim: usize| {
            self.dims.iter().zip(&from.shape).any(|(to_dim, size)| *to_dim == dim && *size == to.shape[dim])
        };
        let dims: Vec<usize> = (0..to.rank()).filter(|dim| !kept(*dim)).collect();
        let dtype = gradient.summed_dtype(0);
        let sum = gradient.sum(dy, dims, dtype)?;
        let dx = gradient.reshape(sum, &from.shape)?;
        gradient.set(0, dx);
        Ok(())
    }
}
