//! What values on the host or its disks cost: transfers, the update by the host's cores, the disks.
//!
//! Beside the device run transfers to it, transfers from it, the host's update and its disks, as in
//! ZeRO-Offload (Ren et al., 2021, section 4) and ZeRO-Infinity (Rajbhandari et al., 2021, section 6).
//! A device has a link of its own; the memory, the cores and the disks of a host are shared by those of
//! its devices that move something at a time, and stages of a pipeline may move unequal amounts. Gradients are clipped by the norm of all of them, so the update starts only when the
//! last has arrived; from then on it runs bucket by bucket, with transfers and disks beside it.

use super::overlap;
use crate::cluster::{Cluster, Profile};

/// Bytes of the host's memory that AdamW moves per parameter: 124 GB/s and 5.8 G parameters/s, measured
/// with a fused update in f32 on one host of H200s.
const UPDATE_BYTES: f64 = 21.4;

/// One host, bytes/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Host {
    /// Of each device, in one direction.
    link: f64,
    memory: f64,
    read: f64,
    write: f64,
    devices: u64,
}

/// Bytes that one rank moves in one direction each, at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moved {
    /// To the device.
    pub up: f64,
    /// From it.
    pub down: f64,
    /// Bytes of its memory that the host reads and writes meanwhile, to add up what comes.
    pub added: f64,
}

/// What one rank has its host do in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Beside the forward pass of each microbatch.
    pub forward: Moved,
    /// Beside its backward pass.
    pub backward: Moved,
    /// Bytes of gradients that leave the device once per step.
    pub gradients: f64,
    /// Parameters that the host updates.
    pub updated: f64,
    /// Bytes of updated parameters that return to the device.
    pub returned: f64,
    /// Bytes read from disk for the update, and as many written.
    pub disk: f64,
}

/// Seconds of the device beside which transfers run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Beside {
    /// A microbatch's forward pass.
    pub forward: f64,
    /// Its backward pass.
    pub backward: f64,
    /// How many microbatches.
    pub microbatches: f64,
}

/// Ranks of one host that have it do the same.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// How many.
    pub ranks: u64,
    /// What each moves.
    pub traffic: Traffic,
    /// What its device does meanwhile.
    pub beside: Beside,
}

/// What shows of it on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shown {
    /// Transfers that no computation hides, of each microbatch's forward pass.
    pub forward: f64,
    /// Of its backward pass.
    pub backward: f64,
    /// Of gradients, once in a step.
    pub gradients: f64,
    /// The update of all ranks of the host.
    pub update: f64,
}

impl Shown {
    /// Seconds of transfers in a step of so many microbatches.
    pub fn transfers(&self, microbatches: f64) -> f64 {
        microbatches * (self.forward + self.backward) + self.gradients
    }

    /// Of each part, what takes longer.
    pub fn longer(self, other: Self) -> Self {
        Self {
            forward: self.forward.max(other.forward),
            backward: self.backward.max(other.backward),
            gradients: self.gradients.max(other.gradients),
            update: self.update.max(other.update),
        }
    }
}

impl Moved {
    /// Bytes of the host's memory that are read or written.
    fn bytes(&self) -> f64 {
        self.up + self.down + self.added
    }
}

impl Traffic {
    /// What is moved beside the last backward pass: gradients leave after what that moves anyway.
    fn last(&self) -> Moved {
        Moved { down: self.backward.down + self.gradients, ..self.backward }
    }
}

impl Host {
    /// A host of a cluster.
    pub fn of(cluster: &Cluster) -> Self {
        Self::of_device(&cluster.device, cluster)
    }

    /// A host of such devices, of which the hosts of a cluster have as many as of any.
    pub fn of_device(device: &Profile, cluster: &Cluster) -> Self {
        Self {
            link: device.host_bandwidth.value,
            memory: device.host_memory_bandwidth.value,
            read: device.disk_read_bandwidth.value,
            write: device.disk_write_bandwidth.value,
            devices: cluster.per_node.max(1),
        }
    }

    /// Seconds in which every device of the host is given so many bytes.
    pub fn feed(&self, bytes: f64) -> f64 {
        let moved = Moved { up: bytes, ..Moved::default() };
        self.transfer(moved, &[(self.devices, moved)])
    }

    /// Seconds until a rank has moved something, one of those of `all` that move meanwhile: at the rate of its device's
    /// link; or as the host's memory gives to each alike that has not finished, so that of others counts no more than
    /// it moves itself.
    fn transfer(&self, own: Moved, all: &[(u64, Moved)]) -> f64 {
        let before = |(ranks, other): &(u64, Moved)| *ranks as f64 * other.bytes().min(own.bytes());
        (own.up.max(own.down) / self.link).max(all.iter().map(before).sum::<f64>() / self.memory)
    }

    /// What a step's traffic adds to it, on a rank of each load of the host.
    pub fn shown(&self, loads: &[Load]) -> Vec<Shown> {
        let update = self.update(loads);
        let all = |part: fn(&Traffic) -> Moved| {
            loads.iter().map(|load| (load.ranks, part(&load.traffic))).collect::<Vec<(u64, Moved)>>()
        };
        let [forward, backward, last] =
            [all(|traffic| traffic.forward), all(|traffic| traffic.backward), all(Traffic::last)];
        let shown = |(index, load): (usize, &Load)| {
            let over =
                |of: &[(u64, Moved)], beside: f64| overlap::shown(self.transfer(of[index].1, of), 0.0, beside, 0.0);
            let each = over(&backward, load.beside.backward);
            Shown {
                forward: over(&forward, load.beside.forward),
                backward: each,
                gradients: over(&last, load.beside.backward) - each,
                update,
            }
        };
        loads.iter().enumerate().map(shown).collect()
    }

    /// What the same traffic of every device of the host adds to a step.
    pub fn shown_of_all(&self, traffic: &Traffic, beside: &Beside) -> Shown {
        let load = Load { ranks: self.devices, traffic: *traffic, beside: *beside };
        self.shown(&[load]).pop().unwrap_or_default()
    }

    /// Seconds of the update of all ranks of the host.
    fn update(&self, loads: &[Load]) -> f64 {
        let sum =
            |of: fn(&Traffic) -> f64| -> f64 { loads.iter().map(|load| load.ranks as f64 * of(&load.traffic)).sum() };
        let memory = sum(|traffic| traffic.updated * UPDATE_BYTES + traffic.returned) / self.memory;
        let returned = loads.iter().map(|load| load.traffic.returned / self.link).fold(0.0, f64::max);
        let disk = sum(|traffic| traffic.disk);
        memory.max(returned).max(disk / self.read).max(disk / self.write)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(devices: u64) -> Host {
        Host::of(&Cluster::parse(&format!("h200:{devices}"), "h200").unwrap())
    }

    #[test]
    fn the_update_runs_at_what_the_host_s_memory_gives() {
        let traffic = Traffic { updated: 1e9, ..Traffic::default() };
        let [alone, shared] = [1, 8].map(|devices| host(devices).shown_of_all(&traffic, &Beside::default()).update);
        assert!((shared / alone - 8.0).abs() < 1e-9, "{alone} {shared}");
        // From disk, the disk decides.
        let traffic = Traffic { disk: 12e9, ..traffic };
        assert!((host(1).shown_of_all(&traffic, &Beside::default()).update - 12e9 / 2.2e9).abs() < 1e-9);
    }

    #[test]
    fn the_host_s_memory_feeds_all_of_its_devices() {
        let desktop = |devices: u64| Host::of(&Cluster::parse(&format!("rtx4090:{devices}"), "h200").unwrap());
        let [alone, shared] = [1, 8].map(|devices| desktop(devices).feed(1e9));
        assert!((alone - 1e9 / 27.7e9).abs() < 1e-9 && (shared - 8e9 / 72e9).abs() < 1e-9, "{alone} {shared}");
        // Sixteen channels are more than eight links.
        assert_eq!(host(1).feed(1e9), host(8).feed(1e9));
    }

    #[test]
    fn transfers_hide_beside_computation() {
        let moved = Moved { up: 5.55e9, ..Moved::default() };
        let traffic = Traffic { forward: moved, gradients: 5.55e9, ..Traffic::default() };
        let shown = |seconds: f64| {
            let beside = Beside { forward: seconds, backward: seconds, microbatches: 4.0 };
            host(1).shown_of_all(&traffic, &beside).transfers(4.0)
        };
        assert_eq!(shown(1.0), 0.0);
        assert!((shown(0.0) - 0.5).abs() < 1e-9);
    }

    /// What two kinds of ranks move passes as through a queue that serves all of them in turn: those with less are done
    /// first, and the memory is never idle.
    #[test]
    fn ranks_that_move_less_wait_less() {
        let load = |ranks: u64, bytes: f64| {
            let forward = Moved { up: bytes, ..Moved::default() };
            let traffic = Traffic { forward, updated: bytes, ..Traffic::default() };
            Load { ranks, traffic, beside: Beside::default() }
        };
        let desktop = Host::of(&Cluster::parse("rtx4090:8", "h200").unwrap());
        let of = |loads: &[Load]| desktop.shown(loads);
        let both = of(&[load(4, 1e9), load(4, 3e9)]);
        assert!((both[0].forward - 8e9 / 72e9).abs() < 1e-9, "{both:?}");
        assert!((both[1].forward - (4e9 + 12e9) / 72e9).abs() < 1e-9, "{both:?}");
        // Alone on the host, their links are what bounds them.
        assert!((of(&[load(1, 3e9), load(7, 0.0)])[0].forward - 3e9 / 27.7e9).abs() < 1e-9);
        // All are updated before any goes on.
        assert!((both[0].update - of(&[load(8, 2e9)])[0].update).abs() < 1e-9 && both[0].update == both[1].update);
    }
}
