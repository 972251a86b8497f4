//! The ways to compute again that the stages of a mesh may take, and what the model takes by each.

use super::{Mesh, Pins, Recompute, Seen, Sums};
use std::collections::BTreeSet;

/// What is computed again in one way or other, and on each set of kinds, by its slowest, what that takes.
pub(super) struct Recomputed<'a> {
    pub ways: Vec<Recompute>,
    pub of_sets: Vec<Vec<(&'a Seen<'a>, Sums)>>,
    /// Where nothing may be computed again or leave, what the model takes if it is: its places are those between blocks.
    pub between_blocks: Option<Sums>,
    /// Bytes that a microbatch leaves behind its forward pass where nothing is computed again.
    kept: f64,
    blocks: f64,
}

impl<'a> Recomputed<'a> {
    pub fn new(mesh: &Mesh<'a>, pins: &Pins) -> Self {
        let menu = mesh.seen[0][0].shape.menu();
        let named = pins.stage_recompute.iter().map(|own| own.within(menu.steps()));
        let keeps = pins.offloads().is_some_and(|pinned| pinned.each().iter().any(|own| own.activations > 0));
        let ways: BTreeSet<Recompute> = match pins.recompute.filter(|pin| *pin != Recompute::BY_NEED) {
            _ if !pins.stage_recompute.is_empty() => named.collect(),
            Some(pin) => [pin.within(menu.steps())].into(),
            // What is moved is not computed again.
            None if keeps => [Recompute::None].into(),
            None => [Recompute::None].into_iter().chain(menu.rungs().map(Recompute::Values)).collect(),
        };
        let ways = Vec::from_iter(ways);
        let slowest = |seen: &'a [Seen<'a>], recompute: &Recompute| {
            let sums = |own: &'a Seen<'a>| (own, Sums::new(mesh.prepared, &own.shape, *recompute, mesh.line));
            let longer = |a: &(&Seen<'_>, Sums), b: &(&Seen<'_>, Sums)| a.1.whole().total_cmp(&b.1.whole());
            seen.iter().map(sums).max_by(longer)
        };
        let of_set = |seen: &&'a [Seen<'a>]| ways.iter().filter_map(|again| slowest(seen, again)).collect();
        let of_sets: Vec<Vec<(&'a Seen<'a>, Sums)>> = mesh.seen.iter().map(of_set).collect();
        let shape = &mesh.seen[0][0].shape;
        let none = || Sums::new(mesh.prepared, shape, Recompute::None, mesh.line).between_passes();
        let known = ways.first().filter(|way| **way == Recompute::None);
        let kept = known.map_or_else(none, |_| of_sets[0][0].1.between_passes());
        let is_free = ways == [Recompute::None] && !mesh.away.moves();
        let between_blocks = is_free.then(|| Sums::new(mesh.prepared, shape, Recompute::All, mesh.line));
        Self { ways, of_sets, between_blocks, kept, blocks: shape.blocks.max(1) as f64 }
    }

    /// Bytes that are there while a block is passed that is computed again in one of the ways.
    pub fn returning(&self, index: usize) -> f64 {
        ((self.kept - self.sums(index).between_passes()) / self.blocks).max(0.0)
    }

    /// The sums on the slowest kind, of each way.
    pub fn sums(&self, index: usize) -> &Sums {
        &self.of_sets[0][index].1
    }
}
