//! A reduction is issued as soon as its operand is there.
//!
//! Lowering emits it behind the node whose value it reduces, and where a product makes the sum, or the activation, of a
//! later node, it makes the operand earlier than that. Collectives go over the wire in the order of issue: behind
//! another one that waits for the kernels in between, it would wait with it. Those that may wait for others (gradients'
//! and numbers', [`Hint::Bucket`]) stay where they are.
//!
//! Invariant: an instruction never passes one that touches the same bytes, unless both only read.

use super::Touched;
use crate::lower::draft::{Draft, Hint, Item, StorageId};
use shardc_ir::Op;
use shardc_ir::program::Action;
use std::collections::HashMap;

/// Moves every reduction, with what brings its operands into order, behind what makes these.
pub(super) fn advance(draft: &Draft, items: Vec<Item>) -> Vec<Item> {
    // Per storage, who wrote it so far.
    let mut writers: HashMap<StorageId, Vec<usize>> = HashMap::new();
    // Per item, behind which other one it goes.
    let mut behind: Vec<usize> = (0..items.len()).collect();
    let touched: Vec<Touched> = items.iter().map(|item| Touched::of(draft, item)).collect();
    for (at, item) in items.iter().enumerate() {
        if item.hint == Hint::None && is_reduction(item) {
            let mut chain = vec![at];
            let made = loop {
                let first = chain[chain.len() - 1];
                let before = |storage| writers.get(storage)?.iter().rev().copied().find(|made| *made < first);
                let made = touched[first].reads.iter().filter_map(before).max();
                match made.filter(|made| rearranges(&items[*made]) && touched[*made].writes.len() == 1) {
                    Some(made) => chain.push(made),
                    None => break made,
                }
            };
            // What it passes, if what makes its operand went ahead as well.
            let is_free = |made: &usize| {
                let passes = |index: &usize| behind[*index] > behind[*made] && !chain.contains(index);
                let mut passed = (behind[*made] + 1..at).filter(passes);
                passed.all(|index| !chain.iter().any(|own| touched[index].meets(&touched[*own])))
            };
            if let Some(made) = made.filter(is_free) {
                chain.iter().for_each(|own| behind[*own] = behind[made]);
            }
        }
        touched[at].writes.iter().for_each(|storage| writers.entry(*storage).or_default().push(at));
    }
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|at| (behind[*at], *at));
    let mut items: Vec<Option<Item>> = items.into_iter().map(Some).collect();
    order.into_iter().filter_map(|at| items[at].take()).collect()
}

fn is_reduction(item: &Item) -> bool {
    matches!(item.instruction.action, Action::AllReduce { .. } | Action::ReduceScatter { .. })
}

/// Whether an instruction changes only how something lies, or its element type.
fn rearranges(item: &Item) -> bool {
    matches!(&item.instruction.action, Action::Compute(Op::Transpose(_) | Op::Cast(_) | Op::Reshape(_)))
}
