//! `diff`: what two plans do differently.

use super::layers::{self, Row};
use super::names::{away, folded_path};
use super::stages;
use serde::Serialize;
use shardc_ir::plan::{Request, Scope};
use shardc_ir::units::number_text;
use shardc_ir::{Plan, Seconds};
use shardc_passes::cluster::{Cluster, Level};
use shardc_passes::deterministic::is_deterministic;
use std::collections::BTreeMap;
use std::fmt::Write;

/// One thing that two plans say differently; `None` where one of them says nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// `request`, `cluster`, `mesh`, `stages`, `choice`, `time`, `memory` or `layout`.
    pub part: &'static str,
    /// What of it: `batch`, `matrix products`, `blocks.*.mlp.gate matmul`.
    pub what: String,
    /// What the first plan says.
    pub first: Option<String>,
    /// What the second plan says.
    pub second: Option<String>,
}

/// Everything that two plans say differently.
pub fn differences(a: &Plan, b: &Plan) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut compare = |part: &'static str, what: &str, first: String, second: String| {
        if first != second {
            let what = what.to_string();
            found.push(Difference { part, what, first: Some(first), second: Some(second) });
        }
    };
    for ((what, first), (_, second)) in request(a).into_iter().zip(request(b)) {
        compare("request", what, first, second);
    }
    for (what, first, second) in figures(a, b) {
        compare("cluster", &what, first, second);
    }
    let axes =
        |plan: &Plan| -> BTreeMap<String, u64> { plan.mesh.axes.iter().map(|axis| (axis.name(), axis.size)).collect() };
    let (first, second) = (axes(a), axes(b));
    for name in first.keys().chain(second.keys().filter(|name| !first.contains_key(*name))) {
        let size = |axes: &BTreeMap<String, u64>| axes.get(name).copied().unwrap_or(1).to_string();
        compare("mesh", name, size(&first), size(&second));
    }
    // The same axes in another order lie over other links.
    if first.keys().eq(second.keys()) {
        let order = |plan: &Plan| plan.mesh.axes.iter().map(|axis| axis.name()).collect::<Vec<_>>().join(",");
        compare("mesh", "order", order(a), order(b));
    }
    for (what, first, second) in stages(a, b) {
        compare("stages", &what, first, second);
    }
    let schedule = |plan: &Plan| if plan.stages() > 1 { plan.pipeline.schedule.name() } else { "none" }.to_string();
    compare("stages", "schedule", schedule(a), schedule(b));
    compare("choice", "plan", a.choice.clone(), b.choice.clone());
    let reduced = |plan: &Plan| if plan.reduce_in_loop { "in every microbatch" } else { "once a step" }.to_string();
    compare("choice", "gradients are reduced", reduced(a), reduced(b));
    for ((what, first), (_, second)) in times(a).into_iter().zip(times(b)) {
        compare("time", what, first.to_string(), second.to_string());
    }
    let memory = |plan: &Plan| {
        let memory = &plan.prediction.memory;
        let host = ("of a host", plan.prediction.host);
        crate::report::memory_rows(memory).into_iter().chain([("in all", memory.total()), host]).collect::<Vec<_>>()
    };
    for ((what, first), (_, second)) in memory(a).into_iter().zip(memory(b)) {
        compare("memory", what, first.to_string(), second.to_string());
    }
    found.extend(layouts(a, b));
    found
}

/// What was asked for: every field of the request, and what of it the graph alone says.
fn request(plan: &Plan) -> [(&'static str, String); 11] {
    let Request { model, cluster, batch, seq, precision, reduce_dtype, device_memory, host_memory, pins, scope } =
        &plan.request;
    let scope = match scope {
        Scope::Runnable => "runnable",
        Scope::All => "all",
    };
    [
        ("model", model.clone()),
        ("cluster", cluster.clone()),
        ("batch", batch.to_string()),
        ("seq", seq.to_string()),
        ("precision", precision.clone()),
        ("reduce dtype", reduce_dtype.map_or("f32".to_string(), |dtype| dtype.to_string())),
        ("deterministic", if is_deterministic(&plan.graph) { "yes" } else { "no" }.to_string()),
        ("device memory", device_memory.to_string()),
        ("host memory", host_memory.to_string()),
        ("pins", pins.clone()),
        ("search", scope.to_string()),
    ]
}

/// What the clusters have: the figures, where they have devices of the same names, else these.
fn figures(a: &Plan, b: &Plan) -> Vec<(String, String, String)> {
    let [Ok(first), Ok(second)] = [a, b].map(Cluster::of) else { return Vec::new() };
    let beyond = |of: &Cluster| {
        let level = |level: &Level| {
            let Level { name, nodes, bandwidth, latency } = level;
            format!("{name}s of {nodes}, {} B/s, {} s", number_text(*bandwidth), number_text(*latency))
        };
        of.levels.iter().map(level).collect::<Vec<_>>().join("; ")
    };
    let mut rows = vec![
        ("devices".to_string(), first.shape(), second.shape()),
        ("beyond the node".to_string(), beyond(&first), beyond(&second)),
    ];
    let pairs = first.devices().into_iter().zip(second.devices());
    for (device, other) in pairs.filter(|(device, other)| device.name == other.name) {
        for ((name, one), (_, other)) in device.figures().into_iter().zip(other.figures()) {
            rows.push((format!("{name} of {}", device.name), number_text(one.value), number_text(other.value)));
        }
    }
    rows
}

/// What the chunks run, where one of the plans has stages.
fn stages(a: &Plan, b: &Plan) -> Vec<(String, String, String)> {
    let [first, second] = [a, b].map(stages::rows);
    let text = |rows: &[stages::Row], chunk: usize| {
        let of = |row: &stages::Row| format!("stage {}, {} to {}", row.stage, row.modules[0], row.modules[1]);
        rows.get(chunk).map_or("not there".to_string(), of)
    };
    let count = first.len().max(second.len());
    (0..count).map(|chunk| (format!("chunk {chunk}"), text(&first, chunk), text(&second, chunk))).collect()
}

fn times(plan: &Plan) -> [(&'static str, Seconds); 8] {
    let prediction = &plan.prediction;
    [
        ("step", prediction.step),
        ("matrix products and attention", prediction.matmul),
        ("bound by memory or launches", prediction.memory_bound),
        ("communication that nothing hides, and what it slows", prediction.exposed_communication),
        ("communication in all", prediction.communication),
        ("the optimizer", prediction.optimizer),
        ("gaps, and waits for the slowest rank", prediction.rest()),
        ("waits for other stages", prediction.bubble),
    ]
}

/// The layouts that differ, by module; values of one name and operation are told apart by their order. What one plan
/// does in one block alone is compared with what the other does in all of them.
fn layouts(a: &Plan, b: &Plan) -> Vec<Difference> {
    let (first, second) = (keyed(layers::rows(a)), keyed(layers::rows(b)));
    let is_there = |rows: &[Keyed], key: &str| rows.iter().any(|of| of.key == key);
    let of = |rows: &[Keyed], keyed: &Keyed| {
        let own = |key: &str| rows.iter().find(|of| of.key == key);
        own(&keyed.key).or_else(|| own(&keyed.of_all)).map(|of| text(&of.row))
    };
    let is_apart = |rows: &[Keyed], key: &str| !is_there(rows, key) && rows.iter().any(|of| of.of_all == key);
    let only_second = second.iter().filter(|of| !is_there(&first, &of.key));
    // What the other plan does block by block is compared block by block.
    let all = first.iter().chain(only_second).filter(|of| !is_apart(&first, &of.key) && !is_apart(&second, &of.key));
    let both = all.map(|keyed| {
        let what = keyed.key.clone();
        (&keyed.of_all, Difference { part: "layout", what, first: of(&first, keyed), second: of(&second, keyed) })
    });
    let differ: Vec<(&String, Difference)> = both.filter(|(_, of)| of.first != of.second).collect();
    // A block that differs as all the others do says nothing of its own.
    let of_all = differ.iter().filter(|(of_all, of)| **of_all == of.what);
    let known: BTreeMap<&str, &Difference> = of_all.map(|(_, of)| (of.what.as_str(), of)).collect();
    let is_same = |a: &Difference, b: &Difference| (&a.first, &a.second) == (&b.first, &b.second);
    let is_said =
        |of_all: &str, of: &Difference| of.what != of_all && known.get(of_all).is_some_and(|all| is_same(all, of));
    differ.iter().filter(|(of_all, of)| !is_said(of_all, of)).map(|(_, of)| of.clone()).collect()
}

/// A row, and what tells it from the others of its plan.
struct Keyed {
    key: String,
    /// The same where it is alike in all blocks.
    of_all: String,
    row: Row,
}

fn keyed(rows: Vec<Row>) -> Vec<Keyed> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let keyed = |row: Row| {
        let text = |name: &str| format!("{name} {}", row.op).trim().to_string();
        let [name, of_all] = [text(&row.name), text(&folded_path(&row.name))];
        let number = seen.entry(name.clone()).or_default();
        *number += 1;
        let nth = if *number > 1 { format!(" #{number}") } else { String::new() };
        Keyed { key: name + &nth, of_all: of_all + &nth, row }
    };
    rows.into_iter().map(keyed).collect()
}

/// The layout without the size of the batch, which differs where the request does.
fn text(row: &Row) -> String {
    let strategy = if row.strategy.is_empty() { "whole" } else { &row.strategy };
    let space = away(row.space).map_or(String::new(), |place| format!(" in {place}"));
    let kept = if row.transient { ", gathered at each use" } else { "" };
    format!("{}{space} ({strategy}{kept})", row.layout)
}

/// Differences as text, by parts.
pub fn text_of(found: &[Difference]) -> String {
    if found.is_empty() {
        return "the plans say the same\n".to_string();
    }
    let of = |side: &Option<String>| match side {
        Some(side) if side.is_empty() => "nothing".to_string(),
        Some(side) => side.clone(),
        None => "not there".to_string(),
    };
    let rows: Vec<(&Difference, String, String)> =
        found.iter().map(|difference| (difference, of(&difference.first), of(&difference.second))).collect();
    let is_short = |(difference, first, second): &&(&Difference, String, String)| {
        first.len() + second.len() + difference.what.len() < 90
    };
    let width = rows.iter().filter(is_short).map(|row| row.0.what.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    let mut part = "";
    for row in &rows {
        let (difference, first, second) = row;
        if difference.part != part {
            part = difference.part;
            let _ = writeln!(text, "{part}");
        }
        if is_short(&row) {
            let _ = writeln!(text, "  {:width$}  {first} -> {second}", difference.what);
        } else {
            let _ = writeln!(text, "  {}\n    {first}\n    -> {second}", difference.what);
        }
    }
    text
}
