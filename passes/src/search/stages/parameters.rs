//! Where along a line parameters lie, what is made of them and kept through the loop, and what of them passes between
//! stages once in a step.

use super::line::Line;
use crate::pipeline::shared::last_sums;
use crate::search::estimate::Shape;
use crate::shard::tensor::Prepared;
use shardc_ir::{Choice, NodeId, Op};
use std::collections::BTreeSet;

/// What is read at another place than where it is made, but in no microbatch: a parameter, or a gradient that is added
/// to others of its parameter.
pub(super) struct Shared {
    pub maker: NodeId,
    /// Which of the results.
    pub result: usize,
    /// Where along the line it is made, and where it is read.
    pub places: [usize; 2],
    pub kind: Kind,
}

/// What passes once in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Gradient,
    Parameter,
    /// A parameter that is padded where it is read, and kept in that form alone.
    Padded,
}

/// The share of the bytes of all parameters that lie at each place of a line.
pub(super) fn stored(prepared: &Prepared<'_>, shape: &Shape<'_>, line: &Line) -> Vec<f64> {
    let mut stored = vec![0.0; line.main.len()];
    for (id, _) in prepared.graph.nodes().filter(|(_, node)| matches!(node.op, Op::Parameter(_))) {
        if let Some(at) = line.of(id) {
            stored[at] += shape.sizes()[prepared.folded.class[id]].iter().sum::<u64>() as f64;
        }
    }
    let all: f64 = stored.iter().sum();
    stored.iter_mut().for_each(|bytes| *bytes /= all.max(1.0));
    stored
}

/// Bytes of copies of parameters at each place of a line.
pub(super) fn copied(prepared: &Prepared<'_>, shape: &Shape<'_>, line: &Line) -> Vec<f64> {
    let mut copied = vec![0.0; line.main.len()];
    for (id, _) in prepared.graph.nodes().filter(|(id, _)| !prepared.in_loop(prepared.folded.class[*id])) {
        line.of(id).into_iter().for_each(|at| copied[at] += shape.copied(prepared.folded.class[id]));
    }
    copied
}

/// Parameters, and sums of their gradients, that pass between stages once in a step if a cut lies between their places.
pub(super) fn shared(prepared: &Prepared<'_>, place: &dyn Fn(NodeId) -> Option<usize>) -> Vec<Shared> {
    let graph = prepared.graph;
    let class = |id: NodeId| prepared.folded.class[id];
    let is_last = last_sums(graph, |id| matches!(prepared.batch[class(id)], Choice::Pass(_)));
    let mut known = BTreeSet::new();
    let mut all = Vec::new();
    let kind = |id: NodeId| match &graph.node(id).op {
        _ if is_last[id] => Some(Kind::Gradient),
        Op::Pad(_) if !prepared.in_loop(class(id)) => Some(Kind::Padded),
        _ => prepared.in_loop(class(id)).then_some(Kind::Parameter),
    };
    for (id, node) in graph.nodes() {
        let Some(kind) = kind(id) else { continue };
        for value in &node.operands {
            let (maker, result) = (graph.value(*value).def, graph.value(*value).index);
            let (Some(made), Some(read)) = (place(maker), place(id)) else { continue };
            let is_once = is_last[id] || !prepared.in_loop(class(maker));
            if made != read && is_once && known.insert((*value, read)) {
                all.push(Shared { maker, result, places: [made, read], kind });
            }
        }
    }
    all
}
