//! What cannot be: clusters, budgets, pins and conditions of a simulation that make no sense. Each is refused with
//! the figure, the constraint and what would satisfy it; nothing is a panic.

mod command;

use command::{check, text};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of the directory of a small Llama.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/hf/llama").join(name)
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
    let cases: [(&str, &[&str]); 14] = [
        ("device = \"h100\"\nper_node = 8\n[figures]\npeak_bf16 = 1e300", &["`peak_bf16` is 1e300"]),
        ("", &["cluster.toml", "missing field `per_node`"]),
        ("per_node = 8", &["cluster.toml", "`device` is missing", "\"h100\""]),
        ("device = \"h10\"\nper_node = 8", &["unknown device `h10`", "did you mean `h100`", "a100-80"]),
        ("device = \"h100\"\nper_node = -8", &["`per_node = -8`", "a whole number from 1"]),
        ("device = \"h100\"\nper_node = 8\nnodes = 0", &["`nodes = 0`", "a whole number from 1"]),
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
    check_plan(&["--cluster", "gpu:2"], 2, &["unknown device `gpu`", "`cuda:N` are GPUs of this machine"]);
    check(&["plan", "no/model"], 2, &["no/model: there is no such directory", "from the working directory"]);
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
    check_cluster(parts, 0, &["1 node of h100, 1 node of a100-80", "at the pace of those that are slowest in it"]);
    check_cluster(&parts.replace("a100-80", "cpu"), 2, &["h100 and cpu", "name devices of one kind"]);
}

#[test]
fn budgets() {
    for size in ["0", "NaN", "24QB", "1e30GiB", ""] {
        check_plan(&["--cluster", "h100:8", "--device-memory", size], 2, &["--device-memory", "write 24GiB"]);
    }
    let words = [
        "no plan fits in 1.00 MiB per rank",
        "the nearest",
        "needs",
        "give each rank",
        "by an estimate, or use more than 8 ranks",
    ];
    check_plan(&["--cluster", "h100:8", "--device-memory", "1MiB"], 3, &words);
    let words = ["no plan fits", "under these pins", "drop a pin"];
    check_plan(&["--cluster", "h100:8", "--device-memory", "1MiB", "--pin", "zero=0"], 3, &words);
    check(&["plan", "llama-tiny", "--batch", "18446744073709551615", "--cluster", "h100:8"], 2, &["too large"]);
}

#[test]
fn pins() {
    let cases: [(&str, &[&str]); 14] = [
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
        ("keep_casts=2", &["pin `keep_casts=2`", "is not 0 or 1"]),
        ("recompute=-1", &["recompute=-1", "block or a number of blocks"]),
        ("dp", &["write NAME=VALUE"]),
        ("dp=8,dp=8", &["pinned twice"]),
    ];
    for (pins, words) in cases {
        check_plan(&["--cluster", "h100:8", "--pin", pins], 2, words);
    }
    let words = ["pin `keep_casts=1`", "no trained parameter is cast", "leave it out"];
    check_plan(&["--cluster", "h100:8", "--precision", "fp32", "--pin", "keep_casts=1"], 2, &words);
}

#[test]
fn options() {
    let data = fixture("batches.safetensors");
    let train = |more: &[&str], words: &[&str]| {
        let model = fixture("");
        let args = ["train", text(&model), "--data", text(&data), "--steps", "1"];
        check(&[&args, more].concat(), 2, words);
    };
    for (flag, value, word) in [
        ("--batch", "-1", "it must be a whole number from 1"),
        ("--seq", "0", "it must be a whole number from 1"),
        ("--device-memory", "-1", "write 24GiB"),
        ("--lr", "1e-400", "not told from 0"),
        ("--lr", "fast", "it must be a number"),
        ("--eps", "0", "eps is 0; it must be a number above 0"),
        ("--eps", "1e-46", "it must be a number above 0 in fp32"),
        ("--weight-decay", "1e300", "it must be at least 0"),
        ("--clip-grad-norm", "-1", "above 0 in fp32, such as 1 (0 does not clip)"),
        ("--clip-grad-norm", "1e-60", "(0 does not clip)"),
        ("--lr", "1e-60", "which is 0 in fp32"),
        ("--clip-grad-norm", "inf", "must be a number"),
    ] {
        train(&[flag, value], &[word]);
    }
    check_plan(&["--seq", "1"], 2, &["cannot be used multiple times"]);
    check(&["plan", "llama-tiny", "--seq", "1"], 2, &["sequences of 1 token have nothing to predict: use 2 tokens"]);
    check(&["plan", "gpt2-124m", "--seq", "2048"], 2, &["has 1024 positions: use 1024 tokens or less"]);
    check_plan(&["--cluster", "cpu:2", "--pin", "dp = 2, tp=1"], 0, &["dp=2,tp=1"]);
    check(&["estimate", "llama-tiny", "--ranks", "18446744073709551615"], 2, &["from 1 to 1048576"]);
    let one = ["estimate", "llama-tiny", "--ranks", "1", "--device-memory", "1GiB"];
    check(&one, 0, &["per rank, 1 data rank;", "fp32: trains with ZeRO 0 or more", "per rank left"]);
    // A file that cannot be written is told before the search, and the search leaves nothing behind where it fails.
    check_plan(&["-o", "/nowhere/plan.json", "--device-memory", "1MiB"], 2, &["/nowhere/plan.json"]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.json");
    check_plan(&["-o", text(&path), "--device-memory", "1MiB"], 3, &["no plan fits"]);
    assert!(!path.exists());
}

#[test]
fn devices() {
    check_plan(&["--cluster", "v100:2"], 0, &["per step, fp16"]);
    check_plan(&["--cluster", "a100-80:2"], 0, &["per step, bf16"]);
    check_plan(&["--cluster", "v100:2", "--precision", "fp8"], 2, &["`v100`", "use --precision fp16"]);
    check_plan(&["--cluster", "cpu:1048576"], 2, &["1048576 ranks share the", "at most"]);
    // CPU ranks that a file describes are CPU ranks.
    let dir = tempfile::tempdir().unwrap();
    let (file, plan) = (dir.path().join("cluster.toml"), dir.path().join("plan.json"));
    fs::write(&file, "device = \"cpu\"\nper_node = 4\nnodes = 2\n").unwrap();
    let buffers = |cluster: &str| {
        check_plan(&["--cluster", cluster, "--pin", "dp=8", "-o", text(&plan)], 0, &[]);
        let plan: serde_json::Value = serde_json::from_slice(&fs::read(&plan).unwrap()).unwrap();
        plan["prediction"]["memory"]["buffers"].as_u64().unwrap()
    };
    assert_eq!(buffers(text(&file)), buffers("cpu:4x2"));
}

#[test]
fn configurations() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let whole = fs::read_to_string(fixture("config.json")).unwrap();
    let plan = ["plan", text(dir.path()), "--batch", "4", "--seq", "32"];
    let cases = [
        ("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 0", "`rms_norm_eps` must be a number above 0, not 0"),
        ("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": -1", "`rms_norm_eps` must be a number above 0, not -1"),
        ("\"vocab_size\": 256", "\"vocab_size\": 1", "`vocab_size` must be a whole number from 2"),
        ("\"intermediate_size\": 128", "\"intermediate_size\": 0", "`intermediate_size` must be a whole number from 1"),
        ("\"rope_theta\": 10000.0", "\"rope_theta\": 0", "`rope_parameters.rope_theta` must be a number above 0"),
        (
            "\"head_dim\": 16,\n  \"hidden_act\": \"silu\",\n  \"hidden_size\": 64",
            "\"hidden_size\": 66",
            "`num_attention_heads` must be a divisor of `hidden_size`, which is 66",
        ),
        ("\"attention_dropout\": 0.0", "\"attention_dropout\": 2", "`attention_dropout` must be a probability"),
    ];
    for (from, to, words) in cases {
        assert!(whole.contains(from), "nothing to edit: {from}");
        fs::write(&path, whole.replace(from, to)).unwrap();
        check(&plan, 2, &["config.json", words, "correct the field"]);
    }
    fs::write(&path, whole.replace("\"attention_dropout\": 0.0", "\"attention_dropout\": 0.5")).unwrap();
    check(&plan, 0, &["`attention_dropout` is 0.5; the model is trained without dropout"]);
    check(&[&plan[..4], &["--seq", "128"]].concat(), 0, &["128 tokens are longer than the 64 positions"]);
    // Weights that the configuration has no place for.
    let (model, data) = (dir.path().join("model.safetensors"), fixture("batches.safetensors"));
    fs::copy(fixture("model.safetensors"), &model).unwrap();
    let train = ["train", text(dir.path()), "--data", text(&data), "--steps", "1"];
    fs::write(&path, whole.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1")).unwrap();
    check(&train, 0, &["has no place for `model.layers.1.", "and 6 more"]);
    fs::write(&path, whole.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true")).unwrap();
    check(&train, 2, &["`lm_head.weight` differs from the embedding", "\"tie_word_embeddings\": false"]);
}

/// What the first lines of a plan's text say must be so.
#[test]
fn words_of_plans() {
    let dir = tempfile::tempdir().unwrap();
    let (plan, edited) = (dir.path().join("plan.json"), dir.path().join("plan.txt"));
    let pinned = ["--cluster", "cpu:2", "--pin", "dp=2,zero=1,microbatch=2,recompute=none", "-o", text(&plan)];
    check_plan(&pinned, 0, &[]);
    check(&["explain", text(&plan), "--text", text(&edited)], 0, &["wrote"]);
    check(&["verify", text(&edited), "--static-only"], 0, &["✓ request", "✓ budget"]);
    let whole = fs::read_to_string(&edited).unwrap();
    let planned: serde_json::Value = serde_json::from_slice(&fs::read(&plan).unwrap()).unwrap();
    let [needed, there] = [
        planned["prediction"]["memory"].as_object().unwrap().values().map(|part| part.as_u64().unwrap()).sum::<u64>(),
        planned["request"]["device_memory"].as_u64().unwrap(),
    ];
    let (memory, less) = (format!("\"device_memory\":{there}"), format!("\"device_memory\":{}", needed - 1));
    let exact = format!("needs {needed} bytes, and there are {} bytes", needed - 1);
    for (from, to, words) in [
        ("\"batch\":8", "\"batch\":4", "takes `input_ids` as i64[4,64], and the graph has i64[8,64]"),
        ("\"seq\":64", "\"seq\":32", "takes `input_ids` as i64[8,32]"),
        ("\"precision\":\"fp32\"", "\"precision\":\"bf16\"", "the precision is `bf16`, and the graph computes in f32"),
        ("\"model\":\"llama-tiny\"", "\"model\":\"gpt2-124m\"", "gpt2-124m has parameter"),
        ("\"cluster\":\"cpu:2\"", "\"cluster\":\"cpu:4\"", "the mesh has 2 ranks, and cluster cpu:4 has 4 devices"),
        ("; choice dp=2", "; choice dp=1", "the choice says dp=1, and the mesh has dp=2"),
        ("; choice dp=2,tp=1,zero=1", "; choice dp=2,tp=1,zero=3", "says zero=3, and the layouts are those of zero=1"),
        ("; choice dp=2,tp=1,zero=1,microbatch=2", "; choice dp=2,tp=1,zero=1,microbatch=4", "says microbatch=4"),
        (
            "; choice dp=2,tp=1,zero=1,microbatch=2,recompute=none",
            "; choice dp=2,tp=1,zero=1,microbatch=2,recompute=block",
            "graph itself",
        ),
        ("\"pins\":\"dp=2", "\"pins\":\"dp=1", "the pins say dp=1, and the choice dp=2"),
        (&memory, &less, &exact),
    ] {
        let changed = whole.replacen(from, to, 1);
        assert_ne!(changed, whole, "nothing to edit: {from}");
        fs::write(&edited, changed).unwrap();
        check(&["explain", text(&edited)], 2, &[words]);
    }
    // A plan is trained from its text, whatever the file is called.
    let (trained, words) = (dir.path().join("trained.txt"), dir.path().join("words"));
    check(&["explain", text(&plan), "--text", text(&trained)], 0, &["wrote"]);
    fs::write(&words, b"shardc ".repeat(1000)).unwrap();
    let train = ["train", text(&trained), "--data", text(&words), "--steps", "1", "--profile", "--json"];
    let output = Command::new(env!("CARGO_BIN_EXE_shardc")).args(train).output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(document["steps"] == 1 && document["profile"].is_object(), "{document}");
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
        (&["--straggler", "0=1e300"], &["is 1e300; it must be", "from 1 to 1000000"]),
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

#[test]
fn runs_that_are_not_meant() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("words.txt");
    fs::write(&data, "one two three four ".repeat(200)).unwrap();
    let train = |more: &[&str], code: i32, words: &[&str]| {
        let args = ["train", "llama-tiny", "--batch", "4", "--seq", "16", "--steps", "1", "--data", text(&data)];
        check(&[&args[..], more].concat(), code, words);
    };
    // Two hosts are not this one.
    train(&["--cluster", "cpu:2x2"], 2, &["`cpu:2x2` has several hosts", "train on cpu:4"]);
    // One step of four that the rate takes to rise.
    train(&["--warmup", "4", "--lr", "1e-3"], 0, &["--warmup 4 is longer than --steps 1", "2.5e-4, not to --lr 1e-3"]);
    // What is read is not written over.
    train(&["--metrics", text(&data)], 2, &["--metrics", "this run reads", "name another file"]);
    assert!(fs::metadata(&data).unwrap().len() > 1000);
    let cluster = dir.path().join("two.toml");
    fs::write(&cluster, "device = \"h100\"\nper_node = 2\nnodes = 1\n").unwrap();
    let plan = ["plan", "llama-tiny", "--batch", "4", "--seq", "16", "--cluster", text(&cluster), "-o"];
    check(&[&plan[..], &[text(&cluster)]].concat(), 2, &["--output", "this run reads", "two.toml"]);
    let file = dir.path().join("plan.json");
    check(&[&plan[..], &[text(&file)]].concat(), 0, &[]);
    check(&["explain", text(&file), "--html", text(&file)], 2, &["--html", "this run reads", "plan.json"]);
    // Each process of a launcher would do all of it.
    let torchrun = [("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")];
    let mut command = Command::new(env!("CARGO_BIN_EXE_shardc"));
    command.args([
        "train",
        "llama-tiny",
        "--batch",
        "4",
        "--seq",
        "16",
        "--steps",
        "1",
        "--cluster",
        "cpu:2",
        "--data",
    ]);
    let output = command.arg(&data).envs(torchrun).env("MASTER_PORT", "29511").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("torchrun started 2 processes"), "{said}");
}

#[test]
fn choices_that_cannot_be_kept() {
    let divided = ["plan", "llama-160m", "--batch", "4", "--seq", "2048", "--cluster", "h100:2"];
    let words = ["pin `loss_chunks=4`", "leave it out, or leave cp=2 out"];
    check(&[&divided[..], &["--pin", "cp=2,loss_chunks=4"]].concat(), 2, &words);
    let parts = ["plan", "llama-tiny", "--batch", "5", "--seq", "32", "--cluster", "cpu:8"];
    let words = ["pin `fsdp=4`", "a batch of 5 does not divide over 4 data ranks; use a multiple of 4"];
    for pins in ["fsdp=4,ulysses=2", "fsdp=4,ulysses=2,microbatch=1"] {
        check(&[&parts[..], &["--pin", pins]].concat(), 2, &words);
    }
    // Several axes are told as they were written.
    let odd = ["plan", "llama-tiny", "--batch", "8", "--seq", "30", "--cluster", "h100:8", "--pin", "cp=2x2"];
    check(&odd, 2, &["pin `cp=2x2`: 4 does not divide the sequence of 30"]);
    // What else is pinned is not to blame for ranks that the batch does not fill.
    let uneven = ["plan", "llama-tiny", "--batch", "8", "--seq", "32", "--cluster", "h100:7x4"];
    let words = ["a batch of 8 does not divide over the 28 ranks"];
    for pins in ["tp=4", "tp=4,overlap_chunks=2", "tp=4,offload=optimizer", "tp=4,overlap_chunks=2,offload=optimizer"] {
        check(&[&uneven[..], &["--pin", pins]].concat(), 2, &words);
    }
    let odd = ["plan", "llama-tiny", "--batch", "8", "--seq", "100", "--cluster", "h100:4", "--precision", "fp8"];
    check(&odd, 2, &["fp8", "multiples of 16", "--precision bf16"]);
    // The sequence is divided where samples do not fill the ranks.
    let one = ["plan", "llama-tiny", "--batch", "1", "--seq", "4096", "--cluster", "h100:8", "--pin", "tp=2"];
    check(&one, 0, &["cp=4"]);
    // A title that is another schedule's.
    let dir = tempfile::tempdir().unwrap();
    let (plan, edited) = (dir.path().join("plan.json"), dir.path().join("plan.ir"));
    let pipeline = ["--cluster", "cpu:2", "--pin", "pp=2,schedule=1f1b,microbatch=2", "-o", text(&plan)];
    check_plan(&pipeline, 0, &["schedule=1f1b"]);
    check(&["explain", text(&plan), "--text", text(&edited)], 0, &["wrote"]);
    let contents = fs::read_to_string(&edited).unwrap().replace("schedule=1f1b", "schedule=gpipe");
    fs::write(&edited, contents).unwrap();
    let words = ["the choice says schedule=gpipe", "the pipeline is 1f1b"];
    check(&["verify", text(&edited), "--static-only"], 2, &words);
    let bubbles = ["--cluster", "cpu:2", "--pin", "pp=2,schedule=zbv,in_flight=3,microbatch=1", "-o", text(&plan)];
    check_plan(&bubbles, 0, &["schedule=zbv,virtual=2,in_flight=3"]);
    check(&["explain", text(&plan), "--text", text(&edited)], 0, &["wrote"]);
    let contents = fs::read_to_string(&edited).unwrap();
    fs::write(&edited, contents.replace("zbv 2 in_flight 3", "zbv 2 in_flight 4")).unwrap();
    let words = ["the choice says in_flight=3", "2 chunks of a stage and 4 in flight"];
    check(&["verify", text(&edited), "--static-only"], 2, &words);
    // Values go by the names that are printed for equal blocks.
    check(&["explain", text(&plan), "blocks.*.mlp.gate.weight"], 0, &["`blocks.0.mlp.gate`"]);
}

/// A model that is another than when it was planned.
#[test]
fn models_that_have_changed() {
    let dir = tempfile::tempdir().unwrap();
    let (model, plan) = (dir.path().join("model@layers=2"), dir.path().join("plan.json"));
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors", "batches.safetensors"] {
        fs::copy(fixture(name), model.join(name)).unwrap();
    }
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let data = model.join("batches.safetensors");
    let train = ["train", text(&plan), "--data", text(&data), "--steps", "1"];
    let planned = ["plan", text(&model), "--cluster", "cpu:2", "--batch", "4", "--seq", "32", "-o", text(&plan)];
    check(&planned, 0, &["model@layers=2 on cpu:2"]);
    check(&train, 0, &["1 of 1 step"]);
    for (key, value, words) in [
        ("rms_norm_eps", "0.25", ["computes rms_norm with eps=0.25", "the graph rms_norm with eps=1e-6"]),
        (
            "rope_parameters",
            r#"{"rope_theta": 77.0, "rope_type": "default"}"#,
            ["computes literal with values=[", "the graph literal with values=["],
        ),
        ("num_hidden_layers", "1", ["the graph has parameter `blocks.1.", "has not"]),
    ] {
        let mut changed: serde_json::Value = serde_json::from_str(&config).unwrap();
        changed[key] = serde_json::from_str(value).unwrap();
        fs::write(model.join("config.json"), changed.to_string()).unwrap();
        let again = ["is the plan of another model", "again, as it is now"];
        check(&train, 2, &[&words[..], &again].concat());
        check(&["verify", text(&plan), "--static-only"], 1, &words);
    }
    fs::write(model.join("config.json"), config).unwrap();
    check(&train, 0, &["1 of 1 step"]);
}

/// A plan file whose hash is right, and what it says is not.
#[test]
fn plans_that_contradict_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let (plan, spoilt) = (dir.path().join("plan.json"), dir.path().join("spoilt.json"));
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/documentation.txt");
    let planned = ["plan", "llama-tiny", "--cluster", "cpu:2", "--batch", "4", "--seq", "32", "--pin", "dp=2,zero=1"];
    check(&[&planned[..], &["--precision", "fp32", "-o", text(&plan)]].concat(), 0, &[]);
    let whole = fs::read_to_string(&plan).unwrap();
    let spoil = |from: &str, to: &str, words: &[&str]| {
        assert!(whole.contains(from), "{from}");
        let changed = whole.replacen(from, to, 1);
        fs::write(&spoilt, &changed).unwrap();
        let refused = Command::new(env!("CARGO_BIN_EXE_shardc")).args(["verify", text(&spoilt)]).output().unwrap();
        let said = String::from_utf8(refused.stderr).unwrap();
        let hash =
            |after: &str| said.split_once(after).unwrap().1.split(['\n', ' ', ',', ';']).next().unwrap().to_string();
        fs::write(&spoilt, changed.replace(&hash("its hash says "), &hash("its contents "))).unwrap();
        check(&["verify", text(&spoilt), "--static-only"], 1, words);
        check(&["train", text(&spoilt), "--data", text(&data), "--steps", "1"], 2, words);
    };
    let room = whole.split_once("\"device_memory\": ").unwrap().1.split(',').next().unwrap();
    spoil(&format!("\"device_memory\": {room}"), "\"device_memory\": 5", &["each rank needs", "there are 5 B"]);
    spoil(
        "\"cluster\": \"cpu:2\"",
        "\"cluster\": \"cpu:4\"",
        &["the mesh has 2 ranks, and cluster cpu:4 has 4 devices"],
    );
    spoil("\"cluster\": \"cpu:2\"", "\"cluster\": \"cpu:0\"", &["`0` in cluster `cpu:0`"]);
    spoil("\"precision\": \"fp32\"", "\"precision\": \"fp31\"", &["the precision is `fp31`"]);
    spoil("\n  \"choice\": \"dp=2", "\n  \"choice\": \"dp=1", &["the choice says dp=1, and the mesh has dp=2"]);
    spoil(
        "down.weight.v\\\" {init=0.0}",
        "down.weight.v\\\" {init=1.0}",
        &["init=1.0", "in `blocks.0.mlp.down` is nothing that a step of llama-tiny"],
    );
}

/// What would do nothing is refused.
#[test]
fn flags_without_an_effect() {
    let dir = tempfile::tempdir().unwrap();
    let plan = dir.path().join("plan.json");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/documentation.txt");
    check(&["plan", "llama-tiny", "--cluster", "cpu:1", "--seq", "32", "-o", text(&plan)], 0, &[]);
    let train = |more: &[&str], words: &[&str]| {
        let args = ["train", text(&plan), "--data", text(&data), "--steps", "1"];
        check(&[&args[..], more].concat(), 2, words);
    };
    train(&["--dump-to", text(dir.path())], &["--dump-to and --search", "leave them out"]);
    train(&["--search", "all"], &["--dump-to and --search", "leave them out"]);
    train(&["--min-lr", "1e-4"], &["--min-lr 0.0001 has no effect", "--schedule cosine"]);
    train(&["--betas", "0.9"], &["two numbers, such as 0.9,0.95"]);
    let batches = fixture("batches.safetensors");
    let tokens = ["--data", text(&batches), "--steps", "1", "--tokenizer", text(&plan)];
    check(
        &[&["train", "llama-tiny"], &tokens[..]].concat(),
        2,
        &["--tokenizer", "batches.safetensors holds tokens already"],
    );
    // Tensors that nothing reads, and a directory that is another's.
    let (masked, foreign) = (dir.path().join("masked.safetensors"), dir.path().join("foreign"));
    let names = ["input_ids", "labels", "attention_mask"].into_iter().enumerate();
    let tensor = |(at, name): (usize, &str)| {
        format!(r#""{name}.0":{{"dtype":"I64","shape":[1,4],"data_offsets":[{},{}]}}"#, at * 32, at * 32 + 32)
    };
    let header = format!("{{{}}}", names.map(tensor).collect::<Vec<_>>().join(","));
    let length = (header.len() as u64).to_le_bytes();
    fs::write(&masked, [&length[..], header.as_bytes(), &[0; 96]].concat()).unwrap();
    let one = ["train", text(&fixture("")), "--data", text(&masked), "--steps", "1"].map(String::from);
    check(&one.each_ref().map(String::as_str), 2, &["it has tensors `attention_mask`", "input_ids, labels alone"]);
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("config.json"), "{\"mine\": 1}").unwrap();
    let own = ["train", "llama-tiny", "--data", text(&data), "--steps", "1", "--save", text(&foreign)];
    let said = check(&own, 2, &["it is no model's configuration", "save to a directory of its own"]);
    assert!(!said.contains("loss"), "{said}");
}

/// What `train` refuses is refused by `check` as well, whatever this machine has.
#[test]
fn clusters_that_do_not_train() {
    check(&["check", "--cluster", "cpu:2x2"], 2, &["✓ CPU", "several hosts", "cpu:4"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("own.toml");
    fs::write(&file, "device = \"cpu\"\nper_node = 2\nnodes = 1\n").unwrap();
    check(&["check", "--cluster", text(&file)], 2, &["own.toml` cannot be run from here", "cpu:N"]);
}
