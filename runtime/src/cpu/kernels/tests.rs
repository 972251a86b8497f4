//! The kernels against naive references, in f32 and bf16.

use crate::compute_op;
use half::bf16;
use shardc_ir::ops::*;
use shardc_ir::{DType, HostTensor, Op, TensorType};

/// Numbers between -1 and 1, other ones for every stream.
fn numbers(stream: u64, count: usize) -> Vec<f32> {
    let block = |index| crate::random::block([1, 2], stream, index).map(|x| (x >> 8) as f32 / 8_388_608.0 - 1.0);
    (0..count.div_ceil(4) as u64).flat_map(block).take(count).collect()
}

fn random(stream: u64, shape: &[u64]) -> HostTensor {
    HostTensor::from_f32(shape, &numbers(stream, shape.iter().product::<u64>() as usize))
}

fn narrow(tensor: &HostTensor) -> HostTensor {
    let bytes = floats(tensor).iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    HostTensor { ty: tensor.ty.with_dtype(DType::Bf16), bytes }
}

fn floats(tensor: &HostTensor) -> Vec<f32> {
    match tensor.ty.dtype {
        DType::Bf16 => tensor.bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
        _ => tensor.bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
    }
}

#[track_caller]
fn run(op: impl Into<Op>, operands: &[HostTensor], declared: &[TensorType]) -> Vec<HostTensor> {
    let op = op.into();
    compute_op(&op, operands, declared).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn close(actual: &[f32], expect: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expect.len());
    for (index, (actual, expect)) in actual.iter().zip(expect).enumerate() {
        let difference = (f64::from(*actual) - expect).abs();
        assert!(difference <= tolerance * (1.0 + expect.abs()), "element {index} is {actual}, not {expect}");
    }
}

/// A contraction by its definition: a sum over all indices.
fn naive_contraction(op: &Matmul, lhs: &HostTensor, rhs: &HostTensor) -> Vec<f64> {
    let letters = op.letters().unwrap_or_else(|error| panic!("{error}"));
    let sizes = op.sizes(&[lhs.ty.clone(), rhs.ty.clone()]).unwrap_or_else(|error| panic!("{error}"));
    let (a, b) = (floats(lhs), floats(rhs));
    let size = |letter: &char| sizes.iter().find(|(l, _)| l == letter).map_or(1, |(_, size)| *size as usize);
    let mut out = vec![0.0; letters[2].iter().map(size).product()];
    let total: usize = sizes.iter().map(|(_, size)| *size as usize).product();
    for mut rest in 0..total {
        let mut at = std::collections::BTreeMap::new();
        for (letter, size) in &sizes {
            at.insert(*letter, rest % *size as usize);
            rest /= *size as usize;
        }
        let place = |letters: &[char]| letters.iter().fold(0, |place, letter| place * size(letter) + at[letter]);
        out[place(&letters[2])] += f64::from(a[place(&letters[0])]) * f64::from(b[place(&letters[1])]);
    }
    out
}

#[test]
fn contractions() {
    let check = |spec: &str, lhs: &[u64], rhs: &[u64]| {
        let op = Matmul::new(spec);
        let (lhs, rhs) = (random(1, lhs), random(2, rhs));
        close(
            &floats(&run(op.clone(), &[lhs.clone(), rhs.clone()], &[])[0]),
            &naive_contraction(&op, &lhs, &rhs),
            1e-6,
        );
        let (lhs, rhs) = (narrow(&lhs), narrow(&rhs));
        let expect = naive_contraction(&op, &lhs, &rhs);
        let made = run(op.clone(), &[lhs.clone(), rhs.clone()], &[]);
        assert_eq!(made[0].ty.dtype, DType::Bf16);
        close(&floats(&made[0]), &expect, 1e-2);
        // Declared in f32, the products are not rounded to bf16.
        let wide = made[0].ty.with_dtype(DType::F32);
        close(&floats(&run(op, &[lhs, rhs], &[wide])[0]), &expect, 1e-6);
    };
    check("mk,kn->mn", &[3, 5], &[5, 4]);
    check("mk,kn->nm", &[3, 5], &[5, 4]);
    check("km,nk->mn", &[5, 3], &[4, 5]);
    check("bsk,kn->bsn", &[2, 3, 5], &[5, 4]);
    check("bsk,bsn->kn", &[2, 3, 5], &[2, 3, 4]);
    check("bshd,bthd->bhst", &[2, 3, 2, 4], &[2, 5, 2, 4]);
    check("bhst,bthd->bshd", &[2, 2, 3, 5], &[2, 5, 2, 4]);
    check("bshd,hdn->bsn", &[2, 3, 2, 4], &[2, 4, 5]);
    check("bskj,jkn->bsn", &[2, 3, 4, 5], &[5, 4, 2]);
    check("k,k->", &[7], &[7]);
    check("m,n->mn", &[3], &[4]);
    check("bk,bk->b", &[3, 4], &[3, 4]);
    // Large enough for several threads.
    check("mk,kn->mn", &[130, 64], &[64, 48]);
}

/// One query's attention by its definition; the output and the log-sum-exp.
fn naive_attention(
    causal: bool,
    scale: f64,
    bias: Option<&HostTensor>,
    [q, k, v]: [&HostTensor; 3],
) -> (Vec<f64>, Vec<f64>) {
    let added = |at: [usize; 4]| {
        let index =
            |shape: &[u64]| at.iter().zip(shape).fold(0, |sum, (at, size)| sum * *size as usize + at % *size as usize);
        bias.map_or(0.0, |bias| f64::from(floats(bias)[index(&bias.ty.shape)]))
    };
    let [b, s, h, d] = [0, 1, 2, 3].map(|dim| q.ty.shape[dim] as usize);
    let (t, kv, e) = (k.ty.shape[1] as usize, k.ty.shape[2] as usize, v.ty.shape[3] as usize);
    let [q, k, v] = [q, k, v].map(|x| floats(x).into_iter().map(f64::from).collect::<Vec<_>>());
    let (mut o, mut lse) = (vec![0.0; b * s * h * e], vec![0.0; b * h * s]);
    for (batch, head, row) in (0..b * h * s).map(|at| (at / (h * s), at / s % h, at % s)) {
        let of = |key: usize| (batch * t + key) * kv + head / (h / kv);
        let query = ((batch * s + row) * h + head) * d;
        let seen = if causal { row + 1 + t - s } else { t };
        let product = |key: usize| (0..d).map(|at| q[query + at] * k[of(key) * d + at]).sum::<f64>();
        let score = |key: usize| product(key) * scale + added([batch, head, row, key]);
        let total: f64 = (0..seen).map(|key| score(key).exp()).sum();
        lse[(batch * h + head) * s + row] = total.ln();
        for at in 0..e {
            let out = &mut o[((batch * s + row) * h + head) * e + at];
            *out = (0..seen).map(|key| score(key).exp() / total * v[of(key) * e + at]).sum();
        }
    }
    (o, lse)
}

#[test]
fn attention_and_its_derivative() {
    let check_biased = |causal: bool, [b, s, h, d, t, kv, e]: [u64; 7], bias: Option<[u64; 3]>| {
        let (q, k, v) = (random(1, &[b, s, h, d]), random(2, &[b, t, kv, d]), random(3, &[b, t, kv, e]));
        let scale = 0.6;
        let bias = bias.map(|[b, h, s]| random(5, &[b, h, s, t]));
        let with = |operands: &[HostTensor], bias: &Option<HostTensor>| [operands, bias.as_slice()].concat();
        let made = run(
            Attention { causal, scale, lead: None, reversed: None },
            &with(&[q.clone(), k.clone(), v.clone()], &bias),
            &[],
        );
        let (o, lse) = naive_attention(causal, scale, bias.as_ref(), [&q, &k, &v]);
        close(&floats(&made[0]), &o, 1e-5);
        close(&floats(&made[1]), &lse, 1e-5);
        let narrowed = [narrow(&q), narrow(&k), narrow(&v)];
        let narrowed = with(&narrowed, &bias.as_ref().map(narrow));
        close(&floats(&run(Attention { causal, scale, lead: None, reversed: None }, &narrowed, &[])[0]), &o, 3e-2);
        if s > 8 {
            return;
        }
        // The derivative of the sum of o * weights, by central differences.
        let weights = random(4, &[b, s, h, e]);
        let operands = [weights.clone(), q.clone(), k.clone(), v.clone(), made[0].clone(), made[1].clone()];
        let operands = with(&operands, &bias);
        let grads =
            run(AttentionGrad { causal, scale, lead: None, reversed: None, deterministic: false }, &operands, &[]);
        let dot = |x: [&HostTensor; 3]| -> f64 {
            let (o, _) = naive_attention(causal, scale, bias.as_ref(), x);
            o.iter().zip(floats(&weights)).map(|(o, w)| o * f64::from(w)).sum()
        };
        for (which, grad) in grads.iter().enumerate() {
            let count = grad.ty.elements() as usize;
            let difference = |at: usize| {
                let moved = |by: f32| {
                    let mut x = [q.clone(), k.clone(), v.clone()];
                    let mut values = floats(&x[which]);
                    values[at] += by;
                    x[which] = HostTensor::from_f32(x[which].ty.shape.clone(), &values);
                    dot([&x[0], &x[1], &x[2]])
                };
                (moved(1.0 / 256.0) - moved(-1.0 / 256.0)) * 128.0
            };
            close(&floats(grad), &(0..count).map(difference).collect::<Vec<_>>(), 1e-4);
        }
    };
    for (causal, bias) in [(false, [2, 1, 1]), (false, [1, 4, 3]), (true, [2, 4, 3]), (true, [1, 1, 1])] {
        check_biased(causal, [2, 3, 4, 2, 3, 2, 2], Some(bias));
    }
    let check = |causal: bool, sizes: [u64; 7]| check_biased(causal, sizes, None);
    check(false, [2, 3, 2, 2, 3, 2, 2]);
    check(true, [1, 3, 4, 2, 3, 2, 3]);
    check(true, [1, 2, 2, 3, 4, 1, 2]);
    // More queries than one block.
    check(true, [1, 300, 1, 4, 300, 1, 4]);
    check(false, [1, 300, 1, 4, 20, 1, 4]);
}

/// Every function's derivative against central differences of the function, in f64 by way of f32.
#[test]
fn derivatives_of_elementwise_functions() {
    use super::elementwise::{derivative, function};
    for kind in UnaryKind::ALL.iter().copied().filter(|kind| *kind != UnaryKind::Detach) {
        let (f, derivative) = (function(kind), derivative(kind));
        for x in [0.3f32, 0.7, 1.6, 2.4] {
            let step = 1.0 / 128.0;
            let expect = (f(x + step) - f(x - step)) / (2.0 * step);
            let actual = derivative(x);
            assert!((actual - expect).abs() < 2e-3 * (1.0 + expect.abs()), "{kind:?} at {x}: {actual}, {expect}");
        }
    }
}

#[test]
fn values_of_elementwise_functions() {
    let check = |kind, x: &[f32], expect: &[f64]| {
        let x = HostTensor::from_f32([x.len() as u64], x);
        close(&floats(&run(Unary { kind }, &[x], &[])[0]), expect, 1e-6);
    };
    // Values of PyTorch's functions in f64.
    check(UnaryKind::Gelu, &[-1.0, 0.5, 2.0], &[-0.158_655_253_931_457, 0.345_731_230_636_909, 1.954_499_736_103_642]);
    check(UnaryKind::GeluTanh, &[-1.0, 0.5, 2.0], &[-0.158_808_009_2, 0.345_714_010_3, 1.954_597_694_1]);
    check(UnaryKind::Silu, &[-1.0, 2.0], &[-0.268_941_421_369_995, 1.761_594_155_955_765]);
    check(UnaryKind::Erf, &[0.5, -1.0], &[0.520_499_877_813_047, -0.842_700_792_949_715]);
    check(UnaryKind::Round, &[0.5, 1.5, -2.5], &[0.0, 2.0, -2.0]);
    check(UnaryKind::Sign, &[-3.0, 0.0, 2.0], &[-1.0, 0.0, 1.0]);
}

#[test]
fn remainders_have_the_sign_of_the_divisor() {
    let (a, b) = (HostTensor::from_i64([4], &[7, -7, 7, -7]), HostTensor::from_i64([4], &[3, 3, -3, -3]));
    let made = run(Binary { kind: BinaryKind::Rem }, &[a, b], &[]);
    assert_eq!(made[0], HostTensor::from_i64([4], &[1, 2, -2, -1]));
    let (a, b) = (HostTensor::from_f32([2], &[7.0, -7.0]), HostTensor::from_f32([2], &[-3.0, 3.0]));
    assert_eq!(floats(&run(Binary { kind: BinaryKind::Rem }, &[a, b], &[])[0]), [-2.0, 2.0]);
}

#[test]
fn a_nan_is_not_lost_in_a_maximum() {
    let x = HostTensor::from_f32([3], &[1.0, f32::NAN, 2.0]);
    assert!(floats(&run(Reduce { kind: ReduceOp::Max, dims: vec![0] }, std::slice::from_ref(&x), &[])[0])[0].is_nan());
    assert!(floats(&run(Unary { kind: UnaryKind::Relu }, &[x], &[])[0])[1].is_nan());
}

/// Of a shard of which no entry counts there is nothing to add, whatever the others have.
#[test]
fn entries_that_are_all_hidden_add_nothing() {
    let logits = HostTensor::from_f32([1, 2], &[f32::NEG_INFINITY; 2]);
    let made = run(CrossEntropy { start: 2, classes: None }, &[logits, HostTensor::from_i64([1], &[0])], &[]);
    assert_eq!(floats(&made[0]), [f32::NEG_INFINITY]);
}

#[test]
fn the_largest_are_those_that_are_no_numbers() {
    for nan in [f32::NAN, -f32::NAN] {
        let x = HostTensor::from_f32([3], &[1.0, nan, 2.0]);
        let made = run(TopK { k: 2 }, &[x], &[]);
        assert_eq!(made[1], HostTensor::from_i64([2], &[1, 2]));
    }
}

/// A running sum in f32 would be 1.7% short.
#[test]
fn sums_of_many_rows_keep_their_digits() {
    let x = HostTensor::from_f32([1 << 21, 1], &vec![0.1; 1 << 21]);
    let sum = floats(&run(Reduce { kind: ReduceOp::Sum, dims: vec![0] }, &[x], &[])[0])[0];
    assert!((sum / 209_715.2 - 1.0).abs() < 1e-6, "{sum}");
}

#[test]
fn cross_entropy_is_stable_and_ignores_labels_outside() {
    let logits = HostTensor::from_f32([3, 2], &[1000.0, 998.0, 0.0, 0.0, -1.0, 1.0]);
    let labels = HostTensor::from_i64([3], &[0, -1, 5]);
    let made = run(CrossEntropy { start: 4, classes: None }, &[logits.clone(), labels.clone()], &[]);
    close(&floats(&made[0]), &[1_000.126_928_011, std::f64::consts::LN_2, 1.126_928_011], 1e-6);
    assert_eq!(floats(&made[1]), [0.0, 0.0, 1.0]);
    let ones = HostTensor::from_f32([3], &[1.0; 3]);
    let minus = HostTensor::from_f32([3], &[-1.0; 3]);
    let operands = [logits, labels, made[0].clone(), ones, minus];
    let grad = run(CrossEntropyGrad { start: 4, classes: None }, &operands, &[]);
    close(&floats(&grad[0]), &[0.880_797, 0.119_203, 0.5, 0.5, 0.119_203, 0.880_797 - 1.0], 1e-4);
}

#[test]
fn padding_of_logits_counts_for_nothing() {
    let logits = HostTensor::from_f32([1, 4], &[1.0, 3.0, 100.0, 100.0]);
    let labels = HostTensor::from_i64([1], &[1]);
    let made = run(CrossEntropy { start: 0, classes: Some(2) }, &[logits.clone(), labels.clone()], &[]);
    close(&floats(&made[0]), &[3.126_928_011], 1e-6);
    assert_eq!(floats(&made[1]), [3.0]);
    let one = |x: f32| HostTensor::from_f32([1], &[x]);
    let operands = [logits, labels, made[0].clone(), one(1.0), one(-1.0)];
    let grad = run(CrossEntropyGrad { start: 0, classes: Some(2) }, &operands, &[]);
    close(&floats(&grad[0]), &[0.119_203, -0.119_203, 0.0, 0.0], 1e-4);
}

#[test]
fn a_product_adds_a_summand_and_a_bias() {
    let (a, b) = (HostTensor::from_f32([1, 2], &[1.0, 2.0]), HostTensor::from_f32([2, 2], &[1.0, 2.0, 3.0, 4.0]));
    let (addend, bias) = (HostTensor::from_f32([1, 2], &[0.5, -0.5]), HostTensor::from_f32([2], &[10.0, 20.0]));
    let made = run(Matmul::plain(), &[a.clone(), b.clone(), addend.clone()], &[]);
    assert_eq!(floats(&made[0]), [7.5, 9.5]);
    let with_bias = Matmul { bias: true, ..Matmul::plain() };
    assert_eq!(floats(&run(with_bias.clone(), &[a.clone(), b.clone(), bias.clone()], &[])[0]), [17.0, 30.0]);
    assert_eq!(floats(&run(with_bias, &[a, b, addend, bias], &[])[0]), [17.5, 29.5]);
}

#[test]
fn adamw_is_the_published_update() {
    let tensor = |x: f32| HostTensor::from_f32([1], &[x]);
    let scalar = |x: f32| HostTensor::from_f32([], &[x]);
    let op = Adamw { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, cast: Some(DType::Bf16) };
    let operands = [tensor(2.0), tensor(3.0), tensor(0.5), tensor(0.25), scalar(0.5), scalar(0.01), scalar(2.0)];
    let made = run(op, &operands, &[]);
    let (m, v) = (0.9 * 0.5 + 0.1 * 1.5, 0.99 * 0.25 + 0.01 * 2.25f64);
    let (m_hat, v_hat) = (m / (1.0 - 0.81), v / (1.0 - 0.9801));
    close(&floats(&made[0]), &[2.0 * (1.0 - 0.001) - 0.01 * m_hat / (v_hat.sqrt() + 1e-8)], 1e-6);
    close(&floats(&made[1]), &[m], 1e-6);
    close(&floats(&made[2]), &[v], 1e-6);
    let rounded = bf16::from_f32(floats(&made[0])[0]);
    assert_eq!(made[3].bytes, rounded.to_le_bytes());
}

#[test]
fn updates_by_what_is_not_finite_change_nothing() {
    let [p, g, m, v] = [1, 2, 3, 4].map(|stream| random(stream, &[5]));
    let op = Adamw { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, cast: Some(DType::F32) };
    let scalar = |value| HostTensor::from_f32([], &[value]);
    for scale in [f32::NAN, f32::INFINITY] {
        let operands = [p.clone(), g.clone(), m.clone(), v.clone(), scalar(scale), scalar(0.1), scalar(2.0)];
        assert_eq!(run(op.clone(), &operands, &[]), [p.clone(), m.clone(), v.clone(), p.clone()]);
    }
}

#[test]
fn normalizations() {
    let (x, gamma, beta) = (random(1, &[4, 6]), random(2, &[6]), random(3, &[6]));
    let (values, scale, shift) = (floats(&x), floats(&gamma), floats(&beta));
    let rows = values.chunks_exact(6);
    let (mut layer, mut rms) = (Vec::new(), Vec::new());
    for row in rows {
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / 6.0;
        let square = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 6.0;
        for (at, x) in row.iter().map(|x| f64::from(*x)).enumerate() {
            let (scale, shift) = (f64::from(scale[at]), f64::from(shift[at]));
            layer.push((x - mean) / (square - mean * mean + 1e-5).sqrt() * scale + shift);
            rms.push(x / (square + 1e-5).sqrt() * scale);
        }
    }
    close(&floats(&run(LayerNorm { eps: 1e-5 }, &[x.clone(), gamma.clone(), beta], &[])[0]), &layer, 1e-5);
    close(&floats(&run(RmsNorm { eps: 1e-5 }, &[x, gamma], &[])[0]), &rms, 1e-5);
}
