//! The kernels' results, without a GPU: the same CubeCL functions through wgpu on a software Vulkan
//! driver (Debian's `mesa-vulkan-drivers`), compared with the CPU backend.
//!
//! Built with the feature `vulkan`; skipped with a message where there is no Vulkan driver. WGSL has
//! no bf16 and no 64-bit integers, so everything runs on f32 with 32-bit indices.

#![allow(clippy::cloned_ref_to_slice_refs)]

mod many;
mod packed;
mod pictures;
mod ranked;
mod regions;

use super::kernel::{Arg, Kernel, Launch};
use super::select::{Selection, Step, select_accumulate, select_scan, select_within};
use crate::compute_op;
use cubecl::InfoBuilder;
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::{Handle, KernelArguments};
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
// CubeCL has a `Cast` as well.
use shardc_ir::ops::Cast;
use shardc_ir::ops::*;
use shardc_ir::{DType, HostTensor, Op, Target, TensorType};
use std::sync::Arc;

type Client = ComputeClient<WgpuRuntime>;

/// A kernel as CubeCL's own launcher wants it.
struct Wrapped(Arc<Kernel>);

impl KernelMetadata for Wrapped {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>().info(self.0.key.clone())
    }
    fn address_type(&self) -> StorageType {
        AddressType::U32.unsigned_type()
    }
}

impl CubeKernel for Wrapped {
    fn define(&self) -> KernelDefinition {
        self.0.definition()
    }
}

fn client() -> Option<Client> {
    let found = std::panic::catch_unwind(|| WgpuRuntime::client(&WgpuDevice::DefaultDevice));
    if found.is_err() {
        eprintln!("skipped: no Vulkan driver (apt-get install mesa-vulkan-drivers)");
    }
    found.ok()
}

fn launch(client: &Client, launch: Launch, resolve: impl Fn(Arg) -> Handle) {
    let buffers = launch.buffers.iter().map(|arg| resolve(*arg)).collect();
    start(client, launch.kernel, buffers, (&launch.numbers, &launch.reals), launch.grid);
}

fn start(
    client: &Client,
    kernel: Arc<Kernel>,
    buffers: Vec<Handle>,
    (numbers, reals): (&[u32], &[f32]),
    [x, y, z]: [u32; 3],
) {
    let mut info = InfoBuilder::default();
    let mut arguments = KernelArguments::new();
    for buffer in buffers {
        arguments.buffers.push(buffer.binding());
        info.metadata.register_array(1 << 30, 1 << 30, AddressType::U32);
    }
    numbers.iter().for_each(|number| info.scalars.push(*number));
    reals.iter().for_each(|real| info.scalars.push(*real));
    arguments.info = info.finish(AddressType::U32);
    let task = KernelTask::<<WgpuRuntime as Runtime>::Compiler, _>::new(Wrapped(kernel));
    client.launch(Box::new(task), CubeCount::Static(x, y, z), arguments);
}

/// Runs an operation's kernels, each launch on at most `most` bytes of a tensor; the results.
fn run(client: &Client, op: &Op, operands: &[HostTensor], types: &[TensorType], most: u64) -> Vec<HostTensor> {
    let operand_types: Vec<TensorType> = operands.iter().map(|operand| operand.ty.clone()).collect();
    let selection = select_within(op, &operand_types, types, most).unwrap_or_else(|error| panic!("{error}"));
    let launches = selection.steps.iter().filter(|step| matches!(step, Step::Launch(_))).count();
    assert!(most > 1 << 20 || launches > 1, "{} is one launch in spite of its size", op.name());
    execute(client, selection, operands, types)
}

/// Where the buffers of an instruction lie in one arena: operands, then results, then scratch memory.
struct Arena {
    offsets: Vec<u64>,
    operands: usize,
    bytes: u64,
}

impl Arena {
    fn new(operands: &[HostTensor], types: &[TensorType], scratch: u64) -> Self {
        let sizes = operands.iter().map(|operand| operand.ty.bytes().0).chain(types.iter().map(|ty| ty.bytes().0));
        let (mut offsets, mut bytes) = (Vec::new(), 0);
        for size in sizes.chain([scratch]) {
            offsets.push(bytes);
            bytes += size.next_multiple_of(256).max(256);
        }
        Self { offsets, operands: operands.len(), bytes }
    }

    fn at(&self, arg: Arg) -> u64 {
        match arg {
            Arg::Operand(index, at) => self.offsets[index] + at,
            Arg::Result(index, at) => self.offsets[self.operands + index] + at,
            Arg::Scratch(at) => self.offsets[self.offsets.len() - 1] + at,
        }
    }
}

/// Runs steps in one arena, as the tables of kernels need it, which is zero beside the operands.
fn execute(client: &Client, selection: Selection, operands: &[HostTensor], types: &[TensorType]) -> Vec<HostTensor> {
    let arena = Arena::new(operands, types, selection.scratch);
    let mut bytes = vec![0; arena.bytes as usize];
    for (index, operand) in operands.iter().enumerate() {
        let at = arena.at(Arg::Operand(index, 0)) as usize;
        bytes[at..at + operand.bytes.len()].copy_from_slice(&operand.bytes);
    }
    let mut memory = client.create_from_slice(&bytes);
    for step in selection.steps {
        match step {
            Step::Launch(step) => launch(client, *step, |arg| memory.clone().offset_start(arena.at(arg))),
            Step::Table(table) => {
                for one in table.launches(|arg| arena.at(arg)) {
                    let words: Vec<u8> = one.words.iter().flat_map(|word| word.to_le_bytes()).collect();
                    let columns = one.buffers.iter().map(|at| memory.clone().offset_start(*at));
                    let buffers = columns.chain([client.create_from_slice(&words)]).collect();
                    start(client, table.kernel.clone(), buffers, (&one.numbers, &table.reals), [one.blocks, 1, 1]);
                }
            }
            Step::Zero { .. } => {}
            Step::Gemm(gemm) => {
                let mut all = client.read_one_unchecked(memory).to_vec();
                pictures::multiply(&mut all, &gemm, |arg| arena.at(arg));
                memory = client.create_from_slice(&all);
            }
            Step::Copy { from, to, bytes } => {
                let mut all = client.read_one_unchecked(memory).to_vec();
                let from = arena.at(from) as usize;
                all.copy_within(from..from + bytes as usize, arena.at(to) as usize);
                memory = client.create_from_slice(&all);
            }
            other => panic!("{other:?} is no kernel"),
        }
    }
    let bytes = client.read_one_unchecked(memory).to_vec();
    let result = |(index, ty): (usize, &TensorType)| {
        let at = arena.at(Arg::Result(index, 0)) as usize;
        HostTensor { ty: ty.clone(), bytes: bytes[at..at + ty.bytes().0 as usize].to_vec() }
    };
    types.iter().enumerate().map(result).collect()
}

fn floats(tensor: &HostTensor) -> Vec<f32> {
    let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    tensor.bytes.chunks_exact(4).map(number).collect()
}

/// Numbers between -1 and 1, or indices below `limit`.
fn tensor(ty: &TensorType, seed: u64, limit: u64) -> HostTensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::new();
    for _ in 0..ty.elements() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match ty.dtype {
            DType::I32 => bytes.extend(((state >> 33) as i32 % limit as i32).to_le_bytes()),
            _ => bytes.extend(((state >> 40) as f32 / (1 << 23) as f32 - 1.0).to_le_bytes()),
        }
    }
    HostTensor { ty: ty.clone(), bytes }
}

fn t(shape: &[u64]) -> TensorType {
    TensorType::new(DType::F32, shape)
}

fn ids(shape: &[u64]) -> TensorType {
    TensorType::new(DType::I32, shape)
}

/// Compares the kernels with the CPU backend on the same numbers.
fn check(client: &Client, op: impl Into<Op>, operands: &[TensorType], results: &[TensorType], limit: u64) {
    check_within(client, op, operands, results, limit, u64::MAX);
}

/// [`check`], with launches on at most `most` bytes of a tensor.
fn check_within(
    client: &Client,
    op: impl Into<Op>,
    operands: &[TensorType],
    results: &[TensorType],
    limit: u64,
    most: u64,
) {
    let op = op.into();
    let make = |(index, ty): (usize, &TensorType)| tensor(ty, index as u64 + 1, limit);
    let operands: Vec<HostTensor> = operands.iter().enumerate().map(make).collect();
    let expected = compute_op(&op, &operands, results).unwrap_or_else(|error| panic!("{error}"));
    let actual = run(client, &op, &operands, results, most);
    for (actual, expected) in actual.iter().zip(&expected) {
        let (actual, expected) = (floats(actual), floats(expected));
        let largest = expected.iter().fold(1e-3, |most: f32, value| most.max(value.abs()));
        let gap = actual.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(gap <= 2e-5 * largest, "{}: {gap} of {largest}", op.name());
    }
}

#[test]
fn elementwise() {
    let Some(client) = client() else { return };
    let x = t(&[16, 12]);
    use UnaryKind::{Exp, Gelu, GeluTanh, Neg, Silu, Tanh};
    for kind in [Neg, Exp, Tanh, Silu, Gelu, GeluTanh] {
        check(&client, Unary { kind }, &[x.clone()], &[x.clone()], 1);
        check(&client, UnaryGrad { kind }, &[x.clone(), x.clone()], &[x.clone()], 1);
    }
    for kind in [BinaryKind::Add, BinaryKind::Sub, BinaryKind::Mul, BinaryKind::Max] {
        check(&client, Binary { kind }, &[x.clone(), x.clone()], &[x.clone()], 1);
    }
    check(&client, Binary { kind: BinaryKind::Mul }, &[x.clone(), t(&[])], &[x.clone()], 1);
    check(&client, Affine { scale: 2.0, offset: 1.0 }, &[t(&[7, 9])], &[t(&[7, 9])], 1);
    check(&client, Swiglu {}, &[x.clone(), x.clone()], &[x.clone()], 1);
    check(&client, SwigluGrad {}, &[x.clone(), x.clone(), x.clone()], &[x.clone(), x], 1);
    let (x, table) = (t(&[2, 4, 2, 16]), t(&[4, 8]));
    check(&client, Rotary { inverse: true }, &[x.clone(), table.clone(), table], &[x], 1);
}

/// Of numbers that saturate them, each by itself: beside the largest, small results would not be seen.
#[test]
fn activations_far_from_zero() {
    let Some(client) = client() else { return };
    let steps = (-256..=256).map(|step| step as f32 / 16.0);
    let numbers: Vec<f32> = steps.chain([-1e4, -300.0, -88.0, -30.0, 30.0, 88.0, 300.0, 1e4]).collect();
    let ty = t(&[numbers.len() as u64]);
    let tensor = |numbers: &[f32]| HostTensor {
        ty: ty.clone(),
        bytes: numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
    };
    let (x, ones) = (tensor(&numbers), tensor(&vec![1.0; numbers.len()]));
    use UnaryKind::{Gelu, GeluTanh, Relu, Sigmoid, Silu, Tanh};
    for kind in [Relu, Sigmoid, Tanh, Silu, Gelu, GeluTanh] {
        // What is left of one less a number near it is as far off as the number.
        let rounding = if matches!(kind, Sigmoid | Tanh) { 3e-7 } else { 3e-8 };
        let forward = (Op::from(Unary { kind }), vec![x.clone()]);
        for (op, operands) in [forward, (Op::from(UnaryGrad { kind }), vec![ones.clone(), x.clone()])] {
            let types = std::slice::from_ref(&ty);
            let expected = floats(&compute_op(&op, &operands, types).expect("results")[0]);
            let actual = floats(&run(&client, &op, &operands, types, u64::MAX)[0]);
            for ((x, a), e) in numbers.iter().zip(actual).zip(expected) {
                assert!((a - e).abs() <= 1e-5 * e.abs() + rounding, "{op:?} of {x}: {a} for {e}");
            }
        }
    }
}

/// Numbers at the ends of what there is: signs and remainders, maxima of nothing finite, integers that no float holds.
#[test]
fn ends_of_numbers() {
    let Some(client) = client() else { return };
    let of = |numbers: &[f32]| HostTensor::from_f32([numbers.len() as u64], numbers);
    let made = |op: Op, operands: &[HostTensor], ty: &TensorType| {
        run(&client, &op, operands, std::slice::from_ref(ty), u64::MAX).swap_remove(0)
    };
    let five = t(&[5]);
    let signs = floats(&made(Unary { kind: UnaryKind::Sign }.into(), &[of(&[-2.0, 0.0, 3.0, f32::NAN, 1e-30])], &five));
    assert!(signs[3].is_nan() && [signs[0], signs[1], signs[2], signs[4]] == [-1.0, 0.0, 1.0, 1.0], "{signs:?}");
    let operands = [of(&[1.0, -1.0, 7.0, 20.0, -0.3]), of(&[0.1, 0.1, -3.0, 0.7, 0.1])];
    let op = Op::from(Binary { kind: BinaryKind::Rem });
    let (rests, expected) = (made(op.clone(), &operands, &five), compute_op(&op, &operands, &[five]).unwrap());
    for ((rest, exact), divisor) in floats(&rests).iter().zip(floats(&expected[0])).zip(floats(&operands[1])) {
        // Both ends are the same number.
        let apart = (rest - exact).abs();
        assert!(
            apart.min((divisor.abs() - apart).abs()) < 1e-6 && rest / divisor < 1.0,
            "{rest} for {exact} of {divisor}"
        );
        assert!(rest * divisor >= 0.0, "{rest} of {divisor}");
    }
    let hidden =
        HostTensor::from_f32([2, 3], &[f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0, f32::MIN, 0.0]);
    let most = made(Reduce { kind: ReduceOp::Max, dims: vec![1] }.into(), &[hidden], &t(&[2]));
    assert_eq!(floats(&most), [f32::NEG_INFINITY, 1.0]);
    let whole = |numbers: &[i32]| HostTensor {
        ty: TensorType::new(DType::I32, [numbers.len() as u64]),
        bytes: numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
    };
    let (x, ty) = (whole(&[0, 1, -5]), whole(&[0, 0, 0]).ty);
    let moved = Affine { scale: 16_777_217.0, offset: 100_000_007.0 };
    let expected = whole(&[100_000_007, 116_777_224, 16_113_922]);
    assert_eq!(made(moved.into(), std::slice::from_ref(&x), &ty).bytes, expected.bytes);
    let filled = made(Constant { value: 123_456_789.0 }.into(), &[], &ty);
    assert_eq!(filled.bytes, whole(&[123_456_789; 3]).bytes);
}

/// Of all queries, and of a part of them, which sees the first keys alone.
#[test]
fn attention_of_parts_of_the_queries() {
    let Some(client) = client() else { return };
    let close = |name: &str, actual: &[HostTensor], expected: &[HostTensor]| {
        let all = |tensors: &[HostTensor]| tensors.iter().flat_map(floats).collect::<Vec<f32>>();
        assert!(all(actual).into_iter().zip(all(expected)).all(|(a, b)| (a - b).abs() <= 1e-4), "{name}");
    };
    let [q, k, v] = [[2, 10, 4, 8], [2, 40, 2, 8], [2, 40, 2, 4]].map(|shape| t(&shape));
    let made_types = [t(&[2, 10, 4, 4]), t(&[2, 4, 10])];
    let read: Vec<HostTensor> = (1..).zip([&q, &k, &v]).map(|(seed, ty)| tensor(ty, seed, 3)).collect();
    for (causal, lead) in [(false, None), (true, None), (true, Some(30)), (true, Some(7)), (true, Some(0))] {
        let op = Op::from(Attention { causal, scale: 0.3, lead, reversed: None });
        let made = compute_op(&op, &read, &made_types).expect("results");
        close(&format!("{op:?}"), &run(&client, &op, &read, &made_types, u64::MAX), &made);
        let op = Op::from(AttentionGrad { causal, scale: 0.3, lead, reversed: None, deterministic: false });
        let all = [&[tensor(&made_types[0], 4, 3)], &read[..], &made[..]].concat();
        let types = [q.clone(), k.clone(), v.clone()];
        let expected = compute_op(&op, &all, &types).expect("results");
        close(&format!("{op:?}"), &run(&client, &op, &all, &types, u64::MAX), &expected);
    }
}

#[test]
fn random_numbers() {
    let Some(client) = client() else { return };
    let laws = [
        Distribution::Normal { mean: 0.5, std: 2.0 },
        Distribution::Uniform { low: -1.0, high: 3.0 },
        Distribution::Bernoulli { p: 0.3 },
    ];
    for distribution in laws {
        let (seed, stream) = (0x1234_5678_9ABC_DEF0, 7);
        let whole = Random { distribution, stream, seed, global: vec![], start: vec![] };
        let shard = Random { global: vec![10, 9], start: vec![3, 2], ..whole.clone() };
        check(&client, whole, &[ids(&[])], &[t(&[5, 7])], 100);
        check(&client, shard.clone(), &[ids(&[])], &[t(&[4, 5])], 100);
        check(&client, Random { start: vec![0, 2], ..shard }, &[ids(&[]), ids(&[4])], &[t(&[4, 5])], 9);
    }
}

#[test]
fn rows() {
    let Some(client) = client() else { return };
    let (x, row, d) = (t(&[40, 96]), t(&[40]), t(&[96]));
    check(&client, Softmax {}, &[x.clone()], &[x.clone()], 1);
    check(&client, RmsNorm { eps: 1e-5 }, &[x.clone(), d.clone()], &[x.clone(), row.clone()], 1);
    let operands = [x.clone(), x.clone(), d.clone(), row.clone()];
    check(&client, RmsNormGrad {}, &operands, &[x.clone(), d.clone()], 1);
    let operands = [x.clone(), d.clone(), d.clone()];
    check(&client, LayerNorm { eps: 1e-5 }, &operands, &[x.clone(), row.clone(), row.clone()], 1);
    let operands = [x.clone(), x.clone(), d.clone(), row.clone(), row.clone()];
    check(&client, LayerNormGrad {}, &operands, &[x.clone(), d.clone(), d], 1);
    for (rows, columns, classes) in
        [(40, 96, None), (40, 96, Some(70)), (700, 2, None), (300, 6, Some(5)), (9, 1, None)]
    {
        let (x, row, labels) = (t(&[rows, columns]), t(&[rows]), ids(&[rows]));
        let (start, below) = (if columns > 60 { 9 } else { 1 }, columns.min(60) + 1);
        let operands = [x.clone(), labels.clone()];
        check(&client, CrossEntropy { start, classes }, &operands, &[row.clone(), row.clone()], below);
        let operands = [x.clone(), labels, row.clone(), row.clone(), row];
        check(&client, CrossEntropyGrad { start: 0, classes }, &operands, &[x], below);
    }
}

/// A step of a region.
fn step(op: impl Into<Op>, operands: &[usize], results: &[TensorType]) -> FusedStep {
    FusedStep { op: op.into(), operands: operands.to_vec(), results: results.to_vec(), source: None }
}

/// Rows that a block does not fill, or fills more than once, and more of them than blocks.
#[test]
fn reductions_and_moves() {
    let Some(client) = client() else { return };
    let x = t(&[20, 30, 8]);
    for (dims, kept) in
        [(vec![0], t(&[30, 8])), (vec![1], t(&[20, 8])), (vec![2], t(&[20, 30])), (vec![0, 1, 2], t(&[]))]
    {
        check(&client, Reduce { kind: ReduceOp::Sum, dims: dims.clone() }, &[x.clone()], &[kept.clone()], 1);
        check(&client, Reduce { kind: ReduceOp::Max, dims }, &[x.clone()], &[kept], 1);
    }
    check(&client, SumSquares {}, &[t(&[300, 100])], &[t(&[])], 1);
    check(&client, Transpose { permutation: vec![2, 0, 1] }, &[x.clone()], &[t(&[8, 20, 30])], 1);
    // By tiles: planes, narrow ones, those of a batch, dimensions between them.
    for (shape, permutation) in [
        (&[130, 200][..], &[1, 0][..]),
        (&[3, 7000], &[1, 0]),
        (&[9001, 2], &[1, 0]),
        (&[3, 40, 5, 70], &[0, 3, 2, 1]),
        (&[70, 6, 90], &[2, 1, 0]),
        (&[33, 3, 16, 15], &[0, 2, 3, 1]),
    ] {
        let to: Vec<u64> = permutation.iter().map(|dim| shape[*dim]).collect();
        check(&client, Transpose { permutation: permutation.to_vec() }, &[t(shape)], &[t(&to)], 1);
    }
    check(&client, Broadcast { dims: vec![0, 2] }, &[t(&[20, 8])], &[x.clone()], 1);
    check(&client, Broadcast { dims: vec![1] }, &[t(&[x.shape[1]])], &[x.clone()], 1);
    check(&client, Broadcast { dims: vec![0] }, &[t(&[x.shape[0]])], &[x.clone()], 1);
    check(&client, Broadcast { dims: vec![0] }, &[t(&[7])], &[t(&[7, 3])], 1);
    check(&client, Broadcast { dims: vec![0, 2] }, &[t(&[5, 6])], &[t(&[5, 40, 6, 2])], 1);
    check(&client, Broadcast { dims: vec![1, 2] }, &[t(&[5, 1])], &[t(&[9, 5, 6, 3])], 1);
    let pad = Pad { low: vec![0, 1, 0], high: vec![0, 1, 4], value: 2.0 };
    check(&client, pad, &[x.clone()], &[t(&[20, 32, 12])], 1);
    for (columns, high, value) in [(3, 5, 0.0), (5, 7, 2.0), (8, 4, 0.0), (3, 2, 1.0)] {
        let pad = Pad { low: vec![0, 0], high: vec![0, high], value };
        check(&client, pad, &[t(&[700, columns])], &[t(&[700, columns + high])], 1);
    }
    let (table, indices) = (t(&[50, 16]), ids(&[12]));
    check(&client, Embedding { start: 10 }, &[table, indices], &[t(&[12, 16])], 60);
    check(&client, Gather { dim: 1 }, &[t(&[6, 50]), ids(&[6, 3])], &[t(&[6, 3])], 50);
    for (start, tokens, rows, columns) in
        [(10, 12, 50, 16), (0, 300, 20, 96), (0, 7, 9, 1028), (5, 500, 700, 4), (3, 9001, 40, 8)]
    {
        let (dy, ids, table) = (t(&[tokens, columns]), ids(&[tokens]), t(&[rows, columns]));
        check(&client, EmbeddingGrad { start }, &[dy.clone(), ids.clone()], std::slice::from_ref(&table), rows + start);
        check(&client, EmbeddingGrad { start }, &[dy, ids, table.clone()], &[table], rows + start);
    }
    check(&client, ScatterAdd { dim: 1 }, &[t(&[6, 3]), ids(&[6, 3])], &[t(&[6, 50])], 50);
    check(&client, ScatterAdd { dim: 0 }, &[t(&[40, 6]), ids(&[40, 6])], &[t(&[5, 6])], 5);
    // Integers that no float holds, and a sum that begins again.
    let whole = |shape: &[u64], numbers: &[i32]| HostTensor {
        ty: ids(shape),
        bytes: numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
    };
    let terms = whole(&[4], &[16_777_217, 16_777_219, i32::MAX, 3]);
    let (places, to) = (whole(&[4], &[0, 0, 1, 1]), [ids(&[2])]);
    let added = run(&client, &ScatterAdd { dim: 0 }.into(), &[terms, places], &to, u64::MAX);
    assert_eq!(added[0].bytes, whole(&[2], &[33_554_436, i32::MIN + 2]).bytes);
}

#[test]
fn large_tensors_are_taken_in_parts() {
    let Some(client) = client() else { return };
    let (x, row, d) = (t(&[320, 64]), t(&[320]), t(&[64]));
    // 64 rows of 256 bytes at a time, and 1024 vectors of 16.
    let most = 64 * 256;
    let labels = ids(&[320]);
    let check = |op: Op, operands: &[TensorType], results: &[TensorType]| {
        check_within(&client, op, operands, results, 64, most);
    };
    check(Unary { kind: UnaryKind::Tanh }.into(), &[x.clone()], &[x.clone()]);
    check(Binary { kind: BinaryKind::Add }.into(), &[x.clone(), x.clone()], &[x.clone()]);
    check(Binary { kind: BinaryKind::Mul }.into(), &[x.clone(), t(&[])], &[x.clone()]);
    check(Softmax {}.into(), &[x.clone()], &[x.clone()]);
    check(RmsNorm { eps: 1e-5 }.into(), &[x.clone(), d.clone()], &[x.clone(), row.clone()]);
    let operands = [x.clone(), x.clone(), d.clone(), row.clone(), row.clone()];
    check(LayerNormGrad {}.into(), &operands, &[x.clone(), d.clone(), d.clone()]);
    check(CrossEntropy { start: 9, classes: None }.into(), &[x.clone(), labels.clone()], &[row.clone(), row.clone()]);
    let operands = [x.clone(), labels.clone(), row.clone(), row.clone(), row.clone()];
    check(CrossEntropyGrad { start: 0, classes: None }.into(), &operands, &[x.clone()]);
    let steps = vec![
        step(RmsNormGrad {}, &[0, 1, 2, 3], &[x.clone(), d.clone()]),
        step(Binary { kind: BinaryKind::Add }, &[4, 0], &[x.clone()]),
    ];
    let fused = Fused { steps, results: vec![5, 6] };
    check(fused.into(), &[x.clone(), x.clone(), d.clone(), row.clone()], &[d.clone(), x.clone()]);
    // 64 of the 526 segments of the first pass.
    check_within(&client, SumSquares {}, &[t(&[640, 256])], &[t(&[])], 1, 64 * 78 * 16);
    check(Reduce { kind: ReduceOp::Sum, dims: vec![0] }.into(), &[x.clone()], &[d.clone()]);
    check(Reduce { kind: ReduceOp::Max, dims: vec![1] }.into(), &[x.clone()], &[row.clone()]);
    check(Transpose { permutation: vec![1, 0, 2] }.into(), &[t(&[64, 5, 64])], &[t(&[5, 64, 64])]);
    let (heads, angles) = (t(&[4, 64, 2, 64]), t(&[64, 32]));
    check(Rotary { inverse: false }.into(), &[heads.clone(), angles.clone(), angles], &[heads]);
    check(Embedding { start: 0 }.into(), &[t(&[64, 64]), labels.clone()], &[x.clone()]);
    check(EmbeddingGrad { start: 0 }.into(), &[x.clone(), labels], &[t(&[320, 64])]);
    check(Gather { dim: 1 }.into(), &[t(&[320, 64]), ids(&[320, 64])], &[x]);
}

#[test]
fn what_is_not_finite_is_found() {
    let Some(client) = client() else { return };
    let words = |values: &[f32]| {
        let x = HostTensor::from_f32([values.len() as u64], values);
        let found = execute(&client, select_scan(&x.ty), std::slice::from_ref(&x), &[ids(&[2])]).remove(0);
        [found.bytes[0], found.bytes[4]]
    };
    let mut values: Vec<f32> = (0..1000).map(|at| at as f32 - 500.0).collect();
    values[0] = f32::MAX;
    assert_eq!(words(&values), [0, 0]);
    values[999] = f32::NEG_INFINITY;
    assert_eq!(words(&values), [1, 0]);
    values[431] = f32::NAN;
    assert_eq!(words(&values), [1, 1]);
    assert_eq!(words(&[-f32::NAN, 1.0, 2.0]), [0, 1]);
}

#[test]
fn updates_by_what_is_not_finite_change_nothing() {
    let Some(client) = client() else { return };
    let cast = Some(DType::F32);
    let op = Op::from(Adamw { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, cast });
    let scalar = |value: f32| HostTensor::from_f32([], &[value]);
    let mut values: Vec<HostTensor> = (1..5).map(|seed| tensor(&t(&[36]), seed, 1)).collect();
    values[3] = HostTensor::from_f32([36], &[0.25; 36]);
    let types: Vec<TensorType> = vec![t(&[36]); 4];
    let update = |scale: f32| {
        let operands = [values.clone(), vec![scalar(scale), scalar(0.01), scalar(3.0)]].concat();
        run(&client, &op, &operands, &types, u64::MAX)
    };
    for scale in [f32::NAN, f32::INFINITY] {
        assert_eq!(update(scale), [0, 2, 3, 0].map(|at: usize| values[at].clone()));
    }
    let changed = update(0.5);
    assert!(changed[0] != values[0] && floats(&changed[0]).iter().all(|value| value.is_finite()));
}

/// Scales and codes are the CPU's, bit by bit.
#[test]
fn tensors_in_8_bit_floats() {
    let Some(client) = client() else { return };
    for (shape, lead) in [(vec![3, 96, 208], 1), (vec![68, 1036], 0), (vec![2, 2, 64, 32], 1)] {
        let mut x = tensor(&t(&shape), 7, 1);
        // Numbers of many magnitudes, among them zeros, and one that is none.
        let mut values: Vec<f32> =
            floats(&x).iter().enumerate().map(|(at, x)| x * (2.0f32).powi(at as i32 % 40 - 30)).collect();
        values[5] = 0.0;
        values[9] = f32::NAN;
        x = HostTensor::from_f32(shape.clone(), &values);
        let mut swapped = shape.clone();
        swapped.swap(shape.len() - 2, shape.len() - 1);
        for to in [DType::F8e4m3, DType::F8e5m2] {
            let both = |op: Op, operands: &[HostTensor], types: &[TensorType]| {
                let expected = compute_op(&op, operands, types).unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(run(&client, &op, operands, types, u64::MAX), expected, "{} {shape:?} {to}", op.name());
                expected
            };
            let scale = both(QuantizationScale { to, lead }.into(), &[x.clone()], &[t(&shape[..lead])]).remove(0);
            let types = [TensorType::new(to, shape.clone()), TensorType::new(to, swapped.clone())];
            let codes = both(Quantize {}.into(), &[x.clone(), scale], &types).remove(0);
            // Parts that were gathered along an inner dimension are brought into order.
            let [rows, columns] = [shape[shape.len() - 2], shape[shape.len() - 1]];
            let stacked = HostTensor {
                ty: TensorType::new(to, [codes.ty.elements() / rows / columns * 2, rows / 2, columns]),
                ..codes
            };
            let mut ordered = stacked.ty.clone();
            ordered.shape.swap(0, 1);
            both(Transpose { permutation: vec![1, 0, 2] }.into(), &[stacked], &[ordered]);
        }
    }
}

#[test]
fn parts_of_ranks_are_added_in_their_order() {
    let Some(client) = client() else { return };
    for (ranks, index, elements) in [(2, 0, 64), (4, 2, 1000), (3, 1, 35)] {
        // Slots are longer than what is added of them.
        let slot = 4096;
        let own = tensor(&t(&[elements]), 5, 1);
        let others = tensor(&t(&[(ranks - 1) as u64 * slot / 4]), 6, 1);
        let sum = super::select::sum_parts(DType::F32, elements, slot, [0; 3], (ranks, index));
        let sums = t(&[elements]);
        // Its third operand is what it writes.
        let handles = [&own, &others, &tensor(&sums, 7, 1)].map(|tensor| client.create_from_slice(&tensor.bytes));
        launch(&client, sum, |arg| match arg {
            Arg::Operand(index, at) => handles[index].clone().offset_start(at),
            other => panic!("{other:?} is not its own"),
        });
        let bytes = client.read_one_unchecked(handles[2].clone()).to_vec();
        let actual = floats(&HostTensor { ty: sums, bytes });
        let (own, others) = (floats(&own), floats(&others));
        for (at, actual) in actual.iter().enumerate() {
            let other = |place: usize| others[place * slot as usize / 4 + at];
            let of = |rank: usize| match rank.cmp(&index) {
                std::cmp::Ordering::Less => other(rank),
                std::cmp::Ordering::Equal => own[at],
                std::cmp::Ordering::Greater => other(rank - 1),
            };
            assert_eq!(*actual, (0..ranks).fold(0.0, |sum, rank| sum + of(rank)), "{ranks} ranks, {at}");
        }
    }
}

/// Integers that no f32 is.
#[test]
fn integers_are_added_over_microbatches_as_they_are() {
    let Some(client) = client() else { return };
    let (ty, values) = (ids(&[5]), [(1i32 << 24) + 1, -(1 << 24) - 1, i32::MAX, 0, 7]);
    let term = HostTensor { ty: ty.clone(), bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() };
    let mut adding = select_accumulate(&ty, &ty);
    // The last steps are of the first microbatch, those before of all others.
    adding.steps.truncate(adding.steps.len() - adding.first);
    assert_eq!(execute(&client, adding, &[term.clone()], &[ty])[0].bytes, term.bytes);
}
