//! Nearly the least of a pairwise cost graph that is too large to eliminate, and a bound below it.
//!
//! Costs are moved between variables and pairs, so that no assignment costs another sum and what each of them costs at
//! least adds up to as much as possible: sequential tree-reweighted message passing (TRW-S; Kolmogorov, "Convergent
//! tree-reweighted message passing for energy minimization", 2006). That sum is a bound below the cost of every
//! assignment. Good assignments follow the messages; a choice that, with all that the rest costs at least, costs more
//! than the best of them is in no better one. Without such choices the graph is smaller, and as a rule can be
//! eliminated, which makes the result exact.

use super::eliminate::{CostGraph, Solution};
use std::collections::VecDeque;
use std::ops::Range;

/// How often messages go to and fro at the most.
const MOST_ROUNDS: usize = 120;

/// After so many rounds it is seen whether the bound still moves: by this share of what is missing.
const SEEN_AFTER: usize = 10;
const MOVES: f64 = 0.02;

/// Which share of what there is to choose has to go for the rest to be solved anew.
const WORTH: f64 = 0.05;

/// What rounding may add to a cost, as a share of it.
const ROUNDING: f64 = 1e-12;

/// An assignment of small cost, and a bound.
pub fn solve(graph: &CostGraph) -> Solution {
    let mut passing = Passing::new(graph);
    let mut best = Solution { choices: Vec::new(), cost: f64::INFINITY, bound: f64::NEG_INFINITY };
    let (mut seen, mut bound) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
    for round in 1..=MOST_ROUNDS {
        bound = bound.max(passing.pass(false, 0.0));
        bound = bound.max(passing.pass(true, 0.0));
        if round % SEEN_AFTER == 0 || round == MOST_ROUNDS {
            let choices = settled(graph, passing.choices(graph), &passing.around);
            let cost = graph.cost(&choices);
            if cost < best.cost || best.choices.is_empty() {
                (best.choices, best.cost) = (choices, cost);
            }
            // While nothing legal is known, messages may still tell what has no legal neighbour.
            if is_closed(best.cost, bound) || (best.cost.is_finite() && bound - seen <= MOVES * (best.cost - bound)) {
                break;
            }
            seen = bound;
        }
    }
    if is_closed(best.cost, bound) {
        best.bound = best.cost;
        return best;
    }
    best.bound = bound.min(best.cost);
    better(graph, passing, best)
}

/// Whether a bound is all but the cost of a legal assignment.
fn is_closed(cost: f64, bound: f64) -> bool {
    cost.is_finite() && cost - bound <= ROUNDING * cost.abs()
}

/// The same, if it can be told which choices no better assignment has.
fn better(graph: &CostGraph, mut passing: Passing, best: Solution) -> Solution {
    let mut kept: Vec<Vec<usize>> = graph.unary.iter().map(|costs| (0..costs.len()).collect()).collect();
    let all: usize = kept.iter().map(|kept| kept.len() - 1).sum();
    for is_back in [false, true] {
        let bound = passing.pass(is_back, 1.0);
        let most = best.cost - bound + 1e-9 * best.cost.abs();
        for Place { variable, costs, .. } in &passing.places {
            kept[*variable].retain(|choice| passing.reduced[costs.start + choice] <= most);
        }
    }
    let left: usize = kept.iter().map(|kept| kept.len().saturating_sub(1)).sum();
    let is_empty = kept.iter().any(Vec::is_empty);
    if is_empty || all - left < ((all as f64 * WORTH) as usize).max(1) {
        return best;
    }
    let mut rest = graph.restricted(&kept).solve();
    rest.choices.iter_mut().zip(&kept).for_each(|(choice, kept)| *choice = kept[*choice]);
    // What was left out costs more than the best.
    let bound = rest.bound.min(best.cost).max(best.bound);
    let (choices, cost) = if rest.cost < best.cost { (rest.choices, rest.cost) } else { (best.choices, best.cost) };
    Solution { choices, cost, bound: bound.min(cost) }
}

/// Changes one variable after the other to what costs the least with the others as they are. One of whose neighbours none
/// has changed since it was looked at stays as it is.
fn settled(graph: &CostGraph, mut choices: Vec<usize>, around: &[Vec<usize>]) -> Vec<usize> {
    let tables: Vec<_> = graph.pairs.iter().collect();
    let mut is_open = vec![true; choices.len()];
    for _ in 0..MOST_ROUNDS {
        let mut is_settled = true;
        for (variable, around) in around.iter().enumerate() {
            if !std::mem::take(&mut is_open[variable]) {
                continue;
            }
            let cost = |choice: usize| {
                let pairs = around.iter().map(|pair| {
                    let ((a, b), table) = tables[*pair];
                    let columns = graph.unary[*b].len();
                    let of = |end: usize| if end == variable { choice } else { choices[end] };
                    table[of(*a) * columns + of(*b)]
                });
                graph.unary[variable][choice] + pairs.sum::<f64>()
            };
            let least = |best: (usize, f64), choice: usize| {
                let own = cost(choice);
                if own < best.1 { (choice, own) } else { best }
            };
            let now = choices[variable];
            let found = (0..graph.unary[variable].len()).fold((now, cost(now) * (1.0 - ROUNDING)), least).0;
            if found != now {
                is_settled = false;
                choices[variable] = found;
                for ((a, b), _) in around.iter().map(|pair| tables[*pair]) {
                    is_open[if *a == variable { *b } else { *a }] = true;
                }
            }
        }
        if is_settled {
            break;
        }
    }
    choices
}

/// A variable, in the order in which messages go.
struct Place {
    variable: usize,
    /// Where its costs are among those of all variables.
    costs: Range<usize>,
    /// Where the messages to it are, from those before it and from those behind.
    messages: Range<usize>,
    /// Where what it sends is among all that is sent along the order, and among all that is sent back.
    sends: [Range<usize>; 2],
}

/// A message from a variable to a neighbour.
struct Sent {
    /// The place of the neighbour, and the number of its choices.
    other: usize,
    columns: usize,
    /// Where the costs of the pair begin among those of its direction: row-major of the sender's choices.
    costs: usize,
    /// Where the message is, and the neighbour's to the sender.
    to: usize,
    back: usize,
}

/// Messages on a cost graph. All lies in the order in which it is read: graphs are larger than caches.
struct Passing {
    places: Vec<Place>,
    /// The costs of the variables; none is infinite.
    unary: Vec<f64>,
    /// Reduced costs: per variable and choice, by how much an assignment with it costs more at least than the bound of
    /// the latest pass.
    reduced: Vec<f64>,
    /// What is sent along the order, and back, with the costs of the pairs; none is infinite.
    sends: [Vec<Sent>; 2],
    costs: [Vec<f64>; 2],
    messages: Vec<f64>,
    /// Per variable, its pairs: those with variables before it first.
    around: Vec<Vec<usize>>,
    /// What an end hands over, while it does.
    given: Vec<f64>,
}

impl Passing {
    fn new(graph: &CostGraph) -> Self {
        let finite = |costs: &Vec<f64>| costs.iter().copied().filter(|cost| cost.is_finite()).fold(0.0, f64::max);
        // What is illegal costs more than the dearest legal assignment.
        let huge = 1.0 + 2.0 * graph.unary.iter().chain(graph.pairs.values()).map(finite).sum::<f64>();
        let pairs: Vec<_> = graph.pairs.iter().map(|((a, b), table)| ([*a, *b], table)).collect();
        let order = breadth_first(graph.unary.len(), pairs.iter().map(|(ends, _)| *ends));
        let mut rank = vec![0; order.len()];
        order.iter().enumerate().for_each(|(index, variable)| rank[*variable] = index);
        // Per variable its pairs, and which end of them it is: with those before it, and with those behind.
        let mut around = vec![[Vec::new(), Vec::new()]; order.len()];
        for (index, (ends, _)) in pairs.iter().enumerate() {
            for (end, variable) in ends.iter().enumerate() {
                let is_later = rank[ends[1 - end]] > rank[*variable];
                around[*variable][usize::from(is_later)].push((index, end));
            }
        }
        let (mut unary, mut all, mut places) = (Vec::new(), 0, Vec::with_capacity(order.len()));
        // Per pair and end, where the message to it is.
        let mut messages = vec![[0; 2]; pairs.len()];
        for variable in order.iter().copied() {
            let (from, first, size) = (unary.len(), all, graph.unary[variable].len());
            unary.extend(graph.unary[variable].iter().map(|cost| cost.min(huge)));
            for (pair, end) in around[variable].iter().flatten() {
                messages[*pair][*end] = all;
                all += size;
            }
            let sends = [0..0, 0..0];
            places.push(Place { variable, costs: from..unary.len(), messages: first..all, sends });
        }
        let entries = pairs.iter().map(|(_, table)| table.len()).sum();
        let mut sends = [(); 2].map(|()| Vec::with_capacity(pairs.len()));
        let mut costs = [(); 2].map(|()| Vec::with_capacity(entries));
        for is_back in [false, true] {
            let (sends, costs) = (&mut sends[usize::from(is_back)], &mut costs[usize::from(is_back)]);
            for place in directed(order.len(), is_back) {
                let first = sends.len();
                for (pair, end) in &around[order[place]][usize::from(!is_back)] {
                    let (ends, table) = pairs[*pair];
                    let [rows, columns] = [ends[*end], ends[1 - end]].map(|end| graph.unary[end].len());
                    let [own, others] = if *end == 0 { [columns, 1] } else { [1, rows] };
                    let [back, to] = [messages[*pair][*end], messages[*pair][1 - end]];
                    sends.push(Sent { other: rank[ends[1 - end]], columns, costs: costs.len(), to, back });
                    for row in 0..rows {
                        costs.extend((0..columns).map(|column| table[row * own + column * others].min(huge)));
                    }
                }
                places[place].sends[usize::from(is_back)] = first..sends.len();
            }
        }
        let pairs = |around: [Vec<(usize, usize)>; 2]| around.into_iter().flatten().map(|(pair, _)| pair).collect();
        let (around, reduced) = (around.into_iter().map(pairs).collect(), unary.clone());
        Self { places, unary, reduced, sends, costs, messages: vec![0.0; all], around, given: Vec::new() }
    }

    /// Sends a message over every pair, along the order or back; gives a bound. Each variable hands what its choices
    /// cost beyond the least of them to the pairs in equal parts, of which it keeps so many at least.
    fn pass(&mut self, is_back: bool, keeps: f64) -> f64 {
        let Self { places, unary, reduced, messages, given, .. } = self;
        let (sends, costs) = (&self.sends[usize::from(is_back)], &self.costs[usize::from(is_back)]);
        let mut bound = 0.0;
        for place in directed(places.len(), is_back).map(|place| &places[place]) {
            // What its choices cost with the messages to it.
            let belief = &mut reduced[place.costs.clone()];
            let own = &unary[place.costs.clone()];
            let mut others = messages[place.messages.clone()].chunks_exact(own.len().max(1));
            match others.next() {
                // No call for the few numbers of most variables.
                Some(first) => {
                    let sums = own.iter().zip(first).map(|(cost, message)| cost + message);
                    belief.iter_mut().zip(sums).for_each(|(belief, sum)| *belief = sum);
                }
                None => belief.copy_from_slice(own),
            }
            for message in others {
                belief.iter_mut().zip(message).for_each(|(sum, message)| *sum += message);
            }
            let least = belief.iter().copied().fold(f64::INFINITY, lesser);
            bound += least;
            belief.iter_mut().for_each(|cost| *cost -= least);
            let [later, earlier] = &place.sends;
            let to = &sends[place.sends[usize::from(is_back)].clone()];
            let parts =
                if keeps > 0.0 { to.len() as f64 + keeps } else { earlier.len().max(later.len()).max(1) as f64 };
            for sent in to {
                bound += sent.send(belief, 1.0 / parts, (costs, messages), given);
            }
            let kept = 1.0 - to.len() as f64 / parts;
            belief.iter_mut().for_each(|cost| *cost *= kept);
        }
        bound
    }

    /// Choices along the order: each the least with those before it, and with the messages of those behind.
    fn choices(&self, graph: &CostGraph) -> Vec<usize> {
        let mut choices = vec![0; self.places.len()];
        for Place { variable, sends: [later, earlier], .. } in &self.places {
            let mut costs = graph.unary[*variable].clone();
            for sent in &self.sends[0][later.clone()] {
                costs.iter_mut().zip(&self.messages[sent.back..]).for_each(|(sum, message)| *sum += message);
            }
            for sent in &self.sends[1][earlier.clone()] {
                let other = choices[self.places[sent.other].variable];
                let own = self.costs[1][sent.costs + other..].iter().step_by(sent.columns);
                costs.iter_mut().zip(own).for_each(|(sum, cost)| *sum += cost);
            }
            let least = |best: usize, choice: usize| if costs[choice] < costs[best] { choice } else { best };
            choices[*variable] = (0..costs.len()).fold(0, least);
        }
        choices
    }
}

/// All places, along the order or back.
fn directed(count: usize, is_back: bool) -> impl Iterator<Item = usize> {
    (0..count).map(move |place| if is_back { count - 1 - place } else { place })
}

impl Sent {
    /// Sends the message, for which a part of a belief is handed over; gives what is taken off it.
    fn send(&self, belief: &[f64], part: f64, (costs, messages): (&[f64], &mut [f64]), given: &mut Vec<f64>) -> f64 {
        given.clear();
        given.extend(belief.iter().zip(&messages[self.back..]).map(|(cost, back)| part * cost - back));
        let costs = &costs[self.costs..self.costs + given.len() * self.columns];
        let sent = &mut messages[self.to..self.to + self.columns];
        // Sums of a known number stay in registers.
        match self.columns {
            1 => least_sums::<1>(given, costs, sent),
            2 => least_sums::<2>(given, costs, sent),
            3 => least_sums::<3>(given, costs, sent),
            4 => least_sums::<4>(given, costs, sent),
            5 => least_sums::<5>(given, costs, sent),
            6 => least_sums::<6>(given, costs, sent),
            7 => least_sums::<7>(given, costs, sent),
            8 => least_sums::<8>(given, costs, sent),
            columns => {
                sent.fill(f64::INFINITY);
                for (row, given) in costs.chunks_exact(columns.max(1)).zip(given.iter()) {
                    sent.iter_mut().zip(row).for_each(|(least, cost)| *least = lesser(*least, given + cost));
                }
            }
        }
        let least = sent.iter().copied().fold(f64::INFINITY, lesser);
        sent.iter_mut().for_each(|cost| *cost -= least);
        least
    }
}

/// Per column of a table of `N`, the least sum of a cost with what is given for its row.
fn least_sums<const N: usize>(given: &[f64], costs: &[f64], least: &mut [f64]) {
    let mut sums = [f64::INFINITY; N];
    for (row, given) in costs.as_chunks::<N>().0.iter().zip(given) {
        sums.iter_mut().zip(row).for_each(|(least, cost)| *least = lesser(*least, given + cost));
    }
    least.copy_from_slice(&sums);
}

/// The lesser of two numbers, neither of which is none: one instruction, unlike [`f64::min`].
fn lesser(a: f64, b: f64) -> f64 {
    if b < a { b } else { a }
}

/// The variables so that neighbours are near each other.
fn breadth_first(count: usize, pairs: impl Iterator<Item = [usize; 2]>) -> Vec<usize> {
    let mut neighbours = vec![Vec::new(); count];
    for [a, b] in pairs {
        neighbours[a].push(b);
        neighbours[b].push(a);
    }
    let (mut order, mut is_known) = (Vec::with_capacity(count), vec![false; count]);
    for first in 0..count {
        let mut open = VecDeque::from([first]);
        while let Some(variable) = open.pop_front() {
            if !std::mem::replace(&mut is_known[variable], true) {
                order.push(variable);
                open.extend(neighbours[variable].iter().copied().filter(|other| !is_known[*other]));
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::super::eliminate::tests::{assignments, brute_force, graphs};
    use super::*;
    use proptest::prelude::*;

    /// Graphs of which a third of all combinations are illegal, but not those of some choices.
    fn narrow_graphs() -> impl Strategy<Value = CostGraph> {
        let variables = proptest::collection::vec((2usize..4, any::<usize>()), 3..7);
        let pairs = proptest::collection::vec((0usize..7, 0usize..7, proptest::collection::vec(0u8..30, 9)), 4..16);
        (variables, pairs).prop_map(|(variables, pairs)| {
            let mut graph = CostGraph::default();
            let legal: Vec<usize> = variables.iter().map(|(size, choice)| choice % size).collect();
            for (index, (size, _)) in variables.iter().enumerate() {
                graph.variable((0..*size).map(|choice| ((3 * index + 5 * choice) % 7) as f64).collect());
            }
            for (a, b, costs) in pairs {
                let (a, b) = (a % variables.len(), b % variables.len());
                let cost = |i: usize, j: usize| match costs[i * 3 + j] {
                    cost @ 20.. if (i, j) == (legal[a], legal[b]) => f64::from(cost),
                    20.. => f64::INFINITY,
                    cost => f64::from(cost),
                };
                graph.add_pair(a, b, cost);
            }
            graph
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn the_least_lies_between_the_bound_and_the_cost(graph in prop_oneof![graphs(), narrow_graphs()]) {
            let (least, found) = (brute_force(&graph), solve(&graph));
            prop_assert_eq!(found.cost, graph.cost(&found.choices));
            prop_assert!(found.bound <= least * (1.0 + 1e-9) && least <= found.cost, "{found:?} for {least}");
            prop_assert!(!found.is_exact() || found.cost == least);
        }

        /// Where only a part is eliminated, as where it all is.
        #[test]
        fn what_is_left_is_solved_as_the_whole(graph in prop_oneof![graphs(), narrow_graphs()]) {
            let (least, found) = (brute_force(&graph), graph.solve_within(0));
            prop_assert_eq!(found.cost, graph.cost(&found.choices));
            prop_assert!(found.bound <= least * (1.0 + 1e-9) && least <= found.cost, "{found:?} for {least}");
            prop_assert!(!found.is_exact() || found.cost == least);
        }

        /// What a choice is said to cost more than the bound is no more than it does.
        #[test]
        fn no_choice_of_the_best_assignment_is_left_out(graph in prop_oneof![graphs(), narrow_graphs()], rounds in 0usize..4) {
            let mut passing = Passing::new(&graph);
            (0..rounds).for_each(|round| { passing.pass(round % 2 == 1, 0.0); });
            for is_back in [false, true] {
                let bound = passing.pass(is_back, 1.0);
                for (choices, cost) in assignments(&graph) {
                    let more: f64 = passing.places.iter().map(|at| passing.reduced[at.costs.start + choices[at.variable]]).sum();
                    prop_assert!(bound + more <= cost * (1.0 + 1e-9), "{bound} and {more} for {cost}");
                }
            }
        }
    }

    /// A torus of random costs, whose tables would be far too many.
    #[test]
    fn what_is_too_large_to_eliminate_is_bounded_closely() {
        const SIDE: usize = 24;
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / (1u64 << 24) as f64
        };
        let mut graph = CostGraph::default();
        for _ in 0..SIDE * SIDE {
            graph.variable((0..3).map(|_| random()).collect());
        }
        for (row, column) in (0..SIDE).flat_map(|row| (0..SIDE).map(move |column| (row, column))) {
            for other in [(row, (column + 1) % SIDE), ((row + 1) % SIDE, column)] {
                let costs: Vec<f64> = (0..9).map(|_| 0.2 * random()).collect();
                graph.add_pair(row * SIDE + column, other.0 * SIDE + other.1, |a, b| costs[a * 3 + b]);
            }
        }
        let found = graph.solve();
        assert_eq!(found.cost, graph.cost(&found.choices));
        assert!(found.bound <= found.cost && found.cost <= 1.01 * found.bound, "{} and {}", found.bound, found.cost);
        assert_eq!(graph.solve(), found);
    }
}
