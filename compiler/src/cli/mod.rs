//! The `shardc` command: flags in, reports out.

pub mod args;
mod capacity;
mod explain;
mod files;
mod inspect;
pub mod log;
mod number;
mod request;
mod signals;
mod train;

use args::{Cli, PlanArgs, Verb};
use serde_json::{Value, json};
use shardc::fewer::{Fewer, fewer};
use shardc::{Error, NamedModel, report};
use shardc_ir::Plan;
use std::io::Write;
use std::path::Path;

/// Runs the command.
pub fn run(cli: Cli) -> Result<(), Error> {
    signals::let_large_writes_fail();
    match cli.verb {
        Verb::Models => models(cli.json),
        Verb::Plan(args) => plan(&args, cli.json),
        Verb::Explain(args) => explain::explain(&args, cli.json),
        Verb::Simulate(args) => explain::simulate(&args, cli.json),
        Verb::Diff(args) => explain::diff(&args, cli.json),
        Verb::Verify(args) => inspect::verify(&args, cli.json),
        Verb::Estimate(args) => inspect::print_estimate(&args, cli.json),
        Verb::Check(args) => inspect::check(&args, cli.json),
        Verb::Train(args) => train::train(&args, cli.json),
    }
}

/// Writes to stdout. Whoever reads it may stop reading; a file that takes no more ends the command.
fn print(text: &str) {
    let mut stdout = std::io::stdout();
    if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        log::say(&format!("error: stdout: {error}\n"));
        std::process::exit(1);
    }
}

fn print_json(value: &Value) {
    print(&format!("{value:#}\n"));
}

fn models(json: bool) -> Result<(), Error> {
    let entries = shardc_models::zoo::list();
    if json {
        let row = |entry: &shardc_models::zoo::Entry| json!({"name": entry.name, "parameters": entry.parameters, "source": entry.source});
        print_json(&entries.iter().map(row).collect());
        return Ok(());
    }
    for entry in entries {
        print(&format!("{:14} {:>18}  {}\n", entry.name, thousands(entry.parameters), entry.source));
    }
    Ok(())
}

fn plan(args: &PlanArgs, json: bool) -> Result<(), Error> {
    let model = NamedModel::find(&args.model)?;
    let cluster = request::cluster(args.request.cluster.as_deref())?;
    let batch = request::batch(&args.request, None, &model, &cluster)?;
    let options = request::options(&args.request, &cluster)?;
    if let Some(path) = &args.output {
        let cluster = args.request.cluster.as_deref().unwrap_or_default();
        files::check_places(&[("--output", path)], &[Path::new(cluster), Path::new(&args.model)])?;
        files::check_writable(path)?;
    }
    let compiled = match args.maximize {
        Some(size) => capacity::maximize(&model, batch, &cluster, &options, size, json)?,
        None => {
            let compiled = shardc::compile(&model, batch, &cluster, &options)?;
            let fewer = fewer(&model, batch, &cluster, &options, compiled.plan())?;
            print_plan(compiled.plan(), fewer, json);
            compiled
        }
    };
    match &args.output {
        Some(path) => files::write(path, &compiled.plan().to_json()),
        None => Ok(()),
    }
}

fn print_plan(plan: &Plan, fewer: Option<Fewer>, json: bool) {
    if json {
        let mut json = plan_json(plan);
        json["fewer"] = json!(fewer);
        return print_json(&json);
    }
    print(&report::plan_text(plan));
    if let Some(fewer) = fewer {
        print(&format!("\n{}", fewer.text(plan)));
    }
}

fn plan_json(plan: &Plan) -> Value {
    json!({
        "request": plan.request,
        "choice": plan.choice,
        "mesh": plan.mesh,
        "prediction": plan.prediction,
        "alternatives": plan.alternatives,
        "search": plan.search,
        "hash": plan.hash(),
    })
}

/// A number with a comma between thousands.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
