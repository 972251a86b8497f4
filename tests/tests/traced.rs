//! Burn's operations, traced, against Burn: the loss and every gradient of a small module around each, in f32.

#[path = "common/derivatives.rs"]
mod derivatives;

use burn::module::{Module, Param};
use burn::nn::conv::{ConvTranspose1d, ConvTranspose1dConfig};
use burn::nn::interpolate::{Interpolate2dConfig, InterpolateMode};
use burn::nn::pool::{
    AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AvgPool1dConfig, AvgPool2dConfig, MaxPool1dConfig,
    MaxPool2dConfig,
};
use burn::nn::{Initializer, PaddingConfig1d, PaddingConfig2d};
use burn::tensor::activation::{leaky_relu, log_sigmoid, log_softmax, softmax};
use burn::tensor::ops::PadMode;
use burn::tensor::{Bool, Device, IndexingUpdateOp, Int, Tensor, TensorData, s};
use derivatives::{compare, floats, ours};
use shardc_ir::{DType, Graph, HostTensor, Op, ValueId};
use shardc_models::{detach, trace};
use shardc_passes::precision::{Precision, lower_precision};
use shardc_passes::raise::raise;
use std::collections::BTreeMap;

const SHAPE: [usize; 3] = [4, 6, 8];

/// A factor for each number, so that gradients differ everywhere.
#[derive(Module, Debug)]
struct Factors {
    factors: Param<Tensor<3>>,
    up: ConvTranspose1d,
}

fn init(device: &Device) -> Factors {
    let factors = Initializer::Uniform { min: 0.5, max: 1.5 }.init(SHAPE, device);
    let up = ConvTranspose1dConfig::new([6, 4], 3).with_stride(2).with_padding(1).with_padding_out(1);
    Factors { factors, up: up.init(device) }
}

/// Numbers between -1 and 1 of which no two are equal.
fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|at| (at as f32 * 0.618_034).fract() * 2.0 - 1.0).collect()
}

fn ids() -> Vec<i64> {
    (0..24).map(|at| (at * 7 + at / 5) % 5).collect()
}

/// A mean in which every element has a weight of its own.
fn weighted<const D: usize>(y: Tensor<D>) -> Tensor<1> {
    let shape = y.dims();
    let weights: Vec<f32> = (0..shape.iter().product()).map(|at: usize| (at * 37 % 101) as f32 / 50.0 - 0.9).collect();
    let weights = Tensor::<D>::from_data(TensorData::new(weights, shape), &y.device());
    (y * weights).mean()
}

#[track_caller]
fn check<const D: usize>(name: &str, f: impl Fn(&Factors, Tensor<3>, Tensor<2, Int>) -> Tensor<D>) -> Graph {
    let device = Device::flex().autodiff();
    let module = init(&device);
    let x = Tensor::<3>::from_data(TensorData::new(numbers(192), SHAPE), &device);
    let labels = Tensor::<2, Int>::from_data(TensorData::new(ids(), [4, 6]), &device);
    let loss = weighted(f(&module, x * module.factors.val(), labels));
    let theirs: f32 = loss.clone().into_scalar();
    let gradients = loss.backward();
    let model = trace(name, init, |module, batch| {
        let (x, ids) = (batch.float("x", SHAPE), batch.int("ids", [4, 6]));
        weighted(f(module, x * module.factors.val(), ids))
    });
    let model = model.unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut leaves = BTreeMap::from([
        ("x".to_string(), HostTensor::from_f32(SHAPE.map(|size| size as u64), &numbers(192))),
        ("ids".to_string(), HostTensor::from_i64([4, 6], &ids())),
    ]);
    let mut expect = BTreeMap::new();
    let bias = module.up.bias.as_ref().unwrap();
    let (factors, filters) = (module.factors.val(), module.up.weight.val());
    let mut put = |name: &str, value: TensorData, gradient: Option<TensorData>| {
        let shape: Vec<u64> = value.shape().iter().map(|size| *size as u64).collect();
        leaves.insert(name.to_string(), HostTensor::from_f32(shape, &value.try_to_vec::<f32>().unwrap()));
        expect.extend(gradient.map(|gradient| (name.to_string(), gradient.try_to_vec::<f32>().unwrap())));
    };
    put("factors", factors.to_data(), factors.grad(&gradients).map(Tensor::into_data));
    put("up.weight", filters.to_data(), filters.grad(&gradients).map(Tensor::into_data));
    put("up.bias", bias.val().to_data(), bias.val().grad(&gradients).map(Tensor::into_data));
    let raised = raise(&model.graph).unwrap().0;
    let made = shardc_runtime::interpret(&raised, &leaves).unwrap();
    let made = floats(&made["loss"])[0];
    assert!((made - theirs).abs() <= 1e-5 * theirs.abs().max(1e-2), "{name}: the loss is {made}, Burn says {theirs}");
    compare(name, &ours(&raised, &leaves), &expect);
    raised
}

#[test]
fn elements_at_regular_places() {
    check("flip", |_, x, _| x.flip([0, 2]));
    check("every second", |_, x, _| x.slice(s![.., 1..;2, ..;3]));
    check("in reverse", |_, x, _| x.slice(s![.., ..;-1, 1..7;-2]));
    check("rotary halves", |_, x, _| {
        let (even, odd) = (x.clone().slice(s![.., .., ..;2]), x.slice(s![.., .., 1..;2]));
        Tensor::stack::<4>(vec![-odd, even], 3).reshape(SHAPE)
    });
    check("windows", |_, x, _| x.unfold::<4, _>(1, 3, 2));
    check("mirrored", |_, x, _| x.pad((2, 1, 0, 3), PadMode::Reflect));
    check("border repeated", |_, x, _| x.pad((2, 1, 0, 3), PadMode::Edge));
    check("written step by step", |_, x, _| {
        let (mut all, mut state) = (Tensor::<3>::ones(SHAPE, &x.device()), x.clone().sum_dim(1));
        for step in [1, 0, 4, 2] {
            state = (state + x.clone().slice([0..4, step..step + 1, 0..8])).tanh();
            all = all.slice_assign([0..4, step..step + 1, 0..8], state.clone());
        }
        all.clone().slice([0..4, 1..4, 0..8]) * all.clone().slice([0..4, 3..6, 0..8]) + all.slice([0..4, 0..1, 0..8])
    });
    check("parts of what is joined", |_, x, _| {
        let all = Tensor::cat(vec![x.clone(), x.clone().sin(), x.clone() * 2.0], 1);
        all.clone().slice([0..4, 3..15, 0..8]).narrow(1, 2, 6)
            * all.slice([0..3, 6..12, 0..8]).repeat_dim(0, 4).narrow(0, 1, 4)
    });
    check("rows added", |_, x, ids| {
        Tensor::<2>::zeros([5, 8], &x.device()).select_assign(
            0,
            ids.reshape([24]),
            x.reshape([24, 8]),
            IndexingUpdateOp::Add,
        )
    });
}

#[test]
fn elements_in_order() {
    check("argmax", |_, x, _| x.clone() * x.argmax(2).float());
    check("argmin", |_, x, _| x.clone() * x.argmin(1).float());
    check("largest and where", |_, x, _| {
        let (most, at) = x.max_dim_with_indices(2);
        most * (at.float() + 1.0)
    });
    check("smallest and where", |_, x, _| {
        let (least, at) = x.min_dim_with_indices(1);
        least * (at.float() + 1.0)
    });
    check("sorted", |_, x, _| x.sort(2));
    check("sorted down", |_, x, _| x.sort_descending(1));
    check("order", |_, x, _| {
        let (sorted, order) = x.sort_with_indices(2);
        sorted * order.float()
    });
    check("product", |_, x, _| (x + 1.0).prod_dim(1));
    check("product of all", |_, x, _| (x * 0.05 + 1.0).prod());
    check("running product", |_, x, _| (x + 1.5).cumprod(1));
    check("running largest", |_, x, _| x.cummax(2));
    check("running smallest", |_, x, _| x.cummin(1));
    check("hypotenuse", |_, x, _| x.clone().hypot(x + 3.0));
}

#[test]
fn pools() {
    let picture = |x: Tensor<3>| x.reshape([4, 3, 4, 4]);
    check("max 1-d", |_, x, _| MaxPool1dConfig::new(2).init().forward(x));
    check("max rounded up", |_, x, _| {
        MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_ceil_mode(true).init().forward(picture(x))
    });
    let padding = PaddingConfig1d::Explicit(1, 1);
    for counts in [true, false] {
        let config = AvgPool1dConfig::new(3).with_stride(1).with_padding(padding.clone());
        check("average 1-d", |_, x, _| config.clone().with_count_include_pad(counts).init().forward(x));
        let config = AvgPool2dConfig::new([3, 2]).with_strides([2, 2]).with_ceil_mode(true);
        let config = config.with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).with_count_include_pad(counts);
        check("average rounded up", |_, x, _| config.clone().init().forward(picture(x)));
    }
    check("adaptive 1-d", |_, x, _| AdaptiveAvgPool1dConfig::new(4).init().forward(x));
    check("adaptive of parts that overlap", |_, x, _| AdaptiveAvgPool2dConfig::new([3, 3]).init().forward(picture(x)));
    check("transposed convolution 1-d", |module, x, _| module.up.forward(x));
}

#[test]
fn resizing() {
    for (mode, aligned) in
        [(InterpolateMode::Nearest, true), (InterpolateMode::Linear, true), (InterpolateMode::Linear, false)]
    {
        for size in [[8, 8], [2, 2], [5, 7]] {
            let config = Interpolate2dConfig::new().with_mode(mode.clone()).with_align_corners(aligned);
            let layer = config.with_output_size(Some(size)).init();
            check("resized", |_, x, _| layer.forward(x.reshape([4, 3, 4, 4])));
        }
    }
}

#[test]
fn detached() {
    check("a target", |_, x, _| x.clone() * detach(x.clone().sin()) + x);
    check("straight through", |_, x, _| (x.clone() + detach(x.clone().sign() - x.clone())) * x);
}

/// Derivatives at the places where a function bends, and values where others have lost their digits.
#[test]
fn activations_where_they_bend() {
    check("log sigmoid", |_, x, _| log_sigmoid(x * 40.0));
    check("log sigmoid at zero", |_, x, _| log_sigmoid(x.clone() - detach(x)));
    check("leaky relu", |_, x, _| leaky_relu(x, 0.1));
    check("sinh", |_, x, _| x.sinh());
    check("hypot", |_, x, _| x.clone().hypot(x.flip([2]) + 0.5));
    check("hypot of what has no square", |_, x, _| (x.clone() * 1e25).hypot(x.flip([2]) * 1e25) * 1e-25);
    check("sinh near zero", |_, x, _| (x * 1e-4).sinh() * 1e4);
    let zeros = |x: Tensor<3>| leaky_relu(x.clone() - detach(x), 0.25);
    let model = trace("zeros", init, |module, batch| zeros(batch.float("x", SHAPE) * module.factors.val()).mean());
    let x = HostTensor::from_f32(SHAPE.map(|size| size as u64), &numbers(192));
    let leaves = BTreeMap::from([("x".to_string(), x.clone()), ("factors".to_string(), x)]);
    let slopes = ours(&raise(&model.unwrap().graph).unwrap().0, &leaves);
    // As in PyTorch, the slope of the lower side.
    for (made, x) in slopes["factors"].iter().zip(numbers(192)) {
        assert!((made - 0.25 * x / 192.0).abs() < 1e-7, "{made} at {x}");
    }
}

/// A logarithm of a softmax that is no cross-entropy is made in f32 of the 16 bits that logits have.
#[test]
fn logarithms_of_softmax_are_wide() {
    let model = trace("smoothed", init, |module, batch| {
        let logits = (batch.float("x", SHAPE) * module.factors.val()).matmul(batch.float("w", [4, 8, 8]));
        weighted(log_softmax(logits, 2))
    });
    let raised = raise(&model.unwrap().graph).unwrap().0;
    let lowered = lower_precision(&raised, Precision::Bf16).unwrap();
    let made =
        |op: &str| lowered.nodes().filter(|(_, node)| node.op.name() == op).map(|(_, node)| node.results[0]).collect();
    let differences: Vec<ValueId> = made("sub");
    assert_eq!(differences.len(), 2);
    assert!(differences.iter().all(|value| lowered.ty(*value).dtype == DType::F32), "{lowered}");
}

/// Scores of two heads of four numbers, some hidden by a mask of their own or pushed away by a number, are not kept.
#[test]
fn masked_attention() {
    type Scores<'a> = &'a dyn Fn(Tensor<4>, Tensor<2, Int>) -> Tensor<4>;
    let cases: [(&str, Scores<'_>); 4] = [
        ("padding", &|scores, ids| scores.mask_fill(ids.equal_elem(0).reshape([4, 1, 1, 6]), -1e4)),
        ("padding of each query", &|scores, ids| {
            let pairs = ids.clone().reshape([4, 6, 1]).equal(ids.reshape([4, 1, 6]));
            scores.mask_fill(pairs.bool_not().unsqueeze_dim::<4>(1), f32::NEG_INFINITY)
        }),
        ("how far away", &|scores, _| {
            let device = scores.device();
            let at = Tensor::<1, Int>::arange(0..6, &device).float();
            let far = (at.clone().reshape([1, 1, 6, 1]) - at.reshape([1, 1, 1, 6])).abs();
            let slopes = Tensor::<4>::from_data(TensorData::new(vec![0.5f32, 0.25], [1, 2, 1, 1]), &device);
            scores - far * slopes
        }),
        ("later and padding", &|scores, ids| {
            let later = Tensor::<2, Bool>::tril_mask([6, 6], 0, &scores.device()).reshape([1, 1, 6, 6]);
            let scores = scores.mask_fill(later, -1e9);
            // The first token is never padding.
            let at = Tensor::<1, Int>::arange(0..6, &scores.device()).reshape([1, 6]).greater_elem(0);
            scores.mask_fill(ids.equal_elem(1).bool_and(at.expand([4, 6])).reshape([4, 1, 1, 6]), -1e9)
        }),
    ];
    for (name, hide) in cases {
        let graph = check(name, |_, x, ids| {
            let heads = x.reshape([4, 6, 2, 4]).swap_dims(1, 2);
            let scores = heads.clone().matmul(heads.clone().transpose()) * 0.5;
            let weights = softmax(hide(scores, ids), 3);
            weights.matmul(heads).swap_dims(1, 2).reshape([4, 6, 8])
        });
        let attention = |op: &Op| matches!(op, Op::Attention(_));
        assert_eq!(graph.nodes().filter(|(_, node)| attention(&node.op)).count(), 1, "{name}: {graph}");
    }
}
