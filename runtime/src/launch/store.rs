//! The store over TCP: a server with a [`Table`], and a rank's side of it.
//!
//! One thread per connection; two connections per rank, one for the heartbeat and one for values,
//! so that a wait for a value never delays a heartbeat. The server trusts its network, as the stores
//! of other launchers do; shardc's own launcher serves on the loopback interface only.

use super::protocol::{MAGIC, Purpose, Reply, Request, receive, send, send_parts};
use super::{Failure, LaunchError, Limits, Notice, Table};
use std::io::{Error, ErrorKind, Result};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an attempt to connect may take, and how long to wait for the next.
const ATTEMPT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// What the server's threads share.
struct Serving {
    table: Arc<Table>,
    is_closing: AtomicBool,
    connections: Mutex<Vec<TcpStream>>,
}

/// Serves a table until it is dropped.
pub struct Server {
    serving: Arc<Serving>,
    address: SocketAddr,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Listens at an address; port 0 takes a free one.
    ///
    /// # Errors
    /// An address that is taken, or not of this host.
    pub fn bind(address: impl ToSocketAddrs, ranks: u64, limits: Limits) -> Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let table = Arc::new(Table::new(ranks));
        let (is_closing, connections) = (AtomicBool::new(false), Mutex::default());
        let serving = Arc::new(Serving { table, is_closing, connections });
        let (accepting, watching) = (serving.clone(), serving.clone());
        let threads = vec![
            std::thread::spawn(move || accept(&listener, &accepting)),
            std::thread::spawn(move || watch(&watching, limits)),
        ];
        Ok(Self { serving, address, threads })
    }

    /// The table.
    pub fn table(&self) -> &Arc<Table> {
        &self.serving.table
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.is_closing.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts. A listener on all interfaces is reached by the loopback.
        let ip = match self.address.ip() {
            ip if ip.is_unspecified() && ip.is_ipv6() => std::net::Ipv6Addr::LOCALHOST.into(),
            ip if ip.is_unspecified() => std::net::Ipv4Addr::LOCALHOST.into(),
            ip => ip,
        };
        let woken = TcpStream::connect_timeout(&SocketAddr::new(ip, self.address.port()), ATTEMPT);
        let threads = self.threads.drain(..).enumerate();
        // The thread that accepts is left behind where it cannot be woken.
        for (_, thread) in threads.filter(|(index, _)| *index > 0 || woken.is_ok()) {
            let _ = thread.join();
        }
        let connections = self.serving.connections.lock().unwrap_or_else(PoisonError::into_inner);
        for connection in connections.iter() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

fn accept(listener: &TcpListener, serving: &Arc<Serving>) {
    for stream in listener.incoming() {
        if serving.is_closing.load(Ordering::Relaxed) {
            return;
        }
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!("no rank can join: {error}; where files are the limit, raise it (ulimit -n)");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        if let Ok(kept) = stream.try_clone() {
            serving.connections.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
        }
        let serving = serving.clone();
        std::thread::spawn(move || {
            if let Err(error) = serve(stream, &serving) {
                tracing::debug!("a connection of the store ended: {error}");
            }
        });
    }
}

/// Looks for ranks that are silent.
fn watch(serving: &Serving, limits: Limits) {
    let mut last = Instant::now();
    while !serving.is_closing.load(Ordering::Relaxed) {
        std::thread::sleep((limits.silence / 20).min(Duration::from_millis(200)));
        // A process that was itself stopped (Ctrl-Z) has not listened, and says nothing about others.
        if last.elapsed() > limits.silence / 3 {
            serving.table.forgive_silence();
        }
        last = Instant::now();
        serving.table.notice_silence(limits.silence);
    }
}

/// One connection, from its first word to its end.
fn serve(mut stream: TcpStream, serving: &Serving) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ATTEMPT))?;
    let table = &serving.table;
    let (hello, _) = receive(&mut stream)?;
    let Request::Hello { magic, rank, ranks, who, purpose } = hello else {
        return send(&mut stream, &Reply::Refused("it does not say who it is".into()), &[]);
    };
    let joined = match (magic == MAGIC, purpose) {
        (false, _) => Err(format!("it speaks `{magic}`, and this run `{MAGIC}`: all ranks need the same shardc")),
        (true, Purpose::Life) => table.join(rank, ranks, &who),
        (true, Purpose::Values) => table.expect(rank, ranks),
    };
    if let Err(why) = joined {
        return send(&mut stream, &Reply::Refused(why), &[]);
    }
    stream.set_read_timeout(None)?;
    let ended = send(&mut stream, &Reply::Done, &[]).and_then(|()| answer_all(&mut stream, table, rank));
    // A server that closes cuts its connections, which says nothing about the ranks.
    if purpose == Purpose::Life && !serving.is_closing.load(Ordering::Relaxed) {
        table.lost(rank);
    }
    ended
}

fn answer_all(stream: &mut TcpStream, table: &Table, rank: u64) -> Result<()> {
    loop {
        let (request, body) = receive(stream)?;
        let is_last = request == Request::Bye;
        let (reply, parts) = answer(table, rank, request, body);
        send_parts(stream, &reply, &parts)?;
        if is_last {
            return Ok(());
        }
    }
}

/// The reply and the parts of its body, of which all ranks that meet share one copy.
fn answer(table: &Table, rank: u64, request: Request, body: Vec<u8>) -> (Reply, Arc<Vec<Vec<u8>>>) {
    let failed = |error| match error {
        LaunchError::Failed(failure) => (Reply::Failed(*failure), Arc::default()),
        LaunchError::TimedOut { missing, .. } => (Reply::TimedOut { missing }, Arc::default()),
        other => (Reply::Refused(other.to_string()), Arc::default()),
    };
    match request {
        Request::Hello { .. } => (Reply::Refused("it has said who it is".into()), Arc::default()),
        Request::Set { key } => {
            table.set(&key, body);
            (Reply::Done, Arc::default())
        }
        Request::Get { key, take, wait_ms } => match table.get(&key, take, Duration::from_millis(wait_ms)) {
            Ok(value) => (Reply::Done, Arc::new(vec![value])),
            Err(error) => failed(error),
        },
        Request::Remove { prefix } => {
            table.remove(&prefix);
            (Reply::Done, Arc::default())
        }
        Request::Gather { name, wait_ms } => match table.gather(&name, rank, body, Duration::from_millis(wait_ms)) {
            Ok(values) => {
                let lengths = values.iter().map(|value| value.len() as u64).collect();
                (Reply::Values { lengths }, values)
            }
            Err(error) => failed(error),
        },
        Request::Beat { at, failure } => {
            let (failure, stop) = table.beat(rank, &at, failure);
            (Reply::Beat { failure, stop }, Arc::default())
        }
        Request::Bye => {
            table.leave(rank);
            (Reply::Done, Arc::default())
        }
    }
}

/// A rank's connection to the store.
pub struct Client {
    stream: TcpStream,
    rank: u64,
    address: String,
    silence: Duration,
}

impl Client {
    /// Connects, trying again until the limit: rank 0 may come later than the others.
    ///
    /// # Errors
    /// A store that does not answer in time, or refuses this rank.
    pub fn connect(
        address: &str,
        (rank, ranks): (u64, u64),
        who: &str,
        purpose: Purpose,
        limits: Limits,
    ) -> std::result::Result<Self, LaunchError> {
        let (until, mut notice) = (Instant::now() + limits.join, Notice::new(limits));
        let stream = loop {
            match attempt(address) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() + PAUSE > until => {
                    let why = format!("{error}, for {} s", limits.join.as_secs());
                    return Err(LaunchError::Unreachable { address: address.into(), why });
                }
                Err(error) => {
                    if let Some(since) = notice.due() {
                        let (seconds, most) = (since.as_secs(), limits.join.as_secs());
                        tracing::warn!(
                            "{seconds} s: rank 0 does not answer at {address} yet ({error}); tried for {most} s"
                        );
                    }
                    std::thread::sleep(PAUSE);
                }
            }
        };
        let mut client = Self { stream, rank, address: address.into(), silence: limits.silence };
        let hello = Request::Hello { magic: MAGIC.into(), rank, ranks, who: who.into(), purpose };
        client.ask(&hello, &[], Duration::ZERO)?;
        Ok(client)
    }

    /// Sends a request and waits for its reply, for `wait` and the time that a store may be silent.
    ///
    /// # Errors
    /// What the reply says went wrong; a store that is gone.
    pub fn ask(
        &mut self,
        request: &Request,
        body: &[u8],
        wait: Duration,
    ) -> std::result::Result<(Reply, Vec<u8>), LaunchError> {
        let talk = |stream: &mut TcpStream| -> Result<(Reply, Vec<u8>)> {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(wait + self.silence))?;
            stream.set_write_timeout(Some(wait + self.silence))?;
            send(stream, request, body)?;
            receive(stream)
        };
        let (reply, body) = talk(&mut self.stream).map_err(|error| self.lost(&error))?;
        match reply {
            Reply::Refused(why) => Err(LaunchError::Refused { rank: self.rank, why }),
            Reply::Failed(failure) => Err(LaunchError::Failed(Box::new(failure))),
            Reply::TimedOut { missing } => {
                let what = match request {
                    Request::Get { key, .. } => format!("`{key}`"),
                    Request::Gather { name, .. } => format!("`{name}`"),
                    other => format!("{other:?}"),
                };
                Err(LaunchError::TimedOut { what, missing, seconds: wait.as_secs() })
            }
            reply => Ok((reply, body)),
        }
    }

    fn lost(&self, error: &Error) -> LaunchError {
        let why = match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => format!("silent for {} s", self.silence.as_secs()),
            ErrorKind::UnexpectedEof => "the connection was closed".to_string(),
            _ => error.to_string(),
        };
        LaunchError::Unreachable { address: self.address.clone(), why }
    }
}

fn attempt(address: &str) -> Result<TcpStream> {
    let mut last = Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, ATTEMPT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The failure that a lost store is: of the rank, or the launcher, that served it.
pub fn lost_store(place: &super::Place, error: &LaunchError) -> Failure {
    let (who, message) = match place.is_ours {
        true => (format!("pid {}", std::process::id()), format!("the launcher is gone: {error}")),
        false => (format!("serving the store at {}", place.address), format!("it is gone: {error}")),
    };
    let rank = if place.is_ours { place.rank } else { 0 };
    Failure { rank, who, at: String::new(), message, fix: None, code: 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits { join: Duration::from_secs(5), silence: Duration::from_millis(400), ..Limits::default() }
    }

    fn connect(server: &Server, rank: u64, purpose: Purpose) -> std::result::Result<Client, LaunchError> {
        let who = format!("GPU {rank}");
        Client::connect(&server.address().to_string(), (rank, 2), &who, purpose, limits())
    }

    fn beat(client: &mut Client) -> (Option<Failure>, bool) {
        let request = Request::Beat { at: "step 4".into(), failure: None };
        match client.ask(&request, &[], Duration::ZERO).unwrap().0 {
            Reply::Beat { failure, stop } => (failure, stop),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn values_meetings_and_stops_over_the_wire() {
        let server = Server::bind("127.0.0.1:0", 2, limits()).unwrap();
        let wait = Duration::from_secs(10);
        let rank = |rank: u64| {
            let mut client = connect(&server, rank, Purpose::Values).unwrap();
            let request = Request::Gather { name: "ids".into(), wait_ms: 10_000 };
            let (reply, body) = client.ask(&request, &vec![rank as u8; rank as usize + 1], wait).unwrap();
            assert_eq!((reply, body), (Reply::Values { lengths: vec![1, 2] }, vec![0, 1, 1]));
            if rank == 0 {
                client.ask(&Request::Set { key: "big".into() }, &vec![9; 3 << 20], wait).unwrap();
            }
            let get = Request::Get { key: "big".into(), take: false, wait_ms: 10_000 };
            assert_eq!(client.ask(&get, &[], wait).unwrap(), (Reply::Done, vec![9; 3 << 20]));
        };
        std::thread::scope(|scope| {
            scope.spawn(|| rank(0));
            scope.spawn(|| rank(1));
        });
        let mut life = connect(&server, 0, Purpose::Life).unwrap();
        assert_eq!(beat(&mut life), (None, false));
        server.table().stop();
        assert_eq!(beat(&mut life), (None, true));
    }

    #[test]
    fn a_connection_that_breaks_off_is_a_failure() {
        let server = Server::bind("127.0.0.1:0", 2, limits()).unwrap();
        let (mut first, mut second) =
            (connect(&server, 0, Purpose::Life).unwrap(), connect(&server, 1, Purpose::Life).unwrap());
        beat(&mut second);
        drop(second);
        let mut values = connect(&server, 0, Purpose::Values).unwrap();
        let get = Request::Get { key: "never".into(), take: false, wait_ms: 10_000 };
        let error = values.ask(&get, &[], Duration::from_secs(10)).unwrap_err().to_string();
        assert_eq!(error, "rank 1 (GPU 1), at step 4: it is gone: killed, or crashed");
        assert_eq!(beat(&mut first).0.unwrap().to_string(), error);
    }

    #[test]
    fn a_silent_rank_is_a_failure_and_one_that_leaves_is_not() {
        let server = Server::bind("127.0.0.1:0", 2, limits()).unwrap();
        let mut first = connect(&server, 0, Purpose::Life).unwrap();
        first.ask(&Request::Bye, &[], Duration::ZERO).unwrap();
        let _silent = connect(&server, 1, Purpose::Life).unwrap();
        let error = server.table().get("never", false, Duration::from_secs(20)).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 (GPU 1), at its start: not heard of"), "{error}");
    }

    #[test]
    fn strangers_and_dead_stores() {
        let server = Server::bind("127.0.0.1:0", 2, limits()).unwrap();
        let address = server.address().to_string();
        let _first = connect(&server, 0, Purpose::Life).unwrap();
        let error = connect(&server, 0, Purpose::Life).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error, "rank 0 is refused: GPU 0 is rank 0 already");
        for purpose in [Purpose::Life, Purpose::Values] {
            let error = connect(&server, 2, purpose).map(|_| ()).unwrap_err().to_string();
            assert_eq!(error, "rank 2 is refused: it was started as rank 2, but the ranks of this run are below 2");
        }
        let mut second = connect(&server, 1, Purpose::Life).unwrap();
        drop(server);
        let error = second.ask(&Request::Bye, &[], Duration::ZERO).unwrap_err().to_string();
        assert!(error.starts_with(&format!("the run's store at {address} does not answer")), "{error}");
        let limits = Limits { join: Duration::from_millis(300), ..limits() };
        let error = Client::connect(&address, (0, 2), "", Purpose::Life, limits).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("the run's store at {address} does not answer")), "{error}");
    }
}
