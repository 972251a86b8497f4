//! One GPU: its context, memory, streams, events and compiled kernels, through cudarc's thin layers.
//!
//! A [`Device`] belongs to the thread that made it. What it hands out (addresses, functions, events)
//! is valid as long as it lives. Everything that could allocate, compile or wait happens when a
//! program is loaded; a step only enqueues.

#![allow(unsafe_code)]

use super::cache::{self, Cache};
use super::kernel::{Kernel, Launch, Source};
use super::table::{Table, TableLaunch};
use cudarc::driver::{result, sys};
use cudarc::nvrtc;
use shardc_ir::program::Stream;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// What went wrong on a device, in words; the caller says which rank and instruction.
pub type Failure = String;

/// An error of the driver, in words.
pub fn says(what: &'static str) -> impl Fn(result::DriverError) -> Failure {
    move |error| format!("{what}: {error:?}")
}

/// A kernel as machine code.
#[derive(Clone, Debug)]
pub struct Binary {
    /// The image that the driver loads.
    pub image: Vec<u8>,
    /// The name of its entry point.
    pub entry: &'static str,
    /// How its arguments are laid out.
    pub source: Source,
}

/// Compiles kernels, by key, for an architecture such as `sm_90a`, on as many threads as the machine has. What
/// was compiled once is kept on disk, per text, options and version of the compiler.
pub fn compile<'a>(
    all: impl Iterator<Item = &'a Arc<Kernel>>,
    architecture: &str,
) -> Result<HashMap<String, Binary>, Failure> {
    let mut kernels = BTreeMap::new();
    for kernel in all {
        if !kernels.contains_key(&kernel.key) {
            let source = kernel.source().map_err(|error| format!("`{}`: {error}", kernel.key))?;
            kernels.insert(kernel.key.clone(), (kernel.name, source));
        }
    }
    let kernels: Vec<_> = kernels.into_iter().map(|(key, (entry, source))| (key, entry, source)).collect();
    let threads = std::thread::available_parallelism().map_or(1, Into::into).min(kernels.len().max(1));
    let (queue, done) = (Mutex::new(kernels), Mutex::new(Ok(HashMap::new())));
    let (cache, options) = (Cache::of_user(), options(architecture));
    let compiler = format!("{} {}", version()?, options.join(" "));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((key, entry, source)) = queue.lock().ok().and_then(|mut queue| queue.pop()) {
                    let name =
                        format!("kernels/{}.cubin", cache::digest(format!("{compiler}\n{}", source.text).as_bytes()));
                    let image = match cache.read(&name) {
                        Some(image) => Ok(image),
                        None => compile_one(&source.text, &options).inspect(|image| cache.write(&name, image)),
                    };
                    let Ok(mut done) = done.lock() else { return };
                    match (image, done.as_mut()) {
                        (Ok(image), Ok(all)) => drop(all.insert(key, Binary { image, entry, source })),
                        (Err(log), Ok(_)) => *done = Err(format!("NVRTC does not compile `{key}`: {log}")),
                        _ => return,
                    }
                }
            });
        }
    });
    done.into_inner().map_err(|error| error.to_string())?
}

/// Where CUDA's headers are: below `CUDA_PATH` or `CUDA_HOME`, or where installations put them.
pub fn include_path() -> std::path::PathBuf {
    let root = std::env::var("CUDA_PATH").or_else(|_| std::env::var("CUDA_HOME"));
    std::path::Path::new(&root.unwrap_or_else(|_| "/usr/local/cuda".to_string())).join("include")
}

/// The version of the compiler of kernels.
fn version() -> Result<String, Failure> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two numbers.
    unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor).result() }
        .map_err(|error| format!("NVRTC: {error:?}"))?;
    Ok(format!("{major}.{minor}"))
}

/// What the compiler of kernels is told.
fn options(architecture: &str) -> [String; 2] {
    [format!("--gpu-architecture={architecture}"), format!("--include-path={}", include_path().display())]
}

fn compile_one(text: &str, options: &[String]) -> Result<Vec<u8>, Failure> {
    let text = CString::new(text).map_err(|error| error.to_string())?;
    let program = nvrtc::result::create_program(&text, None).map_err(|error| format!("{error:?}"))?;
    // SAFETY: `program` was just made and is destroyed once, after its last use.
    unsafe {
        let compiled = nvrtc::result::compile_program(program, options).map_err(|_| {
            let log = nvrtc::result::get_program_log(program).unwrap_or_default();
            let bytes: Vec<u8> = log.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let image = compiled.and_then(|()| {
            let mut size = 0;
            nvrtc::sys::nvrtcGetCUBINSize(program, &mut size).result().map_err(|error| format!("{error:?}"))?;
            let mut image = vec![0u8; size];
            let to = image.as_mut_ptr().cast();
            nvrtc::sys::nvrtcGetCUBIN(program, to).result().map_err(|error| format!("{error:?}"))?;
            Ok(image)
        });
        nvrtc::result::destroy_program(program).map_err(|error| format!("{error:?}"))?;
        image
    }
}

/// The release in what the driver's kernel module says of itself: the first word of digits and dots.
fn release(text: &str) -> Option<&str> {
    let is_release = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_release)
}

/// The number of GPUs, or why there are none.
pub fn device_count() -> Result<usize, Failure> {
    result::init().map_err(says("the CUDA driver does not start"))?;
    result::device::get_count().map(|count| count as usize).map_err(says("cannot count the GPUs"))
}

/// This host, since it was started, or what `NCCL_HOSTID` calls it: ranks that it says are of different hosts meet over
/// the network, as NCCL has them do (NVIDIA, "NCCL", environment variables).
pub fn host() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    std::env::var("NCCL_HOSTID").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| {
        format!("{} {}", read("/proc/sys/kernel/random/boot_id").trim(), read("/proc/sys/kernel/hostname").trim())
    })
}

/// A GPU's own number, which no other GPU of its host has.
pub fn identity(ordinal: usize) -> Result<String, Failure> {
    let device = result::device::get(ordinal as i32).map_err(says("no such GPU"))?;
    let uuid = result::device::get_uuid(device).map_err(says("GPU number"))?;
    let digits: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    Ok(format!("{} {digits}", host()))
}

/// Why a GPU of a compute capability runs no products of 8-bit floats, if it does not (NVIDIA, "cuBLAS",
/// `cublasLtMatmul`: compute capability 8.9 and above).
pub fn lacks_f8_units((major, minor): (i32, i32)) -> Option<String> {
    ((major, minor) < (8, 9)).then(|| {
        format!(
            "compute capability {major}.{minor} has no products of 8-bit floats, which this plan (precision fp8) \
             needs and 8.9 brings; plan with --precision bf16"
        )
    })
}

/// The compute capability of a GPU: major and minor.
pub fn capability(ordinal: usize) -> Result<(i32, i32), Failure> {
    use sys::CUdevice_attribute as A;
    let device = result::device::get(ordinal as i32).map_err(says("no such GPU"))?;
    // SAFETY: `device` is valid.
    let read = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    let major = read(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR).map_err(says("compute capability"))?;
    let minor = read(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR).map_err(says("compute capability"))?;
    Ok((major, minor))
}

/// The architecture of a GPU in NVRTC's notation.
pub fn architecture(ordinal: usize) -> Result<String, Failure> {
    let (major, minor) = capability(ordinal)?;
    // The `a` targets hold the instructions of one generation only, and run on no other.
    Ok(format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" }))
}

/// A kernel launch with all its arguments: only enqueued in a step.
pub struct ReadyLaunch {
    function: sys::CUfunction,
    pointers: Vec<u64>,
    info: Vec<u64>,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
}

/// One GPU.
pub struct Device {
    ordinal: usize,
    device: sys::CUdevice,
    streams: Vec<sys::CUstream>,
    memory: Vec<u64>,
    taken: u64,
    pinned: Vec<*mut c_void>,
    functions: HashMap<String, (sys::CUfunction, Source)>,
}

impl Device {
    /// Takes a GPU for this thread. Communication has the higher priority: a collective that waits
    /// for multiprocessors delays every rank.
    pub fn new(ordinal: usize) -> Result<Self, Failure> {
        let device = result::device::get(ordinal as i32).map_err(says("no such GPU"))?;
        // SAFETY: `device` is valid; the context is released when `self` is dropped.
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(says("cannot take the GPU"))?;
            result::ctx::set_current(context).map_err(says("cannot take the GPU"))?;
        }
        let (least, greatest) = result::stream::get_priority_range().map_err(says("stream priorities"))?;
        let kind = || result::stream::StreamKind::NonBlocking;
        let make = |stream: &Stream| {
            let priority = if stream.is_wire() { greatest } else { least };
            result::stream::create_with_priority(kind(), priority).map_err(says("cannot make a stream"))
        };
        let streams = Stream::ALL.iter().map(make).collect::<Result<Vec<_>, _>>()?;
        let (memory, pinned, functions) = (Vec::new(), Vec::new(), HashMap::new());
        Ok(Self { ordinal, device, streams, memory, taken: 0, pinned, functions })
    }

    /// A stream's handle.
    pub fn stream(&self, stream: Stream) -> sys::CUstream {
        self.streams[stream as usize]
    }

    /// Takes device memory until the device is dropped; its address. Its contents are zero.
    pub fn allocate(&mut self, bytes: u64) -> Result<u64, Failure> {
        let taken = bytes;
        let bytes = bytes.max(256) as usize;
        // SAFETY: the address is freed once, in `drop`.
        unsafe {
            let at = result::malloc_sync(bytes).map_err(|error| {
                let free = result::mem_get_info().map_or(0, |(free, _)| free);
                format!("GPU {} gives no {bytes} bytes ({free} are free): {error:?}", self.ordinal)
            })?;
            self.memory.push(at);
            self.taken += taken;
            result::memset_d8_sync(at, 0, bytes).map_err(says("cannot clear memory"))?;
            // Clearing does not wait for its end, and our streams do not wait for the stream that it is on.
            result::stream::synchronize(std::ptr::null_mut()).map_err(says("cannot clear memory"))?;
            Ok(at)
        }
    }

    /// Memory beside the arena, tables and flags of some MB at the most that no plan counts.
    pub fn allocate_beside(&mut self, bytes: u64) -> Result<u64, Failure> {
        let at = self.allocate(bytes)?;
        self.taken -= bytes;
        Ok(at)
    }

    /// The driver's number of the GPU.
    pub fn handle(&self) -> sys::CUdevice {
        self.device
    }

    /// The bytes of device memory taken so far.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Takes page-locked host memory until the device is dropped; its address, which the GPU knows
    /// too.
    pub fn allocate_pinned(&mut self, bytes: u64) -> Result<u64, Failure> {
        // SAFETY: the address is freed once, in `drop`; the memory is cleared before its first use.
        unsafe {
            let at = result::malloc_host(bytes.max(8) as usize, 0).map_err(says("cannot lock host memory"))?;
            std::ptr::write_bytes(at.cast::<u8>(), 0, bytes.max(8) as usize);
            self.pinned.push(at);
            Ok(at as u64)
        }
    }

    /// A word of host memory that the device can write, at the address that the device knows it by.
    /// It lives as long as the process, so that it can be read whatever becomes of the device.
    pub fn host_word(&self) -> Result<(&'static AtomicU32, u64), Failure> {
        // The driver locks whole pages, each of which may be locked once.
        #[repr(align(4096))]
        struct Page(AtomicU32);
        let page: &'static Page = Box::leak(Box::new(Page(AtomicU32::new(0))));
        let start = std::ptr::from_ref(page).cast::<c_void>().cast_mut();
        let (flags, mut at) = (sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE, 0);
        // SAFETY: the page is never freed, and only ever read and written as an atomic word.
        unsafe {
            let locked = sys::cuMemHostRegister_v2(start, size_of::<Page>(), flags).result();
            locked.map_err(says("cannot lock host memory"))?;
            let known = sys::cuMemHostGetDevicePointer_v2(&mut at, start, 0).result();
            known.map_err(says("the device does not know host memory"))?;
        }
        Ok((&page.0, at))
    }

    /// Enqueues the writing of a word of [`Device::host_word`] or of page-locked memory.
    pub fn write_word(&self, to: u64, value: u32, stream: Stream) -> Result<(), Failure> {
        let stream = self.stream(stream);
        // SAFETY: the stream is valid; the word lives as long as the device.
        let written = unsafe {
            match result::stream::is_capturing(stream).map_err(says("progress"))? {
                sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => {
                    sys::cuStreamWriteValue32_v2(stream, to, value, 0).result()
                }
                // What is recorded must be a node of a graph.
                _ => sys::cuMemsetD32Async(to, value, 1, stream).result(),
            }
        };
        written.map_err(says("progress"))
    }

    /// Copies host bytes to an address of the device, and waits.
    pub fn write(&self, to: u64, bytes: &[u8]) -> Result<(), Failure> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller gives an address inside memory of this device with room for the bytes; the stream is the
        // context's own.
        unsafe {
            result::memcpy_htod_sync(to, bytes).map_err(says("copy to the device"))?;
            // It returns once the bytes are read, and our streams do not wait for the stream that writes them.
            result::stream::synchronize(std::ptr::null_mut()).map_err(says("copy to the device"))
        }
    }

    /// Copies bytes of the device to the host, and waits.
    pub fn read(&self, from: u64, bytes: &mut [u8]) -> Result<(), Failure> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: as for `write`.
        unsafe { result::memcpy_dtoh_sync(bytes, from) }.map_err(says("copy from the device"))
    }

    /// Enqueues a copy between any two addresses of this device and page-locked memory.
    pub fn copy(&self, to: u64, from: u64, bytes: u64, stream: Stream) -> Result<(), Failure> {
        if bytes == 0 || to == from {
            return Ok(());
        }
        // SAFETY: both ranges lie in memory that this device holds until it is dropped.
        unsafe { sys::cuMemcpyAsync(to, from, bytes as usize, self.stream(stream)).result() }.map_err(says("copy"))
    }

    /// Enqueues a filling with zero bytes.
    pub fn zero(&self, to: u64, bytes: u64, stream: Stream) -> Result<(), Failure> {
        // SAFETY: the range lies in memory that this device holds until it is dropped.
        unsafe { result::memset_d8_async(to, 0, bytes as usize, self.stream(stream)) }.map_err(says("clear"))
    }

    /// Waits for all that a stream was given.
    pub fn drain(&self, stream: Stream) -> Result<(), Failure> {
        // SAFETY: the stream is valid while the device lives.
        unsafe { result::stream::synchronize(self.stream(stream)) }.map_err(says("the device failed"))
    }

    /// The GPU's product name, the number of its multiprocessors, and its driver's release; where that is not told, the
    /// version of the driver's interface.
    pub fn description(&self) -> Result<(String, i32, String), Failure> {
        let (mut interface, multiprocessors) = (0, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        // SAFETY: both write one number; the device is valid.
        let count = unsafe {
            sys::cuDriverGetVersion(&mut interface).result().map_err(says("version of the driver"))?;
            result::device::get_attribute(self.device, multiprocessors).map_err(says("number of multiprocessors"))?
        };
        let told = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
        let driver = told.as_deref().and_then(release).map_or_else(|| interface.to_string(), str::to_string);
        Ok((result::device::get_name(self.device).map_err(says("name of the GPU"))?, count, driver))
    }

    /// Writes page-locked memory.
    pub fn write_pinned(&self, to: u64, bytes: &[u8]) {
        // SAFETY: `to` came from `allocate_pinned` with at least this size, and no copy of it is under way: the step has
        // ended, or its stream said that it has read these bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) }
    }

    /// Reads page-locked memory.
    pub fn read_pinned(&self, from: u64, bytes: usize) -> Vec<u8> {
        // SAFETY: as for `write_pinned`.
        unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec()
    }

    /// Reads a word of page-locked memory that the device may be writing.
    pub fn pinned_word(&self, from: u64) -> u32 {
        // SAFETY: `from` came from `allocate_pinned`; while the device writes the word, it is read as an atomic one alone.
        unsafe { AtomicU32::from_ptr(from as *mut u32) }.load(Ordering::Acquire)
    }

    /// Loads kernels.
    pub fn load<'a>(&mut self, kernels: impl Iterator<Item = (&'a String, &'a Binary)>) -> Result<(), Failure> {
        for (key, binary) in kernels {
            let entry = CString::new(binary.entry).map_err(|error| error.to_string())?;
            // SAFETY: the image is a complete one made by NVRTC for this architecture.
            let function = unsafe {
                let module = result::module::load_data(binary.image.as_ptr().cast::<c_void>())
                    .map_err(|error| format!("cannot load `{key}`: {error:?}"))?;
                result::module::get_function(module, entry).map_err(says("entry point"))?
            };
            if binary.source.shared_bytes > 48 * 1024 {
                let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let bytes = binary.source.shared_bytes as i32;
                // SAFETY: the function was just loaded.
                unsafe { result::function::set_function_attribute(function, most, bytes) }
                    .map_err(says("shared memory"))?;
            }
            self.functions.insert(key.clone(), (function, binary.source.clone()));
        }
        Ok(())
    }

    /// Compiles and loads kernels that are not loaded yet.
    pub fn load_missing<'a>(&mut self, kernels: impl Iterator<Item = &'a Arc<Kernel>>) -> Result<(), Failure> {
        let missing: Vec<&Arc<Kernel>> = kernels.filter(|kernel| !self.functions.contains_key(&kernel.key)).collect();
        let binaries = compile(missing.into_iter(), &architecture(self.ordinal)?)?;
        self.load(binaries.iter())
    }

    /// Puts a launch's arguments together; `resolve` gives the buffers' addresses.
    pub fn prepare(
        &self,
        launch: &Launch,
        resolve: impl Fn(super::kernel::Arg) -> u64,
    ) -> Result<ReadyLaunch, Failure> {
        let pointers = launch.buffers.iter().map(|arg| resolve(*arg)).collect();
        self.ready(&launch.kernel, pointers, (&launch.numbers, &launch.reals), launch.grid)
    }

    /// Writes the table of one launch to the device and puts the launch's arguments together.
    pub fn prepare_table(&mut self, table: &Table, launch: TableLaunch) -> Result<ReadyLaunch, Failure> {
        let TableLaunch { mut buffers, words, numbers, blocks } = launch;
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        let at = self.allocate_beside(bytes.len() as u64)?;
        self.write(at, &bytes)?;
        buffers.push(at);
        self.ready(&table.kernel, buffers, (&numbers, &table.reals), [blocks, 1, 1])
    }

    fn ready(
        &self,
        kernel: &Kernel,
        pointers: Vec<u64>,
        (numbers, reals): (&[u32], &[f32]),
        grid: [u32; 3],
    ) -> Result<ReadyLaunch, Failure> {
        let key = &kernel.key;
        let (function, source) = self.functions.get(key).ok_or_else(|| format!("kernel `{key}` is not loaded"))?;
        let mut info = vec![0u64; source.info_bytes.div_ceil(8)];
        let mut put = |at: usize, bits: u32| {
            let shift = (at % 8) * 8;
            info[at / 8] |= u64::from(bits) << shift;
        };
        numbers.iter().enumerate().for_each(|(index, bits)| put(source.numbers_at + 4 * index, *bits));
        reals.iter().enumerate().for_each(|(index, real)| put(source.reals_at + 4 * index, real.to_bits()));
        let (function, threads, shared_bytes) = (*function, kernel.threads, source.shared_bytes);
        Ok(ReadyLaunch { function, pointers, info, grid, threads, shared_bytes })
    }

    /// Enqueues a kernel.
    pub fn launch(&self, ready: &ReadyLaunch, stream: Stream) -> Result<(), Failure> {
        let pointers = ready.pointers.iter().map(|pointer| std::ptr::from_ref(pointer).cast::<c_void>().cast_mut());
        let mut parameters: Vec<*mut c_void> = pointers.collect();
        parameters.push(ready.info.as_ptr().cast::<c_void>().cast_mut());
        let (grid, block) = ((ready.grid[0], ready.grid[1], ready.grid[2]), (ready.threads, 1, 1));
        let (shared, stream) = (ready.shared_bytes, self.stream(stream));
        // SAFETY: the parameters fit the kernel's signature, which `prepare` laid out after the
        // compiler's own description; the driver copies them before it returns.
        unsafe { result::launch_kernel(ready.function, grid, block, shared, stream, &mut parameters) }
            .map_err(says("launch"))
    }

    /// A new event; kept until the process ends.
    pub fn event(&self) -> Result<sys::CUevent, Failure> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(says("cannot make an event"))
    }

    /// A new event that knows its time; kept until the process ends.
    pub fn timed_event(&self) -> Result<sys::CUevent, Failure> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(says("cannot make an event"))
    }

    /// The seconds between two timed events that the device has passed.
    pub fn elapsed(&self, start: sys::CUevent, end: sys::CUevent) -> Result<f64, Failure> {
        // SAFETY: the events are valid while the device lives.
        let milliseconds = unsafe { result::event::elapsed(start, end) }.map_err(says("event"))?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    /// Marks a point of a stream.
    pub fn record(&self, event: sys::CUevent, stream: Stream) -> Result<(), Failure> {
        // SAFETY: event and stream are valid while the device lives.
        unsafe { result::event::record(event, self.stream(stream)) }.map_err(says("event"))
    }

    /// Makes a stream wait for a mark.
    pub fn wait(&self, event: sys::CUevent, stream: Stream) -> Result<(), Failure> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are valid while the device lives.
        unsafe { result::stream::wait_event(self.stream(stream), event, flags) }.map_err(says("event"))
    }

    /// Whether the device has passed a mark.
    pub fn passed(&self, event: sys::CUevent) -> Result<bool, Failure> {
        // SAFETY: the event is valid while the device lives.
        match unsafe { result::event::query(event) } {
            Ok(()) => Ok(true),
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(format!("{error:?}")),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: every address was taken by this device and is freed once. Errors cannot be helped
        // here: the context may be lost already.
        unsafe {
            for stream in &self.streams {
                let _ = result::stream::synchronize(*stream);
                let _ = result::stream::destroy(*stream);
            }
            for at in self.memory.drain(..) {
                let _ = result::free_sync(at);
            }
            for at in self.pinned.drain(..) {
                let _ = result::free_host(at);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// A C string as text.
pub fn text(pointer: *const std::ffi::c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the library gave a string that ends in a zero byte and lives as long as it.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::release;

    #[test]
    fn the_drivers_release_is_read() {
        let closed =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\nGCC version:  gcc 12.3.0\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (a@b)\n";
        assert_eq!([closed, open].map(release), [Some("535.129.03"), Some("580.95.05")]);
        assert_eq!(release("GCC version\ngcc 12.3.0"), None);
    }
}
