//! Writes a directory that transformers reads.

use super::layout::{FileTensor, prefix, tensors};
use super::weights::transpose;
use super::{HfError, config, io};
use crate::zoo::Config;
use serde_json::{Map, Value, json};
use shardc_ir::{DType, HostTensor, TensorType};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The size at which transformers begins another file.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Writes `config.json` and the weights in f32 to a directory, which is made if it is not there.
/// `read` gives each parameter as a whole. All files are written under other names and take their
/// places only when every byte is on the disk, so a failure (a full disk, a parameter that cannot
/// be read) leaves what was there before.
///
/// # Errors
///
/// See [`HfError`]; whatever `read` gives.
pub fn save(
    dir: impl AsRef<Path>,
    config: &Config,
    read: impl FnMut(&str) -> Result<HostTensor, HfError>,
) -> Result<(), HfError> {
    save_in_shards(dir, config, read, SHARD_BYTES)
}

/// [`save`] with files of at most `limit` bytes of weights, or of one tensor.
///
/// # Errors
///
/// As [`save`].
pub fn save_in_shards(
    dir: impl AsRef<Path>,
    config: &Config,
    mut read: impl FnMut(&str) -> Result<HostTensor, HfError>,
    limit: u64,
) -> Result<(), HfError> {
    let dir = dir.as_ref();
    std::fs::create_dir_all(dir).map_err(io(dir))?;
    let shards = divide(tensors(config), limit);
    let count = shards.len();
    let file_name = |index: usize| match count {
        1 => "model.safetensors".to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    let mut files: Vec<(PathBuf, PathBuf)> = Vec::new();
    let mut write_all = || -> Result<(), HfError> {
        let mut map = Map::new();
        let mut total = 0;
        for (index, shard) in shards.iter().enumerate() {
            let name = file_name(index);
            files.push(places(dir, &name));
            let path = files[index].0.clone();
            write_shard(&path, shard, config, &mut read)?;
            for tensor in shard {
                map.insert(full_name(tensor, config), Value::from(name.clone()));
                total += bytes(tensor);
            }
        }
        if count > 1 {
            files.push(places(dir, "model.safetensors.index.json"));
            let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
            write_text(&files[count].0, &format!("{index:#}\n"))?;
        }
        let place = places(dir, "config.json");
        files.push(place.clone());
        write_text(&place.0, &config::write(config))
    };
    let written = write_all();
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
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io(dir))
}

/// Where a file is written, and where it goes in the end.
fn places(dir: &Path, name: &str) -> (PathBuf, PathBuf) {
    (dir.join(format!(".{name}.partial")), dir.join(name))
}

fn full_name(tensor: &FileTensor, config: &Config) -> String {
    if tensor.outside { tensor.name.clone() } else { format!("{}{}", prefix(config), tensor.name) }
}

fn bytes(tensor: &FileTensor) -> u64 {
    tensor.shape.iter().product::<u64>() * DType::F32.size()
}

/// The tensors in order, in files of at most `limit` bytes (or one tensor).
fn divide(tensors: Vec<FileTensor>, limit: u64) -> Vec<Vec<FileTensor>> {
    let mut shards: Vec<Vec<FileTensor>> = vec![Vec::new()];
    let mut size = 0;
    for tensor in tensors {
        if size > 0 && size + bytes(&tensor) > limit {
            shards.push(Vec::new());
            size = 0;
        }
        size += bytes(&tensor);
        if let Some(shard) = shards.last_mut() {
            shard.push(tensor);
        }
    }
    shards
}

fn write_shard(
    path: &Path,
    tensors: &[FileTensor],
    config: &Config,
    read: &mut impl FnMut(&str) -> Result<HostTensor, HfError>,
) -> Result<(), HfError> {
    let mut header = Map::new();
    header.insert("__metadata__".to_string(), json!({ "format": "pt" }));
    let mut at = 0;
    for tensor in tensors {
        let end = at + bytes(tensor);
        let entry = json!({ "dtype": "F32", "shape": tensor.shape, "data_offsets": [at, end] });
        header.insert(full_name(tensor, config), entry);
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
    let mut whole = HostTensor::zeros(TensorType::new(DType::F32, tensor.shape.clone()));
    let last = tensor.shape.len() - 1;
    let width = tensor.shape[last] / tensor.parameters.len() as u64;
    for (index, name) in tensor.parameters.iter().enumerate() {
        let mut part: Vec<(u64, u64)> = tensor.shape.iter().map(|size| (0, *size)).collect();
        part[last] = (index as u64 * width, width);
        let parameter = read(name)?;
        let mut expected: Vec<u64> = part.iter().map(|(_, length)| *length).collect();
        if tensor.transposed {
            expected.reverse();
        }
        let expected = TensorType::new(DType::F32, expected);
        if parameter.ty != expected {
            let message = format!("is {}; the model has {expected}", parameter.ty);
            return Err(HfError::Parameter { name: name.clone(), message });
        }
        whole.set_part(&part, &if tensor.transposed { transpose(&parameter) } else { parameter });
    }
    Ok(whole)
}

fn write_text(path: &Path, text: &str) -> Result<(), HfError> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    write().map_err(io(path))
}

/// Removes weights of an earlier save that are not part of this one.
fn remove_stale(dir: &Path, files: &[(PathBuf, PathBuf)]) -> Result<(), HfError> {
    for entry in std::fs::read_dir(dir).map_err(io(dir))? {
        let path = entry.map_err(io(dir))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let shard = name.starts_with("model-") && name.ends_with(".safetensors") && name.contains("-of-");
        let weights = shard || name == "model.safetensors" || name == "model.safetensors.index.json";
        if weights && !files.iter().any(|(_, kept)| *kept == path) {
            std::fs::remove_file(&path).map_err(io(&path))?;
        }
    }
    Ok(())
}
