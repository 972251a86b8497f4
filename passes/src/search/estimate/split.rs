//! Seconds by what bounds them.

use crate::cost::Bound;

/// Seconds, split by what bounds them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Split {
    pub matmul: f64,
    pub memory: f64,
    /// Collectives of the tensor axes, as far as they show.
    pub communication: f64,
}

impl Split {
    /// All of them.
    pub fn seconds(self) -> f64 {
        self.matmul + self.memory + self.communication
    }

    /// So many seconds, bound by one thing.
    pub fn of(seconds: f64, bound: Bound) -> Self {
        let mut split = Self::default();
        split.add(seconds, bound);
        split
    }

    /// Adds so many seconds, bound by one thing.
    pub fn add(&mut self, seconds: f64, bound: Bound) {
        match bound {
            Bound::Matmul => self.matmul += seconds,
            Bound::Memory => self.memory += seconds,
        }
    }
}

impl std::ops::Add for Split {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            matmul: self.matmul + other.matmul,
            memory: self.memory + other.memory,
            communication: self.communication + other.communication,
        }
    }
}
