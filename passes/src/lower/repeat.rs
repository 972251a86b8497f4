//! Small tensors together: what is done to each of several by itself is done in one instruction.
//!
//! The update of a parameter and the square of its gradient take less time than a launch where the tensor is
//! small, and a step has hundreds of both. Such an instruction waits for later ones of its operation, up to
//! the first that needs what it makes or that writes what it reads; then all of them are one
//! ([`Each`]). Where everything lies is known by now, so what is in place stays so.
//!
//! Invariants: an instruction never passes one that touches the same bytes, unless both only read; the
//! result depends on nothing that differs between ranks.

use super::draft::{Draft, Hint, Item, StorageId};
use shardc_ir::BufferId;
use shardc_ir::ops::{Each, Op, OpDef};
use shardc_ir::program::{Action, Stream};
use std::collections::BTreeSet;

/// The largest operand of an instruction that waits for others: above, the launch costs next to nothing. A square is
/// two launches, and its gradient is kept for the update that waits for all of them.
fn largest(op: &Op) -> u64 {
    match op {
        Op::SumSquares(_) => MOST,
        _ => 16 << 20,
    }
}

/// The bytes of operands at which instructions wait no longer.
const MOST: u64 = 256 << 20;

/// Instructions that wait for more of their operation.
struct Waiting {
    op: Op,
    items: Vec<Item>,
    bytes: u64,
    reads: BTreeSet<StorageId>,
    writes: BTreeSet<StorageId>,
}

impl Waiting {
    /// Whether something that reads and writes these bytes may not pass.
    fn is_met_by(&self, reads: &BTreeSet<StorageId>, writes: &BTreeSet<StorageId>) -> bool {
        !self.writes.is_disjoint(reads) || !self.writes.is_disjoint(writes) || !self.reads.is_disjoint(writes)
    }

    /// The one instruction for all.
    fn merged(self) -> Option<Item> {
        together(self.items)
    }
}

/// Instructions of one operation as one; a single one as it is.
pub(super) fn together(items: Vec<Item>) -> Option<Item> {
    let count = items.len();
    let mut items = items.into_iter();
    let mut first = items.next()?;
    if let (2.., Action::Compute(op)) = (count, &first.instruction.action) {
        first.instruction.action = Action::Compute(Each { count, op: Box::new(op.clone()) }.into());
        for item in items {
            first.instruction.operands.extend(item.instruction.operands);
            first.instruction.results.extend(item.instruction.results);
        }
    }
    Some(first)
}

/// Merges what is done to small tensors, in every section.
pub(crate) fn merge_repeated(draft: &mut Draft) {
    for section in 0..draft.sections.len() {
        let items = std::mem::take(&mut draft.sections[section]);
        draft.sections[section] = merge(draft, items);
    }
}

fn merge(draft: &Draft, items: Vec<Item>) -> Vec<Item> {
    let mut out = Vec::with_capacity(items.len());
    let mut waiting: Vec<Waiting> = Vec::new();
    let storages = |ids: &[BufferId]| ids.iter().map(|id| draft.storage[*id]).collect::<BTreeSet<_>>();
    for item in items {
        let reads = storages(&item.instruction.operands);
        // A view touches no bytes: it needs those that it names to be made, and nothing else.
        let is_view = draft.is_view(&item.instruction);
        let writes = if is_view { BTreeSet::new() } else { storages(&item.instruction.results) };
        let (met, rest) = waiting.into_iter().partition::<Vec<_>, _>(|waiting| waiting.is_met_by(&reads, &writes));
        waiting = rest;
        out.extend(met.into_iter().filter_map(Waiting::merged));
        let Some(op) = repeatable(draft, &item) else {
            out.push(item);
            continue;
        };
        let bytes: u64 = item.instruction.operands.iter().map(|id| draft.buffers[*id].ty.bytes().0).sum();
        match waiting.iter_mut().find(|waiting| waiting.op == op) {
            Some(waiting) => {
                waiting.bytes += bytes;
                waiting.reads.extend(reads);
                waiting.writes.extend(writes);
                waiting.items.push(item);
            }
            None => waiting.push(Waiting { op, items: vec![item], bytes, reads, writes }),
        }
        if let Some(full) = waiting.iter().position(|waiting| waiting.bytes >= MOST) {
            out.extend(waiting.remove(full).merged());
        }
    }
    out.extend(waiting.into_iter().filter_map(Waiting::merged));
    out
}

/// The operation of an instruction that may wait for others.
fn repeatable(draft: &Draft, item: &Item) -> Option<Op> {
    let instruction = &item.instruction;
    let Action::Compute(op) = &instruction.action else { return None };
    let is_small = instruction.operands.iter().all(|id| draft.buffers[*id].ty.bytes().0 <= largest(op));
    let is_local = instruction.stream == Stream::Compute && item.hint == Hint::None;
    // Casts are early, these are late.
    let is_late = !matches!(op, Op::Cast(_)) && op.may_repeat();
    (is_small && is_local && is_late).then(|| op.clone())
}

#[cfg(test)]
mod tests {
    use super::super::draft::Place;
    use super::*;
    use shardc_ir::ops::{Affine, SumSquares, Total};
    use shardc_ir::plan::Category;
    use shardc_ir::{DType, Mesh, TensorType};

    fn names(draft: &Draft) -> Vec<String> {
        let text = |item: &Item| match &item.instruction.action {
            Action::Compute(Op::Each(each)) => format!("{} {}", each.count, each.op.name()),
            action => action.name().to_string(),
        };
        draft.sections[Place::LOOP.index(3)].iter().map(text).collect()
    }

    #[test]
    fn small_ones_wait_until_they_are_needed_or_overwritten() {
        let mut draft = Draft::new(0, &Mesh::default());
        let tensor =
            |draft: &mut Draft, size: u64| draft.buffer(TensorType::new(DType::F32, [size]), Category::Gradient);
        let scalar = |draft: &mut Draft| draft.buffer(TensorType::scalar(DType::F32), Category::Activation);
        let push = |draft: &mut Draft, op: Op, operands: Vec<BufferId>, result: BufferId| {
            let action = Action::Compute(op);
            draft.push(Place::LOOP, action, operands, vec![result], Stream::Compute, None, Hint::None);
        };
        let gradients: Vec<BufferId> = (0..4).map(|_| tensor(&mut draft, 8)).collect();
        let large = tensor(&mut draft, MOST);
        let squares: Vec<BufferId> = (0..5).map(|_| scalar(&mut draft)).collect();
        let halved = tensor(&mut draft, 8);
        draft.storage[halved] = draft.storage[gradients[2]];
        let half = || Affine { scale: 0.5, offset: 0.0 };
        push(&mut draft, SumSquares {}.into(), vec![gradients[0]], squares[0]);
        push(&mut draft, SumSquares {}.into(), vec![large], squares[4]);
        push(&mut draft, SumSquares {}.into(), vec![gradients[1]], squares[1]);
        push(&mut draft, SumSquares {}.into(), vec![gradients[2]], squares[2]);
        // In place, over what the last one reads.
        push(&mut draft, half().into(), vec![gradients[2]], halved);
        push(&mut draft, SumSquares {}.into(), vec![gradients[3]], squares[3]);
        let total = scalar(&mut draft);
        push(&mut draft, Total {}.into(), squares.clone(), total);
        merge_repeated(&mut draft);
        assert_eq!(names(&draft), ["sum_squares", "3 sum_squares", "affine", "sum_squares", "total"]);
        let merged = &draft.sections[Place::LOOP.index(3)][1].instruction;
        assert_eq!((&merged.operands[..], &merged.results[..]), (&gradients[..3], &squares[..3]));
    }
}
