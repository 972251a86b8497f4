//! The cluster: which devices there are, how they are linked, and how fast each thing is.
//!
//! A cluster is `nodes` equal hosts of `per_node` equal devices; its nodes may stand in racks and pods ([`Level`])
//! whose links to each other are slower. Everything the cost model needs is in the device's [`Profile`], a JSON file in
//! which each figure stands with its source. Of a device on which this project's runtime was measured, the profile says
//! what this runtime reaches; what other software reaches there is in `bench/src/published/devices.json`. Forms that a
//! user may write:
//!
//! * `cpu:4`, `cuda:2`: ranks of this host (the caller says which profile its GPUs have);
//! * `h100:8x16`: 8 devices per node times 16 nodes, of a shipped profile;
//! * a TOML file that names a profile and replaces any of its figures, adds levels, or names several kinds of nodes
//!   ([`Cluster::from_toml`]).

mod check;
mod file;
mod kinds;
mod level;
mod variant;

pub use check::Quantity;
pub use file::Part;
pub use level::{Level, MOST_LEVELS};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shardc_ir::Plan;
use shardc_ir::names::edit_distance;
use shardc_ir::units::Bytes;
use std::collections::BTreeMap;

/// Why a cluster cannot be used; the message names the value and says what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// The text is not of a form we read.
    #[error(
        "`{0}` is not a cluster: write `cpu:N`, `cuda:N`, `h100:8x16` (per node x nodes) or the path of a TOML file"
    )]
    Form(String),
    /// No profile has this name.
    #[error(
        "unknown device `{name}`; did you mean `{nearest}`? known devices are {known}; `cuda:N` are GPUs of this machine"
    )]
    UnknownDevice {
        /// What was written.
        name: String,
        /// The closest known name.
        nearest: String,
        /// All of them.
        known: String,
    },
    /// A count is not a positive number.
    #[error(
        "`{text}` in cluster `{cluster}` is not a number of devices or nodes: it must be a whole number from 1 to 1048576"
    )]
    Count {
        /// The offending part.
        text: String,
        /// The whole text.
        cluster: String,
    },
    /// So many ranks share a host that none has the memory for anything.
    #[error(
        "`{cluster}`: {ranks} ranks share the {host} of a host, {share} each; at most {most} have {least} each, the least \
         that a rank needs"
    )]
    Share {
        /// The whole text.
        cluster: String,
        /// The ranks of one host.
        ranks: u64,
        /// The memory of the host that ranks may use.
        host: String,
        /// A rank's share.
        share: String,
        /// How many ranks fit.
        most: u64,
        /// What a rank needs at least.
        least: String,
    },
    /// A figure cannot be right.
    #[error("cluster figure `{figure}` is {value}: it must be {expect}")]
    Figure {
        /// Its name.
        figure: String,
        /// Its value.
        value: String,
        /// What it must be.
        expect: String,
    },
    /// The cluster of a plan cannot be read.
    #[error("the cluster of the plan: {message}; make the plan again with `shardc plan … -o FILE`")]
    Plan {
        /// What is wrong.
        message: String,
    },
    /// The file cannot be read as a cluster.
    #[error("cluster file `{path}`: {message}")]
    File {
        /// Its path.
        path: String,
        /// What is wrong.
        message: String,
    },
}

/// A kind of devices: each runs the programs of one runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// Ranks that are threads of a host.
    Cpu,
    /// GPUs of the CUDA runtime.
    Cuda,
}

/// One figure of a profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The number, in the unit its name says (bytes, seconds, FLOP/s, bytes/s; a share where it says none).
    pub value: f64,
    /// Where it comes from.
    pub source: String,
}

macro_rules! profile {
    ($($(#[$doc:meta])* $field:ident: $quantity:ident,)*) => {
        /// What one device and its links can do.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Profile {
            /// The name: `h100`.
            pub name: String,
            /// Whose programs it runs.
            pub kind: DeviceKind,
            $($(#[$doc])* pub $field: Figure,)*
        }

        impl Profile {
            /// The names of all figures, each with what it is.
            pub const FIGURES: &'static [(&'static str, Quantity)] = &[$((stringify!($field), Quantity::$quantity)),*];

            /// Every figure with its name.
            pub fn figures(&self) -> Vec<(&'static str, &Figure)> {
                vec![$((stringify!($field), &self.$field)),*]
            }

            /// A figure by its name, and what it is.
            pub fn figure_mut(&mut self, name: &str) -> Option<(Quantity, &mut Figure)> {
                match name {
                    $(stringify!($field) => Some((Quantity::$quantity, &mut self.$field)),)*
                    _ => None,
                }
            }
        }
    };
}

profile! {
    /// Memory of one device.
    memory_bytes: Bytes,
    /// Of it, what the driver and the libraries keep for themselves.
    reserved_bytes: Reserve,
    /// Dense matmul rate in bf16, FLOP/s.
    peak_bf16: Rate,
    /// Dense matmul rate in fp16, FLOP/s.
    peak_f16: Rate,
    /// Dense matmul rate in fp32, FLOP/s.
    peak_f32: Rate,
    /// Dense matmul rate in 8-bit formats, FLOP/s; where the device has none, the larger of those in 16 bits.
    peak_f8: Rate,
    /// Device memory, bytes/s by the datasheet.
    memory_bandwidth: Bandwidth,
    /// The share of it that a kernel reaches.
    memory_efficiency: Share,
    /// The share of the peak rate that a large matmul reaches.
    matmul_efficiency: Share,
    /// The share of it that products keep up back to back through a step, where the power limit binds.
    sustained_efficiency: Share,
    /// The share of their own peak rate that a large matmul in 8-bit formats reaches.
    f8_efficiency: Share,
    /// A matmul of depth `k` runs at `k / (k + ramp)` of that, in the fastest format of 16 bits; at a lower rate the ramp is as
    /// much shorter.
    matmul_ramp: Length,
    /// Elements of the result that one multiprocessor makes at a time, in the largest tile.
    matmul_tile: Count,
    /// Multiprocessors of one device.
    multiprocessors: Count,
    /// The share of the peak rate that cuDNN's attention reaches, forward.
    attention_forward: Share,
    /// A sequence of `s` runs at `s / (s + ramp)` of that.
    attention_forward_ramp: Length,
    /// The share of the peak rate that cuDNN's attention reaches, backward.
    attention_backward: Share,
    /// A sequence of `s` runs at `s / (s + ramp)` of that.
    attention_backward_ramp: Length,
    /// The share of the peak rate that it keeps up through a step of short sequences, where the power limit binds, forward.
    attention_forward_sustained: Share,
    /// The same, backward.
    attention_backward_sustained: Share,
    /// The factor for heads narrower than 128.
    attention_narrow: Share,
    /// The factor for attention in f32, which no library fuses, whatever the width.
    attention_f32: Share,
    /// The share of the peak rate that FlashAttention 2 reaches, forward.
    flash_forward: Share,
    /// The same, backward.
    flash_backward: Share,
    /// Time to start one kernel.
    launch_seconds: Seconds,
    /// Bytes/s one device moves to the others of its node, in one direction.
    link_bandwidth: Bandwidth,
    /// Time of one hop within a node.
    link_latency: Seconds,
    /// The same for few bytes, which are sent with flags.
    small_latency: Seconds,
    /// Devices of one node.
    devices_per_node: Count,
    /// Bytes/s one device moves to other nodes, in one direction.
    node_bandwidth: Bandwidth,
    /// Time of one hop between nodes.
    node_latency: Seconds,
    /// Time to start one collective.
    collective_launch: Seconds,
    /// What a step waits besides, for a collective whose bytes are not few.
    collective_wait: Seconds,
    /// Of the time of a collective that computation hides, the share that the computation loses to it.
    overlap_loss: Loss,
    /// Bytes/s between a device and its host.
    host_bandwidth: Bandwidth,
    /// Memory of one host.
    host_memory_bytes: Bytes,
    /// Memory of one host, bytes/s that all of its devices and cores reach together.
    host_memory_bandwidth: Bandwidth,
    /// Disks of one host, bytes/s read.
    disk_read_bandwidth: Bandwidth,
    /// The same, written.
    disk_write_bandwidth: Bandwidth,
}

const PROFILES: [&str; 10] = [
    include_str!("../profiles/a100-40.json"),
    include_str!("../profiles/a100-80.json"),
    include_str!("../profiles/b200.json"),
    include_str!("../profiles/cpu.json"),
    include_str!("../profiles/h100-500w.json"),
    include_str!("../profiles/h200.json"),
    include_str!("../profiles/l40s.json"),
    include_str!("../profiles/rtx3090.json"),
    include_str!("../profiles/rtx4090.json"),
    include_str!("../profiles/v100.json"),
];

impl Profile {
    /// The shipped profiles, by name.
    pub fn shipped() -> BTreeMap<String, Profile> {
        let read = |text: &&str| serde_json::from_str::<Profile>(text).ok();
        let mut profiles: BTreeMap<String, Profile> =
            PROFILES.iter().filter_map(read).map(|profile| (profile.name.clone(), profile)).collect();
        variant::add(&mut profiles);
        profiles
    }

    /// The memory that a plan may use on it, unless the user says less.
    pub fn usable_memory(&self) -> Bytes {
        Bytes((self.memory_bytes.value - self.reserved_bytes.value).max(0.0) as u64)
    }

    /// Whether it has units for products of 8-bit floats; what has none is given a rate of 16 bits.
    pub fn has_f8_units(&self) -> bool {
        self.peak_f8.value > self.peak_bf16.value.max(self.peak_f16.value)
    }

    /// Whether products in fp16 are faster than in bf16, which a device without units for bf16 computes in f32.
    pub fn prefers_f16(&self) -> bool {
        self.peak_f16.value > self.peak_bf16.value
    }

    /// The shipped profile of a name.
    pub fn find(name: &str) -> Result<Profile, ClusterError> {
        let mut shipped = Self::shipped();
        if let Some(profile) = shipped.remove(name) {
            return Ok(profile);
        }
        let nearest = shipped.keys().min_by_key(|known| edit_distance(known, name)).cloned().unwrap_or_default();
        let known = shipped.keys().cloned().collect::<Vec<_>>().join(", ");
        Err(ClusterError::UnknownDevice { name: name.to_string(), nearest, known })
    }
}

/// The least memory of a CPU rank with which anything can be planned.
const LEAST_SHARE: Bytes = Bytes(1 << 20);

/// More ranks than any cluster has; the text of [`ClusterError::Count`] says it.
pub const MOST_RANKS: u64 = 1 << 20;

/// Devices, equal in each of `nodes` equal nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// As the user wrote it; of a plan's, its request says so.
    #[serde(skip)]
    pub name: String,
    /// Devices of one node.
    pub per_node: u64,
    /// Nodes.
    pub nodes: u64,
    /// The device; where there are several [kinds](Cluster::devices), the one as which the cluster is seen.
    pub device: Profile,
    /// What lies beyond the node, from the inside out.
    pub levels: Vec<Level>,
    /// The kinds of nodes, in the order of the ranks; empty where there is one.
    pub parts: Vec<Part>,
}

impl Cluster {
    /// Reads a cluster in one of the forms of the [module](self). `cuda` names the profile of this
    /// host's GPUs (`h200` where the caller does not know better).
    pub fn parse(text: &str, cuda: &str) -> Result<Cluster, ClusterError> {
        if text.ends_with(".toml") {
            let file = |message: String| ClusterError::File { path: text.to_string(), message };
            let contents = std::fs::read_to_string(text).map_err(|error| file(error.to_string()))?;
            return Self::from_toml(text, &contents);
        }
        let (device, count) = text.split_once(':').ok_or_else(|| ClusterError::Form(text.to_string()))?;
        let number = |part: &str| {
            let bad = || ClusterError::Count { text: part.to_string(), cluster: text.to_string() };
            part.parse::<u64>().ok().filter(|count| (1..=MOST_RANKS).contains(count)).ok_or_else(bad)
        };
        let mut profile = Profile::find(if device == "cuda" { cuda } else { device })?;
        let (per_node, nodes) = match count.split_once('x') {
            Some((per_node, nodes)) => (number(per_node)?, number(nodes)?),
            None => (number(count)?, 1),
        };
        if profile.kind == DeviceKind::Cpu {
            share_host_memory(&mut profile, per_node);
            let share = Bytes(profile.memory_bytes.value as u64);
            if share < LEAST_SHARE {
                let (host, least) = (share * per_node, LEAST_SHARE.to_string());
                let (cluster, ranks, most) = (text.to_string(), per_node, host.0 / LEAST_SHARE.0);
                let (host, share) = (host.to_string(), share.to_string());
                return Err(ClusterError::Share { cluster, ranks, host, share, most, least });
            }
        }
        Self::new(text, per_node, nodes, profile).checked()
    }

    /// Nodes of one kind, all equally far from each other.
    pub fn new(name: impl Into<String>, per_node: u64, nodes: u64, device: Profile) -> Self {
        Self { name: name.into(), per_node, nodes, device, levels: Vec::new(), parts: Vec::new() }
    }

    /// The cluster that a plan was made for, as it was then.
    ///
    /// # Errors
    /// A plan that has none, or one that cannot be.
    pub fn of(plan: &Plan) -> Result<Self, ClusterError> {
        let unread = |error: serde_json::Error| ClusterError::Plan { message: error.to_string() };
        let cluster: Self = serde_json::from_value(plan.cluster.clone()).map_err(unread)?;
        let wrong = |error: ClusterError| ClusterError::Plan { message: error.to_string() };
        Self { name: plan.request.cluster.clone(), ..cluster }.checked().map_err(wrong)
    }

    /// As a plan holds it.
    pub fn to_value(&self) -> Value {
        // Numbers are finite, and all keys are strings.
        serde_json::to_value(self).unwrap_or_default()
    }

    /// The number of ranks.
    pub fn ranks(&self) -> u64 {
        self.per_node * self.nodes
    }

    /// The memory a plan may use on the ranks that have most of it, unless the user says less.
    pub fn usable_memory(&self) -> Bytes {
        self.devices().into_iter().map(Profile::usable_memory).max().unwrap_or_default()
    }

    /// The cluster with so much memory in each host, for all ranks of the host together.
    pub fn with_host_memory(mut self, bytes: Bytes) -> Self {
        let given = |source: &str, bytes: Bytes| Figure { value: bytes.0 as f64, source: source.to_string() };
        self.change_devices(|device| device.host_memory_bytes = given("the user", bytes));
        if let Some(share) = self.share_of_host() {
            let source = "its share of the host's memory, which the user gave";
            self.change_devices(|device| device.memory_bytes = given(source, share));
        }
        self
    }

    /// A rank's share of its host's memory, where that is what the rank lives in.
    pub fn share_of_host(&self) -> Option<Bytes> {
        let share = self.device.host_memory_bytes.value / self.per_node as f64;
        (self.device.kind == DeviceKind::Cpu).then_some(Bytes(share as u64))
    }

    /// The host memory that the ranks of one host take, where each takes so much memory. What lies on
    /// a GPU takes none.
    pub fn on_host(&self, rank: Bytes) -> Bytes {
        if self.device.kind == DeviceKind::Cpu { Bytes(rank.0 * self.per_node) } else { Bytes(0) }
    }

    fn checked(self) -> Result<Self, ClusterError> {
        // None is so large that the product is too large for its type.
        let mut counts = [self.per_node, self.nodes].into_iter().chain(self.parts.iter().map(|part| part.nodes));
        let wrong = counts.find(|count| !(1..=MOST_RANKS).contains(count));
        if let Some(count) = wrong.or_else(|| Some(self.ranks()).filter(|ranks| *ranks > MOST_RANKS)) {
            return Err(ClusterError::Count { text: count.to_string(), cluster: self.name });
        }
        let in_parts: u64 = self.parts.iter().map(|part| part.nodes).sum();
        if !self.parts.is_empty() && in_parts != self.nodes {
            let message = format!("there are {} nodes, and the parts have {in_parts}", self.nodes);
            return Err(ClusterError::File { path: self.name, message });
        }
        level::check(&self.levels, self.nodes, &self.name)?;
        for device in self.devices() {
            check::figures(device)?;
            if device.usable_memory() == Bytes(0) {
                let (figure, value) = ("memory_bytes".to_string(), device.memory_bytes.value.to_string());
                return Err(ClusterError::Figure { figure, value, expect: "more than `reserved_bytes`".to_string() });
            }
        }
        Ok(self)
    }
}

/// CPU ranks are threads of one host, so each has its share of the host's memory.
fn share_host_memory(profile: &mut Profile, ranks: u64) {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kilobytes = total.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<f64>().ok());
    if let Some(kilobytes) = kilobytes {
        let source = "MemTotal of this host".to_string();
        profile.host_memory_bytes = Figure { value: kilobytes * 1024.0, source };
    }
    let value = profile.host_memory_bytes.value * 0.8 / ranks as f64;
    profile.memory_bytes = Figure { value, source: "four fifths of the host's memory, over its ranks".to_string() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: &str) {
        let text = match Cluster::parse(text, "h200") {
            Ok(cluster) => format!("{} {}x{}", cluster.device.name, cluster.per_node, cluster.nodes),
            Err(error) => error.to_string(),
        };
        assert!(text.contains(expect), "{text}");
    }

    #[test]
    fn forms() {
        check("cpu:4", "cpu 4x1");
        check("cuda:2", "h200 2x1");
        check("h100:8x16", "h100 8x16");
        check("a100-40:8", "a100-40 8x1");
        check("h10:8", "unknown device `h10`; did you mean `h100`?");
        check("h100:0", "`0` in cluster `h100:0` is not a number of devices");
        check("h100:8x-1", "`-1`");
        check("h100:1048576x1048576", "`1099511627776` in cluster `h100:1048576x1048576`");
        check("h100", "is not a cluster");
        check("cpu:1048576", "1048576 ranks share the");
    }

    #[test]
    fn every_profile_is_read_and_sound() {
        let names = PROFILES.map(|text| serde_json::from_str::<Profile>(text).unwrap().name);
        let names: Vec<String> = names.into_iter().chain(variant::names()).collect();
        let distinct: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "two devices have one name: {names:?}");
        assert!(Profile::shipped().keys().eq(distinct));
        for name in Profile::shipped().keys() {
            Cluster::parse(&format!("{name}:2"), "h200").unwrap();
        }
    }

    #[test]
    fn what_a_plan_holds_is_checked_as_a_file_is() {
        let cluster = Cluster::parse("h100:8x2", "h200").unwrap();
        let of = |value: Value| {
            let mut plan = Plan { cluster: value, ..Plan::default() };
            plan.request.cluster = "h100:8x2".to_string();
            Cluster::of(&plan).map_err(|error| error.to_string())
        };
        assert_eq!(of(cluster.to_value()), Ok(cluster.clone()));
        let check = |key: &str, value: Value, expect: &str| {
            let mut changed = cluster.to_value();
            changed[key] = value;
            let error = of(changed).unwrap_err();
            assert!(error.contains(expect) && error.contains("make the plan again"), "{error}");
        };
        check("nodes", 0.into(), "`0` in cluster `h100:8x2` is not a number");
        check("nodes", (1u64 << 62).into(), "`4611686018427387904` in cluster");
        check("per_node", (MOST_RANKS).into(), "`2097152` in cluster");
        check("device", Value::Null, "invalid type: null");
        let part = serde_json::json!([{"nodes": 1, "device": cluster.device}]);
        check("parts", part, "there are 2 nodes, and the parts have 1");
        assert!(of(Value::Null).is_err());
    }

    #[test]
    fn cpu_ranks_share_the_memory_of_their_host() {
        let gib = |count: u64| Bytes(count << 30);
        let cpu = Cluster::parse("cpu:4", "h200").unwrap().with_host_memory(gib(8));
        assert_eq!((cpu.usable_memory(), cpu.share_of_host()), (gib(2), Some(gib(2))));
        assert_eq!(cpu.on_host(gib(1)), gib(4));
        let gpu = Cluster::parse("h100:8x2", "h200").unwrap();
        let memory = gpu.usable_memory();
        let gpu = gpu.with_host_memory(gib(8));
        assert_eq!((gpu.usable_memory(), gpu.share_of_host(), gpu.on_host(gib(1))), (memory, None, gib(0)));
    }
}
