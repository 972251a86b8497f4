//! The search for the fastest algorithm: candidates are measured until some in a row are no faster, what was fast for
//! one task comes first for the others, and the fastest few are measured once more.

use super::Choice;
use super::bench::{Trial, look, settle};
use crate::cuda::device::Failure;
use std::collections::BTreeMap;
use std::time::Instant;

/// How much faster a candidate must be to count as faster.
const GAIN: f64 = 0.995;

/// What a configuration that was not tried yet is expected to take, of the fastest.
const UNTRIED: f64 = 1.1;

/// The least that configurations took for any task of a program, of the fastest for that task.
pub struct Ratios<C>(BTreeMap<C, f64>);

impl<C: Ord + Clone> Ratios<C> {
    /// Before anything is tried.
    pub fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Puts the most promising first.
    pub fn sort<T>(&self, all: &mut [T], configuration: impl Fn(&T) -> &C) {
        let ratio = |one: &T| self.0.get(configuration(one)).copied().unwrap_or(UNTRIED);
        all.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)).then_with(|| configuration(a).cmp(configuration(b))));
    }

    /// Takes in what was tried for a task.
    pub fn learn<A: Clone>(&mut self, tried: &Tried<C, A>) {
        for (configuration, (seconds, _)) in &tried.by {
            let ratio = self.0.entry(configuration.clone()).or_insert(f64::INFINITY);
            *ratio = ratio.min(seconds / tried.least());
        }
    }
}

/// What was measured of one task: seconds, and the algorithm, by how it is configured.
pub struct Tried<C, A> {
    by: BTreeMap<C, (f64, A)>,
    /// When no more are tried.
    until: Instant,
}

impl<C: Ord + Clone, A: Clone> Tried<C, A> {
    /// Before anything is tried.
    pub fn new(until: Instant) -> Self {
        Self { by: BTreeMap::new(), until }
    }

    fn least(&self) -> f64 {
        self.by.values().map(|(seconds, _)| *seconds).fold(f64::INFINITY, f64::min)
    }

    /// The `count` that took the least time, without those that took `most` times that of the fastest.
    pub fn fastest(&self, count: usize, most: f64) -> Vec<(C, A)> {
        let mut all: Vec<(f64, &C, &A)> = self.by.iter().map(|(at, (seconds, one))| (*seconds, at, one)).collect();
        all.retain(|(seconds, ..)| *seconds <= most * self.least());
        all.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(b.1)));
        all.into_iter().take(count).map(|(_, at, algorithm)| (at.clone(), algorithm.clone())).collect()
    }

    /// Measures what was not tried before, until `patience` in a row were no faster than the fastest. What cannot be made
    /// ready is left out.
    pub fn try_all<M: FnOnce() -> Option<A>>(
        &mut self,
        trial: &impl Trial<Algorithm = A>,
        candidates: impl IntoIterator<Item = (C, M)>,
        patience: usize,
    ) -> Result<(), Failure> {
        let mut in_vain = 0;
        for (configuration, ready) in candidates {
            if self.by.contains_key(&configuration) {
                continue;
            }
            if in_vain == patience || (Instant::now() > self.until && !self.by.is_empty()) {
                break;
            }
            let Some(algorithm) = ready() else { continue };
            let least = self.least();
            let seconds = look(trial, &algorithm, least)?;
            in_vain = if seconds < GAIN * least { 0 } else { in_vain + 1 };
            self.by.insert(configuration, (seconds, algorithm));
        }
        Ok(())
    }

    /// The choice between the library's first one, with which the others are compared, and the fastest `count`, which
    /// took at most `most` times as long as the fastest. None where none runs.
    pub fn choose(
        &self,
        trial: &impl Trial<Algorithm = A>,
        (own, first): (&C, A),
        (count, most): (usize, f64),
    ) -> Result<Option<Choice<A>>, Failure> {
        let others = self.fastest(count, most).into_iter().filter(|(at, _)| at != own);
        let finalists: Vec<A> = [first].into_iter().chain(others.map(|(_, algorithm)| algorithm)).collect();
        settle(trial, &finalists)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// An algorithm is the microseconds that it takes.
    struct Fake;

    impl Trial for Fake {
        type Algorithm = u32;

        fn load(&self, _: &u32) -> Result<bool, Failure> {
            Ok(true)
        }

        fn seconds(&self, algorithm: &u32, _: u32) -> Result<f64, Failure> {
            Ok(f64::from(*algorithm) * 1e-6)
        }

        fn sample(&self, _: &u32) -> Result<Option<Vec<u8>>, Failure> {
            Ok(Some(Vec::new()))
        }

        fn agree(&self, _: &[u8], _: &[u8]) -> bool {
            true
        }

        fn text(&self, algorithm: &u32) -> String {
            algorithm.to_string()
        }
    }

    fn candidates(all: &[(char, u32)]) -> Vec<(char, impl FnOnce() -> Option<u32>)> {
        // One that takes no time cannot be made ready.
        all.iter().map(|(at, time)| (*at, *time)).map(|(at, time)| (at, move || (time > 0).then_some(time))).collect()
    }

    #[test]
    fn trying_ends_where_some_in_a_row_are_no_faster() {
        let mut tried = Tried::new(Instant::now() + Duration::from_secs(60));
        let all = [('a', 900), ('b', 0), ('c', 950), ('d', 800), ('e', 801), ('f', 802), ('g', 100)];
        tried.try_all(&Fake, candidates(&all), 2).unwrap();
        assert_eq!(tried.fastest(9, 1.1), [('d', 800), ('e', 801), ('f', 802)]);
        let choice = tried.choose(&Fake, (&'a', 900), (2, 1.1)).unwrap().unwrap();
        assert_eq!((choice.algorithm, choice.first_microseconds.round()), (800, 900.0));
        // What was fast comes first for the next task.
        let mut ratios = Ratios::new();
        ratios.learn(&tried);
        let mut next = ['a', 'b', 'c', 'd', 'g'];
        ratios.sort(&mut next, |one| one);
        assert_eq!(next, ['d', 'b', 'g', 'a', 'c']);
    }

    #[test]
    fn one_is_tried_however_late_it_is() {
        let mut tried = Tried::new(Instant::now());
        std::thread::sleep(Duration::from_millis(2));
        tried.try_all(&Fake, candidates(&[('a', 0), ('b', 900), ('c', 100)]), 9).unwrap();
        assert_eq!(tried.fastest(9, 1.1), [('b', 900)]);
    }
}
