//! Speed, memory and prediction error, measured.

pub mod agreement;
pub mod planning;
pub mod published;
