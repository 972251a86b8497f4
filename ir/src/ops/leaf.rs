//! Leaves: what a step is given.

use super::{OpDef, arity, declared_one, dim_factors, single};
use crate::factor::FactorRule;
use crate::types::TensorType;
use crate::units::{Bytes, Flops};
use serde::{Deserialize, Serialize};

/// The name of the input that numbers the steps from 1, an f32 scalar.
pub const STEP: &str = "step";
/// The name of the input that numbers the samples of a batch from 0, one integer for each.
pub const SAMPLE: &str = "sample";

/// A tensor that the caller gives to each step: a batch, a learning rate. Its type is declared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// The name by which the caller gives it.
    pub name: String,
}

/// A tensor of the model, named by its module path. Its type is declared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameter {
    /// The module path: `blocks.0.attention.query.weight`.
    pub name: String,
    /// Whether it is not trained.
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub frozen: bool,
}

/// A tensor that outlives the step and is no parameter: of the optimizer (a moment), which starts at one number; or the
/// cast of a parameter, which is made when the parameter is given, and by every step. Its type is declared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The name: the parameter's, then the moment's or the element type: `up.weight.m`, `up.weight.bf16`.
    pub name: String,
    /// The number every element starts at, unless it is a cast.
    pub init: f64,
    /// The name of the parameter whose cast it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cast_of: Option<String>,
}

impl Parameter {
    fn is_filled(&self) -> bool {
        true
    }
}

impl State {
    /// A cast is as its parameter is.
    fn is_filled(&self) -> bool {
        self.init == 0.0
    }
}

impl Input {
    fn is_filled(&self) -> bool {
        false
    }
}

macro_rules! leaf {
    ($($name:ident),*) => {
        $(impl OpDef for $name {
            fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
                arity(operands, 0)?;
                Ok(vec![declared_one(declared)?])
            }
            fn rule(&self, _operands: &[TensorType], results: &[TensorType]) -> FactorRule {
                let mut rule = FactorRule { fills: self.is_filled(), ..FactorRule::default() };
                let factors = dim_factors(&mut rule, &results[0].shape);
                rule.results = vec![single(&factors)];
                rule
            }
            fn flops(&self, _operands: &[TensorType], _results: &[TensorType]) -> Flops {
                Flops(0.0)
            }
            fn bytes(&self, _operands: &[TensorType], _results: &[TensorType]) -> Bytes {
                Bytes(0)
            }
            fn is_leaf(&self) -> bool {
                true
            }
        })*
    };
}

leaf!(Input, Parameter, State);
