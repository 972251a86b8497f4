//! Mutations of programs: one thing of one place changed, of every kind that the types of a program allow; and several
//! that belong together.
//!
//! Each kind takes the same turns for the same random numbers, so that programs that are alike change alike.

mod attribute;
mod together;

use attribute::change_value;
use shardc_ir::ops::Constant;
use shardc_ir::plan::{Category, Space};
use shardc_ir::program::{Action, Buffer, Feed, Instruction, Program, Reading, Slot, Stream};
use shardc_ir::{BufferId, DType, EntityRef, NodeId, Op, ReduceKind, SectionId, TensorType};
use shardc_passes::random::Random;
use std::collections::BTreeSet;
pub use together::TOGETHER;

/// Changes a program; `None` where it has nothing of the kind.
pub type Change = fn(&mut Program, &mut Random) -> Option<()>;

/// Every kind of one place.
pub const KINDS: &[(&str, Change)] = &[
    ("an instruction dropped", |program, random| remove(program, place(program, random)?).map(drop)),
    ("an instruction done twice", |program, random| {
        let at = place(program, random)?;
        let again = instruction(program, at).clone();
        insert(program, (at.0, at.1 + 1), Instruction { after: Vec::new(), ..again })
    }),
    ("an instruction done again later", |program, random| {
        let at = place(program, random)?;
        let again = Instruction { after: Vec::new(), ..instruction(program, at).clone() };
        let to = at.1 + 1 + random.below(program.sections[at.0].instructions.len() - at.1);
        insert(program, (at.0, to), again)
    }),
    ("neighbours exchanged", |program, random| {
        let at = place(program, random)?;
        let moved = remove(program, at)?;
        insert(program, (at.0, (at.1 + 1).min(program.sections[at.0].instructions.len())), moved)
    }),
    ("an instruction moved", |program, random| {
        let at = place(program, random)?;
        let moved = remove(program, at)?;
        let to = random.below(program.sections[at.0].instructions.len() + 1);
        insert(program, (at.0, to), moved)
    }),
    ("an instruction in another section", |program, random| {
        let at = place(program, random)?;
        let moved = Instruction { after: Vec::new(), ..remove(program, at)? };
        let section = SectionId::new(random.below(program.sections.len()));
        let to = random.below(program.sections[section].instructions.len() + 1);
        insert(program, (section, to), moved)
    }),
    ("a copy put in", |program, random| {
        let at = place(program, random)?;
        let to = *random.choose(&instruction(program, at).buffers().collect::<Vec<_>>())?;
        let from = of_type(program, to, random)?;
        let action = random.choose(&[Action::Copy, Action::Accumulate])?.clone();
        let [from, to] = if random.below(2) == 0 { [from, to] } else { [to, from] };
        insert(program, at, Instruction::new(action, vec![from], vec![to], Stream::Compute))
    }),
    ("zeros put in", |program, random| {
        let at = place(program, random)?;
        let to = *random.choose(&instruction(program, at).buffers().collect::<Vec<_>>())?;
        let other = if random.below(2) == 0 { at } else { place(program, random)? };
        let source = instruction(program, other).source;
        let zeros = Action::Compute(Constant { value: 0.0 }.into());
        let at = (at.0, at.1 + random.below(2));
        insert(program, at, Instruction { source, ..Instruction::new(zeros, Vec::new(), vec![to], Stream::Compute) })
    }),
    ("a collective put in", |program, random| {
        let other = place_of(program, random, |of| of.action.group().is_some())?;
        let mut again = Instruction { after: Vec::new(), ..instruction(program, other).clone() };
        for list in [&mut again.operands, &mut again.results] {
            let kept = list[random.below(list.len())];
            *list = vec![of_type(program, kept, random).filter(|_| random.below(2) == 0).unwrap_or(kept)];
        }
        let at = place(program, random)?;
        insert(program, at, again)
    }),
    ("the action of another instruction", |program, random| {
        let (at, other) = (place(program, random)?, place(program, random)?);
        let Instruction { action, source, .. } = instruction(program, other).clone();
        let of = instruction(program, at);
        of.action = action;
        if random.below(2) == 0 {
            of.source = source;
        }
        Some(())
    }),
    ("another instruction with these results, or operands", |program, random| {
        let (at, other) = (place(program, random)?, place(program, random)?);
        let other = instruction(program, other).clone();
        let Instruction { operands, results, after, .. } = instruction(program, at).clone();
        *instruction(program, at) = match random.below(2) {
            0 => Instruction { results, after, ..other },
            _ => Instruction { operands, after, ..other },
        };
        Some(())
    }),
    ("another attribute", |program, random| {
        let at = place_of(program, random, |of| matches!(of.action, Action::Compute(_)))?;
        let Action::Compute(op) = &mut instruction(program, at).action else { return None };
        let mut value = serde_json::to_value(&*op).ok()?;
        change_value(&mut value, random)?;
        *op = serde_json::from_value(value).ok()?;
        Some(())
    }),
    ("another operation", |program, random| {
        let at = place_of(program, random, |of| matches!(of.action, Action::Compute(_)))?;
        let Action::Compute(op) = &instruction(program, at).action else { return None };
        let names = ["add", "sub", "mul", "div", "max", "min", "exp", "log", "neg", "reduce_sum", "reduce_max", "cast"];
        let attributes = op.attributes().into_iter().collect();
        let other = Op::from_text(random.choose(&names)?, attributes).ok()?;
        instruction(program, at).action = Action::Compute(other);
        Some(())
    }),
    ("another kind of action", |program, random| {
        let at = place_of(program, random, |of| !matches!(of.action, Action::Compute(_)))?;
        let groups = program.groups.len();
        let of = instruction(program, at);
        let group = of.action.group().or(random.index(groups))?;
        let reduce = *random.choose(&[ReduceKind::Sum, ReduceKind::Max])?;
        let input = random.below(2);
        let peer = random.below(2) as u64;
        let all = [
            Action::AllReduce { reduce, group },
            Action::AllGather { group },
            Action::ReduceScatter { reduce, group },
            Action::AllToAll { group },
            Action::Send { peer },
            Action::Receive { peer },
            Action::Accumulate,
            Action::Copy,
            Action::Feed { input },
        ];
        of.action = random.choose(&all)?.clone();
        Some(())
    }),
    ("another number of an action", |program, random| {
        let at = place_of(program, random, |of| !matches!(of.action, Action::Compute(_)))?;
        let (groups, inputs, ranks) = (program.groups.len(), program.inputs.len(), program.ranks);
        let kinds = [ReduceKind::Sum, ReduceKind::Max, ReduceKind::LogSumExp];
        match &mut instruction(program, at).action {
            Action::AllReduce { reduce, .. } | Action::ReduceScatter { reduce, .. } if random.below(2) == 0 => {
                *reduce = *random.choose(&kinds)?;
            }
            Action::AllReduce { group, .. }
            | Action::AllGather { group }
            | Action::ReduceScatter { group, .. }
            | Action::AllToAll { group } => *group = random.below(groups + 1),
            Action::Send { peer } | Action::Receive { peer } => *peer = random.below(ranks as usize + 1) as u64,
            Action::Feed { input } => *input = random.below(inputs + 1),
            Action::Compute(_) | Action::Accumulate | Action::Copy => return None,
        }
        Some(())
    }),
    ("another operand", |program, random| {
        let at = place_of(program, random, |of| !of.operands.is_empty())?;
        let index = random.index(instruction(program, at).operands.len())?;
        let old = instruction(program, at).operands[index];
        let other = another(program, old, random)?;
        instruction(program, at).operands[index] = other;
        Some(())
    }),
    ("another result", |program, random| {
        let at = place_of(program, random, |of| !of.results.is_empty())?;
        let index = random.index(instruction(program, at).results.len())?;
        let old = instruction(program, at).results[index];
        let other = another(program, old, random)?;
        instruction(program, at).results[index] = other;
        Some(())
    }),
    ("operands in another order, or number", |program, random| {
        let at = place_of(program, random, |of| !of.operands.is_empty())?;
        change_list(&mut instruction(program, at).operands, random)
    }),
    ("results in another order, or number", |program, random| {
        let at = place_of(program, random, |of| !of.results.is_empty())?;
        change_list(&mut instruction(program, at).results, random)
    }),
    ("items exchanged", |program, random| {
        let at = place_of(program, random, |of| of.operands.len() > 1 && of.results.len() > 1)?;
        let Instruction { operands, results, .. } = instruction(program, at);
        let (a, b) = (random.below(results.len()), random.below(results.len()));
        let (takes, makes) = (operands.len() / results.len(), 1);
        for (list, size) in [(operands, takes.max(1)), (results, makes)] {
            for index in 0..size {
                let (a, b) = (a * size + index, b * size + index);
                (a < list.len() && b < list.len()).then(|| list.swap(a, b));
            }
        }
        Some(())
    }),
    ("an item dropped", |program, random| {
        let at = place_of(program, random, |of| of.results.len() > 1)?;
        let Instruction { operands, results, action, .. } = instruction(program, at);
        let count = match action {
            Action::Compute(Op::Each(each)) => {
                each.count -= 1;
                each.count + 1
            }
            _ => results.len(),
        };
        let item = random.below(count);
        for list in [operands, results] {
            let size = (list.len() / count).max(1);
            let end = list.len().min((item + 1) * size);
            list.drain((item * size).min(end)..end);
        }
        Some(())
    }),
    ("operands of two instructions exchanged", |program, random| {
        let (at, other) = two_of_a_name(program, random)?;
        let (a, b) = (instruction(program, at).operands.clone(), instruction(program, other).operands.clone());
        instruction(program, at).operands = b;
        instruction(program, other).operands = a;
        Some(())
    }),
    ("results of two instructions exchanged", |program, random| {
        let (at, other) = two_of_a_name(program, random)?;
        let (a, b) = (instruction(program, at).results.clone(), instruction(program, other).results.clone());
        instruction(program, at).results = b;
        instruction(program, other).results = a;
        Some(())
    }),
    ("one buffer read for another from somewhere on", |program, random| {
        let at = place_of(program, random, |of| !of.operands.is_empty())?;
        let from = *random.choose(&instruction(program, at).operands.clone())?;
        let to = of_type(program, from, random)?;
        let later = program.sections[at.0].instructions[at.1..].iter_mut().flat_map(|of| &mut of.operands);
        later.filter(|operand| **operand == from).for_each(|operand| *operand = to);
        Some(())
    }),
    ("one buffer for another everywhere", |program, random| {
        let from = *random.choose(&program.buffers.keys().collect::<Vec<_>>())?;
        let to = of_type(program, from, random)?;
        let all = program.sections.values_mut().flat_map(|section| &mut section.instructions);
        let all = all.flat_map(|of| of.operands.iter_mut().chain(&mut of.results));
        all.filter(|buffer| **buffer == from).for_each(|buffer| *buffer = to);
        Some(())
    }),
    ("other scratch memory", |program, random| {
        let at = place(program, random)?;
        let other = *random.choose(&program.buffers.keys().collect::<Vec<_>>())?;
        let scratch = &mut instruction(program, at).scratch;
        *scratch = if scratch.is_some() && random.below(2) == 0 { None } else { Some(other) };
        Some(())
    }),
    ("another stream", |program, random| {
        let at = place(program, random)?;
        let near = [Stream::Compute, Stream::Communication, Stream::Messages];
        let all = if random.below(4) == 0 { &Stream::ALL[..] } else { &near[..] };
        instruction(program, at).stream = *random.choose(all)?;
        Some(())
    }),
    ("a wait dropped", |program, random| {
        let at = place_of(program, random, |of| !of.after.is_empty())?;
        let after = &mut instruction(program, at).after;
        after.remove(random.below(after.len()));
        Some(())
    }),
    ("a wait for another instruction", |program, random| {
        let at = place_of(program, random, |of| !of.after.is_empty())?;
        let after = &mut instruction(program, at).after;
        let index = random.below(after.len());
        after[index] = match random.below(3) {
            0 => after[index] + 1,
            1 => after[index].saturating_sub(1),
            _ => random.below(at.1 + 1),
        };
        Some(())
    }),
    ("one wait more", |program, random| {
        let at = place(program, random)?;
        let other = random.below(at.1 + 2);
        instruction(program, at).after.push(other);
        Some(())
    }),
    ("from another node", |program, random| {
        let at = place(program, random)?;
        let sources: Vec<NodeId> = program.instructions().filter_map(|of| of.source).collect();
        let other = *random.choose(&sources)?;
        instruction(program, at).source = (random.below(4) > 0).then_some(other);
        Some(())
    }),
    ("a buffer of another type", |program, random| {
        let id = BufferId::new(random.index(program.buffers.len())?);
        change_type(&mut program.buffers[id].ty, random)
    }),
    ("a buffer at another place", |program, random| {
        let id = BufferId::new(random.index(program.buffers.len())?);
        let other = program.buffers[BufferId::new(random.below(program.buffers.len()))].offset;
        let Buffer { offset, .. } = &mut program.buffers[id];
        *offset = match random.below(5) {
            0 => *offset + 256,
            1 => offset.saturating_sub(256),
            2 => *offset + 4,
            _ => other,
        };
        Some(())
    }),
    ("buffers at each other's places", |program, random| {
        let id = BufferId::new(random.index(program.buffers.len())?);
        let other = of_type(program, id, random)?;
        let offset = program.buffers[id].offset;
        program.buffers[id].offset = program.buffers[other].offset;
        program.buffers[other].offset = offset;
        Some(())
    }),
    ("another space, category or value of a buffer", |program, random| {
        let id = BufferId::new(random.index(program.buffers.len())?);
        let values: Vec<_> = program.buffers.values().map(|buffer| buffer.value).collect();
        let Buffer { ty: _, space, offset: _, category, value } = &mut program.buffers[id];
        match random.below(3) {
            0 => *space = *random.choose(&[Space::Device, Space::Host, Space::Disk])?,
            1 => *category = *random.choose(&Category::ALL)?,
            _ => *value = *random.choose(&values)?,
        }
        Some(())
    }),
    ("another arena", |program, random| {
        let index = random.index(program.arenas.len())?;
        match random.below(5) {
            0 => program.arenas[index].1.0 += 256,
            1 => program.arenas[index].1.0 = program.arenas[index].1.0.saturating_sub(256),
            2 => drop(program.arenas.remove(index)),
            3 => program.arenas.push(program.arenas[index]),
            _ => program.arenas[index].0 = Space::Host,
        }
        Some(())
    }),
    ("another name of a section", |program, random| {
        let names: Vec<String> = program.sections.values().map(|section| section.name.clone()).collect();
        let id = SectionId::new(random.index(program.sections.len())?);
        program.sections[id].name = format!("{}{}", random.choose(&names)?, ["", "x"][random.below(2)]);
        Some(())
    }),
    ("runs in another order, or number", |program, random| change_list(&mut program.order, random)),
    ("another run", |program, random| {
        let index = random.index(program.order.len())?;
        let runs = program.order.clone();
        match random.below(4) {
            0 => program.order[index].section = SectionId::new(random.below(program.sections.len() + 1)),
            1 => program.order[index].microbatch = random.choose(&runs)?.microbatch,
            2 => program.order[index].microbatch += 1,
            _ => program.order[index] = *random.choose(&runs)?,
        }
        Some(())
    }),
    ("another group", |program, random| {
        let ranks = program.ranks as usize;
        match random.below(3) {
            0 => change_list(&mut program.groups, random),
            1 => {
                let index = random.index(program.groups.len())?;
                change_list(&mut program.groups[index], random)
            }
            _ => {
                let index = random.index(program.groups.len())?;
                let group = &mut program.groups[index];
                let member = random.index(group.len())?;
                group[member] = random.below(ranks + 1) as u64;
                Some(())
            }
        }
    }),
    ("another input", |program, random| {
        let index = random.index(program.inputs.len())?;
        let names: Vec<String> = program.inputs.iter().map(|input| input.name.clone()).collect();
        let Feed { name, ty, slices } = &mut program.inputs[index];
        match random.below(5) {
            0 => name.clone_from(random.choose(&names)?),
            1 => return change_type(ty, random),
            2 => return change_list(slices, random),
            3 => {
                let slice = random.index(slices.len())?;
                return change_part(&mut slices[slice], random);
            }
            _ => return change_list(&mut program.inputs, random),
        }
        Some(())
    }),
    ("another slot", |program, random| {
        let index = random.index(program.slots.len())?;
        let others: Vec<Slot> = program.slots.clone();
        let other = random.choose(&others)?;
        let home = BufferId::new(random.below(program.buffers.len()));
        let Slot { name, buffer, ty, slice, is_parameter, init, cast_of } = &mut program.slots[index];
        match random.below(9) {
            0 => name.clone_from(&other.name),
            1 => *buffer = if random.below(2) == 0 { other.buffer } else { home },
            2 => return change_type(ty, random),
            3 => return change_part(slice, random),
            4 => slice.clone_from(&other.slice),
            5 => *is_parameter = !*is_parameter,
            6 => *init += 1.0,
            7 => *cast_of = if cast_of.is_some() { None } else { Some(other.name.clone()) },
            _ => return change_list(&mut program.slots, random),
        }
        Some(())
    }),
    ("slots at each other's places", |program, random| {
        let index = random.index(program.slots.len())?;
        let ty = &program.buffers[program.slots[index].buffer].ty;
        let alike = (0..program.slots.len()).filter(|of| program.buffers[program.slots[*of].buffer].ty == *ty);
        let other = *random.choose(&alike.collect::<Vec<_>>())?;
        let buffer = program.slots[index].buffer;
        program.slots[index].buffer = program.slots[other].buffer;
        program.slots[other].buffer = buffer;
        Some(())
    }),
    ("another reading", |program, random| {
        let index = random.index(program.readings.len())?;
        let names: Vec<String> = program.readings.iter().map(|reading| reading.name.clone()).collect();
        let other = another(program, program.readings[index].buffer, random)?;
        let Reading { name, buffer } = &mut program.readings[index];
        match random.below(4) {
            0 => name.clone_from(random.choose(&names)?),
            1 | 2 => *buffer = other,
            _ => return change_list(&mut program.readings, random),
        }
        Some(())
    }),
    ("another rank", |program, random| {
        match random.below(2) {
            0 => program.rank = random.below(program.ranks as usize + 1) as u64,
            _ => program.ranks = random.below(2 * program.ranks as usize) as u64,
        }
        Some(())
    }),
];

type At = (SectionId, usize);

fn instruction(program: &mut Program, at: At) -> &mut Instruction {
    &mut program.sections[at.0].instructions[at.1]
}

fn place(program: &Program, random: &mut Random) -> Option<At> {
    place_of(program, random, |_| true)
}

/// The place of an instruction that fits; every second time of one whose kind is as likely as any other.
fn place_of(program: &Program, random: &mut Random, fits: impl Fn(&Instruction) -> bool) -> Option<At> {
    let mut all = places(program, fits);
    if random.below(2) == 0 {
        let name = |at: &At| program.sections[at.0].instructions[at.1].action.name();
        let names: BTreeSet<&str> = all.iter().map(name).collect();
        let chosen = *random.choose(&names.into_iter().collect::<Vec<_>>())?;
        all.retain(|at| name(at) == chosen);
    }
    random.choose(&all).copied()
}

fn places(program: &Program, fits: impl Fn(&Instruction) -> bool) -> Vec<At> {
    let sections = program.sections.iter();
    let all = sections.flat_map(|(id, section)| section.instructions.iter().enumerate().map(move |of| (id, of)));
    all.filter(|(_, (_, of))| fits(of)).map(|(id, (at, _))| (id, at)).collect()
}

fn two_of_a_name(program: &Program, random: &mut Random) -> Option<(At, At)> {
    let at = place(program, random)?;
    let title = program.sections[at.0].instructions[at.1].action.name();
    let others = places(program, |of| of.action.name() == title);
    Some((at, *random.choose(&others)?))
}

/// Those that come later keep waiting for those for which they waited.
fn insert(program: &mut Program, at: At, new: Instruction) -> Option<()> {
    let instructions = &mut program.sections[at.0].instructions;
    let mut new = new;
    new.after.retain(|after| *after < at.1);
    instructions.insert(at.1, new);
    let later = instructions[at.1 + 1..].iter_mut().flat_map(|of| &mut of.after);
    later.filter(|after| **after >= at.1).for_each(|after| *after += 1);
    Some(())
}

/// Those that waited for it wait for what it waited for.
fn remove(program: &mut Program, at: At) -> Option<Instruction> {
    let instructions = &mut program.sections[at.0].instructions;
    let old = instructions.remove(at.1);
    for later in &mut instructions[at.1..] {
        if later.after.contains(&at.1) {
            later.after.retain(|after| *after != at.1);
            later.after.extend(&old.after);
        }
        later.after.iter_mut().filter(|after| **after > at.1).for_each(|after| *after -= 1);
    }
    Some(old)
}

/// A buffer of the same type as another; that one only if there is no other.
fn of_type(program: &Program, like: BufferId, random: &mut Random) -> Option<BufferId> {
    let ty = &program.buffers[like].ty;
    let all = program.buffers.iter().filter(|(id, buffer)| *id != like && buffer.ty == *ty);
    random.choose(&all.map(|(id, _)| id).collect::<Vec<_>>()).copied()
}

/// A buffer in the place of another: mostly of its type, or of its size.
fn another(program: &Program, like: BufferId, random: &mut Random) -> Option<BufferId> {
    let bytes = program.buffers[like].ty.bytes();
    let same_size = |program: &Program| {
        let all = program.buffers.iter().filter(|(id, buffer)| *id != like && buffer.ty.bytes() == bytes);
        all.map(|(id, _)| id).collect::<Vec<_>>()
    };
    match random.below(6) {
        0 => Some(BufferId::new(random.below(program.buffers.len()))),
        1 => random.choose(&same_size(program)).copied(),
        _ => of_type(program, like, random),
    }
}

/// One less, one twice, or two exchanged.
pub fn change_list<T: Clone>(list: &mut Vec<T>, random: &mut Random) -> Option<()> {
    let (a, b) = (random.index(list.len())?, random.index(list.len())?);
    match random.below(4) {
        0 => drop(list.remove(a)),
        1 => list.insert(b, list[a].clone()),
        2 if a + 1 < list.len() => list.swap(a, a + 1),
        _ => list.swap(a, b),
    }
    Some(())
}

fn change_type(ty: &mut TensorType, random: &mut Random) -> Option<()> {
    let Some(dim) = random.index(ty.shape.len()).filter(|_| random.below(3) > 0) else {
        ty.dtype = *random.choose(&DType::ALL)?;
        return Some(());
    };
    let other = random.below(ty.shape.len());
    match random.below(6) {
        0 => ty.shape[dim] += 1,
        1 => ty.shape[dim] = ty.shape[dim].saturating_sub(1),
        2 => ty.shape.swap(dim, other),
        3 => ty.shape.insert(dim, 1),
        4 if dim + 1 < ty.shape.len() => {
            let size = ty.shape.remove(dim + 1);
            ty.shape[dim] *= size;
        }
        _ => drop(ty.shape.remove(dim)),
    }
    Some(())
}

fn change_part(part: &mut [(u64, u64)], random: &mut Random) -> Option<()> {
    let dim = random.index(part.len())?;
    let (first, length) = &mut part[dim];
    match random.below(5) {
        0 => *first += 1,
        1 => *first = first.saturating_sub(*length),
        2 => *first += *length,
        3 => *length = length.saturating_sub(1),
        _ => *length += 1,
    }
    Some(())
}
