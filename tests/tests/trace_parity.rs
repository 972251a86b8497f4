//! A traced Hugging Face directory computes what transformers computes: loss and logits of the
//! recorded step.

use shardc_ir::{DType, HostTensor, Op, TensorType};
use std::collections::BTreeMap;
use std::path::Path;

fn recorded(bytes: &[u8], name: &str) -> HostTensor {
    let tensors = safetensors::SafeTensors::deserialize(bytes).unwrap();
    let view = tensors.tensor(name).unwrap();
    let dtype = if view.dtype() == safetensors::Dtype::I64 { DType::I64 } else { DType::F32 };
    let shape: Vec<u64> = view.shape().iter().map(|size| *size as u64).collect();
    HostTensor { ty: TensorType::new(dtype, shape), bytes: view.data().to_vec() }
}

fn numbers(tensor: &HostTensor) -> Vec<f32> {
    tensor.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[track_caller]
fn check(name: &str) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/hf").join(name);
    let (model, weights) = shardc_models::hf::open(&dir, 4, 32).unwrap();
    let step = std::fs::read(dir.join("step0.safetensors")).unwrap();
    let mut leaves = BTreeMap::new();
    for (_, node) in model.graph.leaves() {
        match &node.op {
            Op::Parameter(leaf) => leaves.insert(leaf.name.clone(), weights.read_whole(&leaf.name).unwrap()),
            Op::Input(leaf) => leaves.insert(leaf.name.clone(), recorded(&step, &leaf.name)),
            _ => None,
        };
    }
    let results = shardc_runtime::interpret(&model.graph, &leaves).unwrap();
    for result in ["loss", "logits"] {
        let (actual, expect) = (numbers(&results[result]), numbers(&recorded(&step, result)));
        assert_eq!(actual.len(), expect.len());
        let largest = expect.iter().fold(0f32, |most, x| most.max(x.abs()));
        let worst = actual.iter().zip(&expect).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(worst <= 1e-4 * largest, "{result} of {name}: off by {worst}, the largest is {largest}");
    }
}

#[test]
fn gpt2() {
    check("gpt2");
}

#[test]
fn llama() {
    check("llama");
}
