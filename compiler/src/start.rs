//! From a plan to its ranks: what a [`Compiled`] step does with processes and devices.

use crate::compile::Compiled;
use crate::error::Error;
use crate::launch;
use crate::metrics::StepMetrics;
use crate::report;
use crate::steps::Observer;
use crate::train::{TrainOptions, Trainer, Weights, given_part};
use shardc_ir::Op;
use shardc_passes::cluster::Cluster;
use shardc_passes::fold::leaf_name;
use shardc_runtime::launch::{Launcher, Limits, World};
use shardc_runtime::{CpuRuntime, CudaRuntime, Feeds, Runtime, RuntimeError, Span, cuda};
use std::fmt::Write;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Numbers along each dimension of a parameter that ranks compare.
const SAMPLE: u64 = 4;

impl Compiled {
    /// Whether this process is to start the ranks, instead of being one.
    ///
    /// # Errors
    /// Variables of a launcher that make no sense.
    pub fn needs_launch(&self) -> Result<bool, Error> {
        launch::is_missing(self.plan().mesh.ranks(), &self.plan().request.cluster)
    }

    /// Starts this program again with the same arguments, once per GPU of this host, and waits until
    /// all have ended. Once `stop` is set they stop after their step.
    ///
    /// # Errors
    /// No CUDA, or too few GPUs; a cluster of several hosts; the first cause for which a rank failed.
    pub fn launch(&self, stop: &AtomicBool) -> Result<(), Error> {
        let (ranks, name) = (self.plan().mesh.ranks(), &self.plan().request.cluster);
        let per_host = Cluster::of(self.plan())?.per_node;
        if per_host != ranks {
            let message = format!("cluster `{name}` spans several hosts, and this process is on one of them");
            let fix = format!(
                "start one process per GPU on every host: torchrun --no-python --nproc-per-node {per_host} ..., or srun"
            );
            return Err(Error::request(message, fix));
        }
        let devices: Vec<usize> = (0..ranks as usize).collect();
        cuda::require(&devices, ranks)?;
        let launcher = Launcher::new(ranks, "GPU", Limits::from_env()?)?;
        if let Some(key) = &self.key {
            launcher.set(&format!("plan/{key}"), self.plan().to_json().as_bytes());
        }
        let program = std::env::current_exe()
            .map_err(|error| Error::Check(format!("cannot find this program's own file: {error}")))?;
        let arguments: Vec<_> = std::env::args_os().skip(1).collect();
        Ok(launcher.run(&program, &arguments, stop)?)
    }

    /// Starts the ranks of this process and fills their parameters; see [`Trainer`].
    ///
    /// On several GPUs, a process that no launcher started does not come back from here: it starts
    /// this program once per GPU, waits for all of them, and exits. See [`crate::launch`].
    ///
    /// # Errors
    /// What the runtime lacks; ranks that were given different things; for the process that starts the
    /// ranks, the first cause for which one of them failed.
    pub fn start(&self, weights: &dyn Weights, options: TrainOptions) -> Result<Trainer<'_>, Error> {
        self.check_runs()?;
        if self.needs_launch()? {
            self.launch(&AtomicBool::new(false))?;
            std::process::exit(0);
        }
        let world = launch::world(self.world.as_ref(), self.plan().mesh.ranks(), &self.plan().request.cluster)?;
        launch::reporting(&world, || {
            agree(&world, self, weights, &options)?;
            Trainer::start(self, self.runtime(&world)?, world.clone(), weights, options)
        })
    }

    /// Trains: `batch` gives the tensors of each step (from 0), on a thread of its own while the step before runs; `observe`
    /// sees what it did and says whether to go on. Where every rank is a process, rank 0 observes, and decides for all.
    ///
    /// # Errors
    /// As [`Compiled::start`] and [`Trainer::step`]; what `batch` says.
    pub fn train(
        &self,
        weights: &dyn Weights,
        options: TrainOptions,
        batch: impl FnMut(u64) -> Result<Feeds, Error> + Send,
        observe: impl FnMut(&StepMetrics) -> ControlFlow<()>,
    ) -> Result<Trainer<'_>, Error> {
        let mut trainer = self.start(weights, options)?;
        let world = trainer.world().clone();
        let mut observer = Lead { is_lead: world.is_lead(), observe };
        launch::reporting(&world, || {
            let ended = trainer.steps(options.learning_rate.steps, false, batch, &mut observer)?;
            ended.unread.map_or(Ok(()), Err)?;
            launch::leave(&world)
        })?;
        Ok(trainer)
    }

    /// Refuses a plan that the cluster's runtime cannot execute.
    ///
    /// # Errors
    /// Names what it lacks, and the pin that does without.
    pub fn check_runs(&self) -> Result<(), Error> {
        match report::refused(self.plan()) {
            None => Ok(()),
            Some((message, fix)) => Err(Error::request(message, fix)),
        }
    }

    /// The runtime that the cluster names.
    fn runtime(&self, world: &Arc<World>) -> Result<Box<dyn Runtime>, Error> {
        let cluster = Cluster::of(self.plan())?;
        check_cluster(&cluster)?;
        if !launch::is_cuda(&cluster.name) {
            return Ok(Box::new(CpuRuntime::new(self.programs()?.to_vec())?));
        }
        // Before anything is lowered: what is missing is told at once.
        let device = launch::device(world)?;
        let identity = cuda::identity(device).map_err(RuntimeError::Device)?;
        launch::check_distinct(world, &identity)?;
        let program = self.programs()?.get(world.rank() as usize).cloned();
        let program = program.ok_or_else(|| Error::Bug(format!("rank {} has no program", world.rank())))?;
        Ok(Box::new(CudaRuntime::new(vec![program], &[device], world.clone())?))
    }
}

/// Refuses a cluster that is not of the machines that ranks are started on.
///
/// # Errors
/// Names the cluster and those that train.
pub fn check_cluster(cluster: &Cluster) -> Result<(), Error> {
    let name = &cluster.name;
    match name.split(':').next() {
        Some("cpu") if cluster.nodes > 1 => Err(Error::request(
            format!("cluster `{name}` has several hosts, and CPU ranks train on one"),
            format!("train on cpu:{}, which plans for the memory of this host", cluster.ranks()),
        )),
        Some("cpu" | "cuda") => Ok(()),
        _ => Err(Error::request(
            format!("cluster `{name}` cannot be run from here"),
            "train on cpu:N or cuda:N; a described cluster such as h100:8x16 is for planning",
        )),
    }
}

/// What the first rank observes.
struct Lead<F> {
    is_lead: bool,
    observe: F,
}

impl<F: FnMut(&StepMetrics) -> ControlFlow<()>> Observer for Lead<F> {
    fn saw(&mut self, step: StepMetrics, _spans: Vec<Span>) -> ControlFlow<()> {
        if self.is_lead { (self.observe)(&step) } else { ControlFlow::Continue(()) }
    }
}

/// Checks that all ranks were given the same, and each a GPU of its own.
///
/// # Errors
/// What two ranks differ in, with both values.
fn agree(world: &World, compiled: &Compiled, weights: &dyn Weights, options: &TrainOptions) -> Result<(), Error> {
    if world.is_alone() {
        return Ok(());
    }
    let programs: String = compiled.programs()?.iter().map(ToString::to_string).collect();
    Ok(world.agree(&[
        ("version of shardc", env!("CARGO_PKG_VERSION").to_string()),
        ("plan's hash", compiled.plan().hash()),
        ("programs' hash", launch::digest(&programs)),
        ("training options", format!("{options:?}")),
        ("weights to begin with", launch::digest(&sampled(compiled, weights)?)),
    ])?)
}

/// Some numbers of every parameter that is given: its first ones, and its last. All would take each rank to read all files.
fn sampled(compiled: &Compiled, weights: &dyn Weights) -> Result<String, Error> {
    let model = &compiled.model;
    let mut all = String::new();
    for (value, node) in model.graph.leaves().filter(|(_, node)| matches!(node.op, Op::Parameter(_))) {
        let (name, ty) = (leaf_name(&node.op), model.graph.ty(value));
        let first = |size: &u64| (0, (*size).min(SAMPLE));
        let last = |size: &u64| (size.saturating_sub(SAMPLE), (*size).min(SAMPLE));
        for slice in [ty.shape.iter().map(first).collect::<Vec<_>>(), ty.shape.iter().map(last).collect()] {
            let part = given_part(model, weights, name, ty, &slice)?;
            let _ = writeln!(all, "{name} {slice:?} {:?}", part.map(|part| part.bytes));
        }
    }
    Ok(all)
}
