//! Results that may share the bytes of what they replace.
//!
//! * An update whose value is copied into its slot at the end of the step is made in the slot itself,
//!   if nothing touches the slot in between (so `adamw` and running statistics work in place, and a parameter is gathered
//!   straight into its slot);
//! * an all-reduce works in place if nothing reads its operand afterwards;
//! * so do operations that read each element before they write it: elementwise ones, and products that
//!   add to a summand.

use super::draft::{Draft, StorageId};
use shardc_ir::ops::{Op, OpDef};
use shardc_ir::program::{Action, Instruction, Stream};
use shardc_ir::{BufferId, SecondaryMap};
use std::collections::BTreeSet;

/// A place of an instruction: its section and its index.
pub(super) type Position = (usize, usize);

/// Who touches each storage, in order.
pub(super) struct Accesses(Vec<Vec<Position>>);

impl Accesses {
    pub fn of(draft: &Draft) -> Self {
        let mut accesses = vec![Vec::new(); draft.storages as usize];
        for (section, items) in draft.sections.iter().enumerate() {
            for (index, item) in items.iter().enumerate() {
                for buffer in item.instruction.operands.iter().chain(&item.instruction.results) {
                    let list = &mut accesses[draft.storage[*buffer].0 as usize];
                    if list.last() != Some(&(section, index)) {
                        list.push((section, index));
                    }
                }
            }
        }
        Self(accesses)
    }

    pub fn get(&self, storage: StorageId) -> &[Position] {
        &self.0[storage.0 as usize]
    }

    /// What touches one storage touches another from now on.
    pub fn join(&mut self, storage: StorageId, into: StorageId) {
        let moved = std::mem::take(&mut self.0[storage.0 as usize]);
        let list = &mut self.0[into.0 as usize];
        list.extend(moved);
        list.sort_unstable();
        list.dedup();
    }
}

/// Lets results share storages where it is safe; drops the copies that become empty.
pub(crate) fn share_storages(draft: &mut Draft) {
    let kept = draft.kept();
    update_in_place(draft, &kept);
    reduce_in_place(draft, &kept);
    compute_in_place(draft, &kept);
}

fn update_in_place(draft: &mut Draft, kept: &BTreeSet<StorageId>) {
    let (accesses, bytes) = (Accesses::of(draft), draft.storage_bytes());
    let mut dropped: BTreeSet<Position> = BTreeSet::new();
    let mut renamed: SecondaryMap<BufferId, Option<StorageId>> = SecondaryMap::new();
    let mut targets: Vec<Option<StorageId>> = vec![None; draft.storages as usize];
    for (section, items) in draft.sections.iter().enumerate() {
        for (index, item) in items.iter().enumerate().filter(|(_, item)| item.instruction.action == Action::Copy) {
            let [source, target] =
                [item.instruction.operands[0], item.instruction.results[0]].map(|buffer| draft.storage[buffer]);
            let Some(&(first_section, writer)) = accesses.get(source).first() else { continue };
            let is_part = bytes[source.0 as usize] != draft.buffers[item.instruction.operands[0]].ty.bytes().0;
            if first_section != section || kept.contains(&source) || targets[source.0 as usize].is_some() || is_part {
                continue;
            }
            let between = |at: &&Position| **at >= (section, writer) && **at < (section, index);
            let mut touched = accesses.get(target).iter().filter(between);
            let free = match (touched.next(), touched.next()) {
                (None, _) => true,
                (Some(at), None) => {
                    *at == (section, writer) && works_in_place(draft, &items[writer].instruction, source, target)
                }
                _ => false,
            };
            if free {
                targets[source.0 as usize] = Some(target);
                dropped.insert((section, index));
            }
        }
    }
    for id in draft.buffers.keys() {
        renamed[id] = targets[draft.storage[id].0 as usize];
    }
    for id in draft.buffers.keys() {
        if let Some(target) = renamed[id] {
            draft.storage[id] = target;
        }
    }
    for (section, items) in draft.sections.iter_mut().enumerate() {
        let mut index = 0;
        items.retain(|_| {
            index += 1;
            !dropped.contains(&(section, index - 1))
        });
    }
}

/// Whether an instruction may write its result `source` over its operand `target`, which it reads once.
fn works_in_place(draft: &Draft, instruction: &Instruction, source: StorageId, target: StorageId) -> bool {
    let Action::Compute(op) = &instruction.action else { return false };
    let position = |buffers: &[BufferId], storage| {
        let mut found = buffers.iter().enumerate().filter(|(_, buffer)| draft.storage[**buffer] == storage);
        found.next().filter(|_| found.next().is_none()).map(|(index, _)| index)
    };
    let (Some(result), Some(operand)) =
        (position(&instruction.results, source), position(&instruction.operands, target))
    else {
        return false;
    };
    may_replace(draft, op, (&instruction.operands, operand), instruction.results[result])
}

/// Whether a result of an operation may be written over one of the operands.
fn may_replace(draft: &Draft, op: &Op, (operands, position): (&[BufferId], usize), result: BufferId) -> bool {
    let [made, replaced] = [result, operands[position]].map(|buffer| &draft.buffers[buffer].ty);
    let fits = made.shape == replaced.shape && made.bytes() == replaced.bytes();
    fits && op.may_overwrite(position, operands.len())
}

/// Where the buffers of a storage go: another storage, and how far from its first byte.
type Target = Option<(StorageId, u64)>;

fn reduce_in_place(draft: &mut Draft, kept: &BTreeSet<StorageId>) {
    let (accesses, bytes) = (Accesses::of(draft), draft.storage_bytes());
    let mut targets: Vec<Target> = vec![None; draft.storages as usize];
    for (section, items) in draft.sections.iter().enumerate() {
        for (index, item) in items.iter().enumerate() {
            let Action::AllReduce { .. } = item.instruction.action else { continue };
            for (operand, result) in item.instruction.operands.iter().zip(&item.instruction.results) {
                let (first, size) = (draft.first[*operand], draft.buffers[*result].ty.bytes().0);
                let (operand, result) = (draft.storage[*operand], draft.storage[*result]);
                let is_whole = bytes[result.0 as usize] == size;
                let once = item.instruction.operands.iter().filter(|id| draft.storage[**id] == operand).count() == 1;
                let here = (section, index);
                let local = accesses.get(operand).first().is_some_and(|first| first.0 == section);
                let last = accesses.get(operand).last() == Some(&here);
                let fresh = accesses.get(result).first() == Some(&here);
                let free = !kept.contains(&operand) && !kept.contains(&result) && operand != result;
                if local && last && fresh && free && once && is_whole {
                    targets[result.0 as usize] = Some((operand, first));
                }
            }
        }
    }
    merge(draft, &targets);
}

/// Gives every storage the place of its target.
fn merge(draft: &mut Draft, targets: &[Target]) {
    for id in draft.buffers.keys() {
        let (mut storage, mut first) = (draft.storage[id], draft.first[id]);
        while let Some((target, further)) = targets[storage.0 as usize] {
            (storage, first) = (target, first + further);
        }
        (draft.storage[id], draft.first[id]) = (storage, first);
    }
}

/// A result takes the bytes of an operand of its shape and size that nothing reads afterwards. Both
/// live in one section, and the operand on the compute stream alone, so that no stream waits for another because
/// of it: who reads the result on another one waits for it wherever it lies.
fn compute_in_place(draft: &mut Draft, kept: &BTreeSet<StorageId>) {
    let (accesses, bytes) = (Accesses::of(draft), draft.storage_bytes());
    let mut targets: Vec<Target> = vec![None; draft.storages as usize];
    let mut taken: BTreeSet<StorageId> = BTreeSet::new();
    let is_local = |storage: StorageId, section: usize| {
        !kept.contains(&storage) && accesses.get(storage).iter().all(|at| at.0 == section)
    };
    let is_computed = |storage: StorageId| {
        let mut all = accesses.get(storage).iter();
        all.all(|at| draft.sections[at.0][at.1].instruction.stream == Stream::Compute)
    };
    for (section, items) in draft.sections.iter().enumerate() {
        for (index, item) in items.iter().enumerate() {
            let Action::Compute(op) = &item.instruction.action else { continue };
            let here = (section, index);
            for result in &item.instruction.results {
                let (to, ty) = (draft.storage[*result], &draft.buffers[*result].ty);
                let is_whole = bytes[to.0 as usize] == ty.bytes().0;
                if accesses.get(to).first() != Some(&here) || !is_local(to, section) || !is_whole {
                    continue;
                }
                let count = item.instruction.operands.len();
                let free = |(position, operand): &(usize, &BufferId)| {
                    let from = draft.storage[**operand];
                    let fits = may_replace(draft, op, (&item.instruction.operands, *position), *result);
                    let dies = accesses.get(from).last() == Some(&here) && accesses.get(from).first() != Some(&here);
                    // As another operand it may be read when the result is written: of `x + a @ x`, the second `x`.
                    let is_read_so = |(at, other): (usize, &BufferId)| {
                        draft.storage[*other] != from
                            || (op.may_overwrite(at, count) && draft.first[*other] == draft.first[**operand])
                    };
                    let is_free = item.instruction.operands.iter().enumerate().all(is_read_so);
                    let is_own = is_local(from, section) && is_computed(from) && !taken.contains(&from);
                    fits && dies && is_free && from != to && is_own
                };
                if let Some((_, operand)) = item.instruction.operands.iter().enumerate().find(free) {
                    taken.insert(draft.storage[*operand]);
                    targets[to.0 as usize] = Some((draft.storage[*operand], draft.first[*operand]));
                }
            }
        }
    }
    merge(draft, &targets);
}
