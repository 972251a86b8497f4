//! Cases of regions: several operations that are one kernel.

use super::Case;
use super::cases::{case, t};
use shardc_ir::ops::*;
use shardc_ir::{DType, Op, TensorType};

use DType::F32;

/// A step of a region.
pub fn step(op: impl Into<Op>, operands: &[usize], results: &[TensorType]) -> FusedStep {
    FusedStep { op: op.into(), operands: operands.to_vec(), results: results.to_vec(), source: None }
}

/// The regions of a backward pass over `shape`: the derivative of a norm, the residual's sum and the gradient of a
/// bias; the derivative of an activation and the gradient of a bias.
pub fn regions(f: DType, shape: &[u64]) -> [Case; 3] {
    let (x, row, last) = (t(f, shape), t(F32, &shape[..shape.len() - 1]), shape.len() - 1);
    let (d, w) = (t(f, &shape[last..]), t(F32, &shape[last..]));
    let (add, sum) = (Binary { kind: BinaryKind::Add }, Reduce { kind: ReduceOp::Sum, dims: (0..last).collect() });
    let steps = vec![
        step(LayerNormGrad {}, &[0, 1, 2, 3, 4], &[x.clone(), w.clone(), w.clone()]),
        step(add.clone(), &[5, 6], &[x.clone()]),
        step(sum.clone(), &[9], &[w.clone()]),
    ];
    let operands = [x.clone(), x.clone(), d.clone(), row.clone(), row.clone(), x.clone()];
    let results = [w.clone(), w.clone(), x.clone(), w.clone()];
    let layer_norm = case(Fused { steps, results: vec![7, 8, 9, 10] }, &operands, &results);
    let steps = vec![step(RmsNormGrad {}, &[0, 1, 2, 3], &[x.clone(), w.clone()]), step(add, &[4, 5], &[x.clone()])];
    let rms_norm = case(Fused { steps, results: vec![6, 7] }, &[x.clone(), x.clone(), d, row, x.clone()], &[w, x]);
    [layer_norm, rms_norm, slopes_and_sums(f, shape, UnaryKind::GeluTanh)]
}

/// The derivative of a function of each element, and its sums over the rows: the gradients of what a bias was added to.
pub fn slopes_and_sums(f: DType, shape: &[u64], kind: UnaryKind) -> Case {
    let (x, w) = (t(f, shape), t(F32, &shape[shape.len() - 1..]));
    let sum = Reduce { kind: ReduceOp::Sum, dims: (0..shape.len() - 1).collect() };
    let steps = vec![step(UnaryGrad { kind }, &[0, 1], &[x.clone()]), step(sum, &[2], &[w.clone()])];
    case(Fused { steps, results: vec![2, 3] }, &[x.clone(), x.clone()], &[x, w])
}

/// The sums over the rows of some tensors: one by itself, or several as one region.
pub fn row_sums(f: DType, shape: &[u64], count: usize) -> Case {
    let (x, w) = (t(f, shape), t(F32, &shape[shape.len() - 1..]));
    let op = Reduce { kind: ReduceOp::Sum, dims: (0..shape.len() - 1).collect() };
    if count == 1 {
        return case(op, &[x], &[w]);
    }
    let steps = (0..count).map(|index| step(op.clone(), &[index], std::slice::from_ref(&w))).collect();
    let region = Fused { steps, results: (count..2 * count).collect() };
    case(region, &vec![x; count], &vec![w; count])
}

/// What a norm over groups of channels does with them: sums, differences of the means and sums of their squares, a scale;
/// and for its derivative the sums of cotangents, and of their products with what was normalized.
pub fn groups(f: DType, shape: [u64; 4]) -> [Case; 4] {
    let (x, small, sums) = (t(f, &shape), t(f, &[shape[0], shape[2]]), t(F32, &[shape[0], shape[2]]));
    let binary = |kind| Binary { kind };
    let copy = || step(Broadcast { dims: vec![0, 2] }, &[1], std::slice::from_ref(&x));
    let op = Reduce { kind: ReduceOp::Sum, dims: vec![1, 3] };
    let sum = |from: usize| step(op.clone(), &[from], std::slice::from_ref(&sums));
    let times = |of: [usize; 2]| step(binary(BinaryKind::Mul), &of, std::slice::from_ref(&x));
    let centered =
        vec![copy(), step(binary(BinaryKind::Sub), &[0, 2], std::slice::from_ref(&x)), times([3, 3]), sum(4)];
    let scaled = vec![copy(), times([0, 2])];
    let slopes = vec![times([0, 1]), sum(2), sum(0)];
    let operands = [x.clone(), small];
    [
        case(op.clone(), std::slice::from_ref(&x), std::slice::from_ref(&sums)),
        case(Fused { steps: centered, results: vec![3, 5] }, &operands, &[x.clone(), sums.clone()]),
        case(Fused { steps: scaled, results: vec![3] }, &operands, std::slice::from_ref(&x)),
        case(Fused { steps: slopes, results: vec![3, 4] }, &[x.clone(), x.clone()], &[sums.clone(), sums.clone()]),
    ]
}
