//! Kinds of ranks: those that run one program on equal devices and take as long for each of its instructions.
//!
//! Programs of ranks in one stage differ in numbers alone, but how long an instruction takes may depend on them: of
//! causal attention whose queries are divided, the rank that has the last part sees the most keys. So a rank's kind is
//! its program, its device and what the instructions take whose seconds depend on its place.

use super::outline::{Outline, Works, place};
use crate::cluster::Cluster;
use shardc_ir::{AxisId, Mesh};
use std::collections::{BTreeMap, BTreeSet};

/// Of each place along some axes, the kind of the ranks there.
type Places = BTreeMap<Vec<u64>, usize>;

/// The most instructions of a step that are simulated, of all kinds of ranks together; at least one kind is.
const MOST_INSTRUCTIONS: usize = 400_000;

/// The kinds of a mesh's ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Kinds {
    /// Per kind, what its instructions need.
    pub works: Vec<Works>,
    /// Per kind, the index of its program.
    pub program: Vec<usize>,
    /// Per kind, the index of its device among those of the cluster.
    pub device: Vec<usize>,
    /// Per rank, its kind.
    pub of_rank: Vec<usize>,
}

impl Kinds {
    /// The kinds of all ranks, of which each runs the program of the index that `program_of` gives.
    ///
    /// Where there are too many to simulate, kinds that take nearly as long become one, each instruction of which takes
    /// what it takes the slowest of them. A rank that is the slowest in all that it does, as the last along the axes
    /// of a causal mask is, stays what it is, and with it the step, in which all wait for it.
    pub fn new(outlines: &[Outline], mesh: &Mesh, cluster: &Cluster, program_of: &dyn Fn(u64) -> usize) -> Self {
        let most = (MOST_INSTRUCTIONS / outlines.iter().map(Outline::instructions).sum::<usize>().max(1)).max(1);
        let mut kinds = Self { works: Vec::new(), program: Vec::new(), device: Vec::new(), of_rank: Vec::new() };
        let devices = cluster.kinds_of_ranks();
        let pair = |rank: u64| (program_of(rank), devices[rank as usize]);
        // What runs where, with the axes on which its seconds depend.
        let mut of_place: BTreeMap<(usize, usize), (&[AxisId], Places)> = BTreeMap::new();
        for (index, device) in (0..mesh.ranks()).map(pair).collect::<BTreeSet<_>>() {
            let priced = &outlines[index].priced[&device];
            let (first, (seconds, places)) = (kinds.works.len(), merged(priced.places.clone(), most));
            kinds.works.extend(seconds.iter().map(|seconds| priced.works_with(seconds)));
            kinds.program.extend(seconds.iter().map(|_| index));
            kinds.device.extend(seconds.iter().map(|_| device));
            let places = places.into_iter().map(|(place, kind)| (place, first + kind)).collect();
            of_place.insert((index, device), (&priced.axes, places));
        }
        let kind = |rank: u64| {
            let (axes, places) = &of_place[&pair(rank)];
            places[&place(&mesh.coordinates(rank, 0), axes)]
        };
        kinds.of_rank = (0..mesh.ranks()).map(kind).collect();
        kinds
    }
}

/// The distinct seconds of some places, at most so many, and which of them each place has.
fn merged(places: Vec<(Vec<u64>, Vec<f64>)>, most: usize) -> (Vec<Vec<f64>>, Places) {
    let mut distinct: Vec<(Vec<f64>, Vec<Vec<u64>>)> = Vec::new();
    for (place, seconds) in places {
        match distinct.iter_mut().find(|(known, _)| *known == seconds) {
            Some((_, places)) => places.push(place),
            None => distinct.push((seconds, vec![place])),
        }
    }
    let sum = |seconds: &[f64]| seconds.iter().sum::<f64>();
    distinct.sort_by(|a, b| sum(&a.0).total_cmp(&sum(&b.0)));
    let (count, most) = (distinct.len(), most.min(distinct.len()));
    let (mut found, mut of_place): (Vec<Vec<f64>>, _) = (Vec::new(), Places::new());
    for (index, (seconds, places)) in distinct.into_iter().enumerate() {
        let kind = index * most / count;
        of_place.extend(places.into_iter().map(|place| (place, kind)));
        match found.get_mut(kind) {
            Some(slowest) => slowest.iter_mut().zip(seconds).for_each(|(own, other)| *own = own.max(other)),
            None => found.push(seconds),
        }
    }
    (found, of_place)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Equal places are one, and what is merged takes what the slowest of it takes.
    #[test]
    fn the_slowest_place_stays_what_it_is() {
        let places = |seconds: &[[f64; 2]]| -> Vec<(Vec<u64>, Vec<f64>)> {
            seconds.iter().enumerate().map(|(at, of)| (vec![at as u64], of.to_vec())).collect()
        };
        let check = |seconds: &[[f64; 2]], most: usize, expect: &[[f64; 2]]| {
            let (found, of_place) = merged(places(seconds), most);
            assert!(found.len() <= most, "{found:?}");
            assert_eq!(of_place.values().map(|kind| found[*kind].as_slice()).collect::<Vec<_>>(), expect);
        };
        check(&[[1.0, 2.0], [2.0, 4.0], [1.0, 2.0]], 8, &[[1.0, 2.0], [2.0, 4.0], [1.0, 2.0]]);
        check(&[[4.0, 8.0], [3.0, 6.0], [2.0, 4.0], [1.0, 2.0]], 2, &[[4.0, 8.0], [4.0, 8.0], [2.0, 4.0], [2.0, 4.0]]);
        check(&[[1.0, 2.0], [3.0, 1.0], [0.0, 1.0]], 1, &[[3.0, 2.0]; 3]);
    }
}
