//! The command line from outside: exit codes and messages, above all of bad input.

mod command;
mod planned;

use command::{check, shardc, text};
use planned::plan_in;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/hf").join(name)
}

/// A copy of a fixture that a test may spoil.
fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        let target = dir.path().join(path.file_name().unwrap());
        fs::write(target, fs::read(&path).unwrap()).unwrap();
    }
    dir
}

/// `shardc train` on a model directory and some data.
#[track_caller]
fn check_train(model: &Path, data: &Path, more: &[&str], code: i32, words: &[&str]) -> String {
    let mut args = vec!["train", text(model), "--data", text(data), "--steps", "1", "--precision", "fp32"];
    args.extend(more);
    check(&args, code, words)
}

#[test]
fn models_are_listed() {
    check(&["models"], 0, &["gpt2-124m", "124,439,808", "llama-405b", "Radford"]);
    check(&["models", "--json"], 0, &["\"parameters\": 124439808"]);
}

/// A report that nobody reads is fine, one that cannot be written is not.
#[cfg(target_os = "linux")]
#[test]
fn reports_that_cannot_be_written() {
    let run = |command: &str| {
        let shardc = env!("CARGO_BIN_EXE_shardc");
        let output = Command::new("sh").args(["-c", command, "sh", shardc]).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = run("\"$1\" models > /dev/full");
    assert!(code == Some(1) && said.contains("error: stdout"), "{code:?} {said}");
    let (code, said) = run("{ \"$1\" models; echo $? >&2; } | true");
    assert!(code == Some(0) && said.trim() == "0", "{code:?} {said}");
}

#[test]
fn unknown_names() {
    check(&["plan", "lama-tiny"], 2, &["`lama-tiny`", "llama-tiny", "shardc models"]);
    check(&["plan", "some/where"], 2, &["some/where"]);
    check(&["plan", text(&fixture("llama/config.json"))], 2, &["is a file", "name the directory"]);
    check(&["plan", "llama-tiny", "--bach", "4"], 2, &["--bach", "--batch"]);
    check(&["pln"], 2, &["plan"]);
    check(&["plan", "llama-tiny", "--cluster", "h10:8"], 2, &["h10", "h100"]);
    check(&["plan", "llama-tiny", "--pin", "dq=2"], 2, &["dq", "dp"]);
    check(&["plan", "llama-tiny", "--device-memory", "24QB"], 2, &["24QB", "24GiB"]);
    check(&["plan", "llama-tiny", "--batch", "1", "--seq", "1000000000000"], 2, &["1000000000000", "67108864 tokens"]);
    let numbers =
        [("--lr", "-1"), ("--lr", "nan"), ("--eps", "-1"), ("--clip-grad-norm", "-1"), ("--betas", "1.5,0.9")];
    for (flag, value) in numbers {
        let said =
            check_train(&fixture("llama"), &fixture("llama/batches.safetensors"), &[flag, value], 2, &["must be"]);
        assert!(!said.contains("Usage"), "{said}");
    }
}

#[test]
fn impossible_requests() {
    check(&["plan", "llama-tiny", "--cluster", "cpu:4", "--pin", "dp=2,tp=4"], 2, &["dp=2,tp=4", "4"]);
    check(&["plan", "llama-tiny", "--pin", "recompute=99"], 2, &["recompute=99", "2 blocks"]);
    check(&["plan", "llama-tiny", "--cluster", "cpu:4", "--pin", "tp=3"], 2, &["tp=3", "4 ranks"]);
    check(&["plan", "llama-tiny", "--cluster", "cpu:4", "--pin", "dp=4", "--batch", "6"], 2, &["6", "dp=4"]);
    check(&["plan", "gpt2-124m", "--seq", "2048", "--batch", "1"], 2, &["2048", "1024 positions"]);
    // Where no stages fit, memory is what binds, and there is no better cut.
    let stages = ["plan", "llama-70b", "--cluster", "a100-80:8x4", "--batch", "64", "--seq", "2048"];
    let said = check(&[&stages[..], &["--pin", "pp=2,tp=2,schedule=1f1b"]].concat(), 3, &["pp=2", "give each rank"]);
    assert!(!said.contains("cannot be cut"), "{said}");
    check(
        &["plan", "llama-tiny", "--batch", "4", "--seq", "64", "--device-memory", "8MiB"],
        3,
        &["no plan fits in 8.00 MiB", "the nearest"],
    );
}

#[test]
fn the_memory_of_the_host_binds_cpu_ranks() {
    let args = ["plan", "llama-tiny", "--cluster", "cpu:4", "--batch", "4", "--seq", "64", "--host-memory"];
    let with = |size: &'static str| args.into_iter().chain([size]).collect::<Vec<_>>();
    let text = check(&with("1GiB"), 0, &["of 256.00 MiB", "per host, of 1.00 GiB"]);
    let number = |line: &str| line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap();
    let line = |start: &str| number(text.lines().find(|line| line.starts_with(start)).unwrap());
    assert!((line("host") - 4.0 * line("memory")).abs() < 0.03, "{text}");
    check(
        &with("16MiB"),
        3,
        &["no plan fits in 4.00 MiB per rank, its share of the host's 16.00 MiB", "give the host"],
    );
    check(&with("many"), 2, &["--host-memory many", "24GiB"]);
    check(&with("0"), 2, &["--host-memory 0"]);
    // The host binds whatever the rank may have; what lies on GPUs is not in it.
    let mut both = with("1GiB");
    both.extend(["--device-memory", "8GiB"]);
    check(&both, 0, &["of 256.00 MiB"]);
    let gpu = ["plan", "llama-tiny", "--cluster", "h100:4", "--batch", "4", "--seq", "64", "--host-memory", "1MiB"];
    check(&gpu, 0, &["host     0 B per host, of 1.00 MiB"]);
}

#[test]
fn plans_are_written_explained_and_guarded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.json");
    let args = ["plan", "llama-tiny", "--cluster", "cpu:2", "--batch", "4", "--seq", "32", "-o", text(&path)];
    check(&args, 0, &["step", "memory", "parameters", "runners-up"]);
    check(
        &["explain", text(&path)],
        0,
        &["llama-tiny on cpu:2", "blocks.* (2 alike)", "collectives of a step", "simulated step"],
    );
    check(&["explain", text(&path), "blocks.0.attention.query"], 0, &["parameter \"blocks.0.attention.query.weight\""]);
    check(&["explain", text(&path), "blocks.0.atention.query"], 2, &["did you mean"]);
    check(&["verify", text(&path)], 0, &["✓ layouts", "✓ programs", "✓ loss", "✓ moments"]);
    check(&["verify", text(&path), "--static-only", "--json"], 0, &["\"layouts\""]);
    for flag in [["--host-memory", "1GiB"], ["--pin", "dp=2"], ["--batch", "8"]] {
        let args = ["train", text(&path), "--data", "x", "--steps", "1", flag[0], flag[1]];
        check(&args, 2, &[flag[0], "plan"]);
    }
    let whole = fs::read_to_string(&path).unwrap();
    let spoilt = dir.path().join("spoilt.json");
    let check_spoilt = |contents: String, words: &[&str]| {
        fs::write(&spoilt, contents).unwrap();
        check(&["explain", text(&spoilt)], 2, words);
        check(&["train", text(&spoilt), "--data", "x", "--steps", "1"], 2, words);
    };
    check_spoilt(whole.replace("\"version\": 2", "\"version\": 99"), &["version 99"]);
    check_spoilt(whole[..whole.len() / 2].to_string(), &["cut short"]);
    check_spoilt(whole.replace("\"batch\": 4", "\"batch\": 5"), &["hash"]);
    check_spoilt("hello".to_string(), &["not a plan file"]);
    fs::write(&spoilt, [0xff, 0xfe, 0]).unwrap();
    check(&["explain", text(&spoilt)], 2, &["not a plan file", "not UTF-8"]);
}

#[test]
fn bad_directories() {
    let batches = fixture("llama").join("batches.safetensors");
    let spoil = |file: &str, spoil: &dyn Fn(Vec<u8>) -> Option<Vec<u8>>| {
        let dir = copy("llama");
        let path = dir.path().join(file);
        match spoil(fs::read(&path).unwrap()) {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        dir
    };
    let replace = |from: &'static str, to: &'static str| {
        move |bytes: Vec<u8>| Some(String::from_utf8(bytes).unwrap().replace(from, to).into_bytes())
    };
    let dir = spoil("model.safetensors", &|bytes| Some(bytes[..bytes.len() - 1000].to_vec()));
    check_train(dir.path(), &batches, &[], 2, &["model.safetensors"]);
    let dir = spoil("model.safetensors", &|_| None);
    check_train(dir.path(), &batches, &[], 2, &["model.safetensors"]);
    let dir = spoil("config.json", &replace("\"intermediate_size\": 128", "\"intermediate_size\": 160"));
    check_train(dir.path(), &batches, &[], 2, &["mlp", "128", "160"]);
    let dir = spoil("config.json", &replace("\"llama\"", "\"bert\""));
    check_train(dir.path(), &batches, &[], 2, &["bert"]);
    for (from, to, words) in [
        (
            "\"num_attention_heads\": 4",
            "\"num_attention_heads\": 0",
            "`num_attention_heads` must be a whole number from 1",
        ),
        (
            "\"num_key_value_heads\": 2",
            "\"num_key_value_heads\": 3",
            "`num_key_value_heads` must be a divisor of `num_attention_heads`, which is 4, not 3",
        ),
        ("\"head_dim\": 16", "\"head_dim\": 15", "field `head_dim` must be even"),
        ("\"hidden_size\": 64", "\"hidden_size\": -64", "`hidden_size` must be a whole number"),
    ] {
        let dir = spoil("config.json", &replace(from, to));
        check_train(dir.path(), &batches, &[], 2, &[words]);
    }
    let elsewhere = r#"{"weight_map": {"lm_head.weight": "../../model.safetensors"}}"#;
    let dir = copy("llama");
    // The single file would come first, as in transformers.
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    fs::write(dir.path().join("model.safetensors.index.json"), elsewhere).unwrap();
    check_train(dir.path(), &batches, &[], 2, &["../../model.safetensors", "not the name of a file in this directory"]);
    // A part of a model in many files is missing, then cut short.
    let index = r#"{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}"#;
    let dir = copy("llama");
    // The single file would come first, as in transformers.
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    check_train(dir.path(), &batches, &[], 2, &["model-00001-of-00002.safetensors", "help:"]);
    fs::write(dir.path().join("model-00001-of-00002.safetensors"), [9, 0, 0, 0, 0, 0, 0, 0, b'{']).unwrap();
    check_train(dir.path(), &batches, &[], 2, &["model-00001-of-00002.safetensors", "truncated"]);
    let dir = spoil("config.json", &|_| None);
    check_train(dir.path(), &batches, &[], 2, &["config.json"]);
}

#[test]
fn bad_data() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let model = fixture("llama");
    let small = ["--batch", "1", "--seq", "16"];
    check_train(&model, &file("empty.txt", b""), &small, 2, &["empty.txt", "empty"]);
    check_train(&model, &file("short.txt", b"hello"), &small, 2, &["5 tokens", "--seq"]);
    check_train(&model, &dir.path().join("none.txt"), &small, 2, &["none.txt"]);
    let mut tokens = vec![0u8; 64];
    tokens[20..22].copy_from_slice(&300u16.to_le_bytes());
    let words = ["token 300", "position 10", "vocabulary of 256"];
    check_train(&model, &file("beyond.bin", &tokens), &small, 2, &words);
    check_train(&model, &file("cut.safetensors", b"12345"), &[], 2, &["cut.safetensors"]);
    let words = file("words.txt", &b"shardc ".repeat(100));
    let with_words = ["--tokenizer", text(&words), "--batch", "1", "--seq", "16"];
    check_train(&model, &words, &with_words, 2, &["words.txt", "tokenizer.json of the model"]);
    let foreign = br#"{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"shardc": 300}, "unk_token": "shardc"}}"#;
    let foreign = file("foreign.json", foreign);
    let by_foreign = [&["--tokenizer", text(&foreign)], &small[..]].concat();
    let said = ["token 300", "foreign.json is of a larger vocabulary", "knows more than 256"];
    check_train(&model, &words, &by_foreign, 2, &said);
    let batches = model.join("batches.safetensors");
    check_train(&model, &batches, &["--batch", "8"], 2, &["--batch 8", "4 x 32"]);
    let many = ["train", text(&model), "--data", text(&batches), "--steps", "11"];
    check(&many, 2, &["--steps 11", "10 steps"]);
}

#[test]
fn a_run_is_recorded_and_saved() {
    let (dir, model) = (tempfile::tempdir().unwrap(), fixture("gpt2"));
    let (metrics, saved) = (dir.path().join("m.jsonl"), dir.path().join("saved"));
    let batches = model.join("batches.safetensors");
    let more = ["--cluster", "cpu:2", "--metrics", text(&metrics), "--save", text(&saved)];
    check_train(&model, &batches, &more, 0, &["1 of 1 step", "measured", "predicted", "saved to"]);
    let line: serde_json::Value = serde_json::from_str(fs::read_to_string(&metrics).unwrap().trim()).unwrap();
    for key in ["step", "loss", "grad_norm", "step_s", "tokens_per_s", "peak_device_bytes", "predicted_step_s"] {
        assert!(line[key].is_number(), "{key} in {line}");
    }
    // What was saved is a model: it trains on.
    check_train(&saved, &batches, &[], 0, &["1 of 1 step"]);
    // A save that cannot be made leaves the previous one.
    let before = fs::read(saved.join("model.safetensors")).unwrap();
    check_train(&model, &batches, &["--save", "/dev/null/saved"], 2, &["/dev/null/saved"]);
    assert_eq!(fs::read(saved.join("model.safetensors")).unwrap(), before);
}

/// The disk takes no more in the middle of a save: the previous one survives, whole.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_previous_save() {
    let (dir, model) = (tempfile::tempdir().unwrap(), fixture("gpt2"));
    let saved = dir.path().join("saved");
    let batches = model.join("batches.safetensors");
    check_train(&model, &batches, &["--save", text(&saved)], 0, &["saved to"]);
    let files = || {
        let mut files: Vec<_> = fs::read_dir(&saved).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect::<Vec<_>>()
    };
    let before = files();
    // A limit on the size of a file, which the weights exceed and nothing else does. With the signal
    // ignored, a write beyond it is an error.
    let script = "trap '' XFSZ; ulimit -f 200; exec \"$@\"";
    let shardc = env!("CARGO_BIN_EXE_shardc");
    let output = Command::new("sh")
        .args(["-c", script, "sh", shardc, "train", text(&model), "--data", text(&batches), "--steps", "2"])
        .args(["--precision", "fp32", "--save", text(&saved)])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("model.safetensors") && said.contains("space on the disk"), "{said}");
    assert!(files() == before, "the previous save is not what it was");
    // A save that has room replaces it.
    check_train(&model, &batches, &["--save", text(&saved), "--lr", "0.5"], 0, &["saved to"]);
    assert!(files() != before && files().len() == before.len());
}

/// Ctrl-C in a long run: it ends at the step, says what it did and saves.
#[cfg(target_os = "linux")]
#[test]
fn ctrl_c_ends_at_the_step() {
    use std::io::{BufRead, BufReader, Read};
    let (dir, model) = (tempfile::tempdir().unwrap(), fixture("llama"));
    let (data, saved, metrics) = (dir.path().join("t.txt"), dir.path().join("saved"), dir.path().join("m.jsonl"));
    fs::write(&data, "shardc ".repeat(1000)).unwrap();
    // What runs the tests may be in the background of a shell, which ignores Ctrl-C, and so would this.
    let mut run = Command::new("env")
        .args(["--default-signal=INT", env!("CARGO_BIN_EXE_shardc")])
        .args(["train", text(&model), "--cluster", "cpu:2", "--data", text(&data), "--steps", "1000000"])
        .args(["--batch", "2", "--seq", "16", "--save", text(&saved), "--metrics", text(&metrics)])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(run.stderr.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap().contains("  grad norm ")), "no step was made");
    let kill = Command::new("sh").args(["-c", &format!("kill -INT {}", run.id())]).status().unwrap();
    assert!(kill.success());
    let said: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(said.iter().any(|line| line.contains("stopping at the end of this step")), "{said:?}");
    let mut summary = String::new();
    run.stdout.take().unwrap().read_to_string(&mut summary).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(0), "{summary}{said:?}");
    let steps = fs::read_to_string(&metrics).unwrap().lines().count();
    assert!(summary.contains(&format!("{steps} of 1000000 steps, stopped by the user")), "{summary}");
    assert!(summary.contains("loss") && summary.contains("saved to"), "{summary}");
    assert!(saved.join("model.safetensors").is_file());
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run() {
    let (dir, model) = (tempfile::tempdir().unwrap(), fixture("llama"));
    let (batches, saved) = (model.join("batches.safetensors"), dir.path().join("saved"));
    let args = ["train", text(&model), "--data", text(&batches), "--steps", "10", "--lr", "1e30"];
    let words = ["step ", "the first tensor that is not finite: rank 0", "section `"];
    check(&args, 1, &words);
    // The parameters are those of the step before.
    for ranks in ["cpu:1", "cpu:2"] {
        let saves = [&args[..], &["--cluster", ranks, "--save", text(&saved)]].concat();
        check(&saves, 1, &[&words[..], &["saved to"]].concat());
        assert!(saved.join("model.safetensors").is_file());
        // A model that was there before stays.
        check(&saves, 1, &["saved.diverged"]);
        fs::remove_dir_all(&saved).unwrap();
    }
}

#[test]
fn clusters_that_are_not_here() {
    let model = fixture("llama");
    let batches = model.join("batches.safetensors");
    check_train(&model, &batches, &["--cluster", "h100:4"], 2, &["h100:4", "cpu:N"]);
    // No machine has so many GPUs, and many have none.
    check_train(&model, &batches, &["--cluster", "cuda:4096", "--pin", "tp=1,dp=4"], 2, &["dp=4,tp=1", "4096"]);
    check(&["check", "--cluster", "cuda:4096"], 1, &["✗", "cuda:4096 needs"]);
    if shardc(&["check", "--cluster", "cuda:4"]).status.success() {
        return;
    }
    let text = check_train(&model, &batches, &["--cluster", "cuda:4"], 1, &["shardc check"]);
    assert!(text.contains("driver") || text.contains("GPUs are needed") || text.contains("missing"), "{text}");
}

/// A plan that keeps its optimizer on the host is planned, written, explained and not trained.
#[test]
fn what_lies_on_the_host_is_planned_and_not_trained() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plan.json");
    let plan = ["plan", "llama-tiny", "--cluster", "h100:2", "--batch", "4", "--seq", "32", "-o", text(&file)];
    let refused = "cannot execute offloading to the host or its disk (offload) yet";
    let pinned: Vec<&str> = plan.into_iter().chain(["--pin", "offload=optimizer:2+activations"]).collect();
    check(&pinned, 0, &["offload=optimizer:2+activations", refused, "--pin offload=none"]);
    check(&["explain", text(&file)], 0, &["away from the device", "optimizer state", "activations, per microbatch"]);
    check(&["train", text(&file), "--data", text(&file), "--steps", "1"], 2, &[refused]);
    let unlowered =
        "no program does offloading to the host or its disk (offload) yet: programs have everything on the device";
    check(&["simulate", text(&file)], 0, &["predicted step", "which is not simulated", unlowered]);
    check(&["simulate", text(&file), "--json"], 0, &["\"not_as_planned\"", unlowered]);
    check(&["explain", text(&file)], 0, &[unlowered]);
    check(&["verify", text(&file)], 0, &["– memory", unlowered, "on a small model, without offloading"]);
    let why = "lies in the host's memory while nothing reads it: offload=optimizer:2+activations is pinned";
    check(&["explain", text(&file), "blocks.0.attention.query.weight.m"], 0, &[why]);
    let timeline = dir.path().join("timeline.json");
    check(&["explain", text(&file), "--timeline", text(&timeline)], 0, &["wrote"]);
    assert!(std::fs::read_to_string(&timeline).unwrap().contains(unlowered));
    let edited = dir.path().join("plan.txt");
    check(&["explain", text(&file), "--text", text(&edited)], 0, &["wrote"]);
    check(&["diff", text(&file), text(&edited)], 0, &[]);
    check(&["verify", text(&edited)], 0, &["– memory", unlowered]);
    let whole = std::fs::read_to_string(&edited).unwrap();
    for (from, to) in [(" in host = parameter", " = parameter"), ("\"step\":", "\"step\":1")] {
        std::fs::write(&edited, whole.replacen(from, to, 1)).unwrap();
        check(&["explain", text(&edited)], 2, &[unlowered, "so nothing tells what the edited plan takes"]);
    }
    let staged = "pp=2,schedule=1f1b,microbatch=1,recompute=none,stage_offload=activations:1/optimizer";
    let pinned: Vec<&str> = plan.into_iter().chain(["--pin", staged]).collect();
    check(&pinned, 0, &["stage_offload=activations:1/optimizer", refused, "--pin offload=none"]);
    let said = check(&["explain", text(&file)], 0, &["stage 0  host", "activations, per microbatch", "stage 1  host"]);
    // What stages take by their programs is more than there may be: whose it is stands before it.
    let [note, stages] = ["; stages, collectives", "stage 0 on"].map(|words| said.find(words).unwrap());
    assert!(note < stages, "{said}");
    check(&["train", text(&file), "--data", text(&file), "--steps", "1"], 2, &[refused]);
    check(&["verify", text(&file)], 0, &["– memory", unlowered, "on a small model, without offloading"]);
    let pinned: Vec<&str> = plan.into_iter().chain(["--pin", "offload=optimizer:99"]).collect();
    check(&pinned, 2, &["blocks; leave the number out"]);
    let sizes = ["--ranks", "8", "--device-memory", "24GiB", "--host-memory", "160GiB"];
    let asked: Vec<&str> = ["estimate", "llama-8b"].into_iter().chain(sizes).collect();
    check(
        &asked,
        0,
        &["in 24.00 GiB of each device, with 160.00 GiB of their host", "offload=optimizer: the host holds"],
    );
}

#[test]
fn estimates_and_checks() {
    check(&["estimate", "llama-8b", "--ranks", "8"], 0, &["8,030,261,248", "bf16", "adamw"]);
    check(&["estimate", "llama-8b", "--json"], 0, &["\"zero\": 3"]);
    let fits = ["bf16: trains with ZeRO 2 or more", "left for activations", "as cpu:8 in 64.00 GiB of one host"];
    let bounded = ["estimate", "llama-8b", "--device-memory", "40GiB", "--host-memory", "64GiB"];
    check(&bounded, 0, &fits);
    check(
        &["estimate", "llama-8b", "--device-memory", "8GiB"],
        0,
        &["bf16: does not fit; with ZeRO 3 it takes 15 data ranks or more, and the activations"],
    );
    let words = ["as cpu:8 in 32.00 GiB of one host", "does not fit; with ZeRO 3 it needs"];
    check(&["estimate", "llama-8b", "--host-memory", "32GiB"], 0, &words);
    check(&["estimate", "llama-8b", "--device-memory", "8GiB", "--json"], 0, &["\"verdict\"", "\"per_rank\""]);
    check(&["estimate", "llama-8b", "--device-memory", "8GX"], 2, &["--device-memory 8GX"]);
    check(&["check"], 0, &["✓ CPU"]);
    check(&["check", "--json"], 0, &["\"name\": \"CPU\""]);
}

/// The last step is measured: the table names operations and kinds, the timeline has a span per instruction.
#[test]
fn a_step_is_profiled() {
    let (dir, data) = (tempfile::tempdir().unwrap(), fixture("llama").join("batches.safetensors"));
    let timeline = dir.path().join("timeline.json");
    let more = ["--profile", "--timeline", text(&timeline), "--cluster", "cpu:2"];
    let words = ["matrix products", "exposed communication", "idle", "adamw of "];
    check_train(&fixture("llama"), &data, &more, 0, &words);
    let events: serde_json::Value = serde_json::from_slice(&fs::read(&timeline).unwrap()).unwrap();
    let events = events["traceEvents"].as_array().unwrap();
    let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    for rank in 0..2 {
        let is_update = |name: &serde_json::Value| name.as_str().unwrap().starts_with("adamw");
        let adamw = spans.iter().filter(|span| span["pid"] == rank && is_update(&span["name"]));
        assert!(adamw.count() > 0, "{} spans", spans.len());
    }
    assert!(spans.iter().all(|span| span["dur"].as_f64().unwrap() >= 0.0));
    // A place that cannot be written is told before the run.
    let nowhere = dir.path().join("missing/timeline.json");
    let said = check_train(&fixture("llama"), &data, &["--timeline", text(&nowhere)], 2, &["missing/timeline.json"]);
    assert!(!said.contains("peak memory") && said.contains("check the path and its permissions"), "{said}");
    // A disk that is not full has no part in it.
    assert!(!said.contains("disk"), "{said}");
}

#[test]
fn steps_are_simulated() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_in(dir.path(), "plan.json", "dp=4,zero=2,microbatch=1");
    let step = |more: &[&str]| {
        let output = shardc(&[&["simulate", text(&plan), "--json"], more].concat());
        let simulated: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (simulated["step"].as_f64().unwrap(), simulated["ranks"].as_array().unwrap().len())
    };
    let (even, slow) = (step(&[]), step(&["--straggler", "2=1.5"]));
    assert!(even.1 == 1 && slow.1 == 2 && slow.0 > 1.2 * even.0, "{even:?} {slow:?}");
    check(&["simulate", text(&plan), "--straggler", "9=2"], 2, &["rank 9", "0 to 3"]);
    check(&["simulate", text(&plan), "--straggler", "1"], 2, &["--straggler 3=1.5"]);
    check(&["simulate", text(&plan), "--contention", "0.5"], 2, &["contention is 0.5"]);
    check(&["simulate", text(&plan), "--cluster", "cpu:2"], 2, &["4 ranks", "2 devices"]);
}

#[test]
fn timelines_and_graphs_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_in(dir.path(), "plan.json", "dp=2,tp=2,microbatch=1");
    let (timeline, dot) = (dir.path().join("t.json"), dir.path().join("g.dot"));
    check(&["explain", text(&plan), "--timeline", text(&timeline), "--dot", text(&dot)], 0, &["wrote"]);
    let trace: serde_json::Value = serde_json::from_slice(&fs::read(&timeline).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let spans = || events.iter().filter(|event| event["ph"] == "X");
    // No two instructions of a stream overlap, and the step ends with the last of them.
    for thread in 0..6 {
        let mut ends = 0.0;
        let mut own: Vec<_> = spans().filter(|span| span["tid"] == thread).collect();
        own.sort_by(|a, b| a["ts"].as_f64().unwrap().total_cmp(&b["ts"].as_f64().unwrap()));
        for span in own {
            let (start, length) = (span["ts"].as_f64().unwrap(), span["dur"].as_f64().unwrap());
            assert!(start >= ends - 0.002, "{span} starts before {ends}");
            ends = start + length;
        }
    }
    assert!(spans().any(|span| span["name"] == "all_reduce tp"));
    assert!(events.iter().any(|event| event["ph"] == "C" && event["args"]["activation"].as_u64() > Some(0)));
    let graph = fs::read_to_string(&dot).unwrap();
    assert!(
        graph.starts_with("digraph plan {") && graph.contains("\"blocks.*.mlp.gate\" -> \"blocks.*.mlp\""),
        "{graph}"
    );
}

#[test]
fn a_plan_can_be_edited_as_text() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_in(dir.path(), "plan.json", "dp=2,tp=2,zero=1,microbatch=2");
    let edited = dir.path().join("plan.ir");
    check(&["explain", text(&plan), "--text", text(&edited)], 0, &["wrote"]);
    check(&["diff", text(&plan), text(&edited)], 0, &[]);
    let whole = fs::read_to_string(&edited).unwrap();
    let gate = whole.lines().position(|line| line.contains("matmul") && line.contains("mlp.gate\" by")).unwrap();
    let old = whole.lines().nth(gate).unwrap();
    let check_edit = |from: &str, to: &str, code: i32, words: &[&str]| {
        let changed = whole.replacen(from, to, 1);
        assert_ne!(changed, whole, "nothing to edit: {from}");
        fs::write(&edited, changed).unwrap();
        check(&["explain", text(&edited)], code, words);
    };
    // A legal edit: the product is made whole on every tensor rank, and its prediction is its own.
    let whole_gate = old.replace("688@tp]", "688]").replace(" n=tp", "");
    check_edit(old, &whole_gate, 0, &["simulated step", "+0.0%"]);
    // Illegal ones are refused with their place.
    let place = format!("line {}", gate + 1);
    check_edit(old, &old.replace(" n=tp", ""), 2, &[&place, "its node's strategy makes it"]);
    check_edit(old, &old.replace("n=tp", "n=dp"), 2, &[&place]);
    check_edit(old, &old.replace("n=tp", "q=tp"), 2, &[&place, "q"]);
    check_edit(
        "mlp.gate.weight\" at",
        "mlp.other.weight\" at",
        2,
        &["the graph itself was changed: line ", "mlp.other.weight"],
    );
    check_edit("; request {", "; request [", 2, &["line 2"]);
    check_edit("time mb=2,tp=2", "time mb=2,tp=3", 2, &["line"]);
}

#[test]
fn the_largest_that_fits() {
    let args = ["plan", "llama-tiny", "--cluster", "cpu:2", "--seq", "32", "--batch", "2", "--device-memory", "30MiB"];
    let size = |what: &str| {
        let output = shardc(&[&args[..], &["--maximize", what, "--json"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(found["maximize"]["beyond"].as_str().unwrap().contains("no plan fits in 30.00 MiB"));
        found["maximize"]["size"].as_u64().unwrap()
    };
    assert!(size("layers") >= 2);
    // One sequence more does not fit in one microbatch.
    let batch = size("batch");
    let pins = ["dp=1", "dp=2"].map(|dp| format!("{dp},microbatch={}", (batch + 1) / if dp == "dp=1" { 1 } else { 2 }));
    for pin in pins.iter().filter(|pin| pin.starts_with("dp=1") || batch % 2 == 1) {
        let more = (batch + 1).to_string();
        let args = ["plan", "llama-tiny", "--cluster", "cpu:2", "--seq", "32", "--device-memory", "30MiB"];
        check(&[&args[..], &["--batch", &more, "--pin", pin]].concat(), 3, &["no plan fits"]);
    }
    check(
        &[&args[..], &["--maximize", "layers", "-o", "/dev/null"]].concat(),
        0,
        &["the largest that fits", "beyond it"],
    );
    // Multiples of all ranks fit where a batch in between, which no data ranks divide, does not.
    let args = ["plan", "llama-tiny", "--cluster", "cpu:5", "--seq", "128", "--device-memory", "60MiB"];
    let args = [&args[..], &["--maximize", "batch"]].concat();
    check(
        &[&args[..], &["--batch", "5"]].concat(),
        0,
        &["a batch of 90 in one microbatch", "beyond it, a batch of 95"],
    );
    check(&[&args[..], &["--batch", "5", "--pin", "microbatch=2"]].concat(), 0, &["a batch of 10 in one microbatch"]);
    // Ranks that only repeat what others do.
    let twelve = ["plan", "llama-tiny", "--cluster", "cpu:5", "--seq", "128", "--batch", "12"];
    check(&twelve, 0, &["4 of 5 ranks repeat the work of others"]);
    check(&[&args[..], &["--batch", "5", "--pin", "tp=3"]].concat(), 2, &["3 does not divide the cluster's 5 ranks"]);
}

/// What programs take decides what fits, not the estimate, which is 27 MiB of the first of these plans.
#[test]
fn estimates_alone_refuse_nothing() {
    let tiny = ["plan", "llama-tiny", "--batch", "8", "--seq", "128", "--cluster", "cpu:4"];
    let choice = &["plan     dp=4,tp=1,zero=1,microbatch=2,recompute=none"];
    check(&[&tiny[..], &["--device-memory", "24MiB"]].concat(), 0, choice);
    let large = ["plan", "llama-8b", "--batch", "8", "--seq", "128", "--cluster", "h200:8", "--precision", "fp8"];
    let pins = ["--pin", "dp=8,zero=2,microbatch=1", "--device-memory", "24GiB"];
    check(&[&large[..], &pins[..]].concat(), 0, &["zero=2,microbatch=1,recompute=none"]);
    // Sizes without small factors: few chunks of the head, and no more microbatches than a program can list.
    let prime = ["plan", "llama-tiny", "--cluster", "h100:4"];
    check(&[&prime[..], &["--batch", "8", "--seq", "10007"]].concat(), 0, &["plan     dp=4"]);
    check(&[&prime[..], &["--batch", "10000019"]].concat(), 3, &["no plan fits"]);
    let pins = ["--batch", "10000000", "--pin", "microbatch=1"];
    check(&[&prime[..], &pins[..]].concat(), 2, &["at most 65536 microbatches"]);
    for (pins, expect) in [
        ("pp=2,microbatch=8", "pin `microbatch=8`: a pipeline takes at least 2 microbatches"),
        ("pp=4,virtual=3", "pin `pp=4,virtual=3`: the step cannot be cut into 12 chunks"),
        ("recompute=value:99999", "recompute=value:14"),
    ] {
        let code = if pins.starts_with("pp") { 2 } else { 0 };
        check(&[&tiny[..], &["--pin", pins]].concat(), code, &[expect]);
    }
}
