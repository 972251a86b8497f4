//! A plan as text: the page of `shardc plan`, its layouts by module, its collectives, its simulated step.

use super::{Inspection, away, collectives, layers, stages};
use crate::report;
use shardc_ir::program::Stream;
use shardc_ir::{Family, Seconds};
use shardc_passes::simulate::Rank;
use std::fmt::Write;

/// The collectives that are listed; those left out are counted.
const MOST: usize = 24;

/// All of `shardc explain PLAN`.
pub fn plan(inspection: &Inspection<'_>) -> String {
    let mut text = report::plan_text(inspection.plan);
    text.push_str(&mesh(inspection));
    text.push_str(&away::text(inspection.plan));
    if let Some(unlowered) = report::unlowered(inspection.plan) {
        let stages = if inspection.plan.stages() > 1 { "stages, " } else { "" };
        let _ = writeln!(text, "\n{unlowered}; {stages}collectives and the simulated step below are those of programs");
    }
    text.push_str(&stages::text(inspection));
    text.push_str(&layouts(inspection));
    text.push_str(&moved(inspection));
    text.push_str(&step(inspection));
    text
}

/// What each axis is, and over which links its groups lie.
fn mesh(inspection: &Inspection<'_>) -> String {
    let (mesh, cluster) = (&inspection.plan.mesh, &inspection.cluster);
    let mut text = String::from("\nmesh, outermost axis first\n");
    if mesh.axes.is_empty() {
        text.push_str("  one rank, one microbatch\n");
    }
    for id in mesh.ids() {
        let axis = mesh.axis(id);
        let what = match axis.family {
            Family::Microbatch => "microbatches, one after the other".to_string(),
            family => {
                let ranks = mesh.group(0, &[id]);
                let span = ranks.iter().map(|rank| rank / cluster.per_node).collect::<std::collections::BTreeSet<_>>();
                let where_ = match span.len() {
                    1 => "within a node".to_string(),
                    nodes => format!("across {nodes} nodes"),
                };
                let name = match family {
                    Family::Pipeline => "pipeline stages",
                    Family::Data | Family::Microbatch => "data ranks",
                    Family::Fsdp => "data ranks that store parameters in parts",
                    Family::Expert => "expert ranks",
                    Family::Ring | Family::Ulysses | Family::Context => "context ranks",
                    Family::Tensor => "tensor ranks",
                };
                format!("{name}, {where_}; rank 0 meets {}", few(&ranks))
            }
        };
        let _ = writeln!(text, "  {:6} {:>6}  {what}", axis.name(), axis.size);
    }
    text
}

/// The first ranks of a list.
fn few(ranks: &[u64]) -> String {
    let shown: Vec<String> = ranks.iter().skip(1).take(4).map(ToString::to_string).collect();
    let more = if ranks.len() > 5 { ", ..." } else { "" };
    format!("{}{more}", shown.join(", "))
}

/// Layouts by module; of what is alike, one.
fn layouts(inspection: &Inspection<'_>) -> String {
    let all = layers::alike(inspection.plan);
    let mut text = String::from("\nlayouts (size@axes per dimension; /sum(axes) is a partial sum)\n");
    let name = |layers::Alike { row, family, .. }: &layers::Alike| match family {
        Some((family, _)) => format!("  {}", row.name.strip_prefix(&format!("{family}.")).unwrap_or(&row.name)),
        None => row.name.clone(),
    };
    let widest = |of: &dyn Fn(&layers::Alike) -> usize| all.iter().map(of).max().unwrap_or(0);
    let names = widest(&|of| name(of).len());
    let (ops, layouts) = (widest(&|of| of.row.op.len()), widest(&|of| of.row.layout.len()));
    let mut before = None;
    for of in &all {
        let layers::Alike { row, family } = of;
        if let Some((name, blocks)) = family.as_ref().filter(|_| *family != before) {
            let _ = writeln!(text, "  {name} ({blocks} alike)");
        }
        before.clone_from(family);
        let blocks = family.as_ref().map_or(1, |(_, blocks)| *blocks);
        let count = row.count;
        let times = match (count / blocks, count % blocks) {
            (1, 0) => String::new(),
            _ if family.is_none() => format!("  ({count} alike)"),
            (each, 0) => format!("  ({each} each)"),
            _ => format!("  ({count} of them)"),
        };
        let (name, bytes, by) = (name(of), row.bytes.to_string(), row.strategy.replace(' ', ", "));
        let line = format!("  {name:names$}  {:ops$}  {:layouts$}  {bytes:>10}  {by}", row.op, row.layout);
        let _ = writeln!(text, "{}{times}", line.trim_end());
    }
    text
}

/// The collectives.
fn moved(inspection: &Inspection<'_>) -> String {
    let rows = collectives::rows(inspection);
    let mut text = String::from("\ncollectives of a step");
    if rows.is_empty() {
        return text + ": none\n";
    }
    text.push('\n');
    let width = rows.iter().take(MOST).map(|row| row.of.len()).max().unwrap_or(0).max(2);
    let is_staged = rows.iter().any(|row| row.stage.is_some());
    let stage = |stage: String| if is_staged { format!("{stage:>5}  ") } else { String::new() };
    let _ = writeln!(
        text,
        "  {}{:14} {:8} {:>6} {:>10} {:>10} {:>10}  {:>6}  of",
        stage("stage".to_string()),
        "what",
        "over",
        "times",
        "bytes each",
        "time each",
        "in all",
        "hidden"
    );
    for row in rows.iter().take(MOST) {
        let each = Seconds(row.seconds.0 / row.count.max(1) as f64);
        let hidden = 100.0 * row.hidden.0 / row.seconds.0.max(f64::MIN_POSITIVE);
        let more = if row.tensors > 1 { format!(" and {} more", row.tensors - 1) } else { String::new() };
        let _ = writeln!(
            text,
            "  {}{:14} {:8} {:>6} {:>10} {:>10} {:>10}  {hidden:>5.0}%  {:width$}  {}",
            stage(row.stage.unwrap_or(0).to_string()),
            row.kind,
            row.over,
            row.count,
            row.bytes.to_string(),
            each.to_string(),
            row.seconds.to_string(),
            format!("{}{more}", row.of),
            row.role,
        );
    }
    if rows.len() > MOST {
        let rest: Seconds = rows[MOST..].iter().map(|row| row.seconds).sum();
        let _ = writeln!(text, "  {} more kinds, {rest} in all (--json lists them)", rows.len() - MOST);
    }
    text
}

/// What the simulation says of the step, by classes of ranks.
pub fn step(inspection: &Inspection<'_>) -> String {
    let simulated = &inspection.simulated;
    let predicted = inspection.plan.prediction.step;
    let mut text = match report::unlowered(inspection.plan) {
        Some(unlowered) => {
            let theirs = simulated.step;
            format!("\npredicted step {predicted}, which is not simulated: {unlowered}; their step takes {theirs}\n")
        }
        None => {
            let off = 100.0 * (simulated.step.0 / predicted.0 - 1.0);
            format!("\nsimulated step {} ({off:+.1}% of the plan's {predicted})\n", simulated.step)
        }
    };
    let _ = writeln!(
        text,
        "  {:>6} {:>6} {:>10} {:>10} {:>13} {:>10} {:>10}",
        "rank", "alike", "compute", "idle", "communication", "exposed", "waiting"
    );
    for rank in &simulated.ranks {
        let busy = rank.busy[Stream::Compute as usize];
        let _ = writeln!(
            text,
            "  {:>6} {:>6} {:>10} {:>10} {:>13} {:>10} {:>10}",
            rank.rank,
            rank.count,
            busy.to_string(),
            idle(rank, simulated.step).to_string(),
            rank.communication.to_string(),
            rank.exposed_communication.to_string(),
            rank.waiting.to_string(),
        );
    }
    text
}

/// The time of a step in which a rank runs no kernel.
pub fn idle(rank: &Rank, step: Seconds) -> Seconds {
    Seconds((step.0 - rank.busy[Stream::Compute as usize].0).max(0.0))
}
