//! How long convolutions and their derivatives take: as the products that they are, and what is beside them.

use super::machine::Machine;
use super::matmul::Sizes;
use shardc_ir::ops::{Op, Window};
use shardc_ir::{DType, TensorType};

/// How many times as long it takes to read, or make filters of, fewer channels than 16 bytes: the colours of pictures for
/// ResNet-50 and a U-Net in bf16 on an H200, 3.6 to 6.6 times (`bench/HISTORY.md`).
const FEW_CHANNELS: f64 = 5.0;

/// By which power of the channels that lack to [`MANY_CHANNELS`] convolutions with windows of several elements take longer
/// than their product: tiles are filled with less of each element that lies under the window. Those of ResNet-50 and a
/// U-Net with 16, 32 and 64 channels in bf16 on H100s take 2.3, 1.5 and 1.3 times as long, on average.
const LACKING_CHANNELS: f64 = 0.35;
const MANY_CHANNELS: f64 = 128.0;

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
    is_narrow: bool,
    /// How many times as many channels there would have to be for tiles to be filled, with windows of several elements.
    lacking: f64,
    is_sum: bool,
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
        let sizes = match op {
            Op::Convolution(_) => Sizes { batch, m: channels, n: windows, k: under },
            // For each element of the pictures, those of the filters that lie over it.
            Op::ConvolutionTranspose(_) => {
                let over = (size(&filters.shape[1..3]) / stride).max(1.0);
                Sizes { batch, m: filters.shape[3] as f64, n: size(&results[0].shape[..3]), k: channels * over }
            }
            _ => Sizes { batch, m: channels, n: under, k: windows },
        };
        let dtype = operands[0].dtype;
        let is_plain = filters.shape[1..3] == [1, 1] && *window == Window::default();
        let rows = if dtype == DType::F32 && !is_plain { batch * windows * under * 4.0 } else { 0.0 };
        let is_narrow = dtype != DType::F32 && filters.shape[3] * dtype.size() < 16;
        let fewest = channels.min(filters.shape[3] as f64).max(1.0);
        let has_others = dtype != DType::F32 && !is_narrow && filters.shape[1..3] != [1, 1];
        let lacking = if has_others { (MANY_CHANNELS / fewest).max(1.0) } else { 1.0 };
        Some(Self { sizes, rows, is_narrow, lacking, is_sum: matches!(op, Op::ConvolutionFilterGrad(_)) })
    }

    /// Seconds, where the product takes so many.
    pub fn seconds(&self, product: f64, machine: Machine<'_>) -> f64 {
        let product =
            if self.is_narrow { FEW_CHANNELS * product } else { self.lacking.powf(LACKING_CHANNELS) * product };
        let sums = if self.is_sum { SUMS * machine.launch() } else { 0.0 };
        product + sums + 2.0 * self.rows / (machine.bandwidth() * machine.library.reach.folds)
    }
}
