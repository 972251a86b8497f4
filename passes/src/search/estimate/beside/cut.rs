//! The loop cut into stretches, with what each takes, reads and meets, and the gradients that it makes in buckets.

use super::{BUCKET, Bucket, Loop, Stretch};
use crate::cost::host::Host;
use crate::cost::{Machine, is_product};
use crate::search::estimate::clocks::Meeting;
use crate::search::estimate::copies::root;
use crate::search::estimate::storage::kind;
use crate::search::estimate::turns::{Meetings, OfWeights, Reads, Weights, are_siblings};
use crate::shard::tensor::{Conversion, Placed, Prepared};
use shardc_ir::ops::{Op, Update};
use shardc_ir::{Bytes, EntityRef, NodeId, OpDef, Role, ValueId};
use std::collections::{BTreeMap, HashMap};

/// Puts nodes that are joined where the last of them is.
fn stand_together(place: &mut [(usize, f64)], joined: impl Iterator<Item = (usize, Vec<usize>)>) {
    for (_, nodes) in joined {
        let last = nodes.last().map(|last| place[*last]);
        last.iter().for_each(|last| nodes.iter().for_each(|node| place[*node] = *last));
    }
}

impl Loop {
    /// Cuts the loop of a placed mesh. `seconds` is what one node of each class takes, `divides` which dimension of what
    /// it stores the data axes divide.
    pub(in crate::search) fn new(
        prepared: &Prepared<'_>,
        placed: &Placed<'_>,
        conversions: &[Conversion],
        seconds: &[f64],
        divides: &dyn Fn(usize) -> Option<usize>,
    ) -> Self {
        let graph = prepared.graph;
        let weights = Weights { prepared, placed, of: OfWeights::new(prepared, conversions), divides };
        let meetings = Meetings::new(prepared, placed, conversions, seconds);
        let bytes = |class: usize| {
            let local = placed.local(prepared, class, &placed.strategies[class]);
            local.results.first().map_or(0.0, |bytes| *bytes as f64)
        };
        let mut own = Self::default();
        // Per node, its stretch and the seconds of the stretch up to it; per value, which directions have read it.
        let mut place: Vec<(usize, f64)> = Vec::with_capacity(graph.node_count());
        let mut seen = vec![[false; 2]; graph.value_count()];
        // Per block, what its forward pass gathers, and which classes read that.
        let mut forward: BTreeMap<u64, Vec<(ValueId, Reads, usize)>> = BTreeMap::new();
        let (mut current, mut is_settled) = (None, false);
        // Gradients of weights that lowering joins stand where the last of them does.
        let mut joined: Vec<(usize, Vec<usize>)> = Vec::new();
        // Per node of the forward pass, its stretch and its place in it.
        let mut nodes: HashMap<NodeId, (usize, usize)> = HashMap::new();
        for (id, node) in graph.nodes() {
            let class = prepared.folded.class[id];
            if matches!(node.op, Op::Input(_)) {
                own.reads_input(bytes(class), prepared, placed);
            }
            if prepared.in_loop(class) && !node.op.is_leaf() {
                let key = (prepared.blocks.module(id), node.role != Role::Forward);
                if current != Some(key) {
                    (current, is_settled) = (Some(key), false);
                    own.stretches.push(Stretch {
                        is_backward: key.1,
                        block: prepared.blocks.of(id),
                        ..Stretch::default()
                    });
                    stand_together(&mut place, joined.drain(..));
                }
                if prepared.most_joined(class, placed.microbatches) > 1 {
                    match joined.iter_mut().find(|(other, _)| are_siblings(prepared, placed, [*other, class])) {
                        Some((_, nodes)) => nodes.push(id.index()),
                        None => joined.push((class, vec![id.index()])),
                    }
                }
                let index = own.stretches.len() - 1;
                let stretch = &mut own.stretches[index];
                let begins = |at: f64, node: usize, own: usize| move |of: &Meeting| Meeting { at, node, own, ..*of };
                let nth = stretch.nodes.len();
                let before = stretch.seconds;
                // Lowering converts operands in their order.
                let operand = |maker: usize| {
                    let mut makers = node.operands.iter().map(|value| prepared.folded.class[graph.value(*value).def]);
                    makers.position(|of| of == maker)
                };
                let late = meetings.before[class].iter().filter_map(|(maker, of)| Some((operand(*maker)?, of)));
                let mut late: Vec<(usize, &Meeting)> = late.collect();
                late.sort_by_key(|(operand, _)| *operand);
                let maker = |operand: usize| {
                    let shared = nodes.get(&graph.value(node.operands[operand]).def);
                    shared.filter(|(of, _)| *of == index).map_or(nth, |(_, maker)| *maker)
                };
                stretch.meetings.extend(late.into_iter().map(|(operand, of)| {
                    let own = if of.is_shared { maker(operand) } else { nth };
                    begins(before, nth, own)(of)
                }));
                stretch.seconds += seconds[class];
                if !key.1 {
                    nodes.insert(id, (index, nth));
                    stretch.nodes.push((class, seconds[class], is_product(&node.op)));
                }
                // What is merged into an earlier instruction is made there.
                let made = match prepared.emitted[class].ahead {
                    0 => stretch.seconds,
                    ahead => place[id.index() - ahead].1.min(stretch.seconds),
                };
                let is_met = stretch.meetings.iter().any(|meeting| !meeting.is_local);
                let is_first = stretch.reads[..2] == [Reads::default(); 2];
                let next = stretch.nodes.len();
                stretch.meetings.extend(meetings.behind[class].iter().map(begins(made, next, nth)));
                for operand in &node.operands {
                    let Some(value) = &root(graph, *operand) else { continue };
                    let [other, own] = [!key.1, key.1].map(|is_backward| seen[value.index()][usize::from(is_backward)]);
                    let Some([kept, dropped]) = weights.read((*operand, *value), class, [own, other]) else { continue };
                    seen[value.index()][usize::from(key.1)] = true;
                    stretch.reads[0].add(kept);
                    stretch.reads[1].add(dropped);
                    if [kept, dropped] == [Reads::default(); 2] {
                        continue;
                    }
                    if let Some(block) = stretch.block.filter(|_| !key.1) {
                        forward.entry(block).or_default().push((*value, dropped, class));
                    }
                    if is_first || (is_met && !is_settled) {
                        stretch.fetch = before;
                        is_settled |= is_met;
                    }
                }
                is_settled |= is_product(&node.op);
                if is_product(&node.op) {
                    stretch.products.push(made);
                }
            }
            place.push((own.stretches.len().saturating_sub(1), own.stretches.last().map_or(0.0, |s| s.seconds)));
        }
        stand_together(&mut place, joined.drain(..));
        for stretch in own.stretches.iter_mut().filter(|stretch| stretch.is_backward) {
            let of_block = stretch.block.and_then(|block| forward.remove(&block)).unwrap_or_default();
            stretch.reads[2] = stretch.reads[1];
            for (_, read, class) in of_block.into_iter().filter(|(value, ..)| !seen[value.index()][1]) {
                stretch.reads[2].add(read);
                stretch.again.push(class);
            }
        }
        let turns = |of: &Stretch| of.reads.iter().any(|reads| reads.turned.turn.seconds() > 0.0);
        own.turns = own.stretches.iter().any(turns);
        own.stretches.iter_mut().for_each(|stretch| stretch.meetings.sort_by(|a, b| a.at.total_cmp(&b.at)));
        own.fill_buckets(prepared, placed, &place);
        own
    }

    /// A microbatch reads so many bytes of an input.
    fn reads_input(&mut self, bytes: f64, prepared: &Prepared<'_>, placed: &Placed<'_>) {
        let arrives = Host::of(placed.cluster).feed(bytes);
        if prepared.target.brings_ahead(Bytes(bytes as u64)) {
            let machine = Machine::own(&placed.cluster.device);
            self.feed += machine.launch() + 2.0 * bytes / machine.bandwidth();
            self.brought += arrives;
            self.staged += bytes as u64;
        } else {
            self.feed += arrives;
        }
    }

    /// How many stretches gather something at least, of the forward pass and of the other, if the data ranks store
    /// parts of what the classes make that `divides` names.
    pub fn gathers(prepared: &Prepared<'_>, divides: &dyn Fn(usize) -> bool) -> [u64; 2] {
        let graph = prepared.graph;
        let is_divided: Vec<bool> =
            (0..prepared.rules.len()).map(|class| prepared.is_parameter[class] && divides(class)).collect();
        let mut seen = vec![[false; 2]; graph.value_count()];
        let (mut current, mut counted, mut counts) = (None, false, [0; 2]);
        for (id, node) in graph.nodes() {
            if !prepared.in_loop(prepared.folded.class[id]) || node.op.is_leaf() {
                continue;
            }
            let key = (prepared.blocks.module(id), node.role != Role::Forward);
            if current != Some(key) {
                (current, counted) = (Some(key), false);
            }
            for value in &node.operands {
                let maker = prepared.folded.class[graph.value(*value).def];
                let is_known = std::mem::replace(&mut seen[value.index()][usize::from(key.1)], true);
                if is_divided[maker] && !is_known && !counted {
                    counted = true;
                    counts[usize::from(key.1)] += 1;
                }
            }
        }
        counts
    }

    /// Gradients in the order in which they are made, merged as the schedule merges them.
    fn fill_buckets(&mut self, prepared: &Prepared<'_>, placed: &Placed<'_>, place: &[(usize, f64)]) {
        let graph = prepared.graph;
        let mut made: Vec<(usize, (usize, f64), usize)> = Vec::new();
        for (id, gradient) in graph.updates().map(|(id, node)| (id, node.operands[Update::GRADIENT])) {
            let class = prepared.folded.class[id];
            let local = placed.local(prepared, class, &placed.strategies[class]);
            let kind = kind(placed, class);
            let bytes = prepared.on_wire(graph.ty(gradient), local.operands[Update::GRADIENT] as f64);
            made.push((graph.value(gradient).def.index(), (class, bytes), kind));
        }
        made.sort_by_key(|(def, ..)| *def);
        let last = [0, 1].map(|kind| made.iter().rposition(|(.., of)| *of == kind));
        let mut open = [const { (0.0, Vec::new()) }; 2];
        for (index, (def, gradient, kind)) in made.iter().enumerate() {
            let (bytes, gradients) = &mut open[*kind];
            *bytes += gradient.1;
            gradients.push(*gradient);
            if *bytes >= BUCKET || last[*kind] == Some(index) {
                let ((stretch, at), (_, gradients)) = (place[*def], std::mem::take(&mut open[*kind]));
                let yielded = self.stretches.get(stretch).map(|stretch| stretch.yielded(at));
                let (at, is_open) = yielded.unwrap_or((at, false));
                self.buckets.push(Bucket { stretch, at, is_open, gradients, kind: *kind });
            }
        }
    }
}
