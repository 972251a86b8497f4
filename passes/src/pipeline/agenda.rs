//! What happens next, where several things go on at once.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Things that happen at some time, the earliest first; of those of one time, in their own order.
pub(super) struct Agenda<T>(BinaryHeap<Reverse<Entry<T>>>);

struct Entry<T>(f64, T);

impl<T: Ord> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T: Ord> Eq for Entry<T> {}

impl<T: Ord> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then_with(|| self.1.cmp(&other.1))
    }
}

impl<T: Ord> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T: Ord> Default for Agenda<T> {
    fn default() -> Self {
        Self(BinaryHeap::new())
    }
}

impl<T: Ord> Agenda<T> {
    /// Something happens at that time.
    pub fn add(&mut self, time: f64, what: T) {
        self.0.push(Reverse(Entry(time, what)));
    }

    /// The next time at which anything happens, and all of that goes into `due`; nothing, if nothing happens any more.
    pub fn next(&mut self, due: &mut Vec<T>) -> Option<f64> {
        let Reverse(Entry(now, first)) = self.0.pop()?;
        due.push(first);
        while self.0.peek().is_some_and(|Reverse(Entry(time, _))| *time <= now) {
            due.extend(self.0.pop().map(|Reverse(Entry(_, what))| what));
        }
        Some(now)
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
