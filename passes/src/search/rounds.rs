//! The rounds of a search: plans of one stage, and pipelines.
//!
//! The kind that promises more is lowered first. Of the other only those plans are lowered that promise to be faster
//! than what came of it. The two are compared by what their programs take, so a search of more never gives a slower
//! plan; the least that is possible is told of each kind.
//!
//! Pipelines are searched
//!
//! * alone, where a pin asks for stages;
//! * beside plans of one stage, on GPUs of several nodes, where every plan is asked for, and where the ranks do not
//!   divide the batch;
//! * else where no plan of one stage fits, or where much of its step is communication that nothing hides, or products
//!   that several ranks make alike ([`SHOWN`]).
//!
//! Within a node links are fast, and stages gain less than the seconds of planning that they cost. Ranks of one CPU
//! gain nothing by waiting for each other ([`Target::searches`](shardc_ir::Target::searches)).
//!
//! It is known of each mesh what was left out of it. So where programs take longer than was estimated, only those
//! meshes are visited again that may be worth it.

use super::candidate::{Candidate, sort};
use super::choose::build::Confirm;
use super::choose::outcome::{add_runner_up, stopped};
use super::choose::{Chosen, choose, seen};
use super::enumerate;
use super::error::PlanError;
use super::space::{Pipelines, Space};
use super::stages::line::Line;
use super::visit::Visited;
use crate::cost::model_flops;
use shardc_ir::plan::Prediction;
use shardc_ir::{AxisId, Choice, Plan, Seconds};
use std::cell::LazyCell;

/// From which share of a step on, of communication that nothing hides and of what ranks repeat, pipelines are searched
/// within a node as well.
const SHOWN: f64 = 0.125;

/// How many times its room the nearest plan may need, if pipelines are to be lowered whose estimates do not fit.
const LITTLE: f64 = 1.25;

/// What is estimated in a round.
struct Seen {
    candidates: Vec<Candidate>,
    visited: Visited,
}

impl Seen {
    /// Of a space, after some meshes were visited, beside a plan that is known to take so many seconds.
    fn new(space: &Space<'_, '_>, before: &Visited, known: f64) -> Result<Self, PlanError> {
        let mut visited = Visited::new(space.away.room.device).paced(before).against(known);
        let candidates = match seen(space, &mut visited) {
            // What is left out beside a plan that is known is told by its bounds.
            Err(error) if error.is_refusal() && known.is_finite() && visited.meshes() > 0 => Vec::new(),
            candidates => candidates?,
        };
        Ok(Self { candidates, visited })
    }

    /// The least of the seconds that are said of a candidate, of those that fit.
    fn least(&self, of: &dyn Fn(&Candidate) -> f64) -> f64 {
        self.candidates.iter().filter(|of| of.prediction.fits()).map(of).fold(f64::INFINITY, f64::min)
    }

    /// The best plan, beside one that is known to take so many seconds.
    fn chosen(self, space: &Space<'_, '_>, confirm: Option<Confirm<'_>>, known: f64) -> Result<Round, PlanError> {
        let seen = Self { visited: self.visited.against(known), ..self };
        let visited = &seen.visited;
        let chosen = choose(space, confirm, seen.candidates.clone(), visited.against);
        let step = match &chosen {
            Ok(Chosen::Best { step, .. }) => *step,
            // What is known is faster than all that were found.
            Ok(Chosen::Slower { .. }) => visited.against,
            Err(_) => f64::INFINITY,
        };
        if !visited.has_left_out(step) {
            return chosen.map(|chosen| Round { chosen, visited: seen.visited });
        }
        // Plans that were thought to fit did not: what was left out because of them may be the best after all.
        let before = seen.candidates.clone();
        let Self { candidates, visited } = seen.wider(space, Some(step), known)?;
        let chosen = if candidates == before { chosen? } else { choose(space, confirm, candidates, visited.against)? };
        Ok(Round { chosen, visited })
    }

    /// The same beside a plan that is known to take so many seconds, where plans are looked for that take up to `limit`
    /// seconds: what was left out for less is visited anew.
    fn wider(self, space: &Space<'_, '_>, limit: Option<f64>, known: f64) -> Result<Self, PlanError> {
        let Self { mut candidates, visited } = self;
        let (mut visited, meshes) = visited.against(known).reopened(limit);
        if meshes.is_empty() {
            return Ok(Self { candidates, visited });
        }
        let mut again = visited.fork();
        match seen(&Space { meshes: Some(&meshes), ..*space }, &mut again) {
            // What was found before is all there is.
            Err(error) if error.is_refusal() && !candidates.is_empty() => {}
            found => {
                let found = found?;
                candidates.retain(|candidate| !meshes.contains(&candidate.degrees));
                candidates.extend(found);
            }
        }
        visited.join(again);
        sort(&mut candidates);
        Ok(Self { candidates, visited })
    }
}

/// What came of a round.
struct Round {
    chosen: Chosen,
    visited: Visited,
}

impl Round {
    /// Of a space, beside a plan that is known to take so many seconds.
    fn new(space: &Space<'_, '_>, confirm: Option<Confirm<'_>>, known: f64) -> Result<Self, PlanError> {
        Seen::new(space, &Visited::new(space.away.room.device), known)?.chosen(space, confirm, known)
    }

    /// No plan of its meshes that fits is estimated to take less; the best may be one whose estimate does not fit.
    /// A bound of `enough` seconds need not be any tighter.
    fn bound(&self, space: &Space<'_, '_>, enough: f64) -> Result<Option<f64>, PlanError> {
        let estimate = match &self.chosen {
            Chosen::Best { plan, .. } => plan.search.estimate.0,
            Chosen::Slower { .. } => f64::INFINITY,
        };
        Ok(self.visited.bound(space, enough)?.map(|bound| bound.min(estimate)))
    }

    /// Whether much of its best plan's step is communication that nothing hides, or products of which others make the
    /// same: stages have less of either.
    fn shows(&self) -> bool {
        match &self.chosen {
            Chosen::Best { plan, .. } => {
                let Prediction { step, exposed_communication, matmul, .. } = plan.prediction;
                exposed_communication.0 + repeated(plan) * matmul.0 > SHOWN * step.0
            }
            Chosen::Slower { .. } => false,
        }
    }

    /// The seconds of its best plan.
    fn step(&self) -> f64 {
        match &self.chosen {
            Chosen::Best { plan, .. } => plan.prediction.step.0,
            Chosen::Slower { .. } => f64::INFINITY,
        }
    }
}

/// The share of the products of a plan of one stage that would not be made if no rank made what another makes.
fn repeated(Plan { graph, mesh, strategies, .. }: &Plan) -> f64 {
    let (mut all, mut made) = (0.0, 0.0);
    for (id, node) in graph.nodes() {
        let is_repeated = |axis: &AxisId| !mesh.is_time(*axis) && strategies[id].choice(*axis) == Choice::Replicate;
        let flops = model_flops(&node.op, &graph.operand_types(id), &graph.result_types(id)).0;
        all += flops;
        made += flops * mesh.extent(mesh.ids().filter(is_repeated)) as f64;
    }
    if made > 0.0 { 1.0 - all / made } else { 0.0 }
}

/// The best plan of a space: of one stage, and of several where those are searched.
///
/// # Errors
/// Why there is none.
pub(super) fn best(space: &Space<'_, '_>, confirm: Option<Confirm<'_>>) -> Result<Plan, PlanError> {
    let whole = Space { line: None, ..*space };
    let none = &Visited::new(space.away.room.device);
    let of_whole = match space.pipelines {
        Pipelines::Alone => None,
        _ => Some(Seen::new(&whole, none, f64::INFINITY)),
    };
    let line = LazyCell::new(|| Line::new(space.prepared));
    let staged = || Space { line: Some(&line), ..*space };
    let (of_whole, of_staged) = match (space.pipelines, of_whole) {
        (Pipelines::Too, Some(Ok(seen))) => both((&whole, seen), &staged(), confirm),
        (pipelines, of_whole) => {
            let of_whole = of_whole.map(|seen| seen?.chosen(&whole, confirm, f64::INFINITY));
            // Beside which step pipelines are searched, if they are.
            let known = match (pipelines, &of_whole) {
                (Pipelines::Never, _) | (_, Some(Err(PlanError::Bug(_)))) => None,
                (Pipelines::Fallback, Some(Ok(round))) => round.shows().then(|| round.step()),
                (Pipelines::Fallback, of_whole) => of_whole.as_ref().is_some_and(is_short).then_some(f64::INFINITY),
                (Pipelines::Too | Pipelines::Alone, _) => Some(f64::INFINITY),
            };
            (of_whole, known.map(|known| Round::new(&staged(), confirm, known)))
        }
    };
    match (of_whole, of_staged) {
        (_, Some(Err(error @ PlanError::Bug(_)))) => Err(error),
        (Some(Ok(found)), None | Some(Err(_))) => told(found, &whole, None),
        (None | Some(Err(_)), Some(Ok(found))) => told(found, &staged(), None),
        (Some(Ok(one)), Some(Ok(other))) if one.step() <= other.step() => told(one, &whole, Some((other, &staged()))),
        (Some(Ok(one)), Some(Ok(other))) => told(other, &staged(), Some((one, &whole))),
        (Some(Err(one)), Some(Err(other))) => unfit(&staged(), confirm, nearer(one, other)),
        (None, Some(Err(error))) => unfit(&staged(), confirm, error),
        (Some(Err(error)), None) => Err(error),
        (None, None) => Err(PlanError::Bug("a space without plans of one stage and without pipelines".to_string())),
    }
}

/// The best of pipelines that do not fit by their estimates: the programs of some may, where nothing else does.
///
/// # Errors
/// Why nothing else does, where that lacks much, or these do not fit either.
fn unfit(space: &Space<'_, '_>, confirm: Option<Confirm<'_>>, error: PlanError) -> Result<Plan, PlanError> {
    let lacks_little = error.filled().is_some_and(|filled| filled <= LITTLE);
    let space = Space { with_unfit: true, ..*space };
    match lacks_little.then(|| Round::new(&space, confirm, f64::INFINITY)) {
        Some(Ok(found)) => told(found, &space, None),
        Some(Err(error @ PlanError::Bug(_))) => Err(error),
        _ => Err(error),
    }
}

/// The best pipeline of a space, if it is faster than what is known to take so many seconds.
///
/// # Errors
/// Why there is none.
pub(super) fn below(space: &Space<'_, '_>, confirm: Confirm<'_>, known: f64) -> Result<Option<Plan>, PlanError> {
    if space.pipelines == Pipelines::Never {
        return Ok(None);
    }
    let line = Line::new(space.prepared);
    let space = &Space { line: Some(&line), is_bounded: true, ..*space };
    let round = Round::new(space, Some(confirm), known)?;
    match &round.chosen {
        Chosen::Best { .. } => told(round, space, None).map(Some),
        Chosen::Slower { .. } => Ok(None),
    }
}

/// Whether a plan of a space is estimated to take less than so many seconds and to fit.
///
/// # Errors
/// A bug.
pub(super) fn any_below(space: &Space<'_, '_>, seconds: f64) -> Result<bool, PlanError> {
    let is_below = |space: &Space<'_, '_>| match enumerate::any_below(space, space.away.room.device, seconds) {
        Err(error) if error.is_refusal() => Ok(false),
        of_space => of_space,
    };
    if space.pipelines != Pipelines::Alone && is_below(&Space { line: None, ..*space })? {
        return Ok(true);
    }
    Ok(space.pipelines != Pipelines::Never && is_below(&Space { line: Some(&Line::new(space.prepared)), ..*space })?)
}

/// What came of a round, if there was one.
type Came = Option<Result<Round, PlanError>>;

/// What comes of the rounds of plans of one stage and of pipelines: of the kind first that promises more, by whose programs
/// the other is measured then. What chunks hide of plans of one stage is not estimated, so these promise all that they may.
fn both((whole, seen): (&Space<'_, '_>, Seen), staged: &Space<'_, '_>, confirm: Option<Confirm<'_>>) -> (Came, Came) {
    let [promised, estimated] = [Candidate::least, |of: &Candidate| of.prediction.step.0].map(|of| seen.least(&of));
    let before = &seen.visited.fork();
    let of_staged = Seen::new(staged, before, estimated);
    let is_more = |of_staged: &Seen| of_staged.least(&Candidate::least) < promised;
    let known = |round: &Result<Round, PlanError>| round.as_ref().map_or(f64::INFINITY, Round::step);
    match of_staged {
        Ok(of_staged) if confirm.is_some() && is_more(&of_staged) => {
            let of_staged = of_staged.chosen(staged, confirm, f64::INFINITY);
            let of_whole = seen.chosen(whole, confirm, known(&of_staged));
            (Some(of_whole), Some(of_staged))
        }
        of_staged => {
            let of_whole = seen.chosen(whole, confirm, f64::INFINITY);
            if let Err(PlanError::Bug(_)) = &of_whole {
                return (Some(of_whole), None);
            }
            let step = known(&of_whole);
            // What was left out beside an estimate may be worth something beside programs that take longer.
            let of_staged = match of_staged {
                Ok(of_staged) if step > estimated => of_staged.wider(staged, None, step),
                Err(_) if step > estimated => Seen::new(staged, before, step),
                of_staged => of_staged,
            };
            (Some(of_whole), Some(of_staged.and_then(|of_staged| of_staged.chosen(staged, confirm, step))))
        }
    }
}

/// Of why there is no plan of one stage and no pipeline, what lacks less; what is wrong with the request, where it is not
/// memory that is short.
fn nearer(one: PlanError, other: PlanError) -> PlanError {
    match (one.filled(), other.filled(), &one) {
        (Some(own), Some(others), _) if others < own => other,
        (None, Some(_), PlanError::Batch { .. } | PlanError::Mixed { .. }) => other,
        _ => one,
    }
}

/// Whether nothing was found that fits, or that divides the batch.
fn is_short(round: &Result<Round, PlanError>) -> bool {
    round.as_ref().is_err_and(PlanError::is_refusal)
}

/// The plan of a round, with what is told of how it was found, and of the round that it is better than.
fn told(found: Round, space: &Space<'_, '_>, other: Option<(Round, &Space<'_, '_>)>) -> Result<Plan, PlanError> {
    let [own, others] = match space.is_bounded {
        false => [None; 2],
        true => {
            // Of the others it matters whether they may be faster.
            let of_others = |(round, space): &(Round, &Space<'_, '_>)| round.bound(space, found.step());
            [found.bound(space, f64::INFINITY)?, other.as_ref().map(of_others).transpose()?.flatten()]
        }
    };
    let Chosen::Best { plan, left_out, .. } = found.chosen else {
        return Err(PlanError::Bug("a round without a plan".to_string()));
    };
    let mut plan = *plan;
    if let Some(own) = own {
        let search = &mut plan.search;
        let estimate = search.estimate.0;
        (search.bound, search.gap) = (Seconds(own), estimate / own - 1.0);
        search.bound_of_others = others.filter(|least| least.is_finite()).map(Seconds);
        let is_proven = estimate / own.min(others.unwrap_or(own)) - 1.0 <= 1e-9;
        search.stopped.insert_str(0, &stopped(space, is_proven, left_out));
        let visited = || std::iter::once(&found.visited).chain(other.iter().map(|(round, _)| &round.visited));
        search.meshes = visited().map(Visited::meshes).sum();
        search.pruned = visited().map(Visited::pruned).sum();
    }
    if let Some((other, _)) = other {
        match other.chosen {
            Chosen::Best { plan: other, .. } => {
                plan.search.candidates += other.search.candidates;
                plan.search.lowered += other.search.lowered;
                add_runner_up(&mut plan, other.choice.clone(), &other.prediction, "");
            }
            Chosen::Slower { fastest, candidates } => {
                plan.search.candidates += candidates;
                if let Some(of) = fastest {
                    add_runner_up(&mut plan, of.choice(), &of.prediction, "estimated: ");
                }
            }
        }
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::Bytes;

    /// Where much of the products is made by several ranks alike, stages are looked for as where links are slow.
    #[test]
    fn what_ranks_repeat_shows() {
        let text = "graph @two {
  mesh time mb=2,tp=2
  %0: f32[8@mb,4] = input \"x\" by i=mb
  %1: f32[4,4@tp] = parameter \"a\" by j=tp
  %2: f32[4,4] = parameter \"b\"
  %3: f32[8@mb,4@tp] = matmul %0, %1 by m=mb n=tp
  %4: f32[8@mb,4] = matmul %0, %2 by m=mb
  return y %3
  return z %4
}";
        let plan: Plan = text.parse().unwrap();
        assert!((repeated(&plan) - 1.0 / 3.0).abs() < 1e-9);
        let shows = |matmul: f64| {
            let prediction = Prediction { step: Seconds(1.0), matmul: Seconds(matmul), ..Prediction::default() };
            let plan = Box::new(Plan { prediction, ..plan.clone() });
            let chosen = Chosen::Best { plan, step: 1.0, left_out: (0, 0) };
            Round { chosen, visited: Visited::new(Bytes(1)) }.shows()
        };
        assert_eq!([0.3, 0.5].map(shows), [false, true]);
    }
}
