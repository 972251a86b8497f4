//! What a compilation is asked for, beside the model and the cluster.

use shardc_ir::plan::Scope;
use shardc_ir::{Bytes, DType};
use shardc_passes::cluster::Cluster;
use shardc_passes::optimizer::OptimizerConfig;
use shardc_passes::precision::Precision;
use std::path::PathBuf;

/// The sizes of the global batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Sequences (or samples) per step over all ranks.
    pub batch: u64,
    /// Tokens per sequence; 0 where the model has none.
    pub seq: u64,
}

/// The pins of a text, each with its name.
pub(crate) fn each_pin(pins: &str) -> impl Iterator<Item = (&str, &str)> {
    let each = pins.split(',').map(str::trim).filter(|pin| !pin.is_empty());
    each.map(|pin| (pin.split_once('=').map_or(pin, |(name, _)| name.trim_end()), pin))
}

/// Whether pins leave something open.
pub(crate) fn leaves_open(pins: &str, name: &str) -> bool {
    each_pin(pins).all(|(other, _)| other != name)
}

/// Pins, and others as well.
pub(crate) fn with_pins(pins: &str, others: impl IntoIterator<Item = String>) -> String {
    each_pin(pins).map(|(_, pin)| pin.to_string()).chain(others).collect::<Vec<_>>().join(",")
}

/// How to compile.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The precision of the computation; if none is named, fp32 on CPU ranks, elsewhere that of 16 bits in which the
    /// devices are the fastest.
    pub precision: Option<Precision>,
    /// The element type in which gradients of matrices are summed over ranks; fp32 if none is named.
    pub reduce_dtype: Option<DType>,
    /// The optimizer and gradient clipping.
    pub optimizer: OptimizerConfig,
    /// The choices that are fixed, as `--pin` takes them: `dp=2,tp=2,zero=1`; all else is searched.
    pub pins: String,
    /// Which plans are searched: those that the cluster's runtime executes, or all.
    pub scope: Scope,
    /// Whether every operation is to give the same bits each time, at the price that its plan states.
    pub deterministic: bool,
    /// A bound on the memory of each rank; the device's own if there is none.
    pub device_memory: Option<Bytes>,
    /// A bound on the memory of each host, for all of its ranks; the host's own if there is none.
    pub host_memory: Option<Bytes>,
    /// A directory for the graph after every pass.
    pub dump_to: Option<PathBuf>,
}

impl Options {
    /// The precision of the computation on a cluster.
    pub fn precision_on(&self, cluster: &Cluster) -> Precision {
        self.precision.unwrap_or_else(|| Precision::usual(&cluster.device))
    }

    /// A cluster whose hosts have the memory that is asked for.
    pub(crate) fn on_hosts(&self, cluster: &Cluster) -> Cluster {
        let cluster = cluster.clone();
        match self.host_memory {
            Some(bytes) => cluster.with_host_memory(bytes),
            None => cluster,
        }
    }
}
