//! Speed, memory and prediction error, measured.

pub mod agreement;
pub mod command;
pub mod measured;
pub mod planning;
pub mod published;
