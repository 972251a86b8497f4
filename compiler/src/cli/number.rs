//! The numbers of flags, and why a text is none.

use shardc_passes::cluster::MOST_RANKS;
use std::ops::RangeInclusive;

/// A count of something that there must be.
///
/// # Errors
/// Says what it must be.
pub fn count(text: &str) -> Result<u64, String> {
    within(text, 1..=u64::MAX, "a whole number from 1")
}

/// A number of ranks.
///
/// # Errors
/// As [`count`].
pub fn ranks(text: &str) -> Result<u64, String> {
    within(text, 1..=MOST_RANKS, &format!("a whole number from 1 to {MOST_RANKS}"))
}

/// A number of anything, or of nothing.
///
/// # Errors
/// As [`count`].
pub fn whole(text: &str) -> Result<u64, String> {
    within(text, 0..=u64::MAX, "a whole number from 0")
}

fn within(text: &str, range: RangeInclusive<u64>, expect: &str) -> Result<u64, String> {
    let count = text.parse().ok().filter(|count| range.contains(count));
    count.ok_or_else(|| format!("it must be {expect}"))
}

/// A number with a fraction; whether it makes sense is for its reader to say.
///
/// # Errors
/// What is no number; what is none of 0 and would be rounded to it.
pub fn real(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "it must be a number, such as 0.1 or 3e-4".to_string())?;
    let digits = text.split(['e', 'E']).next().unwrap_or(text);
    if number == 0.0 && digits.contains(|digit: char| ('1'..='9').contains(&digit)) {
        return Err(format!("it must be 0, or a number of at least {:e}: less is not told from 0", f64::MIN_POSITIVE));
    }
    Ok(number)
}

/// Two numbers.
///
/// # Errors
/// Says what they must be.
pub fn pair(text: &str) -> Result<[f64; 2], String> {
    let numbers = text.split(',').map(|number| real(number.trim())).collect::<Result<Vec<_>, _>>();
    let expect = "it must be two numbers, such as 0.9,0.95";
    numbers.map_err(|_| expect)?.try_into().map_err(|_| expect.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let check = |text: &str, expect: Option<f64>| assert_eq!(real(text).ok(), expect, "{text}");
        check("1e-3", Some(1e-3));
        check("-1", Some(-1.0));
        check("0e-400", Some(0.0));
        check("1e-400", None);
        check("1e", None);
        assert_eq!(pair("0.9, 0.95"), Ok([0.9, 0.95]));
        assert!(pair("0.9").is_err() && pair("0.9,0.95,0.1").is_err() && pair("0.9,x").is_err());
        assert_eq!((count("3"), count("0").is_err(), count("-1").is_err()), (Ok(3), true, true));
        assert!(ranks("1048576").is_ok() && ranks("1048577").is_err());
    }
}
