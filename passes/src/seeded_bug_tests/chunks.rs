//! Bugs put into programs whose microbatch is cut into chunks that overlap.

use super::{Bug, change, find, findings, instruction, is_op, is_tensor_sum, missed, op, relocate};
use crate::lower::lower_all;
use crate::lower_tests::{TINY, plan};
use shardc_ir::ops::{Op, Slice};
use shardc_ir::program::{Action, Instruction, Stream};
use shardc_ir::view::is_view;
use shardc_ir::{BufferId, DType, NoScratch, Program, verify};

/// Two data ranks of six samples each, in two chunks.
const PINS: &str = "dp=2,tp=2,zero=1,microbatch=6,overlap_chunks=2";
/// The samples of a chunk on one rank.
const SAMPLES: u64 = 3;

/// What is put in, and a part of what the verifier says.
const BUGS: &[(&str, Bug, &str)] = &[
    ("a chunk that is cut where another is", another_part, "its part needs slice"),
    ("a chunk that is not where it is cut", another_offset, "which it still reads"),
    ("two chunks at one place", one_place, "was written over it"),
    ("chunks joined in another order", another_order, "as operand 0, but concat"),
    ("one chunk joined twice", one_chunk_twice, "as operand 1, but concat"),
    ("a chunk that is not reduced", missing_reduction, "/sum(tp)"),
    ("a product of another chunk", another_chunk, "as operand 0, but matmul"),
    ("a sum over chunks without one of them", missing_chunk, "as operand 1, but add"),
    ("a chunk that is not waited for", missing_wait, "does not wait for instruction"),
];

#[test]
fn every_seeded_bug_of_chunks_is_found() {
    let plan = plan(TINY, DType::F32, "cpu:4", PINS, false);
    let programs = lower_all(&verify::plan(&plan).expect("a plan"), &NoScratch).expect("programs");
    assert_eq!(findings(&plan, &programs), "");
    let wrong: Vec<String> =
        BUGS.iter().filter_map(|(name, bug, expect)| missed(&plan, &programs, name, *bug, expect)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Whether an instruction is a view of this operation.
fn is_view_of(name: &'static str) -> impl Fn(&Program, &Instruction) -> bool {
    move |program, instruction| is_op(instruction, name) && is_view(&program.buffers, instruction)
}

/// Whether an instruction cuts out a chunk that is not the first.
fn is_later_chunk(program: &Program, instruction: &Instruction) -> bool {
    let is_later = |slice: &Slice| slice.start.iter().any(|start| *start > 0);
    is_view_of("slice")(program, instruction) && matches!(op(instruction), Some(Op::Slice(slice)) if is_later(slice))
}

fn another_part(programs: &mut [Program]) {
    let at = find(&programs[0], is_later_chunk);
    for program in programs {
        let cut = instruction(program, at);
        let Action::Compute(Op::Slice(slice)) = &mut cut.action else { panic!("a slice") };
        let length = |dim: usize| slice.limit[dim] - slice.start[dim];
        slice.limit = (0..slice.limit.len()).map(length).collect();
        slice.start.iter_mut().for_each(|start| *start = 0);
        let [from, to] = [cut.operands[0], cut.results[0]];
        move_views(program, to, program.buffers[from].offset);
    }
}

fn another_offset(programs: &mut [Program]) {
    let at = find(&programs[0], is_later_chunk);
    for program in programs {
        let [from, to] = [instruction(program, at).operands[0], instruction(program, at).results[0]];
        move_views(program, to, program.buffers[from].offset);
    }
}

/// Moves a buffer, and the reshapes of it.
fn move_views(program: &mut Program, buffer: BufferId, offset: u64) {
    let views = program.instructions().filter(|of| is_op(of, "reshape") && of.operands == [buffer]);
    let views: Vec<BufferId> = views.map(|of| of.results[0]).collect();
    views.iter().for_each(|view| program.buffers[*view].offset = offset);
    program.buffers[buffer].offset = offset;
}

fn one_place(programs: &mut [Program]) {
    let at = find(&programs[0], is_view_of("concat"));
    for program in programs {
        let [first, second] = instruction(program, at).operands[..] else { panic!("two chunks") };
        let (from, to) = (program.buffers[second].offset, program.buffers[first].offset);
        let chunk = program.buffers[second].ty.bytes();
        let is_there = |id: &BufferId| program.buffers[*id].offset == from && program.buffers[*id].ty.bytes() == chunk;
        let there: Vec<BufferId> = program.buffers.keys().filter(is_there).collect();
        there.iter().for_each(|id| program.buffers[*id].offset = to);
    }
}

/// Gives the first join of chunks bytes of its own, so that it copies them, and changes it.
fn change_join(programs: &mut [Program], bug: impl Fn(&mut Instruction)) {
    let at = find(&programs[0], is_view_of("concat"));
    for program in programs {
        let result = instruction(program, at).results[0];
        relocate(program, result);
        move_views(program, result, program.buffers[result].offset);
        bug(instruction(program, at));
    }
}

fn another_order(programs: &mut [Program]) {
    change_join(programs, |instruction| instruction.operands.reverse());
}

fn one_chunk_twice(programs: &mut [Program]) {
    change_join(programs, |instruction| instruction.operands[1] = instruction.operands[0]);
}

fn missing_reduction(programs: &mut [Program]) {
    let of_chunk = |program: &Program, instruction: &Instruction| {
        let shape = &program.buffers[instruction.results[0]].ty.shape;
        is_tensor_sum(program, instruction) && shape.first() == Some(&SAMPLES)
    };
    change(programs, of_chunk, |instruction| {
        instruction.action = Action::Copy;
        instruction.stream = Stream::Compute;
    });
}

/// Two products of one weight, of which the second reads the first chunk.
fn another_chunk(programs: &mut [Program]) {
    let products = |program: &Program| {
        let all = program.instructions().filter(|of| is_op(of, "matmul"));
        all.map(|of| (of.action.clone(), of.operands.clone())).collect::<Vec<_>>()
    };
    let all = products(&programs[0]);
    let is_twin = |(action, operands): &&(Action, Vec<BufferId>)| {
        let twins = all.iter().filter(|(other, read)| other == action && read[1..] == operands[1..]);
        twins.count() == 2
    };
    let (action, first) = all.iter().find(is_twin).expect("a product of each chunk").clone();
    let is_second = |_: &Program, instruction: &Instruction| {
        instruction.action == action && instruction.operands[1..] == first[1..] && instruction.operands[0] != first[0]
    };
    change(programs, is_second, |instruction| instruction.operands[0] = first[0]);
}

fn missing_chunk(programs: &mut [Program]) {
    let is_sum = |program: &Program, instruction: &Instruction| {
        is_op(instruction, "add") && program.buffers[instruction.results[0]].ty.rank() == 1
    };
    change(programs, is_sum, |instruction| instruction.operands[1] = instruction.operands[0]);
}

fn missing_wait(programs: &mut [Program]) {
    let reads_chunk = |program: &Program, instruction: &Instruction| {
        let shape = &program.buffers[instruction.results[0]].ty.shape;
        let waits = instruction.stream == Stream::Compute && !instruction.after.is_empty();
        waits && shape.first() == Some(&SAMPLES)
    };
    change(programs, reads_chunk, |instruction| instruction.after.clear());
}
