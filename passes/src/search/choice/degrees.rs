//! How many ways each kind of parallelism divides the step: what the mesh and the text of a choice
//! follow from.

use super::pins::Pins;
use crate::search::error::PlanError;
use shardc_ir::{Family, Mesh};

/// Families that a choice names even where they have one coordinate.
const ALWAYS_NAMED: [Family; 2] = [Family::Data, Family::Tensor];

/// The degrees of one candidate; a family that is not given has one coordinate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Degrees {
    /// Per family over ranks, the sizes of its axes, none of size 1.
    sizes: [Vec<u64>; Family::ALL.len()],
    /// Sequences per data rank per microbatch.
    pub microbatch: u64,
}

impl Degrees {
    /// One rank that runs microbatches of so many sequences.
    pub fn new(microbatch: u64) -> Self {
        Self { sizes: Default::default(), microbatch }
    }

    /// The same with a family divided over axes of these sizes.
    pub fn with(mut self, family: Family, sizes: &[u64]) -> Self {
        self.sizes[family as usize] = sizes.iter().copied().filter(|size| *size > 1).collect();
        self
    }

    /// The degrees of a plan, by its choice.
    ///
    /// # Errors
    /// A text that is no choice.
    pub fn of_choice(choice: &str) -> Result<Self, PlanError> {
        let pins = Pins::parse(choice)?;
        let own = Self::new(pins.microbatch.unwrap_or(1));
        Ok(pins.axes.iter().fold(own, |degrees, (family, sizes)| degrees.with(*family, sizes)))
    }

    /// On twice as many ranks: with twice the data ranks, which take as many sequences at a time or half of them; or
    /// with one of the other families twice as wide, in its axes or in one more.
    pub fn doubled(&self) -> Vec<Self> {
        let wider = |family: Family| {
            let mut sizes = self.sizes(family).to_vec();
            sizes.sort_unstable();
            match sizes.first_mut() {
                Some(least) => *least *= 2,
                None => sizes.push(2),
            }
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            self.clone().with(family, &sizes)
        };
        let with_axis = |family: Family| self.clone().with(family, &[self.sizes(family), &[2]].concat());
        let is_open = |family: &Family| *family == Family::Data || self.degree(*family) > 1;
        let mut list: Vec<Self> = Family::ALL.into_iter().filter(is_open).map(wider).collect();
        list.extend(Family::ALL.into_iter().filter(|family| self.sizes(*family).len() > 1).map(with_axis));
        if self.microbatch.is_multiple_of(2) {
            list.push(Self { microbatch: self.microbatch / 2, ..wider(Family::Data) });
        }
        list
    }

    /// Whether others divide the step alike, whatever their microbatches.
    pub fn divide_like(&self, other: &Self) -> bool {
        self.sizes == other.sizes
    }

    /// The sizes of a family's axes.
    pub fn sizes(&self, family: Family) -> &[u64] {
        &self.sizes[family as usize]
    }

    /// The coordinates of a family, over all of its axes.
    pub fn degree(&self, family: Family) -> u64 {
        self.sizes(family).iter().product()
    }

    /// How many axes over ranks the mesh has.
    pub fn axes(&self) -> usize {
        self.sizes.iter().map(Vec::len).sum()
    }

    /// The ranks among which the batch is divided.
    pub fn data(&self) -> u64 {
        Family::DATA.into_iter().map(|family| self.degree(family)).product()
    }

    /// The microbatches of a step of so many sequences.
    pub fn microbatches(&self, batch: u64) -> u64 {
        batch / (self.data() * self.microbatch)
    }

    /// The mesh, without axes of one coordinate: the families, and the microbatches inside the data axes,
    /// since they divide each data rank's sequences.
    pub fn mesh(&self, batch: u64) -> Mesh {
        let mut mesh = Mesh::default();
        for family in Family::ALL {
            let microbatches = [self.microbatches(batch)];
            let sizes = if family.is_time() { &microbatches } else { self.sizes(family) };
            for size in sizes.iter().filter(|size| **size > 1) {
                mesh.push(family, *size);
            }
        }
        mesh
    }

    /// One family as a pin would say it: `tp=2x2` over two axes, `cp=1` where it divides nothing.
    pub fn pin(&self, family: Family) -> String {
        text(family, self.sizes(family))
    }

    /// The degrees as pins would say them: `dp=2,tp=4`, or `tp=2x2` over two axes.
    pub fn text(&self) -> String {
        let named = Family::ALL.into_iter().filter(|family| self.degree(*family) > 1 || ALWAYS_NAMED.contains(family));
        named.map(|family| self.pin(family)).collect::<Vec<_>>().join(",")
    }
}

/// The axes of a family as a pin says them.
pub(super) fn text(family: Family, sizes: &[u64]) -> String {
    match sizes {
        [] => format!("{family}=1"),
        sizes => format!("{family}={}", sizes.iter().map(u64::to_string).collect::<Vec<_>>().join("x")),
    }
}

/// The stages of ZeRO that are tried where parameters are stored in one way.
pub(in crate::search) fn zero_stages(has_copies: bool, microbatches: u64, degrees: &Degrees, pins: &Pins) -> Vec<u64> {
    // Where every rank stores all there are no parts to have replicas of; with one microbatch stage 2 is stage 1.
    let is_kept = |zero: u64| match (has_copies, degrees.degree(Family::Fsdp) > 1) {
        (false, _) => zero == 0,
        (true, has_parts) => (zero > 0 || !has_parts) && (zero != 2 || microbatches > 1),
    };
    (0..=3).filter(|zero| pins.zero.map_or(is_kept(*zero), |pin| pin == *zero)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mesh_and_the_text_follow() {
        let degrees = Degrees::new(2).with(Family::Data, &[4]).with(Family::Tensor, &[2, 2]);
        assert_eq!(degrees.text(), "dp=4,tp=2x2");
        assert_eq!(degrees.mesh(32).to_string(), "dp=4,time mb=4,tp=2,tp_1=2");
        assert_eq!(degrees.clone().with(Family::Pipeline, &[3]).text(), "pp=3,dp=4,tp=2x2");
        let hybrid = Degrees::new(1).with(Family::Data, &[2]).with(Family::Fsdp, &[4]).with(Family::Context, &[3]);
        assert_eq!((hybrid.text().as_str(), hybrid.data()), ("dp=2,fsdp=4,cp=3,tp=1", 8));
        assert_eq!(hybrid.mesh(16).to_string(), "dp=2,fsdp=4,time mb=2,cp=3");
        assert_eq!(Degrees::new(2).with(Family::Data, &[1]).mesh(2).to_string(), "");
        let of = |degrees: &Degrees| format!("{},zero=1,microbatch={}", degrees.text(), degrees.microbatch);
        for degrees in [degrees, hybrid] {
            assert_eq!(Degrees::of_choice(&of(&degrees)).unwrap(), degrees);
        }
        let doubled: Vec<String> =
            Degrees::new(2).with(Family::Data, &[2]).with(Family::Tensor, &[4, 2]).doubled().iter().map(of).collect();
        assert_eq!(
            doubled,
            [
                "dp=4,tp=4x2,zero=1,microbatch=2",
                "dp=2,tp=4x4,zero=1,microbatch=2",
                "dp=2,tp=4x2x2,zero=1,microbatch=2",
                "dp=4,tp=4x2,zero=1,microbatch=1"
            ]
        );
    }
}
