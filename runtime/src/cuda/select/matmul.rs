//! Tensor contractions as (strided, batched) matrix products.
//!
//! The letters of a contraction fall into four groups: batch, m, n and k. A group whose letters lie
//! next to each other in every tensor is one dimension with one stride. A batch, m or n letter that
//! does not fit is looped over, one product per index. What remains (a k that cannot be joined, a
//! tensor without a unit stride) is copied into an order that fits; so is what m or n would be cut into
//! small products for, or what is looped over in many launches that do little, where that costs less ([`pays`]).

use super::movement::Move;
use super::{Arg, OP, RES, Select, Step, dense};
use shardc_ir::ops::{Epilogue, Matmul};
use shardc_ir::{DType, OpDef};

/// A matrix of a batch: where it is, and its strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// The first element.
    pub at: Arg,
    /// The element type.
    pub dtype: DType,
    /// The distance between rows.
    pub row: u64,
    /// The distance between columns; it or `row` is 1.
    pub column: u64,
    /// The distance between the matrices of the batch.
    pub batch: u64,
}

/// `c = a b`, plus `d` and a bias where they are given, for every matrix of the batch; `a` is `[m, k]`, `b` is `[k, n]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemm {
    /// The first operand.
    pub a: Matrix,
    /// The second operand.
    pub b: Matrix,
    /// The result.
    pub c: Matrix,
    /// Rows of `a` and `c`.
    pub m: u64,
    /// Columns of `b` and `c`.
    pub n: u64,
    /// Columns of `a`, rows of `b`.
    pub k: u64,
    /// How many products.
    pub batch: u64,
    /// Where `d` is, if it is added; it lies as `c` does, and may be `c`.
    pub addend: Option<Arg>,
    /// Where the bias is, if it is added: `n` elements of the type of `c`, of which `column` is 1.
    pub bias: Option<Arg>,
    /// What is done to each element, and where the element is written (if it is), or the place of the
    /// derivative is read; it lies as `c` does, of which `column` is 1.
    pub epilogue: Option<(Epilogue, Option<Arg>)>,
    /// Of operands in 8-bit floats, the f32 number by which each is multiplied.
    pub scales: Option<[Arg; 2]>,
    /// From one bias of the batch to the next, and from what one epilogue writes or reads to what the next does, in
    /// elements.
    pub beside: [u64; 2],
    /// The most bytes of workspace.
    pub limit: u64,
}

/// Bytes of workspace with which cuBLASLt's algorithms for Hopper are all available (NVIDIA, "cuBLAS",
/// recommended sizes of the workspace).
pub(super) const WORKSPACE: u64 = 32 << 20;

impl Gemm {
    /// Bytes of scratch memory that the library may use: where it divides `k`, sixteen partial results
    /// in f32 fit.
    pub fn workspace(&self) -> u64 {
        (16 * 4 * self.batch * self.m * self.n).next_multiple_of(256).min(self.limit)
    }

    /// The same at other places.
    pub fn placed(&self, place: impl Fn(Arg) -> Arg) -> Self {
        let matrix = |matrix: Matrix| Matrix { at: place(matrix.at), ..matrix };
        Self {
            a: matrix(self.a),
            b: matrix(self.b),
            c: matrix(self.c),
            addend: self.addend.map(&place),
            bias: self.bias.map(&place),
            epilogue: self.epilogue.map(|(kind, beside)| (kind, beside.map(&place))),
            scales: self.scales.map(|scales| scales.map(&place)),
            ..*self
        }
    }

    /// Arithmetic operations.
    pub fn flops(&self) -> f64 {
        2.0 * (self.batch * self.m * self.n) as f64 * self.k as f64
    }

    /// Bytes of the matrices.
    fn bytes(&self) -> u64 {
        let sides = [(self.a, self.m * self.k), (self.b, self.k * self.n), (self.c, self.m * self.n)];
        self.batch * sides.iter().map(|(matrix, elements)| elements * matrix.dtype.size()).sum::<u64>()
    }
}

/// A tensor of a contraction: its letters with their strides.
#[derive(Clone)]
struct Operand {
    at: Arg,
    dtype: DType,
    letters: Vec<(char, u64)>,
}

impl Operand {
    fn stride(&self, letter: char) -> u64 {
        self.letters.iter().find(|(known, _)| *known == letter).map_or(0, |(_, stride)| *stride)
    }

    fn has(&self, letter: char) -> bool {
        self.letters.iter().any(|(known, _)| *known == letter)
    }
}

/// Letters that act as one dimension: their size, and the stride of the innermost per tensor.
#[derive(Clone, Copy)]
struct Joined {
    size: u64,
    strides: [u64; 3],
}

/// Joins letters (innermost last); gives the joined dimension and the letters left over, outermost.
fn join(letters: &[char], size: &dyn Fn(char) -> u64, tensors: &[Operand; 3]) -> (Joined, Vec<char>) {
    let Some((last, outer)) = letters.split_last() else { return (Joined { size: 1, strides: [0; 3] }, Vec::new()) };
    let mut joined = Joined { size: size(*last), strides: [0, 1, 2].map(|index: usize| tensors[index].stride(*last)) };
    for (left, letter) in outer.iter().enumerate().rev() {
        let fits = (0..3).all(|index: usize| {
            let tensor = &tensors[index];
            !tensor.has(*letter) || tensor.stride(*letter) == joined.strides[index] * joined.size
        });
        if !fits {
            return (joined, outer[..=left].to_vec());
        }
        joined.size *= size(*letter);
    }
    (joined, Vec::new())
}

impl Select<'_> {
    pub(super) fn matmul(&mut self, op: &Matmul) -> Result<(), String> {
        let Some(epilogue) = op.epilogue else { return self.product(op, self.operands.len()) };
        let from = self.out.steps.len();
        let plain = Matmul { epilogue: None, ..op.clone() };
        self.product(&plain, 2 + usize::from(op.bias))?;
        let beside = match epilogue {
            Epilogue::GeluTanh => (self.results.len() > 1).then(|| RES(1)),
            Epilogue::GeluTanhGrad => Some(OP(2)),
        };
        let fits = matches!(self.results[0].dtype, DType::Bf16 | DType::F16);
        // A product whose rows are the result's does it itself.
        if let [Step::Gemm(gemm)] = &mut self.out.steps[from..]
            && gemm.c.column == 1
            && gemm.batch == 1
            && Some(&gemm.n) == self.results[0].shape.last()
            && gemm.n.is_multiple_of(8)
            && matches!(gemm.a.dtype, DType::Bf16 | DType::F16)
            && gemm.bias.is_some() == op.bias
            && fits
        {
            gemm.epilogue = Some((epilogue, beside));
            return Ok(());
        }
        self.activate(epilogue.function(), epilogue, beside);
        Ok(())
    }

    /// The product and what is added to it, of the first `count` operands.
    fn product(&mut self, op: &Matmul, count: usize) -> Result<(), String> {
        let sizes = op.sizes(&self.operands[..count])?;
        let size = |letter: char| sizes.iter().find(|(known, _)| *known == letter).map_or(1, |(_, size)| *size);
        let letters = op.letters()?;
        let tensor = |index: usize, at: Arg, dtype: DType| {
            let strides = dense(&letters[index].iter().map(|letter| size(*letter)).collect::<Vec<_>>());
            // A letter of one index does not matter, and would only hinder joining.
            let used = letters[index].iter().copied().zip(strides).filter(|(letter, _)| size(*letter) != 1);
            Operand { at, dtype, letters: used.collect() }
        };
        let (lhs, rhs) = (self.operands[0].dtype, self.operands[1].dtype);
        if lhs != rhs {
            return Err("operands of two element types".to_string());
        }
        let to = self.results[0].dtype;
        if to != lhs && to != DType::F32 {
            return Err(format!("a product of {lhs} that is written in {to}"));
        }
        let (addend, bias) = (op.addend(count).map(OP), op.bias(count).map(OP));
        let mut tensors = [tensor(0, OP(0), lhs), tensor(1, OP(1), rhs), tensor(2, RES(0), self.results[0].dtype)];
        if let Some(products) = products(&tensors, addend, &size).filter(|of| !pays(of, &tensors, &size)) {
            self.finish(products, bias);
            return Ok(());
        }
        let mut result = None;
        for (index, copy) in copies(&tensors, &size).into_iter().enumerate() {
            let Some(order) = copy else { continue };
            let shape: Vec<u64> = order.iter().map(|letter| size(*letter)).collect();
            let strides = dense(&shape);
            let old: Vec<u64> = order.iter().map(|letter| tensors[index].stride(*letter)).collect();
            let dtype = tensors[index].dtype;
            let copy = self.scratch(shape.iter().product::<u64>() * dtype.size());
            let from = std::mem::replace(&mut tensors[index].at, copy);
            tensors[index].letters = order.iter().copied().zip(strides.clone()).collect();
            if index == 2 {
                result = Some((dtype, Move { shape, read: strides, write: old, ..Move::default() }));
            } else {
                let whole = Move { shape, read: old, write: strides, ..Move::default() };
                self.strided(dtype, from, copy, &whole);
            }
        }
        if result.is_none() {
            let products = products(&tensors, addend, &size).ok_or("a contraction that is no matrix product")?;
            self.finish(products, bias);
            return Ok(());
        }
        let products = products(&tensors, None, &size).ok_or("a contraction that is no matrix product")?;
        products.into_iter().for_each(|gemm| self.gemm(gemm));
        let bias = bias.map(|bias| self.spread(bias));
        if let Some((dtype, whole)) = result {
            let sums = addend.into_iter().chain(bias);
            let to = if addend.is_some() { self.scratch(self.results[0].bytes().0) } else { RES(0) };
            self.strided(dtype, tensors[2].at, to, &whole);
            // The result may lie where the summand lies, which is read here at last.
            sums.fold(to, |sum, more| {
                self.add_elements([more, sum, RES(0)], dtype);
                RES(0)
            });
        }
        Ok(())
    }
}

impl Select<'_> {
    /// The products of a contraction, and its bias: in the product itself if it is one that leaves rows.
    fn finish(&mut self, mut products: Vec<Gemm>, bias: Option<Arg>) {
        let mut bias = bias;
        if let [product] = &mut products[..]
            && product.c.column == 1
            && Some(&product.n) == self.results[0].shape.last()
        {
            product.bias = bias.take();
        }
        products.into_iter().for_each(|gemm| self.gemm(gemm));
        if let Some(bias) = bias {
            let bias = self.spread(bias);
            self.add_elements([RES(0), bias, RES(0)], self.results[0].dtype);
        }
    }

    /// A bias in the shape of the result, in scratch memory.
    fn spread(&mut self, bias: Arg) -> Arg {
        let ty = self.results[0].clone();
        let mut read = vec![0; ty.rank()];
        read[ty.rank() - 1] = 1;
        let copy = self.scratch(ty.bytes().0);
        let whole = Move { write: dense(&ty.shape), shape: ty.shape, read, ..Move::default() };
        self.strided(ty.dtype, bias, copy, &whole);
        copy
    }
}

/// The letters by kind: batch, m, n, k; each in the order of the tensor in which it lies widest.
fn groups([a, b, c]: &[Operand; 3]) -> [Vec<char>; 4] {
    let pick = |from: &Operand, in_a: bool, in_b: bool, in_c: bool| {
        let letters = from.letters.iter().map(|(letter, _)| *letter);
        letters.filter(|letter| (a.has(*letter), b.has(*letter), c.has(*letter)) == (in_a, in_b, in_c)).collect()
    };
    [pick(c, true, true, true), pick(c, true, false, true), pick(c, false, true, true), pick(a, true, true, false)]
}

/// Per tensor the order of letters into which it is copied where its groups do not lie one behind the other: of the two
/// that a product takes, that with the same innermost letter.
fn copies(tensors: &[Operand; 3], size: &dyn Fn(char) -> u64) -> [Option<Vec<char>>; 3] {
    let [batch, m, n, k] = groups(tensors);
    let sides = [[&m, &k], [&k, &n], [&m, &n]];
    [0, 1, 2].map(|index: usize| {
        let (tensor, [rows, columns]) = (&tensors[index], sides[index]);
        let lies = |order: &[char]| {
            let strides = dense(&order.iter().map(|letter| size(*letter)).collect::<Vec<_>>());
            order.iter().zip(strides).all(|(letter, stride)| tensor.stride(*letter) == stride)
        };
        let orders = [[rows, columns], [columns, rows]].map(|sides| [&batch[..], sides[0], sides[1]].concat());
        let innermost = |order: &&Vec<char>| order.last().is_some_and(|letter| tensor.stride(*letter) == 1);
        match orders.iter().any(|order| lies(order)) {
            true => None,
            false => orders.iter().find(innermost).or(orders.first()).cloned(),
        }
    })
}

/// Rows or columns of which a matrix unit is busy.
const BUSY: u64 = 512;

/// Arithmetic operations for each byte that is copied from which on copying costs less than products whose rows or columns
/// are too few: on an H100 such products reached a third of the peak, of 8 x 2560 rows three quarters, and copies 70% of
/// the bandwidth.
const WORTH: u64 = 500;

/// Bytes that are copied in the time that a launch takes which does little: on an H200 one of 512 products of 8 x 2 by 2 x 80
/// takes 8 microseconds beside others, and a copy of 5 MB five.
const LITTLE: u64 = 4 << 20;

/// Whether copying tensors leaves fewer and larger products, or fewer launches, which gain more than the copies cost.
fn pays(products: &[Gemm], tensors: &[Operand; 3], size: &dyn Fn(char) -> u64) -> bool {
    let Some(first) = products.first() else { return false };
    let [_, m, n, _] = groups(tensors);
    let all = |letters: &[char]| letters.iter().map(|letter| size(*letter)).product::<u64>();
    let copies = copies(tensors, size);
    let moved = tensors.iter().zip(copies).filter_map(|(tensor, order)| Some(all(&order?) * tensor.dtype.size()));
    let moved: Vec<u64> = moved.collect();
    let worth = |bytes: u64| (WORTH * bytes) as f64;
    let is_cut = first.m < all(&m).min(BUSY) || first.n < all(&n).min(BUSY);
    let flops: f64 = products.iter().map(Gemm::flops).sum();
    let does_little = first.bytes() < LITTLE && first.flops() < worth(LITTLE);
    let launches = products.len().saturating_sub(1 + moved.len()) as u64;
    let moved: u64 = moved.iter().sum();
    is_cut && flops > worth(moved) || does_little && launches * LITTLE > moved
}

/// The products of a contraction, if no tensor needs to be copied.
fn products(tensors: &[Operand; 3], addend: Option<Arg>, size: &dyn Fn(char) -> u64) -> Option<Vec<Gemm>> {
    let [batch, m, n, k] = groups(tensors);
    let (batch, mut loops) = join(&batch, size, tensors);
    let (m, left) = join(&m, size, tensors);
    loops.extend(left);
    let (n, left) = join(&n, size, tensors);
    loops.extend(left);
    let (k, left) = join(&k, size, tensors);
    // What is no batch may be one, of which an operand holds nothing: it is the same for all.
    let batch = match batch.size {
        1 => {
            let (batch, rest) = join(&loops, size, tensors);
            loops = rest;
            batch
        }
        _ => batch,
    };
    let count: u64 = loops.iter().map(|letter| size(*letter)).product();
    if !left.is_empty() || count > 4096 {
        return None;
    }
    // Of a dimension of one element the stride is free.
    let unit = |joined: Joined, index: usize| if joined.size == 1 { None } else { Some(joined.strides[index]) };
    let matrix = |index: usize, rows: Joined, columns: Joined| {
        let (row, column) = match (unit(rows, index), unit(columns, index)) {
            (Some(row), Some(column)) if row == 1 || column == 1 => (row, column),
            (Some(_), Some(_)) => return None,
            (Some(row), None) => (row, 1),
            (None, Some(1)) => (columns.size, 1),
            (None, Some(column)) => (1, column),
            (None, None) => (1, 1),
        };
        let operand = &tensors[index];
        Some(Matrix { at: operand.at, dtype: operand.dtype, row, column, batch: batch.strides[index] })
    };
    let (a, b, c) = (matrix(0, m, k)?, matrix(1, k, n)?, matrix(2, m, n)?);
    let (m, n, k, batch) = (m.size, n.size, k.size, batch.size);
    let whole = Gemm {
        a,
        b,
        c,
        m,
        n,
        k,
        batch,
        addend,
        bias: None,
        epilogue: None,
        scales: None,
        beside: [0; 2],
        limit: WORKSPACE,
    };
    let mut all = vec![whole];
    for letter in loops {
        let step = |matrix: Matrix, index: usize, at: u64| {
            let bytes = at * tensors[index].stride(letter) * matrix.dtype.size();
            Matrix { at: matrix.at.offset(bytes), ..matrix }
        };
        let each = |gemm: &Gemm, at: u64| Gemm {
            a: step(gemm.a, 0, at),
            b: step(gemm.b, 1, at),
            c: step(gemm.c, 2, at),
            addend: gemm.addend.map(|addend| addend.offset(at * tensors[2].stride(letter) * tensors[2].dtype.size())),
            ..gemm.clone()
        };
        all = all.iter().flat_map(|gemm| (0..size(letter)).map(|at| each(gemm, at)).collect::<Vec<_>>()).collect();
    }
    Some(all)
}
