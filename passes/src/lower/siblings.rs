//! Products that read the same operand, and sums over the rows of equal tensors, beside each other in one instruction.
//!
//! Queries, keys and values are products of one activation, and so are the gradients of their weights. Each
//! by itself leaves a part of a large device without work. They become one region ([`Fused`]) of which no
//! step reads another, if the target has one launch for it; allocation then puts what products read and make
//! side by side. The gradients of the biases of queries, keys and values are such sums: of three tensors, which one
//! derivative makes. Each step stays the kernel of its node.
//!
//! The later one moves up to the earlier one with the views that it reads, if those are of what is there;
//! else, of products, the earlier moves down to it, together with the views and the waiting reductions of what it
//! makes. Where a collective is next, that comes first: it runs beside what has moved down. A sum does not wait: what it
//! reads is large, and would be kept.
//!
//! Invariant: an instruction never passes one that touches the same bytes, unless both only read.

use super::draft::{Draft, Hint, Item, StorageId};
use shardc_ir::ops::{Fused, FusedStep, Matmul, Op};
use shardc_ir::program::{Action, Instruction, Stream};
use shardc_ir::{BufferId, OpDef, TensorType};
use std::collections::{BTreeSet, VecDeque};

/// How many instructions behind a product its siblings are looked for.
const REACH: usize = 48;

/// How many instructions behind a sibling a collective is next.
const NEXT: usize = 4;

/// Whether there is one launch for a region on operands of these types.
type Joins<'a> = &'a dyn Fn(&Fused, &[TensorType]) -> bool;

/// Joins what there is one launch for, in every section.
pub(super) fn join_siblings(draft: &mut Draft, joins: Joins<'_>) {
    for section in 0..draft.sections.len() {
        // What is looked at lies at the front, where instructions come and go at no cost.
        let mut items: VecDeque<Item> = std::mem::take(&mut draft.sections[section]).into();
        let mut done = Vec::with_capacity(items.len());
        while !items.is_empty() {
            // Where one moved down, another instruction stands at the front now.
            if !join_first(draft, joins, &mut items) {
                done.extend(items.pop_front());
            }
        }
        draft.sections[section] = done;
    }
}

/// Joins the first instruction with the first of its siblings that it can be joined with.
fn join_first(draft: &Draft, joins: Joins<'_>, items: &mut VecDeque<Item>) -> bool {
    let members = members_of(&items[0]);
    if members.is_empty() {
        return false;
    }
    let may_wait = members.iter().all(is_product);
    for next in 1..items.len().min(1 + REACH) {
        let Some(joined) = joined(draft, joins, &members, &items[next]) else { continue };
        let down = || followers(draft, items, next).filter(|_| may_wait);
        let waits = is_collective_next(items, next) && !is_read_soon(items);
        let first = if waits { down() } else { None };
        if let Some(leaders) = leaders(draft, items, next).filter(|_| first.is_none()) {
            items[0].instruction = joined;
            items.remove(next);
            let moved: Vec<Item> = leaders.iter().filter_map(|index| items.remove(*index)).collect();
            moved.into_iter().for_each(|item| items.push_front(item));
            return true;
        }
        if let Some(followers) = first.or_else(down) {
            items[next].instruction = joined;
            let moved: Vec<Item> = followers.iter().rev().filter_map(|index| items.remove(*index)).collect();
            items.pop_front();
            let behind = next - followers.len();
            moved.into_iter().for_each(|item| items.insert(behind, item));
            return true;
        }
    }
    false
}

fn is_product(instruction: &Instruction) -> bool {
    matches!(instruction.action, Action::Compute(Op::Matmul(_)))
}

/// The products or the sums of an instruction, each by itself; none if it is something else or adds to a summand.
fn members_of(item: &Item) -> Vec<Instruction> {
    let Item { instruction, hint: Hint::None } = item else { return Vec::new() };
    let is_plain = |op: &Matmul, operands: usize| op.addend(operands).is_none();
    match &instruction.action {
        Action::Compute(Op::Matmul(op)) if is_plain(op, instruction.operands.len()) => vec![instruction.clone()],
        Action::Compute(Op::Reduce(_)) => vec![instruction.clone()],
        Action::Compute(Op::Fused(region)) if region.is_beside() => {
            let mut results = instruction.results.iter().copied();
            let step = |step: &FusedStep| Instruction {
                source: step.source,
                ..Instruction::new(
                    Action::Compute(step.op.clone()),
                    step.operands.iter().map(|value| instruction.operands[*value]).collect(),
                    results.by_ref().take(step.results.len()).collect(),
                    instruction.stream,
                )
            };
            region.steps.iter().map(step).collect()
        }
        _ => Vec::new(),
    }
}

/// Some and one more as one instruction, if they are siblings and there is one launch for them.
fn joined(draft: &Draft, joins: Joins<'_>, all: &[Instruction], item: &Item) -> Option<Instruction> {
    let first = all.first().filter(|first| first.action == item.instruction.action)?;
    let [next] = &members_of(item)[..] else { return None };
    let types = |ids: &[BufferId]| ids.iter().map(|id| draft.buffers[*id].ty.clone()).collect::<Vec<TensorType>>();
    let is_alike = first.stream == Stream::Compute
        && next.stream == Stream::Compute
        && types(&first.operands) == types(&next.operands)
        && types(&first.results) == types(&next.results);
    // Only the first factor is the same. Products of several activations and one weight would keep all of
    // those until the last of them is there.
    let is_shared = |at: usize| first.operands[at] == next.operands[at];
    if !is_alike || is_product(first) && (!is_shared(0) || is_shared(1)) {
        return None;
    }
    let all: Vec<&Instruction> = all.iter().chain([next]).collect();
    let mut operands: Vec<BufferId> = Vec::new();
    for buffer in all.iter().flat_map(|member| &member.operands) {
        if !operands.contains(buffer) {
            operands.push(*buffer);
        }
    }
    let mut region = Fused::default();
    let mut results: Vec<BufferId> = Vec::new();
    for member in &all {
        let Action::Compute(op) = &member.action else { return None };
        let of = |buffer: &BufferId| operands.iter().position(|known| known == buffer);
        region.steps.push(FusedStep {
            op: op.clone(),
            operands: member.operands.iter().filter_map(of).collect(),
            results: types(&member.results),
            source: member.source,
        });
        results.extend(&member.results);
    }
    region.results = (operands.len()..operands.len() + results.len()).collect();
    let types = types(&operands);
    joins(&region, &types).then(|| {
        let action = Action::Compute(region.into());
        Instruction { source: first.source, ..Instruction::new(action, operands, results, first.stream) }
    })
}

/// What an instruction reads, and what it writes; a view touches no bytes of its own.
fn touched(draft: &Draft, instruction: &Instruction) -> [BTreeSet<StorageId>; 2] {
    let storages = |ids: &[BufferId]| ids.iter().map(|id| draft.storage[*id]).collect();
    let writes = if draft.is_view(instruction) { BTreeSet::new() } else { storages(&instruction.results) };
    [storages(&instruction.operands), writes]
}

/// Whether a collective follows between the first instruction and `next`, or soon behind it, that does not wait to be
/// merged with others.
fn is_collective_next(items: &VecDeque<Item>, next: usize) -> bool {
    let near = items.range(1..items.len().min(next + 1 + NEXT));
    near.into_iter().any(|item| item.instruction.stream == Stream::Communication && item.hint != Hint::Bucket)
}

/// Whether something reads what the first instruction makes, but for what waits to be merged with others.
fn is_read_soon(items: &VecDeque<Item>) -> bool {
    let made = &items[0].instruction.results;
    let reads = |item: &Item| item.instruction.operands.iter().any(|operand| made.contains(operand));
    items.range(1..items.len().min(1 + REACH)).any(|item| item.hint != Hint::Bucket && reads(item))
}

/// The views that must move with the instruction `next` where that moves up to the first, the last of them first, if that
/// is possible.
fn leaders(draft: &Draft, items: &VecDeque<Item>, next: usize) -> Option<Vec<usize>> {
    let [reads, writes] = touched(draft, &items[next].instruction);
    let is_free = items.range(..next).all(|item| {
        let [other_reads, other_writes] = touched(draft, &item.instruction);
        reads.is_disjoint(&other_writes) && writes.is_disjoint(&other_writes) && writes.is_disjoint(&other_reads)
    });
    let mut needed = items[next].instruction.operands.clone();
    let mut found = Vec::new();
    for index in (1..next).rev() {
        let instruction = &items[index].instruction;
        if draft.is_view(instruction) && instruction.results.iter().any(|result| needed.contains(result)) {
            needed.extend(&instruction.operands);
            found.push(index);
        }
    }
    is_free.then_some(found)
}

/// What must move with the first instruction where that moves down to `next`, if that is possible.
fn followers(draft: &Draft, items: &VecDeque<Item>, next: usize) -> Option<Vec<usize>> {
    let [mut reads, mut writes] = touched(draft, &items[0].instruction);
    let mut found = Vec::new();
    for (index, item) in items.iter().enumerate().take(next + 1).skip(1) {
        let [other_reads, other_writes] = touched(draft, &item.instruction);
        let is_free =
            writes.is_disjoint(&other_reads) && writes.is_disjoint(&other_writes) && reads.is_disjoint(&other_writes);
        if is_free {
            continue;
        }
        if index == next || !(draft.is_view(&item.instruction) || item.hint == Hint::Bucket) {
            return None;
        }
        reads.extend(other_reads);
        writes.extend(other_writes);
        found.push(index);
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::super::draft::Place;
    use super::*;
    use shardc_ir::ops::{Affine, Reduce, ReduceOp};
    use shardc_ir::plan::Category;
    use shardc_ir::{DType, Mesh, ReduceKind};

    /// Two gradients of weights of one activation, and between them the gradient of that, which ranks add or do not.
    #[test]
    fn gradients_of_weights_wait_for_the_collective_that_runs_beside_them() {
        let order = |adds: bool| {
            let mut draft = Draft::new(0, &Mesh::default());
            let tensor = |draft: &mut Draft| draft.buffer(TensorType::new(DType::F32, [8, 8]), Category::Activation);
            let [x, a, b, gate, up, inner, sum] = std::array::from_fn(|_| tensor(&mut draft));
            let product = |draft: &mut Draft, operands: [BufferId; 2], result: BufferId| {
                let action = Action::Compute(Matmul::new("mk,kn->mn").into());
                draft.push(Place::LOOP, action, operands.to_vec(), vec![result], Stream::Compute, None, Hint::None);
            };
            product(&mut draft, [x, a], gate);
            product(&mut draft, [b, a], inner);
            product(&mut draft, [x, b], up);
            if adds {
                let action = Action::AllReduce { reduce: ReduceKind::Sum, group: 0 };
                draft.push(Place::LOOP, action, vec![inner], vec![sum], Stream::Communication, None, Hint::None);
            }
            join_siblings(&mut draft, &|region, _| region.is_products());
            let items = &draft.sections[Place::LOOP.index(3)];
            let name = |item: &Item| if item.instruction.results == [gate, up] { "weights" } else { "others" };
            items.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(order(false), ["weights", "others"]);
        assert_eq!(order(true), ["others", "weights", "others"]);
    }

    #[test]
    fn sums_of_equal_tensors_move_up_and_never_down() {
        let mut draft = Draft::new(0, &Mesh::default());
        let tensor =
            |draft: &mut Draft, shape: &[u64]| draft.buffer(TensorType::new(DType::F32, shape), Category::Activation);
        let rows: Vec<BufferId> = (0..4).map(|_| tensor(&mut draft, &[8, 4])).collect();
        let sums: Vec<BufferId> = (0..4).map(|_| tensor(&mut draft, &[4])).collect();
        let other = tensor(&mut draft, &[8]);
        let push = |draft: &mut Draft, op: Op, operand: BufferId, result: BufferId| {
            let action = Action::Compute(op);
            draft.push(Place::LOOP, action, vec![operand], vec![result], Stream::Compute, None, Hint::None);
        };
        let half = || Op::from(Affine { scale: 0.5, offset: 0.0 });
        let sum = |dim: usize| Op::from(Reduce { kind: ReduceOp::Sum, dims: vec![dim] });
        push(&mut draft, half(), rows[0], rows[1]);
        push(&mut draft, half(), rows[0], rows[2]);
        push(&mut draft, sum(0), rows[0], sums[0]);
        push(&mut draft, half(), rows[1], rows[3]);
        // One that is there already, one of another dimension, one of what is made later.
        push(&mut draft, sum(0), rows[1], sums[1]);
        push(&mut draft, sum(1), rows[2], other);
        push(&mut draft, sum(0), rows[3], sums[2]);
        push(&mut draft, sum(0), rows[2], sums[3]);
        join_siblings(&mut draft, &|region, _| region.is_beside());
        let items = &draft.sections[Place::LOOP.index(3)];
        let names: Vec<String> = items.iter().map(|item| item.instruction.action.title()).collect();
        let joined = "reduce_sum+reduce_sum+reduce_sum";
        assert_eq!(names, ["affine", "affine", joined, "affine", "reduce_sum", "reduce_sum"]);
        assert_eq!(items[2].instruction.operands, [rows[0], rows[1], rows[2]]);
        assert_eq!(items[2].instruction.results, [sums[0], sums[1], sums[3]]);
        assert_eq!(items[5].instruction.operands, [rows[3]]);
    }
}
