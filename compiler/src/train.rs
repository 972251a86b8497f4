//! The training loop: parameters in, steps, parameters out.
//!
//! A [`Trainer`] holds one run: a runtime whose slots hold the parameters and the optimizer state.
//! Parameters are made shard by shard, so no rank ever holds one that is not its own.

use crate::compile::Compiled;
use crate::error::Error;
use crate::learning_rate::LearningRate;
use crate::metrics::StepMetrics;
use shardc_ir::{Bytes, HostTensor, TensorType};
use shardc_models::Model;
use shardc_passes::optimizer::{GRAD_NORM, LEARNING_RATE, STEP};
use shardc_runtime::{Runtime, RuntimeError, Span, TimedStep, evaluate_part};
use std::collections::BTreeMap;
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

/// One run of training.
pub struct Trainer<'a> {
    compiled: &'a Compiled,
    runtime: Box<dyn Runtime>,
    options: TrainOptions,
    step: u64,
}

impl<'a> Trainer<'a> {
    /// Starts a runtime on the compiled programs and fills its parameters.
    pub fn start(
        compiled: &'a Compiled,
        mut runtime: Box<dyn Runtime>,
        weights: &dyn Weights,
        options: TrainOptions,
    ) -> Result<Self, Error> {
        initialise(compiled, runtime.as_mut(), weights, options.seed)?;
        Ok(Self { compiled, runtime, options, step: 0 })
    }

    /// Runs the next step on a global batch: one tensor per input of the model.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if the loss is not a finite number, with the step and the first tensor
    /// that is not.
    pub fn step(&mut self, batch: BTreeMap<String, HostTensor>) -> Result<StepMetrics, Error> {
        let mut run =
            |runtime: &mut dyn Runtime, batch: &_| Ok(TimedStep { readings: runtime.step(batch)?, spans: Vec::new() });
        Ok(self.run(batch, &mut run)?.0)
    }

    /// Runs the next step as [`Trainer::step`] does, and measures every instruction of it, which takes time of its own.
    pub fn timed_step(&mut self, batch: BTreeMap<String, HostTensor>) -> Result<(StepMetrics, Vec<Span>), Error> {
        self.run(batch, &mut |runtime, batch| runtime.timed_step(batch))
    }

    fn run(
        &mut self,
        mut batch: BTreeMap<String, HostTensor>,
        run: &mut dyn FnMut(&mut dyn Runtime, &BTreeMap<String, HostTensor>) -> Result<TimedStep, RuntimeError>,
    ) -> Result<(StepMetrics, Vec<Span>), Error> {
        let rate = self.options.learning_rate.at(self.step);
        batch.insert(LEARNING_RATE.into(), HostTensor::from_f32([], &[rate as f32]));
        batch.insert(STEP.into(), HostTensor::from_f32([], &[(self.step + 1) as f32]));
        let start = Instant::now();
        let TimedStep { readings, spans } = run(self.runtime.as_mut(), &batch)?;
        let step_s = start.elapsed().as_secs_f64();
        let reading = |name: &str| readings.get(name).copied().unwrap_or(f64::NAN);
        let metrics = StepMetrics {
            step: self.step,
            loss: reading(LOSS),
            grad_norm: reading(GRAD_NORM),
            learning_rate: rate,
            step_s,
            tokens_per_s: self.compiled.tokens_per_step() as f64 / step_s,
            peak_device_bytes: self.runtime.peak_bytes().0,
            predicted_step_s: self.compiled.plan().prediction.step.0,
        };
        if !metrics.loss.is_finite() || !metrics.grad_norm.is_finite() {
            let first = self.runtime.first_non_finite()?;
            let (step, loss, grad_norm) = (self.step, metrics.loss, metrics.grad_norm);
            return Err(Error::NotFinite { step, loss, grad_norm, first });
        }
        self.step += 1;
        Ok((metrics, spans))
    }

    /// What is trained.
    pub fn compiled(&self) -> &'a Compiled {
        self.compiled
    }

    /// The whole of a parameter or an optimizer state (`NAME.m`, `NAME.v`), from the ranks' parts.
    pub fn gather(&mut self, name: &str) -> Result<HostTensor, Error> {
        let mut whole: Option<HostTensor> = None;
        for program in self.compiled.programs()? {
            let slot = program.slots.iter().find(|slot| slot.name == name);
            let slot = slot.ok_or_else(|| Error::Bug(format!("rank {} has no slot `{name}`", program.rank)))?;
            let part = self.runtime.read_slot(program.rank, name)?;
            let whole = whole.get_or_insert_with(|| HostTensor::zeros(slot.ty.clone()));
            whole.set_part(&slot.slice, &part);
            if slot.slice.iter().zip(&slot.ty.shape).all(|((_, length), size)| length == size) {
                break;
            }
        }
        whole.ok_or_else(|| Error::Bug("there are no programs".into()))
    }

    /// Every parameter, whole, one after the other.
    pub fn parameters(&mut self) -> Result<BTreeMap<String, HostTensor>, Error> {
        let slots = self.compiled.programs()?.first().map(|program| program.slots.as_slice()).unwrap_or_default();
        let names: Vec<String> = slots.iter().filter(|slot| slot.is_parameter).map(|slot| slot.name.clone()).collect();
        names.into_iter().map(|name| Ok((name.clone(), self.gather(&name)?))).collect()
    }

    /// Bytes taken on the fullest device.
    pub fn peak_bytes(&self) -> Bytes {
        self.runtime.peak_bytes()
    }
}

/// Fills every rank's parameters. Ranks that hold the same part share its making.
fn initialise(compiled: &Compiled, runtime: &mut dyn Runtime, weights: &dyn Weights, seed: u64) -> Result<(), Error> {
    let programs = compiled.programs()?;
    let slots = programs.first().map(|program| program.slots.len()).unwrap_or_default();
    for index in 0..slots {
        let mut made: Vec<(&[(u64, u64)], HostTensor)> = Vec::new();
        for program in programs {
            let slot = &program.slots[index];
            if !slot.is_parameter {
                continue;
            }
            if !made.iter().any(|(slice, _)| *slice == slot.slice) {
                let part = parameter_part(&compiled.model, weights, &slot.name, &slot.ty, &slot.slice, seed)?;
                made.push((&slot.slice, part));
            }
            for (_, part) in made.iter().filter(|(slice, _)| *slice == slot.slice) {
                runtime.write_slot(program.rank, &slot.name, part)?;
            }
        }
    }
    Ok(())
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
    if let Some(part) = weights.part(name, ty, slice)? {
        return Ok(part);
    }
    match model.values.get(name) {
        Some(whole) => Ok(whole.part(slice)),
        None => Ok(evaluate_part(&model.init, name, slice, seed)?),
    }
}
