//! What can be tested without a GPU: that operations on usual types have kernels, and that these
//! become CUDA C++; how contractions become matrix products; and what is said where CUDA is missing.
//! The kernels' results are compared with the CPU backend's by the example `cuda_selftest`.

#![allow(clippy::cloned_ref_to_slice_refs)]

use super::cudnn;
use super::kernel::Kernel;
use super::select::{Engine, Step, select};
use shardc_ir::ops::*;
use shardc_ir::{DType, Op, TensorType};
use std::collections::BTreeMap;

use DType::{Bf16, Bool, F32, I64};

fn t(dtype: DType, shape: &[u64]) -> TensorType {
    TensorType::new(dtype, shape)
}

/// The steps of an operation, one word each; every kernel must become CUDA C++.
fn steps(op: impl Into<Op>, operands: &[TensorType], results: &[TensorType]) -> Vec<String> {
    let selection = select(&op.into(), operands, results).unwrap_or_else(|error| panic!("{error}"));
    let mut known = BTreeMap::new();
    let mut named = |kernel: &Kernel, scalars: usize| {
        let key = kernel.key.clone();
        let source =
            known.entry(key).or_insert_with_key(|key| kernel.source().unwrap_or_else(|error| panic!("{key}: {error}")));
        assert!(source.text.contains(&format!("{} (", kernel.name)), "{}", source.text);
        assert!(source.info_bytes >= 4 * scalars);
        kernel.name.to_string()
    };
    let mut word = |step: &Step| match step {
        Step::Launch(launch) => named(&launch.kernel, launch.numbers.len() + launch.reals.len()),
        Step::Table(table) => named(&table.kernel, 2 + table.reals.len()),
        Step::Zero { .. } => "zero".to_string(),
        Step::Copy { .. } => "copy".to_string(),
        Step::Upload { .. } => "upload".to_string(),
        Step::Meet { .. } => "meet".to_string(),
        Step::Gemm(gemm) => format!("gemm {}x{}x{}x{}", gemm.batch, gemm.m, gemm.n, gemm.k),
        Step::Products(gemms) => format!("{} products {}x{}x{}", gemms.len(), gemms[0].m, gemms[0].n, gemms[0].k),
        Step::Engine(engine) => format!("{:?}", engine.kernel),
        Step::Fused(fused) => format!("fused, else {} steps", fused.otherwise.len()),
    };
    selection.steps.iter().map(&mut word).collect()
}

#[track_caller]
fn check(op: impl Into<Op>, operands: &[TensorType], results: &[TensorType], expect: &[&str]) {
    assert_eq!(steps(op, operands, results), expect);
}

#[track_caller]
fn check_matmul(spec: &str, a: &[u64], b: &[u64], c: &[u64], expect: &[&str]) {
    check(Matmul::new(spec), &[t(Bf16, a), t(Bf16, b)], &[t(F32, c)], expect);
}

#[test]
fn contractions_are_products_without_copies() {
    check_matmul("mk,kn->mn", &[64, 96], &[96, 32], &[64, 32], &["gemm 1x64x32x96"]);
    check_matmul("bsk,nk->bsn", &[2, 16, 96], &[32, 96], &[2, 16, 32], &["gemm 1x32x32x96"]);
    check_matmul("bsn,bsk->nk", &[2, 16, 32], &[2, 16, 96], &[32, 96], &["gemm 1x32x96x32"]);
    check_matmul("bsk,khd->bshd", &[2, 16, 96], &[96, 4, 8], &[2, 16, 4, 8], &["gemm 1x32x32x96"]);
    check_matmul("mk,kn->nm", &[64, 96], &[96, 32], &[32, 64], &["gemm 1x64x32x96"]);
    // Samples that do not lie as rows do are a batch of products with the same matrix.
    check_matmul("bks,kn->bsn", &[2, 24, 96], &[24, 32], &[2, 96, 32], &["gemm 2x96x32x24"]);
    check_matmul("bsn,kn->bks", &[2, 96, 32], &[24, 32], &[2, 24, 96], &["gemm 2x96x24x32"]);
    // Batch and head cannot be one dimension of `[b, s, h, d]`: one product per batch element.
    check_matmul("bshd,bthd->bhst", &[2, 8, 4, 16], &[2, 8, 4, 16], &[2, 4, 8, 8], &["gemm 4x8x8x16"; 2]);
}

#[test]
fn contractions_that_are_no_products_are_copied_first() {
    let expect = ["strided", "gemm 1x24x32x128"];
    check_matmul("kba,kan->bn", &[8, 24, 16], &[8, 16, 32], &[24, 32], &expect);
}

/// Of an expert's tokens, of which each group has some, one product is made if they are many enough to be worth a copy.
#[test]
fn rows_that_lie_apart_are_copied_where_that_costs_less() {
    let [slots, hidden] = [[16, 8, 160, 1024], [8, 16, 160, 3584]];
    let expect = ["strided", "gemm 8x2560x3584x1024"];
    check_matmul("bhsk,hkn->hbsn", &slots, &[8, 1024, 3584], &hidden, &expect);
    check_matmul("bhsk,hbsn->hkn", &slots, &hidden, &[8, 1024, 3584], &["strided", "gemm 8x1024x3584x2560"]);
    check_matmul("hbsn,hnk->bhsk", &hidden, &[8, 3584, 1024], &slots, &["gemm 8x2560x1024x3584", "strided"]);
    // Few operations for each byte.
    check_matmul("bhsk,hkn->hbsn", &[2, 8, 160, 64], &[8, 64, 96], &[8, 2, 160, 96], &["gemm 8x160x96x64"; 2]);
}

/// Routing of tokens to experts: many products of little each, of which a loop would launch one for each group of tokens.
#[test]
fn many_launches_that_do_little_are_one_behind_a_copy() {
    let [slots, places, both] = [&[32, 512, 2, 8][..], &[32, 2, 512, 80], &[32, 512, 8, 80]];
    check_matmul("bhks,bkhn->bhsn", slots, places, both, &["strided", "gemm 16384x8x80x2"]);
    check_matmul("bhsn,bkhn->bhks", both, places, slots, &["strided", "gemm 16384x8x2x80"]);
    // What is copied takes longer than the few launches.
    let [slots, places, both] = [&[3, 65536, 2, 8][..], &[3, 2, 65536, 80], &[3, 65536, 8, 80]];
    check_matmul("bhks,bkhn->bhsn", slots, places, both, &["gemm 65536x8x80x2"; 3]);
}

#[test]
fn products_of_one_operand_are_a_batch_where_they_lie_evenly() {
    use super::kernel::Arg;
    use super::select::{batch, fuses};
    let (x, dy, w) = (t(Bf16, &[8, 64, 32]), t(Bf16, &[8, 64, 48]), t(F32, &[32, 48]));
    let step = |at: usize| FusedStep {
        op: Matmul::new("bsk,bsn->kn").into(),
        operands: vec![0, at],
        results: vec![w.clone()],
        source: None,
    };
    let region = Fused { steps: vec![step(1), step(2), step(3)], results: (4..7).collect() };
    let (operands, results) = ([vec![x], vec![dy; 3]].concat(), vec![w.clone(); 3]);
    assert_eq!(region.infer(&operands, &results), Ok(results.clone()));
    assert!(fuses(&region, &operands));
    check(region.clone(), &operands, &results, &["3 products 32x48x512"]);
    let selection = select(&region.into(), &operands, &results).unwrap_or_else(|error| panic!("{error}"));
    let [Step::Products(gemms)] = &selection.steps[..] else { panic!("{:?}", selection.steps) };
    let at = |last: u64| {
        batch(gemms, |arg| match arg {
            Arg::Operand(0, at) => at,
            Arg::Operand(3, at) => last + at,
            Arg::Operand(index, at) => (1 << 20) + index as u64 * 4096 + at,
            Arg::Result(index, at) => index as u64 * 8192 + at,
            Arg::Scratch(at) => at,
        })
    };
    let even = at((1 << 20) + 3 * 4096).expect("a batch");
    let batches = [even.a.batch, even.b.batch, even.c.batch];
    assert_eq!((even.batch, batches), (3, [0, 2048, 2048]));
    assert_eq!(at(1 << 21), None);
    // Large products fill the device alone.
    let (x, w, y) = (t(Bf16, &[16384, 64]), t(Bf16, &[64, 8192]), t(Bf16, &[16384, 8192]));
    let step = |at: usize| FusedStep {
        op: Matmul::plain().into(),
        operands: vec![0, at],
        results: vec![y.clone()],
        source: None,
    };
    let region = Fused { steps: vec![step(1), step(2)], results: vec![3, 4] };
    assert!(!fuses(&region, &[x, w.clone(), w]));
}

#[test]
fn kernels_become_cuda() {
    for f in [F32, Bf16] {
        let (x, row, d) = (t(f, &[80, 96]), t(F32, &[80]), t(f, &[96]));
        let w = t(F32, &[96]);
        for kind in UnaryKind::ALL.iter().copied().filter(|kind| *kind != UnaryKind::Not) {
            check(Unary { kind }, &[x.clone()], &[x.clone()], &["unary"]);
            check(UnaryGrad { kind }, &[x.clone(), x.clone()], &[x.clone()], &["unary_grad"]);
        }
        check(RmsNorm { eps: 1e-5 }, &[x.clone(), d.clone()], &[x.clone(), row.clone()], &["region"]);
        let operands = [x.clone(), x.clone(), d.clone(), row.clone()];
        let expect = ["region", "sum_partials"];
        check(RmsNormGrad {}, &operands, &[x.clone(), w.clone()], &expect);
        let (pixels, sums) = (t(f, &[4, 64, 8, 6]), t(F32, &[4, 8]));
        let step = |op: Op, operands: &[usize], ty: &TensorType| FusedStep {
            op,
            operands: operands.to_vec(),
            results: vec![ty.clone()],
            source: None,
        };
        let sum = Op::from(Reduce { kind: ReduceOp::Sum, dims: vec![1, 3] });
        let product = step(Binary { kind: BinaryKind::Mul }.into(), &[0, 1], &pixels);
        let region = Fused { steps: vec![product, step(sum, &[2], &sums)], results: vec![3] };
        check(region, &[pixels.clone(), pixels], &[sums], &expect);
        let labels = t(I64, &[80]);
        let expect = ["cross_entropy"];
        check(CrossEntropy { start: 0, classes: None }, &[x.clone(), labels], &[row.clone(), row.clone()], &expect);
        let (table, ids) = (t(F32, &[500, 96]), t(I64, &[80]));
        let order = ["zero", "count_tokens", "place_rows", "place_tokens", "order_tokens"];
        let expect = [&order[..], &["embedding_grad"]].concat();
        check(EmbeddingGrad { start: 7 }, &[x.clone(), ids.clone()], std::slice::from_ref(&table), &expect);
        let expect = [&order[..], &["copy", "embedding_grad"]].concat();
        check(EmbeddingGrad { start: 7 }, &[x.clone(), ids, table.clone()], &[table], &expect);
        let casts = Each { count: 2, op: Box::new(Cast {}.into()) };
        check(casts, &[w.clone(), w.clone()], &[t(Bf16, &[96]), t(Bf16, &[96])], &["cast_many"]);
        check(SumSquares {}, &[t(f, &[1000, 640])], &[t(F32, &[])], &["reduce_segments"; 2]);
        check(TopK { k: 2 }, &[x.clone()], &[t(f, &[80, 2]), t(I64, &[80, 2])], &["top_k"]);
        let sums = |shape: &[u64], expect: &[&str]| {
            check(Cumsum { dim: 1, reverse: true }, &[t(f, shape)], &[t(f, shape)], expect);
        };
        sums(&[4, 7, 8], &["cumsum"]);
        sums(&[4, 1024, 8], &["reduce_columns", "cumsum", "cumsum_chunks"]);
    }
}

#[test]
fn moves_are_as_few_as_they_can_be() {
    let x = t(Bf16, &[8, 6, 16]);
    check(Transpose { permutation: vec![0, 1, 2] }, &[x.clone()], &[x.clone()], &["copy"]);
    check(Transpose { permutation: vec![1, 0, 2] }, &[x.clone()], &[t(Bf16, &[6, 8, 16])], &["strided"]);
    check(
        Transpose { permutation: vec![1, 0, 2] },
        &[t(DType::F8e4m3, &[8, 6, 16])],
        &[t(DType::F8e4m3, &[6, 8, 16])],
        &["strided"],
    );
    let slice = Slice { start: vec![2, 0, 0], limit: vec![4, 6, 16] };
    check(slice, &[x.clone()], &[t(Bf16, &[2, 6, 16])], &["copy"]);
    check(Concat { dim: 0 }, &[x.clone(), x.clone()], &[t(Bf16, &[16, 6, 16])], &["copy"; 2]);
    check(Constant { value: 0.0 }, &[], &[x], &["zero"]);
}

#[test]
fn attention_keeps_its_scores_on_the_chip() {
    for d in [16, 80, 256, 6] {
        let (q, k, lse) = (t(F32, &[1, 2048, 2, d]), t(F32, &[1, 2048, 1, d]), t(F32, &[1, 2, 2048]));
        let op = Op::from(Attention { causal: true, scale: 0.25, lead: None, reversed: None });
        let operands = [q.clone(), k.clone(), k.clone()];
        check(op.clone(), &operands, &[q.clone(), lse.clone()], &["attention"]);
        let selection = select(&op, &operands, &[q.clone(), lse.clone()]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(selection.scratch, 0);
        let grad = AttentionGrad { causal: true, scale: 0.25, lead: None, reversed: None, deterministic: false };
        let operands = [q.clone(), q.clone(), k.clone(), k.clone(), q.clone(), lse];
        let expect = ["attention_delta", "attention_queries_grad", "attention_keys_grad"];
        check(grad, &operands, &[q, k.clone(), k], &expect);
    }
}

fn attention(engine: &Engine) -> cudnn::attention::Attention {
    match &engine.kernel {
        cudnn::Kernel::Attention(attention) => *attention,
        other => panic!("{other:?}"),
    }
}

#[test]
fn half_precision_attention_is_fused_or_tiled() {
    let (q, k, lse) = (t(Bf16, &[1, 64, 4, 64]), t(Bf16, &[1, 64, 2, 64]), t(F32, &[1, 4, 64]));
    let operands = [q.clone(), k.clone(), k.clone()];
    let op = Op::from(Attention { causal: true, scale: 0.125, lead: None, reversed: None });
    check(op.clone(), &operands, &[q.clone(), lse.clone()], &["fused, else 1 steps"]);
    let selection = select(&op, &operands, &[q.clone(), lse.clone()]).unwrap_or_else(|error| panic!("{error}"));
    let [Step::Fused(fused)] = selection.steps.as_slice() else { panic!("{:?}", selection.steps) };
    assert_eq!(super::select::kernels(&selection.steps).count(), 0);
    assert_eq!(super::select::kernels(&fused.otherwise).count(), 1);
    let grad = Op::from(AttentionGrad { causal: true, scale: 0.125, lead: None, reversed: None, deterministic: false });
    let operands = [q.clone(), q.clone(), k.clone(), k.clone(), q.clone(), lse];
    let selection = select(&grad, &operands, &[q, k.clone(), k]).unwrap_or_else(|error| panic!("{error}"));
    let [Step::Fused(fused)] = selection.steps.as_slice() else { panic!("{:?}", selection.steps) };
    // The sums of dq, delta and the workspace lie behind each other.
    let [Step::Engine(engine)] = &fused.steps[..] else { panic!("{:?}", fused.steps) };
    let scratch = attention(engine).scratch();
    let places = [engine.buffers[9], engine.buffers[10], engine.workspace];
    let expect = [0, scratch.dq, scratch.dq + scratch.delta].map(super::kernel::Arg::Scratch);
    assert_eq!((scratch.dq, scratch.delta, places), (4 * 64 * 4 * 64, 4 * 64 * 4, expect));
    assert!(selection.scratch >= scratch.dq + scratch.delta + scratch.workspace);
    // In a fixed order: no sums of dq, but the derivative of all scores, in whole tiles.
    let fixed = attention(engine).deterministic(true).scratch();
    assert_eq!((fixed.dq, fixed.workspace - scratch.workspace), (0, 4 * 64 * 128 * 2));
}

/// Of a part of the queries the keys behind the last of them are not read, and have no gradients.
#[test]
fn attention_of_a_part_of_the_queries_reads_the_keys_before_its_end() {
    use super::kernel::Arg;
    let (q, k, lse) = (t(Bf16, &[2, 64, 4, 64]), t(Bf16, &[2, 256, 2, 64]), t(F32, &[2, 4, 64]));
    let grad =
        |lead| Op::from(AttentionGrad { causal: true, scale: 0.125, lead, reversed: None, deterministic: false });
    let operands = [q.clone(), q.clone(), k.clone(), k.clone(), q.clone(), lse];
    let results = [q, k.clone(), k.clone()];
    let selection = |lead| select(&grad(lead), &operands, &results);
    let [part, whole] = [Some(32), None].map(|lead| selection(lead).unwrap_or_else(|error| panic!("{error}")));
    let [Step::Zero { to, bytes }, Step::Zero { .. }, Step::Fused(fused)] = &part.steps[..] else {
        panic!("{:?}", part.steps)
    };
    assert!(matches!(to, Arg::Result(1, 0)) && *bytes == k.bytes().0);
    // The keys before the part, those of the part, and the sum of what both say of the queries.
    let [Step::Engine(before), Step::Engine(own), Step::Launch(sum)] = &fused.steps[..] else { panic!("{fused:?}") };
    let of = |engine: &Engine| {
        let attention = attention(engine);
        (attention.t, attention.stored, attention.causal)
    };
    assert_eq!((of(before), of(own)), ((32, 256, false), (64, 256, true)));
    let (to, beside, key) = (before.buffers[6], own.buffers[6], 32 * 2 * 64 * 2);
    assert_eq!((to, &sum.buffers), (Arg::Result(0, 0), &vec![to, beside, to]));
    assert_eq!((before.buffers[2], before.buffers[7]), (Arg::Operand(2, 0), Arg::Result(1, 0)));
    assert_eq!((own.buffers[2], own.buffers[8]), (Arg::Operand(2, key), Arg::Result(2, key)));
    // As much for every part: so ranks have their values at the same places.
    assert_eq!(part.scratch, whole.scratch);
    // The last queries, without more being said.
    let [Step::Fused(fused)] = &whole.steps[..] else { panic!("{:?}", whole.steps) };
    assert_eq!(fused.engines().map(of).collect::<Vec<_>>(), [(192, 256, false), (64, 256, true)]);
    // A part at the beginning sees no keys before it.
    let first = selection(Some(0)).unwrap_or_else(|error| panic!("{error}"));
    let Some(Step::Fused(fused)) = first.steps.last() else { panic!("{:?}", first.steps) };
    assert_eq!((fused.engines().map(of).collect::<Vec<_>>(), first.scratch), (vec![(64, 256, true)], whole.scratch));
    for lead in [-1, 193] {
        let error = selection(Some(lead)).expect_err("no kernel").to_string();
        assert!(error.contains(&format!("64 queries behind {lead} of 256 keys")), "{error}");
    }
}

#[test]
fn fused_attention_states_what_it_takes() {
    use super::cudnn::attention::Attention;
    let (q, k) = (t(Bf16, &[2, 100, 4, 64]), t(Bf16, &[2, 100, 2, 64]));
    let of = |backward, q: &TensorType, k: &TensorType| Attention::new(backward, [q, k, k], true, 0.125);
    let (forward, backward) = (of(false, &q, &k), of(true, &q, &k));
    assert_eq!(forward.unfit(), None);
    assert!(of(false, &t(F32, &[2, 100, 4, 64]), &t(F32, &[2, 100, 2, 64])).unfit().is_some());
    assert!(of(false, &t(Bf16, &[2, 100, 4, 12]), &t(Bf16, &[2, 100, 2, 12])).unfit().is_some());
    assert!(of(false, &t(Bf16, &[2, 100, 4, 264]), &t(Bf16, &[2, 100, 2, 264])).unfit().is_some());
    assert!(of(false, &t(Bf16, &[2, 1, 4, 64]), &t(Bf16, &[2, 1, 2, 64])).unfit().is_some());
    let taken = |attention: &Attention| [90_500, 91_000, 91_500, 91_900].map(|v| attention.outdated(v).is_none());
    assert_eq!(taken(&forward), [false, false, true, true]);
    assert_eq!(taken(&backward), [false, false, false, true]);
    // Four heads' gradients of keys and values are made before pairs of them are added.
    let groups = 2 * 4 * 100 * (64 + 64) * 2;
    assert_eq!(backward.scratch().workspace, forward.scratch().workspace + groups);
}

#[test]
fn convolutions_are_products_of_rows() {
    let same = Window { low: [1, 1], high: [1, 1], ..Window::default() };
    let [x, filters, y] = [[4, 56, 56, 64], [64, 3, 3, 64], [4, 56, 56, 64]].map(|shape| t(F32, &shape));
    let op = Convolution { window: same.clone(), groups: 1 };
    check(op.clone(), &[x.clone(), filters.clone()], &[y.clone()], &["rows", "gemm 1x12544x64x576"]);
    // So many pictures at a time that their rows are 64 MiB at the most, one after the other in the same memory.
    let many = |ty: &TensorType| t(F32, &[&[10], &ty.shape[1..]].concat());
    let expect = ["rows", "gemm 1x28224x64x576", "rows", "gemm 1x3136x64x576"];
    check(op.clone(), &[many(&x), filters.clone()], &[many(&y)], &expect);
    let scratch = select(&op.clone().into(), &[many(&x), filters.clone()], &[many(&y)]).unwrap().scratch;
    assert!(scratch <= (64 << 20) + (8 << 20), "{scratch}");
    let transpose = ConvolutionTranspose { window: same.clone(), groups: 1 };
    let expect = ["gemm 1x12544x576x64", "pictures"];
    check(transpose, &[y.clone(), filters.clone()], &[x.clone()], &expect);
    let grad = ConvolutionFilterGrad { window: same, groups: 1 };
    check(grad, &[y, x], &[filters.clone()], &["rows", "gemm 1x64x576x12544"]);
    // Filters of one element that move by one read the picture itself.
    let plain = |stride: u64, expect: &[&str]| {
        let of = |channels: u64, side: u64| t(F32, &[8, side, side, channels]);
        let op = Convolution { window: Window { stride: [stride; 2], ..Window::default() }, groups: 1 };
        check(op, &[of(32, 7 * stride), t(F32, &[16, 1, 1, 32])], &[of(16, 7)], expect);
    };
    plain(1, &["gemm 1x392x16x32"]);
    plain(2, &["rows", "gemm 1x392x16x32"]);
    let whole = [t(F32, &[1, 9000, 9000, 64]), filters];
    let error = select(&op.into(), &whole, &[whole[0].clone()]).expect_err("too large").to_string();
    assert!(error.contains("under all windows of one picture"), "{error}");
}

#[test]
fn convolutions_in_half_precision_are_the_librarys() {
    let same = Window { low: [1, 1], high: [1, 1], ..Window::default() };
    let [x, filters, y] = [[4, 14, 14, 32], [64, 3, 3, 32], [4, 14, 14, 64]].map(|shape| t(Bf16, &shape));
    let op = Convolution { window: same.clone(), groups: 1 };
    check(op, &[x.clone(), filters.clone()], &[y.clone()], &["fused, else 2 steps"]);
    let transpose = ConvolutionTranspose { window: same.clone(), groups: 1 };
    check(transpose, &[y.clone(), filters.clone()], &[x.clone()], &["fused, else 2 steps"]);
    // No engine makes a gradient of filters in f32.
    let grad = Op::from(ConvolutionFilterGrad { window: same, groups: 1 });
    let selection = select(&grad, &[y, x], &[filters.with_dtype(F32)]).unwrap_or_else(|error| panic!("{error}"));
    let [Step::Fused(fused)] = &selection.steps[..] else { panic!("{:?}", selection.steps) };
    let [Step::Engine(engine), Step::Launch(cast)] = &fused.steps[..] else { panic!("{fused:?}") };
    let cudnn::Kernel::Convolution(convolution) = &engine.kernel else { panic!("{engine:?}") };
    assert_eq!((convolution.tensors[1].dtype, engine.buffers[1]), (Bf16, cast.buffers[0]));
    // A filter of one element is a product there too.
    let [x, filters, y] = [[4, 14, 14, 32], [64, 1, 1, 32], [4, 14, 14, 64]].map(|shape| t(Bf16, &shape));
    check(Convolution { window: Window::default(), groups: 1 }, &[x, filters], &[y], &["gemm 1x784x64x32"]);
}

/// A byte of scratch memory for each window and channel, or more where windows have more elements or vectors few channels.
#[test]
fn derivatives_of_pooling_note_the_largest_elements() {
    let scratch = |dtype: DType, sides: u64, channels: u64| {
        let (kernel, side) = ([sides; 2], sides + 10);
        let (x, y) = (t(dtype, &[2, side, side, channels]), t(dtype, &[2, 11, 11, channels]));
        let op = MaxPoolGrad { kernel, window: Window::default() };
        check(op.clone(), &[y.clone(), x.clone()], &[x.clone()], &["max_pool_notes", "max_pool_grad"]);
        let bytes = select(&op.into(), &[y.clone(), x.clone()], &[x]).unwrap().scratch;
        bytes as f64 / y.elements() as f64
    };
    // Beginnings of scratch memory are multiples of 256 bytes.
    let each = |dtype, sides, channels| scratch(dtype, sides, channels).round();
    assert_eq!([Bf16, F32].map(|dtype| each(dtype, 3, 64)), [1.0, 1.0]);
    assert_eq!([16, 17, 257].map(|sides| each(Bf16, sides, 64)), [1.0, 2.0, 4.0]);
    assert_eq!([6, 5].map(|channels| each(Bf16, 3, channels)), [2.0, 4.0]);
}

#[test]
fn what_has_no_kernel_says_so() {
    let x = t(Bool, &[8]);
    let op = Op::from(Unary { kind: UnaryKind::Abs });
    let error = select(&op, &[x.clone()], &[x]).map(|_| ()).map_err(|error| error.to_string());
    assert_eq!(error, Err("no CUDA kernel for `abs` on bool[8]: integers".to_string()));
}

#[test]
fn a_missing_driver_is_an_error_with_a_remedy() {
    let present = super::require(&[0], 1);
    let Err(error) = present else { return eprintln!("skipped: this machine has CUDA") };
    let text = error.to_string();
    assert!(text.contains("missing: install") || text.contains("GPU") || text.contains("driver"), "{text}");
}

/// A tall stack of matrices is cut where the grid ends.
#[test]
fn many_matrices_in_8_bits_are_several_launches() {
    let quantized = |matrices: u64| {
        let x = t(Bf16, &[matrices, 16, 32]);
        let results = [t(DType::F8e4m3, &[matrices, 16, 32]), t(DType::F8e4m3, &[matrices, 32, 16])];
        let steps = select(&Quantize {}.into(), &[x, t(F32, &[matrices])], &results).unwrap().steps;
        let grid = |step: &Step| match step {
            Step::Launch(launch) => u64::from(launch.grid[2]),
            _ => panic!("a launch"),
        };
        steps.iter().map(grid).collect::<Vec<_>>()
    };
    assert_eq!(quantized(3), [3]);
    let many = quantized(100_000);
    assert!(many.iter().all(|blocks| *blocks <= 65_535) && many.iter().sum::<u64>() == 100_000, "{many:?}");
}

#[test]
fn a_gpu_without_8_bit_units_is_refused_by_name() {
    use super::device::lacks_f8_units;
    let message = lacks_f8_units((8, 0)).unwrap();
    assert!(message.contains("8.0") && message.contains("fp8") && message.contains("--precision bf16"), "{message}");
    assert_eq!([(8, 9), (9, 0), (10, 0)].map(lacks_f8_units), [None, None, None]);
}

/// A row of elements is cut into tiles of as many units each, of which next to none is idle.
#[test]
fn tiles_of_a_row_are_as_long_as_each_other() {
    let tiles = |columns: u64| {
        let (x, y) = (t(Bf16, &[4096, columns]), t(F32, &[columns]));
        let grad = Op::from(UnaryGrad { kind: UnaryKind::Gelu });
        let steps = vec![
            FusedStep { op: grad, operands: vec![0, 1], results: vec![x.clone()], source: None },
            FusedStep {
                op: Reduce { kind: ReduceOp::Sum, dims: vec![0] }.into(),
                operands: vec![2],
                results: vec![y.clone()],
                source: None,
            },
        ];
        let region = Fused { steps, results: vec![2, 3] };
        let steps = select(&region.into(), &[x.clone(), x.clone()], &[x, y]).unwrap().steps;
        let Some(Step::Launch(launch)) = steps.first() else { panic!("a launch") };
        (launch.grid[0], launch.kernel.threads)
    };
    // Of 8 elements a unit: 192 units are two tiles of 96, not one of 128 and half of another.
    assert_eq!([1024, 1536, 3072].map(tiles), [(1, 128), (2, 96), (3, 128)]);
}
