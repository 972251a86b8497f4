//! What the store holds: values, meetings, who is there, and the first failure.
//!
//! Pure state behind a lock; the time and the wire are the callers'. All waits end when a rank
//! fails.

use super::{Failure, LaunchError};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What is said of a rank whose heartbeat broke off: nobody here knows more.
pub const GONE: &str = "it is gone: killed, or crashed";

/// A rank that has come.
#[derive(Clone, Debug)]
struct Member {
    who: String,
    at: String,
    heard: Instant,
    left: bool,
    /// Whether it knows of the failure.
    told: bool,
}

/// What the ranks gave at one meeting.
#[derive(Default)]
struct Round {
    values: BTreeMap<u64, Vec<u8>>,
    all: Option<Arc<Vec<Vec<u8>>>>,
    taken: u64,
}

#[derive(Default)]
struct State {
    values: BTreeMap<String, Vec<u8>>,
    rounds: BTreeMap<String, Round>,
    members: BTreeMap<u64, Member>,
    failure: Option<Failure>,
    stop: bool,
}

/// The table of one run.
pub struct Table {
    ranks: u64,
    state: Mutex<State>,
    changed: Condvar,
}

impl Table {
    /// For so many ranks.
    pub fn new(ranks: u64) -> Self {
        Self { ranks, state: Mutex::default(), changed: Condvar::new() }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> u64 {
        self.ranks
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is whole before the lock is given back, also where a thread panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that this is a rank of the run.
    ///
    /// # Errors
    /// Why it is none.
    pub fn expect(&self, rank: u64, ranks: u64) -> Result<(), String> {
        if ranks != self.ranks {
            return Err(format!("it was started as one of {ranks} ranks, but this run has {}", self.ranks));
        }
        match rank < ranks {
            true => Ok(()),
            false => Err(format!("it was started as rank {rank}, but the ranks of this run are below {ranks}")),
        }
    }

    /// A rank comes. One that has left may come again.
    ///
    /// # Errors
    /// A rank that is not of this run, or is there already: the reason.
    pub fn join(&self, rank: u64, ranks: u64, who: &str) -> Result<(), String> {
        self.expect(rank, ranks)?;
        let mut state = self.lock();
        if let Some(other) = state.members.get(&rank).filter(|member| !member.left) {
            return Err(format!("{} is rank {rank} already", other.who));
        }
        let (who, heard) = (who.to_string(), Instant::now());
        state.members.insert(rank, Member { who, at: "its start".into(), heard, left: false, told: false });
        Ok(())
    }

    /// A rank's heartbeat; gives the first failure, and whether to stop after the step.
    pub fn beat(&self, rank: u64, at: &str, failure: Option<Failure>) -> (Option<Failure>, bool) {
        let mut state = self.lock();
        let told = state.failure.is_some() || failure.is_some();
        if let Some(member) = state.members.get_mut(&rank) {
            member.heard = Instant::now();
            member.at = at.to_string();
            member.told |= told;
        }
        if let (Some(failure), None) = (failure, &state.failure) {
            state.failure = Some(failure);
        }
        let answer = (state.failure.clone(), state.stop);
        self.changed.notify_all();
        answer
    }

    /// A rank leaves in peace.
    pub fn leave(&self, rank: u64) {
        if let Some(member) = self.lock().members.get_mut(&rank) {
            member.left = true;
        }
        self.changed.notify_all();
    }

    /// A rank's heartbeat broke off: it is gone, unless it had left.
    pub fn lost(&self, rank: u64) {
        let is_there = self.lock().members.get(&rank).is_some_and(|member| !member.left);
        if is_there {
            self.fail(rank, GONE.to_string(), 1);
            self.leave(rank);
        }
    }

    /// Notes a failure of a rank, if it is the first.
    pub fn fail(&self, rank: u64, message: String, code: u8) {
        let mut state = self.lock();
        if state.failure.is_none() {
            let (who, at) = match state.members.get(&rank) {
                Some(member) => (member.who.clone(), member.at.clone()),
                None => ("which never came".to_string(), String::new()),
            };
            state.failure = Some(Failure { rank, who, at, message, fix: None, code });
        }
        self.changed.notify_all();
    }

    /// Notes a hang: a rank that has not been heard of for `limit`.
    pub fn notice_silence(&self, limit: Duration) {
        let silent =
            |(rank, member): (&u64, &Member)| (!member.left && member.heard.elapsed() > limit).then_some(*rank);
        let found = self.lock().members.iter().find_map(silent);
        if let Some(rank) = found {
            let message = format!("not heard of for {} s: it hangs, is stopped, or its host is gone", limit.as_secs());
            self.fail(rank, message, 1);
        }
    }

    /// Counts all ranks as heard of now: this process itself was stopped for a while.
    pub fn forgive_silence(&self) {
        self.lock().members.values_mut().for_each(|member| member.heard = Instant::now());
    }

    /// The ranks that have not come yet.
    pub fn missing(&self) -> Vec<u64> {
        let state = self.lock();
        (0..self.ranks).filter(|rank| !state.members.contains_key(rank)).collect()
    }

    /// Asks all ranks to stop after the step.
    pub fn stop(&self) {
        self.lock().stop = true;
    }

    /// The first failure.
    pub fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// Who a rank is and what it was last doing, if it came.
    pub fn member(&self, rank: u64) -> Option<(String, String)> {
        self.lock().members.get(&rank).map(|member| (member.who.clone(), member.at.clone()))
    }

    /// Waits until all ranks but `except` have left or know of the failure; false if the time was over before.
    pub fn wait_for_ends(&self, except: u64, wait: Duration) -> bool {
        let is_done = |state: &mut State| {
            let failed = state.failure.is_some();
            let mut others = state.members.iter().filter(|(rank, _)| **rank != except);
            others.all(|(_, member)| member.left || (failed && member.told)).then_some(())
        };
        self.wait(Instant::now() + wait, |_| false, is_done).is_some()
    }

    /// Waits until `look` finds something, `is_over` says so, or the time is over.
    fn wait<T>(
        &self,
        until: Instant,
        is_over: impl Fn(&State) -> bool,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Some(found);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || is_over(&state) {
                return None;
            }
            (state, _) = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Puts a value under a key.
    pub fn set(&self, key: &str, value: Vec<u8>) {
        self.lock().values.insert(key.to_string(), value);
        self.changed.notify_all();
    }

    /// Waits for a key's value; `take` removes it.
    ///
    /// # Errors
    /// [`LaunchError::TimedOut`], or the failure of a rank.
    pub fn get(&self, key: &str, take: bool, wait: Duration) -> Result<Vec<u8>, LaunchError> {
        let look = |state: &mut State| match take {
            true => state.values.remove(key),
            false => state.values.get(key).cloned(),
        };
        let found = self.wait(Instant::now() + wait, |state| state.failure.is_some(), look);
        found.ok_or_else(|| self.why(key, wait, Vec::new()))
    }

    /// Removes all keys that start so.
    pub fn remove(&self, prefix: &str) {
        self.lock().values.retain(|key, _| !key.starts_with(prefix));
    }

    /// Gives a rank's value to a meeting, and waits for those of all ranks, in their order. Every
    /// meeting has a name of its own.
    ///
    /// # Errors
    /// [`LaunchError::TimedOut`] with the ranks that did not come, or the failure of a rank.
    pub fn gather(
        &self,
        name: &str,
        rank: u64,
        value: Vec<u8>,
        wait: Duration,
    ) -> Result<Arc<Vec<Vec<u8>>>, LaunchError> {
        self.lock().rounds.entry(name.to_string()).or_default().values.insert(rank, value);
        self.changed.notify_all();
        let look = |state: &mut State| {
            let round = state.rounds.get_mut(name)?;
            if round.all.is_none() && round.values.len() as u64 == self.ranks {
                round.all = Some(Arc::new(std::mem::take(&mut round.values).into_values().collect()));
            }
            let all = round.all.clone()?;
            round.taken += 1;
            if round.taken == self.ranks {
                state.rounds.remove(name);
            }
            Some(all)
        };
        let found = self.wait(Instant::now() + wait, |state| state.failure.is_some(), look);
        found.ok_or_else(|| {
            let state = self.lock();
            let came = |rank: &u64| state.rounds.get(name).is_some_and(|round| round.values.contains_key(rank));
            let missing = (0..self.ranks).filter(|rank| !came(rank)).collect();
            drop(state);
            self.why(name, wait, missing)
        })
    }

    /// Why a wait ended without what it waited for.
    fn why(&self, what: &str, wait: Duration, missing: Vec<u64>) -> LaunchError {
        match self.failure() {
            Some(failure) => LaunchError::Failed(Box::new(failure)),
            None => LaunchError::TimedOut { what: format!("`{what}`"), missing, seconds: wait.as_secs() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn values_are_waited_for_and_taken_once() {
        let table = Table::new(2);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| table.get("a", false, LONG));
            table.set("a", vec![1, 2]);
            assert_eq!(reader.join().unwrap().unwrap(), [1, 2]);
        });
        assert_eq!(table.get("a", true, SOON).unwrap(), [1, 2]);
        let missing = table.get("a", true, SOON).unwrap_err().to_string();
        assert_eq!(missing, "`a` has not come in 0 s; ranks that are missing: []");
        table.set("b/1", vec![]);
        table.set("c", vec![]);
        table.remove("b/");
        assert!(table.get("b/1", false, SOON).is_err());
        assert!(table.get("c", false, SOON).is_ok());
    }

    #[test]
    fn meetings_bring_all_values_in_order() {
        let table = Table::new(3);
        for round in 0..3 {
            let name = format!("vote/{round}");
            std::thread::scope(|scope| {
                let ranks: Vec<_> = (0..3u64)
                    .map(|rank| {
                        let (table, name) = (&table, &name);
                        scope.spawn(move || table.gather(name, rank, vec![rank as u8], LONG).unwrap())
                    })
                    .collect();
                for rank in ranks {
                    assert_eq!(*rank.join().unwrap(), vec![vec![0], vec![1], vec![2]]);
                }
            });
        }
        assert!(table.lock().rounds.is_empty());
        let error = table.gather("late", 1, vec![], SOON).unwrap_err().to_string();
        assert_eq!(error, "`late` has not come in 0 s; ranks that are missing: [0, 2]");
    }

    #[test]
    fn the_first_failure_ends_every_wait() {
        let table = Table::new(2);
        table.join(0, 2, "GPU 0").unwrap();
        table.join(1, 2, "GPU 1").unwrap();
        table.beat(1, "step 3", None);
        let text = "rank 1 (GPU 1), at step 3: it is gone: killed, or crashed";
        std::thread::scope(|scope| {
            let gather = scope.spawn(|| table.gather("a", 0, vec![], LONG));
            let get = scope.spawn(|| table.get("b", false, LONG));
            table.lost(1);
            assert_eq!(gather.join().unwrap().unwrap_err().to_string(), text);
            assert_eq!(get.join().unwrap().unwrap_err().to_string(), text);
        });
        table.fail(0, "later".into(), 1);
        assert_eq!(table.beat(0, "", None).0.unwrap().to_string(), text);
        assert!(table.wait_for_ends(0, SOON), "rank 1 is gone");
    }

    #[test]
    fn who_leaves_is_not_lost() {
        let table = Table::new(2);
        table.join(1, 2, "GPU 1").unwrap();
        assert!(!table.wait_for_ends(0, SOON));
        table.leave(1);
        table.lost(1);
        table.notice_silence(Duration::ZERO);
        assert_eq!(table.failure(), None);
        assert!(table.wait_for_ends(0, SOON));
        table.join(1, 2, "GPU 1, again").unwrap();
    }

    #[test]
    fn silence_is_a_failure() {
        let table = Table::new(2);
        table.join(0, 2, "GPU 0").unwrap();
        table.notice_silence(LONG);
        assert_eq!(table.failure(), None);
        std::thread::sleep(SOON);
        table.notice_silence(SOON / 2);
        let text = table.failure().unwrap().to_string();
        assert!(text.starts_with("rank 0 (GPU 0), at its start: not heard of for"), "{text}");
    }

    #[test]
    fn strangers_are_refused() {
        let table = Table::new(2);
        table.join(1, 2, "GPU 1").unwrap();
        assert_eq!(table.join(1, 2, "GPU 0").unwrap_err(), "GPU 1 is rank 1 already");
        let text = "it was started as one of 4 ranks, but this run has 2";
        assert_eq!(table.join(0, 4, "GPU 0").unwrap_err(), text);
        let text = "it was started as rank 2, but the ranks of this run are below 2";
        assert_eq!(table.join(2, 2, "GPU 2").unwrap_err(), text);
        assert_eq!(table.missing(), [0]);
    }
}
