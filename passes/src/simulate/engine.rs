//! The event loop: instructions start when their stream is free and what they wait for is done, and
//! run at rates that change with what else is under way.
//!
//! Between two events every rate is constant, so time jumps from the end of one instruction to the
//! end of the next. Kernels run slower while their rank communicates, by the share of the device that
//! collectives take; collectives that leave their nodes share the nodes' links.

use super::kinds::Works;
use super::price::{Work, meeting_seconds, message_seconds};
use super::ranks::Folded;
use super::{RunSpan, SimulateError, Span};
use crate::cluster::Cluster;
use shardc_ir::program::Stream;
use shardc_ir::{Program, SectionId};
use std::collections::BTreeMap;
use std::rc::Rc;

const STREAMS: usize = Stream::ALL.len();
/// Less work than this is none: rounding of what has been subtracted.
const NOTHING: f64 = 1e-13;

/// What the loop runs on.
pub(super) struct Engine<'a> {
    pub programs: &'a [Program],
    /// Per kind of ranks.
    pub works: &'a [Works],
    pub folded: &'a Folded,
    /// The cluster, as if all devices were of each kind.
    pub clusters: &'a [Cluster],
    /// How many times more than they carry a node's devices may ask of its links to others.
    pub contention: f64,
}

/// One class of ranks on its way through the step.
struct Lane {
    run: usize,
    entered: f64,
    /// Per stream, the instructions of the section, and how many of them are done.
    queues: [(Vec<u32>, usize); STREAMS],
    /// Per stream, whether its head has started, or waits for others.
    is_busy: [bool; STREAMS],
    done: Vec<bool>,
    open: usize,
    spans: Vec<Span>,
    runs: Vec<RunSpan>,
}

/// An instruction under way, on all lanes that take part in it.
struct Task {
    /// The lane, the stream, the instruction, when the lane was ready, and how long it also computed.
    parts: Vec<(usize, usize, u32, f64, f64)>,
    start: f64,
    left: f64,
    rate: f64,
    /// Whether it needs the links between nodes.
    crosses: bool,
}

/// Who waits at a meeting: the lane, the stream, the instruction, since when, and the seconds it takes.
type Waiting = Vec<(usize, usize, u32, f64, f64)>;

/// A place where lanes meet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Group(usize),
    /// From, to.
    Message(usize, usize),
}

struct State {
    lanes: Vec<Lane>,
    tasks: Vec<Task>,
    waiting: BTreeMap<Place, Waiting>,
    now: f64,
    /// Runs of a section that all lanes have made alike.
    known: BTreeMap<SectionId, (f64, Rc<Vec<Span>>)>,
    /// Per program, the spans of runs that differ.
    different: Vec<Vec<Rc<Vec<Span>>>>,
}

/// Seconds below which two times are the same: sums of the same numbers in another order.
pub(super) const SAME: f64 = 1e-9;

/// Whether two runs took the same time in every instruction.
fn is_same(a: &[Span], b: &[Span]) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() < SAME;
    let same = |(a, b): (&Span, &Span)| {
        a.index == b.index
            && near(a.ready, b.ready)
            && near(a.start, b.start)
            && near(a.finish, b.finish)
            && near(a.hidden, b.hidden)
    };
    a.len() == b.len() && a.iter().zip(b).all(same)
}

impl Engine<'_> {
    /// Runs the step; gives the runs of each class.
    pub fn run(&self) -> Result<Vec<Vec<RunSpan>>, SimulateError> {
        let mut state = State {
            lanes: self.folded.classes.iter().map(|_| Lane::new()).collect(),
            tasks: Vec::new(),
            waiting: BTreeMap::new(),
            now: 0.0,
            known: BTreeMap::new(),
            different: vec![Vec::new(); self.programs.len()],
        };
        for lane in 0..state.lanes.len() {
            self.enter(&mut state, lane);
            self.advance(&mut state, lane);
        }
        while !state.tasks.is_empty() {
            self.set_rates(&mut state);
            let ended = state.pass_time();
            let mut moved: Vec<usize> = Vec::new();
            for task in ended {
                for (lane, stream, index, ready, hidden) in task.parts {
                    let entered = state.lanes[lane].entered;
                    let (start, finish) = (task.start - entered, state.now - entered);
                    state.lanes[lane].spans.push(Span { index, ready: ready - entered, start, finish, hidden });
                    state.lanes[lane].complete(index, stream);
                    moved.push(lane);
                }
            }
            moved.sort_unstable();
            moved.dedup();
            for lane in moved {
                self.advance(&mut state, lane);
            }
        }
        self.check_done(&state)?;
        Ok(state.lanes.into_iter().map(|lane| lane.runs).collect())
    }

    fn program(&self, lane: usize) -> &Program {
        &self.programs[self.folded.classes[lane].program]
    }

    /// Begins a lane's next run, or ends its step. Alone, a lane begins every run with nothing under
    /// way, so equal runs take equal time and are simulated once.
    fn enter(&self, state: &mut State, lane: usize) {
        let program = self.program(lane);
        let is_alone = self.folded.classes.len() == 1;
        loop {
            let now = state.now;
            let Some(run) = program.order.get(state.lanes[lane].run) else { return };
            if let Some((seconds, spans)) = state.known.get(&run.section).filter(|_| is_alone) {
                let span = RunSpan { run: *run, start: now, finish: now + seconds, spans: spans.clone() };
                state.now += seconds;
                state.lanes[lane].runs.push(span);
                state.lanes[lane].run += 1;
                continue;
            }
            let instructions = &program.sections[run.section].instructions;
            let lane = &mut state.lanes[lane];
            lane.entered = now;
            lane.done = vec![false; instructions.len()];
            lane.open = instructions.len();
            lane.queues = Default::default();
            for (index, instruction) in instructions.iter().enumerate() {
                lane.queues[instruction.stream as usize].0.push(index as u32);
            }
            if lane.open > 0 {
                return;
            }
            let finish = RunSpan { run: *run, start: now, finish: now, spans: Rc::default() };
            lane.runs.push(finish);
            lane.run += 1;
        }
    }

    /// Starts whatever a lane can start now.
    fn advance(&self, state: &mut State, lane: usize) {
        loop {
            let mut moved = false;
            for stream in 0..STREAMS {
                while self.start(state, lane, stream) {
                    moved = true;
                }
            }
            if state.lanes[lane].open == 0 && state.lanes[lane].run < self.program(lane).order.len() {
                let class = self.folded.classes[lane].program;
                let run = self.program(lane).order[state.lanes[lane].run];
                let own = &mut state.lanes[lane];
                let (spans, known) = (std::mem::take(&mut own.spans), &mut state.different[class]);
                // The runs of a pipeline repeat themselves: what is the same is kept once.
                let same = known.iter().find(|other| is_same(other, &spans)).cloned();
                let spans = same.unwrap_or_else(|| {
                    known.push(Rc::new(spans));
                    known[known.len() - 1].clone()
                });
                own.runs.push(RunSpan { run, start: own.entered, finish: state.now, spans: spans.clone() });
                own.run += 1;
                state.known.insert(run.section, (state.now - own.entered, spans));
                self.enter(state, lane);
                moved = true;
            }
            if !moved {
                return;
            }
        }
    }

    /// Starts the head of a stream, if it is free and the head waits for nothing.
    fn start(&self, state: &mut State, lane: usize, stream: usize) -> bool {
        let own = &mut state.lanes[lane];
        let Some(index) = own.queues[stream].0.get(own.queues[stream].1).copied() else { return false };
        let class = &self.folded.classes[lane];
        let section = self.programs[class.program].order[own.run].section;
        let instruction = &self.programs[class.program].sections[section].instructions[index as usize];
        if own.is_busy[stream] || !instruction.after.iter().all(|after| own.done[*after]) {
            return false;
        }
        let cluster = &self.clusters[class.device];
        let (place, seconds, crosses) = match self.works[class.kind][section.as_u32() as usize][index as usize] {
            Work::Local(seconds) if seconds <= 0.0 => {
                own.complete(index, stream);
                return true;
            }
            Work::Local(seconds) => {
                own.is_busy[stream] = true;
                let parts = vec![(lane, stream, index, state.now, 0.0)];
                let left = seconds * class.slowdown;
                state.tasks.push(Task { parts, start: state.now, left, rate: 1.0, crosses: false });
                return true;
            }
            Work::Meet { group, collective, bytes } => {
                let meeting = class.groups[group];
                let shape = self.folded.meetings[meeting].group;
                let seconds = meeting_seconds(collective, bytes, shape, cluster);
                (Place::Group(meeting), seconds, shape.across > 1)
            }
            Work::Message { peer, is_sender, bytes } => {
                let (other, distance) = class.peers[&peer];
                let place = if is_sender { Place::Message(lane, other) } else { Place::Message(other, lane) };
                (place, message_seconds(bytes, distance, cluster), distance > 0)
            }
        };
        let waiting = state.waiting.entry(place).or_default();
        // A rank is at a meeting once at a time, whatever stream it comes from.
        if waiting.iter().any(|(other, ..)| *other == lane) && !matches!(place, Place::Message(a, b) if a == b) {
            return false;
        }
        own.is_busy[stream] = true;
        waiting.push((lane, stream, index, state.now, seconds));
        let expected = match place {
            Place::Group(meeting) => self.folded.meetings[meeting].classes.len(),
            Place::Message(..) => 2,
        };
        if waiting.len() == expected {
            let waiting = state.waiting.remove(&place).unwrap_or_default();
            let left = waiting.iter().map(|(.., seconds)| *seconds).fold(NOTHING, f64::max);
            let parts = waiting.into_iter().map(|(lane, stream, index, ready, _)| (lane, stream, index, ready, 0.0));
            let parts: Vec<_> = parts.collect();
            state.tasks.push(Task { parts, start: state.now, left, rate: 1.0, crosses });
        }
        true
    }

    fn set_rates(&self, state: &mut State) {
        let mut communicates = vec![false; state.lanes.len()];
        let mut crossing = vec![false; state.lanes.len()];
        for task in &state.tasks {
            for (lane, stream, ..) in &task.parts {
                communicates[*lane] |= Stream::ALL[*stream].is_wire();
                crossing[*lane] |= task.crosses;
            }
        }
        let per_node = self.clusters[0].per_node;
        let loss = |lane: usize| self.clusters[self.folded.classes[lane].device].device.overlap_loss.value;
        // Per kind of node, how much of what its crossing ranks ask for its links carry.
        let kinds = self.folded.classes.first().map_or(0, |class| class.per_node.len());
        let share = |kind: usize| {
            let lanes = self.folded.classes.iter().zip(&crossing).filter(|(_, crosses)| **crosses);
            let asking: u64 = lanes.map(|(class, _)| class.per_node[kind]).sum();
            let carried = per_node as f64 / self.contention;
            (carried / asking.max(1) as f64).min(1.0)
        };
        let shares: Vec<f64> = (0..kinds).map(share).collect();
        for task in &mut state.tasks {
            let (lane, stream, ..) = task.parts[0];
            task.rate = if task.crosses {
                let touched =
                    |kind: &usize| task.parts.iter().any(|(lane, ..)| self.folded.classes[*lane].per_node[*kind] > 0);
                (0..kinds).filter(touched).map(|kind| shares[kind]).fold(1.0, f64::min)
            } else if stream == Stream::Compute as usize && communicates[lane] {
                1.0 - loss(lane).clamp(0.0, 0.99)
            } else {
                1.0
            };
        }
    }

    fn check_done(&self, state: &State) -> Result<(), SimulateError> {
        for (index, lane) in state.lanes.iter().enumerate() {
            let program = self.program(index);
            let Some(run) = program.order.get(lane.run) else { continue };
            let heads = lane.queues.iter().filter_map(|(queue, done)| queue.get(*done));
            let stuck = heads.min().copied().unwrap_or(0);
            let (section, rank) = (program.sections[run.section].name.clone(), self.folded.classes[index].rank);
            return Err(SimulateError::Stuck { rank, section, instruction: stuck as usize });
        }
        Ok(())
    }
}

impl Lane {
    fn new() -> Self {
        Self {
            run: 0,
            entered: 0.0,
            queues: Default::default(),
            is_busy: [false; STREAMS],
            done: Vec::new(),
            open: 0,
            spans: Vec::new(),
            runs: Vec::new(),
        }
    }

    fn complete(&mut self, index: u32, stream: usize) {
        self.done[index as usize] = true;
        self.open -= 1;
        self.queues[stream].1 += 1;
        self.is_busy[stream] = false;
    }
}

impl State {
    /// Goes to the next end of an instruction; gives what ends there.
    fn pass_time(&mut self) -> Vec<Task> {
        let step = self.tasks.iter().map(|task| task.left / task.rate).fold(f64::INFINITY, f64::min);
        self.now += step;
        let mut computes = vec![false; self.lanes.len()];
        for (lane, stream, ..) in self.tasks.iter().flat_map(|task| &task.parts) {
            computes[*lane] |= *stream == Stream::Compute as usize;
        }
        for task in &mut self.tasks {
            task.left -= step * task.rate;
            for (lane, stream, .., hidden) in &mut task.parts {
                if *stream != Stream::Compute as usize && computes[*lane] {
                    *hidden += step;
                }
            }
        }
        let (ended, rest) = std::mem::take(&mut self.tasks).into_iter().partition(|task| task.left <= NOTHING);
        self.tasks = rest;
        ended
    }
}
