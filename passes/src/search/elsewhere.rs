//! Where the ranks divide nothing but the batch: what the fastest plan is that divides more.

use super::why::searched;
use super::{Pins, PlanError, search_among};
use crate::cluster::Cluster;
use crate::divisors::divisors;
use crate::shard::family::searched_axes;
use crate::shard::tensor::Prepared;
use shardc_ir::{NodeId, Plan, PrimaryMap};

/// Whatever is cut into chunks is cut in the searched graph already.
const AS_SEARCHED: &str = "loss_chunks=1,overlap_chunks=1,keep_casts=0";

/// The fastest plan, by its estimate, of another division of the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Elsewhere {
    /// What makes it another, as a pin: `tp=2`.
    pub pin: String,
    /// The plan; none where nothing fits.
    pub plan: Option<Plan>,
    /// Its node of each of the searched graph's.
    nodes: PrimaryMap<NodeId, NodeId>,
}

impl Elsewhere {
    /// Its plan, and what is of it a node of the graph that was searched.
    pub fn node(&self, searched: NodeId) -> Option<(&Plan, NodeId)> {
        Some((self.plan.as_ref()?, *self.nodes.get(searched)?))
    }
}

/// Plans whose ranks divide parameters or the sequence within a node, where those of `plan` do not.
///
/// # Errors
/// Only a bug.
pub(super) fn elsewhere(plan: &Plan, prepared: &Prepared<'_>, cluster: &Cluster) -> Result<Vec<Elsewhere>, PlanError> {
    let divides_more = searched_axes(&plan.mesh).iter().any(|axis| plan.mesh.size(*axis) > 1);
    if divides_more || plan.stages() > 1 || Pins::chosen(plan).offloads().is_some() {
        return Ok(Vec::new());
    }
    let sizes = || divisors(cluster.per_node).into_iter().filter(|size| *size > 1);
    let mut all = Vec::new();
    for (family, size) in ["tp", "cp"].into_iter().flat_map(|family| sizes().map(move |size| (family, size))) {
        let pin = format!("{family}={size}");
        let pins = Pins::parse(&[&pin, AS_SEARCHED, "pp=1"].join(","))?;
        match search_among(prepared, cluster, &plan.request, &pins, None, None) {
            Ok(mut plan) => {
                plan.choice = plan.choice.replace(&format!(",{AS_SEARCHED}"), "");
                let nodes = searched(&plan)?.1;
                all.push(Elsewhere { pin, plan: Some(plan), nodes });
            }
            Err(PlanError::Infeasible { .. } | PlanError::Host { .. }) => {
                all.push(Elsewhere { pin, plan: None, nodes: PrimaryMap::new() })
            }
            Err(PlanError::Pin { .. } | PlanError::Batch { .. }) => {}
            Err(error @ PlanError::Bug(_)) => return Err(error),
        }
    }
    Ok(all)
}
