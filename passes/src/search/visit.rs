//! What the search has seen of the meshes: the best plan so far, and the bounds that tell which meshes need
//! no solution (branch and bound).

use super::bound::{Asked, least, least_fitting};
use super::choose::CLOSE;
use super::{Candidate, Degrees, PlanError, Point, Space, place_batch, zero_stages};
use crate::shard::family::{copy_axes, searched_axes};
use crate::shard::tensor::{Placed, Prepared};
use shardc_ir::plan::Search;
use shardc_ir::{Bytes, Seconds};

/// A bound within this share of the best plan is not made any tighter.
const NEAR: f64 = 0.005;

/// By how much slower than the fastest known step a pipeline may be where plans that were thought to fit did not.
const FAR: f64 = 1.1;

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
}

/// The meshes so far.
pub struct Visited {
    memory: Bytes,
    prunes: bool,
    known: Vec<Known>,
    /// The fastest plan found that fits.
    pub best: f64,
    /// Meshes that were left out.
    pub pruned: u64,
    /// Whether what was left out of the latest microbatches may fit, though nothing that was found does.
    pub may_fit: bool,
    /// The least bound of those.
    pub cut: f64,
}

impl Visited {
    /// None yet. `memory` is what a rank may take wherever it is; `prunes` says whether meshes may be left out.
    pub fn new(memory: Bytes, prunes: bool) -> Self {
        Self { memory, prunes, known: Vec::new(), best: f64::INFINITY, pruned: 0, may_fit: false, cut: f64::INFINITY }
    }

    /// Whether a mesh, of which only the batch is placed, may have a plan that is worth to be solved: one
    /// that may be the best, or so close to it that its programs decide.
    pub fn opens(&mut self, prepared: &Prepared<'_>, placed: &Placed<'_>, degrees: &Degrees, point: &Point) -> bool {
        let stages = degrees.degree("pp");
        let is_whole = stages == 1 && searched_axes(placed.mesh).iter().all(|axis| placed.mesh.size(*axis) == 1);
        let least = match is_whole {
            true => 0.0,
            // Stages on several kinds of nodes may be faster than the slowest kind.
            false if stages > 1 && placed.cluster.parts.len() > 1 => {
                let cluster = &placed.cluster.fastest();
                let routes = Default::default();
                let placed = Placed { cluster, locals: prepared.locals(cluster), routes, ..placed.clone() };
                least(prepared, &placed)
            }
            false => least(prepared, placed),
        };
        // What memory costs is known of whole models.
        let is_tight = is_whole || stages > 1;
        let (degrees, stored) = (degrees.clone(), point.degrees.clone());
        self.known.push(Known { degrees, stored, least, is_whole, is_tight, best: f64::INFINITY });
        let opens = self.is_open(least);
        self.pruned += u64::from(!opens);
        opens
    }

    /// Whether plans that take at least so many seconds are worth to be found.
    pub fn is_open(&mut self, least: f64) -> bool {
        let opens = !self.prunes || least <= CLOSE * self.best;
        if !opens {
            self.leave_out(least);
        }
        opens
    }

    /// Plans are left out that take at least so many seconds.
    pub fn leave_out(&mut self, least: f64) {
        self.cut = self.cut.min(least);
    }

    /// Seconds of a step from which on a pipeline is not worth a try.
    pub fn far(&self) -> f64 {
        self.best * if self.prunes { CLOSE } else { FAR }
    }

    /// Takes the plans of the latest mesh in.
    pub fn add(&mut self, candidates: &[Candidate]) {
        let fits = || candidates.iter().filter(|candidate| candidate.prediction.fits());
        let best = fits().map(|candidate| candidate.prediction.step.0).fold(f64::INFINITY, f64::min);
        self.best = self.best.min(best);
        if let Some(known) = self.known.last_mut() {
            known.best = known.best.min(best);
        }
    }

    /// How the search went that found a plan with an estimated step of so many seconds, after `refused` others had
    /// turned out not to fit when lowered; `untried` that are faster do not fit by their estimates alone.
    ///
    /// # Errors
    /// Only a bug.
    pub fn report(&self, space: &Space<'_, '_>, step: f64, left_out: (u64, u64)) -> Result<Search, PlanError> {
        // The bound is that of plans whose estimates fit.
        let bound = self.bound(space)?.min(step);
        let gap = step / bound - 1.0;
        let stopped = match left_out {
            (0, untried) if gap <= 1e-9 => {
                let of = if untried == 0 { "its space" } else { "those whose estimates fit" };
                let is_free = space.prepared.head.is_some() && space.pins.loss_chunks.is_none();
                let head = if is_free { ", in which the head is cut by its tokens" } else { "" };
                format!("it is the best of {of}{head}")
            }
            (0, _) => "every mesh was solved, or left out by its bound".to_string(),
            (refused, _) => {
                let (plans, do_not) =
                    if refused == 1 { ("plan that is", "does not") } else { ("plans that are", "do not") };
                format!("{refused} {plans} faster or leaner by estimates {do_not} fit when lowered")
            }
        };
        let meshes = self.known.len() as u64;
        let (estimate, bound) = (Seconds(step), Seconds(bound));
        Ok(Search { estimate, bound, gap, stopped, meshes, pruned: self.pruned, ..Search::default() })
    }

    /// No plan of any mesh that fits is predicted to take less: the least of the meshes' bounds, where the
    /// lowest is made as tight as can be before it counts.
    fn bound(&self, space: &Space<'_, '_>) -> Result<f64, PlanError> {
        let Space { prepared, cluster, request, pins, away, .. } = *space;
        let memory = Some(self.memory).filter(|_| !away.moves());
        let bound = |known: &Known| (if known.is_whole { known.best } else { known.least }, known.is_tight);
        let mut bounds: Vec<(f64, bool)> = self.known.iter().map(bound).collect();
        // The bound that counts in the end is the least: none need be tighter than one that is as tight as can be.
        let mut enough = self.best;
        loop {
            let lowest = bounds.iter_mut().zip(&self.known).min_by(|a, b| a.0.0.total_cmp(&b.0.0));
            let Some(((bound, is_tight), known)) = lowest.filter(|((bound, _), _)| *bound < self.best) else {
                return Ok(self.best);
            };
            if *is_tight || *bound * (1.0 + NEAR) >= self.best {
                return Ok(*bound);
            }
            let mesh = known.degrees.mesh(request.batch);
            if let Some(placed) = place_batch(prepared, &mesh, cluster)? {
                let stored = known.stored.iter().map(|degrees| {
                    let stages = zero_stages(!copy_axes(&mesh).is_empty(), placed.microbatches, degrees, pins);
                    (degrees.mesh(request.batch), stages)
                });
                let stored: Vec<_> = stored.collect();
                let before = Seconds(*bound);
                *bound = least_fitting(prepared, &placed, Asked { stored: &stored, memory, enough }, *bound);
                let (degrees, microbatch) = (known.degrees.text(), known.degrees.microbatch);
                let [before, bound, best] = [before, Seconds(*bound), Seconds(known.best)].map(|of| of.to_string());
                tracing::debug!(degrees, microbatch, before, bound, best, "bounded");
            }
            (*is_tight, enough) = (true, enough.min(*bound));
        }
    }
}
