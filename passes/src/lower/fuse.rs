//! Regions of operations that a target runs as one kernel.
//!
//! Between two kernels a value is written to memory and read again. An operation therefore joins the one
//! that makes an operand of it, if the target has a kernel for both together: a residual's sum joins the
//! derivative of the norm before it, the gradient of a bias joins what it is the sum of. What the pair
//! then is joins others in the same way, and what is made for that operation alone comes with it. A sum joins
//! a region that reads the same value and ends in sums; operations on small values share a launch with those before
//! them. No pattern is listed here: the target says what it can fuse.
//!
//! A region runs where its first operation stood, so the others move up, past everything that they do not depend on; or,
//! if one of those waits for what comes later (a bias that is gathered), where the last one stood, and the others move
//! down. What only the region reads is no buffer any more. An operation of the backward pass that depends on the forward
//! pass alone joins none of that pass's regions: what it makes would be kept until it is read, and what is computed again
//! would be computed twice at once.

use super::draft::Touched;
use super::draft::{Draft, Hint, Item, StorageId};
use super::early::is_small;
use rustc_hash::{FxHashMap, FxHashSet};
use shardc_ir::ops::{Fused, FusedStep, Op};
use shardc_ir::pipeline::last_forward;
use shardc_ir::program::{Action, Instruction, Stream};
use shardc_ir::{BufferId, Graph, NodeId, Target, TensorType};
use std::collections::{BTreeMap, BTreeSet};

/// Fuses what the target has kernels for, in every section of the draft of a graph.
pub(super) fn fuse(draft: &mut Draft, graph: &Graph, target: &dyn Target) {
    let (touched, written, kept, stored) = (draft.touched(), draft.written(), draft.kept(), draft.stored());
    let behind = last_forward(graph);
    for section in 0..draft.sections.len() {
        let (touched, written, kept, stored) = (&touched, &written, &kept, &stored);
        let forming = Forming { draft, target, section, touched, written, kept, stored, behind };
        let mut fused: BTreeMap<usize, Instruction> = BTreeMap::new();
        let mut moved: BTreeSet<usize> = BTreeSet::new();
        for (place, members) in forming.regions().all.iter().filter(|(_, members)| members.len() > 1) {
            if let Some(instruction) = forming.fused(members) {
                moved.extend(members.iter().filter(|member| *member != place));
                fused.insert(*place, instruction);
            }
        }
        let items = std::mem::take(&mut draft.sections[section]).into_iter().enumerate();
        let kept = items.filter(|(at, _)| !moved.contains(at)).map(|(at, item)| match fused.remove(&at) {
            Some(instruction) => Item { instruction, hint: Hint::None },
            None => item,
        });
        draft.sections[section] = kept.collect();
    }
}

/// The regions of a section as far as they are formed.
#[derive(Debug, Default)]
struct Regions {
    /// By where each runs, its operations in their order.
    all: BTreeMap<usize, Vec<usize>>,
    /// Where the operation runs that stood at each index, if not there.
    place: FxHashMap<usize, usize>,
    /// For which collective the instruction of each index waits, the last of those that it depends on.
    waits: Vec<Option<usize>>,
    /// By what they wait for, where the last regions of small values run.
    small: FxHashMap<Option<usize>, usize>,
    /// By what they read, the last sum in a region that does.
    sums: FxHashMap<BufferId, usize>,
}

impl Regions {
    /// Where the instruction of an index runs.
    fn place(&self, at: usize) -> usize {
        self.place.get(&at).copied().unwrap_or(at)
    }

    /// Makes one region of all that these operations are of.
    fn join(&mut self, members: Vec<usize>, place: usize) {
        let waits = members.iter().map(|member| self.waits[*member]).max().flatten();
        members.iter().for_each(|member| self.waits[*member] = waits);
        members.iter().for_each(|member| drop(self.all.remove(&self.place(*member))));
        self.place.extend(members.iter().map(|member| (*member, place)));
        self.all.insert(place, members);
    }
}

/// Makes the regions of one section.
struct Forming<'a> {
    draft: &'a Draft,
    target: &'a dyn Target,
    section: usize,
    touched: &'a Touched,
    written: &'a Touched,
    /// What others than the instructions read.
    kept: &'a BTreeSet<StorageId>,
    /// Parameters and states.
    stored: &'a BTreeSet<StorageId>,
    /// The last node of the forward pass.
    behind: NodeId,
}

impl Forming<'_> {
    fn item(&self, at: usize) -> &Item {
        &self.draft.sections[self.section][at]
    }

    fn op(&self, at: usize) -> Option<&Op> {
        let Item { instruction, hint: Hint::None } = self.item(at) else { return None };
        match &instruction.action {
            // Casts of parameters share launches by themselves.
            Action::Compute(Op::Cast(_)) if self.stored.contains(&self.draft.storage[instruction.operands[0]]) => None,
            Action::Compute(op) if !self.draft.is_view(instruction) => Some(op),
            _ => None,
        }
    }

    /// The regions, of one operation or more.
    fn regions(&self) -> Regions {
        let mut regions = Regions::default();
        let mut makers: FxHashMap<BufferId, usize> = FxHashMap::default();
        for at in 0..self.draft.sections[self.section].len() {
            let instruction = &self.item(at).instruction;
            regions.waits.push(self.waits(&regions, at));
            if self.op(at).is_some() {
                let made_by = instruction.operands.iter().filter_map(|buffer| makers.get(buffer));
                let places = made_by.map(|maker| regions.place(*maker));
                let joined: BTreeSet<usize> = places.filter(|place| regions.all.contains_key(place)).collect();
                let is_small = self.is_small(at);
                let beside = match self.op(at) {
                    Some(Op::Reduce(_)) => regions.sums.get(&instruction.operands[0]).map(|sum| regions.place(*sum)),
                    _ => regions.small.get(&regions.waits[at]).copied().filter(|_| is_small),
                };
                let found = self.candidates(&regions.all, &joined, at, beside).into_iter().find_map(|of| {
                    let members = [of, vec![at]].concat();
                    Some((self.runs_at(&regions, &members)?, members))
                });
                let (place, members) = found.unwrap_or_else(|| (at, vec![at]));
                if matches!(self.op(at), Some(Op::Reduce(_))) && members.len() > 1 {
                    let read = members.iter().flat_map(|member| &self.item(*member).instruction.operands);
                    regions.sums.extend(read.map(|buffer| (*buffer, at)));
                }
                regions.join(members, place);
                if is_small {
                    regions.small.insert(regions.waits[at], place);
                }
            }
            makers.extend(instruction.results.iter().map(|buffer| (*buffer, at)));
        }
        regions
    }

    /// For which collective an instruction waits: one that shares a launch with others that wait for a later one would
    /// keep the other ranks waiting.
    fn waits(&self, regions: &Regions, at: usize) -> Option<usize> {
        let maker = |buffer: &BufferId| self.written.last_before(self.draft.storage[*buffer], (self.section, at));
        // Gathers of weights are there before.
        let of = |write: usize| match self.item(write) {
            Item { instruction, hint: Hint::None } if instruction.stream != Stream::Compute => Some(write),
            _ => regions.waits[write],
        };
        self.item(at).instruction.operands.iter().filter_map(maker).filter_map(of).max()
    }

    /// What an operation may join, the best first: of the regions that make its operands the latest, with what is there for
    /// that operation alone, or this; each by itself; the one `beside` it.
    fn candidates(
        &self,
        regions: &BTreeMap<usize, Vec<usize>>,
        joined: &BTreeSet<usize>,
        at: usize,
        beside: Option<usize>,
    ) -> Vec<Vec<usize>> {
        let is_lone = |first: &&usize| self.is_for(&regions[*first], at);
        let (lone, others): (Vec<usize>, Vec<usize>) = joined.iter().partition(is_lone);
        let with_lone = |other: Option<usize>| {
            let mut members: Vec<usize> =
                lone.iter().copied().chain(other).flat_map(|at| regions[&at].clone()).collect();
            members.sort_unstable();
            members
        };
        let together = others.iter().rev().map(|other| with_lone(Some(*other)));
        let alone = (lone.len() > 1).then(|| with_lone(None));
        let apart = joined.iter().rev().map(|first| regions[first].clone());
        together.chain(alone).chain(apart).chain(beside.and_then(|first| regions.get(&first).cloned())).collect()
    }

    /// Where these operations may run as one, the last of which is in no region yet, if the target has a kernel for them:
    /// where the first one does, or where the last one is.
    fn runs_at(&self, regions: &Regions, members: &[usize]) -> Option<usize> {
        let (first, last) = (*members.first()?, *members.last()?);
        let pass = self.is_behind(first);
        let is_one_pass = members.iter().all(|member| self.is_behind(*member) == pass);
        let made = &self.made(members);
        let may_run =
            |place: &usize| members.iter().all(|member| self.may_move(regions, *member, *place, (members, made)));
        // What others touch may be long to look through, so the target is asked first.
        if !is_one_pass || self.fused(members).is_none() {
            return None;
        }
        [regions.place(first), last].into_iter().find(may_run)
    }

    /// Whether a region is there for one operation behind it: nothing else reads what it makes, or it is copies of a
    /// smaller value, which nothing that came before that operation reads.
    fn is_for(&self, members: &[usize], at: usize) -> bool {
        let is_read_there = |buffer: &BufferId| {
            let storage = self.draft.storage[*buffer];
            let is_known =
                |place: &(usize, usize)| place.0 == self.section && (place.1 == at || is_among(members, place.1));
            !self.kept.contains(&storage) && self.touched.of(storage).iter().all(is_known)
        };
        let copies = |at: usize| matches!(self.op(at), Some(Op::Broadcast(_)));
        let mut made = members.iter().flat_map(|member| &self.item(*member).instruction.results);
        matches!(members, [member] if copies(*member)) || made.all(is_read_there)
    }

    /// Whether an operation on elements takes less time than its launch.
    fn is_small(&self, at: usize) -> bool {
        let of_elements =
            |op| matches!(op, &(Op::Unary(_) | Op::UnaryGrad(_) | Op::Binary(_) | Op::Affine(_) | Op::Cast(_)));
        self.op(at).is_some_and(of_elements) && is_small(self.draft, &self.item(at).instruction)
    }

    /// Whether an operation comes behind the forward pass.
    fn is_behind(&self, at: usize) -> bool {
        self.item(at).instruction.source.is_some_and(|source| source > self.behind)
    }

    /// Whether a member of a region may run at a place: behind the same instructions that write what it reads and no other
    /// member makes, before the same others, and so for all that touch what it makes.
    fn may_move(
        &self,
        regions: &Regions,
        at: usize,
        place: usize,
        (members, made): (&[usize], &FxHashSet<BufferId>),
    ) -> bool {
        let is_member = |touch: &(usize, usize)| touch.0 == self.section && is_among(members, touch.1);
        let stays =
            |touch: &(usize, usize)| touch.0 != self.section || (touch.1 < at) == (regions.place(touch.1) < place);
        let instruction = &self.item(at).instruction;
        let may_read = |buffer: &BufferId| {
            let is_made = made.contains(buffer);
            let written = self.written.of(self.draft.storage[*buffer]);
            written.iter().all(|write| if is_member(write) { is_made || write.1 == at } else { stays(write) })
        };
        let may_write = |buffer: &BufferId| {
            let storage = self.draft.storage[*buffer];
            let touched = self.touched.of(storage);
            let is_fresh = touched.first() == Some(&(self.section, at)) && !self.kept.contains(&storage);
            is_fresh && touched.iter().all(|touch| is_member(touch) || stays(touch))
        };
        instruction.operands.iter().all(may_read) && (at == place || instruction.results.iter().all(may_write))
    }

    /// What a region makes.
    fn made(&self, members: &[usize]) -> FxHashSet<BufferId> {
        members.iter().flat_map(|member| &self.item(*member).instruction.results).copied().collect()
    }

    /// The instruction of a region, if the target has a kernel for it.
    fn fused(&self, members: &[usize]) -> Option<Instruction> {
        let made = self.made(members);
        let mut operands: Vec<BufferId> = Vec::new();
        // The place of each value among those of the region: what it reads, then what its steps make.
        let mut values: FxHashMap<BufferId, usize> = FxHashMap::default();
        for buffer in members.iter().flat_map(|member| &self.item(*member).instruction.operands) {
            if !made.contains(buffer) && !values.contains_key(buffer) {
                values.insert(*buffer, operands.len());
                operands.push(*buffer);
            }
        }
        let mut count = operands.len();
        let mut region = Fused::default();
        let mut results = Vec::new();
        for member in members {
            let instruction = &self.item(*member).instruction;
            let of =
                instruction.operands.iter().map(|buffer| values.get(buffer).copied()).collect::<Option<Vec<_>>>()?;
            let types = self.types(&instruction.results);
            let step =
                FusedStep { op: self.op(*member)?.clone(), operands: of, results: types, source: instruction.source };
            region.steps.push(step);
            for buffer in &instruction.results {
                if self.leaves(*buffer, members) {
                    region.results.push(count);
                    results.push(*buffer);
                }
                values.entry(*buffer).or_insert(count);
                count += 1;
            }
        }
        let types = self.types(&operands);
        let first = &self.item(*members.first()?).instruction;
        (!results.is_empty() && self.target.fuses(&region, &types)).then(|| {
            let action = Action::Compute(region.into());
            Instruction { source: first.source, ..Instruction::new(action, operands, results, first.stream) }
        })
    }

    fn types(&self, buffers: &[BufferId]) -> Vec<TensorType> {
        buffers.iter().map(|buffer| self.draft.buffers[*buffer].ty.clone()).collect()
    }

    /// Whether anything but the members sees a value.
    fn leaves(&self, buffer: BufferId, members: &[usize]) -> bool {
        let storage = self.draft.storage[buffer];
        let is_inside = |(section, at): &(usize, usize)| *section == self.section && is_among(members, *at);
        self.kept.contains(&storage) || !self.touched.of(storage).iter().all(is_inside)
    }
}

/// Whether an operation is one of a region's, which are in their order.
fn is_among(members: &[usize], at: usize) -> bool {
    members.binary_search(&at).is_ok()
}

#[cfg(test)]
mod tests {
    use super::super::draft::Place;
    use super::*;
    use shardc_ir::ops::{Affine, Binary, BinaryKind, Reduce, ReduceOp};
    use shardc_ir::plan::Category;
    use shardc_ir::{Bytes, DType, Mesh};

    /// Fuses what ends in sums.
    #[derive(Debug)]
    struct Sums;

    impl Target for Sums {
        fn scratch(&self, _: &Action, _: &[TensorType], _: &[TensorType]) -> Bytes {
            Bytes(0)
        }

        fn fuses(&self, region: &Fused, _: &[TensorType]) -> bool {
            let is_sum = |step: &FusedStep| matches!(step.op, Op::Reduce(_));
            let first = region.steps.iter().position(is_sum).unwrap_or(0);
            first > 0 && region.steps[first..].iter().all(is_sum)
        }
    }

    /// Also where what the sum before it makes is read in between; a sum by itself is joined by none.
    #[test]
    fn a_sum_joins_the_region_that_reads_the_same_and_ends_in_sums() {
        let mut draft = Draft::new(0, &Mesh::default());
        let mut tensor = |shape: &[u64]| draft.buffer(TensorType::new(DType::F32, shape), Category::Activation);
        let [x, y, product] = std::array::from_fn(|_| tensor(&[8, 4]));
        let [alone, first, half, second, both] = std::array::from_fn(|_| tensor(&[4]));
        let mut push = |op: Op, operands: &[BufferId], result: BufferId| {
            let (action, operands) = (Action::Compute(op), operands.to_vec());
            draft.push(Place::LOOP, action, operands, vec![result], Stream::Compute, None, Hint::None);
        };
        let sum = || Op::from(Reduce { kind: ReduceOp::Sum, dims: vec![0] });
        push(sum(), &[x], alone);
        push(Binary { kind: BinaryKind::Mul }.into(), &[x, y], product);
        push(sum(), &[product], first);
        push(Affine { scale: 0.5, offset: 0.0 }.into(), &[first], half);
        push(sum(), &[x], second);
        push(Binary { kind: BinaryKind::Add }.into(), &[half, second], both);
        fuse(&mut draft, &Graph::default(), &Sums);
        let items = &draft.sections[Place::LOOP.index(3)];
        let names: Vec<String> = items.iter().map(|item| item.instruction.action.title()).collect();
        assert_eq!(names, ["reduce_sum", "mul+reduce_sum+reduce_sum", "affine", "add"]);
        assert_eq!(items[1].instruction.results, [first, second]);
    }
}
