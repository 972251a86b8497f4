//! 8-bit floats by arithmetic on bits.

use shardc_ir::DType;
use shardc_ir::float8::Format;
use std::sync::LazyLock;

/// The code that stands for what is not a number.
const NAN: u8 = 0x7F;

/// The nearest number, ties to even; the largest for what is out of range, a NaN for what is not finite.
pub fn encode(format: Format, x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    if !x.is_finite() {
        return sign | NAN;
    }
    let magnitude = x.abs().min(format.largest());
    let code = if magnitude < format.least_normal() {
        // Where one unit is the least step, an addition rounds to it.
        (magnitude + format.rounder()).to_bits() - format.rounder().to_bits()
    } else {
        let (bits, dropped) = (magnitude.to_bits(), 23 - format.mantissa);
        let half = (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
        ((bits + half) >> dropped) - (((126 + format.least) as u32) << format.mantissa)
    };
    sign | code as u8
}

/// The number of a code.
fn decode(format: Format, code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7F);
    let (exponent, mantissa) = (magnitude >> format.mantissa, magnitude & ((1 << format.mantissa) - 1));
    let value = match exponent {
        0 => mantissa as f32 * format.step(),
        _ => (mantissa + (1 << format.mantissa)) as f32 * format.step() * ((exponent - 1) as f32).exp2(),
    };
    // Above the largest number lie infinities and NaNs; none is made of a finite number.
    let value = if value > format.largest() { f32::NAN } else { value };
    if code & 0x80 == 0 { value } else { -value }
}

/// The numbers of all codes.
pub fn table(format: Format) -> &'static [f32; 256] {
    static TABLES: LazyLock<[[f32; 256]; 2]> = LazyLock::new(|| {
        let of = |dtype| Format::of(dtype).map_or([f32::NAN; 256], numbers);
        [of(DType::F8e4m3), of(DType::F8e5m2)]
    });
    &TABLES[usize::from(format.mantissa == 2)]
}

fn numbers(format: Format) -> [f32; 256] {
    let mut all = [0.0; 256];
    all.iter_mut().zip(0..=u8::MAX).for_each(|(number, code)| *number = decode(format, code));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn formats() -> [Format; 2] {
        [DType::F8e4m3, DType::F8e5m2].map(|dtype| Format::of(dtype).unwrap())
    }

    #[test]
    fn all_256_codes_are_numbers_that_round_to_themselves() {
        for (format, largest, not_numbers) in [(formats()[0], 0x7E, 2), (formats()[1], 0x7B, 8)] {
            let mut last = -1.0;
            for code in 0..=u8::MAX {
                let value = table(format)[usize::from(code)];
                if code & 0x7F > largest {
                    assert!(value.is_nan(), "{format:?} {code:#x}");
                    continue;
                }
                assert_eq!(encode(format, value), code, "{format:?} {value}");
                if code < 0x80 {
                    assert!(value > last, "{format:?}: codes rise with their numbers");
                    last = value;
                }
            }
            assert_eq!(last, format.largest());
            assert_eq!(table(format).iter().filter(|value| value.is_nan()).count(), not_numbers);
        }
        // By the tables of the specification: the smallest numbers, and one.
        let [e4m3, e5m2] = formats();
        assert_eq!([table(e4m3)[1], table(e4m3)[8], table(e4m3)[0x38]], [1.0 / 512.0, 1.0 / 64.0, 1.0]);
        assert_eq!([table(e5m2)[1], table(e5m2)[4], table(e5m2)[0x3C]], [1.0 / 65536.0, 1.0 / 16384.0, 1.0]);
    }

    #[test]
    fn between_two_numbers_the_nearer_is_taken_and_of_a_tie_the_even() {
        for format in formats() {
            for code in (0..0x7E).filter(|code| table(format)[usize::from(code + 1)].is_finite()) {
                let [low, high] = [code, code + 1].map(|code| table(format)[usize::from(code)]);
                let middle = (low + high) / 2.0;
                let even = if code % 2 == 0 { code } else { code + 1 };
                assert_eq!(encode(format, middle), even, "{format:?} {middle}");
                assert_eq!(encode(format, f32::from_bits(middle.to_bits() - 1)), code, "{format:?} {middle}");
                assert_eq!(encode(format, f32::from_bits(middle.to_bits() + 1)), code + 1, "{format:?} {middle}");
                assert_eq!(encode(format, -middle), even | 0x80);
            }
            assert_eq!(table(format)[usize::from(encode(format, 1e30))], format.largest());
            assert_eq!(table(format)[usize::from(encode(format, -1e30))], -format.largest());
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert!(table(format)[usize::from(encode(format, odd))].is_nan());
            }
        }
    }
}
