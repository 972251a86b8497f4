//! A plan: the graph of a whole training step, annotated with how it is spread.
//!
//! Every node has a [`Strategy`] over the axes of one [`Mesh`]; the layout of each operand and
//! result follows from it by the node's factor rule, and the strategy of a leaf is the layout in
//! which it is stored. Where a value is made in one layout and read in another, lowering inserts
//! the cheapest conversion. So a plan needs to say little, and none of its parts can contradict
//! another:
//!
//! * data parallel: factor `b` over `dp`; gradient accumulation: factor `b` over the time axis `mb`;
//! * ZeRO-1: optimizer state and parameters stored over `dp`; ZeRO-2: gradients reduced to their
//!   shard in every microbatch ([`Plan::reduce_in_loop`]); ZeRO-3: gathered parameters are dropped
//!   after each use ([`Plan::transient`]);
//! * tensor parallel: factors of matmuls over `tp`; and so on;
//! * pipelines: no factor, but a chunk per node ([`Plan::pipeline`]).
//!
//! What a device has no room for lies in its host's memory or on its disk ([`Plan::spaces`]).
//!
//! Recomputation is in the graph: a recomputed node is a second node with role
//! [`Role::Recompute`].

use crate::entity::{NodeId, SecondaryMap, ValueId};
use crate::factor::FactorRule;
use crate::graph::{Graph, Role};
use crate::mesh::{Family, Mesh};
use crate::pipeline::Pipeline;
use crate::sharding::{Sharding, Strategy};
use crate::types::{DType, TensorType};
use crate::units::{Bytes, Flops, Seconds};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Where a value lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The memory of the rank's device.
    #[default]
    Device,
    /// Page-locked memory of the rank's host.
    Host,
    /// The host's disk.
    Disk,
}

impl Space {
    /// The name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
        }
    }

    /// The space of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Device, Self::Host, Self::Disk].into_iter().find(|space| space.name() == name)
    }
}

/// What a byte of a rank's memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Parameters: stored, and copies in other layouts or precisions that live through the step.
    Parameter,
    /// Accumulated gradients.
    Gradient,
    /// Optimizer state.
    Optimizer,
    /// Values of the forward and backward pass, inputs included.
    Activation,
    /// Copies made for collectives and transfers, and libraries' workspaces.
    Buffer,
}

impl Category {
    /// Every category, in the order of reports.
    pub const ALL: [Category; 5] = [Self::Parameter, Self::Gradient, Self::Optimizer, Self::Activation, Self::Buffer];

    /// The name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameter",
            Self::Gradient => "gradient",
            Self::Optimizer => "optimizer",
            Self::Activation => "activation",
            Self::Buffer => "buffer",
        }
    }

    /// The category of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|category| category.name() == name)
    }
}

/// Bytes per rank at the peak, by category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// See [`Category::Parameter`].
    pub parameters: Bytes,
    /// See [`Category::Gradient`].
    pub gradients: Bytes,
    /// See [`Category::Optimizer`].
    pub optimizer: Bytes,
    /// See [`Category::Activation`].
    pub activations: Bytes,
    /// See [`Category::Buffer`].
    pub buffers: Bytes,
    /// What the arena has beyond the bytes that live at the peak: what is kept until a collective on
    /// another stream is known to be done, and gaps that nothing fits in.
    pub reserved: Bytes,
}

impl Memory {
    /// The bytes that live at the peak.
    pub fn live(&self) -> Bytes {
        self.parameters + self.gradients + self.optimizer + self.activations + self.buffers
    }

    /// The bytes that are allocated.
    pub fn total(&self) -> Bytes {
        self.live() + self.reserved
    }

    /// The bytes of a category.
    pub fn category(&mut self, category: Category) -> &mut Bytes {
        match category {
            Category::Parameter => &mut self.parameters,
            Category::Gradient => &mut self.gradients,
            Category::Optimizer => &mut self.optimizer,
            Category::Activation => &mut self.activations,
            Category::Buffer => &mut self.buffers,
        }
    }
}

/// What a plan is predicted to need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// One optimizer step.
    pub step: Seconds,
    /// Of it, matrix products and attention.
    pub matmul: Seconds,
    /// Of it, everything bound by memory bandwidth or launches.
    pub memory_bound: Seconds,
    /// Of it, communication that no computation hides, and what kernels lose to communication beside them.
    pub exposed_communication: Seconds,
    /// Communication in all, hidden or not.
    pub communication: Seconds,
    /// Of the step, the optimizer's update.
    pub optimizer: Seconds,
    /// Of it, waits for other stages of a pipeline.
    pub bubble: Seconds,
    /// Model FLOPs of the step over all ranks: recomputation not counted, causal attention at half.
    pub flops: Flops,
    /// The share of the devices' peak rate that the model FLOPs reach.
    pub mfu: f64,
    /// Memory per rank at the peak: where ranks differ, of the one that has the least room left.
    pub memory: Memory,
    /// What that rank may take: what was asked for, or less if its device has less.
    pub room: Bytes,
    /// Of one host's memory, what its ranks take: what lies in it, and the copies in flight.
    pub host: Bytes,
}

impl Prediction {
    /// Whether every rank has the memory that it needs.
    pub fn fits(&self) -> bool {
        self.memory.total() <= self.room
    }

    /// The share of its room that the rank takes which has the least left.
    pub fn filled(&self) -> f64 {
        self.memory.total().0 as f64 / self.room.0.max(1) as f64
    }

    /// What of the step its parts do not name: gaps between kernels, and waits for the slowest of many ranks.
    pub fn rest(&self) -> Seconds {
        let parts = [self.matmul, self.memory_bound, self.exposed_communication, self.optimizer, self.bubble];
        let rest = self.step.0 - parts.iter().map(|part| part.0).sum::<f64>();
        // What is left of rounding is nothing.
        Seconds(if rest > 1e-9 * self.step.0 { rest } else { 0.0 })
    }
}

/// A plan that was considered and not chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// Its choices, as pins would say them: `dp=2,tp=2,zero=1,microbatch=1,recompute=none`.
    pub choice: String,
    /// Its predicted step time.
    pub step: Seconds,
    /// Its predicted memory per rank.
    pub memory: Bytes,
    /// Why it lost.
    pub reason: String,
}

/// Which plans a search considers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Those that the target's runtime executes, and those that a pin asks for.
    #[default]
    Runnable,
    /// Every plan that can be said.
    All,
}

/// How the plan was found, and how much better another could be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Search {
    /// The plan's step as the search estimates it, before it is lowered and simulated.
    pub estimate: Seconds,
    /// The plan's memory per rank as the search estimates it.
    pub memory: Bytes,
    /// No plan of the searched space that fits is estimated to take less; where plans of one stage and pipelines were
    /// searched, no plan of the plan's own kind.
    pub bound: Seconds,
    /// By how much the estimate exceeds the bound, as a share of the bound.
    pub gap: f64,
    /// No plan of the other kind that fits is estimated to take less, where plans of one stage and pipelines were searched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_of_others: Option<Seconds>,
    /// Why the search ended.
    pub stopped: String,
    /// Meshes (degrees and microbatches) of the searched space.
    pub meshes: u64,
    /// Of them, those that were left out because none of their plans can be faster, or fit.
    pub pruned: u64,
    /// Plans whose time and memory were predicted.
    pub candidates: u64,
    /// Plans, those in chunks included, that were lowered to know what their programs take.
    pub lowered: u64,
}

/// What was asked for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The model, as the user named it.
    pub model: String,
    /// The cluster, as the user named it.
    pub cluster: String,
    /// Sequences per step over all ranks.
    pub batch: u64,
    /// Tokens per sequence (0 where the model has none).
    pub seq: u64,
    /// The precision of the computation: `fp32`, `bf16`, `fp16`, `fp8`.
    pub precision: String,
    /// The element type in which gradients of matrices are summed over ranks; their own (f32) if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduce_dtype: Option<DType>,
    /// The memory bound per rank; devices that have less, where a cluster has several kinds, are bound by what they have.
    pub device_memory: Bytes,
    /// The memory bound of one host, for all of its ranks.
    pub host_memory: Bytes,
    /// What the user fixed.
    pub pins: String,
    /// Which plans were considered.
    pub scope: Scope,
}

/// The element type in which gradients of this type are summed over ranks where [`Request::reduce_dtype`] names one, if
/// it is not their own. Vectors are too few to matter, and stay as they are.
pub fn sums_in(reduce_dtype: Option<DType>, ty: &TensorType) -> Option<DType> {
    let narrows = |dtype: &DType| ty.dtype.is_float() && ty.rank() >= 2 && dtype.size() < ty.dtype.size();
    reduce_dtype.filter(narrows)
}

/// An annotated graph; see the [module](self).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The training step: forward, backward, recomputation and optimizer, with global sizes.
    pub graph: Graph,
    /// The axes.
    pub mesh: Mesh,
    /// Per node, what it does with each axis; a leaf's is its layout in storage.
    pub strategies: SecondaryMap<NodeId, Strategy>,
    /// Values of which copies in another layout are made at each use and dropped after it, instead
    /// of being kept through the step.
    pub transient: SecondaryMap<ValueId, bool>,
    /// Where a value lies while nothing reads it: a leaf between its uses, an activation between its last
    /// reader in the forward pass and its first in the backward pass. Not named: on the device.
    pub spaces: SecondaryMap<ValueId, Space>,
    /// Whether gradients are reduced over the ranks in every microbatch, before they are
    /// accumulated, instead of once after all of them.
    pub reduce_in_loop: bool,
    /// Who runs which part of the graph when; of a mesh without stages, the default.
    pub pipeline: Pipeline,
    /// What was asked for.
    pub request: Request,
    /// The devices and links that it was made for, with every figure, as the planner writes them; null where nobody has said.
    pub cluster: Value,
    /// The choices, as pins would say them.
    pub choice: String,
    /// What it will need.
    pub prediction: Prediction,
    /// What it was preferred to, best first.
    pub alternatives: Vec<Alternative>,
    /// How it was found.
    pub search: Search,
}

impl Plan {
    /// The layout in which a value is made, or stored if it is a leaf.
    pub fn sharding(&self, value: ValueId) -> Sharding {
        let value = self.graph.value(value);
        self.rule(value.def).result_sharding(value.index, &self.strategies[value.def])
    }

    /// The layout in which operand `index` of a node is read.
    pub fn operand_sharding(&self, node: NodeId, index: usize) -> Sharding {
        self.rule(node).operand_sharding(index, &self.strategies[node])
    }

    /// The element type in which a value that `users` read is summed over ranks, if it is not its own: a gradient's,
    /// which only the update reads ([`sums_in`]).
    pub fn sums_in(&self, value: ValueId, users: &[(NodeId, usize)]) -> Option<DType> {
        let is_update = |user: &(NodeId, usize)| self.graph.node(user.0).role == Role::Optimizer;
        let is_gradient = !users.is_empty() && users.iter().all(is_update);
        sums_in(self.request.reduce_dtype, self.graph.ty(value)).filter(|_| is_gradient)
    }

    /// The number of pipeline stages; 1 where there is no pipeline.
    pub fn stages(&self) -> u64 {
        self.mesh.degree(Family::Pipeline)
    }

    /// A node's rule.
    pub fn rule(&self, node: NodeId) -> &FactorRule {
        self.graph.rule(node)
    }
}
