//! The plan's verifier.
//!
//! Invariants:
//! * the graph is valid, and the mesh has unique names and sizes of 1 or more;
//! * every strategy is legal by its node's factor rule ([`FactorRule::check`]), and the layouts that
//!   follow from it are legal for the values ([`Sharding::check`]);
//! * where a value is made in one layout and read in another, the conversion exists: over space
//!   axes everything but making a partial value from a whole one, unless it is a sum (one coordinate
//!   keeps the value, the others hold zeros); over time axes nothing but resolving a partial sum (into
//!   an accumulator) and taking a microbatch's part of a whole value;
//! * a partial value over a time axis is a sum, because accumulators add;
//! * parameters and states are not divided over time, and the cast of a parameter that a state is lies as the parameter
//!   does;
//! * order: say that a value is *resolved* over a time axis where a node reads it without the axis
//!   and it is made partial over it. What depends on a resolved value is computed after the loop
//!   over the microbatches ([`Phase::After`]), so no such node may name a time axis in its strategy;
//! * the pipeline is legal (`pipeline`);
//! * an output is whole after the step: it is not divided over time (unless the axis has size 1).
//!
//! [`FactorRule::check`]: crate::FactorRule::check

use super::graph::GraphFacts;
use super::phase::Phase;
use crate::diagnostic::Diagnostics;
use crate::entity::{NodeId, SecondaryMap, ValueId};
use crate::graph::OutputKind;
use crate::mesh::AxisId;
use crate::ops::{Op, State};
use crate::plan::Plan;
use crate::sharding::{ReduceKind, Sharding};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Deref;

/// A place where a value is read in another layout than it is made in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// The value.
    pub value: ValueId,
    /// The reading node, or `None` for an output.
    pub reader: Option<NodeId>,
    /// Which operand of the node, or which output of the graph.
    pub index: usize,
    /// The layout in which it is made.
    pub from: Sharding,
    /// The layout in which it is read.
    pub to: Sharding,
}

/// What is known of a plan that was verified.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanFacts {
    /// Of the graph.
    pub graph: GraphFacts,
    /// When each node runs.
    pub phases: SecondaryMap<NodeId, Phase>,
    /// Every place where layouts differ, in the order of the readers; outputs last.
    pub conversions: Vec<Conversion>,
}

/// A plan that [`plan`] found valid, borrowed or owned. It can be read, not changed.
#[derive(Clone, Debug)]
pub struct VerifiedPlan<'a> {
    plan: Cow<'a, Plan>,
    facts: PlanFacts,
}

impl From<Plan> for Cow<'_, Plan> {
    fn from(plan: Plan) -> Self {
        Self::Owned(plan)
    }
}

impl<'a> From<&'a Plan> for Cow<'a, Plan> {
    fn from(plan: &'a Plan) -> Self {
        Self::Borrowed(plan)
    }
}

impl VerifiedPlan<'_> {
    /// What the verifier found out.
    pub fn facts(&self) -> &PlanFacts {
        &self.facts
    }

    /// When a node runs.
    pub fn phase(&self, node: NodeId) -> Phase {
        self.facts.phases[node]
    }
}

impl Deref for VerifiedPlan<'_> {
    type Target = Plan;
    fn deref(&self) -> &Plan {
        &self.plan
    }
}

/// Verifies a plan, given or lent.
///
/// # Errors
/// Every violation of the invariants; those of the graph and the mesh alone, if there are any.
pub fn plan<'a>(plan: impl Into<Cow<'a, Plan>>) -> Result<VerifiedPlan<'a>, Diagnostics> {
    let plan = plan.into();
    let facts = check(&plan)?;
    Ok(VerifiedPlan { plan, facts })
}

fn check(plan: &Plan) -> Result<PlanFacts, Diagnostics> {
    let mut facts = PlanFacts { graph: super::graph(&plan.graph)?, ..PlanFacts::default() };
    let mut found = Diagnostics::default();
    check_mesh(plan, &mut found);
    found.finish(())?;
    let mut found = Diagnostics::default();
    for (id, _) in plan.graph.nodes() {
        check_strategy(plan, id, &mut found);
    }
    // Layouts follow from strategies: without legal ones nothing more can be said.
    found.finish(())?;
    let mut checker = Checker { plan, facts: &mut facts, found: Diagnostics::default() };
    checker.nodes();
    checker.outputs();
    checker.found.finish(())?;
    let mut found = Diagnostics::default();
    super::pipeline::check(plan, &facts.phases, &mut found);
    found.finish(())?;
    Ok(facts)
}

/// The most microbatches of a step: more are no plan that anybody runs, and each has coordinates of its own.
const MOST_MICROBATCHES: u64 = 1 << 20;

fn check_mesh(plan: &Plan, found: &mut Diagnostics) {
    let mut names = BTreeSet::new();
    for axis in &plan.mesh.axes {
        if !names.insert((axis.family, axis.number)) {
            found.push("mesh", format!("axis `{}` is in the mesh twice", axis.name()));
        }
        if axis.size == 0 {
            found.push("mesh", format!("axis `{}` has size 0", axis.name()));
        }
    }
    if plan.mesh.axes.len() > 32 {
        found.push("mesh", format!("{} axes; a mesh has at most 32", plan.mesh.axes.len()));
    }
    if plan.mesh.microbatches() > MOST_MICROBATCHES {
        let microbatches = plan.mesh.microbatches();
        found.push("mesh", format!("{microbatches} microbatches; a step has at most {MOST_MICROBATCHES}"));
    }
}

fn place(plan: &Plan, id: NodeId) -> String {
    plan.graph.result(id).to_string()
}

fn check_strategy(plan: &Plan, id: NodeId, found: &mut Diagnostics) {
    let place = place(plan, id);
    let (rule, strategy) = (plan.rule(id), &plan.strategies[id]);
    let mut axes = strategy.factors.values().flatten().chain(strategy.pass.keys());
    if let Some(axis) = axes.find(|axis| axis.0 as usize >= plan.mesh.axes.len()) {
        return found.push(place, format!("its strategy names axis {}, and the mesh is {}", axis.0, plan.mesh));
    }
    if let Err(message) = rule.check(strategy, &plan.mesh) {
        return found.push(place, format!("{}: {message}", plan.graph.node(id).op.name()));
    }
    let node = plan.graph.node(id);
    let operands =
        node.operands.iter().enumerate().map(|(index, value)| (value, rule.operand_sharding(index, strategy)));
    let results = node.results.iter().enumerate().map(|(index, value)| (value, rule.result_sharding(index, strategy)));
    for (value, sharding) in operands.chain(results) {
        if let Err(message) = sharding.check(&plan.graph.ty(*value).shape, &plan.mesh) {
            found.push(&place, format!("the layout of {value}: {message}"));
        }
    }
}

struct Checker<'a> {
    plan: &'a Plan,
    facts: &'a mut PlanFacts,
    found: Diagnostics,
}

impl Checker<'_> {
    fn nodes(&mut self) {
        let plan = self.plan;
        for (id, node) in plan.graph.nodes() {
            let place = place(plan, id);
            let strategy = &plan.strategies[id];
            let named = strategy.factors.values().flatten().chain(strategy.pass.keys());
            let time = named.copied().find(|axis| plan.mesh.is_time(*axis));
            let mut resolved = None;
            for (index, value) in node.operands.iter().enumerate() {
                let (from, to) = (plan.sharding(*value), plan.operand_sharding(id, index));
                if is_resolved_over_time(plan, &from, &to)
                    || self.facts.phases[plan.graph.value(*value).def] == Phase::After
                {
                    resolved = resolved.or(Some(*value));
                }
                if let Err(message) = self.convertible(*value, &from, &to) {
                    self.found.push(&place, format!("cannot read {value}: {message}"));
                }
                if from != to {
                    self.facts.conversions.push(Conversion { value: *value, reader: Some(id), index, from, to });
                }
            }
            self.facts.phases[id] = match (time, resolved) {
                (_, Some(_)) => Phase::After,
                (Some(_), None) => Phase::Loop,
                (None, None) => Phase::Invariant,
            };
            if let (Some(axis), Some(value)) = (time, resolved) {
                let axis = &plan.mesh.axis(axis).name();
                let message = format!(
                    "runs once per microbatch (its strategy names `{axis}`), but {value} is complete only after all of them"
                );
                self.found.push(&place, message);
            }
            self.leaf(&place, &node.op, time);
            self.partial_results(&place, id);
        }
    }

    fn leaf(&mut self, place: &str, op: &Op, time: Option<AxisId>) {
        if let (Op::Parameter(_) | Op::State(_), Some(axis)) = (op, time) {
            let axis = &self.plan.mesh.axis(axis).name();
            self.found.push(place, format!("a {} is stored whole in time, not divided over `{axis}`", op.name()));
        }
        let Op::State(State { name, cast_of: Some(parameter), .. }) = op else { return };
        let stored = |leaf: Option<&ValueId>| leaf.map(|value| self.plan.sharding(*value));
        let graph = &self.facts.graph;
        if stored(graph.states.get(name)) != stored(graph.parameters.get(parameter)) {
            self.found.push(place, format!("is stored otherwise than \"{parameter}\", whose cast it is"));
        }
    }

    fn partial_results(&mut self, place: &str, id: NodeId) {
        for value in &self.plan.graph.node(id).results {
            for (axis, kind) in self.plan.sharding(*value).partial {
                let axis = self.plan.mesh.axis(axis);
                if axis.family.is_time() && kind != ReduceKind::Sum && axis.size > 1 {
                    let message = format!(
                        "{value} is a partial {} over the time axis `{}`, but accumulators only add",
                        kind.name(),
                        axis.name()
                    );
                    self.found.push(place, message);
                }
            }
        }
    }

    /// Why a value made in one layout cannot be read in another, if it cannot.
    fn convertible(&self, value: ValueId, from: &Sharding, to: &Sharding) -> Result<(), String> {
        let mesh = &self.plan.mesh;
        for (axis, kind) in &to.partial {
            let isolates = *kind == ReduceKind::Sum && !mesh.is_time(*axis);
            if from.partial_over(*axis) != Some(*kind) && !isolates {
                let (axis, kind) = (&mesh.axis(*axis).name(), kind.name());
                return Err(format!("it must be a partial {kind} over `{axis}`, and {value} is none"));
            }
        }
        for axis in mesh.ids().filter(|axis| mesh.is_time(*axis) && mesh.size(*axis) > 1) {
            let name = &mesh.axis(axis).name();
            match (from.dim_of(axis), to.dim_of(axis)) {
                (Some(_), None) => {
                    return Err(format!("{value} is divided over the time axis `{name}` and would have to be whole"));
                }
                (Some(before), Some(after)) if before != after || !same_time_part(from, to, before, axis) => {
                    let (from, to) = (from.dim_text(before, mesh), to.dim_text(after, mesh));
                    return Err(format!(
                        "its microbatches are cut by `{from}` of dimension {before}, not by `{to}` of dimension {after}"
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn outputs(&mut self) {
        let plan = self.plan;
        for (index, output) in plan.graph.outputs.iter().enumerate() {
            let from = plan.sharding(output.value);
            let to = match output.kind {
                OutputKind::Result => Sharding::replicated(plan.graph.ty(output.value).rank()),
                OutputKind::Update(leaf) => plan.sharding(leaf),
            };
            if let Err(message) = self.convertible(output.value, &from, &to) {
                self.found.push(format!("output \"{}\"", output.name), message);
            }
            if from != to {
                self.facts.conversions.push(Conversion { value: output.value, reader: None, index, from, to });
            }
        }
    }
}

/// Whether the axes outside a time axis in a dimension are the same: only then is a microbatch the
/// same rows in both layouts. (`@dp.mb` takes a slice of every rank's rows, `@mb` one slice of all.)
fn same_time_part(from: &Sharding, to: &Sharding, dim: usize, axis: AxisId) -> bool {
    let outside =
        |sharding: &Sharding| sharding.dims[dim].iter().copied().take_while(|other| *other != axis).collect::<Vec<_>>();
    outside(from) == outside(to)
}

/// Whether reading `to` from `from` sums over a time axis.
fn is_resolved_over_time(plan: &Plan, from: &Sharding, to: &Sharding) -> bool {
    let partial = from.partial.iter().map(|(axis, _)| *axis).filter(|axis| plan.mesh.is_time(*axis));
    partial.into_iter().any(|axis| to.partial_over(axis).is_none())
}
