//! Differences from a mean, made where they are read.
//!
//! The differences of a value from a statistic of it come after all of the value is in memory. So whoever reads them
//! reads that value instead, and takes the statistic off on the way: the differences are never written, and what is
//! kept for the backward pass is the value, no larger than they are. So it is of differences that are cast to be squared
//! in f32.

use super::{before_casts, copied};
use shardc_ir::ops::{BinaryKind, Cast, Op, OpDef, OpError};
use shardc_ir::{Graph, Node, NodeId, Role, ValueId};
use std::collections::HashMap;

/// How many operations lie between a value and its statistic at the most.
const DEPTH: usize = 8;

/// The graph in which every reader makes the differences that it reads.
pub(super) fn made_where_read(graph: &Graph) -> Result<Graph, OpError> {
    let users = graph.users();
    // Per reader but the first, the differences to make for it.
    let mut wanted: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
    for (id, node) in graph.nodes() {
        let mut readers: Vec<NodeId> = users.get(&node.results[0]).into_iter().flatten().map(|user| user.0).collect();
        readers.dedup();
        let is_shared = readers.len() > 1 && readers.iter().all(|reader| joins(graph.node(*reader)));
        if is_shared && difference(graph, node).is_some() {
            readers[1..].iter().for_each(|reader| wanted.entry(*reader).or_default().push(id));
        }
    }
    graph.rebuild(|new, id, map| {
        let Some(differences) = wanted.get(&id) else { return Ok(false) };
        let node = graph.node(id);
        let mut own: HashMap<ValueId, ValueId> = HashMap::new();
        for of in differences {
            let Some(Node { op, operands, results, .. }) = difference(graph, graph.node(*of)) else { continue };
            // Beside a reader of the backward pass it is part of that.
            let role = match node.role {
                Role::Forward => Role::Forward,
                _ => Role::Backward(*of),
            };
            let copies = graph.def(operands[1]);
            let (source, ty) = (map[&copies.operands[0]], graph.ty(operands[1]).clone());
            let copied = new.add_as(copies.op.clone(), &[source], &[ty], node.path.clone(), role)?;
            let read = [map[&operands[0]], new.result(copied)];
            let made = new.add_as(op.clone(), &read, &[], node.path.clone(), role)?;
            let result = graph.result(*of);
            let made = match result == results[0] {
                true => made,
                false => {
                    let ty = graph.ty(result).clone();
                    new.add_as(Cast {}.into(), &[new.result(made)], &[ty], node.path.clone(), role)?
                }
            };
            own.insert(result, new.result(made));
        }
        let read = |value: &ValueId| *own.get(value).unwrap_or(&map[value]);
        let operands: Vec<ValueId> = node.operands.iter().map(read).collect();
        let copy = new.add_as(node.op.clone(), &operands, &graph.result_types(id), node.path.clone(), node.role)?;
        map.extend(node.results.iter().copied().zip(new.node(copy).results.clone()));
        Ok(true)
    })
}

/// Whether a reader makes what it reads on the way.
fn joins(node: &Node) -> bool {
    matches!(node.op, Op::Binary(_) | Op::Unary(_) | Op::UnaryGrad(_) | Op::Affine(_) | Op::Cast(_) | Op::Reduce(_))
}

/// What makes the differences that a forward node gives, by itself or as a cast of them.
fn difference<'a>(graph: &'a Graph, node: &Node) -> Option<&'a Node> {
    let made_by = graph.def(before_casts(graph, node.results[0]));
    Some(made_by).filter(|made_by| node.role == Role::Forward && is_difference(graph, made_by))
}

/// Whether a forward node takes copies of a vector off every row of a value, of which that vector is a statistic.
fn is_difference(graph: &Graph, node: &Node) -> bool {
    let (Op::Binary(op), Role::Forward, [of, copies]) = (&node.op, node.role, &node.operands[..]) else { return false };
    let rows: Vec<usize> = (0..graph.ty(*of).rank().saturating_sub(1)).collect();
    let is_of_rows = || copied(graph, *copies, &rows).is_some();
    op.kind == BinaryKind::Sub && !rows.is_empty() && is_of_rows() && is_statistic(graph, *copies, *of, DEPTH)
}

/// Whether a value depends on a sum over another.
fn is_statistic(graph: &Graph, value: ValueId, of: ValueId, depth: usize) -> bool {
    let node = graph.def(value);
    let sums = matches!(node.op, Op::Reduce(_)) && node.operands.contains(&of);
    sums || (depth > 0
        && !node.op.is_leaf()
        && node.operands.iter().any(|operand| is_statistic(graph, *operand, of, depth - 1)))
}
