//! What a plan will need, by its programs.

use super::Simulated;
use super::kinds::Works;
use super::price::Work;
use crate::allocate::memory;
use crate::cluster::Cluster;
use crate::cost::is_product;
use crate::search::{Exact, model_work};
use crate::threads;
use shardc_ir::ops::Op;
use shardc_ir::plan::{Memory, Prediction};
use shardc_ir::program::{Action, Stream};
use shardc_ir::{Plan, Program, Seconds};

/// What a plan takes by its programs and their simulation: [`predict`], and the memory of each stage.
pub fn exact(programs: &[Program], simulated: &Simulated, plan: &Plan, cluster: &Cluster) -> Exact {
    let memories = threads::map(programs, memory);
    let mut stages = vec![Memory::default(); plan.stages() as usize];
    for (program, own) in programs.iter().zip(&memories) {
        let known = &mut stages[plan.mesh.stage_of(program.rank) as usize];
        if own.total() >= known.total() {
            *known = *own;
        }
    }
    Exact { prediction: prediction(programs, &memories, simulated, plan, cluster), stages }
}

/// The prediction of a plan from its programs and their simulation (see [`simulate`](super::simulate)): the seconds of
/// the rank for which the others wait, the memory of the rank that has the least room left.
pub fn predict(programs: &[Program], simulated: &Simulated, plan: &Plan, cluster: &Cluster) -> Prediction {
    prediction(programs, &threads::map(programs, memory), simulated, plan, cluster)
}

/// The same, where the memory of each program is known.
fn prediction(
    programs: &[Program],
    memories: &[Memory],
    simulated: &Simulated,
    plan: &Plan,
    cluster: &Cluster,
) -> Prediction {
    let work = model_work(&plan.graph, cluster);
    let rooms = cluster.rooms(&plan.mesh, plan.request.device_memory);
    let taken = |(program, memory): (&Program, &Memory)| {
        let room = rooms[plan.mesh.stage_of(program.rank) as usize];
        Prediction { memory: *memory, room, ..Prediction::default() }
    };
    let all = programs.iter().zip(memories).map(taken);
    let fullest = all.max_by(|a, b| a.filled().total_cmp(&b.filled())).unwrap_or_default();
    let host = cluster.on_host(fullest.memory.total());
    let mut prediction = Prediction { step: simulated.step, flops: work.flops, host, ..fullest };
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
    pub(super) fn of(program: &Program, works: &Works) -> Self {
        let mut runs = vec![0u64; program.sections.len()];
        program.order.iter().for_each(|run| runs[run.section.as_u32() as usize] += 1);
        let mut kernels = Self::default();
        for ((section, works), runs) in program.sections.values().zip(works).zip(runs) {
            for (instruction, work) in section.instructions.iter().zip(works) {
                let Work::Local(alone) = work else { continue };
                let sum = match &instruction.action {
                    _ if instruction.stream != Stream::Compute => continue,
                    Action::Compute(op) if is_product(op) => &mut kernels.matmul,
                    Action::Compute(op) if matches!(op.single(), Op::Adamw(_)) => &mut kernels.optimizer,
                    _ => &mut kernels.rest,
                };
                sum.0 += alone * runs as f64;
            }
        }
        kernels
    }
}
