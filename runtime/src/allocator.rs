//! The allocator of the command and of the benches.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_long};

/// Planning makes and drops many small vectors.
pub use mimalloc::MiMalloc as Allocator;

/// `mi_option_purge_delay` of `mimalloc.h`, version 2: how many milliseconds freed pages wait before the system has them back.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    fn mi_option_set(option: c_int, value: c_long);
}

/// Keeps freed pages for a second, where the allocator would keep them for a hundredth: a search frees and takes the same
/// megabytes again all the time, and a page that comes anew from the system is cleared first.
pub fn keep_freed_pages() {
    // SAFETY: declared as in the allocator's header; an option is an atomic number, which may be set at any time.
    unsafe { mi_option_set(PURGE_DELAY, 1000) };
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn mi_option_get(option: c_int) -> c_long;
    }

    /// The option has no name here: its default tells it from those beside it.
    #[test]
    fn the_option_is_the_delay() {
        // SAFETY: declared as in the allocator's header.
        let delay = || unsafe { mi_option_get(PURGE_DELAY) };
        assert_eq!(delay(), 10);
        keep_freed_pages();
        assert_eq!(delay(), 1000);
    }
}
