//! Hugging Face directories: `config.json` and one or many `*.safetensors` with an index.
//!
//! A directory is never read as a whole: [`HfWeights::read`] gives any part of any parameter, by
//! reads at offsets, so each rank reads its own shards. [`save`] writes a directory that
//! transformers reads; nothing that was there is touched before everything new is on the disk.
//! What lies beside the weights (the rest of `config.json`, a tokenizer) is kept: [`Beside`].
//! The element types of files are f32, bf16 and f16; parameters are f32.
//!
//! A model of no Hugging Face family is written as the same files by [`save_plain`], under the names
//! of its modules and with `shardc.json` in the place of `config.json`.

mod beside;
mod config;
mod layout;
mod save;
mod weights;

use crate::trace::Model;
use crate::zoo::{Config, ZooError, build_config};
use shardc_ir::TensorType;
use std::path::{Path, PathBuf};

pub use beside::Beside;
pub use save::{check_place, holds_model, is_part, save, save_in_shards, save_plain, saved_model};
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
    /// A field of the configuration that no model can have.
    #[error("{}: field `{field}` must be {expect}, not {value}", .path.display())]
    Field {
        /// The configuration.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What it must be.
        expect: String,
    },
    /// An architecture, or an option of one, that is not supported.
    #[error("{}: {message}", .path.display())]
    Unsupported {
        /// The configuration.
        path: PathBuf,
        /// What it asks for, and what there is.
        message: String,
    },
    /// A directory without weights.
    #[error(
        "{}: weights are read from model.safetensors, or from the files of model.safetensors.index.json, and neither \
         is there",
        .path.display()
    )]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },
    /// A tensor that no file has.
    #[error("{}: tensor `{tensor}` is in no file", .path.display())]
    MissingTensor {
        /// The directory.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor of elements that no parameter has.
    #[error("{}: tensor `{tensor}` has elements of {dtype}, and parameters are read from F32, BF16 or F16", .path.display())]
    ForeignType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The elements' type, as the file calls it.
        dtype: String,
    },
    /// A tensor of another type than the model's.
    #[error("{}: tensor `{tensor}` is {actual}; the model has it as {expected}", .path.display())]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        actual: TensorType,
        /// What it should be.
        expected: TensorType,
    },
    /// A head of its own beside an embedding that the configuration says it is tied to.
    #[error("{}: `{head}` differs from the embedding of the tokens, to which the model ties it", .path.display())]
    NotTied {
        /// The directory.
        path: PathBuf,
        /// The tensor of the head.
        head: String,
    },
    /// A configuration of something else where a model is to be saved.
    #[error("{}: it is no model's configuration (it has no `model_type`), and a model is saved beside it", .path.display())]
    Foreign {
        /// The configuration.
        path: PathBuf,
    },
    /// A parameter that the model does not have, or a part outside it.
    #[error("parameter `{name}`: {message}")]
    Parameter {
        /// The parameter.
        name: String,
        /// What is wrong.
        message: String,
    },
    /// A model of a family that Hugging Face's directories are not read or written for.
    #[error("only GPT-2 and Llama are read and written as Hugging Face directories")]
    NoFormat,
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
