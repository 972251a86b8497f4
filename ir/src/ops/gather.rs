//! Elements by index along a dimension, and the transpose of that.

use super::{Gradient, GradientError, OpDef, arity, declared_one, dim_name, expect_shape, single};
use crate::factor::FactorRule;
use crate::types::TensorType;
use crate::units::{Bytes, Flops};
use serde::{Deserialize, Serialize};

/// From operands `x` and integer `index` of the same rank, equal in all sizes but dimension `dim`:
/// `y[i, …, j, …] = x[i, …, index[i, …, j, …], …]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gather {
    /// The dimension.
    pub dim: usize,
}

/// From operands `dy` and integer `index` of one shape: the declared tensor of zeros, to which
/// each element of `dy` is added where `index` says along `dim`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScatterAdd {
    /// The dimension.
    pub dim: usize,
}

fn expect_index(dim: usize, whole: &TensorType, index: &TensorType) -> Result<(), String> {
    let equal = whole.rank() == index.rank()
        && (0..whole.rank()).all(|other| other == dim || whole.shape[other] == index.shape[other]);
    if dim >= whole.rank() || !equal || !index.dtype.is_int() {
        return Err(format!("index {index} does not fit dimension {dim} of {whole}"));
    }
    Ok(())
}

fn rule(dim: usize, whole: &TensorType, index: &TensorType) -> (FactorRule, Vec<usize>, Vec<usize>) {
    let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
    let mut of_whole = Vec::new();
    for (other, size) in whole.shape.iter().enumerate() {
        let name = dim_name(other);
        of_whole.push(if other == dim { rule.whole(name, *size) } else { rule.parallel(name, *size) });
    }
    let mut of_index = of_whole.clone();
    of_index[dim] = rule.parallel("index", index.shape[dim]);
    (rule, of_whole, of_index)
}

impl OpDef for Gather {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        expect_index(self.dim, &operands[0], &operands[1])?;
        Ok(vec![operands[0].with_shape(operands[1].shape.clone())])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let (mut rule, whole, index) = rule(self.dim, &operands[0], &operands[1]);
        rule.operands = vec![single(&whole), single(&index)];
        rule.results = vec![single(&index)];
        rule
    }
    fn flops(&self, _operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(0.0)
    }
    fn bytes(&self, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        operands[1].bytes() + results[0].bytes() * 2
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, index) = (gradient.cotangent(0)?, gradient.operands[1]);
        let whole = gradient.operand_type(0).with_dtype(gradient.wanted_dtype(0));
        let dx = gradient.add(ScatterAdd { dim: self.dim }, &[dy, index], &[whole])?;
        gradient.set(0, dx);
        Ok(())
    }
}

impl OpDef for ScatterAdd {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        let ty = declared_one(declared)?;
        expect_index(self.dim, &ty, &operands[1])?;
        expect_shape("the cotangent", &operands[0], &operands[1].shape)?;
        Ok(vec![ty])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let (mut rule, whole, index) = rule(self.dim, &results[0], &operands[1]);
        let reduced = index[self.dim];
        rule.factors[reduced].reduce.push((0, crate::sharding::ReduceKind::Sum));
        rule.operands = vec![single(&index), single(&index)];
        rule.results = vec![single(&whole)];
        rule
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, index) = (gradient.cotangent(0)?, gradient.operands[1]);
        let dx = gradient.add(Gather { dim: self.dim }, &[dy, index], &[])?;
        let dtype = gradient.operand_type(0).dtype;
        let dx = gradient.cast(dx, dtype)?;
        gradient.set(0, dx);
        Ok(())
    }
}
