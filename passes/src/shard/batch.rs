//! Which factor of each node is the batch.
//!
//! Data parallelism and microbatches divide the batch: dimension 0 of the inputs, or where none has it there, the
//! only one of its size (steps of time may come first). That dimension is followed through the factor rules: a
//! node that reads it divided divides the same factor; a reduction over it (a weight's gradient, the sum of losses)
//! leaves a partial sum, which linear operations pass on. A second sweep, from the readers back, divides what all of
//! its readers want divided: what is made from nothing (masks, the seed of the gradient), so that no rank makes the
//! whole batch of it, and what was passed on as a partial sum (statistics of the batch that are copied to each
//! sample, the gradient of samples that every other is compared with), so that the sum is made before the copies
//! and no rank goes on with the whole batch.

use crate::fold::Folded;
use shardc_ir::ops::Op;
use shardc_ir::{Choice, FactorKind, FactorRule, Graph, Node, NodeId, OpDef, ReduceKind, Role, SecondaryMap, ValueId};
use std::collections::{HashMap, HashSet};

/// How a value lies along the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Whole,
    Dim(usize),
    Partial,
}

/// Who reads each value, as which operand.
type Users = HashMap<ValueId, Vec<(NodeId, usize)>>;

/// What every node does with an axis that divides the batch.
pub fn batch_choices(
    graph: &Graph,
    folded: &Folded,
    rules: &[&FactorRule],
    batch: u64,
) -> SecondaryMap<NodeId, Choice> {
    let users = graph.users();
    let mut choices = SecondaryMap::with_default(Choice::Replicate);
    let mut inputs: Vec<(NodeId, usize)> = samples(graph, |size| size == batch);
    if inputs.is_empty() {
        inputs = samples_behind(graph, batch);
    }
    loop {
        follow(graph, folded, rules, &inputs, &mut choices);
        // Rows of samples (labels of all tokens in one dimension), where something that is divided reads them, or what
        // is made of them.
        let is_wanted = |id: &NodeId| is_wanted(graph, folded, rules, &choices, (&users, graph.result(*id)));
        let mut rows = samples(graph, |size| size > batch && batch > 1 && size.is_multiple_of(batch));
        rows.retain(|(id, _)| inputs.iter().all(|(known, _)| known != id) && is_wanted(id));
        if rows.is_empty() {
            break;
        }
        inputs.append(&mut rows);
    }
    divide_sources(graph, folded, rules, &mut choices);
    choices
}

/// Whether something that is divided reads the first dimension of a value divided, or of what is made of it alone.
fn is_wanted(
    graph: &Graph,
    folded: &Folded,
    rules: &[&FactorRule],
    choices: &SecondaryMap<NodeId, Choice>,
    (users, value): (&Users, ValueId),
) -> bool {
    let mut open = vec![(value, 0)];
    let mut seen: HashSet<(ValueId, usize)> = HashSet::new();
    while let Some((value, dim)) = open.pop() {
        for reader in users.get(&value).into_iter().flatten() {
            if wanted(folded, rules, choices, reader) == Some(dim) {
                return true;
            }
            let rule = &rules[folded.class[reader.0]];
            let factor = outermost(&rule.operands[reader.1], dim).filter(|factor| divisible(rule, *factor));
            let Some(factor) = factor.filter(|_| choices[reader.0] == Choice::Replicate) else { continue };
            let holds = |dims: &Vec<Vec<usize>>| dims.iter().position(|dim| dim.first() == Some(&factor));
            let made = graph.node(reader.0).results.iter().zip(&rule.results);
            let made = made.filter_map(|(value, dims)| Some((*value, holds(dims)?)));
            open.extend(made.filter(|next| seen.insert(*next)));
        }
    }
    false
}

/// The inputs whose first dimension is of such a size, with that dimension.
fn samples(graph: &Graph, is_such: impl Fn(u64) -> bool) -> Vec<(NodeId, usize)> {
    inputs(graph).filter(|(_, shape)| shape.first().is_some_and(|size| is_such(*size))).map(|(id, _)| (id, 0)).collect()
}

/// The inputs that have one dimension of a size, with that.
fn samples_behind(graph: &Graph, batch: u64) -> Vec<(NodeId, usize)> {
    let of = |(id, shape): (NodeId, &[u64])| {
        let mut dims = shape.iter().enumerate().filter(|(_, size)| **size == batch).map(|(dim, _)| dim);
        dims.next().filter(|_| dims.next().is_none()).map(|dim| (id, dim))
    };
    inputs(graph).filter_map(of).collect()
}

/// The inputs, with their shapes.
fn inputs(graph: &Graph) -> impl Iterator<Item = (NodeId, &[u64])> {
    let inputs = graph.nodes().filter(|(_, node)| matches!(node.op, Op::Input(_)));
    inputs.map(|(id, node)| (id, &graph.ty(node.results[0]).shape[..]))
}

/// What every node does where these inputs are divided.
fn follow(
    graph: &Graph,
    folded: &Folded,
    rules: &[&FactorRule],
    inputs: &[(NodeId, usize)],
    choices: &mut SecondaryMap<NodeId, Choice>,
) {
    let mut states: HashMap<ValueId, State> = HashMap::new();
    for (id, node) in graph.nodes() {
        let rule = &rules[folded.class[id]];
        let sample = inputs.iter().find(|(input, _)| *input == id);
        let choice = match sample {
            Some((_, dim)) => Choice::Factor(*dim),
            None if is_source(node) => Choice::Replicate,
            None => forward_choice(rule, &node.operands.iter().map(|value| states[value]).collect::<Vec<_>>()),
        };
        choices[id] = choice;
        for (index, value) in node.results.iter().enumerate() {
            states.insert(*value, result_state(rule, index, choice));
        }
    }
}

/// Which nodes run once per microbatch: those that divide the batch or pass its partial sums on. A batch of one sample
/// is not divided and its dimension is lost in reshapes, so there it is what depends on the inputs, up to the gradients.
pub fn in_loop(graph: &Graph, choices: &SecondaryMap<NodeId, Choice>, batch: u64) -> SecondaryMap<NodeId, bool> {
    let mut in_loop = SecondaryMap::new();
    for (id, node) in graph.nodes() {
        let is_fed = || node.operands.iter().any(|value| in_loop[graph.value(*value).def]);
        let is_input = || matches!(node.op, Op::Input(_));
        let is_one = batch == 1 && node.role != Role::Optimizer && (is_input() || is_fed());
        in_loop[id] = choices[id] != Choice::Replicate || is_one;
    }
    in_loop
}

fn forward_choice(rule: &FactorRule, operands: &[State]) -> Choice {
    for (index, state) in operands.iter().enumerate() {
        if let State::Dim(dim) = state
            && let Some(factor) = outermost(&rule.operands[index], *dim)
            && divisible(rule, factor)
        {
            return Choice::Factor(factor);
        }
    }
    let partial = |index: &usize| operands[*index] == State::Partial;
    let count = (0..operands.len()).filter(partial).count();
    let divided = operands.iter().any(|state| matches!(state, State::Dim(_)));
    // Neither less nor more: what is whole would be added to every term.
    let set = rule.linear.iter().position(|set| count > 0 && set.len() == count && set.iter().all(partial));
    match set {
        Some(set) if !divided => Choice::Pass(set),
        _ => Choice::Replicate,
    }
}

fn outermost(dims: &[Vec<usize>], dim: usize) -> Option<usize> {
    dims.get(dim).and_then(|factors| factors.first()).copied()
}

/// Whether a factor may be divided, as far as its kind and its reductions go.
fn divisible(rule: &FactorRule, factor: usize) -> bool {
    let held = |dims: &Vec<Vec<usize>>| dims.iter().flatten().any(|held| *held == factor);
    let reduces = |result: usize| rule.factors[factor].reduce.iter().any(|(index, _)| *index == result);
    rule.factors[factor].kind == FactorKind::Parallel
        && rule.results.iter().enumerate().all(|(index, dims)| held(dims) || reduces(index))
}

fn result_state(rule: &FactorRule, index: usize, choice: Choice) -> State {
    match choice {
        Choice::Replicate => State::Whole,
        Choice::Pass(_) => State::Partial,
        Choice::Factor(factor) => {
            let dim = rule.results[index].iter().position(|factors| factors.contains(&factor));
            let partial =
                rule.factors[factor].reduce.iter().any(|(result, kind)| *result == index && *kind == ReduceKind::Sum);
            dim.map_or(if partial { State::Partial } else { State::Whole }, State::Dim)
        }
    }
}

/// The dimension of an operand of which its reader divides the outermost factor.
fn wanted(
    folded: &Folded,
    rules: &[&FactorRule],
    choices: &SecondaryMap<NodeId, Choice>,
    (user, index): &(NodeId, usize),
) -> Option<usize> {
    let Choice::Factor(factor) = choices[*user] else { return None };
    rules[folded.class[*user]].operands[*index].iter().position(|dims| dims.first() == Some(&factor))
}

/// From the readers back: what all readers want divided is made divided.
fn divide_sources(graph: &Graph, folded: &Folded, rules: &[&FactorRule], choices: &mut SecondaryMap<NodeId, Choice>) {
    let users = graph.users();
    let updated: Vec<ValueId> = graph.outputs.iter().map(|output| output.value).collect();
    for (id, node) in graph.nodes().rev() {
        if matches!(choices[id], Choice::Factor(_)) || node.op.is_leaf() || node.results.len() != 1 {
            continue;
        }
        let (value, rule) = (node.results[0], &rules[folded.class[id]]);
        let wanted = |reader: &(NodeId, usize)| wanted(folded, rules, choices, reader);
        let Some(readers) = users.get(&value) else { continue };
        let Some(dim) = readers.first().and_then(wanted) else { continue };
        let all = readers.iter().all(|reader| wanted(reader) == Some(dim)) && !updated.contains(&value);
        if let Some(factor) = outermost(&rule.results[0], dim).filter(|factor| all && divisible(rule, *factor)) {
            choices[id] = Choice::Factor(factor);
        }
    }
}

/// Whether nothing that a node reads is divided.
fn is_source(node: &Node) -> bool {
    node.op.is_leaf() || node.operands.is_empty()
}
