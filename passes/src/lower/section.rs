//! Which section each node belongs to.

use super::draft::Place;
use shardc_ir::{AxisSet, NodeId, OpDef, Plan, SecondaryMap, Strategy};

/// Whether a strategy divides anything over time, or passes partial sums over time.
fn in_loop(strategy: &Strategy, time: AxisSet) -> bool {
    strategy.factors.values().flatten().chain(strategy.pass.keys()).any(|axis| time.contains(*axis))
}

/// The section of each node. A node that divides something over time is in the loop; any other that
/// reads a value of the loop reads what was accumulated, in the epilogue; the rest does not depend on
/// the microbatch, and is in the prologue, or in the epilogue if only that reads it.
pub(super) fn place_nodes(plan: &Plan, time: AxisSet) -> SecondaryMap<NodeId, Place> {
    let mut places = SecondaryMap::with_default(Place::LOOP);
    if time.is_empty() {
        return places;
    }
    let graph = &plan.graph;
    for (id, node) in graph.nodes() {
        let after_loop = node.operands.iter().any(|value| places[graph.value(*value).def] != Place::Prologue);
        places[id] = match (in_loop(&plan.strategies[id], time), after_loop) {
            (true, _) => Place::LOOP,
            (false, true) => Place::Epilogue,
            (false, false) => Place::Prologue,
        };
    }
    let mut read_early: SecondaryMap<NodeId, bool> = SecondaryMap::new();
    let mut read: SecondaryMap<NodeId, bool> = SecondaryMap::new();
    for (id, node) in graph.nodes().rev() {
        if places[id] == Place::Prologue && !node.op.is_leaf() && read[id] && !read_early[id] {
            places[id] = Place::Epilogue;
        }
        for value in &node.operands {
            let def = graph.value(*value).def;
            read[def] = true;
            read_early[def] |= places[id] != Place::Epilogue;
        }
    }
    places
}
