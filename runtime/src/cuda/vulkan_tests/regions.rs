//! Regions: what several operations make in one kernel, and what is no region.

use super::*;

#[test]
fn regions() {
    let Some(client) = client() else { return };
    let add = || Binary { kind: BinaryKind::Add };
    let sum = |dims: &[usize]| Reduce { kind: ReduceOp::Sum, dims: dims.to_vec() };
    for (rows, columns) in [([40, 50], 96), ([1, 7], 36), ([3, 1000], 4), ([2, 3], 2500)] {
        let x = t(&[rows[0], rows[1], columns]);
        let (row, d) = (t(&rows), t(&[columns]));
        // The derivative of a norm, the residual's sum and the gradient of a bias.
        for is_centered in [true, false] {
            let (norm, results, count): (Op, Vec<TensorType>, usize) = match is_centered {
                true => (LayerNormGrad {}.into(), vec![x.clone(), d.clone(), d.clone()], 5),
                false => (RmsNormGrad {}.into(), vec![x.clone(), d.clone()], 4),
            };
            let operands: Vec<usize> = (0..count).collect();
            let residual = count;
            let dx = count + 1;
            let total = dx + results.len();
            let steps = vec![
                step(norm, &operands, &results),
                step(add(), &[residual, dx], &[x.clone()]),
                step(sum(&[0, 1]), &[total], &[d.clone()]),
            ];
            let fused = Fused { steps, results: (dx + 1..total + 2).collect() };
            let mut types = vec![x.clone(), x.clone(), d.clone(), row.clone(), row.clone()];
            types.truncate(count);
            types.push(x.clone());
            let made: Vec<TensorType> = results[1..].iter().cloned().chain([x.clone(), d.clone()]).collect();
            check(&client, fused, &types, &made, 1);
        }
        // A residual's sum and a norm of it, scaled by a number.
        let steps = vec![
            step(add(), &[0, 1], &[x.clone()]),
            step(RmsNorm { eps: 1e-5 }, &[5, 2], &[x.clone(), row.clone()]),
            step(Binary { kind: BinaryKind::Mul }, &[6, 3], &[x.clone()]),
            step(Broadcast { dims: vec![2] }, &[4], &[x.clone()]),
            step(Binary { kind: BinaryKind::Sub }, &[8, 9], &[x.clone()]),
        ];
        let fused = Fused { steps, results: vec![5, 7, 10] };
        let types = [x.clone(), x.clone(), d.clone(), t(&[]), d.clone()];
        check(&client, fused, &types, &[x.clone(), row.clone(), x.clone()], 1);
        // An activation's derivative and the gradient of a bias.
        let steps = vec![
            step(UnaryGrad { kind: UnaryKind::GeluTanh }, &[0, 1], &[x.clone()]),
            step(sum(&[0, 1]), &[2], &[d.clone()]),
        ];
        check(&client, Fused { steps, results: vec![2, 3] }, &[x.clone(), x.clone()], &[x.clone(), d.clone()], 1);
        // Rows that are narrower than a block are several at a time: what is the same in all of them, and sums over them.
        let steps = vec![
            step(Broadcast { dims: vec![2] }, &[1], &[x.clone()]),
            step(Binary { kind: BinaryKind::Mul }, &[0, 2], &[x.clone()]),
            step(sum(&[0, 1]), &[3], &[d.clone()]),
        ];
        check(&client, Fused { steps, results: vec![3, 4] }, &[x.clone(), d.clone()], &[x.clone(), d.clone()], 1);
        // The same, as it comes from the other ranks.
        let steps = vec![
            step(shardc_ir::ops::Cast {}, &[1], std::slice::from_ref(&d)),
            step(Broadcast { dims: vec![2] }, &[2], &[x.clone()]),
            step(Binary { kind: BinaryKind::Mul }, &[0, 3], &[x.clone()]),
        ];
        check(&client, Fused { steps, results: vec![4] }, &[x.clone(), d.clone()], std::slice::from_ref(&x), 1);
        // What is left of a norm over samples: differences made on the way, two sums, and what is normalized.
        let steps = vec![
            step(UnaryGrad { kind: UnaryKind::Relu }, &[0, 1], &[x.clone()]),
            step(sum(&[0, 1]), &[5], &[d.clone()]),
            step(Broadcast { dims: vec![2] }, &[2], &[x.clone()]),
            step(Binary { kind: BinaryKind::Mul }, &[5, 7], &[x.clone()]),
            step(Broadcast { dims: vec![2] }, &[3], &[x.clone()]),
            step(Binary { kind: BinaryKind::Sub }, &[4, 9], &[x.clone()]),
            step(Binary { kind: BinaryKind::Mul }, &[5, 10], &[x.clone()]),
            step(sum(&[0, 1]), &[11], &[d.clone()]),
        ];
        let types = [x.clone(), x.clone(), d.clone(), d.clone(), x.clone()];
        check(&client, Fused { steps, results: vec![6, 8, 12] }, &types, &[d.clone(), x.clone(), d.clone()], 1);
        // Elements that know neither row nor column.
        let steps = vec![
            step(SwigluGrad {}, &[0, 1, 2], &[x.clone(), x.clone()]),
            step(Affine { scale: 0.5, offset: 1.0 }, &[3], &[x.clone()]),
            step(shardc_ir::ops::Cast {}, &[5], &[x.clone()]),
            step(Unary { kind: UnaryKind::Tanh }, &[6], &[x.clone()]),
        ];
        let types = [x.clone(), x.clone(), x.clone()];
        check(&client, Fused { steps, results: vec![4, 7] }, &types, &[x.clone(), x.clone()], 1);
        let norm: [Op; 2] = [LayerNorm { eps: 1e-5 }.into(), RmsNorm { eps: 1e-5 }.into()];
        check(&client, norm[0].clone(), &[x.clone(), d.clone(), d.clone()], &[x.clone(), row.clone(), row.clone()], 1);
        check(&client, norm[1].clone(), &[x.clone(), d.clone()], &[x, row], 1);
    }
}

/// Smaller values are copied on the way: for each group of channels of a sample, each row, each channel of a sample.
#[test]
fn copies_in_regions() {
    let Some(client) = client() else { return };
    let binary = |kind: BinaryKind| Binary { kind };
    let copy = |dims: &[usize], ty: &TensorType, from: usize| {
        step(Broadcast { dims: dims.to_vec() }, &[from], std::slice::from_ref(ty))
    };
    for shape in [[3, 50, 8, 2], [2, 1000, 3, 16], [2, 7, 5, 1], [1, 9, 4, 3], [4, 6, 32, 12], [2, 3, 1, 2500]] {
        let x = t(&shape);
        let all: [&[usize]; 9] = [&[0, 2], &[0], &[1], &[2], &[3], &[0, 1], &[1, 3], &[1, 2, 3], &[0, 2, 3]];
        for dims in all {
            let small = t(&dims.iter().map(|dim| shape[*dim]).collect::<Vec<_>>());
            // Elements alone, and with what is the same in all rows and their sum.
            let steps = vec![
                copy(dims, &x, 1),
                step(binary(BinaryKind::Sub), &[0, 3], &[x.clone()]),
                step(binary(BinaryKind::Mul), &[4, 4], &[x.clone()]),
                copy(&[], &x, 2),
                step(binary(BinaryKind::Add), &[5, 6], &[x.clone()]),
            ];
            let types = [x.clone(), small.clone(), t(&[])];
            check(&client, Fused { steps, results: vec![4, 7] }, &types, &[x.clone(), x.clone()], 1);
            let column = t(&shape[3..]);
            let steps = vec![
                copy(dims, &x, 1),
                step(binary(BinaryKind::Mul), &[0, 3], &[x.clone()]),
                copy(&[3], &x, 2),
                step(binary(BinaryKind::Add), &[4, 5], &[x.clone()]),
                step(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1, 2] }, &[6], std::slice::from_ref(&column)),
            ];
            let types = [x.clone(), small, column.clone()];
            check(&client, Fused { steps, results: vec![6, 7] }, &types, &[x.clone(), column], 1);
        }
    }
    // Several launches, of which each begins where what is spread does or goes on with its part.
    let x = t(&[24, 16, 8, 16]);
    let all: [&[usize]; 8] = [&[0, 2], &[0], &[1], &[2], &[0, 1], &[1, 3], &[1, 2, 3], &[0, 2, 3]];
    for (dims, column) in all.into_iter().flat_map(|dims| [(dims, false), (dims, true)]) {
        let small = t(&dims.iter().map(|dim| x.shape[*dim]).collect::<Vec<_>>());
        let of = if column { vec![3] } else { vec![] };
        let steps = vec![
            copy(dims, &x, 1),
            step(binary(BinaryKind::Mul), &[0, 3], &[x.clone()]),
            copy(&of, &x, 2),
            step(binary(BinaryKind::Add), &[4, 5], &[x.clone()]),
        ];
        let types = [x.clone(), small, t(if column { &[16] } else { &[] })];
        check_within(&client, Fused { steps, results: vec![6] }, &types, &[x.clone()], 1, x.bytes().0 / 3);
    }
    // Of one size along a dimension; and three parts, which are no region.
    let x = t(&[4, 6, 8, 10]);
    let steps = |dims: &[usize]| vec![copy(dims, &x, 1), step(binary(BinaryKind::Mul), &[0, 2], &[x.clone()])];
    let types = [x.clone(), t(&[4, 1, 8])];
    check(&client, Fused { steps: steps(&[0, 1, 2]), results: vec![3] }, &types, &[x.clone()], 1);
    let long = t(&[2, 3, 2, 3, 2]);
    let copied = step(Broadcast { dims: vec![0, 2, 4] }, &[1], std::slice::from_ref(&long));
    let times = step(binary(BinaryKind::Mul), &[0, 2], std::slice::from_ref(&long));
    let region = Fused { steps: vec![copied, times], results: vec![3] };
    assert!(!crate::CudaTarget.fuses(&region, &[long.clone(), t(&[2, 2, 2])]));
}

/// Sums over the rows of each sample, and over columns beside each other: as a norm over groups of channels makes them,
/// forward and backward.
#[test]
fn sums_of_samples() {
    let Some(client) = client() else { return };
    let binary = |kind: BinaryKind| Binary { kind };
    let shapes = [
        [16, 64, 32, 2],
        [3, 50, 8, 2],
        [1, 1000, 3, 16],
        [3, 1001, 5, 3],
        [2, 128, 3, 40],
        [2, 9, 1, 2500],
        [1, 7, 4, 3],
        [1200, 8, 2, 16],
    ];
    for shape in shapes {
        let x = t(&shape);
        let kept =
            |dims: &[usize]| t(&(0..4).filter(|dim| !dims.contains(dim)).map(|dim| shape[dim]).collect::<Vec<_>>());
        let sum = |dims: &[usize], from: usize| {
            let op = Reduce { kind: ReduceOp::Sum, dims: dims.to_vec() };
            step(op, &[from], std::slice::from_ref(&kept(dims)))
        };
        let all: [&[usize]; 7] = [&[1, 3], &[1], &[1, 2], &[1, 2, 3], &[0, 1], &[0, 1, 3], &[0, 1, 2, 3]];
        for dims in all {
            // What is summed is read, is written, or is neither; a second sum of as many dimensions, or of more.
            let steps = vec![step(binary(BinaryKind::Mul), &[0, 1], &[x.clone()]), sum(dims, 2), sum(dims, 0)];
            let made = [kept(dims), kept(dims)];
            check(&client, Fused { steps, results: vec![3, 4] }, &[x.clone(), x.clone()], &made, 1);
            let last = [&dims[..dims.len() - usize::from(dims.ends_with(&[3]))], &[3]].concat();
            let steps = vec![
                step(Broadcast { dims: vec![0, 2] }, &[1], &[x.clone()]),
                step(binary(BinaryKind::Sub), &[0, 3], &[x.clone()]),
                step(Broadcast { dims: vec![3] }, &[2], &[x.clone()]),
                step(binary(BinaryKind::Mul), &[4, 5], &[x.clone()]),
                sum(dims, 6),
                sum(dims, 4),
                sum(&last, 4),
            ];
            let types = [x.clone(), t(&[shape[0], shape[2]]), t(&shape[3..])];
            let made = [x.clone(), kept(dims), kept(dims), kept(&last)];
            check(&client, Fused { steps, results: vec![4, 7, 8, 9] }, &types, &made, 1);
        }
        // What is the same in all rows has an element for each channel of each group.
        let columns = t(&shape[2..]);
        let steps = vec![
            step(shardc_ir::ops::Cast {}, &[1], &[columns.clone()]),
            step(Broadcast { dims: vec![2, 3] }, &[2], &[x.clone()]),
            step(binary(BinaryKind::Mul), &[0, 3], &[x.clone()]),
            sum(&[1, 3], 4),
        ];
        check(&client, Fused { steps, results: vec![5] }, &[x.clone(), columns], &[kept(&[1, 3])], 1);
    }
    // Several launches of some samples each.
    let (x, made) = (t(&[16, 64, 32, 2]), t(&[16, 32]));
    let steps = vec![
        step(binary(BinaryKind::Mul), &[0, 1], &[x.clone()]),
        step(Reduce { kind: ReduceOp::Sum, dims: vec![1, 3] }, &[2], &[made.clone()]),
    ];
    let region = Fused { steps, results: vec![2, 3] };
    check_within(&client, region, &[x.clone(), x.clone()], &[x.clone(), made.clone()], 1, x.bytes().0 / 3);
    let steps = vec![
        step(Broadcast { dims: vec![0, 2] }, &[1], &[x.clone()]),
        step(binary(BinaryKind::Mul), &[0, 2], &[x.clone()]),
        step(Reduce { kind: ReduceOp::Sum, dims: vec![1, 3] }, &[3], &[made.clone()]),
    ];
    let region = Fused { steps, results: vec![3, 4] };
    check_within(&client, region, &[x.clone(), made.clone()], &[x.clone(), made], 1, x.bytes().0 / 3);
    let (x, small, made) = (t(&[24, 128, 64]), t(&[24, 64]), t(&[64]));
    let steps = vec![
        step(Broadcast { dims: vec![0, 2] }, &[1], &[x.clone()]),
        step(binary(BinaryKind::Mul), &[0, 2], &[x.clone()]),
        step(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }, &[3], &[made.clone()]),
    ];
    let region = Fused { steps, results: vec![3, 4] };
    check_within(&client, region, &[x.clone(), small], &[x.clone(), made], 1, x.bytes().0 / 3);
}

/// A sum over groups ends a region where that is fast: of many rows, in full blocks, of few columns.
#[test]
fn sums_of_samples_that_are_slow_are_refused() {
    let fuses = |shape: &[u64], dims: &[usize]| {
        let x = TensorType::new(DType::Bf16, shape);
        let kept: Vec<u64> = (0..shape.len()).filter(|dim| !dims.contains(dim)).map(|dim| shape[dim]).collect();
        let sum = Reduce { kind: ReduceOp::Sum, dims: dims.to_vec() };
        let steps = vec![step(Binary { kind: BinaryKind::Mul }, &[0, 1], &[x.clone()]), step(sum, &[2], &[t(&kept)])];
        crate::CudaTarget.fuses(&Fused { steps, results: vec![3] }, &[x.clone(), x])
    };
    for (pixels, of) in [(65_536, 2), (16_384, 4), (4096, 8), (1024, 16), (256, 32)] {
        assert!(fuses(&[16, pixels, 32, of], &[1, 3]), "{pixels} pixels");
    }
    assert!(fuses(&[48, 256, 256], &[1, 2]) && fuses(&[4096, 8, 64], &[0]));
    // Few rows; blocks of which most units are idle; all that is left of many columns is one sum; samples beyond a grid.
    assert!(!fuses(&[4096, 4, 32, 32], &[1, 3]) && !fuses(&[16, 9801, 32, 2], &[1, 3]));
    assert!(!fuses(&[16, 256, 256], &[0, 1, 2]) && !fuses(&[100_000, 8, 32, 8], &[1, 3]));
    // Rows themselves, and a middle dimension that is kept between two that are summed behind it.
    assert!(!fuses(&[64, 1024], &[1]) && !fuses(&[16, 1024, 4, 8, 8], &[1, 3]));
}

#[test]
fn what_is_no_region_is_refused() {
    let (x, d) = (t(&[8, 16]), t(&[16]));
    let refused = |steps: Vec<FusedStep>, operands: &[TensorType]| {
        let results = vec![operands.len() + steps.iter().map(|step| step.results.len()).sum::<usize>() - 1];
        let region = Fused { steps, results };
        region.infer(operands, &[]).unwrap_or_else(|error| panic!("{error}"));
        assert!(!crate::CudaTarget.fuses(&region, operands), "{}", region.steps_text());
    };
    let unary = |operand: usize| step(Unary { kind: UnaryKind::Exp }, &[operand], &[x.clone()]);
    // Another operation, a sum over rows, a sum that is read again, and two shapes.
    refused(vec![unary(0), step(Softmax {}, &[1], &[x.clone()])], &[x.clone()]);
    let sum = |dim: usize, ty: &TensorType| {
        step(Reduce { kind: ReduceOp::Sum, dims: vec![dim] }, &[1], std::slice::from_ref(ty))
    };
    refused(vec![unary(0), sum(1, &t(&[8]))], &[x.clone()]);
    let broadcast = step(Broadcast { dims: vec![1] }, &[2], &[x.clone()]);
    refused(vec![unary(0), sum(0, &d), broadcast], &[x.clone()]);
    let other = step(Unary { kind: UnaryKind::Exp }, &[1], std::slice::from_ref(&d));
    refused(vec![step(Unary { kind: UnaryKind::Exp }, &[0], &[x.clone()]), other], &[x.clone(), d.clone()]);
    // What is the same in all rows would be written by all of them.
    let cast = step(shardc_ir::ops::Cast {}, &[1], std::slice::from_ref(&d));
    refused(vec![unary(0), cast], &[x.clone(), d]);
    // A number that the text of a kernel cannot hold.
    for scale in [f64::INFINITY, 1e39, f64::NAN] {
        refused(vec![unary(0), step(Affine { scale, offset: 0.0 }, &[1], &[x.clone()])], &[x.clone()]);
    }
}

/// Selection counts in more than 64 bits where it has to, and says what no kernel does.
#[test]
fn the_largest_and_the_smallest() {
    let half = |shape: &[u64]| TensorType::new(DType::F16, shape);
    let (small, x) = (half(&[64, 1536, 64, 4096]), half(&[64, 1536, 2, 64, 4096]));
    let steps = vec![
        step(Broadcast { dims: vec![0, 1, 3, 4] }, &[1], &[x.clone()]),
        step(Binary { kind: BinaryKind::Mul }, &[0, 2], &[x.clone()]),
    ];
    let region = Fused { steps, results: vec![3] };
    let selection = super::select_within(&region.into(), &[x.clone(), small.clone()], &[x.clone()], 1 << 31).unwrap();
    let ends = selection.steps.iter().rev().find_map(|step| match step {
        Step::Launch(launch) => Some(launch.buffers.clone()),
        _ => None,
    });
    let [Arg::Operand(0, at), Arg::Operand(1, of_small), _] = ends.unwrap()[..] else { panic!("three buffers") };
    assert!(at == 2 * of_small && at < x.bytes().0 && of_small < small.bytes().0, "{at} and {of_small}");
    let refused = |op: Op, operands: &[TensorType], results: &[TensorType], words: &str| {
        let error = super::select_within(&op, operands, results, 1 << 31).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    let none = t(&[0, 4]);
    let sum = Reduce { kind: ReduceOp::Sum, dims: vec![0] };
    refused(sum.into(), &[none.clone()], &[t(&[4])], "an operand without elements");
    refused(EmbeddingGrad { start: 0 }.into(), &[none, ids(&[0])], &[t(&[2, 4])], "an operand without elements");
    let row = t(&[2, 1 << 21]);
    let norm = RmsNorm { eps: 1e-5 };
    refused(norm.into(), &[row.clone(), t(&[1 << 21])], &[row, t(&[2])], "a norm of rows of 2097152 elements");
    let far = Iota { dim: 0, start: (1 << 32) - 2 };
    refused(far.into(), &[], &[TensorType::new(DType::I64, [3])], "numbers of 2^32 and more");
}
