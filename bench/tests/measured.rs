//! What is predicted of our own runs on H200s, beside what was measured: every run is within 7% in time, but for those of
//! which the file says why not, and within 3% in memory.

use shardc_bench::measured::{compare, parse, read, table};
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

/// A file that lists nothing, and figures that nobody can have measured.
#[test]
fn what_was_not_measured_is_refused() {
    let run = r#"{"model": "llama-1b", "cluster": "h200:1", "batch": 4, "seq": 512, "precision": "bf16",
        "step_ms": 40.0, "peak_bytes": 100, "commit": "x"}"#;
    let checked =
        |text: &str| parse(Path::new("runs.json"), text).map(|runs| runs.len()).map_err(|error| error.to_string());
    assert_eq!(checked(&format!("[{run}]")), Ok(1));
    assert!(checked("[]").unwrap_err().contains("lists no run"));
    assert!(checked(run).unwrap_err().contains("is no list of measured runs"));
    let slow = checked(&format!("[{}]", run.replace("40.0", "0"))).unwrap_err();
    assert_eq!(slow, "llama-1b, 4 x 512, h200:1, bf16: its step_ms is 0; write what was measured, above 0");
    let small = checked(&format!("[{}]", run.replace("100", "0"))).unwrap_err();
    assert!(small.contains("its peak_bytes is 0"), "{small}");
    assert!(checked(&format!("[{}]", run.replace("batch", "bach"))).unwrap_err().contains("unknown field `bach`"));
}
