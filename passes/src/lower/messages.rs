//! What stages of a pipeline tell each other: values that are sent, and numbers that are combined.
//!
//! A value is sent in the layout in which it is made, unless it is partial there and its first reader wants
//! it whole: then it is resolved before it leaves. Single numbers that one stage makes and all want (the loss, the
//! squares of a gradient) are summed over the stages after the loop; who has none adds zero.

use super::draft::Handover;
use super::{LowerError, Lowering, Place};
use crate::lower::Hint;
use shardc_ir::ops::Constant;
use shardc_ir::plan::Category;
use shardc_ir::program::{Action, Stream};
use shardc_ir::{BufferId, NodeId, ReduceKind, Sharding, ValueId};

impl Lowering<'_> {
    /// The layout in which a value is sent to its first reader in another stage.
    fn sent_as(&self, value: ValueId, reader: NodeId) -> Sharding {
        let made = self.made_as(value);
        let node = self.plan.graph.node(reader);
        let wanted = node.operands.iter().position(|operand| *operand == value);
        let wanted = wanted.map(|index| &self.layouts[reader].operands[index]);
        match wanted.filter(|wanted| wanted.partial.len() < made.partial.len()) {
            Some(wanted) => wanted.clone(),
            None => made,
        }
    }

    /// The rank that stands in another stage where this one stands in its own.
    fn peer(&self, stage: u64) -> u64 {
        let axes = self.mesh.family("pp");
        self.mesh.group(self.rank, &axes)[stage as usize]
    }

    /// Sends a value to every stage that reads it.
    pub(super) fn send(&mut self, value: ValueId) -> Result<(), LowerError> {
        let Some(stage) = &self.stage else { return Ok(()) };
        let edges: Vec<_> =
            stage.edges.iter().filter(|edge| edge.value == value && edge.from == stage.stage).cloned().collect();
        for edge in edges {
            let layout = self.sent_as(value, edge.reader);
            let place = self.places[self.plan.graph.value(value).def];
            let buffer = self.copy_at(value, &layout, place)?;
            let peer = self.peer(edge.to);
            self.hand_over(Handover { value, link: edge.link, peer, is_send: true, buffer });
        }
        Ok(())
    }

    /// Receives a value that another stage makes, when it is first read here.
    pub(super) fn receive(&mut self, value: ValueId) {
        let Some(edge) = self.stage.as_ref().and_then(|stage| stage.incoming(value)).cloned() else { return };
        if !self.is_known(value) {
            let layout = self.sent_as(value, edge.reader);
            let ty = self.local_type(self.plan.graph.ty(value), &layout);
            let buffer = self.draft.buffer(ty, self.category(value));
            self.draft.buffers[buffer].value = Some(value);
            // What comes once is converted in the loop as well: the prologue has ended when it comes.
            let place = self.stage.as_ref().map_or(Place::Prologue, |stage| stage.part(edge.pass));
            self.made_copy(value, layout, buffer, place);
            let peer = self.peer(edge.from);
            self.hand_over(Handover { value, link: edge.link, peer, is_send: false, buffer });
        }
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
        let ty = self.local_type(self.plan.graph.ty(value), to);
        let own = match self.is_here(self.plan.graph.value(value).def) {
            true => self.own_operand(value, to, None)?,
            false => {
                let zero = self.draft.buffer(ty.clone(), Category::Activation);
                let action = Action::Compute(Constant { value: 0.0 }.into());
                self.draft.push(place, action, vec![], vec![zero], Stream::Compute, def, Hint::None);
                zero
            }
        };
        let group = self.draft.group(&self.mesh.family("pp"));
        let buffer = self.draft.buffer(ty, Category::Activation);
        self.draft.buffers[buffer].value = Some(value);
        let action = Action::AllReduce { reduce: ReduceKind::Sum, group };
        self.draft.push(place, action, vec![own], vec![buffer], Stream::Communication, def, Hint::Bucket);
        self.summed.push(((value, to.clone()), buffer));
        Ok(buffer)
    }
}
