//! The dimensions in another order.

use super::{Gradient, GradientError, OpDef, arity, dim_factors, single};
use crate::factor::FactorRule;
use crate::types::TensorType;
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// Result dimension `i` is operand dimension `permutation[i]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transpose {
    /// A permutation of the dimensions.
    pub permutation: Vec<usize>,
}

impl OpDef for Transpose {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        let mut sorted = self.permutation.clone();
        sorted.sort_unstable();
        if sorted != (0..operands[0].rank()).collect::<Vec<_>>() {
            return Err(format!("{:?} is not a permutation of the dimensions of {}", self.permutation, operands[0]));
        }
        let shape: Vec<u64> = self.permutation.iter().map(|dim| operands[0].shape[*dim]).collect();
        Ok(vec![operands[0].with_shape(shape)])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let factors = dim_factors(&mut rule, &operands[0].shape);
        rule.operands = vec![single(&factors)];
        rule.results = vec![self.permutation.iter().map(|dim| vec![factors[*dim]]).collect()];
        rule
    }
    fn flops(&self, _operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(0.0)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let dy = gradient.cotangent(0)?;
        let mut permutation = vec![0; self.permutation.len()];
        for (to, from) in self.permutation.iter().enumerate() {
            permutation[*from] = to;
        }
        let dx = gradient.add(Transpose { permutation }, &[dy], &[])?;
        gradient.set(0, dx);
        Ok(())
    }
}
