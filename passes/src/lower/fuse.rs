//! Regions of operations that a target runs as one kernel.
//!
//! Between two kernels a value is written to memory and read again. An operation therefore joins the one
//! that makes an operand of it, if the target has a kernel for both together: a residual's sum joins the
//! derivative of the norm before it, the gradient of a bias joins what it is the sum of. What the pair
//! then is joins others in the same way, and what is made for that operation alone comes with it. Operations on small
//! values share a launch with those before them. No pattern is listed here: the target says what it can fuse.
//!
//! A region runs where its first operation stood, so the others move up, past everything that they do
//! not depend on. What only the region reads is no buffer any more. An operation of the backward pass that depends on
//! the forward pass alone joins none of that pass's regions: what it makes would be kept until it is read, and what is
//! computed again would be computed twice at once.

use super::draft::Touched;
use super::draft::{Draft, Hint, Item, StorageId};
use super::early::is_small;
use shardc_ir::ops::{Fused, FusedStep, Op};
use shardc_ir::pipeline::last_forward;
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{BufferId, Graph, NodeId, Target, TensorType};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Fuses what the target has kernels for, in every section of the draft of a graph.
pub(super) fn fuse(draft: &mut Draft, graph: &Graph, target: &dyn Target) {
    let (touched, written, kept) = (draft.touched(), draft.written(), draft.kept());
    let behind = last_forward(graph);
    for section in 0..draft.sections.len() {
        let forming = Forming { draft, target, section, touched: &touched, written: &written, kept: &kept, behind };
        let regions = forming.regions();
        let mut fused: BTreeMap<usize, Instruction> = BTreeMap::new();
        let mut moved: BTreeSet<usize> = BTreeSet::new();
        for members in regions.values().filter(|members| members.len() > 1) {
            if let Some(instruction) = forming.fused(members) {
                fused.insert(members[0], instruction);
                moved.extend(&members[1..]);
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

/// The regions of one section.
struct Forming<'a> {
    draft: &'a Draft,
    target: &'a dyn Target,
    section: usize,
    touched: &'a Touched,
    written: &'a Touched,
    /// What others than the instructions read.
    kept: &'a BTreeSet<StorageId>,
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
            Action::Compute(op) if !self.draft.is_view(instruction) => Some(op),
            _ => None,
        }
    }

    /// By their first operation, the operations of each region in their order.
    fn regions(&self) -> BTreeMap<usize, Vec<usize>> {
        let mut regions: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut region_of: HashMap<usize, usize> = HashMap::new();
        let mut makers: HashMap<BufferId, usize> = HashMap::new();
        // The last region of small values.
        let mut small: Option<usize> = None;
        for at in 0..self.draft.sections[self.section].len() {
            let instruction = &self.item(at).instruction;
            if self.op(at).is_some() {
                let made_by = instruction.operands.iter().filter_map(|buffer| makers.get(buffer));
                let joined: BTreeSet<usize> = made_by.filter_map(|maker| region_of.get(maker).copied()).collect();
                let beside = small.filter(|_| self.is_small(at));
                let fits = |members: &Vec<usize>| self.fits(&members[..1], &[&members[1..], &[at]].concat());
                let found = self.candidates(&regions, &joined, at, beside).into_iter().find(fits);
                let members = [found.unwrap_or_default(), vec![at]].concat();
                members.iter().for_each(|member| drop(regions.remove(member)));
                region_of.extend(members.iter().map(|member| (*member, members[0])));
                small = if self.is_small(at) { Some(members[0]) } else { small };
                regions.insert(members[0], members);
            }
            makers.extend(instruction.results.iter().map(|buffer| (*buffer, at)));
        }
        regions
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

    /// Whether operations that come behind a region may join it.
    fn fits(&self, members: &[usize], joining: &[usize]) -> bool {
        let all = |count: usize| [members, &joining[..count]].concat();
        let may_join = |(index, at): (usize, &usize)| {
            self.is_behind(*at) == self.is_behind(members[0]) && self.may_move(*at, &all(index))
        };
        joining.iter().enumerate().all(may_join) && self.fused(&all(joining.len())).is_some()
    }

    /// Whether a region is there for one operation behind it: nothing else reads what it makes, or it is copies of a
    /// smaller value, which nothing that came before that operation reads.
    fn is_for(&self, members: &[usize], at: usize) -> bool {
        let is_read_there = |buffer: &BufferId| {
            let storage = self.draft.storage[*buffer];
            let is_known =
                |place: &(usize, usize)| place.0 == self.section && (place.1 == at || members.contains(&place.1));
            !self.kept.contains(&storage) && self.touched.of(storage).iter().all(is_known)
        };
        let copies = |at: usize| matches!(self.op(at), Some(Op::Broadcast(_)));
        let mut made = members.iter().flat_map(|member| &self.item(*member).instruction.results);
        matches!(members, [member] if copies(*member)) || made.all(is_read_there)
    }

    /// Whether an operation on elements takes less time than its launch. Casts of parameters share launches by themselves.
    fn is_small(&self, at: usize) -> bool {
        let instruction = &self.item(at).instruction;
        let is_elementwise = match self.op(at) {
            Some(Op::Unary(_) | Op::UnaryGrad(_) | Op::Binary(_) | Op::Affine(_)) => true,
            Some(Op::Cast(_)) => {
                instruction.operands.iter().all(|buffer| !self.kept.contains(&self.draft.storage[*buffer]))
            }
            _ => false,
        };
        is_elementwise && is_small(self.draft, instruction)
    }

    /// Whether an operation comes behind the forward pass.
    fn is_behind(&self, at: usize) -> bool {
        self.item(at).instruction.source.is_some_and(|source| source > self.behind)
    }

    /// Whether an operation may run where a region does: what it reads and no operation of the region
    /// makes is there before it, and what it writes is nobody's business before.
    fn may_move(&self, at: usize, members: &[usize]) -> bool {
        let instruction = &self.item(at).instruction;
        let is_made = |buffer: &BufferId| members.iter().any(|member| self.makes(*member, *buffer));
        let is_written = |buffer: &BufferId| {
            let all = self.written.of(self.draft.storage[*buffer]);
            let place = |index: usize| all.partition_point(|write| *write < (self.section, index));
            place(members[0]) < place(at)
        };
        let is_fresh = |buffer: &BufferId| {
            let storage = self.draft.storage[*buffer];
            self.touched.of(storage).first() == Some(&(self.section, at)) && !self.kept.contains(&storage)
        };
        instruction.operands.iter().all(|buffer| is_made(buffer) || !is_written(buffer))
            && instruction.results.iter().all(is_fresh)
    }

    fn makes(&self, at: usize, buffer: BufferId) -> bool {
        self.item(at).instruction.results.contains(&buffer)
    }

    /// The instruction of a region, if the target has a kernel for it.
    fn fused(&self, members: &[usize]) -> Option<Instruction> {
        let is_made = |buffer: &BufferId| members.iter().any(|member| self.makes(*member, *buffer));
        let mut operands: Vec<BufferId> = Vec::new();
        for buffer in members.iter().flat_map(|member| &self.item(*member).instruction.operands) {
            if !is_made(buffer) && !operands.contains(buffer) {
                operands.push(*buffer);
            }
        }
        let mut values: Vec<BufferId> = operands.clone();
        let mut region = Fused::default();
        let mut results = Vec::new();
        for member in members {
            let instruction = &self.item(*member).instruction;
            let value = |buffer: &BufferId| values.iter().position(|value| value == buffer);
            let of = instruction.operands.iter().map(value).collect::<Option<Vec<_>>>()?;
            let types = self.types(&instruction.results);
            let step =
                FusedStep { op: self.op(*member)?.clone(), operands: of, results: types, source: instruction.source };
            region.steps.push(step);
            for buffer in &instruction.results {
                if self.leaves(*buffer, members) {
                    region.results.push(values.len());
                    results.push(*buffer);
                }
                values.push(*buffer);
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
        let is_inside = |(section, at): &(usize, usize)| *section == self.section && members.contains(at);
        self.kept.contains(&storage) || !self.touched.of(storage).iter().all(is_inside)
    }
}
