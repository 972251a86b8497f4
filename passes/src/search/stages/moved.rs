//! What leaves the devices of a stage, and what moving it takes.
//!
//! A stage counts its own blocks, from the first of its first chunk on; of a block that a cut divides, each stage has a
//! part. What it holds of parameters goes by what lies in these blocks along the line; of activations, it holds a copy
//! for each microbatch between two passes, so moving those of a block frees them all.
//!
//! Transfers run beside the passes of the stage's own chunks, and make them longer where they do not hide: what that
//! does to the step, the schedule says. The update waits for the last gradient, and a host does that of all its ranks.

use super::held::Held as Copies;
use super::levels::Pace;
use super::line::prefix;
use super::problem::{Part, Problem};
use super::{Line, Recompute, Sums};
use crate::cost::host::{Beside, Host, Load, Shown};
use crate::pipeline::order::Lengths;
use crate::search::choice::offload::{ALL, Offload};
use crate::search::estimate::Shape;
use crate::search::estimate::relief::{Activations, Leaving, Stock};
use crate::search::estimate::storage::Held;
use shardc_ir::{Family, Mesh};
use std::collections::BTreeSet;

/// Sums along a line, over what lies in blocks alone, from its beginning to each of its nodes.
pub(super) struct InBlocks {
    /// The share of the parameters.
    stored: Vec<f64>,
    /// By how many bytes less a microbatch holds, as in [`Sums`], if its activations leave.
    kept: Vec<f64>,
    /// See `kept`.
    lasting: Vec<f64>,
    /// See `kept`.
    awaited: Vec<f64>,
    /// Bytes that a microbatch leaves along the whole line, where nothing is computed again and where everything is.
    between_passes: [f64; 2],
}

impl InBlocks {
    /// Where nothing is computed again, and where everything is: activations that leave are on the device as long as
    /// those.
    pub fn new(line: &Line, nothing: &Sums, everything: &Sums) -> Self {
        let mut is_inside = vec![false; line.main.len()];
        line.blocks.iter().for_each(|block| is_inside[block.clone()].fill(true));
        let of = |change: &dyn Fn(usize) -> f64| {
            let each = is_inside.iter().enumerate().map(|(at, is_inside)| if *is_inside { change(at) } else { 0.0 });
            prefix(&each.collect::<Vec<f64>>())
        };
        let at = |sums: &[f64], at: usize| sums[at + 1] - sums[at];
        let left = |sums: &Sums, of: usize, at: usize| sums.held[at + 1][of] - sums.held[at][of];
        let fewer = |part: usize| of(&|place| left(nothing, part, place) - left(everything, part, place));
        Self {
            stored: of(&|place| at(&nothing.stored, place)),
            kept: fewer(0),
            lasting: fewer(1),
            awaited: fewer(2),
            between_passes: [nothing, everything].map(Sums::between_passes),
        }
    }
}

/// What of a whole model a stage has a share of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    /// What a rank would hold of all of it.
    pub held: Held,
    /// Bytes of gradients that are on their way at a time.
    pub gradients: f64,
    /// How many blocks it has.
    pub blocks: u64,
    /// By how much more a microbatch needs while a block is passed whose activations left.
    pub returning: f64,
}

impl Model {
    /// Of a placed mesh whose parameters are stored in one way.
    pub fn new(shape: &Shape<'_>, storage: usize, zero: u64, in_blocks: Option<&InBlocks>) -> Self {
        let held = shape.held(storage, zero);
        let returning = in_blocks.map_or(0.0, |in_blocks| {
            let peak = |recompute: Recompute| shape.memory(storage, zero, recompute).activations.0 as f64;
            let [nothing, everything] = in_blocks.between_passes;
            (peak(Recompute::All) - everything) - (peak(Recompute::None) - nothing)
        });
        let gradients = shape.window(held.gradients as u64) as f64;
        Self { held, gradients, blocks: shape.blocks, returning: returning.max(0.0) }
    }
}

/// How many ranks of each stage a host has: each kind of host once.
pub(super) fn hosts(mesh: &Mesh, per_node: u64) -> Vec<Vec<u64>> {
    let host = |first: u64| {
        let mut ranks = vec![0; mesh.degree(Family::Pipeline) as usize];
        (first..mesh.ranks().min(first + per_node)).for_each(|rank| ranks[mesh.stage_of(rank) as usize] += 1);
        ranks
    };
    let hosts: BTreeSet<Vec<u64>> = (0..mesh.ranks()).step_by(per_node.max(1) as usize).map(host).collect();
    hosts.into_iter().collect()
}

impl Problem<'_> {
    /// What leaves a stage with these chunks.
    pub fn leaving(&self, level: usize, chunks: &[Part], offload: &Offload) -> Leaving {
        match (offload.is_none(), self.tries.mesh.in_blocks) {
            (false, Some(in_blocks)) => self.stock(level, chunks, offload, in_blocks).leaving(offload),
            _ => Leaving::default(),
        }
    }

    fn stock(&self, level: usize, chunks: &[Part], offload: &Offload, in_blocks: &InBlocks) -> Stock {
        let Pace { whole, .. } = &self.agains[self.levels.all[level].again].paces[0];
        let Model { held, gradients, blocks, returning } = self.tries.model;
        let stored = self.share(chunks);
        let share = |count: u64| match count {
            ALL => 1.0,
            _ => {
                let mut inside = 0.0;
                self.first_blocks(chunks, count, |_, from, to| inside += in_blocks.stored[to] - in_blocks.stored[from]);
                (inside / stored.max(f64::MIN_POSITIVE)).min(1.0)
            }
        };
        let [optimizer, leaving, parameters] = [offload.optimizer, offload.gradients, offload.parameters].map(share);
        let window = 2.0 * held.copies / blocks.max(1) as f64;
        let held = held.of_share(stored);
        let left = leaving * held.gradients;
        Stock {
            held,
            optimizer,
            leaving,
            parameters,
            copies: (whole.memory.parameters.0 as f64 * stored - held.masters).clamp(0.0, held.copies),
            window,
            gradients: (left - gradients).max(0.0),
            activations: self.activations(chunks, offload.activations, (in_blocks, returning)),
            microbatches: self.tries.mesh.placed.microbatches as f64,
        }
    }

    /// The activations of so many blocks of a stage.
    fn activations(&self, chunks: &[Part], count: u64, (in_blocks, returning): (&InBlocks, f64)) -> Activations {
        let mut own = Activations::default();
        if count == 0 {
            return own;
        }
        self.first_blocks(chunks, count, |chunk, from, to| {
            let Copies { kept, lasting, awaited, .. } = self.held[chunk];
            let between = |sums: &[f64]| sums[to] - sums[from];
            let of_passes = [(kept, between(&in_blocks.kept)), (lasting, between(&in_blocks.lasting))];
            let held: f64 = of_passes.iter().map(|(copies, bytes)| *copies as f64 * bytes).sum();
            own.freed += held + awaited as f64 * between(&in_blocks.awaited);
            own.moved += of_passes.iter().map(|of| of.1).sum::<f64>().max(0.0);
            own.hosted += held.max(0.0);
        });
        own.freed = (own.freed - returning).max(0.0);
        own
    }

    /// Gives the parts of the chunks that lie in the stage's first blocks: the chunk, and where along the line the part
    /// begins and ends.
    fn first_blocks(&self, chunks: &[Part], count: u64, mut give: impl FnMut(usize, usize, usize)) {
        let (places, blocks) = (&self.line().places, &self.tries.mesh.line.blocks);
        let (mut left, mut known) = (count, 0);
        for (chunk, from, to) in chunks {
            let (from, to) = (places[*from], places[*to]);
            let first = blocks.partition_point(|block| block.end <= from);
            let end = blocks.partition_point(|block| block.start < to);
            // A block that is cut within a stage counts once.
            let is_known = first < known;
            let taken = ((end.max(first) - first) as u64).min(left.saturating_add(u64::from(is_known)));
            let Some(last) = (first + taken as usize).checked_sub(1).filter(|_| taken > 0) else { continue };
            left -= taken - u64::from(is_known);
            known = last + 1;
            give(*chunk, from.max(blocks[first].start), to.min(blocks[last].end));
        }
    }

    /// What a stage's devices do in a microbatch, beside which values are moved.
    pub fn beside(&self, level: usize, stage: usize, chunks: &[Part]) -> Beside {
        let of = |part: &Part| self.passes(level, stage, *part);
        let each: Vec<Lengths> = chunks.iter().map(of).collect();
        Beside {
            forward: each.iter().map(|own| own.forward).sum(),
            backward: each.iter().map(|own| own.backward + own.weight).sum(),
            microbatches: self.tries.mesh.placed.microbatches as f64,
        }
    }

    fn host(&self, stage: usize) -> Host {
        let mesh = self.tries.mesh;
        Host::of(mesh.seen[mesh.set[stage]][0].placed.cluster)
    }

    /// Seconds that moving takes of a stage, if all ranks of its host do as it does: of each microbatch, and its part of
    /// what is done once in a step. Updates of stages on one host add up; of those on hosts of their own the longest
    /// counts, which is their mean if they are alike.
    pub fn moving(&self, level: usize, stage: usize, chunks: &[Part]) -> [f64; 2] {
        let offload = self.offload(level, stage);
        if offload.is_none() {
            return [0.0; 2];
        }
        let (leaving, beside) = (self.leaving(level, chunks, &offload), self.beside(level, stage, chunks));
        let shown = self.host(stage).shown_of_all(&leaving.traffic, &beside);
        let fullest = self.tries.mesh.hosts.iter().max_by_key(|host| host[stage]);
        let update = fullest.map_or(0.0, |host| {
            let load = Load { ranks: host[stage], traffic: leaving.traffic, beside };
            let update = self.host(stage).shown(&[load]).first().map_or(0.0, |shown| shown.update);
            update * host.iter().filter(|ranks| **ranks > 0).count() as f64
        });
        [shown.forward + shown.backward, (shown.gradients + update) / self.tries.stages as f64]
    }

    /// What moving adds to each stage, beside what other ranks of its host move.
    pub fn shown(&self, stages: &[Vec<Part>], levels: &[usize], leaving: &[Leaving]) -> Vec<Shown> {
        let beside = stages.iter().zip(levels).enumerate();
        let beside: Vec<Beside> = beside.map(|(stage, (chunks, level))| self.beside(*level, stage, chunks)).collect();
        let mut all = vec![Shown::default(); stages.len()];
        for host in &self.tries.mesh.hosts {
            let there: Vec<usize> = (0..host.len()).filter(|stage| host[*stage] > 0).collect();
            let load =
                |stage: &usize| Load { ranks: host[*stage], traffic: leaving[*stage].traffic, beside: beside[*stage] };
            let loads: Vec<Load> = there.iter().map(load).collect();
            for (index, stage) in there.iter().enumerate() {
                let shown = self.host(*stage).shown(&loads);
                all[*stage] = all[*stage].longer(shown[index]);
            }
        }
        all
    }

    /// Bytes that the host holds which holds the most.
    pub fn on_host(&self, leaving: &[Leaving]) -> f64 {
        let of = |host: &Vec<u64>| host.iter().zip(leaving).map(|(ranks, own)| *ranks as f64 * own.host).sum::<f64>();
        self.tries.mesh.hosts.iter().map(of).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::Family;

    #[test]
    fn hosts_have_ranks_of_some_stages() {
        let mesh = |pp: u64, dp: u64| {
            let mut mesh = Mesh::default();
            mesh.push(Family::Pipeline, pp);
            mesh.push(Family::Data, dp);
            mesh
        };
        assert_eq!(hosts(&mesh(2, 4), 8), [[4, 4]]);
        assert_eq!(hosts(&mesh(2, 16), 8), [[0, 8], [8, 0]]);
        assert_eq!(hosts(&mesh(2, 12), 8), [[0, 8], [4, 4], [8, 0]]);
        assert_eq!(hosts(&mesh(4, 2), 4), [[0, 0, 2, 2], [2, 2, 0, 0]]);
    }
}
