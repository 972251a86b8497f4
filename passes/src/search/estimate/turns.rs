//! Values that change their layout, as the sums of a mesh see them: what is kept of them through the loop, what shows of
//! them beside kernels, where they begin, and what weights take.

use super::clocks::Meeting;
use super::storage::kind;
use crate::cost::Machine;
use crate::shard::layout::Turn;
use crate::shard::tensor::{Conversion, Placed, Prepared};
use shardc_ir::{Op, Role, ValueId};
use std::collections::BTreeMap;

/// Bytes of what is made of results of classes in front of the loop for readers in it, and kept through all of it.
pub(in crate::search) fn converted_once(
    prepared: &Prepared<'_>,
    conversions: &[Conversion],
) -> BTreeMap<(usize, usize), f64> {
    let mut bytes = BTreeMap::new();
    // What no kernel moves is a view.
    let is_kept =
        |of: &&Conversion| of.turn.seconds() > 0.0 && !prepared.in_loop(of.maker) && prepared.in_loop(of.reader);
    for of in conversions.iter().filter(is_kept) {
        *bytes.entry((of.maker, of.result)).or_default() += of.bytes * of.count as f64;
    }
    bytes
}

/// Conversions with the seconds that show of them: they run beside the kernels between the maker and the first reader
/// (the gradient of a weight, beside the reduction of that of its activation), which lose a share of their rate to it.
/// With each, by how much more shows where the gradients of weights are a pass by themselves.
pub(in crate::search) fn beside_kernels(
    prepared: &Prepared<'_>,
    placed: &Placed<'_>,
    conversions: &[Conversion],
    seconds: &[f64],
) -> Vec<(Conversion, f64)> {
    let loss = placed.cluster.device.overlap_loss.value;
    let shown = |conversion: &Conversion| {
        let hidden = |beside: f64| conversion.turn.wire.min(beside / (1.0 - loss)) * (1.0 - loss);
        let (mut all, mut apart) = (0.0, 0.0);
        for (class, times) in between(prepared, placed, conversion) {
            all += seconds[class] * times;
            apart += if prepared.is_late(class) { 0.0 } else { seconds[class] };
        }
        let turn = Turn { wire: conversion.turn.wire - hidden(all), ..conversion.turn };
        (Conversion { turn, ..*conversion }, hidden(all) - hidden(apart))
    };
    conversions.iter().map(shown).collect()
}

/// Whether a conversion is one of a microbatch's passes: between what is in the loop, or of a statistic of the whole batch,
/// of which all is one microbatch then. Single numbers wait for their readers.
pub(in crate::search) fn is_in_pass(prepared: &Prepared<'_>, placed: &Placed<'_>, of: &Conversion) -> bool {
    let value = prepared.graph.node(prepared.folded.classes[of.maker].node).results[of.result];
    let is_statistic = placed.microbatches == 1
        && of.is_early
        && prepared.role(of.reader) != Role::Optimizer
        && !prepared.is_gradient[of.maker]
        && prepared.graph.ty(value).elements() > 1;
    prepared.in_loop(of.maker) && (prepared.in_loop(of.reader) || is_statistic)
}

/// What [runs between](Prepared::between) the maker and the first reader of a conversion, and how many times as much of
/// each: gradients of weights that lowering joins with others move down to the last of them, where a collective is next.
fn between(prepared: &Prepared<'_>, placed: &Placed<'_>, of: &Conversion) -> Vec<(usize, f64)> {
    let all: Vec<usize> = prepared.between(of, placed.microbatches).collect();
    let times = |class: usize| {
        if prepared.most_joined(class, placed.microbatches) < 2 {
            return 1.0;
        }
        let own = prepared.local_types(class, &placed.strategies[class], placed.mesh);
        let Some((region, _)) = prepared.beside(class, &own.0, &own.1) else { return 1.0 };
        let there = all.iter().filter(|other| are_siblings(prepared, placed, [**other, class])).count().max(1);
        (region.steps.len() as f64 / there as f64).max(1.0)
    };
    all.iter().map(|class| (*class, times(*class))).collect()
}

/// Whether nodes of two classes do the same with as much, and so may be one instruction.
pub(in crate::search) fn are_siblings(prepared: &Prepared<'_>, placed: &Placed<'_>, [one, other]: [usize; 2]) -> bool {
    let types = |class: usize| prepared.local_types(class, &placed.strategies[class], placed.mesh);
    one == other || (prepared.op(one) == prepared.op(other) && types(one) == types(other))
}

/// The meetings that begin at a node of each class.
pub(in crate::search) struct Meetings {
    /// Where a value is read that a node of another class makes.
    pub before: Vec<Vec<(usize, Meeting)>>,
    /// Where it is made, on average.
    pub behind: Vec<Vec<Meeting>>,
}

impl Meetings {
    pub fn new(prepared: &Prepared<'_>, placed: &Placed<'_>, conversions: &[Conversion], seconds: &[f64]) -> Self {
        let mut own = Self { before: vec![Vec::new(); seconds.len()], behind: vec![Vec::new(); seconds.len()] };
        let meets = |of: &&Conversion| of.turn.seconds() > 0.0 && is_in_pass(prepared, placed, of);
        for conversion in conversions.iter().filter(meets) {
            let between = between(prepared, placed, conversion).into_iter();
            let slack: f64 = between.map(|(class, times)| seconds[class] * times).sum();
            let Conversion { maker, reader, turn, is_local, .. } = *conversion;
            let Turn { before, wire, after } = turn;
            let meeting = Meeting { before, seconds: wire, after, is_local, ..Meeting::default() };
            if conversion.is_early {
                let each = conversion.count as f64 / prepared.folded.classes[maker].members.len() as f64;
                let [before, seconds, after] = [before, wire, after].map(|seconds| seconds * each);
                own.behind[maker].push(Meeting { slack, before, seconds, after, ..meeting });
            } else {
                // What kernels prepare for the wire where the value is read was not on its way before.
                let since = if before > 0.0 { 0.0 } else { slack };
                own.before[reader].push((maker, Meeting { since, is_shared: conversion.is_shared, ..meeting }));
            }
        }
        own
    }
}

/// A change of layout, with what its collectives take without a byte.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::search) struct Turned {
    pub turn: Turn,
    start: f64,
}

impl Turned {
    /// With another of the same value behind it.
    fn then(self, next: Self) -> Self {
        Self { turn: self.turn.then(next.turn), start: self.start + next.start }
    }

    /// With that of another value beside it, in the same collectives.
    fn beside(self, other: Self) -> Self {
        let (a, b) = (self.turn, other.turn);
        let wire = a.wire + b.wire - self.start.min(other.start);
        let turn = Turn { before: a.before + b.before, wire, after: a.after + b.after };
        Self { turn, start: self.start.max(other.start) }
    }
}

/// What a reader alone takes, or all of them.
type ByReader = (Option<usize>, Turned);

/// What of weights changes its layout where they are read: once in front of the loop, which runs beside the first
/// microbatch; but of those that data ranks store in parts and that are dropped again in each pass of a microbatch
/// ([`beside`](crate::search::estimate::beside)).
#[derive(Default)]
pub(in crate::search) struct OfWeights {
    /// Per class and result of what is stored: the reader, if it is but one, and what it takes.
    turns: BTreeMap<(usize, usize), Vec<ByReader>>,
}

impl OfWeights {
    /// Those of a placed mesh.
    pub fn new(prepared: &Prepared<'_>, conversions: &[Conversion]) -> Self {
        let mut own = Self::default();
        for of in conversions.iter().filter(|of| prepared.is_of_weight(of.maker, of.reader)) {
            let reader = (!of.is_shared).then_some(of.reader);
            let turned = Turned { turn: of.turn, start: of.start };
            own.turns.entry((of.maker, of.result)).or_default().push((reader, turned));
        }
        own
    }

    /// What it takes to bring a result of a class into the layout in which others read it: for all of them, and for
    /// this one alone.
    pub fn turns(&self, (maker, result): (usize, usize), reader: usize) -> [Turned; 2] {
        let all = || self.turns.get(&(maker, result)).into_iter().flatten();
        let of = |only| all().filter(move |(of, _)| *of == only).map(|(_, turned)| *turned);
        [None, Some(reader)].map(|only| of(only).fold(Turned::default(), Turned::then))
    }
}

/// Weights that a stretch reads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::search) struct Reads {
    /// Bytes of those that data ranks store in parts, as they are after a gather, by [`kind`].
    pub bytes: [f64; 2],
    /// Seconds in which kernels bring into order what is gathered along an inner dimension.
    pub ordered: f64,
    /// What it takes to bring them into the layout along the tensor axes in which they are read: gathers of a stretch are
    /// merged.
    pub turned: Turned,
}

impl Reads {
    /// Adds others.
    pub fn add(&mut self, other: Self) {
        self.bytes.iter_mut().zip(other.bytes).for_each(|(own, more)| *own += more);
        self.ordered += other.ordered;
        self.turned = self.turned.beside(other.turned);
    }
}

/// What reads weights under a placed mesh.
pub(in crate::search) struct Weights<'a> {
    pub prepared: &'a Prepared<'a>,
    pub placed: &'a Placed<'a>,
    pub of: OfWeights,
    pub divides: &'a dyn Fn(usize) -> Option<usize>,
}

impl Weights<'_> {
    /// What a node of a class takes to read a value that shows another, if that is kept and if it is dropped, where nodes
    /// of its own direction and of the other have read it before or not; none, if it is no weight.
    pub fn read(
        &self,
        (value, shown): (ValueId, ValueId),
        reader: usize,
        [own, other]: [bool; 2],
    ) -> Option<[Reads; 2]> {
        let graph = self.prepared.graph;
        let of = |value: ValueId| (self.prepared.folded.class[graph.value(value).def], graph.value(value).index);
        let (maker, result) = of(shown);
        if !self.prepared.is_parameter[maker] {
            return None;
        }
        let [shared, only] = self.of.turns(of(value), reader);
        let alone = Reads { turned: only, ..Reads::default() };
        let turned = shared.then(only);
        let Some(dim) = (self.divides)(maker) else {
            return Some([if own || other { alone } else { Reads { turned, ..alone } }, Reads::default()]);
        };
        let local = self.placed.local(self.prepared, maker, &self.placed.strategies[maker]);
        let size = local.results.first().map_or(0.0, |bytes| *bytes as f64);
        let machine = Machine::own(&self.placed.cluster.device);
        // Of codes, one arrangement or the other.
        let is_inner = if matches!(self.prepared.op(maker), Op::Quantize(_)) { dim != result } else { dim > 0 };
        let ordered = if is_inner { 2.0 * size / machine.bandwidth() + machine.launch() } else { 0.0 };
        let mut bytes = [0.0; 2];
        bytes[kind(self.placed, maker)] = size;
        let all = Reads { bytes, ordered, turned };
        Some([if own || other { alone } else { all }, if own { alone } else { all }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two gathers of a stretch are one, which starts once; two steps of one value are two.
    #[test]
    fn gathers_of_a_stretch_start_once() {
        let turned = |wire: f64, start: f64| Turned { turn: Turn { wire, after: 1.0, ..Turn::default() }, start };
        let both = turned(5.0, 2.0).beside(turned(4.0, 3.0));
        assert_eq!((both.turn.wire, both.turn.after, both.start), (7.0, 2.0, 3.0));
        let steps = turned(5.0, 2.0).then(turned(4.0, 3.0));
        assert_eq!((steps.turn.wire, steps.turn.after, steps.start), (9.0, 2.0, 5.0));
        assert_eq!(Turned::default().beside(steps), steps);
    }

    /// What kernels do before the first collective is before the wire; what they do behind it, behind all of it.
    #[test]
    fn kernels_are_before_the_wire_or_behind_it() {
        let [cut, gather] = [Turn { after: 1.0, ..Turn::default() }, Turn { before: 2.0, wire: 4.0, after: 8.0 }];
        assert_eq!(cut.then(gather), Turn { before: 3.0, wire: 4.0, after: 8.0 });
        assert_eq!(gather.then(cut), Turn { before: 2.0, wire: 4.0, after: 9.0 });
        assert_eq!(gather.then(gather), Turn { before: 2.0, wire: 8.0, after: 18.0 });
    }
}
