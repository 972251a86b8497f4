//! The front end: Burn modules and Hugging Face directories become graphs.
//!
//! * [`trace`](mod@trace): any Burn module and a loss become a [`Model`]: a graph on one device with global shapes, the
//!   initialisers as a second graph, and the names of the parameters.
//! * [`zoo`]: models written as ordinary Burn modules: language models, a mixture of experts, networks for pictures,
//!   two towers.
//! * [`hf`]: Hugging Face directories, read part by part and written so that a failure spoils nothing.
//!
//! Nothing is computed here and no parameter is held: a model of any size traces in seconds. Burn's types do not leave
//! this crate.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod detach;
pub mod dropout;
pub mod hf;
pub mod trace;
pub mod zoo;

pub use detach::detach;
pub use dropout::Dropout;
pub use trace::{Batch, Model, TraceError, trace};
