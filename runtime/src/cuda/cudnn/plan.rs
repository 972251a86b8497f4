//! Compiled graphs, and their launches.

use super::descriptor::{Address, Descriptor, Kind, Name, Note, check};
use super::graph::{Graph, Source};
use crate::cuda::device::Failure;
use cudarc::cudnn::sys;
use cudarc::driver::sys::CUstream;
use std::rc::Rc;

/// A graph compiled by the engine that the library prefers for it.
pub struct Plan {
    // Dropped in this order: a plan before the operations, these before the tensors.
    plan: Descriptor,
    _operations: Descriptor,
    graph: Graph,
}

/// Which engines may be taken.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Bytes of workspace at the most.
    pub workspace: u64,
    /// Whether every launch must give the same bits.
    pub repeatable: bool,
}

impl Plan {
    /// Compiles a graph; takes from some milliseconds to seconds. The error is why no engine takes it.
    pub fn new(handle: sys::cudnnHandle_t, graph: Graph, wanted: Wanted) -> Result<Self, Failure> {
        let operations = graph.operations(handle)?;
        let heuristics = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[&operations])?
            .with(Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[sys::cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A])?
            .finalize()?;
        // Sorted by the time that the library expects; one that fails to compile is skipped.
        let kind = Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
        let configurations = heuristics.parts(Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, kind, 16)?;
        let mut reason = "cuDNN has no engine for it".to_string();
        for configuration in &configurations {
            if wanted.repeatable && !is_repeatable(configuration)? {
                reason = "its engines for it add in any order".to_string();
                continue;
            }
            let compiled = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
                .with_parts(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[configuration])?
                .finalize();
            match compiled {
                Ok(plan) => {
                    let workspace = plan.number(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?.max(0) as u64;
                    if workspace > wanted.workspace {
                        let granted = wanted.workspace;
                        reason = format!("its engine takes {workspace} bytes of workspace, and {granted} were planned");
                        continue;
                    }
                    return Ok(Self { plan, _operations: operations, graph });
                }
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }
}

/// Whether an engine adds in a fixed order.
fn is_repeatable(configuration: &Descriptor) -> Result<bool, Failure> {
    let engines = configuration.parts(Name::CUDNN_ATTR_ENGINECFG_ENGINE, Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR, 1)?;
    let any = Note(sys::cudnnBackendNumericalNote_t::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC as u32);
    let mut notes = engines.iter().map(Descriptor::notes);
    notes.try_fold(true, |is_repeatable, notes| Ok(is_repeatable && !notes?.contains(&any)))
}

/// A plan with the addresses of one launch.
pub struct Bound {
    pack: Descriptor,
    plan: Rc<Plan>,
    /// What the numbers' addresses in the pack point to.
    _numbers: Box<[u32]>,
}

impl Bound {
    /// `addresses` are the buffers in order; the workspace has as many bytes as engines were granted.
    pub fn new(plan: Rc<Plan>, addresses: &[u64], workspace: u64) -> Result<Self, Failure> {
        let sources = plan.graph.sources();
        let number = |source: &(i64, Source)| match source.1 {
            Source::Number(bits) => bits,
            Source::Buffer(_) => 0,
        };
        let numbers: Box<[u32]> = sources.iter().map(number).collect();
        let address = |((_, source), number): (&(i64, Source), &u32)| match source {
            Source::Buffer(position) => {
                addresses.get(*position).map(|at| Address(*at)).ok_or_else(|| format!("no buffer {position}"))
            }
            Source::Number(_) => Ok(Address(std::ptr::from_ref(number) as u64)),
        };
        let pointers = sources.iter().zip(&numbers).map(address).collect::<Result<Vec<_>, _>>()?;
        let ids: Vec<i64> = sources.iter().map(|(id, _)| *id).collect();
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &pointers)?
            .with(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[Address(workspace)])?
            .finalize()?;
        Ok(Self { pack, plan, _numbers: numbers })
    }

    /// Enqueues the kernel.
    ///
    /// # Safety
    /// The handle and the stream are open, on the device that the plan was made for.
    #[expect(unsafe_code, reason = "calls the library")]
    pub unsafe fn launch(&self, handle: sys::cudnnHandle_t, stream: CUstream) -> Result<(), Failure> {
        // SAFETY: plan and pack are finalised and belong together; the addresses live as long as the
        // device, the numbers as long as `self`; the rest is the caller's promise.
        unsafe {
            check(sys::cudnnSetStream(handle, stream.cast()), "stream")?;
            check(sys::cudnnBackendExecute(handle, self.plan.plan.raw(), self.pack.raw()), "launch")
        }
    }
}
