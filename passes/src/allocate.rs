//! Allocation: every storage gets an offset in its arena, every instruction the waits it needs.
//!
//! What an instruction needs for itself alone, its scratch memory, is a storage like any other: here
//! the target is asked for it, since nothing before needs to know.
//!
//! A storage lives from its first to its last access, in the order of issue; what crosses a section
//! lives through the whole of the repeated one, and parameters, states, readings and the inputs that the target
//! brings ahead of the step that reads them live for ever.
//! Storages that live at one time get disjoint bytes ([`crate::pack`]).
//!
//! Streams run concurrently. So a storage that a stream other than the compute stream touches lives
//! on until a compute instruction is known to follow that access (or until two more instructions
//! were issued on that stream), lest the compute stream wait for bytes that happen to be reused.
//! Where bytes are reused all the same, [`Instruction::after`] says whom to wait for: it is derived
//! from every read-after-write, write-after-read and write-after-write of addresses, without what the
//! order of a stream or an earlier wait implies.
//!
//! A stage of a pipeline holds several microbatches at a time: what a pass of a chunk leaves for a later one
//! has as many copies as there are (`stages`).
//!
//! What one launch works on side by side is placed so ([`mod@adjacent`]).
//!
//! Invariants: offsets are multiples of 256; storages of overlapping lifetimes are disjoint.

mod adjacent;
mod memory;
mod stages;

use crate::lower::casts::merge_casts;
use crate::lower::draft::{Draft, Item, Place, SPACE};
use crate::lower::in_place::share_storages;
use crate::lower::repeat::merge_repeated;
use crate::lower::views::share_parts;
use crate::pack::Life;
pub(crate) use memory::memory_beside;
pub use memory::{memory, memory_over_time};
use shardc_ir::plan::Category;
use shardc_ir::program::{Action, Instruction, Run, Section, Stream};
use shardc_ir::view::is_view;
use shardc_ir::{BufferId, Bytes, DType, Op, PrimaryMap, Program, Target, TensorType};
pub(crate) use stages::{Copies, common, under_way};
use std::collections::{BTreeMap, HashMap};

/// How many later instructions of its stream an access keeps its bytes for.
pub(crate) const WINDOW: usize = 4;

/// A program in which sections of a pipeline's stage that differ by their copies alone stand once: what a prediction of
/// its time and memory needs, and much less to make than all of it.
#[derive(Clone, Debug)]
pub struct Abridged {
    /// The program, whose runs name the first of the sections that are alike.
    pub program: Program,
    /// The copies that live through the loop, of which sections that do not stand here name some.
    pub held: Vec<BufferId>,
}

/// Gives a scheduled draft its scratch memory, addresses and waits.
pub(crate) fn allocate(draft: Draft, target: &dyn Target) -> Program {
    allocated(draft, target, false).program
}

/// As [`allocate`], of which sections that are alike stand once.
pub(crate) fn allocate_abridged(draft: Draft, target: &dyn Target) -> Abridged {
    allocated(draft, target, true)
}

fn allocated(mut draft: Draft, target: &dyn Target, is_abridged: bool) -> Abridged {
    share_parts(&mut draft);
    share_storages(&mut draft);
    merge_casts(&mut draft);
    merge_repeated(&mut draft);
    add_staging(&mut draft, target);
    add_scratch(&mut draft, target);
    let copies = Copies::of(&draft);
    let lives = lifetimes(&draft, &copies);
    let (of_storage, arena) = adjacent::place(&draft, &lives);
    for (id, buffer) in draft.buffers.iter_mut() {
        buffer.offset = of_storage[draft.storage[id].0 as usize] + draft.first[id];
    }
    match &draft.stage {
        Some(stage) => stages::assemble(&draft, stage, Bytes(arena), &copies, is_abridged),
        None => Abridged { program: assemble(draft, Bytes(arena)), held: Vec::new() },
    }
}

/// Gives an input that the target brings ahead the buffer where it waits to be fed.
fn add_staging(draft: &mut Draft, target: &dyn Target) {
    let mut sections = std::mem::take(&mut draft.sections);
    let mut known = BTreeMap::new();
    for item in sections.iter_mut().flatten() {
        let instruction = &mut item.instruction;
        let (Action::Feed { input }, [result]) = (&instruction.action, &instruction.results[..]) else { continue };
        let ty = &draft.buffers[*result].ty;
        if target.brings_ahead(ty.bytes()) {
            let ty = ty.clone();
            let staging = *known.entry(*input).or_insert_with(|| draft.buffer(ty, Category::Buffer));
            instruction.operands = vec![staging];
        }
    }
    draft.sections = sections;
}

/// Collectives share scratch memory where the largest needs up to so many times what another does.
const ALIKE: u64 = 16;

/// Gives every instruction the scratch memory that the target asks for. The collectives of a section, one of which runs
/// at a time, have the same, if none needs much more than the others: kernels beside them would wait for what they let
/// go, and they for kernels.
fn add_scratch(draft: &mut Draft, target: &dyn Target) {
    let mut sections = std::mem::take(&mut draft.sections);
    for section in &mut sections {
        let mut collectives: Vec<(u64, usize)> = Vec::new();
        for (index, item) in section.iter_mut().enumerate() {
            let instruction = &mut item.instruction;
            let types = |ids: &[BufferId]| ids.iter().map(|id| draft.buffers[*id].ty.clone()).collect::<Vec<_>>();
            let (operands, results) = (types(&instruction.operands), types(&instruction.results));
            let bytes = target.scratch(&instruction.action, &operands, &results).0;
            if bytes == 0 || draft.is_view(instruction) {
                continue;
            }
            if instruction.stream == Stream::Communication {
                collectives.push((bytes, index));
            } else {
                instruction.scratch = Some(draft.buffer(TensorType::new(DType::U8, [bytes]), Category::Buffer));
            }
        }
        collectives.sort_unstable();
        while let Some((most, _)) = collectives.last().copied() {
            let shared = draft.buffer(TensorType::new(DType::U8, [most]), Category::Buffer);
            let first = collectives.partition_point(|(bytes, _)| *bytes < most / ALIKE);
            for (_, index) in collectives.drain(first..) {
                section[index].instruction.scratch = Some(shared);
            }
        }
    }
    draft.sections = sections;
}

/// Sections, runs and waits of a program without stages.
fn assemble(draft: Draft, arena: Bytes) -> Program {
    let mut program = Program { rank: draft.rank, ranks: draft.mesh.ranks(), ..Program::default() };
    let (buffers, sections) = drop_unused(draft.buffers, draft.sections, &draft.slots, &draft.readings);
    let renumber = |id: BufferId| sections.1.get(&id).copied().unwrap_or(id);
    let count = sections.0.len();
    for (index, mut instructions) in sections.0.into_iter().enumerate() {
        let place = Place::of(index, count);
        let runs = match place {
            Place::Prologue => 0..1,
            Place::Microbatch(_) => draft.repeats.clone(),
            // With what of the last microbatch is part of it.
            Place::Epilogue if draft.repeats.end < draft.microbatches => draft.repeats.end..draft.microbatches,
            Place::Epilogue => 0..1,
        };
        if instructions.is_empty() && place != Place::LOOP || runs.is_empty() {
            continue;
        }
        find_waits(&buffers, &mut instructions);
        let section = program.sections.push(Section { name: place.name().to_string(), instructions });
        program.order.extend(runs.map(|microbatch| Run { section, microbatch }));
    }
    program.slots = draft.slots;
    program.slots.iter_mut().for_each(|slot| slot.buffer = renumber(slot.buffer));
    program.readings = draft.readings;
    program.readings.iter_mut().for_each(|reading| reading.buffer = renumber(reading.buffer));
    program.arenas = vec![(SPACE, arena)];
    program.buffers = buffers;
    program.groups = draft.groups;
    program.inputs = draft.inputs;
    program
}

type Sections = Vec<Vec<Instruction>>;
type Buffers = PrimaryMap<BufferId, shardc_ir::program::Buffer>;

/// Drops buffers that nothing names, and numbers the rest in their order.
fn drop_unused(
    buffers: Buffers,
    sections: Vec<Vec<Item>>,
    slots: &[shardc_ir::program::Slot],
    readings: &[shardc_ir::program::Reading],
) -> (Buffers, (Sections, HashMap<BufferId, BufferId>)) {
    let instructions = |items: Vec<Item>| items.into_iter().map(|item| item.instruction).collect::<Vec<_>>();
    let mut sections: Sections = sections.into_iter().map(instructions).collect();
    let mut used = vec![false; buffers.len()];
    let mut mark = |id: BufferId| used[id.as_u32() as usize] = true;
    sections.iter().flatten().flat_map(Instruction::buffers).for_each(&mut mark);
    slots.iter().for_each(|slot| mark(slot.buffer));
    readings.iter().for_each(|reading| mark(reading.buffer));
    let (mut kept, mut renumbered) = (Buffers::new(), HashMap::new());
    for (id, buffer) in buffers {
        if used[id.as_u32() as usize] {
            renumbered.insert(id, kept.push(buffer));
        }
    }
    for instruction in sections.iter_mut().flatten() {
        let values = instruction.operands.iter_mut().chain(&mut instruction.results);
        for id in values.chain(&mut instruction.scratch) {
            *id = renumbered[id];
        }
    }
    (kept, (sections, renumbered))
}

/// Per storage, its life; `None` if nothing names it. Instructions count through all sections.
pub(crate) fn lifetimes(draft: &Draft, copies: &Copies) -> Vec<Option<Life>> {
    let mut lives: Vec<Option<Life>> = vec![None; draft.storages as usize];
    let mut touch = |buffer: BufferId, from: usize, to: usize| {
        let bytes = draft.first[buffer] + draft.buffers[buffer].ty.bytes().0;
        let life = &mut lives[draft.storage[buffer].0 as usize];
        let known = life.unwrap_or(Life { start: from, end: to, bytes });
        *life = Some(Life { start: known.start.min(from), end: known.end.max(to), bytes: known.bytes.max(bytes) });
    };
    let mut first = 0;
    let mut repeated = (0, 0);
    for (index, items) in draft.sections.iter().enumerate() {
        let place = Place::of(index, draft.sections.len());
        let ends = access_ends(draft, items);
        for (index, (item, end)) in items.iter().zip(ends).enumerate() {
            for buffer in item.instruction.buffers() {
                touch(buffer, first + index, first + end);
            }
        }
        if let Place::Microbatch(part) = place {
            let begin = if part == 0 { first } else { repeated.0 };
            repeated = (begin, (first + items.len()).saturating_sub(1));
        }
        first += items.len();
    }
    for buffer in draft.slots.iter().map(|slot| slot.buffer).chain(draft.staging()) {
        touch(buffer, 0, first);
    }
    for reading in &draft.readings {
        let storage = draft.storage[reading.buffer].0 as usize;
        let start = lives[storage].map_or(0, |life| life.start);
        lives[storage] = lives[storage].map(|life| Life { start, end: first, ..life });
    }
    if draft.microbatches > 1 {
        through_the_loop(draft, &mut lives, repeated);
    }
    copies.keep(&mut lives, repeated);
    lives
}

/// What crosses a border of the repeated section, and every accumulator, lives through all of it.
fn through_the_loop(draft: &Draft, lives: &mut [Option<Life>], (first, last): (usize, usize)) {
    for life in lives.iter_mut().flatten() {
        let inside = life.start <= last && life.end >= first;
        if inside && (life.start < first || life.end > last) {
            *life = Life { start: life.start.min(first), end: life.end.max(last), ..*life };
        }
    }
    let sections = draft.sections.len();
    for item in draft.sections[1..sections - 1].iter().flatten() {
        if item.instruction.action == Action::Accumulate {
            for result in &item.instruction.results {
                if let Some(life) = &mut lives[draft.storage[*result].0 as usize] {
                    *life = Life { start: life.start.min(first), end: life.end.max(last), ..*life };
                }
            }
        }
    }
}

/// Per instruction of a section, the last instruction up to which the bytes it touches are kept:
/// itself on the compute stream, else the first compute instruction that is known to follow it.
fn access_ends(draft: &Draft, items: &[Item]) -> Vec<usize> {
    let mut ends: Vec<usize> = (0..items.len()).collect();
    let mut writer: HashMap<u32, usize> = HashMap::new();
    // Per stream, the instructions that nothing is known to follow yet.
    let mut open: BTreeMap<Stream, Vec<usize>> = BTreeMap::new();
    for (at, item) in items.iter().enumerate() {
        let stream = item.instruction.stream;
        if draft.is_view(&item.instruction) {
            continue;
        }
        if stream == Stream::Compute {
            for operand in &item.instruction.operands {
                let Some(&from) = writer.get(&draft.storage[*operand].0) else { continue };
                let Some(waiting) = open.get_mut(&items[from].instruction.stream) else { continue };
                waiting.retain(|earlier| {
                    let known = *earlier <= from;
                    if known {
                        ends[*earlier] = at;
                    }
                    !known
                });
            }
        } else {
            let waiting = open.entry(stream).or_default();
            waiting.push(at);
            if waiting.len() > WINDOW {
                ends[waiting.remove(0)] = at;
            }
        }
        for result in &item.instruction.results {
            writer.insert(draft.storage[*result].0, at);
        }
    }
    let last = items.len().saturating_sub(1);
    open.into_values().flatten().for_each(|at| ends[at] = last);
    ends
}

const STREAMS: usize = Stream::ALL.len();

/// Per stream, one more than the index of the last instruction; 0 if there is none.
type Clock = [u32; STREAMS];

/// Who touched a range of bytes last.
#[derive(Clone, Copy, Default)]
struct Touched {
    end: u64,
    write: Clock,
    reads: Clock,
}

/// Fills in `after`.
pub(crate) fn find_waits(buffers: &Buffers, instructions: &mut [Instruction]) {
    let mut ranges: BTreeMap<u64, Touched> = BTreeMap::new();
    let mut of_stream: [Clock; STREAMS] = [[0; STREAMS]; STREAMS];
    let mut finished: Vec<Clock> = Vec::with_capacity(instructions.len());
    for at in 0..instructions.len() {
        let instruction = &instructions[at];
        let stream = instruction.stream as usize;
        let mut needed: Clock = [0; STREAMS];
        let may_view = matches!(instruction.action, Action::Compute(Op::Reshape(_) | Op::Slice(_) | Op::Concat(_)));
        let is_view = may_view && is_view(buffers, instruction);
        let reads = instruction.operands.iter().map(|id| (*id, false));
        let writes = instruction.results.iter().chain(&instruction.scratch).map(|id| (*id, true));
        for (id, writes) in reads.chain(writes).filter(|_| !is_view) {
            let (offset, bytes) = (buffers[id].offset, buffers[id].ty.bytes().0);
            note(&mut ranges, offset, offset + bytes, at, stream, writes, &mut needed);
        }
        let mut clock = of_stream[stream];
        let mut waits: Vec<usize> = (0..STREAMS)
            .filter(|other| *other != stream && needed[*other] > clock[*other])
            .map(|other| needed[other] as usize - 1)
            .collect();
        // The latest first: what it waited for need not be waited for again.
        waits.sort_unstable_by(|a, b| b.cmp(a));
        let mut after = Vec::new();
        for wait in waits {
            let other = instructions[wait].stream as usize;
            if clock[other] as usize > wait {
                continue;
            }
            after.push(wait);
            let seen = finished[wait];
            (0..STREAMS).for_each(|s| clock[s] = clock[s].max(seen[s]));
        }
        after.sort_unstable();
        instructions[at].after = after;
        clock[stream] = at as u32 + 1;
        of_stream[stream] = clock;
        finished.push(clock);
    }
}

/// Collects into `needed` what an access must follow, and records the access.
fn note(
    ranges: &mut BTreeMap<u64, Touched>,
    start: u64,
    end: u64,
    at: usize,
    stream: usize,
    writes: bool,
    needed: &mut Clock,
) {
    if start == end {
        return;
    }
    split(ranges, start);
    split(ranges, end);
    let mark = at as u32 + 1;
    let mut covered = start;
    let mut gaps = Vec::new();
    for (offset, touched) in ranges.range_mut(start..end) {
        if *offset > covered {
            gaps.push((covered, *offset));
        }
        covered = touched.end;
        for (other, needed) in needed.iter_mut().enumerate() {
            let reads = if writes { touched.reads[other] } else { 0 };
            // An instruction does not wait for itself, as where it works in place.
            let last = [touched.write[other], reads].into_iter().filter(|m| *m != mark).max().unwrap_or(0);
            *needed = (*needed).max(last);
        }
        if !writes {
            touched.reads[stream] = mark;
        }
    }
    if writes {
        let inside: Vec<u64> = ranges.range(start..end).map(|(offset, _)| *offset).collect();
        for offset in inside {
            ranges.remove(&offset);
        }
        let mut touched = Touched { end, ..Touched::default() };
        touched.write[stream] = mark;
        ranges.insert(start, touched);
        return;
    }
    if covered < end {
        gaps.push((covered, end));
    }
    for (from, to) in gaps {
        let mut touched = Touched { end: to, ..Touched::default() };
        touched.reads[stream] = mark;
        ranges.insert(from, touched);
    }
}

/// Cuts the range that holds `at` in its inside.
fn split(ranges: &mut BTreeMap<u64, Touched>, at: u64) {
    if let Some((_, touched)) = ranges.range_mut(..at).next_back()
        && touched.end > at
    {
        let right = *touched;
        touched.end = at;
        ranges.insert(at, right);
    }
}
