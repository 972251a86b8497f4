//! Plans for people to read.

use crate::pipeline::target_of;
use shardc_ir::feature::{self, Feature, missing};
use shardc_ir::plan::{Memory, Request, Scope, Search};
use shardc_ir::units::counted;
use shardc_ir::{AxisId, Choice, Family, Graph, Mesh, Node, NodeId, Op, OpDef, Plan, Target};
use shardc_passes::cluster::Cluster;
use shardc_passes::cost;
use shardc_passes::lower::on_first_rank;
use shardc_passes::search::{Pins, Undivided};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The share of a rank's work from which it is said that others do the same.
const REPEATED: f64 = 0.1;

/// The widest column of choices.
const WIDEST: usize = 72;

/// What a step is counted in.
pub(crate) fn unit(request: &Request) -> &'static str {
    if request.seq == 0 { "samples" } else { "tokens" }
}

/// A plan in a page: the choice, the prediction, memory per rank, the runners-up.
pub fn plan_text(plan: &Plan) -> String {
    let search = if plan.search.meshes > 0 { search_text(&plan.search, plan.stages() > 1) } else { String::new() };
    [choice_text(plan), step_text(plan), memory_text(plan), remarks(plan), search, runners_up(plan)].concat()
}

/// What was asked for, and what was chosen.
fn choice_text(plan: &Plan) -> String {
    let request = &plan.request;
    let batch = match request.seq {
        0 => counted(request.batch, "sample"),
        seq => format!("{} of {}", counted(request.batch, "sequence"), counted(seq, "token")),
    };
    let mesh = if plan.mesh.axes.is_empty() { "one rank".to_string() } else { plan.mesh.to_string() };
    let order = Cluster::of(plan).ok().and_then(|cluster| cluster.order());
    let nodes = order.map(|order| format!("nodes    {order}, in the order of the ranks\n")).unwrap_or_default();
    format!(
        "{} on {}: {batch} per step, {}\n\nplan     {}\nmesh     {mesh}\n{nodes}",
        request.model, request.cluster, request.precision, plan.choice
    )
}

/// The predicted step, and what its time goes to.
fn step_text(plan: &Plan) -> String {
    let (request, prediction) = (&plan.request, &plan.prediction);
    let rate = (request.batch * request.seq.max(1)) as f64 / prediction.step.0;
    let mut text = format!(
        "step     {}, {rate:.0} {}/s, {:.1}% of the devices' peak (predicted)\n",
        prediction.step,
        unit(request),
        prediction.mfu * 100.0
    );
    let (rest, is_staged) = (prediction.rest(), plan.stages() > 1);
    for (name, seconds, is_shown) in [
        ("matrix products and attention", prediction.matmul, true),
        ("bound by memory or launches", prediction.memory_bound, true),
        ("communication that nothing hides, and what it slows", prediction.exposed_communication, true),
        ("the optimizer", prediction.optimizer, true),
        ("gaps between kernels, and waits for the slowest rank", rest, rest.0 > 1e-3 * prediction.step.0),
        ("waits for other stages of the pipeline", prediction.bubble, is_staged),
    ] {
        if is_shown {
            let _ = writeln!(text, "         {seconds:>10}  {name}");
        }
    }
    text
}

/// The predicted memory, of a rank and of its host.
fn memory_text(plan: &Plan) -> String {
    let (request, prediction) = (&plan.request, &plan.prediction);
    let (total, live) = (prediction.memory.total(), prediction.memory.live());
    let mut text =
        format!("memory   {total} per rank, {live} live at its peak, of {}; at the peak:\n", prediction.room);
    for (name, bytes) in memory_rows(&prediction.memory) {
        let _ = writeln!(text, "         {bytes:>10}  {name}");
    }
    if request.host_memory.0 > 0 {
        let _ = writeln!(text, "host     {} per host, of {}", prediction.host, request.host_memory);
    }
    text
}

/// What of a plan may be worse than was expected, and whether it trains.
fn remarks(plan: &Plan) -> String {
    let mut text = String::new();
    if let Some(idle) = idle(plan) {
        let _ = writeln!(text, "idle     {idle}");
    } else if let Some(repeated) = repeated(plan) {
        let _ = writeln!(text, "repeats  {repeated}");
    }
    if let Some(undivided) = Undivided::of_plan(plan, Pins::chosen(plan).zero.unwrap_or(0)) {
        let _ = writeln!(text, "whole    {undivided}, and each stores them whole; {}", undivided.fix());
    }
    if let Some((message, fix)) = refused(plan) {
        let _ = writeln!(text, "train    refused: {message}; {fix}");
    }
    text
}

/// The runners-up, as a table.
fn runners_up(plan: &Plan) -> String {
    let mut text = String::new();
    if !plan.alternatives.is_empty() {
        let _ = writeln!(text, "\nrunners-up");
    }
    let choices: Vec<String> = plan.alternatives.iter().map(|other| brief(&other.choice)).collect();
    // A choice of many words does not move the figures of all others away.
    let width = choices.iter().map(String::len).filter(|width| *width <= WIDEST).max().unwrap_or(0);
    for (choice, other) in choices.iter().zip(&plan.alternatives) {
        let (step, memory) = (other.step.to_string(), other.memory.to_string());
        let _ = writeln!(text, "  {choice:width$}  {step:>10}  {memory:>10}  {}", brief(&other.reason));
    }
    text
}

/// A choice, or a sentence that names one, as a table shows it: of what differs from stage to stage only that it does
/// (`--json` has it all).
fn brief(choice: &str) -> String {
    let part = |part: &str| match part.split_once('=') {
        Some((name, each)) if each.contains('/') && each.len() > 24 => {
            format!("{name}=({} differ)", each.split('/').count())
        }
        _ => part.to_string(),
    };
    choice.split(',').map(part).collect::<Vec<_>>().join(",")
}

/// The axes along which the ranks of a stage lie.
fn dividing(mesh: &Mesh) -> impl Iterator<Item = AxisId> + '_ {
    mesh.ids().filter(|axis| !mesh.is_time(*axis) && !mesh.family(Family::Pipeline).contains(axis))
}

/// The model's operations, node by node.
fn work(graph: &Graph) -> Vec<(NodeId, f64)> {
    let flops =
        |(id, node): (NodeId, &Node)| cost::model_flops(&node.op, &graph.operand_types(id), &graph.result_types(id)).0;
    graph.nodes().map(|of| (of.0, flops(of))).collect()
}

/// How many elements each update has.
fn updates(graph: &Graph) -> Vec<(NodeId, f64)> {
    let of = |id: NodeId| graph.result_types(id).first().map_or(0.0, |ty| ty.elements() as f64);
    graph.updates().map(|(id, _)| (id, of(id))).collect()
}

/// An axis that divides no more than this share of the work divides little.
const LITTLE: f64 = 0.25;

/// How many ranks do hardly more than what others do, if any: those along axes by which little of the work is divided.
fn idle(plan: &Plan) -> Option<String> {
    let (mesh, work) = (&plan.mesh, work(&plan.graph));
    let all: f64 = work.iter().map(|(_, flops)| flops).sum();
    let share = |axis: AxisId| {
        let is_divided = |(id, _): &&(NodeId, f64)| plan.strategies[*id].choice(axis) != Choice::Replicate;
        let divided = || work.iter().filter(is_divided);
        // Of what has no products, any division counts.
        let is_any = || f64::from(u8::from(divided().next().is_some()));
        if all > 0.0 { divided().map(|(_, flops)| flops).sum::<f64>() / all } else { is_any() }
    };
    // Tables of which little is read are updated whole: that is work as well.
    let updates = updates(&plan.graph);
    let elements: f64 = updates.iter().map(|(_, elements)| elements).sum();
    let updated = |axis: AxisId| {
        let divided = updates.iter().filter(|(id, _)| plan.strategies[*id].choice(axis) != Choice::Replicate);
        divided.map(|(_, elements)| elements).sum::<f64>() / elements.max(1.0) * plan.prediction.optimizer.0
    };
    let is_little = |axis: AxisId| updated(axis) <= LITTLE * plan.prediction.step.0;
    let shares = dividing(mesh).map(|axis| (axis, share(axis))).filter(|(_, share)| *share <= LITTLE);
    let shares = shares.filter(|(axis, _)| is_little(*axis));
    let (idle, shares): (Vec<AxisId>, Vec<f64>) = shares.unzip();
    let divided = shares.into_iter().fold(0.0, f64::max);
    let what = if divided == 0.0 { "nothing".to_string() } else { format!("{:.0}% of the work", 100.0 * divided) };
    let copies = mesh.extent(idle.iter().copied());
    let (ranks, batch) = (mesh.ranks(), plan.request.batch);
    let names: Vec<String> = idle.iter().map(|axis| mesh.axis(*axis).name()).collect();
    (copies > 1).then(|| {
        let fewer = if ranks == copies { "one rank".to_string() } else { format!("{} ranks", ranks / copies) };
        let speed = if divided == 0.0 { "at least as fast" } else { "nearly as fast, or faster" };
        let multiple = match batch.is_multiple_of(ranks) {
            true => String::new(),
            false => format!(", or use a batch that is a multiple of {ranks} rather than {batch}"),
        };
        format!(
            "{} of {ranks} ranks repeat the work of others: {what} is divided by {}; {fewer} would be {speed}{multiple}",
            ranks - ranks / copies,
            names.join(", "),
        )
    })
}

/// That several ranks compute the same attention, if that is much of what each computes: there are more of them than
/// heads, and no runtime divides the queries under a causal mask. (Products that several ranks make are chosen, where
/// that takes less than to exchange them.)
fn repeated(plan: &Plan) -> Option<String> {
    let (graph, mesh) = (&plan.graph, &plan.mesh);
    let ranks = mesh.extent(dividing(mesh));
    // The work of a rank, what of it others do as well, and how many do.
    let (mut all, mut again, mut most) = (0.0, 0.0, 1);
    for (id, whole) in work(graph) {
        let is_alike = |axis: &AxisId| plan.strategies[id].choice(*axis) == Choice::Replicate;
        let copies = mesh.extent(dividing(mesh).filter(is_alike));
        let own = whole * copies as f64 / ranks as f64;
        all += own;
        if matches!(graph.node(id).op, Op::Attention(_) | Op::AttentionGrad(_)) {
            again += own * (1.0 - 1.0 / copies as f64);
            most = most.max(copies);
        }
    }
    let wider = match plan.request.scope {
        Scope::Runnable => ", or see by --search all whether rings would, which do not run yet",
        Scope::All => "",
    };
    (again > REPEATED * all).then(|| {
        format!(
            "attention is the same on {most} ranks, {:.0}% of what each computes: they are more than its heads divide \
             over; use fewer ranks, or more samples{wider}",
            100.0 * again / all
        )
    })
}

/// The names of what [`unlowered`] is about.
pub(crate) fn unlowered_names(plan: &Plan) -> Option<String> {
    let names: Vec<String> = feature::unlowered(plan).iter().map(ToString::to_string).collect();
    (!names.is_empty()).then(|| names.join(" and "))
}

/// What the programs of a plan do in another way than it is planned, if anything: what is shown of them is not the
/// plan's.
pub fn unlowered(plan: &Plan) -> Option<String> {
    let names = unlowered_names(plan)?;
    let instead: Vec<&str> = feature::unlowered(plan).into_iter().filter_map(Feature::instead).collect();
    Some(format!("no program does {names} yet: programs {}", instead.join(" and ")))
}

/// Why the runtime of a plan's cluster cannot execute it, if it cannot, and what to do about it.
pub fn refused(plan: &Plan) -> Option<(String, String)> {
    let cluster = &plan.request.cluster;
    let target = match target_of(plan) {
        Ok(target) => target,
        Err(error) => return Some((error.to_string(), String::new())),
    };
    let missing = missing(plan, target);
    let list = |texts: Vec<String>, between: &str| texts.join(between);
    let names = list(missing.iter().map(ToString::to_string).collect(), " and ");
    let pins = list(missing.iter().map(|feature| feature.avoided_by().to_string()).collect(), ",");
    let message = format!("the runtime of `{cluster}` cannot execute {names} yet");
    if !missing.is_empty() {
        return Some((message, format!("plan again with --pin {pins}")));
    }
    let kernels = without_kernels(plan, target)?;
    let message = format!("the runtime of `{cluster}` has no kernel yet for {kernels}");
    Some((message, "CPU ranks run it: --cluster cpu:N".to_string()))
}

/// The operations for which the runtime of a plan's cluster has no kernel, each with the first node that
/// does it.
fn without_kernels(plan: &Plan, target: &dyn Target) -> Option<String> {
    let graph = &plan.graph;
    let mut first: BTreeMap<&str, String> = BTreeMap::new();
    for (id, node) in graph.nodes().filter(|(_, node)| !node.op.is_leaf()) {
        let (op, operands, results) = on_first_rank(plan, id);
        if target.has_kernel(&op, &operands, &results) {
            continue;
        }
        let value = node.results.first().map(ToString::to_string).unwrap_or_default();
        let path = if node.path.is_empty() { String::new() } else { format!(" of {}", node.path) };
        let on = operands.first().map_or(String::new(), |ty| format!(", on {ty}"));
        first.entry(node.op.name()).or_insert_with(|| format!("{value}{path}{on}"));
    }
    let texts: Vec<String> = first.iter().map(|(op, node)| format!("`{op}` ({node})")).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

/// How the plan was found, in two lines.
fn search_text(search: &Search, is_staged: bool) -> String {
    let Search { estimate, gap, stopped, meshes, pruned, candidates, lowered, .. } = search;
    let (gap, least) = (gap * 100.0, least(search, is_staged));
    format!(
        "search   estimated at {estimate}, within {gap:.2}% of the least that is possible{least}: {stopped}\n         \
         {} estimated, {lowered} lowered; {pruned} of {} left out as too slow\n",
        counted(*candidates, "plan"),
        if *meshes == 1 { "1 mesh".to_string() } else { format!("{meshes} meshes") },
    )
}

/// What is known of the least that is possible, in stages and without.
fn least(Search { bound, bound_of_others, .. }: &Search, is_staged: bool) -> String {
    let (own, other) = if is_staged { ("stages", "plan of one stage") } else { ("one stage", "pipeline") };
    let others = bound_of_others.map(|others| format!(", and no {other} takes less than {others}"));
    format!(" in {own}, {bound}{}", others.unwrap_or_default())
}

/// The categories of a rank's memory.
pub fn memory_rows(memory: &Memory) -> [(&'static str, shardc_ir::Bytes); 6] {
    [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer state", memory.optimizer),
        ("activations", memory.activations),
        ("buffers", memory.buffers),
        ("kept for running collectives, and gaps", memory.reserved),
    ]
}
