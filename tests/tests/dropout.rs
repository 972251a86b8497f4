//! A model that drops elements at random trains alike under every family of plans: the same ones in every step.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use shardc::{Batch, Cluster, Decay, Feeds, FromInitialisers, LearningRate, Options, Precision, TrainOptions};
use shardc_ir::HostTensor;
use shardc_ir::ops::Op;
use shardc_models::dropout::{Dropout, DropoutConfig};
use shardc_models::{Model, TraceError, trace};

const WIDTH: usize = 16;
const BATCH: Batch = Batch { batch: 4, seq: 8 };

#[derive(Module, Debug)]
struct Block {
    up: Linear,
    down: Linear,
    dropout: Dropout,
}

#[derive(Module, Debug)]
struct Perceptron {
    blocks: Vec<Block>,
    head: Linear,
    dropout: Dropout,
}

impl Perceptron {
    fn new(device: &Device) -> Self {
        let dropout = || DropoutConfig::new(0.25).init();
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let block = || Block { up: linear(WIDTH, 4 * WIDTH), down: linear(4 * WIDTH, WIDTH), dropout: dropout() };
        Self { blocks: (0..2).map(|_| block()).collect(), head: linear(WIDTH, WIDTH), dropout: dropout() }
    }

    fn loss(&self, x: Tensor<3>, target: Tensor<3>) -> Tensor<1> {
        let [batch, seq, width] = x.dims();
        let mut x = x;
        for block in &self.blocks {
            let hidden = block.dropout.forward(gelu(block.up.forward(x.clone())));
            x = x + block.dropout.forward(block.down.forward(hidden));
        }
        // Tokens as rows, of which each sample has several.
        let rows = self.dropout.forward(x.reshape([batch * seq, width]));
        let error = self.head.forward(rows).reshape([batch, seq, width]) - target;
        (error.clone() * error).mean()
    }
}

fn perceptron(batch: Batch) -> Result<Model, TraceError> {
    let shape = [batch.batch as usize, batch.seq as usize, WIDTH];
    trace("perceptron", Perceptron::new, move |model, inputs| {
        let (x, target) = (inputs.float("x", shape), inputs.float("target", shape));
        model.loss(x, target)
    })
}

fn inputs() -> Feeds {
    let shape = [BATCH.batch, BATCH.seq, WIDTH as u64];
    let numbers = |scale: f32| -> Vec<f32> {
        (0..shape.iter().product::<u64>()).map(|index| (index as f32 * scale).sin()).collect()
    };
    [("x", 0.7), ("target", 0.3)]
        .map(|(name, scale)| (name.to_string(), HostTensor::from_f32(shape, &numbers(scale)).into()))
        .into()
}

/// The losses of some steps with the same inputs.
#[track_caller]
fn losses(cluster: &str, pins: &str, rate: f64) -> Vec<f64> {
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let options = Options { precision: Some(Precision::Fp32), pins: pins.to_string(), ..Options::default() };
    let compiled =
        shardc::compile(&perceptron, BATCH, &cluster, &options).unwrap_or_else(|error| panic!("{pins}: {error}"));
    let choice = &compiled.plan().choice;
    assert!(pins.split(',').all(|pin| choice.contains(pin)), "{pins} gave {choice}");
    let is_random = |op: &Op| matches!(op, Op::Random(_));
    assert!(compiled.plan().graph.nodes().filter(|(_, node)| is_random(&node.op)).count() >= 5);
    let learning_rate = LearningRate { rate, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: 4 };
    let mut trainer = compiled.start(&FromInitialisers, TrainOptions { learning_rate, seed: 1 }).unwrap();
    (0..4).map(|_| trainer.step(inputs()).unwrap().loss).collect()
}

#[test]
fn every_plan_drops_the_same_elements() {
    let whole = losses("cpu:1", "", 1e-2);
    for (cluster, pins) in [
        ("cpu:1", "microbatch=1"),
        ("cpu:1", "recompute=block"),
        ("cpu:2", "dp=2,zero=1"),
        ("cpu:2", "dp=2,zero=3,microbatch=1"),
        ("cpu:2", "tp=2"),
        ("cpu:2", "tp=2,microbatch=2"),
        ("cpu:2", "tp=2,overlap_chunks=2"),
        ("cpu:4", "dp=2,tp=2,overlap_chunks=2"),
        ("cpu:4", "pp=2,tp=2,overlap_chunks=2"),
        ("cpu:2", "pp=2,schedule=1f1b,microbatch=1"),
        ("cpu:2", "cp=2"),
    ] {
        let losses = losses(cluster, pins, 1e-2);
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-5 * b;
        assert!(losses.iter().zip(&whole).all(is_near), "{pins}: {losses:?}, on one rank {whole:?}");
    }
}

#[test]
fn every_step_drops_other_elements() {
    let losses = losses("cpu:1", "", 0.0);
    assert!(losses.windows(2).all(|pair| pair[0] != pair[1]), "{losses:?}");
}
