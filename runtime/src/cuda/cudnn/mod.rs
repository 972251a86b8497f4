//! Fused kernels by cuDNN, through its backend interface: a graph of tensor operations goes in, the
//! library compiles one kernel for it.
//!
//! * [`attention`] builds the graphs of attention and its derivative;
//! * `graph` and `descriptor` are the interface's objects, made safe;
//! * `plan` compiles a graph and launches it.
//!
//! The library is optional: where it is missing or takes no such graph, attention takes the slower
//! kernels of [`kernels::attention`](super::kernels::attention). The derivative adds the gradients of
//! the queries from blocks of keys in no fixed order, so two runs differ in its last bits.

pub mod attention;
mod descriptor;
mod graph;
mod plan;

use super::device::Failure;
use attention::Attention;
use cudarc::cudnn::sys;
use cudarc::driver::sys::CUstream;
pub use plan::Bound;
use plan::Plan;
use std::rc::Rc;

/// The library, for one thread and device, opened when first needed, and the plans made so far.
#[derive(Default)]
pub struct Cudnn {
    // Plans are dropped before the handle.
    plans: Vec<(Attention, Result<Rc<Plan>, Failure>)>,
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

    fn compile(&mut self, attention: &Attention) -> Result<Rc<Plan>, Failure> {
        let library = self.library()?;
        if let Some(reason) = attention.outdated(library.version) {
            return Err(format!("cuDNN {}: {reason}", library.version));
        }
        let plan = Plan::new(library.handle, attention.graph(library.version)?)?;
        let (needed, granted) = (plan.workspace(), attention.scratch().workspace);
        if needed > granted {
            return Err(format!("cuDNN's engine takes {needed} bytes of workspace, and {granted} were planned"));
        }
        Ok(Rc::new(plan))
    }

    /// The plan of an attention, made once; why there is none is logged once.
    fn plan(&mut self, attention: &Attention) -> Result<Rc<Plan>, Failure> {
        if let Some((_, plan)) = self.plans.iter().find(|(known, _)| known == attention) {
            return plan.clone();
        }
        let start = std::time::Instant::now();
        let plan = self.compile(attention);
        match &plan {
            Ok(_) => tracing::debug!("compiled {attention:?} in {:.2} s", start.elapsed().as_secs_f64()),
            Err(reason) => tracing::warn!("attention is not fused, and slower for it: {reason} ({attention:?})"),
        }
        self.plans.push((*attention, plan.clone()));
        plan
    }

    /// Whether the library takes an attention; why not is logged.
    pub fn takes(&mut self, attention: &Attention) -> bool {
        self.plan(attention).is_ok()
    }

    /// A launch, with the buffers' addresses in the order that [`Attention::graph`] states.
    pub fn bind(&mut self, attention: &Attention, buffers: &[u64], workspace: u64) -> Result<Bound, Failure> {
        let plan = self.plan(attention)?;
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
