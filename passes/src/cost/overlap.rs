//! What communication costs beside computation: what is not hidden, what hiding it takes, and what ranks wait for the
//! slowest of them.

/// Of the computation beside a collective, the share in which the collective can run: it starts
/// when its operand is there and must end before its result is read.
const REACH: f64 = 0.9;

/// Seconds that a collective of `all` seconds adds to `beside` seconds of computation it may run
/// under. At least `last` of it (the last bucket, or the first gather) has nothing to hide under;
/// of what is hidden, computation loses the share `loss` to it (shared memory bandwidth and
/// multiprocessors).
pub fn shown(all: f64, last: f64, beside: f64, loss: f64) -> f64 {
    let bare = (all - REACH * beside).max(last.min(all));
    bare + (all - bare) * loss
}

/// What every doubling of the nodes adds to a step, as a share of it: the slowest of many waits
/// for no one, all wait for it. Found with the figures of [`Library`](super::Library), on 8 to 12,288 devices.
const SPREAD: f64 = 0.007;

/// By what factor the slowest of these ranks stretches a step.
pub fn spread(ranks: u64) -> f64 {
    1.0 + SPREAD * (ranks as f64 / 8.0).max(1.0).log2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_communication_costs_its_loss_alone() {
        assert_eq!(shown(1.0, 0.0, 10.0, 0.0), 0.0);
        assert!((shown(1.0, 0.1, 10.0, 0.2) - (0.1 + 0.9 * 0.2)).abs() < 1e-12);
        assert!((shown(20.0, 0.1, 10.0, 0.0) - 11.0).abs() < 1e-12);
    }
}
