//! Collectives by NCCL: one communicator per group of ranks and stream, made once. Collectives of several streams may
//! be under way at a time, so streams share none. Messages between pipeline stages take the communicator of all ranks.
//!
//! Every rank makes its communicators in the same order of groups, so no two ranks wait for each other in different
//! ones. The first rank of a group makes what the group meets by; the run's store brings it to ranks of other
//! processes.
//!
//! A communicator may be given up by any thread while another uses it.

#![allow(unsafe_code)]

use super::device::{Failure, text};
use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys;
use shardc_ir::DType;
use shardc_ir::sharding::ReduceKind;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

/// How long giving up waits for a call that is under way.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the ranks of a group must share to meet.
#[derive(Clone, Copy)]
pub struct Meeting(sys::ncclUniqueId);

fn check(what: &'static str, status: sys::ncclResult_t) -> Result<(), Failure> {
    match status {
        sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress => Ok(()),
        // SAFETY: the library gives a static string.
        other => Err(format!("NCCL, {what}: {}", text(unsafe { sys::ncclGetErrorString(other) }))),
    }
}

impl Meeting {
    /// A new one, for one group.
    pub fn new() -> Result<Self, Failure> {
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: the pointer is valid.
        check("unique id", unsafe { sys::ncclGetUniqueId(&mut id) })?;
        Ok(Self(id))
    }

    /// As it goes to another process.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.internal.iter().map(|byte| *byte as u8).collect()
    }

    /// As it comes from another process.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Failure> {
        let bytes: [u8; 128] = bytes.try_into().map_err(|_| format!("NCCL: {} bytes are no id", bytes.len()))?;
        Ok(Self(sys::ncclUniqueId { internal: bytes.map(|byte| byte as std::ffi::c_char) }))
    }
}

/// A group of ranks, seen from one of them.
pub struct Communicator {
    /// Null once it was given up.
    handle: AtomicPtr<sys::ncclComm>,
    /// Held while the library is called.
    calls: Mutex<()>,
    /// The number of ranks.
    pub size: u64,
}

/// A buffer of a collective.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// What is sent.
    pub from: u64,
    /// Where what is received goes.
    pub to: u64,
    /// Elements sent.
    pub sent: u64,
    /// Elements received.
    pub received: u64,
    /// The element type.
    pub dtype: DType,
}

fn data_type(dtype: DType) -> Result<sys::ncclDataType_t, Failure> {
    use sys::ncclDataType_t as T;
    match dtype {
        DType::F32 => Ok(T::ncclFloat32),
        DType::Bf16 => Ok(T::ncclBfloat16),
        DType::F16 => Ok(T::ncclFloat16),
        DType::I64 => Ok(T::ncclInt64),
        DType::I32 => Ok(T::ncclInt32),
        // 8-bit floats are moved only: no operation on them has partial results.
        DType::Bool | DType::U8 | DType::F8e4m3 | DType::F8e5m2 => Ok(T::ncclUint8),
    }
}

fn operation(reduce: ReduceKind) -> Result<sys::ncclRedOp_t, Failure> {
    match reduce {
        ReduceKind::Sum => Ok(sys::ncclRedOp_t::ncclSum),
        ReduceKind::Max => Ok(sys::ncclRedOp_t::ncclMax),
        ReduceKind::LogSumExp => Err("NCCL has no log-sum-exp".to_string()),
    }
}

/// What the parts of one collective have in common.
#[derive(Clone, Copy, Debug)]
pub enum Collective {
    /// Elementwise reduction, for everyone.
    AllReduce(ReduceKind),
    /// Concatenation in the order of the group, for everyone.
    AllGather,
    /// Elementwise reduction, of which everyone gets a part.
    ReduceScatter(ReduceKind),
    /// Part `i` goes to the group's rank `i`.
    AllToAll,
    /// To a rank of the group.
    Send(u64),
    /// From a rank of the group.
    Receive(u64),
}

impl Communicator {
    /// Joins a group as its `index`th rank; waits for the others. The thread's GPU is the rank's.
    pub fn new(meeting: Meeting, index: usize, size: usize) -> Result<Self, Failure> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is valid; every rank of the group calls this with the same meeting.
        check("join", unsafe { sys::ncclCommInitRank(&mut handle, size as i32, meeting.0, index as i32) })?;
        Ok(Self { handle: AtomicPtr::new(handle), calls: Mutex::new(()), size: size as u64 })
    }

    /// Enqueues one collective on all parts, as one bucket.
    pub fn run(&self, collective: Collective, parts: &[Part], stream: CUstream) -> Result<(), Failure> {
        let _calling = self.calls.lock().map_err(|error| error.to_string())?;
        self.valid()?;
        // SAFETY: no pointer is passed.
        check("group", unsafe { sys::ncclGroupStart() })?;
        // Asked again for each: a call that came back because the communicator was given up is the last one.
        let each = parts.iter().try_for_each(|part| self.part(self.valid()?, collective, part, stream));
        // SAFETY: as above.
        let end = check("group", unsafe { sys::ncclGroupEnd() });
        each.and(end)
    }

    fn valid(&self) -> Result<sys::ncclComm_t, Failure> {
        let comm = self.handle.load(Ordering::Acquire);
        if comm.is_null() { Err("NCCL: the communicator was given up after a failure".into()) } else { Ok(comm) }
    }

    fn part(
        &self,
        comm: sys::ncclComm_t,
        collective: Collective,
        part: &Part,
        stream: CUstream,
    ) -> Result<(), Failure> {
        let (from, to) = (part.from as *const c_void, part.to as *mut c_void);
        let (sent, received, dtype) = (part.sent as usize, part.received as usize, data_type(part.dtype)?);
        let stream = stream.cast();
        // SAFETY: the addresses hold this many elements, in memory that outlives the step.
        unsafe {
            match collective {
                Collective::AllReduce(reduce) => {
                    let op = operation(reduce)?;
                    check("all-reduce", sys::ncclAllReduce(from, to, sent, dtype, op, comm, stream))
                }
                Collective::AllGather => check("all-gather", sys::ncclAllGather(from, to, sent, dtype, comm, stream)),
                Collective::ReduceScatter(reduce) => {
                    let op = operation(reduce)?;
                    check("reduce-scatter", sys::ncclReduceScatter(from, to, received, dtype, op, comm, stream))
                }
                Collective::AllToAll => {
                    let count = sent / self.size as usize;
                    let bytes = count as u64 * part.dtype.size();
                    for peer in 0..self.size {
                        let from = (part.from + peer * bytes) as *const c_void;
                        let to = (part.to + peer * bytes) as *mut c_void;
                        check("send", sys::ncclSend(from, count, dtype, peer as i32, comm, stream))?;
                        check("receive", sys::ncclRecv(to, count, dtype, peer as i32, comm, stream))?;
                    }
                    Ok(())
                }
                Collective::Send(peer) => check("send", sys::ncclSend(from, sent, dtype, peer as i32, comm, stream)),
                Collective::Receive(peer) => {
                    check("receive", sys::ncclRecv(to, received, dtype, peer as i32, comm, stream))
                }
            }
        }
    }

    /// An error that came up while the device worked, unless another thread calls the library now: one that gives the
    /// communicator up may wait for this one.
    pub fn fault(&self) -> Result<(), Failure> {
        let _calling = match self.calls.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(()),
            calling => calling.map_err(|error| error.to_string())?,
        };
        let (comm, mut status) = (self.valid()?, sys::ncclResult_t::ncclSuccess);
        // SAFETY: the communicator is valid and the pointer too.
        check("status", unsafe { sys::ncclCommGetAsyncError(comm, &mut status) })?;
        check("a collective", status)
    }

    /// Gives up what is under way, so that a rank whose peer is gone can end. A call of another thread
    /// that does not come back is not waited for: giving up is what brings it back.
    pub fn abort(&self) {
        let until = Instant::now() + PATIENCE;
        let mut calling = self.calls.try_lock();
        while matches!(calling, Err(TryLockError::WouldBlock)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            calling = self.calls.try_lock();
        }
        let handle = self.handle.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !handle.is_null() {
            // SAFETY: the communicator is valid, and calls ask for it anew, so none starts on it any more but a peer's of one
            // part. One that is stuck in it is what the library's own documentation lets this function end.
            let _ = unsafe { sys::ncclCommAbort(handle) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Destroying waits for the other ranks, which may be gone.
        self.abort();
    }
}
