//! Runs every CUDA kernel on GPU 0, compares it with the CPU backend's, and measures the heavy ones.
//!
//! `cargo run --release -p shardc-runtime --example cuda_selftest [correct|speed|memory|whole] [FILTER]`
//! prints one line a case (`memory` measures the kernels that memory bounds, against what it can move), then what
//! concerns whole steps (`whole` for that alone), and last a table; exits with 1 if something is wrong.
//! `cuda_selftest sources [FILTER]` prints the kernels as CUDA C++, which takes no GPU. `cuda_selftest ranks N` runs
//! every other kind of instruction (collectives, messages, feeds, accumulation) on N GPUs.

#![allow(clippy::cloned_ref_to_slice_refs)]

mod cases;
mod memory;
mod regions;
mod whole;

use DType::{Bf16, F32};
use cases::{cases, heavy_cases, t};
use shardc_ir::ops::*;
use shardc_ir::plan::{Category, Space};
use shardc_ir::program::{Action, Buffer, Instruction, Run, Section, Slot, Stream};
use shardc_ir::{BufferId, Bytes, DType, HostTensor, Op, Program, Target, TensorType};
use shardc_runtime::launch::World;
use shardc_runtime::{CudaRuntime, CudaTarget, Runtime, compute_op};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// All ranks are of this process.
fn alone() -> Arc<World> {
    Arc::new(World::alone())
}

/// An operation on local types.
#[derive(Clone)]
struct Case {
    op: Op,
    operands: Vec<TensorType>,
    results: Vec<TensorType>,
}

impl Case {
    fn text(&self) -> String {
        let list = |types: &[TensorType]| types.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let spec = match &self.op {
            Op::Matmul(op) => op.spec.clone(),
            Op::ScaledMatmul(op) => op.spec.clone(),
            Op::Fused(op) => op.steps_text(),
            Op::Attention(Attention { causal: true, lead, .. })
            | Op::AttentionGrad(AttentionGrad { causal: true, lead, .. }) => {
                lead.map_or("causal".to_string(), |lead| format!("causal+{lead}"))
            }
            _ => String::new(),
        };
        format!("{} {spec} {} -> {}", self.op.name(), list(&self.operands), list(&self.results))
    }
}

fn main() {
    // What the backend says, above all which attention is not fused.
    tracing_subscriber::fmt().with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG).init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mode = arguments.first().map_or("all", String::as_str);
    let filter = arguments.get(1).cloned().unwrap_or_default();
    let chosen = |cases: Vec<Case>| cases.into_iter().filter(|case| case.text().contains(&filter)).collect::<Vec<_>>();
    let mut table: Vec<(&str, Result<(), String>)> = Vec::new();
    if mode == "ranks" {
        let ranks = filter.parse().unwrap_or(2).max(2);
        table.push(("collectives", collectives(ranks)));
        table.push(("accumulation", accumulation(ranks)));
    }
    if mode == "sources" {
        let all = cases().into_iter().chain(memory::memory_cases()).collect();
        return chosen(all).iter().for_each(sources);
    }
    if matches!(mode, "all" | "correct") {
        let failures = correct(&chosen(cases()));
        let outcome = if failures == 0 { Ok(()) } else { Err(format!("{failures} cases failed")) };
        table.push(("kernels like the CPU's", outcome));
    }
    if matches!(mode, "all" | "speed") {
        for case in chosen(heavy_cases()) {
            speed(&case);
        }
    }
    if matches!(mode, "all" | "memory") {
        for case in chosen(memory::memory_cases()) {
            memory::memory(&case);
        }
    }
    if matches!(mode, "all" | "correct" | "whole") {
        table.push(("microbatches accumulated", accumulation(1)));
        table.push(("steps recorded as a graph", whole::recorded()));
        table.push(("the first NaN is named", whole::inspected()));
        table.push(("equal bits when repeated", whole::repeated()));
        table.push(("initial values in place", whole::made()));
        table.push(("2^32 elements and more", whole::large()));
    }
    for (what, outcome) in &table {
        println!("{what:<28} {}", outcome.as_ref().map_or_else(String::as_str, |()| "ok"));
    }
    std::process::exit(i32::from(table.iter().any(|(_, outcome)| outcome.is_err())));
}

/// Prints the case's kernels as CUDA C++; takes no GPU.
fn sources(case: &Case) {
    use shardc_runtime::cuda::select::{Step, select};
    fn text(kernel: &shardc_runtime::cuda::kernel::Kernel) {
        match kernel.source() {
            Ok(source) => println!("// {} bytes of shared memory\n{}", source.shared_bytes, source.text),
            Err(error) => println!("// {error}"),
        }
    }
    fn print(step: &Step) {
        match step {
            Step::Launch(launch) => text(&launch.kernel),
            Step::Table(table) => text(&table.kernel),
            Step::Fused(fused) => {
                fused.steps.iter().for_each(print);
                println!("// or");
                fused.otherwise.iter().for_each(print);
            }
            other => println!("// {other:?}"),
        }
    }
    println!("// {}", case.text());
    match select(&case.op, &case.operands, &case.results) {
        Ok(selection) => selection.steps.iter().for_each(print),
        Err(error) => println!("// {error}"),
    }
}

/// Adds a buffer at the end of the arena.
fn add_buffer(program: &mut Program, ty: &TensorType) -> BufferId {
    let offset = program.arena(Space::Device).0;
    program.arenas = vec![(Space::Device, Bytes(offset + ty.bytes().0.next_multiple_of(256)))];
    program.buffers.push(Buffer {
        ty: ty.clone(),
        space: Space::Device,
        offset,
        category: Category::Buffer,
        value: None,
    })
}

/// Adds a buffer that is a slot.
fn add_slot(program: &mut Program, name: &str, ty: &TensorType) -> BufferId {
    let buffer = add_buffer(program, ty);
    let slice = ty.shape.iter().map(|size| (0, *size)).collect();
    program.slots.push(Slot {
        name: name.to_string(),
        buffer,
        ty: ty.clone(),
        slice,
        is_parameter: true,
        init: 0.0,
        cast_of: None,
    });
    buffer
}

/// Gives an instruction the scratch memory that its kernels want.
fn add_scratch(program: &mut Program, instruction: Instruction) -> Instruction {
    let types = |ids: &[BufferId]| ids.iter().map(|id| program.buffers[*id].ty.clone()).collect::<Vec<_>>();
    let (operands, results) = (types(&instruction.operands), types(&instruction.results));
    match CudaTarget.scratch(&instruction.action, &operands, &results).0 {
        0 => instruction,
        bytes => Instruction { scratch: Some(add_buffer(program, &t(DType::U8, &[bytes]))), ..instruction },
    }
}

fn message(error: impl ToString) -> String {
    error.to_string()
}

/// Every collective on a bucket of an f32 and a bf16 buffer, checked element by element.
fn collectives(ranks: u64) -> Result<(), String> {
    let n = 16 * ranks;
    let group: Vec<u64> = (0..ranks).collect();
    use shardc_ir::sharding::ReduceKind::{Max, Sum};
    let kinds: Vec<(&str, Action, u64)> = vec![
        ("sum", Action::AllReduce { reduce: Sum, group: 0 }, n),
        ("max", Action::AllReduce { reduce: Max, group: 0 }, n),
        ("gather", Action::AllGather { group: 0 }, n * ranks),
        ("scatter", Action::ReduceScatter { reduce: Sum, group: 0 }, n / ranks),
        ("exchange", Action::AllToAll { group: 0 }, n),
    ];
    let make = |rank: u64| {
        let mut program = Program { rank, ranks, groups: vec![group.clone()], ..Program::default() };
        let mut section = Section { name: "collectives".to_string(), ..Section::default() };
        let inputs = [("f32", F32), ("bf16", Bf16)].map(|(name, dtype)| add_slot(&mut program, name, &t(dtype, &[n])));
        for (name, action, size) in &kinds {
            let outputs = [("f32", F32), ("bf16", Bf16)]
                .map(|(kind, dtype)| add_slot(&mut program, &format!("{name}.{kind}"), &t(dtype, &[*size])));
            let (operands, results) = (inputs.to_vec(), outputs.to_vec());
            let (stream, action) = (Stream::Communication, action.clone());
            section.instructions.push(Instruction::new(action, operands, results, stream));
        }
        // A ring of messages in pairs: even ranks send first.
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let received = add_slot(&mut program, "received", &t(F32, &[n]));
        let send = (Action::Send { peer: next }, vec![inputs[0]], vec![]);
        let receive = (Action::Receive { peer: previous }, vec![], vec![received]);
        let pair = if rank.is_multiple_of(2) { [send, receive] } else { [receive, send] };
        for (action, operands, results) in pair {
            let stream = Stream::Communication;
            section.instructions.push(Instruction::new(action, operands, results, stream));
        }
        let doubled = add_slot(&mut program, "doubled", &t(F32, &[n]));
        let sum = section.instructions[0].results[0];
        let action = Action::Compute(Affine { scale: 2.0, offset: 0.0 }.into());
        let (stream, after) = (Stream::Compute, vec![0]);
        let (operands, results) = (vec![sum], vec![doubled]);
        section.instructions.push(Instruction { after, ..Instruction::new(action, operands, results, stream) });
        let section = program.sections.push(section);
        program.order = vec![Run { section, microbatch: 0 }];
        program
    };
    let devices: Vec<usize> = (0..ranks as usize).collect();
    let mut runtime = CudaRuntime::new((0..ranks).map(make).collect(), &devices, alone()).map_err(message)?;
    // Small whole numbers, which bf16 sums exactly.
    let value = |rank: u64, at: u64| ((rank + 1) * (at % 7)) as f32;
    for rank in 0..ranks {
        let values: Vec<f32> = (0..n).map(|at| value(rank, at)).collect();
        let whole = HostTensor::from_f32([n], &values);
        runtime.write_slot(rank, "f32", &whole).map_err(message)?;
        let bytes = values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect();
        runtime.write_slot(rank, "bf16", &HostTensor { ty: t(Bf16, &[n]), bytes }).map_err(message)?;
    }
    runtime.step(&BTreeMap::new()).map_err(message)?;
    let part = n / ranks;
    let sum = |at: u64| (0..ranks).map(|rank| value(rank, at)).sum::<f32>();
    for rank in 0..ranks {
        let expected = |name: &str, at: u64| match name {
            "sum" => sum(at),
            "max" => value(ranks - 1, at),
            "gather" => value(at / n, at % n),
            "scatter" => sum(rank * part + at),
            _ => value(at / part, rank * part + at % part),
        };
        for (name, _, size) in &kinds {
            for kind in ["f32", "bf16"] {
                let actual = numbers(&runtime.read_slot(rank, &format!("{name}.{kind}")).map_err(message)?);
                let wrong = (0..*size).find(|at| actual[*at as usize] as f32 != expected(name, *at));
                if let Some(at) = wrong {
                    let (actual, expected) = (actual[at as usize], expected(name, at));
                    return Err(format!("rank {rank}, {name}.{kind}[{at}] is {actual}, not {expected}"));
                }
            }
        }
        let received = numbers(&runtime.read_slot(rank, "received").map_err(message)?);
        let doubled = numbers(&runtime.read_slot(rank, "doubled").map_err(message)?);
        let from = (rank + ranks - 1) % ranks;
        if (0..n).any(|at| received[at as usize] as f32 != value(from, at)) {
            return Err(format!("rank {rank} received something else"));
        }
        if (0..n).any(|at| doubled[at as usize] as f32 != 2.0 * sum(at)) {
            return Err(format!("rank {rank} did not wait for the sum"));
        }
    }
    Ok(())
}

/// Two microbatches of a fed tensor, accumulated, reduced over the ranks, summed and read, some times.
fn accumulation(ranks: u64) -> Result<(), String> {
    use shardc_ir::program::{Feed, Reading};
    use shardc_ir::sharding::ReduceKind::Sum;
    let (rows, columns) = (2 * ranks, 8);
    let make = |rank: u64| {
        let mut program = Program { rank, ranks, groups: vec![(0..ranks).collect()], ..Program::default() };
        let slices = (0..2).map(|microbatch| vec![(2 * rank + microbatch, 1), (0, columns)]).collect();
        program.inputs.push(Feed { name: "x".to_string(), ty: t(F32, &[rows, columns]), slices });
        let row = t(F32, &[1, columns]);
        let [fed, total, all] = ["fed", "total", "all"].map(|name| add_slot(&mut program, name, &row));
        let loss = add_slot(&mut program, "loss", &t(F32, &[]));
        let one = |action, operands: &[_], results: &[_], stream, after: &[usize]| {
            let (operands, results, after) = (operands.to_vec(), results.to_vec(), after.to_vec());
            Instruction { after, ..Instruction::new(action, operands, results, stream) }
        };
        let microbatch = vec![
            one(Action::Feed { input: 0 }, &[], &[fed], Stream::HostToDevice, &[]),
            one(Action::Accumulate, &[fed], &[total], Stream::Compute, &[0]),
        ];
        let sum = Action::Compute(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }.into());
        let epilogue = vec![
            one(Action::AllReduce { reduce: Sum, group: 0 }, &[total], &[all], Stream::Communication, &[]),
            add_scratch(&mut program, one(sum, &[all], &[loss], Stream::Compute, &[0])),
        ];
        let [microbatch, epilogue] = [("microbatch", microbatch), ("epilogue", epilogue)]
            .map(|(name, instructions)| program.sections.push(Section { name: name.to_string(), instructions }));
        let runs = [(microbatch, 0), (microbatch, 1), (epilogue, 0)];
        program.order = runs.map(|(section, microbatch)| Run { section, microbatch }).to_vec();
        program.readings.push(Reading { name: "loss".to_string(), buffer: loss });
        program
    };
    let devices: Vec<usize> = (0..ranks as usize).collect();
    let mut runtime = CudaRuntime::new((0..ranks).map(make).collect(), &devices, alone()).map_err(message)?;
    // As it is, recorded, and launched again.
    for step in 1..=4 {
        let values: Vec<f32> = (0..rows * columns).map(|at| (at * step) as f32).collect();
        let feeds = BTreeMap::from([("x".to_string(), HostTensor::from_f32([rows, columns], &values).into())]);
        let (actual, expected) =
            (runtime.step(&feeds).map_err(message)?["loss"], f64::from(values.iter().sum::<f32>()));
        if actual != expected {
            return Err(format!("step {step}: {actual}, not {expected}"));
        }
    }
    Ok(())
}

/// A program that runs every case once per run of its section, all tensors being slots.
fn program(cases: &[Case], runs: usize) -> Program {
    let mut program = Program { ranks: 1, ..Program::default() };
    let mut section = Section { name: "selftest".to_string(), ..Section::default() };
    for (index, case) in cases.iter().enumerate() {
        let mut place = |kind: &str, types: &[TensorType]| {
            let name = |(number, ty)| (format!("{index}.{kind}{number}"), ty);
            types.iter().enumerate().map(name).map(|(name, ty)| add_slot(&mut program, &name, ty)).collect::<Vec<_>>()
        };
        let (operands, results) = (place("in", &case.operands), place("out", &case.results));
        let action = Action::Compute(case.op.clone());
        let instruction = Instruction::new(action, operands, results, Stream::Compute);
        section.instructions.push(add_scratch(&mut program, instruction));
    }
    let section = program.sections.push(section);
    program.order = vec![Run { section, microbatch: 0 }; runs];
    program
}

/// Numbers that look random, the same in every run: around 0 for floats.
fn tensor(ty: &TensorType, seed: u64, limit: i64) -> HostTensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1 << 24)
    };
    let mut bytes = Vec::with_capacity(ty.bytes().0 as usize);
    for _ in 0..ty.elements() {
        let unit = next();
        match ty.dtype {
            DType::F32 => bytes.extend(((unit * 2.0 - 1.0) as f32).to_le_bytes()),
            DType::Bf16 => bytes.extend(half::bf16::from_f64(unit * 2.0 - 1.0).to_le_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f64(unit * 2.0 - 1.0).to_le_bytes()),
            DType::I64 => bytes.extend(((unit * limit as f64) as i64).to_le_bytes()),
            DType::I32 => bytes.extend(((unit * limit as f64) as i32).to_le_bytes()),
            // Codes of numbers that are finite and not negative.
            DType::F8e4m3 | DType::F8e5m2 => bytes.push((unit * 120.0) as u8),
            _ => bytes.push(u8::from(unit > 0.5)),
        }
    }
    HostTensor { ty: ty.clone(), bytes }
}

/// Operands of a case; those that another operation makes, or that must be positive, are that.
fn inputs(case: &Case) -> Vec<HostTensor> {
    let limit = match &case.op {
        Op::CrossEntropy(_) | Op::CrossEntropyGrad(_) => case.operands[0].shape.last().copied().unwrap_or(1),
        Op::Embedding(_) => case.operands[0].shape[0],
        Op::EmbeddingGrad(_) => case.results[0].shape[0],
        Op::Gather(op) => case.operands[0].shape[op.dim],
        Op::ScatterAdd(op) => case.results[0].shape[op.dim],
        _ => 100,
    };
    let make = |(index, ty): (usize, &TensorType)| tensor(ty, index as u64 + 1, limit as i64);
    let mut all: Vec<HostTensor> = case.operands.iter().enumerate().map(make).collect();
    let positive = |tensor: &HostTensor| map(tensor, |value| value.abs() + 0.1);
    let from =
        |op: Op, operands: &[HostTensor], types: &[TensorType]| compute_op(&op, operands, types).unwrap_or_default();
    match &case.op {
        Op::Unary(op)
            if matches!(
                op.kind,
                UnaryKind::Log | UnaryKind::Log1p | UnaryKind::Sqrt | UnaryKind::Rsqrt | UnaryKind::Recip
            ) =>
        {
            all[0] = positive(&all[0]);
        }
        Op::UnaryGrad(op)
            if matches!(
                op.kind,
                UnaryKind::Log | UnaryKind::Log1p | UnaryKind::Sqrt | UnaryKind::Rsqrt | UnaryKind::Recip
            ) =>
        {
            all[1] = positive(&all[1]);
        }
        Op::Binary(op) if matches!(op.kind, BinaryKind::Div | BinaryKind::Rem | BinaryKind::Pow) => {
            all = all.iter().map(&positive).collect();
            // Quotients beyond the integers that floats hold.
            if op.kind == BinaryKind::Rem && all[0].ty.dtype == DType::F32 {
                all[0] = map(&all[0], |value| value * 1e9);
            }
        }
        Op::CrossEntropyGrad(op) => {
            let made = from(CrossEntropy { start: op.start, classes: op.classes }.into(), &all[..2], &[]);
            all[2] = made[0].clone();
        }
        Op::RmsNormGrad(_) => all[3] = from(RmsNorm { eps: 1e-5 }.into(), &all[1..3], &[])[1].clone(),
        Op::LayerNormGrad(_) => {
            let operands = [all[1].clone(), all[2].clone(), all[2].clone()];
            let made = from(LayerNorm { eps: 1e-5 }.into(), &operands, &[]);
            (all[3], all[4]) = (made[1].clone(), made[2].clone());
        }
        Op::AttentionGrad(op) => {
            let read = [&all[1..4], all.get(6..).unwrap_or_default()].concat();
            let made =
                from(Attention { causal: op.causal, scale: op.scale, lead: None, reversed: None }.into(), &read, &[]);
            (all[4], all[5]) = (made[0].clone(), made[1].clone());
        }
        Op::Adamw(_) => prepare_update(&mut all),
        Op::Quantize(_) => {
            let (to, lead) = (case.results[0].dtype, case.operands[1].rank());
            all[1] = from(QuantizationScale { to, lead }.into(), &all[..1], &case.operands[1..])[0].clone();
        }
        Op::ScaledMatmul(_) => {
            for index in 0..2 {
                let (to, lead) = (case.operands[index].dtype, case.operands[index + 2].rank());
                let x = tensor(&case.operands[index].with_dtype(DType::F32), index as u64 + 1, 1);
                let scale = from(QuantizationScale { to, lead }.into(), &[x.clone()], &case.operands[index + 2..][..1]);
                let mut exchanged = case.operands[index].clone();
                let rank = exchanged.rank();
                exchanged.shape.swap(rank - 2, rank - 1);
                let types = [case.operands[index].clone(), exchanged];
                all[index] = from(Quantize {}.into(), &[x, scale[0].clone()], &types)[0].clone();
                all[index + 2] = scale[0].clone();
            }
        }
        Op::Each(each) if matches!(*each.op, Op::Adamw(_)) => all.chunks_mut(7).for_each(prepare_update),
        _ => {}
    }
    all
}

/// Operands of an update as they occur: a second moment that is no less than 0, and its numbers.
fn prepare_update(operands: &mut [HostTensor]) {
    operands[3] = map(&operands[3], |value| value.abs() + 0.1);
    let numbers = [0.5, 0.01, 3.0].map(|value| HostTensor::from_f32([], &[value]));
    operands[4..7].clone_from_slice(&numbers);
}

fn numbers(tensor: &HostTensor) -> Vec<f64> {
    let size = tensor.ty.dtype.size() as usize;
    let number = |bytes: &[u8]| match (tensor.ty.dtype, bytes) {
        (DType::F32, [a, b, c, d]) => f64::from(f32::from_le_bytes([*a, *b, *c, *d])),
        (DType::I32, [a, b, c, d]) => f64::from(i32::from_le_bytes([*a, *b, *c, *d])),
        (DType::Bf16, [a, b]) => f64::from(half::bf16::from_le_bytes([*a, *b])),
        (DType::F16, [a, b]) => f64::from(half::f16::from_le_bytes([*a, *b])),
        (DType::I64, bytes) => bytes.try_into().map_or(f64::NAN, |bytes| i64::from_le_bytes(bytes) as f64),
        (_, bytes) => f64::from(bytes[0]),
    };
    tensor.bytes.chunks_exact(size).map(number).collect()
}

fn map(tensor: &HostTensor, f: impl Fn(f64) -> f64) -> HostTensor {
    let values = numbers(tensor);
    let bytes = values.iter().flat_map(|value| match tensor.ty.dtype {
        DType::Bf16 => half::bf16::from_f64(f(*value)).to_le_bytes().to_vec(),
        _ => (f(*value) as f32).to_le_bytes().to_vec(),
    });
    HostTensor { ty: tensor.ty.clone(), bytes: bytes.collect() }
}

/// The largest difference, relative to the largest number expected.
fn difference(actual: &HostTensor, expected: &HostTensor) -> f64 {
    let (actual, expected) = (numbers(actual), numbers(expected));
    let largest = expected.iter().fold(1e-6, |most: f64, value| most.max(value.abs()));
    let gap = |(a, b): (&f64, &f64)| if a.is_nan() != b.is_nan() { f64::INFINITY } else { (a - b).abs() };
    actual.iter().zip(&expected).map(gap).fold(0.0, f64::max) / largest
}

/// Runs cases in one program; per case the largest difference.
fn differences(cases: &[Case], all: &[Vec<HostTensor>]) -> Result<Vec<f64>, String> {
    let mut runtime = CudaRuntime::new(vec![program(cases, 1)], &[0], alone()).map_err(|error| error.to_string())?;
    for (index, operands) in all.iter().enumerate() {
        for (number, operand) in operands.iter().enumerate() {
            runtime.write_slot(0, &format!("{index}.in{number}"), operand).map_err(|error| error.to_string())?;
        }
    }
    runtime.step(&BTreeMap::new()).map_err(|error| error.to_string())?;
    let mut out = Vec::new();
    for (index, (case, operands)) in cases.iter().zip(all).enumerate() {
        let expected = compute_op(&case.op, operands, &case.results).map_err(|error| format!("reference: {error}"))?;
        let mut worst: f64 = 0.0;
        for (number, expected) in expected.iter().enumerate() {
            let actual = runtime.read_slot(0, &format!("{index}.out{number}")).map_err(|error| error.to_string())?;
            worst = worst.max(difference(&actual, expected));
        }
        out.push(worst);
    }
    Ok(out)
}

fn correct(cases: &[Case]) -> usize {
    let start = Instant::now();
    let all: Vec<Vec<HostTensor>> = cases.iter().map(inputs).collect();
    println!("inputs ready after {:.1} s", start.elapsed().as_secs_f64());
    let results: Vec<Result<f64, String>> = match differences(cases, &all) {
        Ok(found) => found.into_iter().map(Ok).collect(),
        Err(error) => {
            println!("together: {error}; one by one now");
            let alone = |index: usize| differences(&cases[index..=index], &all[index..=index]).map(|found| found[0]);
            (0..cases.len()).map(alone).collect()
        }
    };
    println!("{} cases in {:.1} s", cases.len(), start.elapsed().as_secs_f64());
    let mut failures = 0;
    for (case, result) in cases.iter().zip(results) {
        let half = case.operands.iter().chain(&case.results).any(|ty| ty.dtype.size() == 2);
        let bound = match &case.op {
            Op::QuantizationScale(_) | Op::Quantize(_) => 0.0,
            // The library may keep sums of 8-bit products in fewer bits.
            Op::ScaledMatmul(_) => 1e-2,
            _ if half => 1e-2,
            _ => 1e-5,
        };
        let verdict = match &result {
            Ok(gap) if *gap <= bound => format!("ok    {gap:.1e}"),
            Ok(gap) => format!("WRONG {gap:.1e}"),
            Err(error) => format!("ERROR {}", error.chars().take(400).collect::<String>()),
        };
        failures += usize::from(!verdict.starts_with("ok"));
        println!("{verdict}  {}", case.text());
    }
    failures
}

fn speed(case: &Case) {
    let measure = |runs: usize| {
        let mut runtime = CudaRuntime::new(vec![program(std::slice::from_ref(case), runs)], &[0], alone())
            .map_err(|error| error.to_string())?;
        for (number, ty) in case.operands.iter().enumerate().filter(|(_, ty)| ty.elements() < 1 << 26) {
            let operand = tensor(ty, number as u64 + 1, 1000);
            runtime.write_slot(0, &format!("0.in{number}"), &operand).map_err(|error| error.to_string())?;
        }
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            runtime.step(&BTreeMap::new()).map_err(|error| error.to_string())?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok::<f64, String>(best)
    };
    match measure(2).and_then(|few| Ok((measure(22)? - few) / 20.0)) {
        Ok(seconds) => {
            let (bytes, flops) =
                (case.op.bytes(&case.operands, &case.results).0, case.op.flops(&case.operands, &case.results).0);
            println!(
                "{:9.1} us  {:7.0} GB/s  {:6.1} TFLOP/s  {}",
                seconds * 1e6,
                bytes as f64 / seconds / 1e9,
                flops / seconds / 1e12,
                case.text()
            );
        }
        Err(error) => println!("ERROR {}  {}", error.chars().take(300).collect::<String>(), case.text()),
    }
}
