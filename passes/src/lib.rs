//! The passes: from the traced graph to one program per rank.
//!
//! Each pass is a pure function in a file of its own, named by a verb phrase. The driver holds the
//! one list of them and the reasons for their order.

pub mod differentiate;
#[cfg(test)]
mod differentiate_tests;
pub mod error;
pub mod optimizer;
pub mod precision;

pub use error::{PassError, UserError};
