//! Bugs put into the programs of stages of a pipeline.

use super::{At, Bug, exchanged_items, find, instruction, is_op, is_scale, missed, relocate, remove};
use crate::cluster::Cluster;
use crate::lower::lower_all;
use crate::pipeline_tests::{LAYERS, staged};
use crate::search::{Pins, search};
use crate::search_tests::llama_with;
use shardc_ir::ops::{Binary, BinaryKind, Constant, Op};
use shardc_ir::pipeline::Schedule;
use shardc_ir::plan::Request;
use shardc_ir::program::{Action, Instruction, Run, Section};
use shardc_ir::{BufferId, Bytes, DType, NoScratch, OutputKind, Plan, Program, Role, SectionId, verify};

/// The stages of the plans, which lie along the innermost axis.
const STAGES: u64 = 3;

/// What is put in, into the plan of which schedule, and a part of what the verifier says.
const BUGS: &[(&str, Schedule, Bug, &str)] = &[
    ("swapped sends", Schedule::OneForwardOneBackward, swapped_sends, "which nothing has written"),
    ("a send of another microbatch", Schedule::OneForwardOneBackward, sent_too_early, "what is in microbatch"),
    (
        "a message taken for another microbatch",
        Schedule::OneForwardOneBackward,
        received_elsewhere,
        "what is in microbatch",
    ),
    ("a slot reused while it is read", Schedule::OneForwardOneBackward, reused_slot, "what is in microbatch"),
    ("a message to another stage", Schedule::OneForwardOneBackward, wrong_stage, "waits forever"),
    ("a message to another rank of the stage", Schedule::OneForwardOneBackward, wrong_rank, "does not stand"),
    (
        "a gradient without one microbatch",
        Schedule::ZeroBubbleV,
        missing_microbatch,
        "(the sum over the microbatches up to 1 of",
    ),
    (
        "a gradient with one microbatch twice",
        Schedule::ZeroBubbleV,
        doubled_microbatch,
        "(the sum over the microbatches up to 2 of",
    ),
    ("microbatches in another order", Schedule::ZeroBubbleV, exchanged_microbatches, "which is no sum of the graph"),
    (
        "another attribute in the section of one microbatch in flight",
        Schedule::OneForwardOneBackward,
        wrong_copy,
        "its part needs rms_norm",
    ),
    ("another operation on numbers of the stages", Schedule::GPipe, wrong_total, "its part needs add"),
    ("the updates of a stage exchanged", Schedule::GPipe, exchanged_updates, "as operand 1, but adamw"),
    ("a loss scaled for another number of microbatches", Schedule::GPipe, wrong_scale, "its part needs affine"),
    ("a shared gradient of one stage alone", Schedule::GPipe, unsummed_gradient, "no sum_squares of the graph reads"),
    ("a stage that adds more than it has", Schedule::GPipe, foreign_term, "no value of the graph is the sum"),
    ("zeros of a stage that are none", Schedule::GPipe, wrong_zero, "is no sum_squares of"),
    ("numbers of one stage exchanged", Schedule::GPipe, exchanged_terms, "as operand 0, but total of"),
    ("a stage that stays out of a sum", Schedule::GPipe, absent_stage, "waits forever"),
    ("an update of a stage that is lost", Schedule::GPipe, lost_update, "after the step; it should hold"),
    ("a slot of another stage", Schedule::GPipe, foreign_slot, "a slot of another stage"),
];

/// The sum of two numbers.
const SUM: Binary = Binary { kind: BinaryKind::Add };

/// Two tensor ranks, four microbatches; the head shares the table of the embedding, which is in another stage. Beside
/// the total of the gradients' squares, all stages read the sum of the first and the last of them, added twice.
fn plan(schedule: Schedule) -> Plan {
    let mut graph = llama_with(LAYERS, DType::F32, true);
    let squares: Vec<_> = graph.nodes().filter(|(_, node)| node.op.name() == "sum_squares").collect();
    let [first, .., last] = squares.iter().map(|(_, node)| node.results[0]).collect::<Vec<_>>()[..] else {
        panic!("gradients of several parameters")
    };
    let mut sum = first;
    for _ in 0..2 {
        let node = graph.add_as(SUM.into(), &[sum, last], &[], String::new(), Role::Optimizer).expect("a sum");
        sum = graph.result(node);
    }
    graph.output("both", sum, OutputKind::Result);
    let cluster = Cluster::parse("cpu:2", "h200").expect("a cluster");
    let pins = Pins::parse("tp=2,dp=1,microbatch=3").expect("pins");
    let (batch, seq) = (LAYERS.batch, LAYERS.seq);
    let request = Request { batch, seq, device_memory: Bytes(1 << 40), ..Request::default() };
    let plan = search(&graph, &cluster, &request, &pins, &NoScratch).expect("a plan");
    staged(plan, STAGES, schedule, if schedule == Schedule::ZeroBubbleV { 2 } else { 1 })
}

#[test]
fn every_seeded_bug_of_stages_is_found() {
    let mut wrong = Vec::new();
    for schedule in [Schedule::OneForwardOneBackward, Schedule::ZeroBubbleV, Schedule::GPipe] {
        let plan = plan(schedule);
        let programs = lower_all(&verify::plan(&plan).expect("a plan"), &NoScratch).expect("programs");
        let verified = verify::step(&verify::plan(&plan).expect("a plan"), &programs);
        let shown = verified.unwrap_or_else(|found| panic!("{}: {found}", schedule.name())).facts().translation;
        assert!(shown.kernels > 100 && shown.ranks == 6, "{shown:?}");
        // Each section counts, though it is like another one.
        let is_kernel =
            |instruction: &&Instruction| matches!(&instruction.action, Action::Compute(op) if op.name() != "reshape");
        let kernels = |stage: usize| programs[stage].instructions().filter(is_kernel).count();
        let least: usize = (0..STAGES as usize).map(kernels).sum();
        assert!(shown.kernels + shown.conversions >= least, "{}: {shown:?} of {least}", schedule.name());
        for (name, _, bug, expect) in BUGS.iter().filter(|(_, of, ..)| *of == schedule) {
            wrong.extend(missed(&plan, &programs, name, *bug, expect));
        }
        // Without the programs of a stage nothing is shown of it.
        let some: Vec<Program> = programs.iter().filter(|program| program.rank % STAGES != 1).cloned().collect();
        let found = verify::translation(&verify::plan(&plan).expect("a plan"), &some).expect_err("a stage is missing");
        assert!(found.to_string().contains("none of them is of stage 1 of 3"), "{found}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Does something to the programs of one stage.
fn each(programs: &mut [Program], stage: u64, bug: impl FnMut(&mut Program)) {
    programs.iter_mut().filter(|program| program.rank % STAGES == stage).for_each(bug);
}

/// The instructions of a program that fit.
fn all(program: &Program, fits: impl Fn(&Instruction) -> bool) -> Vec<At> {
    let sections = program.sections.iter();
    let all = sections.flat_map(|(section, body)| body.instructions.iter().enumerate().map(move |of| (section, of)));
    all.filter(|(_, (_, instruction))| fits(instruction)).map(|(section, (at, _))| (section, at)).collect()
}

/// Another buffer of the same value: its copy for another microbatch.
fn other_copy(program: &Program, buffer: BufferId) -> Option<BufferId> {
    let of = &program.buffers[buffer];
    let mut others = program.buffers.iter().filter(|(id, other)| {
        *id != buffer
            && other.value.is_some()
            && other.value == of.value
            && other.ty == of.ty
            && other.offset != of.offset
    });
    others.next().map(|(id, _)| id)
}

fn sent(instruction: &Instruction) -> Option<(u64, BufferId)> {
    match instruction.action {
        Action::Send { peer } => Some((peer, instruction.operands[0])),
        _ => None,
    }
}

fn swapped_sends(programs: &mut [Program]) {
    each(programs, 0, |program| {
        let at = all(program, |instruction| sent(instruction).is_some());
        let of = |at: &At| sent(&program.sections[at.0].instructions[at.1]).expect("a message");
        let alike = |(a, b): &(At, At)| {
            let ((to, x), (other, y)) = (of(a), of(b));
            to == other && x != y && program.buffers[x].value == program.buffers[y].value
        };
        let mut pairs = at.iter().flat_map(|a| at.iter().map(move |b| (*a, *b)));
        let (a, b) = pairs.find(alike).expect("messages of two microbatches");
        let (x, y) = (of(&a).1, of(&b).1);
        instruction(program, a).operands = vec![y];
        instruction(program, b).operands = vec![x];
    });
}

fn sent_too_early(programs: &mut [Program]) {
    each(programs, 0, |program| {
        let at = all(program, |instruction| sent(instruction).is_some());
        let copy = |at: &At| other_copy(program, program.sections[at.0].instructions[at.1].operands[0]);
        let (at, other) = at.iter().rev().find_map(|at| Some((*at, copy(at)?))).expect("a message with copies");
        instruction(program, at).operands = vec![other];
    });
}

fn received_elsewhere(programs: &mut [Program]) {
    each(programs, 1, |program| {
        let at = all(program, |instruction| matches!(instruction.action, Action::Receive { .. }));
        let copy = |at: &At| other_copy(program, program.sections[at.0].instructions[at.1].results[0]);
        let (at, other) = at.iter().rev().find_map(|at| Some((*at, copy(at)?))).expect("a message with copies");
        instruction(program, at).results = vec![other];
    });
}

fn reused_slot(programs: &mut [Program]) {
    each(programs, 0, |program| {
        let made = all(program, |instruction| is_op(instruction, "swiglu"));
        let made: Vec<BufferId> = made.iter().map(|at| instruction(program, *at).results[0]).collect();
        let (from, to) = made.iter().find_map(|buffer| Some((*buffer, other_copy(program, *buffer)?))).expect("copies");
        for instruction in program.sections.values_mut().flat_map(|section| &mut section.instructions) {
            let buffers = instruction.operands.iter_mut().chain(&mut instruction.results);
            buffers.filter(|buffer| **buffer == from).for_each(|buffer| *buffer = to);
        }
    });
}

fn wrong_stage(programs: &mut [Program]) {
    each(programs, 0, |program| {
        let own = program.rank;
        let at = all(program, |instruction| sent(instruction).is_some_and(|(peer, _)| peer == own + 1));
        instruction(program, at[0]).action = Action::Send { peer: own + 2 };
    });
}

fn wrong_rank(programs: &mut [Program]) {
    for program in programs {
        let away = |peer: u64| (peer + STAGES) % (2 * STAGES);
        for instruction in program.sections.values_mut().flat_map(|section| &mut section.instructions) {
            match &mut instruction.action {
                Action::Send { peer } | Action::Receive { peer } => *peer = away(*peer),
                _ => {}
            }
        }
    }
}

/// The run in which a stage makes the gradients of weights of one of its chunks, for a microbatch.
fn weights(program: &Program, microbatch: u64) -> usize {
    let is_it = |run: &Run| program.sections[run.section].name.starts_with("weight.") && run.microbatch == microbatch;
    program.order.iter().position(is_it).expect("a run")
}

fn is_message(instruction: &Instruction) -> bool {
    matches!(instruction.action, Action::Send { .. } | Action::Receive { .. })
}

/// A section with the messages of another, which others would wait for, or with all the rest of it.
fn part(program: &mut Program, of: SectionId, of_messages: bool) -> SectionId {
    let Section { name, instructions } = program.sections[of].clone();
    let is_kept = |instruction: &&Instruction| is_message(instruction) == of_messages;
    let kept = instructions.iter().filter(is_kept);
    let at = |index: usize| instructions[..index].iter().filter(is_kept).count();
    let waits =
        |after: &[usize]| after.iter().filter(|at| is_kept(&&instructions[**at])).map(|index| at(*index)).collect();
    let kept = kept.map(|own| Instruction { after: waits(&own.after), ..own.clone() }).collect();
    program.sections.push(Section { name, instructions: kept })
}

fn missing_microbatch(programs: &mut [Program]) {
    each(programs, 1, |program| {
        let at = weights(program, 2);
        program.order[at].section = part(program, program.order[at].section, true);
    });
}

fn doubled_microbatch(programs: &mut [Program]) {
    each(programs, 1, |program| {
        let at = weights(program, 2);
        let again = Run { section: part(program, program.order[at].section, false), ..program.order[at] };
        program.order.insert(at + 1, again);
    });
}

fn exchanged_microbatches(programs: &mut [Program]) {
    // Of one chunk, those that are next to each other of the ones that carry no messages, which others would wait for.
    each(programs, 0, |program| {
        let chunk = |run: &Run| {
            let section = &program.sections[run.section];
            let chunk = section.name.strip_prefix("weight.")?.split('.').next()?;
            (!section.instructions.iter().any(is_message)).then(|| chunk.to_string())
        };
        let of: Vec<Option<String>> = program.order.iter().map(chunk).collect();
        let pairs =
            (0..of.len()).filter_map(|a| Some((a, (a + 1..of.len()).find(|b| of[a].is_some() && of[*b] == of[a])?)));
        let (a, b) = pairs.min_by_key(|(a, b)| b - a).expect("two microbatches of a chunk");
        program.order.swap(a, b);
    });
}

fn wrong_copy(programs: &mut [Program]) {
    each(programs, 0, |program| {
        let copies = all(program, |instruction| is_op(instruction, "rms_norm"));
        let last = *copies.last().expect("copies");
        assert!(copies[0].0 != last.0, "a section for each microbatch in flight");
        if let Action::Compute(Op::RmsNorm(norm)) = &mut instruction(program, last).action {
            norm.eps *= 2.0;
        }
    });
}

fn wrong_total(programs: &mut [Program]) {
    each(programs, 1, |program| {
        let sums = all(program, |instruction| {
            instruction.action == Action::Compute(SUM.into()) && program.buffers[instruction.results[0]].ty.rank() == 0
        });
        let last = *sums.last().expect("a sum of numbers");
        instruction(program, last).action = Action::Compute(Binary { kind: BinaryKind::Sub }.into());
    });
}

fn exchanged_updates(programs: &mut [Program]) {
    each(programs, 1, |program| exchanged_items(std::slice::from_mut(program)));
}

fn wrong_scale(programs: &mut [Program]) {
    each(programs, STAGES - 1, |program| {
        let at = find(program, is_scale);
        if let Action::Compute(Op::Affine(affine)) = &mut instruction(program, at).action {
            affine.scale /= 4.0;
        }
    });
}

fn unsummed_gradient(programs: &mut [Program]) {
    each(programs, 0, |program| {
        let table = program.slots.iter().find(|slot| slot.name == "embedding.weight").expect("a table").buffer;
        let ty = program.buffers[table].ty.clone();
        let got = all(program, |instruction| matches!(instruction.action, Action::Receive { .. }));
        let got = got.iter().map(|at| program.sections[at.0].instructions[at.1].results[0]);
        let got: Vec<BufferId> = got.filter(|buffer| program.buffers[*buffer].ty == ty).collect();
        let at = find(program, |_, instruction| instruction.operands.iter().any(|operand| got.contains(operand)));
        let sum = instruction(program, at);
        sum.operands.retain(|operand| !got.contains(operand));
        sum.action = Action::Copy;
    });
}

/// The instruction of a sum over stages.
fn sum_over_stages(program: &Program) -> At {
    let is_it = |program: &Program, instruction: &Instruction| {
        instruction.action.group().is_some_and(|group| program.groups[group].len() as u64 == STAGES)
    };
    find(program, is_it)
}

/// What a stage adds to the sums of all: of the numbers that others have, zeros.
fn terms(program: &Program) -> (Vec<At>, Vec<BufferId>) {
    let at = sum_over_stages(program);
    let terms = program.sections[at.0].instructions[at.1].operands.clone();
    let zero = Action::Compute(Constant { value: 0.0 }.into());
    let zeros = all(program, |instruction| instruction.action == zero && terms.contains(&instruction.results[0]));
    (zeros, terms)
}

fn foreign_term(programs: &mut [Program]) {
    each(programs, 1, |program| {
        let (zeros, terms) = terms(program);
        let zeros: Vec<BufferId> = zeros.iter().map(|at| instruction(program, *at).results[0]).collect();
        let is_zero = |term: &BufferId| zeros.contains(term);
        let (zero, own) = (terms.iter().position(is_zero), terms.iter().position(|term| !is_zero(term)));
        let (zero, own, at) = (zero.expect("zeros"), own.expect("a term"), sum_over_stages(program));
        let results = [zero, own].map(|index| instruction(program, at).results[index]);
        results.into_iter().for_each(|result| relocate(program, result));
        instruction(program, at).operands[zero] = terms[own];
    });
}

fn wrong_zero(programs: &mut [Program]) {
    each(programs, 1, |program| {
        let zero = terms(program).0[0];
        instruction(program, zero).action = Action::Compute(Constant { value: 1.0 }.into());
    });
}

fn exchanged_terms(programs: &mut [Program]) {
    each(programs, 1, |program| {
        let at = sum_over_stages(program);
        let sum = instruction(program, at);
        sum.operands.swap(0, 1);
        sum.results.swap(0, 1);
    });
}

fn absent_stage(programs: &mut [Program]) {
    each(programs, 1, |program| {
        let at = sum_over_stages(program);
        remove(program, at);
    });
}

fn lost_update(programs: &mut [Program]) {
    each(programs, 1, |program| {
        let at = find(
            program,
            |_, instruction| matches!(&instruction.action, Action::Compute(op) if op.single().name() == "adamw"),
        );
        remove(program, at);
    });
}

fn foreign_slot(programs: &mut [Program]) {
    let slot = programs[0].slots[0].clone();
    each(programs, 1, |program| {
        let buffer = program.buffers[program.slots[0].buffer].clone();
        let at = program.arenas[0].1.0.next_multiple_of(256);
        let ty = slot.ty.with_shape(slot.slice.iter().map(|(_, length)| *length).collect::<Vec<u64>>());
        program.arenas[0].1.0 = at + ty.bytes().0;
        let buffer = program.buffers.push(shardc_ir::program::Buffer { ty, offset: at, ..buffer });
        program.slots.push(shardc_ir::program::Slot { buffer, ..slot.clone() });
    });
}
