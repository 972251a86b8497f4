//! A model of the user's own, trained on ranks, saved under the names of its modules and read again.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use shardc::{
    Batch, Cluster, Compiled, Decay, Feeds, FromInitialisers, LearningRate, Options, TrainOptions, Weights,
    saved_weights,
};
use shardc_ir::HostTensor;
use shardc_models::{Model, TraceError};
use std::fs;
use std::ops::ControlFlow;

#[derive(Module, Debug)]
struct Net {
    encoder: Linear,
    norm: LayerNorm,
    head: Linear,
}

const TRAINING: TrainOptions = TrainOptions {
    learning_rate: LearningRate { rate: 1e-2, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: 3 },
    seed: 7,
};

fn compiled(cluster: &str, pins: &str, width: usize) -> Compiled {
    let trace = |batch: Batch| -> Result<Model, TraceError> {
        let size = batch.batch as usize;
        shardc_models::trace(
            "net",
            |device| Net {
                encoder: LinearConfig::new(6, width).init(device),
                norm: LayerNormConfig::new(width).init(device),
                head: LinearConfig::new(width, 4).init(device),
            },
            |net, inputs| {
                let x = net.norm.forward(relu(net.encoder.forward(inputs.float("x", [size, 6]))));
                let logits = net.head.forward(x);
                let labels = inputs.int("labels", [size]);
                CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
            },
        )
    };
    let options = Options { pins: pins.to_string(), ..Options::default() };
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    shardc::compile(&trace, Batch { batch: 8, seq: 0 }, &cluster, &options).unwrap()
}

fn batch(step: u64) -> Feeds {
    let x: Vec<f32> = (0..48).map(|at| ((at * 7 + step * 5) % 11) as f32 / 11.0 - 0.5).collect();
    let labels: Vec<i64> = (0..8).map(|row| ((row + step) % 4) as i64).collect();
    Feeds::from([
        ("x".to_string(), HostTensor::from_f32([8, 6], &x).into()),
        ("labels".to_string(), HostTensor::from_i64([8], &labels).into()),
    ])
}

fn losses(compiled: &Compiled, weights: &dyn Weights) -> Vec<f64> {
    let mut losses = Vec::new();
    let observe = |step: &shardc::StepMetrics| {
        losses.push(step.loss);
        ControlFlow::Continue(())
    };
    compiled.train(weights, TRAINING, |step| Ok(batch(step)), observe).unwrap();
    losses
}

/// Parts of which the last are shorter, or empty, are saved as what they are of the whole.
#[test]
fn a_model_in_uneven_parts_is_saved_and_read() {
    let (dir, whole) = (tempfile::tempdir().unwrap(), compiled("cpu:1", "", 9));
    for pins in ["dp=4,zero=3", "dp=4,zero=1,microbatch=1", "dp=2,tp=2,zero=2,microbatch=1"] {
        let spread = compiled("cpu:4", pins, 9);
        let slots = || spread.programs().unwrap().iter().flat_map(|program| &program.slots);
        let lengths: Vec<u64> = slots().filter(|slot| slot.name == "norm.gamma").map(|slot| slot.slice[0].1).collect();
        assert!(lengths.iter().any(|length| *length != lengths[0]), "{pins}: {lengths:?}");
        let mut trainer =
            spread.train(&FromInitialisers, TRAINING, |step| Ok(batch(step)), |_| ControlFlow::Continue(())).unwrap();
        trainer.save(dir.path()).unwrap();
        let (trained, weights) = (trainer.parameters().unwrap(), saved_weights(dir.path(), &whole.model).unwrap());
        for (name, tensor) in &trained {
            assert_eq!(weights.read_whole(name).unwrap(), *tensor, "{pins}: {name}");
        }
        for (spread, whole) in losses(&spread, &weights).into_iter().zip(losses(&whole, &trained)) {
            assert!((spread - whole).abs() < 1e-4 * whole.abs(), "{pins}: {spread} for {whole}");
        }
    }
}

#[test]
fn a_model_of_ones_own_is_saved_and_read() {
    let dir = tempfile::tempdir().unwrap();
    let spread = compiled("cpu:2", "dp=2,zero=3", 16);
    let mut trainer =
        spread.train(&FromInitialisers, TRAINING, |step| Ok(batch(step)), |_| ControlFlow::Continue(())).unwrap();
    trainer.save(dir.path()).unwrap();
    let description = fs::read_to_string(dir.path().join("shardc.json")).unwrap();
    for words in ["\"model\": \"net\"", "\"encoder.weight\": \"f32[6,16]\"", "\"norm.gamma\": \"f32[16]\""] {
        assert!(description.contains(words), "{description}");
    }
    // On another plan they are the same weights: training goes on alike.
    let trained = trainer.parameters().unwrap();
    let whole = compiled("cpu:1", "", 16);
    let weights = saved_weights(dir.path(), &whole.model).unwrap();
    for (name, tensor) in &trained {
        assert_eq!(weights.read_whole(name).unwrap(), *tensor, "{name}");
    }
    assert_eq!(losses(&whole, &weights), losses(&whole, &trained));
    assert!(losses(&whole, &weights)[0] < losses(&whole, &FromInitialisers)[0], "it learned nothing");
    // Another model does not take them.
    let other = compiled("cpu:1", "", 8);
    let error = saved_weights(dir.path(), &other.model).map(drop).unwrap_err();
    assert!(error.to_string().contains("`encoder.weight` is f32[6,16]; the model has it as f32[6,8]"), "{error}");
    assert_eq!(error.exit_code(), 2);
}
