//! What a plan may ask of a runtime beyond kernels and collectives that all ranks run alike.
//!
//! A plan may say more than every runtime can execute. A [`Target`] says which of these features it runs. The search
//! opens the others only where it is asked to, and nothing that lacks one is started. Lowering does something else in
//! place of some features ([`Feature::instead`]); the programs of such a plan say nothing of its memory and time.

use crate::entity::NodeId;
use crate::factor::{Factor, FactorKind};
use crate::mesh::AxisId;
use crate::ops::Op;
use crate::plan::{Plan, Scope, Space};
use crate::target::Target;
use std::fmt;

/// A part of the plan's language that not every runtime executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// Ranks that run different parts of the graph: a mesh with an axis `pp`.
    Pipeline,
    /// Nodes that pass parts of their operands round a ring ([`FactorKind::Ring`]).
    Ring,
    /// Values that lie in the host's memory or on its disk.
    Offload,
}

impl Feature {
    /// Every feature.
    pub const ALL: [Feature; 3] = [Self::Pipeline, Self::Ring, Self::Offload];

    /// Whether a plan needs it.
    pub fn is_in(self, plan: &Plan) -> bool {
        match self {
            Self::Pipeline => plan.stages() > 1,
            Self::Ring => plan.graph.nodes().any(|(id, node)| {
                matches!(node.op, Op::Attention(_) | Op::AttentionGrad(_))
                    && divides(plan, id, |factor| matches!(factor.kind, FactorKind::Ring { .. }))
            }),
            Self::Offload => plan.spaces.values().any(|space| *space != Space::Device),
        }
    }

    /// The pin that does without it.
    pub fn avoided_by(self) -> &'static str {
        match self {
            Self::Pipeline => "pp=1",
            Self::Ring => "ring=1",
            Self::Offload => "offload=none",
        }
    }

    /// What programs do in its place, where lowering does not make what is planned: they compute the same, but their
    /// memory and time are not those of the plan.
    pub fn instead(self) -> Option<&'static str> {
        match self {
            Self::Pipeline => None,
            Self::Ring => Some("gather what goes round the ring"),
            Self::Offload => Some("have everything on the device"),
        }
    }

    /// Whether a search considers it: a pin asks for it, every plan is wanted, or it pays on the target.
    pub fn is_open(self, is_pinned: bool, scope: Scope, target: &dyn Target) -> bool {
        is_pinned || scope == Scope::All || target.searches(self)
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pipeline => "pipeline stages (pp)",
            Self::Ring => "attention round a ring of ranks (ring)",
            Self::Offload => "offloading to the host or its disk (offload)",
        })
    }
}

/// Whether a node divides a factor of some kind over more than one rank.
fn divides(plan: &Plan, node: NodeId, is_it: impl Fn(&Factor) -> bool) -> bool {
    let rule = plan.rule(node);
    let wide = |axes: &Vec<AxisId>| plan.mesh.extent(axes.iter().copied()) > 1;
    plan.strategies[node]
        .factors
        .iter()
        .any(|(factor, axes)| wide(axes) && rule.factors.get(*factor).is_some_and(&is_it))
}

/// What of a plan its programs do in another way ([`Feature::instead`]): they say nothing of its memory and time,
/// which stay estimates.
pub fn unlowered(plan: &Plan) -> Vec<Feature> {
    Feature::ALL.into_iter().filter(|feature| feature.instead().is_some() && feature.is_in(plan)).collect()
}

/// What of a plan a target cannot run, in the order of [`Feature::ALL`].
pub fn missing(plan: &Plan, target: &dyn Target) -> Vec<Feature> {
    Feature::ALL.into_iter().filter(|feature| feature.is_in(plan) && !target.runs(*feature)).collect()
}
