//! What models of one's own compute in 16 bits is what they compute in f32, but for the rounding of 16 bits: sums, squares,
//! logarithms and masks too, in whatever way the loss is put together.

use burn::module::{Module, Param};
use burn::nn::loss::{BinaryCrossEntropyLossConfig, MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{sigmoid, softmax, softplus};
use burn::tensor::{Bool, Device, Tensor, TensorData};
use shardc::{Batch, Cluster, Decay, Feeds, FromInitialisers, LearningRate, Options, Precision, TrainOptions};
use shardc_ir::{DType, HostTensor};
use shardc_models::{Model, TraceError, trace};

const WIDTH: usize = 32;
const ROWS: usize = 16;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
    one: Linear,
    words: Linear,
    scale: Param<Tensor<1>>,
    anchor: Param<Tensor<1>>,
    norm: BatchNorm,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |to| LinearConfig::new(WIDTH, to).init(device);
        let numbers = |scale: f32| {
            let numbers: Vec<f32> = (0..WIDTH).map(|at| 1.0 + scale * (at as f32 * 1.7).sin()).collect();
            Param::from_tensor(Tensor::from_data(TensorData::new(numbers, [WIDTH]), device))
        };
        Self {
            first: linear(WIDTH),
            second: linear(WIDTH),
            one: linear(1),
            words: linear(512),
            scale: numbers(0.1),
            anchor: numbers(0.099),
            norm: BatchNormConfig::new(WIDTH).init(device),
        }
    }
}

/// A loss of a network and its inputs, of so many samples.
type Loss = fn(&Net, &mut shardc_models::Batch, usize) -> Tensor<1>;

/// Activations `[samples, ROWS, WIDTH]`.
fn hidden(net: &Net, inputs: &mut shardc_models::Batch, samples: usize) -> Tensor<3> {
    net.first.forward(inputs.float("x", [samples, ROWS, WIDTH]))
}

/// A mask `[samples, ROWS]` that hides all of the second sample.
fn whole_sample(samples: usize, device: &Device) -> Tensor<2, Bool> {
    let hidden = (0..samples * ROWS).map(|at| at / ROWS == 1 || at % 5 == 0).collect::<Vec<bool>>();
    Tensor::from_bool(TensorData::new(hidden, [samples, ROWS]), device)
}

/// What is pooled by weights of scores.
fn pooled(x: Tensor<3>, scores: Tensor<2>) -> Tensor<1> {
    let [samples, ..] = x.dims();
    (x * softmax(scores, 1).reshape([samples, ROWS, 1])).sum_dim(1).square().mean()
}

fn inputs(model: &Model) -> Feeds {
    let number = |at: u64| ((at as f64 * 0.7391).sin() * 1.3 + (at as f64 * 0.0137).cos() * 0.4) as f32;
    let of = |ty: &shardc_ir::TensorType| match ty.dtype {
        DType::F32 => HostTensor::from_f32(ty.shape.clone(), &(0..ty.elements()).map(number).collect::<Vec<_>>()),
        _ => HostTensor::from_i64(ty.shape.clone(), &(0..ty.elements()).map(|at| (at % 2) as i64).collect::<Vec<_>>()),
    };
    model.inputs.iter().map(|(name, ty)| (name.clone(), of(ty).into())).collect()
}

/// Losses and gradient norms of two steps.
fn steps(loss: Loss, precision: Precision, samples: u64) -> Vec<[f64; 2]> {
    let model = move |batch: Batch| -> Result<Model, TraceError> {
        let samples = batch.batch as usize;
        trace("net", Net::new, move |net, inputs| loss(net, inputs, samples))
    };
    let (batch, cluster) = (Batch { batch: samples, seq: 1 }, Cluster::parse("cpu:1", "h200").unwrap());
    let options = Options { precision: Some(precision), pins: format!("microbatch={samples}"), ..Options::default() };
    let compiled = shardc::compile(&model, batch, &cluster, &options).unwrap();
    let learning_rate = LearningRate { rate: 1e-3, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: 2 };
    let mut trainer = compiled.start(&FromInitialisers, TrainOptions { learning_rate, seed: 1 }).unwrap();
    let batch = inputs(&compiled.model);
    let mut step = || trainer.step(batch.clone()).map(|step| [step.loss, step.grad_norm]);
    (0..2).map(|_| step().unwrap_or_else(|error| panic!("{}: {error}", precision.name()))).collect()
}

/// Within so many hundredths in bf16, and an eighth of that in fp16, which has three bits more.
#[track_caller]
fn check(loss: Loss, samples: u64, percent: f64) {
    let exact = steps(loss, Precision::Fp32, samples);
    for (precision, within) in [(Precision::Bf16, percent), (Precision::Fp16, percent / 8.0)] {
        let rounded = steps(loss, precision, samples);
        let is_near = |(a, b): (&f64, &f64)| (b / a - 1.0).abs() < within / 100.0;
        let near = exact.iter().flatten().zip(rounded.iter().flatten()).all(is_near);
        assert!(near, "in {}: {rounded:?}, in f32 {exact:?}", precision.name());
    }
}

/// Gradients of any loss stay within fp16: what a mean divides by, the chain rule does.
#[test]
fn losses_of_several_terms() {
    for loss in [
        (|net, i, n| {
            let x = hidden(net, i, n);
            x.clone().square().mean() + net.second.forward(x).square().mean()
        }) as Loss,
        |net, i, n| {
            let x = hidden(net, i, n);
            x.clone().square().sum() * 1e-3 - net.second.forward(x).mean()
        },
        |net, i, n| net.scale.val().square().mean() * 0.01 + hidden(net, i, n).square().mean(),
        |net, i, n| hidden(net, i, n).square().mean().sqrt(),
        |net, i, n| hidden(net, i, n).square().mean().log(),
    ] {
        check(loss, 512, 4.0);
    }
}

#[test]
fn squares_of_large_numbers() {
    check(
        |net, i, n| {
            let x = net.norm.forward((hidden(net, i, n) * 300.0).swap_dims(1, 2));
            net.second.forward(x.swap_dims(1, 2).tanh()).square().mean()
        },
        8,
        4.0,
    );
    check(
        |net, i, n| {
            let target = i.float("y", [n, ROWS, WIDTH]) * 300.0;
            MseLoss::new().forward(hidden(net, i, n), target, Reduction::Mean)
        },
        8,
        4.0,
    );
    check(
        |net, i, n| {
            let x = hidden(net, i, n) * 500.0;
            let size = (x.clone().square().sum_dim(2) + 1e-12).sqrt();
            (x / size + net.scale.val().reshape([1, 1, WIDTH])).square().mean()
        },
        8,
        4.0,
    );
}

/// A sample of which all is hidden gives the mean, as it does in f32.
#[test]
fn a_row_that_is_hidden_whole() {
    for loss in [
        (|net, i, n| {
            let x = hidden(net, i, n);
            let scores = net.one.forward(x.clone()).reshape([n, ROWS]);
            pooled(x.clone(), scores.mask_fill(whole_sample(n, &x.device()), f32::MIN))
        }) as Loss,
        |net, i, n| {
            let x = hidden(net, i, n);
            let scores = net.one.forward(x.clone()).reshape([n, ROWS]);
            pooled(x.clone(), scores.mask_fill(whole_sample(n, &x.device()), -1e9))
        },
        |net, i, n| {
            let x = hidden(net, i, n);
            let scores = net.one.forward(x.clone()).reshape([n, ROWS]);
            let mask = i.int("mask", [n, ROWS]).greater_elem(-1).float() * f32::MIN;
            pooled(x, scores + mask)
        },
        |net, i, n| {
            let x = hidden(net, i, n);
            let scores = net.one.forward(x.clone()).reshape([n, ROWS]);
            let mask = i.int("mask", [n, 1]).float() * -1e9;
            pooled(x, scores + mask)
        },
    ] {
        check(loss, 4, 4.0);
    }
}

#[test]
fn running_sums() {
    check(
        |net, i, n| {
            let x = sigmoid(net.one.forward(net.first.forward(i.float("x", [n, 1024, WIDTH])))).reshape([n, 1024]);
            let sums = x.cumsum(1);
            let steps = sums.clone().slice([0..n, 1..1024]) - sums.slice([0..n, 0..1023]);
            (steps - 0.7).square().mean()
        },
        2,
        4.0,
    );
}

#[test]
fn what_parameters_make_by_themselves() {
    check(
        |net, i, n| {
            let own = (net.scale.val() - net.anchor.val()).square().sum() * 10.0;
            (hidden(net, i, n) * net.scale.val().reshape([1, 1, WIDTH])).square().mean() * 1e-3 + own
        },
        4,
        4.0,
    );
    check(
        |net, i, n| {
            let times = i.float("times", [n, ROWS, 1]) * 100.0;
            net.second.forward((times * net.scale.val().reshape([1, 1, WIDTH])).sin()).square().mean()
        },
        4,
        4.0,
    );
}

#[test]
fn logarithms_of_what_is_nearly_nothing() {
    check(|net, i, n| softmax(net.words.forward(hidden(net, i, n)) * 8.0, 2).log().mean().neg(), 4, 4.0);
    check(|net, i, n| (softmax(net.words.forward(hidden(net, i, n)) * 8.0, 2) + 1e-8).log().mean().neg(), 4, 4.0);
    check(
        |net, i, n| {
            let x = softplus(net.one.forward(hidden(net, i, n)) * 4.0, 1.0).reshape([n * ROWS]) + 4.0;
            let labels = i.int("labels", [n * ROWS]);
            BinaryCrossEntropyLossConfig::new().init(&x.device()).forward(sigmoid(x), labels)
        },
        4,
        4.0,
    );
}
