//! Cuts the head of a training step, from the product that makes the logits to their loss, into
//! chunks of the sequence, so that only one chunk of the logits exists at a time.
//!
//! The cotangents of the cross-entropy do not depend on the loss: of a mean they are one number
//! over the count of tokens. So the backward pass of a chunk can follow its forward pass at once:
//!
//! ```text
//! for each chunk:  slice · product · cross_entropy · cross_entropy_grad · two products · add
//! ```
//!
//! What the [`Head`] has for each token is joined behind the last chunk (the losses, the gradient of the hidden
//! state), and what it sums over them is added up from chunk to chunk (the gradients of its weights). All nodes are
//! ordinary ones, so vocabulary, batch and microbatches divide them by their factor rules (the idea is that of Hsu
//! et al., "Liger kernel", 2024, section 3.2, where it is one hand-written operation).
//!
//! Invariants: the graph computes the same, up to the order of the sum over chunks; the nodes of a
//! chunk follow each other.

use crate::error::PassError;
use crate::head::{Head, Made};
use shardc_ir::ops::{Binary, BinaryKind, Concat, OpDef, OpError, Part, Slice};
use shardc_ir::{
    FactorRule, Graph, NodeId, Op, PrimaryMap, ReduceKind, Role, SecondaryMap, Sharding, Strategy, TensorType, ValueId,
};
use std::collections::{BTreeMap, HashMap};

/// The tokens of a chunk on one rank. Every chunk reads and writes the weight's gradient once more:
/// 8 bytes per weight, beside `6 * CHUNK_TOKENS` operations, which is 2% of their time on an H200.
pub const CHUNK_TOKENS: u64 = 8192;

/// Where memory is short, chunks are halved down to so many tokens, of which a product still takes longer than its
/// launch.
pub const LEAST_CHUNK_TOKENS: u64 = 1024;

/// The most chunks: each is a copy of the head's nodes.
pub const MOST_CHUNKS: u64 = 128;

/// How the strategy of a node follows from that of the graph it was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It does as this node.
    Node(NodeId),
    /// Its result lies as this operand is read.
    Operand(NodeId, usize),
    /// Its result lies as this result is made.
    Result(NodeId, usize),
}

impl Head {
    /// The number of chunks for so many tokens on one rank: of the divisors of the sequence the least that makes them
    /// small enough, or the largest if none up to [`MOST_CHUNKS`] does.
    pub fn chunks(&self, graph: &Graph, tokens: u64) -> u64 {
        chunks_of(self.sequence(graph), tokens)
    }

    /// More chunks than so many, for as many tokens on one rank: every number twice the last, while that divides the
    /// sequence and chunks do not get too small.
    pub fn finer(&self, graph: &Graph, chunks: u64, tokens: u64) -> Vec<u64> {
        finer_than(chunks, self.sequence(graph), tokens)
    }
}

fn chunks_of(sequence: u64, tokens: u64) -> u64 {
    let wanted = tokens.div_ceil(CHUNK_TOKENS).max(1);
    let divides = |count: &u64| sequence.is_multiple_of(*count);
    (wanted..=MOST_CHUNKS).find(divides).or_else(|| (1..=wanted.min(MOST_CHUNKS)).rev().find(divides)).unwrap_or(1)
}

fn finer_than(chunks: u64, sequence: u64, tokens: u64) -> Vec<u64> {
    let is_open = |count: &u64| {
        *count <= MOST_CHUNKS && sequence.is_multiple_of(*count) && tokens >= count.saturating_mul(LEAST_CHUNK_TOKENS)
    };
    std::iter::successors(chunks.checked_mul(2), |count| count.checked_mul(2)).take_while(is_open).collect()
}

/// The graph with its head in `chunks` chunks, and where each node's strategy comes from. Without a
/// head, or for one chunk, the graph is as it was.
///
/// # Errors
/// None but a bug: a node that cannot be added.
pub fn chunk(graph: &Graph, chunks: u64) -> Result<(Graph, PrimaryMap<NodeId, Origin>), PassError> {
    let head = Head::find(graph).filter(|head| chunks > 1 && head.sequence(graph).is_multiple_of(chunks));
    let Some(head) = head else {
        return Ok((graph.clone(), graph.nodes().map(|(id, _)| Origin::Node(id)).collect()));
    };
    let mut chunking = Chunking {
        from: graph,
        head: &head,
        chunks,
        to: Graph::new(graph.name.clone()),
        origins: PrimaryMap::new(),
        map: HashMap::new(),
        moved: SecondaryMap::new(),
    };
    chunking.run().map_err(PassError::ill_formed("chunk"))?;
    Ok((chunking.to, chunking.origins))
}

struct Chunking<'a> {
    from: &'a Graph,
    head: &'a Head,
    chunks: u64,
    to: Graph,
    origins: PrimaryMap<NodeId, Origin>,
    map: HashMap<ValueId, ValueId>,
    /// Per old node, its new one (the first of several).
    moved: SecondaryMap<NodeId, Option<NodeId>>,
}

/// What one chunk has of values of the graph.
#[derive(Default)]
struct Chunk {
    index: u64,
    /// What the chunk's own nodes make.
    made: HashMap<ValueId, ValueId>,
    /// Its tokens of what others make, by the dimension that holds them.
    slices: HashMap<(ValueId, usize), ValueId>,
    moved: BTreeMap<NodeId, NodeId>,
}

impl Chunk {
    /// The first of its tokens, and how many it has, where all are so many in so many chunks.
    fn tokens(&self, size: u64, chunks: u64) -> (u64, u64) {
        (self.index * (size / chunks), size / chunks)
    }
}

impl Chunking<'_> {
    fn run(&mut self) -> Result<(), OpError> {
        let mut is_done = false;
        for id in self.from.nodes().map(|(id, _)| id) {
            if self.head.has(id) {
                if !std::mem::replace(&mut is_done, true) {
                    self.cut()?;
                }
            } else if self.moved[id].is_none() {
                self.copy(id)?;
            }
        }
        self.to.copy_outputs(self.from, &self.map);
        Ok(())
    }

    /// Copies a node.
    fn copy(&mut self, id: NodeId) -> Result<(), OpError> {
        let copy = self.to.copy_node(self.from, id, &mut self.map)?;
        let role = self.from.node(id).role.moved(|of| self.moved[of]);
        let path = self.from.node(id).path.clone();
        self.to.annotate(copy, path, role);
        self.origins.push(Origin::Node(id));
        self.moved[id] = Some(copy);
        Ok(())
    }

    /// Copies what a value is made of, as far as it is not there yet.
    fn copy_cone(&mut self, value: ValueId) -> Result<(), OpError> {
        let mut open = vec![self.from.value(value).def];
        let mut missing = Vec::new();
        while let Some(id) = open.pop() {
            if self.moved[id].is_none() && !missing.contains(&id) {
                missing.push(id);
                open.extend(self.from.node(id).operands.iter().map(|value| self.from.value(*value).def));
            }
        }
        missing.sort_unstable();
        missing.into_iter().try_for_each(|id| self.copy(id))
    }

    /// Adds a node with the path of an old one.
    fn add(
        &mut self,
        (op, operands, declared): (impl Into<Op>, &[ValueId], &[TensorType]),
        like: NodeId,
        role: Role,
        origin: Origin,
    ) -> Result<NodeId, OpError> {
        let id = self.to.add_as(op.into(), operands, declared, self.from.node(like).path.clone(), role)?;
        self.origins.push(origin);
        Ok(id)
    }

    /// The head's nodes once for each chunk, and what they make put together.
    fn cut(&mut self) -> Result<(), OpError> {
        let (graph, head) = (self.from, self.head);
        for value in head.nodes().flat_map(|(id, _)| &graph.node(id).operands) {
            if head.made(*value).is_none() {
                self.copy_cone(*value)?;
            }
        }
        // Per value that is read behind the head, what the chunks have of it; of a sum, what was added up.
        let mut parts: BTreeMap<ValueId, Vec<ValueId>> = head.read().map(|value| (value, Vec::new())).collect();
        for index in 0..self.chunks {
            let mut chunk = Chunk { index, ..Chunk::default() };
            for (id, factor) in head.nodes() {
                self.copy_to(&mut chunk, id, factor)?;
                for (result, value) in graph.node(id).results.iter().enumerate() {
                    let Some(parts) = parts.get_mut(value) else { continue };
                    let mut part = chunk.made[value];
                    if head.made(*value) == Some(Made::Sum)
                        && let Some(sum) = parts.pop()
                    {
                        let (add, role) = (Binary { kind: BinaryKind::Add }, self.role(&chunk, id));
                        let node = self.add((add, &[sum, part], &[]), id, role, Origin::Result(id, result))?;
                        part = self.to.result(node);
                    }
                    parts.push(part);
                }
            }
            for (old, new) in chunk.moved {
                self.moved[old] = self.moved[old].or(Some(new));
            }
        }
        for (value, parts) in parts {
            let whole = match (head.made(value), &parts[..]) {
                (Some(Made::Logits { tokens, .. } | Made::Tokens { tokens }), _) => {
                    let (node, result) = (graph.value(value).def, graph.value(value).index);
                    let (origin, role) = (Origin::Result(node, result), graph.node(node).role);
                    let role = role.moved(|of| self.moved[of]);
                    let joined = self.add((Concat { dim: tokens }, &parts, &[]), node, role, origin)?;
                    self.to.result(joined)
                }
                (_, [sum]) => *sum,
                _ => continue,
            };
            self.map.insert(value, whole);
        }
        Ok(())
    }

    /// What a chunk's copy of a node is there for. What follows from the loss comes before it here, and is of the product
    /// then.
    fn role(&self, chunk: &Chunk, id: NodeId) -> Role {
        let moved = |of| chunk.moved.get(&of).copied().or(self.moved[of]);
        self.from.node(id).role.moved(|of| moved(of).or(moved(self.head.product)))
    }

    /// Copies a node of the head for a chunk, of which `factor` is the tokens.
    fn copy_to(&mut self, chunk: &mut Chunk, id: NodeId, factor: usize) -> Result<(), OpError> {
        let graph = self.from;
        let (node, rule) = (graph.node(id), graph.rule(id));
        let tokens = |dims: &[Vec<usize>]| dims.iter().position(|dim| *dim == [factor]);
        let mut operands = Vec::new();
        for (operand, (value, dims)) in node.operands.iter().zip(&rule.operands).enumerate() {
            operands.push(match (chunk.made.get(value), tokens(dims)) {
                (Some(made), _) => *made,
                (None, Some(dim)) => self.slice(chunk, (id, operand), dim)?,
                (None, None) => self.map[value],
            });
        }
        let part = |(ty, dims): (&TensorType, &Vec<Vec<usize>>)| {
            let mut slice: Vec<(u64, u64)> = ty.shape.iter().map(|size| (0, *size)).collect();
            tokens(dims).into_iter().for_each(|dim| slice[dim] = chunk.tokens(ty.shape[dim], self.chunks));
            Part { shape: ty.shape.clone(), slice }
        };
        let (reads, results) = (graph.operand_types(id), graph.result_types(id));
        let takes: Vec<Part> = reads.iter().zip(&rule.operands).map(part).collect();
        let makes: Vec<Part> = results.iter().zip(&rule.results).map(part).collect();
        let op = node.op.localize(&takes, &makes).unwrap_or_else(|| node.op.clone());
        let cut = |part: &Part| part.slice.iter().map(|(_, length)| *length).collect::<Vec<u64>>();
        let declared: Vec<TensorType> = results.iter().zip(&makes).map(|(ty, part)| ty.with_shape(cut(part))).collect();
        let role = self.role(chunk, id);
        let copy = self.add((op, &operands, &declared), id, role, Origin::Node(id))?;
        chunk.made.extend(node.results.iter().copied().zip(self.to.node(copy).results.iter().copied()));
        chunk.moved.insert(id, copy);
        Ok(())
    }

    /// A chunk's tokens of an operand of an old node, which holds them along `dim`.
    fn slice(&mut self, chunk: &mut Chunk, (node, operand): (NodeId, usize), dim: usize) -> Result<ValueId, OpError> {
        let value = self.from.node(node).operands[operand];
        if let Some(known) = chunk.slices.get(&(value, dim)) {
            return Ok(*known);
        }
        let whole = self.map[&value];
        let mut limit = self.to.ty(whole).shape.clone();
        let mut start = vec![0; limit.len()];
        let (first, count) = chunk.tokens(limit[dim], self.chunks);
        (start[dim], limit[dim]) = (first, first + count);
        let slice = (Slice { start, limit }, &[whole][..], &[][..]);
        let slice = self.add(slice, node, Role::Forward, Origin::Operand(node, operand))?;
        chunk.slices.insert((value, dim), self.to.result(slice));
        Ok(self.to.result(slice))
    }
}

/// The strategy by which a node of one factor per dimension gives its result in a layout: sums of
/// terms pass through; any other partial value is read whole.
pub fn strategy_for(rule: &FactorRule, layout: &Sharding) -> Strategy {
    let mut strategy = Strategy::default();
    for (factors, axes) in rule.results[0].iter().zip(&layout.dims) {
        if let ([factor], false) = (factors.as_slice(), axes.is_empty()) {
            strategy.factors.insert(*factor, axes.clone());
        }
    }
    let sums = layout.partial.iter().filter(|(_, kind)| *kind == ReduceKind::Sum);
    strategy.pass = sums.map(|(axis, _)| (*axis, 0)).collect();
    strategy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_few_and_divide_the_sequence() {
        let tokens = |chunks: u64| chunks * CHUNK_TOKENS;
        assert_eq!(chunks_of(4096, 100), 1);
        assert_eq!(chunks_of(4096, tokens(2)), 2);
        assert_eq!(chunks_of(96, tokens(4) + 1), 6);
        // A prime: no divisor but itself.
        assert_eq!(chunks_of(10_007, tokens(2)), 1);
        assert_eq!(chunks_of(2 * 100_003, tokens(30)), 2);
        assert_eq!(chunks_of(1 << 20, tokens(1000)), MOST_CHUNKS);
        assert_eq!(chunks_of(3, tokens(1000)), 3);
        assert_eq!(finer_than(2, 8192, tokens(2)), [4, 8, 16]);
        assert_eq!(finer_than(1, 96, tokens(1)), [2, 4, 8]);
        assert_eq!(finer_than(1, 6, tokens(1)), [2]);
        assert!(finer_than(MOST_CHUNKS, 1 << 20, tokens(1000)).is_empty());
    }
}
