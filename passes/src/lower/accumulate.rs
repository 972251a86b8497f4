//! Sums of products: where a product is only added to something, it is added by the product itself.
//!
//! * `add(matmul(a, b), c)` becomes `matmul(a, b, c)`: the gradient of an activation that several
//!   products contribute to, and that of a weight summed over chunks;
//! * the accumulation over microbatches of a product becomes a product that adds to its accumulator,
//!   which begins at zero in the prologue.
//!
//! The library that multiplies adds while the product is still in registers, so the product is
//! neither written nor read. Whether the sum lies where its summand lay is decided when everything is
//! in order ([`in_place`](super::in_place)).

use super::{Draft, Hint, Place, StorageId};
use shardc_ir::BufferId;
use shardc_ir::ops::{BinaryKind, Constant, Op};
use shardc_ir::program::{Action, Instruction, Stream};
use std::collections::{BTreeMap, BTreeSet};

/// Merges sums into products in every section.
pub(super) fn merge_sums(draft: &mut Draft) {
    for place in Place::ALL {
        let mut uses = Uses::of(draft);
        let mut dropped = BTreeSet::new();
        for at in 0..draft.sections[place as usize].len() {
            if merge_add(draft, &mut uses, place, at) || merge_accumulation(draft, &mut uses, place, at) {
                dropped.insert(at);
            }
        }
        let mut at = 0;
        draft.sections[place as usize].retain(|_| {
            at += 1;
            !dropped.contains(&(at - 1))
        });
    }
}

/// Where storages and buffers are touched: section and index.
struct Uses {
    touched: BTreeMap<StorageId, Vec<(usize, usize)>>,
    /// Storages that outlive the step.
    kept: BTreeSet<StorageId>,
}

impl Uses {
    fn of(draft: &Draft) -> Self {
        let mut touched: BTreeMap<StorageId, Vec<(usize, usize)>> = BTreeMap::new();
        for (section, items) in draft.sections.iter().enumerate() {
            for (at, item) in items.iter().enumerate() {
                for buffer in item.instruction.operands.iter().chain(&item.instruction.results) {
                    touched.entry(draft.storage[*buffer]).or_default().push((section, at));
                }
            }
        }
        let mut kept: BTreeSet<StorageId> = draft.slots.iter().map(|slot| draft.storage[slot.buffer]).collect();
        kept.extend(draft.readings.iter().map(|reading| draft.storage[reading.buffer]));
        Self { touched, kept }
    }

    /// Where the product that makes `buffer` is, if nothing but the instruction `reader` reads it.
    fn product(&self, draft: &Draft, buffer: BufferId, place: Place, reader: usize) -> Option<usize> {
        let storage = draft.storage[buffer];
        let [(first, maker), (second, last)] = self.touched.get(&storage)?[..] else { return None };
        let here = first == place as usize && second == first && last == reader && !self.kept.contains(&storage);
        let instruction = &draft.sections[first][maker].instruction;
        let is_product =
            matches!(instruction.action, Action::Compute(Op::Matmul(_))) && instruction.results == [buffer];
        (here && is_product).then_some(maker)
    }

    /// A sum that was made and read by the instruction `from` is now by `to`.
    fn replace(&mut self, storages: &[StorageId], section: usize, from: usize, to: usize) {
        for storage in storages {
            for place in self.touched.entry(*storage).or_default() {
                if *place == (section, from) {
                    *place = (section, to);
                }
            }
        }
    }
}

/// Merges instruction `at`, if it adds a product to what was there before it.
fn merge_add(draft: &mut Draft, uses: &mut Uses, place: Place, at: usize) -> bool {
    let Instruction { action: Action::Compute(Op::Binary(op)), operands, results, .. } =
        &draft.sections[place as usize][at].instruction
    else {
        return false;
    };
    let ([a, b], [sum]) = (&operands[..], &results[..]) else { return false };
    let (a, b, sum) = (*a, *b, *sum);
    if op.kind != BinaryKind::Add || draft.buffers[a].ty != draft.buffers[b].ty {
        return false;
    }
    for (product, addend) in [(b, a), (a, b)] {
        let Some(maker) = uses.product(draft, product, place, at) else { continue };
        let section = &draft.sections[place as usize];
        let is_plain = section[maker].instruction.operands.len() == 2;
        let storage = draft.storage[addend];
        // The summand is there before the product, and stays as it is up to the sum.
        let written =
            |index: usize| section[index].instruction.results.iter().any(|result| draft.storage[*result] == storage);
        if !is_plain || storage == draft.storage[product] || (maker..at).any(written) {
            continue;
        }
        let instruction = &mut draft.sections[place as usize][maker].instruction;
        instruction.operands.push(addend);
        instruction.results = vec![sum];
        uses.replace(&[storage, draft.storage[sum]], place as usize, at, maker);
        uses.touched.remove(&draft.storage[product]);
        return true;
    }
    false
}

/// Merges instruction `at`, if it accumulates a product, or a sum of products, over microbatches.
fn merge_accumulation(draft: &mut Draft, uses: &mut Uses, place: Place, at: usize) -> bool {
    let instruction = &draft.sections[place as usize][at].instruction;
    let (Action::Accumulate, [source], [total]) =
        (&instruction.action, &instruction.operands[..], &instruction.results[..])
    else {
        return false;
    };
    let (source, total, origin) = (*source, *total, instruction.source);
    if draft.buffers[source].ty != draft.buffers[total].ty {
        return false;
    }
    // From the last product to the first of the sum.
    let mut chain = Vec::new();
    let (mut part, mut reader) = (source, at);
    loop {
        let Some(maker) = uses.product(draft, part, place, reader) else { return false };
        chain.push(maker);
        let Some(addend) = draft.sections[place as usize][maker].instruction.operands.get(2) else { break };
        (part, reader) = (*addend, maker);
    }
    for maker in &chain {
        let instruction = &mut draft.sections[place as usize][*maker].instruction;
        instruction.operands.truncate(2);
        instruction.operands.push(total);
        instruction.results = vec![total];
    }
    let storage = draft.storage[total];
    let touched = uses.touched.entry(storage).or_default();
    touched.retain(|place| *place != (Place::Microbatch as usize, at));
    touched.extend(chain.iter().map(|maker| (place as usize, *maker)));
    let zero = Action::Compute(Constant { value: 0.0 }.into());
    draft.push(Place::Prologue, zero, vec![], vec![total], Stream::Compute, origin, Hint::None);
    true
}
