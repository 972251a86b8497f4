//! Graphs of tensor operations that cuDNN compiles as one kernel.
//!
//! Tensors have four dimensions. Those in memory are *buffers*, known by their place in the list of
//! addresses that a launch passes; *numbers* are passed by value; all others exist inside the kernel
//! only. The library recognises a graph by its shape: what an engine takes is written in the modules
//! that build one.

use super::convolution::Made;
use super::descriptor::{Descriptor, Kind, Name};
use crate::cuda::device::Failure;
use cudarc::cudnn::sys;
use shardc_ir::DType;
use sys::cudnnDataType_t as Data;
use sys::cudnnPointwiseMode_t as Mode;

pub use sys::cudnnReduceTensorOp_t as Reduction;

/// Bytes that every address is a multiple of.
const ALIGNMENT: i64 = 16;

/// Sizes, and the distances between neighbours in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The sizes.
    pub sizes: [u64; 4],
    /// The distances.
    pub strides: [u64; 4],
}

impl Layout {
    /// Row-major, without gaps.
    pub fn dense(sizes: [u64; 4]) -> Self {
        let [_, b, c, d] = sizes;
        Self { sizes, strides: [b * c * d, c * d, d, 1] }
    }

    /// `[b, c, h, w]` of a dense `[b, h, w, c]`.
    pub fn channels_last(sizes: [u64; 4]) -> Self {
        let [_, c, h, w] = sizes;
        Self { sizes, strides: [h * w * c, 1, w * c, c] }
    }

    /// `[batch, heads, rows, columns]` of a dense `[batch, rows, heads, columns]`.
    pub fn heads([batch, rows, heads, columns]: [u64; 4]) -> Self {
        let strides = [rows * heads * columns, columns, heads * columns, 1];
        Self { sizes: [batch, heads, rows, columns], strides }
    }

    /// The same elements with rows and columns exchanged.
    pub fn transposed(mut self) -> Self {
        self.sizes.swap(2, 3);
        self.strides.swap(2, 3);
        self
    }
}

/// How filters slide over pictures, in height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slide {
    /// From one window to the next.
    pub strides: [i64; 2],
    /// Padding above and to the left.
    pub low: [i64; 2],
    /// Padding below and to the right.
    pub high: [i64; 2],
    /// From one element of a window to the next.
    pub dilations: [i64; 2],
}

/// A tensor of a graph: its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor(usize);

/// Where a tensor that is not inside the kernel comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// The address at this position.
    Buffer(usize),
    /// A number of this bit pattern.
    Number(u32),
}

/// A graph in the making, and made.
#[derive(Default)]
pub struct Graph {
    tensors: Vec<(Descriptor, Layout)>,
    operations: Vec<Descriptor>,
    sources: Vec<(i64, Source)>,
}

fn data(dtype: DType) -> Result<Data, Failure> {
    match dtype {
        DType::F32 => Ok(Data::CUDNN_DATA_FLOAT),
        DType::Bf16 => Ok(Data::CUDNN_DATA_BFLOAT16),
        DType::F16 => Ok(Data::CUDNN_DATA_HALF),
        DType::I32 => Ok(Data::CUDNN_DATA_INT32),
        DType::Bool => Ok(Data::CUDNN_DATA_BOOLEAN),
        other => Err(format!("no cuDNN graph takes {other}")),
    }
}

fn signed(numbers: [u64; 4]) -> [i64; 4] {
    numbers.map(|number| number as i64)
}

impl Graph {
    /// Adds a tensor; one without a source is inside the kernel.
    fn add(&mut self, dtype: DType, layout: Layout, source: Option<Source>) -> Result<Tensor, Failure> {
        let id = self.tensors.len() as i64;
        let descriptor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, &[data(dtype)?])?
            .with(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &signed(layout.sizes))?
            .with(Name::CUDNN_ATTR_TENSOR_STRIDES, &signed(layout.strides))?
            .with(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?
            .with(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT])?
            .with(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[source.is_none()])?
            .with(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[matches!(source, Some(Source::Number(_)))])?
            .finalize()?;
        self.tensors.push((descriptor, layout));
        self.sources.extend(source.map(|source| (id, source)));
        Ok(Tensor(id as usize))
    }

    fn descriptor(&self, tensor: Tensor) -> &Descriptor {
        &self.tensors[tensor.0].0
    }

    /// A tensor in memory, at the address of this position.
    pub fn buffer(&mut self, position: usize, dtype: DType, layout: Layout) -> Result<Tensor, Failure> {
        self.add(dtype, layout, Some(Source::Buffer(position)))
    }

    /// An f32 passed by value.
    pub fn real(&mut self, value: f32) -> Result<Tensor, Failure> {
        self.add(DType::F32, Layout::dense([1; 4]), Some(Source::Number(value.to_bits())))
    }

    /// An i32 passed by value.
    pub fn integer(&mut self, value: i32) -> Result<Tensor, Failure> {
        self.add(DType::I32, Layout::dense([1; 4]), Some(Source::Number(value as u32)))
    }

    /// A tensor inside the kernel.
    pub fn inside(&mut self, dtype: DType, layout: Layout) -> Result<Tensor, Failure> {
        self.add(dtype, layout, None)
    }

    /// A tensor inside the kernel, of another's sizes, dense.
    fn inside_like(&mut self, dtype: DType, like: Tensor) -> Result<Tensor, Failure> {
        let sizes = self.tensors[like.0].1.sizes;
        self.inside(dtype, Layout::dense(sizes))
    }

    /// `c = a b` per batch element and head, summed in f32; where `b` has fewer heads, each serves as
    /// many heads of `a` as there are for one.
    pub fn matmul(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<(), Failure> {
        let product = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?
            .finalize()?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &[self.descriptor(a)])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &[self.descriptor(b)])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &[self.descriptor(c)])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &[&product])?
            .finalize()?;
        self.operations.push(operation);
        Ok(())
    }

    /// A convolution of pictures `[b, g*ci, h, w]`, filters `[g*co, ci, kh, kw]` and results `[b, g*co, oh, ow]`, of which it
    /// makes one from the others, summed in f32.
    pub fn convolve(&mut self, made: Made, tensors: [Tensor; 3], slide: &Slide) -> Result<(), Failure> {
        let kind = Descriptor::new(Kind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?
            .with(Name::CUDNN_ATTR_CONVOLUTION_CONV_MODE, &[sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION])?
            .with(Name::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, &[2i64])?
            .with(Name::CUDNN_ATTR_CONVOLUTION_DILATIONS, &slide.dilations)?
            .with(Name::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, &slide.strides)?
            .with(Name::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, &slide.low)?
            .with(Name::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, &slide.high)?
            .finalize()?;
        let (operation, names, of_kind, [alpha, beta]) = match made {
            Made::Results => (
                Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                ],
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
                ],
            ),
            Made::Pictures => (
                Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                ],
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
                ],
            ),
            Made::Filters => (
                Kind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                ],
                Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                [
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                    Name::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
                ],
            ),
        };
        let mut operation = Descriptor::new(operation)?.with_parts(of_kind, &[&kind])?;
        for (name, tensor) in names.into_iter().zip(tensors) {
            operation = operation.with_parts(name, &[self.descriptor(tensor)])?;
        }
        self.operations.push(operation.with(alpha, &[1.0f32])?.with(beta, &[0.0f32])?.finalize()?);
        Ok(())
    }

    /// An elementwise operation on one, two or (a selection) three tensors, computed in `precision`.
    fn pointwise(
        &mut self,
        (mode, precision, axis): (Mode, Data, Option<i64>),
        operands: &[Tensor],
        y: Tensor,
    ) -> Result<(), Failure> {
        let mut kind = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_POINTWISE_MODE, &[mode])?
            .with(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, &[precision])?;
        if let Some(axis) = axis {
            kind = kind.with(Name::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        let kind = kind.finalize()?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &[&kind])?;
        let names = [
            Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        for (name, operand) in names.into_iter().zip(operands) {
            operation = operation.with_parts(name, &[self.descriptor(*operand)])?;
        }
        let operation =
            operation.with_parts(Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &[self.descriptor(y)])?.finalize()?;
        self.operations.push(operation);
        Ok(())
    }

    /// An elementwise operation in f32, written to `y`.
    pub fn map_into(&mut self, map: Map, operands: &[Tensor], y: Tensor) -> Result<(), Failure> {
        self.pointwise((map.mode(), Data::CUDNN_DATA_FLOAT, None), operands, y)
    }

    /// An elementwise operation in f32, with the sizes of its first operand.
    pub fn map(&mut self, map: Map, operands: &[Tensor]) -> Result<Tensor, Failure> {
        let y = self.inside_like(DType::F32, operands[0])?;
        self.map_into(map, operands, y)?;
        Ok(y)
    }

    /// Every element's index along a dimension, for a tensor of these sizes.
    pub fn index(&mut self, like: Tensor, dim: i64) -> Result<Tensor, Failure> {
        let y = self.inside_like(DType::I32, like)?;
        self.pointwise((Mode::CUDNN_POINTWISE_GEN_INDEX, Data::CUDNN_DATA_FLOAT, Some(dim)), &[like], y)?;
        Ok(y)
    }

    /// The sum or difference of integers.
    pub fn shift(&mut self, map: Map, a: Tensor, b: Tensor) -> Result<Tensor, Failure> {
        let y = self.inside_like(DType::I32, a)?;
        self.pointwise((map.mode(), Data::CUDNN_DATA_INT32, None), &[a, b], y)?;
        Ok(y)
    }

    /// Where `a >= b`.
    pub fn not_below(&mut self, a: Tensor, b: Tensor) -> Result<Tensor, Failure> {
        let y = self.inside_like(DType::Bool, a)?;
        self.pointwise((Mode::CUDNN_POINTWISE_CMP_GE, Data::CUDNN_DATA_BOOLEAN, None), &[a, b], y)?;
        Ok(y)
    }

    /// Reduces the dimensions in which `y` has size 1, or fewer heads.
    pub fn reduce_into(&mut self, reduction: Reduction, x: Tensor, y: Tensor) -> Result<(), Failure> {
        let kind = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
            .with(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?
            .with(Name::CUDNN_ATTR_REDUCTION_OPERATOR, &[reduction])?
            .finalize()?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &[&kind])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &[self.descriptor(x)])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &[self.descriptor(y)])?
            .finalize()?;
        self.operations.push(operation);
        Ok(())
    }

    /// Reduces every row to one number.
    pub fn reduce_rows(&mut self, reduction: Reduction, x: Tensor) -> Result<Tensor, Failure> {
        let [a, b, c, _] = self.tensors[x.0].1.sizes;
        let y = self.inside(DType::F32, Layout::dense([a, b, c, 1]))?;
        self.reduce_into(reduction, x, y)?;
        Ok(y)
    }

    /// The same elements in another layout and type.
    pub fn reshape(&mut self, x: Tensor, dtype: DType, layout: Layout) -> Result<Tensor, Failure> {
        let y = self.inside(dtype, layout)?;
        let operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, &[self.descriptor(x)])?
            .with_parts(Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, &[self.descriptor(y)])?
            .finalize()?;
        self.operations.push(operation);
        Ok(y)
    }

    /// The whole as one descriptor. The graph must outlive it.
    pub fn operations(&self, handle: sys::cudnnHandle_t) -> Result<Descriptor, Failure> {
        let operations: Vec<&Descriptor> = self.operations.iter().collect();
        Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
            .with_parts(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?
            .with(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[handle])?
            .finalize()
    }

    /// The numbers of the tensors that a launch must give, and what to give.
    pub fn sources(&self) -> &[(i64, Source)] {
        &self.sources
    }
}

/// An elementwise operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// `a + b`.
    Add,
    /// `a - b`.
    Sub,
    /// `a b`.
    Mul,
    /// `a / b`.
    Div,
    /// `e^a`.
    Exp,
    /// The natural logarithm.
    Log,
    /// A copy.
    Identity,
    /// `a` where `c`, else `b`.
    Select,
}

impl Map {
    fn mode(self) -> Mode {
        match self {
            Self::Add => Mode::CUDNN_POINTWISE_ADD,
            Self::Sub => Mode::CUDNN_POINTWISE_SUB,
            Self::Mul => Mode::CUDNN_POINTWISE_MUL,
            Self::Div => Mode::CUDNN_POINTWISE_DIV,
            Self::Exp => Mode::CUDNN_POINTWISE_EXP,
            Self::Log => Mode::CUDNN_POINTWISE_LOG,
            Self::Identity => Mode::CUDNN_POINTWISE_IDENTITY,
            Self::Select => Mode::CUDNN_POINTWISE_BINARY_SELECT,
        }
    }
}
