//! Do the programs compute the plan's graph? Shown without running them, for tensors of any size.
//!
//! A plan's graph says what one device would compute, and its layouts follow from factor rules whose
//! meaning the tests establish op by op: an operation on operands in the layouts of a legal strategy
//! gives its results in theirs. What is left to show is that the programs do nothing else. That is
//! translation validation (Pnueli, Siegel and Singerman, "Translation validation", 1998): lowering,
//! scheduling and allocation are not trusted, only their result is looked at. Every buffer holds a
//! *fact* (`state`): these elements of this value of the graph, in this order
//! (`arrangement`), whole or one term of a reduction. One pass over the instructions (`interpret`)
//!
//! * opens up each region of fused operations (`expand`), since it does what its steps do;
//! * justifies each kernel: it is its node's operation, with the attributes that this rank's part
//!   needs, on operands whose facts are the layouts of the node's strategy;
//! * justifies each collective, slice and transpose as a change of layout (`conversion`);
//! * counts microbatches (`sums`): a sum over them is complete when each was added once, and what belongs
//!   to one microbatch is forgotten when the next begins;
//! * and demands at the end that every reading and every slot holds its output of the graph.
//!
//! Bytes are [`memory`](super::memory)'s business: a fact is of a buffer, and that check shows that the
//! buffer is intact where it is read and that streams wait for each other. Of slots alone, whose next values may be
//! any buffer's that lies where they do, it is looked at which buffers their bytes are (`stored`).
//!
//! **Ranks.** Facts are about all ranks at once, so the given programs must be one program but for
//! numbers that follow from coordinates (`alike`, `interface`): the members of groups, the first index of
//! a part. Then they cannot deadlock either: of the instructions that some rank has not finished, take
//! the first in the order of issue; all ranks have finished what it waits for, so all ranks can enter it.
//! Any set of ranks may be given; [`cover`] is one that tells the axes of the mesh apart, for meshes too
//! large to lower every rank. Each rank's own program is shown again before it runs.
//!
//! **Stages.** The programs of the ranks of one stage of a pipeline are one program in that sense, and those of
//! different stages are not. All stages are walked through the step together (`stages`): what a message
//! brings is what its sender was shown to hold, of the microbatch of which it was, and a single number that is
//! summed over the stages is that of one of them, to which the others add zeros. So a value that comes of another
//! microbatch, from another stage or in another order is no operand of the kernel that reads it, and a gradient counts
//! each microbatch once wherever its terms were made. Microbatches, and sections that differ in the names of their
//! buffers alone, are interpreted once (`segment`).
//!
//! Numbers are treated as exact: the order of a sum is not part of the claim.

mod activations;
mod alike;
mod arrangement;
mod conversion;
mod expand;
mod interface;
mod interpret;
mod kernel;
mod segment;
mod stages;
mod state;
mod stored;
mod sums;

use super::plan::VerifiedPlan;
use super::program::check_each;
use crate::diagnostic::Diagnostics;
use crate::mesh::{AxisId, Family, Mesh};
use crate::ops::Op;
use crate::program::{Action, Program};
use stages::{Walk, walk};
use std::ops::AddAssign;

/// What was shown; see [`translation`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TranslationFacts {
    /// Programs that were looked at.
    pub ranks: usize,
    /// Instructions of one rank, of each stage.
    pub instructions: usize,
    /// Of them, kernels that were justified by a node of the graph.
    pub kernels: usize,
    /// Of them, those that change the layout of a value, or pass it on.
    pub conversions: usize,
}

impl AddAssign for TranslationFacts {
    fn add_assign(&mut self, more: Self) {
        self.ranks += more.ranks;
        self.instructions += more.instructions;
        self.kernels += more.kernels;
        self.conversions += more.conversions;
    }
}

/// Shows that programs (of all ranks, or of some) compute what the plan's graph computes on one device.
///
/// # Errors
/// The first instruction of each chain that cannot be justified, and outputs that are not made.
pub fn translation(plan: &VerifiedPlan<'_>, programs: &[Program]) -> Result<TranslationFacts, Diagnostics> {
    let mut found = Diagnostics::default();
    check_each(programs, &mut found)?;
    found.finish(())?;
    check(plan, programs)
}

/// [`translation`] of programs whose structure and memory are known to be sound.
pub(super) fn check(plan: &VerifiedPlan<'_>, programs: &[Program]) -> Result<TranslationFacts, Diagnostics> {
    let mut found = Diagnostics::default();
    let (mesh, ranks) = (&plan.mesh, plan.mesh.ranks());
    for program in programs.iter().filter(|program| program.rank >= ranks || program.ranks != ranks) {
        let message = format!("is one of {} ranks; the plan's mesh {mesh} has {ranks}", program.ranks);
        found.push(format!("rank {}", program.rank), message);
    }
    programs.iter().for_each(|program| check_sources(plan, program, &mut found));
    found.finish(())?;
    let (axes, mut programs) = (mesh.family(Family::Pipeline), expand::expand(programs));
    let stage_of = |program: &Program| mesh.group(program.rank, &axes).iter().position(|rank| *rank == program.rank);
    if !programs.is_sorted_by_key(stage_of) {
        programs.to_mut().sort_by_key(stage_of);
    }
    let stages: Vec<&[Program]> = programs.chunk_by(|a, b| stage_of(a) == stage_of(b)).collect();
    let mut found = Diagnostics::default();
    for stage in (0..plan.stages()).filter(|stage| !stages.iter().any(|of| stage_of(&of[0]) == Some(*stage as usize))) {
        found.push("programs", format!("none of them is of stage {stage} of {}", plan.stages()));
    }
    stages.iter().for_each(|programs| alike::check(programs, &mut found));
    found.finish(())?;
    let mut found = Diagnostics::default();
    interface::check(plan, &programs, &mut found);
    let mut stages: Vec<Walk<'_>> = stages.into_iter().map(|programs| Walk::new(plan, programs, &axes)).collect();
    walk(&mut stages, &axes, &mut found);
    let mut facts = TranslationFacts::default();
    for Walk { interpreter, .. } in &mut stages {
        interpreter.finish();
        facts += interpreter.facts;
        found.0.append(&mut interpreter.found.0);
    }
    found.finish(facts)
}

/// Every node that an instruction names is one of the graph.
fn check_sources(plan: &VerifiedPlan<'_>, program: &Program, found: &mut Diagnostics) {
    for (section, body) in &program.sections {
        for (index, instruction) in body.instructions.iter().enumerate() {
            let steps = match &instruction.action {
                Action::Compute(Op::Fused(region)) => &region.steps[..],
                _ => &[],
            };
            let sources = steps.iter().filter_map(|step| step.source).chain(instruction.source);
            for source in sources.filter(|source| !plan.graph.has_node(*source)) {
                found
                    .push(program.place(section, index), format!("comes from {source}, which is no node of the graph"));
            }
        }
    }
}

/// Ranks that tell the axes of a mesh apart: of each stage of a pipeline the first, the last, and per axis the
/// one that is second on it and first on all others.
pub fn cover(mesh: &Mesh) -> Vec<u64> {
    let (stages, mut within) = (mesh.family(Family::Pipeline), vec![0]);
    let (mut stride, mut last) = (1, 0);
    let axes: Vec<AxisId> = mesh.ids().filter(|axis| !mesh.is_time(*axis)).collect();
    for axis in axes.into_iter().rev() {
        if !stages.contains(&axis) && mesh.size(axis) > 1 {
            within.push(stride);
            last += stride * (mesh.size(axis) - 1);
        }
        stride *= mesh.size(axis);
    }
    within.push(last);
    within.sort_unstable();
    within.dedup();
    let firsts = mesh.group(0, &stages);
    firsts.iter().flat_map(|first| within.iter().map(move |rank| first + rank)).collect()
}
