//! Convolutions and pooling.
//!
//! What lies under each window becomes a column of a matrix (Chellapilla et al., "High performance convolutional neural
//! networks for document processing", 2006), for as many pictures at a time as scratch memory is meant to hold; what is left are
//! matrix products. A filter of one element that moves by one reads the picture itself.

use super::movement::Move;
use super::{Arg, Gemm, Matrix, OP, RES, Select, THREADS, dense, row_threads};
use crate::cuda::kernel::{Elem, Kernel};
use crate::cuda::kernels::pictures::{self as kernels, Slide};
use shardc_ir::ops::{Convolution, ConvolutionFilterGrad, ConvolutionTranspose, MaxPool, MaxPoolGrad, Window};
use shardc_ir::{DType, TensorType};

/// Bytes of columns that are there at a time, if those of one picture are not more: with a quarter of them the kernels of
/// ResNet-50's step took 12% longer on an H100.
const COLUMNS: u64 = 64 << 20;

/// Bytes of workspace of a product: partial results that are more have tiles for all multiprocessors without being divided.
const PARTIAL: u64 = 8 << 20;

/// The most pictures of a launch: its blocks below each other.
const MOST: u64 = 65_535;

/// Of how many windows, or a multiple, a picture has lines that begin where matrix units want them.
const ALIGNED: u64 = 8;

fn slide(window: &Window, kernel: [u64; 2]) -> Slide {
    let sizes = |sizes: [u64; 2]| sizes.map(|size| size as u32);
    Slide {
        kernel: sizes(kernel),
        stride: sizes(window.stride),
        dilation: sizes(window.dilation),
        low: sizes(window.low),
    }
}

fn plane(ty: &TensorType) -> [u64; 2] {
    [ty.shape[2], ty.shape[3]]
}

/// A convolution: its pictures `[b, g*ci, h, w]`, filters `[g*co, ci, kh, kw]`, and results `[b, g*co, oh, ow]`.
struct Sizes {
    slide: Slide,
    images: u64,
    groups: u64,
    ci: u64,
    co: u64,
    picture: [u64; 2],
    windows: [u64; 2],
    /// Elements under a window.
    depth: u64,
    /// Whether a picture is its own matrix of columns.
    is_plain: bool,
}

impl Sizes {
    /// # Errors
    /// Why there is no kernel for it: a picture with more columns than a kernel can see.
    fn new(window: &Window, groups: u64, [x, filters, y]: [&TensorType; 3]) -> Result<Self, String> {
        let kernel = plane(filters);
        let (ci, co) = (filters.shape[1], filters.shape[0] / groups.max(1));
        let plain = Window::default();
        let (picture, windows, depth) = (plane(x), plane(y), ci * kernel[0] * kernel[1]);
        let is_plain =
            kernel == [1, 1] && window.stride == plain.stride && window.low == plain.low && picture == windows;
        let is_plain = is_plain && (picture[0] * picture[1]).is_multiple_of(ALIGNED);
        let (slide, images) = (slide(window, kernel), x.shape[0]);
        let sizes = Self { slide, images, groups, ci, co, picture, windows, depth, is_plain };
        let columns = [depth, windows[0], windows[1]].into_iter().try_fold(groups, u64::checked_mul);
        match columns.is_some_and(|columns| columns < 1 << 32) {
            true => Ok(sizes),
            false => Err("what lies under all windows of one picture is 2^32 elements or more".to_string()),
        }
    }

    /// Windows of a picture.
    fn positions(&self) -> u64 {
        self.windows[0] * self.windows[1]
    }

    /// Whether a product is of all pictures: of each by itself its lines would not begin where matrix units want them.
    fn is_whole(&self) -> bool {
        !self.positions().is_multiple_of(ALIGNED)
    }

    /// The columns of a product of so many pictures, and how many products there are.
    fn products(&self, images: u64) -> [u64; 2] {
        if self.is_whole() { [images * self.positions(), 1] } else { [self.positions(), images] }
    }

    /// The strides of rows, columns and pictures of matrices that lie picture by picture, of so many elements each.
    fn by_picture(&self, each: u64) -> [u64; 3] {
        [self.positions(), 1, each]
    }

    /// Those of matrices whose rows hold all pictures.
    fn by_channel(&self, images: u64) -> [u64; 3] {
        [images * self.positions(), 1, self.positions()]
    }

    /// The pictures whose columns, of elements of so many bytes, are there at a time: the first, and how many.
    fn chunks(&self, bytes: u64) -> impl Iterator<Item = (u64, u64)> + use<> {
        let each = self.groups * self.depth * self.positions() * bytes;
        let (count, images) = ((COLUMNS / each.max(1)).clamp(1, self.images.clamp(1, MOST)), self.images);
        (0..images).step_by(count as usize).map(move |first| (first, count.min(images - first)))
    }

    /// Elements of one picture and of its results.
    fn elements(&self) -> [u64; 2] {
        [self.groups * self.ci * self.picture[0] * self.picture[1], self.groups * self.co * self.positions()]
    }

    /// What the kernels of columns are told of so many pictures.
    fn numbers(&self, images: u64) -> Vec<u32> {
        let [[height, width], [rows, across]] = [self.picture, self.windows];
        [images, self.groups * self.ci, height, width, rows, across].map(|number| number as u32).to_vec()
    }
}

/// A matrix that begins at some element of a buffer.
fn matrix((at, dtype): (Arg, DType), first: u64, [row, column, batch]: [u64; 3]) -> Matrix {
    Matrix { at: at.offset(first * dtype.size()), dtype, row, column, batch }
}

/// A product of a batch of matrices.
fn product([a, b, c]: [Matrix; 3], [m, n, k, batch]: [u64; 4]) -> Gemm {
    Gemm {
        a,
        b,
        c,
        m,
        n,
        k,
        batch,
        addend: None,
        bias: None,
        epilogue: None,
        scales: None,
        beside: [0; 2],
        limit: PARTIAL,
    }
}

impl Select<'_> {
    pub(super) fn convolution(&mut self, op: &Convolution) -> Result<(), String> {
        let [x, filters, y] = [&self.operands[0], &self.operands[1], &self.results[0]];
        let (sizes, dtype) = (Sizes::new(&op.window, op.groups, [x, filters, y])?, x.dtype);
        if y.dtype != dtype {
            return Err("a result of another element type".to_string());
        }
        let [of_x, of_y] = sizes.elements();
        self.each_chunk(sizes.chunks(dtype.size()), |this, first, images| {
            let from = (OP(0).offset(first * of_x * dtype.size()), dtype);
            let to = (RES(0).offset(first * of_y * dtype.size()), dtype);
            let (columns, lies) = match sizes.is_plain {
                true => (from, sizes.by_picture(of_x)),
                false => (this.columns(&sizes, from, images), sizes.by_channel(images)),
            };
            let is_whole = sizes.is_whole();
            let (made, made_as) = match is_whole {
                true => ((this.scratch(images * of_y * dtype.size()), dtype), sizes.by_channel(images)),
                false => (to, sizes.by_picture(of_y)),
            };
            let [n, batch] = sizes.products(images);
            for group in 0..sizes.groups {
                let a = matrix((OP(1), dtype), group * sizes.co * sizes.depth, [sizes.depth, 1, 0]);
                let b = matrix(columns, group * sizes.depth * lies[0], lies);
                let c = matrix(made, group * sizes.co * made_as[0], made_as);
                this.gemm(product([a, b, c], [sizes.co, n, sizes.depth, batch]));
            }
            if is_whole {
                this.exchange(&sizes, [made, to], images, false);
            }
        });
        Ok(())
    }

    pub(super) fn convolution_transpose(&mut self, op: &ConvolutionTranspose) -> Result<(), String> {
        let [y, filters, x] = [&self.operands[0], &self.operands[1], &self.results[0]];
        let (sizes, dtype) = (Sizes::new(&op.window, op.groups, [x, filters, y])?, y.dtype);
        if filters.dtype != dtype {
            return Err("operands of two element types".to_string());
        }
        let (result, [of_x, of_y]) = (x.dtype, sizes.elements());
        self.each_chunk(sizes.chunks(4), |this, first, images| {
            let from = (OP(0).offset(first * of_y * dtype.size()), dtype);
            let to = (RES(0).offset(first * of_x * result.size()), result);
            let (given, lies) = match sizes.is_whole() {
                true => (this.by_channels(&sizes, from, images), sizes.by_channel(images)),
                false => (from, sizes.by_picture(of_y)),
            };
            let lines = sizes.groups * sizes.depth * images * sizes.positions();
            let (columns, made_as) = match sizes.is_plain {
                true => (to, sizes.by_picture(of_x)),
                false => ((this.scratch(lines * 4), DType::F32), sizes.by_channel(images)),
            };
            let [n, batch] = sizes.products(images);
            for group in 0..sizes.groups {
                let a = matrix((OP(1), dtype), group * sizes.co * sizes.depth, [1, sizes.depth, 0]);
                let b = matrix(given, group * sizes.co * lies[0], lies);
                let c = matrix(columns, group * sizes.depth * made_as[0], made_as);
                this.gemm(product([a, b, c], [sizes.depth, n, sizes.co, batch]));
            }
            if !sizes.is_plain {
                let slide = sizes.slide;
                let kernel = Kernel::new("pictures", &[result], 1, THREADS, &slide, move |d| {
                    let (x, y, n) = (d.input::<f32>(), d.output::<Elem<0>>(), d.number());
                    let (images, channels) = (d.number(), d.number());
                    let (height, width, rows, across) = (d.number(), d.number(), d.number(), d.number());
                    let scope = d.scope();
                    kernels::pictures::expand(scope, x, y, n, images, channels, height, width, rows, across, slide);
                });
                this.each_element(kernel, vec![columns.0, to.0], sizes.numbers(images), images * of_x);
            }
        });
        Ok(())
    }

    pub(super) fn convolution_filter_grad(&mut self, op: &ConvolutionFilterGrad) -> Result<(), String> {
        let [y, x, filters] = [&self.operands[0], &self.operands[1], &self.results[0]];
        let (sizes, dtype) = (Sizes::new(&op.window, op.groups, [x, filters, y])?, x.dtype);
        if y.dtype != dtype {
            return Err("operands of two element types".to_string());
        }
        let ([of_x, of_y], wanted, elements) = (sizes.elements(), filters.dtype, filters.elements());
        let sum = if wanted == DType::F32 { RES(0) } else { self.scratch(elements * 4) };
        self.each_chunk(sizes.chunks(dtype.size()), |this, first, images| {
            let rest = images * sizes.positions();
            let of_results = (OP(0).offset(first * of_y * dtype.size()), dtype);
            let results = this.by_channels(&sizes, of_results, images);
            let of_pictures = (OP(1).offset(first * of_x * dtype.size()), dtype);
            let columns = this.columns(&sizes, of_pictures, images);
            for group in 0..sizes.groups {
                let a = matrix(results, group * sizes.co * rest, [rest, 1, 0]);
                let b = matrix(columns, group * sizes.depth * rest, [1, rest, 0]);
                let c = matrix((sum, DType::F32), group * sizes.co * sizes.depth, [sizes.depth, 1, 0]);
                let addend = (first > 0).then_some(c.at);
                this.gemm(Gemm { addend, ..product([a, b, c], [sizes.co, sizes.depth, rest, 1]) });
            }
        });
        if wanted != DType::F32 {
            self.cast_elements(sum, RES(0), DType::F32, wanted, elements);
        }
        Ok(())
    }

    /// Does something to each chunk of the pictures, one after the other in the same scratch memory.
    fn each_chunk(&mut self, chunks: impl Iterator<Item = (u64, u64)>, mut each: impl FnMut(&mut Self, u64, u64)) {
        let (first, mut most) = (self.out.scratch, self.out.scratch);
        for (image, images) in chunks {
            self.out.scratch = first;
            each(self, image, images);
            most = most.max(self.out.scratch);
        }
        self.out.scratch = most;
    }

    /// The columns `[g*ci*kh*kw, images, oh*ow]` of some pictures.
    fn columns(&mut self, sizes: &Sizes, (from, dtype): (Arg, DType), images: u64) -> (Arg, DType) {
        let elements = sizes.groups * sizes.depth * images * sizes.positions();
        let (slide, columns) = (sizes.slide, self.scratch(elements * dtype.size()));
        let threads = row_threads(sizes.positions()).min(THREADS);
        let kernel = Kernel::new("columns", &[dtype], 1, threads, &slide, move |d| {
            let (x, y, blocks) = (d.input::<Elem<0>>(), d.output::<Elem<0>>(), d.number());
            let (images, channels) = (d.number(), d.number());
            let (height, width, rows, across) = (d.number(), d.number(), d.number(), d.number());
            let scope = d.scope();
            kernels::columns::expand(
                scope, x, y, blocks, images, channels, height, width, rows, across, slide, threads,
            );
        });
        let blocks = sizes.positions().div_ceil(u64::from(threads));
        let numbers = [vec![blocks as u32], sizes.numbers(images)].concat();
        let grid = [(blocks * sizes.groups * sizes.depth) as u32, images as u32, 1];
        self.launch(kernel, vec![from, columns], numbers, Vec::new(), grid);
        (columns, dtype)
    }

    /// Results `[images, g*co, oh*ow]` channel by channel.
    fn by_channels(&mut self, sizes: &Sizes, from: (Arg, DType), images: u64) -> (Arg, DType) {
        let copy = (self.scratch(images * sizes.elements()[1] * from.1.size()), from.1);
        self.exchange(sizes, [from, copy], images, true);
        copy
    }

    /// Copies results of some pictures, that lie channel by channel, picture by picture, or the other way round.
    fn exchange(&mut self, sizes: &Sizes, [from, to]: [(Arg, DType); 2], images: u64, to_channels: bool) {
        let (channels, positions) = (sizes.groups * sizes.co, sizes.positions());
        let shape = vec![channels, images, positions];
        let (by_channel, by_picture) = (dense(&shape), vec![positions, channels * positions, 1]);
        let (read, write) = if to_channels { (by_picture, by_channel) } else { (by_channel, by_picture) };
        self.strided(from.1, from.0, to.0, &Move { shape, read, write, ..Move::default() });
    }

    pub(super) fn max_pool(&mut self, op: &MaxPool) -> Result<(), String> {
        let (x, y) = (&self.operands[0], &self.results[0]);
        let (slide, dtype, elements) = (slide(&op.window, op.kernel), x.dtype, y.elements());
        let numbers = [plane(x), plane(y)].concat().into_iter().map(|size| size as u32).collect();
        let kernel = Kernel::new("max_pool", &[dtype], 1, THREADS, &slide, move |d| {
            let (x, y, n) = (d.input::<Elem<0>>(), d.output::<Elem<0>>(), d.number());
            let (height, width, rows, across) = (d.number(), d.number(), d.number(), d.number());
            kernels::max_pool::expand(d.scope(), x, y, n, height, width, rows, across, slide);
        });
        self.each_element(kernel, vec![OP(0), RES(0)], numbers, elements);
        Ok(())
    }

    pub(super) fn max_pool_grad(&mut self, op: &MaxPoolGrad) -> Result<(), String> {
        let (dy, x) = (&self.operands[0], &self.operands[1]);
        let (slide, types, elements) = (slide(&op.window, op.kernel), [x.dtype, dy.dtype], x.elements());
        let numbers = [plane(x), plane(dy)].concat().into_iter().map(|size| size as u32).collect();
        let kernel = Kernel::new("max_pool_grad", &types, 1, THREADS, &slide, move |d| {
            let (x, dy, dx, n) = (d.input::<Elem<0>>(), d.input::<Elem<1>>(), d.output::<Elem<0>>(), d.number());
            let (height, width, rows, across) = (d.number(), d.number(), d.number(), d.number());
            kernels::max_pool_grad::expand(d.scope(), x, dy, dx, n, height, width, rows, across, slide);
        });
        self.each_element(kernel, vec![OP(1), OP(0), RES(0)], numbers, elements);
        Ok(())
    }

    /// Launches a kernel with a unit for each of `elements`, which it is told first.
    fn each_element(&mut self, kernel: Kernel, buffers: Vec<Arg>, numbers: Vec<u32>, elements: u64) {
        let numbers = [vec![elements as u32], numbers].concat();
        let blocks = elements.div_ceil(u64::from(THREADS)) as u32;
        self.launch(kernel, buffers, numbers, Vec::new(), [blocks, 1, 1]);
    }
}
