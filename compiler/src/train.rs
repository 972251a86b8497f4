//! The training loop: parameters in, steps, parameters out.
//!
//! A [`Trainer`] holds one run: a runtime whose slots hold the parameters and the optimizer state. Parameters are made
//! shard by shard, so no rank ever holds one that is not its own. While a step runs, the next batch can be read and
//! handed over ([`Trainer::ahead`]).
//!
//! Where every rank is a process, each has a trainer for its own, and all make the same calls in the same order. Ranks
//! vote after each step whether to go on. What needs another rank's part goes through the run's store: rank 0 gathers
//! parameters to save them, and the others hand them over ([`Trainer::on_lead`]).

use crate::compile::Compiled;
use crate::error::Error;
use crate::indices::{self, Lookup};
use crate::launch;
use crate::learning_rate::LearningRate;
use crate::loss_scale::LossScale;
use crate::metrics::StepMetrics;
use shardc_ir::ops::SAMPLE;
use shardc_ir::program::Slot;
use shardc_ir::{Bytes, HostTensor, Op, TensorType};
use shardc_models::Model;
use shardc_passes::differentiate::LOSS_SCALE;
use shardc_passes::optimizer::{GRAD_NORM, LEARNING_RATE, STEP};
use shardc_runtime::launch::World;
use shardc_runtime::{Feeds, Runtime, RuntimeError, Span, TimedStep, evaluate_part};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

/// The name of the reading that is minimised.
const LOSS: &str = "loss";

/// Where parameters come from if not from their initialisers.
pub trait Weights {
    /// A part of a parameter (per dimension, the first index and the length), or `None` where this
    /// source does not have it and the initialiser is to be used.
    fn part(&self, name: &str, ty: &TensorType, slice: &[(u64, u64)]) -> Result<Option<HostTensor>, Error>;
}

/// Every parameter from its initialiser.
pub struct FromInitialisers;

impl Weights for FromInitialisers {
    fn part(&self, _: &str, _: &TensorType, _: &[(u64, u64)]) -> Result<Option<HostTensor>, Error> {
        Ok(None)
    }
}

/// Parameters given whole, by name.
impl Weights for BTreeMap<String, HostTensor> {
    fn part(&self, name: &str, _: &TensorType, slice: &[(u64, u64)]) -> Result<Option<HostTensor>, Error> {
        Ok(self.get(name).map(|whole| whole.part(slice)))
    }
}

/// What a run of training is told beside the plan.
#[derive(Clone, Copy, Debug)]
pub struct TrainOptions {
    /// The steps to train, and the learning rate of each.
    pub learning_rate: LearningRate,
    /// Seeds the initial weights.
    pub seed: u64,
}

/// How a runtime runs one step: measured or not.
type RunStep<'a> = &'a mut dyn FnMut(&mut dyn Runtime, &Feeds) -> Result<TimedStep, RuntimeError>;

/// One run of training.
pub struct Trainer<'a> {
    compiled: &'a Compiled,
    runtime: Box<dyn Runtime>,
    world: Arc<World>,
    options: TrainOptions,
    step: u64,
    /// The type of the input that numbers the samples, where the step has one.
    samples: Option<TensorType>,
    /// What the step looks up by numbers that it is given.
    lookups: Vec<Lookup>,
    /// By what the loss is scaled, where it is.
    loss_scale: Option<LossScale>,
    /// While rank 0 reads parts of other ranks: the keys' prefix, and how many it has asked for.
    reading: Option<(String, u64)>,
}

impl<'a> Trainer<'a> {
    /// Fills the parameters of the runtime's ranks.
    ///
    /// # Errors
    /// Weights that cannot be read; a runtime that refuses them.
    pub fn start(
        compiled: &'a Compiled,
        mut runtime: Box<dyn Runtime>,
        world: Arc<World>,
        weights: &dyn Weights,
        options: TrainOptions,
    ) -> Result<Self, Error> {
        world.at("loading its parameters");
        initialise(compiled, runtime.as_mut(), weights, options.seed)?;
        let graph = &compiled.plan().graph;
        let input = |name: &str| {
            let is_own = |op: &Op| matches!(op, Op::Input(input) if input.name == name);
            graph.leaves().find(|(_, node)| is_own(&node.op)).map(|(value, _)| graph.ty(value).clone())
        };
        let loss_scale = input(LOSS_SCALE).map(|_| LossScale::default());
        let (lookups, samples) = (indices::lookups(&compiled.model.graph), input(SAMPLE));
        Ok(Self { compiled, runtime, world, options, step: 0, samples, lookups, loss_scale, reading: None })
    }

    /// What is trained.
    pub fn compiled(&self) -> &'a Compiled {
        self.compiled
    }

    /// The run that this process is part of.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// Whether all ranks go on to the next step: not if one of them was told to stop, or the launcher.
    /// The same answer on all.
    ///
    /// # Errors
    /// Another rank that failed.
    pub fn goes_on(&self, stop: bool) -> Result<bool, Error> {
        self.world.at(format!("the vote on step {}", self.step));
        let stop = stop || self.world.is_asked_to_stop();
        Ok(!if self.world.is_alone() { stop } else { self.world.any("stop", stop)? })
    }

    /// The batch of the step after the next one: what can be done with it while that one runs, is done.
    pub fn ahead(&mut self, batch: &Feeds) {
        self.runtime.ahead(batch);
    }

    /// Runs the next step on a global batch: one tensor per input of the model.
    ///
    /// # Errors
    /// An index that is given and beyond what it is looked up in.
    /// [`Error::NotFinite`] if the loss or the norm is not a finite number, with the step and the first tensor
    /// that is not. Where the loss is scaled, a norm that is not finite skips the step and lowers the scale.
    pub fn step(&mut self, batch: Feeds) -> Result<StepMetrics, Error> {
        let mut run =
            |runtime: &mut dyn Runtime, batch: &_| Ok(TimedStep { readings: runtime.step(batch)?, spans: Vec::new() });
        Ok(self.report(batch, &mut run)?.0)
    }

    /// Runs the next step as [`Trainer::step`] does, and measures every instruction of all ranks, which takes time of
    /// its own. What was measured rank 0 gets, and the others nothing.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn timed_step(&mut self, batch: Feeds) -> Result<(StepMetrics, Vec<Span>), Error> {
        let (metrics, own) = self.report(batch, &mut |runtime, batch| runtime.timed_step(batch))?;
        let bug = |error: serde_json::Error| Error::Bug(error.to_string());
        let (own, mut all) = (serde_json::to_vec(&own).map_err(bug)?, Vec::new());
        self.world.at("handing over what was measured");
        self.world.to_lead("spans", own, |spans| all.push(spans))?;
        let all = all.into_iter().map(|spans| serde_json::from_slice::<Vec<Span>>(&spans));
        Ok((metrics, all.collect::<Result<Vec<_>, _>>().map_err(bug)?.concat()))
    }

    /// Runs the next step; should it fail, all ranks are told, but of numbers that they all read alike.
    fn report(&mut self, batch: Feeds, run: RunStep<'_>) -> Result<(StepMetrics, Vec<Span>), Error> {
        let world = self.world.clone();
        world.at(format!("step {}", self.step));
        launch::reporting(&world, || {
            if self.step == 0 {
                launch::agree_on_batch(&world, &batch)?;
            }
            match self.run(batch, run) {
                Err(error @ Error::NotFinite { .. }) => Ok(Err(error)),
                outcome => outcome.map(Ok),
            }
        })?
    }

    fn run(&mut self, mut batch: Feeds, run: RunStep<'_>) -> Result<(StepMetrics, Vec<Span>), Error> {
        let inputs = &self.compiled.model.inputs;
        if let Some(name) = batch.keys().find(|name| inputs.iter().all(|(input, _)| input != *name)) {
            let known = inputs.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            return Err(Error::request(
                format!("the batch has `{name}`, and the model takes {known} alone"),
                "leave it out",
            ));
        }
        indices::check(&self.lookups, &batch)?;
        let rate = self.options.learning_rate.at(self.step);
        batch.insert(LEARNING_RATE.into(), HostTensor::from_f32([], &[rate as f32]).into());
        // The optimizer's moments know nothing of steps that were skipped.
        let skipped = self.loss_scale.as_ref().map_or(0, LossScale::skipped);
        batch.insert(STEP.into(), HostTensor::from_f32([], &[(self.step + 1 - skipped) as f32]).into());
        if let Some(ty) = &self.samples {
            let numbers: Vec<i64> = (0..ty.elements() as i64).collect();
            batch.insert(SAMPLE.into(), HostTensor::from_i64(ty.shape.clone(), &numbers).into());
        }
        let loss_scale = self.loss_scale.as_ref().map(LossScale::factor);
        if let Some(factor) = loss_scale {
            batch.insert(LOSS_SCALE.into(), HostTensor::from_f32([], &[factor as f32]).into());
        }
        let start = Instant::now();
        let TimedStep { readings, spans } = run(self.runtime.as_mut(), &batch)?;
        let step_s = start.elapsed().as_secs_f64();
        let reading = |name: &str| readings.get(name).copied().unwrap_or(f64::NAN);
        let metrics = StepMetrics {
            step: self.step,
            loss: reading(LOSS),
            grad_norm: reading(GRAD_NORM),
            loss_scale,
            learning_rate: rate,
            step_s,
            tokens_per_s: self.compiled.tokens_per_step() as f64 / step_s,
            peak_device_bytes: self.runtime.peak_bytes().0,
            predicted_step_s: self.compiled.plan().prediction.step.0,
        };
        // Every rank reads the same norm, so all of them keep the same scale.
        let scaled = self.loss_scale.as_mut().filter(|_| metrics.loss.is_finite());
        let goes_on = scaled.map(|scale| scale.observe(metrics.grad_norm.is_finite()));
        if !goes_on.unwrap_or(metrics.loss.is_finite() && metrics.grad_norm.is_finite()) {
            // The step once more: by a norm that is finite it would update the parameters a second time.
            let first = if metrics.grad_norm.is_finite() { None } else { self.runtime.first_non_finite()? };
            let (step, loss, grad_norm) = (self.step, metrics.loss, metrics.grad_norm);
            return Err(Error::NotFinite { step, loss, grad_norm, first });
        }
        self.step += 1;
        Ok((metrics, spans))
    }

    /// Lets rank 0 do what needs [`Trainer::gather`], such as saving, while all other ranks hand over
    /// the parts it asks for. `None` on those.
    ///
    /// # Errors
    /// What `work` says; a rank that failed.
    pub fn on_lead<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<Option<T>, Error> {
        if self.world.is_alone() {
            return work(self).map(Some);
        }
        let world = self.world.clone();
        let prefix = world.round("read");
        world.at(format!("handing parameters over after step {}", self.step));
        launch::reporting(&world, || {
            if !world.is_lead() {
                self.hand_over(&prefix)?;
                world.barrier("read")?;
                return Ok(None);
            }
            self.reading = Some((prefix.clone(), 0));
            let done = work(self);
            let asked = self.reading.take().map_or(0, |(_, asked)| asked);
            // An empty name: nothing more is asked for.
            world.set(&format!("{prefix}/{asked}"), &[])?;
            let done = done?;
            world.barrier("read")?;
            world.remove(&format!("{prefix}/"))?;
            Ok(Some(done))
        })
    }

    /// Hands over this rank's parts of what rank 0 asks for, until it asks no more.
    fn hand_over(&mut self, prefix: &str) -> Result<(), Error> {
        for asked in 0u64.. {
            let key = format!("{prefix}/{asked}");
            let name = String::from_utf8_lossy(&self.world.get(&key, false)?).into_owned();
            if name.is_empty() {
                break;
            }
            for (rank, _) in self.holders(&name)? {
                if self.runtime.ranks().contains(&rank) {
                    let part = self.runtime.read_slot(rank, &name)?;
                    self.world.set(&format!("{key}/{rank}"), &part.bytes)?;
                }
            }
        }
        Ok(())
    }

    /// The ranks whose parts make the whole of a slot, each with its part.
    fn holders(&self, name: &str) -> Result<Vec<(u64, &'a Slot)>, Error> {
        let mut holders: Vec<(u64, &'a Slot)> = Vec::new();
        for program in self.compiled.programs()? {
            // A stage of a pipeline holds the parameters that it reads.
            let Some(slot) = program.slots.iter().find(|slot| slot.name == name) else { continue };
            if !holders.iter().any(|(_, known)| known.slice == slot.slice) {
                holders.push((program.rank, slot));
            }
        }
        match holders.is_empty() {
            true => Err(Error::Bug(format!("no rank has a slot `{name}`"))),
            false => Ok(holders),
        }
    }

    /// The whole of a parameter or an optimizer state (`NAME.m`, `NAME.v`), from the ranks' parts.
    /// Where every rank is a process, only within [`Trainer::on_lead`].
    ///
    /// # Errors
    /// A name that no rank has; parts of another process outside of [`Trainer::on_lead`].
    pub fn gather(&mut self, name: &str) -> Result<HostTensor, Error> {
        let holders = self.holders(name)?;
        let key = self.reading.as_mut().map(|(prefix, asked)| {
            *asked += 1;
            format!("{prefix}/{}", *asked - 1)
        });
        if let Some(key) = &key {
            self.world.set(key, name.as_bytes())?;
        }
        let mut whole: Option<HostTensor> = None;
        for (rank, slot) in holders {
            let part = if self.runtime.ranks().contains(&rank) {
                self.runtime.read_slot(rank, name)?
            } else if let Some(key) = &key {
                HostTensor { ty: slot.part(), bytes: self.world.get(&format!("{key}/{rank}"), true)? }
            } else {
                let message = format!("a part of `{name}` is in the process of rank {rank}");
                return Err(Error::request(message, "gather within Trainer::on_lead, which all ranks call"));
            };
            whole.get_or_insert_with(|| HostTensor::zeros(slot.ty.clone())).set_part(&slot.slice, &part);
        }
        whole.ok_or_else(|| Error::Bug("there are no programs".into()))
    }

    /// Every parameter, whole, one after the other; as [`Trainer::gather`].
    pub fn parameters(&mut self) -> Result<BTreeMap<String, HostTensor>, Error> {
        let slots = self.compiled.programs()?.iter().flat_map(|program| &program.slots);
        let names: BTreeSet<String> = slots.filter(|slot| slot.is_parameter).map(|slot| slot.name.clone()).collect();
        names.into_iter().map(|name| Ok((name.clone(), self.gather(&name)?))).collect()
    }

    /// Bytes taken on the fullest device.
    pub fn peak_bytes(&self) -> Bytes {
        self.runtime.peak_bytes()
    }
}

/// Fills the parameters of the runtime's ranks: with what is given, else by what the runtime makes of their
/// initialisers in place, else from here. Ranks that hold the same part share its making.
fn initialise(compiled: &Compiled, runtime: &mut dyn Runtime, weights: &dyn Weights, seed: u64) -> Result<(), Error> {
    let (here, model) = (runtime.ranks(), &compiled.model);
    let programs = compiled.programs()?.iter().filter(|program| here.contains(&program.rank));
    let slots = programs.flat_map(|program| program.slots.iter().map(|slot| (program.rank, slot)));
    let mut holders: BTreeMap<&str, Vec<(u64, &Slot)>> = BTreeMap::new();
    for (rank, slot) in slots.filter(|(_, slot)| slot.is_parameter) {
        holders.entry(&slot.name).or_default().push((rank, slot));
    }
    let mut left: Vec<(u64, String)> = Vec::new();
    for (name, holders) in &holders {
        let given = write_parts(runtime, holders, |slot| given_part(model, weights, name, &slot.ty, &slot.slice))?;
        left.extend(given.into_iter().map(|rank| (rank, (*name).to_string())));
    }
    let left: BTreeSet<(u64, String)> = runtime.make_slots(&model.init, seed, left)?.into_iter().collect();
    for (name, mut holders) in holders {
        holders.retain(|(rank, _)| left.contains(&(*rank, name.to_string())));
        write_parts(runtime, &holders, |slot| Ok(Some(evaluate_part(&model.init, name, &slot.slice, seed)?)))?;
    }
    Ok(())
}

/// Writes what `make` gives for each part of a parameter to the ranks that hold it; the ranks for which there is none.
fn write_parts(
    runtime: &mut dyn Runtime,
    holders: &[(u64, &Slot)],
    make: impl Fn(&Slot) -> Result<Option<HostTensor>, Error>,
) -> Result<Vec<u64>, Error> {
    let mut parts: BTreeMap<_, Option<HostTensor>> = BTreeMap::new();
    let mut without = Vec::new();
    for (rank, slot) in holders {
        if !parts.contains_key(&slot.slice) {
            // The last of uneven parts may be empty.
            let part = slot.part();
            parts.insert(&slot.slice, if part.elements() == 0 { Some(HostTensor::zeros(part)) } else { make(slot)? });
        }
        match &parts[&slot.slice] {
            Some(part) => runtime.write_slot(*rank, &slot.name, part)?,
            None => without.push(*rank),
        }
    }
    Ok(without)
}

/// A part of a parameter's initial value that need not be computed: from the weights, else from data that the module
/// held.
pub(crate) fn given_part(
    model: &Model,
    weights: &dyn Weights,
    name: &str,
    ty: &TensorType,
    slice: &[(u64, u64)],
) -> Result<Option<HostTensor>, Error> {
    let part = weights.part(name, ty, slice)?;
    Ok(part.or_else(|| model.values.get(name).map(|whole| whole.part(slice))))
}

/// A part of a parameter's initial value: from the weights, else from data that the module held,
/// else from its initialiser.
pub fn parameter_part(
    model: &Model,
    weights: &dyn Weights,
    name: &str,
    ty: &TensorType,
    slice: &[(u64, u64)],
    seed: u64,
) -> Result<HostTensor, Error> {
    match given_part(model, weights, name, ty, slice)? {
        Some(part) => Ok(part),
        None => Ok(evaluate_part(&model.init, name, slice, seed)?),
    }
}
