//! What can go wrong in a pass: what the user's model or options cause, apart from what is a bug.

use shardc_ir::ops::{GradientError, OpError};

/// A pass that failed.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// Something the user can change.
    #[error(transparent)]
    User(#[from] UserError),
    /// A bug of the compiler.
    #[error("internal error in `{pass}`, please report it with the output of --dump-to: {message}")]
    Bug {
        /// The pass.
        pass: &'static str,
        /// What was wrong.
        message: String,
    },
}

/// What a user's model or options cause.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum UserError {
    /// There is no output of this name.
    #[error("the graph has no output `{name}`; it has {}", known.join(", "))]
    NoOutput {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<String>,
    },
    /// The loss is not one floating-point number.
    #[error("the loss must be one floating-point number, not {ty}")]
    LossNotScalar {
        /// Its type.
        ty: String,
    },
    /// The loss depends on operations that have no derivative.
    #[error("the loss cannot be differentiated:{}", nodes.iter().map(|node| format!("\n  {node}")).collect::<String>())]
    NotDifferentiable {
        /// Each such node.
        nodes: Vec<GradientError>,
    },
    /// The loss depends on no trained parameter.
    #[error("the loss depends on no trained parameter: there is nothing to train")]
    NothingToTrain,
    /// A leaf or a result has a name that a pass gives.
    #[error(
        "`{name}` is a name that the training step gives (to its inputs, moments, updates and norm); give the model's \
         input, parameter or result another name"
    )]
    ReservedName {
        /// The name.
        name: String,
    },
    /// The devices cannot compute in the precision that is asked for.
    #[error(
        "precision {precision} needs 8-bit floating-point units, and `{device}` of cluster {cluster} has none; use --precision {instead}"
    )]
    NoUnits {
        /// The precision.
        precision: &'static str,
        /// The device.
        device: String,
        /// The cluster, as it was asked for.
        cluster: String,
        /// The fastest precision that the device has units for.
        instead: &'static str,
    },
    /// No product can be of 8-bit floats.
    #[error(
        "precision fp8: no product of the model has sizes that are all multiples of {side}, the tokens of a sequence among \
         them; use such sizes, or --precision bf16"
    )]
    NothingIn8Bits {
        /// What sizes must be multiples of.
        side: u64,
    },
    /// An option is out of its range.
    #[error("{option} is {value}; it must be {range}")]
    OutOfRange {
        /// The option.
        option: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        range: &'static str,
    },
}

impl PassError {
    /// An ill-formed node that a pass made: always a bug.
    pub fn ill_formed(pass: &'static str) -> impl Fn(OpError) -> Self {
        move |error| Self::Bug { pass, message: error.to_string() }
    }
}
