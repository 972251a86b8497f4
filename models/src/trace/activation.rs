//! Activation functions.

use super::build::Built;
use super::convert::Converter;
use burn::backend::ir::{ActivationOperationIr, TensorIr};
use shardc_ir::ValueId;
use shardc_ir::ops::{BinaryKind, CompareKind, ReduceOp, Softmax, UnaryKind};

impl Converter<'_> {
    /// Converts an activation function; `None` if we have nothing for it.
    pub(super) fn activation(&mut self, op: &ActivationOperationIr) -> Option<Built> {
        use ActivationOperationIr as Activation;
        Some(match op {
            Activation::Relu(op) => self.on(&op.input, |c, x| c.b.unary(UnaryKind::Relu, x)),
            Activation::Gelu(op) => self.on(&op.input, |c, x| c.b.unary(UnaryKind::Gelu, x)),
            Activation::Sigmoid(op) => self.on(&op.input, |c, x| c.b.unary(UnaryKind::Sigmoid, x)),
            Activation::LeakyRelu(op) => {
                let slope: f64 = op.rhs.elem();
                self.on(&op.lhs, |c, x| {
                    let below = c.b.affine(x, slope, 0.0)?;
                    c.leaky(x, below)
                })
            }
            Activation::PRelu(op) => self.on(&op.lhs, |c, x| {
                let slope = c.value(&op.rhs)?;
                let below = c.b.binary(BinaryKind::Mul, x, slope)?;
                c.leaky(x, below)
            }),
            Activation::HardSigmoid(op) => self.on(&op.tensor, |c, x| {
                let line = c.b.affine(x, op.alpha.elem(), op.beta.elem())?;
                c.clamp(line, 0.0, 1.0)
            }),
            Activation::LogSigmoid(op) => self.on(&op.input, Self::log_sigmoid),
            Activation::Softmax(op) => self.on(&op.input, |c, x| c.softmax(x, op.axis)),
            Activation::Softmin(op) => self.on(&op.input, |c, x| {
                let x = c.b.unary(UnaryKind::Neg, x)?;
                c.softmax(x, op.axis)
            }),
            Activation::LogSoftmax(op) => self.on(&op.input, |c, x| c.log_softmax_over(x, op.axis)),
            _ => return None,
        })
    }

    fn on(&mut self, input: &TensorIr, build: impl FnOnce(&mut Self, ValueId) -> Built) -> Built {
        let x = self.value(input)?;
        build(self, x)
    }

    /// `x` where it is above 0, and `below` where it is not.
    fn leaky(&mut self, x: ValueId, below: ValueId) -> Built {
        let (above, shape) = (self.b.compare_number(CompareKind::Gt, x, 0.0)?, self.b.shape(x).to_vec());
        self.b.select(above, x, below, &shape)
    }

    /// `(x - |x|) / 2 - log(1 + exp(-|x|))`, which cannot overflow. Where `x` is 0 its derivative is that of both sides, a
    /// half, since that of `|x|` is 0 there.
    fn log_sigmoid(&mut self, x: ValueId) -> Built {
        let size = self.b.unary(UnaryKind::Abs, x)?;
        let minus = self.b.unary(UnaryKind::Neg, size)?;
        let power = self.b.unary(UnaryKind::Exp, minus)?;
        let rest = self.b.unary(UnaryKind::Log1p, power)?;
        let low = self.b.binary(BinaryKind::Sub, x, size)?;
        let low = self.b.affine(low, 0.5, 0.0)?;
        self.b.binary(BinaryKind::Sub, low, rest)
    }

    /// Softmax over any dimension.
    pub(super) fn softmax(&mut self, x: ValueId, axis: usize) -> Built {
        let rank = self.b.shape(x).len();
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(axis, rank - 1);
        let last = self.b.transpose(x, &order)?;
        let result = self.b.emit(Softmax {}, &[last], &[])?;
        self.b.transpose(result, &order)
    }

    /// The logarithm of a softmax: `x - max - log(sum(exp(x - max)))`. A later lookup of labels in
    /// it makes a cross-entropy instead, and this goes unread.
    fn log_softmax_over(&mut self, x: ValueId, axis: usize) -> Built {
        let most = self.b.reduce(ReduceOp::Max, x, &[axis])?;
        let shifted = self.b.binary(BinaryKind::Sub, x, most)?;
        let powers = self.b.unary(UnaryKind::Exp, shifted)?;
        let sum = self.b.reduce(ReduceOp::Sum, powers, &[axis])?;
        let rest = self.b.unary(UnaryKind::Log, sum)?;
        let result = self.b.binary(BinaryKind::Sub, shifted, rest)?;
        if axis + 1 == self.b.shape(x).len() {
            self.log_softmax.insert(result, x);
        }
        Ok(result)
    }
}
