//! Hugging Face directories: reading parts, round trips, and what is wrong with bad ones.

use shardc_ir::HostTensor;
use shardc_models::hf::{HfError, open, save, save_in_shards};
use std::fs;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/hf").join(name)
}

fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture(name).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

#[test]
fn opens_with_the_right_count() {
    for name in ["gpt2", "llama"] {
        let (model, weights) = open(fixture(name), 4, 32).unwrap();
        let text = fs::read_to_string(fixture(name).join("train.json")).unwrap();
        let train: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(Some(model.parameters), train["parameters"].as_u64());
        for (value, node) in model.graph.leaves() {
            if let shardc_ir::Op::Parameter(parameter) = &node.op {
                assert_eq!(
                    &weights.read_whole(&parameter.name).unwrap().ty,
                    model.graph.ty(value),
                    "{}",
                    parameter.name
                );
            }
        }
    }
}

#[test]
fn reads_parts() {
    for (name, parameter) in
        [("gpt2", "blocks.1.attention.key.weight"), ("gpt2", "token.weight"), ("llama", "blocks.0.mlp.up.weight")]
    {
        let (_, weights) = open(fixture(name), 4, 32).unwrap();
        let whole = weights.read_whole(parameter).unwrap();
        for part in [[(0, 1), (0, 64)], [(3, 7), (5, 11)], [(32, 32), (0, 32)]] {
            assert_eq!(weights.read(parameter, &part).unwrap(), whole.part(&part), "{parameter} {part:?}");
        }
        assert!(matches!(weights.read(parameter, &[(0, 1), (0, 1000)]), Err(HfError::Parameter { .. })));
    }
    let (_, weights) = open(fixture("gpt2"), 4, 32).unwrap();
    let bias = |name: &str| weights.read_whole(&format!("blocks.0.attention.{name}.bias")).unwrap();
    assert_ne!(bias("query"), bias("key"));
    assert_ne!(bias("key"), bias("value"));
}

fn tensors(dir: &Path) -> Vec<(String, Vec<u64>, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = fs::read(path).unwrap();
            for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
                all.push((name, view.shape().iter().map(|size| *size as u64).collect(), view.data().to_vec()));
            }
        }
    }
    all.sort();
    all
}

#[test]
fn saves_what_it_read() {
    for name in ["gpt2", "llama"] {
        let source = copy(name);
        let (_, weights) = open(source.path(), 4, 32).unwrap();
        let target = tempfile::tempdir().unwrap();
        let dir = target.path().join("save");
        save_in_shards(&dir, weights.config(), |name| weights.read_whole(name), 100_000).unwrap();
        assert!(dir.join("model.safetensors.index.json").exists());
        assert_eq!(tensors(&dir), tensors(source.path()));
        let (model, again) = open(&dir, 4, 32).unwrap();
        assert_eq!(again.config(), weights.config());
        assert_eq!(model.name, "save");
        // A later save in one file leaves nothing of the shards.
        save(&dir, weights.config(), |name| again.read_whole(name)).unwrap();
        assert_eq!(tensors(&dir), tensors(source.path()));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2);
    }
}

#[test]
fn a_failed_save_leaves_the_previous_one() {
    let dir = copy("llama");
    let before = tensors(dir.path());
    let (_, weights) = open(dir.path(), 4, 32).unwrap();
    let fail = |name: &str| -> Result<HostTensor, HfError> {
        if name == "norm.gamma" {
            let error = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(HfError::Io { path: "somewhere".into(), error });
        }
        weights.read_whole(name).map(|tensor| HostTensor::zeros(tensor.ty))
    };
    assert!(save(dir.path(), weights.config(), fail).is_err());
    assert_eq!(tensors(dir.path()), before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[track_caller]
fn check(spoil: impl FnOnce(&Path), expect: &[&str]) {
    let dir = copy("llama");
    spoil(dir.path());
    let error = open(dir.path(), 4, 32).expect_err("it must not open").to_string();
    for part in expect {
        assert!(error.contains(part), "`{error}` does not say `{part}`");
    }
}

fn edit(dir: &Path, from: &str, to: &str) {
    let path = dir.join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from));
    fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn says_what_is_wrong() {
    check(|dir| fs::remove_file(dir.join("config.json")).unwrap(), &["config.json", "No such file"]);
    check(|dir| fs::remove_file(dir.join("model.safetensors")).unwrap(), &["model.safetensors", "No such file"]);
    check(|dir| fs::write(dir.join("config.json"), "{").unwrap(), &["config.json", "not JSON"]);
    check(|dir| edit(dir, "\"llama\"", "\"bert\""), &["architecture `bert`", "gpt2, llama"]);
    check(|dir| edit(dir, "\"hidden_size\"", "\"hidden\""), &["field `hidden_size` is missing"]);
    check(
        |dir| edit(dir, "\"intermediate_size\": 128", "\"intermediate_size\": 96"),
        &["gate_proj", "[128, 64]", "[96, 64]"],
    );
    check(|dir| edit(dir, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"), &["model.layers.2.", "in no file"]);
    check(|dir| edit(dir, "\"rope_type\": \"default\"", "\"rope_type\": \"yarn\""), &["rotary type `yarn`"]);
    check(|dir| edit(dir, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 200000"), &["field `num_hidden"]);
    check(|dir| edit(dir, "\"num_attention_heads\": 4", "\"num_attention_heads\": \"four\""), &["a whole number"]);
    for length in [4, 100, 100_000] {
        let cut = |dir: &Path| {
            let path = dir.join("model.safetensors");
            let bytes = fs::read(&path).unwrap();
            fs::write(path, &bytes[..length]).unwrap();
        };
        check(cut, &["model.safetensors", if length == 4 { "4 bytes" } else { "truncated" }]);
    }
    let index = |dir: &Path| {
        let text = r#"{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}"#;
        fs::write(dir.join("model.safetensors.index.json"), text).unwrap();
    };
    check(index, &["model-00001-of-00002.safetensors", "No such file"]);
}
