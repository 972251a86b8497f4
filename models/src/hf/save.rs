//! Writes directories of weights, whole or not at all.

use super::beside;
use super::layout::{FileTensor, plain, tensors};
use super::weights::{file_name, transpose};
use super::{Beside, HfError, io};
use crate::zoo::Config;
use serde_json::{Map, Value, json};
use shardc_ir::{HostTensor, TensorType};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The size at which transformers begins another file.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Writes `config.json` and the weights in f32 to a directory, which is made if it is not there, with
/// what lay `beside` the model before. `read` gives each parameter as a whole. All files are written
/// under other names and take their places only when every byte is on the disk, so a failure (a full
/// disk, a parameter that cannot be read) leaves what was there before.
///
/// # Errors
///
/// See [`HfError`]; whatever `read` gives.
pub fn save(
    dir: impl AsRef<Path>,
    config: &Config,
    beside: &Beside,
    read: impl FnMut(&str) -> Result<HostTensor, HfError>,
) -> Result<(), HfError> {
    write_directory(dir.as_ref(), tensors(config)?, beside.files(config), read, SHARD_BYTES)
}

/// [`save`] with files of at most `limit` bytes of weights, or of one tensor.
///
/// # Errors
///
/// As [`save`].
pub fn save_in_shards(
    dir: impl AsRef<Path>,
    config: &Config,
    read: impl FnMut(&str) -> Result<HostTensor, HfError>,
    limit: u64,
) -> Result<(), HfError> {
    write_directory(dir.as_ref(), tensors(config)?, Beside::default().files(config), read, limit)
}

/// Writes a model of no Hugging Face family, as [`save`] does: its parameters under their own names,
/// and `shardc.json`, which says what they are.
///
/// # Errors
///
/// As [`save`].
pub fn save_plain(
    dir: impl AsRef<Path>,
    model: &str,
    parameters: &[(String, TensorType)],
    read: impl FnMut(&str) -> Result<HostTensor, HfError>,
) -> Result<(), HfError> {
    let types: Map<String, Value> =
        parameters.iter().map(|(name, ty)| (name.clone(), Value::from(ty.to_string()))).collect();
    let count: u64 = parameters.iter().map(|(_, ty)| ty.elements()).sum();
    let text = json!({ "format": 1, "model": model, "numbers": count, "parameters": types });
    let files = vec![(DESCRIPTION.to_string(), format!("{text:#}\n").into_bytes())];
    write_directory(dir.as_ref(), plain(parameters), files, read, SHARD_BYTES)
}

/// The names under which weights in one file, the list of those in several, and a configuration lie.
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// Whether a file of this name is a part of a model that lies in a directory.
pub fn is_part(name: &str) -> bool {
    is_weights(name) || name == CONFIG || name == DESCRIPTION || beside::FILES.contains(&name)
}

fn is_weights(name: &str) -> bool {
    let is_shard = name.starts_with("model-") && name.ends_with(".safetensors") && name.contains("-of-");
    is_shard || name == WEIGHTS || name == INDEX
}

/// Checks that nothing of another kind lies where a model is to be saved: what is saved is read again by its `config.json`.
///
/// # Errors
///
/// A `config.json` that is no model's; a directory of a name that a file is to have.
pub fn check_place(dir: &Path) -> Result<(), HfError> {
    let names = [WEIGHTS, INDEX, CONFIG, DESCRIPTION];
    if let Some(path) = names.map(|name| dir.join(name)).into_iter().find(|path| path.is_dir()) {
        return Err(io(&path)(std::io::ErrorKind::IsADirectory.into()));
    }
    let path = dir.join(CONFIG);
    let is_model = |text: &str| {
        let value: Option<Value> = serde_json::from_str(text).ok();
        value.is_some_and(|value| value["model_type"].is_string())
    };
    match std::fs::read_to_string(&path) {
        Ok(text) if !is_model(&text) => Err(HfError::Foreign { path }),
        _ => Ok(()),
    }
}

/// Whether weights of a model lie in a directory.
pub fn holds_model(dir: &Path) -> bool {
    [WEIGHTS, INDEX].iter().any(|name| dir.join(name).exists())
}

/// The file beside the weights that [`save_plain`] wrote, which says what they are.
const DESCRIPTION: &str = "shardc.json";

/// The model of which [`save_plain`] wrote the weights that lie in a directory; none, if it did not.
///
/// # Errors
///
/// A file that cannot be read, or names no model.
pub fn saved_model(dir: &Path) -> Result<Option<String>, HfError> {
    let path = dir.join(DESCRIPTION);
    if !path.is_file() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path).map_err(io(&path))?;
    let malformed = |message: String| HfError::Malformed { path: path.clone(), message };
    let description: Value = serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?;
    let model = description["model"].as_str().ok_or_else(|| malformed("it names no `model`".to_string()))?;
    Ok(Some(model.to_string()))
}

fn write_directory(
    dir: &Path,
    tensors: Vec<FileTensor>,
    others: Vec<(String, Vec<u8>)>,
    mut read: impl FnMut(&str) -> Result<HostTensor, HfError>,
    limit: u64,
) -> Result<(), HfError> {
    std::fs::create_dir_all(dir).map_err(io(dir))?;
    check_place(dir)?;
    // Of runs that save to one place at once, one does behind the other. Where there are no locks they must not.
    let place = File::open(dir).map_err(io(dir))?;
    let _ = place.lock();
    let shards = divide(tensors, limit);
    let count = shards.len();
    let shard_name = |index: usize| match count {
        1 => WEIGHTS.to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let mut files: Vec<(PathBuf, PathBuf)> = Vec::new();
    let write_all = || -> Result<(), HfError> {
        let mut map = Map::new();
        let mut total = 0;
        for (index, shard) in shards.iter().enumerate() {
            let name = shard_name(index);
            files.push(places(dir, &name));
            let path = files[index].0.clone();
            write_shard(&path, shard, &mut read)?;
            for tensor in shard {
                map.insert(tensor.name.clone(), Value::from(name.clone()));
                total += tensor.ty.bytes().0;
            }
        }
        let mut others = others;
        if count > 1 {
            let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
            others.push((INDEX.to_string(), format!("{index:#}\n").into_bytes()));
        }
        for (name, contents) in others {
            let place = places(dir, &name);
            files.push(place.clone());
            write_file(&place.0, &contents)?;
        }
        Ok(())
    };
    let written = write_all().and_then(|()| {
        // All take their places, or none does.
        let taken = files.iter().find(|(_, path)| path.is_dir());
        taken.map_or(Ok(()), |(_, path)| Err(io(path)(std::io::ErrorKind::IsADirectory.into())))
    });
    if let Err(error) = written {
        for (partial, _) in &files {
            // The first error is the one to tell.
            let _ = std::fs::remove_file(partial);
        }
        return Err(error);
    }
    for (partial, path) in &files {
        std::fs::rename(partial, path).map_err(io(path))?;
    }
    remove_stale(dir, &files)?;
    place.sync_all().map_err(io(dir))
}

/// Where a file is written, and where it goes in the end.
fn places(dir: &Path, name: &str) -> (PathBuf, PathBuf) {
    (dir.join(format!(".{name}.partial")), dir.join(name))
}

/// The tensors in order, in files of at most `limit` bytes (or one tensor).
fn divide(tensors: Vec<FileTensor>, limit: u64) -> Vec<Vec<FileTensor>> {
    let mut shards: Vec<Vec<FileTensor>> = vec![Vec::new()];
    let mut size = 0;
    for tensor in tensors {
        let bytes = tensor.ty.bytes().0;
        if size > 0 && size + bytes > limit {
            shards.push(Vec::new());
            size = 0;
        }
        size += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push(tensor);
        }
    }
    shards
}

fn write_shard(
    path: &Path,
    tensors: &[FileTensor],
    read: &mut impl FnMut(&str) -> Result<HostTensor, HfError>,
) -> Result<(), HfError> {
    let mut header = Map::new();
    header.insert("__metadata__".to_string(), json!({ "format": "pt" }));
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.ty.bytes().0;
        let (dtype, shape) = (file_name(tensor.ty.dtype), &tensor.ty.shape);
        header.insert(tensor.name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] }));
        at = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // The format aligns the data to eight bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = File::create(path).map_err(io(path))?;
    let mut writer = BufWriter::new(file);
    writer.write_all(&(header.len() as u64).to_le_bytes()).map_err(io(path))?;
    writer.write_all(&header).map_err(io(path))?;
    for tensor in tensors {
        let whole = assemble(tensor, read)?;
        writer.write_all(&whole.bytes).map_err(io(path))?;
    }
    let file = writer.into_inner().map_err(|error| io(path)(error.into_error()))?;
    file.sync_all().map_err(io(path))
}

/// A tensor of a file from its parameters.
fn assemble(
    tensor: &FileTensor,
    read: &mut impl FnMut(&str) -> Result<HostTensor, HfError>,
) -> Result<HostTensor, HfError> {
    let mut whole = HostTensor::zeros(tensor.ty.clone());
    let count = tensor.parameters.len() as u64;
    for (index, name) in (0..).zip(&tensor.parameters) {
        let mut part: Vec<(u64, u64)> = tensor.ty.shape.iter().map(|size| (0, *size)).collect();
        if let Some(last) = part.last_mut() {
            *last = (index * (last.1 / count), last.1 / count);
        }
        let parameter = read(name)?;
        let mut expected: Vec<u64> = part.iter().map(|(_, length)| *length).collect();
        if tensor.transposed {
            expected.reverse();
        }
        let expected = tensor.ty.with_shape(expected);
        if parameter.ty != expected {
            let message = format!("is {}; the model has {expected}", parameter.ty);
            return Err(HfError::Parameter { name: name.clone(), message });
        }
        whole.set_part(&part, &if tensor.transposed { transpose(&parameter) } else { parameter });
    }
    Ok(whole)
}

fn write_file(path: &Path, contents: &[u8]) -> Result<(), HfError> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(contents)?;
        file.sync_all()
    };
    write().map_err(io(path))
}

/// Removes weights of an earlier save, and what described them, that are not part of this one.
fn remove_stale(dir: &Path, files: &[(PathBuf, PathBuf)]) -> Result<(), HfError> {
    for entry in std::fs::read_dir(dir).map_err(io(dir))? {
        let path = entry.map_err(io(dir))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let describes = name == CONFIG || name == DESCRIPTION;
        if (is_weights(&name) || describes) && !files.iter().any(|(_, kept)| *kept == path) {
            std::fs::remove_file(&path).map_err(io(&path))?;
        }
    }
    Ok(())
}
