//! Arithmetic, comparisons, reductions and conversions.

use super::build::Built;
use super::convert::Converter;
use crate::detach::BOUND;
use burn::backend::ir::{
    BinaryOpIr, BoolOperationIr, FloatOperationIr, IntOperationIr, NumericOperationIr, PadModeIr, PadOpIr, ScalarIr,
    ScalarOpIr, TensorIr, UnaryOpIr,
};
use shardc_ir::ops::{BinaryKind, CompareKind, Pad, ReduceOp, UnaryKind};
use shardc_ir::{DType, ValueId};

impl Converter<'_> {
    /// Converts an operation on numbers; `None` if we have nothing for it.
    pub(super) fn numeric(&mut self, op: &NumericOperationIr) -> Option<Built> {
        use NumericOperationIr as Numeric;
        Some(match op {
            Numeric::Add(op) => self.binary(BinaryKind::Add, op),
            Numeric::Sub(op) => self.binary(BinaryKind::Sub, op),
            Numeric::Mul(op) => self.binary(BinaryKind::Mul, op),
            Numeric::Div(op) => self.binary(BinaryKind::Div, op),
            Numeric::Rem(op) => self.binary(BinaryKind::Rem, op),
            Numeric::Powi(op) => self.power(op),
            Numeric::AddScalar(op) => self.binary_with(BinaryKind::Add, op),
            Numeric::SubScalar(op) => self.binary_with(BinaryKind::Sub, op),
            Numeric::MulScalar(op) => self.binary_with(BinaryKind::Mul, op),
            Numeric::DivScalar(op) => self.binary_with(BinaryKind::Div, op),
            Numeric::RemScalar(op) => self.binary_with(BinaryKind::Rem, op),
            Numeric::ClampMin(op) => self.binary_with(BinaryKind::Max, op),
            Numeric::ClampMax(op) => self.binary_with(BinaryKind::Min, op),
            Numeric::PowiScalar(op) => self.power_with(op),
            Numeric::Clamp(op) => {
                let (min, max): (f64, f64) = (op.min.elem(), op.max.elem());
                let is_detached = (min, max) == (-BOUND, BOUND);
                self.value(&op.tensor).and_then(|x| {
                    if is_detached { self.b.unary(UnaryKind::Detach, x) } else { self.clamp(x, min, max) }
                })
            }
            Numeric::Abs(op) => self.unary(UnaryKind::Abs, op),
            Numeric::Neg(op) => self.unary(UnaryKind::Neg, op),
            Numeric::Sign(op) => self.unary(UnaryKind::Sign, op),
            Numeric::Full(op) => self.filled(op.value.elem(), &op.out),
            Numeric::Pad(op) => self.pad(op),
            Numeric::Greater(op) => self.comparison(CompareKind::Gt, op),
            Numeric::GreaterEqual(op) => self.comparison(CompareKind::Ge, op),
            Numeric::Lower(op) => self.comparison(CompareKind::Lt, op),
            Numeric::LowerEqual(op) => self.comparison(CompareKind::Le, op),
            Numeric::GreaterElem(op) => self.comparison_with(CompareKind::Gt, op),
            Numeric::GreaterEqualElem(op) => self.comparison_with(CompareKind::Ge, op),
            Numeric::LowerElem(op) => self.comparison_with(CompareKind::Lt, op),
            Numeric::LowerEqualElem(op) => self.comparison_with(CompareKind::Le, op),
            other => return self.reduction(other),
        })
    }

    fn reduction(&mut self, op: &NumericOperationIr) -> Option<Built> {
        use NumericOperationIr as Numeric;
        use Reduction::{Max, MaxAbs, Mean, Min, Sum};
        Some(match op {
            Numeric::Sum(op) => self.reduce(Sum, &op.input, None, &op.out),
            Numeric::SumDim(op) => self.reduce(Sum, &op.input, Some(&[op.axis]), &op.out),
            Numeric::SumDims(op) => self.reduce(Sum, &op.input, Some(&op.axes), &op.out),
            Numeric::Mean(op) => self.reduce(Mean, &op.input, None, &op.out),
            Numeric::MeanDim(op) => self.reduce(Mean, &op.input, Some(&[op.axis]), &op.out),
            Numeric::Max(op) => self.reduce(Max, &op.input, None, &op.out),
            Numeric::MaxDim(op) => self.reduce(Max, &op.input, Some(&[op.axis]), &op.out),
            Numeric::Min(op) => self.reduce(Min, &op.input, None, &op.out),
            Numeric::MinDim(op) => self.reduce(Min, &op.input, Some(&[op.axis]), &op.out),
            Numeric::MaxAbs(op) => self.reduce(MaxAbs, &op.input, None, &op.out),
            Numeric::MaxAbsDim(op) => self.reduce(MaxAbs, &op.input, Some(&[op.axis]), &op.out),
            other => return self.ranked(other),
        })
    }

    /// Converts an operation on floats.
    pub(super) fn float(&mut self, op: &FloatOperationIr) -> Option<Built> {
        use FloatOperationIr as Float;
        Some(match op {
            Float::Exp(op) => self.unary(UnaryKind::Exp, op),
            Float::Log(op) => self.unary(UnaryKind::Log, op),
            Float::Log1p(op) => self.unary(UnaryKind::Log1p, op),
            Float::Erf(op) => self.unary(UnaryKind::Erf, op),
            Float::Sqrt(op) => self.unary(UnaryKind::Sqrt, op),
            Float::Sin(op) => self.unary(UnaryKind::Sin, op),
            Float::Cos(op) => self.unary(UnaryKind::Cos, op),
            Float::Tanh(op) => self.unary(UnaryKind::Tanh, op),
            Float::Round(op) => self.unary(UnaryKind::Round, op),
            Float::Floor(op) => self.unary(UnaryKind::Floor, op),
            Float::Ceil(op) => self.unary(UnaryKind::Ceil, op),
            Float::Recip(op) => self.unary(UnaryKind::Recip, op),
            Float::Tan(op) => self.composed(op, |c, x| {
                let (sin, cos) = (c.b.unary(UnaryKind::Sin, x)?, c.b.unary(UnaryKind::Cos, x)?);
                c.b.binary(BinaryKind::Div, sin, cos)
            }),
            Float::Sinh(op) => self.composed(op, |c, x| c.hyperbolic(x, BinaryKind::Sub)),
            Float::Cosh(op) => self.composed(op, |c, x| c.hyperbolic(x, BinaryKind::Add)),
            Float::Trunc(op) => self.composed(op, |c, x| {
                let (sign, size) = (c.b.unary(UnaryKind::Sign, x)?, c.b.unary(UnaryKind::Abs, x)?);
                let whole = c.b.unary(UnaryKind::Floor, size)?;
                c.b.binary(BinaryKind::Mul, sign, whole)
            }),
            Float::IsNan(op) => self.composed(op, |c, x| c.b.compare(CompareKind::Ne, x, x)),
            Float::IsInf(op) => self.composed(op, |c, x| {
                let size = c.b.unary(UnaryKind::Abs, x)?;
                c.b.compare_number(CompareKind::Eq, size, f64::INFINITY)
            }),
            Float::Hypot(op) => self.hypotenuse(op),
            Float::Powf(op) => self.power(op),
            Float::PowfScalar(op) => self.power_with(op),
            Float::IntoInt(op) => self.cast(&op.input, &op.out),
            Float::Matmul(op) => self.matmul(op),
            Float::Random(op) => self.random(op),
            _ => return None,
        })
    }

    /// Converts an operation on integers.
    pub(super) fn int(&mut self, op: &IntOperationIr) -> Option<Built> {
        match op {
            IntOperationIr::IntoFloat(op) => Some(self.cast(&op.input, &op.out)),
            _ => None,
        }
    }

    /// Converts an operation on booleans.
    pub(super) fn bool(&mut self, op: &BoolOperationIr) -> Option<Built> {
        Some(match op {
            BoolOperationIr::IntoFloat(op) | BoolOperationIr::IntoInt(op) => self.cast(&op.input, &op.out),
            BoolOperationIr::Not(op) => self.unary(UnaryKind::Not, op),
            BoolOperationIr::And(op) => self.binary(BinaryKind::And, op),
            BoolOperationIr::Or(op) => self.binary(BinaryKind::Or, op),
            BoolOperationIr::Xor(op) => self.comparison(CompareKind::Ne, op),
        })
    }

    fn unary(&mut self, kind: UnaryKind, op: &UnaryOpIr) -> Built {
        let x = self.value(&op.input)?;
        self.b.unary(kind, x)
    }

    fn composed(&mut self, op: &UnaryOpIr, build: impl FnOnce(&mut Self, ValueId) -> Built) -> Built {
        let x = self.value(&op.input)?;
        build(self, x)
    }

    /// `(e^x ± e^-x) / 2`
    fn hyperbolic(&mut self, x: ValueId, kind: BinaryKind) -> Built {
        let minus = self.b.unary(UnaryKind::Neg, x)?;
        let (up, down) = (self.b.unary(UnaryKind::Exp, x)?, self.b.unary(UnaryKind::Exp, minus)?);
        let both = self.b.binary(kind, up, down)?;
        let far = self.b.affine(both, 0.5, 0.0)?;
        if kind == BinaryKind::Add {
            return Ok(far);
        }
        // Near 0 the difference has lost its digits: there it is `x (1 + x²/6 (1 + x²/20 (1 + x²/42 (1 + x²/72))))`.
        let near = self.clamp(x, -0.5, 0.5)?;
        let square = self.b.binary(BinaryKind::Mul, near, near)?;
        let mut sum = self.b.affine(square, 1.0 / 72.0, 1.0)?;
        for divisor in [42.0, 20.0, 6.0] {
            let product = self.b.binary(BinaryKind::Mul, square, sum)?;
            sum = self.b.affine(product, 1.0 / divisor, 1.0)?;
        }
        let series = self.b.binary(BinaryKind::Mul, near, sum)?;
        let size = self.b.unary(UnaryKind::Abs, x)?;
        let (is_near, shape) = (self.b.compare_number(CompareKind::Lt, size, 0.5)?, self.b.shape(x).to_vec());
        self.b.select(is_near, series, far, &shape)
    }

    /// `m sqrt((a/m)^2 + (b/m)^2)` with the larger of both for `m`, so that no square is too large or too small. It does not
    /// move with `m`.
    fn hypotenuse(&mut self, op: &BinaryOpIr) -> Built {
        let (a, b) = (self.value(&op.lhs)?, self.value(&op.rhs)?);
        let sizes = [self.b.unary(UnaryKind::Abs, a)?, self.b.unary(UnaryKind::Abs, b)?];
        let most = self.b.binary(BinaryKind::Max, sizes[0], sizes[1])?;
        let most = self.clamp(most, f32::MIN_POSITIVE.into(), f32::MAX.into())?;
        let most = self.b.unary(UnaryKind::Detach, most)?;
        let mut square = |side| {
            let side = self.b.binary(BinaryKind::Div, side, most)?;
            self.b.binary(BinaryKind::Mul, side, side)
        };
        let (a, b) = (square(a)?, square(b)?);
        let sum = self.b.binary(BinaryKind::Add, a, b)?;
        let root = self.b.unary(UnaryKind::Sqrt, sum)?;
        self.b.binary(BinaryKind::Mul, root, most)
    }

    fn binary(&mut self, kind: BinaryKind, op: &BinaryOpIr) -> Built {
        let (a, b) = (self.value(&op.lhs)?, self.value(&op.rhs)?);
        self.b.binary(kind, a, b)
    }

    fn binary_with(&mut self, kind: BinaryKind, op: &ScalarOpIr) -> Built {
        let x = self.value(&op.lhs)?;
        self.b.binary_number(kind, x, number(op.rhs))
    }

    /// A comparison of two tensors.
    pub(super) fn comparison(&mut self, kind: CompareKind, op: &BinaryOpIr) -> Built {
        let (a, b) = (self.value(&op.lhs)?, self.value(&op.rhs)?);
        self.b.compare(kind, a, b)
    }

    /// A comparison with a number.
    pub(super) fn comparison_with(&mut self, kind: CompareKind, op: &ScalarOpIr) -> Built {
        let x = self.value(&op.lhs)?;
        self.b.compare_number(kind, x, number(op.rhs))
    }

    /// A value between two numbers.
    pub(super) fn clamp(&mut self, x: ValueId, min: f64, max: f64) -> Built {
        let x = self.b.binary_number(BinaryKind::Max, x, min)?;
        self.b.binary_number(BinaryKind::Min, x, max)
    }

    fn power(&mut self, op: &BinaryOpIr) -> Built {
        let (x, exponent) = (self.value(&op.lhs)?, self.value(&op.rhs)?);
        if let Some(number) = self.b.number(exponent) {
            return self.power_of(x, number);
        }
        let dtype = self.b.ty(x).dtype;
        let exponent = self.b.cast(exponent, dtype)?;
        self.b.binary(BinaryKind::Pow, x, exponent)
    }

    fn power_with(&mut self, op: &ScalarOpIr) -> Built {
        let x = self.value(&op.lhs)?;
        self.power_of(x, number(op.rhs))
    }

    /// A power by a number: by products and roots where there are such.
    fn power_of(&mut self, x: ValueId, exponent: f64) -> Built {
        let float = self.b.ty(x).dtype.is_float();
        if exponent == 1.0 {
            return Ok(x);
        }
        if exponent == 2.0 || exponent == 3.0 {
            let square = self.b.binary(BinaryKind::Mul, x, x)?;
            return if exponent == 2.0 { Ok(square) } else { self.b.binary(BinaryKind::Mul, square, x) };
        }
        if exponent == 0.5 && float {
            return self.b.unary(UnaryKind::Sqrt, x);
        }
        if exponent == -0.5 && float {
            return self.b.unary(UnaryKind::Rsqrt, x);
        }
        if exponent == -1.0 && float {
            return self.b.unary(UnaryKind::Recip, x);
        }
        self.b.binary_number(BinaryKind::Pow, x, exponent)
    }

    /// One number everywhere, in the type of a tensor.
    pub(super) fn filled(&mut self, value: f64, out: &TensorIr) -> Built {
        let ty = self.ty(out)?;
        self.b.constant(value, ty)
    }

    /// The element type of another tensor.
    pub(super) fn cast(&mut self, input: &TensorIr, out: &TensorIr) -> Built {
        let (x, dtype) = (self.value(input)?, self.dtype(out)?);
        self.b.cast(x, dtype)
    }

    fn pad(&mut self, op: &PadOpIr) -> Built {
        let value = match op.mode {
            PadModeIr::Constant(value) => number(value),
            PadModeIr::Reflect => return self.pad_with_itself(op, true),
            PadModeIr::Edge => return self.pad_with_itself(op, false),
        };
        let (low, high) = op.padding.iter().map(|(low, high)| (*low as u64, *high as u64)).unzip();
        let x = self.value(&op.input)?;
        self.b.emit(Pad { low, high, value }, &[x], &[])
    }

    fn reduce(&mut self, kind: Reduction, input: &TensorIr, dims: Option<&[usize]>, out: &TensorIr) -> Built {
        let mut x = self.value(input)?;
        let integer = self.b.ty(x).dtype == DType::Bool;
        if integer {
            x = self.b.cast(x, DType::I64)?;
        }
        let before = self.b.ty(x).elements();
        match kind {
            Reduction::Min => x = self.b.unary(UnaryKind::Neg, x)?,
            Reduction::MaxAbs => x = self.b.unary(UnaryKind::Abs, x)?,
            _ => {}
        }
        let op = if matches!(kind, Reduction::Sum | Reduction::Mean) { ReduceOp::Sum } else { ReduceOp::Max };
        let result = match dims {
            Some(dims) => self.b.reduce(op, x, dims)?,
            None => self.b.reduce_all(op, x, &self.sizes(out))?,
        };
        match kind {
            Reduction::Mean => {
                let count = before / self.b.ty(result).elements().max(1);
                self.b.binary_number(BinaryKind::Div, result, count as f64)
            }
            Reduction::Min => self.b.unary(UnaryKind::Neg, result),
            _ => Ok(result),
        }
    }
}

#[derive(Clone, Copy)]
enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
    MaxAbs,
}

/// A scalar argument as a number.
fn number(scalar: ScalarIr) -> f64 {
    scalar.elem()
}
