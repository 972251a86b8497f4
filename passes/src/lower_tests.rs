//! Plans of the search, lowered for every rank and verified as programs.

use crate::allocate::{Copies, lifetimes, memory};
use crate::cluster::Cluster;
use crate::differentiate::differentiate;
use crate::lower::casts::merge_casts;
use crate::lower::early::make_early;
use crate::lower::in_place::share_storages;
use crate::lower::peel::peel;
use crate::lower::repeat::merge_repeated;
use crate::lower::{draft_rank, lower_all, lower_rank};
use crate::optimizer::{OptimizerConfig, add_optimizer};
use crate::pack::{Life, live_peak, pack};
use crate::rematerialize::rematerialize;
use crate::schedule::schedule;
use crate::search::{Pins, search};
use crate::search_tests::{SMALL, Sizes, llama};
use crate::statistics::{share_statistics, tests as statistics};
use shardc_ir::ops::{Binary, BinaryKind, Fused};
use shardc_ir::pipeline::last_forward;
use shardc_ir::plan::{Request, Space};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{
    Bytes, DType, NoScratch, NodeId, Op, Output, OutputKind, Plan, Program, Role, Target, TensorType, verify,
};

pub(crate) const TINY: Sizes = Sizes { layers: 2, batch: 12, seq: 8, hidden: 48, heads: 6, kv: 2, ffn: 96, vocab: 60 };

/// Wants eight times the bytes of the results of products and reductions, and one more; fuses whatever is
/// bound by memory.
#[derive(Debug)]
pub(crate) struct Wants;

impl Target for Wants {
    fn scratch(&self, action: &Action, _: &[TensorType], results: &[TensorType]) -> Bytes {
        let wants = matches!(action, Action::Compute(Op::Matmul(_) | Op::Reduce(_) | Op::RmsNormGrad(_)));
        Bytes(if wants { 8 * results.iter().map(|ty| ty.bytes().0).sum::<u64>() + 1 } else { 0 })
    }

    fn fuses(&self, region: &Fused, _: &[TensorType]) -> bool {
        let fits = |op: &Op| {
            matches!(
                op,
                Op::Unary(_)
                    | Op::UnaryGrad(_)
                    | Op::Affine(_)
                    | Op::Binary(_)
                    | Op::Cast(_)
                    | Op::Broadcast(_)
                    | Op::Reduce(_)
                    | Op::SumSquares(_)
                    | Op::RmsNorm(_)
                    | Op::RmsNormGrad(_)
                    | Op::Swiglu(_)
                    | Op::SwigluGrad(_)
                    | Op::Rotary(_)
            )
        };
        region.steps.iter().all(|step| fits(&step.op))
    }
}

pub(crate) fn plan(sizes: Sizes, dtype: DType, cluster: &str, pins: &str, recompute: bool) -> Plan {
    let mut graph = llama(sizes, dtype);
    if recompute {
        graph = rematerialize(&graph, &|_| true).expect("a graph");
    }
    let cluster = Cluster::parse(cluster, "h200").expect("a cluster");
    let pins = Pins::parse(pins).expect("pins");
    let (batch, seq) = (sizes.batch, sizes.seq);
    let request = Request { batch, seq, device_memory: Bytes(1 << 40), ..Request::default() };
    search(&graph, &cluster, &request, &pins, &Wants).unwrap_or_else(|error| panic!("{error}"))
}

/// The instructions of an action, by the number of their operands.
fn products(program: &Program, operands: usize) -> usize {
    let fits = |action: &Action| matches!(action, Action::Compute(Op::Matmul(_)));
    program.instructions().filter(|i| fits(&i.action) && i.operands.len() == operands).count()
}

#[test]
fn a_head_in_chunks_holds_one_chunk_of_logits() {
    let sizes = Sizes { vocab: 4096, ..TINY };
    for (cluster, pins) in [
        ("cpu:1", "recompute=none"),
        ("cpu:1", "recompute=none,microbatch=3"),
        ("cpu:4", "dp=4,zero=3"),
        ("cpu:4", "tp=4,dp=1"),
        ("cpu:4", "tp=2,dp=2,zero=1"),
        ("cpu:4", "dp=4,zero=2,microbatch=1"),
    ] {
        for dtype in [DType::F32, DType::Bf16] {
            let whole = check(sizes, dtype, cluster, &format!("{pins},loss_chunks=1"), false);
            let cut = check(sizes, dtype, cluster, &format!("{pins},loss_chunks=4"), false);
            let (whole, cut) = (largest_logits(&whole), largest_logits(&cut));
            assert_eq!(whole, 4 * cut, "{pins}");
        }
    }
}

/// The elements of the largest logits.
fn largest_logits(program: &Program) -> u64 {
    let reads = program.instructions().filter(|i| matches!(i.action, Action::Compute(Op::CrossEntropy(_))));
    reads.map(|i| program.buffers[i.operands[0]].ty.elements()).max().unwrap_or(0)
}

#[test]
fn sums_of_products_are_made_by_the_products() {
    // The gradients of the weight of the head, chunk by chunk.
    let whole = check(TINY, DType::F32, "cpu:1", "microbatch=12,loss_chunks=1", false);
    let cut = check(TINY, DType::F32, "cpu:1", "microbatch=12,loss_chunks=4", false);
    assert_eq!(products(&cut, 3), products(&whole, 3) + 3);
    // Over microbatches, every gradient that a product makes is accumulated by it.
    let accumulated = check(TINY, DType::F32, "cpu:1", "microbatch=3,loss_chunks=4", false);
    assert!(products(&accumulated, 3) > products(&cut, 3));
    let rest = accumulated.instructions().filter(|i| i.action == Action::Accumulate);
    for instruction in rest {
        let maker = accumulated.instructions().find(|i| i.results.contains(&instruction.operands[0]));
        assert!(!matches!(maker.map(|i| &i.action), Some(Action::Compute(Op::Matmul(_)))));
    }
}

/// Lowers for all ranks and verifies; gives the program of rank 0.
#[track_caller]
fn check(sizes: Sizes, dtype: DType, cluster: &str, pins: &str, recompute: bool) -> Program {
    let plan = plan(sizes, dtype, cluster, pins, recompute);
    let verified = verify::plan(&plan).unwrap_or_else(|found| panic!("{pins}: {found}"));
    let programs = lower_all(&verified, &Wants).unwrap_or_else(|error| panic!("{pins}: {error}"));
    if let Err(found) = verify::step(&verified, &programs) {
        let some: Vec<_> = found.0.iter().take(8).map(ToString::to_string).collect();
        panic!("{pins}: {} findings\n{}", found.0.len(), some.join("\n"));
    }
    let program = programs.into_iter().next().expect("a rank");
    assert_eq!(memory(&program).total(), program.arena(Space::Device), "{pins}");
    program
}

#[test]
fn plans_of_the_search_are_lowered() {
    for (cluster, pins) in [
        ("cpu:1", "microbatch=12"),
        ("cpu:1", "microbatch=3"),
        ("cpu:4", "dp=4,zero=0,microbatch=3"),
        ("cpu:4", "dp=4,zero=0,microbatch=1"),
        ("cpu:4", "dp=4,zero=1,microbatch=1"),
        ("cpu:4", "dp=4,zero=2,microbatch=1"),
        ("cpu:4", "dp=4,zero=2,microbatch=3"),
        ("cpu:4", "dp=4,zero=3,microbatch=1"),
        ("cpu:4", "dp=4,zero=3,microbatch=3"),
        ("cpu:4", "tp=4"),
        ("cpu:4", "tp=2,dp=2,zero=3"),
        ("cpu:6", "dp=3,tp=2"),
    ] {
        for dtype in [DType::F32, DType::Bf16] {
            check(TINY, dtype, cluster, pins, dtype == DType::F32);
        }
    }
}

/// The regions of a program.
fn regions<'a>(program: &'a mut Program) -> Vec<&'a mut Fused> {
    let instructions = program.sections.values_mut().flat_map(|section| &mut section.instructions);
    let region = |instruction: &'a mut Instruction| match &mut instruction.action {
        Action::Compute(Op::Fused(region)) => Some(region),
        _ => None,
    };
    instructions.filter_map(region).collect()
}

#[test]
fn what_a_target_fuses_is_one_instruction_and_is_proven_step_by_step() {
    let plan = plan(TINY, DType::Bf16, "cpu:4", "dp=2,tp=2,zero=1,microbatch=3", false);
    let plan = verify::plan(&plan).expect("a plan");
    let [programs, plain] =
        [lower_all(&plan, &Wants), lower_all(&plan, &NoScratch)].map(|made| made.expect("programs"));
    fn count(op: &Op) -> usize {
        match op {
            Op::Fused(region) => region.steps.len(),
            Op::Each(each) => each.count * count(&each.op),
            _ => 1,
        }
    }
    let steps = |program: &Program| {
        let of = |action: &Action| if let Action::Compute(op) = action { count(op) } else { 1 };
        program.instructions().map(|instruction| of(&instruction.action)).sum::<usize>()
    };
    assert_eq!(steps(&programs[0]), steps(&plain[0]));
    let bytes = |program: &Program| {
        let values = program.buffers.values().map(|buffer| &buffer.ty).filter(|ty| ty.dtype != DType::U8);
        values.map(|ty| ty.bytes().0).sum::<u64>()
    };
    let fused = programs[0].instructions().count();
    assert!(fused < steps(&programs[0]) && bytes(&programs[0]) < bytes(&plain[0]), "{fused} instructions");
    let mut names: Vec<String> = regions(&mut programs[0].clone()).iter().map(|region| region.steps_text()).collect();
    names.dedup();
    // The derivative of a norm, and the gradient of the residual stream to which it is added.
    assert!(names.iter().any(|name| name.contains("rms_norm_grad+add")), "{names:?}");
    // Printed and read back; and each step that is wrong is found.
    assert_eq!(programs[0].to_string().parse::<Program>().as_ref(), Ok(&programs[0]));
    type Bug = (fn(&mut Fused), &'static str);
    let bugs: [Bug; 3] = [
        (|region| region.steps[1].operands[1] = region.steps[1].operands[0], "as operand 1, but add"),
        (|region| region.steps[1].op = Binary { kind: BinaryKind::Sub }.into(), "runs sub"),
        (|region| region.steps[1].source = region.steps[0].source, "is no change of its layout"),
    ];
    for (bug, expect) in bugs {
        let mut broken = programs.clone();
        for program in &mut broken {
            let mut found = regions(program).into_iter();
            let region = found.find(|region| region.steps_text().starts_with("rms_norm_grad+add"));
            bug(region.expect("a region"));
        }
        let found = verify::step(&plan, broken).map(drop).expect_err(expect).to_string();
        assert!(found.contains(expect), "`{expect}` is not in:\n{found}");
    }
}

/// The sum of a block's residual and the norm of the next block are one region; the norm that is computed again reads
/// the same sum.
#[test]
fn what_is_computed_again_joins_no_region_of_the_forward_pass() {
    let plan = plan(SMALL, DType::Bf16, "h100:2", "dp=1,tp=2,microbatch=1", true);
    let behind = last_forward(&plan.graph);
    let mut program = lower_rank(&verify::plan(&plan).unwrap(), 0, &Wants).unwrap();
    let is_again = |source: NodeId| matches!(plan.graph.node(source).role, Role::Recompute(_));
    let mut again = 0;
    for region in regions(&mut program) {
        let sources: Vec<NodeId> = region.steps.iter().filter_map(|step| step.source).collect();
        let first = sources[0] > behind;
        assert!(sources.iter().all(|source| (*source > behind) == first), "{sources:?}");
        again += sources.into_iter().filter(|source| is_again(*source)).count();
    }
    assert!(again > 0);
}

#[test]
fn scratch_memory_belongs_to_the_program() {
    let program = check(TINY, DType::F32, "cpu:4", "dp=4,zero=2,microbatch=1", false);
    for instruction in program.instructions() {
        let types =
            |ids: &[shardc_ir::BufferId]| ids.iter().map(|id| program.buffers[*id].ty.clone()).collect::<Vec<_>>();
        let (operands, results) = (types(&instruction.operands), types(&instruction.results));
        let has = instruction.scratch.map_or(Bytes(0), |scratch| program.buffers[scratch].ty.bytes());
        assert_eq!(has, Wants.scratch(&instruction.action, &operands, &results), "{instruction}");
    }
    assert!(program.instructions().any(|instruction| instruction.scratch.is_some()));
    // Only the busiest moment counts.
    let plan = verify::plan(plan(TINY, DType::F32, "cpu:4", "dp=4,zero=2,microbatch=1", false)).expect("a plan");
    let without = lower_rank(&plan, 0, &NoScratch);
    let sum: u64 = program.instructions().filter_map(|i| i.scratch).map(|id| program.buffers[id].ty.bytes().0).sum();
    let more = program.arena(Space::Device).0 - without.expect("a program").arena(Space::Device).0;
    assert!(more > 0 && more < sum / 4, "{more} of {sum}");
}

fn count(program: &Program, wanted: impl Fn(&Action) -> bool) -> usize {
    program.instructions().filter(|instruction| wanted(&instruction.action)).count()
}

#[test]
fn gradients_are_reduced_in_buckets() {
    let program = check(TINY, DType::F32, "cpu:4", "dp=4,zero=0,microbatch=3", false);
    // All gradients are far below a bucket: one for them, one for the loss.
    assert!(count(&program, |action| matches!(action, Action::AllReduce { .. })) <= 3, "{program}");
    assert_eq!(count(&program, |action| matches!(action, Action::Copy)), 0);
    // Where ranks of a node keep parts and the nodes copies, the parts of a bucket are summed over the nodes together.
    let wide = Sizes { hidden: 1024, heads: 16, kv: 4, ffn: 4096, ..TINY };
    let program = check(wide, DType::F32, "cpu:4", "dp=2,fsdp=2,zero=1,microbatch=3", false);
    let scatters = count(&program, |action| matches!(action, Action::ReduceScatter { .. }));
    let sums = count(&program, |action| matches!(action, Action::AllReduce { .. }));
    // With those of the loss, the norm and what is too small to divide.
    assert!((2..=8).contains(&scatters) && sums <= scatters + 4, "{scatters} {sums}");
}

/// Which of products, gathers and reductions an instruction is.
fn letter(instruction: &Instruction) -> Option<char> {
    match &instruction.action {
        Action::Compute(Op::Matmul(_)) => Some('p'),
        Action::AllGather { .. } => Some('g'),
        Action::ReduceScatter { .. } | Action::AllReduce { .. } => Some('r'),
        _ => None,
    }
}

/// Per run, its section, its microbatch, and which of its instructions that are products or collectives is which.
fn runs(program: &Program) -> Vec<(&str, u64, String)> {
    let section = |id| &program.sections[id];
    let all = |id| section(id).instructions.iter().filter_map(letter).collect::<String>();
    program.order.iter().map(|run| (section(run.section).name.as_str(), run.microbatch, all(run.section))).collect()
}

#[test]
fn what_is_done_once_runs_beside_the_first_and_the_last_microbatch() {
    // A block's gradients fill buckets.
    let wide = Sizes { hidden: 1024, heads: 16, kv: 4, ffn: 4096, ..TINY };
    for (batch, zero, expected) in [
        (6, 0, &[("prologue", 0..1), ("microbatch", 1..2), ("epilogue", 2..3)][..]),
        (6, 1, &[("prologue", 0..1), ("microbatch", 1..2), ("epilogue", 2..3)]),
        (4, 1, &[("prologue", 0..1), ("epilogue", 1..2)]),
        (6, 2, &[("prologue", 0..1), ("microbatch", 1..3), ("epilogue", 0..1)]),
        (6, 3, &[("microbatch", 0..3), ("epilogue", 0..1)]),
    ] {
        let pins = format!("dp=2,zero={zero},microbatch=1");
        let program = check(Sizes { batch, ..wide }, DType::F32, "cpu:2", &pins, false);
        let runs: Vec<_> = runs(&program).into_iter().filter(|(.., all)| !all.is_empty()).collect();
        let order: Vec<(&str, u64)> = runs.iter().map(|(name, microbatch, _)| (*name, *microbatch)).collect();
        let wanted: Vec<(&str, u64)> =
            expected.iter().flat_map(|(name, of)| of.clone().map(|microbatch| (*name, microbatch))).collect();
        assert_eq!(order, wanted, "{pins}");
        // Of the sums over microbatches that terms add themselves to, only the table's begins as zeros.
        let is_zero = |action: &Action| matches!(action, Action::Compute(Op::Constant(op)) if op.value == 0.0);
        assert!(count(&program, is_zero) <= 1, "{pins}");
        let at = |name: &str| runs.iter().find(|(of, ..)| *of == name).map_or("", |(.., all)| all.as_str());
        if matches!(zero, 1 | 2) {
            let (products, gathers) = (at("prologue").find('p'), at("prologue").rfind('g'));
            assert!(products < gathers, "{pins}: {}", at("prologue"));
        }
        if zero < 2 {
            assert!(!at("microbatch").contains('r'), "{pins}: {}", at("microbatch"));
            let (reductions, products) = (at("epilogue").find('r'), at("epilogue").rfind('p'));
            assert!(reductions.is_some() && reductions < products, "{pins}: {}", at("epilogue"));
        }
    }
}

#[test]
fn weights_are_gathered_by_block_and_direction() {
    let program = check(TINY, DType::F32, "cpu:4", "dp=4,zero=3,microbatch=3", false);
    let gathers = count(&program, |action| matches!(action, Action::AllGather { .. }));
    // Two blocks, embedding, head, final norm, forward and backward.
    assert!((6..=12).contains(&gathers), "{gathers}");
}

#[test]
fn what_is_summed_over_nodes_lets_the_weights_pass_that_the_backward_pass_begins_with() {
    // The head's gradient is a bucket of its own, and closes before the final norm, which hides no gather.
    let wide = Sizes { hidden: 1024, heads: 16, kv: 4, ffn: 4096, vocab: 16384, ..TINY };
    let program = check(wide, DType::F32, "cpu:4", "dp=2,fsdp=2,zero=3,microbatch=3", false);
    let large = |of: &Instruction| of.operands.iter().any(|id| program.buffers[*id].ty.bytes() > Bytes(16 << 20));
    let scattered =
        program.instructions().position(|of| matches!(of.action, Action::ReduceScatter { .. }) && large(of));
    let behind = program.instructions().skip(scattered.expect("the head's gradient") + 1);
    let behind: String = behind.filter_map(letter).collect();
    let (gathered, summed) = (behind.find('g'), behind.find('r'));
    assert!(gathered.is_some() && gathered < summed && gathered < behind.find('p'), "{behind}");
}

#[test]
fn storages_of_a_large_model_are_packed_into_little_more_than_lives_at_once() {
    for (cluster, pins) in [
        ("h100:8", "tp=2,dp=4,zero=1,microbatch=1"),
        ("h100:8", "dp=8,zero=3,microbatch=1"),
        ("h100:8", "tp=8,recompute=block"),
        ("h100:1", "microbatch=1"),
    ] {
        let plan = plan(SMALL, DType::Bf16, cluster, pins, false);
        let plan = verify::plan(&plan).expect("a plan");
        let mut draft = draft_rank(&plan, 0, &NoScratch).expect("a draft");
        make_early(&mut draft, &plan.graph);
        peel(&mut draft);
        schedule(&mut draft);
        share_storages(&mut draft);
        merge_casts(&mut draft);
        merge_repeated(&mut draft);
        let lives: Vec<Life> = lifetimes(&draft, &Copies::of(&draft)).into_iter().flatten().collect();
        let (arena, live) = (pack(&lives).1, live_peak(&lives));
        assert!(live <= arena && arena as f64 <= 1.01 * live as f64, "{pins}: {arena} bytes for {live} at once");
        let program = lower_rank(&plan, 0, &NoScratch).expect("a program");
        let found = memory(&program);
        assert_eq!((found.total().0, found.total()), (arena, program.arena(Space::Device)));
        assert!(found.live().0 <= live && found.activations.0 > 0, "{pins}");
    }
}

#[test]
fn a_value_of_one_microbatch_is_not_read_after_it() {
    let mut plan = plan(TINY, DType::F32, "cpu:1", "microbatch=3", false);
    let logits = plan.graph.nodes().find(|(_, node)| node.path == "head" && node.op.name() == "matmul");
    let logits = logits.expect("a head").1.results[0];
    plan.graph.output("logits", logits, shardc_ir::OutputKind::Result);
    let found = verify::plan(plan).map(drop).expect_err("logits are divided over microbatches");
    assert!(found.to_string().contains("is divided over the time axis `mb`"), "{found}");
}

#[test]
fn a_bias_and_a_residual_that_products_add_are_sums_of_the_graph() {
    let text = r#"graph @residual {
  %x: f32[8,4,6] = input "x"
  %up: f32[6,12] = parameter "blocks.0.up.weight"
  %b: f32[12] = parameter "blocks.0.up.bias"
  %down: f32[12,6] = parameter "blocks.0.down.weight"
  %c: f32[6] = parameter "blocks.0.down.bias"
  %h: f32[8,4,12] = matmul %x, %up {spec="bsk,kn->bsn"} at "blocks.0.up"
  %bb: f32[8,4,12] = broadcast %b {dims=[2]} at "blocks.0.up"
  %a: f32[8,4,12] = add %h, %bb at "blocks.0.up"
  %g: f32[8,4,12] = gelu_tanh %a at "blocks.0"
  %o: f32[8,4,6] = matmul %g, %down {spec="bsk,kn->bsn"} at "blocks.0.down"
  %cc: f32[8,4,6] = broadcast %c {dims=[2]} at "blocks.0.down"
  %p: f32[8,4,6] = add %o, %cc at "blocks.0.down"
  %y: f32[8,4,6] = add %x, %p at "blocks.0"
  %loss: f32[] = sum_squares %y
  return loss %loss
}"#;
    let graph: shardc_ir::Graph = text.parse().expect("a graph");
    let step = add_optimizer(differentiate(&graph, "loss").expect("gradients"), &OptimizerConfig::default());
    let step = step.expect("a step");
    for (cluster, pins) in [("cpu:1", "microbatch=8"), ("cpu:4", "dp=2,tp=2,microbatch=2"), ("cpu:4", "dp=4,zero=3")] {
        let cluster = Cluster::parse(cluster, "h200").expect("a cluster");
        let request = Request { batch: 8, seq: 4, device_memory: Bytes(1 << 40), ..Request::default() };
        let plan = search(&step, &cluster, &request, &Pins::parse(pins).expect("pins"), &NoScratch).expect("a plan");
        let plan = verify::plan(plan).expect("a legal plan");
        let programs = lower_all(&plan, &NoScratch).expect("programs");
        let biased = |action: &Action| matches!(action, Action::Compute(Op::Matmul(op)) if op.bias);
        assert!(pins.contains("tp") || count(&programs[0], biased) == 2, "{pins}");
        verify::step(&plan, &programs).unwrap_or_else(|found| panic!("{pins}: {found}"));
    }
}

/// Data ranks add up both sums that the derivative of a norm over samples needs at once; and the norm is the same five
/// kernels where its weight and its bias are gathered first.
#[test]
fn norms_over_samples_wait_once_for_other_ranks() {
    let text = statistics::NORM.replace("32,", "65536,");
    let graph = share_statistics(&statistics::step(&text)).expect("a graph");
    let cluster = Cluster::parse("cpu:4", "h200").expect("a cluster");
    let request = Request { batch: 65536, seq: 1, device_memory: Bytes(1 << 40), ..Request::default() };
    for zero in 0..=3 {
        let pins = Pins::parse(&format!("dp=4,zero={zero}")).expect("pins");
        let plan = search(&graph, &cluster, &request, &pins, &Wants).unwrap_or_else(|error| panic!("{error}"));
        let plan = verify::plan(plan).expect("a plan");
        let mut programs = lower_all(&plan, &Wants).expect("programs");
        verify::step(&plan, &programs).unwrap_or_else(|found| panic!("zero={zero}: {found}"));
        let sums = programs[0].instructions().filter(|of| matches!(of.action, Action::AllReduce { .. }));
        let operands: Vec<usize> = sums.map(|sum| sum.operands.len()).collect();
        // The mean, as a sum and divided; the variance; what is told of both in the backward pass.
        assert_eq!(operands[..3], [2, 1, 2], "zero={zero}");
        let names: Vec<String> = regions(&mut programs[0]).iter().map(|region| region.steps_text()).collect();
        let is_norm = |name: &&String| name.contains("reduce_sum") || name.contains("broadcast");
        assert_eq!(names.iter().filter(is_norm).count(), 5, "zero={zero}: {names:#?}");
    }
}

/// The first moment of one parameter becomes what that of another was.
#[test]
fn an_update_takes_no_value_that_another_writes_over() {
    let mut plan = plan(TINY, DType::F32, "cpu:1", "", false);
    let moments = |(index, output): (usize, &Output)| match output.kind {
        OutputKind::Update(leaf) if output.name.ends_with("norm.gamma.m") => Some((index, leaf)),
        _ => None,
    };
    let moments: Vec<_> = plan.graph.outputs.iter().enumerate().filter_map(moments).collect();
    let [(one, _), (_, other), ..] = moments[..] else { panic!("two moments of one type") };
    plan.graph.outputs[one].value = other;
    let plan = verify::plan(&plan).unwrap_or_else(|found| panic!("{found}"));
    let refused = lower_all(&plan, &NoScratch).unwrap_err().to_string();
    assert!(refused.contains("which is updated first"), "{refused}");
}
