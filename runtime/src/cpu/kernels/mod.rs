//! The kernels: one function per operation, on slices of memory.
//!
//! Every kernel computes in f32 (integers exactly, in 64 bits) and rounds once to the result's
//! element type; dot products and sums accumulate in f32 or wider. Matrix products run on Burn's
//! Flex backend; what is bound by memory is a loop over slices. A kernel may use
//! [`Context::threads`] threads, and scratch memory of its own.
//!
//! Operands and results never overlap: the caller copies an operand that does
//! (see [`super::executor`]), except for `adamw`, which updates in place.

mod adamw;
mod attention;
mod convolution;
mod cross_entropy;
mod elementwise;
mod float8;
mod fused;
mod generate;
mod lookup;
mod matmul;
mod max_pool;
mod movement;
mod normalize;
mod quantize;
mod ranked;
mod reduce;
mod rotary;
#[cfg(test)]
mod tests;

pub(super) use adamw::update as adamw_in_place;

use attention::Scores;
use half::{bf16, f16};
use shardc_ir::float8::Format;
use shardc_ir::{DType, Op, TensorType};
use std::borrow::Cow;

/// What a kernel may use.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// How many threads, the calling one included; at least 1.
    pub threads: usize,
}

/// A tensor that is read; its bytes are aligned to its elements.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// The type.
    pub ty: &'a TensorType,
    /// `ty.bytes()` bytes.
    pub bytes: &'a [u8],
}

/// A tensor that is written; its bytes are aligned to its elements.
pub struct ViewMut<'a> {
    /// The type.
    pub ty: &'a TensorType,
    /// `ty.bytes()` bytes; their old contents mean nothing.
    pub bytes: &'a mut [u8],
}

impl<'a> View<'a> {
    /// The size of dimension `dim`.
    fn dim(&self, dim: usize) -> usize {
        self.ty.shape[dim] as usize
    }

    /// The last dimension's size, 1 for a scalar.
    fn row(&self) -> usize {
        self.ty.shape.last().map_or(1, |size| *size as usize)
    }

    /// The elements in f32: borrowed if they are, else converted.
    pub fn f32s(&self) -> Result<Cow<'a, [f32]>, String> {
        Ok(match self.ty.dtype {
            DType::F32 => Cow::Borrowed(bytemuck::cast_slice(self.bytes)),
            DType::Bf16 => Cow::Owned(bytemuck::cast_slice::<_, bf16>(self.bytes).iter().map(|x| x.to_f32()).collect()),
            DType::F16 => Cow::Owned(bytemuck::cast_slice::<_, f16>(self.bytes).iter().map(|x| x.to_f32()).collect()),
            DType::I64 | DType::I32 | DType::Bool => Cow::Owned(self.i64s()?.iter().map(|x| *x as f32).collect()),
            DType::F8e4m3 | DType::F8e5m2 => {
                let table = float8::table(Format::of(self.ty.dtype).ok_or_else(|| unsupported(self.ty))?);
                Cow::Owned(self.bytes.iter().map(|code| table[usize::from(*code)]).collect())
            }
            DType::U8 => return Err(unsupported(self.ty)),
        })
    }

    /// The elements in i64: borrowed if they are, else converted; not from floats.
    pub fn i64s(&self) -> Result<Cow<'a, [i64]>, String> {
        Ok(match self.ty.dtype {
            DType::I64 => Cow::Borrowed(bytemuck::cast_slice(self.bytes)),
            DType::I32 => {
                Cow::Owned(bytemuck::cast_slice::<_, i32>(self.bytes).iter().map(|x| i64::from(*x)).collect())
            }
            DType::Bool => Cow::Owned(self.bytes.iter().map(|x| i64::from(*x != 0)).collect()),
            _ => return Err(unsupported(self.ty)),
        })
    }

    /// The only element of a scalar, in f32.
    fn scalar(&self) -> Result<f32, String> {
        self.f32s()?.first().copied().ok_or_else(|| format!("{} has no element", self.ty))
    }
}

impl ViewMut<'_> {
    /// Lets `write` fill the elements in f32 and rounds them to the element type.
    pub fn write_f32(&mut self, write: impl FnOnce(&mut [f32])) -> Result<(), String> {
        if self.ty.dtype == DType::F32 {
            write(bytemuck::cast_slice_mut(self.bytes));
            return Ok(());
        }
        let mut values = vec![0.0; self.ty.elements() as usize];
        write(&mut values);
        self.round_f32(&values)
    }

    /// Rounds f32 elements to the element type: to nearest even, to integers towards zero, to bool
    /// by comparison with zero.
    pub fn round_f32(&mut self, values: &[f32]) -> Result<(), String> {
        match self.ty.dtype {
            DType::F32 => bytemuck::cast_slice_mut(self.bytes).copy_from_slice(values),
            DType::Bf16 => fill(self.bytes, values, bf16::from_f32),
            DType::F16 => fill(self.bytes, values, f16::from_f32),
            DType::I64 => fill(self.bytes, values, |x| x as i64),
            DType::I32 => fill(self.bytes, values, |x| x as i32),
            DType::Bool => fill(self.bytes, values, |x| u8::from(x != 0.0)),
            DType::F8e4m3 | DType::F8e5m2 => {
                let format = Format::of(self.ty.dtype).ok_or_else(|| unsupported(self.ty))?;
                fill(self.bytes, values, |x| float8::encode(format, x));
            }
            DType::U8 => return Err(unsupported(self.ty)),
        }
        Ok(())
    }

    /// Writes integer elements, cut to the element type's width; to bool by comparison with zero.
    pub fn round_i64(&mut self, values: &[i64]) -> Result<(), String> {
        match self.ty.dtype {
            DType::I64 => bytemuck::cast_slice_mut(self.bytes).copy_from_slice(values),
            DType::I32 => fill(self.bytes, values, |x| x as i32),
            DType::Bool => fill(self.bytes, values, |x| u8::from(x != 0)),
            DType::F32 => fill(self.bytes, values, |x| x as f32),
            // Rounded once: by way of f32 a large integer would be rounded twice.
            DType::Bf16 => fill(self.bytes, values, |x| bf16::from_f64(x as f64)),
            DType::F16 => fill(self.bytes, values, |x| f16::from_f64(x as f64)),
            DType::F8e4m3 | DType::F8e5m2 | DType::U8 => return Err(unsupported(self.ty)),
        }
        Ok(())
    }
}

fn fill<S: Copy, T: bytemuck::Pod>(bytes: &mut [u8], values: &[S], convert: impl Fn(S) -> T) {
    for (slot, value) in bytemuck::cast_slice_mut::<_, T>(bytes).iter_mut().zip(values) {
        *slot = convert(*value);
    }
}

fn unsupported(ty: &TensorType) -> String {
    format!("no CPU kernel for {ty}")
}

/// Computes an operation that is not a leaf. Operands and results have the types that the
/// operation's shape rule gave.
pub fn run(context: Context, op: &Op, operands: &[View<'_>], results: &mut [ViewMut<'_>]) -> Result<(), String> {
    match op {
        Op::Input(_) | Op::Parameter(_) | Op::State(_) => Err("a leaf is not computed".to_string()),
        Op::Constant(op) => generate::constant(op, &mut results[0]),
        Op::Literal(op) => generate::literal(op, &mut results[0]),
        Op::Iota(op) => generate::iota(op, &mut results[0]),
        Op::Random(op) => generate::random(op, context, operands, &mut results[0]),
        Op::Unary(op) => elementwise::unary(op.kind, context, operands[0], &mut results[0]),
        Op::UnaryGrad(op) => elementwise::unary_grad(op.kind, context, operands[0], operands[1], &mut results[0]),
        Op::Affine(op) => elementwise::affine(op, operands[0], &mut results[0]),
        Op::Binary(op) => elementwise::binary(op.kind, operands[0], operands[1], &mut results[0]),
        Op::Compare(op) => elementwise::compare(op.kind, operands[0], operands[1], &mut results[0]),
        Op::Select(_) => elementwise::select(operands, &mut results[0]),
        Op::Cast(_) => elementwise::cast(operands[0], &mut results[0]),
        Op::Swiglu(_) => elementwise::swiglu(context, operands, &mut results[0]),
        Op::SwigluGrad(_) => elementwise::swiglu_grad(operands, results),
        Op::Reshape(_) => movement::reshape(operands[0], &mut results[0]),
        Op::Transpose(op) => movement::transpose(op, operands[0], &mut results[0]),
        Op::Broadcast(op) => movement::broadcast(op, operands[0], &mut results[0]),
        Op::Slice(op) => movement::slice(op, operands[0], &mut results[0]),
        Op::Pad(op) => movement::pad(op, operands[0], &mut results[0]),
        Op::Concat(op) => movement::concat(op, operands, &mut results[0]),
        Op::Reduce(op) => reduce::reduce(op, operands[0], &mut results[0]),
        Op::SumSquares(_) => reduce::sum_squares(operands[0], &mut results[0]),
        Op::Matmul(op) => matmul::contract(op, context, operands, results),
        Op::QuantizationScale(op) => quantize::scale(op, operands[0], &mut results[0]),
        Op::Quantize(_) => quantize::quantize(operands, results),
        Op::ScaledMatmul(op) => quantize::contract(op, context, operands, results),
        Op::Convolution(op) => convolution::forward(op, context, operands, &mut results[0]),
        Op::ConvolutionTranspose(op) => convolution::transpose(op, context, operands, &mut results[0]),
        Op::ConvolutionFilterGrad(op) => convolution::filter_grad(op, context, operands, &mut results[0]),
        Op::MaxPool(op) => max_pool::forward(op, context, operands[0], &mut results[0]),
        Op::MaxPoolGrad(op) => max_pool::backward(op, context, operands, &mut results[0]),
        Op::TopK(op) => ranked::top_k(op, operands[0], results),
        Op::Cumsum(op) => ranked::cumsum(op, operands[0], &mut results[0]),
        Op::Embedding(op) => lookup::embedding(op, operands, &mut results[0]),
        Op::EmbeddingGrad(op) => lookup::embedding_grad(op, operands, &mut results[0]),
        Op::Gather(op) => lookup::gather(op, operands, &mut results[0]),
        Op::ScatterAdd(op) => lookup::scatter_add(op, operands, &mut results[0]),
        Op::Softmax(_) => normalize::softmax(context, operands[0], &mut results[0]),
        Op::LayerNorm(op) => normalize::layer_norm(op.eps, operands, results),
        Op::LayerNormGrad(_) => normalize::layer_norm_grad(operands, results),
        Op::RmsNorm(op) => normalize::rms_norm(op.eps, operands, results),
        Op::RmsNormGrad(_) => normalize::rms_norm_grad(operands, results),
        Op::Rotary(op) => rotary::rotary(op.inverse, operands, &mut results[0]),
        Op::Attention(op) => {
            attention::forward(Scores { mask: op.mask(), scale: op.scale }, context, operands, results)
        }
        Op::AttentionGrad(op) => {
            attention::backward(Scores { mask: op.mask(), scale: op.scale }, context, operands, results)
        }
        Op::CrossEntropy(op) => cross_entropy::forward(op, context, operands, results),
        Op::CrossEntropyGrad(op) => cross_entropy::backward(op, context, operands, &mut results[0]),
        Op::Total(_) => elementwise::total(operands, &mut results[0]),
        Op::Adamw(op) => adamw::adamw(op, operands, results),
        Op::Each(each) => {
            let mut items = each.items(operands).zip(each.items_mut(results));
            items.try_for_each(|(operands, results)| run(context, &each.op, operands, results))
        }
        Op::Fused(op) => fused::fused(context, op, operands, results),
    }
}

/// Runs `each` on parts of `out`, cut between rows of `row` elements, with the index of the part's
/// first row; on several threads where that is worth it. A row takes about `work` operations.
fn by_rows<T: Send>(context: Context, row: usize, work: usize, out: &mut [T], each: impl Fn(usize, &mut [T]) + Sync) {
    let rows = out.len() / row.max(1);
    let parts = context.parts(rows, work);
    if parts <= 1 {
        return each(0, out);
    }
    let chunk = rows.div_ceil(parts);
    std::thread::scope(|scope| {
        for (index, out) in out.chunks_mut(chunk * row).enumerate() {
            let each = &each;
            scope.spawn(move || each(index * chunk, out));
        }
    });
}

/// Calls `each` with every unit `0..count`, each about `work` operations; the results in order.
fn by_units<R: Send>(
    context: Context,
    count: usize,
    work: usize,
    each: impl Fn(usize) -> Result<R, String> + Sync,
) -> Result<Vec<R>, String> {
    let mut out: Vec<Option<Result<R, String>>> = (0..count).map(|_| None).collect();
    by_rows(context, 1, work, &mut out, |first, out| {
        for (unit, out) in (first..).zip(out) {
            *out = Some(each(unit));
        }
    });
    out.into_iter().flatten().collect()
}

impl Context {
    /// Into how many parts to cut `units` pieces of `work` operations each.
    fn parts(self, units: usize, work: usize) -> usize {
        /// Below this many operations a thread costs more than it saves.
        const WORTH: usize = 1 << 17;
        let worth = units.saturating_mul(work) / WORTH;
        self.threads.min(units).min(worth).max(1)
    }
}
