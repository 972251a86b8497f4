//! Pipelines.
//!
//! * [`anchor`]: where the graph may be cut;
//! * [`cut`]: the best cuts, by a dynamic program, and [`balance`]: better ones where a stage has several chunks;
//! * [`order`]: the order in which stages run their steps; that of zero-bubble V is in a file of its own
//!   (`zero_bubble`), which goes by its [`rhythm`];
//! * [`timeline`]: when messages pass between stages; `agenda` takes it from one moment to the next;
//! * [`effort`]: how long steps take beside each other, if the plan does not say;
//! * [`shared`]: gradients that several stages share.
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
