//! The search on a Llama-like training step built by hand.

use crate::cluster::Cluster;
use crate::differentiate::differentiate;
use crate::optimizer::{OptimizerConfig, add_optimizer};
use crate::search::{Pins, search};
use shardc_ir::ops::*;
use shardc_ir::plan::Request;
use shardc_ir::{Bytes, DType, Family, Graph, NoScratch, Op, OutputKind, Plan, Role, TensorType, ValueId};

/// The sizes of a model and its batch.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub layers: u64,
    pub batch: u64,
    pub seq: u64,
    pub hidden: u64,
    pub heads: u64,
    pub kv: u64,
    pub ffn: u64,
    pub vocab: u64,
}

struct Builder {
    graph: Graph,
    dtype: DType,
}

impl Builder {
    fn add(&mut self, op: impl Into<Op>, operands: &[ValueId], declared: &[TensorType], path: &str) -> ValueId {
        let node = self.graph.add_as(op.into(), operands, declared, path.to_string(), Role::Forward).unwrap();
        self.graph.node(node).results[0]
    }

    fn parameter(&mut self, name: &str, shape: &[u64]) -> ValueId {
        let path = name.rsplit_once('.').map_or("", |(path, _)| path).to_string();
        let ty = TensorType::new(DType::F32, shape);
        let leaf = self.add(Parameter { name: name.into(), frozen: false }, &[], std::slice::from_ref(&ty), &path);
        if self.dtype == DType::F32 { leaf } else { self.add(Cast {}, &[leaf], &[ty.with_dtype(self.dtype)], &path) }
    }

    fn linear(&mut self, x: ValueId, name: &str, out: u64) -> ValueId {
        let hidden = *self.graph.ty(x).shape.last().unwrap();
        let weight = self.parameter(&format!("{name}.weight"), &[hidden, out]);
        self.add(Matmul::new("bsk,kn->bsn"), &[x, weight], &[], name)
    }

    fn norm(&mut self, x: ValueId, name: &str) -> ValueId {
        let hidden = *self.graph.ty(x).shape.last().unwrap();
        let gamma = self.parameter(&format!("{name}.gamma"), &[hidden]);
        self.add(RmsNorm { eps: 1e-5 }, &[x, gamma], &[], name)
    }

    fn split(&mut self, x: ValueId, heads: u64, tables: Option<[ValueId; 2]>, path: &str) -> ValueId {
        let ty = self.graph.ty(x).clone();
        let shape = [ty.shape[0], ty.shape[1], heads, ty.shape[2] / heads];
        let x = self.add(Reshape {}, &[x], &[ty.with_shape(shape)], path);
        tables.map_or(x, |[cos, sin]| self.add(Rotary { inverse: false }, &[x, cos, sin], &[], path))
    }

    fn block(&mut self, x: ValueId, index: u64, sizes: Sizes, tables: [ValueId; 2]) -> ValueId {
        let path = format!("blocks.{index}");
        let d = sizes.hidden / sizes.heads;
        let y = self.norm(x, &format!("{path}.attention_norm"));
        let attention = format!("{path}.attention");
        let q = self.linear(y, &format!("{attention}.query"), sizes.hidden);
        let k = self.linear(y, &format!("{attention}.key"), sizes.kv * d);
        let v = self.linear(y, &format!("{attention}.value"), sizes.kv * d);
        let q = self.split(q, sizes.heads, Some(tables), &attention);
        let k = self.split(k, sizes.kv, Some(tables), &attention);
        let v = self.split(v, sizes.kv, None, &attention);
        let o = self.add(
            Attention { causal: true, scale: (d as f64).powf(-0.5), lead: None, reversed: None },
            &[q, k, v],
            &[],
            &attention,
        );
        let merged = self.graph.ty(x).clone();
        let o = self.add(Reshape {}, &[o], &[merged], &attention);
        let o = self.linear(o, &format!("{attention}.output"), sizes.hidden);
        let x = self.add(Binary { kind: BinaryKind::Add }, &[x, o], &[], &path);
        let y = self.norm(x, &format!("{path}.mlp_norm"));
        let gate = self.linear(y, &format!("{path}.mlp.gate"), sizes.ffn);
        let up = self.linear(y, &format!("{path}.mlp.up"), sizes.ffn);
        let y = self.add(Swiglu {}, &[gate, up], &[], &format!("{path}.mlp"));
        let y = self.linear(y, &format!("{path}.mlp.down"), sizes.hidden);
        self.add(Binary { kind: BinaryKind::Add }, &[x, y], &[], &path)
    }
}

/// The training step of a Llama-like model.
pub(crate) fn llama(sizes: Sizes, dtype: DType) -> Graph {
    llama_with(sizes, dtype, false)
}

/// The same, whose head may share the table of the embedding.
pub(crate) fn llama_with(sizes: Sizes, dtype: DType, is_tied: bool) -> Graph {
    let mut b = Builder { graph: Graph::new("llama"), dtype };
    let rows = TensorType::new(DType::I64, [sizes.batch, sizes.seq]);
    let ids = b.add(Input { name: "ids".into() }, &[], std::slice::from_ref(&rows), "");
    let labels = b.add(Input { name: "labels".into() }, &[], std::slice::from_ref(&rows), "");
    let half = TensorType::new(DType::F32, [sizes.seq, sizes.hidden / sizes.heads / 2]);
    let tables = [0.5, 0.25].map(|value| b.add(Constant { value }, &[], std::slice::from_ref(&half), ""));
    let table = b.parameter("embedding.weight", &[sizes.vocab, sizes.hidden]);
    let mut x = b.add(Embedding { start: 0 }, &[table, ids], &[], "embedding");
    for index in 0..sizes.layers {
        x = b.block(x, index, sizes, tables);
    }
    let x = b.norm(x, "norm");
    let logits = match is_tied {
        true => b.add(Matmul::new("bsk,nk->bsn"), &[x, table], &[], "head"),
        false => b.linear(x, "head", sizes.vocab),
    };
    let entropy = b.graph.add(CrossEntropy { start: 0, classes: None }, &[logits, labels], &[]).unwrap();
    let [lse, picked] = b.graph.node(entropy).results[..] else { unreachable!() };
    let rows = b.add(Binary { kind: BinaryKind::Sub }, &[lse, picked], &[], "");
    let sum = b.add(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }, &[rows], &[], "");
    let scale = 1.0 / (sizes.batch * sizes.seq) as f64;
    let loss = b.add(Affine { scale, offset: 0.0 }, &[sum], &[], "");
    b.graph.output("loss", loss, OutputKind::Result);
    add_optimizer(differentiate(&b.graph, "loss").unwrap(), &OptimizerConfig::default()).unwrap()
}

pub(crate) const SMALL: Sizes =
    Sizes { layers: 4, batch: 8, seq: 2048, hidden: 4096, heads: 32, kv: 8, ffn: 14336, vocab: 128256 };

pub(crate) fn request(sizes: Sizes, memory: u64) -> Request {
    Request { batch: sizes.batch, seq: sizes.seq, device_memory: Bytes(memory << 30), ..Request::default() }
}

pub(crate) fn plan(sizes: Sizes, dtype: DType, cluster: &str, memory: u64, pins: &str) -> Result<Plan, String> {
    let graph = llama(sizes, dtype);
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let pins = Pins::parse(pins).map_err(|error| error.to_string())?;
    search(&graph, &cluster, &request(sizes, memory), &pins, &NoScratch).map_err(|error| error.to_string())
}

/// Every node of a path with its strategy.
fn strategies(plan: &Plan, path: &str) -> String {
    let mut text = String::new();
    for (id, node) in plan.graph.nodes().filter(|(_, node)| node.path.starts_with(path)) {
        let rule = plan.rule(id);
        let role = format!("{:?}", node.role);
        let role = role.split('(').next().unwrap();
        text += &format!(
            "{role} {} {} [{}]\n",
            node.path,
            node.op.name(),
            rule.strategy_text(&plan.strategies[id], &plan.mesh)
        );
    }
    text
}

/// The strategies of the nodes of a path, one line per operation and role, in the order of the graph.
#[track_caller]
pub(crate) fn check_strategies(plan: &Plan, path: &str, expect: &[&str]) {
    let text = strategies(plan, path);
    for line in expect {
        assert!(text.contains(line), "no `{line}` in\n{text}");
    }
}

/// Column then row parallel, vocabulary parallel, with no rule that says so.
#[test]
fn tensor_parallelism_is_megatrons() {
    // So many tokens that dividing them behind the embedding is worth the start of a second collective.
    let sizes = Sizes { layers: 16, seq: 8192, ..SMALL };
    let plan = plan(sizes, DType::Bf16, "h100:8", 70, "tp=8,microbatch=1").unwrap();
    check_strategies(
        &plan,
        "blocks.1",
        &[
            "Forward blocks.1.attention_norm rms_norm [i=mb j=tp]",
            "Forward blocks.1.attention.query matmul [b=mb n=tp]",
            "Forward blocks.1.attention attention [b=mb kv=tp]",
            "Forward blocks.1.attention.output parameter [i=tp]",
            "Forward blocks.1.attention.output matmul [b=mb k=tp]",
            "Forward blocks.1 add [i=mb j=tp]",
            "Forward blocks.1.mlp.gate matmul [b=mb n=tp]",
            "Forward blocks.1.mlp swiglu [i=mb k=tp]",
            "Forward blocks.1.mlp.down matmul [b=mb k=tp]",
            "Optimizer blocks.1.mlp.down adamw [i=tp]",
        ],
    );
    check_strategies(&plan, "head", &["Forward head matmul [b=mb n=tp]"]);
    let entropy = plan.graph.nodes().find(|(_, node)| matches!(node.op, Op::CrossEntropy(_))).unwrap().0;
    assert_eq!(plan.rule(entropy).strategy_text(&plan.strategies[entropy], &plan.mesh), "i=mb v=tp");
}

const TINY: Sizes = Sizes { layers: 2, batch: 12, seq: 8, hidden: 48, heads: 6, kv: 2, ffn: 96, vocab: 60 };

#[track_caller]
fn check(cluster: &str, pins: &str, expect: &str) {
    let text = plan(TINY, DType::F32, cluster, 1, pins)
        .map_or_else(|error| error, |plan| format!("{} {}", plan.mesh, plan.choice));
    assert!(text.contains(expect), "{text}");
}

#[test]
fn pinned_plans() {
    check("cpu:1", "", "dp=1,tp=1,zero=0");
    for zero in 0..4 {
        check("cpu:4", &format!("dp=4,zero={zero},microbatch=1"), &format!("dp=4,time mb=3 dp=4,tp=1,zero={zero}"));
    }
    check("cpu:4", "tp=2,dp=2,zero=3", "dp=2,tp=2,zero=3");
    check("cpu:4", "tp=4", "tp=2,tp_1=2 dp=1,tp=2x2,zero=0");
    check("cpu:4", "tp=2x2", "tp=2,tp_1=2 dp=1,tp=2x2,zero=0");
    check("cpu:4", "fsdp=2,microbatch=1,zero=3", "dp=2,fsdp=2,time mb=3 dp=2,fsdp=2,tp=1,zero=3");
    check("cpu:4", "fsdp=4,microbatch=1", "fsdp=4,time mb=3 dp=1,fsdp=4,tp=1");
    check("cpu:4", "cp=2,tp=1,microbatch=6", "dp=2,cp=2 dp=2,cp=2,tp=1");
    check("cpu:4", "cp=4,microbatch=12", "cp=4 dp=1,cp=4,tp=1");
    check("cpu:4", "cp=2x2,microbatch=12", "cp=2,cp_1=2 dp=1,cp=2x2,tp=1");
    check("cpu:4", "ring=2,ulysses=2,microbatch=12", "ring=2,ulysses=2 dp=1,ring=2,ulysses=2,tp=1");
    check("cpu:6", "cp=3,tp=2", "pin `cp=3`: 3 does not divide the sequence of 8");
    check("cpu:4", "ep=2", "pin `ep=2`: the model has no experts; leave it out");
    check("cpu:6", "dp=3,tp=2", "dp=3,tp=2");
    check("cpu:5", "tp=1", "a batch of 12 does not divide over the 5 ranks of the cluster");
    check("cpu:5", "tp=5,microbatch=5", "a batch of 12 does not divide into 1 data rank times microbatches of 5");
}

/// Every combination is legal, node by node (the plan's builder checks it).
#[test]
fn every_degree_is_planned() {
    for (cluster, degrees) in [("cpu:2", vec![1, 2]), ("cpu:4", vec![1, 2, 4]), ("cpu:6", vec![1, 2, 3, 6])] {
        for tp in degrees {
            for zero in 0..4 {
                let text = plan(TINY, DType::F32, cluster, 1, &format!("tp={tp},zero={zero}")).unwrap();
                assert_eq!(
                    (text.mesh.degree(Family::Tensor), text.choice.contains(&format!("zero={zero}"))),
                    (tp, true)
                );
            }
        }
    }
}

#[test]
fn what_is_recomputed_lies_as_its_original() {
    for pins in ["tp=4,dp=2,zero=0,recompute=full", "tp=2,dp=4,zero=3,recompute=full"] {
        let plan = plan(SMALL, DType::Bf16, "h100:8", 70, pins).unwrap();
        let mut count = 0;
        for (id, node) in plan.graph.nodes() {
            if let Role::Recompute(of) = node.role {
                assert_eq!(plan.strategies[id], plan.strategies[of], "{pins}: {id} ({})", node.path);
                count += 1;
            }
        }
        assert!(count > 0, "{pins}");
    }
}

#[test]
fn zero_divides_storage_over_dp() {
    let plan = plan(SMALL, DType::Bf16, "h100:8", 70, "tp=2,zero=3,microbatch=1").unwrap();
    check_strategies(
        &plan,
        "blocks.1.mlp.gate",
        &[
            "parameter [i=dp j=tp]",
            "cast [i=dp j=tp]",
            "Forward blocks.1.mlp.gate matmul [b=dp.mb n=tp]",
            "sum_squares [i=dp j=tp]",
            "adamw [i=dp j=tp]",
        ],
    );
    let transient = |op: &str| {
        let nodes = plan.graph.nodes().filter(|(_, node)| node.path == "blocks.1.mlp.gate" && node.op.name() == op);
        nodes.map(|(_, node)| plan.transient[node.results[0]]).collect::<Vec<_>>()
    };
    assert_eq!((transient("cast"), transient("parameter")), (vec![true], vec![false]));
}

#[test]
fn what_does_not_fit_is_refused_with_what_would() {
    let error = plan(SMALL, DType::Bf16, "h100:2", 2, "").unwrap_err();
    for part in ["no plan fits in 2.00 GiB per rank", "needs", "parameters", "give each rank"] {
        assert!(error.contains(part), "{error}");
    }
}

/// What the search makes, lowering takes, for all ranks.
#[test]
fn every_plan_is_lowered() {
    let pinned = [
        ("cpu:1", "microbatch=1"),
        ("cpu:4", "dp=4,zero=0"),
        ("cpu:4", "dp=4,zero=1,microbatch=1"),
        ("cpu:4", "dp=4,zero=2,microbatch=1"),
        ("cpu:4", "dp=4,zero=3,microbatch=1"),
        ("cpu:4", "dp=2,tp=2,zero=3"),
        ("cpu:4", "tp=4"),
        ("cpu:4", "dp=2,tp=2,microbatch=1,recompute=block"),
        ("cpu:2", "zero=3,recompute=1"),
        ("cpu:6", "dp=3,tp=2,microbatch=2"),
        ("cpu:6", "tp=6,microbatch=3"),
        ("cpu:4", "tp=2x2,microbatch=3"),
        ("cpu:4", "fsdp=2,zero=1,microbatch=1"),
        ("cpu:4", "fsdp=2,zero=3,microbatch=1,recompute=block"),
        ("cpu:8", "dp=2,fsdp=2,tp=2,zero=2,microbatch=1"),
        ("cpu:4", "cp=4,zero=0"),
        ("cpu:4", "cp=2,dp=2,zero=3,microbatch=1"),
        ("cpu:8", "cp=2,tp=2,dp=2,zero=1,microbatch=1"),
        ("cpu:2", "ulysses=2,zero=1"),
    ];
    for (cluster, pins) in pinned {
        for dtype in [DType::F32, DType::Bf16] {
            let plan = plan(TINY, dtype, cluster, 1, pins).unwrap();
            let plan = shardc_ir::verify::plan(plan).unwrap_or_else(|found| panic!("{pins} {dtype}: {found}"));
            crate::lower::lower_all(&plan, &NoScratch).unwrap_or_else(|error| panic!("{pins} {dtype}: {error}"));
        }
    }
}

/// Where each sample is compared with the mean of the batch, a rank's share of the batch is one microbatch.
#[test]
fn who_pins_a_part_of_a_coupled_batch_is_told_why_not() {
    let mut b = Builder { graph: Graph::new("coupled"), dtype: DType::F32 };
    let rows = TensorType::new(DType::F32, [16, 8]);
    let x = b.add(Input { name: "x".into() }, &[], std::slice::from_ref(&rows), "");
    let weight = b.parameter("weight", &[8, 8]);
    let y = b.add(Matmul::new("bk,kn->bn"), &[x, weight], &[], "");
    let sum = b.add(Reduce { kind: ReduceOp::Sum, dims: vec![0] }, &[y], &[], "");
    let mean = b.add(Affine { scale: 1.0 / 16.0, offset: 0.0 }, &[sum], &[], "");
    let mean = b.add(Broadcast { dims: vec![1] }, &[mean], std::slice::from_ref(&rows), "");
    let apart = b.add(Binary { kind: BinaryKind::Sub }, &[y, mean], &[], "");
    let square = b.add(Binary { kind: BinaryKind::Mul }, &[apart, apart], &[], "");
    let loss = b.add(Reduce { kind: ReduceOp::Sum, dims: vec![0, 1] }, &[square], &[], "");
    b.graph.output("loss", loss, OutputKind::Result);
    let graph = add_optimizer(differentiate(&b.graph, "loss").unwrap(), &OptimizerConfig::default()).unwrap();
    let cluster = Cluster::parse("cpu:4", "h200").unwrap();
    let request = Request { batch: 16, seq: 1, device_memory: Bytes(1 << 30), ..Request::default() };
    let plan = |pins: &str| search(&graph, &cluster, &request, &Pins::parse(pins).unwrap(), &NoScratch);
    assert!(plan("dp=4").unwrap().choice.contains("microbatch=4"));
    let error = plan("dp=4,microbatch=1").unwrap_err().to_string();
    assert!(error.contains("pin `microbatch=1`") && error.contains("depend on each other"), "{error}");
}
