//! The stages of a pipeline: which modules each chunk runs, and on which devices, how busy they are and what memory they
//! need.

use super::Inspection;
use super::names::name_of;
use serde::Serialize;
use shardc_ir::program::Stream;
use shardc_ir::{Bytes, Family, Op, Plan, Role, Seconds};
use shardc_passes::allocate::memory;
use shardc_passes::fold::module;
use shardc_passes::simulate::Rank;
use std::collections::BTreeSet;
use std::fmt::Write;

/// One chunk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its number, in the order of the forward pass.
    pub chunk: u32,
    /// The stage that runs it.
    pub stage: u64,
    /// The first and the last module of its forward pass.
    pub modules: [String; 2],
    /// The operations of its forward pass.
    pub operations: usize,
    /// Its parameters, over all ranks.
    pub parameters: u64,
}

/// The chunks of a plan, in their order; none where there are no stages.
pub fn rows(plan: &Plan) -> Vec<Row> {
    let stages = plan.stages();
    if stages <= 1 {
        return Vec::new();
    }
    let of = |chunk: u32| {
        let nodes = || plan.graph.nodes().filter(move |(id, _)| plan.pipeline.chunks[*id] == Some(chunk));
        let forward: Vec<&str> = nodes()
            .filter(|(_, node)| node.role == Role::Forward && !matches!(node.op, Op::Parameter(_) | Op::State(_)))
            .map(|(_, node)| module(name_of(node)))
            .filter(|name| !name.is_empty())
            .collect();
        let parameters = nodes().filter(|(_, node)| matches!(node.op, Op::Parameter(_)));
        let name = |name: Option<&&str>| name.map_or("(model)".to_string(), |name| (*name).to_string());
        Row {
            chunk,
            stage: plan.pipeline.stage_of(chunk, stages),
            modules: [name(forward.first()), name(forward.last())],
            operations: forward.len(),
            parameters: parameters.map(|(_, node)| plan.graph.ty(node.results[0]).elements()).sum(),
        }
    };
    (0..(stages * plan.pipeline.per_stage) as u32).map(of).collect()
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stage {
    /// Its devices: where they are of several kinds, all of them.
    pub device: String,
    /// How long the slowest of them computes in a step.
    pub busy: Seconds,
    /// What a rank needs of its memory.
    pub memory: Bytes,
    /// What it may take.
    pub room: Bytes,
}

/// The stages of a plan, in their order; none where there are none.
pub fn stages(inspection: &Inspection<'_>) -> Vec<Stage> {
    let Inspection { plan, cluster, programs, simulated } = inspection;
    if plan.mesh.family(Family::Pipeline).is_empty() {
        return Vec::new();
    }
    let rooms = cluster.rooms(&plan.mesh, plan.request.device_memory);
    let of = |(stage, (kinds, room)): (usize, (BTreeSet<usize>, Bytes))| {
        let names: Vec<&str> = kinds.iter().map(|kind| cluster.devices()[*kind].name.as_str()).collect();
        let is_in = |rank: &&Rank| plan.mesh.stage_of(rank.rank) == stage as u64;
        let own = || simulated.ranks.iter().filter(is_in);
        Stage {
            device: names.join(" and "),
            busy: Seconds(own().map(|rank| rank.busy[Stream::Compute as usize].0).fold(0.0, f64::max)),
            memory: own().map(|rank| memory(&programs[rank.program]).total()).max().unwrap_or_default(),
            room,
        }
    };
    cluster.kinds_of_stages(&plan.mesh).into_iter().zip(rooms).enumerate().map(of).collect()
}

/// The chunks, and for each stage how long its devices compute and wait in a step.
pub fn text(inspection: &Inspection<'_>) -> String {
    let (plan, rows) = (inspection.plan, rows(inspection.plan));
    if rows.is_empty() {
        return String::new();
    }
    let schedule = plan.pipeline.schedule.name();
    let mut text = format!("\nstages, schedule {schedule}, {} microbatches\n", plan.mesh.microbatches());
    let _ = writeln!(text, "  {:>5} {:>5} {:>10} {:>12}  modules", "chunk", "stage", "operations", "parameters");
    for row in &rows {
        let [first, last] = &row.modules;
        let modules = if first == last { first.clone() } else { format!("{first} to {last}") };
        let (chunk, stage, operations, parameters) = (row.chunk, row.stage, row.operations, row.parameters);
        let _ = writeln!(text, "  {chunk:>5} {stage:>5} {operations:>10} {parameters:>12}  {modules}");
    }
    let step = inspection.simulated.step;
    for (stage, Stage { device, busy, memory, room }) in stages(inspection).into_iter().enumerate() {
        let idle = Seconds((step.0 - busy.0).max(0.0));
        let _ = writeln!(
            text,
            "  stage {stage} on {device} computes {busy} of {step}, {idle} without a kernel; {memory} per rank, of {room}"
        );
    }
    text
}
