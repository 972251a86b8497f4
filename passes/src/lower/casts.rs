//! Casts of parameters, many in one launch.
//!
//! Each parameter is cast where it is first read, and most of these casts take less time than their launch.
//! What is cast is there from the beginning of the step, so a cast may be done with the one before it, up
//! to some bytes: then what it makes lives hardly longer. Several become one instruction ([`Each`](shardc_ir::ops::Each)).
//!
//! Invariant: nothing writes a parameter, or touches what its cast makes, before a cast that moved.

use super::draft::{Draft, Hint, Item, StorageId};
use super::repeat::together;
use shardc_ir::BufferId;
use shardc_ir::ops::Op;
use shardc_ir::program::{Action, Stream};
use std::collections::BTreeSet;

/// The bytes of parameters that are cast at a time.
const MOST: u64 = 256 << 20;

/// Merges the casts of slots, in every section.
pub(crate) fn merge_casts(draft: &mut Draft) {
    let slots = draft.stored();
    for section in 0..draft.sections.len() {
        let items = std::mem::take(&mut draft.sections[section]);
        draft.sections[section] = merge(draft, &slots, items);
    }
}

fn merge(draft: &Draft, slots: &BTreeSet<StorageId>, items: Vec<Item>) -> Vec<Item> {
    let mut out: Vec<Vec<Item>> = Vec::with_capacity(items.len());
    // Where the casts are that still take others, and the bytes that they read.
    let mut open: Option<(usize, u64)> = None;
    let (mut touched, mut written): (BTreeSet<StorageId>, BTreeSet<StorageId>) = Default::default();
    for item in items {
        let instruction = &item.instruction;
        let storage = |id| draft.storage[id];
        let is_number = |id: &BufferId| draft.buffers[*id].ty.dtype.is_float();
        let is_cast = matches!(instruction.action, Action::Compute(Op::Cast(_)))
            && instruction.operands.iter().chain(&instruction.results).all(is_number)
            && instruction.stream == Stream::Compute
            && item.hint == Hint::None
            && instruction.operands.iter().all(|id| slots.contains(&storage(*id)) && !written.contains(&storage(*id)))
            && instruction.results.iter().all(|id| !touched.contains(&storage(*id)) && !slots.contains(&storage(*id)));
        touched.extend(instruction.buffers().map(storage));
        if !draft.is_view(instruction) {
            written.extend(instruction.results.iter().map(|id| storage(*id)));
        }
        let bytes: u64 = instruction.operands.iter().map(|id| draft.buffers[*id].ty.bytes().0).sum();
        match open {
            Some((at, before)) if is_cast && before + bytes <= MOST => {
                out[at].push(item);
                open = Some((at, before + bytes));
            }
            _ => {
                open = if is_cast { Some((out.len(), bytes)) } else { open };
                out.push(vec![item]);
            }
        }
    }
    out.into_iter().flat_map(together).collect()
}

#[cfg(test)]
mod tests {
    use super::super::draft::Place;
    use super::*;
    use shardc_ir::ops::{Affine, Cast};
    use shardc_ir::plan::Category;
    use shardc_ir::program::Slot;
    use shardc_ir::{DType, Mesh, TensorType};

    #[test]
    fn parameters_are_cast_together_while_nothing_has_written_them() {
        let mut draft = Draft::new(0, &Mesh::default());
        let tensor =
            |draft: &mut Draft, dtype, size: u64| draft.buffer(TensorType::new(dtype, [size]), Category::Parameter);
        let sizes = [8, 24, MOST / 4, 16];
        let parameters: Vec<BufferId> = sizes.iter().map(|size| tensor(&mut draft, DType::F32, *size)).collect();
        let casts: Vec<BufferId> = sizes.iter().map(|size| tensor(&mut draft, DType::Bf16, *size)).collect();
        for buffer in &parameters {
            let ty = draft.buffers[*buffer].ty.clone();
            let slice = ty.shape.iter().map(|size| (0, *size)).collect();
            draft.slots.push(Slot {
                name: buffer.to_string(),
                buffer: *buffer,
                ty,
                slice,
                is_parameter: true,
                init: 0.0,
                cast_of: None,
            });
        }
        let push = |draft: &mut Draft, op: Op, operand: BufferId, result: BufferId| {
            let action = Action::Compute(op);
            draft.push(Place::LOOP, action, vec![operand], vec![result], Stream::Compute, None, Hint::None);
        };
        let half = || Op::from(Affine { scale: 0.5, offset: 0.0 });
        let made = tensor(&mut draft, DType::Bf16, 8);
        push(&mut draft, Cast {}.into(), parameters[0], casts[0]);
        push(&mut draft, half(), casts[0], made);
        push(&mut draft, Cast {}.into(), parameters[1], casts[1]);
        push(&mut draft, half(), parameters[3], parameters[3]);
        // One that is too large to be with the others, one of what was written, and one of no parameter.
        push(&mut draft, Cast {}.into(), parameters[2], casts[2]);
        push(&mut draft, Cast {}.into(), parameters[3], casts[3]);
        let wide = tensor(&mut draft, DType::F32, 8);
        push(&mut draft, Cast {}.into(), made, wide);
        merge_casts(&mut draft);
        let text = |item: &Item| match &item.instruction.action {
            Action::Compute(Op::Each(each)) => format!("{} {}", each.count, each.op.name()),
            action => action.name().to_string(),
        };
        let items = &draft.sections[Place::LOOP.index(3)];
        assert_eq!(items.iter().map(text).collect::<Vec<_>>(), ["2 cast", "affine", "affine", "cast", "cast", "cast"]);
        assert_eq!(
            (&items[0].instruction.operands[..], &items[0].instruction.results[..]),
            (&parameters[..2], &casts[..2])
        );
    }
}
