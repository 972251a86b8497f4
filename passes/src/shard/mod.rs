//! Choosing a strategy for every node: the batch by propagation ([`batch`]), tensor parallelism by
//! exact elimination ([`tensor`], [`dominate`], [`eliminate`]), storage over the data axes by ZeRO stage
//! ([`zero`]).

pub mod batch;
pub mod dominate;
pub mod eliminate;
pub mod layout;
pub mod prepare;
pub mod tensor;
pub mod zero;
