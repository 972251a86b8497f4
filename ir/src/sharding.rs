//! How a value lies over the mesh, and what a node does with each axis.
//!
//! A [`Sharding`] lists, per dimension, the axes that divide it (outermost first), and the axes over which the value is
//! *partial*: each coordinate holds one term, and the value is their reduction. An axis that appears nowhere holds
//! copies.
//!
//! **Uneven parts.** Every shard of a value has one shape. An axis may not divide what the axes outside of it leave of
//! a dimension. Then it and the axes inside of it divide that together: every part is as long as the first ([`cuts`]),
//! and the last parts end with zeros that are no elements of the value. The same holds for each term of a partial
//! value. Factor rules say which operations may have such parts ([`FactorRule::fills`](crate::FactorRule::fills)):
//! parameters, states, their casts, updates and norms. Everything else reads whole values. So ZeRO stores a parameter
//! over any number of ranks, 3 as well as 24. Slots, files and the interfaces of programs know the value alone, without
//! the zeros.
//!
//! Invariants (checked by [`Sharding::check`]): an axis appears at most once; there are more elements than zeros.

use crate::mesh::{AxisId, AxisSet, Mesh};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;

/// How the terms of a partial value combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceKind {
    /// Their sum.
    Sum,
    /// Their maximum.
    Max,
    /// The logarithm of the sum of their exponentials.
    LogSumExp,
}

impl ReduceKind {
    /// The name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::LogSumExp => "logsumexp",
        }
    }

    /// The kind of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Sum, Self::Max, Self::LogSumExp].into_iter().find(|kind| kind.name() == name)
    }
}

/// What an axis does to a dimension, or several do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut<'a> {
    /// The axes, outermost first: one, where it divides evenly.
    pub axes: &'a [AxisId],
    /// Their coordinates.
    pub count: u64,
    /// How long what they cut is: a part of the axes outside of them, or the dimension.
    pub whole: u64,
    /// How long their parts are.
    pub part: u64,
}

impl Cut<'_> {
    /// Whether the parts make up the whole, with nothing at the end of the last one.
    pub fn is_even(&self) -> bool {
        self.part * self.count == self.whole
    }

    /// Whether what fills the parts is less than what they have of the whole.
    pub fn is_dense(&self) -> bool {
        self.part * self.count < 2 * self.whole
    }
}

/// What axes, outermost first, do to a dimension of this size: each divides what those outside of it leave; from the
/// first on that does not do so evenly, all together.
pub fn cuts<'a>(size: u64, axes: &'a [AxisId], mesh: &'a Mesh) -> impl Iterator<Item = Cut<'a>> + 'a {
    let (mut whole, mut rest) = (size, axes);
    std::iter::from_fn(move || {
        let count = mesh.size(*rest.first()?);
        let cut = match whole.is_multiple_of(count) {
            true => Cut { axes: &rest[..1], count, whole, part: whole / count },
            false => {
                let count = mesh.extent(rest.iter().copied());
                Cut { axes: rest, count, whole, part: whole.div_ceil(count) }
            }
        };
        (whole, rest) = (cut.part, &rest[cut.axes.len()..]);
        Some(cut)
    })
}

/// Whether axes may divide a dimension of this size: evenly, or over space and so that less is filled than there is.
pub fn may_cut(size: u64, axes: &[AxisId], mesh: &Mesh) -> bool {
    let is_space = |cut: &Cut<'_>| !cut.axes.iter().any(|axis| mesh.is_time(*axis));
    cuts(size, axes, mesh).all(|cut| cut.is_even() || (cut.is_dense() && is_space(&cut)))
}

/// The layout of one value over the axes of a mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Sharding {
    /// Per dimension, the axes that divide it, outermost first.
    pub dims: Vec<Vec<AxisId>>,
    /// The axes over which the value is a partial result, in the order of their ids.
    pub partial: Vec<(AxisId, ReduceKind)>,
}

impl Sharding {
    /// The layout in which every coordinate holds the whole value of this rank.
    pub fn replicated(rank: usize) -> Self {
        Self { dims: vec![Vec::new(); rank], partial: Vec::new() }
    }

    /// The axes that divide some dimension.
    pub fn dim_axes(&self) -> AxisSet {
        self.dims.iter().flatten().copied().collect()
    }

    /// The axes over which the value is partial.
    pub fn partial_axes(&self) -> AxisSet {
        self.partial.iter().map(|(axis, _)| *axis).collect()
    }

    /// The reduction over an axis, if the value is partial over it.
    pub fn partial_over(&self, axis: AxisId) -> Option<ReduceKind> {
        self.partial.iter().find(|(partial, _)| *partial == axis).map(|(_, kind)| *kind)
    }

    /// The dimension that an axis divides.
    pub fn dim_of(&self, axis: AxisId) -> Option<usize> {
        self.dims.iter().position(|axes| axes.contains(&axis))
    }

    /// Adds a partial axis, keeping the order.
    pub fn add_partial(&mut self, axis: AxisId, kind: ReduceKind) {
        self.partial.push((axis, kind));
        self.partial.sort_unstable();
    }

    /// The same layout with no partial axis.
    pub fn resolved(&self) -> Self {
        Self { dims: self.dims.clone(), partial: Vec::new() }
    }

    /// The shape one coordinate holds, with the zeros that the last parts end with.
    pub fn local_shape(&self, shape: &[u64], mesh: &Mesh) -> Vec<u64> {
        let part = |(size, axes): (&u64, &Vec<AxisId>)| {
            let extent = mesh.extent(axes.iter().copied());
            match size.is_multiple_of(extent) {
                true => size / extent,
                false => cuts(*size, axes, mesh).last().map_or(*size, |cut| cut.part),
            }
        };
        shape.iter().zip(&self.dims).map(part).collect()
    }

    /// The part of the value that a coordinate holds: per dimension, its first index and its length. It may be shorter
    /// than [`local_shape`](Self::local_shape), or empty: behind it there are zeros.
    pub fn slice(&self, shape: &[u64], mesh: &Mesh, coordinates: &[u64]) -> Vec<(u64, u64)> {
        let mut parts = Vec::with_capacity(shape.len());
        for (size, axes) in shape.iter().zip(&self.dims) {
            let (mut first, mut length) = (0, *size);
            for cut in cuts(*size, axes, mesh) {
                let before = cut.whole.min(mesh.index(cut.axes, coordinates) * cut.part);
                first += before;
                length = cut.part.min(cut.whole - before);
            }
            parts.push((first, length));
        }
        parts
    }

    /// Whether every axis divides its dimension of a value of this shape evenly.
    pub fn is_even(&self, shape: &[u64], mesh: &Mesh) -> bool {
        shape.iter().zip(&self.dims).all(|(size, axes)| size.is_multiple_of(mesh.extent(axes.iter().copied())))
    }

    /// Why this layout is not legal for a value of this shape on this mesh, if it is not.
    pub fn check(&self, shape: &[u64], mesh: &Mesh) -> Result<(), String> {
        if self.dims.len() != shape.len() {
            return Err(format!("the layout has {} dimensions and the value {}", self.dims.len(), shape.len()));
        }
        let mut seen = AxisSet::EMPTY;
        let partial = self.partial.iter().map(|(axis, _)| *axis);
        for axis in self.dims.iter().flatten().copied().chain(partial) {
            if axis.0 as usize >= mesh.axes.len() {
                return Err(format!("axis {} is not of this mesh", axis.0));
            }
            if seen.contains(axis) {
                return Err(format!("axis `{}` appears twice", mesh.axis(axis).name()));
            }
            seen = seen.with(axis);
        }
        for (dim, (size, axes)) in shape.iter().zip(&self.dims).enumerate() {
            if !may_cut(*size, axes, mesh) {
                let extent = mesh.extent(axes.iter().copied());
                return Err(format!("dimension {dim} of size {size} does not divide into {extent} parts"));
            }
        }
        Ok(())
    }

    /// The text of one dimension's axes: `@dp.mb`, or nothing.
    pub fn dim_text(&self, dim: usize, mesh: &Mesh) -> String {
        axes_text(self.dims.get(dim).map_or(&[], Vec::as_slice), mesh, "@")
    }

    /// The text of the partial axes: `/sum(tp)`, or nothing.
    pub fn partial_text(&self, mesh: &Mesh) -> String {
        let mut text = String::new();
        for (axis, kind) in &self.partial {
            let _ = write!(text, "/{}({})", kind.name(), mesh.axis(*axis).name());
        }
        text
    }
}

/// `prefix` and the names of the axes joined by dots; nothing if there is no axis.
pub fn axes_text(axes: &[AxisId], mesh: &Mesh, prefix: &str) -> String {
    if axes.is_empty() {
        return String::new();
    }
    let names: Vec<_> = axes.iter().map(|axis| mesh.axis(*axis).name()).collect();
    format!("{prefix}{}", names.join("."))
}

/// What a node does with one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Every coordinate computes the same.
    Replicate,
    /// The coordinates divide this factor (its index in the node's rule).
    Factor(usize),
    /// The operands of this linear set (its index in the node's rule) are partial sums over the
    /// axis, and so are the results.
    Pass(usize),
}

/// What a node does with every axis of the mesh; axes that are not named are replicated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Strategy {
    /// Per factor (its index in the node's rule), the axes that divide it, outermost first.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub factors: BTreeMap<usize, Vec<AxisId>>,
    /// Per axis whose partial sums pass through, the index of the linear set in the node's rule.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pass: BTreeMap<AxisId, usize>,
}

impl Strategy {
    /// What this strategy does with an axis.
    pub fn choice(&self, axis: AxisId) -> Choice {
        if let Some(set) = self.pass.get(&axis) {
            return Choice::Pass(*set);
        }
        let factor = self.factors.iter().find(|(_, axes)| axes.contains(&axis));
        factor.map_or(Choice::Replicate, |(factor, _)| Choice::Factor(*factor))
    }

    /// The strategy that also does `choice` with `axis`, as the innermost axis of its factor.
    pub fn with(&self, axis: AxisId, choice: Choice) -> Self {
        let mut strategy = self.clone();
        match choice {
            Choice::Replicate => {}
            Choice::Factor(factor) => strategy.factors.entry(factor).or_default().push(axis),
            Choice::Pass(set) => {
                strategy.pass.insert(axis, set);
            }
        }
        strategy
    }

    /// The strategy that replicates over `axis`.
    pub fn without(&self, axis: AxisId) -> Self {
        let mut strategy = self.clone();
        strategy.pass.remove(&axis);
        strategy.factors.values_mut().for_each(|axes| axes.retain(|other| *other != axis));
        strategy.factors.retain(|_, axes| !axes.is_empty());
        strategy
    }

    /// The axes of a factor, outermost first.
    pub fn axes(&self, factor: usize) -> &[AxisId] {
        self.factors.get(&factor).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Family;

    #[test]
    fn uneven_parts_are_of_one_shape_and_cover_the_value_once() {
        let mut mesh = Mesh::default();
        let (tp, dp) = (mesh.push(Family::Tensor, 2), mesh.push(Family::Data, 3));
        let of = |rows: &[AxisId]| Sharding { dims: vec![rows.to_vec(), Vec::new()], partial: Vec::new() };
        let parts = |rows: &[AxisId], size: u64| {
            let (layout, shape) = (of(rows), [size, 5]);
            assert_eq!(layout.check(&shape, &mesh), Ok(()));
            let part = |rank| layout.slice(&shape, &mesh, &mesh.coordinates(rank, 0))[0];
            (layout.local_shape(&shape, &mesh)[0], [0, 1, 2, 3, 4, 5].map(part))
        };
        // What the tensor ranks have is divided, or all of it by both together.
        assert_eq!(parts(&[tp, dp], 16), (3, [(0, 3), (3, 3), (6, 2), (8, 3), (11, 3), (14, 2)]));
        assert_eq!(parts(&[dp, tp], 16), (3, [(0, 3), (6, 3), (12, 3), (3, 3), (9, 3), (15, 1)]));
        assert_eq!(parts(&[dp], 5), (2, [(0, 2), (2, 2), (4, 1), (0, 2), (2, 2), (4, 1)]));
        assert_eq!(parts(&[dp], 4), (2, [(0, 2), (2, 2), (4, 0), (0, 2), (2, 2), (4, 0)]));
        // More than half must be elements.
        assert!(of(&[dp]).check(&[1, 5], &mesh).is_err());
        assert!(of(&[tp, dp]).check(&[3, 5], &mesh).is_err());
        let all: Vec<u64> = cuts(16, &[dp, tp], &mesh).map(|cut| cut.part).collect();
        assert_eq!(all, [3]);
    }
}
