//! Smaller domains: a choice goes if another of the same variable never costs more.
//!
//! Choice `b` of a variable dominates choice `a` if, whatever the neighbours choose, an assignment
//! with `a` gets no more expensive by taking `b` instead: the difference of the costs on the variable
//! itself plus, for every pair, the largest difference over the neighbour's choices is not positive
//! (Goldstein, "Efficient rotamer elimination applied to protein side-chains and related spin
//! glasses", 1994). What goes makes the domains that neighbours are compared over smaller, so this is
//! repeated until nothing goes. The least cost stays, and of equal choices the first.

use super::eliminate::CostGraph;
use std::collections::BTreeSet;

/// A cost graph without dominated choices.
#[derive(Clone, Debug)]
pub struct Reduced {
    /// What is left.
    pub graph: CostGraph,
    /// Per variable, the choices that are left, by their index in the whole domain.
    pub kept: Vec<Vec<usize>>,
}

/// One pair of a variable: its neighbour, and the costs as `[own choice][neighbour's choice]` strides.
struct Pair<'a> {
    other: usize,
    table: &'a [f64],
    own: usize,
    others: usize,
}

/// Takes out what is dominated; the choices of the variables in `whole` all stay.
pub fn reduce(graph: &CostGraph, whole: &[usize]) -> Reduced {
    let mut pairs: Vec<Vec<Pair<'_>>> = graph.unary.iter().map(|_| Vec::new()).collect();
    for ((a, b), table) in &graph.pairs {
        let columns = graph.unary[*b].len();
        pairs[*a].push(Pair { other: *b, table, own: columns, others: 1 });
        pairs[*b].push(Pair { other: *a, table, own: 1, others: columns });
    }
    let mut kept: Vec<Vec<usize>> = graph.unary.iter().map(|costs| (0..costs.len()).collect()).collect();
    let mut open: BTreeSet<usize> = (0..graph.unary.len()).filter(|variable| !whole.contains(variable)).collect();
    while let Some(variable) = open.pop_first() {
        let before = kept[variable].len();
        for choice in kept[variable].clone() {
            let is_dominated = |other: &usize| {
                *other != choice && dominates(graph, &pairs[variable], &kept, variable, (*other, choice))
            };
            if kept[variable].iter().any(is_dominated) {
                kept[variable].retain(|left| *left != choice);
            }
        }
        if kept[variable].len() < before {
            open.extend(pairs[variable].iter().map(|pair| pair.other).filter(|other| !whole.contains(other)));
        }
    }
    Reduced { graph: graph.restricted(&kept), kept }
}

/// Whether the first choice never costs more than the second.
fn dominates(
    graph: &CostGraph,
    pairs: &[Pair<'_>],
    kept: &[Vec<usize>],
    variable: usize,
    (better, worse): (usize, usize),
) -> bool {
    let more = |better: f64, worse: f64| if worse == f64::INFINITY { f64::NEG_INFINITY } else { better - worse };
    let mut sum = more(graph.unary[variable][better], graph.unary[variable][worse]);
    for pair in pairs {
        let [better, worse] = [better, worse].map(|choice| &pair.table[choice * pair.own..]);
        let most = kept[pair.other].iter().map(|other| more(better[other * pair.others], worse[other * pair.others]));
        let most = most.fold(f64::NEG_INFINITY, |most, more| if more > most { more } else { most });
        // A combination that the second choice alone allows outweighs any that it alone forbids.
        if most == f64::INFINITY {
            return false;
        }
        sum += most;
    }
    if better < worse { sum <= 0.0 } else { sum < 0.0 }
}
