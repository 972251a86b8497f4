//! Convolutions as matrix products: the elements under each window of a sample become a row.
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
        let plane = |ty: &TensorType| [ty.shape[1] as usize, ty.shape[2] as usize];
        let groups = groups as usize;
        let (co, ci) = (filters.shape[0] as usize / groups.max(1), filters.shape[3] as usize);
        let (picture, kernel, windows) = (plane(x), plane(filters), plane(y));
        Self { window, samples: x.shape[0] as usize, groups, co, ci, picture, kernel, windows }
    }

    fn places(&self) -> usize {
        self.picture[0] * self.picture[1]
    }

    fn positions(&self) -> usize {
        self.windows[0] * self.windows[1]
    }

    /// Elements of one group's channels under a window.
    fn depth(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.ci
    }

    fn units(&self) -> usize {
        self.samples * self.groups
    }

    fn work(&self) -> usize {
        self.co * self.depth() * self.positions()
    }

    /// Calls `each` with every element of a window that is no padding: where its channels begin in the matrix of windows,
    /// and its place in the picture.
    fn for_each(&self, mut each: impl FnMut(usize, usize)) {
        for (row, column) in (0..self.windows[0]).flat_map(|row| (0..self.windows[1]).map(move |column| (row, column)))
        {
            let (top, height, line) = self.overlap(0, row);
            let (left, width, start) = self.overlap(1, column);
            let window = (row * self.windows[1] + column) * self.depth();
            for (kh, kw) in (0..height).flat_map(|kh| (0..width).map(move |kw| (kh, kw))) {
                let element = (top + kh) * self.kernel[1] + left + kw;
                let line = line + kh * self.window.dilation[0] as usize;
                let place = line * self.picture[1] + start + kw * self.window.dilation[1] as usize;
                each(window + element * self.ci, place);
            }
        }
    }

    fn overlap(&self, axis: usize, window: usize) -> (usize, usize, usize) {
        let (size, kernel) = (self.picture[axis] as u64, self.kernel[axis] as u64);
        let (first, count, from) = self.window.overlap(axis, size, kernel, window as u64);
        (first as usize, count as usize, from as usize)
    }

    /// The matrix `[oh*ow, kh*kw*ci]` of one sample's and one group's elements under each window.
    fn rows(&self, x: &[f32], unit: usize) -> Vec<f32> {
        let mut rows = vec![0.0; self.positions() * self.depth()];
        let channels = Channels::of(self, unit, self.places(), self.ci);
        self.for_each(|to, place| rows[to..to + self.ci].copy_from_slice(&x[channels.at(place)..][..self.ci]));
        rows
    }

    /// The matrix `[oh*ow, co]` of one sample's and one group's results.
    fn results(&self, y: &[f32], unit: usize) -> Vec<f32> {
        let channels = Channels::of(self, unit, self.positions(), self.co);
        (0..self.positions()).flat_map(|position| y[channels.at(position)..][..self.co].iter().copied()).collect()
    }

    /// The filters of a group, `[co, kh*kw*ci]`.
    fn filters<'f>(&self, filters: &'f [f32], group: usize) -> &'f [f32] {
        let each = self.co * self.depth();
        &filters[group * each..(group + 1) * each]
    }
}

/// Where one group's channels of a sample lie.
struct Channels {
    first: usize,
    step: usize,
}

impl Channels {
    /// Of a sample of so many places, each with so many channels in a group.
    fn of(sizes: &Sizes<'_>, unit: usize, places: usize, each: usize) -> Self {
        let (sample, group, step) = (unit / sizes.groups, unit % sizes.groups, sizes.groups * each);
        Self { first: sample * places * step + group * each, step }
    }

    fn at(&self, place: usize) -> usize {
        self.first + place * self.step
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
    let made = by_units(context, sizes.units(), sizes.work(), |unit| {
        let rows = matrix(sizes.rows(&x, unit), sizes.positions(), sizes.depth());
        let filters = sizes.filters(&filters, unit % sizes.groups).to_vec();
        elements(rows.matmul(matrix(filters, sizes.co, sizes.depth()).transpose()))
    })?;
    write(&sizes, &made, (sizes.positions(), sizes.co), result)
}

pub(super) fn transpose(
    op: &ConvolutionTranspose,
    context: Context,
    operands: &[View<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let sizes = Sizes::new(&op.window, op.groups, result.ty, operands[1].ty, operands[0].ty);
    let (y, filters) = (operands[0].f32s()?, operands[1].f32s()?);
    let made = by_units(context, sizes.units(), sizes.work(), |unit| {
        let filters = sizes.filters(&filters, unit % sizes.groups).to_vec();
        let y = matrix(sizes.results(&y, unit), sizes.positions(), sizes.co);
        let rows = elements(y.matmul(matrix(filters, sizes.co, sizes.depth())))?;
        let mut picture = vec![0.0; sizes.places() * sizes.ci];
        sizes.for_each(|from, place| {
            let to = &mut picture[place * sizes.ci..][..sizes.ci];
            to.iter_mut().zip(&rows[from..]).for_each(|(to, part)| *to += part);
        });
        Ok(picture)
    })?;
    write(&sizes, &made, (sizes.places(), sizes.ci), result)
}

pub(super) fn filter_grad(
    op: &ConvolutionFilterGrad,
    context: Context,
    operands: &[View<'_>],
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    let sizes = Sizes::new(&op.window, op.groups, operands[1].ty, result.ty, operands[0].ty);
    let (dy, x) = (operands[0].f32s()?, operands[1].f32s()?);
    let mut total = vec![0.0f64; result.ty.elements() as usize];
    let each = sizes.co * sizes.depth();
    for first in (0..sizes.samples).step_by(SAMPLES) {
        let samples = SAMPLES.min(sizes.samples - first);
        let made = by_units(context, samples * sizes.groups, sizes.work(), |unit| {
            let unit = first * sizes.groups + unit;
            let rows = matrix(sizes.rows(&x, unit), sizes.positions(), sizes.depth());
            let dy = matrix(sizes.results(&dy, unit), sizes.positions(), sizes.co);
            elements(dy.transpose().matmul(rows))
        })?;
        for (unit, part) in made.iter().enumerate() {
            let group = unit % sizes.groups;
            let slots = &mut total[group * each..(group + 1) * each];
            slots.iter_mut().zip(part).for_each(|(total, part)| *total += f64::from(*part));
        }
    }
    let total: Vec<f32> = total.into_iter().map(|sum| sum as f32).collect();
    result.round_f32(&total)
}

/// Writes what was made of every sample and group, each of so many places and channels.
fn write(
    sizes: &Sizes<'_>,
    made: &[Vec<f32>],
    (places, each): (usize, usize),
    result: &mut ViewMut<'_>,
) -> Result<(), String> {
    result.write_f32(|out| {
        for (unit, made) in made.iter().enumerate() {
            let channels = Channels::of(sizes, unit, places, each);
            for (place, made) in made.chunks_exact(each.max(1)).enumerate() {
                out[channels.at(place)..][..each].copy_from_slice(made);
            }
        }
    })
}
