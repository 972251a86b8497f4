//! The passes: from the traced graph to one program per rank.
//!
//! Each pass is a pure function in a file of its own, named by a verb phrase. The driver holds the
//! one list of them and the reasons for their order.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod align;
pub mod allocate;
#[cfg(test)]
mod axes_tests;
pub mod chunk;
pub mod cluster;
pub mod cost;
pub mod deterministic;
pub mod differentiate;
#[cfg(test)]
mod differentiate_tests;
mod divisors;
pub mod error;
pub mod fold;
pub mod head;
pub mod keep_casts;
#[cfg(test)]
mod keep_casts_tests;
pub mod lower;
#[cfg(test)]
mod lower_tests;
#[cfg(test)]
mod mixed_tests;
#[cfg(test)]
mod offload_tests;
pub mod optimizer;
pub mod pack;
mod part;
pub mod pipeline;
#[cfg(test)]
mod pipeline_tests;
pub mod precision;
pub mod quantize;
pub mod raise;
pub mod random;
pub mod rematerialize;
pub mod reshard;
pub mod same;
pub mod schedule;
pub mod search;
#[cfg(test)]
pub(crate) mod search_tests;
#[cfg(test)]
mod seeded_bug_tests;
pub mod shard;
#[cfg(test)]
mod siblings_tests;
pub mod simulate;
pub mod split_batch;
pub mod statistics;
pub mod synthetic;
pub mod threads;

pub use error::{PassError, UserError};
