//! The fastest pipeline with other cuts.
//!
//! Cuts are found for stages that are as long as each other. What a step takes depends on when they wait for each other
//! as well, which the run of a schedule tells: it takes too long to move many cuts by it on every mesh, and is done for
//! the plans that are the fastest in the end. Where values leave the devices, what they take is seen by estimates alone, and
//! cuts stay.

use super::fitted::{measured, solved_again};
use super::overstated::{NODES, Refused, tried};
use crate::search::candidate::{Candidate, is_long};
use crate::search::error::PlanError;
use crate::search::space::Space;
use crate::threads;
use shardc_ir::Plan;

/// How many pipelines are cut again: the fastest plan, and others whose estimates take so many times as long at the most.
const MOST: usize = 6;
const NEAR: f64 = 1.06;

/// A plan is lowered if it is thought to take less than this share of the fastest.
const GAIN: f64 = 0.995;

/// Adds to the `lowered` plans the one that is thought to be the fastest of those that differ from the fastest pipelines in
/// where they are cut, if that is thought to be faster than all that are lowered.
///
/// # Errors
/// Those of `make`; that a pin does not suit a candidate is none.
pub(super) fn fastest(
    candidates: &mut Vec<Candidate>,
    (lowered, refused): (&mut Vec<(usize, Plan)>, &mut Refused),
    space: &Space<'_, '_>,
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<(), PlanError> {
    let Some((index, plan)) = super::fastest(lowered) else { return Ok(()) };
    let (best, exact) = (&candidates[*index], plan.prediction);
    let is_open = |of: &Candidate| of.stages.is_some() && of.offload.is_none();
    if !is_open(best) || is_long(best, space.request.batch) || space.prepared.graph.node_count() > NODES {
        return Ok(());
    }
    let mut open = vec![*index];
    for (index, other) in candidates.iter().enumerate() {
        let is_near = other.prediction.fits() && other.prediction.step.0 < NEAR * best.prediction.step.0;
        let is_new = || open.iter().all(|known| kind(&candidates[*known]) != kind(other));
        if is_near && is_open(other) && open.len() < MOST && is_new() {
            open.push(index);
        }
    }
    let measure = measured(best, &exact);
    let again = |index: &usize| solved_again(&candidates[*index], &Space { measure, moves_cuts: true, ..*space });
    let mut found: Vec<(f64, Candidate)> = Vec::new();
    for (index, of) in open.iter().zip(threads::map(&open, again)) {
        // As much longer by its programs as with other cuts.
        let known = lowered.iter().find(|of| of.0 == *index);
        let scale = known.map_or(1.0, |of| of.1.prediction.step.0 / candidates[*index].prediction.step.0);
        let fitting = of?.into_iter().filter(|of| of.prediction.fits() && is_open(of));
        found.extend(fitting.map(|of| (scale * of.prediction.step.0, of)));
    }
    let Some((step, mut other)) = found.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)) else { return Ok(()) };
    if step < GAIN * exact.step.0 {
        other.prediction.room = best.prediction.room;
        candidates.push(other);
        lowered.extend(tried(candidates, candidates.len() - 1, refused, make)?);
    }
    Ok(())
}

/// What plans have in common that differ in their cuts, and in what they compute again, alone.
fn kind(of: &Candidate) -> impl PartialEq + '_ {
    let stages = of.stages.as_ref().map(|stages| (stages.schedule, stages.per_stage, stages.limits));
    (&of.degrees, of.zero, of.overlap_chunks, stages)
}
