//! Which values a figure may have: what is outside is a slip of a unit, and says so.

use super::{ClusterError, Profile};
use shardc_ir::units::number_text;

/// What a figure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// A size of memory.
    Bytes,
    /// A size of memory that nobody may use.
    Reserve,
    /// Bytes/s.
    Bandwidth,
    /// A time.
    Seconds,
    /// A length at which half of a rate is reached.
    Length,
    /// FLOP/s.
    Rate,
    /// A number of things.
    Count,
    /// A share that is reached.
    Share,
    /// A share that is lost.
    Loss,
}

impl Quantity {
    /// The least and the most that it may be, and how to write it.
    fn range(self) -> (f64, f64, &'static str) {
        match self {
            Self::Bytes => (1048576.0, 1e16, "bytes, from 1048576 to 1e16 (80 GB is 8e10)"),
            Self::Reserve => (0.0, 1e15, "bytes, from 0 (2 GiB is 2147483648)"),
            Self::Bandwidth => (1e6, 1e16, "bytes per second, from 1e6 to 1e16 (450 GB/s is 4.5e11)"),
            Self::Seconds => (0.0, 1.0, "seconds, from 0 to 1 (5 microseconds are 5e-6)"),
            Self::Length => (0.0, 1e6, "a length, from 0 to 1e6"),
            Self::Rate => (1e8, 1e19, "FLOP/s, from 1e8 to 1e19 (989 TFLOP/s are 9.89e14)"),
            Self::Count => (1.0, 1e7, "a count, a whole number from 1 to 1e7"),
            Self::Share => (1e-6, 1.0, "a share, from 1e-6 to 1"),
            Self::Loss => (0.0, 0.99, "a share, from 0 to 0.99"),
        }
    }

    /// Whether less of it is faster, or leaves more room.
    pub(super) fn is_cost(self) -> bool {
        matches!(self, Self::Reserve | Self::Seconds | Self::Length | Self::Loss)
    }

    /// Checks a figure of this name.
    ///
    /// # Errors
    /// A value that is no number or out of range.
    pub(super) fn check(self, name: &str, value: f64) -> Result<(), ClusterError> {
        let (least, most, how) = self.range();
        if (least..=most).contains(&value) && (self != Self::Count || value.fract() == 0.0) {
            return Ok(());
        }
        Err(ClusterError::Figure { figure: name.to_string(), value: number_text(value), expect: how.to_string() })
    }
}

/// Checks all figures of a profile.
///
/// # Errors
/// As [`Quantity::check`].
pub(super) fn figures(profile: &Profile) -> Result<(), ClusterError> {
    let quantities = Profile::FIGURES.iter().map(|(_, quantity)| quantity);
    let mut figures = profile.figures().into_iter().zip(quantities);
    figures.try_for_each(|((name, figure), quantity)| quantity.check(name, figure.value))
}
