//! Finds repeated blocks, so that the search solves one and shares the choice.
//!
//! A block is what lies under a module path up to and including its first number (`blocks.3`).
//! Blocks of one family (`blocks`) are folded only if they are equal node by node: the same
//! operations on the same types, in the same order, with the same wiring inside. Nodes at the same
//! place of equal blocks are one [`Class`]; so is a node and its recomputation. Every other node is
//! a class of its own. All nodes of a class get one strategy, and a sum of costs over classes times
//! their sizes is the sum over all nodes: folding restricts the choice, and loses no cost.

use shardc_ir::ops::{Op, Random, Update};
use shardc_ir::{Graph, Node, NodeId, OpDef, Role, SecondaryMap, ValueId};
use std::collections::{BTreeMap, HashMap};

/// Nodes that take one strategy.
#[derive(Clone, Debug)]
pub struct Class {
    /// The first of them, which stands for all.
    pub node: NodeId,
    /// All of them, in order.
    pub members: Vec<NodeId>,
}

/// The classes of a graph.
#[derive(Clone, Debug, Default)]
pub struct Folded {
    /// The classes, in the order of their first nodes.
    pub classes: Vec<Class>,
    /// The class of each node.
    pub class: SecondaryMap<NodeId, usize>,
}

/// The block of a module path: up to and including its first number.
pub fn block(path: &str) -> Option<&str> {
    let mut end = 0;
    for part in path.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(&path[..end]);
        }
        end += 1;
    }
    None
}

/// What tells the block of a path from others: the path up to and including its first numeric component; all of it if there
/// is none.
pub fn module(path: &str) -> &str {
    block(path).unwrap_or(path)
}

/// The block a node belongs to: by its path, or by its name if it is a leaf.
pub fn block_of<'a>(graph: &'a Graph, node: &'a Node) -> Option<&'a str> {
    let name = leaf_name(&node.op);
    let of_parameter = |_| block(leaf_name(&graph.def(node.operands[Update::PARAMETER]).op));
    block(&node.path).or_else(|| block(name)).or_else(|| node.op.update().and_then(of_parameter))
}

/// The blocks of the paths of nodes, numbered as the forward pass comes to them.
#[derive(Clone, Debug, Default)]
pub struct Blocks<'a> {
    numbers: BTreeMap<&'a str, u64>,
    of: SecondaryMap<NodeId, Option<u64>>,
    modules: SecondaryMap<NodeId, u32>,
}

impl<'a> Blocks<'a> {
    /// Those of a graph.
    pub fn new(graph: &'a Graph) -> Self {
        let mut own = Self::default();
        for (_, node) in graph.nodes().filter(|(_, node)| node.role == Role::Forward && !node.operands.is_empty()) {
            if let Some(block) = block(&node.path) {
                let next = own.numbers.len() as u64;
                own.numbers.entry(block).or_insert(next);
            }
        }
        let mut modules: HashMap<&str, u32> = HashMap::new();
        for (id, node) in graph.nodes() {
            let module = module(&node.path);
            own.of[id] = own.named(module);
            let next = modules.len() as u32;
            own.modules[id] = *modules.entry(module).or_insert(next);
        }
        own
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.numbers.len()
    }

    /// The number of a block.
    pub fn named(&self, block: &str) -> Option<u64> {
        self.numbers.get(block).copied()
    }

    /// The number of the block that a node is in, by its path.
    pub fn of(&self, id: NodeId) -> Option<u64> {
        self.of[id]
    }

    /// What tells its block from others; outside of blocks, its path from others.
    pub fn module(&self, id: NodeId) -> u32 {
        self.modules[id]
    }
}

/// The name of a leaf, else nothing.
pub fn leaf_name(op: &Op) -> &str {
    match op {
        Op::Input(leaf) => &leaf.name,
        Op::Parameter(leaf) => &leaf.name,
        Op::State(leaf) => &leaf.name,
        _ => "",
    }
}

/// Folds a graph.
pub fn fold(graph: &Graph) -> Folded {
    let mut blocks: BTreeMap<&str, Vec<NodeId>> = BTreeMap::new();
    for (id, node) in graph.nodes().filter(|(_, node)| !matches!(node.role, Role::Recompute(_))) {
        if let Some(block) = block_of(graph, node) {
            blocks.entry(block).or_default().push(id);
        }
    }
    let mut kinds: HashMap<(&str, String), Vec<NodeId>> = HashMap::new();
    let mut first: HashMap<NodeId, NodeId> = HashMap::new();
    for (name, nodes) in &blocks {
        let family = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let kind = (family, signature(graph, name, nodes));
        let stands = kinds.entry(kind).or_insert_with(|| nodes.clone());
        first.extend(nodes.iter().copied().zip(stands.iter().copied()));
    }
    let mut folded = Folded::default();
    let mut known: HashMap<NodeId, usize> = HashMap::new();
    for (id, node) in graph.nodes() {
        let stands = match node.role {
            Role::Recompute(of) => first.get(&of).copied().unwrap_or(of),
            _ => first.get(&id).copied().unwrap_or(id),
        };
        let class = *known.entry(stands).or_insert_with(|| {
            folded.classes.push(Class { node: id, members: Vec::new() });
            folded.classes.len() - 1
        });
        folded.classes[class].members.push(id);
        folded.class[id] = class;
    }
    folded
}

/// The text of a block without its number: equal texts are equal blocks.
fn signature(graph: &Graph, block: &str, nodes: &[NodeId]) -> String {
    let mut places: HashMap<ValueId, String> = HashMap::new();
    let mut text = String::new();
    for (place, id) in nodes.iter().enumerate() {
        let node = graph.node(*id);
        for (index, value) in node.results.iter().enumerate() {
            places.insert(*value, format!("{place}.{index}"));
        }
        let op = if node.op.is_leaf() {
            let name = leaf_name(&node.op);
            format!("{} {}", node.op.name(), name.strip_prefix(block).unwrap_or(name))
        } else if let Op::Random(random) = &node.op {
            // Every mask of dropout has numbers of its own, and costs the same.
            format!("{:?}", Random { stream: 0, ..random.clone() })
        } else {
            format!("{:?}", node.op)
        };
        let role = match node.role {
            Role::Forward => 'f',
            Role::Backward(_) => 'b',
            Role::Recompute(_) => 'r',
            Role::Optimizer => 'o',
        };
        text.push_str(&format!("{role} {op}("));
        for value in &node.operands {
            let place = places.get(&recomputed(graph, *value)).map_or("outside", String::as_str);
            let operand = graph.ty(*value);
            text.push_str(&format!("{place}:{operand},"));
        }
        for ty in graph.result_types(*id) {
            text.push_str(&format!("){ty}"));
        }
        text.push('\n');
    }
    text
}

/// The value itself, or the one that it computes again.
fn recomputed(graph: &Graph, value: ValueId) -> ValueId {
    match graph.def(value).role {
        Role::Recompute(of) => graph.node(of).results[graph.value(value).index],
        _ => value,
    }
}

impl Folded {
    /// Splits classes whose members differ in `key`.
    pub fn split<K: Ord>(&self, key: impl Fn(NodeId) -> K) -> Folded {
        let mut folded = Folded::default();
        let mut known: BTreeMap<(usize, K), usize> = BTreeMap::new();
        let mut nodes: Vec<NodeId> = self.classes.iter().flat_map(|class| class.members.iter().copied()).collect();
        nodes.sort_unstable();
        for id in nodes {
            let class = *known.entry((self.class[id], key(id))).or_insert_with(|| {
                folded.classes.push(Class { node: id, members: Vec::new() });
                folded.classes.len() - 1
            });
            folded.classes[class].members.push(id);
            folded.class[id] = class;
        }
        folded
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::ops::{Binary, BinaryKind, Distribution, Input};
    use shardc_ir::{DType, TensorType};

    #[test]
    fn blocks_end_at_the_first_number() {
        assert_eq!(block("blocks.3.attention.query"), Some("blocks.3"));
        assert_eq!(block("model.layers.12.mlp.0"), Some("model.layers.12"));
        assert_eq!(block("head.weight"), None);
        assert_eq!(block(""), None);
    }

    /// Each mask of dropout draws other numbers, and all cost the same.
    #[test]
    fn blocks_that_drop_elements_are_alike() {
        let ty = TensorType::new(DType::F32, [4, 8]);
        let mut graph = Graph::new("dropout");
        let input = graph.add(Input { name: "x".to_string() }, &[], std::slice::from_ref(&ty)).unwrap();
        let mut x = graph.result(input);
        for stream in 0..3 {
            let distribution = Distribution::Bernoulli { p: 0.9 };
            let mask = Random { distribution, stream, seed: 1, global: Vec::new(), start: Vec::new() };
            let path = format!("blocks.{stream}.dropout");
            let mask = graph.add_as(mask.into(), &[], std::slice::from_ref(&ty), path.clone(), Role::Forward).unwrap();
            let product = Op::from(Binary { kind: BinaryKind::Mul });
            let kept = graph.add_as(product, &[x, graph.result(mask)], &[], path, Role::Forward).unwrap();
            x = graph.result(kept);
        }
        let members: Vec<usize> = fold(&graph).classes.iter().map(|class| class.members.len()).collect();
        assert_eq!(members, [1, 3, 3]);
    }
}
