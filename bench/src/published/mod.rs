//! Predictions of runs that others published, and how far they are off: operations and collectives by the
//! planner's cost model, a step of equal layers by a closed form of its own ([`step`]), which knows the software of each run.

pub mod block;
mod contradiction;
pub mod decoder;
pub mod memory;
mod parts;
pub mod pipeline;
pub mod predict;
pub mod report;
pub mod rows;
pub mod score;
pub mod step;
pub mod system;
mod words;
