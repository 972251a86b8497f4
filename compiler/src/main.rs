//! The `shardc` command.
//!
//! Data goes to stdout and logs to stderr. Exit codes: 0 ok, 1 a run or a check failed, 2 wrong
//! usage, 3 no plan fits.

mod cli;

use clap::Parser;
use shardc::allocator::{Allocator, keep_freed_pages};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    keep_freed_pages();
    let cli = cli::args::Cli::parse();
    cli::log::start(cli.verbose);
    match cli::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cli::log::report(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
