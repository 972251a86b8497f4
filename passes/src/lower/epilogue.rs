//! What products make of themselves.
//!
//! Where a product is first read by an activation, or only by an activation's derivative, the product makes
//! it: the library that multiplies has the element in a register. It approximates the exponential function
//! as well as elements of 16 bits need it; wider ones are left alone. What the backward pass reads of the
//! product is written beside the activation.
//!
//! The gradient of a bias, which sums what the gradient of its weight multiplies, is left to a kernel of its
//! own, or to that which makes what it sums: beside the product it takes longer than alone (on an H200 by a
//! tenth to a fifth of the product).

use super::draft::{Draft, StorageId};
use super::draft::{Position, Touched, contraction};
use shardc_ir::ops::{Epilogue, Op};
use shardc_ir::program::Action;
use shardc_ir::{BufferId, OpDef};
use std::collections::BTreeSet;

/// The library takes rows of a multiple of this many elements.
const ALIGNED: u64 = 8;

/// Merges activations into products, in every section.
pub(super) fn merge_epilogues(draft: &mut Draft) {
    for section in 0..draft.sections.len() {
        let mut dropped = BTreeSet::new();
        let (touched, kept) = (draft.touched(), draft.kept());
        for at in 0..draft.sections[section].len() {
            let Some((epilogue, product, maker)) = candidate(draft, &touched, &kept, (section, at)) else { continue };
            if dropped.contains(&maker) {
                continue;
            }
            let activation = draft.sections[section][at].instruction.clone();
            let instruction = &mut draft.sections[section][maker].instruction;
            let Action::Compute(Op::Matmul(op)) = &mut instruction.action else { continue };
            if op.epilogue.is_some() {
                continue;
            }
            op.epilogue = Some(epilogue);
            instruction.results = activation.results;
            match epilogue {
                // What nothing else reads is not written.
                Epilogue::GeluTanh if product.is_read => instruction.results.push(product.buffer),
                Epilogue::GeluTanh => {}
                _ => instruction.operands.push(activation.operands[1]),
            }
            dropped.insert(at);
        }
        let mut index = 0;
        draft.sections[section].retain(|_| {
            index += 1;
            !dropped.contains(&(index - 1))
        });
    }
}

/// What a product makes.
struct Product {
    buffer: BufferId,
    /// Whether something beside the activation reads it.
    is_read: bool,
}

/// What the instruction at a place would be as the epilogue of a product, that product, and where it is made.
fn candidate(
    draft: &Draft,
    touched: &Touched,
    kept: &BTreeSet<StorageId>,
    (section, at): Position,
) -> Option<(Epilogue, Product, usize)> {
    let instruction = &draft.sections[section][at].instruction;
    let epilogue = match &instruction.action {
        Action::Compute(Op::Unary(op)) if op.kind == Epilogue::GeluTanh.function() => Epilogue::GeluTanh,
        Action::Compute(Op::UnaryGrad(op)) if op.kind == Epilogue::GeluTanhGrad.function() => Epilogue::GeluTanhGrad,
        _ => return None,
    };
    let (buffer, result) = (*instruction.operands.first()?, *instruction.results.first()?);
    let ty = &draft.buffers[buffer].ty;
    let is_taken = ty.dtype.is_float() && ty.dtype.size() == 2 && ty.shape.last()?.is_multiple_of(ALIGNED);
    let of = |buffer: BufferId| touched.of(draft.storage[buffer]);
    let users = of(buffer);
    let (first_section, maker) = *users.first()?;
    let product = &draft.sections[section].get(maker)?.instruction;
    let fits = first_section == section
        && is_taken
        && product.results == [buffer]
        && contraction(product).is_some_and(|op| op.epilogue.is_none() && op.addend(product.operands.len()).is_none())
        && users.get(1) == Some(&(section, at))
        && of(result).first() == Some(&(section, at))
        && [buffer, result].iter().all(|own| !kept.contains(&draft.storage[*own]));
    if !fits {
        return None;
    }
    let is_read = users.len() > 2;
    match epilogue {
        Epilogue::GeluTanh => Some((epilogue, Product { buffer, is_read }, maker)),
        // Where the derivative is taken is there before the product, and stays as it is up to here.
        _ => {
            let place = *instruction.operands.get(1)?;
            let writes = |at: &Position| {
                let mut results = draft.sections[at.0][at.1].instruction.results.iter();
                results.any(|other| draft.storage[*other] == draft.storage[place])
            };
            let between = |at: &&Position| **at >= (section, maker);
            let free = !of(place).iter().filter(between).any(writes);
            let has_bias = contraction(product).is_some_and(|op| op.bias);
            (free && !is_read && !has_bias).then_some((epilogue, Product { buffer, is_read }, maker))
        }
    }
}
