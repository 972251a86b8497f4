//! Placing all axes that are searched: one after the other, then each again with the others as they are.
//!
//! One axis is solved exactly, given what every class does with the others. Doing so in turn never makes the step
//! longer, so it ends where no single axis can do better: for two axes at a product's two dimensions, or at its depth
//! and one of them, as well as for one axis alone. The axis that is placed first has the most to choose from: the
//! outermost of a family, whose links are the slowest, but the innermost of context axes ([`placed_axes`]).

use super::coupled::coupled;
use super::eliminate::Solution;
use super::family::{placed_axes, searched_axes};
use super::layout::Along;
use super::objective::{Objective, Prices};
use super::problem::Problem;
use super::route::conversions;
use super::tensor::{Conversion, Placed, Prepared};
use crate::cluster::Cluster;
use shardc_ir::{AxisId, Choice};
use std::collections::{BTreeMap, BTreeSet};

/// How often all axes are placed again at the most.
const MOST_ROUNDS: usize = 2;

/// Chooses what every class does with the axes that are searched, and adds it to the strategies: the fastest
/// at these prices. Gives the conversions that follow, and those between samples.
pub fn place_axes(prepared: &Prepared<'_>, placed: &mut Placed<'_>, prices: Prices) -> Vec<Conversion> {
    place_axes_seen(prepared, placed, prices, &[]).0
}

/// [`place_axes`], with the conversions also as they are `seen` on other devices.
pub fn place_axes_seen(
    prepared: &Prepared<'_>,
    placed: &mut Placed<'_>,
    prices: Prices,
    seen: &[Cluster],
) -> (Vec<Conversion>, Vec<Vec<Conversion>>) {
    let axes = placed_axes(placed.mesh);
    // How often what an axis does has changed, up to when each was placed last: beside the same others it would do the
    // same again.
    let (mut changes, mut last, mut costs) = (0, vec![None; axes.len()], vec![f64::INFINITY; axes.len()]);
    for round in 0..=MOST_ROUNDS {
        let before = costs.last().copied();
        for (index, axis) in axes.iter().enumerate() {
            if last[index] != Some(changes) {
                let is_changed = place_axis(prepared, placed, *axis, prices, &mut costs[index]);
                changes += usize::from(is_changed);
                last[index] = Some(changes);
            }
        }
        if round > 0 && costs.last().zip(before).is_none_or(|(cost, before)| *cost >= before * (1.0 - 1e-9)) {
            break;
        }
    }
    let mut all = [placed.cluster].into_iter().chain(seen).map(|cluster| {
        let between = conversions(prepared, placed, cluster);
        between.into_iter().chain(coupled(prepared, placed, cluster)).collect()
    });
    (all.next().unwrap_or_default(), all.collect())
}

/// Chooses what every class does with one axis, at a `cost` of so many seconds of a step. Gives whether that is
/// something else than before.
fn place_axis(prepared: &Prepared<'_>, placed: &mut Placed<'_>, axis: AxisId, prices: Prices, cost: &mut f64) -> bool {
    let problem = Problem::new(prepared, placed, axis, Objective::Step(prices));
    let solution = problem.graph.solve();
    let (choices, handed) = (chosen(&problem, &solution), problem.handed_in(&solution));
    *cost = solution.cost;
    let is_same = choices.iter().zip(&placed.strategies).all(|(choice, strategy)| strategy.choice(axis) == *choice)
        && handed.iter().all(|(flow, layout)| placed.handed.get(&(axis, *flow)) == Some(layout));
    write(placed, axis, choices, handed);
    !is_same
}

/// What each class does with a problem's axis in a solution.
fn chosen(problem: &Problem<'_, '_>, solution: &Solution) -> Vec<Choice> {
    problem.variable.iter().map(|variable| problem.domains[*variable][solution.choices[*variable]]).collect()
}

/// Adds what the classes do with an axis, and the layouts in which flows are handed on, to what is placed.
fn write(placed: &mut Placed<'_>, axis: AxisId, choices: Vec<Choice>, handed: BTreeMap<usize, Along>) {
    let order = searched_axes(placed.mesh);
    let rank = |axis: &AxisId| order.iter().position(|other| other == axis).map_or(0, |index| index + 1);
    for (strategy, choice) in placed.strategies.iter_mut().zip(choices) {
        *strategy = strategy.without(axis).with(axis, choice);
        if let Choice::Factor(factor) = choice {
            // One order everywhere, so that the parts of a value lie alike wherever it is divided.
            strategy.factors.entry(factor).or_default().sort_by_key(rank);
        }
    }
    placed.handed.extend(handed.into_iter().map(|(flow, layout)| ((axis, flow), layout)));
}

/// Adds a solution of `problem` to a copy of what it was made from.
#[cfg(test)]
pub(crate) fn apply(problem: &Problem<'_, '_>, placed: &mut Placed<'_>, solution: &Solution) {
    write(placed, problem.axis, chosen(problem, solution), problem.handed_in(solution));
}

/// The choices that are placed already on a problem's axis, if the problem has them all.
#[cfg(test)]
pub(crate) fn current(problem: &Problem<'_, '_>, placed: &Placed<'_>) -> Option<Vec<usize>> {
    let mut choices = vec![0; problem.graph.unary.len()];
    for (class, variable) in problem.variable.iter().enumerate() {
        let own = placed.strategies[class].choice(problem.axis);
        choices[*variable] = problem.domains[*variable].iter().position(|choice| *choice == own)?;
    }
    for (flow, (variable, ways)) in &problem.handed {
        let own = placed.handed.get(&(problem.axis, *flow))?;
        let made = problem.made(*flow, &choices);
        choices[*variable] = ways.iter().position(|way| way.in_layout == *own && way.may_be(made))?;
    }
    Some(choices)
}

/// What each choice of some classes on `axis` costs a step at these prices, in seconds beyond the best: all other nodes
/// are free to suit it, the other axes stay as they are placed.
pub fn choices_of(
    prepared: &Prepared<'_>,
    placed: &Placed<'_>,
    (axis, prices): (AxisId, Prices),
    classes: &[usize],
) -> Vec<Vec<(Choice, f64)>> {
    let problem = Problem::new(prepared, placed, axis, Objective::Step(prices));
    let variables: BTreeSet<usize> = classes.iter().map(|class| problem.variable[*class]).collect();
    let variables: Vec<usize> = variables.into_iter().collect();
    let costs = problem.graph.costs_of(&variables);
    let of = |class: &usize| {
        let variable = problem.variable[*class];
        let costs = variables.binary_search(&variable).map_or(&[][..], |place| &costs[place]);
        problem.domains[variable].iter().copied().zip(costs.iter().copied()).collect()
    };
    classes.iter().map(of).collect()
}
