//! What the axes of each family divide. A family is a restriction, not a mechanism: what follows from
//! it comes from factor rules, elimination and resharding, as for every other axis.
//!
//! | family | divides | decided by |
//! |---|---|---|
//! | `dp` | the batch; storage, where there is no `fsdp` | [`batch`](super::batch), [`zero`](super::zero) |
//! | `fsdp` | the batch, and storage within each of the `dp` replicas | the same |
//! | `mb` | the batch, over time | [`batch`](super::batch) |
//! | `ep` | the batch, and the experts where a product has several; storage of all else | elimination |
//! | `cp` | all but the batch and parameters: the sequence, or heads; storage | elimination |
//! | `ring` | as `cp`, in attention the sequence of queries and keys alike | elimination |
//! | `ulysses` | as `cp`, in attention heads | elimination |
//! | `tp` | all but the batch; of a product with a parameter, a dimension of the parameter | elimination |
//!
//! So gradients are reduced over the axes that do not divide their parameter: `dp`, `fsdp`, `cp` and,
//! but for the experts' own, `ep`.

use super::tensor::Prepared;
use shardc_ir::ops::{Op, OpDef};
use shardc_ir::{AxisId, Choice, FactorKind, Family, Feature, Mesh, Strategy};

/// The families whose axes elimination places, in the order in which it does.
const SEARCHED: [Family; 5] = [Family::Expert, Family::Ring, Family::Ulysses, Family::Context, Family::Tensor];

/// The families over which a parameter that they do not divide is copied, and its gradient summed.
const COPIES: [Family; 6] =
    [Family::Data, Family::Fsdp, Family::Expert, Family::Ring, Family::Ulysses, Family::Context];

fn of(mesh: &Mesh, families: &[Family]) -> Vec<AxisId> {
    families.iter().flat_map(|family| mesh.family(*family)).collect()
}

/// The axes that elimination places.
pub fn searched_axes(mesh: &Mesh) -> Vec<AxisId> {
    of(mesh, &SEARCHED)
}

/// Those of them that have more than one rank.
pub fn open_axes(mesh: &Mesh) -> Vec<AxisId> {
    searched_axes(mesh).into_iter().filter(|axis| mesh.size(*axis) > 1).collect()
}

/// All of them in the order in which they are placed: what is placed first has the most to choose from, so the outermost of a
/// family, whose links are the slowest. But of context axes the innermost: of axes that divide the tokens it alone can go to
/// the heads in one exchange.
pub fn placed_axes(mesh: &Mesh) -> Vec<AxisId> {
    let of = |family: &Family| {
        let mut axes = mesh.family(*family);
        if *family == Family::Context {
            axes.reverse();
        }
        axes
    };
    SEARCHED.iter().flat_map(of).collect()
}

/// The axes that divide the batch wherever it is: over ranks, and over time.
pub fn batch_axes(mesh: &Mesh) -> Vec<AxisId> {
    let divides = |axis: &AxisId| matches!(mesh.axis(*axis).family, Family::Data | Family::Fsdp | Family::Microbatch);
    mesh.ids().filter(divides).collect()
}

/// The axes over which gradients of parameters that nothing divides are summed.
pub fn copy_axes(mesh: &Mesh) -> Vec<AxisId> {
    of(mesh, &COPIES)
}

/// The axes over which ZeRO may store a parameter that is computed with under this strategy: those that
/// hold copies of it, but for the outer replicas where there are inner ones (HSDP).
pub fn storage_axes(mesh: &Mesh, strategy: &Strategy) -> Vec<AxisId> {
    let has_inner = !mesh.family(Family::Fsdp).is_empty();
    let stores = |axis: &AxisId| !(has_inner && mesh.axis(*axis).family == Family::Data);
    let copies = |axis: &AxisId| strategy.choice(*axis) == Choice::Replicate;
    copy_axes(mesh).into_iter().filter(|axis| stores(axis) && copies(axis)).collect()
}

/// Whether the axis holds copies of parameters, as data ranks do.
pub fn is_copy_axis(mesh: &Mesh, axis: AxisId) -> bool {
    COPIES.contains(&mesh.axis(axis).family)
}

/// Whether an axis of a family may do this with a class of nodes, as far as its name goes.
pub fn allows(prepared: &Prepared<'_>, class: usize, family: Family, choice: Choice) -> bool {
    let Choice::Factor(factor) = choice else { return true };
    let is_batch = prepared.batch[class] == choice;
    let op = prepared.op(class);
    let is_stored = prepared.is_parameter[class] || matches!(op, Op::State(_)) || op.update().is_some();
    let is_expert = prepared.experts[class].contains(&factor);
    // Of a product with a parameter, whether the factor is one of the parameter's.
    let of_weight = prepared.weight_factors(class).map(|factors| factors.contains(&factor));
    let is_allowed = match family {
        Family::Expert if matches!(op, Op::Input(_)) => is_batch,
        Family::Expert => is_batch || is_expert || (!is_stored && of_weight.is_none()),
        _ if matches!(op, Op::Input(_)) => false,
        Family::Context | Family::Ring | Family::Ulysses => !is_batch && !is_stored && of_weight != Some(true),
        _ => !is_batch && of_weight != Some(false),
    };
    is_allowed && allows_in_attention(prepared, class, family, factor)
}

/// The same for attention: the batch, heads and queries are as good as any factor; queries and keys may go round a ring
/// where that can be run or is asked for.
fn allows_in_attention(prepared: &Prepared<'_>, class: usize, family: Family, factor: usize) -> bool {
    if !matches!(prepared.op(class), Op::Attention(_) | Op::AttentionGrad(_)) {
        return true;
    }
    let factor = &prepared.rules[class].factors[factor];
    match (factor.kind, family) {
        (FactorKind::Ring { .. }, Family::Ring) => true,
        (FactorKind::Ring { .. }, Family::Context) => Feature::Ring.is_open(false, prepared.scope, prepared.target),
        (FactorKind::Ring { .. }, _) | (_, Family::Ring) => false,
        (_, Family::Ulysses) => factor.name != "s",
        _ => true,
    }
}

/// Of the choices that an axis of a family has with a class, those that are left once all are known: where `ep` can
/// divide the experts of a product with a parameter, it does. Where every expert is gathered to every rank, the axis is
/// one of `dp` with its storage in parts.
pub fn narrow(prepared: &Prepared<'_>, class: usize, family: Family, choices: &mut Vec<Choice>) {
    let is_expert = |choice: &Choice| matches!(choice, Choice::Factor(own) if prepared.experts[class].contains(own));
    if family == Family::Expert && prepared.weight_factors(class).is_some() && choices.iter().any(is_expert) {
        choices.retain(is_expert);
    }
}
