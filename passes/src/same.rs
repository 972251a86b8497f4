//! Whether two graphs compute the same values.
//!
//! Values are numbered (Alpern, Wegman and Zadeck, "Detecting equality of variables in programs", 1988, section 2): two are
//! the same that the same operation makes of the same values, or that are leaves of one name. So it does not matter in what
//! order a graph has its nodes, and how often: one in which values are [computed again](crate::rematerialize) is the same
//! as without.

pub mod chunks;
#[cfg(test)]
mod tests;

use crate::fold::leaf_name;
use shardc_ir::{Graph, Op, Output, OutputKind, TensorType, ValueId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// In what a graph is not the same as another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// A value that the other does not compute; the first in the order of the graph.
    Value(ValueId),
    /// What it gives as a result or keeps of a leaf: the other gives another value, or none.
    Output(String),
    /// What the other gives as a result or keeps of a leaf, and it does not.
    Missing(String),
}

/// What tells a node from others: its operation, the values that it reads, the types of its results.
type Key = (String, Vec<Number>, Vec<TensorType>);

/// A node's number, and which of its results a value is.
type Number = (usize, usize);

/// Numbers that are given to values of several graphs alike.
#[derive(Default)]
struct Numbers(HashMap<Key, usize>);

impl Numbers {
    /// The number of every value of a graph.
    fn of(&mut self, graph: &Graph) -> HashMap<ValueId, Number> {
        let mut all: HashMap<ValueId, Number> = HashMap::new();
        for (id, node) in graph.nodes() {
            let operands = node.operands.iter().map(|value| all[value]).collect();
            let next = self.0.len();
            let number = *self.0.entry((format!("{:?}", node.op), operands, graph.result_types(id))).or_insert(next);
            all.extend(node.results.iter().enumerate().map(|(index, value)| (*value, (number, index))));
        }
        all
    }

    /// The number that a node has which does this with these values, if one has it.
    fn known(&self, op: &Op, operands: Vec<Number>, types: &[TensorType]) -> Option<usize> {
        self.0.get(&(format!("{op:?}"), operands, types.to_vec())).copied()
    }
}

/// As what a graph gives something: its name, and the leaf that it becomes.
type As<'a> = (&'a str, Option<&'a str>);

fn given_as<'a>(graph: &'a Graph, output: &'a Output) -> As<'a> {
    let leaf = match output.kind {
        OutputKind::Update(leaf) => Some(leaf_name(&graph.def(leaf).op)),
        OutputKind::Result => None,
    };
    (output.name.as_str(), leaf)
}

/// What a graph gives.
fn given<'a>(graph: &'a Graph, numbers: &HashMap<ValueId, Number>) -> BTreeMap<As<'a>, Number> {
    graph.outputs.iter().map(|output| (given_as(graph, output), numbers[&output.value])).collect()
}

/// The first of what a graph computes or gives that another does not; else of what it does not give, and the other does.
pub fn difference(graph: &Graph, other: &Graph) -> Option<Difference> {
    let mut numbers = Numbers::default();
    let (own, others) = (numbers.of(graph), numbers.of(other));
    let known: HashSet<Number> = others.values().copied().collect();
    let new = graph.nodes().find_map(|(_, node)| node.results.iter().find(|value| !known.contains(&own[*value])));
    if let Some(value) = new {
        return Some(Difference::Value(*value));
    }
    let (own, others) = (given(graph, &own), given(other, &others));
    let wrong = own.iter().find(|(key, number)| others.get(*key) != Some(*number));
    let missing = || others.keys().find(|key| !own.contains_key(*key));
    let named = |name: &str| name.to_string();
    wrong
        .map(|((name, _), _)| Difference::Output(named(name)))
        .or_else(|| Some(Difference::Missing(named(missing()?.0))))
}
