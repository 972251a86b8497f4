//! A tensor without its history, recorded by a trace.

use burn::tensor::Tensor;

/// Bounds that no number of any element type reaches, by which a trace knows a detached tensor.
pub(crate) const BOUND: f64 = 1.618e301;

/// `x`, through which no gradient goes: a target, a teacher's answer, a straight-through estimate. Burn's own
/// [`Tensor::detach`] leaves nothing behind without Burn's autodiff, so a trace cannot see it; this one is recorded, and
/// under Burn's autodiff it does the same.
pub fn detach<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    x.detach().clamp(-BOUND, BOUND)
}
