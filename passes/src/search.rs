//! The search: one plan out of all, by seconds under the memory bound.
//!
//! Meshes (data ranks x tensor ranks x microbatches) are enumerated; for each, tensor parallelism is
//! solved on the folded graph ([`shard`](crate::shard)), exactly where that is small enough; ZeRO stages and recomputation are
//! then arithmetic on its sums ([`estimate`]). Only the winner becomes an annotated plan
//! ([`build`]). The order of candidates, and so the result, is deterministic.

mod astray;
pub mod away;
pub mod beside;
mod bound;
pub mod build;
mod casts;
mod choose;
mod clocks;
mod copies;
pub mod degrees;
mod elsewhere;
mod enumerate;
pub mod estimate;
#[cfg(test)]
mod exact_tests;
mod fitted;
#[cfg(test)]
mod fitted_tests;
mod held;
pub mod line;
pub mod liveness;
mod lowering;
pub mod offload;
mod outcome;
pub mod overlap;
mod overstated;
#[cfg(test)]
mod peak_tests;
mod pieces;
pub mod pins;
mod placed;
pub mod recompute;
pub mod relief;
mod rounds;
mod schedules;
pub(crate) mod sharing;
pub mod stages;
pub mod storage;
mod summed;
mod turns;
mod undivided;
mod visit;
pub mod ways;
mod whole;
pub mod why;

pub use degrees::Degrees;
pub use pins::{Pins, Recompute};
pub use undivided::Undivided;

use crate::chunk::MOST_CHUNKS;
use crate::cluster::Cluster;
use crate::cost;
use crate::shard::prepare::prepare;
use crate::shard::tensor::Prepared;
use away::Away;
pub use build::Exact;
use enumerate::enumerate;
pub use estimate::Work;
use fitted::Measure;
use line::Line;
use offload::Offloads;
pub use placed::fastest;
use placed::{paced, place_batch};
use relief::Relief;
use rounds::Pipelines;
use shardc_ir::plan::{Prediction, Request, Scope};
use shardc_ir::{Bytes, Feature, Flops, Graph, Mesh, Plan, Seconds, Target};
use stages::Stages;

/// Why there is no plan. All but [`PlanError::Bug`] are the user's to fix, and say how.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A pin cannot be kept.
    #[error("pin `{pin}`: {message}")]
    Pin {
        /// The pin.
        pin: String,
        /// Why, and what would do.
        message: String,
    },
    /// No mesh divides the batch.
    #[error("a batch of {batch} does not divide over the {ranks} ranks of the cluster: {message}")]
    Batch {
        /// Sequences per step.
        batch: u64,
        /// Ranks.
        ranks: u64,
        /// What would do.
        message: String,
    },
    /// Nothing fits in the device's memory.
    #[error(
        "no plan fits in {bound} per rank{share}{pins}: the nearest, {choice}, needs {needed} ({breakdown}); {fix}"
    )]
    Infeasible {
        /// The memory bound.
        bound: Bytes,
        /// Whose share it is, as part of a sentence.
        share: Box<str>,
        /// The pins, as part of a sentence.
        pins: Box<str>,
        /// The candidate that needs the least.
        choice: String,
        /// What it needs.
        needed: Bytes,
        /// By category.
        breakdown: Box<str>,
        /// What would help.
        fix: String,
    },
    /// What is pinned to lie on the hosts fits in the memory of none.
    #[error(
        "no plan fits in the {bound} that a host has for its ranks: pin `{pin}` takes {needed} of it at the least; give \
         more with --host-memory, or move less"
    )]
    Host {
        /// The pin.
        pin: String,
        /// The memory of a host.
        bound: Bytes,
        /// What it takes.
        needed: Bytes,
    },
    /// A defect of shardc.
    #[error("bug in the planner: {0}")]
    Bug(String),
}

/// One point of the search space.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// How many ways the step is divided.
    pub degrees: Degrees,
    /// The pipeline, if it has stages.
    pub stages: Option<Stages>,
    /// ZeRO stage.
    pub zero: u64,
    /// Recomputation.
    pub recompute: Recompute,
    /// Into how many chunks the head and its loss are cut.
    pub loss_chunks: u64,
    /// Into how many chunks the blocks' part of the batch is cut, which overlap.
    pub overlap_chunks: u64,
    /// The seconds that collectives within the blocks show without chunks.
    pub within: f64,
    /// The seconds that a byte of memory cost where its layouts were chosen.
    pub byte: f64,
    /// What lies away from the device.
    pub offload: Offloads,
    /// What that takes from the device and adds to the step; the prediction has both.
    pub relief: Relief,
    /// What it is predicted to need.
    pub prediction: Prediction,
}

impl PlanError {
    /// By which factor what is needed exceeds what there is, where memory is short.
    pub fn filled(&self) -> Option<f64> {
        match self {
            Self::Infeasible { bound, needed, .. } | Self::Host { bound, needed, .. } => {
                Some(needed.0 as f64 / bound.0.max(1) as f64)
            }
            Self::Pin { .. } | Self::Batch { .. } | Self::Bug(_) => None,
        }
    }

    /// Whether another size of the request may have a plan.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Infeasible { .. } | Self::Host { .. } | Self::Batch { .. })
    }
}

impl Candidate {
    /// Whether it differs from another in computing more values again, and in nothing else.
    fn is_spare_of(&self, other: &Self) -> bool {
        let is_more = match (self.recompute, other.recompute) {
            (Recompute::Values(own), Recompute::Values(least)) => own > least,
            _ => false,
        };
        let same = |of: &Self| (of.zero, of.loss_chunks, of.overlap_chunks, of.byte.to_bits());
        let is_alike = same(self) == same(other) && self.offload == other.offload;
        is_more && self.degrees == other.degrees && self.stages == other.stages && is_alike
    }

    /// The seconds that its step takes at the least by its estimate, in however many chunks.
    fn least(&self) -> f64 {
        self.prediction.step.0 - self.within
    }

    /// The choices, as pins would say them.
    pub fn choice(&self) -> String {
        let Self { degrees, zero, recompute, .. } = self;
        let many = |name: &str, count: u64| if count > 1 { format!(",{name}={count}") } else { String::new() };
        let chunks = [many("loss_chunks", self.loss_chunks), many("overlap_chunks", self.overlap_chunks)].concat();
        let stages = self.stages.as_ref().map_or(String::new(), |stages| format!(",{}", stages.text()));
        let degrees = format!("{}{stages}", degrees.text());
        let away = if self.offload.is_none() { String::new() } else { format!(",{}", self.offload.text()) };
        format!("{degrees},zero={zero},microbatch={},recompute={recompute}{chunks}{away}", self.degrees.microbatch)
    }

    /// The mesh, without axes of one coordinate.
    pub fn mesh(&self, batch: u64) -> Mesh {
        self.degrees.mesh(batch)
    }
}

#[cfg(test)]
impl Candidate {
    /// So many data ranks, with nothing else chosen but what is computed again.
    fn bare(dp: u64, recompute: Recompute, prediction: Prediction) -> Self {
        Self {
            degrees: Degrees::new(1).with("dp", &[dp]),
            stages: None,
            zero: 0,
            recompute,
            loss_chunks: 1,
            overlap_chunks: 1,
            within: 0.0,
            byte: 0.0,
            offload: Offloads::default(),
            relief: Relief::default(),
            prediction,
        }
    }
}

/// What a finished plan needs by its programs: the memory that lowering allocates, the step that they take.
pub type Confirm<'a> = &'a (dyn Fn(&Plan) -> Result<Exact, String> + Sync);

/// Finds the plan with the least predicted step time that fits in `request.device_memory` (in the
/// device's usable memory if that is 0). `graph` is a whole training step, without recomputation;
/// `target` says what its kernels need. Memory and time are estimated; [`search_confirmed`] asks for
/// those of programs.
///
/// # Errors
/// See [`PlanError`].
pub fn search(
    graph: &Graph,
    cluster: &Cluster,
    request: &Request,
    pins: &Pins,
    target: &dyn Target,
) -> Result<Plan, PlanError> {
    search_confirmed(graph, cluster, request, pins, target, None)
}

/// [`search`], where finished plans are predicted by their programs before one is chosen: what does not fit is
/// refused, and of those whose estimates are close the fastest is taken.
///
/// Estimates say which plans are worth their programs. So that a wider space never gives a slower plan, what the
/// runnable one gives is compared with it, by programs; the plan's request has the scope in which it was found.
///
/// # Errors
/// See [`PlanError`].
pub fn search_confirmed(
    graph: &Graph,
    cluster: &Cluster,
    request: &Request,
    pins: &Pins,
    target: &dyn Target,
    confirm: Option<Confirm<'_>>,
) -> Result<Plan, PlanError> {
    let mut prepared = prepared(graph, request, target);
    let found = search_among(&prepared, cluster, request, pins, confirm, None);
    if request.scope == Scope::Runnable || confirm.is_none() {
        return found;
    }
    let step = found.as_ref().map_or(f64::INFINITY, |plan| plan.prediction.step.0);
    prepared.scope = Scope::Runnable;
    let request = Request { scope: prepared.scope, ..request.clone() };
    let runnable = search_among(&prepared, cluster, &request, pins, confirm, None);
    runnable.ok().filter(|plan| plan.prediction.step.0 < step).map_or(found, Ok)
}

/// A training step as searches for a request see it.
pub fn prepared<'a>(graph: &'a Graph, request: &Request, target: &'a dyn Target) -> Prepared<'a> {
    let mut prepared = prepare(graph, request.batch, target);
    (prepared.scope, prepared.reduce_dtype) = (request.scope, request.reduce_dtype);
    prepared
}

/// [`search_confirmed`] of what is prepared already; where `meshes` are given, among those alone, which no bound says
/// anything of.
///
/// # Errors
/// See [`PlanError`].
pub fn search_among(
    prepared: &Prepared<'_>,
    cluster: &Cluster,
    request: &Request,
    pins: &Pins,
    confirm: Option<Confirm<'_>>,
    meshes: Option<&[Degrees]>,
) -> Result<Plan, PlanError> {
    within(prepared, (cluster, request, pins), meshes, |space| rounds::best(space, confirm))
}

/// Whether a plan for a training step is estimated to take less than so many seconds and to fit, of those that a search for
/// no others comes by: bounds leave most meshes out before they are solved. Never where the bound of a search says no.
///
/// # Errors
/// As [`search_confirmed`], but for what does not fit.
pub fn may_take_less(
    prepared: &Prepared<'_>,
    cluster: &Cluster,
    request: &Request,
    pins: &Pins,
    Seconds(step): Seconds,
) -> Result<bool, PlanError> {
    within(prepared, (cluster, request, pins), None, |space| rounds::any_below(space, step))
}

/// What comes of the space of a request, of some meshes if they are given.
fn within<T>(
    prepared: &Prepared<'_>,
    (cluster, request, pins): (&Cluster, &Request, &Pins),
    meshes: Option<&[Degrees]>,
    of: impl FnOnce(&Space<'_, '_>) -> Result<T, PlanError>,
) -> Result<T, PlanError> {
    pins.check(cluster.ranks(), request.batch)?;
    let (cluster, others) = &paced(prepared.graph, cluster);
    let mut request = request.clone();
    if request.device_memory == 0 {
        request.device_memory = cluster.usable_memory();
    }
    let blocks = prepared.block_count();
    if let Some(Recompute::Blocks(count)) =
        pins.recompute.filter(|pin| matches!(pin, Recompute::Blocks(count) if *count > blocks))
    {
        let message = format!("the model has {blocks} blocks; pin recompute=block for all of them");
        return Err(PlanError::Pin { pin: format!("recompute={count}"), message });
    }
    check_chunks(prepared, pins)?;
    away::check(pins, blocks)?;
    let away = Away::new(cluster, &request, pins, prepared.target)?;
    let space = Space {
        prepared,
        line: None,
        pipelines: pipelines(prepared, cluster, &request, pins),
        meshes,
        cluster,
        others,
        request: &request,
        pins,
        away,
        with_unfit: false,
        measure: Measure::default(),
    };
    of(&space)
}

/// Whether pipelines are searched.
fn pipelines(prepared: &Prepared<'_>, cluster: &Cluster, request: &Request, pins: &Pins) -> Pipelines {
    let is_kept = pins.pp != Some(1);
    // Within a node, whose links are fast, stages gain little for the time that solving them takes.
    let is_worth = cluster.nodes > 1 || request.scope == Scope::All;
    let is_open = Feature::Pipeline.is_open(false, request.scope, prepared.target);
    match pins.opens_stages() {
        _ if !is_kept => Pipelines::Never,
        true => Pipelines::Alone,
        false if is_open && is_worth => Pipelines::Too,
        false if prepared.target.runs(Feature::Pipeline) => Pipelines::Fallback,
        false => Pipelines::Never,
    }
}

/// What is searched.
struct Space<'a, 'b> {
    prepared: &'a Prepared<'b>,
    /// What pipelines are cut along, where those are visited; else plans of one stage are.
    line: Option<&'a Line>,
    /// Whether pipelines are searched.
    pipelines: Pipelines,
    /// The only meshes that are visited, if not all are.
    meshes: Option<&'a [Degrees]>,
    /// As the kind of devices sees it that is the slowest.
    cluster: &'a Cluster,
    /// As the other kinds see it, if there are any.
    others: &'a [Cluster],
    request: &'a Request,
    pins: &'a Pins,
    away: Away,
    /// Whether pipelines of which no stages fit are candidates too, to say what they lack.
    with_unfit: bool,
    /// How estimates of memory are taken.
    measure: Measure,
}

/// One placed mesh, and what its candidates share.
struct Point {
    /// One for each way to store parameters.
    degrees: Vec<Degrees>,
    work: Work,
    away: Away,
}

/// Whether the head can be cut as it is pinned.
fn check_chunks(prepared: &Prepared<'_>, pins: &Pins) -> Result<(), PlanError> {
    let Some(chunks) = pins.loss_chunks.filter(|chunks| *chunks > 1) else { return Ok(()) };
    let message = match &prepared.head {
        None => "the loss is no cross-entropy of a product over a sequence; leave it out".to_string(),
        Some(head) => match head.sequence(prepared.graph) {
            _ if chunks > MOST_CHUNKS => format!("every chunk is a copy of the head; use at most {MOST_CHUNKS}"),
            sequence if sequence.is_multiple_of(chunks) => return Ok(()),
            sequence => format!("{chunks} does not divide the sequence of {sequence}; use a divisor of it"),
        },
    };
    Err(PlanError::Pin { pin: format!("loss_chunks={chunks}"), message })
}

/// The model's work in one step: recomputation does not count. At peak it is done by a device that is as fast as
/// those of the cluster are on average.
pub fn model_work(graph: &Graph, cluster: &Cluster) -> Work {
    let mut work = Work { flops: Flops(0.0), at_peak: Seconds(0.0) };
    for (id, node) in graph.nodes().filter(|(_, node)| !matches!(node.role, shardc_ir::Role::Recompute(_))) {
        let operands = graph.operand_types(id);
        let flops = cost::model_flops(&node.op, &operands, &graph.result_types(id));
        if let Some(operand) = operands.first().filter(|_| flops.0 > 0.0) {
            work.flops += flops;
            work.at_peak += Seconds(flops.0 / cluster.mean(|device| cost::peak(operand.dtype, device)));
        }
    }
    work
}

/// By step time; what is equal within a thousandth by the simpler choice.
fn sort(candidates: &mut [Candidate]) {
    candidates.sort_by(|a, b| a.prediction.step.0.total_cmp(&b.prediction.step.0));
    let simplicity =
        |c: &Candidate| (c.degrees.degree("pp"), c.recompute, c.zero, c.degrees.axes(), c.degrees.degree("tp"));
    // The best and its near-ties, simplest first.
    let Some(best) = candidates.first().map(|best| best.prediction.step.0) else { return };
    let ties = candidates.partition_point(|candidate| candidate.prediction.step.0 <= best * 1.001);
    candidates[..ties].sort_by_key(simplicity);
}
