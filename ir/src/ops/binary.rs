//! Elementwise functions of two operands of one type, and comparisons.

use super::{
    Affine, Arithmetic, Gradient, GradientError, OpDef, Select, Unary, UnaryKind, arity, elementwise_rule, same_type,
};
use crate::entity::ValueId;
use crate::factor::FactorRule;
use crate::types::{DType, TensorType};
use serde::{Deserialize, Serialize};

macro_rules! kinds {
    ($(#[$top:meta])* $kind:ident { $($(#[$doc:meta])* $variant:ident $name:literal,)* }) => {
        $(#[$top])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $kind { $($(#[$doc])* #[serde(rename = $name)] $variant,)* }

        impl $kind {
            /// Every function.
            pub const ALL: &'static [$kind] = &[$(Self::$variant),*];
            /// The name in the text form.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
            /// The function of a name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|kind| kind.name() == name)
            }
        }
    };
}

kinds! {
    /// Which function.
    BinaryKind {
        /// `a + b`
        Add "add",
        /// `a - b`
        Sub "sub",
        /// `a * b`
        Mul "mul",
        /// `a / b`
        Div "div",
        /// The remainder, with the sign of `b`.
        Rem "rem",
        /// `a ^ b`
        Pow "pow",
        /// The larger.
        Max "max",
        /// The smaller.
        Min "min",
        /// Logical and.
        And "and",
        /// Logical or.
        Or "or",
    }
}

kinds! {
    /// Which comparison.
    CompareKind {
        /// `a == b`
        Eq "eq",
        /// `a != b`
        Ne "ne",
        /// `a < b`
        Lt "lt",
        /// `a <= b`
        Le "le",
        /// `a > b`
        Gt "gt",
        /// `a >= b`
        Ge "ge",
    }
}

/// `f(a, b)`; either operand may be a scalar.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binary {
    /// Which function.
    pub kind: BinaryKind,
}

/// A comparison, which makes a bool; either operand may be a scalar.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compare {
    /// Which comparison.
    pub kind: CompareKind,
}

/// The common type of two operands, of which one may be a scalar.
fn common(operands: &[TensorType]) -> Result<TensorType, String> {
    arity(operands, 2)?;
    match (operands[0].rank(), operands[1].rank()) {
        (0, _) if operands[0].dtype == operands[1].dtype => Ok(operands[1].clone()),
        (_, 0) if operands[0].dtype == operands[1].dtype => Ok(operands[0].clone()),
        _ => same_type(operands).map(|()| operands[0].clone()),
    }
}

impl OpDef for Binary {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let ty = common(operands)?;
        let logical = matches!(self.kind, BinaryKind::And | BinaryKind::Or);
        if logical != (ty.dtype == DType::Bool) {
            return Err(format!("does not take {ty}"));
        }
        Ok(vec![ty])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let equal_ranks = operands[0].rank() == operands[1].rank();
        let linear = match self.kind {
            BinaryKind::Add | BinaryKind::Sub if equal_ranks => vec![vec![0, 1]],
            BinaryKind::Mul => vec![vec![0], vec![1]],
            // Integer division truncates each term.
            BinaryKind::Div if operands[0].dtype.is_float() => vec![vec![0]],
            _ => Vec::new(),
        };
        elementwise_rule(operands, results, linear)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        if !gradient.needed.contains(&true) {
            return Ok(());
        }
        let dy = gradient.cotangent(0)?;
        if self.kind == BinaryKind::Mul && gradient.operands[0] == gradient.operands[1] {
            let product = gradient.binary(BinaryKind::Mul, dy, gradient.operands[0])?;
            let part = gradient.scale(product, 2.0)?;
            gradient.set(0, part);
            return Ok(());
        }
        for index in [0, 1] {
            if gradient.needed[index]
                && let Some(part) = self.derivative(gradient, dy, index)?
            {
                let part = gradient.sum_to_scalar(part, index)?;
                gradient.set(index, part);
            }
        }
        Ok(())
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        if self.kind == BinaryKind::Pow { Arithmetic::Wide } else { Arithmetic::Follow }
    }

    fn has_kink(&self, _operands: &[TensorType]) -> bool {
        matches!(self.kind, BinaryKind::Max | BinaryKind::Min | BinaryKind::Rem)
    }
}

impl Binary {
    /// The cotangent of operand `index`, in the shape of the result. At a tie, `max` and `min` give
    /// it to the first operand.
    fn derivative(
        &self,
        gradient: &mut Gradient<'_>,
        dy: ValueId,
        index: usize,
    ) -> Result<Option<ValueId>, GradientError> {
        use BinaryKind::{Add, And, Div, Max, Min, Mul, Or, Pow, Rem, Sub};
        let (a, b, y) = (gradient.operands[0], gradient.operands[1], gradient.results[0]);
        let made = match (self.kind, index) {
            (Add, _) | (Sub | Rem, 0) => dy,
            (Sub, _) => gradient.scale(dy, -1.0)?,
            (Mul, 0) => gradient.binary(Mul, dy, b)?,
            (Mul, _) => gradient.binary(Mul, dy, a)?,
            (Div, 0) => gradient.binary(Div, dy, b)?,
            (Div, _) => {
                let product = gradient.binary(Mul, dy, y)?;
                let quotient = gradient.binary(Div, product, b)?;
                gradient.scale(quotient, -1.0)?
            }
            (Rem, _) => {
                let quotient = gradient.binary(Div, a, b)?;
                let whole = gradient.add(Unary { kind: UnaryKind::Floor }, &[quotient], &[])?;
                let product = gradient.binary(Mul, dy, whole)?;
                gradient.scale(product, -1.0)?
            }
            (Pow, 0) => {
                // a^0 does not move with a; at 0 it would be 0 times infinity.
                let (less, zero) =
                    (gradient.add(Affine { scale: 1.0, offset: -1.0 }, &[b], &[])?, gradient.constant_like(b, 0.0)?);
                let is_zero = gradient.add(Compare { kind: CompareKind::Eq }, &[b, zero], &[])?;
                let exponent = gradient.add(Select {}, &[is_zero, zero, less], &[])?;
                let power = gradient.binary(Pow, a, exponent)?;
                let slope = gradient.binary(Mul, power, b)?;
                gradient.binary(Mul, dy, slope)?
            }
            (Pow, _) => {
                // 0^b does not move with b; the logarithm alone would make it 0 times infinity.
                let (log, zero) =
                    (gradient.add(Unary { kind: UnaryKind::Log }, &[a], &[])?, gradient.constant_like(a, 0.0)?);
                let at_zero = gradient.add(Compare { kind: CompareKind::Eq }, &[a, zero], &[])?;
                let log = gradient.add(Select {}, &[at_zero, zero, log], &[])?;
                let slope = gradient.binary(Mul, y, log)?;
                gradient.binary(Mul, dy, slope)?
            }
            (Max | Min, _) => {
                let kind = if self.kind == Max { CompareKind::Ge } else { CompareKind::Le };
                let (first, zero) = (gradient.add(Compare { kind }, &[a, b], &[])?, gradient.constant_like(dy, 0.0)?);
                let sides = if index == 0 { [first, dy, zero] } else { [first, zero, dy] };
                gradient.add(Select {}, &sides, &[])?
            }
            (And | Or, _) => return Ok(None),
        };
        Ok(Some(made))
    }
}

impl OpDef for Compare {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        Ok(vec![common(operands)?.with_dtype(DType::Bool)])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        elementwise_rule(operands, results, Vec::new())
    }
    fn gradient(&self, _gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        // A step: the derivative is zero wherever it exists.
        Ok(())
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }

    fn has_kink(&self, operands: &[TensorType]) -> bool {
        operands[0].dtype.is_float()
    }
}
