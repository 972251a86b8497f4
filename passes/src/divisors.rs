//! The divisors of a number.

/// All divisors, in order.
pub(crate) fn divisors(number: u64) -> Vec<u64> {
    let root = number.isqrt();
    let low: Vec<u64> = (1..=root).filter(|low| number.is_multiple_of(*low)).collect();
    let high = low.iter().rev().map(|low| number / low).filter(|high| *high > root);
    low.iter().copied().chain(high).collect()
}

/// The least of the divisors of a number that is at least so much; none stays none.
pub(crate) fn at_least(least: u64, divisors: &[u64]) -> u64 {
    let above = divisors.partition_point(|divisor| *divisor < least);
    divisors.get(above).copied().filter(|_| least > 0).unwrap_or(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_in_order() {
        assert_eq!(divisors(0), [0; 0]);
        assert_eq!(divisors(1), [1]);
        assert_eq!(divisors(12), [1, 2, 3, 4, 6, 12]);
        assert_eq!(divisors(16), [1, 2, 4, 8, 16]);
        let of_many = divisors(1 << 32);
        assert_eq!((of_many.len(), of_many.last()), (33, Some(&(1 << 32))));
    }

    #[test]
    fn the_least_is_no_less_than_asked() {
        let of_12 = [0, 1, 5, 6, 7, 12].map(|least| at_least(least, &divisors(12)));
        assert_eq!(of_12, [0, 1, 6, 6, 12, 12]);
    }
}
