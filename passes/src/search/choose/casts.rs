//! Whether the casts of parameters are kept from step to step ([`keep_casts`](crate::keep_casts)).
//!
//! A kept cast saves reading the parameter once a step and costs memory between steps. It moves the optimum of little
//! else, so unless they are pinned to be kept only the plan that was found is lowered with its casts kept, where that may
//! gain enough, and where it does not fit then those of its like that compute more again; the estimate and the bound that a
//! search reports are those of plans that cast in every step. Where programs do not do what is planned, nothing tells what
//! keeping casts takes, and they are not kept.

use super::build::{Confirm, build};
use super::fitted::again;
use crate::keep_casts::{Casts, are_kept};
use crate::search::candidate::{Candidate, is_long};
use crate::search::choice::pins::Pins;
use crate::search::error::PlanError;
use crate::search::space::Space;
use shardc_ir::feature::unlowered;
use shardc_ir::{Graph, Node, Op, Plan, ValueId};
use std::cell::Cell;

/// What a plan's choice says of kept casts, and a pin.
const CHOICE: &str = "keep_casts";

/// The share of the step that is worth keeping casts for.
const GAIN: f64 = 0.001;

fn refuse(message: &str) -> PlanError {
    PlanError::Pin { pin: format!("{CHOICE}=1"), message: message.to_string() }
}

/// What there is nothing of to keep.
const NONE: &str = "no trained parameter is cast and lies on the device as its cast does; leave it out";

/// Whether a step casts parameters, if casts are pinned to be kept.
///
/// # Errors
/// That it does not.
pub(in crate::search) fn check(graph: &Graph, pins: &Pins) -> Result<(), PlanError> {
    let is_parameter = |value: &ValueId| matches!(graph.def(*value).op, Op::Parameter(_));
    let casts = |node: &Node| matches!(node.op, Op::Cast(_)) && node.operands.iter().any(is_parameter);
    match pins.keep_casts {
        Some(true) if !graph.nodes().any(|(_, node)| casts(node)) => Err(refuse(NONE)),
        _ => Ok(()),
    }
}

/// A candidate's plan, with its casts kept where that is pinned.
///
/// # Errors
/// Those of making it; a pin that it cannot meet.
pub(in crate::search) fn as_pinned(candidate: &Candidate, space: &Space<'_, '_>) -> Result<Plan, PlanError> {
    let plan = made(candidate, space)?;
    if space.pins.keep_casts != Some(true) {
        return Ok(plan);
    }
    let mut moved = plan.clone();
    candidate.offload.mark(&mut moved);
    if let Some(feature) = unlowered(&moved).first() {
        return Err(refuse(&format!(
            "no program tells what a plan with {feature} takes then; leave one of the two out"
        )));
    }
    kept(&plan)?.ok_or_else(|| refuse(NONE))
}

fn made(candidate: &Candidate, space: &Space<'_, '_>) -> Result<Plan, PlanError> {
    build(space.prepared, space.line, space.cluster, space.request, candidate)
}

/// A plan with its casts kept; none if it has none to keep.
fn kept(plan: &Plan) -> Result<Option<Plan>, PlanError> {
    let made = Casts::of(plan).keep().map_err(|error| PlanError::Bug(error.to_string()))?;
    let named = |made: Plan| Plan { choice: format!("{},{CHOICE}=1", made.choice), ..made };
    Ok(made.map(named))
}

/// Plans that keep casts, faster than one that does not.
#[derive(Default)]
pub(in crate::search) struct Kept {
    /// The fastest that fits, and its candidate.
    pub best: Option<(Candidate, Plan)>,
    /// How many were lowered.
    pub lowered: u64,
}

/// The plan of a candidate with its casts kept, if its programs are faster then and fit; or, where they do not fit, that of
/// another that computes more again.
///
/// # Errors
/// A bug.
pub(in crate::search) fn faster(
    (candidate, plan): (&Candidate, &Plan),
    space: &Space<'_, '_>,
    confirm: Option<Confirm<'_>>,
) -> Result<Kept, PlanError> {
    let Some(confirm) = confirm.filter(|_| space.pins.keep_casts.is_none() && unlowered(plan).is_empty()) else {
        return Ok(Kept::default());
    };
    let read = Casts::of(plan).bytes_read().0 as f64 / space.cluster.device.memory_bandwidth.value;
    let step = plan.prediction.step.0;
    if read < GAIN * step {
        return Ok(Kept::default());
    }
    let lowered = Cell::new(0);
    let predicted = |plan: &Plan| {
        let mut kept = kept(plan)?.ok_or_else(|| refuse(NONE))?;
        lowered.set(lowered.get() + 1);
        kept.prediction = confirm(&kept).map_err(PlanError::Bug)?.prediction;
        Ok(kept)
    };
    let is_faster = |plan: &Plan| plan.prediction.step.0 <= (1.0 - GAIN) * step;
    let own = match predicted(plan) {
        Err(PlanError::Pin { .. }) => return Ok(Kept::default()),
        own => own?,
    };
    let (fits, is_promising) = (own.prediction.fits(), is_faster(&own));
    let (mut known, mut found, mut refused) = (vec![candidate.clone()], Vec::new(), Vec::new());
    if is_promising && fits {
        found.push((0, own));
    } else if is_promising && !is_long(candidate, space.request.batch) {
        // A plan that fits is good enough where others take long to lower.
        refused.push((0, own.prediction));
        let make = |of: &Candidate| predicted(&made(of, space)?);
        again(&mut known, (&mut found, &mut refused), space, step, &make)?;
    }
    let best = found.into_iter().filter(|(_, plan)| is_faster(plan));
    let best = best.min_by(|a, b| a.1.prediction.step.0.total_cmp(&b.1.prediction.step.0));
    let best = best.map(|(index, plan)| (known.swap_remove(index), plan));
    Ok(Kept { best, lowered: lowered.get() })
}

/// What a search tells of the casts that its plan keeps.
pub(in crate::search) fn told(plan: &mut Plan) {
    if are_kept(&plan.graph) {
        plan.search.stopped += "; estimate and bound are those of plans that cast parameters in every step";
    }
}
