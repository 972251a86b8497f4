//! Running sums along a dimension: which place a token takes among those of its expert.

use super::{Arithmetic, Gradient, GradientError, OpDef, arity, dim_name, is_false, single};
use crate::factor::FactorRule;
use crate::types::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// `y[i, …, j, …] = x[i, …, 0, …] + … + x[i, …, j, …]`, or from the last element back to the `j`th.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cumsum {
    /// The dimension.
    pub dim: usize,
    /// Whether sums run from the end.
    #[serde(default, skip_serializing_if = "is_false")]
    pub reverse: bool,
}

impl OpDef for Cumsum {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        if self.dim >= operands[0].rank() || operands[0].dtype == DType::Bool {
            return Err(format!("cannot add {} up along dimension {}", operands[0], self.dim));
        }
        Ok(vec![operands[0].clone()])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let shape = operands[0].shape.iter().enumerate();
        let factor = |(dim, size): (usize, &u64)| {
            if dim == self.dim { rule.whole(dim_name(dim), *size) } else { rule.parallel(dim_name(dim), *size) }
        };
        let factors: Vec<usize> = shape.map(factor).collect();
        rule.operands = vec![single(&factors)];
        rule.results = vec![single(&factors)];
        rule
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let dy = gradient.cotangent(0)?;
        let dx = gradient.add(Cumsum { dim: self.dim, reverse: !self.reverse }, &[dy], &[])?;
        gradient.set(0, dx);
        Ok(())
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Wide
    }
}
