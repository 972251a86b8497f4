//! What a search tells: the runners-up and why they lost, or why nothing fits and what would help.

use super::{Candidate, Pins, PlanError};
use crate::cluster::Cluster;
use shardc_ir::plan::{Alternative, Memory, Prediction};
use shardc_ir::{Bytes, Seconds};

/// The runners-up, best first, and why each lost. Those that were not lowered are estimated; what the estimate does
/// not see of the winner it does not see of its like either, so their steps are scaled by what the winner's exact
/// step is of its own estimate.
pub(super) fn alternatives(
    candidates: &[Candidate],
    chosen: usize,
    lowered: &[(usize, Prediction)],
    refused: &[(usize, Memory)],
    bound: Bytes,
) -> Vec<Alternative> {
    let exact = |index: usize| lowered.iter().find(|(other, _)| *other == index).map(|(_, exact)| exact);
    let estimated = &candidates[chosen].prediction;
    let winner = exact(chosen).unwrap_or(estimated);
    let scale = winner.step.0 / estimated.step.0;
    let mut seen = vec![candidates[chosen].choice()];
    let (mut list, mut unfit) = (Vec::new(), 0);
    for (index, candidate) in candidates.iter().enumerate() {
        let choice = candidate.choice();
        if seen.contains(&choice) {
            continue;
        }
        seen.push(choice.clone());
        let (prediction, beside, scale) = match exact(index) {
            Some(exact) => (exact, winner, 1.0),
            None => (&candidate.prediction, estimated, scale),
        };
        let confirmed = refused.iter().find(|(other, _)| *other == index).map(|(_, memory)| *memory);
        let memory = confirmed.unwrap_or(prediction.memory);
        let reason = if memory.total() > bound {
            // The fastest that do not fit say what memory costs; more of them say no more.
            unfit += 1;
            if unfit > 4 {
                continue;
            }
            let (name, bytes) = largest(&memory);
            format!("needs {} of {bound} ({name} {bytes})", memory.total())
        } else {
            slower(prediction, beside)
        };
        list.push(Alternative { choice, step: prediction.step * scale, memory: memory.total(), reason });
        if list.len() == 12 {
            break;
        }
    }
    list
}

/// By how much a plan is slower, and what makes it so.
fn slower(prediction: &Prediction, winner: &Prediction) -> String {
    let percent = 100.0 * (prediction.step.0 / winner.step.0 - 1.0);
    if percent < -0.1 {
        return "faster, but plans of these degrees needed more memory than was estimated".to_string();
    }
    let parts = [
        ("communication", prediction.exposed_communication, winner.exposed_communication),
        ("matmuls", prediction.matmul, winner.matmul),
        ("memory traffic and launches", prediction.memory_bound, winner.memory_bound),
        ("the update", prediction.optimizer, winner.optimizer),
        ("waits between stages", prediction.bubble, winner.bubble),
    ];
    let worst = parts.iter().max_by(|a, b| (a.1.0 - a.2.0).total_cmp(&(b.1.0 - b.2.0)));
    match worst {
        Some((name, own, best)) if own.0 > best.0 => {
            format!("{percent:.1}% slower: {} more in {name}", Seconds(own.0 - best.0))
        }
        _ => "as fast, and less simple".to_string(),
    }
}

fn parts(memory: &Memory) -> [(&'static str, Bytes); 5] {
    [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("buffers", memory.buffers),
    ]
}

pub(super) fn breakdown(memory: &Memory) -> String {
    parts(memory).map(|(name, bytes)| format!("{name} {bytes}")).join(", ")
}

fn largest(memory: &Memory) -> (&'static str, Bytes) {
    parts(memory).into_iter().max_by_key(|(_, bytes)| *bytes).unwrap_or_default()
}

pub(super) fn infeasible(
    candidates: &[Candidate],
    refused: &[(usize, Memory)],
    bound: Bytes,
    pins: &Pins,
    batch: u64,
    cluster: &Cluster,
) -> PlanError {
    let memory = |index: usize| {
        let confirmed = refused.iter().find(|(other, _)| *other == index).map(|(_, memory)| *memory);
        confirmed.unwrap_or(candidates[index].prediction.memory)
    };
    // What was lowered is known; an estimate that fits is not, once others turned out larger.
    let is_known = |index: &usize| refused.is_empty() || refused.iter().any(|(other, _)| other == index);
    let Some(nearest) = (0..candidates.len()).filter(is_known).min_by_key(|index| memory(*index).total()) else {
        return PlanError::Bug("no candidate at all".to_string());
    };
    let needs = memory(nearest);
    let breakdown = breakdown(&needs);
    let is_pinned = *pins != Pins::default();
    let (share, give) = match cluster.share_of_host() {
        Some(share) if share == bound => {
            let host = Bytes(cluster.device.host_memory_bytes.value as u64);
            let (ranks, needed) = (cluster.per_node, cluster.on_host(needs.total()));
            (format!(", its share of the host's {host} over {ranks} ranks"), format!("give the host {needed}"))
        }
        _ => (String::new(), format!("give each rank {}", needs.total())),
    };
    let mut fixes = vec![give];
    if is_pinned {
        fixes.push("drop a pin".to_string());
    }
    if largest(&needs).0 == "activations" && candidates[nearest].degrees.microbatch > 1 {
        fixes.push("use smaller microbatches".to_string());
    }
    if largest(&needs).0 != "activations" {
        fixes.push(format!("use more than {} ranks", cluster.ranks()));
    } else {
        fixes.push(format!("use shorter sequences or fewer of them than {batch}"));
    }
    PlanError::Infeasible {
        bound,
        share: share.into(),
        pins: if is_pinned { " under these pins" } else { "" }.into(),
        choice: candidates[nearest].choice(),
        needed: needs.total(),
        breakdown: breakdown.into(),
        fix: fixes.join(", or "),
    }
}
