//! How long steps take beside each other, where no device is known: by what they compute and move.
//!
//! The order in which stages meet is part of their programs, and programs do not depend on a cost model. Where
//! stages are unequal, or the parts of the backward pass are, an order that took all steps for equal would let
//! them wait at meetings that come too early or too late.

use super::order::{Lengths, Pass, Step};
use super::timeline::Durations;
use crate::cost::is_view;
use shardc_ir::{Graph, NodeId, OpDef, SecondaryMap, TensorType, ValueId};
use std::collections::BTreeMap;

/// Arithmetic operations that count as much as a byte that is read or written: a round number below the 153 (A100)
/// and 295 (H100) that the datasheets' rates in bf16 and of memory give, since nodes are summed one by one here and
/// fused ones move less. In fp32 or 8-bit formats the ratio is another; it decides the order of meetings alone, not
/// what a step is predicted to take.
const PER_BYTE: f64 = 100.0;

/// The effort of each pass of each chunk, in arithmetic operations; messages are free.
#[derive(Clone, Debug)]
pub struct Efforts(BTreeMap<(u32, Pass), f64>);

impl Efforts {
    /// Sums the nodes of each pass.
    pub fn new(graph: &Graph, passes: &SecondaryMap<NodeId, Option<(u32, Pass)>>) -> Self {
        let mut efforts = BTreeMap::new();
        let types =
            |values: &[ValueId]| values.iter().map(|value| graph.ty(*value).clone()).collect::<Vec<TensorType>>();
        for (id, node) in graph.nodes().filter(|(_, node)| !is_view(&node.op)) {
            let Some(pass) = passes[id] else { continue };
            let (operands, results) = (types(&node.operands), types(&node.results));
            let bytes = node.op.bytes(&operands, &results).0 as f64;
            *efforts.entry(pass).or_insert(0.0) += node.op.flops(&operands, &results).0 + PER_BYTE * bytes;
        }
        Self(efforts)
    }

    /// What the passes of all chunks but the first, which has no backward pass of its own, take beside each other.
    pub fn lengths(&self) -> Lengths {
        let all = |pass: Pass| {
            self.0.iter().filter(|((chunk, own), _)| *chunk > 0 && *own == pass).map(|(_, effort)| effort).sum::<f64>()
        };
        Lengths { forward: all(Pass::Forward), backward: all(Pass::Backward), weight: all(Pass::Weight) }
    }
}

impl Durations for Efforts {
    fn step(&self, step: Step) -> f64 {
        self.0.get(&(step.chunk, step.pass)).copied().unwrap_or(0.0)
    }

    fn message(&self, _: usize) -> f64 {
        0.0
    }
}
