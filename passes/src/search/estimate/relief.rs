//! What an offload takes from the devices and adds to the step.
//!
//! A *stock* is what a rank has that may leave: what it holds through the step, and what its passes leave and read
//! again. A whole model is one, and so is each stage of a pipeline, by its blocks and the microbatches that it holds; from
//! there on both are priced alike. What ranks of a host move at the same time shares the host
//! ([`host`](crate::cost::host)); how much of it shows in a step is for the candidate's own order of passes to say.

use super::storage::Held;
use crate::cost::host::{Moved, Traffic};
use crate::search::choice::offload::Offload;
use shardc_ir::plan::{Category, Memory, Prediction};
use shardc_ir::{Bytes, Seconds};

/// What a rank has, and of it what an offload moves.
#[derive(Clone, Copy, Debug)]
pub struct Stock {
    /// What it holds through the step.
    pub held: Held,
    /// The shares of it of which the optimizer's part, the gradients and the copies that the passes read leave.
    pub optimizer: f64,
    /// See `optimizer`.
    pub leaving: f64,
    /// See `optimizer`.
    pub parameters: f64,
    /// Bytes of copies that are on the device where its memory is the fullest, if none leave.
    pub copies: f64,
    /// Bytes of copies that are on their way at a time.
    pub window: f64,
    /// Bytes of gradients fewer on the device.
    pub gradients: f64,
    /// Activations that leave.
    pub activations: Activations,
    /// Microbatches of a step.
    pub microbatches: f64,
}

/// What leaves between the passes of a microbatch, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Activations {
    /// By how much less the device holds.
    pub freed: f64,
    /// What each microbatch moves, away and back.
    pub moved: f64,
    /// What the host holds of all microbatches that are between their passes.
    pub hosted: f64,
}

/// What leaves one rank, and what it moves for that.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Leaving {
    /// Bytes that the device does not hold.
    pub memory: Memory,
    /// Bytes that the host holds.
    pub host: f64,
    /// What is moved.
    pub traffic: Traffic,
    /// The share of the device's update that the host has instead.
    pub updated: f64,
}

impl Stock {
    /// What leaves of it.
    pub fn leaving(&self, offload: &Offload) -> Leaving {
        let Self { held, optimizer, activations, .. } = *self;
        let [masters, state, gradients] = [held.masters, held.state, held.gradients].map(|bytes| optimizer * bytes);
        let (left, copies) = (self.leaving * held.gradients, self.parameters * held.copies);
        let away = masters + state;
        let returned = gradients / 4.0 * held.width * if offload.parameters >= offload.optimizer { 0.0 } else { 1.0 };
        // To add a gradient to a sum, the host reads both and writes the sum.
        let added = if self.microbatches > 1.0 { 3.0 * left } else { 0.0 };
        let traffic = Traffic {
            forward: Moved { up: copies, down: activations.moved, added: 0.0 },
            backward: Moved { up: copies + activations.moved, down: left, added },
            gradients: gradients - left,
            updated: gradients / 4.0,
            returned,
            disk: if offload.is_on_disk { away } else { 0.0 },
        };
        let there = self.parameters * self.copies;
        let bytes = |bytes: f64| Bytes(bytes.max(0.0) as u64);
        let memory = Memory {
            parameters: bytes(masters + (there - self.window.min(copies)).max(0.0)),
            gradients: bytes(self.gradients),
            optimizer: bytes(state),
            activations: bytes(activations.freed),
            ..Memory::default()
        };
        let host = if offload.is_on_disk { 0.0 } else { away } + gradients + copies + activations.hosted;
        Leaving { memory, host: host.max(0.0), traffic, updated: optimizer }
    }
}

/// What the offloads of a candidate take and add.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Relief {
    /// Bytes that a device does not hold: of each stage, or of the model that is none; nothing, if nothing leaves.
    pub freed: Vec<Memory>,
    /// Bytes that the host holds which holds the most.
    pub host: Bytes,
    /// Seconds of transfers that show.
    pub transfers: f64,
    /// Seconds of the update on the host, less those it saves on the device.
    pub update: f64,
}

impl Relief {
    /// The prediction of the same plan with what this takes away and adds, where it is known what a rank of each stage
    /// takes with all on its device, and may take.
    pub fn apply(&self, on_device: &Prediction, stages: &[Memory], rooms: &[Bytes]) -> Prediction {
        let left = |((memory, room), freed): ((&Memory, &Bytes), &Memory)| Prediction {
            memory: less(*memory, *freed),
            room: *room,
            ..*on_device
        };
        let left = stages.iter().zip(rooms).zip(&self.freed).map(left);
        let Some(fullest) = left.max_by(|a, b| a.filled().total_cmp(&b.filled())) else { return *on_device };
        let step = on_device.step.0 + self.transfers + self.update;
        Prediction {
            step: Seconds(step),
            exposed_communication: Seconds(on_device.exposed_communication.0 + self.transfers),
            communication: Seconds(on_device.communication.0 + self.transfers),
            optimizer: Seconds((on_device.optimizer.0 + self.update).max(0.0)),
            mfu: on_device.mfu * on_device.step.0 / step,
            host: on_device.host + self.host,
            ..fullest
        }
    }
}

/// What is left where so much does not lie on the device.
pub fn less(mut memory: Memory, mut freed: Memory) -> Memory {
    let mut excess = 0;
    for category in Category::ALL {
        let (held, freed) = (memory.category(category), freed.category(category));
        let taken = freed.0.min(held.0);
        *held = Bytes(held.0 - taken);
        excess += freed.0 - taken;
    }
    // Where memory is the fullest with all on the device, other values are than where it is now.
    for category in [Category::Gradient, Category::Activation, Category::Parameter, Category::Optimizer] {
        let held = memory.category(category);
        let taken = excess.min(held.0);
        (*held, excess) = (Bytes(held.0 - taken), excess - taken);
    }
    memory
}
