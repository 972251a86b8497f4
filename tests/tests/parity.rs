//! Training under every family of plans equals what Hugging Face transformers computed: ten steps
//! of losses and gradient norms, and the gradients of the first step.

use safetensors::SafeTensors;
use serde_json::Value;
use shardc::data::{Data, open_batches};
use shardc::{Batch, Cluster, Compiled, LearningRate, NamedModel, Options, Precision, StepMetrics, TrainOptions};
use shardc_ir::program::Action;
use shardc_ir::{DType, HostTensor, ReduceKind, Role};
use shardc_models::hf;
use shardc_models::zoo::{Config, LlamaConfig};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

fn fixture(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/hf").join(model)
}

fn options(pins: &str) -> Options {
    Options { precision: Some(Precision::Fp32), pins: pins.to_string(), ..Options::default() }
}

/// The optimizer of the fixtures is the default one; the learning rate is constant.
fn training(steps: u64) -> TrainOptions {
    let learning_rate = LearningRate { rate: 1e-3, min_rate: 0.0, warmup: 0, decay: shardc::Decay::Constant, steps };
    TrainOptions { learning_rate, seed: 1 }
}

fn train(model: &NamedModel, compiled: &Compiled, data: &Data, steps: u64) -> Vec<StepMetrics> {
    let weights = model.weights().unwrap();
    let mut trainer = compiled.start(weights.as_ref(), training(steps)).unwrap();
    let batch = |step| data.batch(step, &compiled.model.inputs).unwrap();
    (0..steps).map(|step| trainer.step(batch(step)).unwrap()).collect()
}

#[track_caller]
fn close(what: &str, actual: f64, expected: f64, tolerance: f64) {
    let error = (actual - expected).abs() / expected.abs().max(1e-30);
    assert!(error < tolerance, "{what}: {actual}, expected {expected}: off by {error:.1e}");
}

/// Ten steps against `train.json`.
#[track_caller]
fn check(name: &str, cluster: &str, pins: &str) {
    let dir = fixture(name);
    let model = NamedModel::find(dir.to_str().unwrap()).unwrap();
    let data = open_batches(&dir.join("batches.safetensors")).unwrap();
    let (batch, seq) = data.shape().unwrap();
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let compiled = shardc::compile(&model, Batch { batch, seq }, &cluster, &options(pins)).unwrap();
    for pin in pins.split(',').filter(|pin| !pin.is_empty() && !pin.starts_with("recompute")) {
        // A degree may be several axes.
        let choice = compiled.plan().choice.replace("=2x2", if pins.contains('x') { "=2x2" } else { "=4" });
        assert!(choice.contains(pin), "{pins} gave {choice}");
    }
    let steps = train(&model, &compiled, &data, 10);
    let expected: Value = serde_json::from_str(&fs::read_to_string(dir.join("train.json")).unwrap()).unwrap();
    for (index, step) in steps.iter().enumerate() {
        let at = |key: &str| expected[key][index].as_f64().unwrap();
        close(&format!("{name} {pins} loss {index}"), step.loss, at("losses"), 1e-4);
        close(&format!("{name} {pins} norm {index}"), step.grad_norm, at("grad_norms"), 1e-3);
        // What was allocated is what was planned.
        assert_eq!(step.peak_device_bytes, compiled.plan().prediction.memory.total().0, "{name} {pins}");
    }
}

/// Both architectures under a plan.
#[track_caller]
fn check_both(cluster: &str, pins: &str) {
    check("llama", cluster, pins);
    check("gpt2", cluster, pins);
}

#[test]
fn one_rank() {
    check_both("cpu:1", "");
}

#[test]
fn data_parallel_with_zero() {
    for zero in 0..=3 {
        check_both("cpu:4", &format!("dp=4,zero={zero}"));
    }
}

#[test]
fn tensor_parallel() {
    check_both("cpu:4", "tp=4");
    check_both("cpu:4", "tp=2,dp=2");
    check_both("cpu:4", "tp=2,dp=2,zero=3");
}

#[test]
fn tensor_parallel_on_two_axes() {
    check_both("cpu:4", "tp=2x2");
    check_both("cpu:8", "tp=2x2,dp=2,zero=3,microbatch=1");
}

#[test]
fn replicas_of_parts() {
    check_both("cpu:4", "dp=2,fsdp=2,zero=1");
    check_both("cpu:4", "dp=2,fsdp=2,zero=2,microbatch=1");
    check_both("cpu:4", "dp=2,fsdp=2,zero=3,recompute=full");
    check_both("cpu:8", "dp=2,fsdp=2,tp=2,zero=3");
}

#[test]
fn context_parallel() {
    check_both("cpu:2", "cp=2,zero=0");
    check_both("cpu:4", "cp=4,zero=3");
    // More ranks than heads: they divide the queries as well.
    check_both("cpu:8", "cp=4x2,zero=1");
    check_both("cpu:8", "cp=4x2,zero=3,recompute=full");
    check_both("cpu:4", "ulysses=2,dp=2,zero=1,microbatch=1");
    check_both("cpu:8", "cp=2,dp=2,tp=2,zero=2,recompute=full");
}

#[test]
fn gradient_accumulation() {
    check_both("cpu:2", "microbatch=1");
    check_both("cpu:2", "dp=2,zero=2,microbatch=1");
}

#[test]
fn pipelines() {
    check("llama", "cpu:2", "pp=2,schedule=1f1b,microbatch=1");
    check("llama", "cpu:4", "pp=2,dp=2,schedule=gpipe,zero=1,microbatch=1");
    check("llama", "cpu:4", "pp=2,tp=2,schedule=1f1b,microbatch=1,recompute=full");
    check("llama", "cpu:2", "pp=2,schedule=interleaved,virtual=2,microbatch=1");
    check("llama", "cpu:2", "pp=2,schedule=zbv,virtual=2,microbatch=1,recompute=none");
}

/// Blocks with biases, and a head that reads the embedding.
#[test]
fn pipelines_of_biased_blocks() {
    check("gpt2", "cpu:2", "pp=2,schedule=1f1b,microbatch=1");
    check("gpt2", "cpu:4", "pp=4,schedule=1f1b,microbatch=1,recompute=none");
    check("gpt2", "cpu:4", "pp=4,schedule=gpipe,microbatch=1,recompute=none");
    check("gpt2", "cpu:4", "pp=2,dp=2,schedule=gpipe,zero=1,microbatch=1");
    check("gpt2", "cpu:4", "pp=2,dp=2,schedule=1f1b,zero=3,microbatch=1");
    check("gpt2", "cpu:4", "pp=4,schedule=interleaved,virtual=2,microbatch=1,recompute=none");
    check("gpt2", "cpu:4", "pp=4,schedule=zbv,virtual=2,microbatch=1,recompute=none");
    check("gpt2", "cpu:4", "pp=4,schedule=zbv,in_flight=3,microbatch=1,recompute=none");
    check("gpt2", "cpu:4", "pp=4,schedule=zbv,delayed=2,microbatch=1,recompute=none");
    check("gpt2", "cpu:4", "pp=2,tp=2,schedule=zbv,virtual=2,microbatch=1,recompute=none");
}

#[test]
fn recomputation() {
    check_both("cpu:1", "recompute=full");
    check_both("cpu:1", "recompute=selective");
    check_both("cpu:2", "recompute=value:2,microbatch=1");
    check_both("cpu:4", "dp=2,tp=2,zero=3,recompute=value:3");
    check_both("cpu:4", "dp=2,tp=2,zero=3,recompute=full,microbatch=1");
}

#[test]
fn head_in_chunks() {
    check_both("cpu:1", "loss_chunks=2");
    check_both("cpu:4", "tp=2,dp=2,loss_chunks=4");
    check_both("cpu:4", "tp=4,loss_chunks=2");
    check_both("cpu:4", "dp=4,zero=3,loss_chunks=2,recompute=full");
    check_both("cpu:2", "dp=2,zero=2,microbatch=1,loss_chunks=2");
}

#[test]
fn chunks_that_overlap() {
    check_both("cpu:2", "tp=2,microbatch=4,overlap_chunks=2");
    check_both("cpu:4", "tp=4,microbatch=4,overlap_chunks=4");
    check_both("cpu:4", "dp=2,tp=2,zero=3,microbatch=2,overlap_chunks=2,recompute=full");
    check_both("cpu:2", "tp=2,microbatch=2,overlap_chunks=2,recompute=selective");
    // Of one sample the tokens are cut.
    check_both("cpu:2", "tp=2,microbatch=1,overlap_chunks=2");
    check_both("cpu:4", "dp=2,tp=2,zero=1,microbatch=1,overlap_chunks=4,recompute=full");
    // Ranks that divide them divide those of each chunk.
    check_both("cpu:2", "cp=2,microbatch=1,overlap_chunks=2");
    check_both("cpu:8", "cp=4x2,microbatch=1,overlap_chunks=2");
    check_both("cpu:4", "cp=2,tp=2,zero=1,microbatch=1,overlap_chunks=4,recompute=full");
    check_both("cpu:4", "pp=2,cp=2,schedule=1f1b,microbatch=1,overlap_chunks=2");
    // In the stages of a pipeline they go from stage to stage by themselves.
    check_both("cpu:4", "pp=2,tp=2,schedule=1f1b,microbatch=2,overlap_chunks=2,recompute=selective");
    check_both("cpu:4", "pp=2,tp=2,schedule=zbv,microbatch=1,overlap_chunks=2");
}

/// Gradients of matrices go over the wire in bf16, and training is as it was but for their rounding.
#[track_caller]
fn check_sums_in_bf16(cluster: &str, pins: &str) {
    let dir = fixture("llama");
    let model = NamedModel::find(dir.to_str().unwrap()).unwrap();
    let data = open_batches(&dir.join("batches.safetensors")).unwrap();
    let (batch, seq) = data.shape().unwrap();
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let trained = |reduce_dtype| {
        let options = Options { reduce_dtype, ..options(pins) };
        let compiled = shardc::compile(&model, Batch { batch, seq }, &cluster, &options).unwrap();
        let program = &compiled.programs().unwrap()[0];
        let reduces = |action: &Action| {
            matches!(action, Action::AllReduce { reduce: ReduceKind::Sum, .. } | Action::ReduceScatter { .. })
        };
        let reductions = program.instructions().filter(|instruction| reduces(&instruction.action));
        let operands = reductions.flat_map(|instruction| &instruction.operands);
        let of_gradients = operands.map(|id| &program.buffers[*id]).filter(|buffer| {
            let value = buffer.value.map(|value| compiled.plan().graph.value(value).def);
            value.is_none_or(|def| compiled.plan().graph.node(def).role != Role::Forward) && buffer.ty.rank() >= 2
        });
        let dtypes: BTreeSet<DType> = of_gradients.map(|buffer| buffer.ty.dtype).collect();
        (train(&model, &compiled, &data, 10), dtypes)
    };
    let ((exact, wide), (rounded, narrow)) = (trained(None), trained(Some(DType::Bf16)));
    assert_eq!(wide, [DType::F32].into(), "{pins}");
    assert!(narrow.contains(&DType::Bf16), "{pins}: {narrow:?}");
    assert!(exact != rounded, "{pins}: nothing was rounded");
    for (exact, rounded) in exact.iter().zip(&rounded) {
        close(&format!("{pins} loss"), rounded.loss, exact.loss, 1e-3);
        close(&format!("{pins} norm"), rounded.grad_norm, exact.grad_norm, 1e-2);
    }
}

#[test]
fn sums_in_bf16() {
    for pins in ["dp=4,zero=0", "dp=4,zero=1,microbatch=1", "dp=4,zero=2,microbatch=1", "dp=4,zero=3"] {
        check_sums_in_bf16("cpu:4", pins);
    }
    check_sums_in_bf16("cpu:4", "dp=2,fsdp=2,zero=1");
    check_sums_in_bf16("cpu:4", "dp=2,tp=2,zero=1,microbatch=2");
    check_sums_in_bf16("cpu:4", "pp=2,dp=2,schedule=1f1b,zero=1,microbatch=1");
}

/// Where casts are kept from step to step training is what it is where every step makes them, bit by bit.
#[track_caller]
fn check_kept_casts(cluster: &str, pins: &str, precision: Precision) {
    let dir = fixture("llama");
    let model = NamedModel::find(dir.to_str().unwrap()).unwrap();
    let data = open_batches(&dir.join("batches.safetensors")).unwrap();
    let (batch, seq) = data.shape().unwrap();
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let trained = |kept: u8| {
        let options = Options { precision: Some(precision), ..options(&format!("{pins},keep_casts={kept}")) };
        let compiled = shardc::compile(&model, Batch { batch, seq }, &cluster, &options).unwrap();
        let slots = &compiled.programs().unwrap()[0].slots;
        assert_eq!(slots.iter().any(|slot| slot.cast_of.is_some()), kept == 1, "{pins}");
        let steps = train(&model, &compiled, &data, 5);
        steps.iter().map(|step| (step.loss.to_bits(), step.grad_norm.to_bits())).collect::<Vec<_>>()
    };
    assert_eq!(trained(1), trained(0), "{pins}");
}

#[test]
fn kept_casts() {
    check_kept_casts("cpu:1", "microbatch=2", Precision::Bf16);
    check_kept_casts("cpu:2", "dp=2,zero=1", Precision::Fp16);
    check_kept_casts("cpu:4", "dp=4,zero=3,recompute=full", Precision::Bf16);
    check_kept_casts("cpu:4", "dp=2,tp=2,zero=2,microbatch=1", Precision::Bf16);
    check_kept_casts("cpu:2", "pp=2,schedule=1f1b,microbatch=1", Precision::Bf16);
    check_kept_casts("cpu:2", "dp=2,zero=1", Precision::Fp8);
    check_kept_casts("cpu:4", "dp=4,zero=3,recompute=full", Precision::Fp8);
}

#[test]
fn free_choice() {
    check_both("cpu:4", "");
}

/// The gradients of the first step: without clipping, a tenth of each is in the first moment.
#[track_caller]
fn check_gradients(name: &str, cluster: &str, pins: &str) {
    let dir = fixture(name);
    let model = NamedModel::find(dir.to_str().unwrap()).unwrap();
    let data = open_batches(&dir.join("batches.safetensors")).unwrap();
    let (batch, seq) = data.shape().unwrap();
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let mut options = options(pins);
    options.optimizer.clip_grad_norm = None;
    let compiled = shardc::compile(&model, Batch { batch, seq }, &cluster, &options).unwrap();
    let weights = model.weights().unwrap();
    let mut trainer = compiled.start(weights.as_ref(), training(1)).unwrap();
    trainer.step(data.batch(0, &compiled.model.inputs).unwrap()).unwrap();
    let saved = tempfile::tempdir().unwrap();
    hf::save(saved.path(), &model.config, &hf::Beside::default(), |name| {
        let moment = trainer.gather(&format!("{name}.m")).unwrap();
        let gradient: Vec<f32> = floats(&moment.bytes).into_iter().map(|value| value / (1.0 - 0.9)).collect();
        Ok(HostTensor::from_f32(moment.ty.shape, &gradient))
    })
    .unwrap();
    let (actual, expected) =
        (fs::read(saved.path().join("model.safetensors")).unwrap(), fs::read(dir.join("grads.safetensors")).unwrap());
    let (actual, expected) = (SafeTensors::deserialize(&actual).unwrap(), SafeTensors::deserialize(&expected).unwrap());
    for (tensor, view) in expected.iter() {
        let (mine, theirs) = (floats(actual.tensor(tensor).unwrap().data()), floats(view.data()));
        let largest = theirs.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        for (mine, theirs) in mine.iter().zip(&theirs) {
            assert!((mine - theirs).abs() <= 1e-4 * largest, "{name} {pins} {tensor}: {mine}, expected {theirs}");
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn gradients_of_the_first_step() {
    for name in ["llama", "gpt2"] {
        check_gradients(name, "cpu:1", "");
        check_gradients(name, "cpu:4", "tp=2,dp=2,zero=1");
    }
}

/// Three data ranks times two tensor ranks, where little divides.
#[test]
fn odd_sizes_equal_one_device() {
    let mut config = LlamaConfig::new([3, 96, 6, 2, 160, 320]);
    config.tied = true;
    let model = NamedModel::from_config("odd", Config::Llama(config));
    let run = |cluster: &str, pins: &str| {
        let cluster = Cluster::parse(cluster, "h200").unwrap();
        let compiled = shardc::compile(&model, Batch { batch: 3, seq: 24 }, &cluster, &options(pins)).unwrap();
        let tokens = |step: u64| (0..72u64).map(|at| ((at * 7919 + step * 104_729) % 320) as i64).collect::<Vec<_>>();
        let weights = model.weights().unwrap();
        let mut trainer = compiled.start(weights.as_ref(), training(10)).unwrap();
        let feed = |step| Arc::new(HostTensor::from_i64([3, 24], &tokens(step)));
        let batch = |step| compiled.model.inputs.iter().map(|(name, _)| (name.clone(), feed(step))).collect();
        (0..10).map(|step| trainer.step(batch(step)).unwrap()).collect::<Vec<_>>()
    };
    let expected = run("cpu:1", "");
    for pins in ["dp=3,tp=2", "dp=3,tp=2,zero=3", "dp=3,tp=2,zero=1,recompute=full"] {
        for (step, expected) in run("cpu:6", pins).iter().zip(&expected) {
            close(&format!("{pins} loss {}", step.step), step.loss, expected.loss, 1e-4);
            close(&format!("{pins} norm {}", step.step), step.grad_norm, expected.grad_norm, 1e-3);
        }
    }
}
