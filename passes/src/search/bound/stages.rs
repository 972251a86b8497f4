//! Bounds below the step of every pipeline of a mesh.
//!
//! Stages work beside each other at best, so a step takes at least what the whole model does, divided by them. What no
//! order of passes avoids is added ([`Filling`]): the waits while the pipeline fills, and the memory of the
//! microbatches that are then in flight. The more memory a pipeline lacks, the fewer can be. Of what a price on bytes
//! keeps out, all stages together count.
//!
//! Such a bound is looked for of each way to share what is stored. It knows neither where the cuts lie nor how
//! zero-bubble V orders its passes, so it is far below what such orders take.

use super::sharing::{Collectives, Filling, Sharing};
use super::{Relaxed, highest, of_way, scaled};
use crate::cost::overlap::spread;
use crate::shard::tensor::{Placed, Prepared};
use shardc_ir::{Family, Mesh};

/// As [`least`](super::least), of pipelines, if they take no more seconds than are asked about.
pub fn least_in_stages(prepared: &Prepared<'_>, placed: &Placed<'_>, asked: &InStages<'_>) -> f64 {
    let InStages { free, zero, limit, orders } = *asked;
    let sharing = Sharing::least(placed.mesh);
    let mut relaxed = Relaxed::new(prepared, placed, sharing);
    let whole = scaled(placed, relaxed.cost(0.0));
    if whole > limit {
        return whole;
    }
    let bound = lowest(orders).fold(f64::INFINITY, |bound, order| {
        // The least of all counts, so no other need be tighter than that.
        if bound <= whole {
            return bound;
        }
        relaxed.share(sharing.in_stages(order.filling(placed, limit), zero));
        let unit = free.map_or(0.0, |free| whole / free / scaled(placed, 1.0));
        let mut at = |price: f64, least: f64| relaxed.above(price * unit, free.unwrap_or(0.0), least);
        if free.is_none() {
            return bound.min(at(0.0, f64::NEG_INFINITY));
        }
        bound.min(highest(&mut at, limit.min(bound)).0)
    });
    bound.max(whole)
}

/// As [`least_in_stages`], with what the data ranks say to each other, for each way to share what is stored: one of `stored`,
/// with each of its stages of ZeRO. `least` is what that gave, and beyond `enough` seconds a bound need not be any tighter.
pub fn least_fitting_in_stages(
    prepared: &Prepared<'_>,
    placed: &Placed<'_>,
    asked: &InStages<'_>,
    stored: &[(Mesh, Vec<u64>)],
    [least, enough]: [f64; 2],
) -> f64 {
    let mut relaxed = Relaxed::new(prepared, placed, Sharing::least(placed.mesh));
    let ways = stored.iter().flat_map(|(mesh, stages)| stages.iter().map(move |zero| (mesh, *zero)));
    let all = lowest(asked.orders).flat_map(|order| ways.clone().map(move |way| (order, way)));
    let bound = all.fold(f64::INFINITY, |bound, (order, (mesh, zero))| {
        // The least of all counts, so no other need be tighter than that.
        let enough = enough.min(bound);
        if bound <= least {
            return bound;
        }
        let collectives = Collectives::new(prepared, placed, mesh, zero);
        let filling = order.filling(placed, asked.limit);
        let sharing = |busy: f64| Sharing::new(placed, mesh, zero, collectives, busy).in_stages(filling, zero);
        bound.min(of_way(&mut relaxed, (&sharing, &[]), asked.free, [least, enough]))
    });
    bound.max(least)
}

/// Of orders, those of which no other takes less of everything.
fn lowest(orders: &[Order]) -> impl Iterator<Item = Order> + Clone {
    let is_above = |own: &Order| orders.iter().any(|other| other.is_below(own));
    orders.iter().filter(move |own| !is_above(own)).copied()
}

/// What is asked of a bound of pipelines.
#[derive(Clone, Copy, Debug)]
pub struct InStages<'a> {
    /// What a rank of each stage may take, in bytes, all together, if that is all there is.
    pub free: Option<f64>,
    /// The last ZeRO stage.
    pub zero: u64,
    /// The seconds of a step above which plans are not asked about.
    pub limit: f64,
    /// What is known of the orders of passes that there are.
    pub orders: &'a [Order],
}

/// What is known of an order of passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Order {
    /// How long a stage waits at the least for each of the others while the pipeline fills and drains, as a share of a
    /// microbatch in a stage.
    pub waits: f64,
    /// Whether the gradients of weights may come later.
    pub splits_backward: bool,
}

impl Order {
    /// What no order of this kind avoids in a step of so many seconds at the most.
    fn filling(self, placed: &Placed<'_>, limit: f64) -> Filling {
        let (microbatches, others) = (placed.microbatches as f64, placed.mesh.degree(Family::Pipeline) as f64 - 1.0);
        let rate = microbatches * spread(placed.cluster.ranks()) / limit;
        Filling { share: self.waits * others / microbatches, rate, splits_backward: self.splits_backward }
    }

    /// Whether what is less than all plans of this order take is less than those of another, which takes more of
    /// everything, take as well.
    fn is_below(&self, other: &Self) -> bool {
        self != other && self.waits <= other.waits && (self.splits_backward || !other.splits_backward)
    }
}
