//! Where the ranks divide nothing but the batch: what the fastest plan is that divides more.

use super::searched;
use crate::cluster::Cluster;
use crate::divisors::divisors;
use crate::search::choice::pins::Pins;
use crate::search::error::PlanError;
use crate::search::search_among;
use crate::shard::family::open_axes;
use crate::shard::tensor::Prepared;
use crate::threads;
use shardc_ir::{Family, NodeId, Plan};
use std::collections::BTreeMap;

/// Whatever is cut into chunks is cut in the searched graph already.
const AS_SEARCHED: &str = "loss_chunks=1,overlap_chunks=1,keep_casts=0";

/// The fastest plan, by its estimate, of another division of the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Elsewhere {
    /// What makes it another, as a pin: `tp=2`.
    pub pin: String,
    /// The plan; none where nothing fits.
    pub plan: Option<Plan>,
    /// Per node that was asked for, its own.
    pub nodes: BTreeMap<NodeId, NodeId>,
}

/// Plans whose ranks divide parameters or the sequence within a node, where those of `plan` do not. `asked` are nodes of
/// the plan, each with that of the graph which was searched.
///
/// # Errors
/// Only a bug.
pub(in crate::search) fn elsewhere(
    plan: &Plan,
    prepared: &Prepared<'_>,
    cluster: &Cluster,
    asked: &[(NodeId, NodeId)],
) -> Result<Vec<Elsewhere>, PlanError> {
    let divides_more = !open_axes(&plan.mesh).is_empty();
    if divides_more || plan.stages() > 1 || Pins::chosen(plan).offloads().is_some() {
        return Ok(Vec::new());
    }
    // The others are priced with the head cut as it is here, so they say so.
    let chunks = Pins::chosen(plan).loss_chunks.filter(|chunks| *chunks > 1);
    let head = chunks.map_or(String::new(), |chunks| format!(",loss_chunks={chunks}"));
    let sizes = || divisors(cluster.per_node).into_iter().filter(|size| *size > 1);
    let pins: Vec<String> = [Family::Tensor, Family::Context]
        .iter()
        .flat_map(|family| sizes().map(move |size| format!("{family}={size}")))
        .collect();
    let of = |pin: &String| -> Result<Option<Elsewhere>, PlanError> {
        let pins = Pins::parse(&[pin, AS_SEARCHED, "pp=1"].join(","))?;
        let pin = pin.clone();
        match search_among(prepared, cluster, &plan.request, &pins, None, None) {
            Ok(mut plan) => {
                plan.choice = plan.choice.replace(&format!(",{AS_SEARCHED}"), &head);
                let (_, from) = searched(&plan)?;
                let nodes = asked.iter().filter_map(|(node, new)| Some((*node, *from.get(*new)?))).collect();
                Ok(Some(Elsewhere { pin, plan: Some(plan), nodes }))
            }
            Err(PlanError::Infeasible { .. } | PlanError::Host { .. }) => {
                Ok(Some(Elsewhere { pin, plan: None, nodes: BTreeMap::new() }))
            }
            Err(PlanError::Pin { .. } | PlanError::Batch { .. } | PlanError::Mixed { .. }) => Ok(None),
            Err(error @ PlanError::Bug(_)) => Err(error),
        }
    };
    threads::map(&pins, of).into_iter().filter_map(Result::transpose).collect()
}
