//! Every collective of a step: what it moves, how long it takes, how much of that is hidden.

use super::Inspection;
use super::names::{folded_path, name_of, role};
use serde::Serialize;
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{BufferId, Bytes, Graph, Node, Program, Seconds};
use shardc_passes::simulate::{Rank, Span};
use std::collections::{BTreeMap, HashMap};

/// Collectives of one kind, over the same axes, of the same module in all equal blocks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The stage of a pipeline whose ranks take part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<u64>,
    /// `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`, `send`, `receive`.
    pub kind: &'static str,
    /// The axes, outermost first: `dp.tp`.
    pub over: String,
    /// The module, or the leaf, of its largest tensor.
    pub of: String,
    /// `forward`, `backward`, `optimizer`.
    pub role: &'static str,
    /// How many tensors go in one of them.
    pub tensors: usize,
    /// How many there are in a step.
    pub count: u64,
    /// The bytes of one of them, on one rank: the whole of what is gathered, reduced or exchanged.
    pub bytes: Bytes,
    /// The time of all of them.
    pub seconds: Seconds,
    /// Of it, what kernels hide.
    pub hidden: Seconds,
}

/// A rank of each program, one for each stage: of those that differ in nothing but how long they take, the one for which
/// the others wait.
pub(super) fn of_stages<'a>(inspection: &'a Inspection<'_>) -> impl Iterator<Item = (&'a Program, &'a Rank)> {
    let ranks = &inspection.simulated.ranks;
    let of = move |(index, program): (usize, &'a Program)| {
        let own = ranks.iter().filter(move |rank| rank.program == index);
        own.min_by(|a, b| a.waiting.0.total_cmp(&b.waiting.0)).map(|rank| (program, rank))
    };
    inspection.programs.iter().enumerate().filter_map(of)
}

/// What a rank runs in a step, with when.
pub(super) fn spans<'a>(program: &'a Program, rank: &'a Rank) -> impl Iterator<Item = (&'a Instruction, &'a Span)> {
    rank.runs.iter().flat_map(move |run| {
        let instructions = &program.sections[run.run.section].instructions;
        run.spans.iter().map(move |span| (&instructions[span.index as usize], span))
    })
}

/// The collectives of a rank of each stage, those that take longest first.
pub fn rows(inspection: &Inspection<'_>) -> Vec<Row> {
    let mut rows: BTreeMap<(u64, [String; 3], &str, usize, u64), Row> = BTreeMap::new();
    for (stage, (program, rank)) in (0u64..).zip(of_stages(inspection)) {
        let readers = first_readers(program);
        for (instruction, span) in spans(program, rank).filter(|(instruction, _)| instruction.action.is_meeting()) {
            let row = describe(inspection, program, instruction);
            let role = gathered_for(inspection, &readers, instruction).unwrap_or(row.role);
            let row = Row { stage: (inspection.programs.len() > 1).then_some(stage), role, ..row };
            let names = [row.kind.to_string(), row.over.clone(), row.of.clone()];
            let key = (stage, names, row.role, row.tensors, row.bytes.0);
            let known = rows.entry(key).or_insert(row);
            known.count += 1;
            known.seconds += Seconds(span.finish - span.start);
            known.hidden += Seconds(span.hidden);
        }
    }
    let mut rows: Vec<Row> = rows.into_values().collect();
    rows.sort_by(|a, b| b.seconds.0.total_cmp(&a.seconds.0));
    rows
}

/// Who reads each buffer first.
fn first_readers(program: &Program) -> HashMap<BufferId, &Instruction> {
    let mut readers = HashMap::new();
    for instruction in program.instructions() {
        instruction.operands.iter().for_each(|buffer| _ = readers.entry(*buffer).or_insert(instruction));
    }
    readers
}

/// The most steps that bring a gathered value into order.
const STEPS: usize = 4;

/// What a gather is for: what first reads what it makes, or what brings that into order. A parameter is gathered for the
/// backward pass as well as for the forward pass.
fn gathered_for(
    inspection: &Inspection<'_>,
    readers: &HashMap<BufferId, &Instruction>,
    gather: &Instruction,
) -> Option<&'static str> {
    if !matches!(gather.action, Action::AllGather { .. }) {
        return None;
    }
    let mut reader = gather;
    for _ in 0..STEPS {
        reader = reader.results.iter().find_map(|buffer| readers.get(buffer))?;
        if reader.source != gather.source {
            return reader.source.map(|id| role(inspection.plan.graph.node(id).role));
        }
    }
    None
}

/// What an instruction does, in a word or two: of a meeting of ranks, also over which axes.
pub(super) fn label(inspection: &Inspection<'_>, program: &Program, action: &Action) -> String {
    match action {
        Action::Feed { input } => format!("feed {}", program.inputs[*input].name),
        meeting if meeting.is_meeting() => format!("{} {}", meeting.name(), axes(inspection, program, meeting)),
        other => other.title(),
    }
}

/// The ranks that take part, this one's among them.
pub(super) fn members(program: &Program, action: &Action) -> Vec<u64> {
    match action {
        Action::Send { peer } | Action::Receive { peer } => vec![program.rank, *peer],
        other => other.group().map_or_else(|| vec![program.rank], |group| program.groups[group].clone()),
    }
}

/// The names of the axes over which an action communicates.
pub(super) fn axes(inspection: &Inspection<'_>, program: &Program, action: &Action) -> String {
    let mesh = &inspection.plan.mesh;
    let axes = mesh.axes_between(&members(program, action));
    axes.iter().map(|axis| mesh.axis(*axis).name()).collect::<Vec<_>>().join(".")
}

/// The bytes that an action moves or makes.
pub(super) fn bytes(program: &Program, instruction: &Instruction) -> Bytes {
    let size = |ids: &[shardc_ir::BufferId]| ids.iter().map(|id| program.buffers[*id].ty.bytes()).sum();
    match instruction.action {
        Action::AllGather { .. } | Action::Receive { .. } => size(&instruction.results),
        _ => size(&instruction.operands),
    }
}

/// The node whose value an instruction moves: of several that go in one, the largest value's.
fn largest<'a>(graph: &'a Graph, program: &Program, instruction: &Instruction) -> Option<&'a Node> {
    let all = if instruction.operands.is_empty() { &instruction.results } else { &instruction.operands };
    let of = |id: &BufferId| program.buffers[*id].value.map(|value| graph.def(value));
    // Of equal ones the first.
    let most = all.iter().rev().max_by_key(|id| program.buffers[**id].ty.bytes()).and_then(of);
    let own = instruction.source.map(|id| graph.node(id));
    if all.len() > 1 { most.or(own) } else { own }
}

fn describe(inspection: &Inspection<'_>, program: &Program, instruction: &Instruction) -> Row {
    let graph = &inspection.plan.graph;
    let node = largest(graph, program, instruction);
    Row {
        stage: None,
        kind: instruction.action.name(),
        over: axes(inspection, program, &instruction.action),
        of: node.map(|node| folded_path(name_of(node))).unwrap_or_default(),
        role: node.map_or("", |node| role(node.role)),
        tensors: instruction.operands.len().max(instruction.results.len()),
        count: 0,
        bytes: bytes(program, instruction),
        seconds: Seconds(0.0),
        hidden: Seconds(0.0),
    }
}
