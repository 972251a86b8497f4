//! Compiled graphs, and their launches.

use super::descriptor::{Address, Descriptor, Kind, Name, check};
use super::engine::{self, Configuration};
use super::graph::{Graph, Source};
use crate::cuda::device::Failure;
use cudarc::cudnn::sys;
use cudarc::driver::sys::CUstream;
use std::rc::Rc;
use sys::cudnnBackendHeurMode_t as Mode;

/// A graph compiled by an engine.
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
    /// Compiles a graph by the first engine of the library's choice that may be taken; takes from some milliseconds to
    /// seconds. The error is why no engine takes it.
    pub fn new(handle: sys::cudnnHandle_t, graph: Graph, wanted: Wanted) -> Result<Self, Failure> {
        let operations = graph.operations(handle)?;
        let mut reason = "cuDNN has no engine for it".to_string();
        for configuration in engine::proposed(&operations, Mode::CUDNN_HEUR_MODE_A)? {
            if wanted.repeatable && !engine::is_repeatable(&configuration)? {
                reason = "its engines for it add in any order".to_string();
                continue;
            }
            match compile(&configuration, wanted) {
                Ok(plan) => return Ok(Self { plan, _operations: operations, graph }),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    /// Compiles a graph by an engine. The error is why that does not take it.
    pub fn by(
        handle: sys::cudnnHandle_t,
        graph: Graph,
        configuration: &Configuration,
        wanted: Wanted,
    ) -> Result<Self, Failure> {
        let operations = graph.operations(handle)?;
        let plan = compile(&configuration.descriptor(&operations)?, wanted)?;
        Ok(Self { plan, _operations: operations, graph })
    }
}

/// At most `count` engines for a graph that may be taken if they compile, each once: in the order of the library's choice,
/// then those that it falls back on.
pub fn candidates(
    handle: sys::cudnnHandle_t,
    graph: &Graph,
    wanted: Wanted,
    count: usize,
) -> Result<Vec<Configuration>, Failure> {
    let operations = graph.operations(handle)?;
    let mut all = engine::proposed(&operations, Mode::CUDNN_HEUR_MODE_A)?;
    // Without them there are fewer.
    all.extend(engine::proposed(&operations, Mode::CUDNN_HEUR_MODE_FALLBACK).unwrap_or_default());
    let mut candidates = Vec::new();
    for configuration in &all {
        if candidates.len() == count {
            break;
        }
        if wanted.repeatable && !engine::is_repeatable(configuration)? {
            continue;
        }
        let configuration = Configuration::of(configuration)?;
        if !candidates.contains(&configuration) {
            candidates.push(configuration);
        }
    }
    Ok(candidates)
}

/// Compiles an engine for the graph of its configuration.
fn compile(configuration: &Descriptor, wanted: Wanted) -> Result<Descriptor, Failure> {
    let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
        .with_parts(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[configuration])?
        .finalize()?;
    let workspace = plan.number(Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?.max(0) as u64;
    let granted = wanted.workspace;
    match workspace <= granted {
        true => Ok(plan),
        false => Err(format!("its engine takes {workspace} bytes of workspace, and {granted} were planned")),
    }
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
