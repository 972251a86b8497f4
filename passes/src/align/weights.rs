//! Transposes weights whose columns would be aligned, and whose rows are not.
//!
//! A layer over the 196 patches of a picture has a weight `[k, 196]`: the product that reads it, and both that
//! differentiate it, would run element by element. Of `[196, k]` none does, and that is the same weight transposed once a
//! step, as its gradient is.
//!
//! Invariant: the loss and the gradients are those of the graph before.

use super::ALIGNED;
use crate::error::PassError;
use shardc_ir::ops::{Matmul, Transpose};
use shardc_ir::{Graph, NodeId, Op, ValueId};
use std::collections::HashMap;

/// How often a product reads each element of a weight at the least, for a transpose to be worth its launch.
const READ: f64 = 4096.0;

/// The graph with weights transposed where that aligns their rows.
///
/// # Errors
/// None but a bug: a node that cannot be added.
pub fn align_weights(graph: &Graph) -> Result<Graph, PassError> {
    let mut transposed: HashMap<ValueId, ValueId> = HashMap::new();
    let rebuilt = graph.rebuild(|new, id, map| {
        let node = graph.node(id);
        let Some((index, op)) = find(graph, id) else { return Ok(false) };
        let weight = node.operands[index];
        let turned = match transposed.get(&weight) {
            Some(known) => *known,
            None => {
                let of = graph.def(weight);
                let transpose = Transpose { permutation: vec![1, 0] };
                let added = new.add_as(transpose.into(), &[map[&weight]], &[], of.path.clone(), of.role)?;
                new.result(added)
            }
        };
        transposed.insert(weight, turned);
        let mut operands: Vec<ValueId> = node.operands.iter().map(|operand| map[operand]).collect();
        operands[index] = turned;
        let declared = graph.result_types(id);
        let product = new.add_as(op.into(), &operands, &declared, node.path.clone(), node.role)?;
        map.insert(graph.result(id), new.result(product));
        Ok(true)
    });
    rebuilt.map_err(PassError::ill_formed("align_weights"))
}

/// Which operand of a product is to be transposed, and the product then.
fn find(graph: &Graph, id: NodeId) -> Option<(usize, Matmul)> {
    let node = graph.node(id);
    let Op::Matmul(op) = &node.op else { return None };
    let (mut letters, types) = (op.letters().ok()?, graph.operand_types(id));
    let all: f64 = op.sizes(&types).ok()?.iter().map(|(_, size)| *size as f64).product();
    let index = [0, 1].into_iter().find(|index| {
        let ty = &types[*index];
        matches!(ty.shape[..], [columns, row] if columns.is_multiple_of(ALIGNED) && row > 1 && !row.is_multiple_of(ALIGNED))
            && ty.dtype.size() == 2
            && all >= READ * ty.elements() as f64
            && is_parameter(graph, node.operands[*index])
    })?;
    letters[index].reverse();
    Some((index, Matmul::of_letters(letters)))
}

/// Whether a value is a parameter, cast or not.
fn is_parameter(graph: &Graph, value: ValueId) -> bool {
    let node = graph.def(value);
    match &node.op {
        Op::Parameter(_) => true,
        Op::Cast(_) => is_parameter(graph, node.operands[0]),
        _ => false,
    }
}
