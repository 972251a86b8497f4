//! The record of a run: one line of JSON per step.

use crate::error::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// What one step did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The step, from 0.
    pub step: u64,
    /// The loss before the update.
    pub loss: f64,
    /// The global norm of the gradients, before clipping. If it is not finite, the step was skipped; JSON has no such
    /// numbers, so that it is written as `null`, and read as a NaN.
    #[serde(deserialize_with = "number_or_null")]
    pub grad_norm: f64,
    /// By what the loss was scaled, where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// The learning rate.
    pub learning_rate: f64,
    /// The measured time in seconds.
    pub step_s: f64,
    /// Tokens of the global batch over the measured time.
    pub tokens_per_s: f64,
    /// Bytes taken on the fullest device.
    pub peak_device_bytes: u64,
    /// The time the plan predicts, in seconds.
    pub predicted_step_s: f64,
}

impl StepMetrics {
    /// Whether nothing was updated, because scaled gradients overflowed.
    pub fn is_skipped(&self) -> bool {
        self.loss_scale.is_some() && !self.grad_norm.is_finite()
    }
}

/// A number, or what stands for one that is not finite.
fn number_or_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// A file of steps.
pub struct MetricsFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl MetricsFile {
    /// Makes the file anew.
    pub fn create(path: &Path) -> Result<Self, Error> {
        let path = path.to_path_buf();
        match File::create(&path) {
            Ok(file) => Ok(Self { path, file: BufWriter::new(file) }),
            Err(source) => Err(Error::Io { path, source }),
        }
    }

    /// Appends a step; it is on disk when this returns, so that a run can be followed.
    pub fn write(&mut self, step: &StepMetrics) -> Result<(), Error> {
        let line = serde_json::to_string(step).map_err(|error| Error::Bug(error.to_string()))?;
        let written = writeln!(self.file, "{line}").and_then(|()| self.file.flush());
        written.map_err(|source| Error::Io { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_skipped_step_can_be_read() {
        for grad_norm in [0.5, f64::INFINITY, f64::NAN] {
            let step = StepMetrics {
                step: 3,
                loss: 2.5,
                grad_norm,
                loss_scale: Some(65_536.0),
                learning_rate: 1e-3,
                step_s: 0.25,
                tokens_per_s: 512.0,
                peak_device_bytes: 1 << 20,
                predicted_step_s: 0.5,
            };
            let read: StepMetrics = serde_json::from_str(&serde_json::to_string(&step).unwrap()).unwrap();
            assert_eq!(read.is_skipped(), step.is_skipped());
            let rest = |metrics: StepMetrics| StepMetrics { grad_norm: 0.0, ..metrics };
            assert_eq!(rest(read), rest(step));
            assert!(read.is_skipped() || read.grad_norm == grad_norm);
        }
    }
}
