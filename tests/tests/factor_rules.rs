//! The factor rules against the kernels: for every operation and every legal strategy on small meshes, running the
//! operation shard by shard and putting the shards together equals running it whole.
//!
//! Per coordinate of the mesh, each operand is cut as the rule says ([`FactorRule::operand_sharding`])
//! and, where it is a partial sum, is one of random terms that add up to it; the operation is
//! localized; its results are put where the rule says, and partial ones are reduced. Where the rule lets an axis divide
//! unevenly, parts end with zeros, in results as in operands. Everything shardc does with a plan rests on this.

#[path = "common/elements.rs"]
mod elements;

use elements::{tensor, values};
use shardc_ir::Family;
use shardc_ir::ops::*;
use shardc_ir::{DType, FactorRule, HostTensor, Mesh, Op, OpDef, ReduceKind, Sharding, Strategy, TensorType};
use shardc_runtime::{compute_op, random};
use std::collections::BTreeSet;

/// What an operand is filled with.
#[derive(Clone, Copy)]
enum Fill {
    /// Between -1 and 1.
    Signed,
    /// Between 0.5 and 1.5.
    Positive,
    /// Integers from `low` below `high`; bools.
    Integer(i64, i64),
}
use Fill::{Integer, Positive, Signed};

struct Case {
    op: Op,
    operands: Vec<(TensorType, Fill)>,
    declared: Vec<TensorType>,
    /// The largest difference, relative to one plus the largest element.
    tolerance: f64,
}

fn f32s(shape: &[u64]) -> TensorType {
    TensorType::new(DType::F32, shape)
}

fn of(dtype: DType, shape: &[u64]) -> TensorType {
    TensorType::new(dtype, shape)
}

fn case(op: impl Into<Op>, operands: &[(TensorType, Fill)], declared: &[TensorType]) -> Case {
    let narrow = operands.iter().any(|(ty, _)| ty.dtype == DType::Bf16);
    let tolerance = if narrow { 3e-2 } else { 1e-5 };
    Case { op: op.into(), operands: operands.to_vec(), declared: declared.to_vec(), tolerance }
}

fn numbers(stream: u64, count: usize) -> Vec<f64> {
    let block = |index| random::block([7, 9], stream, index).map(|x| f64::from(x) / 4_294_967_296.0);
    (0..count.div_ceil(4) as u64).flat_map(block).take(count).collect()
}

fn fill(stream: u64, ty: &TensorType, fill: Fill) -> HostTensor {
    let scale = |x: f64| match fill {
        Signed => 2.0 * x - 1.0,
        Positive => x + 0.5,
        Integer(low, high) => low as f64 + (x * (high - low) as f64).floor(),
    };
    tensor(ty, &numbers(stream, ty.elements() as usize).into_iter().map(scale).collect::<Vec<_>>())
}

/// `count` random terms that add up to a tensor.
fn terms(stream: u64, whole: &HostTensor, count: u64) -> Vec<HostTensor> {
    let mut rest = values(whole);
    let mut terms = Vec::new();
    for index in 1..count {
        let integer = whole.ty.dtype.is_int();
        let term = fill(stream * 64 + index, &whole.ty, if integer { Integer(-5, 5) } else { Signed });
        rest.iter_mut().zip(values(&term)).for_each(|(rest, term)| *rest -= term);
        terms.push(term);
    }
    terms.push(tensor(&whole.ty, &rest));
    terms
}

fn meshes() -> Vec<Mesh> {
    let sizes: [&[u64]; 6] = [&[2], &[3], &[4], &[2, 2], &[2, 3], &[2, 2, 2]];
    let mesh = |sizes: &[u64]| {
        let mut mesh = Mesh::default();
        for size in sizes {
            mesh.push(Family::Tensor, *size);
        }
        mesh
    };
    sizes.into_iter().map(mesh).collect()
}

/// Every legal strategy on a mesh.
fn strategies(rule: &FactorRule, mesh: &Mesh) -> Vec<Strategy> {
    mesh.ids().fold(vec![Strategy::default()], |all, axis| {
        let extend = |given: Strategy| {
            let mut choices = rule.choices(&given, axis, mesh);
            choices.extend(rule.uneven_choices(&given, axis, mesh));
            choices.into_iter().map(move |choice| given.with(axis, choice)).collect::<Vec<_>>()
        };
        all.into_iter().flat_map(extend).collect()
    })
}

/// Checks one case under every strategy; how many there were.
#[track_caller]
fn check(case: &Case) -> usize {
    let types: Vec<TensorType> = case.operands.iter().map(|(ty, _)| ty.clone()).collect();
    let operands: Vec<HostTensor> =
        (0..).zip(&case.operands).map(|(stream, (ty, kind))| fill(stream, ty, *kind)).collect();
    let whole = compute_op(&case.op, &operands, &case.declared)
        .unwrap_or_else(|error| panic!("{:?} of {types:?}: {error}", case.op));
    let results: Vec<TensorType> = whole.iter().map(|x| x.ty.clone()).collect();
    let rule = case.op.rule(&types, &results);
    let mut count = 0;
    for mesh in meshes() {
        for strategy in strategies(&rule, &mesh) {
            let made = run_sharded(case, &rule, &mesh, &strategy, &operands, &results);
            for (index, (made, whole)) in made.iter().zip(&whole).enumerate() {
                let whole = values(whole);
                let largest = whole.iter().filter(|x| x.is_finite()).fold(1.0, |most: f64, x| most.max(x.abs() + 1.0));
                let differ =
                    |(a, b): (&f64, &f64)| (a - b).abs() > case.tolerance * largest || a.is_nan() != b.is_nan();
                if let Some(at) = made.iter().zip(&whole).position(differ) {
                    panic!(
                        "{} of {types:?}, rule {rule}, mesh {mesh}, strategy `{}`: result {index}, element {at} is {} and should be {}",
                        case.op.name(),
                        rule.strategy_text(&strategy, &mesh),
                        made[at],
                        whole[at]
                    );
                }
            }
            count += 1;
        }
    }
    count
}

/// Runs the operation on every coordinate and puts the results together.
fn run_sharded(
    case: &Case,
    rule: &FactorRule,
    mesh: &Mesh,
    strategy: &Strategy,
    operands: &[HostTensor],
    results: &[TensorType],
) -> Vec<Vec<f64>> {
    let layouts: Vec<Sharding> = (0..operands.len()).map(|index| rule.operand_sharding(index, strategy)).collect();
    let made: Vec<Sharding> = (0..results.len()).map(|index| rule.result_sharding(index, strategy)).collect();
    for (layout, ty) in layouts.iter().zip(operands.iter().map(|x| &x.ty)).chain(made.iter().zip(results)) {
        assert_eq!(layout.check(&ty.shape, mesh), Ok(()), "{rule}");
    }
    let partial = |layout: &Sharding| mesh.extent(layout.partial.iter().map(|(axis, _)| *axis));
    let split: Vec<Vec<HostTensor>> = (100..)
        .zip(operands.iter().zip(&layouts))
        .map(|(stream, (operand, layout))| terms(stream, operand, partial(layout)))
        .collect();
    let empty = |(ty, layout): (&TensorType, &Sharding)| {
        let zero = match layout.partial.first() {
            Some((_, ReduceKind::Max | ReduceKind::LogSumExp)) => f64::NEG_INFINITY,
            _ => 0.0,
        };
        vec![zero; ty.elements() as usize]
    };
    let mut whole: Vec<Vec<f64>> = results.iter().zip(&made).map(empty).collect();
    for rank in 0..mesh.ranks() {
        let at = mesh.coordinates(rank, 0);
        let slice = |ty: &TensorType, layout: &Sharding| layout.slice(&ty.shape, mesh, &at);
        let term = |layout: &Sharding| {
            layout.partial.iter().fold(0, |term, (axis, _)| term * mesh.size(*axis) + at[axis.0 as usize]) as usize
        };
        let local: Vec<HostTensor> = split
            .iter()
            .zip(&layouts)
            .map(|(terms, layout)| {
                let term = &terms[term(layout)];
                let held = term.ty.with_shape(layout.local_shape(&term.ty.shape, mesh));
                term.part(&slice(&term.ty, layout)).filled(&held)
            })
            .collect();
        let part = |ty: &TensorType, layout: &Sharding| Part { shape: ty.shape.clone(), slice: slice(ty, layout) };
        let operand_parts: Vec<Part> = operands.iter().zip(&layouts).map(|(x, layout)| part(&x.ty, layout)).collect();
        let result_parts: Vec<Part> = results.iter().zip(&made).map(|(ty, layout)| part(ty, layout)).collect();
        let op = case.op.localize(&operand_parts, &result_parts).unwrap_or_else(|| case.op.clone());
        let types: Vec<TensorType> =
            results.iter().zip(&made).map(|(ty, layout)| ty.with_shape(layout.local_shape(&ty.shape, mesh))).collect();
        let local = compute_op(&op, &local, &types)
            .unwrap_or_else(|error| panic!("{op:?} under `{}`: {error}", rule.strategy_text(strategy, mesh)));
        for ((whole, (ty, layout)), local) in whole.iter_mut().zip(results.iter().zip(&made)).zip(local) {
            let slice = slice(ty, layout);
            let lengths: Vec<u64> = slice.iter().map(|(_, length)| *length).collect();
            let (held, part) = (values(&local), local.beginning(&ty.with_shape(lengths)));
            let filled = part.filled(&ty.with_shape(layout.local_shape(&ty.shape, mesh)));
            let strategy = || rule.strategy_text(strategy, mesh);
            let is_same = held.iter().zip(values(&filled)).all(|(a, b)| *a == b || (a.is_nan() && b.is_nan()));
            assert!(is_same, "{} under `{}`: there is no zero behind a part: {held:?}", case.op.name(), strategy());
            let axes = [layout.dim_axes(), layout.partial_axes()];
            let copies = mesh.ids().filter(|axis| !axes.iter().any(|axes| axes.contains(*axis)));
            if copies.into_iter().all(|axis| at[axis.0 as usize] == 0) {
                put(whole, ty, layout, &slice, &values(&part));
            }
        }
    }
    whole
}

/// Reduces a part into the whole.
fn put(whole: &mut [f64], ty: &TensorType, layout: &Sharding, slice: &[(u64, u64)], part: &[f64]) {
    let kinds: BTreeSet<ReduceKind> = layout.partial.iter().map(|(_, kind)| *kind).collect();
    assert!(kinds.len() <= 1, "one result is reduced in two ways");
    for (index, value) in part.iter().enumerate() {
        let (mut rest, mut place, mut stride) = (index as u64, 0, 1);
        for dim in (0..slice.len()).rev() {
            place += (slice[dim].0 + rest % slice[dim].1) * stride;
            rest /= slice[dim].1;
            stride *= ty.shape[dim];
        }
        let slot = &mut whole[place as usize];
        *slot = match kinds.first() {
            Some(ReduceKind::Max) => slot.max(*value),
            Some(ReduceKind::LogSumExp) => {
                let most = slot.max(*value);
                if most.is_finite() { most + ((*slot - most).exp() + (value - most).exp()).ln() } else { most }
            }
            Some(ReduceKind::Sum) | None => *slot + value,
        };
    }
}

#[track_caller]
fn check_all(cases: &[Case], at_least: usize) {
    let count: usize = cases.iter().map(check).sum();
    assert!(count >= at_least, "only {count} strategies");
}

const SHAPES: [&[u64]; 3] = [&[12], &[4, 6], &[2, 4, 3]];

fn elementwise() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        let (x, ints, mask) = (f32s(shape), of(DType::I64, shape), of(DType::Bool, shape));
        for kind in UnaryKind::ALL.iter().copied() {
            let operand = match kind {
                UnaryKind::Not => (mask.clone(), Integer(0, 2)),
                UnaryKind::Log | UnaryKind::Log1p | UnaryKind::Sqrt | UnaryKind::Rsqrt | UnaryKind::Recip => {
                    (x.clone(), Positive)
                }
                _ => (x.clone(), Signed),
            };
            cases.push(case(Unary { kind }, std::slice::from_ref(&operand), &[]));
            if kind != UnaryKind::Not {
                cases.push(case(UnaryGrad { kind }, &[(x.clone(), Signed), operand], &[]));
            }
        }
        cases.push(case(Unary { kind: UnaryKind::Neg }, &[(ints.clone(), Integer(-9, 9))], &[]));
        for (scale, offset) in [(2.0, 0.0), (-1.5, 3.0)] {
            cases.push(case(Affine { scale, offset }, &[(x.clone(), Signed)], &[]));
        }
        cases.push(case(Affine { scale: 3.0, offset: 0.0 }, &[(ints.clone(), Integer(-9, 9))], &[]));
        cases.push(case(Affine { scale: 0.5, offset: 0.0 }, &[(ints.clone(), Integer(-9, 9))], &[]));
        let masked = [(mask.clone(), Integer(0, 2)), (x.clone(), Signed), (x.clone(), Signed)];
        cases.push(case(Select {}, &masked, &[]));
        for to in [DType::Bf16, DType::I32, DType::Bool] {
            cases.push(Case { tolerance: 0.0, ..case(Cast {}, &[(x.clone(), Signed)], &[of(to, shape)]) });
        }
        cases.push(case(Cast {}, &[(of(DType::Bf16, shape), Signed)], std::slice::from_ref(&x)));
        cases.push(case(Cast {}, &[(ints.clone(), Integer(-3, 3))], std::slice::from_ref(&x)));
        cases.push(case(Swiglu {}, &[(x.clone(), Signed), (x.clone(), Signed)], &[]));
        cases.push(case(SwigluGrad {}, &[(x.clone(), Signed), (x.clone(), Signed), (x.clone(), Signed)], &[]));
        let scalar = || (TensorType::scalar(DType::F32), Positive);
        let update = Adamw { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, cast: None };
        let tensors = [(x.clone(), Signed), (x.clone(), Signed), (x.clone(), Signed), (x.clone(), Positive)];
        let operands = [&tensors[..], &[scalar(), scalar(), scalar()]].concat();
        cases.push(case(update.clone(), &operands, &[]));
        let twice = Each { count: 2, op: Box::new(update.into()) };
        cases.push(case(twice, &[operands.clone(), operands].concat(), &[]));
        let squares = Each { count: 2, op: Box::new(SumSquares {}.into()) };
        cases.push(case(squares, &[(x.clone(), Signed), (x.clone(), Signed)], &[]));
        cases.push(case(Total {}, &[(x.clone(), Signed), (x.clone(), Signed), (x.clone(), Signed)], &[]));
    }
    cases
}

fn binary() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        for kind in BinaryKind::ALL.iter().copied() {
            if matches!(kind, BinaryKind::And | BinaryKind::Or) {
                let operand = (of(DType::Bool, shape), Integer(0, 2));
                cases.push(case(Binary { kind }, &[operand.clone(), operand], &[]));
                continue;
            }
            let (a, b) = ((f32s(shape), Positive), (f32s(shape), Positive));
            let scalar = (TensorType::scalar(DType::F32), Positive);
            cases.push(case(Binary { kind }, &[a.clone(), b], &[]));
            cases.push(case(Binary { kind }, &[a.clone(), scalar.clone()], &[]));
            cases.push(case(Binary { kind }, &[scalar, a], &[]));
            let (a, b) = ((of(DType::I64, shape), Integer(-20, 20)), (of(DType::I64, shape), Integer(1, 4)));
            cases.push(case(Binary { kind }, &[a, b], &[]));
        }
        for kind in CompareKind::ALL.iter().copied() {
            let a = (of(DType::I32, shape), Integer(0, 3));
            cases.push(case(Compare { kind }, &[a.clone(), a.clone()], &[]));
            cases.push(case(Compare { kind }, &[a, (TensorType::scalar(DType::I32), Integer(0, 3))], &[]));
        }
    }
    cases
}

fn values_from_nothing() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        cases.push(case(Constant { value: f64::NEG_INFINITY }, &[], &[f32s(shape)]));
        cases.push(case(Constant { value: 3.0 }, &[], &[of(DType::I64, shape)]));
        let count: u64 = shape.iter().product();
        cases.push(case(Literal { values: (0..count).map(|x| x as f64).collect() }, &[], &[f32s(shape)]));
        for dim in 0..shape.len() {
            cases.push(case(Iota { dim, start: 5 }, &[], &[of(DType::I64, shape)]));
        }
        let distributions = [
            Distribution::Normal { mean: 0.0, std: 1.0 },
            Distribution::Uniform { low: -1.0, high: 1.0 },
            Distribution::Bernoulli { p: 0.5 },
        ];
        for distribution in distributions {
            let op = Random { distribution, stream: 3, seed: 11, global: vec![], start: vec![] };
            let places = (of(DType::I64, &shape[..1]), Integer(0, shape[0] as i64));
            let read = [(TensorType::scalar(DType::I64), Integer(0, 100)), places];
            cases.extend((0..3).map(|count| case(op.clone(), &read[..count], &[f32s(shape)])));
        }
    }
    cases
}

fn movement() -> Vec<Case> {
    let x = |shape: &[u64]| (f32s(shape), Signed);
    let reshape = |from: &[u64], to: &[u64]| case(Reshape {}, &[x(from)], &[f32s(to)]);
    vec![
        reshape(&[4, 6, 2], &[24, 2]),
        reshape(&[24, 2], &[4, 6, 2]),
        reshape(&[4, 6], &[1, 4, 6, 1]),
        reshape(&[4, 6], &[8, 3]),
        reshape(&[2, 3, 4], &[6, 2, 2]),
        reshape(&[2, 2, 2, 2], &[16]),
        case(Transpose { permutation: vec![1, 0] }, &[x(&[4, 6])], &[]),
        case(Transpose { permutation: vec![2, 0, 1] }, &[x(&[2, 4, 6])], &[]),
        case(Transpose { permutation: vec![0, 2, 1, 3] }, &[(of(DType::I64, &[2, 3, 4, 2]), Integer(-9, 9))], &[]),
        case(Broadcast { dims: vec![1] }, &[x(&[6])], &[f32s(&[4, 6])]),
        case(Broadcast { dims: vec![0, 2] }, &[x(&[4, 1])], &[f32s(&[4, 3, 2])]),
        case(Broadcast { dims: vec![] }, &[x(&[])], &[f32s(&[4, 6])]),
        case(Slice { start: vec![0, 2], limit: vec![4, 5] }, &[x(&[4, 6])], &[]),
        case(Slice { start: vec![1, 0, 0], limit: vec![3, 4, 6] }, &[x(&[4, 4, 6])], &[]),
        case(Pad { low: vec![1, 0], high: vec![2, 0], value: 0.0 }, &[x(&[4, 6])], &[]),
        case(Pad { low: vec![0, 0], high: vec![0, 3], value: 7.0 }, &[x(&[4, 6])], &[]),
        case(Concat { dim: 0 }, &[x(&[4, 6]), x(&[2, 6])], &[]),
        case(Concat { dim: 1 }, &[x(&[4, 2, 2]), x(&[4, 3, 2]), x(&[4, 1, 2])], &[]),
    ]
}

fn reductions() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [ReduceOp::Sum, ReduceOp::Max] {
        for dims in [vec![0], vec![1], vec![2], vec![0, 2], vec![0, 1, 2]] {
            let op = Reduce { kind, dims };
            cases.push(case(op.clone(), &[(f32s(&[4, 3, 6]), Signed)], &[]));
            cases.push(case(op, &[(of(DType::I64, &[4, 3, 6]), Integer(-50, 50))], &[]));
        }
    }
    let widened =
        case(Reduce { kind: ReduceOp::Sum, dims: vec![0] }, &[(of(DType::Bf16, &[4, 6]), Signed)], &[f32s(&[6])]);
    cases.push(widened);
    cases.extend(SHAPES.map(|shape| case(SumSquares {}, &[(f32s(shape), Signed)], &[])));
    cases
}

fn contractions() -> Vec<Case> {
    let specs: [(&str, &[u64], &[u64]); 8] = [
        ("mk,kn->mn", &[4, 6], &[6, 8]),
        ("bsk,kn->bsn", &[2, 4, 6], &[6, 4]),
        ("bsk,nk->bsn", &[2, 4, 6], &[4, 6]),
        ("bsk,bsn->kn", &[2, 4, 6], &[2, 4, 4]),
        ("bhsd,bhtd->bhst", &[2, 2, 4, 3], &[2, 2, 6, 3]),
        ("bshd,bthd->bhst", &[2, 4, 2, 3], &[2, 6, 2, 3]),
        ("bshd,hdn->bsn", &[2, 3, 4, 2], &[4, 2, 6]),
        ("k,k->", &[12], &[12]),
    ];
    let mut cases = Vec::new();
    for (spec, lhs, rhs) in specs {
        cases.push(case(Matmul::new(spec), &[(f32s(lhs), Signed), (f32s(rhs), Signed)], &[]));
    }
    let (lhs, rhs) = (of(DType::Bf16, &[4, 6]), of(DType::Bf16, &[6, 8]));
    let (addend, bias) = ((f32s(&[4, 8]), Signed), (f32s(&[8]), Signed));
    let with_bias = Matmul { bias: true, ..Matmul::plain() };
    let result = f32s(&[4, 8]);
    let activated = Matmul { epilogue: Some(Epilogue::GeluTanh), ..with_bias.clone() };
    let operands = [(lhs.clone(), Signed), (rhs.clone(), Signed), bias.clone()];
    cases.push(case(activated, &operands, &[result.clone(), result.clone()]));
    let activated = Matmul { epilogue: Some(Epilogue::GeluTanh), ..Matmul::plain() };
    cases.push(case(activated, &operands[..2], std::slice::from_ref(&result)));
    let derived = Matmul { epilogue: Some(Epilogue::GeluTanhGrad), ..Matmul::plain() };
    cases.push(case(derived, &[(lhs.clone(), Signed), (rhs.clone(), Signed), addend.clone()], &[result]));
    let operands = [(lhs.clone(), Signed), (rhs.clone(), Signed), addend.clone(), bias];
    cases.push(case(with_bias, &operands, &[f32s(&[4, 8])]));
    cases.push(case(Matmul::plain(), &[(lhs.clone(), Signed), (rhs.clone(), Signed), addend], &[f32s(&[4, 8])]));
    cases.push(case(Matmul::plain(), &[(lhs, Signed), (rhs, Signed)], &[f32s(&[4, 8])]));
    cases
}

fn quantized() -> Vec<Case> {
    let (e4m3, e5m2) = (DType::F8e4m3, DType::F8e5m2);
    let (x, mut cases) = ((f32s(&[4, 48, 64]), Signed), Vec::new());
    for (to, lead) in [(e4m3, 0), (e4m3, 1), (e5m2, 1), (e5m2, 2)] {
        let scale = QuantizationScale { to, lead };
        cases.push(Case { tolerance: 0.0, ..case(scale, std::slice::from_ref(&x), &[]) });
        if lead < 2 {
            let operands = [x.clone(), (f32s(&[4, 48, 64][..lead]), Positive)];
            let results = [of(to, &[4, 48, 64]), of(to, &[4, 64, 48])];
            cases.push(Case { tolerance: 0.0, ..case(Quantize {}, &operands, &results) });
        }
    }
    for (spec, a, b, leads, result) in [
        ("bsk,nk->bsn", of(e4m3, &[4, 48, 64]), of(e4m3, &[96, 64]), [1, 0], f32s(&[4, 48, 96])),
        ("bsn,kn->bsk", of(e5m2, &[4, 48, 96]), of(e4m3, &[64, 96]), [1, 0], f32s(&[4, 48, 64])),
        ("bks,bns->kn", of(e4m3, &[4, 64, 48]), of(e5m2, &[4, 96, 48]), [1, 1], f32s(&[64, 96])),
    ] {
        let scales = [(&a, leads[0]), (&b, leads[1])].map(|(ty, lead)| (f32s(&ty.shape[..lead]), Positive));
        let operands = [&[(a, Signed), (b, Signed)], &scales[..]].concat();
        cases.push(case(ScaledMatmul { spec: spec.into() }, &operands, &[result]));
    }
    cases
}

fn lookups() -> Vec<Case> {
    let ids = |shape: &[u64], high| (of(DType::I64, shape), Integer(0, high));
    let summed = [(f32s(&[2, 6, 4]), Signed), ids(&[2, 6], 12), (f32s(&[12, 4]), Signed)];
    vec![
        case(Embedding { start: 0 }, &[(f32s(&[12, 4]), Signed), ids(&[2, 6], 12)], &[]),
        case(Embedding { start: 0 }, &[(f32s(&[6, 4]), Signed), ids(&[4], 6)], &[]),
        case(EmbeddingGrad { start: 0 }, &summed[..2], &[f32s(&[12, 4])]),
        case(EmbeddingGrad { start: 0 }, &summed, &[f32s(&[12, 4])]),
        case(EmbeddingGrad { start: 0 }, &[(f32s(&[4, 4]), Signed), ids(&[4], 6)], &[f32s(&[6, 4])]),
        case(Gather { dim: 1 }, &[(f32s(&[4, 6]), Signed), ids(&[4, 2], 6)], &[]),
        case(Gather { dim: 0 }, &[(f32s(&[3, 4, 2]), Signed), ids(&[6, 4, 2], 3)], &[]),
        case(ScatterAdd { dim: 1 }, &[(f32s(&[4, 6]), Signed), ids(&[4, 6], 8)], &[f32s(&[4, 8])]),
        case(ScatterAdd { dim: 0 }, &[(f32s(&[6, 4]), Signed), ids(&[6, 4], 3)], &[f32s(&[3, 4])]),
    ]
}

fn pictures() -> Vec<Case> {
    let x = |shape: &[u64]| (f32s(shape), Signed);
    let window = |stride, padding, dilation| Window { stride, low: padding, high: padding, dilation };
    // Filters that overlap and that do not, with padding and without, in groups, with gaps between them.
    type Convolve<'a> = (Window, u64, &'a [u64; 4], &'a [u64; 4]);
    let convolutions: [Convolve<'_>; 8] = [
        (Window::default(), 1, &[4, 5, 4, 2], &[6, 3, 2, 2]),
        (Window { high: [0, 2], ..window([2, 1], [1, 1], [1, 1]) }, 2, &[2, 6, 5, 4], &[4, 3, 3, 2]),
        (Window::default(), 1, &[2, 4, 6, 4], &[4, 1, 1, 4]),
        (window([2, 2], [0, 0], [1, 1]), 1, &[2, 8, 4, 2], &[4, 2, 2, 2]),
        (window([2, 2], [0, 0], [1, 1]), 1, &[2, 8, 4, 2], &[2, 1, 1, 2]),
        (window([3, 3], [0, 0], [1, 2]), 2, &[1, 6, 12, 4], &[8, 2, 2, 2]),
        (window([1, 2], [1, 2], [2, 2]), 1, &[2, 7, 7, 2], &[2, 3, 3, 2]),
        (Window::default(), 4, &[2, 5, 5, 4], &[4, 3, 3, 1]),
    ];
    let mut cases = Vec::new();
    for (window, groups, picture, filters) in convolutions {
        let op = Convolution { window: window.clone(), groups };
        let y = op.infer(&[f32s(picture), f32s(filters)], &[]).expect("a convolution").remove(0);
        let (y, picture, filters) = ((y, Signed), x(picture), x(filters));
        let transpose = ConvolutionTranspose { window: window.clone(), groups };
        cases.push(case(op, &[picture.clone(), filters.clone()], &[]));
        cases.push(case(transpose, &[y.clone(), filters.clone()], std::slice::from_ref(&picture.0)));
        cases.push(case(ConvolutionFilterGrad { window, groups }, &[y, picture], &[filters.0]));
    }
    for (kernel, window, size) in [
        ([2, 2], window([2, 2], [0, 0], [1, 1]), [8, 6]),
        ([3, 3], window([2, 2], [1, 1], [1, 1]), [5, 7]),
        ([2, 1], window([1, 3], [0, 0], [2, 1]), [4, 6]),
    ] {
        let picture = x(&[2, size[0], size[1], 4]);
        let op = MaxPool { kernel, window: window.clone() };
        let y = op.infer(std::slice::from_ref(&picture.0), &[]).expect("a pooling").remove(0);
        cases.push(case(op, std::slice::from_ref(&picture), &[]));
        cases.push(case(MaxPoolGrad { kernel, window }, &[(y, Signed), picture], &[]));
    }
    cases
}

fn ranked() -> Vec<Case> {
    let mut cases = Vec::new();
    for k in [1, 2, 6] {
        cases.push(case(TopK { k }, &[(f32s(&[4, 6]), Signed)], &[]));
        cases.push(case(TopK { k }, &[(of(DType::I64, &[2, 4, 6]), Integer(0, 4))], &[]));
    }
    for (dim, reverse) in [(0, false), (1, false), (1, true), (2, true)] {
        cases.push(case(Cumsum { dim, reverse }, &[(f32s(&[4, 3, 6]), Signed)], &[]));
        cases.push(case(Cumsum { dim, reverse }, &[(of(DType::I64, &[4, 3, 6]), Integer(-9, 9))], &[]));
    }
    cases
}

fn normalizations() -> Vec<Case> {
    let mut cases = Vec::new();
    for (leading, d) in [(&[4][..], 6), (&[2, 6], 4)] {
        let x = || (f32s(&[leading, &[d]].concat()), Signed);
        let (row, statistic) = (|| (f32s(&[d]), Positive), || (f32s(leading), Positive));
        cases.push(case(Softmax {}, &[x()], &[]));
        cases.push(case(LayerNorm { eps: 1e-5 }, &[x(), row(), row()], &[]));
        cases.push(case(LayerNormGrad {}, &[x(), x(), row(), statistic(), statistic()], &[]));
        cases.push(case(RmsNorm { eps: 1e-5 }, &[x(), row()], &[]));
        cases.push(case(RmsNormGrad {}, &[x(), x(), row(), statistic()], &[]));
    }
    cases
}

fn attention() -> Vec<Case> {
    let mut cases = Vec::new();
    // b, s, h, d, t, kv, e: full heads, grouped queries, more keys than queries.
    for [b, s, h, d, t, kv, e] in
        [[2, 4, 4, 2, 4, 4, 2], [2, 3, 4, 2, 3, 2, 3], [4, 2, 6, 2, 5, 3, 2], [2, 2, 4, 2, 2, 1, 2]]
    {
        let leads = [(false, None), (true, None), (true, Some(1))].map(|(causal, lead)| (causal, lead, None));
        let parts = [2, 4].into_iter().filter(|parts| s % parts == 0).map(|parts| (true, Some(1), Some(parts)));
        for (causal, lead, reversed) in leads.into_iter().chain(parts) {
            let (q, k, v) =
                ((f32s(&[b, s, h, d]), Signed), (f32s(&[b, t, kv, d]), Signed), (f32s(&[b, t, kv, e]), Signed));
            let (o, lse) = ((f32s(&[b, s, h, e]), Signed), (f32s(&[b, h, s]), Positive));
            cases.push(case(Attention { causal, scale: 0.7, lead, reversed }, &[q.clone(), k.clone(), v.clone()], &[]));
            let grad = AttentionGrad { causal, scale: 0.7, lead, reversed, deterministic: false };
            cases.push(case(grad, &[o.clone(), q, k, v, o, lse], &[]));
        }
    }
    for inverse in [false, true] {
        let table = || (f32s(&[4, 3]), Signed);
        cases.push(case(Rotary { inverse }, &[(f32s(&[2, 4, 2, 6]), Signed), table(), table()], &[]));
    }
    cases
}

fn cross_entropy() -> Vec<Case> {
    let mut cases = Vec::new();
    for leading in [&[4][..], &[2, 6]] {
        let logits = || (f32s(&[leading, &[12]].concat()), Signed);
        let labels = || (of(DType::I64, leading), Integer(-1, 11));
        let row = || (f32s(leading), Positive);
        // Of twelve logits all count, or the last of the last shards do not.
        for classes in [None, Some(11)] {
            cases.push(case(CrossEntropy { start: 0, classes }, &[logits(), labels()], &[]));
            let operands = [logits(), labels(), row(), row(), row()];
            cases.push(case(CrossEntropyGrad { start: 0, classes }, &operands, &[]));
        }
    }
    cases
}

/// One test per family, each with the fewest strategies it must have tried.
macro_rules! families {
    ($($name:ident $at_least:literal,)*) => {
        mod families {
            $(#[test]
            fn $name() {
                super::check_all(&super::$name(), $at_least);
            })*
        }

        fn every_case() -> Vec<Case> {
            [$($name()),*].into_iter().flatten().collect()
        }
    };
}

families! {
    elementwise 3000,
    binary 2000,
    values_from_nothing 300,
    movement 400,
    reductions 500,
    contractions 1000,
    quantized 300,
    lookups 300,
    pictures 1000,
    ranked 200,
    normalizations 150,
    attention 200,
    cross_entropy 100,
}

#[test]
fn every_operation_has_a_case() {
    let variant = |case: Case| match serde_json::to_value(case.op) {
        Ok(serde_json::Value::Object(map)) => map.into_iter().next().map(|(name, _)| name),
        _ => None,
    };
    let mut seen: BTreeSet<String> = every_case().into_iter().filter_map(variant).collect();
    // Regions are made of parts, and stand in programs only.
    seen.extend(["input", "parameter", "state", "fused"].map(str::to_string));
    let missing: Vec<_> = Op::NAMES.iter().filter(|name| !seen.contains(**name)).collect();
    assert!(missing.is_empty(), "no case of {missing:?}");
}
