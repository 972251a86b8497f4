//! What a run writes: told before it where it cannot be, and what was trained is kept whatever becomes of the rest.
#![cfg(target_os = "linux")]

mod command;

use command::{check, text};
use std::fs;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/hf").join(name)
}

/// The arguments of a short run on a fixture.
fn short<'a>(model: &'a Path, batches: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", text(model), "--data", text(batches), "--steps", "2", "--precision", "fp32"], more].concat()
}

/// A run whose output goes where the shell says; its code and what it said.
fn through_shell(arguments: &[&str], to: &str) -> (Option<i32>, String) {
    let command = format!("\"$@\" {to}");
    let output = Command::new("sh")
        .args(["-c", &command, "sh", env!("CARGO_BIN_EXE_shardc")])
        .args(arguments)
        .output()
        .expect("a shell");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn what_cannot_be_written_is_told_before_the_run() {
    let model = fixture("gpt2");
    let batches = model.join("batches.safetensors");
    let output = check(&short(&model, &batches, &["--save", "/proc/self"]), 2, &["/proc/self"]);
    assert!(!output.contains("step "), "{output}");
    let dir = tempfile::tempdir().expect("a directory");
    let one = dir.path().join("one");
    let both = short(&model, &batches, &["--metrics", text(&one), "--timeline", text(&one)]);
    check(&both, 2, &["--timeline", "--metrics writes there"]);
    check(&short(&model, &batches, &["--lr", "1e39"]), 2, &["--lr is 1e39", "fp32"]);
    assert!(!one.exists());
    // What is saved, and what is read, is a directory of files.
    let saved = dir.path().join("saved");
    let inside = saved.join("model.safetensors");
    let into = short(&model, &batches, &["--save", text(&saved), "--timeline", text(&inside)]);
    check(&into, 2, &["--timeline", "--save writes the model there"]);
    fs::create_dir(&inside).expect("a directory");
    let output = check(&short(&model, &batches, &["--save", text(&saved)]), 2, &["model.safetensors", "directory"]);
    assert!(!output.contains("step "), "{output}");
    let own = dir.path().join("own");
    fs::create_dir(&own).expect("a directory");
    fs::copy(model.join("config.json"), own.join("config.json")).expect("a copy");
    let config = own.join("config.json");
    let plan = ["plan", text(&own), "--cluster", "cpu:2", "--batch", "2", "--seq", "8", "-o", text(&config)];
    check(&plan, 2, &["--output", "this run reads"]);
}

#[test]
fn a_run_that_does_not_start_leaves_earlier_files() {
    let (model, dir) = (fixture("gpt2"), tempfile::tempdir().expect("a directory"));
    let (broken, metrics) = (dir.path().join("model"), dir.path().join("m.jsonl"));
    fs::create_dir(&broken).expect("a directory");
    fs::copy(model.join("config.json"), broken.join("config.json")).expect("a copy");
    fs::write(broken.join("model.safetensors"), "no weights").expect("a file");
    fs::write(&metrics, "of an earlier run\n").expect("a file");
    let batches = model.join("batches.safetensors");
    check(&short(&broken, &batches, &["--metrics", text(&metrics)]), 2, &["model.safetensors"]);
    assert_eq!(fs::read_to_string(&metrics).expect("a file"), "of an earlier run\n");
}

#[test]
fn what_was_trained_is_kept_where_nothing_else_can_be_written() {
    let (model, dir) = (fixture("gpt2"), tempfile::tempdir().expect("a directory"));
    let batches = model.join("batches.safetensors");
    for (name, more, to) in [("stdout", &[][..], ">/dev/full"), ("metrics", &["--metrics", "/dev/full"], "")] {
        let saved = dir.path().join(name);
        let (code, said) = through_shell(&short(&model, &batches, &[&["--save", text(&saved)], more].concat()), to);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(if name == "stdout" { "stdout" } else { "/dev/full" }), "{said}");
        check(&short(&saved, &batches, &[]), 0, &["2 of 2 steps"]);
    }
}

/// Where files may not become large (`ulimit -f`), what does not fit is said, and what was there stays.
#[test]
fn a_file_that_may_not_become_large_is_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let plan = dir.path().join("plan.json");
    fs::write(&plan, "before").expect("a file");
    let output = Command::new("sh")
        .args(["-c", "ulimit -f 1; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_shardc")])
        .args(["plan", "llama-tiny", "--cluster", "cpu:1", "--batch", "4", "-o", text(&plan)])
        .output()
        .expect("a shell");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(text(&plan)) && said.contains("too large"), "{said}");
    assert_eq!(fs::read_to_string(&plan).expect("what was there"), "before");
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 1, "a part is left");
}

/// A pipe is opened once: who reads it sees all steps, and then its end.
#[test]
fn metrics_go_through_a_pipe() {
    let (model, dir) = (fixture("gpt2"), tempfile::tempdir().expect("a directory"));
    let (batches, pipe) = (model.join("batches.safetensors"), dir.path().join("pipe"));
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let reader = Command::new("cat").arg(&pipe).stdout(Stdio::piped()).spawn().expect("cat");
    check(&short(&model, &batches, &["--metrics", text(&pipe)]), 0, &["2 of 2 steps"]);
    let read = reader.wait_with_output().expect("what was read").stdout;
    assert_eq!(read.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count(), 2);
}

/// Schedulers end a run by SIGTERM, `timeout` by two at once: it ends at the step and saves, as by Ctrl-C, whatever has
/// become of the model meanwhile. A signal that it was started to ignore does not end it.
#[test]
fn a_run_that_is_asked_to_end_saves() {
    let dir = tempfile::tempdir().expect("a directory");
    let (data, saved, model) = (dir.path().join("t.txt"), dir.path().join("saved"), dir.path().join("model"));
    fs::create_dir(&model).expect("a directory");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture("llama").join(file), model.join(file)).expect("a copy");
    }
    fs::write(&data, "shardc ".repeat(1000)).expect("a file");
    let mut run = Command::new("sh")
        .args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_shardc")])
        .args(["train", text(&model), "--data", text(&data), "--steps", "1000000", "--batch", "2", "--seq", "16"])
        .args(["--save", text(&saved)])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a run");
    let mut lines = BufReader::new(run.stderr.take().expect("its messages")).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("  grad norm ")), "no step was made");
    let signal = |command: String| Command::new("sh").args(["-c", &command]).status().expect("kill").success();
    fs::remove_dir_all(&model).expect("a directory");
    assert!(signal(format!("kill -HUP {}", run.id())));
    sleep(Duration::from_millis(200));
    assert_eq!(run.try_wait().expect("a run"), None, "it was started to ignore SIGHUP");
    assert!(signal(format!("kill -TERM {0}; kill -TERM {0}", run.id())));
    lines.for_each(drop);
    assert!(run.wait().expect("an end").success());
    assert!(saved.join("model.safetensors").exists());
}

/// A token of no vocabulary behind those that are looked at before the first step: what was trained until then is kept.
#[test]
fn what_was_trained_before_the_data_went_wrong_is_kept() {
    let (model, dir) = (fixture("llama"), tempfile::tempdir().expect("a directory"));
    let (data, saved) = (dir.path().join("t.bin"), dir.path().join("saved"));
    let mut file = fs::File::create(&data).expect("a file");
    file.set_len(2 << 26).expect("a length");
    file.seek(SeekFrom::End(0)).expect("its end");
    file.write_all(&60000u16.to_le_bytes().repeat(1 << 23)).expect("tokens");
    let run = ["train", text(&model), "--data", text(&data), "--steps", "1000", "--batch", "2", "--seq", "16"];
    let said = check(&[&run[..], &["--save", text(&saved)]].concat(), 2, &["token 60000", "ended since the data"]);
    assert!(said.contains(" of 1000 steps") && !said.contains("\n0 of 1000"), "{said}");
    assert!(saved.join("model.safetensors").exists());
}

/// A rank that waits for others is not in a step that could end.
#[test]
fn a_rank_that_waits_ends_when_it_is_asked_to() {
    let (model, dir) = (fixture("llama"), tempfile::tempdir().expect("a directory"));
    let (data, said) = (dir.path().join("t.txt"), dir.path().join("said"));
    fs::write(&data, "shardc ".repeat(1000)).expect("a file");
    let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|free| free.local_addr()).expect("a free port");
    let mut rank = Command::new(env!("CARGO_BIN_EXE_shardc"))
        .args(["train", text(&model), "--cluster", "cuda:2", "--data", text(&data), "--steps", "1", "--batch", "2"])
        .args(["--seq", "16"])
        .envs([("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
        .env("MASTER_PORT", free.port().to_string())
        .stderr(fs::File::create(&said).expect("a file"))
        .spawn()
        .expect("a rank");
    let until = |is_so: &mut dyn FnMut() -> bool| {
        let since = Instant::now();
        while !is_so() && since.elapsed() < Duration::from_secs(60) {
            sleep(Duration::from_millis(20));
        }
    };
    until(&mut || TcpStream::connect(free).is_ok());
    let before = rank.try_wait().expect("a rank");
    assert!(Command::new("kill").args(["-TERM", &rank.id().to_string()]).status().expect("kill").success());
    let mut after = None;
    until(&mut || {
        after = rank.try_wait().expect("a rank");
        after.is_some()
    });
    let _ = rank.kill();
    let said = fs::read_to_string(&said).expect("what it said");
    assert!(before.is_none() && after.is_some_and(|status| !status.success()), "{before:?}, {after:?}: {said}");
}
