//! Mutations of several places that belong together: each of them alone would give itself away.

use super::attribute::change_value;
use super::{At, Change, instruction, of_type, place, place_of, remove};
use shardc_ir::ops::Reshape;
use shardc_ir::program::{Action, Instruction, Program, Run, Section};
use shardc_ir::{BufferId, Op, OpDef, SectionId, TensorType};
use shardc_passes::random::Random;

/// Every kind of several places.
pub const TOGETHER: &[(&str, Change)] = &[
    ("another attribute wherever an operation is", |program, random| {
        let at = place_of(program, random, |of| matches!(of.action, Action::Compute(_)))?;
        let Instruction { action: old, source, .. } = instruction(program, at).clone();
        let new = other_attribute(&old, random)?;
        let all = program.sections.values_mut().flat_map(|section| &mut section.instructions);
        all.filter(|of| of.source == source && of.action == old).for_each(|of| of.action = new.clone());
        Some(())
    }),
    ("another value read in a region", |program, random| {
        let at = place_of(program, random, is_region)?;
        read_another(program, at, random)
    }),
    ("another value read in a region that writes over what it reads", |program, random| {
        let at = place_of(program, random, is_region)?;
        write_over(program, at, random)?;
        (random.below(2) == 0).then(|| read_another(program, at, random));
        Some(())
    }),
    ("one run of a section changed", |program, random| {
        let index = random.index(program.order.len())?;
        let own = program.sections[program.order[index].section].clone();
        program.order[index].section = program.sections.push(own);
        change_run(program, index, random)
    }),
    ("a section in two, whose runs are in another order, or number", |program, random| {
        let at = place(program, random)?;
        split(program, at);
        let index = random.index(program.order.len().checked_sub(1)?)?;
        match random.below(4) {
            0 => drop(program.order.remove(index)),
            1 => program.order.insert(index, program.order[index]),
            _ => program.order.swap(index, index + 1),
        }
        Some(())
    }),
    ("an operation that later runs leave out", |program, random| {
        let is_one = |of: &Instruction| {
            matches!(of.action, Action::Compute(_) | Action::AllReduce { .. }) && of.results.len() == 1
        };
        let at = place_of(program, random, is_one)?;
        leave_out(program, at, random)
    }),
];

fn is_region(of: &Instruction) -> bool {
    matches!(of.action, Action::Compute(Op::Fused(_)))
}

/// The action with another attribute, if it is a computation.
fn other_attribute(action: &Action, random: &mut Random) -> Option<Action> {
    let Action::Compute(op) = action else { return None };
    let mut value = serde_json::to_value(op).ok()?;
    change_value(&mut value, random)?;
    serde_json::from_value(value).ok().map(Action::Compute)
}

/// A step of a region reads another value of the same type.
fn read_another(program: &mut Program, at: At, random: &mut Random) -> Option<()> {
    let operands = instruction(program, at).operands.clone();
    let types: Vec<TensorType> = operands.iter().map(|id| program.buffers[*id].ty.clone()).collect();
    let Action::Compute(Op::Fused(region)) = &mut instruction(program, at).action else { return None };
    let values = region.values(&types);
    let step = random.index(region.steps.len())?;
    let made: usize = region.steps[..step].iter().map(|step| step.results.len()).sum();
    let reads = &mut region.steps[step].operands;
    let index = random.index(reads.len())?;
    let is_other = |value: &usize| *value != reads[index] && values[*value] == values[reads[index]];
    let others: Vec<usize> = (0..types.len() + made).filter(is_other).collect();
    reads[index] = *random.choose(&others)?;
    Some(())
}

/// A result takes the place and the name of an operand over which it may be written.
fn write_over(program: &mut Program, at: At, random: &mut Random) -> Option<()> {
    let Instruction { action: Action::Compute(op), operands, results, .. } = instruction(program, at).clone() else {
        return None;
    };
    let ty = |id: BufferId| &program.buffers[id].ty;
    let pairs = operands.iter().enumerate().flat_map(|from| results.iter().map(move |to| (from, *to)));
    let fits = pairs.filter(|((index, from), to)| ty(**from) == ty(*to) && op.may_overwrite(*index, operands.len()));
    let ((_, from), to) = *random.choose(&fits.collect::<Vec<_>>())?;
    let all = program.sections.values_mut().flat_map(|section| &mut section.instructions);
    let all = all.flat_map(|of| of.operands.iter_mut().chain(&mut of.results));
    all.filter(|buffer| **buffer == to).for_each(|buffer| *buffer = *from);
    Some(())
}

/// Changes the section of one run, which has no other.
fn change_run(program: &mut Program, run: usize, random: &mut Random) -> Option<()> {
    let Run { section, .. } = program.order[run];
    let at = (section, random.index(program.sections[section].instructions.len())?);
    let of = instruction(program, at).clone();
    match random.below(5) {
        0 => drop(remove(program, at)),
        1 => {
            let operands = of.operands[..of.results.len().min(of.operands.len())].to_vec();
            *instruction(program, at) = Instruction { action: Action::Copy, operands, ..of };
        }
        2 => instruction(program, at).action = other_attribute(&of.action, random)?,
        3 => program.order[run].microbatch = random.choose(&program.order.clone())?.microbatch,
        _ => {
            let old = *random.choose(&of.operands.iter().chain(&of.results).copied().collect::<Vec<_>>())?;
            let new = of_type(program, old, random)?;
            let Instruction { operands, results, .. } = instruction(program, at);
            operands.iter_mut().chain(results).filter(|buffer| **buffer == old).for_each(|buffer| *buffer = new);
        }
    }
    Some(())
}

/// Cuts a section before an instruction; gives what begins there.
fn split(program: &mut Program, at: At) -> SectionId {
    let Section { name, instructions } = program.sections[at.0].clone();
    let rest = instructions[at.1..].iter().map(|of| {
        let after = of.after.iter().filter_map(|after| after.checked_sub(at.1));
        Instruction { after: after.collect(), ..of.clone() }
    });
    let rest = Section { name: format!("{name}.rest"), instructions: rest.collect() };
    let rest = program.sections.push(rest);
    program.sections[at.0].instructions.truncate(at.1);
    let cut = |run: &Run| match run.section == at.0 {
        true => vec![*run, Run { section: rest, ..*run }],
        false => vec![*run],
    };
    program.order = program.order.iter().flat_map(cut).collect();
    rest
}

/// The first run does an instruction; those behind it copy an operand in its place.
fn leave_out(program: &mut Program, at: At, random: &mut Random) -> Option<()> {
    let of = Instruction { after: Vec::new(), ..instruction(program, at).clone() };
    let mut own = program.buffers[of.results[0]].clone();
    let from = *of.operands.iter().find(|from| program.buffers[**from].ty == own.ty)?;
    let (_, bytes) = program.arenas.first_mut()?;
    own.offset = bytes.0.next_multiple_of(256);
    bytes.0 = own.end();
    let made = program.buffers.push(own);
    let rest = split(program, at);
    let renames = [Action::Copy, Action::Compute(Reshape {}.into())];
    let renamed = Instruction { action: random.choose(&renames)?.clone(), operands: vec![made], ..of.clone() };
    *instruction(program, (rest, 0)) = renamed;
    let first = Instruction { results: vec![made], ..of };
    let later = Instruction { action: Action::Copy, operands: vec![from], ..first.clone() };
    let mut sections = [first, later].map(|of| {
        let name = of.action.name().to_string();
        program.sections.push(Section { name, instructions: vec![of] })
    });
    let mut order = Vec::with_capacity(program.order.len());
    for run in &program.order {
        if run.section == rest {
            order.push(Run { section: sections[0], ..*run });
            sections[0] = sections[1];
        }
        order.push(*run);
    }
    program.order = order;
    Some(())
}
