//! What data-parallel communication runs beside computation, and what of it shows.
//!
//! The loop over microbatches is cut into *stretches*: consecutive nodes of one block and direction.
//! Two clocks, the kernels' and the wire's, go through the stretches as the schedule does
//! ([`crate::schedule`]): the weights of a stretch are gathered while the one before runs, gradients are
//! reduced in buckets while backward goes on, and what is still on the wire at the end is waited for.
//! So a large gradient that comes last (an embedding's) shows. Kernels also wait for the wire where they
//! need its memory again, and where collectives of the tensor axes queue behind what is on it.
//!
//! What is not seen: squares of gradients that run beside the last reductions (without ZeRO the
//! simulation is up to 4% shorter), collectives of the tensor axes that run beside gradients of weights
//! (with tensor parallelism alone it is up to 4% shorter), and how ZeRO-3's gathers, reductions and
//! recomputation push each other on a wire that tensor parallelism uses too (up to 6% longer). Nor is what
//! chunks that overlap hide: such plans are compared by their programs alone ([`overlap`](super::overlap)).

use super::liveness::block_order;
use super::recompute::Selected;
use super::storage::{Copies, kind};
use crate::allocate::WINDOW;
use crate::cluster::Cluster;
use crate::lower::block_of;
use crate::shard::tensor::{Conversion, Placed, Prepared};
use shardc_ir::ops::Op;
use shardc_ir::{EntityRef, OpDef, Role};
use std::collections::VecDeque;

/// Bytes of one bucket of gradients, as the schedule closes them.
pub(super) const BUCKET: f64 = 32.0 * 1024.0 * 1024.0;

/// Weights that take less than this share of the time of the next ones are gathered with those before.
const SMALL: f64 = 0.1;

/// Consecutive nodes of one block and direction.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    is_backward: bool,
    /// Its block, in the order of the forward pass.
    block: Option<u64>,
    /// Kernels.
    seconds: f64,
    /// Collectives of the tensor axes: their seconds, and how many there are.
    tensor: f64,
    meetings: f64,
    /// Bytes of the weights that it reads, as they are after a gather, and of those that the other
    /// direction has not read before, by [`kind`].
    gathered: [f64; 2],
    gathered_first: [f64; 2],
}

/// Gradients that are reduced together.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// The stretch that makes the last of them, and when, as a share of it.
    stretch: usize,
    at: f64,
    bytes: f64,
    /// Which ranks reduce them.
    kind: usize,
}

/// The loop of one placed mesh.
#[derive(Debug, Default)]
pub struct Loop {
    stretches: Vec<Stretch>,
    buckets: Vec<Bucket>,
}

/// The seconds of a loop's collectives, for one way to hold copies.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// Per bucket, without parts and with them.
    reduce: [Vec<f64>; 2],
    /// Per stretch, of what its direction reads first and of all that it reads.
    gather: [Vec<f64>; 2],
}

/// Which data-parallel communication there is in a step.
#[derive(Clone, Copy, Debug)]
pub struct Traffic<'a> {
    /// The ZeRO stage, which says how gradients are reduced.
    pub zero: u64,
    /// Whether weights are gathered.
    pub gathers: bool,
    /// Whether gathered weights are dropped after each use.
    pub drops: bool,
    /// Whether gradients are reduced in every microbatch.
    pub reduces_in_loop: bool,
    /// The microbatches of the step.
    pub microbatches: u64,
    /// What is computed again.
    pub again: &'a Selected<'a>,
}

/// Seconds of communication: in all, and what a step takes longer for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shown {
    /// In all.
    pub all: f64,
    /// What shows, the slowdown of kernels beside it included.
    pub shown: f64,
}

/// What is on its way between the data ranks.
#[derive(Default)]
struct Wire {
    /// When it is free.
    free: f64,
    /// When each bucket ended that kernels have not waited for yet.
    ends: Vec<f64>,
    carried: f64,
}

impl Wire {
    /// Carries something that is ready at a moment; gives when it has arrived.
    fn carry(&mut self, ready: f64, seconds: f64) -> f64 {
        if seconds > 0.0 {
            self.free = self.free.max(ready) + seconds;
            self.carried += seconds;
        }
        self.free
    }

    /// Reduces a bucket that is ready at a moment; gives when kernels may go on: the allocator keeps the
    /// memory of the latest buckets alone from being used again.
    fn reduce(&mut self, ready: f64, seconds: f64) -> f64 {
        let end = self.carry(ready, seconds);
        self.ends.push(end);
        self.ends.len().checked_sub(1 + WINDOW).map_or(0.0, |index| self.ends[index])
    }
}

impl Loop {
    /// Cuts the loop of a placed mesh. `seconds` is what one node of each class takes, `divides` whether
    /// the data axes divide what it stores.
    pub fn new(
        prepared: &Prepared<'_>,
        placed: &Placed<'_>,
        conversions: &[Conversion],
        seconds: &[f64],
        divides: &dyn Fn(usize) -> bool,
    ) -> Self {
        let graph = prepared.graph;
        let order = block_order(graph);
        let mut tensor = vec![(0.0, 0.0); prepared.rules.len()];
        for conversion in conversions {
            let readers = prepared.folded.classes[conversion.reader].members.len();
            let each = conversion.count as f64 / readers as f64;
            tensor[conversion.reader].0 += conversion.seconds * each;
            tensor[conversion.reader].1 += each;
        }
        let bytes = |class: usize| {
            let local = placed.local(prepared, class, &placed.strategies[class]);
            local.results.first().map_or(0.0, |bytes| *bytes as f64)
        };
        let mut own = Self::default();
        // Per node, its stretch and the seconds of the stretch up to it; per value, who has gathered it.
        let mut place = vec![(0, 0.0); graph.node_count()];
        let mut gathered = vec![[false; 2]; graph.value_count()];
        let mut current = None;
        for (id, node) in graph.nodes() {
            let class = prepared.folded.class[id];
            if prepared.in_loop(class) && !node.op.is_leaf() {
                let key = (block_of(&node.path), node.role != Role::Forward);
                if current != Some(key) {
                    current = Some(key);
                    let block = order.get(key.0).copied();
                    own.stretches.push(Stretch { is_backward: key.1, block, ..Stretch::default() });
                }
                let Some(stretch) = own.stretches.last_mut() else { continue };
                stretch.seconds += seconds[class];
                stretch.tensor += tensor[class].0;
                stretch.meetings += tensor[class].1;
                for value in &node.operands {
                    let maker = prepared.folded.class[graph.value(*value).def];
                    let seen = &mut gathered[value.index()];
                    if !prepared.is_parameter[maker] || !divides(maker) || seen[usize::from(key.1)] {
                        continue;
                    }
                    let (size, kind) = (bytes(maker), kind(placed, maker));
                    stretch.gathered[kind] += size;
                    stretch.gathered_first[kind] += if seen[usize::from(!key.1)] { 0.0 } else { size };
                    seen[usize::from(key.1)] = true;
                }
            }
            place[id.index()] =
                (own.stretches.len().saturating_sub(1), own.stretches.last().map_or(0.0, |s| s.seconds));
        }
        own.fill_buckets(prepared, placed, &place);
        own
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
            let key = (block_of(&node.path), node.role != Role::Forward);
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
        let mut made: Vec<(usize, f64, usize)> = Vec::new();
        for (id, node) in graph.nodes().filter(|(_, node)| matches!(node.op, Op::Adamw(_))) {
            let class = prepared.folded.class[id];
            let local = placed.local(prepared, class, &placed.strategies[class]);
            let kind = kind(placed, class);
            made.push((graph.value(node.operands[1]).def.index(), local.operands[1] as f64, kind));
        }
        made.sort_by_key(|(def, ..)| *def);
        let last = [0, 1].map(|kind| made.iter().rposition(|(.., of)| *of == kind));
        let mut open = [0.0; 2];
        for (index, (def, bytes, kind)) in made.iter().enumerate() {
            open[*kind] += bytes;
            if open[*kind] >= BUCKET || last[*kind] == Some(index) {
                let (stretch, before) = place[*def];
                let all = self.stretches.get(stretch).map_or(0.0, |stretch| stretch.seconds);
                let at = if all > 0.0 { before / all } else { 1.0 };
                self.buckets.push(Bucket { stretch, at, bytes: open[*kind], kind: *kind });
                open[*kind] = 0.0;
            }
        }
    }

    /// The seconds of each collective, for ranks that hold copies in one way.
    pub fn times(&self, copies: &[Copies; 2], cluster: &Cluster) -> Times {
        let reduce = |zero: u64| {
            let of = |bucket: &Bucket| copies[bucket.kind].reduce(zero, bucket.bytes, cluster);
            self.buckets.iter().map(of).collect()
        };
        let gather = |bytes: &dyn Fn(&Stretch) -> [f64; 2]| {
            let of = |stretch: &Stretch| {
                copies.iter().zip(bytes(stretch)).map(|(of, bytes)| of.gather(bytes, cluster)).sum::<f64>()
            };
            self.stretches.iter().map(of).collect()
        };
        Times {
            reduce: [reduce(0), reduce(1)],
            gather: [gather(&|stretch| stretch.gathered_first), gather(&|stretch| stretch.gathered)],
        }
    }

    /// What the communication of a step takes and shows.
    pub fn shown(&self, traffic: &Traffic<'_>, times: &Times, cluster: &Cluster) -> Shown {
        let many = traffic.microbatches > 1;
        let gathers_in_loop = traffic.gathers && (traffic.drops || !many);
        let reduces_in_loop = traffic.reduces_in_loop || !many;
        let reduces = || self.buckets.iter().zip(times.reduce[usize::from(traffic.zero > 0)].iter().copied());
        let gathered = &times.gather[usize::from(traffic.drops)];
        // Outside of the loop nothing runs beside it.
        let mut outside = 0.0;
        if traffic.gathers && !gathers_in_loop {
            outside += gathered.iter().sum::<f64>();
        }
        if !reduces_in_loop {
            outside += reduces().map(|(_, seconds)| seconds).sum::<f64>();
        }
        let gathers = if gathers_in_loop { gathered.clone() } else { vec![0.0; gathered.len()] };
        let mut buckets = reduces().filter(|_| reduces_in_loop).peekable();
        let mut wire = Wire::default();
        let (mut now, mut alone): (f64, f64) = (0.0, 0.0);
        // The weights that come next are gathered from where the last ones were waited for; after small
        // ones (a norm's), whose memory holds nothing back, those after them as well.
        let mut next = gathers.iter().copied().filter(|seconds| *seconds > 0.0).peekable();
        let mut arrivals = VecDeque::new();
        let mut fetch = |wire: &mut Wire, now: f64, arrivals: &mut VecDeque<f64>| {
            while let Some(seconds) = next.next() {
                arrivals.push_back(wire.carry(now, seconds));
                if next.peek().is_none_or(|after| seconds > SMALL * after) {
                    break;
                }
            }
        };
        fetch(&mut wire, 0.0, &mut arrivals);
        for (index, stretch) in self.stretches.iter().enumerate() {
            let way = stretch.block.filter(|_| stretch.is_backward).and_then(|block| traffic.again.way(block));
            let again = way.map(|way| way.cost).unwrap_or_default();
            let kernels = stretch.seconds + again.seconds() - again.communication;
            let tensor = stretch.tensor + again.communication;
            alone += kernels + tensor;
            if gathers[index] > 0.0 {
                now = now.max(arrivals.pop_front().unwrap_or(0.0));
                // What was on the wire before these weights has arrived with them.
                wire.ends.clear();
                if arrivals.is_empty() {
                    fetch(&mut wire, now, &mut arrivals);
                }
            }
            // Between two collectives of the tensor axes, kernels and the wire go on by themselves.
            let meetings = if tensor > 0.0 { stretch.meetings.round().max(1.0) } else { 0.0 };
            let mut done = 0.0;
            for gap in 0..=meetings as u64 {
                let end = (gap + 1) as f64 / (meetings + 1.0);
                let is_here = |bucket: &Bucket| bucket.stretch < index || (bucket.stretch == index && bucket.at <= end);
                while let Some((bucket, seconds)) = buckets.next_if(|(bucket, _)| is_here(bucket)) {
                    now += kernels * (bucket.at - done).max(0.0);
                    done = done.max(bucket.at);
                    let free = wire.reduce(now, seconds);
                    // What is reduced in place gives no memory back.
                    now = if traffic.zero == 0 { now } else { now.max(free) };
                }
                now += kernels * (end - done).max(0.0);
                done = done.max(end);
                if (gap as f64) < meetings && tensor > 0.0 {
                    now = now.max(wire.free) + tensor / meetings;
                    wire.free = now;
                }
            }
        }
        for (_, seconds) in buckets {
            wire.carry(now, seconds);
        }
        let (inside, wire) = (wire.carried, wire.free);
        let bare = (now.max(wire) - alone).clamp(0.0, inside);
        let shown = bare + (inside - bare) * cluster.device.overlap_loss.value;
        let microbatches = traffic.microbatches as f64;
        Shown { all: outside + microbatches * inside, shown: outside + microbatches * shown }
    }
}
