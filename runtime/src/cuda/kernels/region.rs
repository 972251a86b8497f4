//! The kernel of a region, put together step by step from the functions of [`super::pack`].
//!
//! A region is about a tensor of rows. A block takes some vectors of columns and a chunk of rows, one row
//! after the other: a unit keeps its vectors of the row in registers, in f32, from the first step to the
//! last. So what a step makes of what another made is neither written nor rounded. While a row is worked
//! on the next one is on its way. Sums over a row meet in shared memory; sums over columns stay in
//! registers to the end of the chunk, and the sums of chunks are added by another kernel in a fixed order.

use super::elementwise::Pair;
use super::fold::{block_sum, block_sum_pair};
use super::pack;
use crate::cuda::kernel::{Definition, Elem, Pack, PackF32};
use cubecl::frontend::branch::{Iterable, RangeExpand};
use cubecl::frontend::{NativeExpand, RuntimeCell, RuntimeCellExpand};
use cubecl::prelude::{Array, CubePrimitive, Scope};
use shardc_ir::ops::Op;

/// How a value of a region lies along rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// An element per row and column.
    Full,
    /// A number per row.
    Row,
    /// A number per column.
    Column,
    /// One number.
    Scalar,
    /// The sum over the rows, a number per column; only a result.
    ColumnSum,
}

/// A buffer of a region's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Which value.
    pub value: usize,
    /// How it lies.
    pub class: Class,
    /// Whether it is f32 in memory, else of the kernel's element type.
    pub is_wide: bool,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Which.
    pub op: Op,
    /// The values it reads.
    pub operands: Vec<usize>,
    /// Its first result; the others follow.
    pub first: usize,
}

/// What is known when a region's kernel is made. Values are numbered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Region {
    /// The buffers that are read, in the order of the kernel's arguments.
    pub operands: Vec<Port>,
    /// The buffers that are written, behind them.
    pub results: Vec<Port>,
    /// The operations.
    pub steps: Vec<Step>,
    /// How many values there are.
    pub values: usize,
    /// Units of a block; a multiple of 32.
    pub threads: u32,
    /// Vectors of a row that a unit has.
    pub packs: u32,
    /// Whether a block works on several rows.
    pub is_tall: bool,
}

type Pack32 = NativeExpand<PackF32>;
type Number = NativeExpand<f32>;
type Index = NativeExpand<usize>;

enum Buffer {
    Narrow(NativeExpand<Array<Pack<0>>>),
    Wide(NativeExpand<Array<PackF32>>),
    Numbers(NativeExpand<Array<f32>>),
    Element(NativeExpand<Array<Elem<0>>>),
}

/// A value in registers.
#[derive(Clone)]
enum Value {
    /// Per vector of the unit.
    Packs(Vec<Pack32>),
    /// The same number in all units.
    One(Number),
}

/// What the next row brings, on its way.
enum Next {
    Narrow(Vec<RuntimeCellExpand<Pack<0>>>),
    Wide(Vec<RuntimeCellExpand<PackF32>>),
    Number(RuntimeCellExpand<f32>),
}

fn read<T: CubePrimitive>(scope: &mut Scope, cell: &RuntimeCellExpand<T>) -> NativeExpand<T> {
    cell.clone().__expand_read_method(scope)
}

fn store<T: CubePrimitive>(scope: &mut Scope, cell: &RuntimeCellExpand<T>, value: NativeExpand<T>) {
    cell.clone().__expand_store_method(scope, value);
}

/// The places of a unit's vectors.
struct Columns {
    count: Index,
    at: Vec<Index>,
    /// The same, inside the row.
    clamped: Vec<Index>,
    is_inside: Vec<NativeExpand<bool>>,
}

impl Region {
    /// The body of the kernel. Its unsigned scalars are the rows, the vectors of a row and the rows of a chunk.
    pub fn define(&self, d: &mut Definition) {
        let inputs: Vec<Buffer> = self.operands.iter().map(|port| input(d, *port)).collect();
        let outputs: Vec<Buffer> = self.results.iter().map(|port| output(d, *port)).collect();
        let (rows, columns, chunk) = (d.number(), d.number(), d.number());
        let scope = d.scope();
        let columns = self.columns(scope, columns);
        let first = pack::first_row::expand(scope, chunk.clone());
        let last = pack::last_row::expand(scope, first.clone(), chunk, rows);
        let mut still: Vec<Option<Value>> = vec![None; self.values];
        let mut moving: Vec<(usize, usize, Next)> = Vec::new();
        for (index, (port, buffer)) in self.operands.iter().zip(&inputs).enumerate() {
            match port.class {
                Class::Full | Class::Row => {
                    moving.push((index, port.value, begin(scope, buffer, &columns, first.clone())));
                }
                _ => still[port.value] = Some(load(scope, buffer, &columns)),
            }
        }
        let sums: Vec<Vec<RuntimeCellExpand<PackF32>>> =
            self.results.iter().map(|port| self.sums(scope, *port)).collect();
        let row = |scope: &mut Scope, row: Index| {
            let next = self.is_tall.then(|| pack::next_row::expand(scope, row.clone(), last.clone()));
            let mut values = still.clone();
            for (index, value, cells) in &moving {
                values[*value] = Some(advance(scope, &inputs[*index], cells, &columns, next.clone()));
            }
            for step in &self.steps {
                self.step(scope, step, &mut values, &columns);
            }
            for ((port, buffer), sums) in self.results.iter().zip(&outputs).zip(&sums) {
                if let Some(value) = &values[port.value] {
                    write(scope, buffer, value, sums, &columns, row.clone());
                }
            }
        };
        RangeExpand::new(first, last.clone(), false).expand(scope, row);
        for (buffer, sums) in outputs.iter().zip(&sums) {
            if let Buffer::Wide(buffer) = buffer {
                for (at, sum) in sums.iter().enumerate() {
                    let total = read(scope, sum);
                    let place = pack::partial_place::expand(scope, columns.count.clone(), columns.at[at].clone());
                    pack::store_wide::expand(scope, buffer.clone(), place, total, columns.is_inside[at].clone());
                }
            }
        }
    }

    fn columns(&self, scope: &mut Scope, count: NativeExpand<u32>) -> Columns {
        let count = pack::as_index::expand(scope, count);
        let mut at = vec![pack::first_column::expand(scope, self.threads * self.packs)];
        while at.len() < self.packs as usize {
            at.push(pack::next_column::expand(scope, at[at.len() - 1].clone(), self.threads));
        }
        let clamped = at.iter().map(|at| pack::clamp_column::expand(scope, at.clone(), count.clone())).collect();
        let is_inside = at.iter().map(|at| pack::is_below::expand(scope, at.clone(), count.clone())).collect();
        Columns { count, at, clamped, is_inside }
    }

    /// The running sums of a result that is one, per vector.
    fn sums(&self, scope: &mut Scope, port: Port) -> Vec<RuntimeCellExpand<PackF32>> {
        let count = if port.class == Class::ColumnSum { self.packs } else { 0 };
        let mut cell = || {
            let zeros = pack::zeros::expand(scope);
            RuntimeCell::<PackF32>::__expand_new(scope, zeros)
        };
        (0..count).map(|_| cell()).collect()
    }

    fn step(&self, scope: &mut Scope, step: &Step, values: &mut [Option<Value>], columns: &Columns) {
        let packs = |scope: &mut Scope, index: usize| -> Vec<Pack32> {
            match values[step.operands[index]].clone() {
                Some(Value::Packs(packs)) => packs,
                Some(Value::One(number)) => {
                    let all = pack::splat::expand(scope, number);
                    vec![all; self.packs as usize]
                }
                None => Vec::new(),
            }
        };
        let number = |index: usize| match &values[step.operands[index]] {
            Some(Value::One(number)) => Some(number.clone()),
            _ => None,
        };
        let made: Vec<Value> = match &step.op {
            Op::Unary(op) => vec![each(scope, packs, |scope, [x]| pack::unary::expand(scope, x, op.kind))],
            Op::UnaryGrad(op) => {
                vec![each(scope, packs, |scope, [dy, x]| pack::unary_grad::expand(scope, dy, x, op.kind))]
            }
            Op::Binary(op) => {
                let pair = Pair::Binary(op.kind);
                vec![each(scope, packs, |scope, [a, b]| pack::binary::expand(scope, a, b, pair))]
            }
            Op::Affine(op) => {
                let (scale, offset) = (op.scale as f32, op.offset as f32);
                vec![each(scope, packs, |scope, [x]| pack::affine::expand(scope, x, scale, offset))]
            }
            Op::Swiglu(_) => vec![each(scope, packs, |scope, [gate, up]| pack::swiglu::expand(scope, gate, up))],
            Op::SwigluGrad(_) => vec![
                each(scope, packs, |scope, [dy, gate, up]| pack::swiglu_grad_gate::expand(scope, dy, gate, up)),
                each(scope, packs, |scope, [dy, gate, _up]: [Pack32; 3]| pack::swiglu_grad_up::expand(scope, dy, gate)),
            ],
            // Rounded where it is written; and what is the same in all rows is no copy in registers.
            Op::Cast(_) | Op::Broadcast(_) | Op::Reduce(_) => vec![Value::Packs(packs(scope, 0))],
            Op::LayerNorm(op) => {
                let operands = [packs(scope, 0), packs(scope, 1), packs(scope, 2)];
                layer_norm(scope, self.threads, operands, columns, op.eps)
            }
            Op::RmsNorm(op) => {
                let operands = [packs(scope, 0), packs(scope, 1)];
                rms_norm(scope, self.threads, operands, columns, op.eps)
            }
            Op::LayerNormGrad(_) | Op::RmsNormGrad(_) => {
                let operands = [packs(scope, 0), packs(scope, 1), packs(scope, 2)];
                let is_centered = matches!(step.op, Op::LayerNormGrad(_));
                let (mean, rstd) = if is_centered { (number(3), number(4)) } else { (None, number(3)) };
                norm_grad(scope, self.threads, operands, (mean, rstd), columns)
            }
            _ => Vec::new(),
        };
        for (index, value) in made.into_iter().enumerate() {
            values[step.first + index] = Some(value);
        }
    }
}

fn input(d: &mut Definition, port: Port) -> Buffer {
    match (port.class, port.is_wide) {
        (Class::Row, _) | (Class::Scalar, true) => Buffer::Numbers(d.input::<f32>()),
        (Class::Scalar, false) => Buffer::Element(d.input::<Elem<0>>()),
        (_, true) => Buffer::Wide(d.input::<PackF32>()),
        (_, false) => Buffer::Narrow(d.input::<Pack<0>>()),
    }
}

fn output(d: &mut Definition, port: Port) -> Buffer {
    match (port.class, port.is_wide) {
        (Class::Row, _) => Buffer::Numbers(d.output::<f32>()),
        (_, true) => Buffer::Wide(d.output::<PackF32>()),
        (_, false) => Buffer::Narrow(d.output::<Pack<0>>()),
    }
}

/// What is the same in all rows.
fn load(scope: &mut Scope, buffer: &Buffer, columns: &Columns) -> Value {
    let zero = || Index::from(0usize);
    match buffer {
        Buffer::Numbers(x) => Value::One(pack::load_number::expand(scope, x.clone(), zero())),
        Buffer::Element(x) => Value::One(pack::load_element::expand(scope, x.clone())),
        Buffer::Wide(x) => {
            let one = |at: &Index| pack::load_wide::expand(scope, x.clone(), at.clone());
            Value::Packs(columns.clamped.iter().map(one).collect())
        }
        Buffer::Narrow(x) => {
            let mut one = |at: &Index| {
                let narrow = pack::load_narrow::expand(scope, x.clone(), at.clone());
                pack::widen::expand(scope, narrow)
            };
            Value::Packs(columns.clamped.iter().map(&mut one).collect())
        }
    }
}

fn places(scope: &mut Scope, columns: &Columns, row: &Index) -> Vec<Index> {
    let one = |at: &Index| pack::place::expand(scope, row.clone(), columns.count.clone(), at.clone());
    columns.clamped.iter().map(one).collect()
}

/// Sends for the first row.
fn begin(scope: &mut Scope, buffer: &Buffer, columns: &Columns, row: Index) -> Next {
    let places = places(scope, columns, &row);
    match buffer {
        Buffer::Narrow(x) => {
            let mut cell = |at: Index| {
                let raw = pack::load_narrow::expand(scope, x.clone(), at);
                RuntimeCell::<Pack<0>>::__expand_new(scope, raw)
            };
            Next::Narrow(places.into_iter().map(&mut cell).collect())
        }
        Buffer::Wide(x) => {
            let mut cell = |at: Index| {
                let raw = pack::load_wide::expand(scope, x.clone(), at);
                RuntimeCell::<PackF32>::__expand_new(scope, raw)
            };
            Next::Wide(places.into_iter().map(&mut cell).collect())
        }
        Buffer::Numbers(x) => {
            let raw = pack::load_number::expand(scope, x.clone(), row);
            Next::Number(RuntimeCell::<f32>::__expand_new(scope, raw))
        }
        Buffer::Element(x) => {
            let raw = pack::load_element::expand(scope, x.clone());
            Next::Number(RuntimeCell::<f32>::__expand_new(scope, raw))
        }
    }
}

/// What came for this row; sends for the next one.
fn advance(scope: &mut Scope, buffer: &Buffer, cells: &Next, columns: &Columns, next: Option<Index>) -> Value {
    let places = next.as_ref().map(|row| places(scope, columns, row));
    let place = |index: usize| places.as_ref().map(|places| places[index].clone());
    match (buffer, cells) {
        (Buffer::Narrow(x), Next::Narrow(cells)) => {
            let mut packs = Vec::with_capacity(cells.len());
            for (index, cell) in cells.iter().enumerate() {
                let raw = read(scope, cell);
                packs.push(pack::widen::expand(scope, raw));
                if let Some(at) = place(index) {
                    let next = pack::load_narrow::expand(scope, x.clone(), at);
                    store(scope, cell, next);
                }
            }
            Value::Packs(packs)
        }
        (Buffer::Wide(x), Next::Wide(cells)) => {
            let mut packs = Vec::with_capacity(cells.len());
            for (index, cell) in cells.iter().enumerate() {
                packs.push(read(scope, cell));
                if let Some(at) = place(index) {
                    let next = pack::load_wide::expand(scope, x.clone(), at);
                    store(scope, cell, next);
                }
            }
            Value::Packs(packs)
        }
        (Buffer::Numbers(x), Next::Number(cell)) => {
            let number = read(scope, cell);
            if let Some(row) = next {
                let next = pack::load_number::expand(scope, x.clone(), row);
                store(scope, cell, next);
            }
            Value::One(number)
        }
        _ => Value::Packs(Vec::new()),
    }
}

fn write(
    scope: &mut Scope,
    buffer: &Buffer,
    value: &Value,
    sums: &[RuntimeCellExpand<PackF32>],
    columns: &Columns,
    row: Index,
) {
    match (buffer, value) {
        (Buffer::Numbers(y), Value::One(number)) => pack::store_number::expand(scope, y.clone(), row, number.clone()),
        (_, Value::Packs(packs)) if !sums.is_empty() => {
            for (sum, value) in sums.iter().zip(packs) {
                let before = read(scope, sum);
                let after = pack::add::expand(scope, before, value.clone());
                store(scope, sum, after);
            }
        }
        (_, Value::Packs(packs)) => {
            for ((at, value), inside) in columns.at.iter().zip(packs).zip(&columns.is_inside) {
                let place = pack::place::expand(scope, row.clone(), columns.count.clone(), at.clone());
                let (value, inside) = (value.clone(), inside.clone());
                match buffer {
                    Buffer::Narrow(y) => pack::store_narrow::expand(scope, y.clone(), place, value, inside),
                    Buffer::Wide(y) => pack::store_wide::expand(scope, y.clone(), place, value, inside),
                    _ => {}
                }
            }
        }
        _ => {}
    }
}

/// A function of the same vectors of some operands.
fn each<const N: usize>(
    scope: &mut Scope,
    packs: impl Fn(&mut Scope, usize) -> Vec<Pack32>,
    f: impl Fn(&mut Scope, [Pack32; N]) -> Pack32,
) -> Value {
    let operands: [Vec<Pack32>; N] = std::array::from_fn(|index| packs(scope, index));
    let count = operands[0].len();
    Value::Packs((0..count).map(|at| f(scope, std::array::from_fn(|index| operands[index][at].clone()))).collect())
}

/// The sum over the unit's vectors of what `f` makes of each.
fn sum(scope: &mut Scope, count: usize, mut f: impl FnMut(&mut Scope, usize) -> Number) -> Number {
    let mut sum = f(scope, 0);
    for at in 1..count {
        let more = f(scope, at);
        sum = pack::sum_two::expand(scope, sum, more);
    }
    sum
}

/// `y`, the mean and the reciprocal deviation; see [`shardc_ir::ops::LayerNorm`].
fn layer_norm(
    scope: &mut Scope,
    threads: u32,
    [x, gamma, beta]: [Vec<Pack32>; 3],
    columns: &Columns,
    eps: f64,
) -> Vec<Value> {
    let (inside, count) = (&columns.is_inside, columns.count.clone());
    let own = sum(scope, x.len(), |scope, at| pack::total::expand(scope, x[at].clone(), inside[at].clone()));
    let all = block_sum::expand(scope, own, threads);
    let mean = pack::mean::expand(scope, all, count.clone());
    let one = Number::from(1.0f32);
    let centered: Vec<Pack32> =
        x.into_iter().map(|x| pack::normalize::expand(scope, x, mean.clone(), one.clone())).collect();
    let (normal, rstd) = scaled(scope, threads, centered, columns, eps);
    let each = |((normal, gamma), beta)| {
        let scaled = pack::multiply::expand(scope, normal, gamma);
        pack::add::expand(scope, scaled, beta)
    };
    let y = normal.into_iter().zip(gamma).zip(beta).map(each).collect();
    vec![Value::Packs(y), Value::One(mean), Value::One(rstd)]
}

/// `y` and the reciprocal deviation; see [`shardc_ir::ops::RmsNorm`].
fn rms_norm(scope: &mut Scope, threads: u32, [x, gamma]: [Vec<Pack32>; 2], columns: &Columns, eps: f64) -> Vec<Value> {
    let (normal, rstd) = scaled(scope, threads, x, columns, eps);
    let y = normal.into_iter().zip(gamma).map(|(normal, gamma)| pack::multiply::expand(scope, normal, gamma)).collect();
    vec![Value::Packs(y), Value::One(rstd)]
}

/// A row divided by the root of the mean of its squares, and what it was multiplied by.
fn scaled(scope: &mut Scope, threads: u32, x: Vec<Pack32>, columns: &Columns, eps: f64) -> (Vec<Pack32>, Number) {
    let inside = &columns.is_inside;
    let own =
        sum(scope, x.len(), |scope, at| pack::dot::expand(scope, x[at].clone(), x[at].clone(), inside[at].clone()));
    let all = block_sum::expand(scope, own, threads);
    let square = pack::mean::expand(scope, all, columns.count.clone());
    let rstd = pack::reciprocal_deviation::expand(scope, square, eps as f32);
    let zero = Number::from(0.0f32);
    let normal = x.into_iter().map(|x| pack::normalize::expand(scope, x, zero.clone(), rstd.clone())).collect();
    (normal, rstd)
}

/// `dx` and the terms of this row of `dgamma` and `dbeta`; see [`shardc_ir::ops::LayerNormGrad`]. Without a mean
/// it is 0, and so is that of `dy gamma`: [`shardc_ir::ops::RmsNormGrad`].
fn norm_grad(
    scope: &mut Scope,
    threads: u32,
    [dy, x, gamma]: [Vec<Pack32>; 3],
    (mean, rstd): (Option<Number>, Option<Number>),
    columns: &Columns,
) -> Vec<Value> {
    let (is_centered, zero) = (mean.is_some(), Number::from(0.0f32));
    let (mean, rstd) = (mean.unwrap_or(zero.clone()), rstd.unwrap_or(zero.clone()));
    let (inside, count) = (&columns.is_inside, columns.count.clone());
    let normal: Vec<Pack32> =
        x.into_iter().map(|x| pack::normalize::expand(scope, x, mean.clone(), rstd.clone())).collect();
    let own: Vec<Pack32> =
        dy.iter().zip(gamma).map(|(dy, gamma)| pack::multiply::expand(scope, dy.clone(), gamma)).collect();
    let product = sum(scope, own.len(), |scope, at| {
        pack::dot::expand(scope, own[at].clone(), normal[at].clone(), inside[at].clone())
    });
    let (all_own, all_product) = if is_centered {
        let total = sum(scope, own.len(), |scope, at| pack::total::expand(scope, own[at].clone(), inside[at].clone()));
        let other = RuntimeCell::<f32>::__expand_new(scope, zero);
        let all = block_sum_pair::expand(scope, total, product, other.clone(), threads);
        (pack::mean::expand(scope, all, count.clone()), read(scope, &other))
    } else {
        (zero, block_sum::expand(scope, product, threads))
    };
    let mean_product = pack::mean::expand(scope, all_product, count);
    let dx = own.into_iter().zip(&normal).map(|(own, normal)| {
        pack::project::expand(scope, own, normal.clone(), all_own.clone(), mean_product.clone(), rstd.clone())
    });
    let dx = Value::Packs(dx.collect());
    let terms = dy.iter().zip(normal).map(|(dy, normal)| pack::multiply::expand(scope, dy.clone(), normal)).collect();
    let mut made = vec![dx, Value::Packs(terms)];
    if is_centered {
        made.push(Value::Packs(dy));
    }
    made
}
