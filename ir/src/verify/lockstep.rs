//! The steps of all ranks, run abstractly together: collectives and messages are rendezvous.
//!
//! Each rank runs its sections in order; within one, each stream runs its instructions in order,
//! waiting for `after`. A collective goes on when every rank of its group has reached it, a message
//! when sender and receiver have. If nothing can go on before all is done, the ranks are deadlocked.

use crate::diagnostic::Diagnostics;
use crate::entity::SectionId;
use crate::program::{Action, Instruction, Program, Run, Stream};
use std::collections::BTreeMap;

const STREAMS: usize = Stream::ALL.len();

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Meeting {
    Group(Vec<u64>),
    /// From, to.
    Message(u64, u64),
}

impl Meeting {
    fn ranks(&self) -> Vec<u64> {
        match self {
            Self::Group(ranks) => ranks.clone(),
            Self::Message(from, to) => vec![*from, *to],
        }
    }
}

/// One rank's progress.
struct Rank<'a> {
    program: &'a Program,
    order: Vec<Run>,
    /// The current run.
    run: usize,
    /// Per stream, the instructions of the run's section that are on it, and how many are done.
    queues: [(Vec<usize>, usize); STREAMS],
    done: Vec<bool>,
    /// Per stream, where its head waits.
    waits: [Option<Meeting>; STREAMS],
}

/// Checks that the ranks meet; gives the number of meetings in the step (with equal microbatches
/// after the second left out).
pub(super) fn check(programs: &[Program], found: &mut Diagnostics) -> u64 {
    let names = |program: &Program| {
        let name = |run: &Run| (program.sections[run.section].name.clone(), run.microbatch);
        program.order.iter().map(name).collect::<Vec<_>>()
    };
    // Runs may be left out only where all ranks leave out the same.
    let alike = programs.windows(2).all(|pair| names(&pair[0]) == names(&pair[1]));
    let order = |program: &Program| if alike { program.short_order() } else { program.order.clone() };
    let mut ranks: Vec<Rank<'_>> = programs.iter().map(|program| Rank::new(program, order(program))).collect();
    let mut arrived: BTreeMap<Meeting, BTreeMap<u64, (SectionId, usize, usize)>> = BTreeMap::new();
    let mut awake: Vec<usize> = (0..ranks.len()).collect();
    let mut meetings = 0;
    while let Some(index) = awake.pop() {
        for (meeting, entry) in ranks[index].advance(&arrived) {
            let members = meeting.ranks();
            let entries = arrived.entry(meeting.clone()).or_default();
            entries.insert(index as u64, entry);
            if entries.len() == members.len() {
                let entries = arrived.remove(&meeting).unwrap_or_default();
                check_equal(programs, &meeting, &entries, found);
                meetings += 1;
                for (rank, (_, instruction, stream)) in entries {
                    ranks[rank as usize].complete(instruction, stream);
                    awake.push(rank as usize);
                }
            }
        }
    }
    report_stuck(&ranks, found);
    meetings
}

impl<'a> Rank<'a> {
    fn new(program: &'a Program, order: Vec<Run>) -> Self {
        let mut rank =
            Self { program, order, run: 0, queues: Default::default(), done: Vec::new(), waits: Default::default() };
        rank.enter();
        rank
    }

    fn instructions(&self) -> &'a [Instruction] {
        self.order.get(self.run).map_or(&[], |run| &self.program.sections[run.section].instructions)
    }

    fn enter(&mut self) {
        let instructions = self.instructions();
        self.done = vec![false; instructions.len()];
        self.queues = Default::default();
        for (index, instruction) in instructions.iter().enumerate() {
            self.queues[instruction.stream as usize].0.push(index);
        }
    }

    fn complete(&mut self, instruction: usize, stream: usize) {
        self.done[instruction] = true;
        self.queues[stream].1 += 1;
        self.waits[stream] = None;
    }

    /// Runs as far as possible; gives the meetings it now waits at and had not reached before.
    fn advance(
        &mut self,
        arrived: &BTreeMap<Meeting, BTreeMap<u64, (SectionId, usize, usize)>>,
    ) -> Vec<(Meeting, (SectionId, usize, usize))> {
        let mut reached: Vec<(Meeting, (SectionId, usize, usize))> = Vec::new();
        loop {
            let mut moved = false;
            for stream in 0..STREAMS {
                while let Some(index) = self.queues[stream].0.get(self.queues[stream].1).copied() {
                    let instruction = &self.instructions()[index];
                    if self.waits[stream].is_some() || !instruction.after.iter().all(|after| self.done[*after]) {
                        break;
                    }
                    let Some(meeting) = meeting(self.program, instruction) else {
                        self.complete(index, stream);
                        moved = true;
                        continue;
                    };
                    // A rank is at a meeting once at a time, whatever stream it comes from.
                    let here = arrived.get(&meeting).is_some_and(|entries| entries.contains_key(&self.program.rank));
                    if !here && !reached.iter().any(|(other, _)| *other == meeting) {
                        self.waits[stream] = Some(meeting.clone());
                        reached.push((meeting, (self.order[self.run].section, index, stream)));
                    }
                    break;
                }
            }
            if self.run < self.order.len() && self.done.iter().all(|done| *done) {
                self.run += 1;
                self.enter();
                moved = true;
            }
            if !moved {
                return reached;
            }
        }
    }
}

fn meeting(program: &Program, instruction: &Instruction) -> Option<Meeting> {
    if let Some(group) = instruction.action.group() {
        return Some(Meeting::Group(program.groups[group].clone()));
    }
    match instruction.action {
        Action::Send { peer } => Some(Meeting::Message(program.rank, peer)),
        Action::Receive { peer } => Some(Meeting::Message(peer, program.rank)),
        _ => None,
    }
}

/// What must be equal in all ranks of a meeting: the action and, per buffer, the element type and count.
fn shape_of(program: &Program, instruction: &Instruction) -> String {
    let (name, buffers) = match &instruction.action {
        action @ (Action::AllReduce { reduce, .. } | Action::ReduceScatter { reduce, .. }) => {
            (format!("{} {}", action.name(), reduce.name()), &instruction.operands)
        }
        action if action.group().is_some() => (action.name().to_string(), &instruction.operands),
        Action::Receive { .. } => ("message".to_string(), &instruction.results),
        _ => ("message".to_string(), &instruction.operands),
    };
    let types = buffers.iter().map(|buffer| &program.buffers[*buffer].ty);
    let sizes: Vec<_> = types.map(|ty| format!("{} {}", ty.elements(), ty.dtype)).collect();
    format!("{name} of {}", sizes.join(", "))
}

fn check_equal(
    programs: &[Program],
    meeting: &Meeting,
    entries: &BTreeMap<u64, (SectionId, usize, usize)>,
    found: &mut Diagnostics,
) {
    let shape = |rank: u64, (section, index, _): (SectionId, usize, usize)| {
        let program = &programs[rank as usize];
        shape_of(program, &program.sections[section].instructions[index])
    };
    let mut entries = entries.iter().map(|(rank, entry)| (*rank, *entry));
    let Some((first, entry)) = entries.next() else { return };
    let expected = shape(first, entry);
    for (rank, entry) in entries {
        let actual = shape(rank, entry);
        if actual != expected {
            let place = programs[rank as usize].place(entry.0, entry.1);
            let message =
                format!("meets ranks {:?} with {actual}, but rank {first} comes with {expected}", meeting.ranks());
            if !found.0.iter().any(|known| known.place == place && known.message == message) {
                found.push(place, message);
            }
        }
    }
}

fn report_stuck(ranks: &[Rank<'_>], found: &mut Diagnostics) {
    for rank in ranks.iter().filter(|rank| rank.run < rank.order.len()) {
        let section = rank.order[rank.run].section;
        for (stream, wait) in rank.waits.iter().enumerate() {
            let Some(wait) = wait else { continue };
            let index = rank.queues[stream].0[rank.queues[stream].1];
            let absent = |other: &u64| {
                let waits = &ranks[*other as usize].waits;
                *other != rank.program.rank && !waits.iter().flatten().any(|other| other == wait)
            };
            let absent: Vec<u64> = wait.ranks().into_iter().filter(absent).collect();
            let place = rank.program.place(section, index);
            found.push(place, format!("waits forever: of ranks {:?}, {absent:?} never come", wait.ranks()));
        }
    }
}
