//! Elementwise functions of one operand, their derivatives, and `scale * x + offset`.

use super::{Arithmetic, Gradient, GradientError, OpDef, arity, elementwise_rule, expect_float, number, same_type};
use crate::factor::FactorRule;
use crate::types::{DType, TensorType};
use serde::{Deserialize, Serialize};

macro_rules! unary_kinds {
    ($($(#[$doc:meta])* $variant:ident $name:literal $grad:literal,)*) => {
        /// Which function.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum UnaryKind { $($(#[$doc])* #[serde(rename = $name)] $variant,)* }

        impl UnaryKind {
            /// Every function.
            pub const ALL: &'static [UnaryKind] = &[$(Self::$variant),*];
            /// The name in the text form.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
            /// The name of the derivative in the text form.
            pub fn grad_name(self) -> &'static str {
                match self { $(Self::$variant => $grad,)* }
            }
        }
    };
}

unary_kinds! {
    /// `-x`
    Neg "neg" "neg_grad",
    /// `|x|`
    Abs "abs" "abs_grad",
    /// -1, 0 or 1
    Sign "sign" "sign_grad",
    /// `e^x`
    Exp "exp" "exp_grad",
    /// The natural logarithm.
    Log "log" "log_grad",
    /// `log(1 + x)`
    Log1p "log1p" "log1p_grad",
    /// The square root.
    Sqrt "sqrt" "sqrt_grad",
    /// `1 / sqrt(x)`
    Rsqrt "rsqrt" "rsqrt_grad",
    /// `1 / x`
    Recip "recip" "recip_grad",
    /// Sine.
    Sin "sin" "sin_grad",
    /// Cosine.
    Cos "cos" "cos_grad",
    /// Hyperbolic tangent.
    Tanh "tanh" "tanh_grad",
    /// The error function.
    Erf "erf" "erf_grad",
    /// `1 / (1 + e^-x)`
    Sigmoid "sigmoid" "sigmoid_grad",
    /// `max(x, 0)`
    Relu "relu" "relu_grad",
    /// `x Φ(x)` (Hendrycks and Gimpel, "Gaussian error linear units").
    Gelu "gelu" "gelu_grad",
    /// GELU with Φ approximated by a tanh, as GPT-2 uses it.
    GeluTanh "gelu_tanh" "gelu_tanh_grad",
    /// `x sigmoid(x)`
    Silu "silu" "silu_grad",
    /// Towards minus infinity.
    Floor "floor" "floor_grad",
    /// Towards infinity.
    Ceil "ceil" "ceil_grad",
    /// To the nearest, ties to even.
    Round "round" "round_grad",
    /// `x`, which does not move with what it is made from.
    Detach "detach" "detach_grad",
    /// Logical not.
    Not "not" "not_grad",
}

impl UnaryKind {
    /// The function of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// Whether the function is linear.
    pub fn is_linear(self) -> bool {
        matches!(self, Self::Neg | Self::Detach)
    }
}

/// `f(x)`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unary {
    /// Which function.
    pub kind: UnaryKind,
}

/// `f'(x) * dy`, from operands `dy` and `x` (the function's operand, or another one that has the same derivative).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnaryGrad {
    /// The derivative of which function.
    pub kind: UnaryKind,
}

/// `scale * x + offset`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Affine {
    /// The factor.
    #[serde(with = "number")]
    pub scale: f64,
    /// The summand.
    #[serde(with = "number")]
    pub offset: f64,
}

impl Affine {
    /// This function of floats after another as one, if that is the same but for the rounding of each: of offsets with
    /// opposite signs it is not, since what is added and taken away again rounds what it is added to, nor where a float32
    /// does not hold the factor.
    pub fn after(&self, inner: &Self) -> Option<Self> {
        let both = Self { scale: self.scale * inner.scale, offset: self.scale * inner.offset + self.offset };
        let is_same = Self::is_factor(both.scale) && self.scale * inner.offset * self.offset >= 0.0;
        is_same.then_some(both)
    }

    /// Whether a float32 holds a factor as it is: it is not infinite there, nor zero if it was not.
    pub fn is_factor(scale: f64) -> bool {
        scale == 0.0 || (scale as f32).is_normal()
    }
}

impl OpDef for Unary {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        match self.kind {
            UnaryKind::Not if operands[0].dtype != DType::Bool => {
                return Err(format!("takes bool, not {}", operands[0]));
            }
            UnaryKind::Neg | UnaryKind::Abs | UnaryKind::Sign | UnaryKind::Not => {}
            _ => expect_float(&operands[0])?,
        }
        Ok(vec![operands[0].clone()])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let linear = if self.kind.is_linear() { vec![vec![0]] } else { Vec::new() };
        elementwise_rule(operands, results, linear)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        use UnaryKind::{Ceil, Detach, Floor, Neg, Not, Round, Sign};
        let dy = gradient.cotangent(0)?;
        match self.kind {
            // Steps, whose derivative is zero wherever it exists, and what is to have none.
            Sign | Floor | Ceil | Round | Detach | Not => {}
            Neg => {
                let dx = gradient.scale(dy, -1.0)?;
                gradient.set(0, dx);
            }
            kind => {
                // What relu makes is above zero where its operand is, and is there for what reads it anyway.
                let x = if kind == UnaryKind::Relu { gradient.results[0] } else { gradient.operands[0] };
                let dx = gradient.add(UnaryGrad { kind }, &[dy, x], &[])?;
                gradient.set(0, dx);
            }
        }
        Ok(())
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        use UnaryKind::{Exp, Log, Log1p, Recip, Rsqrt, Sqrt};
        let is_wide = matches!(self.kind, Exp | Log | Log1p | Recip | Rsqrt | Sqrt);
        if is_wide { Arithmetic::Wide } else { Arithmetic::Follow }
    }

    fn has_kink(&self, _operands: &[TensorType]) -> bool {
        use UnaryKind::{Abs, Ceil, Floor, Relu, Round, Sign};
        matches!(self.kind, Abs | Ceil | Floor | Relu | Round | Sign)
    }
}

impl OpDef for UnaryGrad {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        same_type(operands)?;
        expect_float(&operands[0])?;
        Ok(vec![operands[0].clone()])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        elementwise_rule(operands, results, vec![vec![0]])
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }
}

impl OpDef for Affine {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        if operands[0].dtype == DType::Bool {
            return Err("takes numbers, not bool".to_string());
        }
        Ok(vec![operands[0].clone()])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        // A fraction of an integer is truncated, term by term.
        let exact = operands[0].dtype.is_float() || self.scale.fract() == 0.0;
        let linear = if self.offset == 0.0 && exact { vec![vec![0]] } else { Vec::new() };
        elementwise_rule(operands, results, linear)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let dy = gradient.cotangent(0)?;
        let dx = gradient.scale(dy, self.scale)?;
        gradient.set(0, dx);
        Ok(())
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }
}
