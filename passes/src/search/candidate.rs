//! One point of the search space, with what it is estimated to take.

use super::choice::degrees::Degrees;
use super::choice::offload::Offloads;
use super::choice::pins::{Pins, Recompute};
use super::choice::stages::Stages;
use super::estimate::relief::Relief;
use crate::shard::objective::Prices;
use shardc_ir::plan::Prediction;
use shardc_ir::{Family, Mesh};

/// One point of the search space.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// How many ways the step is divided.
    pub degrees: Degrees,
    /// The pipeline, if it has stages.
    pub stages: Option<Stages>,
    /// ZeRO stage.
    pub zero: u64,
    /// Recomputation.
    pub recompute: Recompute,
    /// Into how many chunks the head and its loss are cut.
    pub loss_chunks: u64,
    /// Into how many chunks the blocks' part of the batch is cut, which overlap.
    pub overlap_chunks: u64,
    /// The seconds that collectives within the blocks show without chunks.
    pub within: f64,
    /// What its layouts were chosen for.
    pub prices: Prices,
    /// What lies away from the device.
    pub offload: Offloads,
    /// What that takes from the device and adds to the step; the prediction has both.
    pub relief: Relief,
    /// What it is predicted to need.
    pub prediction: Prediction,
}

impl Candidate {
    /// Whether it differs from another in computing more values again, and in nothing else.
    pub(in crate::search) fn is_spare_of(&self, other: &Self) -> bool {
        let is_more = match (self.recompute, other.recompute) {
            (Recompute::Values(own), Recompute::Values(least)) => own > least,
            _ => false,
        };
        let same = |of: &Self| {
            (of.zero, of.loss_chunks, of.overlap_chunks, of.prices.byte.to_bits(), of.prices.wire.to_bits())
        };
        let is_alike = same(self) == same(other) && self.offload == other.offload;
        is_more && self.degrees == other.degrees && self.stages == other.stages && is_alike
    }

    /// Whether its layouts are for plans in chunks, which hide some of the wire.
    pub(in crate::search) fn is_for_chunks(&self) -> bool {
        self.prices.wire < 1.0
    }

    /// The seconds that its step takes at the least by its estimate, in however many chunks.
    pub(in crate::search) fn least(&self) -> f64 {
        self.prediction.step.0 - self.within
    }

    /// The choices, as pins would say them.
    pub fn choice(&self) -> String {
        let Self { degrees, zero, recompute, .. } = self;
        let many = |name: &str, count: u64| if count > 1 { format!(",{name}={count}") } else { String::new() };
        let chunks = [many("loss_chunks", self.loss_chunks), many("overlap_chunks", self.overlap_chunks)].concat();
        let stages = self.stages.as_ref().map_or(String::new(), |stages| format!(",{}", stages.text()));
        let degrees = format!("{}{stages}", degrees.text());
        let away = if self.offload.is_none() { String::new() } else { format!(",{}", self.offload.text()) };
        format!("{degrees},zero={zero},microbatch={},recompute={recompute}{chunks}{away}", self.degrees.microbatch)
    }

    /// The mesh, without axes of one coordinate.
    pub fn mesh(&self, batch: u64) -> Mesh {
        self.degrees.mesh(batch)
    }
}

#[cfg(test)]
impl Candidate {
    /// So many data ranks, with nothing else chosen but what is computed again.
    pub(in crate::search) fn bare(dp: u64, recompute: Recompute, prediction: Prediction) -> Self {
        Self {
            degrees: Degrees::new(1).with(Family::Data, &[dp]),
            stages: None,
            zero: 0,
            recompute,
            loss_chunks: 1,
            overlap_chunks: 1,
            within: 0.0,
            prices: Prices::default(),
            offload: Offloads::default(),
            relief: Relief::default(),
            prediction,
        }
    }
}

/// The chunks in which ranks that divide the queries of causal attention have as much to do
/// ([`split_batch`](crate::split_batch)).
const EVEN_CHUNKS: u64 = 2;

/// Into how many chunks the blocks' part of the batch is cut before more are tried, with what a step takes longer where the
/// last rank takes `uneven` seconds longer than others if it is not cut.
pub(in crate::search) fn overlap_chunks(uneven: f64, pins: &Pins) -> Vec<(u64, f64)> {
    match pins.overlap_chunks {
        None if uneven > 0.0 => vec![(EVEN_CHUNKS, 0.0), (1, uneven)],
        None | Some(1) => vec![(1, uneven)],
        Some(chunks) => vec![(chunks, 0.0)],
    }
}

/// Candidates that err alike in their memory: those of equal data ranks and ZeRO stage.
pub(in crate::search) type Kin = (u64, u64);

pub(in crate::search) fn kin(candidate: &Candidate) -> Kin {
    (candidate.degrees.degree(Family::Data) * candidate.degrees.degree(Family::Fsdp), candidate.zero)
}

/// Microbatches of all stages together above which [programs are long](is_long).
const LONG: u64 = 4096;

/// Whether programs of a pipeline are so long that lowering and simulating them takes seconds: of those of one schedule the
/// estimate tells which is the fastest, and that one alone is lowered, of two schedules at the most.
pub(in crate::search) fn is_long(candidate: &Candidate, batch: u64) -> bool {
    passes(candidate, batch) > LONG
}

/// Microbatches of all stages of a pipeline together.
pub(in crate::search) fn passes(candidate: &Candidate, batch: u64) -> u64 {
    let mesh = candidate.mesh(batch);
    candidate.stages.as_ref().map_or(0, |_| mesh.degree(Family::Pipeline) * mesh.microbatches())
}

/// By step time; what is equal within a thousandth by the simpler choice.
pub(in crate::search) fn sort(candidates: &mut [Candidate]) {
    candidates.sort_by(|a, b| a.prediction.step.0.total_cmp(&b.prediction.step.0));
    let simplicity = |c: &Candidate| {
        (c.degrees.degree(Family::Pipeline), c.recompute, c.zero, c.degrees.axes(), c.degrees.degree(Family::Tensor))
    };
    // The best and its near-ties, simplest first.
    let Some(best) = candidates.first().map(|best| best.prediction.step.0) else { return };
    let ties = candidates.partition_point(|candidate| candidate.prediction.step.0 <= best * 1.001);
    candidates[..ties].sort_by_key(simplicity);
}

/// The fastest that fits, the first of equals.
pub(in crate::search) fn fastest(candidates: &[Candidate]) -> Option<&Candidate> {
    let fit = candidates.iter().filter(|candidate| candidate.prediction.fits());
    fit.min_by(|a, b| a.prediction.step.0.total_cmp(&b.prediction.step.0))
}

/// The seconds of its step.
pub(in crate::search) fn least_step(candidates: &[Candidate]) -> f64 {
    fastest(candidates).map_or(f64::INFINITY, |of| of.prediction.step.0)
}
