//! Choosing a strategy for every node: the batch by propagation ([`batch`]), tensor parallelism by
//! exact elimination ([`tensor`], [`eliminate`]), storage over the data axes by ZeRO stage
//! ([`zero`]).

pub mod batch;
pub mod eliminate;
pub mod layout;
pub mod prepare;
pub mod tensor;
pub mod zero;
