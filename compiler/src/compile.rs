//! `compile`: a model in, a plan and its programs out.

use crate::agrees;
use crate::error::Error;
use crate::launch;
use crate::options::{Batch, Options};
use crate::pipeline;
use shardc_ir::plan::Request;
use shardc_ir::verify::{VerifiedPlan, VerifiedPrograms};
use shardc_ir::{Plan, Program};
use shardc_models::{Model, TraceError};
use shardc_passes::PassError;
use shardc_passes::cluster::Cluster;
use shardc_runtime::launch::World;
use std::path::PathBuf;
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
    let precision = options.precision_on(cluster);
    precision.check(cluster).map_err(PassError::from)?;
    if let Some(wrong) = agrees::wrong_reduction(options.reduce_dtype) {
        return Err(Error::request(wrong, "leave reduce_dtype out, or choose one of these"));
    }
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
        precision: precision.name().into(),
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

    /// In what the graph of a plan is not that of a model, traced for its batch, if it is not: which is to be asked before
    /// [`Self::from_plan`], where the model may have changed since.
    pub fn other_model(plan: &Plan, model: &Model) -> Option<String> {
        agrees::other_model(plan, model)
    }

    /// What a plan says of itself and that is not so, beside its model: of its cluster, its choice and its memory. Plans that
    /// are read from files may say anything.
    pub fn contradiction(plan: &Plan) -> Option<String> {
        let wrong = agrees::own_contradictions(plan);
        if wrong.is_empty() { agrees::over_budget(plan) } else { Some(wrong.join("; ")) }
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

    /// What [`tokens_per_step`](Self::tokens_per_step) counts.
    pub fn unit(&self) -> &'static str {
        crate::report::unit(&self.plan.request)
    }
}
