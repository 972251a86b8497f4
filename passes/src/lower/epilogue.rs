//! What products make beside themselves.
//!
//! * Where a product is first read by an activation, or only by an activation's derivative, the product makes
//!   it: the library that multiplies has the element in a register. It approximates the exponential function
//!   as well as elements of 16 bits need it; wider ones are left alone. What the backward pass reads of the
//!   product is written beside the activation.
//! * The gradient of a bias sums what the gradient of its weight multiplies: the product makes both.

use super::{Draft, StorageId};
use shardc_ir::BufferId;
use shardc_ir::ops::{Epilogue, Matmul, Op, ReduceOp};
use shardc_ir::program::{Action, Instruction};
use std::collections::{BTreeMap, BTreeSet};

/// The library takes rows of a multiple of this many elements.
const ALIGNED: u64 = 8;

/// Merges activations and sums into products, in every section.
pub(super) fn merge_epilogues(draft: &mut Draft) {
    merge_activations(draft);
    merge_operand_sums(draft);
}

fn merge_activations(draft: &mut Draft) {
    for section in 0..draft.sections.len() {
        let mut dropped = BTreeSet::new();
        let touched = touches(draft);
        for at in 0..draft.sections[section].len() {
            let Some((epilogue, product, maker)) = candidate(draft, &touched, (section, at)) else { continue };
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
        drop_items(draft, section, &dropped);
    }
}

fn drop_items(draft: &mut Draft, section: usize, dropped: &BTreeSet<usize>) {
    let mut index = 0;
    draft.sections[section].retain(|_| {
        index += 1;
        !dropped.contains(&(index - 1))
    });
}

/// Where the sum of a tensor is made before a product sums over the same: the product takes the place of the
/// sum, with it as its second result.
fn merge_operand_sums(draft: &mut Draft) {
    for section in 0..draft.sections.len() {
        // Where each tensor is summed, and over what.
        let mut sums: BTreeMap<(BufferId, Vec<usize>), usize> = BTreeMap::new();
        let mut written: BTreeMap<StorageId, usize> = BTreeMap::new();
        let mut dropped = BTreeSet::new();
        for at in 0..draft.sections[section].len() {
            let instruction = &draft.sections[section][at].instruction;
            let before = summed_product(draft, instruction).and_then(|key| sums.remove(&key));
            let is_made = |sum: &usize| {
                let mut storages = instruction.operands.iter().map(|id| draft.storage[*id]);
                storages.all(|storage| written.get(&storage).is_none_or(|writer| writer < sum))
            };
            if let Some(sum) = before.filter(is_made) {
                let mut product = draft.sections[section][at].clone();
                let results = draft.sections[section][sum].instruction.results.clone();
                let wide = [product.instruction.results[0], results[0]].map(|id| draft.buffers[id].ty.dtype);
                if let Action::Compute(Op::Matmul(op)) = &mut product.instruction.action
                    && wide[0] == wide[1]
                {
                    op.epilogue = Some(Epilogue::Sums);
                    product.instruction.results.extend(results);
                    draft.sections[section][sum] = product;
                    dropped.insert(at);
                }
            }
            let instruction = &draft.sections[section][at].instruction;
            if let Action::Compute(Op::Reduce(op)) = &instruction.action
                && op.kind == ReduceOp::Sum
            {
                sums.insert((instruction.operands[0], op.dims.clone()), at);
            }
            if !draft.is_view(instruction) {
                written.extend(instruction.results.iter().map(|id| (draft.storage[*id], at)));
            }
        }
        drop_items(draft, section, &dropped);
    }
}

/// What a product sums its second operand over, if it may make that sum as well.
fn summed_product(draft: &Draft, instruction: &Instruction) -> Option<(BufferId, Vec<usize>)> {
    let op = matmul(instruction).filter(|op| op.epilogue.is_none() && !op.bias)?;
    let [_, operand] = instruction.operands[..] else { return None };
    let is_taken = draft.buffers[operand].ty.dtype.size() == 2;
    // No index of both operands is in the result.
    let is_single = op.dims().is_ok_and(|dims| dims.batch.is_empty());
    Some((operand, op.summed().ok()?)).filter(|_| is_taken && is_single)
}

/// A place of an instruction: its section and its index.
type Position = (usize, usize);

/// Who touches each storage, in order.
fn touches(draft: &Draft) -> BTreeMap<StorageId, Vec<Position>> {
    let mut touched: BTreeMap<StorageId, Vec<Position>> = BTreeMap::new();
    for (section, items) in draft.sections.iter().enumerate() {
        for (at, item) in items.iter().enumerate() {
            for buffer in item.instruction.operands.iter().chain(&item.instruction.results) {
                touched.entry(draft.storage[*buffer]).or_default().push((section, at));
            }
        }
    }
    touched
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
    touched: &BTreeMap<StorageId, Vec<Position>>,
    (section, at): Position,
) -> Option<(Epilogue, Product, usize)> {
    let instruction = &draft.sections[section][at].instruction;
    let epilogue = match &instruction.action {
        Action::Compute(Op::Unary(op)) if Some(op.kind) == Epilogue::GeluTanh.function() => Epilogue::GeluTanh,
        Action::Compute(Op::UnaryGrad(op)) if Some(op.kind) == Epilogue::GeluTanhGrad.function() => {
            Epilogue::GeluTanhGrad
        }
        _ => return None,
    };
    let (buffer, result) = (*instruction.operands.first()?, *instruction.results.first()?);
    let ty = &draft.buffers[buffer].ty;
    let is_taken = ty.dtype.is_float() && ty.dtype.size() == 2 && ty.shape.last()?.is_multiple_of(ALIGNED);
    let of = |buffer: BufferId| touched.get(&draft.storage[buffer]).map_or(&[][..], Vec::as_slice);
    let users = of(buffer);
    let (first_section, maker) = *users.first()?;
    let product = &draft.sections[section].get(maker)?.instruction;
    let fits = first_section == section
        && is_taken
        && product.results == [buffer]
        && matmul(product).is_some_and(|op| op.epilogue.is_none() && op.addend(product.operands.len()).is_none())
        && users.get(1) == Some(&(section, at))
        && of(result).first() == Some(&(section, at))
        && outlives_nothing(draft, buffer, result);
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
            let has_bias = matmul(product).is_some_and(|op| op.bias);
            (free && !is_read && !has_bias).then_some((epilogue, Product { buffer, is_read }, maker))
        }
    }
}

/// Whether neither of two buffers is a slot or a reading, which others know by their place.
fn outlives_nothing(draft: &Draft, a: BufferId, b: BufferId) -> bool {
    let kept = draft.slots.iter().map(|slot| slot.buffer).chain(draft.readings.iter().map(|reading| reading.buffer));
    kept.into_iter().all(|kept| [a, b].iter().all(|own| draft.storage[*own] != draft.storage[kept]))
}

/// The contraction of an instruction, if it is one.
fn matmul(instruction: &Instruction) -> Option<&Matmul> {
    match &instruction.action {
        Action::Compute(Op::Matmul(op)) => Some(op),
        _ => None,
    }
}
