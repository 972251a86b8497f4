//! Which values a figure may have: what is outside is a slip of a unit, and says so.

use super::{ClusterError, Figure, Profile};
use shardc_ir::units::number_text;

/// The least and the most that a figure of a kind may be, and how to write it.
struct Range {
    least: f64,
    most: f64,
    how: &'static str,
}

/// What the names of figures that count something have in them.
const COUNTS: [&str; 3] = ["per_node", "multiprocessors", "tile"];

/// By the name of the figure; every figure is of one kind.
fn range(name: &str) -> Range {
    let is = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    if name.starts_with("reserved") {
        Range { least: 0.0, most: 1e15, how: "bytes, from 0 (2 GiB is 2147483648)" }
    } else if is(&["bandwidth"]) {
        Range { least: 1e6, most: 1e16, how: "bytes per second, from 1e6 to 1e16 (450 GB/s is 4.5e11)" }
    } else if is(&["memory_bytes"]) {
        Range { least: 1048576.0, most: 1e16, how: "bytes, from 1048576 to 1e16 (80 GB is 8e10)" }
    } else if is(&["latency", "launch", "wait"]) {
        Range { least: 0.0, most: 1.0, how: "seconds, from 0 to 1 (5 microseconds are 5e-6)" }
    } else if is(&["ramp"]) {
        Range { least: 0.0, most: 1e6, how: "a length, from 0 to 1e6" }
    } else if name.starts_with("peak") {
        Range { least: 1e8, most: 1e19, how: "FLOP/s, from 1e8 to 1e19 (989 TFLOP/s are 9.89e14)" }
    } else if is(&COUNTS) {
        Range { least: 1.0, most: 1e7, how: "a count, a whole number from 1 to 1e7" }
    } else if name == "overlap_loss" {
        Range { least: 0.0, most: 0.99, how: "a share, from 0 to 0.99" }
    } else {
        Range { least: 1e-6, most: 1.0, how: "a share, more than 0 and at most 1" }
    }
}

/// Checks one figure.
///
/// # Errors
/// A value that is no number or out of the range of its kind.
pub(super) fn figure(name: &str, value: f64) -> Result<(), ClusterError> {
    let Range { least, most, how } = range(name);
    let is_count = COUNTS.iter().any(|part| name.contains(part));
    if (least..=most).contains(&value) && (!is_count || value.fract() == 0.0) {
        return Ok(());
    }
    Err(ClusterError::Figure { figure: name.to_string(), value: number_text(value), expect: how.to_string() })
}

/// Checks all figures of a profile.
///
/// # Errors
/// As [`figure`].
pub(super) fn figures(profile: &Profile) -> Result<(), ClusterError> {
    profile.figures().into_iter().try_for_each(|(name, Figure { value, .. })| figure(name, *value))
}

/// Whether less of a figure is faster, or fits less.
pub(super) fn is_cost(name: &str) -> bool {
    ["latency", "launch", "wait", "ramp", "loss", "reserved"].iter().any(|part| name.contains(part))
}
