//! Conversions: which copy of a value a reader gets, and what makes it.

use super::collective::Site;
use super::draft::{Hint, Place};
use super::{LowerError, Lowering};
use crate::fold::module;
use crate::reshard::{Step, priced_path, rough_cost};
use shardc_ir::plan::Category;
use shardc_ir::program::{Action, Stream};
use shardc_ir::{AxisSet, BufferId, DType, Mesh, NodeId, OpDef, Role, SecondaryMap, Sharding, TensorType, ValueId};
use std::collections::HashMap;
use std::rc::Rc;

/// Forward, backward (with recomputation) or optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Forward,
    Backward,
    Optimizer,
}

/// One layout in which a value is at hand.
#[derive(Clone, Debug)]
struct Copy {
    sharding: Sharding,
    buffer: BufferId,
    place: Place,
    /// The block for which it was made, if it is transient.
    block: Option<u32>,
    /// Made of another copy for a node of the forward pass, and larger than what the value's maker left.
    is_forward_gather: bool,
}

type Priced = Option<(f64, Rc<Vec<Step>>)>;

/// Every copy of every value, and what was looked up on the way.
#[derive(Default)]
pub(super) struct Copies {
    of: SecondaryMap<ValueId, Vec<Copy>>,
    accumulators: HashMap<BufferId, BufferId>,
    paths: HashMap<(TensorType, Sharding, Sharding), Priced>,
    blocks: HashMap<(String, Phase), u32>,
}

impl Copies {
    /// Records the buffer in which a node leaves its result.
    pub(super) fn made(&mut self, value: ValueId, sharding: Sharding, buffer: BufferId, place: Place) {
        self.of[value].push(Copy { sharding, buffer, place, block: None, is_forward_gather: false });
    }

    fn path(&mut self, ty: &TensorType, from: &Sharding, to: &Sharding, mesh: &Mesh) -> Priced {
        let key = (ty.clone(), from.clone(), to.clone());
        let search = || {
            let found = priced_path(ty, from, to, mesh, &|step, local| rough_cost(step, local, mesh));
            found.map(|(cost, steps)| (cost, Rc::new(steps)))
        };
        self.paths.entry(key).or_insert_with(search).clone()
    }
}

/// The layout over space alone, or over time alone.
fn without_time(sharding: &Sharding, time: AxisSet) -> Sharding {
    let mut rest = sharding.clone();
    rest.partial.retain(|(axis, _)| !time.contains(*axis));
    rest
}

impl Lowering<'_> {
    /// The buffer in which `reader` (a node, or the outputs) finds a value in a layout; made now if it
    /// is not at hand.
    pub(super) fn operand(
        &mut self,
        value: ValueId,
        to: &Sharding,
        reader: Option<NodeId>,
    ) -> Result<BufferId, LowerError> {
        match self.is_combined_for(value, reader) {
            true => self.combined(value, to),
            false => self.own_operand(value, to, reader),
        }
    }

    /// [`operand`](Self::operand) of a value that this stage makes, or receives.
    pub(super) fn own_operand(
        &mut self,
        value: ValueId,
        to: &Sharding,
        reader: Option<NodeId>,
    ) -> Result<BufferId, LowerError> {
        self.receive(value);
        let block = self.block(reader);
        let at = reader.map_or_else(|| self.last_place(), |node| self.places[node]);
        let own = self.plan.transient[value].then_some(block);
        // Recomputation keeps the inputs of a block as they were made: a copy gathered in the forward
        // pass would live until the backward pass, so it is gathered again there.
        let is_behind =
            reader.is_some_and(|node| self.phase(node) != Phase::Forward) && self.is_kept_for_recompute(value);
        let visible = |copy: &&Copy| {
            copy.place <= at && (copy.block.is_none() || copy.block == own) && !(is_behind && copy.is_forward_gather)
        };
        let copies: Vec<Copy> = self.copies.of[value].iter().filter(visible).cloned().collect();
        if let Some(copy) = copies.iter().find(|copy| copy.sharding == *to && self.is_readable(copy, at)) {
            return Ok(copy.buffer);
        }
        if let Some(buffer) = self.make_again(value, to, at)? {
            return Ok(buffer);
        }
        let ty = self.plan.graph.ty(value).clone();
        let mut best: Option<(f64, Rc<Vec<Step>>, Copy)> = None;
        for copy in &copies {
            if !self.is_readable(copy, at) {
                continue;
            }
            let found = self.copies.path(&ty, &copy.sharding, to, self.mesh);
            let Some((cost, steps)) = found else { continue };
            if best.as_ref().is_none_or(|(known, ..)| cost < *known) {
                best = Some((cost, steps, copy.clone()));
            }
        }
        if let Some((_, steps, copy)) = best {
            // A gradient is summed once for all that read it behind the loop, not part by part.
            let is_late = reader.is_some_and(|node| self.is_late(node)) && steps.iter().any(Step::is_reduction);
            let whole = if is_late { self.kept_as(value, to) } else { to.clone() };
            if whole != *to && copies.iter().all(|copy| copy.sharding != whole) {
                self.own_operand(value, &whole, reader)?;
                return self.own_operand(value, to, reader);
            }
            return Ok(self.run_steps(value, copy, &steps, own, at, reader));
        }
        if !self.accumulate_for(value, to, reader, &copies)? {
            let reason = self.why_not(value, to);
            return Err(self.no_conversion(value, self.common.made_as(value), to, reader, reason));
        }
        // The accumulator is a copy now, of the layout itself or of one that has a path to it.
        self.own_operand(value, to, reader)
    }

    /// Whether a copy of a value is at hand.
    pub(super) fn is_known(&self, value: ValueId) -> bool {
        !self.copies.of[value].is_empty()
    }

    /// Records a copy that no conversion made.
    pub(super) fn made_copy(&mut self, value: ValueId, sharding: Sharding, buffer: BufferId, place: Place) {
        self.copies.made(value, sharding, buffer, place);
    }

    /// A value in a layout, converted where it is made if need be.
    pub(super) fn copy_at(&mut self, value: ValueId, to: &Sharding, at: Place) -> Result<BufferId, LowerError> {
        let copies = self.copies.of[value].clone();
        let own = |copy: &&Copy| copy.place == at && copy.block.is_none();
        if let Some(copy) = copies.iter().filter(own).find(|copy| copy.sharding == *to) {
            return Ok(copy.buffer);
        }
        let def = Some(self.plan.graph.value(value).def);
        let ty = self.plan.graph.ty(value).clone();
        let made = self.common.made_as(value);
        let copy = copies.into_iter().find(|copy| own(&copy) && copy.sharding == *made);
        let found = copy.and_then(|copy| Some((self.copies.path(&ty, made, to, self.mesh)?.1, copy)));
        let Some((steps, copy)) = found else {
            return Err(self.no_conversion(value, made, to, def, self.why_not(value, to)));
        };
        Ok(self.run_steps(value, copy, &steps, None, at, def))
    }

    /// A copy made in the loop can be read behind it only if it does not depend on the microbatch.
    fn is_readable(&self, copy: &Copy, at: Place) -> bool {
        let over_time = |axis| self.common.time.contains(axis);
        let varies = copy.sharding.dims.iter().flatten().copied().any(over_time)
            || copy.sharding.partial.iter().any(|(axis, _)| over_time(*axis));
        !(varies && at == Place::Epilogue)
    }

    /// In which pass a node runs. What computes a gradient while the forward pass still goes on, as
    /// the head does chunk by chunk, runs in that pass.
    fn phase(&self, node: NodeId) -> Phase {
        match self.plan.graph.node(node).role {
            Role::Forward => Phase::Forward,
            Role::Backward(_) | Role::Recompute(_) if node < self.common.last_forward => Phase::Forward,
            Role::Backward(_) | Role::Recompute(_) => Phase::Backward,
            Role::Optimizer => Phase::Optimizer,
        }
    }

    /// Whether recomputation starts from this value of the forward pass.
    fn is_kept_for_recompute(&self, value: ValueId) -> bool {
        !self.common.weights[self.plan.graph.value(value).def] && self.common.read_again[value]
    }

    fn block(&mut self, reader: Option<NodeId>) -> u32 {
        let (path, phase) = match reader {
            None => ("", Phase::Optimizer),
            Some(node) => (module(&self.plan.graph.node(node).path), self.phase(node)),
        };
        let next = self.copies.blocks.len() as u32;
        *self.copies.blocks.entry((path.to_string(), phase)).or_insert(next)
    }

    /// A value that is made from nothing is made again in the layout itself.
    fn make_again(&mut self, value: ValueId, to: &Sharding, at: Place) -> Result<Option<BufferId>, LowerError> {
        let def = self.plan.graph.value(value).def;
        let node = self.plan.graph.node(def);
        if node.op.is_leaf() || !node.operands.is_empty() || node.results.len() != 1 || !to.partial.is_empty() {
            return Ok(None);
        }
        // Zeros behind a part are none of its elements.
        if !to.is_even(&self.plan.graph.ty(value).shape, self.mesh) {
            return Ok(None);
        }
        let ty = self.common.local_type(self.plan.graph.ty(value), to);
        let Ok(op) = self.local_op(def, node, &[], std::slice::from_ref(to)) else { return Ok(None) };
        // Numbers that are given are given whole: their parts are cut out.
        if op.infer(&[], std::slice::from_ref(&ty)).is_err() {
            return Ok(None);
        }
        let buffer = self.draft.buffer(ty, self.common.category(value));
        self.draft.buffers[buffer].value = Some(value);
        self.check_types(def, &op, &[], &[buffer])?;
        self.draft.push(at, Action::Compute(op), vec![], vec![buffer], Stream::Compute, Some(def), Hint::None);
        self.copies.made(value, to.clone(), buffer, at);
        Ok(Some(buffer))
    }

    /// Emits the steps, and records where they end.
    fn run_steps(
        &mut self,
        value: ValueId,
        from: Copy,
        steps: &[Step],
        own: Option<u32>,
        at: Place,
        reader: Option<NodeId>,
    ) -> BufferId {
        let def = self.plan.graph.value(value).def;
        // What does not depend on the microbatch is converted once, unless the copies shall be dropped.
        let hoist = own.is_none() && from.place == Place::Prologue && matches!(at, Place::Microbatch(_));
        let place = if hoist { Place::Prologue } else { at };
        let for_optimizer = reader.is_none_or(|node| self.plan.graph.node(node).role == Role::Optimizer);
        let is_forward = reader.is_some_and(|node| self.phase(node) == Phase::Forward);
        // Sums that nothing in the loop reads, but for single numbers, which others are made of at once.
        let is_number = self.plan.graph.ty(value).elements() == 1;
        let is_late = for_optimizer || (!is_number && reader.is_some_and(|node| self.is_late(node)));
        let made_bytes = self.common.local_type(self.plan.graph.ty(value), self.common.made_as(value)).bytes();
        let block = self.block(reader);
        let hint = |step: &Step| match step {
            Step::AllGather { .. } if self.common.weights[def] && !for_optimizer => {
                Hint::Prefetch { block, is_kept: own.is_none() }
            }
            // Scales of weights are found together, before their readers.
            _ if step.is_reduction() && (is_late || self.common.weights[def]) => Hint::Bucket,
            _ => Hint::None,
        };
        let hints: Vec<Hint> = steps.iter().map(hint).collect();
        let category = match self.common.category(value) {
            Category::Parameter if own.is_some() => Category::Buffer,
            category => category,
        };
        let (mut buffer, mut sharding) = (from.buffer, from.sharding);
        let cast = |category| Site { place, source: Some(def), hint: Hint::None, category };
        let narrow = self.sums_in(value).filter(|_| for_optimizer && steps.iter().any(Step::is_reduction));
        if let Some(dtype) = narrow {
            buffer = self.cast(buffer, dtype, cast(Category::Buffer));
        }
        for (index, (step, hint)) in steps.iter().zip(hints).enumerate() {
            let last = index + 1 == steps.len();
            let own_category = if last && narrow.is_none() { category } else { Category::Buffer };
            sharding = step.apply(&sharding);
            let shape = sharding.local_shape(&self.plan.graph.ty(value).shape, self.mesh);
            let site = Site { place, source: Some(def), hint, category: own_category };
            buffer = self.emit(step, buffer, &shape, site);
            match narrow {
                Some(_) if !last => continue,
                Some(_) => buffer = self.cast(buffer, self.plan.graph.ty(value).dtype, cast(category)),
                None => {}
            }
            let grown = self.draft.buffers[buffer].ty.bytes() > made_bytes;
            let copy =
                Copy { sharding: sharding.clone(), buffer, place, block: own, is_forward_gather: grown && is_forward };
            self.copies.of[value].push(copy);
        }
        self.draft.buffers[buffer].value.get_or_insert(value);
        buffer
    }

    /// The element type in which a value is summed over ranks, if it is not its own.
    fn sums_in(&self, value: ValueId) -> Option<DType> {
        self.plan.sums_in(value, self.common.users(value))
    }

    /// Accumulates a value that is partial over time: reduced over the ranks first if that makes it smaller and the plan
    /// says so or it takes no communication, else as it is. Whether there is a new accumulator.
    fn accumulate_for(
        &mut self,
        value: ValueId,
        to: &Sharding,
        reader: Option<NodeId>,
        copies: &[Copy],
    ) -> Result<bool, LowerError> {
        let over_time = |axes: &[shardc_ir::AxisId]| axes.iter().any(|axis| self.common.time.contains(*axis));
        let fail = |this: &Self, from: &Sharding, reason| this.no_conversion(value, from, to, reader, reason);
        let Some(copy) = copies.iter().find(|copy| copy.sharding.partial_axes().iter().any(|axis| over_time(&[axis])))
        else {
            return Err(fail(self, self.common.made_as(value), self.why_not(value, to)));
        };
        if to.dims.iter().any(|axes| over_time(axes)) || to.partial.iter().any(|(axis, _)| over_time(&[*axis])) {
            return Err(fail(self, &copy.sharding, "a sum over microbatches cannot be divided over them"));
        }
        if copy.sharding.dims.iter().any(|axes| over_time(axes)) {
            return Err(fail(self, &copy.sharding, "a value divided over microbatches cannot be read after them"));
        }
        let reader_place = reader.map_or(Place::Epilogue, |node| self.places[node]);
        if reader_place != Place::Epilogue {
            return Err(fail(self, &copy.sharding, "a sum over microbatches can be read only after all of them"));
        }
        let over: Vec<_> = copy.sharding.partial.iter().copied().filter(|(axis, _)| over_time(&[*axis])).collect();
        if over.iter().any(|(_, kind)| *kind != shardc_ir::ReduceKind::Sum) {
            return Err(fail(self, &copy.sharding, "only sums are accumulated over microbatches"));
        }
        let mut in_loop = self.kept_as(value, to);
        over.iter().for_each(|(axis, kind)| in_loop.add_partial(*axis, *kind));
        let ty = self.plan.graph.ty(value).clone();
        let Some((_, steps)) = self.copies.path(&ty, &copy.sharding, &in_loop, self.mesh) else {
            return Err(fail(self, &copy.sharding, self.why_not(value, to)));
        };
        let is_local = steps.iter().all(|step| matches!(step, Step::Slice { .. }));
        let part = |sharding: &Sharding| sharding.local_shape(&ty.shape, self.mesh).iter().product::<u64>();
        let shrinks = part(&in_loop) < part(&copy.sharding);
        let (source, sharding) = if is_local || (self.plan.reduce_in_loop && shrinks) {
            (self.run_steps(value, copy.clone(), &steps, None, copy.place, reader), in_loop)
        } else {
            (copy.buffer, copy.sharding.clone())
        };
        Ok(self.accumulate(value, source, copy.place, &without_time(&sharding, self.common.time)))
    }

    /// Whether a node runs behind the microbatches, or behind the backward pass of the only one.
    fn is_late(&self, node: NodeId) -> bool {
        self.places[node] == Place::Epilogue || self.phase(node) == Phase::Optimizer
    }

    /// The layout in which a sum serves all that read it behind the microbatches, one of which asks for it so:
    /// that of which the others take parts, if there is one. Summed up in parts, it would be gathered for those that
    /// read more.
    fn kept_as(&mut self, value: ValueId, to: &Sharding) -> Sharding {
        let users = self.common.users(value).iter();
        let here = users.filter(|(user, _)| self.is_here(*user) && self.is_late(*user));
        let read: Vec<&Sharding> = here.map(|(user, index)| &self.common.layouts[*user].operands[*index]).collect();
        let ty = self.plan.graph.ty(value);
        let mut gives = |from: &Sharding, to: &Sharding| {
            let way = self.copies.path(ty, from, to, self.mesh);
            way.is_some_and(|(_, steps)| steps.iter().all(|step| matches!(step, Step::Slice { .. })))
        };
        let serves = |from: &&Sharding| gives(from, to) && read.iter().all(|other| gives(from, other));
        read.iter().copied().find(serves).unwrap_or(to).clone()
    }

    fn accumulate(&mut self, value: ValueId, source: BufferId, place: Place, sharding: &Sharding) -> bool {
        if self.copies.accumulators.contains_key(&source) {
            return false;
        }
        let category = match self.common.category(value) {
            Category::Activation | Category::Gradient => Category::Gradient,
            other => other,
        };
        let total = self.draft.buffer(self.draft.buffers[source].ty.clone(), category);
        self.draft.buffers[total].value = Some(value);
        let def = Some(self.plan.graph.value(value).def);
        let (operands, results) = (vec![source], vec![total]);
        self.draft.push(place, Action::Accumulate, operands, results, Stream::Compute, def, Hint::None);
        self.copies.accumulators.insert(source, total);
        self.copies.made(value, sharding.clone(), total, Place::Epilogue);
        true
    }

    fn why_not(&self, value: ValueId, to: &Sharding) -> &'static str {
        let made = self.common.made_as(value);
        let divided = |sharding: &Sharding| sharding.dims.iter().flatten().any(|axis| self.common.time.contains(*axis));
        match (divided(made), divided(to)) {
            (true, _) => "its division over microbatches cannot change",
            (false, true) => "a value that is the same in all microbatches cannot be divided over them",
            _ => "there is no way between these layouts",
        }
    }

    fn no_conversion(
        &self,
        value: ValueId,
        from: &Sharding,
        to: &Sharding,
        reader: Option<NodeId>,
        reason: &'static str,
    ) -> LowerError {
        let text = |sharding: &Sharding| {
            let dims = sharding.dims.iter().enumerate();
            let sizes = &self.plan.graph.ty(value).shape;
            let dims: Vec<_> =
                dims.map(|(dim, _)| format!("{}{}", sizes[dim], sharding.dim_text(dim, self.mesh))).collect();
            format!("[{}]{}", dims.join(","), sharding.partial_text(self.mesh))
        };
        LowerError::NoConversion {
            value,
            path: self.plan.graph.def(value).path.clone(),
            from: text(from),
            to: text(to),
            reader: reader.map_or("an output".to_string(), |node| node.to_string()),
            reason,
        }
    }
}
