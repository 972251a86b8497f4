//! CUDA as the target of a program, with no device present.

use super::copies;
use super::select::{fuses, has_kernel, select_action};
use shardc_ir::ops::{Fused, Op};
use shardc_ir::program::Action;
use shardc_ir::{Bytes, Feature, Target, TensorType};

/// From how many bytes on an input is brought to the device ahead of its reader: the host's link takes some 20 us for
/// them, and the copy out of the staging buffer some 3.
const STAGED: Bytes = Bytes(1 << 20);

/// What a program reserves for its instructions is what the kernels chosen for them use.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaTarget;

impl Target for CudaTarget {
    fn has_kernel(&self, op: &Op, operands: &[TensorType], results: &[TensorType]) -> bool {
        has_kernel(op, operands, results)
    }

    fn scratch(&self, action: &Action, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        if let Some(bytes) = copies::scratch(action, operands, results) {
            return Bytes(bytes);
        }
        let selection = select_action(action, operands, results).ok().flatten();
        Bytes(selection.map_or(0, |selection| selection.scratch))
    }

    fn runs(&self, feature: Feature) -> bool {
        feature == Feature::Pipeline
    }

    fn brings_ahead(&self, bytes: Bytes) -> bool {
        bytes >= STAGED
    }

    fn fuses(&self, region: &Fused, operands: &[TensorType]) -> bool {
        fuses(region, operands)
    }
}
