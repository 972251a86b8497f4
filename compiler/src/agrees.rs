//! Whether what a plan says of itself agrees with what it is: its request and its choice with its graph and its mesh. A
//! plan file's hash guards against damage, not against words that were wrong when it was written; a plan that was
//! edited as text has no hash.
//!
//! What the plan's graph computes is compared with the model's step, value by value ([`same`](shardc_passes::same)).
//! For that the passes of [`pipeline`] make the step anew; its head is cut as the plan says, and casts that the plan
//! keeps are made again in its graph. Of blocks in chunks that overlap, the elements and terms that chunks hold are
//! compared ([`chunks`]).

use crate::compile::Trace;
use crate::error::Error;
use crate::model::NamedModel;
use crate::options::{Batch, Options};
use crate::pipeline;
use serde_json::Value;
use shardc_ir::ops::Arithmetic;
use shardc_ir::plan::Request;
use shardc_ir::units::counted;
use shardc_ir::{Bytes, DType, Family, Graph, Node, Op, OpDef, Plan, Role, TensorType, ValueId};
use shardc_models::Model;
use shardc_passes::chunk::chunk;
use shardc_passes::cluster::{Cluster, ClusterError};
use shardc_passes::deterministic::is_deterministic;
use shardc_passes::fold::leaf_name;
use shardc_passes::keep_casts::{are_kept, cast_again};
use shardc_passes::optimizer::config_of;
use shardc_passes::precision::Precision;
use shardc_passes::same::{Difference, chunks, difference};
use shardc_passes::search::{Pins, Recompute};
use std::collections::{BTreeMap, BTreeSet};

/// The element types in which gradients can be summed over ranks.
const REDUCED: [DType; 2] = [DType::F32, DType::Bf16];

/// Everything that a plan says of itself and that is not so.
pub(crate) fn contradictions(plan: &Plan) -> Vec<String> {
    let mut wrong = own_contradictions(plan);
    wrong.extend(wrong_model(plan));
    wrong
}

/// The same, but for what is of its model.
pub(crate) fn own_contradictions(plan: &Plan) -> Vec<String> {
    let mut wrong = wrong_cluster(plan).map_or_else(|error| vec![error.to_string()], Vec::from_iter);
    wrong.extend(wrong_precision(plan));
    wrong.extend(wrong_reduction(plan.request.reduce_dtype));
    wrong.extend(wrong_choice(plan));
    wrong
}

/// In what a plan's cluster is not that of its mesh or of its name, if it is not. What a file's name stands for, and how
/// much memory a host has, is another thing elsewhere.
fn wrong_cluster(plan: &Plan) -> Result<Option<String>, ClusterError> {
    let cluster = Cluster::of(plan)?;
    let named = match cluster.name.ends_with(".toml") {
        true => cluster.clone(),
        false => match Cluster::parse(&cluster.name, &cluster.device.name) {
            Err(ClusterError::Share { .. }) => cluster.clone(),
            named => named?,
        },
    };
    if let Some(other) = [&named, &cluster].into_iter().find(|of| of.ranks() != plan.mesh.ranks()) {
        let (ranks, devices) = (counted(plan.mesh.ranks(), "rank"), counted(other.ranks(), "device"));
        return Ok(Some(format!("the mesh has {ranks}, and cluster {} has {devices}", other.name)));
    }
    let [named, planned] = [&named, &cluster].map(Cluster::shape);
    Ok((named != planned).then(|| format!("cluster {} is {named}, and the plan is for {planned}", cluster.name)))
}

/// What a plan needs more than there is: of a rank's memory, and of a host's.
pub(crate) fn over_budget(plan: &Plan) -> Option<String> {
    let (Request { device_memory, host_memory, .. }, prediction) = (&plan.request, &plan.prediction);
    let of_rank = beyond(prediction.memory.total(), prediction.room.min(*device_memory));
    let of_host = || beyond(prediction.host, *host_memory).map(|more| format!("each host needs {more}"));
    of_rank.map(|more| format!("each rank needs {more}")).or_else(of_host)
}

/// Two sizes in words; where they differ and read alike, to the byte.
pub(crate) fn apart(one: Bytes, other: Bytes) -> [String; 2] {
    let texts = [one.to_string(), other.to_string()];
    let is_close = one != other && texts[0] == texts[1];
    if is_close { [one, other].map(|bytes| format!("{} bytes", bytes.0)) } else { texts }
}

/// What is needed and what there is, if that is less.
pub(crate) fn beyond(needed: Bytes, there: Bytes) -> Option<String> {
    let [long, short] = apart(needed, there);
    (needed > there).then(|| format!("{long}, and there are {short}"))
}

/// The element types that products, norms and the like compute in tell the precision: what a model casts by itself does not.
fn wrong_precision(plan: &Plan) -> Option<String> {
    let graph = &plan.graph;
    let computed = || graph.nodes().map(|(_, node)| node).filter(|node| node.role == Role::Forward);
    let result = |node: &Node| graph.ty(node.results[0]).clone();
    let is_narrow = |node: &&Node| !node.op.is_leaf() && node.op.arithmetic(&result(node)) == Arithmetic::Narrow;
    let types: BTreeSet<DType> = computed().filter(is_narrow).map(|node| result(node).dtype).collect();
    let is_f8 = |value: &ValueId| matches!(graph.ty(*value).dtype, DType::F8e4m3 | DType::F8e5m2);
    let has_f8 = computed().flat_map(|node| &node.results).any(is_f8);
    let said = &plan.request.precision;
    let Some(precision) = Precision::from_name(said) else {
        return Some(format!("the precision is `{said}`, of which there is none"));
    };
    // Nothing tells it where there is none.
    let is_right = types.is_empty() || types.contains(&precision.narrow().unwrap_or(DType::F32));
    let names: Vec<&str> = types.iter().map(|dtype| dtype.name()).collect();
    match has_f8 && precision != Precision::Fp8 {
        true => Some(format!("the precision is `{said}`, and the graph computes in 8 bits")),
        false if !is_right => {
            Some(format!("the precision is `{said}`, and the graph computes in {}", names.join(" and ")))
        }
        false => None,
    }
}

/// In what gradients cannot be summed, if that is asked.
pub(crate) fn wrong_reduction(asked: Option<DType>) -> Option<String> {
    let dtype = asked.filter(|dtype| !REDUCED.contains(dtype))?;
    Some(format!("reduce_dtype is {}, and gradients are summed in f32 or bf16", dtype.name()))
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
    for family in Family::over_ranks() {
        let (said, is) = (chosen.product(&[family]), mesh.degree(family));
        if said != is {
            wrong.push(format!("the choice says {family}={said}, and the mesh has {family}={is}"));
        }
    }
    let parts = Family::DATA.map(|family| mesh.degree(family)).iter().product::<u64>() * mesh.microbatches();
    if let Some(microbatch) = chosen.microbatch.filter(|size| size.saturating_mul(parts) != *batch) {
        let message = format!("the choice says microbatch={microbatch}, and the mesh cuts a batch of {batch}");
        wrong.push(format!("{message} into {parts} parts"));
    }
    let zero = chosen.zero.map(|said| (said, zero_stage(plan, said)));
    if let Some((said, is)) = zero.filter(|(said, is)| said != is) {
        wrong.push(format!("the choice says zero={said}, and the layouts are those of zero={is}"));
    }
    wrong.extend(wrong_schedule(plan, &chosen));
    let is_again = |(_, node): (_, &Node)| matches!(node.role, Role::Recompute(_));
    let again = plan.graph.nodes().filter(|of| is_again(*of)).count() as u64;
    if again > 0 && chosen.recompute == Some(Recompute::None) && chosen.stage_recompute.is_empty() {
        wrong.push(format!("the choice says recompute=none, and the graph computes {} again", counted(again, "value")));
    }
    let keeps = are_kept(&plan.graph);
    let of_pins = pinned.keep_casts.unwrap_or(keeps);
    for (what, said) in [("choice says", chosen.keep_casts == Some(true)), ("pins say", of_pins)] {
        if said != keeps {
            let is = if keeps { "keeps casts of parameters" } else { "keeps no casts of parameters" };
            wrong.push(format!("the {what} keep_casts={}, and the graph {is}", u8::from(said)));
        }
    }
    let named = |of: &Pins| {
        // What divides the sequence may be pinned by another name than it then has.
        let families = Family::over_ranks().filter(|family| !Family::CONTEXT.contains(family));
        let degrees = families.map(|family| (family.name(), of.degree(family))).collect::<Vec<_>>();
        let others =
            [("microbatch", of.microbatch), ("zero", of.zero), ("in_flight", of.in_flight), ("delayed", of.delayed)];
        degrees.into_iter().chain(others)
    };
    for ((name, pin), (_, is)) in named(&pinned).zip(named(&chosen)) {
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
    let limit = limits.into_iter().find(|(_, said, is)| said != is);
    let text = match (said, chosen.virtual_stages.filter(is_other), limit) {
        (None, None, None) => return None,
        (Some(said), ..) => format!("schedule={}", said.name()),
        (None, Some(said), _) => format!("virtual={said}"),
        (None, None, Some((name, Some(said), _))) => format!("{name}={said}"),
        (None, None, Some((name, None, _))) => format!("no {name}"),
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
    let axes = [Family::Data, Family::Fsdp].into_iter().flat_map(|family| plan.mesh.family(family)).collect::<Vec<_>>();
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
    Ok(step(plan, &model)?.filter(|step| wrong_operation(plan, step).is_none() && wrong_value(plan, step).is_none()))
}

/// In what the graph of a plan is not that of a model, traced for its batch: in inputs, parameters or operations, or in what
/// is computed of which values, forward, backward and in the update.
pub(crate) fn other_model(plan: &Plan, traced: &Model) -> Option<String> {
    let wrong = wrong_leaf(plan, traced);
    wrong.or_else(|| match step(plan, traced) {
        Ok(Some(step)) => wrong_operation(plan, &step).or_else(|| wrong_value(plan, &step)),
        Ok(None) => Some(format!("`{}` is no precision", plan.request.precision)),
        Err(error) => Some(error.to_string()),
    })
}

/// The training step of a model as a plan's request has it, with the plan's optimizer; nothing where it names no precision.
fn step(plan: &Plan, traced: &Model) -> Result<Option<Graph>, Error> {
    let Some(precision) = Precision::from_name(&plan.request.precision) else { return Ok(None) };
    let optimizer = config_of(&plan.graph).unwrap_or_default();
    let options = Options { optimizer, deterministic: is_deterministic(&plan.graph), ..Options::default() };
    pipeline::step(traced, precision, &options).map(Some)
}

fn traced(plan: &Plan) -> Option<Result<Model, Error>> {
    let Request { model, batch, seq, .. } = &plan.request;
    Some(NamedModel::find(model).ok()?.trace(Batch { batch: *batch, seq: *seq }))
}

/// The graph is the model's, for the batch; nothing where the model is not to be found.
pub(crate) fn wrong_model(plan: &Plan) -> Option<String> {
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
        let less = theirs.iter().find(|(settings, count)| has(settings) < **count);
        // Parts of an operation have numbers of their own beside them.
        let has_others = !["constant", "affine"].contains(op) || less.is_some();
        let mut others = own.iter().flat_map(|own| own.keys()).filter(|_| has_others);
        let other = others.find(|other| !theirs.contains_key(*other));
        let (settings, _) = less.or_else(|| other.and_then(|_| theirs.first_key_value()))?;
        let is = match other {
            Some(other) => format!("the graph {op} with {other}"),
            None => "the graph has less of it".to_string(),
        };
        let place = if path.is_empty() { String::new() } else { format!("`{path}` of ") };
        Some(format!("{place}{} computes {op} with {settings}, and {is}", plan.request.model))
    })
}

/// Where the plan's graph computes or gives something that the model's step does not.
fn wrong_value(plan: &Plan, step: &Graph) -> Option<String> {
    let (chosen, model) = (Pins::chosen(plan), &plan.request.model);
    let whole = match (cast_again(&plan.graph), chunk(step, chosen.loss_chunks.unwrap_or(1))) {
        (Ok(graph), Ok((step, _))) => (graph, step),
        (Err(error), _) | (_, Err(error)) => return Some(error.to_string()),
    };
    let (graph, step) = &whole;
    let mut found = difference(graph, step);
    if let Some(chunks) = chosen.overlap_chunks.filter(|chunks| *chunks > 1) {
        if found.is_none() {
            return Some(format!("the choice says overlap_chunks={chunks}, and the graph is whole"));
        }
        found = chunks::difference(graph, step);
    }
    Some(match found? {
        Difference::Value(value) => {
            // Nodes have the numbers that they have in the plan.
            let (at, index) = (graph.value(value).def, graph.value(value).index);
            let node = plan.graph.node(at);
            let place = if node.path.is_empty() { String::new() } else { format!(" in `{}`", node.path) };
            let operands: Vec<String> = node.operands.iter().map(ToString::to_string).collect();
            let set: Vec<String> = node.op.attributes().iter().map(|(key, value)| format!("{key}={value}")).collect();
            let set = if set.is_empty() { String::new() } else { format!(" {{{}}}", set.join(", ")) };
            let made = format!("{}({}){set}", node.op.name(), operands.join(", "));
            format!("{} = {made}{place} is nothing that a step of {model} computes there", node.results[index])
        }
        Difference::Output(name) => format!("the graph returns `{name}` of another value than a step of {model}"),
        Difference::Missing(name) => format!("the graph does not return `{name}`, as a step of {model} does"),
    })
}

/// The inputs and parameters of a plan's graph.
fn leaves(plan: &Plan) -> BTreeMap<&str, &TensorType> {
    let leaves = plan.graph.leaves();
    leaves.map(|(id, node)| (leaf_name(&node.op), plan.graph.ty(id))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::compile;
    use shardc_passes::optimizer::{OptimizerConfig, OptimizerKind};

    fn plan(pins: &str, options: Options) -> Plan {
        let (model, cluster) = (NamedModel::find("llama-tiny").unwrap(), Cluster::parse("cpu:2", "h200").unwrap());
        let options = Options { pins: pins.into(), ..options };
        compile(&model, Batch { batch: 4, seq: 64 }, &cluster, &options).unwrap().plan().clone()
    }

    /// The plan with the first line edited that has all of some words.
    #[track_caller]
    fn edited(plan: &Plan, words: &[&str], from: &str, to: &str) -> Plan {
        let text = plan.to_string();
        let line = text.lines().find(|line| words.iter().all(|word| line.contains(word)) && line.contains(from));
        let line = line.unwrap_or_else(|| panic!("{words:?} and {from} in no line"));
        let mut made: Plan = text.replacen(line, &line.replacen(from, to, 1), 1).parse().unwrap();
        (made.request, made.cluster) = (plan.request.clone(), plan.cluster.clone());
        (made.choice, made.prediction) = (plan.choice.clone(), plan.prediction);
        made
    }

    #[track_caller]
    fn check(plan: &Plan, expected: &str) {
        let wrong = contradictions(plan);
        assert!(wrong.iter().any(|text| text.contains(expected)), "{expected}: {wrong:?}");
    }

    /// However a step is cut, computed again or spread, it is the model's; and nothing else is.
    #[test]
    fn a_step_that_computes_something_else_is_told() {
        let bf16 = || Options { precision: Some(Precision::Bf16), ..Options::default() };
        let kind = OptimizerKind::AdamW { beta1: 0.8, beta2: 0.9, eps: 1e-6, weight_decay: 0.0 };
        let others = || Options { optimizer: OptimizerConfig { kind: kind.clone(), clip_grad_norm: None }, ..bf16() };
        let plans = [
            plan("dp=2,zero=2,recompute=value:3", Options::default()),
            plan("dp=2,zero=3,loss_chunks=2,recompute=block,keep_casts=1", bf16()),
            plan("pp=2,schedule=zbv,microbatch=1", others()),
            plan(
                "tp=2,loss_chunks=4",
                Options { precision: Some(Precision::Fp16), deterministic: true, ..Options::default() },
            ),
            plan("dp=2,overlap_chunks=2,microbatch=2", bf16()),
        ];
        for plan in &plans {
            assert_eq!(contradictions(plan), Vec::<String>::new(), "{}", plan.choice);
        }
        for plan in &plans[..4] {
            let of = "in `blocks.0.attention` is nothing that a step of llama-tiny computes there";
            check(&edited(plan, &["attention_grad", "blocks.0"], "causal=true", "causal=false"), of);
            check(&edited(plan, &["state", "norm.gamma.v"], "init=0.0", "init=1.0"), "is nothing that a step of");
            let decay = if plan.choice.contains("pp=2") { "weight_decay=0.0" } else { "weight_decay=0.1" };
            check(&edited(plan, &["= adamw"], decay, "weight_decay=-5.0"), "the weight decay");
            check(&edited(plan, &["return loss"], "return loss", "return lost"), "returns `lost` of another value");
        }
        check(&edited(&plans[0], &["= sqrt"], "sqrt", "log"), "log(");
        check(&edited(&plans[4], &["= attention ", "blocks.0"], "causal=true", "causal=false"), "with causal=true");
        let chosen = |plan: &Plan, choice: String| Plan { choice, ..plan.clone() };
        let none = plans[0].choice.replace("recompute=value:3", "recompute=none");
        check(&chosen(&plans[0], none), "the choice says recompute=none, and the graph computes");
        let overlapping = format!("{},overlap_chunks=2", plans[0].choice);
        check(&chosen(&plans[0], overlapping), "the choice says overlap_chunks=2, and the graph is whole");
        let named = |request: Request| Plan { request, ..plans[0].clone() };
        let request = &plans[0].request;
        check(&named(Request { precision: "fp64".into(), ..request.clone() }), "`fp64` is no precision");
        assert_eq!(over_budget(&plans[0]), None);
        let of_rank = over_budget(&named(Request { device_memory: Bytes(1), ..request.clone() }));
        assert!(of_rank.is_some_and(|text| text.contains("each rank needs")));
        let of_host = over_budget(&named(Request { host_memory: Bytes(1), ..request.clone() }));
        assert!(of_host.is_some_and(|text| text.contains("each host needs")));
        check(&named(Request { reduce_dtype: Some(DType::Bool), ..request.clone() }), "reduce_dtype is bool");
    }
}
