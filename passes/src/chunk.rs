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
//! The per-token losses and the gradient of the hidden state are joined behind the last chunk, and
//! the gradients of the weight are summed from chunk to chunk. All nodes are ordinary ones, so
//! vocabulary, batch and microbatches divide them by their factor rules (the idea is that of Hsu
//! et al., "Liger kernel", 2024, section 3.2, where it is one hand-written operation).
//!
//! Invariants: the graph computes the same, up to the order of the sum over chunks; the nodes of a
//! chunk follow each other.

use crate::error::PassError;
use shardc_ir::ops::{Binary, BinaryKind, Concat, OpError, Slice};
use shardc_ir::{
    FactorRule, Graph, Mesh, NodeId, Op, PrimaryMap, ReduceKind, Role, SecondaryMap, Sharding, Strategy, ValueId,
};
use std::collections::HashMap;

/// The tokens of a chunk on one rank. Every chunk reads and writes the weight's gradient once more:
/// 8 bytes per weight, beside `6 * CHUNK_TOKENS` operations, which is 2% of their time on an H200.
pub const CHUNK_TOKENS: u64 = 8192;

/// Where memory is short, chunks are halved down to so many tokens, of which a product still takes longer than its
/// launch.
pub const LEAST_CHUNK_TOKENS: u64 = 1024;

/// The most chunks: each is a copy of the head's nodes.
pub const MOST_CHUNKS: u64 = 128;

/// The nodes of a head that can be cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The product that makes the logits.
    pub product: NodeId,
    /// The cross-entropy of the logits.
    pub entropy: NodeId,
    /// Its derivative.
    pub derivative: NodeId,
    /// The products that read the derivative: the gradients of the hidden state and of the weight.
    pub readers: Vec<NodeId>,
    /// What is cut: the dimension of the logits, before the last.
    pub dim: usize,
}

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
    /// The head of a graph, if it has one that can be cut.
    pub fn find(graph: &Graph) -> Option<Self> {
        let users = graph.users();
        let outputs: Vec<ValueId> = graph.outputs.iter().map(|output| output.value).collect();
        let readers = |value: ValueId| users.get(&value).map_or(&[][..], Vec::as_slice);
        graph.nodes().filter(|(_, node)| matches!(node.op, Op::CrossEntropy(_))).find_map(|(entropy, node)| {
            let logits = node.operands[0];
            let product = graph.value(logits).def;
            let Op::Matmul(matmul) = &graph.node(product).op else { return None };
            let [(first, 0), (derivative, 0)] = readers(logits) else { return None };
            let is_derivative = matches!(graph.node(*derivative).op, Op::CrossEntropyGrad(_)) && *first == entropy;
            let dlogits = graph.node(*derivative).results[0];
            let dim = graph.ty(logits).rank().checked_sub(2).filter(|dim| *dim > 0)?;
            let letter = matmul.letters().ok()?[2][dim];
            let cut_in = |op: &Op, index: usize| match op {
                Op::Matmul(matmul) => matmul.letters().is_ok_and(|letters| letters[index].contains(&letter)),
                _ => false,
            };
            let of_hidden = cut_in(&graph.node(product).op, 0) && !cut_in(&graph.node(product).op, 1);
            let found: Vec<NodeId> = readers(dlogits).iter().map(|(reader, _)| *reader).collect();
            let fits = |reader: &NodeId| matches!(graph.node(*reader).op, Op::Matmul(_));
            let is_free = !outputs.contains(&logits) && !outputs.contains(&dlogits);
            let head = Self { product, entropy, derivative: *derivative, readers: found, dim };
            let fits = is_derivative && of_hidden && is_free && head.readers.iter().all(fits);
            (fits && head.has_early_cotangents(graph) && head.spec_of_readers(graph).is_some()).then_some(head)
        })
    }

    /// Whether the cotangents do not depend on what the cross-entropy gives.
    fn has_early_cotangents(&self, graph: &Graph) -> bool {
        let reached = reached_from(graph, self.product);
        let derivative = graph.node(self.derivative);
        let own = [0, 2].map(|index| derivative.operands[index]);
        derivative.operands.iter().all(|value| own.contains(value) || !reached[graph.value(*value).def])
            && derivative.operands[1] == graph.node(self.entropy).operands[1]
            && derivative.operands[2] == graph.node(self.entropy).results[0]
    }

    /// Per product that reads the derivative: its place among the operands, and the dimension of the
    /// result that is cut; `None` for a gradient of the weight, which is summed over the chunks.
    fn spec_of_readers(&self, graph: &Graph) -> Option<Vec<(usize, Option<usize>)>> {
        let dlogits = graph.node(self.derivative).results[0];
        let hidden = graph.node(self.product).operands[0];
        let one = |reader: &NodeId| {
            let node = graph.node(*reader);
            let Op::Matmul(matmul) = &node.op else { return None };
            let letters = matmul.letters().ok()?;
            let place = node.operands.iter().position(|value| *value == dlogits)?;
            let (other, letter) = (1 - place, letters[place][self.dim]);
            let cut = letters[2].iter().position(|known| *known == letter);
            let shared = letters[other].iter().position(|known| *known == letter);
            // A gradient of the weight reads the hidden state, cut in the same way; one of the hidden
            // state reads the weight, which is not cut.
            match (cut, shared) {
                (Some(dim), None) => Some((place, Some(dim))),
                (None, Some(_)) if node.operands[other] == hidden => Some((place, None)),
                _ => None,
            }
        };
        self.readers.iter().map(one).collect()
    }

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

    /// The size of the dimension that is cut.
    pub fn sequence(&self, graph: &Graph) -> u64 {
        graph.ty(graph.node(self.product).results[0]).shape[self.dim]
    }

    /// Whether a strategy per node leaves whole what is cut.
    pub fn is_cut_whole<'a>(&self, graph: &Graph, mesh: &Mesh, strategy: impl Fn(NodeId) -> &'a Strategy) -> bool {
        [(self.product, 0), (self.entropy, 0)].into_iter().all(|(id, result)| {
            let made = graph.rule(id).result_sharding(result, strategy(id));
            mesh.extent(made.dims[self.dim].iter().copied()) == 1
        })
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

/// Per node, whether it depends on `from`.
fn reached_from(graph: &Graph, from: NodeId) -> SecondaryMap<NodeId, bool> {
    let mut reached: SecondaryMap<NodeId, bool> = SecondaryMap::new();
    for (id, node) in graph.nodes() {
        reached[id] = id == from || node.operands.iter().any(|value| reached[graph.value(*value).def]);
    }
    reached
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
        to: Graph::new(graph.name.clone()),
        origins: PrimaryMap::new(),
        map: HashMap::new(),
        moved: SecondaryMap::new(),
    };
    chunking.run(chunks).map_err(PassError::ill_formed("chunk"))?;
    Ok((chunking.to, chunking.origins))
}

struct Chunking<'a> {
    from: &'a Graph,
    head: &'a Head,
    to: Graph,
    origins: PrimaryMap<NodeId, Origin>,
    map: HashMap<ValueId, ValueId>,
    /// Per old node, its new one (the first of several).
    moved: SecondaryMap<NodeId, Option<NodeId>>,
}

impl Chunking<'_> {
    fn run(&mut self, chunks: u64) -> Result<(), OpError> {
        let Head { product, entropy, derivative, readers, .. } = self.head;
        let inside = |id: NodeId| id == *product || id == *derivative || readers.contains(&id);
        for id in self.from.nodes().map(|(id, _)| id) {
            if id == *entropy {
                self.chunks(chunks)?;
            } else if !inside(id) && self.moved[id].is_none() {
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
        op: impl Into<Op>,
        operands: &[ValueId],
        like: NodeId,
        role: Role,
        origin: Origin,
    ) -> Result<Vec<ValueId>, OpError> {
        let (op, path) = (op.into(), self.from.node(like).path.clone());
        // Only the shapes of a copy differ from those of the node itself.
        let declared = match origin {
            Origin::Node(_) => {
                let types: Vec<_> = operands.iter().map(|value| self.to.ty(*value).clone()).collect();
                op.infer(&types, &self.from.result_types(like))?
            }
            _ => Vec::new(),
        };
        let id = self.to.add_as(op, operands, &declared, path, role)?;
        self.origins.push(origin);
        Ok(self.to.node(id).results.clone())
    }

    /// Part `index` of `chunks` of an operand of an old node, along `dim`.
    fn slice(
        &mut self,
        node: NodeId,
        operand: usize,
        dim: usize,
        [index, chunks]: [u64; 2],
    ) -> Result<ValueId, OpError> {
        let value = self.from.node(node).operands[operand];
        let value = self.map[&value];
        let mut limit = self.to.ty(value).shape.clone();
        let mut start = vec![0; limit.len()];
        let length = limit[dim] / chunks;
        (start[dim], limit[dim]) = (index * length, (index + 1) * length);
        let role = Role::Forward;
        Ok(self.add(Slice { start, limit }, &[value], node, role, Origin::Operand(node, operand))?[0])
    }

    fn chunks(&mut self, chunks: u64) -> Result<(), OpError> {
        let (graph, Head { product, entropy, derivative, readers, dim }) = (self.from, self.head.clone());
        for node in [product, entropy, derivative] {
            for value in &graph.node(node).operands {
                let def = graph.value(*value).def;
                if ![product, entropy].contains(&def) {
                    self.copy_cone(*value)?;
                }
            }
        }
        let specs = self.head.spec_of_readers(graph).unwrap_or_default();
        let hidden_dim = self.hidden_dim();
        for (reader, (place, _)) in readers.iter().zip(&specs) {
            let other = graph.node(*reader).operands[1 - place];
            self.copy_cone(other)?;
        }
        let mut rows: [Vec<ValueId>; 2] = Default::default();
        let mut gradients: Vec<Vec<ValueId>> = vec![Vec::new(); readers.len()];
        for index in 0..chunks {
            let at = [index, chunks];
            let hidden = self.slice(product, 0, hidden_dim, at)?;
            let labels = self.slice(entropy, 1, dim, at)?;
            let weight = self.map[&graph.node(product).operands[1]];
            let op = |id: NodeId| graph.node(id).op.clone();
            let logits = self.add(op(product), &[hidden, weight], product, Role::Forward, Origin::Node(product))?[0];
            let of_product = self.to.value(logits).def;
            let halves = self.add(op(entropy), &[logits, labels], entropy, Role::Forward, Origin::Node(entropy))?;
            let of_entropy = self.to.value(halves[0]).def;
            rows.iter_mut().zip(&halves).for_each(|(rows, half)| rows.push(*half));
            let (dlse, dpicked) = (self.slice(derivative, 3, dim, at)?, self.slice(derivative, 4, dim, at)?);
            let read = [logits, labels, halves[0], dlse, dpicked];
            let role = Role::Backward(of_entropy);
            let dlogits = self.add(op(derivative), &read, derivative, role, Origin::Node(derivative))?[0];
            for ((reader, (place, joined)), parts) in readers.iter().zip(&specs).zip(&mut gradients) {
                let other = match joined {
                    Some(_) => self.map[&graph.node(*reader).operands[1 - place]],
                    None => hidden,
                };
                let operands = if *place == 0 { [dlogits, other] } else { [other, dlogits] };
                let role = Role::Backward(of_product);
                let part = self.add(op(*reader), &operands, *reader, role, Origin::Node(*reader))?[0];
                match (joined, parts.pop()) {
                    (None, Some(sum)) => {
                        let add = Binary { kind: BinaryKind::Add };
                        parts.extend(self.add(add, &[sum, part], *reader, role, Origin::Result(*reader, 0))?);
                    }
                    (_, last) => parts.extend(last.into_iter().chain([part])),
                }
            }
            self.moved[product] = self.moved[product].or(Some(of_product));
            self.moved[entropy] = self.moved[entropy].or(Some(of_entropy));
        }
        for (result, parts) in rows.into_iter().enumerate() {
            let origin = Origin::Result(entropy, result);
            let whole = self.add(Concat { dim }, &parts, entropy, Role::Forward, origin)?[0];
            self.map.insert(graph.node(entropy).results[result], whole);
        }
        for ((reader, (_, joined)), parts) in readers.iter().zip(specs).zip(gradients) {
            let role = self.moved[product].map_or(Role::Forward, Role::Backward);
            let whole = match joined {
                Some(dim) => self.add(Concat { dim }, &parts, *reader, role, Origin::Result(*reader, 0))?[0],
                None => parts[0],
            };
            self.map.insert(graph.node(*reader).results[0], whole);
        }
        Ok(())
    }

    /// The dimension of the hidden state that is cut.
    fn hidden_dim(&self) -> usize {
        let Op::Matmul(matmul) = &self.from.node(self.head.product).op else { return 0 };
        let Ok(letters) = matmul.letters() else { return 0 };
        letters[0].iter().position(|letter| *letter == letters[2][self.head.dim]).unwrap_or(0)
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
