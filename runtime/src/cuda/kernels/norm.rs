//! The steps of a region that know whole rows: norms and their derivatives. The sums over the rows of a group meet
//! in shared memory together, so a group waits as often as one row would.

use super::fold::block_sums;
use super::pack;
use super::region::{Number, Pack32, Value};
use cubecl::frontend::NativeExpand;
use cubecl::prelude::{Scope, Sequence};

/// How the vectors of a unit lie over the rows of its group: some for each row, one row after the other.
pub(super) struct Rows<'a> {
    /// Which of the unit's vectors of a row are inside of it.
    pub is_inside: &'a [NativeExpand<bool>],
    /// The vectors of a row.
    pub columns: &'a NativeExpand<usize>,
    /// Units of a block.
    pub threads: u32,
}

impl Rows<'_> {
    /// The number of the row of each vector.
    fn of<'n>(&self, numbers: &'n [Number], at: usize) -> &'n Number {
        &numbers[at / self.is_inside.len()]
    }

    /// Per row, the sum over the unit's vectors of what `term` makes of each of `count`.
    fn own(
        &self,
        scope: &mut Scope,
        count: usize,
        term: impl Fn(&mut Scope, usize, NativeExpand<bool>) -> Number,
    ) -> Vec<Number> {
        let packs = self.is_inside.len();
        let mut sums: Vec<Number> = Vec::with_capacity(count / packs);
        for at in 0..count {
            let next = term(scope, at, self.is_inside[at % packs].clone());
            match sums.last().filter(|_| at % packs > 0).cloned() {
                Some(before) => {
                    let sum = pack::sum_two::expand(scope, before, next);
                    sums.pop();
                    sums.push(sum);
                }
                None => sums.push(next),
            }
        }
        sums
    }

    /// The sums over the block of some numbers, each divided by the elements of a row.
    fn means(&self, scope: &mut Scope, numbers: Vec<Number>) -> Vec<Number> {
        let mut all = Sequence::<f32>::__expand_new(scope);
        let count = numbers.len();
        for number in numbers {
            all.__expand_push_method(scope, number);
        }
        let sums = block_sums::expand(scope, all, count, self.threads);
        let mut mean = |at: usize| {
            let sum = sums.__expand_index_method(scope, at);
            pack::mean::expand(scope, sum, self.columns.clone())
        };
        (0..count).map(&mut mean).collect()
    }

    /// Rows divided by the root of the mean of their squares, and what they were multiplied by.
    fn scaled(&self, scope: &mut Scope, x: Vec<Pack32>, eps: f64) -> (Vec<Pack32>, Vec<Number>) {
        let square =
            |scope: &mut Scope, at: usize, inside| pack::dot::expand(scope, x[at].clone(), x[at].clone(), inside);
        let own = self.own(scope, x.len(), square);
        let squares = self.means(scope, own);
        let rstd = |square| pack::reciprocal_deviation::expand(scope, square, eps as f32);
        let rstd: Vec<Number> = squares.into_iter().map(rstd).collect();
        let scale = |(at, x)| pack::normalize::expand(scope, x, zero(), self.of(&rstd, at).clone());
        (x.into_iter().enumerate().map(scale).collect(), rstd)
    }
}

fn zero() -> Number {
    Number::from(0.0f32)
}

/// `y`, the mean and the reciprocal deviation; see [`shardc_ir::ops::LayerNorm`].
pub(super) fn layer_norm(scope: &mut Scope, rows: &Rows, [x, gamma, beta]: [Vec<Pack32>; 3], eps: f64) -> Vec<Value> {
    let own = rows.own(scope, x.len(), |scope, at, inside| pack::total::expand(scope, x[at].clone(), inside));
    let means = rows.means(scope, own);
    let one = Number::from(1.0f32);
    let center = |(at, x)| pack::normalize::expand(scope, x, rows.of(&means, at).clone(), one.clone());
    let centered: Vec<Pack32> = x.into_iter().enumerate().map(center).collect();
    let (normal, rstd) = rows.scaled(scope, centered, eps);
    let each = |((normal, gamma), beta)| {
        let scaled = pack::multiply::expand(scope, normal, gamma);
        pack::add::expand(scope, scaled, beta)
    };
    let y = normal.into_iter().zip(gamma).zip(beta).map(each).collect();
    vec![Value::Packs(y), Value::Numbers(means), Value::Numbers(rstd)]
}

/// `y` and the reciprocal deviation; see [`shardc_ir::ops::RmsNorm`].
pub(super) fn rms_norm(scope: &mut Scope, rows: &Rows, [x, gamma]: [Vec<Pack32>; 2], eps: f64) -> Vec<Value> {
    let (normal, rstd) = rows.scaled(scope, x, eps);
    let y = normal.into_iter().zip(gamma).map(|(normal, gamma)| pack::multiply::expand(scope, normal, gamma)).collect();
    vec![Value::Packs(y), Value::Numbers(rstd)]
}

/// Makes `dx` and the terms of these rows of `dgamma` and `dbeta`; see [`shardc_ir::ops::LayerNormGrad`]. Without means
/// they are 0, and so are those of `dy gamma`: [`shardc_ir::ops::RmsNormGrad`]. The terms come first, so that none is
/// kept while the sums over the rows meet.
pub(super) fn norm_grad(
    scope: &mut Scope,
    rows: &Rows,
    [dy, x, gamma]: [Vec<Pack32>; 3],
    (means, rstd): (Option<Vec<Number>>, Vec<Number>),
    make: &mut impl FnMut(&mut Scope, usize, Value),
) {
    let is_centered = means.is_some();
    let means = means.unwrap_or_else(|| vec![zero(); rstd.len()]);
    let normalize =
        |(at, x)| pack::normalize::expand(scope, x, rows.of(&means, at).clone(), rows.of(&rstd, at).clone());
    let normal: Vec<Pack32> = x.into_iter().enumerate().map(normalize).collect();
    let term = |(dy, normal): (&Pack32, &Pack32)| pack::multiply::expand(scope, dy.clone(), normal.clone());
    let terms = dy.iter().zip(&normal).map(term).collect();
    make(scope, 1, Value::Packs(terms));
    let scale = |(dy, gamma): (&Pack32, Pack32)| pack::multiply::expand(scope, dy.clone(), gamma);
    let own: Vec<Pack32> = dy.iter().zip(gamma).map(scale).collect();
    if is_centered {
        make(scope, 2, Value::Packs(dy));
    }
    let product =
        |scope: &mut Scope, at: usize, inside| pack::dot::expand(scope, own[at].clone(), normal[at].clone(), inside);
    let mut numbers = rows.own(scope, own.len(), product);
    if is_centered {
        let total = |scope: &mut Scope, at: usize, inside| pack::total::expand(scope, own[at].clone(), inside);
        numbers.extend(rows.own(scope, own.len(), total));
    }
    let mut products = rows.means(scope, numbers);
    let totals = if is_centered { products.split_off(rstd.len()) } else { vec![zero(); rstd.len()] };
    let project = |(at, (own, normal)): (usize, (Pack32, &Pack32))| {
        let [total, product, rstd] = [&totals, &products, &rstd].map(|numbers| rows.of(numbers, at).clone());
        pack::project::expand(scope, own, normal.clone(), total, product, rstd)
    };
    let dx = own.into_iter().zip(&normal).enumerate().map(project).collect();
    make(scope, 0, Value::Packs(dx));
}
