//! How the binaries end.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

/// Prints what a binary has to say, or what is wrong; then the exit code is `failed`.
pub fn end(said: Result<String, impl Display>, failed: u8) -> ExitCode {
    match said {
        Ok(text) => {
            // Whoever reads it may stop reading.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(failed)
        }
    }
}
