//! Hugging Face directories: `config.json` and one or many `*.safetensors` with an index.
//!
//! A directory is never read as a whole: [`HfWeights::read`] gives any part of any parameter, by
//! reads at offsets, so each rank reads its own shards. [`save`] writes a directory that
//! transformers reads; nothing that was there is touched before everything new is on the disk.
//! The element types of files are f32, bf16 and f16; parameters are f32.

mod config;
mod layout;
mod save;
mod weights;

use crate::trace::Model;
use crate::zoo::{Config, ZooError, build_config};
use std::path::{Path, PathBuf};

pub use save::{save, save_in_shards};
pub use weights::HfWeights;

/// Why a directory cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum HfError {
    /// The system refused a file.
    #[error("{}: {error}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// A file that is not what it should be: truncated, or not of its format.
    #[error("{}: {message}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The configuration lacks a field.
    #[error("{}: field `{field}` is missing", .path.display())]
    MissingField {
        /// The configuration.
        path: PathBuf,
        /// The field.
        field: String,
    },
    /// An architecture, or an option of one, that is not supported.
    #[error("{}: {message}", .path.display())]
    Unsupported {
        /// The configuration.
        path: PathBuf,
        /// What it asks for, and what there is.
        message: String,
    },
    /// A tensor that no file has.
    #[error("{}: tensor `{tensor}` is in no file", .path.display())]
    MissingTensor {
        /// The directory.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor of another shape than the configuration says.
    #[error("{}: tensor `{tensor}` is {actual:?}; config.json makes it {expected:?}", .path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        actual: Vec<u64>,
        /// What it should be.
        expected: Vec<u64>,
    },
    /// A parameter that the model does not have, or a part outside it.
    #[error("parameter `{name}`: {message}")]
    Parameter {
        /// The parameter.
        name: String,
        /// What is wrong.
        message: String,
    },
    /// The sizes do not make a model.
    #[error(transparent)]
    Model(#[from] ZooError),
}

/// Opens a directory as a model for a batch of `batch` sequences of `seq` tokens. Every tensor is
/// looked up and its shape compared; no numbers are read yet.
///
/// # Errors
///
/// See [`HfError`].
pub fn open(dir: impl AsRef<Path>, batch: usize, seq: usize) -> Result<(Model, HfWeights), HfError> {
    let dir = dir.as_ref();
    let config = read_config(dir)?;
    let name = dir.file_name().map_or_else(|| "model".to_string(), |name| name.to_string_lossy().into_owned());
    let weights = HfWeights::open(dir, &config)?;
    Ok((build_config(&name, &config, batch, seq)?, weights))
}

/// The sizes that a directory's `config.json` gives.
///
/// # Errors
///
/// See [`HfError`].
pub fn read_config(dir: &Path) -> Result<Config, HfError> {
    config::read(&dir.join("config.json"))
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> HfError {
    let path = path.to_path_buf();
    move |error| HfError::Io { path, error }
}
