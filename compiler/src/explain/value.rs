//! One value of a plan: its layout, and why it has it.
//!
//! What the other choices would cost comes from the search's own cost graph
//! ([`shardc_passes::search::why`]): the step's seconds if this one node were made to do otherwise and
//! all others did what then is best. These are estimates, and so is what is chosen where they are compared.

use super::names::{away, choice, folded_nodes, folded_path, layout, layout_by, local, role, stage_of};
use crate::agrees;
use crate::error::Error;
use crate::nearest::nearest;
use crate::pipeline;
use serde::Serialize;
use shardc_ir::plan::Prediction;
use shardc_ir::{Bytes, Choice, Graph, NodeId, Op, OpDef, OutputKind, Plan, Role, Seconds, ValueId};
use shardc_passes::cluster::Cluster;
use shardc_passes::fold::leaf_name;
use shardc_passes::search::Pins;
use shardc_passes::search::why::{Elsewhere, Options, Why, why};
use shardc_passes::shard::family::{batch_axes, searched_axes};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// An alternative of one node on one axis, compared with the others by the search's estimates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alternative {
    /// The axis; where the plan's ranks divide nothing but the batch, the division of them that has another: `tp=2`.
    pub axis: String,
    /// What the node would do.
    pub choice: String,
    /// The layout that this gives; nothing where no plan has it.
    pub layout: Option<String>,
    /// The choices of the fastest plan that has it, where that divides the ranks in another way.
    pub plan: Option<String>,
    /// Whether the plan does it.
    pub is_chosen: bool,
    /// The seconds a step would take beyond the best, everything else adapted; `None` if nothing fits it.
    pub cost: Option<Seconds>,
}

/// A value and why it lies as it does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explained {
    /// The value.
    pub value: String,
    /// Its layout.
    pub layout: String,
    /// The operation.
    pub op: String,
    /// The leaf's name, if it is one.
    pub name: Option<String>,
    /// The module.
    pub path: String,
    /// Why its node is there.
    pub role: &'static str,
    /// What one rank holds.
    pub local: Vec<u64>,
    /// Its bytes.
    pub bytes: Bytes,
    /// How many values of equal blocks lie alike, this one among them.
    pub alike: usize,
    /// In words, what no search chose: the batch, the storage.
    pub reasons: Vec<String>,
    /// The alternatives on the tensor axes, cheapest first; where there is no such axis, what the value is in plans that
    /// have one.
    pub alternatives: Vec<Alternative>,
}

/// The values that `what` names: a value (`%12`), what the step gives back (`loss`), or a part of a leaf's name or of a
/// module path.
///
/// # Errors
/// If nothing has that name; the message suggests the nearest.
pub fn find(graph: &Graph, what: &str) -> Result<Vec<ValueId>, Error> {
    if what.trim().is_empty() {
        let fix = "`shardc explain PLAN` lists the modules";
        return Err(Error::request(
            "VALUE is empty: it names a value (`%12`), a parameter, a module or what the step gives back (`loss`)",
            fix,
        ));
    }
    let is_value = what.starts_with('%');
    let matches = |id: ValueId, node: NodeId| {
        let node = graph.node(node);
        match is_value {
            true => id.to_string() == what,
            false => [&node.path, leaf_name(&node.op)].iter().any(|name| is_named(name, what)),
        }
    };
    let results = || graph.outputs.iter().filter(|output| output.kind == OutputKind::Result);
    let is_result = |id: ValueId| results().any(|output| output.value == id && output.name == what);
    let is_found = |id: ValueId, node: NodeId| matches(id, node) || is_result(id);
    let found: Vec<ValueId> = graph
        .values()
        .map(|(id, value)| (id, value.def))
        .filter(|(id, def)| is_found(*id, *def))
        .map(|(id, _)| id)
        .collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let names = graph.nodes().flat_map(|(_, node)| [leaf_name(&node.op), node.path.as_str()]);
    let names = names.chain(results().map(|output| output.name.as_str()));
    let hint = nearest(what, names).map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
    let message = format!("the plan has no value, leaf or module `{what}`{hint}");
    Err(Error::request(message, "`shardc explain PLAN` lists the modules; --dump-to writes the whole graph"))
}

/// Whether a name contains what is looked for, as it is or as it is printed for equal blocks: `blocks.*.mlp`.
fn is_named(name: &str, what: &str) -> bool {
    name.contains(what) || (what.contains('*') && folded_path(name).contains(what))
}

/// Explains values; those of equal blocks once.
///
/// # Errors
/// A plan that does not divide over the cluster.
pub fn explain(plan: &Plan, cluster: &Cluster, values: &[ValueId]) -> Result<Vec<Explained>, Error> {
    let graph = &plan.graph;
    let folded = folded_nodes(plan);
    let mut seen: BTreeSet<(usize, usize)> = BTreeSet::new();
    let key = |value: ValueId| (folded.class[graph.value(value).def], graph.value(value).index);
    let firsts: Vec<ValueId> = values.iter().copied().filter(|value| seen.insert(key(*value))).collect();
    let nodes: BTreeSet<NodeId> = firsts.iter().map(|value| graph.value(*value).def).collect();
    if let Some(wrong) = agrees::wrong_model(plan) {
        let message = format!("what else the plan could do is asked of its model, of which it is not: {wrong}");
        return Err(Error::request(message, "plan again"));
    }
    let why = why(plan, cluster, pipeline::target(cluster), &nodes)?;
    let mut alike: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    graph.values().for_each(|(value, _)| *alike.entry(key(value)).or_default() += 1);
    Ok(firsts.into_iter().map(|value| explained(plan, &why, value, alike[&key(value)])).collect())
}

fn explained(plan: &Plan, why: &Why, value: ValueId, alike: usize) -> Explained {
    let def = plan.graph.value(value).def;
    let node = plan.graph.node(def);
    let options = why.options.get(&def).map_or(&[][..], Vec::as_slice);
    let ty = local(plan, value);
    Explained {
        value: value.to_string(),
        layout: layout(plan, value),
        op: node.op.name().to_string(),
        name: node.op.is_leaf().then(|| leaf_name(&node.op).to_string()),
        path: node.path.clone(),
        role: role(node.role),
        bytes: ty.bytes(),
        local: ty.shape,
        alike,
        reasons: reasons(plan, why, value),
        alternatives: match why.elsewhere.is_empty() {
            true => options.iter().flat_map(|options| alternatives(plan, value, options)).collect(),
            false => elsewhere(plan, why, value),
        },
    }
}

/// What else a node might do with an axis.
fn alternatives(plan: &Plan, value: ValueId, options: &Options) -> Vec<Alternative> {
    let (node, axis) = (plan.graph.value(value).def, options.axis);
    let without = plan.strategies[node].without(axis);
    let of = |(other, cost): &(Choice, Seconds)| Alternative {
        axis: plan.mesh.axis(axis).name(),
        choice: choice(plan, node, *other),
        layout: Some(if *other == options.chosen {
            layout(plan, value)
        } else {
            layout_by(plan, value, &without.with(axis, *other))
        }),
        plan: None,
        is_chosen: *other == options.chosen,
        cost: cost.0.is_finite().then_some(*cost),
    };
    options.costs.iter().map(of).collect()
}

/// What a value is in the fastest plans whose ranks divide more than the batch, the fastest first; before them in the
/// plan itself.
fn elsewhere(plan: &Plan, why: &Why, value: ValueId) -> Vec<Alternative> {
    let (own, index) = (plan.graph.value(value).def, plan.graph.value(value).index);
    let itself = Alternative {
        axis: "tp=1".to_string(),
        choice: choice(plan, own, Choice::Replicate),
        layout: Some(layout(plan, value)),
        plan: None,
        is_chosen: true,
        cost: Some(Seconds(0.0)),
    };
    // Text says nothing of the search that found the plan.
    let step = Some(plan.search.estimate).filter(|estimate| estimate.0 > 0.0).unwrap_or(plan.prediction.step);
    let of = |other: &Elsewhere| {
        let axis = other.pin.clone();
        let Some(found) = &other.plan else {
            let choice = "nothing that fits in memory".to_string();
            return Some(Alternative { axis, choice, layout: None, plan: None, is_chosen: false, cost: None });
        };
        let node = *other.nodes.get(&own)?;
        let does = searched_axes(&found.mesh).into_iter().map(|axis| found.strategies[node].choice(axis));
        let what = does.map(|does| choice(found, node, does)).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>();
        Some(Alternative {
            axis,
            choice: what.join("; "),
            layout: Some(layout(found, *found.graph.node(node).results.get(index)?)),
            plan: Some(found.choice.clone()),
            is_chosen: false,
            cost: Some(found.prediction.step - step),
        })
    };
    let mut all: Vec<Alternative> = why.elsewhere.iter().filter_map(of).collect();
    let cost = |of: &Alternative| of.cost.map_or(f64::INFINITY, |cost| cost.0);
    all.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
    std::iter::once(itself).chain(all).collect()
}

/// What is said in words: where the batch and the storage go.
fn reasons(plan: &Plan, why: &Why, value: ValueId) -> Vec<String> {
    let (mesh, def) = (&plan.mesh, plan.graph.value(value).def);
    let (node, strategy) = (plan.graph.node(def), &plan.strategies[def]);
    let names = |axes: Vec<shardc_ir::AxisId>| {
        axes.iter().map(|axis| mesh.axis(*axis).name()).collect::<Vec<_>>().join(" and ")
    };
    let others: Vec<_> = batch_axes(mesh).into_iter().filter(|axis| mesh.size(*axis) > 1).collect();
    let does = |pick: &dyn Fn(Choice) -> bool| {
        others.iter().copied().filter(|axis| pick(strategy.choice(*axis))).collect::<Vec<_>>()
    };
    let mut reasons = Vec::new();
    if let (Some(chunk), Some(stage)) = (plan.pipeline.chunks[def], stage_of(plan, def)) {
        reasons.push(format!("in chunk {chunk} of the pipeline, which stage {stage} runs"));
    }
    if let Some(place) = away(plan.spaces[value]) {
        let why = match Pins::parse(&plan.request.pins).ok().and_then(|pins| pins.offloads()) {
            Some(pinned) => format!("{} is pinned", pinned.text()),
            None => "the device has no room for everything".to_string(),
        };
        reasons.push(format!("lies in {place} while nothing reads it: {why}"));
    }
    if matches!(node.op, Op::Parameter(_) | Op::State(_)) || node.op.update().is_some() {
        let parted = does(&|choice| matches!(choice, Choice::Factor(_)));
        reasons.extend((!parted.is_empty()).then(|| format!("{}: each rank stores its part", names(parted))));
        reasons.extend(stored(plan, why));
        return reasons;
    }
    let batch = why.batch.get(&def).copied();
    let divided = does(&|choice| matches!(choice, Choice::Factor(_)) && Some(choice) == batch);
    if !divided.is_empty() {
        reasons.push(format!("{}: each rank and microbatch has its part of the batch", names(divided)));
    }
    let stored = does(&|choice| matches!(choice, Choice::Factor(_)) && Some(choice) != batch);
    if !stored.is_empty() {
        reasons.push(format!("{}: each rank works on the part that it stores", names(stored)));
    }
    let passed = does(&|choice| matches!(choice, Choice::Pass(_)));
    if !passed.is_empty() {
        reasons.push(format!("{}: sums over the ranks' parts stay partial until they are read", names(passed)));
    }
    let whole = does(&|choice| choice == Choice::Replicate);
    if !whole.is_empty() {
        reasons.push(format!("{}: the same for every part of the batch", names(whole)));
    }
    if plan.transient[value] {
        reasons.push("gathered at each use and dropped after it (ZeRO-3)".to_string());
    }
    reasons.extend(computed_again(plan, why, def));
    reasons
}

/// What becomes of a value between the passes, and what that saves or costs.
fn computed_again(plan: &Plan, why: &Why, def: NodeId) -> Option<String> {
    let is_copy = matches!(plan.graph.node(def).role, Role::Recompute(_));
    let Some(cost) = why.again.get(&def) else {
        return is_copy.then(|| "computed again for the backward pass, so that it need not be kept".to_string());
    };
    let is_dropped = || plan.graph.nodes().any(|(_, node)| node.role == Role::Recompute(def));
    let what = "with those alike in other blocks";
    Some(if is_copy || is_dropped() {
        let when = if is_copy { "computed again for the backward pass" } else { "dropped, and computed again later" };
        format!("{when}: {what} that takes {} a step, and kept they would hold {} per rank", cost.seconds, cost.bytes)
    } else {
        format!(
            "kept for the backward pass: {what} {} per rank; computed again they would take {} a step",
            cost.bytes, cost.seconds
        )
    })
}

/// The ZeRO stages beside the chosen one.
fn stored(plan: &Plan, why: &Why) -> Vec<String> {
    // Whole models are priced, not their stages, and whole microbatches, not their chunks.
    if plan.stages() > 1 || why.stages.is_empty() {
        return Vec::new();
    }
    if why.stages.len() < 2 {
        return vec!["stored on every data rank: there is one".to_string()];
    }
    let pins = Pins::chosen(plan);
    if pins.offloads().is_some() {
        // What leaves the device is priced for the plan as a whole.
        let how = "stored in parts over the data ranks: the plan keeps values on the host, so other ZeRO stages are not \
                   priced here; plan them with --pin zero=… and compare with `shardc diff`";
        return vec![how.to_string()];
    }
    let chosen = pins.zero.unwrap_or(0);
    let is_chosen = |zero: u64| zero == chosen;
    let Some((_, own)) = why.stages.iter().find(|(zero, _)| is_chosen(*zero)) else { return Vec::new() };
    // What the estimate does not see of the plan it does not see of its other stages either.
    let bytes = |of: &Prediction| of.memory.total().0 as f64;
    let (seconds, memory) = (plan.prediction.step.0 / own.step.0, bytes(&plan.prediction) / bytes(own).max(1.0));
    let line = |(zero, estimate): &(u64, Prediction)| {
        let (step, needed) = (estimate.step * seconds, Bytes((bytes(estimate) * memory).round() as u64));
        let mark = match (is_chosen(*zero), needed > plan.prediction.room) {
            (true, _) => "chosen".to_string(),
            (false, true) => "estimated, does not fit".to_string(),
            (false, false) => "estimated".to_string(),
        };
        format!("ZeRO-{zero}: {:>10} a step, {:>10} per rank  {mark}", step.to_string(), needed.to_string())
    };
    why.stages.iter().map(line).collect()
}

/// Explained values as text.
pub fn text(values: &[Explained]) -> String {
    let mut text = String::new();
    for value in values {
        let name = value.name.as_ref().map(|name| format!(" \"{name}\"")).unwrap_or_default();
        let path = if value.path.is_empty() { String::new() } else { format!(" in `{}`", value.path) };
        let alike = if value.alike > 1 { format!("; {} alike", value.alike) } else { String::new() };
        let _ = writeln!(
            text,
            "{}: {} = {}{name}  {}{path}; per rank {:?}, {}{alike}",
            value.value, value.layout, value.op, value.role, value.local, value.bytes
        );
        for reason in &value.reasons {
            let _ = writeln!(text, "    {reason}");
        }
        let widest = |of: fn(&Alternative) -> &str| {
            value.alternatives.iter().map(|option| of(option).chars().count()).max().unwrap_or(0)
        };
        let (axes, choices) = (widest(|option| &option.axis) + 1, widest(|option| &option.choice));
        let layouts = widest(|option| option.layout.as_deref().unwrap_or_default());
        for option in &value.alternatives {
            let cost = match option.cost {
                _ if option.is_chosen && option.cost.is_none_or(|cost| cost.0 < 1e-9) => "chosen".to_string(),
                None if option.layout.is_none() => String::new(),
                None => "not possible".to_string(),
                Some(cost) if option.is_chosen => format!("+{cost} a step (estimated), chosen"),
                Some(cost) if cost.0 < 1e-9 => "as good".to_string(),
                Some(cost) => format!("+{cost} a step (estimated)"),
            };
            let plan = option.plan.as_ref().map(|plan| format!(": {plan}")).unwrap_or_default();
            let (axis, layout) = (format!("{}:", option.axis), option.layout.as_deref().unwrap_or_default());
            let line = format!("    {axis:axes$} {:choices$}  {layout:layouts$}  {cost}{plan}", option.choice);
            let _ = writeln!(text, "{}", line.trim_end());
        }
    }
    text
}
