//! Reads parts of parameters from safetensors files.

use super::layout::{FileTensor, HEAD, plain, tensors};
use super::{HfError, io};
use crate::zoo::Config;
use serde_json::Value;
use shardc_ir::tensor::for_each_row;
use shardc_ir::{DType, HostTensor, TensorType};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The longest header that is believed; the format's own limit.
const HEADER_LIMIT: u64 = 100_000_000;

/// How tensors are called that a model makes itself, and that files of old have: masks, frequencies.
const MADE: [&str; 3] = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];

/// How many numbers of a matrix are compared at a time.
const COMPARED: u64 = 1 << 22;

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Place {
    shard: usize,
    offset: u64,
    ty: TensorType,
}

/// Where a parameter lies.
#[derive(Clone, Debug)]
struct Source {
    place: Place,
    transposed: bool,
    /// The parameter's first index along the tensor's last dimension.
    column: u64,
    ty: TensorType,
}

/// The weights of a directory, open but not read.
#[derive(Debug)]
pub struct HfWeights {
    shards: Vec<Shard>,
    sources: BTreeMap<String, Source>,
}

impl HfWeights {
    /// The weights of a directory, for a model of these sizes. Every tensor is looked up and its
    /// shape compared; no numbers are read yet.
    ///
    /// # Errors
    ///
    /// A file that is missing, cut short or malformed; a tensor that is missing or of another shape; a head that
    /// differs from the embedding to which it is tied. Other tensors of the files are named in a warning.
    pub fn open(dir: &Path, config: &Config) -> Result<Self, HfError> {
        let (weights, mut beyond) = Self::find(dir, tensors(config)?)?;
        if let (Some(place), Some(embedding)) = (beyond.remove(HEAD), weights.sources.get("token.weight"))
            && !weights.are_equal(&place, &embedding.place)?
        {
            return Err(HfError::NotTied { path: dir.to_path_buf(), head: HEAD.to_string() });
        }
        let is_made = |name: &String| MADE.iter().any(|made| name.ends_with(made));
        let unused: Vec<String> = beyond.into_keys().filter(|name| !is_made(name)).collect();
        if !unused.is_empty() {
            let shown = unused.iter().take(3).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            let more = if unused.len() > 3 { format!(" and {} more", unused.len() - 3) } else { String::new() };
            let dir = dir.display();
            tracing::warn!("{dir}: the model of config.json has no place for {shown}{more}, which are not read");
        }
        Ok(weights)
    }

    /// The weights that [`save_plain`](super::save_plain) wrote, for a model of these parameters.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_plain(dir: &Path, parameters: &[(String, TensorType)]) -> Result<Self, HfError> {
        Ok(Self::find(dir, plain(parameters))?.0)
    }

    /// Where the tensors of a model lie, and what lies beside them.
    fn find(dir: &Path, tensors: Vec<FileTensor>) -> Result<(Self, BTreeMap<String, Place>), HfError> {
        let (mut shards, mut places, mut foreign) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let (paths, index) = shard_paths(dir)?;
        for path in paths {
            let file = File::open(&path).map_err(io(&path))?;
            let of = path.file_name().unwrap_or_default();
            // A tensor that several files have is that of the file in which the index has it.
            let is_here = |name: &String| index.get(name).is_none_or(|file| of == file.as_str());
            let mut found = BTreeMap::new();
            let others = read_header(&path, &file, shards.len(), &mut found)?;
            places.extend(found.into_iter().filter(|(name, _)| is_here(name)));
            foreign.extend(others.into_iter().map(|(name, dtype)| (name, (shards.len(), dtype))));
            shards.push(Shard { path, file });
        }
        let mut sources = BTreeMap::new();
        for tensor in tensors {
            let place = places.remove(&tensor.name).or_else(|| places.remove(tensor.bare.as_ref()?));
            let missing = || {
                let name = [Some(&tensor.name), tensor.bare.as_ref()].into_iter().flatten();
                let found = name.into_iter().find_map(|name| Some((name, foreign.get(name)?)));
                match found {
                    Some((name, (shard, dtype))) => HfError::ForeignType {
                        path: shards[*shard].path.clone(),
                        tensor: name.clone(),
                        dtype: dtype.clone(),
                    },
                    None => HfError::MissingTensor { path: dir.to_path_buf(), tensor: tensor.name.clone() },
                }
            };
            let place: Place = place.ok_or_else(missing)?;
            let is_float = |dtype| matches!(dtype, DType::F32 | DType::Bf16 | DType::F16);
            let converts = tensor.ty.dtype == DType::F32 && is_float(place.ty.dtype);
            if tensor.ty.dtype == DType::F32 && !converts {
                return Err(HfError::ForeignType {
                    path: shards[place.shard].path.clone(),
                    tensor: tensor.name,
                    dtype: file_name(place.ty.dtype).to_string(),
                });
            }
            if place.ty.shape != tensor.ty.shape || (place.ty.dtype != tensor.ty.dtype && !converts) {
                return Err(HfError::WrongType {
                    path: shards[place.shard].path.clone(),
                    tensor: tensor.name,
                    actual: place.ty,
                    expected: tensor.ty,
                });
            }
            let mut shape = tensor.ty.shape.clone();
            let mut width = 0;
            if let Some(last) = shape.last_mut() {
                *last /= tensor.parameters.len() as u64;
                width = *last;
            }
            if tensor.transposed {
                shape.reverse();
            }
            for (index, parameter) in tensor.parameters.into_iter().enumerate() {
                let column = index as u64 * width;
                let (place, transposed, ty) = (place.clone(), tensor.transposed, tensor.ty.with_shape(shape.clone()));
                sources.insert(parameter, Source { place, transposed, column, ty });
            }
        }
        Ok((Self { shards, sources }, places))
    }

    /// Whether two matrices hold the same numbers; a few rows of each are in memory at a time.
    fn are_equal(&self, first: &Place, second: &Place) -> Result<bool, HfError> {
        if (first.shard, first.offset) == (second.shard, second.offset) {
            return Ok(true);
        }
        let (&[rows, columns], true) = (&first.ty.shape[..], first.ty.shape == second.ty.shape) else {
            return Ok(false);
        };
        let at_once = (COMPARED / columns.max(1)).max(1);
        for row in (0..rows).step_by(at_once as usize) {
            let part = [(row, at_once.min(rows - row)), (0, columns)];
            let numbers = |place: &Place| Ok::<_, HfError>(widen(place.ty.dtype, &self.read_part(place, &part)?));
            if numbers(first)? != numbers(second)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The names of the parameters.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.keys().map(String::as_str)
    }

    /// A part of a parameter, floats in f32: per dimension, the first index and the length.
    ///
    /// # Errors
    ///
    /// A parameter that there is not, a part outside it, a file that cannot be read.
    pub fn read(&self, name: &str, slice: &[(u64, u64)]) -> Result<HostTensor, HfError> {
        let wrong = |message: String| HfError::Parameter { name: name.to_string(), message };
        let source = self.sources.get(name).ok_or_else(|| wrong("the files have none of this name".to_string()))?;
        let inside = slice.len() == source.ty.shape.len()
            && slice
                .iter()
                .zip(&source.ty.shape)
                .all(|((first, length), size)| first.checked_add(*length).is_some_and(|end| end <= *size));
        if !inside {
            return Err(wrong(format!("part {slice:?} is not inside {:?}", source.ty.shape)));
        }
        let mut part = slice.to_vec();
        if source.transposed {
            part.reverse();
        }
        if let Some((first, _)) = part.last_mut() {
            *first += source.column;
        }
        let shape: Vec<u64> = part.iter().map(|(_, length)| *length).collect();
        let bytes = self.read_part(&source.place, &part)?;
        let tensor = match source.ty.dtype {
            DType::F32 => HostTensor::from_f32(shape, &widen(source.place.ty.dtype, &bytes)),
            _ => HostTensor { ty: source.ty.with_shape(shape), bytes },
        };
        Ok(if source.transposed { transpose(&tensor) } else { tensor })
    }

    /// A parameter as a whole, as [`read`](Self::read) gives its parts.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn read_whole(&self, name: &str) -> Result<HostTensor, HfError> {
        let shape = self.sources.get(name).map(|source| source.ty.shape.clone()).unwrap_or_default();
        let whole: Vec<(u64, u64)> = shape.iter().map(|size| (0, *size)).collect();
        self.read(name, &whole)
    }

    /// The bytes of a part, as they are in the file.
    fn read_part(&self, place: &Place, part: &[(u64, u64)]) -> Result<Vec<u8>, HfError> {
        let shard = &self.shards[place.shard];
        let (mut bytes, mut failure) = (Vec::new(), None);
        for_each_row(&place.ty, part, |offset, length| {
            if failure.is_some() {
                return;
            }
            let end = bytes.len();
            bytes.resize(end + length, 0u8);
            let read = shard.file.read_exact_at(&mut bytes[end..], place.offset + offset as u64);
            failure = read.err();
        });
        match failure {
            Some(error) => Err(HfError::Io { path: shard.path.clone(), error }),
            None => Ok(bytes),
        }
    }
}

fn widen(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        DType::Bf16 => pairs().map(|pair| half::bf16::from_le_bytes(pair).to_f32()).collect(),
        DType::F16 => pairs().map(|pair| half::f16::from_le_bytes(pair).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// The transpose of a matrix of f32.
pub(super) fn transpose(matrix: &HostTensor) -> HostTensor {
    let [rows, columns] = [0, 1].map(|dim| matrix.ty.shape[dim] as usize);
    let mut result = HostTensor::zeros(matrix.ty.with_shape([columns as u64, rows as u64]));
    for row in 0..rows {
        for column in 0..columns {
            let (from, to) = ((row * columns + column) * 4, (column * rows + row) * 4);
            result.bytes[to..to + 4].copy_from_slice(&matrix.bytes[from..from + 4]);
        }
    }
    result
}

/// The files of a directory, the single one or else those of the index; and the file of each tensor of the index.
fn shard_paths(dir: &Path) -> Result<(Vec<PathBuf>, BTreeMap<String, String>), HfError> {
    let index = dir.join("model.safetensors.index.json");
    let single = dir.join("model.safetensors");
    if single.exists() {
        return Ok((vec![single], BTreeMap::new()));
    }
    if !index.exists() {
        return Err(HfError::NoWeights { path: dir.to_path_buf() });
    }
    let malformed = |message: String| HfError::Malformed { path: index.clone(), message };
    let text = std::fs::read_to_string(&index).map_err(io(&index))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| malformed(format!("not JSON: {error}")))?;
    let map = value.get("weight_map").ok_or_else(|| malformed("`weight_map` is missing".to_string()))?;
    let map = map.as_object().ok_or_else(|| malformed("`weight_map` is no object".to_string()))?;
    if let Some((name, file)) = map.iter().find(|(_, file)| !file.is_string()) {
        return Err(malformed(format!("the file of tensor `{name}` is {file}, which is no name of a file")));
    }
    let names: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
    if let Some(name) = names.iter().find(|name| Path::new(name).components().count() != 1 || name.starts_with('.')) {
        return Err(malformed(format!("`{name}` is not the name of a file in this directory")));
    }
    let files = map.iter().filter_map(|(name, file)| Some((name.clone(), file.as_str()?.to_string()))).collect();
    Ok((names.into_iter().map(|name| dir.join(name)).collect(), files))
}

/// Reads where the tensors of a file lie, and checks that the file is long enough for them.
fn read_header(
    path: &Path,
    file: &File,
    shard: usize,
    places: &mut BTreeMap<String, Place>,
) -> Result<Vec<(String, String)>, HfError> {
    let malformed = |message: String| HfError::Malformed { path: path.to_path_buf(), message };
    let size = file.metadata().map_err(io(path))?.len();
    let mut length = [0; 8];
    if size < 8 {
        return Err(malformed(format!("{size} bytes are no safetensors file")));
    }
    file.read_exact_at(&mut length, 0).map_err(io(path))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT {
        return Err(malformed("no safetensors file: the length of its header makes no sense".to_string()));
    }
    if 8 + length > size {
        return Err(malformed(format!("truncated: the header alone is {length} bytes, the file {size}")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 8).map_err(io(path))?;
    let header: Value = serde_json::from_slice(&header).map_err(|error| malformed(format!("bad header: {error}")))?;
    let header = header.as_object().ok_or_else(|| malformed("bad header: not an object".to_string()))?;
    let (mut foreign, mut spans) = (Vec::new(), Vec::new());
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let (ty, start, end) = parse_entry(entry).map_err(|what| malformed(format!("tensor `{name}`: {what}")))?;
        spans.push((start, end, name));
        let ty = match ty {
            Ok(ty) => ty,
            Err(dtype) => {
                foreign.push((name.clone(), dtype));
                continue;
            }
        };
        if start.checked_add(ty.bytes().0) != Some(end) {
            return Err(malformed(format!("tensor `{name}`: {ty} does not take {start}..{end}")));
        }
        if end > size - 8 - length {
            let there = size - 8 - length;
            return Err(malformed(format!("truncated: tensor `{name}` ends at byte {end} of {there}")));
        }
        places.insert(name.clone(), Place { shard, offset: 8 + length + start, ty });
    }
    // By the format no byte is of two tensors, so one of them has the numbers of the other.
    spans.sort_unstable();
    for ((_, end, first), (start, _, second)) in spans.iter().zip(spans.iter().skip(1)) {
        if start < end {
            return Err(malformed(format!("tensors `{first}` and `{second}` take the same bytes")));
        }
    }
    Ok(foreign)
}

/// The type (the name of its elements' if that is one that no parameter has) and the bytes of a tensor.
fn parse_entry(entry: &Value) -> Result<(Result<TensorType, String>, u64, u64), String> {
    let field = |name: &str| entry.get(name).ok_or_else(|| format!("no `{name}`"));
    let dtype = field("dtype")?;
    let dtype = dtype.as_str().ok_or_else(|| format!("`dtype` is {dtype}, which names no type"))?;
    let list = |name: &str, count: Option<usize>, expect: &str| {
        let value = field(name)?;
        let sizes = |list: &Vec<Value>| list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>();
        let sizes = value.as_array().and_then(sizes).filter(|sizes| count.is_none_or(|count| sizes.len() == count));
        sizes.ok_or_else(|| format!("`{name}` is {value}, not {expect}"))
    };
    let shape = list("shape", None, "a list of sizes")?;
    let offsets = list("data_offsets", Some(2), "where it begins and ends")?;
    shape.iter().try_fold(8u64, |product, size| product.checked_mul(*size)).ok_or("its size makes no sense")?;
    let known = DType::ALL.into_iter().find(|known| file_name(*known) == dtype);
    let ty = known.map(|known| TensorType::new(known, shape)).ok_or_else(|| dtype.to_string());
    Ok((ty, offsets[0], offsets[1]))
}

/// The name of an element type in the files.
pub(super) fn file_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
        DType::F16 => "F16",
        DType::F8e4m3 => "F8_E4M3",
        DType::F8e5m2 => "F8_E5M2",
        DType::I64 => "I64",
        DType::I32 => "I32",
        DType::Bool => "BOOL",
        DType::U8 => "U8",
    }
}
