//! How long one operation takes on one device.

use super::convolution::Convolution;
use super::machine::Machine;
use super::{attention, matmul};
use crate::cluster::Profile;
use shardc_ir::ops::{Fused, FusedStep, Matmul, Op, OpDef};
use shardc_ir::{DType, Flops, Graph, Role, Seconds, TensorType, ValueId};

/// What bounds a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Matrix products, convolutions and attention.
    Matmul,
    /// Memory traffic or launches.
    Memory,
}

/// Which half of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward, its recomputation, the update.
    Forward,
    /// Backward.
    Backward,
}

impl Pass {
    /// The half that a node of this role belongs to.
    pub fn of(role: Role) -> Self {
        if matches!(role, Role::Backward(_)) { Self::Backward } else { Self::Forward }
    }
}

impl Machine<'_> {
    /// How long a node takes, from the types one rank sees.
    pub fn seconds(self, op: &Op, operands: &[TensorType], results: &[TensorType], pass: Pass) -> (Seconds, Bound) {
        if is_view(op) {
            return (Seconds(0.0), Bound::Memory);
        }
        let device = self.device;
        let traffic = op.bytes(operands, results).0 as f64 / self.bandwidth();
        let launch = self.launch();
        let convolution = Convolution::of(op, operands, results);
        let product = match op {
            Op::Matmul(product) => matmul::Sizes::of(product, operands).map(|sizes| (sizes, 1.0)),
            Op::ScaledMatmul(product) => matmul::Sizes::of_scaled(product, operands),
            Op::Fused(region) if region.is_products() => {
                matmul::Sizes::beside(region, operands).map(|sizes| (sizes, 1.0))
            }
            _ => convolution.map(|convolution| (convolution.sizes, 1.0)),
        };
        if let Some((sizes, count)) = product {
            let (peak, rate) = (peak(operands[0].dtype, device), rate(operands[0].dtype, device));
            let whole =
                matches!(op, Op::Matmul(_)).then(|| matmul::alignment(operands[..2].iter().chain(&results[..1])));
            let arithmetic = whole.unwrap_or(1.0) * matmul::seconds(sizes, rate, self);
            let (alone, launch) = (count * arithmetic, count * launch);
            // One product runs at the clock that a short burst reaches, those of a step at what the power allows.
            let sustained = op.flops(operands, results).0 / (peak * device.sustained_efficiency.value);
            let arithmetic = alone.max(sustained);
            let before = match op {
                Op::Matmul(product) => matmul::copied_bytes(product, operands),
                _ => 0.0,
            };
            let before = if before > 0.0 { before / self.bandwidth() + launch } else { 0.0 };
            let after = epilogue_bytes(op, operands, results) / self.bandwidth();
            let seconds = match convolution {
                Some(convolution) => convolution.seconds(arithmetic, traffic - after, self),
                None => arithmetic.max(traffic - after),
            };
            return (Seconds(before + seconds + after + launch), Bound::Matmul);
        }
        let peak = |index: usize| peak(operands[index].dtype, device);
        let first = usize::from(matches!(op, Op::AttentionGrad(_)));
        let fused = matches!(op, Op::Attention(_) | Op::AttentionGrad(_));
        if fused && let Some(time) = attention::seconds(op, operands, results, peak(first), device, self.library) {
            let after = epilogue_bytes(op, operands, results) / self.bandwidth();
            return (Seconds(time.max(traffic - after) + after + launch), Bound::Matmul);
        }
        let times = match pass {
            Pass::Forward => self.library.traffic_forward,
            Pass::Backward => self.library.traffic_backward,
        };
        (Seconds(times * traffic / self.library.reach.of(op) + launches(op, operands) * launch), Bound::Memory)
    }

    /// How long one of the products of a [region](beside) takes.
    pub fn beside(self, region: Fused, operands: &[TensorType], pass: Pass) -> (Seconds, Bound) {
        let count = region.steps.len().max(1) as f64;
        let results: Vec<TensorType> = region.steps.iter().flat_map(|step| step.results.clone()).collect();
        let (seconds, bound) = self.seconds(&region.into(), operands, &results, pass);
        (Seconds(seconds.0 / count), bound)
    }
}

/// What the sums of columns take besides, in launches: blocks of rows leave partial sums, which others add up when all are
/// there. Those of ResNet-50's norms in bf16 over two and four ranks, on H100s.
const COLUMNS: f64 = 2.0;

/// What an operation that is no product takes to start, in launches: one on several tensors has one for all of them, and
/// where it sums, another that adds up what blocks of the first left.
pub fn launches(op: &Op, operands: &[TensorType]) -> f64 {
    match op {
        Op::Each(each) if matches!(*each.op, Op::SumSquares(_)) => 2.0,
        _ if sums_columns(op, operands) => 1.0 + COLUMNS,
        _ => 1.0,
    }
}

/// Whether an operation sums over other dimensions than the last, or is a region that ends in sums.
fn sums_columns(op: &Op, operands: &[TensorType]) -> bool {
    match op {
        Op::Reduce(reduce) => operands.first().is_some_and(|ty| !reduce.dims.contains(&(ty.rank().saturating_sub(1)))),
        // The gradients of norms count such sums already.
        Op::Fused(region) => {
            let any = |is: fn(&Op) -> bool| region.steps.iter().any(|step| is(&step.op));
            any(|op| matches!(op, Op::Reduce(_))) && !any(is_norm_gradient)
        }
        _ => false,
    }
}

fn is_norm_gradient(op: &Op) -> bool {
    matches!(op, Op::LayerNormGrad(_) | Op::RmsNormGrad(_))
}

/// `count` products like this one, which read the same first factor, and the types of what all of them read.
pub fn beside(
    product: &Matmul,
    count: usize,
    operands: &[TensorType],
    results: &[TensorType],
) -> (Fused, Vec<TensorType>) {
    let (shared, own) = operands.split_at(1);
    let all = [shared, &vec![own; count].concat()].concat();
    let step = |index: usize| FusedStep {
        op: product.clone().into(),
        operands: [0].into_iter().chain((0..own.len()).map(|at| 1 + index * own.len() + at)).collect(),
        results: results.to_vec(),
        source: None,
    };
    let made = all.len()..all.len() + count * results.len();
    (Fused { steps: (0..count).map(step).collect(), results: made.collect() }, all)
}

/// Bytes that a product moves when its arithmetic is over: what it adds to each element or reads beside it, and
/// further results. They do not hide under the arithmetic of the same tile. Nor does what attention's derivative in a
/// fixed order reads again: the gradient of the queries is a product of its own, which starts when all of the
/// derivative of the scores is written, and is bound by reading that.
pub fn epilogue_bytes(op: &Op, operands: &[TensorType], results: &[TensorType]) -> f64 {
    match op {
        Op::Matmul(_) => operands[2..].iter().chain(&results[1..]).map(|ty| ty.bytes().0 as f64).sum(),
        Op::AttentionGrad(op) => op.written_scores(operands).0 as f64,
        _ => 0.0,
    }
}

/// Whether the operation moves nothing: a leaf, a reshape, or a value that is folded into its reader.
pub fn is_view(op: &Op) -> bool {
    op.is_leaf() || matches!(op, Op::Reshape(_) | Op::Constant(_) | Op::Literal(_))
}

/// A value, and what it shows through views, one after the other; the last of them is no view's.
pub fn through_views(graph: &Graph, value: ValueId) -> impl Iterator<Item = ValueId> {
    let shown = |value: &ValueId| {
        let node = graph.def(*value);
        if is_view(&node.op) { node.operands.first().copied() } else { None }
    };
    std::iter::successors(Some(value), shown)
}

/// Whether the operation is bound by arithmetic: matrix products, convolutions and attention.
pub fn is_product(op: &Op) -> bool {
    matches!(
        op,
        Op::Matmul(_)
            | Op::ScaledMatmul(_)
            | Op::Attention(_)
            | Op::AttentionGrad(_)
            | Op::Convolution(_)
            | Op::ConvolutionTranspose(_)
            | Op::ConvolutionFilterGrad(_)
    ) || matches!(op, Op::Fused(region) if region.is_products())
}

/// The FLOPs that count as the model's: matrix products, convolutions and attention.
pub fn model_flops(op: &Op, operands: &[TensorType], results: &[TensorType]) -> Flops {
    match op {
        Op::Matmul(_)
        | Op::ScaledMatmul(_)
        | Op::Attention(_)
        | Op::Convolution(_)
        | Op::ConvolutionTranspose(_)
        | Op::ConvolutionFilterGrad(_) => op.flops(operands, results),
        // The backward kernel makes the scores again: 2 of its 2.5 parts are the model's.
        Op::AttentionGrad(_) => op.flops(operands, results) * 0.8,
        _ => Flops(0.0),
    }
}

/// The dense rate of products of this element type in FLOP/s. Those of f32 are never made in TF32.
pub fn peak(dtype: DType, device: &Profile) -> f64 {
    match dtype {
        DType::Bf16 => device.peak_bf16.value,
        DType::F16 => device.peak_f16.value,
        DType::F8e4m3 | DType::F8e5m2 => device.peak_f8.value,
        _ => device.peak_f32.value,
    }
}

/// FLOP/s of a large product.
fn rate(dtype: DType, device: &Profile) -> f64 {
    let share = match dtype {
        DType::F8e4m3 | DType::F8e5m2 => device.f8_efficiency.value,
        _ => device.matmul_efficiency.value,
    };
    peak(dtype, device) * share
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::ops::{Attention, AttentionGrad, ScaledMatmul};

    #[test]
    fn products_in_8_bits_run_sample_by_sample() {
        let device = Profile::find("h200").unwrap();
        let op = Op::from(ScaledMatmul { spec: "bsk,nk->bsn".into() });
        let seconds = |batch: u64, seq: u64| {
            let (a, b) =
                (TensorType::new(DType::F8e4m3, [batch, seq, 768]), TensorType::new(DType::F8e4m3, [768, 768]));
            let scales = [TensorType::new(DType::F32, [batch]), TensorType::scalar(DType::F32)];
            let result = TensorType::new(DType::Bf16, [batch, seq, 768]);
            let operands = [&[a, b], &scales[..]].concat();
            Machine::own(&device).seconds(&op, &operands, &[result], Pass::Forward).0.0
        };
        assert!(seconds(32, 2048) > 1.5 * seconds(1, 65536), "{} {}", seconds(32, 2048), seconds(1, 65536));
    }

    /// The shapes measured on H200: alone (the first two), and in steps, tuned by cuBLASLt. A wide result of depth 768
    /// comes out 11% slow: products of that depth with a narrow one reach 69% there, and the ramp is between them.
    #[test]
    fn matmuls_take_what_was_measured() {
        let mut device = Profile::find("h200").unwrap();
        device.sustained_efficiency.value = 1.0;
        let measured = [
            (8192, 8192, 8192, 776e12, 0.1),
            (16384, 2048, 8192, 714e12, 0.1),
            (16384, 2048, 8192, 742e12, 0.1),
            (16384, 8192, 2048, 791e12, 0.1),
            (8192, 128256, 2048, 776e12, 0.1),
            (16384, 2048, 2048, 694e12, 0.1),
            (2048, 2048, 16384, 696e12, 0.1),
            (65536, 768, 768, 684e12, 0.1),
            (65536, 2048, 768, 766e12, 0.12),
            (8192, 50304, 768, 779e12, 0.12),
        ];
        for (m, n, k, rate, most) in measured {
            let ty = |a, b| TensorType::new(DType::Bf16, [a, b]);
            let op = Op::from(Matmul::plain());
            let machine = Machine::own(&device);
            let (seconds, bound) = machine.seconds(&op, &[ty(m, k), ty(k, n)], &[ty(m, n)], Pass::Forward);
            let predicted = 2.0 * (m * n * k) as f64 / seconds.0;
            assert_eq!(bound, Bound::Matmul);
            assert!((predicted / rate - 1.0).abs() < most, "{m} {n} {k}: {predicted:e} for {rate:e}");
        }
    }

    /// The 16 layers of Llama 1B with 4 sequences of 4096 tokens: steps on one H200 took 253.2 ms, and 259.4 ms in a
    /// fixed order.
    #[test]
    fn a_fixed_order_takes_what_was_measured() {
        let device = Profile::find("h200").unwrap();
        let ty = |heads| TensorType::new(DType::Bf16, [4, 4096, heads, 64]);
        let (query, key, row) = (ty(32), ty(8), TensorType::new(DType::F32, [4, 32, 4096]));
        let operands = [query.clone(), query.clone(), key.clone(), key.clone(), query.clone(), row];
        let seconds = |deterministic: bool, causal: bool| {
            let op = Op::from(AttentionGrad { causal, scale: 1.0, lead: None, reversed: None, deterministic });
            let results = [query.clone(), key.clone(), key.clone()];
            Machine::own(&device).seconds(&op, &operands, &results, Pass::Backward).0.0
        };
        let [more, whole] = [true, false].map(|causal| 16.0 * (seconds(true, causal) - seconds(false, causal)));
        assert!((more / 6.2e-3 - 1.0).abs() < 0.4, "{more} s more, 6.2 ms measured");
        // Without a mask there are twice the scores.
        assert!((whole / more - 2.0).abs() < 0.01, "{whole} {more}");
    }

    /// cuDNN's causal attention with grouped queries (32 to 8 heads), as measured on H200, alone.
    #[test]
    fn attention_takes_what_was_measured() {
        let mut device = Profile::find("h200").unwrap();
        device.attention_forward_sustained.value = 1.0;
        device.attention_backward_sustained.value = 1.0;
        let measured = [(4096, 64, 420e12, 372e12), (4096, 128, 542e12, 448e12), (16384, 128, 590e12, 529e12)];
        for (seq, width, forward, backward) in measured {
            let ty = |heads| TensorType::new(DType::Bf16, [4, seq, heads, width]);
            let row = TensorType::new(DType::F32, [4, 32, seq]);
            let (query, key) = (ty(32), ty(8));
            let kinds: [(Op, _, _, f64); 2] = [
                (
                    Attention { causal: true, scale: 1.0, lead: None, reversed: None }.into(),
                    vec![query.clone(), key.clone(), key.clone()],
                    vec![query.clone(), row.clone()],
                    forward,
                ),
                (
                    AttentionGrad { causal: true, scale: 1.0, lead: None, reversed: None, deterministic: false }.into(),
                    vec![query.clone(), query.clone(), key.clone(), key.clone(), query.clone(), row.clone()],
                    vec![query.clone(), key.clone(), key.clone()],
                    backward,
                ),
            ];
            for (op, operands, results, rate) in kinds {
                let (seconds, _) = Machine::own(&device).seconds(&op, &operands, &results, Pass::Forward);
                let reached = op.flops(&operands, &results).0 / seconds.0;
                assert!((reached / rate - 1.0).abs() < 0.06, "{seq} x {width}: {reached:e} for {rate:e}");
            }
        }
    }
}
