//! Instruction selection: which kernels and matrix products run an operation.
//!
//! The choice depends on types only, so it is made once, when a program is loaded, and needs no
//! device. An operation becomes a list of [`Step`]s that run one after the other on one stream;
//! what they need in between lies in scratch memory, whose size is known here ([`Selection`]).

mod attention;
mod channels;
mod cut;
mod elementwise;
mod many;
mod matmul;
mod movement;
mod packed;
mod parts;
mod pictures;
mod products;
mod quantize;
mod random;
mod ranked;
mod region;
mod rows;

pub use matmul::{Gemm, Matrix};
pub use parts::sum_parts;
pub use products::batch;

use super::cudnn;
use super::kernel::{Arg, Kernel, Launch};
use super::table::Table;
use shardc_ir::ops::Op;
use shardc_ir::program::Action;
use shardc_ir::{DType, TensorType};
use std::sync::Arc;

/// Whether there is one kernel, or one launch of the library, for a region on these types.
pub fn fuses(region: &shardc_ir::ops::Fused, operands: &[TensorType]) -> bool {
    products::joins(region, operands) || region::fuses(region, operands)
}

/// Whether an operation has a kernel on tensors of these element types and ranks, however large.
pub fn has_kernel(op: &Op, operands: &[TensorType], results: &[TensorType]) -> bool {
    Select::new(operands, results, u64::MAX).op(op).is_ok()
}

/// One thing the device does.
#[derive(Debug)]
pub enum Step {
    /// Launches a kernel.
    Launch(Box<Launch>),
    /// Launches a kernel over many small tensors.
    Table(Box<Table>),
    /// Sets bytes to zero.
    Zero {
        /// The first byte.
        to: Arg,
        /// How many.
        bytes: u64,
    },
    /// Copies bytes on the device.
    Copy {
        /// The first byte read.
        from: Arg,
        /// The first byte written.
        to: Arg,
        /// How many.
        bytes: u64,
    },
    /// Writes bytes that are known when the program is loaded.
    Upload {
        /// The first byte.
        to: Arg,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A matrix product.
    Gemm(Box<Gemm>),
    /// Matrix products of equal sizes beside each other: one launch where they lie at even distances.
    Products(Vec<Gemm>),
    /// A collective of the instruction's kind and group on one tensor: what is sent, what comes.
    Meet {
        /// The first byte that is sent.
        from: Arg,
        /// The first byte that comes.
        to: Arg,
        /// How many elements are sent, and how many come.
        elements: [u64; 2],
        /// Their type.
        dtype: DType,
    },
    /// A kernel of cuDNN.
    Engine(Box<Engine>),
    /// Steps with kernels of cuDNN, if the library takes all of them.
    Fused(Box<Fused>),
}

/// A kernel of cuDNN.
#[derive(Debug)]
pub struct Engine {
    /// Which.
    pub kernel: cudnn::Kernel,
    /// The buffers, in the order that its graph states.
    pub buffers: Vec<Arg>,
    /// The engine's own scratch memory.
    pub workspace: Arg,
}

/// Steps with kernels of cuDNN, and what is done where the library is missing or refuses one.
#[derive(Debug)]
pub struct Fused {
    /// The steps.
    pub steps: Vec<Step>,
    /// The same without the library.
    pub otherwise: Vec<Step>,
}

impl Fused {
    /// The kernels of cuDNN.
    pub fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.steps.iter().filter_map(|step| match step {
            Step::Engine(engine) => Some(engine.as_ref()),
            _ => None,
        })
    }
}

/// An operation for which there is no kernel on these types.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no CUDA kernel for `{op}` on {operands}: {reason}")]
pub struct Unsupported {
    /// The operation's name.
    pub op: String,
    /// The operands' types.
    pub operands: String,
    /// What is missing.
    pub reason: String,
}

/// The steps of one operation, and the scratch memory that they use.
#[derive(Debug, Default)]
pub struct Selection {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// How many of the last are those of the first microbatch, which does nothing of what comes before them; the others
    /// do that alone.
    pub first: usize,
    /// Bytes of scratch memory, workspaces included.
    pub scratch: u64,
    /// Where in the scratch memory matrix products have their workspace, and its bytes.
    pub workspace: (u64, u64),
}

/// Chooses the steps of an action on local types; `None` for those that need no kernel.
///
/// # Errors
/// An operation without kernels for these types.
pub fn select_action(
    action: &Action,
    operands: &[TensorType],
    results: &[TensorType],
) -> Result<Option<Selection>, Unsupported> {
    match action {
        Action::Compute(op) => select(op, operands, results).map(Some),
        Action::Accumulate => Ok(Some(select_accumulate(&operands[0], &results[0]))),
        _ => Ok(packed::select_packed(action, operands, results)),
    }
}

/// The kernels of steps, but for what stands in place of fused ones.
pub fn kernels(steps: &[Step]) -> impl Iterator<Item = &Arc<Kernel>> {
    fn each(step: &Step) -> &[Step] {
        match step {
            Step::Fused(fused) => &fused.steps,
            other => std::slice::from_ref(other),
        }
    }
    steps.iter().flat_map(each).filter_map(|step| match step {
        Step::Launch(launch) => Some(&launch.kernel),
        Step::Table(table) => Some(&table.kernel),
        _ => None,
    })
}

/// Chooses the steps of an operation on local types.
pub fn select(op: &Op, operands: &[TensorType], results: &[TensorType]) -> Result<Selection, Unsupported> {
    select_within(op, operands, results, cut::LIMIT)
}

/// [`select`], where no launch may work on more than `limit` bytes of a buffer that it divides.
pub fn select_within(
    op: &Op,
    operands: &[TensorType],
    results: &[TensorType],
    limit: u64,
) -> Result<Selection, Unsupported> {
    let mut select = Select::new(operands, results, limit);
    let done = select.op(op).and_then(|()| select.too_large.take().map_or(Ok(()), Err));
    done.map_err(|reason| Unsupported {
        op: op.name().to_string(),
        operands: operands.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        reason,
    })?;
    let (_, bytes) = select.out.workspace;
    if let Arg::Scratch(at) = select.scratch(bytes) {
        select.out.workspace.0 = at;
    }
    Ok(select.out)
}

/// `result += operand`, the accumulation over microbatches, followed by what the first does instead: a copy, or where
/// the element types differ a conversion.
pub fn select_accumulate(operand: &TensorType, result: &TensorType) -> Selection {
    let (operands, results) = ([operand.clone()], [result.clone()]);
    let mut select = Select::new(&operands, &results, cut::LIMIT);
    select.accumulate();
    let later = select.out.steps.len();
    if operand.dtype == result.dtype {
        select.out.steps.push(Step::Copy { from: OP(0), to: RES(0), bytes: result.bytes().0 });
    } else {
        select.cast_elements(OP(0), RES(0), operand.dtype, result.dtype, result.elements());
    }
    select.out.first = select.out.steps.len() - later;
    select.out
}

/// Looks for elements of a float tensor that are not finite. Result 0 is two words, of which the first
/// becomes 1 if there is an infinity, and the second if there is a NaN.
pub fn select_scan(ty: &TensorType) -> Selection {
    let (operands, results) = ([ty.clone()], [TensorType::new(DType::I32, [2])]);
    let mut select = Select::new(&operands, &results, cut::LIMIT);
    select.scan();
    select.out
}

/// The state of one selection. `Err` is the reason why there is none.
struct Select<'a> {
    operands: &'a [TensorType],
    results: &'a [TensorType],
    /// See [`cut`].
    limit: u64,
    /// A tensor that a kernel would see whole and cannot.
    too_large: Option<String>,
    out: Selection,
}

const OP: fn(usize) -> Arg = |index| Arg::Operand(index, 0);
const RES: fn(usize) -> Arg = |index| Arg::Result(index, 0);

impl<'a> Select<'a> {
    fn new(operands: &'a [TensorType], results: &'a [TensorType], limit: u64) -> Self {
        Self { operands, results, limit, too_large: None, out: Selection::default() }
    }

    fn op(&mut self, op: &Op) -> Result<(), String> {
        if self.results.iter().all(|ty| ty.elements() == 0) {
            return Ok(());
        }
        if !matches!(op, Op::Concat(_) | Op::Pad(_)) && self.operands.iter().any(|ty| ty.elements() == 0) {
            return Err("an operand without elements".to_string());
        }
        match op {
            Op::Input(_) | Op::Parameter(_) | Op::State(_) => Err("a leaf is not an instruction".to_string()),
            Op::Constant(op) => self.constant(op.value),
            Op::Literal(op) => self.literal(&op.values),
            Op::Iota(op) => self.iota(op),
            Op::Random(op) => self.random(op),
            Op::Unary(op) => self.unary(op.kind),
            Op::UnaryGrad(op) => self.unary_grad(op.kind),
            Op::Affine(op) => self.affine(op.scale, op.offset),
            Op::Binary(op) => self.binary(super::kernels::elementwise::Pair::Binary(op.kind)),
            Op::Compare(op) => self.binary(super::kernels::elementwise::Pair::Compare(op.kind)),
            Op::Select(_) => self.choose(),
            Op::Cast(_) => self.cast(OP(0), RES(0), self.operands[0].dtype, self.results[0].dtype),
            Op::Reshape(_) => self.copy_whole(),
            Op::Transpose(op) => self.transpose(&op.permutation),
            Op::Broadcast(op) => self.broadcast(&op.dims),
            Op::Slice(op) => self.slice(&op.start),
            Op::Pad(op) => self.pad(op),
            Op::Concat(op) => self.concat(op.dim),
            Op::Reduce(op) => self.reduce(op),
            Op::SumSquares(_) => self.sum_squares(),
            Op::Matmul(op) => self.matmul(op),
            Op::QuantizationScale(op) => self.quantization_scale(op),
            Op::Quantize(_) => self.quantize(),
            Op::ScaledMatmul(op) => self.scaled_matmul(op),
            Op::Embedding(op) => self.embedding(op.start),
            Op::EmbeddingGrad(op) => self.embedding_grad(op.start),
            Op::Gather(op) => self.gather(op.dim),
            Op::ScatterAdd(op) => self.scatter_add(op.dim),
            Op::TopK(op) => self.top_k(op),
            Op::Cumsum(op) => self.cumsum(op),
            Op::Softmax(_) => self.softmax(),
            Op::LayerNorm(_) | Op::LayerNormGrad(_) | Op::RmsNorm(_) | Op::RmsNormGrad(_) => self.single(op.clone()),
            Op::Rotary(op) => self.rotary(op.inverse),
            Op::Swiglu(_) => self.swiglu(),
            Op::SwigluGrad(_) => self.swiglu_grad(),
            Op::Attention(op) => self.attention(op),
            Op::AttentionGrad(op) => self.attention_grad(op),
            Op::CrossEntropy(op) => self.cross_entropy(op),
            Op::CrossEntropyGrad(op) => self.cross_entropy_grad(op),
            Op::Total(_) => self.total(),
            Op::Adamw(op) => self.adamw(op),
            Op::Each(each) => self.each(each),
            Op::Fused(op) if op.is_products() => self.products(op),
            Op::Fused(op) => self.region(op),
            Op::Convolution(op) => self.convolution(op),
            Op::ConvolutionTranspose(op) => self.convolution_transpose(op),
            Op::ConvolutionFilterGrad(op) => self.convolution_filter_grad(op),
            Op::MaxPool(op) => self.max_pool(op),
            Op::MaxPoolGrad(op) => self.max_pool_grad(op),
        }
    }

    /// Scratch memory that stays valid until the operation ends.
    fn scratch(&mut self, bytes: u64) -> Arg {
        let at = self.out.scratch;
        self.out.scratch += bytes.next_multiple_of(256);
        Arg::Scratch(at)
    }

    fn gemm(&mut self, gemm: Gemm) {
        let (_, bytes) = &mut self.out.workspace;
        *bytes = gemm.workspace().max(*bytes);
        self.out.steps.push(Step::Gemm(Box::new(gemm)));
    }

    /// Launches a kernel that sees all of its buffers.
    fn launch(&mut self, kernel: Kernel, buffers: Vec<Arg>, numbers: Vec<u32>, reals: Vec<f32>, grid: [u32; 3]) {
        buffers.iter().for_each(|arg| self.expect_small(*arg, 0));
        self.push(Launch { kernel: Arc::new(kernel), buffers, numbers, reals, grid });
    }

    fn push(&mut self, launch: Launch) {
        self.out.steps.push(Step::Launch(Box::new(launch)));
    }

    /// Notes a tensor of which one launch would see too much: so many bytes, or, if these are 0, the whole. Scratch memory is
    /// bounded where it is asked for.
    fn expect_small(&mut self, arg: Arg, bytes: u64) {
        let ty = match arg {
            Arg::Operand(index, _) => &self.operands[index],
            Arg::Result(index, _) => &self.results[index],
            Arg::Scratch(_) => return,
        };
        let (what, elements) = match bytes {
            0 => ("all", ty.elements()),
            bytes => ("a part", bytes / ty.dtype.size()),
        };
        if elements >= 1 << 32 {
            self.too_large = Some(format!("a kernel cannot see {what} of {ty}, which has 2^32 elements or more"));
        }
    }
}

/// Threads per block of elementwise kernels.
const THREADS: u32 = 256;

/// The widest vector of at most 16 bytes per element type that divides all sizes.
fn lanes(types: &[DType], sizes: &[u64]) -> usize {
    let widest = types.iter().map(|dtype| dtype.size()).max().unwrap_or(4);
    let mut lanes = 16 / widest;
    while lanes > 1 && sizes.iter().any(|size| size % lanes != 0) {
        lanes /= 2;
    }
    lanes as usize
}

/// Threads for a block that strides over a row of this many vectors.
fn row_threads(vectors: u64) -> u32 {
    (vectors.next_power_of_two() as u32).clamp(32, 512)
}

/// The strides of a dense row-major tensor.
fn dense(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for dim in (0..shape.len().saturating_sub(1)).rev() {
        strides[dim] = strides[dim + 1] * shape[dim + 1];
    }
    strides
}

/// The type in which a kernel computes: f32 for floats, the type itself for integers.
fn compute_type(dtype: DType) -> DType {
    match dtype {
        DType::I64 | DType::I32 => dtype,
        DType::Bool => DType::I32,
        _ => DType::F32,
    }
}
