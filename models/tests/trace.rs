//! Tracing modules of one's own.

use burn::module::{Module, Param};
use burn::nn::activation::{RRelu, RReluConfig};
use burn::nn::conv::{Conv3d, Conv3dConfig};
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, GaussianNoise, GaussianNoiseConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use shardc_ir::{DType, Op, OpDef, TensorType};
use shardc_models::dropout::DropoutConfig;
use shardc_models::{Dropout, Model, TraceError, trace};

fn names(model: &Model) -> Vec<String> {
    let parameters = model.graph.leaves().filter_map(|(_, node)| match &node.op {
        Op::Parameter(p) => Some(format!("{}{}", p.name, if p.frozen { " frozen" } else { "" })),
        _ => None,
    });
    parameters.collect()
}

fn operations(model: &Model) -> Vec<&str> {
    model.graph.nodes().map(|(_, node)| node).filter(|node| !node.op.is_leaf()).map(|node| node.op.name()).collect()
}

#[derive(Module, Debug)]
struct Everything {
    table: Embedding,
    hidden: Linear,
    shared: Param<Tensor<2>>,
    again: Param<Tensor<2>>,
    fixed: Param<Tensor<1>>,
    given: Param<Tensor<1>>,
    idle: Linear,
    dropout: Dropout,
}

fn everything(device: &Device) -> Everything {
    let linear = LinearConfig::new(4, 4);
    let hidden = linear.init(device);
    let shared = hidden.weight.clone();
    let given = Tensor::<1>::from_data(TensorData::from([1.0f32, 2.0, 3.0, 4.0]), device);
    Everything {
        table: EmbeddingConfig::new(10, 4).init(device),
        again: shared.clone(),
        shared,
        hidden,
        fixed: burn::nn::Initializer::Ones.init([4], device).set_require_grad(false),
        given: Param::from_tensor(given),
        idle: linear.init(device),
        dropout: DropoutConfig::new(0.25).init(),
    }
}

#[test]
fn leaves() {
    let model = trace("everything", everything, |model, batch| {
        let ids = batch.int("ids", [2, 3]);
        let keep = batch.bool("keep", [2, 3]);
        let weight = batch.float("weight", [2, 3]);
        let x = model.hidden.forward(model.table.forward(ids));
        let x = model.dropout.forward(x).matmul(model.again.val().unsqueeze());
        let x = x * model.fixed.val().unsqueeze() + model.given.val().unsqueeze();
        let x = x.sum_dim(2).reshape([2, 3]) * weight;
        x.mask_fill(keep.bool_not(), 0.0).mean()
    })
    .unwrap();
    let expect = ["table.weight", "hidden.weight", "hidden.bias", "fixed frozen", "given", "idle.weight", "idle.bias"];
    assert_eq!(names(&model), expect);
    assert_eq!(model.unused, ["idle.weight", "idle.bias"]);
    let tied = [("shared", "hidden.weight"), ("again", "hidden.weight")];
    assert_eq!(model.tied, tied.map(|(name, owner)| (name.to_string(), owner.to_string())));
    assert_eq!(model.parameters, 40 + 20 + 4 + 20);
    assert_eq!(model.values.keys().collect::<Vec<_>>(), ["given"]);
    let inputs = [("ids", DType::I64), ("keep", DType::Bool), ("weight", DType::F32)];
    let inputs = inputs.map(|(name, dtype)| (name.to_string(), TensorType::new(dtype, [2, 3])));
    assert_eq!(model.inputs, inputs);
    let initialisers: Vec<&str> = model.init.outputs.iter().map(|output| output.name.as_str()).collect();
    assert_eq!(initialisers, ["table.weight", "hidden.weight", "hidden.bias", "fixed", "idle.weight", "idle.bias"]);
    // Dropout reads the number of the step, and those of the samples.
    let random = model.graph.nodes().map(|(_, node)| node).find(|node| matches!(node.op, Op::Random(_))).unwrap();
    assert_eq!(random.operands.len(), 2);
    let loss = model.graph.find_output("loss").unwrap();
    assert_eq!(model.graph.ty(loss.value), &TensorType::scalar(DType::F32));
}

#[test]
fn streams_are_unique() {
    let model = trace("streams", everything, |model, _| model.hidden.weight.val().sum()).unwrap();
    let streams = model.init.nodes().filter_map(|(_, node)| match &node.op {
        Op::Random(random) => Some(random.stream),
        _ => None,
    });
    let mut streams: Vec<u64> = streams.collect();
    let count = streams.len();
    streams.sort_unstable();
    streams.dedup();
    assert_eq!((streams.len(), count), (5, 5));
}

#[derive(Module, Debug)]
struct Unsupported {
    inner: Inner,
    last: Linear,
}

#[derive(Module, Debug)]
struct Inner {
    conv: Conv3d,
}

#[test]
fn every_unsupported_operation_is_listed() {
    let init = |device: &Device| Unsupported {
        inner: Inner { conv: Conv3dConfig::new([3, 3], [1, 1, 1]).init(device) },
        last: LinearConfig::new(8, 8).init(device),
    };
    let error = trace("unsupported", init, |model, batch| {
        let x = model.inner.conv.forward(batch.float("x", [2, 3, 1, 1, 8]));
        let y = model.last.forward(x);
        y.clone().atan2(y).mean()
    });
    let Err(TraceError::Unsupported(list)) = error else { panic!("{error:?}") };
    let list: Vec<(&str, &str)> = list.iter().map(|op| (op.operation.as_str(), op.path.as_str())).collect();
    assert_eq!(list, [("conv3d", "inner.conv"), ("arc_tan2", "")]);
}

#[derive(Module, Debug)]
struct Dropping {
    layer: Linear,
    dropout: burn::nn::Dropout,
}

#[test]
fn mistakes_of_the_user() {
    let init = |device: &Device| LinearConfig::new(4, 4).init(device);
    let error = trace("shapes", init, |model, batch| model.forward(batch.float("x", [2, 5])).mean());
    assert!(matches!(&error, Err(TraceError::Module(message)) if message.contains("expected 4")), "{error:?}");
    assert!(!error.unwrap_err().to_string().contains("the last layer"));
    // Where the author's own code stops it, and behind which layer it or Burn's does.
    let layers = |device: &Device| vec![LinearConfig::new(4, 4).init(device), LinearConfig::new(5, 4).init(device)];
    let error = trace("shapes", layers, |layers, batch| {
        layers.iter().fold(batch.float("x", [2, 4]), |x, layer: &Linear| layer.forward(x)).mean()
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("; the last layer that had run by then is `0`"), "{text}");
    let own = |layers: &Vec<Linear>, batch: &mut shardc_models::Batch| {
        layers[batch.float("x", [2, 4]).dims()[1]].forward(batch.float("y", [2, 4])).mean()
    };
    let text = trace("own", layers, own).unwrap_err().to_string();
    assert!(text.contains("the index is 4; at models/tests/trace.rs:1"), "{text}");
    let error = trace("scalar", init, |model, batch| model.forward(batch.float("x", [2, 4])).flatten::<1>(0, 1));
    assert!(matches!(&error, Err(TraceError::Module(message)) if message.contains("one number")), "{error:?}");
    let error =
        trace("twice", init, |model, batch| model.forward(batch.float("x", [2, 4]) + batch.float("x", [2, 4])).mean());
    assert!(matches!(&error, Err(TraceError::Module(message)) if message.contains("twice")), "{error:?}");
    let error = trace("of a parameter", init, |model, batch| model.forward(batch.float("bias", [2, 4])).mean());
    let words = "`bias` is the name of a parameter and of an input";
    assert!(matches!(&error, Err(TraceError::Module(message)) if message.contains(words)), "{error:?}");
    let error = trace("no name", init, |model, batch| model.forward(batch.float("", [2, 4])).mean());
    assert!(matches!(&error, Err(TraceError::Module(message)) if message.contains("empty name")), "{error:?}");
    let init = |probability: f64| {
        move |device: &Device| Dropping {
            layer: LinearConfig::new(4, 4).init(device),
            dropout: burn::nn::DropoutConfig::new(probability).init(),
        }
    };
    let loss = |model: &Dropping, batch: &mut shardc_models::Batch| {
        model.dropout.forward(model.layer.forward(batch.float("x", [2, 4]))).mean()
    };
    let error = trace("dropping", init(0.1), loss);
    assert!(matches!(&error, Err(TraceError::SilentDropout(paths)) if paths[..] == ["dropout"]), "{error:?}");
    assert!(trace("dropping", init(0.0), loss).is_ok());
    let error = trace(
        "reading",
        |device: &Device| LinearConfig::new(4, 4).init(device),
        |model, batch| {
            let ids = batch.int("ids", [2]).one_hot::<2>(4).float();
            model.forward(ids).mean()
        },
    );
    assert!(
        matches!(&error, Err(TraceError::Module(message)) if message.contains("in place of `one_hot`")),
        "{error:?}"
    );
}

/// Layers of Burn's own display nothing of the dropouts within.
#[test]
fn dropouts_within_layers_are_found() {
    let check = |probability: f64| {
        trace(
            "encoder",
            |device| TransformerEncoderConfig::new(4, 8, 2, 1).with_dropout(probability).init(device),
            |model, batch| model.forward(TransformerEncoderInput::new(batch.float("x", [2, 3, 4]))).mean(),
        )
    };
    let error = check(0.1);
    let expect = ["layers.0.mha.dropout", "layers.0.pwff.dropout", "layers.0.dropout"];
    assert!(matches!(&error, Err(TraceError::SilentDropout(paths)) if paths[..] == expect), "{error:?}");
    assert!(check(0.0).is_ok());
}

#[derive(Module, Debug)]
struct Noisy {
    noise: GaussianNoise,
    slope: RRelu,
    silent: GaussianNoise,
}

#[test]
fn noise_that_would_be_lost() {
    let init = |_: &Device| Noisy {
        noise: GaussianNoiseConfig::new(0.1).init(),
        slope: RReluConfig::new().init(),
        silent: GaussianNoiseConfig::new(0.0).init(),
    };
    let error = trace("noisy", init, |model, batch| {
        model.silent.forward(model.slope.forward(model.noise.forward(batch.float("x", [2, 3])))).mean()
    });
    assert!(matches!(&error, Err(TraceError::SilentNoise(paths)) if paths[..] == ["noise", "slope"]), "{error:?}");
}

/// What a loss of a picture `[2, 4, 6, 8]` becomes.
#[track_caller]
fn check_picture(loss: impl FnOnce(Tensor<4>) -> Tensor<4>, expect: &str) {
    let init = |device: &Device| LinearConfig::new(4, 4).with_bias(false).init(device);
    let model = trace("check", init, |_, batch| loss(batch.float("x", [2, 4, 6, 8])).sum()).unwrap();
    assert_eq!(operations(&model).join(" "), format!("{expect} reduce_sum"));
}

#[test]
fn pictures() {
    use burn::tensor::module::{adaptive_avg_pool2d, avg_pool2d, interpolate};
    use burn::tensor::ops::{AvgPoolOptions, InterpolateMode, InterpolateOptions};
    let overlapping = AvgPoolOptions::new([3, 3]).with_stride([1, 1]).with_padding([1, 1]);
    check_picture(|x| adaptive_avg_pool2d(x, [1, 1]), "reshape reduce_sum affine");
    check_picture(|x| avg_pool2d(x, AvgPoolOptions::new([2, 2])), "reshape reduce_sum affine");
    check_picture(|x| avg_pool2d(x, overlapping), "constant transpose convolution transpose");
    let nearest =
        |size| InterpolateOptions { output_size: Some(size), ..InterpolateOptions::new(InterpolateMode::Nearest) };
    check_picture(|x| interpolate(x, nearest([12, 16])), "broadcast reshape");
    let init = |device: &Device| LinearConfig::new(4, 4).init(device);
    let cubic = InterpolateOptions { output_size: Some([9, 8]), ..InterpolateOptions::new(InterpolateMode::Bicubic) };
    let error = trace("cubic", init, |_, batch| interpolate(batch.float("x", [2, 4, 6, 8]), cubic).sum());
    assert!(matches!(error, Err(TraceError::Unsupported(_))), "{error:?}");
}

/// What a loop writes into a tensor step by step is joined once.
#[test]
fn steps_are_joined_once() {
    let init = |device: &Device| LinearConfig::new(4, 4).with_bias(false).init(device);
    let model = trace("steps", init, |model, batch| {
        let x = batch.float("x", [2, 4]);
        let mut all = Tensor::<3>::empty([2, 3, 4], &x.device());
        for step in 0..3 {
            let next = model.forward(x.clone() * (step as f32 + 2.0)).unsqueeze_dim(1);
            all = all.slice_assign([0..2, step..step + 1, 0..4], next);
        }
        all.clone().slice([0..2, 1..2, 0..4]).sum() + all.sum()
    });
    let model = model.unwrap();
    let made = operations(&model);
    assert_eq!(made.iter().filter(|name| **name == "concat").count(), 1, "{made:?}");
    assert!(!made.contains(&"slice"), "{made:?}");
}

/// A normalization that trains takes the statistics of the batch, as under Burn's autodiff; a frozen one its
/// own.
#[test]
fn batch_norms() {
    use burn::nn::{BatchNorm, BatchNormConfig};
    let traced = |init: fn(&Device) -> BatchNorm| {
        trace("norm", init, |norm: &BatchNorm, batch| norm.forward(batch.float("x", [2, 4, 6, 8])).sum()).unwrap()
    };
    let trained = traced(|device| BatchNormConfig::new(4).init(device));
    assert_eq!(names(&trained)[2..], ["running_mean frozen", "running_var frozen"]);
    assert_eq!(trained.parameters, 8);
    let sums = operations(&trained).iter().filter(|name| **name == "reduce_sum").count();
    assert_eq!(sums, 3, "the mean, the variance and the loss");
    let frozen = traced(|device| BatchNormConfig::new(4).init(device).freeze());
    assert_eq!(operations(&frozen).iter().filter(|name| **name == "reduce_sum").count(), 1);
}

#[track_caller]
fn check(loss: impl FnOnce(Tensor<3>) -> Tensor<1>, expect: &str) {
    let init = |device: &Device| LinearConfig::new(4, 4).with_bias(false).init(device);
    let model = trace("check", init, |_, batch| loss(batch.float("x", [2, 3, 4]))).unwrap();
    assert_eq!(operations(&model).join(" "), expect);
}

#[test]
fn simplifies() {
    use burn::tensor::activation::{gelu, gelu_approximate, log_softmax, silu, softmax};
    check(|x| gelu_approximate(x).sum(), "gelu_tanh reduce_sum");
    check(|x| gelu(x).sum(), "gelu reduce_sum");
    check(|x| silu(x).sum(), "silu reduce_sum");
    check(|x| softmax(x, 2).sum(), "softmax reduce_sum");
    check(|x| softmax(x, 1).sum(), "transpose softmax transpose reduce_sum");
    check(|x| log_softmax(x, 2).mean(), "reduce_max broadcast sub exp reduce_sum log broadcast sub reduce_sum affine");
    check(|x| ((x * 2.0 + 1.0) * 3.0).sum(), "affine reduce_sum");
    // What rounds its operand does so still, and a divisor whose reciprocal no float32 holds divides.
    check(|x| ((x + 8388608.0) - 8388608.0).sum(), "affine affine reduce_sum");
    check(|x| ((x * 1e30) * 1e30).sum(), "affine affine reduce_sum");
    check(|x| (x / 1e-40).sum(), "constant div reduce_sum");
    check(|x| x.swap_dims(0, 1).swap_dims(0, 1).sum(), "reduce_sum");
    check(|x| x.clone().matmul(x.swap_dims(1, 2)).sum(), "matmul reduce_sum");
    check(|x| x.powf_scalar(2.0).sum().sqrt(), "mul reduce_sum sqrt");
    check(|x| x.slice([0..1, 0..3, 0..4]).repeat_dim(0, 2).sum(), "slice reshape broadcast reduce_sum");
    check(|x| x.var(2).sum(), "reduce_sum affine broadcast sub mul reduce_sum affine reduce_sum");
}
