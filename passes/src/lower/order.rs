//! In which order nodes are lowered: as they stand in the graph, but for the scales of weights in 8 bits.
//!
//! A scale is the largest of those that the ranks with parts of a weight find. Reduced where its weight is read, each
//! would be a collective of one number that the gather of the codes, and all kernels behind it, wait for. So these
//! weights are cast, scaled and divided before anything else: their scales are one collective, and what is gathered
//! later is there from the beginning.

use super::common::Layouts;
use shardc_ir::ops::Op;
use shardc_ir::{Graph, NodeId, PrimaryMap, SecondaryMap};

/// All nodes, in the order in which they are lowered.
pub(super) fn order(
    graph: &Graph,
    weights: &SecondaryMap<NodeId, bool>,
    layouts: &PrimaryMap<NodeId, Layouts>,
) -> Vec<NodeId> {
    let is_shared = |id: NodeId| weights[id] && !layouts[id].results[0].partial.is_empty();
    // What comes first: scales that ranks share, with all that they are made of, then what divides by them.
    let mut turn: SecondaryMap<NodeId, u8> = SecondaryMap::with_default(2);
    for (id, node) in graph.nodes().rev() {
        if turn[id] == 0 || matches!(node.op, Op::QuantizationScale(_)) && is_shared(id) {
            turn[id] = 0;
            node.operands.iter().for_each(|value| turn[graph.value(*value).def] = 0);
        }
    }
    for (id, node) in graph.nodes() {
        let (Op::Quantize(_), [weight, scale]) = (&node.op, &node.operands[..]) else { continue };
        // What must be gathered to be divided is divided where it is read.
        let weight = graph.value(*weight);
        let is_at_hand = layouts[weight.def].results[weight.index] == layouts[id].operands[0];
        if turn[graph.value(*scale).def] == 0 && is_at_hand {
            turn[id] = 1;
        }
    }
    let mut order: Vec<NodeId> = graph.nodes().map(|(id, _)| id).collect();
    order.sort_by_key(|id| turn[*id]);
    order
}
