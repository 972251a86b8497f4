//! One rank's step, run abstractly over its arenas: what each byte holds, who wrote it, who read it.

use crate::diagnostic::Diagnostics;
use crate::entity::{BufferId, SectionId};
use crate::ops::{Op, OpDef};

use crate::plan::Space;
use crate::program::{Action, Buffer, Instruction, Program, Stream};
use crate::view::is_view;
use std::collections::{BTreeMap, BTreeSet};

const STREAMS: usize = Stream::ALL.len();

/// The last instruction of each stream that is known to be done.
type Clock = [Option<usize>; STREAMS];

/// A run of bytes with one history.
#[derive(Clone, Default)]
struct Segment {
    end: u64,
    /// The buffers whose contents these bytes are: one, and its views.
    holds: Vec<BufferId>,
    /// In this run of the section: who wrote them last, and who read them since, per stream.
    writer: Option<usize>,
    readers: Clock,
}

struct Memory<'a> {
    program: &'a Program,
    arenas: BTreeMap<Space, BTreeMap<u64, Segment>>,
    /// Findings are given once, though sections run more often.
    known: BTreeSet<(String, String)>,
    found: &'a mut Diagnostics,
}

/// Checks reads, writes and hazards of a program whose structure is sound.
pub(super) fn check(program: &Program, found: &mut Diagnostics) {
    let whole = |bytes: u64| BTreeMap::from([(0, Segment { end: bytes, ..Segment::default() })]);
    let arenas = program.arenas.iter().map(|(space, bytes)| (*space, whole(bytes.0))).collect();
    let mut memory = Memory { program, arenas, known: BTreeSet::new(), found };
    memory.seed();
    let clocks: Vec<Vec<Clock>> = program.sections.values().map(|section| clocks(&section.instructions)).collect();
    for run in program.short_order() {
        memory.forget_accesses();
        let instructions = &program.sections[run.section].instructions;
        for (index, instruction) in instructions.iter().enumerate() {
            let clock = &clocks[run.section.as_u32() as usize][index];
            memory.step(run.section, index, instruction, clock, run.microbatch == 0);
        }
    }
    memory.finish();
}

/// Per instruction, what is done before it starts.
fn clocks(instructions: &[Instruction]) -> Vec<Clock> {
    let mut clocks: Vec<Clock> = Vec::with_capacity(instructions.len());
    let mut last: Clock = [None; STREAMS];
    for (index, instruction) in instructions.iter().enumerate() {
        let mut clock: Clock = [None; STREAMS];
        let stream = instruction.stream as usize;
        for before in last[stream].iter().chain(&instruction.after) {
            for (known, more) in clock.iter_mut().zip(&clocks[*before]) {
                *known = (*known).max(*more);
            }
            let of = instructions[*before].stream as usize;
            clock[of] = clock[of].max(Some(*before));
        }
        last[stream] = Some(index);
        clocks.push(clock);
    }
    clocks
}

/// Cuts segments so that one begins at `at`.
fn cut(arena: &mut BTreeMap<u64, Segment>, at: u64) {
    if let Some((start, segment)) = arena.range_mut(..at).next_back()
        && *start < at
        && at < segment.end
    {
        let tail = segment.clone();
        segment.end = at;
        arena.insert(at, tail);
    }
}

impl Memory<'_> {
    fn complain(&mut self, place: String, message: String) {
        if self.known.insert((place.clone(), message.clone())) {
            self.found.push(place, message);
        }
    }

    fn segments(&mut self, buffer: BufferId) -> impl Iterator<Item = &mut Segment> {
        let buffer = &self.program.buffers[buffer];
        let arena = self.arenas.entry(buffer.space).or_default();
        let (start, end) = (buffer.offset, buffer.end());
        if start < end {
            cut(arena, start);
            cut(arena, end);
        }
        arena.range_mut(start..end).map(|(_, segment)| segment)
    }

    /// What is there before the step: slots, and inputs where they are brought ahead.
    fn seed(&mut self) {
        let slots = self.program.slots.iter().map(|slot| (format!("slot \"{}\"", slot.name), slot.buffer));
        for (name, buffer) in slots.chain(staging(self.program)) {
            let other = self.segments(buffer).find_map(|segment| segment.holds.first().copied());
            if let Some(other) = other {
                let place = format!("rank {}, {name}", self.program.rank);
                self.complain(
                    place,
                    format!("{buffer} shares bytes with {other}, which is also there before the step"),
                );
            }
            self.segments(buffer).for_each(|segment| segment.holds = vec![buffer]);
        }
    }

    fn forget_accesses(&mut self) {
        for segment in self.arenas.values_mut().flat_map(BTreeMap::values_mut) {
            (segment.writer, segment.readers) = (None, [None; STREAMS]);
        }
    }

    fn step(&mut self, section: SectionId, index: usize, instruction: &Instruction, clock: &Clock, first: bool) {
        let mut messages = Vec::new();
        let adds = instruction.action == Action::Accumulate;
        let view = is_view(&self.program.buffers, instruction);
        messages.extend(illegal_overlap(self.program, instruction));
        let place = self.program.place(section, index);
        let of = &self.program.sections[section].instructions;
        let stream = instruction.stream as usize;
        let is_before = |earlier: usize| clock[of[earlier].stream as usize] >= Some(earlier);
        // A view touches no byte, so nothing needs to wait for it, nor it for anything.
        let access = (!view).then_some((index, stream));
        for operand in &instruction.operands {
            messages.extend(self.read(*operand, access, &is_before));
        }
        for result in &instruction.results {
            if view {
                self.segments(*result).for_each(|segment| segment.holds.push(*result));
                continue;
            }
            if adds && !first {
                messages.extend(self.read(*result, None, &is_before));
            }
            messages.extend(self.write(*result, index, &is_before));
        }
        if let Some(scratch) = instruction.scratch {
            messages.extend(self.write(scratch, index, &is_before));
        }
        for message in messages {
            self.complain(place.clone(), message);
        }
    }

    /// Reads a buffer; `access` is the instruction and its stream, unless nothing is touched.
    fn read(
        &mut self,
        buffer: BufferId,
        access: Option<(usize, usize)>,
        is_before: &dyn Fn(usize) -> bool,
    ) -> Vec<String> {
        let (mut missing, mut hazard) = (None, None);
        for segment in self.segments(buffer) {
            if !segment.holds.contains(&buffer) {
                missing = missing.or(Some(segment.holds.first().copied()));
            }
            if let Some((index, stream)) = access {
                hazard = hazard.or(segment.writer.filter(|writer| *writer != index && !is_before(*writer)));
                segment.readers[stream] = Some(index);
            }
        }
        let missing = missing.map(|holder| match holder {
            None => format!("reads {buffer}, which nothing has written"),
            Some(other) => format!("reads {buffer}, but {other} was written over it"),
        });
        let hazard =
            hazard.map(|writer| format!("reads {buffer} but does not wait for instruction {writer}, which writes it"));
        missing.into_iter().chain(hazard).collect()
    }

    fn write(&mut self, buffer: BufferId, index: usize, is_before: &dyn Fn(usize) -> bool) -> Option<String> {
        let (mut late, mut segments) = (None, Vec::new());
        for segment in self.segments(buffer) {
            let accesses = segment.readers.iter().flatten().chain(&segment.writer);
            let unordered = accesses.copied().find(|other| *other != index && !is_before(*other));
            late = late.or(unordered);
            segments.push(segment.end);
        }
        let place = &self.program.buffers[buffer];
        let (space, start, end) = (place.space, place.offset, place.end());
        if start < end {
            // One segment takes the place of all.
            let arena = self.arenas.entry(space).or_default();
            for cut in segments.iter().filter(|cut| **cut < end) {
                arena.remove(cut);
            }
            let segment = Segment { end, holds: vec![buffer], writer: Some(index), readers: [None; STREAMS] };
            arena.insert(start, segment);
        }
        late.map(|other| format!("writes {buffer} but does not wait for instruction {other}, which uses its bytes"))
    }

    /// After the step: slots hold their next values, readings their results, and nothing was written where inputs of the
    /// next step come.
    fn finish(&mut self) {
        for slot in &self.program.slots {
            let home = self.program.buffers[slot.buffer].clone();
            let buffers = &self.program.buffers;
            let is_next = |other: &BufferId| {
                let other = &buffers[*other];
                (other.space, other.offset, &other.ty) == (home.space, home.offset, &home.ty)
            };
            let broken = self.segments(slot.buffer).find(|segment| !segment.holds.iter().any(is_next));
            if let Some(holder) = broken.map(|segment| segment.holds.first().copied()) {
                let place = format!("rank {}, slot \"{}\"", self.program.rank, slot.name);
                let what = holder.map_or_else(|| "nothing".to_string(), |other| other.to_string());
                self.complain(place, format!("after the step its bytes hold {what}, not its next value"));
            }
        }
        let readings = self.program.readings.iter();
        let readings = readings.map(|reading| (format!("reading \"{}\"", reading.name), reading.buffer));
        for (name, buffer) in readings.chain(staging(self.program)) {
            if !self.segments(buffer).all(|segment| segment.holds.contains(&buffer)) {
                let place = format!("rank {}, {name}", self.program.rank);
                self.complain(place, format!("after the step {buffer} does not hold it"));
            }
        }
    }
}

/// The staging buffers of inputs, with what findings call them.
fn staging(program: &Program) -> impl Iterator<Item = (String, BufferId)> {
    let name = |input: usize| program.inputs.get(input).map_or("", |input| input.name.as_str());
    program.staging().into_iter().map(move |(input, buffer)| (format!("staged input \"{}\"", name(input)), buffer))
}

/// Why an instruction may not write where it reads, if it does and may not.
fn illegal_overlap(program: &Program, instruction: &Instruction) -> Option<String> {
    let results = &instruction.results;
    if let Some(scratch) = instruction.scratch {
        let own = &program.buffers[scratch];
        let mut values = instruction.operands.iter().chain(results);
        if let Some(other) = values.find(|other| program.buffers[**other].overlaps(own)) {
            return Some(format!("its scratch memory {scratch} shares bytes with {other}"));
        }
    }
    if is_view(&program.buffers, instruction) {
        return None;
    }
    for (index, result) in results.iter().enumerate() {
        let to = &program.buffers[*result];
        if let Some(other) = results[..index].iter().find(|other| program.buffers[**other].overlaps(to)) {
            return Some(format!("writes {other} and {result}, which share bytes"));
        }
        for (position, operand) in instruction.operands.iter().enumerate() {
            let from = &program.buffers[*operand];
            if from.overlaps(to) && !in_place(program, instruction, [from, to], [position, index]) {
                return Some(format!("writes {result} over {operand}, which it still reads"));
            }
        }
    }
    None
}

/// Whether an instruction may write its result `index` over its operand `position`.
fn in_place(
    program: &Program,
    instruction: &Instruction,
    [from, to]: [&Buffer; 2],
    [position, index]: [usize; 2],
) -> bool {
    let own = position == index;
    let equal = from.offset == to.offset && from.ty.bytes() == to.ty.bytes();
    let place = |group: usize| program.groups[group].iter().position(|rank| *rank == program.rank).unwrap_or(0) as u64;
    match &instruction.action {
        // The items run in no order.
        Action::Compute(Op::Each(each))
            if !each.is_one_item([instruction.operands.len(), instruction.results.len()], [position, index]) =>
        {
            false
        }
        Action::Compute(op) => {
            equal && op.may_overwrite(position, instruction.operands.len()) && from.ty.shape == to.ty.shape
        }
        Action::AllReduce { .. } => equal && own,
        Action::AllGather { group } => own && from.offset == to.offset + place(*group) * from.ty.bytes().0,
        Action::ReduceScatter { group, .. } => own && to.offset == from.offset + place(*group) * to.ty.bytes().0,
        _ => false,
    }
}
