//! The driver of shardc: the one list of passes, the library's public face and the reports.

pub mod data;
pub mod error;
pub mod learning_rate;
pub mod metrics;
pub mod nearest;

pub use error::{DataError, Error};
