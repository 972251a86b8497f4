//! What a plan will need, by its programs.

use super::price::{Work, device_of, work};
use super::{Rank, Simulated};
use crate::allocate::memory;
use crate::cluster::Cluster;
use crate::cost::is_product;
use crate::search::model_work;
use shardc_ir::ops::Op;
use shardc_ir::plan::Prediction;
use shardc_ir::program::{Action, Stream};
use shardc_ir::{Plan, Program, Seconds};

/// The prediction of a plan from its programs and their simulation (see [`simulate`](super::simulate)): the seconds of
/// the rank that ends last, the memory of the rank that needs most.
pub fn predict(programs: &[Program], simulated: &Simulated, plan: &Plan, cluster: &Cluster) -> Prediction {
    let end = |rank: &Rank| rank.runs.last().map_or(0.0, |run| run.finish);
    let last = simulated.ranks.iter().max_by(|a, b| end(a).total_cmp(&end(b)).then(b.rank.cmp(&a.rank)));
    let work = model_work(&plan.graph, cluster);
    let memory = programs.iter().map(memory).max_by_key(|memory| memory.total()).unwrap_or_default();
    let host = cluster.on_host(memory.total());
    let mut prediction = Prediction { step: simulated.step, flops: work.flops, memory, host, ..Prediction::default() };
    prediction.mfu = work.at_peak.0 / (simulated.step.0 * cluster.ranks() as f64);
    if let Some(rank) = last {
        let [matmul, optimizer, rest] = kernel_seconds(&programs[rank.program], plan, cluster);
        // What kernels lose to communication beside them is communication that shows.
        let lost = rank.busy[Stream::Compute as usize].0 - (matmul + optimizer + rest);
        (prediction.matmul, prediction.optimizer) = (Seconds(matmul), Seconds(optimizer));
        prediction.memory_bound = Seconds(rest);
        prediction.exposed_communication = Seconds(rank.exposed_communication.0 + lost.max(0.0));
        prediction.communication = rank.communication;
        if plan.stages() > 1 {
            let busy = rank.busy[Stream::Compute as usize].0 + rank.exposed_communication.0;
            prediction.bubble = Seconds((end(rank) - busy).max(0.0));
        }
    }
    prediction
}

/// The seconds of a step's kernels, each alone: matrix products and attention, the optimizer's update, the rest.
fn kernel_seconds(program: &Program, plan: &Plan, cluster: &Cluster) -> [f64; 3] {
    let (mut seconds, device) = ([0.0; 3], device_of(program, plan, cluster));
    let mut runs = vec![0u64; program.sections.len()];
    program.order.iter().for_each(|run| runs[run.section.as_u32() as usize] += 1);
    for (section, runs) in program.sections.values().zip(runs) {
        for instruction in section.instructions.iter().filter(|instruction| instruction.stream == Stream::Compute) {
            let Work::Local(alone) = work(program, instruction, &plan.graph, (device, cluster)) else { continue };
            let place = match &instruction.action {
                Action::Compute(op) if is_product(op) => 0,
                Action::Compute(op) if matches!(op.single(), Op::Adamw(_)) => 1,
                _ => 2,
            };
            seconds[place] += alone * runs as f64;
        }
    }
    seconds
}
