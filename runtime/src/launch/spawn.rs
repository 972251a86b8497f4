//! The launcher of one host: one process per rank, watched until the last has ended.
//!
//! Every rank is this program started again with the same arguments and torchrun's variables. The
//! launcher serves their store. Rank 0 writes to the launcher's own stdout and stderr; what the
//! others write to stderr comes out with their rank before each line, and what they write to stdout
//! is what rank 0 writes, and is dropped.
//!
//! When a rank dies or hangs, the others learn it from the store and end by themselves; who does not
//! is asked to (SIGTERM) after [`Limits::grace`], and made to (SIGKILL) [`Limits::force`] later. Should
//! the launcher itself be killed, the ranks end with it.

use super::place::LAUNCHER;
use super::store::Server;
use super::table::GONE;
use super::{Failure, LaunchError, Limits, host, signal};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks at the ranks.
const LOOK: Duration = Duration::from_millis(20);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With an exit code.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

impl From<ExitStatus> for Ending {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "it ended with exit code {code}"),
            Self::Signal(number) => write!(f, "it was killed by {}", signal::name(*number)),
        }
    }
}

/// Starts ranks on this host; see the [module](self).
pub struct Launcher {
    server: Server,
    ranks: u64,
    device: String,
    limits: Limits,
}

/// A rank's process.
struct Process {
    child: Child,
    lines: Option<JoinHandle<()>>,
    ending: Option<Ending>,
}

impl Launcher {
    /// Serves the store for so many ranks. `device` names what each runs on: `GPU`.
    ///
    /// # Errors
    /// A host that gives no port on its loopback interface.
    pub fn new(ranks: u64, device: &str, limits: Limits) -> Result<Self, LaunchError> {
        let failed = |error: std::io::Error| LaunchError::Serve { address: "127.0.0.1".into(), why: error.to_string() };
        let server = Server::bind("127.0.0.1:0", ranks, limits).map_err(failed)?;
        Ok(Self { server, ranks, device: device.into(), limits })
    }

    /// Gives the ranks a value, before they start.
    pub fn set(&self, key: &str, value: &[u8]) {
        self.server.table().set(key, value.to_vec());
    }

    /// Starts `program` with `arguments` once per rank, and waits for all. Once `stop` is set, the
    /// ranks are asked to stop after their step.
    ///
    /// # Errors
    /// [`LaunchError::Ended`] with the first cause; the others have ended too.
    pub fn run(&self, program: &Path, arguments: &[OsString], stop: &AtomicBool) -> Result<(), LaunchError> {
        let mut processes = Vec::new();
        for rank in 0..self.ranks {
            match self.start(rank, program, arguments) {
                Ok(process) => processes.push(process),
                Err(error) => {
                    self.end(&mut processes);
                    let (program, why) = (program.display().to_string(), error.to_string());
                    return Err(LaunchError::Spawn { rank, program, why });
                }
            }
        }
        let outcome = self.watch(&mut processes, stop);
        for lines in processes.iter_mut().filter_map(|process| process.lines.take()) {
            let _ = lines.join();
        }
        outcome
    }

    fn start(&self, rank: u64, program: &Path, arguments: &[OsString]) -> std::io::Result<Process> {
        let (address, ranks) = (self.server.address(), self.ranks.to_string());
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", &ranks)
            .env("LOCAL_WORLD_SIZE", &ranks)
            .env("MASTER_ADDR", address.ip().to_string())
            .env("MASTER_PORT", address.port().to_string())
            .env(LAUNCHER, std::process::id().to_string())
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .stdin(Stdio::null());
        if rank > 0 {
            command.stdout(Stdio::null()).stderr(Stdio::piped());
        }
        signal::die_with_parent(&mut command);
        let mut child = command.spawn()?;
        let lines = child.stderr.take().map(|stderr| {
            std::thread::spawn(move || {
                // Bytes that are no text end nothing but their line.
                for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                    // The pipe is emptied, so that the rank goes on, even if nobody reads what it says.
                    let _ = writeln!(std::io::stderr(), "[rank {rank}] {}", String::from_utf8_lossy(&line));
                }
            })
        });
        Ok(Process { child, lines, ending: None })
    }

    /// Waits for all to end, and ends all once one has failed.
    fn watch(&self, processes: &mut [Process], stop: &AtomicBool) -> Result<(), LaunchError> {
        loop {
            let mut is_over = true;
            let mut has_failed = self.server.table().failure().is_some();
            for process in processes.iter_mut() {
                match look(process) {
                    None => is_over = false,
                    Some(ending) => has_failed |= ending != Ending::Code(0),
                }
            }
            if has_failed {
                let others = self.places();
                let killed = self.end(processes);
                return Err(self.cause(processes, &killed, others));
            }
            if is_over {
                return Ok(());
            }
            if stop.load(Ordering::Relaxed) {
                self.server.table().stop();
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Where every rank was last.
    fn places(&self) -> Vec<(u64, String)> {
        let table = self.server.table();
        (0..self.ranks).filter_map(|rank| Some((rank, table.member(rank)?.1))).collect()
    }

    /// Ends all ranks: first they are told of a failure by the store, then asked, then made to end.
    /// Gives, per rank, whether it was this that ended it.
    fn end(&self, processes: &mut [Process]) -> Vec<bool> {
        let table = self.server.table();
        let dead = (0..).zip(processes.iter_mut()).find_map(|(rank, process)| Some((rank, look(process)?)));
        if let (Some((rank, ending)), None) = (dead, table.failure()) {
            table.fail(rank, ending.to_string(), 1);
        }
        let mut killed = vec![false; processes.len()];
        let start = Instant::now();
        let mut is_asked = false;
        loop {
            let mut is_over = true;
            for (process, killed) in processes.iter_mut().zip(&mut killed) {
                let late = start.elapsed();
                if look(process).is_some() {
                    continue;
                }
                is_over = false;
                if late > self.limits.grace + self.limits.force {
                    *killed = true;
                    let _ = process.child.kill();
                } else if late > self.limits.grace && !is_asked {
                    *killed = true;
                    signal::terminate(process.child.id());
                }
            }
            is_asked |= start.elapsed() > self.limits.grace;
            if is_over {
                return killed;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The first cause. A rank that was killed from outside comes first: the others may have noticed
    /// its end, and reported that, before the system had told the launcher. Then what was reported
    /// to the store; then the first exit code that is not 0.
    fn cause(&self, processes: &[Process], killed: &[bool], places: Vec<(u64, String)>) -> LaunchError {
        let table = self.server.table();
        let endings = || (0u64..).zip(processes).zip(killed).filter(|(_, killed)| !**killed);
        let endings = || endings().filter_map(|((rank, process), _)| Some((rank, process.ending?)));
        let signalled = endings().find(|(_, ending)| matches!(ending, Ending::Signal(_)));
        let failed = || endings().find(|(_, ending)| *ending != Ending::Code(0));
        let at = |rank: u64| places.iter().find(|(known, _)| *known == rank).map_or("its start", |(_, at)| at);
        let of = |(rank, ending): (u64, Ending)| {
            let pid = processes[rank as usize].child.id();
            let who = format!("{} {rank}, pid {pid} on {}", self.device, host());
            let code = match ending {
                Ending::Code(code) => u8::try_from(code).unwrap_or(1),
                Ending::Signal(_) => 1,
            };
            Failure { rank, who, at: at(rank).to_string(), message: ending.to_string(), fix: None, code }
        };
        let reported = table.failure();
        let failure = match (signalled, reported) {
            (Some(found), _) => of(found),
            // How it ended says more.
            (None, Some(failure)) if failure.message == GONE => {
                let ending = processes.get(failure.rank as usize).and_then(|process| process.ending);
                match ending.filter(|ending| *ending != Ending::Code(0) && !killed[failure.rank as usize]) {
                    Some(ending) => of((failure.rank, ending)),
                    None => failure,
                }
            }
            (None, Some(failure)) => failure,
            (None, None) => failed().map_or_else(|| of((0, Ending::Code(1))), of),
        };
        let others = places.into_iter().filter(|(rank, _)| *rank != failure.rank).collect();
        LaunchError::Ended { failure: Box::new(failure), others }
    }
}

/// How a process ended, if it has.
fn look(process: &mut Process) -> Option<Ending> {
    if process.ending.is_none() {
        process.ending = process.child.try_wait().ok().flatten().map(Ending::from);
    }
    process.ending
}
