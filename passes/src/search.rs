//! The search: one plan out of all, by seconds under the memory bound.
//!
//! What can be chosen ([`choice`]) makes the ways to divide the ranks ([`ways`]). Each is a mesh, on which tensor
//! parallelism is solved on the folded graph ([`shard`](crate::shard)), exactly where that is small enough. A mesh is
//! left out where a bound tells that it is not worth it. ZeRO stages and recomputation are then arithmetic on the sums
//! of a mesh. The best candidates are lowered, and their programs decide; only the winner becomes an annotated plan.
//! The order of candidates, and so the result, is deterministic.
//!
//! The modules stand in layers, each of which uses those before it:
//!
//! 1. [`choice`]: what can be chosen, in the words of pins;
//! 2. [`estimate`]: the closed form, seconds and bytes of one candidate;
//! 3. `bound`: lower bounds of all plans of a mesh;
//! 4. [`ways`], `placed`, `paces`, `visit`: the ways to divide the ranks, meshes with their layouts, and what is known
//!    of them;
//! 5. `whole` and [`stages`]: plans without and with pipeline stages;
//! 6. `enumerate`: all candidates;
//! 7. `choose`: the choice among them by their programs;
//! 8. `rounds`: plans of one stage, and pipelines;
//! 9. `order`: which kind of nodes holds which stages.
//!
//! Three imports point up: `space` and `visit` name types and orders of `stages`, and `whole` asks `choose::overlap`
//! whether layouts for chunks are worth finding. Beside the layers stand `away` (what lies away from the devices) and
//! [`why`], which asks the same functions what other choices would cost.

mod away;
pub(crate) mod bound;
mod candidate;
pub mod choice;
mod choose;
mod enumerate;
mod error;
pub mod estimate;
mod measure;
mod order;
mod paces;
mod placed;
mod rounds;
mod space;
pub mod stages;
mod visit;
pub mod ways;
mod whole;
pub mod why;
mod work;

#[cfg(test)]
mod exact_tests;
#[cfg(test)]
mod fitted_tests;
#[cfg(test)]
mod peak_tests;
#[cfg(test)]
mod staged_tests;

pub use candidate::Candidate;
pub use choice::degrees::Degrees;
pub use choice::pins::{Pins, Recompute};
pub use choose::build::{Confirm, Exact};
pub use choose::undivided::Undivided;
pub use error::PlanError;
pub use order::search_in_order;
pub use placed::fastest;
pub use work::{Work, model_work};

use crate::chunk::MOST_CHUNKS;
use crate::cluster::Cluster;
use crate::shard::prepare::prepare;
use crate::shard::tensor::Prepared;
use away::Away;
use measure::Measure;
use placed::paced;
use shardc_ir::plan::{Request, Scope};
use shardc_ir::units::counted;
use shardc_ir::{Family, Feature, Graph, Plan, Seconds, Target};
use space::{Pipelines, Space};

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
    let found = search_bounded(&prepared, cluster, request, pins, confirm);
    if request.scope == Scope::Runnable || confirm.is_none() {
        return found;
    }
    let step = found.as_ref().map_or(f64::INFINITY, |plan| plan.prediction.step.0);
    prepared.scope = Scope::Runnable;
    let request = Request { scope: prepared.scope, ..request.clone() };
    let runnable = search_bounded(&prepared, cluster, &request, pins, confirm);
    runnable.ok().filter(|plan| plan.prediction.step.0 < step).map_or(found, Ok)
}

/// A training step as searches for a request see it.
pub fn prepared<'a>(graph: &'a Graph, request: &Request, target: &'a dyn Target) -> Prepared<'a> {
    let mut prepared = prepare(graph, request.batch, target);
    (prepared.scope, prepared.reduce_dtype) = (request.scope, request.reduce_dtype);
    prepared
}

/// [`search_confirmed`] of what is prepared already, with nothing told of what is possible; where `meshes` are given, among
/// those alone.
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

/// [`search_among`] all meshes, with what is possible.
fn search_bounded(
    prepared: &Prepared<'_>,
    cluster: &Cluster,
    request: &Request,
    pins: &Pins,
    confirm: Option<Confirm<'_>>,
) -> Result<Plan, PlanError> {
    let of = |space: &Space<'_, '_>| rounds::best(&Space { is_bounded: true, ..*space }, confirm);
    within(prepared, (cluster, request, pins), None, of)
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
        let message = format!("the model has {}; pin recompute=block for all of them", counted(blocks, "block"));
        return Err(PlanError::Pin { pin: format!("recompute={count}"), message });
    }
    check_chunks(prepared, pins)?;
    choose::casts::check(prepared.graph, pins)?;
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
        moves_cuts: false,
        is_bounded: false,
        measure: Measure::default(),
    };
    of(&space)
}

/// Whether pipelines are searched.
fn pipelines(prepared: &Prepared<'_>, cluster: &Cluster, request: &Request, pins: &Pins) -> Pipelines {
    let is_kept = pins.degree(Family::Pipeline) != Some(1);
    // Where links are fast, as they are within most nodes, stages gain little for the time that solving them takes.
    let is_worth = cluster.nodes > 1 || request.scope == Scope::All;
    let is_open = Feature::Pipeline.is_open(false, request.scope, prepared.target);
    // Ranks that cannot all be data ranks do better as stages than where they divide tensors badly, or do the same.
    let is_uneven = !pins.leaves_data(cluster.ranks(), request.batch) && prepared.target.runs(Feature::Pipeline);
    match pins.opens_stages() {
        _ if !is_kept => Pipelines::Never,
        true => Pipelines::Alone,
        false if (is_open && is_worth) || is_uneven => Pipelines::Too,
        false if prepared.target.runs(Feature::Pipeline) => Pipelines::Fallback,
        false => Pipelines::Never,
    }
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
