//! The learning rate over the steps of a run.
//!
//! `warmup` steps rise linearly, `rate * (step + 1) / warmup`, so the first step already moves;
//! the steps after it fall from `rate` to `min_rate` along the schedule, reaching `min_rate` at
//! the step after the last (Loshchilov and Hutter, "SGDR", 2017, for the cosine).

use serde::{Deserialize, Serialize};

/// How the rate falls after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// It does not.
    #[default]
    Constant,
    /// Half a period of a cosine.
    Cosine,
    /// A straight line.
    Linear,
}

/// A learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearningRate {
    /// The highest rate.
    pub rate: f64,
    /// The rate at the end.
    pub min_rate: f64,
    /// The steps of linear rise.
    pub warmup: u64,
    /// The shape of the fall.
    pub decay: Decay,
    /// The steps of the run.
    pub steps: u64,
}

impl LearningRate {
    /// The rate of a step (from 0).
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.rate * (step + 1) as f64 / self.warmup as f64;
        }
        let span = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let progress = ((step - self.warmup) as f64 / span).min(1.0);
        let share = match self.decay {
            Decay::Constant => return self.rate,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            Decay::Linear => 1.0 - progress,
        };
        self.min_rate + (self.rate - self.min_rate) * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(decay: Decay, warmup: u64, expect: [f64; 6]) {
        let schedule = LearningRate { rate: 1.0, min_rate: 0.2, warmup, decay, steps: 6 };
        for (step, expect) in expect.into_iter().enumerate() {
            let rate = schedule.at(step as u64);
            assert!((rate - expect).abs() < 1e-4, "{decay:?} at {step}: {rate}, not {expect}");
        }
    }

    #[test]
    fn rates() {
        check(Decay::Constant, 0, [1.0; 6]);
        check(Decay::Constant, 2, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]);
        check(Decay::Linear, 2, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]);
        check(Decay::Cosine, 2, [0.5, 1.0, 1.0, 0.88284, 0.6, 0.31716]);
        check(Decay::Cosine, 6, [0.16667, 0.33333, 0.5, 0.66667, 0.83333, 1.0]);
    }
}
