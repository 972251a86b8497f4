//! The peak of activations, gradients and scratch memory: what of a microbatch lives at the same time.
//!
//! Nodes run in the order of the graph. A value lives from its node to its last reader, through
//! views of it. Where a block is computed again, its values live once in the forward pass, up to
//! their last reader there, and again from the start of the block's backward pass. A gradient that is read
//! behind the loop lives from its node to the end; with several microbatches its accumulator lives through all of them. A
//! node's scratch memory lives as long as the node runs, and again where it is computed again.

use super::copies::{Copies, Keeping};
use super::recompute::Selected;
use crate::cost::is_view;
use crate::fold::block_of;
use crate::shard::tensor::{Conversion, Placed, Prepared};
use shardc_ir::ops::Op;
use shardc_ir::{EntityRef, NodeId, OpDef, Role, SecondaryMap, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// When a value lives. Positions are node indices.
#[derive(Clone, Copy, Debug)]
struct Life {
    /// The class that makes it, and which of its results it is.
    class: usize,
    result: usize,
    made: usize,
    /// Its last reader.
    last: usize,
    /// Its last reader in the forward pass.
    last_forward: usize,
    /// Its block, if recomputation may drop it in between.
    block: Option<u64>,
    /// The last reader, if its result takes the bytes over.
    given: Option<usize>,
    /// Whether a gradient is made of it.
    is_term: bool,
}

/// A gradient that is read behind the loop.
#[derive(Clone, Copy, Debug)]
struct Gradient {
    /// The class that makes it, and which of its results it is.
    class: usize,
    result: usize,
    made: usize,
    is_product: bool,
}

/// What becomes of gradients.
#[derive(Clone, Copy, Debug)]
pub enum Gradients {
    /// This share of each stays from the moment it is made.
    Kept(f64),
    /// They are added up over microbatches: products of matrices add by themselves, unless the ranks' are summed first.
    Added {
        /// Whether they are.
        is_reduced: bool,
    },
}

impl Gradients {
    /// The share of each that stays beside the sums.
    fn kept(self) -> f64 {
        if let Self::Kept(share) = self { share } else { 0.0 }
    }

    /// Whether it and its terms are added up without ever being there.
    fn is_in_place(self, is_product: bool) -> bool {
        matches!(self, Self::Added { is_reduced: false }) && is_product
    }
}

/// A node of a block's forward pass that reads a value.
#[derive(Clone, Copy, Debug)]
struct Reader {
    life: usize,
    block: u64,
    class: usize,
}

/// A node that may need scratch memory.
#[derive(Clone, Copy, Debug)]
struct Run {
    class: usize,
    position: usize,
    /// Its block, if it belongs to the forward pass of one.
    block: Option<u64>,
}

/// Bytes that live at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// Of activations.
    pub activations: u64,
    /// Of gradients.
    pub gradients: u64,
    /// Of scratch memory.
    pub scratch: u64,
    /// Of copies of parameters.
    pub copies: u64,
    /// Of those that were gathered to be dropped again.
    pub gathered: u64,
}

/// The lives of all values of a microbatch, whatever the mesh.
#[derive(Debug, Default)]
pub struct Lives {
    lives: Vec<Life>,
    readers: Vec<Reader>,
    /// The gradients that are read behind the loop.
    gradients: Vec<Gradient>,
    runs: Vec<Run>,
    copies: Copies,
    /// Per block, where its backward pass starts.
    backward: Vec<usize>,
    positions: usize,
    /// Blocks of the model.
    blocks: u64,
    /// Per class and result, how many of them live where the backward pass starts: those that stay, and
    /// those that can be computed again.
    at_turn: Vec<Vec<[f64; 2]>>,
}

/// The lives of all values, with their bytes on one rank of a placed mesh.
#[derive(Debug)]
pub struct Liveness<'a> {
    of: &'a Lives,
    /// Bytes of each result of each class.
    sizes: Vec<Vec<u64>>,
    /// Bytes of scratch memory of each class.
    scratch: Vec<u64>,
    /// The classes of gradients that are made in several terms.
    in_terms: Vec<usize>,
}

impl Prepared<'_> {
    /// The number of blocks; at least 1.
    pub fn block_count(&self) -> u64 {
        self.lives.blocks.max(1)
    }
}

/// The blocks in the order in which the forward pass meets them.
pub fn block_order<'a>(graph: &'a shardc_ir::Graph) -> BTreeMap<&'a str, u64> {
    let mut order: BTreeMap<&'a str, u64> = BTreeMap::new();
    for (_, node) in graph.nodes().filter(|(_, node)| node.role == Role::Forward && !node.operands.is_empty()) {
        if let Some(block) = crate::fold::block(&node.path) {
            let next = order.len() as u64;
            order.entry(block).or_insert(next);
        }
    }
    order
}

/// Whether a value, or a view of it, is read behind the loop.
fn lasting(prepared: &Prepared<'_>) -> SecondaryMap<ValueId, bool> {
    let mut is_lasting: SecondaryMap<ValueId, bool> = SecondaryMap::new();
    for (id, node) in prepared.graph.nodes().rev() {
        let is_behind = !prepared.in_loop(prepared.folded.class[id]);
        if is_behind || (is_view(&node.op) && node.results.iter().any(|value| is_lasting[*value])) {
            node.operands.iter().for_each(|value| is_lasting[*value] = true);
        }
    }
    is_lasting
}

impl Lives {
    /// Follows every value through the graph.
    pub fn new(prepared: &Prepared<'_>) -> Self {
        let graph = prepared.graph;
        let order = block_order(graph);
        let block = |id: NodeId| crate::fold::block(&graph.node(id).path).and_then(|block| order.get(block).copied());
        let blocks: BTreeSet<&str> = graph.nodes().filter_map(|(_, node)| block_of(graph, node)).collect();
        let mut all = Self {
            copies: Copies::new(prepared),
            backward: vec![usize::MAX; order.len()],
            positions: graph.node_count(),
            blocks: blocks.len() as u64,
            ..Self::default()
        };
        let is_lasting = lasting(prepared);
        // Per value, its place in the list.
        let mut life: SecondaryMap<ValueId, Option<usize>> = SecondaryMap::new();
        for (id, node) in graph.nodes() {
            let (class, position, own) = (prepared.folded.class[id], id.index(), block(id));
            if let (Role::Backward(_), Some(block)) = (node.role, own) {
                let start = &mut all.backward[block as usize];
                *start = (*start).min(position);
            }
            if !node.op.is_leaf() && !is_view(&node.op) {
                let block = if node.role == Role::Forward { own } else { None };
                all.runs.push(Run { class, position, block });
            }
            for value in &node.operands {
                let Some(index) = life[*value] else { continue };
                let life = &mut all.lives[index];
                life.last = position;
                if node.role == Role::Forward {
                    all.readers.extend(own.map(|block| Reader { life: index, block, class }));
                    life.last_forward = position;
                    // What another block reads is kept.
                    if own != life.block {
                        life.block = None;
                    }
                }
            }
            if !prepared.in_loop(class) || prepared.is_parameter[class] {
                continue;
            }
            let is_gradient = |value: &ValueId| prepared.is_gradient[class] && is_lasting[*value];
            if is_view(&node.op)
                && let Some(of) = node.operands.first()
            {
                life[node.results[0]] = life[*of];
                continue;
            }
            let block = if node.role == Role::Forward { own } else { None };
            let is_term = prepared.is_gradient[class] && !node.results.iter().any(is_gradient);
            for (result, value) in node.results.iter().enumerate() {
                if is_gradient(value) {
                    let is_product = matches!(node.op, Op::Matmul(_));
                    all.gradients.push(Gradient { class, result, made: position, is_product });
                    continue;
                }
                life[*value] = Some(all.lives.len());
                let (made, last, last_forward, given) = (position, position, position, None);
                all.lives.push(Life { class, result, made, last, last_forward, block, given, is_term });
            }
        }
        all.give(prepared, &life);
        all.count_at_turn(prepared);
        all
    }

    /// Finds the values whose bytes their last reader's result takes, as lowering does
    /// ([`in_place`](crate::lower)).
    fn give(&mut self, prepared: &Prepared<'_>, life: &SecondaryMap<ValueId, Option<usize>>) {
        let graph = prepared.graph;
        for (id, node) in graph.nodes().filter(|(_, node)| !is_view(&node.op)) {
            for result in &node.results {
                let ty = graph.ty(*result);
                let fits = |value: &ValueId| {
                    let other = graph.ty(*value);
                    other.shape == ty.shape && other.bytes() == ty.bytes()
                };
                let mut dying = node.operands.iter().enumerate().filter_map(|(operand, value)| {
                    let index = life[*value].filter(|_| node.op.may_overwrite(operand) && fits(value))?;
                    let of = &self.lives[index];
                    (of.last == id.index() && of.given.is_none() && of.made < id.index()).then_some(index)
                });
                if let Some(index) = dying.next().filter(|_| life[*result].is_some()) {
                    self.lives[index].given = Some(id.index());
                }
            }
        }
    }

    fn count_at_turn(&mut self, prepared: &Prepared<'_>) {
        let results = |class: &crate::fold::Class| prepared.graph.node(class.node).results.len();
        self.at_turn = prepared.folded.classes.iter().map(|class| vec![[0.0; 2]; results(class)]).collect();
        let is_backward = |node: &shardc_ir::Node| matches!(node.role, Role::Backward(_));
        let Some((turn, _)) = prepared.graph.nodes().find(|(_, node)| is_backward(node)) else { return };
        // Of the head in chunks, less lives than the whole.
        let cut: Vec<usize> = prepared.head.iter().map(|head| prepared.folded.class[head.product]).collect();
        for life in self.lives.iter().filter(|life| life.made < turn.index() && life.last > turn.index()) {
            let can_go = life.block.is_some_and(|block| self.backward[block as usize] > life.last_forward);
            if !cut.contains(&life.class) {
                self.at_turn[life.class][life.result][usize::from(can_go)] += 1.0;
            }
        }
    }

    /// When copies of parameters live.
    pub fn copies(&self) -> &Copies {
        &self.copies
    }

    /// Per result of a class, how many live where the backward pass starts: those that stay, and those
    /// that can be computed again.
    pub fn at_turn(&self, class: usize) -> &[[f64; 2]] {
        &self.at_turn[class]
    }
}

impl<'a> Liveness<'a> {
    /// What lives under a placed mesh, with the head cut into so many chunks.
    pub fn new(prepared: &'a Prepared<'_>, placed: &Placed<'_>, conversions: &[Conversion], loss_chunks: u64) -> Self {
        let mut sizes = local_sizes(prepared, placed, conversions);
        for id in prepared.head.iter().flat_map(|head| [head.product, head.derivative]) {
            sizes[prepared.folded.class[id]][0] /= loss_chunks;
        }
        let readers = prepared.head.iter().filter(|_| loss_chunks > 1).flat_map(|head| &head.readers);
        let in_terms = readers.map(|id| prepared.folded.class[*id]).collect();
        Self { of: &prepared.lives, sizes, scratch: scratch_sizes(prepared, placed), in_terms }
    }

    /// Bytes of each result of each class.
    pub fn sizes(&self) -> &[Vec<u64>] {
        &self.sizes
    }

    /// The most bytes that live at one time beside the sums of gradients, if what is selected is computed again. Copies
    /// of parameters that are not there all the time live as they are kept.
    pub fn peak(&self, selected: &Selected<'_>, of: Gradients, keeping: Option<Keeping<'_>>) -> Peak {
        let Lives { lives, readers, gradients, runs, backward, positions, .. } = self.of;
        // Per position, the change of what is held, and the scratch memory beside it.
        let (mut change, mut scratch) = (vec![0i64; positions + 2], vec![0u64; positions + 1]);
        let mut add = |bytes: u64, from: usize, to: usize| {
            change[from] += bytes as i64;
            change[to + 1] -= bytes as i64;
        };
        let again = |block: Option<u64>, class: usize| {
            block.filter(|block| selected.is_again(*block, class)).map(|block| backward[block as usize])
        };
        // What is computed again reads what was kept until then.
        let mut last: Vec<usize> = lives.iter().map(|life| life.last).collect();
        for reader in if selected.is_empty() { &[] } else { &readers[..] } {
            let start = again(Some(reader.block), reader.class).filter(|start| start < positions);
            last[reader.life] = last[reader.life].max(start.unwrap_or(0));
        }
        for (life, last) in lives.iter().zip(last).filter(|(life, _)| !(life.is_term && of.is_in_place(true))) {
            let bytes = self.sizes[life.class][life.result];
            // What its last reader's result takes over ends before that.
            let last = if life.given == Some(last) { last - 1 } else { last };
            match again(life.block, life.class).filter(|start| *start <= last && *start > life.last_forward) {
                Some(start) => {
                    add(bytes, life.made, life.last_forward);
                    add(bytes, start, last);
                }
                None => add(bytes, life.made, last),
            }
        }
        let kept = |gradient: &Gradient| (self.sizes[gradient.class][gradient.result] as f64 * of.kept()) as u64;
        for gradient in gradients {
            add(kept(gradient), gradient.made, *positions);
            // It is whole where it is made, and that of a head in chunks is there a second time while it is added up.
            let terms = if self.in_terms.contains(&gradient.class) { 2 } else { 1 };
            let whole = if of.is_in_place(gradient.is_product) { 0 } else { terms };
            let bytes = whole * self.sizes[gradient.class][gradient.result];
            add(bytes.saturating_sub(kept(gradient)), gradient.made, gradient.made);
        }
        let lived = keeping.map(|keeping| self.of.copies.lived(&self.sizes, selected, keeping)).unwrap_or_default();
        lived.iter().for_each(|copy| add(copy.bytes, copy.from, copy.to));
        for Run { class, position, block } in runs.iter().filter(|run| self.scratch[run.class] > 0) {
            for at in [Some(*position), again(*block, *class).filter(|start| start < positions)].into_iter().flatten() {
                // Nodes that are computed again run one after the other.
                scratch[at] = self.scratch[*class].max(scratch[at]);
            }
        }
        let (mut held, mut most) = (0i64, (0, 0, 0));
        for (at, (change, scratch)) in change.iter().zip(&scratch).enumerate() {
            held += change;
            let total = held.max(0) as u64 + scratch;
            if total > most.0 {
                most = (total, at, *scratch);
            }
        }
        let (total, at, scratch) = most;
        let gradients = gradients.iter().filter(|gradient| gradient.made <= at).map(kept).sum();
        let there = lived.iter().filter(|copy| copy.from <= at && at <= copy.to);
        let (mut copies, mut gathered, mut ordered) = (0, 0, 0);
        for copy in there {
            *(if copy.is_dropped { &mut gathered } else { &mut copies }) += copy.bytes;
            ordered = if copy.is_ordered { copy.bytes.max(ordered) } else { ordered };
        }
        let activations = (total - scratch).saturating_sub(gradients + gathered + copies);
        Peak { activations, gradients, scratch, copies, gathered: gathered + ordered }
    }
}

/// Bytes of each result of each class on one rank; of a copy that all its readers share, where there is one.
fn local_sizes(prepared: &Prepared<'_>, placed: &Placed<'_>, conversions: &[Conversion]) -> Vec<Vec<u64>> {
    let mut sizes: Vec<Vec<u64>> = (0..prepared.rules.len())
        .map(|class| {
            let local = placed.local(prepared, class, &placed.strategies[class]);
            local.results.clone()
        })
        .collect();
    for conversion in conversions.iter().filter(|conversion| conversion.is_shared) {
        let size = &mut sizes[conversion.maker][conversion.result];
        *size = (*size).max(conversion.bytes as u64);
    }
    sizes
}

/// Bytes of scratch memory of each class on one rank.
fn scratch_sizes(prepared: &Prepared<'_>, placed: &Placed<'_>) -> Vec<u64> {
    let of = |class: usize| placed.local(prepared, class, &placed.strategies[class]).scratch(prepared, placed, class);
    (0..prepared.rules.len()).map(of).collect()
}
