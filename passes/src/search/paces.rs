//! How long a microbatch takes, by what divides it.
//!
//! Meshes that differ in their stages and data ranks alone have the same microbatches on the axes that are searched:
//! the same layouts are the fastest, and take as long. Larger microbatches take less for each of their samples, each
//! time by less. So what was found on some meshes tells of others that they are too slow, where their
//! [bounds](super::bound) are too low for that, as with experts beside several tensor axes. This leaves meshes out, and
//! is no part of what the search certifies.

use crate::cost::collective::Group;
use crate::shard::family::open_axes;
use crate::shard::tensor::Placed;
use shardc_ir::Family;
use std::collections::BTreeMap;

/// Samples of larger microbatches may take less than those of the largest that is known by so many times as much as if every
/// microbatch took some seconds for itself and some for each of its samples.
const MORE: f64 = 2.0;

/// The axes that divide a microbatch: of each the family and the ranks.
type Axes = Vec<(Family, Group)>;

/// What is known of the passes of a microbatch.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// What they take, without what data ranks say to each other.
    seconds: f64,
    /// Whether none of the plans of one stage fitted that have no values away from the devices.
    is_short: bool,
}

/// What is known, by the axes and by the samples of a microbatch on a rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Paces(BTreeMap<Axes, BTreeMap<u64, Pace>>);

impl Paces {
    /// The seconds that a microbatch of a placed mesh is expected to take, of so many samples on a rank.
    pub fn expected(&self, placed: &Placed<'_>, samples: u64) -> Option<f64> {
        let known = self.0.get(&axes(placed)?)?;
        known.get(&samples).map(|pace| pace.seconds).or_else(|| of_more(known, samples))
    }

    /// The same if no plan of one stage is expected to fit, as none did of smaller microbatches.
    pub fn expected_short(&self, placed: &Placed<'_>, samples: u64) -> Option<f64> {
        let known = self.0.get(&axes(placed)?)?;
        let (_, before) = known.range(..samples).next_back()?;
        of_more(known, samples).filter(|_| before.is_short)
    }

    /// Learns what it takes.
    pub fn learn(&mut self, placed: &Placed<'_>, samples: u64, seconds: f64, is_short: bool) {
        if let Some(axes) = axes(placed) {
            self.0.entry(axes).or_default().insert(samples, Pace { seconds, is_short });
        }
    }

    /// Takes others in.
    pub fn join(&mut self, other: Self) {
        other.0.into_iter().for_each(|(axes, known)| self.0.entry(axes).or_default().extend(known));
    }
}

/// The axes that are searched of a placed mesh, if all its ranks are alike.
fn axes(placed: &Placed<'_>) -> Option<Axes> {
    let (mesh, cluster) = (placed.mesh, placed.cluster);
    let of = |axis| (mesh.axis(axis).family, Group::new(mesh, &[axis], cluster));
    (cluster.parts.len() <= 1).then(|| open_axes(mesh).into_iter().map(of).collect())
}

/// The least that a microbatch is expected to take which has more samples than those that are known, by the two largest.
fn of_more(known: &BTreeMap<u64, Pace>, samples: u64) -> Option<f64> {
    let mut largest = known.range(..samples).rev().map(|(size, pace)| (*size as f64, pace.seconds / *size as f64));
    let ((large, least), (small, most)) = (largest.next()?, largest.next()?);
    let left = (most - least).max(0.0) * small / (large - small);
    Some(samples as f64 * (least - MORE * left).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::search::{Degrees, fastest};
    use crate::shard::prepare::prepare;
    use crate::synthetic::{Sizes, residual};
    use shardc_ir::{DType, NoScratch};

    #[test]
    fn microbatches_take_as_long_wherever_they_are_divided_alike() {
        let graph = residual(Sizes { seed: 3, nodes: 60, batch: 64, width: 1024, dtype: DType::Bf16 }).unwrap();
        let (prepared, cluster) = (prepare(&graph, 64, &NoScratch), Cluster::parse("h100:8x2", "h200").unwrap());
        let mut paces = Paces::default();
        for (pp, dp) in [(1, 8), (2, 4), (4, 2)] {
            let mesh = Degrees::new(2)
                .with(Family::Pipeline, &[pp])
                .with(Family::Data, &[dp])
                .with(Family::Tensor, &[2])
                .mesh(64);
            let (placed, shape) = fastest(&prepared, &mesh, &cluster).unwrap().unwrap();
            let expected = paces.expected(&placed, 2).unwrap_or(shape.pace());
            assert!((shape.pace() / expected - 1.0).abs() < 0.01, "pp={pp}: {} for {expected}", shape.pace());
            assert_eq!(paces.expected_short(&placed, 4), None);
            paces.learn(&placed, 2, shape.pace(), true);
        }
    }

    #[test]
    fn samples_of_larger_microbatches_take_less_by_less() {
        let of = |seconds: f64| Pace { seconds, is_short: false };
        let mut known = BTreeMap::from([(2, of(3.0))]);
        assert_eq!(of_more(&known, 4), None);
        known.insert(4, of(5.0));
        // A second for each, and one for all: samples take 1.5 and 1.25 s, and twice as much less at the most.
        assert_eq!(of_more(&known, 8), Some(8.0 * 0.75));
        assert_eq!(of_more(&known, 4), None);
    }
}
