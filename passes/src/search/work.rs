//! What a model asks of the devices.

use crate::cluster::Cluster;
use crate::cost;
use shardc_ir::{Flops, Graph, Seconds};

/// What the model asks of the devices in one step, over all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Matrix products and attention.
    pub flops: Flops,
    /// The time in which one device would do them, each at the peak rate of its precision.
    pub at_peak: Seconds,
}

/// The model's work in one step: recomputation does not count. At peak it is done by a device that is as fast as
/// those of the cluster are on average.
pub fn model_work(graph: &Graph, cluster: &Cluster) -> Work {
    let mut work = Work { flops: Flops(0.0), at_peak: Seconds(0.0) };
    for (id, node) in graph.nodes().filter(|(_, node)| !matches!(node.role, shardc_ir::Role::Recompute(_))) {
        let operands = graph.operand_types(id);
        let flops = cost::model_flops(&node.op, &operands, &graph.result_types(id));
        if let Some(operand) = operands.first().filter(|_| flops.0 > 0.0) {
            work.flops += flops;
            work.at_peak += Seconds(flops.0 / cluster.mean(|device| cost::peak(operand.dtype, device)));
        }
    }
    work
}
