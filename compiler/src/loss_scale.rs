//! The dynamic scale of a loss whose cotangents are in fp16 (Micikevicius et al., "Mixed precision
//! training", 2018, section 3.2, with the constants of PyTorch's `GradScaler`).
//!
//! The host of each rank keeps it: every rank reads the same gradient norm after a step, so every rank
//! gives the next one the same scale.

/// The scale of the first step.
const FIRST: f64 = 65_536.0;
/// Steps in a row without an overflow after which the scale is doubled.
const PATIENCE: u64 = 2000;
/// The least scale: below it, it is not the scale that makes gradients overflow.
const LEAST: f64 = 1.0 / 65_536.0;

/// The scale of the loss, and what it has seen.
#[derive(Clone, Debug, PartialEq)]
pub struct LossScale {
    factor: f64,
    /// Steps since the last change.
    good: u64,
    skipped: u64,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { factor: FIRST, good: 0, skipped: 0 }
    }
}

impl LossScale {
    /// The scale of the next step.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// How many steps were skipped.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Takes in whether the gradients of a step were finite: halves the scale if not, doubles it after long
    /// enough. False if the scale is so small that it cannot be the cause.
    pub fn observe(&mut self, is_finite: bool) -> bool {
        if !is_finite {
            (self.factor, self.good, self.skipped) = (self.factor / 2.0, 0, self.skipped + 1);
            return self.factor >= LEAST;
        }
        self.good += 1;
        if self.good == PATIENCE {
            (self.factor, self.good) = (self.factor * 2.0, 0);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_at_an_overflow_and_doubles_after_2000_good_steps() {
        let mut scale = LossScale::default();
        assert!(scale.observe(false));
        assert_eq!((scale.factor(), scale.skipped()), (32_768.0, 1));
        for _ in 0..1999 {
            assert!(scale.observe(true));
        }
        assert_eq!(scale.factor(), 32_768.0);
        scale.observe(true);
        assert_eq!(scale.factor(), 65_536.0);
        // An overflow starts the count anew.
        scale.observe(true);
        scale.observe(false);
        assert_eq!(scale, LossScale { factor: 32_768.0, good: 0, skipped: 2 });
    }

    #[test]
    fn gives_up_where_no_scale_helps() {
        let mut scale = LossScale::default();
        let tried = (0..100).take_while(|_| scale.observe(false)).count();
        assert_eq!(tried, 32);
    }
}
