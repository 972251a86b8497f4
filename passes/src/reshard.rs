//! Resharding: the cheapest way from one layout of a value to another.
//!
//! A layout conversion is a path of [`Step`]s, each of which is one collective (over several axes at
//! once where they are adjacent) or one local operation. [`path`] finds the cheapest one by
//! Dijkstra's algorithm over layouts, with costs that the caller gives, so the planner prices
//! exactly what lowering emits.
//!
//! A dimension is divided by its axes outermost first, and only its innermost axes can be gathered
//! or added. Time axes (microbatches) never move: a value that is partial over time is accumulated,
//! which is the business of lowering, and one that is divided over time stays so.
//!
//! Invariants: every intermediate layout is legal for the value; the last one is the target.

use shardc_ir::sharding::cuts;
use shardc_ir::{AxisId, Bytes, Mesh, ReduceKind, Sharding, TensorType};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};

/// One step of a conversion. Axes are listed outermost first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// The innermost axes of a dimension are removed: the group's parts are concatenated.
    AllGather {
        /// The dimension.
        dim: usize,
        /// Its innermost axes.
        axes: Vec<AxisId>,
    },
    /// Axes are added to a dimension, innermost: every coordinate keeps its part. Local.
    Slice {
        /// The dimension.
        dim: usize,
        /// One axis, or all that divide it together.
        axes: Vec<AxisId>,
    },
    /// A partial value is reduced; every coordinate gets the whole result.
    AllReduce {
        /// The partial axes.
        axes: Vec<AxisId>,
        /// How the terms combine.
        reduce: ReduceKind,
    },
    /// A partial value is reduced; every coordinate gets its part of a dimension.
    ReduceScatter {
        /// The dimension, of which the axes become the innermost.
        dim: usize,
        /// The partial axes.
        axes: Vec<AxisId>,
        /// How the terms combine.
        reduce: ReduceKind,
    },
    /// The innermost axes of one dimension become the innermost axes of another.
    AllToAll {
        /// The dimension that loses the axes.
        from: usize,
        /// The dimension that gets them.
        to: usize,
        /// The axes.
        axes: Vec<AxisId>,
    },
    /// A whole value, or a partial sum over other axes, becomes a partial sum over this axis too:
    /// coordinate 0 keeps it, the others hold zeros. Local.
    Isolate {
        /// The axis.
        axis: AxisId,
    },
}

impl Step {
    /// The layout after the step.
    pub fn apply(&self, sharding: &Sharding) -> Sharding {
        let mut next = sharding.clone();
        let drop_partial = |next: &mut Sharding, axes: &[AxisId]| next.partial.retain(|(axis, _)| !axes.contains(axis));
        match self {
            Self::AllGather { dim, axes } => next.dims[*dim].truncate(sharding.dims[*dim].len() - axes.len()),
            Self::Slice { dim, axes } => next.dims[*dim].extend(axes),
            Self::AllReduce { axes, .. } => drop_partial(&mut next, axes),
            Self::ReduceScatter { dim, axes, .. } => {
                drop_partial(&mut next, axes);
                next.dims[*dim].extend(axes);
            }
            Self::AllToAll { from, to, axes } => {
                next.dims[*from].truncate(sharding.dims[*from].len() - axes.len());
                next.dims[*to].extend(axes);
            }
            Self::Isolate { axis } => next.add_partial(*axis, ReduceKind::Sum),
        }
        next
    }

    /// The axes that the step communicates over; none if it is local.
    pub fn group_axes(&self) -> &[AxisId] {
        match self {
            Self::AllGather { axes, .. }
            | Self::AllReduce { axes, .. }
            | Self::ReduceScatter { axes, .. }
            | Self::AllToAll { axes, .. } => axes,
            Self::Slice { .. } | Self::Isolate { .. } => &[],
        }
    }

    /// Whether kernels bring into order what goes over the wire, and what it brings: parts of an inner dimension are not
    /// one behind the other.
    fn rearranges(&self) -> [bool; 2] {
        match self {
            Self::AllGather { dim, .. } => [false, *dim > 0],
            Self::ReduceScatter { dim, .. } => [*dim > 0, false],
            Self::AllToAll { from, to, .. } => [*to > 0, *from > 0],
            Self::Slice { .. } | Self::AllReduce { .. } | Self::Isolate { .. } => [false; 2],
        }
    }

    /// Whether the step combines the terms of a partial value.
    pub fn is_reduction(&self) -> bool {
        matches!(self, Self::AllReduce { .. } | Self::ReduceScatter { .. })
    }
}

/// A layout without the axes of size 1, which divide nothing.
pub fn normalize(sharding: &Sharding, mesh: &Mesh) -> Sharding {
    let wide = |axis: &AxisId| mesh.size(*axis) > 1;
    Sharding {
        dims: sharding.dims.iter().map(|axes| axes.iter().copied().filter(wide).collect()).collect(),
        partial: sharding.partial.iter().copied().filter(|(axis, _)| wide(axis)).collect(),
    }
}

/// Seconds in which a kernel moves so many bytes, roughly.
fn turned(bytes: f64) -> f64 {
    bytes / 1e12
}

/// A rough price of a step in seconds, for callers without a device profile: 10 µs a collective and
/// 100 GB/s a rank on the wire, 2 µs a kernel and 1 TB/s in memory. `local` is what one coordinate
/// holds before the step.
pub fn rough_cost(step: &Step, local: Bytes, mesh: &Mesh) -> f64 {
    let bytes = local.0 as f64;
    let n = mesh.extent(step.group_axes().iter().copied()) as f64;
    let wire = |moved: f64| 10e-6 + moved / 100e9;
    let memory = |moved: f64| 2e-6 + turned(moved);
    let inner = |dim: usize, moved: f64| if dim > 0 { memory(2.0 * moved) } else { 0.0 };
    match step {
        Step::AllGather { dim, .. } => wire(bytes * (n - 1.0)) + inner(*dim, bytes * n),
        Step::ReduceScatter { dim, .. } => wire(bytes * (n - 1.0) / n) + inner(*dim, bytes),
        Step::AllReduce { reduce: ReduceKind::LogSumExp, .. } => {
            2.0 * wire(2.0 * bytes * (n - 1.0) / n) + 4.0 * memory(3.0 * bytes)
        }
        Step::AllReduce { .. } => wire(2.0 * bytes * (n - 1.0) / n),
        Step::AllToAll { from, to, .. } => wire(bytes * (n - 1.0) / n) + inner(*from, bytes) + inner(*to, bytes),
        Step::Slice { .. } => memory(bytes),
        Step::Isolate { .. } => memory(2.0 * bytes),
    }
}

/// What a kernel between two collectives costs at the least beyond its own time: it waits for the one in front of other
/// kernels, and the other waits for it. About what the wire takes for a block's weights.
const HANDED: f64 = 50e-6;

/// What one coordinate holds of a value.
fn local(ty: &TensorType, layout: &Sharding, mesh: &Mesh) -> Bytes {
    let elements: u64 = layout.local_shape(&ty.shape, mesh).iter().product();
    Bytes(elements * ty.dtype.size())
}

/// What a step from a layout to the next costs on the way between two ends, neither of which has axes of size 1, beyond what it costs by
/// itself, in seconds: that kernels rearrange the value between two collectives. That there is less of it than at the end
/// is no reason to do so there.
pub fn handed(
    ty: &TensorType,
    (step, [layout, next]): (&Step, [&Sharding; 2]),
    [from, to]: [&Sharding; 2],
    mesh: &Mesh,
) -> f64 {
    let [before, after] = step.rearranges();
    let between = |is_between: bool, end: &Sharding, there: &Sharding| match is_between {
        true => {
            let less = local(ty, end, mesh).0.saturating_sub(local(ty, there, mesh).0);
            HANDED + turned(2.0 * less as f64)
        }
        false => 0.0,
    };
    between(before && layout != from, from, layout) + between(after && next != to, to, next)
}

/// The cheapest steps from one layout of a value of global type `ty` to another, of those in which an
/// axis comes only where the target has it; `None` if there is no way, which is so only where time axes
/// differ. `cost` prices a step in seconds, given the
/// bytes that one coordinate holds before it. Both layouts must be legal for the value.
pub fn path(
    ty: &TensorType,
    from: &Sharding,
    to: &Sharding,
    mesh: &Mesh,
    cost: &dyn Fn(&Step, Bytes) -> f64,
) -> Option<Vec<Step>> {
    priced_path(ty, from, to, mesh, cost).map(|(_, steps)| steps)
}

/// [`path`], with the seconds it takes.
pub fn priced_path(
    ty: &TensorType,
    from: &Sharding,
    to: &Sharding,
    mesh: &Mesh,
    cost: &dyn Fn(&Step, Bytes) -> f64,
) -> Option<(f64, Vec<Step>)> {
    let (from, to) = (normalize(from, mesh), normalize(to, mesh));
    let is_even = [&from, &to].iter().all(|end| end.is_even(&ty.shape, mesh));
    let uneven = (!is_even).then_some(&ty.shape[..]);
    let mut best: BTreeMap<Sharding, f64> = BTreeMap::from([(from.clone(), 0.0)]);
    let mut came: BTreeMap<Sharding, (Sharding, Step)> = BTreeMap::new();
    let mut queue = BinaryHeap::from([Reached { cost: 0.0, layout: from.clone() }]);
    while let Some(Reached { cost: so_far, layout }) = queue.pop() {
        if layout == to {
            let mut steps = Vec::new();
            let mut at = layout;
            while let Some((before, step)) = came.remove(&at) {
                steps.push(step);
                at = before;
            }
            steps.reverse();
            return Some((so_far, steps));
        }
        if best.get(&layout).is_some_and(|known| *known < so_far) {
            continue;
        }
        let local = local(ty, &layout, mesh);
        for step in steps_towards(&layout, &to, uneven, mesh) {
            let next = step.apply(&layout);
            let handed = handed(ty, (&step, [&layout, &next]), [&from, &to], mesh);
            let total = so_far + cost(&step, local).max(0.0) + handed;
            if best.get(&next).is_none_or(|known| total < *known) {
                best.insert(next.clone(), total);
                came.insert(next.clone(), (layout.clone(), step));
                queue.push(Reached { cost: total, layout: next });
            }
        }
    }
    None
}

/// A layout in the queue; the cheapest is the greatest, ties go to the smaller layout.
struct Reached {
    cost: f64,
    layout: Sharding,
}

impl PartialEq for Reached {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Reached {}
impl PartialOrd for Reached {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Reached {
    fn cmp(&self, other: &Self) -> Ordering {
        other.cost.total_cmp(&self.cost).then_with(|| other.layout.cmp(&self.layout))
    }
}

/// Every step that can be of use: axes leave a dimension only where they are not the target's, and
/// enter one only where the target has them. So the search stays small, and every layout it visits
/// divides as the two ends do. `uneven` is the value's shape, if one of them divides unevenly.
fn steps_towards(at: &Sharding, to: &Sharding, uneven: Option<&[u64]>, mesh: &Mesh) -> Vec<Step> {
    let mut steps = Vec::new();
    let used = |axis: AxisId| at.dim_of(axis).is_some() || at.partial_over(axis).is_some();
    for dim in 0..at.dims.len() {
        for axes in removable(at, to, (dim, uneven.map(|shape| shape[dim])), mesh) {
            for other in (0..at.dims.len()).filter(|other| *other != dim && wants(at, to, *other, &axes)) {
                steps.push(Step::AllToAll { from: dim, to: other, axes: axes.clone() });
            }
            steps.push(Step::AllGather { dim, axes });
        }
        let Some(rest) = to.dims[dim].strip_prefix(at.dims[dim].as_slice()) else { continue };
        let free = rest.iter().take_while(|axis| !used(**axis) && !mesh.is_time(**axis)).count();
        let free = if uneven.is_some() { free } else { free.min(1) };
        steps.extend((1..=free).map(|count| Step::Slice { dim, axes: rest[..count].to_vec() }));
        for count in 1..=rest.len() {
            let Some(reduce) = common_partial(at, &rest[..count], mesh) else { break };
            if reduce != ReduceKind::LogSumExp {
                steps.push(Step::ReduceScatter { dim, axes: rest[..count].to_vec(), reduce });
            }
        }
    }
    reductions(at, to, mesh, &mut steps);
    // Zeros are neutral for a sum only: a maximum or a log-sum-exp is resolved first.
    if at.partial.iter().all(|(_, kind)| *kind == ReduceKind::Sum) {
        let missing = to.partial.iter().filter(|(axis, kind)| *kind == ReduceKind::Sum && !used(*axis));
        steps.extend(missing.filter(|(axis, _)| !mesh.is_time(*axis)).map(|(axis, _)| Step::Isolate { axis: *axis }));
    }
    if let Some(shape) = uneven {
        steps.retain(|step| keeps_parts_whole(step, at, shape, mesh));
    }
    steps
}

/// Whether a step moves parts as they are cut: axes that divide unevenly come and go together, so that the zeros that fill
/// the last of their parts are at the end of what is moved. They are not exchanged, and of terms only those of a sum are
/// filled.
fn keeps_parts_whole(step: &Step, at: &Sharding, shape: &[u64], mesh: &Mesh) -> bool {
    let uneven = |layout: &Sharding, dim: usize| {
        let last = cuts(shape[dim], &layout.dims[dim], mesh).last().filter(|cut| !cut.is_even());
        last.map(|cut| cut.axes.to_vec())
    };
    let may_fill = at.partial.iter().all(|(_, kind)| *kind == ReduceKind::Sum);
    match step {
        Step::AllGather { dim, axes } => uneven(at, *dim).is_none_or(|together| together == *axes),
        Step::ReduceScatter { dim, axes, .. } => {
            uneven(&step.apply(at), *dim).is_none_or(|together| may_fill && together == *axes)
        }
        Step::Slice { dim, axes } => match uneven(&step.apply(at), *dim) {
            None => axes.len() == 1,
            Some(together) => may_fill && together == *axes,
        },
        Step::AllToAll { from, to, .. } => uneven(at, *from).is_none() && uneven(&step.apply(at), *to).is_none(),
        Step::AllReduce { .. } | Step::Isolate { .. } => true,
    }
}

/// The runs of innermost axes of a dimension that the target does not have there. Of a size that axes may divide unevenly,
/// these are there only where all of them are.
fn removable(at: &Sharding, to: &Sharding, (dim, size): (usize, Option<u64>), mesh: &Mesh) -> Vec<Vec<AxisId>> {
    let (axes, wanted) = (&at.dims[dim], &to.dims[dim]);
    let mut kept = axes.iter().zip(wanted).take_while(|(held, wanted)| held == wanted).count();
    if let Some(size) = size.filter(|_| axes != wanted) {
        let even = |axes: &[AxisId]| cuts(size, axes, mesh).take_while(|cut| cut.is_even()).count();
        kept = kept.min(even(axes)).min(even(wanted));
    }
    let mut runs = Vec::new();
    for first in (kept..axes.len()).rev() {
        if mesh.is_time(axes[first]) {
            break;
        }
        runs.push(axes[first..].to_vec());
    }
    runs
}

/// Whether the target has these axes next in the dimension.
fn wants(at: &Sharding, to: &Sharding, dim: usize, axes: &[AxisId]) -> bool {
    to.dims[dim].strip_prefix(at.dims[dim].as_slice()).is_some_and(|rest| rest.starts_with(axes))
}

/// The one reduction by which the value is partial over all these space axes.
fn common_partial(at: &Sharding, axes: &[AxisId], mesh: &Mesh) -> Option<ReduceKind> {
    let kind = at.partial_over(*axes.first()?)?;
    axes.iter().all(|axis| at.partial_over(*axis) == Some(kind) && !mesh.is_time(*axis)).then_some(kind)
}

/// All-reduces over every set of axes of one kind that the target does not keep partial.
fn reductions(at: &Sharding, to: &Sharding, mesh: &Mesh, steps: &mut Vec<Step>) {
    for reduce in [ReduceKind::Sum, ReduceKind::Max, ReduceKind::LogSumExp] {
        let open = |(axis, kind): &&(AxisId, ReduceKind)| {
            *kind == reduce && to.partial_over(*axis) != Some(reduce) && !mesh.is_time(*axis)
        };
        let axes: Vec<AxisId> = at.partial.iter().filter(open).map(|(axis, _)| *axis).collect();
        for set in 1u32..1 << axes.len() {
            let chosen = (0..axes.len()).filter(|index| set & (1 << index) != 0).map(|index| axes[index]).collect();
            steps.push(Step::AllReduce { axes: chosen, reduce });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::{DType, Family};

    fn mesh() -> Mesh {
        let mut mesh = Mesh::default();
        mesh.push(Family::Data, 2);
        mesh.push(Family::Tensor, 4);
        mesh.push(Family::Microbatch, 2);
        mesh
    }

    /// A layout of rank 2 from text: `dp,tp/mb` divides dimension 0 by dp and 1 by tp, partial over mb.
    fn layout(text: &str, mesh: &Mesh) -> Sharding {
        let (dims, partial) = text.split_once('/').unwrap_or((text, ""));
        let axes = |text: &str| text.split('.').filter_map(|name| mesh.find(name)).collect::<Vec<_>>();
        let mut sharding = Sharding { dims: dims.split(',').map(axes).collect(), partial: Vec::new() };
        axes(partial).into_iter().for_each(|axis| sharding.add_partial(axis, ReduceKind::Sum));
        sharding
    }

    #[track_caller]
    fn check(from: &str, to: &str, expect: &str) {
        check_on(&mesh(), from, to, expect);
    }

    #[track_caller]
    fn check_on(mesh: &Mesh, from: &str, to: &str, expect: &str) {
        let ty = TensorType::new(DType::F32, [1 << 12, 1 << 12]);
        let found =
            path(&ty, &layout(from, mesh), &layout(to, mesh), mesh, &|step, local| rough_cost(step, local, mesh));
        let name = |axes: &[AxisId]| axes.iter().map(|axis| mesh.axis(*axis).name()).collect::<Vec<_>>().join(".");
        let text = |step: &Step| match step {
            Step::AllGather { dim, axes } => format!("gather({dim},{})", name(axes)),
            Step::Slice { dim, axes } => format!("slice({dim},{})", name(axes)),
            Step::AllReduce { axes, .. } => format!("all-reduce({})", name(axes)),
            Step::ReduceScatter { dim, axes, .. } => format!("reduce-scatter({dim},{})", name(axes)),
            Step::AllToAll { from, to, axes } => format!("all-to-all({from},{to},{})", name(axes)),
            Step::Isolate { axis } => format!("isolate({})", name(&[*axis])),
        };
        let found = found.map(|steps| steps.iter().map(text).collect::<Vec<_>>().join(" "));
        assert_eq!(found.unwrap_or("none".into()), expect);
    }

    #[test]
    fn paths() {
        check("dp,tp", "dp,tp", "");
        check("dp,tp", "dp,", "gather(1,tp)");
        check("dp.tp,", ",", "gather(0,dp.tp)");
        check("dp.tp,", "tp,", "gather(0,dp.tp) slice(0,tp)");
        check(",", "dp,tp", "slice(1,tp) slice(0,dp)");
        check(",/tp", ",", "all-reduce(tp)");
        check(",/dp.tp", ",", "all-reduce(dp.tp)");
        check(",/dp.tp", "dp.tp,", "reduce-scatter(0,dp.tp)");
        check("dp,/tp", "dp,tp", "reduce-scatter(1,tp)");
        check("tp,dp", ",tp", "gather(1,dp) all-to-all(0,1,tp)");
        // Kernels bring into order what is gathered along an inner dimension, at last.
        check("dp,tp", ",", "gather(0,dp) gather(1,tp)");
        check("tp,dp", ",", "gather(0,tp) gather(1,dp)");
        check(",", ",/tp", "isolate(tp)");
        check("mb.dp,tp", "mb,tp", "gather(0,dp)");
        check("dp.mb,", "mb,", "none");
        check("dp,/mb", "dp,", "none");
        check("dp,/tp.mb", "dp,/mb", "all-reduce(tp)");
    }

    #[test]
    fn what_axes_divide_unevenly_moves_over_all_of_them() {
        let mut mesh = Mesh::default();
        mesh.push(Family::Data, 3);
        mesh.push(Family::Tensor, 4);
        check_on(&mesh, "tp.dp,", "tp,", "gather(0,dp)");
        check_on(&mesh, "tp.dp,", ",", "gather(0,dp) gather(0,tp)");
        check_on(&mesh, ",/dp.tp", "tp.dp,", "reduce-scatter(0,tp) reduce-scatter(0,dp)");
        check_on(&mesh, "dp,", ",dp", "gather(0,dp) slice(1,dp)");
        check_on(&mesh, "dp.tp,", ",", "gather(0,dp.tp)");
        check_on(&mesh, "dp.tp,", "dp,", "gather(0,dp.tp) slice(0,dp)");
        check_on(&mesh, ",/dp.tp", "dp.tp,", "reduce-scatter(0,dp.tp)");
        check_on(&mesh, ",/dp", "dp.tp,", "all-reduce(dp) slice(0,dp.tp)");
    }
}
