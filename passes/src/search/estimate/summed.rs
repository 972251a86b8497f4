//! Gradients that are added up over microbatches by the instructions that make them, which take other times then.

use crate::cost::{Machine, Pass, is_product};
use crate::lower::accumulate::adds_itself;
use crate::shard::tensor::{Placed, Prepared};
use shardc_ir::ops::{BinaryKind, Op};
use shardc_ir::{Family, Graph, NodeId, OpDef, TensorType, ValueId};

/// What it takes to add whole gradients up over microbatches.
pub(in crate::search) struct Adding {
    /// Bytes of the gradients that no product makes, and how many there are.
    up: u64,
    count: u64,
    /// Bytes of the others, to which products add, and which they read for it.
    to: u64,
    /// Seconds that those of tables take less where they add the rows that tokens name to what was added up, and those
    /// that others take more where products that add are instructions of their own.
    rows: f64,
    alone: f64,
    /// Per class that makes gradients, the seconds of one of them, for each microbatch of a stage.
    each: Vec<f64>,
}

impl Adding {
    /// Of so many classes, none of which makes a gradient yet.
    pub fn new(classes: usize) -> Self {
        Self { up: 0, count: 0, to: 0, rows: 0.0, alone: 0.0, each: vec![0.0; classes] }
    }

    /// Adds the gradients that a class of updates reads, of so many bytes each.
    pub fn add(&mut self, prepared: &Prepared<'_>, placed: &Placed<'_>, (update, bytes): (usize, u64)) {
        let members = |class: usize| prepared.folded.classes[class].members.len() as u64;
        let (count, gradient) =
            (members(update), prepared.graph.node(prepared.folded.classes[update].node).operands[1]);
        let machine = Machine::own(&placed.cluster.device);
        let moved = bytes as f64 / machine.bandwidth();
        let seconds = if let Some(less) = rows(prepared, placed, gradient) {
            self.rows += less * count as f64;
            -less
        } else if adds_itself(prepared.graph, gradient) {
            let alone = alone(prepared, placed, gradient);
            self.to += bytes * count;
            self.alone += alone * count as f64;
            moved + alone
        } else {
            self.up += bytes * count;
            self.count += count;
            3.0 * moved + machine.launch()
        };
        let maker = prepared.folded.class[product_of(prepared.graph, gradient)];
        self.each[maker] += seconds * count as f64 / members(maker) as f64;
    }

    /// Seconds in which the gradient that one node of a class makes is added up over the microbatches of a stage, for
    /// each of them.
    pub fn each(&self, class: usize) -> f64 {
        self.each[class]
    }

    /// Seconds of a step: of memory, and of products that are instructions of their own for it.
    pub fn seconds(&self, placed: &Placed<'_>) -> [f64; 2] {
        if placed.microbatches == 1 {
            return [0.0; 2];
        }
        let (machine, microbatches) = (Machine::own(&placed.cluster.device), placed.microbatches as f64);
        // The first term of a sum reads nothing, but in a pipeline's order of microbatches.
        let reads = microbatches - if placed.mesh.degree(Family::Pipeline) > 1 { 0.0 } else { 1.0 };
        let bytes = 3.0 * self.up as f64 * microbatches + self.to as f64 * reads;
        let launches = self.count as f64 * machine.launch() * reads;
        [bytes / machine.bandwidth() + launches - self.rows * reads, self.alone * microbatches]
    }
}

/// Seconds that a gradient takes less which the derivative of a table alone makes, where it adds to what was added up:
/// only the rows that tokens name are touched then.
fn rows(prepared: &Prepared<'_>, placed: &Placed<'_>, gradient: ValueId) -> Option<f64> {
    let def = prepared.graph.value(gradient).def;
    let class = prepared.folded.class[def];
    let op = prepared.op(class);
    if !op.may_add() || is_product(op) {
        return None;
    }
    let machine = Machine::own(&placed.cluster.device);
    let (mut operands, results) = prepared.local_types(class, &placed.strategies[class], placed.mesh);
    let seconds = |operands: &[TensorType]| machine.seconds(op, operands, &results, Pass::Backward).0.0;
    let whole = seconds(&operands);
    operands.push(results[0].clone());
    Some(whole - seconds(&operands))
}

/// The node that makes a gradient, or what it is a part of; of a sum of several, the product that makes one of them.
fn product_of(graph: &Graph, gradient: ValueId) -> NodeId {
    let (id, node) = (graph.value(gradient).def, graph.def(gradient));
    match &node.op {
        Op::Slice(_) => product_of(graph, node.operands[0]),
        Op::Binary(op) if op.kind == BinaryKind::Add => {
            let mut terms = node.operands.iter().map(|term| product_of(graph, *term));
            terms.find(|term| is_product(&graph.node(*term).op)).unwrap_or(id)
        }
        _ => id,
    }
}

/// Seconds that a gradient takes longer than as one of several products that are one instruction: what adds to a
/// summand is an instruction of its own.
fn alone(prepared: &Prepared<'_>, placed: &Placed<'_>, gradient: ValueId) -> f64 {
    let class = prepared.folded.class[prepared.graph.value(gradient).def];
    let (op, strategy) = (prepared.op(class), &placed.strategies[class]);
    let (operands, results) = prepared.local_types(class, strategy, placed.mesh);
    if prepared.beside(class, &operands, &results).is_none() {
        return 0.0;
    }
    let alone = Machine::own(&placed.cluster.device).seconds(op, &operands, &results, Pass::Backward).0;
    alone.0 - placed.local(prepared, class, strategy).price.seconds.0
}
