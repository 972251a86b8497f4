//! Runs what the compiler made.
//!
//! * [`cpu`]: every rank is a thread of this process, kernels on Burn's Flex backend, collectives in shared memory. Any
//!   plan for N devices runs on any machine. [`interpret`] runs a whole graph on one device without a plan: what every
//!   plan must agree with.
//! * [`cuda`]: every rank is a GPU, driven by a process of its own.
//! * [`launch`] makes one run of several processes, and knows no device.
//!
//! What needs `unsafe` is here too: files in memory ([`mapped`]), and the allocator of the command ([`allocator`]).
//!
//! Both backends stand behind one trait, [`Runtime`], and both run pipelines: stages send and receive in the order that
//! is in their programs, and nothing else here knows of them. This crate never sees a plan or its search, only graphs
//! and programs.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod allocator;
pub mod cpu;
pub mod cuda;
pub mod launch;
pub mod mapped;
pub mod probe;
pub mod random;
mod span;
mod watch;

pub use cpu::interpret::{compute_op, evaluate_part, interpret};
pub use cpu::{CpuRuntime, CpuTarget};
pub use cuda::{CudaRuntime, CudaTarget};
pub use span::Span;

use shardc_ir::ops::OpError;
use shardc_ir::program::Slot;
use shardc_ir::{Bytes, Graph, HostTensor, Program, TensorType};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The inputs of a step, whole, by name. They are shared, so that the inputs of the step to come can be held while
/// another one runs.
pub type Feeds = BTreeMap<String, Arc<HostTensor>>;

/// Readings of a step, by name.
pub type Readings = BTreeMap<String, f64>;

/// The ranks of one run that this process drives: all of them, or those of its GPUs.
pub trait Runtime {
    /// The ranks that this process drives.
    fn ranks(&self) -> Vec<u64>;

    /// Writes a rank's part of a slot (a parameter or an optimizer state), and that of its cast, if that is a slot too.
    fn write_slot(&mut self, rank: u64, name: &str, part: &HostTensor) -> Result<(), RuntimeError>;

    /// Gives slots, each a rank and a name, their initial values where this backend can make them in place: the
    /// rank's part of the output of `init` that has the slot's name, under this seed. Those that are left are to be
    /// written; by default all are.
    ///
    /// # Errors
    /// A slot that there is not; a device that fails.
    fn make_slots(
        &mut self,
        _init: &Graph,
        _seed: u64,
        slots: Vec<(u64, String)>,
    ) -> Result<Vec<(u64, String)>, RuntimeError> {
        Ok(slots)
    }

    /// Reads a rank's part of a slot.
    fn read_slot(&mut self, rank: u64, name: &str) -> Result<HostTensor, RuntimeError>;

    /// What is known of the inputs of the step after the one that runs next: a backend may bring them to where they are
    /// read while that one runs.
    fn ahead(&mut self, _next: &Feeds) {}

    /// Runs one step on the ranks of this process, together with all others. `feeds` holds every input; the readings (`loss`, `grad_norm`) come back as they are, finite or not.
    fn step(&mut self, feeds: &Feeds) -> Result<Readings, RuntimeError>;

    /// Runs one step as [`Runtime::step`] does and measures every instruction of this process's ranks. The
    /// measuring takes time of its own: a step that is timed whole is not run this way.
    fn timed_step(&mut self, feeds: &Feeds) -> Result<TimedStep, RuntimeError>;

    /// The bytes of the arenas actually taken: the largest rank's.
    fn peak_bytes(&self) -> Bytes;

    /// Names the first tensor of the last step that is not finite, if the backend can find it out:
    /// the rank, the instruction and the buffer. It may run the step again; slots are left as they are.
    fn first_non_finite(&mut self) -> Result<Option<String>, RuntimeError> {
        Ok(None)
    }
}

/// Every input of the programs must be given, whole and of its type.
fn check_feeds<'a>(mut programs: impl Iterator<Item = &'a Program>, feeds: &Feeds) -> Result<(), RuntimeError> {
    programs.try_for_each(|program| {
        program.inputs.iter().try_for_each(|feed| {
            let missing = || RuntimeError::Missing { name: feed.name.clone() };
            let tensor = feeds.get(&feed.name).ok_or_else(missing)?;
            if tensor.ty != feed.ty {
                let (actual, expected) = (tensor.ty.clone(), feed.ty.clone());
                return Err(RuntimeError::WrongType { name: feed.name.clone(), actual, expected });
            }
            Ok(())
        })
    })
}

/// What a slot's buffer holds once a rank's part is written, which must be of its type: zeros behind it.
fn held(slot: &Slot, part: &HostTensor, program: &Program) -> Result<HostTensor, RuntimeError> {
    let expected = slot.part();
    if part.ty != expected {
        return Err(RuntimeError::WrongType { name: slot.name.clone(), actual: part.ty.clone(), expected });
    }
    Ok(part.filled(&program.buffers[slot.buffer].ty))
}

/// What a measured step gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimedStep {
    /// The readings, as [`Runtime::step`] gives them.
    pub readings: Readings,
    /// Every instruction that ran.
    pub spans: Vec<Span>,
}

/// Why something cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The caller did not give a tensor.
    #[error("`{name}` is needed and was not given")]
    Missing {
        /// The name of the input, parameter or state.
        name: String,
    },
    /// The caller gave a tensor of another type.
    #[error("`{name}` is {actual}; it must be {expected}")]
    WrongType {
        /// The name of the input, slot or parameter.
        name: String,
        /// What was given.
        actual: TensorType,
        /// What is needed.
        expected: TensorType,
    },
    /// No slot, output or rank of that name.
    #[error("there is no {what} `{name}`")]
    Unknown {
        /// `slot`, `output`, `rank`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// An operation that has no kernel for these types, or whose operands' values it refuses.
    #[error("{op}: {message}")]
    Kernel {
        /// The operation's name in the text form.
        op: String,
        /// What is wrong.
        message: String,
    },
    /// An operation was built wrongly: a compiler bug.
    #[error(transparent)]
    Op(#[from] OpError),
    /// Programs that no compiler pass should make: a compiler bug.
    #[error("malformed program: {0}")]
    Program(String),
    /// A rank failed; all ranks ended.
    #[error("rank {rank}, {at}: {message}")]
    Rank {
        /// The first rank that failed.
        rank: u64,
        /// The section, the instruction and its buffers.
        at: String,
        /// What went wrong there.
        message: String,
    },
    /// A device, a driver or a library of a device refuses.
    #[error("{0}")]
    Device(String),
}
