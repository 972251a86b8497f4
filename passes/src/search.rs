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
mod schedules;
pub(crate) mod sharing;
pub mod stages;
pub mod storage;
mod summed;
mod turns;
mod undivided;
mod visit;
pub mod ways;
pub mod why;

pub use degrees::Degrees;
pub use pins::{Pins, Recompute};
pub use undivided::Undivided;

use crate::chunk::MOST_CHUNKS;
use crate::cluster::Cluster;
use crate::cost;
use crate::divisors::divisors;
use crate::shard::family::copy_axes;
use crate::shard::prepare::prepare;
use crate::shard::tensor::{Placed, Prepared};
use away::{At, Away};
pub use build::Exact;
use choose::choose;
pub use estimate::Work;
use fitted::{Measure, recomputations};
use line::Line;
use offload::Offloads;
pub use placed::fastest;
use placed::{Seen, Solved, paced, place_batch, solved};
use relief::Relief;
use shardc_ir::plan::{Prediction, Request, Scope};
use shardc_ir::{Bytes, Feature, Flops, Graph, Mesh, Plan, Seconds, Target};
use stages::Stages;
use std::cell::OnceCell;
use visit::Visited;
use ways::ways;

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
    let is_open = Feature::Pipeline.is_open(pins.opens_stages(), request.scope, prepared.target);
    // Stages take whole microbatches.
    let is_cut = pins.overlap_chunks.is_some_and(|chunks| chunks > 1);
    let line = (is_open && !is_cut).then(|| Line::new(prepared));
    let space = Space {
        prepared,
        line: line.as_ref(),
        meshes,
        cluster,
        others,
        request: &request,
        pins,
        away,
        with_unfit: false,
        measure: Measure::default(),
    };
    let mut visited = Visited::new(away.room.device, true);
    let found = choose(&space, confirm, &mut visited);
    let is_final = visited.cut == f64::INFINITY || found.as_ref().is_ok_and(|(_, step)| *step <= visited.cut);
    let (plan, _) = match is_final {
        true => found?,
        // Plans that were thought to fit did not: what was left out because of them may be the best after all.
        false => choose(&space, confirm, &mut Visited::new(away.room.device, false))?,
    };
    Ok(plan)
}

/// What is searched.
struct Space<'a, 'b> {
    prepared: &'a Prepared<'b>,
    /// What pipelines are cut along, if any are searched.
    line: Option<&'a Line>,
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

/// The most microbatches of a step: programs list each of them, and nobody sums up more.
const MOST_MICROBATCHES: u64 = 1 << 16;

/// Every candidate the pins allow.
fn enumerate(space: &Space<'_, '_>, visited: &mut Visited) -> Result<Vec<Candidate>, PlanError> {
    let Space { prepared, line, cluster, request, pins, mut away, with_unfit, measure, .. } = *space;
    (away.room.device, away.room.share) = (measure.room(cluster.least_room(request.device_memory)), measure.share());
    let (ranks, batch) = (cluster.ranks(), request.batch);
    let work = model_work(prepared.graph, cluster);
    let (mut candidates, mut coupled, mut drops_chunks) = (Vec::new(), None, false);
    for way in ways(prepared, line.map_or(1, Line::most), cluster, request, pins)? {
        let per_rank = batch / way.data;
        let is_cut = |size: &u64| overlap::divides(*size, pins.overlap_chunks.unwrap_or(1));
        let is_pinned = |size: &u64| pins.microbatch.is_none_or(|pin| pin == *size) && is_cut(size);
        let is_few = |size: &u64| per_rank / size <= MOST_MICROBATCHES;
        let sizes = divisors(per_rank).into_iter().filter(is_pinned).filter(is_few);
        let mut is_whole_open: Option<bool> = None;
        for microbatch in sizes {
            if is_whole_open.is_some_and(|is_open| !is_open || microbatch < per_rank) {
                continue;
            }
            let mut solved = Vec::new();
            visited.may_fit = false;
            for axes in &way.tp {
                let point = Point { work, away, degrees: way.degrees(microbatch, axes) };
                if space.meshes.is_some_and(|meshes| !point.degrees.iter().any(|degrees| meshes.contains(degrees))) {
                    continue;
                }
                let degrees = way.placed(microbatch, axes);
                let mesh = degrees.mesh(batch);
                let Some(placed) = place_batch(prepared, &mesh, cluster)? else {
                    coupled = coupled.or_else(|| placed::coupled(prepared, &mesh));
                    continue;
                };
                if visited.opens(prepared, &placed, &degrees, &point) {
                    let mut found = match line.filter(|_| way.pp > 1) {
                        Some(line) => stages::solve(space, line, placed, &point, visited),
                        None => solve(space, placed, &point, visited),
                    };
                    drops_chunks |= placed::drop_unpinned_chunks(&mut found, pins);
                    visited.add(&found);
                    solved.extend(found);
                } else {
                    visited.may_fit = true;
                }
            }
            // A larger microbatch needs more memory: where none is near what fits by its estimate, none of the larger
            // ones will fit, but that which is the whole batch of a rank, for which no gradients are added up. Where
            // samples depend on each other (statistics of the batch), it is the only one.
            if !solved.is_empty() && !visited.may_fit {
                let predictions = || solved.iter().map(|candidate| &candidate.prediction);
                // At least half of what lives in a microbatch grows with it.
                let growth = (per_rank as f64 / microbatch as f64 / 2.0).max(1.0);
                let fits_whole = |Prediction { memory, room, .. }: &Prediction| {
                    let rest = memory.total() - memory.gradients - memory.activations;
                    Bytes(rest.0 + (growth * memory.activations.0 as f64) as u64) <= *room
                };
                let may_fit_whole = predictions().any(fits_whole);
                is_whole_open = (!predictions().any(overstated::is_near)).then_some(may_fit_whole);
            }
            candidates.extend(solved);
        }
    }
    if candidates.is_empty() && drops_chunks {
        return Err(placed::uncut_head(pins));
    }
    if let Some(chunks) = pins.overlap_chunks.filter(|chunks| candidates.is_empty() && *chunks > 1) {
        return Err(overlap::undivided(chunks, pins.microbatch, batch));
    }
    if candidates.is_empty() && pins.opens_stages() {
        if !with_unfit {
            return enumerate(&Space { with_unfit: true, ..*space }, &mut Visited::new(away.room.device, false));
        }
        if away.is_pinned && away::opens_without(space) {
            return Err(away.too_large(pins));
        }
        let coupled = coupled.map(|node| schedules::coupled(prepared.graph, node));
        return Err(schedules::none(pins, line, (ranks, batch), coupled));
    }
    if candidates.is_empty() && away.is_pinned {
        return Err(away.too_large(pins));
    }
    if let (Some(microbatch), Some(node), true) = (pins.microbatch, coupled, candidates.is_empty()) {
        let message = format!(
            "{}; and no data degree on {ranks} ranks leaves {microbatch} of the batch of {batch}; leave it out",
            schedules::coupled(prepared.graph, node)
        );
        return Err(PlanError::Pin { pin: format!("microbatch={microbatch}"), message });
    }
    if candidates.is_empty() {
        let least = batch / ranks.saturating_mul(pins.microbatch.unwrap_or(1)).max(1);
        let message = match pins.microbatch {
            _ if least > MOST_MICROBATCHES => format!(
                "a step has at most {MOST_MICROBATCHES} microbatches, and this would be {least} or more on each rank; \
                 use a smaller batch, or one of more divisors"
            ),
            Some(microbatch) => format!("no data degree takes microbatches of {microbatch}; pin another microbatch"),
            None => format!("use a multiple of {ranks}, or more tensor ranks"),
        };
        return Err(PlanError::Batch { batch, ranks, message });
    }
    Ok(candidates)
}

/// One placed mesh, and what its candidates share.
struct Point {
    /// One for each way to store parameters.
    degrees: Vec<Degrees>,
    work: Work,
    away: Away,
}

/// Prices of a byte at which leaner layouts are looked for where the fastest do not fit, as shares of the whole step for the whole memory; the highest first.
const LEAN: [f64; 3] = [10.0, 1.0, 0.1];

/// The plans of a mesh of which the batch is placed.
fn solve(space: &Space<'_, '_>, placed: Placed<'_>, point: &Point, visited: &mut Visited) -> Vec<Candidate> {
    let (pins, mut found) = (space.pins, Vec::new());
    let meshes: Vec<Mesh> = point.degrees.iter().map(|degrees| degrees.mesh(space.request.batch)).collect();
    let solve = |byte: f64| solved(space.prepared, placed.clone(), byte, space.others, (&meshes, pins));
    let fastest = solve(0.0);
    extend(&mut found, (&fastest, 0.0), (space, point, &meshes), visited);
    if found.iter().any(|candidate| candidate.offload.is_none() && candidate.prediction.fits()) {
        return found;
    }
    let step = found.iter().map(|candidate| candidate.prediction.step.0).fold(f64::INFINITY, f64::min);
    if !point.away.moves() && !visited.is_open(step) {
        visited.may_fit = true;
        return found;
    }
    let mut known = vec![fastest.own.placed.strategies];
    for share in LEAN {
        let byte = share * step / (point.away.room.device.0 as f64).max(1.0);
        let lean = solve(byte);
        if known.contains(&lean.own.placed.strategies) {
            break;
        }
        extend(&mut found, (&lean, byte), (space, point, &meshes), visited);
        known.push(lean.own.placed.strategies);
    }
    found
}

/// Adds the ZeRO stages and recomputations of a placed mesh, whose layouts were found for a price of a byte. Where
/// something would have to be computed again, the head is cut into smaller chunks as well.
fn extend(
    candidates: &mut Vec<Candidate>,
    (solved, byte): (&Solved<'_>, f64),
    (space, point, meshes): (&Space<'_, '_>, &Point, &[Mesh]),
    visited: &mut Visited,
) {
    let Seen { placed, shape, .. } = &solved.own;
    let (pins, bound) = (space.pins, point.away.room.device);
    let smaller = OnceCell::new();
    for (storage, degrees) in point.degrees.iter().enumerate() {
        for zero in zero_stages(!copy_axes(placed.mesh).is_empty(), placed.microbatches, degrees, pins) {
            // Recomputation takes longer than none.
            let is_open = point.away.moves() || {
                let free = solved.predict(storage, zero, Recompute::None, point.work);
                visited.is_open(free.step.0)
            };
            if !is_open {
                let all = pins.recompute.unwrap_or(Recompute::Values(shape.menu().steps()));
                visited.may_fit |= shape.memory(storage, zero, all).total() <= bound;
            }
            let room = if is_open { bound } else { Bytes(u64::MAX) };
            let of = |solved: &Solved<'_>| {
                let (Seen { placed, shape, .. }, mut found) = (&solved.own, Vec::new());
                for recompute in recomputations(shape, storage, zero, pins, (room, space.measure)) {
                    let on_device = solved.predict(storage, zero, recompute, point.work);
                    let on_device = Prediction { room: bound, ..on_device };
                    let at = At { shape, storage, zero, recompute };
                    for (offload, relief, prediction) in point.away.choices(&at, &on_device, placed.cluster) {
                        found.push(Candidate {
                            degrees: degrees.clone(),
                            stages: None,
                            zero,
                            recompute,
                            loss_chunks: shape.loss_chunks,
                            overlap_chunks: pins.overlap_chunks.unwrap_or(1),
                            within: shape.within(recompute),
                            byte,
                            offload,
                            relief,
                            prediction,
                        });
                    }
                }
                found
            };
            let is_short = |of: &Solved<'_>| {
                let kept = recomputations(&of.own.shape, storage, zero, pins, (Bytes(u64::MAX), space.measure))[0];
                of.own.shape.memory(storage, zero, kept).total() > bound
            };
            let fastest = |of: &[Candidate]| {
                let fit = of.iter().filter(|candidate| candidate.prediction.fits());
                fit.map(|candidate| candidate.prediction.step.0).fold(f64::INFINITY, f64::min)
            };
            let (mut found, mut leanest) = (of(solved), Vec::new());
            if is_open && is_short(solved) {
                let smaller = smaller.get_or_init(|| solved.in_smaller_chunks(space.prepared, bound, (meshes, pins)));
                for solved in smaller {
                    let others = of(solved);
                    if fastest(&others) < fastest(&found) {
                        found.extend(others.into_iter().filter(|other| other.prediction.fits()));
                    } else {
                        leanest = others;
                    }
                    if !is_short(solved) {
                        break;
                    }
                }
            }
            // Where nothing fits by its estimate, the leanest may by its programs.
            if fastest(&found) == f64::INFINITY {
                found.extend(leanest);
            }
            candidates.extend(found);
        }
    }
}

/// The stages of ZeRO that are tried where parameters are stored in one way.
fn zero_stages(has_copies: bool, microbatches: u64, degrees: &Degrees, pins: &Pins) -> Vec<u64> {
    // Where every rank stores all there are no parts to have replicas of; with one microbatch stage 2 is stage 1.
    let is_kept = |zero: u64| match (has_copies, degrees.degree("fsdp") > 1) {
        (false, _) => zero == 0,
        (true, has_parts) => (zero > 0 || !has_parts) && (zero != 2 || microbatches > 1),
    };
    (0..=3).filter(|zero| pins.zero.map_or(is_kept(*zero), |pin| pin == *zero)).collect()
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
