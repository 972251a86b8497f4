//! How long attention takes, by the generation of its kernel.

use super::library::{Attention, Library};
use super::machine::Machine;
use super::matmul;
use crate::cluster::Profile;
use shardc_ir::ops::{Op, OpDef};
use shardc_ir::{DType, TensorType};

/// Through a step, long sequences keep up more than short ones, whose products take more of the power: this share more, of
/// a sequence `s` the part `s / (s + LONG)` of that. Steps of 4,096 to 131,072 tokens on H200, d = 64 and 128.
const GROWTH: f64 = 0.12;
const LONG: f64 = 10_000.0;

/// Seconds of attention on these operands, on a device with this peak rate (FLOP/s) and memory
/// bandwidth (bytes/s); `None` if `op` is not attention.
pub fn seconds(
    op: &Op,
    operands: &[TensorType],
    results: &[TensorType],
    peak: f64,
    device: &Profile,
    library: &Library,
) -> Option<f64> {
    let (forward, first) = match op {
        Op::Attention(_) => (true, 0),
        Op::AttentionGrad(_) => (false, 1),
        _ => return None,
    };
    let (query, key) = (&operands[first], &operands[first + 1]);
    let [batch, queries, heads, width] = [0, 1, 2, 3].map(|dim| query.shape.get(dim).copied().unwrap_or(1) as f64);
    let keys = key.shape.get(1).copied().unwrap_or(1) as f64;
    let (kernel, backward_kernel, narrow, longer) = match library.attention {
        Attention::Unfused { forward: written, backward } => {
            let bandwidth = device.memory_bandwidth.value * device.memory_efficiency.value;
            let rate = peak * device.matmul_efficiency.value;
            let batch = batch * heads;
            let product = |n: f64, k: f64| {
                matmul::seconds(matmul::Sizes { batch, m: queries, n, k }, rate, Machine { device, library })
            };
            let products = product(keys, width) + product(width, keys);
            let (times, written) = if forward { (1.0, written) } else { (2.0, backward) };
            return Some(times * products + written * batch * queries * keys / bandwidth);
        }
        Attention::Flash { forward, backward } => {
            (forward * device.flash_forward.value, backward * device.flash_backward.value, 1.0, 1.0)
        }
        Attention::Cudnn { forward, backward, ramp } => {
            let narrow = match query.dtype {
                DType::F32 => device.attention_f32.value,
                _ if width < 128.0 => device.attention_narrow.value,
                _ => 1.0,
            };
            (forward * device.attention_forward.value, backward * device.attention_backward.value, narrow, ramp)
        }
    };
    let (share, ramp) = if forward {
        (kernel, device.attention_forward_ramp.value)
    } else {
        (backward_kernel, device.attention_backward_ramp.value * longer)
    };
    // Only cuDNN's kernels come near what the power allows through a step.
    let sustained = match (library.attention, query.dtype) {
        (Attention::Cudnn { .. }, dtype) if dtype != DType::F32 => {
            let least = match forward {
                true => device.attention_forward_sustained.value,
                false => device.attention_backward_sustained.value,
            };
            least * (1.0 + GROWTH * queries / (queries + LONG))
        }
        _ => 1.0,
    };
    // A kernel's rows of queries are what amortises its prologue, at any clock.
    let rate = peak * narrow * share.min(sustained) * queries / (queries + ramp);
    Some(op.flops(operands, results).0 / rate.max(1.0))
}
