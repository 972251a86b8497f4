//! Rearrangements behind a collective wait until somebody reads what they make.
//!
//! A gather along an inner dimension stacks parts, which a transpose then brings into order. On the stream of
//! kernels the transpose waits for the gather, and all that is issued behind it waits with it; so it is issued just
//! before its first reader.
//!
//! Invariant: an instruction never passes one that touches the same bytes, unless both only read.

use crate::lower::{Draft, Item, StorageId};
use shardc_ir::Op;
use shardc_ir::program::{Action, Stream};
use std::collections::{HashMap, HashSet};

/// Moves the transposes and casts of what collectives make down to their first readers, with the views of their results.
pub(super) fn sink(draft: &Draft, items: Vec<Item>) -> Vec<Item> {
    let kept = draft.kept();
    let touched = |item: &Item| -> Vec<StorageId> { item.instruction.buffers().map(|id| draft.storage[id]).collect() };
    let mut by_wire: HashSet<StorageId> = HashSet::new();
    // Per storage that a waiting instruction reads or makes, that instruction.
    let mut waits: HashMap<StorageId, usize> = HashMap::new();
    let mut waiting: HashMap<usize, Vec<Item>> = HashMap::new();
    let mut out = Vec::with_capacity(items.len());
    for (at, item) in items.into_iter().enumerate() {
        let storages = touched(&item);
        let mut met: Vec<usize> = storages.iter().filter_map(|storage| waits.get(storage).copied()).collect();
        met.sort_unstable();
        met.dedup();
        if let ([of], true) = (&met[..], draft.is_view(&item.instruction))
            && let Some(group) = waiting.get_mut(of)
        {
            waits.extend(storages.into_iter().map(|storage| (storage, *of)));
            group.push(item);
            continue;
        }
        for of in met {
            out.extend(waiting.remove(&of).into_iter().flatten());
            waits.retain(|_, other| *other != of);
        }
        let instruction = &item.instruction;
        let rearranges = matches!(instruction.action, Action::Compute(Op::Transpose(_) | Op::Cast(_)));
        let is_free = storages.iter().all(|storage| !kept.contains(storage));
        if rearranges && is_free && instruction.operands.iter().any(|id| by_wire.contains(&draft.storage[*id])) {
            waits.extend(storages.into_iter().map(|storage| (storage, at)));
            waiting.insert(at, vec![item]);
            continue;
        }
        let results = instruction.results.iter().map(|id| draft.storage[*id]);
        match instruction.stream {
            Stream::Communication => by_wire.extend(results),
            _ if draft.is_view(instruction) => {}
            _ => results.for_each(|storage| {
                by_wire.remove(&storage);
            }),
        }
        out.push(item);
    }
    let mut rest: Vec<(usize, Vec<Item>)> = waiting.into_iter().collect();
    rest.sort_unstable_by_key(|(at, _)| *at);
    out.extend(rest.into_iter().flat_map(|(_, group)| group));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::{Hint, Place};
    use shardc_ir::ops::{Affine, Transpose};
    use shardc_ir::plan::Category;
    use shardc_ir::{BufferId, DType, Mesh, TensorType};

    #[test]
    fn a_transpose_of_what_is_gathered_waits_for_its_reader() {
        let mut draft = Draft::new(0, &Mesh::default());
        let mut buffer = |shape: [u64; 3]| draft.buffer(TensorType::new(DType::F32, shape), Category::Activation);
        let [part, other, apart, read] = [(); 4].map(|()| buffer([1, 3, 4]));
        let [stacked, turned] = [buffer([2, 3, 4]), buffer([3, 2, 4])];
        let half = || Action::Compute(Affine { scale: 0.5, offset: 0.0 }.into());
        let turn = || Action::Compute(Transpose { permutation: vec![1, 0, 2] }.into());
        let mut push = |action: Action, from: BufferId, to: BufferId, stream: Stream| {
            draft.push(Place::LOOP, action, vec![from], vec![to], stream, None, Hint::None);
        };
        push(Action::AllGather { group: 0 }, part, stacked, Stream::Communication);
        push(turn(), stacked, turned, Stream::Compute);
        push(half(), other, apart, Stream::Compute);
        push(half(), turned, read, Stream::Compute);
        push(turn(), apart, other, Stream::Compute);
        let items = sink(&draft, draft.sections[1].clone());
        let results: Vec<BufferId> = items.iter().map(|item| item.instruction.results[0]).collect();
        assert_eq!(results, [stacked, apart, turned, read, other]);
    }
}
