//! Several processes, one run: who is who, how they meet, and how they end together.
//!
//! A run on several GPUs is one process per GPU, on one host or many. Each process is a *rank*:
//!
//! * [`place`] reads who this process is from the variables of torchrun, Open MPI, MPICH, Slurm, or of shardc's own
//!   launcher, which sets torchrun's;
//! * [`store`] is a small TCP server with a table of values, at which ranks meet: served by the launcher, or by rank 0
//!   where another launcher started the ranks;
//! * [`world`] is a rank's membership: values shared and compared, and a heartbeat that brings the first failure of any
//!   rank to all;
//! * [`spawn`] is the launcher of one host: starts the ranks, watches them, and ends the others when one dies.
//!
//! Invariants: every wait has a time limit and ends at once when a rank fails. Limits of waits for other ranks are long
//! ([`Limits`]), so that no rank that beats is given up for what another still reads. A rank that is killed, hangs or
//! is stopped is named, with what it was last doing, and all others end within [`Limits::longest_end`]. Nothing here
//! knows a device, and nothing but [`spawn`] assumes one host.

mod place;
mod protocol;
mod signal;
mod spawn;
mod store;
mod table;
mod world;

pub use place::Place;
pub use spawn::{Ending, Launcher};
pub use store::{Client, Server};
pub use table::Table;
pub use world::World;

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// From the first attempt to reach the store until it must have answered.
    pub join: Duration,
    /// Until it is told which ranks have not come, or that the store does not answer; then after twice as long, and so on.
    pub notice: Duration,
    /// A wait for another rank's value or arrival.
    pub wait: Duration,
    /// Between two heartbeats of a rank.
    pub beat: Duration,
    /// Without a heartbeat, after which a rank counts as hung.
    pub silence: Duration,
    /// For a rank to end by itself once another has failed.
    pub grace: Duration,
    /// From the request to end (SIGTERM) to the end by force (SIGKILL).
    pub force: Duration,
    /// One training step, after which the devices count as hung.
    pub step: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            join: seconds(300),
            notice: seconds(20),
            wait: seconds(1800),
            beat: Duration::from_millis(500),
            silence: seconds(15),
            grace: seconds(4),
            force: seconds(4),
            step: seconds(600),
        }
    }
}

/// The variable that sets [`Limits::step`], in seconds.
pub const STEP_LIMIT: &str = "SHARDC_STEP_LIMIT";

impl Limits {
    /// The defaults, with the limit of a step from [`STEP_LIMIT`] where it is set.
    ///
    /// # Errors
    /// A value that is no positive number of seconds.
    pub fn from_env() -> Result<Self, LaunchError> {
        let mut limits = Self::default();
        if let Ok(value) = std::env::var(STEP_LIMIT) {
            let seconds = value.parse::<f64>().ok().filter(|seconds| (0.001..1e9).contains(seconds));
            let wrong = || LaunchError::Variable {
                variable: STEP_LIMIT,
                value: value.clone(),
                what: "it must be a number of seconds, such as 600".into(),
            };
            limits.step = Duration::from_secs_f64(seconds.ok_or_else(wrong)?);
        }
        Ok(limits)
    }

    /// The longest time from the death or hang of a rank to the end of all others.
    pub fn longest_end(&self) -> Duration {
        self.silence + self.beat + self.grace + self.force
    }
}

/// Why a rank failed: the first cause, as all ranks learn it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("rank {rank} ({who}){}: {message}", at_text(.at))]
pub struct Failure {
    /// The rank that failed.
    pub rank: u64,
    /// Its device, process and host: `GPU 1, pid 4242 on node7`.
    pub who: String,
    /// What it was last doing: the step, the section and the instruction, as far as known.
    pub at: String,
    /// What went wrong.
    pub message: String,
    /// What to do about it.
    pub fix: Option<String>,
    /// The exit code that the cause asks for.
    pub code: u8,
}

fn at_text(at: &str) -> String {
    if at.is_empty() { String::new() } else { format!(", at {at}") }
}

/// What can go wrong between processes.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LaunchError {
    /// A variable of a launcher that makes no sense.
    #[error("the environment variable {variable} is `{value}`: {what}")]
    Variable {
        /// The variable.
        variable: &'static str,
        /// Its value, empty where it is missing.
        value: String,
        /// What is wrong with it.
        what: String,
    },
    /// The store cannot be served.
    #[error("rank 0 cannot serve the run's store at {address}: {why}")]
    Serve {
        /// Where.
        address: String,
        /// Why not.
        why: String,
    },
    /// The store cannot be reached.
    #[error("the run's store at {address} does not answer: {why}")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// The last error.
        why: String,
    },
    /// The store refuses this rank.
    #[error("rank {rank} is refused: {why}")]
    Refused {
        /// The rank.
        rank: u64,
        /// Why.
        why: String,
    },
    /// A wait that took too long.
    #[error("{what} has not come in {seconds} s; ranks that are missing: {missing:?}")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// The ranks that did not come, where it is known.
        missing: Vec<u64>,
        /// How long.
        seconds: u64,
    },
    /// Ranks that were started with different things.
    #[error("the ranks disagree on the {what}: rank {} has {}, rank {} has {}", .first.0, .first.1, .other.0, .other.1)]
    Disagree {
        /// On what.
        what: String,
        /// A rank and its value.
        first: (u64, String),
        /// Another rank and its value.
        other: (u64, String),
    },
    /// A rank failed; or the store is gone.
    #[error(transparent)]
    Failed(#[from] Box<Failure>),
    /// A rank cannot be started.
    #[error("cannot start rank {rank} ({program}): {why}")]
    Spawn {
        /// The rank.
        rank: u64,
        /// The program.
        program: String,
        /// Why.
        why: String,
    },
    /// A rank ended, and with it the run: what the launcher says.
    #[error("{failure}{}", others_text(.others))]
    Ended {
        /// The first cause.
        failure: Box<Failure>,
        /// Where the other ranks were.
        others: Vec<(u64, String)>,
    },
}

impl LaunchError {
    /// The exit code that it asks for.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Variable { .. } | Self::Disagree { .. } | Self::Refused { .. } => 2,
            Self::Ended { failure, .. } | Self::Failed(failure) => failure.code,
            _ => 1,
        }
    }

    /// What to do about it, if there is more to say than the error does.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Variable { variable: STEP_LIMIT, .. } => {
                Some("correct it, or unset it: a step may take 600 s then".into())
            }
            Self::Variable { .. } => Some("set it as torchrun does, or unset it to let shardc start the ranks".into()),
            Self::Disagree { .. } => Some("start all ranks with the same shardc, files and flags".into()),
            Self::Serve { .. } => Some("give a free port as MASTER_PORT".into()),
            Self::Unreachable { .. } => {
                Some("check MASTER_ADDR and MASTER_PORT, and that rank 0 was started and can be reached there".into())
            }
            Self::Ended { failure, .. } | Self::Failed(failure) => failure.fix.clone(),
            Self::Refused { .. } | Self::TimedOut { .. } | Self::Spawn { .. } => None,
        }
    }
}

/// When a wait is told of: first after [`Limits::notice`], then each time it has become twice as long.
struct Notice {
    began: Instant,
    next: Duration,
}

impl Notice {
    /// Of a wait that begins now.
    fn new(limits: Limits) -> Self {
        Self { began: Instant::now(), next: limits.notice }
    }

    /// How long it has been, if it is time to tell.
    fn due(&mut self) -> Option<Duration> {
        let since = self.began.elapsed();
        (since > self.next).then(|| {
            self.next *= 2;
            since
        })
    }
}

fn others_text(others: &[(u64, String)]) -> String {
    let line = |(rank, at): &(u64, String)| format!("\n  rank {rank} was at {at}; it was ended");
    others.iter().map(line).collect()
}

/// This host's name, for messages.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.map(|name| name.trim().to_string()).filter(|name| !name.is_empty());
    name.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_else(|| "this host".into())
}
