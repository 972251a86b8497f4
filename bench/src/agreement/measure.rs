//! A plan's step and memory by the closed form, and by its programs.

use super::draw::Case;
use shardc::{Batch, Cluster, Error, NamedModel, Options, Precision};
use shardc_ir::Bytes;
use shardc_ir::plan::Prediction;
use shardc_passes::search::why::searched_graph;
use shardc_passes::search::{Pins, search};

/// Memory that no plan lacks: what does not fit is not compared.
const ROOM: Bytes = Bytes(64 << 40);

/// What a plan takes in two ways.
#[derive(Clone, Debug)]
pub struct Compared {
    /// What was planned.
    pub case: Case,
    /// Its choices.
    pub choice: String,
    /// By the closed form.
    pub estimate: Prediction,
    /// By its programs.
    pub exact: Prediction,
}

impl Compared {
    /// By how much the closed form is off, as a share of the programs' seconds.
    pub fn seconds(&self) -> f64 {
        self.estimate.step.0 / self.exact.step.0 - 1.0
    }

    /// As [`seconds`](Self::seconds), of bytes.
    pub fn bytes(&self) -> f64 {
        let bytes = |of: &Prediction| of.memory.total().0 as f64;
        bytes(&self.estimate) / bytes(&self.exact) - 1.0
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
    let options = Options { precision, pins, device_memory: Some(ROOM), ..Options::default() };
    let compiled = shardc::compile(&model, Batch { batch: case.batch, seq: case.seq }, &cluster, &options)?;
    let plan = compiled.plan();
    let target = shardc::pipeline::target(&plan.request.cluster);
    // The head of the plan's graph is in chunks already.
    let mut pins = Pins { loss_chunks: None, ..Pins::parse(&plan.choice)? };
    // What is pinned without a product may become several axes.
    pins.axes.extend(pins.tp.filter(|_| !pins.axes.contains_key("tp")).map(|tp| ("tp", vec![tp])));
    let estimated = search(&searched_graph(plan)?, &cluster, &plan.request, &pins, target)?;
    let (choice, exact) = (plan.choice.clone(), plan.prediction);
    Ok(Compared { case: case.clone(), choice, estimate: estimated.prediction, exact })
}
