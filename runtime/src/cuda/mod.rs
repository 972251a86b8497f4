//! The CUDA backend: kernels from CubeCL, matrix products by cuBLASLt, collectives by NCCL.
//!
//! A process drives one GPU (or several, each by a thread); what ranks of different processes need
//! of each other they get through the run's [`World`].
//!
//! * [`kernels`] are CubeCL functions; [`kernel`] turns them into CUDA C++ without a device.
//! * [`select`] chooses, for an operation and its local types, kernels and matrix products.
//! * `executor` resolves a program's instructions to commands at fixed addresses and runs them.
//! * `worker` is a rank's thread, which owns its executor, and `agreement` what all ranks decide alike.
//! * `trail` knows where a rank's streams stand, and `watch` gives up a step that hangs.
//! * `tune` measures which algorithm of cuBLASLt suits each product and which engine of cuDNN each convolution, and `cache`
//!   keeps what was found.
//! * `copies` is what the copy engines do of collectives between linked GPUs, in place of NCCL.
//! * `device`, `gemm`, `nccl` and [`cudnn`] are what touches the libraries, all of which are loaded
//!   when a [`CudaRuntime`] is made: a program that never makes one needs none of them.
//!
//! Invariants: a step compiles nothing and waits for the device once, at its end, and takes no memory but what
//! libraries take for themselves in the first two (connections, modules, a recorded graph), which a device's
//! profile reserves. All else is the program's arena: scratch memory and the libraries' workspaces are buffers
//! of their instructions, as large as [`select`] says ([`CudaTarget`]).

mod agreement;
mod cache;
mod copies;
pub mod cudnn;
mod device;
mod executor;
mod gather;
mod gemm;
mod graph;
pub mod kernel;
pub mod kernels;
mod nccl;
pub mod select;
pub mod table;
mod target;
#[cfg(test)]
mod tests;
mod trail;
mod tune;
#[cfg(all(test, feature = "vulkan"))]
mod vulkan_tests;
mod watch;
mod worker;

pub use device::identity;
pub(crate) use device::include_path;
pub use target::CudaTarget;

use crate::cpu::interpret::chain;
use crate::launch::{LaunchError, World};
use crate::probe;
use crate::{Feeds, Readings, Runtime, RuntimeError, TimedStep, check_feeds, held};
use agreement::Agreement;
use device::Failure;
use executor::{Chosen, Making};
use shardc_ir::program::Slot;
use shardc_ir::{Bytes, DType, Graph, HostTensor, Program};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::Duration;
use tune::Tunings;
use watch::{Task, Watch};
use worker::{Answer, MeetingError, Request, Shared, Worker, has_messages, meetings, spawn};

/// Why the CUDA backend cannot start.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CudaError {
    /// A library that the loader does not find.
    #[error("{library} is missing: {fix}")]
    MissingLibrary {
        /// The library.
        library: &'static str,
        /// How to get it.
        fix: &'static str,
    },
    /// The driver is there but does not start.
    #[error("{0}")]
    Driver(String),
    /// Fewer GPUs than ranks.
    #[error("{needed} GPUs are needed, and this machine has {present}")]
    TooFewDevices {
        /// How many the programs need.
        needed: usize,
        /// How many there are.
        present: usize,
    },
    /// An instruction for which there is no kernel.
    #[error("rank {rank}: {message}")]
    Unsupported {
        /// The rank.
        rank: u64,
        /// Which, and why.
        message: String,
    },
    /// The other ranks cannot be met, or one of them failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A device refused while a program was loaded.
    #[error("rank {rank} on GPU {device}: {message}")]
    Load {
        /// The rank.
        rank: u64,
        /// Its GPU.
        device: usize,
        /// What went wrong.
        message: String,
    },
}

/// Checks that the libraries are there and there are enough GPUs for the ranks of this process, some
/// of `ranks` in all. Nothing else of the backend may be called before: cudarc ends the process where
/// a library is missing.
///
/// # Errors
/// The first thing that is missing, and how to get it.
#[expect(unsafe_code, reason = "asks the loader for libraries")]
pub fn require(devices: &[usize], ranks: u64) -> Result<(), CudaError> {
    // SAFETY: looking for a library runs only its initialisers.
    let present = unsafe {
        [
            (cudarc::driver::sys::is_culib_present(), "the CUDA driver (libcuda.so)", probe::DRIVER),
            (cudarc::nvrtc::sys::is_culib_present(), "NVRTC (libnvrtc.so)", probe::NVRTC),
            (cudarc::cublaslt::sys::is_culib_present(), "cuBLASLt (libcublasLt.so)", probe::CUBLASLT),
            (probe::headers().is_ok(), "a header that NVRTC needs (cuda_runtime.h)", probe::HEADERS),
            (ranks < 2 || cudarc::nccl::sys::is_culib_present(), "NCCL (libnccl.so)", probe::NCCL),
        ]
    };
    if let Some((_, library, fix)) = present.into_iter().find(|(found, _, _)| !found) {
        return Err(CudaError::MissingLibrary { library, fix });
    }
    probe::driver_version().map_err(|why| CudaError::Driver(format!("the CUDA driver: {why}")))?;
    let count = device::device_count().map_err(CudaError::Driver)?;
    let needed = devices.iter().map(|device| device + 1).max().unwrap_or(0).max(devices.len());
    if needed > count {
        return Err(CudaError::TooFewDevices { needed, present: count });
    }
    Ok(())
}

/// The ranks of a run that this process drives, each on a GPU of this host.
pub struct CudaRuntime {
    /// Ends before the workers, whose devices it may be releasing.
    _watch: Watch,
    workers: Vec<Worker>,
    world: Arc<World>,
    watched: Arc<watch::Shared>,
    bytes: Bytes,
    /// Inputs of the step after the next one.
    ahead: Option<Feeds>,
}

impl Drop for CudaRuntime {
    fn drop(&mut self) {
        self.world.set_probe(None);
    }
}

impl CudaRuntime {
    /// Loads `programs[i]` on GPU `devices[i]`: compiles kernels, takes memory, makes communicators.
    /// Parameters are zero until they are written. The programs are those of the ranks that this
    /// process drives; all other ranks are reached through `world`, and make this call too.
    ///
    /// # Errors
    /// See [`CudaError`].
    pub fn new(programs: Vec<Program>, devices: &[usize], world: Arc<World>) -> Result<Self, CudaError> {
        if programs.len() != devices.len() {
            let message = format!("{} programs for {} GPUs", programs.len(), devices.len());
            return Err(CudaError::Unsupported { rank: 0, message });
        }
        require(devices, programs.first().map_or(1, |program| program.ranks))?;
        let programs: Vec<Arc<Program>> = programs.into_iter().map(Arc::new).collect();
        let mut chosen = Vec::new();
        for program in &programs {
            let choice = executor::choose(program);
            chosen.push(choice.map_err(|message| CudaError::Unsupported { rank: program.rank, message })?);
        }
        let load = |message| CudaError::Load { rank: world.rank(), device: devices[0], message };
        for ((program, choice), device) in programs.iter().zip(&chosen).zip(devices.iter().copied()) {
            let refuse = |message| CudaError::Load { rank: program.rank, device, message };
            let capability = device::capability(device).map_err(refuse)?;
            if let Some(message) = device::lacks_f8_units(capability).filter(|_| choice.has_f8_products()) {
                return Err(refuse(message));
            }
        }
        let architecture = device::architecture(devices[0]).map_err(load)?;
        let binaries = device::compile(chosen.iter().flat_map(Chosen::kernels), &architecture).map_err(load)?;
        let has_messages = world.any("messages", programs.iter().any(|program| has_messages(program)))?;
        let meetings = meetings(&programs, has_messages, &world).map_err(|error| match error {
            MeetingError::Nccl(message) => load(message),
            MeetingError::World(error) => error.into(),
        })?;
        let watched = Arc::new(watch::Shared::default());
        let started = Barrier::new(programs.len());
        let tuning = Tunings::new(&world, programs.first().map_or(0, |program| program.rank));
        let agreement = Arc::new(Agreement::new(world.clone(), programs.len()));
        let (own, all) = (watched.clone(), world.clone());
        let shared = Arc::new(Shared { binaries, meetings, watched: own, tuning, world: all, agreement, started });
        let _watch = Watch::new(watched.clone(), world.clone());
        watched.set_task(Some(Task::Start));
        let mut workers = Vec::new();
        for ((program, choice), ordinal) in programs.into_iter().zip(chosen).zip(devices.iter().copied()) {
            workers.push(spawn(program, choice, ordinal, shared.clone()));
        }
        let mut bytes = Bytes(0);
        let mut errors = Vec::new();
        for (worker, device) in workers.iter().zip(devices) {
            let failure = match worker.answer() {
                Some(Answer::Bytes(Ok(taken))) => {
                    let taken = taken.try_into().map_or(0, u64::from_le_bytes);
                    bytes = bytes.max(Bytes(taken));
                    continue;
                }
                Some(Answer::Bytes(Err(message))) => message,
                _ => "its thread ended".to_string(),
            };
            watched.stop.store(true, Ordering::Relaxed);
            errors.push(((worker.program.rank, *device), failure));
        }
        if let Some(((rank, device), message)) = cause(errors) {
            return Err(CudaError::Load { rank, device, message });
        }
        let probed = watched.clone();
        world.set_probe(Some(Box::new(move || probed.text())));
        watched.set_task(None);
        Ok(Self { workers, world, watched, bytes, ahead: None, _watch })
    }

    fn worker(&self, rank: u64) -> Result<&Worker, RuntimeError> {
        let unknown = || RuntimeError::Unknown { what: "rank", name: rank.to_string() };
        self.workers.iter().find(|worker| worker.program.rank == rank).ok_or_else(unknown)
    }

    fn slot(&self, rank: u64, name: &str) -> Result<&Slot, RuntimeError> {
        let slots = &self.worker(rank)?.program.slots;
        let unknown = || RuntimeError::Unknown { what: "slot", name: name.to_string() };
        slots.iter().find(|slot| slot.name == name).ok_or_else(unknown)
    }

    /// How the slots that hold the casts of a parameter get their values, once it has its own.
    fn casts_of(&self, rank: u64, name: &str) -> Result<Vec<Making>, RuntimeError> {
        let (program, from) = (&self.worker(rank)?.program, self.slot(rank, name)?.buffer);
        let casts = program.slots.iter().filter(|slot| slot.cast_of.as_deref() == Some(name));
        let making = |slot: &Slot| {
            Making::cast(program, from, slot.buffer)
                .map_err(|message| failed(rank, format!("`{}`: {message}", slot.name)))
        };
        casts.map(making).collect()
    }

    fn make(&self, rank: u64, makings: Vec<Making>) -> Result<(), RuntimeError> {
        match self.ask(rank, Request::Make(makings))? {
            Answer::Done(done) => done.map_err(|message| failed(rank, message)),
            _ => Err(failed(rank, "an answer to another question".to_string())),
        }
    }

    fn ask(&self, rank: u64, request: Request) -> Result<Answer, RuntimeError> {
        let worker = self.worker(rank)?;
        let answer = worker.ask(request).and_then(|()| worker.answer());
        answer.ok_or_else(|| failed(rank, "its thread ended".to_string()))
    }

    /// Why a step failed: what this process's rank says, unless it is a symptom of what happened to
    /// another.
    fn cause(&self, rank: u64, message: Failure) -> RuntimeError {
        if let Some((rank, message)) = self.watched.reason().filter(|_| self.world.failure().is_none()) {
            return failed(rank, message);
        }
        match self.world.failure_within(SYMPTOM) {
            Some(failure) if failure.rank != rank => {
                let at = if failure.at.is_empty() { failure.who } else { format!("{} ({})", failure.at, failure.who) };
                RuntimeError::Rank { rank: failure.rank, at, message: failure.message }
            }
            Some(failure) => failed(rank, failure.message),
            None => failed(rank, message),
        }
    }

    /// Asks this process's ranks at once, and takes each one's answer.
    fn together<T>(
        &self,
        request: impl Fn() -> Request,
        take: impl Fn(Answer) -> Option<Result<T, Failure>>,
    ) -> Result<Vec<T>, RuntimeError> {
        self.watched.set_task(Some(Task::Step));
        for worker in &self.workers {
            let gone = || failed(worker.program.rank, "its thread ended".to_string());
            worker.ask(request()).ok_or_else(gone)?;
        }
        let (mut done, mut errors) = (Vec::new(), Vec::new());
        for worker in &self.workers {
            match worker.answer().and_then(&take) {
                Some(Ok(answer)) => done.push(answer),
                Some(Err(message)) => errors.push((worker.program.rank, message)),
                None => {
                    self.watched.stop.store(true, Ordering::Relaxed);
                    errors.push((worker.program.rank, "its thread ended".to_string()));
                }
            }
        }
        self.watched.set_task(None);
        match cause(errors) {
            Some((rank, message)) => Err(self.cause(rank, message)),
            None => Ok(done),
        }
    }

    /// Runs a step on this process's ranks.
    fn run(&mut self, feeds: &Feeds, is_timed: bool) -> Result<TimedStep, RuntimeError> {
        check_feeds(self.workers.iter().map(|worker| &*worker.program), feeds)?;
        let next = self.ahead.take();
        let answers = self.together(
            || Request::Step(feeds.clone(), is_timed, next.clone()),
            |answer| if let Answer::Readings(readings) = answer { Some(readings) } else { None },
        )?;
        let (values, spans): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
        let first = self.workers.first().zip(values.into_iter().next());
        let spans = spans.concat();
        let Some((worker, values)) = first else { return Ok(TimedStep::default()) };
        let program = &worker.program;
        let named = program.readings.iter().zip(&values).map(|(reading, bytes)| {
            let ty = &program.buffers[reading.buffer].ty;
            let wrong = || RuntimeError::Program(format!("reading `{}` is {ty}, not a scalar number", reading.name));
            Ok((reading.name.clone(), number(ty.dtype, bytes).ok_or_else(wrong)?))
        });
        let readings = named.collect::<Result<_, RuntimeError>>()?;
        Ok(TimedStep { readings, spans })
    }
}

/// How long a broken collective waits to hear that another rank is gone, which then is the cause.
const SYMPTOM: Duration = Duration::from_secs(2);

/// Of what ranks say that failed: the first that did not merely end because another had.
fn cause<T>(errors: Vec<(T, Failure)>) -> Option<(T, Failure)> {
    errors.into_iter().min_by_key(|(_, message)| message == executor::OTHER_FAILED)
}

fn failed(rank: u64, message: String) -> RuntimeError {
    RuntimeError::Rank { rank, at: "on its GPU".to_string(), message }
}

/// A scalar reading as a number.
fn number(dtype: DType, bytes: &[u8]) -> Option<f64> {
    match dtype {
        DType::F32 => Some(f64::from(f32::from_le_bytes(bytes.try_into().ok()?))),
        DType::Bf16 => Some(f64::from(half::bf16::from_le_bytes(bytes.try_into().ok()?))),
        DType::I64 => Some(i64::from_le_bytes(bytes.try_into().ok()?) as f64),
        DType::I32 => Some(f64::from(i32::from_le_bytes(bytes.try_into().ok()?))),
        _ => None,
    }
}

impl Runtime for CudaRuntime {
    fn ranks(&self) -> Vec<u64> {
        self.workers.iter().map(|worker| worker.program.rank).collect()
    }

    fn write_slot(&mut self, rank: u64, name: &str, part: &HostTensor) -> Result<(), RuntimeError> {
        let slot = self.slot(rank, name)?;
        let (buffer, part) = (slot.buffer, held(slot, part, &self.worker(rank)?.program)?);
        match self.ask(rank, Request::Write(buffer, part.bytes))? {
            Answer::Done(done) => done.map_err(|message| failed(rank, message))?,
            _ => return Err(failed(rank, "an answer to another question".to_string())),
        }
        let casts = self.casts_of(rank, name)?;
        if casts.is_empty() { Ok(()) } else { self.make(rank, casts) }
    }

    fn make_slots(
        &mut self,
        init: &Graph,
        seed: u64,
        slots: Vec<(u64, String)>,
    ) -> Result<Vec<(u64, String)>, RuntimeError> {
        let (mut left, mut made) = (Vec::new(), BTreeMap::<u64, Vec<Making>>::new());
        for (rank, name) in slots {
            let slot = self.slot(rank, &name)?;
            let chain = chain(init, &name, &slot.slice, seed);
            match chain.and_then(|chain| Making::new(&self.worker(rank).ok()?.program, slot, chain)) {
                Some(making) => {
                    let casts = self.casts_of(rank, &name)?;
                    made.entry(rank).or_default().extend([making].into_iter().chain(casts));
                }
                None => left.push((rank, name)),
            }
        }
        made.into_iter().try_for_each(|(rank, makings)| self.make(rank, makings))?;
        Ok(left)
    }

    fn read_slot(&mut self, rank: u64, name: &str) -> Result<HostTensor, RuntimeError> {
        let (buffer, part) = self.slot(rank, name).map(|slot| (slot.buffer, slot.part()))?;
        let ty = self.worker(rank)?.program.buffers[buffer].ty.clone();
        match self.ask(rank, Request::Read(buffer))? {
            Answer::Bytes(Ok(bytes)) => Ok(HostTensor { ty, bytes }.beginning(&part)),
            Answer::Bytes(Err(message)) => Err(failed(rank, message)),
            _ => Err(failed(rank, "an answer to another question".to_string())),
        }
    }

    fn ahead(&mut self, next: &Feeds) {
        self.ahead = Some(next.clone());
    }

    fn step(&mut self, feeds: &Feeds) -> Result<Readings, RuntimeError> {
        Ok(self.run(feeds, false)?.readings)
    }

    fn timed_step(&mut self, feeds: &Feeds) -> Result<TimedStep, RuntimeError> {
        self.run(feeds, true)
    }

    fn peak_bytes(&self) -> Bytes {
        self.bytes
    }

    fn first_non_finite(&mut self) -> Result<Option<String>, RuntimeError> {
        let take = |answer| if let Answer::Found(found) = answer { Some(found) } else { None };
        let found = self.together(|| Request::Inspect, take)?;
        let named = self.workers.iter().zip(found).find_map(|(worker, text)| Some((worker.program.rank, text?)));
        Ok(named.map(|(rank, text)| format!("rank {rank}: {text}")))
    }
}
