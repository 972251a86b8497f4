//! The pipeline of a candidate.

use super::pins::Recompute;
use shardc_ir::NodeId;
use shardc_ir::pipeline::{Length, Schedule};

/// The ZeRO stage up to which all pipelines are tried, and which bounds know: gradients that are reduced in every
/// microbatch mostly cost more than they save here.
pub(in crate::search) const MOST_ZERO: u64 = 1;

/// What a stage of a schedule holds at the most; where that follows from the schedule, nothing is said of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Of how many chunks, what forward passes leave ([`Pipeline::in_flight`](shardc_ir::Pipeline::in_flight)).
    pub in_flight: Option<u64>,
    /// Of how many chunks, what gradients of weights wait for ([`Pipeline::delayed`](shardc_ir::Pipeline::delayed)).
    pub delayed: Option<u64>,
}

/// The pipeline of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct Stages {
    /// The order of the microbatches.
    pub schedule: Schedule,
    /// Chunks of each stage.
    pub per_stage: u64,
    /// What a stage holds at the most.
    pub limits: Limits,
    /// The nodes, of the graph that was searched, that begin the chunks but the first.
    pub cuts: Vec<NodeId>,
    /// What each stage computes again, if not all the same.
    pub recompute: Vec<Recompute>,
    /// How long each chunk takes ([`Pipeline::lengths`](shardc_ir::Pipeline::lengths)).
    pub lengths: Vec<Length>,
}

impl Stages {
    /// The choices, as pins would say them.
    pub fn text(&self) -> String {
        let chunks = if self.per_stage > 1 { format!(",virtual={}", self.per_stage) } else { String::new() };
        let limit =
            |name: &str, chunks: Option<u64>| chunks.map_or(String::new(), |chunks| format!(",{name}={chunks}"));
        let limits = [limit("in_flight", self.limits.in_flight), limit("delayed", self.limits.delayed)].concat();
        let recompute: Vec<String> = self.recompute.iter().map(Recompute::to_string).collect();
        let recompute = match recompute.is_empty() {
            true => String::new(),
            false => format!(",stage_recompute={}", recompute.join("/")),
        };
        format!("schedule={}{chunks}{limits}{recompute}", self.schedule.name())
    }
}
