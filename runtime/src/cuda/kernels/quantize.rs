//! Tensors in 8-bit floats. The codes are made by arithmetic on bits, four to a word, so that they are the same
//! on every device.

use super::fold::block_max;
use crate::cuda::kernel::{Lanes, Pack};
use cubecl::prelude::*;
use shardc_ir::float8::Format;

/// The sides of the square of elements that a block exchanges: of either arrangement, a line of memory.
pub const TILE: u32 = 128;

/// Units of a block.
pub const UNITS: u32 = 256;

/// The smallest power of two by which numbers up to `largest` must be divided: block `b` takes the largest of
/// `length` maxima. What is above 1.75 times a power of two needs the next one.
#[cube]
pub fn quantization_scale(
    x: &Array<f32>,
    y: &mut Array<f32>,
    length: u32,
    #[comptime] exponent: u32,
    #[comptime] threads: u32,
) {
    let block = CUBE_POS as usize;
    let length = length as usize;
    let state = RuntimeCell::<f32>::new(f32::new(0.0) * 1.0f32);
    let at = RuntimeCell::<usize>::new(UNIT_POS as usize);
    while at.read() < length {
        state.store(max(state.read(), x[block * length + at.read()]));
        at.store(at.read() + comptime!(threads as usize));
    }
    let largest = u32::reinterpret(block_max(state.read(), threads));
    if UNIT_POS == 0 {
        let above = select(largest & 0x007F_FFFFu32 > 0x0060_0000u32, 1u32, 0u32);
        let biased = max((largest >> 23u32) + above, comptime!(exponent + 1));
        let biased = min(biased - comptime!(exponent), 253u32);
        y[block] = f32::reinterpret(biased << 23u32);
    }
}

/// The code of a number: rounded to nearest even, the largest for what is out of range, a NaN for what is not
/// finite.
#[cube]
fn encode(x: f32, #[comptime] format: Format) -> u32 {
    let all = u32::reinterpret(x);
    let sign = (all >> 24u32) & 0x80u32;
    let bits = min(all & 0x7FFF_FFFFu32, comptime!(format.largest().to_bits()));
    // Where one unit is the least step, an addition rounds to it.
    let round = comptime!(format.rounder());
    let small = u32::reinterpret(f32::reinterpret(bits) + round) - comptime!(format.rounder().to_bits());
    let dropped = comptime!(23 - format.mantissa);
    let half = comptime!((1u32 << (22 - format.mantissa)) - 1) + ((bits >> dropped) & 1u32);
    let normal = ((bits + half) >> dropped) - comptime!(((126 + format.least) as u32) << format.mantissa);
    let code = select(bits < comptime!(format.least_normal().to_bits()), small, normal);
    let is_finite = all & 0x7F80_0000u32 != 0x7F80_0000u32;
    sign | select(is_finite, code, 0x7Fu32)
}

/// Divides matrices `[rows, columns]` by their scales, of which `shared` after each other have one, and writes them
/// as they lie and exchanged, four codes to a word. The grid is (columns / [`TILE`], rows / [`TILE`], matrices). A
/// unit takes squares of four elements; its words of the exchanged matrix pass through shared memory, to be
/// written side by side, in an order in which no two units of a warp meet in a bank.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn quantize(
    x: &Array<Pack<0>>,
    scales: &Array<f32>,
    whole: &mut Array<u32>,
    exchanged: &mut Array<u32>,
    rows: u32,
    columns: u32,
    shared: u32,
    #[comptime] format: Format,
) {
    let mut tile = SharedMemory::<u32>::new(comptime!((TILE * TILE / 4) as usize));
    let matrix = CUBE_POS_Z;
    let first_row = CUBE_POS_Y * comptime!(TILE);
    let first_column = CUBE_POS_X * comptime!(TILE);
    // One over a power of two, by its exponent.
    let inverse = f32::reinterpret(0x7F00_0000u32 - u32::reinterpret(scales[(matrix / shared) as usize]));
    #[unroll]
    for step in 0..comptime!(TILE * TILE / 16 / UNITS) {
        let square = step * comptime!(UNITS) + UNIT_POS;
        let down = square / comptime!(TILE / 4);
        let across = square % comptime!(TILE / 4);
        let row = first_row + down * 4u32;
        let column = first_column + across * 4u32;
        if row < rows && column < columns {
            let mut turned = Array::<u32>::new(4usize);
            #[unroll]
            for lane in 0..4usize {
                turned[lane] = u32::new(0);
            }
            #[unroll]
            for line in 0..4u32 {
                let at = ((matrix * rows + row + line) * (columns / 4u32) + column / 4u32) as usize;
                let four = x[at];
                let packed = RuntimeCell::<u32>::new(u32::new(0));
                #[unroll]
                for lane in 0..Lanes::value() {
                    let code = encode(f32::cast_from(four[lane]) * inverse, format);
                    packed.store(packed.read() | (code << (8u32 * lane as u32)));
                    turned[lane] = turned[lane] | (code << (8u32 * line));
                }
                whole[at] = packed.read();
            }
            #[unroll]
            for lane in 0..4u32 {
                let place = (across * 4u32 + lane) * comptime!(TILE / 4) + (down ^ across);
                tile[place as usize] = turned[lane as usize];
            }
        }
    }
    sync_cube();
    #[unroll]
    for step in 0..comptime!(TILE * TILE / 4 / UNITS) {
        let word = step * comptime!(UNITS) + UNIT_POS;
        let down = word % comptime!(TILE / 4);
        let across = word / comptime!(TILE / 4);
        let row = first_row + down * 4u32;
        let column = first_column + across;
        if row < rows && column < columns {
            let at = (matrix * columns + column) * (rows / 4u32) + row / 4u32;
            exchanged[at as usize] = tile[(across * comptime!(TILE / 4) + (down ^ (across / 4u32))) as usize];
        }
    }
}
