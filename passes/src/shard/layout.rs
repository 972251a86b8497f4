//! Layouts along one axis, and what moving between them costs.

use crate::cluster::Cluster;
use crate::cost::Machine;
use crate::cost::collective::{self, Collective, Group};
use shardc_ir::factor::Dims;
use shardc_ir::{AxisId, Choice, FactorKind, FactorRule, ReduceKind, Sharding};

/// How a value lies along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Along {
    /// Every coordinate holds all of it.
    Whole,
    /// This dimension is divided.
    Dim(usize),
    /// Every coordinate holds a term.
    Partial(ReduceKind),
}

impl Along {
    /// How a value of this sharding lies along an axis.
    pub fn of(sharding: &Sharding, axis: AxisId) -> Self {
        match (sharding.partial_over(axis), sharding.dim_of(axis)) {
            (Some(kind), _) => Self::Partial(kind),
            (None, Some(dim)) => Self::Dim(dim),
            (None, None) => Self::Whole,
        }
    }

    /// Whether parts become the whole in another layout.
    pub fn is_gathered_in(self, other: Self) -> bool {
        matches!((self, other), (Self::Dim(_), Self::Whole))
    }

    /// How operands and results of a rule lie along an axis with which the node does this.
    pub fn of_rule(rule: &FactorRule, choice: Choice) -> Ends {
        let is_divided = |of: &usize| match choice {
            // A ring divides the factor beside it as well.
            Choice::Factor(own) => *of == own || rule.factors[own].kind == FactorKind::Ring { beside: *of },
            _ => false,
        };
        let dim = |dims: &Dims| dims.iter().position(|factors| factors.iter().any(is_divided));
        let divided = |dims: &Dims| dim(dims).map_or(Self::Whole, Self::Dim);
        let mut operands: Vec<Self> = rule.operands.iter().map(divided).collect();
        let mut results: Vec<Self> = rule.results.iter().map(divided).collect();
        match choice {
            Choice::Replicate => {}
            Choice::Factor(factor) => {
                let reduced = rule.factors[factor].reduce.iter();
                reduced.for_each(|(result, kind)| results[*result] = Self::Partial(*kind));
            }
            Choice::Pass(set) => {
                let passed = rule.linear.get(set).into_iter().flatten();
                passed.for_each(|operand| operands[*operand] = Self::Partial(ReduceKind::Sum));
                results.fill(Self::Partial(ReduceKind::Sum));
            }
        }
        (operands, results)
    }
}

/// How the operands and the results of a rule lie along an axis.
type Ends = (Vec<Along>, Vec<Along>);

/// The same for everything that a node may do with the axis.
#[derive(Clone, Debug)]
pub struct Lies {
    whole: Ends,
    divided: Vec<Ends>,
    passed: Vec<Ends>,
}

impl Lies {
    /// Those of a rule.
    pub fn of(rule: &FactorRule) -> Self {
        let of = |choice: Choice| Along::of_rule(rule, choice);
        let divided = (0..rule.factors.len()).map(|factor| of(Choice::Factor(factor))).collect();
        let passed = (0..rule.linear.len()).map(|set| of(Choice::Pass(set))).collect();
        Self { whole: of(Choice::Replicate), divided, passed }
    }

    /// Where the node does this with the axis.
    pub fn with(&self, choice: Choice) -> &Ends {
        match choice {
            Choice::Replicate => &self.whole,
            Choice::Factor(factor) => &self.divided[factor],
            Choice::Pass(set) => &self.passed[set],
        }
    }
}

/// A value as the ranks of one coordinate of the other axes see it.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// Its bytes, undivided along the axis.
    pub bytes: f64,
    /// Its shape, undivided along the axis.
    pub shape: &'a [u64],
}

/// The seconds of a change of layout.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Turn {
    /// Of kernels that bring into order what goes over the wire.
    pub before: f64,
    /// Of the wire.
    pub wire: f64,
    /// Of kernels that bring into order what the wire brings, or do it all.
    pub after: f64,
}

impl Turn {
    /// All of them.
    pub fn seconds(self) -> f64 {
        self.before + self.wire + self.after
    }

    /// With another change behind it. What kernels do between two collectives counts as done behind both.
    pub fn then(self, next: Self) -> Self {
        match self.wire > 0.0 {
            true => {
                let after = self.after + next.before + next.after;
                Self { before: self.before, wire: self.wire + next.wire, after }
            }
            false if next.wire > 0.0 => Self { before: self.seconds() + next.before, ..next },
            false => Self { after: self.seconds() + next.seconds(), ..Self::default() },
        }
    }
}

/// What it takes to bring a value from one layout along an axis to another; infinite where there is no way.
pub fn convert(from: Along, to: Along, value: Extent<'_>, group: Group, cluster: &Cluster) -> Turn {
    use Along::{Dim, Partial, Whole};
    let device = &cluster.device;
    let machine = Machine::own(device);
    let copy = |bytes: f64| machine.launch() + 2.0 * bytes / machine.bandwidth();
    // A collective concatenates whole operands: along an inner dimension a transpose goes with it.
    let reorder = |dim: usize, bytes: f64| {
        let outer: u64 = value.shape[..dim].iter().product();
        if outer > 1 { copy(bytes) } else { 0.0 }
    };
    let run = |kind: Collective| collective::seconds(kind, value.bytes, group, cluster).0;
    let wire = |wire: f64| Turn { wire, ..Turn::default() };
    let kernel = |after: f64| Turn { after, ..Turn::default() };
    match (from, to) {
        _ if from == to => Turn::default(),
        // One coordinate keeps the value, the others hold zeros.
        (Whole, Partial(ReduceKind::Sum)) => kernel(copy(value.bytes)),
        (_, Partial(_)) => wire(f64::INFINITY),
        (Whole, Dim(dim)) => {
            let outer: u64 = value.shape[..dim].iter().product();
            let part = value.bytes / group.size() as f64;
            // Every rank another part: no view, since buffers have the same addresses on all of them. Those that lie in
            // one piece, of parameters above all, are copied many in a launch.
            kernel(if outer > 1 { copy(part) } else { 2.0 * part / machine.bandwidth() })
        }
        (Whole, Whole) => Turn::default(),
        (Dim(dim), Whole) => Turn { after: reorder(dim, value.bytes), ..wire(run(Collective::AllGather)) },
        (Dim(a), Dim(b)) => {
            let part = value.bytes / group.size() as f64;
            Turn { before: reorder(b, part), wire: run(Collective::AllToAll), after: reorder(a, part) }
        }
        (Partial(_), Whole) => wire(run(Collective::AllReduce)),
        (Partial(ReduceKind::Sum), Dim(dim)) => {
            Turn { before: reorder(dim, value.bytes), ..wire(run(Collective::ReduceScatter)) }
        }
        (Partial(_), Dim(_)) => wire(run(Collective::AllReduce)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::Degrees;
    use crate::search_tests::{SMALL, llama};
    use shardc_ir::{DType, Family, Strategy};

    /// What a choice does along its axis is what shardings say, whatever other axes do.
    #[test]
    fn layouts_along_an_axis_are_those_of_shardings() {
        let graph = llama(SMALL, DType::Bf16);
        let mesh = Degrees::new(8).with(Family::Data, &[2]).with(Family::Tensor, &[2, 2]).mesh(16);
        let axes: Vec<AxisId> = mesh.ids().collect();
        let mut seen = 0;
        for (id, _) in graph.nodes() {
            let rule = graph.rule(id);
            let choices = (0..rule.factors.len()).map(Choice::Factor).chain((0..rule.linear.len()).map(Choice::Pass));
            let choices: Vec<Choice> = [Choice::Replicate].into_iter().chain(choices).collect();
            for (own, other) in choices.iter().flat_map(|own| choices.iter().map(move |other| (*own, *other))) {
                let strategy = Strategy::default().with(axes[0], other).with(axes[1], own);
                let operands = (0..rule.operands.len()).map(|index| rule.operand_sharding(index, &strategy));
                let results = (0..rule.results.len()).map(|index| rule.result_sharding(index, &strategy));
                let along = |sharding: Sharding| Along::of(&sharding, axes[1]);
                assert_eq!(Along::of_rule(rule, own), (operands.map(along).collect(), results.map(along).collect()));
                seen += 1;
            }
        }
        assert!(seen > 1000, "{seen}");
    }
}
