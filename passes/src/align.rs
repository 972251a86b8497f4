//! Rows of matrices that begin at multiples of 16 bytes.
//!
//! A matrix product reads and writes 16 bytes at a time only where rows begin at multiples of that.

mod head;
mod weights;

pub use head::align_head;
pub use weights::align_weights;

/// Elements of which every row is aligned: 16 bytes of 16-bit elements.
const ALIGNED: u64 = 8;
