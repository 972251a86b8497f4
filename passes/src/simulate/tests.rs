//! Simulated steps: against the search's estimate, and of small programs written out.

use super::{Conditions, Simulated, predict, simulate};
use crate::cluster::Cluster;
use crate::cost::host::Host;
use crate::lower::lower_rank;
use crate::search_tests::{SMALL, Sizes, plan};
use crate::seeded_bug_tests::ahead::Brings;
use shardc_ir::program::{Action, Stream};
use shardc_ir::{DType, Diagnostics, Family, Graph, NoScratch, Op, Plan, Program, TensorType, verify};

fn simulated(plan: &Plan, cluster: &str, conditions: &Conditions) -> Simulated {
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let program = lower_rank(&verify::plan(plan).unwrap(), 0, &NoScratch).unwrap();
    simulate(&[program], &[], plan, &cluster, conditions).unwrap()
}

/// The closed form of the search and the simulation of the lowered programs say the same.
#[test]
fn the_estimate_and_the_simulation_agree() {
    let sizes = Sizes { layers: 16, ..SMALL };
    let many = Sizes { batch: 64, ..sizes };
    let cases = [
        (sizes, "h100:1", "microbatch=1"),
        (sizes, "h100:8", "dp=8,zero=1"),
        (sizes, "h100:4", "dp=4,zero=2,microbatch=1"),
        (sizes, "h100:4", "dp=4,zero=3,microbatch=1"),
        (sizes, "h100:8", "tp=4,dp=2,zero=1,microbatch=1"),
        (sizes, "h100:8", "tp=2,dp=4,zero=1,microbatch=1"),
        (sizes, "a100-80:4", "dp=4,zero=1,microbatch=1,recompute=2"),
        (sizes, "h100:2x4", "dp=4,tp=2,zero=3"),
        (many, "h100:8x4", "dp=32,zero=2,microbatch=1"),
        (many, "h100:8x4", "dp=16,tp=2,zero=1,microbatch=2"),
        (sizes, "h200:4", "dp=4,zero=3,microbatch=1,recompute=8"),
        (LONG, "h100:8", "dp=2,cp=4,zero=1,microbatch=1,overlap_chunks=1"),
        (LONG, "h100:8", "dp=2,cp=4,zero=3,microbatch=1,overlap_chunks=1"),
    ];
    let mut wrong = Vec::new();
    for (sizes, cluster, pins) in cases {
        let plan = plan(sizes, DType::Bf16, cluster, 1000, pins).unwrap_or_else(|error| panic!("{pins}: {error}"));
        let simulated = simulated(&plan, cluster, &Conditions::default());
        let (estimate, rank) = (plan.prediction, &simulated.slowest().unwrap());
        let off = estimate.step.0 / simulated.step.0 - 1.0;
        let line = format!(
            "{cluster} {pins}: estimated {} and simulated {} ({:+.1}%); kernels {} and {}, communication {} and {}, exposed {} and {}",
            estimate.step,
            simulated.step,
            100.0 * off,
            estimate.matmul + estimate.memory_bound + estimate.optimizer,
            rank.busy[Stream::Compute as usize],
            estimate.communication,
            rank.communication,
            estimate.exposed_communication,
            rank.exposed_communication,
        );
        // Of a step that is mostly communication over several axes on several nodes, the closed form sees less.
        let most = if rank.exposed_communication.0 > 0.5 * simulated.step.0 { 0.04 } else { 0.03 };
        if off.abs() > most {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "apart by more than 3%:\n{}", wrong.join("\n"));
}

/// What the host brings ahead takes no time of kernels, but no step is shorter than the host's link takes for it.
#[test]
fn no_step_is_shorter_than_its_inputs_take() {
    let cluster = Cluster::parse("h200:1", "h200").unwrap();
    let plan = plan(Sizes { layers: 1, batch: 64, ..SMALL }, DType::Bf16, "h200:1", 1000, "microbatch=64").unwrap();
    let mut ahead = lower_rank(&verify::plan(&plan).unwrap(), 0, &Brings).unwrap();
    let step = |program: &Program| {
        simulate(std::slice::from_ref(program), &[], &plan, &cluster, &Conditions::default()).unwrap().step.0
    };
    let alone = step(&ahead);
    let (_, staging) = ahead.staging().first().copied().unwrap();
    let bytes = 4.0 * alone / Host::of(&cluster).feed(1.0);
    ahead.buffers[staging].ty = TensorType::new(DType::U8, [bytes as u64]);
    let link = Host::of(&cluster).feed(bytes);
    assert!(link > 2.0 * alone && step(&ahead) >= link && step(&ahead) < 1.01 * link, "{} {link}", step(&ahead));
}

/// However many ranks there are, those that are alike are simulated once.
#[test]
fn equal_ranks_are_folded() {
    let sizes = Sizes { layers: 1, batch: 1024, ..SMALL };
    let plan = plan(sizes, DType::Bf16, "h100:8x256", 1000, "tp=2,fsdp=1,zero=1,microbatch=1").unwrap();
    let even = simulated(&plan, "h100:8x256", &Conditions::default());
    assert_eq!(even.ranks.iter().map(|rank| rank.count).collect::<Vec<_>>(), [2048]);
    let slow = Conditions { stragglers: vec![(5, 2.0)], ..Conditions::default() };
    let late = simulated(&plan, "h100:8x256", &slow);
    // The slow rank; its tensor partner; its data peers; those of its partner.
    let mut counts: Vec<u64> = late.ranks.iter().map(|rank| rank.count).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 1, 1023, 1023]);
    assert!(late.step > even.step && late.step.0 <= 2.0 * even.step.0, "{} {}", late.step, even.step);
    let waits = |rank: u64| late.ranks.iter().find(|known| known.rank == rank).unwrap().waiting;
    assert!(waits(5) < waits(4) && waits(5) < waits(0));
}

/// Of few heads the queries are divided: the rank with the last part sees the most keys.
const LONG: Sizes = Sizes { layers: 8, batch: 4, seq: 16384, hidden: 2048, heads: 2, kv: 2, ..SMALL };

/// Ranks whose parts of causal attention see more keys than those of others are no less for that: all wait for the last.
#[test]
fn parts_of_a_causal_mask_are_not_equal() {
    let sizes = Sizes { layers: 2, heads: 1, kv: 1, ..LONG };
    let cluster = Cluster::parse("h100:8", "h200").unwrap();
    let plan = plan(sizes, DType::Bf16, "h100:8", 1000, "dp=2,cp=4,zero=1,microbatch=1,overlap_chunks=1").unwrap();
    assert!(divides_queries(&plan), "{plan}");
    let all = simulated(&plan, "h100:8", &Conditions::default());
    assert_eq!(all.ranks.iter().map(|rank| rank.count).collect::<Vec<_>>(), [2; 4]);
    let pairs = || all.ranks.iter().zip(&all.ranks[1..]);
    assert!(pairs().all(|(a, b)| a.kernels.matmul < b.kernels.matmul && a.waiting > b.waiting));
    assert!(pairs().all(|(a, b)| a.kernels.rest == b.kernels.rest && a.kernels.optimizer == b.kernels.optimizer));
    let slowest = all.slowest().unwrap();
    assert_eq!(slowest.rank, all.ranks[3].rank);
    let programs = [lower_rank(&verify::plan(&plan).unwrap(), 0, &NoScratch).unwrap()];
    assert_eq!(predict(&programs, &all, &plan, &cluster).matmul, slowest.kernels.matmul);
    // Whichever rank's program is given, the ranks take what they take.
    for rank in [3, 5] {
        let program = lower_rank(&verify::plan(&plan).unwrap(), rank, &NoScratch).unwrap();
        let other = simulate(&[program], &[], &plan, &cluster, &Conditions::default()).unwrap();
        assert_eq!((other.step, other.class_of), (all.step, all.class_of.clone()));
    }
    // Without a mask every part sees every key.
    let mut whole = plan.clone();
    whole.graph = uncausal(&plan.graph);
    let even = simulated(&whole, "h100:8", &Conditions::default());
    assert_eq!(even.ranks.len(), 1);
}

/// Where the tokens are in chunks, every rank has queries of each, and in every second one those of the other end: ranks
/// of an even number have as much to do, and none is taken for another.
#[test]
fn parts_of_chunks_under_a_causal_mask_are_equal() {
    let sizes = Sizes { layers: 2, heads: 1, kv: 1, ..LONG };
    let first_and_last = |chunks: u64| {
        let pins = format!("dp=4,cp=2,zero=1,microbatch=1,overlap_chunks={chunks}");
        let plan = plan(sizes, DType::Bf16, "h100:8", 1000, &pins).unwrap();
        assert!(divides_queries(&plan), "{plan}");
        let all = simulated(&plan, "h100:8", &Conditions::default());
        assert_eq!(all.ranks.iter().map(|rank| rank.count).collect::<Vec<_>>(), [4; 2]);
        [0, 1].map(|rank: usize| all.ranks[rank].kernels.matmul.0)
    };
    let shares = [1, 2, 4].map(|chunks| {
        let [first, last] = first_and_last(chunks);
        last / first
    });
    assert!(shares[0] > 1.2 && shares[1..].iter().all(|share| (share - 1.0).abs() < 1e-3), "{shares:?}");
}

/// Whether attention of some rank is of a part of the queries.
fn divides_queries(plan: &Plan) -> bool {
    let program = lower_rank(&verify::plan(plan).unwrap(), 0, &NoScratch).unwrap();
    program.instructions().any(|of| matches!(&of.action, Action::Compute(Op::Attention(op)) if op.lead.is_some()))
}

/// A graph whose attention has no mask.
fn uncausal(graph: &Graph) -> Graph {
    let text = graph.to_string().replace("causal=true, ", "").replace("causal=true", "");
    text.parse().unwrap_or_else(|found: Diagnostics| panic!("{found}"))
}

#[test]
fn shared_links_slow_what_leaves_a_node() {
    let shared = Conditions { contention: 4.0, ..Conditions::default() };
    let step = |cluster: &str, conditions: &Conditions| {
        let plan = plan(SMALL, DType::Bf16, cluster, 1000, "dp=8,zero=3").unwrap();
        simulated(&plan, cluster, conditions).step.0
    };
    assert_eq!(step("h100:8", &shared), step("h100:8", &Conditions::default()));
    assert!(step("h100:2x4", &shared) > 1.1 * step("h100:2x4", &Conditions::default()));
}

#[track_caller]
fn check_error(cluster: &str, conditions: Conditions, expect: &str) {
    let plan = plan(Sizes { layers: 1, ..SMALL }, DType::Bf16, "h100:8", 1000, "dp=8").unwrap();
    let program = lower_rank(&verify::plan(&plan).unwrap(), 0, &NoScratch).unwrap();
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let error = simulate(&[program], &[], &plan, &cluster, &conditions).unwrap_err().to_string();
    assert!(error.contains(expect), "{error}");
}

#[test]
fn conditions_must_make_sense() {
    let slow = |rank, factor| Conditions { stragglers: vec![(rank, factor)], ..Conditions::default() };
    check_error("h100:8", slow(8, 2.0), "rank 8 is to be slow, but the plan has ranks 0 to 7");
    check_error("h100:8", slow(0, 0.5), "the slowdown of a rank is 0.5; it must be a number from 1 to 1000000");
    check_error("h100:8", slow(0, 1e7), "the slowdown of a rank is 10000000");
    let twice = Conditions { stragglers: vec![(3, 2.0), (3, 4.0)], ..Conditions::default() };
    check_error("h100:8", twice, "rank 3 is to be slow twice; name it once");
    check_error("h100:8", Conditions { contention: f64::NAN, ..Conditions::default() }, "the contention is NaN");
    check_error("h100:4", Conditions::default(), "the plan has 8 ranks and the cluster 4 devices");
}

/// Two stages of a pipeline: what the first makes, the second waits for.
const STAGES: &str = r#"program rank 0 of 2 {
  arena device 2097152
  $0: f32[512,512] device+0 parameter
  $1: f32[512,512] device+1048576 activation
  slot parameter "w": f32[512,512] = $0 [0+512,0+512]
  section step {
    0: $1 = compute matmul $0, $0 {spec="mk,kn->mn"} on compute
    1: send $1 to rank 1 on communication after 0
  }
  order step 0, step 1
}
program rank 1 of 2 {
  arena device 2097152
  $0: f32[512,512] device+0 parameter
  $1: f32[512,512] device+1048576 activation
  slot parameter "w": f32[512,512] = $0 [0+512,0+512]
  section step {
    0: $1 = receive from rank 0 on communication
    1: $0 = compute matmul $1, $1 {spec="mk,kn->mn"} on compute after 0
  }
  order step 0, step 1
}
"#;

#[test]
fn messages_are_rendezvous() {
    let programs = Program::parse_all(STAGES).unwrap();
    let mut plan = Plan::default();
    let pp = plan.mesh.push(Family::Pipeline, 2);
    let cluster = Cluster::parse("h100:2", "h200").unwrap();
    let simulated = simulate(&programs, &[pp], &plan, &cluster, &Conditions::default()).unwrap();
    let [first, second] = &simulated.ranks[..] else { panic!("{} classes", simulated.ranks.len()) };
    let (kernel, message) = (first.busy[Stream::Compute as usize].0 / 2.0, first.communication.0 / 2.0);
    assert!(kernel > 0.0 && message > 0.0);
    // Every run ends before the next begins, so the second message waits for both kernels before it.
    let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
    assert!(near(simulated.step.0, 3.0 * kernel + 2.0 * message), "{} {kernel} {message}", simulated.step);
    assert!(near(second.waiting.0, kernel), "{} {kernel}", second.waiting);
    // A receiver that is never sent to is told, not waited for.
    let mut broken = programs.clone();
    broken[0].order.pop();
    let error = simulate(&broken, &[pp], &plan, &cluster, &Conditions::default()).unwrap_err().to_string();
    assert!(error.contains("rank 1 waits for ever at instruction 0 of step"), "{error}");
}
