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
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;

/// A plan, and what its programs take if it has any.
type Made = Result<(Plan, Option<Result<Exact, String>>), PlanError>;

/// Lowers candidates.
pub(super) struct Lowering<'a> {
    confirm: Option<Confirm<'a>>,
    make: &'a (dyn Fn(&Candidate) -> Result<Plan, PlanError> + Sync),
    cluster: &'a Cluster,
    guesses: Mutex<Vec<(Candidate, Guess)>>,
    /// Told when a guess is made.
    is_made: Condvar,
    count: AtomicU64,
}

/// How far a candidate is that will likely be asked for.
enum Guess {
    Open,
    Begun,
    Made(Box<Made>),
}

impl<'a> Lowering<'a> {
    /// Of candidates of which `make` makes plans.
    pub fn new(
        confirm: Option<Confirm<'a>>,
        make: &'a (dyn Fn(&Candidate) -> Result<Plan, PlanError> + Sync),
        cluster: &'a Cluster,
    ) -> Self {
        let (guesses, is_made, count) = (Mutex::default(), Condvar::new(), AtomicU64::new(0));
        Self { confirm, make, cluster, guesses, is_made, count }
    }

    /// Lets candidates be asked for, while the machine's other cores lower those that will likely be, in their order.
    pub fn beside<T>(&self, likely: Vec<Candidate>, asked: impl FnOnce() -> T) -> T {
        let spare = available_parallelism().map_or(1, usize::from) - 1;
        let threads = if self.confirm.is_some() { spare.min(likely.len()) } else { 0 };
        *self.guesses() = likely.into_iter().map(|candidate| (candidate, Guess::Open)).collect();
        std::thread::scope(|scope| {
            (0..threads).for_each(|_| {
                scope.spawn(|| while self.guess() {});
            });
            let asked = asked();
            self.guesses().clear();
            asked
        })
    }

    /// How many plans were predicted by their programs.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The plan of a candidate with what its programs take, or its estimate where nothing tells that.
    ///
    /// # Errors
    /// Those of making it.
    pub fn plan(&self, candidate: &Candidate) -> Result<Plan, PlanError> {
        let (plan, exact) = self.guessed(candidate).unwrap_or_else(|| self.made(candidate))?;
        self.count.fetch_add(u64::from(exact.is_some()), Ordering::Relaxed);
        build::predicted(candidate, plan, exact, self.cluster)
    }

    fn made(&self, candidate: &Candidate) -> Made {
        let plan = (self.make)(candidate)?;
        let exact = self.confirm.filter(|_| unlowered(&plan).is_empty()).map(|confirm| confirm(&plan));
        Ok((plan, exact))
    }

    fn guesses(&self) -> MutexGuard<'_, Vec<(Candidate, Guess)>> {
        self.guesses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the next guess; whether there was one.
    fn guess(&self) -> bool {
        let mut guesses = self.guesses();
        let next = guesses.iter_mut().find(|(_, guess)| matches!(guess, Guess::Open));
        let Some((candidate, guess)) = next else { return false };
        *guess = Guess::Begun;
        let candidate = candidate.clone();
        drop(guesses);
        // Whoever waits for it must not wait for ever.
        let made = catch_unwind(AssertUnwindSafe(|| self.made(&candidate)));
        let bug = |_| Err(PlanError::Bug(format!("lowering {} panicked", candidate.choice())));
        if let Some((_, guess)) = self.guesses().iter_mut().find(|(other, _)| *other == candidate) {
            *guess = Guess::Made(Box::new(made.unwrap_or_else(bug)));
        }
        self.is_made.notify_all();
        true
    }

    /// What came of a candidate that was guessed; waited for if it is under way.
    fn guessed(&self, candidate: &Candidate) -> Option<Made> {
        let mut guesses = self.guesses();
        loop {
            let known = guesses.iter().position(|(other, _)| other == candidate)?;
            match &guesses[known].1 {
                Guess::Begun => guesses = self.is_made.wait(guesses).unwrap_or_else(PoisonError::into_inner),
                _ => match guesses.swap_remove(known).1 {
                    Guess::Made(made) => return Some(*made),
                    Guess::Open | Guess::Begun => return None,
                },
            }
        }
    }
}
