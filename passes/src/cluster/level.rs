//! What lies beyond the node: racks, pods.

use super::{ClusterError, Quantity};
use serde::{Deserialize, Serialize};
use shardc_ir::units::counted;

/// The most levels beyond the node.
pub const MOST_LEVELS: usize = 2;

/// Equal units of equal nodes, with links of their own to other units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// What a unit is called: `rack`.
    pub name: String,
    /// Nodes of one unit.
    pub nodes: u64,
    /// Bytes/s that each device may move out of its unit, all at the same time.
    pub bandwidth: f64,
    /// Time of one hop between units, in seconds.
    pub latency: f64,
}

/// Checks that each level is made of whole units of the one inside.
pub(super) fn check(levels: &[Level], nodes: u64, cluster: &str) -> Result<(), ClusterError> {
    let fail = |message: String| Err(ClusterError::File { path: cluster.to_string(), message });
    if levels.len() > MOST_LEVELS {
        return fail(format!(
            "{} levels beyond the node; there may be {MOST_LEVELS}, such as racks and pods",
            levels.len()
        ));
    }
    let mut inner = (1, "node");
    for (index, Level { name, nodes: size, bandwidth, latency }) in levels.iter().enumerate() {
        let (unit, inside) = inner;
        let is_taken = name == "node" || levels[..index].iter().any(|inside| inside.name == *name);
        if is_taken || name.trim().is_empty() {
            let taken = if is_taken { "there is one inside" } else { "that is no name" };
            return fail(format!("a level is called `{name}`, but {taken}: give it another name, such as \"pod\""));
        }
        if *size <= unit || !size.is_multiple_of(unit) {
            return fail(format!(
                "a {name} of {} is not made of several {inside}s of {unit}: write a larger multiple of {unit}",
                counted(*size, "node")
            ));
        }
        if !nodes.is_multiple_of(*size) {
            let nodes_text = counted(nodes, "node");
            let do_not = if nodes == 1 { "does not" } else { "do not" };
            return fail(format!("{nodes_text} {do_not} fill {name}s of {size}: write a divisor of {nodes}"));
        }
        Quantity::Bandwidth.check("bandwidth", *bandwidth)?;
        Quantity::Seconds.check("latency", *latency)?;
        inner = (*size, name);
    }
    Ok(())
}
