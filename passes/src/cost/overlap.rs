//! What communication costs beside computation: what is not hidden, and what hiding it takes.

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

/// Seconds for work that takes `device` seconds of the device and `host` seconds of the thread
/// that starts its kernels. The two overlap, but not perfectly: the queue between them runs empty
/// now and then. A norm between their sum (1) and their maximum (infinity); the order is fitted to
/// the launch-bound runs of vTrain (Bang et al., 2024).
pub fn beside_host(device: f64, host: f64) -> f64 {
    const ORDER: f64 = 3.7;
    if host <= 0.0 {
        return device;
    }
    let (most, least) = (device.max(host), device.min(host));
    most * (1.0 + (least / most).powf(ORDER)).powf(1.0 / ORDER)
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

    #[test]
    fn the_slower_of_device_and_host_decides() {
        assert_eq!(beside_host(2.0, 0.0), 2.0);
        assert!(beside_host(2.0, 0.2) < 2.01);
        let tie = beside_host(1.0, 1.0);
        assert!(tie > 1.1 && tie < 1.3);
    }
}
