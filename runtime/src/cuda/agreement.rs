//! What all ranks of a run decide alike, whether they are processes or threads of one.

use super::device::Failure;
use super::executor::OTHER_FAILED;
use crate::launch::World;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Between two looks at whether another rank of this process failed.
const LOOK: Duration = Duration::from_millis(20);

/// The votes of this process's ranks.
struct Votes {
    /// How many have come in this round, and whether all of them said yes.
    came: usize,
    all: bool,
    /// The rounds that are over, and what came of the last one. The next is over when all have read that.
    over: u64,
    outcome: Result<bool, Failure>,
}

/// Where all ranks of a run decide together.
pub struct Agreement {
    world: Arc<World>,
    /// The ranks of this process.
    ranks: usize,
    votes: Mutex<Votes>,
    changed: Condvar,
}

impl Agreement {
    /// For so many ranks of this process, one at least.
    pub fn new(world: Arc<World>, ranks: usize) -> Self {
        let votes = Votes { came: 0, all: true, over: 0, outcome: Ok(true) };
        Self { world, ranks, votes: Mutex::new(votes), changed: Condvar::new() }
    }

    /// Whether all ranks say yes: the same answer on all, which ask in the same order. The last of a process speaks for
    /// it with the others.
    ///
    /// # Errors
    /// Another rank that failed, as `stop` tells of those in this process.
    pub fn all(&self, name: &str, yes: bool, stop: &AtomicBool) -> Result<bool, Failure> {
        let lock = || self.votes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut votes = lock();
        let round = votes.over;
        votes.came += 1;
        votes.all &= yes;
        if votes.came == self.ranks {
            votes.came = 0;
            let here = std::mem::replace(&mut votes.all, true);
            // The others look at `stop` meanwhile.
            drop(votes);
            let outcome = self.world.any(name, !here).map(|no| !no).map_err(|error| error.to_string());
            let mut votes = lock();
            (votes.over, votes.outcome) = (round + 1, outcome.clone());
            self.changed.notify_all();
            return outcome;
        }
        while votes.over == round {
            if stop.load(Ordering::Relaxed) {
                return Err(OTHER_FAILED.to_string());
            }
            (votes, _) = self.changed.wait_timeout(votes, LOOK).unwrap_or_else(PoisonError::into_inner);
        }
        votes.outcome.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{Limits, Place, Server};

    fn process(server: &Server, rank: u64) -> Agreement {
        let place = Place { rank, ranks: 2, address: server.address().to_string(), is_ours: true, ..Place::alone() };
        Agreement::new(Arc::new(World::join(place, "GPU", Limits::default()).unwrap()), 2)
    }

    #[test]
    fn one_no_is_the_answer_of_all() {
        let server = Server::bind("127.0.0.1:0", 2, Limits::default()).unwrap();
        let processes = [0, 1].map(|rank| process(&server, rank));
        // By round, who says no: of two processes with two ranks each.
        let rounds = [None, Some(0), Some(3), None, Some(2)];
        let answers = std::thread::scope(|scope| {
            let rank = |rank: usize| {
                let process = &processes[rank / 2];
                let ask = move |no: &Option<usize>| process.all("record", *no != Some(rank), &AtomicBool::new(false));
                scope.spawn(move || rounds.iter().map(ask).collect::<Vec<_>>())
            };
            [0, 1, 2, 3].map(rank).map(|rank| rank.join().unwrap())
        });
        let expect = rounds.map(|no| Ok(no.is_none()));
        assert!(answers.iter().all(|answers| *answers == expect), "{answers:?}");
    }

    #[test]
    fn a_rank_that_failed_is_not_waited_for() {
        let server = Server::bind("127.0.0.1:0", 2, Limits::default()).unwrap();
        let (failing, other) = (process(&server, 0), process(&server, 1));
        let (stop, goes_on) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| failing.all("record", true, &stop));
            let others = [(); 2].map(|()| scope.spawn(|| other.all("record", true, &goes_on)));
            // The second rank of the first process comes to no vote.
            stop.store(true, Ordering::Relaxed);
            assert_eq!(waiting.join().unwrap(), Err(OTHER_FAILED.to_string()));
            assert!(failing.world.fail("no memory", None, 1));
            for answer in others.map(|other| other.join().unwrap()) {
                assert!(answer.as_ref().is_err_and(|error| error.contains("no memory")), "{answer:?}");
            }
        });
    }
}
