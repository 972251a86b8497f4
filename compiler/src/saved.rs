//! Trained parameters of any model on the disk, and back.
//!
//! A model of a Hugging Face family is written as a directory of that family
//! ([`NamedModel::save`](crate::NamedModel::save)); every other one under the names of its modules
//! ([`Trainer::save`]), and read again as [`Weights`] by [`saved_weights`].

use crate::error::Error;
use crate::train::{Trainer, Weights};
use shardc_ir::{HostTensor, Op, TensorType};
use shardc_models::Model;
use shardc_models::hf::{HfError, HfWeights, save_plain};
use std::path::Path;

impl Trainer<'_> {
    /// Writes every parameter to `model.safetensors` of a directory (several files where they are
    /// large), under its module path, and `shardc.json`, which says what they are. A parameter at a
    /// time is gathered from the ranks, and what was there before stays until all is on the disk. Where
    /// every rank is a process, all call this, and rank 0 writes.
    ///
    /// # Errors
    /// A directory that cannot be written, a rank that failed.
    pub fn save(&mut self, dir: &Path) -> Result<(), Error> {
        let name = self.compiled().model.name.clone();
        self.save_named(dir, &name)
    }

    /// The same, of a model of that name.
    pub(crate) fn save_named(&mut self, dir: &Path, name: &str) -> Result<(), Error> {
        let parameters = parameters(&self.compiled().model);
        gathered(self, |read| save_plain(dir, name, &parameters, read))
    }
}

/// The weights that [`Trainer::save`] wrote, for a model with the same parameters.
///
/// # Errors
/// A file that is missing or cut short, a parameter that is in none or of another type.
pub fn saved_weights(dir: &Path, model: &Model) -> Result<HfWeights, Error> {
    Ok(HfWeights::open_plain(dir, &parameters(model))?)
}

fn parameters(model: &Model) -> Vec<(String, TensorType)> {
    let leaves = model.graph.leaves().filter_map(|(value, node)| match &node.op {
        Op::Parameter(parameter) => Some((parameter.name.clone(), model.graph.ty(value).clone())),
        _ => None,
    });
    leaves.collect()
}

/// Saves with parameters that are gathered from the ranks when they are asked for. What goes wrong
/// in gathering is told as itself.
pub(crate) fn gathered(
    trainer: &mut Trainer<'_>,
    save: impl FnOnce(&mut dyn FnMut(&str) -> Result<HostTensor, HfError>) -> Result<(), HfError>,
) -> Result<(), Error> {
    let saved = trainer.on_lead(|trainer| {
        let mut failed = None;
        let saved = save(&mut |name| {
            trainer.gather(name).map_err(|error| {
                let message = error.to_string();
                failed = Some(error);
                HfError::Parameter { name: name.to_string(), message }
            })
        });
        match (saved, failed) {
            (Ok(()), _) => Ok(()),
            (Err(_), Some(error)) => Err(error),
            (Err(error), None) => Err(error.into()),
        }
    });
    saved.map(drop)
}

impl Weights for HfWeights {
    fn part(&self, name: &str, _: &TensorType, slice: &[(u64, u64)]) -> Result<Option<HostTensor>, Error> {
        Ok(Some(self.read(name, slice)?))
    }
}
