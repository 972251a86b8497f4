//! Plans of other meshes, where the programs of those that looked fastest take longer than was estimated.
//!
//! The closed form sees less where several axes meet on one wire. So what it takes for the fastest may not be: the best
//! of each other mesh that would be faster by its own estimate is lowered and simulated as well.

use crate::search::candidate::Candidate;
use crate::search::choice::degrees::Degrees;
use crate::search::error::PlanError;
use shardc_ir::Plan;

/// Meshes that are tried.
const MESHES: usize = 3;

/// By how much the programs must exceed another mesh's estimate for it to be tried.
const EXCESS: f64 = 1.05;

/// The plans of other meshes than those of `known` that take less than `step` seconds and fit. `candidates` are in the
/// order of their estimates; `make` builds a candidate and predicts it by its programs.
///
/// # Errors
/// Those of `make`; that a pin does not suit a candidate is none.
pub(in crate::search) fn other_meshes(
    candidates: &[Candidate],
    known: &[usize],
    mut step: f64,
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<Vec<(usize, Plan)>, PlanError> {
    let mut meshes: Vec<&Degrees> = known.iter().map(|index| &candidates[*index].degrees).collect();
    let mut found = Vec::new();
    for _ in 0..MESHES {
        let may_be_faster = |of: &Candidate| of.prediction.step.0 * EXCESS < step && of.prediction.fits();
        let is_open = |(_, of): &(usize, &Candidate)| !meshes.contains(&&of.degrees) && may_be_faster(of);
        let Some((index, candidate)) = candidates.iter().enumerate().find(is_open) else { break };
        meshes.push(&candidate.degrees);
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
