//! ZeRO: where parameters, gradients and optimizer state are stored over the axes that hold copies.
//!
//! From stage 1 on, the leaves of a parameter and its state, its update, and the square of its
//! gradient divide one dimension over those axes ([`storage_axes`]), inside what tensor parallelism
//! divides already, so that gathering over them gives the tensor-parallel shard. The cast of a parameter is made on the
//! shard, and where that is a weight in 8 bits, its scale and its codes are: the gather moves the smallest type. The
//! gradient of a table is made where it is stored, of all ranks' tokens, if these are less than the table. Where no
//! dimension divides evenly, the parts are those of the longest rank, and the last ones end with zeros, as in PyTorch's
//! FSDP (Zhao et al., "PyTorch FSDP", 2023, section 3.2.1). A parameter of which every dimension is too short stays whole
//! (Rajbhandari et al., "ZeRO", 2020; stages 2 and 3 are when, not where:
//! [`Plan::reduce_in_loop`](shardc_ir::Plan::reduce_in_loop) and
//! [`Plan::transient`](shardc_ir::Plan::transient)).

use super::family::storage_axes;
use crate::cost::is_product;
use shardc_ir::float8::SIDE;
use shardc_ir::ops::{Op, Update};
use shardc_ir::sharding::Cut;
use shardc_ir::{AxisId, Choice, Graph, Mesh, NodeId, OpDef, SecondaryMap, Sharding, Strategy, TensorType, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// How a dimension is divided to store a value in parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Parted {
    /// The dimension.
    pub dim: usize,
    /// The share that a rank has of what it would have of the whole, with what fills the last part.
    pub share: f64,
    /// Whether the parts make up the whole.
    pub is_even: bool,
}

impl Parted {
    /// Cuts what a rank would have of a dimension into so many parts, if less fills them than there is.
    pub fn new(dim: usize, whole: u64, parts: u64) -> Option<Self> {
        let cut = Cut { axes: &[], count: parts, whole, part: whole.div_ceil(parts) };
        let (share, is_even) = (cut.part as f64 / whole as f64, cut.is_even());
        (whole > 0 && (is_even || cut.is_dense())).then_some(Self { dim, share, is_even })
    }

    /// Whether more than a tenth of what is gathered fills the parts of so many ranks.
    fn is_sparse(&self, ranks: u64) -> bool {
        self.share * ranks as f64 > 1.1
    }
}

/// The axes that hold copies, in the order in which they divide what a rank would have of a dimension: all together
/// where they do not divide it evenly, so that it is gathered at once, if one of them by itself does not.
fn ordered(axes: &[AxisId], whole: u64, mesh: &Mesh) -> Vec<AxisId> {
    let mut axes = axes.to_vec();
    if !whole.is_multiple_of(mesh.extent(axes.iter().copied())) {
        axes.sort_by_key(|axis| whole.is_multiple_of(mesh.size(*axis)));
    }
    axes
}

/// The dimension of a stored value that is divided over `extent` data ranks as well: the first that
/// divides with nothing outside it, so that a gather needs no transpose, else the first that divides. One of which each
/// part is a multiple of `unit` comes before any other, and one that divides evenly before one that does not, last one
/// of which the parts have much to fill.
pub fn storage_dim(ty: &TensorType, strategy: &Strategy, mesh: &Mesh, extent: u64, unit: u64) -> Option<Parted> {
    let part = |dim: usize| part(ty, strategy, mesh, dim);
    let outermost = |dim: usize| (0..dim).all(|outer| part(outer) == 1);
    let fits = |of: &Parted| of.is_even && (part(of.dim) / extent).is_multiple_of(unit);
    let parted = (0..ty.rank()).filter_map(|dim| Parted::new(dim, part(dim), extent));
    parted.min_by_key(|of| (!fits(of), !of.is_even, of.is_sparse(extent), !outermost(of.dim)))
}

/// What a rank would have of a dimension.
fn part(ty: &TensorType, strategy: &Strategy, mesh: &Mesh, dim: usize) -> u64 {
    ty.shape[dim] / mesh.extent(strategy.axes(dim).iter().copied())
}

/// The parameters whose casts become 8-bit floats.
fn quantized(graph: &Graph) -> BTreeSet<ValueId> {
    let quantizes = graph.nodes().filter(|(_, node)| matches!(node.op, Op::Quantize(_)));
    quantizes.flat_map(|(_, node)| graph.def(node.operands[0]).operands.iter().copied()).collect()
}

/// Adds the axes that hold copies to the storage of every trained parameter, where a dimension divides.
pub fn shard_storage(graph: &Graph, mesh: &Mesh, strategies: &mut SecondaryMap<NodeId, Strategy>) {
    let mut gradients: BTreeMap<ValueId, NodeId> = BTreeMap::new();
    let mut leaves: BTreeMap<ValueId, NodeId> = BTreeMap::new();
    let (mut casts, quantized) = (BTreeSet::new(), quantized(graph));
    for (id, node) in graph.nodes() {
        let Some(update) = node.op.update() else { continue };
        let (parameter, gradient) = (node.operands[Update::PARAMETER], node.operands[Update::GRADIENT]);
        let axes = storage_axes(mesh, &strategies[id]);
        let extent = mesh.extent(axes.iter().copied());
        let unit = if quantized.contains(&parameter) { SIDE } else { 1 };
        let ty = graph.ty(parameter);
        let Some(Parted { dim, .. }) = storage_dim(ty, &strategies[id], mesh, extent, unit) else { continue };
        let axes = ordered(&axes, part(ty, &strategies[id], mesh, dim), mesh);
        let divided =
            axes.iter().fold(strategies[id].clone(), |strategy, axis| strategy.with(*axis, Choice::Factor(dim)));
        for operand in update.stored() {
            strategies[graph.value(node.operands[operand]).def] = divided.clone();
        }
        strategies[id] = divided;
        make_where_stored(graph, mesh, strategies, (gradient, dim), &axes);
        gradients.insert(gradient, id);
        leaves.insert(parameter, id);
    }
    for (id, node) in graph.nodes() {
        let source = match &node.op {
            Op::Cast(_) => leaves.get(&node.operands[0]),
            Op::SumSquares(_) => gradients.get(&node.operands[0]),
            Op::QuantizationScale(_) | Op::Quantize(_) if casts.contains(&node.operands[0]) => {
                strategies[id] = on_shard(graph, mesh, strategies, id).unwrap_or(strategies[id].clone());
                None
            }
            _ => None,
        };
        let Some(update) = source.copied() else { continue };
        let stored = strategies[update].clone();
        let own = std::mem::replace(&mut strategies[id], stored);
        if let Op::Cast(_) = node.op {
            casts.insert(node.results[0]);
        }
        if let Op::SumSquares(_) = node.op {
            // What else the sum divides (a gradient that every tensor rank holds) it divides inside.
            let ty = graph.ty(node.operands[0]);
            for (dim, axis) in own.factors.iter().flat_map(|(dim, axes)| axes.iter().map(move |axis| (*dim, *axis))) {
                let taken = strategies[id].factors.values().flatten().any(|other| *other == axis);
                let with = strategies[id].with(axis, Choice::Factor(dim));
                let extent = mesh.extent(with.axes(dim).iter().copied());
                if !taken && ty.shape[dim].is_multiple_of(extent) {
                    strategies[id] = with;
                }
            }
        }
    }
    pass_scalars(graph, mesh, strategies);
}

/// The factor of a gradient's dimension, if what the gradient is made of has none of it and is no factor of a product:
/// every part is made of all of that.
pub fn scattered(graph: &Graph, gradient: ValueId, dim: usize) -> Option<usize> {
    let value = graph.value(gradient);
    let (node, rule) = (graph.node(value.def), graph.rule(value.def));
    let [factor] = rule.results.get(value.index)?.get(dim)?[..] else { return None };
    let is_read = rule.operands.iter().flatten().flatten().any(|of| *of == factor);
    (!node.op.is_leaf() && !is_product(&node.op) && !is_read).then_some(factor)
}

/// Lets each rank make the part of a gradient that it stores, of what all ranks read for it, where that is less than
/// the gradients that they would sum: the rows of a table, of all tokens. Of products the work would be cut otherwise,
/// which the search has priced as it is.
fn make_where_stored(
    graph: &Graph,
    mesh: &Mesh,
    strategies: &mut SecondaryMap<NodeId, Strategy>,
    (gradient, dim): (ValueId, usize),
    axes: &[AxisId],
) {
    let value = graph.value(gradient);
    let (node, rule, own) = (graph.node(value.def), graph.rule(value.def), &strategies[value.def]);
    let Some(factor) = scattered(graph, gradient, dim) else { return };
    // The ranks' parts of a microbatch are none of the whole batch: what they are together is not gathered.
    let sums = |axis: &AxisId| matches!(own.choice(*axis), Choice::Factor(of) if of != factor);
    if mesh.microbatches() > 1 || !axes.iter().all(sums) {
        return;
    }
    let with = |strategy: Strategy, axis: &AxisId| strategy.without(*axis).with(*axis, Choice::Factor(factor));
    let strategy = axes.iter().fold(own.clone(), with);
    let bytes = |value: ValueId, sharding: Sharding| {
        graph.ty(value).bytes().0 / mesh.extent(sharding.dims.into_iter().flatten())
    };
    let read: u64 = (0..node.operands.len())
        .map(|index| bytes(node.operands[index], rule.operand_sharding(index, &strategy)))
        .sum();
    let summed = bytes(gradient, rule.result_sharding(value.index, own));
    if read < summed && rule.check(&strategy, mesh).is_ok() {
        strategies[value.def] = strategy;
    }
}

/// The strategy of a node that reads its first operand as that lies, divided over further axes than the node is; none
/// if its rule does not divide so.
fn on_shard(graph: &Graph, mesh: &Mesh, strategies: &SecondaryMap<NodeId, Strategy>, id: NodeId) -> Option<Strategy> {
    let (rule, operand) = (graph.rule(id), graph.value(graph.node(id).operands[0]));
    let made = graph.rule(operand.def).result_sharding(operand.index, &strategies[operand.def]);
    let mut strategy = strategies[id].clone();
    for (factors, axes) in rule.operands[0].iter().zip(&made.dims) {
        for axis in axes.iter().filter(|axis| strategies[id].choice(**axis) == Choice::Replicate) {
            strategy = strategy.with(*axis, Choice::Factor(*factors.first()?));
        }
    }
    let is_as_made = rule.operand_sharding(0, &strategy) == made;
    (is_as_made && rule.check(&strategy, mesh).is_ok()).then_some(strategy)
}

/// The squares are partial sums over the data axes now; their sum passes them on, so that one
/// reduction of one number serves them all.
fn pass_scalars(graph: &Graph, mesh: &Mesh, strategies: &mut SecondaryMap<NodeId, Strategy>) {
    for axis in storage_axes(mesh, &Strategy::default()) {
        let mut partial: BTreeSet<ValueId> = BTreeSet::new();
        for (id, node) in graph.nodes() {
            let sums = matches!(node.op, Op::SumSquares(_)) && strategies[id].choice(axis) != Choice::Replicate;
            if !sums && !node.operands.iter().any(|value| partial.contains(value)) {
                continue;
            }
            let rule = graph.rule(id);
            let reads = |set: &Vec<usize>| set.iter().any(|index| partial.contains(&node.operands[*index]));
            let all = |set: &Vec<usize>| {
                (0..node.operands.len()).all(|index| set.contains(&index) || !partial.contains(&node.operands[index]))
            };
            let set = rule.linear.iter().position(|set| reads(set) && all(set));
            if let Some(set) = set.filter(|_| strategies[id].choice(axis) == Choice::Replicate) {
                strategies[id] = strategies[id].with(axis, Choice::Pass(set));
                partial.extend(node.results.iter().copied());
            } else if sums {
                partial.extend(node.results.iter().copied());
            }
        }
    }
}
