//! Elementwise kernels: each thread loads one vector per operand, computes lane by lane in f32 (or
//! in the integer type itself) and stores one vector.

use crate::cuda::kernel::{Elem, Lanes, Pack, PackF32};
use cubecl::prelude::*;
use shardc_ir::ops::{BinaryKind, CompareKind, UnaryKind};

/// `y = f(x)`
#[cube]
pub fn unary(x: &Array<Pack<0>>, y: &mut Array<Pack<1>>, n: u32, #[comptime] kind: UnaryKind) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let a = x[at];
        let mut out = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<1>::cast_from(apply(f32::cast_from(a[lane]), kind));
        }
        y[at] = out;
    }
}

/// `dx = f'(x) * dy`
#[cube]
pub fn unary_grad(
    dy: &Array<Pack<0>>,
    x: &Array<Pack<0>>,
    dx: &mut Array<Pack<0>>,
    n: u32,
    #[comptime] kind: UnaryKind,
) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let cotangent = dy[at];
        let a = x[at];
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let slope = derivative(f32::cast_from(a[lane]), kind);
            out[lane] = Elem::<0>::cast_from(slope * f32::cast_from(cotangent[lane]));
        }
        dx[at] = out;
    }
}

/// `exp(x)` by the device's own power of two, whose relative error is some units in the last place of `x`.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
pub(super) fn quick_exp(x: f32) -> f32 {
    x.exp()
}

/// `1 / x` by the device's own reciprocal, of at most two units in the last place of error; 0 from 2^126 on.
#[cube(fast_math = FastMath::AllowReciprocal | FastMath::ReducedPrecision | FastMath::UnsignedZero | FastMath::NotInf)]
fn quick_recip(x: f32) -> f32 {
    1.0f32 / x
}

#[cube]
pub(super) fn sigmoid(x: f32) -> f32 {
    quick_recip(1.0f32 + quick_exp(-x))
}

/// The normal distribution's function: the logistic function of `x` times a polynomial in `x²`, whose coefficients make the
/// error of `x` times this the least beside its size and 0.003, 1.1e-6 of the two up to `|x| = 5.5`. Beyond, where it is
/// less than 2e-8 from 0 or 1, the polynomial stays as it is.
#[cube]
fn normal(x: f32) -> f32 {
    let square = min(x * x, 30.25f32);
    let high =
        9.097_318_7e-6f32 + square * (-3.716_075_5e-7f32 + square * (8.192_569e-9f32 - square * 7.614_571e-11f32));
    let low = 0.072_646_566f32 + square * (-4.796_886_6e-5f32 + square * (-1.170_357_5e-4f32 + square * high));
    sigmoid(x * (1.595_776_3f32 + square * low))
}

#[cube]
fn sign(x: f32) -> f32 {
    // Zeros keep their sign, and what is not a number stays so.
    select(x > 0.0f32, 1.0f32, select(x < 0.0f32, -1.0f32, x))
}

/// The argument of the tanh of GELU's approximation: `sqrt(2/pi) (x + 0.044715 x³)`.
#[cube]
fn gelu_inner(x: f32) -> f32 {
    0.797_884_56f32 * (x + 0.044715f32 * x * x * x)
}

#[cube]
pub(super) fn apply(x: f32, #[comptime] kind: UnaryKind) -> f32 {
    match kind {
        UnaryKind::Neg => -x,
        UnaryKind::Abs => x.abs(),
        UnaryKind::Sign => sign(x),
        UnaryKind::Exp => x.exp(),
        UnaryKind::Log => x.ln(),
        UnaryKind::Log1p => x.log1p(),
        UnaryKind::Sqrt => x.sqrt(),
        UnaryKind::Rsqrt => 1.0f32 / x.sqrt(),
        UnaryKind::Recip => 1.0f32 / x,
        UnaryKind::Sin => x.sin(),
        UnaryKind::Cos => x.cos(),
        UnaryKind::Tanh => x.tanh(),
        UnaryKind::Erf => x.erf(),
        UnaryKind::Sigmoid => sigmoid(x),
        // What is not a number stays so, here and below.
        UnaryKind::Relu => select(x < 0.0f32, 0.0f32, x),
        UnaryKind::Gelu => x * normal(x),
        // (1 + tanh(u)) / 2 is the logistic function of 2u, which takes one exponential.
        UnaryKind::GeluTanh => x * sigmoid(2.0f32 * gelu_inner(x)),
        UnaryKind::Silu => x * sigmoid(x),
        UnaryKind::Floor => x.floor(),
        UnaryKind::Ceil => x.ceil(),
        UnaryKind::Round => x.round(),
        UnaryKind::Detach => x,
        UnaryKind::Not => 1.0f32 - x,
    }
}

#[cube]
pub(super) fn derivative(x: f32, #[comptime] kind: UnaryKind) -> f32 {
    match kind {
        UnaryKind::Neg => x * 0.0f32 - 1.0f32,
        UnaryKind::Abs => sign(x),
        UnaryKind::Exp => x.exp(),
        UnaryKind::Log => 1.0f32 / x,
        UnaryKind::Log1p => 1.0f32 / (1.0f32 + x),
        UnaryKind::Sqrt => 0.5f32 / x.sqrt(),
        UnaryKind::Rsqrt => -0.5f32 / (x * x.sqrt()),
        UnaryKind::Recip => -1.0f32 / (x * x),
        UnaryKind::Sin => x.cos(),
        UnaryKind::Cos => -x.sin(),
        UnaryKind::Tanh => 1.0f32 - x.tanh() * x.tanh(),
        UnaryKind::Erf => 1.128_379_2f32 * (-x * x).exp(),
        UnaryKind::Sigmoid => sigmoid(x) * (1.0f32 - sigmoid(x)),
        UnaryKind::Relu => select(x > 0.0f32, 1.0f32, 0.0f32),
        UnaryKind::Gelu => normal(x) + 0.398_942_28f32 * x * quick_exp(-0.5f32 * (x * x)),
        UnaryKind::GeluTanh => {
            let s = sigmoid(2.0f32 * gelu_inner(x));
            let inner = 0.797_884_56f32 * (1.0f32 + 0.134145f32 * x * x);
            s + 2.0f32 * x * s * (1.0f32 - s) * inner
        }
        UnaryKind::Silu => sigmoid(x) * (1.0f32 + x * (1.0f32 - sigmoid(x))),
        UnaryKind::Sign
        | UnaryKind::Floor
        | UnaryKind::Ceil
        | UnaryKind::Round
        | UnaryKind::Detach
        | UnaryKind::Not => x * 0.0f32,
    }
}

/// An elementwise function of two operands, comparisons included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pair {
    /// Arithmetic.
    Binary(BinaryKind),
    /// A comparison: 1 where it holds, else 0.
    Compare(CompareKind),
}

/// `f(a, b)` in the kernel's computation type, its element type 3.
#[cube]
pub(super) fn combine(a: Elem<3>, b: Elem<3>, #[comptime] pair: Pair) -> Elem<3> {
    let one = Elem::<3>::cast_from(1u32);
    let zero = Elem::<3>::cast_from(0u32);
    match pair {
        Pair::Binary(BinaryKind::Add) => a + b,
        Pair::Binary(BinaryKind::Sub) => a - b,
        Pair::Binary(BinaryKind::Mul) => a * b,
        Pair::Binary(BinaryKind::And) => a * b,
        Pair::Binary(BinaryKind::Div) => a / b,
        // Of rounded quotients beyond the integers some divisors are left; what is left then may lie beyond either end.
        Pair::Binary(BinaryKind::Rem) => {
            let most = fma((a / b).floor() * (zero - one), b, a);
            let rest = fma((most / b).floor() * (zero - one), b, most);
            let inside = select(rest * b < zero, rest + b, rest);
            select(inside / b >= one, inside - b, inside)
        }
        Pair::Binary(BinaryKind::Pow) => a.powf(b),
        Pair::Binary(BinaryKind::Max) => select(a >= b, a, select(b > a, b, a + b)),
        Pair::Binary(BinaryKind::Or) => select(a > b, a, b),
        Pair::Binary(BinaryKind::Min) => select(a <= b, a, select(b < a, b, a + b)),
        Pair::Compare(CompareKind::Eq) => select(a == b, one, zero),
        Pair::Compare(CompareKind::Ne) => select(a != b, one, zero),
        Pair::Compare(CompareKind::Lt) => select(a < b, one, zero),
        Pair::Compare(CompareKind::Le) => select(a <= b, one, zero),
        Pair::Compare(CompareKind::Gt) => select(a > b, one, zero),
        Pair::Compare(CompareKind::Ge) => select(a >= b, one, zero),
    }
}

/// `y = f(a, b)`
#[cube]
pub fn binary(a: &Array<Pack<0>>, b: &Array<Pack<1>>, y: &mut Array<Pack<2>>, n: u32, #[comptime] pair: Pair) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let left = a[at];
        let right = b[at];
        let mut out = Pack::<2>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let value = combine(Elem::<3>::cast_from(left[lane]), Elem::<3>::cast_from(right[lane]), pair);
            out[lane] = Elem::<2>::cast_from(value);
        }
        y[at] = out;
    }
}

/// `y = f(a, b)`, where `b` is one number.
#[cube]
pub fn binary_scalar_right(
    a: &Array<Pack<0>>,
    b: &Array<Elem<1>>,
    y: &mut Array<Pack<2>>,
    n: u32,
    #[comptime] pair: Pair,
) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let left = a[at];
        let right = Elem::<3>::cast_from(b[0]);
        let mut out = Pack::<2>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<2>::cast_from(combine(Elem::<3>::cast_from(left[lane]), right, pair));
        }
        y[at] = out;
    }
}

/// `y = f(a, b)`, where `a` is one number.
#[cube]
pub fn binary_scalar_left(
    a: &Array<Elem<0>>,
    b: &Array<Pack<1>>,
    y: &mut Array<Pack<2>>,
    n: u32,
    #[comptime] pair: Pair,
) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let left = Elem::<3>::cast_from(a[0]);
        let right = b[at];
        let mut out = Pack::<2>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<2>::cast_from(combine(left, Elem::<3>::cast_from(right[lane]), pair));
        }
        y[at] = out;
    }
}

/// `y = scale * x + offset`, computed in the kernel's element type 3.
#[cube]
pub fn affine(x: &Array<Pack<0>>, y: &mut Array<Pack<1>>, n: u32, scale: f32, offset: f32) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let a = x[at];
        let mut out = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let value = Elem::<3>::cast_from(a[lane]) * Elem::<3>::cast_from(scale) + Elem::<3>::cast_from(offset);
            out[lane] = Elem::<1>::cast_from(value);
        }
        y[at] = out;
    }
}

/// An integer from its parts: how many times `2^24`, and what is left. Each is a float without being rounded.
#[cube]
fn whole(high: f32, low: f32) -> Elem<3> {
    Elem::<3>::cast_from(high) * Elem::<3>::cast_from(16_777_216.0f32) + Elem::<3>::cast_from(low)
}

/// `y = scale * x + offset` of integers, which are given by their parts, computed in the kernel's element type 3.
#[cube]
pub fn affine_whole(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<1>>,
    n: u32,
    scale_high: f32,
    scale_low: f32,
    offset_high: f32,
    offset_low: f32,
) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let a = x[at];
        let mut out = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let value = Elem::<3>::cast_from(a[lane]) * whole(scale_high, scale_low) + whole(offset_high, offset_low);
            out[lane] = Elem::<1>::cast_from(value);
        }
        y[at] = out;
    }
}

/// `y = mask ? a : b`
#[cube]
pub fn choose(mask: &Array<Pack<0>>, a: &Array<Pack<1>>, b: &Array<Pack<1>>, y: &mut Array<Pack<1>>, n: u32) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let m = mask[at];
        let left = a[at];
        let right = b[at];
        let mut out = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = select(u32::cast_from(m[lane]) != 0u32, left[lane], right[lane]);
        }
        y[at] = out;
    }
}

/// `y = x` in another element type; to a bool where `to_bool`.
#[cube]
pub fn convert(x: &Array<Pack<0>>, y: &mut Array<Pack<1>>, n: u32, #[comptime] to_bool: bool) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let a = x[at];
        let mut out = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            if comptime!(to_bool) {
                let one = Elem::<1>::cast_from(1u32);
                let zero = Elem::<1>::cast_from(0u32);
                out[lane] = select(a[lane] != Elem::<0>::cast_from(0u32), one, zero);
            } else {
                out[lane] = Elem::<1>::cast_from(a[lane]);
            }
        }
        y[at] = out;
    }
}

/// Every element of `y` becomes `value`.
#[cube]
pub fn fill(y: &mut Array<Pack<0>>, n: u32, value: f32) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        y[at] = Pack::<0>::cast_from(value);
    }
}

/// `y += x`
#[cube]
pub fn accumulate(x: &Array<Pack<0>>, y: &mut Array<Pack<1>>, n: u32) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let a = x[at];
        let b = y[at];
        let mut out = Pack::<1>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<1>::cast_from(Elem::<2>::cast_from(a[lane]) + Elem::<2>::cast_from(b[lane]));
        }
        y[at] = out;
    }
}

/// `y = gate * sigmoid(gate) * up`
#[cube]
pub fn swiglu(gate: &Array<Pack<0>>, up: &Array<Pack<0>>, y: &mut Array<Pack<0>>, n: u32) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let g = gate[at];
        let u = up[at];
        let mut out = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let a = f32::cast_from(g[lane]);
            out[lane] = Elem::<0>::cast_from(a * sigmoid(a) * f32::cast_from(u[lane]));
        }
        y[at] = out;
    }
}

/// The derivative of `swiglu`.
#[cube]
pub fn swiglu_grad(
    dy: &Array<Pack<0>>,
    gate: &Array<Pack<0>>,
    up: &Array<Pack<0>>,
    dgate: &mut Array<Pack<0>>,
    dup: &mut Array<Pack<0>>,
    n: u32,
) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let cotangent = dy[at];
        let g = gate[at];
        let u = up[at];
        let mut out_gate = Pack::<0>::empty();
        let mut out_up = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let d = f32::cast_from(cotangent[lane]);
            let a = f32::cast_from(g[lane]);
            let s = sigmoid(a);
            out_gate[lane] = Elem::<0>::cast_from(d * f32::cast_from(u[lane]) * s * (1.0f32 + a * (1.0f32 - s)));
            out_up[lane] = Elem::<0>::cast_from(d * a * s);
        }
        dgate[at] = out_gate;
        dup[at] = out_up;
    }
}

/// `1 - e^x` for `x <= 0`, without cancellation near zero.
#[cube]
fn one_minus_exp(x: f32) -> f32 {
    let series = -x * (1.0f32 + x * (0.5f32 + x * (0.166_666_67f32 + x * (0.041_666_668f32 + x * 0.008_333_334f32))));
    select(x > -0.1f32, series, 1.0f32 - x.exp())
}

/// Sets `found[0]` where an element is infinite and `found[1]` where one is not a number. It looks at
/// bits, since a compiler may take all numbers for finite.
#[cube]
pub fn not_finite(x: &Array<Pack<0>>, found: &mut Array<u32>, n: u32) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let a = x[at];
        #[unroll]
        for lane in 0..Lanes::value() {
            let bits = u32::reinterpret(f32::cast_from(a[lane])) & 0x7FFF_FFFFu32;
            if bits == 0x7F80_0000u32 {
                found[0] = 1u32;
            }
            if bits > 0x7F80_0000u32 {
                found[1] = 1u32;
            }
        }
    }
}

/// One AdamW update; see [`shardc_ir::ops::Adamw`]. Outputs may be the inputs' own memory: a thread
/// reads all it needs before it writes. `log_beta` is the logarithm of the decay and `rest` is
/// `1 - beta`, both rounded from f64, so that neither loses digits. `cast` is the new parameter in another type, written
/// if `casts` says so.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn adamw(
    parameter: &Array<Pack<0>>,
    gradient: &Array<Pack<1>>,
    m: &Array<Pack<2>>,
    v: &Array<Pack<2>>,
    gradient_scale: &Array<f32>,
    learning_rate: &Array<f32>,
    step: &Array<f32>,
    new_parameter: &mut Array<Pack<0>>,
    new_m: &mut Array<Pack<2>>,
    new_v: &mut Array<Pack<2>>,
    cast: &mut Array<Pack<3>>,
    n: u32,
    log_beta1: f32,
    log_beta2: f32,
    rest1: f32,
    rest2: f32,
    eps: f32,
    weight_decay: f32,
    #[comptime] casts: bool,
) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let (scale, rate, step) = (gradient_scale[0], learning_rate[0], step[0]);
        adamw_vector(
            parameter,
            gradient,
            m,
            v,
            new_parameter,
            new_m,
            new_v,
            cast,
            at,
            at,
            at,
            at,
            at,
            at,
            at,
            at,
            scale,
            rate,
            step,
            log_beta1,
            log_beta2,
            rest1,
            rest2,
            eps,
            weight_decay,
            casts,
        );
    }
}

/// [`adamw()`] of one vector, each tensor's at a place of its own.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn adamw_vector(
    parameter: &Array<Pack<0>>,
    gradient: &Array<Pack<1>>,
    m: &Array<Pack<2>>,
    v: &Array<Pack<2>>,
    new_parameter: &mut Array<Pack<0>>,
    new_m: &mut Array<Pack<2>>,
    new_v: &mut Array<Pack<2>>,
    cast: &mut Array<Pack<3>>,
    at_p: usize,
    at_g: usize,
    at_m: usize,
    at_v: usize,
    to_p: usize,
    to_m: usize,
    to_v: usize,
    to_cast: usize,
    scale: f32,
    rate: f32,
    step: f32,
    log_beta1: f32,
    log_beta2: f32,
    rest1: f32,
    rest2: f32,
    eps: f32,
    weight_decay: f32,
    #[comptime] casts: bool,
) {
    let old_p = parameter[at_p];
    let old_g = gradient[at_g];
    let old_m = m[at_m];
    let old_v = v[at_v];
    let is_finite = u32::reinterpret(scale) & 0x7F80_0000u32 != 0x7F80_0000u32;
    let correction1 = one_minus_exp(step * log_beta1);
    let correction2 = one_minus_exp(step * log_beta2);
    let mut out_p = Pack::<0>::empty();
    let mut out_m = Pack::<2>::empty();
    let mut out_v = Pack::<2>::empty();
    #[unroll]
    for lane in 0..Lanes::value() {
        let g = f32::cast_from(old_g[lane]) * scale;
        let p = f32::cast_from(old_p[lane]) * (1.0f32 - rate * weight_decay);
        let moment1 = f32::cast_from(old_m[lane]) * (1.0f32 - rest1) + rest1 * g;
        let moment2 = f32::cast_from(old_v[lane]) * (1.0f32 - rest2) + rest2 * g * g;
        let denominator = (moment2 / correction2).sqrt() + eps;
        let next = p - rate * (moment1 / correction1) / denominator;
        out_p[lane] = select(is_finite, Elem::<0>::cast_from(next), old_p[lane]);
        out_m[lane] = select(is_finite, Elem::<2>::cast_from(moment1), old_m[lane]);
        out_v[lane] = select(is_finite, Elem::<2>::cast_from(moment2), old_v[lane]);
    }
    new_parameter[to_p] = out_p;
    new_m[to_m] = out_m;
    new_v[to_v] = out_v;
    if comptime!(casts) {
        let mut out = Pack::<3>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            out[lane] = Elem::<3>::cast_from(out_p[lane]);
        }
        cast[to_cast] = out;
    }
}

/// Rotates pairs by the position's angle; `n` counts vectors of half rows. `x` is `[b, s, h, 2 half]`
/// and the tables are `[s, half]`, `half` in vectors.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn rotary(
    x: &Array<Pack<0>>,
    cos: &Array<PackF32>,
    sin: &Array<PackF32>,
    y: &mut Array<Pack<0>>,
    n: u32,
    heads: u32,
    positions: u32,
    half: u32,
    direction: f32,
) {
    let at = ABSOLUTE_POS;
    if at < n as usize {
        let half = half as usize;
        let column = at % half;
        let row = at / half;
        let position = (row / heads as usize) % positions as usize;
        let c = cos[position * half + column];
        let s = sin[position * half + column];
        let first = x[row * 2 * half + column];
        let second = x[row * 2 * half + half + column];
        let mut out_first = Pack::<0>::empty();
        let mut out_second = Pack::<0>::empty();
        #[unroll]
        for lane in 0..Lanes::value() {
            let a = f32::cast_from(first[lane]);
            let b = f32::cast_from(second[lane]);
            let turn = s[lane] * direction;
            out_first[lane] = Elem::<0>::cast_from(a * c[lane] - b * turn);
            out_second[lane] = Elem::<0>::cast_from(b * c[lane] + a * turn);
        }
        y[row * 2 * half + column] = out_first;
        y[row * 2 * half + half + column] = out_second;
    }
}
