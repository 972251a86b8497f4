//! Elementwise operations: functions of one, two or three operands of one shape.

use super::{Context, View, ViewMut, by_rows};
use shardc_ir::DType;
use shardc_ir::ops::{Affine, BinaryKind, CompareKind, UnaryKind};
use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// `sqrt(2 / π)` and the cubic coefficient of GELU's tanh approximation.
const GELU_TANH: [f32; 2] = [0.797_884_6, 0.044_715];

/// About how many additions a transcendental function takes.
const WORK: usize = 8;

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `0.5 (1 + tanh u) = sigmoid(2 u)` of GELU's tanh approximation.
fn gelu_tanh_gate(x: f32) -> f32 {
    sigmoid(2.0 * GELU_TANH[0] * (x + GELU_TANH[1] * x * x * x))
}

/// The distribution function of the normal distribution.
fn normal_cdf(x: f32) -> f32 {
    0.5 * libm::erfcf(-x * FRAC_1_SQRT_2)
}

/// The density of the normal distribution.
fn normal_density(x: f32) -> f32 {
    0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * (-0.5 * x * x).exp()
}

fn sign(x: f32) -> f32 {
    if x == 0.0 || x.is_nan() { x } else { x.signum() }
}

/// `f(x)` in f32. A maximum keeps a NaN, so that one is not lost on its way to the loss.
pub(super) fn function(kind: UnaryKind) -> fn(f32) -> f32 {
    match kind {
        UnaryKind::Neg => |x| -x,
        UnaryKind::Abs => f32::abs,
        UnaryKind::Sign => sign,
        UnaryKind::Exp => f32::exp,
        UnaryKind::Log => f32::ln,
        UnaryKind::Log1p => f32::ln_1p,
        UnaryKind::Sqrt => f32::sqrt,
        UnaryKind::Rsqrt => |x| 1.0 / x.sqrt(),
        UnaryKind::Recip => |x| 1.0 / x,
        UnaryKind::Sin => f32::sin,
        UnaryKind::Cos => f32::cos,
        UnaryKind::Tanh => f32::tanh,
        UnaryKind::Erf => libm::erff,
        UnaryKind::Sigmoid => sigmoid,
        UnaryKind::Relu => |x| if x < 0.0 { 0.0 } else { x },
        UnaryKind::Gelu => |x| x * normal_cdf(x),
        UnaryKind::GeluTanh => |x| x * gelu_tanh_gate(x),
        UnaryKind::Silu => |x| x * sigmoid(x),
        UnaryKind::Floor => f32::floor,
        UnaryKind::Ceil => f32::ceil,
        UnaryKind::Round => f32::round_ties_even,
        UnaryKind::Detach => |x| x,
        UnaryKind::Not => |x| f32::from(u8::from(x == 0.0)),
    }
}

/// `f'(x)` in f32; 0 where the function is piecewise constant, and at the kinks of `abs` and `relu`.
pub(super) fn derivative(kind: UnaryKind) -> fn(f32) -> f32 {
    match kind {
        UnaryKind::Neg => |_| -1.0,
        UnaryKind::Abs => sign,
        UnaryKind::Exp => f32::exp,
        UnaryKind::Log => |x| 1.0 / x,
        UnaryKind::Log1p => |x| 1.0 / (1.0 + x),
        UnaryKind::Sqrt => |x| 0.5 / x.sqrt(),
        UnaryKind::Rsqrt => |x| -0.5 / (x * x.sqrt()),
        UnaryKind::Recip => |x| -1.0 / (x * x),
        UnaryKind::Sin => f32::cos,
        UnaryKind::Cos => |x| -x.sin(),
        UnaryKind::Tanh => |x| {
            let y = x.tanh();
            1.0 - y * y
        },
        UnaryKind::Erf => |x| FRAC_2_SQRT_PI * (-x * x).exp(),
        UnaryKind::Sigmoid => |x| {
            let y = sigmoid(x);
            y * (1.0 - y)
        },
        UnaryKind::Relu => |x| f32::from(u8::from(x > 0.0)),
        UnaryKind::Gelu => |x| normal_cdf(x) + x * normal_density(x),
        UnaryKind::GeluTanh => |x| {
            let gate = gelu_tanh_gate(x);
            gate + x * gate * (1.0 - gate) * 2.0 * GELU_TANH[0] * (1.0 + 3.0 * GELU_TANH[1] * x * x)
        },
        UnaryKind::Silu => |x| {
            let gate = sigmoid(x);
            gate * (1.0 + x * (1.0 - gate))
        },
        UnaryKind::Sign
        | UnaryKind::Floor
        | UnaryKind::Ceil
        | UnaryKind::Round
        | UnaryKind::Detach
        | UnaryKind::Not => |_| 0.0,
    }
}

pub(super) fn unary(kind: UnaryKind, context: Context, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    if !x.ty.dtype.is_float() {
        let values = x.i64s()?;
        let f: fn(i64) -> i64 = match kind {
            UnaryKind::Neg => i64::wrapping_neg,
            UnaryKind::Abs => i64::wrapping_abs,
            UnaryKind::Sign => i64::signum,
            UnaryKind::Not => |x| i64::from(x == 0),
            _ => return Err(format!("`{}` does not take {}", kind.name(), x.ty)),
        };
        return result.round_i64(&values.iter().map(|x| f(*x)).collect::<Vec<_>>());
    }
    let (values, f) = (x.f32s()?, function(kind));
    result.write_f32(|out| {
        by_rows(context, 1, WORK, out, |first, out| {
            for (out, x) in out.iter_mut().zip(&values[first..]) {
                *out = f(*x);
            }
        });
    })
}

pub(super) fn unary_grad(
    kind: UnaryKind,
    context: Context,
    dy: View<'_>,
    x: View<'_>,
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let (dy, x, f) = (dy.f32s()?, x.f32s()?, derivative(kind));
    result.write_f32(|out| {
        by_rows(context, 1, WORK, out, |first, out| {
            for ((out, dy), x) in out.iter_mut().zip(&dy[first..]).zip(&x[first..]) {
                *out = dy * f(*x);
            }
        });
    })
}

/// On integers the sum is computed in f64 and truncated, exactly if both numbers are integers.
pub(super) fn affine(op: &Affine, x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    if x.ty.dtype.is_int() {
        let exact = op.scale.fract() == 0.0 && op.offset.fract() == 0.0;
        let f = |x: &i64| {
            if exact {
                (op.scale as i64).wrapping_mul(*x).wrapping_add(op.offset as i64)
            } else {
                (op.scale * *x as f64 + op.offset) as i64
            }
        };
        return result.round_i64(&x.i64s()?.iter().map(f).collect::<Vec<_>>());
    }
    let (x, scale, offset) = (x.f32s()?, op.scale as f32, op.offset as f32);
    result.write_f32(|out| {
        for (out, x) in out.iter_mut().zip(x.iter()) {
            *out = scale * x + offset;
        }
    })
}

/// The larger, or a NaN if either is one.
pub(super) fn maximum(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

fn minimum(a: f32, b: f32) -> f32 {
    if a <= b || a.is_nan() { a } else { b }
}

/// The remainder with the sign of the divisor.
fn floor_rem(a: f32, b: f32) -> f32 {
    let rest = a % b;
    if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
}

/// Calls `f` on every pair; either slice may be one element that goes with all of the other.
fn pairs<T: Copy, U>(a: &[T], b: &[T], out: &mut [U], f: impl Fn(T, T) -> U) {
    match (a.len(), b.len()) {
        (1, n) if n != 1 => out.iter_mut().zip(b).for_each(|(out, b)| *out = f(a[0], *b)),
        (n, 1) if n != 1 => out.iter_mut().zip(a).for_each(|(out, a)| *out = f(*a, b[0])),
        _ => out.iter_mut().zip(a.iter().zip(b)).for_each(|(out, (a, b))| *out = f(*a, *b)),
    }
}

pub(super) fn binary(kind: BinaryKind, a: View<'_>, b: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    if !a.ty.dtype.is_float() {
        return integer_binary(kind, a, b, result);
    }
    let (a, b) = (a.f32s()?, b.f32s()?);
    let logical = |f: fn(bool, bool) -> bool| move |a: f32, b: f32| f32::from(u8::from(f(a != 0.0, b != 0.0)));
    // One loop per function, so that each becomes vector instructions.
    result.write_f32(|out| match kind {
        BinaryKind::Add => pairs(&a, &b, out, |a, b| a + b),
        BinaryKind::Sub => pairs(&a, &b, out, |a, b| a - b),
        BinaryKind::Mul => pairs(&a, &b, out, |a, b| a * b),
        BinaryKind::Div => pairs(&a, &b, out, |a, b| a / b),
        BinaryKind::Rem => pairs(&a, &b, out, floor_rem),
        BinaryKind::Pow => pairs(&a, &b, out, f32::powf),
        BinaryKind::Max => pairs(&a, &b, out, maximum),
        BinaryKind::Min => pairs(&a, &b, out, minimum),
        BinaryKind::And => pairs(&a, &b, out, logical(|a, b| a && b)),
        BinaryKind::Or => pairs(&a, &b, out, logical(|a, b| a || b)),
    })
}

/// Integers wrap; division truncates, and a division by zero is an error.
fn integer_binary(kind: BinaryKind, a: View<'_>, b: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    let (a, b) = (a.i64s()?, b.i64s()?);
    if matches!(kind, BinaryKind::Div | BinaryKind::Rem) && b.contains(&0) {
        return Err("integer division by zero".to_string());
    }
    let f: fn(i64, i64) -> i64 = match kind {
        BinaryKind::Add => i64::wrapping_add,
        BinaryKind::Sub => i64::wrapping_sub,
        BinaryKind::Mul => i64::wrapping_mul,
        BinaryKind::Div => i64::wrapping_div,
        BinaryKind::Rem => |a, b| {
            let rest = a.wrapping_rem(b);
            if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
        },
        BinaryKind::Pow => integer_power,
        BinaryKind::Max => i64::max,
        BinaryKind::Min => i64::min,
        BinaryKind::And => |a, b| i64::from(a != 0 && b != 0),
        BinaryKind::Or => |a, b| i64::from(a != 0 || b != 0),
    };
    let mut out = vec![0; result.ty.elements() as usize];
    pairs(&a, &b, &mut out, f);
    result.round_i64(&out)
}

/// `a ^ b`, towards zero where `b` is negative.
fn integer_power(a: i64, b: i64) -> i64 {
    match (a, u32::try_from(b)) {
        (_, Ok(b)) => a.wrapping_pow(b),
        (1, _) => 1,
        (-1, _) => 1 - 2 * (b & 1),
        _ => 0,
    }
}

pub(super) fn compare(kind: CompareKind, a: View<'_>, b: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    fn apply<T: Copy + PartialOrd>(kind: CompareKind, a: &[T], b: &[T], out: &mut [u8]) {
        match kind {
            CompareKind::Eq => pairs(a, b, out, |a, b| u8::from(a == b)),
            CompareKind::Ne => pairs(a, b, out, |a, b| u8::from(a != b)),
            CompareKind::Lt => pairs(a, b, out, |a, b| u8::from(a < b)),
            CompareKind::Le => pairs(a, b, out, |a, b| u8::from(a <= b)),
            CompareKind::Gt => pairs(a, b, out, |a, b| u8::from(a > b)),
            CompareKind::Ge => pairs(a, b, out, |a, b| u8::from(a >= b)),
        }
    }
    if a.ty.dtype.is_float() {
        apply(kind, &a.f32s()?, &b.f32s()?, result.bytes);
    } else {
        apply(kind, &a.i64s()?, &b.i64s()?, result.bytes);
    }
    Ok(())
}

pub(super) fn select(operands: &[View<'_>], result: &mut ViewMut<'_>) -> Result<(), String> {
    let [mask, a, b] = [operands[0], operands[1], operands[2]];
    let size = result.ty.dtype.size() as usize;
    let chunks = a.bytes.chunks_exact(size).zip(b.bytes.chunks_exact(size));
    for ((out, (a, b)), mask) in result.bytes.chunks_exact_mut(size).zip(chunks).zip(mask.bytes) {
        out.copy_from_slice(if *mask != 0 { a } else { b });
    }
    Ok(())
}

pub(super) fn total(operands: &[View<'_>], result: &mut ViewMut<'_>) -> Result<(), String> {
    let terms = operands.iter().map(View::f32s).collect::<Result<Vec<_>, _>>()?;
    result.write_f32(|out| {
        for (index, out) in out.iter_mut().enumerate() {
            *out = terms.iter().fold(0.0, |sum, term| sum + term[index]);
        }
    })
}

pub(super) fn cast(x: View<'_>, result: &mut ViewMut<'_>) -> Result<(), String> {
    match (x.ty.dtype, result.ty.dtype) {
        (from, to) if from == to => result.bytes.copy_from_slice(x.bytes),
        (DType::F32, _) | (_, DType::F32) if x.ty.dtype.is_float() => result.round_f32(&x.f32s()?)?,
        (from, _) if from.is_float() => result.round_f32(&x.f32s()?)?,
        _ => result.round_i64(&x.i64s()?)?,
    }
    Ok(())
}

pub(super) fn swiglu(context: Context, operands: &[View<'_>], result: &mut ViewMut<'_>) -> Result<(), String> {
    let (gate, up) = (operands[0].f32s()?, operands[1].f32s()?);
    result.write_f32(|out| {
        by_rows(context, 1, WORK, out, |first, out| {
            for ((out, gate), up) in out.iter_mut().zip(&gate[first..]).zip(&up[first..]) {
                *out = gate * sigmoid(*gate) * up;
            }
        });
    })
}

pub(super) fn swiglu_grad(operands: &[View<'_>], results: &mut [ViewMut<'_>]) -> Result<(), String> {
    let (dy, gate, up) = (operands[0].f32s()?, operands[1].f32s()?, operands[2].f32s()?);
    let silu = derivative(UnaryKind::Silu);
    results[0].write_f32(|dgate| {
        for (index, out) in dgate.iter_mut().enumerate() {
            *out = dy[index] * up[index] * silu(gate[index]);
        }
    })?;
    results[1].write_f32(|dup| {
        for (index, out) in dup.iter_mut().enumerate() {
            *out = dy[index] * gate[index] * sigmoid(gate[index]);
        }
    })
}
