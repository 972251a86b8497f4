//! What is predicted of our own runs on H200s, beside what was measured: every run is within 7% in time, but for those of
//! which the file says why not, and within 3% in memory.

use shardc_bench::measured::{compare, read, table};
use std::path::Path;

#[test]
fn runs_on_h200s_are_predicted() {
    let runs = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/h200_runs.json")).unwrap();
    assert!(runs.len() >= 60, "{}", runs.len());
    let all: Vec<_> = runs.iter().map(|run| compare(run).unwrap()).collect();
    println!("{}", table(&all));
    for own in &all {
        let (time, memory) = (own.of_time(), own.of_memory());
        assert!(time.abs() <= 0.07 || own.run.apart.is_some(), "{}: {:+.1}% in time", own.run, 100.0 * time);
        assert!(memory.is_none_or(|error| error.abs() <= 0.03), "{}: {memory:?} in memory, {}", own.run, own.choice);
    }
    let mean = all.iter().map(|own| own.of_time().abs()).sum::<f64>() / all.len() as f64;
    assert!(mean < 0.035, "{mean}");
}
