//! MODEL: a built-in name or a Hugging Face directory.

use crate::compile::Trace;
use crate::error::Error;
use crate::options::Batch;
use crate::train::{FromInitialisers, Weights};
use shardc_ir::HostTensor;
use shardc_models::Model;
use shardc_models::zoo::{self, Config, Entry};
use std::collections::BTreeMap;
use std::path::Path;

/// A model that a user named.
#[derive(Clone, Debug)]
pub struct NamedModel {
    /// As the user named it.
    pub name: String,
    /// Its sizes.
    pub config: Config,
}

impl NamedModel {
    /// The model of a name.
    ///
    /// # Errors
    /// An unknown name, with the nearest one; a directory that is not a model of a known family.
    pub fn find(name: &str) -> Result<Self, Error> {
        let entries = zoo::list();
        match entries.iter().find(|entry| entry.name == name) {
            Some(Entry { config, .. }) => Ok(Self { name: name.to_string(), config: config.clone() }),
            None => {
                Err(zoo::build(name, 1, 2).err().map_or_else(|| Error::Bug(format!("no entry `{name}`")), Into::into))
            }
        }
    }

    /// The number of tokens it knows.
    pub fn vocabulary(&self) -> u64 {
        self.config.vocabulary() as u64
    }

    /// Its weights: those of the directory, or none.
    pub fn weights(&self) -> Result<Box<dyn Weights>, Error> {
        Ok(Box::new(FromInitialisers))
    }

    /// Writes the trained parameters.
    pub fn save(&self, dir: &Path, parameters: &BTreeMap<String, HostTensor>) -> Result<(), Error> {
        crate::save::save_tensors(dir, &self.name, parameters)
    }

    /// The longest sequence it can be given, where positions are learned.
    pub fn positions(&self) -> Option<u64> {
        match &self.config {
            Config::Gpt2(config) => Some(config.positions as u64),
            Config::Llama(_) => None,
        }
    }
}

impl Trace for NamedModel {
    fn trace(&self, batch: Batch) -> Result<Model, Error> {
        let name: String =
            self.name.chars().map(|c| if c.is_alphanumeric() || "-._".contains(c) { c } else { '_' }).collect();
        Ok(zoo::build_config(&name, &self.config, batch.batch as usize, batch.seq as usize)?)
    }

    fn name(&self) -> Option<String> {
        Some(self.name.clone())
    }
}
