//! Attention round a ring: each rank has a part of the queries and of the keys and values, which go round
//! while it computes with those that it has (Liu et al., "Ring attention", 2023). Under a causal mask each
//! rank has two parts, one from the front and one from the back ("zigzag"), so all have as much to do.

use super::collective::{self, Group};
use super::{Machine, Pass, overlap};
use crate::cluster::Cluster;

/// What one rank holds and does in each step of the ring.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// The ranks.
    pub group: Group,
    /// Bytes of the rank's keys and values.
    pub sent: f64,
    /// Elements of its results, into which each step's are merged.
    pub merged: f64,
    /// Seconds of attention, all steps together.
    pub attention: f64,
}

impl Ring {
    /// Seconds that the ring adds to attention: transfers that it does not hide, and merging. The backward
    /// pass sends gradients with the keys and values.
    pub fn seconds(self, pass: Pass, machine: Machine<'_>, cluster: &Cluster) -> f64 {
        let steps = self.group.size() as f64 - 1.0;
        if steps <= 0.0 {
            return 0.0;
        }
        let times = if pass == Pass::Forward { 1.0 } else { 2.0 };
        // The slowest neighbours decide.
        let borders = [self.group.across].iter().chain(&self.group.beyond).filter(|units| **units > 1).count();
        let send = collective::send_over(self.sent, borders, cluster).0;
        let merge = steps * self.merged * machine.library.context_merge_bytes / machine.bandwidth();
        times * merge + overlap::shown(times * steps * send, 0.0, self.attention, machine.library.context_loss)
    }
}
