//! `compile`: a model in, a plan and its programs out.

use crate::error::Error;
use crate::options::{Batch, Options, precision_name};
use crate::pipeline;
use crate::train::{TrainOptions, Trainer, Weights};
use shardc_ir::plan::Request;
use shardc_ir::verify::{VerifiedPlan, VerifiedPrograms};
use shardc_ir::{Bytes, HostTensor, Plan, Program};
use shardc_models::{Model, TraceError};
use shardc_passes::cluster::Cluster;
use shardc_runtime::{CpuRuntime, CudaRuntime, Runtime, cuda};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::OnceLock;

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
}

/// Compiles a model's training step for a cluster: traces it, chooses a plan and checks it.
///
/// # Errors
/// A model that cannot be traced, a request that contradicts itself, a model that fits under no
/// plan.
pub fn compile(model: &dyn Trace, batch: Batch, cluster: &Cluster, options: &Options) -> Result<Compiled, Error> {
    let name = model.name();
    let model = model.trace(batch)?;
    let name = name.unwrap_or_else(|| model.name.clone());
    let cluster = &match options.host_memory {
        Some(bytes) => cluster.clone().with_host_memory(bytes),
        None => cluster.clone(),
    };
    // What the user gives to a host binds, whatever each rank may have.
    let most = cluster.share_of_host().filter(|_| options.host_memory.is_some());
    let device_memory = options.device_memory.unwrap_or(cluster.usable_memory());
    let request = Request {
        model: name,
        cluster: cluster.name.clone(),
        batch: batch.batch,
        seq: batch.seq,
        precision: precision_name(options.precision).into(),
        device_memory: most.map_or(device_memory, |most| device_memory.min(most)),
        host_memory: Bytes(cluster.device.host_memory_bytes.value as u64),
        pins: options.pins.clone(),
    };
    let plan = pipeline::plan(&model, &request, cluster, options)?;
    Ok(Compiled { dump_to: options.dump_to.clone(), ..Compiled::from_plan(model, plan) })
}

impl Compiled {
    /// A plan that was made before, with its model traced again.
    pub fn from_plan(model: Model, plan: VerifiedPlan<'static>) -> Self {
        Self { model, plan, programs: OnceLock::new(), dump_to: None }
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
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

    /// Starts the ranks and fills their parameters; see [`Trainer`].
    pub fn start(&self, weights: &dyn Weights, options: TrainOptions) -> Result<Trainer<'_>, Error> {
        Trainer::start(self, self.runtime()?, weights, options)
    }

    /// Trains: `batch` gives the tensors of each step (from 0), `observe` sees what it did and says
    /// whether to go on.
    pub fn train(
        &self,
        weights: &dyn Weights,
        options: TrainOptions,
        mut batch: impl FnMut(u64) -> Result<BTreeMap<String, HostTensor>, Error>,
        mut observe: impl FnMut(&crate::metrics::StepMetrics) -> std::ops::ControlFlow<()>,
    ) -> Result<Trainer<'_>, Error> {
        let mut trainer = self.start(weights, options)?;
        for step in 0..options.learning_rate.steps {
            let metrics = trainer.step(batch(step)?)?;
            if observe(&metrics).is_break() {
                break;
            }
        }
        Ok(trainer)
    }

    /// The runtime that the cluster names.
    fn runtime(&self) -> Result<Box<dyn Runtime>, Error> {
        let cluster = self.plan.request.cluster.as_str();
        match cluster.split(':').next() {
            Some("cpu") => Ok(Box::new(CpuRuntime::new(self.programs()?.to_vec())?)),
            Some("cuda") => {
                let devices: Vec<usize> = (0..self.plan.mesh.ranks() as usize).collect();
                // Before anything is lowered: what is missing is told at once.
                cuda::require(&devices)?;
                Ok(Box::new(CudaRuntime::new(self.programs()?.to_vec(), &devices)?))
            }
            _ => Err(Error::request(
                format!("cluster `{cluster}` cannot be run from here"),
                "train on cpu:N or cuda:N; a described cluster such as h100:8x16 is for planning",
            )),
        }
    }
}
