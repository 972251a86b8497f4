//! Whether fewer devices would be faster than all of them.
//!
//! A plan uses every device. Where their number divides neither the batch nor what the model is made of, most of them
//! repeat the work of others or wait, and a number that divides the batch may do the step in less time. That is planned
//! only where it may be so by the rate that it takes and by an estimate: one more plan, of as many whole nodes as divide the
//! batch, or as many devices of each.

use crate::compile::{Trace, compile};
use crate::error::Error;
use crate::options::{Batch, Options, leaves_open, with_pins};
use crate::pipeline::{self, target};
use serde::Serialize;
use shardc_ir::plan::Request;
use shardc_ir::{Family, Graph, Plan, Seconds};
use shardc_passes::cluster::Cluster;
use shardc_passes::search::{Pins, may_take_less, prepared};

/// The share of the devices' peak that no step exceeds.
const MOST: f64 = 0.75;

/// The share of the step that is worth saying it.
const GAIN: f64 = 0.01;

/// How many times as long as what is planned an estimate may take: chunks are not estimated.
const LOOSE: f64 = 1.05;

/// Fewer devices that are faster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fewer {
    /// How many of each node, and of how many nodes.
    pub per_node: u64,
    /// See `per_node`.
    pub nodes: u64,
    /// What a step takes on them, predicted as that of all.
    pub step: Seconds,
}

/// Fewer devices of a cluster that do the step of a plan faster than all of them, if some that divide the batch do.
///
/// # Errors
/// As [`compile`], but for a model that cannot be planned on them.
pub fn fewer(
    model: &dyn Trace,
    batch: Batch,
    cluster: &Cluster,
    options: &Options,
    plan: &Plan,
) -> Result<Option<Fewer>, Error> {
    let Some((per_node, nodes)) = dividing(cluster, batch.batch) else { return Ok(None) };
    let share = (per_node * nodes) as f64 / cluster.ranks() as f64;
    // As much work as all do, at the best rate.
    if plan.prediction.mfu / share >= MOST {
        return Ok(None);
    }
    let mut options = Options { dump_to: None, ..options.clone() };
    // Fewer in as many stages as all are enough to say so, and quickly planned.
    let stages = plan.stages();
    if leaves_open(&options.pins, Family::Pipeline.name()) && (per_node * nodes).is_multiple_of(stages) {
        options.pins = with_pins(&options.pins, [format!("pp={stages}")]);
    }
    let part = part(cluster, per_node, nodes);
    let graph = pipeline::step(&model.trace(batch)?, options.precision_on(&part), &options)?;
    if !may_be_faster(&graph, &part, &options, plan)? {
        return Ok(None);
    }
    let step = match compile(model, batch, &part, &options) {
        Ok(compiled) => compiled.plan().prediction.step,
        Err(Error::Plan(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok((step.0 < (1.0 - GAIN) * plan.prediction.step.0).then_some(Fewer { per_node, nodes, step }))
}

/// Whether a plan of a training step on a part of the devices is estimated to be as fast as that of all.
fn may_be_faster(graph: &Graph, part: &Cluster, options: &Options, plan: &Plan) -> Result<bool, Error> {
    let request = Request { cluster: part.name.clone(), pins: options.pins.clone(), ..plan.request.clone() };
    let loose = Seconds(LOOSE * plan.prediction.step.0);
    let (prepared, pins) = (prepared(graph, &request, target(part)), Pins::parse(&options.pins)?);
    // What is refused there is no faster.
    Ok(may_take_less(&prepared, &options.on_hosts(part), &request, &pins, loose).unwrap_or(false))
}

/// The most devices that divide a batch which all of them do not: of fewer nodes, or fewer of each node.
fn dividing(cluster: &Cluster, batch: u64) -> Option<(u64, u64)> {
    let divides = |(per_node, nodes): &(u64, u64)| batch.is_multiple_of(per_node * nodes);
    if !cluster.parts.is_empty() || divides(&(cluster.per_node, cluster.nodes)) {
        return None;
    }
    let of_nodes = (1..cluster.nodes).rev().map(|nodes| (cluster.per_node, nodes)).find(divides);
    let of_each = (1..cluster.per_node).rev().map(|per_node| (per_node, cluster.nodes)).find(divides);
    of_nodes.into_iter().chain(of_each).max_by_key(|(per_node, nodes)| (per_node * nodes, *per_node))
}

/// So many devices of each of so many nodes.
fn part(cluster: &Cluster, per_node: u64, nodes: u64) -> Cluster {
    let device = cluster.name.split(':').next().unwrap_or_default();
    let name = match cluster.name.ends_with(".toml") {
        // It names the runtime alone.
        true => cluster.name.clone(),
        false if cluster.name.contains('x') || nodes > 1 => format!("{device}:{per_node}x{nodes}"),
        false => format!("{device}:{per_node}"),
    };
    Cluster { name, per_node, nodes, ..cluster.clone() }
}

impl Fewer {
    /// The line that says it.
    pub fn text(&self, plan: &Plan) -> String {
        let Self { per_node, nodes, step } = self;
        let (all, batch) = (plan.mesh.ranks(), plan.request.batch);
        let of = if *nodes > 1 { format!(" ({per_node} in each of {nodes} nodes)") } else { String::new() };
        format!(
            "fewer    {}{of} of these {all} devices would be faster, {step} a step rather than {}: {all} do not divide the \
             batch of {batch}\n",
            per_node * nodes,
            plan.prediction.step
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_devices_that_divide_the_batch() {
        let check = |cluster: &str, batch: u64, expect: Option<(u64, u64)>| {
            let cluster = Cluster::parse(cluster, "h200").unwrap();
            assert_eq!(dividing(&cluster, batch), expect, "{} {batch}", cluster.name);
            if let Some((per_node, nodes)) = expect {
                let part = part(&cluster, per_node, nodes);
                let parsed = Cluster::parse(&part.name, "h200").unwrap();
                assert_eq!((parsed.per_node, parsed.nodes), (per_node, nodes));
            }
        };
        check("h100:8x3", 64, Some((8, 2)));
        check("h100:8x3", 48, None);
        check("h100:6x2", 64, Some((4, 2)));
        check("h100:6", 64, Some((4, 1)));
        check("h100:7x3", 8, None);
        check("h100:8x3", 8, Some((8, 1)));
        check("h100:8", 64, None);
    }
}
