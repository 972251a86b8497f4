//! What one class of nodes adds to a step: the unary costs of the cost graph.
//!
//! The search minimises a step in which half of what the data ranks say to each other is hidden. A
//! *bound* is the least that any plan of the mesh can be predicted to take whose data ranks share in one way
//! what is stored ([`Sharing`]). In both, a byte of
//! memory may have a price in seconds, so that leaner layouts are found, and bounds of plans that fit
//! (Lagrangian relaxation: a plan of `t` seconds and `m` bytes, of which `M` are free, costs
//! `t + price (m - M)`, which is at most `t` where it fits).

use super::family::{copy_axes, searched_axes};
use super::local::Local;
use super::tensor::{Placed, Prepared};
use crate::cost::collective::{self, Collective, Group};
use crate::cost::is_view;
use crate::search::bound::sharing::{Filling, Sharing};
use crate::search::estimate::liveness::AtTurn;
use crate::search::estimate::storage::{kind_under, stored_type};
use shardc_ir::ops::{Op, OpDef, Update};
use shardc_ir::{AxisId, Choice, EntityRef, Family, Mesh, Role, Strategy};

/// What is to be the least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// The seconds of a step, at what memory and the wire cost.
    Step(Prices),
    /// A bound below the seconds of every step, and of the bytes that every plan keeps.
    Bound {
        /// Seconds per byte.
        byte: f64,
        /// What is left of the rest of the mesh: see [`Beside`].
        beside: Beside,
        /// How the data ranks share what is stored.
        sharing: Sharing,
    },
}

/// What layouts are found for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// Seconds that a byte of a rank's memory costs.
    pub byte: f64,
    /// Seconds that a second of changes of layout within the loop costs: less than one where some of it is hidden.
    pub wire: f64,
}

impl Default for Prices {
    /// Memory is free, and nothing hidden.
    fn default() -> Self {
        Self { byte: 0.0, wire: 1.0 }
    }
}

impl Prices {
    /// The same with bytes at another price.
    pub fn with_byte(self, byte: f64) -> Self {
        Self { byte, ..self }
    }
}

/// Axes that are not placed, for a bound along one axis.
///
/// Of `n` axes of `s_a` ranks, which divide an amount `T` (seconds of a node, bytes of a value) into `P` parts at the
/// most, those that divide it count `1/n` of what is left with the others dividing all of it. Those in a set `R` that
/// do not count `T/P (1/n + s_a - 1)`: of the true amount, at least `T/P` times the product of `s_a` over `R`, the sum
/// of all that is no more, since that product is at least `1 + sum (s_a - 1)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beside {
    /// The axis that is placed.
    pub axis: Option<AxisId>,
    /// Into how many parts the others divide a value at the most.
    pub parts: f64,
    /// The share of what nodes cost that is counted here: the rest is counted along the other axes.
    pub share: f64,
}

impl Beside {
    /// No such axes.
    pub const NONE: Self = Self { axis: None, parts: 1.0, share: 1.0 };

    /// The part that counts of an amount that this axis divides.
    fn divided(&self) -> f64 {
        self.share / self.parts
    }

    /// The part that counts of an amount that this axis divides only where a strategy says so.
    fn counted(&self, mesh: &Mesh, strategy: &Strategy) -> f64 {
        match self.axis.filter(|axis| strategy.choice(*axis) == Choice::Replicate) {
            Some(axis) => (self.share - 1.0) / (self.parts * mesh.size(axis) as f64) + 1.0 / self.parts,
            None => self.divided(),
        }
    }
}

impl Objective {
    /// Seconds per byte.
    pub fn byte(self) -> f64 {
        let (Self::Step(Prices { byte, .. }) | Self::Bound { byte, .. }) = self;
        byte
    }

    /// The same with bytes at another price.
    pub fn with_byte(mut self, price: f64) -> Self {
        let (Self::Step(Prices { byte, .. }) | Self::Bound { byte, .. }) = &mut self;
        *byte = price;
        self
    }

    /// The same where the data ranks share in another way what is stored, if it is a bound.
    pub fn with_sharing(mut self, other: Sharing) -> Self {
        if let Self::Bound { sharing, .. } = &mut self {
            *sharing = other;
        }
        self
    }

    /// The share that counts of changes of layout within the loop.
    pub fn wire(self) -> f64 {
        if let Self::Step(Prices { wire, .. }) = self { wire } else { 1.0 }
    }

    /// The axes that are not placed.
    pub fn beside(self) -> Beside {
        if let Self::Bound { beside, .. } = self { beside } else { Beside::NONE }
    }
}

/// A kind of values that can be computed again.
#[derive(Clone, Copy, Debug)]
struct Again {
    /// How many there are.
    count: f64,
    /// Bytes of one.
    bytes: f64,
    /// Seconds in which it is computed.
    seconds: f64,
    /// Bytes and seconds at the least of an operand that nothing else keeps, so that it is kept or computed as well.
    operand: [f64; 2],
}

impl Again {
    /// The cost of one if a byte costs so many seconds.
    fn at(&self, byte: f64) -> f64 {
        let [bytes, seconds] = self.operand;
        (byte * self.bytes).min(self.seconds + seconds.min(byte * bytes))
    }
}

/// What a class costs, for every price of a byte.
#[derive(Clone, Debug, Default)]
pub struct Quote {
    /// Seconds.
    seconds: f64,
    /// Bytes that are kept.
    bytes: f64,
    /// Values that can be computed again.
    again: Vec<Again>,
}

impl Quote {
    /// The cost if a byte costs so many seconds.
    pub fn at(&self, byte: f64) -> f64 {
        self.seconds + byte * self.bytes + self.again.iter().map(|again| again.count * again.at(byte)).sum::<f64>()
    }

    /// A part of it, and another of the operands that are computed again with it.
    fn scaled(mut self, by: f64, operands: f64) -> Self {
        self.seconds *= by;
        self.bytes *= by;
        for again in &mut self.again {
            again.count *= by;
            again.operand = again.operand.map(|amount| amount * operands / by);
        }
        self
    }
}

/// Prices nodes on a mesh.
pub struct Pricer<'a, 'b> {
    prepared: &'a Prepared<'b>,
    placed: &'a Placed<'a>,
    objective: Objective,
    copies: Vec<AxisId>,
    /// The ranks over which the gradients of parameters that nothing divides are summed.
    data: Group,
    /// Per class, by how many passes of the loop its results are read.
    passes: Vec<[bool; 2]>,
    /// Blocks of the model.
    blocks: f64,
    /// For a bound, per class the operand that is computed again with it: see [`Again`].
    operands: Vec<[f64; 2]>,
    /// For a bound of a pipeline, what is under way of what lives where the backward pass starts.
    under_way: Option<Vec<Vec<AtTurn>>>,
}

impl<'a, 'b> Pricer<'a, 'b> {
    /// Prices nodes on the mesh of what is placed.
    pub fn new(prepared: &'a Prepared<'b>, placed: &'a Placed<'a>, objective: Objective) -> Self {
        let copies = copy_axes(placed.mesh);
        let data = Group::new(placed.mesh, &copies, placed.cluster);
        let mut passes = vec![[false; 2]; prepared.rules.len()];
        for flow in &prepared.flows {
            for (reader, _, _) in flow.readers.iter().filter(|(reader, _, _)| prepared.in_loop(*reader)) {
                passes[flow.maker][usize::from(prepared.role(*reader) != Role::Forward)] = true;
            }
        }
        let (blocks, operands, under_way) = (prepared.block_count() as f64, Vec::new(), None);
        let mut own = Self { prepared, placed, objective, copies, data, passes, blocks, operands, under_way };
        if let Objective::Bound { sharing, beside, .. } = objective {
            own.operands = own.operands(sharing, beside);
            own.under_way = (sharing.filling.rate > 0.0).then(|| own.under_way(sharing.filling));
        }
        own
    }

    /// Per class that can be computed again, the dearest operand that is not kept for the backward pass and that
    /// nothing else in the forward pass reads: its bytes and its seconds, if all axes divide it.
    fn operands(&self, sharing: Sharing, beside: Beside) -> Vec<[f64; 2]> {
        let (prepared, placed) = (self.prepared, self.placed);
        // Along the axes of the problem; the rest is counted with the quote.
        let parts = placed.mesh.extent(searched_axes(placed.mesh)) as f64 / beside.parts;
        let is_forward = |class: usize| prepared.in_loop(class) && prepared.role(class) == Role::Forward;
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); prepared.rules.len()];
        for flow in prepared.flows.iter().filter(|flow| is_forward(flow.maker)) {
            let own = flow.readers.iter().map(|(reader, ..)| *reader).filter(|reader| is_forward(*reader));
            readers[flow.maker].extend(own);
            readers[flow.maker].dedup();
        }
        let mut found = vec![[0.0; 2]; prepared.rules.len()];
        for class in (0..prepared.rules.len()).filter(|class| is_forward(*class)) {
            let is_kept = |class: usize| prepared.lives.at_turn(class).iter().flatten().any(|count| *count > 0.0);
            if is_view(prepared.op(class)) || is_kept(class) {
                continue;
            }
            let members = |class: usize| prepared.folded.classes[class].members.len();
            let mut reader = class;
            while let [next] = readers[reader][..] {
                reader = next;
                if !is_view(prepared.op(reader)) {
                    break;
                }
            }
            if reader == class || is_view(prepared.op(reader)) || members(reader) != members(class) {
                continue;
            }
            let local = placed.local(prepared, class, &placed.strategies[class]);
            let seconds = local.emitted(prepared, (class, placed.cluster), false) / parts;
            let seconds = seconds * placed.microbatches as f64 * sharing.kernels;
            let bytes = local.results.iter().sum::<u64>() as f64 / parts;
            if seconds > found[reader][1] {
                found[reader] = [bytes, seconds];
            }
        }
        found
    }

    /// Seconds of a node of a class at the least, if all axes that are searched divide it.
    fn divided(&self, class: usize) -> f64 {
        let (prepared, placed) = (self.prepared, self.placed);
        let local = placed.local(prepared, class, &placed.strategies[class]);
        local.emitted(prepared, (class, placed.cluster), false) / placed.mesh.extent(searched_axes(placed.mesh)) as f64
    }

    /// What lives at the turn from forward to backward, with as many copies as microbatches must be under way.
    fn under_way(&self, filling: Filling) -> Vec<Vec<AtTurn>> {
        let prepared = self.prepared;
        let seconds: Vec<f64> = (0..prepared.rules.len()).map(|class| self.divided(class)).collect();
        let mut before = vec![0.0];
        for (id, _) in prepared.graph.nodes() {
            let class = prepared.folded.class[id];
            let may_wait = filling.splits_backward && prepared.is_late[id];
            let counts = prepared.in_loop(class) && !may_wait;
            before.push(before[id.index()] + if counts { seconds[class] } else { 0.0 });
        }
        let copies = |made: usize, last: usize| (filling.rate * (before[last] - before[made + 1])).max(1.0);
        prepared.lives.at_turn_in(prepared, &copies)
    }

    /// What all nodes of a class cost under a strategy.
    pub fn quote(&self, class: usize, strategy: &Strategy) -> Quote {
        self.quote_of(class, strategy, &self.placed.local(self.prepared, class, strategy))
    }

    /// The same where it is known what one of them is to a rank.
    pub fn quote_of(&self, class: usize, strategy: &Strategy, local: &Local) -> Quote {
        let (prepared, cluster) = (self.prepared, self.placed.cluster);
        let op = prepared.op(class);
        let count = prepared.folded.classes[class].members.len() as f64;
        // Sums that products make: where something is converted between the two, [`Placed::apart`] is added. What else is
        // merged into other instructions, where nothing is converted, one node does not know.
        let seconds = match self.objective {
            Objective::Step(_) if !prepared.emitted[class].is_summed => local.price.seconds.0,
            _ => local.emitted(prepared, (class, cluster), false),
        };
        let runs = if prepared.in_loop(class) { self.placed.microbatches as f64 } else { 1.0 };
        let seconds = seconds * runs;
        let mut quote = match self.objective {
            Objective::Step(_) => {
                let parameter = op.update().map(|_| local.operands[Update::PARAMETER]);
                let cost = seconds + parameter.map_or(0.0, |bytes| self.reduction(bytes, strategy));
                Quote { seconds: cost * count, ..self.memory(class, local, seconds) }
            }
            Objective::Bound { beside, sharing, .. } => {
                let quote = self.bound(class, (strategy, local), seconds, sharing, beside);
                // Ranks of an axis that holds copies store what they do not divide in parts as well.
                let is_parted =
                    self.prepared.is_stored(class) && beside.axis.is_some_and(|axis| self.copies.contains(&axis));
                let divided = beside.divided();
                let counted = if is_parted { divided } else { beside.counted(self.placed.mesh, strategy) };
                quote.scaled(counted, divided)
            }
        };
        quote.again.retain(|again| again.count * again.bytes > 0.0);
        quote
    }

    /// What all nodes of a class cost at least, of which one takes so many seconds in a step.
    fn bound(
        &self,
        class: usize,
        (strategy, local): (&Strategy, &Local),
        seconds: f64,
        sharing: Sharing,
        beside: Beside,
    ) -> Quote {
        let (prepared, mesh) = (self.prepared, self.placed.mesh);
        let (op, count) = (prepared.op(class), prepared.folded.classes[class].members.len() as f64);
        let is_copy = prepared.is_copy(class);
        if !prepared.is_stored(class) {
            let seconds = if prepared.in_loop(class) { seconds * sharing.kernels } else { seconds };
            return Quote { seconds: seconds * count, ..self.alive(class, local, seconds) };
        }
        let is_whole = beside.parts <= 1.0;
        let parts = sharing.parts(prepared, class, (mesh, strategy), is_whole);
        let bytes = |list: &[u64], index: usize| list.get(index).map_or(0.0, |bytes| *bytes as f64);
        let kind = kind_under(mesh, strategy);
        // Which ranks talk is known where the axes of experts are placed.
        let is_known = is_whole || mesh.family(Family::Expert).is_empty();
        let (seconds, kept) = match op {
            op if op.update().is_some() => {
                let gradient = bytes(&local.operands, Update::GRADIENT);
                let reduced = if is_known {
                    sharing.reduce[kind] * prepared.on_wire(stored_type(prepared, class), gradient)
                } else {
                    0.0
                };
                let kept = match (self.placed.microbatches > 1, sharing.zero >= 2) {
                    (false, _) => 0.0,
                    (true, true) => gradient / parts,
                    (true, false) => gradient,
                };
                (seconds / parts + reduced, kept)
            }
            _ if is_copy => {
                let [first, again] = self.passes[class].map(f64::from);
                // Each pass reads an arrangement of codes of its own.
                let is_cast = matches!(op, Op::Cast(_));
                let (made, one) = (self.read(class, local), bytes(&local.results, 0));
                let times = if sharing.is_dropped && is_cast { first + again } else { first.max(again) };
                // With axes that are not placed, it may be that nothing divides it further.
                let is_sure = is_whole || (is_known && Sharing::divides_wherever(prepared, class, mesh, parts));
                let is_gathered = parts > 1.0 && is_sure;
                let gathered = if is_gathered { times * sharing.gather[kind] * made } else { 0.0 };
                // With one microbatch, what the backward pass reads is there where that begins.
                let kept = if self.placed.microbatches > 1 { made } else { again * one.min(made) };
                let is_gathered_late = sharing.zero == 3 || (!is_cast && sharing.zero >= 1);
                // The weights of a block are gathered beside those of the next.
                let kept = match (is_gathered_late, is_gathered) {
                    (true, true) if is_cast => kept / parts + 2.0 * kept / self.blocks,
                    (true, _) => kept / parts,
                    (false, _) => kept,
                };
                (seconds / parts + gathered, kept)
            }
            Op::SumSquares(_) => (seconds / parts, 0.0),
            _ => (seconds, bytes(&local.results, 0) / parts),
        };
        Quote { seconds: seconds * count, bytes: kept * count, again: Vec::new() }
    }

    /// What reducing a gradient as large as its parameter costs on the axes that hold copies of that: half of it is
    /// hidden.
    fn reduction(&self, bytes: u64, strategy: &Strategy) -> f64 {
        let (mesh, cluster) = (self.placed.mesh, self.placed.cluster);
        let holds = |axis: &AxisId| strategy.choice(*axis) == Choice::Replicate;
        let group = match self.copies.iter().all(holds) {
            true => self.data,
            false => Group::new(mesh, &self.copies.iter().copied().filter(holds).collect::<Vec<_>>(), cluster),
        };
        let time = collective::alone(Collective::AllReduce, bytes as f64, group, cluster).0;
        // Many gradients are reduced together, so no launch belongs to one of them.
        0.5 * (time - cluster.device.collective_launch.value).max(0.0)
    }

    /// The bytes that a class keeps through the step or at the turn from forward to backward, ZeRO dividing what is
    /// stored. What can be computed again costs no more than that.
    fn memory(&self, class: usize, local: &Local, again: f64) -> Quote {
        let prepared = self.prepared;
        let count = prepared.folded.classes[class].members.len() as f64;
        let stored = |bytes: Option<&u64>| {
            let bytes = bytes.map_or(0.0, |bytes| *bytes as f64) * count / self.data.size() as f64;
            Quote { bytes, ..Quote::default() }
        };
        match prepared.op(class) {
            Op::Parameter(_) | Op::State(_) => stored(local.results.first()),
            _ if prepared.is_copy(class) => stored(Some(&(self.read(class, local) as u64))),
            op if op.update().is_some() && self.placed.microbatches > 1 => stored(local.operands.get(Update::GRADIENT)),
            _ => self.alive(class, local, again),
        }
    }

    /// The bytes that the loop reads of what a class makes of a parameter.
    fn read(&self, class: usize, local: &Local) -> f64 {
        let copies = self.prepared.lives.copies();
        let read = local.results.iter().enumerate().filter(|(result, _)| copies.is_read(class, *result));
        read.map(|(_, bytes)| *bytes as f64).sum()
    }

    /// What lives of a class's values at the turn from forward to backward.
    fn alive(&self, class: usize, local: &Local, again: f64) -> Quote {
        let mut quote = Quote::default();
        let known = self.under_way.as_ref().map(|all| &all[class]);
        let at_turn = |result: usize, [stay, go]: [f64; 2]| match known {
            Some(all) => all[result].clone(),
            None => AtTurn { stay, go: vec![[go, 1.0]] },
        };
        // Computing a node again makes all of its results: each bears a part of that by its bytes.
        let turn = self.prepared.lives.at_turn(class);
        let goes = turn.iter().zip(&local.results).filter(|([_, go], _)| *go > 0.0);
        let all = goes.map(|(_, bytes)| *bytes as f64).sum::<f64>().max(1.0);
        let [operand_bytes, operand_seconds] = self.operands.get(class).copied().unwrap_or_default();
        for (result, (turn, bytes)) in turn.iter().zip(&local.results).enumerate() {
            let (AtTurn { stay, go }, bytes) = (at_turn(result, *turn), *bytes as f64);
            let part = bytes / all;
            quote.bytes += stay * bytes;
            // All copies of a value are computed again, or none: a microbatch does so once.
            quote.again.extend(go.into_iter().map(|[count, copies]| Again {
                count,
                bytes: copies * bytes,
                seconds: part * again,
                operand: [copies * part * operand_bytes, part * operand_seconds],
            }));
        }
        quote
    }
}
