//! Pads the vocabulary of a head whose rows of logits would not be aligned.
//!
//! GPT-2's 50257 entries are odd, so all three products of its head would run element by element.
//! Here the weight (and what is added to the logits) gets rows of zeros, once per step, and the cross-entropy is told
//! which entries count. The padded vocabulary divides over ranks as well.
//!
//! Invariant: the loss and the gradients are those of the graph before.

use super::ALIGNED;
use crate::error::PassError;
use crate::head::makers;
use shardc_ir::ops::{BinaryKind, CrossEntropy, Pad, Slice, UnaryKind};
use shardc_ir::{Graph, NodeId, Op, TensorType, ValueId};
use std::collections::HashMap;

/// What a row is to be a multiple of: 128 bytes of 16-bit elements.
const MULTIPLE: u64 = 64;
/// Below this many entries padding would cost more than it saves.
const LEAST: u64 = 512;

/// A node of a head to pad.
#[derive(Clone, Copy)]
struct Padded {
    /// The factor of its rule that is the vocabulary.
    vocabulary: usize,
    classes: u64,
}

/// The graph with the vocabulary of its heads padded where that aligns the logits.
///
/// # Errors
/// None but a bug: a node that cannot be added.
pub fn align_head(graph: &Graph) -> Result<Graph, PassError> {
    let mut heads: HashMap<NodeId, Padded> = HashMap::new();
    for (id, _) in graph.nodes() {
        heads.extend(find(graph, id).into_iter().flatten());
    }
    // Logits with more entries than count, and how many count.
    let mut wide: HashMap<ValueId, (ValueId, u64)> = HashMap::new();
    let rebuilt = graph.rebuild(|new, id, map| {
        let node = graph.node(id);
        let mut add = |op: Op, operands: &[ValueId], declared: &[TensorType]| {
            let added = new.add_as(op, operands, declared, node.path.clone(), node.role)?;
            Ok::<_, shardc_ir::ops::OpError>(new.node(added).results.clone())
        };
        if let Some(Padded { vocabulary, classes }) = heads.get(&id).copied() {
            let dim = |dims: &[Vec<usize>]| dims.iter().position(|dim| *dim == [vocabulary]);
            let missing = classes.next_multiple_of(MULTIPLE) - classes;
            let mut operands = Vec::new();
            for (value, dims) in node.operands.iter().zip(&graph.rule(id).operands) {
                operands.push(match (wide.get(value), dim(dims)) {
                    (Some((whole, _)), _) => *whole,
                    (None, Some(dim)) => {
                        let low = vec![0; graph.ty(*value).rank()];
                        let mut high = low.clone();
                        high[dim] = missing;
                        add(Pad { low, high, value: 0.0 }.into(), &[map[value]], &[])?[0]
                    }
                    (None, None) => map[value],
                });
            }
            let padded = |(ty, dims): (&TensorType, &Vec<Vec<usize>>)| {
                let mut shape = ty.shape.clone();
                dim(dims).into_iter().for_each(|dim| shape[dim] += missing);
                ty.with_shape(shape)
            };
            let narrow = graph.result_types(id);
            let declared: Vec<TensorType> = narrow.iter().zip(&graph.rule(id).results).map(padded).collect();
            let whole = add(node.op.clone(), &operands, &declared)?;
            for ((value, whole), ty) in node.results.iter().zip(whole).zip(&narrow) {
                // Other readers see the entries that count; if there are none, this is dropped later.
                let (start, limit) = (vec![0; ty.rank()], ty.shape.clone());
                map.insert(*value, add(Slice { start, limit }.into(), &[whole], &[])?[0]);
                wide.insert(*value, (whole, classes));
            }
            return Ok(true);
        }
        let (Op::CrossEntropy(op), Some((whole, classes))) =
            (&node.op, node.operands.first().and_then(|value| wide.get(value)))
        else {
            return Ok(false);
        };
        let op = CrossEntropy { classes: Some(*classes), ..op.clone() };
        let halves = add(op.into(), &[*whole, map[&node.operands[1]]], &[])?;
        map.extend(node.results.iter().copied().zip(halves));
        Ok(true)
    });
    let rebuilt = rebuilt.and_then(|graph| graph.rebuild(|_, _, _| Ok(false)));
    rebuilt.map_err(PassError::ill_formed("align_head"))
}

/// The nodes that make the logits of a cross-entropy, if their rows are not aligned.
fn find(graph: &Graph, entropy: NodeId) -> Option<Vec<(NodeId, Padded)>> {
    let node = graph.node(entropy);
    let Op::CrossEntropy(CrossEntropy { classes: None, .. }) = node.op else { return None };
    let classes = *graph.ty(node.operands[0]).shape.last()?;
    if classes < LEAST || classes.is_multiple_of(ALIGNED) {
        return None;
    }
    let makers = makers(graph, entropy)?;
    if !makers.keys().all(|id| is_finite(&graph.node(*id).op)) {
        return None;
    }
    Some(makers.into_iter().map(|(id, vocabulary)| (id, Padded { vocabulary, classes })).collect())
}

/// Whether an operation is finite where its operands are zeros, and so is its derivative: what is divided by a padding, or is
/// its root, is no number, and a gradient of zero times that is none either.
fn is_finite(op: &Op) -> bool {
    use BinaryKind::{Add, Max, Min, Mul, Sub};
    use UnaryKind::{Abs, Cos, Erf, Exp, Gelu, GeluTanh, Neg, Relu, Sigmoid, Silu, Sin, Tanh};
    match op {
        Op::Matmul(_) | Op::Broadcast(_) | Op::Constant(_) | Op::Cast(_) | Op::Affine(_) => true,
        Op::Reshape(_) | Op::Transpose(_) => true,
        Op::Binary(op) => matches!(op.kind, Add | Sub | Mul | Max | Min),
        Op::Unary(op) => {
            matches!(op.kind, Neg | Abs | Exp | Sin | Cos | Tanh | Erf | Sigmoid | Relu | Gelu | GeluTanh | Silu)
        }
        _ => false,
    }
}
