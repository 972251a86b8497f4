//! How a window slides over a picture: shared by convolution and pooling.
//!
//! Where windows do not overlap, each row (or column) of results has rows of the picture of its own,
//! and so the picture can be divided there as it can over its channels. Elsewhere neighbours would have
//! to be exchanged, and the dimension stays whole.

use crate::factor::FactorRule;
use crate::sharding::ReduceKind;
use serde::{Deserialize, Serialize};

/// The steps of a window over height and width. Elements before and after the picture are padding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// From one window to the next.
    #[serde(default = "ones", skip_serializing_if = "are_ones")]
    pub stride: [u64; 2],
    /// Elements of padding above and to the left.
    #[serde(default, skip_serializing_if = "are_zeros")]
    pub low: [u64; 2],
    /// Elements of padding below and to the right.
    #[serde(default, skip_serializing_if = "are_zeros")]
    pub high: [u64; 2],
    /// From one element of a window to the next.
    #[serde(default = "ones", skip_serializing_if = "are_ones")]
    pub dilation: [u64; 2],
}

fn ones() -> [u64; 2] {
    [1, 1]
}

fn are_ones(sizes: &[u64; 2]) -> bool {
    *sizes == ones()
}

fn are_zeros(sizes: &[u64; 2]) -> bool {
    *sizes == [0, 0]
}

impl Default for Window {
    fn default() -> Self {
        Self { stride: ones(), low: [0, 0], high: [0, 0], dilation: ones() }
    }
}

/// The factors of height or width.
pub(super) struct Along {
    /// Those of the picture.
    pub picture: Vec<usize>,
    /// Those of the results, one per window.
    pub windows: Vec<usize>,
    /// That of the elements of a window.
    pub kernel: usize,
}

impl Window {
    /// How many elements a window spans.
    fn span(&self, axis: usize, kernel: u64) -> u64 {
        self.dilation[axis].saturating_mul(kernel.saturating_sub(1)).saturating_add(1)
    }

    /// How many windows of `kernel` elements there are in a picture of height and width `size`.
    pub fn count(&self, size: [u64; 2], kernel: [u64; 2]) -> Result<[u64; 2], String> {
        if self.stride.contains(&0) || self.dilation.contains(&0) || kernel.contains(&0) {
            return Err("strides, dilations and the sizes of a window are at least 1".to_string());
        }
        let mut count = [0; 2];
        for axis in [0, 1] {
            let padded = size[axis].checked_add(self.low[axis]).and_then(|size| size.checked_add(self.high[axis]));
            let padded = padded.ok_or("the padding is too large to count")?;
            let span = self.span(axis, kernel[axis]);
            let room = padded.checked_sub(span);
            let room = room.ok_or_else(|| format!("a window that spans {span} does not fit in {padded} elements"))?;
            count[axis] = room / self.stride[axis] + 1;
        }
        Ok(count)
    }

    /// Whether windows share no element, and every part of the picture has whole windows.
    fn is_apart(&self, axis: usize, size: u64, kernel: u64) -> bool {
        let is_padded = self.low[axis] > 0 || self.high[axis] > 0;
        !is_padded && self.span(axis, kernel) <= self.stride[axis] && size.is_multiple_of(self.stride[axis])
    }

    /// Adds the factors of height and width. `lacking` is the result that holds no windows and sums over
    /// them (the gradient of filters).
    pub(super) fn factors(
        &self,
        rule: &mut FactorRule,
        size: [u64; 2],
        kernel: [u64; 2],
        lacking: Option<usize>,
    ) -> [Along; 2] {
        let count = self.count(size, kernel).unwrap_or([1, 1]);
        [(0, "h"), (1, "w")].map(|(axis, name)| {
            let inner = rule.whole(format!("k{name}"), kernel[axis]);
            if !self.is_apart(axis, size[axis], kernel[axis]) {
                let windows = rule.whole(name, count[axis]);
                return Along {
                    picture: vec![rule.whole(format!("x{name}"), size[axis])],
                    windows: vec![windows],
                    kernel: inner,
                };
            }
            let windows = rule.parallel(name, count[axis]);
            rule.factors[windows].reduce.extend(lacking.map(|result| (result, ReduceKind::Sum)));
            let mut picture = vec![windows];
            if self.stride[axis] > 1 {
                picture.push(rule.whole(format!("s{name}"), self.stride[axis]));
            }
            Along { picture, windows: vec![windows], kernel: inner }
        })
    }

    /// The elements of the picture under one window, as ranges of the window's own elements and of the
    /// picture: `(first of the window, how many, first of the picture)`; the rest is padding.
    pub fn overlap(&self, axis: usize, size: u64, kernel: u64, window: u64) -> (u64, u64, u64) {
        let (start, dilation) = (window * self.stride[axis], self.dilation[axis]);
        let first = self.low[axis].saturating_sub(start).div_ceil(dilation).min(kernel);
        let limit = (size + self.low[axis]).saturating_sub(start).div_ceil(dilation).min(kernel);
        let from = start.saturating_add(first.saturating_mul(dilation)).saturating_sub(self.low[axis]);
        (first, limit.saturating_sub(first), from)
    }

    /// Whether one of `count` windows has no element of the picture.
    pub fn misses(&self, axis: usize, size: u64, kernel: u64, count: u64) -> bool {
        let is_missed = |at: u64| self.overlap(axis, size, kernel, at).1 == 0;
        let before = self.low[axis].div_ceil(self.stride[axis]).min(count);
        // A window that begins in the picture has an element of it. One that begins before it cannot step over it where
        // its elements are no farther apart than the picture is long; then the first reaches the least far.
        let looked_at = if self.dilation[axis] <= size { before.min(1) } else { before };
        (0..looked_at).any(is_missed) || count > 0 && is_missed(count - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_counted() {
        let same = Window { low: [1, 1], high: [1, 1], ..Window::default() };
        assert_eq!(same.count([7, 5], [3, 3]), Ok([7, 5]));
        let halved = Window { stride: [2, 2], ..same };
        assert_eq!(halved.count([7, 6], [3, 3]), Ok([4, 3]));
        assert!(Window::default().count([2, 2], [3, 1]).is_err());
        assert!(Window { stride: [0, 1], ..Window::default() }.count([2, 2], [1, 1]).is_err());
    }

    #[test]
    fn overlaps_leave_the_padding_out() {
        let window = Window { stride: [2, 1], low: [1, 0], high: [1, 0], dilation: [1, 2] };
        // Rows -1..2, 1..4, 3..6 of five.
        assert_eq!([0, 1, 2].map(|at| window.overlap(0, 5, 3, at)), [(1, 2, 0), (0, 3, 1), (0, 2, 3)]);
        assert_eq!(window.overlap(1, 5, 3, 0), (0, 3, 0));
        let wide = Window { low: [3, 0], dilation: [2, 1], ..Window::default() };
        assert_eq!(wide.overlap(0, 4, 3, 0), (2, 1, 1));
    }

    #[test]
    fn windows_that_miss_the_picture_are_seen_from_the_first_and_the_last() {
        let sizes = [0, 1, 2, 3, 5];
        for low in sizes {
            for (high, stride) in sizes.into_iter().flat_map(|high| [1, 2, 3].map(|stride| (high, stride))) {
                for (dilation, size) in
                    [1, 2, 3, 4].into_iter().flat_map(|dilation| [1, 2, 5].map(|size| (dilation, size)))
                {
                    let window =
                        Window { stride: [stride; 2], low: [low; 2], high: [high; 2], dilation: [dilation; 2] };
                    for kernel in [1, 2, 3] {
                        let Ok([count, _]) = window.count([size; 2], [kernel; 2]) else { continue };
                        let missed = (0..count).any(|at| window.overlap(0, size, kernel, at).1 == 0);
                        assert_eq!(window.misses(0, size, kernel, count), missed, "{window:?}, {kernel} in {size}");
                    }
                }
            }
        }
        // None is looked at more than it takes, and none is too far out to be counted.
        let long = Window::default();
        assert!(!long.misses(0, 1 << 56, 2, (1 << 56) - 1));
        let far = Window { low: [2, 0], dilation: [u64::MAX, 1], ..Window::default() };
        assert!(far.misses(0, 1, 1, 3));
    }
}
