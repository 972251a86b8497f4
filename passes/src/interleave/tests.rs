//! Plans whose microbatch is cut into chunks that overlap.

use crate::cluster::Cluster;
use crate::lower::lower_all;
use crate::search_tests::{SMALL, Sizes, plan};
use crate::simulate::{Conditions, Simulated, simulate};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::view::is_view;
use shardc_ir::{DType, NoScratch, Op, Plan, Program, verify};

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
}

fn simulated(plan: &Plan, cluster: &str) -> (Simulated, Program) {
    let cluster = Cluster::parse(cluster, "h200").unwrap();
    let verified = verify::plan(plan).unwrap();
    let program = crate::lower::lower_rank(&verified, 0, &NoScratch).unwrap();
    (simulate(std::slice::from_ref(&program), &[], plan, &cluster, &Conditions::default()).unwrap(), program)
}

#[test]
fn try_it() {
    let sizes = Sizes { layers: 4, batch: 16, seq: 8192, ..SMALL };
    for (cluster, tp) in [("h100:8", "8"), ("h100:8", "4x2"), ("h100:8", "2"), ("h200:2", "2"), ("h200:4", "4")] {
        for chunks in [1, 2, 4] {
            let text = format!("tp={tp},microbatch=4,overlap_chunks={chunks}");
            let plan = plan(sizes, DType::Bf16, cluster, 1000, &text).unwrap();
            let (simulated, program) = simulated(&plan, cluster);
            let copies = |i: &&Instruction| {
                matches!(i.action, Action::Compute(Op::Slice(_) | Op::Concat(_))) && !is_view(&program.buffers, i)
            };
            let copies = program.instructions().filter(copies).count();
            let rank = &simulated.ranks[0];
            println!(
                "{cluster} tp={tp} {chunks}: {} communication {} exposed {} memory {} copies {copies}",
                simulated.step,
                rank.communication,
                rank.exposed_communication,
                crate::allocate::memory(&program).total(),
            );
            if std::env::var("SHOW").is_ok_and(|s| s == format!("{tp}/{chunks}")) {
                let section = &program.sections[program.order[0].section];
                for span in rank.runs[0].spans.iter() {
                    let i = &section.instructions[span.index as usize];
                    let path = i.source.map_or("", |s| &plan.graph.node(s).path);
                    println!(
                        "{:4} {:8.0} {:8.0} {} {} {path} {:?}",
                        span.index,
                        1e6 * span.start,
                        1e6 * span.finish,
                        i.stream.name(),
                        i.action.name(),
                        i.results.iter().map(|b| program.buffers[*b].ty.to_string()).collect::<Vec<_>>()
                    );
                }
            }
        }
    }
}
