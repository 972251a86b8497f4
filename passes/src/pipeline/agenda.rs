//! What happens next, where several things go on at once.

/// When each of so many things happens next, the earliest first; of those of one time, in their order. A tree of minima:
/// there are few of them, which change all the time.
pub(super) struct Agenda {
    /// The bits of times, which are in their order, since times are not negative: of each part of the things the least,
    /// behind those of its halves' whole, and in the end of each thing.
    least: Vec<u64>,
}

/// Later than anything.
const NEVER: u64 = u64::MAX;

impl Agenda {
    /// Of so many things none happens yet.
    pub fn new(things: usize) -> Self {
        Self { least: vec![NEVER; 2 * things.next_power_of_two()] }
    }

    /// Something happens at that time, and not at another.
    pub fn set(&mut self, thing: usize, time: f64) {
        debug_assert!(time.is_sign_positive(), "a time of {time}");
        self.put(self.least.len() / 2 + thing, time.to_bits());
    }

    fn put(&mut self, mut at: usize, time: u64) {
        self.least[at] = time;
        while at > 1 {
            let least = self.least[at].min(self.least[at ^ 1]);
            at /= 2;
            if self.least[at] == least {
                break;
            }
            self.least[at] = least;
        }
    }

    /// The next time at which anything happens, and all of that goes into `due`; nothing, if nothing happens any more.
    pub fn next(&mut self, due: &mut Vec<usize>) -> Option<f64> {
        let now = self.least[1];
        if now == NEVER {
            return None;
        }
        let things = self.least.len() / 2;
        while self.least[1] == now {
            let mut at = 1;
            while at < things {
                at = 2 * at + usize::from(self.least[2 * at] != now);
            }
            due.push(at - things);
            self.put(at, NEVER);
        }
        Some(f64::from_bits(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_at_one_time_comes_together() {
        for things in [5, 8, 1000] {
            let mut agenda = Agenda::new(things);
            [(2.0, 2), (7.0, 3), (1.0, 1), (3.0, 4), (1.0, 0), (4.0, 3)]
                .into_iter()
                .for_each(|(time, thing)| agenda.set(thing, time));
            let mut next = || {
                let mut due = Vec::new();
                agenda.next(&mut due).map(|time| (time, due))
            };
            assert_eq!(next(), Some((1.0, vec![0, 1])));
            assert_eq!(next(), Some((2.0, vec![2])));
            assert_eq!(next(), Some((3.0, vec![4])));
            assert_eq!(next(), Some((4.0, vec![3])));
            assert_eq!(next(), None);
        }
        assert_eq!(Agenda::new(1).next(&mut Vec::new()), None);
    }
}
