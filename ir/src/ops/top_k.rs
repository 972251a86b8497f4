//! The largest elements of every row: to which experts a token goes.

use super::{Gradient, GradientError, OpDef, ScatterAdd, arity, dim_name, single};
use crate::factor::FactorRule;
use crate::types::{DType, TensorType};
use serde::{Deserialize, Serialize};

/// From `x` `[…, e]`: the `k` largest elements of every row, the largest first and of equal ones the one
/// that comes first, and their indices in i64, both `[…, k]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopK {
    /// How many.
    pub k: u64,
}

impl OpDef for TopK {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        let x = &operands[0];
        let Some((row, leading)) = x.shape.split_last().filter(|_| x.dtype != DType::Bool) else {
            return Err(format!("takes rows of numbers, not {x}"));
        };
        if self.k == 0 || self.k > *row {
            return Err(format!("rows of {x} have no {} largest elements", self.k));
        }
        let values = x.with_shape([leading, &[self.k]].concat());
        Ok(vec![values.clone(), values.with_dtype(DType::I64)])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let (row, leading) = operands[0].shape.split_last().unwrap_or((&1, &[]));
        let leading: Vec<usize> =
            leading.iter().enumerate().map(|(dim, size)| rule.parallel(dim_name(dim), *size)).collect();
        let (whole, chosen) = (rule.whole("e", *row), rule.whole("top", self.k));
        let result = single(&[&leading[..], &[chosen]].concat());
        rule.operands = vec![single(&[&leading[..], &[whole]].concat())];
        rule.results = vec![result.clone(), result];
        rule
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, index) = (gradient.cotangent(0)?, gradient.results[1]);
        let whole = gradient.operand_type(0).with_dtype(gradient.wanted_dtype(0));
        let dim = whole.rank().saturating_sub(1);
        let dx = gradient.add(ScatterAdd { dim }, &[dy, index], &[whole])?;
        gradient.set(0, dx);
        Ok(())
    }

    fn has_kink(&self, _operands: &[TensorType]) -> bool {
        true
    }
}
