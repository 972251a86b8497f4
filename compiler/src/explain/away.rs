//! What of a plan lies away from the devices: in the host's memory, or on its disk, of each stage by itself.

use super::names::{local, stage_of};
use shardc_ir::ops::{Op, Update};
use shardc_ir::plan::Space;
use shardc_ir::{Bytes, Plan, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// A line per kind and place; empty if everything lies on the device.
pub(super) fn text(plan: &Plan) -> String {
    let mut rows: BTreeMap<(u64, Space, &str), (usize, Bytes)> = BTreeMap::new();
    let gradients: BTreeSet<ValueId> = plan.graph.updates().map(|(_, node)| node.operands[Update::GRADIENT]).collect();
    for (value, _) in plan.graph.values() {
        let (space, maker) = (plan.spaces[value], plan.graph.def(value));
        if space == Space::Device {
            continue;
        }
        let kind = match &maker.op {
            Op::Parameter(_) => "parameters",
            Op::State(_) => "optimizer state",
            Op::Cast(_) if matches!(plan.graph.def(maker.operands[0]).op, Op::Parameter(_)) => "copies of parameters",
            _ if gradients.contains(&value) => "gradients",
            _ => "activations, per microbatch",
        };
        let stage = stage_of(plan, plan.graph.value(value).def).unwrap_or(0);
        let row = rows.entry((stage, space, kind)).or_default();
        *row = (row.0 + 1, row.1 + local(plan, value).bytes());
    }
    if rows.is_empty() {
        return String::new();
    }
    let mut text = String::from("\naway from the device while nothing reads it, per rank\n");
    for ((stage, space, kind), (count, bytes)) in rows {
        let of = if plan.stages() > 1 { format!("stage {stage}  ") } else { String::new() };
        let _ = writeln!(text, "  {of}{:6} {:>10}  {count} values: {kind}", space.name(), bytes.to_string());
    }
    text
}
