//! A plan as a text that a person can edit, and back.
//!
//! The text is that of [`Plan`]'s `Display`, headed by comments that say what was asked for. Layouts may be
//! edited: the `mesh`, what a node does with each axis (`by m=dp`), the layouts that follow from it,
//! `transient` and `reduce_in_loop`. The graph may not: it is the model's, and a digest in the head
//! guards it, with a short one of each of its lines that tells which was changed. What is read back is
//! verified, lowered and simulated, so its prediction is its own. Of a plan that no program does (with parts on the
//! host, say) nothing simulates another one, so the text has its prediction, and is read back as it was written.

use super::Inspection;
use crate::agrees;
use crate::error::Error;
use crate::report;
use sha2::{Digest, Sha256};
use shardc_ir::plan::Request;
use shardc_ir::text::read_json;
use shardc_ir::verify::{self, VerifiedPlan};
use shardc_ir::{Diagnostics, Plan};
use shardc_passes::cluster::Cluster;
use shardc_passes::simulate::Conditions;
use std::path::Path;

const HEAD: &str = "; shardc plan, to be edited: the mesh, `by FACTOR=AXES`, layouts, `transient`, `reduce_in_loop`";
const REQUEST: &str = "; request ";
const CLUSTER: &str = "; cluster ";
const CHOICE: &str = "; choice ";
const GRAPH: &str = "; graph ";
const LINES: &str = "; lines ";
const PREDICTED: &str = "; predicted ";

/// The text of a plan, to be edited.
pub fn to_text(plan: &Plan) -> String {
    let request = serde_json::to_string(&plan.request).unwrap_or_default();
    let prediction = report::unlowered(plan).map(|_| serde_json::to_string(&plan.prediction).unwrap_or_default());
    let predicted = prediction.as_ref().map_or(String::new(), |prediction| format!("{PREDICTED}{prediction}\n"));
    let (cluster, choice, graph, lines) =
        (&plan.cluster, &plan.choice, digest(plan, prediction.as_deref()), digests(plan).join(" "));
    format!(
        "{HEAD}\n{REQUEST}{request}\n{CLUSTER}{cluster}\n{CHOICE}{choice}\n{GRAPH}{graph}\n{LINES}{lines}\n{predicted}{plan}"
    )
}

/// Whether a file's text is a plan as text.
pub fn is_text(text: &str) -> bool {
    text.starts_with(';') || text.starts_with("graph ")
}

/// The SHA-256 of the graph alone, without layouts, and of what the choice says about it; of the whole plan and of what is
/// predicted of it where no program does it.
fn digest(plan: &Plan, prediction: Option<&str>) -> String {
    if let Some(prediction) = prediction {
        return hexadecimal(&format!("{plan}{}{prediction}", plan.choice), usize::MAX);
    }
    let of_graph = |part: &&str| {
        ["recompute", "loss_chunks", "overlap_chunks", "keep_casts"].iter().any(|word| part.contains(word))
    };
    let choices: Vec<&str> = plan.choice.split(',').filter(of_graph).collect();
    hexadecimal(&format!("{}{}", plan.graph, choices.join(",")), usize::MAX)
}

/// The SHA-256 of a text, so many bytes of it.
fn hexadecimal(text: &str, bytes: usize) -> String {
    Sha256::digest(text).iter().take(bytes).map(|byte| format!("{byte:02x}")).collect()
}

/// Of each line of the graph alone.
fn digests(plan: &Plan) -> Vec<String> {
    plan.graph.to_string().lines().map(|line| hexadecimal(line, 3)).collect()
}

/// What of the graph is not what it was: its first line of which that is so, as it is now, or what the choice says of it.
fn changed(plan: &Plan, text: &str) -> String {
    let (graph, own) = (plan.graph.to_string(), digests(plan));
    let lines: Vec<&str> = graph.lines().collect();
    let known = text.lines().find_map(|line| line.strip_prefix(LINES));
    let known: Vec<&str> = known.map_or(Vec::new(), |known| known.split_whitespace().collect());
    let differs = |at: &usize| known.get(*at) != own.get(*at).map(String::as_str).as_ref();
    let first = (0..known.len().max(own.len())).find(differs).filter(|_| !known.is_empty());
    let Some(is) = first.and_then(|at| lines.get(at).or(lines.last())) else {
        let (graph, choice) = (line_of(text, GRAPH), line_of(text, CHOICE));
        return format!(
            "line {graph} belongs to another one, or to another choice of recomputation or chunks than line {choice}"
        );
    };
    let place = line_of_value(text, is).map_or(String::new(), |line| format!("line {line}: "));
    format!("{place}`{}` is not what the model has there", is.trim())
}

/// Reads an edited plan.
///
/// # Errors
/// Everything that is wrong, with its line: what cannot be read, layouts that are illegal, a graph that
/// was changed; more memory than there is.
pub fn from_text(path: &Path, text: &str) -> Result<VerifiedPlan<'static>, Error> {
    let refuse = |message: String| {
        let fix = "edit the mesh and the layouts that `shardc explain PLAN --text FILE` wrote and what its first lines say of them, \
                   and leave the rest";
        Error::request(format!("{}: {message}", path.display()), fix)
    };
    let head = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.ok_or_else(|| refuse(format!("there is no line that begins with `{}`", key.trim())))
    };
    let unreadable =
        |key: &str, of: &str, error: String| refuse(format!("line {}: the {of}: {error}", line_of(text, key)));
    let request: Request = read_json(head(REQUEST)?).map_err(|error| unreadable(REQUEST, "request", error))?;
    let cluster = read_json(head(CLUSTER)?).map_err(|error| unreadable(CLUSTER, "cluster", error))?;
    let illegal = |found: &Diagnostics| refuse(format!("the plan is not legal:\n{found}"));
    let mut plan: Plan = text.parse().map_err(|found| illegal(&found))?;
    let choice = head(CHOICE)?.to_string();
    (plan.request, plan.cluster, plan.choice) = (request, cluster, choice);
    let prediction = report::unlowered(&plan).map(|_| head(PREDICTED)).transpose()?;
    if let Some(text) = prediction {
        plan.prediction = read_json(text).map_err(|error| unreadable(PREDICTED, "prediction", error))?;
    }
    if digest(&plan, prediction) != head(GRAPH)?.trim() {
        if let Some(unlowered) = report::unlowered(&plan) {
            return Err(refuse(format!("{unlowered}, so nothing tells what the edited plan takes")));
        }
        return Err(refuse(format!("the graph itself was changed: {}", changed(&plan, text))));
    }
    let wrong = agrees::contradictions(&plan);
    if !wrong.is_empty() {
        return Err(refuse(format!("what its first lines say is not so: {}", wrong.join("; "))));
    }
    let verified = verify::plan(plan).map_err(|found| illegal(&with_lines(text, found)))?;
    if prediction.is_some() {
        return Ok(verified);
    }
    let prediction = Inspection::new(&verified, Cluster::of(&verified)?, &Conditions::default())?.prediction();
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

/// The line in which the first value is made that a place names.
fn line_of_value(text: &str, place: &str) -> Option<usize> {
    let start = place.find('%')?;
    let name: String = place[start..].chars().take_while(|c| *c == '%' || c.is_ascii_digit()).collect();
    let makes = |line: &str| {
        let defined = line.trim_start().split(" = ").next().unwrap_or_default();
        defined.split(", ").any(|result| result.split(':').next() == Some(name.as_str()))
    };
    text.lines().position(makes).map(|at| at + 1)
}

/// The verifier names values; a person who edits wants the lines in which they are made.
fn with_lines(text: &str, mut found: Diagnostics) -> Diagnostics {
    for finding in &mut found.0 {
        if let Some(line) = line_of_value(text, &finding.place) {
            finding.place = format!("line {line}: {}", finding.place);
        }
    }
    found
}
