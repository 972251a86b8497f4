//! The first and the last microbatch, peeled off the loop where collectives can run beside them, or sums begin.
//!
//! What is done once in a step lies in front of the microbatches or behind them, where nothing runs beside a collective:
//! with ZeRO 1 and 2 every weight is gathered before the first kernel, with ZeRO 0 and 1 every gradient is reduced when
//! the last kernel of the backward pass is done. So the first microbatch becomes part of the prologue, where gathers go
//! to their first readers (and from there ahead, by [`crate::schedule`]), and the last one part of the epilogue, where
//! a reduction goes behind the last term of its sum: as if there were one microbatch. The loop is what is left.
//!
//! A gradient that products add up over microbatches begins with the first of them, which writes it: nothing is cleared
//! and read for that.
//!
//! What a microbatch makes and uses up is its own in each of them. A pipeline's order of passes is its own business
//! ([`stages`](super::stages)), and stays as it is.

use super::draft::{Draft, Hint, Item, Place, StorageId};
use shardc_ir::ops::Op;
use shardc_ir::program::Action;
use shardc_ir::{BufferId, OpDef, SecondaryMap};
use std::collections::{BTreeMap, BTreeSet};

/// Where a draft without stages has its sections.
const PROLOGUE: usize = Place::Prologue.index(SECTIONS);
const LOOP: usize = Place::LOOP.index(SECTIONS);
const EPILOGUE: usize = Place::Epilogue.index(SECTIONS);
const SECTIONS: usize = 3;

/// Peels microbatches off the loop of a draft without stages.
pub(crate) fn peel(draft: &mut Draft) {
    if draft.stage.is_some() || draft.microbatches < 2 {
        return;
    }
    let (reductions, sums) = (reductions(draft), sums(draft));
    let is_gather = |item: &Item| matches!(item.hint, Hint::Prefetch { .. });
    if !sums.is_empty() || draft.sections[PROLOGUE].iter().any(is_gather) {
        let mut body = copy(draft);
        let items = std::mem::take(&mut draft.sections[PROLOGUE]);
        let mut cleared = BTreeSet::new();
        for sum in sums {
            body[sum.first].instruction.operands.remove(sum.addend);
            cleared.insert(sum.cleared);
        }
        let left = items.into_iter().enumerate().filter(|(at, _)| !cleared.contains(at));
        let items = left.map(|(_, item)| item).collect();
        draft.sections[PROLOGUE] = with_gathers(draft, items, body);
        draft.repeats.start += 1;
    }
    if !reductions.is_empty() {
        let body = copy(draft);
        let items = std::mem::take(&mut draft.sections[EPILOGUE]);
        draft.sections[EPILOGUE] = with_reductions(draft, body, items, &reductions);
        draft.repeats.end -= 1;
    }
    if draft.repeats.is_empty() {
        draft.sections[LOOP].clear();
    }
}

/// Where each storage is touched first.
fn first_touches(draft: &Draft, items: &[Item]) -> BTreeMap<StorageId, usize> {
    let mut first = BTreeMap::new();
    for (at, item) in items.iter().enumerate() {
        item.instruction.buffers().for_each(|buffer| _ = first.entry(draft.storage[buffer]).or_insert(at));
    }
    first
}

fn storages(draft: &Draft, buffers: &[BufferId]) -> Vec<StorageId> {
    buffers.iter().map(|id| draft.storage[*id]).collect()
}

/// A microbatch once more, with storages of its own for what nothing outside of the loop touches.
fn copy(draft: &mut Draft) -> Vec<Item> {
    let mut shared = draft.kept();
    for section in [PROLOGUE, EPILOGUE] {
        let buffers = draft.sections[section].iter().flat_map(|item| item.instruction.buffers());
        shared.extend(buffers.map(|id| draft.storage[id]));
    }
    let mut items = draft.sections[LOOP].clone();
    let mut own: SecondaryMap<BufferId, Option<BufferId>> = SecondaryMap::new();
    let mut of_storage: BTreeMap<StorageId, StorageId> = BTreeMap::new();
    for item in &mut items {
        for id in item.instruction.operands.iter_mut().chain(&mut item.instruction.results) {
            if shared.contains(&draft.storage[*id]) {
                continue;
            }
            let known = own[*id];
            let twin = known.unwrap_or_else(|| draft.twin(*id, &mut of_storage));
            own[*id] = Some(twin);
            *id = twin;
        }
    }
    items
}

/// A sum over microbatches that begins at zero, to which a product adds itself.
struct Sum {
    /// Where in the prologue it is cleared.
    cleared: usize,
    /// The first product in the loop, and which of its operands is the sum.
    first: usize,
    addend: usize,
}

/// The sums to which the first term writes if it is that of the first microbatch: they need not be cleared and read.
fn sums(draft: &Draft) -> Vec<Sum> {
    let first = first_touches(draft, &draft.sections[LOOP]);
    let mut touched: BTreeMap<StorageId, usize> = BTreeMap::new();
    for buffer in draft.sections[PROLOGUE].iter().flat_map(|item| item.instruction.buffers()) {
        *touched.entry(draft.storage[buffer]).or_default() += 1;
    }
    let begins = |(cleared, item): (usize, &Item)| {
        let Action::Compute(Op::Constant(op)) = &item.instruction.action else { return None };
        let [zeros] = item.instruction.results[..] else { return None };
        let storage = draft.storage[zeros];
        let first = first.get(&storage).copied().filter(|_| op.value == 0.0 && touched[&storage] == 1)?;
        let term = &draft.sections[LOOP][first].instruction;
        let Action::Compute(product @ (Op::Matmul(_) | Op::ScaledMatmul(_))) = &term.action else { return None };
        let addend = product.addend(term.operands.len())?;
        let is_all = |id: &BufferId| draft.storage[*id] == storage && draft.buffers[*id].ty == draft.buffers[zeros].ty;
        let is_sum = is_all(&term.operands[addend]) && matches!(&term.results[..], [sum] if is_all(sum));
        let reads = term.operands.iter().filter(|id| draft.storage[**id] == storage).count();
        (is_sum && reads == 1).then_some(Sum { cleared, first, addend })
    };
    draft.sections[PROLOGUE].iter().enumerate().filter_map(begins).collect()
}

/// The reductions of the epilogue that may begin while the last microbatch goes on, with what brings their operands into
/// order: those of gradients, of what the loop has added up.
fn reductions(draft: &Draft) -> BTreeSet<usize> {
    let items = &draft.sections[EPILOGUE];
    let mut writers: BTreeMap<StorageId, Vec<usize>> = BTreeMap::new();
    for (at, item) in items.iter().enumerate() {
        for storage in storages(draft, &item.instruction.results) {
            writers.entry(storage).or_default().push(at);
        }
    }
    let mut chosen = BTreeSet::new();
    for (at, item) in items.iter().enumerate() {
        let is_number = item.instruction.operands.iter().all(|id| draft.buffers[*id].ty.elements() == 1);
        if item.hint != Hint::Bucket || is_number {
            continue;
        }
        let (mut needed, mut open, mut may_move) = (vec![at], vec![at], true);
        while let Some(next) = open.pop() {
            for storage in storages(draft, &items[next].instruction.operands) {
                let before = writers.get(&storage).into_iter().flatten().copied().filter(|writer| *writer < next);
                for writer in before.filter(|writer| !needed.contains(writer)).collect::<Vec<_>>() {
                    may_move &= rearranges(&items[writer]);
                    needed.push(writer);
                    open.push(writer);
                }
            }
        }
        if may_move {
            chosen.extend(needed);
        }
    }
    chosen
}

/// Whether an instruction changes only how something lies, or its element type.
fn rearranges(item: &Item) -> bool {
    let Action::Compute(op) = &item.instruction.action else { return false };
    matches!(
        op,
        Op::Cast(_) | Op::Transpose(_) | Op::Pad(_) | Op::Concat(_) | Op::Slice(_) | Op::Reshape(_) | Op::Constant(_)
    )
}

/// Notes that a storage is read at a place, if nothing before that reads it.
fn advance(first: &mut BTreeMap<StorageId, usize>, storage: StorageId, at: usize) {
    let known = first.entry(storage).or_insert(at);
    *known = at.min(*known);
}

/// The prologue and a microbatch: each gather, and what brings its result into order, before its first reader.
fn with_gathers(draft: &Draft, items: Vec<Item>, body: Vec<Item>) -> Vec<Item> {
    let mut first = first_touches(draft, &body);
    let mut gathered: BTreeSet<StorageId> = BTreeSet::new();
    let moves: Vec<bool> = items
        .iter()
        .map(|item| {
            let is_of_gather = || storages(draft, &item.instruction.operands).iter().any(|of| gathered.contains(of));
            let moves = matches!(item.hint, Hint::Prefetch { .. }) || is_of_gather();
            if moves {
                gathered.extend(storages(draft, &item.instruction.results));
            }
            moves
        })
        .collect();
    let mut placed: Vec<(usize, Item)> = Vec::with_capacity(items.len() + body.len());
    for (item, moves) in items.into_iter().zip(moves).rev() {
        let results = storages(draft, &item.instruction.results);
        let reader = results.iter().filter_map(|storage| first.get(storage)).min().copied();
        let at = reader.filter(|_| moves).unwrap_or(0);
        // What it reads must be there before it.
        storages(draft, &item.instruction.operands).into_iter().for_each(|storage| advance(&mut first, storage, at));
        placed.push((at, item));
    }
    placed.reverse();
    // Of one place, the prologue's come first, in their order.
    placed.extend(body.into_iter().enumerate());
    placed.sort_by_key(|(at, _)| *at);
    placed.into_iter().map(|(_, item)| item).collect()
}

/// A microbatch and the epilogue: each of these reductions behind the last term of its sum.
fn with_reductions(draft: &Draft, body: Vec<Item>, items: Vec<Item>, reductions: &BTreeSet<usize>) -> Vec<Item> {
    let end = body.len();
    let mut last: BTreeMap<StorageId, usize> = BTreeMap::new();
    for (at, item) in body.iter().enumerate() {
        storages(draft, &item.instruction.results).into_iter().for_each(|storage| _ = last.insert(storage, at + 1));
    }
    let mut places: Vec<usize> = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let read = storages(draft, &item.instruction.operands);
        let ready = read.iter().filter_map(|storage| last.get(storage)).max().copied().unwrap_or(0);
        let at = if reductions.contains(&index) { ready } else { end };
        for storage in storages(draft, &item.instruction.results) {
            let known = last.entry(storage).or_insert(at);
            *known = at.max(*known);
        }
        places.push(at);
    }
    // What reads nothing is made where it is read.
    let mut reader: BTreeMap<StorageId, usize> = BTreeMap::new();
    for (item, at) in items.iter().zip(&mut places).rev() {
        if item.instruction.operands.is_empty() {
            let results = storages(draft, &item.instruction.results);
            *at = results.iter().filter_map(|storage| reader.get(storage)).min().copied().unwrap_or(end);
        }
        storages(draft, &item.instruction.operands).into_iter().for_each(|storage| advance(&mut reader, storage, *at));
    }
    let of_body = body.into_iter().enumerate().map(|(at, item)| (at, true, item));
    let behind = items.into_iter().zip(places).map(|(item, at)| (at, false, item));
    let mut placed: Vec<(usize, bool, Item)> = behind.chain(of_body).collect();
    // Of one place, what was ready comes before what the microbatch does next.
    placed.sort_by_key(|(at, is_body, _)| (*at, *is_body));
    placed.into_iter().map(|(.., item)| item).collect()
}
