//! The two halves of the cross-entropy of logits, and their derivative.

use super::elementwise::maximum;
use super::reduce::pairwise_sum;
use super::{Context, View, ViewMut, by_rows};
use shardc_ir::ops::{CrossEntropy, CrossEntropyGrad, live_columns};

/// The entry of a shard of `row` entries from `start` on that a label means, if it lies in it.
fn entry(label: i64, start: u64, row: usize) -> Option<usize> {
    let at = usize::try_from(label).ok()?.checked_sub(start as usize)?;
    (at < row).then_some(at)
}

pub(super) fn forward(
    op: &CrossEntropy,
    context: Context,
    operands: &[View<'_>],
    results: &mut [ViewMut<'_>],
) -> Result<(), String> {
    let (row, logits, labels) = (operands[0].row(), operands[0].f32s()?, operands[1].i64s()?);
    let live = live_columns(row as u64, op.start, op.classes) as usize;
    let mut rows = vec![(0.0, 0.0); labels.len()];
    by_rows(context, 1, 16 * row, &mut rows, |first, rows| {
        for (index, (lse, picked)) in (first..).zip(rows) {
            let logits = &logits[index * row..][..live];
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, maximum);
            // A shard may have none of the entries that count.
            let is_empty = max == f32::NEG_INFINITY;
            *lse = if is_empty { max } else { max + pairwise_sum(logits, &|x| (x - max).exp()).ln() };
            *picked = entry(labels[index], op.start, live).map_or(0.0, |at| logits[at]);
        }
    });
    results[0].write_f32(|out| out.iter_mut().zip(&rows).for_each(|(out, (lse, _))| *out = *lse))?;
    results[1].write_f32(|out| out.iter_mut().zip(&rows).for_each(|(out, (_, picked))| *out = *picked))
}

pub(super) fn backward(
    op: &CrossEntropyGrad,
    context: Context,
    operands: &[View<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let (row, logits, labels) = (operands[0].row(), operands[0].f32s()?, operands[1].i64s()?);
    let live = live_columns(row as u64, op.start, op.classes) as usize;
    let (lse, dlse, dpicked) = (operands[2].f32s()?, operands[3].f32s()?, operands[4].f32s()?);
    result.write_f32(|out| {
        by_rows(context, row, 8 * row, out, |first, out| {
            for (index, out) in (first..).zip(out.chunks_exact_mut(row)) {
                let (lse, dlse) = (lse[index], dlse[index]);
                let logits = &logits[index * row..][..live];
                let (out, padding) = out.split_at_mut(live);
                padding.fill(0.0);
                out.iter_mut().zip(logits).for_each(|(out, x)| *out = (x - lse).exp() * dlse);
                if let Some(at) = entry(labels[index], op.start, live) {
                    out[at] += dpicked[index];
                }
            }
        });
    })
}
