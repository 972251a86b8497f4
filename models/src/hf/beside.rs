//! What lies beside the weights of a directory, and is kept when a trained model is saved.

use super::{HfError, config, io};
use crate::zoo::Config;
use serde_json::{Map, Value};
use std::path::Path;

/// The files from which transformers makes a tokenizer, and how a model is asked to write text.
pub(super) const FILES: [&str; 10] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// What lies beside the weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Beside {
    /// The fields of `config.json`.
    config: Map<String, Value>,
    /// Names and contents of other files.
    files: Vec<(String, Vec<u8>)>,
}

impl Beside {
    /// What lies beside the weights of a directory.
    ///
    /// # Errors
    ///
    /// A file that is there and cannot be read; a `config.json` that is not one.
    pub fn read(dir: &Path) -> Result<Self, HfError> {
        let config = config::read_map(&dir.join("config.json"))?;
        let mut beside = Self { config, files: Vec::new() };
        for name in FILES.iter().filter(|name| dir.join(name).is_file()) {
            beside.add(name, &dir.join(name))?;
        }
        Ok(beside)
    }

    /// Adds a file under a name of its own, in the place of one of that name.
    ///
    /// # Errors
    ///
    /// A file that cannot be read.
    pub fn add(&mut self, name: &str, path: &Path) -> Result<(), HfError> {
        let contents = std::fs::read(path).map_err(io(path))?;
        self.files.retain(|(known, _)| known != name);
        self.files.push((name.to_string(), contents));
        Ok(())
    }

    /// Every file to be written beside the weights of a model.
    ///
    /// Of `config.json` only the two fields are replaced that training changes: the element type
    /// (f32 masters are written) and the architecture (a bare inner model is written with its head).
    pub(super) fn files(&self, model: &Config) -> Vec<(String, Vec<u8>)> {
        let made = config::write(model);
        let merged = match self.config.is_empty() {
            true => made,
            false => {
                let mut kept = self.config.clone();
                // Before version 5, transformers had another name for it.
                for field in ["architectures", "dtype", "torch_dtype"] {
                    let value = made.get(if field == "torch_dtype" { "dtype" } else { field });
                    if let Some(value) = value.filter(|_| field != "torch_dtype" || kept.contains_key(field)) {
                        kept.insert(field.to_string(), value.clone());
                    }
                }
                kept
            }
        };
        let text = format!("{:#}\n", Value::Object(merged)).into_bytes();
        let mut files = self.files.clone();
        files.push(("config.json".to_string(), text));
        files
    }
}
