//! What messages between stages take, by how far the stages are apart.

use super::Mesh;
use crate::cluster::Cluster;
use crate::cost::collective::{distance, send_over};
use shardc_ir::Family;

impl Mesh<'_> {
    /// Seconds in which so many bytes get from one stage to another that chunks next to each other are on.
    pub fn message(&self, [from, to]: [u64; 2], bytes: f64) -> f64 {
        let (low, high) = (from.min(to), from.max(to));
        let distance = self.distances[if low + 1 == high { low } else { high } as usize];
        if low == high { 0.0 } else { self.send(bytes, distance) }
    }

    /// Seconds in which so many bytes get to another stage that is so far away.
    pub fn send(&self, bytes: f64, distance: usize) -> f64 {
        if bytes > 0.0 { send_over(bytes, distance, self.placed.cluster).0 } else { 0.0 }
    }
}

/// Per stage, how far it is to the next, and from the last to the first: for those of their ranks that are the farthest
/// apart.
pub(super) fn distances(mesh: &shardc_ir::Mesh, cluster: &Cluster) -> Vec<usize> {
    let mut ranks = vec![Vec::new(); mesh.degree(Family::Pipeline) as usize];
    (0..mesh.ranks()).for_each(|rank| ranks[mesh.stage_of(rank) as usize].push(rank));
    let next = ranks.iter().cycle().skip(1);
    let far = |(own, next): (&Vec<u64>, &Vec<u64>)| {
        let all = own.iter().zip(next).map(|(from, to)| distance(*from, *to, cluster));
        all.max().unwrap_or(0)
    };
    ranks.iter().zip(next).map(far).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::Family;

    #[test]
    fn stages_are_as_far_apart_as_their_ranks() {
        let check = |cluster: &str, sizes: [u64; 2], expect: &[usize]| {
            let mut mesh = shardc_ir::Mesh::default();
            [Family::Pipeline, Family::Data].into_iter().zip(sizes).for_each(|(family, size)| {
                mesh.push(family, size);
            });
            assert_eq!(distances(&mesh, &Cluster::parse(cluster, "h200").unwrap()), expect, "{sizes:?} on {cluster}");
        };
        check("h100:8", [4, 2], &[0, 0, 0, 0]);
        check("h100:8x2", [4, 4], &[0, 1, 0, 1]);
        check("h100:8x2", [2, 8], &[1, 1]);
        // Where stages divide a node unevenly some of their ranks are farther apart than others.
        check("h100:4x3", [4, 3], &[1, 1, 1, 1]);
        check("h100:6x2", [4, 3], &[0, 1, 0, 1]);
    }
}
