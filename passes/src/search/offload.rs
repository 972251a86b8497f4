//! What does not lie on the device: optimizer state, gradients, parameters, saved activations.
//!
//! Each is a number of blocks, from the first on, so a plan moves no more than memory asks for.
//! *Optimizer* is the state and the master copies that only the update reads: the host updates them, and gets their
//! gradients when all of the step's are there. *Gradients* leave as they are made, and the host adds up those of
//! several microbatches (Ren et al., "ZeRO-Offload", 2021, section 4.1). *Parameters* are the copies that the passes
//! read: they come to the device block by block. *Activations*
//! are what the backward pass reads of a block: on the device they live as long as those of a block that
//! is computed again, so [`Shape`] knows what that frees; they cost transfers instead of computation.

use super::Recompute;
use super::estimate::Shape;
use super::liveness::block_order;
use crate::cluster::Cluster;
use crate::cost::host::{Beside, Host, Moved, Traffic};
use crate::fold;
use shardc_ir::ops::Op;
use shardc_ir::plan::{Category, Memory, Prediction, Space};
use shardc_ir::{Bytes, Node, OpDef, Plan, Role, Seconds, ValueId};
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

/// A candidate with everything on the device.
#[derive(Clone, Copy)]
pub struct At<'a, 'b> {
    /// Its placed mesh.
    pub shape: &'a Shape<'b>,
    /// Which of its ways to store parameters.
    pub storage: usize,
    /// ZeRO stage.
    pub zero: u64,
    /// Recomputation.
    pub recompute: Recompute,
}

/// What an offload takes from the device and adds to the step, per rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Relief {
    /// Bytes that the device does not hold.
    pub memory: Memory,
    /// Bytes that the host holds.
    pub host: Bytes,
    /// Seconds of transfers that show.
    pub transfers: f64,
    /// Seconds of the update on the host, less those it saves on the device.
    pub update: f64,
}

impl Offload {
    /// Whether everything lies on the device.
    pub fn is_none(&self) -> bool {
        [self.optimizer, self.gradients, self.parameters, self.activations] == [0; 4]
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

    /// What it takes and adds, beside a prediction that has everything on the device.
    pub fn relief(&self, at: &At<'_, '_>, base: &Prediction, cluster: &Cluster) -> Relief {
        let At { shape, storage, zero, recompute } = *at;
        let held = shape.held(storage, zero);
        let share = |count: u64| match count {
            ALL => 1.0,
            _ => count as f64 / shape.blocks as f64 * held.in_blocks,
        };
        let [optimizer, leaving, parameters] = [self.optimizer, self.gradients, self.parameters].map(share);
        let [masters, state, gradients] = [held.masters, held.state, held.gradients].map(|bytes| optimizer * bytes);
        let left = leaving * held.gradients;
        let copies = parameters * held.copies;
        let window = (2.0 * held.copies / shape.blocks as f64).min(copies);
        let kept = shape.memory(storage, zero, recompute);
        let without = shape.memory_without(storage, zero, recompute, leaving);
        let of_gradients = kept.total().0.saturating_sub(without.total().0).min(kept.gradients.0);
        let dropped = match self.activations {
            0 => without,
            count => shape.memory_without(storage, zero, Recompute::Blocks(count.min(shape.blocks)), leaving),
        };
        let activations = without.total().0.saturating_sub(dropped.total().0) as f64;
        // Of the copies, those that are there where memory is the fullest then.
        let there = parameters * (dropped.parameters.0 as f64 - held.masters).clamp(0.0, held.copies);
        let halves = shape.passes(recompute);
        let away = masters + state;
        let returned = gradients / 4.0 * held.width * if self.parameters >= self.optimizer { 0.0 } else { 1.0 };
        // To add a gradient to a sum, the host reads both and writes the sum.
        let added = if shape.microbatches() > 1.0 { 3.0 * left } else { 0.0 };
        let traffic = Traffic {
            forward: Moved { up: copies, down: activations, added: 0.0 },
            backward: Moved { up: copies + activations, down: left, added },
            gradients: gradients - left,
            updated: gradients / 4.0,
            returned,
            disk: if self.is_on_disk { away } else { 0.0 },
        };
        let beside = Beside { forward: halves[0], backward: halves[1], microbatches: shape.microbatches() };
        let shown = Host::of(cluster).shown(&traffic, &beside);
        let bytes = |bytes: f64| Bytes(bytes.max(0.0) as u64);
        Relief {
            memory: Memory {
                parameters: bytes(masters + (there - window).max(0.0)),
                gradients: Bytes(of_gradients),
                optimizer: bytes(state),
                activations: bytes(activations),
                ..Memory::default()
            },
            host: bytes(if self.is_on_disk { 0.0 } else { away } + gradients + copies + activations),
            transfers: shown.transfers,
            update: shown.update - optimizer * base.optimizer.0,
        }
    }

    /// Marks the values that lie away from the device between their uses.
    pub fn mark(&self, plan: &mut Plan) {
        let order = block_order(&plan.graph);
        let graph = &plan.graph;
        let block = |node: &Node| fold::block_of(graph, node).and_then(|block| order.get(block).copied());
        let within = |count: u64, node: &Node| block(node).map_or(count == ALL, |block| block < count);
        let optimizer = if self.is_on_disk { Space::Disk } else { Space::Host };
        let mut away: Vec<(ValueId, Space)> = Vec::new();
        for (_, node) in plan.graph.nodes() {
            let space = match &node.op {
                Op::State(_) if within(self.optimizer, node) => optimizer,
                Op::Parameter(_) if within(self.optimizer, node) && self.is_master(plan, node.results[0]) => optimizer,
                Op::Parameter(_) if within(self.parameters, node) && !self.is_master(plan, node.results[0]) => {
                    Space::Host
                }
                Op::Cast(_) if within(self.parameters, node) && is_parameter(plan, node.operands[0]) => Space::Host,
                Op::Adamw(_) if within(self.gradients, node) => {
                    away.push((node.operands[1], Space::Host));
                    continue;
                }
                _ => continue,
            };
            away.push((node.results[0], space));
        }
        for (_, node) in plan.graph.nodes().filter(|(_, node)| matches!(node.role, Role::Backward(_))) {
            for value in &node.operands {
                let maker = plan.graph.def(*value);
                let is_saved = maker.role == Role::Forward && !maker.op.is_leaf() && !is_copy(plan, *value);
                if is_saved && block(maker).is_some_and(|block| block < self.activations) {
                    away.push((*value, Space::Host));
                }
            }
        }
        for (value, space) in away {
            plan.spaces[value] = space;
        }
    }

    /// Whether only casts and the update read a parameter.
    fn is_master(&self, plan: &Plan, value: ValueId) -> bool {
        let mut readers = plan.graph.nodes().filter(|(_, node)| node.operands.contains(&value));
        readers.all(|(_, node)| matches!(node.op, Op::Cast(_) | Op::Adamw(_)))
    }
}

fn is_parameter(plan: &Plan, value: ValueId) -> bool {
    matches!(plan.graph.def(value).op, Op::Parameter(_))
}

fn is_copy(plan: &Plan, value: ValueId) -> bool {
    let maker = plan.graph.def(value);
    matches!(maker.op, Op::Cast(_)) && is_parameter(plan, maker.operands[0])
}

impl Relief {
    /// The prediction of the same plan with what this takes away and adds.
    pub fn apply(&self, on_device: &Prediction, cluster: &Cluster) -> Prediction {
        let (mut memory, mut freed, mut excess) = (on_device.memory, self.memory, 0);
        for category in Category::ALL {
            let (held, freed) = (memory.category(category), freed.category(category));
            let taken = freed.0.min(held.0);
            *held = Bytes(held.0 - taken);
            excess += freed.0 - taken;
        }
        // Where memory is the fullest with all on the device, other values are than where it is now.
        for category in [Category::Gradient, Category::Activation, Category::Parameter, Category::Optimizer] {
            let held = memory.category(category);
            let taken = excess.min(held.0);
            (*held, excess) = (Bytes(held.0 - taken), excess - taken);
        }
        let step = on_device.step.0 + self.transfers + self.update;
        Prediction {
            step: Seconds(step),
            exposed_communication: Seconds(on_device.exposed_communication.0 + self.transfers),
            communication: Seconds(on_device.communication.0 + self.transfers),
            optimizer: Seconds((on_device.optimizer.0 + self.update).max(0.0)),
            mfu: on_device.mfu * on_device.step.0 / step,
            memory,
            host: Bytes(on_device.host.0 + self.host.0 * cluster.per_node.min(cluster.ranks())),
            ..*on_device
        }
    }
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
