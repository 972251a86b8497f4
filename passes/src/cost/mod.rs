//! The cost model: how long a node or a collective takes, in seconds.
//!
//! A node takes the longer of its arithmetic (at the share of the peak that its *local* shape
//! reaches) and its memory traffic, plus the start of one kernel. Collectives are in
//! [`collective`]. All figures come from the cluster's [`Profile`].

pub mod collective;

use crate::cluster::Profile;
use shardc_ir::ops::{Matmul, Op, OpDef};
use shardc_ir::{DType, Flops, Seconds, TensorType};

/// What bounds a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Matrix products and attention.
    Matmul,
    /// Memory traffic or launches.
    Memory,
}

/// How long a node takes on one device, from the types one rank sees.
pub fn node_seconds(op: &Op, operands: &[TensorType], results: &[TensorType], device: &Profile) -> (Seconds, Bound) {
    if is_view(op) {
        return (Seconds(0.0), Bound::Memory);
    }
    let traffic =
        op.bytes(operands, results).0 as f64 / (device.memory_bandwidth.value * device.memory_efficiency.value);
    let launch = device.launch_seconds.value;
    let Some(rate) = arithmetic_rate(op, operands, results, device) else {
        return (Seconds(traffic + launch), Bound::Memory);
    };
    let arithmetic = op.flops(operands, results).0 / rate;
    (Seconds(arithmetic.max(traffic) + launch), Bound::Matmul)
}

/// Whether the operation moves nothing: a leaf, a reshape, or a value that is folded into its reader.
pub fn is_view(op: &Op) -> bool {
    op.is_leaf() || matches!(op, Op::Reshape(_) | Op::Constant(_) | Op::Literal(_))
}

/// The FLOPs that count as the model's: matrix products and attention.
pub fn model_flops(op: &Op, operands: &[TensorType], results: &[TensorType]) -> Flops {
    match op {
        Op::Matmul(_) | Op::Attention(_) => op.flops(operands, results),
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
        DType::F8e4m3 | DType::F8e5m2 => 2.0 * device.peak_bf16.value,
        _ => device.peak_f32.value,
    }
}

/// The FLOP/s that an operation of these shapes reaches; `None` where arithmetic does not count.
fn arithmetic_rate(op: &Op, operands: &[TensorType], results: &[TensorType], device: &Profile) -> Option<f64> {
    let (share, dtype) = match op {
        Op::Matmul(matmul) => (matmul_share(matmul, operands, results, device), operands[0].dtype),
        Op::Attention(_) => {
            let share =
                device.attention_forward.value * ramp(operands[1].shape[1], device.attention_forward_ramp.value);
            (share * narrow(&operands[0], device), operands[0].dtype)
        }
        Op::AttentionGrad(_) => {
            let share =
                device.attention_backward.value * ramp(operands[2].shape[1], device.attention_backward_ramp.value);
            (share * narrow(&operands[1], device), operands[1].dtype)
        }
        _ => return None,
    };
    Some((peak(dtype, device) * share).max(1.0))
}

fn ramp(size: u64, half: f64) -> f64 {
    size as f64 / (size as f64 + half)
}

fn narrow(query: &TensorType, device: &Profile) -> f64 {
    if query.shape.last().is_some_and(|d| *d < 128) { device.attention_narrow.value } else { 1.0 }
}

/// The share of the peak: deep products amortise their prologue, and the last wave of tiles leaves
/// multiprocessors idle.
fn matmul_share(matmul: &Matmul, operands: &[TensorType], results: &[TensorType], device: &Profile) -> f64 {
    let (Ok(dims), Ok(sizes)) = (matmul.dims(), matmul.sizes(operands)) else { return 1.0 };
    let product = |letters: &[char]| {
        let size = |letter: &char| sizes.iter().find(|(known, _)| known == letter).map_or(1, |(_, size)| *size);
        letters.iter().map(size).product::<u64>()
    };
    let depth = ramp(product(&dims.k), device.matmul_ramp.value);
    let tiles = results[0].elements() as f64 / device.matmul_tile.value;
    let waves = tiles / device.multiprocessors.value;
    let filled = if waves < 1.0 { waves.max(1e-3).sqrt() } else { waves / waves.ceil() };
    device.matmul_efficiency.value * depth * filled
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shapes measured on H200: within 8% of the rate reached there.
    #[test]
    fn matmuls_take_what_was_measured() {
        let device = Profile::find("h200").unwrap();
        let measured = [
            (8192, 8192, 8192, 776e12),
            (16384, 8192, 2048, 656e12),
            (16384, 2048, 8192, 714e12),
            (16384, 128256, 2048, 669e12),
        ];
        for (m, n, k, rate) in measured {
            let ty = |a, b| TensorType::new(DType::Bf16, [a, b]);
            let op = Op::from(Matmul::plain());
            let (seconds, bound) = node_seconds(&op, &[ty(m, k), ty(k, n)], &[ty(m, n)], &device);
            let predicted = 2.0 * (m * n * k) as f64 / seconds.0;
            assert_eq!(bound, Bound::Matmul);
            assert!((predicted / rate - 1.0).abs() < 0.08, "{m} {n} {k}: {predicted:e} for {rate:e}");
        }
    }
}
