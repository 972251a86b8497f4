//! Which offloads the search considers, and what bounds them.

use super::fitted::Measure;
use super::offload::{ALL, At, Offload, Relief};
use super::{Pins, PlanError, Recompute};
use crate::cluster::Cluster;
use shardc_ir::plan::{Prediction, Request};
use shardc_ir::{Bytes, Feature, Target};

/// What bounds an offload.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    /// A rank's device.
    pub device: Bytes,
    /// The share of it that plans may take which move something.
    pub share: f64,
    /// A rank's share of its host.
    pub host: Bytes,
}

/// What of the search is about values away from the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Away {
    /// What there is room for.
    pub room: Room,
    /// What is pinned, if that is something.
    pub pin: Option<Offload>,
    /// Whether the search may choose one.
    is_open: bool,
}

impl Away {
    /// For a request.
    ///
    /// # Errors
    /// If something is pinned for ranks that have no memory but their host's.
    pub fn new(cluster: &Cluster, request: &Request, pins: &Pins, target: &dyn Target) -> Result<Self, PlanError> {
        let pin = pins.offload.filter(|pin| !pin.is_none());
        let has_device = cluster.device.kind != "cpu";
        if let Some(pin) = pin.filter(|_| !has_device) {
            let message = "ranks of the CPU live in the host's memory already; leave it out".to_string();
            return Err(PlanError::Pin { pin: format!("offload={pin}"), message });
        }
        if let Some(pin) = pin.filter(|_| pins.opens_stages()) {
            let message = "pipelines keep everything on their devices yet; leave one of the two out".to_string();
            return Err(PlanError::Pin { pin: format!("offload={pin}"), message });
        }
        let is_free = pins.offload.is_none() && has_device;
        let given = if request.host_memory == Bytes(0) { cluster.host_memory() } else { request.host_memory };
        let sharing = cluster.per_node.min(cluster.ranks()).max(1);
        let (device, share) = (cluster.least_room(request.device_memory), Measure::default().share());
        let room = Room { device, share, host: Bytes(given.0 / sharing) };
        Ok(Self { room, pin, is_open: is_free && Feature::Offload.is_open(false, request.scope, target) })
    }

    /// Whether values may lie away from the device, so that its memory does not bound a plan.
    pub fn moves(&self) -> bool {
        self.is_open || self.pin.is_some()
    }

    /// A pin that no host has room for, or that no candidate can keep.
    pub fn too_large(&self) -> PlanError {
        let pin = self.pin.unwrap_or_default();
        let room = format!("it takes more than the {} that each rank has of its host's memory", self.room.host);
        let message = match pin.gradients {
            0 => format!("{room}; give more with --host-memory, or move less"),
            _ => format!(
                "either {room} (give more with --host-memory, or move less), or gradients do not leave as they are made: \
                 they do only where that is a rank's part of their sum, with zero=2 or 3, with zero=1 in one microbatch, \
                 or on one rank"
            ),
        };
        PlanError::Pin { pin: format!("offload={pin}"), message }
    }

    /// What a candidate may place away, with what that takes and adds, and its prediction then.
    pub fn choices(&self, at: &At<'_, '_>, base: &Prediction, cluster: &Cluster) -> Vec<(Offload, Relief, Prediction)> {
        let relieve = |offload: Offload| {
            let relief = offload.relief(at, base, cluster);
            (relief, relief.apply(base, cluster))
        };
        let is_recomputed = at.recompute != Recompute::None;
        let mut chosen = Vec::new();
        match self.pin {
            Some(pin) if pin.activations > 0 && is_recomputed => {}
            Some(pin) if pin.gradients > 0 && !at.shape.leaves_gradients(at.storage, at.zero) => {}
            Some(pin) => chosen.extend(Some(pin).filter(|pin| relieve(*pin).0.host <= self.room.host)),
            None if self.is_open && base.memory.total() > self.room.device => {
                let may_leave = at.shape.leaves_gradients(at.storage, at.zero);
                chosen = self.room.choices((is_recomputed, may_leave), at.shape.blocks, &relieve);
            }
            None => {}
        }
        let mut all: Vec<_> = chosen.into_iter().map(|offload| (offload, relieve(offload))).collect();
        if self.pin.is_none() {
            all.insert(0, (Offload::default(), (Relief::default(), *base)));
        }
        all.into_iter().map(|(offload, (relief, prediction))| (offload, relief, prediction)).collect()
    }
}

impl Room {
    /// Whether a prediction fits on the device.
    fn fits(&self, prediction: &Prediction) -> bool {
        prediction.memory.total().0 as f64 <= self.share * self.device.0 as f64
    }

    /// The offloads worth considering for what does not fit on the device: of each kind, and of kinds together, the fewest
    /// blocks that do; if none do, the most that can leave. Activations leave where none `is_recomputed`, gradients where
    /// they `may_leave`; `relieve` gives an offload's relief and prediction.
    pub fn choices(
        &self,
        (is_recomputed, may_leave): (bool, bool),
        blocks: u64,
        relieve: &dyn Fn(Offload) -> (Relief, Prediction),
    ) -> Vec<Offload> {
        type Grow = fn(Offload, u64) -> Offload;
        let none = Offload::default();
        let optimizer = Offload { optimizer: ALL, ..none };
        let both = Offload { parameters: ALL, ..optimizer };
        let [given, all] = [optimizer, both].map(|of| Offload { gradients: ALL, ..of });
        let with_activations: Grow = |of, count| Offload { activations: count, ..of };
        let mut ladders: Vec<(Offload, Grow)> = vec![
            (none, |of, count| Offload { optimizer: count, ..of }),
            (optimizer, |of, count| Offload { parameters: count, ..of }),
        ];
        if may_leave {
            ladders.push((optimizer, |of, count| Offload { gradients: count, ..of }));
            ladders.push((given, |of, count| Offload { parameters: count, ..of }));
        }
        let is_open = |of: &Offload| !is_recomputed && (may_leave || of.gradients == 0);
        ladders
            .extend([none, optimizer, given, both, all].into_iter().filter(is_open).map(|of| (of, with_activations)));
        let hosted = |offload: Offload| {
            let on_disk = Offload { is_on_disk: offload.optimizer > 0, ..offload };
            [offload, on_disk].into_iter().find(|offload| relieve(*offload).0.host <= self.host)
        };
        let mut found = Vec::new();
        for (of, grow) in ladders {
            // One more than the blocks is everything.
            let at = |count: u64| grow(of, if count > blocks { ALL } else { count });
            let fits = |count: u64| self.fits(&relieve(at(count)).1);
            if fits(0) || !fits(blocks + 1) {
                continue;
            }
            let (mut low, mut high) = (0, blocks + 1);
            while low + 1 < high {
                let middle = low.midpoint(high);
                if fits(middle) { high = middle } else { low = middle }
            }
            found.extend(hosted(at(high)));
        }
        // Where nothing fits, what lacks the least says by how much.
        if found.is_empty() {
            let [gradients, activations] = [may_leave, !is_recomputed].map(|may| if may { ALL } else { 0 });
            found.extend(hosted(Offload { gradients, activations, ..both }));
        }
        found
    }
}

/// Whether a pinned offload can be: blocks that exist, and no activations both kept and computed again.
///
/// # Errors
/// [`PlanError::Pin`].
pub fn check(pin: &Offload, blocks: u64, recompute: Option<Recompute>) -> Result<(), PlanError> {
    let fail = |message: String| Err(PlanError::Pin { pin: format!("offload={pin}"), message });
    let counts = [pin.optimizer, pin.gradients, pin.parameters, pin.activations];
    if counts.into_iter().any(|count| count != ALL && count > blocks) {
        return fail(format!("the model has {blocks} blocks; leave the number out for all of them"));
    }
    if pin.activations > 0 && recompute.is_some_and(|recompute| recompute != Recompute::None) {
        return fail("activations are either kept on the host or computed again; pin recompute=none".to_string());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::plan::Memory;

    #[test]
    fn the_fewest_blocks_that_fit_are_taken() {
        // Ten blocks of ten bytes of activations and of state each; the device has room for 150 of 200.
        let relieve = |offload: Offload| {
            let bytes = |count: u64| Bytes(10 * count.min(10));
            let memory = Memory {
                optimizer: Bytes(100 - bytes(offload.optimizer).0),
                activations: Bytes(100 - bytes(offload.activations).0),
                ..Memory::default()
            };
            let host = if offload.is_on_disk { Bytes(0) } else { bytes(offload.optimizer) };
            (Relief { host, ..Relief::default() }, Prediction { memory, ..Prediction::default() })
        };
        let text = |host: u64, is_recomputed: bool| {
            let room = Room { device: Bytes(155), share: 0.97, host: Bytes(host) };
            let found = room.choices((is_recomputed, true), 10, &relieve);
            found.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(text(1000, false), "optimizer:5 activations:5");
        assert_eq!(text(1000, true), "optimizer:5");
        assert_eq!(text(10, true), "optimizer:5@disk");
    }
}
