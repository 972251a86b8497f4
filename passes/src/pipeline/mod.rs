//! Pipelines: where the graph may be cut ([`anchor`]), in which order stages run their chunks
//! ([`order`], of zero-bubble V in a file of its own, which goes by its [`rhythm`]), when messages pass between them ([`timeline`]; both go from one moment to the next by an
//! agenda), which cuts are best ([`cut`], and [`balance`] where a stage has several chunks), and which gradients
//! several stages share ([`shared`]).
//!
//! What a plan says of its pipeline is in [`shardc_ir::pipeline`].

mod agenda;
pub mod anchor;
pub mod balance;
pub mod cut;
pub mod effort;
pub mod order;
pub mod rhythm;
pub mod shared;
pub mod timeline;
pub mod zero_bubble;
