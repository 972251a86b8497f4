//! Tables of what was measured.

use super::measure::Planned;
use std::fmt::Write;

/// Plans as a table in Markdown.
pub fn table(title: &str, rows: &[Planned]) -> String {
    let mut text =
        format!("\n{title}\n\n| model | size | cluster | devices | planned in | gap | meshes | left out | plan |\n");
    text.push_str("|---|---|---|---|---|---|---|---|---|\n");
    for row in rows {
        let Planned { model, cluster, devices, size, seconds, choice, gap, meshes: [meshes, pruned] } = row;
        let gap = 100.0 * gap;
        let _ = writeln!(
            text,
            "| {model} | {size} | {cluster} | {devices} | {seconds:.2} s | {gap:.2}% | {meshes} | {pruned} | {choice} |"
        );
    }
    text
}
