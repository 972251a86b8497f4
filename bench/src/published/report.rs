//! What is printed: a table for people, one object for programs.

use super::predict;
use super::score::{Outcome, Scored, Summary};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

/// How many of the worst runs are shown.
const WORST: usize = 10;

/// The summaries of each split and of all runs.
pub struct Summaries {
    /// By split.
    pub splits: BTreeMap<String, Summary>,
    /// Of all.
    pub overall: Summary,
}

impl Summaries {
    /// Sums an outcome up.
    pub fn of(outcome: &Outcome<'_>) -> Self {
        let mut splits: BTreeMap<String, Vec<&Scored<'_>>> = BTreeMap::new();
        for run in &outcome.scored {
            splits.entry(run.row.split.clone()).or_default().push(run);
        }
        let all: Vec<&Scored<'_>> = outcome.scored.iter().collect();
        let splits = splits.into_iter().map(|(name, runs)| (name, Summary::of(&runs))).collect();
        Self { splits, overall: Summary::of(&all) }
    }
}

/// Plans of the scored runs evaluated (time and memory) per second on one core, with the layers' times at hand.
pub fn evaluations_per_second(outcome: &mut Outcome<'_>) -> f64 {
    let start = Instant::now();
    let mut count = 0u64;
    let mut sum = 0.0;
    while start.elapsed().as_secs_f64() < 0.5 && !outcome.scored.is_empty() {
        for run in &mut outcome.scored {
            let (evaluator, degrees) = (&mut run.predicted.evaluator, &run.predicted.degrees);
            sum += evaluator.step(degrees).total + evaluator.memory(degrees);
            count += 1;
        }
    }
    std::hint::black_box(sum);
    count as f64 / start.elapsed().as_secs_f64()
}

fn worst<'a>(outcome: &'a Outcome<'a>) -> Vec<&'a Scored<'a>> {
    let mut runs: Vec<&Scored<'_>> = outcome.scored.iter().collect();
    runs.sort_by(|a, b| b.error().abs().total_cmp(&a.error().abs()));
    runs.truncate(WORST);
    runs
}

/// The text.
pub fn text(outcome: &Outcome<'_>, summaries: &Summaries, rate: f64) -> String {
    let mut text = format!(
        "{:<16} {:>5} {:>7} {:>7} {:>7} {:>7} {:>6} {:>7} {:>9} {:>14}\n",
        "split", "n", "mean", "median", "p90", "bias", "tau", "regret", "baseline", "memory"
    );
    let percent = |share: f64| format!("{:.1}%", 100.0 * share);
    let mut line = |name: &str, of: &Summary| {
        let tau = of.tau.map_or("-".to_string(), |tau| format!("{tau:.2}"));
        let regret = of.regret.map_or("-".to_string(), percent);
        let memory =
            if of.memory_n == 0 { "-".to_string() } else { format!("{} (n={})", percent(of.memory_mape), of.memory_n) };
        let _ = writeln!(
            text,
            "{name:<16} {:>5} {:>7} {:>7} {:>7} {:>7} {tau:>6} {regret:>7} {:>9} {memory:>14}",
            of.n,
            percent(of.mape),
            percent(of.median),
            percent(of.p90),
            percent(of.bias),
            percent(of.baseline_mape),
        );
    };
    for (name, summary) in &summaries.splits {
        line(name, summary);
    }
    line("overall", &summaries.overall);
    let _ = writeln!(
        text,
        "errors of the step time; tau and regret over groups of one model, device count and batch with three plans or \
         more; baseline: the median share of the peak of each source and precision"
    );
    let _ = writeln!(text, "\nworst:");
    for run in worst(outcome) {
        let (error, chosen) = (percent(run.error()), run.predicted.chosen.join(","));
        let chosen = if chosen.is_empty() { String::new() } else { format!(" (chosen: {chosen})") };
        let (predicted, measured) = (run.predicted.step.total, run.measured);
        let _ = writeln!(text, "{error:>8} {predicted:.3} s for {measured:.3} s: {}{chosen}", run.row.label());
    }
    let guessed = outcome.scored.iter().filter(|run| !run.predicted.chosen.is_empty()).count();
    let _ = writeln!(text, "\n{guessed} runs do not publish every choice: the planner's is taken");
    let _ = writeln!(text, "{} runs cannot be expressed:", outcome.refused.len());
    for (row, reason) in &outcome.refused {
        let _ = writeln!(text, "  {}: {reason}", row.label());
    }
    let _ = writeln!(text, "\n{rate:.0} plans evaluated per second on one core");
    text
}

/// One line per scored run, in the order of the files.
pub fn rows(outcome: &Outcome<'_>) -> String {
    let mut text = String::new();
    for run in &outcome.scored {
        let memory = run.memory_error().map_or(String::new(), |error| format!(" memory {:+.1}%", 100.0 * error));
        let (predicted, measured, label) = (run.predicted.step.total, run.measured, run.row.label());
        let error = 100.0 * run.error();
        let chosen = run.predicted.chosen.join(",");
        let _ = writeln!(text, "{error:+.1}% {predicted:.4} s for {measured:.4} s{memory}: {label} [{chosen}]");
    }
    text
}

/// One line per scored run: its own plan, and the plan that is found with nothing pinned.
pub fn unpinned(outcome: &mut Outcome<'_>) -> String {
    let mut text = String::new();
    let (mut count, mut slower) = (0, 0);
    for run in &mut outcome.scored {
        let (own, of) = (run.predicted.step, run.predicted.degrees);
        let line = match predict::unpinned(run.row, &mut run.predicted) {
            Err(reason) => reason,
            Ok((degrees, step)) => {
                count += 1;
                slower += usize::from(step.total > own.total);
                let faster = 100.0 * (own.total / step.total - 1.0);
                // Where the time went that the found plan saves.
                let saved = [
                    ("the pipeline and its layers", own.pipeline - step.pipeline),
                    ("data-parallel communication", own.data - step.data),
                    ("the update", own.update - step.update),
                ];
                let why = saved.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or("", |(name, _)| name);
                let why = if degrees == of { "the same plan" } else { why };
                format!("{faster:+.1}% {:.4} s for {:.4} s: {degrees} for {of}: {why}", step.total, own.total)
            }
        };
        let _ = writeln!(text, "{}: {line}", run.row.label());
    }
    let _ = writeln!(text, "{count} runs: {slower} of the plans found are predicted slower than the published ones");
    text
}

/// The object: every figure a share, not a percentage.
pub fn json(outcome: &Outcome<'_>, summaries: &Summaries, rate: f64) -> Value {
    let summary = |of: &Summary| {
        json!({
            "n": of.n, "mape": of.mape, "median": of.median, "p90": of.p90, "bias": of.bias,
            "tau": of.tau, "regret": of.regret, "baseline_mape": of.baseline_mape,
            "memory_n": of.memory_n, "memory_mape": of.memory_mape,
        })
    };
    let splits: Map<String, Value> = summaries.splits.iter().map(|(name, of)| (name.clone(), summary(of))).collect();
    let worst = worst(outcome).into_iter().map(|run| {
        json!({
            "run": run.row.label(), "source": run.row.source, "error": run.error(),
            "predicted_s": run.predicted.step.total, "measured_s": run.measured, "chosen": run.predicted.chosen,
        })
    });
    let refused = outcome.refused.iter().map(|(row, reason)| json!({ "run": row.label(), "reason": reason }));
    json!({
        "splits": splits,
        "overall": summary(&summaries.overall),
        "worst": worst.collect::<Vec<_>>(),
        "refused": refused.collect::<Vec<_>>(),
        "evaluations_per_second": rate,
    })
}
