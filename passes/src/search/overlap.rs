//! Whether communication within the blocks is hidden better if the microbatch is cut into chunks
//! ([`interleave`](crate::interleave)).
//!
//! What chunks hide depends on the order of kernels and collectives, and what they lose on kernels of small products
//! and on more launches. So plans in chunks are not estimated: for plans that are lowered anyway, and for the
//! fastest of the others that may gain enough, some numbers of chunks are lowered and simulated as well.

use super::{Candidate, PlanError, Space};
use shardc_ir::plan::Prediction;
use shardc_ir::{Bytes, Plan};

/// The numbers of chunks that are tried.
const CHUNKS: [u64; 3] = [2, 4, 8];

/// More chunks are taken if they make the step so much shorter.
const GAIN: f64 = 0.005;

/// The share of the communication that shows which chunks are thought to hide at the most, before they are tried.
const HIDDEN: f64 = 0.8;

/// The families whose collectives lie within blocks.
const WITHIN: [&str; 3] = ["tp", "cp", "ulysses"];

/// Whether a plan of a candidate, which is predicted to take this without chunks, may be faster in chunks than `step`
/// seconds. Ranks that are threads of one process run nothing beside anything.
pub(super) fn may_gain(candidate: &Candidate, prediction: &Prediction, space: &Space<'_, '_>, step: f64) -> bool {
    let communicates = WITHIN.iter().any(|family| candidate.degrees.degree(family) > 1);
    let is_open = space.pins.overlap_chunks.is_none() && space.cluster.device.kind != "cpu";
    let is_open = is_open && candidate.stages.is_none() && candidate.offload.is_none();
    let shows = prediction.exposed_communication.0;
    communicates && is_open && shows > GAIN * prediction.step.0 && prediction.step.0 - HIDDEN * shows < step
}

/// The fastest plan of a candidate in chunks, and in how many, that takes less than `step` seconds and fits. `make`
/// builds a candidate and predicts it by its programs.
///
/// # Errors
/// Those of `make`; that a plan cannot be cut is none.
pub(super) fn in_chunks(
    candidate: &Candidate,
    (mut step, bound): (f64, Bytes),
    make: &dyn Fn(&Candidate) -> Result<Plan, PlanError>,
) -> Result<Option<(u64, Plan)>, PlanError> {
    let mut best = None;
    for overlap_chunks in CHUNKS.into_iter().filter(|chunks| candidate.degrees.microbatch.is_multiple_of(*chunks)) {
        let plan = match make(&Candidate { overlap_chunks, ..candidate.clone() }) {
            Ok(plan) => plan,
            Err(PlanError::Pin { .. }) => break,
            Err(error) => return Err(error),
        };
        tracing::info!(choice = plan.choice, exact = plan.prediction.step.to_string(), "lowered");
        if plan.prediction.step.0 > (1.0 - GAIN) * step || plan.prediction.memory.total() > bound {
            break;
        }
        step = plan.prediction.step.0;
        best = Some((overlap_chunks, plan));
    }
    Ok(best)
}

/// Why no microbatch is cut into so many chunks.
pub(super) fn undivided(chunks: u64, microbatch: Option<u64>, batch: u64) -> PlanError {
    let message = match microbatch {
        Some(size) if !size.is_multiple_of(chunks) => {
            let samples = if size == 1 { "1 sample".to_string() } else { format!("{size} samples") };
            format!("microbatches of {samples} do not divide into {chunks} chunks; pin larger ones, or fewer chunks")
        }
        _ => format!(
            "no microbatch of a batch of {batch} divides into {chunks} chunks of whole samples on each data rank"
        ),
    };
    PlanError::Pin { pin: format!("overlap_chunks={chunks}"), message }
}
