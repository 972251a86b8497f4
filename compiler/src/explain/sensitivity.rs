//! What would change under other conditions: the plan as it is and what the search finds, with one figure changed.
//!
//! Every row is compared with the plan itself, by one measure: what programs take. Under each condition the plan's own
//! programs are simulated again, and the meshes of the plan and of its runners-up are searched again. Only where that
//! finds another plan by its estimates than it finds under the plan's own conditions, and that one is faster by its
//! programs, is it another plan. Of what no program does yet, the same choice is searched again, and predicted as the
//! plan was.

use super::Inspection;
use crate::agrees;
use crate::error::Error;
use crate::pipeline;
use crate::report;
use serde::Serialize;
use shardc_ir::plan::{Prediction, Request};
use shardc_ir::{Bytes, Graph, Plan, Program, Seconds};
use shardc_passes::cluster::{Cluster, Figure, Profile};
use shardc_passes::search::why::searched_graph;
use shardc_passes::search::{Confirm, Degrees, Pins, PlanError, prepared, search_among};
use shardc_passes::shard::tensor::Prepared;
use shardc_passes::threads;

/// What would change.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sensitivity {
    /// A row for each condition; the first is the plan's own.
    pub rows: Vec<Row>,
    /// What the rows are of, and by what measure.
    pub note: String,
}

/// One condition and the plan that is the fastest under it.
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

/// One condition, and what it changes.
struct Condition {
    what: String,
    cluster: Cluster,
    request: Request,
    /// Where it has more ranks than the plan.
    is_larger: bool,
}

/// A plan's choice, and what it takes.
type Found = (String, Prediction);

/// What would change with more or less memory, faster links, faster devices, more nodes.
///
/// # Errors
/// Only a bug: a plan whose graph cannot be read back.
pub fn sensitivity(inspection: &Inspection<'_>) -> Result<Sensitivity, Error> {
    let plan = inspection.plan;
    let chosen = Pins::parse(&plan.choice)?;
    let known = [plan.choice.as_str()].into_iter().chain(plan.alternatives.iter().map(|other| other.choice.as_str()));
    let mut meshes: Vec<Degrees> = Vec::new();
    for degrees in known.map(Degrees::of_choice) {
        let degrees = degrees?;
        if !meshes.contains(&degrees) {
            meshes.push(degrees);
        }
    }
    // A graph in chunks is cut as one mesh divides the batch.
    let is_cut = [chosen.loss_chunks, chosen.overlap_chunks].into_iter().flatten().any(|chunks| chunks > 1);
    let graph = if is_cut { agrees::model_step(plan)? } else { Some(searched_graph(plan)?) };
    let what = match &graph {
        Some(_) => "Of this plan, and of what the search finds on its mesh and those of its runners-up".to_string(),
        None => format!(
            "Of this plan alone: its graph is in chunks, and `{}` is not a model that can be traced again from its name",
            plan.request.model
        ),
    };
    let unlowered = report::unlowered(plan);
    let by = match &unlowered {
        None => "; all by their programs.".to_string(),
        Some(unlowered) => format!("; all predicted as the plan is, since {unlowered}."),
    };
    let (cluster, programs) = (&inspection.cluster, &inspection.programs[..]);
    let asked = Asked { plan, cluster, programs, chosen, graph, meshes, is_unlowered: unlowered.is_some() };
    Ok(Sensitivity { rows: asked.rows(), note: what + &by })
}

/// What is asked of a plan.
struct Asked<'a> {
    plan: &'a Plan,
    cluster: &'a Cluster,
    /// The plan's.
    programs: &'a [Program],
    chosen: Pins,
    /// What is searched again, where it is there.
    graph: Option<Graph>,
    /// The meshes that are.
    meshes: Vec<Degrees>,
    /// Whether its programs do not do what is planned.
    is_unlowered: bool,
}

impl Asked<'_> {
    fn rows(&self) -> Vec<Row> {
        let plan = self.plan;
        let conditions = conditions(plan, self.cluster);
        let prepared = self.prepared();
        // What the search finds by its estimates here is no reason for another plan elsewhere.
        let usual = conditions.first().and_then(|own| self.search(prepared.as_ref()?, own, false)?.ok());
        let usual = usual.map(|(choice, _)| choice);
        let numbered: Vec<_> = conditions.iter().enumerate().collect();
        let found = threads::map(&numbered, |(at, condition)| {
            self.best(prepared.as_ref(), condition, *at == 0, usual.as_deref())
        });
        let base =
            found.first().and_then(|first| first.as_ref().ok()).map_or(plan.prediction.step, |(_, own)| own.step);
        let row = |(Condition { what, .. }, found): (&Condition, &Result<Found, &'static str>)| {
            let (choice, prediction) = found.as_ref().ok().map(|(choice, of)| (choice.clone(), *of)).unzip();
            let step = prediction.map(|of| of.step);
            Row {
                what: what.clone(),
                choice,
                step,
                change: step.map(|step| step.0 / base.0 - 1.0),
                memory: prediction.map(|of| of.memory.total()),
                refused: found.as_ref().err().copied(),
            }
        };
        conditions.iter().zip(&found).map(row).collect()
    }

    /// The plan itself under a condition, or another that is faster.
    fn best(
        &self,
        prepared: Option<&Prepared<'_>>,
        condition: &Condition,
        is_own: bool,
        usual: Option<&str>,
    ) -> Result<Found, &'static str> {
        let own = (!condition.is_larger).then(|| self.itself(prepared, condition)).flatten();
        let own = own.filter(|prediction| prediction.fits());
        let own = own.map(|prediction| (self.plan.choice.clone(), prediction));
        if let (true, Some(own)) = (is_own, &own) {
            return Ok(own.clone());
        }
        let found = prepared.and_then(|prepared| {
            let estimated = self.search(prepared, condition, false)?;
            let is_usual = estimated.as_ref().is_ok_and(|(choice, _)| Some(choice.as_str()) == usual);
            if is_usual && own.is_some() { None } else { self.search(prepared, condition, true) }
        });
        match (own, found) {
            (Some(own), Some(Ok(found))) if found.1.step.0 < (1.0 - LEAST) * own.1.step.0 => Ok(found),
            (Some(own), _) => Ok(own),
            (None, Some(Ok(found))) => Ok(found),
            (None, Some(Err(PlanError::Pin { .. }))) => Err("the pins exclude it"),
            (None, Some(Err(PlanError::Batch { .. } | PlanError::Mixed { .. })))
                if !self.plan.request.pins.is_empty() =>
            {
                Err("the pins exclude it")
            }
            (None, Some(Err(PlanError::Batch { .. } | PlanError::Mixed { .. }))) => Err("the batch does not divide"),
            (None, Some(Err(PlanError::Bug(_)))) => Err("the search failed"),
            (None, None) if condition.is_larger => Err("it takes another mesh"),
            (None, _) => Err("no plan fits"),
        }
    }

    fn prepared(&self) -> Option<Prepared<'_>> {
        let request = &self.plan.request;
        self.graph.as_ref().map(|graph| prepared(graph, request, pipeline::target(self.cluster)))
    }

    /// What the plan itself takes under a condition.
    fn itself(
        &self,
        prepared: Option<&Prepared<'_>>,
        Condition { cluster, request, .. }: &Condition,
    ) -> Option<Prediction> {
        match self.is_unlowered {
            false => {
                let plan = Plan { request: request.clone(), ..self.plan.clone() };
                pipeline::predicted_by(self.programs, &plan, cluster).ok().map(|exact| exact.prediction)
            }
            true => {
                let Pins { overlap_chunks, keep_casts, .. } = self.chosen;
                let (overlap_chunks, keep_casts) = (overlap_chunks.or(Some(1)), keep_casts.or(Some(false)));
                let pins = Pins { overlap_chunks, keep_casts, ..self.chosen.clone() };
                let confirm = |plan: &Plan| pipeline::predicted(plan, cluster);
                Some(search_among(prepared?, cluster, request, &pins, Some(&confirm), None).ok()?.prediction)
            }
        }
    }

    /// What the search finds under a condition among the meshes: by its estimates, or by programs. Chunks that overlap,
    /// and kept casts, are those of the plan.
    fn search(
        &self,
        prepared: &Prepared<'_>,
        Condition { cluster, request, is_larger, .. }: &Condition,
        is_confirmed: bool,
    ) -> Option<Result<Found, PlanError>> {
        let own = Pins::parse(&request.pins).ok()?;
        let pins = Pins {
            overlap_chunks: self.chosen.overlap_chunks.or(Some(1)),
            keep_casts: own.keep_casts.or((self.chosen.keep_casts != Some(true)).then_some(false)),
            ..own
        };
        let doubled = || self.meshes.iter().flat_map(Degrees::doubled).collect();
        let meshes: Vec<Degrees> = if *is_larger { doubled() } else { self.meshes.clone() };
        let confirm = |plan: &Plan| pipeline::predicted(plan, cluster);
        let confirm = is_confirmed.then_some(&confirm as Confirm<'_>);
        let found = search_among(prepared, cluster, request, &pins, confirm, Some(&meshes));
        Some(found.map(|plan| (plan.choice, plan.prediction)))
    }
}

/// What is faster by less is the same.
const LEAST: f64 = 0.001;

fn conditions(plan: &Plan, cluster: &Cluster) -> Vec<Condition> {
    let mut list: Vec<Condition> = Vec::new();
    let own = cluster.ranks();
    let condition = |what: String, cluster: Cluster, request: Request| {
        let is_larger = cluster.ranks() > own;
        Condition { what, cluster, request, is_larger }
    };
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
        list.push(condition(what.to_string(), cluster, Request { device_memory, ..plan.request.clone() }));
    }
    let mut add = |what: String, cluster: Cluster| list.push(condition(what, cluster, plan.request.clone()));
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
