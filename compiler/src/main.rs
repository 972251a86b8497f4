//! The `shardc` command.
//!
//! Data goes to stdout and logs to stderr. Exit codes: 0 ok, 1 a run or a check failed, 2 wrong
//! usage, 3 no plan fits.

mod cli;

use clap::Parser;

fn main() {
    let _ = cli::args::Cli::parse();
}
