//! The verifiers. Each gathers every finding, and gives facts that the next phase asks for: a plan
//! can be lowered only as a [`VerifiedPlan`], the driver starts a runtime only with programs that are
//! [`VerifiedPrograms`], and only this module makes either.
//!
//! The invariants of each phase stand at the top of its verifier's file.

mod agreement;
mod graph;
mod lockstep;
mod memory;
mod phase;
mod pipeline;
pub use pipeline::BEFORE_LOOP;
#[cfg(test)]
mod pipeline_tests;
mod plan;
mod program;
mod translation;

pub use graph::{GraphFacts, graph};
pub use phase::Phase;
pub use plan::{Conversion, PlanFacts, VerifiedPlan, plan};
pub use program::{ProgramFacts, VerifiedPrograms, program, step};
pub use translation::{TranslationFacts, cover, translation};
