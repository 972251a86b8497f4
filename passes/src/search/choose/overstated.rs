//! Plans whose estimated memory is too large, and that of whose programs may not be.
//!
//! The closed form counts what lives at one time from above. So before nothing fits, the leanest of what nearly does
//! are lowered; and where plans of some kind turned out smaller than was estimated, so are the fastest of their kin.

use crate::search::candidate::{Candidate, kin};
use crate::search::error::PlanError;
use crate::search::measure::{COMPARED, NEAR, is_near};
use crate::search::space::Space;
use crate::threads;
use shardc_ir::Plan;
use shardc_ir::plan::Prediction;

/// Plans that do not fit, and what they take by their programs.
pub(in crate::search) type Refused = Vec<(usize, Prediction)>;

/// So many times, for the leanest of all: of convolutions with much that is computed again the estimate is twice what
/// programs take.
const LEANEST: f64 = 2.5;

/// How many plans are lowered before nothing fits.
const NEAREST: usize = 4;

/// How many faster plans are lowered whose estimates do not fit.
const FASTER: usize = 3;

/// A plan of a mesh of which none was lowered is tried as well if it takes less than the first share of the fastest; and
/// of its room, by its estimate, less than the second.
const FAR: [(f64, f64); 2] = [(0.8, NEAR), (0.95, COMPARED)];

/// A plan is tried whose estimate does not fit if it takes this share of the fastest that does.
const GAIN: f64 = 0.98;

/// The most nodes of a graph of which plans are lowered in the hope of a gain: lowering takes time.
pub(in crate::search) const NODES: usize = 16_000;

/// What of the candidates fits though its estimate does not: the first found, the leanest of each kin first. What does
/// not fit is added to `refused`. `make` builds a candidate and predicts it by its programs; as many as there are threads
/// are a `guess` before that, since most do not fit.
///
/// # Errors
/// Those of `make`; that a pin does not suit a candidate is none.
pub(in crate::search) fn nearest(
    candidates: &[Candidate],
    refused: &mut Refused,
    guess: &dyn Fn(Vec<Candidate>),
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<Vec<(usize, Plan)>, PlanError> {
    let filled = |index: &usize| candidates[*index].prediction.filled();
    let known: Vec<usize> = refused.iter().map(|of| of.0).collect();
    let leanest = (0..candidates.len()).min_by(|a, b| filled(a).total_cmp(&filled(b)));
    let may_fit = |index: &usize| {
        let estimate = &candidates[*index].prediction;
        let is_leanest = || leanest == Some(*index) && estimate.filled() <= LEANEST;
        !estimate.fits() && (is_near(estimate) || is_leanest())
    };
    let mut open: Vec<usize> = (0..candidates.len()).filter(|index| may_fit(index) && !known.contains(index)).collect();
    open.sort_by(|a, b| filled(a).total_cmp(&filled(b)));
    let mut kinds = Vec::new();
    open.retain(|index| {
        let kind = (&candidates[*index].degrees, kin(&candidates[*index]));
        let is_new = !kinds.contains(&kind);
        kinds.push(kind);
        is_new
    });
    open.truncate(NEAREST);
    for lot in open.chunks(threads::count()) {
        guess(lot.iter().map(|index| candidates[*index].clone()).collect());
        for index in lot {
            if let Some(found) = tried(candidates, *index, refused, make)? {
                return Ok(vec![found]);
            }
        }
    }
    Ok(Vec::new())
}

/// The plans that are faster than those that are `lowered` and fit though their estimates do not: where programs of
/// their kin, or if there are none of the others, took less than was estimated by as much as they lack; and where
/// they would be much faster and no program of their mesh is known.
///
/// # Errors
/// As those of [`nearest`].
pub(in crate::search) fn faster(
    candidates: &[Candidate],
    lowered: &[(usize, Plan)],
    refused: &mut Refused,
    space: &Space<'_, '_>,
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<Vec<(usize, Plan)>, PlanError> {
    if space.prepared.graph.node_count() > NODES {
        return Ok(Vec::new());
    }
    let of_lowered = lowered.iter().map(|(index, plan)| (*index, plan.prediction));
    let ratios: Vec<_> = of_lowered
        .chain(refused.iter().copied())
        .map(|(index, exact)| {
            let estimate = candidates[index].prediction.filled().max(f64::MIN_POSITIVE);
            (kin(&candidates[index]), exact.filled() / estimate)
        })
        .collect();
    let ratio = |candidate: &Candidate| {
        let most = |all: &mut dyn Iterator<Item = f64>| all.reduce(f64::max);
        let of_kin = most(&mut ratios.iter().filter(|of| of.0 == kin(candidate)).map(|of| of.1));
        of_kin.or_else(|| most(&mut ratios.iter().map(|of| of.1))).unwrap_or(1.0)
    };
    let mut step = lowered.iter().map(|(_, plan)| plan.prediction.step.0).fold(f64::INFINITY, f64::min);
    let mut found: Vec<(usize, Plan)> = Vec::new();
    let known: Vec<usize> = refused.iter().map(|of| of.0).chain(lowered.iter().map(|of| of.0)).collect();
    let best = step;
    let may_fit = |candidate: &Candidate| {
        let estimate = &candidate.prediction;
        let is_new = || known.iter().all(|index| candidates[*index].degrees != candidate.degrees);
        let is_far = || may_be_smaller(candidate, best) && is_new();
        !estimate.fits() && (estimate.filled() * ratio(candidate) <= 1.0 || is_far())
    };
    let open = candidates.iter().enumerate().filter(|(index, of)| !known.contains(index) && may_fit(of));
    for (index, candidate) in open.take(FASTER) {
        if candidate.prediction.step.0 > GAIN * step {
            break;
        }
        if let Some((index, plan)) = tried(candidates, index, refused, make)? {
            step = step.min(plan.prediction.step.0);
            found.push((index, plan));
        }
    }
    Ok(found)
}

/// Whether a candidate would be so much faster than `step` seconds that it is tried though its estimate does not fit.
pub(in crate::search) fn may_be_smaller(of: &Candidate, step: f64) -> bool {
    let estimate = &of.prediction;
    FAR.iter().any(|(share, room)| estimate.step.0 <= share * step && estimate.filled() <= *room)
}

/// A candidate's plan if it fits by its programs.
pub(in crate::search) fn tried(
    candidates: &[Candidate],
    index: usize,
    refused: &mut Refused,
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<Option<(usize, Plan)>, PlanError> {
    let plan = match make(&candidates[index]) {
        Err(PlanError::Pin { .. }) => return Ok(None),
        made => made?,
    };
    if !plan.prediction.fits() {
        refused.push((index, plan.prediction));
        return Ok(None);
    }
    Ok(Some((index, plan)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::choice::pins::Recompute;
    use shardc_ir::Bytes;
    use shardc_ir::plan::Memory;

    fn memory(bytes: u64) -> Prediction {
        let memory = Memory { parameters: Bytes(bytes), ..Memory::default() };
        Prediction { memory, room: Bytes(100), ..Prediction::default() }
    }

    fn candidate(dp: u64, bytes: u64) -> Candidate {
        Candidate::bare(dp, Recompute::None, memory(bytes))
    }

    /// The leanest are lowered, none that is far too large, until one fits; of those that all are, the leanest.
    #[test]
    fn nothing_is_refused_by_an_estimate_alone() {
        let lowered = |sizes: &[u64], programs: &dyn Fn(u64) -> u64| {
            let candidates: Vec<Candidate> = sizes.iter().map(|bytes| candidate(bytes / 5, *bytes)).collect();
            let seen = std::cell::RefCell::new(Vec::new());
            let make = |of: &Candidate| {
                let estimate = of.prediction.memory.total().0;
                seen.borrow_mut().push(estimate);
                Ok(Plan { prediction: memory(programs(estimate)), ..Plan::default() })
            };
            let mut refused = Vec::new();
            let found = nearest(&candidates, &mut refused, &|_| {}, &make).unwrap();
            (seen.into_inner(), found.into_iter().map(|of| of.0).collect::<Vec<_>>(), refused.len())
        };
        let near = &[160, 140, 120, 130, 125];
        assert_eq!(lowered(near, &|_| 101), (vec![120, 125, 130, 140], vec![], 4));
        let one = |estimate| if estimate == 130 { 90 } else { 110 };
        assert_eq!(lowered(near, &one), (vec![120, 125, 130], vec![3], 2));
        assert_eq!(lowered(&[300, 200, 210], &|_| 90), (vec![200], vec![1], 0));
        assert_eq!(lowered(&[300, 260], &|_| 90), (vec![], vec![], 0));
    }
}
