//! How the data ranks share what is stored, as bounds count it: one ZeRO stage over one way to store parts.
//!
//! Of `K` seconds of kernels, `T` of collectives of the tensor axes and `I` of the data ranks' collectives, all
//! inside the loop over microbatches, a step takes at least `K + T + loss I`, what kernels lose to collectives
//! beside them; and, since only one collective is on the wire at a time, at least `I + T`
//! ([`clocks`](crate::search::estimate::clocks)). So it takes at least any mean of the two, which is what a [`Sharing`] weighs. Of several
//! microbatches that is so for each, and what is done once in a step is beside the first of them or the last alone.

use crate::search::estimate::beside::{BUCKET, Loop};
use crate::search::estimate::storage::{Copies, Storage, inner, stored_dim};
use crate::shard::tensor::{Placed, Prepared};
use shardc_ir::ops::Update;
use shardc_ir::{EntityRef, Family, Mesh, Strategy};

/// How many collectives of the data ranks there are at least, whatever a busy wire counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Collectives {
    /// Gathers of weights in a microbatch, those of the forward pass and those of the other.
    gathers: [f64; 2],
    /// Buckets of gradients.
    buckets: f64,
}

impl Collectives {
    /// Counts them for a stage on a mesh that differs from the placed one at most in how data ranks store.
    pub fn new(prepared: &Prepared<'_>, placed: &Placed<'_>, stored: &Mesh, zero: u64) -> Self {
        if stored.degree(Family::Expert) > 1 {
            return Self::default();
        }
        let parts = most(zero, inner(stored), stored, &Strategy::default());
        Self { gathers: gathers(prepared, placed, parts), buckets: buckets(prepared, placed) }
    }
}

/// What no order of a pipeline's passes avoids.
///
/// A value of the forward pass is held until its backward pass has come back to the chunk that made it. If that takes at
/// least `r` of the `t` seconds of a step for each of `m` microbatches, `m r / t` of them are under way on average, and
/// at least as many at some time (Little, "A proof for the queuing formula L = lambda W", 1961).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Filling {
    /// What stages wait while the pipeline fills and drains, as a share of what they compute.
    pub share: f64,
    /// Microbatches of a step for each of its seconds at the most; none, if one is under way at a time.
    pub rate: f64,
    /// Whether the gradients of weights may come later.
    pub splits_backward: bool,
}

/// The parts, and what talking about them costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharing {
    /// The ZeRO stage.
    pub zero: u64,
    /// What a second of kernels in the loop counts.
    pub kernels: f64,
    /// Seconds to reduce a byte of a gradient in a step, by [`kind`](crate::search::estimate::storage::kind).
    pub reduce: [f64; 2],
    /// Seconds to gather a byte of a weight in a step, for each pass that reads it.
    pub gather: [f64; 2],
    /// Whether each pass gathers anew.
    pub is_dropped: bool,
    /// Seconds of latency, whatever is gathered and reduced.
    pub latency: f64,
    /// What no order of a pipeline's passes avoids.
    pub filling: Filling,
    /// Data ranks that store one copy.
    inner: u64,
    /// Whether it is about no way of storing, but less than any of them.
    is_least: bool,
}

impl Sharing {
    /// Less than what any way to store costs, where these are the most ranks that store one copy.
    pub fn least(mesh: &Mesh) -> Self {
        let inner = mesh.degree(Family::Data) * mesh.degree(Family::Fsdp);
        let none = [0.0; 2];
        Self {
            zero: 3,
            kernels: 1.0,
            reduce: none,
            gather: none,
            is_dropped: false,
            latency: 0.0,
            filling: Filling::default(),
            inner,
            is_least: true,
        }
    }

    /// A stage on a mesh that differs from the placed one at most in how data ranks store, with its `collectives`;
    /// `busy` is the share of the bound by a busy wire in the mean.
    pub fn new(placed: &Placed<'_>, stored: &Mesh, zero: u64, collectives: Collectives, busy: f64) -> Self {
        let (cluster, loss) = (placed.cluster, placed.cluster.device.overlap_loss.value);
        let storage = Storage::new(stored, cluster);
        let (times, is_many) = (placed.microbatches as f64, placed.microbatches > 1);
        let beside = (1.0 - busy) * loss + busy;
        let is_stage = stored.degree(Family::Pipeline) > 1;
        // What is done once in a step runs beside one microbatch; in a pipeline, beside none.
        let once = if is_many && is_stage { 1.0 } else { beside };
        let reduce = if zero < 2 { once } else { beside * times };
        let gather = match zero {
            0 => 0.0,
            3 => beside * times,
            _ => once,
        };
        let busy_times = match zero {
            0 | 1 if !is_stage => times.min(1.0 + zero as f64),
            _ => times,
        };
        let per_byte = |time: &dyn Fn(f64) -> f64| (time(2.0 * BUCKET) - time(BUCKET)).max(0.0) / BUCKET;
        // What a bucket takes besides its bytes, and what a gather of any size does: of few bytes each takes longer.
        let start = |time: &dyn Fn(f64) -> f64| (2.0 * time(BUCKET) - time(2.0 * BUCKET)).max(0.0);
        let least = |time: &dyn Fn(f64) -> f64| (time(1.0) - per_byte(time)).max(0.0);
        let reducing = |copies: &Copies, bytes: f64| copies.reduce(zero, bytes, cluster);
        let gathering = |copies: &Copies, bytes: f64| copies.gather(bytes, cluster);
        let [first, again] = collectives.gathers;
        let gathered = if zero == 3 { first + again } else { first };
        let copies = &storage.copies[0];
        Self {
            zero,
            kernels: 1.0 - busy * busy_times / times,
            reduce: storage.copies.map(|copies| reduce * per_byte(&|bytes| reducing(&copies, bytes))),
            gather: storage.copies.map(|copies| gather * per_byte(&|bytes| gathering(&copies, bytes))),
            is_dropped: zero == 3,
            latency: gathered * gather * least(&|bytes| gathering(copies, bytes))
                + collectives.buckets * reduce * start(&|bytes| reducing(copies, bytes)),
            filling: Filling::default(),
            inner: storage.inner(),
            is_least: false,
        }
    }

    /// The same in a pipeline, of a ZeRO stage at the most.
    pub fn in_stages(mut self, filling: Filling, most: u64) -> Self {
        self.zero = self.zero.min(most);
        self.kernels *= 1.0 + filling.share;
        self.filling = filling;
        self
    }

    /// Among how many ranks that is stored which a class makes of parameters, or the gradient of which it reads, under a
    /// strategy; at the most, if axes that are not placed may divide it further.
    pub fn parts(
        &self,
        prepared: &Prepared<'_>,
        class: usize,
        (mesh, strategy): (&Mesh, &Strategy),
        is_whole: bool,
    ) -> f64 {
        let most = most(self.zero, self.inner, mesh, strategy);
        let divides = || stored_dim(prepared, class, (mesh, strategy), most).is_some();
        if self.is_least || !is_whole || divides() { most as f64 } else { 1.0 }
    }

    /// Whether some dimension of what a class makes divides into so many parts whatever the axes that are searched
    /// divide.
    pub fn divides_wherever(prepared: &Prepared<'_>, class: usize, mesh: &Mesh, parts: f64) -> bool {
        let (rule, all) = (prepared.rules[class], parts as u64 * searched(mesh));
        let size = |factors: &Vec<usize>| factors.first().map_or(1, |factor| rule.factors[*factor].size);
        rule.results[0].iter().any(|factors| size(factors).is_multiple_of(all))
    }
}

/// Among how many ranks a value is stored at the most that is computed with under a strategy, if `inner` data ranks store
/// one copy.
fn most(zero: u64, inner: u64, mesh: &Mesh, strategy: &Strategy) -> u64 {
    if zero == 0 { 1 } else { Storage::sharing(inner, mesh, strategy) }
}

/// The parts into which the axes that are searched divide a value at the most.
fn searched(mesh: &Mesh) -> u64 {
    mesh.extent(crate::shard::family::searched_axes(mesh))
}

/// How often weights are gathered at least in a microbatch, those of the forward pass and those of the other: of
/// parameters that some dimension divides among so many ranks whatever else divides it.
fn gathers(prepared: &Prepared<'_>, placed: &Placed<'_>, parts: u64) -> [f64; 2] {
    let divides = |class: usize| parts > 1 && Sharing::divides_wherever(prepared, class, placed.mesh, parts as f64);
    Loop::gathers(prepared, &divides).map(|count| count as f64)
}

/// How many buckets of gradients are full, if every gradient is divided as far as can be.
fn buckets(prepared: &Prepared<'_>, placed: &Placed<'_>) -> f64 {
    let graph = prepared.graph;
    let parts = searched(placed.mesh) as f64;
    let mut made: Vec<(usize, f64)> = graph
        .updates()
        .map(|(_, node)| {
            let gradient = node.operands[Update::GRADIENT];
            let ty = graph.ty(gradient);
            (graph.value(gradient).def.index(), prepared.on_wire(ty, ty.bytes().0 as f64) / parts)
        })
        .collect();
    made.sort_by_key(|(def, _)| *def);
    let (mut open, mut full) = (0.0, 0.0);
    for (_, bytes) in made {
        open += bytes;
        if open >= BUCKET {
            (open, full) = (0.0, full + 1.0);
        }
    }
    full
}
