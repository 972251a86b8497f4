//! Whether what a plan says of itself agrees with what it is: its request and its choice with its graph and its
//! mesh. A plan file's hash guards against damage, not against words that were wrong when it was written; a plan that
//! was edited as text has no hash.

use crate::compile::Trace;
use crate::error::Error;
use crate::model::NamedModel;
use crate::options::{Batch, Options};
use crate::pipeline;
use serde_json::Value;
use shardc_ir::plan::Request;
use shardc_ir::units::counted;
use shardc_ir::{Bytes, DType, Graph, Op, OpDef, Plan, Role, TensorType};
use shardc_models::Model;
use shardc_passes::cluster::Cluster;
use shardc_passes::deterministic::is_deterministic;
use shardc_passes::fold::leaf_name;
use shardc_passes::precision::Precision;
use shardc_passes::search::Pins;
use std::collections::BTreeMap;

/// Everything that a plan says of itself and that is not so.
pub(crate) fn contradictions(plan: &Plan, cluster: &Cluster) -> Vec<String> {
    let mut wrong = Vec::new();
    let (ranks, devices) = (plan.mesh.ranks(), cluster.ranks());
    if ranks != devices {
        let (ranks, devices) = (counted(ranks, "rank"), counted(devices, "device"));
        wrong.push(format!("the mesh has {ranks}, and cluster {} has {devices}", plan.request.cluster));
    }
    wrong.extend(wrong_precision(plan));
    wrong.extend(wrong_choice(plan));
    wrong.extend(wrong_model(plan));
    wrong
}

/// What is needed and what there is, if that is less; where both read alike, to the byte.
pub(crate) fn beyond(needed: Bytes, there: Bytes) -> Option<String> {
    let [long, short] = [needed.to_string(), there.to_string()];
    let exact = |bytes: Bytes| format!("{} bytes", bytes.0);
    let (long, short) = if long == short { (exact(needed), exact(there)) } else { (long, short) };
    (needed > there).then(|| format!("{long}, and there are {short}"))
}

/// The element types of the forward pass tell the precision.
fn wrong_precision(plan: &Plan) -> Option<String> {
    let graph = &plan.graph;
    let has = |dtypes: &[DType]| {
        let computed = graph.nodes().filter(|(_, node)| node.role == Role::Forward && !node.op.is_leaf());
        let mut results = computed.flat_map(|(_, node)| &node.results);
        results.any(|value| dtypes.contains(&graph.ty(*value).dtype))
    };
    let is = if has(&[DType::F8e4m3, DType::F8e5m2]) {
        Precision::Fp8
    } else if has(&[DType::F16]) {
        Precision::Fp16
    } else if has(&[DType::Bf16]) {
        Precision::Bf16
    } else {
        Precision::Fp32
    };
    let said = &plan.request.precision;
    (is.name() != said).then(|| format!("the precision is `{said}`, and the graph computes in {}", is.name()))
}

/// The degrees, the microbatch and the ZeRO stage of the choice, and what of them was pinned.
fn wrong_choice(plan: &Plan) -> Vec<String> {
    let (mesh, Request { batch, pins, .. }) = (&plan.mesh, &plan.request);
    let (chosen, pinned) = match (Pins::parse(&plan.choice), Pins::parse(pins)) {
        (Ok(chosen), Ok(pinned)) => (chosen, pinned),
        (Err(error), _) => return vec![format!("the choice: {error}")],
        (_, Err(error)) => return vec![format!("the pins: {error}")],
    };
    let mut wrong = Vec::new();
    for (family, said) in chosen.degrees() {
        let (said, is) = (said.unwrap_or(1), mesh.degree(family));
        if said != is {
            wrong.push(format!("the choice says {family}={said}, and the mesh has {family}={is}"));
        }
    }
    let parts = ["dp", "fsdp", "ep"].map(|family| mesh.degree(family)).iter().product::<u64>() * mesh.microbatches();
    if let Some(microbatch) = chosen.microbatch.filter(|size| size.saturating_mul(parts) != *batch) {
        let message = format!("the choice says microbatch={microbatch}, and the mesh cuts a batch of {batch}");
        wrong.push(format!("{message} into {parts} parts"));
    }
    let zero = chosen.zero.map(|said| (said, zero_stage(plan, said)));
    if let Some((said, is)) = zero.filter(|(said, is)| said != is) {
        wrong.push(format!("the choice says zero={said}, and the layouts are those of zero={is}"));
    }
    wrong.extend(wrong_schedule(plan, &chosen));
    let is_cast = |op: &Op| matches!(op, Op::State(state) if state.cast_of.is_some());
    let keeps = plan.graph.leaves().any(|(_, node)| is_cast(&node.op));
    for (what, said) in [("choice", chosen.keep_casts == Some(true)), ("pins", pinned.keep_casts.unwrap_or(keeps))] {
        if said != keeps {
            let is = if keeps { "keeps casts of parameters" } else { "keeps no casts of parameters" };
            wrong.push(format!("the {what} say keep_casts={}, and the graph {is}", u8::from(said)));
        }
    }
    let named = |of: &Pins| {
        let others =
            [("microbatch", of.microbatch), ("zero", of.zero), ("in_flight", of.in_flight), ("delayed", of.delayed)];
        of.degrees().into_iter().chain(others)
    };
    for ((name, pin), (_, is)) in named(&pinned).zip(named(&chosen)) {
        // What divides the sequence may be pinned by another name than it then has.
        let pin = pin.filter(|_| !["ring", "ulysses", "cp"].contains(&name));
        if let Some(pin) = pin.filter(|pin| *pin != is.unwrap_or(1)) {
            wrong.push(format!("the pins say {name}={pin}, and the choice {name}={}", is.unwrap_or(1)));
        }
    }
    wrong
}

/// The schedule and the chunks of a stage that the choice says, where the plan has others.
fn wrong_schedule(plan: &Plan, chosen: &Pins) -> Option<String> {
    let is = &plan.pipeline;
    let said = chosen.schedule.filter(|said| plan.stages() == 1 || *said != is.schedule);
    let is_other = |said: &u64| if plan.stages() == 1 { *said > 1 } else { *said != is.per_stage };
    let limits = [("in_flight", chosen.in_flight, is.in_flight), ("delayed", chosen.delayed, is.delayed)];
    let limit = limits.into_iter().find_map(|(name, said, is)| Some((name, said.filter(|_| said != is)?)));
    let text = match (said, chosen.virtual_stages.filter(is_other), limit) {
        (None, None, None) => return None,
        (Some(said), ..) => format!("schedule={}", said.name()),
        (None, Some(said), _) => format!("virtual={said}"),
        (None, None, Some((name, said))) => format!("{name}={said}"),
    };
    let is = match plan.stages() {
        1 => "the plan has one stage".to_string(),
        _ => {
            let limit = |(chunks, what): (Option<u64>, &str)| chunks.map(|chunks| format!(" and {chunks} {what}"));
            let limits: String =
                [(is.in_flight, "in flight"), (is.delayed, "delayed")].into_iter().filter_map(limit).collect();
            format!("the pipeline is {} with {} of a stage{limits}", is.schedule.name(), counted(is.per_stage, "chunk"))
        }
    };
    Some(format!("the choice says {text}, and {is}"))
}

/// The ZeRO stage that a plan's layouts are of; `said` where they cannot tell, having nothing to divide.
fn zero_stage(plan: &Plan, said: u64) -> u64 {
    let is_gathered = plan.graph.values().any(|(value, _)| plan.transient[value]);
    match (is_gathered, plan.reduce_in_loop, is_stored_in_parts(plan)) {
        (true, ..) => 3,
        (false, true, true) => 2,
        (false, true, false) => said.max(2),
        (false, false, true) => 1,
        (false, false, false) => said.min(1),
    }
}

/// Whether optimizer state is divided over ranks that divide the batch.
fn is_stored_in_parts(plan: &Plan) -> bool {
    let axes = ["dp", "fsdp"].iter().flat_map(|family| plan.mesh.family(family)).collect::<Vec<_>>();
    let states = plan.graph.nodes().filter(|(_, node)| matches!(node.op, Op::State(_)));
    states.map(|(id, _)| &plan.strategies[id]).any(|strategy| {
        axes.iter().any(|axis| plan.mesh.size(*axis) > 1 && strategy.factors.values().flatten().any(|own| own == axis))
    })
}

/// The training step of the model that a plan names, as the passes before the search make it; nothing where the model is
/// not to be found, or is another than the plan's.
pub(crate) fn model_step(plan: &Plan) -> Result<Option<Graph>, Error> {
    let Some(Ok(model)) = traced(plan) else { return Ok(None) };
    if wrong_leaf(plan, &model).is_some() {
        return Ok(None);
    }
    Ok(step(plan, &model)?.filter(|step| wrong_operation(plan, step).is_none()))
}

/// In what the graph of a plan is not that of a model, traced for its batch: in inputs, parameters or operations.
pub(crate) fn other_model(plan: &Plan, traced: &Model) -> Option<String> {
    wrong_leaf(plan, traced).or_else(|| wrong_operation(plan, &step(plan, traced).ok()??))
}

/// The training step of a model as a plan's request has it; nothing where it names no precision.
fn step(plan: &Plan, traced: &Model) -> Result<Option<Graph>, Error> {
    let Some(precision) = Precision::from_name(&plan.request.precision) else { return Ok(None) };
    let options = Options { precision, deterministic: is_deterministic(&plan.graph), ..Options::default() };
    pipeline::step(traced, &options).map(Some)
}

fn traced(plan: &Plan) -> Option<Result<Model, Error>> {
    let Request { model, batch, seq, .. } = &plan.request;
    Some(NamedModel::find(model).ok()?.trace(Batch { batch: *batch, seq: *seq }))
}

/// The graph is the model's, for the batch; nothing where the model is not to be found.
fn wrong_model(plan: &Plan) -> Option<String> {
    let Request { model: name, batch, seq, .. } = &plan.request;
    match traced(plan)? {
        Ok(traced) => other_model(plan, &traced),
        Err(error) => Some(format!("{name} has no batch of {batch} sequences of {seq} tokens: {error}")),
    }
}

/// What differs between the inputs and parameters of a plan's graph and those of its model.
fn wrong_leaf(plan: &Plan, traced: &Model) -> Option<String> {
    let Request { model: name, batch, seq, .. } = &plan.request;
    let own: BTreeMap<&str, &TensorType> = leaves(plan);
    let same = |(leaf, ty): &(&str, &TensorType)| own.get(leaf) == Some(ty);
    let inputs: Vec<(&str, &TensorType)> = traced.inputs.iter().map(|(name, ty)| (name.as_str(), ty)).collect();
    if let Some((input, ty)) = inputs.iter().find(|input| !same(input)) {
        let has = own.get(input).map_or("none".to_string(), |own| own.to_string());
        return Some(format!(
            "{name} with a batch of {batch} x {seq} takes `{input}` as {ty}, and the graph has {has}"
        ));
    }
    let is_parameter = |op: &Op| matches!(op, Op::Parameter(_));
    let graph = &traced.graph;
    let theirs: BTreeMap<&str, &TensorType> = graph
        .leaves()
        .filter(|(_, node)| is_parameter(&node.op))
        .map(|(id, node)| (leaf_name(&node.op), graph.ty(id)))
        .collect();
    if let Some((leaf, ty)) = theirs.iter().map(|(leaf, ty)| (*leaf, *ty)).find(|leaf| !same(leaf)) {
        let has = own.get(leaf).map_or("none".to_string(), |own| own.to_string());
        return Some(format!("{name} has parameter `{leaf}` as {ty}, and the graph has {has}"));
    }
    let mut parameters = plan.graph.leaves().filter(|(_, node)| is_parameter(&node.op));
    let beyond = parameters.find(|(_, node)| !theirs.contains_key(leaf_name(&node.op)));
    beyond.map(|(_, node)| format!("the graph has parameter `{}`, which {name} has not", leaf_name(&node.op)))
}

/// What operations of the forward pass compute, and how often: by module and name, of their attributes those that are not of
/// sizes, which parts of an operation have as the whole does. Those without any move or convert, as layouts ask for.
type Computed = BTreeMap<(String, &'static str), BTreeMap<String, u64>>;

fn computed(graph: &Graph) -> Computed {
    let mut all = Computed::new();
    let is_given = |op: &Op| matches!(op, Op::Parameter(_) | Op::State(_) | Op::Input(_));
    for (_, node) in graph.nodes().filter(|(_, node)| node.role == Role::Forward && !is_given(&node.op)) {
        let is_number = |value: &Value| value.is_boolean() || value.is_f64();
        let is_setting = |(_, value): &(String, Value)| match value {
            Value::Array(all) => all.iter().any(is_number),
            value => is_number(value),
        };
        let settings: Vec<String> = node
            .op
            .attributes()
            .iter()
            .filter(|of| is_setting(of))
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        if !settings.is_empty() {
            let of = all.entry((node.path.clone(), node.op.name())).or_default();
            *of.entry(settings.join(", ")).or_default() += 1;
        }
    }
    all
}

/// What the model's step computes in a module and the graph does not, or with other attributes. Graphs are cut, so they may
/// have an operation more often, and others beside it.
fn wrong_operation(plan: &Plan, step: &Graph) -> Option<String> {
    let (theirs, own) = (computed(step), computed(&plan.graph));
    theirs.iter().find_map(|(at @ (path, op), theirs)| {
        let own = own.get(at);
        let has = |settings: &String| own.and_then(|own| own.get(settings)).copied().unwrap_or(0);
        let (settings, _) = theirs.iter().find(|(settings, count)| has(settings) < **count)?;
        let is = match own.iter().flat_map(|own| own.keys()).find(|other| !theirs.contains_key(*other)) {
            Some(other) => format!("the graph {op} with {other}"),
            None => "the graph has less of it".to_string(),
        };
        let place = if path.is_empty() { String::new() } else { format!("`{path}` of ") };
        Some(format!("{place}{} computes {op} with {settings}, and {is}", plan.request.model))
    })
}

/// The inputs and parameters of a plan's graph.
fn leaves(plan: &Plan) -> BTreeMap<&str, &TensorType> {
    let leaves = plan.graph.leaves();
    leaves.map(|(id, node)| (leaf_name(&node.op), plan.graph.ty(id))).collect()
}
