//! The peak of activations, gradients and scratch memory: what of a microbatch lives at the same time.
//!
//! Nodes run in the order of the graph. A value lives from its node to its last reader, through
//! views of it. Where a block is computed again, its values live once in the forward pass, up to
//! their last reader there, and again from the start of the block's backward pass, what that reads to its last reader and the
//! rest while the block is made again. A gradient that is read
//! behind the loop lives from its node to the end; with several microbatches its accumulator lives through all of them. A
//! node's scratch memory lives as long as the node runs, and again where it is computed again.

pub(in crate::search) mod pieces;

use super::copies::Copies;
use super::recompute::Selected;
use crate::cost::{is_view, through_views};
use crate::fold::block_of;
use crate::lower::accumulate::adds_itself;
use crate::shard::tensor::{Conversion, Placed, Prepared};
use pieces::{Known, Pieces};
use shardc_ir::{EntityRef, NodeId, Op, OpDef, Role, SecondaryMap, ValueId};
use std::collections::BTreeSet;
use std::sync::Mutex;

/// When a value lives. Positions are node indices.
#[derive(Clone, Debug)]
pub(in crate::search) struct Life {
    /// The class that makes it, and which of its results it is.
    pub(in crate::search) class: usize,
    pub(in crate::search) result: usize,
    pub(in crate::search) made: usize,
    /// Its last reader.
    last: usize,
    /// Its last reader in the forward pass.
    pub(in crate::search) last_forward: usize,
    /// Its first reader behind the forward pass.
    first_backward: usize,
    /// Its block, if recomputation may drop it in between.
    pub(in crate::search) block: Option<u64>,
    /// Its readers in the forward passes of blocks, which may be recomputed: the block, and the class.
    readers: Vec<(u64, usize)>,
    /// The last reader, if its result is written in place of this value.
    pub(in crate::search) given: Option<usize>,
    /// Whether linear operations make a gradient of it: a sum of terms, a cast.
    pub(in crate::search) is_term: bool,
}

impl Life {
    /// The one or two spans, ends included, in which it lives under a recomputation.
    pub(in crate::search) fn spans(&self, lives: &Lives, selected: &Selected<'_>) -> [Option<(usize, usize)>; 2] {
        let last = self.end(lives, selected);
        self.from(self.made_again(lives, selected), last)
    }

    /// The same for a copy of it in another layout that its readers share: it is made again where a reader is recomputed.
    pub(in crate::search) fn copy_spans(&self, lives: &Lives, selected: &Selected<'_>) -> [Option<(usize, usize)>; 2] {
        let last = self.end(lives, selected);
        let read_again = self.read_again(lives, selected).min().map(|first| first.min(self.first_backward));
        self.from(self.made_again(lives, selected).or(read_again), last)
    }

    /// From where it is made to its last reader; in two spans if it is made again at `second`.
    fn from(&self, second: Option<usize>, last: usize) -> [Option<(usize, usize)>; 2] {
        match second.filter(|start| *start <= last && *start > self.last_forward) {
            Some(start) => [Some((self.made, self.last_forward)), Some((start, last))],
            None => [Some((self.made, last)), None],
        }
    }

    /// Where it is recomputed.
    fn made_again(&self, lives: &Lives, selected: &Selected<'_>) -> Option<usize> {
        again(lives, selected, self.block?, self.class)
    }

    /// Where its readers are recomputed.
    fn read_again<'a>(&'a self, lives: &'a Lives, selected: &'a Selected<'_>) -> impl Iterator<Item = usize> + 'a {
        self.readers.iter().filter_map(|(block, class)| again(lives, selected, *block, *class))
    }

    /// The position up to which it lives.
    fn end(&self, lives: &Lives, selected: &Selected<'_>) -> usize {
        // Readers that are recomputed read it once more.
        let last = self.read_again(lives, selected).fold(self.last, usize::max);
        // If the last reader's result is written in its place, it ends before that.
        if self.given == Some(last) { last - 1 } else { last }
    }

    /// The blocks whose recomputation changes its spans.
    pub(in crate::search) fn blocks(&self) -> impl Iterator<Item = u64> {
        self.block.into_iter().chain(self.readers.iter().map(|(block, _)| *block))
    }

    /// The positions at which recomputation may change what is held of it.
    pub(in crate::search) fn turns(&self, lives: &Lives) -> Vec<usize> {
        let starts = |block| lives.start(block);
        let mut turns: Vec<usize> = self.block.and_then(starts).map_or(Vec::new(), |at| vec![at]);
        for start in self.readers.iter().filter_map(|(block, _)| starts(*block)) {
            if start > self.last {
                turns.extend([self.last, self.last + 1, start + 1]);
            }
            turns.push(start);
        }
        if !turns.is_empty() {
            turns.extend([self.last_forward + 1, self.first_backward]);
        }
        turns
    }
}

/// Where the nodes of a class in a block are recomputed, if they are.
fn again(lives: &Lives, selected: &Selected<'_>, block: u64, class: usize) -> Option<usize> {
    lives.start(block).filter(|_| selected.is_again(block, class))
}

/// A gradient that is read behind the loop over microbatches.
#[derive(Clone, Copy, Debug)]
pub(in crate::search) struct Gradient {
    /// The class that makes it, and which of its results it is.
    pub(in crate::search) class: usize,
    pub(in crate::search) result: usize,
    pub(in crate::search) made: usize,
    pub(in crate::search) adds_itself: bool,
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
    pub(in crate::search) fn kept(self) -> f64 {
        if let Self::Kept(share) = self { share } else { 0.0 }
    }

    /// Whether part of each stays, and no more is made of what is made where it is stored.
    pub(in crate::search) fn is_parted(self) -> bool {
        matches!(self, Self::Kept(share) if share < 1.0)
    }

    /// Whether ranks reduce each to parts as it is made.
    pub(in crate::search) fn is_reduced(self) -> bool {
        self.is_parted() || matches!(self, Self::Added { is_reduced: true })
    }

    /// Whether it and its terms are added up without ever being there.
    pub(in crate::search) fn is_in_place(self, adds_itself: bool) -> bool {
        matches!(self, Self::Added { is_reduced: false }) && adds_itself
    }
}

/// A node that may need scratch memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::search) struct Run {
    pub(in crate::search) class: usize,
    pub(in crate::search) position: usize,
    /// Its block, if it belongs to the forward pass of one.
    pub(in crate::search) block: Option<u64>,
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
    pub(in crate::search) lives: Vec<Life>,
    /// The gradients that are read behind the loop.
    pub(in crate::search) gradients: Vec<Gradient>,
    pub(in crate::search) runs: Vec<Run>,
    copies: Copies,
    /// Per block, where its backward pass starts.
    pub(in crate::search) backward: Vec<usize>,
    pub(in crate::search) positions: usize,
    pub(in crate::search) pieces: Pieces,
    /// Blocks of the model.
    blocks: u64,
    /// Per class and result, how many of them live where the backward pass starts: those that stay, and
    /// those that can be computed again.
    at_turn: Vec<Vec<[f64; 2]>>,
}

/// The lives of all values, with their bytes on one rank of a placed mesh.
#[derive(Debug)]
pub struct Liveness<'a> {
    pub(in crate::search) of: &'a Lives,
    /// Bytes of each result of each class, or of the copy that all its readers share.
    pub(in crate::search) sizes: Vec<Vec<u64>>,
    /// How much larger that copy is than the result.
    pub(in crate::search) grown: Vec<Vec<u64>>,
    /// The classes of whose copies the backward pass reads none as it is: they end with the forward pass.
    pub(in crate::search) is_brief: Vec<bool>,
    /// Bytes of scratch memory of each class.
    pub(in crate::search) scratch: Vec<u64>,
    /// The classes of gradients that are made in several terms, one for each chunk of the head, and where the head begins.
    pub(in crate::search) in_terms: (Vec<usize>, usize),
    /// The classes of gradients that are made where they are stored, if they are stored in parts.
    pub(in crate::search) in_parts: Vec<usize>,
    /// Bytes of scratch memory of collectives that add: of sums between nodes, of reductions of whole gradients, and of
    /// those that are not made in parts.
    pub(in crate::search) staging: [u64; 3],
    /// The most bytes of gradients that wait to be reduced to parts: where that is done once, and in every microbatch.
    pub(in crate::search) waiting: [u64; 2],
    /// What changes where blocks are computed again.
    pub(in crate::search) known: Mutex<Known>,
}

impl Prepared<'_> {
    /// The number of blocks; at least 1.
    pub fn block_count(&self) -> u64 {
        self.lives.blocks.max(1)
    }
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
        let blocks: BTreeSet<&str> = graph.nodes().filter_map(|(_, node)| block_of(graph, node)).collect();
        let mut all = Self {
            copies: Copies::new(prepared),
            backward: vec![usize::MAX; prepared.blocks.count()],
            positions: graph.node_count(),
            blocks: blocks.len() as u64,
            ..Self::default()
        };
        let is_lasting = lasting(prepared);
        // Per value, its place in the list.
        let mut life: SecondaryMap<ValueId, Option<usize>> = SecondaryMap::new();
        for (id, _) in graph.nodes() {
            all.run(prepared, id);
            all.read(prepared, id, &life);
            all.make(prepared, id, &is_lasting, &mut life);
        }
        all.give(prepared, &life);
        let of = |AtTurn { stay, go }: &AtTurn| [*stay, go.iter().map(|[count, _]| count).sum()];
        let at_turn = all.at_turn_in(prepared, &|_, _| 1.0);
        all.at_turn = at_turn.iter().map(|results| results.iter().map(of).collect()).collect();
        all.pieces = Pieces::new(&all);
        all
    }

    /// Notes that a node runs: it may need scratch memory, or be the first of its block's backward pass.
    fn run(&mut self, prepared: &Prepared<'_>, id: NodeId) {
        let (node, position, block) = (prepared.graph.node(id), id.index(), prepared.blocks.of(id));
        if let (Role::Backward(_), Some(block)) = (node.role, block) {
            let start = &mut self.backward[block as usize];
            *start = (*start).min(position);
        }
        if !node.op.is_leaf() && !is_view(&node.op) {
            let block = block.filter(|_| node.role == Role::Forward);
            self.runs.push(Run { class: prepared.folded.class[id], position, block });
        }
    }

    /// Extends the lives of what a node reads. `life` is the index of each value's life.
    fn read(&mut self, prepared: &Prepared<'_>, id: NodeId, life: &SecondaryMap<ValueId, Option<usize>>) {
        let (node, position, block) = (prepared.graph.node(id), id.index(), prepared.blocks.of(id));
        for index in node.operands.iter().filter_map(|value| life[*value]) {
            let life = &mut self.lives[index];
            life.last = position;
            if node.role != Role::Forward {
                life.first_backward = life.first_backward.min(position);
                continue;
            }
            life.readers.extend(block.map(|block| (block, prepared.folded.class[id])));
            life.last_forward = position;
            // What another block reads is kept.
            if block != life.block {
                life.block = None;
            }
        }
    }

    /// Begins the lives of what a node of the loop makes: gradients that are read behind the loop, and other values.
    fn make(
        &mut self,
        prepared: &Prepared<'_>,
        id: NodeId,
        is_lasting: &SecondaryMap<ValueId, bool>,
        life: &mut SecondaryMap<ValueId, Option<usize>>,
    ) {
        let (node, made, class) = (prepared.graph.node(id), id.index(), prepared.folded.class[id]);
        if !prepared.in_loop(class) || prepared.is_parameter[class] {
            return;
        }
        if is_view(&node.op)
            && let Some(of) = node.operands.first()
        {
            life[node.results[0]] = life[*of];
            return;
        }
        let is_gradient = |value: &ValueId| prepared.is_gradient[class] && is_lasting[*value];
        let is_term = prepared.is_gradient[class] && !node.results.iter().any(is_gradient);
        // A vector that a product adds is never copied along the product's rows, and a term that adds itself to another
        // is never there.
        if (is_term || matches!(node.op, Op::Broadcast(_))) && !prepared.emitted[class].is_made {
            return;
        }
        for (result, value) in node.results.iter().enumerate() {
            if is_gradient(value) {
                let adds_itself = adds_itself(prepared.graph, *value);
                self.gradients.push(Gradient { class, result, made, adds_itself });
                continue;
            }
            life[*value] = Some(self.lives.len());
            self.lives.push(Life {
                class,
                result,
                made,
                last: made,
                last_forward: made,
                first_backward: usize::MAX,
                block: prepared.blocks.of(id).filter(|_| node.role == Role::Forward),
                readers: Vec::new(),
                given: None,
                is_term,
            });
        }
    }

    /// Where a block's backward pass starts, if it has one.
    pub(in crate::search) fn start(&self, block: u64) -> Option<usize> {
        self.backward.get(block as usize).copied().filter(|start| *start < self.positions)
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
                    let index =
                        life[*value].filter(|_| node.op.may_overwrite(operand, node.operands.len()) && fits(value))?;
                    let of = &self.lives[index];
                    (of.last == id.index() && of.given.is_none() && of.made < id.index()).then_some(index)
                });
                let is_gradient = || self.gradients.binary_search_by_key(&id.index(), |of| of.made).is_ok();
                let is_there = life[*result].is_some() || is_gradient();
                if let Some(index) = dying.next().filter(|_| is_there) {
                    self.lives[index].given = Some(id.index());
                }
            }
        }
    }

    /// What lives where the backward pass starts, per result of a class, if there are as many copies of each as is said of
    /// the nodes that make it and that read it for the last time.
    pub fn at_turn_in(&self, prepared: &Prepared<'_>, copies: &dyn Fn(usize, usize) -> f64) -> Vec<Vec<AtTurn>> {
        let results = |class: &crate::fold::Class| prepared.graph.node(class.node).results.len();
        let mut found: Vec<_> =
            prepared.folded.classes.iter().map(|class| vec![AtTurn::default(); results(class)]).collect();
        let is_backward = |node: &shardc_ir::Node| matches!(node.role, Role::Backward(_));
        let Some((turn, _)) = prepared.graph.nodes().find(|(_, node)| is_backward(node)) else { return found };
        // Of the head in chunks, less lives than the whole.
        let passing = prepared.head.iter().flat_map(|head| head.passing(prepared.graph));
        let cut: Vec<usize> = passing.map(|(id, _)| prepared.folded.class[id]).collect();
        for life in self.lives.iter().filter(|life| life.made < turn.index() && life.last > turn.index()) {
            let can_go = life.block.is_some_and(|block| self.backward[block as usize] > life.last_forward);
            if !cut.contains(&life.class) {
                found[life.class][life.result].add(copies(life.made, life.last), can_go);
            }
        }
        found
    }

    /// The class and result of each gradient that is read behind the loop.
    pub fn gradients(&self) -> impl Iterator<Item = (usize, usize)> {
        self.gradients.iter().map(|gradient| (gradient.class, gradient.result))
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

/// What lives of a result of a class where the backward pass starts.
#[derive(Clone, Debug, Default)]
pub struct AtTurn {
    /// Copies of those that stay.
    pub stay: f64,
    /// Of those that can be computed again, how many have how many copies.
    pub go: Vec<[f64; 2]>,
}

impl AtTurn {
    /// Adds one with so many copies.
    fn add(&mut self, copies: f64, can_go: bool) {
        if !can_go {
            self.stay += copies;
            return;
        }
        match self.go.iter_mut().find(|[_, own]| *own == copies) {
            Some([count, _]) => *count += 1.0,
            None => self.go.push([1.0, copies]),
        }
    }
}

impl<'a> Liveness<'a> {
    /// What lives under a placed mesh, with the head cut into so many chunks.
    pub fn new(prepared: &'a Prepared<'_>, placed: &Placed<'_>, conversions: &[Conversion], loss_chunks: u64) -> Self {
        let (mut sizes, mut grown, is_brief) = local_sizes(prepared, placed, conversions);
        for (id, result) in prepared.head.iter().flat_map(|head| head.passing(prepared.graph)) {
            let class = prepared.folded.class[id];
            [&mut sizes, &mut grown].into_iter().for_each(|bytes| bytes[class][result] /= loss_chunks);
        }
        let head = || prepared.head.iter().filter(|_| loss_chunks > 1);
        let sums = head().flat_map(|head| head.sums(prepared.graph)).map(|(id, _)| prepared.folded.class[id]);
        let begins = head().flat_map(|head| head.nodes()).map(|(id, _)| id.index()).min();
        let in_terms = (sums.collect(), begins.unwrap_or(0));
        let scratch = scratch_sizes(prepared, placed);
        Self {
            of: &prepared.lives,
            sizes,
            grown,
            is_brief,
            scratch,
            in_terms,
            in_parts: Vec::new(),
            staging: [0; 3],
            waiting: [0; 2],
            known: Mutex::default(),
        }
    }

    /// Bytes of each result of each class, or of the copy that all its readers share.
    pub fn sizes(&self) -> &[Vec<u64>] {
        &self.sizes
    }

    /// What is held of a value, and how much more of the copy that its readers share: bytes, and from where to where.
    pub(in crate::search) fn held(&self, life: &Life, selected: &Selected<'_>) -> [(u64, Option<(usize, usize)>); 4] {
        let (size, more) = (self.sizes[life.class][life.result], self.grown[life.class][life.result]);
        let [first, second] = life.spans(self.of, selected);
        let [copied, again] = match more > 0 {
            true if self.is_brief[life.class] => [Some((life.made, life.last_forward.max(life.made))), None],
            true => life.copy_spans(self.of, selected),
            false => [None; 2],
        };
        [(size - more, first), (size - more, second), (more, copied), (more, again)]
    }
}

/// Bytes of each result of each class on one rank, with those of the copy in another layout that lives as long as it is
/// read, how many these add, and which classes' end with the forward pass. A copy that all readers share stands for the
/// result where it is larger; so does one that is read through a view, but beside the result where others read that.
fn local_sizes(
    prepared: &Prepared<'_>,
    placed: &Placed<'_>,
    conversions: &[Conversion],
) -> (Vec<Vec<u64>>, Vec<Vec<u64>>, Vec<bool>) {
    let of = |class: usize| placed.local(prepared, class, &placed.strategies[class]).results.clone();
    let mut sizes: Vec<Vec<u64>> = (0..prepared.rules.len()).map(of).collect();
    let mut grown: Vec<Vec<u64>> = sizes.iter().map(|results| vec![0; results.len()]).collect();
    let mut is_brief = vec![false; prepared.rules.len()];
    let is_viewed = |of: &Conversion| is_view(prepared.op(of.reader)) && !prepared.is_parameter[of.maker];
    for conversion in conversions.iter().filter(|of| of.is_shared || is_viewed(of)) {
        let (class, result, view) = viewed(prepared, conversion);
        // Others that read it as it is made keep it beside the copy.
        let made = || prepared.rules[class].result_sharding(result, &placed.strategies[class]);
        let read = |of: usize, operand| prepared.rules[of].operand_sharding(operand, &placed.strategies[of]);
        let is_kept = |view: usize| {
            let of = prepared.flows.iter().filter(|flow| (flow.maker, flow.result) == (class, result));
            let mut readers = of.flat_map(|flow| &flow.readers);
            readers.any(|(reader, operand, _)| *reader != view && read(*reader, *operand) == made())
        };
        let (size, known) = (&mut sizes[class][result], &mut grown[class][result]);
        let there = if view.is_some_and(is_kept) { *known } else { *size };
        let more = (conversion.bytes as u64).saturating_sub(there);
        *size += more;
        *known += more;
        is_brief[class] |= more > 0 && conversion.is_shared && ends_early(prepared, placed, conversion);
    }
    (sizes, grown, is_brief)
}

/// Whether the backward pass reads what the forward pass makes, but in other layouts than that of its shared copy: what it
/// reads is converted anew then.
fn ends_early(prepared: &Prepared<'_>, placed: &Placed<'_>, of: &Conversion) -> bool {
    if prepared.role(of.maker) != Role::Forward {
        return false;
    }
    let mut is_read = false;
    let mut open = vec![(of.maker, of.result)];
    while let Some(value) = open.pop() {
        let flows = prepared.flows.iter().filter(|flow| (flow.maker, flow.result) == value);
        for (reader, operand, _) in flows.flat_map(|flow| flow.readers.iter().copied()) {
            let (operands, _) = prepared.local_types(reader, &placed.strategies[reader], placed.mesh);
            let is_copy = operands[operand].bytes().0 as f64 >= of.bytes;
            let is_behind = matches!(prepared.role(reader), Role::Backward(_));
            if is_behind && is_copy {
                return false;
            }
            is_read |= is_behind;
            // A view of the copy is the copy.
            let is_shown = is_copy && is_view(prepared.op(reader));
            open.extend(Some((reader, 0)).filter(|_| is_shown));
        }
    }
    is_read
}

/// The class and result of which a conversion copies what views show, and the first of these views; of a parameter, whose
/// copies live by themselves, none.
fn viewed(prepared: &Prepared<'_>, conversion: &Conversion) -> (usize, usize, Option<usize>) {
    let (graph, Conversion { maker, result, reader, .. }) = (prepared.graph, *conversion);
    if prepared.is_parameter[maker] {
        return (maker, result, None);
    }
    let converted = graph.node(prepared.folded.classes[maker].node).results[result];
    let (mut class, mut result) = (maker, result);
    let mut view = Some(reader).filter(|reader| is_view(prepared.op(*reader)));
    for value in through_views(graph, converted).skip(1) {
        view = Some(class);
        (class, result) = (prepared.folded.class[graph.value(value).def], graph.value(value).index);
    }
    (class, result, view)
}

/// Bytes of scratch memory of each class on one rank.
fn scratch_sizes(prepared: &Prepared<'_>, placed: &Placed<'_>) -> Vec<u64> {
    let of = |class: usize| placed.local(prepared, class, &placed.strategies[class]).scratch(prepared, placed, class);
    (0..prepared.rules.len()).map(of).collect()
}
