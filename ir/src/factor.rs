//! Factor rules: an operation in index notation.
//!
//! A matmul is `(b,m,k),(b,k,n)->(b,m,n)|sum k`; a reshape that joins two dimensions is
//! `(i,j,k)->((i j),k)`. A factor may be divided over mesh axes; then every dimension that holds it
//! is divided the same way, and a result that lacks it is left as a partial value. All of shardc's
//! sharding follows from these rules: legal strategies, layouts, validity, resharding, cost.
//!
//! The idea is Shardy's (`docs/propagation.md`, "sharding rule"); partial sums, linear sets and
//! reductions other than sums are added.

use crate::entity::FactorId;
use crate::mesh::{AxisId, Mesh};
use crate::sharding::{Choice, ReduceKind, Sharding, Strategy, may_cut};
use std::borrow::Cow;
use std::fmt;

/// Whether a factor may be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FactorKind {
    /// It may be divided over any axes whose extent divides its size.
    Parallel,
    /// Every coordinate needs all of it.
    Whole,
    /// It may be divided together with the factor `beside`, over the same axes: each coordinate has its
    /// part of both, and the parts of this one go round the ring of the coordinates while the node runs,
    /// so that its results are whole in it. Such a node communicates by itself.
    Ring {
        /// The factor that is divided with it.
        beside: usize,
    },
}

/// One index of the notation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Factor {
    /// The name, unique in the rule: `b`, `m`, `vocab`.
    pub name: String,
    /// How many values the index takes.
    pub size: u64,
    /// Whether it may be divided.
    pub kind: FactorKind,
    /// For each result that lacks the factor (by result index), how the terms combine.
    pub reduce: Vec<(usize, ReduceKind)>,
}

/// The factors of each dimension of one operand or result, outermost first.
pub type Dims = Vec<Vec<usize>>;

/// The rule of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FactorRule {
    /// The factors; everything else refers to them by index.
    pub factors: Vec<Factor>,
    /// Per operand, per dimension, its factors. A dimension of size 1 may have none.
    pub operands: Vec<Dims>,
    /// Per result, per dimension, its factors.
    pub results: Vec<Dims>,
    /// Sets of operands in which the operation is jointly linear: if all of one set are partial
    /// sums over an axis and the rest are whole, the results are partial sums over it.
    pub linear: Vec<Vec<usize>>,
    /// Whether zeros behind the end of the operands' parts do no harm, and there are zeros behind that of the results':
    /// then the innermost axis of a factor may divide it unevenly ([`cuts`](crate::sharding::cuts)).
    pub fills: bool,
}

impl FactorRule {
    /// Adds a factor that may be divided.
    pub fn parallel(&mut self, name: impl Into<String>, size: u64) -> usize {
        self.push(name.into(), size, FactorKind::Parallel)
    }

    /// Adds a factor that every coordinate needs whole.
    pub fn whole(&mut self, name: impl Into<String>, size: u64) -> usize {
        self.push(name.into(), size, FactorKind::Whole)
    }

    /// Adds a factor that may be divided and that result `result` reduces.
    pub fn reduced(&mut self, name: impl Into<String>, size: u64, result: usize, kind: ReduceKind) -> usize {
        let factor = self.push(name.into(), size, FactorKind::Parallel);
        self.factors[factor].reduce.push((result, kind));
        factor
    }

    /// Adds a factor that may be divided if the node passes its parts round a ring; see [`FactorKind::Ring`].
    pub fn ring(&mut self, name: impl Into<String>, size: u64, beside: usize) -> usize {
        self.push(name.into(), size, FactorKind::Ring { beside })
    }

    fn push(&mut self, name: String, size: u64, kind: FactorKind) -> usize {
        self.factors.push(Factor { name, size, kind, reduce: Vec::new() });
        self.factors.len() - 1
    }

    /// The factor of a name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.factors.iter().position(|factor| factor.name == name)
    }

    /// The axes that divide a factor, outermost first: those of rings beside it, and its own.
    pub fn axes<'a>(&'a self, factor: usize, strategy: &'a Strategy) -> impl Iterator<Item = AxisId> + 'a {
        let rings = strategy.factors.iter().filter(move |(ring, _)| {
            let kind = self.factors.get(**ring).map(|factor| factor.kind);
            kind == Some(FactorKind::Ring { beside: factor })
        });
        rings.flat_map(|(_, axes)| axes).chain(strategy.axes(factor)).copied()
    }

    /// What a kernel does in the place of a ring: it is given all parts at once, so the axes divide the factor
    /// beside alone, and what is made of each part is a term of a sum.
    pub fn unrolled<'a>(&self, strategy: &'a Strategy) -> Cow<'a, Strategy> {
        let ring = |factor: &usize| match self.factors.get(*factor).map(|factor| factor.kind) {
            Some(FactorKind::Ring { beside }) => Some(beside),
            _ => None,
        };
        if strategy.factors.keys().all(|factor| ring(factor).is_none()) {
            return Cow::Borrowed(strategy);
        }
        let mut unrolled = strategy.clone();
        for (factor, axes) in &strategy.factors {
            if let Some(beside) = ring(factor) {
                unrolled.factors.remove(factor);
                unrolled.factors.entry(beside).or_default().splice(..0, axes.iter().copied());
            }
        }
        Cow::Owned(unrolled)
    }

    fn dims_sharding(&self, dims: &Dims, strategy: &Strategy) -> Sharding {
        let axes = |factors: &Vec<usize>| factors.iter().flat_map(|factor| self.axes(*factor, strategy)).collect();
        Sharding { dims: dims.iter().map(axes).collect(), partial: Vec::new() }
    }

    /// The layout operand `index` must have under a strategy.
    pub fn operand_sharding(&self, index: usize, strategy: &Strategy) -> Sharding {
        let mut sharding = self.dims_sharding(&self.operands[index], strategy);
        for (axis, set) in &strategy.pass {
            if self.linear.get(*set).is_some_and(|set| set.contains(&index)) {
                sharding.add_partial(*axis, ReduceKind::Sum);
            }
        }
        sharding
    }

    /// The layout result `index` has under a strategy.
    pub fn result_sharding(&self, index: usize, strategy: &Strategy) -> Sharding {
        let mut sharding = self.dims_sharding(&self.results[index], strategy);
        for (factor, axes) in &strategy.factors {
            let reduce = self.factors[*factor].reduce.iter().find(|(result, _)| *result == index);
            if let Some((_, kind)) = reduce {
                axes.iter().for_each(|axis| sharding.add_partial(*axis, *kind));
            }
        }
        for axis in strategy.pass.keys() {
            sharding.add_partial(*axis, ReduceKind::Sum);
        }
        sharding
    }

    /// Whether every result that lacks the factor says how to reduce it.
    fn is_reducible(&self, factor: usize) -> bool {
        self.results.iter().enumerate().all(|(index, dims)| {
            let held = dims.iter().flatten().any(|held| *held == factor);
            held || self.factors[factor].reduce.iter().any(|(result, _)| *result == index)
        })
    }

    /// Why a strategy is not legal for this rule on this mesh, if it is not.
    pub fn check(&self, strategy: &Strategy, mesh: &Mesh) -> Result<(), String> {
        let mut seen = Vec::new();
        for (factor, axes) in &strategy.factors {
            let Some(declared) = self.factors.get(*factor) else {
                return Err(format!("the rule {self} has no factor {factor}"));
            };
            let extent = mesh.extent(axes.iter().copied());
            if let FactorKind::Ring { beside } = declared.kind
                && !self.factors[beside].size.is_multiple_of(mesh.extent(self.axes(beside, strategy)))
            {
                let other = &self.factors[beside];
                return Err(format!("factor `{}` of size {} does not divide with its ring", other.name, other.size));
            }
            if declared.kind == FactorKind::Whole && extent > 1 {
                return Err(format!("factor `{}` of {self} cannot be divided", declared.name));
            }
            let is_ring = matches!(declared.kind, FactorKind::Ring { .. });
            if !is_ring && !self.is_reducible(*factor) && extent > 1 {
                return Err(format!("a result of {self} lacks `{}` and cannot reduce it", declared.name));
            }
            let may_be_uneven = self.fills && may_cut(declared.size, axes, mesh);
            if !declared.size.is_multiple_of(extent) && !may_be_uneven {
                return Err(format!(
                    "factor `{}` of size {} does not divide into {extent} parts",
                    declared.name, declared.size
                ));
            }
            seen.extend(axes.iter().copied());
        }
        for (axis, set) in &strategy.pass {
            if *set >= self.linear.len() {
                return Err(format!("the rule {self} has no linear set {set}"));
            }
            seen.push(*axis);
        }
        seen.sort_unstable();
        if let Some(twice) = seen.windows(2).find(|two| two[0] == two[1]) {
            return Err(format!("axis {} is given two choices", mesh.axis(twice[0]).name()));
        }
        self.check_order(strategy, mesh)
    }

    /// A dimension of several factors is divided into contiguous parts only if each factor before
    /// a divided one is divided completely.
    fn check_order(&self, strategy: &Strategy, mesh: &Mesh) -> Result<(), String> {
        for factors in self.operands.iter().chain(&self.results).flatten() {
            let mut whole_before: Option<usize> = None;
            for factor in factors {
                let extent = mesh.extent(self.axes(*factor, strategy));
                if let Some(before) = whole_before.filter(|_| extent > 1) {
                    let (name, before) = (&self.factors[*factor].name, &self.factors[before].name);
                    return Err(format!("`{name}` lies inside `{before}`, which is not divided completely"));
                }
                if extent < self.factors[*factor].size {
                    whole_before = whole_before.or(Some(*factor));
                }
            }
        }
        Ok(())
    }

    /// Whether a factor may be divided at all, given axes whose extent divides its size and what else has to be
    /// divided first.
    pub fn may_divide(&self, factor: usize) -> bool {
        match self.factors[factor].kind {
            FactorKind::Parallel => self.is_reducible(factor),
            FactorKind::Ring { .. } => true,
            FactorKind::Whole => false,
        }
    }

    /// Every legal way to add one axis to a strategy that divides evenly, replication first, then the factors in
    /// order, then the linear sets. Rings are not among them: see [`rings`](Self::rings). Where what other axes divide
    /// is legal only beside what this one does, replication is none.
    pub fn choices(&self, given: &Strategy, axis: AxisId, mesh: &Mesh) -> Vec<Choice> {
        let is_ring = |factor: &usize| matches!(self.factors[*factor].kind, FactorKind::Ring { .. });
        let factors = (0..self.factors.len()).filter(|factor| !is_ring(factor)).map(Choice::Factor);
        let sets = (0..self.linear.len()).map(Choice::Pass);
        let is_even = |choice: &Choice| match choice {
            Choice::Factor(factor) => {
                let extent = mesh.extent(given.axes(*factor).iter().copied()) * mesh.size(axis);
                self.factors[*factor].size.is_multiple_of(extent) && (extent == 1 || self.may_divide(*factor))
            }
            _ => true,
        };
        let is_legal = |choice: &Choice| is_even(choice) && self.check(&given.with(axis, *choice), mesh).is_ok();
        [Choice::Replicate].into_iter().chain(factors).chain(sets).filter(is_legal).collect()
    }

    /// Every legal way to add one axis to a strategy so that it divides a factor unevenly: see [`fills`](Self::fills).
    pub fn uneven_choices(&self, given: &Strategy, axis: AxisId, mesh: &Mesh) -> Vec<Choice> {
        let even = self.choices(given, axis, mesh);
        let factors = (0..self.factors.len()).filter(|_| self.fills).map(Choice::Factor);
        let others = factors.filter(|choice| !even.contains(choice));
        others.filter(|choice| self.check(&given.with(axis, *choice), mesh).is_ok()).collect()
    }

    /// Every legal way to add one axis to a strategy as a ring.
    pub fn rings(&self, given: &Strategy, axis: AxisId, mesh: &Mesh) -> Vec<Choice> {
        let is_ring = |factor: &usize| matches!(self.factors[*factor].kind, FactorKind::Ring { .. });
        let factors = (0..self.factors.len()).filter(is_ring).map(Choice::Factor);
        factors.filter(|choice| self.check(&given.with(axis, *choice), mesh).is_ok()).collect()
    }

    /// The text of a strategy: `m=dp.mb n=tp`, and `pass0=tp` for partial sums passed through.
    pub fn strategy_text(&self, strategy: &Strategy, mesh: &Mesh) -> String {
        let factors = strategy.factors.iter().filter(|(_, axes)| !axes.is_empty());
        let mut parts: Vec<_> = factors
            .map(|(factor, axes)| crate::sharding::axes_text(axes, mesh, &format!("{}=", self.factors[*factor].name)))
            .collect();
        parts.extend(strategy.pass.iter().map(|(axis, set)| format!("pass{set}={}", mesh.axis(*axis).name())));
        parts.join(" ")
    }

    /// Reads what [`strategy_text`](Self::strategy_text) wrote.
    pub fn parse_strategy(&self, text: &str, mesh: &Mesh) -> Result<Strategy, String> {
        let mut strategy = Strategy::default();
        for part in text.split_whitespace() {
            let (name, axes) = part.split_once('=').ok_or_else(|| format!("`{part}` is not FACTOR=AXIS.AXIS"))?;
            for axis in axes.split('.') {
                let id = mesh.find(axis).ok_or_else(|| format!("the mesh {mesh} has no axis `{axis}`"))?;
                let set = name.strip_prefix("pass").and_then(|set| set.parse().ok());
                match (self.find(name), set) {
                    (Some(factor), _) => strategy.factors.entry(factor).or_default().push(id),
                    (None, Some(set)) => drop(strategy.pass.insert(id, set)),
                    (None, None) => return Err(format!("the rule {self} has no factor `{name}`")),
                }
            }
        }
        Ok(strategy)
    }

    /// A factor's id, for tables keyed by factor.
    pub fn id(factor: usize) -> FactorId {
        FactorId::from_u32(factor as u32)
    }
}

impl fmt::Display for FactorRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dim = |factors: &Vec<usize>| {
            let names: Vec<_> = factors.iter().map(|factor| self.factors[*factor].name.as_str()).collect();
            match names.len() {
                0 => "1".to_string(),
                1 => names[0].to_string(),
                _ => format!("({})", names.join(" ")),
            }
        };
        let tensor = |dims: &Dims| format!("({})", dims.iter().map(dim).collect::<Vec<_>>().join(","));
        let list = |tensors: &[Dims]| tensors.iter().map(tensor).collect::<Vec<_>>().join(",");
        write!(f, "{}->{}", list(&self.operands), list(&self.results))?;
        for factor in self.factors.iter().filter(|factor| !factor.reduce.is_empty()) {
            write!(f, "|{} {}", factor.reduce[0].1.name(), factor.name)?;
        }
        for factor in &self.factors {
            match factor.kind {
                FactorKind::Parallel => {}
                FactorKind::Whole => write!(f, "|whole {}", factor.name)?,
                FactorKind::Ring { .. } => write!(f, "|ring {}", factor.name)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Family;

    fn matmul() -> FactorRule {
        let mut rule = FactorRule::default();
        let m = rule.parallel("m", 8);
        let n = rule.parallel("n", 6);
        let k = rule.reduced("k", 4, 0, ReduceKind::Sum);
        rule.operands = vec![vec![vec![m], vec![k]], vec![vec![k], vec![n]]];
        rule.results = vec![vec![vec![m], vec![n]]];
        rule.linear = vec![vec![0], vec![1]];
        rule
    }

    #[test]
    fn a_divided_reduction_leaves_a_partial_sum() {
        let mut mesh = Mesh::default();
        mesh.push(Family::Data, 2);
        mesh.push(Family::Tensor, 2);
        let rule = matmul();
        assert_eq!(rule.to_string(), "(m,k),(k,n)->(m,n)|sum k");
        let strategy = rule.parse_strategy("m=dp k=tp", &mesh).unwrap();
        assert_eq!(rule.check(&strategy, &mesh), Ok(()));
        let result = rule.result_sharding(0, &strategy);
        assert_eq!(result.dim_text(0, &mesh), "@dp");
        assert_eq!(result.partial_text(&mesh), "/sum(tp)");
        assert_eq!(rule.strategy_text(&strategy, &mesh), "m=dp k=tp");
    }

    #[test]
    fn a_ring_divides_what_stands_beside_it() {
        let mut mesh = Mesh::default();
        mesh.push(Family::Ring, 2);
        mesh.push(Family::Context, 2);
        let mut rule = FactorRule::default();
        let s = rule.reduced("s", 8, 0, ReduceKind::Sum);
        let t = rule.ring("t", 8, s);
        rule.operands = vec![vec![vec![s]], vec![vec![t]]];
        rule.results = vec![vec![vec![t]], vec![vec![s]]];
        assert_eq!(rule.to_string(), "(s),(t)->(t),(s)|sum s|ring t");
        let strategy = rule.parse_strategy("s=cp t=ring", &mesh).unwrap();
        assert_eq!(rule.check(&strategy, &mesh), Ok(()));
        let texts = |strategy: &Strategy| {
            let of = [
                rule.operand_sharding(0, strategy),
                rule.operand_sharding(1, strategy),
                rule.result_sharding(0, strategy),
            ];
            of.map(|sharding| format!("{}{}", sharding.dim_text(0, &mesh), sharding.partial_text(&mesh)))
        };
        assert_eq!(texts(&strategy), ["@ring.cp", "@ring", "@ring/sum(cp)"]);
        assert_eq!(texts(&rule.unrolled(&strategy)), ["@ring.cp", "", "/sum(ring)/sum(cp)"]);
        let choices = rule.choices(&Strategy::default(), AxisId(0), &mesh);
        assert_eq!(choices, [Choice::Replicate, Choice::Factor(s)]);
        assert_eq!(rule.rings(&Strategy::default(), AxisId(0), &mesh), [Choice::Factor(t)]);
        assert!(rule.check(&rule.parse_strategy("t=ring.cp", &mesh).unwrap(), &mesh).is_ok());
        let mut wide = Mesh::default();
        wide.push(Family::Ring, 16);
        assert!(rule.rings(&Strategy::default(), AxisId(0), &wide).is_empty());
    }

    #[test]
    fn an_inner_factor_needs_the_outer_one_divided_completely() {
        let mut mesh = Mesh::default();
        mesh.push(Family::Data, 4);
        mesh.push(Family::Tensor, 2);
        let mut rule = FactorRule::default();
        let (b, s) = (rule.parallel("b", 4), rule.parallel("s", 6));
        rule.operands = vec![vec![vec![b], vec![s]]];
        rule.results = vec![vec![vec![b, s]]];
        let alone = rule.parse_strategy("s=tp", &mesh).unwrap();
        assert!(rule.check(&alone, &mesh).is_err());
        let both = rule.parse_strategy("b=dp s=tp", &mesh).unwrap();
        assert_eq!(rule.check(&both, &mesh), Ok(()));
        assert_eq!(rule.result_sharding(0, &both).dim_text(0, &mesh), "@dp.tp");
        // What divides the outer one stays where it is.
        let inner = both.without(AxisId(0));
        assert_eq!(rule.choices(&inner, AxisId(0), &mesh), [Choice::Factor(b)]);
    }
}
