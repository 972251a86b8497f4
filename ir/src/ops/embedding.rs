//! Rows of a table, and the gradient of the table.

use super::{Gradient, GradientError, Op, OpDef, Part, arity, declared_one, expect_shape, is_zero};
use crate::factor::FactorRule;
use crate::sharding::ReduceKind;
use crate::types::TensorType;
use crate::units::{Bytes, Flops};
use serde::{Deserialize, Serialize};

/// From operands `table` `[v, d]` and integer `ids` of any shape: `[…, d]`. A shard of the table
/// holds rows from `start`; an id outside it gives zeros.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Embedding {
    /// The first row held here.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start: u64,
}

/// From operands `dy` `[…, d]` and integer `ids`: the declared table gradient `[v, d]`, summed in
/// the declared element type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingGrad {
    /// The first row held here.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start: u64,
}

/// The factors shared by both: `v`, `d` and those of the ids.
fn factors(rule: &mut FactorRule, table: &TensorType, ids: &TensorType, forward: bool) -> (usize, usize, Vec<usize>) {
    let v = if forward {
        rule.reduced("v", table.shape[0], 0, ReduceKind::Sum)
    } else {
        rule.parallel("v", table.shape[0])
    };
    let d = rule.parallel("d", table.shape[1]);
    let id = |(index, size): (usize, &u64)| {
        let name = super::dim_name(index);
        if forward { rule.parallel(name, *size) } else { rule.reduced(name, *size, 0, ReduceKind::Sum) }
    };
    let ids = ids.shape.iter().enumerate().map(id).collect();
    (v, d, ids)
}

impl OpDef for Embedding {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        let (table, ids) = (&operands[0], &operands[1]);
        if table.rank() != 2 || !ids.dtype.is_int() {
            return Err(format!("takes a table [v, d] and integer ids, not {table} and {ids}"));
        }
        let mut shape = ids.shape.clone();
        shape.push(table.shape[1]);
        Ok(vec![table.with_shape(shape)])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let (v, d, ids) = factors(&mut rule, &operands[0], &operands[1], true);
        let ids = super::single(&ids);
        rule.operands = vec![vec![vec![v], vec![d]], ids.clone()];
        rule.results = vec![[ids, vec![vec![d]]].concat()];
        rule
    }
    fn flops(&self, _operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(0.0)
    }
    fn bytes(&self, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        operands[1].bytes() + results[0].bytes() * 2
    }
    fn localize(&self, operands: &[Part], _results: &[Part]) -> Option<Op> {
        Some(Embedding { start: self.start + operands[0].slice[0].0 }.into())
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, ids) = (gradient.cotangent(0)?, gradient.operands[1]);
        let table = gradient.operand_type(0).with_dtype(gradient.wanted_dtype(0));
        let dtable = gradient.add(EmbeddingGrad { start: self.start }, &[dy, ids], &[table])?;
        gradient.set(0, dtable);
        Ok(())
    }
}

impl OpDef for EmbeddingGrad {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        let (dy, ids, table) = (&operands[0], &operands[1], declared_one(declared)?);
        if table.rank() != 2 || !ids.dtype.is_int() {
            return Err(format!("makes a table [v, d] from integer ids, not {table} from {ids}"));
        }
        let mut shape = ids.shape.clone();
        shape.push(table.shape[1]);
        expect_shape("the cotangent", dy, &shape)?;
        Ok(vec![table])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let (v, d, ids) = factors(&mut rule, &results[0], &operands[1], false);
        let ids = super::single(&ids);
        rule.operands = vec![[ids.clone(), vec![vec![d]]].concat(), ids];
        rule.results = vec![vec![vec![v], vec![d]]];
        rule
    }
    fn localize(&self, _operands: &[Part], results: &[Part]) -> Option<Op> {
        Some(EmbeddingGrad { start: self.start + results[0].slice[0].0 }.into())
    }
}
