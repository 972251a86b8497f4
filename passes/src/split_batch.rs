//! Cuts the microbatch of every rank into chunks that go through the blocks beside each other, so that the collectives
//! of one run while the kernels of another do.
//!
//! With tensor parallelism a rank waits for a gather before a product and for a reduction behind one. No part of one
//! sample needs another, so each node of a block that keeps the batch becomes one node per chunk; while what one chunk
//! makes is on the wire, the kernels of the others run (Wang et al., "Domino: eliminating communication in LLM training
//! via generic tensor slicing and overlapping", 2024, section 3). It is a rewriting of the graph of a plan that was
//! found, and later passes take the nodes of chunks for nodes like any others. What sums over the batch, the gradients
//! of weights, reads the chunks joined: lowering puts them side by side (`lower/views.rs`), so nothing is copied but
//! what another stage sent.
//!
//! **Chunks.** A chunk is a part of what one rank holds, so of the batch as it is divided over ranks and microbatches:
//! the batch is seen as `(parts, samples of a part)`, and the second is cut. Of a single sample the tokens are
//! ([`sequence`]), and attention joins them. Where a chunk is to be in another layout, and ranks must communicate for
//! it, a reshape to the same shape says so: it *hands on* the value in that layout, and stands where the collective
//! shall begin ([`order`]).
//!
//! **Divided tokens.** Ranks that divide the tokens divide those of each chunk. What a rank has of all chunks is then
//! not its part of the whole, so little is joined: the step is cut outside of its blocks too, what tokens are summed
//! over is made chunk by chunk and added up, and a chunk of what lies divided along something else, as results of
//! attention by their heads, is cut from that before it is handed on.
//!
//! **Causal attention.** The last queries of a sequence see the most keys. Where ranks divide the queries, every second
//! chunk has its tokens in as many parts as queries are divided into, the last part first (a zigzag,
//! `Attention::reversed`). So the rank of the first queries of one chunk has the last ones of the next, and in an even
//! number of chunks all ranks see as many keys. The search prices such queries in two chunks, and whole beside it.
//!
//! **Pipelines.** In the stages of a pipeline the chunks of a microbatch pass from stage to stage by themselves; where
//! a stage reads what another made in another layout, or whole, it makes that itself.
//!
//! Invariants: the graph computes the same, up to the order of sums over the batch; every node does with the axes what
//! the node it was made of does.

mod join;
pub mod order;
pub mod sequence;
#[cfg(test)]
mod tests;

use crate::error::PassError;
use crate::fold::block;
use crate::reshard::normalize;
use shardc_ir::ops::{Attention, AttentionGrad, Binary, BinaryKind, OpError, Part};
use shardc_ir::{
    FactorKind, FactorRule, Graph, Mesh, NodeId, Op, OpDef, OutputKind, PrimaryMap, ReduceKind, Role, SecondaryMap,
    Sharding, Strategy, TensorType, ValueId,
};
use std::collections::{HashMap, VecDeque};

/// A graph on a mesh, as it is before it is cut.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    /// The training step.
    pub graph: &'a Graph,
    /// What each node does with the axes.
    pub strategies: &'a SecondaryMap<NodeId, Strategy>,
    /// The axes.
    pub mesh: &'a Mesh,
    /// The factor of each node that is cut, the batch or the sequence, if it has it.
    pub factor: &'a dyn Fn(NodeId) -> Option<usize>,
    /// Into how many parts ranks and microbatches divide it; 1 if each chunk is divided by itself.
    pub parts: u64,
    /// In how many parts every second chunk lies, the last part first; 1 if all chunks are in order, as they are where
    /// there are `parts`.
    pub reversed: u64,
    /// The pipeline's chunk of each node, if the plan has stages ([`Pipeline::chunks`](shardc_ir::Pipeline::chunks)).
    pub staged: &'a SecondaryMap<NodeId, Option<u32>>,
}

/// What a node of the cut graph is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The chunk; none if it is of all.
    pub chunk: Option<u64>,
    /// Whether it hands a value on in another layout.
    pub hands_on: bool,
    /// The pipeline's chunk, if the plan has stages.
    pub staged: Option<u32>,
}

impl Place {
    /// Of a chunk of what is cut, or of all; whoever reads it says in which chunk of a pipeline.
    fn of(chunk: Option<u64>) -> Self {
        Self { chunk, ..Self::default() }
    }
}

/// A graph in chunks.
#[derive(Clone, Debug, Default)]
pub struct SplitBatch {
    /// The graph.
    pub graph: Graph,
    /// What each node does with the axes.
    pub strategies: SecondaryMap<NodeId, Strategy>,
    /// What each node is of.
    pub places: PrimaryMap<NodeId, Place>,
}

/// Why a graph is not cut.
enum Stop {
    /// A bug: a node that cannot be added.
    Op(OpError),
    /// Something in it has no form in chunks.
    Uncut,
}

impl From<OpError> for Stop {
    fn from(error: OpError) -> Self {
        Self::Op(error)
    }
}

/// Cuts the blocks of a step into so many chunks; `None` if nothing in them can be cut so.
///
/// # Errors
/// None but a bug: a node that cannot be added.
pub fn split_batch(step: Step<'_>, chunks: u64) -> Result<Option<SplitBatch>, PassError> {
    let mut cutting = Cutting {
        step,
        chunks,
        to: SplitBatch { graph: Graph::new(step.graph.name.clone()), ..SplitBatch::default() },
        known: HashMap::new(),
        kept: SecondaryMap::new(),
        moved: SecondaryMap::new(),
        slices: HashMap::new(),
        joined: HashMap::new(),
        made_by: HashMap::new(),
        added: Vec::new(),
        twins: VecDeque::new(),
        handed: HashMap::new(),
    };
    match cutting.run() {
        Ok(()) => Ok(Some(cutting.to).filter(|to| to.places.values().any(|place| place.chunk.is_some()))),
        Err(Stop::Uncut) => Ok(None),
        Err(Stop::Op(error)) => Err(PassError::ill_formed("split_batch")(error)),
    }
}

/// Where a value of the old graph is in the new one.
#[derive(Clone, Debug)]
enum Known {
    Whole(ValueId),
    /// In chunks along a dimension.
    Cut(usize, Vec<ValueId>),
}

/// When a copy in another layout is made: as lowering would, where recomputation starts from a value, copies made in
/// the forward pass are not kept for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Forward,
    Recompute,
    Backward,
}

impl Phase {
    fn of(role: Role) -> Self {
        match role {
            Role::Forward | Role::Optimizer => Self::Forward,
            Role::Recompute(_) => Self::Recompute,
            Role::Backward(_) => Self::Backward,
        }
    }
}

/// How a node is cut.
struct Cut {
    /// Per operand and per result, the dimension that is cut.
    operands: Vec<Option<usize>>,
    results: Vec<Option<usize>>,
    /// The types of a chunk's results.
    types: Vec<TensorType>,
    /// What chunks in order do with the axes, and what those in reverse order do.
    strategies: [Strategy; 2],
}

/// Who reads a value: its path, its role in the new graph, its chunk of a pipeline, and how the value lies for it.
struct Reader {
    path: String,
    role: Role,
    staged: Option<u32>,
    layout: Sharding,
}

impl Reader {
    /// A value as it lies for it.
    fn laid(&self, value: ValueId) -> Laid {
        (value, self.layout.clone(), self.staged)
    }

    /// The same reader of another layout.
    fn of(&self, layout: Sharding) -> Self {
        Self { path: self.path.clone(), layout, ..*self }
    }
}

/// A value as it lies for the readers of a chunk of a pipeline.
type Laid = (ValueId, Sharding, Option<u32>);

struct Cutting<'a> {
    step: Step<'a>,
    chunks: u64,
    to: SplitBatch,
    known: HashMap<ValueId, Known>,
    /// Per value of the old graph, whether recomputation reads it.
    kept: SecondaryMap<ValueId, bool>,
    /// Per old node, its new ones: one, or one for each chunk.
    moved: SecondaryMap<NodeId, Vec<NodeId>>,
    slices: HashMap<(Laid, usize), Vec<ValueId>>,
    joined: HashMap<(Laid, Phase), ValueId>,
    /// By the last of them, the nodes of a join or of slices.
    made_by: HashMap<ValueId, Vec<NodeId>>,
    /// The nodes that are added now, and those that they are computed again of.
    added: Vec<NodeId>,
    twins: VecDeque<NodeId>,
    /// Values of the new graph that are handed on.
    handed: HashMap<(Laid, Phase), ValueId>,
}

impl Cutting<'_> {
    fn run(&mut self) -> Result<(), Stop> {
        let graph = self.step.graph;
        for (_, node) in graph.nodes().filter(|(_, node)| matches!(node.role, Role::Recompute(_))) {
            node.operands.iter().for_each(|value| self.kept[*value] = true);
        }
        for (id, _) in graph.nodes() {
            match self.cut_of(id) {
                Some(cut) => self.cut(id, &cut)?,
                None => self.copy(id)?,
            }
        }
        for output in &graph.outputs {
            let whole = |this: &Self, value: ValueId| match this.known.get(&value) {
                Some(Known::Whole(value)) => Ok(*value),
                _ => Err(Stop::Uncut),
            };
            let kind = match output.kind {
                OutputKind::Update(leaf) => OutputKind::Update(whole(self, leaf)?),
                OutputKind::Result => OutputKind::Result,
            };
            let value = whole(self, output.value)?;
            self.to.graph.output(output.name.clone(), value, kind);
        }
        Ok(())
    }

    /// How a node is cut, if it is.
    fn cut_of(&self, id: NodeId) -> Option<Cut> {
        let Step { graph, strategies, mesh, factor, parts, reversed, .. } = self.step;
        let node = graph.node(id);
        if node.op.is_leaf() || node.operands.is_empty() || node.role == Role::Optimizer {
            return None;
        }
        // Chunks of the same bytes would be joined again for nothing.
        let is_cut = |value: &ValueId| matches!(self.known[value], Known::Cut(..));
        if matches!(node.op, Op::Reshape(_)) && !node.operands.iter().any(is_cut) {
            return None;
        }
        let (rule, factor) = (graph.rule(id), factor(id)?);
        let strategy = &rule.unrolled(&strategies[id]);
        let declared = rule.factors.get(factor).filter(|factor| factor.kind == FactorKind::Parallel)?;
        let extent = mesh.extent(rule.axes(factor, strategy));
        if (extent != parts && parts > 1) || !declared.size.is_multiple_of(extent * self.chunks) {
            return None;
        }
        // Whether ranks divide each chunk by itself.
        let is_apart = parts == 1 && extent > 1;
        if !is_apart && block(&node.path).is_none() {
            return None;
        }
        let operands: Vec<Option<usize>> = rule.operands.iter().map(|dims| outermost(dims, factor)).collect();
        let results: Vec<Option<usize>> = rule.results.iter().map(|dims| outermost(dims, factor)).collect();
        // The parts of a rank's chunk are not side by side in the whole, nor are those in reverse order, so what counts along
        // it would count wrongly.
        let counts = |dim: usize| node.op.counts(dim, node.operands.len());
        if (extent > 1 || reversed > 1) && results.first().copied().flatten().is_some_and(counts) {
            return None;
        }
        let is_summed = |result: usize| declared.reduce.contains(&(result, ReduceKind::Sum));
        let is_complete = |result: usize| results[result].is_some() || is_summed(result);
        let is_cut = results.first().is_some_and(Option::is_some);
        if !(is_cut || is_apart) || !(0..results.len()).all(is_complete) {
            return None;
        }
        let takes: Vec<TensorType> = self.types(&graph.operand_types(id), &operands);
        let types = self.types(&graph.result_types(id), &results);
        let strategy = |chunk: u64| {
            let op = self.local_op(id, [&operands, &results], chunk);
            op.infer(&takes, &types).ok().filter(|made| *made == types)?;
            let own = op.rule(&takes, &types);
            let strategy = strategy_like(rule, strategy, &own, factor)?;
            own.check(&strategy, mesh).ok().map(|()| strategy)
        };
        let first = strategy(0)?;
        let second = if self.is_reversed(1) { strategy(1)? } else { first.clone() };
        let strategies = [first, second];
        Some(Cut { operands, results, types, strategies })
    }

    /// Whether a chunk has its parts in reverse order.
    fn is_reversed(&self, chunk: u64) -> bool {
        self.step.reversed > 1 && chunk % 2 == 1
    }

    /// The types of chunks.
    fn types(&self, types: &[TensorType], cut: &[Option<usize>]) -> Vec<TensorType> {
        let of = |(ty, dim): (&TensorType, &Option<usize>)| {
            let mut shape = ty.shape.clone();
            dim.iter().for_each(|dim| shape[*dim] /= self.chunks);
            ty.with_shape(shape)
        };
        types.iter().zip(cut).map(of).collect()
    }

    /// The operation of a chunk.
    fn local_op(&self, id: NodeId, [operands, results]: [&[Option<usize>]; 2], chunk: u64) -> Op {
        let graph = self.step.graph;
        let parts = |types: Vec<TensorType>, cut: &[Option<usize>]| -> Vec<Part> {
            let of = |(ty, dim): (TensorType, &Option<usize>)| {
                let mut slice: Vec<(u64, u64)> = ty.shape.iter().map(|size| (0, *size)).collect();
                dim.iter().for_each(|dim| {
                    let length = ty.shape[*dim] / self.chunks;
                    slice[*dim] = (chunk * length, length);
                });
                Part { shape: ty.shape, slice }
            };
            types.into_iter().zip(cut).map(of).collect()
        };
        let (takes, makes) = (parts(graph.operand_types(id), operands), parts(graph.result_types(id), results));
        let op = &graph.node(id).op;
        let op = op.localize(&takes, &makes).unwrap_or_else(|| op.clone());
        let reversed = Some(self.step.reversed).filter(|_| self.is_reversed(chunk));
        match op {
            Op::Attention(op) if op.causal => Attention { reversed, ..op }.into(),
            Op::AttentionGrad(op) if op.causal => AttentionGrad { reversed, ..op }.into(),
            op => op,
        }
    }

    /// The role of a chunk of a node, or of the node itself.
    fn role(&self, id: NodeId, chunk: usize) -> Role {
        let of = |id: NodeId| {
            let moved = &self.moved[id];
            moved.get(chunk).or(moved.first()).copied()
        };
        self.step.graph.node(id).role.moved(of)
    }

    fn reader(&self, id: NodeId, operand: usize, chunk: usize) -> Reader {
        let Step { graph, strategies, mesh, .. } = self.step;
        let (rule, node) = (graph.rule(id), graph.node(id));
        let layout = normalize(&rule.operand_sharding(operand, &rule.unrolled(&strategies[id])), mesh);
        Reader { path: node.path.clone(), role: self.role(id, chunk), staged: self.step.staged[id], layout }
    }

    /// Adds a node for each chunk.
    fn cut(&mut self, id: NodeId, cut: &Cut) -> Result<(), Stop> {
        let node = self.step.graph.node(id);
        let mut made: Vec<Vec<ValueId>> = vec![Vec::new(); node.results.len()];
        for chunk in 0..self.chunks {
            let mut operands = Vec::with_capacity(node.operands.len());
            for (index, (value, dim)) in node.operands.iter().zip(&cut.operands).enumerate() {
                let reader = self.reader(id, index, chunk as usize);
                operands.push(match dim {
                    Some(dim) => self.chunk(*value, *dim, chunk as usize, &reader)?,
                    None => self.whole(*value, &reader)?,
                });
            }
            let op = self.local_op(id, [&cut.operands, &cut.results], chunk);
            let role = self.role(id, chunk as usize);
            let new = self.to.graph.add_as(op, &operands, &cut.types, node.path.clone(), role)?;
            self.to.strategies[new] = cut.strategies[usize::from(self.is_reversed(chunk))].clone();
            self.to.places.push(Place { staged: self.step.staged[id], ..Place::of(Some(chunk)) });
            self.moved[id].push(new);
            let results = self.to.graph.node(new).results.clone();
            made.iter_mut().zip(results).for_each(|(parts, part)| parts.push(part));
        }
        for ((value, dim), parts) in node.results.iter().zip(&cut.results).zip(made) {
            let known = match dim {
                Some(dim) => Known::Cut(*dim, parts),
                None => Known::Whole(self.sum(id, &parts)?),
            };
            self.known.insert(*value, known);
        }
        Ok(())
    }

    /// The sum of what the chunks of a node make of something that the batch is summed over.
    fn sum(&mut self, id: NodeId, parts: &[ValueId]) -> Result<ValueId, Stop> {
        let mut parts = parts.iter().copied();
        let mut sum = parts.next().ok_or(Stop::Uncut)?;
        for part in parts {
            let (layout, staged) = (self.made_as(part), self.step.staged[id]);
            let reader = Reader { path: self.step.graph.node(id).path.clone(), role: self.role(id, 0), staged, layout };
            let add = Binary { kind: BinaryKind::Add };
            sum = self.add(add, &[sum, part], &[], &reader, (Place::default(), false))?;
        }
        Ok(sum)
    }

    /// Copies a node that is not cut.
    fn copy(&mut self, id: NodeId) -> Result<(), Stop> {
        let Step { graph, strategies, .. } = self.step;
        let node = graph.node(id);
        let mut operands = Vec::with_capacity(node.operands.len());
        for (index, value) in node.operands.iter().enumerate() {
            operands.push(match &self.known[value] {
                Known::Whole(value) => *value,
                Known::Cut(..) => {
                    let reader = self.reader(id, index, 0);
                    self.whole(*value, &reader)?
                }
            });
        }
        let (declared, role) = (graph.result_types(id), self.role(id, 0));
        let new = self.to.graph.add_as(node.op.clone(), &operands, &declared, node.path.clone(), role)?;
        self.to.strategies[new] = strategies[id].clone();
        self.to.places.push(Place { staged: self.step.staged[id], ..Place::default() });
        self.moved[id].push(new);
        for (old, new) in node.results.iter().zip(&self.to.graph.node(new).results) {
            self.known.insert(*old, Known::Whole(*new));
        }
        Ok(())
    }

    /// Adds a node of one operand layout, whose result, or operand if `by_operand`, lies as the reader wants.
    fn add(
        &mut self,
        op: impl Into<Op>,
        operands: &[ValueId],
        declared: &[TensorType],
        reader: &Reader,
        (place, by_operand): (Place, bool),
    ) -> Result<ValueId, Stop> {
        let graph = &mut self.to.graph;
        let role = self.twins.pop_front().map_or(reader.role, Role::Recompute);
        let id = graph.add_as(op.into(), operands, declared, reader.path.clone(), role)?;
        self.added.push(id);
        let rule = graph.rule(id);
        let dims = if by_operand { &rule.operands[0] } else { &rule.results[0] };
        let strategy = lying(rule, dims, &reader.layout).filter(|it| rule.check(it, self.step.mesh).is_ok());
        self.to.strategies[id] = strategy.ok_or(Stop::Uncut)?;
        self.to.places.push(Place { staged: reader.staged, ..place });
        Ok(self.to.graph.node(id).results[0])
    }
}

/// The dimension whose outermost factor this is.
fn outermost(dims: &[Vec<usize>], factor: usize) -> Option<usize> {
    dims.iter().position(|factors| factors.first() == Some(&factor))
}

/// The strategy by which one side of a node lies in a layout, the outermost factor of each dimension taking its
/// axes; sums of terms pass through.
fn lying(rule: &FactorRule, dims: &[Vec<usize>], layout: &Sharding) -> Option<Strategy> {
    let mut strategy = Strategy::default();
    for (factors, axes) in dims.iter().zip(&layout.dims).filter(|(_, axes)| !axes.is_empty()) {
        strategy.factors.insert(*factors.first()?, axes.clone());
    }
    let is_sum = layout.partial.iter().all(|(_, kind)| *kind == ReduceKind::Sum);
    if !is_sum || (!layout.partial.is_empty() && rule.linear.is_empty()) {
        return None;
    }
    strategy.pass = layout.partial.iter().map(|(axis, _)| (*axis, 0)).collect();
    Some(strategy)
}

/// What a node does whose rule is that of another for a part of the batch: the same with the factors in the same
/// places. Of a batch of one the factor may be missing.
fn strategy_like(rule: &FactorRule, strategy: &Strategy, own: &FactorRule, batch: usize) -> Option<Strategy> {
    let mut of: HashMap<usize, usize> = HashMap::new();
    let sides = rule.operands.iter().zip(&own.operands).chain(rule.results.iter().zip(&own.results));
    for (old, new) in sides.flat_map(|(old, new)| old.iter().zip(new)) {
        let old = match old.split_first() {
            Some((first, rest)) if *first == batch && rest.len() == new.len() => rest,
            _ => old,
        };
        match (old, &new[..]) {
            // What it takes part by part.
            ([old], [parts, _]) => of.extend([(*old, *parts)]),
            _ if old.len() != new.len() => return None,
            _ => of.extend(old.iter().copied().zip(new.iter().copied())),
        }
    }
    let mut like = Strategy { pass: strategy.pass.clone(), ..Strategy::default() };
    for (factor, axes) in strategy.factors.iter().filter(|(_, axes)| !axes.is_empty()) {
        like.factors.insert(*of.get(factor)?, axes.clone());
    }
    (rule.linear == own.linear).then_some(like)
}
