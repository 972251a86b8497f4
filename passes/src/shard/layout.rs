//! Layouts along one axis, and what moving between them costs.

use crate::cluster::Cluster;
use crate::cost::collective::{self, Collective, Group};
use shardc_ir::{AxisId, ReduceKind, Sharding};

/// How a value lies along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Along {
    /// Every coordinate holds all of it.
    Whole,
    /// This dimension is divided.
    Dim(usize),
    /// Every coordinate holds a term.
    Partial(ReduceKind),
}

impl Along {
    /// How a value of this sharding lies along an axis.
    pub fn of(sharding: &Sharding, axis: AxisId) -> Self {
        match (sharding.partial_over(axis), sharding.dim_of(axis)) {
            (Some(kind), _) => Self::Partial(kind),
            (None, Some(dim)) => Self::Dim(dim),
            (None, None) => Self::Whole,
        }
    }
}

/// A value as the ranks of one coordinate of the other axes see it.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// Its bytes, undivided along the axis.
    pub bytes: f64,
    /// Its shape, undivided along the axis.
    pub shape: &'a [u64],
}

/// Seconds to bring a value from one layout along an axis to another; infinite where there is no way.
pub fn convert_seconds(from: Along, to: Along, value: Extent<'_>, group: Group, cluster: &Cluster) -> f64 {
    use Along::{Dim, Partial, Whole};
    let device = &cluster.device;
    let bandwidth = device.memory_bandwidth.value * device.memory_efficiency.value;
    let copy = |bytes: f64| device.launch_seconds.value + 2.0 * bytes / bandwidth;
    // A collective concatenates whole operands: along an inner dimension a transpose goes with it.
    let reorder = |dim: usize| {
        let outer: u64 = value.shape[..dim].iter().product();
        if outer > 1 { copy(value.bytes) } else { 0.0 }
    };
    let run = |kind: Collective| collective::seconds(kind, value.bytes, group, cluster).0;
    match (from, to) {
        _ if from == to => 0.0,
        // One coordinate keeps the value, the others hold zeros.
        (Whole, Partial(ReduceKind::Sum)) => copy(value.bytes),
        (_, Partial(_)) => f64::INFINITY,
        (Whole, Dim(dim)) => {
            let outer: u64 = value.shape[..dim].iter().product();
            // The first elements of a buffer are a view; a part of each row is a copy.
            if outer > 1 { copy(value.bytes / group.size() as f64) } else { 0.0 }
        }
        (Whole, Whole) => 0.0,
        (Dim(dim), Whole) => run(Collective::AllGather) + reorder(dim),
        (Dim(a), Dim(b)) => run(Collective::AllToAll) + (reorder(a) + reorder(b)) / group.size() as f64,
        (Partial(_), Whole) => run(Collective::AllReduce),
        (Partial(ReduceKind::Sum), Dim(dim)) => run(Collective::ReduceScatter) + reorder(dim),
        (Partial(_), Dim(_)) => run(Collective::AllReduce),
    }
}
