//! How long each instruction takes by itself.

use crate::cluster::{Cluster, Profile};
use crate::cost::collective::{self, Collective, Group};
use crate::cost::host::Host;
use crate::cost::{Machine, Pass};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::view::is_view;
use shardc_ir::{BufferId, Graph, NodeId, Op, Program, TensorType};

/// What an instruction needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Work {
    /// Seconds of its own stream, alone; 0 if it only declares a view.
    Local(f64),
    /// The ranks of a group (by its index in the program) come together and move bytes.
    Meet { group: usize, collective: Collective, bytes: f64 },
    /// A message of so many bytes between this rank and another.
    Message { peer: u64, is_sender: bool, bytes: f64 },
}

/// What an instruction of a program needs on this device of a cluster; `graph` knows in which half of the step the
/// node is that it came from.
pub(super) fn work(
    program: &Program,
    instruction: &Instruction,
    graph: &Graph,
    (device, cluster): (&Profile, &Cluster),
) -> Work {
    let size = |ids: &[BufferId]| ids.iter().map(|id| program.buffers[*id].ty.bytes().0 as f64).sum::<f64>();
    let (operands, results) = (size(&instruction.operands), size(&instruction.results));
    let machine = Machine::own(device);
    let bandwidth = machine.bandwidth();
    let meet = |group: usize, collective: Collective, bytes: f64| Work::Meet { group, collective, bytes };
    match &instruction.action {
        Action::Compute(Op::Slice(_) | Op::Concat(_)) if is_view(&program.buffers, instruction) => Work::Local(0.0),
        Action::Compute(op) => Work::Local(kernel(op, program, instruction, graph, device)),
        Action::Accumulate => Work::Local(machine.launch() + (operands + 2.0 * results) / bandwidth),
        Action::Feed { .. } if instruction.operands.is_empty() => {
            Work::Local(Host::of_device(device, cluster).feed(results))
        }
        // What is fed from a staging buffer was brought there beside other work: see `brought`.
        Action::Copy | Action::Feed { .. } => Work::Local(machine.launch() + (operands + results) / bandwidth),
        Action::AllReduce { group, .. } => meet(*group, Collective::AllReduce, operands),
        Action::ReduceScatter { group, .. } => meet(*group, Collective::ReduceScatter, operands),
        Action::AllGather { group } => meet(*group, Collective::AllGather, results),
        // The cost of an exchange is stated for the value whose parts the ranks hold.
        Action::AllToAll { group } => {
            meet(*group, Collective::AllToAll, operands * program.groups[*group].len() as f64)
        }
        Action::Send { peer } => Work::Message { peer: *peer, is_sender: true, bytes: operands },
        Action::Receive { peer } => Work::Message { peer: *peer, is_sender: false, bytes: results },
    }
}

/// How long the host's link takes to fill the staging buffer that an instruction feeds from, if it does.
pub(super) fn brought(program: &Program, instruction: &Instruction, (device, cluster): (&Profile, &Cluster)) -> f64 {
    match (&instruction.action, instruction.operands.first()) {
        (Action::Feed { .. }, Some(staging)) => {
            Host::of_device(device, cluster).feed(program.buffers[*staging].ty.bytes().0 as f64)
        }
        _ => 0.0,
    }
}

/// How long an operation takes in the place of that of an instruction, alone, in seconds.
pub(super) fn kernel(op: &Op, program: &Program, instruction: &Instruction, graph: &Graph, device: &Profile) -> f64 {
    let types = |ids: &[BufferId]| ids.iter().map(|id| program.buffers[*id].ty.clone()).collect();
    let (operands, results): (Vec<TensorType>, Vec<TensorType>) =
        (types(&instruction.operands), types(&instruction.results));
    let pass = source(instruction, graph).map_or(Pass::Forward, |id| Pass::of(graph.node(id).role));
    Machine::own(device).seconds(op, &operands, &results, pass).0.0
}

/// The node that an instruction came from.
pub(super) fn source(instruction: &Instruction, graph: &Graph) -> Option<NodeId> {
    instruction.source.filter(|id| (id.as_u32() as usize) < graph.node_count())
}

/// How long a collective takes once all its ranks are there, if they are as the cluster's device.
pub(super) fn meeting_seconds(collective: Collective, bytes: f64, group: Group, cluster: &Cluster) -> f64 {
    collective::seconds(collective, bytes, group, cluster).0
}

/// How long a message takes once both its ranks are there, if they are as the cluster's device.
pub(super) fn message_seconds(bytes: f64, distance: usize, cluster: &Cluster) -> f64 {
    collective::send_over(bytes, distance, cluster).0
}
