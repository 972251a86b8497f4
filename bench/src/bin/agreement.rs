//! `agreement [--count N] [--seed N] [--rows]`: how near the search's closed form is to the programs of its plans.

use shardc::allocator::{Allocator, keep_freed_pages};
use shardc_bench::agreement::draw::Draw;
use shardc_bench::agreement::{measure, report};
use std::io::Write;
use std::process::ExitCode;

/// As the command has it.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const USAGE: &str = "usage: agreement [--count N] [--seed N] [--rows]

Draws N (200) requests, each a model, devices and a plan's choices, from a seed (1). Compares what the search's
closed form predicts of each plan with what simulating its programs does, and prints by kind of plan how far they
are from each other in seconds and bytes, with the requests of which they are the farthest. With --rows one line per
request instead: seconds and bytes of both, and the request.
";

fn main() -> ExitCode {
    keep_freed_pages();
    let (mut count, mut seed, mut is_rows) = (200, 1, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse::<u64>().ok());
        let known = match argument.as_str() {
            "--count" => number().map(|number| count = number),
            "--seed" => number().map(|number| seed = number),
            "--rows" => {
                is_rows = true;
                Some(())
            }
            _ => None,
        };
        if known.is_none() {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    let (mut draw, mut compared, mut refused) = (Draw::new(seed), Vec::new(), 0);
    for _ in 0..count {
        match measure::compare(&draw.case()) {
            Ok(one) => compared.push(one),
            Err(_) => refused += 1,
        }
    }
    // Whoever reads it may stop reading.
    let text = if is_rows { report::rows(&compared) } else { report::text(&compared, refused) };
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}
