//! What lowering makes of each node of a graph, so that the search can price plans before it lowers them.
//!
//! The graph is drafted on one device, and fused as lowering would fuse it. From that the search knows, node by node,
//! how many kernels are launched, what they move beyond what the operation says, and which nodes share an instruction.
//! A sum that a product makes costs what the product reads for it. Where the product's result is converted to another
//! layout first, the sum is a kernel of its own.

use super::draft::Draft;
use super::{
    draft_rank, early::is_small, early::make_early, fuse::fuse, merge_casts, merge_repeated, share_parts,
    siblings::join_siblings,
};
use crate::cost::Library;
use crate::cost::is_product;
use crate::cost::node::{epilogue_bytes, launches};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{BufferId, EntityRef, Graph, NodeId, Op, OpDef, Plan, SecondaryMap, Target, TensorType, verify};
use std::collections::HashMap;

/// The instructions of one node: what is merged into another node's instruction is emitted there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Emitted {
    /// How many launches they take; of one that repeats an operation, a part for each node.
    pub launches: f64,
    /// The bytes they move, over those that the node says it moves; more where they move them slower than it would. Of a
    /// sum that a product makes, what that reads for it.
    pub traffic: f64,
    /// Of a product, the bytes that it moves when its arithmetic is over, but for what it sums, over those of its result:
    /// what it adds to each element grows with that, whatever share of the traffic its factors are.
    pub after: f64,
    /// Of a product, how many may be one instruction with it where parts of them are small enough, itself included.
    pub beside: usize,
    /// How many nodes before it the instruction stands for that makes its results.
    pub ahead: usize,
    /// Whether an instruction makes one of its results: what products take in is never there.
    pub is_made: bool,
    /// Whether it is a sum that a product makes.
    pub is_summed: bool,
    /// Whether it is no product, and adds to a summand.
    pub adds: bool,
    /// Whether it only names a part of what is there.
    pub is_view: bool,
    /// The first node of the region that makes its results, if all of that are small values: sums of them over ranks are
    /// one collective.
    pub together: Option<NodeId>,
}

/// What a graph on one device is lowered to for a target, node by node; nothing for a graph that is not legal. A region
/// counts for the node of its first step.
pub fn emitted(graph: &Graph, target: &dyn Target) -> SecondaryMap<NodeId, Emitted> {
    let mut emitted: SecondaryMap<NodeId, Emitted> = SecondaryMap::new();
    let plan = Plan { graph: graph.clone(), ..Plan::default() };
    let Ok(plan) = verify::plan(plan) else { return emitted };
    let Ok(mut draft) = draft_rank(&plan, 0, target) else { return emitted };
    for instruction in instructions(&draft) {
        let is_product = matches!(instruction.action, Action::Compute(Op::Matmul(_)));
        for value in instruction.results.iter().filter_map(|result| draft.buffers[*result].value) {
            let node = graph.value(value).def;
            emitted[node].is_made = true;
            emitted[node].is_summed |= is_product && matches!(graph.node(node).op, Op::Binary(_));
        }
    }
    make_early(&mut draft, graph);
    fuse(&mut draft, graph, target);
    let sources = sources(&draft);
    ahead(&draft, graph).into_iter().for_each(|(node, nodes)| emitted[node].ahead = nodes);
    together(&draft).into_iter().for_each(|(node, first)| emitted[node].together = Some(first));
    // Of products each rank computes a part, and small ones are joined.
    join_siblings(&mut draft, &|region, operands| region.is_products() || target.fuses(region, operands));
    merge_casts(&mut draft);
    merge_repeated(&mut draft);
    share_parts(&mut draft);
    for instruction in instructions(&draft) {
        let source = instruction.source.filter(|_| draft.is_view(instruction));
        source.iter().for_each(|node| emitted[*node].is_view = matches!(graph.node(*node).op, Op::Slice(_)));
    }
    let mut count = Count { graph, draft: &draft, sources, emitted };
    for instruction in instructions(&draft).filter(|instruction| !draft.is_view(instruction)) {
        if let Action::Compute(op) = &instruction.action {
            count.instruction(op, &instruction.operands, &instruction.results);
        }
    }
    count.emitted
}

fn instructions(draft: &Draft) -> impl Iterator<Item = &Instruction> {
    draft.sections.iter().flatten().map(|item| &item.instruction)
}

/// Counts launches and traffic of instructions for the nodes whose they are.
struct Count<'a> {
    graph: &'a Graph,
    draft: &'a Draft,
    /// The node of each instruction, by its first result.
    sources: HashMap<BufferId, NodeId>,
    emitted: SecondaryMap<NodeId, Emitted>,
}

impl Count<'_> {
    /// Counts an instruction: each of the products that it joins and of the operations that it repeats for its own node.
    fn instruction(&mut self, op: &Op, operands: &[BufferId], mut results: &[BufferId]) {
        match op {
            Op::Fused(region) if region.is_products() => {
                for step in &region.steps {
                    let operands: Vec<BufferId> = step.operands.iter().map(|at| operands[*at]).collect();
                    let (own, others) = results.split_at(step.results.len());
                    self.operation(&step.op, &operands, own, 1.0);
                    results = others;
                }
                for node in region.steps.iter().filter_map(|step| step.source) {
                    self.emitted[node].beside = region.steps.len();
                }
            }
            Op::Each(each) => {
                let launches = launches(op, &[]) / each.count as f64;
                for (operands, results) in each.items(operands).zip(each.items(results)) {
                    self.operation(&each.op, operands, results, launches);
                }
            }
            op => self.operation(op, operands, results, launches(op, &self.types(operands))),
        }
    }

    /// Counts an operation of so many launches.
    fn operation(&mut self, op: &Op, operands: &[BufferId], results: &[BufferId], launches: f64) {
        let Some(node) = results.first().and_then(|first| self.sources.get(first)).copied() else { return };
        let graph = self.graph;
        let sum = self.draft.buffers[results[0]].value.map(|value| graph.value(value).def);
        let (operands, results) = (self.types(operands), self.types(results));
        let (mut reads, made) = (graph.operand_types(node), graph.result_types(node));
        let adds = op.name() == graph.node(node).op.name() && adds_rows(op, operands.len());
        if adds {
            reads.push(made[0].clone());
        }
        let reach = Library::SHARDC.reach;
        let own = bytes(&graph.node(node).op, &reads, &made);
        let pace = reach.of(op) / reach.of(&graph.node(node).op);
        let emitted = &mut self.emitted;
        emitted[node].launches += launches;
        emitted[node].adds |= adds;
        emitted[node].traffic += bytes(op, &operands, &results) / own.max(1.0) / pace;
        let mut after = epilogue_bytes(op, &operands, &results);
        // What a product adds to belongs to the sum: it is none of the product where a conversion lies between the two.
        if let Some((sum, addend)) = sum.filter(|node| emitted[*node].is_summed).zip(op.addend(operands.len())) {
            let moved = operands[addend].bytes().0 as f64;
            let all = bytes(&graph.node(sum).op, &graph.operand_types(sum), &graph.result_types(sum));
            emitted[sum].traffic += moved / all.max(1.0) * reach.of(&graph.node(sum).op) / reach.of(op);
            after -= moved;
        }
        let result = made.first().map_or(1.0, |ty| ty.bytes().0 as f64);
        emitted[node].after += after / result.max(1.0);
    }

    fn types(&self, ids: &[BufferId]) -> Vec<TensorType> {
        ids.iter().map(|id| self.draft.buffers[*id].ty.clone()).collect()
    }
}

/// Whether an operation that is no product adds to a summand: then it moves what it names of that, not all of it.
fn adds_rows(op: &Op, operands: usize) -> bool {
    !is_product(op) && op.addend(operands).is_some()
}

/// The nodes whose results an instruction of an earlier node makes, and how many nodes lie between the two.
fn ahead(draft: &Draft, graph: &Graph) -> Vec<(NodeId, usize)> {
    let of = |instruction: &Instruction| {
        let source = instruction.source?.index();
        let made = instruction.results.iter().filter_map(|result| draft.buffers[*result].value);
        let made = made.map(|value| graph.value(value).def).max()?;
        Some((made, made.index().checked_sub(source).filter(|nodes| *nodes > 0)?))
    };
    instructions(draft).filter_map(of).collect()
}

/// The nodes of each region of small values, with the first of them.
fn together(draft: &Draft) -> Vec<(NodeId, NodeId)> {
    let of = |instruction: &Instruction| {
        let Action::Compute(Op::Fused(region)) = &instruction.action else { return Vec::new() };
        let sources: Vec<NodeId> = region.steps.iter().filter_map(|step| step.source).collect();
        let first = sources.first().copied().filter(|_| is_small(draft, instruction));
        first.map_or(Vec::new(), |first| sources.into_iter().map(|node| (node, first)).collect())
    };
    instructions(draft).flat_map(of).collect()
}

/// The node of each instruction, by its first result.
fn sources(draft: &Draft) -> HashMap<BufferId, NodeId> {
    instructions(draft).filter_map(|instruction| Some((*instruction.results.first()?, instruction.source?))).collect()
}

fn bytes(op: &Op, operands: &[TensorType], results: &[TensorType]) -> f64 {
    op.bytes(operands, results).0 as f64
}
