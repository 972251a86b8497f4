//! Small sums over the same ranks are one collective.
//!
//! The two sums that the derivative of a norm over samples needs are there at once; each by itself takes as long as both.
//! The first waits for the second, with what reads it, if there is nothing but other small values between them.

use super::{Touched, kind, merge};
use crate::lower::draft::{Draft, Hint, Item};
use crate::lower::early::is_small;
use shardc_ir::DType;
use shardc_ir::program::{Action, Stream};

/// How many instructions behind a small sum others are looked for.
const REACH: usize = 8;

/// Joins small sums of every section's instructions.
pub(super) fn together(draft: &Draft, items: Vec<Item>) -> Vec<Item> {
    let mut items = items;
    let mut at = 0;
    while at < items.len() {
        match next(draft, &items[at..]) {
            Some((second, waiting)) => join(&mut items[at..], second, &waiting).into_iter().for_each(|hole| {
                items.remove(at + hole);
            }),
            None => at += 1,
        }
    }
    items
}

/// The sum that the first of these instructions is joined with, and those between them that wait as well.
fn next(draft: &Draft, items: &[Item]) -> Option<(usize, Vec<usize>)> {
    let first = sum(draft, &items[0])?;
    let (mut waiting, mut touched) = (Vec::new(), Touched::of(draft, &items[0]));
    for (index, item) in items.iter().enumerate().take(1 + REACH).skip(1) {
        let own = Touched::of(draft, item);
        let waits = touched.meets(&own);
        match sum(draft, item) {
            Some(other) if other == first && !waits => return Some((index, waiting)),
            Some(_) => {}
            // What waits for others by itself holds nothing up.
            None if item.hint == Hint::Bucket => {}
            None => {
                let is_local = matches!(item.instruction.action, Action::Compute(_)) && item.hint == Hint::None;
                if !is_local || !is_small(draft, &item.instruction) {
                    return None;
                }
            }
        }
        if waits {
            touched.extend(&own);
            waiting.push(index);
        }
    }
    None
}

/// What may be one collective: small sums of one kind and type.
fn sum(draft: &Draft, item: &Item) -> Option<(super::Kind, DType)> {
    let Item { instruction, hint: Hint::None } = item else { return None };
    let is_sum = matches!(instruction.action, Action::AllReduce { .. }) && instruction.stream == Stream::Communication;
    let dtype = draft.buffers[*instruction.operands.first()?].ty.dtype;
    kind(&instruction.action).filter(|_| is_sum && is_small(draft, instruction)).zip(Some(dtype))
}

/// Moves the first instruction, and those that wait for it, to another, of which it becomes a part; gives where that one
/// is not any more.
fn join(items: &mut [Item], second: usize, waiting: &[usize]) -> Option<usize> {
    let stay = (1..second).filter(|index| !waiting.contains(index));
    let order: Vec<usize> = stay.chain([0, second]).chain(waiting.iter().copied()).collect();
    let mut sorted: Vec<Item> = order.into_iter().map(|index| items[index].clone()).collect();
    let place = sorted.len() - 2 - waiting.len();
    let other = sorted[place + 1].clone();
    merge(&mut sorted[place], other);
    items[..=second].swap_with_slice(&mut sorted);
    Some(place + 1)
}
