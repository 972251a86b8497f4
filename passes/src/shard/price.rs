//! What a node costs the rank that has the most to do.

use super::share::Share;
use super::tensor::Prepared;
use crate::cluster::Cluster;
use crate::cost::collective::Group;
use crate::cost::node::beside;
use crate::cost::ring::Ring;
use crate::cost::{Bound, Machine, Pass};
use shardc_ir::ops::{Fused, Op, Part};
use shardc_ir::{AxisId, FactorKind, Mesh, OpDef, Seconds, Sharding, Strategy, TensorType};

/// The mesh and what it lies on.
#[derive(Clone, Copy)]
pub struct Ground<'a> {
    /// The mesh.
    pub mesh: &'a Mesh,
    /// The cluster.
    pub cluster: &'a Cluster,
}

/// What a node takes.
#[derive(Clone, Copy, Debug)]
pub struct Price {
    /// Seconds alone.
    pub seconds: Seconds,
    /// What bounds them.
    pub bound: Bound,
    /// By how many seconds the last rank takes longer where the tokens are not in chunks that make ranks equal
    /// ([`split_batch`](crate::split_batch)).
    pub uneven: f64,
}

impl From<(Seconds, Bound)> for Price {
    fn from((seconds, bound): (Seconds, Bound)) -> Self {
        Self { seconds, bound, uneven: 0.0 }
    }
}

/// An operation, with the types of its operands and of its results.
type Node = (Op, Vec<TensorType>, Vec<TensorType>);

impl Prepared<'_> {
    /// What one node of a class takes under a strategy.
    pub fn price(&self, class: usize, strategy: &Strategy, on: Ground<'_>) -> Price {
        let (mut operands, results) = self.local_types(class, strategy, on.mesh);
        let machine = Machine::own(&on.cluster.device);
        let pass = Pass::of(self.role(class));
        let op = self.op(class);
        let Share { after, adds, .. } = self.emitted[class];
        if adds {
            operands.push(results[0].clone());
        }
        if let Some((region, operands)) = self.beside(class, &operands, &results) {
            return machine.beside(region, &operands, pass).into();
        }
        if !matches!(op, Op::Attention(_) | Op::AttentionGrad(_)) {
            let (alone, bound) = machine.seconds(op, &operands, &results, pass);
            let result = results.first().map_or(0.0, |ty| ty.bytes().0 as f64);
            return (Seconds(alone.0 + after * result / machine.bandwidth()), bound).into();
        }
        let ring = self.ring_axes(class, strategy);
        if ring.is_empty() {
            // Under a causal mask, the last part of the queries sees the most keys.
            let parts = self.parts(class, strategy, ("s", on.mesh));
            let last = self.part_of_queries(class, strategy, (on.mesh, parts, parts - 1));
            let whole = last.map_or_else(
                || machine.seconds(op, &operands, &results, pass),
                |(op, operands, results)| machine.seconds(&op, &operands, &results, pass),
            );
            return self.even(class, strategy, on).filter(|even| *even < whole.0.0).map_or(whole.into(), |even| {
                Price { seconds: Seconds(even), bound: whole.1, uneven: whole.0.0 - even }
            });
        }
        let group = Group::new(on.mesh, &ring, on.cluster);
        let (step, bound) = machine.seconds(op, &operands, &results, pass);
        let first = usize::from(matches!(op, Op::AttentionGrad(_)));
        let sent = operands[first + 1..first + 3].iter().map(|ty| ty.bytes().0 as f64).sum();
        let attention = step.0 * group.size() as f64;
        let around = Ring { group, sent, merged: operands[first].elements() as f64, attention };
        (Seconds(attention + around.seconds(pass, machine, on.cluster)), bound).into()
    }

    /// Seconds of attention in two chunks of the tokens of a single sample, of which a rank has the first part of the
    /// queries of one and the last of the other; none where no mask makes them uneven, or they do not divide so.
    fn even(&self, class: usize, strategy: &Strategy, on: Ground<'_>) -> Option<f64> {
        let (machine, pass) = (Machine::own(&on.cluster.device), Pass::of(self.role(class)));
        let rule = &self.rules[class];
        let size = |name: &str| rule.find(name).map(|factor| rule.factors[factor].size);
        let parts = 2 * self.parts(class, strategy, ("s", on.mesh));
        let is_alone = size("b")? == self.parts(class, strategy, ("b", on.mesh));
        if !is_alone || parts < 4 || !size("s")?.is_multiple_of(parts) {
            return None;
        }
        let part = |index: u64| {
            let (op, operands, results) = self.part_of_queries(class, strategy, (on.mesh, parts, index))?;
            Some(machine.seconds(&op, &operands, &results, pass).0.0)
        };
        Some(part(0)? + part(parts - 1)?)
    }

    /// The products that are one instruction with one of a class, on what one rank sees, and what they read; nothing, if
    /// that is an instruction of its own.
    pub fn beside(
        &self,
        class: usize,
        operands: &[TensorType],
        results: &[TensorType],
    ) -> Option<(Fused, Vec<TensorType>)> {
        let Op::Matmul(op) = self.op(class) else { return None };
        let of = |count: usize| beside(op, count, operands, results);
        (2..=self.emitted[class].beside).rev().map(of).find(|(region, all)| self.target.fuses(region, all))
    }

    /// The axes that a node passes its operands round.
    fn ring_axes(&self, class: usize, strategy: &Strategy) -> Vec<AxisId> {
        let rule = &self.rules[class];
        let is_ring = |factor: &usize| matches!(rule.factors[*factor].kind, FactorKind::Ring { .. });
        strategy.factors.iter().filter(|(factor, _)| is_ring(factor)).flat_map(|(_, axes)| axes.clone()).collect()
    }

    /// Into how many parts ranks and microbatches divide a factor of this name.
    fn parts(&self, class: usize, strategy: &Strategy, (name, mesh): (&str, &Mesh)) -> u64 {
        let rule = &self.rules[class];
        rule.find(name).map_or(1, |factor| mesh.extent(rule.axes(factor, strategy)))
    }

    /// What attention is to a rank that has one of so many equal parts of the queries, the last coordinates of everything
    /// else; none if it depends on neither.
    fn part_of_queries(
        &self,
        class: usize,
        strategy: &Strategy,
        (mesh, parts, index): (&Mesh, u64, u64),
    ) -> Option<Node> {
        let (node, rule) = (self.folded.classes[class].node, &self.rules[class]);
        let queries = rule.find("s")?;
        let last: Vec<u64> = mesh.ids().map(|axis| mesh.size(axis) - 1).collect();
        let part = |(ty, (layout, dims)): (TensorType, (Sharding, &Vec<Vec<usize>>))| {
            let mut slice = layout.slice(&ty.shape, mesh, &last);
            for (slice, _) in slice.iter_mut().zip(dims).filter(|(_, factors)| factors.contains(&queries)) {
                let size = rule.factors[queries].size / parts;
                *slice = (index * size, size);
            }
            Part { shape: ty.shape, slice }
        };
        let local = |types: &[TensorType], parts: &[Part]| -> Vec<TensorType> {
            let shape = |part: &Part| part.slice.iter().map(|(_, length)| *length).collect::<Vec<u64>>();
            types.iter().zip(parts).map(|(ty, part)| ty.with_shape(shape(part))).collect()
        };
        let [reads, makes] = [self.graph.operand_types(node), self.graph.result_types(node)];
        let layouts = |index| (rule.operand_sharding(index, strategy), &rule.operands[index]);
        let operands: Vec<Part> =
            reads.iter().cloned().enumerate().map(|(index, ty)| part((ty, layouts(index)))).collect();
        let layouts = |index| (rule.result_sharding(index, strategy), &rule.results[index]);
        let results: Vec<Part> =
            makes.iter().cloned().enumerate().map(|(index, ty)| part((ty, layouts(index)))).collect();
        let op = self.op(class).localize(&operands, &results)?;
        Some((op, local(&reads, &operands), local(&makes, &results)))
    }
}
