//! Rotary position embedding, in the half-split form.

use super::{View, ViewMut};

pub(super) fn rotary(inverse: bool, operands: &[View<'_>], result: &mut ViewMut<'_>) -> Result<(), String> {
    let [s, h, d] = [1, 2, 3].map(|dim| operands[0].dim(dim));
    let (x, cos, sin) = (operands[0].f32s()?, operands[1].f32s()?, operands[2].f32s()?);
    let (half, sign) = (d / 2, if inverse { -1.0 } else { 1.0 });
    if half == 0 {
        return Ok(());
    }
    result.write_f32(|out| {
        for (index, (out, x)) in out.chunks_exact_mut(d).zip(x.chunks_exact(d)).enumerate() {
            let table = index / h % s * half;
            let (cos, sin) = (&cos[table..table + half], &sin[table..table + half]);
            let ((out1, out2), (x1, x2)) = (out.split_at_mut(half), x.split_at(half));
            for at in 0..half {
                let sin = sign * sin[at];
                out1[at] = x1[at] * cos[at] - x2[at] * sin;
                out2[at] = x2[at] * cos[at] + x1[at] * sin;
            }
        }
    })
}
