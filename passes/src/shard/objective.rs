//! What one class of nodes adds to a step: the unary costs of the cost graph.
//!
//! The search minimises a step in which half of what the data ranks say to each other is hidden. A
//! *bound* is the least that any plan of the mesh can be predicted to take: what ZeRO divides is divided,
//! and of the data ranks' communication only what it slows kernels down by is counted. In both, a byte of
//! memory may have a price in seconds, so that leaner layouts are found, and bounds of plans that fit
//! (Lagrangian relaxation: a plan of `t` seconds and `m` bytes, of which `M` are free, costs
//! `t + price (m - M)`, which is at most `t` where it fits).

use super::family::copy_axes;
use super::price::Ground;
use super::tensor::{Placed, Prepared};
use crate::cost::Machine;
use crate::cost::collective::{self, Collective, Group};
use shardc_ir::ops::Op;
use shardc_ir::{AxisId, Choice, Strategy, TensorType};

/// What is to be the least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// The seconds of a step, and each byte of a rank's memory at so many.
    Step {
        /// Seconds per byte.
        byte: f64,
    },
    /// A bound below the seconds of every step, and of the bytes that every plan keeps.
    Bound {
        /// Seconds per byte.
        byte: f64,
    },
}

impl Objective {
    fn byte(self) -> f64 {
        let (Self::Step { byte } | Self::Bound { byte }) = self;
        byte
    }
}

/// Prices nodes on a mesh.
pub struct Pricer<'a, 'b> {
    prepared: &'a Prepared<'b>,
    placed: &'a Placed<'a>,
    objective: Objective,
    copies: Vec<AxisId>,
    /// The ranks over which the gradients of parameters that nothing divides are summed.
    data: Group,
}

impl<'a, 'b> Pricer<'a, 'b> {
    /// Prices nodes on the mesh of what is placed.
    pub fn new(prepared: &'a Prepared<'b>, placed: &'a Placed<'a>, objective: Objective) -> Self {
        let copies = copy_axes(placed.mesh);
        let data = Group::new(placed.mesh, &copies, placed.cluster);
        Self { prepared, placed, objective, copies, data }
    }

    /// What all nodes of a class cost under a strategy.
    pub fn class(&self, class: usize, strategy: &Strategy) -> f64 {
        let prepared = self.prepared;
        let on = Ground { mesh: self.placed.mesh, cluster: self.placed.cluster };
        let (operands, results) = prepared.local_types(class, strategy, on.mesh);
        let op = prepared.op(class);
        let count = prepared.folded.classes[class].members.len() as f64;
        let (alone, bound) = prepared.seconds(class, strategy, on);
        // What is merged into a product is merged only where nothing is converted between the two, which
        // one node does not know.
        let seconds = match self.objective {
            Objective::Step { .. } => alone.0,
            Objective::Bound { .. } => {
                let launch = Machine::own(&on.cluster.device).launch();
                prepared.emitted[class].seconds(alone, bound, launch, false)
            }
        };
        let runs = if prepared.in_loop(class) { self.placed.microbatches as f64 } else { 1.0 };
        let seconds = seconds * runs;
        let parameter = operands.first();
        let cost = match (self.objective, op) {
            (Objective::Step { .. }, Op::Adamw(_)) => {
                seconds + parameter.map_or(0.0, |of| self.reduction(Collective::AllReduce, of, strategy, 0.5))
            }
            (Objective::Step { .. }, _) => seconds,
            (Objective::Bound { .. }, Op::Adamw(_)) => {
                let loss = on.cluster.device.overlap_loss.value;
                // Over several nodes, replicas of parts may reduce inside and across, each over less.
                let is_plain = on.cluster.nodes == 1 && on.mesh.degree("ep") == 1;
                let shown = match operands.get(1).filter(|_| is_plain) {
                    Some(gradient) => self.reduction(Collective::ReduceScatter, gradient, strategy, loss),
                    None => 0.0,
                };
                seconds / self.data.size() as f64 + shown
            }
            (Objective::Bound { .. }, Op::Cast(_)) if prepared.is_parameter[class] => seconds / self.data.size() as f64,
            (Objective::Bound { .. }, Op::SumSquares(_)) if !prepared.in_loop(class) => {
                seconds / self.data.size() as f64
            }
            (Objective::Bound { .. }, _) => seconds,
        };
        let byte = self.objective.byte();
        let kept = if byte > 0.0 { self.memory(class, &operands, &results, seconds) } else { 0.0 };
        cost * count + kept
    }

    /// The least that a class can cost whatever it does with axes that are not placed.
    pub fn least(&self, class: usize, strategy: &Strategy, rest: &[AxisId]) -> f64 {
        let Some((axis, rest)) = rest.split_first() else { return self.class(class, strategy) };
        let (rule, mesh) = (&self.prepared.rules[class], self.placed.mesh);
        let choices = rule.choices(strategy, *axis, mesh).into_iter().chain(rule.rings(strategy, *axis, mesh));
        let costs = choices.map(|choice| self.least(class, &strategy.with(*axis, choice), rest));
        costs.fold(f64::INFINITY, f64::min)
    }

    /// What a value of this size costs on the axes that hold copies of its parameter, where its gradient is
    /// reduced: the share of it that shows.
    fn reduction(&self, kind: Collective, value: &TensorType, strategy: &Strategy, share: f64) -> f64 {
        let (mesh, cluster) = (self.placed.mesh, self.placed.cluster);
        let holds = |axis: &AxisId| strategy.choice(*axis) == Choice::Replicate;
        let group = match self.copies.iter().all(holds) {
            true => self.data,
            false => Group::new(mesh, &self.copies.iter().copied().filter(holds).collect::<Vec<_>>(), cluster),
        };
        // Many gradients are reduced together, so no latency belongs to one of them.
        let time = |bytes: f64| collective::seconds(kind, bytes, group, cluster).0;
        let latency = match self.objective {
            Objective::Step { .. } => cluster.device.collective_launch.value,
            Objective::Bound { .. } => time(0.0),
        };
        share * (time(value.bytes().0 as f64) - latency).max(0.0)
    }

    /// The price of the bytes that a class's values take at the turn from forward to backward, ZeRO
    /// dividing what is stored. What can be computed again costs no more than that.
    fn memory(&self, class: usize, operands: &[TensorType], results: &[TensorType], again: f64) -> f64 {
        let (prepared, byte) = (self.prepared, self.objective.byte());
        let count = prepared.folded.classes[class].members.len() as f64;
        let price = |ty: Option<&TensorType>| ty.map_or(0.0, |ty| byte * ty.bytes().0 as f64);
        match prepared.op(class) {
            Op::Parameter(_) | Op::State(_) => count * price(results.first()) / self.data.size() as f64,
            Op::Cast(_) if prepared.is_parameter[class] => count * price(results.first()) / self.data.size() as f64,
            Op::Adamw(_) if self.placed.microbatches > 1 => count * price(operands.get(1)) / self.data.size() as f64,
            _ => {
                let alive = prepared.lives.at_turn(class).iter().zip(results);
                alive.map(|(alive, ty)| alive[0] * price(Some(ty)) + alive[1] * price(Some(ty)).min(again)).sum()
            }
        }
    }
}
