//! How near the closed form by which the search compares plans is to the programs of the plans, over requests that are
//! drawn at random.

pub mod draw;
pub mod measure;
pub mod report;
