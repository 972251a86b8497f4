//! What would change under other conditions: the search again, with one figure changed.
//!
//! Each row is compared with the search under the plan's own conditions, so that only the condition
//! differs; both are estimates of the search. It looks at plans whose microbatches are whole: what would
//! change for one in chunks that overlap is found for its model, traced again.

use crate::agrees;
use crate::error::Error;
use crate::options::Options;
use crate::pipeline;
use serde::Serialize;
use shardc_ir::plan::Request;
use shardc_ir::{Bytes, Graph, Plan, Seconds};
use shardc_passes::cluster::{Cluster, Figure, Profile};
use shardc_passes::deterministic::is_deterministic;
use shardc_passes::precision::Precision;
use shardc_passes::search::PlanError;
use shardc_passes::search::overlap::is_in_chunks;
use shardc_passes::search::why::{again, searched_graph};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What would change.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sensitivity {
    /// A row for each condition; the first is the plan's own.
    pub rows: Vec<Row>,
    /// What the rows are of, or why there are none, where the plan is not one that the search looks at.
    pub note: Option<String>,
}

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
/// # Errors
/// Only a bug: a plan whose graph cannot be read back.
pub fn sensitivity(plan: &Plan, cluster: &Cluster) -> Result<Sensitivity, Error> {
    // A graph in chunks is cut as one mesh divides the batch.
    let in_chunks = is_in_chunks(plan);
    let graph = if in_chunks { model_graph(plan)? } else { Some(searched_graph(plan)?) };
    let Some(graph) = graph else {
        let model = &plan.request.model;
        let note = format!(
            "Not known: the search looks at whole microbatches, those of this plan are in chunks that overlap, and \
             `{model}` is not a model that can be traced again from its name."
        );
        return Ok(Sensitivity { rows: Vec::new(), note: Some(note) });
    };
    let rows = rows((&graph, !in_chunks), plan, cluster);
    let note = "Of plans with whole microbatches, which the search estimates: this plan's are in chunks that overlap.";
    Ok(Sensitivity { rows, note: in_chunks.then(|| note.to_string()) })
}

/// The training step of the model that a plan names, as the passes before the search make it; nothing where the model
/// is not to be found, or is another than the plan's.
fn model_graph(plan: &Plan) -> Result<Option<Graph>, Error> {
    let precision = Precision::from_name(&plan.request.precision);
    let Some((model, precision)) = agrees::model(plan).zip(precision) else { return Ok(None) };
    let options = Options { precision, deterministic: is_deterministic(&plan.graph), ..Options::default() };
    pipeline::step(&model, &options).map(Some)
}

fn rows(graph: (&Graph, bool), plan: &Plan, cluster: &Cluster) -> Vec<Row> {
    let conditions = conditions(plan, cluster);
    let found = search_all(graph, &conditions);
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
    conditions.iter().zip(&found).map(row).collect()
}

fn conditions(plan: &Plan, cluster: &Cluster) -> Vec<Condition> {
    let mut list: Vec<Condition> = Vec::new();
    let changed = |change: &dyn Fn(&mut Cluster)| {
        let mut cluster = cluster.clone();
        change(&mut cluster);
        cluster
    };
    let memories = [("as it is", 1.0), ("10% more memory", 1.1), ("twice the memory", 2.0), ("10% less memory", 0.9)];
    for (what, share) in memories {
        let device_memory = Bytes((plan.request.device_memory.0 as f64 * share) as u64);
        let cluster = changed(&|cluster| {
            cluster
                .change_devices(|device| device.memory_bytes.value += (share - 1.0) * device.usable_memory().0 as f64);
        });
        list.push((what.to_string(), cluster, Request { device_memory, ..plan.request.clone() }));
    }
    let mut add = |what: String, cluster: Cluster| list.push((what, cluster, plan.request.clone()));
    let times = |factor: f64, figure: fn(&mut Profile) -> &mut Figure| {
        changed(&|cluster| cluster.change_devices(|device| figure(device).value *= factor))
    };
    let both = [("twice", 2.0), ("half", 0.5)];
    if cluster.nodes > 1 {
        for (word, factor) in both {
            let faster = times(factor, |device| &mut device.node_bandwidth);
            add(format!("{word} the bandwidth between nodes"), faster);
        }
    }
    // Racks and pods have links of their own.
    for (at, level) in cluster.levels.iter().enumerate().filter(|(_, level)| level.nodes < cluster.nodes) {
        for (word, factor) in both {
            let faster = changed(&|cluster| cluster.levels[at].bandwidth *= factor);
            add(format!("{word} the bandwidth between {}s", level.name), faster);
        }
    }
    if cluster.per_node > 1 {
        add("twice the bandwidth within a node".into(), times(2.0, |device| &mut device.link_bandwidth));
    }
    add("twice the memory bandwidth".into(), times(2.0, |device| &mut device.memory_bandwidth));
    add("twice the nodes".into(), changed(&Cluster::double_nodes));
    list
}

/// Searches under every condition, on as many threads as there are cores.
fn search_all(graph: (&Graph, bool), conditions: &[Condition]) -> Vec<Found> {
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
