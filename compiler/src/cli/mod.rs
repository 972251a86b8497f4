//! The `shardc` command: flags in, reports out.
pub mod args;
