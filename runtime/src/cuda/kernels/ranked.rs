//! The largest elements of rows, and running sums. All compare and compute in f32.

use crate::cuda::kernel::Elem;
use cubecl::prelude::*;

/// The number that is as much larger than those of others as a float is, whatever its sign: of IEEE 754's total order, but
/// that what is not a number is the largest with either sign.
#[cube]
fn order(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let is_negative = bits >= 0x8000_0000u32;
    let key = select(is_negative, bits ^ 0xFFFF_FFFFu32, bits ^ 0x8000_0000u32);
    select((bits & 0x7FFF_FFFFu32) > 0x7F80_0000u32, bits | 0xFFFF_FFFFu32, key)
}

/// The `k` largest of each row of `columns` elements and their indices, one block per row. Each round takes the first of
/// those that come behind what the round before took.
#[cube]
pub fn top_k(
    x: &Array<Elem<0>>,
    values: &mut Array<Elem<0>>,
    indices: &mut Array<Elem<1>>,
    columns: u32,
    k: u32,
    #[comptime] threads: u32,
) {
    let (row, unit) = (CUBE_POS as usize, UNIT_POS);
    let start = row * columns as usize;
    let mut keys = SharedMemory::<u32>::new(comptime!(threads as usize));
    let mut places = SharedMemory::<u32>::new(comptime!(threads as usize));
    let last_key = RuntimeCell::<u32>::new(u32::new(0));
    let last_place = RuntimeCell::<u32>::new(u32::new(0));
    for round in 0..k {
        // Behind all columns stands none.
        let key = RuntimeCell::<u32>::new(u32::new(0));
        let place = RuntimeCell::<u32>::new(columns);
        let at = RuntimeCell::<u32>::new(unit);
        while at.read() < columns {
            let own = order(f32::cast_from(x[start + at.read() as usize]));
            let is_behind = own < last_key.read() || (own == last_key.read() && at.read() > last_place.read());
            if (round == 0u32 || is_behind) && (place.read() == columns || own > key.read()) {
                key.store(own);
                place.store(at.read());
            }
            at.store(at.read() + comptime!(threads));
        }
        keys[unit as usize] = key.read();
        places[unit as usize] = place.read();
        sync_cube();
        let half = RuntimeCell::<u32>::new(comptime!(threads / 2));
        while half.read() > 0u32 {
            if unit < half.read() {
                let (own, other) = (unit as usize, (unit + half.read()) as usize);
                let is_first = keys[other] > keys[own] || (keys[other] == keys[own] && places[other] < places[own]);
                if is_first {
                    keys[own] = keys[other];
                    places[own] = places[other];
                }
            }
            sync_cube();
            half.store(half.read() / 2u32);
        }
        last_key.store(keys[0]);
        last_place.store(places[0]);
        if unit == 0u32 {
            let to = row * k as usize + round as usize;
            values[to] = x[start + last_place.read() as usize];
            indices[to] = Elem::<1>::cast_from(last_place.read());
        }
        sync_cube();
    }
}

/// Adds each of `length` elements, `inner` apart from `first` on, to the sum of those before it, or behind it if `reverse`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn run(
    x: &Array<Elem<0>>,
    y: &mut Array<Elem<1>>,
    before: f32,
    first: u32,
    length: u32,
    inner: u32,
    #[comptime] reverse: bool,
) {
    let sum = RuntimeCell::<f32>::new(before);
    for step in 0..length {
        let index = if comptime!(reverse) { length - 1u32 - step } else { step };
        let at = (first + index * inner) as usize;
        sum.store(sum.read() + f32::cast_from(x[at]));
        y[at] = Elem::<1>::cast_from(sum.read());
    }
}

/// Running sums along the middle of `[blocks, length, inner]`; `n` lines in all.
#[cube]
pub fn cumsum(x: &Array<Elem<0>>, y: &mut Array<Elem<1>>, n: u32, length: u32, inner: u32, #[comptime] reverse: bool) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let first = at / inner * length * inner + at % inner;
        run(x, y, f32::new(0.0), first, length, inner, reverse);
    }
}

/// [`cumsum()`] where each `chunks` blocks are one: `sums` are the running sums `[blocks, inner]` of their totals.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn cumsum_chunks(
    x: &Array<Elem<0>>,
    sums: &Array<f32>,
    y: &mut Array<Elem<1>>,
    n: u32,
    length: u32,
    inner: u32,
    chunks: u32,
    #[comptime] reverse: bool,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let (block, column) = (at / inner, at % inner);
        let before = RuntimeCell::<f32>::new(f32::new(0.0));
        if comptime!(reverse) {
            if block % chunks + 1u32 < chunks {
                before.store(sums[((block + 1u32) * inner + column) as usize]);
            }
        } else {
            if block % chunks > 0u32 {
                before.store(sums[((block - 1u32) * inner + column) as usize]);
            }
        }
        run(x, y, before.read(), block * length * inner + column, length, inner, reverse);
    }
}
