//! What the search has seen of the meshes: the best plan so far, and the bounds that tell which meshes need no solution
//! (branch and bound).
//!
//! Meshes are visited in a fixed order. One whose bound exceeds the best plan is left out; of each it is known what was
//! left out, so that it can be visited again where programs take longer than was estimated. In the end the least of all
//! bounds says by how much the plan's estimate may exceed the least that is possible.

use super::bound::stages::{InStages, Order, least_fitting_in_stages, least_in_stages};
use super::bound::{Asked, least, least_fitting, scaled};
use super::candidate::{Candidate, least_step};
use super::choice::degrees::{Degrees, zero_stages};
use super::choice::stages::MOST_ZERO;
use super::error::PlanError;
use super::measure::CLOSE;
use super::paces::Paces;
use super::placed::{Solved, place_batch};
use super::space::{Point, Space};
use super::stages::schedules::{self, orders};
use crate::shard::family::{copy_axes, open_axes};
use crate::shard::tensor::Placed;
use crate::threads;
use shardc_ir::{Bytes, Family, Seconds};

/// A bound within this share of the best plan is not made any tighter.
const NEAR: f64 = 0.005;

/// How many bounds are made tighter beside each other.
const LOT: usize = 4;

/// By how much slower than the fastest known step a pipeline may be at the most.
const FAR: f64 = 1.1;

/// The share of another plan's step that a plan has to take at the most by its estimate, if it is to be faster: estimates
/// of pipelines are so much too low on average where stages wait for each other's messages, and what is faster by less is
/// not worth lowering.
const PROMISING: f64 = 0.99;

/// A mesh is expected to take at least this share of what others took whose microbatches are divided alike.
const EXPECTED: f64 = 0.98;

/// A mesh, and what is known of its plans.
struct Known {
    degrees: Degrees,
    /// The ways to store parameters.
    stored: Vec<Degrees>,
    /// No plan of it takes less.
    least: f64,
    /// Whether only ZeRO and recomputation are left to choose, so that its plans are all predicted.
    is_whole: bool,
    /// Whether that is all that is known of it.
    is_tight: bool,
    /// The fastest plan found that fits.
    best: f64,
    /// The least bound of what was left out of it, and whether that is all.
    cut: f64,
    is_left_out: bool,
}

/// The meshes so far.
pub struct Visited {
    memory: Bytes,
    /// The seconds of a step above which no plan is looked for, whatever is found; if nothing is said, those of plans that
    /// are close to the fastest.
    limit: Option<f64>,
    /// The seconds above which no plan is faster than what is known beside the meshes.
    pub against: f64,
    known: Vec<Known>,
    /// How long microbatches took.
    paces: Paces,
    /// The fastest plan found that fits.
    pub best: f64,
    /// Whether what was left out of the latest microbatches may fit, though nothing that was found does.
    pub may_fit: bool,
}

impl Visited {
    /// None yet. `memory` is what a rank may take wherever it is.
    pub fn new(memory: Bytes) -> Self {
        let (known, paces, none) = (Vec::new(), Paces::default(), f64::INFINITY);
        Self { memory, limit: None, against: none, known, paces, best: none, may_fit: false }
    }

    /// None yet; plans are looked for that take up to so many seconds, whatever is found.
    pub fn within(memory: Bytes, limit: f64) -> Self {
        Self { limit: Some(limit), ..Self::new(memory) }
    }

    /// The same beside a plan that is known to take so many seconds.
    pub fn against(self, step: f64) -> Self {
        Self { against: PROMISING * step, ..self }
    }

    /// The same with what is known of microbatches of other meshes.
    pub fn paced(self, other: &Self) -> Self {
        Self { paces: other.paces.clone(), ..self }
    }

    /// None yet, with what is known of the best plan.
    pub fn fork(&self) -> Self {
        let Self { memory, limit, against, best, .. } = *self;
        Self { limit, against, best, ..Self::new(memory) }.paced(self)
    }

    /// Takes in what a fork has seen.
    pub fn join(&mut self, other: Self) {
        self.known.extend(other.known);
        self.paces.join(other.paces);
        self.best = self.best.min(other.best);
    }

    /// The meshes, those that were left out included.
    pub fn meshes(&self) -> u64 {
        self.known.len() as u64
    }

    /// How many of them were left out.
    pub fn pruned(&self) -> u64 {
        self.known.iter().filter(|known| known.is_left_out).count() as u64
    }

    /// Whether something was left out that may take less than so many seconds, and less than what is known beside the
    /// meshes.
    pub fn has_left_out(&self, seconds: f64) -> bool {
        self.known.iter().any(|known| known.cut < seconds && known.cut <= self.against)
    }

    /// The same, where plans are looked for that take up to `limit` seconds if it is said, without the meshes of which that
    /// may be: these are given, with all ways to store parameters, to be visited anew.
    pub fn reopened(self, limit: Option<f64>) -> (Self, Vec<Degrees>) {
        let mut wider = Self { limit, ..self };
        let [whole, staged] = [wider.limit(), wider.limit_in_stages()];
        let is_open =
            |known: &Known| known.cut <= if known.degrees.degree(Family::Pipeline) > 1 { staged } else { whole };
        let (again, known): (Vec<_>, Vec<_>) = wider.known.into_iter().partition(is_open);
        wider.known = known;
        (wider, again.into_iter().flat_map(|known| known.stored).collect())
    }

    /// The bound of the latest mesh.
    pub fn least(&self) -> f64 {
        self.known.last().map_or(0.0, |known| known.least)
    }

    /// The seconds of a step above which no plan is looked for.
    fn limit(&self) -> f64 {
        self.limit.unwrap_or(CLOSE * self.best).min(self.against)
    }

    /// The same of pipelines. Where any time will do, the fastest that was found may not fit by its programs.
    pub fn limit_in_stages(&self) -> f64 {
        let far = if self.limit == Some(f64::INFINITY) { f64::INFINITY } else { FAR * self.best };
        self.limit().min(far)
    }

    /// Whether a mesh, of which only the batch is placed, may have a plan that is worth to be solved: one
    /// that may be the best, or so close to it that its programs decide.
    pub fn opens(&mut self, space: &Space<'_, '_>, placed: &Placed<'_>, degrees: &Degrees, point: &Point) -> bool {
        let (prepared, is_staged) = (space.prepared, degrees.degree(Family::Pipeline) > 1);
        let is_whole = !is_staged && open_axes(placed.mesh).is_empty();
        let limit = if is_staged { self.limit_in_stages() } else { self.limit() };
        let expected = EXPECTED * self.expected(placed, point, is_staged);
        // Of what is expected to take longer, a bound is asked for that takes the least to find.
        let asked = if expected <= limit { limit } else { 0.0 };
        let least = match (is_whole, is_staged) {
            (true, _) => 0.0,
            (false, false) => least(prepared, placed, Some(self.memory).filter(|_| !space.away.moves()), asked),
            // Stages on several kinds of nodes may be faster than the slowest kind.
            (false, true) if placed.cluster.parts.len() > 1 => {
                let cluster = &placed.cluster.fastest();
                let routes = Default::default();
                let placed = Placed { cluster, locals: prepared.locals(cluster), routes, ..placed.clone() };
                least_of_stages(space, &placed, asked)
            }
            (false, true) => least_of_stages(space, placed, asked),
        };
        // Stages on several kinds of nodes are bounded as if all were on the fastest.
        let is_tight = is_whole || (is_staged && placed.cluster.parts.len() > 1);
        let (degrees, stored) = (degrees.clone(), point.degrees.clone());
        let (takes, best) = (least.max(expected), f64::INFINITY);
        let is_left_out = takes > limit;
        let cut = if is_left_out { takes } else { f64::INFINITY };
        self.known.push(Known { degrees, stored, least, is_whole, is_tight, best, cut, is_left_out });
        !is_left_out
    }

    /// Whether pipelines with the layouts of a solved mesh may still be worth to be found.
    pub fn opens_stages(&mut self, Solved { own, .. }: &Solved<'_>, point: &Point) -> bool {
        let expected = EXPECTED * self.expected(&own.placed, point, true);
        self.is_below(expected, self.limit_in_stages())
    }

    /// The seconds that a mesh is expected to take at the least, by what microbatches of others took. What chunks hide of
    /// plans of one stage is not known, but none is cut that does not fit.
    fn expected(&self, placed: &Placed<'_>, point: &Point, is_staged: bool) -> f64 {
        let samples = point.microbatch();
        let pace = match is_staged {
            true => self.paces.expected(placed, samples),
            false => self.paces.expected_short(placed, samples),
        };
        pace.map_or(0.0, |pace| scaled(placed, placed.microbatches as f64 * pace))
    }

    /// Takes in how long microbatches of the latest mesh take, and whether plans of one stage are short of memory.
    pub fn learn(&mut self, Solved { own, .. }: &Solved<'_>, point: &Point, is_short: bool) {
        self.paces.learn(&own.placed, point.microbatch(), own.shape.pace(), is_short);
    }

    /// Whether plans that take at least so many seconds are worth to be found.
    pub fn is_open(&mut self, least: f64) -> bool {
        self.is_below(least, self.limit())
    }

    /// Whether plans that take at least so many seconds are below a limit; else they are left out.
    fn is_below(&mut self, least: f64, limit: f64) -> bool {
        if least > limit {
            self.leave_out(least);
        }
        least <= limit
    }

    /// Plans of the latest mesh are left out that take at least so many seconds.
    pub fn leave_out(&mut self, least: f64) {
        if let Some(known) = self.known.last_mut() {
            known.cut = known.cut.min(least);
        }
    }

    /// Takes the plans of the latest mesh in.
    pub fn add(&mut self, candidates: &[Candidate]) {
        let best = least_step(candidates);
        self.best = self.best.min(best);
        if let Some(known) = self.known.last_mut() {
            known.best = known.best.min(best);
        }
    }

    /// No plan of any mesh that fits is predicted to take less: the least of their bounds, where the lowest is made as
    /// tight as can be before it counts, unless it is so many seconds. None where there is no mesh.
    ///
    /// # Errors
    /// Only a bug.
    pub fn bound(&self, space: &Space<'_, '_>, enough: f64) -> Result<Option<f64>, PlanError> {
        if self.known.is_empty() {
            return Ok(None);
        }
        let bound = |known: &Known| (if known.is_whole { known.best } else { known.least }, known.is_tight);
        let mut bounds: Vec<(f64, bool)> = self.known.iter().map(bound).collect();
        // The bound that counts in the end is the least: none need be tighter than one that is as tight as can be.
        let mut enough = self.best.min(enough);
        loop {
            let mut lowest: Vec<usize> = (0..bounds.len()).filter(|index| bounds[*index].0 < self.best).collect();
            lowest.sort_by(|a, b| bounds[*a].0.total_cmp(&bounds[*b].0));
            let Some((least, is_tight)) = lowest.first().map(|index| bounds[*index]) else {
                return Ok(Some(self.best));
            };
            let is_enough = |bound: f64| bound * (1.0 + NEAR) >= self.best || bound >= enough;
            if is_tight || is_enough(least) {
                return Ok(Some(least));
            }
            lowest.retain(|index| !bounds[*index].1 && !is_enough(bounds[*index].0));
            lowest.truncate(LOT);
            let tightened = threads::map(&lowest, |index| {
                self.known[*index].tightened(space, self.memory, (bounds[*index].0, enough))
            });
            for (index, bound) in lowest.into_iter().zip(tightened) {
                let bound = bound?;
                (bounds[index], enough) = ((bound, true), enough.min(bound));
            }
        }
    }
}

/// The least that pipelines of a mesh take, as far as it takes to see whether that is more than so many seconds.
fn least_of_stages(space: &Space<'_, '_>, placed: &Placed<'_>, limit: f64) -> f64 {
    let orders = orders(space.pins);
    least_in_stages(space.prepared, placed, &in_stages(space, placed, &orders, limit))
}

/// What is asked of a bound of pipelines that take no more than so many seconds.
fn in_stages<'a>(space: &Space<'_, '_>, placed: &Placed<'_>, orders: &'a [Order], limit: f64) -> InStages<'a> {
    let Space { cluster, request, pins, away, measure, .. } = *space;
    let rooms = cluster.rooms(placed.mesh, request.device_memory).into_iter();
    let free = rooms.map(|room| measure.room(room).0 as f64).sum::<f64>();
    InStages { free: Some(free).filter(|_| !away.moves()), zero: pins.zero.unwrap_or(MOST_ZERO), limit, orders }
}

impl Known {
    /// Its bound as tight as can be, between so many seconds and, nearly, those that are enough.
    fn tightened(&self, space: &Space<'_, '_>, memory: Bytes, (least, enough): (f64, f64)) -> Result<f64, PlanError> {
        let Space { prepared, cluster, request, pins, away, .. } = *space;
        let mesh = self.degrees.mesh(request.batch);
        let Some(placed) = place_batch(prepared, &mesh, cluster)? else { return Ok(least) };
        let (has_copies, is_staged) = (!copy_axes(&mesh).is_empty(), self.degrees.degree(Family::Pipeline) > 1);
        let stored = self.stored.iter().map(|degrees| {
            let stages = match is_staged {
                true => schedules::zero_stages(has_copies, degrees, pins),
                false => zero_stages(has_copies, placed.microbatches, degrees, pins),
            };
            (degrees.mesh(request.batch), stages)
        });
        let stored: Vec<_> = stored.collect();
        let bound = if is_staged {
            let orders = orders(pins);
            let asked = in_stages(space, &placed, &orders, enough);
            least_fitting_in_stages(prepared, &placed, &asked, &stored, [least, enough])
        } else {
            let memory = Some(memory).filter(|_| !away.moves());
            least_fitting(prepared, &placed, Asked { stored: &stored, memory, enough }, least)
        };
        let (degrees, microbatch) = (self.degrees.text(), self.degrees.microbatch);
        let [before, after, best] = [least, bound, self.best].map(|of| Seconds(of).to_string());
        tracing::debug!(degrees, microbatch, before, bound = after, best, "bounded");
        Ok(bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plans that are far slower than the fastest are looked for where that turned out not to fit, in stages as well.
    #[test]
    fn where_nothing_that_was_found_fits_no_mesh_is_too_slow() {
        let reopened = |limit: Option<f64>| {
            let mut visited = Visited { best: 1.0, ..Visited::new(Bytes(1)) };
            let (stored, best) = (vec![Degrees::new(1)], f64::INFINITY);
            let known = |degrees: Degrees, cut: f64| Known {
                degrees,
                stored: stored.clone(),
                least: 0.5,
                is_whole: false,
                is_tight: false,
                best,
                cut,
                is_left_out: false,
            };
            visited.known.push(known(Degrees::new(1), 1.2));
            visited.known.push(known(Degrees::new(1).with(Family::Pipeline, &[2]), 1.05));
            visited.known.push(known(Degrees::new(1).with(Family::Pipeline, &[2]), 1.2));
            visited.reopened(limit).1.len()
        };
        assert_eq!([None, Some(1.3), Some(f64::INFINITY)].map(reopened), [0, 2, 3]);
    }
}
