//! Dropout that is recorded by a trace.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Distribution, Tensor};

/// How much to drop.
#[derive(Config, Debug)]
pub struct DropoutConfig {
    /// The probability of dropping an element, in `[0, 1)`.
    pub probability: f64,
}

/// Sets elements to zero with a probability, and divides the others by the probability of keeping
/// (Srivastava et al., "Dropout", 2014). Burn's own layer acts only under Burn's autodiff, of
/// which a trace has no need; this one always acts. The numbers differ from step to step and do
/// not depend on the plan.
#[derive(Module, Debug)]
pub struct Dropout {
    probability: f64,
}

impl DropoutConfig {
    /// The layer. A probability outside `[0, 1)` is taken to the nearest that is inside.
    pub fn init(&self) -> Dropout {
        Dropout { probability: self.probability.clamp(0.0, 1.0 - f64::EPSILON) }
    }
}

impl Dropout {
    /// `x` of any shape, with elements dropped.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        if self.probability <= 0.0 {
            return x;
        }
        let keep = 1.0 - self.probability;
        let mask = x.random_like(Distribution::Bernoulli(keep));
        x * mask * (1.0 / keep)
    }
}
