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

impl Prepared<'_> {
    /// Seconds of one node of a class under a strategy, and what bounds it.
    pub fn seconds(&self, class: usize, strategy: &Strategy, on: Ground<'_>) -> (Seconds, Bound) {
        let (mut operands, results) = self.local_types(class, strategy, on.mesh);
        let machine = Machine::own(&on.cluster.device);
        let pass = Pass::of(self.role(class));
        let op = self.op(class);
        let Share { after, adds, .. } = self.emitted[class];
        if adds {
            operands.push(results[0].clone());
        }
        if let Some((region, operands)) = self.beside(class, &operands, &results) {
            return machine.beside(region, &operands, pass);
        }
        if !matches!(op, Op::Attention(_) | Op::AttentionGrad(_)) {
            let (alone, bound) = machine.seconds(op, &operands, &results, pass);
            let result = results.first().map_or(0.0, |ty| ty.bytes().0 as f64);
            return (Seconds(alone.0 + after * result / machine.bandwidth()), bound);
        }
        let ring = self.ring_axes(class, strategy);
        if ring.is_empty() {
            // Under a causal mask, the last part of the queries sees the most keys.
            let last = self.last_part(class, strategy, on.mesh);
            return machine.seconds(last.as_ref().unwrap_or(op), &operands, &results, pass);
        }
        let group = Group::new(on.mesh, &ring, on.cluster);
        let (step, bound) = machine.seconds(op, &operands, &results, pass);
        let first = usize::from(matches!(op, Op::AttentionGrad(_)));
        let sent = operands[first + 1..first + 3].iter().map(|ty| ty.bytes().0 as f64).sum();
        let attention = step.0 * group.size() as f64;
        let around = Ring { group, sent, merged: operands[first].elements() as f64, attention };
        (Seconds(attention + around.seconds(pass, machine, on.cluster)), bound)
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

    /// The operation of the rank with the last coordinates, if it depends on them.
    fn last_part(&self, class: usize, strategy: &Strategy, mesh: &Mesh) -> Option<Op> {
        let (node, rule) = (self.folded.classes[class].node, &self.rules[class]);
        let last: Vec<u64> = mesh.ids().map(|axis| mesh.size(axis) - 1).collect();
        let part = |(ty, sharding): (TensorType, Sharding)| {
            let slice = sharding.slice(&ty.shape, mesh, &last);
            Part { shape: ty.shape, slice }
        };
        let operands = self.graph.operand_types(node).into_iter().enumerate();
        let operands: Vec<Part> =
            operands.map(|(index, ty)| part((ty, rule.operand_sharding(index, strategy)))).collect();
        let results = self.graph.result_types(node).into_iter().enumerate();
        let results: Vec<Part> = results.map(|(index, ty)| part((ty, rule.result_sharding(index, strategy)))).collect();
        self.op(class).localize(&operands, &results)
    }
}
