//! Small values are made as soon as what they are made of is there.
//!
//! A region runs where its first operation stood, and takes in no operation that reads what is made behind that. Small
//! values that are copied to all rows (a bias, a statistic, a cast weight), and their sums over ranks, take next to no
//! time and memory: they are made before the region, so that they keep nothing out of it. Gathers of small weights,
//! which the schedule issues with others of their block, go up to the last product before them, or to the beginning of
//! their pass.
//!
//! Invariant: an instruction passes none that writes what it reads, or touches what it makes.

use super::draft::{Draft, Hint, Item, StorageId};
use crate::cost::is_product;
use shardc_ir::pipeline::last_forward;
use shardc_ir::program::{Action, Instruction, Stream};
use shardc_ir::{Bytes, Graph, Op, Role};
use std::collections::BTreeSet;

/// The bytes of a value up to which it is small.
const SMALL: Bytes = Bytes(64 << 10);

/// Whether all that an instruction reads and makes is small.
pub(crate) fn is_small(draft: &Draft, instruction: &Instruction) -> bool {
    instruction.buffers().all(|buffer| draft.buffers[buffer].ty.bytes() <= SMALL)
}

/// Which instructions of a section make what is copied to all rows of a large value, or what small values are made of that
/// are.
fn wanted(draft: &Draft, items: &[Item]) -> Vec<bool> {
    let mut wanted = vec![false; items.len()];
    let mut read: BTreeSet<StorageId> = BTreeSet::new();
    for (at, Item { instruction, .. }) in items.iter().enumerate().rev() {
        wanted[at] = instruction.results.iter().any(|result| read.contains(&draft.storage[*result]));
        let copies = matches!(instruction.action, Action::Compute(Op::Broadcast(_)));
        if copies && !is_small(draft, instruction) || wanted[at] && is_small(draft, instruction) {
            read.extend(instruction.operands.iter().map(|operand| draft.storage[*operand]));
        }
    }
    wanted
}

/// Moves what makes small values in the forward and backward pass up to what they are made of, in every section of the
/// draft of a graph.
pub(crate) fn make_early(draft: &mut Draft, graph: &Graph) {
    let (touched, written, kept) = (draft.touched(), draft.written(), draft.kept());
    let forward = last_forward(graph);
    let mut orders = Vec::new();
    for (section, items) in draft.sections.iter().enumerate() {
        let wanted = wanted(draft, items);
        // Behind which instruction that stays each one runs; those of one in their order.
        let mut behind: Vec<Option<usize>> = Vec::with_capacity(items.len());
        let is_behind = |item: &Item| item.instruction.source.is_some_and(|source| source > forward);
        let backward = items.iter().position(is_behind);
        // Up to where gathers go: the last product, or the end of the forward pass.
        let mut least = None;
        for (at, Item { instruction, hint }) in items.iter().enumerate() {
            let is_fresh = |buffer: &_| {
                let storage = draft.storage[*buffer];
                touched.of(storage).first() == Some(&(section, at)) && !kept.contains(&storage)
            };
            let is_step = |role| role != Role::Optimizer;
            // Sums over ranks as well, so that what is made of them is early.
            let is_free = match (&instruction.action, hint) {
                (Action::Compute(_), Hint::None) => {
                    !draft.is_view(instruction) && instruction.stream == Stream::Compute
                }
                (Action::AllReduce { .. }, Hint::None) => instruction.stream == Stream::Communication,
                (Action::AllGather { .. }, Hint::Prefetch { .. }) => true,
                _ => false,
            };
            let moves = is_free
                && wanted[at]
                && instruction.source.is_some_and(|source| is_step(graph.node(source).role))
                && is_small(draft, instruction)
                && instruction.results.iter().all(is_fresh);
            let maker = |buffer: &_| written.last_before(draft.storage[*buffer], (section, at));
            let made = instruction.operands.iter().filter_map(maker).filter_map(|maker| behind[maker]).max();
            behind.push(match (moves, hint) {
                (true, Hint::Prefetch { .. }) => made.max(least),
                (true, _) => made,
                (false, _) => Some(at),
            });
            let is_product = matches!(&instruction.action, Action::Compute(op) if is_product(op));
            if is_product || backward == Some(at + 1) {
                least = Some(at);
            }
        }
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by_key(|at| (behind[*at], *at));
        orders.push(order);
    }
    for (items, order) in draft.sections.iter_mut().zip(orders) {
        let mut taken: Vec<Option<Item>> = std::mem::take(items).into_iter().map(Some).collect();
        items.extend(order.into_iter().filter_map(|at| taken[at].take()));
    }
}
