//! CubeCL as a compiler: from `#[cube]` functions to CUDA C++, with no device present.
//!
//! Element types and vector widths are not Rust types but are registered in a definition's scope
//! ([`Elem`], [`Lanes`]), so each `#[cube]` function is compiled by rustc once, whatever it runs
//! on. A [`Kernel`] is lazy: what two instructions share (the same [`Kernel::key`]) is compiled
//! once.
//!
//! A compiled kernel's arguments are, in CubeCL's convention, its buffers in order and then one
//! structure by value: the scalars, grouped by type, and two lengths per buffer, which unchecked
//! kernels do not read.

use cubecl::ir::{ElemType, FloatKind, IntKind, StorageType, UIntKind};
use cubecl::prelude::*;
use shardc_ir::DType;
use std::fmt;
use std::sync::Arc;

/// The marker of a kernel's `I`th element type.
pub struct Slot<const I: usize>;

/// The element type of a kernel that is registered at position `I`.
pub type Elem<const I: usize> = DynamicScalar<Slot<I>>;

/// The number of elements of a kernel's vectors.
pub type Lanes = DynamicSize<Slot<0>>;

/// A vector of a registered element type: 16 bytes where the sizes allow it.
pub type Pack<const I: usize> = Vector<Elem<I>, Lanes>;

/// A vector of as many f32.
pub type PackF32 = Vector<f32, Lanes>;

/// A vector of as many u32.
pub type PackU32 = Vector<u32, Lanes>;

/// CubeCL's name of an element type. A bool is a byte in memory.
pub fn storage(dtype: DType) -> StorageType {
    let elem = match dtype {
        DType::F32 => ElemType::Float(FloatKind::F32),
        DType::Bf16 => ElemType::Float(FloatKind::BF16),
        DType::F16 => ElemType::Float(FloatKind::F16),
        DType::F8e4m3 => ElemType::Float(FloatKind::E4M3),
        DType::F8e5m2 => ElemType::Float(FloatKind::E5M2),
        DType::I64 => ElemType::Int(IntKind::I64),
        DType::I32 => ElemType::Int(IntKind::I32),
        DType::Bool | DType::U8 => ElemType::UInt(UIntKind::U8),
    };
    elem.into()
}

/// Collects the arguments of a kernel while it is defined.
pub struct Definition {
    builder: KernelBuilder,
}

impl Definition {
    fn new(types: &[StorageType], lanes: usize) -> Self {
        let mut builder = KernelBuilder::default();
        builder.runtime_properties(cubecl::ir::TargetProperties { mma: Default::default() });
        AddressType::U32.register(&mut builder.scope);
        let scope = &mut builder.scope;
        scope.register_size::<Lanes>(lanes);
        let of = |index: usize| types.get(index).copied().unwrap_or(ElemType::Float(FloatKind::F32).into());
        scope.register_type::<Elem<0>>(of(0));
        scope.register_type::<Elem<1>>(of(1));
        scope.register_type::<Elem<2>>(of(2));
        scope.register_type::<Elem<3>>(of(3));
        Self { builder }
    }

    /// The scope into which the body is expanded.
    pub fn scope(&mut self) -> &mut Scope {
        &mut self.builder.scope
    }

    /// The next buffer, which the kernel only reads.
    pub fn input<T: CubePrimitive>(&mut self) -> NativeExpand<Array<T>> {
        let ty = T::as_type(&self.builder.scope);
        self.builder.input_array(ty).into()
    }

    /// The next buffer, which the kernel writes (and may read).
    pub fn output<T: CubePrimitive>(&mut self) -> NativeExpand<Array<T>> {
        let ty = T::as_type(&self.builder.scope);
        self.builder.output_array(ty).into()
    }

    /// The next scalar argument, an unsigned number.
    pub fn number(&mut self) -> NativeExpand<u32> {
        self.builder.scalar(ElemType::UInt(UIntKind::U32).into()).into()
    }

    /// So many unsigned numbers, the next scalar arguments.
    pub fn numbers(&mut self, count: usize) -> SequenceExpand<u32> {
        let mut all = Sequence::<u32>::__expand_new(&mut self.builder.scope);
        for _ in 0..count {
            let number = self.number();
            all.__expand_push_method(&mut self.builder.scope, number);
        }
        all
    }

    /// The next scalar argument, an f32.
    pub fn real(&mut self) -> NativeExpand<f32> {
        self.builder.scalar(ElemType::Float(FloatKind::F32).into()).into()
    }
}

type Body = Box<dyn Fn(&mut Definition) + Send + Sync>;

/// A kernel that is not yet compiled.
pub struct Kernel {
    /// The name of the `#[cube]` function.
    pub name: &'static str,
    /// What tells it from every other kernel.
    pub key: String,
    /// Threads per block: a multiple of 32, but where a tile is smaller.
    pub threads: u32,
    types: Vec<StorageType>,
    lanes: usize,
    /// Blocks that are to share a multiprocessor, if the compiler of kernels is to leave registers for them.
    blocks: Option<u32>,
    body: Body,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)
    }
}

/// A kernel in CUDA C++.
#[derive(Clone, Debug)]
pub struct Source {
    /// The text; its entry point has the kernel's name.
    pub text: String,
    /// Bytes of shared memory per block.
    pub shared_bytes: u32,
    /// Where in the last argument the unsigned scalars begin.
    pub numbers_at: usize,
    /// Where in the last argument the f32 scalars begin.
    pub reals_at: usize,
    /// The bytes of the last argument.
    pub info_bytes: usize,
}

impl Kernel {
    /// A kernel of this name; `parameters` are the compile-time constants that `body` passes on.
    pub fn new(
        name: &'static str,
        types: &[DType],
        lanes: usize,
        threads: u32,
        parameters: &dyn fmt::Debug,
        body: impl Fn(&mut Definition) + Send + Sync + 'static,
    ) -> Self {
        let key = format!("{name} {types:?} x{lanes} t{threads} {parameters:?}");
        let types = types.iter().map(|dtype| storage(*dtype)).collect();
        Self { name, key, threads, types, lanes, blocks: None, body: Box::new(body) }
    }

    /// The kernel with no more registers than leave room for so many blocks on a multiprocessor.
    pub fn sharing(self, blocks: u32) -> Self {
        Self { key: format!("{} b{blocks}", self.key), blocks: Some(blocks), ..self }
    }

    /// CubeCL's definition of the kernel.
    pub fn definition(&self) -> KernelDefinition {
        let mut definition = Definition::new(&self.types, self.lanes);
        (self.body)(&mut definition);
        let settings = KernelSettings::default().cube_dim(CubeDim::new_1d(self.threads)).kernel_name(self.name);
        definition.builder.build(settings)
    }

    /// The kernel in CUDA C++. The error is the compiler's own text.
    pub fn source(&self) -> Result<Source, String> {
        use cubecl::Compiler;
        let mut options = <cubecl::cuda::CudaCompiler as Compiler>::CompilationOptions::default();
        options.supports_features.grid_constants = true;
        options.supports_features.fast_math = true;
        let address = AddressType::U32.unsigned_type();
        let compiled = cubecl::cuda::CudaCompiler::default()
            .compile(self.definition(), &options, ExecutionMode::Unchecked, address)
            .map_err(|error| format!("{error:?}"))?;
        let at = |wanted: StorageType| {
            let field = compiled.info.scalars.iter().find(|field| field.ty == wanted);
            field.map_or(0, |field| field.offset)
        };
        // CubeCL states the threads of a block and leaves the blocks of a multiprocessor open.
        let bounds = |blocks: Option<u32>| {
            let blocks = blocks.map_or(String::new(), |blocks| format!(", {blocks}"));
            format!("__launch_bounds__({}{blocks})", self.threads)
        };
        Ok(Source {
            text: compiled.to_string().replacen(&bounds(None), &bounds(self.blocks), 1),
            shared_bytes: compiled.shared_memory_size() as u32,
            numbers_at: at(ElemType::UInt(UIntKind::U32).into()),
            reals_at: at(ElemType::Float(FloatKind::F32).into()),
            info_bytes: compiled.info.dynamic_meta_offset,
        })
    }
}

/// What a launch passes for one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// An operand of the instruction, from this byte on.
    Operand(usize, u64),
    /// A result of the instruction, from this byte on.
    Result(usize, u64),
    /// The instruction's scratch memory, from this byte on.
    Scratch(u64),
}

impl Arg {
    /// The place `bytes` further on.
    pub fn offset(self, bytes: u64) -> Self {
        match self {
            Self::Operand(index, at) => Self::Operand(index, at + bytes),
            Self::Result(index, at) => Self::Result(index, at + bytes),
            Self::Scratch(at) => Self::Scratch(at + bytes),
        }
    }
}

/// One launch of a kernel.
#[derive(Debug)]
pub struct Launch {
    /// The kernel, which launches over parts of one tensor share.
    pub kernel: Arc<Kernel>,
    /// Its buffers, in order.
    pub buffers: Vec<Arg>,
    /// Its unsigned scalars, in order.
    pub numbers: Vec<u32>,
    /// Its f32 scalars, in order.
    pub reals: Vec<f32>,
    /// The number of blocks per grid dimension.
    pub grid: [u32; 3],
}
