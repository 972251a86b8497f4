//! Everything about a graph that the search needs and that no mesh changes.

use super::batch::{batch_choices, in_loop};
use super::layout::Lies;
use super::local::AllLocals;
use super::share::{Share, emitted};
use super::tensor::{Flow, Prepared};
use crate::fold::{Blocks, Folded, fold};
use crate::head::Head;
use crate::search::estimate::liveness::Lives;
use crate::search::estimate::recompute::kinds as kinds_of;
use shardc_ir::factor::{Dims, FactorRule};
use shardc_ir::ops::{Op, OpDef, Update};
use shardc_ir::plan::Scope;
use shardc_ir::{Choice, EntityRef, Graph, NodeId, SecondaryMap, Target, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Prepares a training step for the search. `batch` is the number of sequences in dimension 0 of the inputs.
pub fn prepare<'a>(graph: &'a Graph, batch: u64, target: &'a dyn Target) -> Prepared<'a> {
    let folded = fold(graph);
    let rules: Vec<_> = folded.classes.iter().map(|class| graph.rule(class.node)).collect();
    let choices = batch_choices(graph, &folded, &rules, batch);
    let in_loop = in_loop(graph, &choices, batch);
    let key = |id: NodeId| match choices[id] {
        Choice::Replicate => (0, usize::from(in_loop[id])),
        Choice::Factor(factor) => (1, factor),
        Choice::Pass(set) => (2, set),
    };
    let folded = folded.split(key);
    let nodes = || folded.classes.iter().map(|class| class.node);
    let in_loop = nodes().map(|node| in_loop[node]).collect();
    let rules: Vec<_> = nodes().map(|node| graph.rule(node)).collect();
    let batch = nodes().map(|node| choices[node]).collect();
    let parameters = parameter_values(graph);
    let gradients = gradient_values(graph);
    let results = |node: NodeId| graph.node(node).results.iter();
    let is_parameter = nodes().map(|node| results(node).all(|value| parameters.contains(value))).collect();
    let is_gradient = nodes().map(|node| results(node).any(|value| gradients.contains(value))).collect();
    let weight: Vec<_> = nodes().map(|node| weight(graph, node, &parameters, &gradients)).collect();
    let tied = ties(graph, &folded);
    let emitted = emitted(graph, &folded, target);
    let flows = flows(graph, &folded, &emitted);
    let experts = experts(graph, &folded, &rules, &weight);
    let head = Head::find(graph);
    let (lives, kinds) = (Lives::default(), Vec::new());
    let mut prepared = Prepared {
        graph,
        target,
        scope: Scope::Runnable,
        reduce_dtype: None,
        blocks: Blocks::new(graph),
        lies: rules.iter().map(|rule| Lies::of(rule)).collect(),
        rules,
        batch,
        in_loop,
        tied,
        weight,
        experts,
        is_parameter,
        is_gradient,
        is_late: SecondaryMap::new(),
        flows,
        folded,
        head,
        lives,
        kinds,
        emitted,
        locals: AllLocals::default(),
    };
    prepared.is_late = late(&prepared);
    prepared.lives = Lives::new(&prepared);
    prepared.kinds = kinds_of(&prepared);
    prepared
}

/// The operand of a product that is a parameter's matrix, or its result (`true`) that is the gradient of one.
fn weight(
    graph: &Graph,
    id: NodeId,
    parameters: &BTreeSet<ValueId>,
    gradients: &BTreeSet<ValueId>,
) -> Option<(bool, usize)> {
    let node = graph.node(id);
    if !matches!(
        node.op,
        Op::Matmul(_)
            | Op::ScaledMatmul(_)
            | Op::Embedding(_)
            | Op::EmbeddingGrad(_)
            | Op::Convolution(_)
            | Op::ConvolutionTranspose(_)
            | Op::ConvolutionFilterGrad(_)
    ) {
        return None;
    }
    let matrix = |values: &[ValueId], of: &BTreeSet<ValueId>| {
        values.iter().position(|value| of.contains(value) && graph.ty(*value).rank() >= 2)
    };
    let operand = matrix(&node.operands, parameters).map(|index| (false, index));
    operand.or_else(|| matrix(&node.results, gradients).map(|index| (true, index)))
}

/// The nodes of the loop that only updates wait for.
fn late(prepared: &Prepared<'_>) -> SecondaryMap<NodeId, bool> {
    let graph = prepared.graph;
    let (mut is_late, mut is_read): (SecondaryMap<NodeId, bool>, SecondaryMap<NodeId, bool>) = Default::default();
    for (id, node) in graph.nodes().rev().filter(|(id, _)| prepared.in_loop(prepared.folded.class[*id])) {
        is_late[id] = prepared.is_gradient[prepared.folded.class[id]] && !is_read[id];
        if !is_late[id] {
            node.operands.iter().for_each(|value| is_read[graph.value(*value).def] = true);
        }
    }
    is_late
}

/// Per class, the factors that tell experts apart. A product that has a matrix for each expert holds the
/// factor in all that it reads and makes; from there it is followed back to where the parameter is stored
/// and updated.
fn experts(
    graph: &Graph,
    folded: &Folded,
    rules: &[&FactorRule],
    weight: &[Option<(bool, usize)>],
) -> Vec<BTreeSet<usize>> {
    let held = |dims: &Dims, factor: usize| dims.iter().any(|factors| factors.first() == Some(&factor));
    let mut experts = vec![BTreeSet::new(); rules.len()];
    // Per value, the dimensions that tell experts apart.
    let mut dims: BTreeMap<ValueId, BTreeSet<usize>> = BTreeMap::new();
    let along = |held: &Dims, factors: &BTreeSet<usize>| -> BTreeSet<usize> {
        let is_held = |dim: &usize| held[*dim].first().is_some_and(|factor| factors.contains(factor));
        (0..held.len()).filter(is_held).collect()
    };
    let of = |held: &Dims, dims: &BTreeSet<usize>| -> BTreeSet<usize> {
        dims.iter().filter_map(|dim| held[*dim].first().copied()).collect()
    };
    for (class, rule) in rules.iter().enumerate() {
        let Some((is_result, index)) = weight[class] else { continue };
        let node = graph.node(folded.classes[class].node);
        let all = || rule.operands.iter().chain(&rule.results);
        experts[class] = (0..rule.factors.len()).filter(|factor| all().all(|dims| held(dims, *factor))).collect();
        let weight = if is_result { node.results[index] } else { node.operands[index] };
        let own = if is_result { &rule.results[index] } else { &rule.operands[index] };
        dims.entry(weight).or_default().extend(along(own, &experts[class]));
    }
    let parameters = parameter_values(graph);
    for (id, node) in graph.nodes().rev() {
        let Some(known) = node.results.first().and_then(|value| dims.get(value)).filter(|dims| !dims.is_empty()) else {
            continue;
        };
        if parameters.contains(&node.results[0]) {
            let (class, rule) = (folded.class[id], &rules[folded.class[id]]);
            experts[class] = of(&rule.results[0], known);
            for (index, value) in node.operands.iter().enumerate() {
                let found = along(&rule.operands[index], &experts[class]);
                dims.entry(*value).or_default().extend(found);
            }
        }
    }
    for (id, node) in graph.updates() {
        let (class, rule) = (folded.class[id], &rules[folded.class[id]]);
        let known = dims.get(&node.operands[Update::PARAMETER]).cloned().unwrap_or_default();
        experts[class] = of(&rule.operands[Update::PARAMETER], &known);
    }
    experts
}

/// Parameters and what is made of one parameter alone: casts, reshapes, transposes, padding, and in 8 bits.
pub fn parameter_values(graph: &Graph) -> BTreeSet<ValueId> {
    let mut values = BTreeSet::new();
    for (_, node) in graph.nodes() {
        let shape = matches!(
            node.op,
            Op::Cast(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Pad(_) | Op::QuantizationScale(_) | Op::Quantize(_)
        );
        let copy = shape && node.operands.iter().all(|value| values.contains(value));
        if copy || matches!(node.op, Op::Parameter(_)) {
            values.extend(node.results.iter().copied());
        }
    }
    values
}

/// What updates read as gradients, and what those are made of by casts, views and sums.
fn gradient_values(graph: &Graph) -> BTreeSet<ValueId> {
    let mut values = BTreeSet::new();
    for (_, node) in graph.nodes().rev() {
        if node.op.update().is_some() {
            values.insert(node.operands[Update::GRADIENT]);
        }
        let linear = matches!(
            node.op,
            Op::Cast(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) | Op::Binary(_) | Op::Affine(_)
        );
        if linear && node.results.iter().any(|value| values.contains(value)) {
            values.extend(node.operands.iter().copied());
        }
    }
    values
}

/// A parameter, its state and its update share one strategy.
fn ties(graph: &Graph, folded: &Folded) -> Vec<usize> {
    let mut tied: Vec<usize> = (0..folded.classes.len()).collect();
    for (index, class) in folded.classes.iter().enumerate() {
        let node = graph.node(class.node);
        for operand in node.op.update().into_iter().flat_map(Update::stored) {
            tied[folded.class[graph.value(node.operands[operand]).def]] = index;
        }
    }
    tied
}

fn flows(graph: &Graph, folded: &Folded, emitted: &[Share]) -> Vec<Flow> {
    let mut readers: BTreeMap<(usize, usize), BTreeMap<(usize, usize), usize>> = BTreeMap::new();
    // Per flow, the first node that reads a value of the class's first node.
    let mut first: BTreeMap<(usize, usize), NodeId> = BTreeMap::new();
    for (id, node) in graph.nodes() {
        for (operand, value) in node.operands.iter().enumerate() {
            let value = graph.value(*value);
            let class = folded.class[value.def];
            let flow = readers.entry((class, value.index)).or_default();
            *flow.entry((folded.class[id], operand)).or_default() += 1;
            if folded.classes[class].node == value.def {
                first.entry((class, value.index)).or_insert(id);
            }
        }
    }
    let flow = |((maker, result), readers): ((usize, usize), BTreeMap<(usize, usize), usize>)| {
        let readers = readers.into_iter().map(|((reader, operand), count)| (reader, operand, count)).collect();
        let made = folded.classes[maker].node.index() - emitted[maker].ahead;
        let first = first.get(&(maker, result)).copied().unwrap_or(folded.classes[maker].node);
        let between = (made + 1..first.index()).take(MOST_BETWEEN);
        let between = between.map(|index| folded.class[NodeId::from_u32(index as u32)]).collect();
        Flow { maker, result, readers, first: folded.class[first], between }
    };
    readers.into_iter().map(flow).collect()
}

/// What runs beside a conversion is looked for in so many nodes.
const MOST_BETWEEN: usize = 16;
