//! What lowering makes of the nodes of a class, as far as no mesh changes it: how many instructions, and how
//! much traffic.

use crate::cost::Bound;
use crate::cost::node::launches;
use crate::fold::Folded;
use crate::lower;
use shardc_ir::{Graph, NodeId, Seconds, Target};

/// The instructions that stand for one node of a class, on average.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// What they take to start, in launches.
    pub launches: f64,
    /// The same of the node alone.
    pub alone: f64,
    /// The bytes they move, over those that the node says it moves; of a sum that a product makes, what that reads for it.
    pub traffic: f64,
    /// Of a product, the bytes that it moves when its arithmetic is over, but for what it sums, over those of its result.
    pub after: f64,
    /// Of products, how many may be one instruction, if the target has one for what a rank sees of them.
    pub beside: usize,
    /// How many nodes earlier what it makes is there, where an earlier instruction makes it.
    pub ahead: usize,
    /// Whether what it makes is ever there: what products take in is not.
    pub is_made: bool,
    /// Whether it is a sum that a product makes.
    pub is_summed: bool,
    /// Whether it is no product, and adds to a summand.
    pub adds: bool,
    /// Whether it only names a part of what is there.
    pub is_view: bool,
    /// The class of the first node of the region of small values that makes its results, if one does.
    pub together: Option<usize>,
}

impl Share {
    /// What a node takes that takes `alone` by itself, where a kernel takes `launch` to start; `apart` means that nothing of
    /// it is merged into other instructions.
    pub fn seconds(self, alone: Seconds, bound: Bound, launch: f64, apart: bool) -> f64 {
        // A view takes nothing; what a product takes counts what it adds already.
        if alone.0 <= 0.0 || bound == Bound::Matmul {
            return alone.0;
        }
        if self.is_view {
            return 0.0;
        }
        let [traffic, launches] = if apart { [1.0, self.alone] } else { [0.0; 2] };
        (alone.0 - launch * self.alone) * self.traffic.max(traffic) + launch * self.launches.max(launches)
    }
}

/// Of each class, what one device emits: sums and copies that products make by themselves are not there.
pub fn emitted(graph: &Graph, folded: &Folded, target: &dyn Target) -> Vec<Share> {
    let emitted = lower::emitted(graph, target);
    let mean = |members: &[NodeId], of: &dyn Fn(&lower::Emitted) -> f64| {
        members.iter().map(|id| of(&emitted[*id])).sum::<f64>() / members.len().max(1) as f64
    };
    let alone = |id: NodeId| launches(&graph.node(id).op, &graph.operand_types(id));
    let share = |members: &[NodeId]| Share {
        alone: members.first().map_or(1.0, |id| alone(*id)),
        launches: mean(members, &|emitted| emitted.launches),
        traffic: mean(members, &|emitted| emitted.traffic),
        after: mean(members, &|emitted| emitted.after),
        beside: members.iter().map(|id| emitted[*id].beside).min().unwrap_or(1).max(1),
        ahead: members.iter().map(|id| emitted[*id].ahead).min().unwrap_or(0),
        is_made: members.iter().any(|id| emitted[*id].is_made),
        is_summed: members.iter().all(|id| emitted[*id].is_summed),
        adds: members.iter().all(|id| emitted[*id].adds),
        is_view: members.iter().all(|id| emitted[*id].is_view),
        together: members.first().and_then(|id| emitted[*id].together).map(|first| folded.class[first]),
    };
    folded.classes.iter().map(|class| share(&class.members)).collect()
}
