//! Plans for clusters of several kinds of devices.

use crate::allocate::memory;
use crate::cluster::Cluster;
use crate::lower::lower_all;
use crate::search::{Pins, search, search_confirmed, search_in_order};
use crate::search_tests::{SMALL, Sizes, llama};
use crate::simulate::{Conditions, Simulated, predict, simulate};
use shardc_ir::plan::{Prediction, Request, Scope};
use shardc_ir::program::Stream;
use shardc_ir::{DType, Family, Graph, NoScratch, Plan, Program, verify};

const WIDE: Sizes =
    Sizes { layers: 12, batch: 32, seq: 2048, hidden: 2048, heads: 16, kv: 16, ffn: 8192, vocab: 32000 };

/// Nodes of four devices of each kind.
fn cluster(parts: &[(&str, u64)]) -> Cluster {
    let part = |(name, nodes): &(&str, u64)| format!("[[parts]]\ndevice = \"{name}\"\nnodes = {nodes}\n");
    let parts: String = parts.iter().map(part).collect();
    Cluster::from_toml("c.toml", &format!("per_node = 4\n{parts}")).unwrap()
}

/// The programs of each stage, and their simulation.
fn simulated(plan: &Plan, cluster: &Cluster) -> (Vec<Program>, Simulated) {
    let verified = verify::plan(plan).unwrap_or_else(|found| panic!("{}: {found}", plan.choice));
    let programs = lower_all(&verified, &NoScratch).unwrap_or_else(|error| panic!("{}: {error}", plan.choice));
    let apart = plan.mesh.family(Family::Pipeline);
    let first: Vec<_> = plan.mesh.group(0, &apart).iter().map(|rank| programs[*rank as usize].clone()).collect();
    let simulated = simulate(&first, &apart, plan, cluster, &Conditions::default()).unwrap();
    (first, simulated)
}

fn exact(plan: &Plan, cluster: &Cluster) -> Prediction {
    let (programs, simulated) = simulated(plan, cluster);
    predict(&programs, &simulated, plan, cluster)
}

fn request(sizes: Sizes, scope: Scope) -> Request {
    Request { batch: sizes.batch, seq: sizes.seq, scope, ..Request::default() }
}

/// The plan whose estimate is the fastest.
fn estimated(sizes: Sizes, graph: &Graph, cluster: &Cluster, pins: &str) -> Plan {
    let found = search(graph, cluster, &request(sizes, Scope::Runnable), &Pins::parse(pins).unwrap(), &NoScratch);
    found.unwrap_or_else(|error| panic!("{pins}: {error}"))
}

/// The plan whose programs are the fastest, of all that can be said.
fn confirmed(sizes: Sizes, graph: &Graph, cluster: &Cluster, pins: &str) -> Plan {
    let confirm = |plan: &Plan| Ok(exact(plan, cluster).into());
    let (request, pins) = (request(sizes, Scope::All), Pins::parse(pins).unwrap());
    let found = search_confirmed(graph, cluster, &request, &pins, &NoScratch, Some(&confirm));
    found.unwrap_or_else(|error| panic!("{error}"))
}

/// A faster device in the place of a slower one makes no plan slower, though some figures of it be worse: those of
/// H200s lose more to communication than those of A100s.
#[test]
fn no_cluster_is_slower_than_one_of_its_slowest_devices() {
    let short = Sizes { batch: 64, seq: 256, ..WIDE };
    for sizes in [SMALL, WIDE, short] {
        let graph = llama(sizes, DType::Bf16);
        for (parts, slow) in [
            (&[("h100", 1), ("a100-80", 1)][..], "a100-80"),
            (&[("h200", 1), ("a100-80", 1)], "a100-80"),
            (&[("a100-40", 1), ("h100", 1)], "a100-40"),
            (&[("h200", 2), ("a100-80", 1), ("h100", 1)], "a100-80"),
            (&[("h100", 2), ("l40s", 2)], "l40s"),
            (&[("a100-80", 1), ("v100", 1)], "v100"),
        ] {
            let mixed = cluster(parts);
            let uniform = cluster(&[(slow, mixed.nodes)]);
            for pins in ["", "tp=4", "zero=3", "pp=2,schedule=1f1b"] {
                let [mixed, slow] = [&mixed, &uniform].map(|on| estimated(sizes, &graph, on, pins).prediction.step.0);
                assert!(mixed <= slow * (1.0 + 1e-9), "{parts:?} {pins}: {mixed}, and {slow} on the slowest alone");
            }
        }
    }
    // So do the programs.
    let (sizes, graph) = (WIDE, llama(WIDE, DType::Bf16));
    let (mixed, uniform) = (cluster(&[("h200", 1), ("a100-80", 1)]), cluster(&[("a100-80", 2)]));
    let plan = estimated(sizes, &graph, &uniform, "pp=1");
    let [mixed, slow] = [&mixed, &uniform].map(|on| exact(&plan, on).step.0);
    assert!(mixed <= slow * (1.0 + 1e-9), "{mixed} and {slow}");
}

/// Moving a layer from the longer of two stages to the other makes the other the longer one. What is estimated is what
/// the programs take, in every schedule; of collectives within a stage the estimate sees less, on equal devices as well.
#[test]
fn stages_on_unequal_devices_are_as_long_as_each_other() {
    let graph = llama(WIDE, DType::Bf16);
    for parts in [[("h100", 1), ("a100-80", 1)], [("a100-80", 1), ("h100", 1)], [("h200", 1), ("a100-40", 1)]] {
        let mixed = cluster(&parts);
        for (pins, most, is_equal) in [
            ("pp=2,dp=4,schedule=1f1b,microbatch=1", 0.05, true),
            ("pp=2,dp=4,schedule=interleaved,virtual=2,microbatch=1", 0.05, false),
            ("pp=2,dp=4,schedule=zbv,microbatch=1", 0.05, false),
            ("pp=2,dp=1,tp=4,schedule=1f1b,microbatch=2", 0.1, true),
        ] {
            let plan = estimated(WIDE, &graph, &mixed, pins);
            let (programs, run) = simulated(&plan, &mixed);
            let taken = predict(&programs, &run, &plan, &mixed);
            let off = plan.prediction.step.0 / taken.step.0 - 1.0;
            assert!(off.abs() < most, "{parts:?} {pins}: {off:+.3}");
            let stage = |index: usize| {
                let rank = run.ranks.iter().find(|rank| rank.program == index).unwrap();
                let is_own = |id| {
                    let chunk = plan.pipeline.chunks[id];
                    chunk.is_some_and(|chunk| plan.pipeline.stage_of(chunk, 2) as usize == index)
                };
                let products = plan.graph.nodes().filter(|(id, node)| is_own(*id) && node.op.name() == "matmul");
                // Seven products a layer, and the gradients of both factors.
                let layers = products.count() as f64 / 21.0;
                let seconds = rank.busy[Stream::Compute as usize].0 + rank.exposed_communication.0;
                (seconds, rank.busy[Stream::Compute as usize].0 / layers)
            };
            let [(a, of_a), (b, of_b)] = [stage(0), stage(1)];
            assert!(!is_equal || (a - b).abs() <= of_a + of_b, "{parts:?} {pins}: {a} and {b}");
        }
    }
}

#[test]
fn pipelines_over_kinds_are_found_where_they_are_faster() {
    let graph = llama(WIDE, DType::Bf16);
    let mixed = cluster(&[("h200", 1), ("a100-80", 1)]);
    let free = confirmed(WIDE, &graph, &mixed, "").prediction.step.0;
    for pins in ["pp=1", "pp=2,schedule=1f1b"] {
        let pinned = confirmed(WIDE, &graph, &mixed, pins).prediction.step.0;
        assert!(free <= 1.02 * pinned, "{free}, and {pinned} with {pins}");
    }
    let alike = confirmed(WIDE, &graph, &mixed, "pp=1").prediction.step.0;
    assert!(free < 0.75 * alike, "{free} and {alike}");
}

/// Which kind of nodes holds the first stages is a choice: the plan is as fast in whatever order the cluster says them, and
/// says its own.
#[test]
fn the_order_of_the_kinds_is_a_choice() {
    let graph = llama(WIDE, DType::Bf16);
    let request = request(WIDE, Scope::All);
    let confirm = |plan: &Plan, on: &Cluster| Ok(exact(plan, on).into());
    let found = |parts: &[(&str, u64)], pins: &str| {
        let pins = Pins::parse(pins).unwrap();
        search_in_order(&graph, &cluster(parts), &request, &pins, &NoScratch, &confirm)
            .map_err(|error| error.to_string())
    };
    let orders = [[("h200", 1), ("l40s", 1)], [("l40s", 1), ("h200", 1)]];
    let [(one, on), (other, same)] = orders.map(|parts| found(&parts, "").unwrap());
    assert_eq!((on.parts, one.prediction.step), (same.parts, other.prediction.step));
    let said = |plan: &Plan| Pins::chosen(plan).parts;
    let [kept, turned] = [&one, &other].map(|plan| said(plan).is_empty());
    assert!(kept != turned, "{} and {}", one.choice, other.choice);
    let (moved, parts) = if kept { (&other, orders[1]) } else { (&one, orders[0]) };
    assert_eq!(said(moved), [2, 1]);
    assert!(moved.alternatives.iter().any(|other| other.choice.contains("parts=1/2")), "{:?}", moved.alternatives);
    let (again, _) = found(&parts, &moved.choice).unwrap();
    assert_eq!(again.choice, moved.choice);
    let (given, _) = found(&parts, "parts=1/2").unwrap();
    assert!(given.prediction.step > moved.prediction.step, "{} and {}", given.choice, moved.choice);
    let refused = found(&parts, "parts=1/2/3").unwrap_err();
    assert!(refused.contains("c.toml has 2 parts"), "{refused}");
}

/// A stage takes the memory of its own devices: more where they have more, no more where they have less.
#[test]
fn stages_have_the_memory_of_their_devices() {
    let sizes = Sizes { batch: 96, ..WIDE };
    let graph = llama(sizes, DType::Bf16);
    for parts in [[("h100", 1), ("a100-40", 1)], [("a100-40", 1), ("h100", 1)]] {
        let mixed = cluster(&parts);
        let plan = confirmed(sizes, &graph, &mixed, "pp=2,dp=4,schedule=gpipe,recompute=none,microbatch=3");
        let (programs, _) = simulated(&plan, &mixed);
        let rooms = mixed.rooms(&plan.mesh, mixed.usable_memory());
        let taken: Vec<_> = programs.iter().map(|program| memory(program).total()).collect();
        assert!(taken.iter().zip(&rooms).all(|(taken, room)| taken <= room), "{parts:?} {taken:?} {rooms:?}");
        let small = rooms.iter().min().unwrap();
        assert!(taken.iter().any(|taken| taken > small), "{parts:?} {taken:?}");
        assert!(plan.prediction.fits() && rooms.contains(&plan.prediction.room), "{:?}", plan.prediction);
        // The plan can be read back, and says how long its stages take: as long as each other.
        let read = Plan::from_json(&plan.to_json()).unwrap();
        assert_eq!((&read.pipeline, &read.prediction), (&plan.pipeline, &plan.prediction));
        let all: Vec<u64> = plan.pipeline.lengths.iter().map(|of| of.forward + of.backward + of.weight).collect();
        let [a, b] = all[..] else { panic!("{:?}", plan.pipeline.lengths) };
        assert!(a.abs_diff(b) < a / 4, "{:?}", plan.pipeline.lengths);
    }
    // What all ranks do alike fits the smallest.
    let mixed = cluster(&[("h100", 1), ("a100-40", 1)]);
    let plan = estimated(sizes, &graph, &mixed, "pp=1");
    assert_eq!(plan.prediction.room, mixed.devices()[1].usable_memory());
    assert!(plan.prediction.fits());
}
