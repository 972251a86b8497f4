//! In which order the kinds of nodes of a cluster hold the stages of a pipeline.
//!
//! Ranks are numbered along the nodes, so the first stages lie on the first nodes, with the tables, and the last ones, or
//! where the schedule turns back the first ones again, with the head. Which kind comes first is a choice like any other:
//! each order is a cluster of its own ([`Cluster::in_order`]). In one stage all ranks do alike, so in further orders only
//! pipelines are searched, and only those that are faster than the fastest plan so far.

use super::choice::pins::Pins;
use super::choose::build::{Confirm, Exact};
use super::choose::outcome::add_runner_up;
use super::error::PlanError;
use super::{prepared, rounds, search_confirmed, within};
use crate::cluster::Cluster;
use shardc_ir::plan::Request;
use shardc_ir::units::counted;
use shardc_ir::{Graph, Plan, Target};

/// How many times as long as the fastest plan so far another may take by its estimate, to be worth its programs.
const LOOSE: f64 = 1.03;

/// What a finished plan takes by its programs, on a cluster.
pub type ConfirmOn<'a> = &'a (dyn Fn(&Plan, &Cluster) -> Result<Exact, String> + Sync);

/// [`search_confirmed`] in every order of the kinds of nodes, or in the one that is pinned, with the cluster in the order
/// that the plan is for.
///
/// # Errors
/// See [`PlanError`].
pub fn search_in_order(
    graph: &Graph,
    cluster: &Cluster,
    request: &Request,
    pins: &Pins,
    target: &dyn Target,
    confirm: ConfirmOn<'_>,
) -> Result<(Plan, Cluster), PlanError> {
    let given = match &pins.parts[..] {
        [] => cluster.clone(),
        order => cluster.in_order(order).ok_or_else(|| {
            let message =
                format!("{} has {}; number each once", cluster.name, counted(cluster.parts.len() as u64, "part"));
            PlanError::Pin { pin: named(order), message }
        })?,
    };
    let found = search_confirmed(graph, &given, request, pins, target, Some(&|plan: &Plan| confirm(plan, &given)));
    if !pins.parts.is_empty() {
        return found.map(|plan| (numbered(plan, &pins.parts), given));
    }
    // What is said of each stage is said of the stages in the order that the user sees.
    let is_open = pins.stage_recompute.is_empty() && pins.stage_offload.is_empty();
    let orders = if is_open { given.other_orders() } else { Vec::new() };
    if orders.is_empty() || found.as_ref().is_err_and(|error| !error.is_refusal()) {
        return found.map(|plan| (plan, given));
    }
    let prepared = prepared(graph, request, target);
    let first: Vec<u64> = (1..=given.parts.len() as u64).collect();
    let mut best = found.map(|plan| (plan, given));
    for order in orders {
        let Some(on) = cluster.in_order(&order) else { continue };
        let known = best.as_ref().map_or(f64::INFINITY, |(plan, _)| plan.prediction.step.0);
        // Programs that are faster than was estimated may be so in any order.
        let estimated = best.as_ref().map_or(f64::INFINITY, |(plan, _)| LOOSE * plan.search.estimate.0.max(known));
        let confirm: Confirm<'_> = &|plan: &Plan| confirm(plan, &on);
        match within(&prepared, (&on, request, pins), None, |space| rounds::below(space, confirm, estimated)) {
            Ok(Some(plan)) if plan.prediction.step.0 < known => {
                let plan = numbered(plan, &order);
                best = Ok((if let Ok((other, _)) = best { beside(plan, other, &first) } else { plan }, on));
            }
            Err(error) if !error.is_refusal() => return Err(error),
            _ => {}
        }
    }
    best
}

/// The pin of an order.
fn named(order: &[u64]) -> String {
    let numbers: Vec<String> = order.iter().map(ToString::to_string).collect();
    format!("parts={}", numbers.join("/"))
}

/// A plan that says in which order of nodes it and its runners-up are.
fn numbered(mut plan: Plan, order: &[u64]) -> Plan {
    let choices = plan.alternatives.iter_mut().map(|other| &mut other.choice).chain([&mut plan.choice]);
    choices.for_each(|choice| *choice += &format!(",{}", named(order)));
    plan
}

/// A plan beside the best one of orders before, of which `first` is the given one.
fn beside(mut plan: Plan, other: Plan, first: &[u64]) -> Plan {
    let is_given = Pins::chosen(&other).parts.is_empty();
    let other = if is_given { numbered(other, first) } else { other };
    let search = &mut plan.search;
    search.bound_of_others = if other.stages() > 1 { other.search.bound_of_others } else { Some(other.search.bound) };
    search.candidates += other.search.candidates;
    search.lowered += other.search.lowered;
    search.meshes += other.search.meshes;
    search.pruned += other.search.pruned;
    add_runner_up(&mut plan, other.choice, &other.prediction, "");
    plan
}
