//! What a plan may ask of a runtime beyond kernels and collectives that all ranks run alike.
//!
//! A plan may say more than every runtime can execute yet. A [`Target`] says which of these features
//! it runs; the search opens the others only where it is asked to, and nothing that lacks one is started.

use crate::plan::{Plan, Scope};
use crate::target::Target;
use std::fmt;

/// A part of the plan's language that not every runtime executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// Ranks that run different parts of the graph: a mesh with an axis `pp`.
    Pipeline,
}

impl Feature {
    /// Every feature.
    pub const ALL: [Feature; 1] = [Self::Pipeline];

    /// Whether a plan needs it.
    pub fn is_in(self, plan: &Plan) -> bool {
        match self {
            Self::Pipeline => plan.mesh.degree("pp") > 1,
        }
    }

    /// The pin that does without it.
    pub fn avoided_by(self) -> &'static str {
        match self {
            Self::Pipeline => "pp=1",
        }
    }

    /// Whether a search considers it: a pin asks for it, every plan is wanted, or the target runs it.
    pub fn is_open(self, is_pinned: bool, scope: Scope, target: &dyn Target) -> bool {
        is_pinned || scope == Scope::All || target.runs(self)
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pipeline => "pipeline stages (pp)",
        })
    }
}

/// What of a plan a target cannot run, in the order of [`Feature::ALL`].
pub fn missing(plan: &Plan, target: &dyn Target) -> Vec<Feature> {
    Feature::ALL.into_iter().filter(|feature| feature.is_in(plan) && !target.runs(*feature)).collect()
}
