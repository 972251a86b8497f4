//! One operation on several tensors, each by itself: what a device does in one launch.
//!
//! A step updates, scales and squares hundreds of small tensors, each in less time than a launch takes.
//! Lowering makes one instruction of them; no pass before it does.

use super::{Op, OpDef};
use crate::factor::FactorRule;
use crate::types::TensorType;
use crate::units::{Bytes, Flops};
use serde::{Deserialize, Serialize};

/// `op` on `count` items, independent of each other: the operands of the first, those of the second, …;
/// and so the results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Each {
    /// How many items; at least one.
    pub count: usize,
    /// What is done to each.
    pub op: Box<Op>,
}

impl Each {
    /// The operands, or the results, of each item.
    pub fn items<'a, T>(&self, all: &'a [T]) -> impl Iterator<Item = &'a [T]> {
        all.chunks(self.size_of(all.len()))
    }

    /// The same, to be written.
    pub fn items_mut<'a, T>(&self, all: &'a mut [T]) -> impl Iterator<Item = &'a mut [T]> {
        all.chunks_mut(self.size_of(all.len()))
    }

    /// How many of so many operands, or results, an item has.
    fn size_of(&self, all: usize) -> usize {
        (all / self.count.max(1)).max(1)
    }

    /// Whether, of so many operands and results, operand `operand` and result `result` are of one item.
    pub fn is_one_item(&self, [operands, results]: [usize; 2], [operand, result]: [usize; 2]) -> bool {
        operand / self.size_of(operands) == result / self.size_of(results)
    }
}

impl OpDef for Each {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        if !self.op.may_repeat() {
            return Err(format!("repeats no `{}`", self.op.name()));
        }
        if self.count == 0 || operands.is_empty() || !operands.len().is_multiple_of(self.count) {
            return Err(format!("has {} operands for {} items", operands.len(), self.count));
        }
        let mut results = Vec::new();
        let mut declared = self.items(declared);
        for (index, item) in self.items(operands).enumerate() {
            let made = self.op.infer(item, declared.next().unwrap_or_default());
            results.extend(made.map_err(|error| format!("item {index}: {error}"))?);
        }
        Ok(results)
    }

    /// The rules of the items beside each other.
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        for (index, (operands, results)) in self.items(operands).zip(self.items(results)).enumerate() {
            let item = self.op.rule(operands, results);
            let (first, first_result) = (rule.factors.len(), rule.results.len());
            for mut factor in item.factors {
                factor.name = format!("{}_{index}", factor.name);
                factor.reduce.iter_mut().for_each(|(result, _)| *result += first_result);
                rule.factors.push(factor);
            }
            let shift = |dims: Vec<Vec<usize>>| -> Vec<Vec<usize>> {
                dims.into_iter().map(|factors| factors.into_iter().map(|factor| factor + first).collect()).collect()
            };
            rule.operands.extend(item.operands.into_iter().map(shift));
            rule.results.extend(item.results.into_iter().map(shift));
        }
        rule
    }

    fn flops(&self, operands: &[TensorType], results: &[TensorType]) -> Flops {
        let items = self.items(operands).zip(self.items(results));
        Flops(items.map(|(operands, results)| self.op.flops(operands, results).0).sum())
    }

    fn bytes(&self, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        self.items(operands).zip(self.items(results)).map(|(operands, results)| self.op.bytes(operands, results)).sum()
    }

    fn may_overwrite(&self, operand: usize, operands: usize) -> bool {
        self.op.may_overwrite(operand % self.size_of(operands), self.size_of(operands))
    }
}
