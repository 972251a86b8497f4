//! The head of a model: the product that makes the logits, their cross-entropy, and whatever else holds a row of
//! logits, or of their derivative, for each token.
//!
//! Logits are larger than any other value of a language model. What handles them one row at a time can do so for
//! some tokens after the others ([`chunk`](crate::chunk)), and so it does not matter here which operations these are:
//! a bias, a soft cap or a cast between the product and the loss, their derivatives behind it, a loss whose
//! cotangents depend on the rows themselves. Factor rules say of each node where its operands and results hold the
//! tokens, and a head is what can be followed by them alone.
//!
//! Invariants of a [`Head`]: each node takes its tokens apart, by one factor; logits are read by its own nodes
//! alone; what it sums over the tokens is read by none of them, so that no token waits for another.

use shardc_ir::{FactorKind, Graph, Mesh, NodeId, Op, ReduceKind, SecondaryMap, Strategy, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// More nodes than the heads that are known have: nine with a bias and a soft cap.
const MOST_NODES: usize = 48;

/// A head that can be cut along its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The product that makes the logits.
    pub product: NodeId,
    /// The cross-entropy of the logits.
    pub entropy: NodeId,
    /// Its nodes, each with the factor of its rule that is the tokens of a sample.
    nodes: BTreeMap<NodeId, usize>,
    /// What they make.
    made: BTreeMap<ValueId, Made>,
    /// What of it others read.
    read: BTreeSet<ValueId>,
}

/// What a value that a node of the head makes has for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// A number for each entry of the vocabulary.
    Logits {
        /// The dimension of the tokens.
        tokens: usize,
        /// The dimension of the vocabulary.
        vocabulary: usize,
    },
    /// Something else.
    Tokens {
        /// The dimension of the tokens.
        tokens: usize,
    },
    /// A term of a sum over the tokens.
    Sum,
}

impl Head {
    /// The head of a graph, if it has one that can be cut.
    pub fn find(graph: &Graph) -> Option<Self> {
        let users = graph.users();
        let entropies = graph.nodes().filter(|(_, node)| matches!(node.op, Op::CrossEntropy(_)));
        entropies.map(|(entropy, _)| entropy).find_map(|entropy| {
            let logits = graph.node(entropy).operands[0];
            // The first dimension is the samples'.
            let tokens = graph.ty(logits).rank().checked_sub(2).filter(|dim| *dim > 0)?;
            let mut finding = Finding::new(graph);
            finding.take_makers(logits, [tokens, tokens + 1])?;
            let product = finding.product()?;
            let depends = reached_from(graph, product);
            finding.take_readers(&users, &depends)?;
            finding.take_between(&depends)?;
            let Finding { nodes, made, .. } = finding;
            let is_read = |value: &ValueId| {
                let mut readers = users.get(value).into_iter().flatten();
                readers.any(|(reader, _)| !nodes.contains_key(reader))
                    || graph.outputs.iter().any(|output| output.value == *value)
            };
            let read = made.keys().copied().filter(is_read).collect();
            let head = Self { product, entropy, nodes, made, read };
            let is_trained = head.nodes.keys().any(|id| matches!(graph.node(*id).op, Op::CrossEntropyGrad(_)));
            (is_trained && head.is_sound(graph)).then_some(head)
        })
    }

    /// Its nodes in the order of the graph, each with the factor that is the tokens.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, usize)> + '_ {
        self.nodes.iter().map(|(id, factor)| (*id, *factor))
    }

    /// Whether a node is one of its own.
    pub fn has(&self, id: NodeId) -> bool {
        self.nodes.contains_key(&id)
    }

    /// What one of its own nodes makes.
    pub fn made(&self, value: ValueId) -> Option<Made> {
        self.made.get(&value).copied()
    }

    /// Its nodes and all that they wait for, which comes in the forward pass where the head is cut.
    pub fn awaited(&self, graph: &Graph) -> SecondaryMap<NodeId, bool> {
        let mut is_awaited: SecondaryMap<NodeId, bool> = SecondaryMap::new();
        for (id, node) in graph.nodes().rev() {
            is_awaited[id] |= self.has(id);
            if is_awaited[id] {
                node.operands.iter().for_each(|value| is_awaited[graph.value(*value).def] = true);
            }
        }
        is_awaited
    }

    /// What its own nodes make and others read.
    pub fn read(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.read.iter().copied()
    }

    /// The nodes and results of which no more has to be there than of the tokens at hand: the logits, and what is made
    /// of them and read by its own nodes alone.
    pub fn passing<'a>(&'a self, graph: &'a Graph) -> impl Iterator<Item = (NodeId, usize)> + 'a {
        let passing = self.made.keys().filter(|value| !self.read.contains(value));
        passing.map(|value| graph.value(*value)).map(|value| (value.def, value.index))
    }

    /// The nodes and results that are sums over the tokens: the gradients of its weights.
    pub fn sums<'a>(&'a self, graph: &'a Graph) -> impl Iterator<Item = (NodeId, usize)> + 'a {
        let sums = self.made.iter().filter(|(_, made)| **made == Made::Sum);
        sums.map(|(value, _)| graph.value(*value)).map(|value| (value.def, value.index))
    }

    /// How many tokens a sample has.
    pub fn sequence(&self, graph: &Graph) -> u64 {
        let Made::Logits { tokens, .. } = self.made[&graph.result(self.product)] else { return 1 };
        graph.ty(graph.result(self.product)).shape[tokens]
    }

    /// Whether a strategy per node leaves whole what is cut.
    pub fn is_cut_whole<'a>(&self, graph: &Graph, mesh: &Mesh, strategy: impl Fn(NodeId) -> &'a Strategy) -> bool {
        self.nodes().all(|(id, factor)| mesh.extent(graph.rule(id).axes(factor, strategy(id))) == 1)
    }

    /// Whether its nodes agree on which tokens they handle, and none but them needs logits.
    fn is_sound(&self, graph: &Graph) -> bool {
        let is_read_well = |(id, factor): (NodeId, usize)| {
            let mut operands = graph.node(id).operands.iter().zip(&graph.rule(id).operands);
            operands.all(|(value, dims)| match self.made(*value) {
                Some(Made::Logits { tokens, .. } | Made::Tokens { tokens }) => dims[tokens] == [factor],
                Some(Made::Sum) => false,
                None => dims.iter().all(|dim| !dim.contains(&factor) || *dim == [factor]),
            })
        };
        self.nodes().all(is_read_well)
            && self.read().all(|value| !matches!(self.made(value), Some(Made::Logits { .. })))
    }
}

/// The nodes that make the logits of a cross-entropy element by element, from the product on, each with the factor of
/// its rule that is the vocabulary; `None` if something else makes them.
pub fn makers(graph: &Graph, entropy: NodeId) -> Option<BTreeMap<NodeId, usize>> {
    let logits = *graph.node(entropy).operands.first()?;
    let tokens = graph.ty(logits).rank().checked_sub(2)?;
    let mut finding = Finding::new(graph);
    finding.take_makers(logits, [tokens, tokens + 1])?;
    finding.product()?;
    let vocabulary = |id: NodeId| {
        let mut results = graph.node(id).results.iter().zip(&graph.rule(id).results);
        results.find_map(|(value, dims)| match finding.made.get(value) {
            Some(Made::Logits { vocabulary, .. }) => single(&dims[*vocabulary]),
            _ => None,
        })
    };
    finding.nodes.keys().map(|id| Some((*id, vocabulary(*id)?))).collect()
}

fn single(factors: &[usize]) -> Option<usize> {
    if let [factor] = factors { Some(*factor) } else { None }
}

/// A head while it is looked for.
struct Finding<'a> {
    graph: &'a Graph,
    nodes: BTreeMap<NodeId, usize>,
    made: BTreeMap<ValueId, Made>,
    /// Logits whose readers were not looked at yet.
    open: BTreeSet<ValueId>,
}

impl<'a> Finding<'a> {
    fn new(graph: &'a Graph) -> Self {
        Self { graph, nodes: BTreeMap::new(), made: BTreeMap::new(), open: BTreeSet::new() }
    }

    /// Takes a node in that has the tokens, and perhaps the vocabulary, as these factors of its rule.
    fn take(&mut self, id: NodeId, tokens: usize, vocabulary: Option<usize>) -> Option<()> {
        let (graph, rule) = (self.graph, self.graph.rule(id));
        let factor = &rule.factors[tokens];
        if factor.kind != FactorKind::Parallel || self.nodes.len() == MOST_NODES {
            return None;
        }
        self.nodes.insert(id, tokens);
        for (index, (value, dims)) in graph.node(id).results.iter().zip(&rule.results).enumerate() {
            let of = |factor: usize| dims.iter().position(|dim| *dim == [factor]);
            let made = match (of(tokens), vocabulary.and_then(of)) {
                (Some(tokens), Some(vocabulary)) => Made::Logits { tokens, vocabulary },
                (Some(tokens), None) => Made::Tokens { tokens },
                _ if factor.reduce.contains(&(index, ReduceKind::Sum)) => Made::Sum,
                _ => return None,
            };
            if matches!(made, Made::Logits { .. }) {
                self.open.insert(*value);
            }
            self.made.insert(*value, made);
        }
        Some(())
    }

    /// Takes in what makes logits element by element, of which these are the dimensions of tokens and vocabulary, back
    /// to products, and to copies of what has no number for every token and entry.
    fn take_makers(&mut self, value: ValueId, dims: [usize; 2]) -> Option<()> {
        let mut open = vec![(value, dims)];
        while let Some((value, [tokens, vocabulary])) = open.pop() {
            if let Some(known) = self.made.get(&value) {
                (*known == Made::Logits { tokens, vocabulary }).then_some(())?;
                continue;
            }
            let (id, index) = (self.graph.value(value).def, self.graph.value(value).index);
            let (node, rule) = (self.graph.node(id), self.graph.rule(id));
            let result = &rule.results[index];
            let (tokens, vocabulary) = (single(&result[tokens])?, single(&result[vocabulary])?);
            self.take(id, tokens, Some(vocabulary))?;
            let before = open.len();
            for (operand, dims) in node.operands.iter().zip(&rule.operands) {
                open.extend(both(dims, [tokens, vocabulary]).map(|dims| (*operand, dims)));
            }
            let is_end = matches!(node.op, Op::Matmul(_) | Op::Broadcast(_) | Op::Constant(_));
            (is_end || open.len() > before).then_some(())?;
        }
        Some(())
    }

    /// The one product among the nodes.
    fn product(&self) -> Option<NodeId> {
        let mut products = self.nodes.keys().filter(|id| matches!(self.graph.node(**id).op, Op::Matmul(_)));
        products.next().copied().filter(|_| products.next().is_none())
    }

    /// Takes in all that reads logits, and what they are put together with. Of that, what depends on the logits itself
    /// lies on a way from one node of the head to another.
    fn take_readers(
        &mut self,
        users: &HashMap<ValueId, Vec<(NodeId, usize)>>,
        depends: &SecondaryMap<NodeId, bool>,
    ) -> Option<()> {
        while let Some(value) = self.open.pop_first() {
            let Some(Made::Logits { tokens, vocabulary }) = self.made.get(&value).copied() else { continue };
            for (reader, operand) in users.get(&value).into_iter().flatten() {
                if self.nodes.contains_key(reader) {
                    continue;
                }
                let (node, rule) = (self.graph.node(*reader), self.graph.rule(*reader));
                let dims = &rule.operands[*operand];
                let factors = [single(&dims[tokens])?, single(&dims[vocabulary])?];
                self.take(*reader, factors[0], Some(factors[1]))?;
                for (other, dims) in node.operands.iter().zip(&rule.operands) {
                    let dims = both(dims, factors).filter(|_| !depends[self.graph.value(*other).def]);
                    dims.map_or(Some(()), |dims| self.take_makers(*other, dims))?;
                }
            }
        }
        Some(())
    }

    /// Takes in what lies on a way from one of its nodes to another. What depends on any of them, and is none, depends on
    /// the product: what else makes logits is read by its own nodes alone.
    fn take_between(&mut self, depends: &SecondaryMap<NodeId, bool>) -> Option<()> {
        let graph = self.graph;
        let mut is_needed: SecondaryMap<NodeId, bool> = SecondaryMap::new();
        for (id, node) in graph.nodes().rev() {
            if is_needed[id] || self.nodes.contains_key(&id) {
                node.operands.iter().for_each(|value| is_needed[graph.value(*value).def] = true);
            }
        }
        for (id, node) in graph.nodes() {
            if !depends[id] || !is_needed[id] || self.nodes.contains_key(&id) {
                continue;
            }
            let mut operands = node.operands.iter().zip(&graph.rule(id).operands);
            let tokens = operands.find_map(|(value, dims)| match self.made.get(value) {
                Some(Made::Tokens { tokens }) => single(&dims[*tokens]),
                _ => None,
            });
            self.take(id, tokens?, None)?;
        }
        Some(())
    }
}

/// Per node, whether it depends on `from`.
fn reached_from(graph: &Graph, from: NodeId) -> SecondaryMap<NodeId, bool> {
    let mut reached: SecondaryMap<NodeId, bool> = SecondaryMap::new();
    for (id, node) in graph.nodes() {
        reached[id] = id == from || node.operands.iter().any(|value| reached[graph.value(*value).def]);
    }
    reached
}

/// The dimensions of an operand that are these two factors, if it has both.
fn both(dims: &[Vec<usize>], factors: [usize; 2]) -> Option<[usize; 2]> {
    let [first, second] = factors.map(|factor| dims.iter().position(|dim| *dim == [factor]));
    Some([first?, second?])
}
