//! Convolutions of few channels, as ones of more whose rows begin where matrix units want them.
//!
//! Where windows move by several elements, so many of those become one with the channels of all: the windows then move
//! by one and have fewer elements (space to depth). What is missing to a multiple is zero. What cuDNN does by itself for the 3 colours of a picture takes two to six times as long (ResNet-50's
//! first convolution on an H200).

use super::movement::Move;
use super::{Arg, Select, dense};
use shardc_ir::TensorType;
use shardc_ir::ops::Window;

/// Of how many channels, or a multiple, rows begin where matrix units want them.
pub(super) const ALIGNED: u64 = 8;

/// A convolution with as many channels.
pub(super) struct Aligned {
    /// The types of its pictures and filters, and those of what they are made of.
    pub types: [TensorType; 2],
    own: [TensorType; 2],
    /// How its windows slide.
    pub window: Window,
    /// Elements that become one, over height and width.
    fold: [u64; 2],
    /// Zeros before the first element of a filter.
    before: [u64; 2],
}

impl Aligned {
    /// Of a convolution in one group, if it has too few channels, and nothing has 2^32 elements.
    pub fn new(window: &Window, [x, filters, y]: &[TensorType; 3]) -> Option<Self> {
        let channels = filters.shape[3];
        if x.shape[3] != channels || channels.is_multiple_of(ALIGNED) {
            return None;
        }
        let folded = Self::folded(window, [x, filters, y]);
        let aligned = folded.unwrap_or_else(|| Self::with([x, filters], window.clone(), [1; 2], [0; 2]));
        aligned.types.iter().all(|ty| ty.elements() < 1 << 32).then_some(aligned)
    }

    /// With the elements that a window moves by as one, if pictures and windows are made of such.
    fn folded(window: &Window, [x, filters, y]: [&TensorType; 3]) -> Option<Self> {
        let fold = window.stride;
        let (mut low, mut high, mut before) = ([0; 2], [0; 2], [0; 2]);
        for axis in [0, 1] {
            let (size, kernel, by) = (x.shape[1 + axis], filters.shape[1 + axis], fold[axis]);
            if !size.is_multiple_of(by) || by > kernel || window.dilation[axis] != 1 {
                return None;
            }
            before[axis] = window.low[axis].next_multiple_of(by) - window.low[axis];
            low[axis] = (window.low[axis] + before[axis]) / by;
            let reach = y.shape[1 + axis] + (kernel + before[axis]).div_ceil(by) - 1;
            high[axis] = reach.checked_sub(size / by + low[axis])?;
        }
        let window = Window { low, high, ..Window::default() };
        (fold != [1, 1]).then(|| Self::with([x, filters], window, fold, before))
    }

    fn with(own: [&TensorType; 2], window: Window, fold: [u64; 2], before: [u64; 2]) -> Self {
        let channels = (own[0].shape[3] * fold[0] * fold[1]).next_multiple_of(ALIGNED);
        let own = own.map(Clone::clone);
        let shape = |ty: &TensorType, before: [u64; 2]| {
            let size = |axis: usize| (ty.shape[1 + axis] + before[axis]).div_ceil(fold[axis]);
            ty.with_shape([ty.shape[0], size(0), size(1), channels])
        };
        let types = [shape(&own[0], [0; 2]), shape(&own[1], before)];
        Self { types, own, window, fold, before }
    }

    /// The copies that make one of both, pictures or filters, of what it is made of. What they do not write is zero.
    fn moves(&self, at: usize) -> Vec<Move> {
        let (own, wide) = (&self.own[at].shape, &self.types[at].shape);
        let before = if at == 0 { [0; 2] } else { self.before };
        let (read, write, channels) = (dense(own), dense(wide), own[3]);
        let is_whole = |axis: usize| before[axis] == 0 && own[1 + axis].is_multiple_of(self.fold[axis]);
        // Elements that become one, on both sides.
        let inner = [self.fold[1] * channels, channels];
        if is_whole(0) && is_whole(1) {
            let shape = vec![own[0], wide[1], self.fold[0], wide[2], self.fold[1], channels];
            let read = vec![read[0], self.fold[0] * read[1], read[1], self.fold[1] * read[2], read[2], 1];
            let write = vec![write[0], write[1], inner[0], write[2], inner[1], 1];
            return vec![Move { shape, read, write, ..Move::default() }];
        }
        // By their place in what they become.
        let places = (0..self.fold[0]).flat_map(|down| (0..self.fold[1]).map(move |right| [down, right]));
        let of = |place: [u64; 2]| {
            let mut whole = Move { shape: vec![own[0], 0, 0, channels], ..Move::default() };
            (whole.read, whole.write) = (read.clone(), write.clone());
            for axis in [0, 1] {
                let by = self.fold[axis];
                let first = before[axis].saturating_sub(place[axis]).div_ceil(by);
                let start = first * by + place[axis] - before[axis];
                whole.shape[1 + axis] = own[1 + axis].saturating_sub(start).div_ceil(by);
                whole.read[1 + axis] *= by;
                whole.read_start += start * read[1 + axis];
                whole.write_start += first * write[1 + axis] + place[axis] * inner[axis];
            }
            whole
        };
        places.map(of).filter(|whole| whole.shape.iter().all(|size| *size > 0)).collect()
    }
}

impl Select<'_> {
    /// Makes the pictures or filters of an aligned convolution.
    pub(super) fn align(&mut self, aligned: &Aligned, at: usize, [from, to]: [Arg; 2]) {
        let (own, wide) = (&aligned.own[at], &aligned.types[at]);
        if aligned.fold == [1, 1] && self.lengthen((from, own), (to, wide), 0.0) {
            return;
        }
        self.fill(to, wide, 0.0);
        aligned.moves(at).iter().for_each(|whole| self.strided(wide.dtype, from, to, whole));
    }

    /// Takes out of the pictures or filters of an aligned convolution what they are made of.
    pub(super) fn align_back(&mut self, aligned: &Aligned, at: usize, [from, to]: [Arg; 2]) {
        for whole in aligned.moves(at) {
            let Move { shape, read, read_start, write, write_start } = whole;
            let back = Move { shape, read: write, read_start: write_start, write: read, write_start: read_start };
            self.strided(aligned.own[at].dtype, from, to, &back);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::DType;

    fn moved(whole: &Move, from: &[f32], to: &mut [f32]) {
        let count: u64 = whole.shape.iter().product();
        for index in 0..count {
            let (mut rest, mut read, mut write) = (index, whole.read_start, whole.write_start);
            for dim in (0..whole.shape.len()).rev() {
                let at = rest % whole.shape[dim];
                rest /= whole.shape[dim];
                (read, write) = (read + at * whole.read[dim], write + at * whole.write[dim]);
            }
            to[write as usize] = from[read as usize];
        }
    }

    fn convolved(window: &Window, [x, filters, y]: [&TensorType; 3], [from, by]: [&[f32]; 2]) -> Vec<f32> {
        let mut sums = Vec::new();
        let (of, over) = (dense(&x.shape), dense(&filters.shape));
        for index in 0..y.elements() {
            let place = |dim: usize| index / dense(&y.shape)[dim] % y.shape[dim];
            let mut sum = 0.0;
            for (kh, kw) in (0..filters.shape[1]).flat_map(|kh| (0..filters.shape[2]).map(move |kw| (kh, kw))) {
                let row = (place(1) * window.stride[0] + kh * window.dilation[0]).wrapping_sub(window.low[0]);
                let column = (place(2) * window.stride[1] + kw * window.dilation[1]).wrapping_sub(window.low[1]);
                if row < x.shape[1] && column < x.shape[2] {
                    for c in 0..x.shape[3] {
                        let a = from[(place(0) * of[0] + row * of[1] + column * of[2] + c) as usize];
                        sum += a * by[(place(3) * over[0] + kh * over[1] + kw * over[2] + c) as usize];
                    }
                }
            }
            sums.push(sum);
        }
        sums
    }

    #[test]
    fn a_convolution_of_more_channels_is_the_same() {
        let window = |stride, low, high, dilation| Window { stride, low, high, dilation };
        for (x, filters, window, fold) in [
            ([2, 8, 12, 3], [2, 7, 7, 3], window([2, 2], [3, 3], [3, 3], [1, 1]), [2, 2]),
            ([1, 8, 8, 3], [3, 4, 4, 3], window([4, 4], [0, 0], [0, 0], [1, 1]), [4, 4]),
            ([2, 6, 8, 3], [2, 3, 3, 3], window([1, 2], [1, 0], [1, 1], [1, 1]), [1, 2]),
            ([1, 9, 9, 1], [2, 5, 5, 1], window([3, 3], [2, 1], [2, 3], [1, 1]), [3, 3]),
            // Nothing to fold: a size that is no multiple, elements apart, windows that move by one.
            ([2, 7, 8, 3], [2, 3, 3, 3], window([2, 2], [1, 1], [1, 1], [1, 1]), [1, 1]),
            ([2, 8, 8, 5], [2, 3, 3, 5], window([2, 2], [2, 2], [2, 2], [2, 2]), [1, 1]),
            ([2, 8, 8, 3], [2, 3, 3, 3], window([1, 1], [1, 1], [1, 1], [1, 1]), [1, 1]),
        ] {
            let [rows, columns] = window.count([x[1], x[2]], [filters[1], filters[2]]).unwrap();
            let y = TensorType::new(DType::F32, [x[0], rows, columns, filters[0]]);
            let [x, filters] = [x, filters].map(|shape| TensorType::new(DType::F32, shape));
            let numbers = |ty: &TensorType, by: u64| -> Vec<f32> {
                (0..ty.elements()).map(|at| ((at * by % 13) as f32) - 6.0).collect()
            };
            let own = [numbers(&x, 5), numbers(&filters, 7)];
            let aligned = Aligned::new(&window, &[x.clone(), filters.clone(), y.clone()]).unwrap();
            assert_eq!(aligned.fold, fold, "{window:?}");
            let wide = [0, 1].map(|at| {
                let ty = &aligned.types[at];
                assert!(ty.shape[3].is_multiple_of(ALIGNED));
                let mut to = vec![0.0; ty.elements() as usize];
                aligned.moves(at).iter().for_each(|whole| moved(whole, &own[at], &mut to));
                to
            });
            let expected = convolved(&window, [&x, &filters, &y], [&own[0], &own[1]]);
            let [pictures, kernels] = &aligned.types;
            assert_eq!(convolved(&aligned.window, [pictures, kernels, &y], [&wide[0], &wide[1]]), expected);
        }
        let wide = [[2, 8, 8, 16], [4, 3, 3, 16], [2, 8, 8, 4]].map(|shape| TensorType::new(DType::F32, shape));
        assert!(Aligned::new(&window([1, 1], [1, 1], [1, 1], [1, 1]), &wide).is_none());
    }
}
