//! Elementwise functions of two operands of one type, and comparisons.

use super::{OpDef, arity, elementwise_rule, same_type};
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
            BinaryKind::Div => vec![vec![0]],
            _ => Vec::new(),
        };
        elementwise_rule(operands, results, linear)
    }
}

impl OpDef for Compare {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        Ok(vec![common(operands)?.with_dtype(DType::Bool)])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        elementwise_rule(operands, results, Vec::new())
    }
}
