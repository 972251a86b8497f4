//! What a plan will need, by its programs.

use super::outline::{Outline, Sort, Works};
use super::price::Work;
use super::{Conditions, SimulateError, Simulated, simulate_outlines};
use crate::allocate::memory;
use crate::cluster::Cluster;
use crate::search::{Exact, model_work};
use crate::threads;
use shardc_ir::plan::{Memory, Prediction};
use shardc_ir::program::Stream;
use shardc_ir::{AxisId, Plan, Program, Seconds};

/// What a plan takes by the outlines of its programs, which are those that [`simulate`](super::simulate) takes:
/// [`predict`], and the memory of each stage.
///
/// # Errors
/// As those of simulating them.
pub fn exact(outlines: &[Outline], apart: &[AxisId], plan: &Plan, cluster: &Cluster) -> Result<Exact, SimulateError> {
    let simulated = simulate_outlines(outlines, apart, &plan.mesh, cluster, &Conditions::default())?;
    let mut stages = vec![Memory::default(); plan.stages() as usize];
    for outline in outlines {
        let known = &mut stages[plan.mesh.stage_of(outline.rank) as usize];
        if outline.memory.total() >= known.total() {
            *known = outline.memory;
        }
    }
    let taken = outlines.iter().map(|outline| (outline.rank, outline.memory));
    Ok(Exact { prediction: prediction(taken, &simulated, plan, cluster), stages })
}

/// The prediction of a plan from its programs and their simulation (see [`simulate`](super::simulate)): the seconds of
/// the rank for which the others wait, the memory of the rank that has the least room left.
pub fn predict(programs: &[Program], simulated: &Simulated, plan: &Plan, cluster: &Cluster) -> Prediction {
    let taken = threads::map(programs, |program| (program.rank, memory(program)));
    prediction(taken.into_iter(), simulated, plan, cluster)
}

/// The same, where the memory of each program is known.
fn prediction(
    taken: impl Iterator<Item = (u64, Memory)>,
    simulated: &Simulated,
    plan: &Plan,
    cluster: &Cluster,
) -> Prediction {
    let work = model_work(&plan.graph, cluster);
    let fullest = fullest(taken, plan, cluster);
    let mut prediction = Prediction { step: simulated.step, flops: work.flops, ..fullest };
    prediction.mfu = work.at_peak.0 / (simulated.step.0 * cluster.ranks() as f64);
    if let Some(rank) = simulated.slowest() {
        let Kernels { matmul, optimizer, rest } = rank.kernels;
        // What kernels lose to communication beside them is communication that shows.
        let lost = rank.busy[Stream::Compute as usize].0 - (matmul + optimizer + rest).0;
        (prediction.matmul, prediction.optimizer, prediction.memory_bound) = (matmul, optimizer, rest);
        prediction.exposed_communication = Seconds(rank.exposed_communication.0 + lost.max(0.0));
        prediction.communication = rank.communication;
        if plan.stages() > 1 {
            let busy = rank.busy[Stream::Compute as usize].0 + rank.exposed_communication.0;
            prediction.bubble = Seconds((rank.finish() - busy).max(0.0));
        }
    }
    prediction
}

/// Of what ranks take, the memory of the one that has the least room left, its room, and what hosts give to such ranks.
/// On devices of several kinds another may take more.
pub fn fullest(taken: impl Iterator<Item = (u64, Memory)>, plan: &Plan, cluster: &Cluster) -> Prediction {
    let rooms = cluster.rooms(&plan.mesh, plan.request.device_memory);
    let taken = taken.map(|(rank, memory)| {
        let room = rooms[plan.mesh.stage_of(rank) as usize];
        Prediction { memory, room, ..Prediction::default() }
    });
    let fullest = taken.max_by(|a, b| a.filled().total_cmp(&b.filled())).unwrap_or_default();
    Prediction { host: cluster.on_host(fullest.memory.total()), ..fullest }
}

/// The seconds of a step's kernels, each alone.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kernels {
    /// Matrix products and attention.
    pub matmul: Seconds,
    /// The optimizer's update.
    pub optimizer: Seconds,
    /// All others.
    pub rest: Seconds,
}

impl Kernels {
    /// Those of a program whose instructions need `works`.
    pub(super) fn of(outline: &Outline, works: &Works) -> Self {
        let mut runs = vec![0u64; outline.bodies.len()];
        outline.order.iter().for_each(|run| runs[outline.body(run)] += 1);
        let mut kernels = Self::default();
        for ((lines, works), runs) in outline.bodies.iter().zip(works).zip(runs) {
            for (line, work) in lines.iter().zip(works) {
                let Work::Local(alone) = work else { continue };
                let sum = match line.sort {
                    _ if line.stream != Stream::Compute => continue,
                    Sort::Product => &mut kernels.matmul,
                    Sort::Optimizer => &mut kernels.optimizer,
                    Sort::Rest => &mut kernels.rest,
                };
                sum.0 += alone * runs as f64;
            }
        }
        kernels
    }
}
