//! Pictures `[b, c, h, w]` in another size.

use super::build::Built;
use super::convert::Converter;
use burn::backend::ir::{InterpolateModeIr, InterpolateOpIr};
use shardc_ir::TensorType;
use shardc_ir::ops::Broadcast;

impl Converter<'_> {
    /// A picture in another size, of the nearest elements or of weighted means of two in each direction; `None` for
    /// other modes. What is made larger by a whole number of times, each element copied, is only widened.
    pub(super) fn interpolate(&mut self, op: &InterpolateOpIr) -> Option<Built> {
        let (size, out) = ([op.x.shape[2], op.x.shape[3]], op.output_size);
        match op.options.mode {
            InterpolateModeIr::Nearest | InterpolateModeIr::NearestExact
                if (0..2).all(|axis| out[axis].is_multiple_of(size[axis].max(1))) =>
            {
                Some(self.copied(op))
            }
            InterpolateModeIr::Nearest => Some(self.by_weights(op, |size, out, from, to| {
                let place = (to as f64 * size / out).floor().min(size - 1.0);
                if from as f64 == place { 1.0 } else { 0.0 }
            })),
            InterpolateModeIr::Bilinear => {
                let is_aligned = op.options.align_corners;
                Some(self.by_weights(op, move |size, out, from, to| {
                    let place = if is_aligned {
                        to as f64 * (size - 1.0) / (out - 1.0).max(1.0)
                    } else {
                        (to as f64 + 0.5) * size / out - 0.5
                    };
                    let low = place.floor().max(0.0);
                    let (high, part) = ((low + 1.0).min(size - 1.0), (place - low).max(0.0));
                    let share = |at: f64, part: f64| if from as f64 == at { part } else { 0.0 };
                    share(low, 1.0 - part) + share(high, part)
                }))
            }
            _ => None,
        }
    }

    /// Each row, then each column, a weighted sum of those that were there: `weight(size, out, from, to)`.
    fn by_weights(&mut self, op: &InterpolateOpIr, weight: impl Fn(f64, f64, u64, u64) -> f64) -> Built {
        let mut x = self.value(&op.x)?;
        for axis in [0, 1] {
            let (size, out) = (op.x.shape[axis + 2] as f64, op.output_size[axis] as f64);
            let weight = |from, to| weight(size, out, from, to);
            x = self.resampled(x, axis + 2, op.output_size[axis] as u64, weight)?;
        }
        Ok(x)
    }

    fn copied(&mut self, op: &InterpolateOpIr) -> Built {
        let x = self.value(&op.x)?;
        let ty: TensorType = self.b.ty(x);
        let [rows, columns] = [0, 1].map(|axis| op.output_size[axis] as u64 / ty.shape[axis + 2].max(1));
        let copies = ty.with_shape([ty.shape[0], ty.shape[1], ty.shape[2], rows, ty.shape[3], columns]);
        let copies = self.b.emit(Broadcast { dims: vec![0, 1, 2, 4] }, &[x], &[copies])?;
        self.b.reshape(copies, &self.sizes(&op.out))
    }
}
