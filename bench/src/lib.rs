//! Speed, memory and prediction error, measured.

pub mod planning;
pub mod published;
