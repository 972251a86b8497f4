//! How far what is estimated may be from what programs take.

use shardc_ir::Bytes;
use shardc_ir::plan::Prediction;

/// What memory is by programs, for what is estimated.
#[derive(Clone, Copy, Debug)]
pub(in crate::search) struct Measure {
    /// Bytes for each byte that is estimated.
    pub excess: f64,
    /// The shares of the memory that plans may take which compute something again.
    pub shares: &'static [f64],
}

impl Default for Measure {
    /// Nothing is lowered yet: a few percent are left for what the estimate does not see; and some more, where those
    /// do not do.
    fn default() -> Self {
        Self { excess: 1.0, shares: &[0.97, 0.92] }
    }
}

impl Measure {
    /// The share that is tried first.
    pub fn share(self) -> f64 {
        self.shares.first().copied().unwrap_or(1.0)
    }

    /// What may be estimated where there are so many bytes.
    pub fn room(self, bytes: Bytes) -> Bytes {
        Bytes((bytes.0 as f64 / self.excess) as u64)
    }
}

/// Plans whose estimates differ by less than this factor from the fastest are predicted by their programs.
pub(in crate::search) const CLOSE: f64 = 1.02;

/// Estimates up to so many times the bound may be of plans that fit.
pub(in crate::search) const NEAR: f64 = 1.5;

/// Those up to so many times may be as well, so it matters how fast they are.
pub(in crate::search) const COMPARED: f64 = 1.2;

/// Whether what is estimated fits, or may fit by its programs.
pub(in crate::search) fn is_near(estimate: &Prediction) -> bool {
    estimate.fits() || estimate.filled() <= NEAR
}

/// Whether it matters by how much faster than others a plan is: it fits, or nearly does. Of others it matters whether
/// they may be much faster.
pub(in crate::search) fn is_compared(estimate: &Prediction) -> bool {
    estimate.fits() || estimate.filled() <= COMPARED
}
