//! What is done with a collective's result at once waits until somebody reads what it makes.
//!
//! A gather along an inner dimension stacks parts, which a transpose then brings into order; the sum of the losses over
//! the ranks is divided by that of the tokens. On the stream of kernels the transpose waits for the gather, and the
//! division for all that was sent before the sum; what is issued behind them waits with them. So they are issued just
//! before their first reader, or at the end of the section.
//!
//! Invariant: an instruction never passes one that touches the same bytes, unless both only read.

use crate::lower::draft::{Draft, Item, StorageId};
use shardc_ir::program::Action;
use shardc_ir::{BufferId, Op};
use std::collections::{HashMap, HashSet};

/// Moves the transposes and casts of what collectives make, and what is calculated with single numbers of theirs, down to their
/// first readers, with the views of their results.
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
        let instruction = &item.instruction;
        let is_number = |id: BufferId| draft.buffers[id].ty.elements() == 1;
        let calculates = matches!(instruction.action, Action::Compute(_)) && instruction.buffers().all(is_number);
        if let [of, others @ ..] = &met[..]
            && (calculates || draft.is_view(instruction))
        {
            let joined = others.iter().flat_map(|other| waiting.remove(other).unwrap_or_default()).chain([item]);
            let joined: Vec<Item> = joined.collect();
            waits.values_mut().filter(|group| others.contains(group)).for_each(|group| *group = *of);
            waits.extend(storages.into_iter().map(|storage| (storage, *of)));
            waiting.entry(*of).or_default().extend(joined);
            continue;
        }
        for of in met {
            out.extend(waiting.remove(&of).into_iter().flatten());
            waits.retain(|_, other| *other != of);
        }
        let rearranges = matches!(instruction.action, Action::Compute(Op::Transpose(_) | Op::Cast(_)));
        let is_free = storages.iter().all(|storage| !kept.contains(storage));
        let is_made = || instruction.operands.iter().any(|id| by_wire.contains(&draft.storage[*id]));
        if (calculates || rearranges && is_free) && is_made() {
            waits.extend(storages.into_iter().map(|storage| (storage, at)));
            waiting.insert(at, vec![item]);
            continue;
        }
        let results = instruction.results.iter().map(|id| draft.storage[*id]);
        match instruction.stream {
            stream if stream.is_wire() => by_wire.extend(results),
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
    use crate::lower::draft::{Hint, Place};
    use shardc_ir::ops::{Affine, Binary, BinaryKind, Transpose};
    use shardc_ir::plan::Category;
    use shardc_ir::program::Stream;
    use shardc_ir::{BufferId, DType, Mesh, ReduceKind, TensorType};

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

    #[test]
    fn what_is_calculated_with_sums_over_ranks_waits_for_its_reader() {
        let mut draft = Draft::new(0, &Mesh::default());
        let [loss, tokens, mean, inverse, square] =
            [(); 5].map(|()| draft.buffer(TensorType::scalar(DType::F32), Category::Activation));
        let wide = TensorType::new(DType::F32, [1 << 20]);
        let [other, more, scaled] = [(); 3].map(|()| draft.buffer(wide.clone(), Category::Activation));
        let mut push = |action: Action, from: Vec<BufferId>, to: BufferId, stream: Stream| {
            draft.push(Place::LOOP, action, from, vec![to], stream, None, Hint::None);
        };
        let sum = || Action::AllReduce { reduce: ReduceKind::Sum, group: 0 };
        let half = || Action::Compute(Affine { scale: 0.5, offset: 0.0 }.into());
        let by = |kind: BinaryKind| Action::Compute(Binary { kind }.into());
        push(sum(), vec![loss], loss, Stream::Communication);
        push(sum(), vec![tokens], tokens, Stream::Communication);
        push(by(BinaryKind::Div), vec![loss, tokens], mean, Stream::Compute);
        push(half(), vec![tokens], inverse, Stream::Compute);
        push(by(BinaryKind::Mul), vec![mean, mean], square, Stream::Compute);
        push(half(), vec![other], more, Stream::Compute);
        push(by(BinaryKind::Mul), vec![more, inverse], scaled, Stream::Compute);
        push(half(), vec![other], other, Stream::Compute);
        let items = sink(&draft, draft.sections[1].clone());
        let results: Vec<BufferId> = items.iter().map(|item| item.instruction.results[0]).collect();
        assert_eq!(results, [loss, tokens, more, mean, inverse, square, scaled, other]);
    }
}
