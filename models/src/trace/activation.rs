//! Activation functions.

use super::build::Built;
use super::convert::Converter;
use burn::backend::ir::{ActivationOperationIr, TensorIr};
use shardc_ir::ValueId;
use shardc_ir::ops::{BinaryKind, ReduceOp, Softmax, UnaryKind};

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
                    let (up, down) = c.halves(x)?;
                    let down = c.b.affine(down, slope, 0.0)?;
                    c.b.binary(BinaryKind::Sub, up, down)
                })
            }
            Activation::PRelu(op) => self.on(&op.lhs, |c, x| {
                let slope = c.value(&op.rhs)?;
                let (up, down) = c.halves(x)?;
                let down = c.b.binary(BinaryKind::Mul, down, slope)?;
                c.b.binary(BinaryKind::Sub, up, down)
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

    /// `max(x, 0)` and `max(-x, 0)`
    fn halves(&mut self, x: ValueId) -> Result<(ValueId, ValueId), super::TraceError> {
        let minus = self.b.unary(UnaryKind::Neg, x)?;
        Ok((self.b.unary(UnaryKind::Relu, x)?, self.b.unary(UnaryKind::Relu, minus)?))
    }

    /// `min(x, 0) - log(1 + exp(-|x|))`, which cannot overflow.
    fn log_sigmoid(&mut self, x: ValueId) -> Built {
        let size = self.b.unary(UnaryKind::Abs, x)?;
        let minus = self.b.unary(UnaryKind::Neg, size)?;
        let power = self.b.unary(UnaryKind::Exp, minus)?;
        let rest = self.b.unary(UnaryKind::Log1p, power)?;
        let low = self.b.binary_number(BinaryKind::Min, x, 0.0)?;
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
