//! Running statistics of batch normalization are, under every plan, those that Burn's own layer keeps under its autodiff.

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor, TensorData};
use shardc::{Batch, Cluster, Decay, FromInitialisers, LearningRate, Options, Precision, TrainOptions};
use shardc_ir::HostTensor;
use shardc_models::{Model, TraceError, trace};
use std::collections::BTreeMap;

const WIDTH: usize = 8;
const SAMPLES: usize = 8;
const SHAPE: [usize; 3] = [SAMPLES, WIDTH, 3];
const STEPS: usize = 3;
const STATISTICS: [&str; 6] = [
    "first.running_mean",
    "first.running_var",
    "shared.running_mean",
    "shared.running_var",
    "frozen.running_mean",
    "frozen.running_var",
];

/// A norm by itself, one that two values pass, and one that does not train.
#[derive(Module, Debug)]
struct Net {
    first: BatchNorm,
    linear: Linear,
    shared: BatchNorm,
    frozen: BatchNorm,
}

impl Net {
    fn new(device: &Device) -> Self {
        let norm = |momentum| BatchNormConfig::new(WIDTH).with_momentum(momentum).with_epsilon(1e-3).init(device);
        let weight = TensorData::new(numbers(WIDTH * WIDTH, 0.3), [WIDTH, WIDTH]);
        let mut linear = LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
        linear.weight = Param::from_tensor(Tensor::from_data(weight, device));
        Self { first: norm(0.1), linear, shared: norm(0.7), frozen: norm(0.2).freeze() }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<1> {
        let x = self.first.forward(x);
        let y = self.linear.forward(x.clone().swap_dims(1, 2)).swap_dims(1, 2);
        let x = self.shared.forward(gelu(y)) + self.shared.forward(x);
        self.frozen.forward(x).square().mean()
    }
}

fn numbers(count: usize, phase: f64) -> Vec<f32> {
    (0..count).map(|at| ((at as f64 * 0.7391 + phase).sin() * 1.3 + phase) as f32).collect()
}

fn batch(step: usize) -> Vec<f32> {
    numbers(SHAPE.iter().product(), step as f64)
}

/// What Burn's layers hold after the steps.
fn expected() -> BTreeMap<&'static str, Vec<f32>> {
    let device = Device::flex().autodiff();
    let net = Net::new(&device);
    for step in 0..STEPS {
        net.forward(Tensor::from_data(TensorData::new(batch(step), SHAPE), &device));
    }
    let norms = [&net.first, &net.shared, &net.frozen];
    let values = norms.into_iter().flat_map(|norm| [&norm.running_mean, &norm.running_var]);
    let values = values.map(|value| value.value_sync().into_data().try_to_vec().unwrap());
    STATISTICS.into_iter().zip(values).collect()
}

/// What a plan's ranks hold after the same steps, in which no weight moves.
fn found(cluster: &str, pins: &str, precision: Precision) -> BTreeMap<&'static str, Vec<f32>> {
    let model = |batch: Batch| -> Result<Model, TraceError> {
        let shape = [batch.batch as usize, SHAPE[1], SHAPE[2]];
        trace("net", Net::new, move |net, inputs| net.forward(inputs.float("x", shape)))
    };
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let options = Options { precision: Some(precision), pins: pins.to_string(), ..Options::default() };
    let size = Batch { batch: SAMPLES as u64, seq: 0 };
    let compiled = shardc::compile(&model, size, &cluster, &options).unwrap_or_else(|error| panic!("{pins}: {error}"));
    let learning_rate = LearningRate { rate: 0.0, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: 3 };
    let mut trainer = compiled.start(&FromInitialisers, TrainOptions { learning_rate, seed: 1 }).unwrap();
    for step in 0..STEPS {
        let x = HostTensor::from_f32(SHAPE.map(|size| size as u64), &batch(step));
        trainer.step([("x".to_string(), x.into())].into()).unwrap();
    }
    let floats =
        |value: HostTensor| value.bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    STATISTICS.into_iter().map(|name| (name, floats(trainer.gather(name).unwrap()))).collect()
}

#[track_caller]
fn check(cluster: &str, pins: &str, precision: Precision, tolerance: f32) {
    let (found, expected) = (found(cluster, pins, precision), expected());
    for (name, expected) in &expected {
        let is_near = |(a, b): (&f32, &f32)| (a - b).abs() < tolerance * (1.0 + b.abs());
        let found = &found[name];
        assert!(found.iter().zip(expected).all(is_near), "{pins}, `{name}`: {found:?}, not {expected:?}");
    }
}

#[test]
fn running_statistics_are_those_of_the_layer() {
    let kept = expected();
    assert!(kept["frozen.running_var"].iter().all(|value| *value == 1.0), "{kept:?}");
    assert!(kept["first.running_mean"].iter().all(|value| *value != 0.0), "{kept:?}");
    for (cluster, pins) in [
        ("cpu:1", "microbatch=8"),
        ("cpu:1", "microbatch=8,recompute=block"),
        ("cpu:2", "dp=2,zero=1"),
        ("cpu:4", "dp=4,zero=3"),
        ("cpu:2", "tp=2"),
        ("cpu:4", "dp=2,tp=2,zero=3"),
    ] {
        check(cluster, pins, Precision::Fp32, 1e-5);
    }
}

#[test]
fn running_statistics_stay_in_f32() {
    check("cpu:2", "dp=2", Precision::Bf16, 2e-2);
    check("cpu:1", "microbatch=8", Precision::Fp16, 4e-3);
}

/// A module that does not print its layers does not tell the momentum either.
#[test]
fn a_momentum_that_is_not_known_is_refused() {
    #[derive(Module)]
    struct Silent {
        norm: BatchNorm,
    }
    impl std::fmt::Debug for Silent {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Silent")
        }
    }
    let init = |device: &Device| Silent { norm: BatchNormConfig::new(4).init(device) };
    let error = trace("silent", init, |model, inputs| {
        let x: Tensor<2> = inputs.float("x", [8, 4]);
        model.norm.forward(x).square().mean()
    });
    let message = error.unwrap_err().to_string();
    assert!(message.contains("`norm`") && message.contains("derive `Debug`"), "{message}");
}
