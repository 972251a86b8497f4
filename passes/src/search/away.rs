//! Which offloads the search considers, and what bounds them.
//!
//! Offloading is the last thing that the search tries: where a plan does not fit, and the request or a pin opens it. A
//! plan says with [`Plan::spaces`](shardc_ir::Plan::spaces) what lies in the host's memory or on its disk. Lowering
//! does not read these places: programs of such a plan have everything on the device
//! ([`Feature::instead`](shardc_ir::Feature::instead)). So they confirm no such choice, and its prediction stays an
//! estimate: what the plan takes with everything on the device, less what lies elsewhere, plus the transfers and the
//! host's update.

use super::choice::offload::{ALL, Kind, Offload, Offloads};
use super::choice::pins::{Pins, Recompute};
use super::error::PlanError;
use super::estimate::Shape;
use super::estimate::relief::{Activations, Leaving, Relief, Stock, less};
use super::measure::Measure;
use crate::cluster::{Cluster, DeviceKind};
use crate::cost::host::{Beside, Host};
use shardc_ir::plan::{Prediction, Request};
use shardc_ir::units::counted;
use shardc_ir::{Bytes, Feature, Target};

/// What bounds an offload.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    /// A rank's device.
    pub device: Bytes,
    /// The share of it that plans may take which move something.
    pub share: f64,
    /// A host.
    pub host: Bytes,
}

/// A candidate of one stage with everything on the device.
#[derive(Clone, Copy)]
pub struct At<'a, 'b> {
    /// Its placed mesh.
    pub shape: &'a Shape<'b>,
    /// Which of its ways to store parameters.
    pub storage: usize,
    /// ZeRO stage.
    pub zero: u64,
    /// Recomputation.
    pub recompute: Recompute,
}

impl At<'_, '_> {
    /// What it has, and what of that an offload moves.
    fn stock(&self, offload: &Offload) -> Stock {
        let Self { shape, storage, zero, recompute } = *self;
        let held = shape.held(storage, zero);
        let share = |count: u64| match count {
            ALL => 1.0,
            _ => count as f64 / shape.blocks as f64 * held.in_blocks,
        };
        let [optimizer, leaving, parameters] = [offload.optimizer, offload.gradients, offload.parameters].map(share);
        let kept = shape.memory(storage, zero, recompute);
        let without = shape.memory_without(storage, zero, recompute, leaving);
        let dropped = match offload.activations {
            0 => without,
            count => shape.memory_without(storage, zero, Recompute::Blocks(count.min(shape.blocks)), leaving),
        };
        let activations = without.total().0.saturating_sub(dropped.total().0) as f64;
        Stock {
            held,
            optimizer,
            leaving,
            parameters,
            copies: (dropped.parameters.0 as f64 - held.masters).clamp(0.0, held.copies),
            window: 2.0 * held.copies / shape.blocks as f64,
            gradients: kept.total().0.saturating_sub(without.total().0).min(kept.gradients.0) as f64,
            activations: Activations { freed: activations, moved: activations, hosted: activations },
            microbatches: shape.microbatches(),
        }
    }

    /// What lives on the device.
    fn left(&self, offload: &Offload) -> Bytes {
        let Self { shape, storage, zero, recompute } = *self;
        less(shape.memory(storage, zero, recompute), self.stock(offload).leaving(offload).memory).total()
    }

    /// What an offload takes and adds, beside a prediction that has everything on the device.
    fn relief(&self, offload: &Offload, base: &Prediction, cluster: &Cluster) -> Relief {
        let Leaving { memory, host, traffic, updated } = self.stock(offload).leaving(offload);
        let ([forward, backward], microbatches) = (self.shape.passes(self.recompute), self.shape.microbatches());
        let shown = Host::of(cluster).shown_of_all(&traffic, &Beside { forward, backward, microbatches });
        Relief {
            freed: vec![memory],
            host: Bytes(host as u64 * cluster.per_node.min(cluster.ranks())),
            transfers: shown.transfers(microbatches),
            update: shown.update - updated * base.optimizer.0,
        }
    }
}

/// What of the search is about values away from the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Away {
    /// What there is room for.
    pub room: Room,
    /// What is pinned for all stages, if that is something.
    pub pin: Option<Offload>,
    /// Whether something is pinned, of all stages or of some.
    pub is_pinned: bool,
    /// Whether the search may choose one.
    pub is_open: bool,
}

impl Away {
    /// For a request.
    ///
    /// # Errors
    /// If something is pinned for ranks that have no memory but their host's.
    pub fn new(cluster: &Cluster, request: &Request, pins: &Pins, target: &dyn Target) -> Result<Self, PlanError> {
        let pin = pins.offload.filter(|pin| !pin.is_none());
        let pinned = pins.offloads().filter(|pinned| !pinned.is_none());
        let has_device = cluster.device.kind != DeviceKind::Cpu;
        if let Some(pinned) = pinned.as_ref().filter(|_| !has_device) {
            let message = "ranks of the CPU live in the host's memory already; leave it out".to_string();
            return Err(PlanError::Pin { pin: pinned.text(), message });
        }
        let is_free = pins.offload.is_none() && pins.stage_offload.is_empty() && has_device;
        let host = if request.host_memory == Bytes(0) { cluster.host_memory() } else { request.host_memory };
        let (device, share) = (cluster.least_room(request.device_memory), Measure::default().share());
        let is_open = is_free && Feature::Offload.is_open(false, request.scope, target);
        Ok(Self { room: Room { device, share, host }, pin, is_pinned: pinned.is_some(), is_open })
    }

    /// Whether values may lie away from the device, so that its memory does not bound a plan.
    pub fn moves(&self) -> bool {
        self.is_open || self.is_pinned
    }

    /// What lives on the device of a candidate of one stage, where something is pinned to lie elsewhere.
    pub fn left(&self, at: &At<'_, '_>) -> Bytes {
        match &self.pin {
            Some(pin) => at.left(pin),
            None => at.shape.memory(at.storage, at.zero, at.recompute).total(),
        }
    }

    /// What a candidate of one stage may place away, with what that takes and adds, and its prediction then.
    pub fn choices(
        &self,
        at: &At<'_, '_>,
        base: &Prediction,
        cluster: &Cluster,
    ) -> Vec<(Offloads, Relief, Prediction)> {
        let relieve = |offload: Offload| {
            let relief = at.relief(&offload, base, cluster);
            let prediction = relief.apply(base, &[base.memory], &[base.room]);
            (relief, prediction)
        };
        let is_recomputed = at.recompute != Recompute::None;
        let may_leave = at.shape.leaves_gradients(at.storage, at.zero);
        let mut chosen = Vec::new();
        match self.pin {
            Some(pin) if !suits(&pin, is_recomputed, may_leave) => {}
            Some(pin) => chosen.extend(Some(pin).filter(|pin| relieve(*pin).0.host <= self.room.host)),
            None if self.is_open && base.memory.total() > self.room.device => {
                chosen = self.room.choices((is_recomputed, may_leave), at.shape.blocks, &relieve);
            }
            None => {}
        }
        let moved = chosen.into_iter().map(|offload| {
            let (relief, prediction) = relieve(offload);
            (Offloads::new(vec![offload]), relief, prediction)
        });
        let stays = (!self.is_pinned).then(|| (Offloads::default(), Relief::default(), *base));
        stays.into_iter().chain(moved).collect()
    }
}

/// Whether an offload can be of what computes something again or nothing, and whose gradients may leave as they are
/// made or not.
pub fn suits(offload: &Offload, is_recomputed: bool, may_leave: bool) -> bool {
    (offload.activations == 0 || !is_recomputed) && (offload.gradients == 0 || may_leave)
}

/// In which order what leaves, until the rest fits: of each of these kinds all leave before any of the next does.
/// Activations leave where nothing `is_recomputed`, gradients where they `may_leave`.
pub fn ladders(is_recomputed: bool, may_leave: bool) -> impl Iterator<Item = &'static [Kind]> {
    use Kind::{Activations, Gradients, Optimizer, Parameters};
    const LADDERS: [&[Kind]; 9] = [
        &[Optimizer],
        &[Optimizer, Parameters],
        &[Optimizer, Gradients],
        &[Optimizer, Gradients, Parameters],
        &[Activations],
        &[Optimizer, Activations],
        &[Optimizer, Gradients, Activations],
        &[Optimizer, Parameters, Activations],
        &[Optimizer, Gradients, Parameters, Activations],
    ];
    let is_open = move |kind: &Kind| match kind {
        Activations => !is_recomputed,
        Gradients => may_leave,
        Optimizer | Parameters => true,
    };
    LADDERS.into_iter().filter(move |ladder| ladder.iter().all(is_open))
}

/// The steps of a ladder where there are so many blocks: of one more than the blocks, everything.
pub fn steps(ladder: &[Kind], blocks: u64) -> impl Iterator<Item = Offload> {
    let counts = move |kind: Kind| (1..=blocks).chain([ALL]).map(move |count| (kind, count));
    ladder.iter().copied().flat_map(counts).scan(Offload::default(), |offload, (kind, count)| {
        *offload = offload.with(kind, count);
        Some(*offload)
    })
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
        let hosted = |offload: Offload| {
            [offload, offload.on_disk()].into_iter().find(|offload| relieve(*offload).0.host <= self.host)
        };
        let mut found = Vec::new();
        for ladder in ladders(is_recomputed, may_leave) {
            let Some((last, before)) = ladder.split_last() else { continue };
            let of = before.iter().fold(Offload::default(), |of, kind| of.with(*kind, ALL));
            // One more than the blocks is everything.
            let at = |count: u64| of.with(*last, if count > blocks { ALL } else { count });
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
            let all = ladders(is_recomputed, may_leave).max_by_key(|ladder| ladder.len()).unwrap_or_default();
            found.extend(hosted(all.iter().fold(Offload::default(), |of, kind| of.with(*kind, ALL))));
        }
        found
    }
}

/// Whether a pinned offload can be: blocks that exist, and no activations both kept and computed again.
///
/// # Errors
/// [`PlanError::Pin`].
pub fn check(pins: &Pins, blocks: u64) -> Result<(), PlanError> {
    let Some(pinned) = pins.offloads() else { return Ok(()) };
    let fail = |message: String| Err(PlanError::Pin { pin: pinned.text(), message });
    if pinned.each().iter().flat_map(Offload::counts).any(|count| count != ALL && count > blocks) {
        return fail(format!("the model has {}; leave the number out for all of them", counted(blocks, "block")));
    }
    let again: Vec<Recompute> = match pins.stage_recompute.is_empty() {
        true => pins.recompute.into_iter().collect(),
        false => pins.stage_recompute.clone(),
    };
    let stages = 0..again.len().max(pinned.each().len()) as u64;
    let is_recomputed =
        |stage: u64| again.get(stage as usize).or(again.last()).is_some_and(|own| *own != Recompute::None);
    if stages.into_iter().any(|stage| is_recomputed(stage) && pinned.of(stage).activations > 0) {
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

    /// Each step of a ladder moves more than the one before, of one kind after the other.
    #[test]
    fn ladders_are_climbed_kind_by_kind() {
        let text = |ladder: &[Kind]| steps(ladder, 2).map(|step| step.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(
            text(&[Kind::Optimizer, Kind::Parameters]),
            "optimizer:1 optimizer:2 optimizer optimizer+parameters:1 optimizer+parameters:2 optimizer+parameters"
        );
        for (is_recomputed, may_leave) in [(false, false), (false, true), (true, false), (true, true)] {
            for step in ladders(is_recomputed, may_leave).flat_map(|ladder| steps(ladder, 3)) {
                assert!(suits(&step, is_recomputed, may_leave), "{step}");
                assert_eq!(Offload::parse(&step.to_string()), Ok(step));
            }
        }
    }
}
