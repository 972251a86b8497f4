//! What the verifier of programs accepts computes what the plan's graph does: programs are changed at one place or two,
//! at random, and those that the verifier does not refuse are run.
//!
//! `SHARDC_MUTATIONS=N` tries N changes of each plan instead of the few of a test run.

#[path = "common/apart.rs"]
mod apart;
#[path = "common/machine.rs"]
mod machine;
#[path = "common/mutate.rs"]
mod mutate;

use apart::lay_apart;
use machine::{Ahead, Machine, Tensors};
use mutate::{KINDS, TOGETHER};
use shardc::{Batch, Cluster, NamedModel, Options, Precision};
use shardc_ir::ops::{Cast, Fused};
use shardc_ir::program::Action;
use shardc_ir::verify::{self, VerifiedPlan};
use shardc_ir::{Bytes, Choice, DType, HostTensor, NoScratch, Op, Plan, Program, Target, TensorType};
use shardc_models::zoo::{Config, Gpt2Config, LlamaConfig, MoeConfig};
use shardc_passes::lower::lower_all;
use shardc_passes::random::Random;
use shardc_runtime::CudaTarget;
use shardc_runtime::cpu::interpret::compute_op;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Changes of each plan in a test run.
const FEW: u64 = 20;
/// How often another change is chosen in the place of one that changes nothing.
const TRIES: usize = 8;
/// Tokens of a model.
const VOCABULARY: usize = 24;

/// A kind of model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Model {
    Llama,
    Tied,
    Gpt2,
    Experts,
    Zoo(&'static str),
}

/// How programs are made of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Made {
    /// As for CPU ranks.
    Plainly,
    /// As for GPUs: with regions and scratch memory.
    Fused,
    /// As for CPU ranks, every buffer with bytes of its own.
    Apart,
    /// As for GPUs, every buffer with bytes of its own.
    FusedApart,
}

use Made::{Apart, Fused as AsFused, FusedApart, Plainly};

/// A model, its batch, ranks, pins, and how programs are made.
type Case = (Model, u64, &'static str, &'static str, Made);

/// Wants scratch memory for two instructions of three; fuses what GPUs do, and brings inputs ahead.
#[derive(Debug)]
struct Wants;

impl Target for Wants {
    fn scratch(&self, _: &Action, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        let elements: u64 = operands.iter().chain(results).map(TensorType::elements).sum();
        Bytes(if elements.is_multiple_of(3) { 0 } else { elements })
    }

    fn brings_ahead(&self, bytes: Bytes) -> bool {
        bytes.0 > 8
    }

    fn fuses(&self, region: &Fused, operands: &[TensorType]) -> bool {
        CudaTarget.fuses(region, operands)
    }
}

/// A plan, its programs, and what they compute.
struct Subject {
    name: String,
    plan: VerifiedPlan<'static>,
    programs: Vec<Program>,
    leaves: Tensors,
    expect: Vec<Tensors>,
    rounding: f32,
}

impl Model {
    fn config(self) -> Config {
        let llama = LlamaConfig::new([2, 16, 4, 2, 32, VOCABULARY]);
        match self {
            Self::Llama => Config::Llama(llama),
            Self::Tied => Config::Llama(LlamaConfig { tied: true, ..llama }),
            Self::Gpt2 => {
                Config::Gpt2(Gpt2Config { vocabulary: VOCABULARY, hidden: 32, ..Gpt2Config::new(2, 16, 4, 8) })
            }
            Self::Experts => Config::Moe(MoeConfig { group: 4, ..MoeConfig::new(llama, 4, 2) }),
            Self::Zoo(name) => NamedModel::find(name).expect("a model of the zoo").config,
        }
    }
}

/// The vocabulary in the embedding and the loss, and the sequence in norms, divided over `tp`: what the search leaves
/// whole in so small a model.
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
        let Some(factor) = rule.find(factor) else { continue };
        let divided = plan.strategies[id].without(tp).with(tp, Choice::Factor(factor));
        if rule.check(&divided, &plan.mesh).is_ok() {
            plan.strategies[id] = divided;
        }
    }
}

impl Subject {
    fn new((model, batch, cluster, pins, _): Case, made: Made, options: &Options) -> Self {
        let parsed = Cluster::parse(cluster, "h200").expect("a cluster");
        let precision = options.precision_on(&parsed);
        let summed = options.reduce_dtype.map_or(String::new(), |dtype| format!(", sums in {dtype}"));
        let name = format!("{model:?} on {cluster} with {pins}, {}{summed}, {made:?}", precision.name());
        let seq = match (model, precision) {
            (Model::Zoo(_), _) => 0,
            // Products in 8 bits take groups of so many tokens.
            (_, Precision::Fp8) => 16,
            _ => 8,
        };
        let named = NamedModel::from_config("tiny", model.config());
        let options = Options { pins: pins.to_string(), ..options.clone() };
        let compiled = shardc::compile(&named, Batch { batch, seq }, &parsed, &options);
        let mut plan = compiled.unwrap_or_else(|error| panic!("{name}: {error}")).plan().clone();
        divide_further(&mut plan);
        let plan = verify::plan(plan).unwrap_or_else(|found| panic!("{name}: {found}"));
        let target: &dyn Target = if matches!(made, Plainly | Apart) { &NoScratch } else { &Wants };
        let mut programs = lower_all(&plan, target).unwrap_or_else(|error| panic!("{name}: {error}"));
        if matches!(made, Apart | FusedApart) {
            programs.iter_mut().for_each(lay_apart);
        }
        verify::step(&plan, &programs[..]).unwrap_or_else(|found| panic!("{name}: {found}"));
        let leaves = leaves(&plan);
        let run = |ahead| run(&programs, &leaves, ahead).unwrap_or_else(|error| panic!("{name}: {error}"));
        let expect = run([Ahead::Compute; 2]);
        for ahead in [[Ahead::Communication; 2], [Ahead::Random(1), Ahead::Random(2)]] {
            assert!(run(ahead) == expect, "{name}: another order gives other numbers");
        }
        let rounding = if precision == Precision::Fp32 && options.reduce_dtype.is_none() { 1e-4 } else { 2e-2 };
        Self { name, plan, programs, leaves, expect, rounding }
    }

    /// The ranks whose programs are alike, by their stage.
    fn stages(&self) -> Vec<Vec<usize>> {
        let mesh = &self.plan.mesh;
        let mut stages: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        (0..mesh.ranks()).for_each(|rank| stages.entry(mesh.stage_of(rank)).or_default().push(rank as usize));
        stages.into_values().collect()
    }

    /// Programs with a change, or one and another, on one rank or on all of a stage; and what the changes are.
    fn changed(&self, seed: u64) -> (String, Vec<Program>) {
        // Other changes of every plan.
        let start = self.name.bytes().fold(seed << 32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        let mut random = Random(start);
        let mut programs = self.programs.clone();
        let mut names = Vec::new();
        for _ in 0..if random.below(4) == 0 { 2 } else { 1 } {
            // Not every program has something of every kind.
            for _ in 0..TRIES {
                let kinds = [KINDS, TOGETHER][usize::from(random.below(4) == 0)];
                let (kind, change) = kinds[random.below(kinds.len())];
                let stages = self.stages();
                let stage = &stages[random.below(stages.len())];
                let one = stage[random.below(stage.len())];
                let ranks: Vec<usize> = if random.below(3) == 0 { vec![one] } else { stage.clone() };
                let (turns, before) = (random.clone(), programs.clone());
                for rank in &ranks {
                    let mut broken = programs[*rank].clone();
                    if change(&mut broken, &mut turns.clone()).is_some() {
                        programs[*rank] = broken;
                    }
                }
                random.below(2);
                if programs != before {
                    names.push(format!("{kind} on {ranks:?}"));
                    break;
                }
            }
        }
        (names.join(", and "), programs)
    }

    fn verdict(&self, programs: &[Program]) -> Verdict {
        if programs == self.programs {
            return Verdict::Unchanged;
        }
        let guarded = |what: &str, result: std::thread::Result<Verdict>| {
            result.unwrap_or_else(|_| Verdict::Hole(format!("the {what} panics")))
        };
        let shown = catch_unwind(AssertUnwindSafe(|| match verify::step(&self.plan, programs) {
            Ok(_) => Verdict::Equal,
            Err(_) => Verdict::Refused,
        }));
        let shown = guarded("verifier", shown);
        if shown != Verdict::Equal {
            return shown;
        }
        let all = [[Ahead::Compute, Ahead::Communication], [Ahead::Communication, Ahead::Compute]];
        for ahead in all.into_iter().chain([[Ahead::Random(3), Ahead::Random(4)]]) {
            let outcome = catch_unwind(AssertUnwindSafe(|| match run(programs, &self.leaves, ahead) {
                Ok(made) => compare(&self.expect, &made, self.rounding),
                Err(message) => Verdict::Hole(message),
            }));
            let outcome = guarded("machine", outcome);
            if outcome != Verdict::Equal {
                return outcome;
            }
        }
        Verdict::Equal
    }
}

/// What becomes of changed programs.
#[derive(Clone, Debug, PartialEq)]
enum Verdict {
    /// Nothing was changed.
    Unchanged,
    /// The verifier refuses them.
    Refused,
    /// It accepts them, and they compute the same bits.
    Equal,
    /// The same but for rounding.
    Rounded,
    /// It accepts them, and they compute something else, or nothing.
    Hole(String),
}

/// Every input, parameter and state of a plan; of a loss whose every term counts.
fn leaves(plan: &Plan) -> Tensors {
    let mut random = Random(1);
    let mut leaves = Tensors::new();
    for (value, node) in plan.graph.leaves() {
        let ty = plan.graph.ty(value);
        let mut floats = |low: f32, high: f32| {
            let number = |_| low + (high - low) * random.below(10_000) as f32 / 10_000.0;
            (0..ty.elements()).map(number).collect::<Vec<f32>>()
        };
        let (name, values) = match &node.op {
            Op::Input(leaf) if leaf.name == "step" => (&leaf.name, vec![3.0]),
            Op::Input(leaf) if leaf.name == "learning_rate" => (&leaf.name, vec![0.1]),
            Op::Input(leaf) if ty.dtype == DType::I64 => {
                let ids = floats(0.0, if plan.request.seq > 0 { VOCABULARY as f32 } else { 8.0 });
                let ids: Vec<i64> = ids.into_iter().map(|id| id as i64).collect();
                leaves.insert(leaf.name.clone(), HostTensor::from_i64(ty.shape.clone(), &ids));
                continue;
            }
            Op::Input(leaf) => (&leaf.name, floats(0.5, 1.5)),
            Op::Parameter(leaf) => (&leaf.name, floats(-1.0, 1.0)),
            Op::State(leaf) if leaf.cast_of.is_some() => continue,
            Op::State(leaf) => (&leaf.name, floats(0.01, 0.1)),
            other => panic!("{} is no leaf", other.name()),
        };
        let wide = HostTensor::from_f32(ty.shape.clone(), &values);
        let cast = compute_op(&Cast {}.into(), &[wide], std::slice::from_ref(ty)).expect("a cast");
        leaves.extend(cast.into_iter().map(|tensor| (name.clone(), tensor)));
    }
    leaves
}

/// The readings of two steps, and the slots after them.
fn run(programs: &[Program], leaves: &Tensors, ahead: [Ahead; 2]) -> Result<Vec<Tensors>, String> {
    let mut machine = Machine::new(programs);
    machine.write_slots(leaves)?;
    let mut made = Vec::new();
    for ahead in ahead {
        made.push(machine.step(leaves, ahead)?);
    }
    made.push(machine.slots()?);
    Ok(made)
}

/// `rounding` is how far numbers may be apart that were rounded in another order, relative to the largest of their tensor.
fn compare(expect: &[Tensors], made: &[Tensors], rounding: f32) -> Verdict {
    if expect == made {
        return Verdict::Equal;
    }
    for (expect, made) in expect.iter().zip(made) {
        if expect.keys().ne(made.keys()) {
            return Verdict::Hole("other readings or slots".to_string());
        }
        for ((name, expect), made) in expect.iter().zip(made.values()) {
            if expect.ty != made.ty {
                return Verdict::Hole(format!("`{name}` is {}, not {}", made.ty, expect.ty));
            }
            let floats = |tensor: &HostTensor| {
                let wide = tensor.ty.with_dtype(DType::F32);
                let cast = compute_op(&Cast {}.into(), std::slice::from_ref(tensor), &[wide]).expect("a cast");
                cast[0].bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>()
            };
            let (expect, made) = (floats(expect), floats(made));
            let scale = expect.iter().fold(1e-6f32, |most, value| most.max(value.abs()));
            let distance = |(a, b): (&f32, &f32)| if a.is_nan() || b.is_nan() { f32::MAX } else { (a - b).abs() };
            let worst = expect.iter().zip(&made).map(distance).fold(0.0, f32::max) / scale;
            if worst > rounding {
                return Verdict::Hole(format!("`{name}` is off by {worst}"));
            }
        }
    }
    Verdict::Rounded
}

impl Verdict {
    fn name(&self) -> &'static str {
        match self {
            Self::Unchanged => "unchanged",
            Self::Refused => "refused",
            Self::Equal => "equal",
            Self::Rounded => "rounded",
            Self::Hole(_) => "holes",
        }
    }
}

/// Changes the programs of plans again and again.
fn check(cases: &[Case], options: &Options) {
    let many: Option<u64> = std::env::var("SHARDC_MUTATIONS").ok().and_then(|count| count.parse().ok());
    let mut wrong = Vec::new();
    for case in cases {
        let made = if many.is_some() { &[Plainly, AsFused, Apart, FusedApart][..] } else { &[case.4] };
        for made in made {
            let subject = Subject::new(*case, *made, options);
            wrong.extend(subject.holes(many.unwrap_or(FEW)));
        }
    }
    assert!(wrong.is_empty(), "accepted, though wrong:\n{}", wrong.join("\n"));
}

impl Subject {
    /// What is accepted and wrong, of so many changes.
    fn holes(&self, changes: u64) -> Vec<String> {
        let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
        let mut holes = Vec::new();
        for seed in 0..changes {
            let (what, programs) = self.changed(seed);
            let verdict = self.verdict(&programs);
            *counts.entry(verdict.name()).or_default() += 1;
            match verdict {
                Verdict::Hole(why) => holes.push(format!("{}: change {seed}, {what}: {why}", self.name)),
                Verdict::Rounded => println!("{}: change {seed}, {what}, rounds otherwise", self.name),
                _ => {}
            }
        }
        println!("{}: {counts:?}", self.name);
        assert!(counts.get("refused").is_some_and(|refused| 2 * refused >= changes), "{}: {counts:?}", self.name);
        holes
    }
}

fn fp32() -> Options {
    Options { precision: Some(Precision::Fp32), ..Options::default() }
}

use Model::{Experts, Gpt2, Llama, Tied, Zoo};

#[test]
fn data_ranks() {
    let cases = [
        (Llama, 4, "cpu:2", "dp=2,zero=0,microbatch=1", Plainly),
        (Llama, 4, "cpu:2", "dp=2,zero=1,microbatch=1", Apart),
        (Tied, 4, "cpu:2", "dp=2,zero=2,microbatch=1,loss_chunks=2", AsFused),
        (Llama, 4, "cpu:2", "dp=2,zero=3,microbatch=1,recompute=full", FusedApart),
        (Gpt2, 4, "cpu:2", "dp=2,zero=1,microbatch=1", AsFused),
        (Llama, 8, "cpu:4", "dp=2,fsdp=2,zero=3,microbatch=1", Apart),
    ];
    check(&cases, &fp32());
}

#[test]
fn uneven_parts() {
    let cases = [
        (Llama, 6, "cpu:3", "dp=3,zero=1,microbatch=1", Apart),
        (Llama, 3, "cpu:3", "dp=3,zero=3,microbatch=1", Plainly),
        (Tied, 6, "cpu:6", "dp=3,tp=2,zero=2,microbatch=1", Apart),
    ];
    check(&cases, &fp32());
}

#[test]
fn tensor_ranks() {
    let cases = [
        (Llama, 2, "cpu:2", "tp=2,microbatch=1", Plainly),
        (Llama, 2, "cpu:2", "tp=2,microbatch=2,overlap_chunks=2", Apart),
        (Llama, 4, "cpu:4", "dp=2,tp=2,zero=1,microbatch=1", AsFused),
        (Gpt2, 4, "cpu:2", "tp=2,microbatch=2", AsFused),
        (Tied, 2, "cpu:4", "tp=2x2,microbatch=2", Apart),
        (Llama, 2, "cpu:2", "cp=2,zero=0,microbatch=1", FusedApart),
        (Llama, 2, "cpu:2", "ulysses=2,zero=1,microbatch=1", Apart),
        (Experts, 4, "cpu:2", "ep=2,zero=1", Apart),
    ];
    check(&cases, &fp32());
}

#[test]
fn stages() {
    let cases = [
        (Llama, 4, "cpu:2", "pp=2,schedule=gpipe,microbatch=1", Plainly),
        (Tied, 4, "cpu:4", "pp=2,tp=2,schedule=1f1b,microbatch=1", Apart),
        (Llama, 8, "cpu:4", "pp=2,dp=2,zero=1,schedule=1f1b,microbatch=1", AsFused),
        (Gpt2, 4, "cpu:2", "pp=2,schedule=1f1b,microbatch=1", FusedApart),
        (Llama, 4, "cpu:2", "pp=2,schedule=interleaved,virtual=2,microbatch=1", Apart),
        (Llama, 4, "cpu:2", "pp=2,schedule=zbv,virtual=2,microbatch=1,recompute=none", Plainly),
    ];
    check(&cases, &fp32());
}

#[test]
fn precisions() {
    let of = |precision| Options { precision: Some(precision), ..Options::default() };
    let sums = |dtype| Options { reduce_dtype: Some(dtype), ..of(Precision::Bf16) };
    check(&[(Llama, 4, "cpu:2", "dp=2,zero=1,microbatch=1,keep_casts=1", Apart)], &of(Precision::Bf16));
    check(&[(Llama, 4, "cpu:2", "dp=2,zero=2,microbatch=1,keep_casts=0", AsFused)], &sums(DType::Bf16));
    check(&[(Llama, 4, "cpu:2", "dp=2,zero=3,microbatch=1", Plainly)], &of(Precision::Fp16));
    check(&[(Llama, 4, "cpu:2", "dp=2,zero=1,microbatch=1", Apart)], &of(Precision::Fp8));
}

#[test]
fn other_models() {
    let cases = [
        (Zoo("resnet-tiny"), 4, "cpu:2", "dp=2,zero=1", Apart),
        (Zoo("mixer-tiny"), 4, "cpu:2", "dp=2,zero=3,microbatch=1", Apart),
        (Zoo("two-tower-tiny"), 4, "cpu:2", "dp=2,zero=1", Plainly),
    ];
    check(&cases, &fp32());
}
