//! The TOML form of a cluster.

use super::{Cluster, ClusterError, Figure, Level, MOST_RANKS, Profile};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Nodes of one kind, in a cluster that has several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// How many nodes.
    pub nodes: u64,
    /// Their devices.
    pub device: Profile,
}

/// A file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    device: Option<String>,
    per_node: i64,
    nodes: Option<i64>,
    #[serde(default)]
    figures: BTreeMap<String, f64>,
    #[serde(default)]
    levels: Vec<Level>,
    #[serde(default)]
    parts: Vec<PartOfFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PartOfFile {
    device: String,
    nodes: i64,
    #[serde(default)]
    figures: BTreeMap<String, f64>,
}

impl Cluster {
    /// Reads the TOML form:
    ///
    /// ```text
    /// device = "h100"          # a shipped profile
    /// per_node = 8
    /// nodes = 16
    /// [figures]                # replaces figures of the profile
    /// node_bandwidth = 2.0e10
    /// [[levels]]               # beyond the node, from the inside out: racks, pods
    /// name = "rack"
    /// nodes = 4                # of one rack
    /// bandwidth = 1.0e10       # bytes/s that each device may move out of it
    /// latency = 2.0e-5
    /// ```
    ///
    /// Instead of `device` and `nodes`, `[[parts]]` with `device`, `nodes` and `[parts.figures]` each say which
    /// kinds of nodes there are, in their order.
    ///
    /// # Errors
    /// What is missing, unknown or cannot be right, with what would be.
    pub fn from_toml(path: &str, contents: &str) -> Result<Cluster, ClusterError> {
        let fail = |message: String| ClusterError::File { path: path.to_string(), message };
        let file: File = toml::from_str(contents).map_err(|error| fail(error.to_string().trim_end().to_string()))?;
        let count = |name: &str, value: i64| {
            let bad = || ClusterError::Count { text: format!("{name} = {value}"), cluster: path.to_string() };
            u64::try_from(value).ok().filter(|count| (1..=MOST_RANKS).contains(count)).ok_or_else(bad)
        };
        let profile = |name: &str, own: &BTreeMap<String, f64>| {
            let mut device = Profile::find(name)?;
            for (name, value) in file.figures.iter().chain(own) {
                if name == "devices_per_node" {
                    return Err(fail(format!("`per_node` says how many devices a node has: leave `{name}` out")));
                }
                let Some((quantity, figure)) = device.figure_mut(name) else {
                    let known: Vec<&str> = Profile::FIGURES.iter().map(|(name, _)| *name).collect();
                    return Err(fail(format!("unknown figure `{name}`; known are {}", known.join(", "))));
                };
                quantity.check(name, *value)?;
                *figure = Figure { value: *value, source: path.to_string() };
            }
            Ok::<Profile, ClusterError>(device)
        };
        let mut parts = Vec::new();
        for (index, part) in file.parts.iter().enumerate() {
            let name = format!("parts[{index}].nodes");
            parts.push(Part { nodes: count(&name, part.nodes)?, device: profile(&part.device, &part.figures)? });
        }
        let (device, nodes) = match (&file.device, parts.as_slice()) {
            (Some(name), []) => (profile(name, &BTreeMap::new())?, count("nodes", file.nodes.unwrap_or(1))?),
            (None, []) => {
                return Err(fail("`device` is missing: name a shipped profile, such as \"h100\"".to_string()));
            }
            (Some(_), _) => {
                return Err(fail("`device` and `parts` exclude each other: leave `device` out".to_string()));
            }
            (None, [first, others @ ..]) => {
                let nodes = parts.iter().map(|part| part.nodes).sum::<u64>();
                if let Some(said) = file.nodes.filter(|said| u64::try_from(*said).ok() != Some(nodes)) {
                    return Err(fail(format!("`nodes` is {said} and the parts have {nodes} nodes: leave `nodes` out")));
                }
                let kind = |part: &&Part| part.device.kind != first.device.kind;
                if let Some(other) = others.iter().find(kind) {
                    let (one, other) = (&first.device.name, &other.device.name);
                    return Err(fail(format!("{one} and {other} cannot run one program: name devices of one kind")));
                }
                let rate = |part: &&Part| part.device.peak_bf16.value.max(part.device.peak_f16.value);
                let slowest = parts.iter().min_by(|a, b| rate(a).total_cmp(&rate(b))).unwrap_or(first);
                (slowest.device.clone(), nodes)
            }
        };
        let (name, per_node, levels) = (path.to_string(), count("per_node", file.per_node)?, file.levels);
        Cluster { name, per_node, nodes, device, levels, parts }.checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(contents: &str, expect: &str) {
        let text = match Cluster::from_toml("c.toml", contents) {
            Ok(cluster) => format!("{} ranks, {} B/s", cluster.ranks(), cluster.device.node_bandwidth.value),
            Err(error) => error.to_string(),
        };
        assert!(text.contains(expect), "{text}");
    }

    /// A node of eight H100s, and more.
    #[track_caller]
    fn check_more(more: &str, expect: &str) {
        check(&format!("device = \"h100\"\nper_node = 8\n{more}"), expect);
    }

    #[test]
    fn figures() {
        check_more("nodes = 2\n[figures]\nnode_bandwidth = 2e10", "16 ranks, 20000000000 B/s");
        for (figure, expect) in [
            ("link = 1.0", "unknown figure `link`"),
            ("link_bandwidth = 0.0", "`link_bandwidth` is 0: it must be bytes per second"),
            ("link_bandwidth = 900", "`link_bandwidth` is 900: it must be bytes per second"),
            ("link_bandwidth = -1e9", "`link_bandwidth` is -1000000000"),
            ("node_bandwidth = nan", "`node_bandwidth` is NaN"),
            ("node_bandwidth = inf", "`node_bandwidth` is inf"),
            ("node_bandwidth = \"fast\"", "invalid type: string"),
            ("memory_bytes = 80", "`memory_bytes` is 80: it must be bytes"),
            ("memory_bytes = 2e6", "`memory_bytes` is 2000000: it must be more than `reserved_bytes`"),
            ("node_latency = 12", "`node_latency` is 12: it must be seconds"),
            ("peak_bf16 = 989", "`peak_bf16` is 989: it must be FLOP/s"),
            ("matmul_efficiency = 83", "`matmul_efficiency` is 83: it must be a share"),
            ("peak_bf16 = 1e300", "`peak_bf16` is 1e300: it must be FLOP/s"),
            ("multiprocessors = 1.5", "`multiprocessors` is 1.5: it must be a count, a whole number"),
            ("devices_per_node = 8", "`per_node` says how many devices a node has: leave `devices_per_node` out"),
            ("overlap_loss = 1", "`overlap_loss` is 1: it must be a share"),
        ] {
            check_more(&format!("[figures]\n{figure}"), expect);
        }
    }

    #[test]
    fn counts_and_keys() {
        check("", "missing field `per_node`");
        check("per_node = 8", "`device` is missing");
        check("device = \"h100\"", "missing field `per_node`");
        check("device = \"h10\"\nper_node = 8", "unknown device `h10`; did you mean `h100`?");
        check("device = \"h100\"\nper_node = -8", "`per_node = -8` in cluster `c.toml`");
        check("device = \"h100\"\nper_node = 0", "`per_node = 0` in cluster `c.toml`");
        check("device = \"h100\"\nper_node = 8.5", "invalid type: floating point");
        check_more("nodes = 1000000", "`8000000` in cluster `c.toml`");
        check_more("links = 4", "unknown field `links`");
        check("device = h100", "TOML parse error");
    }

    #[test]
    fn levels() {
        let level = |name: &str, nodes: i64, bandwidth: f64| {
            format!("[[levels]]\nname = \"{name}\"\nnodes = {nodes}\nbandwidth = {bandwidth:e}\nlatency = 2e-5\n")
        };
        let (rack, pod) = (level("rack", 4, 1e10), level("pod", 8, 5e9));
        check_more(&format!("nodes = 16\n{rack}{pod}"), "128 ranks");
        check_more(&format!("nodes = 16\n{pod}{rack}"), "a rack of 4 nodes is not made of several pods of 8");
        check_more(&format!("nodes = 6\n{rack}"), "6 nodes do not fill racks of 4: write a divisor of 6");
        check_more(
            &format!("nodes = 16\n{rack}{pod}{}", level("hall", 16, 1e9)),
            "3 levels beyond the node; there may be 2",
        );
        check_more(
            &format!("nodes = 16\n{}", level("rack", 1, 1e9)),
            "a rack of 1 node is not made of several nodes of 1",
        );
        check_more(&format!("nodes = 16\n{}", level("rack", 4, 0.0)), "`bandwidth` is 0: it must be bytes per second");
        check_more("nodes = 16\n[[levels]]\nname = \"rack\"", "missing field `nodes`");
        for (outer, taken) in [("rack", "there is one inside"), ("node", "there is one inside"), (" ", "no name")] {
            let text = format!("nodes = 16\n{rack}{}", level(outer, 8, 5e9));
            check_more(&text, &format!("a level is called `{outer}`"));
            check_more(&text, taken);
        }
    }

    #[test]
    fn several_kinds_of_nodes() {
        let part = |device: &str, nodes: i64| format!("[[parts]]\ndevice = \"{device}\"\nnodes = {nodes}\n");
        let mixed = format!("per_node = 8\n{}{}", part("h100", 1), part("a100-80", 3));
        let cluster = Cluster::from_toml("c.toml", &mixed).unwrap();
        assert_eq!((cluster.ranks(), &cluster.device), (32, &Profile::find("a100-80").unwrap()));
        assert!(cluster.mixture().is_some_and(|text| text.starts_with("1 node of h100, 3 nodes of a100-80")));
        check(&format!("nodes = 5\n{mixed}"), "`nodes` is 5 and the parts have 4 nodes");
        check(&format!("device = \"h100\"\n{mixed}"), "`device` and `parts` exclude each other");
        check(&format!("per_node = 8\n{}{}", part("h100", 1), part("cpu", 1)), "h100 and cpu cannot run one program");
        check(&format!("per_node = 8\n{}", part("h100", 0)), "`parts[0].nodes = 0` in cluster `c.toml`");
    }
}
