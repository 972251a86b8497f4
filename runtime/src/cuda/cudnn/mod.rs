//! Fused kernels by cuDNN, through its backend interface: a graph of tensor operations goes in, the
//! library compiles one kernel for it.
//!
//! * [`attention`] builds the graphs of attention and its derivative, [`convolution`] those of convolutions;
//! * `graph` and `descriptor` are the interface's objects, made safe;
//! * `plan` compiles a graph and launches it.
//!
//! The library is optional: where it is missing or takes no such graph, the slower kernels of
//! [`kernels`](super::kernels) are taken. The derivative of attention adds the gradients of the queries from blocks of
//! keys in no fixed order, so two runs differ in its last bits.

pub mod attention;
pub mod convolution;
mod descriptor;
mod graph;
mod plan;

use super::device::Failure;
use attention::Attention;
use convolution::Convolution;
use cudarc::cudnn::sys;
use cudarc::driver::sys::CUstream;
use graph::Graph;
pub use plan::Bound;
use plan::{Plan, Wanted};
use std::rc::Rc;

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

    fn wanted(&self) -> Wanted {
        match self {
            // The derivative's engine says of itself whether it adds in a fixed order by what its graph asks for.
            Self::Attention(attention) => Wanted { workspace: attention.scratch().workspace, repeatable: false },
            Self::Convolution(convolution) => Wanted { workspace: convolution.workspace(), repeatable: true },
        }
    }
}

/// The library, for one thread and device, opened when first needed, and the plans made so far.
#[derive(Default)]
pub struct Cudnn {
    // Plans are dropped before the handle.
    plans: Vec<(Kernel, Result<Rc<Plan>, Failure>)>,
    library: Option<Result<Library, Failure>>,
}

/// A handle.
struct Library {
    handle: sys::cudnnHandle_t,
    version: usize,
}

impl Library {
    #[expect(unsafe_code, reason = "opens the library")]
    fn open() -> Result<Self, Failure> {
        // SAFETY: looking for a library runs only its initialisers.
        if !unsafe { sys::is_culib_present() } {
            return Err(
                "cuDNN is missing: install it (cudnn, or pip install nvidia-cudnn-cu13) and put libcudnn.so on \
                        LD_LIBRARY_PATH"
                    .to_string(),
            );
        }
        let version = cudarc::cudnn::result::get_version();
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
    fn library(&mut self) -> Result<&Library, Failure> {
        self.library.get_or_insert_with(Library::open).as_ref().map_err(Clone::clone)
    }

    fn compile(&mut self, kernel: &Kernel) -> Result<Rc<Plan>, Failure> {
        let library = self.library()?;
        if let Some(reason) = kernel.outdated(library.version) {
            return Err(format!("cuDNN {}: {reason}", library.version));
        }
        Ok(Rc::new(Plan::new(library.handle, kernel.graph(library.version)?, kernel.wanted())?))
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

    /// Enqueues a launch.
    ///
    /// # Safety
    /// The stream is open, on the device of this object's thread.
    #[expect(unsafe_code, reason = "calls the library")]
    pub unsafe fn launch(&self, bound: &Bound, stream: CUstream) -> Result<(), Failure> {
        match &self.library {
            // SAFETY: the handle is open as long as `self`; the stream is the caller's promise.
            Some(Ok(library)) => unsafe { bound.launch(library.handle, stream) },
            _ => Err("cuDNN is not open".to_string()),
        }
    }
}
