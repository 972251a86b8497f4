//! Plans of candidates, predicted by their programs: one after the other as the search asks, and before it asks, on
//! several threads, those that it will likely ask for.
//!
//! Which candidates are lowered depends on what those before take, so all but the first are guesses. A plan is predicted
//! alike on any thread: guesses change when it is known, and nothing else.

use super::build;
use super::build::{Confirm, Exact};
use crate::cluster::Cluster;
use crate::search::candidate::Candidate;
use crate::search::error::PlanError;
use crate::threads;
use shardc_ir::Plan;
use shardc_ir::feature::unlowered;
use std::cell::{Cell, RefCell};

/// A plan, and what its programs take if it has any.
type Made = Result<(Plan, Option<Result<Exact, String>>), PlanError>;

/// Lowers candidates.
pub(in crate::search) struct Lowering<'a> {
    confirm: Option<Confirm<'a>>,
    make: &'a (dyn Fn(&Candidate) -> Result<Plan, PlanError> + Sync),
    cluster: &'a Cluster,
    guessed: RefCell<Vec<(Candidate, Made)>>,
    /// How many plans were predicted by their programs.
    pub count: Cell<u64>,
}

impl<'a> Lowering<'a> {
    /// Of candidates of which `make` makes plans.
    pub fn new(
        confirm: Option<Confirm<'a>>,
        make: &'a (dyn Fn(&Candidate) -> Result<Plan, PlanError> + Sync),
        cluster: &'a Cluster,
    ) -> Self {
        Self { confirm, make, cluster, guessed: RefCell::default(), count: Cell::default() }
    }

    /// Makes plans of candidates that will likely be asked for, where the machine has cores for several.
    pub fn guess(&self, likely: Vec<Candidate>) {
        if self.confirm.is_some() && threads::count() > 1 {
            let (make, confirm) = (self.make, self.confirm);
            let plans = threads::map(&likely, |candidate| made(make, confirm, candidate));
            self.guessed.replace(likely.into_iter().zip(plans).collect());
        }
    }

    /// The plan of a candidate with what its programs take, or its estimate where nothing tells that.
    ///
    /// # Errors
    /// Those of making it.
    pub fn plan(&self, candidate: &Candidate) -> Result<Plan, PlanError> {
        let known = self.guessed.borrow().iter().position(|(other, _)| other == candidate);
        let known = known.map(|known| self.guessed.borrow_mut().swap_remove(known).1);
        let (plan, exact) = known.unwrap_or_else(|| made(self.make, self.confirm, candidate))?;
        self.count.set(self.count.get() + u64::from(exact.is_some()));
        build::predicted(candidate, plan, exact, self.cluster)
    }
}

fn made(
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
    confirm: Option<Confirm<'_>>,
    candidate: &Candidate,
) -> Made {
    let plan = make(candidate)?;
    let exact = confirm.filter(|_| unlowered(&plan).is_empty()).map(|confirm| confirm(&plan));
    Ok((plan, exact))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::choice::pins::Recompute;
    use shardc_ir::plan::Prediction;

    /// Searches on all threads at a time, each of which lowers plans on the same threads, wait for each other's work alone.
    #[test]
    fn lowering_beside_lowering_ends() {
        let cluster = Cluster::parse("h100:8", "h100").unwrap();
        let searches: Vec<u64> = (0..4 * threads::count() as u64).collect();
        let counted = threads::map(&searches, |search| {
            let candidates: Vec<Candidate> =
                (1..=3).map(|dp| Candidate::bare(3 * search + dp, Recompute::None, Prediction::default())).collect();
            let make = |of: &Candidate| Ok(Plan { choice: of.choice(), ..Plan::default() });
            let confirm = |_: &Plan| {
                let parts: Vec<u64> = (0..16).collect();
                let sums =
                    threads::map(&parts, |part| (0..10_000 * *part).fold(0u64, |sum, of| sum.wrapping_mul(3) ^ of));
                assert_eq!(sums.len(), parts.len());
                Ok(Exact::from(Prediction::default()))
            };
            let lowering = Lowering::new(Some(&confirm), &make, &cluster);
            lowering.guess(candidates[1..].to_vec());
            for of in &candidates {
                assert_eq!(lowering.plan(of).unwrap().choice, of.choice());
            }
            lowering.count.get()
        });
        assert_eq!(counted, vec![3; searches.len()]);
    }
}
