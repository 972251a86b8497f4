//! Speed, memory and prediction error, measured.

pub mod published;
