//! What of a plan lies away from the device: in the host's memory, or on its disk.

use super::names::local;
use shardc_ir::ops::Op;
use shardc_ir::plan::Space;
use shardc_ir::{Bytes, Plan};
use std::collections::BTreeMap;
use std::fmt::Write;

/// A line per kind and place; empty if everything lies on the device.
pub(super) fn text(plan: &Plan) -> String {
    let mut rows: BTreeMap<(Space, &str), (usize, Bytes)> = BTreeMap::new();
    for (value, _) in plan.graph.values() {
        let (space, maker) = (plan.spaces[value], plan.graph.def(value));
        if space == Space::Device {
            continue;
        }
        let kind = match &maker.op {
            Op::Parameter(_) => "parameters",
            Op::State(_) => "optimizer state",
            Op::Cast(_) if matches!(plan.graph.def(maker.operands[0]).op, Op::Parameter(_)) => "copies of parameters",
            _ => "activations, per microbatch",
        };
        let row = rows.entry((space, kind)).or_default();
        *row = (row.0 + 1, row.1 + local(plan, value).bytes());
    }
    if rows.is_empty() {
        return String::new();
    }
    let mut text = String::from("\naway from the device while nothing reads it, per rank\n");
    for ((space, kind), (count, bytes)) in rows {
        let _ = writeln!(text, "  {:6} {:>10}  {count} values: {kind}", space.name(), bytes.to_string());
    }
    text
}
