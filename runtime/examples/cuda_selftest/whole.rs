//! What concerns whole steps: recording, inspection, tensors beyond 32 bits, equal bits.

use super::{add_scratch, add_slot, alone, message, numbers, tensor};
use crate::cases::t;
use DType::{Bf16, F32, I64};
use shardc_ir::ops::*;
use shardc_ir::plan::Space;
use shardc_ir::program::{Action, Feed, Instruction, Reading, Run, Section, Stream};
use shardc_ir::{BufferId, DType, Graph, HostTensor, Op, OutputKind, Program, TensorType, ValueId};
use shardc_runtime::{CudaRuntime, Feeds, Runtime, compute_op, evaluate_part};
use std::collections::BTreeMap;

/// A program of one rank and one section.
struct Builder {
    program: Program,
    section: Section,
}

impl Builder {
    fn new() -> Self {
        let section = Section { name: "whole".to_string(), ..Section::default() };
        Self { program: Program { ranks: 1, ..Program::default() }, section }
    }

    fn add(&mut self, action: Action, operands: &[BufferId], results: &[BufferId], stream: Stream, after: &[usize]) {
        let instruction = Instruction::new(action, operands.to_vec(), results.to_vec(), stream);
        let instruction = add_scratch(&mut self.program, instruction);
        self.section.instructions.push(Instruction { after: after.to_vec(), ..instruction });
    }

    fn compute(&mut self, op: impl Into<Op>, operands: &[BufferId], results: &[BufferId], after: &[usize]) {
        self.add(Action::Compute(op.into()), operands, results, Stream::Compute, after);
    }

    fn load(self) -> Result<CudaRuntime, String> {
        let Self { mut program, section } = self;
        let section = program.sections.push(section);
        program.order = vec![Run { section, microbatch: 0 }];
        CudaRuntime::new(vec![program], &[0], alone()).map_err(message)
    }
}

/// `loss = sum(log(x))` of a fed `x`.
fn logarithms(size: u64) -> Result<CudaRuntime, String> {
    let mut builder = Builder::new();
    let program = &mut builder.program;
    let slices = vec![vec![(0, size)]];
    program.inputs.push(Feed { name: "x".to_string(), ty: t(F32, &[size]), slices });
    let [x, logs] = ["x", "logs"].map(|name| add_slot(program, name, &t(F32, &[size])));
    let loss = add_slot(program, "loss", &t(F32, &[]));
    program.readings.push(Reading { name: "loss".to_string(), buffer: loss });
    builder.add(Action::Feed { input: 0 }, &[], &[x], Stream::HostToDevice, &[]);
    builder.compute(Unary { kind: UnaryKind::Log }, &[x], &[logs], &[0]);
    builder.compute(Reduce { kind: ReduceOp::Sum, dims: vec![0] }, &[logs], &[loss], &[]);
    builder.load()
}

fn feeds(values: &[f32]) -> Feeds {
    Feeds::from([("x".to_string(), HostTensor::from_f32([values.len() as u64], values).into())])
}

fn step(runtime: &mut CudaRuntime, feeds: &Feeds) -> Result<f64, String> {
    runtime.step(feeds).map(|readings| readings["loss"]).map_err(message)
}

/// Steps as they are, recorded and launched again read each step's inputs, whether those were told a step ahead, or
/// others were, or none.
pub fn recorded() -> Result<(), String> {
    let mut runtime = logarithms(1000)?;
    let values = |number: u32| -> Vec<f32> { (0..1000).map(|at| (at % 7 + number) as f32).collect() };
    let mut next = feeds(&values(1));
    for number in 1..=12u32 {
        let expected: f64 = values(number).iter().map(|value| f64::from(*value).ln()).sum();
        let given = std::mem::replace(&mut next, feeds(&values(number + 1)));
        match number % 4 {
            0 => {}
            1 => runtime.ahead(&feeds(&values(99))),
            _ => runtime.ahead(&next),
        }
        let actual = step(&mut runtime, &given)?;
        if (actual - expected).abs() > 1e-4 * expected {
            return Err(format!("step {number}: {actual}, not {expected}"));
        }
    }
    Ok(())
}

/// The first instruction that makes a NaN is named, whether the step was recorded or not.
pub fn inspected() -> Result<(), String> {
    let mut runtime = logarithms(1000)?;
    for number in 0..4 {
        let mut values = vec![1.0; 1000];
        values[700] = -1.0;
        runtime.ahead(&feeds(&[1.0; 1000]));
        if !step(&mut runtime, &feeds(&values))?.is_nan() {
            return Err(format!("step {number}: the logarithm of -1 is a number"));
        }
        let found = runtime.first_non_finite().map_err(message)?.unwrap_or_default();
        if !found.contains("NaN in whole.1 log") {
            return Err(format!("step {number}: found `{found}`"));
        }
    }
    Ok(())
}

/// Kernels on logits of 6.3e9 elements, in two buffers of 12.6 GB.
pub fn large() -> Result<(), String> {
    let (rows, columns) = (49_152, 128_256);
    let (logits, row) = (t(Bf16, &[rows, columns]), t(F32, &[rows]));
    let mut builder = Builder::new();
    let program = &mut builder.program;
    let [zeros, ones] = ["zeros", "ones"].map(|name| add_slot(program, name, &logits));
    let labels = add_slot(program, "labels", &t(I64, &[rows]));
    let [lse, picked, sums] = ["lse", "picked", "sums"].map(|name| add_slot(program, name, &row));
    builder.compute(Unary { kind: UnaryKind::Exp }, &[zeros], &[ones], &[]);
    builder.compute(Reduce { kind: ReduceOp::Sum, dims: vec![1] }, &[ones], &[sums], &[]);
    builder.compute(CrossEntropy { start: 0, classes: None }, &[ones, labels], &[lse, picked], &[]);
    let planned = builder.program.arena(Space::Device);
    let mut runtime = builder.load()?;
    if runtime.peak_bytes() != planned {
        return Err(format!("{} taken, {planned} planned", runtime.peak_bytes()));
    }
    runtime.step(&BTreeMap::new()).map_err(message)?;
    let logarithm = (columns as f64).ln() + 1.0;
    for (name, expected) in [("sums", columns as f64), ("lse", logarithm), ("picked", 1.0)] {
        let values = numbers(&runtime.read_slot(0, name).map_err(message)?);
        let wrong = values.iter().position(|value| (value - expected).abs() > 1e-5 * expected);
        if let Some(at) = wrong {
            return Err(format!("{name}[{at}] is {}, not {expected}", values[at]));
        }
    }
    Ok(())
}

/// What adds in a fixed order has the same bits every time: sums of rows that many tokens share, and the derivative of
/// attention where it is asked to.
pub fn repeated() -> Result<(), String> {
    let (dy, ids, table) = (t(Bf16, &[4096, 1024]), t(I64, &[4096]), t(F32, &[512, 1024]));
    equal_bits(EmbeddingGrad { start: 0 }, &[(dy, 1), (ids, 512)], &[table])?;
    let (q, k, lse) = (t(Bf16, &[2, 1024, 8, 64]), t(Bf16, &[2, 1024, 2, 64]), t(F32, &[2, 8, 1024]));
    let operands = [&q, &q, &k, &k, &q, &lse].map(|ty| (ty.clone(), 1));
    let op = AttentionGrad { causal: true, scale: 0.125, lead: None, reversed: None, deterministic: true };
    equal_bits(op, &operands, &[q, k.clone(), k])
}

/// Runs an operation several times, on numbers below the limits.
fn equal_bits(op: impl Into<Op>, operands: &[(TensorType, i64)], results: &[TensorType]) -> Result<(), String> {
    let (op, mut builder) = (op.into(), Builder::new());
    let name = op.name();
    let program = &mut builder.program;
    let mut place = |prefix: &str, index: usize, ty: &TensorType| add_slot(program, &format!("{prefix}{index}"), ty);
    let taken: Vec<_> = operands.iter().enumerate().map(|(index, (ty, _))| place("in", index, ty)).collect();
    let made: Vec<_> = results.iter().enumerate().map(|(index, ty)| place("out", index, ty)).collect();
    builder.compute(op, &taken, &made, &[]);
    let mut runtime = builder.load()?;
    for (index, (ty, limit)) in operands.iter().enumerate() {
        let values = tensor(ty, index as u64 + 1, *limit);
        runtime.write_slot(0, &format!("in{index}"), &values).map_err(message)?;
    }
    let mut first = None;
    for number in 0..8 {
        runtime.step(&BTreeMap::new()).map_err(message)?;
        let read = |index: usize| runtime.read_slot(0, &format!("out{index}"));
        let bytes: Vec<HostTensor> = (0..results.len()).map(read).collect::<Result<_, _>>().map_err(message)?;
        if *first.get_or_insert_with(|| bytes.clone()) != bytes {
            return Err(format!("{name}: run {number} gives other bits than the first"));
        }
    }
    Ok(())
}

/// Initial values that a rank makes in its slots are those of the CPU, also of a part of a tensor; what is no chain of
/// operations in place is left. A slot that holds the cast of another follows it, made or written.
pub fn made() -> Result<(), String> {
    let (whole, slice) = ([600, 512], [(200, 300), (128, 256)]);
    let mut init = Graph::new("init");
    let mut add = |op: Op, operands: &[ValueId]| {
        let node = init.add(op, operands, &[t(F32, &whole)]).map_err(message)?;
        Ok::<ValueId, String>(init.result(node))
    };
    let random = |distribution, stream| Random { distribution, stream, seed: 0, global: vec![], start: vec![] };
    let normal = add(random(Distribution::Normal { mean: 0.5, std: 0.02 }, 1).into(), &[])?;
    let uniform = add(random(Distribution::Uniform { low: -0.1, high: 0.3 }, 2).into(), &[])?;
    let scaled = add(Affine { scale: 3.0, offset: 1.0 }.into(), &[uniform])?;
    let ones = add(Constant { value: 1.0 }.into(), &[])?;
    let sum = add(Binary { kind: BinaryKind::Add }.into(), &[normal, uniform])?;
    let outputs = [("normal", normal), ("scaled", scaled), ("ones", ones), ("sum", sum)];
    let mut builder = Builder::new();
    for (name, value) in outputs {
        init.output(name, value, OutputKind::Result);
        add_slot(&mut builder.program, name, &t(F32, &[300, 256]));
    }
    for of in ["normal", "sum"] {
        add_slot(&mut builder.program, &format!("{of}.bf16"), &t(Bf16, &[300, 256]));
        if let Some(slot) = builder.program.slots.last_mut() {
            (slot.is_parameter, slot.cast_of) = (false, Some(of.to_string()));
        }
    }
    builder.program.slots.iter_mut().for_each(|slot| slot.slice = slice.to_vec());
    let mut runtime = builder.load()?;
    let slots = outputs.map(|(name, _)| (0, name.to_string())).to_vec();
    let left = runtime.make_slots(&init, 7, slots).map_err(message)?;
    if left != [(0, "sum".to_string())] {
        return Err(format!("left are {left:?}"));
    }
    for name in ["normal", "scaled", "ones"] {
        let expected = numbers(&evaluate_part(&init, name, &slice, 7).map_err(message)?);
        let actual = numbers(&runtime.read_slot(0, name).map_err(message)?);
        let wrong = actual.iter().zip(&expected).position(|(a, b)| (a - b).abs() > 1e-5);
        if let Some(at) = wrong {
            return Err(format!("{name}[{at}] is {}, not {}", actual[at], expected[at]));
        }
    }
    runtime.write_slot(0, "sum", &evaluate_part(&init, "sum", &slice, 7).map_err(message)?).map_err(message)?;
    for of in ["normal", "sum"] {
        let parameter = runtime.read_slot(0, of).map_err(message)?;
        let cast = compute_op(&Cast {}.into(), &[parameter], &[t(Bf16, &[300, 256])]).map_err(message)?.remove(0);
        if runtime.read_slot(0, &format!("{of}.bf16")).map_err(message)? != cast {
            return Err(format!("the cast of {of} is not its cast"));
        }
    }
    Ok(())
}
