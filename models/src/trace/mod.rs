//! Records what a Burn module computes and turns it into a graph.
//!
//! Burn's capture device records operations without running them. [`capture`] runs the module's constructor and its
//! loss there; [`paths`] finds out which module each operation belongs to; [`convert`] turns Burn's operations into
//! ours by means of a [`build::Builder`], which simplifies as it goes.
//!
//! The capture device has no autodiff. What acts under autodiff alone would be lost, so it is refused where the trace
//! can see it (Burn's dropout and noise), and has a stand-in that is recorded ([`Dropout`](crate::Dropout),
//! [`detach`](crate::detach())).
//!
//! Invariants of a [`Model`]: inputs come first in its graph, in the order in which the loss asked for them, then every
//! parameter in the order of the module's fields (used or not); `loss` is a scalar; every parameter has either an
//! output of its name in `init` or an entry in `values`.

mod activation;
mod attention;
mod build;
mod capture;
mod constants;
mod convert;
mod error;
mod indices;
mod model;
mod numeric;
mod paths;
mod pictures;
mod quiet;
mod ranked;
mod resize;
mod shapes;

pub use capture::Batch;
pub use error::{TraceError, Unsupported};
pub use model::{Model, trace};
