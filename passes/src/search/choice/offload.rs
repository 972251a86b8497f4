//! What does not lie on the device: optimizer state, gradients, parameters, saved activations.
//!
//! Each is a number of blocks, from the first on, so a plan moves no more than memory asks for; the stages of a pipeline
//! count their own blocks, and each may have numbers of its own.
//! *Optimizer* is the state and the master copies that only the update reads: the host updates them, and gets their
//! gradients when all of the step's are there. *Gradients* leave as they are made, and the host adds up those of
//! several microbatches (Ren et al., "ZeRO-Offload", 2021, section 4.1). *Parameters* are the copies that the passes
//! read: they come to the device block by block. *Activations*
//! are what the backward pass reads of a block: on the device they live as long as those of a block that
//! is computed again, which tells what that frees; they cost transfers instead of computation.

use crate::fold::{self, Blocks};
use shardc_ir::ops::{Op, Update};
use shardc_ir::plan::Space;
use shardc_ir::{Node, NodeId, OpDef, Plan, Role, ValueId};
use std::collections::BTreeSet;
use std::fmt;

/// Of each kind, the blocks that lie away from the device; [`ALL`] for everything, what is in no block included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Offload {
    /// Optimizer state and master copies.
    pub optimizer: u64,
    /// Gradients, as soon as they are made: of no more blocks than the optimizer's.
    pub gradients: u64,
    /// Copies of parameters that the passes read.
    pub parameters: u64,
    /// What the backward pass reads.
    pub activations: u64,
    /// Whether the optimizer's part lies on disk.
    pub is_on_disk: bool,
}

/// Every block, and what is in none.
pub const ALL: u64 = u64::MAX;

/// What may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// See [`Offload::optimizer`].
    Optimizer,
    /// See [`Offload::gradients`].
    Gradients,
    /// See [`Offload::parameters`].
    Parameters,
    /// See [`Offload::activations`].
    Activations,
}

impl Offload {
    /// Whether everything lies on the device.
    pub fn is_none(&self) -> bool {
        self.counts() == [0; 4]
    }

    /// The blocks of each kind.
    pub fn counts(&self) -> [u64; 4] {
        [self.optimizer, self.gradients, self.parameters, self.activations]
    }

    /// The same with so many blocks of a kind.
    pub fn with(mut self, kind: Kind, count: u64) -> Self {
        let slot = match kind {
            Kind::Optimizer => &mut self.optimizer,
            Kind::Gradients => &mut self.gradients,
            Kind::Parameters => &mut self.parameters,
            Kind::Activations => &mut self.activations,
        };
        *slot = count;
        self
    }

    /// The same with the optimizer's part on disk.
    pub fn on_disk(self) -> Self {
        Self { is_on_disk: self.optimizer > 0, ..self }
    }

    /// Reads `none`, `optimizer`, `optimizer:12@disk+gradients:12+parameters:3+activations:8`.
    ///
    /// # Errors
    /// Names the part that is not understood, and what is.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut offload = Self::default();
        for part in text.split('+').filter(|_| text != "none") {
            let (what, disk) = part.split_once('@').map_or((part, false), |(what, place)| (what, place == "disk"));
            let (kind, count) = what.split_once(':').unwrap_or((what, ""));
            let slot = match kind {
                "optimizer" => &mut offload.optimizer,
                "gradients" if !disk => &mut offload.gradients,
                "parameters" if !disk => &mut offload.parameters,
                "activations" if !disk => &mut offload.activations,
                _ => {
                    return Err(format!(
                        "`{part}` is none of none, optimizer, optimizer@disk, gradients, parameters, activations"
                    ));
                }
            };
            let count = if count.is_empty() { Some(ALL) } else { count.parse().ok().filter(|count| *count > 0) };
            let count = count.ok_or_else(|| format!("`{part}` does not end in a number of blocks above 0"))?;
            if *slot > 0 || (part.contains('@') && !disk) {
                return Err(format!("`{part}`: write each kind once, with @disk or without"));
            }
            *slot = count;
            offload.is_on_disk |= disk;
        }
        if offload.gradients > offload.optimizer {
            return Err("gradients leave for where they are read, by updates on the host: \
                 add the optimizer of as many blocks, as in optimizer+gradients"
                .to_string());
        }
        Ok(offload)
    }
}

/// The offload of a model, or of each stage of its pipeline.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Offloads(Vec<Offload>);

impl Offloads {
    /// One for all, or one for each stage.
    pub fn new(mut each: Vec<Offload>) -> Self {
        if each.windows(2).all(|pair| pair[0] == pair[1]) {
            each.truncate(1);
        }
        Self(each)
    }

    /// Whether everything lies on the devices.
    pub fn is_none(&self) -> bool {
        self.0.iter().all(Offload::is_none)
    }

    /// That of a stage.
    pub fn of(&self, stage: u64) -> Offload {
        let own = self.0.get(stage as usize).or_else(|| self.0.first().filter(|_| self.0.len() == 1));
        own.copied().unwrap_or_default()
    }

    /// The one of all stages, or those of each.
    pub fn each(&self) -> &[Offload] {
        &self.0
    }

    /// Whether gradients leave as they are made.
    pub fn leaves_gradients(&self) -> bool {
        self.0.iter().any(|own| own.gradients > 0)
    }

    /// As pins would say it; nothing, if everything lies on the devices.
    pub fn text(&self) -> String {
        match &self.0[..] {
            _ if self.is_none() => String::new(),
            [of_all] => format!("offload={of_all}"),
            each => format!("stage_offload={}", each.iter().map(Offload::to_string).collect::<Vec<_>>().join("/")),
        }
    }

    /// Marks the values of a plan that lie away from the device between their uses.
    pub fn mark(&self, plan: &mut Plan) {
        if self.is_none() {
            return;
        }
        for (value, space) in self.away(plan) {
            plan.spaces[value] = space;
        }
    }

    fn away(&self, plan: &Plan) -> Vec<(ValueId, Space)> {
        let (places, read) = (Places::of(plan), read_by_passes(plan));
        let within = |count: u64, id: NodeId| places.block(id).map_or(count == ALL, |block| block < count);
        let mut away: Vec<(ValueId, Space)> = Vec::new();
        for (id, node) in plan.graph.nodes() {
            let own = self.of(places.stage(id));
            let optimizer = if own.is_on_disk { Space::Disk } else { Space::Host };
            let is_copy = || is_parameter(plan, node.operands[0]);
            let (count, value, space) = match &node.op {
                Op::State(_) => (own.optimizer, node.results[0], optimizer),
                Op::Parameter(_) if !read.contains(&node.results[0]) => (own.optimizer, node.results[0], optimizer),
                Op::Parameter(_) => (own.parameters, node.results[0], Space::Host),
                Op::Cast(_) if is_copy() => (own.parameters, node.results[0], Space::Host),
                op if op.update().is_some() => (own.gradients, node.operands[Update::GRADIENT], Space::Host),
                _ => continue,
            };
            away.extend(within(count, id).then_some((value, space)));
        }
        for (_, node) in plan.graph.nodes().filter(|(_, node)| matches!(node.role, Role::Backward(_))) {
            for value in &node.operands {
                let (id, maker) = (plan.graph.value(*value).def, plan.graph.def(*value));
                let is_saved = maker.role == Role::Forward && !maker.op.is_leaf() && !is_copy(plan, *value);
                let count = self.of(places.stage(id)).activations;
                if is_saved && places.block(id).is_some_and(|block| block < count) {
                    away.push((*value, Space::Host));
                }
            }
        }
        away
    }
}

/// In which stage each node is, and in which of the stage's blocks.
struct Places<'a> {
    plan: &'a Plan,
    numbers: Blocks<'a>,
    /// Per stage, the blocks that it has a part of.
    blocks: Vec<Vec<u64>>,
}

impl<'a> Places<'a> {
    fn of(plan: &'a Plan) -> Self {
        let mut own = Self { plan, numbers: Blocks::new(&plan.graph), blocks: Vec::new() };
        let mut blocks = vec![BTreeSet::new(); plan.stages() as usize];
        let forward = |node: &Node| node.role == Role::Forward && !node.op.is_leaf();
        for (id, _) in plan.graph.nodes().filter(|(_, node)| forward(node)) {
            blocks[own.stage(id) as usize].extend(own.of_model(id));
        }
        own.blocks = blocks.into_iter().map(Vec::from_iter).collect();
        own
    }

    fn stage(&self, id: NodeId) -> u64 {
        let Plan { pipeline, .. } = self.plan;
        pipeline.chunks[id].map_or(0, |chunk| pipeline.stage_of(chunk, self.plan.stages()))
    }

    /// The place of a node's block in the whole model.
    fn of_model(&self, id: NodeId) -> Option<u64> {
        let block = fold::block_of(&self.plan.graph, self.plan.graph.node(id))?;
        self.numbers.named(block)
    }

    /// The place of a node's block among those of its stage.
    fn block(&self, id: NodeId) -> Option<u64> {
        let block = self.of_model(id)?;
        self.blocks[self.stage(id) as usize].binary_search(&block).ok().map(|place| place as u64)
    }
}

/// What others read than casts and updates: of parameters, all but the master copies.
fn read_by_passes(plan: &Plan) -> BTreeSet<ValueId> {
    let passes = plan.graph.nodes().filter(|(_, node)| !matches!(node.op, Op::Cast(_)) && node.op.update().is_none());
    passes.flat_map(|(_, node)| &node.operands).copied().collect()
}

fn is_parameter(plan: &Plan, value: ValueId) -> bool {
    matches!(plan.graph.def(value).op, Op::Parameter(_))
}

fn is_copy(plan: &Plan, value: ValueId) -> bool {
    let maker = plan.graph.def(value);
    matches!(maker.op, Op::Cast(_)) && is_parameter(plan, maker.operands[0])
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disk = if self.is_on_disk { "@disk" } else { "" };
        let kinds = [
            ("optimizer", self.optimizer, disk),
            ("gradients", self.gradients, ""),
            ("parameters", self.parameters, ""),
            ("activations", self.activations, ""),
        ];
        let mut parts = kinds.into_iter().filter(|(_, count, _)| *count > 0).peekable();
        if parts.peek().is_none() {
            return f.write_str("none");
        }
        for (index, (kind, count, place)) in parts.enumerate() {
            let plus = if index > 0 { "+" } else { "" };
            match count {
                ALL => write!(f, "{plus}{kind}{place}")?,
                count => write!(f, "{plus}{kind}:{count}{place}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: &str) {
        let text =
            Offload::parse(text).map_or_else(|error| error, |offload| format!("{offload} {}", offload.is_none()));
        assert!(text.contains(expect), "{text}");
    }

    #[test]
    fn texts() {
        check("none", "none true");
        check("optimizer", "optimizer false");
        check("activations:3+optimizer:2@disk", "optimizer:2@disk+activations:3 false");
        check("gradients:2+optimizer", "optimizer+gradients:2 false");
        check("gradients", "add the optimizer of as many blocks");
        check("gradients:3+optimizer:2", "add the optimizer of as many blocks");
        check("optimizer+optimizer:2", "write each kind once");
        check("optimizer:0", "a number of blocks above 0");
        check("optimizer@tape", "with @disk or without");
        check("activations@disk", "`activations@disk` is none of none, optimizer");
        check("weights", "`weights` is none of");
    }
}
