//! Which of the candidates becomes the plan: those whose estimates are best are lowered, and the programs decide.
//!
//! Lowered are those that come out fastest, and all whose estimates are within [2%](CLOSE) of theirs, three at the
//! most. The prediction of the plan is the simulation and the allocation of its programs. Around that
//!
//! * [`lowering`] lowers plans on several threads before they are asked for;
//! * [`fitted`] decides how much is computed again, [`overstated`] lowers plans whose estimated memory does not fit;
//! * [`astray`] lowers plans of other meshes where the estimates of the first ones were too low;
//! * [`overlap`] tries plans in chunks that overlap, [`casts`] plans that keep the casts of parameters;
//! * [`build`] makes the annotated plan, [`outcome`] and [`undivided`] say what is told of the search.

mod astray;
pub mod build;
pub(in crate::search) mod casts;
pub(in crate::search) mod fitted;
pub(in crate::search) mod lowering;
pub(in crate::search) mod outcome;
pub mod overlap;
mod overstated;
pub mod undivided;

use super::candidate::{Candidate, Kin, is_long, kin, sort};
use super::enumerate::enumerate;
use super::error::PlanError;
use super::measure::CLOSE;
use super::space::Space;
use super::visit::Visited;
use build::Confirm;
use lowering::Lowering;
use outcome::{Told, alternatives, infeasible};
use overlap::Hidden;
use overstated::{Refused, faster, may_be_smaller, nearest};
use shardc_ir::plan::{Prediction, Search};
use shardc_ir::{Family, Plan};
use std::collections::BTreeMap;

/// How many plans whose estimates are [`CLOSE`] are predicted by their programs.
const MOST_CLOSE: usize = 3;
/// How many plans may turn out not to fit before the search gives up.
const MOST_REFUSED: usize = 8;

/// Whether plans differ at the most in over how many ranks parameters are stored and what is computed again: then
/// estimates tell which is faster.
fn is_told_apart(a: &Candidate, b: &Candidate) -> bool {
    let same = |of: &Candidate| {
        let degrees = of.degrees.clone().with(Family::Data, &[]).with(Family::Fsdp, &[]);
        let schedule = of.stages.as_ref().map(|stages| (stages.schedule, stages.per_stage));
        (degrees, of.zero, of.loss_chunks, schedule, of.offload.clone())
    };
    a.degrees != b.degrees && kin(a) == kin(b) && same(a) == same(b)
}

/// How many plans are lowered of which one is long.
const MOST_LONG: usize = 2;

/// Whether a candidate is left out beside those that are known, because of how long programs are.
fn takes_too_long<'a>(candidate: &Candidate, known: impl Iterator<Item = &'a Candidate>, batch: u64) -> bool {
    let schedule = |of: &Candidate| of.stages.as_ref().map(|stages| (stages.schedule, stages.per_stage));
    let own = is_long(candidate, batch);
    let (mut count, mut is_alike) = (0, false);
    for other in known.filter(|other| own || is_long(other, batch)) {
        (count, is_alike) = (count + 1, is_alike || schedule(other) == schedule(candidate));
    }
    is_alike || count >= MOST_LONG
}

/// Whether a candidate's estimate is near that of the first that is lowered.
fn is_close(candidate: &Candidate, first: &Candidate) -> bool {
    candidate.prediction.step.0 <= CLOSE * first.prediction.step.0
}

/// The candidates that will likely be lowered, if all take what is estimated; first that in chunks, which takes the longest
/// to lower.
fn likely(candidates: &[Candidate], space: &Space<'_, '_>) -> Vec<Candidate> {
    let is_open = |index: &usize| {
        let of = &candidates[*index];
        of.prediction.fits() && !candidates.iter().any(|other| other.prediction.fits() && of.is_spare_of(other))
    };
    let mut known: Vec<usize> = (0..candidates.len()).find(is_open).into_iter().collect();
    let Some(first) = known.first().copied() else { return Vec::new() };
    let others = (first + 1..candidates.len()).take_while(|index| is_close(&candidates[*index], &candidates[first]));
    let is_known = |index: &usize| {
        let (own, first) = (&candidates[*index], &candidates[first]);
        is_told_apart(first, own) || takes_too_long(own, std::iter::once(first), space.request.batch)
    };
    known.extend(others.filter(is_open).find(|index| !is_known(index)));
    let in_chunks = overlap::likely(candidates, &known, space);
    in_chunks.into_iter().chain(known.iter().map(|index| candidates[*index].clone())).collect()
}

/// What comes of the meshes that are visited.
pub(super) enum Chosen {
    /// The best plan. Of its search it has the estimate, the counts of plans, and what else there is to say of them.
    Best {
        /// The plan.
        plan: Box<Plan>,
        /// The seconds that are known of its step where others are left out.
        step: f64,
        /// What was left out ([`Told::left_out`]).
        left_out: (u64, u64),
    },
    /// None that promises to be faster than what is known.
    Slower {
        /// The fastest that fits by its estimate.
        fastest: Option<Box<Candidate>>,
        /// How many were predicted.
        candidates: u64,
    },
}

/// The candidates of the meshes that are visited, in the order of their estimates.
pub(super) fn seen(space: &Space<'_, '_>, visited: &mut Visited) -> Result<Vec<Candidate>, PlanError> {
    let mut candidates = enumerate(space, visited)?;
    sort(&mut candidates);
    Ok(candidates)
}

/// The best plan of candidates in that order, of those that may take no more than so many seconds.
pub(super) fn choose(
    space: &Space<'_, '_>,
    confirm: Option<Confirm<'_>>,
    mut candidates: Vec<Candidate>,
    against: f64,
) -> Result<Chosen, PlanError> {
    if against < f64::INFINITY {
        let fastest = candidates.iter().find(|candidate| candidate.prediction.fits()).cloned().map(Box::new);
        let all = candidates.len() as u64;
        candidates.retain(|candidate| candidate.least() <= against);
        // By programs may fit what does not by its estimate.
        if candidates.iter().any(|of| of.prediction.fits() || may_be_smaller(of, against)) {
            match promising(space, confirm, candidates) {
                Err(error) if error.is_refusal() => {}
                chosen => return chosen,
            }
        }
        return Ok(Chosen::Slower { fastest, candidates: all });
    }
    promising(space, confirm, candidates)
}

/// The best plan of candidates in the order of their estimates, all of which are worth to be lowered.
fn promising(
    space: &Space<'_, '_>,
    confirm: Option<Confirm<'_>>,
    candidates: Vec<Candidate>,
) -> Result<Chosen, PlanError> {
    let make = |candidate: &Candidate| casts::as_pinned(candidate, space);
    let lowering = Lowering::new(confirm, &make, space.cluster);
    // What is as fast without chunks is one of the others.
    let first = candidates.iter().find(|candidate| candidate.prediction.fits()).cloned();
    let is_far = |candidate: &Candidate| first.as_ref().is_none_or(|first| !is_close(candidate, first));
    let (for_chunks, candidates): (Vec<_>, Vec<_>) =
        candidates.into_iter().partition(|candidate| candidate.is_for_chunks() && is_far(candidate));
    lowering.guess(likely(&candidates, space));
    chosen(space, (confirm, &lowering), candidates, &for_chunks)
}

/// Of candidates in the order of their estimates, and of those whose layouts are for chunks.
fn chosen(
    space: &Space<'_, '_>,
    (confirm, lowering): (Option<Confirm<'_>>, &Lowering<'_>),
    mut candidates: Vec<Candidate>,
    for_chunks: &[Candidate],
) -> Result<Chosen, PlanError> {
    let mut refused: Refused = Vec::new();
    let mut unmade = None;
    let exact = |candidate: &Candidate| lowering.plan(candidate);
    let fastest =
        |close: &[(usize, Plan)]| close.iter().map(|(_, plan)| plan.prediction.step.0).fold(f64::INFINITY, f64::min);
    // By how much the exact memory of refused plans exceeds the estimate: that of their kin will as well.
    let mut excess: BTreeMap<Kin, f64> = BTreeMap::new();
    // By time; then, if what was refused made the rest look too large, the leanest all the same.
    let mut lean: Vec<usize> = (0..candidates.len()).collect();
    lean.sort_by(|a, b| candidates[*a].prediction.filled().total_cmp(&candidates[*b].prediction.filled()));
    let rounds =
        (0..candidates.len()).map(|index| (index, false)).chain(lean.into_iter().take(2).map(|index| (index, true)));
    let (mut close, mut hidden): (Vec<(usize, Plan)>, _) = (Vec::new(), Hidden::default());
    for (index, is_last_resort) in rounds {
        let candidate = &candidates[index];
        if let Some((first, _)) = close.first()
            && (!is_close(candidate, &candidates[*first]) || close.len() == MOST_CLOSE)
        {
            break;
        }
        let factor = excess.get(&kin(candidate)).copied().unwrap_or(1.0);
        let was_refused = |index: usize| refused.iter().any(|(other, _)| *other == index);
        let is_too_large = |of: &Candidate| of.prediction.filled() * factor > 1.0;
        // What computes more again than it must by the estimate is for where that turns out too large.
        let is_spare = || {
            let mut others = candidates.iter().enumerate().filter(|(_, other)| candidate.is_spare_of(other));
            others.any(|(index, other)| !was_refused(index) && !is_too_large(other))
        };
        let is_enough = || {
            let known = close.iter().map(|(known, _)| &candidates[*known]);
            takes_too_long(candidate, known, space.request.batch)
        };
        let is_known = || close.iter().any(|(known, _)| is_told_apart(&candidates[*known], candidate));
        let is_left_out = || is_too_large(candidate) || refused.len() >= MOST_REFUSED || is_spare() || is_known();
        let is_open = candidate.prediction.fits() && !was_refused(index) && !is_enough();
        if !is_open || (!is_last_resort && is_left_out()) {
            continue;
        }
        let plan = match exact(candidate) {
            // What is pinned suits other candidates.
            Err(error @ PlanError::Pin { .. }) => {
                unmade = Some(error);
                continue;
            }
            made => made?,
        };
        if confirm.is_none() {
            close.push((index, plan));
            break;
        }
        if !plan.prediction.fits() {
            refused.push((index, plan.prediction));
            let more = plan.prediction.filled() / candidate.prediction.filled().max(f64::MIN_POSITIVE);
            excess.insert(kin(candidate), factor.max(more));
            continue;
        }
        // Of pipelines one is tried in chunks, when all are known.
        if candidate.stages.is_some() {
            close.push((index, plan));
            continue;
        }
        let step = fastest(&close).min(plan.prediction.step.0);
        let known = close.iter().map(|(known, _)| &candidates[*known]);
        let (chunks, plan) = overlap::in_chunks(candidate, plan, space, (step, known, &mut hidden), &exact)?;
        candidates[index].overlap_chunks = chunks;
        close.push((index, plan));
    }
    if confirm.is_some() {
        if close.is_empty() {
            close = nearest(&candidates, &mut refused, &|likely| lowering.guess(likely), &exact)?;
        }
        if close.is_empty() {
            fitted::again(&mut candidates, (&mut close, &mut refused), space, f64::INFINITY, &exact)?;
        }
        overlap::of_pipelines(&mut candidates, &mut close, space, &mut hidden, &exact)?;
        let known = |close: &[(usize, Plan)], refused: &Refused| -> Vec<usize> {
            close.iter().map(|of| of.0).chain(refused.iter().map(|of| of.0)).collect()
        };
        if !close.is_empty() {
            let (known_now, best) = (known(&close, &refused), fastest(&close));
            for (index, plan) in astray::other_meshes(&candidates, &known_now, best, &exact)? {
                let known = close.iter().map(|(known, _)| &candidates[*known]);
                let of = (best, known, &mut hidden);
                let (chunks, plan) = overlap::in_chunks(&candidates[index], plan, space, of, &exact)?;
                candidates[index].overlap_chunks = chunks;
                close.push((index, plan));
            }
            let (known_now, best) = (known(&close, &refused), fastest(&close));
            for (index, chunks, plan) in
                overlap::contenders(&candidates, &known_now, space, (best, &mut hidden), &exact)?
            {
                candidates[index].overlap_chunks = chunks;
                close.push((index, plan));
            }
            let of = (fastest(&close), &mut hidden);
            for (index, overlap_chunks, plan) in overlap::contenders(for_chunks, &[], space, of, &exact)? {
                close.push((candidates.len(), plan));
                candidates.push(Candidate { overlap_chunks, ..for_chunks[index].clone() });
            }
            let found = faster(&candidates, &close, &mut refused, space, &exact)?;
            close.extend(found);
            fitted::again(&mut candidates, (&mut close, &mut refused), space, f64::INFINITY, &exact)?;
        }
    }
    // The first of those that are equal within a thousandth is the simplest.
    let mut lowered: Vec<(usize, Prediction)> = close.iter().map(|(index, plan)| (*index, plan.prediction)).collect();
    let least = fastest(&close);
    let Some((mut index, mut plan)) = close.into_iter().find(|(_, plan)| plan.prediction.step.0 <= 1.001 * least)
    else {
        let unmade = unmade.filter(|_| refused.is_empty());
        return Err(unmade.unwrap_or_else(|| infeasible(&candidates, &refused, space)));
    };
    let found = candidates[index].prediction.step.0;
    let kept = casts::faster((&candidates[index], &plan), space, confirm)?;
    if let Some((candidate, faster)) = kept.best {
        // Others are compared with the plan as it is in the end.
        if candidate != candidates[index] {
            index = candidates.len();
            candidates.push(candidate);
        }
        lowered.retain(|of| of.0 != index);
        lowered.push((index, faster.prediction));
        plan = faster;
    }
    let told = Told { candidates: &candidates, chosen: index, lowered: &lowered, refused: &refused };
    plan.alternatives = alternatives(&told);
    let left_out = told.left_out();
    let Prediction { step: estimate, memory, .. } = candidates[index].prediction;
    let (memory, all) = (memory.total(), (candidates.len() + for_chunks.len()) as u64);
    plan.search =
        Search { estimate, memory, candidates: all, lowered: lowering.count.get() + kept.lowered, ..Search::default() };
    // What chunks hide is not estimated.
    let in_chunks = candidates[index].overlap_chunks > 1;
    if in_chunks {
        plan.search.stopped += "; what chunks hide is neither in the estimate nor in the bound";
    }
    plan.search.stopped += overlap::untried(&candidates[index], space);
    casts::told(&mut plan);
    plan.choice += &space.pins.unnamed();
    let step = if in_chunks { found.min(plan.prediction.step.0) } else { found };
    Ok(Chosen::Best { plan: Box::new(plan), step, left_out })
}
