//! Plan files for commands that read one.

use crate::command::{check, text};
use std::path::{Path, PathBuf};

/// A plan of a tiny model on four ranks, in `dir`.
pub fn plan_in(dir: &Path, name: &str, pin: &str) -> PathBuf {
    let path = dir.join(name);
    let args = ["plan", "llama-tiny", "--cluster", "cpu:4", "--batch", "8", "--seq", "32", "--pin", pin];
    check(&[&args[..], &["-o", text(&path)]].concat(), 0, &[]);
    path
}
