//! How much is computed again for a memory: by estimates, and once programs say how far those are off.
//!
//! How many values are computed again, and into how many chunks the head is cut, follows from estimates of memory, a
//! few percent of which are left for what they do not see. What is lowered is known: its mesh is solved again for a
//! memory that is as much larger or smaller as its estimate was wrong. So a plan that was too large has a leaner one
//! beside it, and one with room to spare another that computes less again. Between a plan that fits and one that does
//! not, bytes and seconds are taken to change evenly.

use super::overstated::{NODES, Refused, tried};
use crate::search::candidate::{Candidate, is_long, kin, sort};
use crate::search::choice::pins::{Pins, Recompute};
use crate::search::enumerate::enumerate;
use crate::search::error::PlanError;
use crate::search::measure::Measure;
use crate::search::space::Space;
use crate::search::visit::Visited;
use shardc_ir::Plan;
use shardc_ir::plan::Prediction;

/// The share of its memory that a plan may take where it is known what its like takes.
const KNOWN: f64 = 0.995;

/// How many plans are lowered that were solved again.
const TRIES: usize = 4;

/// A plan is lowered if it is thought to take less than this share of the fastest.
const GAIN: f64 = 0.999;

/// A mesh is solved again whose plan takes so many times the fastest at the most.
const NEAR: f64 = 1.02;

/// Adds to the `candidates`, and to those that are `lowered`, the plans that fit and take less than all that are
/// lowered and than so many seconds: those of the same meshes, ZeRO stages and schedules, for the memory that is left by
/// what programs take.
///
/// # Errors
/// Those of `make`.
pub(in crate::search) fn again(
    candidates: &mut Vec<Candidate>,
    (lowered, refused): (&mut Vec<(usize, Plan)>, &mut Refused),
    space: &Space<'_, '_>,
    against: f64,
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<(), PlanError> {
    if space.prepared.graph.node_count() > NODES {
        return Ok(());
    }
    let mut solved = Vec::new();
    let mut open: Vec<(f64, Candidate)> = Vec::new();
    // A plan that fits is good enough where others take long to lower.
    if lowered.iter().any(|(index, _)| is_long(&candidates[*index], space.request.batch)) {
        return Ok(());
    }
    for _ in 0..TRIES {
        let best = lowered.iter().map(|(_, plan)| plan.prediction.step.0).fold(against, f64::min);
        let exact = lowered.iter().map(|(index, plan)| (*index, plan.prediction));
        let known: Vec<(usize, Prediction)> = exact.chain(refused.iter().copied()).collect();
        for (index, exact) in known.iter().filter(|of| of.1.step.0 <= NEAR * best) {
            if !solved.contains(index) {
                solved.push(*index);
                open.extend(like(&candidates[*index], exact, space)?);
            }
        }
        let choices: Vec<String> = known.iter().map(|(index, _)| candidates[*index].choice()).collect();
        // Between two that are known nothing is to be extrapolated.
        let inside = between(candidates, &known);
        open.retain(|(_, own)| !inside.iter().any(|(_, other)| own.is_spare_of(other) || other.is_spare_of(own)));
        open.extend(inside);
        open.retain(|(step, candidate)| *step < GAIN * best && !choices.contains(&candidate.choice()));
        let least = open.iter().enumerate().min_by(|a, b| a.1.0.total_cmp(&b.1.0)).map(|(index, _)| index);
        let Some(least) = least else { break };
        candidates.push(open.swap_remove(least).1);
        lowered.extend(tried(candidates, candidates.len() - 1, refused, make)?);
    }
    Ok(())
}

/// How memory is taken of the like of a candidate, of which it is known what its programs take.
pub(super) fn measured(of: &Candidate, exact: &Prediction) -> Measure {
    let excess = exact.filled() / of.prediction.filled().max(f64::MIN_POSITIVE);
    Measure { excess, shares: &[KNOWN] }
}

/// The candidates of a candidate's mesh, ZeRO stage and schedule that fit, if they take as much more or less memory
/// than is estimated as it does; with what steps they would take.
fn like(of: &Candidate, exact: &Prediction, space: &Space<'_, '_>) -> Result<Vec<(f64, Candidate)>, PlanError> {
    let estimate = &of.prediction;
    let measure = measured(of, exact);
    // There is something to gain only from what memory is saved by.
    let is_whole =
        of.recompute == Recompute::None && of.prices.byte == 0.0 && of.loss_chunks == 1 && of.offload.is_none();
    if is_whole && exact.fits() {
        return Ok(Vec::new());
    }
    let mut found = solved_again(of, &Space { measure, ..*space })?;
    let moves = |own: &Candidate| !own.offload.is_none();
    found.retain(|own| moves(own) == moves(of) && own.prediction.fits());
    for own in &mut found {
        own.prediction.room = of.prediction.room;
    }
    debug_assert!(found.iter().all(|own| kin(own) == kin(of)));
    let scale = exact.step.0 / estimate.step.0;
    Ok(found.into_iter().map(|own| (own.prediction.step.0 * scale, own)).collect())
}

/// The candidates of a candidate's mesh, ZeRO stage and schedule, the best first: its cuts, and what is computed again, are
/// open.
///
/// # Errors
/// A bug.
pub(super) fn solved_again(of: &Candidate, space: &Space<'_, '_>) -> Result<Vec<Candidate>, PlanError> {
    let stages = of.stages.as_ref();
    let pins = Pins {
        zero: Some(of.zero),
        microbatch: Some(of.degrees.microbatch),
        overlap_chunks: Some(of.overlap_chunks),
        schedule: stages.map(|stages| stages.schedule),
        virtual_stages: stages.map(|stages| stages.per_stage),
        in_flight: stages.and_then(|stages| stages.limits.in_flight),
        delayed: stages.and_then(|stages| stages.limits.delayed),
        ..space.pins.clone()
    };
    let space = Space { pins: &pins, meshes: Some(std::slice::from_ref(&of.degrees)), ..*space };
    let mut visited = Visited::within(space.away.room.device, f64::INFINITY);
    // Cuts are moved of what is near the fastest that is known.
    visited.best = of.prediction.step.0;
    let mut found = match enumerate(&space, &mut visited) {
        Err(error @ PlanError::Bug(_)) => return Err(error),
        found => found.unwrap_or_default(),
    };
    sort(&mut found);
    found.retain(|own| own.degrees == of.degrees);
    Ok(found)
}

/// Of plans that fit and others that compute less again, and do not: what computes as little again as fits if bytes and
/// seconds change evenly from one to the other, with what it would take.
fn between(candidates: &[Candidate], known: &[(usize, Prediction)]) -> Vec<(f64, Candidate)> {
    let steps = |of: &Candidate| match of.recompute {
        Recompute::None => Some(0),
        Recompute::Values(steps) => Some(steps),
        _ => None,
    };
    let is_alike = |a: &Candidate, b: &Candidate| {
        let alike = |of: &Candidate| Candidate { recompute: Recompute::None, prediction: a.prediction, ..of.clone() };
        a.stages.is_none() && Candidate { within: a.within, ..alike(b) } == alike(a)
    };
    let mut found = Vec::new();
    for (index, fits) in known.iter().filter(|of| of.1.fits()) {
        let own = &candidates[*index];
        let less = |(other, exact): &(usize, Prediction)| {
            let steps = steps(&candidates[*other]).filter(|_| !exact.fits() && is_alike(own, &candidates[*other]))?;
            Some((steps, *exact))
        };
        let more = steps(own).unwrap_or(0);
        let nearest = known.iter().filter_map(less).filter(|of| of.0 < more).max_by_key(|of| of.0);
        let Some((least, unfit)) = nearest else { continue };
        let share = ((KNOWN - fits.filled()) / (unfit.filled() - fits.filled())).clamp(0.0, 1.0);
        let fewer = ((more - least) as f64 * share) as u64;
        if fewer > 0 && fewer < more - least {
            let part = fewer as f64 / (more - least) as f64;
            let between = |from: f64, to: f64| from + (to - from) * part;
            let recompute = Recompute::Values(more - fewer);
            let step = between(fits.step.0, unfit.step.0);
            let mut prediction = own.prediction;
            prediction.step.0 *= step / fits.step.0;
            found.push((step, Candidate { recompute, prediction, ..own.clone() }));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::plan::Memory;
    use shardc_ir::{Bytes, Seconds};

    fn taking(seconds: f64, bytes: u64) -> Prediction {
        let memory = Memory { activations: Bytes(bytes), ..Memory::default() };
        Prediction { step: Seconds(seconds), memory, room: Bytes(1000), ..Prediction::default() }
    }

    fn candidate(dp: u64, recompute: Recompute) -> Candidate {
        Candidate::bare(dp, recompute, taking(2.0, 900))
    }

    /// Between a plan that fits and the nearest that does not, as bytes and seconds change from one to the other.
    #[test]
    fn what_lies_between_two_known_plans_is_interpolated() {
        let candidates = [
            candidate(8, Recompute::Values(100)),
            candidate(8, Recompute::Values(20)),
            candidate(8, Recompute::None),
            candidate(4, Recompute::Values(60)),
        ];
        let known = [(0, taking(1.0, 794)), (1, taking(0.8, 1195)), (2, taking(0.7, 1300)), (3, taking(0.9, 1100))];
        let found = between(&candidates, &known);
        let [(step, own)] = &found[..] else { panic!("{}", found.len()) };
        assert_eq!(own.recompute, Recompute::Values(60));
        assert!((step - 0.9).abs() < 1e-9 && (own.prediction.step.0 - 1.8).abs() < 1e-9);
        // Nothing lies between neighbours.
        assert!(between(&candidates[2..], &[(0, taking(0.9, 900)), (1, taking(0.7, 1300))]).is_empty());
    }
}
