//! The order in which samples are seen.
//!
//! A pseudo-random permutation of `0..samples`, computed index by index: nothing is stored, so a
//! corpus of a trillion tokens is shuffled as cheaply as a small one, and any step's samples are
//! known without replaying the steps before it. It is a balanced Feistel network over the smallest
//! even number of bits that holds `samples`, applied again while its result is out of range (cycle
//! walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Every pass over the
//! data (epoch) has another key.
//!
//! Positions are *global*: row `r` of step `s` is position `s * batch + r`, whatever rank holds it.

use shardc_passes::random::mix;

/// Enough for the order to look random; four is the proven minimum (Luby and Rackoff, 1988).
const ROUNDS: u64 = 6;

/// A shuffled, endless sequence of sample indices.
#[derive(Clone, Copy, Debug)]
pub struct SampleOrder {
    samples: u64,
    seed: u64,
}

impl SampleOrder {
    /// The order of `samples` samples (at least 1) under a seed.
    pub fn new(samples: u64, seed: u64) -> Self {
        Self { samples: samples.max(1), seed }
    }

    /// The sample at a global position; every `samples` positions see each sample once.
    pub fn sample(&self, position: u64) -> u64 {
        let epoch = position / self.samples;
        let key = mix(self.seed ^ mix(epoch));
        let bits = u64::BITS - (self.samples - 1).leading_zeros();
        let half = bits.div_ceil(2).max(1);
        let mut index = position % self.samples;
        loop {
            index = feistel(index, half, key);
            if index < self.samples {
                return index;
            }
        }
    }
}

fn feistel(index: u64, half: u32, key: u64) -> u64 {
    let mask = (1u64 << half) - 1;
    let (mut left, mut right) = (index >> half, index & mask);
    for round in 0..ROUNDS {
        let scrambled = mix(key ^ mix(right.wrapping_add(round << 56))) & mask;
        (left, right) = (right, left ^ scrambled);
    }
    left << half | right
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_sees_every_sample_once() {
        for samples in [1, 2, 3, 7, 64, 100, 1000] {
            let order = SampleOrder::new(samples, 7);
            for epoch in 0..3 {
                let mut seen: Vec<u64> = (epoch * samples..(epoch + 1) * samples).map(|at| order.sample(at)).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..samples).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn seeds_and_epochs_differ() {
        let list =
            |seed, from: u64| (from..from + 100).map(|at| SampleOrder::new(100, seed).sample(at)).collect::<Vec<_>>();
        assert_ne!(list(1, 0), list(2, 0));
        assert_ne!(list(1, 0), list(1, 100));
        assert_ne!(list(1, 0), (0..100).collect::<Vec<_>>());
    }
}
