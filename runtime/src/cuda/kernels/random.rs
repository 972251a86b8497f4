//! Counter-based random numbers; [`crate::random`] says which.

use crate::cuda::kernel::Elem;
use cubecl::prelude::*;

/// What the numbers are distributed as; the kernel's two f32 scalars are its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Law {
    /// Normal: mean, standard deviation.
    Normal,
    /// Uniform: lower bound, width.
    Uniform,
    /// Bernoulli: below this of 2^24 it is 1.
    Bernoulli,
}

/// A shard of a global tensor: its shape, and where its elements are in the global order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// The shard's shape.
    pub shape: Vec<u32>,
    /// Per dimension, the distance between neighbours in the global tensor.
    pub strides: Vec<u32>,
    /// The first element's global index.
    pub first: u32,
}

/// Philox4x32-10 on counter `(a, b, c, d)`.
#[cube]
fn philox(a: u32, b: u32, c: u32, d: u32, low: u32, high: u32) -> Vector<u32, Const<4>> {
    let c0 = RuntimeCell::<u32>::new(a);
    let c1 = RuntimeCell::<u32>::new(b);
    let c2 = RuntimeCell::<u32>::new(c);
    let c3 = RuntimeCell::<u32>::new(d);
    let k0 = RuntimeCell::<u32>::new(low);
    let k1 = RuntimeCell::<u32>::new(high);
    #[unroll]
    for _ in 0..10u32 {
        let first_low = c0.read() * 0xD251_1F53u32;
        let first_high = c0.read().mul_hi(0xD251_1F53u32);
        let second_low = c2.read() * 0xCD9E_8D57u32;
        let second_high = c2.read().mul_hi(0xCD9E_8D57u32);
        let next0 = second_high ^ c1.read() ^ k0.read();
        let next2 = first_high ^ c3.read() ^ k1.read();
        c0.store(next0);
        c1.store(second_low);
        c2.store(next2);
        c3.store(first_low);
        k0.store(k0.read() + 0x9E37_79B9u32);
        k1.store(k1.read() + 0xBB67_AE85u32);
    }
    let mut out = Vector::<u32, Const<4>>::empty();
    out[0] = c0.read();
    out[1] = c1.read();
    out[2] = c2.read();
    out[3] = c3.read();
    out
}

/// Fills `y`, one thread an element. `step` is read where `stepped`; where `placed`, `places` says which index of the
/// first dimension each of the shard's is.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn random(
    step: &Array<Elem<1>>,
    places: &Array<Elem<2>>,
    y: &mut Array<Elem<0>>,
    n: u32,
    seed_low: u32,
    seed_high: u32,
    stream_low: u32,
    stream_high: u32,
    p: f32,
    q: f32,
    #[comptime] shard: Shard,
    #[comptime] law: Law,
    #[comptime] stepped: bool,
    #[comptime] placed: bool,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let rest = RuntimeCell::<u32>::new(at);
        let global = RuntimeCell::<u32>::new(u32::cast_from(comptime!(shard.first)));
        #[unroll]
        for back in 0..comptime!(shard.shape.len()) {
            let dim = comptime!(shard.shape.len() - 1 - back);
            let size = comptime!(shard.shape[dim]);
            let stride = comptime!(shard.strides[dim]);
            let own = rest.read() % size;
            let place = if comptime!(placed && dim == 0) { u32::cast_from(places[own as usize]) } else { own };
            global.store(global.read() + place * stride);
            rest.store(rest.read() / size);
        }
        let low = RuntimeCell::<u32>::new(seed_low);
        let high = RuntimeCell::<u32>::new(seed_high);
        if comptime!(stepped) {
            let now = u32::cast_from(step[0]);
            let own = philox(now, now * 0u32, 0x7374_6570u32, 0xFFFF_FFFFu32, seed_low, seed_high);
            low.store(own[0]);
            high.store(own[1]);
        }
        let block = philox(global.read() / 4u32, at * 0u32, stream_low, stream_high, low.read(), high.read());
        let lane = global.read() % 4u32;
        let a = select(lane < 2u32, block[0], block[2]);
        let b = select(lane < 2u32, block[1], block[3]);
        let own = select(lane % 2u32 == 0u32, a, b) >> 8u32;
        let unit = 0.000_000_059_604_645f32;
        let value = match law {
            Law::Uniform => p + q * (f32::cast_from(own) * unit),
            Law::Bernoulli => select(f32::cast_from(own) < p, 1.0f32, 0.0f32),
            Law::Normal => {
                let radius = (-2.0f32 * (f32::cast_from((a >> 8u32) + 1u32) * unit).ln()).sqrt();
                let turn = 6.283_185_5f32 * (f32::cast_from(b >> 8u32) * unit);
                p + q * (radius * select(lane % 2u32 == 0u32, turn.cos(), turn.sin()))
            }
        };
        y[at as usize] = Elem::<0>::cast_from(value);
    }
}
