//! 8-bit floats by arithmetic on bits.

use shardc_ir::DType;
use std::sync::LazyLock;

/// The layout of an 8-bit float.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// Bits of the mantissa.
    pub mantissa: u32,
    /// The exponent of the smallest normal number.
    pub least: i32,
    /// The largest number.
    pub largest: f32,
}

/// The code that stands for what is not a number.
const NAN: u8 = 0x7F;

impl Format {
    /// The layout of an element type, if it is an 8-bit float.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F8e4m3 => Some(Self { mantissa: 3, least: -6, largest: 448.0 }),
            DType::F8e5m2 => Some(Self { mantissa: 2, least: -14, largest: 57344.0 }),
            _ => None,
        }
    }

    /// The nearest number, ties to even; the largest for what is out of range, a NaN for what is not finite.
    pub fn encode(self, x: f32) -> u8 {
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        if !x.is_finite() {
            return sign | NAN;
        }
        let magnitude = x.abs().min(self.largest);
        let code = if magnitude < (self.least as f32).exp2() {
            // Where one unit is the least step, an addition rounds to it.
            let round = ((self.least - self.mantissa as i32 + 23) as f32).exp2();
            (magnitude + round).to_bits() - round.to_bits()
        } else {
            let (bits, dropped) = (magnitude.to_bits(), 23 - self.mantissa);
            let half = (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
            ((bits + half) >> dropped) - (((126 + self.least) as u32) << self.mantissa)
        };
        sign | code as u8
    }

    /// The number of a code.
    fn decode(self, code: u8) -> f32 {
        let magnitude = u32::from(code & 0x7F);
        let (exponent, mantissa) = (magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1));
        let step = ((self.least - self.mantissa as i32) as f32).exp2();
        let value = match exponent {
            0 => mantissa as f32 * step,
            _ => (mantissa + (1 << self.mantissa)) as f32 * step * ((exponent - 1) as f32).exp2(),
        };
        // Above the largest number lie infinities and NaNs; none is made of a finite number.
        let value = if value > self.largest { f32::NAN } else { value };
        if code & 0x80 == 0 { value } else { -value }
    }

    /// The numbers of all codes.
    pub fn table(self) -> &'static [f32; 256] {
        static TABLES: LazyLock<[[f32; 256]; 2]> = LazyLock::new(|| {
            let of = |dtype| Format::of(dtype).map_or([f32::NAN; 256], |format| numbers(format));
            [of(DType::F8e4m3), of(DType::F8e5m2)]
        });
        &TABLES[usize::from(self.mantissa == 2)]
    }
}

fn numbers(format: Format) -> [f32; 256] {
    let mut all = [0.0; 256];
    all.iter_mut().zip(0..=u8::MAX).for_each(|(number, code)| *number = format.decode(code));
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
                let value = format.table()[usize::from(code)];
                if code & 0x7F > largest {
                    assert!(value.is_nan(), "{format:?} {code:#x}");
                    continue;
                }
                assert_eq!(format.encode(value), code, "{format:?} {value}");
                if code < 0x80 {
                    assert!(value > last, "{format:?}: codes rise with their numbers");
                    last = value;
                }
            }
            assert_eq!(last, format.largest);
            assert_eq!(format.table().iter().filter(|value| value.is_nan()).count(), not_numbers);
        }
        // By the tables of the specification: the smallest numbers, and one.
        let [e4m3, e5m2] = formats();
        assert_eq!([e4m3.table()[1], e4m3.table()[8], e4m3.table()[0x38]], [1.0 / 512.0, 1.0 / 64.0, 1.0]);
        assert_eq!([e5m2.table()[1], e5m2.table()[4], e5m2.table()[0x3C]], [1.0 / 65536.0, 1.0 / 16384.0, 1.0]);
    }

    #[test]
    fn between_two_numbers_the_nearer_is_taken_and_of_a_tie_the_even() {
        for format in formats() {
            for code in (0..0x7E).filter(|code| format.table()[usize::from(code + 1)].is_finite()) {
                let [low, high] = [code, code + 1].map(|code| format.table()[usize::from(code)]);
                let middle = (low + high) / 2.0;
                let even = if code % 2 == 0 { code } else { code + 1 };
                assert_eq!(format.encode(middle), even, "{format:?} {middle}");
                assert_eq!(format.encode(f32::from_bits(middle.to_bits() - 1)), code, "{format:?} {middle}");
                assert_eq!(format.encode(f32::from_bits(middle.to_bits() + 1)), code + 1, "{format:?} {middle}");
                assert_eq!(format.encode(-middle), even | 0x80);
            }
            assert_eq!(format.table()[usize::from(format.encode(1e30))], format.largest);
            assert_eq!(format.table()[usize::from(format.encode(-1e30))], -format.largest);
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert!(format.table()[usize::from(format.encode(odd))].is_nan());
            }
        }
    }
}
