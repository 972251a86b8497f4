//! Passes that change neither the loss nor a gradient: a padded vocabulary, statistics that are made once.

use shardc_ir::{DType, Graph, HostTensor, Op, OutputKind, ValueId};
use shardc_passes::align::{align_head, align_weights};
use shardc_passes::differentiate::differentiate;
use shardc_passes::statistics::share_statistics;
use shardc_runtime::interpret;
use std::collections::BTreeMap;

const HEAD: &str = r#"graph @head {
  %x: f32[2,3,4] = input "x"
  %labels: i64[2,3] = input "labels"
  %g: f32[4] = parameter "norm.gamma"
  %w: f32[515,4] = parameter "embedding.weight"
  %h: f32[2,3,4], %rstd: f32[2,3] = rms_norm %x, %g {eps=1e-5}
  %logits: f32[2,3,515] = matmul %h, %w {spec="bsk,vk->bsv"}
  %lse: f32[2,3], %picked: f32[2,3] = cross_entropy %logits, %labels
  %rows: f32[2,3] = sub %lse, %picked
  %loss: f32[] = reduce_sum %rows {dims=[0,1]}
  return loss %loss
}"#;

/// A norm over samples whose differences are from so many means.
fn norm(means: f64) -> Graph {
    let text = r#"graph @norm {
  %x: f32[6,4] = input "x"
  %w: f32[4,5] = parameter "weight"
  %gamma: f32[5] = parameter "gamma"
  %beta: f32[5] = parameter "beta"
  %h: f32[6,5] = matmul %x, %w {spec="mk,kn->mn"}
  %s: f32[5] = reduce_sum %h {dims=[0]}
  %m: f32[5] = affine %s {offset=0, scale=MEAN}
  %mb: f32[6,5] = broadcast %m {dims=[1]}
  %c: f32[6,5] = sub %h, %mb
  %q: f32[6,5] = mul %c, %c
  %v: f32[5] = reduce_sum %q {dims=[0]}
  %e: f32[5] = affine %v {offset=0.00001, scale=0.16666666666666666}
  %r: f32[5] = rsqrt %e
  %g: f32[5] = mul %r, %gamma
  %gb: f32[6,5] = broadcast %g {dims=[1]}
  %n: f32[6,5] = mul %c, %gb
  %bb: f32[6,5] = broadcast %beta {dims=[1]}
  %y: f32[6,5] = add %n, %bb
  %a: f32[6,5] = gelu %y
  %loss: f32[] = reduce_sum %a {dims=[0,1]}
  return loss %loss
}"#;
    text.replace("MEAN", &format!("{:?}", means / 6.0)).parse().unwrap()
}

/// The graph that makes the loss and every gradient.
fn with_gradients(graph: &Graph) -> Graph {
    let made = differentiate(graph, "loss").unwrap();
    let mut graph = made.graph;
    let name = |leaf: ValueId| match &graph.def(leaf).op {
        Op::Parameter(parameter) => parameter.name.clone(),
        other => panic!("{} has no gradient", other.name()),
    };
    let gradients: Vec<_> = made.gradients.iter().map(|(leaf, value)| (name(*leaf), *value)).collect();
    gradients.into_iter().for_each(|(name, value)| graph.output(name, value, OutputKind::Result));
    graph
}

/// What a graph makes of leaves that are no multiples of each other.
fn outputs(graph: &Graph) -> BTreeMap<String, HostTensor> {
    let tensor = |value: ValueId| {
        let ty = graph.ty(value);
        if ty.dtype == DType::I64 {
            return HostTensor::from_i64([2, 3], &[0, 514, 7, -100, 300, 2]);
        }
        let values: Vec<f32> = (0..ty.elements()).map(|at| ((at * 37 % 101) as f32 / 50.0) - 1.0).collect();
        HostTensor::from_f32(ty.shape.clone(), &values)
    };
    let name = |op: &Op| match op {
        Op::Parameter(parameter) => parameter.name.clone(),
        Op::Input(input) => input.name.clone(),
        other => panic!("{} is no leaf", other.name()),
    };
    let leaves = graph.leaves().map(|(value, node)| (name(&node.op), tensor(value))).collect();
    interpret(graph, &leaves).unwrap()
}

/// Two graphs with the same outputs, so many of them.
fn same(graph: &Graph, other: &Graph, count: usize) {
    let (expected, made) = (outputs(graph), outputs(other));
    assert_eq!(made.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    assert_eq!(made.len(), count);
    for (name, expected) in expected {
        assert_eq!(made[&name].ty, expected.ty, "{name}");
        let (made, expected) = (floats(&made[&name]), floats(&expected));
        for (made, expected) in made.iter().zip(&expected) {
            assert!((made - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{name}: {made}, expected {expected}");
        }
    }
}

fn floats(tensor: &HostTensor) -> Vec<f32> {
    tensor.bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn padding_changes_nothing() {
    let graph: Graph = HEAD.parse().unwrap();
    let aligned = align_head(&graph).unwrap();
    assert!(aligned.to_string().contains("classes=515"), "{aligned}");
    same(&with_gradients(&graph), &with_gradients(&aligned), 3);
}

/// What divides logits would be padded by zeros too, and a gradient through a division by zero is no number.
#[test]
fn a_head_that_divides_is_not_padded() {
    let divided = HEAD
        .replace("%lse:", "%s: f32[515] = parameter \"scale\"\n  %b: f32[2,3,515] = broadcast %s {dims=[2]}\n  %d: f32[2,3,515] = OP %logits, %b\n  %lse:")
        .replace("cross_entropy %logits", "cross_entropy %d");
    let aligned = |op: &str| {
        let graph: Graph = divided.replace("OP", op).parse().unwrap();
        align_head(&graph).unwrap().to_string().contains("classes=515")
    };
    assert_eq!([aligned("mul"), aligned("div")], [true, false]);
}

#[test]
fn weights_that_are_transposed_change_nothing() {
    let text = r#"graph @layer {
  %x: f32[1024,4,8] = input "x"
  %weight: f32[8,12] = parameter "weight"
  %w: bf16[8,12] = cast %weight
  %h: bf16[1024,4,8] = cast %x
  %y: bf16[1024,4,12] = matmul %h, %w {spec="bsk,kn->bsn"}
  %f: f32[1024,4,12] = cast %y
  %q: f32[1024,4,12] = mul %f, %f
  %loss: f32[] = reduce_sum %q {dims=[0,1,2]}
  return loss %loss
}"#;
    let graph: Graph = text.parse().unwrap();
    let aligned = align_weights(&graph).unwrap();
    assert!(aligned.to_string().contains("bsk,nk->bsn"), "{aligned}");
    same(&with_gradients(&graph), &with_gradients(&aligned), 2);
}

/// `a^0` does not move with `a`, not even at 0.
#[test]
fn powers_of_zero_have_derivatives() {
    let text = r#"graph @power {
  %a: f32[3] = parameter "a"
  %b: f32[3] = input "b"
  %y: f32[3] = pow %a, %b
  %loss: f32[] = reduce_sum %y {dims=[0]}
  return loss %loss
}"#;
    let graph = with_gradients(&text.parse().unwrap());
    let leaves = [("a", [0.0, 2.0, 3.0]), ("b", [0.0, 0.0, 2.0])];
    let leaves = leaves.into_iter().map(|(name, x)| (name.to_string(), HostTensor::from_f32([3], &x))).collect();
    assert_eq!(floats(&interpret(&graph, &leaves).unwrap()["a"]), [0.0, 0.0, 6.0]);
}

/// A factor of the same number for all rows that is cut down to an integer is not the number.
#[test]
fn factors_that_are_cut_down_stay_so() {
    let text = r#"graph @cut {
  %x: f32[6,4] = input "x"
  %b: f32[4] = parameter "b"
  %w: f32[4] = parameter "w"
  %far: f32[4] = affine %w {offset=3.7, scale=1}
  %whole: i64[4] = cast %far
  %s: f32[4] = cast %whole
  %bb: f32[6,4] = broadcast %b {dims=[1]}
  %sb: f32[6,4] = broadcast %s {dims=[1]}
  %y: f32[6,4] = add %x, %bb
  %v: f32[6,4] = mul %y, %sb
  %loss: f32[] = reduce_sum %v {dims=[0,1]}
  return loss %loss
}"#;
    let graph = with_gradients(&text.parse().unwrap());
    same(&graph, &share_statistics(&graph).unwrap(), graph.outputs.len());
}

#[test]
fn statistics_that_are_made_once_change_nothing() {
    // Differences from the mean, and from something else that is told by the sum.
    for means in [1.0, 0.5, -3.0] {
        let graph = with_gradients(&norm(means));
        let shared = share_statistics(&graph).unwrap();
        assert!(shared != graph, "{shared}");
        same(&graph, &shared, 4);
    }
}
