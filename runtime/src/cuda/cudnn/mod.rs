//! Fused kernels by cuDNN, through its backend interface: a graph of tensor operations goes in, the
//! library compiles one kernel for it.
//!
//! * [`attention`] builds the graphs of attention and its derivative, [`convolution`] those of convolutions;
//! * `graph` and `descriptor` are the interface's objects, made safe;
//! * `plan` compiles a graph and launches it, by an engine of `engine`: for attention the library's first choice, for a
//!   convolution the fastest that was measured ([`tune`](super::tune)).
//!
//! The library is optional: where it is missing or takes no such graph, the slower kernels of
//! [`kernels`](super::kernels) are taken. The derivative of attention adds the gradients of the queries from blocks of
//! keys in no fixed order, so two runs differ in its last bits, unless its graph asks for a fixed one
//! ([`Attention::deterministic`]); no engine of attention is asked whether it keeps to that.

pub mod attention;
pub mod convolution;
mod descriptor;
mod engine;
mod graph;
mod plan;

use super::device::{Device, Failure};
use super::tune::Choices;
use attention::Attention;
use convolution::Convolution;
use cudarc::cudnn::sys;
use cudarc::driver::sys::CUstream;
pub use engine::Configuration;
use graph::Graph;
pub use plan::Bound;
use plan::{Plan, Wanted};
use shardc_ir::program::Stream;
use shardc_ir::{DType, TensorType};
use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;

/// What the library makes a kernel of.
#[derive(Clone, Debug, PartialEq)]
pub enum Kernel {
    /// Attention, or its derivative.
    Attention(Attention),
    /// A convolution, or a derivative of it.
    Convolution(Convolution),
}

impl Kernel {
    /// Why this version does not take it or is known to err.
    fn outdated(&self, version: usize) -> Option<&'static str> {
        match self {
            Self::Attention(attention) => attention.outdated(version),
            Self::Convolution(_) => None,
        }
    }

    fn graph(&self, version: usize) -> Result<Graph, Failure> {
        match self {
            Self::Attention(attention) => attention.graph(version),
            Self::Convolution(convolution) => convolution.graph(),
        }
    }

    /// Under which the choice of an engine is kept; none where the library's first choice is taken.
    fn key(&self) -> Option<String> {
        match self {
            Self::Attention(_) => None,
            Self::Convolution(convolution) => Some(convolution.key()),
        }
    }

    fn wanted(&self) -> Wanted {
        match self {
            // Whether the derivative adds in a fixed order its graph decides, by whether it has a sum of `dq` in memory of
            // its own; what the engine notes of itself is not looked at.
            Self::Attention(attention) => Wanted { workspace: attention.scratch().workspace, repeatable: false },
            Self::Convolution(convolution) => Wanted { workspace: convolution.workspace(), repeatable: true },
        }
    }
}

/// A convolution where a program makes it.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Which.
    pub convolution: Convolution,
    /// The addresses of its pictures, filters and results.
    pub buffers: Vec<u64>,
    /// That of the memory which an engine is granted.
    pub workspace: u64,
}

impl Placed {
    fn kernel(&self) -> Kernel {
        Kernel::Convolution(self.convolution.clone())
    }

    /// The first byte and the bytes of each tensor that is read, and of the one that is made.
    pub fn extents(&self) -> [Vec<(u64, u64)>; 2] {
        let tensors = self.buffers.iter().zip(&self.convolution.tensors).enumerate();
        let (made, read): (Vec<_>, Vec<_>) = tensors.partition(|(index, _)| *index == self.convolution.result());
        let extents =
            |all: Vec<(usize, (&u64, &TensorType))>| all.iter().map(|(_, (at, ty))| (**at, ty.bytes().0)).collect();
        [extents(read), extents(made)]
    }

    /// The element type of what is made.
    pub fn dtype(&self) -> DType {
        self.convolution.tensors[self.convolution.result()].dtype
    }
}

/// The library, for one thread and device, opened when first needed, and the plans made so far.
#[derive(Default)]
pub struct Cudnn {
    // Plans are dropped before the handle.
    plans: Vec<(Kernel, Result<Rc<Plan>, Failure>)>,
    /// The engines of convolutions that were measured.
    choices: Arc<Choices<Configuration>>,
    library: OnceCell<Result<Library, Failure>>,
}

/// The version of the library, 0 where it is missing.
#[expect(unsafe_code, reason = "looks for the library")]
pub fn version() -> usize {
    // SAFETY: looking for a library runs only its initialisers.
    if unsafe { sys::is_culib_present() } { cudarc::cudnn::result::get_version() } else { 0 }
}

/// A handle.
struct Library {
    handle: sys::cudnnHandle_t,
    version: usize,
}

impl Library {
    fn open() -> Result<Self, Failure> {
        let version = version();
        if version == 0 {
            return Err(
                "cuDNN is missing: install it (cudnn, or pip install nvidia-cudnn-cu13) and put libcudnn.so on \
                        LD_LIBRARY_PATH"
                    .to_string(),
            );
        }
        if version < 90_000 {
            return Err(format!("cuDNN {version} is too old: install cuDNN 9.6 or later"));
        }
        let handle =
            cudarc::cudnn::result::create_handle().map_err(|error| format!("cuDNN does not start: {error}"))?;
        Ok(Self { handle, version })
    }
}

impl Drop for Library {
    #[expect(unsafe_code, reason = "closes the library")]
    fn drop(&mut self) {
        // SAFETY: the handle was made by `open` and is destroyed once. An error cannot be helped.
        let _ = unsafe { cudarc::cudnn::result::destroy_handle(self.handle) };
    }
}

impl Cudnn {
    fn library(&self) -> Result<&Library, Failure> {
        self.library.get_or_init(Library::open).as_ref().map_err(Clone::clone)
    }

    /// Takes these engines for convolutions from now on.
    pub fn adopt(&mut self, choices: Arc<Choices<Configuration>>) {
        self.choices = choices;
    }

    /// At most `count` engines for a convolution, the library's first choice first. Some may not compile.
    pub fn candidates(&self, placed: &Placed, count: usize) -> Result<Vec<Configuration>, Failure> {
        let (library, kernel) = (self.library()?, placed.kernel());
        plan::candidates(library.handle, &kernel.graph(library.version)?, kernel.wanted(), count)
    }

    /// A launch of a convolution by an engine.
    pub fn bind_by(&self, configuration: &Configuration, placed: &Placed) -> Result<Bound, Failure> {
        let (library, kernel) = (self.library()?, placed.kernel());
        let plan = Plan::by(library.handle, kernel.graph(library.version)?, configuration, kernel.wanted())?;
        Bound::new(Rc::new(plan), &placed.buffers, placed.workspace)
    }

    fn compile(&self, kernel: &Kernel) -> Result<Rc<Plan>, Failure> {
        let library = self.library()?;
        if let Some(reason) = kernel.outdated(library.version) {
            return Err(format!("cuDNN {}: {reason}", library.version));
        }
        let graph = || kernel.graph(library.version);
        if let Some(configuration) = kernel.key().and_then(|key| self.choices.get(&key)) {
            match Plan::by(library.handle, graph()?, configuration, kernel.wanted()) {
                Ok(plan) => return Ok(Rc::new(plan)),
                Err(reason) => tracing::warn!("{configuration} was chosen and is not taken: {reason} ({kernel:?})"),
            }
        }
        Ok(Rc::new(Plan::new(library.handle, graph()?, kernel.wanted())?))
    }

    /// The plan of a kernel, made once; why there is none is logged once.
    fn plan(&mut self, kernel: &Kernel) -> Result<Rc<Plan>, Failure> {
        if let Some((_, plan)) = self.plans.iter().find(|(known, _)| known == kernel) {
            return plan.clone();
        }
        let start = std::time::Instant::now();
        let plan = self.compile(kernel);
        match &plan {
            Ok(_) => tracing::debug!("compiled {kernel:?} in {:.2} s", start.elapsed().as_secs_f64()),
            Err(reason) => {
                tracing::warn!("cuDNN does not take a kernel, which is slower for it: {reason} ({kernel:?})")
            }
        }
        self.plans.push((kernel.clone(), plan.clone()));
        plan
    }

    /// Whether the library takes a kernel; why not is logged.
    pub fn takes(&mut self, kernel: &Kernel) -> bool {
        self.plan(kernel).is_ok()
    }

    /// A launch, with the buffers' addresses in the order that the kernel's graph states.
    pub fn bind(&mut self, kernel: &Kernel, buffers: &[u64], workspace: u64) -> Result<Bound, Failure> {
        let plan = self.plan(kernel)?;
        Bound::new(plan, buffers, workspace)
    }

    /// Enqueues a launch on a stream of this object's device.
    pub fn enqueue(&self, bound: &Bound, device: &Device, stream: Stream) -> Result<(), Failure> {
        // SAFETY: the stream is open as long as the device.
        #[expect(unsafe_code, reason = "calls the library")]
        unsafe {
            self.launch(bound, device.stream(stream))
        }
    }

    /// Enqueues a launch.
    ///
    /// # Safety
    /// The stream is open, on the device of this object's thread.
    #[expect(unsafe_code, reason = "calls the library")]
    pub unsafe fn launch(&self, bound: &Bound, stream: CUstream) -> Result<(), Failure> {
        match self.library.get() {
            // SAFETY: the handle is open as long as `self`; the stream is the caller's promise.
            Some(Ok(library)) => unsafe { bound.launch(library.handle, stream) },
            _ => Err("cuDNN is not open".to_string()),
        }
    }
}
