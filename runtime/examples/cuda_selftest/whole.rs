//! What concerns whole steps: recording, inspection, tensors beyond 32 bits, equal bits.

use super::{add_scratch, add_slot, alone, message, numbers, tensor};
use crate::cases::t;
use DType::{Bf16, F32, I64};
use shardc_ir::ops::*;
use shardc_ir::plan::Space;
use shardc_ir::program::{Action, Feed, Instruction, Reading, Run, Section, Stream};
use shardc_ir::{BufferId, DType, HostTensor, Op, Program, TensorType};
use shardc_runtime::{CudaRuntime, Runtime};
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

fn step(runtime: &mut CudaRuntime, values: &[f32]) -> Result<f64, String> {
    let feeds = BTreeMap::from([("x".to_string(), HostTensor::from_f32([values.len() as u64], values))]);
    runtime.step(&feeds).map(|readings| readings["loss"]).map_err(message)
}

/// Steps as they are, recorded and launched again read each step's inputs.
pub fn recorded() -> Result<(), String> {
    let mut runtime = logarithms(1000)?;
    for number in 1..=5u32 {
        let values: Vec<f32> = (0..1000).map(|at| (at % 7 + number) as f32).collect();
        let expected: f64 = values.iter().map(|value| f64::from(*value).ln()).sum();
        let actual = step(&mut runtime, &values)?;
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
        if !step(&mut runtime, &values)?.is_nan() {
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

/// Sums of rows that many tokens share have the same bits every time.
pub fn repeated() -> Result<(), String> {
    let (dy, ids, table) = (t(Bf16, &[4096, 1024]), t(I64, &[4096]), t(F32, &[512, 1024]));
    let mut builder = Builder::new();
    let program = &mut builder.program;
    let place = |(name, ty): (&str, &TensorType), program: &mut Program| add_slot(program, name, ty);
    let operands = [("dy", &dy), ("ids", &ids)].map(|slot| place(slot, program));
    let result = place(("table", &table), program);
    builder.compute(EmbeddingGrad { start: 0 }, &operands, &[result], &[]);
    let mut runtime = builder.load()?;
    runtime.write_slot(0, "dy", &tensor(&dy, 1, 1)).map_err(message)?;
    runtime.write_slot(0, "ids", &tensor(&ids, 2, 512)).map_err(message)?;
    let mut first = None;
    for number in 0..8 {
        runtime.step(&BTreeMap::new()).map_err(message)?;
        let made = runtime.read_slot(0, "table").map_err(message)?;
        if first.get_or_insert_with(|| made.clone()).bytes != made.bytes {
            return Err(format!("step {number} gives other bits than the first"));
        }
    }
    Ok(())
}
