//! Layout conversions on explicit shards: the steps that [`path`] finds, carried out by a small
//! simulator over every rank's part of a tensor of integers, give what cutting the whole tensor gives.
//! Also where axes divide a dimension unevenly, the parts being filled up with zeros.
//! And where all divide evenly, they are the cheapest: no path of up to three steps costs less, of all those in which an axis
//! divides a dimension, or makes a value partial, only where it did or shall.

use proptest::prelude::*;
use shardc_ir::sharding::may_cut;
use shardc_ir::{AxisId, Bytes, DType, Family, Mesh, ReduceKind, Sharding, TensorType};
use shardc_passes::reshard::{Step, handed, normalize, path, priced_path, rough_cost};

/// A dense tensor of one rank.
#[derive(Clone, Debug, PartialEq)]
struct Shard {
    shape: Vec<u64>,
    numbers: Vec<i64>,
}

impl Shard {
    /// From a function of the index.
    fn of(shape: &[u64], mut number: impl FnMut(&[u64]) -> i64) -> Self {
        let mut index = vec![0; shape.len()];
        let mut numbers = Vec::new();
        'all: loop {
            numbers.push(number(&index));
            for dim in (0..shape.len()).rev() {
                index[dim] += 1;
                if index[dim] < shape[dim] {
                    continue 'all;
                }
                index[dim] = 0;
            }
            return Self { shape: shape.to_vec(), numbers };
        }
    }

    fn at(&self, index: &[u64]) -> i64 {
        let flat = index.iter().zip(&self.shape).fold(0, |flat, (i, size)| flat * size + i);
        self.numbers[flat as usize]
    }

    /// Part `part` of `count` along a dimension.
    fn part(&self, dim: usize, count: u64, part: u64) -> Self {
        let mut shape = self.shape.clone();
        shape[dim] /= count;
        let first = part * shape[dim];
        Self::of(&shape, |index| {
            let mut whole = index.to_vec();
            whole[dim] += first;
            self.at(&whole)
        })
    }

    /// So many of a dimension: without those behind them, or with zeros.
    fn resized(&self, dim: usize, size: u64) -> Self {
        let mut shape = self.shape.clone();
        shape[dim] = size;
        Self::of(&shape, |index| if index[dim] < self.shape[dim] { self.at(index) } else { 0 })
    }

    fn concat(parts: &[Self], dim: usize) -> Self {
        let mut shape = parts[0].shape.clone();
        let each = shape[dim];
        shape[dim] *= parts.len() as u64;
        Self::of(&shape, |index| {
            let mut local = index.to_vec();
            local[dim] %= each;
            parts[(index[dim] / each) as usize].at(&local)
        })
    }

    fn reduce(parts: &[Self], kind: ReduceKind) -> Self {
        let combine = |a: i64, b: i64| if kind == ReduceKind::Max { a.max(b) } else { a + b };
        let mut total = parts[0].clone();
        for part in &parts[1..] {
            total.numbers.iter_mut().zip(&part.numbers).for_each(|(a, b)| *a = combine(*a, *b));
        }
        total
    }
}

/// The coordinates of a rank, the last axis fastest.
fn coordinates(mesh: &Mesh, rank: usize) -> Vec<u64> {
    let mut rest = rank as u64;
    let mut found = vec![0; mesh.axes.len()];
    for (at, axis) in mesh.axes.iter().enumerate().rev() {
        found[at] = rest % axis.size;
        rest /= axis.size;
    }
    found
}

/// The ranks that differ from `rank` on these axes at most, the first axis slowest.
fn group(mesh: &Mesh, rank: usize, axes: &[AxisId]) -> Vec<usize> {
    let own = coordinates(mesh, rank);
    let ranks = 0..mesh.axes.iter().map(|axis| axis.size as usize).product();
    let mut members: Vec<usize> = ranks
        .filter(|other| {
            let theirs = coordinates(mesh, *other);
            (0..own.len()).all(|at| own[at] == theirs[at] || axes.contains(&AxisId(at as u8)))
        })
        .collect();
    members.sort_by_key(|member| {
        let theirs = coordinates(mesh, *member);
        axes.iter().map(|axis| theirs[axis.0 as usize]).collect::<Vec<_>>()
    });
    members
}

/// The shards after a step, each of which has this shape then.
fn simulate(mesh: &Mesh, shards: &[Shard], step: &Step, shape: &[u64]) -> Vec<Shard> {
    let ranks = 0..shards.len();
    let members = |rank, axes: &[AxisId]| {
        group(mesh, rank, axes).into_iter().map(|other| shards[other].clone()).collect::<Vec<_>>()
    };
    let position =
        |rank, axes: &[AxisId]| group(mesh, rank, axes).iter().position(|other| *other == rank).unwrap() as u64;
    let run = |rank: usize| match step {
        Step::AllGather { dim, axes } => Shard::concat(&members(rank, axes), *dim).resized(*dim, shape[*dim]),
        Step::Slice { dim, axes } => {
            let count = group(mesh, rank, axes).len() as u64;
            shards[rank].resized(*dim, count * shape[*dim]).part(*dim, count, position(rank, axes))
        }
        Step::AllReduce { axes, reduce } => Shard::reduce(&members(rank, axes), *reduce),
        Step::ReduceScatter { dim, axes, reduce } => {
            let members = members(rank, axes);
            let count = members.len() as u64;
            Shard::reduce(&members, *reduce).resized(*dim, count * shape[*dim]).part(*dim, count, position(rank, axes))
        }
        Step::AllToAll { from, to, axes } => {
            let members = members(rank, axes);
            let own = |member: &Shard| member.part(*to, members.len() as u64, position(rank, axes));
            Shard::concat(&members.iter().map(own).collect::<Vec<_>>(), *from)
        }
        Step::Isolate { axis } if coordinates(mesh, rank)[axis.0 as usize] == 0 => shards[rank].clone(),
        Step::Isolate { .. } => Shard { numbers: vec![0; shards[rank].numbers.len()], ..shards[rank].clone() },
    };
    ranks.map(run).collect()
}

/// What a rank holds of the whole tensor under a layout, its terms combined.
fn cut(mesh: &Mesh, whole: &Shard, layout: &Sharding, rank: usize) -> Shard {
    let at = coordinates(mesh, rank);
    let mut part = whole.clone();
    for (dim, axes) in layout.dims.iter().enumerate() {
        let mut rest = &axes[..];
        while let Some(first) = rest.first() {
            // Those that do not divide evenly do so together.
            let together = if part.shape[dim].is_multiple_of(mesh.size(*first)) { 1 } else { rest.len() };
            let count: u64 = rest[..together].iter().map(|axis| mesh.size(*axis)).product();
            let size = part.shape[dim].div_ceil(count);
            let index = |index, axis: &AxisId| index * mesh.size(*axis) + at[axis.0 as usize];
            let place = rest[..together].iter().fold(0, index);
            part = part.resized(dim, count * size).part(dim, count, place);
            rest = &rest[together..];
        }
    }
    part
}

/// Random numbers that a test can repeat.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> i64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % bound) as i64
    }
}

/// Shards of a tensor in a layout: terms of a sum are random but for the last, those of a maximum are
/// smaller but for one.
fn shards(mesh: &Mesh, whole: &Shard, layout: &Sharding, random: &mut Random) -> Vec<Shard> {
    let ranks = mesh.axes.iter().map(|axis| axis.size as usize).product();
    let mut shards: Vec<Option<Shard>> = vec![None; ranks];
    let partial: Vec<AxisId> = layout.partial.iter().map(|(axis, _)| *axis).collect();
    let copied: Vec<AxisId> = (0..mesh.axes.len() as u8)
        .map(AxisId)
        .filter(|axis| layout.dim_of(*axis).is_none() && !partial.contains(axis))
        .collect();
    for rank in 0..ranks {
        if shards[rank].is_some() {
            continue;
        }
        let terms = group(mesh, rank, &partial);
        let part = cut(mesh, whole, layout, rank);
        let mut parts = vec![part.clone(); terms.len()];
        for at in 0..part.numbers.len() {
            let kept = random.below(terms.len() as u64) as usize;
            for term in (0..terms.len()).filter(|term| *term != kept) {
                let number = random.below(100);
                match layout.partial[0].1 {
                    ReduceKind::Max => parts[term].numbers[at] -= number,
                    _ => {
                        parts[term].numbers[at] = number;
                        parts[kept].numbers[at] -= number;
                    }
                }
            }
        }
        for (term, part) in terms.into_iter().zip(parts) {
            group(mesh, term, &copied).into_iter().for_each(|copy| shards[copy] = Some(part.clone()));
        }
    }
    shards.into_iter().flatten().collect()
}

/// One conversion, by small numbers that shrink well.
#[derive(Clone, Debug)]
struct Case {
    sizes: Vec<u64>,
    rank: usize,
    /// Per axis: a dimension, or a partial value, or copies; and its place among the axes of its dimension.
    from: Vec<(usize, u8)>,
    to: Vec<(usize, u8)>,
    kinds: (bool, bool),
    scale: Vec<u64>,
    seed: u64,
}

fn cases() -> impl proptest::strategy::Strategy<Value = Case> {
    (1..=3usize, 1..=3usize).prop_flat_map(|(axes, rank)| {
        let choices = || prop::collection::vec((0..rank + 2, any::<u8>()), axes);
        let sizes = prop::collection::vec(2..=4u64, axes);
        let scale = prop::collection::vec(1..=2u64, rank);
        (sizes, choices(), choices(), any::<(bool, bool)>(), scale, any::<u64>())
            .prop_map(move |(sizes, from, to, kinds, scale, seed)| Case { sizes, rank, from, to, kinds, scale, seed })
    })
}

impl Case {
    fn mesh(&self) -> Mesh {
        let mut mesh = Mesh::default();
        for size in &self.sizes {
            mesh.push(Family::Tensor, *size);
        }
        mesh
    }

    fn layout(&self, choices: &[(usize, u8)], kind: ReduceKind) -> Sharding {
        let mut layout = Sharding::replicated(self.rank);
        let mut order: Vec<usize> = (0..choices.len()).collect();
        order.sort_by_key(|axis| choices[*axis].1);
        for axis in order {
            match choices[axis].0 {
                dim if dim < self.rank => layout.dims[dim].push(AxisId(axis as u8)),
                dim if dim == self.rank => layout.add_partial(AxisId(axis as u8), kind),
                _ => {}
            }
        }
        layout
    }

    /// Both layouts. A maximum can be kept, or resolved, but not made.
    fn ends(&self) -> (Sharding, Sharding) {
        let kind = |is_max: bool| if is_max { ReduceKind::Max } else { ReduceKind::Sum };
        let from = self.layout(&self.from, kind(self.kinds.0));
        let mut to = self.layout(&self.to, kind(self.kinds.0 && self.kinds.1));
        if self.kinds.0 && self.kinds.1 {
            to.partial.retain(|(axis, _)| from.partial_over(*axis).is_some());
        }
        (from, to)
    }

    fn shape(&self, mesh: &Mesh, ends: [&Sharding; 2]) -> Vec<u64> {
        let extent = |layout: &Sharding, dim: usize| mesh.extent(layout.dims[dim].iter().copied());
        let common = |a: u64, b: u64| (1..=b).map(|times| a * times).find(|size| size.is_multiple_of(b)).unwrap();
        (0..self.rank).map(|dim| self.scale[dim] * common(extent(ends[0], dim), extent(ends[1], dim))).collect()
    }
}

fn local(ty: &TensorType, layout: &Sharding, mesh: &Mesh) -> Bytes {
    ty.with_shape(layout.local_shape(&ty.shape, mesh)).bytes()
}

/// Every step that is possible from a layout, whether it brings the target nearer or not; but an axis
/// comes only where the target has it.
fn all_steps(at: &Sharding, to: &Sharding, shape: &[u64], mesh: &Mesh) -> Vec<Step> {
    let mut steps = Vec::new();
    let free = |axis: &AxisId| at.dim_of(*axis).is_none() && at.partial_over(*axis).is_none();
    let axes = || (0..mesh.axes.len() as u8).map(AxisId);
    for dim in 0..at.dims.len() {
        for first in 0..at.dims[dim].len() {
            let axes = at.dims[dim][first..].to_vec();
            steps.push(Step::AllGather { dim, axes: axes.clone() });
            let others = (0..at.dims.len()).filter(|other| *other != dim);
            steps.extend(others.map(|to| Step::AllToAll { from: dim, to, axes: axes.clone() }));
        }
        steps.extend(axes().filter(free).map(|axis| Step::Slice { dim, axes: vec![axis] }));
    }
    let mut chosen: Vec<Vec<AxisId>> = vec![Vec::new()];
    for _ in 0..at.partial.len() {
        let longer = chosen.iter().flat_map(|list| {
            let more = at.partial.iter().map(|(axis, _)| *axis).filter(|axis| !list.contains(axis));
            more.map(|axis| [list.clone(), vec![axis]].concat()).collect::<Vec<_>>()
        });
        chosen.extend(longer.collect::<Vec<_>>());
    }
    chosen.sort();
    chosen.dedup();
    for axes in chosen.into_iter().filter(|axes| !axes.is_empty()) {
        let reduce = at.partial_over(axes[0]).unwrap();
        steps.extend((0..at.dims.len()).map(|dim| Step::ReduceScatter { dim, axes: axes.clone(), reduce }));
        steps.push(Step::AllReduce { axes, reduce });
    }
    if at.partial.iter().all(|(_, kind)| *kind == ReduceKind::Sum) {
        steps.extend(axes().filter(free).map(|axis| Step::Isolate { axis }));
    }
    let is_wanted = |next: &Sharding| {
        let mut dims = (0..at.dims.len()).flat_map(|dim| next.dims[dim].iter().map(move |axis| (dim, *axis)));
        let mut terms = next.partial.iter().map(|(axis, _)| *axis);
        dims.all(|(dim, axis)| at.dims[dim].contains(&axis) || to.dims[dim].contains(&axis))
            && terms.all(|axis| at.partial_over(axis).is_some() || to.partial_over(axis).is_some())
    };
    steps.retain(|step| {
        let next = step.apply(at);
        next.is_even(shape, mesh) && is_wanted(&next)
    });
    steps
}

/// The cost of the cheapest path of at most `length` steps, from a layout on the way between two, that stays below `bound`.
fn brute_force(
    ty: &TensorType,
    at: &Sharding,
    [from, to]: [&Sharding; 2],
    mesh: &Mesh,
    length: usize,
    bound: f64,
) -> Option<f64> {
    if at == to {
        return (bound > 0.0).then_some(0.0);
    }
    if length == 0 {
        return None;
    }
    let mut best: Option<f64> = None;
    for step in all_steps(at, to, &ty.shape, mesh) {
        let next = step.apply(at);
        let cost = rough_cost(&step, local(ty, at, mesh), mesh) + handed(ty, (&step, [at, &next]), [from, to], mesh);
        let bound = best.unwrap_or(bound);
        if cost >= bound {
            continue;
        }
        let rest = brute_force(ty, &next, [from, to], mesh, length - 1, bound - cost);
        if let Some(total) = rest.map(|rest| rest + cost).filter(|total| *total < bound) {
            best = Some(total);
        }
    }
    best
}

/// Carries the path between two layouts out.
fn check(mesh: &Mesh, (from, to): (&Sharding, &Sharding), shape: Vec<u64>, seed: u64) -> Result<(), TestCaseError> {
    let ty = TensorType::new(DType::F32, shape);
    let cost = |step: &Step, bytes: Bytes| rough_cost(step, bytes, mesh);
    let steps = path(&ty, from, to, mesh, &cost);
    prop_assert!(steps.is_some(), "no way from {from:?} to {to:?}");
    let mut random = Random(seed);
    let whole = Shard::of(&ty.shape, |_| random.below(1000) - 500);
    let mut held = shards(mesh, &whole, from, &mut random);
    let mut layout = from.clone();
    for step in steps.unwrap() {
        let next = step.apply(&layout);
        prop_assert_ne!(&next, &layout, "{:?} does nothing", step);
        prop_assert_eq!(next.check(&ty.shape, mesh), Ok(()));
        held = simulate(mesh, &held, &step, &next.local_shape(&ty.shape, mesh));
        layout = next;
    }
    prop_assert_eq!(&layout, &normalize(to, mesh));
    let partial: Vec<AxisId> = to.partial.iter().map(|(axis, _)| *axis).collect();
    for rank in 0..held.len() {
        let terms: Vec<Shard> = group(mesh, rank, &partial).into_iter().map(|term| held[term].clone()).collect();
        let kind = to.partial.first().map_or(ReduceKind::Sum, |(_, kind)| *kind);
        prop_assert_eq!(Shard::reduce(&terms, kind), cut(mesh, &whole, to, rank), "rank {}", rank);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_path_gives_what_cutting_the_whole_gives(case in cases()) {
        let mesh = case.mesh();
        let (from, to) = case.ends();
        check(&mesh, (&from, &to), case.shape(&mesh, [&from, &to]), case.seed)?;
    }

    #[test]
    fn a_path_of_uneven_parts_does_too(case in cases()) {
        let case = Case { kinds: (false, false), ..case };
        let mesh = case.mesh();
        let (from, to) = case.ends();
        let mut random = Random(case.seed);
        let mut size = |dim: usize| {
            let fits = |size: &u64| [&from, &to].iter().all(|layout| may_cut(*size, &layout.dims[dim], &mesh));
            (1 + random.below(50) as u64..).find(fits).unwrap()
        };
        let shape = (0..case.rank).map(&mut size).collect();
        check(&mesh, (&from, &to), shape, case.seed)?;
    }

    #[test]
    fn no_short_path_is_cheaper(case in cases(), size in 0..3u32) {
        let mesh = case.mesh();
        let (from, to) = case.ends();
        let (from, to) = (normalize(&from, &mesh), normalize(&to, &mesh));
        let mut shape = case.shape(&mesh, [&from, &to]);
        // Small ones cost launches, large ones bytes.
        shape[0] *= 1 << (10 * size);
        let ty = TensorType::new(DType::F32, shape);
        let cost = |step: &Step, bytes: Bytes| rough_cost(step, bytes, &mesh);
        let (found, steps) = priced_path(&ty, &from, &to, &mesh, &cost).unwrap();
        let mut layout = from.clone();
        let mut total = 0.0;
        for step in &steps {
            let next = step.apply(&layout);
            let handed = handed(&ty, (step, [&layout, &next]), [&from, &to], &mesh);
            total += cost(step, local(&ty, &layout, &mesh)) + handed;
            layout = next;
        }
        prop_assert!((total - found).abs() <= 1e-9 * found, "costs {total}, said {found}");
        let bound = found * (1.0 - 1e-9);
        if let Some(cheaper) = brute_force(&ty, &from, [&from, &to], &mesh, 3, bound) {
            prop_assert!(false, "{steps:?} cost {found}, but there is a path of {cheaper}");
        }
    }
}
