//! The measurements.

use shardc::pipeline;
use shardc::{Batch, Cluster, Error, NamedModel, Options, Precision, Trace};
use shardc_ir::plan::Request;
use shardc_ir::{Bytes, DType, Family, Plan};
use shardc_passes::search::{self, Degrees, Recompute, fastest};
use shardc_passes::shard::prepare::prepare;
use shardc_passes::synthetic::{Sizes, residual};
use std::time::Instant;

/// Tokens of a sequence.
const SEQ: u64 = 8192;

/// One plan, and how long it took.
#[derive(Clone, Debug)]
pub struct Planned {
    /// What was planned.
    pub model: String,
    /// For which cluster.
    pub cluster: String,
    /// Its devices.
    pub devices: u64,
    /// Layers, or nodes where no layer repeats.
    pub size: u64,
    /// Seconds from the model to a plan whose memory and time are confirmed by lowering and simulating it.
    pub seconds: f64,
    /// The plan's choices.
    pub choice: String,
    /// By how much its estimate may exceed that of the best.
    pub gap: f64,
    /// Meshes, and those that were left out.
    pub meshes: [u64; 2],
}

impl Planned {
    fn of(plan: &Plan, devices: u64, size: u64, seconds: f64) -> Self {
        let (request, search) = (&plan.request, &plan.search);
        Self {
            model: request.model.clone(),
            cluster: request.cluster.clone(),
            devices,
            size,
            seconds,
            choice: plan.choice.clone(),
            gap: search.gap,
            meshes: [search.meshes, search.pruned],
        }
    }
}

fn options() -> Options {
    Options { precision: Some(Precision::Bf16), ..Options::default() }
}

/// Plans a built-in model, of which so many layers are taken if that is given.
///
/// # Errors
/// What planning says.
pub fn model(name: &str, layers: Option<u64>, cluster: &str, batch: u64) -> Result<Planned, Error> {
    let cluster = Cluster::parse(cluster, "h100")?;
    let mut model = NamedModel::find(name)?;
    let size = match (model.config.layers(), layers) {
        (Some(size), Some(layers)) => {
            *size = layers as usize;
            layers
        }
        (Some(size), None) => *size as u64,
        (None, _) => 1,
    };
    let start = Instant::now();
    let compiled = shardc::compile(&model, Batch { batch, seq: SEQ }, &cluster, &options())?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(Planned::of(compiled.plan(), cluster.ranks(), size, seconds))
}

/// Plans a residual network of so many forward nodes, of which no two layers are alike.
///
/// # Errors
/// What planning says.
pub fn random(nodes: usize, seed: u64, cluster: &str) -> Result<Planned, Error> {
    let cluster = Cluster::parse(cluster, "h100")?;
    let batch = 64 * cluster.ranks();
    let graph = residual(Sizes { seed, nodes, batch, width: 4096, dtype: DType::Bf16 })?;
    let request = Request { model: format!("residual-{nodes}"), batch, seq: 1, ..request(&cluster) };
    let start = Instant::now();
    let plan = pipeline::plan_step(&graph, &request, &cluster, &options())?;
    Ok(Planned::of(&plan, cluster.ranks(), nodes as u64, start.elapsed().as_secs_f64()))
}

fn request(cluster: &Cluster) -> Request {
    Request {
        cluster: cluster.name.clone(),
        precision: "bf16".into(),
        device_memory: cluster.usable_memory(),
        host_memory: cluster.host_memory(),
        ..Request::default()
    }
}

/// How many plans of a mesh, each a ZeRO stage and a number of steps of recomputation, are evaluated in a
/// second on one core: the time of the step with what shows of its communication, and the peak of its
/// memory.
///
/// # Errors
/// What planning says.
pub fn evaluations(name: &str, cluster: &str, batch: u64) -> Result<f64, Error> {
    let cluster = Cluster::parse(cluster, "h100")?;
    let model = NamedModel::find(name)?.trace(Batch { batch, seq: SEQ })?;
    let graph = pipeline::step(&model, Precision::Bf16, &options())?;
    let target = pipeline::target(&cluster);
    let prepared = prepare(&graph, batch, target);
    let degrees = Degrees::new(1).with(Family::Data, &[cluster.ranks()]);
    let mesh = degrees.mesh(batch);
    let work = search::model_work(&graph, &cluster);
    let (mut seconds, mut count, mut sum) = (0.0, 0u64, 0.0);
    while seconds < 1.0 {
        // Anew every time: peaks that were asked for are known to a shape.
        let Some((placed, shape)) = fastest(&prepared, &mesh, &cluster)? else { return Ok(0.0) };
        let steps = shape.menu().steps();
        let start = Instant::now();
        for (zero, step) in (0..4).flat_map(|zero| (0..=steps).map(move |step| (zero, step))) {
            let prediction = shape.predict(&placed, 0, zero, Recompute::Values(step), work);
            sum += prediction.step.0 + prediction.memory.total().0 as f64;
            count += 1;
        }
        seconds += start.elapsed().as_secs_f64();
    }
    // What is summed up is not left out by the compiler.
    Ok(if sum > 0.0 { count as f64 / seconds } else { 0.0 })
}

/// The most memory that this process held, where the system tells.
pub fn peak_memory() -> Option<Bytes> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(Bytes(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10))
}
