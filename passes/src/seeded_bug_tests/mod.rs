//! Bugs put into programs that were right: what lowering, scheduling, allocation or a hand might get
//! wrong. The verifier finds each of them without running anything, and says what it is.

pub(crate) mod ahead;
mod chunks;
mod malformed;
mod one_rank;
mod regions;
mod runs;
mod staged;
mod sums;

use crate::lower::lower_all;
use crate::lower_tests::{TINY, plan};
use shardc_ir::ops::{Constant, Op, Reshape};
use shardc_ir::program::{Action, Instruction, Stream};
use shardc_ir::{BufferId, Choice, DType, NoScratch, Plan, Program, ReduceKind, SectionId, verify};
use sums::{
    doubled_accumulation, dropped_accumulation, late_beginning, no_beginning, swapped_accumulators, wrong_beginning,
};

type At = (SectionId, usize);
type Bug = fn(&mut [Program]);

/// Two data ranks by two tensor ranks, three microbatches, states spread over the data ranks.
const BOTH: &str = "dp=2,tp=2,zero=1,microbatch=2";
/// The same without spreading, all microbatches at once.
const PLAIN: &str = "dp=2,tp=2,zero=0,microbatch=6";
/// As the first, parameters gathered at each use.
const GATHERED: &str = "dp=4,zero=3,microbatch=3";
/// Data ranks alone, gradients reduced after three microbatches.
const DATA: &str = "dp=4,zero=0,microbatch=1";

/// What is put in, where, and a part of what the verifier says.
const BUGS: &[(&str, &str, Bug, &str)] = &[
    ("a missing reduction", PLAIN, missing_reduction, "/sum(tp)"),
    ("a doubled reduction", PLAIN, doubled_reduction, "it is not partial over `tp`"),
    ("a reduction over another axis", PLAIN, wrong_axis, "it is not partial over `dp`"),
    ("a reduction of another kind", PLAIN, wrong_kind, "its terms over `tp` combine by sum"),
    ("a group in another order", GATHERED, wrong_order_of_group, "do not lie along axes of the mesh"),
    ("a group of other ranks on one rank", PLAIN, wrong_group, "waits forever"),
    ("a bucket without one of its members", DATA, bucket_without_member, "was written over it"),
    ("a bucket that mixes two members up", GATHERED, mixed_bucket, "takes %"),
    (
        "a gradient that is read before it is reduced",
        DATA,
        unreduced_gradient,
        "/sum(dp)) as operand 0, but sum_squares",
    ),
    ("a gradient reduced before it is complete", DATA, early_reduction, "it is not the value itself"),
    ("an accumulation that is left out", DATA, dropped_accumulation, "what is in microbatch"),
    ("an accumulation that is done twice", DATA, doubled_accumulation, "not to the sum over the microbatches"),
    ("an accumulator that does not begin at zero", DATA, wrong_beginning, "is no embedding_grad of"),
    ("a sum that begins again in the second microbatch", DATA, late_beginning, "which is no sum of the graph"),
    ("a sum that does not begin", DATA, no_beginning, "which nothing has written"),
    ("a product added to another's accumulator", DATA, swapped_accumulators, "which is no sum of the graph"),
    ("a microbatch that is left out", DATA, dropped_microbatch, "not to the sum over the microbatches up to 1"),
    ("an input of an earlier microbatch", BOTH, stale_input, "what is in microbatch"),
    ("swapped operands", PLAIN, swapped_operands, "as operand 0, but sub"),
    ("a loss scaled for another number of ranks", PLAIN, wrong_scale, "its part needs affine"),
    ("a scale that is left out", PLAIN, missing_scale, "reading \"loss\": holds"),
    ("the vocabulary of another rank", PLAIN, wrong_vocabulary, "its part needs embedding {start=30}"),
    ("the part of another rank", PLAIN, wrong_part, "is not the rank's coordinate on an axis"),
    ("the input of another rank", PLAIN, wrong_input, "by its layout this rank's is"),
    ("the parameter of another rank", PLAIN, wrong_slot, "by its layout this rank's is"),
    ("two parameters that change places", PLAIN, swapped_slots, "takes %"),
    ("a reading of another value", PLAIN, swapped_readings, "after the step; it should hold"),
    ("an update that is lost", DATA, lost_update, "after the step; it should hold"),
    ("a log-sum-exp without its maximum", PLAIN, wrong_log_sum_exp, "no step of a log-sum-exp"),
    ("a gathered stack that is taken for a tensor", PLAIN, missing_transpose, "in another order"),
    ("a buffer over one that is still read", PLAIN, aliased_buffer, "was written over it"),
    ("a view at another offset", PLAIN, wrong_offset, "which nothing has written"),
    ("a missing wait between streams", PLAIN, missing_wait, "does not wait for instruction"),
    ("collectives in another order on one rank", PLAIN, swapped_collectives, "but rank 0 comes with"),
    ("a kernel on one rank only", PLAIN, lonely_kernel, "has sections"),
    ("messages to another peer", PLAIN, swapped_peer, "waits forever"),
    ("the gradients of two updates exchanged in one instruction", PLAIN, exchanged_items, "as operand 1, but adamw"),
    ("an update written over another of its instruction", PLAIN, overwritten_item, "which it still reads"),
    ("an update less in one instruction of one rank", PLAIN, item_missing, "does something else"),
];

fn findings(plan: &Plan, programs: &[Program]) -> String {
    let plan = verify::plan(plan).unwrap_or_else(|found| panic!("{found}"));
    let found = [verify::program(programs).map(drop), verify::translation(&plan, programs).map(drop)];
    found.into_iter().filter_map(Result::err).map(|found| format!("{found}\n")).collect()
}

/// Divides over `tp` what the search leaves whole in so small a model: the vocabulary in the embedding
/// and the loss, the sequence in norms.
fn divide_further(plan: &mut Plan) {
    let Some(tp) = plan.mesh.find("tp") else { return };
    let nodes: Vec<_> = plan.graph.nodes().map(|(id, node)| (id, node.op.name())).collect();
    for (id, name) in nodes {
        let factor = match name {
            "embedding" | "cross_entropy" => "v",
            "rms_norm" => "j",
            _ => continue,
        };
        let rule = plan.rule(id);
        let divided = plan.strategies[id].without(tp).with(tp, Choice::Factor(rule.find(factor).expect("a factor")));
        rule.check(&divided, &plan.mesh).expect("a legal strategy");
        plan.strategies[id] = divided;
    }
}

#[test]
fn every_seeded_bug_is_found() {
    let mut wrong = Vec::new();
    for pins in [BOTH, PLAIN, GATHERED, DATA] {
        let mut plan = plan(TINY, DType::F32, "cpu:4", pins, false);
        divide_further(&mut plan);
        let programs = lower_all(&verify::plan(&plan).expect("a plan"), &NoScratch).expect("programs");
        assert_eq!(findings(&plan, &programs), "", "{pins}");
        for (name, _, bug, expect) in BUGS.iter().filter(|(_, of, ..)| *of == pins) {
            wrong.extend(missed(&plan, &programs, name, *bug, expect));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Casts around a sum over ranks are part of the plan that asks for them, and of no other.
#[test]
fn sums_in_another_type_are_found() {
    for pins in [BOTH, PLAIN, GATHERED, DATA] {
        let mut plan = plan(TINY, DType::F32, "cpu:4", pins, false);
        plan.request.reduce_dtype = Some(DType::Bf16);
        let programs = lower_all(&verify::plan(&plan).expect("a plan"), &NoScratch).expect("programs");
        assert_eq!(findings(&plan, &programs), "", "{pins}");
        let narrow = |program: &Program, instruction: &Instruction| {
            let is_wide = |id: &BufferId| program.buffers[*id].ty.dtype == DType::F32;
            matches!(instruction.action, Action::Compute(Op::Cast(_))) && instruction.results.iter().all(is_wide)
        };
        let skipped = |program: &mut Program| {
            let at = find(program, narrow);
            let cast = instruction(program, at).clone();
            relocate(program, cast.operands[0]);
            let all = program.sections.values_mut().flat_map(|section| &mut section.instructions);
            let operands = all.flat_map(|instruction| &mut instruction.operands);
            operands.filter(|id| **id == cast.results[0]).for_each(|id| *id = cast.operands[0]);
        };
        let bug: &dyn Fn(&mut [Program]) = &|programs| programs.iter_mut().for_each(skipped);
        let mut broken = programs.clone();
        bug(&mut broken);
        let found = findings(&plan, &broken);
        let is_found = |part: &&str| found.contains(*part);
        let expect = ["a rank's part of the value is f32", "does not become f32", "slice makes bf16"];
        assert!(expect.iter().any(is_found), "{pins}: {found}");
        plan.request.reduce_dtype = None;
        let found = findings(&plan, &programs);
        assert!(found.contains("which no sum over ranks needs as") || found.contains("is bf16"), "{pins}: {found}");
    }
}

/// What is wrong if the verifier does not find a bug, or does not say what is expected.
fn missed(plan: &Plan, programs: &[Program], name: &str, bug: Bug, expect: &str) -> Option<String> {
    let mut broken = programs.to_vec();
    bug(&mut broken);
    assert!(broken != programs, "{name} changes nothing");
    let found = findings(plan, &broken);
    let some: Vec<String> = found.lines().take(4).map(|line| line.chars().take(300).collect()).collect();
    (!found.contains(expect)).then(|| format!("{name}: `{expect}` is not in:\n  {}", some.join("\n  ")))
}

fn instruction(program: &mut Program, at: At) -> &mut Instruction {
    &mut program.sections[at.0].instructions[at.1]
}

/// The first instruction that fits.
#[track_caller]
fn find(program: &Program, fits: impl Fn(&Program, &Instruction) -> bool) -> At {
    let all = program.sections.iter().flat_map(|(section, body)| {
        body.instructions.iter().enumerate().map(move |(index, instruction)| ((section, index), instruction))
    });
    let mut found = all.filter(|(_, instruction)| fits(program, instruction));
    found.next().expect("the program has such an instruction").0
}

/// Changes the instruction at one place on every rank.
#[track_caller]
fn change(
    programs: &mut [Program],
    fits: impl Fn(&Program, &Instruction) -> bool,
    bug: impl Fn(&mut Instruction),
) -> At {
    let at = find(&programs[0], fits);
    programs.iter_mut().for_each(|program| bug(instruction(program, at)));
    at
}

fn insert(program: &mut Program, at: At, new: Instruction) {
    let instructions = &mut program.sections[at.0].instructions;
    instructions.insert(at.1, new);
    for later in &mut instructions[at.1 + 1..] {
        later.after.iter_mut().filter(|after| **after >= at.1).for_each(|after| *after += 1);
    }
}

fn remove(program: &mut Program, at: At) -> Instruction {
    let instructions = &mut program.sections[at.0].instructions;
    let old = instructions.remove(at.1);
    for later in &mut instructions[at.1..] {
        later.after.retain(|after| *after != at.1);
        later.after.iter_mut().filter(|after| **after > at.1).for_each(|after| *after -= 1);
    }
    old
}

/// Gives a buffer bytes of its own, behind all others.
fn relocate(program: &mut Program, buffer: BufferId) {
    let end = program.arenas[0].1.0.next_multiple_of(256);
    program.buffers[buffer].offset = end;
    program.arenas[0].1.0 = end + program.buffers[buffer].ty.bytes().0;
}

/// The group of an all-reduce of a sum.
fn sum_over(instruction: &Instruction) -> Option<usize> {
    match instruction.action {
        Action::AllReduce { reduce: ReduceKind::Sum, group } => Some(group),
        _ => None,
    }
}

/// An all-reduce of a sum among neighbours: over `tp`.
fn is_tensor_sum(program: &Program, instruction: &Instruction) -> bool {
    sum_over(instruction).is_some_and(|group| program.groups[group] == [0, 1])
}

fn op(instruction: &Instruction) -> Option<&Op> {
    match &instruction.action {
        Action::Compute(op) => Some(op),
        _ => None,
    }
}

fn is_op(instruction: &Instruction, name: &str) -> bool {
    op(instruction).is_some_and(|op| op.name() == name)
}

fn missing_reduction(programs: &mut [Program]) {
    change(programs, is_tensor_sum, |instruction| {
        instruction.action = Action::Copy;
        instruction.stream = Stream::Compute;
    });
}

fn doubled_reduction(programs: &mut [Program]) {
    let at = find(&programs[0], is_tensor_sum);
    for program in programs {
        let mut again = instruction(program, at).clone();
        again.operands.clone_from(&again.results);
        again.after = Vec::new();
        insert(program, (at.0, at.1 + 1), again);
    }
}

fn wrong_axis(programs: &mut [Program]) {
    let other = programs[0].groups.iter().position(|group| *group == [0, 2]).expect("a group over dp");
    change(programs, is_tensor_sum, |instruction| {
        instruction.action = Action::AllReduce { reduce: ReduceKind::Sum, group: other };
    });
}

fn wrong_kind(programs: &mut [Program]) {
    change(programs, is_tensor_sum, |instruction| {
        if let Action::AllReduce { reduce, .. } = &mut instruction.action {
            *reduce = ReduceKind::Max;
        }
    });
}

fn wrong_order_of_group(programs: &mut [Program]) {
    programs.iter_mut().flat_map(|program| &mut program.groups).for_each(|group| group.swap(0, 1));
}

fn wrong_group(programs: &mut [Program]) {
    let at = find(&programs[0], is_tensor_sum);
    let group = sum_over(instruction(&mut programs[0], at)).expect("a sum");
    programs[1].groups[group] = vec![1, 2];
}

fn bucket_without_member(programs: &mut [Program]) {
    let is_bucket =
        |_: &Program, instruction: &Instruction| sum_over(instruction).is_some() && instruction.operands.len() > 1;
    change(programs, is_bucket, |instruction| {
        instruction.operands.pop();
        instruction.results.pop();
    });
}

fn mixed_bucket(programs: &mut [Program]) {
    let alike = |program: &Program, instruction: &Instruction| {
        let types: Vec<_> = instruction.operands.iter().map(|buffer| &program.buffers[*buffer].ty).collect();
        (0..types.len()).find_map(|a| (a + 1..types.len()).find(|b| types[a] == types[*b]).map(|b| (a, b)))
    };
    let is_bucket = |program: &Program, instruction: &Instruction| {
        matches!(instruction.action, Action::AllGather { .. }) && alike(program, instruction).is_some()
    };
    let at = find(&programs[0], is_bucket);
    let (a, b) = alike(&programs[0], &programs[0].sections[at.0].instructions[at.1]).expect("two alike");
    programs.iter_mut().for_each(|program| instruction(program, at).operands.swap(a, b));
}

/// The bucket of the gradients: the sum with most operands.
fn gradient_bucket(program: &Program) -> At {
    let size = |instruction: &Instruction| sum_over(instruction).map_or(0, |_| instruction.operands.len());
    let most = program.instructions().map(size).max().unwrap_or(0);
    find(program, |_, instruction| size(instruction) == most)
}

fn unreduced_gradient(programs: &mut [Program]) {
    let at = gradient_bucket(&programs[0]);
    for program in programs {
        let bucket = instruction(program, at).clone();
        let (before, after) = (bucket.operands[0], bucket.results[0]);
        for later in &mut program.sections[at.0].instructions[at.1 + 1..] {
            later.operands.iter_mut().filter(|operand| **operand == after).for_each(|operand| *operand = before);
        }
    }
}

fn early_reduction(programs: &mut [Program]) {
    let at = gradient_bucket(&programs[0]);
    let (microbatch, _) = find(&programs[0], |_, instruction| instruction.action == Action::Accumulate);
    for program in programs {
        let mut bucket = remove(program, at);
        bucket.results.iter().for_each(|result| relocate(program, *result));
        let instructions = &mut program.sections[microbatch].instructions;
        let last = instructions.iter().rposition(|instruction| instruction.stream == Stream::Compute);
        bucket.after = last.into_iter().collect();
        instructions.push(bucket);
    }
}

fn dropped_microbatch(programs: &mut [Program]) {
    for program in programs {
        let middle = program.order.iter().position(|run| run.microbatch == 1).expect("a second microbatch");
        program.order.remove(middle);
    }
}

fn stale_input(programs: &mut [Program]) {
    let (prologue, _) = programs[0].sections.iter().find(|(_, body)| body.name == "prologue").expect("a prologue");
    let (section, body) = programs[0].sections.iter().find(|(_, body)| body.name == "microbatch").expect("a loop");
    let is_feed = |instruction: &Instruction| matches!(instruction.action, Action::Feed { .. });
    let at = (section, body.instructions.iter().position(is_feed).expect("a feed"));
    for program in programs {
        let feed = remove(program, at);
        relocate(program, feed.results[0]);
        insert(program, (prologue, 0), Instruction { after: Vec::new(), ..feed });
    }
}

fn swapped_operands(programs: &mut [Program]) {
    let is_difference = |program: &Program, instruction: &Instruction| {
        is_op(instruction, "sub")
            && program.buffers[instruction.operands[0]].value.is_some()
            && instruction.operands[0] != instruction.operands[1]
            && program.buffers[instruction.results[0]].value.is_some()
    };
    let at = programs[0]
        .sections
        .iter()
        .flat_map(|(section, body)| (0..body.instructions.len()).rev().map(move |index| (section, index)));
    let at = at.into_iter().find(|at| is_difference(&programs[0], &programs[0].sections[at.0].instructions[at.1]));
    let at = at.expect("a difference");
    programs.iter_mut().for_each(|program| instruction(program, at).operands.swap(0, 1));
}

fn is_scale(_: &Program, instruction: &Instruction) -> bool {
    op(instruction).is_some_and(|op| matches!(op, Op::Affine(affine) if affine.scale > 0.0 && affine.scale < 0.1))
}

fn wrong_scale(programs: &mut [Program]) {
    change(programs, is_scale, |instruction| {
        if let Action::Compute(Op::Affine(affine)) = &mut instruction.action {
            affine.scale *= 2.0;
        }
    });
}

fn missing_scale(programs: &mut [Program]) {
    change(programs, is_scale, |instruction| instruction.action = Action::Copy);
}

fn wrong_vocabulary(programs: &mut [Program]) {
    let at = find(&programs[0], |_, instruction| is_op(instruction, "embedding"));
    instruction(&mut programs[1], at).action = instruction(&mut programs[0], at).action.clone();
}

fn wrong_part(programs: &mut [Program]) {
    let differs = |_: &Program, instruction: &Instruction| is_op(instruction, "slice");
    let at = find(&programs[0], differs);
    for rank in 1..programs.len() {
        instruction(&mut programs[rank], at).action = instruction(&mut programs[0], at).action.clone();
    }
}

fn wrong_input(programs: &mut [Program]) {
    programs[2].inputs[0].slices = programs[0].inputs[0].slices.clone();
}

fn wrong_slot(programs: &mut [Program]) {
    let slices = |program: &Program| program.slots.iter().map(|slot| slot.slice.clone()).collect::<Vec<_>>();
    let differs = slices(&programs[0]).iter().zip(slices(&programs[1])).position(|(a, b)| *a != b);
    let slot = differs.expect("a slot that is divided over tp");
    programs[1].slots[slot].slice = programs[0].slots[slot].slice.clone();
}

fn swapped_slots(programs: &mut [Program]) {
    for program in programs {
        let of = |name: &str| program.slots.iter().position(|slot| slot.name.ends_with(name)).expect("a slot");
        let (gate, up) = (of("mlp.gate.weight"), of("mlp.up.weight"));
        let buffer = program.slots[gate].buffer;
        program.slots[gate].buffer = program.slots[up].buffer;
        program.slots[up].buffer = buffer;
    }
}

fn swapped_readings(programs: &mut [Program]) {
    for program in programs {
        let buffer = program.readings[0].buffer;
        program.readings[0].buffer = program.readings[1].buffer;
        program.readings[1].buffer = buffer;
    }
}

fn lost_update(programs: &mut [Program]) {
    let is_update = |action: &Action| matches!(action, Action::Compute(Op::Each(each)) if each.op.name() == "adamw");
    let at = find(&programs[0], |_, instruction| is_update(&instruction.action));
    programs.iter_mut().for_each(|program| drop(remove(program, at)));
}

fn wrong_log_sum_exp(programs: &mut [Program]) {
    let last_step = |program: &Program, instruction: &Instruction| {
        is_op(instruction, "add")
            && instruction.source.is_some_and(|source| {
                let is_entropy = |other: &Instruction| other.source == Some(source) && is_op(other, "cross_entropy");
                program.instructions().any(is_entropy)
            })
    };
    change(programs, last_step, |instruction| {
        if let Action::Compute(Op::Binary(binary)) = &mut instruction.action {
            binary.kind = shardc_ir::ops::BinaryKind::Sub;
        }
    });
}

fn missing_transpose(programs: &mut [Program]) {
    let stacked = |program: &Program, instruction: &Instruction| {
        let gathered: Vec<BufferId> = program
            .instructions()
            .filter(|other| matches!(other.action, Action::AllGather { .. }))
            .flat_map(|other| other.results.clone())
            .collect();
        is_op(instruction, "transpose") && gathered.contains(&instruction.operands[0])
    };
    change(programs, stacked, |instruction| instruction.action = Action::Compute(Reshape {}.into()));
}

fn aliased_buffer(programs: &mut [Program]) {
    let product = |_: &Program, instruction: &Instruction| is_op(instruction, "swiglu");
    let at = find(&programs[0], product);
    for program in programs {
        let [gate, up] = instruction(program, at).operands[..] else { panic!("two operands") };
        program.buffers[up].offset = program.buffers[gate].offset;
    }
}

fn wrong_offset(programs: &mut [Program]) {
    let view = |program: &Program, instruction: &Instruction| {
        is_op(instruction, "reshape")
            && program.buffers[instruction.operands[0]].offset == program.buffers[instruction.results[0]].offset
    };
    let at = find(&programs[0], view);
    for program in programs {
        let result = instruction(program, at).results[0];
        relocate(program, result);
        remove(program, at);
    }
}

fn missing_wait(programs: &mut [Program]) {
    let waits = |_: &Program, instruction: &Instruction| {
        instruction.stream == Stream::Communication && !instruction.after.is_empty()
    };
    change(programs, waits, |instruction| instruction.after.clear());
}

fn swapped_collectives(programs: &mut [Program]) {
    let is_collective = |instruction: &Instruction| instruction.stream == Stream::Communication;
    let section = find(&programs[1], |_, instruction| is_collective(instruction)).0;
    let body = &mut programs[1].sections[section].instructions;
    let at: Vec<usize> = (0..body.len()).filter(|index| is_collective(&body[*index])).collect();
    let other = at.iter().copied().find(|index| body[*index].action != body[at[0]].action).expect("another collective");
    body.swap(at[0], other);
    for instruction in body {
        instruction.after.clear();
    }
}

fn lonely_kernel(programs: &mut [Program]) {
    let at = find(&programs[3], |_, instruction| is_op(instruction, "sqrt"));
    let again = instruction(&mut programs[3], at).clone();
    insert(&mut programs[3], (at.0, at.1 + 1), again);
}

/// Two updates of tensors of one type in one instruction: where it is, and the items.
fn equal_items(program: &Program) -> (At, [usize; 2]) {
    let pair = |program: &Program, instruction: &Instruction| {
        let Action::Compute(Op::Each(each)) = &instruction.action else { return None };
        let ty = |item: usize| &program.buffers[instruction.operands[item * 7]].ty;
        let pairs = (1..each.count).flat_map(|b| (0..b).map(move |a| [a, b]));
        pairs.filter(|_| matches!(*each.op, Op::Adamw(_))).find(|[a, b]| ty(*a) == ty(*b))
    };
    let at = find(program, |program, instruction| pair(program, instruction).is_some());
    let found = pair(program, &program.sections[at.0].instructions[at.1]);
    (at, found.expect("it was found"))
}

fn exchanged_items(programs: &mut [Program]) {
    let (at, [a, b]) = equal_items(&programs[0]);
    programs.iter_mut().for_each(|program| instruction(program, at).operands.swap(7 * a + 1, 7 * b + 1));
}

fn overwritten_item(programs: &mut [Program]) {
    let (at, [a, b]) = equal_items(&programs[0]);
    programs.iter_mut().for_each(|program| instruction(program, at).results.swap(3 * a, 3 * b));
}

fn item_missing(programs: &mut [Program]) {
    let (at, _) = equal_items(&programs[0]);
    let changed = instruction(&mut programs[3], at);
    let Action::Compute(Op::Each(each)) = &mut changed.action else { panic!("it was found") };
    each.count -= 1;
    let count = each.count;
    changed.operands.truncate(7 * count);
    changed.results.truncate(3 * count);
}

fn swapped_peer(programs: &mut [Program]) {
    let slot = programs[0].slots[0].buffer;
    let message = |action, operands, results| Instruction::new(action, operands, results, Stream::Messages);
    for (rank, program) in programs.iter_mut().enumerate() {
        let section = program.order[0].section;
        let end = |program: &Program| program.sections[section].instructions.len();
        // A ring in which the first rank sends the wrong way round.
        let (to, from) = ((rank as u64 + 1) % 4, (rank as u64 + 3) % 4);
        let to = if rank == 0 { from } else { to };
        let at = (section, end(program));
        if rank % 2 == 0 {
            insert(program, at, message(Action::Send { peer: to }, vec![slot], vec![]));
            insert(program, (section, end(program)), message(Action::Receive { peer: from }, vec![], vec![slot]));
        } else {
            insert(program, at, message(Action::Receive { peer: from }, vec![], vec![slot]));
            insert(program, (section, end(program)), message(Action::Send { peer: to }, vec![slot], vec![]));
        }
    }
}
