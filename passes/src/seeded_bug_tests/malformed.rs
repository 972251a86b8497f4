//! Bugs that no fact about a buffer shows: programs that say one thing twice, or what no program says.

use super::{BOTH, findings, insert, instruction};
use crate::lower::lower_all;
use crate::lower_tests::{TINY, Wants, plan};
use shardc_ir::ops::{Fused, Op};
use shardc_ir::program::{Action, Instruction, Reading, Stream};
use shardc_ir::{DType, EntityRef, NodeId, Plan, Program, SectionId, verify};

fn subject() -> (Plan, Vec<Program>) {
    let plan = plan(TINY, DType::F32, "cpu:4", BOTH, false);
    let programs = lower_all(&verify::plan(&plan).expect("a plan"), &Wants).expect("programs");
    assert_eq!(findings(&plan, &programs), "");
    (plan, programs)
}

#[track_caller]
fn check(plan: &Plan, programs: &[Program], expect: &str) {
    let found = findings(plan, programs);
    assert!(found.contains(expect), "`{expect}` is not in:\n{found}");
}

#[test]
fn a_reading_of_two_values() {
    let (plan, mut programs) = subject();
    for program in &mut programs {
        let [first, second, ..] = &program.readings[..] else { panic!("two readings") };
        let again = Reading { buffer: second.buffer, ..first.clone() };
        program.readings.push(again);
    }
    check(&plan, &programs, "there are two readings of this name");
}

#[test]
fn a_parameter_that_an_instruction_makes() {
    let (plan, mut programs) = subject();
    let (value, leaf) = plan.graph.leaves().find(|(_, node)| matches!(node.op, Op::Parameter(_))).expect("a parameter");
    let Op::Parameter(parameter) = &leaf.op else { panic!("a parameter") };
    for program in &mut programs {
        let slot = program.slots.iter().find(|slot| slot.name == parameter.name).expect("its slot").buffer;
        let made = Instruction::new(Action::Compute(leaf.op.clone()), Vec::new(), vec![slot], Stream::Compute);
        let source = Some(plan.graph.value(value).def);
        insert(program, (SectionId::from_u32(0), 0), Instruction { source, ..made });
    }
    check(&plan, &programs, "computes the parameter of a graph");
}

/// The second of two equal regions writes its first result over its second as well.
#[test]
fn a_region_that_writes_one_value_twice() {
    let (plan, mut programs) = subject();
    let alike = |program: &Program, of: &Instruction| {
        let ty = |at: usize| &program.buffers[of.results[at]].ty;
        (1..of.results.len()).find_map(|b| (0..b).find(|a| ty(*a) == ty(b)).map(|a| (a, b)))
    };
    let is_region = |of: &Instruction| matches!(of.action, Action::Compute(Op::Fused(_)));
    let at = super::find(&programs[0], |program, of| is_region(of) && alike(program, of).is_some());
    for program in &mut programs {
        let mut again = instruction(program, at).clone();
        let (a, b) = alike(program, &again).expect("two results of one type");
        if let Action::Compute(Op::Fused(Fused { results, .. })) = &mut again.action {
            results[b] = results[a];
        }
        insert(program, (at.0, at.1 + 1), Instruction { after: Vec::new(), ..again });
    }
    check(&plan, &programs, "is two results");
}

#[test]
fn an_instruction_of_no_node() {
    let (plan, mut programs) = subject();
    let none = NodeId::new(plan.graph.node_count());
    let is_kernel = |_: &Program, of: &Instruction| of.source.is_some();
    let at = super::find(&programs[0], is_kernel);
    programs.iter_mut().for_each(|program| instruction(program, at).source = Some(none));
    check(&plan, &programs, "which is no node of the graph");
}

/// An input is fed once more, to a buffer that is longer than its part.
#[test]
fn an_input_in_a_longer_buffer() {
    let (plan, mut programs) = subject();
    let is_feed = |program: &Program, of: &Instruction| {
        matches!(of.action, Action::Feed { .. }) && program.buffers[of.results[0]].ty.rank() > 0
    };
    let at = super::find(&programs[0], is_feed);
    for program in &mut programs {
        let feed = instruction(program, at).clone();
        let mut longer = program.buffers[feed.results[0]].clone();
        longer.ty = longer.ty.with_shape(longer.ty.shape.iter().map(|size| 2 * size).collect::<Vec<_>>());
        let longer = program.buffers.push(longer);
        super::relocate(program, longer);
        insert(program, at, Instruction { operands: Vec::new(), results: vec![longer], ..feed });
    }
    check(&plan, &programs, "by its layout a rank's part is");
}
