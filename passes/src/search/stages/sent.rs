//! What a chunk of a pipeline leaves for the backward pass of others alone.
//!
//! A value that passes over a cut is there on both sides of it: as it was made, and as it came. In front of the cut it
//! may go once it is sent, where nothing there reads it any more: a block's result that the next block alone reads is
//! held behind the cut.

/// Values that pass over cuts, and that no chunk in front of the cut reads in the backward pass.
#[derive(Debug, Default)]
pub(super) struct Sent {
    /// Per place, where its values begin.
    begins: Vec<usize>,
    /// Where each is made, those of one place in that order, and the bytes of it and of all behind it there, by which of the
    /// three sums counts them.
    values: Vec<(usize, [f64; 3])>,
}

impl Sent {
    /// Of values with where they are made, and the last place such that a cut in front of it lets them pass like this.
    pub fn new(places: usize, mut all: Vec<([usize; 2], (usize, f64))>) -> Self {
        all.retain(|([made, last], _)| made < last);
        let mut own = Self { begins: vec![0; places + 2], values: Vec::new() };
        all.iter()
            .for_each(|([made, last], _)| own.begins[made + 2..=last + 1].iter_mut().for_each(|count| *count += 1));
        (1..own.begins.len()).for_each(|place| own.begins[place] += own.begins[place - 1]);
        let mut next = own.begins.clone();
        own.values.resize(own.begins.last().copied().unwrap_or(0), (0, [0.0; 3]));
        all.sort_by_key(|([made, _], _)| *made);
        for ([made, last], (sum, bytes)) in all {
            for next in &mut next[made + 1..=last] {
                own.values[*next].0 = made;
                own.values[*next].1[sum] = bytes;
                *next += 1;
            }
        }
        for place in own.begins.windows(2) {
            let mut behind = [0.0; 3];
            for (_, bytes) in own.values[place[0]..place[1]].iter_mut().rev() {
                behind.iter_mut().zip(bytes).for_each(|(behind, bytes)| {
                    *behind += *bytes;
                    *bytes = *behind;
                });
            }
        }
        own
    }

    /// What passes over a cut in front of a place of what is made from another place on.
    pub fn over(&self, [from, place]: [usize; 2]) -> [f64; 3] {
        let all = &self.values[self.begins[place]..self.begins[place + 1]];
        let first = all.partition_point(|(made, _)| *made < from);
        all.get(first).map_or([0.0; 3], |(_, bytes)| *bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_held_where_they_are_read() {
        // Made at 0 and read from 2 on; made at 1 and read at 2 and in front of it; made at 1 and read from 3 on.
        let sent = Sent::new(4, vec![([0, 2], (0, 1.0)), ([1, 1], (0, 2.0)), ([1, 3], (1, 4.0))]);
        let over = |from: usize, place: usize| sent.over([from, place]);
        assert_eq!([1, 2, 3].map(|place| over(0, place)), [[1.0, 0.0, 0.0], [1.0, 4.0, 0.0], [0.0, 4.0, 0.0]]);
        // A chunk holds what it made itself.
        assert_eq!([2, 3].map(|place| over(1, place)), [[0.0, 4.0, 0.0], [0.0, 4.0, 0.0]]);
        assert_eq!(over(2, 3), [0.0; 3]);
    }
}
