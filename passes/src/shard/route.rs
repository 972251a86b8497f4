//! The way of a value from one layout over several axes to another: the steps that lowering takes
//! ([`reshard`](crate::reshard)), priced on a cluster.
//!
//! What a value costs on its way is no sum over axes. A part can be taken of an inner axis at no price, but before an
//! outer one the inner ones are gathered first; a gather along two axes of a dimension is one collective.

use super::family::{is_copy_axis, searched_axes};
use super::layout::{Along, Extent, Turn, convert};
use super::tensor::{Conversion, Flow, Placed, Prepared};
use crate::cluster::Cluster;
use crate::cost::collective::Group;
use crate::reshard::{Step, path, rough_cost};
use crate::threads::lock;
use Along::{Dim, Partial, Whole};
use rustc_hash::FxHashMap;
use shardc_ir::ops::{Op, OpDef};
use shardc_ir::{AxisId, Mesh, ReduceKind, Sharding, TensorType};
use std::sync::{Arc, Mutex};

/// A step of a way.
#[derive(Clone, Debug)]
pub struct Taken {
    from: Along,
    to: Along,
    group: Group,
    /// Of what the ranks of a group hold together.
    shape: Vec<u64>,
}

/// The steps from one layout to another; none if there is no way.
pub type Route = Option<Arc<[Taken]>>;

/// A value that changes its layout along one axis while it lies like this along the others, before and after.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Turning {
    /// Its type, undivided along all of them.
    pub ty: TensorType,
    /// The axis.
    pub axis: AxisId,
    /// The others.
    pub others: Vec<(AxisId, Along, Along)>,
    /// Whether it is a gradient, of which reductions over axes that hold copies are priced elsewhere.
    pub is_gradient: bool,
}

/// Seconds from one layout along the axis to another.
pub type Turned = Arc<Mutex<FxHashMap<(Along, Along), f64>>>;

/// The ways on one mesh of a cluster, each looked for once.
#[derive(Debug, Default)]
pub struct Routes {
    known: Mutex<FxHashMap<(TensorType, Sharding, Sharding), Route>>,
    groups: Mutex<FxHashMap<Vec<AxisId>, Group>>,
    turned: Mutex<FxHashMap<Turning, Turned>>,
}

impl Routes {
    /// The seconds that are known of a value that turns along an axis.
    pub fn turned(&self, turning: &Turning) -> Turned {
        let mut turned = lock(&self.turned);
        match turned.get(turning) {
            Some(known) => Arc::clone(known),
            None => Arc::clone(turned.entry(turning.clone()).or_default()),
        }
    }

    /// The way of a value of type `ty` (undivided along the axes of the layouts) on a mesh of a cluster.
    pub fn find(&self, ty: &TensorType, from: Sharding, to: Sharding, on: (&Mesh, &Cluster)) -> Route {
        let key = (ty.clone(), from, to);
        if let Some(known) = lock(&self.known).get(&key) {
            return known.clone();
        }
        let ((_, from, to), (mesh, _)) = (&key, on);
        let is_even = [from, to].iter().all(|end| end.is_even(&ty.shape, mesh));
        let steps = is_even.then(|| path(ty, from, to, mesh, &|step, local| rough_cost(step, local, mesh)));
        let route: Route = steps.flatten().map(|steps| {
            let mut at = from.clone();
            let take = |step: Step| {
                let before = at.local_shape(&ty.shape, mesh);
                at = step.apply(&at);
                self.taken(&step, before, on)
            };
            steps.into_iter().map(take).collect()
        });
        lock(&self.known).insert(key, route.clone());
        route
    }

    /// The seconds of that way on the ranks of a cluster; infinite where there is none.
    pub fn seconds(&self, ty: &TensorType, ends: [Sharding; 2], on: (&Mesh, &Cluster), cluster: &Cluster) -> f64 {
        let [from, to] = ends;
        let seconds = |step: &Taken| step.seconds(ty.dtype.size() as f64, cluster);
        self.find(ty, from, to, on).map_or(f64::INFINITY, |steps| steps.iter().map(seconds).sum())
    }

    fn taken(&self, step: &Step, mut shape: Vec<u64>, (mesh, cluster): (&Mesh, &Cluster)) -> Taken {
        let axes: &[AxisId] = match step {
            Step::Slice { axes, .. } => axes,
            Step::Isolate { axis } => std::slice::from_ref(axis),
            _ => step.group_axes(),
        };
        let new = || Group::new(mesh, axes, cluster);
        let group = *lock(&self.groups).entry(axes.to_vec()).or_insert_with(new);
        let (from, to) = match step {
            Step::AllGather { dim, .. } => (Dim(*dim), Whole),
            Step::Slice { dim, .. } => (Whole, Dim(*dim)),
            Step::AllReduce { reduce, .. } => (Partial(*reduce), Whole),
            Step::ReduceScatter { dim, reduce, .. } => (Partial(*reduce), Dim(*dim)),
            Step::AllToAll { from, to, .. } => (Dim(*from), Dim(*to)),
            Step::Isolate { .. } => (Whole, Partial(ReduceKind::Sum)),
        };
        if let Dim(dim) = from {
            shape[dim] *= group.size();
        }
        Taken { from, to, group, shape }
    }
}

impl Taken {
    /// Its seconds on the ranks of a cluster, of elements of so many bytes.
    pub fn seconds(&self, element: f64, cluster: &Cluster) -> f64 {
        self.turn(element, cluster).seconds()
    }

    /// The same by who does what.
    fn turn(&self, element: f64, cluster: &Cluster) -> Turn {
        let bytes = self.shape.iter().product::<u64>() as f64 * element;
        convert(self.from, self.to, Extent { bytes, shape: &self.shape }, self.group, cluster)
    }

    /// What its collective takes without a byte.
    fn start(&self, cluster: &Cluster) -> f64 {
        convert(self.from, self.to, Extent { bytes: 0.0, shape: &self.shape }, self.group, cluster).wire
    }

    /// The bytes that a rank has behind it, of elements of so many.
    fn left(&self, element: f64) -> f64 {
        let bytes = self.shape.iter().product::<u64>() as f64 * element;
        if matches!(self.to, Dim(_)) { bytes / self.group.size() as f64 } else { bytes }
    }

    /// Whether it adds terms.
    pub fn is_reduction(&self) -> bool {
        matches!(self.from, Partial(_))
    }

    /// Whether a rank does it by itself.
    pub fn is_local(&self) -> bool {
        self.from == Whole
    }
}

/// The layout of a value of so many dimensions that lies along each axis like this, the outer axes first.
pub fn sharding(rank: usize, along: impl IntoIterator<Item = (AxisId, Along)>) -> Sharding {
    let mut sharding = Sharding::replicated(rank);
    for (axis, along) in along {
        match along {
            Whole => {}
            Dim(dim) => sharding.dims[dim].push(axis),
            Partial(kind) => sharding.add_partial(axis, kind),
        }
    }
    sharding
}

/// The type of a flow's value that is made like this, undivided along these axes of a mesh.
pub fn undivided(prepared: &Prepared<'_>, flow: &Flow, mut made: Sharding, on: (&[AxisId], &Mesh)) -> TensorType {
    let (axes, mesh) = on;
    made.dims.iter_mut().for_each(|dim| dim.retain(|axis| !axes.contains(axis)));
    let maker = prepared.folded.classes[flow.maker].node;
    let value = prepared.graph.node(maker).results[flow.result];
    Prepared::local(prepared.graph.ty(value), &made, mesh)
}

/// Whether a reader of a value, or all of them, only update with it: along axes that hold copies, what they need is the
/// reduction of a gradient, which is priced with the data ranks'.
pub fn is_gradient(prepared: &Prepared<'_>, flow: &Flow, only: Option<usize>) -> bool {
    let updates = |reader: usize| {
        let op = prepared.op(reader);
        matches!(op, Op::SumSquares(_)) || op.update().is_some()
    };
    let is_update = || match only {
        Some(reader) => updates(reader),
        None => flow.readers.iter().all(|(reader, ..)| updates(*reader)),
    };
    prepared.is_gradient[flow.maker] && is_update()
}

/// Of a reduction of gradients over axes that hold copies, nothing.
pub fn unpriced(mut from: Sharding, to: &Sharding, mesh: &Mesh) -> Sharding {
    from.partial.retain(|(axis, _)| !is_copy_axis(mesh, *axis) || Along::of(to, *axis) != Whole);
    from
}

/// The conversions of values between the classes of a placed mesh, with what they take on the ranks of a cluster.
pub fn conversions(prepared: &Prepared<'_>, placed: &Placed<'_>, cluster: &Cluster) -> Vec<Conversion> {
    let axes = searched_axes(placed.mesh);
    let of_axes = |mut sharding: Sharding| {
        sharding.dims.iter_mut().for_each(|dim| dim.retain(|axis| axes.contains(axis)));
        sharding.partial.retain(|(axis, _)| axes.contains(axis));
        sharding
    };
    let mut conversions = Vec::new();
    for (index, flow) in prepared.flows.iter().enumerate() {
        let whole = prepared.rules[flow.maker].result_sharding(flow.result, &placed.strategies[flow.maker]);
        let ty = undivided(prepared, flow, whole.clone(), (&axes, placed.mesh));
        let made = of_axes(whole);
        let on = (placed.mesh, placed.cluster);
        let seconds =
            |from: &Sharding, to: &Sharding| placed.routes.seconds(&ty, [from.clone(), to.clone()], on, cluster);
        let mut add = |from: &Sharding, to: &Sharding, (reader, count): (usize, usize), is_shared: bool| {
            if from == to {
                return;
            }
            let is_update = is_gradient(prepared, flow, (!is_shared).then_some(reader));
            let from = if is_update { unpriced(from.clone(), to, placed.mesh) } else { from.clone() };
            let Some(steps) = placed.routes.find(&ty, from, to.clone(), on) else { return };
            // Terms are added behind the maker, the rest is done before the reader.
            let early = steps.iter().rposition(Taken::is_reduction).map_or(0, |last| last + 1);
            for (steps, is_early) in [(&steps[..early], true), (&steps[early..], false)] {
                let Some(last) = steps.last() else { continue };
                let turns = steps.iter().map(|step| step.turn(ty.dtype.size() as f64, cluster));
                conversions.push(Conversion {
                    maker: flow.maker,
                    result: flow.result,
                    reader,
                    turn: turns.fold(Turn::default(), Turn::then),
                    start: steps.iter().map(|step| step.start(cluster)).sum(),
                    count,
                    bytes: last.left(ty.dtype.size() as f64),
                    is_shared,
                    is_early,
                    is_local: steps.iter().all(Taken::is_local),
                });
            }
        };
        let layouts = axes.iter().map(|axis| Some((*axis, *placed.handed.get(&(*axis, index))?)));
        let handed: Option<Vec<(AxisId, Along)>> = layouts.collect();
        let read = |reader: usize, operand: usize| {
            of_axes(prepared.rules[reader].operand_sharding(operand, &placed.strategies[reader]))
        };
        let handed = handed.map(|handed| {
            let is_like = |sharding: &Sharding| handed.iter().all(|(axis, along)| Along::of(sharding, *axis) == *along);
            let mut known = [made.clone()]
                .into_iter()
                .chain(flow.readers.iter().map(|(reader, operand, _)| read(*reader, *operand)));
            known.find(is_like).unwrap_or_else(|| sharding(ty.shape.len(), handed.iter().copied()))
        });
        if let Some(handed) = &handed {
            let members = prepared.folded.classes[flow.maker].members.len();
            add(&made, handed, (flow.readers[0].0, members), true);
        }
        let handed = handed.unwrap_or_else(|| made.clone());
        let mut along = axes.iter().map(|axis| [&made, &handed].map(|of| Along::of(of, *axis)));
        let is_gather = along.all(|[made, handed]| made == handed || made.is_gathered_in(handed));
        for (reader, operand, count) in &flow.readers {
            let to = read(*reader, *operand);
            // What is nearer to how it is made is made of that, however it is gathered for others.
            let is_nearer = is_gather && handed != made && seconds(&made, &to) < seconds(&handed, &to);
            let from = if is_nearer { &made } else { &handed };
            add(from, &to, (*reader, *count), false);
        }
    }
    conversions
}
