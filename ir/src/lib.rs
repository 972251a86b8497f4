//! The ground of shardc: one intermediate representation in three phases.
//!
//! * [`Graph`]: what one device would compute, with global shapes.
//! * [`Plan`]: the same graph, annotated: a mesh, a [`Strategy`] per node, a storage
//!   [`Sharding`] per leaf, keep or recompute, and the prediction.
//! * [`Program`]: what one rank runs: instructions with local shapes on named streams,
//!   operands at fixed offsets of arenas.
//!
//! Everything about sharding follows from one rule per operation, its [`FactorRule`]:
//! which strategies are legal, what each operand must look like, what is left as a partial
//! sum, and what moving between two layouts costs.
//!
//! This crate does no I/O, solves nothing and knows no device.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod diagnostic;
pub mod entity;
pub mod factor;
pub mod feature;
pub mod float8;
pub mod graph;
pub mod mesh;
pub mod names;
pub mod ops;
pub mod pipeline;
pub mod plan;
pub mod program;
pub mod sharding;
pub mod target;
pub mod tensor;
pub mod text;
pub mod types;
pub mod units;
pub mod verify;
pub mod view;

pub use diagnostic::{Diagnostic, Diagnostics};
pub use entity::{BufferId, EntityRef, FactorId, NodeId, PrimaryMap, SecondaryMap, SectionId, ValueId};
pub use factor::{Factor, FactorKind, FactorRule};
pub use feature::Feature;
pub use graph::{Graph, Node, Output, OutputKind, Role, Value};
pub use mesh::{Axis, AxisId, AxisSet, Family, Mesh};
pub use ops::{Op, OpDef};
pub use pipeline::Pipeline;
pub use plan::Plan;
pub use program::Program;
pub use sharding::{Choice, ReduceKind, Sharding, Strategy};
pub use target::{NoScratch, Target};
pub use tensor::HostTensor;
pub use types::{DType, TensorType};
pub use units::{Bytes, Flops, Seconds};
