//! `planning [--quick] [--svg FILE]`: measures how long planning takes.

use shardc::Error;
use shardc::allocator::{Allocator, keep_freed_pages};
use shardc_bench::command;
use shardc_bench::planning::measure::{self, Planned};
use shardc_bench::planning::plot::{Line, svg};
use shardc_bench::planning::report::table;
use std::process::ExitCode;

/// As the command has it.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const USAGE: &str = "usage: planning [--quick] [--svg FILE]

Plans named models on large clusters, a random residual network of which no two layers are alike, and
one model on more and more devices and with more and more layers; prints tables of the times, each from
the model to a plan that is confirmed by lowering and simulating it, the gap to the least that is
possible, and how many plans are evaluated in a second on one core. With --svg growth as a plot. With
--quick the small cases alone.
";

fn main() -> ExitCode {
    keep_freed_pages();
    let (mut is_quick, mut file) = (false, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => is_quick = true,
            "--svg" => file = arguments.next(),
            _ => {
                eprint!("{USAGE}");
                return ExitCode::from(2);
            }
        }
    }
    let text = run(is_quick).and_then(|(text, plot)| {
        let Some(file) = file else { return Ok(text) };
        let path = std::path::PathBuf::from(file);
        std::fs::write(&path, plot).map_err(|source| Error::Io { path, source })?;
        Ok(text)
    });
    command::end(text, 1)
}

fn run(is_quick: bool) -> Result<(String, String), Error> {
    let mut named = vec![measure::model("llama-8b", None, "h100:8x1", 64)?];
    if !is_quick {
        named.push(measure::model("llama-70b", None, "h100:8x128", 1024)?);
        named.push(measure::model("llama-405b", None, "h100:8x2048", 16384)?);
    }
    let nodes: &[usize] = if is_quick { &[50, 100] } else { &[125, 250, 500, 1000] };
    let random = nodes.iter().map(|nodes| measure::random(*nodes, 1, "h100:8x8"));
    let random: Vec<Planned> = random.collect::<Result<_, _>>()?;
    let hosts: &[u64] = if is_quick { &[1, 2] } else { &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512] };
    let devices = hosts.iter().map(|hosts| measure::model("llama-8b", None, &format!("h100:8x{hosts}"), 64 * hosts));
    let devices: Vec<Planned> = devices.collect::<Result<_, _>>()?;
    let depths: &[u64] = if is_quick { &[4, 8] } else { &[8, 16, 32, 64, 128, 256] };
    let layers = depths.iter().map(|layers| measure::model("llama-8b", Some(*layers), "h100:8x16", 1024));
    let layers: Vec<Planned> = layers.collect::<Result<_, _>>()?;
    let rate = measure::evaluations("llama-8b", "h100:8x1", 64)?;

    let mut text = table("Named models, 8,192 tokens a sequence", &named);
    text += &table("A residual network of which no two layers are alike (size: nodes of its forward pass)", &random);
    text += &table("Growth with devices", &devices);
    text += &table("Growth with layers", &layers);
    text += &format!("\n{rate:.0} plans of llama-8b evaluated per second on one core\n");
    if let Some(bytes) = measure::peak_memory() {
        text += &format!("{bytes} of memory at the most\n");
    }
    let line = |name: &str, rows: &[Planned], of: &dyn Fn(&Planned) -> u64| Line {
        name: name.to_string(),
        points: rows.iter().map(|row| (of(row) as f64, row.seconds)).collect(),
    };
    let plot = svg(&[
        ("Planning time by devices", "devices", vec![line("llama-8b", &devices, &|row| row.devices)]),
        ("Planning time by layers, 128 devices", "layers", vec![line("llama-8b", &layers, &|row| row.size)]),
        ("No layer repeated, 64 devices", "nodes", vec![line("residual", &random, &|row| row.size)]),
    ]);
    Ok((text, plot))
}
