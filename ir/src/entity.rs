//! Entity references: `u32` newtypes into the tables of a graph, a plan or a program.
//!
//! The `Display` of each is its form in the text, so a printed id can be searched for in a dump.

use cranelift_entity::entity_impl;
pub use cranelift_entity::{EntityRef, PrimaryMap, SecondaryMap};
use serde::{Deserialize, Serialize};

/// A value: one result of one node of a [`Graph`](crate::Graph).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueId(u32);
entity_impl!(ValueId, "%");

/// A node of a [`Graph`](crate::Graph).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(u32);
entity_impl!(NodeId, "node");

/// A factor (an index of the index notation) of a [`FactorRule`](crate::FactorRule).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FactorId(u32);
entity_impl!(FactorId, "f");

/// A buffer of a [`Program`](crate::Program).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BufferId(u32);
entity_impl!(BufferId, "$");

/// A section (a straight line of instructions) of a [`Program`](crate::Program).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SectionId(u32);
entity_impl!(SectionId, "section");
