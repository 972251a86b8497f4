//! Plans of other meshes and schedules, where the programs of those that looked fastest take longer than was estimated.
//!
//! The closed form sees less where several axes meet on one wire, or where messages of a pipeline do. So what it takes for
//! the fastest may not be: the best of each other mesh, and of each other schedule of its stages, that would be faster by
//! its own estimate is lowered and simulated as well.

use crate::search::candidate::Candidate;
use crate::search::choice::degrees::Degrees;
use crate::search::choice::stages::MOST_ZERO;
use crate::search::error::PlanError;
use shardc_ir::Plan;
use shardc_ir::pipeline::Schedule;

/// Meshes and schedules that are tried.
const MESHES: usize = 3;

/// Of what plans estimates are too low alike: those of a mesh, and in stages of a schedule, where gradients are reduced in
/// every microbatch or once.
fn kind(of: &Candidate) -> (&Degrees, Option<(Schedule, u64, bool)>) {
    (&of.degrees, of.stages.as_ref().map(|stages| (stages.schedule, stages.per_stage, of.zero > MOST_ZERO)))
}

/// The plans of other meshes and schedules than those of `known` that take less than `step` seconds and fit. `candidates`
/// are in the order of their estimates; `make` builds a candidate and predicts it by its programs.
///
/// # Errors
/// Those of `make`; that a pin does not suit a candidate is none.
pub(in crate::search) fn other_meshes(
    candidates: &[Candidate],
    known: &[usize],
    mut step: f64,
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<Vec<(usize, Plan)>, PlanError> {
    let mut tried: Vec<_> = known.iter().map(|index| kind(&candidates[*index])).collect();
    let mut found = Vec::new();
    for _ in 0..MESHES {
        let may_be_faster = |of: &Candidate| of.prediction.step.0 < step && of.prediction.fits();
        let is_open = |(_, of): &(usize, &Candidate)| !tried.contains(&kind(of)) && may_be_faster(of);
        let Some((index, candidate)) = candidates.iter().enumerate().find(is_open) else { break };
        tried.push(kind(candidate));
        let plan = match make(candidate) {
            Err(PlanError::Pin { .. }) => continue,
            made => made?,
        };
        if plan.prediction.step.0 < step && plan.prediction.fits() {
            step = plan.prediction.step.0;
            found.push((index, plan));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::choice::pins::Recompute;
    use crate::search::choice::stages::{Limits, Stages};
    use shardc_ir::plan::Prediction;
    use shardc_ir::{Bytes, Seconds};

    /// Programs of one schedule take longer than was estimated: those of another on the same mesh may not.
    #[test]
    fn another_schedule_of_a_mesh_is_tried_as_another_mesh_is() {
        let taking = |seconds: f64| Prediction { step: Seconds(seconds), room: Bytes(1), ..Prediction::default() };
        let candidate = |dp: u64, schedule: Schedule, seconds: f64| {
            let (limits, none) = (Limits::default(), Vec::new());
            let stages =
                Stages { schedule, per_stage: 2, limits, cuts: none, recompute: Vec::new(), lengths: Vec::new() };
            Candidate { stages: Some(stages), ..Candidate::bare(dp, Recompute::None, taking(seconds)) }
        };
        let mut candidates = [
            candidate(2, Schedule::ZeroBubbleV, 1.0),
            candidate(2, Schedule::ZeroBubbleV, 1.01),
            candidate(2, Schedule::Interleaved, 1.1),
            candidate(4, Schedule::ZeroBubbleV, 1.11),
        ];
        let of_all = |candidates: &[Candidate; 4], step: f64, programs: [f64; 4]| {
            let seconds = |of: &Candidate| candidates.iter().zip(programs).find(|(other, _)| *other == of);
            let make = |of: &Candidate| Ok(Plan { prediction: taking(seconds(of).unwrap().1), ..Plan::default() });
            let found = other_meshes(candidates, &[0], step, &make).unwrap();
            found.into_iter().map(|of| of.0).collect::<Vec<_>>()
        };
        let found = |step: f64, programs: [f64; 4]| of_all(&candidates, step, programs);
        assert_eq!(found(1.3, [1.3, 0.5, 1.1, 1.2]), [2]);
        assert_eq!(found(1.3, [1.3, 0.5, 1.29, 1.2]), [2, 3]);
        assert_eq!(found(1.15, [1.15, 0.5, 1.14, 1.12]), [2, 3]);
        assert_eq!(found(1.15, [1.15, 0.5, 1.1, 1.1]), [2]);
        assert!(found(1.1, [1.1, 0.5, 1.0, 1.0]).is_empty());
        // Of the first two, which are of one schedule, one reduces gradients in every microbatch.
        candidates[0].zero = 2;
        assert_eq!(of_all(&candidates, 1.05, [1.05, 1.02, 1.1, 1.1]), [1]);
    }
}
