//! The mesh: named axes over the ranks, and over time.
//!
//! A *space* axis divides the ranks; the first axis of the list is the outermost, so ranks that
//! differ only in the last space axis are neighbours. A *time* axis divides the step into
//! microbatches: sharding the batch over it is gradient accumulation, and a value that is partial
//! over it is summed by an accumulator instead of a collective. So microbatching needs no
//! mechanism of its own.
//!
//! A user's degree that is not prime (tensor parallel 4) may be several axes of the mesh
//! (`tp`, `tp_1`), so that a dimension that divides only by 2 can still take one of them. Axes of
//! one degree share the name before the underscore, the [`Axis::family`].

use serde::{Deserialize, Serialize};
use std::fmt;

/// Whether an axis runs over ranks or over microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AxisKind {
    /// Over ranks.
    Space,
    /// Over microbatches of one step, one after the other on the same ranks.
    Time,
}

/// One named axis of a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Axis {
    /// The name: `dp`, `tp`, `tp_1`, `mb`.
    pub name: String,
    /// How many coordinates it has; at least 1.
    pub size: u64,
    /// Over ranks or over time.
    pub kind: AxisKind,
}

impl Axis {
    /// The parallel dimension this axis belongs to: the name up to an underscore.
    pub fn family(&self) -> &str {
        self.name.split('_').next().unwrap_or(&self.name)
    }
}

/// The index of an axis in its mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AxisId(pub u8);

/// A set of axes of one mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AxisSet(pub u32);

impl AxisSet {
    /// The set with no axis.
    pub const EMPTY: AxisSet = AxisSet(0);

    /// The set with one axis more.
    pub fn with(self, axis: AxisId) -> Self {
        Self(self.0 | 1 << axis.0)
    }

    /// Whether the axis is in the set.
    pub fn contains(self, axis: AxisId) -> bool {
        self.0 & (1 << axis.0) != 0
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The axes, outermost first.
    pub fn iter(self) -> impl Iterator<Item = AxisId> {
        (0..32).map(AxisId).filter(move |axis| self.contains(*axis))
    }
}

impl FromIterator<AxisId> for AxisSet {
    fn from_iter<I: IntoIterator<Item = AxisId>>(axes: I) -> Self {
        axes.into_iter().fold(Self::EMPTY, Self::with)
    }
}

/// The axes, outermost first. The product of the space axes is the number of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Mesh {
    /// The axes, outermost first; names are unique; at most 32.
    pub axes: Vec<Axis>,
}

impl Mesh {
    /// Adds an axis as the innermost one.
    pub fn push(&mut self, name: impl Into<String>, size: u64, kind: AxisKind) -> AxisId {
        self.axes.push(Axis { name: name.into(), size, kind });
        AxisId(self.axes.len() as u8 - 1)
    }

    /// Every axis id, outermost first.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = AxisId> + use<> {
        (0..self.axes.len() as u8).map(AxisId)
    }

    /// The axis of an id.
    pub fn axis(&self, id: AxisId) -> &Axis {
        &self.axes[id.0 as usize]
    }

    /// The size of an axis.
    pub fn size(&self, id: AxisId) -> u64 {
        self.axis(id).size
    }

    /// The axis of a name.
    pub fn find(&self, name: &str) -> Option<AxisId> {
        self.ids().find(|id| self.axis(*id).name == name)
    }

    /// The pipeline stage of a rank; 0 where there are no stages.
    pub fn stage_of(&self, rank: u64) -> u64 {
        self.family("pp").first().map_or(0, |axis| self.coordinates(rank, 0)[axis.0 as usize])
    }

    /// All axes of a family, outermost first: `family("tp")` gives `tp` and `tp_1`.
    pub fn family(&self, family: &str) -> Vec<AxisId> {
        self.ids().filter(|id| self.axis(*id).family() == family).collect()
    }

    /// The product of the sizes of some axes.
    pub fn extent(&self, axes: impl IntoIterator<Item = AxisId>) -> u64 {
        axes.into_iter().map(|id| self.size(id)).product()
    }

    /// The product of the sizes of a family's axes; 1 if the mesh has none.
    pub fn degree(&self, family: &str) -> u64 {
        self.extent(self.family(family))
    }

    /// The number of ranks.
    pub fn ranks(&self) -> u64 {
        self.extent(self.ids().filter(|id| self.axis(*id).kind == AxisKind::Space))
    }

    /// The number of microbatches.
    pub fn microbatches(&self) -> u64 {
        self.extent(self.ids().filter(|id| self.axis(*id).kind == AxisKind::Time))
    }

    /// Whether the axis runs over time.
    pub fn is_time(&self, id: AxisId) -> bool {
        self.axis(id).kind == AxisKind::Time
    }

    /// The coordinate of a rank (space axes) and a microbatch (time axes) on every axis.
    pub fn coordinates(&self, rank: u64, microbatch: u64) -> Vec<u64> {
        let mut rest = [rank, microbatch];
        let mut coordinates = vec![0; self.axes.len()];
        for (index, axis) in self.axes.iter().enumerate().rev() {
            let rest = &mut rest[usize::from(axis.kind == AxisKind::Time)];
            coordinates[index] = *rest % axis.size;
            *rest /= axis.size;
        }
        coordinates
    }

    /// The place of coordinates among all on some axes, the first of which is outermost.
    pub fn index(&self, axes: &[AxisId], coordinates: &[u64]) -> u64 {
        axes.iter().fold(0, |index, axis| index * self.size(*axis) + coordinates[axis.0 as usize])
    }

    /// The ranks that share `rank`'s coordinates on all axes but `axes`, in the order of their
    /// coordinates on `axes` (the given order, first is outermost).
    pub fn group(&self, rank: u64, axes: &[AxisId]) -> Vec<u64> {
        let mut strides = vec![0u64; self.axes.len()];
        let mut stride = 1;
        for (index, axis) in self.axes.iter().enumerate().rev() {
            if axis.kind == AxisKind::Space {
                strides[index] = stride;
                stride *= axis.size;
            }
        }
        let at = self.coordinates(rank, 0);
        let base: u64 = axes.iter().fold(rank, |base, axis| {
            let index = axis.0 as usize;
            base - at[index] * strides[index]
        });
        let mut ranks = vec![base];
        for axis in axes {
            let (size, stride) = (self.size(*axis), strides[axis.0 as usize]);
            ranks = ranks.iter().flat_map(|rank| (0..size).map(move |c| rank + c * stride)).collect();
        }
        ranks
    }
}

impl Mesh {
    /// The space axes along which some ranks differ from the first of them, outermost first: those of
    /// a group that [`group`](Self::group) gave.
    pub fn axes_between(&self, ranks: &[u64]) -> Vec<AxisId> {
        let Some(first) = ranks.first().map(|rank| self.coordinates(*rank, 0)) else { return Vec::new() };
        let others: Vec<Vec<u64>> = ranks[1..].iter().map(|rank| self.coordinates(*rank, 0)).collect();
        let differs = |axis: &AxisId| others.iter().any(|at| at[axis.0 as usize] != first[axis.0 as usize]);
        self.ids().filter(|axis| !self.is_time(*axis)).filter(differs).collect()
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, axis) in self.axes.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let time = if axis.kind == AxisKind::Time { "time " } else { "" };
            write!(f, "{comma}{time}{}={}", axis.name, axis.size)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_follow_the_axes() {
        let mut mesh = Mesh::default();
        let dp = mesh.push("dp", 3, AxisKind::Space);
        mesh.push("mb", 4, AxisKind::Time);
        let tp = mesh.push("tp", 2, AxisKind::Space);
        assert_eq!(mesh.ranks(), 6);
        assert_eq!(mesh.microbatches(), 4);
        assert_eq!(mesh.coordinates(5, 3), [2, 3, 1]);
        assert_eq!(mesh.group(3, &[tp]), [2, 3]);
        assert_eq!(mesh.group(3, &[dp]), [1, 3, 5]);
        assert_eq!(mesh.group(0, &[tp, dp]), [0, 2, 4, 1, 3, 5]);
        assert_eq!(mesh.axes_between(&mesh.group(4, &[dp])), [dp]);
        assert_eq!(mesh.axes_between(&mesh.group(3, &[tp, dp])), [dp, tp]);
        assert_eq!(mesh.to_string(), "dp=3,time mb=4,tp=2");
    }
}
