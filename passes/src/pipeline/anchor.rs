//! Which node of the forward pass decides the chunk of each node.
//!
//! The nodes of the forward pass that depend on a parameter are cut in their order: a *cut* at one of them
//! begins the next chunk with it. Every other node follows one of them, its *anchor*: a gradient or a
//! recomputation that of the node it belongs to, a single number that of what it is made of, a parameter and
//! what is made of it alone (casts) that of their first reader, what is larger than that (a padded table, a bias
//! for every token) that of its own, an update that of its parameter. What depends on inputs and constants alone
//! has no anchor, nor has the arithmetic on single numbers after the loop: every stage that needs it makes it
//! itself.

use shardc_ir::ops::Op;
use shardc_ir::pipeline::last_forward;
use shardc_ir::{Graph, Node, NodeId, Role, SecondaryMap, ValueId};
use std::collections::HashMap;

/// The anchor of every node.
pub type Anchors = SecondaryMap<NodeId, Option<NodeId>>;

/// Finds the anchors of a training step.
pub fn anchors(graph: &Graph) -> Anchors {
    let mut anchors = Anchors::new();
    let (needs, weights) = dependencies(graph);
    let behind = last_forward(graph);
    let users = graph.users();
    for (id, node) in graph.nodes().filter(|(id, node)| node.role == Role::Forward && needs[*id] && !weights[*id]) {
        let of_operands = || node.operands.iter().filter_map(|value| anchors[graph.value(*value).def]).max();
        // What the loss is made of at the end is read with what it is made of.
        anchors[id] = Some(if is_number(graph, node) { of_operands().unwrap_or(id) } else { id });
    }
    // The gradient of a bias is the sum of what comes from the next block: it belongs to the block of the bias.
    weights_by_readers(graph, &users, &weights, &mut anchors);
    for (id, node) in graph.nodes() {
        if let (Role::Backward(of) | Role::Recompute(of), true) = (node.role, needs[id]) {
            // The backward pass goes to earlier chunks alone.
            let gradients = node
                .operands
                .iter()
                .map(|value| graph.value(*value).def)
                .filter(|def| *def > behind && matches!(graph.node(*def).role, Role::Backward(_)));
            // A gradient is made smaller where its parameter lies, behind the loop.
            let padded = graph.node(of).operands.first().filter(|_| weights[of] && is_pad(graph.node(of)));
            let of = padded.map_or(of, |value| graph.value(*value).def);
            anchors[id] = anchors[of].into_iter().chain(gradients.filter_map(|def| anchors[def])).min();
        }
    }
    // Some are read first in the backward pass.
    weights_by_readers(graph, &users, &weights, &mut anchors);
    // What is made of none of these, as gradients that the forward pass computes are, follows what it reads.
    for (id, node) in graph.nodes() {
        match node.role {
            Role::Backward(of) if anchors[id].is_none() && needs[id] => {
                let operands = node.operands.iter().filter_map(|value| anchors[graph.value(*value).def]);
                anchors[id] = anchors[of].into_iter().chain(operands).min();
            }
            Role::Optimizer => anchors[id] = of_update(graph, &anchors, node),
            _ => {}
        }
    }
    for (id, node) in graph.nodes().filter(|(_, node)| matches!(node.op, Op::State(_))) {
        let update = users.get(&node.results[0]).into_iter().flatten().find_map(|(reader, _)| anchors[*reader]);
        anchors[id] = update;
    }
    // A parameter that nothing reads lies in the first chunk.
    let first = graph.nodes().filter_map(|(id, _)| anchors[id]).min();
    for (id, node) in graph.nodes().filter(|(_, node)| matches!(node.op, Op::Parameter(_))) {
        if !users.contains_key(&node.results[0]) {
            anchors[id] = first;
        }
    }
    anchors
}

/// Lets what depends on parameters alone follow its first reader in the loop, of those with an anchor; what is made of
/// a parameter stays with it, so it is made where the parameter is stored, and sent to other readers: but for what is
/// larger than what it is made of, which is made where it is read.
fn weights_by_readers(
    graph: &Graph,
    users: &HashMap<ValueId, Vec<(NodeId, usize)>>,
    weights: &SecondaryMap<NodeId, bool>,
    anchors: &mut Anchors,
) {
    // Weights stand before their readers: backwards, the first reader is known.
    for (id, node) in graph.nodes().rev().filter(|(id, _)| weights[*id]) {
        let readers = node.results.iter().flat_map(|value| users.get(value).into_iter().flatten());
        let in_loop = readers.filter(|(reader, _)| graph.node(*reader).role != Role::Optimizer);
        anchors[id] = in_loop.filter_map(|(reader, _)| anchors[*reader]).min();
    }
    let grows = |node: &Node| matches!(node.op, Op::Pad(_) | Op::Broadcast(_));
    let stays = |id: NodeId, node: &Node| weights[id] && !node.operands.is_empty() && !grows(node);
    for (id, node) in graph.nodes().filter(|(id, node)| stays(*id, node)) {
        anchors[id] = node.operands.iter().filter_map(|value| anchors[graph.value(*value).def]).min();
    }
}

fn is_pad(node: &Node) -> bool {
    matches!(node.op, Op::Pad(_))
}

/// Whether a node makes single numbers alone.
fn is_number(graph: &Graph, node: &Node) -> bool {
    node.results.iter().all(|value| graph.ty(*value).elements() == 1)
}

/// Per node, whether it depends on a parameter or a state, and whether on such alone.
fn dependencies(graph: &Graph) -> (SecondaryMap<NodeId, bool>, SecondaryMap<NodeId, bool>) {
    let (mut needs, mut weights) = (SecondaryMap::new(), SecondaryMap::new());
    for (id, node) in graph.nodes() {
        let is_stored = matches!(node.op, Op::Parameter(_) | Op::State(_));
        let of = |map: &SecondaryMap<NodeId, bool>| {
            let mut flags = node.operands.iter().map(|value| map[graph.value(*value).def]);
            (flags.clone().any(|flag| flag), flags.all(|flag| flag))
        };
        needs[id] = is_stored || of(&needs).0;
        let alone = !node.operands.is_empty() && of(&weights).1 && node.role == Role::Forward;
        weights[id] = is_stored || alone;
    }
    (needs, weights)
}

/// The anchor of a node of the optimizer.
fn of_update(graph: &Graph, anchors: &Anchors, node: &Node) -> Option<NodeId> {
    let of = |value: &ValueId| anchors[graph.value(*value).def];
    let leaf = node.operands.iter().find(|value| matches!(graph.def(**value).op, Op::Parameter(_) | Op::State(_)));
    let large = || node.operands.iter().find(|value| graph.ty(**value).elements() > 1);
    let gradient = || node.operands.iter().find(|value| matches!(graph.def(**value).role, Role::Backward(_)));
    match node.op {
        Op::SumSquares(_) => gradient().and_then(of),
        _ => leaf.or_else(large).and_then(of),
    }
}

/// The chunk of each node, if the graph is cut at these nodes, which are in their order.
pub fn chunks(anchors: &Anchors, graph: &Graph, cuts: &[NodeId]) -> SecondaryMap<NodeId, Option<u32>> {
    let mut chunks = SecondaryMap::new();
    for (id, _) in graph.nodes() {
        if let Some(anchor) = anchors[id] {
            chunks[id] = Some(cuts.partition_point(|cut| *cut <= anchor) as u32);
        }
    }
    chunks
}
