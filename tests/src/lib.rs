//! What the tests of the whole share: the verbs of the golden files.

pub mod golden;
pub mod verbs;
