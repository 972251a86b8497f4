//! What happens next, where several things go on at once.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Things that happen at some time, the earliest first; of those of one time, in their own order. Times are not negative,
/// so their bits are in their order.
pub(super) struct Agenda<T>(BinaryHeap<Reverse<(u64, T)>>);

impl<T: Ord> Default for Agenda<T> {
    fn default() -> Self {
        Self(BinaryHeap::new())
    }
}

impl<T: Ord> Agenda<T> {
    /// Something happens at that time.
    pub fn add(&mut self, time: f64, what: T) {
        debug_assert!(time.is_sign_positive(), "a time of {time}");
        self.0.push(Reverse((time.to_bits(), what)));
    }

    /// The next time at which anything happens, and all of that goes into `due`; nothing, if nothing happens any more.
    pub fn next(&mut self, due: &mut Vec<T>) -> Option<f64> {
        let Reverse((now, first)) = self.0.pop()?;
        due.push(first);
        while self.0.peek().is_some_and(|Reverse((time, _))| *time == now) {
            due.extend(self.0.pop().map(|Reverse((_, what))| what));
        }
        Some(f64::from_bits(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_at_one_time_comes_together() {
        let mut agenda = Agenda::default();
        [(2.0, 'c'), (1.0, 'b'), (3.0, 'd'), (1.0, 'a')].into_iter().for_each(|(time, what)| agenda.add(time, what));
        let mut next = || {
            let mut due = Vec::new();
            agenda.next(&mut due).map(|time| (time, due))
        };
        assert_eq!(next(), Some((1.0, vec!['a', 'b'])));
        assert_eq!(next(), Some((2.0, vec!['c'])));
        assert_eq!(next(), Some((3.0, vec!['d'])));
        assert_eq!(next(), None);
    }
}
