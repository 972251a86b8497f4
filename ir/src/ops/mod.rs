//! The operations. One file per operation (or per family of elementwise operations): its meaning, shape rule, factor
//! rule, FLOPs, bytes and derivative.
//!
//! To add one: write its file, add it to the list of operations in this one, give it a kernel in each runtime
//! (`runtime/src/cpu/kernels/mod.rs`, `runtime/src/cuda/select/mod.rs`) and golden cases (`tests/golden/graph/`). A few
//! others ask by name which operation it is. They have an answer for all that they do not name, which may be the wrong
//! one:
//!
//! * whether it is a product (`passes/src/cost/node.rs`), and what share of the memory bandwidth its kernel reaches
//!   (`passes/src/cost/library.rs`);
//! * whether it only rearranges a parameter (`is_weight` in [`gradient`], and in `passes/src` `shard/prepare.rs`,
//!   `search/estimate/copies.rs`, `quantize.rs`);
//! * whether it is a step of a region on GPUs (`runtime/src/cuda/select/region.rs` and `kernels/region.rs`).
//!
//! Every operation is deterministic and pure. Sizes in attributes are global in a graph and local in a program;
//! [`OpDef::localize`] turns one into the other.

mod adamw;
mod attention;
mod binary;
mod broadcast;
mod cast;
mod concat;
mod constant;
mod convolution;
mod cross_entropy;
mod cumsum;
mod each;
mod embedding;
mod fused;
mod gather;
mod gradient;
mod layer_norm;
mod leaf;
mod matmul;
mod max_pool;
mod number;
mod pad;
mod quantize;
mod random;
mod reduce;
mod reshape;
mod rms_norm;
mod rotary;
mod scaled_matmul;
mod select;
mod slice;
mod softmax;
mod sum_squares;
mod swiglu;
mod top_k;
mod total;
mod transpose;
mod unary;
mod update;
mod window;

pub use adamw::Adamw;
pub use attention::{Attention, AttentionGrad, Mask};
pub use binary::{Binary, BinaryKind, Compare, CompareKind};
pub use broadcast::Broadcast;
pub use cast::Cast;
pub use concat::Concat;
pub use constant::{Constant, Iota, Literal};
pub use convolution::{Convolution, ConvolutionFilterGrad, ConvolutionTranspose};
pub use cross_entropy::{CrossEntropy, CrossEntropyGrad, live_columns};
pub use cumsum::Cumsum;
pub use each::Each;
pub use embedding::{Embedding, EmbeddingGrad};
pub use fused::{Fused, FusedStep};
pub use gather::{Gather, ScatterAdd};
pub use gradient::{Gradient, GradientError};
pub use layer_norm::{LayerNorm, LayerNormGrad};
pub use leaf::{Input, Parameter, SAMPLE, STEP, State};
pub use matmul::{Epilogue, Matmul, MatmulDims};
pub use max_pool::{MaxPool, MaxPoolGrad};
pub use pad::Pad;
pub use quantize::{QuantizationScale, Quantize, scale_of};
pub use random::{Distribution, Random};
pub use reduce::{Reduce, ReduceOp};
pub use reshape::Reshape;
pub use rms_norm::{RmsNorm, RmsNormGrad};
pub use rotary::Rotary;
pub use scaled_matmul::ScaledMatmul;
pub use select::Select;
pub use slice::Slice;
pub use softmax::Softmax;
pub use sum_squares::SumSquares;
pub use swiglu::{Swiglu, SwigluGrad};
pub use top_k::TopK;
pub use total::Total;
pub use transpose::Transpose;
pub use unary::{Affine, Unary, UnaryGrad, UnaryKind};
pub use update::Update;
pub use window::Window;

use crate::factor::{Dims, FactorRule};
use crate::types::{DType, LARGEST, TensorType};
use crate::units::{Bytes, Flops};
use serde::{Deserialize, Serialize};

/// An operation that cannot be applied as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {message}")]
pub struct OpError {
    /// The operation's name in the text form.
    pub op: String,
    /// What is wrong, and what would be right.
    pub message: String,
}

impl OpError {
    /// An error of this operation.
    pub fn new(op: &Op, message: impl Into<String>) -> Self {
        Self { op: op.name().to_string(), message: message.into() }
    }
}

/// The part of an operand or a result that one coordinate of the mesh holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The global shape.
    pub shape: Vec<u64>,
    /// Per dimension, the first index and the length held here.
    pub slice: Vec<(u64, u64)>,
}

/// What every operation defines.
pub trait OpDef {
    /// The types of the results. `declared` holds the result types where the text or the builder
    /// gives them: operations whose result the operands do not determine take them from there.
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String>;

    /// The operation in index notation, for these types. Called only on types that
    /// [`infer`](Self::infer) accepted.
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule;

    /// Arithmetic operations; by default one per result element.
    fn flops(&self, _operands: &[TensorType], results: &[TensorType]) -> Flops {
        Flops(results.iter().map(|ty| ty.elements() as f64).sum())
    }

    /// Bytes that must move through memory: by default each operand read once, each result
    /// written once.
    fn bytes(&self, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        operands.iter().chain(results).map(TensorType::bytes).sum()
    }

    /// Adds the nodes of the derivative; see [`Gradient`].
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        Err(gradient.not_differentiable())
    }

    /// The operation as one coordinate runs it, where an index has a meaning beyond its tensor
    /// (a vocabulary entry, a random counter); `None` where it does not.
    fn localize(&self, _operands: &[Part], _results: &[Part]) -> Option<Op> {
        None
    }

    /// Whether the operation is a leaf.
    fn is_leaf(&self) -> bool {
        false
    }

    /// Whether it may take a summand as operand 2, a value like its result that this is added to.
    fn may_add(&self) -> bool {
        false
    }

    /// Whether an operation of so many operands says itself where along a dimension of its first result a part begins.
    fn counts(&self, _dim: usize, _operands: usize) -> bool {
        false
    }

    /// Which operand is that summand, of so many.
    fn addend(&self, operands: usize) -> Option<usize> {
        (self.may_add() && operands > 2).then_some(2)
    }

    /// Whether a result of the same shape and size may be written over this operand, of so many: no element of
    /// the operand is read after the result's element in its place is written, of a rotation neither of a pair after one
    /// of the pair is. By default the summand.
    fn may_overwrite(&self, operand: usize, operands: usize) -> bool {
        self.addend(operands) == Some(operand)
    }

    /// Whether one launch may do it to many tensors, each by itself ([`Each`]): it is the same on every part of them.
    fn may_repeat(&self) -> bool {
        false
    }

    /// Of an optimizer's update, what it reads and makes.
    fn update(&self) -> Option<Update> {
        None
    }

    /// Of an optimizer's update, the same one that makes the new parameter in this element type as well, or in no other.
    fn casting(&self, _cast: Option<DType>) -> Option<Op> {
        None
    }

    /// In which element type it computes a first result of this type where a model is trained in 16 bits.
    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Follow
    }

    /// Whether its result or its gradient jumps where a number passes another: a ReLU, a maximum, a choice, rounding.
    fn has_kink(&self, _operands: &[TensorType]) -> bool {
        false
    }
}

/// In which element type an operation computes where a model is trained in 16 bits (mixed precision).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// In 16 bits, whatever its operands come in.
    Narrow,
    /// In f32, whatever its operands come in.
    Wide,
    /// In the widest element type of the operands that parameters reach.
    Follow,
    /// Operands as for `Follow`, the result in f32: the sum is rounded once.
    Sum,
    /// Each operand as it comes; the results by their own rule.
    AsIs,
}

macro_rules! ops {
    ($($(#[$doc:meta])* $name:literal $variant:ident,)*) => {
        /// One operation with its attributes.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub enum Op {
            $($(#[$doc])* #[serde(rename = $name)] $variant($variant),)*
        }

        impl Op {
            /// The names of the operations that are not of an elementwise family.
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            fn def(&self) -> &dyn OpDef {
                match self { $(Op::$variant(op) => op,)* }
            }

            fn variant_name(&self) -> &'static str {
                match self { $(Op::$variant(_) => $name,)* }
            }

            fn attributes_value(&self) -> Result<serde_json::Value, serde_json::Error> {
                match self { $(Op::$variant(op) => serde_json::to_value(op),)* }
            }

            fn from_variant(name: &str, attributes: serde_json::Value) -> Option<Result<Self, serde_json::Error>> {
                match name {
                    $($name => Some(serde_json::from_value::<$variant>(attributes).map(Op::$variant)),)*
                    _ => None,
                }
            }
        }

        $(impl From<$variant> for Op {
            fn from(op: $variant) -> Self {
                Op::$variant(op)
            }
        })*
    };
}

ops! {
    /// A batch tensor, or a scalar that changes from step to step.
    "input" Input,
    /// A trained (or frozen) tensor of the model.
    "parameter" Parameter,
    /// A tensor of the optimizer.
    "state" State,
    /// One number everywhere.
    "constant" Constant,
    /// Given numbers.
    "literal" Literal,
    /// The index along a dimension.
    "iota" Iota,
    /// Counter-based random numbers.
    "random" Random,
    /// An elementwise function of one operand.
    "unary" Unary,
    /// The derivative of an elementwise function, times the cotangent.
    "unary_grad" UnaryGrad,
    /// `scale * x + offset`.
    "affine" Affine,
    /// An elementwise function of two operands.
    "binary" Binary,
    /// An elementwise comparison.
    "compare" Compare,
    /// One operand or another, by a mask.
    "select" Select,
    /// Another element type.
    "cast" Cast,
    /// The same elements in another shape.
    "reshape" Reshape,
    /// The dimensions in another order.
    "transpose" Transpose,
    /// More dimensions, or copies along them.
    "broadcast" Broadcast,
    /// A contiguous part.
    "slice" Slice,
    /// More elements at the borders.
    "pad" Pad,
    /// Operands one after the other.
    "concat" Concat,
    /// A reduction over dimensions.
    "reduce" Reduce,
    /// A tensor contraction.
    "matmul" Matmul,
    /// The scales of a tensor in 8-bit floats.
    "quantization_scale" QuantizationScale,
    /// A tensor in 8-bit floats.
    "quantize" Quantize,
    /// A tensor contraction of 8-bit floats.
    "scaled_matmul" ScaledMatmul,
    /// A convolution of pictures.
    "convolution" Convolution,
    /// Its transpose, which is the gradient of its pictures.
    "convolution_transpose" ConvolutionTranspose,
    /// The gradient of its filters.
    "convolution_filter_grad" ConvolutionFilterGrad,
    /// The maximum of every window of a picture.
    "max_pool" MaxPool,
    /// Its derivative.
    "max_pool_grad" MaxPoolGrad,
    /// Rows of a table.
    "embedding" Embedding,
    /// The gradient of a table.
    "embedding_grad" EmbeddingGrad,
    /// Elements by index along a dimension.
    "gather" Gather,
    /// The transpose of a gather.
    "scatter_add" ScatterAdd,
    /// The largest elements of every row.
    "top_k" TopK,
    /// Running sums.
    "cumsum" Cumsum,
    /// Softmax over the last dimension.
    "softmax" Softmax,
    /// Layer normalization over the last dimension.
    "layer_norm" LayerNorm,
    /// Its derivative.
    "layer_norm_grad" LayerNormGrad,
    /// Root-mean-square normalization over the last dimension.
    "rms_norm" RmsNorm,
    /// Its derivative.
    "rms_norm_grad" RmsNormGrad,
    /// Rotary position embedding.
    "rotary" Rotary,
    /// `silu(gate) * up`.
    "swiglu" Swiglu,
    /// Its derivative.
    "swiglu_grad" SwigluGrad,
    /// Scaled dot-product attention.
    "attention" Attention,
    /// Its derivative.
    "attention_grad" AttentionGrad,
    /// The two halves of the cross-entropy of logits.
    "cross_entropy" CrossEntropy,
    /// Their derivative.
    "cross_entropy_grad" CrossEntropyGrad,
    /// The sum of the squares of all elements.
    "sum_squares" SumSquares,
    /// The sum of any number of operands.
    "total" Total,
    /// One AdamW update.
    "adamw" Adamw,
    /// One operation on several tensors, each by itself.
    "each" Each,
    /// A region of operations as one kernel.
    "fused" Fused,
}

impl Op {
    /// What is done to one item: the operation itself, or of [`Each`] the one that is repeated.
    pub fn single(&self) -> &Op {
        match self {
            Op::Each(each) => &each.op,
            op => op,
        }
    }

    /// What the operation is called among instructions: of one that joins others, by those (`adamw of 46 tensors`,
    /// `3 matmuls`, `layer_norm_grad+add`).
    pub fn title(&self) -> String {
        match self {
            Op::Each(each) => format!("{} of {} tensors", each.op.name(), each.count),
            Op::Fused(region) if region.is_products() => format!("{} matmuls", region.steps.len()),
            Op::Fused(region) => region.steps_text(),
            op => op.name().to_string(),
        }
    }

    /// The name in the text form: the variant's, or the function's for elementwise families
    /// (`exp`, `add`, `lt`, `gelu_grad`).
    pub fn name(&self) -> &'static str {
        match self {
            Op::Unary(op) => op.kind.name(),
            Op::UnaryGrad(op) => op.kind.grad_name(),
            Op::Binary(op) => op.kind.name(),
            Op::Compare(op) => op.kind.name(),
            Op::Reduce(op) => op.kind.name(),
            _ => self.variant_name(),
        }
    }

    /// The attributes in the order of declaration, without those that the name already says.
    pub fn attributes(&self) -> Vec<(String, serde_json::Value)> {
        let value = self.attributes_value().unwrap_or_default();
        let serde_json::Value::Object(map) = value else { return Vec::new() };
        let named = !Self::NAMES.contains(&self.name());
        map.into_iter().filter(|(key, _)| !(named && key == "kind")).collect()
    }

    /// The operation of a name and its attributes.
    pub fn from_text(name: &str, mut attributes: serde_json::Map<String, serde_json::Value>) -> Result<Self, String> {
        let (variant, kind) = match name {
            _ if UnaryKind::from_name(name).is_some() => ("unary", Some(name)),
            _ if name.strip_suffix("_grad").and_then(UnaryKind::from_name).is_some() => {
                ("unary_grad", name.strip_suffix("_grad"))
            }
            _ if BinaryKind::from_name(name).is_some() => ("binary", Some(name)),
            _ if CompareKind::from_name(name).is_some() => ("compare", Some(name)),
            _ if ReduceOp::from_name(name).is_some() => ("reduce", Some(name)),
            _ => (name, None),
        };
        if let Some(kind) = kind {
            attributes.insert("kind".to_string(), kind.into());
        }
        match Self::from_variant(variant, serde_json::Value::Object(attributes)) {
            Some(op) => op.map_err(|error| format!("attributes of `{name}`: {error}")),
            None => Err(format!("unknown operation `{name}`")),
        }
    }
}

impl OpDef for Op {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let inferred = self.def().infer(operands, declared)?;
        inferred.iter().try_for_each(TensorType::expect_countable)?;
        Ok(inferred)
    }
    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        self.def().rule(operands, results)
    }
    fn flops(&self, operands: &[TensorType], results: &[TensorType]) -> Flops {
        self.def().flops(operands, results)
    }
    fn bytes(&self, operands: &[TensorType], results: &[TensorType]) -> Bytes {
        self.def().bytes(operands, results)
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        self.def().gradient(gradient)
    }
    fn localize(&self, operands: &[Part], results: &[Part]) -> Option<Op> {
        self.def().localize(operands, results)
    }
    fn is_leaf(&self) -> bool {
        self.def().is_leaf()
    }
    fn may_add(&self) -> bool {
        self.def().may_add()
    }
    fn addend(&self, operands: usize) -> Option<usize> {
        self.def().addend(operands)
    }
    fn counts(&self, dim: usize, operands: usize) -> bool {
        self.def().counts(dim, operands)
    }
    fn may_overwrite(&self, operand: usize, operands: usize) -> bool {
        self.def().may_overwrite(operand, operands)
    }
    fn may_repeat(&self) -> bool {
        self.def().may_repeat()
    }
    fn update(&self) -> Option<Update> {
        self.def().update()
    }
    fn casting(&self, cast: Option<DType>) -> Option<Op> {
        self.def().casting(cast)
    }
    fn arithmetic(&self, result: &TensorType) -> Arithmetic {
        self.def().arithmetic(result)
    }
    fn has_kink(&self, operands: &[TensorType]) -> bool {
        self.def().has_kink(operands)
    }
}

impl Op {
    /// [`OpDef::infer`] with the operation named in the error.
    pub fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpDef::infer(self, operands, declared).map_err(|message| OpError::new(self, message))
    }
}

// Helpers that the operations' files share.

fn arity(operands: &[TensorType], count: usize) -> Result<(), String> {
    if operands.len() == count {
        return Ok(());
    }
    Err(format!("takes {count} operands, not {}", operands.len()))
}

fn same_type(operands: &[TensorType]) -> Result<(), String> {
    match operands.windows(2).find(|pair| pair[0] != pair[1]) {
        Some(pair) => Err(format!("operands {} and {} differ", pair[0], pair[1])),
        None => Ok(()),
    }
}

fn expect_float(ty: &TensorType) -> Result<(), String> {
    if ty.dtype.is_float() { Ok(()) } else { Err(format!("takes floating-point operands, not {ty}")) }
}

/// Checks an index that a part of a tensor begins at: sums with sizes do not overflow.
fn expect_start(what: &str, index: u64) -> Result<(), String> {
    if index <= LARGEST { Ok(()) } else { Err(format!("{what} is {index}; it must be at most {LARGEST}")) }
}

fn expect_type(what: &str, actual: &TensorType, expected: &TensorType) -> Result<(), String> {
    if actual == expected { Ok(()) } else { Err(format!("{what} is {actual}; it must be {expected}")) }
}

fn expect_shape(what: &str, actual: &TensorType, expected: &[u64]) -> Result<(), String> {
    if actual.shape == expected {
        return Ok(());
    }
    let expected = actual.with_shape(expected);
    Err(format!("{what} is {actual}; it must be {expected}"))
}

fn declared_one(declared: &[TensorType]) -> Result<TensorType, String> {
    match declared {
        [ty] => Ok(ty.clone()),
        _ => Err(format!("needs its one result type declared, not {}", declared.len())),
    }
}

const NAMES: [&str; 8] = ["i", "j", "k", "l", "m", "n", "o", "p"];

/// The name of dimension `index`: `i`, `j`, …, `p`, `d8`, ….
fn dim_name(index: usize) -> String {
    NAMES.get(index).map_or_else(|| format!("d{index}"), ToString::to_string)
}

/// One parallel factor per dimension, named `i`, `j`, …; the first `count` dimensions.
fn dim_factors(rule: &mut FactorRule, shape: &[u64]) -> Vec<usize> {
    shape.iter().enumerate().map(|(index, size)| rule.parallel(dim_name(index), *size)).collect()
}

fn single(factors: &[usize]) -> Dims {
    factors.iter().map(|factor| vec![*factor]).collect()
}

/// The rule of an operation whose operands and results all have one shape (operands of rank 0 are
/// scalars that every coordinate needs).
fn elementwise_rule(operands: &[TensorType], results: &[TensorType], linear: Vec<Vec<usize>>) -> FactorRule {
    let mut rule = FactorRule::default();
    let factors = dim_factors(&mut rule, &results[0].shape);
    let dims = |ty: &TensorType| if ty.rank() == 0 { Vec::new() } else { single(&factors) };
    rule.operands = operands.iter().map(dims).collect();
    rule.results = results.iter().map(dims).collect();
    rule.linear = linear;
    rule
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn is_false(value: &bool) -> bool {
    !*value
}

/// The declared element type, if it is of the same kind as what is computed: floats stay floats.
fn float_or(declared: &[TensorType], index: usize, fallback: DType) -> DType {
    let declared = declared.get(index).map(|ty| ty.dtype);
    declared.filter(|dtype| dtype.is_float() == fallback.is_float()).unwrap_or(fallback)
}
