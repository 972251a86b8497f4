//! The graph's verifier.
//!
//! Invariants:
//! * a node reads only values of nodes before it, and each value names the node that makes it;
//! * the types of a node's results are those its operation infers from its operands;
//! * no node joins operations, as an instruction may;
//! * leaves have unique names that are not empty;
//! * outputs have unique names and are values of the graph; an update is of a parameter or a state,
//!   carries the leaf's name and has its type; no leaf is updated twice;
//! * the cast of a parameter that a state is has the parameter's shape, and every step that updates the parameter makes
//!   it anew from the new one, so that if it is that cast before the first step, it is before each;
//! * a role refers to a node before its own, and what is computed again is the same operation on the same
//!   values, or on values that were computed again.

use crate::diagnostic::Diagnostics;
use crate::entity::{NodeId, ValueId};
use crate::graph::{Graph, Node, OutputKind, Role};
use crate::ops::{Op, OpDef, State, Update};
use std::collections::{BTreeMap, BTreeSet};

/// What is known of a graph that was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphFacts {
    /// The inputs by name.
    pub inputs: BTreeMap<String, ValueId>,
    /// The parameters by name.
    pub parameters: BTreeMap<String, ValueId>,
    /// The optimizer's states and the casts of parameters by name.
    pub states: BTreeMap<String, ValueId>,
    /// Per updated leaf, what replaces it.
    pub updates: BTreeMap<ValueId, ValueId>,
}

/// Verifies a graph.
///
/// # Errors
/// Every violation of the invariants.
pub fn graph(graph: &Graph) -> Result<GraphFacts, Diagnostics> {
    let (mut found, mut facts) = (Diagnostics::default(), GraphFacts::default());
    for (id, node) in graph.nodes() {
        check_node(graph, id, node, &mut found);
        let (leaves, name) = match &node.op {
            Op::Input(input) => (&mut facts.inputs, &input.name),
            Op::Parameter(parameter) => (&mut facts.parameters, &parameter.name),
            Op::State(state) => (&mut facts.states, &state.name),
            _ => continue,
        };
        if let Some(value) = node.results.first() {
            leaves.insert(name.clone(), *value);
        }
    }
    check_leaf_names(graph, &mut found);
    check_outputs(graph, &mut facts, &mut found);
    check_casts(graph, &facts, &mut found);
    found.finish(facts)
}

fn check_node(graph: &Graph, id: NodeId, node: &Node, found: &mut Diagnostics) {
    let place = node.results.first().map_or_else(|| id.to_string(), ToString::to_string);
    let mut is_sound = true;
    for operand in &node.operands {
        if !graph.has_value(*operand) || graph.value(*operand).def >= id {
            found.push(&place, format!("{} reads {operand}, which is not made before it", node.op.name()));
            is_sound = false;
        }
    }
    for (index, result) in node.results.iter().enumerate() {
        if !graph.has_value(*result) || graph.value(*result).def != id || graph.value(*result).index != index {
            found.push(&place, format!("{result} is not known as result {index} of {id}"));
            is_sound = false;
        }
    }
    if let Role::Backward(of) | Role::Recompute(of) = node.role
        && of >= id
    {
        found.push(&place, format!("its role refers to {of}, which is not before it"));
        is_sound = false;
    }
    if matches!(node.op, Op::Each(_) | Op::Fused(_)) {
        let message =
            format!("{} joins instructions of a program; a graph has each operation as a node", node.op.name());
        found.push(&place, message);
        is_sound = false;
    }
    if !is_sound {
        return;
    }
    if let Role::Recompute(of) = node.role {
        let first = graph.node(of);
        let originals = |node: &Node| node.operands.iter().map(|value| original(graph, *value)).collect::<Vec<_>>();
        if (&first.op, originals(first)) != (&node.op, originals(node)) {
            let message = format!(
                "is no recomputation of {}, which is another {} or of other values",
                first.results[0],
                first.op.name()
            );
            found.push(&place, message);
        }
    }
    let declared = graph.result_types(id);
    match node.op.infer(&graph.operand_types(id), &declared) {
        Err(error) => found.push(&place, error.to_string()),
        Ok(inferred) if inferred.len() != declared.len() => {
            found.push(
                &place,
                format!("has {} results, but {} makes {}", declared.len(), node.op.name(), inferred.len()),
            );
        }
        Ok(inferred) => {
            for ((value, declared), inferred) in node.results.iter().zip(&declared).zip(&inferred) {
                if declared != inferred {
                    found.push(value, format!("is {declared}, but {} makes {inferred}", node.op.name()));
                }
            }
        }
    }
}

/// The value itself or, if it is computed again, the one that was first.
fn original(graph: &Graph, mut value: ValueId) -> ValueId {
    while let Role::Recompute(of) = graph.def(value).role {
        let (def, index) = (graph.value(value).def, graph.value(value).index);
        match graph.node(of).results.get(index) {
            Some(first) if of < def => value = *first,
            _ => break,
        }
    }
    value
}

fn leaf_name(op: &Op) -> Option<&str> {
    match op {
        Op::Input(input) => Some(&input.name),
        Op::Parameter(parameter) => Some(&parameter.name),
        Op::State(state) => Some(&state.name),
        _ => None,
    }
}

fn check_leaf_names(graph: &Graph, found: &mut Diagnostics) {
    let mut first: BTreeMap<&str, ValueId> = BTreeMap::new();
    for (value, node) in graph.leaves() {
        let name = leaf_name(&node.op).unwrap_or_default();
        if name.is_empty() {
            found.push(value, format!("{} has an empty name", node.op.name()));
        } else if let Some(other) = first.insert(name, value) {
            found.push(value, format!("the name \"{name}\" is already that of {other}; leaves have unique names"));
        }
    }
}

fn check_outputs(graph: &Graph, facts: &mut GraphFacts, found: &mut Diagnostics) {
    let mut names = BTreeSet::new();
    for output in &graph.outputs {
        let place = format!("output \"{}\"", output.name);
        if !names.insert(output.name.as_str()) {
            found.push(&place, "there are two outputs of this name");
        }
        if !graph.has_value(output.value) {
            found.push(&place, format!("{} is not a value of the graph", output.value));
            continue;
        }
        let OutputKind::Update(leaf) = output.kind else { continue };
        if !graph.has_value(leaf) {
            found.push(&place, format!("the leaf {leaf} is not a value of the graph"));
            continue;
        }
        match &graph.def(leaf).op {
            op @ (Op::Parameter(_) | Op::State(_)) => {
                let name = leaf_name(op).unwrap_or_default();
                if name != output.name {
                    found.push(&place, format!("updates {leaf}, whose name is \"{name}\"; the names must be equal"));
                }
            }
            op => found.push(&place, format!("updates {leaf}, an {}; only a parameter or a state is kept", op.name())),
        }
        if graph.ty(output.value) != graph.ty(leaf) {
            let (new, old) = (graph.ty(output.value), graph.ty(leaf));
            found.push(&place, format!("{} is {new}, but {leaf}, which it replaces, is {old}", output.value));
        }
        if facts.updates.insert(leaf, output.value).is_some() {
            found.push(&place, format!("{leaf} is updated twice"));
        }
    }
}

fn check_casts(graph: &Graph, facts: &GraphFacts, found: &mut Diagnostics) {
    for (cast, node) in graph.leaves() {
        let Op::State(State { cast_of: Some(name), .. }) = &node.op else { continue };
        let Some(parameter) = facts.parameters.get(name) else {
            found.push(cast, format!("is the cast of \"{name}\", and there is no parameter of this name"));
            continue;
        };
        let (ty, of) = (graph.ty(cast), graph.ty(*parameter));
        if ty.shape != of.shape || !ty.dtype.is_float() {
            found.push(cast, format!("is {ty}, which is no cast of {of}"));
        }
        let is_made = match (facts.updates.get(parameter), facts.updates.get(&cast)) {
            (None, None) => true,
            (Some(new), Some(made)) => makes_cast(graph, *new, *made),
            _ => false,
        };
        if !is_made {
            found.push(
                cast,
                format!("is the cast of \"{name}\", and after the step it is not that of what replaces it"),
            );
        }
    }
}

/// Whether one value is the cast of another, the parameter that an update made.
fn makes_cast(graph: &Graph, new: ValueId, cast: ValueId) -> bool {
    let (from, value) = (graph.value(new), graph.value(cast));
    let node = graph.node(value.def);
    match node.op.update() {
        None => matches!(node.op, Op::Cast(_)) && node.operands == [new],
        Some(update) => {
            value.def == from.def && from.index == Update::PARAMETER && update.cast_result() == Some(value.index)
        }
    }
}
