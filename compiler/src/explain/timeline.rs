//! The timeline of a step in the Trace Event Format, which Perfetto and `chrome://tracing` open.
//!
//! One process per class of ranks, one thread per stream, memory by category as counters, arrows from
//! sends to receives. Of many equal microbatches the first two and the last are written in full, the
//! others as one span each with the most that they hold, so that the file stays small. Measured steps can be written beside a
//! prediction: they are processes of their own.

use super::memory::{self, Moment};
use super::names::{name_of, role};
use super::{Inspection, collectives};
use crate::report;
use serde_json::{Value, json};
use shardc_ir::Program;
use shardc_ir::plan::{Category, Memory};
use shardc_ir::program::{Action, Stream};
use shardc_passes::allocate::memory_over_time;
use shardc_passes::simulate::{Rank, RunSpan};

/// The thread on which runs are shown, beside those of the streams.
const RUNS: usize = Stream::ALL.len();

/// The events of the predicted step. The process of a rank has its number after `first`, so that
/// measured ranks can stand before it.
pub fn events(inspection: &Inspection<'_>, first: u64) -> Vec<Value> {
    let mut events = Vec::new();
    for rank in &inspection.simulated.ranks {
        rank_events(inspection, rank, first + rank.rank, &mut events);
    }
    events
}

/// The whole file of a predicted step.
pub fn chrome_trace(inspection: &Inspection<'_>) -> String {
    let events = events(inspection, 0);
    let request = &inspection.plan.request;
    let mut other = json!({"model": request.model, "cluster": request.cluster, "plan": inspection.plan.choice});
    if let Some(unlowered) = report::unlowered(inspection.plan) {
        other["not_as_planned"] = unlowered.into();
    }
    // One event a line: the file stays readable, and a diff of two says something.
    let lines: Vec<String> = events.iter().map(Value::to_string).collect();
    format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{other},\"traceEvents\":[\n{}\n]}}\n", lines.join(",\n"))
}

fn rank_events(inspection: &Inspection<'_>, rank: &Rank, process: u64, events: &mut Vec<Value>) {
    let alike = if rank.count > 1 { format!(" and {} alike", rank.count - 1) } else { String::new() };
    let what = if report::unlowered(inspection.plan).is_some() { "programs, not as planned" } else { "predicted" };
    let name = format!("rank {}{alike}, {what}", rank.rank);
    let meta = |name: &str, tid: usize, args: Value| json!({"ph": "M", "pid": process, "tid": tid, "name": name, "args": args});
    events.push(meta("process_name", 0, json!({"name": name})));
    events.push(meta("process_sort_index", 0, json!({"sort_index": process})));
    let program = &inspection.programs[rank.program];
    let used = |stream: &Stream| program.instructions().any(|instruction| instruction.stream == *stream);
    for stream in Stream::ALL.into_iter().filter(used) {
        events.push(meta("thread_name", stream as usize, json!({"name": stream.name()})));
    }
    events.push(meta("thread_name", RUNS, json!({"name": "section"})));
    let repeats: Vec<&RunSpan> = rank.runs.iter().filter(|run| run.run.microbatch > 0).collect();
    let last = repeats.last().map_or(0, |run| run.run.microbatch);
    let (curve, mut before) = (memory_over_time(program), None);
    for run in &rank.runs {
        let section = &program.sections[run.run.section];
        let name = if last > 0 && section.name == "microbatch" {
            format!("{} {}", section.name, run.run.microbatch)
        } else {
            section.name.clone()
        };
        events.push(span(process, RUNS, &name, (run.start, run.finish), json!({})));
        let is_whole = run.run.microbatch < 2 || run.run.microbatch == last;
        if is_whole {
            run_events(inspection, program, (rank.rank, process), run, events);
        }
        let mut moments = memory::of_run(program, &curve, run);
        if !is_whole {
            let last = moments.last().copied();
            moments = memory::thin(moments, f64::INFINITY);
            moments.extend(last);
        }
        for Moment { at, memory } in moments {
            if before.replace(memory) != Some(memory) {
                events.push(counter(process, run.start + at, memory));
            }
        }
    }
    let (end, step) = (rank.finish(), inspection.simulated.step.0);
    if step > end {
        events.push(span(
            process,
            RUNS,
            "gaps between kernels, and waits for the slowest rank",
            (end, step),
            json!({}),
        ));
    }
}

fn counter(process: u64, at: f64, mut memory: Memory) -> Value {
    let parts = Category::ALL.map(|category| (category.name().to_string(), json!(memory.category(category).0)));
    let args = Value::Object(parts.into_iter().collect());
    json!({"ph": "C", "pid": process, "name": "device memory", "ts": micros(at), "args": args})
}

fn run_events(
    inspection: &Inspection<'_>,
    program: &Program,
    (rank, process): (u64, u64),
    run: &RunSpan,
    events: &mut Vec<Value>,
) {
    let graph = &inspection.plan.graph;
    let instructions = &program.sections[run.run.section].instructions;
    for one in run.spans.iter() {
        let instruction = &instructions[one.index as usize];
        let node = instruction.source.map(|id| graph.node(id));
        let what = collectives::label(inspection, program, &instruction.action);
        let module = node.map_or("", name_of);
        let mut args = json!({"module": module, "instruction": one.index});
        if let Some(node) = node {
            args["role"] = role(node.role).into();
        }
        if instruction.action.is_meeting() {
            args["bytes"] = collectives::bytes(program, instruction).0.into();
            args["ranks"] = collectives::members(program, &instruction.action).len().into();
            args["hidden_s"] = one.hidden.into();
            args["waited_s"] = (one.start - one.ready).into();
        }
        let times = (run.start + one.start, run.start + one.finish);
        events.push(span(process, instruction.stream as usize, &what, times, args));
        if let Action::Send { peer } | Action::Receive { peer } = instruction.action {
            let is_send = matches!(instruction.action, Action::Send { .. });
            let (from, to) = if is_send { (rank, peer) } else { (peer, rank) };
            // Messages between two ranks in one microbatch are told apart by their buffer's value.
            let id = format!("{from}>{to} {} {}", run.run.microbatch, micros(times.1));
            events.push(json!({
                "ph": if is_send { "s" } else { "f" }, "bp": "e", "cat": "message", "name": "message", "id": id,
                "pid": process, "tid": instruction.stream as usize, "ts": micros(times.0),
            }));
        }
    }
}

fn span(process: u64, thread: usize, name: &str, (start, finish): (f64, f64), args: Value) -> Value {
    // Both ends are rounded, so that what begins where this ends does not begin before.
    let (from, to) = (nanos(start), nanos(finish));
    let (ts, dur) = (from / 1e3, (to - from) / 1e3);
    json!({"ph": "X", "pid": process, "tid": thread, "name": name, "ts": ts, "dur": dur, "args": args})
}

/// Microseconds, to the nanosecond.
fn micros(seconds: f64) -> f64 {
    nanos(seconds) / 1e3
}

fn nanos(seconds: f64) -> f64 {
    (seconds * 1e9).round()
}
