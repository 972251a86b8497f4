//! When the nodes of a plan run.

/// When a node runs, relative to the loop over the microbatches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// It is the same for every microbatch: it runs before the loop, or in it.
    #[default]
    Invariant,
    /// Once per microbatch: its strategy names a time axis.
    Loop,
    /// After all microbatches: it depends on a value resolved over a time axis.
    After,
}
