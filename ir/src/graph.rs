//! A graph: what one device would compute, in static single assignment.
//!
//! Nodes lie in an arena in topological order: a node refers only to values of nodes before it, so
//! the order of the arena is an order of execution. A pass does not edit a graph in place; it
//! builds a new one, copying what it keeps ([`Graph::rebuild`]).
//!
//! A training step is a pure function from leaves to outputs. Leaves are [`Op::Input`] (a batch, a
//! learning rate), [`Op::Parameter`] and [`Op::State`] (optimizer state). An output either is a
//! result (the loss) or replaces a leaf for the next step ([`OutputKind::Update`]).

use crate::FactorRule;
use crate::entity::{NodeId, PrimaryMap, ValueId};
use crate::ops::{Op, OpDef, OpError};
use crate::types::TensorType;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// Why a node is in the graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes the loss.
    #[default]
    Forward,
    /// Computes a gradient; it came from this forward node.
    Backward(NodeId),
    /// Computes a forward node's value again, for the backward pass.
    Recompute(NodeId),
    /// Reduces, clips and applies the gradients.
    Optimizer,
}

impl Role {
    /// The node that it refers to.
    pub fn source(self) -> Option<NodeId> {
        match self {
            Self::Backward(of) | Self::Recompute(of) => Some(of),
            Self::Forward | Self::Optimizer => None,
        }
    }

    /// The same role in another graph, where `moved` says which node is which. What comes before the node that it
    /// refers to is part of the forward pass.
    pub fn moved(self, moved: impl FnOnce(NodeId) -> Option<NodeId>) -> Self {
        match self {
            Self::Backward(of) => moved(of).map_or(Self::Forward, Self::Backward),
            Self::Recompute(of) => moved(of).map_or(Self::Forward, Self::Recompute),
            other => other,
        }
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// The values it reads.
    pub operands: Vec<ValueId>,
    /// The values it makes.
    pub results: Vec<ValueId>,
    /// The module it came from, in the user's own names: `blocks.0.attention.query`.
    pub path: String,
    /// Why it is here.
    pub role: Role,
}

/// One value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Its type, with global sizes.
    pub ty: TensorType,
    /// The node that makes it.
    pub def: NodeId,
    /// Which of the node's results it is.
    pub index: usize,
}

/// What an output is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputKind {
    /// Read by the caller after the step.
    Result,
    /// Takes the place of this leaf in the next step.
    Update(ValueId),
}

/// A named output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Its name: `loss`, `grad_norm`, or the name of the leaf it replaces.
    pub name: String,
    /// The value.
    pub value: ValueId,
    /// What it is for.
    pub kind: OutputKind,
}

/// A node's factor rule, made when it is first asked for. It follows from the node, so two of them never tell
/// graphs apart.
#[derive(Clone, Debug, Default)]
struct KnownRule(OnceLock<Arc<FactorRule>>);

impl PartialEq for KnownRule {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// A graph; see the [module](self).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// The name in the text form.
    pub name: String,
    nodes: PrimaryMap<NodeId, Node>,
    values: PrimaryMap<ValueId, Value>,
    rules: PrimaryMap<NodeId, KnownRule>,
    /// The outputs.
    pub outputs: Vec<Output>,
}

impl Graph {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Adds a node. `declared` are the types of its results, needed where the operands do not
    /// determine them (a reshape, a leaf); otherwise it may be empty, and is checked if it is not.
    pub fn add(&mut self, op: impl Into<Op>, operands: &[ValueId], declared: &[TensorType]) -> Result<NodeId, OpError> {
        self.add_as(op.into(), operands, declared, String::new(), Role::Forward)
    }

    /// [`add`](Self::add), with the module path and the role.
    pub fn add_as(
        &mut self,
        op: Op,
        operands: &[ValueId],
        declared: &[TensorType],
        path: String,
        role: Role,
    ) -> Result<NodeId, OpError> {
        if let Some(unknown) = operands.iter().find(|value| !self.values.is_valid(**value)) {
            return Err(OpError::new(&op, format!("operand {unknown} is not defined before it")));
        }
        let operand_types: Vec<TensorType> = operands.iter().map(|value| self.values[*value].ty.clone()).collect();
        let inferred = op.infer(&operand_types, declared)?;
        if !declared.is_empty() && inferred != declared {
            let list = |types: &[TensorType]| types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(OpError::new(&op, format!("declared as {}, but it makes {}", list(declared), list(&inferred))));
        }
        let id = self.nodes.next_key();
        let make = |(index, ty)| Value { ty, def: id, index };
        let results: Vec<_> = inferred.into_iter().enumerate().map(make).map(|value| self.values.push(value)).collect();
        self.rules.push(KnownRule::default());
        Ok(self.nodes.push(Node { op, operands: operands.to_vec(), results, path, role }))
    }

    /// The nodes in order.
    pub fn nodes(&self) -> impl DoubleEndedIterator<Item = (NodeId, &Node)> {
        self.nodes.iter()
    }

    /// The values in the order of their nodes.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = (ValueId, &Value)> {
        self.values.iter()
    }

    /// The number of nodes.
    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// The number of values.
    pub fn value_count(&self) -> usize {
        self.values.len()
    }

    /// Whether the id names a node of this graph.
    pub fn has_node(&self, id: NodeId) -> bool {
        self.nodes.is_valid(id)
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id]
    }

    /// Changes where a node came from, or why it is there.
    pub fn annotate(&mut self, id: NodeId, path: impl Into<String>, role: Role) {
        self.nodes[id].path = path.into();
        self.nodes[id].role = role;
    }

    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id]
    }

    /// Whether the id names a value of this graph.
    pub fn has_value(&self, id: ValueId) -> bool {
        self.values.is_valid(id)
    }

    /// A value's type.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        &self.values[id].ty
    }

    /// The node that makes a value.
    pub fn def(&self, id: ValueId) -> &Node {
        &self.nodes[self.values[id].def]
    }

    /// The only result of a node.
    pub fn result(&self, id: NodeId) -> ValueId {
        self.nodes[id].results[0]
    }

    /// The types of a node's operands.
    pub fn operand_types(&self, id: NodeId) -> Vec<TensorType> {
        self.nodes[id].operands.iter().map(|value| self.values[*value].ty.clone()).collect()
    }

    /// The types of a node's results.
    pub fn result_types(&self, id: NodeId) -> Vec<TensorType> {
        self.nodes[id].results.iter().map(|value| self.values[*value].ty.clone()).collect()
    }

    /// The node's factor rule.
    pub fn rule(&self, id: NodeId) -> &FactorRule {
        let make = || Arc::new(self.nodes[id].op.rule(&self.operand_types(id), &self.result_types(id)));
        self.rules[id].0.get_or_init(make)
    }

    /// Declares an output.
    pub fn output(&mut self, name: impl Into<String>, value: ValueId, kind: OutputKind) {
        self.outputs.push(Output { name: name.into(), value, kind });
    }

    /// The output of a name.
    pub fn find_output(&self, name: &str) -> Option<&Output> {
        self.outputs.iter().find(|output| output.name == name)
    }

    /// The leaves: inputs, parameters, states, in order.
    pub fn leaves(&self) -> impl Iterator<Item = (ValueId, &Node)> {
        self.nodes.values().filter(|node| node.op.is_leaf()).map(|node| (node.results[0], node))
    }

    /// The nodes that update parameters, in order.
    pub fn updates(&self) -> impl DoubleEndedIterator<Item = (NodeId, &Node)> {
        self.nodes().filter(|(_, node)| node.op.update().is_some())
    }

    /// Who reads each value, in order; a node that reads a value twice appears twice.
    pub fn users(&self) -> HashMap<ValueId, Vec<(NodeId, usize)>> {
        let mut users: HashMap<ValueId, Vec<(NodeId, usize)>> = HashMap::new();
        for (id, node) in &self.nodes {
            for (index, value) in node.operands.iter().enumerate() {
                users.entry(*value).or_default().push((id, index));
            }
        }
        users
    }

    /// Copies a node of another graph, its operands mapped by `map`; records the results in `map`.
    /// The role's node is kept as it is: remap it with `nodes` where the ids change.
    pub fn copy_node(
        &mut self,
        from: &Graph,
        id: NodeId,
        map: &mut HashMap<ValueId, ValueId>,
    ) -> Result<NodeId, OpError> {
        let node = from.node(id);
        let operands: Vec<ValueId> = node.operands.iter().map(|value| map[value]).collect();
        let copy = self.add_as(node.op.clone(), &operands, &from.result_types(id), node.path.clone(), node.role)?;
        for (old, new) in node.results.iter().zip(self.nodes[copy].results.clone()) {
            map.insert(*old, new);
        }
        // Results are as they were; where operands are too, so is the rule.
        let is_same = || node.operands.iter().zip(&operands).all(|(old, new)| from.ty(*old) == self.ty(*new));
        if from.rules[id].0.get().is_some() && is_same() {
            self.rules[copy] = from.rules[id].clone();
        }
        Ok(copy)
    }

    /// Builds the graph anew, node by node. `step` sees each old node and either handles it (adds
    /// what replaces it to the new graph, maps its results, returns `true`) or lets it be copied.
    /// Outputs and the nodes that roles refer to are mapped; nodes that nothing reads are dropped.
    pub fn rebuild(
        &self,
        mut step: impl FnMut(&mut Graph, NodeId, &mut HashMap<ValueId, ValueId>) -> Result<bool, OpError>,
    ) -> Result<Graph, OpError> {
        let live = self.live();
        let mut graph = Graph::new(self.name.clone());
        let (mut map, mut moved) = (HashMap::new(), HashMap::new());
        for (id, node) in self.nodes.iter().filter(|(id, _)| live[id.as_u32() as usize]) {
            let first = graph.nodes.next_key();
            if !step(&mut graph, id, &mut map)? {
                graph.copy_node(self, id, &mut map)?;
            }
            let def = node.results.iter().filter_map(|old| map.get(old)).map(|new| graph.values[*new].def).next_back();
            moved.insert(id, def.unwrap_or(first));
            for fresh in (first.as_u32()..graph.nodes.len() as u32).map(NodeId::from_u32) {
                let role = graph.nodes[fresh].role;
                graph.nodes[fresh].role = role.moved(|of| Some(moved.get(&of).copied().unwrap_or(of)));
            }
        }
        graph.copy_outputs(self, &map);
        Ok(graph)
    }

    /// Copies the outputs of a graph of which `map` has every value that they name.
    pub fn copy_outputs(&mut self, from: &Graph, map: &HashMap<ValueId, ValueId>) {
        for output in &from.outputs {
            let kind = match output.kind {
                OutputKind::Update(leaf) => OutputKind::Update(map[&leaf]),
                OutputKind::Result => OutputKind::Result,
            };
            self.output(output.name.clone(), map[&output.value], kind);
        }
    }

    /// Which nodes an output depends on; leaves always count.
    pub fn live(&self) -> Vec<bool> {
        let mut live = vec![false; self.nodes.len()];
        for output in &self.outputs {
            live[self.values[output.value].def.as_u32() as usize] = true;
        }
        for (id, node) in self.nodes.iter().rev() {
            let index = id.as_u32() as usize;
            live[index] |= node.op.is_leaf();
            if live[index] {
                for value in &node.operands {
                    live[self.values[*value].def.as_u32() as usize] = true;
                }
            }
        }
        live
    }
}
