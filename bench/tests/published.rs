//! The cost model against a sample of published runs: errors stay below bounds, plans stay in order.

use shardc_bench::published::report::{self, Summaries};
use shardc_bench::published::{rows, score};
use std::path::Path;

fn sample() -> Vec<rows::Row> {
    rows::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/published_runs.json")).unwrap()
}

#[test]
fn errors_stay_below_their_bounds() {
    let rows = sample();
    let summaries = Summaries::of(&score::score(&rows));
    // Per split, the mean absolute error that is allowed.
    let bounds = [
        ("vtrain_single", 0.08),
        ("vtrain_multi", 0.10),
        ("foundry", 0.06),
        ("dgxc", 0.05),
        ("nemo_fp8", 0.06),
        ("megatron_fp8", 0.05),
        ("korthikanti", 0.04),
        ("sc21_table1", 0.06),
        ("megatron_old", 0.06),
        ("titan", 0.10),
    ];
    for (split, bound) in bounds {
        let summary = summaries.splits[split];
        assert!(summary.mape < bound, "{split}: {:.3} is not below {bound}", summary.mape);
    }
    let single = summaries.splits["vtrain_single"];
    assert!(single.tau.unwrap() > 0.75, "{:?}", single.tau);
    assert!(single.mape < single.baseline_mape / 2.0, "a constant does as well");
    let memory = summaries.splits["korthikanti"];
    assert!(memory.memory_n >= 4 && memory.memory_mape < 0.05, "{}", memory.memory_mape);
}

#[test]
fn what_cannot_be_expressed_is_listed() {
    let rows = sample();
    let outcome = score::score(&rows);
    assert_eq!(outcome.scored.len() + outcome.refused.len(), rows.len());
    let (row, reason) = &outcome.refused[0];
    assert_eq!((row.split.as_str(), reason.as_str()), ("hybrid", "state-space layers have no cost here"));
}

#[test]
fn the_object_has_the_keys_of_every_split() {
    let rows = sample();
    let outcome = score::score(&rows);
    let object = report::json(&outcome, &Summaries::of(&outcome), 1.0);
    for key in ["n", "mape", "median", "p90", "bias", "tau", "regret", "baseline_mape"] {
        assert!(object["overall"].get(key).is_some(), "{key}");
        assert!(object["splits"]["dgxc"].get(key).is_some(), "{key}");
    }
}

#[test]
fn a_prediction_depends_on_the_run_alone() {
    let rows = sample();
    let totals = || -> Vec<f64> { score::score(&rows).scored.iter().map(|run| run.predicted.step.total).collect() };
    assert_eq!(totals(), totals());
}
