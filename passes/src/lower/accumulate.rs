//! Sums of products, and of gradients of tables: where such a *term* is only added to something, it adds itself.
//!
//! * `add(matmul(a, b), c)` becomes `matmul(a, b, c)`: the gradient of an activation that several
//!   products contribute to, that of a weight summed over chunks, and the residual stream; so do the gradients of a
//!   head and of the embedding that is its table;
//! * where `c` is a vector copied along all dimensions but the last, it becomes the product's bias, and
//!   the copy is never made;
//! * the accumulation over microbatches of a term becomes a term that adds to its accumulator,
//!   which begins at zero in the prologue;
//! * a product that is cast for its sum over ranks is written in that type, where the target has such a product.
//!
//! The library that multiplies adds while the product is still in registers, so the product is
//! neither written nor read; of a table only the rows are touched that tokens name. Whether the sum
//! lies where its summand lay is decided when everything is
//! in order ([`in_place`](super::in_place)).

use super::draft::{Draft, Hint, Place, StorageId};
use super::draft::{Position, Touched, contraction};
use shardc_ir::ops::{BinaryKind, Constant, Matmul, Op};
use shardc_ir::program::{Action, Instruction, Stream};
use shardc_ir::{BufferId, Graph, OpDef, Target, ValueId};
use std::collections::BTreeSet;

/// Merges sums into products in every section.
pub(super) fn merge_sums(draft: &mut Draft, target: &dyn Target) {
    let mut merging = Merging::new(draft, target);
    for section in 0..merging.draft.sections.len() {
        for at in 0..merging.draft.sections[section].len() {
            let at = (section, at);
            if !merging.merge_bias(at) && !merging.merge_add(at) && !merging.merge_cast(at) {
                merging.merge_accumulation(at);
            }
        }
    }
    let dropped = merging.dropped;
    for (section, items) in draft.sections.iter_mut().enumerate() {
        let mut index = 0;
        items.retain(|_| {
            index += 1;
            !dropped.contains(&(section, index - 1))
        });
    }
}

struct Merging<'a> {
    draft: &'a mut Draft,
    target: &'a dyn Target,
    /// Who touches each storage, in order.
    touched: Touched,
    /// Storages that outlive the step.
    kept: BTreeSet<StorageId>,
    dropped: BTreeSet<Position>,
}

/// Whether a gradient that is added up over microbatches adds itself, by the operation that makes it. A part of what is
/// made is taken of the sum.
pub(crate) fn adds_itself(graph: &Graph, gradient: ValueId) -> bool {
    let node = graph.def(gradient);
    match &node.op {
        Op::Slice(_) => adds_itself(graph, node.operands[0]),
        Op::Binary(op) if op.kind == BinaryKind::Add => node.operands.iter().all(|term| adds_itself(graph, *term)),
        op => op.may_add(),
    }
}

/// Whether an instruction could take a summand, or takes one.
fn is_term(instruction: &Instruction) -> bool {
    matches!(&instruction.action, Action::Compute(op) if op.may_add())
}

/// The summand of an instruction that takes one.
fn summand(instruction: &Instruction) -> Option<BufferId> {
    let Action::Compute(op) = &instruction.action else { return None };
    op.addend(instruction.operands.len()).map(|at| instruction.operands[at])
}

impl<'a> Merging<'a> {
    fn new(draft: &'a mut Draft, target: &'a dyn Target) -> Self {
        let (touched, kept) = (draft.touched(), draft.kept());
        Self { draft, target, touched, kept, dropped: BTreeSet::new() }
    }

    fn instruction(&self, (section, index): Position) -> &Instruction {
        &self.draft.sections[section][index].instruction
    }

    fn instruction_mut(&mut self, (section, index): Position) -> &mut Instruction {
        &mut self.draft.sections[section][index].instruction
    }

    fn touches(&self, buffer: BufferId) -> &[Position] {
        self.touched.of(self.draft.storage[buffer])
    }

    /// Where the product that makes `buffer` is, if it is in the section of `reader`, which alone reads it.
    fn product(&self, buffer: BufferId, reader: Position) -> Option<Position> {
        self.maker(buffer, reader).filter(|maker| contraction(self.instruction(*maker)).is_some())
    }

    /// Where the term that `buffer` is is made, if that is in the section of `reader`, which alone reads it.
    fn term(&self, buffer: BufferId, reader: Position) -> Option<Position> {
        self.maker(buffer, reader).filter(|maker| is_term(self.instruction(*maker)))
    }

    /// Where `buffer` is made, and nothing else is, if that is in the section of `reader`, which alone reads it.
    fn maker(&self, buffer: BufferId, reader: Position) -> Option<Position> {
        let [maker, last] = self.touches(buffer)[..] else { return None };
        let here = maker.0 == reader.0 && last == reader && !self.kept.contains(&self.draft.storage[buffer]);
        (here && self.instruction(maker).results == [buffer]).then_some(maker)
    }

    /// The operands and the result of a sum of two values of one type.
    fn sum(&self, at: Position) -> Option<([BufferId; 2], BufferId)> {
        let instruction = self.instruction(at);
        let Action::Compute(Op::Binary(op)) = &instruction.action else { return None };
        let ([a, b], [sum]) = (&instruction.operands[..], &instruction.results[..]) else { return None };
        let equal = self.draft.buffers[*a].ty == self.draft.buffers[*b].ty;
        (op.kind == BinaryKind::Add && equal).then_some(([*a, *b], *sum))
    }

    /// What an instruction at one place did with some buffers is done by that at another.
    fn replace(&mut self, buffers: &[BufferId], from: Position, to: Position) {
        for buffer in buffers {
            let storage = self.draft.storage[*buffer];
            self.touched.of_mut(storage).iter_mut().filter(|at| **at == from).for_each(|at| *at = to);
        }
    }

    /// Merges the sum at `at` of a product and a copied vector: the product moves there, where the
    /// vector is known.
    fn merge_bias(&mut self, at: Position) -> bool {
        let Some(([a, b], sum)) = self.sum(at) else { return false };
        for (product, copies) in [(a, b), (b, a)] {
            let Some(maker) = self.product(product, at) else { continue };
            let Some(bias) = self.copied_vector(copies) else { continue };
            let mut moved = self.instruction(maker).clone();
            let Action::Compute(Op::Matmul(op)) = &mut moved.action else { continue };
            if std::mem::replace(&mut op.bias, true) {
                continue;
            }
            self.replace(&moved.operands.clone(), maker, at);
            self.touched.of_mut(self.draft.storage[bias]).push(at);
            moved.operands.push(bias);
            moved.results = vec![sum];
            *self.instruction_mut(at) = moved;
            self.dropped.insert(maker);
            self.touched.of_mut(self.draft.storage[product]).clear();
            let readers = self.touched.of_mut(self.draft.storage[copies]);
            readers.retain(|reader| *reader != at);
            if let [alone] = readers[..] {
                self.dropped.insert(alone);
            }
            return true;
        }
        false
    }

    /// The vector of which a value is copies along all dimensions but the last.
    fn copied_vector(&self, copies: BufferId) -> Option<BufferId> {
        let maker = *self.touches(copies).first()?;
        let instruction = self.instruction(maker);
        let Action::Compute(Op::Broadcast(op)) = &instruction.action else { return None };
        let (vector, rank) = (*instruction.operands.first()?, self.draft.buffers[copies].ty.rank());
        let (from, to) = (&self.draft.buffers[vector].ty, &self.draft.buffers[copies].ty);
        let is_row = op.dims == [rank.checked_sub(1)?] && from.shape.last() == to.shape.last();
        (is_row && instruction.results == [copies] && !self.kept.contains(&self.draft.storage[copies]))
            .then_some(vector)
    }

    /// Merges the sum at `at` of a term and what was there before it.
    fn merge_add(&mut self, at: Position) -> bool {
        let Some(([a, b], sum)) = self.sum(at) else { return false };
        for (term, addend) in [(b, a), (a, b)] {
            let Some(maker) = self.term(term, at) else { continue };
            let has_addend = summand(self.instruction(maker)).is_some();
            let storage = self.draft.storage[addend];
            // The summand is there before the product, and stays as it is up to the sum.
            let writes = |index: usize| {
                let mut results = self.instruction((at.0, index)).results.iter();
                results.any(|result| self.draft.storage[*result] == storage)
            };
            if has_addend || storage == self.draft.storage[term] || (maker.1..at.1).any(writes) {
                continue;
            }
            let instruction = self.instruction_mut(maker);
            instruction.operands.insert(2, addend);
            instruction.results = vec![sum];
            self.replace(&[addend, sum], at, maker);
            self.touched.of_mut(self.draft.storage[term]).clear();
            self.dropped.insert(at);
            return true;
        }
        false
    }

    /// Merges the cast at `at` of a product, on its way to another layout: it computes no node of its own.
    fn merge_cast(&mut self, at: Position) -> bool {
        let instruction = self.instruction(at);
        let (Action::Compute(Op::Cast(_)), [source], [result]) =
            (&instruction.action, &instruction.operands[..], &instruction.results[..])
        else {
            return false;
        };
        let (source, result, origin) = (*source, *result, instruction.source);
        let Some(maker) = self.product(source, at) else { return false };
        let product = self.instruction(maker);
        let is_bare = |op: &Matmul| op.addend(product.operands.len()).is_none() && op.epilogue.is_none();
        if product.source != origin || !contraction(product).is_some_and(is_bare) || !self.is_written(product, result) {
            return false;
        }
        self.instruction_mut(maker).results = vec![result];
        self.replace(&[result], at, maker);
        self.touched.of_mut(self.draft.storage[source]).clear();
        self.dropped.insert(at);
        true
    }

    /// Whether the target has an operation that writes its result in the type of another buffer.
    fn is_written(&self, instruction: &Instruction, result: BufferId) -> bool {
        let ty = |buffer: &BufferId| self.draft.buffers[*buffer].ty.clone();
        let Action::Compute(op) = &instruction.action else { return false };
        let operands: Vec<_> = instruction.operands.iter().map(ty).collect();
        self.target.has_kernel(op, &operands, &[ty(&result)])
    }

    /// Merges the accumulation at `at` of a term, or of a sum of terms, over microbatches.
    fn merge_accumulation(&mut self, at: Position) -> bool {
        let instruction = self.instruction(at);
        let (Action::Accumulate, [source], [total]) =
            (&instruction.action, &instruction.operands[..], &instruction.results[..])
        else {
            return false;
        };
        let (source, total, origin) = (*source, *total, instruction.source);
        if self.draft.buffers[source].ty != self.draft.buffers[total].ty {
            return false;
        }
        // From the last term to the first of the sum.
        let mut chain = Vec::new();
        let (mut part, mut reader) = (source, at);
        loop {
            let Some(maker) = self.term(part, reader) else { return false };
            chain.push(maker);
            let instruction = self.instruction(maker);
            if contraction(instruction).is_some_and(|op| op.bias) {
                return false;
            }
            let Some(addend) = summand(instruction) else { break };
            (part, reader) = (addend, maker);
        }
        for maker in &chain {
            let instruction = self.instruction_mut(*maker);
            instruction.operands.truncate(2);
            instruction.operands.push(total);
            instruction.results = vec![total];
        }
        let touched = self.touched.of_mut(self.draft.storage[total]);
        touched.retain(|place| *place != at);
        touched.extend(chain);
        self.dropped.insert(at);
        let zero = Action::Compute(Constant { value: 0.0 }.into());
        self.draft.push(Place::Prologue, zero, vec![], vec![total], Stream::Compute, origin, Hint::None);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::ops::{Binary, Broadcast};
    use shardc_ir::plan::Category;
    use shardc_ir::program::Reading;
    use shardc_ir::{DType, Mesh, NoScratch, TensorType};

    #[test]
    fn a_bias_and_a_residual_are_added_by_the_product() {
        let mut draft = Draft::new(0, &Mesh::default());
        let mut buffer = |shape: &[u64]| draft.buffer(TensorType::new(DType::F32, shape), Category::Activation);
        let [x, w, bias] = [buffer(&[4, 3]), buffer(&[3, 2]), buffer(&[2])];
        let [residual, y, copies, linear, out] = [(); 5].map(|()| buffer(&[4, 2]));
        let add = || Op::from(Binary { kind: BinaryKind::Add });
        for (op, operands, result) in [
            (Matmul::plain().into(), vec![x, w], y),
            (Broadcast { dims: vec![1] }.into(), vec![bias], copies),
            (add(), vec![y, copies], linear),
            (add(), vec![residual, linear], out),
        ] {
            let action = Action::Compute(op);
            draft.push(Place::LOOP, action, operands, vec![result], Stream::Compute, None, Hint::None);
        }
        draft.readings.push(Reading { name: "out".to_string(), buffer: out });
        merge_sums(&mut draft, &NoScratch);
        let [item] = &draft.sections[Place::LOOP.index(3)][..] else { panic!("{:?}", draft.sections) };
        assert_eq!(item.instruction.operands, [x, w, residual, bias]);
        assert_eq!(item.instruction.results, [out]);
        assert!(contraction(&item.instruction).is_some_and(|op| op.bias));
    }
}
