//! Plans that keep their casts: what they compute is shown, and what breaks them is found.

use crate::keep_casts::{Casts, cast_again};
use crate::lower::lower_all;
use crate::search_tests::{Sizes, plan};
use shardc_ir::ops::{Op, State};
use shardc_ir::{BufferId, DType, NoScratch, Node, OutputKind, Plan, Program, ValueId, verify};

const TINY: Sizes = Sizes { layers: 2, batch: 8, seq: 8, hidden: 64, heads: 8, kv: 4, ffn: 128, vocab: 64 };

fn is_kept(node: &Node) -> bool {
    matches!(&node.op, Op::State(State { cast_of: Some(_), .. }))
}

fn kept(plan: &Plan) -> Vec<ValueId> {
    plan.graph.leaves().filter(|(_, node)| is_kept(node)).map(|(value, _)| value).collect()
}

fn programs(plan: &Plan) -> Vec<Program> {
    let plan = verify::plan(plan).unwrap_or_else(|found| panic!("{found}"));
    lower_all(&plan, &NoScratch).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn check(cluster: &str, pins: &str) {
    let before = plan(TINY, DType::Bf16, cluster, 1, pins).unwrap_or_else(|error| panic!("{pins}: {error}"));
    let after = Casts::of(&before).keep().unwrap().unwrap_or_else(|| panic!("{pins}: nothing is kept"));
    // Every parameter has one cast, and each of them is kept.
    let parameters = before.graph.leaves().filter(|(_, node)| matches!(node.op, Op::Parameter(_))).count();
    assert_eq!(kept(&after).len(), parameters, "{pins}");
    assert_eq!(cast_again(&after.graph).unwrap(), before.graph, "{pins}");
    let programs = programs(&after);
    verify::step(&verify::plan(&after).unwrap(), &programs[..])
        .unwrap_or_else(|found| panic!("{pins}: {}", found.0[0]));
    // A rank's casts are made where they stay, by the instructions that update its parameters.
    for program in &programs {
        let casts: Vec<BufferId> =
            program.slots.iter().filter(|slot| slot.cast_of.is_some()).map(|slot| slot.buffer).collect();
        let places = |id: &BufferId| (program.buffers[*id].space, program.buffers[*id].offset);
        let written: Vec<_> = program
            .instructions()
            .filter(|instruction| matches!(&instruction.action, shardc_ir::program::Action::Compute(op) if matches!(op.single(), Op::Adamw(_))))
            .flat_map(|instruction| instruction.results.iter().map(places))
            .collect();
        assert!(!casts.is_empty() && casts.iter().all(|cast| written.contains(&places(cast))), "{pins}");
    }
}

#[test]
fn plans_with_kept_casts_are_shown_to_compute_their_graph() {
    check("cpu:1", "");
    check("cpu:1", "microbatch=2,recompute=block");
    for zero in 0..=3 {
        check("cpu:4", &format!("dp=4,zero={zero}"));
        check("cpu:2", &format!("dp=2,zero={zero},microbatch=1,recompute=selective"));
    }
    check("cpu:4", "dp=2,fsdp=2,zero=2,microbatch=1");
    check("cpu:4", "tp=4");
    check("cpu:4", "tp=2,dp=2,zero=3,loss_chunks=2");
    check("cpu:4", "tp=2,dp=2,zero=1,microbatch=2,overlap_chunks=2");
    check("cpu:4", "pp=2,dp=2,schedule=1f1b,zero=1,microbatch=1");
    check("cpu:2", "pp=2,schedule=zbv,virtual=2,microbatch=1");
}

#[test]
fn bytes_are_those_of_a_ranks_part() {
    let of = |cluster, pins: &str| {
        let before = plan(TINY, DType::Bf16, cluster, 1, pins).unwrap();
        let parameters = before.graph.leaves().filter(|(_, node)| matches!(node.op, Op::Parameter(_)));
        let all: u64 = parameters.map(|(value, _)| before.graph.ty(value).bytes().0).sum();
        (Casts::of(&before).bytes_read().0, all, Casts::of(&Casts::of(&before).keep().unwrap().unwrap()).bytes_read().0)
    };
    let (read, all, again) = of("cpu:1", "");
    assert_eq!((read, again), (all, 0));
    assert_eq!(of("cpu:4", "dp=4,zero=1").0, all / 4);
}

#[test]
fn plans_without_casts_keep_none() {
    let before = plan(TINY, DType::F32, "cpu:1", 1, "").unwrap();
    assert!(Casts::of(&before).keep().unwrap().is_none());
}

#[track_caller]
fn refused(change: impl Fn(&mut Plan, ValueId), expect: &str) {
    let mut plan = Casts::of(&plan(TINY, DType::Bf16, "cpu:2", 1, "dp=2,zero=1").unwrap()).keep().unwrap().unwrap();
    let cast = kept(&plan)[1];
    change(&mut plan, cast);
    let found = verify::plan(&plan).expect_err(expect).to_string();
    assert!(found.contains(expect), "{found}");
}

#[test]
fn casts_that_do_not_follow_their_parameters_are_refused() {
    refused(
        |plan, cast| plan.graph.outputs.retain(|output| output.kind != OutputKind::Update(cast)),
        "after the step it is not that of what replaces it",
    );
    refused(
        |plan, cast| {
            let is_of = |kind| move |output: &shardc_ir::Output| output.kind == OutputKind::Update(kind);
            let others = kept(plan);
            let same = |other: &&ValueId| **other != cast && plan.graph.ty(**other) == plan.graph.ty(cast);
            let other = *others.iter().find(same).expect("another cast of this type");
            let at = [cast, other].map(|leaf| plan.graph.outputs.iter().position(is_of(leaf)).expect("its update"));
            let value = plan.graph.outputs[at[1]].value;
            plan.graph.outputs[at[0]].value = value;
        },
        "after the step it is not that of what replaces it",
    );
    refused(|plan, cast| plan.strategies[plan.graph.value(cast).def] = Default::default(), "is stored otherwise than");
}

/// A cast that another parameter's update writes, and one that is said to be another's.
#[test]
fn programs_that_mix_casts_up_are_refused() {
    let plan = Casts::of(&plan(TINY, DType::Bf16, "cpu:1", 1, "").unwrap()).keep().unwrap().unwrap();
    let verified = verify::plan(&plan).unwrap();
    let programs = programs(&plan);
    let slots = |program: &Program| -> [usize; 2] {
        let is_matrix = |at: &usize| program.slots[*at].cast_of.is_some() && program.slots[*at].ty.rank() == 2;
        let all: Vec<usize> = (0..program.slots.len()).filter(is_matrix).collect();
        let same = |at: &&usize| program.slots[**at].ty == program.slots[all[1]].ty && **at != all[1];
        [all[1], *all.iter().find(same).expect("another cast of this type")]
    };
    let mut swapped = programs.clone();
    let [a, b] = slots(&swapped[0]).map(|at| swapped[0].slots[at].buffer);
    let (of_a, of_b) = (swapped[0].buffers[a].offset, swapped[0].buffers[b].offset);
    for buffer in swapped[0].buffers.values_mut() {
        // What writes one writes the other; the slots stay.
        buffer.offset = match buffer.offset {
            offset if offset == of_a => of_b,
            offset if offset == of_b => of_a,
            offset => offset,
        };
    }
    (swapped[0].buffers[a].offset, swapped[0].buffers[b].offset) = (of_a, of_b);
    verify::step(&verified, &swapped[..]).expect_err("two casts were exchanged");
    let mut renamed = programs.clone();
    let [a, b] = slots(&renamed[0]);
    renamed[0].slots[a].cast_of = programs[0].slots[b].cast_of.clone();
    let found = verify::step(&verified, &renamed[..]).expect_err("a cast of another parameter").to_string();
    assert!(found.contains("is not the state of the graph"), "{found}");
}

/// What a graph returns beside the parameter that an update writes is made by that update still.
#[test]
fn a_cast_that_is_returned_is_made() {
    let before = plan(TINY, DType::Bf16, "cpu:1", 1, "").unwrap();
    let mut after = Casts::of(&before).keep().unwrap().expect("casts").graph;
    let cast = after.outputs.last().expect("the last cast").value;
    after.output("cast", cast, OutputKind::Result);
    let again = cast_again(&after).unwrap();
    let returned = again.outputs.iter().find(|output| output.name == "cast").expect("it is returned");
    assert_eq!(again.ty(returned.value), after.ty(cast));
}
