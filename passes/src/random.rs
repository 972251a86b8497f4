//! Numbers that follow from a seed: splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014).

/// A sequence of numbers that follow from a seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below a bound, which counts as one if it is zero.
    pub fn below(&mut self, bound: usize) -> usize {
        let number = mix(self.0);
        self.0 = self.0.wrapping_add(GOLDEN);
        (number % bound.max(1) as u64) as usize
    }

    /// An index of a list that is not empty.
    pub fn index(&mut self, length: usize) -> Option<usize> {
        (length > 0).then(|| self.below(length))
    }

    /// One of a list that is not empty.
    pub fn choose<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        self.index(all.len()).map(|index| &all[index])
    }
}

/// What the state of the sequence grows by from number to number.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The number that follows a state of the sequence: neighbours give what has nothing to do with each other.
pub fn mix(state: u64) -> u64 {
    let state = state.wrapping_add(GOLDEN);
    let state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of seed 1234567, as the authors' program prints them.
    #[test]
    fn numbers_are_those_of_splitmix64() {
        let mut random = Random(1_234_567);
        let first = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(first.map(|_| random.below(usize::MAX)), first);
    }
}
