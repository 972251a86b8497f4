//! Our gradients of a graph, and their comparison with those of another.

use shardc_ir::{Graph, HostTensor, Op, OutputKind};
use shardc_passes::differentiate::differentiate;
use std::collections::BTreeMap;

/// How far gradients may be apart, relative to the largest of all.
pub const TOLERANCE: f32 = 1e-5;

pub fn floats(host: &HostTensor) -> Vec<f32> {
    host.bytes.chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
}

/// Our gradients by the name of the parameter.
pub fn ours(graph: &Graph, leaves: &BTreeMap<String, HostTensor>) -> BTreeMap<String, Vec<f32>> {
    let differentiated = differentiate(graph, "loss").unwrap();
    let mut graph = differentiated.graph;
    for (leaf, gradient) in differentiated.gradients {
        let Op::Parameter(parameter) = &graph.def(leaf).op else { unreachable!() };
        let name = format!("grad {}", parameter.name);
        graph.output(name, gradient, OutputKind::Result);
    }
    graph.output("scale", differentiated.scale, OutputKind::Result);
    let outputs = shardc_runtime::interpret(&graph, leaves).unwrap();
    let scale = floats(&outputs["scale"])[0];
    let gradients = outputs.iter().filter_map(|(name, value)| Some((name.strip_prefix("grad ")?, value)));
    gradients.map(|(name, value)| (name.to_string(), floats(value).iter().map(|x| x * scale).collect())).collect()
}

/// Compares gradients by name; what we lack counts as zeros.
pub fn compare(case: &str, ours: &BTreeMap<String, Vec<f32>>, theirs: &BTreeMap<String, Vec<f32>>) {
    let largest = theirs.values().flatten().fold(0.0f32, |largest, x| largest.max(x.abs()));
    for (name, theirs) in theirs {
        let zeros = vec![0.0; theirs.len()];
        let ours = ours.get(name).unwrap_or(&zeros);
        assert_eq!(ours.len(), theirs.len(), "{case}: {name}");
        for (index, (a, b)) in ours.iter().zip(theirs).enumerate() {
            let close = (a - b).abs() <= TOLERANCE * largest.max(1e-6);
            assert!(close, "{case}: {name}[{index}] is {a}, Burn says {b} (largest {largest})");
        }
    }
}
