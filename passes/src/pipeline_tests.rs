//! Plans in stages, lowered for every rank, verified as programs and simulated.

use crate::allocate::find_waits;
use crate::cluster::Cluster;
use crate::differentiate::differentiate;
use crate::fold::block_of;
use crate::lower::{lower_all, lower_each};
use crate::lower_tests::{TINY, plan};
use crate::optimizer::{OptimizerConfig, add_optimizer};
use crate::pipeline::anchor::{anchors, chunks};
use crate::pipeline::shared::sum_behind_loop;
use crate::search::{Pins, search, search_confirmed};
use crate::search_tests::{Sizes, llama, llama_with};
use crate::simulate::{Conditions, Outline, exact, predict, simulate};
use shardc_ir::pipeline::Schedule;
use shardc_ir::plan::{Prediction, Request, Scope};
use shardc_ir::program::Action;
use shardc_ir::{Bytes, DType, Family, Graph, NoScratch, NodeId, Plan, Program, Role, Seconds, verify};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const LAYERS: Sizes = Sizes { layers: 4, ..TINY };

/// The plan cut into stages of about equally many nodes; between blocks, if some are computed again.
pub(crate) fn staged(mut plan: Plan, stages: u64, schedule: Schedule, per_stage: u64) -> Plan {
    plan.mesh.push(Family::Pipeline, stages);
    let anchors = anchors(&plan.graph);
    let is_main = |id: &NodeId| anchors[*id] == Some(*id) && plan.graph.node(*id).role == Role::Forward;
    let mut main: Vec<NodeId> = plan.graph.nodes().map(|(id, _)| id).filter(is_main).collect();
    let count = (stages * per_stage) as usize;
    if plan.graph.nodes().any(|(_, node)| matches!(node.role, Role::Recompute(_))) {
        let block = |id: &NodeId| block_of(&plan.graph, plan.graph.node(*id)).map(str::to_string);
        main = main.iter().zip(&main[1..]).filter(|(a, b)| block(a) != block(b)).map(|(_, b)| *b).collect();
        main.insert(0, NodeId::from_u32(0));
    }
    let cuts: Vec<NodeId> = (1..count).map(|chunk| main[main.len() * chunk / count]).collect();
    plan.pipeline.chunks = chunks(&anchors, &plan.graph, &cuts);
    (plan.pipeline.schedule, plan.pipeline.per_stage) = (schedule, per_stage);
    sum_behind_loop(&plan.graph, &plan.mesh, &mut plan.pipeline, &mut plan.strategies);
    plan
}

/// And what is predicted of them is the same where sections that are alike stand once.
#[test]
fn programs_of_stages_are_sound() {
    let mut is_shorter = false;
    for (cluster, pins) in [
        ("cpu:1", "microbatch=1"),
        ("cpu:2", "dp=2,tp=1,zero=0,microbatch=1"),
        ("cpu:2", "dp=2,tp=1,zero=3,microbatch=1"),
        ("cpu:2", "dp=2,tp=1,zero=2,microbatch=1,recompute=block"),
        ("cpu:2", "tp=2,dp=1,microbatch=1"),
        ("cpu:4", "dp=2,tp=2,zero=1,microbatch=1,loss_chunks=2"),
    ] {
        let base = plan(LAYERS, DType::Bf16, cluster, pins, false);
        for (schedule, per_stage) in Schedule::ALL.map(|schedule| (schedule, schedule.usual_chunks()[0])) {
            for stages in [2, 3] {
                let plan = staged(base.clone(), stages, schedule, per_stage);
                let name = format!("{pins} {stages} stages {}", schedule.name());
                let plan = verify::plan(plan).unwrap_or_else(|found| panic!("{name}: {found}"));
                let programs = lower_all(&plan, &NoScratch).unwrap_or_else(|error| panic!("{name}: {error}"));
                verify::step(&plan, &programs).unwrap_or_else(|found| panic!("{name}: {found}"));
                for program in &programs {
                    check_waits(program, &name);
                }
                let apart = plan.mesh.family(Family::Pipeline);
                let first: Vec<_> =
                    plan.mesh.group(0, &apart).iter().map(|rank| programs[*rank as usize].clone()).collect();
                let cluster = Cluster::parse(&format!("h200:{}", plan.mesh.ranks()), "h200").expect("a cluster");
                let whole: Vec<_> = first.iter().map(|program| Outline::of(program, &plan, &cluster)).collect();
                let whole = exact(&whole, &apart, &plan, &cluster).unwrap_or_else(|error| panic!("{name}: {error}"));
                assert!(whole.prediction.step.0 > 0.0, "{name}");
                let ranks = plan.mesh.group(0, &apart);
                let abridged = lower_each(&plan, &ranks, &NoScratch, |abridged| {
                    let sections = abridged.program.sections.len();
                    (sections, Outline::of_abridged(&abridged, &plan, &cluster))
                });
                let (sections, abridged): (Vec<_>, Vec<_>) = abridged.expect("programs").into_iter().unzip();
                let all = first.iter().map(|program| program.sections.len());
                assert!(sections.iter().zip(all).all(|(own, all)| *own <= all), "{name}");
                is_shorter |= sections.iter().zip(&first).any(|(own, all)| 2 * *own < all.sections.len());
                assert_eq!(exact(&abridged, &apart, &plan, &cluster).expect("a step"), whole, "{name}");
            }
        }
    }
    assert!(is_shorter, "no program is much shorter abridged");
}

/// Sections that are alike have the waits of the first of them, which are those that each would have been given.
fn check_waits(program: &Program, name: &str) {
    for section in program.sections.values() {
        let mut anew = section.instructions.clone();
        find_waits(&program.buffers, &mut anew);
        assert_eq!(anew, section.instructions, "{name}: rank {} {}", program.rank, section.name);
    }
}

fn searched(sizes: Sizes, cluster: &str, pins: &str, scope: Scope, memory: u64) -> Result<Plan, String> {
    searched_of(&llama(sizes, DType::Bf16), sizes, (cluster, pins), scope, memory)
}

fn searched_of(
    graph: &Graph,
    sizes: Sizes,
    (cluster, pins): (&str, &str),
    scope: Scope,
    memory: u64,
) -> Result<Plan, String> {
    let cluster = Cluster::parse(cluster, "h200").expect("a cluster");
    let pins = Pins::parse(pins).map_err(|error| error.to_string())?;
    let (batch, seq) = (sizes.batch, sizes.seq);
    let request = Request { batch, seq, scope, device_memory: Bytes(memory), ..Request::default() };
    search(graph, &cluster, &request, &pins, &NoScratch).map_err(|error| error.to_string())
}

/// The plan's step and memory by its programs.
fn by_programs(plan: &Plan, cluster: &str) -> Prediction {
    by_programs_on(plan, &Cluster::parse(cluster, "h200").expect("a cluster"))
}

fn by_programs_on(plan: &Plan, cluster: &Cluster) -> Prediction {
    let plan = verify::plan(plan).unwrap_or_else(|found| panic!("{}: {found}", plan.choice));
    let programs = lower_all(&plan, &NoScratch).unwrap_or_else(|error| panic!("{}: {error}", plan.choice));
    verify::step(&plan, &programs).unwrap_or_else(|found| panic!("{}: {found}", plan.choice));
    let apart = plan.mesh.family(Family::Pipeline);
    let first: Vec<_> = plan.mesh.group(0, &apart).iter().map(|rank| programs[*rank as usize].clone()).collect();
    let simulated = simulate(&first, &apart, &plan, cluster, &Conditions::default()).expect("a step");
    predict(&first, &simulated, &plan, cluster)
}

#[test]
fn pinned_pipelines_are_planned_as_their_programs_run() {
    let sizes = Sizes { layers: 8, batch: 16, seq: 512, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };
    for (pins, expect) in [
        ("pp=2,dp=4,schedule=1f1b,recompute=none", "pp=2,dp=4,tp=1,schedule=1f1b"),
        ("pp=4,dp=2,schedule=gpipe,recompute=none", "pp=4,dp=2,tp=1,schedule=gpipe"),
        ("pp=2,dp=1,tp=4,schedule=1f1b,zero=0", "pp=2,dp=1,tp=4,schedule=1f1b"),
        ("pp=2,dp=4,schedule=interleaved,virtual=2", "schedule=interleaved,virtual=2"),
        ("pp=4,dp=2,schedule=zbv,zero=1", "schedule=zbv,virtual=2"),
        ("pp=8,microbatch=1,recompute=block", "pp=8,dp=1,tp=1"),
    ] {
        let plan = searched(sizes, "h200:8", pins, Scope::Runnable, 140 << 30)
            .unwrap_or_else(|error| panic!("{pins}: {error}"));
        assert!(plan.choice.contains(expect), "{pins}: {}", plan.choice);
        let exact = by_programs(&plan, "h200:8");
        let off = |own: f64, exact: f64| own / exact - 1.0;
        let time = off(plan.prediction.step.0, exact.step.0);
        let memory = off(plan.prediction.memory.total().0 as f64, exact.memory.total().0 as f64);
        let is_close = time.abs() < 0.15 && memory.abs() < 0.08;
        assert!(is_close, "{}: {time:+.3} in time, {memory:+.3} in memory", plan.choice);
    }
}

/// The gradients of a table that two stages read are added up on each, and passed on once, in the parts that ranks
/// store.
#[test]
fn gradients_of_shared_weights_pass_once() {
    let sizes = Sizes { layers: 16, batch: 16, seq: 2048, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 65536 };
    let (graph, table) = (llama_with(sizes, DType::Bf16, true), sizes.vocab * sizes.hidden);
    for (pins, parts) in [
        ("pp=4,dp=2,schedule=1f1b,zero=0", 1),
        ("pp=4,dp=2,schedule=gpipe,zero=1", 2),
        ("pp=2,dp=4,schedule=interleaved,virtual=2,zero=2", 4),
        ("pp=2,tp=4,schedule=1f1b,zero=0", 4),
        ("pp=2,tp=2,dp=2,schedule=1f1b,zero=3", 4),
    ] {
        let pins = &format!("{pins},microbatch=1,recompute=none");
        let plan = searched_of(&graph, sizes, ("h100:8", pins), Scope::Runnable, 140 << 30);
        let plan = plan.unwrap_or_else(|error| panic!("{pins}: {error}"));
        let programs = lower_all(&verify::plan(&plan).expect("a plan"), &NoScratch).expect("programs");
        for program in &programs {
            let sections = program.order.iter().flat_map(|run| &program.sections[run.section].instructions);
            let sent = sections.filter(|instruction| matches!(instruction.action, Action::Send { .. }));
            let sent = sent.map(|send| program.buffers[send.operands[0]].ty.clone());
            let gradients = sent.filter(|ty| ty.dtype == DType::F32 && ty.elements() > table / 16);
            let elements: Vec<u64> = gradients.map(|ty| ty.elements()).collect();
            let is_last = plan.mesh.stage_of(program.rank) + 1 == plan.stages();
            assert_eq!(elements, vec![table / parts; usize::from(is_last)], "{pins}: rank {}", program.rank);
            // Numbers are no smaller for being reduced: they are once, behind the loop.
            let in_loop =
                program.sections.values().filter(|section| !matches!(&*section.name, "prologue" | "epilogue"));
            for sum in in_loop.flat_map(|section| &section.instructions) {
                let is_sum = matches!(sum.action, Action::AllReduce { .. });
                let is_number = sum.operands.iter().all(|id| program.buffers[*id].ty.elements() == 1);
                assert!(!(is_sum && is_number), "{pins}: rank {}: {sum:?}", program.rank);
            }
        }
        let exact = by_programs(&plan, "h100:8");
        let off = |own: f64, exact: f64| own / exact - 1.0;
        let time = off(plan.prediction.step.0, exact.step.0);
        let memory = off(plan.prediction.memory.total().0 as f64, exact.memory.total().0 as f64);
        // What is reduced or gathered in every microbatch is known less well.
        let is_once = plan.choice.contains("zero=0") || plan.choice.contains("zero=1");
        let most = if is_once { [0.05, 0.1] } else { [0.1, 0.2] };
        let is_close = time.abs() < most[0] && memory.abs() < most[1];
        assert!(is_close, "{pins}: {time:+.3} in time, {memory:+.3} in memory");
    }
}

/// Gradients of weights fill the waits: by the programs, too, zero-bubble V waits less than 1F1B.
#[test]
fn halves_of_the_backward_pass_fill_the_bubble() {
    let sizes = Sizes { layers: 8, batch: 16, seq: 2048, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };
    let bubble = |schedule: &str| {
        let pins = format!("pp=4,dp=2,zero=0,microbatch=1,recompute=none,schedule={schedule}");
        let plan = searched(sizes, "h200:8", &pins, Scope::Runnable, 140 << 30).expect("a plan");
        by_programs(&plan, "h200:8").bubble.0
    };
    let (plain, halves) = (bubble("1f1b"), bubble("zbv"));
    assert!(halves < 0.25 * plain, "{halves}, with 1f1b {plain}");
}

/// Where memory is short, zero-bubble V begins fewer microbatches at a time rather than compute much again.
#[test]
fn less_is_in_flight_where_memory_is_short() {
    let sizes = Sizes { layers: 8, batch: 32, seq: 2048, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };
    let plan = |more: &str, memory: u64| {
        let pins = format!("pp=4,dp=2,schedule=zbv,zero=0,microbatch=1{more}");
        searched(sizes, "h200:8", &pins, Scope::Runnable, memory)
    };
    let all = plan(",in_flight=12,recompute=none", 140 << 30).expect("a plan").prediction.memory.total().0;
    let memory = all * 72 / 100;
    // As many gradients of weights wait as may, too.
    let full = plan(",in_flight=12,delayed=12", memory).expect("a plan");
    let found = plan("", memory).expect("a plan");
    assert_eq!(found.pipeline.most_in_flight(4), 7, "{}", found.choice);
    let steps = [&full, &found].map(|plan| by_programs(plan, "h200:8").step.0);
    assert!(steps[1] < 0.98 * steps[0], "{steps:?}: {} and {}", full.choice, found.choice);
    assert!(by_programs(&found, "h200:8").memory.total().0 <= memory, "{}", found.choice);
    // What was chosen can be asked for.
    let named = plan(",in_flight=7", memory).expect("a plan");
    assert_eq!(named.choice, found.choice);
    // With all of it in flight, no recomputation would do.
    let memory = all * 51 / 100;
    assert!(plan(",in_flight=12", memory).is_err());
    assert_eq!(plan("", memory).expect("a plan").pipeline.most_in_flight(4), 8);
    // In the turns of half of it nothing is computed again where with all of it something is.
    let memory = all * 66 / 100;
    assert!(plan(",in_flight=12,delayed=12,recompute=none", memory).is_err());
    let turns = plan(",in_flight=6", memory).expect("a plan").choice;
    assert!(!turns.contains("value:") && turns.contains("recompute=none"), "{turns}");
}

/// Cuts that fit because they are unequal are no reason to compute nothing again: a part of the first stage costs less.
#[test]
fn what_fits_in_unequal_stages_is_not_the_end() {
    let sizes = Sizes { layers: 32, batch: 32, seq: 2048, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };
    let plan = |more: &str, memory: u64| {
        let pins = format!("pp=4,dp=1,schedule=1f1b,zero=0,microbatch=1{more}");
        searched(sizes, "h200:4", &pins, Scope::Runnable, memory).expect("a plan")
    };
    let free = plan("", 140 << 30);
    let memory = free.prediction.memory.total().0 * 91 / 100;
    let (unequal, found) = (plan(",recompute=none", memory), plan("", memory));
    let [free, unequal, step] = [&free, &unequal, &found].map(|plan| by_programs(plan, "h200:4").step.0);
    assert!(unequal > 1.03 * free, "{unequal} and {free}");
    assert!(step < 1.02 * free, "{step}, {free}, {unequal}: {}", found.choice);
    assert!(by_programs(&found, "h200:4").memory.total().0 <= memory, "{}", found.choice);
}

/// The first stage holds most microbatches: where memory is short it computes again, and the last one does not.
#[test]
fn stages_compute_again_what_they_must() {
    let sizes = Sizes { layers: 8, batch: 32, seq: 2048, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };
    let pins = "pp=4,dp=2,schedule=1f1b,zero=0,microbatch=1";
    let plan = |more: &str, memory: u64| searched(sizes, "h200:8", &format!("{pins}{more}"), Scope::Runnable, memory);
    let free = plan(",recompute=none", 140 << 30).expect("a plan").prediction;
    let all = plan(",recompute=block", 140 << 30).expect("a plan").prediction;
    let between = (free.memory.total().0 + all.memory.total().0) / 2;
    let mixed = plan("", between).expect("a plan");
    let again = |chunk: u32| {
        let of_chunk = |(id, _): &(NodeId, _)| mixed.pipeline.chunks[*id] == Some(chunk);
        mixed.graph.nodes().filter(of_chunk).filter(|(_, node)| matches!(node.role, Role::Recompute(_))).count()
    };
    assert!(mixed.choice.contains("stage_recompute="), "{}", mixed.choice);
    assert!(again(0) > 0 && again(3) == 0, "{}", mixed.choice);
    let exact = by_programs(&mixed, "h200:8");
    assert!(exact.memory.total().0 <= between && exact.step.0 < all.step.0, "{exact:?}");
    // What was chosen can be asked for.
    let named = mixed.choice.split(',').find(|part| part.starts_with("stage_recompute=")).expect("it was found");
    assert_eq!(plan(&format!(",{named}"), between).expect("a plan").choice, mixed.choice);
}

/// A stage computes again only as many of its blocks as it must, and that is faster than if it did so in all of them.
#[test]
fn stages_compute_blocks_again_one_by_one() {
    let sizes = Sizes { layers: 16, batch: 16, seq: 2048, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };
    let plan = |more: &str, memory: u64| {
        let pins = format!("pp=2,dp=1,schedule=1f1b,zero=0,microbatch=1{more}");
        searched(sizes, "h200:2", &pins, Scope::Runnable, memory).expect("a plan")
    };
    let free = plan(",recompute=none", 140 << 30).prediction.memory.total().0;
    let found = plan("", free * 9 / 10);
    let mut again: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, node) in found.graph.nodes().filter(|(id, _)| found.pipeline.chunks[*id] == Some(0)) {
        let Some(block) = crate::fold::block(&node.path) else { continue };
        *again.entry(block).or_default() += u64::from(matches!(node.role, Role::Recompute(_)));
    }
    let counts: BTreeSet<u64> = again.values().copied().collect();
    assert_eq!(counts.len(), 2, "{again:?}: {}", found.choice);
    let exact = by_programs(&found, "h200:2");
    assert!(exact.memory.total().0 <= free * 9 / 10, "{exact:?}: {}", found.choice);
    let steps = found.choice.split(['/', ',']).find_map(|own| own.strip_prefix("stage_recompute=value:")?.parse().ok());
    let whole = steps.map(|steps: u64| steps.next_multiple_of(sizes.layers)).expect("steps of the first stage");
    let whole = by_programs(&plan(&format!(",stage_recompute=value:{whole}/none"), 140 << 30), "h200:2");
    assert!(exact.step < whole.step, "{exact:?} and {whole:?}: {}", found.choice);
}

/// Stages on faster nodes get more of the model, and the step is faster than if all nodes were the slower ones. The
/// plan says how it was found, can be read back, and is what its programs do, by what its own devices can.
#[test]
fn stages_are_as_large_as_their_nodes_are_fast() {
    let sizes = Sizes { layers: 12, batch: 32, seq: 2048, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };
    let plan = |parts: &[&str]| {
        let parts: Vec<String> =
            parts.iter().map(|name| format!("[[parts]]\ndevice = \"{name}\"\nnodes = 1\n")).collect();
        let cluster = Cluster::from_toml("c.toml", &format!("per_node = 4\n{}", parts.concat())).expect("a cluster");
        let pins = Pins::parse("pp=2,dp=4,schedule=1f1b,zero=0,microbatch=1,recompute=none").expect("pins");
        let (batch, seq) = (sizes.batch, sizes.seq);
        let request = Request { batch, seq, device_memory: Bytes(70 << 30), ..Request::default() };
        let plan = search(&llama(sizes, DType::Bf16), &cluster, &request, &pins, &NoScratch).expect("a plan");
        let products = |chunk: u32| {
            let is_own = |(id, node): &(NodeId, &shardc_ir::Node)| {
                plan.pipeline.chunks[*id] == Some(chunk) && node.op.name() == "matmul"
            };
            plan.graph.nodes().filter(is_own).count() as f64
        };
        let exact = by_programs_on(&plan, &cluster);
        let off = |own: f64, exact: f64| (own / exact - 1.0).abs();
        assert!(off(plan.prediction.step.0, exact.step.0) < 0.15, "{}: {exact:?}", plan.choice);
        let memory = [&plan.prediction, &exact].map(|prediction| prediction.memory.total().0 as f64);
        assert!(off(memory[0], memory[1]) < 0.08, "{}: {exact:?}", plan.choice);
        let peak = 4.0 * cluster.parts.iter().map(|part| part.device.peak_bf16.value).sum::<f64>();
        for Prediction { flops, step, mfu, .. } in [&plan.prediction, &exact] {
            assert!(off(*mfu, flops.0 / (step.0 * peak)) < 1e-6, "{}: {mfu}", plan.choice);
        }
        let read = Plan::from_json(&plan.to_json()).unwrap_or_else(|error| panic!("{}: {error}", plan.choice));
        assert!(read.search.bound.0 > 0.0 && read.search.bound <= read.search.estimate, "{:?}", read.search);
        (products(0) / products(1), plan.prediction.step.0)
    };
    let (mixed, turned, slow) = (plan(&["h100", "a100-80"]), plan(&["a100-80", "h100"]), plan(&["a100-80", "a100-80"]));
    assert!(mixed.0 > 1.5 && turned.0 < 0.67, "{mixed:?} {turned:?}");
    assert!(mixed.1 < 0.85 * slow.1 && turned.1 < 0.85 * slow.1, "{mixed:?} {turned:?} {slow:?}");
}

/// Residual blocks of one linear layer with a bias, and a head that reads the first weight again, padded.
fn biased(blocks: usize) -> Graph {
    let mut text = "graph @biased {\n  %x: f32[8,16,64] = input \"x\"\n".to_string();
    for block in 0..blocks {
        text += &format!("  %w{block}: f32[64,64] = parameter \"blocks.{block}.weight\" at \"blocks.{block}\"\n");
        text += &format!("  %b{block}: f32[64] = parameter \"blocks.{block}.bias\" at \"blocks.{block}\"\n");
    }
    let mut x = "x".to_string();
    for block in 0..blocks {
        let at = format!("at \"blocks.{block}\"\n");
        text += &format!("  %m{block}: f32[8,16,64] = matmul %{x}, %w{block} {{spec=\"bsk,kn->bsn\"}} {at}");
        text += &format!("  %v{block}: f32[8,16,64] = broadcast %b{block} {{dims=[2]}} {at}");
        text += &format!("  %a{block}: f32[8,16,64] = add %m{block}, %v{block} {at}");
        text += &format!("  %y{block}: f32[8,16,64] = add %{x}, %a{block} {at}");
        x = format!("y{block}");
    }
    text += "  %p: f32[80,64] = pad %w0 {high=[16,0], low=[0,0], value=0.0} at \"head\"\n";
    text += &format!("  %h: f32[8,16,80] = matmul %{x}, %p {{spec=\"bsk,nk->bsn\"}} at \"head\"\n");
    text += "  %e: f32[8,16,80] = mul %h, %h\n  %s: f32[] = reduce_sum %e {dims=[0,1,2]}\n";
    let graph: Graph = (text + "  return loss %s\n}").parse().unwrap_or_else(|found| panic!("{found}"));
    add_optimizer(differentiate(&graph, "loss").expect("gradients"), &OptimizerConfig::default()).expect("a step")
}

/// The gradient of a bias sums up what comes from the block behind: in the chunk of its bias, or no cut could part
/// the two blocks. What is made of a weight is made where the weight is, but for what is larger, as a padded one: of that
/// the gradient is cut where the weight is.
#[test]
fn biases_and_shared_weights_join_no_blocks() {
    let (graph, cluster) = (biased(8), Cluster::parse("cpu:4", "h200").expect("a cluster"));
    let found = anchors(&graph);
    for (id, node) in graph.nodes().filter(|(_, node)| node.op.name() == "adamw") {
        let gradient = graph.value(node.operands[1]).def;
        assert!(found[id].is_some() && found[id] == found[gradient], "{}: {:?}", node.path, graph.node(gradient));
    }
    let of =
        |op: &str| graph.nodes().find(|(_, node)| node.op.name() == op).map(|(id, node)| (id, node.operands.clone()));
    let ((pad, padded), (slice, _)) = (of("pad").expect("a padded weight"), of("slice").expect("its gradient, cut"));
    let weight = found[graph.value(padded[0]).def];
    assert!(weight.is_some() && found[slice] == weight && found[pad] > weight, "{:?}, {:?}", found[pad], found[slice]);
    let request = Request { batch: 8, device_memory: Bytes(1 << 30), ..Request::default() };
    for pins in ["schedule=1f1b", "schedule=gpipe", "schedule=interleaved,virtual=2", "schedule=zbv"] {
        let pins = format!("pp=4,{pins},microbatch=1");
        let plan = search(&graph, &cluster, &request, &Pins::parse(&pins).expect("pins"), &NoScratch);
        let plan = plan.unwrap_or_else(|error| panic!("{pins}: {error}"));
        assert_eq!(plan.stages(), 4, "{pins}");
        by_programs(&plan, "cpu:4");
    }
}

#[test]
fn pins_of_pipelines_that_cannot_be_kept() {
    let check = |pins: &str, expect: &str| {
        let error = searched(LAYERS, "h200:4", pins, Scope::Runnable, 140 << 30).expect_err(pins);
        assert!(error.contains(expect), "{pins}: {error}");
    };
    check("pp=3", "3 does not divide the cluster's 4 ranks");
    check("pp=4,schedule=interleaved,virtual=100", "400 chunks are more than the");
    check("pp=4,schedule=zbv,microbatch=12", "a pipeline takes at least 2 microbatches");
    check("pp=4,microbatch=12", "a pipeline takes at least 2 microbatches");
    check("pp=4,schedule=interleaved,virtual=2,microbatch=1,in_flight=3", "have at least 11 chunks in flight, not 3");
    check("dp=2,tp=1", "they make 2 ranks and the cluster has 4");
    check("pp=2,stage_recompute=block/none/none", "it names 3 of the 2 stages");
    check("pp=2,stage_recompute=block/none,recompute=selective", "it is block at most; leave recompute out");
    check("pp=2,stage_recompute=block/some", "`some` is not none, selective, value:STEPS or block");
}

#[test]
fn every_plan_is_no_worse_than_what_can_be_run() {
    let sizes = Sizes { layers: 8, batch: 16, seq: 512, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };
    let runnable = searched(sizes, "h200:2x4", "", Scope::Runnable, 140 << 30).expect("a plan");
    let all = searched(sizes, "h200:2x4", "", Scope::All, 140 << 30).expect("a plan");
    assert_eq!(runnable.stages(), 1);
    assert!(all.prediction.step.0 <= runnable.prediction.step.0, "{} {}", all.choice, runnable.choice);
    assert!(all.alternatives.iter().any(|other| other.choice.contains("pp=")) || all.stages() > 1);
}

/// What programs take longer than was estimated makes no plan of a wider space slower than those of the narrower one.
#[test]
fn a_wider_space_gives_no_slower_plan_by_programs() {
    let sizes = Sizes { layers: 8, batch: 16, seq: 512, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };
    let cluster = Cluster::parse("h200:1x8", "h200").expect("a cluster");
    let found = |scope: Scope, least: f64| {
        // Stages take no less than this.
        let confirm = |plan: &Plan| {
            let step = plan.prediction.step.0.max(if plan.stages() > 1 { least } else { 0.0 });
            Ok(Prediction { step: Seconds(step), ..plan.prediction }.into())
        };
        let (batch, seq) = (sizes.batch, sizes.seq);
        let request = Request { batch, seq, scope, ..Request::default() };
        let graph = llama(sizes, DType::Bf16);
        search_confirmed(&graph, &cluster, &request, &Pins::default(), &NoScratch, Some(&confirm)).expect("a plan")
    };
    let runnable = found(Scope::Runnable, 0.0);
    let (estimated, all) = (found(Scope::All, 0.0), found(Scope::All, 1.01 * runnable.prediction.step.0));
    assert!(estimated.stages() > 1 && estimated.prediction.step.0 < 0.9 * runnable.prediction.step.0);
    assert!(all.prediction.step.0 <= runnable.prediction.step.0, "{} {}", all.choice, runnable.choice);
    // The best of the other kind is told of, and the least that either kind takes.
    for (chosen, lost) in [(&estimated, &runnable), (&all, &estimated)] {
        let is_lost = |choice: &str| choice.contains("pp=") == (lost.stages() > 1);
        assert!(chosen.alternatives.iter().any(|other| is_lost(&other.choice)), "{}", chosen.choice);
        let (search, others) = (&chosen.search, chosen.search.bound_of_others.expect("both kinds were searched"));
        assert!(search.bound.0 <= search.estimate.0 && others.0 <= lost.search.estimate.0 * (1.0 + 1e-9));
        assert!((search.estimate.0 / search.bound.0 - 1.0 - search.gap).abs() < 1e-9);
    }
}

/// Where every pipeline is left out beside a plan of one stage, the least that they take is told all the same.
#[test]
fn pipelines_that_are_left_out_are_told_by_their_bound() {
    let sizes = Sizes { layers: 8, batch: 256, seq: 2048, hidden: 2048, heads: 16, kv: 16, ffn: 8192, vocab: 8192 };
    let cluster = Cluster::parse("h200:8", "h200").expect("a cluster");
    let request = |scope: Scope| Request { batch: sizes.batch, seq: sizes.seq, scope, ..Request::default() };
    let graph = llama(sizes, DType::Bf16);
    let found = |scope: Scope| search(&graph, &cluster, &request(scope), &Pins::default(), &NoScratch).expect("a plan");
    let [whole, chosen] = [Scope::Runnable, Scope::All].map(found);
    assert!(whole.stages() == 1 && whole.search.bound_of_others.is_none());
    assert_eq!(chosen.choice, whole.choice);
    assert!(chosen.alternatives.iter().all(|other| !other.choice.contains("pp=")), "{:?}", chosen.alternatives);
    assert!(chosen.search.meshes > whole.search.meshes);
    let others = chosen.search.bound_of_others.expect("both kinds were searched");
    assert!(others.0 > 0.98 * chosen.search.estimate.0, "{others} beside {}", chosen.search.estimate);
}

/// Programs with a whole head take far more than was estimated: where those do not fit the head is cut, so more memory is
/// never too little.
#[test]
fn a_head_that_turns_out_too_large_is_cut() {
    let sizes = Sizes { layers: 4, batch: 8, seq: 2048, hidden: 512, heads: 8, kv: 8, ffn: 1536, vocab: 32_000 };
    let cluster = Cluster::parse("h200:2", "h200").expect("a cluster");
    let pins = Pins::parse("pp=2,dp=1,schedule=1f1b,zero=0,microbatch=1").expect("pins");
    let graph = llama(sizes, DType::Bf16);
    let confirm = |plan: &Plan| {
        let excess = if plan.choice.contains("loss_chunks") { 0.05 } else { 0.4 };
        let mut prediction = plan.prediction;
        prediction.memory.activations += Bytes((excess * prediction.memory.total().0 as f64) as u64);
        Ok(prediction.into())
    };
    let (batch, seq) = (sizes.batch, sizes.seq);
    let found = |memory: u64| {
        let request = Request { batch, seq, device_memory: Bytes(memory), ..Request::default() };
        search_confirmed(&graph, &cluster, &request, &pins, &NoScratch, Some(&confirm))
    };
    let all = found(140 << 30).expect("a plan").prediction.memory.total().0;
    let fits: Vec<bool> = (10..=20).map(|part| found(all * part / 20).is_ok()).collect();
    assert!(fits.is_sorted() && fits[0] != fits[10], "{fits:?}");
}
