//! The CPU backend: every rank a thread of this process.

pub mod interpret;
mod kernels;
mod memory;

/// The processor cores this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}
