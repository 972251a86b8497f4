//! Why a module cannot be traced.

use shardc_ir::ops::OpError;

/// An operation for which there is none of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported {
    /// Burn's name for it.
    pub operation: String,
    /// The module in which it is used; empty at the top.
    pub path: String,
}

/// Why a module cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Operations that are not supported, all of them.
    #[error("operations that are not supported: {}", list(.0))]
    Unsupported(Vec<Unsupported>),
    /// Burn refused what the module does.
    #[error("the module cannot be recorded: {0}")]
    Module(String),
    /// Burn's dropout acts only under Burn's autodiff and would be lost.
    #[error(
        "Burn's dropout is not recorded: use `shardc_models::Dropout` in its place, or a probability of 0 where a \
         layer of Burn's holds it, in {}", .0.join(", ")
    )]
    SilentDropout(Vec<String>),
    /// Other layers of Burn's that draw at random only under Burn's autodiff.
    #[error(
        "what Burn's `GaussianNoise` and `RRelu` draw is not recorded: draw it in the module itself (`x.random_like`) \
         in place of {}", .0.join(", ")
    )]
    SilentNoise(Vec<String>),
    /// A bug of this crate: it built an operation that does not fit its operands.
    #[error("internal error in `{path}`: {error}")]
    Bug {
        /// The module.
        path: String,
        /// What the operation says.
        error: OpError,
    },
}

fn list(unsupported: &[Unsupported]) -> String {
    let place = |op: &Unsupported| match op.path.as_str() {
        "" => format!("`{}` in the loss or the top module", op.operation),
        path => format!("`{}` in {path}", op.operation),
    };
    unsupported.iter().map(place).collect::<Vec<_>>().join("; ")
}
