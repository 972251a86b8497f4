//! Plans whose microbatch is cut into chunks that overlap.

use crate::cluster::Cluster;
use crate::lower::{lower_all, lower_rank};
use crate::search::{Pins, search_confirmed};
use crate::search_tests::{SMALL, Sizes, llama, plan, request};
use crate::simulate::{Conditions, Simulated, predict, simulate};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::view::is_view;
use shardc_ir::{DType, Family, NoScratch, Op, Plan, Program, verify};

const TINY: Sizes = Sizes { layers: 2, batch: 16, seq: 8, hidden: 64, heads: 8, kv: 4, ffn: 128, vocab: 64 };

fn programs(plan: &Plan) -> Vec<Program> {
    let plan = verify::plan(plan).unwrap_or_else(|found| panic!("{found}"));
    lower_all(&plan, &NoScratch).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn check(cluster: &str, pins: &str) {
    for dtype in [DType::F32, DType::Bf16] {
        let plan = plan(TINY, dtype, cluster, 1, pins).unwrap_or_else(|error| panic!("{pins}: {error}"));
        let programs = programs(&plan);
        let verified = verify::plan(&plan).unwrap();
        verify::step(&verified, &programs[..]).unwrap_or_else(|found| panic!("{pins}: {}", found.0[0]));
    }
}

#[test]
fn plans_in_chunks_are_shown_to_compute_their_graph() {
    check("cpu:2", "tp=2,microbatch=16,overlap_chunks=2");
    check("cpu:4", "tp=4,microbatch=16,overlap_chunks=4");
    check("cpu:4", "dp=2,tp=2,microbatch=8,overlap_chunks=2");
    check("cpu:4", "dp=2,tp=2,microbatch=2,overlap_chunks=2,zero=1");
    check("cpu:4", "dp=2,tp=2,microbatch=4,overlap_chunks=2,zero=2,recompute=block");
    check("cpu:4", "dp=2,tp=2,microbatch=4,overlap_chunks=4,zero=3,recompute=selective");
    check("cpu:4", "tp=2,microbatch=8,overlap_chunks=8,recompute=1");
    // Of one sample the tokens are cut.
    check("cpu:2", "tp=2,microbatch=1,overlap_chunks=2");
    check("cpu:4", "tp=4,microbatch=1,overlap_chunks=2,recompute=block");
    check("cpu:4", "dp=2,tp=2,microbatch=1,overlap_chunks=4,zero=3");
    // Ranks that divide them divide those of each chunk.
    check("cpu:2", "cp=2,microbatch=1,overlap_chunks=2");
    check("cpu:4", "cp=2,tp=2,microbatch=1,overlap_chunks=2,recompute=block");
    check("cpu:4", "cp=2x2,microbatch=1,overlap_chunks=2,zero=1");
    check("cpu:8", "dp=2,cp=2,tp=2,microbatch=1,overlap_chunks=4,zero=3,recompute=selective");
    check("cpu:8", "pp=2,cp=2,tp=2,schedule=zbv,microbatch=1,overlap_chunks=2");
}

#[test]
fn stages_in_chunks_are_shown_to_compute_their_graph() {
    check("cpu:2", "pp=2,schedule=zbv,microbatch=2,overlap_chunks=2");
    check("cpu:4", "pp=2,tp=2,schedule=1f1b,microbatch=1,overlap_chunks=2,recompute=block");
    check("cpu:4", "pp=2,tp=2,schedule=gpipe,microbatch=4,overlap_chunks=4,loss_chunks=2");
    check("cpu:4", "pp=2,tp=2,schedule=interleaved,virtual=2,microbatch=1,overlap_chunks=4,loss_chunks=4");
    check("cpu:8", "pp=2,dp=2,tp=2,schedule=zbv,microbatch=2,zero=1,overlap_chunks=2,recompute=selective");
}

fn simulated(plan: &Plan, cluster: &str) -> (Simulated, Program) {
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let verified = verify::plan(plan).unwrap();
    let apart = plan.mesh.family(Family::Pipeline);
    let firsts = (0..plan.mesh.ranks()).filter(|rank| rank % (plan.mesh.ranks() / plan.stages()) == 0);
    let mut programs: Vec<Program> = firsts.map(|rank| lower_rank(&verified, rank, &NoScratch).unwrap()).collect();
    let simulated = simulate(&programs, &apart, plan, &cluster, &Conditions::default()).unwrap();
    (simulated, programs.swap_remove(0))
}

/// A plan of some layers of an 8B model in so many chunks: seconds of the step, exposed communication, copies that slices and joins are.
fn measured(cluster: &str, pins: &str, chunks: u64) -> (f64, f64, usize) {
    let sizes = Sizes { layers: 8, batch: 8, seq: 8192, ..SMALL };
    let pins = format!("{pins},overlap_chunks={chunks}");
    let plan = plan(sizes, DType::Bf16, cluster, 1000, &pins).unwrap();
    let (simulated, program) = simulated(&plan, cluster);
    let is_of_node = |i: &&Instruction| {
        let op = i.source.map(|node| &plan.graph.node(node).op);
        let of_tokens = i.operands.iter().any(|id| program.buffers[*id].ty.rank() > 3);
        matches!(op, Some(Op::Slice(_) | Op::Concat(_))) && matches!(i.action, Action::Compute(_)) && of_tokens
    };
    let copies = program.instructions().filter(is_of_node).filter(|i| !is_view(&program.buffers, i)).count();
    (simulated.step.0, simulated.ranks[0].exposed_communication.0, copies)
}

/// What ranks wait for without chunks runs beside kernels with them, and nothing is copied for it.
#[test]
fn chunks_hide_communication() {
    // Products that lose little to what runs beside them, as published software reaches on H100s.
    let file = std::env::temp_dir().join(format!("shardc-chunks-{}.toml", std::process::id()));
    let figures = "matmul_efficiency = 0.753\nmatmul_ramp = 400\nsustained_efficiency = 1.0\noverlap_loss = 0.15\n\
                   attention_forward_sustained = 1.0\nattention_backward_sustained = 1.0\n";
    std::fs::write(&file, format!("device = \"h100\"\nper_node = 8\nnodes = 1\n[figures]\n{figures}")).unwrap();
    for (cluster, pins) in [
        ("h100:4", "tp=4,microbatch=4"),
        ("h200:4", "tp=4,microbatch=4"),
        ("h200:2", "tp=2,microbatch=2"),
        ("h200:8", "pp=2,tp=4,schedule=1f1b,microbatch=2"),
        ("h200:8", "pp=2,tp=4,schedule=zbv,microbatch=1"),
        (file.to_str().unwrap(), "tp=8,microbatch=1"),
    ] {
        let (step, exposed, before) = measured(cluster, pins, 1);
        let (in_two, less, copies) = measured(cluster, pins, 2);
        assert!(less < 0.7 * exposed && in_two < step, "{cluster} {pins}: {step} {exposed} and {in_two} {less}");
        // But what another stage sends in chunks, for gradients of weights.
        let joined = if pins.contains("pp=") { 8 } else { 0 };
        assert!(copies <= before + joined, "{cluster} {pins}: {copies} copies, {before} before");
    }
    std::fs::remove_file(&file).unwrap();
}

/// The search takes chunks where its programs are faster with them, as many as are.
#[track_caller]
fn check_choice(sizes: Sizes, cluster: &str, pins: &str, expect: Option<u64>) {
    let graph = llama(sizes, DType::Bf16);
    let ranks = Cluster::parse(cluster, "h200").unwrap();
    let confirm = |plan: &Plan| {
        let verified = verify::plan(plan).map_err(|found| found.to_string())?;
        let program = lower_rank(&verified, 0, &NoScratch).map_err(|error| error.to_string())?;
        let programs = std::slice::from_ref(&program);
        let simulated = simulate(programs, &[], plan, &ranks, &Conditions::default());
        Ok(predict(programs, &simulated.map_err(|error| error.to_string())?, plan, &ranks).into())
    };
    let pins = Pins::parse(pins).unwrap();
    let plan = search_confirmed(&graph, &ranks, &request(sizes, 1000), &pins, &NoScratch, Some(&confirm)).unwrap();
    let found = plan.choice.split(',').find_map(|part| part.strip_prefix("overlap_chunks="));
    let found = found.map(|count| count.parse::<u64>().unwrap());
    assert_eq!(found, expect, "{}", plan.choice);
}

#[test]
fn chunks_are_chosen_where_they_pay() {
    let large = Sizes { layers: 2, batch: 4, seq: 4096, ..SMALL };
    check_choice(large, "h200:4", "tp=4,microbatch=4", Some(2));
    check_choice(large, "h200:4", "tp=4,microbatch=4,overlap_chunks=1", Some(1));
    check_choice(large, "h200:4", "dp=4", None);
    let small = Sizes { layers: 2, batch: 4, seq: 256, hidden: 512, heads: 8, kv: 4, ffn: 1024, vocab: 4096 };
    check_choice(small, "h200:2", "tp=2,microbatch=4", None);
    check_choice(large, "cpu:2", "tp=2,microbatch=4", None);
}

#[test]
fn pins_that_cannot_be_kept_say_why() {
    let check = |cluster: &str, pins: &str, expect: &str| {
        let error = plan(TINY, DType::F32, cluster, 1, pins).expect_err(pins);
        assert!(error.contains(expect), "{pins}: {error}");
    };
    check("cpu:2", "tp=2,microbatch=4,overlap_chunks=8", "a microbatch of 4 samples does not divide into 8 chunks");
    check(
        "cpu:2",
        "tp=2,microbatch=1,overlap_chunks=3",
        "no block of the model can be cut along its samples or tokens",
    );
    check("cpu:2", "pp=2,microbatch=4,overlap_chunks=8", "a microbatch of 4 samples does not divide into 8 chunks");
    check("cpu:2", "tp=2,overlap_chunks=0", "at least 1");
}
