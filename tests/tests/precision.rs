//! Training in bf16 follows training in f32: the same model, weights and batches.

use shardc::{Batch, Cluster, Decay, LearningRate, NamedModel, Options, Precision, StepMetrics, TrainOptions};
use shardc_ir::HostTensor;
use std::collections::BTreeMap;

const BATCH: Batch = Batch { batch: 4, seq: 32 };
const STEPS: u64 = 10;

/// Sequences that count upwards in strides, which differ by row and step.
fn tokens(step: u64) -> BTreeMap<String, HostTensor> {
    let token = |row: u64, at: u64| ((7 * row + 3 * step + at * (1 + row)) % 256) as i64;
    let ids: Vec<i64> = (0..BATCH.batch).flat_map(|row| (0..BATCH.seq).map(move |at| token(row, at))).collect();
    let ids = HostTensor::from_i64([BATCH.batch, BATCH.seq], &ids);
    BTreeMap::from([("input_ids".into(), ids.clone()), ("labels".into(), ids)])
}

fn train(precision: Precision) -> Vec<StepMetrics> {
    let model = NamedModel::find("llama-tiny").unwrap();
    let cluster = Cluster::parse("cpu:1", "h200").unwrap();
    let options = Options { precision, ..Options::default() };
    let compiled = shardc::compile(&model, BATCH, &cluster, &options).unwrap();
    let learning_rate = LearningRate { rate: 1e-3, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: STEPS };
    let weights = model.weights().unwrap();
    let mut trainer = compiled.start(weights.as_ref(), TrainOptions { learning_rate, seed: 1 }).unwrap();
    (0..STEPS).map(|step| trainer.step(tokens(step)).unwrap()).collect()
}

/// bf16 keeps 8 bits, so one rounding is off by up to 0.4%; a loss is a mean of many.
#[test]
fn bf16_follows_f32() {
    let (exact, rounded) = (train(Precision::Fp32), train(Precision::Bf16));
    let mut equal = 0;
    for (a, b) in exact.iter().zip(&rounded) {
        let error = |a: f64, b: f64| (b / a - 1.0).abs();
        assert!(error(a.loss, b.loss) < 0.01, "step {}: loss {} in f32, {} in bf16", a.step, a.loss, b.loss);
        let norms = (a.grad_norm, b.grad_norm);
        assert!(error(norms.0, norms.1) < 0.05, "step {}: norm {} in f32, {} in bf16", a.step, norms.0, norms.1);
        equal += usize::from(a.loss == b.loss);
    }
    assert!(equal < exact.len(), "bf16 changed nothing");
    let (first, last) = (exact[0].loss, exact[exact.len() - 1].loss);
    assert!(last < 0.9 * first, "it must learn for this to say anything: {first} to {last}");
}
