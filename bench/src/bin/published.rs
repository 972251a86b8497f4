//! `published FILE… [--json | --rows | --unpinned]`: predicts published runs and prints how far the predictions are off.

use shardc_bench::command;
use shardc_bench::published::report::{self, Summaries};
use shardc_bench::published::{rows, score};
use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: published FILE... [--json | --rows | --unpinned]

Reads lists of published training runs (JSON), pins each run's degrees, predicts its step time and
memory by the planner's cost model, and prints per split and overall: mean, median and 90th
percentile of the absolute error, bias, rank correlation and regret within groups, a constant-rate
baseline, the worst runs, those that cannot be expressed, and evaluations per second.
With --json the same as one object, in which every figure is a share (0.07 is 7%); with --rows one
line per run instead; with --unpinned one line per run that sets its plan beside the fastest that
fits.
";

fn main() -> ExitCode {
    command::end(run(), 2)
}

fn run() -> Result<String, String> {
    let (mut files, mut is_json, mut is_rows, mut is_unpinned) = (Vec::new(), false, false, false);
    for argument in std::env::args_os().skip(1) {
        match argument.to_str() {
            Some("--json") => is_json = true,
            Some("--rows") => is_rows = true,
            Some("--unpinned") => is_unpinned = true,
            Some("--help" | "-h") => return Ok(USAGE.to_string()),
            Some(flag) if flag.starts_with("--") => return Err(format!("unknown flag `{flag}`\n{USAGE}")),
            _ => files.push(PathBuf::from(argument)),
        }
    }
    if files.is_empty() {
        return Err(format!("no file of runs is given\n{USAGE}"));
    }
    let mut runs = Vec::new();
    for file in &files {
        runs.extend(rows::read(file).map_err(|error| error.to_string())?);
    }
    let mut outcome = score::score(&runs);
    if is_unpinned {
        return Ok(report::unpinned(&mut outcome));
    }
    if is_rows {
        return Ok(report::rows(&outcome));
    }
    let rate = report::evaluations_per_second(&mut outcome);
    let summaries = Summaries::of(&outcome);
    if is_json {
        Ok(format!("{:#}\n", report::json(&outcome, &summaries, rate)))
    } else {
        Ok(report::text(&outcome, &summaries, rate))
    }
}
