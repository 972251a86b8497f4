//! What lowering and the search ask of the machine that will run a program: the scratch memory of each instruction,
//! which is a buffer of the program like any other; which *regions* of operations it runs as one kernel; which features
//! it runs.
//!
//! A runtime answers for its own kernels, without a device. So a plan for a cluster that is not here counts the same
//! bytes as one that is about to run.

use crate::feature::Feature;
use crate::ops::{Fused, Op};
use crate::program::Action;
use crate::types::TensorType;
use crate::units::Bytes;
use std::fmt::Debug;

/// The machine's side of a program.
pub trait Target: Debug + Sync {
    /// The scratch memory of an instruction with these local types, in the space of its results. An
    /// action that the target cannot run needs none; loading the program tells.
    fn scratch(&self, action: &Action, operands: &[TensorType], results: &[TensorType]) -> Bytes;

    /// Whether it has a kernel for an operation on tensors of these element types and ranks, however large.
    fn has_kernel(&self, op: &Op, operands: &[TensorType], results: &[TensorType]) -> bool {
        let _ = (op, operands, results);
        true
    }

    /// Whether it runs what not every target does.
    fn runs(&self, feature: Feature) -> bool {
        let _ = feature;
        false
    }

    /// Whether plans with it are searched for this target without being asked for, if there is anything to gain.
    fn searches(&self, feature: Feature) -> bool {
        self.runs(feature)
    }

    /// Whether it brings so many bytes of an input to the device while what comes before their reader still runs: they
    /// wait in a staging buffer of the program, from which [`Action::Feed`] copies them.
    fn brings_ahead(&self, bytes: Bytes) -> bool {
        let _ = bytes;
        false
    }

    /// Whether it has one kernel for a region on these local types. Lowering fuses nothing else.
    fn fuses(&self, _region: &Fused, _operands: &[TensorType]) -> bool {
        false
    }
}

/// A target whose kernels need no scratch memory of the arena, and that runs nothing that not every target does.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoScratch;

impl Target for NoScratch {
    fn scratch(&self, _: &Action, _: &[TensorType], _: &[TensorType]) -> Bytes {
        Bytes(0)
    }
}
