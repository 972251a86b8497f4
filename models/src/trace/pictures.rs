//! Operations on pictures `[b, c, h, w]`: convolutions, pooling, batch normalization, resizing.
//!
//! What has no operation of ours is written out: an average is a sum over a split dimension or, where
//! windows overlap, a convolution of each channel by itself; resizing to the nearest is copying.

use super::build::Built;
use super::convert::Converter;
use burn::backend::ir::{
    AdaptiveAvgPool2dOpIr, AvgPool2dOpIr, BatchNormOpIr, Conv1dOpIr, Conv2dOpIr, ConvTranspose2dOpIr,
    InterpolateModeIr, InterpolateOpIr, MaxPool2dOpIr, ModuleOperationIr, TensorIr,
};
use shardc_ir::ops::{BinaryKind, Broadcast, Convolution, ConvolutionTranspose, MaxPool, ReduceOp, UnaryKind, Window};
use shardc_ir::{TensorType, ValueId};

fn wide(sizes: [usize; 2]) -> [u64; 2] {
    sizes.map(|size| size as u64)
}

/// A window with the same padding on both sides.
fn window(stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2]) -> Window {
    let padding = wide(padding);
    Window { stride: wide(stride), low: padding, high: padding, dilation: wide(dilation) }
}

impl Converter<'_> {
    /// Converts an operation on pictures; `None` if we have nothing for it.
    pub(super) fn picture(&mut self, op: &ModuleOperationIr) -> Option<Built> {
        use ModuleOperationIr as Module;
        match op {
            Module::Conv1d(op) => Some(self.conv1d(op)),
            Module::Conv2d(op) => Some(self.conv2d(op)),
            Module::ConvTranspose2d(op) => self.conv_transpose2d(op),
            Module::MaxPool2d(op) if !op.ceil_mode => Some(self.max_pool2d(op)),
            Module::AvgPool2d(op) if !op.ceil_mode => self.avg_pool2d(op),
            Module::AdaptiveAvgPool2d(op) => self.adaptive_avg_pool2d(op),
            Module::BatchNorm(op) => Some(self.batch_norm(op)),
            Module::Interpolate(op) => self.interpolate(op),
            _ => None,
        }
    }

    fn conv1d(&mut self, op: &Conv1dOpIr) -> Built {
        let (x, filters) = (self.value(&op.x)?, self.value(&op.weight)?);
        let ([b, c, w], [out, inner, k]) = (self.sizes3(x), self.sizes3(filters));
        let (x, filters) = (self.b.reshape(x, &[b, c, 1, w])?, self.b.reshape(filters, &[out, inner, 1, k])?);
        let (low, high) = op.options.padding[0];
        let window = Window {
            stride: [1, op.options.stride[0] as u64],
            low: [0, low as u64],
            high: [0, high as u64],
            dilation: [1, op.options.dilation[0] as u64],
        };
        let y = self.b.emit(Convolution { window, groups: op.options.groups as u64 }, &[x, filters], &[])?;
        let y = self.with_bias(y, op.bias.as_ref())?;
        self.b.reshape(y, &self.sizes(&op.out))
    }

    fn sizes3(&self, value: ValueId) -> [u64; 3] {
        let shape = self.b.shape(value);
        [shape[0], shape[1], shape[2]]
    }

    fn conv2d(&mut self, op: &Conv2dOpIr) -> Built {
        let (x, filters) = (self.value(&op.x)?, self.value(&op.weight)?);
        let padding = op.options.padding.map(|(low, high)| (low as u64, high as u64));
        let window = Window {
            stride: wide(op.options.stride),
            low: padding.map(|(low, _)| low),
            high: padding.map(|(_, high)| high),
            dilation: wide(op.options.dilation),
        };
        let y = self.b.emit(Convolution { window, groups: op.options.groups as u64 }, &[x, filters], &[])?;
        self.with_bias(y, op.bias.as_ref())
    }

    fn conv_transpose2d(&mut self, op: &ConvTranspose2dOpIr) -> Option<Built> {
        let window = window(op.options.stride, op.options.padding, op.options.dilation);
        let plane = |tensor: &TensorIr| [tensor.shape[2] as u64, tensor.shape[3] as u64];
        // With more padding of the result than a stride, windows would be left out of the operand.
        if window.count(plane(&op.out), plane(&op.weight)) != Ok(plane(&op.x)) {
            return None;
        }
        let groups = op.options.groups as u64;
        let run = |c: &mut Self| {
            let (x, filters, ty) = (c.value(&op.x)?, c.value(&op.weight)?, c.ty(&op.out)?);
            let y = c.b.emit(ConvolutionTranspose { window, groups }, &[x, filters], &[ty])?;
            c.with_bias(y, op.bias.as_ref())
        };
        Some(run(self))
    }

    /// A picture with one number added to each channel.
    fn with_bias(&mut self, y: ValueId, bias: Option<&TensorIr>) -> Built {
        let Some(bias) = bias else { return Ok(y) };
        let bias = self.value(bias)?;
        let bias = self.per_channel(bias, y)?;
        self.b.binary(BinaryKind::Add, y, bias)
    }

    /// A vector over channels, as it meets a tensor `[b, c, …]`.
    fn per_channel(&mut self, vector: ValueId, beside: ValueId) -> Built {
        let mut shape = vec![1; self.b.shape(beside).len()];
        shape[1] = self.b.ty(vector).elements();
        self.b.reshape(vector, &shape)
    }

    fn max_pool2d(&mut self, op: &MaxPool2dOpIr) -> Built {
        let x = self.value(&op.x)?;
        let window = window(op.stride, op.padding, op.dilation);
        self.b.emit(MaxPool { kernel: wide(op.kernel_size), window }, &[x], &[])
    }

    fn avg_pool2d(&mut self, op: &AvgPool2dOpIr) -> Option<Built> {
        let is_padded = op.padding != [0, 0];
        if is_padded && !op.count_include_pad {
            return None;
        }
        let (kernel, size) = (op.kernel_size, [op.x.shape[2], op.x.shape[3]]);
        if !is_padded && kernel == op.stride && (0..2).all(|axis| size[axis] % kernel[axis] == 0) {
            return Some(
                self.value(&op.x).and_then(|x| self.averages(x, [0, 1].map(|axis| size[axis] / kernel[axis]))),
            );
        }
        let run = |c: &mut Self| {
            let x = c.value(&op.x)?;
            let (ty, [rows, columns]) = (c.b.ty(x), wide(kernel));
            let filters = ty.with_shape([ty.shape[1], 1, rows, columns]);
            let filters = c.b.constant(1.0 / (rows * columns) as f64, filters)?;
            let window = window(op.stride, op.padding, [1, 1]);
            c.b.emit(Convolution { window, groups: ty.shape[1] }, &[x, filters], &[])
        };
        Some(run(self))
    }

    fn adaptive_avg_pool2d(&mut self, op: &AdaptiveAvgPool2dOpIr) -> Option<Built> {
        let size = [op.x.shape[2], op.x.shape[3]];
        let divides = (0..2).all(|axis| op.output_size[axis] > 0 && size[axis].is_multiple_of(op.output_size[axis]));
        divides.then(|| self.value(&op.x).and_then(|x| self.averages(x, op.output_size)))
    }

    /// The averages of so many equal parts of a picture.
    fn averages(&mut self, x: ValueId, count: [usize; 2]) -> Built {
        let shape = self.b.shape(x);
        let ([rows, columns], [b, c, h, w]) = (wide(count), [shape[0], shape[1], shape[2], shape[3]]);
        let split = self.b.reshape(x, &[b, c, rows, h / rows, columns, w / columns])?;
        let sum = self.b.reduce(ReduceOp::Sum, split, &[3, 5])?;
        let sum = self.b.reshape(sum, &[b, c, rows, columns])?;
        self.b.affine(sum, (rows * columns) as f64 / (h * w) as f64, 0.0)
    }

    /// Batch normalization: while a model trains, by the statistics of the batch (Ioffe and Szegedy,
    /// "Batch normalization", 2015), with the biased variance, as Burn's layer computes them under its
    /// autodiff. A layer that does not train has its given statistics.
    fn batch_norm(&mut self, op: &BatchNormOpIr) -> Built {
        let (x, gamma, beta) = (self.value(&op.x)?, self.value(&op.gamma)?, self.value(&op.beta)?);
        let (centred, variance) = if self.trained_norms.contains(&op.mean.id) {
            let shape = self.b.shape(x);
            let dims: Vec<usize> = (0..shape.len()).filter(|dim| *dim != 1).collect();
            let each = shape[1] as f64 / self.b.ty(x).elements() as f64;
            let mean = self.mean(x, &dims, each)?;
            let centred = self.b.binary(BinaryKind::Sub, x, mean)?;
            let squares = self.b.binary(BinaryKind::Mul, centred, centred)?;
            (centred, self.mean(squares, &dims, each)?)
        } else {
            let (mean, variance) = (self.value(&op.mean)?, self.value(&op.variance)?);
            let (mean, variance) = (self.per_channel(mean, x)?, self.per_channel(variance, x)?);
            (self.b.binary(BinaryKind::Sub, x, mean)?, variance)
        };
        let variance = self.b.affine(variance, 1.0, op.epsilon.elem())?;
        let rate = self.b.unary(UnaryKind::Rsqrt, variance)?;
        let gamma = self.per_channel(gamma, x)?;
        let rate = self.b.binary(BinaryKind::Mul, rate, gamma)?;
        let scaled = self.b.binary(BinaryKind::Mul, centred, rate)?;
        let beta = self.per_channel(beta, x)?;
        self.b.binary(BinaryKind::Add, scaled, beta)
    }

    /// The mean over dimensions, which are kept at size one.
    fn mean(&mut self, x: ValueId, dims: &[usize], each: f64) -> Built {
        let sum = self.b.reduce(ReduceOp::Sum, x, dims)?;
        self.b.affine(sum, each, 0.0)
    }

    /// A picture made larger by a whole number of times in each direction, each element copied.
    fn interpolate(&mut self, op: &InterpolateOpIr) -> Option<Built> {
        let nearest = matches!(op.options.mode, InterpolateModeIr::Nearest | InterpolateModeIr::NearestExact);
        let size = [op.x.shape[2], op.x.shape[3]];
        if !nearest || (0..2).any(|axis| !op.output_size[axis].is_multiple_of(size[axis].max(1))) {
            return None;
        }
        let run = |c: &mut Self| {
            let x = c.value(&op.x)?;
            let ty: TensorType = c.b.ty(x);
            let [rows, columns] = [0, 1].map(|axis| (op.output_size[axis] / size[axis]) as u64);
            let copies = ty.with_shape([ty.shape[0], ty.shape[1], ty.shape[2], rows, ty.shape[3], columns]);
            let copies = c.b.emit(Broadcast { dims: vec![0, 1, 2, 4] }, &[x], &[copies])?;
            c.b.reshape(copies, &c.sizes(&op.out))
        };
        Some(run(self))
    }
}
