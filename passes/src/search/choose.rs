//! Which of the candidates becomes the plan: those with the best estimates are lowered, and their programs decide.
//!
//! The candidate with the fastest estimate is lowered, and those whose estimates are within [2%](CLOSE) of it, three in
//! all. The plan's prediction is the simulation and the allocation of its programs. Around that
//!
//! * [`lowering`] lowers plans on several threads before they are asked for;
//! * [`fitted`] adjusts how much is recomputed, [`overstated`] lowers plans whose estimated memory does not fit;
//! * [`recut`] moves the cuts of the fastest pipelines;
//! * [`astray`] lowers plans of other meshes where the estimates of the first ones were too low, [`uncut`] the fastest
//!   with its head whole;
//! * [`overlap`] tries plans in chunks that overlap, [`casts`] plans that keep the casts of parameters;
//! * [`build`] makes the annotated plan, [`outcome`] and [`undivided`] what is reported of the search.

mod astray;
pub mod build;
pub(in crate::search) mod casts;
pub(in crate::search) mod fitted;
pub(in crate::search) mod lowering;
pub(in crate::search) mod outcome;
pub mod overlap;
mod overstated;
mod recut;
mod uncut;
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
use overstated::{Refused, faster, may_be_smaller, nearest, tried};
use shardc_ir::plan::Search;
use shardc_ir::{Family, Plan};
use std::collections::BTreeMap;

/// The most plans with [`CLOSE`] estimates that are lowered.
const MOST_CLOSE: usize = 3;
/// How many lowered plans may turn out not to fit before only the leanest are still tried.
const MOST_REFUSED: usize = 8;

/// Whether two plans differ only in how many ranks store the parameters and in what is recomputed: then their estimates
/// tell which is faster.
fn is_told_apart(a: &Candidate, b: &Candidate) -> bool {
    let same = |of: &Candidate| {
        let degrees = of.degrees.clone().with(Family::Data, &[]).with(Family::Fsdp, &[]);
        let schedule = of.stages.as_ref().map(|stages| (stages.schedule, stages.per_stage));
        (degrees, of.zero, of.loss_chunks, schedule, of.offload.clone())
    };
    a.degrees != b.degrees && kin(a) == kin(b) && same(a) == same(b)
}

/// The most plans that are lowered if the programs of one of them are [long](is_long).
const MOST_LONG: usize = 2;

/// Whether a candidate is not lowered beside those that are `known` because [long](is_long) programs take too long: one of
/// the same schedule is known, or as many as may be.
fn takes_too_long<'a>(candidate: &Candidate, known: impl Iterator<Item = &'a Candidate>, batch: u64) -> bool {
    let schedule = |of: &Candidate| of.stages.as_ref().map(|stages| (stages.schedule, stages.per_stage));
    let own = is_long(candidate, batch);
    let (mut count, mut is_alike) = (0, false);
    for other in known.filter(|other| own || is_long(other, batch)) {
        (count, is_alike) = (count + 1, is_alike || schedule(other) == schedule(candidate));
    }
    is_alike || count >= MOST_LONG
}

/// Whether a candidate's estimate is close to that of the first that was lowered.
fn is_close(candidate: &Candidate, first: &Candidate) -> bool {
    candidate.prediction.step.0 <= CLOSE * first.prediction.step.0
}

/// The candidates that will be lowered if estimates are right. First the one in chunks, which takes the longest to lower.
fn likely(candidates: &[Candidate], space: &Space<'_, '_>) -> Vec<Candidate> {
    let is_open = |index: &usize| {
        let of = &candidates[*index];
        of.prediction.fits() && !candidates.iter().any(|other| other.prediction.fits() && of.is_spare_of(other))
    };
    let mut known: Vec<usize> = (0..candidates.len()).find(is_open).into_iter().collect();
    let Some(first) = known.first().copied() else { return Vec::new() };
    let others = (first + 1..candidates.len()).take_while(|index| is_close(&candidates[*index], &candidates[first]));
    for index in others.filter(is_open) {
        let (own, before) = (&candidates[index], || known.iter().map(|known| &candidates[*known]));
        let is_told = before().any(|before| is_told_apart(before, own));
        if !is_told && !takes_too_long(own, before(), space.request.batch) {
            known.push(index);
        }
        if known.len() == MOST_CLOSE {
            break;
        }
    }
    let in_chunks = overlap::likely(candidates, &known, space);
    in_chunks.into_iter().chain(known.iter().map(|index| candidates[*index].clone())).collect()
}

/// The fastest of lowered plans.
fn fastest(lowered: &[(usize, Plan)]) -> Option<&(usize, Plan)> {
    lowered.iter().min_by(|a, b| a.1.prediction.step.0.total_cmp(&b.1.prediction.step.0))
}

/// What comes of the meshes that are visited.
pub(super) enum Chosen {
    /// The best plan. Its record of the search has the estimate and the counts of plans; the caller adds the bounds.
    Best {
        /// The plan.
        plan: Box<Plan>,
        /// The seconds of its step that other candidates are compared with.
        step: f64,
        /// What was left out ([`Told::left_out`]).
        left_out: (u64, u64),
    },
    /// No plan promises to be faster than the one that is known.
    Slower {
        /// The fastest that fits by its estimate.
        fastest: Option<Box<Candidate>>,
        /// How many candidates there are.
        candidates: u64,
    },
}

/// The candidates of all meshes that are visited, in the order of their estimates.
pub(super) fn seen(space: &Space<'_, '_>, visited: &mut Visited) -> Result<Vec<Candidate>, PlanError> {
    let mut candidates = enumerate(space, visited)?;
    sort(&mut candidates);
    Ok(candidates)
}

/// The best plan of candidates in the order of their estimates, among those that may take at most `against` seconds.
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
        // A plan may fit by its programs that does not by its estimate.
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

/// The best plan of candidates in the order of their estimates, any of which may be lowered.
fn promising(
    space: &Space<'_, '_>,
    confirm: Option<Confirm<'_>>,
    candidates: Vec<Candidate>,
) -> Result<Chosen, PlanError> {
    let make = |candidate: &Candidate| casts::as_pinned(candidate, space);
    let lowering = Lowering::new(confirm, &make, space.cluster);
    // Candidates for chunks that are as fast as others without chunks compete with those.
    let first = candidates.iter().find(|candidate| candidate.prediction.fits()).cloned();
    let is_far = |candidate: &Candidate| first.as_ref().is_none_or(|first| !is_close(candidate, first));
    let (for_chunks, candidates): (Vec<_>, Vec<_>) =
        candidates.into_iter().partition(|candidate| candidate.is_for_chunks() && is_far(candidate));
    lowering.guess(likely(&candidates, space));
    let mut contest = Contest {
        space,
        confirm,
        lowering: &lowering,
        for_chunks: &for_chunks,
        candidates,
        fitting: Vec::new(),
        refused: Vec::new(),
        excess: BTreeMap::new(),
        hidden: Hidden::default(),
        unsuited: None,
    };
    contest.lower_fastest()?;
    if confirm.is_some() {
        contest.look_further()?;
    }
    contest.conclude()
}

/// What is known of the candidates while they are lowered one after the other. Lowered plans and their predictions go
/// with the index of their candidate.
struct Contest<'a> {
    space: &'a Space<'a, 'a>,
    /// Without it estimates decide, and the first plan that can be made is the best.
    confirm: Option<Confirm<'a>>,
    lowering: &'a Lowering<'a>,
    /// Candidates whose layouts are for chunks: they are lowered only in chunks.
    for_chunks: &'a [Candidate],
    /// In the order of their estimates; behind those, the ones that were found on the way.
    candidates: Vec<Candidate>,
    /// The lowered plans that fit, in the order in which they were lowered.
    fitting: Vec<(usize, Plan)>,
    /// The lowered plans that do not.
    refused: Refused,
    /// The largest ratio of a refused plan's memory to its estimate, which is expected of all its kin.
    excess: BTreeMap<Kin, f64>,
    hidden: Hidden,
    /// A pin that does not suit a candidate though it may suit others.
    unsuited: Option<PlanError>,
}

impl Contest<'_> {
    /// The seconds of the fastest lowered plan that fits.
    fn fastest(&self) -> f64 {
        fastest(&self.fitting).map_or(f64::INFINITY, |(_, plan)| plan.prediction.step.0)
    }

    /// The candidates that were lowered.
    fn known(&self) -> Vec<usize> {
        self.fitting.iter().map(|of| of.0).chain(self.refused.iter().map(|of| of.0)).collect()
    }

    /// Lowers candidates in the order of their estimates: up to the first that fits, and those that are close to it. In the
    /// end the two leanest are tried even if refused plans made them look too large.
    fn lower_fastest(&mut self) -> Result<(), PlanError> {
        let filled = |index: &usize| self.candidates[*index].prediction.filled();
        let mut leanest: Vec<usize> = (0..self.candidates.len()).collect();
        leanest.sort_by(|a, b| filled(a).total_cmp(&filled(b)));
        leanest.truncate(2);
        let by_time = (0..self.candidates.len()).map(|index| (index, false));
        for (index, is_last_resort) in by_time.chain(leanest.into_iter().map(|index| (index, true))) {
            if self.is_settled(index) {
                break;
            }
            if self.may_win(index) && (is_last_resort || self.is_worthwhile(index)) {
                self.lower(index)?;
            }
        }
        Ok(())
    }

    /// Whether enough plans are lowered to leave out a candidate and all behind it.
    fn is_settled(&self, index: usize) -> bool {
        self.fitting.first().is_some_and(|(first, _)| {
            let is_close = is_close(&self.candidates[index], &self.candidates[*first]);
            self.confirm.is_none() || !is_close || self.fitting.len() == MOST_CLOSE
        })
    }

    fn was_refused(&self, index: usize) -> bool {
        self.refused.iter().any(|(other, _)| *other == index)
    }

    /// Whether a candidate would not fit if its programs exceed its estimate as those of its kin did.
    fn is_too_large(&self, candidate: &Candidate) -> bool {
        candidate.prediction.filled() * self.excess.get(&kin(candidate)).copied().unwrap_or(1.0) > 1.0
    }

    /// Whether a candidate may become the plan that is not lowered yet, and lowering it does not take too long.
    fn may_win(&self, index: usize) -> bool {
        let (candidate, known) = (&self.candidates[index], self.fitting.iter().map(|of| &self.candidates[of.0]));
        candidate.prediction.fits()
            && !self.known().contains(&index)
            && !takes_too_long(candidate, known, self.space.request.batch)
    }

    /// Whether a candidate likely fits, and no other one makes it superfluous.
    fn is_worthwhile(&self, index: usize) -> bool {
        let candidate = &self.candidates[index];
        // One that recomputes more than it must by its estimate is for where the one that recomputes just enough is too large.
        let is_spare = || {
            let mut others = self.candidates.iter().enumerate().filter(|(_, other)| candidate.is_spare_of(other));
            others.any(|(index, other)| !self.was_refused(index) && !self.is_too_large(other))
        };
        let is_told = || self.fitting.iter().any(|(known, _)| is_told_apart(&self.candidates[*known], candidate));
        !self.is_too_large(candidate) && self.refused.len() < MOST_REFUSED && !is_spare() && !is_told()
    }

    /// Lowers a candidate; if it fits and has no stages, it is tried in chunks as well.
    fn lower(&mut self, index: usize) -> Result<(), PlanError> {
        let candidate = &self.candidates[index];
        let plan = match self.lowering.plan(candidate) {
            Err(error @ PlanError::Pin { .. }) => {
                self.unsuited = Some(error);
                return Ok(());
            }
            made => made?,
        };
        if self.confirm.is_some() && !plan.prediction.fits() {
            let more = plan.prediction.filled() / candidate.prediction.filled().max(f64::MIN_POSITIVE);
            let excess = self.excess.entry(kin(candidate)).or_insert(1.0);
            *excess = excess.max(more);
            self.refused.push((index, plan.prediction));
            return Ok(());
        }
        // Of pipelines one is tried in chunks, when all are known.
        if self.confirm.is_none() || candidate.stages.is_some() {
            self.fitting.push((index, plan));
            return Ok(());
        }
        let best = self.fastest().min(plan.prediction.step.0);
        self.add(index, plan, best)
    }

    /// Adds a plan that fits; if it may become faster than `best` seconds in chunks, the better of the two.
    fn add(&mut self, index: usize, plan: Plan, best: f64) -> Result<(), PlanError> {
        let known = self.fitting.iter().map(|(known, _)| &self.candidates[*known]);
        let of = (best, known, &mut self.hidden);
        let make = |of: &Candidate| self.lowering.plan(of);
        let (chunks, plan) = overlap::in_chunks(&self.candidates[index], plan, self.space, of, &make)?;
        self.candidates[index].overlap_chunks = chunks;
        self.fitting.push((index, plan));
        Ok(())
    }

    /// Lowers plans that may fit or be faster by their programs though not by their estimates.
    fn look_further(&mut self) -> Result<(), PlanError> {
        let (space, lowering) = (self.space, self.lowering);
        let make = |of: &Candidate| lowering.plan(of);
        if self.fitting.is_empty() {
            self.fitting = nearest(&self.candidates, &mut self.refused, &|likely| lowering.guess(likely), &make)?;
        }
        if self.fitting.is_empty() {
            self.fit_again()?;
        }
        overlap::of_pipelines(&mut self.candidates, &mut self.fitting, space, &mut self.hidden, &make)?;
        if self.fitting.is_empty() {
            return Ok(());
        }
        let best = self.fastest();
        for (index, plan) in astray::other_meshes(&self.candidates, &self.known(), best, &make)? {
            self.add(index, plan, best)?;
        }
        self.try_chunks()?;
        let found = faster(&self.candidates, &self.fitting, &mut self.refused, space, &make)?;
        self.fitting.extend(found);
        self.fit_again()?;
        recut::fastest(&mut self.candidates, (&mut self.fitting, &mut self.refused), space, &make)?;
        self.leave_head_whole()
    }

    /// Lowers the fastest plan with its head whole, where that may take less.
    fn leave_head_whole(&mut self) -> Result<(), PlanError> {
        let (space, lowering) = (self.space, self.lowering);
        let make = |of: &Candidate| lowering.plan(of);
        let Some((index, plan)) = fastest(&self.fitting) else { return Ok(()) };
        let best = plan.prediction.step.0;
        let Some(whole) = uncut::whole(&self.candidates[*index], best, space)? else { return Ok(()) };
        self.candidates.push(whole);
        let index = self.candidates.len() - 1;
        match tried(&self.candidates, index, &mut self.refused, &make)? {
            Some((index, plan)) if self.candidates[index].stages.is_none() => self.add(index, plan, best),
            found => {
                self.fitting.extend(found);
                Ok(())
            }
        }
    }

    /// Adjusts how much is recomputed to the memory that programs were found to take.
    fn fit_again(&mut self) -> Result<(), PlanError> {
        let make = |of: &Candidate| self.lowering.plan(of);
        let lowered = (&mut self.fitting, &mut self.refused);
        fitted::again(&mut self.candidates, lowered, self.space, f64::INFINITY, &make)
    }

    /// Lowers candidates in chunks that are among the fastest only so.
    fn try_chunks(&mut self) -> Result<(), PlanError> {
        let (space, lowering) = (self.space, self.lowering);
        let make = |of: &Candidate| lowering.plan(of);
        let (known, best) = (self.known(), self.fastest());
        let found = overlap::contenders(&self.candidates, &known, space, (best, &mut self.hidden), &make)?;
        for (index, chunks, plan) in found {
            self.candidates[index].overlap_chunks = chunks;
            self.fitting.push((index, plan));
        }
        let best = self.fastest();
        let found = overlap::contenders(self.for_chunks, &[], space, (best, &mut self.hidden), &make)?;
        for (index, overlap_chunks, plan) in found {
            self.fitting.push((self.candidates.len(), plan));
            self.candidates.push(Candidate { overlap_chunks, ..self.for_chunks[index].clone() });
        }
        Ok(())
    }

    /// The best plan, with the casts of its parameters kept if that is faster, and what the search reports of it.
    fn conclude(mut self) -> Result<Chosen, PlanError> {
        let mut lowered: Vec<_> = self.fitting.iter().map(|(index, plan)| (*index, plan.prediction)).collect();
        // The first of those that are equal within a thousandth is the simplest.
        let least = self.fastest();
        let best = self.fitting.iter().position(|(_, plan)| plan.prediction.step.0 <= 1.001 * least);
        let Some((mut chosen, mut plan)) = best.map(|best| self.fitting.swap_remove(best)) else {
            let unsuited = self.unsuited.filter(|_| self.refused.is_empty());
            return Err(unsuited.unwrap_or_else(|| infeasible(&self.candidates, &self.refused, self.space)));
        };
        let found = self.candidates[chosen].prediction.step.0;
        let kept = casts::faster((&self.candidates[chosen], &plan), self.space, self.confirm)?;
        if let Some((candidate, faster)) = kept.best {
            // Others are compared with the plan as it is in the end.
            if candidate != self.candidates[chosen] {
                chosen = self.candidates.len();
                self.candidates.push(candidate);
            }
            lowered.retain(|of| of.0 != chosen);
            lowered.push((chosen, faster.prediction));
            plan = faster;
        }
        let told = Told { candidates: &self.candidates, chosen, lowered: &lowered, refused: &self.refused };
        plan.alternatives = alternatives(&told);
        let left_out = told.left_out();
        let winner = &self.candidates[chosen];
        plan.search = Search {
            estimate: winner.prediction.step,
            memory: winner.prediction.memory.total(),
            candidates: (self.candidates.len() + self.for_chunks.len()) as u64,
            lowered: self.lowering.count.get() + kept.lowered,
            ..Search::default()
        };
        // What chunks hide is not estimated.
        let in_chunks = winner.overlap_chunks > 1;
        if in_chunks {
            plan.search.stopped += "; what chunks hide is neither in the estimate nor in the bound";
        }
        plan.search.stopped += overlap::untried(winner, self.space);
        casts::told(&mut plan);
        plan.choice += &self.space.pins.unnamed();
        let step = if in_chunks { found.min(plan.prediction.step.0) } else { found };
        Ok(Chosen::Best { plan: Box::new(plan), step, left_out })
    }
}
