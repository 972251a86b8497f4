//! The order of a graph in chunks: while what one chunk hands on is on the wire, the kernels of another run.
//!
//! Nodes lie in *stretches*: between two collectives of its chunk each node is in one. The stretches are run in
//! their order, each chunk by chunk, then what reads all chunks of it; and a short one (a residual's sum and the norm
//! behind it) as soon as it can, since a collective waits for it. The order is made by running the step on two
//! clocks, that of kernels and that of the wire, with the seconds of the cost model: of the nodes that are
//! ready the first in this order runs, and where none is, the one that will be ready first. Values are handed on as
//! soon as nothing else is on the wire, that first which is read first. In a pipeline each pass of a chunk is in an order
//! of its own: when it begins, all is there that it reads of others.
//!
//! Invariants: a node stands behind what it reads; the order is a function of the graph and of what its nodes take;
//! no chunk is more than [`REACH`] stretches ahead of another, so that memory stays bounded; and what stands before the
//! last node of the forward pass, as the backward pass of a head in chunks does, stays before it.

use super::SplitBatch;
use crate::cluster::Cluster;
use crate::cost::collective::{self, Collective, Group};
use crate::cost::{Machine, Pass};
use crate::error::PassError;
use crate::fold::block;
use crate::reshard::{Step, path, rough_cost};
use shardc_ir::ops::OpError;
use shardc_ir::pipeline::last_forward;
use shardc_ir::{EntityRef, Graph, Mesh, NodeId, PrimaryMap, Role, SecondaryMap, Sharding, Strategy, TensorType};
use std::collections::{BTreeSet, HashMap};

/// How many stretches a node may run before those that are due.
const REACH: u32 = 2;

/// Puts the nodes of a graph in chunks in an order in which communication runs beside kernels.
///
/// # Errors
/// None but a bug: a node that cannot be added.
pub fn order(cut: &SplitBatch, mesh: &Mesh, cluster: &Cluster) -> Result<Ordered, PassError> {
    let mut nodes = Ordering::new(cut, mesh, cluster).run();
    let behind = last_forward(&cut.graph);
    nodes.sort_by_key(|id| *id > behind);
    rebuild(cut, &nodes).map_err(PassError::ill_formed("order"))
}

/// A graph in chunks and in order.
#[derive(Clone, Debug, Default)]
pub struct Ordered {
    /// The graph.
    pub graph: Graph,
    /// What each node does with the axes.
    pub strategies: SecondaryMap<NodeId, Strategy>,
    /// The pipeline's chunk of each node, if the plan has stages.
    pub staged: SecondaryMap<NodeId, Option<u32>>,
}

/// The place of a node in the order of the stretches: the stretch, the chunk (those of all chunks last), the node.
type Key = (u32, u64, NodeId);

struct Ordering<'a> {
    cut: &'a SplitBatch,
    /// Per node, its seconds: of kernels, or on the wire if it hands a value on.
    seconds: PrimaryMap<NodeId, f64>,
    keys: PrimaryMap<NodeId, Key>,
    /// Whether no chunk is made before it, so that it stands where it is read.
    is_free: PrimaryMap<NodeId, bool>,
    /// Of a node that hands a value on, the first stretch in which a kernel reads that.
    awaited: PrimaryMap<NodeId, u32>,
    /// Which pass of a pipeline's chunk each node is of, in their order.
    passes: PrimaryMap<NodeId, u32>,
    /// Per stretch, whether it takes less than the collectives behind it.
    is_short: Vec<bool>,
    /// Per node, who reads it, and how many that it reads have no place yet.
    readers: PrimaryMap<NodeId, Vec<NodeId>>,
    missing: PrimaryMap<NodeId, usize>,
    is_placed: PrimaryMap<NodeId, bool>,
    ends: PrimaryMap<NodeId, f64>,
    ready: BTreeSet<Key>,
    /// Those that have no place yet.
    open: BTreeSet<Key>,
    nodes: Vec<NodeId>,
    pass: u32,
    kernels: f64,
    wire: f64,
}

impl<'a> Ordering<'a> {
    fn new(cut: &'a SplitBatch, mesh: &Mesh, cluster: &Cluster) -> Self {
        let graph = &cut.graph;
        let ids = || graph.nodes().map(|(id, _)| id);
        let costs = Costs { cut, mesh, cluster };
        let seconds: PrimaryMap<NodeId, f64> = ids().map(|id| costs.seconds(id)).collect();
        let mut is_free: PrimaryMap<NodeId, bool> = PrimaryMap::new();
        let mut keys: PrimaryMap<NodeId, Key> = PrimaryMap::new();
        let mut readers: PrimaryMap<NodeId, Vec<NodeId>> = ids().map(|_| Vec::new()).collect();
        let mut missing: PrimaryMap<NodeId, usize> = PrimaryMap::new();
        let mut last = 0;
        // Per pass of a pipeline's chunk, its place and its first stretch: no other runs beside it.
        let mut begun: HashMap<Option<(u32, bool)>, (u32, u32)> = HashMap::new();
        let (mut passes, mut most) = (PrimaryMap::new(), 0);
        // The block that is computed again, and the stretch from which on it is.
        let mut again: (Option<&str>, u32) = (None, 0);
        for (id, node) in graph.nodes() {
            let place = cut.places[id];
            let own_block = block(&node.path).filter(|_| matches!(node.role, Role::Recompute(_)));
            if own_block.is_some() && own_block != again.0 {
                // Where nothing is handed on no stretch would end, and all blocks be computed again at once.
                last = last.max(again.1 + 1);
                again = (own_block, last);
            }
            let sources = sources(graph, id);
            let behind = sources.iter().map(|of| keys[*of].0).max().unwrap_or(0);
            let is_bound = place.chunk.is_some() || sources.iter().any(|of| !is_free[*of]);
            let is_bound = is_bound && node.role != Role::Optimizer;
            is_free.push(!is_bound);
            let (mut pass, mut first) = (0, 0);
            if is_bound {
                let own = place.staged.map(|staged| (staged, node.role == Role::Forward));
                let next = begun.len() as u32;
                (pass, first) = *begun.entry(own).or_insert((next, if next > 0 { most + REACH + 1 } else { 0 }));
            }
            passes.push(pass);
            // What is computed again waits for the gradients that ask for it.
            let stretch = if matches!(node.role, Role::Recompute(_)) { behind.max(last) } else { behind };
            let stretch = stretch.max(first) + u32::from(place.hands_on);
            most = most.max(stretch);
            keys.push((stretch, place.chunk.unwrap_or(u64::MAX), id));
            last = if place.chunk.is_some() { last.max(stretch) } else { last };
            let bound: Vec<NodeId> = sources.into_iter().filter(|of| !is_free[*of]).collect();
            missing.push(bound.len());
            bound.into_iter().for_each(|of| readers[of].push(id));
        }
        let mut own = Self {
            cut,
            is_short: short_stretches(cut, &keys, &seconds),
            awaited: awaited(cut, &keys, &readers, &seconds),
            is_placed: ids().map(|_| false).collect(),
            ends: ids().map(|_| 0.0).collect(),
            ready: BTreeSet::new(),
            open: BTreeSet::new(),
            nodes: Vec::with_capacity(graph.node_count()),
            pass: 0,
            kernels: 0.0,
            wire: 0.0,
            passes,
            seconds,
            keys,
            is_free,
            readers,
            missing,
        };
        for id in ids().filter(|id| !own.is_free[*id]) {
            own.open.insert(own.keys[id]);
            if own.missing[id] == 0 {
                own.ready.insert(own.keys[id]);
            }
        }
        own
    }

    fn run(mut self) -> Vec<NodeId> {
        while let Some(next) = self.next() {
            self.place(next);
        }
        for (id, _) in self.cut.graph.nodes() {
            self.place_free(id);
        }
        self.nodes
    }

    /// The node that is next.
    fn next(&self) -> Option<NodeId> {
        let all = || self.ready.iter().take_while(|key| self.is_due(key.2));
        let hands_on = |key: &&Key| self.cut.places[key.2].hands_on;
        // Of what may be handed on, that goes first which is read first, as soon as nothing else is on the wire.
        let handed = all().filter(hands_on).min_by_key(|key| (self.awaited[key.2], **key));
        if let Some(key) = handed.filter(|key| self.wire.max(self.start(key.2)) <= self.kernels) {
            return Some(key.2);
        }
        let within = || all().filter(|key| !hands_on(key));
        let is_ready = |key: &&Key| self.start(key.2) <= self.kernels;
        let short = within().filter(|key| self.is_short[key.0 as usize]).find(is_ready);
        let first = short.or_else(|| within().find(is_ready));
        let soonest = || within().min_by(|a, b| self.start(a.2).total_cmp(&self.start(b.2)));
        first.or(handed).or_else(soonest).map(|key| key.2)
    }

    /// When all that a node reads is there.
    fn start(&self, id: NodeId) -> f64 {
        sources(&self.cut.graph, id).into_iter().map(|of| self.ends[of]).fold(0.0, f64::max)
    }

    fn place(&mut self, id: NodeId) {
        for of in sources(&self.cut.graph, id) {
            self.place_free(of);
        }
        if self.passes[id] > self.pass {
            // What one pass leaves is there when the next begins.
            self.pass = self.passes[id];
            self.kernels = self.kernels.max(self.wire);
        }
        let (start, seconds) = (self.start(id), self.seconds[id]);
        let clock = if self.cut.places[id].hands_on { &mut self.wire } else { &mut self.kernels };
        *clock = clock.max(start) + seconds;
        self.ends[id] = *clock;
        self.is_placed[id] = true;
        self.nodes.push(id);
        self.ready.remove(&self.keys[id]);
        self.open.remove(&self.keys[id]);
        for reader in self.readers[id].clone() {
            self.missing[reader] -= 1;
            if self.missing[reader] == 0 && !self.is_free[reader] {
                self.ready.insert(self.keys[reader]);
            }
        }
    }

    /// Whether a node is not too far ahead of those that are due.
    fn is_due(&self, id: NodeId) -> bool {
        self.open.first().is_some_and(|due| self.keys[id].0 <= due.0 + REACH)
    }

    /// Places a node that no chunk is made before, and all that it reads.
    fn place_free(&mut self, id: NodeId) {
        let mut open = vec![id];
        while let Some(&next) = open.last() {
            let before = sources(&self.cut.graph, next).into_iter().filter(|of| !self.is_placed[*of]);
            let before: Vec<NodeId> = before.collect();
            if self.is_placed[next] || before.is_empty() {
                open.pop();
                if !std::mem::replace(&mut self.is_placed[next], true) {
                    self.nodes.push(next);
                    self.kernels += self.seconds[next];
                    self.ends[next] = self.kernels;
                }
            } else {
                open.extend(before.into_iter().rev());
            }
        }
    }
}

/// The nodes that must stand before a node: those that make what it reads, and the one that its role says it came
/// from.
fn sources(graph: &Graph, id: NodeId) -> Vec<NodeId> {
    let node = graph.node(id);
    let makers = node.operands.iter().map(|value| graph.value(*value).def);
    let mut sources: Vec<NodeId> = makers.chain(node.role.source()).collect();
    sources.sort_unstable_by_key(|id| id.index());
    sources.dedup();
    sources
}

/// The stretches whose kernels take less than the longest collective behind them.
fn short_stretches(cut: &SplitBatch, keys: &PrimaryMap<NodeId, Key>, seconds: &PrimaryMap<NodeId, f64>) -> Vec<bool> {
    let count = keys.values().map(|key| key.0 as usize + 1).max().unwrap_or(0);
    let (mut kernels, mut wire) = (vec![0.0; count], vec![0.0f64; count + 1]);
    for (id, place) in cut.places.iter().filter(|(_, place)| place.chunk == Some(0)) {
        let stretch = keys[id].0 as usize;
        if place.hands_on {
            wire[stretch] = wire[stretch].max(seconds[id]);
        } else {
            kernels[stretch] += seconds[id];
        }
    }
    kernels.iter().zip(&wire[1..]).map(|(kernels, wire)| kernels < wire).collect()
}

/// Per node, the first stretch in which a kernel reads what it makes, or is handed it on.
fn awaited(
    cut: &SplitBatch,
    keys: &PrimaryMap<NodeId, Key>,
    readers: &PrimaryMap<NodeId, Vec<NodeId>>,
    seconds: &PrimaryMap<NodeId, f64>,
) -> PrimaryMap<NodeId, u32> {
    let mut awaited: PrimaryMap<NodeId, u32> = keys.keys().map(|_| u32::MAX).collect();
    let all: Vec<NodeId> = keys.keys().collect();
    for id in all.into_iter().rev() {
        let read = |reader: &NodeId| match seconds[*reader] > 0.0 || cut.places[*reader].hands_on {
            true => keys[*reader].0,
            false => awaited[*reader],
        };
        awaited[id] = readers[id].iter().map(read).min().unwrap_or(u32::MAX);
    }
    awaited
}

/// What nodes take.
struct Costs<'a> {
    cut: &'a SplitBatch,
    mesh: &'a Mesh,
    cluster: &'a Cluster,
}

impl Costs<'_> {
    fn local(&self, ty: &TensorType, sharding: &Sharding) -> TensorType {
        ty.with_shape(sharding.local_shape(&ty.shape, self.mesh))
    }

    fn seconds(&self, id: NodeId) -> f64 {
        let (graph, strategy) = (&self.cut.graph, &self.cut.strategies[id]);
        let (node, rule) = (graph.node(id), graph.rule(id));
        if self.cut.places[id].hands_on {
            let (value, to) = (node.operands[0], rule.operand_sharding(0, strategy));
            let of = graph.value(value);
            let made = graph.rule(of.def).result_sharding(of.index, &self.cut.strategies[of.def]);
            return self.wire(graph.ty(value), made, &to);
        }
        let operands = graph.operand_types(id).into_iter().enumerate();
        let results = graph.result_types(id).into_iter().enumerate();
        let operands: Vec<TensorType> =
            operands.map(|(index, ty)| self.local(&ty, &rule.operand_sharding(index, strategy))).collect();
        let results: Vec<TensorType> =
            results.map(|(index, ty)| self.local(&ty, &rule.result_sharding(index, strategy))).collect();
        if matches!(node.op, shardc_ir::Op::Slice(_) | shardc_ir::Op::Concat(_)) {
            return 0.0;
        }
        Machine::own(&self.cluster.device).seconds(&node.op, &operands, &results, Pass::of(node.role)).0.0
    }

    /// The seconds of the collectives from one layout to another.
    fn wire(&self, ty: &TensorType, mut made: Sharding, to: &Sharding) -> f64 {
        let steps = path(ty, &made, to, self.mesh, &|step, local| rough_cost(step, local, self.mesh));
        let mut seconds = 0.0;
        for step in steps.unwrap_or_default() {
            let before = self.local(ty, &made).bytes().0 as f64;
            made = step.apply(&made);
            let after = self.local(ty, &made).bytes().0 as f64;
            let (kind, bytes) = match &step {
                Step::AllGather { .. } => (Collective::AllGather, after),
                Step::AllReduce { .. } => (Collective::AllReduce, before),
                Step::ReduceScatter { .. } => (Collective::ReduceScatter, before),
                Step::AllToAll { .. } => (Collective::AllToAll, before),
                Step::Slice { .. } | Step::Isolate { .. } => continue,
            };
            let group = Group::new(self.mesh, step.group_axes(), self.cluster);
            seconds += collective::seconds(kind, bytes, group, self.cluster).0;
        }
        seconds
    }
}

/// The graph with its nodes in another order.
fn rebuild(cut: &SplitBatch, nodes: &[NodeId]) -> Result<Ordered, OpError> {
    let from = &cut.graph;
    let mut own = Ordered { graph: Graph::new(from.name.clone()), ..Ordered::default() };
    let mut map = HashMap::new();
    let mut moved: SecondaryMap<NodeId, Option<NodeId>> = SecondaryMap::new();
    for id in nodes {
        let new = own.graph.copy_node(from, *id, &mut map)?;
        let role = from.node(*id).role.moved(|of| moved[of]);
        let path = from.node(*id).path.clone();
        own.graph.annotate(new, path, role);
        own.strategies[new] = cut.strategies[*id].clone();
        own.staged[new] = cut.places[*id].staged;
        moved[*id] = Some(new);
    }
    own.graph.copy_outputs(from, &map);
    Ok(own)
}
