//! Windows that slide over pictures `[b, h, w, c]`: their elements as rows of a matrix, the sums of such rows, and the
//! largest element of each. Padding reads as zero, and never is the largest.

use super::pack::{narrow, splat, widen};
use crate::cuda::kernel::{Elem, Lanes, Pack, PackF32, PackU32};
use cubecl::prelude::*;

/// How a window slides, over height and over width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slide {
    /// Its elements.
    pub kernel: [u32; 2],
    /// From one window to the next.
    pub stride: [u32; 2],
    /// From one of its elements to the next.
    pub dilation: [u32; 2],
    /// Padding before the picture.
    pub low: [u32; 2],
}

/// The row (or column) of the picture under an element of a window; a large number if that is padding before it.
#[cube]
fn under(window: u32, element: u32, #[comptime] slide: Slide, #[comptime] axis: usize) -> u32 {
    window * comptime!(slide.stride[axis]) + element * comptime!(slide.dilation[axis]) - comptime!(slide.low[axis])
}

/// The window of which an element lies over a row (or column) of the picture; a large number if there is none.
#[cube]
fn above(place: u32, element: u32, #[comptime] slide: Slide, #[comptime] axis: usize) -> u32 {
    let from = place + comptime!(slide.low[axis]);
    let before = element * comptime!(slide.dilation[axis]);
    let is_one = from >= before && (from - before) % comptime!(slide.stride[axis]) == 0u32;
    select(is_one, (from - before) / comptime!(slide.stride[axis]), 0xFFFF_FFFFu32)
}

/// The rows `[groups, images oh ow, kh kw c]` of the elements under each window of some pictures, `c` channels of each group
/// together.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn rows(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<0>>,
    n: u32,
    images: u32,
    groups: u32,
    channels: u32,
    height: u32,
    width: u32,
    down: u32,
    across: u32,
    #[comptime] slide: Slide,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let (channel, rest) = (at % channels, at / channels);
        let (kw, rest) = (rest % comptime!(slide.kernel[1]), rest / comptime!(slide.kernel[1]));
        let (kh, rest) = (rest % comptime!(slide.kernel[0]), rest / comptime!(slide.kernel[0]));
        let (beside, rest) = (rest % across, rest / across);
        let (window, rest) = (rest % down, rest / down);
        let (image, group) = (rest % images, rest / images);
        let row = under(window, kh, slide, 0usize);
        let column = under(beside, kw, slide, 1usize);
        if row < height && column < width {
            let from = (((image * height + row) * width + column) * groups + group) * channels + channel;
            y[at as usize] = x[from as usize];
        } else {
            y[at as usize] = Pack::<0>::cast_from(0u32);
        }
    }
}

/// The transpose of `rows`: each element of some pictures is the sum of those of the rows that were read there.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn pictures(
    x: &Array<f32>,
    y: &mut Array<Elem<0>>,
    n: u32,
    images: u32,
    groups: u32,
    channels: u32,
    height: u32,
    width: u32,
    down: u32,
    across: u32,
    #[comptime] slide: Slide,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let (channel, rest) = (at % channels, at / channels);
        let (group, rest) = (rest % groups, rest / groups);
        let (column, rest) = (rest % width, rest / width);
        let (row, image) = (rest % height, rest / height);
        let sum = RuntimeCell::<f32>::new(f32::new(0.0));
        for kh in 0..comptime!(slide.kernel[0]) {
            let window = above(row, kh, slide, 0usize);
            for kw in 0..comptime!(slide.kernel[1]) {
                let beside = above(column, kw, slide, 1usize);
                if window < down && beside < across {
                    let line = ((group * images + image) * down + window) * across + beside;
                    let element = kh * comptime!(slide.kernel[1]) + kw;
                    let from = (line * comptime!(slide.kernel[0] * slide.kernel[1]) + element) * channels + channel;
                    sum.store(sum.read() + x[from as usize]);
                }
            }
        }
        y[at as usize] = Elem::<0>::cast_from(sum.read());
    }
}

/// The first and the last of a window's elements over height or width that are not padding.
#[cube]
fn inside(window: u32, size: u32, #[comptime] slide: Slide, #[comptime] axis: usize) -> (u32, u32) {
    let (start, low) = (window * comptime!(slide.stride[axis]), comptime!(slide.low[axis]));
    let padding = select(start < low, low - start, 0u32);
    let first = (padding + comptime!(slide.dilation[axis] - 1)) / comptime!(slide.dilation[axis]);
    let last = (size - 1u32 + low - start) / comptime!(slide.dilation[axis]);
    (first, min(last, comptime!(slide.kernel[axis] - 1)))
}

/// The largest elements of a window of some channels of the picture that begin at `start`, and which of the window's each is,
/// the first of equal ones. In the place of padding the nearest element is looked at again.
#[cube]
#[allow(clippy::too_many_arguments)]
fn largest(
    x: &Array<Pack<0>>,
    start: u32,
    channels: u32,
    height: u32,
    width: u32,
    window: u32,
    beside: u32,
    #[comptime] slide: Slide,
) -> (PackF32, PackU32) {
    let (top, bottom) = inside(window, height, slide, 0usize);
    let (left, right) = inside(beside, width, slide, 1usize);
    let corner = under(window, top, slide, 0usize) * width + under(beside, left, slide, 1usize);
    let best = RuntimeCell::<PackF32>::new(widen(x[(start + corner * channels) as usize]));
    let element = RuntimeCell::<PackU32>::new(PackU32::cast_from(top * comptime!(slide.kernel[1]) + left));
    for kh in 0..comptime!(slide.kernel[0]) {
        let kh = max(min(kh, bottom), top);
        let row = under(window, kh, slide, 0usize);
        for kw in 0..comptime!(slide.kernel[1]) {
            let kw = max(min(kw, right), left);
            let column = under(beside, kw, slide, 1usize);
            let values = widen(x[(start + (row * width + column) * channels) as usize]);
            let number = kh * comptime!(slide.kernel[1]) + kw;
            let (before, known) = (best.read(), element.read());
            let mut most = PackF32::empty();
            let mut which = PackU32::empty();
            #[unroll]
            for lane in 0..Lanes::value() {
                // What is not a number is a maximum, so that it is seen.
                let is_behind = values[lane] <= before[lane] || before[lane].is_nan();
                most[lane] = select(is_behind, before[lane], values[lane]);
                which[lane] = select(is_behind, known[lane], number);
            }
            best.store(most);
            element.store(which);
        }
    }
    (best.read(), element.read())
}

/// The largest element of each window, `n` vectors of channels in all.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn max_pool(
    x: &Array<Pack<0>>,
    y: &mut Array<Pack<0>>,
    n: u32,
    channels: u32,
    height: u32,
    width: u32,
    down: u32,
    across: u32,
    #[comptime] slide: Slide,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let (channel, rest) = (at % channels, at / channels);
        let (beside, rest) = (rest % across, rest / across);
        let (window, image) = (rest % down, rest / down);
        let start = image * height * width * channels + channel;
        let (values, _) = largest(x, start, channels, height, width, window, beside, slide);
        y[at as usize] = narrow(values);
    }
}

/// How the elements of windows that are the largest are noted: those of a vector of channels in words, `n` words apart where
/// there are `n` vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Notes {
    /// Of one element.
    pub bits: u32,
    /// Elements in a word.
    pub lanes: u32,
    /// Words of a vector.
    pub words: u32,
}

impl Notes {
    /// Of windows of so many elements, and vectors of so many lanes.
    pub fn new(elements: u64, lanes: u32) -> Self {
        let bits = [8, 16].into_iter().find(|bits| elements <= 1 << bits).unwrap_or(32);
        let together = lanes.min(32 / bits);
        Self { bits, lanes: together, words: lanes / together }
    }
}

/// Notes which element of each window is the largest, `n` vectors of channels in all.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn max_pool_notes(
    x: &Array<Pack<0>>,
    notes: &mut Array<u32>,
    n: u32,
    channels: u32,
    height: u32,
    width: u32,
    down: u32,
    across: u32,
    #[comptime] slide: Slide,
    #[comptime] packed: Notes,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let (channel, rest) = (at % channels, at / channels);
        let (beside, rest) = (rest % across, rest / across);
        let (window, image) = (rest % down, rest / down);
        let start = image * height * width * channels + channel;
        let (_, elements) = largest(x, start, channels, height, width, window, beside, slide);
        #[unroll]
        for word in 0..comptime!(packed.words) {
            let all = RuntimeCell::<u32>::new(u32::new(0));
            #[unroll]
            for lane in 0..comptime!(packed.lanes) {
                let element = elements[(word * comptime!(packed.lanes) + lane) as usize];
                all.store(all.read() | (element << (lane * comptime!(packed.bits))));
            }
            notes[(word * n + at) as usize] = all.read();
        }
    }
}

/// What is noted of vector `at` of `n`.
#[cube]
fn noted(notes: &Array<u32>, at: u32, n: u32, #[comptime] packed: Notes) -> PackU32 {
    let mut elements = PackU32::empty();
    #[unroll]
    for word in 0..comptime!(packed.words) {
        let all = notes[(word * n + at) as usize];
        #[unroll]
        for lane in 0..comptime!(packed.lanes) {
            let element = (all >> (lane * comptime!(packed.bits))) & comptime!(u32::MAX >> (32 - packed.bits));
            elements[(word * comptime!(packed.lanes) + lane) as usize] = element;
        }
    }
    elements
}

/// Rows of the picture, and columns, of which a unit of [`max_pool_grad()`] has all elements.
pub const SIDE: u32 = 2;

/// Windows that may lie over as many rows (or columns).
fn reach(slide: Slide, axis: usize) -> u32 {
    ((slide.kernel[axis] - 1) * slide.dilation[axis] + SIDE - 1) / slide.stride[axis] + 1
}

/// The first of these windows; a large number if it would lie before all that there are.
#[cube]
fn first_above(place: u32, #[comptime] slide: Slide, #[comptime] axis: usize) -> u32 {
    let last = (place + comptime!(slide.low[axis] + SIDE - 1)) / comptime!(slide.stride[axis]);
    last - comptime!(reach(slide, axis) - 1)
}

/// The element of a window that lies over a row (or column) of the picture; a large number if none does.
#[cube]
fn over(place: u32, window: u32, #[comptime] slide: Slide, #[comptime] axis: usize) -> u32 {
    let from = place + comptime!(slide.low[axis]) - window * comptime!(slide.stride[axis]);
    let is_one = from % comptime!(slide.dilation[axis]) == 0u32;
    select(is_one, from / comptime!(slide.dilation[axis]), 0xFFFF_FFFFu32)
}

/// Whether a window has an element over one of the rows (or columns) of a unit.
#[cube]
fn is_over(place: u32, window: u32, #[comptime] slide: Slide, #[comptime] axis: usize) -> bool {
    let is_one = RuntimeCell::<bool>::new(false);
    #[unroll]
    for side in 0..SIDE {
        let element = over(place + side, window, slide, axis);
        is_one.store(is_one.read() || element < comptime!(slide.kernel[axis]));
    }
    is_one.read()
}

/// The derivative of [`max_pool()`]: each element of the picture gets the cotangents of the windows that are noted to have it
/// as the largest, added in the order of the windows. A unit has a square of [`SIDE`] rows and columns of a vector of channels,
/// of which there are `n`, so it reads most windows once; there are `windows` vectors of these.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn max_pool_grad(
    dy: &Array<Pack<1>>,
    notes: &Array<u32>,
    dx: &mut Array<Pack<0>>,
    n: u32,
    windows: u32,
    channels: u32,
    height: u32,
    width: u32,
    down: u32,
    across: u32,
    #[comptime] slide: Slide,
    #[comptime] packed: Notes,
) {
    let at = ABSOLUTE_POS as u32;
    if at < n {
        let (high, wide) = ((height + comptime!(SIDE - 1)) / SIDE, (width + comptime!(SIDE - 1)) / SIDE);
        let (channel, rest) = (at % channels, at / channels);
        let (column, rest) = (rest % wide * SIDE, rest / wide);
        let (row, image) = (rest % high * SIDE, rest / high);
        let mut sums = Array::<PackF32>::new(comptime!((SIDE * SIDE) as usize));
        #[unroll]
        for element in 0..comptime!((SIDE * SIDE) as usize) {
            sums[element] = splat(f32::new(0.0));
        }
        let is_short = comptime!(reach(slide, 0) * reach(slide, 1) <= 4);
        let (first_window, first_beside) = (first_above(row, slide, 0usize), first_above(column, slide, 1usize));
        // Of few windows all are on their way at once.
        #[unroll(comptime!(is_short))]
        for step in 0..comptime!(reach(slide, 0)) {
            let window = first_window + step;
            if (is_short || window < down) && is_over(row, window, slide, 0usize) {
                #[unroll(comptime!(is_short))]
                for step in 0..comptime!(reach(slide, 1)) {
                    let beside = first_beside + step;
                    if (is_short || beside < across) && is_over(column, beside, slide, 1usize) {
                        let is_there = window < down && beside < across;
                        let line = (image * down + min(window, down - 1u32)) * across;
                        let from = (line + min(beside, across - 1u32)) * channels + channel;
                        let cotangents = dy[from as usize];
                        let elements = noted(notes, from, windows, packed);
                        #[unroll]
                        for place in 0..comptime!(SIDE * SIDE) {
                            let kh = over(row + place / SIDE, window, slide, 0usize);
                            let kw = over(column + place % SIDE, beside, slide, 1usize);
                            let is_one = is_there && kh < comptime!(slide.kernel[0]) && kw < comptime!(slide.kernel[1]);
                            let number = kh * comptime!(slide.kernel[1]) + kw;
                            let before = sums[place as usize];
                            let mut after = PackF32::empty();
                            #[unroll]
                            for lane in 0..Lanes::value() {
                                let is_largest = is_one && elements[lane] == number;
                                let sum = before[lane] + f32::cast_from(cotangents[lane]);
                                after[lane] = select(is_largest, sum, before[lane]);
                            }
                            sums[place as usize] = after;
                        }
                    }
                }
            }
        }
        #[unroll]
        for place in 0..comptime!(SIDE * SIDE) {
            let (row, column) = (row + place / SIDE, column + place % SIDE);
            if row < height && column < width {
                let to = ((image * height + row) * width + column) * channels + channel;
                dx[to as usize] = narrow(sums[place as usize]);
            }
        }
    }
}
