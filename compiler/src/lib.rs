//! The driver of shardc: the one list of passes, the library's public face and the reports.
//!
//! ```no_run
//! use shardc::{Batch, Cluster, Options};
//! # fn main() -> Result<(), shardc::Error> {
//! let model = shardc::NamedModel::find("llama-tiny")?;
//! let cluster = Cluster::parse("cpu:4", "h200")?;
//! let compiled = shardc::compile(&model, Batch { batch: 8, seq: 128 }, &cluster, &Options::default())?;
//! println!("{}", shardc::report::plan_text(compiled.plan()));
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod agrees;
pub mod capacity;
pub mod compile;
pub mod data;
pub mod error;
pub mod estimate;
pub mod explain;
pub mod fewer;
mod indices;
pub mod launch;
pub mod learning_rate;
mod loss_scale;
pub mod metrics;
pub mod model;
pub mod nearest;
pub mod options;
pub mod pipeline;
pub mod profile;
pub mod report;
pub mod saved;
mod start;
pub mod steps;
pub mod train;
pub mod verify;

pub use compile::{Compiled, Trace, compile};
pub use error::{DataError, Error};
pub use learning_rate::{Decay, LearningRate};
pub use metrics::StepMetrics;
pub use model::NamedModel;
pub use options::{Batch, Options};
pub use saved::saved_weights;
pub use shardc_passes::cluster::Cluster;
pub use shardc_passes::optimizer::{OptimizerConfig, OptimizerKind};
pub use shardc_passes::precision::Precision;
pub use shardc_runtime::{Feeds, allocator};
pub use start::check_cluster;
pub use train::{FromInitialisers, TrainOptions, Trainer, Weights};
