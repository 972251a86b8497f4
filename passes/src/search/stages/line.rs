//! A training step laid out along its forward pass: what a chunk between two of its nodes takes and holds.
//!
//! Sums over classes are laid out by the node that decides the chunk of each
//! ([`anchor`](crate::pipeline::anchor)): seconds of the three parts of a microbatch, bytes that are kept for
//! the backward pass, the share of the parameters, and the bytes that would pass over a cut.
//!
//! Cuts lie where few bytes pass: at the local minima of what lives, and between blocks only where blocks
//! are computed again, since a block is computed again in one go.

use super::parameters::{Kind, Shared, copied, shared, stored};
use super::runs::AllEnds;
use super::sent::Sent;
use crate::cost::{is_view, through_views};
use crate::pipeline::anchor::{Anchors, anchors};
use crate::pipeline::order::Lengths;
use crate::search::choice::pins::Recompute;
use crate::search::estimate::Shape;
use crate::search::estimate::recompute::Selected;
use crate::shard::tensor::Prepared;
use shardc_ir::pipeline::last_forward;
use shardc_ir::{NodeId, OpDef, Role, SecondaryMap, ValueId};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// The most places at which a graph may be cut.
const MOST_PLACES: usize = 160;
/// The fewest operations of a stage that is tried, where a graph has no blocks.
const LEAST_OPERATIONS: u64 = 4;

/// What of a graph no mesh changes.
pub struct Line {
    anchors: Anchors,
    /// The nodes of the forward pass that may begin a chunk, in order.
    pub main: Vec<NodeId>,
    /// The place of each of them.
    place: SecondaryMap<NodeId, Option<usize>>,
    /// Where along it each block lies that has any of them, in the order of the forward pass.
    pub blocks: Vec<Range<usize>>,
    /// Whether a block ends before it.
    is_between: Vec<bool>,
    /// The number of its block, if it is the first of one. None, where blocks lie in another order than their numbers.
    first_of: Vec<Option<u64>>,
    /// Whether it may not begin a chunk: what is read after the loop lies in one chunk, as a gradient does to
    /// which two uses of a parameter contribute.
    is_joined: Vec<bool>,
    /// What they make, but for views.
    values: Vec<Value>,
    /// What the gradients of weights read of the backward pass.
    awaited: Vec<Awaited>,
    /// What of parameters passes once in a step.
    shared: Vec<Shared>,
    /// How many copies of what passes between stages there are, of the orders that were asked for.
    pub(super) ends: AllEnds,
}

/// Bytes of what passes once in a step between a stage's chunks and others.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::search) struct Once {
    /// Of gradients that are made here, and added to others in another chunk.
    pub made: f64,
    /// Of gradients from other stages, and to them.
    pub gradients: [f64; 2],
    /// Of what a rank stores of parameters, from other stages, and to them.
    pub parameters: [f64; 2],
    /// Of those from other stages, what is kept as it comes.
    pub kept: f64,
}

/// The gradient of an activation that a gradient of a weight is made of.
struct Awaited {
    maker: NodeId,
    /// Which of the results.
    result: usize,
    /// Where along the line its maker belongs.
    at: usize,
}

/// A value of the forward pass.
struct Value {
    maker: NodeId,
    /// Which of the results.
    result: usize,
    /// The places of its maker and of its last reader in the forward pass.
    made: usize,
    last: usize,
    /// The first place of those in the backward pass who read it, if any do.
    read_behind: Option<usize>,
    /// Whether a gradient of a weight is made of it.
    is_awaited: bool,
    /// Who reads it in the forward pass.
    readers: Vec<NodeId>,
}

impl Line {
    /// Finds the nodes along which a graph is cut.
    pub fn new(prepared: &Prepared<'_>) -> Self {
        let graph = prepared.graph;
        let anchors = anchors(graph);
        let is_main = |id: &NodeId| anchors[*id] == Some(*id);
        let main: Vec<NodeId> = graph.nodes().map(|(id, _)| id).filter(is_main).collect();
        let mut place = SecondaryMap::new();
        main.iter().enumerate().for_each(|(index, id)| place[*id] = Some(index));
        let block = |id: NodeId| crate::fold::block(&graph.node(id).path);
        let is_between = |index: usize| index > 0 && block(main[index - 1]) != block(main[index]);
        let is_between = (0..main.len()).map(is_between).collect();
        let blocks = blocks(&main, &block);
        let mut first_of = vec![None; main.len()];
        let number = |range: &Range<usize>| prepared.blocks.of(main[range.start]);
        if blocks.is_sorted_by_key(number) {
            blocks.iter().for_each(|range| first_of[range.start] = number(range));
        }
        let of = |id: NodeId| anchors[id].and_then(|anchor| place[anchor]);
        let (awaited, read) = awaited(prepared, &of);
        let values = values(prepared, (&main, &place), &of, &read);
        let (is_joined, shared) = (joined(prepared, &of, main.len()), shared(prepared, &of));
        Self {
            anchors,
            main,
            place,
            blocks,
            is_between,
            first_of,
            is_joined,
            values,
            awaited,
            shared,
            ends: AllEnds::default(),
        }
    }

    /// The chunk of every node for these cuts.
    pub fn chunks(&self, prepared: &Prepared<'_>, cuts: &[NodeId]) -> SecondaryMap<NodeId, Option<u32>> {
        crate::pipeline::anchor::chunks(&self.anchors, prepared.graph, cuts)
    }

    /// The most stages worth a try where none are pinned: one for each block, or for some operations where
    /// there are no blocks.
    pub fn most(&self) -> u64 {
        match self.is_between.iter().filter(|is_between| **is_between).count() {
            _ if self.places() < 2 => 1,
            0 => self.main.len() as u64 / LEAST_OPERATIONS,
            borders => 1 + borders as u64,
        }
    }

    /// Whether a block ends before a place.
    pub fn is_between(&self, at: usize) -> bool {
        self.is_between[at]
    }

    /// The blocks that begin at some places: which of these that is, and the number of the block.
    pub fn blocks_at(&self, places: &[usize]) -> impl Iterator<Item = (usize, u64)> {
        let number = |place: &usize| self.first_of.get(*place).copied().flatten();
        places.iter().enumerate().filter_map(move |(index, place)| Some((index, number(place)?)))
    }

    /// How many chunks there may be.
    pub fn places(&self) -> u64 {
        self.is_joined.iter().filter(|is_joined| !**is_joined).count() as u64
    }

    /// The place that a node belongs to.
    pub(super) fn of(&self, id: NodeId) -> Option<usize> {
        self.anchors[id].and_then(|anchor| self.place[anchor])
    }
}

/// Where along a line each block begins and ends, in the order of their beginnings.
fn blocks<'a>(main: &[NodeId], block: &dyn Fn(NodeId) -> Option<&'a str>) -> Vec<Range<usize>> {
    let mut known: Vec<(&str, Range<usize>)> = Vec::new();
    for (at, id) in main.iter().enumerate() {
        let Some(name) = block(*id) else { continue };
        match known.iter_mut().rev().find(|(other, _)| *other == name) {
            Some((_, range)) => range.end = at + 1,
            None => known.push((name, at..at + 1)),
        }
    }
    known.into_iter().map(|(_, range)| range).collect()
}

/// The places between a value and those who read it after the loop, and in the head, where no chunk may begin.
fn joined(prepared: &Prepared<'_>, place: &dyn Fn(NodeId) -> Option<usize>, count: usize) -> Vec<bool> {
    let graph = prepared.graph;
    let mut is_joined = vec![false; count];
    // What is made of parameters alone is there before the loop.
    let is_behind = |class: usize| !prepared.in_loop(class) && !prepared.is_parameter[class];
    for (id, node) in graph.nodes().filter(|(id, _)| is_behind(prepared.folded.class[*id])) {
        for value in node.operands.iter().filter(|value| graph.ty(**value).elements() > 1) {
            if let (Some(a), Some(b)) = (place(id), place(graph.value(*value).def)) {
                is_joined[a.min(b)..a.max(b)].iter_mut().skip(1).for_each(|is_joined| *is_joined = true);
                is_joined[a.max(b)] |= a != b;
            }
        }
    }
    // Of a head that is cut along its tokens, each part's loss follows its product at once.
    let nodes = prepared.head.iter().flat_map(|head| head.nodes());
    let places: Vec<usize> = nodes.filter_map(|(id, _)| place(id)).collect();
    if let (Some(first), Some(last)) = (places.iter().min().copied(), places.iter().max().copied()) {
        is_joined[first + 1..=last].fill(true);
    }
    is_joined
}

/// The values along a line, each with those who read it or a view of it.
fn values(
    prepared: &Prepared<'_>,
    (main, place): (&[NodeId], &SecondaryMap<NodeId, Option<usize>>),
    of: &dyn Fn(NodeId) -> Option<usize>,
    awaited: &BTreeSet<ValueId>,
) -> Vec<Value> {
    let graph = prepared.graph;
    let users = graph.users();
    let mut values = Vec::new();
    for (made, maker) in main.iter().enumerate() {
        let node = graph.node(*maker);
        if is_view(&node.op) || !prepared.in_loop(prepared.folded.class[*maker]) {
            continue;
        }
        for (result, value) in node.results.iter().enumerate() {
            let (maker, readers) = (*maker, Vec::new());
            let is_awaited = awaited.contains(value);
            let mut own = Value { maker, result, made, last: made, read_behind: None, is_awaited, readers };
            let mut open = vec![*value];
            while let Some(value) = open.pop() {
                for (reader, _) in users.get(&value).into_iter().flatten() {
                    let by = graph.node(*reader);
                    if let Role::Backward(_) = by.role {
                        let at = of(*reader).unwrap_or(0);
                        own.read_behind = Some(own.read_behind.map_or(at, |first| first.min(at)));
                    }
                    own.last = own.last.max(place[*reader].unwrap_or(0));
                    if by.role == Role::Forward {
                        own.readers.push(*reader);
                    }
                    if is_view(&by.op) {
                        open.extend(by.results.iter().copied());
                    }
                }
            }
            values.push(own);
        }
    }
    values
}

/// What the gradients of weights read of a microbatch: what of it the backward pass makes, and all of it.
fn awaited(prepared: &Prepared<'_>, place: &dyn Fn(NodeId) -> Option<usize>) -> (Vec<Awaited>, BTreeSet<ValueId>) {
    let graph = prepared.graph;
    let of_loop = |id: NodeId| prepared.in_loop(prepared.folded.class[id]);
    let (mut known, mut all) = (BTreeSet::new(), Vec::new());
    for (_, node) in graph.nodes().filter(|(id, _)| prepared.is_late[*id]) {
        for value in &node.operands {
            let value = through_views(graph, *value).last().unwrap_or(*value);
            let (maker, result) = (graph.value(value).def, graph.value(value).index);
            if !of_loop(maker) || prepared.is_late[maker] || graph.node(maker).op.is_leaf() || !known.insert(value) {
                continue;
            }
            if let Some(at) = place(maker).filter(|_| graph.node(maker).role != Role::Forward) {
                all.push(Awaited { maker, result, at });
            }
        }
    }
    (all, known)
}

/// Sums from the beginning of the line to each place.
#[derive(Clone, Debug)]
pub(in crate::search) struct Sums {
    /// The places at which it may be cut, with both ends.
    pub places: Vec<usize>,
    /// Seconds of the forward pass, of the backward pass, and of gradients of weights.
    pub passes: Vec<[f64; 3]>,
    /// Seconds by which the backward pass takes longer where the gradients of weights are a pass of their own.
    apart: Vec<f64>,
    /// Seconds of collectives that are recomputed, which are part of the backward pass.
    again: Vec<f64>,
    /// Seconds in which whole gradients are added up over microbatches.
    adding: Vec<f64>,
    /// Bytes that a microbatch leaves: by the forward pass for the backward pass, but not for gradients of weights; by the
    /// forward pass for gradients of weights; and by the backward pass for those (recomputed values, and gradients of
    /// activations).
    pub held: Vec<[f64; 3]>,
    /// Of what is held, what a chunk need not hold since only chunks behind it read it later.
    sent: Arc<Sent>,
    /// The share of the parameters.
    pub stored: Vec<f64>,
    /// Bytes of copies of parameters.
    copied: Vec<f64>,
    /// Bytes that pass over a cut before each node.
    passing: Vec<f64>,
    /// What of parameters passes once in a step: where it is made, where it is read, its bytes, what it is and the class
    /// that makes it.
    shared: Vec<([usize; 2], f64, Kind, usize)>,
}

/// Sums from the beginning to each place.
pub(in crate::search) fn prefix(each: &[f64]) -> Vec<f64> {
    let mut sum = 0.0;
    let rest = each.iter().map(|each| {
        sum += each;
        sum
    });
    [0.0].into_iter().chain(rest.collect::<Vec<_>>()).collect()
}

/// The same of three sums, which are read together.
fn prefixes(each: [Vec<f64>; 3]) -> Vec<[f64; 3]> {
    let [a, b, c] = each.map(|each| prefix(&each));
    a.into_iter().zip(b).zip(c).map(|((a, b), c)| [a, b, c]).collect()
}

/// What runs at each place of a line, in seconds of a microbatch.
struct Running {
    /// Of the forward pass, of the backward pass, and of gradients of weights.
    passes: [Vec<f64>; 3],
    apart: Vec<f64>,
    again: Vec<f64>,
    adding: Vec<f64>,
}

impl Running {
    fn new(prepared: &Prepared<'_>, shape: &Shape<'_>, selected: &Selected<'_>, line: &Line) -> Self {
        let (graph, none) = (prepared.graph, vec![0.0; line.main.len()]);
        let [mut forward, mut backward, mut weight] = [none.clone(), none.clone(), none.clone()];
        let [mut apart, mut again, mut adding] = [none.clone(), none.clone(), none];
        let behind = last_forward(graph);
        // Each part of a head goes back before the next comes, and their losses are joined behind the last.
        let head = prepared.head.as_ref().filter(|_| shape.loss_chunks > 1);
        let is_early = head.map(|head| head.awaited(graph)).unwrap_or_default();
        let mut recomputed: BTreeSet<u64> = BTreeSet::new();
        for (id, node) in graph.nodes() {
            let (class, Some(at)) = (prepared.folded.class[id], line.of(id)) else { continue };
            if !prepared.in_loop(class) {
                continue;
            }
            let seconds = shape.each(class).seconds() + shape.longer(id);
            apart[at] += shape.apart(class);
            adding[at] += shape.adds(class);
            match node.role {
                Role::Forward => forward[at] += seconds,
                _ if id < behind || is_early[id] => forward[at] += seconds,
                _ if prepared.is_late[id] => weight[at] += seconds,
                _ => backward[at] += seconds,
            }
            if node.role != Role::Forward || line.place[id].is_none() {
                continue;
            }
            // All that a block computes again belongs to its first node along the line.
            let block = prepared.blocks.of(id).filter(|block| recomputed.insert(*block));
            if let Some(way) = block.and_then(|block| selected.way(block)) {
                backward[at] += way.cost.seconds();
                again[at] += way.cost.communication;
            }
        }
        Self { passes: [forward, backward, weight], apart, again, adding }
    }
}

/// What a microbatch makes at each place of a line, in bytes.
struct Made {
    /// What is held behind the forward pass, as in [`Sums::held`].
    held: [Vec<f64>; 3],
    /// Of that, the values which pass over cuts ([`Sent::new`]).
    sent: Vec<([usize; 2], (usize, f64))>,
    /// What of the forward pass lives in front of each place.
    passing: Vec<f64>,
}

impl Made {
    fn new(prepared: &Prepared<'_>, shape: &Shape<'_>, selected: &Selected<'_>, line: &Line) -> Self {
        let is_again = |id: NodeId| {
            prepared.blocks.of(id).is_some_and(|block| selected.is_again(block, prepared.folded.class[id]))
        };
        let count = line.main.len();
        let mut held = [(); 3].map(|()| vec![0.0; count]);
        let (mut change, mut sent) = (vec![0.0; count + 1], Vec::new());
        for value in &line.values {
            let again =
                value.readers.iter().filter(|reader| is_again(**reader)).map(|reader| line.of(*reader).unwrap_or(0));
            let first = again.chain(value.read_behind).min();
            let sum = match (is_again(value.maker), value.is_awaited) {
                (false, false) => first.map(|_| 0),
                (false, true) => Some(1),
                (true, true) => Some(2),
                (true, false) => None,
            };
            if let Some(sum) = sum {
                let behind = shape.kept(prepared.folded.class[value.maker], value.result) as f64;
                held[sum][value.made] += behind;
                if sum < 2 {
                    sent.push(([value.made, first.map_or(0, |first| first.min(value.last))], (sum, behind)));
                }
            }
            let bytes = bytes(prepared, shape, value.maker, value.result);
            change[value.made + 1] += bytes;
            change[value.last + 1] -= bytes;
        }
        for Awaited { maker, result, at } in &line.awaited {
            held[2][*at] += bytes(prepared, shape, *maker, *result);
        }
        change.pop();
        Self { held, sent, passing: prefix(&change)[1..].to_vec() }
    }
}

/// Bytes of a node's result on one rank.
fn bytes(prepared: &Prepared<'_>, shape: &Shape<'_>, maker: NodeId, result: usize) -> f64 {
    shape.sizes()[prepared.folded.class[maker]].get(result).map_or(0.0, |bytes| *bytes as f64)
}

impl Sums {
    pub fn new(prepared: &Prepared<'_>, shape: &Shape<'_>, recompute: Recompute, line: &Line) -> Self {
        let selected = shape.menu().select(recompute);
        let Running { passes, apart, again, adding } = Running::new(prepared, shape, &selected, line);
        let Made { held, sent, passing } = Made::new(prepared, shape, &selected, line);
        let shared = line.shared.iter();
        let shared = shared.map(|of| {
            let class = prepared.folded.class[of.maker];
            (of.places, bytes(prepared, shape, of.maker, of.result), of.kind, class)
        });
        Self {
            places: places(line, &passing, selected.is_empty()),
            passes: prefixes(passes),
            apart: prefix(&apart),
            again: prefix(&again),
            adding: prefix(&adding),
            held: prefixes(held),
            sent: Arc::new(Sent::new(line.main.len(), sent)),
            stored: prefix(&stored(prepared, shape, line)),
            copied: prefix(&copied(prepared, shape, line)),
            passing,
            shared: shared.collect(),
        }
    }

    /// The same, cut at the places of another.
    pub fn cut_as(&self, other: &Self) -> Self {
        Self { places: other.places.clone(), ..self.clone() }
    }

    /// With whole gradients that are added up over microbatches.
    pub fn with_whole_gradients(mut self) -> Self {
        self.passes.iter_mut().zip(&self.adding).for_each(|([.., sum], adding)| *sum += adding);
        self
    }

    /// With parts of gradients that are added up in so many seconds, by the share of the parameters.
    pub fn with_parts_of_gradients(mut self, seconds: f64) -> Self {
        self.passes.iter_mut().zip(&self.stored).for_each(|([.., sum], share)| *sum += seconds * share);
        self
    }

    /// Where collectives of what is computed again take so many seconds less, beside other kernels of the backward pass.
    pub fn hiding(mut self, seconds: f64) -> Self {
        let all = self.again.last().copied().unwrap_or(0.0);
        if all > 0.0 {
            self.passes.iter_mut().zip(&self.again).for_each(|([_, sum, _], again)| *sum -= seconds * again / all);
        }
        self
    }

    /// With the gradients of weights in a pass by themselves, and by how many seconds that is longer.
    pub fn split(mut self) -> (Self, f64) {
        self.passes.iter_mut().zip(&self.apart).for_each(|([_, sum, _], longer)| *sum += longer);
        let longer = self.apart.last().copied().unwrap_or(0.0);
        (self, longer)
    }

    /// Of three sums, what lies between two of the places.
    pub fn between(&self, sums: &[[f64; 3]], from: usize, to: usize) -> [f64; 3] {
        let (from, to) = (&sums[self.places[from]], &sums[self.places[to]]);
        std::array::from_fn(|sum| to[sum] - from[sum])
    }

    /// The share of the parameters that is stored between two of the places.
    pub fn stored(&self, from: usize, to: usize) -> f64 {
        self.stored[self.places[to]] - self.stored[self.places[from]]
    }

    /// Bytes of copies of parameters between two of the places.
    pub fn copied(&self, from: usize, to: usize) -> f64 {
        self.copied[self.places[to]] - self.copied[self.places[from]]
    }

    pub fn seconds(&self, from: usize, to: usize) -> f64 {
        self.between(&self.passes, from, to).into_iter().sum()
    }

    /// The seconds of a microbatch, all along the line.
    pub fn whole(&self) -> f64 {
        self.seconds(0, self.places.len() - 1)
    }

    /// How long the parts of a microbatch are.
    pub fn lengths(&self) -> Lengths {
        Lengths::from(self.passes.last().copied().unwrap_or_default())
    }

    /// Bytes that a microbatch leaves, all along the line: for the backward pass, for the gradients of weights, and of the
    /// backward pass for those.
    pub fn held(&self) -> [u64; 3] {
        self.held.last().copied().unwrap_or_default().map(|bytes| bytes as u64)
    }

    /// Bytes that a microbatch leaves behind its forward pass, all along the line.
    pub fn between_passes(&self) -> f64 {
        self.held.last().map_or(0.0, |[kept, lasting, _]| kept + lasting)
    }

    /// The most bytes that the backward pass of one node leaves for the gradients of weights.
    pub fn largest_awaited(&self) -> f64 {
        self.held.windows(2).map(|pair| pair[1][2] - pair[0][2]).fold(0.0, f64::max)
    }

    /// Whether anything of parameters passes once in a step.
    pub fn has_shared(&self) -> bool {
        !self.shared.is_empty()
    }

    /// What passes once in a step between these chunks of a stage and others; `share` is how much a rank stores of what a
    /// class makes of a parameter, which is what passes of it.
    pub fn once(&self, chunks: &[(usize, usize, usize)], share: impl Fn(usize) -> f64) -> Once {
        let chunk_of = |place: usize| {
            chunks.iter().position(|(_, from, to)| (self.places[*from]..self.places[*to]).contains(&place))
        };
        let mut once = Once::default();
        for (places, bytes, kind, class) in &self.shared {
            let (ends, is_gradient) = (places.map(chunk_of), *kind == Kind::Gradient);
            let passing = if is_gradient { &mut once.gradients } else { &mut once.parameters };
            let passes = if is_gradient { *bytes } else { share(*class) * bytes };
            match ends {
                [None, Some(_)] => passing[0] += passes,
                [Some(_), None] => passing[1] += passes,
                _ => {}
            }
            if *kind == Kind::Parameter && ends[0].is_none() && ends[1].is_some() {
                once.kept += bytes;
            }
            if is_gradient && ends[0].is_some() && ends[0] != ends[1] {
                once.made += bytes;
            }
        }
        once
    }

    /// Of what a microbatch leaves between two of the places, as [`Self::held`] has it, what a chunk there does not hold
    /// since it is sent, and those behind the chunk alone read it later.
    pub fn sent(&self, from: usize, to: usize) -> [f64; 3] {
        if to + 1 == self.places.len() { [0.0; 3] } else { self.sent.over([self.places[from], self.places[to]]) }
    }

    /// Bytes that pass over a cut in the middle.
    pub fn passing_in_the_middle(&self) -> u64 {
        self.passing(self.places.len() / 2) as u64
    }

    /// Bytes that pass into a chunk that begins at a place.
    pub fn passing(&self, place: usize) -> f64 {
        let is_end = place == 0 || place + 1 == self.places.len();
        if is_end { 0.0 } else { self.passing[self.places[place]] }
    }
}

/// The places where a cut lets fewer bytes pass than beside it, and both ends. Of more than [`MOST_PLACES`], those that
/// let the fewest bytes pass; of those that let equally many pass, ends of blocks first, then some all along the line,
/// since places that are left out at one end leave all of that end to one stage.
fn places(line: &Line, passing: &[f64], anywhere: bool) -> Vec<usize> {
    let is_least = |at: &usize| {
        let before = *at < 2 || passing[*at] <= passing[at - 1];
        before && passing.get(at + 1).is_none_or(|after| passing[*at] < *after || line.is_between[*at])
    };
    let is_open = |at: &usize| !line.is_joined[*at] && (line.is_between[*at] || (anywhere && is_least(at)));
    let mut inner: Vec<usize> = (1..line.main.len()).filter(is_open).collect();
    let order =
        |a: &usize, b: &usize| passing[*a].total_cmp(&passing[*b]).then(line.is_between[*b].cmp(&line.is_between[*a]));
    inner.sort_by(|a, b| order(a, b).then(a.cmp(b)));
    let mut kept: Vec<usize> = Vec::new();
    for alike in inner.chunk_by(|a, b| order(a, b).is_eq()) {
        let room = alike.len().min(MOST_PLACES - kept.len());
        kept.extend((0..room).map(|index| alike[(2 * index + 1) * alike.len() / (2 * room)]));
    }
    kept.sort_unstable();
    [0].into_iter().chain(kept).chain([line.main.len()]).collect()
}
