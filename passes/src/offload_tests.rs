//! Plans whose devices are too small for what they hold.

use crate::cluster::Cluster;
use crate::search::{Pins, search};
use crate::search_tests::{SMALL, llama, plan};
use shardc_ir::plan::{Request, Scope, Space};
use shardc_ir::{Bytes, DType, Feature, NoScratch, Op, Plan};

/// The plan of the small model on one device of 24 GiB, of all plans.
fn of_all(host_gib: u64, pins: &str) -> Result<Plan, String> {
    let mut request = Request { batch: SMALL.batch, seq: SMALL.seq, scope: Scope::All, ..Request::default() };
    (request.device_memory, request.host_memory) = (Bytes(24 << 30), Bytes(host_gib << 30));
    let cluster = Cluster::parse("h200:1", "h200").unwrap();
    let pins = Pins::parse(pins).unwrap();
    let graph = llama(SMALL, DType::Bf16);
    search(&graph, &cluster, &request, &pins, &NoScratch).map_err(|error| error.to_string())
}

/// How many of the plan's states lie where.
fn states(plan: &Plan) -> [usize; 3] {
    let states = plan.graph.nodes().filter(|(_, node)| matches!(node.op, Op::State(_)));
    let spaces: Vec<Space> = states.map(|(_, node)| plan.spaces[node.results[0]]).collect();
    [Space::Device, Space::Host, Space::Disk].map(|space| spaces.iter().filter(|other| **other == space).count())
}

#[test]
fn what_does_not_fit_goes_to_the_host_where_that_is_asked_for() {
    let refused = plan(SMALL, DType::Bf16, "h200:1", 24, "").unwrap_err();
    assert!(refused.contains("no plan fits in 24.00 GiB"), "{refused}");
    let chosen = of_all(1024, "").unwrap();
    assert!(chosen.choice.contains("offload=optimizer"), "{}", chosen.choice);
    assert!(chosen.prediction.memory.total() <= Bytes(24 << 30));
    let [on_device, on_host, on_disk] = states(&chosen);
    assert!(on_host > 0 && on_disk == 0, "{on_device} {on_host} {on_disk}");
    assert!(Feature::Offload.is_in(&chosen));
    // The host holds what the device does not.
    assert!(chosen.prediction.host > Bytes(1 << 30), "{}", chosen.prediction.host);
    let read: Plan = chosen.to_string().parse().unwrap();
    assert_eq!(read.spaces, chosen.spaces);
}

#[test]
fn a_small_host_leaves_the_disk() {
    let [fast, slow] = [1024, 8].map(|host| of_all(host, "").unwrap());
    let has_disk = |plan: &Plan| plan.choice.contains("@disk");
    assert!(!has_disk(&fast) && has_disk(&slow), "{} {}", fast.choice, slow.choice);
    assert!(slow.prediction.step > fast.prediction.step);
    assert_eq!(states(&slow)[1], 0);
}

#[test]
fn pins_say_what_to_move() {
    let of = |pins: &str| plan(SMALL, DType::Bf16, "h200:1", 140, pins);
    let base = of("microbatch=4,recompute=none").unwrap();
    assert!(!Feature::Offload.is_in(&base));
    for kind in ["optimizer", "parameters", "activations", "optimizer:2", "optimizer@disk", "optimizer+gradients"] {
        let moved = of(&format!("microbatch=4,recompute=none,offload={kind}")).unwrap();
        assert!(moved.choice.ends_with(&format!("offload={kind}")), "{}", moved.choice);
        assert!(Feature::Offload.is_in(&moved), "{kind}");
        assert!(moved.prediction.memory.total() < base.prediction.memory.total(), "{kind}");
        assert!(moved.prediction.step.0 >= 0.999 * base.prediction.step.0, "{kind}");
    }
    let error = of("offload=optimizer:5").unwrap_err();
    assert!(error.contains("the model has 4 blocks"), "{error}");
    let error = of("offload=activations,recompute=block").unwrap_err();
    assert!(error.contains("kept on the host or computed again"), "{error}");
    let error = plan(SMALL, DType::Bf16, "cpu:1", 140, "offload=optimizer").unwrap_err();
    assert!(error.contains("live in the host's memory already"), "{error}");
}

/// One device updates nothing of what it has the host update, and keeps no gradients for it: what is left beside the
/// copies of parameters is room for activations.
#[test]
fn gradients_leave_as_they_are_made() {
    let of = |pins: &str| plan(SMALL, DType::Bf16, "h200:1", 140, pins).unwrap();
    for microbatch in [4, 1] {
        let pins = format!("microbatch={microbatch},recompute=none");
        let [kept, left] = ["optimizer", "optimizer+gradients"].map(|what| of(&format!("{pins},offload={what}")));
        let (held, freed) = (kept.prediction.memory, left.prediction.memory);
        // Of four blocks two are on their way.
        assert!(freed.gradients.0 <= held.gradients.0 / 2, "{microbatch}: {} of {}", freed.gradients, held.gradients);
        // The host has room for them either way.
        assert_eq!(kept.prediction.host, left.prediction.host);
        let gradients = left.graph.nodes().filter_map(|(_, node)| match node.op {
            Op::Adamw(_) => Some(left.spaces[node.operands[1]]),
            _ => None,
        });
        assert!(gradients.into_iter().all(|space| space == Space::Host));
    }
    let error = plan(SMALL, DType::Bf16, "h200:2", 140, "dp=2,zero=0,offload=optimizer+gradients").unwrap_err();
    assert!(error.contains("only where that is a rank's part of their sum"), "{error}");
}

/// Stages keep everything on their devices, so what is moved leaves none of them to choose from.
#[test]
fn what_is_moved_is_not_cut_into_stages() {
    let cluster = Cluster::parse("h200:2x4", "h200").unwrap();
    let request = Request { batch: SMALL.batch, seq: SMALL.seq, scope: Scope::All, ..Request::default() };
    let graph = llama(SMALL, DType::Bf16);
    let of = |pins: &str| {
        let plan = search(&graph, &cluster, &request, &Pins::parse(pins).unwrap(), &NoScratch).unwrap();
        let others = plan.alternatives.iter().map(|other| other.choice.clone());
        others.chain([plan.choice.clone()]).collect::<Vec<String>>()
    };
    assert!(of("").iter().any(|choice| choice.contains("pp=")), "no stages are near");
    let moved = of("offload=optimizer");
    assert!(moved.iter().all(|choice| choice.contains("offload=optimizer")), "{moved:?}");
}
