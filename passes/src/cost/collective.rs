//! Collectives: a start, hops, and bytes over the slowest link (Hockney's alpha-beta model, with
//! the ring and tree algorithms of NCCL).
//!
//! A group lies over `within` ranks of each of `across` nodes. Rings run through the nodes: within
//! a node a rank moves bytes at the link's rate; between nodes the node's ranks in the group move
//! them through their ports together, and no faster than within.

use crate::cluster::Cluster;
use shardc_ir::{AxisId, AxisKind, Mesh, Seconds};

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Each rank ends with the reduction of all.
    AllReduce,
    /// Each rank ends with its part of the reduction.
    ReduceScatter,
    /// Each rank ends with all parts.
    AllGather,
    /// Each rank ends with its part of every other rank's.
    AllToAll,
}

/// How a group of ranks lies over the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// Its ranks in one node.
    pub within: u64,
    /// The nodes it touches.
    pub across: u64,
}

impl Group {
    /// The group of the ranks that differ only in these axes.
    pub fn new(mesh: &Mesh, axes: &[AxisId], cluster: &Cluster) -> Self {
        let axes: Vec<AxisId> = axes.iter().copied().filter(|axis| mesh.axis(*axis).kind == AxisKind::Space).collect();
        Self::of_ranks(&mesh.group(0, &axes), cluster)
    }

    /// The group of these ranks.
    pub fn of_ranks(ranks: &[u64], cluster: &Cluster) -> Self {
        let node = |rank: &u64| rank / cluster.per_node;
        let mut nodes: Vec<u64> = ranks.iter().map(node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let across = nodes.len().max(1) as u64;
        Self { within: (ranks.len() as u64).div_ceil(across), across }
    }

    /// Its number of ranks.
    pub fn size(self) -> u64 {
        self.within * self.across
    }
}

/// How long a collective takes. `bytes` is the size of the whole: the result of an all-gather, the
/// operand of the others, on one rank.
pub fn seconds(collective: Collective, bytes: f64, group: Group, cluster: &Cluster) -> Seconds {
    let size = group.size() as f64;
    if size <= 1.0 {
        return Seconds(0.0);
    }
    let device = &cluster.device;
    let link = device.link_bandwidth.value;
    let ports = device.node_bandwidth.value * group.within as f64;
    let ring = if group.across > 1 { link.min(ports) } else { link };
    let share = (size - 1.0) / size;
    let moved = match collective {
        Collective::AllReduce => 2.0 * share * bytes / ring,
        Collective::ReduceScatter | Collective::AllGather => share * bytes / ring,
        // Every pair exchanges its own part: what crosses nodes does so through the rank's own port.
        Collective::AllToAll => {
            let away = (group.across as f64 - 1.0) / group.across as f64;
            bytes / size * (share / link).max(away / device.node_bandwidth.value)
        }
    };
    Seconds(device.collective_launch.value + hops(collective, group, cluster) + moved)
}

/// How long a send of one rank to one other takes, in its node or `away` from it.
pub fn send_seconds(bytes: f64, away: bool, cluster: &Cluster) -> Seconds {
    let device = &cluster.device;
    let link = if away { &device.node_bandwidth } else { &device.link_bandwidth };
    Seconds(device.collective_launch.value + bytes / link.value)
}

/// The latency of the hops: reductions of all to all go through a tree over the nodes, gathers and
/// scatters round a ring of them.
fn hops(collective: Collective, group: Group, cluster: &Cluster) -> f64 {
    let device = &cluster.device;
    let (within, across) = (group.within as f64, group.across as f64);
    let depth = across.log2().ceil() * device.node_latency.value;
    let inner = (within - 1.0) * device.link_latency.value;
    match collective {
        Collective::AllReduce => 2.0 * (depth + inner),
        Collective::ReduceScatter | Collective::AllGather => (across - 1.0) * device.node_latency.value + inner,
        Collective::AllToAll => inner.min(4.0 * device.link_latency.value) + depth,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_all_reduce_takes_what_was_measured() {
        let cluster = Cluster::parse("h200:4", "h200").unwrap();
        let bytes = (512u64 << 20) as f64;
        let time = seconds(Collective::AllReduce, bytes, Group { within: 4, across: 1 }, &cluster);
        let bus = 1.5 * bytes / time.0;
        assert!((bus / 347e9 - 1.0).abs() < 0.03, "{bus:e}");
    }

    #[test]
    fn groups_lie_over_nodes() {
        let cluster = Cluster::parse("h100:8x4", "h200").unwrap();
        let mut mesh = Mesh::default();
        let dp = mesh.push("dp", 8, AxisKind::Space);
        let tp = mesh.push("tp", 4, AxisKind::Space);
        assert_eq!(Group::new(&mesh, &[tp], &cluster), Group { within: 4, across: 1 });
        assert_eq!(Group::new(&mesh, &[dp], &cluster), Group { within: 2, across: 4 });
        let small = seconds(Collective::AllGather, 1e9, Group { within: 8, across: 1 }, &cluster);
        let large = seconds(Collective::AllGather, 1e9, Group { within: 1, across: 8 }, &cluster);
        assert!(large.0 > small.0);
    }
}
