//! What values on the host or its disks cost: transfers, the update by the host's cores, the disks.
//!
//! Beside the device run transfers to it, transfers from it, the host's update and its disks, as in
//! ZeRO-Offload (Ren et al., 2021, section 4) and ZeRO-Infinity (Rajbhandari et al., 2021, section 6).
//! A device has a link of its own; the memory, the cores and the disks of a host are shared by all of
//! its devices. Gradients are clipped by the norm of all of them, so the update starts only when the
//! last has arrived; from then on it runs bucket by bucket, with transfers and disks beside it.

use super::overlap;
use crate::cluster::{Cluster, Profile};

/// Bytes of the host's memory that AdamW moves per parameter: 124 GB/s and 5.8 G parameters/s, measured
/// with a fused update in f32 on one host of H200s.
const UPDATE_BYTES: f64 = 21.4;

/// One device's share of its host, bytes/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Host {
    link: f64,
    memory: f64,
    read: f64,
    write: f64,
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

/// What shows of it in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shown {
    /// Transfers that no computation hides.
    pub transfers: f64,
    /// The update.
    pub update: f64,
}

impl Host {
    /// The share of each device of a cluster.
    pub fn of(cluster: &Cluster) -> Self {
        Self::of_device(&cluster.device, cluster)
    }

    /// The share of a device, of which the hosts of a cluster have as many as of any.
    pub fn of_device(device: &Profile, cluster: &Cluster) -> Self {
        let sharing = cluster.per_node.max(1) as f64;
        Self {
            link: device.host_bandwidth.value,
            memory: device.host_memory_bandwidth.value / sharing,
            read: device.disk_read_bandwidth.value / sharing,
            write: device.disk_write_bandwidth.value / sharing,
        }
    }

    /// Seconds in which every device of the host is given so many bytes.
    pub fn feed(&self, bytes: f64) -> f64 {
        self.transfer(Moved { up: bytes, ..Moved::default() })
    }

    /// Seconds of transfers: at the rate of the device's link, or its share of the host's memory if that is less.
    fn transfer(&self, moved: Moved) -> f64 {
        (moved.up.max(moved.down) / self.link).max((moved.up + moved.down + moved.added) / self.memory)
    }

    /// What a step's traffic adds to it.
    pub fn shown(&self, traffic: &Traffic, beside: &Beside) -> Shown {
        let over = |moved: Moved, beside: f64| overlap::shown(self.transfer(moved), 0.0, beside, 0.0);
        let each = over(traffic.forward, beside.forward) + over(traffic.backward, beside.backward);
        // Gradients leave beside the last backward pass, after what that moves anyway.
        let last = Moved { down: traffic.backward.down + traffic.gradients, ..traffic.backward };
        let gradients = over(last, beside.backward) - over(traffic.backward, beside.backward);
        let returned = self.feed(traffic.returned);
        let update = (traffic.updated * UPDATE_BYTES + traffic.returned) / self.memory;
        let disk = (traffic.disk / self.read).max(traffic.disk / self.write);
        Shown { transfers: beside.microbatches * each + gradients, update: update.max(returned).max(disk) }
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
        let [alone, shared] = [1, 8].map(|devices| host(devices).shown(&traffic, &Beside::default()).update);
        assert!((shared / alone - 8.0).abs() < 1e-9, "{alone} {shared}");
        // From disk, the disk decides.
        let traffic = Traffic { disk: 12e9, ..traffic };
        assert!((host(1).shown(&traffic, &Beside::default()).update - 12e9 / 2.2e9).abs() < 1e-9);
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
            host(1).shown(&traffic, &beside).transfers
        };
        assert_eq!(shown(1.0), 0.0);
        assert!((shown(0.0) - 0.5).abs() < 1e-9);
    }
}
