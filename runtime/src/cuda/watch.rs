//! Watches the ranks of this process while they start and while a step runs.
//!
//! A rank whose device hangs, or whose group never meets, cannot help itself: its thread may be stuck in a
//! library. So another thread looks at the time, at the run's first failure, and at the communicators' own
//! errors; it gives the communicators up, which lets the device go on, and says where the streams stand.

use super::copies::Release;
use super::nccl::Communicator;
use super::trail::Trail;
use crate::launch::{Failure, Limits, STEP_LIMIT, World};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);
/// The thread was stopped with its process if it looks after so long.
const STOPPED: Duration = Duration::from_secs(5);

/// What is watched of a rank.
pub struct Watched {
    /// The rank.
    pub rank: u64,
    /// Where its streams stand.
    pub trail: Arc<Trail>,
    /// Its groups.
    pub communicators: Vec<Arc<Communicator>>,
    /// What lets streams go that wait for copies.
    pub release: Option<Arc<Release>>,
}

/// What the ranks do together, for which there is a limit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// They join their groups and get ready.
    Start,
    /// They run a step.
    Step,
}

impl Task {
    fn limit(self, limits: Limits) -> Duration {
        match self {
            Self::Start => limits.wait,
            Self::Step => limits.step,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Start => "joining the groups of ranks",
            Self::Step => "the step",
        }
    }

    fn fix(self) -> String {
        match self {
            Self::Start => {
                "NCCL_DEBUG=INFO shows what NCCL waits for, which is often a network between the hosts that \
                            NCCL_SOCKET_IFNAME has to name"
                    .to_string()
            }
            Self::Step => format!("{STEP_LIMIT} sets the limit in seconds, should the step be right"),
        }
    }
}

#[derive(Default)]
struct State {
    ranks: Vec<Watched>,
    task: Option<(Task, Instant)>,
    /// Why the ranks were given up.
    reason: Option<(u64, String)>,
}

/// What the watching thread shares with the runtime and its ranks' threads.
#[derive(Default)]
pub struct Shared {
    state: Mutex<State>,
    /// Set once a rank failed: all others end their step.
    pub stop: AtomicBool,
    ended: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches one more rank.
    pub fn add(&self, rank: Watched) {
        self.lock().ranks.push(rank);
    }

    /// A rank's thread ends, and its device with it: nothing of it is watched any more.
    pub fn remove(&self, rank: u64) {
        self.lock().ranks.retain(|watched| watched.rank != rank);
    }

    /// A task begins, or none is left.
    pub fn set_task(&self, task: Option<Task>) {
        self.lock().task = task.map(|task| (task, Instant::now()));
    }

    /// The rank and the reason for which the ranks were given up, if it was found here.
    pub fn reason(&self) -> Option<(u64, String)> {
        self.lock().reason.clone()
    }

    /// Where the streams stand.
    pub fn text(&self) -> Option<String> {
        let state = self.lock();
        let texts: Vec<String> = state.ranks.iter().filter_map(|rank| rank.trail.text()).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }

    /// A process that was itself stopped (Ctrl-Z, or by a batch system) has done nothing since: its task has not taken that
    /// long. So much time passed since the last look.
    fn forgive(&self, passed: Duration) {
        if passed > STOPPED
            && let Some((_, since)) = &mut self.lock().task
        {
            *since += passed;
        }
    }

    /// One look: gives the ranks up where there is reason to.
    fn look(&self, world: &World) {
        // Asked first: whoever tells of a failure asks for the streams' places while holding what knows of it.
        let failure = world.failure();
        let mut state = self.lock();
        let Some((task, since)) = state.task else { return };
        let is_late = failure.is_none();
        let judged = state.judge((task, since), failure, task.limit(world.limits()));
        let Some((rank, message)) = judged.map(|(rank, message)| (rank.unwrap_or(world.rank()), message)) else {
            return;
        };
        self.stop.store(true, Ordering::Relaxed);
        // A lone run has nobody else to tell what to do about it.
        let reason = if is_late { format!("{message} ({})", task.fix()) } else { message.clone() };
        state.reason = Some((rank, reason.clone()));
        let communicators: Vec<_> = state.ranks.iter().flat_map(|rank| rank.communicators.clone()).collect();
        let releases: Vec<_> = state.ranks.iter().filter_map(|rank| rank.release.clone()).collect();
        drop(state);
        // Told first: giving up may itself hang.
        if world.failure().is_none() {
            world.fail(&message, Some(task.fix()), 1);
        }
        world.end_if_alone(&reason);
        give_up(&communicators, &releases);
    }
}

/// Leaves the groups without waiting for ranks that may be gone. All at once, and while streams are let go that wait for
/// copies: a kernel of one group may stand behind what another one, or a copy, is given up for, and NCCL waits for the device.
pub fn give_up(communicators: &[Arc<Communicator>], releases: &[Arc<Release>]) {
    std::thread::scope(|scope| {
        communicators.iter().for_each(|group| drop(scope.spawn(|| group.abort())));
        releases.iter().for_each(|release| drop(scope.spawn(|| release.release())));
    });
}

impl State {
    /// The rank and the reason for which to give up a task that began then: the run's failure, or that it takes too long.
    /// No rank is named before one has joined its groups.
    fn judge(
        &self,
        (task, since): (Task, Instant),
        failure: Option<Failure>,
        limit: Duration,
    ) -> Option<(Option<u64>, String)> {
        if self.reason.is_some() {
            return None;
        }
        if let Some(failure) = failure {
            return Some((Some(failure.rank), failure.message));
        }
        let late = format!("{} takes longer than {} s", task.name(), limit.as_secs_f64());
        let hangs = |rank: &Watched| Some((Some(rank.rank), format!("{late}; it hangs on {}", rank.trail.text()?)));
        let first = || (self.ranks.first().map(|rank| rank.rank), late.clone());
        (since.elapsed() > limit).then(|| self.ranks.iter().find_map(hangs).unwrap_or_else(first))
    }
}

/// The thread that watches, until it is dropped.
pub struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts to watch.
    pub fn new(shared: Arc<Shared>, world: Arc<World>) -> Self {
        let watching = shared.clone();
        let thread = std::thread::spawn(move || {
            let mut last = Instant::now();
            while !watching.ended.load(Ordering::Relaxed) {
                std::thread::park_timeout(LOOK);
                watching.forgive(last.elapsed());
                last = Instant::now();
                watching.look(&world);
            }
        });
        Self { shared, thread: Some(thread) }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::program::Stream;

    const LONG: Duration = Duration::from_secs(1000);

    fn shared() -> Shared {
        let rank = |rank, trail| Watched { rank, trail: Arc::new(trail), communicators: Vec::new(), release: None };
        let shared = Shared::default();
        shared.add(rank(4, Trail::default()));
        shared.add(rank(5, Trail::standing(Stream::Communication, 2, "microbatch.7 AllReduce")));
        shared
    }

    #[test]
    fn a_step_that_takes_too_long_is_named_by_its_collective() {
        let shared = shared();
        let judge = |limit| shared.lock().judge((Task::Step, Instant::now()), None, limit);
        assert_eq!(judge(LONG), None);
        let at = "the communication stream in microbatch 2: microbatch.7 AllReduce";
        let text = format!("the step takes longer than 0 s; it hangs on {at}");
        assert_eq!(judge(Duration::ZERO), Some((Some(5), text)));
        assert_eq!(shared.text().as_deref(), Some(at));
        shared.remove(5);
        assert_eq!(shared.text(), None);
    }

    #[test]
    fn time_in_which_the_process_was_stopped_is_no_part_of_a_step() {
        let shared = shared();
        let long_ago = Instant::now().checked_sub(Duration::from_secs(50)).expect("an uptime of a minute");
        let judge = || {
            let task = shared.lock().task.expect("a task");
            shared.lock().judge(task, None, Duration::from_secs(40)).is_some()
        };
        shared.lock().task = Some((Task::Step, long_ago));
        shared.forgive(LOOK);
        assert!(judge());
        shared.forgive(Duration::from_secs(30));
        assert!(!judge());
    }

    #[test]
    fn the_failure_of_another_rank_ends_a_step_once() {
        let shared = shared();
        let (who, at, message) = ("GPU 1".into(), "step 3".into(), "it is gone".to_string());
        let failure = Failure { rank: 1, who, at, message, fix: None, code: 1 };
        let judge = || shared.lock().judge((Task::Step, Instant::now()), Some(failure.clone()), LONG);
        assert_eq!(judge(), Some((Some(1), "it is gone".to_string())));
        shared.lock().reason = Some((1, "it is gone".to_string()));
        assert_eq!(judge(), None);
    }

    #[test]
    fn the_thread_stops_the_ranks_of_a_task_that_takes_too_long() {
        let limits = crate::launch::Limits { step: Duration::ZERO, wait: Duration::ZERO, ..Default::default() };
        for task in [Task::Step, Task::Start] {
            let shared = Arc::new(shared());
            let world = World::alone_within(limits);
            let _watch = Watch::new(shared.clone(), Arc::new(world));
            std::thread::sleep(LOOK * 2);
            assert!(!shared.stop.load(Ordering::Relaxed), "nothing runs");
            shared.set_task(Some(task));
            while !shared.stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let (rank, why) = shared.reason().expect("a reason");
            assert!(rank == 5 && why.contains("takes longer than 0 s"), "{why}");
            assert!(task == Task::Start || why.contains(STEP_LIMIT), "{why}");
        }
        // Before any rank joined its groups there is none to name.
        let shared = Shared::default();
        let late = shared.lock().judge((Task::Start, Instant::now()), None, Duration::ZERO);
        assert_eq!(late, Some((None, "joining the groups of ranks takes longer than 0 s".to_string())));
    }
}
