//! Steps that were measured beside what is predicted of the same plans today.
//!
//! A file of runs names models, clusters, batches and pins, with what was measured of each and at which commit.
//! `bench/measured.py` writes such files on the GPUs that it finds.

use serde::{Deserialize, Serialize};
use shardc::{Batch, Cluster, Error, NamedModel, Options, Precision};
use shardc_ir::units::counted;
use shardc_ir::{Bytes, Seconds};
use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// A built-in model.
    pub model: String,
    /// The devices, as `--cluster` takes them.
    pub cluster: String,
    /// Samples of a step over all ranks.
    pub batch: u64,
    /// Tokens of a sequence; 0 where the model has none.
    #[serde(default)]
    pub seq: u64,
    /// The precision.
    pub precision: Precision,
    /// What was pinned.
    #[serde(default)]
    pub pins: String,
    /// Milliseconds of a step, the median.
    pub step_ms: f64,
    /// The most memory that a rank took, in bytes, if that is known.
    pub peak_bytes: Option<u64>,
    /// The commit that was measured.
    pub commit: String,
    /// Why the step is known to be farther from its prediction than others, if it is.
    pub apart: Option<String>,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, cluster, batch, seq, precision, pins, .. } = self;
        let seq = if *seq == 0 { String::new() } else { format!(" x {seq}") };
        write!(f, "{model}, {batch}{seq}, {cluster}, {}", precision.name())?;
        if pins.is_empty() { Ok(()) } else { write!(f, ", `{pins}`") }
    }
}

/// A file of runs that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RunsError {
    /// It cannot be opened.
    #[error("cannot read `{}`: {source}", path.display())]
    Read {
        /// Where it is.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// It is no list of runs.
    #[error("`{}` is no list of measured runs: {source}", path.display())]
    Form {
        /// Where it is.
        path: PathBuf,
        /// What is wrong, and where.
        source: serde_json::Error,
    },
    /// It has no run.
    #[error("`{}` lists no run", path.display())]
    Empty {
        /// Where it is.
        path: PathBuf,
    },
    /// Nothing takes so little.
    #[error("{run}: its {figure} is {value}; write what was measured, above 0")]
    Figure {
        /// Of which run.
        run: Box<Run>,
        /// The field.
        figure: &'static str,
        /// What it says.
        value: f64,
    },
    /// A run cannot be planned.
    #[error("{run}: {source}")]
    Plan {
        /// Which.
        run: Box<Run>,
        /// What planning says.
        source: Box<Error>,
    },
}

/// Reads a file of runs.
///
/// # Errors
/// A file that cannot be read, is no list of runs, or has figures that nobody measured.
pub fn read(path: &Path) -> Result<Vec<Run>, RunsError> {
    let text = std::fs::read_to_string(path).map_err(|source| RunsError::Read { path: path.to_path_buf(), source })?;
    parse(path, &text)
}

/// Reads the text of a file of runs.
///
/// # Errors
/// Those of [`read`].
pub fn parse(path: &Path, text: &str) -> Result<Vec<Run>, RunsError> {
    let own = || path.to_path_buf();
    let runs: Vec<Run> = serde_json::from_str(text).map_err(|source| RunsError::Form { path: own(), source })?;
    if runs.is_empty() {
        return Err(RunsError::Empty { path: own() });
    }
    for run in &runs {
        let figures = [("step_ms", Some(run.step_ms)), ("peak_bytes", run.peak_bytes.map(|bytes| bytes as f64))];
        for (figure, value) in figures {
            if let Some(value) = value.filter(|value| *value <= 0.0) {
                return Err(RunsError::Figure { run: Box::new(run.clone()), figure, value });
            }
        }
    }
    Ok(runs)
}

/// A run, and what is predicted of it.
#[derive(Clone, Debug)]
pub struct Compared {
    /// What was measured.
    pub run: Run,
    /// The plan's choices.
    pub choice: String,
    /// Of a step, by the plan's programs.
    pub step: Seconds,
    /// Of a rank.
    pub memory: Bytes,
}

impl Compared {
    /// By how much longer a step is predicted than it took, as a share of that.
    pub fn of_time(&self) -> f64 {
        1e3 * self.step.0 / self.run.step_ms - 1.0
    }

    /// By how much more memory is predicted than was taken, as a share of that, if it is known.
    pub fn of_memory(&self) -> Option<f64> {
        self.run.peak_bytes.map(|peak| self.memory.0 as f64 / peak as f64 - 1.0)
    }
}

/// Plans a run with its pins.
///
/// # Errors
/// What planning says.
pub fn compare(run: &Run) -> Result<Compared, RunsError> {
    let planned = || {
        let (cluster, model) = (Cluster::parse(&run.cluster, "h200")?, NamedModel::find(&run.model)?);
        let options = Options { precision: Some(run.precision), pins: run.pins.clone(), ..Options::default() };
        shardc::compile(&model, Batch { batch: run.batch, seq: run.seq }, &cluster, &options)
    };
    let plan = planned().map_err(|source| RunsError::Plan { run: Box::new(run.clone()), source: Box::new(source) })?;
    let plan = plan.plan();
    let (step, memory) = (plan.prediction.step, plan.prediction.memory.total());
    Ok(Compared { run: run.clone(), choice: plan.choice.clone(), step, memory })
}

/// A table of runs in Markdown, and how far they are off on average and at the most.
pub fn table(all: &[Compared]) -> String {
    let percent = |share: f64| format!("{:+.1}%", 100.0 * share);
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30));
    let mut text = String::from(
        "| run | measured | predicted | | peak memory | predicted | | commit |\n|---|---|---|---|---|---|---|---|\n",
    );
    for own in all {
        let (step, apart) = (Seconds(1e-3 * own.run.step_ms), own.run.apart.as_ref().map_or("", |_| " *"));
        let [peak, of_memory] = match (own.run.peak_bytes, own.of_memory()) {
            (Some(peak), Some(error)) => [gib(peak), percent(error)],
            _ => [String::new(), String::new()],
        };
        let (of_time, memory) = (percent(own.of_time()), gib(own.memory.0));
        let (run, predicted, commit) = (&own.run, own.step, &own.run.commit);
        let _ = writeln!(
            text,
            "| {run} | {step} | {predicted} | {of_time}{apart} | {peak} | {memory} | {of_memory} | {commit} |"
        );
    }
    text.push('\n');
    let errors = [
        ("time", all.iter().map(Compared::of_time).collect::<Vec<f64>>()),
        ("memory", all.iter().filter_map(Compared::of_memory).collect()),
    ];
    for (name, errors) in errors.into_iter().filter(|(_, errors)| !errors.is_empty()) {
        let mean = 100.0 * errors.iter().map(|error| error.abs()).sum::<f64>() / errors.len() as f64;
        let most = 100.0 * errors.iter().map(|error| error.abs()).fold(0.0, f64::max);
        let runs = counted(errors.len() as u64, "run");
        let _ = writeln!(text, "{name}: {runs}, {mean:.1}% off on average, {most:.1}% at the most");
    }
    for own in all {
        if let Some(why) = &own.run.apart {
            let _ = writeln!(text, "* {}: {why}", own.run);
        }
    }
    text
}
