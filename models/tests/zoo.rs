//! The zoo: counts as published, and what a block looks like after a trace.

use shardc_ir::Op;
use shardc_models::zoo::{Config, build, build_config, list};

#[track_caller]
fn counts(name: &str, expect: u64) {
    let model = build(name, 1, 8).unwrap();
    assert_eq!(model.parameters, expect, "{name}");
    let listed = list().into_iter().find(|entry| entry.name == name).map(|entry| entry.parameters);
    assert_eq!(listed, Some(expect), "{name}");
    assert!(model.unused.is_empty());
    assert!(model.values.is_empty());
    let parameters: Vec<&str> = model
        .graph
        .leaves()
        .filter_map(|(_, node)| match &node.op {
            Op::Parameter(parameter) => Some(parameter.name.as_str()),
            _ => None,
        })
        .collect();
    let initialisers: Vec<&str> = model.init.outputs.iter().map(|output| output.name.as_str()).collect();
    assert_eq!(parameters, initialisers);
}

#[test]
fn published_counts() {
    counts("gpt2-124m", 124_439_808);
    counts("gpt2-1.5b", 1_557_611_200);
    counts("gpt3-175b", 174_604_259_328);
    counts("llama-3.2-1b", 1_235_814_400);
    counts("llama-8b", 8_030_261_248);
    counts("llama-65b", 65_285_660_672);
    counts("llama-70b", 70_553_706_496);
    counts("llama-405b", 405_853_388_800);
    counts("mixtral-8x7b", 46_702_792_704);
    counts("resnet-50", 25_557_032);
    counts("unet", 31_037_698);
    counts("mixer-b-16", 59_880_472);
}

/// The operations of block 0 in order, broadcasts left out.
#[track_caller]
fn block(config: &Config, expect: &str) {
    let model = build_config("block", config, 2, 8).unwrap();
    let nodes = model.graph.nodes().map(|(_, node)| node);
    let inside = nodes.filter(|node| node.path.starts_with("blocks.0") && !node.op.is_leaf());
    let names: Vec<&str> = inside.map(|node| node.op.name()).filter(|name| *name != "broadcast").collect();
    assert_eq!(names.join(" "), expect.split_whitespace().collect::<Vec<_>>().join(" "));
}

use shardc_ir::OpDef;

#[test]
fn llama_block() {
    let tiny = list().into_iter().find(|entry| entry.name == "llama-tiny").unwrap();
    let norm = "mul reduce_sum affine rsqrt mul mul";
    let rotary = "slice slice mul mul sub mul mul add concat";
    let expect = format!(
        "{norm} matmul reshape {rotary} matmul reshape {rotary} matmul reshape attention reshape matmul add
         {norm} matmul silu matmul mul matmul add"
    );
    block(&tiny.config, &expect);
    // Key/value heads are not copied.
    let Config::Llama(config) = tiny.config else { panic!("llama-tiny is a Llama") };
    let grouped = Config::Llama(shardc_models::zoo::LlamaConfig { kv_heads: 2, tied: true, ..config });
    block(&grouped, &expect);
}

#[test]
fn gpt2_block() {
    let small = list().into_iter().find(|entry| entry.name == "gpt2-124m").unwrap();
    let linear = "matmul add";
    let expect = format!(
        "layer_norm {linear} reshape {linear} reshape {linear} reshape attention reshape {linear} add
         layer_norm {linear} gelu_tanh {linear} add"
    );
    block(&small.config, &expect);
}

#[test]
fn errors() {
    let error = build("lama-8b", 1, 8).unwrap_err().to_string();
    assert!(error.contains("`lama-8b`") && error.contains("llama-8b"), "{error}");
    assert!(build("gpt2-124m", 1, 2048).unwrap_err().to_string().contains("1024 positions"));
    assert!(build("llama-tiny", usize::MAX, 8).unwrap_err().to_string().contains("too large"));
    assert!(build("llama-tiny", 0, 8).unwrap_err().to_string().contains("empty"));
}
