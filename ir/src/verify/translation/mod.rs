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
//! buffer is intact where it is read and that streams wait for each other.
//!
//! **Ranks.** Facts are about all ranks at once, so the given programs must be one program but for
//! numbers that follow from coordinates (`alike`, `interface`): the members of groups, the first index of
//! a part. Then they cannot deadlock either: of the instructions that some rank has not finished, take
//! the first in the order of issue; all ranks have finished what it waits for, so all ranks can enter it.
//! Any set of ranks may be given; [`cover`] is one that tells the axes of the mesh apart, for meshes too
//! large to lower every rank. Each rank's own program is shown again before it runs.
//!
//! **Stages.** The programs of a plan in stages differ in more than coordinates, and are not shown to
//! compute its graph: of them it is known that each is sound by itself and that all of them together meet
//! ([`program`](super::program())), and no kernel or conversion is counted in the facts.
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
mod state;
mod sums;

use super::plan::VerifiedPlan;
use super::program::check_each;
use crate::diagnostic::Diagnostics;
use crate::mesh::{AxisKind, Mesh};
use crate::program::Program;

/// What was shown; see [`translation`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TranslationFacts {
    /// Programs that were looked at.
    pub ranks: usize,
    /// Instructions of one rank.
    pub instructions: usize,
    /// Of them, kernels that were justified by a node of the graph.
    pub kernels: usize,
    /// Of them, those that change the layout of a value.
    pub conversions: usize,
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
    if plan.stages() > 1 {
        let instructions = programs.first().map_or(0, |program| program.instructions().count());
        return Ok(TranslationFacts { ranks: programs.len(), instructions, ..TranslationFacts::default() });
    }
    let programs = &*expand::expand(programs);
    let mut found = Diagnostics::default();
    let ranks = plan.mesh.ranks();
    for program in programs.iter().filter(|program| program.rank >= ranks || program.ranks != ranks) {
        let message = format!("is one of {} ranks; the plan's mesh {} has {ranks}", program.ranks, plan.mesh);
        found.push(format!("rank {}", program.rank), message);
    }
    alike::check(programs, &mut found);
    found.finish(())?;
    let mut found = Diagnostics::default();
    interface::check(plan, programs, &mut found);
    let facts = interpret::run(plan, programs, &mut found);
    found.finish(facts)
}

/// Ranks that tell the axes of a mesh apart: the first, the last, and per axis the one that is second on
/// it and first on all others.
pub fn cover(mesh: &Mesh) -> Vec<u64> {
    let mut ranks = vec![0, mesh.ranks() - 1];
    let mut stride = 1;
    for axis in mesh.axes.iter().rev().filter(|axis| axis.kind == AxisKind::Space && axis.size > 1) {
        ranks.push(stride);
        stride *= axis.size;
    }
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}
