//! The closed form by which the search compares plans, against the programs of the plans: seconds and bytes.

use shardc::{Batch, Cluster, NamedModel, Options, Precision};
use shardc_ir::plan::{Prediction, Search};
use shardc_ir::{Bytes, Plan};

/// A model, its batch and sequence, a cluster, pins.
type Case = (&'static str, u64, u64, &'static str, &'static str);

/// A node of one kind and one of another.
const MIXED: &str = r#"
per_node = 8
[[parts]]
device = "h100"
nodes = 1
[[parts]]
device = "a100-80"
nodes = 1
"#;

/// Links on which gathers take longer than what they serve.
const SLOW: &str = r#"
device = "b200"
per_node = 8
nodes = 2
[figures]
link_bandwidth = 4e9
node_bandwidth = 5e8
"#;

const CASES: &[Case] = &[
    // One device; data ranks with every stage of ZeRO, on one node and on several.
    ("gpt2-124m", 32, 1024, "h100:1", "microbatch=32"),
    ("gpt2-124m", 32, 1024, "h100:1", "microbatch=8"),
    ("llama-1b", 1, 16384, "h100:1", "microbatch=1"),
    ("llama-1b", 1, 32768, "h200:4", "cp=4,zero=3"),
    ("gpt2-124m", 64, 1024, "h100:8", "dp=8,zero=0"),
    ("gpt2-124m", 64, 1024, "h100:8", "dp=8,zero=3"),
    ("gpt2-1.5b", 64, 1024, "h100:8", "dp=8,zero=0,microbatch=8"),
    ("gpt2-1.5b", 64, 1024, "h100:8", "dp=8,zero=3,microbatch=8"),
    ("llama-160m", 64, 2048, "h100:4", "dp=4,zero=0"),
    ("llama-1b", 16, 4096, "h200:4", "dp=4,zero=0"),
    ("llama-1b", 16, 4096, "h200:4", "dp=4,zero=1"),
    ("llama-1b", 16, 4096, "h200:4", "dp=4,zero=3"),
    ("llama-1b", 64, 4096, "h200:4", "dp=4,zero=0,microbatch=4"),
    ("llama-1b", 64, 4096, "h200:4", "dp=4,zero=2,microbatch=4"),
    ("llama-1b", 64, 4096, "h200:4", "dp=4,zero=3,microbatch=4"),
    ("llama-8b", 64, 8192, "h100:8", "dp=8,zero=1,microbatch=1"),
    ("llama-8b", 64, 8192, "h100:8", "dp=8,zero=3,microbatch=1"),
    ("llama-8b", 128, 8192, "h100:8x8", "dp=64,zero=3"),
    ("llama-405b", 16384, 8192, "h100:8x2048", "dp=16384,zero=3,recompute=122"),
    // Copies in parts, with replicas of them.
    ("llama-1b", 16, 4096, "h200:4", "fsdp=2,dp=2,zero=3"),
    ("llama-8b", 128, 8192, "h100:8x4", "fsdp=8,dp=4,zero=3,microbatch=1"),
    // The head's gradient goes over the wire behind the weights that the backward pass begins with.
    ("llama-1b", 128, 1024, "a100-80:4x2", "dp=2,fsdp=4,zero=3,microbatch=16,loss_chunks=2"),
    // Parts of which the last is shorter.
    ("llama-8b", 48, 8192, "h100:6", "dp=6,zero=1,microbatch=1"),
    ("llama-8b", 48, 8192, "h100:6", "dp=6,zero=2,microbatch=1"),
    ("llama-8b", 48, 8192, "h100:6", "dp=6,zero=3,microbatch=1"),
    ("llama-8b", 12, 8192, "h100:3", "dp=3,zero=3,microbatch=4"),
    ("llama-8b", 48, 8192, "h100:6", "dp=3,tp=2,zero=3,microbatch=1"),
    ("llama-8b", 48, 8192, "h100:6", "dp=3,cp=2,zero=3,microbatch=1"),
    ("llama-70b", 192, 4096, "h100:8x3", "dp=24,zero=3,microbatch=2,recompute=block"),
    // Tensor ranks, along one axis and along several, with data ranks and without.
    ("llama-1b", 16, 4096, "h200:4", "tp=4,microbatch=16"),
    ("llama-1b", 16, 4096, "h200:4", "tp=2,dp=2,zero=0"),
    ("llama-8b", 8, 8192, "h100:8", "tp=8,microbatch=1"),
    ("llama-8b", 8, 8192, "h100:8", "tp=2x2x2,microbatch=1"),
    // Gradients of weights wait for what can run beside them.
    ("llama-1b", 16, 4096, "h200:4", "tp=2x2,microbatch=16"),
    ("llama-8b", 8, 4096, "h100:8", "tp=2x2x2,microbatch=8"),
    ("llama-8b", 8, 8192, "h100:8", "tp=4,dp=2,zero=0,microbatch=1"),
    ("llama-8b", 8, 8192, "h100:8", "tp=2x2,dp=2,zero=1,microbatch=1"),
    ("llama-8b", 64, 8192, "h100:8", "tp=2,dp=4,zero=3,microbatch=1"),
    ("llama-70b", 128, 8192, "h100:8x16", "dp=16,tp=8,zero=3,microbatch=1,recompute=block"),
    ("llama-405b", 2048, 8192, "h100:8x256", "dp=1024,tp=2,zero=3,microbatch=1,recompute=108"),
    // The heads' results are gathered before the product that reads them as vectors.
    ("gpt2-124m", 16, 1024, "h200:8", "dp=2,tp=4,zero=1,microbatch=8"),
    // Heads that tensor ranks do not divide: weights are gathered in front of the loop, and kept through it.
    ("gpt2-1.5b", 32, 1024, "h100:8", "tp=8,microbatch=8"),
    ("gpt2-1.5b", 32, 1024, "h100:4", "dp=1,tp=4,microbatch=4"),
    ("gpt2-1.5b", 32, 1024, "h100:2", "dp=1,tp=2,microbatch=8"),
    // Updates that are not divided, of gradients of which each rank squares a part: over microbatches they stay whole.
    ("gpt2-355m", 128, 1024, SLOW, "tp=16,microbatch=32"),
    // What products add hides nowhere, however few the tokens; what ranks gather of a table is read twice.
    ("gpt3-6.7b", 128, 512, "b200:8", "dp=4,tp=2,zero=1,microbatch=1"),
    ("gpt2-355m", 8, 1024, "h100:8", "dp=8,zero=1,microbatch=1"),
    // A table's gradient adds the rows of its tokens to what was added up.
    ("llama-3.2-1b", 128, 512, "l40s:4", "dp=4,zero=0,microbatch=1"),
    // Weights that tensor ranks store in parts are gathered beside the first microbatch.
    ("gpt3-350m", 64, 512, "rtx4090:4", "dp=2,tp=2,zero=0,microbatch=8"),
    // Kernels bring into order what is gathered along an inner dimension.
    ("gpt3-2.7b", 8, 1024, "v100:8x2", "dp=2,tp=8,zero=1,microbatch=4"),
    // Reductions of gradients let what a block is computed again from pass.
    ("gpt3-6.7b", 8, 2048, "a100-80:8x2", "dp=4,tp=4,zero=1,microbatch=2,recompute=value:20"),
    // The sequence, heads, experts.
    ("llama-1b", 4, 16384, "h200:4", "cp=4,zero=3"),
    ("llama-1b", 16, 4096, "h200:4", "ulysses=4,zero=0"),
    ("llama-1b", 16, 4096, "h200:4", "ulysses=2,dp=2,zero=3"),
    ("mixtral-8x7b", 32, 4096, "h100:8", "ep=8,zero=3"),
    ("mixtral-8x7b", 256, 4096, "h100:8x8", "pp=4,dp=2,ep=8,schedule=1f1b,microbatch=1,zero=1"),
    // Pipelines.
    ("llama-8b", 64, 8192, "h100:8", "pp=4,dp=2,schedule=gpipe,microbatch=1,zero=0"),
    ("llama-8b", 64, 8192, "h100:8", "pp=4,dp=2,schedule=1f1b,microbatch=1,zero=1"),
    ("llama-8b", 64, 8192, "h100:8", "pp=4,dp=2,schedule=interleaved,virtual=2,microbatch=1,zero=1"),
    ("llama-8b", 64, 8192, "h100:8", "pp=4,dp=2,schedule=zbv,microbatch=1,zero=1"),
    ("llama-8b", 64, 8192, "h100:8", "pp=2,tp=4,schedule=1f1b,microbatch=1,zero=0"),
    // What split passes make known late: orders by the lengths of chunks, gradients that are added up, of a padded table
    // too, and collectives that hide behind no gradients of weights.
    ("gpt3-6.7b", 128, 1024, "b200:8", "pp=2,dp=4,schedule=zbv,microbatch=1,zero=0"),
    ("gpt2-774m", 128, 1024, "b200:8", "pp=4,dp=2,schedule=zbv,microbatch=4,zero=0"),
    ("gpt2-1.5b", 64, 1024, "h100:8", "pp=4,dp=2,schedule=zbv,microbatch=2,zero=1"),
    ("gpt3-1.3b", 128, 512, "a100-80:4x2", "pp=2,dp=4,schedule=1f1b,microbatch=1,zero=1"),
    // Messages take longer than the kernels between them, in many microbatches.
    ("gpt2-355m", 128, 1024, "rtx4090:1x4", "pp=4,schedule=1f1b,microbatch=1,recompute=none"),
    // Messages between stages of one node are fast; those that tensor ranks wait for are not beside their steps.
    ("gpt3-6.7b", 16, 1024, "h200:8x2", "pp=16,schedule=zbv,microbatch=1,zero=1"),
    ("llama-1b", 64, 4096, "a100-80:8x4", "pp=16,dp=2,schedule=zbv,microbatch=1,zero=1"),
    ("llama-3b", 32, 4096, "h100:8x4", "pp=4,tp=4,dp=2,schedule=interleaved,virtual=4,microbatch=2,zero=1"),
    ("gpt3-6.7b", 32, 1024, "b200:8x2", "pp=4,tp=4,schedule=interleaved,virtual=4,microbatch=1,zero=1"),
    // Stages gather weights before all microbatches and reduce gradients behind them, beside nothing.
    ("gpt3-1.3b", 128, 2048, "rtx4090:4", "pp=2,dp=2,schedule=interleaved,virtual=2,zero=1,microbatch=4"),
    // Each part of a head goes back at once, in the forward pass of the last chunk.
    ("llama-3.2-1b", 4096, 8192, "b200:8x4", "pp=4,dp=8,schedule=zbv,zero=0,microbatch=8"),
    // Both gradients of an embedding that is the head are one stage's.
    ("gpt2-124m", 64, 1024, "l40s:8", "pp=2,dp=4,schedule=zbv,zero=0,microbatch=2"),
    // What is gathered along an inner dimension is brought into order behind the last gather.
    ("llama-3b", 16, 1024, "h100:1x4", "dp=2,tp=2,zero=3,microbatch=4"),
    // A head that is the embedding, on another stage.
    ("llama-3.2-1b", 64, 4096, "h100:8", "pp=4,dp=2,schedule=1f1b,microbatch=1,zero=0"),
    ("llama-3.2-1b", 64, 4096, "h100:4x2", "pp=2,dp=4,schedule=1f1b,microbatch=1,zero=1,recompute=none"),
    // What is computed again, value by value and by the kind of operation.
    ("llama-1b", 16, 4096, "h200:4", "dp=4,zero=1,recompute=value:8"),
    ("llama-8b", 64, 8192, "h100:8", "dp=8,zero=3,microbatch=2,recompute=selective"),
    ("llama-70b", 64, 4096, "h100:8x8", "dp=8,tp=8,zero=1,microbatch=1,recompute=selective"),
    ("llama-8b", 16, 8192, "h200:8", "dp=2,cp=4,zero=3,microbatch=2,recompute=value:64"),
    ("llama-70b", 128, 8192, "h100:8x16", "dp=128,zero=3,recompute=block"),
    // And of a model whose products add vectors.
    ("gpt2-355m", 32, 1024, "h200:1", "microbatch=32,recompute=block"),
    // Of what norms and experts are made of, most is read where it is made again alone.
    ("unet", 32, 0, "h100:1", "microbatch=32,recompute=value:20"),
    ("unet", 32, 0, "h100:1", "microbatch=32,recompute=value:60"),
    ("moe-tiny", 100, 512, "h100:1", "microbatch=100,recompute=value:20"),
    ("gpt2-355m", 32, 1024, "h200:1", "microbatch=32,recompute=selective"),
    ("gpt2-1.5b", 64, 1024, "h200:4", "dp=4,zero=1,microbatch=8,recompute=selective"),
    ("two-tower", 4096, 1, "h100:8", "dp=8"),
    // Exchanges between experts, and reductions of the experts' gradients.
    ("mixtral-8x7b", 128, 4096, "h100:8x4", "ep=8,dp=4,zero=3"),
    // Weights that are gathered over data ranks, then over tensor ranks, are both ahead of their readers; the wire is the
    // slower of the two clocks.
    ("llama-1b", 32, 512, "rtx4090:4", "dp=2,tp=2,zero=1,microbatch=16"),
    // Buckets let the collectives pass with which the next block begins, and joined gradients close them late.
    ("gpt3-6.7b", 16, 2048, "rtx3090:4x4", "tp=4,dp=4,zero=1,microbatch=4"),
    ("gpt3-13b", 256, 1024, "b200:8x2", "tp=4,dp=4,zero=2,microbatch=8"),
    // Pictures: inputs that take time to arrive, statistics of the batch, which queue with gradients.
    ("resnet-50", 64, 224, "rtx3090:8", "dp=8,zero=0,microbatch=8"),
    ("resnet-50", 256, 224, "h100:1", "microbatch=256"),
    ("resnet-50", 512, 224, "h100:8", "dp=8,zero=3"),
    ("unet", 64, 256, "h100:8", "dp=8,zero=1"),
    ("mixer-b-16", 512, 224, "h100:8", "dp=8,zero=0"),
    // Nodes of several kinds.
    ("llama-8b", 128, 8192, MIXED, "dp=16,zero=3,microbatch=1"),
    ("llama-8b", 128, 8192, MIXED, "pp=2,dp=8,schedule=1f1b,microbatch=1,zero=1"),
];

/// Products in 8 bits: what is stored is in parts, and whole; with one microbatch and several; computed again or not.
const IN_8_BITS: &[Case] = &[
    ("llama-1b", 16, 4096, "h200:1", "microbatch=8"),
    ("llama-1b", 16, 4096, "h200:4", "dp=4,zero=0"),
    ("llama-1b", 16, 4096, "h200:4", "dp=4,zero=0,recompute=block"),
    ("llama-1b", 16, 4096, "h200:4", "dp=4,zero=1,recompute=block"),
    ("llama-1b", 16, 4096, "h200:4", "dp=4,zero=3"),
    ("llama-1b", 64, 4096, "h200:4", "dp=4,zero=1"),
    ("llama-1b", 64, 4096, "h200:4", "dp=4,zero=0,microbatch=4,recompute=block"),
    ("llama-1b", 64, 4096, "h200:4", "dp=4,zero=2,microbatch=4"),
    ("llama-1b", 64, 4096, "h200:4", "dp=4,zero=3,microbatch=4"),
    ("llama-1b", 64, 4096, "h200:4", "dp=4,zero=3,microbatch=4,recompute=block"),
    ("llama-1b", 16, 4096, "h200:4", "tp=2,dp=2,zero=3"),
    ("llama-1b", 48, 4096, "h200:3", "dp=3,zero=1,microbatch=4"),
    ("llama-1b", 48, 4096, "h200:3", "dp=3,zero=3,microbatch=4"),
    ("llama-1b", 12, 4096, "h200:3", "dp=3,zero=3"),
    ("llama-8b", 8, 4096, "h200:4", "dp=4,zero=3"),
    ("llama-8b", 8, 4096, "h200:4", "dp=4,zero=3,recompute=block"),
    ("llama-8b", 64, 8192, "h100:8", "dp=8,zero=3,microbatch=1"),
    ("llama-8b", 64, 8192, "h100:8", "pp=4,dp=2,schedule=1f1b,microbatch=1,zero=1"),
];

/// Of pipelines the bytes are within 2%: what passes between stages waits at both ends for each of their chunks, tables that
/// are gathered or padded lie with the stage that reads them, and what is reduced behind the loop takes no room in it.
const IN_STAGES: &[Case] = &[
    ("llama-3b", 32, 4096, "h100:8x4", "pp=4,tp=4,dp=2,schedule=interleaved,virtual=4,microbatch=2,zero=1"),
    ("llama-3b@layers=32", 24, 2048, "h100:8x2", "pp=4,tp=4,dp=1,schedule=interleaved,virtual=4,microbatch=2,zero=0"),
    ("llama-1b", 16, 4096, "h100:8x2", "pp=2,tp=4,dp=2,schedule=interleaved,virtual=2,microbatch=1,zero=1"),
    ("gpt2-355m@layers=16", 64, 512, "h100:8x4", "pp=4,tp=4,dp=2,schedule=1f1b,microbatch=4,zero=0"),
    ("gpt2-355m@layers=16", 24, 512, "h100:8", "pp=4,tp=1,dp=2,schedule=zbv,microbatch=1,zero=0"),
    ("gpt2-355m@layers=16", 32, 512, "h100:8x4", "pp=2,tp=1,dp=16,schedule=zbv,microbatch=1,zero=1,recompute=none"),
];

/// These are within 4% of the seconds, and within 10% of the bytes.
const FARTHER: &[Case] = &[
    // Data ranks reduce gradients, or gather weights, beside every pass of a stage.
    ("gpt3-1.3b", 96, 1024, "a100-40:4x4", "pp=4,dp=4,schedule=zbv,zero=2,microbatch=4"),
    ("llama-1b", 64, 2048, "h100:8x2", "pp=4,dp=4,schedule=zbv,zero=3,microbatch=4"),
    ("gpt2-355m", 64, 1024, "rtx4090:2x4", "pp=4,dp=2,schedule=zbv,zero=2,microbatch=8"),
    // A padded table is read in another stage than it is stored in.
    ("gpt2-774m", 64, 512, "a100-40:8x4", "pp=4,dp=8,schedule=interleaved,virtual=2,zero=1,microbatch=2"),
    // What is made once is laid to stages by their share of the parameters, which biases gathered over slow links are not.
    ("gpt2-355m", 128, 1024, SLOW, "pp=2,tp=8,schedule=1f1b,microbatch=64"),
    // Messages of a long pass wait for those of the short one behind it.
    ("llama-3.2-1b", 4096, 8192, "b200:8x4", "pp=4,dp=8,schedule=interleaved,virtual=2,zero=0,microbatch=8"),
];

/// These are within 3% of the seconds; their bytes are known less well.
const OTHER_BYTES: &[Case] = &[
    // Where several axes divide one tensor dimension, lowering does not keep every layout that the search takes for shared.
    ("llama-8b", 8, 4096, "h100:8", "tp=2x2x2,microbatch=8,recompute=block"),
    ("llama-8b", 16, 4096, "h100:8x2", "tp=2x8,microbatch=16"),
    // What collectives under way keep (55 MiB) is not counted, and is much beside the little that such pictures take.
    ("resnet-50", 128, 224, "v100:2x8", "dp=16,zero=3,microbatch=8"),
];

/// Plans that the search cuts into chunks that overlap, of samples and, last, of tokens.
const IN_CHUNKS: &[Case] = &[
    ("llama-1b", 8, 4096, "h200:2", "tp=2,microbatch=8"),
    ("llama-1b", 16, 4096, "h200:4", "tp=4,microbatch=16"),
    ("llama-8b", 8, 4096, "h100:8", "tp=2x2x2,microbatch=8"),
    ("llama-8b", 8, 8192, "h100:8", "tp=8,microbatch=1"),
];

fn options(pins: &str, precision: Precision) -> Options {
    Options {
        precision: Some(precision),
        pins: pins.to_string(),
        device_memory: Some(Bytes(4000 << 30)),
        ..Options::default()
    }
}

fn cluster(text: &str) -> Cluster {
    if text.contains('=') { Cluster::from_toml("cluster.toml", text) } else { Cluster::parse(text, "h200") }.unwrap()
}

/// The plan without chunks that overlap and kept casts.
fn whole((model, batch, seq, on, pins): Case, precision: Precision) -> Plan {
    let pins = format!("{pins},overlap_chunks=1,keep_casts=0");
    let (cluster, model) = (cluster(on), NamedModel::find(model).unwrap());
    let compiled = shardc::compile(&model, Batch { batch, seq }, &cluster, &options(&pins, precision)).unwrap();
    compiled.plan().clone()
}

/// By how much the estimate of a plan is off, as shares of the seconds and bytes of a plan's programs.
fn distance(estimate: &Search, exact: &Prediction) -> (f64, f64) {
    (estimate.estimate.0 / exact.step.0 - 1.0, estimate.memory.0 as f64 / exact.memory.total().0 as f64 - 1.0)
}

#[test]
fn the_closed_form_is_near_the_programs() {
    let mut wrong = Vec::new();
    let lists = [
        (CASES, Precision::Bf16, (0.03, 0.05)),
        (IN_8_BITS, Precision::Fp8, (0.03, 0.05)),
        (FARTHER, Precision::Bf16, (0.04, 0.1)),
        (OTHER_BYTES, Precision::Bf16, (0.03, 0.16)),
        (IN_STAGES, Precision::Bf16, (0.04, 0.02)),
    ];
    let all =
        lists.into_iter().flat_map(|(cases, precision, most)| cases.iter().map(move |case| (*case, precision, most)));
    for (case, precision, most) in all {
        let plan = whole(case, precision);
        let (seconds, bytes) = distance(&plan.search, &plan.prediction);
        println!("{:+.1}% of the seconds, {:+.1}% of the bytes: {case:?}", 100.0 * seconds, 100.0 * bytes);
        if seconds.abs() > most.0 || bytes.abs() > most.1 {
            wrong.push((case, seconds, bytes));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Chunks are compared by their programs alone. What the search goes by before it lowers them is the estimate without
/// chunks: their memory is that of the whole, and their step lies between that without its communication and all of it.
#[test]
fn plans_in_chunks_lie_between_the_estimates_of_whole_ones() {
    for case in IN_CHUNKS {
        let (model, batch, seq, on, pins) = *case;
        let name = NamedModel::find(model).unwrap();
        let options = options(pins, Precision::Bf16);
        let compiled = shardc::compile(&name, Batch { batch, seq }, &cluster(on), &options).unwrap();
        let plan = compiled.plan();
        assert!(plan.choice.contains("overlap_chunks="), "{case:?}: {}", plan.choice);
        let (seconds, bytes) = distance(&plan.search, &plan.prediction);
        println!("{:+.1}% of the seconds, {:+.1}% of the bytes: {case:?}", 100.0 * seconds, 100.0 * bytes);
        let hidden = plan.search.estimate.0 - plan.prediction.communication.0;
        let least = hidden / plan.prediction.step.0 - 1.0;
        assert!(bytes.abs() < 0.12 && seconds > 0.0 && least < 0.0, "{case:?}: {seconds} {least} {bytes}");
    }
}

/// With more memory more microbatches are in flight, where that is faster: not where it takes unequal stages to fit.
#[test]
fn more_memory_makes_no_pipeline_slower() {
    let pins = "pp=2,dp=2,tp=1,schedule=zbv,zero=1,microbatch=2,overlap_chunks=1,keep_casts=0";
    let (model, cluster) = (NamedModel::find("gpt2-355m@layers=2").unwrap(), cluster("h200:4x1"));
    let mut least = f64::INFINITY;
    for memory in [1140u64, 1156, 1180, 1207, 1230, 1250] {
        let memory = Bytes(memory << 20);
        let options = Options { device_memory: Some(memory), ..options(pins, Precision::Bf16) };
        let compiled = shardc::compile(&model, Batch { batch: 16, seq: 512 }, &cluster, &options).unwrap();
        let step = compiled.plan().prediction.step;
        println!("{step} in {memory}");
        assert!(step.0 <= 1.001 * least, "{step} in {memory}, and {least} s in less");
        least = least.min(step.0);
    }
}

/// Where nothing fits by its estimate, neither in one stage nor in several, a pipeline is found that fits by its programs;
/// and so it is where only pipelines are asked for.
#[test]
fn pipelines_may_fit_though_no_estimate_does() {
    for (on, memory, pins, stages) in [("h100:1x4", 500 << 20, "", 4), ("a100-80:4", 600_000_000, "pp=2", 2)] {
        let options = Options { device_memory: Some(Bytes(memory)), ..options(pins, Precision::Bf16) };
        let model = NamedModel::find("unet").unwrap();
        let compiled = shardc::compile(&model, Batch { batch: 4, seq: 0 }, &cluster(on), &options).unwrap();
        let plan = compiled.plan();
        assert!(plan.stages() == stages && plan.prediction.fits(), "{}", plan.choice);
        assert!(plan.search.memory > Bytes(memory), "{} estimated", plan.search.memory);
    }
}

/// A pipeline fits that computes much again: one that cuts its head into chunks computes less.
#[test]
fn heads_of_pipelines_are_cut_where_memory_is_short() {
    let (model, cluster) = (NamedModel::find("llama-160m").unwrap(), cluster("rtx3090:2x2"));
    let [free, whole] = ["", "loss_chunks=1"].map(|pins| {
        let options = Options { device_memory: Some(Bytes(1_020_000_000)), ..options(pins, Precision::Bf16) };
        let compiled = shardc::compile(&model, Batch { batch: 4, seq: 2048 }, &cluster, &options).unwrap();
        (compiled.plan().prediction.step, compiled.plan().choice.clone())
    });
    assert!(free.0.0 < 0.96 * whole.0.0, "{free:?}, and {whole:?} with the head whole");
}

/// Of few layers the head is much of a step, and cutting it by its tokens takes longer than leaving it whole.
#[test]
fn heads_are_whole_where_that_is_faster() {
    let (model, cluster) =
        (NamedModel::find("gpt2-124m@layers=2").unwrap(), cluster(&MIXED.replace("per_node = 8", "per_node = 1")));
    for (batch, seq) in [(128, 512), (256, 1024)] {
        let [free, whole] = ["", "loss_chunks=1"].map(|pins| {
            let options = Options { device_memory: None, ..options(pins, Precision::Bf16) };
            let compiled = shardc::compile(&model, Batch { batch, seq }, &cluster, &options).unwrap();
            compiled.plan().prediction.step
        });
        assert!(free.0 <= 1.005 * whole.0, "{free}, and {whole} with the head whole");
    }
}

/// Over slow links the fastest layouts of whole plans have each rank compute what others do as well; in chunks, which hide
/// what it takes to divide that, others are faster.
#[test]
fn layouts_are_found_for_chunks_too() {
    let case = ("llama-1b", 16, 4096, "l40s:4", "tp=4");
    let whole = whole(case, Precision::Bf16);
    let (model, batch, seq, on, pins) = case;
    for pins in [pins, "tp=4,overlap_chunks=4"] {
        let options = options(pins, Precision::Bf16);
        let compiled =
            shardc::compile(&NamedModel::find(model).unwrap(), Batch { batch, seq }, &cluster(on), &options).unwrap();
        let plan = compiled.plan();
        assert!(plan.choice.contains("overlap_chunks=4"), "{}", plan.choice);
        assert!(
            plan.prediction.step.0 < 0.7 * whole.prediction.step.0,
            "{} {}",
            plan.prediction.step,
            whole.prediction.step
        );
        // They compute less, and say more to each other.
        assert!(plan.prediction.matmul.0 < 0.8 * whole.prediction.matmul.0);
        assert!(plan.prediction.communication > whole.prediction.communication);
    }
}

/// Whatever tensor ranks do, data ranks exchange the statistics of the batch in the middle of the passes.
#[test]
fn bounds_count_what_data_ranks_exchange() {
    let plan = whole(("resnet-50", 256, 0, "h100:8x4", "tp=2"), Precision::Bf16);
    let Search { estimate, bound, .. } = plan.search;
    assert!(bound <= estimate && estimate.0 < 1.5 * bound.0, "{estimate} {bound}");
}
