//! Whether two graphs compute the same values.
//!
//! Values are numbered (Alpern, Wegman and Zadeck, "Detecting equality of variables in programs", 1988, section 2): two are
//! the same that the same operation makes of the same values, or that are leaves of one name. So it does not matter in what
//! order a graph has its nodes, and how often: one in which values are [computed again](crate::rematerialize) is the same
//! as without.

use crate::fold::leaf_name;
use shardc_ir::{Graph, OutputKind, TensorType, ValueId};
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
}

/// What a graph gives: by its name, and by the leaf that it becomes.
type Given<'a> = BTreeMap<(&'a str, Option<&'a str>), Number>;

fn given<'a>(graph: &'a Graph, numbers: &HashMap<ValueId, Number>) -> Given<'a> {
    let leaf = |kind: &OutputKind| match kind {
        OutputKind::Update(leaf) => Some(leaf_name(&graph.def(*leaf).op)),
        OutputKind::Result => None,
    };
    graph.outputs.iter().map(|output| ((output.name.as_str(), leaf(&output.kind)), numbers[&output.value])).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::chunk;
    use crate::rematerialize::rematerialize;
    use crate::search_tests::{Sizes, llama};
    use shardc_ir::DType;

    const SMALL: Sizes = Sizes { layers: 2, batch: 4, seq: 64, hidden: 64, heads: 4, kv: 4, ffn: 128, vocab: 256 };

    /// What is computed again is the same; a head in chunks is the same as itself alone.
    #[test]
    fn what_is_computed_again_is_the_same() {
        let graph = llama(SMALL, DType::Bf16);
        let again = rematerialize(&graph, &|_| true).unwrap();
        assert!(again.node_count() > graph.node_count());
        assert_eq!([difference(&graph, &again), difference(&again, &graph)], [None, None]);
        let cut = |graph: &Graph| chunk(graph, 2).unwrap().0;
        assert_eq!(difference(&cut(&again), &cut(&graph)), None);
        assert!(difference(&cut(&graph), &graph).is_some());
    }

    /// Every operand that is another one of its type, and every output that is left out or of another value, is told.
    #[test]
    fn what_is_another_is_told() {
        let graph = llama(SMALL, DType::Bf16);
        let mut changed = 0;
        for (id, node) in graph.nodes() {
            for (place, operand) in node.operands.iter().enumerate() {
                let before = graph.values().take_while(|(value, _)| *value != node.results[0]).map(|of| of.0);
                let alike = before.filter(|value| value != operand && graph.ty(*value) == graph.ty(*operand)).last();
                let Some(alike) = alike else { continue };
                let other = graph.rebuild(|to, at, map| {
                    if at != id {
                        return Ok(false);
                    }
                    let mut operands: Vec<ValueId> = node.operands.iter().map(|value| map[value]).collect();
                    operands[place] = map[&alike];
                    let declared = graph.result_types(id);
                    let added = to.add_as(node.op.clone(), &operands, &declared, node.path.clone(), node.role)?;
                    map.extend(node.results.iter().copied().zip(to.node(added).results.clone()));
                    Ok(true)
                });
                let Ok(other) = other else { continue };
                assert_ne!(difference(&other, &graph), None, "operand {place} of {id} is {alike}");
                changed += 1;
            }
        }
        assert!(changed > 100, "{changed}");
        for index in 0..graph.outputs.len() {
            let mut less = graph.clone();
            let name = less.outputs.remove(index).name;
            assert_eq!(difference(&less, &graph), Some(Difference::Missing(name.clone())));
            assert_eq!(difference(&graph, &less), Some(Difference::Output(name)));
        }
    }
}
