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
    /// Why the file's entry is no run, if it is none; everything else is then as far as it could be read.
    #[serde(skip)]
    pub fault: Option<String>,
}

/// The largest plausible figures; what exceeds them is a slip, and would overflow.
const MOST: u64 = 1 << 25;

impl Row {
    /// The first figure that no run can have, as a sentence.
    pub fn implausible(&self) -> Option<String> {
        let (model, parallel) = (&self.model, &self.parallel);
        let figures = [
            ("layers", model.layers, 1 << 14),
            ("hidden", model.hidden, 1 << 18),
            ("heads", model.heads, 1 << 12),
            ("kv_heads", model.kv_heads, 1 << 12),
            ("ffn", model.ffn, 1 << 20),
            ("vocab", model.vocab, 1 << 22),
            ("seq", model.seq, MOST),
            ("count", self.hardware.count, 1 << 20),
            ("gpus_per_node", self.hardware.gpus_per_node, 1 << 20),
            ("dp", parallel.dp, 1 << 20),
            ("tp", parallel.tp, 1 << 12),
            ("pp", parallel.pp, 1 << 12),
            ("cp", parallel.cp, 1 << 12),
            ("ep", parallel.ep, 1 << 12),
            ("microbatch", parallel.microbatch, 1 << 12),
            ("global_batch", parallel.global_batch, MOST),
            ("virtual_stages", parallel.virtual_stages, 1 << 12),
        ];
        let found = figures.into_iter().find(|(_, value, most)| value.is_some_and(|value| value > *most));
        found.map(|(name, value, most)| format!("`{name}` is {}, more than {most}", value.unwrap_or_default()))
    }

    /// The measured seconds of a step: as printed, else from the tokens per second.
    pub fn step_seconds(&self, global_batch: u64) -> Option<f64> {
        let derived = || {
            let tokens = (global_batch * self.model.seq?) as f64;
            Some(tokens / (self.measured.tokens_per_s_per_gpu? * self.hardware.count? as f64))
        };
        self.measured.step_s.or_else(derived).filter(|seconds| seconds.is_finite() && *seconds > 0.0)
    }

    /// The sequences of a step: as published, else as many as a step's time and the rate of tokens say together.
    fn batch(&self) -> Option<u64> {
        let derived = || {
            let tokens = self.measured.step_s? * self.measured.tokens_per_s_per_gpu? * self.hardware.count? as f64;
            let batch = tokens / self.model.seq.filter(|seq| *seq > 0)? as f64;
            // Both are rounded where they are printed.
            let is_whole = (batch / batch.round() - 1.0).abs() < 0.01;
            (is_whole && (1.0..MOST as f64).contains(&batch)).then_some(batch.round() as u64)
        };
        self.parallel.global_batch.filter(|batch| *batch > 0).or_else(derived)
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
/// If it cannot be read, is not JSON, is not a list, or is empty. An entry that is no run is kept, with its
/// [`fault`](Row::fault).
pub fn read(path: &Path) -> Result<Vec<Row>, RowsError> {
    let text = std::fs::read_to_string(path).map_err(|source| RowsError::Read { path: path.to_path_buf(), source })?;
    parse(&text).map_err(|message| RowsError::Form { path: path.to_path_buf(), message })
}

/// Reads the text of a file of runs. Figures that are not numbers (`NaN`, `Infinity`, which other
/// languages write) are unknown, like `null`.
pub fn parse(text: &str) -> Result<Vec<Row>, String> {
    let text = text.trim_start_matches('\u{feff}');
    if text.trim().is_empty() {
        return Err("it is empty; write [{...}, {...}]".to_string());
    }
    let values: serde_json::Value = serde_json::from_str(&without_nan(text)).map_err(|error| error.to_string())?;
    let serde_json::Value::Array(values) = values else {
        return Err("its outermost value is not an array; write [{...}, {...}]".to_string());
    };
    if values.is_empty() {
        return Err("the list is empty".to_string());
    }
    Ok(values.into_iter().enumerate().map(|(index, value)| row(index, value)).collect())
}

/// One entry of the list.
fn row(index: usize, value: serde_json::Value) -> Row {
    let text = |name: &str| value.get(name).and_then(|value| value.as_str()).unwrap_or_default().to_string();
    let faulty =
        |fault: String| Row { split: text("split"), source: text("source"), fault: Some(fault), ..Row::default() };
    if !value.is_object() {
        return faulty(format!("row {index} is not an object"));
    }
    let mut known = value.clone();
    // What is `null` or an empty text is as unknown as what is absent.
    strip_nulls(&mut known);
    for part in ["model", "hardware", "parallel"] {
        if let Some(part) = known.get_mut(part) {
            plain_numbers(part);
        }
    }
    match serde_json::from_value::<Row>(known) {
        Err(error) => faulty(format!("row {index}: {error}")),
        Ok(row) if row.split.is_empty() => Row { fault: Some(format!("row {index} has no `split`")), ..row },
        Ok(mut row) => {
            row.fault = row.implausible().map(|what| format!("row {index}: {what}"));
            row.parallel.global_batch = row.batch();
            row
        }
    }
}

/// Whole numbers that are written `8.0` or `"8"` become numbers, and a choice that is `true` or `false` a word.
fn plain_numbers(value: &mut serde_json::Value) {
    let serde_json::Value::Object(fields) = value else { return };
    for (name, field) in fields {
        let is_text = ["kind", "gpu", "interconnect", "recompute", "zero"].contains(&name.as_str());
        let number = field.as_f64().or_else(|| field.as_str().and_then(|text| text.trim().parse().ok()));
        let whole = number.filter(|number| number.fract() == 0.0 && (0.0..1e15).contains(number));
        match (whole, field.as_bool()) {
            (Some(number), _) if !is_text => *field = (number as u64).into(),
            (_, Some(choice)) if name == "recompute" => *field = choice.to_string().into(),
            _ => {}
        }
    }
}

fn strip_nulls(value: &mut serde_json::Value) {
    if let serde_json::Value::Object(fields) = value {
        fields.retain(|_, value| !value.is_null() && value.as_str().is_none_or(|text| !text.trim().is_empty()));
        fields.values_mut().for_each(strip_nulls);
    }
}

/// The text with `null` for `NaN`, `Infinity` and `-Infinity` outside strings.
fn without_nan(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (index, part) in strings_apart(text).into_iter().enumerate() {
        if index % 2 == 0 {
            out.push_str(&part.replace("-Infinity", "null").replace("Infinity", "null").replace("NaN", "null"));
        } else {
            out.push_str(part);
        }
    }
    out
}

/// Cuts JSON text so that every second part is a string with its quotes.
fn strings_apart(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut is_inside, mut is_escaped) = (Vec::new(), 0, false, false);
    for (at, byte) in text.bytes().enumerate() {
        if is_escaped {
            is_escaped = false;
        } else if is_inside && byte == b'\\' {
            is_escaped = true;
        } else if byte == b'"' {
            let end = if is_inside { at + 1 } else { at };
            parts.push(&text[start..end]);
            (start, is_inside) = (end, !is_inside);
        }
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: &str) {
        let faults = |rows: &[Row]| rows.iter().filter_map(|row| row.fault.clone()).collect::<Vec<_>>().join("; ");
        let of = |rows: Vec<Row>| format!("{} rows {};", rows.len(), faults(&rows));
        let text = parse(text).map_or_else(|message| message, of);
        assert!(text.contains(expect), "{text}");
    }

    #[test]
    fn a_batch_follows_from_the_time_and_the_rate() {
        let batch = |measured: &str| {
            let text = r#"[{"split": "a", "model": {"seq": 1024}, "hardware": {"count": 8}, "measured": MEASURED}]"#;
            parse(&text.replace("MEASURED", measured)).unwrap()[0].parallel.global_batch
        };
        assert_eq!(batch(r#"{"step_s": 2.0, "tokens_per_s_per_gpu": 4095.6}"#), Some(64));
        assert_eq!(batch(r#"{"step_s": 2.0, "tokens_per_s_per_gpu": 96}"#), None);
        assert_eq!(batch(r#"{"step_s": 2.0}"#), None);
        assert_eq!(batch(r#"{"step_s": 2.0, "tokens_per_s_per_gpu": 0}"#), None);
    }

    #[test]
    fn files() {
        check(r#"[{"split": "a", "model": {"layers": 2, "hidden": null}}]"#, "1 rows");
        check("[]", "the list is empty");
        check("{}", "not an array");
        check("[1]", "row 0 is not an object");
        check("[{}]", "row 0 has no `split`");
        check(r#"[{"split": "a", "model": {"layers": -2}}]"#, "row 0: invalid value: integer `-2`");
        check(r#"[{"split": "a"}, 7]"#, "2 rows row 1 is not an object");
        check(r#"[{"split": "a", "model": {"seq": 1000000000000}}]"#, "row 0: `seq` is 1000000000000");
        check(r#"[{"split": "a", "model": {"layers": 2.0, "seq": "8"}, "parallel": {"recompute": true}}]"#, "1 rows ");
        check(r#"[{"split": "a", "measured": {"step_s": NaN}, "notes": "NaN \" Infinity"}]"#, "1 rows ");
        check(r#"[{"split": "a", "notes": null, "model": {"kind": null}, "hardware": null}]"#, "1 rows ");
        check("[{", "EOF");
        check(" \n", "it is empty");
        check("\u{feff}[{\"split\": \"a\", \"parallel\": {\"recompute\": \"\", \"dp\": \" \"}}]", "1 rows ;");
        assert!(read(Path::new("no/such/file")).unwrap_err().to_string().contains("cannot read `no/such/file`"));
    }
}
