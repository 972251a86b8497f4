//! Casts of parameters that are kept from step to step.
//!
//! A step in 16 bits begins with a cast of every parameter: 4 bytes read and 2 written per element, of what the step
//! before had in registers when it updated the parameter. Here that update makes the cast as well, as a fourth result,
//! and the cast is a state that is stored beside the parameter: 2 bytes per element written, for 2 bytes of memory that
//! live longer than the step. The search applies this to the plan that it found, where its programs are faster for it
//! and fit ([`casts`](crate::search)).
//!
//! That the state is the parameter's cast before every step follows by induction. The runtime makes the cast whenever
//! the parameter is written. The graph's verifier demands that what replaces the cast is the cast of what replaces the
//! parameter, and the plan's verifier that both lie alike.
//!
//! Invariants: nodes stay what and where they are, but for casts, which become leaves, and updates, which get one more
//! result; a kept cast lies as its parameter does, so that a rank makes it from its own part.

use crate::error::PassError;
use crate::fold::leaf_name;
use shardc_ir::ops::{Cast, OpDef, State, Update};
use shardc_ir::plan::Space;
use shardc_ir::{Bytes, DType, Graph, Node, NodeId, Op, OutputKind, Plan, SecondaryMap, TensorType, ValueId};
use std::collections::{BTreeSet, HashMap};

const PASS: &str = "keep_casts";

/// A cast that can be kept.
struct Kept {
    parameter: ValueId,
    cast: NodeId,
    update: NodeId,
    name: String,
    ty: TensorType,
}

/// The casts of a plan that can be kept: each the only one of its parameter, which lies as the cast does and is updated.
pub struct Casts<'a> {
    plan: &'a Plan,
    kept: Vec<Kept>,
}

fn candidates(plan: &Plan) -> Vec<Kept> {
    let graph = &plan.graph;
    let mut casts: HashMap<ValueId, Vec<NodeId>> = HashMap::new();
    let mut updates: HashMap<ValueId, NodeId> = HashMap::new();
    for (id, node) in graph.nodes() {
        if let Op::Cast(_) = node.op {
            casts.entry(node.operands[0]).or_default().push(id);
        }
        if node.op.update().is_some_and(|update| update.cast.is_none()) {
            updates.insert(node.operands[Update::PARAMETER], id);
        }
    }
    let names: BTreeSet<&str> = graph.leaves().map(|(_, node)| leaf_name(&node.op)).collect();
    let replaced = graph.outputs.iter().filter_map(|output| match output.kind {
        OutputKind::Update(leaf) => Some((leaf, output.value)),
        OutputKind::Result => None,
    });
    let replaced: HashMap<ValueId, ValueId> = replaced.collect();
    let mut kept = Vec::new();
    for (parameter, node) in graph.leaves().filter(|(_, node)| matches!(node.op, Op::Parameter(_))) {
        let (Some([cast]), Some(update)) = (casts.get(&parameter).map(Vec::as_slice), updates.get(&parameter)) else {
            continue;
        };
        let (value, def) = (graph.result(*cast), graph.value(parameter).def);
        let ty = graph.ty(value).clone();
        let name = format!("{}.{}", leaf_name(&node.op), ty.dtype.name());
        let lies_alike = plan.sharding(value) == plan.sharding(parameter)
            && plan.pipeline.chunks[*cast] == plan.pipeline.chunks[def]
            && [value, parameter].iter().all(|value| plan.spaces[*value] == Space::Device);
        if lies_alike
            && ty.dtype.is_float()
            && ty.dtype.size() < graph.ty(parameter).dtype.size()
            && !names.contains(name.as_str())
            && replaced.get(&parameter) == Some(&graph.node(*update).results[Update::PARAMETER])
        {
            kept.push(Kept { parameter, cast: *cast, update: *update, name, ty });
        }
    }
    kept
}

impl<'a> Casts<'a> {
    /// Finds them.
    pub fn of(plan: &'a Plan) -> Self {
        Self { plan, kept: candidates(plan) }
    }

    /// The bytes of parameters that one rank reads in a step to make them.
    pub fn bytes_read(&self) -> Bytes {
        let local = |kept: &Kept| {
            let (ty, sharding) = (self.plan.graph.ty(kept.parameter), self.plan.sharding(kept.parameter));
            ty.with_shape(sharding.local_shape(&ty.shape, &self.plan.mesh)).bytes()
        };
        self.kept.iter().map(local).sum()
    }

    /// The plan with them kept; none if there is nothing to keep.
    ///
    /// # Errors
    /// None but a bug: a graph that cannot be built again.
    pub fn keep(&self) -> Result<Option<Plan>, PassError> {
        let Self { plan, kept } = self;
        if kept.is_empty() {
            return Ok(None);
        }
        let of_cast: HashMap<NodeId, &Kept> = kept.iter().map(|kept| (kept.cast, kept)).collect();
        let of_update: HashMap<NodeId, DType> = kept.iter().map(|kept| (kept.update, kept.ty.dtype)).collect();
        let from = &plan.graph;
        let graph = from.rebuild(|graph, id, map| {
            let node = from.node(id);
            if let Some(kept) = of_cast.get(&id) {
                let parameter = leaf_name(&from.def(kept.parameter).op).to_string();
                let state = State { name: kept.name.clone(), init: 0.0, cast_of: Some(parameter) };
                return replace(graph, (from, id), state.into(), &[], map);
            }
            match of_update.get(&id).and_then(|dtype| node.op.casting(Some(*dtype))) {
                Some(update) => replace(graph, (from, id), update, &node.operands, map),
                None => Ok(false),
            }
        });
        let mut graph = graph.map_err(PassError::ill_formed(PASS))?;
        // Nodes are told by their numbers from here on, and those that nothing needs would have been left out.
        if graph.node_count() != from.node_count() {
            return Ok(None);
        }
        let moved = |value: ValueId| graph.node(from.value(value).def).results[from.value(value).index];
        let mut made = Plan { transient: SecondaryMap::new(), spaces: SecondaryMap::new(), ..(*plan).clone() };
        for (value, _) in from.values() {
            made.transient[moved(value)] = plan.transient[value];
            made.spaces[moved(value)] = plan.spaces[value];
        }
        for Kept { parameter, cast, update, name, .. } in kept {
            made.strategies[*cast] = plan.strategies[from.value(*parameter).def].clone();
            let (leaf, update) = (graph.result(*cast), graph.node(*update));
            let new = update.op.update().and_then(Update::cast_result).map(|result| update.results[result]);
            new.into_iter().for_each(|new| graph.output(name.clone(), new, OutputKind::Update(leaf)));
        }
        made.graph = graph;
        Ok(Some(made))
    }
}

/// Whether a graph keeps a cast of a parameter from step to step.
pub fn are_kept(graph: &Graph) -> bool {
    graph.leaves().any(|(_, node)| matches!(&node.op, Op::State(State { cast_of: Some(_), .. })))
}

/// The graph with every kept cast made anew in every step, as before [`Casts::keep`]. Nodes keep their numbers.
///
/// # Errors
/// As [`Casts::keep`].
pub fn cast_again(graph: &Graph) -> Result<Graph, PassError> {
    let cast_of = |value: ValueId| match &graph.def(value).op {
        Op::State(state) => state.cast_of.as_deref(),
        _ => None,
    };
    let mut from = graph.clone();
    from.outputs.retain(|output| !matches!(output.kind, OutputKind::Update(leaf) if cast_of(leaf).is_some()));
    // A cast that something else reads or returns is not made for the next step alone.
    let read = from.nodes().flat_map(|(_, node)| &node.operands).chain(from.outputs.iter().map(|output| &output.value));
    let read: BTreeSet<ValueId> = read.copied().collect();
    let is_kept_only = |node: &Node| {
        let cast = node.op.update().and_then(Update::cast_result);
        cast.is_some_and(|result| !read.contains(&node.results[result]))
    };
    let parameters: HashMap<&str, ValueId> = graph
        .leaves()
        .filter(|(_, node)| matches!(node.op, Op::Parameter(_)))
        .map(|(value, node)| (leaf_name(&node.op), value))
        .collect();
    let made = from.rebuild(|to, id, map| {
        let node = from.node(id);
        match &node.op {
            op if is_kept_only(node) => match op.casting(None) {
                Some(op) => replace(to, (&from, id), op, &node.operands, map),
                None => Ok(false),
            },
            Op::State(_) => match cast_of(node.results[0]).and_then(|name| parameters.get(name)) {
                Some(parameter) => replace(to, (&from, id), Cast {}.into(), &[*parameter], map),
                None => Ok(false),
            },
            _ => Ok(false),
        }
    });
    made.map_err(PassError::ill_formed(PASS))
}

/// Adds another operation in the place of a node of a graph that is built again, with the types of its results that
/// both have.
fn replace(
    graph: &mut Graph,
    (from, id): (&Graph, NodeId),
    op: Op,
    operands: &[ValueId],
    map: &mut HashMap<ValueId, ValueId>,
) -> Result<bool, shardc_ir::ops::OpError> {
    let node = from.node(id);
    let operands: Vec<ValueId> = operands.iter().map(|value| map[value]).collect();
    let declared = if op.update().is_some() { Vec::new() } else { from.result_types(id) };
    let added = graph.add_as(op, &operands, &declared, node.path.clone(), node.role)?;
    map.extend(node.results.iter().copied().zip(graph.node(added).results.clone()));
    Ok(true)
}
