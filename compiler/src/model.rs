//! MODEL: a built-in name, a Hugging Face directory, or one in which the weights of a built-in model were saved.

use crate::compile::Trace;
use crate::error::Error;
use crate::estimate::Sizes;
use crate::options::Batch;
use crate::saved::{gathered, saved_weights};
use crate::train::{FromInitialisers, Trainer, Weights};
use shardc_models::Model;
use shardc_models::hf::{self, Beside, HfWeights};
use shardc_models::zoo::{self, Config};
use std::path::{Path, PathBuf};

/// What stands between the name of a model and the number of its layers, where that is another than its own.
const LAYERS: &str = "@layers=";

/// The most layers that a name may ask for, and that are tried for the largest model: programs list every one.
pub const MOST_LAYERS: u64 = 1 << 10;

/// The shortest batch there is: neither sizes nor parameters depend on it.
const SHORTEST: Batch = Batch { batch: 1, seq: 2 };

/// A model that a user named.
#[derive(Clone, Debug)]
pub struct NamedModel {
    /// As the user named it.
    pub name: String,
    /// Its sizes.
    pub config: Config,
    dir: Option<PathBuf>,
    /// The tokenizer that lies beside the weights, or lay beside those of a model with another number of layers.
    tokenizer: Option<PathBuf>,
    /// The built-in model of a family without a Hugging Face form whose weights lie in that directory.
    saved: Option<String>,
}

impl NamedModel {
    /// The model of a name, or of a directory with a `config.json`.
    ///
    /// # Errors
    /// An unknown name, with the nearest one; a directory that is not a model of a known family.
    pub fn find(name: &str) -> Result<Self, Error> {
        if name.trim().is_empty() {
            let fix = "`shardc models` lists the names; a directory with config.json and safetensors is a model too";
            return Err(Error::request("the name of the model is empty", fix));
        }
        let dir = Path::new(name);
        if let Some(entry) = zoo::list().into_iter().find(|entry| entry.name == name) {
            if dir.is_dir() {
                tracing::warn!("{name} is the built-in model with random weights, not the directory: that is ./{name}");
            }
            return Ok(Self::from_config(name, entry.config));
        }
        if dir.is_dir() {
            return Self::in_dir(name, dir);
        }
        if let Some((base, layers)) = name.rsplit_once(LAYERS) {
            let count = layers.parse().ok().filter(|count| (1..=MOST_LAYERS).contains(count)).ok_or_else(|| {
                let message = format!("`{layers}` layers of {base}: it must be a whole number from 1 to {MOST_LAYERS}");
                Error::request(message, format!("write {base}{LAYERS}2"))
            })?;
            return Self::find(base)?.with_layers(count);
        }
        if dir.is_file() {
            return Err(Error::request(
                format!("{name} is a file; a model is a built-in name or a directory with config.json and safetensors"),
                "name the directory; plan files are for `train`, `explain` and `verify`",
            ));
        }
        // Whatever looks like a path was meant as one.
        if name.contains(['/', '\\']) {
            let fix = "a model is a built-in name, or the path of a directory with config.json and safetensors; a path that \
                       does not begin with `/`, a plan's too, is one from the working directory";
            return Err(Error::request(format!("{name}: there is no such directory"), fix));
        }
        let error = zoo::build(name, 1, 2).err();
        Err(error.map_or_else(|| Error::Bug(format!("model `{name}` is listed and not found")), Error::from))
    }

    /// The model of a directory.
    fn in_dir(name: &str, dir: &Path) -> Result<Self, Error> {
        let (name, at) = (name.to_string(), Some(dir.to_path_buf()));
        let tokenizer = Some(dir.join("tokenizer.json")).filter(|path| path.is_file());
        let saved = if dir.join("config.json").exists() { None } else { hf::saved_model(dir)? };
        let Some(model) = saved else {
            return Ok(Self { name, config: hf::read_config(dir)?, dir: at, tokenizer, saved: None });
        };
        let built_in = if Path::new(&model).is_dir() { None } else { Self::find(&model).ok() };
        let Some(Self { config, .. }) = built_in else {
            let message = format!("{name} has the weights of `{model}`, which is no built-in model");
            return Err(Error::request(message, "load them into your own model, with `shardc::saved_weights`"));
        };
        Ok(Self { name, config, dir: at, tokenizer, saved: Some(model) })
    }

    /// The same with another number of layers, and with weights from the initialisers: `NAME@layers=N`.
    ///
    /// # Errors
    /// A model without layers that are alike.
    pub fn with_layers(&self, layers: u64) -> Result<Self, Error> {
        let mut config = self.config.clone();
        let Some(count) = config.layers() else {
            let message = format!("{} has no layers that are alike", self.name);
            return Err(Error::request(message, "leave the number of layers out"));
        };
        if *count as u64 == layers && self.dir.is_none() {
            return Ok(self.clone());
        }
        *count = layers as usize;
        // Of what has no Hugging Face form the directory tells the built-in model alone.
        let name = self.saved.as_ref().unwrap_or(&self.name);
        let base = name.rsplit_once(LAYERS).map_or(&**name, |(base, _)| base);
        let tokenizer = self.tokenizer.clone();
        Ok(Self { tokenizer, ..Self::from_config(&format!("{base}{LAYERS}{layers}"), config) })
    }

    /// A model of these sizes, with weights from the initialisers.
    pub fn from_config(name: &str, config: Config) -> Self {
        Self { name: name.to_string(), config, dir: None, tokenizer: None, saved: None }
    }

    /// The number of tokens it knows, if it is a language model.
    pub fn vocabulary(&self) -> Option<u64> {
        self.config.vocabulary().map(|tokens| tokens as u64)
    }

    /// How large it is.
    ///
    /// # Errors
    /// Sizes that make no sense.
    pub fn sizes(&self) -> Result<Sizes, Error> {
        Ok(Sizes::of(&self.trace(SHORTEST)?.graph))
    }

    /// Its weights: those of the directory, or none.
    ///
    /// # Errors
    /// A file that is missing or cut short, a tensor of another shape.
    pub fn weights(&self) -> Result<Box<dyn Weights>, Error> {
        match &self.dir {
            None => Ok(Box::new(FromInitialisers)),
            Some(dir) if self.has_hf_form() => Ok(Box::new(HfWeights::open(dir, &self.config)?)),
            Some(dir) => Ok(Box::new(saved_weights(dir, &self.trace(SHORTEST)?)?)),
        }
    }

    /// The tokenizer of a directory.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        self.tokenizer.clone()
    }

    /// What is saved beside the trained weights: what lies beside those of the model now, where it is a directory, and
    /// `tokenizer` if its text is read by another.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn beside(&self, tokenizer: Option<&Path>) -> Result<Beside, Error> {
        if !self.has_hf_form() {
            return Ok(Beside::default());
        }
        let mut beside = self.dir.as_deref().map(Beside::read).transpose()?.unwrap_or_default();
        if let Some(path) = tokenizer.or(self.tokenizer.as_deref().filter(|_| self.dir.is_none())) {
            beside.add("tokenizer.json", path)?;
        }
        Ok(beside)
    }

    /// Writes the trained parameters as a Hugging Face directory (as [`Trainer::save`] does, where the family has none), with
    /// what was read of what lies [`beside`](Self::beside) them. A parameter at a time is gathered from the ranks, and what
    /// was there before stays until all of it is on the disk. Where every rank is a process, all call this, and rank 0
    /// writes.
    pub fn save(&self, dir: &Path, trainer: &mut Trainer<'_>, beside: &Beside) -> Result<(), Error> {
        if !self.has_hf_form() {
            return trainer.save_named(dir, self.saved.as_deref().unwrap_or(&self.name));
        }
        gathered(trainer, |read| hf::save(dir, &self.config, beside, read))
    }

    /// Whether models of its family are written as Hugging Face directories.
    pub fn has_hf_form(&self) -> bool {
        matches!(self.config, Config::Gpt2(_) | Config::Llama(_))
    }

    /// The longest sequence it can be given, where positions are learned.
    pub fn positions(&self) -> Option<u64> {
        self.config.positions().map(|positions| positions as u64)
    }
}

impl Trace for NamedModel {
    fn trace(&self, batch: Batch) -> Result<Model, Error> {
        // The graph's name is a word of the text form.
        let is_word = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
        let name: String = self.name.chars().map(|letter| if is_word(letter) { letter } else { '_' }).collect();
        Ok(zoo::build_config(&name, &self.config, batch.batch as usize, batch.seq as usize)?)
    }

    fn name(&self) -> Option<String> {
        Some(self.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is traced has as many parameters as the sizes say, and its blocks' matrices are most of them.
    #[test]
    fn traces_tell_how_large_models_are() {
        for entry in zoo::list() {
            let sizes = NamedModel::from_config(entry.name, entry.config.clone()).sizes().unwrap();
            assert_eq!(sizes.parameters, entry.config.parameters(), "{}", entry.name);
            assert!(sizes.at_once <= sizes.parameters && sizes.matrices < sizes.parameters, "{sizes:?}");
        }
        let sizes = NamedModel::find("llama-1b").unwrap().sizes().unwrap();
        assert_eq!((sizes.at_once, sizes.parameters - sizes.matrices), (128_256 * 2048, (2 * 128_256 + 33) * 2048));
    }
}
