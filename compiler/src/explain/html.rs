//! The report: one self-contained page, with the data of an [`Inspection`] as compressed JSON.
//!
//! `report.html` is the page; it reads the JSON (zlib, RFC 1950, in base64) and draws. Whatever repeats is written once: equal
//! blocks are one value with a count, equal microbatches one list of spans, names one table, what values have in common
//! one entry of a column, memory its changes. So the page of a model with hundreds of layers on thousands of ranks stays
//! small.

use super::names::{folded_nodes, folded_path, layout, local, name_of, role, stage_of};
use super::{Inspection, collectives, memory, sensitivity, text, value};
use crate::error::Error;
use crate::report;
use base64::prelude::{BASE64_STANDARD, Engine};
use flate2::Compression;
use flate2::read::ZlibEncoder;
use serde_json::{Value, json};
use shardc_ir::ops::Update;
use shardc_ir::program::Stream;
use shardc_ir::{NodeId, Op, OpDef, Plan, Program, SectionId, ValueId};
use shardc_passes::allocate::memory_over_time;
use shardc_passes::cost::is_view;
use shardc_passes::fold::{Folded, leaf_name};
use shardc_passes::simulate::{Rank, RunSpan, Span};
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::rc::Rc;

const PAGE: &str = include_str!("report.html");
/// Where the data goes.
const PLACE: &str = "__DATA__";
/// The most points of a memory curve of one section.
const POINTS: usize = 1200;

/// The page.
///
/// # Errors
/// A plan that does not divide over its cluster.
pub fn page(inspection: &Inspection<'_>) -> Result<String, Error> {
    let data = data(inspection)?.to_string();
    let mut packed = Vec::new();
    let whole = ZlibEncoder::new(data.as_bytes(), Compression::best()).read_to_end(&mut packed);
    whole.map_err(|error| Error::Bug(error.to_string()))?;
    Ok(PAGE.replacen(PLACE, &BASE64_STANDARD.encode(&packed), 1))
}

/// Strings by their numbers, in the order of their first use.
#[derive(Default)]
struct Names {
    numbers: HashMap<String, usize>,
    list: Vec<String>,
}

impl Names {
    fn of(&mut self, name: &str) -> usize {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        self.numbers.insert(name.to_string(), self.list.len());
        self.list.push(name.to_string());
        self.list.len() - 1
    }
}

fn data(inspection: &Inspection<'_>) -> Result<Value, Error> {
    let plan = inspection.plan;
    let mut names = Names::default();
    let folded = folded_nodes(plan);
    let values = values(inspection, &folded)?;
    let (sections, ranks) = ranks(inspection, &mut names);
    let tokens = plan.request.batch * plan.request.seq.max(1);
    let axis = |axis: &shardc_ir::mesh::Axis| json!({"name": axis.name(), "size": axis.size, "time": axis.family.is_time(), "family": axis.family.name()});
    Ok(json!({
        "request": plan.request,
        "choice": plan.choice,
        "hash": plan.hash(),
        "shardc": env!("CARGO_PKG_VERSION"),
        "mesh": plan.mesh.axes.iter().map(axis).collect::<Vec<_>>(),
        "per_node": inspection.cluster.per_node,
        "world": plan.mesh.ranks(),
        "stages": plan.stages(),
        "prediction": plan.prediction,
        "simulated": inspection.simulated.step,
        "not_as_planned": report::unlowered(plan),
        "tokens_per_s": tokens as f64 / plan.prediction.step.0,
        "alternatives": plan.alternatives,
        "search": plan.search,
        "collectives": collectives::rows(inspection),
        "sensitivity": sensitivity::sensitivity(inspection)?,
        "values": columns(&values),
        "sections": sections,
        "ranks": ranks,
        "class_of": run_lengths(&inspection.simulated.class_of),
        "streams": Stream::ALL.map(Stream::name),
        "names": names.list,
    }))
}

/// Rows with the same fields by field: each different entry once, and of each row the number of its own. Rows that have no
/// entry in common are the entries in their order.
fn columns(rows: &[Value]) -> Value {
    let fields = rows.first().and_then(Value::as_object).into_iter().flat_map(|row| row.keys());
    let column = |field: &String| {
        let (mut numbers, mut entries) = (HashMap::new(), Vec::new());
        let number = |row: &Value| {
            *numbers.entry(row[field].to_string()).or_insert_with(|| {
                entries.push(row[field].clone());
                entries.len() - 1
            })
        };
        let of: Vec<usize> = rows.iter().map(number).collect();
        let all_differ = entries.len() == rows.len();
        (field.clone(), if all_differ { json!([entries]) } else { json!([entries, of]) })
    };
    Value::Object(fields.map(column).collect())
}

/// `[value, how often]`, for lists that repeat themselves.
fn run_lengths(list: &[usize]) -> Vec<[usize; 2]> {
    let mut runs: Vec<[usize; 2]> = Vec::new();
    for item in list {
        match runs.last_mut() {
            Some([value, count]) if value == item => *count += 1,
            _ => runs.push([*item, 1]),
        }
    }
    runs
}

/// Seconds a step spends on the kernels, and on the collectives, of each class of nodes, on a rank of each stage. Of a
/// collective of several values each has as much as it has of the bytes.
fn times(inspection: &Inspection<'_>, folded: &Folded) -> BTreeMap<usize, [f64; 2]> {
    let graph = &inspection.plan.graph;
    let mut times: BTreeMap<usize, [f64; 2]> = BTreeMap::new();
    for (program, rank) in collectives::of_stages(inspection) {
        for (instruction, span) in collectives::spans(program, rank) {
            let Some(source) = instruction.source else { continue };
            let seconds = span.finish - span.start;
            if !instruction.stream.is_wire() {
                times.entry(folded.class[source]).or_default()[0] += seconds;
                continue;
            }
            let buffers = instruction.results.iter().map(|result| &program.buffers[*result]);
            let known = buffers.filter_map(|buffer| Some((graph.value(buffer.value?).def, buffer.ty.bytes().0 as f64)));
            let mut parts: Vec<(NodeId, f64)> = known.collect();
            if parts.len() < 2 {
                parts = vec![(source, 1.0)];
            }
            let all = parts.iter().map(|(_, bytes)| bytes).sum::<f64>().max(1.0);
            for (node, bytes) in parts {
                times.entry(folded.class[node]).or_default()[1] += seconds * bytes / all;
            }
        }
    }
    times
}

/// Every kind of value, with why it lies as it does.
fn values(inspection: &Inspection<'_>, folded: &Folded) -> Result<Vec<Value>, Error> {
    let plan = inspection.plan;
    let graph = &plan.graph;
    let is_shown = |node: NodeId| {
        let op = &graph.node(node).op;
        op.is_leaf() || !is_view(op)
    };
    let classes: Vec<usize> = (0..folded.classes.len()).filter(|class| is_shown(folded.classes[*class].node)).collect();
    let firsts: Vec<ValueId> =
        classes.iter().flat_map(|class| graph.node(folded.classes[*class].node).results.clone()).collect();
    let explained = value::explain(plan, &inspection.cluster, &firsts)?;
    let number: BTreeMap<ValueId, usize> = firsts.iter().enumerate().map(|(at, value)| (*value, at)).collect();
    let times = times(inspection, folded);
    // What a class reads, through views, as the numbers of the values.
    let seen_through = |mut value: ValueId| loop {
        let def = graph.value(value).def;
        match graph.node(def) {
            node if !node.op.is_leaf() && is_view(&node.op) && !node.operands.is_empty() => value = node.operands[0],
            _ => break value,
        }
    };
    let shown = |value: ValueId| {
        let value = seen_through(value);
        let (def, index) = (graph.value(value).def, graph.value(value).index);
        number.get(&graph.node(folded.classes[folded.class[def]].node).results[index]).copied()
    };
    let mut list = Vec::new();
    for (value, why) in firsts.iter().zip(explained) {
        let def = graph.value(*value).def;
        let node = graph.node(def);
        let class = &folded.classes[folded.class[def]];
        let (sharding, time) = (plan.sharding(*value), times.get(&folded.class[def]).copied().unwrap_or_default());
        let reads: Vec<usize> = node.operands.iter().filter_map(|value| shown(*value)).collect();
        let is_first = graph.value(*value).index == 0;
        list.push(json!({
            "id": why.value,
            "module": folded_module(plan, class.members.len(), def),
            "op": why.op,
            "name": why.name.unwrap_or_default(),
            "role": why.role,
            "stage": stage_of(plan, def),
            "dtype": graph.ty(*value).dtype.to_string(),
            "shape": graph.ty(*value).shape,
            "dims": sharding.dims.iter().map(|axes| axes.iter().map(|axis| axis.0).collect()).collect::<Vec<Vec<u8>>>(),
            "partial": sharding.partial_text(&plan.mesh),
            "partial_axes": sharding.partial.iter().map(|(axis, _)| axis.0).collect::<Vec<_>>(),
            "layout": layout(plan, *value),
            "strategy": plan.rule(def).strategy_text(&plan.strategies[def], &plan.mesh),
            "bytes": local(plan, *value).bytes(),
            "alike": class.members.len(),
            "seconds": if is_first { time[0] } else { 0.0 },
            "communication": if is_first { time[1] } else { 0.0 },
            "reads": reads,
            "reasons": why.reasons,
            "options": why.alternatives.iter().map(|option| json!([option.axis, option.choice, option.is_chosen, option.cost, option.layout, option.plan])).collect::<Vec<_>>(),
        }));
    }
    Ok(list)
}

/// The module under which a node is shown. A leaf lies in the module that its name says.
fn folded_module(plan: &Plan, alike: usize, node: NodeId) -> String {
    let node = plan.graph.node(node);
    let path = match &node.op {
        Op::Parameter(_) | Op::State(_) => leaf_name(&node.op).rsplit_once('.').map_or("", |(module, _)| module),
        op if op.update().is_some() => {
            let parameter = plan.graph.def(node.operands[Update::PARAMETER]);
            name_of(parameter).rsplit_once('.').map_or("", |(module, _)| module)
        }
        _ => &node.path,
    };
    if alike > 1 { folded_path(path) } else { path.to_string() }
}

/// The spans and memory of every distinct run, and the runs of every class of ranks: what they show, when,
/// for which microbatch, and of which section.
fn ranks(inspection: &Inspection<'_>, names: &mut Names) -> (Vec<Value>, Vec<Value>) {
    let mut sections: Vec<Value> = Vec::new();
    // Sections that are nearly equal are one, whatever they are called: those of the microbatches in flight are.
    let mut alike: HashMap<(Vec<u64>, Vec<u64>), Vec<Known>> = HashMap::new();
    let mut ranks = Vec::new();
    for rank in &inspection.simulated.ranks {
        let program = &inspection.programs[rank.program];
        let curve = memory_over_time(program);
        let mut known: HashMap<(*const Vec<Span>, SectionId), usize> = HashMap::new();
        let mut runs = Vec::new();
        for run in &rank.runs {
            let number = *known.entry((Rc::as_ptr(&run.spans), run.run.section)).or_insert_with(|| {
                let section = section(inspection, program, &curve, run, names);
                let alike = alike.entry((section.what, section.held)).or_default();
                let near = NEAR * (run.finish - run.start) * 1e9;
                let is_near =
                    |times: &[u64]| times.iter().zip(&section.times).all(|(a, b)| a.abs_diff(*b) as f64 <= near);
                let found = alike.iter().find(|(times, _)| is_near(times)).map(|(_, number)| *number);
                found.unwrap_or_else(|| {
                    sections.push(section.text);
                    alike.push((section.times, sections.len() - 1));
                    sections.len() - 1
                })
            });
            let name = names.of(pass_of(&program.sections[run.run.section].name));
            runs.push(json!([number, nanos(run.start), run.run.microbatch, name]));
        }
        ranks.push(json!({
            "rank": rank.rank,
            "count": rank.count,
            "runs": runs,
            "busy": rank.busy,
            "communication": rank.communication,
            "exposed": rank.exposed_communication,
            "waiting": rank.waiting,
            "idle": text::idle(rank, inspection.simulated.step),
            "finish": nanos(finish(rank)),
        }));
    }
    (sections, ranks)
}

/// `backward.3` of `backward.3.1.17`: the pass and the chunk, without the copy and what is sent beside.
fn pass_of(section: &str) -> &str {
    let mut dots = section.match_indices('.').map(|(at, _)| at);
    let first = dots.next();
    match section.split('.').next() {
        Some("exchange") => &section[..first.unwrap_or(section.len())],
        _ => &section[..dots.next().unwrap_or(section.len())],
    }
}

fn finish(rank: &Rank) -> f64 {
    rank.runs.last().map_or(0.0, |run| run.finish)
}

fn nanos(seconds: f64) -> u64 {
    (seconds.max(0.0) * 1e9).round() as u64
}

/// Runs of the same instructions are shown as one where no time of kernels and collectives in them differs by more than this
/// share of the run: messages beside them come earlier or later in each.
const NEAR: f64 = 0.04;

/// The times of a section that is on the page, and its number.
type Known = (Vec<u64>, usize);

/// One run of a section: its spans, flat, and its memory, thinned.
struct SectionOfPage {
    text: Value,
    /// What its spans show, in their order of instructions, and the least and the most of memory.
    what: Vec<u64>,
    held: Vec<u64>,
    /// How long it takes, and per instruction but messages, when it begins and how long it takes.
    times: Vec<u64>,
}

fn section(
    inspection: &Inspection<'_>,
    program: &Program,
    curve: &[(usize, shardc_ir::plan::Memory)],
    run: &RunSpan,
    names: &mut Names,
) -> SectionOfPage {
    let graph = &inspection.plan.graph;
    let section = &program.sections[run.run.section];
    let mut flat: Vec<u64> = Vec::with_capacity(run.spans.len() * 6);
    for span in run.spans.iter() {
        let instruction = &section.instructions[span.index as usize];
        let what = collectives::label(inspection, program, &instruction.action);
        let node = instruction.source.map(|id| graph.node(id));
        let module = node.map(|node| format!("{} {}", name_of(node), role(node.role))).unwrap_or_default();
        flat.extend([
            instruction.stream as u64,
            names.of(&what) as u64,
            names.of(&module) as u64,
            nanos(span.start),
            nanos(span.finish) - nanos(span.start),
            nanos(span.hidden),
        ]);
    }
    let length = nanos(run.finish - run.start);
    let moments = memory::thin(memory::of_run(program, curve, run), length as f64 / 1e9 / POINTS as f64);
    let memory = changes(&moments);
    let totals = || moments.iter().map(|moment| moment.memory.total().0);
    let held = vec![totals().min().unwrap_or(0), totals().max().unwrap_or(0)];
    let mut in_order: Vec<(u32, &[u64])> = run.spans.iter().map(|span| span.index).zip(flat.chunks(6)).collect();
    in_order.sort_unstable_by_key(|(index, _)| *index);
    let what = in_order.iter().flat_map(|(_, span)| span[..3].iter().copied()).collect();
    let of_rank = in_order.iter().filter(|(_, span)| span[0] != Stream::Messages as u64);
    let times = std::iter::once(length).chain(of_rank.flat_map(|(_, span)| [span[3], span[4]])).collect();
    SectionOfPage { what, held, times, text: json!({"length": length, "spans": flat, "memory": memory}) }
}

/// What changes, flat: nanoseconds since the change before, the part of memory, and by how many bytes it grows. The parts
/// that there are at first grow from nothing.
fn changes(moments: &[memory::Moment]) -> Vec<i64> {
    let (mut changes, mut before, mut held) = (Vec::new(), 0, [0; 5]);
    for moment in moments {
        let (at, memory) = (nanos(moment.at) as i64, moment.memory);
        let parts = [memory.parameters, memory.optimizer, memory.gradients, memory.activations, memory.buffers];
        for (part, bytes) in parts.map(|bytes| bytes.0 as i64).into_iter().enumerate() {
            if bytes != held[part] {
                changes.extend([at - before, part as i64, bytes - held[part]]);
                (before, held[part]) = (at, bytes);
            }
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::Bytes;
    use shardc_ir::plan::Memory;

    #[test]
    fn rows_are_written_by_field() {
        let row = |id: &str, stage: u64| json!({"id": id, "stage": stage});
        let rows = [row("%1", 0), row("%2", 3), row("%3", 0)];
        assert_eq!(columns(&rows), json!({"id": [["%1", "%2", "%3"]], "stage": [[0, 3], [0, 1, 0]]}));
        assert_eq!(columns(&[]), json!({}));
    }

    #[test]
    fn memory_is_the_sum_of_its_changes() {
        let moment = |at: f64, parameters: u64, buffers: u64| memory::Moment {
            at: at * 1e-9,
            memory: Memory { parameters: Bytes(parameters), buffers: Bytes(buffers), ..Memory::default() },
        };
        let moments = [moment(0.0, 8, 2), moment(5.0, 8, 7), moment(6.0, 8, 7), moment(9.0, 3, 0)];
        assert_eq!(changes(&moments), [0, 0, 8, 0, 4, 2, 5, 4, 5, 4, 0, -5, 0, 4, -7]);
    }
}
