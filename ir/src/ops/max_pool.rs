//! The maximum of every window of a picture, and its derivative.

use super::window::Window;
use super::{Gradient, GradientError, OpDef, arity, expect_float, expect_shape};
use crate::factor::{Dims, FactorRule};
use crate::types::TensorType;
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From `x` `[b, h, w, c]`: the maxima `[b, oh, ow, c]`. Padding never is one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxPool {
    /// Height and width of a window.
    pub kernel: [u64; 2],
    /// How it slides.
    #[serde(flatten)]
    pub window: Window,
}

/// From operands `dy` `[b, oh, ow, c]` and `x` `[b, h, w, c]`: `dx`. The first maximum of a window, row by
/// row, has its cotangent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxPoolGrad {
    /// As in the forward operation.
    pub kernel: [u64; 2],
    /// As in the forward operation.
    #[serde(flatten)]
    pub window: Window,
}

/// The shape of the maxima.
fn pooled(kernel: [u64; 2], window: &Window, x: &TensorType) -> Result<Vec<u64>, String> {
    expect_float(x)?;
    let [b, h, w, c] = x.shape[..] else { return Err(format!("takes pictures [b, h, w, c], not {x}")) };
    let [rows, columns] = window.count([h, w], kernel)?;
    for axis in [0, 1] {
        let (size, count) = ([h, w][axis], [rows, columns][axis]);
        if window.misses(axis, size, kernel[axis], count) {
            return Err(format!("a window of {kernel:?} lies in the padding of {x} only"));
        }
    }
    Ok(vec![b, rows, columns, c])
}

/// The rule, and the dimensions of the picture and of the maxima.
fn factors(kernel: [u64; 2], window: &Window, x: &TensorType) -> (FactorRule, Dims, Dims) {
    let mut rule = FactorRule::default();
    let (b, c) = (rule.parallel("b", x.shape[0]), rule.parallel("c", x.shape[3]));
    let [h, w] = window.factors(&mut rule, [x.shape[1], x.shape[2]], kernel, None);
    (rule, vec![vec![b], h.picture, w.picture, vec![c]], vec![vec![b], h.windows, w.windows, vec![c]])
}

/// One comparison for every element of the maxima and of its window.
fn compared(maxima: &TensorType, kernel: [u64; 2]) -> Flops {
    Flops(maxima.elements() as f64 * kernel[0] as f64 * kernel[1] as f64)
}

impl OpDef for MaxPool {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 1)?;
        Ok(vec![operands[0].with_shape(pooled(self.kernel, &self.window, &operands[0])?)])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let (mut rule, x, y) = factors(self.kernel, &self.window, &operands[0]);
        (rule.operands, rule.results) = (vec![x], vec![y]);
        rule
    }
    fn flops(&self, _operands: &[TensorType], results: &[TensorType]) -> Flops {
        compared(&results[0], self.kernel)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let (dy, x) = (gradient.cotangent(0)?, gradient.operands[0]);
        let dx = gradient.add(MaxPoolGrad { kernel: self.kernel, window: self.window.clone() }, &[dy, x], &[])?;
        gradient.set(0, dx);
        Ok(())
    }

    fn has_kink(&self, _operands: &[TensorType]) -> bool {
        true
    }
}

impl OpDef for MaxPoolGrad {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        expect_shape("the cotangent", &operands[0], &pooled(self.kernel, &self.window, &operands[1])?)?;
        Ok(vec![operands[1].clone()])
    }
    fn rule(&self, operands: &[TensorType], _results: &[TensorType]) -> FactorRule {
        let (mut rule, x, y) = factors(self.kernel, &self.window, &operands[1]);
        rule.linear = vec![vec![0]];
        (rule.operands, rule.results) = (vec![y, x.clone()], vec![x]);
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        compared(&operands[0], self.kernel)
    }
}
