//! Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3", SC11).
//!
//! Every backend makes the same bits, but for the logarithm, cosine and sine of the normal law, which are the
//! device's own, and the last bit of uniform numbers whose range is no power of two, where a device multiplies and adds
//! with one rounding. With `s` the stream, `i` the row-major index of an element
//! in the *global* shape and `u64` values split into (low, high) 32-bit words:
//!
//! * key `(seed.low, seed.high)`, counter `(j.low, j.high, s.low, s.high)` with `j = i / 4`; element
//!   `i` takes lane `i % 4` of the result;
//! * with a step operand `t` the key is lanes 0 and 1 of Philox under key `seed` and counter
//!   `(t.low, t.high, 0x7374_6570, 0xffff_ffff)`;
//! * *uniform*: `u = (x >> 8) * 2^-24`, in `[0, 1)`; the number is `low + (high - low) * u` in f32;
//! * *Bernoulli*: 1 where `(x >> 8) < ceil(p * 2^24)`, which is `u < p`;
//! * *normal*: lanes (0, 1) and (2, 3) are pairs `(a, b)`; `r = sqrt(-2 ln(((a >> 8) + 1) * 2^-24))`,
//!   `t = 2π (b >> 8) * 2^-24`; the even lane is `r cos t`, the odd one `r sin t` (Box and Muller,
//!   1958), in f32; the number is `mean + std * z`.

use shardc_ir::ops::{Distribution, Random};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;
/// `step` in ASCII; with the last stream word no stream of a graph has.
const STEP_COUNTER: [u32; 2] = [0x7374_6570, 0xFFFF_FFFF];

/// One block of four 32-bit numbers.
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let wide = |lane: usize, multiplier: u32| u64::from(counter[lane]) * u64::from(multiplier);
        let (first, second) = (wide(0, MULTIPLIERS[0]), wide(2, MULTIPLIERS[1]));
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

fn words(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// The key of a run's seed, and of a step where the numbers differ from step to step.
pub fn key(seed: u64, step: Option<u64>) -> [u32; 2] {
    let Some(step) = step else { return words(seed) };
    let [low, high] = words(step);
    let [first, second, ..] = philox([low, high, STEP_COUNTER[0], STEP_COUNTER[1]], words(seed));
    [first, second]
}

/// Block `index` of a stream.
pub fn block(key: [u32; 2], stream: u64, index: u64) -> [u32; 4] {
    let ([low, high], [stream_low, stream_high]) = (words(index), words(stream));
    philox([low, high, stream_low, stream_high], key)
}

/// A block's four lanes, distributed.
pub fn distribute(distribution: Distribution, block: [u32; 4]) -> [f32; 4] {
    const UNIT: f32 = 1.0 / 16_777_216.0;
    match distribution {
        Distribution::Uniform { low, high } => {
            let (low, width) = (low as f32, (high - low) as f32);
            block.map(|x| low + width * ((x >> 8) as f32 * UNIT))
        }
        Distribution::Bernoulli { p } => {
            let threshold = (p * 16_777_216.0).ceil();
            block.map(|x| f32::from(u8::from(f64::from(x >> 8) < threshold)))
        }
        Distribution::Normal { mean, std } => {
            let (mean, std) = (mean as f32, std as f32);
            let pair = |a: u32, b: u32| {
                let radius = (-2.0 * (((a >> 8) + 1) as f32 * UNIT).ln()).sqrt();
                let (sin, cos) = (std::f32::consts::TAU * ((b >> 8) as f32 * UNIT)).sin_cos();
                [mean + std * (radius * cos), mean + std * (radius * sin)]
            };
            let ([x, y], [z, w]) = (pair(block[0], block[1]), pair(block[2], block[3]));
            [x, y, z, w]
        }
    }
}

/// Fills the rows from `first_row` of a shard of shape `shape` of the operation's global tensor,
/// row-major; as many as `out` holds. `places` says which index of the first dimension each of the shard's is.
pub fn fill(op: &Random, step: Option<u64>, places: Option<&[i64]>, shape: &[u64], first_row: usize, out: &mut [f32]) {
    let whole = op.global.is_empty();
    let global: &[u64] = if whole { shape } else { &op.global };
    let zeros = vec![0; shape.len()];
    let start: &[u64] = if whole { &zeros } else { &op.start };
    let mut strides = vec![1u64; global.len()];
    for dim in (0..global.len().saturating_sub(1)).rev() {
        strides[dim] = strides[dim + 1] * global[dim + 1];
    }
    let key = key(op.seed, step);
    let row = shape.last().map_or(1, |size| *size as usize);
    if out.is_empty() || row == 0 {
        return;
    }
    let place = |dim: usize, index: u64| match places {
        Some(places) if dim == 0 => places.get(index as usize).map_or(0, |place| *place as u64),
        _ => start.get(dim).copied().unwrap_or(0) + index,
    };
    // The cached block serves the elements that share it, within a row and across rows.
    let mut cached = (u64::MAX, [0.0; 4]);
    for (index, out) in (first_row..).zip(out.chunks_mut(row)) {
        let (mut rest, mut first) = (index as u64, 0u64);
        for dim in (0..shape.len().saturating_sub(1)).rev() {
            let place = place(dim, rest % shape[dim]);
            first = first.wrapping_add(place.wrapping_mul(strides[dim]));
            rest /= shape[dim];
        }
        for (column, out) in (0..).zip(out) {
            let at = first.wrapping_add(place(shape.len().saturating_sub(1), column));
            if cached.0 != at / 4 {
                cached = (at / 4, distribute(op.distribution, block(key, op.stream, at / 4)));
            }
            *out = cached.1[(at % 4) as usize];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors of Random123's `kat_vectors` for `philox4x32 10`.
    #[test]
    fn known_answers() {
        let check = |counter, key, expect: [u32; 4]| assert_eq!(philox(counter, key), expect);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let check = |distribution, mean: f64, variance: f64| {
            let op = Random { distribution, stream: 3, seed: 7, global: vec![], start: vec![] };
            let mut out = vec![0.0; 40_000];
            fill(&op, None, None, &[200, 200], 0, &mut out);
            let actual = out.iter().map(|x| f64::from(*x)).sum::<f64>() / 4e4;
            let spread = out.iter().map(|x| (f64::from(*x) - actual).powi(2)).sum::<f64>() / 4e4;
            assert!((actual - mean).abs() < 0.02 && (spread - variance).abs() < 0.03, "{actual} {spread}");
        };
        check(Distribution::Normal { mean: 0.5, std: 1.0 }, 0.5, 1.0);
        check(Distribution::Uniform { low: -1.0, high: 1.0 }, 0.0, 1.0 / 3.0);
        check(Distribution::Bernoulli { p: 0.25 }, 0.25, 0.1875);
    }

    #[test]
    fn a_shard_makes_the_numbers_of_the_whole() {
        let distribution = Distribution::Normal { mean: 0.0, std: 1.0 };
        let op = Random { distribution, stream: 1, seed: 9, global: vec![], start: vec![] };
        let mut whole = vec![0.0; 5 * 7];
        fill(&op, Some(3), None, &[5, 7], 0, &mut whole);
        let shard = Random { global: vec![5, 7], start: vec![2, 3], ..op };
        let mut part = vec![0.0; 2 * 4];
        fill(&shard, Some(3), None, &[2, 4], 0, &mut part);
        assert_eq!(part[..4], whole[2 * 7 + 3..3 * 7]);
        assert_eq!(part[4..], whole[3 * 7 + 3..4 * 7]);
        // Rows that are given, in any order.
        let shard = Random { start: vec![0, 3], ..shard };
        fill(&shard, Some(3), Some(&[4, 1]), &[2, 4], 0, &mut part);
        assert_eq!(part[..4], whole[4 * 7 + 3..5 * 7]);
        assert_eq!(part[4..], whole[7 + 3..2 * 7]);
        let vector = Random { global: vec![35], start: vec![0], ..shard };
        fill(&vector, Some(3), Some(&[34, 0]), &[2], 0, &mut part[..2]);
        assert_eq!(part[..2], [whole[34], whole[0]]);
    }
}
