//! Regions opened up: each step of a fused instruction as an instruction of its own.
//!
//! A kernel for a region does what its steps do one after the other, so the program with the steps in its
//! place computes the same; and each step can be justified by the node that it came from. What no result
//! of the region names lies in a buffer beyond the arena, which no other buffer overlaps. So does what the steps read of
//! an operand that a result writes over under its name: a kernel reads there what was there before.

use crate::ops::{Fused, Op};
use crate::plan::{Category, Space};
use crate::program::ALIGNMENT;
use crate::program::{Action, Buffer, Instruction, Program};
use crate::types::TensorType;
use std::borrow::Cow;

/// The programs with every region opened up, and nothing else changed.
pub(super) fn expand(programs: &[Program]) -> Cow<'_, [Program]> {
    let is_region = |instruction: &Instruction| matches!(instruction.action, Action::Compute(Op::Fused(_)));
    if !programs.iter().any(|program| program.instructions().any(is_region)) {
        return Cow::Borrowed(programs);
    }
    Cow::Owned(programs.iter().map(expand_program).collect())
}

fn expand_program(program: &Program) -> Program {
    let mut expanded = program.clone();
    let ends = program.buffers.values().map(Buffer::end);
    let mut end = ends.max().unwrap_or(0).next_multiple_of(ALIGNMENT);
    for section in program.sections.keys() {
        let mut instructions = Vec::new();
        // Where the instructions of the section are now: what waits for a region waits for its last step.
        let mut moved = Vec::new();
        for instruction in &program.sections[section].instructions {
            let after: Vec<usize> = instruction.after.iter().filter_map(|index| moved.get(*index).copied()).collect();
            match &instruction.action {
                Action::Compute(Op::Fused(region)) => {
                    instructions.extend(steps(
                        &mut expanded,
                        &mut end,
                        region,
                        Instruction { after, ..instruction.clone() },
                    ));
                }
                _ => instructions.push(Instruction { after, ..instruction.clone() }),
            }
            moved.push(instructions.len().saturating_sub(1));
        }
        expanded.sections[section].instructions = instructions;
    }
    expanded
}

/// `end` is where the next buffer beyond the arena begins.
fn steps(program: &mut Program, end: &mut u64, region: &Fused, instruction: Instruction) -> Vec<Instruction> {
    let space = instruction.results.first().map_or(Space::Device, |id| program.buffers[*id].space);
    let mut beyond = |program: &mut Program, ty: &TensorType| {
        let (offset, category) = (*end, Category::Activation);
        *end += ty.bytes().0.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        program.buffers.push(Buffer { ty: ty.clone(), space, offset, category, value: None })
    };
    let step = |action, operands, results, source| {
        let step = Instruction::new(action, operands, results, instruction.stream);
        Instruction { after: instruction.after.clone(), source, ..step }
    };
    let mut values = Vec::with_capacity(instruction.operands.len());
    let mut steps = Vec::with_capacity(region.steps.len());
    for operand in &instruction.operands {
        let is_written = instruction.results.contains(operand);
        values.push(if is_written { beyond(program, &program.buffers[*operand].ty.clone()) } else { *operand });
        if is_written {
            steps.push(step(Action::Copy, vec![*operand], values[values.len() - 1..].to_vec(), None));
        }
    }
    for of in &region.steps {
        let mut results = Vec::with_capacity(of.results.len());
        for ty in &of.results {
            let value = values.len();
            let named = region.results.iter().position(|result| *result == value);
            let buffer = named.and_then(|index| instruction.results.get(index).copied());
            let buffer = buffer.unwrap_or_else(|| beyond(program, ty));
            values.push(buffer);
            results.push(buffer);
        }
        let operands = of.operands.iter().filter_map(|value| values.get(*value).copied()).collect();
        steps.push(step(Action::Compute(of.op.clone()), operands, results, of.source));
    }
    steps
}
