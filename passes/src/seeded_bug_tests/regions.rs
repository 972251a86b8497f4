//! Bugs put into regions that write over what they read.

use super::runs::exponential;
use super::{At, findings, instruction, relocate};
use crate::lower::lower_all;
use crate::lower_tests::Wants;
use shardc_ir::ops::{Fused, Op, OpDef};
use shardc_ir::program::{Action, Program};
use shardc_ir::verify;

/// A region, the result of it that one of its steps goes on with, and the operand that the result may lie over.
#[derive(Clone, Copy)]
struct Site {
    at: At,
    result: usize,
    operand: usize,
}

fn region(program: &mut Program, at: At) -> &mut Fused {
    match &mut instruction(program, at).action {
        Action::Compute(Op::Fused(region)) => region,
        other => panic!("{} is no region", other.name()),
    }
}

fn sites(program: &Program) -> Vec<Site> {
    let mut sites = Vec::new();
    for (section, body) in &program.sections {
        for (index, of) in body.instructions.iter().enumerate() {
            let Action::Compute(Op::Fused(region)) = &of.action else { continue };
            let ty = |id| &program.buffers[id].ty;
            for (result, value) in region.results.iter().enumerate() {
                let is_read = region.steps.iter().any(|step| step.operands.contains(value));
                let may = |operand: &usize| {
                    let (from, to) = (of.operands[*operand], of.results[result]);
                    let is_kept = program.slots.iter().any(|slot| slot.buffer == from);
                    ty(from) == ty(to) && region.may_overwrite(*operand, of.operands.len()) && !is_kept
                };
                let operands = (0..of.operands.len()).filter(may).filter(|_| is_read);
                sites.extend(operands.map(|operand| Site { at: (section, index), result, operand }));
            }
        }
    }
    sites
}

/// A result of a region in the place of an operand, under its name.
fn in_place(program: &mut Program, site: Site) {
    let of = instruction(program, site.at).clone();
    let (from, to) = (of.operands[site.operand], of.results[site.result]);
    relocate(program, from);
    let all = program.sections[site.at.0].instructions[site.at.1..].iter_mut();
    all.skip(1)
        .flat_map(|of| of.operands.iter_mut().chain(&mut of.results))
        .filter(|id| **id == to)
        .for_each(|id| *id = from);
    instruction(program, site.at).results[site.result] = from;
}

/// The steps that go on with the result read the operand in its place.
fn stale(program: &mut Program, site: Site) {
    let region = region(program, site.at);
    let value = region.results[site.result];
    let all = region.steps.iter_mut().flat_map(|step| &mut step.operands);
    all.filter(|read| **read == value).for_each(|read| *read = site.operand);
}

#[test]
fn a_step_of_a_region_that_reads_what_was_written_over_is_found() {
    let plan = exponential(&Wants);
    let programs = lower_all(&verify::plan(&plan).expect("a plan"), &Wants).expect("programs");
    assert_eq!(findings(&plan, &programs), "");
    let mut right = 0;
    for site in sites(&programs[0]) {
        let mut changed = programs.clone();
        changed.iter_mut().for_each(|program| in_place(program, site));
        right += usize::from(findings(&plan, &changed).is_empty());
        changed.iter_mut().for_each(|program| stale(program, site));
        assert_ne!(findings(&plan, &changed), "", "instruction {} of {}", site.at.1, site.at.0);
    }
    assert!(right > 0, "no region writes over an operand, rightly");
}
