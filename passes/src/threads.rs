//! Work on several threads, of which nothing tells by what comes of it.
//!
//! All share one pool. A thread that waits for others goes on with their work, or with any other: so nothing that runs here
//! may wait for what another thread does in any other way than by [`map`], and no lock is held where that is called.

use rayon::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What comes of each item, in their order, on as many threads as there are cores. Items may ask for more of it:
/// who waits for theirs goes on with others.
///
/// # Panics
/// If one of them does.
pub fn map<T: Sync, R: Send>(items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    items.par_iter().with_max_len(1).map(&of).collect()
}

/// How many threads there are.
pub fn count() -> usize {
    rayon::current_num_threads()
}

/// What a mutex guards, whatever became of who had it last.
pub fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_of_items_is_in_their_order() {
        let items: Vec<u64> = (0..100).collect();
        let squares: Vec<u64> = items.iter().map(|item| item * item).collect();
        assert_eq!(map(&items, |item| item * item), squares);
        assert!(map(&items[..0], |item| *item).is_empty());
    }
}
