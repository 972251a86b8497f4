//! CPU ranks as the target of a program.

use shardc_ir::program::Action;
use shardc_ir::{Bytes, Feature, Target, TensorType};

/// Kernels allocate what they need for themselves; stages of a pipeline are ranks like all others.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuTarget;

impl Target for CpuTarget {
    fn scratch(&self, _: &Action, _: &[TensorType], _: &[TensorType]) -> Bytes {
        Bytes(0)
    }

    fn runs(&self, feature: Feature) -> bool {
        feature == Feature::Pipeline
    }

    /// Ranks that share the cores of one host gain nothing by waiting for each other: stages are run where they
    /// are asked for.
    fn searches(&self, _: Feature) -> bool {
        false
    }
}
