//! What the programs of all ranks of a plan are lowered from.
//!
//! How values lie, who reads them, in which section a node is and how the stages of a pipeline meet is said by the plan
//! alone. So it is worked out once, and every rank's [`Lowering`](super::Lowering) borrows it; what depends on the rank
//! is there.

use super::draft::Place;
use super::section::place_nodes;
use super::stages::Stages;
use super::{LowerError, order};
use crate::reshard::normalize;
use shardc_ir::ops::{Op, State};
use shardc_ir::pipeline::last_forward;
use shardc_ir::plan::Category;
use shardc_ir::{AxisSet, Node, NodeId, Plan, PrimaryMap, Role, SecondaryMap, Sharding, TensorType, ValueId};
use std::collections::HashMap;

/// The layouts of one node's operands and results, without axes of size 1.
pub(super) struct Layouts {
    pub operands: Vec<Sharding>,
    pub results: Vec<Sharding>,
}

/// See the [module](self).
pub(super) struct Common<'a> {
    pub plan: &'a Plan,
    /// The time axes of more than one microbatch.
    pub time: AxisSet,
    /// The section of each node. In which part of the loop a node of a pipeline is depends on the stage.
    pub places: SecondaryMap<NodeId, Place>,
    /// Nodes that depend on parameters and constants alone.
    pub weights: SecondaryMap<NodeId, bool>,
    pub layouts: PrimaryMap<NodeId, Layouts>,
    /// Who reads each value, as which operand.
    users: HashMap<ValueId, Vec<(NodeId, usize)>>,
    /// Values that something reads which is computed again.
    pub read_again: SecondaryMap<ValueId, bool>,
    /// The last node of the forward pass.
    pub last_forward: NodeId,
    /// All nodes, in the order in which they are lowered.
    pub order: Vec<NodeId>,
    /// How the stages of a pipeline meet, if the plan has any.
    pub stages: Option<Stages>,
}

impl<'a> Common<'a> {
    /// Of a plan.
    pub fn of(plan: &'a Plan) -> Result<Self, LowerError> {
        let mesh = &plan.mesh;
        let time: AxisSet = mesh.ids().filter(|axis| mesh.is_time(*axis) && mesh.size(*axis) > 1).collect();
        let mut weights: SecondaryMap<NodeId, bool> = SecondaryMap::new();
        let mut layouts: PrimaryMap<NodeId, Layouts> = PrimaryMap::new();
        for (id, node) in plan.graph.nodes() {
            let of_weights = node.operands.iter().all(|value| weights[plan.graph.value(*value).def]);
            weights[id] = !matches!(node.op, Op::Input(_)) && of_weights;
            layouts.push(layouts_of(plan, id, node));
        }
        let mut read_again: SecondaryMap<ValueId, bool> = SecondaryMap::new();
        let recomputed = plan.graph.nodes().filter(|(_, node)| matches!(node.role, Role::Recompute(_)));
        recomputed.flat_map(|(_, node)| &node.operands).for_each(|value| read_again[*value] = true);
        let places = place_nodes(plan, time);
        Ok(Self {
            plan,
            time,
            order: order::order(&plan.graph, &weights, &layouts),
            stages: Stages::of(plan, &places)?,
            places,
            weights,
            layouts,
            users: plan.graph.users(),
            read_again,
            last_forward: last_forward(&plan.graph),
        })
    }

    /// Who reads a value, as which operand.
    pub fn users(&self, value: ValueId) -> &[(NodeId, usize)] {
        self.users.get(&value).map_or(&[], Vec::as_slice)
    }

    /// The layout in which a value is made.
    pub fn made_as(&self, value: ValueId) -> &Sharding {
        let value = self.plan.graph.value(value);
        &self.layouts[value.def].results[value.index]
    }

    /// What a rank has of a value that lies so.
    pub fn local_type(&self, ty: &TensorType, sharding: &Sharding) -> TensorType {
        ty.with_shape(sharding.local_shape(&ty.shape, &self.plan.mesh))
    }

    /// What a value counts as.
    pub fn category(&self, value: ValueId) -> Category {
        let def = self.plan.graph.value(value).def;
        let node = self.plan.graph.node(def);
        let read_by_optimizer =
            || self.users(value).iter().any(|(user, _)| self.plan.graph.node(*user).role == Role::Optimizer);
        match node.op {
            Op::State(State { cast_of: None, .. }) => Category::Optimizer,
            _ if self.weights[def] && !node.operands.is_empty()
                || matches!(node.op, Op::Parameter(_) | Op::State(_)) =>
            {
                Category::Parameter
            }
            _ if matches!(node.role, Role::Backward(_)) && read_by_optimizer() => Category::Gradient,
            _ => Category::Activation,
        }
    }
}

pub(super) fn layouts_of(plan: &Plan, id: NodeId, node: &Node) -> Layouts {
    let rule = plan.rule(id);
    let strategy = rule.unrolled(&plan.strategies[id]);
    let operand = |index| normalize(&rule.operand_sharding(index, &strategy), &plan.mesh);
    let result = |index| normalize(&rule.result_sharding(index, &strategy), &plan.mesh);
    Layouts {
        operands: (0..node.operands.len()).map(operand).collect(),
        results: (0..node.results.len()).map(result).collect(),
    }
}
