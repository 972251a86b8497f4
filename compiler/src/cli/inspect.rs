//! `shardc verify`, `estimate` and `check`: whether a plan is right, what a model needs, and what this
//! machine has.

use super::args::{CheckArgs, EstimateArgs, VerifyArgs};
use super::{print, print_json, request};
use serde_json::{Value, json};
use shardc::estimate::{Room, Row, Sizes, estimate, hosted, verdict};
use shardc::{Cluster, Error, NamedModel, check_cluster};
use shardc_ir::Bytes;
use shardc_ir::units::counted;
use shardc_passes::cluster::DeviceKind;
use shardc_runtime::probe;

/// Whether a plan is legal and computes what one device computes.
pub fn verify(args: &VerifyArgs, json: bool) -> Result<(), Error> {
    let plan = request::plan_file(&args.plan)?;
    let findings = shardc::verify::verify(&plan, !args.static_only);
    match json {
        true => print_json(&json!(findings)),
        false => {
            for finding in &findings {
                let mark = finding.ok.map_or("–", |ok| if ok { "✓" } else { "✗" });
                print(&format!("{mark} {:14} {}\n", finding.check, finding.detail));
            }
        }
    }
    let failed: Vec<&str> = findings.iter().filter(|f| f.ok == Some(false)).map(|f| f.check.as_str()).collect();
    if failed.is_empty() {
        return Ok(());
    }
    Err(Error::Check(format!("{}: the plan fails: {}", args.plan.display(), failed.join(", "))))
}

/// Memory by precision and ZeRO stage.
pub fn print_estimate(args: &EstimateArgs, json: bool) -> Result<(), Error> {
    let model = NamedModel::find(&args.model)?;
    let (sizes, ranks) = (model.sizes()?, args.ranks);
    let given = |flag, text: &Option<String>| text.as_deref().map(|text| request::size(flag, text)).transpose();
    let device = given("--device-memory", &args.device_memory)?;
    let host = given("--host-memory", &args.host_memory)?;
    let rooms = [
        device.map(|bytes| ("device_memory", format!("in {bytes} of each device"), Room::Devices(bytes))),
        host.map(|bytes| ("host_memory", format!("as cpu:{ranks} in {bytes} of one host"), Room::Host(bytes))),
    ];
    let beside = device.zip(host).map(|(device, host)| {
        let place = format!("in {device} of each device, with {host} of their host (planned, not trained yet)");
        (place, hosted(sizes, ranks, device, host))
    });
    let rows = estimate(sizes, ranks);
    let rooms = rooms.into_iter().flatten().collect();
    let estimated = Estimated { model: &args.model, sizes, ranks, rows, rooms, beside };
    match json {
        true => print_json(&estimated.json()),
        false => estimated.print(),
    }
    Ok(())
}

/// What a model needs.
struct Estimated<'a> {
    model: &'a str,
    sizes: Sizes,
    ranks: u64,
    rows: Vec<Row>,
    /// What there is, if it was given: its name in JSON, for people, and its bytes.
    rooms: Vec<(&'static str, String, Room)>,
    /// Devices with what their host takes from them, if both were given: for people, and what fits.
    beside: Option<(String, Vec<String>)>,
}

impl Estimated<'_> {
    fn json(&self) -> Value {
        let Self { model, sizes, ranks, rows, rooms, beside } = self;
        let mut text = json!({"model": model, "parameters": sizes.parameters, "ranks": ranks, "rows": rows});
        for (name, _, room) in rooms {
            let memory = room.per_rank(*ranks);
            let fits: Vec<bool> = rows.iter().map(|row| row.total() <= memory).collect();
            let in_one: Vec<bool> = rows.iter().map(|row| row.in_one <= memory).collect();
            let verdict = verdict(*sizes, *ranks, *room);
            text[*name] = json!({"per_rank": memory, "fits": fits, "fits_in_one": in_one, "verdict": verdict});
        }
        if let Some((_, lines)) = beside {
            text["device_and_host_memory"] = json!({"verdict": lines});
        }
        text
    }

    fn print(&self) {
        let ranks = self.ranks;
        print(&format!("{}: {} parameters\n", self.model, super::thousands(self.sizes.parameters)));
        print(&format!("per rank, {}; activations come on top (see `shardc plan`)\n\n", counted(ranks, "data rank")));
        print(&format!(
            "{:9} {:9} {:>4} {:>12} {:>12} {:>12} {:>12} {:>12}\n",
            "precision", "optimizer", "zero", "parameters", "gradients", "optimizer", "total", "in one"
        ));
        for row in &self.rows {
            print(&format!(
                "{:9} {:9} {:>4} {:>12} {:>12} {:>12} {:>12} {:>12}\n",
                row.precision,
                row.optimizer,
                row.zero,
                row.parameters.to_string(),
                row.gradients.to_string(),
                row.state.to_string(),
                row.total().to_string(),
                row.in_one.to_string()
            ));
        }
        print(
            "\nin one: where the step is one microbatch, the copies of parameters go as the gradients come, and ZeRO 1 divides \
             gradients as well\n",
        );
        if ranks > 1 {
            print(&format!(
                "counted as if {ranks} ranks divided every parameter evenly; one of which every dimension is too short \
                 for them each stores whole, which `shardc plan` says\n"
            ));
        }
        let in_rooms = self.rooms.iter().map(|(_, place, room)| (place.clone(), verdict(self.sizes, ranks, *room)));
        for (place, lines) in in_rooms.chain(self.beside.clone()) {
            print(&format!("\n{place}\n"));
            lines.iter().for_each(|line| print(&format!("  {line}\n")));
        }
    }
}

/// One line of the table of `shardc check`.
struct Line {
    name: String,
    found: Result<String, String>,
    fix: String,
    is_needed: bool,
}

/// What this machine has for running plans.
pub fn check(args: &CheckArgs, json: bool) -> Result<(), Error> {
    let cluster = request::cluster(Some(&args.cluster))?;
    let is_cuda = cluster.device.kind == DeviceKind::Cuda;
    let mut lines = vec![cores(&cluster), memory()];
    // What one GPU does without is not missing.
    let optional: &[&str] = if cluster.ranks() > 1 { &["cuDNN"] } else { &["cuDNN", "NCCL"] };
    lines.extend(probe::libraries().into_iter().map(|finding| Line {
        name: finding.name.to_string(),
        found: finding.found,
        fix: finding.fix.to_string(),
        is_needed: is_cuda && !optional.contains(&finding.name),
    }));
    lines.push(gpus(if is_cuda { cluster.ranks() } else { 0 }));
    let unmet: Vec<&Line> = lines.iter().filter(|line| line.is_needed && line.found.is_err()).collect();
    match json {
        true => print_json(&lines.iter().map(line_json).collect()),
        false => lines.iter().for_each(|line| print(&line_text(line))),
    }
    if unmet.is_empty() {
        return check_cluster(&cluster);
    }
    let names = unmet.iter().map(|line| line.name.as_str()).collect::<Vec<_>>().join(", ");
    Err(Error::Check(format!("{} needs what this machine lacks: {names}", args.cluster)))
}

fn line_text(line: &Line) -> String {
    match &line.found {
        Ok(found) => format!("✓ {:12} {found}\n", line.name),
        Err(why) => {
            let mark = if line.is_needed { "✗" } else { "–" };
            format!("{mark} {:12} {why}\n  {:12} {}\n", line.name, "", line.fix)
        }
    }
}

fn line_json(line: &Line) -> Value {
    json!({
        "name": line.name,
        "ok": line.found.is_ok(),
        "needed": line.is_needed,
        "found": line.found.as_ref().unwrap_or_else(|why| why),
        "fix": line.found.is_err().then_some(&line.fix),
    })
}

/// What is said where a host's CPU ranks outnumber the cores of this machine, and take turns: predictions have a core for
/// each. And what to do.
pub fn crowded(cluster: &Cluster) -> Option<(String, String)> {
    let (ranks, cores) = (cluster.per_node, std::thread::available_parallelism().ok()?.get() as u64);
    (cluster.device.kind == DeviceKind::Cpu && ranks > cores).then(|| {
        let fix = format!("where the time of a step matters, use at most {}", counted(cores, "rank"));
        (format!("{} for {ranks} ranks: steps take longer than predicted", counted(cores, "core")), fix)
    })
}

fn cores(cluster: &Cluster) -> Line {
    if let Some((why, fix)) = crowded(cluster) {
        return Line { name: "CPU".into(), found: Err(why), fix, is_needed: false };
    }
    let cores = std::thread::available_parallelism().map(|cores| counted(cores.get() as u64, "core"));
    Line { name: "CPU".into(), found: cores.map_err(|error| error.to_string()), fix: String::new(), is_needed: true }
}

fn memory() -> Line {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<Bytes> {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        let kilobytes: u64 = line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse().ok()?;
        Some(Bytes(kilobytes * 1024))
    };
    let found = match (field("MemTotal"), field("MemAvailable")) {
        (Some(total), Some(available)) => Ok(format!("{total}, {available} available")),
        _ => Err("/proc/meminfo does not say".into()),
    };
    Line { name: "memory".into(), found, fix: "give --device-memory where it matters".into(), is_needed: false }
}

fn gpus(needed: u64) -> Line {
    let found = match probe::gpus() {
        Err(why) => Err(format!("no GPU can be asked for: {why}")),
        Ok(gpus) if (gpus.len() as u64) < needed.max(1) => Err(format!("{} of {} GPUs", gpus.len(), needed.max(1))),
        Ok(gpus) => {
            let names = gpus.iter().map(|gpu| format!("{} ({})", gpu.name, Bytes(gpu.memory)));
            Ok(names.collect::<Vec<_>>().join(", "))
        }
    };
    let fix = "ask for fewer GPUs, or make more visible (CUDA_VISIBLE_DEVICES)".to_string();
    Line { name: "GPUs".into(), found, fix, is_needed: needed > 0 }
}
