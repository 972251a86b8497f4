//! Instructions that move nothing: their results are bytes that are there already.

use crate::entity::{BufferId, PrimaryMap};
use crate::ops::Op;
use crate::program::{Action, Buffer, Instruction};

/// Whether an instruction only declares other names for bytes: a reshape or a copy onto itself, a contiguous
/// part that lies where it is in the whole, parts that lie one behind the other where their join does.
pub fn is_view(buffers: &PrimaryMap<BufferId, Buffer>, instruction: &Instruction) -> bool {
    let [result] = instruction.results[..] else { return false };
    let to = &buffers[result];
    if let Action::Compute(Op::Concat(op)) = &instruction.action {
        return is_outermost(&to.ty.shape, op.dim) && lie_behind_each_other(buffers, &instruction.operands, to);
    }
    let [operand] = instruction.operands[..] else { return false };
    let from = &buffers[operand];
    let equal = from.offset == to.offset && from.ty.bytes() == to.ty.bytes();
    let moves_nothing = match &instruction.action {
        Action::Copy | Action::Compute(Op::Reshape(_)) => equal,
        Action::Compute(Op::Broadcast(_)) => equal,
        Action::Compute(Op::Cast(_)) => equal && from.ty == to.ty,
        Action::Compute(Op::Transpose(op)) => {
            let kept: Vec<_> = op.permutation.iter().filter(|dim| from.ty.shape[**dim] != 1).collect();
            equal && kept.is_sorted()
        }
        Action::Compute(Op::Slice(op)) => {
            let start = contiguous_part(&from.ty.shape, &op.start, &to.ty.shape);
            start.is_some_and(|start| to.offset == from.offset + start * from.ty.dtype.size())
        }
        _ => false,
    };
    from.space == to.space && moves_nothing
}

/// The first element of a part of a row-major tensor, if the part's elements lie one behind the other.
pub fn contiguous_part(whole: &[u64], start: &[u64], part: &[u64]) -> Option<u64> {
    let last = (0..part.len()).rev().find(|dim| part[*dim] != whole[*dim]).unwrap_or(0);
    let (mut first, mut stride) = (0, 1);
    for (start, size) in start.iter().zip(whole).rev() {
        first += start * stride;
        stride *= size;
    }
    is_outermost(part, last).then_some(first)
}

/// Whether nothing is outside of a dimension.
pub fn is_outermost(shape: &[u64], dim: usize) -> bool {
    shape[..dim.min(shape.len())].iter().all(|size| *size == 1)
}

fn lie_behind_each_other(buffers: &PrimaryMap<BufferId, Buffer>, parts: &[BufferId], whole: &Buffer) -> bool {
    let mut next = whole.offset;
    parts.iter().all(|id| {
        let part = &buffers[*id];
        let fits = part.space == whole.space && part.offset == next;
        next += part.ty.bytes().0;
        fits
    })
}
