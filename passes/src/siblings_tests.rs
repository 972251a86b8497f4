//! Products beside each other: what is joined, where it lies, and that it is proven product by product.

use crate::lower::lower_all;
use crate::lower_tests::{TINY, plan};
use shardc_ir::ops::{Fused, Op};
use shardc_ir::program::{Action, Instruction};
use shardc_ir::{BufferId, Bytes, DType, NoScratch, Program, Target, TensorType, verify};
use std::collections::BTreeMap;

/// Has one launch for products beside each other, and for nothing else.
#[derive(Debug)]
struct Beside;

impl Target for Beside {
    fn scratch(&self, _: &Action, _: &[TensorType], _: &[TensorType]) -> Bytes {
        Bytes(0)
    }

    fn fuses(&self, region: &Fused, _: &[TensorType]) -> bool {
        region.is_products()
    }
}

fn regions(program: &Program) -> Vec<(&Instruction, &Fused)> {
    let mut found = Vec::new();
    for instruction in program.instructions() {
        if let Action::Compute(Op::Fused(region)) = &instruction.action {
            found.push((instruction, region));
        }
    }
    found
}

#[test]
fn products_of_one_operand_are_one_instruction_and_lie_evenly() {
    for (cluster, pins) in [
        ("cpu:1", "microbatch=12"),
        ("cpu:4", "dp=4,zero=0,microbatch=3"),
        ("cpu:4", "dp=4,zero=1,microbatch=3"),
        ("cpu:4", "dp=4,zero=3,microbatch=3"),
        ("cpu:4", "dp=2,tp=2,zero=1,microbatch=6"),
    ] {
        let plan = plan(TINY, DType::Bf16, cluster, pins, false);
        let plan = verify::plan(&plan).expect("a plan");
        let programs = lower_all(&plan, &Beside).expect("programs");
        verify::step(&plan, &programs).unwrap_or_else(|found| panic!("{pins}: {found}"));
        let mut joined: BTreeMap<String, usize> = BTreeMap::new();
        for (instruction, region) in regions(&programs[0]) {
            let Op::Matmul(op) = &region.steps[0].op else { panic!("{instruction}") };
            *joined.entry(format!("{} {}", region.steps.len(), op.spec)).or_default() += 1;
            let offsets = |ids: &[BufferId]| ids.iter().map(|id| programs[0].buffers[*id].offset).collect::<Vec<_>>();
            for places in [offsets(&instruction.operands[1..]), offsets(&instruction.results)] {
                let distances: Vec<i64> = places.windows(2).map(|pair| pair[1] as i64 - pair[0] as i64).collect();
                assert!(distances.iter().all(|one| *one == distances[0]), "{pins}: {instruction} at {places:?}");
            }
        }
        // Per block keys and values, and gate and up; forward, and the gradients of their weights.
        let text = joined.iter().map(|(name, count)| format!("{count} x {name}")).collect::<Vec<_>>();
        assert_eq!(joined.values().sum::<usize>(), 8, "{pins}: {text:?}");
    }
}

#[test]
fn each_product_is_proven_by_its_own_node() {
    let plan = plan(TINY, DType::F32, "cpu:4", "dp=4,zero=1,microbatch=3", false);
    let plan = verify::plan(&plan).expect("a plan");
    let programs = lower_all(&plan, &Beside).expect("programs");
    let steps = |program: &Program| {
        let of = |action: &Action| if let Action::Compute(Op::Fused(region)) = action { region.steps.len() } else { 1 };
        program.instructions().map(|instruction| of(&instruction.action)).sum::<usize>()
    };
    let plain = lower_all(&plan, &NoScratch).expect("programs");
    assert_eq!(steps(&programs[0]), plain[0].instructions().count());
    type Bug = fn(&mut Fused);
    let bugs: [Bug; 3] = [
        |region| region.steps[1].operands = region.steps[0].operands.clone(),
        |region| region.steps[1].source = region.steps[0].source,
        |region| region.results.swap(0, 1),
    ];
    for bug in bugs {
        let mut broken = programs.clone();
        for program in &mut broken {
            let instructions = program.sections.values_mut().flat_map(|section| &mut section.instructions);
            let mut found = instructions.filter_map(|instruction| match &mut instruction.action {
                Action::Compute(Op::Fused(region)) => Some(region),
                _ => None,
            });
            bug(found.next().expect("a region"));
        }
        assert!(verify::step(&plan, broken).is_err());
    }
}
