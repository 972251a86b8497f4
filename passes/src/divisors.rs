//! The divisors of a number.

use std::sync::LazyLock;

/// Numbers below this one are asked for again and again, as numbers of copies.
const FEW: u64 = 512;

/// The divisors of each.
static OF_FEW: LazyLock<Vec<Vec<u64>>> = LazyLock::new(|| (0..FEW).map(divisors).collect());

/// All divisors, in order.
pub(crate) fn divisors(number: u64) -> Vec<u64> {
    let root = number.isqrt();
    let low: Vec<u64> = (1..=root).filter(|low| number.is_multiple_of(*low)).collect();
    let high = low.iter().rev().map(|low| number / low).filter(|high| *high > root);
    low.iter().copied().chain(high).collect()
}

/// The least divisor of a number that is at least so much; none, or more than the number, stays what it is.
pub(crate) fn at_least(least: u64, number: u64) -> u64 {
    let below = |all: &[u64]| all.get(all.partition_point(|divisor| *divisor < least)).copied();
    let found = match OF_FEW.get(number as usize) {
        _ if least == 0 => None,
        Some(all) => below(all),
        None => below(&divisors(number)),
    };
    found.unwrap_or(least)
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
        let of_12 = [0, 1, 5, 6, 7, 12, 13].map(|least| at_least(least, 12));
        assert_eq!(of_12, [0, 1, 6, 6, 12, 12, 13]);
        for number in 1..200 {
            for least in 1..=number {
                let found = divisors(number).into_iter().find(|divisor| *divisor >= least);
                assert_eq!(Some(at_least(least, number)), found, "{least} of {number}");
            }
        }
    }
}
