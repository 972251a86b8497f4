//! What one class of nodes adds to a step: the unary costs of the cost graph.
//!
//! The search minimises a step in which half of what the data ranks say to each other is hidden. A
//! *bound* is the least that any plan of the mesh can be predicted to take: what ZeRO divides is divided,
//! and of the data ranks' communication only what it slows kernels down by is counted. In both, a byte of
//! memory may have a price in seconds, so that leaner layouts are found, and bounds of plans that fit
//! (Lagrangian relaxation: a plan of `t` seconds and `m` bytes, of which `M` are free, costs
//! `t + price (m - M)`, which is at most `t` where it fits).

use super::family::copy_axes;
use super::local::Local;
use super::tensor::{Placed, Prepared};
use crate::cost::Machine;
use crate::cost::collective::{self, Collective, Group};
use shardc_ir::ops::Op;
use shardc_ir::{AxisId, Choice, Strategy};

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
        /// What is left of the rest of the mesh: see [`Beside`].
        beside: Beside,
    },
}

/// Axes that are not placed, for a bound along one axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beside {
    /// Into how many parts they divide a value at the most.
    pub parts: f64,
    /// The share of what nodes cost that is counted here: the rest is counted along the other axes.
    pub share: f64,
}

impl Beside {
    /// No such axes.
    pub const NONE: Self = Self { parts: 1.0, share: 1.0 };
}

impl Objective {
    /// Seconds per byte.
    pub fn byte(self) -> f64 {
        let (Self::Step { byte } | Self::Bound { byte, .. }) = self;
        byte
    }

    /// The same with bytes at another price.
    pub fn with_byte(mut self, price: f64) -> Self {
        let (Self::Step { byte } | Self::Bound { byte, .. }) = &mut self;
        *byte = price;
        self
    }

    /// The axes that are not placed.
    pub fn beside(self) -> Beside {
        if let Self::Bound { beside, .. } = self { beside } else { Beside::NONE }
    }
}

/// What a class costs, for every price of a byte.
#[derive(Clone, Debug, Default)]
pub struct Quote {
    /// Seconds.
    seconds: f64,
    /// Bytes that are kept.
    bytes: f64,
    /// Per kind of value that can be computed again: how many there are, the bytes of one, and the seconds in
    /// which that is done.
    again: Vec<[f64; 3]>,
}

impl Quote {
    /// The cost if a byte costs so many seconds.
    pub fn at(&self, byte: f64) -> f64 {
        let again = self.again.iter().map(|[count, bytes, seconds]| count * (byte * bytes).min(*seconds));
        self.seconds + byte * self.bytes + again.sum::<f64>()
    }

    fn scaled(mut self, by: f64) -> Self {
        self.seconds *= by;
        self.bytes *= by;
        self.again.iter_mut().for_each(|[count, ..]| *count *= by);
        self
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

    /// What all nodes of a class cost under a strategy, at the objective's price of a byte.
    pub fn class(&self, class: usize, strategy: &Strategy) -> f64 {
        self.quote(class, strategy).at(self.objective.byte())
    }

    /// What all nodes of a class cost under a strategy.
    pub fn quote(&self, class: usize, strategy: &Strategy) -> Quote {
        let (prepared, cluster) = (self.prepared, self.placed.cluster);
        let local = self.placed.local(prepared, class, strategy);
        let op = prepared.op(class);
        let count = prepared.folded.classes[class].members.len() as f64;
        // What is merged into a product is merged only where nothing is converted between the two, which
        // one node does not know.
        let seconds = match self.objective {
            Objective::Step { .. } => local.seconds.0,
            Objective::Bound { .. } => {
                let launch = Machine::own(&cluster.device).launch();
                prepared.emitted[class].seconds(local.seconds, local.bound, launch, false)
            }
        };
        let runs = if prepared.in_loop(class) { self.placed.microbatches as f64 } else { 1.0 };
        let seconds = seconds * runs;
        let cost = match (self.objective, op) {
            (Objective::Step { .. }, Op::Adamw(_)) => {
                let parameter = local.operands.first();
                seconds + parameter.map_or(0.0, |bytes| self.reduction(Collective::AllReduce, *bytes, strategy, 0.5))
            }
            (Objective::Step { .. }, _) => seconds,
            (Objective::Bound { .. }, Op::Adamw(_)) => {
                let loss = cluster.device.overlap_loss.value;
                // Over several nodes, replicas of parts may reduce inside and across, each over less.
                let is_plain = cluster.nodes == 1 && self.placed.mesh.degree("ep") == 1;
                let shown = match local.operands.get(1).filter(|_| is_plain) {
                    Some(gradient) => self.reduction(Collective::ReduceScatter, *gradient, strategy, loss),
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
        let mut quote = self.memory(class, &local, seconds);
        quote.seconds = cost * count;
        match self.objective {
            Objective::Step { .. } => quote,
            Objective::Bound { beside, .. } => quote.scaled(beside.share / beside.parts),
        }
    }

    /// What a value of this size costs on the axes that hold copies of its parameter, where its gradient is
    /// reduced: the share of it that shows.
    fn reduction(&self, kind: Collective, bytes: u64, strategy: &Strategy, share: f64) -> f64 {
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
        share * (time(bytes as f64) - latency).max(0.0)
    }

    /// The bytes that a class's values take at the turn from forward to backward, ZeRO dividing what is
    /// stored. What can be computed again costs no more than that.
    fn memory(&self, class: usize, local: &Local, again: f64) -> Quote {
        let prepared = self.prepared;
        let count = prepared.folded.classes[class].members.len() as f64;
        let stored = |bytes: Option<&u64>| {
            let bytes = bytes.map_or(0.0, |bytes| *bytes as f64) * count / self.data.size() as f64;
            Quote { bytes, ..Quote::default() }
        };
        match prepared.op(class) {
            Op::Parameter(_) | Op::State(_) => stored(local.results.first()),
            Op::Cast(_) if prepared.is_parameter[class] => stored(local.results.first()),
            Op::Adamw(_) if self.placed.microbatches > 1 => stored(local.operands.get(1)),
            _ => {
                let mut quote = Quote::default();
                for ([stay, go], bytes) in prepared.lives.at_turn(class).iter().zip(&local.results) {
                    quote.bytes += stay * *bytes as f64;
                    if *go > 0.0 {
                        quote.again.push([*go, *bytes as f64, again]);
                    }
                }
                quote
            }
        }
    }
}
