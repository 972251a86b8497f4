//! A plan's step and memory by the closed form, and by its programs.

use super::draw::Case;
use shardc::{Batch, Cluster, Error, NamedModel, Options, Precision};
use shardc_ir::Bytes;

/// Memory that no plan lacks: what does not fit is not compared.
const ROOM: Bytes = Bytes(64 << 40);

/// What a plan takes in two ways.
#[derive(Clone, Debug)]
pub struct Compared {
    /// What was planned.
    pub case: Case,
    /// Its choices.
    pub choice: String,
    /// Seconds of a step by the closed form, and by its programs.
    pub seconds: [f64; 2],
    /// Memory per rank by the closed form, and by its programs.
    pub bytes: [Bytes; 2],
}

impl Compared {
    /// By how much the closed form is off, as a share of the programs' seconds.
    pub fn of_seconds(&self) -> f64 {
        let [estimate, exact] = self.seconds;
        estimate / exact - 1.0
    }

    /// As [`of_seconds`](Self::of_seconds), of bytes.
    pub fn of_bytes(&self) -> f64 {
        let [estimate, exact] = self.bytes.map(|bytes| bytes.0 as f64);
        estimate / exact - 1.0
    }
}

/// Plans a case, without chunks that overlap, which have no closed form.
///
/// # Errors
/// Choices that the model or the devices do not allow.
pub fn compare(case: &Case) -> Result<Compared, Error> {
    let (cluster, model) = (Cluster::parse(&case.cluster, "h200")?, NamedModel::find(case.model)?);
    let precision = if case.cluster.starts_with("v100") { Precision::Fp16 } else { Precision::Bf16 };
    let pins = format!("{},overlap_chunks=1,keep_casts=0", case.pins);
    let options = Options { precision: Some(precision), pins, device_memory: Some(ROOM), ..Options::default() };
    let compiled = shardc::compile(&model, Batch { batch: case.batch, seq: case.seq }, &cluster, &options)?;
    let plan = compiled.plan();
    let seconds = [plan.search.estimate, plan.prediction.step].map(|seconds| seconds.0);
    let bytes = [plan.search.memory, plan.prediction.memory.total()];
    Ok(Compared { case: case.clone(), choice: plan.choice.clone(), seconds, bytes })
}
