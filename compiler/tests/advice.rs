//! What reports say beside the plan: advice that is true and not yet met, columns that line up, and what is read from
//! where.

mod command;

use command::{check, shardc, text};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/hf/llama").join(name)
}

/// A batch that is a multiple already is not asked for.
#[test]
fn idle_ranks() {
    let idle = |batch: &str| {
        let args = ["plan", "llama-tiny", "--cluster", "h100:8", "--seq", "64", "--pin", "tp=8", "--batch", batch];
        check(&args, 0, &["7 of 8 ranks repeat the work of others", "one rank would be at least as fast"])
    };
    assert!(!idle("48").contains("multiple of 8"));
    assert!(idle("12").contains("use a batch that is a multiple of 8 rather than 12"));
}

/// Ranks that divide next to no product are not idle where they divide the update of large tables.
#[test]
fn ranks_that_update_are_not_idle() {
    let said = check(&["plan", "two-tower", "--cluster", "h100:8", "--batch", "64"], 0, &["tp=8", "the optimizer"]);
    assert!(!said.contains("repeat the work"), "{said}");
}

/// What a wider search would try depends on what is open already, and on what runs.
#[test]
fn wider_searches() {
    let plan = |cluster: &str, more: &[&str], words: &[&str]| {
        let args =
            ["plan", "llama-160m", "--cluster", cluster, "--batch", "8", "--seq", "256", "--device-memory", "100MiB"];
        check(&[&args[..], more].concat(), 3, words)
    };
    let said = plan("cpu:2", &[], &["no plan fits"]);
    assert!(!said.contains("--search all"), "{said}");
    plan("h100:2", &[], &["whether offload would fit; `train` does not run offload yet"]);
    plan("h100:2", &["--pin", "pp=2"], &["whether offload would fit; `train` does not run offload yet"]);
    let fits = ["plan", "llama-160m", "--cluster", "h100:2", "--batch", "8", "--seq", "256", "--pin", "pp=2"];
    assert!(!check(&fits, 0, &["pp=2"]).contains("refused"));
}

/// GPUs of several nodes are searched for pipelines as well, those of one node only where that is asked for, or much of the
/// step is communication.
#[test]
fn pipelines_over_nodes() {
    let plan_of = |cluster: &str, sizes: [&str; 2], more: &[&str], words: &[&str]| {
        let args = ["plan", "llama-160m", "--cluster", cluster, "--batch", sizes[0], "--seq", sizes[1]];
        check(&[&args[..], more].concat(), 0, words)
    };
    let plan = |cluster: &str, more: &[&str], words: &[&str]| plan_of(cluster, ["6", "256"], more, words);
    plan("h100:1x3", &[], &["pp=3", "the least that is possible in stages", "no plan of one stage takes less than"]);
    let one = "the least that is possible in one stage";
    let large = plan_of("h100:3", ["48", "2048"], &[], &[one]);
    for said in [plan("h100:1x3", &["--pin", "pp=1"], &[one]), large] {
        assert!(!said.contains("pp=3") && !said.contains("no pipeline takes less"), "{said}");
    }
    plan("h100:3", &[], &["pp=3", "no plan of one stage takes less than"]);
    plan_of("l40s:4", ["8", "1024"], &[], &["pp=4", "no plan of one stage takes less than"]);
    plan("h100:3", &["--search", "all"], &["of one stage", "pipeline"]);
}

/// An axis that is pinned, and by which next to nothing is divided, is named.
#[test]
fn axes_that_divide_little() {
    let args = ["plan", "llama-160m", "--cluster", "h100:8", "--batch", "8", "--seq", "128", "--pin", "ring=4"];
    check(&args, 0, &["6 of 8 ranks repeat the work of others", "of the work is divided by ring; 2 ranks would be"]);
}

/// Twelve heads divide over four ranks and not over eight, of which all do the same where they may divide nothing else.
#[test]
fn attention_that_several_ranks_repeat() {
    let plan = |ulysses: &str| {
        let pins = format!("tp=1,{ulysses}");
        let args = ["plan", "llama-160m", "--cluster", "h100:8", "--batch", "2", "--seq", "8192", "--pin", &pins];
        check(&args, 0, &[])
    };
    let said = plan("ulysses=8");
    assert!(said.contains("is the same on 8 ranks") && said.contains("--search all"), "{said}");
    assert!(!plan("ulysses=4").contains("repeats  "));
}

/// Devices whose number divides neither the batch nor the model are slower than fewer of them, and that is said.
#[test]
fn fewer_devices() {
    let plan = |batch: &str, words: &[&str]| {
        let args = ["plan", "llama-1b", "--cluster", "h100:3", "--seq", "2048", "--batch", batch, "--pin", "pp=1"];
        check(&args, 0, words)
    };
    let said = plan("8", &["2 of these 3 devices would be faster", "3 do not divide the batch of 8"]);
    let seconds = check(&["plan", "llama-1b", "--cluster", "h100:2", "--seq", "2048", "--batch", "8"], 0, &["step"]);
    let step = |text: &str| {
        text.lines().find_map(|line| line.strip_prefix("step     ")?.split(',').next().map(str::to_string))
    };
    let (all, two) = (step(&said).unwrap(), step(&seconds).unwrap());
    assert!(said.contains(&format!("{two} a step rather than {all}")), "{said}");
    assert!(!plan("9", &[]).contains("would be faster"));
}

/// Where the logits are what does not fit, they are made in smaller chunks.
#[test]
fn smaller_chunks_of_the_loss_make_room() {
    let plan = |pin: &str, code: i32| {
        let args =
            ["plan", "llama-1b", "--cluster", "h100:1", "--batch", "8", "--seq", "8192", "--device-memory", "27GiB"];
        check(&[&args[..], &["--pin", pin]].concat(), code, &[])
    };
    plan("loss_chunks=1", 3);
    let said = plan("microbatch=1", 0);
    assert!(said.lines().any(|line| line.starts_with("plan ") && line.contains("loss_chunks=")), "{said}");
}

/// What is too short for the number of ranks is stored whole, and said; what these do not divide evenly is not.
#[test]
fn parameters_that_nothing_divides() {
    let plan = |cluster: &str, batch: &str, pin: &str, more: &[&str], code: i32, words: &[&str]| {
        let args = ["plan", "llama-tiny", "--cluster", cluster, "--seq", "64", "--batch", batch, "--pin", pin];
        check(&[&args, more].concat(), code, words)
    };
    let (whole, other) = ("of parameters have no dimension that is long enough for 600 ranks", "use fewer ranks, or a");
    plan("h100:600", "600", "dp=600,zero=3", &[], 0, &["whole    ", whole, "pin dp=2,fsdp=300, or use fewer", other]);
    plan("h100:600", "600", "dp=600,zero=3", &["--device-memory", "2MiB"], 3, &["no plan fits", whole, other]);
    for (cluster, batch, pin) in [
        ("h100:600", "600", "dp=600,zero=0"),
        ("h100:600", "600", "dp=2,fsdp=300,zero=3"),
        ("h100:3", "12", "dp=3,zero=3"),
        ("h100:6", "12", "dp=6,zero=1"),
        ("h100:6", "12", "dp=3,tp=2,zero=2"),
    ] {
        let said = plan(cluster, batch, pin, &[], 0, &[]);
        assert!(!said.contains("whole    "), "{cluster} {pin}: {said}");
    }
    check(&["estimate", "llama-8b", "--ranks", "3"], 0, &["counted as if 3 ranks divided every parameter evenly"]);
}

/// A model that 24 GPUs hold in parts alone trains on them, though they divide few of its dimensions.
#[test]
fn parts_on_ranks_that_are_no_power_of_two() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.json");
    let args = ["plan", "llama-70b", "--cluster", "h100:8x3", "--batch", "48", "--seq", "4096", "-o", text(&path)];
    let said = check(&args, 0, &["zero=3", "optimizer state"]);
    assert!(!said.contains("whole    "), "{said}");
    check(&["verify", text(&path), "--static-only"], 0, &["compute the graph of one device"]);
}

/// With one microbatch, the lowest stage that divides gradients is the first.
#[test]
fn one_microbatch_needs_no_whole_gradients() {
    let args = ["estimate", "llama-8b", "--ranks", "8", "--device-memory", "40GiB"];
    let words = ["bf16: trains with ZeRO 2 or more (or with ZeRO 1 in one microbatch)", "ZeRO 1 divides gradients as"];
    check(&args, 0, &words);
}

/// What is said to train has a plan: the copies of parameters go as the gradients come, and in 8-bit floats both
/// arrangements live through several microbatches.
#[test]
fn verdicts_agree_with_plans() {
    let estimate = |model: &str, ranks: &str, words: &[&str]| {
        check(&["estimate", model, "--ranks", ranks, "--device-memory", "24GiB"], 0, words)
    };
    let plan = |args: &[&str], code: i32, words: &[&str]| {
        check(&[&["plan"], args, &["--device-memory", "24GiB"]].concat(), code, words)
    };
    estimate("gpt2-1.5b", "1", &["bf16: trains with ZeRO 0 or more in one microbatch"]);
    plan(&["gpt2-1.5b", "--cluster", "h100:1", "--batch", "1", "--seq", "1024"], 0, &["of 24.00 GiB"]);
    estimate("llama-8b", "8", &["fp8: trains with ZeRO 3 (or with ZeRO 1 in one microbatch)"]);
    let fp8 = ["llama-8b", "--cluster", "h100:8", "--batch", "16", "--seq", "128", "--precision", "fp8"];
    plan(&[&fp8[..], &["--pin", "dp=8,zero=2,microbatch=1"]].concat(), 3, &["no plan fits in 24.00 GiB"]);
}

/// Axes of several letters move no column, nor do long labels.
#[test]
fn columns_line_up() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one.json"), dir.path().join("two.json"));
    let plan = |pin: &str, path: &Path| {
        let args = ["plan", "llama-tiny", "--cluster", "h100:4", "--batch", "8", "--seq", "64", "--pin", pin, "-o"];
        check(&[&args[..], &[text(path)]].concat(), 0, &[]);
    };
    plan("tp=2x2", &one);
    plan("tp=2,zero=1", &two);
    let said = check(&["explain", text(&one), "mlp.gate"], 0, &["tp: ", "tp_1: "]);
    // The second column starts behind the longest name of an axis.
    let rows: Vec<&str> = said.lines().filter(|line| line.starts_with("    tp")).collect();
    let starts_at = |row: &&str| row[..10].ends_with(": ") || row[..10].ends_with("   ");
    assert!(rows.len() > 2 && rows.iter().all(starts_at) && rows.iter().all(|row| &row[10..11] != " "), "{said}");

    let said = check(&["diff", text(&one), text(&two)], 0, &["kept for running collectives, and gaps"]);
    let arrows = said.lines().filter(|line| line.contains(" -> ") && !line.starts_with("    "));
    let labels: Vec<&str> = arrows.collect();
    let longest = labels.iter().map(|line| line.trim().split("  ").next().unwrap().len()).max().unwrap();
    for line in labels {
        let (label, values) = line[2..].split_at(longest);
        assert!(values.starts_with("  ") && !values[2..].starts_with(' '), "{label:?} {values:?} in {said}");
    }
}

/// An empty list of pins pins nothing: scripts give it so.
/// Where no pipeline of a mesh fits, its head is cut into smaller chunks, as where there are no stages.
#[test]
fn the_head_of_a_pipeline_is_cut_smaller_where_memory_is_short() {
    let plan = |pins: &str, code: i32, words: &[&str]| {
        let cluster = ["plan", "llama-8b", "--cluster", "h100:8x4", "--batch", "32", "--seq", "8192"];
        check(&[&cluster[..], &["--pin", pins]].concat(), code, words)
    };
    plan("pp=32,schedule=zbv,in_flight=64,delayed=64,loss_chunks=1", 3, &["no plan fits in"]);
    plan("pp=32,schedule=zbv,in_flight=64,delayed=64", 0, &["loss_chunks=2"]);
}

/// A host that has no room for what is pinned to lie there is short of memory, as devices are: it is said by how much,
/// and sizes that fit are looked for.
#[test]
fn hosts_that_are_too_small() {
    let plan = |more: &[&str], code: i32, words: &[&str]| {
        let request = ["plan", "llama-160m", "--cluster", "h100:1", "--batch", "4", "--seq", "512"];
        check(&[&request[..], more].concat(), code, words)
    };
    let pinned = ["--pin", "offload=optimizer", "--host-memory", "1GiB"];
    plan(&pinned, 3, &["in the 1.00 GiB that a host has for its ranks: pin `offload=optimizer` takes 2.0"]);
    let words = ["the largest that fits:", "`offload=optimizer` takes", "of the 1.00 GiB that a host has"];
    let asked = ["plan", "llama-160m", "--cluster", "h100:1", "--seq", "512", "--maximize", "layers"];
    let output = shardc(&[&asked[..], &pinned[..]].concat());
    let said = [output.stderr, output.stdout].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(output.status.code() == Some(0) && words.iter().all(|word| said.contains(word)), "{said}");
    let open = ["--search", "all", "--host-memory", "64MiB", "--device-memory", "1GiB"];
    plan(&open, 3, &["give each host more than 64.00 MiB (--host-memory)"]);
}

#[test]
fn empty_names_and_pins() {
    for name in ["", " "] {
        let said = check(&["plan", name], 2, &["the name of the model is empty", "shardc models"]);
        assert!(!said.contains("nearest"), "{said}");
    }
    let pin = |pins: &str, word: &str| check(&["plan", "llama-tiny", "--pin", pins], 2, &[word]);
    pin(",", "take the comma out");
    pin("dp=1,", "pin `dp=1,`");
}

/// A directory with nothing but config.json can be planned, and says what training it lacks; a family that is built in
/// is named.
#[test]
fn directories_without_weights() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    fs::copy(fixture("config.json"), &config).unwrap();
    let (model, data) = (text(dir.path()), fixture("batches.safetensors"));
    let words = ["model.safetensors.index.json, and neither is there", "beside config.json, or name a built-in model"];
    check(&["train", model, "--data", text(&data), "--steps", "1", "--precision", "fp32"], 2, &words);
    fs::write(&config, r#"{"model_type": "mixtral"}"#).unwrap();
    check(&["plan", model], 2, &["supported: gpt2, llama; built in, with random weights: `mixtral-8x7b`"]);
    fs::write(&config, r#"{"model_type": "bert"}"#).unwrap();
    assert!(!check(&["plan", model], 2, &["`bert`; supported: gpt2, llama"]).contains("built in"));
}

/// A plan is read from a file or a pipe; what never ends is not read, and nobody need read what goes to stderr.
#[cfg(target_os = "linux")]
#[test]
fn devices_pipes_and_closed_ends() {
    let words = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/documentation.txt");
    for more in
        [&["/dev/zero"][..], &["/dev/zero", "--tokenizer", text(&words)], &[text(&words), "--tokenizer", "/dev/zero"]]
    {
        let train =
            ["train", "llama-tiny", "--cluster", "cpu:1", "--batch", "2", "--seq", "16", "--steps", "1", "--data"];
        check(&[&train[..], more].concat(), 2, &["/dev/zero: not a regular file"]);
    }
    for verb in ["explain", "simulate", "verify"] {
        check(&[verb, "/dev/zero"], 2, &["/dev/zero: it is a device", "shardc plan -o FILE"]);
    }
    check(&["explain", text(&fixture(""))], 2, &["it is a directory", "a plan is a file"]);
    let run = |command: &str| {
        let shardc = env!("CARGO_BIN_EXE_shardc");
        let output = Command::new("sh").args(["-c", command, "sh", shardc]).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let plan = "\"$1\" plan llama-tiny --cluster cpu:2 --batch 4 --seq 32";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plan.json");
    let file = text(&file);
    let (code, said) = run(&format!("{plan} -o {file} >/dev/null && cat {file} | \"$1\" explain /dev/stdin"));
    assert!(code == Some(0) && said.contains("llama-tiny on cpu:2"), "{code:?} {said}");
    for more in ["--maximize batch --device-memory 40MiB", "-v"] {
        let (code, said) = run(&format!("{plan} {more} 2>/dev/full"));
        assert!(code == Some(0) && said.contains("llama-tiny on cpu:2"), "{code:?} {said}");
    }
    let (code, _) = run("\"$1\" plan nothing 2>/dev/full");
    assert_eq!(code, Some(2));
}

/// The number of layers is part of the model's name, so its plan is one like any other.
#[test]
fn the_largest_model_is_planned_like_any_other() {
    let dir = tempfile::tempdir().unwrap();
    let [plan, edited] = ["plan.json", "plan.ir"].map(|name| dir.path().join(name));
    let asked =
        ["plan", "llama-tiny", "--cluster", "cpu:1", "--seq", "64", "--device-memory", "60MiB", "-o", text(&plan)];
    let said = check(&[&asked[..], &["--maximize", "layers"]].concat(), 0, &["llama-tiny@layers=", "beyond it"]);
    let layers = said.split("llama-tiny@layers=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    check(&["verify", text(&plan), "--static-only"], 0, &["✓ request", "✓ memory"]);
    check(&["explain", text(&plan), "--text", text(&edited)], 0, &["wrote"]);
    check(&["diff", text(&plan), text(&edited)], 0, &["same"]);
    let named = format!("llama-tiny@layers={layers}");
    check(&["plan", &named, "--cluster", "cpu:1", "--seq", "64", "--device-memory", "60MiB"], 0, &[&named]);
    check(&["plan", "llama-tiny@layers=0"], 2, &["`0` layers", "from 1 to 1024"]);
    check(&["plan", "resnet-50@layers=3"], 2, &["no layers that are alike"]);
}
