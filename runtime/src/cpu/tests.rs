//! Programs written by hand on rank threads, and graphs without a plan.

use super::CpuRuntime;
use super::interpret::chain;
use crate::{Feeds, Runtime, RuntimeError, compute_op, evaluate_part, interpret};
use shardc_ir::ops::*;
use shardc_ir::plan::{Category, Space};
use shardc_ir::program::{Action, Buffer, Feed, Instruction, Program, Reading, Run, Section, Slot, Stream};
use shardc_ir::{BufferId, Bytes, DType, Graph, HostTensor, Op, OutputKind, ReduceKind, TensorType};
use std::collections::BTreeMap;

/// Builds a program with one buffer after the other.
struct Builder {
    program: Program,
    end: u64,
}

impl Builder {
    fn new(rank: u64, ranks: u64) -> Self {
        Self { program: Program { rank, ranks, groups: vec![(0..ranks).collect()], ..Program::default() }, end: 0 }
    }

    fn buffer(&mut self, shape: &[u64]) -> BufferId {
        self.buffer_of(TensorType::new(DType::F32, shape))
    }

    fn buffer_of(&mut self, ty: TensorType) -> BufferId {
        let offset = self.end;
        self.end += ty.bytes().0.next_multiple_of(256);
        let (space, category) = (Space::Device, Category::Activation);
        self.program.buffers.push(Buffer { ty, space, offset, category, value: None })
    }

    fn slot(&mut self, name: &str, shape: &[u64], init: Option<f64>) -> BufferId {
        let buffer = self.buffer(shape);
        let ty = TensorType::new(DType::F32, shape);
        let slice = shape.iter().map(|size| (0, *size)).collect();
        let (is_parameter, init) = (init.is_none(), init.unwrap_or(0.0));
        self.program.slots.push(Slot { name: name.to_string(), buffer, ty, slice, is_parameter, init, cast_of: None });
        buffer
    }

    /// Adds a section and its runs.
    fn section(&mut self, name: &str, runs: u64, instructions: Vec<Instruction>) {
        let section = self.program.sections.push(Section { name: name.to_string(), instructions });
        self.program.order.extend((0..runs).map(|microbatch| Run { section, microbatch }));
    }

    fn finish(mut self) -> Program {
        self.program.arenas = vec![(Space::Device, Bytes(self.end))];
        self.program
    }
}

fn instruction(action: Action, operands: &[BufferId], results: &[BufferId]) -> Instruction {
    let (operands, results) = (operands.to_vec(), results.to_vec());
    Instruction::new(action, operands, results, Stream::Compute)
}

fn compute(op: impl Into<Op>, operands: &[BufferId], results: &[BufferId]) -> Instruction {
    instruction(Action::Compute(op.into()), operands, results)
}

/// `loss = sum(x w)` over a batch of 8 that ranks and two microbatches divide, and an update of `w`
/// with the sum of `x` as its gradient.
fn training(rank: u64, ranks: u64) -> Program {
    let mut b = Builder::new(rank, ranks);
    let rows = 8 / ranks / 2;
    let (w, m, v) = (b.slot("w", &[3], None), b.slot("w.m", &[3], Some(0.0)), b.slot("w.v", &[3], Some(0.5)));
    let [x, y, term, loss, gradient_term, gradient, one] =
        [&[rows, 3][..], &[rows], &[], &[], &[3], &[3], &[]].map(|shape| b.buffer(shape));
    let slices = (0..2).map(|mb| vec![((mb * ranks + rank) * rows, rows), (0, 3)]).collect();
    let ty = TensorType::new(DType::F32, [8, 3]);
    b.program.inputs = vec![Feed { name: "x".to_string(), ty, slices }];
    b.program.readings = vec![Reading { name: "loss".to_string(), buffer: loss }];
    let sum = |dims: &[usize]| Reduce { kind: ReduceOp::Sum, dims: dims.to_vec() };
    b.section(
        "microbatch",
        2,
        vec![
            instruction(Action::Feed { input: 0 }, &[], &[x]),
            compute(Matmul::new("mk,k->m"), &[x, w], &[y]),
            compute(sum(&[0]), &[y], &[term]),
            compute(sum(&[0]), &[x], &[gradient_term]),
            instruction(Action::Accumulate, &[term, gradient_term], &[loss, gradient]),
        ],
    );
    let reduce = Action::AllReduce { reduce: ReduceKind::Sum, group: 0 };
    let update = Adamw { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0, cast: None };
    b.section(
        "epilogue",
        1,
        vec![
            instruction(reduce, &[loss, gradient], &[loss, gradient]),
            compute(Constant { value: 1.0 }, &[], &[one]),
            compute(update, &[w, gradient, m, v, one, one, one], &[w, m, v]),
        ],
    );
    b.finish()
}

fn batch(values: impl Fn(u64) -> f32) -> Feeds {
    let values: Vec<f32> = (0..24).map(values).collect();
    Feeds::from([("x".to_string(), HostTensor::from_f32([8, 3], &values).into())])
}

fn start(ranks: u64) -> CpuRuntime {
    let programs = (0..ranks).map(|rank| training(rank, ranks)).collect();
    let mut runtime = CpuRuntime::new(programs).unwrap_or_else(|error| panic!("{error}"));
    for rank in 0..ranks {
        let w = HostTensor::from_f32([3], &[1.0, 2.0, -1.0]);
        runtime.write_slot(rank, "w", &w).unwrap_or_else(|error| panic!("{error}"));
    }
    runtime
}

#[test]
fn ranks_and_microbatches_compute_what_one_device_computes() {
    let feeds = batch(|at| at as f32);
    let expect: f64 = (0..8).map(|row| f64::from(3 * row + 2 * (3 * row + 1) - (3 * row + 2))).sum();
    let mut states = Vec::new();
    for ranks in [1, 2, 4] {
        let mut runtime = start(ranks);
        let readings = runtime.step(&feeds).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(readings, BTreeMap::from([("loss".to_string(), expect)]));
        assert_eq!(runtime.peak_bytes(), training(0, ranks).arena(Space::Device));
        assert_eq!(runtime.first_non_finite().ok().flatten(), None);
        let mut of_rank = |rank, name| runtime.read_slot(rank, name).unwrap_or_else(|error| panic!("{error}"));
        states.push(["w", "w.m", "w.v"].map(|name| of_rank(ranks - 1, name)));
    }
    assert_eq!(states[0], states[1]);
    assert_eq!(states[0], states[2]);
    let v = 0.99 * 0.5 + 0.01 * (84.0f32 * 84.0);
    let made: Vec<f32> = states[0][2].bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
    assert!((made[0] - v).abs() < 1e-4, "{made:?}");
}

#[test]
fn the_first_tensor_that_is_not_finite_is_named() {
    let mut runtime = start(2);
    let readings = runtime.step(&batch(|at| if at == 13 { f32::NAN } else { 1.0 })).unwrap_or_default();
    assert!(readings["loss"].is_nan());
    let text = runtime.first_non_finite().ok().flatten().unwrap_or_default();
    assert!(text.contains("section `microbatch`, instruction 1") && text.contains("already was"), "{text}");
}

#[test]
fn bad_calls_are_errors() {
    let mut runtime = start(2);
    let wrong = HostTensor::from_f32([2], &[0.0; 2]);
    assert!(matches!(runtime.write_slot(0, "w", &wrong), Err(RuntimeError::WrongType { .. })));
    assert!(matches!(runtime.read_slot(2, "w"), Err(RuntimeError::Unknown { what: "rank", .. })));
    assert!(matches!(runtime.read_slot(0, "u"), Err(RuntimeError::Unknown { what: "slot", .. })));
    assert!(matches!(runtime.step(&BTreeMap::new()), Err(RuntimeError::Missing { .. })));
    let feeds = Feeds::from([("x".to_string(), wrong.into())]);
    assert!(matches!(runtime.step(&feeds), Err(RuntimeError::WrongType { .. })));
}

#[test]
fn malformed_programs_are_refused() {
    let check = |spoil: fn(&mut Program), expect: &str| {
        let mut program = training(0, 1);
        spoil(&mut program);
        let text = CpuRuntime::new(vec![program]).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(text.contains(expect), "{text}");
    };
    check(|program| program.arenas[0].1 = Bytes(256), "arena of 256");
    check(|program| program.groups[0] = vec![1], "has a group [1]");
    check(|program| program.slots[0].slice[0].1 = 1 << 20, "`w` is f32[1048576]");
    check(|program| program.ranks = 2, "program 0 of 1");
}

/// An error on one rank ends the others, which wait for it, and is the one reported.
#[test]
fn an_error_on_one_rank_ends_all() {
    let program = |rank: u64| {
        let mut b = Builder::new(rank, 3);
        let x = b.buffer(&[2]);
        let ty = TensorType::scalar(DType::I64);
        let mut integer = || {
            let offset = b.end;
            b.end += 256;
            let (ty, space, category) = (ty.clone(), Space::Device, Category::Activation);
            b.program.buffers.push(Buffer { ty, space, offset, category, value: None })
        };
        let [zero, quotient] = [integer(), integer()];
        let reduce = Action::AllReduce { reduce: ReduceKind::Sum, group: 0 };
        let mut instructions = vec![
            compute(Constant { value: 0.0 }, &[], &[zero]),
            instruction(reduce.clone(), &[x], &[x]),
            instruction(reduce, &[x], &[x]),
        ];
        if rank == 1 {
            instructions.insert(2, compute(Binary { kind: BinaryKind::Div }, &[zero, zero], &[quotient]));
        }
        b.section("epilogue", 1, instructions);
        b.finish()
    };
    let mut runtime = CpuRuntime::new((0..3).map(program).collect()).unwrap_or_else(|error| panic!("{error}"));
    let text = runtime.step(&BTreeMap::new()).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(text.starts_with("rank 1, section `epilogue`, instruction 2"), "{text}");
    assert!(text.contains("division by zero"), "{text}");
}

/// Ranks that disagree about the order of collectives do not hang.
#[test]
fn collectives_that_do_not_match_are_an_error() {
    let program = |rank: u64| {
        let mut b = Builder::new(rank, 2);
        let (x, y) = (b.buffer(&[2]), b.buffer(&[4]));
        let gather = instruction(Action::AllGather { group: 0 }, &[x], &[y]);
        let reduce = Action::AllReduce { reduce: ReduceKind::Sum, group: 0 };
        let instructions = match rank {
            0 => vec![gather],
            _ => vec![instruction(reduce, &[x], &[x])],
        };
        b.section("prologue", 1, instructions);
        b.finish()
    };
    let mut runtime = CpuRuntime::new((0..2).map(program).collect()).unwrap_or_else(|error| panic!("{error}"));
    let text = runtime.step(&BTreeMap::new()).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(text.contains("AllGather") && text.contains("AllReduce"), "{text}");
}

#[test]
fn messages_are_received_in_the_order_sent() {
    let program = |rank: u64| {
        let mut b = Builder::new(rank, 2);
        let (x, y) = (b.slot("x", &[2], None), b.slot("y", &[2], None));
        let peer = 1 - rank;
        b.section(
            "prologue",
            1,
            vec![
                instruction(Action::Send { peer }, &[x], &[]),
                instruction(Action::Receive { peer }, &[], &[y]),
                instruction(Action::Copy, &[y], &[x]),
            ],
        );
        b.finish()
    };
    let mut runtime = CpuRuntime::new((0..2).map(program).collect()).unwrap_or_else(|error| panic!("{error}"));
    let values = |rank: u64| HostTensor::from_f32([2], &[rank as f32, 10.0]);
    for rank in 0..2 {
        assert!(runtime.write_slot(rank, "x", &values(rank)).is_ok());
    }
    assert!(runtime.step(&BTreeMap::new()).is_ok());
    assert_eq!(runtime.read_slot(0, "x").ok(), Some(values(1)));
    assert_eq!(runtime.read_slot(1, "x").ok(), Some(values(0)));
}

/// Initialisers as a trace makes them; every part equals the part of the whole.
#[test]
fn parts_of_initialisers_do_not_depend_on_the_cut() {
    fn add(g: &mut Graph, op: impl Into<Op>, operands: &[shardc_ir::ValueId], ty: &[u64]) -> shardc_ir::ValueId {
        let node = g.add(op, operands, &[TensorType::new(DType::F32, ty)]).unwrap_or_else(|error| panic!("{error}"));
        g.result(node)
    }
    let mut g = Graph::new("init");
    let distribution = Distribution::Normal { mean: 0.0, std: 1.0 };
    let random = |stream| Random { distribution, stream, seed: 0, global: vec![], start: vec![] };
    let x = add(&mut g, random(1), &[], &[6, 8]);
    let scaled = add(&mut g, Affine { scale: 0.5, offset: 1.0 }, &[x], &[6, 8]);
    let turned = add(&mut g, Transpose { permutation: vec![1, 0] }, &[scaled], &[8, 6]);
    let y = add(&mut g, random(2), &[], &[48]);
    let shaped = add(&mut g, Reshape {}, &[y], &[8, 6]);
    let sum = add(&mut g, Binary { kind: BinaryKind::Add }, &[turned, shaped], &[8, 6]);
    let joined = add(&mut g, Concat { dim: 0 }, &[sum, turned], &[16, 6]);
    g.output("w", sum, OutputKind::Result);
    g.output("u", joined, OutputKind::Result);
    g.output("line", scaled, OutputKind::Result);
    let cuts: [[(u64, u64); 2]; 4] = [[(0, 4), (0, 6)], [(4, 4), (3, 3)], [(2, 2), (0, 6)], [(0, 8), (4, 2)]];
    for name in ["w", "u"] {
        let size = if name == "w" { 8 } else { 16 };
        let whole = evaluate_part(&g, name, &[(0, size), (0, 6)], 5).unwrap_or_else(|error| panic!("{error}"));
        for cut in cuts {
            let part = evaluate_part(&g, name, &cut, 5).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(part, whole.part(&cut), "{name} {cut:?}");
        }
    }
    let other = evaluate_part(&g, "w", &cuts[0], 6).ok();
    assert_ne!(other, evaluate_part(&g, "w", &cuts[0], 5).ok());
    assert!(matches!(evaluate_part(&g, "v", &cuts[0], 5), Err(RuntimeError::Unknown { .. })));
    assert!(evaluate_part(&g, "w", &[(7, 4), (0, 6)], 5).is_err());
    // What is a chain makes the same part step by step.
    for cut in [[(0, 6), (0, 8)], [(2, 3), (4, 4)]] {
        let steps = chain(&g, "line", &cut, 5).unwrap_or_default();
        assert_eq!(steps.iter().map(|(op, _)| op.name()).collect::<Vec<_>>(), ["random", "affine"]);
        let made = steps.iter().fold(None, |before: Option<HostTensor>, (op, ty)| {
            compute_op(op, before.as_slice(), std::slice::from_ref(ty)).ok()?.pop()
        });
        assert_eq!(made, evaluate_part(&g, "line", &cut, 5).ok(), "{cut:?}");
    }
    for name in ["w", "u", "v"] {
        assert!(chain(&g, name, &cuts[0], 5).is_none(), "{name}");
    }
}

#[test]
fn a_graph_is_interpreted() {
    let mut g = Graph::new("step");
    let ty = TensorType::new(DType::F32, [2]);
    let mut leaf = |op: Op| {
        let node = g.add(op, &[], std::slice::from_ref(&ty)).unwrap_or_else(|error| panic!("{error}"));
        g.result(node)
    };
    let x = leaf(Input { name: "x".to_string() }.into());
    let w = leaf(Parameter { name: "w".to_string(), frozen: false }.into());
    let m = leaf(State { name: "w.m".to_string(), init: 2.0, cast_of: None }.into());
    let mut binary = |kind, a, b| {
        let node = g.add(Binary { kind }, &[a, b], &[]).unwrap_or_else(|error| panic!("{error}"));
        g.result(node)
    };
    let product = binary(BinaryKind::Mul, x, w);
    let sum = binary(BinaryKind::Add, product, m);
    g.output("y", sum, OutputKind::Result);
    g.output("w.m", product, OutputKind::Update(m));
    let tensor = |values: &[f32]| HostTensor::from_f32([2], values);
    let mut leaves = BTreeMap::from([("x".to_string(), tensor(&[3.0, 4.0])), ("w".to_string(), tensor(&[5.0, -1.0]))]);
    let made = interpret(&g, &leaves).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(made["y"], tensor(&[17.0, -2.0]));
    assert_eq!(made["w.m"], tensor(&[15.0, -4.0]));
    leaves.remove("x");
    assert!(matches!(interpret(&g, &leaves), Err(RuntimeError::Missing { name }) if name == "x"));
}

/// Counts are added over microbatches as integers: no f32 is as exact.
#[test]
fn integers_add_up_over_microbatches() {
    for dtype in [DType::I64, DType::I32] {
        let mut b = Builder::new(0, 1);
        let ty = TensorType::new(dtype, [2]);
        let [term, sum] = [0; 2].map(|_| b.buffer_of(ty.clone()));
        let odd = (1u64 << 24) + 1;
        b.section(
            "microbatch",
            3,
            vec![
                compute(Literal { values: vec![odd as f64, -1.0] }, &[], &[term]),
                instruction(Action::Accumulate, &[term], &[sum]),
            ],
        );
        b.program.readings = vec![Reading { name: "count".to_string(), buffer: sum }];
        let mut runtime = CpuRuntime::new(vec![b.finish()]).unwrap_or_else(|error| panic!("{error}"));
        let readings = runtime.step(&Feeds::default()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(readings["count"], (3 * odd) as f64, "{dtype}");
    }
}
