//! Models of every kind through the command line: planned for clusters of GPUs, explained, simulated,
//! verified, and trained on CPU ranks. Nothing here or in `shardc` is about one model.

mod command;

use command::{check, text};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::path::Path;

/// An input of a model: its name, its shape, and what its integers are below; 0 for floats.
type Input = (&'static str, &'static [usize], i64);

const MODELS: [(&str, &[Input]); 5] = [
    ("resnet-tiny", &[("images", &[8, 3, 16, 16], 0), ("labels", &[8], 10)]),
    ("unet-tiny", &[("images", &[8, 3, 16, 16], 0), ("masks", &[8, 16, 16], 2)]),
    ("mixer-tiny", &[("images", &[8, 3, 16, 16], 0), ("labels", &[8], 10)]),
    ("two-tower-tiny", &[("users", &[8], 1000), ("items", &[8], 1000)]),
    ("moe-tiny", &[("input_ids", &[8, 16], 256), ("labels", &[8, 16], 256)]),
];

/// Writes exact batches for some steps, the same for all of them, so that their losses can be compared.
fn batches(path: &Path, inputs: &[Input], steps: usize) {
    let mut tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (step, (name, shape, below)) in (0..steps).flat_map(|step| inputs.iter().map(move |input| (step, input))) {
        let numbers = (0..shape.iter().product::<usize>()).map(|at| (at * 7919) as i64);
        let (dtype, bytes) = match below {
            0 => (Dtype::F32, numbers.flat_map(|x| ((x % 2001) as f32 / 1000.0 - 1.0).to_le_bytes()).collect()),
            below => (Dtype::I64, numbers.flat_map(|x| (x % below).to_le_bytes()).collect()),
        };
        tensors.insert(format!("{name}.{step}"), (dtype, shape.to_vec(), bytes));
    }
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// The losses of a short run.
fn losses(model: &str, data: &Path, cluster: &str, pins: &str) -> Vec<f64> {
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics.jsonl");
    let common = ["--steps", "3", "--lr", "0.001", "--cluster", cluster, "--pin", pins];
    let files = ["train", model, "--data", text(data), "--metrics", text(&metrics)];
    check(&[&files[..], &common[..]].concat(), 0, &["3 of 3 steps"]);
    let lines = std::fs::read_to_string(metrics).unwrap();
    let loss = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap();
    lines.lines().map(loss).collect()
}

#[test]
fn trained_on_one_rank_and_on_several() {
    let dir = tempfile::tempdir().unwrap();
    for (model, inputs) in MODELS {
        let data = dir.path().join(format!("{model}.safetensors"));
        batches(&data, inputs, 3);
        let whole = losses(model, &data, "cpu:1", "");
        assert!(whole[2] < whole[0], "{model}: {whole:?}");
        for (cluster, pins) in [("cpu:2", "dp=2,zero=1"), ("cpu:4", "dp=2,tp=2,zero=3")] {
            let spread = losses(model, &data, cluster, pins);
            let off = whole.iter().zip(&spread).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max);
            assert!(off < 1e-4, "{model} with {pins}: {spread:?} for {whole:?}");
        }
    }
}

/// What a run saved is a model like any other, on other ranks, and says of which it is when it is saved again.
#[test]
fn saved_and_trained_again() {
    let dir = tempfile::tempdir().unwrap();
    let [data, saved, again] = ["data.safetensors", "saved", "again"].map(|name| dir.path().join(name));
    for (model, inputs) in MODELS {
        batches(&data, inputs, 3);
        let train = |model: &str, cluster: &str, to: &Path| {
            let run = ["train", model, "--data", text(&data), "--steps", "3", "--lr", "0.001", "--cluster", cluster];
            let said = check(&[&run[..], &["--save", text(to)]].concat(), 0, &["3 of 3 steps"]);
            let first = said.lines().find_map(|line| line.strip_prefix("step     0  loss ")).unwrap().split(' ').next();
            first.unwrap().parse::<f64>().unwrap()
        };
        let first = train(model, "cpu:2", &saved);
        let [second, third] = [train(text(&saved), "cpu:1", &again), train(text(&again), "cpu:2", &again)];
        assert!(second < first && third < second, "{model}: {first}, {second}, {third}");
        let description = std::fs::read_to_string(again.join("shardc.json")).unwrap();
        assert!(description.contains(&format!("\"model\": \"{model}\"")), "{description}");
    }
    let description = std::fs::read_to_string(again.join("shardc.json")).unwrap();
    std::fs::write(again.join("shardc.json"), description.replace("\"moe-tiny\"", "\"my-own\"")).unwrap();
    check(
        &["estimate", text(&again)],
        2,
        &["has the weights of `my-own`, which is no built-in model", "saved_weights"],
    );
}

/// Three ranks divide no dimension of most parameters.
#[test]
fn trained_on_ranks_that_divide_little() {
    let inputs: &[Input] = &[("input_ids", &[12, 16], 256), ("labels", &[12, 16], 256)];
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("tokens.safetensors");
    batches(&data, inputs, 3);
    let plans = [
        ("llama-tiny", "cpu:3", "dp=3,zero=1,microbatch=2"),
        ("llama-tiny", "cpu:3", "dp=3,zero=3"),
        ("llama-tiny", "cpu:6", "dp=6,zero=2,microbatch=1"),
        ("llama-tiny", "cpu:6", "dp=3,tp=2,zero=3,microbatch=2"),
        ("llama-tiny", "cpu:6", "dp=3,cp=2,zero=3"),
        ("llama-tiny", "cpu:6", "dp=2,fsdp=3,zero=3"),
        ("moe-tiny", "cpu:3", "dp=3,zero=3"),
        ("moe-tiny", "cpu:6", "ep=2,dp=3,zero=1"),
    ];
    for alike in plans.chunk_by(|a, b| a.0 == b.0) {
        let whole = losses(alike[0].0, &data, "cpu:1", "");
        for (model, cluster, pins) in alike {
            let spread = losses(model, &data, cluster, pins);
            let off = whole.iter().zip(&spread).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max);
            assert!(off < 1e-4, "{model} with {pins}: {spread:?} for {whole:?}");
        }
    }
}

#[test]
fn planned_explained_simulated_and_verified() {
    let dir = tempfile::tempdir().unwrap();
    for (model, _) in MODELS {
        let plan = dir.path().join(format!("{model}.json"));
        let plan = text(&plan);
        check(&["plan", model, "--cluster", "cpu:4", "--batch", "8", "-o", plan], 0, &["runners-up"]);
        check(&["explain", plan], 0, &["layouts"]);
        check(&["simulate", plan], 0, &[]);
        check(&["verify", plan], 0, &["gradient norm"]);
    }
}

/// Statistics of a batch that four ranks and more divide: rounding decides on signs of what is zero but for it, in some
/// draws of numbers.
#[test]
fn statistics_of_a_batch_are_verified_over_many_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let plan = dir.path().join("plan.json");
    for (cluster, pins) in [("h100:4", "dp=4"), ("h100:8", "dp=8,zero=3"), ("h100:8", "dp=4,tp=2")] {
        let args = ["plan", "resnet-50", "--cluster", cluster, "--batch", "512", "--pin", pins, "-o", text(&plan)];
        check(&args, 0, &["memory"]);
        check(&["verify", text(&plan)], 0, &["✓ loss", "✓ gradient norm", "✓ moments"]);
    }
}

#[test]
fn planned_for_many_gpus() {
    let dir = tempfile::tempdir().unwrap();
    let asked = [
        ("resnet-50", "h100:8x2", "--pin tp=1"),
        ("unet", "h100:8", "--pin zero=1"),
        ("mixer-b-16", "h100:8x8", "--pin microbatch=2"),
        ("two-tower", "h100:8x8", ""),
        ("mixtral-8x7b", "h100:8x2", "--seq 512 --pin microbatch=8"),
    ];
    for (model, cluster, more) in asked {
        let plan = dir.path().join("plan.json");
        let args = ["plan", model, "--cluster", cluster, "--batch", "128", "-o", text(&plan)];
        let more: Vec<&str> = more.split_whitespace().collect();
        check(&[&args[..], &more].concat(), 0, &["memory"]);
        check(&["verify", text(&plan), "--static-only"], 0, &["compute the graph of one device"]);
    }
}

/// A ring is priced as one, and what its programs do in its place confirms nothing.
#[test]
fn rings_are_not_confirmed_by_programs() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plan.json");
    let plan = ["plan", "llama-8b", "--cluster", "h100:8", "--batch", "8", "--seq", "8192", "--pin", "ring=4,dp=2"];
    let plan: Vec<&str> = plan.into_iter().chain(["-o", text(&file)]).collect();
    let shown = check(&plan, 0, &["ring=4"]);
    assert!(!shown.contains("keep_casts"), "{shown}");
    let unlowered =
        "no program does attention round a ring of ranks (ring) yet: programs gather what goes round the ring";
    check(&["simulate", text(&file)], 0, &["which is not simulated", unlowered]);
    check(&["verify", text(&file)], 0, &["– memory", unlowered, "on a small model, without attention round a ring"]);
}

#[test]
fn what_does_not_fit_is_refused() {
    check(&["plan", "resnet-tiny", "--seq", "16"], 2, &["takes no sequences", "--seq out"]);
    check(&["plan", "unet-tiny", "--maximize", "layers"], 2, &["no layers that are alike"]);
    for (model, words) in
        [("moe-1b", "ep=2"), ("resnet-50", "dp=2"), ("unet", "dp=2"), ("mixer-b-16", ""), ("two-tower", "")]
    {
        let said = check(&["plan", model, "--cluster", "h100:2", "--batch", "8"], 0, &[words]);
        assert!(!said.contains("refused"), "{said}");
    }
    // Statistics of the batch are those of the whole batch.
    check(&["plan", "resnet-tiny", "--batch", "8", "--pin", "microbatch=2"], 2, &["microbatch"]);
    let dir = tempfile::tempdir().unwrap();
    let words = dir.path().join("words.txt");
    std::fs::write(&words, "some text").unwrap();
    let train = |data: &Path, words: &[&str]| {
        check(&["train", "resnet-tiny", "--data", text(data), "--steps", "1"], 2, words);
    };
    train(&words, &["no language model", "images.STEP"]);
    let data = dir.path().join("data.safetensors");
    batches(&data, &[("images", &[8, 3, 16, 16], 0), ("labels", &[8], 11)], 1);
    train(&data, &["`labels.0` holds 10", "below 10"]);
    batches(&data, &[("images", &[8, 3, 16, 16], 0)], 1);
    train(&data, &["no tensors for input `labels`"]);
}

/// A label that is no token is refused, unless it is the one that does not count.
#[test]
fn labels_are_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data.safetensors");
    let train = |code: i32, words: &[&str]| {
        check(&["train", "llama-tiny", "--data", text(&data), "--steps", "1"], code, words);
    };
    batches(&data, &[("input_ids", &[2, 16], 1024), ("labels", &[2, 16], 5000)], 1);
    train(2, &["`labels.0` holds", "at least 0 and below 1024, or -100, which does not count"]);
    batches(&data, &[("input_ids", &[2, 16], 1024), ("labels", &[2, 16], 1024)], 1);
    train(0, &["loss"]);
}

/// A step is counted in what it has, as it was planned.
#[test]
fn rates_are_of_samples_where_there_are_no_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data.safetensors");
    batches(&data, MODELS[0].1, 1);
    let said = check(&["train", MODELS[0].0, "--data", text(&data), "--steps", "1"], 0, &["samples/s"]);
    assert!(!said.contains("tokens/s"), "{said}");
}

/// Data is not left out of a run: it is for another plan, or the plan for other data.
#[test]
fn batches_are_of_the_shape_that_was_planned() {
    let dir = tempfile::tempdir().unwrap();
    let (plan, data) = (dir.path().join("plan.json"), dir.path().join("data.safetensors"));
    check(&["plan", MODELS[0].0, "--cluster", "cpu:1", "--batch", "4", "-o", text(&plan)], 0, &[]);
    batches(&data, MODELS[0].1, 1);
    let words = ["has batches of 8, and the plan is for batches of 4\n", "give batches of the plan's shape"];
    check(&["train", text(&plan), "--data", text(&data), "--steps", "1"], 2, &words);
    let asked = ["train", MODELS[0].0, "--data", text(&data), "--steps", "1", "--batch", "4"];
    check(&asked, 2, &["--batch 4 contradicts the data, whose batches are 8\n"]);
}
