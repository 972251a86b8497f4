//! Plans in stages from outside: explained, drawn, compared, edited, verified, and their page.

mod command;
mod planned;

use command::{check, shardc, text};
use planned::plan_in;
use std::fs;

#[test]
fn plans_in_stages_are_opened_up() {
    let dir = tempfile::tempdir().unwrap();
    let first = plan_in(dir.path(), "a.json", "pp=2,tp=2,schedule=1f1b,microbatch=1");
    let second = plan_in(dir.path(), "b.json", "pp=2,dp=2,schedule=zbv,zero=1,microbatch=1");
    check(&["explain", text(&first)], 0, &["pp=2", "schedule=1f1b", "stage"]);
    check(&["explain", text(&first), "blocks.0.mlp.gate.weight"], 0, &["tp: j divided", "chosen"]);
    let dot = dir.path().join("g.dot");
    check(&["explain", text(&first), "--dot", text(&dot)], 0, &["wrote"]);
    let graph = fs::read_to_string(&dot).unwrap();
    assert!(graph.starts_with("digraph plan {") && graph.contains("stage 1"), "{graph}");
    let words = ["stages", "chunk 3", "not there -> stage 0", "-> pp=2,dp=2,tp=1,schedule=zbv"];
    check(&["diff", text(&first), text(&second)], 0, &words);
    for plan in [&first, &second] {
        let words = ["✓ layouts", "✓ programs", "✓ equality", "changes of layout and messages", "✓ memory"];
        check(&["verify", text(plan), "--static-only"], 0, &words);
    }
}

/// The text says the same as the file, and a stage can be edited in it.
#[test]
fn plans_in_stages_are_edited_as_text() {
    let dir = tempfile::tempdir().unwrap();
    for (name, pin) in [
        ("1f1b", "pp=2,tp=2,schedule=1f1b,microbatch=1,recompute=none"),
        ("interleaved", "pp=2,dp=2,schedule=interleaved,virtual=2,zero=1,microbatch=1"),
        ("zbv", "pp=4,schedule=zbv,microbatch=1"),
    ] {
        let plan = plan_in(dir.path(), &format!("{name}.json"), pin);
        let edited = dir.path().join(format!("{name}.ir"));
        check(&["explain", text(&plan), "--text", text(&edited)], 0, &["wrote"]);
        let said = check(&["diff", text(&plan), text(&edited)], 0, &[]);
        assert!(!said.contains("layout") && !said.contains("stages"), "{said}");
        let schedule = format!("schedule={name}");
        check(&["explain", text(&edited)], 0, &[&schedule, "+0.0%"]);
    }
}

/// Which devices a stage is on, what they need of their memory, and that unequal ones are as busy as each other.
#[test]
fn stages_name_their_devices() {
    let dir = tempfile::tempdir().unwrap();
    let (cluster, plan) = (dir.path().join("c.toml"), dir.path().join("plan.json"));
    let parts = ["h100", "a100-40"].map(|device| format!("[[parts]]\ndevice = \"{device}\"\nnodes = 1\n"));
    fs::write(&cluster, format!("per_node = 4\n{}", parts.concat())).unwrap();
    let pin = "pp=2,dp=4,schedule=1f1b,zero=1,microbatch=1";
    let args = ["plan", "llama-1b", "--cluster", text(&cluster), "--batch", "32", "--seq", "2048", "--pin", pin];
    check(&[&args[..], &["-o", text(&plan)]].concat(), 0, &["schedule=1f1b"]);
    // The plan holds what the file said.
    fs::remove_file(&cluster).unwrap();
    let said = check(&["explain", text(&plan)], 0, &["stage 0 on h100 computes", "stage 1 on a100-40 computes"]);
    assert!(said.contains(", of 72.51 GiB") && said.contains(", of 35.25 GiB"), "{said}");
    let json = shardc(&["explain", text(&plan), "--json"]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    let busy = [0, 1].map(|stage| json["stage_devices"][stage]["busy"].as_f64().unwrap());
    assert!((busy[0] / busy[1] - 1.0).abs() < 0.2, "{busy:?}");
    // What the file says by now is another thing.
    fs::write(&cluster, "device = \"h100\"\nper_node = 0\n").unwrap();
    check(&["verify", text(&plan), "--static-only"], 0, &["✓ layouts", "✓ request", "✓ programs", "✓ memory"]);
}

/// The memory of a plan is that of the ranks that have the least room left, though others take more: all programs are
/// looked at, and of many ranks those that tell the axes apart.
#[test]
fn unequal_stages_take_what_is_planned_where_room_is_least() {
    let dir = tempfile::tempdir().unwrap();
    let (cluster, plan) = (dir.path().join("c.toml"), dir.path().join("plan.json"));
    let parts = ["h100", "a100-40"].map(|device| format!("[[parts]]\ndevice = \"{device}\"\nnodes = 1\n"));
    for (per_node, batch) in [("2", "8"), ("10", "40")] {
        fs::write(&cluster, format!("per_node = {per_node}\n{}", parts.concat())).unwrap();
        let pin = "pp=2,schedule=gpipe,tp=1,zero=0,microbatch=1,parts=1/2";
        let args = ["plan", "llama-tiny", "--cluster", text(&cluster), "--batch", batch, "--seq", "128", "--pin", pin];
        check(&[&args[..], &["-o", text(&plan)]].concat(), 0, &["of 35.25 GiB"]);
        let json = shardc(&["explain", text(&plan), "--json"]).stdout;
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let taken = [0, 1].map(|stage| json["stage_devices"][stage]["memory"].as_u64().unwrap());
        assert!(taken[0] > taken[1], "{taken:?}");
        check(&["verify", text(&plan), "--static-only"], 0, &["✓ programs", "✓ memory"]);
    }
}

/// Equal runs are written once: many more microbatches add little to the page, and to the timeline what they hold at
/// the most.
#[test]
fn the_page_and_the_timeline_of_a_pipeline_are_small() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = |batch: &str| {
        let [plan, page, timeline] = ["plan.json", "page.html", "timeline.json"].map(|name| dir.path().join(name));
        let args = ["plan", "llama-1b", "--cluster", "h200:8x4", "--batch", batch, "--seq", "2048"];
        check(&[&args[..], &["--pin", "pp=4,tp=4,dp=2,microbatch=1", "-o", text(&plan)]].concat(), 0, &[]);
        check(&["explain", text(&plan), "--html", text(&page), "--timeline", text(&timeline)], 0, &["wrote"]);
        let told: serde_json::Value = serde_json::from_slice(&fs::read(&timeline).unwrap()).unwrap();
        let planned: serde_json::Value = serde_json::from_slice(&fs::read(&plan).unwrap()).unwrap();
        let sum =
            |of: &serde_json::Value| of.as_object().unwrap().values().filter_map(|part| part.as_u64()).sum::<u64>();
        let held = told["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "C");
        let planned = &planned["prediction"]["memory"];
        let live = sum(planned) - planned["reserved"].as_u64().unwrap();
        assert_eq!(held.map(|event| sum(&event["args"])).max(), Some(live));
        [page, timeline].map(|file| fs::metadata(file).unwrap().len())
    };
    let ([few, few_told], [many, many_told]) = (sizes("32"), sizes("256"));
    assert!(many < 1 << 20 && many < few + (1 << 17), "{few} and {many} bytes");
    assert!(many_told < few_told + (2 << 20), "{few_told} and {many_told} bytes");
}

/// Ranks that cannot all be data ranks are stages, where that is faster than to divide tensors.
#[test]
fn ranks_that_do_not_divide_the_batch_are_stages() {
    let args = ["plan", "llama-8b", "--cluster", "h100:7", "--batch", "8", "--seq", "2048"];
    check(&args, 0, &["plan     pp=7,", "of the least that is possible in stages", "no plan of one stage takes less"]);
    check(&[&args[..], &["--pin", "pp=1"]].concat(), 0, &["plan     dp=1,tp=7", "that is possible in one stage"]);
}
