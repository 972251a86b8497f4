//! The time of a pipeline, from its schedule.
//!
//! All schedules run every microbatch through every stage; they differ in when a stage waits. In
//! the steady state the slowest stage decides; while the pipeline fills and drains, every other
//! stage is passed once:
//!
//! * GPipe and 1F1B wait for one forward and one backward pass of every other stage (Huang et al.,
//!   "GPipe", 2019; Narayanan et al., "PipeDream-Flush", 2021): they differ in memory alone;
//! * interleaved 1F1B waits for one of the `v` chunks of each (Narayanan et al., "Efficient
//!   large-scale language model training on GPU clusters", 2021, section 2.2);
//! * the zero-bubble schedules fill the wait with the halves of the backward pass that make weight
//!   gradients (Qi et al., "Zero bubble pipeline parallelism", 2024, table 1): H1 has the memory of
//!   1F1B, V has two chunks a stage and is left with nothing where the three parts are equal.

/// In which order a stage runs its microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Schedule {
    /// All forward passes, then all backward passes.
    GPipe,
    /// One forward, one backward.
    OneForwardOneBackward,
    /// The same over this many chunks of a stage.
    Interleaved(u64),
    /// Weight gradients fill the wait, in the memory of 1F1B.
    ZeroBubble,
    /// The same with two chunks a stage, down the pipeline and back up.
    ZeroBubbleV,
}

/// Seconds of one microbatch in one stage, with its sends that nothing hides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stage {
    /// The forward pass.
    pub forward: f64,
    /// The gradients of activations, with recomputation.
    pub backward: f64,
    /// The gradients of weights.
    pub weight: f64,
}

impl Stage {
    /// All three.
    pub fn total(self) -> f64 {
        self.forward + self.backward + self.weight
    }
}

/// Stages of which all but the last are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stages {
    /// How many.
    pub count: u64,
    /// Each but the last.
    pub typical: Stage,
    /// The last, which as a rule holds the head.
    pub last: Stage,
}

impl Stages {
    /// Seconds of `microbatches` under a schedule.
    pub fn seconds(self, microbatches: u64, schedule: Schedule) -> f64 {
        if self.count <= 1 {
            return microbatches as f64 * self.last.total();
        }
        let others = (self.count - 1) as f64;
        let slowest = self.typical.total().max(self.last.total());
        let wait = others * self.typical.total() + self.last.total() - slowest;
        let wait = match schedule {
            Schedule::GPipe | Schedule::OneForwardOneBackward => wait,
            Schedule::Interleaved(chunks) => wait / chunks.max(1) as f64,
            Schedule::ZeroBubble => {
                let Stage { forward, backward, weight } = self.typical;
                (wait - others * 2.0 * weight).max(others * (forward + backward - 2.0 * weight).max(0.0))
            }
            Schedule::ZeroBubbleV => {
                let Stage { forward, backward, weight } = self.typical;
                others * (forward + backward - 2.0 * weight).max(0.0)
            }
        };
        microbatches as f64 * slowest + wait.max(0.0)
    }
}

/// Microbatches whose activations stage 0 holds at a time, in units of one microbatch of a stage
/// (Narayanan et al., 2021, section 2.2: interleaving keeps some more).
pub fn in_flight(stages: u64, microbatches: u64, schedule: Schedule) -> f64 {
    let (p, m) = (stages as f64, microbatches as f64);
    match schedule {
        Schedule::GPipe => m,
        Schedule::OneForwardOneBackward | Schedule::ZeroBubble | Schedule::ZeroBubbleV => p.min(m),
        Schedule::Interleaved(chunks) => {
            let chunks = chunks.max(1) as f64;
            (p * (1.0 + (p - 1.0) / (p * chunks))).min(m)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(schedule: Schedule, expect: f64) {
        let stage = Stage { forward: 1.0, backward: 1.0, weight: 1.0 };
        let time = Stages { count: 4, typical: stage, last: stage }.seconds(8, schedule);
        assert!((time - expect).abs() < 1e-9, "{time}");
    }

    #[test]
    fn the_bubble_is_that_of_the_schedule() {
        check(Schedule::GPipe, 33.0);
        check(Schedule::OneForwardOneBackward, 33.0);
        check(Schedule::Interleaved(3), 27.0);
        check(Schedule::ZeroBubble, 27.0);
        check(Schedule::ZeroBubbleV, 24.0);
    }

    #[test]
    fn the_slowest_stage_decides() {
        let (typical, last) = (Stage { forward: 1.0, ..Stage::default() }, Stage { forward: 2.0, ..Stage::default() });
        let time = Stages { count: 3, typical, last }.seconds(10, Schedule::OneForwardOneBackward);
        assert!((time - 22.0).abs() < 1e-9, "{time}");
        assert_eq!(in_flight(4, 16, Schedule::OneForwardOneBackward), 4.0);
        assert_eq!(in_flight(4, 16, Schedule::GPipe), 16.0);
    }
}
