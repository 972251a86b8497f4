//! Single numbers of which each stage makes some terms, and whose sum over the stages all want.
//!
//! The graph adds the terms one by one (the squares of the gradients); a stage adds those that it has, in the
//! order of the graph, and a reduction over the stages adds the rest. A sum is the set of its terms, however it
//! is put together: if those of all stages are each term of a value of the graph once, their sum is that value.

use super::arrangement::Arrangement;
use super::interpret::Interpreter;
use super::state::{Fact, Stage};
use crate::entity::{EntityRef, ValueId};
use crate::graph::Node;
use crate::ops::{BinaryKind, Op};
use crate::plan::Plan;
use crate::program::Instruction;
use std::collections::BTreeSet;

/// The operands of a value that is a sum which no chunk of the stages makes.
fn summands(plan: &Plan, value: ValueId) -> Option<[ValueId; 2]> {
    if plan.stages() <= 1 {
        return None;
    }
    let def = plan.graph.value(value).def;
    let node = plan.graph.node(def);
    let is_sum = matches!(&node.op, Op::Binary(op) if op.kind == BinaryKind::Add);
    let [a, b] = node.operands[..] else { return None };
    (is_sum && plan.pipeline.chunks[def].is_none()).then_some([a, b])
}

/// The terms that a value of the graph is the sum of, in their order.
fn terms(plan: &Plan, value: ValueId) -> Vec<ValueId> {
    let (mut open, mut terms) = (vec![value], Vec::new());
    while let Some(value) = open.pop() {
        match summands(plan, value) {
            Some(both) => open.extend(both),
            None => terms.push(value),
        }
    }
    terms.sort_unstable();
    terms
}

/// The terms that a fact is the sum of; none for zeros.
fn terms_of(plan: &Plan, fact: &Fact) -> Option<Vec<ValueId>> {
    match &fact.stage {
        Stage::Ready if fact.of.is_none() => Some(terms(plan, fact.value)),
        Stage::Terms(terms) => Some(terms.clone()),
        Stage::Empty => Some(Vec::new()),
        _ => None,
    }
}

/// The terms of the sum of facts that lie alike, and how it lies. Zeros lie as all do.
fn sum(plan: &Plan, facts: &[&Fact]) -> Option<(Vec<ValueId>, Arrangement)> {
    let (mut all, mut arrangement) = (Vec::new(), None);
    for fact in facts {
        all.extend(terms_of(plan, fact)?);
        if fact.stage != Stage::Empty {
            let known = arrangement.get_or_insert(&fact.arrangement);
            if *known != &fact.arrangement || !fact.arrangement.is_linear() {
                return None;
            }
        }
    }
    all.sort_unstable();
    Some((all, arrangement?.clone()))
}

impl Interpreter<'_> {
    /// What a stage makes that adds the terms that it has of a sum of the graph.
    pub fn sum_of_terms(&self, instruction: &Instruction, node: &Node) -> Option<Fact> {
        let [value] = node.results[..] else { return None };
        summands(self.plan, value)?;
        let [a, b] = instruction.operands[..] else { return None };
        let held = [a, b].map(|buffer| self.contents[buffer.index()].facts());
        let pairs = held[0].iter().flat_map(|a| held[1].iter().map(move |b| [a, b]));
        let (own, arrangement) = pairs.filter_map(|pair| sum(self.plan, &pair)).next()?;
        let stage = if own == terms(self.plan, value) { Stage::Ready } else { Stage::Terms(own) };
        Some(Fact { value, arrangement, stage, of: None })
    }

    /// The sums that no chunk makes and of which a value is a summand.
    fn sums_of(&self, value: ValueId) -> impl Iterator<Item = ValueId> + '_ {
        let results = self.kernels.users(value).iter().map(|(reader, _)| self.plan.graph.node(*reader).results[0]);
        results.filter(|result| summands(self.plan, *result).is_some())
    }
}

/// What the sum over stages of what each of them holds is.
///
/// # Errors
/// What it is instead, as a clause.
pub(super) fn sum_over_stages(of: &Interpreter<'_>, held: &[&[Fact]]) -> Result<Fact, String> {
    let plan = of.plan;
    let mut facts = Vec::with_capacity(held.len());
    for (stage, held) in held.iter().enumerate() {
        let fact = held.iter().find(|fact| terms_of(plan, fact).is_some());
        facts.push(fact.ok_or_else(|| {
            let text = held.first().map_or("what is not known".to_string(), |fact| fact.text(plan));
            format!("stage {stage} adds {text}, which is no term of a sum")
        })?);
    }
    let texts = || facts.iter().map(|fact| fact.text(plan)).collect::<Vec<_>>().join("; ");
    let Some((all, arrangement)) = sum(plan, &facts) else {
        return Err(format!("the stages do not hold terms that lie alike: {}", texts()));
    };
    // It is one of the values that are named, or a sum of them.
    let mut open: BTreeSet<ValueId> = facts.iter().map(|fact| fact.value).collect();
    while let Some(value) = open.pop_first() {
        let known = terms(plan, value);
        if known == all {
            return Ok(Fact::ready(value, arrangement));
        }
        open.extend(of.sums_of(value).filter(|_| known.len() < all.len()));
    }
    Err(format!("no value of the graph is the sum of the terms of all stages: {}", texts()))
}
