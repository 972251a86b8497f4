//! The event loop: instructions start when their stream is free and what they wait for is done, and
//! run at rates that change with what else is under way.
//!
//! Between two events every rate is constant, so time jumps from the end of one instruction to the
//! end of the next. Kernels run slower while their rank communicates, by the share of the device that
//! collectives take; collectives that leave their nodes share the nodes' links. When an instruction ends is found again
//! only where its rate changes.

use super::outline::{Outline, Works};
use super::price::{Work, meeting_seconds, message_seconds};
use super::ranks::Folded;
use super::{RunSpan, SimulateError, Span};
use crate::cluster::Cluster;
use rustc_hash::FxHashMap;
use shardc_ir::program::Stream;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};
use std::rc::Rc;

const STREAMS: usize = Stream::ALL.len();
/// Less work than this is none: rounding of what has been subtracted.
const NOTHING: f64 = 1e-13;

/// What the loop runs on.
pub(super) struct Engine<'a> {
    pub outlines: &'a [Outline],
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
    /// That of the run's section, if there is a run.
    body: Option<usize>,
    entered: f64,
    /// Per stream, how many of the section's instructions are done.
    heads: [usize; STREAMS],
    /// Per stream, whether its head has started, or waits for others.
    is_busy: [bool; STREAMS],
    done: Vec<bool>,
    open: usize,
    spans: Vec<Span>,
    runs: Vec<RunSpan>,
    /// What it does on wires at the moment, and of that between nodes.
    on_wires: u32,
    crossing: u32,
    /// The kernel that it runs.
    kernel: Option<usize>,
    /// How long it computed until it last began or ended a kernel, and when that was.
    computed: (f64, f64),
}

/// An instruction under way, on all lanes that take part in it.
struct Task {
    /// Of the first lane, and of the others: most have none.
    own: Part,
    others: Vec<Part>,
    start: f64,
    /// What was left of it, at what time.
    left: (f64, f64),
    rate: f64,
    /// Whether it needs the links between nodes.
    crosses: bool,
    /// The number of its end, of all that were found; what was found before counts no more.
    version: u64,
}

impl Task {
    fn parts(&self) -> impl Iterator<Item = &Part> {
        std::iter::once(&self.own).chain(&self.others)
    }
}

/// A lane's part of an instruction.
#[derive(Clone, Copy)]
struct Part {
    lane: usize,
    stream: usize,
    index: u32,
    /// When the lane was ready.
    ready: f64,
    /// The seconds that it takes, alone.
    seconds: f64,
    /// How long the lane had computed when it started.
    before: f64,
}

/// When a task ends, if nothing changes.
#[derive(Clone, Copy, PartialEq)]
struct End {
    time: f64,
    task: usize,
    version: u64,
}

impl Eq for End {}

impl PartialOrd for End {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for End {
    fn cmp(&self, other: &Self) -> Ordering {
        self.time.total_cmp(&other.time).then_with(|| (self.task, self.version).cmp(&(other.task, other.version)))
    }
}

/// A place where lanes meet.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Group(usize),
    /// From, to.
    Message(usize, usize),
}

/// When an instruction that was started is done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Done {
    /// It takes no time: others may start now.
    AtOnce,
    Later,
}

struct State {
    lanes: Vec<Lane>,
    /// By number, of which those that are free are used again.
    tasks: Vec<Option<Task>>,
    free: Vec<usize>,
    ends: BinaryHeap<Reverse<End>>,
    /// How many ends were found.
    found: u64,
    /// Per kind of node, how many of its devices ask for links to others, and the share of it that these carry.
    asking: Vec<u64>,
    shares: Vec<f64>,
    /// The tasks that need links between nodes.
    crossing: Vec<usize>,
    /// Who waits at a meeting.
    waiting: FxHashMap<Place, Vec<Part>>,
    now: f64,
    /// By its body, what a run takes of a lane that is alone.
    known: BTreeMap<usize, (f64, Rc<Vec<Span>>)>,
    /// By program and body, the spans of runs that differ.
    different: FxHashMap<(usize, usize), Vec<Rc<Vec<Span>>>>,
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
        // Per kind of node, how much of what its crossing ranks ask for its links carry.
        let kinds = self.folded.classes.first().map_or(0, |class| class.per_node.len());
        let mut state = State {
            lanes: self.folded.classes.iter().map(|_| Lane::new()).collect(),
            tasks: Vec::new(),
            free: Vec::new(),
            ends: BinaryHeap::new(),
            found: 0,
            asking: vec![0; kinds],
            shares: vec![1.0; kinds],
            crossing: Vec::new(),
            waiting: FxHashMap::default(),
            now: 0.0,
            known: BTreeMap::new(),
            different: FxHashMap::default(),
        };
        for lane in 0..state.lanes.len() {
            self.enter(&mut state, lane);
            self.advance(&mut state, lane);
        }
        self.share_links(&mut state);
        let (mut ended, mut moved) = (Vec::new(), Vec::new());
        while state.pass_time(&mut ended) {
            for task in ended.drain(..) {
                self.end(&mut state, &task);
                for Part { lane, stream, index, ready, before, .. } in task.parts().copied() {
                    let (now, own) = (state.now, &mut state.lanes[lane]);
                    let hidden = if stream == Stream::Compute as usize { 0.0 } else { own.computed_by(now) - before };
                    let (start, finish) = (task.start - own.entered, now - own.entered);
                    own.spans.push(Span { index, ready: ready - own.entered, start, finish, hidden });
                    own.complete(index, stream);
                    moved.push(lane);
                }
            }
            moved.sort_unstable();
            moved.dedup();
            for lane in moved.drain(..) {
                self.advance(&mut state, lane);
            }
            self.share_links(&mut state);
        }
        self.check_done(&state)?;
        Ok(state.lanes.into_iter().map(|lane| lane.runs).collect())
    }

    fn outline(&self, lane: usize) -> &Outline {
        &self.outlines[self.folded.classes[lane].program]
    }

    /// Begins a lane's next run, or ends its step. Alone, a lane begins every run with nothing under
    /// way, so equal runs take equal time and are simulated once.
    fn enter(&self, state: &mut State, lane: usize) {
        let outline = self.outline(lane);
        let is_alone = self.folded.classes.len() == 1;
        loop {
            let now = state.now;
            let run = outline.order.get(state.lanes[lane].run);
            state.lanes[lane].body = run.map(|run| outline.body(run));
            let Some(run) = run else { return };
            if let Some((seconds, spans)) = state.known.get(&outline.body(run)).filter(|_| is_alone) {
                let span = RunSpan { run: *run, start: now, finish: now + seconds, spans: spans.clone() };
                state.now += seconds;
                state.lanes[lane].runs.push(span);
                state.lanes[lane].run += 1;
                continue;
            }
            let lane = &mut state.lanes[lane];
            (lane.entered, lane.open, lane.heads) = (now, outline.lines(run).len(), [0; STREAMS]);
            lane.done.clear();
            lane.done.resize(lane.open, false);
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
                while self.start(state, lane, stream) == Some(Done::AtOnce) {
                    moved = true;
                }
            }
            if state.lanes[lane].open == 0 && state.lanes[lane].run < self.outline(lane).order.len() {
                let class = self.folded.classes[lane].program;
                let run = self.outline(lane).order[state.lanes[lane].run];
                let body = self.outline(lane).body(&run);
                let own = &mut state.lanes[lane];
                let known = state.different.entry((class, body)).or_default();
                // The runs of a pipeline repeat themselves, mostly the latest: what is the same is kept once.
                let same = known.iter().rev().find(|other| is_same(other, &own.spans)).cloned();
                let spans = same.unwrap_or_else(|| {
                    known.push(Rc::new(own.spans.clone()));
                    known[known.len() - 1].clone()
                });
                own.spans.clear();
                own.runs.push(RunSpan { run, start: own.entered, finish: state.now, spans: spans.clone() });
                own.run += 1;
                state.known.insert(body, (state.now - own.entered, spans));
                self.enter(state, lane);
                moved = true;
            }
            if !moved {
                return;
            }
        }
    }

    /// Starts the head of a stream, if it is free and the head waits for nothing.
    fn start(&self, state: &mut State, lane: usize, stream: usize) -> Option<Done> {
        let (ready, own) = (state.now, &mut state.lanes[lane]);
        let body = own.body.filter(|_| !own.is_busy[stream])?;
        let class = &self.folded.classes[lane];
        let outline = &self.outlines[class.program];
        let index = *outline.queues[body][stream].get(own.heads[stream])?;
        if !outline.bodies[body][index as usize].after.iter().all(|after| own.done[*after as usize]) {
            return None;
        }
        let cluster = &self.clusters[class.device];
        let part = |seconds: f64| Part { lane, stream, index, ready, seconds, before: 0.0 };
        let (place, seconds, crosses) = match self.works[class.kind][body][index as usize] {
            Work::Local(seconds) if seconds <= 0.0 => {
                own.complete(index, stream);
                return Some(Done::AtOnce);
            }
            Work::Local(seconds) => {
                own.is_busy[stream] = true;
                self.begin(state, part(seconds * class.slowdown), Vec::new(), false);
                return Some(Done::Later);
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
        let part = part(seconds);
        let waiting = state.waiting.entry(place).or_default();
        // A rank is at a meeting once at a time, whatever stream it comes from.
        if waiting.iter().any(|other| other.lane == lane) && !matches!(place, Place::Message(a, b) if a == b) {
            return None;
        }
        own.is_busy[stream] = true;
        let expected = match place {
            Place::Group(meeting) => self.folded.meetings[meeting].classes.len(),
            Place::Message(..) => 2,
        };
        if waiting.len() + 1 == expected {
            let others = state.waiting.remove(&place).unwrap_or_default();
            self.begin(state, part, others, crosses);
        } else {
            waiting.push(part);
        }
        Some(Done::Later)
    }

    /// A task begins on its lanes, which takes as long as it would on the slowest of them.
    fn begin(&self, state: &mut State, own: Part, others: Vec<Part>, crosses: bool) {
        let (now, task) = (state.now, state.free.pop().unwrap_or(state.tasks.len()));
        let mut new = Task { own, others, start: now, left: (NOTHING, now), rate: 1.0, crosses, version: 0 };
        for part in std::iter::once(&mut new.own).chain(&mut new.others) {
            let lane = &mut state.lanes[part.lane];
            part.before = lane.computed_by(now);
            new.left.0 = new.left.0.max(part.seconds);
            if part.stream == Stream::Compute as usize {
                lane.computed = (part.before, now);
                lane.kernel = Some(task);
            }
            self.talk(state, part.lane, part.stream, crosses, true);
        }
        match state.tasks.get_mut(task) {
            Some(place) => *place = Some(new),
            None => state.tasks.push(Some(new)),
        }
        if crosses {
            state.crossing.push(task);
        }
        self.set_rate(state, task);
    }

    /// A task is done.
    fn end(&self, state: &mut State, task: &Task) {
        let now = state.now;
        for Part { lane, stream, .. } in task.parts() {
            if *stream == Stream::Compute as usize {
                let own = &mut state.lanes[*lane];
                (own.computed, own.kernel) = ((own.computed_by(now), now), None);
            }
            self.talk(state, *lane, *stream, task.crosses, false);
        }
    }

    /// A lane begins or ends something; on a wire, which its kernel loses to.
    fn talk(&self, state: &mut State, lane: usize, stream: usize, crosses: bool, begins: bool) {
        let own = &mut state.lanes[lane];
        let step = |count: &mut u32| {
            let before = *count;
            *count = if begins { before + 1 } else { before.saturating_sub(1) };
            (before == 0) != (*count == 0)
        };
        if crosses && step(&mut own.crossing) {
            for (asking, each) in state.asking.iter_mut().zip(&self.folded.classes[lane].per_node) {
                *asking = if begins { *asking + each } else { asking.saturating_sub(*each) };
            }
        }
        if Stream::ALL[stream].is_wire()
            && step(&mut own.on_wires)
            && let Some(kernel) = own.kernel
        {
            self.set_rate(state, kernel);
        }
    }

    /// Shares the links between nodes anew, where more or fewer ask for them.
    fn share_links(&self, state: &mut State) {
        let carried = self.clusters[0].per_node as f64 / self.contention;
        let mut is_other = false;
        for (share, asking) in state.shares.iter_mut().zip(&state.asking) {
            let now = (carried / (*asking).max(1) as f64).min(1.0);
            is_other |= now != std::mem::replace(share, now);
        }
        if is_other {
            for index in 0..state.crossing.len() {
                self.set_rate(state, state.crossing[index]);
            }
        }
    }

    /// Finds how fast a task goes on, and when it ends.
    fn set_rate(&self, state: &mut State, number: usize) {
        let now = state.now;
        let Some(Some(task)) = state.tasks.get_mut(number) else { return };
        let Part { lane, stream, .. } = task.own;
        let rate = if task.crosses {
            let touched = |kind: &usize| task.parts().any(|part| self.folded.classes[part.lane].per_node[*kind] > 0);
            (0..state.shares.len()).filter(touched).map(|kind| state.shares[kind]).fold(1.0, f64::min)
        } else if stream == Stream::Compute as usize && state.lanes[lane].on_wires > 0 {
            let loss = self.clusters[self.folded.classes[lane].device].device.overlap_loss.value;
            1.0 - loss.clamp(0.0, 0.99)
        } else {
            1.0
        };
        if task.version > 0 && rate == task.rate {
            return;
        }
        let (left, at) = task.left;
        task.left = ((left - (now - at) * task.rate).max(0.0), now);
        state.found += 1;
        (task.rate, task.version) = (rate, state.found);
        let end = End { time: now + task.left.0 / rate, task: number, version: task.version };
        state.ends.push(Reverse(end));
    }

    fn check_done(&self, state: &State) -> Result<(), SimulateError> {
        for (index, lane) in state.lanes.iter().enumerate() {
            let outline = self.outline(index);
            let Some(run) = outline.order.get(lane.run) else { continue };
            let queues = outline.queues[outline.body(run)].iter().zip(lane.heads);
            let heads = queues.filter_map(|(queue, done)| queue.get(done));
            let stuck = heads.min().copied().unwrap_or(0);
            let (section, rank) =
                (outline.sections[run.section.as_u32() as usize].0.clone(), self.folded.classes[index].rank);
            return Err(SimulateError::Stuck { rank, section, instruction: stuck as usize });
        }
        Ok(())
    }
}

impl Lane {
    fn new() -> Self {
        Self {
            run: 0,
            body: None,
            entered: 0.0,
            heads: [0; STREAMS],
            is_busy: [false; STREAMS],
            done: Vec::new(),
            open: 0,
            spans: Vec::new(),
            runs: Vec::new(),
            on_wires: 0,
            crossing: 0,
            kernel: None,
            computed: (0.0, 0.0),
        }
    }

    /// How long it has computed.
    fn computed_by(&self, now: f64) -> f64 {
        let (before, at) = self.computed;
        if self.kernel.is_some() { before + (now - at) } else { before }
    }

    fn complete(&mut self, index: u32, stream: usize) {
        self.done[index as usize] = true;
        self.open -= 1;
        self.heads[stream] += 1;
        self.is_busy[stream] = false;
    }
}

impl State {
    /// Goes to the next end of an instruction, and takes what ends there; whether there was one.
    fn pass_time(&mut self, ended: &mut Vec<Task>) -> bool {
        while let Some(Reverse(end)) = self.ends.peek().copied() {
            if !ended.is_empty() && end.time - self.now > NOTHING {
                break;
            }
            self.ends.pop();
            let is_it = |task: &mut Task| task.version == end.version;
            let Some(task) = self.tasks[end.task].take_if(is_it) else { continue };
            if ended.is_empty() {
                self.now = self.now.max(end.time);
            }
            if task.crosses {
                self.crossing.retain(|other| *other != end.task);
            }
            self.free.push(end.task);
            ended.push(task);
        }
        !ended.is_empty()
    }
}
