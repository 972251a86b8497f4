//! Parts that lie in their whole: what is cut along its outermost dimension is not copied.
//!
//! * The result of a slice whose elements lie one behind the other is a view of its operand, if every rank keeps
//!   the same part (all ranks have the same addresses);
//! * the operands of a join along the outermost dimension are made where they lie in its result.
//!
//! So a value can be worked on chunk by chunk, and read as a whole, for nothing. Both hold only where what is
//! shared is not written again: the operand of a slice from there on, a part and the whole behind a join. The passes of a
//! stage are in the order of one microbatch; what one of them leaves for another has a copy for each that is under way.

use super::draft::{Draft, Place, StorageId};
use super::in_place::{Accesses, Position};
use shardc_ir::ops::Op;
use shardc_ir::program::ALIGNMENT;
use shardc_ir::program::Action;
use shardc_ir::view::{contiguous_part, is_outermost};
use shardc_ir::{BufferId, SecondaryMap};
use std::collections::BTreeSet;

/// Lets slices and joins share the storage of the whole where that is safe.
pub(crate) fn share_parts(draft: &mut Draft) {
    let mut sharing = Sharing {
        accesses: Accesses::of(draft),
        bytes: draft.storage_bytes(),
        members: members(draft),
        kept: draft.kept(),
        draft,
    };
    for section in 0..sharing.draft.sections.len() {
        for at in 0..sharing.draft.sections[section].len() {
            let instruction = &sharing.draft.sections[section][at].instruction;
            let (operands, results) = (instruction.operands.clone(), instruction.results.clone());
            match &instruction.action {
                Action::Compute(Op::Slice(op)) if sharing.draft.is_common[results[0]] => {
                    let start = op.start.clone();
                    sharing.slice((section, at), (operands[0], results[0]), &start);
                }
                Action::Compute(Op::Concat(op)) => {
                    let dim = op.dim;
                    sharing.join((section, at), &operands, results[0], dim);
                }
                _ => {}
            }
        }
    }
}

/// The buffers of each storage.
fn members(draft: &Draft) -> Vec<Vec<BufferId>> {
    let mut members = vec![Vec::new(); draft.storages as usize];
    draft.buffers.keys().for_each(|id| members[draft.storage[id].0 as usize].push(id));
    members
}

struct Sharing<'a> {
    draft: &'a mut Draft,
    accesses: Accesses,
    bytes: Vec<u64>,
    members: Vec<Vec<BufferId>>,
    kept: BTreeSet<StorageId>,
}

impl Sharing<'_> {
    fn storage(&self, id: BufferId) -> StorageId {
        self.draft.storage[id]
    }

    /// Whether a buffer is all of its storage, and nothing but the passes of a microbatch touches it.
    fn is_free(&self, id: BufferId, at: Position) -> bool {
        let storage = self.storage(id);
        let whole = self.bytes[storage.0 as usize] == self.draft.buffers[id].ty.bytes().0;
        whole && self.is_local(storage, at)
    }

    /// Whether a storage holds nothing for others, and nothing outside of the section of `at` touches it, or, in a stage,
    /// of the passes of a microbatch.
    fn is_local(&self, storage: StorageId, at: Position) -> bool {
        let sections = self.draft.sections.len();
        let is_pass = |section: usize| matches!(Place::of(section, sections), Place::Microbatch(_));
        let is_near = |section: usize| {
            section == at.0 || (self.draft.stage.is_some() && [section, at.0].into_iter().all(is_pass))
        };
        !self.kept.contains(&storage) && self.accesses.get(storage).iter().all(|(section, _)| is_near(*section))
    }

    /// Whether something behind `at` writes a storage.
    fn is_written_behind(&self, storage: StorageId, at: Position) -> bool {
        self.accesses.get(storage).iter().filter(|other| **other > at).any(|(section, index)| {
            let instruction = &self.draft.sections[*section][*index].instruction;
            let writes = instruction.results.iter().any(|id| self.draft.storage[*id] == storage);
            writes && !self.draft.is_view(instruction)
        })
    }

    /// Makes the part that is kept at `at` a view of its operand.
    fn slice(&mut self, at: Position, (operand, result): (BufferId, BufferId), start: &[u64]) {
        let (from, to) = (&self.draft.buffers[operand].ty, &self.draft.buffers[result].ty);
        let Some(first) = contiguous_part(&from.shape, start, &to.shape) else { return };
        let first = first * from.dtype.size();
        let (whole, part) = (self.storage(operand), self.storage(result));
        let is_fresh = self.accesses.get(part).first() == Some(&at) && whole != part;
        let is_safe = is_fresh && self.is_free(result, at) && self.is_local(whole, at);
        if is_safe
            && first.is_multiple_of(ALIGNMENT)
            && !self.is_written_behind(part, at)
            && !self.is_written_behind(whole, at)
        {
            let first = first + self.draft.first[operand];
            self.place(part, whole, first);
        }
    }

    /// Makes the operands of the join at `at` parts of its result.
    fn join(&mut self, at: Position, parts: &[BufferId], result: BufferId, dim: usize) {
        let whole = self.storage(result);
        let is_fresh = self.accesses.get(whole).first() == Some(&at) && self.is_free(result, at);
        let is_last = is_outermost(&self.draft.buffers[result].ty.shape, dim);
        if !is_fresh || !is_last || self.is_written_behind(whole, at) {
            return;
        }
        let mut first = 0;
        let mut places = Vec::with_capacity(parts.len());
        for part in parts {
            let storage = self.storage(*part);
            let is_own = storage != whole && !places.iter().any(|(other, _)| *other == storage);
            let is_safe = is_own && self.is_free(*part, at) && !self.is_written_behind(storage, at);
            if !is_safe || !u64::is_multiple_of(first, ALIGNMENT) {
                return;
            }
            places.push((storage, first));
            first += self.draft.buffers[*part].ty.bytes().0;
        }
        places.into_iter().for_each(|(storage, first)| self.place(storage, whole, first));
    }

    /// Puts all of one storage into another, from the given byte on.
    fn place(&mut self, part: StorageId, whole: StorageId, first: u64) {
        let moved = std::mem::take(&mut self.members[part.0 as usize]);
        let own: &mut SecondaryMap<BufferId, u64> = &mut self.draft.first;
        for id in &moved {
            own[*id] += first;
            self.draft.storage[*id] = whole;
        }
        self.members[whole.0 as usize].extend(moved);
        self.accesses.join(part, whole);
    }
}

#[cfg(test)]
mod tests {
    use super::super::draft::{Hint, Place};
    use super::*;
    use shardc_ir::ops::{Affine, Concat, Slice};
    use shardc_ir::plan::Category;
    use shardc_ir::program::Stream;
    use shardc_ir::{DType, Mesh, TensorType};

    fn draft() -> (Draft, impl Fn(&mut Draft, &[u64]) -> BufferId) {
        let buffer =
            |draft: &mut Draft, shape: &[u64]| draft.buffer(TensorType::new(DType::F32, shape), Category::Activation);
        (Draft::new(0, &Mesh::default()), buffer)
    }

    fn push(draft: &mut Draft, op: impl Into<Op>, operands: &[BufferId], result: BufferId) {
        let action = Action::Compute(op.into());
        draft.push(Place::LOOP, action, operands.to_vec(), vec![result], Stream::Compute, None, Hint::None);
    }

    const HALF: Affine = Affine { scale: 0.5, offset: 0.0 };

    /// Halves of `[4, 64]` along a dimension, each worked on by itself, joined again.
    fn halves(dim: usize) -> (Draft, [BufferId; 6]) {
        let (mut draft, buffer) = draft();
        let shape: [u64; 2] = [4, 64];
        let mut half = shape;
        half[dim] /= 2;
        let [input, whole, joined] = [(); 3].map(|()| buffer(&mut draft, &shape));
        push(&mut draft, HALF, &[input], whole);
        let mut made = Vec::new();
        for index in 0..2 {
            let [part, next] = [(); 2].map(|()| buffer(&mut draft, &half));
            let (mut start, mut limit) = (vec![0; 2], shape.to_vec());
            (start[dim], limit[dim]) = (index * half[dim], (index + 1) * half[dim]);
            draft.is_common[part] = true;
            push(&mut draft, Slice { start, limit }, &[whole], part);
            push(&mut draft, HALF, &[part], next);
            made.extend([part, next]);
        }
        push(&mut draft, Concat { dim }, &[made[1], made[3]], joined);
        (draft, [whole, joined, made[0], made[1], made[2], made[3]])
    }

    #[test]
    fn outermost_parts_lie_in_their_wholes() {
        let (mut draft, [whole, joined, first, first_made, second, second_made]) = halves(0);
        share_parts(&mut draft);
        for (of, parts) in [(whole, [first, second]), (joined, [first_made, second_made])] {
            assert!(parts.iter().all(|part| draft.storage[*part] == draft.storage[of]));
            assert_eq!(parts.map(|part| draft.first[part]), [0, 2 * 64 * 4]);
        }
    }

    #[test]
    fn what_is_written_again_or_lies_apart_is_copied() {
        let (mut draft, [whole, joined, first, first_made, ..]) = halves(1);
        share_parts(&mut draft);
        assert!(draft.storage[first] != draft.storage[whole] && draft.storage[first_made] != draft.storage[joined]);
        let (mut draft, [whole, joined, first, first_made, ..]) = halves(0);
        push(&mut draft, HALF, &[joined], whole);
        push(&mut draft, HALF, &[joined], first_made);
        share_parts(&mut draft);
        assert!(draft.storage[first] != draft.storage[whole] && draft.storage[first_made] != draft.storage[joined]);
    }
}
