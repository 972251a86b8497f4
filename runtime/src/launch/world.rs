//! A rank's membership in a run.
//!
//! [`World::join`] connects to the store, or serves it where this is rank 0 and no launcher does,
//! and starts the heartbeat: a thread that tells the store twice a second that this rank lives and
//! what it is doing, and brings back the first failure of any rank. Once there is one, every wait
//! ends with it, and a process that has not ended within [`Limits::grace`] is ended: a rank may be
//! stuck in a device's library from which nothing else brings it back.
//!
//! A process that is the only rank has [`World::alone`]: the same face, without a store or threads.

use super::protocol::{Purpose, Reply, Request};
use super::store::{Client, Server, lost_store};
use super::table::Table;
use super::{Failure, LaunchError, Limits, Notice, Place, host, signal};
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long rank 0 goes on serving the store for the others when its own work is done.
const LINGER: Duration = Duration::from_secs(60);

/// Says what a device is doing, beside what the program says.
type Probe = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// What the heartbeat and the rank's other threads share.
#[derive(Default)]
struct Pulse {
    at: String,
    probe: Option<Probe>,
    /// A failure of this rank that the store has not been told yet.
    report: Option<Failure>,
    failure: Option<Failure>,
    stop: bool,
    leaving: bool,
}

struct Shared {
    pulse: Mutex<Pulse>,
    changed: Condvar,
    /// The same as `pulse.failure.is_some()`, to be asked often.
    failed: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Pulse> {
        // The text of a panicking thread is as good as any.
        self.pulse.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The side of the store that the heartbeat has.
enum Heart {
    Here(Arc<Table>, u64),
    There(Client),
}

impl Heart {
    fn beat(&mut self, at: String, failure: Option<Failure>) -> Result<(Option<Failure>, bool), LaunchError> {
        match self {
            Self::Here(table, rank) => Ok(table.beat(*rank, &at, failure)),
            Self::There(client) => match client.ask(&Request::Beat { at, failure }, &[], Duration::ZERO)?.0 {
                Reply::Beat { failure, stop } => Ok((failure, stop)),
                _ => Ok((None, false)),
            },
        }
    }

    /// Of a run whose store is here, the ranks that have not come.
    fn missing(&self) -> Vec<u64> {
        match self {
            Self::Here(table, _) => table.missing(),
            Self::There(_) => Vec::new(),
        }
    }

    fn leave(&mut self) {
        match self {
            Self::Here(table, rank) => table.leave(*rank),
            Self::There(client) => drop(client.ask(&Request::Bye, &[], Duration::ZERO)),
        }
    }
}

/// The side of the store that values go by.
enum Values {
    Here(Arc<Table>),
    There(Mutex<Client>),
}

/// One rank among all of the run; see the [module](self).
pub struct World {
    place: Place,
    who: String,
    limits: Limits,
    values: Values,
    server: Option<Server>,
    shared: Arc<Shared>,
    heart: Option<JoinHandle<()>>,
    /// How often each name was used: every rank counts alike.
    rounds: Mutex<BTreeMap<String, u64>>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} ({})", self.place.rank, self.place.ranks, self.who)
    }
}

impl World {
    /// A run of one process, with the limits that the environment sets.
    pub fn alone() -> Self {
        Self::alone_within(Limits::from_env().unwrap_or_default())
    }

    /// A run of one process.
    pub fn alone_within(limits: Limits) -> Self {
        let shared = Shared { pulse: Mutex::default(), changed: Condvar::new(), failed: AtomicBool::new(false) };
        let values = Values::Here(Arc::new(Table::new(1)));
        Self {
            place: Place::alone(),
            who: format!("pid {} on {}", std::process::id(), host()),
            limits,
            values,
            server: None,
            shared: Arc::new(shared),
            heart: None,
            rounds: Mutex::default(),
        }
    }

    /// Joins the run that `place` is of. `device` names what the rank runs on, in messages: `GPU 1`.
    ///
    /// # Errors
    /// A store that cannot be served or reached; a rank that is there already.
    pub fn join(place: Place, device: &str, limits: Limits) -> Result<Self, LaunchError> {
        let who = format!("{device}, pid {} on {}", std::process::id(), host());
        let ranks = (place.rank, place.ranks);
        let (heart, values, server) = if place.rank == 0 && !place.is_ours {
            let server = serve(&place, limits)?;
            let table = server.table().clone();
            table.join(0, place.ranks, &who).map_err(|why| LaunchError::Refused { rank: 0, why })?;
            (Heart::Here(table.clone(), 0), Values::Here(table), Some(server))
        } else {
            let life = Client::connect(&place.address, ranks, &who, Purpose::Life, limits)?;
            let values = Client::connect(&place.address, ranks, &who, Purpose::Values, limits)?;
            (Heart::There(life), Values::There(Mutex::new(values)), None)
        };
        let pulse = Mutex::new(Pulse { at: "its start".into(), ..Pulse::default() });
        let shared = Arc::new(Shared { pulse, changed: Condvar::new(), failed: AtomicBool::new(false) });
        let (beating, own) = (shared.clone(), place.clone());
        let heart = Some(std::thread::spawn(move || live(heart, &beating, &own, limits)));
        Ok(Self { place, who, limits, values, server, shared, heart, rounds: Mutex::default() })
    }

    /// This process's place.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The rank.
    pub fn rank(&self) -> u64 {
        self.place.rank
    }

    /// The number of ranks, each a process.
    pub fn ranks(&self) -> u64 {
        self.place.ranks
    }

    /// Whether this is rank 0, which speaks for all.
    pub fn is_lead(&self) -> bool {
        self.place.rank == 0
    }

    /// Whether there are no other processes.
    pub fn is_alone(&self) -> bool {
        self.place.ranks == 1
    }

    /// How long things may take.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Says what this rank is doing: what others are told should it fail.
    pub fn at(&self, what: impl Into<String>) {
        self.shared.lock().at = what.into();
    }

    /// Lets a device say more about what it is doing. The probe must not wait for anything.
    pub fn set_probe(&self, probe: Option<Probe>) {
        self.shared.lock().probe = probe;
    }

    /// The first failure of any rank, once it is known here.
    pub fn failure(&self) -> Option<Failure> {
        self.shared.failed.load(Ordering::Relaxed).then(|| self.shared.lock().failure.clone()).flatten()
    }

    /// The first failure, which may come in the next moments: where this rank sees a symptom, such
    /// as a broken connection, another's end may be the cause.
    pub fn failure_within(&self, wait: Duration) -> Option<Failure> {
        let until = Instant::now() + wait;
        while !self.is_alone() && self.failure().is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.failure()
    }

    /// Tells all ranks that this one failed, unless another did before. `code` is the exit code that
    /// the cause asks for. Gives whether the others know; this waits two heartbeats at most.
    pub fn fail(&self, message: &str, fix: Option<String>, code: u8) -> bool {
        if self.heart.is_none() {
            return false;
        }
        let mut pulse = self.shared.lock();
        if pulse.failure.is_none() {
            let at = describe(&pulse);
            let (rank, who, message) = (self.place.rank, self.who.clone(), message.to_string());
            pulse.report = Some(Failure { rank, who, at, message, fix, code });
        }
        self.shared.changed.notify_all();
        let is_waiting = |pulse: &mut Pulse| pulse.failure.is_none();
        let wait = self.limits.beat * 4;
        let pulse = self.shared.changed.wait_timeout_while(pulse, wait, is_waiting);
        pulse.unwrap_or_else(PoisonError::into_inner).0.failure.is_some()
    }

    /// Ends this process where nothing else does, if it has not left the run by itself in time: a lone one has no
    /// heartbeat, and who lets go of a device that hangs waits for it.
    pub fn end_if_alone(&self, message: &str) {
        if self.heart.is_some() {
            return;
        }
        let (message, grace, run) = (message.to_string(), self.limits.grace, Arc::downgrade(&self.shared));
        std::thread::spawn(move || {
            std::thread::sleep(grace);
            if run.strong_count() == 0 {
                return;
            }
            let _ = writeln!(std::io::stderr(), "the run did not end by itself and is ended; the cause: {message}");
            signal::exit_now(1);
        });
    }

    /// Whether the launcher asked to stop after the step.
    pub fn is_asked_to_stop(&self) -> bool {
        self.shared.lock().stop
    }

    /// A name that no other use has, the same on all ranks.
    pub fn round(&self, name: &str) -> String {
        let mut rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        let count = rounds.entry(name.to_string()).or_default();
        *count += 1;
        format!("{name}/{count}")
    }

    /// Puts a value under a key.
    ///
    /// # Errors
    /// A store that is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), LaunchError> {
        match &self.values {
            Values::Here(table) => table.set(key, value.to_vec()),
            Values::There(client) => drop(self.ask(client, Request::Set { key: key.into() }, value)?),
        }
        Ok(())
    }

    /// Waits for a value; `take` removes it.
    ///
    /// # Errors
    /// A value that does not come in time; the failure of a rank; a store that is gone.
    pub fn get(&self, key: &str, take: bool) -> Result<Vec<u8>, LaunchError> {
        self.get_within(key, take, self.limits.wait)
    }

    /// A value that is there already, or `None`.
    ///
    /// # Errors
    /// The failure of a rank; a store that is gone.
    pub fn look(&self, key: &str) -> Result<Option<Vec<u8>>, LaunchError> {
        match self.get_within(key, false, Duration::ZERO) {
            Ok(value) => Ok(Some(value)),
            Err(LaunchError::TimedOut { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn get_within(&self, key: &str, take: bool, wait: Duration) -> Result<Vec<u8>, LaunchError> {
        match &self.values {
            Values::Here(table) => table.get(key, take, wait),
            Values::There(client) => {
                let request = Request::Get { key: key.into(), take, wait_ms: wait.as_millis() as u64 };
                Ok(self.ask(client, request, &[])?.1)
            }
        }
    }

    /// Removes all keys that start so.
    ///
    /// # Errors
    /// A store that is gone.
    pub fn remove(&self, prefix: &str) -> Result<(), LaunchError> {
        match &self.values {
            Values::Here(table) => table.remove(prefix),
            Values::There(client) => drop(self.ask(client, Request::Remove { prefix: prefix.into() }, &[])?),
        }
        Ok(())
    }

    /// Every rank gives a value and gets those of all, in the order of ranks. All ranks call this in
    /// the same order.
    ///
    /// # Errors
    /// Ranks that do not come in time; the failure of a rank; a store that is gone.
    pub fn gather(&self, name: &str, value: &[u8]) -> Result<Vec<Vec<u8>>, LaunchError> {
        let (name, wait) = (self.round(name), self.limits.wait);
        match &self.values {
            Values::Here(table) => Ok(table.gather(&name, self.place.rank, value.to_vec(), wait)?.to_vec()),
            Values::There(client) => {
                let request = Request::Gather { name, wait_ms: wait.as_millis() as u64 };
                let (reply, body) = self.ask(client, request, value)?;
                values_of(&reply, &body, self.place.ranks).ok_or_else(|| {
                    let why = format!("its reply is not one value of each of {} ranks", self.place.ranks);
                    LaunchError::Unreachable { address: self.place.address.clone(), why }
                })
            }
        }
    }

    /// Every rank gives a value, and rank 0 alone takes them, one by one in the order of ranks. All ranks call this in the
    /// same order.
    ///
    /// # Errors
    /// As [`World::gather`].
    pub fn to_lead(&self, name: &str, value: Vec<u8>, mut take: impl FnMut(Vec<u8>)) -> Result<(), LaunchError> {
        let round = self.round(name);
        let key = |rank: u64| format!("{round}/{rank}");
        if self.is_lead() {
            take(value);
            (1..self.ranks()).try_for_each(|rank| self.get(&key(rank), true).map(&mut take))?;
        } else {
            self.set(&key(self.rank()), &value)?;
        }
        self.barrier(name)
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// As [`World::gather`].
    pub fn barrier(&self, name: &str) -> Result<(), LaunchError> {
        self.gather(name, &[]).map(drop)
    }

    /// Whether any rank says so: the same answer on all.
    ///
    /// # Errors
    /// As [`World::gather`].
    pub fn any(&self, name: &str, value: bool) -> Result<bool, LaunchError> {
        Ok(self.gather(name, &[u8::from(value)])?.iter().any(|value| value == &[1]))
    }

    /// Checks that all ranks have the same values; each is named by what it is.
    ///
    /// # Errors
    /// [`LaunchError::Disagree`] with two ranks and their values; and as [`World::gather`].
    pub fn agree(&self, values: &[(&str, String)]) -> Result<(), LaunchError> {
        let own: Vec<&str> = values.iter().map(|(_, value)| value.as_str()).collect();
        let all = self.gather("agreement", own.join("\0").as_bytes())?;
        let texts: Vec<String> = all.iter().map(|value| String::from_utf8_lossy(value).into_owned()).collect();
        let of = |rank: usize, index: usize| texts[rank].split('\0').nth(index).unwrap_or("nothing").to_string();
        for (index, (what, _)) in values.iter().enumerate() {
            let first = of(0, index);
            if let Some(rank) = (1..texts.len()).find(|rank| of(*rank, index) != first) {
                let (what, other) = (what.to_string(), (rank as u64, of(rank, index)));
                return Err(LaunchError::Disagree { what, first: (0, first), other });
            }
        }
        Ok(())
    }

    fn ask(&self, client: &Mutex<Client>, request: Request, body: &[u8]) -> Result<(Reply, Vec<u8>), LaunchError> {
        let wait = match &request {
            Request::Get { wait_ms, .. } | Request::Gather { wait_ms, .. } => Duration::from_millis(*wait_ms),
            _ => Duration::ZERO,
        };
        let answer = client.lock().unwrap_or_else(PoisonError::into_inner).ask(&request, body, wait);
        match answer {
            // The heartbeat knows better why.
            Err(error @ LaunchError::Unreachable { .. }) => Err(self
                .failure_within(self.limits.beat * 4)
                .map_or(error, |failure| LaunchError::Failed(Box::new(failure)))),
            answer => answer,
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let Some(heart) = self.heart.take() else { return };
        if std::thread::panicking() {
            self.heart = Some(heart);
            self.fail("it panicked", None, 1);
            return;
        }
        self.shared.lock().leaving = true;
        self.shared.changed.notify_all();
        let _ = heart.join();
        if let Some(server) = self.server.take() {
            let wait = if self.failure().is_some() { self.limits.grace } else { LINGER };
            if !server.table().wait_for_ends(0, wait) {
                tracing::warn!("rank 0 ends, and not all other ranks have left");
            }
        }
    }
}

/// The values of all ranks, which went as one body; nothing where the reply has no value of each, or not all of it.
fn values_of(reply: &Reply, body: &[u8], ranks: u64) -> Option<Vec<Vec<u8>>> {
    let Reply::Values { lengths } = reply else { return None };
    let (mut values, mut rest) = (Vec::with_capacity(lengths.len()), body);
    for length in lengths {
        let (value, after) = rest.split_at_checked(usize::try_from(*length).ok()?)?;
        values.push(value.to_vec());
        rest = after;
    }
    (values.len() as u64 == ranks && rest.is_empty()).then_some(values)
}

/// Serves the store at the port that all ranks know, on all interfaces: ranks may be on other hosts.
fn serve(place: &Place, limits: Limits) -> Result<Server, LaunchError> {
    let port = place.address.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0u16);
    let both = Server::bind(("::", port), place.ranks, limits);
    let served = both.or_else(|_| Server::bind(("0.0.0.0", port), place.ranks, limits));
    served.map_err(|error| LaunchError::Serve { address: place.address.clone(), why: error.to_string() })
}

/// What the rank is doing, from the program and the device.
fn describe(pulse: &Pulse) -> String {
    match pulse.probe.as_ref().and_then(|probe| probe()) {
        Some(more) => format!("{}, {more}", pulse.at),
        None => pulse.at.clone(),
    }
}

/// What is told of ranks that have not come.
fn waiting(missing: &[u64], Place { ranks, address, launcher, .. }: &Place, since: Duration) -> String {
    const MOST: usize = 8;
    let named: Vec<String> = missing.iter().take(MOST).map(u64::to_string).collect();
    let more = if missing.len() > MOST { ", ..." } else { "" };
    format!(
        "{} s: {} of the {ranks} ranks that {launcher} names have not come to {address} yet: {}{more}",
        since.as_secs(),
        missing.len(),
        named.join(", ")
    )
}

/// The heartbeat, until the rank leaves.
fn live(mut heart: Heart, shared: &Shared, place: &Place, limits: Limits) {
    let mut failed_at: Option<Instant> = None;
    let mut notice = Notice::new(limits);
    loop {
        if let Some(since) = notice.due() {
            let missing = heart.missing();
            if !missing.is_empty() {
                tracing::warn!("{}", waiting(&missing, place, since));
            }
        }
        let (at, report, is_leaving) = {
            let pulse = shared.lock();
            let is_quiet = |pulse: &mut Pulse| pulse.report.is_none() && !pulse.leaving;
            let pulse = shared.changed.wait_timeout_while(pulse, limits.beat, is_quiet);
            let mut pulse = pulse.unwrap_or_else(PoisonError::into_inner).0;
            (describe(&pulse), pulse.report.take(), pulse.leaving)
        };
        let (failure, stop) = match heart.beat(at, report) {
            Ok(answer) => answer,
            Err(error) => (Some(lost_store(place, &error)), false),
        };
        let mut pulse = shared.lock();
        pulse.stop |= stop;
        if pulse.failure.is_none() && failure.is_some() {
            pulse.failure = failure;
            shared.failed.store(true, Ordering::Relaxed);
            failed_at = Some(Instant::now());
        }
        shared.changed.notify_all();
        if is_leaving {
            drop(pulse);
            return heart.leave();
        }
        if let (Some(since), Some(failure)) = (failed_at, &pulse.failure)
            && since.elapsed() > limits.grace
        {
            // Whether or not anybody reads it, the process ends.
            let rank = place.rank;
            let _ = writeln!(std::io::stderr(), "rank {rank} did not end by itself and is ended; the cause: {failure}");
            signal::exit_now(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_its_value() {
        let check = |lengths: &[u64], body: &[u8], expect: Option<&[&[u8]]>| {
            let values = values_of(&Reply::Values { lengths: lengths.to_vec() }, body, 2);
            assert_eq!(values, expect.map(|values| values.iter().map(|value| value.to_vec()).collect()));
        };
        check(&[1, 2], b"abc", Some(&[b"a", b"bc"]));
        check(&[0, 0], b"", Some(&[b"", b""]));
        for lengths in [&[][..], &[3], &[1, 1], &[1, 3], &[u64::MAX, 3], &[1, 1, 1]] {
            check(lengths, b"abc", None);
        }
        assert_eq!(values_of(&Reply::Done, b"", 2), None);
    }

    #[test]
    fn the_lead_alone_takes_what_all_give() {
        let server = Server::bind("127.0.0.1:0", 3, Limits::default()).unwrap();
        let run = |rank: u64| {
            let place =
                Place { rank, ranks: 3, address: server.address().to_string(), is_ours: true, ..Place::alone() };
            let world = World::join(place, "GPU", Limits::default()).unwrap();
            let mut taken = Vec::new();
            for round in 0..2u8 {
                world.to_lead("spans", vec![round; rank as usize], |value| taken.push(value)).unwrap();
            }
            taken
        };
        let taken = std::thread::scope(|scope| {
            let ranks = [2, 1, 0].map(|rank| scope.spawn(move || run(rank)));
            ranks.map(|rank| rank.join().unwrap())
        });
        let all = [vec![], vec![0], vec![0; 2], vec![], vec![1], vec![1; 2]];
        assert_eq!(taken, [vec![], vec![], all.to_vec()]);
        for key in ["spans/1/1", "spans/1/2"] {
            assert!(server.table().get(key, false, Duration::ZERO).is_err(), "{key} is left");
        }
    }

    #[test]
    fn who_has_not_come_is_named() {
        let place = Place { ranks: 12, address: "node0:29500".into(), launcher: "torchrun", ..Place::alone() };
        let table = Table::new(12);
        table.join(0, 12, "GPU 0").unwrap();
        table.join(2, 12, "GPU 2").unwrap();
        let said = waiting(&table.missing(), &place, Duration::from_secs(21));
        let words = "21 s: 10 of the 12 ranks that torchrun names have not come to node0:29500 yet: ";
        assert_eq!(said, format!("{words}1, 3, 4, 5, 6, 7, 8, 9, ..."));
        (0..12).filter(|rank| ![0, 2].contains(rank)).for_each(|rank| table.join(rank, 12, "").unwrap());
        assert_eq!(table.missing(), [0; 0]);
    }
}
