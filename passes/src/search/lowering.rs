//! Plans of candidates, predicted by their programs: one after the other as the search asks, and beside them on
//! threads of their own what it will likely ask next.
//!
//! Which candidates are lowered depends on what those before take, so the next one is a guess. A plan is predicted
//! alike on any thread: guesses change when it is known, and nothing else.

use super::build::Exact;
use super::{Candidate, Confirm, PlanError, build};
use crate::cluster::Cluster;
use shardc_ir::Plan;
use shardc_ir::feature::unlowered;
use std::cell::{Cell, RefCell};
use std::thread::{Scope, ScopedJoinHandle, available_parallelism};

/// A plan that is being predicted.
type Begun<'scope> = ScopedJoinHandle<'scope, (Plan, Result<Exact, String>)>;

/// Lowers candidates.
pub(super) struct Lowering<'scope, 'env, 'a> {
    scope: &'scope Scope<'scope, 'env>,
    confirm: Option<Confirm<'env>>,
    make: &'a dyn Fn(&Candidate) -> Result<Plan, PlanError>,
    cluster: &'a Cluster,
    begun: RefCell<Vec<(Candidate, Begun<'scope>)>>,
    /// How many plans were predicted by their programs.
    pub count: Cell<u64>,
}

impl<'scope, 'env, 'a> Lowering<'scope, 'env, 'a> {
    /// Of candidates of which `make` makes plans.
    pub fn new(
        scope: &'scope Scope<'scope, 'env>,
        confirm: Option<Confirm<'env>>,
        make: &'a dyn Fn(&Candidate) -> Result<Plan, PlanError>,
        cluster: &'a Cluster,
    ) -> Self {
        Self { scope, confirm, make, cluster, begun: RefCell::default(), count: Cell::default() }
    }

    /// Begins with a candidate that will likely be asked for, where the machine has a core for it.
    pub fn begin(&self, candidate: &Candidate) {
        let has_cores = available_parallelism().is_ok_and(|cores| cores.get() > 1);
        let Some(confirm) = self.confirm.filter(|_| has_cores) else { return };
        // What cannot be made is said when it is asked for.
        let made = (self.make)(candidate).ok().filter(|plan| unlowered(plan).is_empty());
        let Some(plan) = made else { return };
        let begun = self.scope.spawn(move || {
            let exact = confirm(&plan);
            (plan, exact)
        });
        self.begun.borrow_mut().push((candidate.clone(), begun));
    }

    /// The plan of a candidate with what its programs take, or its estimate where nothing tells that.
    ///
    /// # Errors
    /// Those of making it.
    pub fn plan(&self, candidate: &Candidate) -> Result<Plan, PlanError> {
        let known = self.begun.borrow().iter().position(|(other, _)| other == candidate);
        let Some(known) = known else {
            let plan = (self.make)(candidate)?;
            let is_lowered = self.confirm.is_some() && unlowered(&plan).is_empty();
            self.count.set(self.count.get() + u64::from(is_lowered));
            return build::predicted(self.confirm, candidate, plan, self.cluster);
        };
        self.count.set(self.count.get() + 1);
        let (_, begun) = self.begun.borrow_mut().swap_remove(known);
        let (plan, exact) =
            begun.join().map_err(|_| PlanError::Bug("a thread that lowers a plan ended".to_string()))?;
        build::confirmed(candidate, plan, exact, self.cluster)
    }
}
