//! `shardc explain` and `simulate`: a plan opened up.

use super::args::{DiffArgs, ExplainArgs, SimulateArgs};
use super::files::{check_places, check_writable, write};
use super::{plan_json, print, print_json, request};
use serde_json::{Value, json};
use shardc::Error;
use shardc::explain::{Inspection, collectives, diff, dot, edit, html, layers, stages, text, timeline, value};
use shardc::report;
use shardc_ir::program::Stream;
use shardc_ir::text::PLAN_SCHEMA;
use shardc_ir::{Bytes, Plan};
use shardc_passes::simulate::Conditions;
use std::path::{Path, PathBuf};

/// Shows a plan, or one value of it, or writes reports; without a plan, the schema of plan files.
pub fn explain(args: &ExplainArgs, json: bool) -> Result<(), Error> {
    let Some(path) = &args.plan else {
        print(PLAN_SCHEMA);
        return Ok(());
    };
    let plan = request::plan_file(path)?;
    let cluster = request::cluster_of(&plan)?;
    if let Some(what) = &args.value {
        if let Some((flag, _)) = args.files.given().next() {
            let message = format!("{flag} writes the whole plan, and `{what}` is a part of it");
            return Err(Error::request(message, format!("leave `{what}` out, or {flag}")));
        }
        let values = value::find(&plan.graph, what)?;
        let explained = value::explain(&plan, &cluster, &values)?;
        match json {
            true => print_json(&json!(explained)),
            false => print(&value::text(&explained)),
        }
        return Ok(());
    }
    let files = &args.files;
    check_places(&files.given().collect::<Vec<_>>(), &[path])?;
    files.given().try_for_each(|(_, to)| check_writable(to))?;
    let inspection = Inspection::new(&plan, cluster, &Conditions::default())?;
    let mut written = Vec::new();
    let mut write_file = |path: &Option<PathBuf>, text: &dyn Fn() -> Result<String, Error>| match path {
        Some(path) => {
            write(path, &text()?)?;
            written.push(path.display().to_string());
            Ok::<(), Error>(())
        }
        None => Ok(()),
    };
    write_file(&files.html, &|| html::page(&inspection))?;
    write_file(&files.timeline, &|| Ok(timeline::chrome_trace(&inspection)))?;
    write_file(&files.dot, &|| Ok(dot::dot(&plan)))?;
    write_file(&files.text, &|| Ok(edit::to_text(&plan)))?;
    match (written.is_empty(), json) {
        (false, true) => print_json(&json!({ "written": written })),
        (false, false) => written.iter().for_each(|path| print(&format!("wrote {path}\n"))),
        (true, true) => print_json(&explained_json(&plan, &inspection)),
        (true, false) => print(&text::plan(&inspection)),
    }
    Ok(())
}

fn explained_json(plan: &Plan, inspection: &Inspection<'_>) -> Value {
    let mut json = plan_json(plan);
    json["layouts"] = json!(layers::rows(plan));
    json["stages"] = json!(stages::rows(plan));
    json["stage_devices"] = json!(stages::stages(inspection));
    json["collectives"] = json!(collectives::rows(inspection));
    json["simulated"] = simulated_json(inspection);
    json
}

fn simulated_json(inspection: &Inspection<'_>) -> Value {
    let step = inspection.simulated.step;
    let rank = |rank: &shardc_passes::simulate::Rank| {
        let busy = Stream::ALL.into_iter().filter(|stream| rank.busy[*stream as usize].0 > 0.0);
        let busy = busy.map(|stream| (stream.name().to_string(), json!(rank.busy[stream as usize])));
        json!({
            "rank": rank.rank,
            "alike": rank.count,
            "busy": Value::Object(busy.collect()),
            "idle": text::idle(rank, step),
            "communication": rank.communication,
            "exposed_communication": rank.exposed_communication,
            "waiting": rank.waiting,
        })
    };
    let ranks: Vec<Value> = inspection.simulated.ranks.iter().map(rank).collect();
    let unlowered = report::unlowered(inspection.plan);
    json!({"step": step, "predicted": inspection.plan.prediction.step, "not_as_planned": unlowered, "ranks": ranks})
}

/// Simulates the step of a plan under some conditions.
pub fn simulate(args: &SimulateArgs, json: bool) -> Result<(), Error> {
    let plan = request::plan_file(&args.plan)?;
    let other = args.cluster.as_deref();
    let cluster = other.map_or_else(|| request::cluster_of(&plan), |other| request::cluster(Some(other)))?;
    let read = [args.plan.as_path(), Path::new(other.unwrap_or_default())];
    if let Some(to) = &args.timeline {
        check_places(&[("--timeline", to)], &read)?;
        check_writable(to)?;
    }
    let stragglers = args.straggler.iter().map(|text| straggler(text)).collect::<Result<_, _>>()?;
    let conditions = Conditions { stragglers, contention: args.contention };
    let (needed, room) = (plan.prediction.memory.total(), cluster.least_room(Bytes(u64::MAX)));
    if other.is_some() && needed > room {
        tracing::warn!(
            "the plan needs {needed} per rank of {room} on {}: it is simulated as if that fitted",
            cluster.name
        );
    }
    if args.contention > 1.0 && cluster.ranks() <= cluster.per_node {
        tracing::warn!("--contention has no effect: {} has one node, and it is of links between nodes", cluster.name);
    }
    let inspection = Inspection::new(&plan, cluster, &conditions)?;
    match json {
        true => print_json(&simulated_json(&inspection)),
        false => print(text::step(&inspection).trim_start()),
    }
    match &args.timeline {
        Some(path) => write(path, &timeline::chrome_trace(&inspection)),
        None => Ok(()),
    }
}

/// `RANK=FACTOR`.
fn straggler(text: &str) -> Result<(u64, f64), Error> {
    let wrong = || Error::request(format!("--straggler {text}: not RANK=FACTOR"), "write --straggler 3=1.5");
    let (rank, factor) = text.split_once('=').ok_or_else(wrong)?;
    Ok((rank.trim().parse().map_err(|_| wrong())?, factor.trim().parse().map_err(|_| wrong())?))
}

/// Shows what two plans do differently.
pub fn diff(args: &DiffArgs, json: bool) -> Result<(), Error> {
    let (first, second) = (request::plan_file(&args.first)?, request::plan_file(&args.second)?);
    let found = diff::differences(&first, &second);
    match json {
        true => print_json(&json!(found)),
        false => print(&diff::text_of(&found)),
    }
    Ok(())
}
