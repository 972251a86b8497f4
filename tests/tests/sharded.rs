//! A sharded step equals the step of one device: training graphs under random legal strategies.

#[path = "common/machine.rs"]
mod machine;

use machine::{Ahead, Machine, Tensors};
use shardc_ir::Family::{Context, Data, Microbatch, Tensor};
use shardc_ir::ops::Fused;
use shardc_ir::pipeline::{Pipeline, Schedule};
use shardc_ir::program::Action;
use shardc_ir::{
    AxisId, Bytes, Choice, DType, Family, Graph, HostTensor, Mesh, NoScratch, NodeId, Op, Plan, Program, SecondaryMap,
    Strategy, Target, TensorType, ValueId, verify,
};
use shardc_passes::cluster::Cluster;
use shardc_passes::differentiate::differentiate;
use shardc_passes::lower::lower_all;
use shardc_passes::optimizer::{OptimizerConfig, OptimizerKind, add_optimizer};
use shardc_passes::pipeline::anchor::{anchors, chunks};
use shardc_passes::rematerialize::rematerialize;
use shardc_passes::shard::prepare::prepare;
use shardc_passes::split_batch::{Step, order::order, sequence::sequence_factors, split_batch};
use shardc_runtime::cpu::CpuRuntime;
use shardc_runtime::{CudaTarget, Runtime};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Wants scratch memory for two instructions of three, as large as their results or so; fuses what GPUs do, and brings inputs ahead.
#[derive(Debug)]
struct Wants(u64);

impl Target for Wants {
    fn scratch(&self, _: &Action, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        let elements: u64 = operands.iter().chain(results).map(TensorType::elements).sum();
        Bytes(if (elements + self.0).is_multiple_of(3) { 0 } else { elements * (1 + self.0 % 5) })
    }

    fn brings_ahead(&self, bytes: Bytes) -> bool {
        bytes.0 > 8
    }

    fn fuses(&self, region: &Fused, operands: &[TensorType]) -> bool {
        CudaTarget.fuses(region, operands)
    }
}

/// What the letters of the texts stand for.
type Sizes = &'static [(&'static str, u64)];

const EVEN: Sizes = &[("B", 8), ("I", 4), ("H", 8)];
const MIXED: Sizes = &[("B", 12), ("I", 6), ("H", 12)];
const EVEN_LM: Sizes = &[("B", 4), ("S", 4), ("D", 8), ("K", 4), ("H", 4), ("G", 2), ("V", 8)];
const LONG_LM: Sizes = &[("B", 4), ("S", 16), ("D", 8), ("K", 4), ("H", 4), ("G", 2), ("V", 8)];
const MIXED_LM: Sizes = &[("B", 6), ("S", 6), ("D", 12), ("K", 6), ("H", 6), ("G", 3), ("V", 12)];

/// A text with its sizes filled in: letters stand in shapes only.
fn sized(text: &str, sizes: Sizes) -> String {
    let mut result = text.to_string();
    for (letter, size) in sizes {
        for (before, after) in [("[", ","), ("[", "]"), (",", ","), (",", "]")] {
            result = result.replace(&format!("{before}{letter}{after}"), &format!("{before}{size}{after}"));
        }
    }
    result
}

const MLP: &str = r#"graph @mlp {
  %x: f32[B,I] = input "x"
  %y: f32[B,I] = input "y"
  %w1: f32[I,H] = parameter "up.weight"
  %w2: f32[H,I] = parameter "down.weight"
  %h: f32[B,H] = matmul %x, %w1 at "blocks.0.up"
  %a: f32[B,H] = gelu %h at "blocks.0.up"
  %o: f32[B,I] = matmul %a, %w2 at "blocks.1.down"
  %d: f32[B,I] = sub %o, %y at "loss"
  %e: f32[B,I] = mul %d, %d at "loss"
  %s: f32[] = reduce_sum %e {dims=[0,1]} at "loss"
  %m: f32[B,I] = mul %y, %y at "loss"
  %n: f32[] = reduce_sum %m {dims=[0,1]} at "loss"
  %loss: f32[] = div %s, %n at "loss"
  return loss %loss
}"#;

/// The gradient is one number, made from nothing.
const TOTAL: &str = r#"graph @total {
  %up: f32[H,I] = parameter "up"
  %loss: f32[] = reduce_sum %up {dims=[0,1]} at "loss"
  return loss %loss
}"#;

const LM: &str = r#"graph @lm {
  %ids: i64[B,S] = input "ids"
  %labels: i64[B,S] = input "labels"
  %table: f32[V,D] = parameter "embed.weight"
  %gamma: f32[D] = parameter "blocks.0.norm.weight"
  %wq: f32[D,D] = parameter "blocks.0.q.weight"
  %wk: f32[D,K] = parameter "blocks.0.k.weight"
  %wv: f32[D,K] = parameter "blocks.0.v.weight"
  %wo: f32[D,D] = parameter "blocks.0.o.weight"
  %bias: f32[D] = parameter "blocks.0.o.bias"
  %x: f32[B,S,D] = embedding %table, %ids at "embed"
  %n: f32[B,S,D], %r: f32[B,S] = rms_norm %x, %gamma {eps=0.01} at "blocks.0.norm"
  %q: f32[B,S,D] = matmul %n, %wq {spec="bsk,kn->bsn"} at "blocks.0.q"
  %k: f32[B,S,K] = matmul %n, %wk {spec="bsk,kn->bsn"} at "blocks.0.k"
  %v: f32[B,S,K] = matmul %n, %wv {spec="bsk,kn->bsn"} at "blocks.0.v"
  %qh: f32[B,S,H,2] = reshape %q at "blocks.0"
  %kh: f32[B,S,G,2] = reshape %k at "blocks.0"
  %vh: f32[B,S,G,2] = reshape %v at "blocks.0"
  %o: f32[B,S,H,2], %lse: f32[B,H,S] = attention %qh, %kh, %vh {causal=true, scale=0.7} at "blocks.0"
  %of: f32[B,S,D] = reshape %o at "blocks.0"
  %p: f32[B,S,D] = matmul %of, %wo {spec="bsk,kn->bsn"} at "blocks.0.o"
  %bb: f32[B,S,D] = broadcast %bias {dims=[2]} at "blocks.0.o"
  %pb: f32[B,S,D] = add %p, %bb at "blocks.0.o"
  %z: f32[B,S,D] = add %x, %pb at "blocks.0"
  %logits: f32[B,S,V] = matmul %z, %table {spec="bsk,vk->bsv"} at "head"
  %l: f32[B,S], %picked: f32[B,S] = cross_entropy %logits, %labels at "loss"
  %nll: f32[B,S] = sub %l, %picked at "loss"
  %total: f32[] = reduce_sum %nll {dims=[0,1]} at "loss"
  %count: f32[] = constant {value=16.0} at "loss"
  %loss: f32[] = div %total, %count at "loss"
  return loss %loss
}"#;

/// Pictures: a convolution, the statistics of the batch, pooling, a convolution whose windows do not
/// overlap, groups of channels, and a transposed convolution back.
const PICTURES: &str = r#"graph @pictures {
  %x: f32[B,6,4,2] = input "x"
  %y: f32[B,D] = input "y"
  %w1: f32[D,3,3,2] = parameter "blocks.0.conv.weight"
  %w2: f32[D,1,1,K] = parameter "blocks.1.conv.weight"
  %w3: f32[D,3,2,D] = parameter "blocks.1.up.weight"
  %gamma: f32[D] = parameter "blocks.0.norm.gamma"
  %c: f32[B,6,4,D] = convolution %x, %w1 {low=[1,1], high=[1,1]} at "blocks.0.conv"
  %sum: f32[D] = reduce_sum %c {dims=[0,1,2]} at "blocks.0.norm"
  %mean: f32[D] = affine %sum {scale=0.005, offset=0.0} at "blocks.0.norm"
  %mb: f32[B,6,4,D] = broadcast %mean {dims=[3]} at "blocks.0.norm"
  %d: f32[B,6,4,D] = sub %c, %mb at "blocks.0.norm"
  %g: f32[B,6,4,D] = broadcast %gamma {dims=[3]} at "blocks.0.norm"
  %n: f32[B,6,4,D] = mul %d, %g at "blocks.0.norm"
  %p: f32[B,3,2,D] = max_pool %n {kernel=[2,2], stride=[2,2]} at "blocks.0"
  %e: f32[B,3,2,D] = convolution %p, %w2 {groups=2} at "blocks.1.conv"
  %r: f32[B,3,2,D] = gelu %e at "blocks.1"
  %u: f32[B,9,4,D] = convolution_transpose %r, %w3 {stride=[3,2]} at "blocks.1.up"
  %m: f32[B,D] = reduce_max %u {dims=[1,2]} at "loss"
  %o: f32[B,D] = sub %m, %y at "loss"
  %q: f32[B,D] = mul %o, %o at "loss"
  %s: f32[] = reduce_sum %q {dims=[0,1]} at "loss"
  %count: f32[] = constant {value=64.0} at "loss"
  %loss: f32[] = div %s, %count at "loss"
  return loss %loss
}"#;

/// Experts: each token goes to two of `H`, in the order in which they come.
const EXPERTS: &str = r#"graph @experts {
  %x: f32[B,S,D] = input "x"
  %y: f32[B,S,D] = input "y"
  %wr: f32[D,H] = parameter "blocks.0.router.weight"
  %we: f32[H,D,K] = parameter "blocks.0.experts.up"
  %wd: f32[H,K,D] = parameter "blocks.0.experts.down"
  %scores: f32[B,S,H] = matmul %x, %wr {spec="bsk,kn->bsn"} at "blocks.0.router"
  %p: f32[B,S,H] = softmax %scores at "blocks.0"
  %v: f32[B,S,2], %i: i64[B,S,2] = top_k %p {k=2} at "blocks.0"
  %ib: i64[B,S,2,H] = broadcast %i {dims=[0,1,2]} at "blocks.0"
  %e: i64[B,S,2,H] = iota {dim=3} at "blocks.0"
  %taken: bool[B,S,2,H] = eq %ib, %e at "blocks.0"
  %t: f32[B,S,2,H] = cast %taken at "blocks.0"
  %queue: f32[B,S,2,H] = cumsum %t {dim=1} at "blocks.0"
  %places: f32[B,S,2,H] = mul %queue, %t at "blocks.0"
  %place: f32[B,S,2] = reduce_sum %places {dims=[3]} at "blocks.0"
  %placei: i64[B,S,2] = cast %place at "blocks.0"
  %pb: i64[B,S,2,3] = broadcast %placei {dims=[0,1,2]} at "blocks.0"
  %c: i64[B,S,2,3] = iota {dim=3, start=1} at "blocks.0"
  %fits: bool[B,S,2,3] = eq %pb, %c at "blocks.0"
  %slots: f32[B,S,2,3] = cast %fits at "blocks.0"
  %vb: f32[B,S,2,H] = broadcast %v {dims=[0,1,2]} at "blocks.0"
  %weights: f32[B,S,2,H] = mul %t, %vb at "blocks.0"
  %combine: f32[B,S,H,3] = matmul %weights, %slots {spec="bsjk,bsjc->bskc"} at "blocks.0"
  %into: f32[B,H,3,D] = matmul %combine, %x {spec="bsec,bsk->beck"} at "blocks.0"
  %h: f32[B,H,3,K] = matmul %into, %we {spec="beck,ekn->becn"} at "blocks.0.experts"
  %a: f32[B,H,3,K] = gelu %h at "blocks.0.experts"
  %z: f32[B,H,3,D] = matmul %a, %wd {spec="beck,ekn->becn"} at "blocks.0.experts"
  %out: f32[B,S,D] = matmul %combine, %z {spec="bsec,beck->bsk"} at "blocks.0"
  %d: f32[B,S,D] = sub %out, %y at "loss"
  %q: f32[B,S,D] = mul %d, %d at "loss"
  %s: f32[] = reduce_sum %q {dims=[0,1,2]} at "loss"
  %count: f32[] = constant {value=64.0} at "loss"
  %loss: f32[] = div %s, %count at "loss"
  return loss %loss
}"#;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }
}

fn training_step(text: &str) -> Graph {
    let graph: Graph = text.parse::<Graph>().unwrap_or_else(|findings| panic!("{findings}"));
    // A large epsilon keeps the first update of Adam from being the gradient's sign.
    let kind = OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 0.1, weight_decay: 0.1 };
    let config = OptimizerConfig { kind, clip_grad_norm: Some(0.5) };
    add_optimizer(differentiate(&graph, "loss").expect("a gradient"), &config).expect("a step")
}

fn leaves(graph: &Graph, random: &mut Random) -> BTreeMap<String, HostTensor> {
    let mut leaves = BTreeMap::new();
    for (value, node) in graph.leaves() {
        let ty = graph.ty(value);
        let count = ty.elements() as usize;
        let mut floats = || (0..count).map(|_| random.below(2000) as f32 / 1000.0 - 1.0).collect::<Vec<_>>();
        let (name, tensor) = match &node.op {
            Op::Input(input) if input.name == "step" => (&input.name, HostTensor::from_f32([], &[1.0])),
            Op::Input(input) if input.name == "learning_rate" => (&input.name, HostTensor::from_f32([], &[0.1])),
            Op::Input(input) if ty.dtype == DType::I64 => {
                let ids: Vec<i64> = (0..count).map(|_| random.below(8) as i64).collect();
                (&input.name, HostTensor::from_i64(ty.shape.clone(), &ids))
            }
            Op::Input(input) => (&input.name, HostTensor::from_f32(ty.shape.clone(), &floats())),
            Op::Parameter(parameter) => (&parameter.name, HostTensor::from_f32(ty.shape.clone(), &floats())),
            Op::State(state) => (&state.name, HostTensor::zeros(ty.clone())),
            other => panic!("{} is no leaf", other.name()),
        };
        leaves.insert(name.clone(), tensor);
    }
    leaves
}

/// Gives the time axis to everything that depends on the batch, as accumulation needs it.
fn spread_over_time(plan: &mut Plan, time: AxisId) {
    let nodes: Vec<NodeId> = plan.graph.nodes().map(|(id, _)| id).collect();
    for id in nodes {
        let node = plan.graph.node(id).clone();
        let rule = plan.rule(id).clone();
        if let Op::Input(_) = node.op {
            if plan.graph.ty(node.results[0]).rank() > 0 {
                plan.strategies[id] = rule.parse_strategy("i=mb", &plan.mesh).expect("a batch");
            }
            continue;
        }
        let over = |value: &ValueId| {
            let sharding = plan.sharding(*value);
            (sharding.dim_of(time), sharding.partial_over(time))
        };
        let made: Vec<_> = node.operands.iter().map(over).collect();
        if made.iter().all(|state| *state == (None, None)) {
            continue;
        }
        let fits = |strategy: &Strategy| {
            (0..made.len()).all(|index| {
                let wanted = rule.operand_sharding(index, strategy);
                let wanted = (wanted.dim_of(time), wanted.partial_over(time));
                wanted == made[index]
                    || (wanted.0.is_some() && can_spread(plan, node.operands[index]) && made[index] == (None, None))
            })
        };
        let choices = rule.choices(&Strategy::default(), time, &plan.mesh);
        let strategies = choices.into_iter().map(|choice| Strategy::default().with(time, choice));
        let chosen = strategies.skip(1).find(|strategy| fits(strategy));
        if let Some(strategy) = chosen {
            for (index, made) in made.iter().enumerate() {
                if let (Some(dim), (None, None)) = (rule.operand_sharding(index, &strategy).dim_of(time), made) {
                    spread(plan, node.operands[index], dim, time);
                }
            }
            plan.strategies[id] = strategy;
        }
    }
}

/// Whether a value depends on no leaf along what is divided: made of constants and broadcasts.
fn can_spread(plan: &Plan, value: ValueId) -> bool {
    matches!(plan.graph.def(value).op, Op::Constant(_) | Op::Iota(_) | Op::Broadcast(_))
}

fn spread(plan: &mut Plan, value: ValueId, dim: usize, time: AxisId) {
    let def = plan.graph.value(value).def;
    let rule = plan.rule(def);
    if let Some(factor) = rule.results[0][dim].first() {
        plan.strategies[def] = Strategy::default().with(time, shardc_ir::Choice::Factor(*factor));
    }
}

fn random_plan(graph: &Graph, mesh: &Mesh, random: &mut Random) -> Plan {
    let mut plan = Plan { graph: graph.clone(), mesh: mesh.clone(), ..Plan::default() };
    if let Some(time) = mesh.find("mb") {
        spread_over_time(&mut plan, time);
    }
    plan.reduce_in_loop = random.below(2) == 0;
    let nodes: Vec<NodeId> = plan.graph.nodes().map(|(id, _)| id).collect();
    for id in nodes {
        for axis in mesh.ids().filter(|axis| !mesh.is_time(*axis)) {
            let (rule, strategy) = (plan.rule(id), &plan.strategies[id]);
            let mut choices = rule.choices(strategy, axis, mesh);
            choices.extend(rule.uneven_choices(strategy, axis, mesh));
            let choice = choices[random.below(choices.len())];
            plan.strategies[id] = plan.strategies[id].with(axis, choice);
        }
        for value in plan.graph.node(id).results.clone() {
            plan.transient[value] = random.below(4) == 0;
        }
    }
    plan
}

/// Whether one in so many plans is recomputed block by block.
const RECOMPUTED: u64 = 3;

fn check(text: &str, sizes: Sizes, mesh: &Mesh, seeds: Range<u64>) {
    let graph = training_step(&sized(text, sizes));
    let recomputed = rematerialize(&graph, &|_| true).expect("a graph");
    check_planned(&graph, [&graph, &recomputed], mesh, seeds);
}

/// The same with the blocks in chunks of the batch, or of the sequence; where attention is cut, every second in so many
/// parts, the last first.
fn check_chunks(text: &str, sizes: Sizes, mesh: &Mesh, (chunks, of, reversed): (u64, &str, u64), seeds: Range<u64>) {
    let graph = training_step(&sized(text, sizes));
    let size = sizes.iter().find(|(letter, _)| *letter == of).expect("a size").1;
    let cut = |graph: &Graph, with_attention: bool| {
        let prepared = prepare(graph, size, &NoScratch);
        let tokens = sequence_factors(graph, size, &|_, _| with_attention);
        let factor = |id: NodeId| match (of, prepared.batch[prepared.folded.class[id]]) {
            ("S", _) => tokens[id],
            (_, Choice::Factor(factor)) => Some(factor),
            _ => None,
        };
        let (strategies, mesh, staged) = (SecondaryMap::new(), Mesh::default(), &SecondaryMap::new());
        let reversed = if with_attention { reversed } else { 1 };
        let step = Step { graph, strategies: &strategies, mesh: &mesh, factor: &factor, parts: 1, reversed, staged };
        let cut = split_batch(step, chunks).expect("a graph").expect("chunks");
        order(&cut, &mesh, &Cluster::parse("h100:1", "h100").expect("a cluster")).expect("an order").graph
    };
    let recomputed = rematerialize(&graph, &|_| true).expect("a graph");
    check_planned(&graph, [&cut(&graph, false), &cut(&recomputed, true)], mesh, seeds);
}

/// Plans of a graph, and of one that is computed again, under random strategies.
fn check_planned(graph: &Graph, [kept, recomputed]: [&Graph; 2], mesh: &Mesh, seeds: Range<u64>) {
    for seed in seeds {
        let mut random = Random(seed * 7919 + 1);
        let given = leaves(graph, &mut random);
        let expect = shardc_runtime::interpret(graph, &given).expect("a step on one device");
        let planned = if seed % RECOMPUTED == 1 { recomputed } else { kept };
        let plan = random_plan(planned, mesh, &mut random);
        let plan = verify::plan(plan).unwrap_or_else(|found| panic!("seed {seed} on {mesh}: {}", found.0[0]));
        let programs = match lower_all(&plan, &Wants(seed)) {
            Ok(programs) => programs,
            Err(error) => panic!("seed {seed} on {mesh}: {error}"),
        };
        if let Err(found) = verify::step(&plan, &programs) {
            panic!("seed {seed} on {mesh}: {}", found.0[0]);
        }
        let place = format!("seed {seed} on {mesh}");
        compare(&expect, &on_machine(&programs, &given, seed), &format!("{place}, in lockstep"));
        compare(&expect, &on_threads(&programs, &given), &format!("{place}, on threads"));
        let memory = shardc_passes::allocate::memory(&programs[0]);
        assert_eq!(memory.total(), programs[0].arena(shardc_ir::plan::Space::Device));
    }
}

/// A random plan in stages, cut at random places, on threads.
fn check_stages(text: &str, sizes: Sizes, axes: &[(Family, u64)], pipeline: (u64, Schedule, u64), seeds: Range<u64>) {
    let graph = training_step(&sized(text, sizes));
    let (stages, schedule, per_stage) = pipeline;
    let (all, mut legal) = (seeds.clone().count(), 0);
    for seed in seeds {
        let mut random = Random(seed * 7919 + 1);
        let given = leaves(&graph, &mut random);
        let expect = shardc_runtime::interpret(&graph, &given).expect("a step on one device");
        let mut plan = random_plan(&graph, &mesh(axes), &mut random);
        plan.mesh.push(Family::Pipeline, stages);
        let anchors = anchors(&graph);
        let main: Vec<NodeId> = graph.nodes().map(|(id, _)| id).filter(|id| anchors[*id] == Some(*id)).collect();
        let mut cuts: BTreeSet<NodeId> = BTreeSet::new();
        while (cuts.len() as u64) < stages * per_stage - 1 {
            cuts.insert(main[1 + random.below(main.len() - 1)]);
        }
        let cuts: Vec<NodeId> = cuts.into_iter().collect();
        plan.pipeline =
            Pipeline { schedule, per_stage, chunks: chunks(&anchors, &graph, &cuts), ..Pipeline::default() };
        let place = format!("seed {seed}, {} of {stages} stages cut at {cuts:?}", schedule.name());
        // A random strategy may read a gradient of one chunk after the loop in another.
        let Ok(plan) = verify::plan(plan) else { continue };
        legal += 1;
        let programs = lower_all(&plan, &Wants(seed)).unwrap_or_else(|error| panic!("{place}: {error}"));
        verify::step(&plan, &programs).unwrap_or_else(|found| panic!("{place}: {found}"));
        compare(&expect, &on_machine(&programs, &given, seed), &format!("{place}, in lockstep"));
        compare(&expect, &on_threads(&programs, &given), &format!("{place}, on threads"));
    }
    assert!(legal >= 2, "{legal} of {all} plans in {stages} stages are legal");
}

#[track_caller]
fn compare(expect: &Tensors, actual: &Tensors, place: &str) {
    for (name, whole) in expect {
        let (expect, actual) = (floats(whole), floats(&actual[name]));
        assert_eq!(expect.len(), actual.len(), "{place}: `{name}`");
        let scale = expect.iter().fold(1e-3f32, |most, value| most.max(value.abs()));
        let distance = |(a, b): (&f32, &f32)| if a.is_nan() || b.is_nan() { f32::MAX } else { (a - b).abs() };
        let worst = expect.iter().zip(&actual).map(distance).fold(0.0, f32::max) / scale;
        assert!(worst < 2e-4, "{place}: `{name}` is off by {worst}\n{expect:?}\n{actual:?}");
    }
}

/// One step with the streams in some order: readings, and slots put together from their parts.
fn on_machine(programs: &[Program], given: &Tensors, seed: u64) -> Tensors {
    let mut machine = Machine::new(programs);
    machine.write_slots(given).expect("slots");
    let ahead = [Ahead::Compute, Ahead::Communication, Ahead::Random(seed)];
    let mut outputs = machine.step(given, ahead[seed as usize % ahead.len()]).expect("a step");
    outputs.extend(machine.slots().expect("slots that agree"));
    outputs
}

/// One step on the runtime of threads: readings, and slots put together from their parts.
fn on_threads(programs: &[Program], given: &Tensors) -> Tensors {
    let mut runtime = CpuRuntime::new(programs.to_vec()).expect("ranks");
    let slots = || programs.iter().flat_map(|program| program.slots.iter().map(|slot| (program.rank, slot)));
    for (rank, slot) in slots() {
        runtime.write_slot(rank, &slot.name, &given[&slot.name].part(&slot.slice)).expect("a slot");
    }
    let read = runtime
        .step(&given.iter().map(|(name, tensor)| (name.clone(), tensor.clone().into())).collect())
        .expect("a step");
    let reading = |(name, value)| (name, HostTensor::from_f32([], &[value as f32]));
    let mut outputs: Tensors = read.into_iter().map(reading).collect();
    for (rank, slot) in slots() {
        let part = runtime.read_slot(rank, &slot.name).expect("a slot");
        let whole = outputs.entry(slot.name.clone()).or_insert_with(|| HostTensor::zeros(slot.ty.clone()));
        whole.set_part(&slot.slice, &part);
    }
    outputs
}

fn floats(tensor: &HostTensor) -> Vec<f32> {
    tensor.bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

fn mesh(axes: &[(Family, u64)]) -> Mesh {
    let mut mesh = Mesh::default();
    for (family, size) in axes {
        mesh.push(*family, *size);
    }
    mesh
}

#[test]
fn random_strategies_on_one_axis() {
    check(MLP, EVEN, &mesh(&[(Data, 1)]), 0..1);
    check(MLP, EVEN, &mesh(&[(Data, 2)]), 0..12);
    check(LM, EVEN_LM, &mesh(&[(Tensor, 2)]), 0..12);
}

#[test]
fn random_strategies_on_two_axes() {
    check(MLP, EVEN, &mesh(&[(Data, 2), (Tensor, 2)]), 0..16);
    check(LM, EVEN_LM, &mesh(&[(Data, 2), (Tensor, 2)]), 0..24);
    check(MLP, MIXED, &mesh(&[(Data, 3), (Tensor, 2)]), 0..16);
    check(LM, MIXED_LM, &mesh(&[(Data, 3), (Tensor, 2)]), 0..24);
}

#[test]
fn random_strategies_on_three_axes() {
    check(MLP, EVEN, &mesh(&[(Data, 2), (Tensor, 2), (Tensor, 2)]), 0..12);
    check(LM, EVEN_LM, &mesh(&[(Data, 2), (Tensor, 2), (Tensor, 2)]), 0..12);
    check(LM, MIXED_LM, &mesh(&[(Data, 3), (Tensor, 2), (Tensor, 2)]), 0..8);
}

#[test]
fn random_strategies_with_uneven_parts() {
    check(MLP, EVEN, &mesh(&[(Data, 3)]), 0..16);
    check(LM, EVEN_LM, &mesh(&[(Data, 3)]), 0..16);
    check(LM, EVEN_LM, &mesh(&[(Tensor, 2), (Data, 3)]), 0..24);
    check(LM, EVEN_LM, &mesh(&[(Data, 5), (Tensor, 2)]), 0..12);
    check(LM, EVEN_LM, &mesh(&[(Microbatch, 2), (Tensor, 2), (Data, 3)]), 0..16);
    check(PICTURES, EVEN_LM, &mesh(&[(Data, 3)]), 0..8);
    check(TOTAL, EVEN, &mesh(&[(Data, 3)]), 0..12);
    check(TOTAL, EVEN, &mesh(&[(Data, 3), (Tensor, 2)]), 0..24);
    check(EXPERTS, EVEN_LM, &mesh(&[(Data, 3), (Tensor, 2)]), 0..12);
}

#[test]
fn random_strategies_of_pictures() {
    check(PICTURES, EVEN_LM, &mesh(&[(Tensor, 2)]), 0..8);
    check(PICTURES, EVEN_LM, &mesh(&[(Data, 2), (Tensor, 2)]), 0..12);
    check(PICTURES, MIXED_LM, &mesh(&[(Data, 3), (Tensor, 2)]), 0..8);
}

#[test]
fn random_strategies_of_experts() {
    check(EXPERTS, EVEN_LM, &mesh(&[(Data, 2), (Tensor, 2)]), 0..12);
    check(EXPERTS, MIXED_LM, &mesh(&[(Data, 2), (Tensor, 3)]), 0..8);
}

#[test]
fn random_strategies_of_chunks() {
    check_chunks(LM, EVEN_LM, &mesh(&[(Tensor, 2)]), (2, "B", 1), 0..12);
    check_chunks(LM, EVEN_LM, &mesh(&[(Data, 2), (Tensor, 2)]), (2, "B", 1), 0..12);
    check_chunks(LM, EVEN_LM, &mesh(&[(Tensor, 4)]), (4, "B", 1), 0..6);
    check_chunks(EXPERTS, EVEN_LM, &mesh(&[(Tensor, 2)]), (2, "B", 1), 0..6);
    check_chunks(LM, MIXED_LM, &mesh(&[(Data, 3), (Tensor, 2)]), (2, "S", 1), 0..12);
    check_chunks(EXPERTS, EVEN_LM, &mesh(&[(Tensor, 2)]), (2, "S", 1), 0..6);
    check_chunks(LM, LONG_LM, &mesh(&[(Context, 2)]), (2, "S", 2), 0..12);
    check_chunks(LM, LONG_LM, &mesh(&[(Context, 2), (Tensor, 2)]), (2, "S", 4), 0..12);
    check_chunks(EXPERTS, LONG_LM, &mesh(&[(Context, 2)]), (4, "S", 2), 0..6);
}

#[test]
fn random_strategies_over_time() {
    check(EXPERTS, EVEN_LM, &mesh(&[(Microbatch, 2), (Data, 2)]), 0..8);
    check(MLP, EVEN, &mesh(&[(Microbatch, 2)]), 0..3);
    check(MLP, EVEN, &mesh(&[(Microbatch, 2), (Data, 2)]), 0..12);
    check(MLP, MIXED, &mesh(&[(Microbatch, 4), (Data, 3)]), 0..8);
    check(LM, EVEN_LM, &mesh(&[(Microbatch, 2), (Data, 2), (Tensor, 2)]), 0..24);
    check(LM, MIXED_LM, &mesh(&[(Microbatch, 3), (Data, 2), (Tensor, 3)]), 0..12);
}

#[test]
fn stages_of_a_pipeline() {
    // What is read in two chunks is updated after the loop from both, which no stage can do.
    let untied = LM.replace("%z, %table", "%z, %head");
    let untied = untied
        .replace("  %x: f32[B,S,D] = emb", "  %head: f32[V,D] = parameter \"head.weight\"\n  %x: f32[B,S,D] = emb");
    check_stages(MLP, EVEN, &[(Microbatch, 4)], (2, Schedule::GPipe, 1), 0..12);
    check_stages(MLP, EVEN, &[(Microbatch, 4), (Data, 2)], (2, Schedule::OneForwardOneBackward, 1), 0..16);
    check_stages(&untied, EVEN_LM, &[(Microbatch, 4)], (3, Schedule::OneForwardOneBackward, 1), 0..16);
    check_stages(&untied, EVEN_LM, &[(Microbatch, 2), (Tensor, 2)], (2, Schedule::OneForwardOneBackward, 1), 0..16);
    check_stages(&untied, EVEN_LM, &[(Microbatch, 4)], (2, Schedule::Interleaved, 2), 0..16);
    check_stages(&untied, MIXED_LM, &[(Microbatch, 3), (Data, 2)], (2, Schedule::ZeroBubbleV, 2), 0..16);
}
