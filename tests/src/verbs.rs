//! The verbs of golden files, one line each in [`VERBS`].
//!
//! A verb takes the text of a case and the words after its name, and gives the text that the case
//! expects, or the findings. Arguments that a verb does not know are an error of the case.

use shardc_ir::plan::Request;
use shardc_ir::{Bytes, Diagnostics, Graph, NoScratch, OpDef, Plan, Program, verify};
use shardc_passes::PassError;
use shardc_passes::align::{align_head, align_weights};
use shardc_passes::chunk::chunk as chunked;
use shardc_passes::cluster::Cluster;
use shardc_passes::differentiate::differentiate as differentiated;
use shardc_passes::lower::lower_all;
use shardc_passes::optimizer::{OptimizerConfig, add_optimizer as optimized};
use shardc_passes::precision::{Precision, lower_precision as lowered};
use shardc_passes::quantize::quantize as quantized;
use shardc_passes::raise::raise;
use shardc_passes::search::{Pins, search};
use shardc_passes::statistics::share_statistics;

/// A verb: the case's text and the words after the verb give the expected text or findings.
pub type Verb = fn(&str, &[&str]) -> Result<String, Diagnostics>;

/// Every verb.
pub const VERBS: &[(&str, Verb)] = &[
    ("print", print),
    ("verify", verify),
    ("rule", rule),
    ("plan-print", plan_print),
    ("plan-verify", plan_verify),
    ("program-print", program_print),
    ("program-verify", program_verify),
    ("raise", |text, _| pass(text, |graph| Ok(raise(graph)?.0))),
    ("lower-precision", |text, _| pass(text, |graph| lowered(graph, Precision::Bf16))),
    ("differentiate", |text, _| pass(text, |graph| Ok(differentiated(graph, "loss")?.graph))),
    ("add-optimizer", |text, _| {
        pass(text, |graph| optimized(differentiated(graph, "loss")?, &OptimizerConfig::default()))
    }),
    ("align-head", |text, _| pass(text, align_head)),
    ("align-weights", |text, _| pass(text, align_weights)),
    ("share-statistics", |text, _| {
        let step = |graph: &Graph| optimized(differentiated(graph, "loss")?, &OptimizerConfig::default());
        pass(text, |graph| share_statistics(&step(graph)?))
    }),
    ("quantize", |text, _| pass(text, quantized)),
    ("chunk", chunk),
    ("lower", lower),
];

/// A finding about the case as a whole.
pub fn complain(message: impl Into<String>) -> Diagnostics {
    let mut found = Diagnostics::default();
    found.push("case", message);
    found
}

/// Runs a pass on the case's graph; what goes in and what comes out is verified.
fn pass(text: &str, run: impl Fn(&Graph) -> Result<Graph, PassError>) -> Result<String, Diagnostics> {
    let graph: Graph = text.parse()?;
    verify::graph(&graph)?;
    let result = run(&graph).map_err(|error| complain(error.to_string()))?;
    verify::graph(&result)?;
    Ok(result.to_string())
}

/// `chunk N`: the training step of a loss, with its head in `N` chunks.
fn chunk(text: &str, arguments: &[&str]) -> Result<String, Diagnostics> {
    let chunks = match arguments {
        [count] => count.parse().map_err(|_| complain(format!("`{count}` is not a number of chunks")))?,
        _ => return Err(complain("takes the number of chunks")),
    };
    let step = |graph: &Graph| optimized(differentiated(graph, "loss")?, &OptimizerConfig::default());
    pass(text, |graph| Ok(chunked(&step(graph)?, chunks)?.0))
}

fn no_arguments(arguments: &[&str]) -> Result<(), Diagnostics> {
    if arguments.is_empty() { Ok(()) } else { Err(complain(format!("takes no arguments, not {arguments:?}"))) }
}

/// `print`: the graph with numbered values, which must read back as the same graph.
fn print(text: &str, arguments: &[&str]) -> Result<String, Diagnostics> {
    no_arguments(arguments)?;
    let graph: Graph = text.parse()?;
    let printed = graph.to_string();
    if printed.parse::<Graph>()? == graph { Ok(printed) } else { Err(complain("the graph does not round-trip")) }
}

/// `verify`: the facts of a valid graph.
fn verify(text: &str, arguments: &[&str]) -> Result<String, Diagnostics> {
    no_arguments(arguments)?;
    let graph: Graph = text.parse()?;
    let facts = verify::graph(&graph)?;
    let count = [facts.inputs.len(), facts.parameters.len(), facts.states.len(), facts.updates.len()];
    Ok(format!("inputs {}, parameters {}, states {}, updates {}\n", count[0], count[1], count[2], count[3]))
}

/// `rule`: each node's factor rule.
fn rule(text: &str, arguments: &[&str]) -> Result<String, Diagnostics> {
    no_arguments(arguments)?;
    let graph: Graph = text.parse()?;
    let nodes = graph.nodes().filter(|(_, node)| !node.op.is_leaf());
    let line = |(id, node): (_, &shardc_ir::Node)| {
        let rule = graph.rule(id);
        let linear: String = rule.linear.iter().map(|set| format!("|linear {set:?}")).collect();
        format!("{}: {rule}{linear}\n", node.op.name())
    };
    Ok(nodes.map(line).collect())
}

/// `plan-print`: the plan as it prints, which must read back as the same plan, from its file too.
fn plan_print(text: &str, arguments: &[&str]) -> Result<String, Diagnostics> {
    no_arguments(arguments)?;
    let plan: Plan = text.parse()?;
    let printed = plan.to_string();
    let from_file = Plan::from_json(&plan.to_json()).map_err(|error| complain(error.to_string()))?;
    if printed.parse::<Plan>()? == plan && from_file == plan {
        return Ok(printed);
    }
    Err(complain("the plan does not round-trip"))
}

/// `plan-verify`: when each node of a valid plan runs, and where layouts are converted.
fn plan_verify(text: &str, arguments: &[&str]) -> Result<String, Diagnostics> {
    no_arguments(arguments)?;
    let plan: Plan = text.parse()?;
    let verified = verify::plan(&plan)?;
    let mut lines = String::new();
    for (id, node) in plan.graph.nodes().filter(|(_, node)| !node.op.is_leaf()) {
        lines += &format!("{} {}: {:?}\n", plan.graph.result(id), node.op.name(), verified.phase(id));
    }
    for conversion in &verified.facts().conversions {
        let layout = |sharding: &shardc_ir::Sharding| {
            let dims: Vec<_> = (0..sharding.dims.len()).map(|dim| sharding.dim_text(dim, &plan.mesh)).collect();
            format!("[{}]{}", dims.join(","), sharding.partial_text(&plan.mesh))
        };
        let reader = match conversion.reader {
            Some(node) => plan.graph.result(node).to_string(),
            None => format!("\"{}\"", plan.graph.outputs[conversion.index].name),
        };
        let (from, to) = (layout(&conversion.from), layout(&conversion.to));
        lines += &format!("{} to {reader}: {from} -> {to}\n", conversion.value);
    }
    Ok(lines)
}

/// `program-print`: the programs as they print, which must read back as the same programs.
fn program_print(text: &str, arguments: &[&str]) -> Result<String, Diagnostics> {
    no_arguments(arguments)?;
    let programs = Program::parse_all(text)?;
    let printed: String = programs.iter().map(ToString::to_string).collect();
    if Program::parse_all(&printed)? == programs {
        return Ok(printed);
    }
    Err(complain("the programs do not round-trip"))
}

/// `program-verify`: the facts of valid programs of all ranks.
fn program_verify(text: &str, arguments: &[&str]) -> Result<String, Diagnostics> {
    no_arguments(arguments)?;
    let programs = Program::parse_all(text)?;
    let verified = verify::program(&programs)?;
    let facts = verified.facts();
    let arenas: String =
        facts.arenas.iter().map(|(space, bytes)| format!("{} {} bytes\n", space.name(), bytes.0)).collect();
    Ok(format!("{arenas}{} meetings\n", facts.rendezvous))
}

/// `lower CLUSTER PINS`: the training step of a loss under the plan with these pins; the program of the
/// last rank, whose parts do not begin at 0.
fn lower(text: &str, arguments: &[&str]) -> Result<String, Diagnostics> {
    let [cluster, pins] = arguments else { return Err(complain("takes a cluster and pins")) };
    let graph: Graph = text.parse()?;
    let config = OptimizerConfig { clip_grad_norm: None, ..OptimizerConfig::default() };
    let differentiated = differentiated(&graph, "loss").map_err(|error| complain(error.to_string()))?;
    let step = optimized(differentiated, &config).map_err(|error| complain(error.to_string()))?;
    let batch = graph.leaves().find_map(|(value, _)| graph.ty(value).shape.first().copied()).unwrap_or(1);
    let request = Request { batch, device_memory: Bytes(1 << 40), ..Request::default() };
    let cluster = Cluster::parse(cluster, "h200").map_err(|error| complain(error.to_string()))?;
    let pins = Pins::parse(pins).map_err(|error| complain(error.to_string()))?;
    let plan = search(&step, &cluster, &request, &pins, &NoScratch).map_err(|error| complain(error.to_string()))?;
    let plan = verify::plan(plan)?;
    let programs = lower_all(&plan, &NoScratch).map_err(|error| complain(error.to_string()))?;
    let programs = verify::step(&plan, programs)?;
    Ok(programs.last().map(ToString::to_string).unwrap_or_default())
}
