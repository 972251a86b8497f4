//! Exact minimisation of a pairwise cost graph by elimination.
//!
//! Variables have small domains; costs are on single variables and on pairs. Eliminating a variable
//! replaces its tables by one over its neighbours that holds, for each of their assignments, the
//! least cost (Bertele and Brioschi, "Nonserial Dynamic Programming", 1972). The variable with the
//! smallest resulting table goes first, so a graph of small treewidth takes milliseconds.
//!
//! The order is found before any table is made. Where the tables would have more than [`WORK`] entries in all, only
//! variables with at most two neighbours are eliminated: what is left is a smaller graph of pairs, which message
//! passing solves nearly, with a bound below the least ([`relax`]). Ties go to the smaller index, so the
//! result is deterministic.

use super::{dominate, relax};
use crate::threads;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// The most entries that tables have in all.
const WORK: usize = 1 << 20;

/// Variables, their domains, and costs; an illegal combination costs infinity.
#[derive(Clone, Debug, Default)]
pub struct CostGraph {
    /// Per variable, the cost of each choice.
    pub unary: Vec<Vec<f64>>,
    /// Per pair `(a, b)` with `a < b`, the costs, row-major: `[choice of a][choice of b]`.
    pub pairs: BTreeMap<(usize, usize), Vec<f64>>,
}

/// What minimises a cost graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// The choice of each variable.
    pub choices: Vec<usize>,
    /// Its cost.
    pub cost: f64,
    /// No assignment costs less than this.
    pub bound: f64,
}

impl Solution {
    /// Whether no other assignment costs less.
    pub fn is_exact(&self) -> bool {
        self.bound >= self.cost
    }
}

impl CostGraph {
    /// Adds a variable.
    pub fn variable(&mut self, costs: Vec<f64>) -> usize {
        self.unary.push(costs);
        self.unary.len() - 1
    }

    /// Adds costs to a pair of variables, which may be one variable twice.
    pub fn add_pair(&mut self, a: usize, b: usize, cost: impl Fn(usize, usize) -> f64) {
        if a == b {
            (0..self.unary[a].len()).for_each(|choice| self.unary[a][choice] += cost(choice, choice));
            return;
        }
        let (low, high) = (a.min(b), a.max(b));
        let (rows, columns) = (self.unary[low].len(), self.unary[high].len());
        let table = self.pairs.entry((low, high)).or_insert_with(|| vec![0.0; rows * columns]);
        for row in 0..rows {
            for column in 0..columns {
                table[row * columns + column] += if a < b { cost(row, column) } else { cost(column, row) };
            }
        }
    }

    /// The cost of an assignment.
    pub fn cost(&self, choices: &[usize]) -> f64 {
        let single: f64 = self.unary.iter().zip(choices).map(|(costs, choice)| costs[*choice]).sum();
        let pair =
            |((a, b), table): (&(usize, usize), &Vec<f64>)| table[choices[*a] * self.unary[*b].len() + choices[*b]];
        single + self.pairs.iter().map(pair).sum::<f64>()
    }

    /// The same with the choices of each variable that are kept.
    pub fn restricted(&self, kept: &[Vec<usize>]) -> Self {
        let single = |(costs, kept): (&Vec<f64>, &Vec<usize>)| kept.iter().map(|choice| costs[*choice]).collect();
        let pair = |((a, b), table): (&(usize, usize), &Vec<f64>)| {
            let (rows, columns) = (&kept[*a], &kept[*b]);
            let mut left = Vec::with_capacity(rows.len() * columns.len());
            for row in rows.iter().map(|row| &table[row * self.unary[*b].len()..]) {
                left.extend(columns.iter().map(|column| row[*column]));
            }
            ((*a, *b), left)
        };
        Self { unary: self.unary.iter().zip(kept).map(single).collect(), pairs: self.pairs.iter().map(pair).collect() }
    }

    /// An assignment of least cost, or of nearly that where finding it would take too long.
    pub fn solve(&self) -> Solution {
        self.solve_within(WORK)
    }

    /// The same with tables of at most so many entries in all.
    pub(crate) fn solve_within(&self, work: usize) -> Solution {
        let reduced = dominate::reduce(self, &[]);
        let mut solution = Elimination::new(&reduced.graph).run(&reduced.graph, work);
        solution.choices.iter_mut().zip(&reduced.kept).for_each(|(choice, kept)| *choice = kept[*choice]);
        solution
    }

    /// Per choice of each of some variables, by how much the best assignment that has it costs more than the best.
    pub fn costs_of(&self, variables: &[usize]) -> Vec<Vec<f64>> {
        let costs = self.costs_by_elimination(variables).unwrap_or_else(|| {
            // Fewer choices are left where fewer have to stay.
            let best = self.solve();
            threads::map(variables, |variable| {
                let alone = self.costs_by_elimination(&[*variable]).and_then(|costs| costs.into_iter().next());
                alone.unwrap_or_else(|| self.costs_of_restricted(*variable, &best))
            })
        });
        let beyond_least = |costs: Vec<f64>| {
            let least = least(&costs);
            costs.into_iter().map(|cost| cost - least).collect()
        };
        costs.into_iter().map(beyond_least).collect()
    }

    /// Per choice of each of some variables, the least cost with it, but for what variables cost that have nothing to do
    /// with it; nothing where tables would have too many entries.
    fn costs_by_elimination(&self, variables: &[usize]) -> Option<Vec<Vec<f64>>> {
        let graph = dominate::reduce(self, variables).graph;
        let state = Elimination::new(&graph);
        let order = state.order((0..graph.unary.len()).collect(), WORK)?;
        let mut costs = state.costs(&order);
        Some(variables.iter().map(|variable| std::mem::take(&mut costs[*variable])).collect())
    }

    /// The least cost with each choice of a variable, each found by itself but for that of the `best` assignment, if no
    /// other costs less.
    fn costs_of_restricted(&self, variable: usize, best: &Solution) -> Vec<f64> {
        let graph = dominate::reduce(self, &[variable]).graph;
        let mut kept: Vec<Vec<usize>> = graph.unary.iter().map(|costs| (0..costs.len()).collect()).collect();
        let with = |choice: usize| {
            if best.is_exact() && best.choices[variable] == choice {
                return best.cost;
            }
            kept[variable] = vec![choice];
            graph.restricted(&kept).solve().cost
        };
        (0..graph.unary[variable].len()).map(with).collect()
    }
}

/// Costs over a sorted list of variables, row-major.
struct Table<'a> {
    scope: Vec<usize>,
    costs: Cow<'a, [f64]>,
}

/// An eliminated variable: its best choice for each assignment of `scope`.
struct Step {
    variable: usize,
    scope: Vec<usize>,
    best: Vec<u32>,
}

struct Elimination<'a> {
    sizes: Vec<usize>,
    tables: Vec<Option<Table<'a>>>,
    /// Per variable, the tables that hold it, in the order in which they were made.
    holding: Vec<Vec<usize>>,
    /// Per variable, those that share a table with it, sorted.
    neighbours: Vec<Vec<usize>>,
    steps: Vec<Step>,
    /// What the variables cost that no other has anything to do with.
    constant: f64,
}

impl<'a> Elimination<'a> {
    fn new(graph: &'a CostGraph) -> Self {
        let count = graph.unary.len();
        let mut state = Self {
            sizes: graph.unary.iter().map(Vec::len).collect(),
            tables: Vec::new(),
            holding: vec![Vec::new(); count],
            neighbours: vec![Vec::new(); count],
            steps: Vec::new(),
            constant: 0.0,
        };
        for (variable, costs) in graph.unary.iter().enumerate() {
            state.add(Table { scope: vec![variable], costs: Cow::Borrowed(costs) });
        }
        for ((a, b), costs) in &graph.pairs {
            // What has no choice left is no neighbour.
            let scope = [*a, *b].into_iter().filter(|variable| state.sizes[*variable] != 1).collect();
            state.add(Table { scope, costs: Cow::Borrowed(costs) });
        }
        state
    }

    fn add(&mut self, table: Table<'a>) {
        if table.scope.is_empty() {
            self.constant += table.costs.first().copied().unwrap_or_default();
            return;
        }
        for variable in &table.scope {
            self.holding[*variable].push(self.tables.len());
            unite(&mut self.neighbours[*variable], table.scope.iter().filter(|other| *other != variable));
        }
        self.tables.push(Some(table));
    }

    /// The order in which variables are eliminated, always that with the smallest resulting table; nothing if all
    /// tables together would have more entries than this.
    fn order(&self, variables: Vec<usize>, most: usize) -> Option<Vec<usize>> {
        let mut neighbours = self.neighbours.clone();
        let weight = |neighbours: &[usize]| {
            neighbours.iter().fold(1, |size: usize, other| size.saturating_mul(self.sizes[*other]))
        };
        // Per variable the entries that its table would have; none where it is not asked for, or gone.
        let mut entries: Vec<Option<usize>> = vec![None; neighbours.len()];
        variables.iter().for_each(|id| entries[*id] = Some(weight(&neighbours[*id])));
        let mut queue: BTreeSet<(usize, usize)> =
            variables.into_iter().filter_map(|id| Some((entries[id]?, id))).collect();
        let (mut order, mut work) = (Vec::with_capacity(queue.len()), 0usize);
        while let Some((own, variable)) = queue.pop_first() {
            work = work.saturating_add(own.saturating_mul(self.sizes[variable]));
            if work > most {
                return None;
            }
            order.push(variable);
            entries[variable] = None;
            let around = std::mem::take(&mut neighbours[variable]);
            for id in &around {
                neighbours[*id].retain(|other| *other != variable);
                unite(&mut neighbours[*id], around.iter().filter(|other| *other != id));
                if let Some(before) = entries[*id] {
                    let after = weight(&neighbours[*id]);
                    if after != before {
                        queue.remove(&(before, *id));
                        queue.insert((after, *id));
                        entries[*id] = Some(after);
                    }
                }
            }
        }
        Some(order)
    }

    /// Eliminates the variables that have at most two neighbours, which is cheap; then the others, or solves what is
    /// left nearly if they are too many.
    fn run(mut self, graph: &CostGraph, work: usize) -> Solution {
        let mut open: BTreeSet<usize> = (0..self.sizes.len()).collect();
        let mut left = open.clone();
        while let Some(variable) = open.pop_first() {
            if self.neighbours[variable].len() <= 2 {
                open.extend(self.neighbours[variable].iter().copied());
                left.remove(&variable);
                self.eliminate(variable);
            }
        }
        let left: Vec<usize> = left.into_iter().collect();
        let mut choices = vec![0; self.sizes.len()];
        let mut bound = None;
        if let Some(order) = self.order(left.clone(), work) {
            order.into_iter().for_each(|variable| self.eliminate(variable));
        } else {
            let solved = relax::solve(&self.rest(&left));
            left.iter().zip(&solved.choices).for_each(|(variable, choice)| choices[*variable] = *choice);
            bound = Some(self.constant + solved.bound).filter(|_| !solved.is_exact());
        }
        let choices = self.decided(choices);
        let cost = graph.cost(&choices);
        Solution { cost, choices, bound: bound.map_or(cost, |bound| bound.min(cost)) }
    }

    /// The costs of the variables that are left, which no table has more than two of.
    fn rest(&self, left: &[usize]) -> CostGraph {
        let mut rest = CostGraph::default();
        left.iter().for_each(|variable| {
            rest.variable(vec![0.0; self.sizes[*variable]]);
        });
        let mut place = vec![usize::MAX; self.sizes.len()];
        left.iter().enumerate().for_each(|(index, variable)| place[*variable] = index);
        for Table { scope, costs } in self.tables.iter().flatten() {
            match scope[..] {
                [one] => rest.unary[place[one]].iter_mut().zip(costs.iter()).for_each(|(sum, cost)| *sum += cost),
                [a, b] => rest.add_pair(place[a], place[b], |row, column| costs[row * self.sizes[b] + column]),
                _ => unreachable!("eliminating variables with two neighbours makes tables of two"),
            }
        }
        rest
    }

    /// The choices of all variables, where those of the ones that were not eliminated are given.
    fn decided(&self, mut choices: Vec<usize>) -> Vec<usize> {
        for step in self.steps.iter().rev() {
            let index = step.scope.iter().fold(0, |index, id| index * self.sizes[*id] + choices[*id]);
            choices[step.variable] = step.best[index] as usize;
        }
        choices
    }

    /// Per choice of each variable, the least cost of an assignment that has it, but for what variables cost that have
    /// nothing to do with it: messages go along the eliminated variables, and back (Shenoy and Shafer, "Axioms for
    /// probability and belief-function propagation", 1990).
    fn costs(mut self, order: &[usize]) -> Vec<Vec<f64>> {
        let mut place = vec![0; self.sizes.len()];
        order.iter().enumerate().for_each(|(index, variable)| place[*variable] = index);
        let mut joined: Vec<Joined> = Vec::with_capacity(order.len());
        for variable in order {
            let (scope, sums) = self.join(*variable);
            let message: Vec<f64> = sums.chunks_exact(self.sizes[*variable]).map(least).collect();
            self.add(Table { scope: scope.clone(), costs: Cow::Owned(message.clone()) });
            joined.push(Joined { variable: *variable, scope, sums, message });
        }
        let mut costs = vec![Vec::new(); self.sizes.len()];
        // The last first.
        let mut whole: Vec<Joined> = Vec::with_capacity(order.len());
        while let Some(mut own) = joined.pop() {
            let choices = self.sizes[own.variable];
            // Who took the message in has all costs by now; less the message, they are those of all others.
            if let Some(parent) = own.scope.iter().map(|id| place[*id]).min() {
                let mut back = vec![f64::INFINITY; own.message.len()];
                let parent = &whole[order.len() - 1 - parent];
                parent.visit(&self.sizes, &own.scope, |cost, at| back[at] = back[at].min(cost));
                for ((row, all), told) in own.sums.chunks_exact_mut(choices).zip(back).zip(&own.message) {
                    let others = if *told < f64::INFINITY { all - told } else { 0.0 };
                    row.iter_mut().for_each(|cost| *cost += others);
                }
            }
            let of = |choice: usize| own.sums.iter().skip(choice).step_by(choices).copied();
            costs[own.variable] = (0..choices).map(|choice| of(choice).fold(f64::INFINITY, f64::min)).collect();
            whole.push(own);
        }
        costs
    }

    /// Takes the tables that hold a variable out.
    fn take(&mut self, variable: usize) -> Vec<Table<'a>> {
        let held = std::mem::take(&mut self.holding[variable]);
        let tables: Vec<Table<'a>> = held.iter().filter_map(|index| self.tables[*index].take()).collect();
        for table in &tables {
            for other in &table.scope {
                self.holding[*other].retain(|index| !held.contains(index));
            }
        }
        for other in std::mem::take(&mut self.neighbours[variable]) {
            self.neighbours[other].retain(|id| *id != variable);
        }
        tables
    }

    /// Takes a variable out. Gives its neighbours and, per assignment of them, the cost of each of its choices.
    fn join(&mut self, variable: usize) -> (Vec<usize>, Vec<f64>) {
        let scope = self.neighbours[variable].clone();
        let tables = self.take(variable);
        let sizes: Vec<usize> = scope.iter().map(|id| self.sizes[*id]).collect();
        let choices = self.sizes[variable];
        let mut sums = vec![0.0; sizes.iter().product::<usize>() * choices];
        for table in &tables {
            let stride = |id: usize| stride(&table.scope, &self.sizes, id);
            let strides: Vec<usize> = scope.iter().map(|id| stride(*id)).collect();
            let own = stride(variable);
            each(&sizes, &strides, |index, base| {
                let row = &mut sums[index * choices..(index + 1) * choices];
                row.iter_mut().enumerate().for_each(|(choice, sum)| *sum += table.costs[base + choice * own]);
            });
        }
        (scope, sums)
    }

    fn eliminate(&mut self, variable: usize) {
        let (scope, sums) = self.join(variable);
        let first = |least: (f64, u32), (choice, cost): (usize, &f64)| {
            if *cost < least.0 { (*cost, choice as u32) } else { least }
        };
        let least = |row: &[f64]| row.iter().enumerate().fold((f64::INFINITY, 0), first);
        let (costs, best): (Vec<f64>, Vec<u32>) = sums.chunks_exact(self.sizes[variable]).map(least).unzip();
        self.steps.push(Step { variable, scope: scope.clone(), best });
        self.add(Table { scope, costs: Cow::Owned(costs) });
    }
}

/// An eliminated variable: what it and its neighbours cost, row-major with the variable last, and what it told of that.
struct Joined {
    variable: usize,
    scope: Vec<usize>,
    sums: Vec<f64>,
    message: Vec<f64>,
}

impl Joined {
    /// Every cost, with the place of its assignment in a table of fewer variables.
    #[inline]
    fn visit(&self, sizes: &[usize], scope: &[usize], mut take: impl FnMut(f64, usize)) {
        let own: Vec<usize> = self.scope.iter().copied().chain([self.variable]).collect();
        let lengths: Vec<usize> = own.iter().map(|id| sizes[*id]).collect();
        let strides: Vec<usize> = own.iter().map(|id| stride(scope, sizes, *id)).collect();
        each(&lengths, &strides, |index, at| take(self.sums[index], at));
    }
}

/// Adds to a sorted list what it has not.
fn unite<'a>(list: &mut Vec<usize>, others: impl Iterator<Item = &'a usize>) {
    for other in others {
        if let Err(place) = list.binary_search(other) {
            list.insert(place, *other);
        }
    }
}

fn least(costs: &[f64]) -> f64 {
    costs.iter().copied().fold(f64::INFINITY, f64::min)
}

/// By how much the index into a row-major table grows with a variable; 0 where the table has it not.
fn stride(scope: &[usize], sizes: &[usize], id: usize) -> usize {
    let place = scope.iter().position(|other| *other == id);
    place.map_or(0, |place| scope[place + 1..].iter().map(|other| sizes[*other]).product())
}

/// Visits all assignments of variables of these sizes, in row-major order, each with its index in a table of these
/// strides.
#[inline]
fn each(sizes: &[usize], strides: &[usize], mut visit: impl FnMut(usize, usize)) {
    let (mut digits, mut base) = (vec![0; sizes.len()], 0);
    for index in 0..sizes.iter().product::<usize>() {
        visit(index, base);
        for place in (0..sizes.len()).rev() {
            (digits[place], base) = (digits[place] + 1, base + strides[place]);
            if digits[place] < sizes[place] {
                break;
            }
            (digits[place], base) = (0, base - strides[place] * sizes[place]);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn graphs() -> impl Strategy<Value = CostGraph> {
        let sizes = proptest::collection::vec(1usize..4, 1..7);
        sizes.prop_flat_map(|sizes| {
            let unary: Vec<_> = sizes.iter().map(|size| proptest::collection::vec(0u8..20, *size)).collect();
            let pairs = proptest::collection::vec(
                (0..sizes.len(), 0..sizes.len(), proptest::collection::vec(0u8..20, 9)),
                0..10,
            );
            (unary, pairs).prop_map(|(unary, pairs)| {
                let mut graph = CostGraph::default();
                for costs in unary {
                    graph.variable(costs.into_iter().map(f64::from).collect());
                }
                for (a, b, costs) in pairs {
                    // A few combinations are illegal, but never that of the first choices.
                    let cost = |i: usize, j: usize| match costs[i * 3 + j] {
                        19 if i + j > 0 => f64::INFINITY,
                        cost => f64::from(cost),
                    };
                    graph.add_pair(a, b, cost);
                }
                graph
            })
        })
    }

    /// Every assignment, with its cost.
    pub(crate) fn assignments(graph: &CostGraph) -> impl Iterator<Item = (Vec<usize>, f64)> {
        let count: usize = graph.unary.iter().map(Vec::len).product();
        (0..count).map(|mut index| {
            let digit = |costs: &Vec<f64>| {
                let choice = index % costs.len();
                index /= costs.len();
                choice
            };
            let choices: Vec<usize> = graph.unary.iter().map(digit).collect();
            let cost = graph.cost(&choices);
            (choices, cost)
        })
    }

    pub(crate) fn brute_force(graph: &CostGraph) -> f64 {
        assignments(graph).map(|(_, cost)| cost).fold(f64::INFINITY, f64::min)
    }

    /// The integer program: one 0-1 variable per choice and per pair of choices.
    pub(crate) fn integer_program(graph: &CostGraph) -> f64 {
        use microlp::{ComparisonOp, LinearExpr, OptimizationDirection, Problem};
        let mut problem = Problem::new(OptimizationDirection::Minimize);
        let node: Vec<Vec<_>> = graph
            .unary
            .iter()
            .map(|costs| costs.iter().map(|cost| problem.add_binary_var(cost.min(1e4))).collect())
            .collect();
        for choices in &node {
            let one: LinearExpr = choices.iter().map(|choice| (*choice, 1.0)).collect();
            problem.add_constraint(one, ComparisonOp::Eq, 1.0);
        }
        for ((a, b), table) in &graph.pairs {
            let columns = node[*b].len();
            let edge: Vec<_> = table.iter().map(|cost| problem.add_var(cost.min(1e4), (0.0, 1.0))).collect();
            for (row, choice) in node[*a].iter().enumerate() {
                let mut sum: LinearExpr = (0..columns).map(|column| (edge[row * columns + column], 1.0)).collect();
                sum.add(*choice, -1.0);
                problem.add_constraint(sum, ComparisonOp::Eq, 0.0);
            }
            for (column, choice) in node[*b].iter().enumerate() {
                let mut sum: LinearExpr = (0..node[*a].len()).map(|row| (edge[row * columns + column], 1.0)).collect();
                sum.add(*choice, -1.0);
                problem.add_constraint(sum, ComparisonOp::Eq, 0.0);
            }
        }
        problem.solve().unwrap().solution().unwrap().objective()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn elimination_finds_what_brute_force_and_the_integer_program_find(graph in graphs()) {
            let solution = graph.solve();
            prop_assert!(solution.is_exact());
            prop_assert_eq!(solution.cost, brute_force(&graph));
            prop_assert!((solution.cost - integer_program(&graph)).abs() < 1e-6);
        }

        #[test]
        fn what_a_choice_costs_is_what_the_best_assignment_with_it_costs_more(graph in graphs()) {
            let least = brute_force(&graph);
            let all = graph.costs_of(&(0..graph.unary.len()).collect::<Vec<_>>());
            for variable in 0..graph.unary.len() {
                let of = |choice: usize| {
                    let with = assignments(&graph).filter(|(choices, _)| choices[variable] == choice);
                    with.map(|(_, cost)| cost - least).fold(f64::INFINITY, f64::min)
                };
                let expected: Vec<f64> = (0..graph.unary[variable].len()).map(of).collect();
                prop_assert_eq!(&all[variable], &expected, "variable {}", variable);
                prop_assert_eq!(&graph.costs_of(&[variable])[0], &expected, "variable {}", variable);
                let with: Vec<f64> = expected.iter().map(|cost| cost + least).collect();
                prop_assert_eq!(&graph.costs_of_restricted(variable, &graph.solve()), &with, "variable {}", variable);
            }
        }
    }
}
