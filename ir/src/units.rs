//! Quantities that cross crates: never a bare number.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident($inner:ty), $add:path, $times:path) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self($add(self.0, other.0))
            }
        }
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }
        impl Mul<$inner> for $name {
            type Output = Self;
            fn mul(self, factor: $inner) -> Self {
                Self($times(self.0, factor))
            }
        }
        impl Div<$inner> for $name {
            type Output = Self;
            fn div(self, divisor: $inner) -> Self {
                Self(self.0 / divisor)
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(values: I) -> Self {
                values.fold(Self::default(), Add::add)
            }
        }
    };
}

quantity! {
    /// A time in seconds.
    Seconds(f64), Add::add, Mul::mul
}
quantity! {
    /// Floating-point operations (a multiply-add counts as two).
    Flops(f64), Add::add, Mul::mul
}
quantity! {
    /// A size in bytes. More than can be counted are the most that there are: what compares sizes with memory refuses them.
    Bytes(u64), u64::saturating_add, u64::saturating_mul
}

impl Eq for Bytes {}
impl PartialOrd<u64> for Bytes {
    fn partial_cmp(&self, other: &u64) -> Option<std::cmp::Ordering> {
        self.0.partial_cmp(other)
    }
}
impl PartialEq<u64> for Bytes {
    fn eq(&self, other: &u64) -> bool {
        self.0 == *other
    }
}

#[expect(clippy::derive_ord_xor_partial_ord, reason = "both compare the one number")]
impl Ord for Bytes {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0;
        match seconds.abs() {
            // What rounds to nothing is nothing.
            s if !(5e-9..1.0).contains(&s) => write!(f, "{seconds:.2} s"),
            s if s >= 1e-3 => write!(f, "{:.2} ms", seconds * 1e3),
            _ => write!(f, "{:.2} us", seconds * 1e6),
        }
    }
}

/// The units in which sizes are printed.
const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl Bytes {
    /// The least size of at least so many bytes that is printed to the byte.
    pub fn rounded_up(self) -> Self {
        let unit = UNITS.iter().find(|(_, size)| self.0 >= *size).map_or(1, |(_, size)| *size);
        let hundredths = (u128::from(self.0) * 100).div_ceil(u128::from(unit));
        Self((hundredths * u128::from(unit)).div_ceil(100).min(u128::from(u64::MAX)) as u64)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, size) in UNITS {
            if self.0 >= size {
                return write!(f, "{:.2} {name}", self.0 as f64 / size as f64);
            }
        }
        write!(f, "{} B", self.0)
    }
}

impl fmt::Display for Flops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n >= 1e12 => write!(f, "{:.2} TFLOP", n / 1e12),
            n if n >= 1e9 => write!(f, "{:.2} GFLOP", n / 1e9),
            n => write!(f, "{n:.0} FLOP"),
        }
    }
}

/// The largest number that divides both; the other, if one of them is 0.
pub fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// So many of something: `1 node`, `2 nodes`.
pub fn counted(count: u64, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

/// A number as a person writes it: with an exponent where there would be many zeros.
pub fn number_text(value: f64) -> String {
    let is_far = value != 0.0 && value.is_finite() && !(1e-6..1e15).contains(&value.abs());
    if is_far { format!("{value:e}") } else { value.to_string() }
}
