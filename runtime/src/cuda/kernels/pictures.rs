//! Windows that slide over pictures `[b, h, w, c]`: their elements as rows of a matrix, the sums of such rows, and the
//! largest element of each. Padding reads as zero, and never is the largest.

use super::fold::LOWEST;
use super::pack::{narrow, splat, widen};
use crate::cuda::kernel::{Elem, Lanes, Pack, PackF32};
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

/// The largest elements of a window of some channels of the picture that begin at `start`, and which of the window's each is,
/// the first of equal ones.
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
) -> (PackF32, PackF32) {
    let best = RuntimeCell::<PackF32>::new(splat(f32::new(LOWEST)));
    let element = RuntimeCell::<PackF32>::new(splat(f32::new(-1.0)));
    for kh in 0..comptime!(slide.kernel[0]) {
        let row = under(window, kh, slide, 0usize);
        for kw in 0..comptime!(slide.kernel[1]) {
            let column = under(beside, kw, slide, 1usize);
            if row < height && column < width {
                let values = widen(x[(start + (row * width + column) * channels) as usize]);
                let number = f32::cast_from(kh * comptime!(slide.kernel[1]) + kw);
                let (before, known) = (best.read(), element.read());
                let mut most = PackF32::empty();
                let mut which = PackF32::empty();
                #[unroll]
                for lane in 0..Lanes::value() {
                    let is_larger = known[lane] < 0.0f32 || values[lane] > before[lane];
                    most[lane] = select(is_larger, values[lane], before[lane]);
                    which[lane] = select(is_larger, number, known[lane]);
                }
                best.store(most);
                element.store(which);
            }
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

/// Its derivative: each element of the picture, `n` vectors of channels in all, gets the cotangents of the windows of which it
/// is the largest.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn max_pool_grad(
    x: &Array<Pack<0>>,
    dy: &Array<Pack<1>>,
    dx: &mut Array<Pack<0>>,
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
        let (column, rest) = (rest % width, rest / width);
        let (row, image) = (rest % height, rest / height);
        let start = image * height * width * channels + channel;
        let sum = RuntimeCell::<PackF32>::new(splat(f32::new(0.0)));
        for kh in 0..comptime!(slide.kernel[0]) {
            let window = above(row, kh, slide, 0usize);
            for kw in 0..comptime!(slide.kernel[1]) {
                let beside = above(column, kw, slide, 1usize);
                if window < down && beside < across {
                    let (_, elements) = largest(x, start, channels, height, width, window, beside, slide);
                    let number = f32::cast_from(kh * comptime!(slide.kernel[1]) + kw);
                    let from = ((image * down + window) * across + beside) * channels + channel;
                    let (cotangents, before) = (dy[from as usize], sum.read());
                    let mut after = PackF32::empty();
                    #[unroll]
                    for lane in 0..Lanes::value() {
                        let part = select(elements[lane] == number, f32::cast_from(cotangents[lane]), f32::new(0.0));
                        after[lane] = before[lane] + part;
                    }
                    sum.store(after);
                }
            }
        }
        dx[at as usize] = narrow(sum.read());
    }
}
