//! One AdamW update (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019,
//! algorithm 2, in PyTorch's arrangement).

use super::{Op, OpDef, Update, arity, elementwise_rule, expect_shape, expect_type};
use crate::factor::FactorRule;
use crate::types::{DType, TensorType};
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From operands `parameter`, `gradient`, `m`, `v`, and the f32 scalars `gradient_scale`,
/// `learning_rate` and `step` (1 in the first step): the new `parameter`, `m` and `v`; and the new parameter as
/// [`cast`](Self::cast), if that names an element type.
///
/// ```text
/// g = gradient * gradient_scale
/// p = parameter * (1 - learning_rate * weight_decay)
/// m = beta1 * m + (1 - beta1) * g
/// v = beta2 * v + (1 - beta2) * g²
/// p = p - learning_rate * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)
/// ```
///
/// If `gradient_scale` is not finite, nothing changes: so the state before a step that failed is kept, and
/// the step can be looked into.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adamw {
    /// The decay of the first moment.
    pub beta1: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// The number added to the root.
    pub eps: f64,
    /// The decoupled weight decay.
    pub weight_decay: f64,
    /// The element type in which the new parameter is made as well, as a fourth result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cast: Option<DType>,
}

impl OpDef for Adamw {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 7)?;
        let parameter = &operands[0];
        for (what, ty) in ["the gradient", "m", "v"].iter().zip(&operands[1..4]) {
            expect_shape(what, ty, &parameter.shape)?;
        }
        for (what, ty) in ["the gradient's scale", "the learning rate", "the step"].iter().zip(&operands[4..]) {
            expect_type(what, ty, &TensorType::scalar(DType::F32))?;
        }
        if let Some(dtype) = self.cast.filter(|dtype| !dtype.is_float()) {
            return Err(format!("casts no parameter to {}", dtype.name()));
        }
        let cast = self.cast.map(|dtype| parameter.with_dtype(dtype));
        Ok([parameter.clone(), operands[2].clone(), operands[3].clone()].into_iter().chain(cast).collect())
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        FactorRule { fills: true, ..elementwise_rule(operands, results, Vec::new()) }
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        Flops(15.0 * operands[0].elements() as f64)
    }

    fn may_overwrite(&self, _operand: usize, _operands: usize) -> bool {
        true
    }

    fn may_repeat(&self) -> bool {
        true
    }

    fn update(&self) -> Option<Update> {
        Some(Update { states: 2, cast: self.cast })
    }

    fn casting(&self, cast: Option<DType>) -> Option<Op> {
        Some(Self { cast, ..self.clone() }.into())
    }
}
