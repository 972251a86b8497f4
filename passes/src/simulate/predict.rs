//! What a plan will need, by its programs.

use super::{Rank, Simulated};
use crate::allocate::memory;
use crate::cluster::Cluster;
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
    let work = model_work(&plan.graph, &cluster.device);
    let memory = programs.iter().map(memory).max_by_key(|memory| memory.total()).unwrap_or_default();
    let host = cluster.on_host(memory.total());
    let mut prediction = Prediction { step: simulated.step, flops: work.flops, memory, host, ..Prediction::default() };
    prediction.mfu = work.at_peak.0 / (simulated.step.0 * cluster.ranks() as f64);
    if let Some(rank) = last {
        let [matmul, optimizer] = kernel_seconds(&programs[rank.program], rank);
        let compute = rank.busy[Stream::Compute as usize];
        (prediction.matmul, prediction.optimizer) = (matmul, optimizer);
        prediction.memory_bound = Seconds((compute.0 - matmul.0 - optimizer.0).max(0.0));
        prediction.exposed_communication = rank.exposed_communication;
        prediction.communication = rank.communication;
    }
    prediction
}

/// What a rank's step spends on matrix products and attention, and on the optimizer's update.
fn kernel_seconds(program: &Program, rank: &Rank) -> [Seconds; 2] {
    let mut seconds = [Seconds(0.0); 2];
    for run in &rank.runs {
        let instructions = &program.sections[run.run.section].instructions;
        for span in run.spans.iter() {
            let place = match &instructions[span.index as usize].action {
                Action::Compute(Op::Matmul(_) | Op::Attention(_) | Op::AttentionGrad(_)) => 0,
                Action::Compute(Op::Adamw(_)) => 1,
                _ => continue,
            };
            seconds[place] += Seconds(span.finish - span.start);
        }
    }
    seconds
}
