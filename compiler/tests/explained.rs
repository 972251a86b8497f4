//! `explain VALUE` and `diff` from outside: why a value lies as it does, and what two plans say differently.

mod command;
mod planned;

use command::{check, shardc, text};
use planned::plan_in;
use shardc::explain::value;
use shardc::pipeline::target;
use shardc::{Batch, Cluster, NamedModel, Options, Precision};
use shardc_passes::search::why::why;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

#[test]
fn a_value_says_why_it_lies_as_it_does() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_in(dir.path(), "plan.json", "dp=2,tp=2,zero=1,microbatch=2");
    let words = ["tp: j divided", "chosen", "tp: the same on every rank", "a step", "ZeRO-1:", "2 alike"];
    check(&["explain", text(&plan), "mlp.gate.weight"], 0, &words);
    let page = dir.path().join("page.html");
    let said = ["--html writes the whole plan", "leave `mlp` out"];
    check(&["explain", text(&plan), "mlp", "--html", text(&page)], 2, &said);
    check(&["explain", text(&plan), ""], 2, &["VALUE is empty"]);
    check(&["explain", text(&plan), "loss"], 0, &["f32[]", "per rank"]);
    check(&["explain", text(&plan), "grad_nrom"], 2, &["no value", "did you mean `grad_norm`?"]);
    assert!(!check(&["explain", text(&plan), "zz"], 2, &["no value"]).contains("did you mean"));
    // Of the ZeRO stages, the chosen one is what the plan says.
    let planned: serde_json::Value = serde_json::from_slice(&fs::read(&plan).unwrap()).unwrap();
    let step = shardc_ir::Seconds(planned["prediction"]["step"].as_f64().unwrap());
    check(&["explain", text(&plan), "mlp.gate.weight"], 0, &[&format!("{step} a step"), "  chosen"]);
    let output = shardc(&["explain", text(&plan), "blocks.0.mlp.gate.weight", "--json"]);
    let values: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let options = values[0]["alternatives"].as_array().unwrap();
    assert_eq!(options.iter().filter(|option| option["is_chosen"] == true).count(), 1);
    // What was chosen is the best, and everything else takes longer.
    let costs: Vec<f64> = options.iter().filter_map(|option| option["cost"].as_f64()).collect();
    assert!(options[0]["is_chosen"] == true && costs[0] == 0.0 && costs.iter().skip(1).all(|cost| *cost > 0.0));
}

/// Where the ranks divide nothing but the batch, what else there could be is what the value is in plans that divide more.
#[test]
fn a_value_of_data_ranks_says_what_it_would_be_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_in(dir.path(), "plan.json", "dp=4,zero=1");
    let output = shardc(&["explain", text(&plan), "blocks.0.mlp.gate.weight", "--json"]);
    let values: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let options = values[0]["alternatives"].as_array().unwrap();
    let axes: BTreeSet<&str> = options.iter().map(|option| option["axis"].as_str().unwrap()).collect();
    assert_eq!(axes, BTreeSet::from(["tp=1", "tp=2", "tp=4", "cp=2", "cp=4"]));
    let find = |axis: &str| options.iter().find(|option| option["axis"] == axis).unwrap();
    let (own, other) = (find("tp=1"), find("tp=2"));
    assert!(own["is_chosen"] == true && other["is_chosen"] == false);
    assert!(other["layout"].as_str().unwrap().contains("@tp"), "{other}");
    // The plan that has it can be asked for, and takes what is said.
    let pins = other["plan"].as_str().unwrap();
    assert!(pins.starts_with("dp=2,tp=2,"), "{pins}");
    let planned: serde_json::Value = serde_json::from_slice(&fs::read(&plan).unwrap()).unwrap();
    let estimate = planned["search"]["estimate"].as_f64().unwrap();
    let instead = plan_in(dir.path(), "instead.json", pins);
    let instead: serde_json::Value = serde_json::from_slice(&fs::read(&instead).unwrap()).unwrap();
    let more = instead["search"]["estimate"].as_f64().unwrap() - estimate;
    assert!((other["cost"].as_f64().unwrap() - more).abs() < 1e-3 * estimate, "{other}: {more}");
}

/// The stages of ZeRO are compared by one measure: what programs take of the chosen one is counted of the others too.
#[test]
fn stages_of_zero_are_compared_by_one_measure() {
    let (cluster, model) = (Cluster::parse("h100:4", "h200").unwrap(), NamedModel::find("llama-tiny").unwrap());
    let pins = "dp=4,zero=1,microbatch=2".to_string();
    let options = Options { precision: Some(Precision::Bf16), pins, ..Options::default() };
    let compiled = shardc::compile(&model, Batch { batch: 16, seq: 64 }, &cluster, &options).unwrap();
    let plan = compiled.plan();
    let values = value::find(&plan.graph, "blocks.0.mlp.gate.weight").unwrap();
    let node = plan.graph.value(values[0]).def;
    let found = why(plan, &cluster, target(&cluster), &[node].into()).unwrap();
    let step = |zero: u64| found.stages.iter().find(|of| of.0 == zero).unwrap().1.step;
    let exact = plan.prediction.step;
    assert!((step(1).0 / exact.0 - 1.0).abs() > 1e-4, "the estimate is exact: choose another plan");
    let said = value::text(&value::explain(plan, &cluster, &values).unwrap());
    for zero in [0, 2, 3] {
        let by_one_measure = step(zero) * (exact.0 / step(1).0);
        let line = said.lines().find(|line| line.contains(&format!("ZeRO-{zero}:"))).unwrap();
        assert!(line.contains(&format!(" {by_one_measure} a step")) && line.contains("estimated"), "{line}");
    }
    let chosen = said.lines().find(|line| line.contains("ZeRO-1:")).unwrap();
    assert!(chosen.contains(&format!(" {exact} a step")) && chosen.ends_with("  chosen"), "{chosen}");
}

/// Each value that is explained, and what is said of it.
fn explained(said: &str) -> Vec<(&str, Vec<&str>)> {
    let mut values: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in said.lines() {
        match values.last_mut() {
            Some((_, lines)) if !line.starts_with('%') => lines.push(line.trim()),
            _ => values.push((line, Vec::new())),
        }
    }
    values
}

/// An activation is divided with the batch; a parameter and its cast are, as they are stored.
#[test]
fn what_divides_the_batch_and_what_divides_storage() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.json");
    let args = ["plan", "llama-tiny", "--cluster", "h100:4", "--batch", "8", "--seq", "32", "-o", text(&path)];
    check(&[&args[..], &["--pin", "dp=2,tp=2,zero=1,microbatch=2,keep_casts=0"]].concat(), 0, &[]);
    let said = check(&["explain", text(&path), "blocks.0.mlp.gate"], 0, &[]);
    let of = |op: &str, reason: &str| {
        let found: Vec<_> = explained(&said).into_iter().filter(|(head, _)| head.contains(op)).collect();
        assert!(!found.is_empty(), "{op}: {said}");
        for (head, lines) in found {
            assert!(lines.iter().any(|line| line == &reason), "{head}: {said}");
            assert_eq!(
                lines.iter().any(|line| line.contains("part of the batch") && line.starts_with("dp")),
                op == "= matmul  forward"
            );
        }
    };
    of("= parameter", "dp: each rank stores its part");
    of("= cast  forward", "dp: each rank works on the part that it stores");
    of("= matmul  forward", "dp and mb: each rank and microbatch has its part of the batch");
    let says = |said: &str, head: &str, reason: &str| {
        let found: Vec<_> = explained(said).into_iter().filter(|(of, _)| of.contains(head)).collect();
        assert!(!found.is_empty(), "{head}: {said}");
        assert!(found.iter().all(|(_, lines)| lines.iter().any(|line| line.starts_with(reason))), "{head}: {said}");
    };
    says(&said, "= matmul  forward", "kept for the backward pass: with those alike in other blocks");
    let again = dir.path().join("again.json");
    let pins = ["--pin", "dp=2,tp=2,zero=1,microbatch=2,keep_casts=0,recompute=block", "-o", text(&again)];
    check(&[&args[..args.len() - 2], &pins].concat(), 0, &[]);
    let twice = check(&["explain", text(&again), "blocks.0.mlp.gate"], 0, &[]);
    says(&twice, "= matmul  forward", "dropped, and computed again later: with those alike in other blocks that takes");
    says(&twice, "= matmul  recomputed", "computed again for the backward pass: with those alike");
    // Partial sums of either operand are two alternatives, and are named as two.
    let products = explained(&said).into_iter().filter(|(head, _)| head.contains("= matmul"));
    for (head, lines) in products {
        let passed: Vec<&&str> = lines.iter().filter(|line| line.contains("partial sums of %")).collect();
        let names: BTreeSet<&str> = passed.iter().filter_map(|line| line.split(" passed").next()).collect();
        assert!(passed.len() == 2 && names.len() == 2, "{head}: {said}");
    }
}

/// What is printed is what plans are checked against, and needs no plan.
#[test]
fn the_schema_is_printed() {
    let output = shardc(&["explain", "--schema"]);
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout), shardc_ir::text::PLAN_SCHEMA);
    check(&["explain"], 2, &["<PLAN>"]);
    check(&["explain", "plan.json", "--schema"], 2, &["cannot be used with"]);
}

/// A file for every pass, numbered without gaps: what did not run says why, and what is lowered is there for each stage.
#[test]
fn passes_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let dump = |name: &str, cluster: &str, more: &[&str]| {
        let to = dir.path().join(name);
        let args = ["plan", "llama-tiny", "--cluster", cluster, "--batch", "8", "--seq", "32", "--dump-to", text(&to)];
        check(&[&args[..], more].concat(), 0, &[]);
        let mut files: Vec<_> = fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let number = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap()[..2].parse::<usize>().unwrap();
        assert_eq!(files.iter().map(number).collect::<Vec<_>>(), (0..files.len()).collect::<Vec<_>>());
        files.iter().map(|path| fs::read_to_string(path).unwrap()).collect::<Vec<_>>()
    };
    let texts = dump("plain", "cpu:4", &["--pin", "pp=2,dp=2,microbatch=1"]);
    let skipped: Vec<&String> = texts.iter().filter(|text| text.starts_with("; not run: ")).collect();
    assert!(skipped.len() == 2 && skipped[0].contains("--deterministic") && skipped[1].contains("fp32, not fp8"));
    // A program for each stage, which is read back as it was.
    let (programs, ranks) = (texts.last().unwrap(), ["rank 0", "rank 2"]);
    assert_eq!(programs.matches("program ").count(), 2, "{programs}");
    assert!(ranks.iter().all(|rank| programs.contains(rank)), "{programs}");
    let texts = dump("other", "h100:4", &["--precision", "fp8", "--deterministic"]);
    assert!(texts.iter().all(|text| !text.starts_with(';')));
}

/// A bound above what the device has is taken, and said.
#[test]
fn more_memory_than_there_is() {
    let plan = |cluster: &str, size: &str| {
        check(&["plan", "llama-tiny", "--cluster", cluster, "--batch", "4", "--device-memory", size], 0, &["of"])
    };
    let said = plan("h100:1", "200GiB");
    assert!(said.contains("--device-memory 200.00 GiB is more than there is: h100 has 74.51 GiB"), "{said}");
    assert!(!plan("h100:1", "24GiB").contains("more than there is"));
    assert!(!plan("cpu:1", "200GiB").contains("more than there is"));
}

#[test]
fn plans_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let first = plan_in(dir.path(), "a.json", "dp=2,tp=2,zero=1");
    let second = plan_in(dir.path(), "b.json", "dp=4,zero=3");
    check(&["diff", text(&first), text(&first)], 0, &["the plans say the same"]);
    let words = ["memory", "layout", "blocks.*.mlp.gate.weight parameter"];
    let said = check(&["diff", text(&first), text(&second)], 0, &words);
    assert!(said.lines().any(|line| line.split_whitespace().eq(["dp", "2", "->", "4"])), "{said}");
    assert!(said.contains("gathered at each use"), "{said}");
    // Every option that is another is named, with what it asks for.
    let options: [(&[&str], &[&str]); 5] = [
        (&["--reduce-dtype", "bf16", "--precision", "bf16"], &["reduce dtype", "f32 -> bf16"]),
        (&["--deterministic"], &["deterministic", "no -> yes"]),
        (&["--host-memory", "7GiB"], &["host memory", "-> 7.00 GiB"]),
        (&["--search", "all"], &["search", "runnable -> all"]),
        (&["--pin", "offload=optimizer"], &["pins", "in the host's memory"]),
    ];
    let base = ["plan", "llama-tiny", "--cluster", "h100:2", "--batch", "4", "--seq", "32"];
    let (plain, other) = (dir.path().join("plain.json"), dir.path().join("other.json"));
    check(&[&base[..], &["-o", text(&plain)]].concat(), 0, &[]);
    for (option, words) in options {
        check(&[&base[..], option, &["-o", text(&other)]].concat(), 0, &[]);
        check(&["diff", text(&plain), text(&other)], 0, words);
    }
    // What is so in one block alone is compared with what the other plan does in all.
    check(&[&base[..], &["--pin", "keep_casts=0", "-o", text(&plain)]].concat(), 0, &[]);
    check(&[&base[..], &["--pin", "offload=optimizer:1", "-o", text(&other)]].concat(), 0, &[]);
    let said = check(&["diff", text(&plain), text(&other)], 0, &["blocks.0.mlp.gate.weight parameter"]);
    assert!(!said.contains("not there"), "{said}");
    check(&["diff", text(&first), text(&second), "--json"], 0, &["\"part\": \"mesh\""]);
}
