//! Choosing a strategy for every node: the batch by propagation ([`batch`]), all other axes by exact
//! elimination, one at a time ([`place`], [`problem`], [`dominate`], [`eliminate`]; [`relax`] where a graph is too
//! large for that), by what nodes take and what values take on their way between them ([`route`]), storage over the axes that hold copies by ZeRO stage ([`zero`]). What each family of axes may
//! divide stands in [`family`].

pub mod batch;
pub mod coupled;
pub mod dominate;
pub mod eliminate;
pub mod family;
pub mod layout;
pub mod local;
pub mod objective;
pub mod place;
pub mod prepare;
pub mod price;
pub mod problem;
pub mod relax;
pub mod route;
pub mod share;
pub mod tensor;
pub mod zero;
