//! `verify`: is a plan legal, and does it compute what one device computes?
//!
//! Statically: the plan's layouts, that its graph and mesh are those of the model, batch, precision and cluster it
//! names, that it needs no more memory than there is, its programs' memory, that every collective is entered by all of
//! its ranks in the same order, and that the programs compute the plan's graph. Numerically: the model with fewer layers and
//! smaller dimensions in fp32, under the same degrees, schedule and kind of recomputation, on CPU ranks and on one; losses,
//! gradient norms and averaged gradients of a few steps must agree. Where programs do not do what is planned yet (values that lie
//! away from the device, rings), what they do is shown all the same, and the report says what it is without.
//!
//! The dimensions shrink so that the plan's axes still divide what they divided. A mesh of more
//! than [`MOST_RANKS`] ranks shrinks too, each degree for itself, and the report says so.

use crate::agrees;
use crate::compile::{Compiled, compile};
use crate::error::Error;
use crate::learning_rate::{Decay, LearningRate};
use crate::model::NamedModel;
use crate::options::{Batch, Options};
use crate::pipeline;
use crate::report;
use crate::train::{TrainOptions, Weights};
use serde::Serialize;
use shardc_ir::pipeline::Schedule;
use shardc_ir::plan::Prediction;
use shardc_ir::verify::VerifiedPlan;
use shardc_ir::{DType, Family, Graph, HostTensor, Mesh, Op, OpDef, Pipeline, Plan, Program, TensorType};
use shardc_passes::allocate::memory;
use shardc_passes::cluster::{Cluster, ClusterError};
use shardc_passes::precision::Precision;
use shardc_passes::random::mix;
use shardc_passes::search::{Degrees, Pins, Recompute};
use shardc_passes::simulate;

/// The largest number of ranks that are run, or whose programs are all lowered and compared.
const MOST_RANKS: u64 = 16;
/// The steps that are compared: enough that the optimizer's state matters.
const STEPS: u64 = 3;
/// With how many draws of numbers the steps are run, of a model with [kinks](has_kinks), until those of a plan agree with
/// those of one device. Where a number is zero but for rounding, rounding decides where gradients go, and Adam makes a step
/// of its own size of the difference. That spoils some draws; what is computed wrongly is wrong in all.
const DRAWS: u64 = 16;
/// The samples of a microbatch on one data rank, where they are no sequences.
const SAMPLES: u64 = 4;
/// How far apart the losses may be, relative.
const LOSS: f64 = 1e-4;
/// How far apart gradient norms may be, relative.
const NORM: f64 = 1e-3;
/// How far apart the averaged gradients may be, relative to the largest of all.
const MOMENT: f64 = 1e-4;

/// One check and how it went.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// What was checked.
    pub check: String,
    /// Whether it holds; `None` if it was not checked.
    pub ok: Option<bool>,
    /// What was found.
    pub detail: String,
}

/// Every check of a plan, static ones first. `numeric` runs the shrunken model too.
pub fn verify(plan: &Plan, numeric: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |check: &str, ok: Option<bool>, detail: String| {
        findings.push(Finding { check: check.to_string(), ok, detail });
    };
    match shardc_ir::verify::plan(plan) {
        Ok(plan) => {
            add("layouts", Some(true), format!("{} nodes on {}", plan.graph.node_count(), mesh_text(&plan)));
            check_request(&plan, &mut add);
            check_programs(&plan, &mut add);
        }
        Err(found) => add("layouts", Some(false), found.to_string()),
    }
    if !numeric {
        return findings;
    }
    // A model that is no built-in and no directory is in the program that made the plan.
    let model = match NamedModel::find(&plan.request.model) {
        Ok(model) => model,
        Err(error) => {
            add("numbers", None, format!("not compared: {error}"));
            return findings;
        }
    };
    match compare(&model, plan) {
        Ok(numbers) => findings.extend(numbers),
        Err(error) => {
            let (check, detail) = ("numbers".to_string(), error.to_string());
            findings.push(Finding { check, ok: Some(false), detail });
        }
    }
    findings
}

/// Whether the plan is of the model, the cluster and the budget for which it says it is.
fn check_request(plan: &Plan, add: &mut impl FnMut(&str, Option<bool>, String)) {
    let model = &plan.request.model;
    let wrong = agrees::contradictions(plan);
    match NamedModel::find(model) {
        _ if !wrong.is_empty() => add("request", Some(false), wrong.join("; ")),
        // What lies elsewhere says nothing about the plan.
        Err(error) => add("request", None, format!("not compared with its model: {error}")),
        Ok(_) => add("request", Some(true), format!("the graph and the mesh are of {model}")),
    }
    let prediction = &plan.prediction;
    let (needed, room) = (prediction.memory.total(), prediction.room.min(plan.request.device_memory));
    match agrees::over_budget(plan) {
        None => add("budget", Some(true), format!("{needed} per rank, of {room}")),
        Some(more) => add("budget", Some(false), more),
    }
}

fn check_programs(plan: &VerifiedPlan<'_>, add: &mut impl FnMut(&str, Option<bool>, String)) {
    let ranks = plan.mesh.ranks();
    let shown = match ranks > MOST_RANKS {
        true => pipeline::cover(plan).map(|(programs, shown)| (fullest(&programs, plan), shown)),
        false => {
            pipeline::programs(plan, None).map(|programs| (fullest(&programs, plan), programs.facts().translation))
        }
    };
    let (taken, shown) = match shown {
        Ok(shown) => shown,
        Err(error) => return add("programs", Some(false), error.to_string()),
    };
    let detail = match ranks > MOST_RANKS {
        true => format!(
            "of {ranks} ranks {} that tell the axes apart have one program{} but for coordinates: none waits forever",
            shown.ranks,
            if plan.stages() > 1 { " per stage" } else { "" }
        ),
        false => "memory, order and collectives of all ranks agree".to_string(),
    };
    add("programs", Some(true), detail);
    let (kernels, conversions) = (shown.kernels, shown.conversions);
    let what = if plan.stages() > 1 { "changes of layout and messages" } else { "changes of layout" };
    let without = without(plan);
    let detail = format!("{kernels} kernels and {conversions} {what} compute the graph of one device{without}");
    add("equality", Some(true), detail);
    if let Some(unlowered) = report::unlowered(plan) {
        return add("memory", None, format!("not compared: {unlowered}"));
    }
    let taken = match taken {
        Ok(taken) => taken,
        Err(error) => return add("memory", Some(false), error.to_string()),
    };
    let sizes =
        |of: &Prediction| [(of.memory.total(), "allocated"), (of.room, "for a rank"), (of.host, "of each host")];
    let rows: Vec<_> = sizes(&taken).into_iter().zip(sizes(&plan.prediction)).collect();
    let wrong = rows.iter().find(|((is, _), (said, _))| is != said);
    let ((is, what), (said, _)) = wrong.unwrap_or(&rows[0]);
    let [is, said] = agrees::apart(*is, *said);
    add("memory", Some(wrong.is_none()), format!("{is} {what}, {said} planned"));
}

/// What is allocated on the rank of which the plan tells the memory, and what there is.
fn fullest(programs: &[Program], plan: &Plan) -> Result<Prediction, ClusterError> {
    let taken = programs.iter().map(|program| (program.rank, memory(program)));
    Ok(simulate::fullest(taken, plan, &Cluster::of(plan)?))
}

/// What of a plan is not in what is shown of its programs.
fn without(plan: &Plan) -> String {
    report::unlowered_names(plan).map_or(String::new(), |names| format!(", without {names}"))
}

fn mesh_text(plan: &Plan) -> String {
    if plan.mesh.axes.is_empty() { "one rank".to_string() } else { plan.mesh.to_string() }
}

/// The degrees of a plan, shrunk to what can be run here.
struct Shrunk {
    /// Ranks among which the batch is divided.
    data: u64,
    /// Ranks among which dimensions of the model are: heads, widths, the sequence.
    inner: u64,
    /// Pipeline stages.
    stages: u64,
    microbatches: u64,
    /// Of a microbatch on one data rank.
    samples: u64,
    pins: String,
}

fn shrunk(plan: &Plan, samples: u64) -> Shrunk {
    const INNER: [Family; 3] = [Family::Ulysses, Family::Context, Family::Tensor];
    let of =
        |mesh: &Mesh, family: Family| mesh.family(family).into_iter().map(|axis| mesh.size(axis)).collect::<Vec<_>>();
    let families = Family::DATA.into_iter().chain(INNER);
    let mut degrees =
        families.fold(Degrees::new(samples), |degrees, family| degrees.with(family, &of(&plan.mesh, family)));
    let product =
        |degrees: &Degrees, families: &[Family]| families.iter().map(|family| degrees.degree(*family)).product::<u64>();
    if degrees.data() * product(&degrees, &INNER) > MOST_RANKS {
        for family in [&Family::DATA[..], &INNER[..2]].concat() {
            let size = degrees.degree(family);
            let most = if family == Family::Data { 2 } else { size.min(2) };
            degrees = degrees.with(family, &[largest_factor(size, most)]);
        }
        let left = (MOST_RANKS / (degrees.data() * product(&degrees, &INNER[..2]))).max(1);
        let tensor = largest_factor(degrees.degree(Family::Tensor), left.min(8));
        degrees = degrees.with(Family::Tensor, &[tensor]);
    }
    let (data, inner) = (degrees.data(), product(&degrees, &INNER));
    let chosen = Pins::chosen(plan);
    let zero = chosen.zero.filter(|_| data * product(&degrees, &INNER[..2]) > 1).unwrap_or(0);
    // Chunks that overlap are as good in any number; of a single sample the tokens are cut.
    let (samples, chunks) = match chosen.overlap_chunks.filter(|chunks| *chunks > 1) {
        Some(_) if chosen.microbatch == Some(1) => (1, ",overlap_chunks=2"),
        Some(_) => (2 * samples, ",overlap_chunks=2"),
        None => (samples, ""),
    };
    let mut pins = format!("{},zero={zero},microbatch={samples},{}{chunks}", degrees.text(), recompute(&chosen));
    let stages = plan.stages().min(2);
    if stages > 1 {
        let Pipeline { schedule, per_stage, .. } = &plan.pipeline;
        // As many for each stage; chunks are interleaved in one way of so few microbatches.
        let limits = plan.pipeline.limits().into_iter().filter(|_| *schedule != Schedule::Interleaved);
        let limit = |(name, chunks): (&str, Option<u64>)| {
            Some(format!(",{name}={}", chunks?.saturating_mul(stages).div_ceil(plan.stages())))
        };
        let limits: String = limits.filter_map(limit).collect();
        pins = format!("pp={stages},schedule={},virtual={per_stage}{limits},{pins}", schedule.name());
    }
    Shrunk { data, inner, stages, microbatches: plan.mesh.microbatches().min(2), samples, pins }
}

/// The pin of what is computed again: of the first stage and the last, if stages differ.
fn recompute(chosen: &Pins) -> String {
    if let [first, .., last] = &chosen.stage_recompute[..] {
        return format!("stage_recompute={first}/{last}");
    }
    let recompute = match chosen.recompute {
        None | Some(Recompute::None) => Recompute::None,
        Some(Recompute::Values(_) | Recompute::Blocks(_)) => Recompute::Blocks(1),
        Some(other) => other,
    };
    format!("recompute={recompute}")
}

/// The largest divisor of `number` that is at most `limit`.
fn largest_factor(number: u64, limit: u64) -> u64 {
    (1..=limit).rev().find(|divisor| number.is_multiple_of(*divisor)).unwrap_or(1)
}

/// The shrunken model under the plan's choices and on one device.
fn compare(model: &NamedModel, plan: &Plan) -> Result<Vec<Finding>, Error> {
    // Statistics of a batch need samples to be those of anything.
    let samples = if model.vocabulary().is_some() { 1 } else { SAMPLES };
    let Shrunk { data, inner, stages, microbatches, samples, pins } = shrunk(plan, samples);
    let mut config = model.config.shrunk(data, inner);
    // Stages that compute blocks again are cut between blocks, so there is one for each chunk.
    let chunks = if stages > 1 { stages * plan.pipeline.per_stage } else { 1 };
    if let Some(layers) = config.layers() {
        *layers = (*layers).max(chunks as usize);
    }
    let small = NamedModel::from_config("shrunken", config);
    let seq = if model.vocabulary().is_some() { 8 * inner } else { 0 };
    let batch = Batch { batch: data * microbatches * samples, seq };
    let compiled = |cluster: String, pins: &str| {
        let cluster = Cluster::parse(&cluster, "h200")?;
        let options = Options { precision: Some(Precision::Fp32), pins: pins.to_string(), ..Options::default() };
        compile(&small, batch, &cluster, &options)
    };
    let whole = compiled("cpu:1".to_string(), "")?;
    let spread = compiled(format!("cpu:{}", stages * data * inner), &pins)?;
    let draws = if has_kinks(&plan.graph) { DRAWS } else { 1 };
    let run = |draw| Ok(distances(&train(&small, &spread, draw)?, &train(&small, &whole, draw)?));
    let (draw, rows) = first_alike(draws, &run)?;
    let drawn = if draw == 0 { String::new() } else { format!("; with the numbers of draw {} of {DRAWS}", draw + 1) };
    // No CPU rank sends parts round a ring, so small models have none.
    let is_said = plan.mesh.family(Family::Ring).is_empty() || report::unlowered_names(plan).is_some();
    let without = without(plan) + if is_said { "" } else { ", without the axis ring" };
    let finding = |distance: Distance| {
        let (is_near, Distance { check, worst, bound }) = (distance.is_near(), distance);
        let of = format!("({pins} on a small model{without}{drawn})");
        let detail = format!("off by {worst:.1e} at most over {STEPS} steps, {bound:.0e} allowed {of}");
        Finding { check: check.to_string(), ok: Some(is_near), detail }
    };
    Ok(rows.into_iter().map(finding).collect())
}

/// How far apart two runs are in something, relative, and how far they may be.
#[derive(Clone, Debug, PartialEq)]
struct Distance {
    check: &'static str,
    worst: f64,
    bound: f64,
}

impl Distance {
    /// Whether it is allowed; of what is no number, none is.
    fn is_near(&self) -> bool {
        self.worst <= self.bound
    }
}

/// The first draw in which the runs agree in everything, or if they do in none, the one in which they are nearest.
fn first_alike(draws: u64, run: &dyn Fn(u64) -> Result<Vec<Distance>, Error>) -> Result<(u64, Vec<Distance>), Error> {
    let excess = |of: &Distance| if of.worst.is_nan() { f64::INFINITY } else { of.worst / of.bound };
    let most = |rows: &[Distance]| rows.iter().map(excess).fold(0.0, f64::max);
    let mut nearest = (0, run(0)?);
    for draw in 1..draws {
        if most(&nearest.1) <= 1.0 {
            break;
        }
        let rows = run(draw)?;
        if most(&rows) < most(&nearest.1) {
            nearest = (draw, rows);
        }
    }
    Ok(nearest)
}

/// Whether a model's numbers or gradients jump somewhere.
fn has_kinks(graph: &Graph) -> bool {
    graph.nodes().any(|(id, node)| node.op.has_kink(&graph.operand_types(id)))
}

/// How far a run is from that on one device.
fn distances(spread: &Outcome, whole: &Outcome) -> Vec<Distance> {
    // What is no number agrees with nothing.
    let most = |worst: f64, next: f64| if worst.is_nan() || next.is_nan() { f64::NAN } else { worst.max(next) };
    let relative = |a: f64, b: f64| (a - b).abs() / b.abs().max(1e-12);
    let worst = |pick: fn(&(f64, f64)) -> f64| {
        let pairs = spread.metrics.iter().zip(&whole.metrics);
        pairs.map(|(a, b)| relative(pick(a), pick(b))).fold(0.0, most)
    };
    // First moments, not parameters: where a gradient is zero but for rounding (a key's bias), Adam
    // moves the parameter by the rounding's sign.
    let largest = whole.moments.iter().flat_map(values).fold(0.0, |largest: f64, value| largest.max(value.abs()));
    let pairs = whole.moments.iter().zip(&spread.moments).flat_map(|(a, b)| values(a).zip(values(b)));
    let off = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, most);
    vec![
        Distance { check: "loss", worst: worst(|step| step.0), bound: LOSS },
        Distance { check: "gradient norm", worst: worst(|step| step.1), bound: NORM },
        Distance { check: "moments", worst: off / largest.max(1e-12), bound: MOMENT },
    ]
}

/// What a short run gave: loss and gradient norm of each step, and the optimizer's first moments.
struct Outcome {
    metrics: Vec<(f64, f64)>,
    moments: Vec<HostTensor>,
}

/// A short run with the numbers of a draw.
fn train(model: &NamedModel, compiled: &Compiled, draw: u64) -> Result<Outcome, Error> {
    let learning_rate = LearningRate { rate: 1e-3, min_rate: 0.0, warmup: 0, decay: Decay::Constant, steps: STEPS };
    let weights: Box<dyn Weights> = model.weights()?;
    let mut trainer = compiled.start(weights.as_ref(), TrainOptions { learning_rate, seed: 1 })?;
    let mut metrics = Vec::new();
    for step in draw * STEPS..(draw + 1) * STEPS {
        let inputs = compiled.model.inputs.iter();
        let step =
            trainer.step(inputs.map(|(name, ty)| (name.clone(), feed(model, name, ty, step).into())).collect())?;
        metrics.push((step.loss, step.grad_norm));
    }
    let names: Vec<String> = compiled.model.graph.leaves().filter_map(|(_, node)| trained(&node.op)).collect();
    let moments = names.iter().map(|name| trainer.gather(&format!("{name}.m"))).collect::<Result<_, _>>()?;
    Ok(Outcome { metrics, moments })
}

/// The name of a trained parameter.
fn trained(op: &Op) -> Option<String> {
    match op {
        Op::Parameter(parameter) if !parameter.frozen => Some(parameter.name.clone()),
        _ => None,
    }
}

/// Numbers for an input: integers below what the model allows, or floats between -1 and 1.
fn feed(model: &NamedModel, name: &str, ty: &TensorType, step: u64) -> HostTensor {
    // Random numbers, by place and step: what repeats itself makes many that should differ equal.
    let number = |at: u64| mix(at + (step << 40));
    if ty.dtype == DType::I64 {
        let below = model.config.range(name).map(|range| range.below).or(model.vocabulary()).unwrap_or(2);
        return HostTensor::from_i64(
            ty.shape.clone(),
            &(0..ty.elements()).map(|at| (number(at) % below) as i64).collect::<Vec<_>>(),
        );
    }
    let noise = |at: u64| (number(at) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    HostTensor::from_f32(ty.shape.clone(), &(0..ty.elements()).map(noise).collect::<Vec<_>>())
}

fn values(tensor: &HostTensor) -> impl Iterator<Item = f64> + '_ {
    tensor.bytes.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use shardc_ir::Bytes;

    /// One draw that agrees is enough; what is wrong in all is shown where it is least.
    #[test]
    fn rounding_spoils_some_draws_and_bugs_all() {
        let first = |worst: &dyn Fn(u64) -> f64| {
            let run = |draw| Ok(vec![Distance { check: "loss", worst: worst(draw), bound: LOSS }]);
            let (draw, rows) = first_alike(DRAWS, &run).unwrap();
            (draw, rows[0].is_near())
        };
        assert_eq!(first(&|_| 0.0), (0, true));
        assert_eq!(first(&|draw| if draw == 2 { 0.0 } else { 1.0 }), (2, true));
        assert_eq!(first(&|draw| 1.0 - draw as f64 / 20.0), (DRAWS - 1, false));
        assert_eq!(first(&|_| f64::NAN), (0, false));
    }

    #[test]
    fn runs_that_differ_are_apart() {
        let outcome = |loss: f64, norm: f64, moment: f32| Outcome {
            metrics: vec![(1.0, 1.0), (loss, norm)],
            moments: vec![HostTensor::from_f32(vec![2], &[1.0, moment])],
        };
        let failed = |spread: &Outcome| {
            let rows = distances(spread, &outcome(1.0, 1.0, 0.5)).into_iter();
            rows.filter(|row| !row.is_near()).map(|row| row.check).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(failed(&outcome(1.0, 1.0, 0.5)), "");
        assert_eq!(failed(&outcome(1.001, 1.0, 0.5)), "loss");
        assert_eq!(failed(&outcome(1.0, 1.01, 0.501)), "gradient norm moments");
        assert_eq!(failed(&outcome(f64::NAN, f64::NAN, f32::NAN)), "loss gradient norm moments");
    }

    #[test]
    fn small_models_compute_again_what_the_plan_does() {
        let of = |choice: &str| recompute(&Pins::parse(choice).unwrap());
        assert_eq!(of("pp=4,stage_recompute=block/selective/none/none,recompute=block"), "stage_recompute=block/none");
        assert_eq!(of("dp=2,recompute=selective"), "recompute=selective");
        assert_eq!(of("dp=2"), "recompute=none");
    }

    /// Only a plan that has chunks gives a small model some.
    #[test]
    fn small_models_are_cut_into_chunks_as_the_plan_is() {
        let (model, cluster) = (NamedModel::find("llama-tiny").unwrap(), Cluster::parse("cpu:2", "h200").unwrap());
        let check = |pins: &str, is_cut: bool| {
            let options = Options { precision: Some(Precision::Fp32), pins: pins.to_string(), ..Options::default() };
            let compiled = compile(&model, Batch { batch: 4, seq: 16 }, &cluster, &options).unwrap();
            let small = shrunk(compiled.plan(), 1).pins;
            assert_eq!(small.contains("overlap_chunks"), is_cut, "{pins}: {small}");
        };
        check("pp=2,schedule=zbv,microbatch=1,overlap_chunks=1", false);
        check("tp=2,microbatch=2,overlap_chunks=2", true);
        check("pp=2,schedule=1f1b,microbatch=2,overlap_chunks=2", true);
    }

    /// A plan that is not what it says, whatever its file's hash.
    #[test]
    fn what_a_plan_says_of_itself_is_checked() {
        let (model, cluster) = (NamedModel::find("llama-tiny").unwrap(), Cluster::parse("cpu:2", "h200").unwrap());
        let options =
            Options { precision: Some(Precision::Fp32), pins: "dp=2,zero=1".to_string(), ..Options::default() };
        let compiled = compile(&model, Batch { batch: 4, seq: 16 }, &cluster, &options).unwrap();
        let check = |change: &dyn Fn(&mut Plan), name: &str, ok: bool, words: &str| {
            let mut plan = compiled.plan().clone();
            change(&mut plan);
            let findings = verify(&plan, false);
            let finding = findings.iter().find(|finding| finding.check == name).unwrap();
            assert!(finding.ok == Some(ok) && finding.detail.contains(words), "{finding:?}");
        };
        check(&|_| {}, "request", true, "llama-tiny");
        check(&|_| {}, "budget", true, "per rank");
        check(&|plan| plan.request.device_memory = Bytes(1), "budget", false, "and there are 1 B");
        check(&|plan| plan.prediction.host = Bytes(1), "memory", false, "of each host, 1 B planned");
        check(&|plan| plan.prediction.room = Bytes(u64::MAX), "memory", false, "for a rank, ");
        check(&|plan| plan.request.model = "gpt2-124m".to_string(), "request", false, "gpt2-124m");
        check(&|plan| plan.request.batch = 8, "request", false, "`input_ids` as i64[8,16]");
        check(&|plan| plan.request.cluster = "cpu:4".to_string(), "request", false, "cpu:4 has 4 devices");
        let other = "cluster h100:2 is 2 x 1 of h100, and the plan is for 2 x 1 of cpu";
        check(&|plan| plan.request.cluster = "h100:2".to_string(), "request", false, other);
        check(&|plan| plan.cluster["per_node"] = 4.into(), "request", false, "cluster cpu:2 has 4 devices");
        check(&|plan| plan.cluster = Value::Null, "request", false, "make the plan again");
        let figure = |plan: &mut Plan| plan.cluster["device"]["link_bandwidth"]["value"] = 0.into();
        check(&figure, "request", false, "`link_bandwidth` is 0: it must be bytes per second");
        check(&|plan| plan.choice = "dp=2,zero=2".to_string(), "request", false, "zero=1");
    }
}
