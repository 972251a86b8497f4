//! Convolution of pictures, its transpose, and the gradient of its filters.
//!
//! Channels come last, as matrix units take them: what lies under a window is a row of a matrix, and what is done to every
//! channel alike is done to rows.
//!
//! As in every framework it is a cross-correlation: filters are not turned round. Each of the three is
//! the derivative of another, so a transposed convolution of a model and the gradient of a
//! convolution's pictures are one operation (Dumoulin and Visin, "A guide to convolution arithmetic
//! for deep learning", 2016, section 4). In index notation, with `y = oh*stride + kh*dilation - low`:
//! `(b, y, x, g ci), (g co, kh, kw, ci) -> (b, oh, ow, g co) | sum ci, kh, kw`.

use super::window::Window;
use super::{Arithmetic, Gradient, GradientError, Op, OpDef, Part, arity, declared_one, expect_float, expect_shape};
use crate::factor::{Dims, FactorRule};
use crate::sharding::ReduceKind;
use crate::types::TensorType;
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// From operands `x` `[b, h, w, g*ci]` and filters `[g*co, kh, kw, ci]`: `y` `[b, oh, ow, g*co]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Convolution {
    /// How filters slide.
    #[serde(flatten)]
    pub window: Window,
    /// How many groups of channels there are, each with filters of its own.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub groups: u64,
}

/// From operands `y` `[b, oh, ow, g*co]` and filters `[g*co, kh, kw, ci]`: the declared `x`
/// `[b, h, w, g*ci]`, to which each element of `y` adds its filter where a convolution would read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvolutionTranspose {
    /// How the convolution's filters slide over the result.
    #[serde(flatten)]
    pub window: Window,
    /// As in a convolution.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub groups: u64,
}

/// From operands `dy` `[b, oh, ow, g*co]` and `x` `[b, h, w, g*ci]`: the declared gradient of the
/// filters `[g*co, kh, kw, ci]`, summed in the declared element type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvolutionFilterGrad {
    /// As in the convolution.
    #[serde(flatten)]
    pub window: Window,
    /// As in the convolution.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub groups: u64,
}

fn one() -> u64 {
    1
}

fn is_one(groups: &u64) -> bool {
    *groups == 1
}

fn plane(ty: &TensorType) -> [u64; 2] {
    [ty.shape[1], ty.shape[2]]
}

/// Checks the three tensors of a convolution against each other.
fn check(window: &Window, groups: u64, x: &TensorType, filters: &TensorType, y: &TensorType) -> Result<(), String> {
    let wrong = || {
        format!(
            "x {x} and filters {filters} in {groups} groups do not fit (it takes [b, h, w, g*ci] and [g*co, kh, kw, ci])"
        )
    };
    for ty in [x, filters, y] {
        expect_float(ty)?;
        if ty.rank() != 4 {
            return Err(wrong());
        }
    }
    let fits = groups > 0
        && filters.shape[0].is_multiple_of(groups)
        && filters.shape[3].checked_mul(groups) == Some(x.shape[3]);
    if !fits {
        return Err(wrong());
    }
    let [rows, columns] = window.count(plane(x), plane(filters))?;
    expect_shape("y", y, &[x.shape[0], rows, columns, filters.shape[0]])
}

/// Of `x`, the filters and `y`.
struct Tensors {
    rule: FactorRule,
    x: Dims,
    filters: Dims,
    y: Dims,
}

/// The rule's factors. Result 0 is the one of the three that is not an operand.
fn factors(window: &Window, groups: u64, [x, filters, y]: [&TensorType; 3], result: usize) -> Tensors {
    let mut rule = FactorRule { linear: vec![vec![0], vec![1]], ..FactorRule::default() };
    let mut add = |name: &str, size: u64, held: [bool; 3]| match held[result] {
        true => rule.parallel(name, size),
        false => rule.reduced(name, size, 0, ReduceKind::Sum),
    };
    let b = add("b", y.shape[0], [true, false, true]);
    let g = (groups > 1).then(|| add("g", groups, [true; 3]));
    let co = add("co", y.shape[3] / groups.max(1), [false, true, true]);
    let ci = add("ci", filters.shape[3], [true, true, false]);
    let [h, w] = window.factors(&mut rule, plane(x), plane(filters), (result == 1).then_some(0));
    let grouped = |factor: usize| g.into_iter().chain([factor]).collect::<Vec<usize>>();
    Tensors {
        x: vec![vec![b], h.picture, w.picture, grouped(ci)],
        filters: vec![grouped(co), vec![h.kernel], vec![w.kernel], vec![ci]],
        y: vec![vec![b], h.windows, w.windows, grouped(co)],
        rule,
    }
}

/// The groups of a part: channels are divided between groups before they are inside one.
fn local_groups(groups: u64, channels: &Part) -> u64 {
    let held = u128::from(channels.slice[3].1) * u128::from(groups) / u128::from(channels.shape[3].max(1));
    (held as u64).max(1)
}

/// A product and a sum for every element of `y` and of its filter.
fn products(y: &TensorType, filters: &TensorType) -> Flops {
    let each: u64 = filters.shape.iter().skip(1).product();
    Flops(2.0 * y.elements() as f64 * each as f64)
}

impl OpDef for Convolution {
    fn infer(&self, operands: &[TensorType], _declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        let (x, filters) = (&operands[0], &operands[1]);
        let planes = (x.rank() == 4 && filters.rank() == 4).then(|| (plane(x), plane(filters)));
        let (size, kernel) =
            planes.ok_or_else(|| format!("takes pictures and filters of rank 4, not {x} and {filters}"))?;
        let [rows, columns] = self.window.count(size, kernel)?;
        let y = x.with_shape([x.shape[0], rows, columns, filters.shape[0]]);
        check(&self.window, self.groups, x, filters, &y)?;
        if x.dtype != filters.dtype {
            return Err(format!("x {x} and filters {filters} differ in their element types"));
        }
        Ok(vec![y])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let Tensors { mut rule, x, filters, y } =
            factors(&self.window, self.groups, [&operands[0], &operands[1], &results[0]], 2);
        (rule.operands, rule.results) = (vec![x, filters], vec![y]);
        rule
    }
    fn flops(&self, operands: &[TensorType], results: &[TensorType]) -> Flops {
        products(&results[0], &operands[1])
    }
    fn localize(&self, operands: &[Part], _results: &[Part]) -> Option<Op> {
        Some(Self { groups: local_groups(self.groups, &operands[0]), ..self.clone() }.into())
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let dy = gradient.cotangent(0)?;
        let Self { window, groups } = self.clone();
        let (x, filters) = (gradient.operands[0], gradient.operands[1]);
        let wanted = [0, 1].map(|index| gradient.operand_type(index).with_dtype(gradient.wanted_dtype(index)));
        let [picture, filter] = wanted;
        if gradient.needed[0] {
            let op = ConvolutionTranspose { window: window.clone(), groups };
            let dx = gradient.add(op, &[dy, filters], &[picture])?;
            gradient.set(0, dx);
        }
        if gradient.needed[1] {
            let part = gradient.add(ConvolutionFilterGrad { window, groups }, &[dy, x], &[filter])?;
            gradient.set(1, part);
        }
        Ok(())
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Narrow
    }
}

impl OpDef for ConvolutionTranspose {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        let x = declared_one(declared)?;
        check(&self.window, self.groups, &x, &operands[1], &operands[0])?;
        Ok(vec![x])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let Tensors { mut rule, x, filters, y } =
            factors(&self.window, self.groups, [&results[0], &operands[1], &operands[0]], 0);
        (rule.operands, rule.results) = (vec![y, filters], vec![x]);
        rule
    }
    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        products(&operands[0], &operands[1])
    }
    fn localize(&self, operands: &[Part], _results: &[Part]) -> Option<Op> {
        Some(Self { groups: local_groups(self.groups, &operands[0]), ..self.clone() }.into())
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        let dx = gradient.cotangent(0)?;
        let Self { window, groups } = self.clone();
        let (y, filters) = (gradient.operands[0], gradient.operands[1]);
        let filter = gradient.operand_type(1).with_dtype(gradient.wanted_dtype(1));
        if gradient.needed[0] {
            let part = gradient.add(Convolution { window: window.clone(), groups }, &[dx, filters], &[])?;
            gradient.set(0, part);
        }
        if gradient.needed[1] {
            let part = gradient.add(ConvolutionFilterGrad { window, groups }, &[y, dx], &[filter])?;
            gradient.set(1, part);
        }
        Ok(())
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Narrow
    }
}

impl OpDef for ConvolutionFilterGrad {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(operands, 2)?;
        let filters = declared_one(declared)?;
        check(&self.window, self.groups, &operands[1], &filters, &operands[0])?;
        Ok(vec![filters])
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        let Tensors { mut rule, x, filters, y } =
            factors(&self.window, self.groups, [&operands[1], &results[0], &operands[0]], 1);
        (rule.operands, rule.results) = (vec![y, x], vec![filters]);
        rule
    }
    fn flops(&self, operands: &[TensorType], results: &[TensorType]) -> Flops {
        products(&operands[0], &results[0])
    }
    fn localize(&self, operands: &[Part], _results: &[Part]) -> Option<Op> {
        Some(Self { groups: local_groups(self.groups, &operands[0]), ..self.clone() }.into())
    }
}
