//! The search: one plan out of all, by seconds under the memory bound.
//!
//! Meshes (data ranks x tensor ranks x microbatches) are enumerated; for each, tensor parallelism is
//! solved exactly on the folded graph ([`shard`](crate::shard)); ZeRO stages and recomputation are
//! then arithmetic on its sums ([`estimate`]). Only the winner becomes an annotated plan
//! ([`build`]). The order of candidates, and so the result, is deterministic.

pub mod beside;
pub mod build;
pub mod degrees;
pub mod estimate;
pub mod liveness;
pub mod pins;
pub mod recompute;
pub mod storage;
pub mod ways;
pub mod why;

pub use degrees::Degrees;
pub use pins::{Pins, Recompute};

use crate::cluster::{Cluster, Profile};
use crate::cost;
use crate::shard::family::{batch_axes, copy_axes};
use crate::shard::place::place_axes;
use crate::shard::prepare::prepare;
use crate::shard::tensor::{Placed, Prepared};
use estimate::Shape;
pub use estimate::Work;
use shardc_ir::plan::{Alternative, Memory, Prediction, Request};
use shardc_ir::{AxisId, Bytes, Choice, Feature, Flops, Graph, Mesh, Plan, Seconds, Strategy, Target};
use std::collections::BTreeMap;
use ways::{divisors, ways};

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
    /// ZeRO stage.
    pub zero: u64,
    /// Recomputation.
    pub recompute: Recompute,
    /// Into how many chunks the head and its loss are cut.
    pub loss_chunks: u64,
    /// What it is predicted to need.
    pub prediction: Prediction,
}

impl Candidate {
    /// The choices, as pins would say them.
    pub fn choice(&self) -> String {
        let Self { degrees, zero, recompute, .. } = self;
        let chunks = if self.loss_chunks > 1 { format!(",loss_chunks={}", self.loss_chunks) } else { String::new() };
        format!("{},zero={zero},microbatch={},recompute={recompute}{chunks}", degrees.text(), degrees.microbatch)
    }

    /// The mesh, without axes of one coordinate.
    pub fn mesh(&self, batch: u64) -> Mesh {
        self.degrees.mesh(batch)
    }
}

/// What a finished plan needs by its programs: the memory that lowering allocates, the step that they take.
pub type Confirm<'a> = &'a dyn Fn(&Plan) -> Result<Prediction, String>;

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
    pins.check(cluster.ranks(), request.batch)?;
    let mut request = request.clone();
    if request.device_memory == 0 {
        request.device_memory = cluster.usable_memory();
    }
    let mut prepared = prepare(graph, request.batch, target);
    prepared.scope = request.scope;
    let blocks = prepared.block_count();
    if let Some(Recompute::Blocks(count)) =
        pins.recompute.filter(|pin| matches!(pin, Recompute::Blocks(count) if *count > blocks))
    {
        let message = format!("the model has {blocks} blocks; pin recompute=block for all of them");
        return Err(PlanError::Pin { pin: format!("recompute={count}"), message });
    }
    check_chunks(&prepared, pins)?;
    let mut candidates = enumerate(&prepared, cluster, &request, pins)?;
    sort(&mut candidates);
    let bound = request.device_memory;
    let mut refused: Vec<(usize, Memory)> = Vec::new();
    // By how much the exact memory of refused plans exceeds the estimate: others of the same degrees
    // will exceed theirs as well.
    let mut excess: BTreeMap<(u64, u64), f64> = BTreeMap::new();
    // By time; then, if what was refused made the rest look too large, the leanest all the same.
    let mut lean: Vec<usize> = (0..candidates.len()).collect();
    lean.sort_by_key(|index| candidates[*index].prediction.memory.total());
    let rounds =
        (0..candidates.len()).map(|index| (index, false)).chain(lean.into_iter().take(2).map(|index| (index, true)));
    let mut close: Vec<(usize, Plan)> = Vec::new();
    for (index, is_last_resort) in rounds {
        let candidate = &candidates[index];
        if let Some((first, _)) = close.first()
            && (candidate.prediction.step.0 > CLOSE * candidates[*first].prediction.step.0 || close.len() == MOST_CLOSE)
        {
            break;
        }
        let estimate = candidate.prediction.memory.total();
        let kin = (candidate.degrees.degree("dp"), candidate.zero);
        let factor = excess.get(&kin).copied().unwrap_or(1.0);
        let is_too_large = estimate.0 as f64 * factor > bound.0 as f64 || refused.len() >= MOST_REFUSED;
        let was_refused = refused.iter().any(|(other, _)| *other == index);
        if estimate > bound || was_refused || (is_too_large && !is_last_resort) {
            continue;
        }
        let mut plan = build::build(&prepared, cluster, &request, candidate)?;
        let Some(confirm) = confirm.filter(|_| !Feature::Ring.is_in(&plan)) else {
            // What goes round a ring is not lowered yet: its memory and time stay estimates.
            plan.prediction.host = cluster.on_host(plan.prediction.memory.total());
            close.push((index, plan));
            break;
        };
        plan.prediction = confirm(&plan).map_err(PlanError::Bug)?;
        let memory = plan.prediction.memory;
        tracing::info!(
            choice = candidate.choice(),
            estimate = format!("{}, {}", candidate.prediction.step, breakdown(&candidate.prediction.memory)),
            exact = format!("{}, {}", plan.prediction.step, breakdown(&memory)),
            "lowered"
        );
        if memory.total() > bound {
            refused.push((index, memory));
            excess.insert(kin, factor.max(memory.total().0 as f64 / estimate.0.max(1) as f64));
        } else {
            close.push((index, plan));
        }
    }
    // The first of those that are equal within a thousandth is the simplest.
    let lowered: Vec<(usize, Prediction)> = close.iter().map(|(index, plan)| (*index, plan.prediction)).collect();
    let fastest = lowered.iter().map(|(_, exact)| exact.step.0).fold(f64::INFINITY, f64::min);
    let Some((index, mut plan)) = close.into_iter().find(|(_, plan)| plan.prediction.step.0 <= 1.001 * fastest) else {
        return Err(infeasible(&candidates, &refused, bound, pins, request.batch, cluster));
    };
    plan.alternatives = alternatives(&candidates, index, &lowered, &refused, bound);
    Ok(plan)
}

/// Plans whose estimates differ by less than this factor from the fastest are predicted by their programs,
const CLOSE: f64 = 1.02;
/// up to so many.
const MOST_CLOSE: usize = 3;
/// How many plans may turn out not to fit before the search gives up.
const MOST_REFUSED: usize = 8;

/// Every candidate the pins allow.
fn enumerate(
    prepared: &Prepared<'_>,
    cluster: &Cluster,
    request: &Request,
    pins: &Pins,
) -> Result<Vec<Candidate>, PlanError> {
    let (ranks, batch) = (cluster.ranks(), request.batch);
    let work = model_work(prepared.graph, &cluster.device);
    let mut candidates = Vec::new();
    for way in ways(prepared, cluster, request, pins)? {
        let per_rank = batch / way.data;
        let sizes = divisors(per_rank).into_iter().filter(|size| pins.microbatch.is_none_or(|pin| pin == *size));
        for microbatch in sizes {
            let mut solved = Vec::new();
            for axes in &way.tp {
                let point = Point { work, bound: request.device_memory, degrees: way.degrees(microbatch, axes) };
                let meshes: Vec<Mesh> = point.degrees.iter().map(|degrees| degrees.mesh(batch)).collect();
                let mesh = way.placed(microbatch, axes).mesh(batch);
                let Some((placed, shape)) = solve(prepared, &mesh, &meshes, cluster, pins)? else { continue };
                extend(&mut solved, &placed, &shape, pins, &point);
            }
            // A larger microbatch needs more memory: where none fits, none of the larger ones will.
            let fits = solved.iter().any(|candidate| candidate.prediction.memory.total() <= request.device_memory);
            candidates.extend(solved);
            if !fits {
                break;
            }
        }
    }
    if candidates.is_empty() {
        let message = match pins.microbatch {
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
    bound: Bytes,
}

/// Adds the ZeRO stages and recomputations of a placed mesh.
fn extend(candidates: &mut Vec<Candidate>, placed: &Placed<'_>, shape: &Shape<'_>, pins: &Pins, point: &Point) {
    for (storage, degrees) in point.degrees.iter().enumerate() {
        // Where every rank stores all there are no parts to have replicas of.
        let is_kept = |zero: &u64| match (copy_axes(placed.mesh).is_empty(), degrees.degree("fsdp") > 1) {
            (true, _) => *zero == 0,
            (false, has_parts) => *zero > 0 || !has_parts,
        };
        let stages = (0..=3).filter(|zero| pins.zero.map_or(is_kept(zero), |pin| pin == *zero));
        for zero in stages {
            // With one microbatch stage 2 is stage 1.
            if zero == 2 && placed.microbatches == 1 && pins.zero.is_none() {
                continue;
            }
            for recompute in recomputations(shape, storage, zero, pins, point.bound) {
                let prediction = shape.predict(placed, storage, zero, recompute, point.work);
                let (degrees, loss_chunks) = (degrees.clone(), shape.loss_chunks);
                candidates.push(Candidate { degrees, zero, recompute, loss_chunks, prediction });
            }
        }
    }
}

/// How much may be computed again: as pinned; else nothing, and where that does not fit what does.
fn recomputations(shape: &Shape<'_>, storage: usize, zero: u64, pins: &Pins, bound: Bytes) -> Vec<Recompute> {
    let total = |recompute| shape.memory(storage, zero, recompute).total();
    let pinned = pins.recompute.filter(|pin| *pin != Recompute::BY_NEED);
    let mut choices = vec![pinned.unwrap_or(Recompute::None)];
    if pinned.is_none() && total(Recompute::None) > bound {
        // A few percent are left for what the estimate does not see.
        let bound = bound.0 as f64 * 0.97;
        let fits = |count| total(Recompute::Values(count)).0 as f64 <= bound;
        let all = shape.menu().steps();
        choices.push(Recompute::Values(least_steps(all, fits).unwrap_or(all)));
    }
    choices
}

/// The fewest steps of recomputation that fit, by bisection; `None` if not even all do.
fn least_steps(steps: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    if !fits(steps) {
        return None;
    }
    let (mut low, mut high) = (0, steps);
    while low + 1 < high {
        let middle = low.midpoint(high);
        if fits(middle) { high = middle } else { low = middle }
    }
    Some(high)
}

/// Places the batch on its axes, and solves the others; `None` if the batch does not divide. `meshes` are
/// the ways to store parameters.
fn solve<'a>(
    prepared: &'a Prepared<'_>,
    mesh: &'a Mesh,
    meshes: &[Mesh],
    cluster: &'a Cluster,
    pins: &Pins,
) -> Result<Option<(Placed<'a>, Shape<'a>)>, PlanError> {
    let Some(mut placed) = place_batch(prepared, mesh, cluster)? else { return Ok(None) };
    let conversions = place_axes(prepared, &mut placed);
    let shape = Shape::new(prepared, &placed, &conversions, loss_chunks(prepared, &placed, pins), meshes);
    Ok(Some((placed, shape)))
}

/// Whether the head can be cut as it is pinned.
fn check_chunks(prepared: &Prepared<'_>, pins: &Pins) -> Result<(), PlanError> {
    let Some(chunks) = pins.loss_chunks.filter(|chunks| *chunks > 1) else { return Ok(()) };
    let message = match &prepared.head {
        None => "the loss is no cross-entropy of a product over a sequence; leave it out".to_string(),
        Some(head) => match head.sequence(prepared.graph) {
            sequence if sequence.is_multiple_of(chunks) => return Ok(()),
            sequence => format!("{chunks} does not divide the sequence of {sequence}; use a divisor of it"),
        },
    };
    Err(PlanError::Pin { pin: format!("loss_chunks={chunks}"), message })
}

/// Into how many chunks the head is cut: as pinned, or by the tokens of a microbatch on one rank.
fn loss_chunks(prepared: &Prepared<'_>, placed: &Placed<'_>, pins: &Pins) -> u64 {
    let strategy = |id| &placed.strategies[prepared.folded.class[id]];
    let Some(head) = &prepared.head else { return 1 };
    if !head.is_cut_whole(prepared.graph, placed.mesh, strategy) {
        return 1;
    }
    let class = prepared.folded.class[head.entropy];
    let (_, results) = prepared.local_types(class, &placed.strategies[class], placed.mesh);
    pins.loss_chunks.unwrap_or_else(|| head.chunks(prepared.graph, results[0].elements()))
}

/// The strategies with the batch divided over dp and mb; `None` where some node's batch does not divide.
fn place_batch<'a>(
    prepared: &Prepared<'_>,
    mesh: &'a Mesh,
    cluster: &'a Cluster,
) -> Result<Option<Placed<'a>>, PlanError> {
    let axes = batch_axes(mesh);
    let mut strategies = Vec::with_capacity(prepared.rules.len());
    for (choice, rule) in prepared.batch.iter().zip(&prepared.rules) {
        let add = |strategy: Strategy, axis: &AxisId| strategy.with(*axis, *choice);
        let strategy = axes.iter().fold(Strategy::default(), add);
        if rule.check(&strategy, mesh).is_err() {
            return Ok(None);
        }
        strategies.push(strategy);
    }
    let is_looped = |class: usize| matches!(prepared.batch[class], Choice::Factor(_));
    let resolved = |maker: usize, result: usize| {
        let sharding = prepared.rules[maker].result_sharding(result, &strategies[maker]);
        sharding.partial.iter().any(|(axis, _)| mesh.is_time(*axis))
    };
    // A value summed over microbatches exists only after the last of them.
    for flow in prepared.flows.iter().filter(|flow| resolved(flow.maker, flow.result)) {
        if flow.readers.iter().any(|(reader, _, _)| is_looped(*reader)) {
            return Ok(None);
        }
    }
    Ok(Some(Placed { mesh, cluster, strategies, microbatches: mesh.microbatches(), handed: BTreeMap::new() }))
}

/// The model's work in one step: recomputation does not count.
pub fn model_work(graph: &Graph, device: &Profile) -> Work {
    let mut work = Work { flops: Flops(0.0), at_peak: Seconds(0.0) };
    for (id, node) in graph.nodes().filter(|(_, node)| !matches!(node.role, shardc_ir::Role::Recompute(_))) {
        let operands = graph.operand_types(id);
        let flops = cost::model_flops(&node.op, &operands, &graph.result_types(id));
        if let Some(operand) = operands.first().filter(|_| flops.0 > 0.0) {
            work.flops += flops;
            work.at_peak += Seconds(flops.0 / cost::peak(operand.dtype, device));
        }
    }
    work
}

/// By step time; what is equal within a thousandth by the simpler choice.
fn sort(candidates: &mut [Candidate]) {
    candidates.sort_by(|a, b| a.prediction.step.0.total_cmp(&b.prediction.step.0));
    let simplicity = |c: &Candidate| (c.recompute, c.zero, c.degrees.axes(), c.degrees.degree("tp"));
    // The best and its near-ties, simplest first.
    let Some(best) = candidates.first().map(|best| best.prediction.step.0) else { return };
    let ties = candidates.partition_point(|candidate| candidate.prediction.step.0 <= best * 1.001);
    candidates[..ties].sort_by_key(simplicity);
}

/// The runners-up, best first, and why each lost. Those that were not lowered are estimated; what the estimate does
/// not see of the winner it does not see of its like either, so their steps are scaled by what the winner's exact
/// step is of its own estimate.
fn alternatives(
    candidates: &[Candidate],
    chosen: usize,
    lowered: &[(usize, Prediction)],
    refused: &[(usize, Memory)],
    bound: Bytes,
) -> Vec<Alternative> {
    let exact = |index: usize| lowered.iter().find(|(other, _)| *other == index).map(|(_, exact)| exact);
    let estimated = &candidates[chosen].prediction;
    let winner = exact(chosen).unwrap_or(estimated);
    let scale = winner.step.0 / estimated.step.0;
    let mut seen = vec![candidates[chosen].choice()];
    let (mut list, mut unfit) = (Vec::new(), 0);
    for (index, candidate) in candidates.iter().enumerate() {
        let choice = candidate.choice();
        if seen.contains(&choice) {
            continue;
        }
        seen.push(choice.clone());
        let (prediction, beside, scale) = match exact(index) {
            Some(exact) => (exact, winner, 1.0),
            None => (&candidate.prediction, estimated, scale),
        };
        let confirmed = refused.iter().find(|(other, _)| *other == index).map(|(_, memory)| *memory);
        let memory = confirmed.unwrap_or(prediction.memory);
        let reason = if memory.total() > bound {
            // The fastest that do not fit say what memory costs; more of them say no more.
            unfit += 1;
            if unfit > 4 {
                continue;
            }
            let (name, bytes) = largest(&memory);
            format!("needs {} of {bound} ({name} {bytes})", memory.total())
        } else {
            slower(prediction, beside)
        };
        list.push(Alternative { choice, step: prediction.step * scale, memory: memory.total(), reason });
        if list.len() == 12 {
            break;
        }
    }
    list
}

/// By how much a plan is slower, and what makes it so.
fn slower(prediction: &Prediction, winner: &Prediction) -> String {
    let percent = 100.0 * (prediction.step.0 / winner.step.0 - 1.0);
    if percent < -0.1 {
        return "faster, but plans of these degrees needed more memory than was estimated".to_string();
    }
    let parts = [
        ("communication", prediction.exposed_communication, winner.exposed_communication),
        ("matmuls", prediction.matmul, winner.matmul),
        ("memory traffic and launches", prediction.memory_bound, winner.memory_bound),
        ("the update", prediction.optimizer, winner.optimizer),
    ];
    let worst = parts.iter().max_by(|a, b| (a.1.0 - a.2.0).total_cmp(&(b.1.0 - b.2.0)));
    match worst {
        Some((name, own, best)) if own.0 > best.0 => {
            format!("{percent:.1}% slower: {} more in {name}", Seconds(own.0 - best.0))
        }
        _ => "as fast, and less simple".to_string(),
    }
}

fn parts(memory: &Memory) -> [(&'static str, Bytes); 5] {
    [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("buffers", memory.buffers),
    ]
}

fn breakdown(memory: &Memory) -> String {
    parts(memory).map(|(name, bytes)| format!("{name} {bytes}")).join(", ")
}

fn largest(memory: &Memory) -> (&'static str, Bytes) {
    parts(memory).into_iter().max_by_key(|(_, bytes)| *bytes).unwrap_or_default()
}

fn infeasible(
    candidates: &[Candidate],
    refused: &[(usize, Memory)],
    bound: Bytes,
    pins: &Pins,
    batch: u64,
    cluster: &Cluster,
) -> PlanError {
    let memory = |index: usize| {
        let confirmed = refused.iter().find(|(other, _)| *other == index).map(|(_, memory)| *memory);
        confirmed.unwrap_or(candidates[index].prediction.memory)
    };
    // What was lowered is known; an estimate that fits is not, once others turned out larger.
    let is_known = |index: &usize| refused.is_empty() || refused.iter().any(|(other, _)| other == index);
    let Some(nearest) = (0..candidates.len()).filter(is_known).min_by_key(|index| memory(*index).total()) else {
        return PlanError::Bug("no candidate at all".to_string());
    };
    let needs = memory(nearest);
    let breakdown = breakdown(&needs);
    let is_pinned = *pins != Pins::default();
    let (share, give) = match cluster.share_of_host() {
        Some(share) if share == bound => {
            let host = Bytes(cluster.device.host_memory_bytes.value as u64);
            let (ranks, needed) = (cluster.per_node, cluster.on_host(needs.total()));
            (format!(", its share of the host's {host} over {ranks} ranks"), format!("give the host {needed}"))
        }
        _ => (String::new(), format!("give each rank {}", needs.total())),
    };
    let mut fixes = vec![give];
    if is_pinned {
        fixes.push("drop a pin".to_string());
    }
    if largest(&needs).0 == "activations" && candidates[nearest].degrees.microbatch > 1 {
        fixes.push("use smaller microbatches".to_string());
    }
    if largest(&needs).0 != "activations" {
        fixes.push(format!("use more than {} ranks", cluster.ranks()));
    } else {
        fixes.push(format!("use shorter sequences or fewer of them than {batch}"));
    }
    PlanError::Infeasible {
        bound,
        share: share.into(),
        pins: if is_pinned { " under these pins" } else { "" }.into(),
        choice: candidates[nearest].choice(),
        needed: needs.total(),
        breakdown: breakdown.into(),
        fix: fixes.join(", or "),
    }
}
