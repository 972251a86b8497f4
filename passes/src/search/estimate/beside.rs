//! What communication runs beside computation in the loop over microbatches, and what of it shows.
//!
//! The loop is cut into *stretches*: consecutive nodes of one block and direction. Two clocks, the kernels' and the
//! wire's ([`Clocks`]), go through the stretches as the schedule does ([`crate::schedule`]): the weights of a stretch
//! are gathered while the one before runs, values whose layout changes are on their way between the kernel that makes
//! them and the first that reads them, gradients are reduced in buckets while backward goes on, and what is still on
//! the wire at the end is waited for. So a large gradient that comes last (an embedding's) shows. Kernels also wait
//! for the wire where they need its memory again.
//!
//! What is not seen: squares of gradients that run beside the last reductions, conversions that begin before their
//! reader beside anything but gradients of weights, and how exchanges between experts queue behind reductions of the
//! experts' gradients (the simulation is up to 4% longer). Nor is what chunks that overlap hide: such plans are compared
//! by their programs alone
//! ([`overlap`](crate::search::choose::overlap)).

mod cut;

use super::clocks::{Clocks, Meeting};
use super::recompute::{Selected, Way};
use super::storage::Storage;
use super::turns::{Reads, Turned};
use crate::cluster::Cluster;
use crate::schedule::{BUCKET_BYTES, SMALL, YIELDS};
use crate::shard::layout::Turn;
use std::collections::VecDeque;

/// Bytes of one bucket of gradients.
pub(in crate::search) const BUCKET: f64 = BUCKET_BYTES as f64;

/// Consecutive nodes of one block and direction.
#[derive(Clone, Debug, Default)]
struct Stretch {
    is_backward: bool,
    /// Its block, in the order of the forward pass.
    block: Option<u64>,
    /// Kernels.
    seconds: f64,
    /// Those of each node: its class, their seconds, and whether it is a product. Of a forward pass alone, which may run
    /// again.
    nodes: Vec<(usize, f64, bool)>,
    /// Collectives of the tensor axes, in the order in which they begin.
    meetings: Vec<Meeting>,
    /// When each product ends.
    products: Vec<f64>,
    /// The weights that it reads: those that the other direction has not read before, if they are kept; all, if they
    /// are dropped; of a backward pass, with those that only the forward pass reads.
    reads: [Reads; 3],
    /// The classes that read these last.
    again: Vec<usize>,
    /// When those of the next stretch are gathered: with the first of these, or behind a meeting before any product.
    fetch: f64,
}

impl Stretch {
    /// The meetings with which it begins, before any product, if somebody is met.
    fn leading(&self) -> usize {
        let first = self.products.first().copied().unwrap_or(f64::INFINITY);
        let leading = self.meetings.iter().take_while(|meeting| meeting.at < first);
        if leading.clone().all(|meeting| meeting.is_local) { 0 } else { leading.count() }
    }

    /// How what it reads is computed again, if it is.
    fn way<'a>(&self, again: &'a Selected<'_>) -> Option<&'a Way> {
        self.block.filter(|_| self.is_backward).and_then(|block| again.way(block))
    }

    /// When a bucket goes that closes at a moment, if the schedule lets it wait for a collective
    /// ([`YIELDS`](crate::schedule)), and whether it would wait for one of the next stretch.
    fn yielded(&self, at: f64) -> (f64, bool) {
        let between = |from: f64, to: f64| self.products.iter().filter(|end| **end > from && **end <= to).count();
        let (mut to, mut most) = (at, YIELDS);
        for meeting in self.meetings.iter().filter(|meeting| !meeting.is_local && meeting.at >= at) {
            if between(to, meeting.at) > most {
                return (to, false);
            }
            (to, most) = (meeting.at, 0);
        }
        (to, between(to, f64::INFINITY) <= most)
    }
}

/// What is done when the clocks have come somewhere.
type Act<'a> = &'a mut dyn FnMut(&mut Clocks);

/// Gradients that are reduced together.
#[derive(Clone, Debug)]
struct Bucket {
    /// The stretch that makes the last of them, and after how many seconds of its kernels.
    stretch: usize,
    at: f64,
    /// Whether it lets the collectives pass with which the next stretch begins.
    is_open: bool,
    /// Of each, the class of its update, and its bytes.
    gradients: Vec<(usize, f64)>,
    /// Which ranks reduce them.
    kind: usize,
}

/// The loop of one placed mesh.
#[derive(Debug, Default)]
pub struct Loop {
    stretches: Vec<Stretch>,
    buckets: Vec<Bucket>,
    /// Whether weights change their layout along the tensor axes.
    turns: bool,
    /// Seconds for which a microbatch waits for its inputs.
    feed: f64,
    /// Seconds in which those arrive from the host that are brought ahead, and the bytes where they do.
    brought: f64,
    staged: u64,
}

/// The seconds of a loop's collectives, for one way to hold copies.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// Per bucket, without parts and with them.
    reduce: [Vec<f64>; 2],
    /// To gather what is read by gradients that are made in parts.
    read: f64,
    /// Per stretch, of what it [reads](Stretch::reads).
    gather: [Vec<f64>; 3],
}

/// Which communication there is in a step.
#[derive(Clone, Copy, Debug)]
pub struct Traffic<'a> {
    /// The ZeRO stage, which says how gradients are reduced.
    pub zero: u64,
    /// Whether there are several copies of parameters, whose gradients are reduced.
    pub reduces: bool,
    /// Whether weights are gathered.
    pub gathers: bool,
    /// Whether gathered weights are dropped after each use.
    pub drops: bool,
    /// Whether gradients are reduced in every microbatch.
    pub reduces_in_loop: bool,
    /// Whether the loop is that of a pipeline's stages.
    pub is_staged: bool,
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
    /// Kernels that bring into order what is gathered, and what changes its layout.
    pub ordered: f64,
}

impl Shown {
    /// Adds another so many times.
    fn add(&mut self, other: &Self, times: f64) {
        self.all += times * other.all;
        self.shown += times * other.shown;
        self.ordered += times * other.ordered;
    }
}

impl Loop {
    /// The seconds of each collective, for one way to store parameters. Of what is not stored in parts under ZeRO, every
    /// rank needs the whole gradients of the others.
    pub fn times(&self, storage: &Storage, cluster: &Cluster) -> Times {
        let copies = &storage.copies;
        let reduce = |zero: u64| {
            let of = |bucket: &Bucket| {
                let copies = &copies[bucket.kind];
                let (mut parted, mut whole, mut gathers) = (0.0, 0.0, 0.0);
                for (class, bytes) in &bucket.gradients {
                    match storage.made.get(class) {
                        _ if zero == 0 || storage.parts[*class].is_none() => whole += bytes,
                        Some(made) => {
                            gathers += made.read.iter().map(|bytes| copies.gather(*bytes, cluster)).sum::<f64>()
                        }
                        None => parted += bytes,
                    }
                }
                (copies.reduce(zero, parted, cluster) + copies.reduce(0, whole, cluster), gathers)
            };
            self.buckets.iter().map(of).unzip::<f64, f64, Vec<f64>, Vec<f64>>()
        };
        let gather = |which: usize| {
            let of = |stretch: &Stretch| {
                let bytes = stretch.reads[which].bytes;
                copies.iter().zip(bytes).map(|(of, bytes)| of.gather(bytes, cluster)).sum::<f64>()
            };
            self.stretches.iter().map(of).collect()
        };
        let ((whole, _), (parted, read)) = (reduce(0), reduce(1));
        Times { reduce: [whole, parted], read: read.iter().sum(), gather: [0, 1, 2].map(gather) }
    }

    /// Seconds for which a microbatch waits for its inputs.
    pub fn feed(&self) -> f64 {
        self.feed
    }

    /// Seconds in which the host brings inputs of a microbatch ahead, beside other work.
    pub fn brought(&self) -> f64 {
        self.brought
    }

    /// Bytes in which inputs wait that are brought ahead.
    pub fn staged(&self) -> u64 {
        self.staged
    }

    /// What the communication of a step takes and shows. What is done once runs beside one microbatch: weights are
    /// gathered beside the first, gradients reduced beside the last ([`peel`](mod@crate::lower)). Stages of a pipeline
    /// have an order of their own: what they do once, they do before all microbatches, or behind them.
    pub fn shown(&self, traffic: &Traffic<'_>, times: &Times, cluster: &Cluster) -> Shown {
        let count = traffic.microbatches.max(1);
        let peels = !traffic.is_staged;
        let gathers = |first: bool| traffic.gathers && (traffic.drops || (peels && first));
        let turns = |first: bool| self.turns && (traffic.drops || (peels && first));
        let reduces = |last: bool| traffic.reduces && (traffic.reduces_in_loop || (peels && last));
        // How many microbatches do the same.
        let mut kinds: Vec<([bool; 3], u64)> = Vec::with_capacity(3);
        for (first, last, many) in
            [(true, count < 2, 1), (false, true, count.min(2) - 1), (false, false, count.max(2) - 2)]
        {
            let which = [gathers(first), turns(first), reduces(last)];
            match kinds.iter_mut().find(|(known, _)| *known == which) {
                Some((_, known)) => *known += many,
                None => kinds.push((which, many)),
            }
        }
        let mut all = if peels { Shown::default() } else { self.apart(traffic, times) };
        for (which, many) in kinds.into_iter().filter(|(_, many)| *many > 0) {
            all.add(&self.microbatch(traffic, times, which, cluster), many as f64);
        }
        // Kernels wait for what they read.
        let read = if traffic.reduces && traffic.zero > 0 { times.read } else { 0.0 };
        Shown { all: all.all + read, shown: all.shown + read, ..all }
    }

    /// What stages of a pipeline do once, beside nothing.
    fn apart(&self, traffic: &Traffic<'_>, times: &Times) -> Shown {
        let mut all = Shown::default();
        if !traffic.drops {
            let turns = self.stretches.iter().map(|stretch| stretch.reads[0].turned.turn);
            let turn = turns.fold(Turn::default(), Turn::then);
            all.all += turn.wire;
            all.ordered += turn.before + turn.after;
        }
        if traffic.gathers && !traffic.drops {
            all.all += times.gather[0].iter().sum::<f64>();
            all.ordered += self.stretches.iter().map(|stretch| stretch.reads[0].ordered).sum::<f64>();
        }
        if traffic.reduces && !traffic.reduces_in_loop {
            all.all += times.reduce[usize::from(traffic.zero > 0)].iter().sum::<f64>();
        }
        Shown { shown: all.all, ..all }
    }

    /// The communication of a microbatch that gathers weights, or not, changes their layout, or not, and reduces
    /// gradients, or not.
    fn microbatch(
        &self,
        traffic: &Traffic<'_>,
        times: &Times,
        [gathers_here, turns_here, reduces_here]: [bool; 3],
        cluster: &Cluster,
    ) -> Shown {
        let reduces = || self.buckets.iter().zip(times.reduce[usize::from(traffic.zero > 0)].iter().copied());
        let which = |stretch: &Stretch| match stretch.block {
            _ if !traffic.drops => 0,
            Some(block) if stretch.again.iter().any(|class| traffic.again.is_again(block, *class)) => 2,
            _ => 1,
        };
        // Per stretch, the seconds of its gathers, and of the kernels that bring into order what they bring.
        let of = |(index, stretch): (usize, &Stretch)| {
            let which = which(stretch);
            let Reads { ordered, turned: Turned { turn, .. }, .. } = stretch.reads[which];
            let wire = |is_here, seconds| if is_here { seconds } else { 0.0 };
            let gathered = wire(gathers_here, times.gather[which][index]) + wire(turns_here, turn.wire);
            (gathered, wire(gathers_here, ordered) + wire(turns_here, turn.before + turn.after))
        };
        let read = self.stretches.iter().enumerate().filter(|_| gathers_here || turns_here);
        let (gathered, ordered): (Vec<f64>, Vec<f64>) = read.map(of).unzip();
        // What data ranks have on the wire comes before what is issued where it is read.
        let is_shared = gathers_here || reduces_here;
        let mut buckets = reduces().filter(|_| reduces_here).peekable();
        let mut clocks = Clocks::new(cluster.device.overlap_loss.value);
        // The weights that come next are gathered where the last ones are read; after small
        // ones (a norm's), whose memory holds nothing back, those after them as well.
        let mut next = gathered.iter().copied().filter(|seconds| *seconds > 0.0).peekable();
        let mut arrivals = VecDeque::new();
        // Buckets that let the collectives pass with which a block is computed again.
        let mut waiting: Vec<f64> = Vec::new();
        // What is reduced in place gives no memory back.
        let reduce = |clocks: &mut Clocks, seconds: f64| match traffic.zero {
            0 => _ = clocks.carry(seconds),
            _ => clocks.reduce(seconds),
        };
        let release = |clocks: &mut Clocks, waiting: &mut Vec<f64>| {
            waiting.drain(..).for_each(|seconds| reduce(clocks, seconds));
        };
        let mut fetch_next = |clocks: &mut Clocks, arrivals: &mut VecDeque<f64>| {
            while let Some(seconds) = next.next() {
                arrivals.push_back(clocks.carry(seconds));
                if next.peek().is_none_or(|after| seconds > SMALL * after) {
                    break;
                }
            }
        };
        fetch_next(&mut clocks, &mut arrivals);
        clocks.wait(self.feed);
        for (index, stretch) in self.stretches.iter().enumerate() {
            let mut fetches = false;
            if gathered.get(index).is_some_and(|seconds| *seconds > 0.0) {
                clocks.wait(arrivals.pop_front().unwrap_or(0.0));
                fetches = arrivals.is_empty();
            }
            // What is computed again reads the weights first.
            let fetch = &mut |clocks: &mut Clocks| {
                if std::mem::take(&mut fetches) {
                    fetch_next(clocks, &mut arrivals);
                }
            };
            let mut leading = if stretch.way(traffic.again).is_some() { 0 } else { stretch.leading() };
            let passed = &mut |clocks: &mut Clocks| release(clocks, &mut waiting);
            let mut later = self.recompute(&mut clocks, stretch, traffic.again, (fetch, passed));
            if leading == 0 {
                release(&mut clocks, &mut waiting);
            }
            // The next weights are on their way while kernels bring these into order, if no collective comes before them.
            if stretch.fetch <= 0.0 && stretch.meetings.first().is_none_or(|meeting| meeting.at > 0.0) {
                fetch(&mut clocks);
            }
            clocks.run(clocks.done + ordered.get(index).copied().unwrap_or(0.0));
            let start = clocks.done;
            let mut meetings = stretch.meetings.iter().peekable();
            loop {
                let is_here = |bucket: &Bucket| {
                    bucket.stretch < index || (bucket.stretch == index && bucket.at <= stretch.seconds)
                };
                let met = meetings.peek().map_or(f64::INFINITY, |meeting| meeting.at);
                let fetch = if fetches { stretch.fetch } else { f64::INFINITY };
                let at = |bucket: &Bucket| if bucket.stretch < index { 0.0 } else { bucket.at };
                let filled = buckets.peek().filter(|(bucket, _)| is_here(bucket)).map(|(bucket, _)| at(bucket));
                match filled {
                    _ if met < f64::INFINITY && met <= fetch.min(filled.unwrap_or(met)) => {
                        clocks.run(start + met);
                        let since = |of: &Meeting| if is_shared { 0.0 } else { of.since };
                        if let Some(of) = meetings.next() {
                            clocks.meet(&Meeting { since: since(of), ..*of });
                            // What is read here at once comes before what is read later.
                            clocks.carry(if of.is_local { 0.0 } else { std::mem::take(&mut later) });
                            leading = leading.saturating_sub(1);
                            if leading == 0 {
                                release(&mut clocks, &mut waiting);
                            }
                        }
                    }
                    _ if fetches && fetch <= filled.unwrap_or(fetch) => {
                        clocks.run(start + fetch);
                        fetch_next(&mut clocks, &mut arrivals);
                        fetches = false;
                    }
                    Some(filled) => {
                        clocks.run(start + filled);
                        let Some((bucket, seconds)) = buckets.next() else { break };
                        match bucket.is_open && self.begins_with_others(index + 1, traffic.again) {
                            true => waiting.push(seconds),
                            false => reduce(&mut clocks, seconds),
                        }
                    }
                    None => break,
                }
            }
            clocks.carry(later);
            clocks.run(start + stretch.seconds);
        }
        buckets.for_each(|(_, seconds)| _ = clocks.carry(seconds));
        let shown = (clocks.end() - clocks.done - clocks.ordered - self.feed).max(0.0);
        Shown { all: clocks.carried, shown, ordered: ordered.iter().sum::<f64>() + clocks.ordered }
    }

    /// Whether a stretch begins with collectives: its own, or those with which its block is computed again.
    fn begins_with_others(&self, stretch: usize, again: &Selected<'_>) -> bool {
        let Some(stretch) = self.stretches.get(stretch).filter(|stretch| stretch.is_backward) else { return false };
        match stretch.way(again) {
            Some(way) => way.cost.communication > 0.0,
            None => stretch.leading() > 0,
        }
    }

    /// Computes again what the backward pass of a block reads, with the collectives of its forward pass, behind the
    /// first of which `fetch` gathers the next weights; `release` lets go what they passed, before the first product.
    /// Gives the seconds of those that the backward pass waits for later.
    fn recompute(
        &self,
        clocks: &mut Clocks,
        stretch: &Stretch,
        again: &Selected<'_>,
        (fetch, release): (Act<'_>, Act<'_>),
    ) -> f64 {
        let mut later = 0.0;
        let Some((block, way)) = stretch.block.zip(stretch.way(again)) else { return later };
        if way.cost.communication <= 0.0 {
            fetch(clocks);
            clocks.run(clocks.done + way.cost.seconds());
            return later;
        }
        let forward = || self.stretches.iter().filter(|of| !of.is_backward && of.block == stretch.block);
        let is_again =
            |of: &Stretch, node: usize| of.nodes.get(node).is_some_and(|(class, ..)| again.is_again(block, *class));
        // Terms that were added in the forward pass are there as a sum; a copy of several readers is waited for where
        // one of them is computed again.
        let is_read = |of: &Stretch, meeting: &Meeting| match meeting.is_shared {
            true => is_again(of, meeting.node),
            false => is_again(of, meeting.own),
        };
        if !forward().any(|of| of.meetings.iter().any(|meeting| !meeting.is_local && is_read(of, meeting))) {
            fetch(clocks);
        }
        for of in forward() {
            let mut meetings = of.meetings.iter().peekable();
            for (index, (_, seconds, is_product)) in of.nodes.iter().enumerate() {
                while let Some(meeting) = meetings.next_if(|meeting| meeting.node <= index) {
                    if is_read(of, meeting) {
                        clocks.meet(&Meeting { slack: 0.0, since: 0.0, ..*meeting });
                        if !meeting.is_local {
                            fetch(clocks);
                        }
                    } else if is_again(of, meeting.own) {
                        later += meeting.seconds;
                        clocks.meet(&Meeting { is_local: true, ..*meeting });
                    }
                }
                if is_again(of, index) {
                    if *is_product {
                        release(clocks);
                    }
                    clocks.run(clocks.done + *seconds);
                }
            }
        }
        fetch(clocks);
        later
    }
}
