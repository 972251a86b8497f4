//! What cannot be: clusters, budgets, pins and conditions of a simulation that make no sense. Each is refused with
//! the figure, the constraint and what would satisfy it; nothing is a panic.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Runs shardc, and expects an exit code and words in what it says.
#[track_caller]
fn check(args: &[&str], code: i32, words: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_shardc")).args(args).env_remove("RUST_LOG").output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    assert!(!text.contains("panicked"), "{args:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{args:?} does not say `{word}`: {text}");
    }
}

/// `shardc plan` of a small model, with more arguments.
#[track_caller]
fn check_plan(more: &[&str], code: i32, words: &[&str]) {
    let mut args = vec!["plan", "llama-tiny", "--batch", "8", "--seq", "64"];
    args.extend(more);
    check(&args, code, words);
}

/// Plans for a cluster file of this text.
#[track_caller]
fn check_cluster(contents: &str, code: i32, words: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cluster.toml");
    fs::write(&path, contents).unwrap();
    check_plan(&["--cluster", path.to_str().unwrap()], code, words);
}

const NODE: &str = "device = \"h100\"\nper_node = 8\n";
const RACKS: &str = "nodes = 4\n[[levels]]\nname = \"rack\"\nnodes = 2\nbandwidth = 1e10\nlatency = 2e-5\n";

#[test]
fn cluster_files() {
    check_cluster(NODE, 0, &["dp="]);
    let cases: [(&str, &[&str]); 13] = [
        ("", &["cluster.toml", "missing field `per_node`"]),
        ("per_node = 8", &["cluster.toml", "`device` is missing", "\"h100\""]),
        ("device = \"h10\"\nper_node = 8", &["unknown device `h10`", "did you mean `h100`", "a100-80"]),
        ("device = \"h100\"\nper_node = -8", &["`-8`", "a whole number from 1"]),
        ("device = \"h100\"\nper_node = 8\nnodes = 0", &["`0`", "a whole number from 1"]),
        ("device = \"h100\"\nper_node = 8\nlinks = 0", &["unknown field `links`", "`figures`"]),
        ("device = \"h100\"\nper_node = 8\n[figures]\nlink = 1.0", &["unknown figure `link`", "link_bandwidth"]),
        ("device = \"h100\"\nper_node = 8\n[figures]\nlink_bandwidth = 0.0", &["`link_bandwidth` is 0", "4.5e11"]),
        ("device = \"h100\"\nper_node = 8\n[figures]\nmemory_bytes = 80", &["`memory_bytes` is 80", "8e10"]),
        ("device = \"h100\"\nper_node = 8\n[figures]\nnode_bandwidth = nan", &["`node_bandwidth` is NaN", "bytes per"]),
        ("device = \"h100\"\nper_node = 8\n[figures]\nnode_latency = -1e-6", &["`node_latency` is -0.000001", "5e-6"]),
        ("device = \"h100\"\nper_node = 8\n[figures]\npeak_bf16 = inf", &["`peak_bf16` is inf", "9.89e14"]),
        ("device: h100", &["cluster.toml", "TOML parse error", "line 1"]),
    ];
    for (contents, words) in cases {
        check_cluster(contents, 2, words);
    }
    check_plan(&["--cluster", "nowhere.toml"], 2, &["nowhere.toml", "No such file"]);
    check_plan(&["--cluster", "cluster.json"], 2, &["`cluster.json` is not a cluster", "TOML"]);
}

#[test]
fn racks_and_mixtures() {
    check_cluster(&format!("{NODE}{RACKS}"), 0, &["dp="]);
    let three = RACKS.replacen("nodes = 2", "nodes = 3", 1);
    check_cluster(&format!("{NODE}{three}"), 2, &["4 nodes do not fill racks of 3", "a divisor of 4"]);
    let dead = RACKS.replace("1e10", "0.0");
    check_cluster(&format!("{NODE}{dead}"), 2, &["`bandwidth` is 0", "bytes per second"]);
    let parts = "per_node = 4\n[[parts]]\ndevice = \"h100\"\nnodes = 1\n[[parts]]\ndevice = \"a100-80\"\nnodes = 1\n";
    check_cluster(parts, 0, &["1 nodes of h100, 1 nodes of a100-80", "the slowest of each figure"]);
    check_cluster(&parts.replace("a100-80", "cpu"), 2, &["h100 and cpu", "name devices of one kind"]);
}

#[test]
fn budgets() {
    for size in ["0", "NaN", "24QB", "1e30GiB", ""] {
        check_plan(&["--cluster", "h100:8", "--device-memory", size], 2, &["--device-memory", "write 24GiB"]);
    }
    let words = ["no plan fits in 1.00 MiB per rank", "the nearest", "needs", "give each rank", "more than 8 ranks"];
    check_plan(&["--cluster", "h100:8", "--device-memory", "1MiB"], 3, &words);
    let words = ["no plan fits", "under these pins", "drop a pin"];
    check_plan(&["--cluster", "h100:8", "--device-memory", "1MiB", "--pin", "zero=0"], 3, &words);
    check(&["plan", "llama-tiny", "--batch", "18446744073709551615", "--cluster", "h100:8"], 2, &["too large"]);
}

#[test]
fn pins() {
    let cases: [(&str, &[&str]); 13] = [
        ("tp=7", &["pin `tp=7`", "8 ranks", "use a divisor of 8"]),
        ("dp=16", &["pin `dp=16`", "use a divisor of 8"]),
        ("dp=4,tp=4", &["they make 16 ranks and the cluster has 8", "pin only one"]),
        ("tp=0", &["pin `tp=0`", "at least 1"]),
        ("tp=99999999999999999999", &["is not a whole number"]),
        ("zero=4", &["stages 0 to 3"]),
        ("microbatch=3", &["microbatch=3", "a batch of 8", "use a multiple of 3"]),
        ("loss_chunks=7", &["loss_chunks=7", "the sequence of 64", "use a divisor"]),
        (
            "microbatch=2,overlap_chunks=4",
            &["overlap_chunks=4", "a microbatch of 2 samples does not divide into 4 chunks"],
        ),
        ("tp=8,microbatch=8,overlap_chunks=4096", &["overlap_chunks=4096", "use at most 32"]),
        ("recompute=-1", &["recompute=-1", "block or a number of blocks"]),
        ("dp", &["write NAME=VALUE"]),
        ("dp=8,dp=8", &["pinned twice"]),
    ];
    for (pins, words) in cases {
        check_plan(&["--cluster", "h100:8", "--pin", pins], 2, words);
    }
}

#[test]
fn simulations() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.json");
    let plan = path.to_str().unwrap();
    check_plan(&["--cluster", "h100:8", "-o", plan], 0, &["step"]);
    check(&["simulate", plan, "--straggler", "3=2", "--contention", "2"], 0, &["simulated step"]);
    let cases: [(&[&str], &[&str]); 9] = [
        (&["--straggler", "9=2"], &["rank 9", "ranks 0 to 7"]),
        (&["--straggler", "0=0.5"], &["the slowdown of a rank is 0.5", "from 1 to"]),
        (&["--straggler", "0=nan"], &["is NaN", "from 1 to"]),
        (&["--straggler", "0=1e300"], &["from 1 to 1000000"]),
        (&["--straggler", "slow"], &["not RANK=FACTOR", "--straggler 3=1.5"]),
        (&["--straggler", "1=2", "--straggler", "1=3"], &["rank 1 is to be slow twice"]),
        (&["--contention", "0"], &["the contention is 0", "from 1 to"]),
        (&["--contention", "inf"], &["the contention is inf", "from 1 to"]),
        (&["--cluster", "h100:4"], &["the plan has 8 ranks and the cluster 4 devices"]),
    ];
    for (more, words) in cases {
        let args: Vec<&str> = ["simulate", plan].into_iter().chain(more.iter().copied()).collect();
        check(&args, 2, words);
    }
    check(&["simulate", Path::new("/no/plan.json").to_str().unwrap()], 2, &["/no/plan.json"]);
}
