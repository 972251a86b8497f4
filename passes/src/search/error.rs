//! Why a search finds no plan.

use shardc_ir::Bytes;

/// Why there is no plan. All but [`PlanError::Bug`] are the user's to fix, and say how.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A pin cannot be kept.
    #[error("pin `{pin}`: {message}")]
    Pin {
        /// The pin.
        pin: String,
        /// Why, and what would do.
        message: String,
    },
    /// No mesh divides the batch.
    #[error("a batch of {batch} does not divide over the {ranks} ranks of the cluster: {message}")]
    Batch {
        /// Sequences per step.
        batch: u64,
        /// Ranks.
        ranks: u64,
        /// What would do.
        message: String,
    },
    /// No mesh divides the batch, though its size would let some.
    #[error("no mesh divides the batch of {batch} as the model reads it: {message}")]
    Mixed {
        /// Sequences per step.
        batch: u64,
        /// Why, and what would do.
        message: String,
    },
    /// Nothing fits in the device's memory.
    #[error(
        "no plan fits in {bound} per rank{share}{pins}: the nearest, {choice}, needs {} ({breakdown}); {fix}",
        above(*needed, *bound)
    )]
    Infeasible {
        /// The memory bound.
        bound: Bytes,
        /// Whose share it is, as part of a sentence.
        share: Box<str>,
        /// The pins, as part of a sentence.
        pins: Box<str>,
        /// The candidate that needs the least.
        choice: String,
        /// What it needs.
        needed: Bytes,
        /// By category.
        breakdown: Box<str>,
        /// What would help.
        fix: String,
    },
    /// What is pinned to lie on the hosts fits in the memory of none.
    #[error(
        "no plan fits in the {bound} that a host has for its ranks: pin `{pin}` takes {needed} of it at the least; give \
         more with --host-memory, or move less"
    )]
    Host {
        /// The pin.
        pin: String,
        /// The memory of a host.
        bound: Bytes,
        /// What it takes.
        needed: Bytes,
    },
    /// A defect of shardc.
    #[error("bug in the planner: {0}")]
    Bug(String),
}

/// So many bytes, which are more than others: where both would read alike, rounded up.
fn above(needed: Bytes, bound: Bytes) -> Bytes {
    if needed.to_string() == bound.to_string() { needed.rounded_up() } else { needed }
}

impl PlanError {
    /// By which factor what is needed exceeds what there is, where memory is short.
    pub fn filled(&self) -> Option<f64> {
        match self {
            Self::Infeasible { bound, needed, .. } | Self::Host { bound, needed, .. } => {
                Some(needed.0 as f64 / bound.0.max(1) as f64)
            }
            Self::Pin { .. } | Self::Batch { .. } | Self::Mixed { .. } | Self::Bug(_) => None,
        }
    }

    /// Whether another size of the request may have a plan.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Infeasible { .. } | Self::Host { .. } | Self::Batch { .. } | Self::Mixed { .. })
    }
}
