//! How long the arithmetic of a product of matrices takes: tiles, waves of tiles, depth.
//!
//! A kernel covers the result with tiles; each multiprocessor makes one at a time, so a result of
//! 133 tiles on 132 multiprocessors takes almost two waves. The library is taken to choose the best
//! of five tile shapes; smaller tiles waste less of a small result and reach less of the peak. A result
//! with few tiles (a weight's gradient) may be cut along its depth as well, into partial products that
//! are then added.

use super::machine::Machine;
use shardc_ir::TensorType;
use shardc_ir::ops::{Fused, Matmul, Op, ScaledMatmul};

/// Of a last wave that is not full, the share that is lost: persistent kernels and split products
/// fill the rest. Fitted to published runs (vTrain, Megatron-LM, llm-foundry; see [`Library`](super::Library)).
const LOST_WAVE: f64 = 0.7;
/// The rate of tiles of half and of a quarter of the largest size, relative to it; same fit.
const SMALLER: [f64; 2] = [0.935, 0.83];
/// The least depth of a part of a product that is cut along its depth.
const LEAST_DEPTH: f64 = 256.0;
/// A tile multiplies so much of the depth at a time; of what is less the rest is zeros.
const DEPTH: f64 = 64.0;

/// Sizes of a batch of products `[m, k] x [k, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// How many products.
    pub batch: f64,
    /// Rows of the result.
    pub m: f64,
    /// Columns of the result.
    pub n: f64,
    /// Depth.
    pub k: f64,
}

impl Sizes {
    /// The sizes of a contraction; `None` where its notation does not fit its operands.
    pub fn of(matmul: &Matmul, operands: &[TensorType]) -> Option<Self> {
        let (dims, sizes) = (matmul.dims().ok()?, matmul.sizes(operands).ok()?);
        let product = |letters: &[char]| {
            let size = |letter: &char| sizes.iter().find(|(known, _)| known == letter).map_or(1, |(_, size)| *size);
            letters.iter().map(size).product::<u64>() as f64
        };
        Some(Self { batch: product(&dims.batch), m: product(&dims.m), n: product(&dims.n), k: product(&dims.k) })
    }

    /// The sizes of products of equal sizes beside each other, as one batch.
    pub fn beside(region: &Fused, operands: &[TensorType]) -> Option<Self> {
        let first = region.steps.first()?;
        let Op::Matmul(matmul) = &first.op else { return None };
        let of: Vec<TensorType> = first.operands.iter().filter_map(|value| operands.get(*value).cloned()).collect();
        let sizes = Self::of(matmul, &of)?;
        Some(Self { batch: sizes.batch * region.steps.len() as f64, ..sizes })
    }

    /// The sizes of each product of a contraction of 8-bit floats, and how many run one after the other.
    pub fn of_scaled(matmul: &ScaledMatmul, operands: &[TensorType]) -> Option<(Self, f64)> {
        let ([m, n, k], count) = matmul.matrices(operands).ok()?;
        Some((Self { batch: 1.0, m: m as f64, n: n as f64, k: k as f64 }, count as f64))
    }
}

/// Bytes that are moved before a product whose summed dimensions lie apart in an operand, which is copied so that they are
/// one: those of a gradient that sums over samples what lies `[b, s, k]` in one factor and `[b, n, s]` in the other.
pub fn copied_bytes(matmul: &Matmul, operands: &[TensorType]) -> f64 {
    let (Ok(letters), Ok(sizes)) = (matmul.letters(), matmul.sizes(operands)) else { return 0.0 };
    let is_one = |letter: &char| sizes.iter().any(|(known, size)| known == letter && *size == 1);
    let summed = |letter: &char| letters[..2].iter().all(|own| own.contains(letter)) && !letters[2].contains(letter);
    let lies_apart = |own: &&[char]| {
        let mut parts = own.iter().filter(|letter| !is_one(letter)).map(summed).collect::<Vec<bool>>();
        parts.dedup();
        parts.into_iter().filter(|is_summed| *is_summed).count() > 1
    };
    let copied = letters[..2].iter().zip(operands).filter(|(own, _)| lies_apart(&own.as_slice()));
    copied.map(|(_, ty)| 2.0 * ty.bytes().0 as f64).sum()
}

/// How many times as long products take with a matrix whose rows do not begin at multiples of 16 bytes, which cannot be
/// copied as blocks: 1.7 to 3 times on an H200 beside products of the same sizes whose rows do (`bench/HISTORY.md`).
const UNALIGNED: f64 = 2.0;

/// The factor on the arithmetic of a product that reads or makes these matrices.
pub fn alignment<'a>(matrices: impl IntoIterator<Item = &'a TensorType>) -> f64 {
    let begins = |ty: &TensorType| {
        let row = ty.shape.last().copied().unwrap_or(1);
        row == 1 || (row * ty.dtype.size()).is_multiple_of(16)
    };
    if matrices.into_iter().all(begins) { 1.0 } else { UNALIGNED }
}

/// Seconds of arithmetic of a batch of products on a device whose large products run at `rate` FLOP/s.
pub fn seconds(sizes: Sizes, rate: f64, machine: Machine<'_>) -> f64 {
    let Sizes { batch, m, n, k } = sizes;
    let k = (k / DEPTH).ceil() * DEPTH;
    let Machine { device, library } = machine;
    let largest = device.matmul_tile.value.max(1.0).log2().round();
    let at_once = device.multiprocessors.value;
    // What a tile waits for before its first products is as long at any rate, and so of less depth at a lower one.
    let fastest = device.peak_bf16.value.max(device.peak_f16.value) * device.matmul_efficiency.value;
    let before = device.matmul_ramp.value * (rate / fastest).min(1.0);
    let ramp = |depth: f64| (depth + before) / depth;
    let mut best = f64::INFINITY;
    for (step, share) in [1.0, SMALLER[0], SMALLER[1]].into_iter().enumerate() {
        let log = (largest - step as f64).max(0.0);
        let (long, short) = ((log / 2.0).ceil().exp2(), (log / 2.0).floor().exp2());
        for (rows, columns) in [(long, short), (short, long)] {
            let tiles = (m / rows).ceil() * (n / columns).ceil() * batch;
            let time = |parts: f64| {
                let waves = tiles * parts / at_once;
                let waves = if waves < 1.0 { 1.0 } else { LOST_WAVE * waves.ceil() + (1.0 - LOST_WAVE) * waves };
                let depth = k / parts;
                waves * at_once * rows * columns * 2.0 * depth / (rate * share) * ramp(depth)
            };
            best = best.min(time(1.0));
            // As many parts as fill one or two waves; each is written and read once, in f32.
            let parts = [1.0, 2.0].map(|waves| (waves * at_once / tiles).floor());
            for parts in parts.into_iter().filter(|parts| *parts > 1.0 && k / parts >= LEAST_DEPTH) {
                if library.splits_products {
                    best = best.min(time(parts) + 8.0 * parts * batch * m * n / machine.bandwidth());
                }
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Profile;
    use crate::cost::Library;

    #[test]
    fn a_depth_that_is_no_whole_blocks_takes_as_long_as_the_next_that_is() {
        let device = Profile::find("h200").unwrap();
        let time = |k: f64| seconds(Sizes { batch: 64.0, m: 768.0, n: 384.0, k }, 1e12, Machine::own(&device));
        assert!(time(196.0) == time(256.0) && time(192.0) < time(193.0));
    }

    #[test]
    fn one_tile_more_than_a_wave_costs_most_of_another() {
        let device = Profile::find("h200").unwrap();
        let at_once = device.multiprocessors.value;
        let time = |tiles: f64| {
            let sizes = Sizes { batch: 1.0, m: 256.0 * tiles, n: 128.0, k: 65536.0 };
            seconds(sizes, 1e12, Machine::own(&device))
        };
        let (full, more) = (time(4.0 * at_once), time(4.0 * at_once + 4.0));
        assert!(more / full > 1.1, "{full} {more}");
        assert!((time(8.0 * at_once) / full - 2.0).abs() < 1e-9);
    }

    #[test]
    fn sums_that_lie_apart_are_copied_together() {
        let ty = |shape: [u64; 3]| TensorType::new(shardc_ir::DType::Bf16, shape);
        let bytes = |spec: &str, operands: [[u64; 3]; 2]| copied_bytes(&Matmul::new(spec), &operands.map(ty));
        assert_eq!(bytes("bsk,bsn->kn", [[4, 8, 2], [4, 8, 3]]), 0.0);
        assert_eq!(bytes("bks,bsn->kn", [[4, 2, 8], [4, 8, 3]]), 2.0 * 2.0 * 64.0);
        // Of one sample there is nothing to bring together.
        assert_eq!(bytes("bks,bsn->kn", [[1, 2, 8], [1, 8, 3]]), 0.0);
        assert_eq!(bytes("bks,bsn->bkn", [[4, 2, 8], [4, 8, 3]]), 0.0);
    }

    #[test]
    fn a_deep_product_with_few_tiles_fills_the_device() {
        let device = Profile::find("h200").unwrap();
        let machine = Machine::own(&device);
        let sizes = Sizes { batch: 1.0, m: 768.0, n: 768.0, k: 32768.0 };
        let cut = seconds(sizes, 1e15, machine);
        let whole = Machine { library: &Library { splits_products: false, ..Library::SHARDC }, ..machine };
        assert!(cut < 0.7 * seconds(sizes, 1e15, whole));
        // One of little depth is not cut.
        let shallow = Sizes { k: 256.0, ..sizes };
        assert_eq!(seconds(shallow, 1e15, machine), seconds(shallow, 1e15, whole));
    }
}
