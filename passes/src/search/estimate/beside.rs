//! How communication overlaps with computation in the loop over microbatches, and how much of it stays exposed.
//!
//! The loop is cut into *stretches*: consecutive nodes of one block and direction ([`cut`]). Two clocks, the kernels' and
//! the wire's ([`Clocks`](super::clocks::Clocks)), go through the stretches ([`walk`]) as the schedule does
//! ([`crate::schedule`]): the weights of a stretch are gathered while the one before runs, values that change their
//! layout are on the wire between the kernel that makes them and the first that reads them, gradients are reduced in
//! buckets during the backward pass, and what is still on the wire at the end is waited for. So a large gradient that
//! comes last (an embedding's) is exposed. Kernels also wait for a reduction whose memory they need.
//!
//! Not modelled: squares of gradients that run beside the last reductions, conversions that begin before their
//! reader beside anything but gradients of weights, how exchanges between experts queue behind reductions of the
//! experts' gradients (the simulation is up to 4% longer), and what overlapping chunks hide: such plans are compared
//! by their programs alone ([`overlap`](crate::search::choose::overlap)).

mod cut;
mod walk;

use super::clocks::Meeting;
use super::recompute::{Selected, Way};
use super::storage::Storage;
use super::turns::Reads;
use crate::cluster::Cluster;
use crate::schedule::{BUCKET_BYTES, YIELDS};
use crate::search::stages::exposed::{Wire, Within};
use crate::shard::layout::Turn;

/// Bytes of one bucket of gradients.
pub(in crate::search) const BUCKET: f64 = BUCKET_BYTES as f64;

/// Consecutive nodes of one block and direction.
#[derive(Clone, Debug, Default)]
struct Stretch {
    is_backward: bool,
    /// Its block, in the order of the forward pass.
    block: Option<u64>,
    /// Seconds of its kernels. Times within the stretch are counted in these as well.
    seconds: f64,
    /// Its nodes: class, seconds of kernels, and whether it is a product. Only of forward passes, which may be
    /// recomputed.
    nodes: Vec<(usize, f64, bool)>,
    /// Collectives of the tensor axes, in the order in which they begin.
    meetings: Vec<Meeting>,
    /// When each product ends.
    products: Vec<f64>,
    /// The weights that it gathers: if gathered weights are kept, those that the other direction has not read before;
    /// if they are dropped, all that it reads; and if its block is recomputed as well, also those that only the forward
    /// pass reads.
    reads: [Reads; 3],
    /// The classes that read the weights which only the forward pass reads.
    again: Vec<usize>,
    /// When the weights of the next stretch are gathered: where this one first reads weights, or behind a collective
    /// that comes before its first product.
    fetch: f64,
}

impl Stretch {
    /// How many meetings come before its first product; 0 if none of these is a collective.
    fn leading(&self) -> usize {
        let first = self.products.first().copied().unwrap_or(f64::INFINITY);
        let leading = self.meetings.iter().take_while(|meeting| meeting.at < first);
        if leading.clone().all(|meeting| meeting.is_local) { 0 } else { leading.count() }
    }

    /// How its block is recomputed, if it is and this is its backward pass.
    fn way<'a>(&self, again: &'a Selected<'_>) -> Option<&'a Way> {
        self.block.filter(|_| self.is_backward).and_then(|block| again.way(block))
    }

    /// When a bucket that closes `at` a time is issued, as the schedule may put it behind the next collectives
    /// ([`YIELDS`](crate::schedule)); and whether it may also wait for one at the beginning of the next stretch.
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

/// Gradients that are reduced together.
#[derive(Clone, Debug)]
struct Bucket {
    /// The stretch in which it is issued, and after how many seconds of its kernels.
    stretch: usize,
    at: f64,
    /// Whether it goes behind collectives with which the next stretch begins.
    is_open: bool,
    /// Of each gradient, the class of its update, and its bytes.
    gradients: Vec<(usize, f64)>,
    /// Which ranks reduce them ([`kind`](super::storage::kind)).
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
    /// Of inputs that are prefetched: seconds of the transfers from the host, and bytes of the buffers for them.
    brought: f64,
    staged: u64,
}

/// The seconds of a loop's collectives over data ranks, for one way to store parameters.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// Per bucket, to reduce it: without ZeRO, and with it.
    reduce: [Vec<f64>; 2],
    /// To gather what gradients are made of that each rank makes a part of.
    read: f64,
    /// Per stretch, to gather each of what it [reads](Stretch::reads).
    gather: [Vec<f64>; 3],
}

impl Times {
    /// Of each bucket, the seconds of its reduction.
    fn reduction(&self, traffic: &Traffic<'_>) -> &[f64] {
        &self.reduce[usize::from(traffic.zero > 0)]
    }
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

/// What a microbatch does of what may be done once per step: the first, the last and the others differ in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Here {
    /// Gathers weights.
    gathers: bool,
    /// Changes the layout of weights along the tensor axes.
    turns: bool,
    /// Reduces gradients.
    reduces: bool,
}

/// Seconds of communication.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shown {
    /// On the wire.
    pub all: f64,
    /// Exposed: by which a step takes longer, with the slowdown of kernels that run beside communication.
    pub shown: f64,
    /// Of kernels that rearrange what is gathered and what changes its layout.
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
    /// The seconds of each collective, for one way to store parameters. Gradients of parameters that ZeRO leaves whole are
    /// reduced to the whole on every rank.
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

    /// Seconds in which inputs of the next microbatch are prefetched from the host, beside other work.
    pub fn brought(&self) -> f64 {
        self.brought
    }

    /// Bytes of buffers for prefetched inputs.
    pub fn staged(&self) -> u64 {
        self.staged
    }

    /// The communication of a step. What is done once per step runs beside one microbatch: weights are gathered beside
    /// the first, gradients reduced beside the last ([`peel`](mod@crate::lower)). Stages of a pipeline do it before the
    /// first microbatch or behind the last instead.
    pub fn shown(&self, traffic: &Traffic<'_>, times: &Times, cluster: &Cluster) -> Shown {
        let count = traffic.microbatches.max(1);
        // How many microbatches do the same.
        let mut kinds: Vec<(Here, u64)> = Vec::with_capacity(3);
        for (first, last, many) in
            [(true, count < 2, 1), (false, true, count.min(2) - 1), (false, false, count.max(2) - 2)]
        {
            let here = self.here(traffic, [first, last]);
            match kinds.iter_mut().find(|(known, _)| *known == here) {
                Some((_, known)) => *known += many,
                None => kinds.push((here, many)),
            }
        }
        let mut all = if traffic.is_staged { self.apart(traffic, times) } else { Shown::default() };
        for (here, many) in kinds.into_iter().filter(|(_, many)| *many > 0) {
            all.add(&self.microbatch(traffic, times, here, cluster), many as f64);
        }
        // Kernels wait for what gradients are made of.
        let read = if traffic.reduces && traffic.zero > 0 { times.read } else { 0.0 };
        Shown { all: all.all + read, shown: all.shown + read, ..all }
    }

    /// What a microbatch does, which may be the first or the last.
    fn here(&self, traffic: &Traffic<'_>, [first, last]: [bool; 2]) -> Here {
        let peels = !traffic.is_staged;
        Here {
            gathers: traffic.gathers && (traffic.drops || (peels && first)),
            turns: self.turns && (traffic.drops || (peels && first)),
            reduces: traffic.reduces && (traffic.reduces_in_loop || (peels && last)),
        }
    }

    /// What data ranks say to each other beside the passes of each microbatch, where they do.
    pub fn within(&self, traffic: &Traffic<'_>, times: &Times, cluster: &Cluster) -> Option<Within> {
        let here = self.here(traffic, [false; 2]);
        if !(here.gathers || here.reduces) {
            return None;
        }
        let shown = |here: Here| self.microbatch(traffic, times, here, cluster).shown;
        let (gathered, _) = self.read(traffic, times, Here { turns: false, ..here });
        let wire = |is_backward: bool| {
            let own = self.stretches.iter().zip(&gathered).filter(|(of, _)| of.is_backward == is_backward);
            Wire::of(own.map(|(_, seconds)| *seconds))
        };
        Some(Within {
            gathers: [wire(false), wire(true)],
            reductions: Wire::of(times.reduction(traffic).iter().copied()),
            loss: cluster.device.overlap_loss.value,
            shown: shown(here) - shown(Here { gathers: false, reduces: false, ..here }),
        })
    }

    /// What stages of a pipeline do once per step, beside no kernels.
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
            all.all += times.reduction(traffic).iter().sum::<f64>();
        }
        Shown { shown: all.all, ..all }
    }
}
