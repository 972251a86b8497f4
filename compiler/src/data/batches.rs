//! Exact batches: a safetensors file with a tensor `NAME.STEP` for every input and step.

use crate::error::DataError;
use safetensors::{Dtype, SafeTensors};
use shardc_ir::{DType, HostTensor, TensorType};
use shardc_models::zoo::Range;
use shardc_runtime::Feeds;
use shardc_runtime::mapped::MappedFile;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The batches of every step, in memory.
pub struct ExactBatches {
    path: PathBuf,
    steps: Vec<Feeds>,
}

impl ExactBatches {
    /// Reads a file. Steps count from 0 without a gap, and all have the same tensors.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let wrong = |what: String| DataError::Malformed { path: path.to_path_buf(), what };
        let bytes = MappedFile::open(path).map_err(|source| DataError::Io { path: path.to_path_buf(), source })?;
        if bytes.is_empty() {
            return Err(DataError::Empty { path: path.to_path_buf() });
        }
        let file =
            SafeTensors::deserialize(&bytes).map_err(|error| wrong(format!("not a safetensors file: {error}")))?;
        let mut steps: BTreeMap<u64, Feeds> = BTreeMap::new();
        for (full, view) in file.iter() {
            let (name, step) = full
                .rsplit_once('.')
                .and_then(|(name, step)| Some((name, step.parse::<u64>().ok()?)))
                .ok_or_else(|| wrong(format!("tensor `{full}` is not named NAME.STEP")))?;
            let dtype = element_type(view.dtype())
                .ok_or_else(|| wrong(format!("tensor `{full}` has type {:?}, which no input has", view.dtype())))?;
            let shape: Vec<u64> = view.shape().iter().map(|size| *size as u64).collect();
            let tensor = HostTensor { ty: TensorType::new(dtype, shape), bytes: view.data().to_vec() };
            if steps.entry(step).or_default().insert(name.to_string(), tensor.into()).is_some() {
                return Err(wrong(format!("`{full}` is not the only tensor of `{name}` in step {step}")));
            }
        }
        for (expected, step) in steps.keys().enumerate() {
            if expected as u64 != *step {
                return Err(wrong(format!("it has step {step} but not step {expected}")));
            }
        }
        let steps: Vec<_> = steps.into_values().collect();
        let Some(first) = steps.first() else { return Err(wrong("it has no tensor, and none NAME.0".to_string())) };
        for (step, tensors) in steps.iter().enumerate() {
            for (name, tensor) in first {
                match tensors.get(name) {
                    None => return Err(wrong(format!("step {step} has no tensor `{name}`"))),
                    Some(other) if other.ty != tensor.ty => {
                        return Err(wrong(format!("`{name}.{step}` is {}, `{name}.0` is {}", other.ty, tensor.ty)));
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(Self { path: path.to_path_buf(), steps })
    }

    /// The number of steps.
    pub fn steps(&self) -> u64 {
        self.steps.len() as u64
    }

    /// The batch and the sequence length: the shape of `input_ids`; without tokens the first dimension of
    /// any tensor, and no sequence.
    pub fn shape(&self) -> Option<(u64, u64)> {
        let first = self.steps.first()?;
        match first.get("input_ids").map(|ids| &ids.ty.shape[..]) {
            Some([batch, seq]) => Some((*batch, *seq)),
            Some(_) => None,
            None => first.values().find_map(|tensor| tensor.ty.shape.first()).map(|batch| (*batch, 0)),
        }
    }

    /// Checks that every input is there, with its type, and that its integers are in the range that it has.
    pub fn check(
        &self,
        inputs: &[(String, TensorType)],
        range: &dyn Fn(&str) -> Option<Range>,
    ) -> Result<(), DataError> {
        for (step, tensors) in self.steps.iter().enumerate() {
            let batch = select(&self.path, tensors, step as u64, inputs)?;
            for (name, ids) in &batch {
                range(name).map_or(Ok(()), |range| check_range(&self.path, name, step, ids, range))?;
            }
        }
        Ok(())
    }

    /// The tensors of a step.
    pub fn batch(&self, step: u64, inputs: &[(String, TensorType)]) -> Result<Feeds, DataError> {
        match self.steps.get(step as usize) {
            Some(tensors) => select(&self.path, tensors, step, inputs),
            None => Err(DataError::TooFewSteps { path: self.path.clone(), steps: self.steps(), step }),
        }
    }
}

fn select(path: &Path, tensors: &Feeds, step: u64, inputs: &[(String, TensorType)]) -> Result<Feeds, DataError> {
    let mut batch = BTreeMap::new();
    for (name, expected) in inputs {
        let path = path.to_path_buf();
        let Some(tensor) = tensors.get(name) else {
            let known = tensors.keys().cloned().collect::<Vec<_>>().join(", ");
            return Err(DataError::MissingInput { path, input: name.clone(), known });
        };
        if tensor.ty != *expected {
            let (input, ty, expected) = (format!("{name}.{step}"), tensor.ty.clone(), expected.clone());
            return Err(DataError::WrongType { path, input, ty, expected });
        }
        batch.insert(name.clone(), tensor.clone());
    }
    if let Some(input) = tensors.keys().find(|name| !batch.contains_key(*name)) {
        let known = batch.keys().cloned().collect::<Vec<_>>().join(", ");
        return Err(DataError::ForeignInput { path: path.to_path_buf(), input: input.clone(), known });
    }
    Ok(batch)
}

fn check_range(path: &Path, name: &str, step: usize, ids: &HostTensor, range: Range) -> Result<(), DataError> {
    if ids.ty.dtype != DType::I64 {
        return Ok(());
    }
    let (numbers, _) = ids.bytes.as_chunks::<8>();
    let mut numbers = numbers.iter().map(|bytes| i64::from_le_bytes(*bytes)).enumerate();
    let Some((position, value)) = numbers.find(|(_, value)| !range.holds(*value)) else { return Ok(()) };
    let (path, position) = (path.to_path_buf(), position as u64);
    Err(match name {
        "input_ids" => {
            DataError::BeyondVocabulary { path, tokenizer: None, token: value, position, vocab: range.below }
        }
        _ => DataError::BeyondRange { path, input: format!("{name}.{step}"), value, position, range },
    })
}

fn element_type(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::Bf16,
        Dtype::F16 => DType::F16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::BOOL => DType::Bool,
        _ => return None,
    })
}
