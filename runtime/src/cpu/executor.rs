//! Runs one rank's program in its arenas.
//!
//! Instructions run one after the other in the order of issue, whatever their streams: an order
//! that every dependency allows. Kernels read and write the arenas in place. An operand whose bytes
//! overlap a result's is copied first, except where the operation is made for it: a view or a
//! copy onto itself does nothing, and `adamw` updates in place.
#![allow(unsafe_code)]

use super::collectives::{Interrupt, Kind, Member, reduce_part};
use super::kernels::{self, Context, View, ViewMut};
use super::memory::{ALIGNMENT, AlignedBytes};
use crate::watch::{Finding, Watch};
use crate::{Feeds, Span};
use shardc_ir::plan::Space;
use shardc_ir::program::{Action, Instruction};
use shardc_ir::sharding::ReduceKind;
use shardc_ir::tensor::for_each_row;
use shardc_ir::view::is_view;
use shardc_ir::{BufferId, DType, Op, Program, TensorType};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

/// One rank: its program and its memory.
pub struct Rank {
    /// What it runs.
    pub program: Arc<Program>,
    arenas: BTreeMap<Space, AlignedBytes>,
    /// Copies of the current instruction's operands. They stay until the next one, because after
    /// an error other ranks may still read them in a collective.
    copies: Vec<Option<AlignedBytes>>,
    /// What the last step made that is not finite.
    pub watch: Watch,
    /// Where the last step is or ended: the text of the instruction.
    pub at: String,
    /// When the instructions of the last step ran, if it was measured.
    pub spans: Vec<Span>,
}

/// Bytes of an arena.
#[derive(Clone, Copy)]
struct Range {
    space: Space,
    first: u64,
    length: u64,
}

impl Range {
    fn overlaps(self, other: Range) -> bool {
        let (end, other_end) = (self.first + self.length, other.first + other.length);
        self.space == other.space && self.first < other_end && other.first < end && self.length > 0 && other.length > 0
    }

    fn is(self, other: Range) -> bool {
        self.space == other.space && self.first == other.first && self.length == other.length
    }
}

impl Rank {
    /// Takes the arenas, and fills optimizer states with the numbers they start at.
    ///
    /// # Errors
    /// What no compiler pass should make: a buffer outside its arena, a group without this rank, an
    /// input without a part for some microbatch.
    pub fn new(program: Program) -> Result<Self, String> {
        check(&program)?;
        let arenas = program.arenas.iter().map(|(space, bytes)| (*space, AlignedBytes::zeros(bytes.0 as usize)));
        let arenas = arenas.collect();
        let (program, copies, watch) = (Arc::new(program), Vec::new(), Watch::default());
        let mut rank = Self { program, arenas, copies, watch, at: String::new(), spans: Vec::new() };
        for index in 0..rank.program.slots.len() {
            let (buffer, init) = (rank.program.slots[index].buffer, rank.program.slots[index].init);
            if !rank.program.slots[index].is_parameter && init != 0.0 {
                let ty = rank.program.buffers[buffer].ty.clone();
                let values = vec![init as f32; ty.elements() as usize];
                ViewMut { ty: &ty, bytes: rank.bytes_mut(buffer) }.round_f32(&values)?;
            }
        }
        Ok(rank)
    }

    fn range(&self, buffer: BufferId) -> Range {
        let buffer = &self.program.buffers[buffer];
        Range { space: buffer.space, first: buffer.offset, length: buffer.ty.bytes().0 }
    }

    /// The bytes of a buffer.
    pub fn bytes(&self, buffer: BufferId) -> &[u8] {
        let Range { space, first, length } = self.range(buffer);
        let arena: &[u8] = self.arenas.get(&space).map_or(&[], |arena| arena);
        &arena[first as usize..(first + length) as usize]
    }

    /// The bytes of a buffer.
    pub fn bytes_mut(&mut self, buffer: BufferId) -> &mut [u8] {
        let Range { space, first, length } = self.range(buffer);
        let arena: &mut [u8] = self.arenas.get_mut(&space).map_or(&mut [], |arena| arena);
        &mut arena[first as usize..(first + length) as usize]
    }

    /// Runs one step. With `clock`, the step's start, measures every instruction.
    pub fn step(
        &mut self,
        context: Context,
        member: &mut Member<'_>,
        feeds: &Feeds,
        clock: Option<Instant>,
    ) -> Result<(), Interrupt> {
        self.watch = Watch::default();
        self.spans.clear();
        let program = self.program.clone();
        for run in &program.order {
            let section = &program.sections[run.section];
            for (index, instruction) in section.instructions.iter().enumerate() {
                self.at = describe(&section.name, index, instruction);
                let start = clock.map(|clock| clock.elapsed().as_secs_f64());
                self.instruction(context, member, feeds, run.microbatch, instruction)?;
                if let (Some(start), Some(clock)) = (start, clock) {
                    let (rank, stream, end) = (program.rank, instruction.stream, clock.elapsed().as_secs_f64());
                    let (section, microbatch) = (run.section, run.microbatch);
                    self.spans.push(Span { rank, stream, section, instruction: index, microbatch, start, end });
                }
            }
        }
        self.at = "after the last instruction".to_string();
        Ok(())
    }

    fn instruction(
        &mut self,
        context: Context,
        member: &mut Member<'_>,
        feeds: &Feeds,
        microbatch: u64,
        instruction: &Instruction,
    ) -> Result<(), Interrupt> {
        let program = self.program.clone();
        let group = |index: &usize| program.groups[*index].as_slice();
        match &instruction.action {
            Action::Compute(op) => self.compute(context, op, instruction).map_err(Interrupt::from),
            Action::AllReduce { reduce, group: index } => {
                self.collective(member, Kind::AllReduce(*reduce), group(index), instruction)
            }
            Action::AllGather { group: index } => self.collective(member, Kind::AllGather, group(index), instruction),
            Action::ReduceScatter { reduce, group: index } => {
                self.collective(member, Kind::ReduceScatter(*reduce), group(index), instruction)
            }
            Action::AllToAll { group: index } => self.collective(member, Kind::AllToAll, group(index), instruction),
            Action::Send { peer } => {
                instruction.operands.iter().for_each(|operand| member.send(*peer, self.bytes(*operand)));
                Ok(())
            }
            Action::Receive { peer } => {
                instruction.results.iter().try_for_each(|result| member.receive(*peer, self.bytes_mut(*result)))
            }
            Action::Accumulate => Ok(self.pairs(instruction, |from, to| accumulate(microbatch == 0, from, to))?),
            Action::Copy => Ok(self.pairs(instruction, copy)?),
            Action::Feed { input } => Ok(self.feed(feeds, *input, microbatch, instruction)?),
        }
    }

    /// Views of an instruction's operands and results, for `run`. An operand that overlaps a result is
    /// a copy.
    fn with_views<R>(
        &mut self,
        instruction: &Instruction,
        run: impl FnOnce(&[View<'_>], &mut [ViewMut<'_>]) -> R,
    ) -> Result<R, String> {
        let results: Vec<Range> = instruction.results.iter().map(|id| self.range(*id)).collect();
        for (index, range) in results.iter().enumerate() {
            if results[..index].iter().any(|other| range.overlaps(*other)) {
                return Err("its results overlap".to_string());
            }
        }
        let operands: Vec<Range> = instruction.operands.iter().map(|id| self.range(*id)).collect();
        self.copies = instruction
            .operands
            .iter()
            .zip(&operands)
            .map(|(id, range)| {
                results.iter().any(|result| result.overlaps(*range)).then(|| {
                    let mut copy = AlignedBytes::zeros(range.length as usize);
                    copy.copy_from_slice(self.bytes(*id));
                    copy
                })
            })
            .collect();
        let starts: BTreeMap<Space, *mut u8> =
            self.arenas.iter_mut().map(|(space, arena)| (*space, arena.as_mut_ptr())).collect();
        // Empty buffers may lie in a space without an arena.
        let start = |range: &Range| -> *mut u8 {
            let Some(start) = starts.get(&range.space).filter(|_| range.length > 0) else {
                return std::ptr::without_provenance_mut(ALIGNMENT);
            };
            // SAFETY: `check` found the buffer inside the arena.
            unsafe { start.add(range.first as usize) }
        };
        let operand = |(index, range): (usize, &Range)| -> &[u8] {
            match &self.copies[index] {
                Some(copy) => copy,
                // SAFETY: inside the arena, initialised, and overlapping no result.
                None => unsafe { std::slice::from_raw_parts(start(range), range.length as usize) },
            }
        };
        // SAFETY: inside the arena, initialised, and overlapping no operand's view and no other result.
        let result = |range: &Range| unsafe { std::slice::from_raw_parts_mut(start(range), range.length as usize) };
        let ty = |id: &BufferId| &self.program.buffers[*id].ty;
        let operands = instruction.operands.iter().zip(operands.iter().enumerate());
        let views: Vec<View<'_>> = operands.map(|(id, range)| View { ty: ty(id), bytes: operand(range) }).collect();
        let results = instruction.results.iter().zip(&results);
        let mut results: Vec<ViewMut<'_>> =
            results.map(|(id, range)| ViewMut { ty: ty(id), bytes: result(range) }).collect();
        Ok(run(&views, &mut results))
    }

    fn compute(&mut self, context: Context, op: &Op, instruction: &Instruction) -> Result<(), String> {
        let in_place = |operand: usize, result: usize| {
            let (operand, result) = (instruction.operands.get(operand), instruction.results.get(result));
            operand.zip(result).is_some_and(|(operand, result)| self.range(*operand).is(self.range(*result)))
        };
        match op {
            // Each by itself, so that what is in place stays so.
            Op::Each(each) => {
                let items = each.items(&instruction.operands).zip(each.items(&instruction.results));
                for (operands, results) in items {
                    let (operands, results) = (operands.to_vec(), results.to_vec());
                    self.compute(context, &each.op, &Instruction { operands, results, ..instruction.clone() })?;
                }
                return Ok(());
            }
            Op::Reshape(_) | Op::Slice(_) | Op::Concat(_) if is_view(&self.program.buffers, instruction) => {
                return Ok(());
            }
            Op::Adamw(op) if in_place(0, 0) && in_place(2, 1) && in_place(3, 2) && self.is_f32(instruction) => {
                self.adamw(op, instruction)?;
            }
            _ => self.with_views(instruction, |operands, results| {
                kernels::run(context, op, operands, results).map_err(|message| format!("{}: {message}", op.name()))
            })??,
        }
        if self.watch.is_watching() {
            self.inspect(op, instruction);
        }
        Ok(())
    }

    fn is_f32(&self, instruction: &Instruction) -> bool {
        instruction.operands.iter().all(|id| self.program.buffers[*id].ty.dtype == DType::F32)
    }

    /// `adamw` on a parameter and moments that stay where they are.
    fn adamw(&mut self, op: &shardc_ir::ops::Adamw, instruction: &Instruction) -> Result<(), String> {
        let scalar = |operand: usize| -> f32 {
            bytemuck::cast_slice(self.bytes(instruction.operands[operand])).first().copied().unwrap_or_default()
        };
        let scalars = [scalar(4), scalar(5), scalar(6)];
        // Only the gradient is an operand; the rest are the results' old contents.
        let update = Instruction { operands: vec![instruction.operands[1]], ..instruction.clone() };
        self.with_views(&update, |operands, results| {
            let [p, m, v, cast @ ..] = results else { return Err("adamw has three results or four".to_string()) };
            let [p, m, v] = [p, m, v].map(|x| bytemuck::cast_slice_mut::<_, f32>(x.bytes));
            kernels::adamw_in_place(op, scalars, &operands[0].f32s()?, p, m, v);
            cast.iter_mut().try_for_each(|cast| cast.round_f32(p))
        })?
    }

    /// Notes the first results that are not finite.
    fn inspect(&mut self, op: &Op, instruction: &Instruction) {
        let mut watch = std::mem::take(&mut self.watch);
        let find = |id: BufferId| Ok::<_, Infallible>(Finding::of(&self.program.buffers[id].ty, self.bytes(id)));
        let Ok(()) = watch.inspect(&self.program, instruction, (op, &self.at), find);
        self.watch = watch;
    }

    fn collective(
        &mut self,
        member: &mut Member<'_>,
        kind: Kind,
        group: &[u64],
        instruction: &Instruction,
    ) -> Result<(), Interrupt> {
        self.with_views(instruction, |operands, results| member.collective(kind, group, operands, results))?
    }

    /// Calls `each` with every operand and its result, whose old contents it may read.
    fn pairs(
        &mut self,
        instruction: &Instruction,
        each: impl Fn(View<'_>, &mut ViewMut<'_>) -> Result<(), String>,
    ) -> Result<(), String> {
        for (operand, result) in instruction.operands.iter().zip(&instruction.results) {
            if self.range(*operand).is(self.range(*result)) && matches!(instruction.action, Action::Copy) {
                continue;
            }
            let one = Instruction { operands: vec![*operand], results: vec![*result], ..instruction.clone() };
            self.with_views(&one, |operands, results| each(operands[0], &mut results[0]))??;
        }
        Ok(())
    }

    fn feed(&mut self, feeds: &Feeds, input: usize, microbatch: u64, instruction: &Instruction) -> Result<(), String> {
        let program = self.program.clone();
        let feed = &program.inputs[input];
        let tensor = feeds.get(&feed.name).ok_or_else(|| format!("`{}` is needed and was not given", feed.name))?;
        let slice = feed.slices.get(microbatch as usize);
        let slice = slice.ok_or_else(|| format!("`{}` has no part for microbatch {microbatch}", feed.name))?;
        let result = *instruction.results.first().ok_or("a feed without a result")?;
        let out = self.bytes_mut(result);
        let mut at = 0;
        for_each_row(&tensor.ty, slice, |offset, length| {
            if let Some(out) = out.get_mut(at..at + length) {
                out.copy_from_slice(&tensor.bytes[offset..offset + length]);
            }
            at += length;
        });
        if at == out.len() { Ok(()) } else { Err(format!("the part of `{}` has {at} bytes", feed.name)) }
    }

    /// A reading, in f64.
    pub fn reading(&self, buffer: BufferId) -> Result<f64, String> {
        let ty = &self.program.buffers[buffer].ty;
        let view = View { ty, bytes: self.bytes(buffer) };
        let value = match ty.dtype.is_float() {
            true => view.f32s()?.first().map(|value| f64::from(*value)),
            false => view.i64s()?.first().map(|value| *value as f64),
        };
        value.ok_or_else(|| format!("{ty} has no element"))
    }
}

fn accumulate(is_first: bool, from: View<'_>, to: &mut ViewMut<'_>) -> Result<(), String> {
    if is_first && from.ty == to.ty {
        return copy(from, to);
    }
    if to.ty.dtype.is_int() && from.ty == to.ty {
        let sum = reduce_part(ReduceKind::Sum, to.ty, &[to.bytes, from.bytes], (0, to.ty.elements() as usize))?;
        to.bytes.copy_from_slice(&sum);
        return Ok(());
    }
    if !to.ty.dtype.is_float() {
        return Err(format!("cannot accumulate {} in {}", from.ty, to.ty));
    }
    let terms = from.f32s()?;
    if is_first {
        return to.round_f32(&terms);
    }
    if to.ty.dtype == DType::F32 {
        let sums: &mut [f32] = bytemuck::cast_slice_mut(to.bytes);
        sums.iter_mut().zip(terms.iter()).for_each(|(sum, term)| *sum += term);
        return Ok(());
    }
    let sums = View { ty: to.ty, bytes: to.bytes }.f32s()?.into_owned();
    let sums: Vec<f32> = sums.iter().zip(terms.iter()).map(|(sum, term)| sum + term).collect();
    to.round_f32(&sums)
}

fn copy(from: View<'_>, to: &mut ViewMut<'_>) -> Result<(), String> {
    if from.bytes.len() != to.bytes.len() {
        return Err(format!("{} is copied into {}", from.ty, to.ty));
    }
    to.bytes.copy_from_slice(from.bytes);
    Ok(())
}

fn describe(section: &str, index: usize, instruction: &Instruction) -> String {
    let name = instruction.action.name();
    let list = |ids: &[BufferId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let source = instruction.source.map(|node| format!(", {node} of the plan")).unwrap_or_default();
    let (results, operands) = (list(&instruction.results), list(&instruction.operands));
    format!("section `{section}`, instruction {index}: {results} = {name} {operands}{source}")
}

/// What a program must keep for the views of [`Rank`] to be inside the arenas.
fn check(program: &Program) -> Result<(), String> {
    for (id, buffer) in program.buffers.iter() {
        let (end, arena) = (buffer.offset.checked_add(buffer.ty.bytes().0), program.arena(buffer.space).0);
        if end.is_none_or(|end| end > arena) || !buffer.offset.is_multiple_of(ALIGNMENT as u64) {
            return Err(format!("buffer {id} of {} at byte {} of an arena of {arena}", buffer.ty, buffer.offset));
        }
    }
    if let Some(group) = program
        .groups
        .iter()
        .find(|group| !group.contains(&program.rank) || group.iter().any(|rank| *rank >= program.ranks))
    {
        return Err(format!("rank {} of {} has a group {group:?}", program.rank, program.ranks));
    }
    for instruction in program.instructions() {
        check_instruction(program, instruction)?;
    }
    for slot in &program.slots {
        let (part, buffer) = (slot.part(), program.buffers.get(slot.buffer));
        if !buffer.is_some_and(|buffer| part.fits_in(&buffer.ty)) {
            expect_buffer(program, slot.buffer, &part, &slot.name)?;
        }
    }
    let runs = program.order.iter();
    match runs.clone().find(|run| !program.sections.is_valid(run.section)) {
        Some(run) => Err(format!("there is no section {}", run.section)),
        None => Ok(()),
    }
}

fn expect_buffer(program: &Program, buffer: BufferId, ty: &TensorType, what: &str) -> Result<(), String> {
    match program.buffers.get(buffer) {
        Some(found) if found.ty == *ty => Ok(()),
        Some(found) => Err(format!("`{what}` is {ty}; its buffer {buffer} is {}", found.ty)),
        None => Err(format!("`{what}` lies in {buffer}, which does not exist")),
    }
}

fn check_instruction(program: &Program, instruction: &Instruction) -> Result<(), String> {
    if let Some(unknown) = instruction.buffers().find(|id| !program.buffers.is_valid(*id)) {
        return Err(format!("there is no buffer {unknown}"));
    }
    let group = match &instruction.action {
        Action::AllReduce { group, reduce } | Action::ReduceScatter { group, reduce } => {
            if *reduce == ReduceKind::LogSumExp {
                return Err("a collective adds or takes the maximum".to_string());
            }
            Some(*group)
        }
        Action::AllGather { group } | Action::AllToAll { group } => Some(*group),
        Action::Feed { input } if *input >= program.inputs.len() => return Err(format!("there is no input {input}")),
        Action::Send { peer } | Action::Receive { peer } if *peer >= program.ranks => {
            return Err(format!("there is no rank {peer}"));
        }
        Action::Compute(op) => return check_compute(program, op, instruction),
        _ => None,
    };
    let paired = group.is_some() || matches!(instruction.action, Action::Accumulate | Action::Copy);
    if paired && instruction.operands.len() != instruction.results.len() {
        return Err("a collective, a sum or a copy with results that are not one per operand".to_string());
    }
    match group.filter(|group| *group >= program.groups.len()) {
        Some(group) => Err(format!("there is no group {group}")),
        None => Ok(()),
    }
}

/// The kernels trust the shape rules.
fn check_compute(program: &Program, op: &Op, instruction: &Instruction) -> Result<(), String> {
    let types = |ids: &[BufferId]| ids.iter().map(|id| program.buffers[*id].ty.clone()).collect::<Vec<TensorType>>();
    let (operands, results) = (types(&instruction.operands), types(&instruction.results));
    let list = |types: &[TensorType]| types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match op.infer(&operands, &results) {
        Ok(made) if made == results => Ok(()),
        Ok(made) => Err(format!("{} makes {}, not {}", op.name(), list(&made), list(&results))),
        Err(error) => Err(error.to_string()),
    }
}
