//! Programs in which everything has bytes of its own: what is wrong in them is wrong by what it computes.

use shardc_ir::view::is_view;
use shardc_ir::{BufferId, EntityRef, Program};

/// Gives everything bytes of its own. What has one history of bytes stays together: views, what is written over an
/// operand, and the updates of a slot.
pub fn lay_apart(program: &mut Program) {
    let mut next: Vec<usize> = (0..program.buffers.len()).collect();
    let buffers = &program.buffers;
    for of in program.instructions() {
        for (a, b) in of.results.iter().flat_map(|result| of.operands.iter().map(move |operand| (*operand, *result))) {
            if is_view(buffers, of) || buffers[a].overlaps(&buffers[b]) {
                join(&mut next, a, b);
            }
        }
        for (slot, result) in program.slots.iter().flat_map(|slot| of.results.iter().map(move |of| (slot.buffer, *of)))
        {
            let (home, made) = (&buffers[slot], &buffers[result]);
            if (home.space, home.offset, &home.ty) == (made.space, made.offset, &made.ty) {
                join(&mut next, slot, result);
            }
        }
    }
    let all: Vec<BufferId> = program.buffers.keys().collect();
    for (space, bytes) in &mut program.arenas {
        bytes.0 = 0;
        for first in all.iter().filter(|id| root(&next, **id) == id.index()) {
            let is_own = |id: &&BufferId| root(&next, **id) == first.index() && program.buffers[**id].space == *space;
            let own: Vec<BufferId> = all.iter().filter(is_own).copied().collect();
            let Some(start) = own.iter().map(|id| program.buffers[*id].offset).min() else { continue };
            let base = bytes.0;
            for id in own {
                let buffer = &mut program.buffers[id];
                buffer.offset = base + buffer.offset - start;
                bytes.0 = bytes.0.max(buffer.end());
            }
            bytes.0 = bytes.0.next_multiple_of(256);
        }
    }
}

fn root(next: &[usize], id: BufferId) -> usize {
    let mut at = id.index();
    while next[at] != at {
        at = next[at];
    }
    at
}

fn join(next: &mut [usize], a: BufferId, b: BufferId) {
    let (a, b) = (root(next, a), root(next, b));
    next[a] = b;
}
