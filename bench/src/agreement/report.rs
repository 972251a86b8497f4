//! Tables of how far the closed form is off.

use super::measure::Compared;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Of the farthest, so many are told one by one.
const TOLD: usize = 10;

/// What a plan is made of, where it is told with others.
fn kind(of: &Compared) -> &'static str {
    let has = |part: &str| of.choice.split(',').any(|own| own.starts_with(part) && !own.ends_with("=1"));
    match of.case.pins.as_str() {
        _ if has("schedule=") => "pipelines",
        _ if of.case.seq == 0 => "pictures",
        _ if has("ep=") => "experts",
        _ if has("cp=") || has("ulysses=") => "sequence",
        _ if has("tp=") => "tensor",
        _ if has("dp=") => "data",
        _ => "one device",
    }
}

/// Mean, 90th percentile and worst of the absolute errors, and the share of those within 3%.
fn row(name: &str, mut errors: Vec<f64>) -> String {
    errors.iter_mut().for_each(|error| *error = error.abs());
    errors.sort_by(f64::total_cmp);
    let count = errors.len();
    let mean = errors.iter().sum::<f64>() / count.max(1) as f64;
    let at = |share: f64| errors.get((share * count as f64) as usize).or(errors.last()).copied().unwrap_or(0.0);
    let near = errors.iter().filter(|error| **error <= 0.03).count() as f64 / count.max(1) as f64;
    let [mean, p90, worst, near] = [mean, at(0.9), at(1.0), near].map(|share| 100.0 * share);
    format!("| {name} | {count} | {mean:.1}% | {p90:.1}% | {worst:.1}% | {near:.0}% |\n")
}

/// The tables, in Markdown; of what was drawn, `refused` cannot be planned.
pub fn text(all: &[Compared], refused: usize) -> String {
    let mut text = format!("{} requests compared; {refused} more that cannot be planned as drawn\n", all.len());
    for (name, error) in [("seconds", Compared::of_seconds as fn(&Compared) -> f64), ("bytes", Compared::of_bytes)] {
        let _ = write!(text, "\n| {name} | n | mean | p90 | worst | within 3% |\n|---|---|---|---|---|---|\n");
        let mut kinds: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        all.iter().for_each(|own| kinds.entry(kind(own)).or_default().push(error(own)));
        text += &row("all", kinds.values().flatten().copied().collect());
        kinds.into_iter().for_each(|(kind, errors)| text += &row(kind, errors));
        let mut farthest: Vec<_> = all.iter().collect();
        farthest.sort_by(|a, b| error(b).abs().total_cmp(&error(a).abs()));
        text.push('\n');
        for own in farthest.into_iter().take(TOLD) {
            let _ = writeln!(text, "{:+.1}%  {}", 100.0 * error(own), own.case);
        }
    }
    text
}

/// A line per request: seconds and bytes by the closed form and by the programs, and the request.
pub fn rows(all: &[Compared]) -> String {
    let mut text = String::new();
    for own in all {
        let seconds = own.seconds.map(|seconds| format!("{seconds:.6}")).join(" ");
        let bytes = own.bytes.map(|bytes| bytes.0.to_string()).join(" ");
        let _ = writeln!(text, "{seconds} {bytes} {}", own.case);
    }
    text
}
