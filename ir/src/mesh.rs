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
//! one degree are of one [`Family`].

use serde::{Deserialize, Serialize};
use std::fmt;

/// What an axis is for: a parallel dimension of the step. What each of them may divide is the planner's to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// `pp`: the stages of a pipeline.
    Pipeline,
    /// `dp`: data ranks.
    Data,
    /// `fsdp`: data ranks of one replica, which store parameters in parts (fully sharded data parallel).
    Fsdp,
    /// `mb`: the microbatches of a step, one after the other on the same ranks.
    Microbatch,
    /// `ep`: ranks among which experts are divided.
    Expert,
    /// `ring`: context ranks that hand keys and values round a ring.
    Ring,
    /// `ulysses`: context ranks that divide attention in heads.
    Ulysses,
    /// `cp`: context ranks, which divide the sequence.
    Context,
    /// `tp`: tensor ranks.
    Tensor,
}

impl Family {
    /// All of them, in the order in which a planned mesh has them: neighbours in the mesh are near in the cluster, so what
    /// talks most is innermost.
    pub const ALL: [Self; 9] = [
        Self::Pipeline,
        Self::Data,
        Self::Fsdp,
        Self::Microbatch,
        Self::Expert,
        Self::Ring,
        Self::Ulysses,
        Self::Context,
        Self::Tensor,
    ];

    /// The families that divide the batch over ranks.
    pub const DATA: [Self; 3] = [Self::Data, Self::Fsdp, Self::Expert];

    /// The families that divide the sequence.
    pub const CONTEXT: [Self; 3] = [Self::Ring, Self::Ulysses, Self::Context];

    /// The name: that of its first axis, and of the pin that asks for its degree.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pipeline => "pp",
            Self::Data => "dp",
            Self::Fsdp => "fsdp",
            Self::Microbatch => "mb",
            Self::Expert => "ep",
            Self::Ring => "ring",
            Self::Ulysses => "ulysses",
            Self::Context => "cp",
            Self::Tensor => "tp",
        }
    }

    /// The family of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.name() == name)
    }

    /// Those whose axes run over ranks.
    pub fn over_ranks() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|family| !family.is_time())
    }

    /// Whether its axes run over time instead of over ranks.
    pub fn is_time(self) -> bool {
        self == Self::Microbatch
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One axis of a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "NamedAxis", into = "NamedAxis")]
pub struct Axis {
    /// What it is for.
    pub family: Family,
    /// How many axes of its family come before it.
    pub number: u32,
    /// How many coordinates it has; at least 1.
    pub size: u64,
}

impl Axis {
    /// The name: `dp`, `tp`, `tp_1`.
    pub fn name(&self) -> String {
        match self.number {
            0 => self.family.to_string(),
            number => format!("{}_{number}", self.family),
        }
    }

    /// The axis of a name, as `tp_1`, that is said to run over time or over ranks.
    ///
    /// # Errors
    /// A name that no axis has; an axis over time that is said to be over ranks, or the other way round.
    pub fn parse(name: &str, is_time: bool, size: u64) -> Result<Self, String> {
        let (family, number) = parts(name).ok_or_else(|| {
            let known = Family::ALL.map(Family::name).join(", ");
            format!("`{name}` is no axis: it is named {known}, or as one more of these, `tp_1`")
        })?;
        match (family.is_time(), is_time) {
            (true, false) => Err(format!("axis `{name}` runs over time: write `time {name}`")),
            (false, true) => Err(format!("axis `{name}` runs over ranks, not over time")),
            _ => Ok(Self { family, number, size }),
        }
    }
}

/// The family and the number that a name tells.
fn parts(name: &str) -> Option<(Family, u32)> {
    let Some((family, number)) = name.split_once('_') else { return Some((Family::from_name(name)?, 0)) };
    let counted = number.parse().ok().filter(|count: &u32| *count > 0 && count.to_string() == number)?;
    Some((Family::from_name(family)?, counted))
}

/// An axis as files have it.
#[derive(Serialize, Deserialize)]
struct NamedAxis {
    name: String,
    size: u64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Space,
    Time,
}

impl From<Axis> for NamedAxis {
    fn from(axis: Axis) -> Self {
        let kind = if axis.family.is_time() { Kind::Time } else { Kind::Space };
        Self { name: axis.name(), size: axis.size, kind }
    }
}

impl TryFrom<NamedAxis> for Axis {
    type Error = String;

    fn try_from(of: NamedAxis) -> Result<Self, String> {
        Self::parse(&of.name, of.kind == Kind::Time, of.size)
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
    pub fn push(&mut self, family: Family, size: u64) -> AxisId {
        let number = self.family(family).len() as u32;
        self.axes.push(Axis { family, number, size });
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
        let (family, number) = parts(name)?;
        self.ids().find(|id| (self.axis(*id).family, self.axis(*id).number) == (family, number))
    }

    /// The pipeline stage of a rank; 0 where there are no stages.
    pub fn stage_of(&self, rank: u64) -> u64 {
        self.family(Family::Pipeline).first().map_or(0, |axis| self.coordinates(rank, 0)[axis.0 as usize])
    }

    /// All axes of a family, outermost first: of tensor ranks `tp` and `tp_1`.
    pub fn family(&self, family: Family) -> Vec<AxisId> {
        self.ids().filter(|id| self.axis(*id).family == family).collect()
    }

    /// The product of the sizes of some axes.
    pub fn extent(&self, axes: impl IntoIterator<Item = AxisId>) -> u64 {
        axes.into_iter().map(|id| self.size(id)).product()
    }

    /// The product of the sizes of a family's axes; 1 if the mesh has none.
    pub fn degree(&self, family: Family) -> u64 {
        self.extent(self.family(family))
    }

    /// The number of ranks.
    pub fn ranks(&self) -> u64 {
        self.extent(self.ids().filter(|id| !self.is_time(*id)))
    }

    /// The number of microbatches.
    pub fn microbatches(&self) -> u64 {
        self.extent(self.ids().filter(|id| self.is_time(*id)))
    }

    /// Whether the axis runs over time.
    pub fn is_time(&self, id: AxisId) -> bool {
        self.axis(id).family.is_time()
    }

    /// The coordinate of a rank (space axes) and a microbatch (time axes) on every axis.
    pub fn coordinates(&self, rank: u64, microbatch: u64) -> Vec<u64> {
        let mut rest = [rank, microbatch];
        let mut coordinates = vec![0; self.axes.len()];
        for (index, axis) in self.axes.iter().enumerate().rev() {
            let rest = &mut rest[usize::from(axis.family.is_time())];
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
            if !axis.family.is_time() {
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
            let time = if axis.family.is_time() { "time " } else { "" };
            write!(f, "{comma}{time}{}={}", axis.name(), axis.size)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_known_by_their_names() {
        let mut mesh = Mesh::default();
        for family in Family::ALL {
            assert_eq!(Family::from_name(family.name()), Some(family));
            let axes = [mesh.push(family, 2), mesh.push(family, 3)];
            assert_eq!(mesh.family(family), axes);
            for axis in axes {
                assert_eq!(mesh.find(&mesh.axis(axis).name()), Some(axis));
            }
        }
        let written = serde_json::to_string(&mesh).unwrap();
        assert_eq!(serde_json::from_str::<Mesh>(&written).unwrap(), mesh);
        let refused = |name: &str, kind: &str| {
            let text = format!(r#"[{{"name": "{name}", "size": 2, "kind": "{kind}"}}]"#);
            serde_json::from_str::<Mesh>(&text).unwrap_err().to_string()
        };
        for name in ["", "sp", "tp_", "tp_0", "tp_01", "tp_1_2", "tp_+1", "TP"] {
            assert!(refused(name, "space").contains(&format!("`{name}` is no axis")), "{name}");
            assert_eq!(mesh.find(name), None, "{name}");
        }
        assert!(refused("mb", "space").contains("axis `mb` runs over time"));
        assert!(refused("dp", "time").contains("axis `dp` runs over ranks"));
    }

    #[test]
    fn groups_follow_the_axes() {
        let mut mesh = Mesh::default();
        let dp = mesh.push(Family::Data, 3);
        mesh.push(Family::Microbatch, 4);
        let tp = mesh.push(Family::Tensor, 2);
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
