//! What raising makes of the models that users bring: the operations of one block of each family,
//! in order, and nothing else.

use shardc_ir::{Graph, OpDef, verify};
use shardc_models::{hf, zoo};
use shardc_passes::raise::raise;
use std::path::Path;

const LLAMA: &str = "rms_norm matmul reshape rotary matmul reshape rotary matmul reshape attention reshape matmul add \
                     rms_norm matmul matmul swiglu matmul add";
const GPT2: &str = "layer_norm matmul broadcast add reshape matmul broadcast add reshape matmul broadcast add reshape \
                    attention reshape matmul broadcast add add \
                    layer_norm matmul broadcast add gelu_tanh matmul broadcast add add";

/// The raised graph of a built-in model or of a fixture.
fn raised(model: &str, batch: usize) -> Graph {
    let seq = 16;
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/hf").join(model);
    let traced =
        if dir.exists() { hf::open(&dir, batch, seq).unwrap().0 } else { zoo::build(model, batch, seq).unwrap() };
    let (graph, _) = raise(&traced.graph).unwrap();
    verify::graph(&graph).unwrap();
    graph
}

/// The names of the operations of the nodes that `select`s, leaves apart.
fn ops(graph: &Graph, select: impl Fn(&str) -> bool) -> String {
    let nodes = graph.nodes().filter(|(_, node)| !node.op.is_leaf() && select(&node.path));
    nodes.map(|(_, node)| node.op.name()).collect::<Vec<_>>().join(" ")
}

#[track_caller]
fn check(model: &str, block: &str) {
    // One sample is a batch like any other.
    [1, 2].into_iter().for_each(|batch| check_batch(model, batch, block));
}

#[track_caller]
fn check_batch(model: &str, batch: usize, block: &str) {
    let graph = raised(model, batch);
    for number in 0..2 {
        let of_block = format!("blocks.{number}");
        let ops = ops(&graph, |path| path == of_block || path.starts_with(&format!("{of_block}.")));
        assert_eq!(ops, block, "block {number} of {model}");
    }
    // Around the blocks: tables, embeddings, the last norm, the head and the loss.
    let rest = ops(&graph, |path| !path.starts_with("blocks."));
    let composite = |name: &str| rest.split(' ').filter(|op| *op == name).count();
    assert_eq!(composite("matmul"), 1, "{model}: {rest}");
    assert_eq!(composite("cross_entropy"), 1, "{model}: {rest}");
    assert_eq!(composite("rms_norm") + composite("layer_norm"), 1, "{model}: {rest}");
    for decomposed in ["softmax", "log_softmax", "transpose", "exp", "pow"] {
        assert_eq!(composite(decomposed), 0, "{model}: {rest}");
    }
}

#[test]
fn llama() {
    check("llama-tiny", LLAMA);
    check("llama", LLAMA);
}

#[test]
fn gpt2() {
    check("gpt2-124m", GPT2);
    check("gpt2", GPT2);
}
