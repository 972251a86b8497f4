//! The loss of language models.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor};

/// A label that does not count.
pub const IGNORED: i64 = -100;

/// The mean cross-entropy of `logits` `[b, s, v]`, where position `i` predicts label `i + 1` of
/// `labels` `[b, s]`, over the labels that are not [`IGNORED`].
pub fn causal_loss(logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<1> {
    let (sum, counted) = causal_terms(logits, labels);
    sum / counted.sum()
}

/// The sum of the cross-entropies whose mean [`causal_loss`] is, and which positions count: 1, or 0, `[b, s]`. The
/// labels are shifted, not the logits, so the sequence stays whole.
pub fn causal_terms(logits: Tensor<3>, labels: Tensor<2, Int>) -> (Tensor<1>, Tensor<2>) {
    let [batch, seq] = labels.dims();
    let end = Tensor::<2, Int>::full([batch, 1], IGNORED, &labels.device());
    let next = Tensor::cat(vec![labels.slice([0..batch, 1..seq]), end], 1);
    let ignored = next.clone().equal_scalar(IGNORED);
    let index = next.mask_fill(ignored.clone(), 0).reshape([batch, seq, 1]);
    let picked = log_softmax(logits, 2).gather(2, index).reshape([batch, seq]);
    let sum = picked.neg().mask_fill(ignored.clone(), 0.0).sum();
    (sum, ignored.bool_not().float())
}
