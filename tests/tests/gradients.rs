//! Our derivatives against Burn's autodiff, in f32: one case per operation, and random graphs.
//!
//! A case is the text of a few nodes that make `%y`, and the same computation in Burn. The loss is
//! the sum of `y` weighted by random numbers. Gradients agree within 1e-5 of the largest.

#[path = "common/derivatives.rs"]
mod derivatives;

use burn::tensor::{Device, Gradients, Int, Tensor, TensorData, activation};
use derivatives::{compare, floats, ours};
use proptest::prelude::*;
use shardc_ir::ops::{Binary, BinaryKind, Input, Matmul, Parameter, Reduce, ReduceOp, Transpose, Unary, UnaryKind};
use shardc_ir::{DType, Graph, HostTensor, Op, OutputKind, TensorType, ValueId};
use std::collections::BTreeMap;

type Read = Box<dyn Fn(&Gradients) -> Vec<f32>>;

/// The leaves of a case, as Burn's tensors.
struct Leaves {
    device: Device,
    host: BTreeMap<String, HostTensor>,
    read: BTreeMap<String, Read>,
}

impl Leaves {
    fn tensor<const D: usize>(&self, name: &str) -> Tensor<D> {
        let host = &self.host[name];
        let shape: Vec<usize> = host.ty.shape.iter().map(|size| *size as usize).collect();
        Tensor::from_data(TensorData::new(floats(host), shape), &self.device)
    }

    /// A parameter.
    fn p<const D: usize>(&mut self, name: &str) -> Tensor<D> {
        let tensor = self.tensor::<D>(name).require_grad();
        let leaf = tensor.clone();
        let read = move |gradients: &Gradients| leaf.grad(gradients).map(|g| g.into_data().try_to_vec().unwrap());
        self.read.insert(name.to_string(), Box::new(move |gradients| read(gradients).unwrap_or_default()));
        tensor
    }

    /// An integer input.
    fn ids<const D: usize>(&self, name: &str) -> Tensor<D, Int> {
        let host = &self.host[name];
        let shape: Vec<usize> = host.ty.shape.iter().map(|size| *size as usize).collect();
        let values: Vec<i64> = host.bytes.chunks(8).map(|x| i64::from_le_bytes(x.try_into().unwrap())).collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }
}

/// Numbers in `-1..1`, or in `0.3..1.8` for leaves whose name starts with `pos`; ids below 3.
fn leaf_values(graph: &Graph) -> BTreeMap<String, HostTensor> {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let mut leaves = BTreeMap::new();
    for (value, node) in graph.leaves() {
        let name = match &node.op {
            Op::Input(op) => op.name.clone(),
            Op::Parameter(op) => op.name.clone(),
            _ => continue,
        };
        let ty = graph.ty(value);
        let count = ty.elements();
        let tensor = if ty.dtype == DType::I64 {
            HostTensor::from_i64(ty.shape.clone(), &(0..count).map(|_| (next() * 3.0) as i64).collect::<Vec<_>>())
        } else {
            let positive = name.starts_with("pos");
            let value = |x: f32| if positive { 0.3 + 1.5 * x } else { 2.0 * x - 1.0 };
            HostTensor::from_f32(ty.shape.clone(), &(0..count).map(|_| value(next())).collect::<Vec<_>>())
        };
        leaves.insert(name, tensor);
    }
    leaves
}

/// Compares the gradients of the sum of `%y`, weighted, with Burn's.
fn check<const D: usize>(case: &str, body: &str, burn: impl Fn(&mut Leaves) -> Tensor<D>) {
    let made = body.lines().map(str::trim).find(|line| line.starts_with("%y")).unwrap();
    let ty = made.split_once(": ").unwrap().1.split_once(" = ").unwrap().0.split(", %").next().unwrap();
    let dims: Vec<String> = (0..D).map(|dim| dim.to_string()).collect();
    let text = format!(
        "graph @case {{\n{body}\n  %c: {ty} = input \"c\"\n  %weighted: {ty} = mul %y, %c\n  \
         %loss: f32[] = reduce_sum %weighted {{dims=[{}]}}\n  return loss %loss\n}}\n",
        dims.join(",")
    );
    let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{case}:\n{text}\n{error}"));
    let host = leaf_values(&graph);
    let mut leaves = Leaves { device: Device::flex().autodiff(), host, read: BTreeMap::new() };
    let y = burn(&mut leaves);
    let gradients = (y * leaves.tensor::<D>("c")).sum().backward();
    let theirs = leaves.read.iter().map(|(name, read)| (name.clone(), read(&gradients))).collect();
    compare(case, &ours(&graph, &leaves.host), &theirs);
}

#[test]
fn unary() {
    type F = fn(Tensor<2>) -> Tensor<2>;
    let any: [(&str, F); 13] = [
        ("neg", |x| -x),
        ("abs", |x| x.abs()),
        ("exp", |x| x.exp()),
        ("sin", |x| x.sin()),
        ("cos", |x| x.cos()),
        ("tanh", |x| x.tanh()),
        ("erf", |x| x.erf()),
        ("sigmoid", activation::sigmoid),
        ("relu", activation::relu),
        ("gelu", activation::gelu),
        ("gelu_tanh", activation::gelu_approximate),
        ("silu", activation::silu),
        ("recip", |x| x.recip()),
    ];
    let positive: [(&str, F); 4] =
        [("log", |x| x.log()), ("log1p", |x| x.log1p()), ("sqrt", |x| x.sqrt()), ("rsqrt", |x| x.sqrt().recip())];
    for (name, f) in any.into_iter().chain(positive) {
        let leaf = if positive.iter().any(|(other, _)| *other == name) { "pos" } else { "a" };
        let body = format!("%a: f32[3,4] = parameter \"{leaf}\"\n%y: f32[3,4] = {name} %a");
        check::<2>(name, &body, |leaves| f(leaves.p(leaf)));
    }
    let body = "%a: f32[3,4] = parameter \"a\"\n%y: f32[3,4] = affine %a {offset=3.0, scale=-2.0}";
    check::<2>("affine", body, |leaves| leaves.p::<2>("a") * -2.0 + 3.0);
}

#[test]
fn binary() {
    type F = fn(Tensor<2>, Tensor<2>) -> Tensor<2>;
    let all: [(&str, F); 7] = [
        ("add", |a, b| a + b),
        ("sub", |a, b| a - b),
        ("mul", |a, b| a * b),
        ("div", |a, b| a / b),
        ("pow", |a, b| a.powf(b)),
        ("max", |a, b| a.max_pair(b)),
        ("min", |a, b| a.min_pair(b)),
    ];
    for (name, f) in all {
        let leaves = "%a: f32[3,4] = parameter \"pos_a\"\n%b: f32[3,4] = parameter \"pos_b\"\n";
        check::<2>(name, &format!("{leaves}%y: f32[3,4] = {name} %a, %b"), |l| f(l.p("pos_a"), l.p("pos_b")));
        if matches!(name, "mul" | "div" | "add") {
            let leaves =
                "%a: f32[3,4] = parameter \"pos_a\"\n%b: f32[1] = parameter \"pos_b\"\n%s: f32[] = reshape %b\n";
            let body = format!("{leaves}%y: f32[3,4] = {name} %a, %s");
            check::<2>(&format!("{name} by a scalar"), &body, |l| {
                f(l.p("pos_a"), l.p::<1>("pos_b").reshape([1, 1]).expand([3, 4]))
            });
        }
    }
    let body = "%a: f32[3,4] = parameter \"a\"\n%b: f32[3,4] = parameter \"b\"\n%m: bool[3,4] = gt %a, %b\n\
                %a2: f32[3,4] = mul %a, %a\n%y: f32[3,4] = select %m, %a2, %b";
    check::<2>("select", body, |l| {
        let (a, b) = (l.p::<2>("a"), l.p::<2>("b"));
        b.clone().mask_where(a.clone().greater(b), a.clone() * a)
    });
}

#[test]
fn layout() {
    let a = "%a: f32[2,3,4] = parameter \"a\"\n";
    check::<3>("transpose", &format!("{a}%y: f32[4,2,3] = transpose %a {{permutation=[2,0,1]}}"), |l| {
        l.p::<3>("a").permute([2, 0, 1])
    });
    check::<2>("reshape", &format!("{a}%y: f32[6,4] = reshape %a"), |l| l.p::<3>("a").reshape([6, 4]));
    check::<3>("broadcast", "%a: f32[2,1] = parameter \"a\"\n%y: f32[2,5,3] = broadcast %a {dims=[0,2]}", |l| {
        l.p::<2>("a").reshape([2, 1, 1]).expand([2, 5, 3])
    });
    check::<3>("slice", &format!("{a}%y: f32[2,2,3] = slice %a {{limit=[2,3,3], start=[0,1,0]}}"), |l| {
        l.p::<3>("a").slice([0..2, 1..3, 0..3])
    });
    check::<1>("pad", "%a: f32[3] = parameter \"a\"\n%y: f32[6] = pad %a {high=[2], low=[1], value=7.0}", |l| {
        let a = l.p::<1>("a");
        let device = l.device.clone();
        Tensor::cat(vec![Tensor::<1>::ones([1], &device), a, Tensor::<1>::ones([2], &device)], 0)
    });
    let two = "%a: f32[2,3] = parameter \"a\"\n%b: f32[2,1] = parameter \"b\"\n";
    check::<2>("concat", &format!("{two}%y: f32[2,4] = concat %a, %b {{dim=1}}"), |l| {
        Tensor::cat(vec![l.p::<2>("a"), l.p::<2>("b")], 1)
    });
    check::<2>("reduce_sum", &format!("{a}%y: f32[2,4] = reduce_sum %a {{dims=[1]}}"), |l| {
        l.p::<3>("a").sum_dim(1).reshape([2, 4])
    });
    check::<2>("reduce_max", &format!("{a}%y: f32[2,4] = reduce_max %a {{dims=[1]}}"), |l| {
        l.p::<3>("a").max_dim(1).reshape([2, 4])
    });
}

#[test]
fn lookups() {
    let body = "%t: f32[3,4] = parameter \"t\"\n%i: i64[2,5] = input \"i\"\n%y: f32[2,5,4] = embedding %t, %i";
    check::<3>("embedding", body, |l| l.p::<2>("t").select(0, l.ids::<2>("i").reshape([10])).reshape([2, 5, 4]));
    let body = "%t: f32[2,4] = parameter \"t\"\n%i: i64[2,5] = input \"i\"\n%y: f32[2,5] = gather %t, %i {dim=1}";
    check::<2>("gather", body, |l| l.p::<2>("t").gather(1, l.ids::<2>("i")));
    let body = "%l: f32[5,4] = parameter \"l\"\n%i: i64[5] = input \"i\"\n\
                %lse: f32[5], %picked: f32[5] = cross_entropy %l, %i\n%y: f32[5] = sub %lse, %picked";
    check::<1>("cross_entropy", body, |l| {
        let rows = activation::log_softmax(l.p::<2>("l"), 1);
        -rows.gather(1, l.ids::<1>("i").reshape([5, 1])).reshape([5])
    });
}

#[test]
fn ranked() {
    let x = "%x: f32[3,5] = parameter \"x\"\n";
    check::<2>("top_k", &format!("{x}%y: f32[3,2], %i: i64[3,2] = top_k %x {{k=2}}"), |l| {
        l.p::<2>("x").topk_with_indices(2, 1).0
    });
    check::<2>("cumsum", &format!("{x}%y: f32[3,5] = cumsum %x {{dim=1}}"), |l| l.p::<2>("x").cumsum(1));
}

#[test]
fn pictures() {
    use burn::tensor::module::{conv_transpose2d, conv2d, max_pool2d};
    use burn::tensor::ops::{ConvOptions, ConvTransposeOptions, MaxPoolOptions};
    let first = |x: Tensor<4>| x.permute([0, 3, 1, 2]);
    let last = |x: Tensor<4>| x.permute([0, 2, 3, 1]);
    let leaves = "%x: f32[2,6,5,4] = parameter \"x\"\n%w: f32[4,3,2,2] = parameter \"w\"\n";
    let attributes = "{stride=[2,1], low=[1,0], high=[1,0], dilation=[1,2], groups=2}";
    check::<4>("convolution", &format!("{leaves}%y: f32[2,3,3,4] = convolution %x, %w {attributes}"), |l| {
        let options = ConvOptions::new([2, 1], [1, 0], [1, 2], 2);
        last(conv2d(first(l.p("x")), first(l.p("w")), None, options))
    });
    let leaves = "%x: f32[2,3,3,4] = parameter \"x\"\n%w: f32[4,3,2,2] = parameter \"w\"\n";
    let body = format!("{leaves}%y: f32[2,6,5,4] = convolution_transpose %x, %w {attributes}");
    check::<4>("convolution_transpose", &body, |l| {
        let options = ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 2], 2);
        last(conv_transpose2d(first(l.p("x")), first(l.p("w")), None, options))
    });
    let body = "%x: f32[2,5,6,3] = parameter \"x\"\n\
                %y: f32[2,3,3,3] = max_pool %x {kernel=[3,2], stride=[2,2], low=[1,0], high=[1,0]}";
    check::<4>("max_pool", body, |l| {
        let options = MaxPoolOptions::new([3, 2]).with_stride([2, 2]).with_padding([1, 0]);
        last(max_pool2d(first(l.p("x")), options))
    });
}

#[test]
fn contractions() {
    let body = "%x: f32[2,3,4] = parameter \"x\"\n%w: f32[4,5] = parameter \"w\"\n\
                %y: f32[2,3,5] = matmul %x, %w {spec=\"bsk,kn->bsn\"}";
    check::<3>("linear", body, |l| l.p::<3>("x").matmul(l.p::<2>("w").unsqueeze()));
    let body = "%q: f32[2,3,4,5] = parameter \"q\"\n%k: f32[2,3,6,5] = parameter \"k\"\n\
                %y: f32[2,3,4,6] = matmul %q, %k {spec=\"bhsd,bhtd->bhst\"}";
    check::<4>("scores", body, |l| l.p::<4>("q").matmul(l.p::<4>("k").swap_dims(2, 3)));
}

#[test]
fn normalizations() {
    let body = "%x: f32[3,6] = parameter \"x\"\n%y: f32[3,6] = softmax %x";
    check::<2>("softmax", body, |l| activation::softmax(l.p::<2>("x"), 1));
    let body = "%x: f32[3,6] = parameter \"x\"\n%g: f32[6] = parameter \"g\"\n%b: f32[6] = parameter \"b\"\n\
                %y: f32[3,6], %mean: f32[3], %rstd: f32[3] = layer_norm %x, %g, %b {eps=0.01}";
    check::<2>("layer_norm", body, |l| {
        let x = l.p::<2>("x");
        let centred = x.clone() - x.mean_dim(1);
        let deviation = (centred.clone().powi_scalar(2).mean_dim(1) + 0.01).sqrt();
        centred / deviation * l.p::<1>("g").unsqueeze() + l.p::<1>("b").unsqueeze()
    });
    let body = "%x: f32[3,6] = parameter \"x\"\n%g: f32[6] = parameter \"g\"\n\
                %y: f32[3,6], %rstd: f32[3] = rms_norm %x, %g {eps=0.01}";
    check::<2>("rms_norm", body, |l| {
        let x = l.p::<2>("x");
        let size = (x.clone().powi_scalar(2).mean_dim(1) + 0.01).sqrt();
        x / size * l.p::<1>("g").unsqueeze()
    });
}

#[test]
fn transformer_parts() {
    let body = "%a: f32[3,4] = parameter \"a\"\n%b: f32[3,4] = parameter \"b\"\n%y: f32[3,4] = swiglu %a, %b";
    check::<2>("swiglu", body, |l| activation::silu(l.p::<2>("a")) * l.p::<2>("b"));
    let body = "%x: f32[2,3,2,4] = parameter \"x\"\n%cos: f32[3,2] = input \"cos\"\n%sin: f32[3,2] = input \"sin\"\n\
                %y: f32[2,3,2,4] = rotary %x, %cos, %sin";
    check::<4>("rotary", body, |l| {
        let (cos, sin) = (l.tensor::<2>("cos").reshape([1, 3, 1, 2]), l.tensor::<2>("sin").reshape([1, 3, 1, 2]));
        let halves = l.p::<4>("x").chunk(2, 3);
        let (x1, x2) = (halves[0].clone(), halves[1].clone());
        let first = x1.clone() * cos.clone() - x2.clone() * sin.clone();
        Tensor::cat(vec![first, x2 * cos + x1 * sin], 3)
    });
    for causal in [false, true] {
        let body = format!(
            "%q: f32[2,3,4,5] = parameter \"q\"\n%k: f32[2,3,2,5] = parameter \"k\"\n%v: f32[2,3,2,5] = parameter \"v\"\n\
             %y: f32[2,3,4,5], %lse: f32[2,4,3] = attention %q, %k, %v {{causal={causal}, scale=0.5}}"
        );
        check::<4>("attention", &body, |l| {
            let heads = |x: Tensor<4>| x.swap_dims(1, 2);
            let grouped =
                |x: Tensor<4>| heads(x).reshape([2, 2, 1, 3, 5]).expand([2, 2, 2, 3, 5]).reshape([2, 4, 3, 5]);
            let (q, k, v) = (heads(l.p("q")), grouped(l.p("k")), grouped(l.p("v")));
            let mut scores = q.matmul(k.swap_dims(2, 3)) * 0.5;
            if causal {
                let future = Tensor::<2>::ones([3, 3], &l.device).triu(1).equal_elem(1.0);
                scores = scores.mask_fill(future.reshape([1, 1, 3, 3]).expand([2, 4, 3, 3]), f32::NEG_INFINITY);
            }
            heads(activation::softmax(scores, 3).matmul(v))
        });
    }
}

/// One step of a random graph over `[4, 4]` matrices.
fn extend(graph: &mut Graph, values: &mut Vec<(ValueId, Tensor<2>)>, step: (u8, usize, usize)) {
    let pick = |index: usize| values[index % values.len()].clone();
    let ((a, x), (b, y)) = (pick(step.1), pick(step.2));
    let unary = |kind| Op::from(Unary { kind });
    let binary = |kind| Op::from(Binary { kind });
    let (op, operands, theirs) = match step.0 % 9 {
        0 => (binary(BinaryKind::Add), vec![a, b], x + y),
        1 => (binary(BinaryKind::Sub), vec![a, b], x - y),
        2 => (unary(UnaryKind::Tanh), vec![a], x.tanh()),
        3 => (Matmul::plain().into(), vec![a, b], x.matmul(y)),
        4 => (Matmul::new("mk,nk->mn").into(), vec![a, b], x.matmul(y.transpose())),
        5 => (Transpose { permutation: vec![1, 0] }.into(), vec![a], x.transpose()),
        6 => (unary(UnaryKind::Sigmoid), vec![a], activation::sigmoid(x)),
        7 => (shardc_ir::ops::Softmax {}.into(), vec![a], activation::softmax(x, 1)),
        _ => (shardc_ir::ops::Swiglu {}.into(), vec![a, b], activation::silu(x) * y),
    };
    let node = graph.add(op, &operands, &[]).unwrap();
    values.push((graph.result(node), theirs));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_graphs(steps in prop::collection::vec((any::<u8>(), any::<usize>(), any::<usize>()), 1..12)) {
        let mut graph = Graph::new("random");
        let ty = TensorType::new(DType::F32, [4, 4]);
        let mut ids = Vec::new();
        for name in ["a", "b", "c"] {
            let op: Op = if name == "c" {
                Input { name: name.into() }.into()
            } else {
                Parameter { name: name.into(), frozen: false }.into()
            };
            let node = graph.add(op, &[], std::slice::from_ref(&ty)).unwrap();
            ids.push(graph.result(node));
        }
        let device = Device::flex().autodiff();
        let mut leaves = Leaves { device, host: leaf_values(&graph), read: BTreeMap::new() };
        let mut values = vec![(ids[0], leaves.p::<2>("a")), (ids[1], leaves.p::<2>("b"))];
        for step in steps {
            extend(&mut graph, &mut values, step);
        }
        let (last, theirs) = values.pop().unwrap();
        let node = graph.add(Binary { kind: BinaryKind::Mul }, &[last, ids[2]], &[]).unwrap();
        let weighted = graph.result(node);
        let node = graph.add(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }, &[weighted], &[]).unwrap();
        let loss = graph.result(node);
        graph.output("loss", loss, OutputKind::Result);
        let gradients = (theirs * leaves.tensor::<2>("c")).sum().backward();
        let theirs = leaves.read.iter().map(|(name, read)| (name.clone(), read(&gradients))).collect();
        compare("random", &ours(&graph, &leaves.host), &theirs);
    }
}
