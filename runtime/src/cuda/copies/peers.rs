//! The memory of other ranks of this host, and what is enqueued on it: copies, and flags set and waited for by the
//! streams themselves.
//!
//! Another process's arena is reached through a handle of it (NVIDIA, "CUDA Driver API", interprocess communication).
//! A stream sets and waits for words of memory without a kernel (same place, stream memory operations).

#![allow(unsafe_code)]

use super::script::{Act, Flag, Side};
use crate::cuda::device::{Device, Failure, ReadyLaunch, says};
use crate::cuda::select::sum_parts;
use cudarc::driver::{result, sys};
use serde::{Deserialize, Serialize};
use shardc_ir::program::Stream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long letting streams go tries to.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bytes of the flags of a rank: an allocation of their own, which no other shares a page with.
const FLAG_BYTES: u64 = 2 << 20;

/// How others reach a rank's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// The GPU's place on its bus.
    bus: String,
    arena: Vec<u8>,
    flags: Vec<u8>,
}

/// Another rank's memory.
#[derive(Clone, Copy, Debug)]
struct Remote {
    arena: u64,
    flags: u64,
}

/// This rank's side of the memory that ranks share.
pub struct Peers {
    device: sys::CUdevice,
    arena: u64,
    flags: u64,
    rank: u64,
    /// By rank; none of those that cannot be reached.
    remotes: Vec<Option<Remote>>,
    sending: sys::CUstream,
    events: [sys::CUevent; 2],
    release: Arc<Release>,
}

/// Lets streams go that wait for a rank which is gone. Any thread may do so at any time: once the rank's memory is
/// closed there is nothing left to let go.
pub struct Release(Mutex<Option<Waiting>>);

/// The flags of a rank, and the streams that may wait for them.
struct Waiting {
    context: sys::CUcontext,
    flags: u64,
    words: usize,
    helping: sys::CUstream,
    /// A recorded step runs on the compute stream.
    streams: [sys::CUstream; 4],
}

// SAFETY: the driver's handles may be used by any thread.
unsafe impl Send for Waiting {}

impl Release {
    /// Sets every flag until nothing waits any more, for 2 s at most. What was received is worth nothing then.
    pub fn release(&self) {
        let waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Waiting { context, flags, words, helping, streams }) = &*waiting else { return };
        let until = Instant::now() + PATIENCE;
        // SAFETY: the streams and the flags live as long as the rank's device, which is dropped behind `Peers`, whose
        // drop takes them from here first.
        unsafe {
            if result::ctx::set_current(*context).is_err() {
                return;
            }
            let is_idle = |stream: &sys::CUstream| sys::cuStreamQuery(*stream) != sys::CUresult::CUDA_ERROR_NOT_READY;
            while !streams.iter().all(is_idle) && Instant::now() < until {
                let _ = sys::cuMemsetD32Async(*flags, 1, *words, *helping);
                let _ = sys::cuStreamSynchronize(*helping);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Waits for a release in progress, and leaves nothing to let go.
    fn end(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// One thing to enqueue, with its addresses.
enum Step {
    Fork,
    Join,
    /// Flags set or waited for, as the driver takes them.
    Flags(Side, Vec<sys::CUstreamBatchMemOpParams>),
    Copy {
        side: Side,
        to: u64,
        from: u64,
        bytes: u64,
    },
    Sum(ReadyLaunch),
}

/// A collective or an end of a message by copies, ready.
pub struct Exchange(Vec<Step>);

/// A value that a flag is set to, or waited for.
fn operation(kind: sys::CUstreamBatchMemOpType, address: u64, value: u32) -> sys::CUstreamBatchMemOpParams {
    use sys::CUstreamBatchMemOpType as T;
    // SAFETY: all zero is a valid operation of no address, and what a kind needs is set.
    unsafe {
        let mut operation: sys::CUstreamBatchMemOpParams = std::mem::zeroed();
        match kind {
            T::CU_STREAM_MEM_OP_WAIT_VALUE_32 => {
                operation.waitValue.operation = kind;
                operation.waitValue.address = address;
                operation.waitValue.__bindgen_anon_1.value = value;
                operation.waitValue.flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
            }
            _ => {
                operation.writeValue.operation = kind;
                operation.writeValue.address = address;
                operation.writeValue.__bindgen_anon_1.value = value;
                operation.writeValue.flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
            }
        }
        operation
    }
}

fn handle(of: u64) -> Result<Vec<u8>, Failure> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: writes the handle; the address begins an allocation of this process.
    unsafe { sys::cuIpcGetMemHandle(&mut handle, of).result() }.map_err(says("a handle of memory"))?;
    Ok(handle.reserved.iter().map(|byte| *byte as u8).collect())
}

fn open(handle: &[u8]) -> Result<u64, Failure> {
    let bytes: [u8; 64] = handle.try_into().map_err(|_| "no handle of memory".to_string())?;
    let handle = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as std::ffi::c_char) };
    let (mut at, flags) = (0, sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32);
    // SAFETY: writes the address; the handle is of another process's allocation.
    unsafe { sys::cuIpcOpenMemHandle_v2(&mut at, handle, flags).result() }.map_err(says("another rank's memory"))?;
    Ok(at)
}

impl Peers {
    /// Memory for flags, beside an arena of this rank, one of `ranks`.
    pub fn new(device: &mut Device, arena: u64, rank: u64, ranks: u64) -> Result<Self, Failure> {
        let flags = device.allocate_beside(FLAG_BYTES)?;
        let stream =
            || result::stream::create(result::stream::StreamKind::NonBlocking).map_err(says("a stream of copies"));
        let (sending, helping) = (stream()?, stream()?);
        let context = result::ctx::get_current().map_err(says("the context"))?.ok_or("no context")?;
        let words = (ranks as usize * Flag::COUNT).min(FLAG_BYTES as usize / 4);
        let on_wire = [Stream::Communication, Stream::Messages].map(|stream| device.stream(stream));
        let streams = [on_wire[0], on_wire[1], device.stream(Stream::Compute), sending];
        let waiting = Waiting { context, flags, words, helping, streams };
        let release = Arc::new(Release(Mutex::new(Some(waiting))));
        let events = [device.event()?, device.event()?];
        let remotes = vec![None; ranks as usize];
        Ok(Self { device: device.handle(), arena, flags, rank, remotes, sending, events, release })
    }

    /// How others reach this rank's memory.
    pub fn card(&self) -> Result<Card, Failure> {
        let mut bus = [0; 32];
        // SAFETY: writes at most so many bytes, with the zero at their end.
        unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), 32, self.device).result() }.map_err(says("bus"))?;
        let bus = bus.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).map(char::from).collect();
        Ok(Card { bus, arena: handle(self.arena)?, flags: handle(self.flags)? })
    }

    /// Opens the memory of another rank of this host, if its GPU is linked with this one as memory is: over NVLink.
    pub fn open(&mut self, rank: u64, card: &Card) -> Result<(), Failure> {
        let bus = std::ffi::CString::new(card.bus.as_str()).map_err(|error| error.to_string())?;
        let (mut other, mut is_linked) = (0, 0);
        let attribute = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        // SAFETY: both calls write one number.
        unsafe {
            sys::cuDeviceGetByPCIBusId(&mut other, bus.as_ptr()).result().map_err(says("its GPU is not seen here"))?;
            sys::cuDeviceGetP2PAttribute(&mut is_linked, attribute, self.device, other)
                .result()
                .map_err(says("link"))?;
        }
        if is_linked == 0 {
            return Err("the GPUs have no NVLink between them".to_string());
        }
        let remote = Remote { arena: open(&card.arena)?, flags: open(&card.flags)? };
        self.remotes[rank as usize] = Some(remote);
        Ok(())
    }

    /// Whether a rank's memory is open.
    pub fn reaches(&self, rank: u64) -> bool {
        rank == self.rank || self.remotes.get(rank as usize).is_some_and(Option::is_some)
    }

    /// This rank's place in a group.
    pub fn index(&self, group: &[u64]) -> Result<usize, Failure> {
        group
            .iter()
            .position(|rank| *rank == self.rank)
            .ok_or_else(|| format!("a collective of other ranks: {group:?}"))
    }

    /// What lets the streams go if a rank is gone.
    pub fn release(&self) -> Arc<Release> {
        self.release.clone()
    }

    /// Puts the addresses into a script of a group.
    pub fn bind(&self, device: &mut Device, group: &[u64], acts: &[Act]) -> Result<Exchange, Failure> {
        let index = self.index(group)?;
        let remote = |peer: usize| {
            let found = group.get(peer).and_then(|rank| self.remotes.get(*rank as usize).copied().flatten());
            found.ok_or_else(|| format!("rank {} is not reached", group[peer]))
        };
        let word = |rank: u64, flag: Flag| 4 * (rank * Flag::COUNT as u64 + flag.index() as u64);
        let mut steps = Vec::new();
        for act in acts {
            steps.push(match act {
                Act::Fork => Step::Fork,
                Act::Join => Step::Join,
                Act::Signal(side, flag, to) => {
                    let write = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32;
                    let set = |peer: &usize| Ok(operation(write, remote(*peer)?.flags + word(self.rank, *flag), 1));
                    Step::Flags(*side, to.iter().map(set).collect::<Result<_, Failure>>()?)
                }
                Act::Await(side, flag, from) => {
                    let write = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32;
                    let wait = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32;
                    let of = |peer: &usize| self.flags + word(group[*peer], *flag);
                    let waits = from.iter().map(|peer| operation(wait, of(peer), 1));
                    Step::Flags(*side, waits.chain(from.iter().map(|peer| operation(write, of(peer), 0))).collect())
                }
                Act::Copy { side, peer, to, from, bytes } => {
                    let (to, from) = (remote(*peer)?.arena + to, self.arena + from);
                    Step::Copy { side: *side, to, from, bytes: *bytes }
                }
                Act::Keep { to, from, bytes } => {
                    let (to, from) = (self.arena + to, self.arena + from);
                    Step::Copy { side: Side::Receive, to, from, bytes: *bytes }
                }
                Act::Sum { own, slots, stride, to, elements, dtype } => {
                    let places = [*own, *slots, *to].map(|at| self.arena + at);
                    let launch = sum_parts(*dtype, *elements, *stride, places, (group.len(), index));
                    device.load_missing(std::iter::once(&launch.kernel))?;
                    let resolve = |arg| if let crate::cuda::kernel::Arg::Operand(at, _) = arg { places[at] } else { 0 };
                    Step::Sum(device.prepare(&launch, resolve)?)
                }
            });
        }
        Ok(Exchange(steps))
    }

    /// Enqueues a collective on a stream, and what it sends beside it.
    pub fn run(&self, exchange: &Exchange, device: &Device, stream: Stream) -> Result<(), Failure> {
        let receiving = device.stream(stream);
        let of = |side: Side| if side == Side::Send { self.sending } else { receiving };
        let meet = |event: sys::CUevent, first: sys::CUstream, second: sys::CUstream| {
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: the event and the streams live as long as the device.
            unsafe {
                result::event::record(event, first).map_err(says("event"))?;
                result::stream::wait_event(second, event, flags).map_err(says("event"))
            }
        };
        for step in &exchange.0 {
            match step {
                Step::Fork => meet(self.events[0], receiving, self.sending)?,
                Step::Join => meet(self.events[1], self.sending, receiving)?,
                Step::Flags(side, operations) => {
                    let (count, mut own) = (operations.len() as u32, operations.clone());
                    // SAFETY: the operations are read during the call; the words live as long as their ranks' devices.
                    unsafe { sys::cuStreamBatchMemOp_v2(of(*side), count, own.as_mut_ptr(), 0).result() }
                        .map_err(says("flags"))?;
                }
                Step::Copy { side, to, from, bytes } => {
                    // SAFETY: both ranges lie in arenas, which live as long as their ranks' devices.
                    unsafe { sys::cuMemcpyAsync(*to, *from, *bytes as usize, of(*side)).result() }
                        .map_err(says("copy"))?;
                }
                Step::Sum(launch) => device.launch(launch, stream)?,
            }
        }
        Ok(())
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.release.release();
        self.release.end();
        // SAFETY: every address was opened once; nothing is enqueued any more. Errors cannot be helped.
        unsafe {
            let _ = sys::cuStreamSynchronize(self.sending);
            for remote in self.remotes.iter().flatten() {
                let _ = sys::cuIpcCloseMemHandle(remote.arena);
                let _ = sys::cuIpcCloseMemHandle(remote.flags);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever kept a release of a rank that is gone touches no device.
    #[test]
    fn what_ended_releases_nothing() {
        let stream = std::ptr::null_mut();
        let waiting =
            Waiting { context: std::ptr::null_mut(), flags: 0, words: 0, helping: stream, streams: [stream; 4] };
        let release = Arc::new(Release(Mutex::new(Some(waiting))));
        let kept = release.clone();
        release.end();
        std::thread::scope(|scope| drop(scope.spawn(|| kept.release())));
        release.end();
        assert!(kept.0.lock().unwrap().is_none());
    }
}
