//! A padded vocabulary changes neither the loss nor a gradient.

use shardc_ir::{Graph, HostTensor, Op, OutputKind, ValueId};
use shardc_passes::align::align_head;
use shardc_passes::differentiate::differentiate;
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

/// The loss and every gradient.
fn outputs(graph: &Graph) -> BTreeMap<String, HostTensor> {
    let made = differentiate(graph, "loss").unwrap();
    let mut graph = made.graph;
    let name = |leaf: ValueId| match &graph.def(leaf).op {
        Op::Parameter(parameter) => parameter.name.clone(),
        other => panic!("{} has no gradient", other.name()),
    };
    let gradients: Vec<_> = made.gradients.iter().map(|(leaf, value)| (name(*leaf), *value)).collect();
    gradients.into_iter().for_each(|(name, value)| graph.output(name, value, OutputKind::Result));
    let tensor = |shape: &[u64]| {
        let count: u64 = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|at| ((at * 37 % 101) as f32 / 50.0) - 1.0).collect();
        HostTensor::from_f32(shape.to_vec(), &values)
    };
    let leaves = BTreeMap::from([
        ("x".to_string(), tensor(&[2, 3, 4])),
        ("labels".to_string(), HostTensor::from_i64([2, 3], &[0, 514, 7, -100, 300, 2])),
        ("norm.gamma".to_string(), tensor(&[4])),
        ("embedding.weight".to_string(), tensor(&[515, 4])),
    ]);
    interpret(&graph, &leaves).unwrap()
}

fn floats(tensor: &HostTensor) -> Vec<f32> {
    tensor.bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn padding_changes_nothing() {
    let graph: Graph = HEAD.parse().unwrap();
    let aligned = align_head(&graph).unwrap();
    assert!(aligned.to_string().contains("classes=515"), "{aligned}");
    let (expected, made) = (outputs(&graph), outputs(&aligned));
    assert_eq!(made.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    assert_eq!(made.len(), 3);
    for (name, expected) in expected {
        assert_eq!(made[&name].ty, expected.ty, "{name}");
        let (made, expected) = (floats(&made[&name]), floats(&expected));
        for (made, expected) in made.iter().zip(&expected) {
            assert!((made - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{name}: {made}, expected {expected}");
        }
    }
}
