//! Cuts the loop into stretches: what each takes, the weights that it reads, the collectives that it meets, and its
//! gradients in buckets.

use super::{BUCKET, Bucket, Loop, Stretch};
use crate::cost::host::Host;
use crate::cost::{Machine, is_product};
use crate::search::estimate::clocks::Meeting;
use crate::search::estimate::copies::root;
use crate::search::estimate::storage::kind;
use crate::search::estimate::turns::{Meetings, OfWeights, Reads, Weights, are_siblings};
use crate::shard::tensor::{Conversion, Placed, Prepared};
use shardc_ir::ops::{Op, Update};
use shardc_ir::{Bytes, EntityRef, Node, NodeId, OpDef, Role, ValueId};
use std::collections::{BTreeMap, HashMap};

impl Loop {
    /// Cuts the loop of a placed mesh. Per class, `seconds` is what one node takes, and `divides` the dimension of what it
    /// stores that ZeRO divides.
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
        let mut cut = Cut {
            prepared,
            placed,
            seconds,
            weights,
            meetings,
            own: Self::default(),
            place: Vec::with_capacity(graph.node_count()),
            current: None,
            is_settled: false,
            joined: Vec::new(),
            nodes: HashMap::new(),
            seen: vec![[false; 2]; graph.value_count()],
            forward: BTreeMap::new(),
        };
        for (id, node) in graph.nodes() {
            let class = prepared.folded.class[id];
            if matches!(node.op, Op::Input(_)) {
                let local = placed.local(prepared, class, &placed.strategies[class]);
                let bytes = local.results.first().map_or(0.0, |bytes| *bytes as f64);
                cut.own.reads_input(bytes, prepared, placed);
            }
            if prepared.in_loop(class) && !node.op.is_leaf() {
                cut.add(id, node, class);
            }
            let end = cut.own.stretches.last().map_or(0.0, |stretch| stretch.seconds);
            cut.place.push((cut.own.stretches.len().saturating_sub(1), end));
        }
        cut.finish()
    }

    /// Adds an input of which a microbatch reads so many bytes.
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

    /// The fewest stretches of the forward pass and of the backward pass that gather weights, if data ranks store the
    /// results of the classes that `divides` names in parts.
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

/// The loop while its nodes are added in their order.
struct Cut<'a> {
    prepared: &'a Prepared<'a>,
    placed: &'a Placed<'a>,
    /// Per class, the seconds of one node.
    seconds: &'a [f64],
    weights: Weights<'a>,
    meetings: Meetings,
    own: Loop,
    /// Per node, its stretch, and the seconds of the stretch's kernels up to its end.
    place: Vec<(usize, f64)>,
    /// The module of the current stretch, and whether it is one of the backward pass.
    current: Option<(u32, bool)>,
    /// Whether it is known where the current stretch gathers the weights of the next.
    is_settled: bool,
    /// Gradients of weights in the current stretch that lowering joins: a class, and the indices of the nodes.
    joined: Vec<(usize, Vec<usize>)>,
    /// Per node of the forward pass, its stretch and its index in it.
    nodes: HashMap<NodeId, (usize, usize)>,
    /// Per value, whether the forward pass has read it, and the backward pass.
    seen: Vec<[bool; 2]>,
    /// Per block, the weights that its forward pass reads, what it takes to bring them if they are dropped, and the
    /// class that reads them.
    forward: BTreeMap<u64, Vec<(ValueId, Reads, usize)>>,
}

impl Cut<'_> {
    /// Adds a node of the loop.
    fn add(&mut self, id: NodeId, node: &Node, class: usize) {
        let is_backward = node.role != Role::Forward;
        let key = (self.prepared.blocks.module(id), is_backward);
        if self.current != Some(key) {
            self.begin(key, self.prepared.blocks.of(id));
        }
        self.join(id, class);
        self.meet_operands(node, class);
        self.read_weights(node, class, is_backward);
        let index = self.own.stretches.len() - 1;
        let stretch = &mut self.own.stretches[index];
        let nth = stretch.nodes.len();
        stretch.seconds += self.seconds[class];
        if !is_backward {
            self.nodes.insert(id, (index, nth));
            stretch.nodes.push((class, self.seconds[class], is_product(&node.op)));
        }
        // What is merged into an earlier instruction is made there.
        let made = match self.prepared.emitted[class].ahead {
            0 => stretch.seconds,
            ahead => self.place[id.index() - ahead].1.min(stretch.seconds),
        };
        let next = stretch.nodes.len();
        let behind = self.meetings.behind[class].iter();
        stretch.meetings.extend(behind.map(|of| Meeting { at: made, node: next, own: nth, ..*of }));
        if is_product(&node.op) {
            self.is_settled = true;
            stretch.products.push(made);
        }
    }

    /// Begins a stretch.
    fn begin(&mut self, key: (u32, bool), block: Option<u64>) {
        (self.current, self.is_settled) = (Some(key), false);
        self.own.stretches.push(Stretch { is_backward: key.1, block, ..Stretch::default() });
        self.stand_together();
    }

    /// Remembers a gradient of a weight that lowering joins with others of its stretch.
    fn join(&mut self, id: NodeId, class: usize) {
        let (prepared, placed) = (self.prepared, self.placed);
        if prepared.most_joined(class, placed.microbatches) > 1 {
            match self.joined.iter_mut().find(|(other, _)| are_siblings(prepared, placed, [*other, class])) {
                Some((_, nodes)) => nodes.push(id.index()),
                None => self.joined.push((class, vec![id.index()])),
            }
        }
    }

    /// Puts joined gradients of weights where the last of them is.
    fn stand_together(&mut self) {
        for (_, nodes) in self.joined.drain(..) {
            if let Some(last) = nodes.last().map(|last| self.place[*last]) {
                nodes.iter().for_each(|node| self.place[*node] = last);
            }
        }
    }

    /// Adds the collectives that bring operands of a node into the layout in which it reads them. Lowering converts
    /// operands in their order.
    fn meet_operands(&mut self, node: &Node, class: usize) {
        let (prepared, graph) = (self.prepared, self.prepared.graph);
        let operand = |maker: usize| {
            let mut makers = node.operands.iter().map(|value| prepared.folded.class[graph.value(*value).def]);
            makers.position(|of| of == maker)
        };
        let before = self.meetings.before[class].iter();
        let mut late: Vec<(usize, &Meeting)> = before.filter_map(|(maker, of)| Some((operand(*maker)?, of))).collect();
        late.sort_by_key(|(operand, _)| *operand);
        let index = self.own.stretches.len() - 1;
        let stretch = &mut self.own.stretches[index];
        let (at, nth) = (stretch.seconds, stretch.nodes.len());
        let nodes = &self.nodes;
        let maker = |operand: usize| {
            let maker = nodes.get(&graph.value(node.operands[operand]).def);
            maker.filter(|(of, _)| *of == index).map_or(nth, |(_, maker)| *maker)
        };
        stretch.meetings.extend(late.into_iter().map(|(operand, of)| {
            let own = if of.is_shared { maker(operand) } else { nth };
            Meeting { at, node: nth, own, ..*of }
        }));
    }

    /// Adds the weights that a node, which is about to run, reads.
    fn read_weights(&mut self, node: &Node, class: usize, is_backward: bool) {
        let index = self.own.stretches.len() - 1;
        let stretch = &mut self.own.stretches[index];
        let is_met = stretch.meetings.iter().any(|meeting| !meeting.is_local);
        let is_first = stretch.reads[..2] == [Reads::default(); 2];
        for operand in &node.operands {
            let Some(value) = root(self.prepared.graph, *operand) else { continue };
            let seen = &mut self.seen[value.index()];
            let [own, other] = [is_backward, !is_backward].map(|direction| seen[usize::from(direction)]);
            let Some([kept, dropped]) = self.weights.read((*operand, value), class, [own, other]) else { continue };
            seen[usize::from(is_backward)] = true;
            stretch.reads[0].add(kept);
            stretch.reads[1].add(dropped);
            if [kept, dropped] == [Reads::default(); 2] {
                continue;
            }
            if let Some(block) = stretch.block.filter(|_| !is_backward) {
                self.forward.entry(block).or_default().push((value, dropped, class));
            }
            if is_first || (is_met && !self.is_settled) {
                stretch.fetch = stretch.seconds;
                self.is_settled |= is_met;
            }
        }
    }

    /// The loop, when all nodes are added.
    fn finish(mut self) -> Loop {
        self.stand_together();
        for stretch in self.own.stretches.iter_mut().filter(|stretch| stretch.is_backward) {
            let of_block = stretch.block.and_then(|block| self.forward.remove(&block)).unwrap_or_default();
            stretch.reads[2] = stretch.reads[1];
            for (_, read, class) in of_block.into_iter().filter(|(value, ..)| !self.seen[value.index()][1]) {
                stretch.reads[2].add(read);
                stretch.again.push(class);
            }
        }
        let turns = |of: &Stretch| of.reads.iter().any(|reads| reads.turned.turn.seconds() > 0.0);
        self.own.turns = self.own.stretches.iter().any(turns);
        self.own.stretches.iter_mut().for_each(|stretch| stretch.meetings.sort_by(|a, b| a.at.total_cmp(&b.at)));
        self.own.fill_buckets(self.prepared, self.placed, &self.place);
        self.own
    }
}
