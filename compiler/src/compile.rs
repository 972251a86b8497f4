//! `compile`: a model in, a plan and its programs out.

use crate::error::Error;
use crate::launch;
use crate::options::{Batch, Options};
use crate::pipeline;
use crate::report;
use crate::train::{TrainOptions, Trainer, Weights};
use shardc_ir::plan::Request;
use shardc_ir::verify::{VerifiedPlan, VerifiedPrograms};
use shardc_ir::{HostTensor, Plan, Program};
use shardc_models::{Model, TraceError};
use shardc_passes::PassError;
use shardc_passes::cluster::Cluster;
use shardc_runtime::launch::World;
use shardc_runtime::{CpuRuntime, CudaRuntime, Runtime, RuntimeError, cuda};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// What can be compiled: whatever can be traced for a batch. A function of the batch is one:
///
/// ```text
/// |batch| shardc_models::trace("mlp", |device| Mlp::new(device), |mlp, inputs| mlp.loss(inputs))
/// ```
pub trait Trace {
    /// The model, traced with the global shapes of a batch.
    fn trace(&self, batch: Batch) -> Result<Model, Error>;

    /// How the user names the model, if not as it names itself.
    fn name(&self) -> Option<String> {
        None
    }
}

impl<F: Fn(Batch) -> Result<Model, TraceError>> Trace for F {
    fn trace(&self, batch: Batch) -> Result<Model, Error> {
        Ok(self(batch)?)
    }
}

/// A compiled training step.
#[derive(Debug)]
pub struct Compiled {
    /// The traced model, for its inputs, names and initialisers.
    pub model: Model,
    plan: VerifiedPlan<'static>,
    programs: OnceLock<VerifiedPrograms<'static>>,
    dump_to: Option<PathBuf>,
    /// What the plan was made from, so that ranks find the launcher's.
    pub(crate) key: Option<String>,
    /// The run that this process is a rank of, if that is known already.
    pub(crate) world: Option<Arc<World>>,
}

/// Compiles a model's training step for a cluster: traces it, chooses a plan and checks it.
///
/// # Errors
/// A model that cannot be traced, a request that contradicts itself, a precision that the devices have no units
/// for, a model that fits under no plan.
pub fn compile(model: &dyn Trace, batch: Batch, cluster: &Cluster, options: &Options) -> Result<Compiled, Error> {
    options.precision.check(cluster).map_err(PassError::from)?;
    let name = model.name();
    let model = model.trace(batch)?;
    let name = name.unwrap_or_else(|| model.name.clone());
    let cluster = &options.on_hosts(cluster);
    // What the user gives to a host binds, whatever each rank may have.
    let most = cluster.share_of_host().filter(|_| options.host_memory.is_some());
    let device_memory = options.device_memory.unwrap_or(cluster.usable_memory());
    let request = Request {
        model: name,
        cluster: cluster.name.clone(),
        batch: batch.batch,
        seq: batch.seq,
        precision: options.precision.name().into(),
        reduce_dtype: options.reduce_dtype,
        device_memory: most.map_or(device_memory, |most| device_memory.min(most)),
        host_memory: cluster.host_memory(),
        pins: options.pins.clone(),
        scope: options.scope,
    };
    let key = launch::digest(&format!("{request:?} {options:?} {}", model.graph));
    let (world, plan) = match launch::planned(&key, cluster)? {
        Some((world, plan)) => (Some(world), plan),
        None => (None, pipeline::plan(&model, &request, cluster, options)?),
    };
    Ok(Compiled { dump_to: options.dump_to.clone(), key: Some(key), world, ..Compiled::from_plan(model, plan) })
}

impl Compiled {
    /// A plan that was made before, with its model traced again.
    pub fn from_plan(model: Model, plan: VerifiedPlan<'static>) -> Self {
        Self { model, plan, programs: OnceLock::new(), dump_to: None, key: None, world: None }
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The plan, as what was verified.
    pub fn verified(&self) -> &VerifiedPlan<'static> {
        &self.plan
    }

    /// The programs of all ranks; lowered when first asked for.
    pub fn programs(&self) -> Result<&[Program], Error> {
        if let Some(programs) = self.programs.get() {
            return Ok(programs);
        }
        let programs = pipeline::programs(&self.plan, self.dump_to.as_deref())?;
        Ok(self.programs.get_or_init(|| programs))
    }

    /// Tokens (or samples, where there are none) of one step over all ranks.
    pub fn tokens_per_step(&self) -> u64 {
        self.plan.request.batch * self.plan.request.seq.max(1)
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
        let world = self.world()?;
        launch::reporting(&world, || {
            launch::agree(&world, self, &options)?;
            Trainer::start(self, self.runtime(&world)?, world.clone(), weights, options)
        })
    }

    /// Trains: `batch` gives the tensors of each step (from 0), `observe` sees what it did and says
    /// whether to go on. Where every rank is a process, rank 0 observes, and decides for all.
    ///
    /// # Errors
    /// As [`Compiled::start`] and [`Trainer::step`]; what `batch` says.
    pub fn train(
        &self,
        weights: &dyn Weights,
        options: TrainOptions,
        mut batch: impl FnMut(u64) -> Result<BTreeMap<String, HostTensor>, Error>,
        mut observe: impl FnMut(&crate::metrics::StepMetrics) -> std::ops::ControlFlow<()>,
    ) -> Result<Trainer<'_>, Error> {
        let mut trainer = self.start(weights, options)?;
        let world = trainer.world().clone();
        launch::reporting(&world, || {
            for step in 0..options.learning_rate.steps {
                let metrics = trainer.step(batch(step)?)?;
                let is_enough = world.is_lead() && observe(&metrics).is_break();
                if !trainer.goes_on(is_enough)? {
                    break;
                }
            }
            Ok(())
        })?;
        Ok(trainer)
    }

    /// Refuses a plan that the cluster's runtime cannot execute.
    ///
    /// # Errors
    /// Names what it lacks, and the pin that does without.
    pub fn check_runs(&self) -> Result<(), Error> {
        match report::refused(&self.plan) {
            None => Ok(()),
            Some((message, fix)) => Err(Error::request(message, fix)),
        }
    }

    /// The runtime that the cluster names.
    fn runtime(&self, world: &Arc<World>) -> Result<Box<dyn Runtime>, Error> {
        let cluster = self.plan.request.cluster.as_str();
        match cluster.split(':').next() {
            Some("cpu") if Cluster::parse(cluster, "h200").is_ok_and(|cluster| cluster.nodes > 1) => {
                Err(Error::request(
                    format!("cluster `{cluster}` has several hosts, and CPU ranks train on one"),
                    format!("train on cpu:{}, which plans for the memory of this host", self.plan.mesh.ranks()),
                ))
            }
            Some("cpu") => Ok(Box::new(CpuRuntime::new(self.programs()?.to_vec())?)),
            Some("cuda") => {
                // Before anything is lowered: what is missing is told at once.
                let device = launch::device(world)?;
                let identity = cuda::identity(device).map_err(RuntimeError::Device)?;
                launch::check_distinct(world, &identity)?;
                let program = self.programs()?.get(world.rank() as usize).cloned();
                let program = program.ok_or_else(|| Error::Bug(format!("rank {} has no program", world.rank())))?;
                Ok(Box::new(CudaRuntime::new(vec![program], &[device], world.clone())?))
            }
            _ => Err(Error::request(
                format!("cluster `{cluster}` cannot be run from here"),
                "train on cpu:N or cuda:N; a described cluster such as h100:8x16 is for planning",
            )),
        }
    }
}
