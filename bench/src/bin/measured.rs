//! `measured FILE…`: how far today's predictions are from steps that were measured.

use shardc::allocator::{Allocator, keep_freed_pages};
use shardc_bench::{command, measured};
use std::path::PathBuf;
use std::process::ExitCode;

/// As the command has it.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const USAGE: &str = "usage: measured FILE...

Plans each run of these files (as bench/fixtures/h200_runs.json) with its pins, and prints what was measured of its
step and memory beside what is predicted. bench/measured.py measures them again on GPUs.
";

fn main() -> ExitCode {
    keep_freed_pages();
    command::end(run(), 2)
}

fn run() -> Result<String, String> {
    let mut files = Vec::new();
    for argument in std::env::args_os().skip(1) {
        match argument.to_str() {
            Some("--help" | "-h") => return Ok(USAGE.to_string()),
            Some(flag) if flag.starts_with('-') => return Err(format!("unknown flag `{flag}`\n{USAGE}")),
            _ => files.push(PathBuf::from(argument)),
        }
    }
    if files.is_empty() {
        return Err(format!("no file of runs is given\n{USAGE}"));
    }
    let mut all = Vec::new();
    for file in &files {
        for run in measured::read(file).map_err(|error| error.to_string())? {
            all.push(measured::compare(&run).map_err(|error| error.to_string())?);
        }
    }
    Ok(measured::table(&all))
}
