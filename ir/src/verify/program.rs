//! The verifier of the programs of all ranks of one step.
//!
//! Invariants of one program (here):
//! * every reference (buffer, group, input, section, instruction) exists; `after` points back;
//! * a buffer begins at a multiple of 256 and lies inside its arena; slots do not overlap;
//! * an instruction's buffers have the types its action needs; a compute instruction's are what the
//!   operation infers from its operands, and it is no leaf; scratch memory is bytes, and nothing else;
//! * no two slots, and no two readings, have one name;
//! * the part of a slot or a feed is inside its global type, and fits in its buffer.
//!
//! Of its execution (`memory`): a section starts when everything of the run before it is done, and
//!
//! * what is read was written, and nothing else was written over it since; views (a reshape, a
//!   contiguous slice) share their operand's bytes, and updates in place are elementwise;
//! * two instructions of different streams that touch the same bytes, of which one writes, are
//!   ordered by `after`;
//! * after the step every slot holds its next value, and every reading its result.
//!
//! Of all ranks together (`lockstep`): each rank of a group enters the group's collectives in the
//! same order with the same sizes, and every send meets its receive, so that no rank waits forever.
//!
//! Of what they have in common (`agreement`): the ranks agree on inputs, slots and readings; the parts
//! of a slot that they hold cover it; each rank is fed a part of every input, and the parts that all
//! are fed in the microbatches of a step cover it.

use super::plan::VerifiedPlan;
use super::translation::{self, TranslationFacts};
use super::{agreement, lockstep, memory};
use crate::diagnostic::Diagnostics;
use crate::entity::BufferId;
use crate::ops::OpDef;
use crate::plan::Space;
use crate::program::{ALIGNMENT, Action, Instruction, Program};
use crate::types::{DType, TensorType};
use crate::units::Bytes;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

/// What is known of programs that were verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramFacts {
    /// Per memory space, the bytes of the largest arena of any rank.
    pub arenas: BTreeMap<Space, Bytes>,
    /// Collectives and messages that the ranks enter in one step, each counted once.
    pub rendezvous: u64,
    /// What was shown of how they follow from a plan, if they were verified with it ([`step`]).
    pub translation: TranslationFacts,
}

/// The programs of all ranks of a step, which [`program`] found valid; rank `i` is at index `i`.
#[derive(Clone, Debug)]
pub struct VerifiedPrograms<'a> {
    programs: Cow<'a, [Program]>,
    facts: ProgramFacts,
}

impl VerifiedPrograms<'_> {
    /// What the verifier found out.
    pub fn facts(&self) -> &ProgramFacts {
        &self.facts
    }
}

impl Deref for VerifiedPrograms<'_> {
    type Target = [Program];
    fn deref(&self) -> &[Program] {
        &self.programs
    }
}

/// Verifies the programs of all ranks of a step, in the order of the ranks, given or lent.
///
/// # Errors
/// Every violation of the invariants. Execution is looked at only if each program is sound by
/// itself.
pub fn program<'a>(programs: impl Into<Cow<'a, [Program]>>) -> Result<VerifiedPrograms<'a>, Diagnostics> {
    let programs = programs.into();
    let facts = check(&programs)?;
    Ok(VerifiedPrograms { programs, facts })
}

/// Verifies the programs of all ranks of a plan's step: that they can run ([`program()`]), and that they
/// compute what the plan's graph computes ([`translation()`](super::translation())).
///
/// # Errors
/// Every violation of the invariants, then every instruction that cannot be justified.
pub fn step<'a>(
    plan: &VerifiedPlan<'_>,
    programs: impl Into<Cow<'a, [Program]>>,
) -> Result<VerifiedPrograms<'a>, Diagnostics> {
    let mut verified = program(programs)?;
    verified.facts.translation = translation::check(plan, &verified)?;
    Ok(verified)
}

/// What concerns each program alone: its structure and, if that is sound, its memory. Findings of memory
/// are left in `found`.
pub(super) fn check_each(programs: &[Program], found: &mut Diagnostics) -> Result<(), Diagnostics> {
    programs.iter().for_each(|program| check_structure(program, found));
    std::mem::take(found).finish(())?;
    programs.iter().for_each(|program| memory::check(program, found));
    Ok(())
}

fn check(programs: &[Program]) -> Result<ProgramFacts, Diagnostics> {
    let mut found = Diagnostics::default();
    for (index, program) in programs.iter().enumerate() {
        if program.rank != index as u64 || program.ranks != programs.len() as u64 {
            let said = format!("says it is rank {} of {}", program.rank, program.ranks);
            let message = format!("{said}; it is program {index} of {}", programs.len());
            found.push(format!("rank {}", program.rank), message);
        }
    }
    check_each(programs, &mut found)?;
    agreement::check(programs, &mut found);
    let rendezvous = lockstep::check(programs, &mut found);
    let mut facts = ProgramFacts { rendezvous, ..ProgramFacts::default() };
    for (space, bytes) in programs.iter().flat_map(|program| &program.arenas) {
        let largest = facts.arenas.entry(*space).or_default();
        *largest = (*largest).max(*bytes);
    }
    found.finish(facts)
}

fn check_structure(program: &Program, found: &mut Diagnostics) {
    let rank = program.rank;
    let mut spaces = BTreeSet::new();
    for (space, _) in program.arenas.iter().filter(|(space, _)| !spaces.insert(*space)) {
        found.push(format!("rank {rank}"), format!("has two {} arenas", space.name()));
    }
    for (id, buffer) in &program.buffers {
        let place = format!("rank {rank}, {id}");
        let arena = program.arena(buffer.space);
        if !buffer.offset.is_multiple_of(ALIGNMENT) {
            found.push(&place, format!("begins at {}, which is no multiple of {ALIGNMENT}", buffer.offset));
        }
        let end = buffer.offset.checked_add(buffer.ty.bytes().0);
        if end.is_none_or(|end| end > arena.0) {
            let (bytes, space) = (buffer.ty.bytes().0, buffer.space.name());
            let begin = buffer.offset;
            found.push(&place, format!("{bytes} bytes at {begin} do not fit the {space} arena of {} bytes", arena.0));
        }
    }
    check_groups(program, found);
    check_interface(program, found);
    let scratch: BTreeSet<BufferId> = program.instructions().filter_map(|instruction| instruction.scratch).collect();
    let staging: BTreeSet<BufferId> = program.staging().into_iter().map(|(_, buffer)| buffer).collect();
    let kept =
        program.slots.iter().map(|slot| slot.buffer).chain(program.readings.iter().map(|reading| reading.buffer));
    for buffer in kept.filter(|buffer| scratch.contains(buffer)) {
        found.push(format!("rank {rank}, {buffer}"), "is scratch memory, which holds no value");
    }
    for (section, body) in &program.sections {
        for (index, instruction) in body.instructions.iter().enumerate() {
            let checked = check_references(program, instruction, index)
                .and_then(|()| check_scratch(program, instruction, &scratch))
                .and_then(|()| check_staging(instruction, &staging))
                .and_then(|()| check_types(program, instruction));
            if let Err(message) = checked {
                found.push(program.place(section, index), message);
            }
        }
    }
    for run in program.order.iter().filter(|run| !program.sections.is_valid(run.section)) {
        found.push(format!("rank {rank}, order"), format!("{} does not exist", run.section));
    }
}

fn check_groups(program: &Program, found: &mut Diagnostics) {
    for (index, group) in program.groups.iter().enumerate() {
        let place = format!("rank {}, group {index}", program.rank);
        let unique: BTreeSet<_> = group.iter().collect();
        if unique.len() != group.len() || group.iter().any(|rank| *rank >= program.ranks) {
            found.push(&place, format!("{group:?} are not different ranks below {}", program.ranks));
        }
        if !group.contains(&program.rank) {
            found.push(&place, format!("{group:?} does not hold this rank"));
        }
    }
}

/// Why a part is not one of a tensor of this type, held in this buffer, if it is not.
fn part_fits(ty: &TensorType, slice: &[(u64, u64)], buffer: Option<&TensorType>) -> Result<(), String> {
    let inside = slice.len() == ty.rank()
        && slice
            .iter()
            .zip(&ty.shape)
            .all(|((first, length), size)| first.checked_add(*length).is_some_and(|end| end <= *size));
    if !inside {
        return Err(format!("the part {slice:?} is not inside {ty}"));
    }
    let part = ty.with_shape(slice.iter().map(|(_, length)| *length).collect::<Vec<_>>());
    match buffer {
        Some(buffer) if !part.fits_in(buffer) => Err(format!("its part is {part}, but its buffer {buffer}")),
        _ => Ok(()),
    }
}

fn check_interface(program: &Program, found: &mut Diagnostics) {
    let rank = program.rank;
    let microbatches = program.order.iter().map(|run| run.microbatch.saturating_add(1)).max().unwrap_or(1);
    let staging = program.staging();
    for (index, input) in program.inputs.iter().enumerate() {
        let place = format!("rank {rank}, input \"{}\"", input.name);
        let feeds = program.instructions().any(|instruction| instruction.action == Action::Feed { input: index });
        let parts = input.slices.len() as u64;
        // A stage of which nothing runs for each microbatch has its inputs for all of them nonetheless.
        let is_once = microbatches == 1 && parts > 1;
        if feeds && parts != microbatches && !is_once {
            found.push(
                &place,
                format!("has parts for {} microbatches; the step has {microbatches}", input.slices.len()),
            );
        }
        for slice in &input.slices {
            if let Err(message) = part_fits(&input.ty, slice, None) {
                found.push(&place, message);
            }
        }
        if staging.iter().filter(|(of, _)| *of == index).count() > 1 {
            found.push(&place, "is brought to two staging buffers");
        }
    }
    let mut names = BTreeSet::new();
    for slot in &program.slots {
        let place = format!("rank {rank}, slot \"{}\"", slot.name);
        if !names.insert(&slot.name) {
            found.push(&place, "there are two slots of this name");
        }
        let of = slot.cast_of.as_ref().map(|name| program.slots.iter().find(|of| of.is_parameter && of.name == *name));
        if of.is_some_and(|of| of.is_none_or(|of| of.slice != slot.slice)) {
            found.push(&place, "is the cast of a parameter of which this rank does not hold the same part");
        }
        let checked = match program.buffers.get(slot.buffer) {
            Some(buffer) => part_fits(&slot.ty, &slot.slice, Some(&buffer.ty)),
            None => Err(format!("{} does not exist", slot.buffer)),
        };
        if let Err(message) = checked {
            found.push(&place, message);
        }
    }
    let mut names = BTreeSet::new();
    for reading in program.readings.iter().filter(|reading| !names.insert(&reading.name)) {
        found.push(format!("rank {rank}, reading \"{}\"", reading.name), "there are two readings of this name");
    }
    for reading in program.readings.iter().filter(|reading| !program.buffers.is_valid(reading.buffer)) {
        found.push(format!("rank {rank}, reading \"{}\"", reading.name), format!("{} does not exist", reading.buffer));
    }
}

fn check_references(program: &Program, instruction: &Instruction, index: usize) -> Result<(), String> {
    if let Some(buffer) = instruction.buffers().find(|buffer| !program.buffers.is_valid(*buffer)) {
        return Err(format!("{buffer} does not exist"));
    }
    if let Some(after) = instruction.after.iter().find(|after| **after >= index) {
        return Err(format!("waits for instruction {after}, which is not before it"));
    }
    if let Some(group) = instruction.action.group().filter(|group| *group >= program.groups.len()) {
        return Err(format!("group {group} does not exist"));
    }
    match instruction.action {
        Action::Send { peer } | Action::Receive { peer } if peer >= program.ranks || peer == program.rank => {
            Err(format!("rank {peer} is no other rank"))
        }
        Action::Feed { input } if input >= program.inputs.len() => Err(format!("input {input} does not exist")),
        _ => Ok(()),
    }
}

/// `all` is the scratch memory of every instruction.
fn check_scratch(program: &Program, instruction: &Instruction, all: &BTreeSet<BufferId>) -> Result<(), String> {
    let values = instruction.operands.iter().chain(&instruction.results);
    if let Some(buffer) = values.into_iter().find(|buffer| all.contains(buffer)) {
        return Err(format!("{buffer} is scratch memory, which holds no value"));
    }
    let ty = instruction.scratch.map(|scratch| &program.buffers[scratch].ty);
    match ty.filter(|ty| ty.dtype != DType::U8 || ty.rank() != 1) {
        Some(ty) => Err(format!("scratch memory is u8[n], not {ty}")),
        None => Ok(()),
    }
}

/// `all` is where inputs are brought ahead.
fn check_staging(instruction: &Instruction, all: &BTreeSet<BufferId>) -> Result<(), String> {
    let is_feed = matches!(instruction.action, Action::Feed { .. });
    let read = instruction.operands.iter().filter(|_| !is_feed);
    match read.chain(&instruction.results).chain(&instruction.scratch).find(|buffer| all.contains(buffer)) {
        Some(buffer) => Err(format!("touches {buffer}, where an input is brought for a later feed")),
        None => Ok(()),
    }
}

fn check_types(program: &Program, instruction: &Instruction) -> Result<(), String> {
    let types = |ids: &[BufferId]| ids.iter().map(|id| program.buffers[*id].ty.clone()).collect::<Vec<_>>();
    let (operands, results) = (types(&instruction.operands), types(&instruction.results));
    let group = |index: usize| program.groups[index].len() as u64;
    // (operands for each result, elements of an operand times this, elements of a result times that)
    let (pairs, grows, shrinks) = match &instruction.action {
        Action::Compute(op) if op.is_leaf() => {
            return Err(format!("computes the {} of a graph: slots and feeds hold those", op.name()));
        }
        Action::Compute(op) => {
            let inferred = op.infer(&operands, &results).map_err(|error| error.to_string())?;
            let list = |types: &[TensorType]| types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return match inferred == results {
                true => Ok(()),
                false => Err(format!("{} makes {}, not {}", op.name(), list(&inferred), list(&results))),
            };
        }
        Action::Send { .. } => return count("send", &operands, 1, &results, 0),
        Action::Receive { .. } => return count("receive", &operands, 0, &results, 1),
        Action::Feed { input } => {
            count("feed", &operands, operands.len().min(1), &results, 1)?;
            if let Some(staged) = operands.first().filter(|staged| Some(*staged) != results.first()) {
                return Err(format!("is brought as {staged}, and fed as {}", results[0]));
            }
            let input = &program.inputs[*input];
            return input.slices.iter().try_for_each(|slice| part_fits(&input.ty, slice, results.first()));
        }
        Action::Copy => return same("copy", &operands, &results),
        Action::Accumulate => {
            count("accumulate", &operands, 1, &results, 1)?;
            let [from, to] = [operands[0].dtype, results[0].dtype];
            let wide = to.is_float() && from.size() <= to.size();
            let fits = operands[0].shape == results[0].shape && (wide || (from == to && to.is_int()));
            return if fits { Ok(()) } else { Err(format!("cannot accumulate {} into {}", operands[0], results[0])) };
        }
        Action::AllReduce { .. } => return same("all_reduce", &operands, &results),
        Action::AllToAll { group: index } => {
            if let Some(ty) = operands.iter().find(|ty| !ty.elements().is_multiple_of(group(*index))) {
                return Err(format!("{ty} does not divide into {} parts", group(*index)));
            }
            (operands.len(), 1, 1)
        }
        Action::AllGather { group: index } => (operands.len(), group(*index), 1),
        Action::ReduceScatter { group: index, .. } => (operands.len(), 1, group(*index)),
    };
    if pairs == 0 || results.len() != pairs {
        return Err(format!("has {} operands and {} results; each operand has its own result", pairs, results.len()));
    }
    for (operand, result) in operands.iter().zip(&results) {
        if operand.dtype != result.dtype || operand.elements() * grows != result.elements() * shrinks {
            return Err(format!("{operand} does not become {result} over this group"));
        }
    }
    Ok(())
}

fn count(
    what: &str,
    operands: &[TensorType],
    takes: usize,
    results: &[TensorType],
    makes: usize,
) -> Result<(), String> {
    if operands.len() == takes && results.len() == makes {
        return Ok(());
    }
    let (has, gives) = (operands.len(), results.len());
    Err(format!("{what} has {takes} operands and {makes} results, not {has} and {gives}"))
}

fn same(what: &str, operands: &[TensorType], results: &[TensorType]) -> Result<(), String> {
    let flat = |ty: &TensorType| (ty.dtype, ty.elements());
    if !operands.is_empty() && operands.iter().map(flat).eq(results.iter().map(flat)) {
        return Ok(());
    }
    Err(format!("{what} gives each operand's elements to its own result"))
}
