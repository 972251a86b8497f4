//! Bugs put into the later runs of a section, which are right in the first.

use super::{findings, insert, relocate};
use crate::cluster::Cluster;
use crate::differentiate::differentiate;
use crate::lower::lower_all;
use crate::optimizer::{OptimizerConfig, add_optimizer};
use crate::search::{Pins, search};
use shardc_ir::graph::OutputKind;
use shardc_ir::ops::{Affine, Input, Matmul, Parameter, Reduce, ReduceOp, Reshape, Unary, UnaryKind};
use shardc_ir::plan::Request;
use shardc_ir::program::{Action, Buffer, Instruction, Program, Run, Section, Stream};
use shardc_ir::{Bytes, DType, Graph, NoScratch, Op, Plan, SectionId, Target, TensorType, verify};

/// A product, half of it, the exponential of that, and a sum.
pub(super) fn exponential(target: &dyn Target) -> Plan {
    let mut graph = Graph::new("exponential");
    let ty = |shape: [u64; 2]| TensorType::new(DType::F32, shape);
    let mut add = |op: Op, operands: &[_], ty: &[TensorType]| {
        let node = graph.add(op, operands, ty).expect("a node");
        graph.node(node).results[0]
    };
    let x = add(Input { name: "x".into() }.into(), &[], &[ty([12, 8])]);
    let weight = add(Parameter { name: "weight".into(), frozen: false }.into(), &[], &[ty([8, 4])]);
    let product = add(Matmul::plain().into(), &[x, weight], &[]);
    let half = add(Affine { scale: 0.5, offset: 0.0 }.into(), &[product], &[]);
    let made = add(Unary { kind: UnaryKind::Exp }.into(), &[half], &[]);
    let loss = add(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }.into(), &[made], &[]);
    graph.output("loss", loss, OutputKind::Result);
    let graph = differentiate(&graph, "loss").expect("a graph");
    let graph = add_optimizer(graph, &OptimizerConfig::default()).expect("a graph");
    let request = Request { batch: 12, device_memory: Bytes(1 << 40), ..Request::default() };
    let cluster = Cluster::parse("cpu:2", "h200").expect("a cluster");
    let pins = Pins::parse("dp=2,zero=0,microbatch=1").expect("pins");
    search(&graph, &cluster, &request, &pins, target).unwrap_or_else(|error| panic!("{error}"))
}

/// The first section that runs more than once.
fn repeated(program: &Program) -> SectionId {
    let runs = |section: SectionId| program.order.iter().filter(|run| run.section == section).count();
    program.sections.keys().find(|section| runs(*section) > 1).expect("a section that repeats")
}

/// Cuts a section behind an operation of one operand: the beginning, the operation, and the rest, which first renames
/// what the operation made. In the runs behind the first the operation is left out.
fn left_out_later(program: &mut Program) {
    let section = repeated(program);
    let all = program.sections[section].instructions.clone();
    let is_it = |of: &Instruction| matches!(of.action, Action::Compute(Op::Unary(_)));
    let at = all.iter().position(is_it).expect("an operation of one operand");
    let of = &all[at];
    let made = program.buffers.push(program.buffers[of.results[0]].clone());
    relocate(program, made);
    let run = Instruction { results: vec![made], ..of.clone() };
    let skipped = Instruction { action: Action::Copy, ..run.clone() };
    let renamed = Instruction {
        action: Action::Compute(Reshape {}.into()),
        operands: vec![made],
        after: Vec::new(),
        ..of.clone()
    };
    let rest = all[at + 1..].iter().map(|of| {
        let after = of.after.iter().filter(|after| **after > at).map(|after| after - at);
        Instruction { after: after.collect(), ..of.clone() }
    });
    let rest: Vec<Instruction> = std::iter::once(renamed).chain(rest).collect();
    let mut section_of = |name: &str, instructions| program.sections.push(Section { name: name.into(), instructions });
    let first = section_of("first", [&all[..at], &[run]].concat());
    let later = section_of("later", [&all[..at], &[skipped]].concat());
    let rest = section_of("rest", rest);
    let mut is_first = true;
    let cut = |run: &Run| {
        if run.section != section {
            return vec![*run];
        }
        let begin = if std::mem::take(&mut is_first) { first } else { later };
        [begin, rest].map(|section| Run { section, ..*run }).to_vec()
    };
    program.order = program.order.iter().flat_map(cut).collect();
}

#[test]
fn an_operation_that_later_runs_leave_out_is_found() {
    let plan = exponential(&NoScratch);
    let mut programs = lower_all(&verify::plan(&plan).expect("a plan"), &NoScratch).expect("programs");
    assert_eq!(findings(&plan, &programs), "");
    programs.iter_mut().for_each(left_out_later);
    let found = findings(&plan, &programs);
    assert!(found.contains("its part needs exp"), "{found}");
}

/// Every run begins with a parameter's copy where a sum over the microbatches lies, which the first does not read; and
/// the first is done twice.
fn sum_written_over(program: &mut Program) {
    let section = repeated(program);
    let adds = |of: &&Instruction| of.action == Action::Accumulate;
    let sum = program.sections[section].instructions.iter().find(adds).expect("a sum over the microbatches").results[0];
    let slot = program.slots[0].buffer;
    let offset = program.buffers[sum].offset;
    let over = program.buffers.push(Buffer { offset, ..program.buffers[slot].clone() });
    insert(program, (section, 0), Instruction::new(Action::Copy, vec![slot], vec![over], Stream::Compute));
    let first = program.order.iter().position(|run| run.section == section).expect("a run");
    program.order.insert(first, program.order[first]);
}

#[test]
fn a_sum_is_there_in_every_microbatch_but_the_first() {
    let plan = exponential(&NoScratch);
    let mut programs = lower_all(&verify::plan(&plan).expect("a plan"), &NoScratch).expect("programs");
    programs.iter_mut().for_each(sum_written_over);
    let found = findings(&plan, &programs);
    assert!(found.contains("was written over it"), "{found}");
}
