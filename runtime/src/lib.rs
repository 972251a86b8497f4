//! Runs what the compiler made.

pub mod mapped;
