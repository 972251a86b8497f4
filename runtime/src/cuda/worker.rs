//! A rank's thread: how it starts and meets the others, and what it is asked.

use super::agreement::Agreement;
use super::device::{self, Device, Failure};
use super::executor::{Chosen, MESSAGES, Making, OTHER_FAILED, Rank};
use super::nccl::{Communicator, Meeting};
use super::tune::Tunings;
use super::watch::{self, Watched};
use crate::launch::{LaunchError, World};
use crate::{Feeds, Span};
use shardc_ir::program::{Action, Stream};
use shardc_ir::{BufferId, Program};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;

/// What a rank's thread is asked to do.
pub enum Request {
    Write(BufferId, Vec<u8>),
    Read(BufferId),
    /// Initial values, made in place.
    Make(Vec<Making>),
    /// A step on these inputs, measured or not, before one on those that are known.
    Step(Feeds, bool, Option<Feeds>),
    /// The last step once more, looked into.
    Inspect,
}

/// What it answers.
pub enum Answer {
    Done(Result<(), Failure>),
    Bytes(Result<Vec<u8>, Failure>),
    Readings(Result<(Vec<Vec<u8>>, Vec<Span>), Failure>),
    Found(Result<Option<String>, Failure>),
}

/// One rank's thread.
pub struct Worker {
    requests: Option<Sender<Request>>,
    answers: Receiver<Answer>,
    thread: Option<JoinHandle<()>>,
    /// What it runs.
    pub program: Arc<Program>,
}

impl Worker {
    /// Asks it, unless it ended.
    pub fn ask(&self, request: Request) -> Option<()> {
        self.requests.as_ref()?.send(request).ok()
    }

    /// Waits for its answer, the first of which says how many bytes it took; none where it ended.
    pub fn answer(&self) -> Option<Answer> {
        self.answers.recv().ok()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What every rank's thread needs to start.
pub struct Shared {
    pub binaries: HashMap<String, device::Binary>,
    pub meetings: BTreeMap<Circle, Vec<u8>>,
    pub watched: Arc<watch::Shared>,
    pub tuning: Tunings,
    pub world: Arc<World>,
    pub agreement: Arc<Agreement>,
    pub started: Barrier,
}

/// Lets a rank be watched no longer when it is dropped.
struct Leaves {
    watched: Arc<watch::Shared>,
    rank: u64,
}

impl Drop for Leaves {
    fn drop(&mut self) {
        self.watched.remove(self.rank);
    }
}

/// Starts a rank's thread.
pub fn spawn(program: Arc<Program>, chosen: Chosen, ordinal: usize, shared: Arc<Shared>) -> Worker {
    let (requests, inbox) = channel();
    let (outbox, answers) = channel();
    let own = program.clone();
    let thread = std::thread::spawn(move || {
        let (watched, number) = (shared.watched.clone(), own.rank);
        let mut rank = match start(own, chosen, ordinal, &shared) {
            Ok(rank) => rank,
            Err(error) => {
                shared.tuning.give_up();
                return drop(outbox.send(Answer::Bytes(Err(error))));
            }
        };
        drop(shared);
        // Dropped before the rank, however the thread ends.
        let _leaves = Leaves { watched: watched.clone(), rank: number };
        let taken = rank.device_bytes().0.to_le_bytes().to_vec();
        if outbox.send(Answer::Bytes(Ok(taken))).is_err() {
            return;
        }
        while let Ok(request) = inbox.recv() {
            let mut has_failed = false;
            let answer = match request {
                Request::Write(buffer, bytes) => Answer::Done(rank.write(buffer, &bytes)),
                Request::Read(buffer) => Answer::Bytes(rank.read(buffer)),
                Request::Make(all) => Answer::Done(rank.make(&all)),
                Request::Step(feeds, is_timed, next) => {
                    let next = next.as_ref();
                    let readings = match is_timed {
                        true => rank.timed_step(&feeds, next, &watched.stop),
                        false => rank.step(&feeds, next, &watched.stop).map(|readings| (readings, Vec::new())),
                    };
                    has_failed = readings.is_err();
                    Answer::Readings(readings)
                }
                Request::Inspect => {
                    let found = rank.inspect(&watched.stop);
                    has_failed = found.is_err();
                    Answer::Found(found)
                }
            };
            if has_failed {
                watched.stop.store(true, Ordering::Relaxed);
            }
            let is_heard = outbox.send(answer).is_ok();
            // Told first: giving up may itself hang.
            if has_failed {
                rank.give_up();
            }
            if !is_heard {
                return;
            }
        }
    });
    Worker { requests: Some(requests), answers, thread: Some(thread), program }
}

fn start(program: Arc<Program>, chosen: Chosen, ordinal: usize, shared: &Shared) -> Result<Rank, Failure> {
    let device = Device::new(ordinal);
    // A rank that cannot have its GPU must not leave the others waiting in a communicator.
    if device.is_err() {
        shared.watched.stop.store(true, Ordering::Relaxed);
    }
    shared.started.wait();
    let mut device = device?;
    if shared.watched.stop.load(Ordering::Relaxed) {
        return Err(OTHER_FAILED.to_string());
    }
    let mut communicators = HashMap::new();
    for ((stream, group), meeting) in &shared.meetings {
        let Some(index) = group.iter().position(|rank| *rank == program.rank) else { continue };
        let is_used = |(_, known): &(usize, &Vec<u64>)| *stream == Stream::Communication && *known == group;
        let used = program.groups.iter().enumerate().filter(is_used).map(|(index, _)| index);
        let meeting = Meeting::from_bytes(meeting)?;
        let communicator = Arc::new(Communicator::new(meeting, index, group.len())?);
        for slot in used.chain((*stream == Stream::Messages).then_some(MESSAGES)) {
            communicators.insert(slot, communicator.clone());
        }
    }
    device.load(shared.binaries.iter())?;
    let (number, groups) = (program.rank, communicators.values().cloned().collect());
    let together = (&shared.tuning, &*shared.world, &shared.agreement);
    let rank = Rank::new(program, &chosen, device, communicators, together)?;
    let release = rank.release();
    shared.watched.add(Watched { rank: number, trail: rank.trail.clone(), communicators: groups, release });
    Ok(rank)
}

/// Why ranks do not meet.
pub enum MeetingError {
    Nccl(Failure),
    World(LaunchError),
}

/// Ranks that meet on a stream: they have a communicator for it, since those of several streams may be under way at a time.
pub type Circle = (Stream, Vec<u64>);

/// What every group of several ranks meets by, and all ranks if there are messages between two: made where the group's
/// first rank is, shared where the group has ranks elsewhere.
pub fn meetings(
    programs: &[Arc<Program>],
    has_messages: bool,
    world: &World,
) -> Result<BTreeMap<Circle, Vec<u8>>, MeetingError> {
    let groups = programs.iter().flat_map(|program| program.groups.iter().cloned());
    let groups = groups.filter(|group| group.len() > 1).map(|group| (Stream::Communication, group));
    let mut circles: Vec<Circle> = groups.collect();
    if let Some(program) = programs.first().filter(|_| has_messages) {
        circles.push((Stream::Messages, (0..program.ranks).collect()));
    }
    circles.sort_unstable();
    circles.dedup();
    let name = |(stream, group): &Circle| format!("{}/{group:?}", stream.name());
    let round = world.round("nccl");
    let is_here = |rank: &u64| programs.iter().any(|program| program.rank == *rank);
    let mut meetings = BTreeMap::new();
    // All are given before any is waited for.
    for circle in circles.iter().filter(|(_, group)| is_here(&group[0])) {
        let meeting = Meeting::new().map_err(MeetingError::Nccl)?.bytes();
        if !circle.1.iter().all(is_here) {
            world.set(&format!("{round}/{}", name(circle)), &meeting).map_err(MeetingError::World)?;
        }
        meetings.insert(circle.clone(), meeting);
    }
    for circle in circles.iter().filter(|(_, group)| !is_here(&group[0])) {
        let meeting = world.get(&format!("{round}/{}", name(circle)), false).map_err(MeetingError::World)?;
        meetings.insert(circle.clone(), meeting);
    }
    Ok(meetings)
}

pub fn has_messages(program: &Program) -> bool {
    let message = |action: &Action| matches!(action, Action::Send { .. } | Action::Receive { .. });
    program.instructions().any(|instruction| message(&instruction.action))
}
