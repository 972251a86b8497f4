//! A plan as a text that a person can edit, and back.
//!
//! The text is that of [`Plan`]'s `Display`, headed by comments that say what was asked for. Layouts may be
//! edited: the `mesh`, what a node does with each axis (`by m=dp`), the layouts that follow from it,
//! `transient` and `reduce_in_loop`. The graph may not: it is the model's, and a digest in the head
//! guards it. What is read back is verified, lowered and simulated, so its prediction is its own.

use super::Inspection;
use crate::agrees;
use crate::error::Error;
use crate::report;
use sha2::{Digest, Sha256};
use shardc_ir::plan::Request;
use shardc_ir::verify::{self, VerifiedPlan};
use shardc_ir::{Diagnostics, Plan};
use shardc_passes::cluster::Cluster;
use shardc_passes::simulate::Conditions;
use std::path::Path;

const HEAD: &str = "; shardc plan, to be edited: the mesh, `by FACTOR=AXES`, layouts, `transient`, `reduce_in_loop`";
const REQUEST: &str = "; request ";
const CHOICE: &str = "; choice ";
const GRAPH: &str = "; graph ";

/// The text of a plan, to be edited.
pub fn to_text(plan: &Plan) -> String {
    let request = serde_json::to_string(&plan.request).unwrap_or_default();
    format!("{HEAD}\n{REQUEST}{request}\n{CHOICE}{}\n{GRAPH}{}\n{plan}", plan.choice, digest(plan))
}

/// Whether a file's text is a plan as text.
pub fn is_text(text: &str) -> bool {
    text.starts_with(';') || text.starts_with("graph ")
}

/// The SHA-256 of the graph alone, without layouts, and of what the choice says about it.
fn digest(plan: &Plan) -> String {
    let of_graph = |part: &&str| {
        ["recompute", "loss_chunks", "overlap_chunks", "keep_casts"].iter().any(|word| part.contains(word))
    };
    let choices: Vec<&str> = plan.choice.split(',').filter(of_graph).collect();
    let text = format!("{}{}", plan.graph, choices.join(","));
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads an edited plan. `cluster` parses the cluster that the request names.
///
/// # Errors
/// Everything that is wrong, with its line: what cannot be read, layouts that are illegal, a graph that
/// was changed; more memory than there is.
pub fn from_text(
    path: &Path,
    text: &str,
    cluster: impl Fn(&str) -> Result<Cluster, Error>,
) -> Result<VerifiedPlan<'static>, Error> {
    let refuse = |message: String| {
        let fix = "edit the mesh and the layouts that `shardc explain PLAN --text FILE` wrote and what its first lines say of them, \
                   and leave the rest";
        Error::request(format!("{}: {message}", path.display()), fix)
    };
    let head = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.ok_or_else(|| refuse(format!("there is no line that begins with `{}`", key.trim())))
    };
    let request: Request = serde_json::from_str(head(REQUEST)?)
        .map_err(|error| refuse(format!("line {}: the request: {error}", line_of(text, REQUEST))))?;
    let cluster = cluster(&request.cluster)?;
    let illegal = |found: &Diagnostics| refuse(format!("the plan is not legal:\n{found}"));
    let mut plan: Plan = text.parse().map_err(|found| illegal(&found))?;
    let choice = head(CHOICE)?.to_string();
    (plan.request, plan.choice) = (request, choice);
    if digest(&plan) != head(GRAPH)?.trim() {
        let message = "the graph itself was changed (operations, operands, sizes, paths or roles, or what the choice says \
                       of recomputation and chunks)";
        return Err(refuse(message.to_string()));
    }
    let wrong = agrees::contradictions(&plan, &cluster);
    if !wrong.is_empty() {
        return Err(refuse(format!("what its first lines say is not so: {}", wrong.join("; "))));
    }
    let verified = verify::plan(plan).map_err(|found| illegal(&with_lines(text, found)))?;
    if let Some(unlowered) = report::unlowered(&verified) {
        return Err(refuse(format!("{unlowered}, so nothing tells what the edited plan takes")));
    }
    let prediction = Inspection::new(&verified, cluster, &Conditions::default())?.prediction();
    if let Some(more) = agrees::beyond(prediction.memory.total(), prediction.room) {
        return Err(refuse(format!("the edited plan needs {more} per rank")));
    }
    let mut plan: Plan = (*verified).clone();
    plan.prediction = prediction;
    verify::plan(plan).map_err(|found| illegal(&found))
}

fn line_of(text: &str, key: &str) -> usize {
    text.lines().position(|line| line.starts_with(key)).map_or(0, |at| at + 1)
}

/// The verifier names values; a person who edits wants the lines in which they are made.
fn with_lines(text: &str, mut found: Diagnostics) -> Diagnostics {
    let line = |place: &str| {
        let start = place.find('%')?;
        let name: String = place[start..].chars().take_while(|c| *c == '%' || c.is_ascii_digit()).collect();
        let makes = |line: &str| {
            let defined = line.trim_start().split(" = ").next().unwrap_or_default();
            defined.split(", ").any(|result| result.split(':').next() == Some(name.as_str()))
        };
        text.lines().position(makes).map(|at| at + 1)
    };
    for finding in &mut found.0 {
        if let Some(line) = line(&finding.place) {
            finding.place = format!("line {line}: {}", finding.place);
        }
    }
    found
}
