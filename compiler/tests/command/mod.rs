//! The command `shardc`, run from outside.

use std::path::Path;
use std::process::{Command, Output};

/// Runs shardc.
pub fn shardc(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shardc")).args(args).env_remove("RUST_LOG").output().unwrap()
}

/// Runs shardc, and expects an exit code and words in what it says, which is all given.
#[track_caller]
pub fn check(args: &[&str], code: i32, words: &[&str]) -> String {
    let output = shardc(args);
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    assert!(!text.contains("panicked"), "{args:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{args:?} does not say `{word}`: {text}");
    }
    text
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
