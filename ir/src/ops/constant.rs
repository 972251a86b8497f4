//! Values that the program makes from nothing.

use super::{Op, OpDef, Part, arity, declared_one, dim_factors, expect_start, is_zero, number, single};
use crate::factor::FactorRule;
use crate::types::TensorType;
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// One number in every element of the declared type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Constant {
    /// The number.
    #[serde(with = "number")]
    pub value: f64,
}

/// Given numbers, row-major, for small tables. Its type is declared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Literal {
    /// One number per element.
    #[serde(with = "number::each")]
    pub values: Vec<f64>,
}

/// The index along dimension `dim`, plus `start`, in every element of the declared type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iota {
    /// The dimension.
    pub dim: usize,
    /// The first index.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start: u64,
}

fn leafless_rule(results: &[TensorType]) -> FactorRule {
    let mut rule = FactorRule::default();
    let factors = dim_factors(&mut rule, &results[0].shape);
    rule.results = vec![single(&factors)];
    rule
}

impl OpDef for Constant {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 0)?;
        Ok(vec![declared_one(declared)?])
    }
    fn rule(&self, _operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        leafless_rule(results)
    }
    fn flops(&self, _operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(0.0)
    }
}

impl OpDef for Literal {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 0)?;
        let ty = declared_one(declared)?;
        if self.values.len() as u64 != ty.elements() {
            return Err(format!("{} numbers for {ty}", self.values.len()));
        }
        Ok(vec![ty])
    }
    fn rule(&self, _operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let shape = results[0].shape.iter().enumerate();
        let factors: Vec<_> = shape.map(|(index, size)| rule.whole(super::dim_name(index), *size)).collect();
        rule.results = vec![single(&factors)];
        rule
    }
}

impl OpDef for Iota {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 0)?;
        let ty = declared_one(declared)?;
        if self.dim >= ty.rank() {
            return Err(format!("dimension {} of {ty}", self.dim));
        }
        expect_start("`start`", self.start)?;
        Ok(vec![ty])
    }
    fn rule(&self, _operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        leafless_rule(results)
    }
    fn counts(&self, dim: usize, _operands: usize) -> bool {
        dim == self.dim
    }
    fn localize(&self, _operands: &[Part], results: &[Part]) -> Option<Op> {
        Some(Iota { dim: self.dim, start: self.start + results[0].slice[self.dim].0 }.into())
    }
}
