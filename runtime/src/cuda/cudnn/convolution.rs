//! Convolutions and their derivatives as graphs of one operation, channels last.
//!
//! Only types of 16 bits are taken, since cuDNN computes convolutions of f32 in TF32 and this runtime does not. Only
//! engines that add in a fixed order are taken, and those whose workspace is at most what is granted, 64 MiB.

use super::graph::{Graph, Layout, Slide};
use crate::cuda::device::Failure;
use shardc_ir::ops::Window;
use shardc_ir::{DType, TensorType};

/// Bytes of workspace that an engine may take at the most.
const WORKSPACE: u64 = 64 << 20;

/// Which of its three tensors a convolution makes, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// The pictures `x`, or their gradient.
    Pictures,
    /// The gradient of the filters.
    Filters,
    /// The results `y`.
    Results,
}

/// What tells one convolution's kernel from another's. Names as in `shardc_ir::ops::convolution`.
#[derive(Clone, Debug, PartialEq)]
pub struct Convolution {
    /// What is made.
    pub made: Made,
    /// The types of pictures `[b, h, w, g*ci]`, filters `[g*co, kh, kw, ci]` and results `[b, oh, ow, g*co]`.
    pub tensors: [TensorType; 3],
    /// How filters slide.
    pub window: Window,
}

impl Convolution {
    /// Why no version of cuDNN takes it as well as other kernels do, if none does.
    pub fn unfit(&self) -> Option<&'static str> {
        let half = |ty: &TensorType| matches!(ty.dtype, DType::Bf16 | DType::F16);
        match self.tensors.iter().all(half) {
            true => None,
            false => Some("cuDNN's convolutions of f32 are made in TF32, ours are not"),
        }
    }

    /// Bytes of workspace that an engine is granted.
    pub fn workspace(&self) -> u64 {
        WORKSPACE
    }

    /// All on which the speed of an engine depends, in words.
    pub fn key(&self) -> String {
        let Window { stride, low, high, dilation } = &self.window;
        let [pictures, filters, results] = &self.tensors;
        let pair = |[down, across]: &[u64; 2]| format!("{down},{across}");
        let [stride, low, high, dilation] = [stride, low, high, dilation].map(pair);
        format!(
            "{:?} of {pictures} {filters} {results} stride {stride} low {low} high {high} dilation {dilation} workspace {}",
            self.made,
            self.workspace()
        )
    }

    /// What is made.
    pub fn result(&self) -> usize {
        self.made as usize
    }

    /// Arithmetic operations.
    pub fn flops(&self) -> f64 {
        let [_, filters, results] = &self.tensors;
        2.0 * results.elements() as f64 * filters.shape[1..].iter().product::<u64>() as f64
    }

    /// Buffers: pictures, filters, results.
    pub fn graph(&self) -> Result<Graph, Failure> {
        let mut graph = Graph::default();
        let mut tensors = Vec::new();
        for (position, ty) in self.tensors.iter().enumerate() {
            let [b, h, w, c] = [0, 1, 2, 3].map(|dim: usize| ty.shape[dim]);
            tensors.push(graph.buffer(position, ty.dtype, Layout::channels_last([b, c, h, w]))?);
        }
        let signed = |sizes: [u64; 2]| sizes.map(|size| size as i64);
        let Window { stride, low, high, dilation } = &self.window;
        let slide =
            Slide { strides: signed(*stride), low: signed(*low), high: signed(*high), dilations: signed(*dilation) };
        graph.convolve(self.made, [tensors[0], tensors[1], tensors[2]], &slide)?;
        Ok(graph)
    }
}
