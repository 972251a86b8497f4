//! Convolutions as matrix products: the elements under each window of a sample become a column.
//!
//! A product runs on Burn's Flex backend, one sample and one group of channels at a time. Gradients of
//! filters are summed over samples in their order, however many threads there are.

use super::matmul::{elements, matrix};
use super::{Context, View, ViewMut, by_units};
use shardc_ir::TensorType;
use shardc_ir::ops::{Convolution, ConvolutionFilterGrad, ConvolutionTranspose, Window};

/// Samples whose gradients of filters are in memory at once.
const SAMPLES: usize = 8;

/// The sizes of a convolution.
struct Sizes<'a> {
    window: &'a Window,
    samples: usize,
    groups: usize,
    /// Channels of the results and of the picture, in one group.
    co: usize,
    ci: usize,
    /// Height and width of the picture, the filters and the results.
    picture: [usize; 2],
    kernel: [usize; 2],
    windows: [usize; 2],
}

impl<'a> Sizes<'a> {
    fn new(window: &'a Window, groups: u64, x: &TensorType, filters: &TensorType, y: &TensorType) -> Self {
        let plane = |ty: &TensorType| [ty.shape[2] as usize, ty.shape[3] as usize];
        let groups = groups as usize;
        let (co, ci) = (filters.shape[0] as usize / groups.max(1), filters.shape[1] as usize);
        let (picture, kernel, windows) = (plane(x), plane(filters), plane(y));
        Self { window, samples: x.shape[0] as usize, groups, co, ci, picture, kernel, windows }
    }

    /// Elements of one group's channels of a sample's picture and of its results.
    fn chunks(&self) -> [usize; 2] {
        [self.ci * self.picture[0] * self.picture[1], self.co * self.positions()]
    }

    fn positions(&self) -> usize {
        self.windows[0] * self.windows[1]
    }

    /// Elements under a window.
    fn depth(&self) -> usize {
        self.ci * self.kernel[0] * self.kernel[1]
    }

    fn units(&self) -> usize {
        self.samples * self.groups
    }

    fn work(&self) -> usize {
        self.co * self.depth() * self.positions()
    }

    /// Calls `each` with every element of the matrix of columns that is no padding, and its place in the
    /// picture.
    fn for_each(&self, mut each: impl FnMut(usize, usize)) {
        let [height, width] = self.picture;
        for (channel, row) in (0..self.ci).flat_map(|channel| (0..self.windows[0]).map(move |row| (channel, row))) {
            let (first, count, from) = self.overlap(0, row);
            for kh in 0..count {
                let line = (channel * height + from + kh * self.window.dilation[0] as usize) * width;
                let depth = (channel * self.kernel[0] + first + kh) * self.kernel[1];
                for column in 0..self.windows[1] {
                    let (first, count, from) = self.overlap(1, column);
                    let position = row * self.windows[1] + column;
                    for kw in 0..count {
                        let place = (depth + first + kw) * self.positions() + position;
                        each(place, line + from + kw * self.window.dilation[1] as usize);
                    }
                }
            }
        }
    }

    fn overlap(&self, axis: usize, window: usize) -> (usize, usize, usize) {
        let (size, kernel) = (self.picture[axis] as u64, self.kernel[axis] as u64);
        let (first, count, from) = self.window.overlap(axis, size, kernel, window as u64);
        (first as usize, count as usize, from as usize)
    }

    /// The matrix `[ci*kh*kw, oh*ow]` of the elements under each window of a picture `[ci, h, w]`.
    fn columns(&self, picture: &[f32]) -> Vec<f32> {
        let mut columns = vec![0.0; self.depth() * self.positions()];
        self.for_each(|place, from| columns[place] = picture[from]);
        columns
    }

    /// The filters of a group, `[co, ci*kh*kw]`.
    fn filters<'f>(&self, filters: &'f [f32], group: usize) -> &'f [f32] {
        let each = self.co * self.depth();
        &filters[group * each..(group + 1) * each]
    }
}

pub(super) fn forward(
    op: &Convolution,
    context: Context,
    operands: &[View<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let sizes = Sizes::new(&op.window, op.groups, operands[0].ty, operands[1].ty, result.ty);
    let (x, filters) = (operands[0].f32s()?, operands[1].f32s()?);
    let [of_x, of_y] = sizes.chunks();
    let made = by_units(context, sizes.units(), sizes.work(), |unit| {
        let columns = matrix(sizes.columns(&x[unit * of_x..][..of_x]), sizes.depth(), sizes.positions());
        let filters = sizes.filters(&filters, unit % sizes.groups).to_vec();
        elements(matrix(filters, sizes.co, sizes.depth()).matmul(columns))
    })?;
    write(&made, of_y, result)
}

pub(super) fn transpose(
    op: &ConvolutionTranspose,
    context: Context,
    operands: &[View<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let sizes = Sizes::new(&op.window, op.groups, result.ty, operands[1].ty, operands[0].ty);
    let (y, filters) = (operands[0].f32s()?, operands[1].f32s()?);
    let [of_x, of_y] = sizes.chunks();
    let made = by_units(context, sizes.units(), sizes.work(), |unit| {
        let filters = sizes.filters(&filters, unit % sizes.groups).to_vec();
        let filters = matrix(filters, sizes.co, sizes.depth()).transpose();
        let y = matrix(y[unit * of_y..][..of_y].to_vec(), sizes.co, sizes.positions());
        let columns = elements(filters.matmul(y))?;
        let mut picture = vec![0.0; of_x];
        sizes.for_each(|place, to| picture[to] += columns[place]);
        Ok(picture)
    })?;
    write(&made, of_x, result)
}

pub(super) fn filter_grad(
    op: &ConvolutionFilterGrad,
    context: Context,
    operands: &[View<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let sizes = Sizes::new(&op.window, op.groups, operands[1].ty, result.ty, operands[0].ty);
    let (dy, x) = (operands[0].f32s()?, operands[1].f32s()?);
    let [of_x, of_y] = sizes.chunks();
    let mut total = vec![0.0f32; result.ty.elements() as usize];
    let each = sizes.co * sizes.depth();
    for first in (0..sizes.samples).step_by(SAMPLES) {
        let samples = SAMPLES.min(sizes.samples - first);
        let made = by_units(context, samples * sizes.groups, sizes.work(), |unit| {
            let unit = first * sizes.groups + unit;
            let columns = matrix(sizes.columns(&x[unit * of_x..][..of_x]), sizes.depth(), sizes.positions());
            let dy = matrix(dy[unit * of_y..][..of_y].to_vec(), sizes.co, sizes.positions());
            elements(dy.matmul(columns.transpose()))
        })?;
        for (unit, part) in made.iter().enumerate() {
            let group = unit % sizes.groups;
            let slots = &mut total[group * each..(group + 1) * each];
            slots.iter_mut().zip(part).for_each(|(total, part)| *total += part);
        }
    }
    result.round_f32(&total)
}

/// Writes the pieces of all samples and groups, which lie one after the other.
fn write(pieces: &[Vec<f32>], each: usize, result: &mut ViewMut<'_>) -> Result<(), String> {
    result.write_f32(|out| {
        for (out, piece) in out.chunks_exact_mut(each.max(1)).zip(pieces) {
            out.copy_from_slice(piece);
        }
    })
}
