//! Measured time of a step's instructions.

use serde::{Deserialize, Serialize};
use shardc_ir::SectionId;
use shardc_ir::program::Stream;

/// When an instruction ran on its stream, in seconds from the step's start.
///
/// On a GPU the times are those of events around the instruction's kernels, so a span holds the time from the
/// moment at which the stream came to it; on CPU ranks they are the clock's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The rank.
    pub rank: u64,
    /// Where it ran.
    pub stream: Stream,
    /// The section it is of.
    pub section: SectionId,
    /// Its index in the section.
    pub instruction: usize,
    /// The microbatch it ran for.
    pub microbatch: u64,
    /// When it started.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}
