//! What stages of a pipeline tell each other: values that are sent, and numbers that are combined.
//!
//! A value is sent in the layout in which it is made, unless it is partial there and its first reader wants it whole:
//! then it is resolved before it leaves. What does not depend on the microbatch is sent once before the loop; what is
//! read behind the loop alone is added up over the microbatches where it is made, and sent once behind it. Single
//! numbers that one stage makes and all want (the loss, the squares of a gradient) are summed over the stages after the
//! loop; a stage that has none adds zero.
//!
//! In the loop a value arrives while the step before its first reader runs. What is held beyond the step that reads it
//! first is copied out of the buffer in which it arrived. So only the buffer of arrivals has room for a message that is
//! on its way (as a rule two copies, used in turns), and what is held needs no copy more than there are microbatches in
//! flight.

use super::draft::Handover;
use super::draft::Place;
use super::stages::Edge;
use super::{LowerError, Lowering};
use crate::lower::draft::Hint;
use crate::pipeline::order::Pass;
use shardc_ir::ops::Constant;
use shardc_ir::plan::Category;
use shardc_ir::program::{Action, Stream};
use shardc_ir::{BufferId, Family, NodeId, ReduceKind, Sharding, ValueId};

impl<'a> Lowering<'a> {
    /// The layout in which a value is sent to its first reader in another stage.
    fn sent_as(&self, value: ValueId, reader: NodeId) -> &'a Sharding {
        let made = self.common.made_as(value);
        let node = self.plan.graph.node(reader);
        let wanted = node.operands.iter().position(|operand| *operand == value);
        let wanted = wanted.map(|index| &self.common.layouts[reader].operands[index]);
        wanted.filter(|wanted| wanted.partial.len() < made.partial.len()).unwrap_or(made)
    }

    /// The rank that stands in another stage where this one stands in its own.
    fn peer(&self, stage: u64) -> u64 {
        let axes = self.mesh.family(Family::Pipeline);
        self.mesh.group(self.rank, &axes)[stage as usize]
    }

    /// Sends a value to every stage that reads it.
    pub(super) fn send(&mut self, value: ValueId) -> Result<(), LowerError> {
        let Some(stage) = &self.stage else { return Ok(()) };
        for edge in stage.outgoing(value) {
            let (layout, peer) = (self.sent_as(value, edge.reader), self.peer(edge.to));
            let buffer = match edge.place {
                Place::Epilogue => self.own_operand(value, layout, Some(edge.reader))?,
                _ => self.copy_at(value, layout, self.places[self.plan.graph.value(value).def])?,
            };
            match edge.link {
                Some(link) => self.hand_over(Handover { value, link, peer, is_send: true, buffer }),
                None => self.meet(edge.place, Action::Send { peer }, value, buffer),
            }
        }
        Ok(())
    }

    /// Receives a value that another stage makes in every microbatch, when it is first read here. It comes while the step
    /// before runs, so what is held beyond the step that first reads it is copied there from where it came: or all that
    /// is held would have room for one microbatch more.
    pub(super) fn receive(&mut self, value: ValueId) {
        let Some(stage) = &self.stage else { return };
        let Some(edge) = stage.incoming(value) else { return };
        let Some(link) = edge.link.filter(|_| !self.is_known(value)) else { return };
        let Place::Microbatch(part) = edge.place else { return };
        let is_forward = stage.parts.get(part as usize).is_some_and(|(_, pass)| *pass == Pass::Forward);
        let is_held = is_forward || self.plan.pipeline.schedule.splits_backward();
        let (own, peer) = (self.received(value, edge), self.peer(edge.from));
        let mut buffer = own;
        if is_held {
            buffer = self.draft.buffer(self.draft.buffers[own].ty.clone(), Category::Buffer);
            self.draft.buffers[buffer].value = Some(value);
            let (action, source) = (Action::Copy, Some(self.plan.graph.value(value).def));
            self.draft.push(edge.place, action, vec![buffer], vec![own], Stream::Compute, source, Hint::None);
        }
        self.hand_over(Handover { value, link, peer, is_send: false, buffer });
    }

    /// Receives what another stage makes once of a node, when it is its turn: all stages meet in the order of the
    /// nodes.
    pub(super) fn receive_once(&mut self, node: NodeId) {
        for value in &self.plan.graph.node(node).results {
            let edge = self.stage.as_ref().and_then(|stage| stage.incoming_once(*value));
            let Some(edge) = edge else { continue };
            let (buffer, peer) = (self.received(*value, edge), self.peer(edge.from));
            self.meet(edge.place, Action::Receive { peer }, *value, buffer);
        }
    }

    /// Where a value is when it has come.
    fn received(&mut self, value: ValueId, edge: &Edge) -> BufferId {
        let layout = self.sent_as(value, edge.reader);
        let ty = self.common.local_type(self.plan.graph.ty(value), layout);
        let buffer = self.draft.buffer(ty, self.common.category(value));
        self.draft.buffers[buffer].value = Some(value);
        self.made_copy(value, layout.clone(), buffer, edge.place);
        buffer
    }

    /// One end of a message outside of the loop.
    fn meet(&mut self, place: Place, action: Action, value: ValueId, buffer: BufferId) {
        let source = Some(self.plan.graph.value(value).def);
        let (operands, results) = match action {
            Action::Send { .. } => (vec![buffer], vec![]),
            _ => (vec![], vec![buffer]),
        };
        self.draft.push(place, action, operands, results, Stream::Messages, source, Hint::None);
    }

    fn hand_over(&mut self, message: Handover) {
        if let Some(stage) = &mut self.draft.stage {
            stage.messages.push(message);
        }
    }

    /// Whether a node is lowered on this rank.
    pub(super) fn is_here(&self, node: NodeId) -> bool {
        self.stage.as_ref().is_none_or(|stage| stage.here[node])
    }

    /// Whether something that another stage makes of a node comes to this one once.
    pub(super) fn is_received(&self, node: NodeId) -> bool {
        let results = &self.plan.graph.node(node).results;
        self.stage.as_ref().is_some_and(|stage| results.iter().any(|value| stage.incoming_once(*value).is_some()))
    }

    /// Whether a reader of a value (a node, or an output) wants it on all stages, of which one makes it.
    pub(super) fn is_combined_for(&self, value: ValueId, reader: Option<NodeId>) -> bool {
        let chunk = |id: NodeId| self.plan.pipeline.chunks[id];
        let is_outside = reader.is_none_or(|node| chunk(node).is_none());
        is_outside && self.stage.is_some() && chunk(self.plan.graph.value(value).def).is_some()
    }

    /// A number of one stage, on all: with others of its kind, if there are any, in one collective.
    pub(super) fn combined(&mut self, value: ValueId, to: &Sharding) -> Result<BufferId, LowerError> {
        if let Some((_, buffer)) = self.summed.iter().find(|((known, layout), _)| *known == value && layout == to) {
            return Ok(*buffer);
        }
        let (def, place) = (Some(self.plan.graph.value(value).def), self.last_place());
        let ty = self.common.local_type(self.plan.graph.ty(value), to);
        let own = match self.is_here(self.plan.graph.value(value).def) {
            true => self.own_operand(value, to, None)?,
            false => {
                let zero = self.draft.buffer(ty.clone(), Category::Activation);
                let action = Action::Compute(Constant { value: 0.0 }.into());
                self.draft.push(place, action, vec![], vec![zero], Stream::Compute, def, Hint::None);
                zero
            }
        };
        let group = self.draft.group(&self.mesh.family(Family::Pipeline));
        let buffer = self.draft.buffer(ty, Category::Activation);
        self.draft.buffers[buffer].value = Some(value);
        let action = Action::AllReduce { reduce: ReduceKind::Sum, group };
        self.draft.push(place, action, vec![own], vec![buffer], Stream::Communication, def, Hint::Bucket);
        self.summed.push(((value, to.clone()), buffer));
        Ok(buffer)
    }
}
