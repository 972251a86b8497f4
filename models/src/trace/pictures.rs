//! Operations on pictures `[b, c, h, w]`: convolutions, pooling, batch normalization; sequences `[b, c, w]` are
//! pictures of one row. Convolutions and pooling have channels last in our IR, so pictures are transposed around them;
//! raising moves these transposes until they meet (`passes/src/raise/layout.rs`).
//!
//! What has no operation of ours is written out, so its layouts follow from the factor rules of what it is made of. An
//! average is a sum over a split dimension or, where windows overlap, a convolution of each channel by itself. Batch
//! normalization is sums and products: its statistics are those of the global batch, which running statistics follow.

use super::build::Built;
use super::convert::Converter;
use super::error::TraceError;
use burn::backend::ir::{BatchNormOpIr, ModuleOperationIr, TensorIr};
use shardc_ir::ValueId;
use shardc_ir::ops::{BinaryKind, Convolution, ConvolutionTranspose, Literal, MaxPool, ReduceOp, UnaryKind, Window};

fn wide(sizes: [usize; 2]) -> [u64; 2] {
    sizes.map(|size| size as u64)
}

/// A window with the same padding on both sides.
fn window(stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2]) -> Window {
    let padding = wide(padding);
    Window { stride: wide(stride), low: padding, high: padding, dilation: wide(dilation) }
}

/// A shape with a height; a sequence has one of one.
fn picture(shape: &[u64]) -> Vec<u64> {
    let mut shape = shape.to_vec();
    if shape.len() == 3 {
        shape.insert(2, 1);
    }
    shape
}

/// Height and width.
fn plane(tensor: &TensorIr) -> [u64; 2] {
    let shape: Vec<u64> = tensor.shape.iter().map(|size| *size as u64).collect();
    let shape = picture(&shape);
    [shape[2], shape[3]]
}

/// How windows pool a picture.
struct Pool<'a> {
    x: &'a TensorIr,
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    out: &'a TensorIr,
}

impl Pool<'_> {
    /// The window, with as much padding at the end as its last places need: they may reach beyond what was asked for,
    /// where Burn rounds their number up.
    fn window(&self) -> Window {
        let mut window = window(self.stride, self.padding, self.dilation);
        let (size, count, kernel) = (plane(self.x), plane(self.out), wide(self.kernel));
        for axis in [0, 1] {
            let span = window.dilation[axis] * (kernel[axis] - 1) + 1;
            let reach = count[axis].saturating_sub(1) * window.stride[axis] + span;
            window.high[axis] = window.high[axis].max(reach.saturating_sub(size[axis] + window.low[axis]));
        }
        window
    }
}

impl Converter<'_> {
    /// Converts an operation on pictures; `None` if we have nothing for it.
    pub(super) fn picture(&mut self, op: &ModuleOperationIr) -> Option<Built> {
        use ModuleOperationIr as Module;
        match op {
            Module::Conv1d(op) => {
                let window = Window {
                    stride: wide([1, op.options.stride[0]]),
                    low: wide([0, op.options.padding[0].0]),
                    high: wide([0, op.options.padding[0].1]),
                    dilation: wide([1, op.options.dilation[0]]),
                };
                Some(self.convolution([&op.x, &op.weight, &op.out], op.bias.as_ref(), window, op.options.groups))
            }
            Module::Conv2d(op) => {
                let window = Window {
                    stride: wide(op.options.stride),
                    low: wide(op.options.padding.map(|(low, _)| low)),
                    high: wide(op.options.padding.map(|(_, high)| high)),
                    dilation: wide(op.options.dilation),
                };
                Some(self.convolution([&op.x, &op.weight, &op.out], op.bias.as_ref(), window, op.options.groups))
            }
            Module::ConvTranspose1d(op) => {
                let options = &op.options;
                let window = window([1, options.stride[0]], [0, options.padding[0]], [1, options.dilation[0]]);
                self.conv_transpose([&op.x, &op.weight, &op.out], op.bias.as_ref(), window, options.groups)
            }
            Module::ConvTranspose2d(op) => {
                let window = window(op.options.stride, op.options.padding, op.options.dilation);
                self.conv_transpose([&op.x, &op.weight, &op.out], op.bias.as_ref(), window, op.options.groups)
            }
            Module::MaxPool1d(op) => Some(self.max_pool(&Pool {
                x: &op.x,
                kernel: [1, op.kernel_size],
                stride: [1, op.stride],
                padding: [0, op.padding],
                dilation: [1, op.dilation],
                out: &op.out,
            })),
            Module::MaxPool2d(op) => Some(self.max_pool(&Pool {
                x: &op.x,
                kernel: op.kernel_size,
                stride: op.stride,
                padding: op.padding,
                dilation: op.dilation,
                out: &op.out,
            })),
            Module::AvgPool1d(op) => {
                let pool = Pool {
                    x: &op.x,
                    kernel: [1, op.kernel_size],
                    stride: [1, op.stride],
                    padding: [0, op.padding],
                    dilation: [1, 1],
                    out: &op.out,
                };
                Some(self.avg_pool(&pool, op.count_include_pad))
            }
            Module::AvgPool2d(op) => {
                let pool = Pool {
                    x: &op.x,
                    kernel: op.kernel_size,
                    stride: op.stride,
                    padding: op.padding,
                    dilation: [1, 1],
                    out: &op.out,
                };
                Some(self.avg_pool(&pool, op.count_include_pad))
            }
            Module::AdaptiveAvgPool1d(op) => Some(self.adaptive_avg_pool(&op.x, [1, op.output_size], &op.out)),
            Module::AdaptiveAvgPool2d(op) => Some(self.adaptive_avg_pool(&op.x, op.output_size, &op.out)),
            Module::BatchNorm(op) => Some(self.batch_norm(op)),
            Module::Interpolate(op) => self.interpolate(op),
            _ => None,
        }
    }

    fn convolution(
        &mut self,
        [x, filters, out]: [&TensorIr; 3],
        bias: Option<&TensorIr>,
        window: Window,
        groups: usize,
    ) -> Built {
        let (x, filters) = (self.picture_value(x)?, self.picture_value(filters)?);
        let (x, filters) = (self.channels_last(x)?, self.channels_last(filters)?);
        let y = self.b.emit(Convolution { window, groups: groups as u64 }, &[x, filters], &[])?;
        let y = self.channels_second(y)?;
        let y = self.with_bias(y, bias)?;
        self.b.reshape(y, &self.sizes(out))
    }

    fn conv_transpose(
        &mut self,
        [x, filters, out]: [&TensorIr; 3],
        bias: Option<&TensorIr>,
        window: Window,
        groups: usize,
    ) -> Option<Built> {
        // With more padding of the result than a stride, windows would be left out of the operand.
        if window.count(plane(out), plane(filters)) != Ok(plane(x)) {
            return None;
        }
        let run = |c: &mut Self| {
            let (x, filters, ty) = (c.picture_value(x)?, c.picture_value(filters)?, c.ty(out)?);
            let (x, filters) = (c.channels_last(x)?, c.channels_last(filters)?);
            let [b, channels, h, w]: [u64; 4] = picture(&ty.shape).try_into().unwrap_or([0; 4]);
            let whole = ty.with_shape([b, h, w, channels]);
            let y = c.b.emit(ConvolutionTranspose { window, groups: groups as u64 }, &[x, filters], &[whole])?;
            let y = c.channels_second(y)?;
            let y = c.with_bias(y, bias)?;
            c.b.reshape(y, &ty.shape)
        };
        Some(run(self))
    }

    /// A picture, or a sequence as one.
    fn picture_value(&mut self, tensor: &TensorIr) -> Built {
        let x = self.value(tensor)?;
        let shape = picture(&self.b.shape(x));
        self.b.reshape(x, &shape)
    }

    /// `[b, h, w, c]` of a picture `[b, c, h, w]`; the same of filters.
    fn channels_last(&mut self, x: ValueId) -> Built {
        self.b.transpose(x, &[0, 2, 3, 1])
    }

    /// `[b, c, h, w]` of `[b, h, w, c]`.
    fn channels_second(&mut self, x: ValueId) -> Built {
        self.b.transpose(x, &[0, 3, 1, 2])
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

    fn max_pool(&mut self, pool: &Pool<'_>) -> Built {
        let x = self.picture_value(pool.x)?;
        let x = self.channels_last(x)?;
        let y = self.b.emit(MaxPool { kernel: wide(pool.kernel), window: pool.window() }, &[x], &[])?;
        let y = self.channels_second(y)?;
        self.b.reshape(y, &self.sizes(pool.out))
    }

    fn avg_pool(&mut self, pool: &Pool<'_>, counts_padding: bool) -> Built {
        let (x, size, kernel) = (self.picture_value(pool.x)?, plane(pool.x), wide(pool.kernel));
        let (window, count) = (pool.window(), plane(pool.out));
        let is_padded = (window.low, window.high) != ([0, 0], [0, 0]);
        if !is_padded && kernel == window.stride && (0..2).all(|axis| size[axis].is_multiple_of(kernel[axis])) {
            let y = self.averages(x, count)?;
            return self.b.reshape(y, &self.sizes(pool.out));
        }
        let ty = self.b.ty(x);
        let filters = ty.with_shape([ty.shape[1], kernel[0], kernel[1], 1]);
        // How many elements a window has in each direction: what lies beyond the asked padding never counts.
        let asked = if counts_padding { wide(pool.padding) } else { [0, 0] };
        let counted = [0, 1].map(|axis| -> Vec<u64> {
            let (low, high) = (window.low[axis] - asked[axis], window.low[axis] + size[axis] + asked[axis]);
            let places = (0..count[axis]).map(|place| place * window.stride[axis]);
            places.map(|start| (start + kernel[axis]).min(high).saturating_sub(start.max(low)).max(1)).collect()
        });
        let is_full = (0..2).all(|axis| counted[axis].iter().all(|count| *count == kernel[axis]));
        let each = if is_full { 1.0 / (kernel[0] * kernel[1]) as f64 } else { 1.0 };
        let filters = self.b.constant(each, filters)?;
        let x = self.channels_last(x)?;
        let y = self.b.emit(Convolution { window, groups: ty.shape[1] }, &[x, filters], &[])?;
        let mut y = self.channels_second(y)?;
        for (axis, counted) in counted.iter().enumerate().filter(|_| !is_full) {
            let mut shape = [1, 1];
            shape[axis] = count[axis];
            let values = counted.iter().map(|count| 1.0 / *count as f64).collect();
            let part = self.b.emit(Literal { values }, &[], &[ty.with_shape(shape)])?;
            y = self.b.binary(BinaryKind::Mul, y, part)?;
        }
        self.b.reshape(y, &self.sizes(pool.out))
    }

    /// Averages of parts that share an element where they do not divide the picture evenly.
    fn adaptive_avg_pool(&mut self, x: &TensorIr, count: [usize; 2], out: &TensorIr) -> Built {
        let (size, count) = (plane(x), wide(count));
        let x = self.picture_value(x)?;
        let divides = (0..2).all(|axis| count[axis] > 0 && size[axis].is_multiple_of(count[axis]));
        let y = if divides {
            self.averages(x, count)?
        } else {
            let mut y = x;
            for axis in [0, 1] {
                let [from, to] = [size[axis], count[axis]];
                let part = |place: u64| (place * from / to, ((place + 1) * from).div_ceil(to));
                let weight = |row: u64, place: u64| {
                    let (start, end) = part(place);
                    if (start..end).contains(&row) { 1.0 / (end - start) as f64 } else { 0.0 }
                };
                y = self.resampled(y, axis + 2, to, weight)?;
            }
            y
        };
        self.b.reshape(y, &self.sizes(out))
    }

    /// A tensor of which each element along a dimension is a weighted sum of those that were there: with a number
    /// `weight(from, to)` for each of the `count` elements.
    pub(super) fn resampled(&mut self, x: ValueId, dim: usize, count: u64, weight: impl Fn(u64, u64) -> f64) -> Built {
        let ty = self.b.ty(x);
        let (size, last) = (ty.shape[dim], ty.rank() - 1);
        let weight = &weight;
        let values: Vec<f64> = (0..size).flat_map(|from| (0..count).map(move |to| weight(from, to))).collect();
        if size == count && (0..size).all(|at| values[(at * count + at) as usize] == 1.0) {
            return Ok(x);
        }
        let matrix = self.b.emit(Literal { values }, &[], &[ty.with_shape([size, count])])?;
        let mut order: Vec<usize> = (0..=last).collect();
        order.swap(dim, last);
        let x = self.b.transpose(x, &order)?;
        let y = self.matmul_values(x, matrix)?;
        self.b.transpose(y, &order)
    }

    /// The averages of so many equal parts of a picture.
    fn averages(&mut self, x: ValueId, [rows, columns]: [u64; 2]) -> Built {
        let shape = self.b.shape(x);
        let [b, c, h, w] = [shape[0], shape[1], shape[2], shape[3]];
        let split = self.b.reshape(x, &[b, c, rows, h / rows, columns, w / columns])?;
        let sum = self.b.reduce(ReduceOp::Sum, split, &[3, 5])?;
        let sum = self.b.reshape(sum, &[b, c, rows, columns])?;
        self.b.affine(sum, (rows * columns) as f64 / (h * w) as f64, 0.0)
    }

    /// Batch normalization: while a model trains, by the statistics of the batch (Ioffe and Szegedy,
    /// "Batch normalization", 2015), with the biased variance, as Burn's layer computes them under its
    /// autodiff; these go into its running statistics. A layer that does not train has its given statistics.
    fn batch_norm(&mut self, op: &BatchNormOpIr) -> Built {
        let (x, gamma, beta) = (self.value(&op.x)?, self.value(&op.gamma)?, self.value(&op.beta)?);
        let epsilon: f64 = op.epsilon.elem();
        let (centred, variance) = if let Some(momentum) = self.trained_norms.get(&op.mean.id).copied() {
            let shape = self.b.shape(x);
            let dims: Vec<usize> = (0..shape.len()).filter(|dim| *dim != 1).collect();
            let each = shape[1] as f64 / self.b.ty(x).elements() as f64;
            let mean = self.mean(x, &dims, each)?;
            let centred = self.b.binary(BinaryKind::Sub, x, mean)?;
            let squares = self.b.binary(BinaryKind::Mul, centred, centred)?;
            let variance = self.mean(squares, &dims, each)?;
            let variance = self.b.affine(variance, 1.0, epsilon)?;
            self.remember(&op.mean, mean, 0.0, momentum)?;
            self.remember(&op.variance, variance, epsilon, momentum)?;
            (centred, variance)
        } else {
            let (mean, variance) = (self.value(&op.mean)?, self.value(&op.variance)?);
            let (mean, variance) = (self.per_channel(mean, x)?, self.per_channel(variance, x)?);
            (self.b.binary(BinaryKind::Sub, x, mean)?, self.b.affine(variance, 1.0, epsilon)?)
        };
        let rate = self.b.unary(UnaryKind::Rsqrt, variance)?;
        let gamma = self.per_channel(gamma, x)?;
        let rate = self.b.binary(BinaryKind::Mul, rate, gamma)?;
        let scaled = self.b.binary(BinaryKind::Mul, centred, rate)?;
        let beta = self.per_channel(beta, x)?;
        self.b.binary(BinaryKind::Add, scaled, beta)
    }

    /// Moves a running statistic towards that of the batch, of which `more` is given, by the share `momentum` of what
    /// they differ by. The batch's is read as the norm reads it, so that ranks add it up once.
    fn remember(&mut self, running: &TensorIr, batch: ValueId, more: f64, momentum: f64) -> Result<(), TraceError> {
        let before = match self.statistics.get(&running.id) {
            Some(before) => *before,
            None => self.value(running)?,
        };
        let batch = self.b.reshape(batch, &self.sizes(running))?;
        let difference = self.b.binary(BinaryKind::Sub, batch, before)?;
        let step = self.b.affine(difference, momentum, -momentum * more)?;
        let after = self.b.binary(BinaryKind::Add, before, step)?;
        self.statistics.insert(running.id, after);
        Ok(())
    }

    /// The mean over dimensions, which are kept at size one.
    fn mean(&mut self, x: ValueId, dims: &[usize], each: f64) -> Built {
        let sum = self.b.reduce(ReduceOp::Sum, x, dims)?;
        self.b.affine(sum, each, 0.0)
    }
}
