//! Rows of a table, and the gradient of the table.

use super::{
    Arithmetic, Gradient, GradientError, Op, OpDef, Part, arity, declared_one, expect_shape, expect_start, expect_type,
    is_zero,
};
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
/// the declared element type; added to a third operand like it, if there is one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingGrad {
    /// The first row held here.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start: u64,
}

/// What becomes of the tokens: each has a row of the result, or is summed, or that as a whole.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tokens {
    Each,
    Summed,
    Whole,
}

/// The factors shared by both: `v`, `d` and those of the ids.
fn factors(rule: &mut FactorRule, table: &TensorType, ids: &TensorType, tokens: Tokens) -> (usize, usize, Vec<usize>) {
    let v = match tokens {
        Tokens::Each => rule.reduced("v", table.shape[0], 0, ReduceKind::Sum),
        Tokens::Summed | Tokens::Whole => rule.parallel("v", table.shape[0]),
    };
    let d = rule.parallel("d", table.shape[1]);
    let id = |(index, size): (usize, &u64)| {
        let name = super::dim_name(index);
        match tokens {
            Tokens::Each => rule.parallel(name, *size),
            Tokens::Summed => rule.reduced(name, *size, 0, ReduceKind::Sum),
            Tokens::Whole => rule.whole(name, *size),
        }
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
        expect_start("`start`", self.start)?;
        let mut shape = ids.shape.clone();
        shape.push(table.shape[1]);
        Ok(vec![table.with_shape(shape)])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule { linear: vec![vec![0]], ..FactorRule::default() };
        let (v, d, ids) = factors(&mut rule, &operands[0], &operands[1], Tokens::Each);
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

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Narrow
    }
}

impl OpDef for EmbeddingGrad {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(&operands[..operands.len().min(2)], 2)?;
        let (dy, ids, table) = (&operands[0], &operands[1], declared_one(declared)?);
        match &operands[2..] {
            [] => {}
            [summand] => expect_type("the summand", summand, &table)?,
            _ => return Err(format!("takes 2 operands and a summand, not {} operands", operands.len())),
        }
        if table.rank() != 2 || !ids.dtype.is_int() {
            return Err(format!("makes a table [v, d] from integer ids, not {table} from {ids}"));
        }
        expect_start("`start`", self.start)?;
        let mut shape = ids.shape.clone();
        shape.push(table.shape[1]);
        expect_shape("the cotangent", dy, &shape)?;
        Ok(vec![table])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let adds = self.addend(operands.len()).is_some();
        // Terms of the gradient need terms of what is added to them.
        let linear = if adds { vec![0, 2] } else { vec![0] };
        let mut rule = FactorRule { linear: vec![linear], ..FactorRule::default() };
        let tokens = if adds { Tokens::Whole } else { Tokens::Summed };
        let (v, d, ids) = factors(&mut rule, &results[0], &operands[1], tokens);
        let (ids, table) = (super::single(&ids), vec![vec![v], vec![d]]);
        rule.operands = vec![[ids.clone(), vec![vec![d]]].concat(), ids];
        rule.operands.extend(adds.then(|| table.clone()));
        rule.results = vec![table];
        rule
    }
    /// Of a summand the rows that tokens name, which are read and written.
    fn bytes(&self, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        let read = operands[0].bytes() + operands[1].bytes();
        let table = results[0].bytes();
        match operands.len() {
            2 => read + table,
            _ => {
                let rows = operands[1].elements().min(results[0].shape[0]);
                read + Bytes(2 * rows * results[0].shape[1] * results[0].dtype.size())
            }
        }
    }
    fn may_add(&self) -> bool {
        true
    }
    fn localize(&self, _operands: &[Part], results: &[Part]) -> Option<Op> {
        Some(EmbeddingGrad { start: self.start + results[0].slice[0].0 }.into())
    }
}
