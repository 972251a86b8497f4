//! Predictions of runs that others published, by the planner's cost model, and how far they are off.

pub mod block;
mod contradiction;
pub mod decoder;
pub mod memory;
mod parts;
pub mod predict;
pub mod report;
pub mod rows;
pub mod score;
pub mod system;
mod words;
