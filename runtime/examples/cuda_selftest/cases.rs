//! The cases: every kernel, at shapes where each of its paths is taken.

use super::Case;
use super::regions::{groups, regions, row_sums, step};
use shardc_ir::ops::*;
use shardc_ir::{DType, Op, TensorType};

pub fn t(dtype: DType, shape: &[u64]) -> TensorType {
    TensorType::new(dtype, shape)
}

pub fn case(op: impl Into<Op>, operands: &[TensorType], results: &[TensorType]) -> Case {
    Case { op: op.into(), operands: operands.to_vec(), results: results.to_vec() }
}

use DType::{Bf16, Bool, F16, F32, I32, I64};

pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for f in [F32, Bf16] {
        elementwise_cases(f, &mut all);
        row_cases(f, &mut all);
        movement_cases(f, &mut all);
        matmul_cases(f, &mut all);
        picture_cases(f, &mut all);
        epilogue_cases(f, &mut all);
        sibling_cases(f, &mut all);
    }
    for f in [F32, Bf16, F16] {
        attention_cases(f, &mut all);
    }
    quantized_cases(&mut all);
    let (flags, one) = (t(Bool, &[64]), t(Bool, &[64]));
    for kind in [BinaryKind::And, BinaryKind::Or] {
        all.push(case(Binary { kind }, &[flags.clone(), one.clone()], &[one.clone()]));
    }
    all.push(case(Unary { kind: UnaryKind::Not }, &[flags.clone()], &[one]));
    for i in [I64, I32] {
        let ty = t(i, &[64]);
        for kind in [BinaryKind::Add, BinaryKind::Mul, BinaryKind::Max] {
            all.push(case(Binary { kind }, &[ty.clone(), ty.clone()], &[ty.clone()]));
        }
        all.push(case(Compare { kind: CompareKind::Lt }, &[ty.clone(), ty.clone()], &[flags.clone()]));
        all.push(case(Affine { scale: 1.0, offset: 1.0 }, &[ty.clone()], &[ty.clone()]));
        all.push(case(Iota { dim: 0, start: 3 }, &[], &[ty]));
    }
    all
}

fn elementwise_cases(f: DType, all: &mut Vec<Case>) {
    let (ty, odd) = (t(f, &[64, 40]), t(f, &[7, 9]));
    for kind in UnaryKind::ALL.iter().copied().filter(|kind| *kind != UnaryKind::Not) {
        all.push(case(Unary { kind }, &[ty.clone()], &[ty.clone()]));
        all.push(case(UnaryGrad { kind }, &[odd.clone(), odd.clone()], &[odd.clone()]));
    }
    for kind in BinaryKind::ALL.iter().copied().filter(|kind| !matches!(kind, BinaryKind::And | BinaryKind::Or)) {
        all.push(case(Binary { kind }, &[ty.clone(), ty.clone()], &[ty.clone()]));
    }
    for kind in CompareKind::ALL.iter().copied() {
        all.push(case(Compare { kind }, &[ty.clone(), ty.clone()], &[t(Bool, &[64, 40])]));
    }
    let scalar = t(f, &[]);
    all.push(case(Binary { kind: BinaryKind::Mul }, &[ty.clone(), scalar.clone()], &[ty.clone()]));
    all.push(case(Binary { kind: BinaryKind::Sub }, &[scalar.clone(), ty.clone()], &[ty.clone()]));
    all.push(case(Binary { kind: BinaryKind::Add }, &[scalar.clone(), scalar.clone()], &[scalar]));
    all.push(case(Affine { scale: 2.0, offset: 1.0 }, &[odd.clone()], &[odd]));
    all.push(case(Select {}, &[t(Bool, &[64]), t(f, &[64]), t(f, &[64])], &[t(f, &[64])]));
    for g in [F32, Bf16, I64, I32, Bool] {
        all.push(case(Cast {}, &[t(f, &[66])], &[t(g, &[66])]));
        all.push(case(Cast {}, &[t(g, &[66])], &[t(f, &[66])]));
    }
    for value in [1.5, 0.0, f64::NEG_INFINITY] {
        all.push(case(Constant { value }, &[], &[t(f, &[66])]));
    }
    all.push(case(Literal { values: vec![1.0, 2.5, -3.0] }, &[], &[t(f, &[3])]));
    all.push(case(Iota { dim: 0, start: 3 }, &[], &[t(f, &[16, 3])]));
    for distribution in [
        Distribution::Normal { mean: 0.5, std: 2.0 },
        Distribution::Uniform { low: -1.0, high: 3.0 },
        Distribution::Bernoulli { p: 0.3 },
    ] {
        let random = Random { distribution, stream: 7, seed: 1 << 40, global: vec![9, 50], start: vec![2, 10] };
        all.push(case(random.clone(), &[], &[t(f, &[6, 33])]));
        all.push(case(random.clone(), &[t(I64, &[])], &[t(f, &[6, 33])]));
        let placed = Random { start: vec![0, 10], ..random };
        all.push(case(placed, &[t(I64, &[]), t(I64, &[6])], &[t(f, &[6, 33])]));
    }
    all.push(case(Swiglu {}, &[ty.clone(), ty.clone()], &[ty.clone()]));
    all.push(case(SwigluGrad {}, &[ty.clone(), ty.clone(), ty.clone()], &[ty.clone(), ty.clone()]));
    let (x, table) = (t(f, &[2, 8, 4, 32]), t(F32, &[8, 16]));
    for inverse in [false, true] {
        all.push(case(Rotary { inverse }, &[x.clone(), table.clone(), table.clone()], &[x.clone()]));
    }
    let (p, g, s) = (t(F32, &[40]), t(f, &[40]), t(F32, &[]));
    let adamw = Adamw { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, cast: None };
    let operands = [p.clone(), g, p.clone(), p.clone(), s.clone(), s.clone(), s.clone()];
    all.push(case(adamw.clone(), &operands, &vec![p.clone(); 3]));
    let casting = Adamw { cast: Some(Bf16), ..adamw.clone() };
    all.push(case(casting.clone(), &operands, &[p.clone(), p.clone(), p.clone(), p.with_dtype(Bf16)]));
    // More tensors than one launch takes, of several sizes and of two widths of vectors.
    let sizes: Vec<u64> = (0..37).map(|index| [40, 7, 30_000, 1, 8192][index % 5]).collect();
    let count = sizes.len();
    let gradients: Vec<TensorType> = sizes.iter().map(|size| t(f, &[*size])).collect();
    all.push(case(Each { count, op: Box::new(SumSquares {}.into()) }, &gradients, &vec![s.clone(); count]));
    let narrow: Vec<TensorType> = sizes.iter().map(|size| t(Bf16, &[*size])).collect();
    all.push(case(Each { count, op: Box::new(Cast {}.into()) }, &gradients, &narrow));
    all.push(case(Total {}, &vec![s.clone(); 150], std::slice::from_ref(&s)));
    let of = |size: &u64| {
        let (p, g) = (t(F32, &[*size]), t(f, &[*size]));
        [p.clone(), g, p.clone(), p, s.clone(), s.clone(), s.clone()]
    };
    let operands: Vec<TensorType> = sizes.iter().flat_map(of).collect();
    let results: Vec<TensorType> = sizes.iter().flat_map(|size| vec![t(F32, &[*size]); 3]).collect();
    all.push(case(Each { count, op: Box::new(adamw.into()) }, &operands, &results));
    let results: Vec<TensorType> = results.chunks(3).flat_map(|of| [of, &[of[0].with_dtype(Bf16)]].concat()).collect();
    all.push(case(Each { count, op: Box::new(casting.into()) }, &operands, &results));
}

/// Products that make an activation or its derivative; the last of them in a form for which the library is not
/// asked.
fn epilogue_cases(f: DType, all: &mut Vec<Case>) {
    for (spec, lhs, rhs, shape) in [
        ("bsk,kn->bsn", vec![2, 256, 64], vec![64, 512], vec![2, 256, 512]),
        ("bsk,nk->bsn", vec![2, 256, 64], vec![512, 64], vec![2, 256, 512]),
        ("mk,nk->nm", vec![256, 64], vec![512, 64], vec![512, 256]),
    ] {
        let (lhs, rhs, y) = (t(f, &lhs), t(f, &rhs), t(f, &shape));
        let bias = t(f, &shape[shape.len() - 1..]);
        for (epilogue, bias, place, results) in [
            (Epilogue::GeluTanh, None, None, 1),
            (Epilogue::GeluTanh, None, None, 2),
            (Epilogue::GeluTanh, Some(bias.clone()), None, 1),
            (Epilogue::GeluTanh, Some(bias), None, 2),
            (Epilogue::GeluTanhGrad, None, Some(y.clone()), 1),
        ] {
            let op = Matmul { bias: bias.is_some(), epilogue: Some(epilogue), ..Matmul::new(spec) };
            let operands: Vec<_> = [lhs.clone(), rhs.clone()].into_iter().chain(place).chain(bias).collect();
            all.push(case(op, &operands, &vec![y.clone(); results]));
        }
    }
}

/// Linear layers in 8-bit floats: scales, quantised tensors, and the three products of a layer. Operands of the
/// products are bytes that another quantisation made.
fn quantized_cases(all: &mut Vec<Case>) {
    for (x, lead) in [(t(Bf16, &[3, 96, 208]), 1), (t(Bf16, &[256, 1040]), 0), (t(F32, &[2, 2, 64, 32]), 2)] {
        for to in [DType::F8e4m3, DType::F8e5m2] {
            let scale = t(F32, &x.shape[..lead]);
            let mut exchanged = x.with_dtype(to);
            exchanged.shape.swap(x.rank() - 2, x.rank() - 1);
            all.push(case(QuantizationScale { to, lead }, &[x.clone()], &[scale.clone()]));
            all.push(case(Quantize {}, &[x.clone(), scale], &[x.with_dtype(to), exchanged]));
        }
    }
    let (e4m3, e5m2) = (DType::F8e4m3, DType::F8e5m2);
    // Codes that were gathered along an inner dimension.
    for columns in [64, 6] {
        let permutation = vec![1, 0, 2];
        all.push(case(Transpose { permutation }, &[t(e4m3, &[4, 96, columns])], &[t(e4m3, &[96, 4, columns])]));
    }
    for (spec, a, b, scales, y) in [
        ("bsk,nk->bsn", t(e4m3, &[2, 256, 512]), t(e4m3, &[384, 512]), [1, 0], t(Bf16, &[2, 256, 384])),
        ("bsn,kn->bsk", t(e5m2, &[2, 256, 384]), t(e4m3, &[512, 384]), [1, 0], t(Bf16, &[2, 256, 512])),
        ("bks,bns->kn", t(e4m3, &[3, 512, 256]), t(e5m2, &[3, 384, 256]), [1, 1], t(F32, &[512, 384])),
        ("bks,bns->nk", t(e4m3, &[2, 512, 256]), t(e5m2, &[2, 384, 256]), [1, 1], t(F32, &[384, 512])),
        ("mk,nk->mn", t(e4m3, &[16, 64]), t(e4m3, &[48, 64]), [0, 0], t(F32, &[16, 48])),
    ] {
        let scale = |ty: &TensorType, lead: usize| t(F32, &ty.shape[..lead]);
        let operands = [a.clone(), b.clone(), scale(&a, scales[0]), scale(&b, scales[1])];
        all.push(case(ScaledMatmul { spec: spec.to_string() }, &operands, &[y]));
    }
}

/// Products of one operand beside each other, with biases and activations.
fn sibling_cases(f: DType, all: &mut Vec<Case>) {
    for (spec, shared, own, shape, biases) in [
        ("bsk,kn->bsn", vec![2, 256, 64], vec![64, 512], vec![2, 256, 512], 1),
        ("bsk,kn->bsn", vec![2, 256, 64], vec![64, 72], vec![2, 256, 72], 0),
        ("bsk,nk->bsn", vec![2, 256, 64], vec![512, 64], vec![2, 256, 512], 0),
        ("bsk,bsn->kn", vec![2, 256, 64], vec![2, 256, 128], vec![64, 128], 0),
    ] {
        let wide = if spec.ends_with("->kn") { F32 } else { f };
        let (x, w, y, b) = (t(f, &shared), t(f, &own), t(wide, &shape), t(wide, &shape[shape.len() - 1..]));
        let op = Matmul { bias: biases > 0, ..Matmul::new(spec) };
        let makes = [y];
        let (count, own) = (3, 1 + biases);
        let of = |index: usize| [vec![0], (1 + index * own..1 + (index + 1) * own).collect()].concat();
        let steps = (0..count).map(|index| step(op.clone(), &of(index), &makes)).collect();
        let operands = [vec![x], vec![[vec![w], vec![b; biases]].concat(); count].concat()].concat();
        let results = vec![makes; count].concat();
        let named = (operands.len()..operands.len() + results.len()).collect();
        all.push(case(Fused { steps, results: named }, &operands, &results));
    }
    // An activation whose operand is written beside it, with a bias of each product's own or none: of 16 bits alone,
    // as lowering makes them.
    if f.size() != 2 {
        return;
    }
    let (x, w, y, b) = (t(f, &[2, 256, 64]), t(f, &[64, 512]), t(f, &[2, 256, 512]), t(f, &[512]));
    for (biases, written) in [(0, 1), (1, 1), (0, 2), (1, 2)] {
        let op = Matmul { bias: biases > 0, epilogue: Some(Epilogue::GeluTanh), ..Matmul::new("bsk,kn->bsn") };
        let makes = vec![y.clone(); written];
        let own = 1 + biases;
        let of = |index: usize| [vec![0], (1 + index * own..1 + (index + 1) * own).collect()].concat();
        let steps = (0..2).map(|index| step(op.clone(), &of(index), &makes)).collect();
        let operands =
            [vec![x.clone()], vec![[vec![w.clone()], vec![b.clone(); biases]].concat(); 2].concat()].concat();
        let results = [makes.clone(), makes].concat();
        let named = (operands.len()..operands.len() + results.len()).collect();
        all.push(case(Fused { steps, results: named }, &operands, &results));
    }
}

fn row_cases(f: DType, all: &mut Vec<Case>) {
    for columns in [96, 768, 4096, 50] {
        let (x, row, d) = (t(f, &[80, columns]), t(F32, &[80]), t(f, &[columns]));
        let w = t(F32, &[columns]);
        all.extend(regions(f, &[80, columns]));
        all.extend(regions(f, &[3, 1000, columns]));
        // The last block has an odd number of rows.
        all.extend(regions(f, &[999, columns]).into_iter().take(2));
        all.extend([[3, 50, columns / 2, 2], [2, 9, 4, columns]].into_iter().flat_map(|shape| groups(f, shape)));
        all.push(case(Softmax {}, &[x.clone()], &[x.clone()]));
        all.push(case(RmsNorm { eps: 1e-5 }, &[x.clone(), d.clone()], &[x.clone(), row.clone()]));
        let operands = [x.clone(), x.clone(), d.clone(), row.clone()];
        all.push(case(RmsNormGrad {}, &operands, &[x.clone(), w.clone()]));
        let operands = [x.clone(), d.clone(), d.clone()];
        all.push(case(LayerNorm { eps: 1e-5 }, &operands, &[x.clone(), row.clone(), row.clone()]));
        let operands = [x.clone(), x.clone(), d.clone(), row.clone(), row.clone()];
        all.push(case(LayerNormGrad {}, &operands, &[x.clone(), w.clone(), w.clone()]));
        for (i, start) in [(I64, 0), (I32, 20)] {
            let labels = t(i, &[80]);
            let both = [row.clone(), row.clone()];
            all.push(case(CrossEntropy { start, classes: None }, &[x.clone(), labels.clone()], &both));
            let operands = [x.clone(), labels, row.clone(), row.clone(), row.clone()];
            all.push(case(CrossEntropyGrad { start, classes: None }, &operands, &[x.clone()]));
        }
    }
    // Groups of channels as a network has them, many samples, and pixels and channels of which little is a power of two.
    for shape in [[16, 1024, 32, 8], [16, 64, 32, 32], [300, 8, 32, 4], [3, 1001, 5, 3]] {
        all.extend(groups(f, shape));
    }
    // Rows of which a unit has many vectors, those of which it has all, and whose last elements are padding.
    for (rows, columns, classes) in
        [(5, 16_384, None), (5, 9_008, Some(9_001)), (5, 50, Some(41)), (3000, 2, None), (700, 24, Some(19))]
    {
        let (x, labels, row) = (t(f, &[rows, columns]), t(I64, &[rows]), t(F32, &[rows]));
        let both = [row.clone(), row.clone()];
        all.push(case(CrossEntropy { start: 0, classes }, &[x.clone(), labels.clone()], &both));
        let operands = [x.clone(), labels, row.clone(), row.clone(), row];
        all.push(case(CrossEntropyGrad { start: 0, classes }, &operands, &[x]));
    }
    for (shape, count) in [([80, 96], 3), ([3000, 1600], 3), ([700, 50], 2), ([1, 64], 8)] {
        all.push(row_sums(f, &shape, count));
    }
    all.push(case(SumSquares {}, &[t(f, &[1000, 640])], &[t(F32, &[])]));
    all.push(case(SumSquares {}, &[t(f, &[33])], &[t(F32, &[])]));
    let shape = [40, 50, 64];
    for dims in [vec![0], vec![1], vec![2], vec![0, 1], vec![0, 2], vec![1, 2], vec![0, 1, 2]] {
        let kept: Vec<u64> = (0..3).filter(|dim| !dims.contains(dim)).map(|dim: usize| shape[dim]).collect();
        all.push(case(Reduce { kind: ReduceOp::Sum, dims: dims.clone() }, &[t(f, &shape)], &[t(F32, &kept)]));
        all.push(case(Reduce { kind: ReduceOp::Max, dims }, &[t(f, &shape)], &[t(f, &kept)]));
    }
}

fn movement_cases(f: DType, all: &mut Vec<Case>) {
    let x = t(f, &[8, 6, 16]);
    for permutation in [vec![1, 0, 2], vec![2, 0, 1], vec![0, 2, 1], vec![0, 1, 2]] {
        let shape: Vec<u64> = permutation.iter().map(|dim: &usize| x.shape[*dim]).collect();
        all.push(case(Transpose { permutation }, &[x.clone()], &[t(f, &shape)]));
    }
    all.push(case(Reshape {}, &[x.clone()], &[t(f, &[48, 16])]));
    for (shape, permutation) in [
        (&[130, 200][..], &[1, 0][..]),
        (&[3, 7000], &[1, 0]),
        (&[9001, 2], &[1, 0]),
        (&[3, 40, 5, 70], &[0, 3, 2, 1]),
        (&[33, 3, 16, 15], &[0, 2, 3, 1]),
    ] {
        let to: Vec<u64> = permutation.iter().map(|dim| shape[*dim]).collect();
        all.push(case(Transpose { permutation: permutation.to_vec() }, &[t(f, shape)], &[t(f, &to)]));
    }
    all.push(case(Broadcast { dims: vec![0, 2] }, &[t(f, &[8, 16])], &[x.clone()]));
    all.push(case(Broadcast { dims: vec![] }, &[t(f, &[])], &[x.clone()]));
    all.push(case(Broadcast { dims: vec![0, 2] }, &[t(f, &[5, 8])], &[t(f, &[5, 40, 8, 2])]));
    all.push(case(Broadcast { dims: vec![0, 1, 2] }, &[t(f, &[8, 6, 1])], &[x.clone()]));
    all.push(case(Slice { start: vec![1, 2, 8], limit: vec![7, 6, 16] }, &[x.clone()], &[t(f, &[6, 4, 8])]));
    all.push(case(Slice { start: vec![0, 0, 3], limit: vec![8, 6, 8] }, &[x.clone()], &[t(f, &[8, 6, 5])]));
    let pad = Pad { low: vec![0, 1, 0], high: vec![0, 1, 8], value: 2.0 };
    all.push(case(pad, &[x.clone()], &[t(f, &[8, 8, 24])]));
    for (columns, high, value) in [(3, 5, 0.0), (5, 11, 2.0), (8, 8, 0.0), (3, 2, 1.0)] {
        let pad = Pad { low: vec![0, 0], high: vec![0, high], value };
        all.push(case(pad, &[t(f, &[700, columns])], &[t(f, &[700, columns + high])]));
    }
    for (columns, value) in [(8, 2.0), (8, 0.0), (5, 2.0), (5, 0.0)] {
        let pad = Pad { low: vec![3, 0], high: vec![2, 0], value };
        all.push(case(pad, &[t(f, &[20, columns])], &[t(f, &[25, columns])]));
    }
    all.push(case(Concat { dim: 1 }, &[x.clone(), t(f, &[8, 2, 16])], &[t(f, &[8, 8, 16])]));
    all.push(case(Concat { dim: 2 }, &[x.clone(), x], &[t(f, &[8, 6, 32])]));
    for (i, start) in [(I64, 0), (I32, 30)] {
        all.push(case(Embedding { start }, &[t(f, &[96, 64]), t(i, &[4, 8])], &[t(f, &[4, 8, 64])]));
        for tokens in [8, 2500] {
            let operands = [t(f, &[4, tokens, 64]), t(i, &[4, tokens])];
            all.push(case(EmbeddingGrad { start }, &operands, &[t(F32, &[96, 64])]));
            let [dy, ids] = operands;
            all.push(case(EmbeddingGrad { start }, &[dy, ids, t(F32, &[96, 64])], &[t(F32, &[96, 64])]));
        }
        for (row, k) in [(8, 2), (200, 4)] {
            all.push(case(TopK { k }, &[t(f, &[512, row])], &[t(f, &[512, k]), t(I64, &[512, k])]));
        }
        for (dim, reverse) in [(1, false), (1, true), (0, false)] {
            all.push(case(Cumsum { dim, reverse }, &[t(f, &[13, 96, 8])], &[t(f, &[13, 96, 8])]));
        }
        all.push(case(Gather { dim: 1 }, &[t(f, &[8, 64]), t(i, &[8, 3])], &[t(f, &[8, 3])]));
        all.push(case(ScatterAdd { dim: 1 }, &[t(f, &[8, 3]), t(i, &[8, 3])], &[t(f, &[8, 64])]));
    }
}

fn picture_cases(f: DType, all: &mut Vec<Case>) {
    let same = Window { low: [1, 1], high: [1, 1], ..Window::default() };
    let apart = Window { stride: [2, 2], low: [3, 3], high: [3, 3], ..Window::default() };
    for (x, filters, y, groups, window) in [
        ([4, 16, 16, 16], [32, 3, 3, 16], [4, 16, 16, 32], 1, same.clone()),
        ([8, 7, 7, 16], [32, 3, 3, 8], [8, 7, 7, 32], 2, same.clone()),
        ([8, 7, 7, 32], [16, 1, 1, 32], [8, 7, 7, 16], 1, Window::default()),
        ([8, 8, 8, 32], [16, 1, 1, 32], [8, 8, 8, 16], 1, Window::default()),
        ([4, 32, 32, 3], [16, 7, 7, 3], [4, 16, 16, 16], 1, apart),
    ] {
        let [x, filters, y] = [x, filters, y].map(|shape| t(f, &shape));
        all.push(case(Convolution { window: window.clone(), groups }, &[x.clone(), filters.clone()], &[y.clone()]));
        let transpose = ConvolutionTranspose { window: window.clone(), groups };
        all.push(case(transpose, &[y.clone(), filters.clone()], &[x.clone()]));
        for out in [f, F32] {
            let grad = ConvolutionFilterGrad { window: window.clone(), groups };
            all.push(case(grad, &[y.clone(), x.clone()], &[filters.with_dtype(out)]));
        }
    }
    let by_two = Window { stride: [2, 2], ..same.clone() };
    let spread = Window { stride: [1, 2], low: [2, 2], high: [2, 3], dilation: [2, 2] };
    for (x, kernel, window) in [
        ([4, 16, 16, 8], [3, 3], by_two.clone()),
        ([3, 15, 17, 6], [3, 3], by_two.clone()),
        ([2, 9, 9, 16], [3, 3], same),
        ([2, 12, 13, 5], [5, 4], by_two),
        ([2, 13, 12, 8], [3, 3], spread),
        ([2, 8, 8, 8], [2, 2], Window { stride: [2, 2], ..Window::default() }),
        ([2, 20, 19, 8], [18, 17], Window::default()),
        ([1, 258, 259, 4], [257, 257], Window::default()),
    ] {
        let [rows, columns] = window.count([x[1], x[2]], kernel).expect("windows that fit");
        let (x, y) = (t(f, &x), t(f, &[x[0], rows, columns, x[3]]));
        all.push(case(MaxPool { kernel, window: window.clone() }, &[x.clone()], &[y.clone()]));
        all.push(case(MaxPoolGrad { kernel, window }, &[y, x.clone()], &[x]));
    }
}

fn matmul_cases(f: DType, all: &mut Vec<Case>) {
    let mut add = |spec: &str, a: &[u64], b: &[u64], c: &[u64], out: DType| {
        all.push(case(Matmul::new(spec), &[t(f, a), t(f, b)], &[t(out, c)]));
    };
    for out in [f, F32] {
        add("mk,kn->mn", &[64, 96], &[96, 32], &[64, 32], out);
        add("bsk,kn->bsn", &[2, 16, 96], &[96, 32], &[2, 16, 32], out);
        add("bsk,nk->bsn", &[2, 16, 96], &[32, 96], &[2, 16, 32], out);
        add("bsk,bsn->kn", &[2, 16, 96], &[2, 16, 32], &[96, 32], out);
        add("bsn,bsk->nk", &[2, 16, 32], &[2, 16, 96], &[32, 96], out);
        add("bsn,kn->bsk", &[2, 16, 32], &[96, 32], &[2, 16, 96], out);
        add("bshd,bthd->bhst", &[2, 16, 4, 32], &[2, 24, 4, 32], &[2, 4, 16, 24], out);
        add("bhst,bthd->bshd", &[2, 4, 16, 24], &[2, 24, 4, 32], &[2, 16, 4, 32], out);
        add("bsk,khd->bshd", &[2, 16, 96], &[96, 4, 32], &[2, 16, 4, 32], out);
        add("bshd,hdn->bsn", &[2, 16, 4, 32], &[4, 32, 96], &[2, 16, 96], out);
        add("bmk,bkn->bmn", &[3, 17, 31], &[3, 31, 13], &[3, 17, 13], out);
        add("mk,kn->nm", &[64, 96], &[96, 32], &[32, 64], out);
        add("akb,kn->abn", &[8, 16, 24], &[16, 32], &[8, 24, 32], out);
        add("kab,kan->bn", &[8, 16, 24], &[8, 16, 32], &[24, 32], out);
        add("k,kn->n", &[64], &[64, 32], &[32], out);
        // Experts, of which each has rows of several groups of tokens.
        add("bhsk,hkn->hbsn", &[4, 2, 160, 256], &[2, 256, 512], &[2, 4, 160, 512], out);
        add("hbsn,hnk->bhsk", &[2, 4, 160, 512], &[2, 512, 256], &[4, 2, 160, 256], out);
        add("bhsk,hbsn->hkn", &[4, 2, 160, 256], &[2, 4, 160, 512], &[2, 256, 512], out);
        add("bhsk,hkn->bhsn", &[4, 2, 160, 256], &[2, 256, 512], &[4, 2, 160, 512], out);
        // Routing, of which each group of tokens would be a launch.
        add("bhks,bkhn->bhsn", &[8, 16, 2, 8], &[8, 2, 16, 80], &[8, 16, 8, 80], out);
        add("bhsn,bkhn->bhks", &[8, 16, 8, 80], &[8, 2, 16, 80], &[8, 16, 2, 8], out);
    }
}

/// An attention of `[b, s, h, d]` with `kv` heads of keys, and its derivative in both ways.
fn attention(f: DType, [b, s, keys, h, kv, d]: [u64; 6], causal: bool) -> [Case; 3] {
    let (q, k, lse) = (t(f, &[b, s, h, d]), t(f, &[b, keys, kv, d]), t(F32, &[b, h, s]));
    let scale = 1.0 / (d as f64).sqrt();
    let forward = case(
        Attention { causal, scale, lead: None, reversed: None },
        &[q.clone(), k.clone(), k.clone()],
        &[q.clone(), lse.clone()],
    );
    let operands = [q.clone(), q.clone(), k.clone(), k.clone(), q.clone(), lse];
    let results = [q, k.clone(), k];
    let backward = |deterministic| {
        case(AttentionGrad { causal, scale, lead: None, reversed: None, deterministic }, &operands, &results)
    };
    [forward, backward(false), backward(true)]
}

/// The same with a bias of these sizes before the keys.
fn biased(cases: [Case; 3], [b, h, s]: [u64; 3]) -> [Case; 3] {
    cases.map(|mut case| {
        // `q, k, v` or `do, q, k, v, o, lse`.
        let keys = &case.operands[case.operands.len() / 3];
        let bias = keys.with_shape([b, h, s, keys.shape[1]]);
        case.operands.push(bias);
        case
    })
}

/// The same under a causal mask, where the queries are the part of more that begins this many queries further on.
fn led(cases: [Case; 3], lead: i64) -> [Case; 3] {
    cases.map(|mut case| {
        match &mut case.op {
            Op::Attention(op) => op.lead = Some(lead),
            Op::AttentionGrad(op) => op.lead = Some(lead),
            _ => {}
        }
        case
    })
}

fn attention_cases(f: DType, all: &mut Vec<Case>) {
    for (shape, causal) in [
        ([2, 32, 32, 4, 4, 32], true),
        ([2, 64, 64, 8, 2, 64], true),
        ([2, 33, 33, 3, 1, 16], true),
        ([2, 16, 48, 4, 2, 64], false),
        ([2, 16, 48, 4, 2, 64], true),
        ([2, 1100, 1100, 2, 2, 16], true),
        ([2, 1000, 1000, 4, 2, 64], true),
        ([1, 1000, 1000, 4, 4, 64], false),
        ([1, 512, 1024, 4, 1, 128], true),
        ([1, 2048, 2048, 4, 1, 64], true),
        ([2, 384, 384, 5, 5, 80], true),
        ([1, 256, 256, 2, 1, 256], true),
    ] {
        all.extend(attention(f, shape, causal));
    }
    for (shape, causal, bias) in [
        ([2, 384, 384, 4, 4, 64], false, [2, 1, 1]),
        ([2, 384, 384, 4, 2, 64], true, [2, 1, 1]),
        ([2, 256, 256, 4, 2, 64], false, [1, 4, 256]),
        ([2, 100, 100, 4, 4, 32], false, [2, 1, 100]),
        ([2, 16, 48, 4, 2, 64], false, [2, 4, 16]),
    ] {
        all.extend(biased(attention(f, shape, causal), bias));
    }
    for (shape, lead) in [
        ([2, 64, 256, 4, 2, 64], 0),
        ([2, 64, 256, 4, 2, 64], 96),
        ([2, 100, 300, 4, 4, 32], 200),
        ([1, 512, 1024, 4, 1, 128], 512),
    ] {
        all.extend(led(attention(f, shape, true), lead));
    }
    // More batch elements than a grid has blocks along an axis.
    if f == F32 {
        all.extend(attention(f, [70_000, 4, 4, 2, 2, 8], false));
        all.extend(biased(attention(f, [70_000, 4, 4, 2, 1, 8], false), [1, 1, 4]));
    }
}

/// The shapes of a 1.5-billion-parameter Llama on 4 x 4096 tokens, in bf16, attentions of other models,
/// and some in f32.
pub fn heavy_cases() -> Vec<Case> {
    let f = Bf16;
    let (x, row, wide) = (t(f, &[4, 4096, 2048]), t(F32, &[4, 4096]), t(f, &[4, 4096, 8192]));
    let (d, w, logits) = (t(f, &[2048]), t(F32, &[2048]), t(f, &[4, 4096, 128_256]));
    let (ids, p, s) = (t(I64, &[4, 4096]), t(F32, &[2048, 8192]), t(F32, &[]));
    let adamw = Adamw { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, cast: None };
    let q = t(f, &[4, 4096, 32, 64]);
    let table = t(F32, &[4096, 32]);
    let add = Binary { kind: BinaryKind::Add };
    let adamw_operands = [p.clone(), p.clone(), p.clone(), p.clone(), s.clone(), s.clone(), s.clone()];
    let matmul =
        |spec: &str, a: &TensorType, b: &[u64], c: TensorType| case(Matmul::new(spec), &[a.clone(), t(f, b)], &[c]);
    let statistics = [row.clone(), row.clone()];
    let mut all = vec![
        case(add, &[x.clone(), x.clone()], &[x.clone()]),
        case(Cast {}, &[p.clone()], &[t(f, &[2048, 8192])]),
        case(RmsNorm { eps: 1e-5 }, &[x.clone(), d.clone()], &[x.clone(), row.clone()]),
        case(RmsNormGrad {}, &[x.clone(), x.clone(), d, row.clone()], &[x.clone(), w]),
        case(Rotary { inverse: false }, &[q.clone(), table.clone(), table], &[q.clone()]),
        case(Swiglu {}, &[wide.clone(), wide.clone()], &[wide.clone()]),
        case(SwigluGrad {}, &[wide.clone(), wide.clone(), wide.clone()], &[wide.clone(), wide.clone()]),
        case(CrossEntropy { start: 0, classes: None }, &[logits.clone(), ids.clone()], &statistics),
        case(
            CrossEntropyGrad { start: 0, classes: None },
            &[logits.clone(), ids.clone(), row.clone(), row.clone(), row],
            &[logits.clone()],
        ),
        case(Embedding { start: 0 }, &[t(f, &[128_256, 2048]), ids.clone()], &[x.clone()]),
        case(EmbeddingGrad { start: 0 }, &[x.clone(), ids], &[t(F32, &[128_256, 2048])]),
        case(adamw, &adamw_operands, &[p.clone(), p.clone(), p.clone()]),
        case(SumSquares {}, &[p], &[s]),
        case(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }, &[x.clone()], &[t(F32, &[2048])]),
        case(Transpose { permutation: vec![0, 2, 1, 3] }, &[q.clone()], &[t(f, &[4, 32, 4096, 64])]),
        case(Transpose { permutation: vec![0, 2, 1] }, &[x.clone()], &[t(f, &[4, 2048, 4096])]),
        matmul("bsk,nk->bsn", &x, &[8192, 2048], wide.clone()),
        matmul("bsk,kn->bsn", &x, &[2048, 8192], wide.clone()),
        matmul("bsn,nk->bsk", &wide, &[8192, 2048], x.clone()),
        matmul("bsn,bsk->nk", &wide, &[4, 4096, 2048], t(F32, &[8192, 2048])),
        matmul("bsk,nk->bsn", &x, &[128_256, 2048], logits),
    ];
    for shape in [[4, 4096, 2048], [32, 1024, 768], [8, 1024, 1600], [8, 1024, 6400]] {
        all.extend(regions(f, &shape));
        let (x, d) = (t(f, &shape), t(f, &shape[2..]));
        let row = t(F32, &shape[..2]);
        all.push(case(LayerNorm { eps: 1e-5 }, &[x.clone(), d.clone(), d], &[x.clone(), row.clone(), row]));
        all.push(case(Unary { kind: UnaryKind::GeluTanh }, &[x.clone()], &[x]));
    }
    for (shape, causal) in [
        ([4, 4096, 4096, 32, 8, 64], true),
        ([4, 4096, 4096, 32, 8, 64], false),
        ([32, 1024, 1024, 12, 12, 64], true),
        ([8, 1024, 1024, 25, 25, 64], true),
        ([2, 4096, 4096, 32, 8, 128], true),
        ([1, 16384, 16384, 32, 8, 128], true),
        ([2, 1000, 1000, 12, 12, 64], true),
        ([2, 4096, 4096, 16, 16, 256], true),
    ] {
        all.extend(attention(f, shape, causal));
    }
    all.extend(attention(f, [32, 512, 512, 12, 12, 64], false));
    all.extend(biased(attention(f, [32, 512, 512, 12, 12, 64], false), [32, 1, 1]));
    // Queries that ranks or chunks divide.
    for (f, [b, s, keys, h, kv, d], lead) in [
        (f, [1, 32768, 65536, 3, 3, 128], 0),
        (f, [1, 32768, 65536, 3, 3, 128], 32768),
        (f, [1, 16384, 65536, 3, 3, 128], 16384),
        (f, [1, 16384, 65536, 3, 3, 128], 49152),
        (f, [1, 4096, 16384, 32, 8, 128], 0),
        (f, [1, 4096, 16384, 32, 8, 128], 4096),
        (f, [1, 4096, 16384, 32, 8, 128], 12288),
        (f, [4, 2048, 4096, 32, 8, 64], 2048),
        (F32, [2, 2048, 4096, 32, 8, 64], 0),
        (F32, [2, 2048, 4096, 32, 8, 64], 2048),
        (F32, [1, 4096, 8192, 6, 6, 128], 0),
        (F32, [1, 4096, 8192, 6, 6, 128], 4096),
        (F32, [1, 8192, 8192, 3, 3, 128], 0),
    ] {
        all.extend(led(attention(f, [b, s, keys, h, kv, d], true), lead));
    }
    all.extend(attention(f, [1, 32768, 32768, 3, 3, 128], true));
    all.extend(attention(f, [1, 65536, 65536, 3, 3, 128], true));
    all.extend(attention(f, [1, 4096, 16384, 32, 8, 128], false));
    // Products of few rows in f32.
    for rows in [128, 256, 512, 1024, 4096] {
        for (k, n) in [(768, 768), (768, 3072), (3072, 768), (768, 50304)] {
            let (x, y) = (t(F32, &[rows, k]), t(F32, &[rows, n]));
            all.push(case(Matmul::new("sk,kn->sn"), &[x.clone(), t(F32, &[k, n])], &[y.clone()]));
            all.push(case(Matmul::new("sk,sn->kn"), &[x, y], &[t(F32, &[k, n])]));
        }
    }
    all.extend(attention(F32, [4, 4096, 4096, 32, 8, 64], true));
    all.extend(attention(F32, [2, 4096, 4096, 32, 8, 128], true));
    all
}
