//! What would change under other conditions: the search again, with one figure changed.
//!
//! Each row is compared with the search under the plan's own conditions, so that only the condition
//! differs; both are estimates of the search.

use crate::error::Error;
use crate::pipeline;
use serde::Serialize;
use shardc_ir::plan::Request;
use shardc_ir::{Bytes, Graph, Plan, Seconds};
use shardc_passes::cluster::{Cluster, Figure, Profile};
use shardc_passes::search::PlanError;
use shardc_passes::search::overlap::is_in_chunks;
use shardc_passes::search::why::{again, searched_graph};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One condition and the plan that would be found under it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The condition.
    pub what: String,
    /// The plan's choices under it; nothing if none fits.
    pub choice: Option<String>,
    /// Its step.
    pub step: Option<Seconds>,
    /// The share by which the step is longer than under the plan's own conditions.
    pub change: Option<f64>,
    /// Its memory per rank.
    pub memory: Option<Bytes>,
    /// Why there is no plan under it, if there is none.
    pub refused: Option<&'static str>,
}

/// One condition: its name, and what it changes.
type Condition = (String, Cluster, Request);
/// What the search finds under it.
type Found = Result<Plan, PlanError>;

/// What would change with more or less memory, faster links, faster devices, more nodes.
///
/// Nothing for a plan in chunks that overlap: its graph is cut as one mesh divides the batch.
///
/// # Errors
/// Only a bug: a plan whose graph cannot be read back.
pub fn rows(plan: &Plan, cluster: &Cluster) -> Result<Vec<Row>, Error> {
    if is_in_chunks(plan) {
        return Ok(Vec::new());
    }
    let graph = searched_graph(plan)?;
    let conditions = conditions(plan, cluster);
    let found = search_all(&graph, &conditions);
    let base = found.first().and_then(|plan| plan.as_ref().ok()).map(|plan| plan.prediction.step);
    let row = |((what, ..), found): (&Condition, &Found)| {
        let plan = found.as_ref().ok();
        let step = plan.map(|plan| plan.prediction.step);
        Row {
            what: what.clone(),
            choice: plan.map(|plan| plan.choice.clone()),
            step,
            change: step.zip(base).map(|(step, base)| step.0 / base.0 - 1.0),
            memory: plan.map(|plan| plan.prediction.memory.total()),
            refused: found.as_ref().err().map(|error| match error {
                PlanError::Infeasible { .. } => "no plan fits",
                PlanError::Pin { .. } => "the pins exclude it",
                PlanError::Batch { .. } => "the batch does not divide",
                PlanError::Bug(_) => "the search failed",
            }),
        }
    };
    Ok(conditions.iter().zip(&found).map(row).collect())
}

fn conditions(plan: &Plan, cluster: &Cluster) -> Vec<Condition> {
    let mut list = Vec::new();
    let mut add = |what: &str, change: &dyn Fn(&mut Cluster, &mut Request)| {
        let (mut cluster, mut request) = (cluster.clone(), plan.request.clone());
        change(&mut cluster, &mut request);
        list.push((what.to_string(), cluster, request));
    };
    let memory = |share: f64| {
        move |cluster: &mut Cluster, request: &mut Request| {
            request.device_memory = Bytes((request.device_memory.0 as f64 * share) as u64);
            cluster.change_devices(|device| {
                let usable = device.usable_memory().0 as f64;
                device.memory_bytes.value += (share - 1.0) * usable;
            });
        }
    };
    let figure = |of: fn(&mut Profile) -> &mut Figure, times: f64| {
        move |cluster: &mut Cluster, _: &mut Request| cluster.change_devices(|device| of(device).value *= times)
    };
    add("as it is", &|_, _| {});
    add("10% more memory", &memory(1.1));
    add("twice the memory", &memory(2.0));
    add("10% less memory", &memory(0.9));
    if cluster.nodes > 1 {
        add("twice the bandwidth between nodes", &figure(|device| &mut device.node_bandwidth, 2.0));
        add("half the bandwidth between nodes", &figure(|device| &mut device.node_bandwidth, 0.5));
    }
    if cluster.per_node > 1 {
        add("twice the bandwidth within a node", &figure(|device| &mut device.link_bandwidth, 2.0));
    }
    add("twice the memory bandwidth", &figure(|device| &mut device.memory_bandwidth, 2.0));
    add("twice the nodes", &|cluster, _| cluster.double_nodes());
    list
}

/// Searches under every condition, on as many threads as there are cores.
fn search_all(graph: &Graph, conditions: &[Condition]) -> Vec<Found> {
    let found: Vec<Mutex<Option<Found>>> = conditions.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((at, (_, cluster, request))) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            conditions.get(at).map(|condition| (at, condition))
        } {
            let plan = again(graph, cluster, request, pipeline::target(&request.cluster));
            if let Ok(mut slot) = found[at].lock() {
                *slot = Some(plan);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(conditions.len());
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let unsearched = || Err(PlanError::Bug("a search ended early".to_string()));
    found.into_iter().map(|slot| slot.into_inner().ok().flatten().unwrap_or_else(unsearched)).collect()
}
