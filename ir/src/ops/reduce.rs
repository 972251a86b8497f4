//! Reductions over dimensions.

use super::{Arithmetic, BinaryKind, Compare, CompareKind, Gradient, GradientError, OpDef, arity, dim_name};
use crate::factor::FactorRule;
use crate::sharding::ReduceKind;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// Which reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// The sum.
    #[serde(rename = "reduce_sum")]
    Sum,
    /// The maximum.
    #[serde(rename = "reduce_max")]
    Max,
}

impl ReduceOp {
    /// The name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "reduce_sum",
            Self::Max => "reduce_max",
        }
    }

    /// The reduction of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Sum, Self::Max].into_iter().find(|kind| kind.name() == name)
    }
}

/// The operand reduced over some dimensions, which disappear. A sum may be declared with a wider
/// element type than its operand's, in which it is then computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduce {
    /// Which reduction.
    pub kind: ReduceOp,
    /// The dimensions, increasing.
    pub dims: Vec<usize>,
}

impl OpDef for Reduce {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        let ty = &operands[0];
        let increasing = self.dims.windows(2).all(|pair| pair[0] < pair[1]);
        if !increasing || self.dims.iter().any(|dim| *dim >= ty.rank()) || ty.dtype == DType::Bool {
            return Err(format!("cannot reduce dimensions {:?} of {ty}", self.dims));
        }
        let kept = (0..ty.rank()).filter(|dim| !self.dims.contains(dim)).map(|dim| ty.shape[dim]);
        Ok(vec![TensorType::new(super::float_or(declared, 0, ty.dtype), kept.collect::<Vec<_>>())])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let (kind, linear) = match self.kind {
            ReduceOp::Sum => (ReduceKind::Sum, vec![vec![0]]),
            ReduceOp::Max => (ReduceKind::Max, Vec::new()),
        };
        rule.linear = linear;
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for (dim, size) in operands[0].shape.iter().enumerate() {
            if self.dims.contains(&dim) {
                from.push(vec![rule.reduced(dim_name(dim), *size, 0, kind)]);
            } else {
                let factor = rule.parallel(dim_name(dim), *size);
                from.push(vec![factor]);
                to.push(vec![factor]);
            }
        }
        rule.operands = vec![from];
        rule.results = vec![to];
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(operands[0].elements() as f64)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (x, ty) = (gradient.operands[0], gradient.operand_type(0));
        let dy = gradient.cotangent(0)?;
        let dy = gradient.cast(dy, ty.dtype)?;
        let kept: Vec<usize> = (0..ty.rank()).filter(|dim| !self.dims.contains(dim)).collect();
        if self.kind == ReduceOp::Sum {
            let dx = gradient.broadcast(dy, kept, &ty.shape)?;
            gradient.set(0, dx);
            return Ok(());
        }
        // Elements that tie for the maximum share its cotangent equally.
        let y = gradient.results[0];
        let y = gradient.broadcast(y, kept.clone(), &ty.shape)?;
        let largest = gradient.add(Compare { kind: CompareKind::Eq }, &[x, y], &[])?;
        let largest = gradient.cast(largest, ty.dtype)?;
        let count = gradient.sum(largest, self.dims.clone(), ty.dtype)?;
        let share = gradient.binary(BinaryKind::Div, dy, count)?;
        let share = gradient.broadcast(share, kept, &ty.shape)?;
        let dx = gradient.binary(BinaryKind::Mul, largest, share)?;
        gradient.set(0, dx);
        Ok(())
    }

    fn arithmetic(&self, result: &TensorType) -> Arithmetic {
        match self.kind {
            _ if result.rank() == 0 => Arithmetic::AsIs,
            ReduceOp::Sum => Arithmetic::Sum,
            _ => Arithmetic::Follow,
        }
    }

    fn has_kink(&self, _operands: &[TensorType]) -> bool {
        self.kind == ReduceOp::Max
    }
}
