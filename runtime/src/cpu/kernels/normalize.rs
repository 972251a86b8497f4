//! Operations on rows, the last dimension: softmax, layer norm, RMS norm.

use super::elementwise::maximum;
use super::reduce::pairwise_sum;
use super::{Context, View, ViewMut, by_rows};

pub(super) fn softmax(context: Context, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let (row, x) = (x.row(), x.f32s()?);
    result.write_f32(|out| {
        by_rows(context, row, 16 * row, out, |first, out| {
            for (out, x) in out.chunks_exact_mut(row).zip(x[first * row..].chunks_exact(row)) {
                let max = x.iter().copied().fold(f32::NEG_INFINITY, maximum);
                out.iter_mut().zip(x).for_each(|(out, x)| *out = (x - max).exp());
                let scale = 1.0 / pairwise_sum(out, &|x| x);
                out.iter_mut().for_each(|out| *out *= scale);
            }
        });
    })
}

/// Writes f32 statistics of rows.
fn statistics(result: &mut ViewMut<'_>, values: impl Iterator<Item = f32>) -> Result<(), String> {
    result.write_f32(|out| out.iter_mut().zip(values).for_each(|(out, value)| *out = value))
}

pub(super) fn layer_norm(eps: f64, operands: &[View<'_>], results: &mut [ViewMut<'_>]) -> Result<(), String> {
    let row = operands[0].row();
    let (x, gamma, beta) = (operands[0].f32s()?, operands[1].f32s()?, operands[2].f32s()?);
    let moments = |x: &[f32]| {
        let mean = pairwise_sum(x, &|x| x) / row as f32;
        let variance = pairwise_sum(x, &|x| (x - mean) * (x - mean)) / row as f32;
        (mean, 1.0 / (variance + eps as f32).sqrt())
    };
    let moments: Vec<(f32, f32)> = x.chunks_exact(row).map(moments).collect();
    results[0].write_f32(|out| {
        for ((out, x), (mean, rstd)) in out.chunks_exact_mut(row).zip(x.chunks_exact(row)).zip(&moments) {
            for (((out, x), gamma), beta) in out.iter_mut().zip(x).zip(gamma.iter()).zip(beta.iter()) {
                *out = (x - mean) * rstd * gamma + beta;
            }
        }
    })?;
    statistics(&mut results[1], moments.iter().map(|(mean, _)| *mean))?;
    statistics(&mut results[2], moments.iter().map(|(_, rstd)| *rstd))
}

pub(super) fn layer_norm_grad(operands: &[View<'_>], results: &mut [ViewMut<'_>]) -> Result<(), String> {
    let (row, gamma) = (operands[1].row(), operands[2].f32s()?);
    let (dy, x) = (operands[0].f32s()?, operands[1].f32s()?);
    let (mean, rstd) = (operands[3].f32s()?, operands[4].f32s()?);
    let (mut dgamma, mut dbeta, mut normal) = (vec![0.0f64; row], vec![0.0f64; row], vec![0.0; row]);
    results[0].write_f32(|out| {
        let rows = out.chunks_exact_mut(row).zip(dy.chunks_exact(row)).zip(x.chunks_exact(row));
        for (index, ((out, dy), x)) in rows.enumerate() {
            let (mean, rstd) = (mean[index], rstd[index]);
            for at in 0..row {
                normal[at] = (x[at] - mean) * rstd;
                dgamma[at] += f64::from(dy[at] * normal[at]);
                dbeta[at] += f64::from(dy[at]);
                out[at] = dy[at] * gamma[at];
            }
            let average = pairwise_sum(out, &|x| x) / row as f32;
            let slope = out.iter().zip(&normal).map(|(g, x)| g * x).sum::<f32>() / row as f32;
            out.iter_mut().zip(&normal).for_each(|(g, x)| *g = rstd * (*g - average - x * slope));
        }
    })?;
    statistics(&mut results[1], dgamma.into_iter().map(|sum| sum as f32))?;
    statistics(&mut results[2], dbeta.into_iter().map(|sum| sum as f32))
}

pub(super) fn rms_norm(eps: f64, operands: &[View<'_>], results: &mut [ViewMut<'_>]) -> Result<(), String> {
    let (row, x, gamma) = (operands[0].row(), operands[0].f32s()?, operands[1].f32s()?);
    let scale = |x: &[f32]| 1.0 / (pairwise_sum(x, &|x| x * x) / row as f32 + eps as f32).sqrt();
    let rstd: Vec<f32> = x.chunks_exact(row).map(scale).collect();
    results[0].write_f32(|out| {
        for ((out, x), rstd) in out.chunks_exact_mut(row).zip(x.chunks_exact(row)).zip(&rstd) {
            for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma.iter()) {
                *out = x * rstd * gamma;
            }
        }
    })?;
    statistics(&mut results[1], rstd.into_iter())
}

pub(super) fn rms_norm_grad(operands: &[View<'_>], results: &mut [ViewMut<'_>]) -> Result<(), String> {
    let (row, gamma, rstd) = (operands[1].row(), operands[2].f32s()?, operands[3].f32s()?);
    let (dy, x) = (operands[0].f32s()?, operands[1].f32s()?);
    let (mut dgamma, mut normal) = (vec![0.0f64; row], vec![0.0; row]);
    results[0].write_f32(|out| {
        let rows = out.chunks_exact_mut(row).zip(dy.chunks_exact(row)).zip(x.chunks_exact(row));
        for (index, ((out, dy), x)) in rows.enumerate() {
            let rstd = rstd[index];
            for at in 0..row {
                normal[at] = x[at] * rstd;
                dgamma[at] += f64::from(dy[at] * normal[at]);
                out[at] = dy[at] * gamma[at];
            }
            let slope = out.iter().zip(&normal).map(|(g, x)| g * x).sum::<f32>() / row as f32;
            out.iter_mut().zip(&normal).for_each(|(g, x)| *g = rstd * (*g - x * slope));
        }
    })?;
    statistics(&mut results[1], dgamma.into_iter().map(|sum| sum as f32))
}
