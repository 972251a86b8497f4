//! Elementwise operations.

use super::cut::Cut;
use super::{Arg, OP, RES, Select, Step, THREADS, compute_type, lanes};
use crate::cuda::kernel::{Definition, Elem, Kernel, Pack, PackF32};
use crate::cuda::kernels::elementwise as kernels;
use crate::cuda::kernels::elementwise::Pair;
use crate::cuda::kernels::indexing;
use shardc_ir::ops::{Adamw, BinaryKind, Epilogue, Iota, UnaryKind};
use shardc_ir::{DType, TensorType};

/// A buffer with one element per element of the result; its type.
type Each = (Arg, DType);

/// What a kernel with one thread per vector is given.
#[derive(Default)]
struct Arguments {
    /// Buffers of which each thread sees its vector.
    each: Vec<Each>,
    /// Buffers of one number, which follow at these positions.
    scalars: Vec<(usize, Arg)>,
    /// The f32 scalars.
    reals: Vec<f32>,
}

impl Arguments {
    fn of(each: impl Into<Vec<Each>>) -> Self {
        Self { each: each.into(), ..Self::default() }
    }

    fn scalar(mut self, position: usize, arg: Arg) -> Self {
        self.scalars.push((position, arg));
        self
    }

    fn reals(self, reals: impl Into<Vec<f32>>) -> Self {
        Self { reals: reals.into(), ..self }
    }
}

impl Select<'_> {
    /// A kernel with one thread per vector, its first unsigned scalar being the number of vectors.
    fn map(
        &mut self,
        name: &'static str,
        types: &[DType],
        elements: u64,
        parameters: &dyn std::fmt::Debug,
        arguments: Arguments,
        body: impl Fn(&mut Definition) + Send + Sync + 'static,
    ) {
        let lanes = lanes(types, &[elements]);
        let vector = |(arg, dtype): &Each| (*arg, dtype.size() * lanes as u64);
        let mut buffers: Vec<(Arg, u64)> = arguments.each.iter().map(vector).collect();
        arguments.scalars.iter().for_each(|(position, arg)| buffers.insert(*position, (*arg, 0)));
        let kernel = Kernel::new(name, types, lanes, THREADS, parameters, body);
        let cut = Cut::vectors(elements / lanes as u64, THREADS);
        self.launch_cut(kernel, &buffers, vec![0], arguments.reals, cut);
    }

    /// Operand `index` with its type.
    fn operand(&self, index: usize) -> Each {
        (OP(index), self.operands[index].dtype)
    }

    /// Result `index` with its type.
    fn result(&self, index: usize) -> Each {
        (RES(index), self.results[index].dtype)
    }

    pub(super) fn constant(&mut self, value: f64) -> Result<(), String> {
        let ty = self.results[0].clone();
        if ty.dtype.is_int() && whole_parts(value).is_none() && f64::from(value as f32) != value {
            return Err(format!("{} of {value}", ty.dtype));
        }
        self.fill(RES(0), &ty, value);
        Ok(())
    }

    /// Every element of the tensor at `to` becomes `value`.
    pub(super) fn fill(&mut self, to: Arg, ty: &TensorType, value: f64) {
        if value == 0.0 && value.is_sign_positive() {
            return self.out.steps.push(Step::Zero { to, bytes: ty.bytes().0 });
        }
        if let Some(parts) = whole_parts(value).filter(|parts| ty.dtype.is_int() && parts[0] != 0.0) {
            self.out.steps.push(Step::Zero { to, bytes: ty.bytes().0 });
            return self.affine_whole([to; 2], ty, [[0.0; 2], parts]);
        }
        let arguments = Arguments::of([(to, ty.dtype)]).reals([value as f32]);
        self.map("fill", &[ty.dtype], ty.elements(), &(), arguments, |d| {
            let (y, n, value) = (d.output::<Pack<0>>(), d.number(), d.real());
            kernels::fill::expand(d.scope(), y, n, value);
        });
    }

    pub(super) fn literal(&mut self, values: &[f64]) -> Result<(), String> {
        let encode = |value: &f64| match self.results[0].dtype {
            DType::F32 => Ok((*value as f32).to_le_bytes().to_vec()),
            DType::Bf16 => Ok(half::bf16::from_f64(*value).to_le_bytes().to_vec()),
            DType::F16 => Ok(half::f16::from_f64(*value).to_le_bytes().to_vec()),
            DType::I64 => Ok((*value as i64).to_le_bytes().to_vec()),
            DType::I32 => Ok((*value as i32).to_le_bytes().to_vec()),
            DType::Bool => Ok(vec![u8::from(*value != 0.0)]),
            other => Err(format!("literals of {other}")),
        };
        let bytes = values.iter().map(encode).collect::<Result<Vec<_>, _>>()?.concat();
        self.out.steps.push(Step::Upload { to: RES(0), bytes });
        Ok(())
    }

    pub(super) fn iota(&mut self, op: &Iota) -> Result<(), String> {
        let ty = &self.results[0];
        let inner: u64 = ty.shape[op.dim + 1..].iter().product();
        if op.start + ty.shape[op.dim] > 1 << 32 {
            return Err("numbers of 2^32 and more".to_string());
        }
        let numbers = vec![ty.elements() as u32, inner as u32, ty.shape[op.dim] as u32, op.start as u32];
        let kernel = Kernel::new("iota", &[ty.dtype], 1, THREADS, &(), |d| {
            let y = d.output::<Elem<0>>();
            let (n, inner, size, start) = (d.number(), d.number(), d.number(), d.number());
            indexing::iota::expand(d.scope(), y, n, inner, size, start);
        });
        // The numbers repeat with every index of the dimension before.
        let period = inner * ty.shape[op.dim];
        let cut = Cut { per_unit: period, ..Cut::vectors(ty.elements(), THREADS) };
        self.launch_cut(kernel, &[(RES(0), period * ty.dtype.size())], numbers, Vec::new(), cut);
        Ok(())
    }

    pub(super) fn unary(&mut self, kind: UnaryKind) -> Result<(), String> {
        let dtype = self.operands[0].dtype;
        if !dtype.is_float() {
            return match kind {
                UnaryKind::Neg => self.affine(-1.0, 0.0),
                UnaryKind::Not => self.affine(-1.0, 1.0),
                _ => Err("integers".to_string()),
            };
        }
        let elements = self.results[0].elements();
        let arguments = Arguments::of([self.operand(0), self.result(0)]);
        self.map("unary", &[dtype, dtype], elements, &kind, arguments, move |d| {
            let (x, y, n) = (d.input::<Pack<0>>(), d.output::<Pack<1>>(), d.number());
            kernels::unary::expand(d.scope(), x, y, n, kind);
        });
        Ok(())
    }

    pub(super) fn unary_grad(&mut self, kind: UnaryKind) -> Result<(), String> {
        let elements = self.results[0].elements();
        let arguments = Arguments::of([self.operand(0), self.operand(1), self.result(0)]);
        self.map("unary_grad", &[self.operands[0].dtype], elements, &kind, arguments, move |d| {
            let (dy, x, dx) = (d.input::<Pack<0>>(), d.input::<Pack<0>>(), d.output::<Pack<0>>());
            let n = d.number();
            kernels::unary_grad::expand(d.scope(), dy, x, dx, n, kind);
        });
        Ok(())
    }

    /// An activation, or the derivative of one, of what is in the result already; see
    /// [`Gemm::epilogue`](super::Gemm::epilogue).
    pub(super) fn activate(&mut self, kind: UnaryKind, epilogue: Epilogue, beside: Option<Arg>) {
        let (own, ty) = (self.result(0), self.results[0].clone());
        if epilogue == Epilogue::GeluTanhGrad {
            let arguments = Arguments::of([own, (beside.unwrap_or(own.0), ty.dtype), own]);
            return self.map("unary_grad", &[ty.dtype], ty.elements(), &kind, arguments, move |d| {
                let (dy, x, dx) = (d.input::<Pack<0>>(), d.input::<Pack<0>>(), d.output::<Pack<0>>());
                let n = d.number();
                kernels::unary_grad::expand(d.scope(), dy, x, dx, n, kind);
            });
        }
        let copies = beside.map(|to| Step::Copy { from: RES(0), to, bytes: ty.bytes().0 });
        self.out.steps.extend(copies);
        self.map("unary", &[ty.dtype; 2], ty.elements(), &kind, Arguments::of([own, own]), move |d| {
            let (x, y, n) = (d.input::<Pack<0>>(), d.output::<Pack<1>>(), d.number());
            kernels::unary::expand(d.scope(), x, y, n, kind);
        });
    }

    /// `scale x + offset`
    pub(super) fn affine(&mut self, scale: f64, offset: f64) -> Result<(), String> {
        let (dtype, elements) = (self.operands[0].dtype, self.results[0].elements());
        if dtype.is_int() {
            let [Some(scale), Some(offset)] = [scale, offset].map(whole_parts) else {
                return Err(format!("{dtype} times {scale} plus {offset}"));
            };
            let ty = self.results[0].clone();
            self.affine_whole([OP(0), RES(0)], &ty, [scale, offset]);
            return Ok(());
        }
        let types = [dtype, dtype, dtype, compute_type(dtype)];
        let arguments = Arguments::of([self.operand(0), self.result(0)]).reals([scale as f32, offset as f32]);
        self.map("affine", &types, elements, &(), arguments, |d| {
            let (x, y, n) = (d.input::<Pack<0>>(), d.output::<Pack<1>>(), d.number());
            let (scale, offset) = (d.real(), d.real());
            kernels::affine::expand(d.scope(), x, y, n, scale, offset);
        });
        Ok(())
    }

    /// The same of integers: a factor and a summand by their [`whole_parts`].
    fn affine_whole(&mut self, [from, to]: [Arg; 2], ty: &TensorType, [[a, b], [c, d]]: [[f32; 2]; 2]) {
        let types = [ty.dtype, ty.dtype, ty.dtype, compute_type(ty.dtype)];
        let arguments = Arguments::of([(from, ty.dtype), (to, ty.dtype)]).reals([a, b, c, d]);
        self.map("affine_whole", &types, ty.elements(), &(), arguments, |d| {
            let (x, y, n) = (d.input::<Pack<0>>(), d.output::<Pack<1>>(), d.number());
            let [scale_high, scale_low, offset_high, offset_low] = [(); 4].map(|()| d.real());
            kernels::affine_whole::expand(d.scope(), x, y, n, scale_high, scale_low, offset_high, offset_low);
        });
    }

    pub(super) fn binary(&mut self, pair: Pair) -> Result<(), String> {
        let (a, b, y) = (&self.operands[0], &self.operands[1], &self.results[0]);
        let compute = compute_type(a.dtype);
        if compute != DType::F32 && matches!(pair, Pair::Binary(BinaryKind::Rem | BinaryKind::Pow)) {
            return Err("integers".to_string());
        }
        let types = [a.dtype, b.dtype, y.dtype, compute];
        let (elements, [left, right, out]) = (y.elements(), [self.operand(0), self.operand(1), self.result(0)]);
        if b.rank() < y.rank() {
            let arguments = Arguments::of([left, out]).scalar(1, right.0);
            self.map("binary_scalar_right", &types, elements, &pair, arguments, move |d| {
                let (a, b, y) = (d.input::<Pack<0>>(), d.input::<Elem<1>>(), d.output::<Pack<2>>());
                let n = d.number();
                kernels::binary_scalar_right::expand(d.scope(), a, b, y, n, pair);
            });
        } else if a.rank() < y.rank() {
            let arguments = Arguments::of([right, out]).scalar(0, left.0);
            self.map("binary_scalar_left", &types, elements, &pair, arguments, move |d| {
                let (a, b, y) = (d.input::<Elem<0>>(), d.input::<Pack<1>>(), d.output::<Pack<2>>());
                let n = d.number();
                kernels::binary_scalar_left::expand(d.scope(), a, b, y, n, pair);
            });
        } else {
            let arguments = Arguments::of([left, right, out]);
            self.map("binary", &types, elements, &pair, arguments, move |d| {
                let (a, b, y) = (d.input::<Pack<0>>(), d.input::<Pack<1>>(), d.output::<Pack<2>>());
                let n = d.number();
                kernels::binary::expand(d.scope(), a, b, y, n, pair);
            });
        }
        Ok(())
    }

    /// `to = a + b`, as many elements of one type as the first result has.
    pub(super) fn add_elements(&mut self, [a, b, to]: [Arg; 3], dtype: DType) {
        let pair = Pair::Binary(BinaryKind::Add);
        let types = [dtype, dtype, dtype, compute_type(dtype)];
        let elements = self.results[0].elements();
        let arguments = Arguments::of([a, b, to].map(|arg| (arg, dtype)));
        self.map("binary", &types, elements, &pair, arguments, move |d| {
            let (a, b, y) = (d.input::<Pack<0>>(), d.input::<Pack<1>>(), d.output::<Pack<2>>());
            let n = d.number();
            kernels::binary::expand(d.scope(), a, b, y, n, pair);
        });
    }

    pub(super) fn choose(&mut self) -> Result<(), String> {
        let types = [DType::Bool, self.operands[1].dtype];
        let arguments = Arguments::of([self.operand(0), self.operand(1), self.operand(2), self.result(0)]);
        self.map("choose", &types, self.results[0].elements(), &(), arguments, |d| {
            let mask = d.input::<Pack<0>>();
            let (a, b, y, n) = (d.input::<Pack<1>>(), d.input::<Pack<1>>(), d.output::<Pack<1>>(), d.number());
            kernels::choose::expand(d.scope(), mask, a, b, y, n);
        });
        Ok(())
    }

    /// Converts as many elements as the first result has.
    pub(super) fn cast(&mut self, from: Arg, to: Arg, source: DType, target: DType) -> Result<(), String> {
        let elements = self.results[0].elements();
        self.cast_elements(from, to, source, target, elements);
        Ok(())
    }

    pub(super) fn cast_elements(&mut self, from: Arg, to: Arg, source: DType, target: DType, elements: u64) {
        if source == target {
            return self.out.steps.push(Step::Copy { from, to, bytes: elements * source.size() });
        }
        let to_bool = target == DType::Bool;
        let arguments = Arguments::of([(from, source), (to, target)]);
        self.map("convert", &[source, target], elements, &to_bool, arguments, move |d| {
            let (x, y, n) = (d.input::<Pack<0>>(), d.output::<Pack<1>>(), d.number());
            kernels::convert::expand(d.scope(), x, y, n, to_bool);
        });
    }

    pub(super) fn accumulate(&mut self) {
        let [from, to] = [self.operands[0].dtype, self.results[0].dtype];
        let types = [from, to, compute_type(to)];
        let arguments = Arguments::of([self.operand(0), self.result(0)]);
        self.map("accumulate", &types, self.results[0].elements(), &(), arguments, |d| {
            let (x, y, n) = (d.input::<Pack<0>>(), d.output::<Pack<1>>(), d.number());
            kernels::accumulate::expand(d.scope(), x, y, n);
        });
    }

    /// Looks at operand 0; result 0 is two words, for infinities and for NaN.
    pub(super) fn scan(&mut self) {
        let dtype = self.operands[0].dtype;
        let arguments = Arguments::of([self.operand(0)]).scalar(1, RES(0));
        self.map("not_finite", &[dtype], self.operands[0].elements(), &(), arguments, |d| {
            let (x, found, n) = (d.input::<Pack<0>>(), d.output::<u32>(), d.number());
            kernels::not_finite::expand(d.scope(), x, found, n);
        });
    }

    pub(super) fn swiglu(&mut self) -> Result<(), String> {
        let arguments = Arguments::of([self.operand(0), self.operand(1), self.result(0)]);
        self.map("swiglu", &[self.operands[0].dtype], self.results[0].elements(), &(), arguments, |d| {
            let (gate, up, y) = (d.input::<Pack<0>>(), d.input::<Pack<0>>(), d.output::<Pack<0>>());
            let n = d.number();
            kernels::swiglu::expand(d.scope(), gate, up, y, n);
        });
        Ok(())
    }

    pub(super) fn swiglu_grad(&mut self) -> Result<(), String> {
        let operands = (0..3).map(|index| self.operand(index));
        let arguments = Arguments::of(operands.chain([self.result(0), self.result(1)]).collect::<Vec<_>>());
        self.map("swiglu_grad", &[self.operands[0].dtype], self.results[0].elements(), &(), arguments, |d| {
            let (dy, gate, up) = (d.input::<Pack<0>>(), d.input::<Pack<0>>(), d.input::<Pack<0>>());
            let (dgate, dup, n) = (d.output::<Pack<0>>(), d.output::<Pack<0>>(), d.number());
            kernels::swiglu_grad::expand(d.scope(), dy, gate, up, dgate, dup, n);
        });
        Ok(())
    }

    pub(super) fn adamw(&mut self, op: &Adamw) -> Result<(), String> {
        // Without a cast, the new parameter stands for it.
        let (casts, cast) = (op.cast.is_some(), self.result(if op.cast.is_some() { 3 } else { 0 }));
        let types = [self.operands[0].dtype, self.operands[1].dtype, self.operands[2].dtype, cast.1];
        if self.operands[2].dtype != self.operands[3].dtype {
            return Err("moments of two element types".to_string());
        }
        let each = (0..4).map(|index| self.operand(index)).chain((0..3).map(|index| self.result(index)));
        let arguments = Arguments::of(each.chain([cast]).collect::<Vec<_>>()).reals(adamw_reals(op));
        let arguments = (4..7).fold(arguments, |arguments, index| arguments.scalar(index, OP(index)));
        self.map("adamw", &types, self.results[0].elements(), &casts, arguments, move |d| {
            let (p, g, m, v) = (d.input::<Pack<0>>(), d.input::<Pack<1>>(), d.input::<Pack<2>>(), d.input::<Pack<2>>());
            let (scale, rate, step) = (d.input::<f32>(), d.input::<f32>(), d.input::<f32>());
            let (np, nm, nv) = (d.output::<Pack<0>>(), d.output::<Pack<2>>(), d.output::<Pack<2>>());
            let (nc, n) = (d.output::<Pack<3>>(), d.number());
            let (l1, l2, r1, r2, eps, decay) = (d.real(), d.real(), d.real(), d.real(), d.real(), d.real());
            let scope = d.scope();
            kernels::adamw::expand(
                scope, p, g, m, v, scale, rate, step, np, nm, nv, nc, n, l1, l2, r1, r2, eps, decay, casts,
            );
        });
        Ok(())
    }

    pub(super) fn rotary(&mut self, inverse: bool) -> Result<(), String> {
        let ty = &self.operands[0];
        let half = ty.shape[3] / 2;
        let types = [ty.dtype, DType::F32];
        let lanes = lanes(&types, &[half]);
        let vectors = ty.elements() / 2 / lanes as u64;
        let numbers = vec![vectors as u32, ty.shape[2] as u32, ty.shape[1] as u32, (half / lanes as u64) as u32];
        let kernel = Kernel::new("rotary", &types, lanes, THREADS, &(), |d| {
            let x = d.input::<Pack<0>>();
            let (cos, sin, y) = (d.input::<PackF32>(), d.input::<PackF32>(), d.output::<Pack<0>>());
            let (n, heads, positions, half, direction) = (d.number(), d.number(), d.number(), d.number(), d.real());
            kernels::rotary::expand(d.scope(), x, cos, sin, y, n, heads, positions, half, direction);
        });
        let direction = if inverse { -1.0 } else { 1.0 };
        // Every batch element meets the same angles.
        let element = ty.elements() / ty.shape[0].max(1);
        let cut = Cut { per_unit: (element / 2 / lanes as u64).max(1), ..Cut::vectors(vectors, THREADS) };
        let bytes = element * ty.dtype.size();
        let buffers = [(OP(0), bytes), (OP(1), 0), (OP(2), 0), (RES(0), bytes)];
        self.launch_cut(kernel, &buffers, numbers, vec![direction], cut);
        Ok(())
    }
}

/// The scalars of the kernels that update parameters.
pub(super) fn adamw_reals(op: &Adamw) -> [f32; 6] {
    let reals = [op.beta1.ln(), op.beta2.ln(), 1.0 - op.beta1, 1.0 - op.beta2, op.eps, op.weight_decay];
    reals.map(|value| value as f32)
}

/// An integer as `2^24` times the first part and the second, both of which are floats without being rounded; `None` if it is
/// none, or too large.
fn whole_parts(value: f64) -> Option<[f32; 2]> {
    const EACH: f64 = (1 << 24) as f64;
    let high = (value / EACH).trunc();
    (value.fract() == 0.0 && high.abs() <= EACH).then_some([high as f32, (value - high * EACH) as f32])
}
