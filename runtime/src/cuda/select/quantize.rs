//! Tensors in 8-bit floats, and their products.

use super::cut::{Cut, MOST_BLOCKS};
use super::matmul::{Gemm, Matrix, WORKSPACE};
use super::movement::Move;
use super::{Arg, OP, RES, Select, dense, lanes, row_threads};
use crate::cuda::kernel::{Kernel, Pack};
use crate::cuda::kernels::fold::Fold;
use crate::cuda::kernels::quantize::{self as kernels, TILE, UNITS};
use shardc_ir::DType;
use shardc_ir::float8::{Format, SIDE};
use shardc_ir::ops::{QuantizationScale, ScaledMatmul};

/// The most parts in which the elements of one scale are looked through.
const PARTS: u64 = 512;

/// The bytes that must divide the address of a scale that the library reads.
const SCALE_ALIGNED: u64 = 16;

fn format(dtype: DType) -> Result<Format, String> {
    Format::of(dtype).ok_or_else(|| format!("{dtype} is no 8-bit float"))
}

impl Select<'_> {
    pub(super) fn quantization_scale(&mut self, op: &QuantizationScale) -> Result<(), String> {
        let (source, exponent) = (self.operands[0].clone(), format(op.to)?.most as u32);
        let scales = self.results[0].elements();
        let each = source.elements() / scales.max(1);
        let width = lanes(&[source.dtype], &[each]);
        let vectors = each / width as u64;
        let fits = |parts: &u64| vectors.is_multiple_of(*parts) && vectors / parts >= 64;
        let parts = (0..=PARTS.ilog2()).rev().map(|power| 1 << power).find(fits).unwrap_or(1);
        let middle = self.scratch(scales * parts * 4);
        let (from, to) = ((OP(0), source.dtype), (middle, DType::F32));
        self.segments(Fold::Largest, width, from, to, [vectors / parts, vectors * scales]);
        let threads = row_threads(parts);
        let kernel = Kernel::new("quantization_scale", &[], 1, threads, &exponent, move |d| {
            let (x, y, length) = (d.input::<f32>(), d.output::<f32>(), d.number());
            kernels::quantization_scale::expand(d.scope(), x, y, length, exponent, threads);
        });
        let buffers = [(middle, parts * 4), (RES(0), 4)];
        self.launch_cut(kernel, &buffers, vec![parts as u32], Vec::new(), Cut::rows(scales));
        Ok(())
    }

    pub(super) fn quantize(&mut self) -> Result<(), String> {
        let (source, format) = (self.operands[0].clone(), format(self.results[0].dtype)?);
        let (leading, matrix) = source.shape.split_at(source.rank() - 2);
        let [rows, columns] = [matrix[0], matrix[1]];
        if !rows.is_multiple_of(4) || !columns.is_multiple_of(4) {
            return Err("sizes that are no multiples of 4".to_string());
        }
        let matrices: u64 = leading.iter().product();
        let shared = (matrices / self.operands[1].elements().max(1)).max(1);
        let tiles = |size: u64| size.div_ceil(u64::from(TILE)) as u32;
        let grid = [tiles(columns), tiles(rows), 1];
        if u64::from(grid[1]).max(shared) > MOST_BLOCKS {
            return Err(format!("a grid takes neither {shared} matrices of one scale nor {rows} rows at once"));
        }
        let kernel = Kernel::new("quantize", &[source.dtype], 4, UNITS, &format, move |d| {
            let (x, scales) = (d.input::<Pack<0>>(), d.input::<f32>());
            let (whole, exchanged) = (d.output::<u32>(), d.output::<u32>());
            let (rows, columns, shared) = (d.number(), d.number(), d.number());
            kernels::quantize::expand(d.scope(), x, scales, whole, exchanged, rows, columns, shared, format);
        });
        let numbers = [rows, columns, shared].map(|number| number as u32).to_vec();
        // What shares a scale stays together, so that a part begins with a scale of its own.
        let bytes = shared * rows * columns;
        let buffers = [(OP(0), bytes * source.dtype.size()), (OP(1), 4), (RES(0), bytes), (RES(1), bytes)];
        let cut = Cut { grid, axis: 2, count: matrices, per_unit: shared, per_block: 1, number: None };
        self.launch_cut(kernel, &buffers, numbers, Vec::new(), cut);
        Ok(())
    }

    /// The scales of an operand, each where the library may read it.
    fn spaced(&mut self, operand: usize) -> Arg {
        let count = self.operands[operand].elements();
        if count == 1 {
            return OP(operand);
        }
        let copy = self.scratch(SCALE_ALIGNED * count);
        let whole = Move { shape: vec![count], read: vec![1], write: vec![SCALE_ALIGNED / 4], ..Move::default() };
        self.strided(DType::F32, OP(operand), copy, &whole);
        copy
    }

    /// One product per index of the letters that have scales of their own, or lie outside the matrices; what is
    /// summed over them is added up in the result.
    pub(super) fn scaled_matmul(&mut self, op: &ScaledMatmul) -> Result<(), String> {
        let product = op.product();
        let (sizes, [a, b, c]) = (product.sizes(self.operands)?, product.letters()?);
        let size = |letter: char| sizes.iter().find(|(known, _)| *known == letter).map_or(1, |(_, size)| *size);
        let of = |letters: &[char]| dense(&letters.iter().map(|letter| size(*letter)).collect::<Vec<_>>());
        let strides = [of(&a), of(&b), of(&c)];
        let at = |tensor: usize, letter: char| {
            let letters = [&a, &b, &c][tensor];
            letters.iter().position(|known| *known == letter).map_or(0, |dim| strides[tensor][dim])
        };
        let (m, n, k) = (a[a.len() - 2], b[b.len() - 2], a[a.len() - 1]);
        let [rows, columns, depth] = [m, n, k].map(size);
        let (row, column) = (at(2, m), at(2, n));
        if [rows, columns, depth].iter().any(|size| !size.is_multiple_of(SIDE)) {
            return Err(format!("a product of {rows} x {columns} x {depth}, which are no multiples of {SIDE}"));
        }
        if row != 1 && column != 1 || c.contains(&k) {
            return Err(format!("`{}` is no product of matrices", op.spec));
        }
        let outer = |letters: &[char]| letters[..letters.len() - 2].to_vec();
        let (mut loops, of_b) = (outer(&a), outer(&b));
        loops.extend(of_b.into_iter().filter(|letter| !a.contains(letter)).collect::<Vec<_>>());
        let scales = [2, 3].map(|operand: usize| self.operands[operand].rank());
        let count: u64 = loops.iter().map(|letter| size(*letter)).product();
        let c_dtype = self.results[0].dtype;
        let places = [2, 3].map(|operand| self.spaced(operand));
        for index in 0..count {
            // The indices of the loops, the last fastest; whether this is the first term of its sum.
            let (mut rest, mut offsets, mut scale, mut is_first) = (index, [0; 3], [0; 2], true);
            for letter in loops.iter().rev() {
                let here = rest % size(*letter);
                rest /= size(*letter);
                (0..3).for_each(|tensor| offsets[tensor] += here * at(tensor, *letter));
                is_first &= here == 0 || c.contains(letter);
                for (tensor, letters) in [&a, &b].into_iter().enumerate() {
                    let own = letters[..scales[tensor]].iter().map(|letter| size(*letter)).collect::<Vec<_>>();
                    let dim = letters[..scales[tensor]].iter().position(|known| known == letter);
                    scale[tensor] += dim.map_or(0, |dim| here * dense(&own)[dim]);
                }
            }
            let operand = |tensor: usize, row: u64, column: u64| Matrix {
                at: OP(tensor).offset(offsets[tensor]),
                dtype: self.operands[tensor].dtype,
                row,
                column,
                batch: 0,
            };
            let to = RES(0).offset(offsets[2] * c_dtype.size());
            self.gemm(Gemm {
                a: operand(0, at(0, m), 1),
                b: operand(1, 1, at(1, n)),
                c: Matrix { at: to, dtype: c_dtype, row, column, batch: 0 },
                m: rows,
                n: columns,
                k: depth,
                batch: 1,
                addend: (!is_first).then_some(to),
                bias: None,
                epilogue: None,
                scales: Some([0, 1].map(|tensor: usize| places[tensor].offset(SCALE_ALIGNED * scale[tensor]))),
                beside: [0; 2],
                limit: WORKSPACE,
            });
        }
        Ok(())
    }
}
