//! `explain` and `simulate`: a plan opened up, for people and for other tools.
//!
//! An [`Inspection`] lowers one rank of each kind and simulates the step; everything shown of a plan
//! comes from there or from the plan itself, so that no figure is computed twice: layouts by module
//! ([`layers`]), collectives ([`collectives`]), one value and its alternatives ([`value`]), memory over
//! time ([`memory`]), the timeline ([`timeline`]), the graph for Graphviz ([`dot`]), what would change
//! under other conditions ([`sensitivity`]), the stages of a pipeline ([`stages`]), and all of it as one page ([`html`]). [`diff`] compares two
//! plans; [`edit`] writes one as a text that a person edits, and reads it back.

mod away;
pub mod collectives;
pub mod diff;
pub mod dot;
pub mod edit;
pub mod html;
pub mod layers;
pub mod memory;
mod names;
pub mod sensitivity;
pub mod stages;
pub mod text;
pub mod timeline;
pub mod value;

use crate::error::Error;
use crate::pipeline;
use shardc_ir::plan::Prediction;
use shardc_ir::verify::VerifiedPlan;
use shardc_ir::{Plan, Program};
use shardc_passes::cluster::Cluster;
use shardc_passes::simulate::{Conditions, Simulated, predict, simulate};

/// A plan with its programs and its simulated step.
#[derive(Debug)]
pub struct Inspection<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The cluster it was made for.
    pub cluster: Cluster,
    /// One program of each kind of rank.
    pub programs: Vec<Program>,
    /// What the ranks do when.
    pub simulated: Simulated,
}

impl<'a> Inspection<'a> {
    /// Lowers and simulates a verified plan.
    ///
    /// # Errors
    /// A cluster of another size than the plan's mesh, conditions that make no sense.
    pub fn new(plan: &'a VerifiedPlan<'_>, cluster: Cluster, conditions: &Conditions) -> Result<Self, Error> {
        let (programs, apart) = pipeline::distinct_programs(plan)?;
        let simulated = simulate(&programs, &apart, plan, &cluster, conditions)?;
        Ok(Self { plan, cluster, programs, simulated })
    }

    /// What the plan will need, by its programs.
    pub fn prediction(&self) -> Prediction {
        predict(&self.programs, &self.simulated, self.plan, &self.cluster)
    }
}
