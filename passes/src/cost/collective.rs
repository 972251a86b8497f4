//! Collectives: a start, hops, and bytes over the slowest link (Hockney's alpha-beta model, with
//! the ring and tree algorithms of NCCL).
//!
//! A group lies over `within` ranks of each of `across` nodes, and these over racks and pods
//! ([`Level`]) where the cluster has such. Rings run through the nodes: within
//! a node a rank moves bytes at the link's rate; between nodes the node's ranks in the group move
//! them through their ports together, and no faster than within; likewise between racks and pods.
//! Where a group leaves its nodes for those of other kinds, it is as slow as on the kind on which it is slowest.

use crate::cluster::{Cluster, Level, MOST_LEVELS, Profile};
use shardc_ir::{AxisId, Mesh, Seconds};

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
    /// Its ranks.
    size: u64,
    /// Its ranks in one node, at the most.
    pub within: u64,
    /// The nodes it touches.
    pub across: u64,
    /// Of each level beyond the node, the units it touches: racks, pods.
    pub beyond: [u64; MOST_LEVELS],
}

impl Group {
    /// The group of the ranks that differ only in these axes. Where some such groups lie over more nodes than others,
    /// it is one that lies over the most: the others wait for it.
    pub fn new(mesh: &Mesh, axes: &[AxisId], cluster: &Cluster) -> Self {
        let axes: Vec<AxisId> = axes.iter().copied().filter(|axis| !mesh.is_time(*axis)).collect();
        let first = mesh.group(0, &axes);
        let of_first = Self::of_ranks(&first, cluster);
        if lie_alike(mesh, cluster) {
            return of_first;
        }
        let starts = (0..mesh.ranks()).filter(|rank| {
            let at = mesh.coordinates(*rank, 0);
            axes.iter().all(|axis| at[axis.0 as usize] == 0)
        });
        let of = |start: u64| Self::of_ranks(&first.iter().map(|rank| start + rank).collect::<Vec<_>>(), cluster);
        starts.map(of).fold(of_first, Self::widest)
    }

    /// A group over so many ranks of so many nodes of one rack.
    pub const fn of_nodes(within: u64, across: u64) -> Self {
        Self { size: within * across, within, across, beyond: [1; MOST_LEVELS] }
    }

    /// A group of as many ranks that lies over as many units of every level as the one of two that lies over more.
    fn widest(self, other: Self) -> Self {
        let across = self.across.max(other.across);
        let beyond = std::array::from_fn(|level| self.beyond[level].max(other.beyond[level]));
        Self { within: self.size.div_ceil(across), across, beyond, ..self }
    }

    /// The group of these ranks.
    pub fn of_ranks(ranks: &[u64], cluster: &Cluster) -> Self {
        let units = |size: u64| {
            let mut units: Vec<u64> = ranks.iter().map(|rank| rank / size.max(1)).collect();
            units.sort_unstable();
            units.dedup();
            units.len().max(1) as u64
        };
        let across = units(cluster.per_node);
        let size = ranks.len() as u64;
        let mut group = Self { size, ..Self::of_nodes(size.div_ceil(across), across) };
        for (units_of, level) in group.beyond.iter_mut().zip(&cluster.levels) {
            *units_of = units(cluster.per_node * level.nodes);
        }
        group
    }

    /// Its number of ranks.
    pub fn size(self) -> u64 {
        self.size
    }
}

/// Whether the groups along any axes of a mesh lie over the nodes, racks and pods alike: where each of these holds
/// whole blocks of the mesh's inner axes, or lies in one.
fn lie_alike(mesh: &Mesh, cluster: &Cluster) -> bool {
    let units = || [1].into_iter().chain(cluster.levels.iter().map(|level| level.nodes)).map(|n| n * cluster.per_node);
    let mut block = 1;
    mesh.ids().rev().filter(|axis| !mesh.is_time(*axis)).all(|axis| {
        block *= mesh.size(axis);
        units().all(|unit: u64| unit.is_multiple_of(block) || block.is_multiple_of(unit))
    })
}

/// How long a step waits for a collective. `bytes` is the size of the whole: the result of an all-gather, the
/// operand of the others, on one rank.
pub fn seconds(collective: Collective, bytes: f64, group: Group, cluster: &Cluster) -> Seconds {
    slowest(group, cluster, |device| in_step(device, collective, bytes, (group, &cluster.levels)))
}

/// How long a collective takes by itself: its start, its hops and its bytes.
pub fn alone(collective: Collective, bytes: f64, group: Group, cluster: &Cluster) -> Seconds {
    let on = |device: &Profile| {
        let (whole, small) = protocols(device, collective, bytes, (group, &cluster.levels));
        whole.min(small)
    };
    slowest(group, cluster, on)
}

/// What it takes on the kind of device on which it takes the longest.
fn slowest(group: Group, cluster: &Cluster, on: impl Fn(&Profile) -> f64) -> Seconds {
    match (group.size(), group.across) {
        (..=1, _) => Seconds(0.0),
        (_, 2..) => Seconds(cluster.together(on)),
        _ => Seconds(on(&cluster.device)),
    }
}

/// What its own part costs a rank of a collective that goes round within a node, of what it would cost to send it, and at the
/// most: it is copied, or read once more, beside what goes round. Of 3 to 26 MB in steps of networks for pictures, gathers
/// move at 235 GB/s on two H100s and at 318 GB/s on four; of 67 MB as much is missing. All-reduces of 6 to 34 MB take
/// 3.6 us more for each MB more on two H200s, one of 134 MB 469 us, where the link's rate would be 2.9 us for each.
const OWN: f64 = 0.4;
const MOST_OWN: f64 = 2e-5;

/// How long a step waits for a collective if all ranks have this device.
fn in_step(device: &Profile, collective: Collective, bytes: f64, on: (Group, &[Level])) -> f64 {
    let (whole, small) = protocols(device, collective, bytes, on);
    let own = match collective {
        Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather if on.0.across == 1 => {
            (OWN * bytes / on.0.size() as f64 / device.link_bandwidth.value).min(MOST_OWN)
        }
        _ => 0.0,
    };
    (whole + device.collective_wait.value + own).min(small)
}

/// How long a collective takes by the protocol for many bytes, and by that for few.
///
/// Within a node few bytes are sent with flags: of every 8 bytes 4 say that the others are there, so that nobody waits for a
/// whole chunk (NCCL's protocol LL, which reaches 141 GB/s of NVLink at the most on H100: `src/graph/tuning.cc`).
/// All-reduces of 3.2 MB over four H100s take 47 us.
fn protocols(device: &Profile, collective: Collective, bytes: f64, (group, levels): (Group, &[Level])) -> (f64, f64) {
    const BANDWIDTH: f64 = 0.4;
    let size = group.size() as f64;
    // The rate of the links that leave a unit, per device, and how many units are touched.
    let borders = || borders(device, group, levels).filter(|border| border.units > 1);
    let link = device.link_bandwidth.value;
    let port = |border: Border| border.bandwidth * group.size() as f64 / border.units as f64;
    let ring = borders().map(port).fold(link, f64::min);
    let share = (size - 1.0) / size;
    let moved = match collective {
        Collective::AllReduce => 2.0 * share * bytes / ring,
        Collective::ReduceScatter | Collective::AllGather => share * bytes / ring,
        // Every pair exchanges its own part: what crosses a border does so through the rank's own share of it.
        Collective::AllToAll => {
            let away = |border: Border| (border.units as f64 - 1.0) / border.units as f64 / border.bandwidth;
            bytes / size * borders().map(away).fold(share / link, f64::max)
        }
    };
    let start = device.collective_launch.value;
    let hops = |hop: f64| hops(device, hop, collective, (group, levels));
    let whole = start + hops(device.link_latency.value) + moved;
    let has_small = collective != Collective::AllToAll && group.across == 1;
    let small = || start + hops(device.small_latency.value) + moved / BANDWIDTH;
    (whole, if has_small { small() } else { f64::INFINITY })
}

/// How many borders two ranks have between them: 0 in one node, 1 between nodes, 2 between racks.
pub fn distance(a: u64, b: u64, cluster: &Cluster) -> usize {
    let sizes = [1].into_iter().chain(cluster.levels.iter().map(|level| level.nodes));
    let apart = |nodes: &u64| a / (cluster.per_node * nodes) != b / (cluster.per_node * nodes);
    sizes.take_while(apart).count()
}

/// How long a send of one rank to one other takes, in its node or `away` from it.
pub fn send_seconds(bytes: f64, away: bool, cluster: &Cluster) -> Seconds {
    send_over(bytes, usize::from(away), cluster)
}

/// How long a send of one rank to one other takes that are so many borders apart (see [`distance`]).
pub fn send_over(bytes: f64, distance: usize, cluster: &Cluster) -> Seconds {
    let everywhere = Group { beyond: [2; MOST_LEVELS], ..Group::of_nodes(1, 2) };
    let away = |device: &Profile| {
        let borders = borders(device, everywhere, &cluster.levels).take(distance).map(|border| border.bandwidth);
        device.collective_launch.value + bytes / borders.fold(f64::INFINITY, f64::min)
    };
    let within = |device: &Profile| device.collective_launch.value + bytes / device.link_bandwidth.value;
    Seconds(if distance > 0 { cluster.together(away) } else { within(&cluster.device) })
}

/// Where a group leaves a unit.
#[derive(Clone, Copy)]
struct Border {
    /// The units it touches: nodes, racks, pods.
    units: u64,
    /// Bytes/s of the links out of a unit, per device of it.
    bandwidth: f64,
    /// Time of one hop.
    latency: f64,
}

/// The borders of nodes, racks and pods, from the inside out.
fn borders(device: &Profile, group: Group, levels: &[Level]) -> impl Iterator<Item = Border> {
    let (bandwidth, latency) = (device.node_bandwidth.value, device.node_latency.value);
    let levels = levels.iter().zip(group.beyond);
    let level = |(level, units): (&Level, u64)| {
        let (bandwidth, latency) = (level.bandwidth, level.latency);
        Border { units, bandwidth, latency }
    };
    [Border { units: group.across, bandwidth, latency }].into_iter().chain(levels.map(level))
}

/// The latency of the hops: reductions of all to all go through a tree over the nodes, gathers and scatters round a ring of
/// them. A `hop` is one within a node; one over several borders takes the time of the outermost. Within a node, as many
/// devices make a chain as the nodes have that the figures are of; chains of a larger node are joined as nodes are, by its
/// own links.
fn hops(device: &Profile, hop: f64, collective: Collective, (group, levels): (Group, &[Level])) -> f64 {
    let borders: Vec<Border> = borders(device, group, levels).collect();
    // Per border, the units it lies between, of which those outside are already joined.
    let outside = |index: usize| borders.get(index + 1).map_or(1, |border| border.units) as f64;
    let over = |hops: &dyn Fn(f64, f64) -> f64| -> f64 {
        borders.iter().enumerate().map(|(at, border)| hops(border.units as f64, outside(at)) * border.latency).sum()
    };
    let depth = over(&|units, outside| (units / outside).log2().ceil());
    let chain = (group.within as f64).min(device.devices_per_node.value);
    let chains = (group.within as f64 / chain).ceil();
    let inner = |joints: f64| (chain - 1.0 + joints) * hop;
    match collective {
        Collective::AllReduce => 2.0 * (depth + inner(chains.log2().ceil())),
        Collective::ReduceScatter | Collective::AllGather => {
            over(&|units, outside| units - outside) + inner(chains - 1.0)
        }
        Collective::AllToAll => inner(chains - 1.0).min(4.0 * hop) + depth,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::Family;

    #[test]
    fn an_all_reduce_takes_what_was_measured() {
        let cluster = Cluster::parse("h200:4", "h200").unwrap();
        let bytes = (512u64 << 20) as f64;
        let time = seconds(Collective::AllReduce, bytes, Group::of_nodes(4, 1), &cluster);
        let bus = 1.5 * bytes / time.0;
        assert!((bus / 347e9 - 1.0).abs() < 0.03, "{bus:e}");
    }

    /// In steps of resnet-50 and of a mixture of experts on two H200s.
    #[test]
    fn all_reduces_of_some_megabytes_take_what_was_measured() {
        let cluster = Cluster::parse("h200:2", "h200").unwrap();
        for (bytes, measured) in [(6.4e6, 51.5e-6), (12.8e6, 75.5e-6), (33.6e6, 153e-6)] {
            let time = seconds(Collective::AllReduce, bytes, Group::of_nodes(2, 1), &cluster).0;
            assert!((time / measured - 1.0).abs() < 0.08, "{bytes:e}: {time:e}");
        }
    }

    #[test]
    fn groups_lie_over_nodes() {
        let cluster = Cluster::parse("h100:8x4", "h200").unwrap();
        let mut mesh = Mesh::default();
        let dp = mesh.push(Family::Data, 8);
        let tp = mesh.push(Family::Tensor, 4);
        assert_eq!(Group::new(&mesh, &[tp], &cluster), Group::of_nodes(4, 1));
        assert_eq!(Group::new(&mesh, &[dp], &cluster), Group::of_nodes(2, 4));
        let small = seconds(Collective::AllGather, 1e9, Group::of_nodes(8, 1), &cluster);
        let large = seconds(Collective::AllGather, 1e9, Group::of_nodes(1, 8), &cluster);
        assert!(large.0 > small.0);
    }

    #[test]
    fn of_groups_that_lie_unlike_the_widest_counts() {
        let cluster = Cluster::parse("h100:4x3", "h200").unwrap();
        let mut mesh = Mesh::default();
        let dp = mesh.push(Family::Data, 4);
        let tp = mesh.push(Family::Tensor, 3);
        // Ranks 0 to 2 lie in a node; 3 to 5 do not. Ranks 0, 3, 6, 9 lie in three.
        assert_eq!(Group::of_ranks(&[0, 1, 2], &cluster), Group::of_nodes(3, 1));
        let tensor = Group::new(&mesh, &[tp], &cluster);
        assert_eq!((tensor.size(), tensor.within, tensor.across), (3, 2, 2));
        let data = Group::new(&mesh, &[dp], &cluster);
        assert_eq!((data.size(), data.within, data.across), (4, 2, 3));
        assert_eq!(Group::new(&mesh, &[dp, tp], &cluster), Group::of_nodes(4, 3));
    }

    /// What two nodes do, one node of as many devices does no slower.
    #[test]
    fn hops_in_a_large_node_are_no_dearer_than_between_nodes() {
        let [small, large] = ["h100:8x4", "h100:32"].map(|name| Cluster::parse(name, "h200").unwrap());
        for kind in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather, Collective::AllToAll] {
            for nodes in [1, 2, 4] {
                let across = seconds(kind, 4e3, Group::of_nodes(8, nodes), &small).0;
                let within = seconds(kind, 4e3, Group::of_nodes(8 * nodes, 1), &large).0;
                assert!(within <= across, "{kind:?} over {nodes} times 8: {within} and {across}");
            }
        }
    }

    /// Racks of two nodes, pods of four, each border slower than the one inside.
    const LEVELS: &str = r#"
device = "h100"
per_node = 8
nodes = 8
[[levels]]
name = "rack"
nodes = 2
bandwidth = 2e10
latency = 2e-5
[[levels]]
name = "pod"
nodes = 4
bandwidth = 5e9
latency = 5e-5
"#;

    #[test]
    fn the_slowest_border_that_is_crossed_decides() {
        let cluster = Cluster::from_toml("c.toml", LEVELS).unwrap();
        let flat = Cluster::parse("h100:8x8", "h200").unwrap();
        let time =
            |ranks: &[u64], cluster: &Cluster, kind| seconds(kind, 1e9, Group::of_ranks(ranks, cluster), cluster).0;
        let kinds = [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather, Collective::AllToAll];
        for kind in kinds {
            // Two nodes of one rack, of two racks, of two pods.
            let [rack, racks, pods] = [[0, 8], [0, 16], [0, 32]].map(|ranks| time(&ranks, &cluster, kind));
            assert_eq!(rack, time(&[0, 8], &flat, kind));
            assert!(rack < racks && racks < pods, "{rack} {racks} {pods}");
        }
        let beyond = Group::of_ranks(&[0, 8, 16, 32], &cluster).beyond;
        assert_eq!(beyond, [3, 2]);
        assert_eq!([0, 7, 8, 16, 32].map(|rank| distance(0, rank, &cluster)), [0, 0, 1, 2, 3]);
        let sends = [0, 1, 2, 3].map(|distance| send_over(1e9, distance, &cluster).0);
        assert!(sends.is_sorted() && sends[3] > 0.2, "{sends:?}");
        // All ranks of a rack leave it through its links together.
        let all: Vec<u64> = (0..64).collect();
        let ring = time(&all, &cluster, Collective::AllGather);
        assert!((ring / (63.0 / 64.0 * 1e9 / 1.6e11) - 1.0).abs() < 0.2, "{ring}");
    }
}
