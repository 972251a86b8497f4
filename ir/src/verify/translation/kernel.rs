//! Kernels against the nodes they come from: layouts by the factor rule, shapes of the parts, and
//! attributes that depend on the part, on every rank and in every microbatch.

use super::arrangement::Arrangement;
use super::interpret::At;
use super::state::Fact;
use crate::entity::{BufferId, NodeId, SecondaryMap, ValueId};
use crate::graph::OutputKind;
use crate::ops::{Matmul, Op, OpDef, Part};
use crate::plan::Plan;
use crate::program::{Action, Instruction, Program};
use crate::sharding::Sharding;
use crate::types::{DType, TensorType};
use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;

/// How an operand or a result lies.
pub(super) struct Layout {
    pub arrangement: Arrangement,
    sharding: Sharding,
    /// The part's type.
    pub local: TensorType,
}

/// The layouts of a node's operands and results.
pub(super) struct Layouts {
    pub operands: Vec<Layout>,
    pub results: Vec<Layout>,
}

/// Looks up what nodes demand.
pub(super) struct Kernels<'a> {
    plan: &'a Plan,
    programs: &'a [Program],
    /// Per program and microbatch, the coordinates.
    coordinates: Vec<Vec<Vec<u64>>>,
    layouts: SecondaryMap<NodeId, Option<Rc<Layouts>>>,
    users: HashMap<ValueId, Vec<(NodeId, usize)>>,
}

impl<'a> Kernels<'a> {
    pub fn new(plan: &'a Plan, programs: &'a [Program]) -> Self {
        let of_rank = |program: &Program| {
            (0..plan.mesh.microbatches()).map(|microbatch| plan.mesh.coordinates(program.rank, microbatch)).collect()
        };
        let coordinates = programs.iter().map(of_rank).collect();
        Self { plan, programs, coordinates, layouts: SecondaryMap::new(), users: plan.graph.users() }
    }

    fn layout(&self, value: ValueId, sharding: Sharding) -> Layout {
        let ty = self.plan.graph.ty(value);
        let arrangement = Arrangement::of(&ty.shape, &sharding, &self.plan.mesh);
        let local = ty.with_shape(sharding.local_shape(&ty.shape, &self.plan.mesh));
        Layout { arrangement, sharding, local }
    }

    /// How a value lies where it is made.
    pub fn made_as(&mut self, value: ValueId) -> Arrangement {
        let value = self.plan.graph.value(value);
        self.layouts(value.def).results[value.index].arrangement.clone()
    }

    /// The layouts that follow from a node's strategy.
    pub fn layouts(&mut self, id: NodeId) -> Rc<Layouts> {
        if let Some(known) = &self.layouts[id] {
            return Rc::clone(known);
        }
        let (node, rule, strategy) = (self.plan.graph.node(id), self.plan.rule(id), &self.plan.strategies[id]);
        let strategy = rule.unrolled(strategy);
        let operands = node.operands.iter().enumerate();
        let results = node.results.iter().enumerate();
        let layouts = Rc::new(Layouts {
            operands: operands.map(|(at, value)| self.layout(*value, rule.operand_sharding(at, &strategy))).collect(),
            results: results.map(|(at, value)| self.layout(*value, rule.result_sharding(at, &strategy))).collect(),
        });
        self.layouts[id] = Some(Rc::clone(&layouts));
        layouts
    }

    fn op(&self, program: usize, at: At) -> Option<&Op> {
        match &self.programs[program].sections[at.0].instructions[at.1].action {
            Action::Compute(op) => Some(op.single()),
            _ => None,
        }
    }

    /// The nodes that read a value, and as which operand.
    pub fn users(&self, value: ValueId) -> &[(NodeId, usize)] {
        self.users.get(&value).map_or(&[], Vec::as_slice)
    }

    /// The element type in which a gradient is summed over ranks, if it is not its own.
    pub fn sums_in(&self, value: ValueId) -> Option<DType> {
        self.plan.sums_in(value, self.users(value))
    }

    /// Checks the buffers' types, and that every rank's operation is the node's for its part. Operands
    /// and results beyond the node's are not looked at.
    pub fn check(&self, id: NodeId, at: At, instruction: &Instruction, layouts: &Layouts) -> Result<(), String> {
        let operands = &instruction.operands[..layouts.operands.len()];
        // A product may write the type in which it is summed; who reads it otherwise finds another than it takes.
        let node = self.plan.graph.node(id);
        let product = node.results.first().filter(|_| matches!(node.op, Op::Matmul(_)));
        let narrow = product.and_then(|value| self.sums_in(*value));
        let buffers = operands.iter().chain(&instruction.results);
        for (index, (buffer, layout)) in buffers.zip(layouts.operands.iter().chain(&layouts.results)).enumerate() {
            let ty = &self.programs[0].buffers[*buffer].ty;
            let is_sum = index >= operands.len() && narrow.is_some_and(|dtype| *ty == layout.local.with_dtype(dtype));
            if *ty != layout.local && !is_sum {
                return Err(format!("{buffer} is {ty}; a rank's part of the value is {}", layout.local));
            }
        }
        self.check_attributes(id, at, layouts)
    }

    fn check_attributes(&self, id: NodeId, at: At, layouts: &Layouts) -> Result<(), String> {
        let (graph, node) = (&self.plan.graph, self.plan.graph.node(id));
        let mut all = layouts.operands.iter().chain(&layouts.results);
        let varies = all.any(|layout| layout.sharding.dim_axes().iter().any(|axis| self.plan.mesh.is_time(axis)));
        for (rank, coordinates) in self.coordinates.iter().enumerate() {
            let microbatches = if varies { coordinates.len() } else { 1 };
            for (microbatch, coordinates) in coordinates[..microbatches].iter().enumerate() {
                let part = |(value, layout): (&ValueId, &Layout)| {
                    let shape = graph.ty(*value).shape.clone();
                    let slice = layout.sharding.slice(&shape, &self.plan.mesh, coordinates);
                    Part { shape, slice }
                };
                let operands: Vec<Part> = node.operands.iter().zip(&layouts.operands).map(part).collect();
                let results: Vec<Part> = node.results.iter().zip(&layouts.results).map(part).collect();
                let localized = node.op.localize(&operands, &results);
                let wanted = localized.as_ref().unwrap_or(&node.op);
                let given = self.op(rank, at).map(|op| bare(op, &node.op));
                if given.as_deref() != Some(wanted) {
                    let given = given.as_deref().map_or("no kernel".to_string(), op_text);
                    let rank = self.programs[rank].rank;
                    let wanted = op_text(wanted);
                    return Err(format!(
                        "runs {given} on rank {rank}; its part needs {wanted} in microbatch {microbatch}"
                    ));
                }
                if localized.is_none() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// A value made from nothing may be made in any layout in which it is read. Every one that fits the
    /// instruction is a fact.
    pub fn made_of_nothing(&mut self, id: NodeId, at: At, buffer: BufferId) -> Result<Vec<Fact>, String> {
        let plan = self.plan;
        let value = plan.graph.result(id);
        let mut shardings = vec![plan.sharding(value)];
        let readers = self.users.get(&value).into_iter().flatten();
        shardings.extend(readers.map(|(reader, index)| plan.operand_sharding(*reader, *index)));
        for output in plan.graph.outputs.iter().filter(|output| output.value == value) {
            shardings.push(match output.kind {
                OutputKind::Result => Sharding::replicated(plan.graph.ty(value).rank()),
                OutputKind::Update(leaf) => plan.sharding(leaf),
            });
        }
        let (mut facts, mut why) = (Vec::new(), None);
        // Where parts end with zeros, it is not the operation that makes them.
        let shape = &plan.graph.ty(value).shape;
        let is_made = |of: &Sharding| of.partial.is_empty() && of.is_even(shape, &plan.mesh);
        for sharding in shardings.into_iter().filter(is_made) {
            let layout = self.layout(value, sharding);
            let fact = Fact::ready(value, layout.arrangement.clone());
            if facts.contains(&fact) || layout.local != self.programs[0].buffers[buffer].ty {
                continue;
            }
            match self.check_attributes(id, at, &Layouts { operands: Vec::new(), results: vec![layout] }) {
                Ok(()) => facts.push(fact),
                Err(message) => why = why.or(Some(message)),
            }
        }
        match facts.is_empty() {
            true => Err(why.unwrap_or_else(|| format!("makes no part of {value} in which it is read"))),
            false => Ok(facts),
        }
    }
}

/// A product without what it does beside what its node computes: a bias, an activation.
fn bare<'a>(op: &'a Op, of: &Op) -> Cow<'a, Op> {
    match (op, of) {
        (Op::Matmul(given), Op::Matmul(node)) => {
            let (bias, epilogue) = (given.bias && node.bias, given.epilogue.filter(|_| node.epilogue.is_some()));
            Cow::Owned(Matmul { bias, epilogue, ..given.clone() }.into())
        }
        _ => Cow::Borrowed(op),
    }
}

fn op_text(op: &Op) -> String {
    let attributes: Vec<String> = op.attributes().iter().map(|(name, value)| format!("{name}={value}")).collect();
    format!("{} {{{}}}", op.name(), attributes.join(", "))
}
