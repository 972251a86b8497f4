//! When copies of parameters live: their casts, their codes in 8 bits, and parameters that are read as they are.
//!
//! A copy is made where it is first read. Where ranks store parts of it, the whole is gathered while the stretch
//! before the reader's runs (consecutive nodes of one block and direction: see [`beside`](crate::search::estimate::beside)), and either
//! stays until its last reader or is dropped behind each pass that reads it (ZeRO-3), which keeps the part until it is
//! gathered for the last time. Parts of codes are made before anything else. With several microbatches all that is not
//! dropped lives through all of them.

use super::recompute::Selected;
use crate::shard::tensor::Prepared;
use shardc_ir::ops::Op;
use shardc_ir::{EntityRef, Graph, NodeId, OpDef, Role, SecondaryMap, ValueId};
use std::collections::BTreeSet;

/// How copies are held.
#[derive(Clone, Copy, Debug)]
pub struct Keeping<'a> {
    /// Per class, among how many ranks which dimension of what it makes is divided; none at all, if every rank has the
    /// whole.
    pub parts: &'a [Option<(u64, usize)>],
    /// Whether what is gathered is dropped behind each pass.
    pub is_dropped: bool,
    /// Whether there are several microbatches.
    pub is_loop: bool,
}

/// Bytes that live for a while; positions are node indices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lived {
    /// How many.
    pub bytes: u64,
    /// The first position.
    pub from: usize,
    /// The last position.
    pub to: usize,
    /// Whether it was gathered to be dropped again.
    pub is_dropped: bool,
    /// Whether it was gathered along an inner dimension: for a while it is there twice, as it came and in order.
    pub is_ordered: bool,
}

/// Where one direction reads a copy.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// Where its gather is issued.
    fetch: usize,
    first: usize,
    last: usize,
}

/// The least span that has others in it.
fn around(first: Option<Span>, others: impl Iterator<Item = Span>) -> Option<Span> {
    let mut all = first;
    for Span { fetch, first, last } in others {
        let of = all.unwrap_or(Span { fetch, first, last });
        all = Some(Span { fetch: of.fetch.min(fetch), first: of.first.min(first), last: of.last.max(last) });
    }
    all
}

/// A copy of a parameter.
#[derive(Debug)]
pub struct Copy {
    /// The class that makes it, and which of its results it is.
    class: usize,
    result: usize,
    /// Whether it is the parameter itself, or codes.
    is_stored: bool,
    is_code: bool,
    /// Where the class's node stands.
    made: usize,
    /// Of the forward pass, and of the backward pass.
    spans: [Option<Span>; 2],
    /// The same, the latter with all that is computed again at the most.
    reach: [Option<Span>; 2],
    /// The nodes of the forward passes of blocks that read it: the block, and the class.
    readers: Vec<(u64, usize)>,
}

/// The copies of all parameters, whatever the mesh.
#[derive(Debug, Default)]
pub struct Copies {
    copies: Vec<Copy>,
    /// Their classes and results.
    read: BTreeSet<(usize, usize)>,
    /// The classes of padded forms of them that are there beside what is padded, which the loop reads as well.
    beside: BTreeSet<usize>,
    /// Per block, where what its backward pass reads is gathered, and where that pass begins.
    backward: Vec<[usize; 2]>,
}

/// The parameter, cast or codes that a value is, through views of them; none if it is none of these.
pub(in crate::search) fn root(graph: &Graph, mut value: ValueId) -> Option<ValueId> {
    loop {
        let node = graph.def(value);
        match node.op {
            Op::Parameter(_) | Op::Cast(_) | Op::Quantize(_) => return Some(value),
            Op::Reshape(_) | Op::Transpose(_) | Op::Pad(_) => value = node.operands[0],
            _ => return None,
        }
    }
}

/// The node that pads the parameter, cast or codes that a value is, if one does.
fn padding(graph: &Graph, mut value: ValueId) -> Option<NodeId> {
    loop {
        let node = graph.def(value);
        match node.op {
            Op::Pad(_) => return Some(graph.value(value).def),
            Op::Reshape(_) | Op::Transpose(_) => value = node.operands[0],
            _ => return None,
        }
    }
}

impl Copies {
    /// Finds who reads the parameters of a graph, and when.
    pub fn new(prepared: &Prepared<'_>) -> Self {
        let (graph, blocks) = (prepared.graph, &prepared.blocks);
        let backward = vec![[usize::MAX; 2]; blocks.count()];
        let mut own = Self { backward, ..Self::default() };
        let (mut bare, mut padded) = (BTreeSet::new(), BTreeSet::new());
        let mut place: SecondaryMap<ValueId, Option<usize>> = SecondaryMap::new();
        // The stretch, its first node that reads a copy, and that of the last stretch that had one.
        let (mut current, mut first, mut before) = (None, None, None);
        for (id, node) in graph.nodes() {
            let (class, at) = (prepared.folded.class[id], id.index());
            if !prepared.in_loop(class) || node.op.is_leaf() {
                continue;
            }
            let (is_backward, home) = (node.role != Role::Forward, blocks.of(id));
            let stretch = Some((blocks.module(id), is_backward));
            if current != stretch {
                current = stretch;
                before = first.take().or(before);
            }
            if let (Role::Backward(_), Some(block)) = (node.role, home) {
                let [fetch, begin] = &mut own.backward[block as usize];
                (*fetch, *begin) = ((*fetch).min(before.unwrap_or(at)), (*begin).min(at));
            }
            for value in &node.operands {
                let maker = prepared.folded.class[graph.value(*value).def];
                let Some(root) = root(graph, *value).filter(|_| prepared.is_parameter[maker]) else { continue };
                match padding(graph, *value) {
                    Some(pad) => drop(padded.insert((root, prepared.folded.class[pad]))),
                    None => drop(bare.insert(root)),
                }
                let fetch = before.unwrap_or(*first.get_or_insert(at));
                first.get_or_insert(at);
                let index = *place[root].get_or_insert_with(|| {
                    let (of, op) = (graph.value(root), &graph.def(root).op);
                    let (is_stored, is_code) = (matches!(op, Op::Parameter(_)), matches!(op, Op::Quantize(_)));
                    let (class, result) = (prepared.folded.class[of.def], of.index);
                    own.read.insert((class, result));
                    let (made, spans, readers) = (of.def.index(), [None; 2], Vec::new());
                    own.copies.push(Copy { class, result, is_stored, is_code, made, spans, reach: spans, readers });
                    own.copies.len() - 1
                });
                let copy = &mut own.copies[index];
                copy.spans[usize::from(is_backward)].get_or_insert(Span { fetch, first: at, last: at }).last = at;
                copy.readers.extend(home.filter(|_| !is_backward).map(|block| (block, class)));
            }
        }
        let mut copies = std::mem::take(&mut own.copies);
        for copy in &mut copies {
            let [forward, backward] = copy.spans;
            copy.reach = [forward, around(backward, copy.blocks().filter_map(|block| own.again(block)))];
        }
        let beside = padded.into_iter().filter(|(root, _)| bare.contains(root)).map(|(_, class)| class);
        Self { copies, beside: beside.collect(), ..own }
    }

    /// Whether a class pads what the loop reads without that as well: both are kept.
    pub fn is_beside(&self, class: usize) -> bool {
        self.beside.contains(&class)
    }

    /// Whether the loop reads a result of a class.
    pub fn is_read(&self, class: usize, result: usize) -> bool {
        self.read.contains(&(class, result))
    }

    /// All of them.
    pub fn all(&self) -> &[Copy] {
        &self.copies
    }

    /// Where a block's nodes that are computed again read a copy.
    fn again(&self, block: u64) -> Option<Span> {
        let [fetch, begin] = self.backward[block as usize];
        (begin < usize::MAX).then_some(Span { fetch, first: begin, last: begin })
    }
}

impl Copy {
    /// Where it is read by what is computed again.
    fn again(&self, of: &Copies, selected: &Selected<'_>) -> impl Iterator<Item = Span> {
        let is_again = |(block, class): &&(u64, usize)| selected.is_again(*block, *class);
        self.readers.iter().filter(is_again).filter_map(|(block, _)| of.again(*block))
    }

    /// The blocks that, computed again, change when it lives.
    pub fn blocks(&self) -> impl Iterator<Item = u64> {
        self.readers.iter().map(|(block, _)| *block)
    }

    /// Whether it may live at a position, whatever is computed again.
    pub fn may_live(&self, at: usize, keeping: Keeping<'_>) -> bool {
        let is_in = |span: &Option<Span>| span.is_some_and(|span| span.fetch <= at && at <= span.last);
        match keeping.is_dropped && keeping.is_loop {
            true => self.reach.iter().any(is_in),
            // Something of it is there in between, and before.
            false => self.reach.iter().flatten().any(|span| at <= span.last),
        }
    }

    /// The positions at which what is held of it may change with what is computed again.
    pub fn turns(&self, of: &Copies) -> Vec<usize> {
        let mut turns = Vec::new();
        let [forward, backward] = self.spans;
        for again in self.blocks().filter_map(|block| of.again(block)) {
            // Where it ends if nothing is computed again.
            let Some(end) = backward.or(forward) else { continue };
            if backward.is_none() || again.fetch < end.fetch {
                turns.extend([again.fetch, again.fetch + 1, end.fetch, end.fetch + 1]);
            }
            if backward.is_none() || again.last > end.last {
                turns.extend([again.last + 1, end.last + 1]);
            }
        }
        turns
    }

    /// Calls `each` with what lives of it beside what is there all the time, `sizes` being the bytes of each result of
    /// each class.
    pub fn lived(
        &self,
        of: &Copies,
        sizes: &[Vec<u64>],
        selected: &Selected<'_>,
        keeping: Keeping<'_>,
        each: &mut dyn FnMut(Lived),
    ) {
        let bytes = sizes[self.class][self.result];
        let [forward, backward] = self.spans;
        // It is also read when blocks are computed again.
        let behind = around(backward, self.again(of, selected));
        let (Some(start), Some(end)) = (forward.or(behind), behind.or(forward)) else { return };
        let Some((parts, dim)) = keeping.parts.get(self.class).copied().flatten() else {
            if !self.is_stored && !keeping.is_loop {
                let from = self.made.min(start.first);
                each(Lived { bytes, from, to: end.last, is_dropped: false, is_ordered: false });
            }
            return;
        };
        // The other arrangement of codes has its dimensions exchanged.
        let is_ordered = if self.is_code { dim != self.result } else { dim != 0 };
        let gathered = |from, to| Lived { bytes, from, to, is_dropped: keeping.is_dropped, is_ordered };
        if keeping.is_dropped {
            forward.into_iter().chain(behind).for_each(|span| each(gathered(span.fetch, span.last)));
        } else if !keeping.is_loop {
            each(gathered(start.fetch, end.last));
        }
        if !self.is_stored && !keeping.is_loop {
            let from = if self.is_code { 0 } else { start.fetch };
            let to = if keeping.is_dropped { end.fetch } else { start.fetch };
            each(Lived { bytes: bytes / parts, from, to, is_dropped: false, is_ordered: false });
        }
    }
}
