//! What axes of each family divide, in plans that the search finds.

use crate::cluster::Cluster;
use crate::differentiate::differentiate;
use crate::lower::lower_all;
use crate::optimizer::{OptimizerConfig, add_optimizer};
use crate::search::{Pins, search, search_confirmed};
use crate::search_tests::{self, SMALL, Sizes, check_strategies, llama, plan, request};
use shardc_ir::plan::{Prediction, Request, Scope};
use shardc_ir::{Bytes, DType, Family, Feature, Graph, NoScratch, NodeId, Op, Plan, Seconds, feature, verify};

/// The sequence is divided everywhere, but in attention, where heads are: Ulysses, with no rule that says so.
#[test]
fn context_parallelism_divides_the_sequence() {
    let sizes = Sizes { seq: 8192, ..SMALL };
    let plan = plan(sizes, DType::Bf16, "h100:8", 70, "cp=8,microbatch=1,zero=3").unwrap();
    check_strategies(
        &plan,
        "blocks.1",
        &[
            "Forward blocks.1.attention_norm rms_norm [i=mb j=cp]",
            "Forward blocks.1.attention.query matmul [b=mb s=cp]",
            "Forward blocks.1.attention attention [b=mb kv=cp]",
            "Forward blocks.1.attention.output matmul [b=mb s=cp]",
            "Forward blocks.1.mlp.down matmul [b=mb s=cp]",
            "Backward blocks.1.mlp.gate matmul [b=mb s=cp]",
            "parameter [i=cp]",
            "adamw [i=cp]",
        ],
    );
    assert!(feature::missing(&plan, &NoScratch).is_empty());
}

#[test]
fn rings_pass_keys_and_values_round() {
    let sizes = Sizes { seq: 8192, ..SMALL };
    let plan = plan(sizes, DType::Bf16, "h100:8", 70, "ring=4,ulysses=2,microbatch=1,zero=3").unwrap();
    let attention = "Forward blocks.1.attention attention [b=mb kv=ulysses t=ring]";
    check_strategies(&plan, "blocks.1", &[attention, "Forward blocks.1.mlp.down matmul [b=mb s=ring.ulysses]"]);
    assert_eq!(feature::missing(&plan, &NoScratch), [Feature::Ring]);
    // In programs the parts are gathered, which computes the same.
    let sizes = Sizes { layers: 1, seq: 16, hidden: 64, heads: 4, kv: 2, ffn: 64, vocab: 64, ..SMALL };
    let plan = search_tests::plan(sizes, DType::F32, "cpu:4", 1, "ring=2,dp=2,zero=2,microbatch=2").unwrap();
    check_strategies(&plan, "blocks.0", &["attention [b=dp.mb t=ring]", "attention_grad [b=dp.mb t=ring]"]);
    let plan = verify::plan(plan).unwrap_or_else(|found| panic!("{found}"));
    let programs = lower_all(&plan, &NoScratch).unwrap_or_else(|error| panic!("{error}"));
    verify::step(&plan, &programs).unwrap_or_else(|found| panic!("{found}"));
}

/// Where ranks outnumber heads, heads are divided within a node and the rest of the sequence goes round a ring of nodes:
/// axes of the sequence may be either, so a search that is open to rings finds what pins of both give.
#[test]
fn rings_of_heads_are_found_where_ranks_outnumber_heads() {
    let cluster = Cluster::parse("h100:8x4", "h200").unwrap();
    for heads in [32, 8] {
        let sizes = Sizes { layers: 2, batch: 1, seq: 1 << 20, heads, kv: 8, ..SMALL };
        let graph = llama(sizes, DType::Bf16);
        let found = |pins: &str| {
            let request = Request { scope: Scope::All, ..request(sizes, 70) };
            search(&graph, &cluster, &request, &Pins::parse(pins).unwrap(), &NoScratch).unwrap()
        };
        let (free, pinned) = (found("offload=none,pp=1"), found("offload=none,ring=4,ulysses=8"));
        let [own, asked] = [&free, &pinned].map(|plan| plan.prediction.step.0);
        assert!(own <= 1.0001 * asked, "{heads}: {} takes {own}, {} {asked}", free.choice, pinned.choice);
        let divides = |node: NodeId, name: &str| {
            let strategy = &free.strategies[node];
            let mut factors = free.rule(node).factors.iter().enumerate();
            factors.any(|(index, factor)| factor.name == name && free.mesh.extent(strategy.axes(index).to_vec()) > 1)
        };
        let mut attention = free.graph.nodes().filter(|(_, node)| matches!(node.op, Op::Attention(_)));
        assert!(attention.all(|(id, _)| divides(id, "kv") && divides(id, "t")), "{heads}: {}", free.choice);
    }
}

/// What programs do not do, they do not tell: not by what they take, nor by what they would take with kept casts.
#[test]
fn what_programs_do_not_do_stays_an_estimate() {
    let cluster = Cluster::parse("h100:8", "h200").unwrap();
    let found = |pins: &str| {
        let programs = |plan: &Plan| {
            assert!(!feature::unlowered(plan).contains(&Feature::Ring), "programs of a ring are asked");
            Ok(Prediction { step: Seconds(1e-6), ..plan.prediction }.into())
        };
        let (graph, pins) = (llama(SMALL, DType::Bf16), Pins::parse(pins).unwrap());
        let found = search_confirmed(&graph, &cluster, &request(SMALL, 70), &pins, &NoScratch, Some(&programs));
        found.map_err(|error| error.to_string())
    };
    let confirmed = found("dp=8").unwrap();
    assert!(confirmed.prediction.step.0 < 1e-5, "{}", confirmed.prediction.step);
    for pins in ["ring=4,dp=2", "ring=8", "ring=4,dp=2,overlap_chunks=1"] {
        let ring = found(pins).unwrap();
        assert!(ring.prediction.step.0 > 1e-3, "{pins}: {}", ring.prediction.step);
        assert!(!ring.choice.contains("keep_casts"), "{}", ring.choice);
    }
    let moved = found("dp=8,offload=optimizer:2").unwrap();
    assert!(!moved.choice.contains("keep_casts"), "{}", moved.choice);
    // What the host's part of the update takes is on top of what programs take.
    assert!(moved.prediction.step.0 > 1e-4, "{}", moved.prediction.step);
    for pins in ["ring=4,dp=2,keep_casts=1", "dp=8,offload=optimizer:2,keep_casts=1"] {
        let error = found(pins).unwrap_err();
        assert!(error.contains("pin `keep_casts=1`: no program tells what a plan with"), "{error}");
    }
}

/// Parameters are stored in parts inside a node, and the parts replicated across nodes, where gathering over
/// all nodes takes longer.
#[test]
fn storage_stays_in_a_node_where_links_between_nodes_are_slow() {
    let choice = |node_bandwidth: f64| {
        let mut cluster = Cluster::parse("h100:8x4", "h200").unwrap();
        cluster.device.node_bandwidth.value = node_bandwidth;
        let sizes = Sizes { batch: 128, ..SMALL };
        let pins = Pins::parse("tp=1,zero=3,microbatch=1").unwrap();
        let plan = search(&llama(sizes, DType::Bf16), &cluster, &request(sizes, 70), &pins, &NoScratch).unwrap();
        check_strategies(&plan, "blocks.1.mlp.gate", &["matmul [b=dp"]);
        plan.choice
    };
    assert!(choice(1e9).starts_with("dp=4,fsdp=8,tp=1,zero=3"), "{}", choice(1e9));
    assert!(choice(1e12).starts_with("dp=32,tp=1,zero=3"), "{}", choice(1e12));
}

/// Where a cluster's ranks are no power of two, storage over all of them divides nothing evenly, and is in parts still.
#[test]
fn storage_divides_over_any_number_of_ranks() {
    let sizes = Sizes { batch: 240, ..SMALL };
    let plan = plan(sizes, DType::Bf16, "h100:8x5", 24, "tp=1,microbatch=1").unwrap();
    assert!(plan.choice.starts_with("dp=40,tp=1,zero="), "{}", plan.choice);
    for (value, node) in plan.graph.leaves() {
        let Op::State(_) = node.op else { continue };
        let (shape, sharding) = (&plan.graph.ty(value).shape, plan.sharding(value));
        let part: u64 = sharding.local_shape(shape, &plan.mesh).iter().product();
        let elements: u64 = shape.iter().product();
        assert!(40 * part >= elements && 40 * part < elements + elements / 5, "{part} of {shape:?}");
    }
}

/// Two sequences cannot be divided among eight ranks, so something else is.
#[test]
fn few_sequences_are_divided() {
    let sizes = Sizes { batch: 2, seq: 8192, ..SMALL };
    let plan = plan(sizes, DType::Bf16, "h100:1x64", 70, "").unwrap();
    assert!(plan.mesh.degree(Family::Context) * plan.mesh.degree(Family::Tensor) >= 32, "{}", plan.choice);
    assert!(feature::missing(&plan, &NoScratch).is_empty());
}

/// Over many ranks a product is divided at two factors: what is moved falls with the root of their number.
#[test]
fn products_over_many_ranks_are_divided_at_two_factors() {
    let sizes = Sizes { layers: 2, batch: 1, seq: 8192, hidden: 8192, heads: 64, kv: 64, ffn: 8192, vocab: 65536 };
    let plan = plan(sizes, DType::Bf16, "h100:64", 70, "dp=1,cp=1").unwrap();
    assert!(plan.choice.starts_with("dp=1,tp=8x8"), "{} of {:?}", plan.choice, plan.alternatives);
    let both = |text: &String| text.contains("k=") && (text.contains("n=") || text.contains("s="));
    let products: Vec<String> = plan
        .graph
        .nodes()
        .filter(|(_, node)| node.op.name() == "matmul" && node.path.starts_with("blocks"))
        .map(|(id, _)| plan.rule(id).strategy_text(&plan.strategies[id], &plan.mesh))
        .collect();
    assert!(products.iter().filter(|text| both(text)).count() * 2 > products.len(), "{products:?}");
}

/// Tokens `[b, s, d]` are dispatched to slots of experts `[b, e, c, d]` and combined again by given routes.
const EXPERTS: &str = r#"graph @experts {
  %x: f32[8,16,256] = input "x"
  %route: f32[8,4,8,16] = input "route"
  %dense: f32[256,256] = parameter "dense.weight"
  %up: f32[4,256,1024] = parameter "experts.up"
  %down: f32[4,1024,256] = parameter "experts.down"
  %h: f32[8,16,256] = matmul %x, %dense {spec="bsk,kn->bsn"} at "dense"
  %slots: f32[8,4,8,256] = matmul %route, %h {spec="becs,bsd->becd"} at "dispatch"
  %a: f32[8,4,8,1024] = matmul %slots, %up {spec="becd,edf->becf"} at "experts"
  %g: f32[8,4,8,1024] = gelu %a at "experts"
  %o: f32[8,4,8,256] = matmul %g, %down {spec="becf,efd->becd"} at "experts"
  %y: f32[8,16,256] = matmul %route, %o {spec="becs,becd->bsd"} at "combine"
  %e: f32[8,16,256] = mul %y, %y at "loss"
  %s: f32[] = reduce_sum %e {dims=[0,1,2]} at "loss"
  %loss: f32[] = affine %s {offset=0.0, scale=0.001} at "loss"
  return loss %loss
}"#;

fn experts(cluster: &str, pins: &str) -> Result<Plan, String> {
    let graph: Graph = EXPERTS.parse().map_err(|found: shardc_ir::Diagnostics| found.to_string())?;
    let graph = add_optimizer(differentiate(&graph, "loss").unwrap(), &OptimizerConfig::default()).unwrap();
    let request = Request { batch: 8, device_memory: Bytes(1 << 30), ..Request::default() };
    let pins = Pins::parse(pins).map_err(|error| error.to_string())?;
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    search(&graph, &cluster, &request, &pins, &NoScratch).map_err(|error| error.to_string())
}

/// The batch is divided over data and expert ranks, the experts over expert ranks: tokens move between, the
/// gradients of experts are summed over data ranks alone. Nothing in the operations says what an expert is.
#[test]
fn experts_are_divided_and_tokens_move() {
    let plan = experts("cpu:4", "dp=2,ep=2,zero=3,microbatch=2").unwrap();
    let products = ["Forward experts matmul [b=dp e=ep]", "Backward experts matmul [b=dp e=ep]"];
    check_strategies(&plan, "dense", &["Forward dense matmul [b=dp.ep]"]);
    check_strategies(&plan, "experts", &products);
    // Of the parameters, one is stored over all ranks and two over the ranks that hold the same experts.
    check_strategies(&plan, "", &["adamw [i=dp.ep]", "adamw [i=ep.dp]"]);
    for pins in ["dp=2,ep=2,zero=3,microbatch=2", "ep=4,zero=0,microbatch=1", "ep=2,tp=2,zero=1,microbatch=2"] {
        let plan = experts("cpu:4", pins).unwrap();
        let plan = verify::plan(plan).unwrap_or_else(|found| panic!("{pins}: {found}"));
        let programs = lower_all(&plan, &NoScratch).unwrap_or_else(|error| panic!("{pins}: {error}"));
        verify::step(&plan, &programs).unwrap_or_else(|found| panic!("{pins}: {found}"));
    }
    let error = experts("cpu:3", "ep=3").unwrap_err();
    assert!(error.contains("does not divide"), "{error}");
}
