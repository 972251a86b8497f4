//! How fast the kernels are that memory bounds: their bytes against what the device's memory can move.

use super::cases::{case, t};
use super::regions::{groups, regions, row_sums, slopes_and_sums};
use super::{Case, alone, message, program, tensor};
use shardc_ir::ops::*;
use shardc_ir::{DType, HostTensor, Op, TensorType};
use shardc_runtime::{CudaRuntime, Runtime};
use std::collections::BTreeMap;
use std::time::Instant;

use shardc_ir::DType::{Bf16, F32, I64};

/// Bytes/s that a copy reaches in the memory of an H200.
const PEAK: f64 = 4.25e12;

/// More bytes than any cache holds: so many are touched before a tensor is touched again.
const APART: u64 = 400 << 20;

/// Seconds of a step that is measured, at least.
const LONG: f64 = 8e-3;

/// The kernels of training steps of GPT-2, Llama and ResNet, at the shapes that these have on one GPU.
pub fn memory_cases() -> Vec<Case> {
    let f = Bf16;
    // What a kernel takes that moves next to nothing.
    let mut all = vec![case(Affine { scale: 2.0, offset: 1.0 }, &[t(f, &[256])], &[t(f, &[256])])];
    for shape in [[8, 1024, 1600], [32, 1024, 768], [12, 4096, 2048]] {
        all.extend(regions(f, &shape).into_iter().take(2));
        let (x, d, w) = (t(f, &shape), t(f, &shape[2..]), t(F32, &shape[2..]));
        let row = t(F32, &shape[..2]);
        let statistics = [x.clone(), row.clone(), row.clone()];
        all.push(case(LayerNorm { eps: 1e-5 }, &[x.clone(), d.clone(), d.clone()], &statistics));
        all.push(case(RmsNorm { eps: 1e-5 }, &[x.clone(), d.clone()], &statistics[..2]));
        all.push(case(RmsNormGrad {}, &[x.clone(), x, d, row], &[statistics[0].clone(), w]));
    }
    for shape in [[8, 1024, 1600], [8, 1024, 6400], [32, 1024, 768], [32, 1024, 3072], [12, 4096, 2048]] {
        all.push(row_sums(f, &shape, 1));
    }
    all.push(row_sums(f, &[8, 1024, 1600], 3));
    all.push(row_sums(f, &[32, 1024, 768], 3));
    for shape in [[8, 1024, 50304], [32, 256, 50304], [12, 512, 128_256], [32, 256, 32_000]] {
        let (logits, labels, row) = (t(f, &shape), t(I64, &shape[..2]), t(F32, &shape[..2]));
        let classes = (shape[2] == 50304).then_some(50257);
        let both = [row.clone(), row.clone()];
        all.push(case(CrossEntropy { start: 0, classes }, &[logits.clone(), labels.clone()], &both));
        let operands = [logits.clone(), labels, row.clone(), row.clone(), row];
        all.push(case(CrossEntropyGrad { start: 0, classes }, &operands, &[logits]));
    }
    let s = t(F32, &[]);
    for shape in [[1600, 6400], [2048, 8192], [50257, 1600]] {
        all.push(case(SumSquares {}, &[t(F32, &shape)], &[s.clone()]));
        all.push(each(SumSquares {}, &[t(F32, &shape)], &[s.clone()], 8));
    }
    let small = [t(F32, &[1600]), t(F32, &[1600, 1600]), t(F32, &[768, 768])];
    for ty in &small {
        all.push(each(SumSquares {}, &[ty.clone()], &[s.clone()], 24));
        all.push(each(Cast {}, &[ty.clone()], &[ty.with_dtype(f)], 24));
        all.extend([None, Some(f)].map(|cast| updates(ty, 24, cast)));
    }
    all.extend([None, Some(f)].map(|cast| updates(&t(F32, &[1600, 6400]), 1, cast)));
    all.push(each(Cast {}, &[t(F32, &[1600, 6400])], &[t(f, &[1600, 6400])], 6));
    for (shape, rows) in [([8, 1024, 1600], 50257), ([32, 1024, 768], 50257), ([12, 4096, 2048], 128_256)] {
        let ids = t(I64, &shape[..2]);
        all.push(case(EmbeddingGrad { start: 0 }, &[t(f, &shape), ids], &[t(F32, &[rows, shape[2]])]));
    }
    all.push(case(
        EmbeddingGrad { start: 0 },
        &[t(f, &[32, 2048, 768]), t(I64, &[32, 2048])],
        &[t(F32, &[32_000, 768])],
    ));
    for shape in [[12, 4096, 32, 64], [12, 4096, 8, 64], [32, 2048, 12, 64]] {
        let (x, table) = (t(f, &shape), t(F32, &[shape[1], shape[3] / 2]));
        all.push(case(Rotary { inverse: false }, &[x.clone(), table.clone(), table], &[x]));
    }
    // ResNet's first pooling.
    let window = Window { stride: [2, 2], low: [1, 1], high: [1, 1], ..Window::default() };
    let (kernel, x, y) = ([3, 3], t(f, &[256, 112, 112, 64]), t(f, &[256, 56, 56, 64]));
    all.push(case(MaxPool { kernel, window: window.clone() }, &[x.clone()], &[y.clone()]));
    all.push(case(MaxPoolGrad { kernel, window }, &[y, x.clone()], &[x]));
    // Colours that come last; tokens that are mixed; statistics of groups of two channels.
    all.push(case(
        Transpose { permutation: vec![0, 2, 3, 1] },
        &[t(F32, &[256, 3, 224, 224])],
        &[t(F32, &[256, 224, 224, 3])],
    ));
    all.push(case(Transpose { permutation: vec![0, 2, 1] }, &[t(f, &[64, 768, 196])], &[t(f, &[64, 196, 768])]));
    all.push(case(Broadcast { dims: vec![0, 2] }, &[t(f, &[16, 32])], &[t(f, &[16, 65_536, 32, 2])]));
    for shape in [[16, 65_536, 32, 2], [16, 65_536, 16, 2], [16, 16_384, 32, 4], [16, 4096, 32, 8], [16, 1024, 32, 16]]
    {
        all.extend(groups(f, shape));
    }
    all.extend(groups(F32, [16, 4096, 32, 8]));
    let pad = Pad { low: vec![0, 0], high: vec![47, 0], value: 0.0 };
    all.push(case(pad, &[t(f, &[50257, 1600])], &[t(f, &[50304, 1600])]));
    for shape in [[64, 196, 3072], [64, 768, 384]] {
        for kind in [UnaryKind::Gelu, UnaryKind::GeluTanh] {
            all.push(case(Unary { kind }, &[t(f, &shape)], &[t(f, &shape)]));
            all.push(slopes_and_sums(f, &shape, kind));
        }
    }
    let wide = t(f, &[12, 4096, 8192]);
    all.push(case(SwigluGrad {}, &vec![wide.clone(); 3], &vec![wide.clone(); 2]));
    all.push(case(Swiglu {}, &vec![wide.clone(); 2], &[wide]));
    all
}

fn each(op: impl Into<Op>, operands: &[TensorType], results: &[TensorType], count: usize) -> Case {
    let op = Each { count, op: Box::new(op.into()) };
    case(op, &vec![operands; count].concat(), &vec![results; count].concat())
}

fn updates(ty: &TensorType, count: usize, cast: Option<DType>) -> Case {
    let (p, g, s) = (ty.clone(), ty.with_dtype(Bf16), t(F32, &[]));
    let op = Adamw { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, cast };
    let operands = [p.clone(), g, p.clone(), p.clone(), s.clone(), s.clone(), s];
    let cast = cast.map(|dtype| p.with_dtype(dtype));
    let results: Vec<TensorType> = vec![p; 3].into_iter().chain(cast).collect();
    match count {
        1 => case(op, &operands, &results),
        _ => each(op, &operands, &results, count),
    }
}

/// Numbers that look random, the same ones again and again.
fn repeated(ty: &TensorType, seed: u64) -> HostTensor {
    let mut bytes = tensor(&t(ty.dtype, &[ty.elements().min(1 << 18)]), seed, 30_000).bytes;
    let all = ty.bytes().0 as usize;
    while bytes.len() < all {
        bytes.extend_from_within(..bytes.len().min(all - bytes.len()));
    }
    HostTensor { ty: ty.clone(), bytes }
}

/// Measures a case on several sets of tensors by turns; prints a line.
pub fn memory(case: &Case) {
    match seconds(case) {
        Ok((seconds, bytes)) => println!(
            "{:8.1} us  {:8.1} MB  {:5.1}%  {}",
            seconds * 1e6,
            bytes / 1e6,
            100.0 * bytes / seconds / PEAK,
            case.text().chars().take(110).collect::<String>()
        ),
        Err(error) => println!("ERROR {}  {}", error.chars().take(300).collect::<String>(), case.text()),
    }
}

/// What a run of a case takes within a step of many, and the bytes that it moves.
fn seconds(case: &Case) -> Result<(f64, f64), String> {
    let bytes = case.op.bytes(&case.operands, &case.results).0;
    let copies = (APART / bytes.max(1)).clamp(1, 24);
    // So many that the start of a step is next to nothing.
    let runs = (LONG * PEAK / (bytes * copies) as f64).clamp(1.0, 400.0) as usize;
    let program = program(&vec![case.clone(); copies as usize], runs);
    let mut runtime = CudaRuntime::new(vec![program], &[0], alone()).map_err(message)?;
    for (number, ty) in case.operands.iter().enumerate() {
        let operand = repeated(ty, number as u64 + 1);
        for copy in 0..copies {
            runtime.write_slot(0, &format!("{copy}.in{number}"), &operand).map_err(message)?;
        }
    }
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        runtime.step(&BTreeMap::new()).map_err(message)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok((best / (runs as u64 * copies) as f64, bytes as f64))
}
