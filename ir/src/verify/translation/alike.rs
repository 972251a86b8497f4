//! Are the programs of several ranks one program? Everything but the members of groups, the parts of
//! inputs and slots and the attributes of kernels must be equal; those are checked where they are used. What is exchanged
//! with the caller is part of it: facts begin and end in the slots, inputs and readings of the first program.

use crate::diagnostic::Diagnostics;
use crate::ops::Op;
use crate::program::{Action, Instruction, Program};

/// Compares every program with the first one.
pub(super) fn check(programs: &[Program], found: &mut Diagnostics) {
    let Some((first, others)) = programs.split_first() else { return };
    for other in others {
        compare(first, other, found);
    }
}

fn compare(first: &Program, other: &Program, found: &mut Diagnostics) {
    let place = format!("rank {}", other.rank);
    let sections = |program: &Program| {
        program.sections.values().map(|section| (section.name.clone(), section.instructions.len())).collect::<Vec<_>>()
    };
    let (ours, theirs) = (sections(other), sections(first));
    if ours != theirs {
        return found.push(place, format!("has sections {ours:?}, but rank {} has {theirs:?}", first.rank));
    }
    if other.order != first.order {
        return found.push(place, format!("runs its sections in another order than rank {}", first.rank));
    }
    let (ours, theirs) = (interface(other), interface(first));
    if let Some(at) = (0..ours.len().max(theirs.len())).find(|at| ours.get(*at) != theirs.get(*at)) {
        let text = |all: &[String]| all.get(at).map_or("nothing more".to_string(), String::clone);
        let message = format!("has {}, where rank {} has {}", text(&ours), first.rank, text(&theirs));
        found.push(&place, message);
    }
    if other.groups.len() != first.groups.len() || other.buffers.len() != first.buffers.len() {
        return found.push(place, format!("has other groups or buffers than rank {}", first.rank));
    }
    let bytes = |(a, b): &(&crate::program::Buffer, &crate::program::Buffer)| {
        (&a.ty, a.space, a.offset) != (&b.ty, b.space, b.offset)
    };
    if let Some((buffer, _)) = other.buffers.values().zip(first.buffers.values()).find(bytes) {
        let ty = &buffer.ty;
        let message = format!("a buffer {ty} lies elsewhere, or is another, than on rank {}", first.rank);
        found.push(&place, message);
    }
    for (section, body) in &other.sections {
        let pairs = body.instructions.iter().zip(&first.sections[section].instructions);
        for (index, (ours, theirs)) in pairs.enumerate() {
            if let Some(what) = difference(ours, theirs) {
                let message = format!("{what} than on rank {}", first.rank);
                found.push(other.place(section, index), message);
            }
        }
    }
}

/// What a program exchanges with the caller, in its order.
fn interface(program: &Program) -> Vec<String> {
    let inputs = program.inputs.iter().map(|input| format!("input \"{}\"", input.name));
    let slots = program.slots.iter().map(|slot| format!("slot \"{}\" in {}", slot.name, slot.buffer));
    let readings = program.readings.iter().map(|reading| format!("reading \"{}\" of {}", reading.name, reading.buffer));
    inputs.chain(slots).chain(readings).collect()
}

fn difference(ours: &Instruction, theirs: &Instruction) -> Option<&'static str> {
    let equal = match (&ours.action, &theirs.action) {
        (Action::Compute(Op::Each(a)), Action::Compute(Op::Each(b))) => a == b,
        // Zeros that a sum begins with are of no node whose attributes say so.
        (Action::Compute(Op::Constant(a)), Action::Compute(Op::Constant(b))) => a == b,
        (Action::Compute(Op::Matmul(a)), Action::Compute(Op::Matmul(b))) => {
            (a.bias, a.epilogue) == (b.bias, b.epilogue)
        }
        (Action::Compute(a), Action::Compute(b)) => a.name() == b.name(),
        // The peer of a message is a number of the rank.
        (Action::Send { .. }, Action::Send { .. }) | (Action::Receive { .. }, Action::Receive { .. }) => true,
        (a, b) => a == b,
    };
    if !equal {
        return Some("does something else");
    }
    if (&ours.operands, &ours.results, ours.scratch) != (&theirs.operands, &theirs.results, theirs.scratch) {
        return Some("reads or writes other buffers");
    }
    if (ours.stream, &ours.after) != (theirs.stream, &theirs.after) {
        return Some("waits for other instructions");
    }
    (ours.source != theirs.source).then_some("comes from another node")
}
