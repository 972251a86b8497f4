//! Saving a model of no published format: a directory of safetensors, written atomically.
//!
//! Everything goes to a sibling directory first and takes the final name by renaming, so a save
//! that fails half way (a full disk) leaves what was there before.

use crate::error::Error;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::json;
use shardc_ir::{DType, HostTensor};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes `model.safetensors`, with the parameters under their own names, and `shardc.json`.
pub fn save_tensors(dir: &Path, model: &str, parameters: &BTreeMap<String, HostTensor>) -> Result<(), Error> {
    replace_dir(dir, |temporary| {
        let mut views = Vec::new();
        for (name, tensor) in parameters {
            let shape: Vec<usize> = tensor.ty.shape.iter().map(|size| *size as usize).collect();
            let view = TensorView::new(dtype(tensor.ty.dtype), shape, &tensor.bytes);
            views.push((name.as_str(), view.map_err(|error| Error::Bug(format!("`{name}`: {error}")))?));
        }
        let path = temporary.join("model.safetensors");
        let failed = |error| match error {
            safetensors::SafeTensorError::IoError(source) => Error::Io { path: path.clone(), source },
            other => Error::Bug(other.to_string()),
        };
        serialize_to_file(views, None, &path).map_err(failed)?;
        sync(&path)?;
        let path = temporary.join("shardc.json");
        let text = format!("{:#}\n", json!({"model": model, "format": "shardc parameters", "version": 1}));
        fs::write(&path, text).map_err(|source| Error::Io { path: path.clone(), source })?;
        sync(&path)
    })
}

/// Fills a directory beside `dir`, then puts it in the place of `dir`.
pub fn replace_dir(dir: &Path, fill: impl FnOnce(&Path) -> Result<(), Error>) -> Result<(), Error> {
    let sibling = |suffix: &str| {
        let mut name = dir.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{suffix}-{}", std::process::id()));
        dir.with_file_name(name)
    };
    let io = |path: &Path| {
        let path: PathBuf = path.to_path_buf();
        move |source| Error::Io { path, source }
    };
    let (temporary, old) = (sibling("saving"), sibling("old"));
    fs::create_dir_all(&temporary).map_err(io(&temporary))?;
    if let Err(error) = fill(&temporary) {
        // The error that matters is the first; the rest of the directory is of no use.
        let _ = fs::remove_dir_all(&temporary);
        return Err(error);
    }
    let had_old = dir.exists();
    if had_old {
        fs::rename(dir, &old).map_err(io(dir))?;
    }
    if let Err(source) = fs::rename(&temporary, dir) {
        if had_old {
            let _ = fs::rename(&old, dir);
        }
        return Err(io(dir)(source));
    }
    if had_old {
        fs::remove_dir_all(&old).map_err(io(&old))?;
    }
    Ok(())
}

fn sync(path: &Path) -> Result<(), Error> {
    let file = fs::File::open(path).and_then(|file| file.sync_all());
    file.map_err(|source| Error::Io { path: path.to_path_buf(), source })
}

fn dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::F8e4m3 => Dtype::F8_E4M3,
        DType::F8e5m2 => Dtype::F8_E5M2,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::Bool => Dtype::BOOL,
    }
}
