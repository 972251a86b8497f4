//! How long steps take beside each other: as the plan says, or by what they compute and move.
//!
//! The order in which stages meet is part of their programs. An order that took all steps for equally long would let
//! stages wait at meetings that come too early or too late, where chunks, the parts of the backward pass or the devices
//! of stages are unequal. A plan that was searched says how long its chunks and messages take. Programs know no cost
//! model, so for a plan that does not say it the operations and bytes of its nodes are counted.

use super::order::{Lengths, Pass};
use super::timeline::{Durations, Link};
use crate::cost::is_view;
use shardc_ir::pipeline::{Length, Schedule};
use shardc_ir::{NodeId, OpDef, Plan, SecondaryMap, TensorType, ValueId};

/// Arithmetic operations that count as much as a byte that is read or written: a round number below the 153 (A100)
/// and 295 (H100) that the datasheets' rates in bf16 and of memory give, since nodes are summed one by one here and
/// fused ones move less. In fp32 or 8-bit formats the ratio is another; it decides the order of meetings alone, not
/// what a step is predicted to take.
const PER_BYTE: f64 = 100.0;

/// By how much of its own time a message makes a step longer beside which it passes: what most profiles say that kernels
/// lose to collectives (`overlap_loss`). It decides the order of meetings alone.
const LOSS: f64 = 0.15;

/// How long the passes of each chunk take, and messages, in any unit.
#[derive(Clone, Debug)]
pub struct Efforts<'a> {
    schedule: Schedule,
    /// Per chunk, with the message between it and the chunk before.
    chunks: Vec<(Lengths, f64)>,
    links: &'a [Link],
}

impl<'a> Efforts<'a> {
    /// Of a plan's chunks, with what passes between them.
    pub fn new(plan: &Plan, passes: &SecondaryMap<NodeId, Option<(u32, Pass)>>, links: &'a [Link]) -> Self {
        let (schedule, said) = (plan.pipeline.schedule, &plan.pipeline.lengths);
        let of = |own: &Length| (Lengths::from(own), own.message as f64);
        let chunks = if said.is_empty() { counted(plan, passes) } else { said.iter().map(of).collect() };
        Self { schedule, chunks, links }
    }

    /// How long the parts of a microbatch are in a chunk.
    pub fn chunk(&self, chunk: u32) -> Lengths {
        self.chunks.get(chunk as usize).map_or(Lengths { forward: 0.0, backward: 0.0, weight: 0.0 }, |(own, _)| *own)
    }
}

/// Sums the nodes of each pass: arithmetic operations, and as many as their bytes count. Messages are free.
fn counted(plan: &Plan, passes: &SecondaryMap<NodeId, Option<(u32, Pass)>>) -> Vec<(Lengths, f64)> {
    let graph = &plan.graph;
    let none = (Lengths { forward: 0.0, backward: 0.0, weight: 0.0 }, 0.0);
    let mut chunks = vec![none; (plan.stages() * plan.pipeline.per_stage) as usize];
    let types = |values: &[ValueId]| values.iter().map(|value| graph.ty(*value).clone()).collect::<Vec<TensorType>>();
    for (id, node) in graph.nodes().filter(|(_, node)| !is_view(&node.op)) {
        let Some((chunk, pass)) = passes[id] else { continue };
        let Some((own, _)) = chunks.get_mut(chunk as usize) else { continue };
        let (operands, results) = (types(&node.operands), types(&node.results));
        let part = match pass {
            Pass::Forward => &mut own.forward,
            Pass::Backward => &mut own.backward,
            Pass::Weight => &mut own.weight,
        };
        *part += node.op.flops(&operands, &results).0 + PER_BYTE * node.op.bytes(&operands, &results).0 as f64;
    }
    chunks
}

impl Durations for Efforts<'_> {
    fn pass(&self, chunk: u32, pass: Pass) -> f64 {
        self.chunk(chunk).of(self.schedule, chunk, pass)
    }

    fn message(&self, link: usize) -> f64 {
        let Link { from, to } = self.links[link];
        self.chunks.get(from.0.max(to.0) as usize).map_or(0.0, |(_, message)| *message)
    }

    fn loss(&self) -> f64 {
        LOSS
    }
}
