//! Published runs: the file format, and what can be wrong with a file.

use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RowsError {
    /// It cannot be read.
    #[error("cannot read `{path}`: {source}")]
    Read {
        /// Its path.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// It is not a list of runs.
    #[error("`{path}` is not a list of runs: {message}")]
    Form {
        /// Its path.
        path: PathBuf,
        /// What is wrong and where.
        message: String,
    },
}

/// The model of a run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ModelSizes {
    /// Decoder layers.
    pub layers: Option<u64>,
    /// Width.
    pub hidden: Option<u64>,
    /// Query heads.
    pub heads: Option<u64>,
    /// Key and value heads.
    pub kv_heads: Option<u64>,
    /// Width inside the feed-forward network.
    pub ffn: Option<u64>,
    /// Vocabulary entries.
    pub vocab: Option<u64>,
    /// Tokens of a sequence.
    pub seq: Option<u64>,
    /// What it is called; a family and, of mixtures, the experts.
    pub kind: String,
}

/// The devices of a run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Hardware {
    /// The device, as the source spells it.
    pub gpu: String,
    /// How many.
    pub count: Option<u64>,
    /// How many share a node.
    pub gpus_per_node: Option<u64>,
    /// The links, in words.
    pub interconnect: Option<String>,
}

/// The degrees of a run; what is absent was not published.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Parallel {
    /// Data ranks.
    pub dp: Option<u64>,
    /// Tensor ranks.
    pub tp: Option<u64>,
    /// Pipeline stages.
    pub pp: Option<u64>,
    /// Ranks over which a sequence is divided.
    pub cp: Option<u64>,
    /// Ranks over which experts are divided.
    pub ep: Option<u64>,
    /// ZeRO stage, as a number; or a text that says more.
    pub zero: Option<serde_json::Value>,
    /// Recomputation, in the source's words.
    pub recompute: Option<String>,
    /// Sequences of a microbatch.
    pub microbatch: Option<u64>,
    /// Sequences of a step.
    pub global_batch: Option<u64>,
    /// Chunks of a pipeline stage.
    pub virtual_stages: Option<u64>,
}

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Measured {
    /// Seconds of a step.
    pub step_s: Option<f64>,
    /// Tokens per second and device.
    pub tokens_per_s_per_gpu: Option<f64>,
    /// Peak memory of a device, GiB.
    pub peak_mem_gib: Option<f64>,
}

/// One run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Row {
    /// Who published it.
    pub source: String,
    /// The set it belongs to.
    pub split: String,
    /// Anything else, in words.
    pub notes: String,
    /// Element type of the products: `bf16`, `fp16`, `fp8`.
    pub precision: String,
    /// The model.
    pub model: ModelSizes,
    /// The devices.
    pub hardware: Hardware,
    /// The degrees.
    pub parallel: Parallel,
    /// The measurement.
    pub measured: Measured,
}

impl Row {
    /// The measured seconds of a step: as printed, else from the tokens per second.
    pub fn step_seconds(&self, global_batch: u64) -> Option<f64> {
        let derived = || {
            let tokens = (global_batch * self.model.seq?) as f64;
            Some(tokens / (self.measured.tokens_per_s_per_gpu? * self.hardware.count? as f64))
        };
        self.measured.step_s.or_else(derived).filter(|seconds| seconds.is_finite() && *seconds > 0.0)
    }

    /// A line that names the run.
    pub fn label(&self) -> String {
        let number = |value: Option<u64>| value.map_or("?".to_string(), |value| value.to_string());
        let (model, hardware, parallel) = (&self.model, &self.hardware, &self.parallel);
        let degrees = [
            ("dp", parallel.dp),
            ("tp", parallel.tp),
            ("pp", parallel.pp),
            ("cp", parallel.cp),
            ("ep", parallel.ep),
            ("microbatch", parallel.microbatch),
            ("batch", parallel.global_batch),
            ("virtual", parallel.virtual_stages),
        ];
        let degrees: Vec<String> = degrees
            .iter()
            .filter(|(_, value)| value.is_some_and(|value| value > 1))
            .map(|(name, value)| format!("{name}={}", number(*value)))
            .collect();
        format!(
            "{} {} L{} h{} s{} {}x{} {} {}",
            self.split,
            model.kind,
            number(model.layers),
            number(model.hidden),
            number(model.seq),
            number(hardware.count),
            hardware.gpu,
            self.precision,
            degrees.join(",")
        )
    }
}

/// Reads a file of runs.
///
/// # Errors
/// If it cannot be read, is not JSON, is not a list, is empty, or a row has a field of another type.
pub fn read(path: &Path) -> Result<Vec<Row>, RowsError> {
    let text = std::fs::read_to_string(path).map_err(|source| RowsError::Read { path: path.to_path_buf(), source })?;
    parse(&text).map_err(|message| RowsError::Form { path: path.to_path_buf(), message })
}

/// Reads the text of a file of runs.
pub fn parse(text: &str) -> Result<Vec<Row>, String> {
    let values: serde_json::Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let serde_json::Value::Array(values) = values else {
        return Err("its outermost value is not an array; write [{...}, {...}]".to_string());
    };
    if values.is_empty() {
        return Err("the list is empty".to_string());
    }
    let row = |(index, value): (usize, serde_json::Value)| {
        if !value.is_object() {
            return Err(format!("row {index} is not an object"));
        }
        let row: Row = serde_json::from_value(value).map_err(|error| format!("row {index}: {error}"))?;
        if row.split.is_empty() { Err(format!("row {index} has no `split`")) } else { Ok(row) }
    };
    values.into_iter().enumerate().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: &str) {
        let text = parse(text).map_or_else(|message| message, |rows| format!("{} rows", rows.len()));
        assert!(text.contains(expect), "{text}");
    }

    #[test]
    fn files() {
        check(r#"[{"split": "a", "model": {"layers": 2, "hidden": null}}]"#, "1 rows");
        check("[]", "the list is empty");
        check("{}", "not an array");
        check("[1]", "row 0 is not an object");
        check("[{}]", "row 0 has no `split`");
        check(r#"[{"split": "a", "model": {"layers": -2}}]"#, "row 0: invalid value: integer `-2`");
        check("[{", "EOF");
        assert!(read(Path::new("no/such/file")).unwrap_err().to_string().contains("cannot read `no/such/file`"));
    }
}
