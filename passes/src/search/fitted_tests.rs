//! Meshes are solved again for the memory that programs take.

use super::choice::pins::{Pins, Recompute};
use super::search_confirmed;
use crate::cluster::Cluster;
use crate::lower::lower_all;
use crate::search_tests::{Sizes, llama};
use crate::simulate::{Outline, exact};
use shardc_ir::plan::{Category, Request, Scope};
use shardc_ir::{Bytes, DType, Family, NoScratch, Plan, verify};

const SIZES: Sizes = Sizes { layers: 8, batch: 16, seq: 2048, hidden: 1024, heads: 8, kv: 8, ffn: 4096, vocab: 4096 };

/// The plan that is found in so much memory, where what programs take counts `excess` times.
fn found(cluster: &str, pins: &str, scope: Scope, memory: u64, excess: f64) -> Result<Plan, String> {
    let (cluster, pins) = (Cluster::parse(cluster, "h200").unwrap(), Pins::parse(pins).unwrap());
    let (batch, seq) = (SIZES.batch, SIZES.seq);
    let request = Request { batch, seq, scope, device_memory: Bytes(memory), ..Request::default() };
    let programs = |plan: &Plan| {
        let verified = verify::plan(plan).map_err(|found| found.to_string())?;
        let programs = lower_all(&verified, &NoScratch).map_err(|error| error.to_string())?;
        let apart = plan.mesh.family(Family::Pipeline);
        let first = plan.mesh.group(0, &apart).into_iter().map(|rank| programs[rank as usize].clone());
        let programs: Vec<_> = first.collect();
        let outlines: Vec<_> = programs.iter().map(|program| Outline::of(program, plan, &cluster)).collect();
        let mut taken = exact(&outlines, &apart, plan, &cluster).map_err(|error| error.to_string())?;
        for memory in taken.stages.iter_mut().chain([&mut taken.prediction.memory]) {
            for category in Category::ALL {
                let held = memory.category(category);
                *held = Bytes((held.0 as f64 * excess) as u64);
            }
        }
        Ok(taken)
    };
    let graph = llama(SIZES, DType::Bf16);
    search_confirmed(&graph, &cluster, &request, &pins, &NoScratch, Some(&programs)).map_err(|error| error.to_string())
}

/// What is computed again, by the most of any stage.
fn steps(plan: &Plan) -> u64 {
    match Pins::chosen(plan).recompute {
        Some(Recompute::Values(steps)) => steps,
        Some(Recompute::None) => 0,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn check(cluster: &str, pins: &str) {
    let of = |pins: String| found(cluster, &pins, Scope::Runnable, 140 << 30, 1.0).unwrap().prediction.memory.total().0;
    let [free, least] = ["none", "value:1000000"].map(|pin| of(format!("{pins},recompute={pin}")));
    let room = free.midpoint(least);
    let within = |excess: f64| found(cluster, pins, Scope::Runnable, room, excess).unwrap();
    let [less, as_it_is, more] = [0.85, 1.0, 1.15].map(within);
    let (steps, is_staged) = ([&less, &as_it_is, &more].map(steps), less.stages() > 1);
    // Stages of a pipeline compute equal blocks again alike.
    let is_finer = steps[0] < steps[1] && steps[1] < steps[2];
    assert!(is_finer || (is_staged && steps[0] <= steps[1] && steps[0] < steps[2]), "{pins}: {steps:?}");
    for plan in [&less, &as_it_is, &more] {
        let filled = plan.prediction.filled();
        assert!(filled <= 1.0, "{}: {filled}", plan.choice);
    }
}

#[test]
fn as_much_is_computed_again_as_programs_ask_for() {
    check("h200:4", "dp=4,zero=1,microbatch=4");
    check("h200:4", "dp=2,pp=2,schedule=1f1b,zero=1,microbatch=1");
}

/// However many threads search, ways and schedules are told of what lots before theirs found, and of nothing else.
#[test]
fn threads_change_no_plan() {
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| found("h100:2x4", "pp=2", Scope::Runnable, 4 << 30, 1.0)).unwrap()
    };
    let alone = on(1);
    let of = |plan: &Plan| (plan.choice.clone(), plan.search.clone(), plan.alternatives.clone(), plan.to_string());
    assert!(alone.search.meshes > 8, "{}", alone.choice);
    [2, 5].into_iter().for_each(|threads| assert_eq!(of(&on(threads)), of(&alone)));
}

/// Casts are kept where the plan that was found has no room for them, by what computes more again: where that is pinned, and
/// where it is faster.
#[test]
fn casts_are_kept_by_what_computes_more_again() {
    let plan = |more: &str, room: u64| {
        let pins = format!("dp=4,zero=1,microbatch=4{more}");
        found("h200:4", &pins, Scope::Runnable, room, 1.0).unwrap()
    };
    let of = |more: &str| plan(more, 140 << 30).prediction.memory.total().0;
    let [made, kept] = ["0", "1"].map(|kept| of(&format!(",recompute=none,keep_casts={kept}")));
    let room = made + (kept - made) * 9 / 10;
    let [made, kept, free] = [",keep_casts=0", ",keep_casts=1", ""].map(|more| plan(more, room));
    assert_eq!(steps(&made), 0);
    assert!(kept.prediction.fits() && kept.choice.ends_with(",keep_casts=1") && steps(&kept) > 0, "{}", kept.choice);
    let least = made.prediction.step.0.min(kept.prediction.step.0);
    assert!(free.prediction.fits() && free.prediction.step.0 <= 1.001 * least, "{}", free.choice);
    assert!(kept.prediction.step < made.prediction.step, "{} {}", kept.prediction.step, made.prediction.step);
}

/// Where nothing is left to choose, programs are made once.
#[test]
fn the_only_candidate_is_lowered_once() {
    let pins = "dp=1,tp=1,zero=0,microbatch=16,recompute=none,loss_chunks=1,overlap_chunks=1,keep_casts=0";
    let plan = found("h200:1", pins, Scope::Runnable, 140 << 30, 1.0).unwrap();
    assert_eq!((plan.search.candidates, plan.search.lowered), (1, 1), "{}", plan.choice);
}

/// As many blocks leave as programs ask for; and what cannot leave is what a refusal says.
#[test]
fn as_much_leaves_as_programs_ask_for() {
    let plan = |more: &str, memory: u64, excess: f64| {
        found("h200:1", &format!("microbatch=1,recompute=none{more}"), Scope::All, memory, excess)
    };
    let of = |more: &str| plan(more, 140 << 30, 1.0).unwrap().prediction.memory.total().0;
    let room = of(",offload=none").midpoint(of(",offload=optimizer"));
    let hosted = |excess: f64| {
        let plan = plan("", room, excess).unwrap();
        assert!(plan.prediction.fits() && plan.choice.contains("offload="), "{}", plan.choice);
        plan.prediction.host
    };
    let [less, as_it_is, more] = [0.9, 1.0, 1.05].map(hosted);
    assert!(less < as_it_is && as_it_is < more, "{less} {as_it_is} {more}");
    let error = plan("", 64 << 20, 1.0).err().unwrap();
    assert!(error.contains("offload=optimizer+gradients+parameters+activations, needs"), "{error}");
}

/// What leaves a stage is taken from what that stage's own programs hold.
#[test]
fn what_leaves_a_stage_is_taken_from_its_own_programs() {
    let of = |offload: &str| {
        let pins = format!("dp=2,pp=2,schedule=1f1b,zero=1,microbatch=1,recompute=none{offload}");
        found("h200:4", &pins, Scope::Runnable, 140 << 30, 1.0).unwrap().prediction
    };
    let (base, both) = (of(",offload=none"), of(",offload=optimizer"));
    let [first, second] = ["optimizer/none", "none/optimizer"].map(|each| of(&format!(",stage_offload={each}")));
    assert_eq!(both.memory.optimizer, Bytes(0));
    // The second holds fewer microbatches: it is the fullest only where the first has its optimizer elsewhere.
    assert!(second.memory.optimizer > Bytes(0) && second.memory.activations > first.memory.activations);
    assert!(first.memory.total() < base.memory.total(), "{} {}", first.memory.total(), base.memory.total());
    assert!(both.memory.total() < second.memory.total(), "{} {}", both.memory.total(), second.memory.total());
    assert!([&first, &second, &both].iter().all(|of| of.step > base.step));
}
