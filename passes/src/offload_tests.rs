//! Plans whose devices are too small for what they hold.

use crate::cluster::Cluster;
use crate::search::{Pins, Recompute, search};
use crate::search_tests::{SMALL, llama, plan};
use shardc_ir::plan::{Request, Scope, Space};
use shardc_ir::{Bytes, DType, Feature, NoScratch, Op, Plan, verify};

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

/// What a pin takes from the device is room for values that are not computed again.
#[test]
fn what_leaves_is_not_computed_again_for() {
    let of = |pins: &str| plan(SMALL, DType::Bf16, "h200:1", 33, &format!("microbatch=8{pins}")).unwrap();
    let again = |plan: &Plan| match Pins::chosen(plan).recompute {
        Some(Recompute::Values(steps)) => steps,
        Some(Recompute::None) => 0,
        other => panic!("{other:?} of {}", plan.choice),
    };
    let [stays, moved] = ["", ",offload=optimizer"].map(of);
    assert!(again(&moved) < again(&stays), "{} and {}", stays.choice, moved.choice);
    // Nothing but a little that estimates leave is free.
    assert!(again(&moved) == 0 || moved.prediction.filled() > 0.9, "{}", moved.choice);
}

/// Stages, and values away from their devices, are chosen together.
#[test]
fn what_is_moved_is_cut_into_stages() {
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
    assert!(moved.iter().any(|choice| choice.contains("pp=")), "{moved:?}");
}

const STAGES: &str = "pp=2,dp=2,tp=1,schedule=1f1b,in_flight=2,zero=1,microbatch=1,recompute=none";

/// A plan of the small model in two stages on one host of four devices.
fn staged(mib: u64, host_gib: u64, scope: Scope, pins: &str) -> Result<Plan, String> {
    let mut request = Request { batch: SMALL.batch, seq: SMALL.seq, scope, ..Request::default() };
    (request.device_memory, request.host_memory) = (Bytes(mib << 20), Bytes(host_gib << 30));
    let cluster = Cluster::parse("h200:4", "h200").unwrap();
    let pins = Pins::parse(&format!("{STAGES}{pins}")).unwrap();
    search(&llama(SMALL, DType::Bf16), &cluster, &request, &pins, &NoScratch).map_err(|error| error.to_string())
}

const ROOMY: u64 = 140 << 10;

/// Bytes of the marked values of each stage, on one of its ranks.
fn marked(plan: &Plan) -> [u64; 2] {
    let mut bytes = [0; 2];
    for (value, _) in plan.graph.values().filter(|(value, _)| plan.spaces[*value] != Space::Device) {
        let ty = plan.graph.ty(value);
        let local = ty.with_shape(plan.sharding(value).local_shape(&ty.shape, &plan.mesh));
        let chunk = plan.pipeline.chunks[plan.graph.value(value).def].expect("a chunk");
        bytes[plan.pipeline.stage_of(chunk, plan.stages()) as usize] += local.bytes().0;
    }
    bytes
}

#[test]
fn stages_move_their_own_blocks() {
    let of = |what: &str| {
        let plan = staged(ROOMY, 1024, Scope::Runnable, what).unwrap_or_else(|error| panic!("{what}: {error}"));
        verify::plan(&plan).unwrap_or_else(|found| panic!("{what}: {found}"));
        let read: Plan = plan.to_string().parse().unwrap();
        assert_eq!(read.spaces, plan.spaces, "{what}");
        plan
    };
    let base = of("");
    let memory = |plan: &Plan| plan.prediction.memory.total();
    for what in ["optimizer", "parameters", "activations", "optimizer:1", "optimizer@disk", "optimizer+activations:1"] {
        let moved = of(&format!(",offload={what}"));
        assert!(moved.choice.ends_with(&format!(",offload={what}")), "{}", moved.choice);
        assert!(memory(&moved) < memory(&base), "{what}: {} of {}", memory(&moved), memory(&base));
        assert!(moved.prediction.step.0 >= 0.999 * base.prediction.step.0, "{what}");
        assert!(marked(&moved).iter().all(|bytes| *bytes > 0), "{what}: {:?}", marked(&moved));
    }
    // The host holds what is marked, and the gradients that it updates by, of all its ranks.
    for what in [",offload=optimizer", ",stage_offload=optimizer/none", ",stage_offload=none/optimizer:1"] {
        let plan = of(what);
        assert!(plan.choice.ends_with(what), "{what}: {}", plan.choice);
        let held = 2.0 * marked(&plan).iter().sum::<u64>() as f64 * 16.0 / 12.0;
        let off = plan.prediction.host.0 as f64 / held - 1.0;
        assert!(off.abs() < 0.01, "{what}: {} is {off:+.3} off", plan.prediction.host);
    }
    // One stage frees what it has; the other, which has as much of it, is then the fullest.
    let [first, second] = ["optimizer/none", "none/optimizer"].map(|each| of(&format!(",stage_offload={each}")));
    assert!(marked(&first)[1] == 0 && marked(&second)[0] == 0);
    assert!([&first, &second].iter().all(|plan| plan.prediction.memory.optimizer > Bytes(0)));
    assert_eq!(of(",offload=optimizer").prediction.memory.optimizer, Bytes(0));
}

/// Of each stage as few blocks leave as must: what is found takes no more than any numbers of blocks that fit.
#[test]
fn stages_move_no_more_than_they_must() {
    let of = |what: &str| staged(ROOMY, 1024, Scope::Runnable, what).unwrap().prediction.memory.total().0;
    // With its optimizer away everything fits, and some more.
    let room = (of(",offload=optimizer") + (of("") - of(",offload=optimizer")) / 3) >> 20;
    let refused = staged(room, 1024, Scope::Runnable, "").unwrap_err();
    assert!(refused.contains("no plan fits in") && refused.contains("--search all"), "{refused}");
    let chosen = staged(room, 1024, Scope::All, "").unwrap();
    assert!(chosen.prediction.fits() && chosen.choice.contains("offload="), "{}", chosen.choice);
    // As many microbatches are in flight on a stage as stages follow it: the first needs more memory.
    let mut best = (f64::INFINITY, String::new());
    let counts = ["none", "optimizer:1", "optimizer:2", "optimizer", "activations:1", "activations:2"];
    for (a, b) in counts.iter().flat_map(|a| counts.iter().map(move |b| (a, b))) {
        // As much is left for what estimates do not see.
        let within = room * 97 / 100;
        if let Ok(plan) = staged(within, 1024, Scope::Runnable, &format!(",stage_offload={a}/{b}"))
            && plan.prediction.step.0 < best.0
        {
            best = (plan.prediction.step.0, plan.choice);
        }
    }
    let own = chosen.prediction.step.0;
    assert!(own <= 1.001 * best.0, "{} takes {own}, and {best:?} would do", chosen.choice);
    let again = Pins::parse(&chosen.choice).unwrap();
    let pins = again.offloads().map(|pinned| format!(",{}", pinned.text())).unwrap();
    let pinned = staged(room, 1024, Scope::Runnable, &pins).unwrap();
    assert_eq!(pinned.choice, chosen.choice);
    assert!(
        (pinned.prediction.step.0 / own - 1.0).abs() < 1e-9 && pinned.prediction.memory == chosen.prediction.memory
    );
}

#[test]
fn what_stages_cannot_move_is_refused() {
    let refused = |host: u64, what: &str, expect: &str| {
        let error = staged(ROOMY, host, Scope::Runnable, what).map(|plan| plan.choice).unwrap_err();
        assert!(error.contains(expect), "{what}: {error}");
    };
    refused(1, ",offload=optimizer", "in the 1.00 GiB that a host has for its ranks: pin `offload=optimizer` takes");
    refused(1, ",stage_offload=optimizer:3/optimizer", "pin `stage_offload=optimizer:3/optimizer` takes");
    refused(64, ",stage_offload=optimizer:9/none", "the model has 4 blocks");
    refused(64, ",offload=optimizer+gradients", "gradients leave as they are made only where");
    // On disk there is room.
    let [host, disk] =
        ["optimizer", "optimizer@disk"].map(|what| staged(ROOMY, 16, Scope::Runnable, &format!(",offload={what}")));
    assert!(host.is_err() && disk.is_ok_and(|plan| plan.prediction.host < Bytes(16 << 30)));
}
