//! One step of all stages of a pipeline together.
//!
//! The ranks of a stage run one program, those of different stages different ones. Each stage is interpreted
//! up to where it meets another: a message, which takes what its sender has shown of a value, with its
//! microbatch, to the receiver; or a sum over the stages, of a number that one has and of zeros. Both ends wait for each
//! other, as ranks do, and messages go from each rank to the one that stands in the other stage where it stands
//! in its own. All messages are on one stream and all sums on one, so the order in which two stages meet is the order in
//! which they issue; and this run is itself an order of all meetings in which no stage waits forever, with streams that
//! run beside each other as well, which wait for less.

use super::interpret::Interpreter;
use super::segment::Segment;
use super::state::{Content, Fact, Stage};
use crate::diagnostic::Diagnostics;
use crate::entity::{EntityRef, SectionId};
use crate::mesh::AxisId;
use crate::plan::Plan;
use crate::program::{Action, Instruction, Program, Run, Stream};
use crate::sharding::ReduceKind;
use std::rc::Rc;

/// A stage on its way through the step.
pub(super) struct Walk<'a> {
    pub interpreter: Interpreter<'a>,
    order: &'a [Run],
    /// The run, and the instruction in its section, that come next.
    run: usize,
    at: usize,
}

/// Where a stage waits for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meeting {
    Send(usize),
    Receive(usize),
    /// Of all stages.
    Sum,
}

impl<'a> Walk<'a> {
    pub fn new(plan: &'a Plan, programs: &'a [Program], axes: &[AxisId]) -> Self {
        let order = programs.first().map_or(&[][..], |program| &program.order);
        Self { interpreter: Interpreter::new(plan, programs, axes), order, run: 0, at: 0 }
    }

    /// Goes on to the next meeting, or to the end; whether there was anything to do.
    fn advance(&mut self) -> bool {
        let (before, segments) = ((self.run, self.at), Rc::clone(&self.interpreter.segments));
        while let Some(run) = self.order.get(self.run) {
            let own = segments.get(&run.section).map_or(&[][..], Vec::as_slice);
            let next = own.iter().find(|segment: &&Segment| segment.range.start == self.at);
            if let Some(segment) = next {
                self.interpreter.run_segment(*run, segment);
                self.at = segment.range.end;
            }
            if self.at < self.instructions(run.section).len() {
                break;
            }
            (self.run, self.at) = (self.run + 1, 0);
        }
        before != (self.run, self.at)
    }

    fn instructions(&self, section: SectionId) -> &'a [Instruction] {
        &self.interpreter.programs[0].sections[section].instructions
    }

    /// The instruction at which it waits.
    fn current(&self) -> Option<&'a Instruction> {
        self.order.get(self.run).and_then(|run| self.instructions(run.section).get(self.at))
    }

    fn place(&self) -> String {
        let section = self.order.get(self.run).map_or(SectionId::new(0), |run| run.section);
        self.interpreter.programs[0].place(section, self.at)
    }

    fn is_done(&self) -> bool {
        self.run >= self.order.len()
    }

    /// Which other stages take part in the instruction at which it waits.
    fn meeting(&self, axes: &[AxisId]) -> Result<Option<Meeting>, String> {
        let Some(instruction) = self.current() else { return Ok(None) };
        let is_message = matches!(instruction.action, Action::Send { .. } | Action::Receive { .. });
        let stream = if is_message { Stream::Messages } else { Stream::Communication };
        if instruction.stream != stream {
            return Err(format!("meets other stages on another stream than `{}`", stream.name()));
        }
        match instruction.action {
            Action::Send { .. } => self.peer(axes, true).map(|stage| Some(Meeting::Send(stage))),
            Action::Receive { .. } => self.peer(axes, false).map(|stage| Some(Meeting::Receive(stage))),
            Action::AllReduce { reduce: ReduceKind::Sum, group } => match &self.interpreter.groups[group] {
                Ok(own) if own == axes => Ok(Some(Meeting::Sum)),
                Ok(_) => Err("combines stages and ranks of one stage at once".to_string()),
                Err(message) => Err(message.clone()),
            },
            _ => Err(format!("{} over stages: they exchange messages and sums alone", instruction.action.name())),
        }
    }

    /// The stage of the other end of a message: on every rank the same, and there the rank that stands where
    /// this one does.
    fn peer(&self, axes: &[AxisId], is_send: bool) -> Result<usize, String> {
        let Some(run) = self.order.get(self.run) else { return Err("the step is over".to_string()) };
        let mut stage = None;
        for program in self.interpreter.programs {
            let to = match program.sections[run.section].instructions[self.at].action {
                Action::Send { peer } | Action::Receive { peer } => peer,
                _ => return Err("passes a value on some ranks of the stage only".to_string()),
            };
            let group = self.interpreter.plan.mesh.group(program.rank, axes);
            let at = group.iter().position(|rank| *rank == to);
            if at.is_none() || *stage.get_or_insert(at) != at {
                let (rank, what) = (program.rank, if is_send { "sends to" } else { "receives from" });
                return Err(format!(
                    "rank {rank} {what} rank {to}, which does not stand in another stage where it does"
                ));
            }
        }
        stage.flatten().ok_or_else(|| "it is a message of no rank".to_string())
    }
}

/// Walks all stages through the step; `axes` are those along which stages lie. What is found is left in the
/// stages, but where they wait.
pub(super) fn walk(stages: &mut [Walk<'_>], axes: &[AxisId], found: &mut Diagnostics) {
    loop {
        let mut moved = false;
        for stage in stages.iter_mut() {
            moved |= stage.advance();
        }
        let mut meetings = Vec::with_capacity(stages.len());
        for stage in stages.iter() {
            match stage.meeting(axes) {
                Ok(meeting) => meetings.push(meeting),
                Err(message) => return found.push(stage.place(), message),
            }
        }
        for to in 0..stages.len() {
            let Some(Meeting::Receive(from)) = meetings[to] else { continue };
            if meetings.get(from) == Some(&Some(Meeting::Send(to))) {
                pass(stages, from, to, found);
                (meetings[from], meetings[to], moved) = (None, None, true);
            }
        }
        if stages.len() > 1 && meetings.iter().all(|meeting| *meeting == Some(Meeting::Sum)) {
            add(stages, found);
            moved = true;
        }
        if !moved {
            break;
        }
    }
    for stage in stages.iter().filter(|stage| !stage.is_done()) {
        let what = match stage.meeting(axes) {
            Ok(Some(Meeting::Send(to))) => format!("stage {to} never receives"),
            Ok(Some(Meeting::Receive(from))) => format!("stage {from} never sends"),
            _ => "not every stage comes to the sum".to_string(),
        };
        found.push(stage.place(), format!("waits forever: {what}"));
    }
}

/// A message from one stage to another.
fn pass(stages: &mut [Walk<'_>], from: usize, to: usize, found: &mut Diagnostics) {
    let (Some(send), Some(receive)) = (stages[from].current(), stages[to].current()) else { return };
    let ([sent], [got]) = (&send.operands[..], &receive.results[..]) else {
        return found.push(stages[from].place(), "is a message of other than one buffer");
    };
    let ty = |stage: usize, buffer| &stages[stage].interpreter.programs[0].buffers[buffer].ty;
    let (ours, theirs) = (ty(from, *sent), ty(to, *got));
    let content = match &stages[from].interpreter.contents[sent.index()] {
        _ if ours != theirs => Err(format!("sends {ours}, and stage {to} receives {theirs}")),
        Content::Nothing => Err(format!("sends {sent}, of which nothing is known")),
        content => Ok(content.clone()),
    };
    let content = content.unwrap_or_else(|message| {
        found.push(stages[from].place(), message);
        Content::Refuted
    });
    let receiver = &mut stages[to].interpreter;
    receiver.contents[got.index()] = content;
    receiver.note_stored(*got, false);
    for stage in [from, to] {
        stages[stage].interpreter.facts.conversions += usize::from(is_first(&stages[stage]));
        stages[stage].at += 1;
    }
}

/// Whether a section runs for the first time.
fn is_first(stage: &Walk<'_>) -> bool {
    let section = stage.order.get(stage.run).map(|run| run.section);
    !stage.order[..stage.run].iter().any(|run| Some(run.section) == section)
}

/// A sum over all stages.
fn add(stages: &mut [Walk<'_>], found: &mut Diagnostics) {
    let all: Vec<&Instruction> = stages.iter().filter_map(Walk::current).collect();
    let count = all.first().map_or(0, |instruction| instruction.operands.len());
    if all.iter().any(|instruction| (instruction.operands.len(), instruction.results.len()) != (count, count)) {
        return found.push(stages[0].place(), "adds other numbers of values than another stage");
    }
    for index in 0..count {
        let contents: Vec<&Content> = stages
            .iter()
            .zip(&all)
            .map(|(stage, instruction)| &stage.interpreter.contents[instruction.operands[index].index()])
            .collect();
        let made = match contents.contains(&&Content::Refuted) {
            true => Content::Refuted,
            false => {
                let facts: Vec<_> = contents.iter().map(|content| content.facts()).collect();
                match sum_over_stages(stages[0].interpreter.plan, &facts) {
                    Ok(fact) => vec![fact].into(),
                    Err(message) => {
                        found.push(stages[0].place(), format!("adds value {index} of all stages: {message}"));
                        Content::Refuted
                    }
                }
            }
        };
        for (stage, instruction) in stages.iter_mut().zip(&all) {
            let result = instruction.results[index];
            stage.interpreter.contents[result.index()] = made.clone();
            stage.interpreter.note_stored(result, false);
        }
    }
    for stage in stages {
        stage.interpreter.facts.conversions += 1;
        stage.at += 1;
    }
}

/// What the sum over stages of what each of them holds is: what one holds, if all others hold zeros.
///
/// # Errors
/// What it is instead, as a clause.
fn sum_over_stages(plan: &Plan, all: &[&[Fact]]) -> Result<Fact, String> {
    let text = |held: &[Fact]| held.first().map_or("what is not known".to_string(), |fact| fact.text(plan));
    let is_zero = |held: &[Fact]| held.iter().any(|fact| fact.stage == Stage::Empty);
    let is_whole = |fact: &&Fact| fact.stage == Stage::Ready && fact.of.is_none();
    let mut fact = None;
    for (stage, held) in all.iter().enumerate().filter(|(_, held)| !is_zero(held)) {
        let own = held.iter().find(is_whole);
        let own = own.ok_or_else(|| format!("stage {stage} adds {}, which is no number of its own", text(held)))?;
        if fact.replace(own).is_some() {
            let texts: Vec<String> = all.iter().map(|held| text(held)).collect();
            return Err(format!("no value of the graph is the sum of what all stages hold: {}", texts.join("; ")));
        }
    }
    fact.cloned().ok_or_else(|| "all stages add zeros".to_string())
}
