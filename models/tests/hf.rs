//! Hugging Face directories: reading parts, round trips, and what is wrong with bad ones.

use shardc_ir::{DType, HostTensor, TensorType};
use shardc_models::hf::{Beside, HfError, HfWeights, open, read_config, save, save_in_shards, save_plain};
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
        let config = read_config(source.path()).unwrap();
        save_in_shards(&dir, &config, |name| weights.read_whole(name), 100_000).unwrap();
        assert!(dir.join("model.safetensors.index.json").exists());
        assert_eq!(tensors(&dir), tensors(source.path()));
        let (model, again) = open(&dir, 4, 32).unwrap();
        assert_eq!(read_config(&dir).unwrap(), config);
        assert_eq!(model.name, "save");
        // A later save in one file leaves nothing of the shards.
        save(&dir, &config, &Beside::default(), |name| again.read_whole(name)).unwrap();
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
    let config = read_config(dir.path()).unwrap();
    assert!(save(dir.path(), &config, &Beside::default(), fail).is_err());
    assert_eq!(tensors(dir.path()), before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

/// What training does not change is kept: the rest of `config.json`, and the tokenizer.
#[test]
fn what_lies_beside_the_weights_is_kept() {
    let json = |dir: &Path| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
    };
    for name in ["gpt2", "llama"] {
        let source = copy(name);
        edit(source.path(), "\"model_type\"", "\"torch_dtype\": \"bfloat16\", \"of_the_author\": 7, \"model_type\"");
        edit(source.path(), if name == "gpt2" { "LMHeadModel\"" } else { "ForCausalLM\"" }, "Model\"");
        fs::write(source.path().join("tokenizer_config.json"), "{}").unwrap();
        fs::write(source.path().join("notes.txt"), "not the model's").unwrap();
        let (_, weights) = open(source.path(), 4, 32).unwrap();
        let mut beside = Beside::read(source.path()).unwrap();
        beside.add("tokenizer.json", &source.path().join("tokenizer_config.json")).unwrap();
        let target = tempfile::tempdir().unwrap();
        let config = read_config(source.path()).unwrap();
        save(target.path(), &config, &beside, |name| weights.read_whole(name)).unwrap();
        let (mut before, after) = (json(source.path()), json(target.path()));
        before["torch_dtype"] = "float32".into();
        before["dtype"] = "float32".into();
        let architecture = if name == "gpt2" { "GPT2LMHeadModel" } else { "LlamaForCausalLM" };
        before["architectures"] = vec![architecture].into();
        assert_eq!(before, after);
        let names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
        let mut files: Vec<_> = fs::read_dir(target.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
        files.sort();
        assert_eq!(files, names);
        // In the place of its source, too.
        save(source.path(), &config, &beside, |name| weights.read_whole(name)).unwrap();
        assert_eq!(json(source.path()), after);
    }
}

/// A model of no family: its parameters under their own names and types.
#[test]
fn a_plain_model_is_saved_and_read() {
    let bits = HostTensor { ty: TensorType::new(DType::Bool, [3]), bytes: vec![1, 0, 1] };
    let given = [
        ("encoder.weight", HostTensor::from_f32([2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
        ("scale", HostTensor::from_f32([], &[0.5])),
        ("table", HostTensor::from_i64([2], &[7, -1])),
        ("mask", bits),
    ];
    let types: Vec<_> = given.iter().map(|(name, tensor)| (name.to_string(), tensor.ty.clone())).collect();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "{\"model_type\": \"gpt2\"}").unwrap();
    let find = |name: &str| Ok(given.iter().find(|(known, _)| *known == name).unwrap().1.clone());
    save_plain(dir.path(), "two-tower", &types, find).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "the description of what was there is gone");
    let text = fs::read_to_string(dir.path().join("shardc.json")).unwrap();
    assert!(text.contains("\"model\": \"two-tower\"") && text.contains("\"encoder.weight\": \"f32[2,3]\""), "{text}");
    let weights = HfWeights::open_plain(dir.path(), &types).unwrap();
    for (name, tensor) in &given {
        assert_eq!(weights.read_whole(name).unwrap(), *tensor, "{name}");
    }
    let part = [(1, 1), (0, 2)];
    assert_eq!(weights.read("encoder.weight", &part).unwrap(), given[0].1.part(&part));
    let check = |name: &str, ty: TensorType, expect: &str| {
        let error =
            HfWeights::open_plain(dir.path(), &[(name.to_string(), ty)]).expect_err("it must not open").to_string();
        assert!(error.contains(expect), "{error}");
    };
    check("decoder.weight", TensorType::new(DType::F32, [2, 3]), "tensor `decoder.weight` is in no file");
    check(
        "encoder.weight",
        TensorType::new(DType::F32, [3, 2]),
        "`encoder.weight` is f32[2,3]; the model has it as f32[3,2]",
    );
    check("table", TensorType::new(DType::I32, [2]), "`table` is i64[2]; the model has it as i32[2]");
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
    check(|dir| fs::remove_file(dir.join("model.safetensors")).unwrap(), &["model.safetensors", "neither is there"]);
    check(|dir| fs::write(dir.join("config.json"), "{").unwrap(), &["config.json", "not JSON"]);
    check(|dir| edit(dir, "\"llama\"", "\"bert\""), &["architecture `bert`", "gpt2, llama"]);
    check(|dir| edit(dir, "\"hidden_size\"", "\"hidden\""), &["field `hidden_size` is missing"]);
    check(
        |dir| edit(dir, "\"intermediate_size\": 128", "\"intermediate_size\": 96"),
        &["gate_proj", "f32[128,64]", "f32[96,64]"],
    );
    check(|dir| edit(dir, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"), &["model.layers.2.", "in no file"]);
    check(
        |dir| edit(dir, "\"model_type\": \"llama\"", "\"model_type\": 3"),
        &["`model_type` must be the name", "not 3"],
    );
    check(|dir| edit(dir, "\"rope_type\": \"default\"", "\"rope_type\": \"yarn\""), &["rotary type `yarn`"]);
    check(|dir| edit(dir, "\"rope_type\": \"default\"", "\"rope_type\": 1"), &["`rope_parameters.rope_type` must be"]);
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
    // A type that no tensor of ours has, and one that others have.
    for foreign in ["F64", "I32"] {
        let change = |dir: &Path| {
            let path = dir.join("model.safetensors");
            let bytes = fs::read(&path).unwrap();
            let (from, to) = (b"\"F32\"", format!("\"{foreign}\""));
            let at = bytes.windows(from.len()).position(|part| part == from).unwrap();
            fs::write(path, [&bytes[..at], to.as_bytes(), &bytes[at + to.len()..]].concat()).unwrap();
        };
        let words = format!("has elements of {foreign}");
        check(change, &["model.safetensors: tensor `", &words, "F32, BF16 or F16"]);
    }
    // What the header of the weights says is changed.
    let of_header = |change: &dyn Fn(&mut serde_json::Value), expect: &[&str]| {
        let change = |dir: &Path| {
            let path = dir.join("model.safetensors");
            let bytes = fs::read(&path).unwrap();
            let (length, rest) = bytes.split_at(8);
            let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
            change(&mut header);
            let header = header.to_string();
            fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()).unwrap();
        };
        check(change, expect);
    };
    of_header(
        &|header| header["model.norm.weight"] = header["model.layers.0.input_layernorm.weight"].clone(),
        &["`model.layers.0.input_layernorm.weight` and `model.norm.weight` take the same bytes"],
    );
    for (field, value, expect) in [
        ("shape", "[-1, 2]", "`shape` is [-1,2], not a list of sizes"),
        ("dtype", "4", "`dtype` is 4, which names no type"),
        ("data_offsets", "[0]", "`data_offsets` is [0], not where it begins and ends"),
    ] {
        let change = |header: &mut serde_json::Value| {
            header["model.norm.weight"][field] = serde_json::from_str(value).unwrap();
        };
        of_header(&change, &["tensor `model.norm.weight`", expect]);
    }
    let index = |dir: &Path| {
        let text = r#"{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}"#;
        fs::write(dir.join("model.safetensors.index.json"), text).unwrap();
        fs::remove_file(dir.join("model.safetensors")).unwrap();
    };
    check(index, &["model-00001-of-00002.safetensors", "No such file"]);
    let number = |dir: &Path| {
        fs::write(dir.join("model.safetensors.index.json"), r#"{"weight_map": {"lm_head.weight": 1}}"#).unwrap();
        fs::remove_file(dir.join("model.safetensors")).unwrap();
    };
    check(number, &["the file of tensor `lm_head.weight` is 1"]);
    let scaled = "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4.0},\n  \"rope_parameters\"";
    check(|dir| edit(dir, "\"rope_parameters\"", scaled), &["rotary type `linear`"]);
    check(
        |dir| edit(dir, "\"rope_parameters\"", "\"rope_scaling\": 4.0,\n  \"rope_parameters\""),
        &["`rope_scaling` must be an object"],
    );
}

/// As transformers does: the single file comes first, and a tensor is that of the file in which the index has it.
#[test]
fn a_tensor_of_several_files_is_the_one_of_the_index() {
    let dir = copy("llama");
    let (single, first, other) =
        ("model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let bytes = fs::read(dir.path().join(single)).unwrap();
    let norm = |dir: &Path| open(dir, 4, 32).unwrap().1.read_whole("norm.gamma").unwrap();
    let own = norm(dir.path());
    fs::write(dir.path().join(first), &bytes).unwrap();
    let mut changed = bytes.clone();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    changed[header..].fill(0);
    fs::write(dir.path().join(other), changed).unwrap();
    let index = format!(r#"{{"weight_map": {{"model.norm.weight": "{first}", "lm_head.weight": "{other}"}}}}"#);
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    assert_eq!(norm(dir.path()), own);
    fs::remove_file(dir.path().join(single)).unwrap();
    assert_eq!(norm(dir.path()), own);
    let head = open(dir.path(), 4, 32).unwrap().1.read_whole("head.weight").unwrap();
    assert!(head.bytes.iter().all(|byte| *byte == 0));
}

/// What is no model's is not written over.
#[test]
fn a_directory_of_something_else_is_left() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "{\"mine\": 1}").unwrap();
    let ty = TensorType::new(DType::F32, [2]);
    let read = |_: &str| Ok(HostTensor::from_f32([2], &[1.0, 2.0]));
    let error = save_plain(dir.path(), "own", &[("a".to_string(), ty)], read).unwrap_err();
    assert!(matches!(error, HfError::Foreign { .. }), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// Saves to one directory come one behind the other: what is there in the end is whole.
#[test]
fn saves_to_one_place_do_not_mix() {
    let dir = tempfile::tempdir().unwrap();
    let ty = TensorType::new(DType::F32, [4]);
    let parameters: Vec<_> = ["a", "b", "c"].map(|name| (name.to_string(), ty.clone())).into();
    let save_all = |number: f32| {
        let read = |_: &str| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            Ok(HostTensor { ty: ty.clone(), bytes: [number; 4].map(f32::to_le_bytes).concat() })
        };
        save_plain(dir.path(), "own", &parameters, read)
    };
    std::thread::scope(|scope| {
        let saves: Vec<_> = [1.0, 2.0].map(|number| scope.spawn(move || save_all(number))).into();
        saves.into_iter().for_each(|save| save.join().unwrap().unwrap());
    });
    let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let data = &bytes[bytes.len() - 48..];
    assert!(data.chunks(4).all(|number| number == &data[..4]), "{data:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}
