//! Pads the vocabulary of a head whose rows of logits would not be aligned.
//!
//! A matrix product reads and writes 16 bytes at a time only where rows begin at multiples of that.
//! GPT-2's 50257 entries are odd, so all three products of its head would run element by element.
//! Here the weight gets rows of zeros, once per step, and the cross-entropy is told which entries
//! count. The padded vocabulary divides over ranks as well.
//!
//! Invariant: the loss and the gradients are those of the graph before.

use crate::error::PassError;
use shardc_ir::ops::{CrossEntropy, Pad, Slice};
use shardc_ir::{Graph, NodeId, Op, ValueId};
use std::collections::HashMap;

/// What a row is to be a multiple of: 128 bytes of 16-bit elements.
const MULTIPLE: u64 = 64;
/// Elements of which every row is aligned already: 16 bytes of 16-bit elements.
const ALIGNED: u64 = 8;
/// Below this many entries padding would cost more than it saves.
const LEAST: u64 = 512;

/// A head to pad: its product, and the dimension of the weight that is the vocabulary.
struct Padded {
    product: NodeId,
    dim: usize,
    classes: u64,
}

/// The graph with the vocabulary of its heads padded where that aligns the logits.
///
/// # Errors
/// None but a bug: a node that cannot be added.
pub fn align_head(graph: &Graph) -> Result<Graph, PassError> {
    let mut heads: HashMap<NodeId, Padded> = HashMap::new();
    for (id, _) in graph.nodes() {
        heads.extend(find(graph, id).map(|head| (head.product, head)));
    }
    let mut logits: HashMap<ValueId, (ValueId, u64)> = HashMap::new();
    let rebuilt = graph.rebuild(|new, id, map| {
        let node = graph.node(id);
        if let Some(head) = heads.get(&id) {
            let mut add = |op: Op, operands: &[ValueId], declared: &[_]| {
                let added = new.add_as(op, operands, declared, node.path.clone(), node.role)?;
                Ok::<_, shardc_ir::ops::OpError>(new.result(added))
            };
            let weight = graph.ty(node.operands[1]);
            let mut high = vec![0; weight.rank()];
            high[head.dim] = head.classes.next_multiple_of(MULTIPLE) - head.classes;
            let low = vec![0; weight.rank()];
            let weight = add(Pad { low, high, value: 0.0 }.into(), &[map[&node.operands[1]]], &[])?;
            let narrow = graph.ty(node.results[0]);
            let mut shape = narrow.shape.clone();
            let last = shape.len() - 1;
            shape[last] = head.classes.next_multiple_of(MULTIPLE);
            let whole = add(node.op.clone(), &[map[&node.operands[0]], weight], &[narrow.with_shape(shape)])?;
            // Other readers see the entries that count; if there are none, this is dropped later.
            let (start, limit) = (vec![0; narrow.rank()], narrow.shape.clone());
            map.insert(node.results[0], add(Slice { start, limit }.into(), &[whole], &[])?);
            logits.insert(node.results[0], (whole, head.classes));
            return Ok(true);
        }
        let (Op::CrossEntropy(op), Some((whole, classes))) =
            (&node.op, node.operands.first().and_then(|v| logits.get(v)))
        else {
            return Ok(false);
        };
        let op = CrossEntropy { classes: Some(*classes), ..op.clone() };
        let operands = [*whole, map[&node.operands[1]]];
        let added = new.add_as(op.into(), &operands, &[], node.path.clone(), node.role)?;
        map.extend(node.results.iter().copied().zip(new.node(added).results.clone()));
        Ok(true)
    });
    let rebuilt = rebuilt.and_then(|graph| graph.rebuild(|_, _, _| Ok(false)));
    rebuilt.map_err(PassError::ill_formed("align_head"))
}

/// The head of which a node is the cross-entropy, if its rows are not aligned.
fn find(graph: &Graph, entropy: NodeId) -> Option<Padded> {
    let node = graph.node(entropy);
    let Op::CrossEntropy(CrossEntropy { classes: None, .. }) = node.op else { return None };
    let classes = *graph.ty(node.operands[0]).shape.last()?;
    let product = graph.value(node.operands[0]).def;
    let Op::Matmul(matmul) = &graph.node(product).op else { return None };
    let letters = matmul.letters().ok()?;
    let vocabulary = letters[2].last()?;
    let dim = letters[1].iter().position(|letter| letter == vocabulary).filter(|_| !letters[0].contains(vocabulary))?;
    let wanted = classes >= LEAST && !classes.is_multiple_of(ALIGNED) && graph.node(product).operands.len() == 2;
    wanted.then_some(Padded { product, dim, classes })
}
