//! Bugs put into the program of one rank of several that are alike: what is shown of the first must be so of all.

use super::{BOTH, Bug, divide_further, find, findings, instruction, missed, op};
use crate::lower::lower_all;
use crate::lower_tests::{TINY, plan};
use shardc_ir::ops::{Constant, Op};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{DType, NoScratch, Program, verify};

/// What is put in, and a part of what the verifier says.
const BUGS: &[(&str, Bug, &str)] = &[
    ("two parameters that change places", exchanged_slots, "where rank 0 has slot"),
    ("readings of each other's values", exchanged_readings, "where rank 0 has reading"),
    ("inputs that are fed for each other", exchanged_inputs, "where rank 0 has input"),
    ("a sum that does not begin at zero", other_beginning, "does something else"),
    ("a transpose in another order", other_transpose, "it is no step of a conversion"),
];

#[test]
fn every_seeded_bug_of_one_rank_is_found() {
    let mut plan = plan(TINY, DType::F32, "cpu:4", BOTH, false);
    divide_further(&mut plan);
    let programs = lower_all(&verify::plan(&plan).expect("a plan"), &NoScratch).expect("programs");
    assert_eq!(findings(&plan, &programs), "");
    let wrong: Vec<String> =
        BUGS.iter().filter_map(|(name, bug, expect)| missed(&plan, &programs, name, *bug, expect)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn exchanged_slots(programs: &mut [Program]) {
    let program = &mut programs[1];
    let ty = |slot: usize| &program.buffers[program.slots[slot].buffer].ty;
    let mut pairs = (0..program.slots.len()).flat_map(|a| (0..a).map(move |b| (a, b)));
    let (a, b) = pairs.find(|(a, b)| ty(*a) == ty(*b)).expect("two slots of one type");
    let buffer = program.slots[a].buffer;
    program.slots[a].buffer = program.slots[b].buffer;
    program.slots[b].buffer = buffer;
}

fn exchanged_readings(programs: &mut [Program]) {
    let readings = &mut programs[1].readings;
    let buffer = readings[0].buffer;
    readings[0].buffer = readings[1].buffer;
    readings[1].buffer = buffer;
}

fn exchanged_inputs(programs: &mut [Program]) {
    programs[1].inputs.swap(0, 1);
}

fn other_beginning(programs: &mut [Program]) {
    let zero = Action::Compute(Constant { value: 0.0 }.into());
    let at = find(&programs[1], |_, of| of.action == zero);
    instruction(&mut programs[1], at).action = Action::Compute(Constant { value: 1.0 }.into());
}

fn other_transpose(programs: &mut [Program]) {
    let other = |program: &Program, of: &Instruction| {
        let Some(Op::Transpose(transpose)) = op(of) else { return None };
        let from = &program.buffers[of.operands[0]].ty.shape;
        let shape = |order: &[usize]| order.iter().map(|dim| from[*dim]).collect::<Vec<_>>();
        let order = &transpose.permutation;
        let exchanged = |(a, b): (usize, usize)| {
            let mut other = order.clone();
            other.swap(a, b);
            other
        };
        let pairs = (0..order.len()).flat_map(|a| (0..a).map(move |b| (a, b)));
        let mut others = pairs.filter(|(a, _)| from[order[*a]] > 1).map(exchanged);
        others.find(|other| shape(other) == shape(order))
    };
    let at = find(&programs[1], |program, of| other(program, of).is_some());
    let permutation = other(&programs[1], &programs[1].sections[at.0].instructions[at.1]).expect("another order");
    if let Action::Compute(Op::Transpose(transpose)) = &mut instruction(&mut programs[1], at).action {
        transpose.permutation = permutation;
    }
}
