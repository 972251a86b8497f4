//! Several operations as one kernel: a region of a lowered section.
//!
//! Lowering makes regions for targets that have kernels for them ([`Target::fuses`](crate::Target::fuses));
//! graphs have none, so types and attributes in a region are those of one rank's part. What a region
//! computes is what its steps compute one after the other; values that no result names are never written.

use super::{Op, OpDef, arity};
use crate::entity::NodeId;
use crate::factor::{Dims, FactorRule};
use crate::types::TensorType;
use crate::units::Flops;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A region. Its values are numbered: first the operands, then the results of each step in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fused {
    /// The operations, each after those whose results it reads.
    pub steps: Vec<FusedStep>,
    /// Per result, the value it is; each the result of a step.
    pub results: Vec<usize>,
}

/// One operation of a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FusedStep {
    /// The operation; no leaf and no region.
    pub op: Op,
    /// The values it reads.
    pub operands: Vec<usize>,
    /// The types of its results.
    pub results: Vec<TensorType>,
    /// The node of the plan's graph it came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<NodeId>,
}

impl Fused {
    /// The type of every value, from those of the operands.
    pub fn values(&self, operands: &[TensorType]) -> Vec<TensorType> {
        operands.iter().chain(self.steps.iter().flat_map(|step| &step.results)).cloned().collect()
    }

    /// Whether its steps lie beside each other: none reads another, and all that they make are results.
    pub fn is_beside(&self) -> bool {
        let made: usize = self.steps.iter().map(|step| step.results.len()).sum();
        let operands = self.results.first().copied().unwrap_or(0);
        let reads_operands = |step: &FusedStep| step.operands.iter().all(|value| *value < operands);
        self.results.len() == made && self.steps.len() > 1 && self.steps.iter().all(reads_operands)
    }

    /// Whether it is products beside each other.
    pub fn is_products(&self) -> bool {
        self.is_beside() && self.steps.iter().all(|step| matches!(step.op, Op::Matmul(_)))
    }

    /// The names of the steps: `layer_norm_grad+add+reduce_sum`.
    pub fn steps_text(&self) -> String {
        self.steps.iter().map(|step| step.op.name()).collect::<Vec<_>>().join("+")
    }

    /// Each step with the types of its operands.
    fn typed_steps<'a>(
        &'a self,
        operands: &'a [TensorType],
    ) -> impl Iterator<Item = (&'a FusedStep, Vec<TensorType>)> + 'a {
        let values = self.values(operands);
        self.steps.iter().map(move |step| {
            let of = step.operands.iter().filter_map(|value| values.get(*value).cloned());
            (step, of.collect())
        })
    }

    fn check_step(&self, step: &FusedStep, values: &[TensorType]) -> Result<(), String> {
        let name = step.op.name();
        if step.op.is_leaf() || matches!(step.op, Op::Fused(_)) {
            return Err(format!("a region cannot hold {name}"));
        }
        let of = step.operands.iter().map(|value| values.get(*value).cloned());
        let of =
            of.collect::<Option<Vec<_>>>().ok_or_else(|| format!("{name} reads a value that is not made before"))?;
        let made = step.op.infer(&of, &step.results).map_err(|error| error.to_string())?;
        match made == step.results {
            true => Ok(()),
            false => Err(format!("{name} does not make the types that its step says")),
        }
    }
}

impl Fused {
    /// The values that every block of a kernel reads, where a region has so many operands: those that are copied along some
    /// dimension, scales and shifts of norms, and what such a value is made of element by element.
    fn shared(&self, operands: usize) -> BTreeSet<usize> {
        let mut shared = BTreeSet::new();
        let mut end = operands + self.steps.iter().map(|step| step.results.len()).sum::<usize>();
        for step in self.steps.iter().rev() {
            let results = end - step.results.len()..end;
            end = results.start;
            let (reads, is_shared) = (&step.operands, results.into_iter().any(|result| shared.contains(&result)));
            match &step.op {
                Op::Broadcast(_) => shared.extend(reads),
                Op::RmsNorm(_) | Op::LayerNorm(_) => shared.extend(&reads[1..]),
                // Behind the cotangent and what was normalized.
                Op::RmsNormGrad(_) | Op::LayerNormGrad(_) => shared.extend(&reads[2..]),
                op if is_shared && op.may_overwrite(0, reads.len()) => shared.extend(reads),
                _ => {}
            }
        }
        shared
    }
}

impl OpDef for Fused {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let mut values = operands.to_vec();
        for step in &self.steps {
            self.check_step(step, &values)?;
            values.extend(step.results.iter().cloned());
        }
        let read = |value: usize| self.steps.iter().any(|step| step.operands.contains(&value));
        if let Some(unread) = (0..operands.len()).find(|value| !read(*value)) {
            arity(operands, unread)?;
        }
        let is_twice = |(index, value): &(usize, &usize)| self.results[..*index].contains(value);
        if let Some((_, value)) = self.results.iter().enumerate().find(is_twice) {
            return Err(format!("value {value} is two results"));
        }
        let result = |value: &usize| match values.get(*value) {
            Some(ty) if *value >= operands.len() => Ok(ty.clone()),
            _ => Err(format!("result {value} is no result of a step")),
        };
        self.results.iter().map(result).collect()
    }

    /// Nothing of a region may be divided: it is made of parts already.
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let mut rule = FactorRule::default();
        let mut whole = |ty: &TensorType| -> Dims {
            let dims = ty.shape.iter().map(|size| {
                let name = format!("x{}", rule.factors.len());
                vec![rule.whole(name, *size)]
            });
            dims.collect()
        };
        let (operands, results) = (operands.iter().map(&mut whole).collect(), results.iter().map(&mut whole).collect());
        FactorRule { operands, results, ..rule }
    }

    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(self.typed_steps(operands).map(|(step, of)| step.op.flops(&of, &step.results).0).sum())
    }

    /// A product reads all of an operand before its result is whole; what every block of a kernel reads is read by some when
    /// others have written.
    fn may_overwrite(&self, operand: usize, operands: usize) -> bool {
        !self.is_products() && !self.shared(operands).contains(&operand)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Binary, BinaryKind, Input, Reduce, ReduceOp};
    use crate::types::DType;

    fn region() -> (Fused, TensorType) {
        let ty = TensorType::new(DType::Bf16, [4, 8]);
        let step = |op: Op, operands: &[usize], results: &[TensorType]| FusedStep {
            op,
            operands: operands.to_vec(),
            results: results.to_vec(),
            source: None,
        };
        let sum = TensorType::new(DType::F32, [8]);
        let steps = vec![
            step(Binary { kind: BinaryKind::Mul }.into(), &[0, 1], std::slice::from_ref(&ty)),
            step(Binary { kind: BinaryKind::Add }.into(), &[2, 0], std::slice::from_ref(&ty)),
            step(Reduce { kind: ReduceOp::Sum, dims: vec![0] }.into(), &[3], &[sum]),
        ];
        (Fused { steps, results: vec![3, 4] }, ty)
    }

    #[test]
    fn a_region_moves_its_operands_and_results_alone() {
        let (fused, ty) = region();
        let operands = [ty.clone(), ty.clone()];
        let results = fused.infer(&operands, &[]).expect("types");
        assert_eq!(results, [ty.clone(), TensorType::new(DType::F32, [8])]);
        assert_eq!(fused.bytes(&operands, &results).0, 3 * ty.bytes().0 + 32);
        assert_eq!(fused.steps_text(), "mul+add+reduce_sum");
        let text = serde_json::to_value(&fused).expect("JSON");
        assert_eq!(serde_json::from_value::<Fused>(text).expect("a region"), fused);
    }

    #[test]
    fn ill_formed_regions_are_refused() {
        let (fused, ty) = region();
        let refused = |change: fn(&mut Fused), operands: usize, expect: &str| {
            let mut broken = fused.clone();
            change(&mut broken);
            let found = broken.infer(&vec![ty.clone(); operands], &[]).expect_err(expect);
            assert!(found.contains(expect), "{found}");
        };
        refused(|region| region.steps[0].operands[1] = 0, 2, "takes");
        refused(|region| region.steps[0].operands[1] = 7, 2, "not made before");
        refused(|region| region.steps[1].results[0].shape = vec![8, 4], 2, "does not make the types");
        refused(|region| region.results.push(0), 2, "no result of a step");
        refused(|region| region.results.push(3), 2, "value 3 is two results");
        refused(|region| region.steps[0].op = Input { name: "x".to_string() }.into(), 2, "cannot hold input");
    }

    /// A scale that every row reads lies where no other row's statistic is written, however the two are shaped.
    #[test]
    fn what_all_rows_read_is_not_written_over() {
        use crate::ops::{Broadcast, LayerNorm};
        let (x, row) = (TensorType::new(DType::F32, [8, 8]), TensorType::new(DType::F32, [8]));
        let step = |op: Op, operands: &[usize], results: Vec<TensorType>| FusedStep {
            op,
            operands: operands.to_vec(),
            results,
            source: None,
        };
        // %0: x, %1: scale, %2: shift, %3: what the scale is made of, %4: a bias.
        let steps = vec![
            step(Binary { kind: BinaryKind::Add }.into(), &[1, 3], vec![row.clone()]),
            step(LayerNorm { eps: 1e-5 }.into(), &[0, 5, 2], vec![x.clone(), row.clone(), row.clone()]),
            step(Broadcast { dims: vec![1] }.into(), &[4], vec![x.clone()]),
            step(Binary { kind: BinaryKind::Add }.into(), &[6, 9], vec![x.clone()]),
        ];
        let fused = Fused { steps, results: vec![7, 8, 10] };
        let operands = [x, row.clone(), row.clone(), row.clone(), row];
        fused.infer(&operands, &[]).expect("types");
        let free: Vec<usize> = (0..operands.len()).filter(|operand| fused.may_overwrite(*operand, 5)).collect();
        assert_eq!(free, [0]);
    }
}
