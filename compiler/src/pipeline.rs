//! The one list of passes, and why they come in this order.
//!
//! After each pass its result is verified and timed; `--dump-to DIR` writes it as `NN.name.ir`, where
//! `NN` is the pass's place in [`Pass`]. That of a pass that did not run says so.
//! What a verifier finds after a pass is a bug of that pass, never of the user.

use crate::error::Error;
use crate::options::Options;
use shardc_ir::plan::Request;
use shardc_ir::verify::{self, TranslationFacts, VerifiedPlan, VerifiedPrograms};
use shardc_ir::{AxisId, Diagnostics, Family, Graph, Plan, Program, Target};
use shardc_models::Model;
use shardc_passes::align::{align_head, align_weights};
use shardc_passes::allocate::Abridged;
use shardc_passes::cluster::{Cluster, DeviceKind};
use shardc_passes::deterministic::make_deterministic;
use shardc_passes::differentiate::{differentiate, differentiate_scaled};
use shardc_passes::lower::{lower_all, lower_each, lower_ranks};
use shardc_passes::optimizer::add_optimizer;
use shardc_passes::precision::{Precision, lower_precision};
use shardc_passes::quantize::quantize;
use shardc_passes::raise::raise;
use shardc_passes::search::{Exact, Pins, search_in_order};
use shardc_passes::simulate::{Outline, exact};
use shardc_passes::statistics::share_statistics;
use shardc_passes::threads;
use shardc_runtime::{CpuTarget, CudaTarget};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The passes, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// The model as it was recorded.
    Trace,
    /// First, because every later pass does better on few large operations than on many small ones:
    /// a composite operation has a derivative, a factor rule and a kernel of its own.
    Raise,
    /// Before differentiation, so that gradients pass back through the casts and those of
    /// parameters arrive in f32; after raising, because patterns are written without casts.
    LowerPrecision,
    /// Where the element type of the logits is known; before differentiation, so that the derivative
    /// of the padding is that of any operation.
    AlignHead,
    /// Where the element types of all products are known; before differentiation, so that both derivatives of a product
    /// read the same transposed weight.
    AlignWeights,
    /// After everything that changes what is computed.
    Differentiate,
    /// Part of the graph, because how it is spread (ZeRO) is part of the plan.
    AddOptimizer,
    /// On the whole step, since what the backward pass reads decides what is made again, and sums for the norm of
    /// the gradients are sums too.
    ShareStatistics,
    /// Only if asked for; where all operations are there.
    MakeDeterministic,
    /// After differentiation, so that the three products of a linear layer share what they read in 8 bits;
    /// only where 8-bit floats are asked for.
    Quantize,
    /// Recomputation is a choice of the search: it rewrites the graph for each candidate, since what
    /// a layout costs decides what is worth recomputing. So is the cutting of the head into chunks,
    /// of which the tokens of a microbatch on one rank decide the number, and that of the blocks into
    /// chunks that overlap, of which the simulation of their programs does.
    Search,
    /// Scheduling and allocation are part of lowering a rank: offsets exist only once the order of
    /// instructions is fixed.
    Lower,
}

impl Pass {
    fn name(self) -> &'static str {
        match self {
            Self::Trace => "trace",
            Self::Raise => "raise",
            Self::LowerPrecision => "lower_precision",
            Self::AlignHead => "align_head",
            Self::AlignWeights => "align_weights",
            Self::Differentiate => "differentiate",
            Self::AddOptimizer => "add_optimizer",
            Self::ShareStatistics => "share_statistics",
            Self::MakeDeterministic => "make_deterministic",
            Self::Quantize => "quantize",
            Self::Search => "search",
            Self::Lower => "lower",
        }
    }
}

/// From a traced model to a plan.
pub fn plan(
    model: &Model,
    request: &Request,
    cluster: &Cluster,
    options: &Options,
) -> Result<VerifiedPlan<'static>, Error> {
    plan_step(&step(model, options.precision_on(cluster), options)?, request, cluster, options)
}

/// From a traced model to its training step on one device, in a precision.
pub fn step(model: &Model, precision: Precision, options: &Options) -> Result<Graph, Error> {
    let stage = Stage::new(options.dump_to.as_deref())?;
    let graph = stage.graph(Pass::Trace, || Ok(model.graph.clone()))?;
    let graph = stage.graph(Pass::Raise, || Ok(raise(&graph)?.0))?;
    let graph = stage.graph(Pass::LowerPrecision, || Ok(lower_precision(&graph, precision)?))?;
    let graph = stage.graph(Pass::AlignHead, || Ok(align_head(&graph)?))?;
    let graph = stage.graph(Pass::AlignWeights, || Ok(align_weights(&graph)?))?;
    let differentiate = if precision.scales_loss() { differentiate_scaled } else { differentiate };
    let differentiated = stage.run(Pass::Differentiate, || Ok(differentiate(&graph, "loss")?))?;
    stage.check_graph(Pass::Differentiate, &differentiated.graph)?;
    let graph = stage.graph(Pass::AddOptimizer, || Ok(add_optimizer(differentiated, &options.optimizer)?))?;
    let graph = stage.graph(Pass::ShareStatistics, || Ok(share_statistics(&graph)?))?;
    let graph = match options.deterministic {
        true => stage.graph(Pass::MakeDeterministic, || Ok(make_deterministic(&graph)?))?,
        false => stage.skip(Pass::MakeDeterministic, "nothing asks for equal bits (--deterministic)", graph)?,
    };
    match precision {
        Precision::Fp8 => stage.graph(Pass::Quantize, || Ok(quantize(&graph)?)),
        precision => stage.skip(Pass::Quantize, &format!("the precision is {}, not fp8", precision.name()), graph),
    }
}

/// From a training step to a plan.
pub fn plan_step(
    graph: &Graph,
    request: &Request,
    cluster: &Cluster,
    options: &Options,
) -> Result<VerifiedPlan<'static>, Error> {
    let stage = Stage::new(options.dump_to.as_deref())?;
    // A winner is predicted by lowering it: its memory is what is allocated, its time what its programs take.
    let pins = Pins::parse(&options.pins)?;
    let target = target(cluster);
    let search = || Ok(search_in_order(graph, cluster, request, &pins, target, &predicted)?);
    let (plan, cluster) = stage.run(Pass::Search, search)?;
    let plan = Plan { cluster: cluster.to_value(), ..plan };
    stage.dump(Pass::Search, [&plan].into_iter())?;
    let plan = verify::plan(plan).map_err(|found| bug(Pass::Search, &found))?;
    if options.dump_to.is_some() {
        match distinct_programs(&plan) {
            Ok((programs, _)) => stage.dump(Pass::Lower, programs.iter())?,
            // What is planned and not lowered yet is no reason to give no plan.
            Err(error) => stage.skip(Pass::Lower, &error.to_string(), ())?,
        }
    }
    Ok(plan)
}

/// What a plan takes by its programs: the memory that is allocated, the time of their simulation.
pub(crate) fn predicted(plan: &Plan, cluster: &Cluster) -> Result<Exact, String> {
    let plan = verify::plan(plan).map_err(|found| found.to_string())?;
    let (apart, ranks) = distinct_ranks(&plan);
    let outline = |program: Abridged| Outline::of_abridged(&program, &plan, cluster);
    let outlines = lower_each(&plan, &ranks, target(cluster), outline);
    exact(&outlines.map_err(|error| error.to_string())?, &apart, &plan, cluster).map_err(|error| error.to_string())
}

/// The same, of its programs.
pub(crate) fn predicted_by(programs: &[Program], plan: &Plan, cluster: &Cluster) -> Result<Exact, String> {
    let outlines = threads::map(programs, |program| Outline::of(program, plan, cluster));
    exact(&outlines, &apart(plan), plan, cluster).map_err(|error| error.to_string())
}

/// From a plan, perhaps read from a file, to the programs of all ranks, which are shown to compute the
/// plan's graph before anything runs them.
pub fn programs(plan: &VerifiedPlan<'_>, dump_to: Option<&Path>) -> Result<VerifiedPrograms<'static>, Error> {
    let stage = Stage::new(dump_to)?;
    let programs = stage.run(Pass::Lower, || Ok(lower_all(plan, target_of(plan)?)?))?;
    stage.dump(Pass::Lower, distinct_ranks(plan).1.into_iter().filter_map(|rank| programs.get(rank as usize)))?;
    let start = Instant::now();
    let programs = verify::step(plan, programs).map_err(|found| bug(Pass::Lower, &found))?;
    tracing::info!(seconds = start.elapsed().as_secs_f64(), "the programs compute the plan's graph");
    Ok(programs)
}

/// The runtime that a cluster's programs are for.
pub fn target(cluster: &Cluster) -> &'static dyn Target {
    match cluster.device.kind {
        DeviceKind::Cpu => &CpuTarget,
        DeviceKind::Cuda => &CudaTarget,
    }
}

/// The runtime that a plan's programs are for.
///
/// # Errors
/// A plan whose cluster cannot be read.
pub(crate) fn target_of(plan: &Plan) -> Result<&'static dyn Target, Error> {
    Ok(target(&Cluster::of(plan)?))
}

/// As [`programs`], of the few ranks that tell the axes of the mesh apart ([`verify::cover`]): what is
/// shown of them holds for every rank whose program differs from theirs by its coordinates alone.
pub fn cover(plan: &VerifiedPlan<'_>) -> Result<(Vec<Program>, TranslationFacts), Error> {
    let programs = lower_ranks(plan, &verify::cover(&plan.mesh), target_of(plan)?)?;
    let shown = verify::translation(plan, &programs).map_err(|found| bug(Pass::Lower, &found))?;
    Ok((programs, shown))
}

/// The programs of ranks that differ in more than groups and slices, and the axes along which ranks
/// do: pipeline stages. The first rank of each coordinate stands for its stage.
pub fn distinct_programs(plan: &VerifiedPlan<'_>) -> Result<(Vec<Program>, Vec<AxisId>), Error> {
    let (apart, ranks) = distinct_ranks(plan);
    Ok((lower_ranks(plan, &ranks, target_of(plan)?)?, apart))
}

/// The axes along which programs differ in more than groups and slices.
fn apart(plan: &Plan) -> Vec<AxisId> {
    plan.mesh.family(Family::Pipeline)
}

/// The same, and the first rank of each coordinate.
fn distinct_ranks(plan: &Plan) -> (Vec<AxisId>, Vec<u64>) {
    let apart = apart(plan);
    let ranks = plan.mesh.group(0, &apart);
    (apart, ranks)
}

fn bug(pass: Pass, found: &Diagnostics) -> Error {
    Error::Bug(format!("after {}: {found}", pass.name()))
}

/// Runs passes one after the other.
struct Stage {
    dump_to: Option<PathBuf>,
}

impl Stage {
    fn new(dump_to: Option<&Path>) -> Result<Self, Error> {
        if let Some(dir) = dump_to {
            std::fs::create_dir_all(dir).map_err(|source| Error::Io { path: dir.to_path_buf(), source })?;
        }
        Ok(Self { dump_to: dump_to.map(Path::to_path_buf) })
    }

    fn run<T>(&self, pass: Pass, make: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let start = Instant::now();
        let result = make()?;
        tracing::info!(pass = pass.name(), seconds = start.elapsed().as_secs_f64(), "done");
        Ok(result)
    }

    fn graph(&self, pass: Pass, make: impl FnOnce() -> Result<Graph, Error>) -> Result<Graph, Error> {
        let graph = self.run(pass, make)?;
        self.check_graph(pass, &graph)?;
        Ok(graph)
    }

    fn check_graph(&self, pass: Pass, graph: &Graph) -> Result<(), Error> {
        self.dump(pass, [graph].into_iter())?;
        verify::graph(graph).map(drop).map_err(|found| bug(pass, &found))
    }

    /// Goes on with what there is; the file of the pass says why it did not run.
    fn skip<T>(&self, pass: Pass, why: &str, with: T) -> Result<T, Error> {
        let text: String = why.lines().map(|line| format!("; not run: {line}\n")).collect();
        self.dump(pass, [&text].into_iter())?;
        Ok(with)
    }

    fn dump<'a, T: Display + 'a>(&self, pass: Pass, texts: impl Iterator<Item = &'a T>) -> Result<(), Error> {
        let Some(dir) = &self.dump_to else { return Ok(()) };
        let path = dir.join(format!("{:02}.{}.ir", pass as usize, pass.name()));
        let text: String = texts.map(ToString::to_string).collect();
        std::fs::write(&path, text).map_err(|source| Error::Io { path, source })
    }
}
