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

    /// A product reads all of an operand before its result is whole.
    fn may_overwrite(&self, _operand: usize) -> bool {
        !self.is_products()
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
}
