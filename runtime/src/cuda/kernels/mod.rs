//! The kernels, as CubeCL functions. They see buffers and numbers; which operation needs which
//! kernels is decided in [`select`](super::select).

// The functions that `#[cube]` generates have no comments of their own; in a kernel `usize` is the
// address type, which need not be this machine's; numbers are written out because a kernel has no
// `std::f32::consts`; `erf` is CubeCL's; `x * 0` is a constant of the device; and what is known when
// a kernel is made stands in an `if` of its own.
#![allow(missing_docs, unstable_name_collisions)]
#![allow(clippy::unnecessary_cast, clippy::excessive_precision, clippy::approx_constant)]
#![allow(clippy::identity_op, clippy::erasing_op, clippy::manual_is_multiple_of, clippy::collapsible_if)]

pub mod attention;
pub mod elementwise;
pub mod fold;
pub mod indexing;
pub mod many;
mod norm;
pub mod pack;
pub mod parts;
pub mod pictures;
pub mod quantize;
pub mod random;
pub mod ranked;
pub mod region;
pub mod rows;
