//! How long convolutions and their derivatives take: as the products that they are, and what is beside them.

use super::machine::Machine;
use super::matmul::Sizes;
use shardc_ir::ops::{Op, Window};
use shardc_ir::{DType, TensorType};

/// How many times as long it takes to read fewer channels than 16 bytes, and to make filters of them: the colours of pictures
/// for ResNet-50 and a U-Net in bf16 on an H200, 4.3 and 6.4 times, and 3.7 and 3.5 times (`bench/HISTORY.md`).
const FEW_CHANNELS: f64 = 5.3;
const FILTERS_OF_FEW: f64 = 3.6;

/// By which power of the channels that lack to [`MANY_CHANNELS`] convolutions with windows of several elements take longer
/// than their product: tiles are filled with less of each element that lies under the window. Those of ResNet-50 and a
/// U-Net with 16, 32 and 64 channels in bf16 on H100s take 2.3, 1.5 and 1.3 times as long, on average.
const LACKING_CHANNELS: f64 = 0.35;
const MANY_CHANNELS: f64 = 128.0;

/// How many times as long gradients of filters take in f32 as their product: few tiles, and sums over all places of pictures.
/// ResNet-50's with 64 pictures on an H200 take 1.2 to 1.6 times as long.
const DEEP_SUMS: f64 = 1.3;

/// Launches' time that a gradient of filters takes besides: partial sums are added, and rounded. Of ResNet-50's in bf16 with
/// 64 pictures, on an H200.
const SUMS: f64 = 5.0;

/// A convolution or a derivative of one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convolution {
    /// The product that it is, as libraries compute it: the elements under each window are a column, made in registers
    /// (Chetlur et al., "cuDNN", 2014).
    pub sizes: Sizes,
    /// Bytes of the rows that are written and read where there is no such library: those of f32 make it in TF32.
    rows: f64,
    /// How many times as long as the product its kernel takes.
    times: f64,
    is_sum: bool,
    /// Bytes that lie under no filter, where these are further apart than they are long, and all bytes of the result, which is
    /// filled with zeros before.
    between: [f64; 2],
}

impl Convolution {
    /// `None` for any other operation.
    pub fn of(op: &Op, operands: &[TensorType], results: &[TensorType]) -> Option<Self> {
        let (groups, window, y, filters) = match op {
            Op::Convolution(op) => (op.groups, &op.window, &results[0], &operands[1]),
            Op::ConvolutionTranspose(op) => (op.groups, &op.window, &operands[0], &operands[1]),
            Op::ConvolutionFilterGrad(op) => (op.groups, &op.window, &operands[0], &results[0]),
            _ => return None,
        };
        let size = |sizes: &[u64]| sizes.iter().product::<u64>() as f64;
        let (windows, channels) = (size(&y.shape[..3]), (filters.shape[0] / groups.max(1)) as f64);
        let (under, stride) = (size(&filters.shape[1..]), size(&window.stride));
        let batch = groups as f64;
        // How many elements of the filters lie over one of the pictures, where they are the derivative of those.
        let over = match op {
            Op::ConvolutionTranspose(_) => size(&filters.shape[1..3]) / stride,
            _ => 1.0,
        };
        let made = if over < 1.0 { results[0].bytes().0 as f64 } else { 0.0 };
        let sizes = match op {
            Op::Convolution(_) => Sizes { batch, m: channels, n: windows, k: under },
            Op::ConvolutionTranspose(_) => {
                let under_filters = size(&results[0].shape[..3]) * over.min(1.0);
                Sizes { batch, m: filters.shape[3] as f64, n: under_filters, k: channels * over.max(1.0) }
            }
            _ => Sizes { batch, m: channels, n: under, k: windows },
        };
        let dtype = operands[0].dtype;
        let is_plain = filters.shape[1..3] == [1, 1] && *window == Window::default();
        let rows = if dtype == DType::F32 && !is_plain { batch * windows * under * 4.0 } else { 0.0 };
        let is_sum = matches!(op, Op::ConvolutionFilterGrad(_));
        let fewest = channels.min(filters.shape[3] as f64).max(1.0);
        let is_narrow = filters.shape[3] * dtype.size() < 16;
        let times = match (dtype, is_sum) {
            (DType::F32, true) => DEEP_SUMS,
            (DType::F32, false) => 1.0,
            (_, true) if is_narrow => FILTERS_OF_FEW,
            (_, false) if is_narrow => FEW_CHANNELS,
            _ if filters.shape[1..3] == [1, 1] => 1.0,
            _ => (MANY_CHANNELS / fewest).max(1.0).powf(LACKING_CHANNELS),
        };
        Some(Self { sizes, rows, times, is_sum, between: [(1.0 - over.min(1.0)) * made, made] })
    }

    /// Seconds, where its arithmetic takes so many, and moving its bytes.
    pub fn seconds(&self, arithmetic: f64, traffic: f64, machine: Machine<'_>) -> f64 {
        let [between, made] = self.between.map(|bytes| bytes / machine.bandwidth());
        let product = self.times * arithmetic.max(traffic - between);
        let sums = if self.is_sum { SUMS * machine.launch() } else { 0.0 };
        product + made + sums + 2.0 * self.rows / (machine.bandwidth() * machine.library.reach.folds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Profile;
    use crate::cost::node::Pass;

    fn seconds(op: Op, operands: [&[u64]; 2], result: &[u64]) -> f64 {
        let ty = |shape: &[u64]| TensorType::new(DType::Bf16, shape);
        let device = Profile::find("h200").unwrap();
        Machine::own(&device).seconds(&op, &operands.map(ty), &[ty(result)], Pass::Backward).0.0
    }

    /// ResNet-50's on one H200, 256 pictures: three of four elements are zeros.
    #[test]
    fn filters_that_lie_apart_take_what_was_measured() {
        let window = Window { stride: [2, 2], ..Window::default() };
        let transpose = || Op::from(shardc_ir::ops::ConvolutionTranspose { groups: 1, window: window.clone() });
        for (size, channels, measured) in
            [(7, [2048, 1024], 108e-6), (14, [1024, 512], 133e-6), (28, [512, 256], 185e-6)]
        {
            let [from, to] = channels;
            let (dy, filters) = ([256, size, size, from], [from, 1, 1, to]);
            let time = seconds(transpose(), [&dy, &filters], &[256, 2 * size, 2 * size, to]);
            assert!((time / measured - 1.0).abs() < 0.15, "{size}: {time:e}");
        }
    }
}
