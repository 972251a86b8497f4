//! Convolutions and pooling.
//!
//! In 16 bits a convolution is cuDNN's, where the library has an engine for it. Else what lies under each window
//! becomes a row of a matrix (Chellapilla et al., "High performance convolutional neural networks for document
//! processing", 2006), for as many pictures at a time as have rows of 64 MiB; what is left are matrix products. A
//! filter of one element that moves by one reads the picture itself; where rows begin where matrix units want them,
//! that product is taken in 16 bits as well. Convolutions of few channels, as of a picture's colours, become ones of
//! more ([`channels`](super::channels)).
//!
//! No engine of cuDNN 9.19 gives the gradient of filters in f32. It is summed in f32 and rounded once a microbatch to
//! the pictures' type, as PyTorch's is; microbatches are added in f32.

use super::channels::{ALIGNED, Aligned};
use super::{Arg, Engine, Fused, Gemm, Matrix, OP, RES, Select, Step, THREADS, lanes};
use crate::cuda::cudnn::Kernel as Library;
use crate::cuda::cudnn::convolution::{self as fused, Made};
use crate::cuda::kernel::{Elem, Kernel, Pack};
use crate::cuda::kernels::pictures::{self as kernels, Notes, Slide};
use shardc_ir::ops::{Convolution, ConvolutionFilterGrad, ConvolutionTranspose, MaxPool, MaxPoolGrad, Window};
use shardc_ir::{DType, TensorType};

/// Bytes of rows that are there at a time, if those of one picture are not more: with a quarter of them the kernels of
/// ResNet-50's step took 12% longer on an H100.
const ROWS: u64 = 64 << 20;

/// Bytes of workspace of a product: partial results that are more have tiles for all multiprocessors without being divided.
const PARTIAL: u64 = 8 << 20;

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
    [ty.shape[1], ty.shape[2]]
}

/// A convolution: its pictures `[b, h, w, g*ci]`, filters `[g*co, kh, kw, ci]`, and results `[b, oh, ow, g*co]`.
struct Sizes {
    slide: Slide,
    images: u64,
    groups: u64,
    ci: u64,
    co: u64,
    picture: [u64; 2],
    windows: [u64; 2],
    /// Elements of a group under a window.
    depth: u64,
    /// Whether a picture is its own matrix of rows.
    is_plain: bool,
}

impl Sizes {
    /// # Errors
    /// Why there is no kernel for it: a picture with more rows than a kernel can see.
    fn new(window: &Window, groups: u64, [x, filters, y]: [&TensorType; 3]) -> Result<Self, String> {
        let kernel = plane(filters);
        let (ci, co) = (filters.shape[3], filters.shape[0] / groups.max(1));
        let plain = Window::default();
        let (picture, windows, depth) = (plane(x), plane(y), ci * kernel[0] * kernel[1]);
        let is_plain =
            kernel == [1, 1] && window.stride == plain.stride && window.low == plain.low && picture == windows;
        let (slide, images) = (slide(window, kernel), x.shape[0]);
        let sizes = Self { slide, images, groups, ci, co, picture, windows, depth, is_plain };
        let rows = [depth, windows[0], windows[1]].into_iter().try_fold(groups, u64::checked_mul);
        match rows.is_some_and(|rows| rows < 1 << 32) {
            true => Ok(sizes),
            false => Err("what lies under all windows of one picture is 2^32 elements or more".to_string()),
        }
    }

    /// Windows of so many pictures.
    fn positions(&self, images: u64) -> u64 {
        images * self.windows[0] * self.windows[1]
    }

    /// The pictures whose rows, of elements of so many bytes, are there at a time: the first, and how many.
    fn chunks(&self, bytes: u64) -> impl Iterator<Item = (u64, u64)> + use<> {
        let each = self.groups * self.depth * self.positions(1) * bytes;
        let (count, images) = ((ROWS / each.max(1)).clamp(1, self.images.max(1)), self.images);
        let count = if self.is_plain { images.max(1) } else { count };
        (0..images).step_by(count as usize).map(move |first| (first, count.min(images - first)))
    }

    /// Elements of one picture and of its results.
    fn elements(&self) -> [u64; 2] {
        [self.picture[0] * self.picture[1] * self.groups * self.ci, self.positions(1) * self.groups * self.co]
    }

    /// What the kernels of rows are told of so many pictures, some channels of which go together.
    fn numbers(&self, images: u64, together: u64) -> Vec<u32> {
        let [[height, width], [down, across]] = [self.picture, self.windows];
        let numbers = [images, self.groups, self.ci / together, height, width, down, across];
        numbers.map(|number| number as u32).to_vec()
    }

    /// A group's rows of so many pictures.
    fn rows(&self, (at, dtype): (Arg, DType), group: u64, images: u64) -> Matrix {
        match self.is_plain {
            true => matrix((at, dtype), group * self.ci, [self.groups * self.ci, 1]),
            false => matrix((at, dtype), group * self.positions(images) * self.depth, [self.depth, 1]),
        }
    }

    /// A group's results.
    fn results(&self, at: (Arg, DType), group: u64) -> Matrix {
        matrix(at, group * self.co, [self.groups * self.co, 1])
    }

    /// A group's filters.
    fn filters(&self, at: (Arg, DType), group: u64) -> Matrix {
        matrix(at, group * self.co * self.depth, [self.depth, 1])
    }
}

/// A matrix that begins at some element of a buffer.
fn matrix((at, dtype): (Arg, DType), first: u64, [row, column]: [u64; 2]) -> Matrix {
    Matrix { at: at.offset(first * dtype.size()), dtype, row, column, batch: 0 }
}

fn transposed(matrix: Matrix) -> Matrix {
    Matrix { row: matrix.column, column: matrix.row, ..matrix }
}

fn product([a, b, c]: [Matrix; 3], [m, n, k]: [u64; 3]) -> Gemm {
    Gemm {
        a,
        b,
        c,
        m,
        n,
        k,
        batch: 1,
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
            let rows = this.rows(&sizes, (OP(0).offset(first * of_x * dtype.size()), dtype), images);
            let to = (RES(0).offset(first * of_y * dtype.size()), dtype);
            for group in 0..sizes.groups {
                let filters = transposed(sizes.filters((OP(1), dtype), group));
                let matrices = [sizes.rows(rows, group, images), filters, sizes.results(to, group)];
                this.gemm(product(matrices, [sizes.positions(images), sizes.co, sizes.depth]));
            }
        });
        self.prefer_library(&sizes, Made::Results, &op.window);
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
            let rows = match sizes.is_plain {
                true => to,
                false => (this.scratch(sizes.groups * sizes.depth * sizes.positions(images) * 4), DType::F32),
            };
            for group in 0..sizes.groups {
                let filters = sizes.filters((OP(1), dtype), group);
                let matrices = [sizes.results(from, group), filters, sizes.rows(rows, group, images)];
                this.gemm(product(matrices, [sizes.positions(images), sizes.depth, sizes.co]));
            }
            if !sizes.is_plain {
                let slide = sizes.slide;
                let kernel = Kernel::new("pictures", &[result], 1, THREADS, &slide, move |d| {
                    let (x, y, n) = (d.input::<f32>(), d.output::<Elem<0>>(), d.number());
                    let (images, groups, channels) = (d.number(), d.number(), d.number());
                    let (height, width, down, across) = (d.number(), d.number(), d.number(), d.number());
                    let (g, c, s) = (groups, channels, d.scope());
                    kernels::pictures::expand(s, x, y, n, images, g, c, height, width, down, across, slide);
                });
                this.each_element(kernel, vec![rows.0, to.0], sizes.numbers(images, 1), images * of_x);
            }
        });
        self.prefer_library(&sizes, Made::Pictures, &op.window);
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
            let results = (OP(0).offset(first * of_y * dtype.size()), dtype);
            let rows = this.rows(&sizes, (OP(1).offset(first * of_x * dtype.size()), dtype), images);
            for group in 0..sizes.groups {
                let results = transposed(sizes.results(results, group));
                let c = sizes.filters((sum, DType::F32), group);
                let addend = (first > 0).then_some(c.at);
                let matrices = [results, sizes.rows(rows, group, images), c];
                this.gemm(Gemm { addend, ..product(matrices, [sizes.co, sizes.depth, sizes.positions(images)]) });
            }
        });
        if wanted != DType::F32 {
            self.cast_elements(sum, RES(0), DType::F32, wanted, elements);
        }
        self.prefer_library(&sizes, Made::Filters, &op.window);
        Ok(())
    }

    /// Prefers a kernel of cuDNN to the steps chosen so far, if there may be one.
    fn prefer_library(&mut self, sizes: &Sizes, made: Made, window: &Window) {
        let (types, result) = (self.operands, self.results[0].clone());
        let (tensors, mut buffers) = match made {
            Made::Pictures => ([&result, &types[1], &types[0]], [RES(0), OP(1), OP(0)]),
            Made::Filters => ([&types[1], &result, &types[0]], [OP(1), RES(0), OP(0)]),
            Made::Results => ([&types[0], &types[1], &result], [OP(0), OP(1), RES(0)]),
        };
        let (mut tensors, place) = (tensors.map(Clone::clone), made as usize);
        if made == Made::Filters {
            // A sum over all pictures is rounded once, to their type: no engine gives it in f32 (cuDNN 9.19).
            tensors[place].dtype = tensors[0].dtype;
        }
        let convolution = |tensors| fused::Convolution { made, tensors, window: window.clone() };
        // A product of rows that begin where matrix units want them is one as well.
        let is_aligned = [sizes.ci, sizes.co].iter().all(|channels| channels.is_multiple_of(ALIGNED));
        if (sizes.is_plain && is_aligned) || convolution(tensors.clone()).unfit().is_some() {
            return;
        }
        let otherwise = std::mem::take(&mut self.out);
        let own = tensors[place].clone();
        let mut window = window.clone();
        let aligned = if sizes.is_plain { None } else { Aligned::new(&window, &tensors) };
        if let Some(aligned) = &aligned {
            for (at, ty) in aligned.types.iter().enumerate() {
                let (from, to) = (buffers[at], self.scratch(ty.bytes().0));
                if at != place {
                    self.align(aligned, at, [from, to]);
                }
                (buffers[at], tensors[at]) = (to, ty.clone());
            }
            window.clone_from(&aligned.window);
        } else if own.dtype != result.dtype {
            buffers[place] = self.scratch(own.bytes().0);
        }
        let library = fused::Convolution { made, tensors, window };
        let workspace = self.scratch(library.workspace());
        let engine = Engine { kernel: Library::Convolution(library), buffers: buffers.to_vec(), workspace };
        self.out.steps.push(Step::Engine(Box::new(engine)));
        if let Some(aligned) = aligned.filter(|aligned| place < aligned.types.len()) {
            let to = if own.dtype == result.dtype { RES(0) } else { self.scratch(own.bytes().0) };
            self.align_back(&aligned, place, [buffers[place], to]);
            buffers[place] = to;
        }
        if own.dtype != result.dtype {
            self.cast_elements(buffers[place], RES(0), own.dtype, result.dtype, own.elements());
        }
        let steps = std::mem::take(&mut self.out.steps);
        self.out.steps.push(Step::Fused(Box::new(Fused { steps, otherwise: otherwise.steps })));
        // One or the other uses it.
        self.out.scratch = self.out.scratch.max(otherwise.scratch);
        self.out.workspace = otherwise.workspace;
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

    /// The rows `[g, images*oh*ow, kh*kw*ci]` of some pictures, which may be these themselves.
    fn rows(&mut self, sizes: &Sizes, (from, dtype): (Arg, DType), images: u64) -> (Arg, DType) {
        if sizes.is_plain {
            return (from, dtype);
        }
        let elements = sizes.groups * sizes.depth * sizes.positions(images);
        let (slide, rows) = (sizes.slide, self.scratch(elements * dtype.size()));
        let together = lanes(&[dtype], &[sizes.ci]);
        let kernel = Kernel::new("rows", &[dtype], together, THREADS, &slide, move |d| {
            let (x, y, n) = (d.input::<Pack<0>>(), d.output::<Pack<0>>(), d.number());
            let (images, groups, channels) = (d.number(), d.number(), d.number());
            let (height, width, down, across) = (d.number(), d.number(), d.number(), d.number());
            let (g, c, s) = (groups, channels, d.scope());
            kernels::rows::expand(s, x, y, n, images, g, c, height, width, down, across, slide);
        });
        let together = together as u64;
        self.each_element(kernel, vec![from, rows], sizes.numbers(images, together), elements / together);
        (rows, dtype)
    }

    pub(super) fn max_pool(&mut self, op: &MaxPool) -> Result<(), String> {
        let (x, y) = (&self.operands[0], &self.results[0]);
        let (slide, dtype, elements) = (slide(&op.window, op.kernel), x.dtype, y.elements());
        let together = lanes(&[dtype], &x.shape[3..]);
        let numbers = pooled(x, y, together as u64);
        let kernel = Kernel::new("max_pool", &[dtype], together, THREADS, &slide, move |d| {
            let (x, y, n) = (d.input::<Pack<0>>(), d.output::<Pack<0>>(), d.number());
            let (channels, height, width) = (d.number(), d.number(), d.number());
            let (down, across) = (d.number(), d.number());
            kernels::max_pool::expand(d.scope(), x, y, n, channels, height, width, down, across, slide);
        });
        self.each_element(kernel, vec![OP(0), RES(0)], numbers, elements / together as u64);
        Ok(())
    }

    pub(super) fn max_pool_grad(&mut self, op: &MaxPoolGrad) -> Result<(), String> {
        let (dy, x) = (&self.operands[0], &self.operands[1]);
        let (slide, types) = (slide(&op.window, op.kernel), [x.dtype, dy.dtype]);
        let together = lanes(&types, &x.shape[3..]);
        let (numbers, windows) = (pooled(x, dy, together as u64), dy.elements() / together as u64);
        let packed = Notes::new(op.kernel[0].saturating_mul(op.kernel[1]), together as u32);
        let notes = self.scratch(windows * u64::from(packed.words) * 4);
        let kernel = Kernel::new("max_pool_notes", &types[..1], together, THREADS, &(slide, packed), move |d| {
            let (x, notes, n) = (d.input::<Pack<0>>(), d.output::<u32>(), d.number());
            let (channels, height, width) = (d.number(), d.number(), d.number());
            let (c, down, across) = (channels, d.number(), d.number());
            kernels::max_pool_notes::expand(d.scope(), x, notes, n, c, height, width, down, across, slide, packed);
        });
        self.each_element(kernel, vec![OP(1), notes], numbers.clone(), windows);
        let kernel = Kernel::new("max_pool_grad", &types, together, THREADS, &(slide, packed), move |d| {
            let (dy, notes, dx) = (d.input::<Pack<1>>(), d.input::<u32>(), d.output::<Pack<0>>());
            let (n, windows, c, height, width) = (d.number(), d.number(), d.number(), d.number(), d.number());
            let (down, across, scope) = (d.number(), d.number(), d.scope());
            kernels::max_pool_grad::expand(
                scope, dy, notes, dx, n, windows, c, height, width, down, across, slide, packed,
            );
        });
        let squares = plane(x).map(|size| size.div_ceil(u64::from(kernels::SIDE)));
        let squares = [x.shape[0], squares[0], squares[1], x.shape[3] / together as u64];
        let numbers = [vec![windows as u32], numbers].concat();
        self.each_element(kernel, vec![OP(0), notes, RES(0)], numbers, squares.iter().product());
        Ok(())
    }

    /// Launches a kernel with a unit for each of `elements`, which it is told first.
    fn each_element(&mut self, kernel: Kernel, buffers: Vec<Arg>, numbers: Vec<u32>, elements: u64) {
        let numbers = [vec![elements as u32], numbers].concat();
        let blocks = elements.div_ceil(u64::from(THREADS)) as u32;
        self.launch(kernel, buffers, numbers, Vec::new(), [blocks, 1, 1]);
    }
}

/// What the kernels of pooling are told of a picture and of what is made of it, some channels of which go together.
fn pooled(x: &TensorType, y: &TensorType, together: u64) -> Vec<u32> {
    let sizes = [vec![x.shape[3] / together], plane(x).to_vec(), plane(y).to_vec()].concat();
    sizes.into_iter().map(|size| size as u32).collect()
}
