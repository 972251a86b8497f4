//! Bugs put into programs whose inputs are brought to the device ahead of their readers.

use super::{Bug, PLAIN, find, findings, instruction, missed};
use crate::lower::lower_all;
use crate::lower_tests::{TINY, plan};
use shardc_ir::program::Action;
use shardc_ir::{Bytes, DType, Program, Target, TensorType, verify};

/// Brings every input ahead.
#[derive(Debug)]
pub(crate) struct Brings;

impl Target for Brings {
    fn scratch(&self, _: &Action, _: &[TensorType], _: &[TensorType]) -> Bytes {
        Bytes(0)
    }

    fn brings_ahead(&self, _: Bytes) -> bool {
        true
    }
}

/// What is put in, and a part of what the verifier says.
const BUGS: &[(&str, Bug, &str)] = &[
    ("an input brought to where others lie", aliased, "does not hold it"),
    ("two inputs brought to one place", shared, "which is also there before the step"),
    ("an input that is written over before the next step", overwritten, "where an input is brought"),
    ("an input brought as another type", other_type, "and fed as"),
    ("an input brought to two places", two_places, "two staging buffers"),
];

#[test]
fn every_seeded_bug_of_inputs_brought_ahead_is_found() {
    for pins in [PLAIN, "pp=2,dp=2,zero=1,microbatch=1"] {
        let plan = plan(TINY, DType::F32, "cpu:4", pins, false);
        let programs = lower_all(&verify::plan(&plan).expect("a plan"), &Brings).expect("programs");
        assert_eq!(findings(&plan, &programs), "", "{pins}");
        assert!(programs.iter().any(|program| !program.staging().is_empty()), "{pins}");
        if pins == PLAIN {
            let wrong: Vec<String> =
                BUGS.iter().filter_map(|(name, bug, expect)| missed(&plan, &programs, name, *bug, expect)).collect();
            assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        }
    }
}

/// Its inputs of one type, tokens and targets, by their staging buffers.
fn staged(program: &Program) -> [shardc_ir::BufferId; 2] {
    let all: Vec<_> = program.staging().into_iter().map(|(_, buffer)| buffer).collect();
    let ty = |at: usize| &program.buffers[all[at]].ty;
    let mut pairs = (0..all.len()).flat_map(|a| (0..a).map(move |b| (a, b)));
    let (a, b) = pairs.find(|(a, b)| ty(*a) == ty(*b)).expect("two inputs of one type");
    [all[a], all[b]]
}

fn aliased(programs: &mut [Program]) {
    let [staging, _] = staged(&programs[0]);
    let at = find(&programs[0], |program, of| {
        of.results
            .first()
            .is_some_and(|result| program.buffers[*result].ty.bytes() >= program.buffers[staging].ty.bytes())
    });
    let result = instruction(&mut programs[0], at).results[0];
    programs[0].buffers[staging].offset = programs[0].buffers[result].offset;
}

fn shared(programs: &mut [Program]) {
    let [a, b] = staged(&programs[0]);
    programs[0].buffers[a].offset = programs[0].buffers[b].offset;
}

fn overwritten(programs: &mut [Program]) {
    let [a, b] = staged(&programs[0]);
    let at = find(&programs[0], |_, of| of.operands == [b]);
    instruction(&mut programs[0], at).results = vec![a];
}

fn other_type(programs: &mut [Program]) {
    let [staging, _] = staged(&programs[0]);
    let ty = &mut programs[0].buffers[staging].ty;
    *ty = TensorType::new(DType::F32, ty.shape.to_vec());
}

fn two_places(programs: &mut [Program]) {
    let [staging, _] = staged(&programs[0]);
    let at = find(&programs[0], |_, of| of.operands == [staging]);
    let again = programs[0].buffers[staging].clone();
    let other = programs[0].buffers.push(again);
    let mut feed = instruction(&mut programs[0], at).clone();
    feed.operands = vec![other];
    programs[0].sections[at.0].instructions.push(feed);
}
