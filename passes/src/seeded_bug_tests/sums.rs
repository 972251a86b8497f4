//! Bugs of sums over microbatches.

use super::*;

fn is_accumulation(_: &Program, instruction: &Instruction) -> bool {
    instruction.action == Action::Accumulate
}

pub(super) fn dropped_accumulation(programs: &mut [Program]) {
    change(programs, is_accumulation, |instruction| instruction.action = Action::Copy);
}

pub(super) fn doubled_accumulation(programs: &mut [Program]) {
    // In the first microbatch it writes what is there already.
    let (section, _) = later_microbatch(&programs[0]);
    let is_in_it = |program: &Program, own: &Instruction| program.sections[section].instructions.contains(own);
    let at = find(&programs[0], |program, own| is_in_it(program, own) && is_accumulation(program, own));
    for program in programs {
        let again = instruction(program, at).clone();
        insert(program, (at.0, at.1 + 1), again);
    }
}

/// The section of the microbatches behind the first one, and where in it a product adds to what is there.
fn later_microbatch(program: &Program) -> At {
    let (section, body) = program.sections.iter().find(|(_, body)| body.name == "microbatch").expect("a loop");
    (section, body.instructions.iter().position(adds).expect("a term of a sum"))
}

fn adds(instruction: &Instruction) -> bool {
    is_op(instruction, "matmul") && instruction.operands.get(2) == instruction.results.first()
}

pub(super) fn late_beginning(programs: &mut [Program]) {
    for program in programs {
        let at = later_microbatch(program);
        instruction(program, at).operands.truncate(2);
    }
}

pub(super) fn no_beginning(programs: &mut [Program]) {
    for program in programs {
        let at = later_microbatch(program);
        let sum = instruction(program, at).results[0];
        let begins = |_: &Program, own: &Instruction| own.results == [sum] && own.operands.len() == 2;
        let at = find(program, begins);
        remove(program, at);
    }
}

pub(super) fn wrong_beginning(programs: &mut [Program]) {
    let is_zero = |_: &Program, instruction: &Instruction| op(instruction) == Some(&Op::from(Constant { value: 0.0 }));
    change(programs, is_zero, |instruction| instruction.action = Action::Compute(Constant { value: 1.0 }.into()));
}

pub(super) fn swapped_accumulators(programs: &mut [Program]) {
    for program in programs {
        let (section, _) = find(program, |_, instruction| adds(instruction));
        let body = program.sections[section].instructions.iter().enumerate();
        let all: Vec<_> = body.filter(|(_, other)| adds(other)).map(|(at, other)| (at, other.results[0])).collect();
        let alike = |a: BufferId, b: BufferId| a != b && program.buffers[a].ty == program.buffers[b].ty;
        let pairs = all.iter().flat_map(|first| all.iter().map(move |other| (*first, *other)));
        let mut pairs = pairs.filter(|((_, a), (_, b))| alike(*a, *b));
        let ((first, own), (other, theirs)) = pairs.next().expect("two accumulators of one type");
        for (at, buffer) in [(first, theirs), (other, own)] {
            let instruction = instruction(program, (section, at));
            (instruction.operands[2], instruction.results[0]) = (buffer, buffer);
        }
    }
}
