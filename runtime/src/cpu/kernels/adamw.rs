//! One AdamW update.

use super::{View, ViewMut};
use shardc_ir::ops::Adamw;

/// Updates `p`, `m` and `v` in place. `scalars` are the gradient's scale, the learning rate and the
/// step.
pub fn update(op: &Adamw, scalars: [f32; 3], gradient: &[f32], p: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    let [scale, learning_rate, step] = scalars;
    if !scale.is_finite() {
        return;
    }
    let (beta1, beta2, eps) = (op.beta1 as f32, op.beta2 as f32, op.eps as f32);
    let (rest1, rest2) = ((1.0 - op.beta1) as f32, (1.0 - op.beta2) as f32);
    let decay = (1.0 - f64::from(learning_rate) * op.weight_decay) as f32;
    let bias1 = (1.0 - op.beta1.powf(f64::from(step))) as f32;
    let bias2 = (1.0 - op.beta2.powf(f64::from(step))) as f32;
    for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(gradient) {
        let g = g * scale;
        *m = beta1 * *m + rest1 * g;
        *v = beta2 * *v + rest2 * g * g;
        *p = *p * decay - learning_rate * (*m / bias1) / ((*v / bias2).sqrt() + eps);
    }
}

pub(super) fn adamw(op: &Adamw, operands: &[View<'_>], results: &mut [ViewMut<'_>]) -> Result<(), String> {
    let scalars = [operands[4].scalar()?, operands[5].scalar()?, operands[6].scalar()?];
    let gradient = operands[1].f32s()?;
    let [mut p, mut m, mut v] = [operands[0].f32s()?, operands[2].f32s()?, operands[3].f32s()?].map(|x| x.into_owned());
    update(op, scalars, &gradient, &mut p, &mut m, &mut v);
    // A fourth result is the new parameter in another element type.
    let all = [&p, &m, &v, &p];
    results.iter_mut().zip(all).try_for_each(|(result, values)| result.round_f32(values))
}
