//! A sharded step equals the step of one device: training graphs under random legal strategies.

#[path = "common/lockstep.rs"]
mod lockstep;

use lockstep::Lockstep;
use shardc_ir::{AxisId, AxisKind, DType, Graph, HostTensor, Mesh, NodeId, Op, Plan, Strategy, ValueId};
use shardc_passes::differentiate::differentiate;
use shardc_passes::lower::lower_all;
use shardc_passes::optimizer::{OptimizerConfig, OptimizerKind, add_optimizer};
use std::collections::BTreeMap;

const MLP: &str = r#"graph @mlp {
  %x: f32[8,4] = input "x"
  %y: f32[8,4] = input "y"
  %w1: f32[4,8] = parameter "up.weight"
  %w2: f32[8,4] = parameter "down.weight"
  %h: f32[8,8] = matmul %x, %w1 at "blocks.0.up"
  %a: f32[8,8] = gelu %h at "blocks.0.up"
  %o: f32[8,4] = matmul %a, %w2 at "blocks.1.down"
  %d: f32[8,4] = sub %o, %y at "loss"
  %e: f32[8,4] = mul %d, %d at "loss"
  %s: f32[] = reduce_sum %e {dims=[0,1]} at "loss"
  %m: f32[8,4] = mul %y, %y at "loss"
  %n: f32[] = reduce_sum %m {dims=[0,1]} at "loss"
  %loss: f32[] = div %s, %n at "loss"
  return loss %loss
}"#;

const LM: &str = r#"graph @lm {
  %ids: i64[4,4] = input "ids"
  %labels: i64[4,4] = input "labels"
  %table: f32[8,8] = parameter "embed.weight"
  %gamma: f32[8] = parameter "blocks.0.norm.weight"
  %wq: f32[8,8] = parameter "blocks.0.q.weight"
  %wk: f32[8,4] = parameter "blocks.0.k.weight"
  %wv: f32[8,4] = parameter "blocks.0.v.weight"
  %wo: f32[8,8] = parameter "blocks.0.o.weight"
  %bias: f32[8] = parameter "blocks.0.o.bias"
  %x: f32[4,4,8] = embedding %table, %ids at "embed"
  %n: f32[4,4,8], %r: f32[4,4] = rms_norm %x, %gamma {eps=0.01} at "blocks.0.norm"
  %q: f32[4,4,8] = matmul %n, %wq {spec="bsk,kn->bsn"} at "blocks.0.q"
  %k: f32[4,4,4] = matmul %n, %wk {spec="bsk,kn->bsn"} at "blocks.0.k"
  %v: f32[4,4,4] = matmul %n, %wv {spec="bsk,kn->bsn"} at "blocks.0.v"
  %qh: f32[4,4,4,2] = reshape %q at "blocks.0"
  %kh: f32[4,4,2,2] = reshape %k at "blocks.0"
  %vh: f32[4,4,2,2] = reshape %v at "blocks.0"
  %o: f32[4,4,4,2], %lse: f32[4,4,4] = attention %qh, %kh, %vh {causal=true, scale=0.7} at "blocks.0"
  %of: f32[4,4,8] = reshape %o at "blocks.0"
  %p: f32[4,4,8] = matmul %of, %wo {spec="bsk,kn->bsn"} at "blocks.0.o"
  %bb: f32[4,4,8] = broadcast %bias {dims=[2]} at "blocks.0.o"
  %pb: f32[4,4,8] = add %p, %bb at "blocks.0.o"
  %z: f32[4,4,8] = add %x, %pb at "blocks.0"
  %logits: f32[4,4,8] = matmul %z, %table {spec="bsk,vk->bsv"} at "head"
  %l: f32[4,4], %picked: f32[4,4] = cross_entropy %logits, %labels at "loss"
  %nll: f32[4,4] = sub %l, %picked at "loss"
  %total: f32[] = reduce_sum %nll {dims=[0,1]} at "loss"
  %count: f32[] = constant {value=16.0} at "loss"
  %loss: f32[] = div %total, %count at "loss"
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
        let rule = plan.rule(id);
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
            for index in 0..made.len() {
                if let (Some(dim), (None, None)) = (rule.operand_sharding(index, &strategy).dim_of(time), made[index]) {
                    spread(plan, node.operands[index], dim, time);
                }
            }
            plan.strategies[id] = strategy;
        }
    }
}

/// Whether a value depends on no leaf along what is divided: made of constants and broadcasts.
fn can_spread(plan: &Plan, value: ValueId) -> bool {
    matches!(plan.graph.def(value).op, Op::Constant(_) | Op::Broadcast(_))
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
        let rule = plan.rule(id);
        for axis in mesh.ids().filter(|axis| !mesh.is_time(*axis)) {
            let choices = rule.choices(&plan.strategies[id], axis, mesh);
            let choice = choices[random.below(choices.len())];
            plan.strategies[id] = plan.strategies[id].with(axis, choice);
        }
        for value in plan.graph.node(id).results.clone() {
            plan.transient[value] = random.below(4) == 0;
        }
    }
    plan
}

fn check(text: &str, mesh: &Mesh, seeds: std::ops::Range<u64>) {
    let graph = training_step(text);
    for seed in seeds {
        let mut random = Random(seed * 7919 + 1);
        let given = leaves(&graph, &mut random);
        let expect = shardc_runtime::interpret(&graph, &given).expect("a step on one device");
        let plan = random_plan(&graph, mesh, &mut random);
        let programs = match lower_all(&plan) {
            Ok(programs) => programs,
            Err(error) => panic!("seed {seed} on {mesh}: {error}"),
        };
        let actual = Lockstep::new(&programs, seed).step(&given);
        for (name, whole) in &expect {
            let (expect, actual) = (floats(whole), floats(&actual[name]));
            let scale = expect.iter().fold(1e-3f32, |most, value| most.max(value.abs()));
            let worst = expect
                .iter()
                .zip(&actual)
                .map(|(a, b)| if a.is_nan() || b.is_nan() { f32::MAX } else { (a - b).abs() });
            let worst = worst.fold(0.0, f32::max) / scale;
            assert!(
                worst < 2e-4,
                "seed {seed} on {mesh}: `{name}` is off by {worst}\n{expect:?}\n{actual:?}\n{}",
                plan.choice
            );
        }
        let memory = shardc_passes::allocate::memory(&programs[0]);
        assert_eq!(memory.total(), programs[0].arena(shardc_ir::plan::Space::Device));
    }
}

fn floats(tensor: &HostTensor) -> Vec<f32> {
    tensor.bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

fn mesh(axes: &[(&str, u64)]) -> Mesh {
    let mut mesh = Mesh::default();
    for (name, size) in axes {
        mesh.push(*name, *size, if *name == "mb" { AxisKind::Time } else { AxisKind::Space });
    }
    mesh
}

#[test]
fn random_strategies_on_one_axis() {
    check(MLP, &mesh(&[("dp", 1)]), 0..1);
    check(MLP, &mesh(&[("dp", 2)]), 0..12);
    check(LM, &mesh(&[("tp", 2)]), 0..12);
}

#[test]
fn random_strategies_on_two_axes() {
    check(MLP, &mesh(&[("dp", 2), ("tp", 2)]), 0..12);
    check(LM, &mesh(&[("dp", 2), ("tp", 2)]), 0..20);
}

#[test]
fn random_strategies_over_time() {
    check(MLP, &mesh(&[("mb", 2)]), 0..2);
    check(MLP, &mesh(&[("mb", 2), ("dp", 2)]), 0..12);
    check(LM, &mesh(&[("mb", 2), ("dp", 2), ("tp", 2)]), 0..20);
}
