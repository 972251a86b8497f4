//! The kernel of a region, put together step by step from the functions of [`super::pack`].
//!
//! A region is about a tensor of rows, those of one sample after the other. A block takes some vectors of columns and a
//! chunk of a sample's rows, one group of rows after the other: a unit keeps its vectors of the group in registers, in
//! f32, from the first step to the last. So what a step makes of what another made is neither written nor rounded.
//! While a group is worked on the next one is on its way. Sums over rows meet in shared memory, those of a group
//! together; sums over columns stay in registers to the end of the chunk, and the sums of chunks are added by another
//! kernel in a fixed order.

use super::elementwise::Pair;
use super::norm::{Rows, layer_norm, norm_grad, rms_norm};
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
    /// An element for several elements of each row, or of several rows.
    Spread(Spread),
    /// One number.
    Scalar,
    /// The sum over the rows of each sample, and over as many columns beside each other as the result lacks; only a
    /// result.
    ColumnSum,
}

/// How a value is spread over the elements of a region, counted along its rows: element `at` has number
/// `at / inner % low` of part `at / (inner * low * between) % high`, which is as long as `low`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spread {
    /// Elements beside each other that have the same.
    pub inner: u32,
    /// Different ones behind each other.
    pub low: u32,
    /// How often these come again.
    pub between: u32,
    /// How many such parts there are.
    pub high: u32,
}

impl Spread {
    /// Whether each index of the outermost of so many elements has its own part of the value, else all of it again.
    pub fn goes_on(self, elements: u64) -> bool {
        let [inner, low, between, high] = [self.inner, self.low, self.between, self.high].map(u64::from);
        let part = if high > 1 { between * high } else { 1 };
        low * high > 1 && inner * low * part == elements
    }
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

/// Rows of a tensor that are one row of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Joined {
    /// How many.
    pub rows: u32,
    /// Vectors of each.
    pub period: u32,
    /// Elements of a vector.
    pub width: usize,
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
    /// Rows that a block works on at a time.
    pub rows: u32,
    /// Whether a block works on several groups of rows.
    pub is_tall: bool,
    /// Whether rows are those of several samples, each with its sums.
    pub has_samples: bool,
    /// Where a row is several of the tensor's.
    pub joined: Option<Joined>,
}

pub(super) type Pack32 = NativeExpand<PackF32>;
pub(super) type Number = NativeExpand<f32>;
type Index = NativeExpand<usize>;
type Flag = NativeExpand<bool>;

enum Buffer {
    Narrow(NativeExpand<Array<Pack<0>>>),
    Wide(NativeExpand<Array<PackF32>>),
    Numbers(NativeExpand<Array<f32>>),
    Element(NativeExpand<Array<Elem<0>>>),
    SpreadNarrow(NativeExpand<Array<Elem<0>>>, Spread),
    SpreadWide(NativeExpand<Array<f32>>, Spread),
}

/// A value in registers.
#[derive(Clone)]
pub(super) enum Value {
    /// Per row of the group and vector of the unit.
    Packs(Vec<Pack32>),
    /// Per row of the group, the same number in all units.
    Numbers(Vec<Number>),
}

/// What the next rows bring, on its way.
enum Next {
    Narrow(Vec<RuntimeCellExpand<Pack<0>>>),
    Wide(Vec<RuntimeCellExpand<PackF32>>),
    Numbers(Vec<RuntimeCellExpand<f32>>),
}

/// The rows of a group, and which of them there are.
struct Group {
    rows: Vec<Index>,
    is_there: Vec<Flag>,
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
    /// Where what is the same in all rows has its vectors.
    shared: Vec<Index>,
    is_inside: Vec<Flag>,
}

impl Region {
    /// The body of the kernel. Its unsigned scalars are the rows of a sample, the vectors of a row and the rows of a chunk;
    /// the grid is (tiles of columns, chunks, samples).
    pub fn define(&self, d: &mut Definition) {
        let inputs: Vec<Buffer> = self.operands.iter().map(|port| input(d, *port)).collect();
        let outputs: Vec<Buffer> = self.results.iter().map(|port| output(d, *port)).collect();
        let (rows, columns, chunk) = (d.number(), d.number(), d.number());
        let scope = d.scope();
        let columns = self.columns(scope, columns);
        let sample: Index = if self.has_samples { pack::sample::expand(scope) } else { 0usize.into() };
        let first = pack::first_row::expand(scope, sample.clone(), chunk.clone(), rows.clone());
        let last = pack::last_row::expand(scope, sample.clone(), first.clone(), chunk, rows);
        let begins = self.readable(scope, &first, 0usize.into(), &last);
        let mut kept: Vec<Option<Value>> = vec![None; self.values];
        let mut moving: Vec<(usize, usize, Next)> = Vec::new();
        for (index, (port, buffer)) in self.operands.iter().zip(&inputs).enumerate() {
            match port.class {
                Class::Full | Class::Row | Class::Spread(_) => {
                    moving.push((index, port.value, begin(scope, buffer, &columns, &begins)));
                }
                _ => kept[port.value] = Some(self.load(scope, buffer, &columns)),
            }
        }
        let sums: Vec<Vec<RuntimeCellExpand<PackF32>>> =
            self.results.iter().map(|port| self.sums(scope, *port)).collect();
        let work = |scope: &mut Scope, group: Index| {
            let next = self.is_tall.then(|| {
                let next = pack::next_index::expand(scope, group.clone());
                self.readable(scope, &first, next, &last)
            });
            let mut values = kept.clone();
            for (index, value, cells) in &moving {
                values[*value] = Some(advance(scope, &inputs[*index], cells, &columns, next.as_deref()));
            }
            let group = self.group(scope, &first, group, &last);
            let results = || self.results.iter().zip(&outputs).zip(&sums);
            for step in &self.steps {
                self.step(scope, step, &mut values, &columns, |scope, index, value| {
                    for ((_, buffer), sums) in results().filter(|((port, _), _)| port.value == index) {
                        write(scope, buffer, value, sums, &columns, &group);
                    }
                });
            }
        };
        let groups = pack::groups::expand(scope, first.clone(), last.clone(), self.rows);
        RangeExpand::new(0usize.into(), groups, false).expand(scope, work);
        for (buffer, sums) in outputs.iter().zip(&sums) {
            if let Buffer::Wide(buffer) = buffer {
                for (at, sum) in sums.iter().enumerate() {
                    let (mut total, at) = (read(scope, sum), columns.at[at].clone());
                    let mut count = columns.count.clone();
                    if let Some(joined) = self.joined {
                        total = pack::joined_sum::expand(scope, total, joined, self.threads);
                        count = (joined.period as usize).into();
                    }
                    let is_inside = pack::is_below::expand(scope, at.clone(), count.clone());
                    let place = pack::partial_place::expand(scope, sample.clone(), count, at);
                    pack::store_wide::expand(scope, buffer.clone(), place, total, is_inside);
                }
            }
        }
    }

    /// The rows of a group, each one that may be read.
    fn readable(&self, scope: &mut Scope, first: &Index, group: Index, last: &Index) -> Vec<Index> {
        let row = |row: u32| {
            let at = pack::group_row::expand(scope, first.clone(), group.clone(), self.rows, row);
            pack::clamp_row::expand(scope, at, last.clone())
        };
        (0..self.rows).map(row).collect()
    }

    fn group(&self, scope: &mut Scope, first: &Index, group: Index, last: &Index) -> Group {
        let row = |row: u32| pack::group_row::expand(scope, first.clone(), group.clone(), self.rows, row);
        let rows: Vec<Index> = (0..self.rows).map(row).collect();
        let is_there = rows.iter().map(|row| pack::is_below::expand(scope, row.clone(), last.clone())).collect();
        Group { rows, is_there }
    }

    fn columns(&self, scope: &mut Scope, count: NativeExpand<u32>) -> Columns {
        let count = pack::as_index::expand(scope, count);
        let mut at = vec![pack::first_column::expand(scope, self.threads * self.packs)];
        while at.len() < self.packs as usize {
            at.push(pack::next_column::expand(scope, at[at.len() - 1].clone(), self.threads));
        }
        let clamp = |at: &Index| pack::clamp_column::expand(scope, at.clone(), count.clone());
        let clamped: Vec<Index> = at.iter().map(clamp).collect();
        let shared = match self.joined {
            Some(Joined { period, .. }) => {
                clamped.iter().map(|at| pack::remainder::expand(scope, at.clone(), period)).collect()
            }
            None => clamped.clone(),
        };
        let is_inside = at.iter().map(|at| pack::is_below::expand(scope, at.clone(), count.clone())).collect();
        Columns { count, at, clamped, shared, is_inside }
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

    /// What is the same in all rows.
    fn load(&self, scope: &mut Scope, buffer: &Buffer, columns: &Columns) -> Value {
        let rows = self.rows as usize;
        let number = match buffer {
            Buffer::Numbers(x) => Some(pack::load_number::expand(scope, x.clone(), 0usize.into())),
            Buffer::Element(x) => Some(pack::load_element::expand(scope, x.clone())),
            _ => None,
        };
        if let Some(number) = number {
            return Value::Numbers(vec![number; rows]);
        }
        let one = |at: &Index| match buffer {
            Buffer::Narrow(x) => {
                let narrow = pack::load_narrow::expand(scope, x.clone(), at.clone());
                Some(pack::widen::expand(scope, narrow))
            }
            Buffer::Wide(x) => Some(pack::load_wide::expand(scope, x.clone(), at.clone())),
            _ => None,
        };
        let packs: Vec<Pack32> = columns.shared.iter().filter_map(one).collect();
        Value::Packs(vec![packs; rows].concat())
    }

    /// Does a step; what it makes is given to `finish` as soon as it is there.
    fn step(
        &self,
        scope: &mut Scope,
        step: &Step,
        values: &mut [Option<Value>],
        columns: &Columns,
        finish: impl Fn(&mut Scope, usize, &Value),
    ) {
        let packs = |scope: &mut Scope, index: usize| -> Vec<Pack32> {
            match values[step.operands[index]].clone() {
                Some(Value::Packs(packs)) => packs,
                Some(Value::Numbers(numbers)) => {
                    let all = |number| vec![pack::splat::expand(scope, number); self.packs as usize];
                    numbers.into_iter().flat_map(all).collect()
                }
                None => Vec::new(),
            }
        };
        let numbers = |index: usize| match &values[step.operands[index]] {
            Some(Value::Numbers(numbers)) => numbers.clone(),
            _ => Vec::new(),
        };
        let rows = Rows { is_inside: &columns.is_inside, columns: &columns.count, threads: self.threads };
        let mut made: Vec<(usize, Value)> = Vec::new();
        let mut make = |scope: &mut Scope, index: usize, value: Value| {
            finish(scope, step.first + index, &value);
            made.push((step.first + index, value));
        };
        let all: Vec<Value> = match &step.op {
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
                layer_norm(scope, &rows, operands, op.eps)
            }
            Op::RmsNorm(op) => {
                let operands = [packs(scope, 0), packs(scope, 1)];
                rms_norm(scope, &rows, operands, op.eps)
            }
            Op::LayerNormGrad(_) => {
                let operands = [packs(scope, 0), packs(scope, 1), packs(scope, 2)];
                norm_grad(scope, &rows, operands, (Some(numbers(3)), numbers(4)), &mut make);
                Vec::new()
            }
            Op::RmsNormGrad(_) => {
                let operands = [packs(scope, 0), packs(scope, 1), packs(scope, 2)];
                norm_grad(scope, &rows, operands, (None, numbers(3)), &mut make);
                Vec::new()
            }
            _ => Vec::new(),
        };
        all.into_iter().enumerate().for_each(|(index, value)| make(scope, index, value));
        made.into_iter().for_each(|(index, value)| values[index] = Some(value));
    }
}

fn input(d: &mut Definition, port: Port) -> Buffer {
    match (port.class, port.is_wide) {
        (Class::Row, _) | (Class::Scalar, true) => Buffer::Numbers(d.input::<f32>()),
        (Class::Scalar, false) => Buffer::Element(d.input::<Elem<0>>()),
        (Class::Spread(spread), true) => Buffer::SpreadWide(d.input::<f32>(), spread),
        (Class::Spread(spread), false) => Buffer::SpreadNarrow(d.input::<Elem<0>>(), spread),
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

fn places(scope: &mut Scope, columns: &Columns, rows: &[Index]) -> Vec<Index> {
    let mut places = Vec::with_capacity(rows.len() * columns.clamped.len());
    for row in rows {
        let one = |at: &Index| pack::place::expand(scope, row.clone(), columns.count.clone(), at.clone());
        places.extend(columns.clamped.iter().map(one));
    }
    places
}

/// The vector at a place of what is spread.
fn gather(scope: &mut Scope, buffer: &Buffer, at: Index) -> Option<Pack32> {
    let first = |scope: &mut Scope, spread: Spread| pack::spread_place::expand(scope, at.clone(), spread);
    match buffer {
        Buffer::SpreadNarrow(x, spread) => {
            let first = first(scope, *spread);
            Some(pack::gather_narrow::expand(scope, x.clone(), first, spread.inner))
        }
        Buffer::SpreadWide(x, spread) => {
            let first = first(scope, *spread);
            Some(pack::gather_wide::expand(scope, x.clone(), first, spread.inner))
        }
        _ => None,
    }
}

/// Sends for the first rows.
fn begin(scope: &mut Scope, buffer: &Buffer, columns: &Columns, rows: &[Index]) -> Next {
    let places = places(scope, columns, rows);
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
            let mut cell = |row: &Index| {
                let raw = pack::load_number::expand(scope, x.clone(), row.clone());
                RuntimeCell::<f32>::__expand_new(scope, raw)
            };
            Next::Numbers(rows.iter().map(&mut cell).collect())
        }
        Buffer::SpreadNarrow(..) | Buffer::SpreadWide(..) => {
            let packs = places.into_iter().filter_map(|at| gather(scope, buffer, at));
            let packs: Vec<Pack32> = packs.collect();
            Next::Wide(packs.into_iter().map(|pack| RuntimeCell::<PackF32>::__expand_new(scope, pack)).collect())
        }
        // One number is no row's.
        Buffer::Element(_) => Next::Numbers(Vec::new()),
    }
}

/// What came for these rows; sends for the next ones.
fn advance(scope: &mut Scope, buffer: &Buffer, cells: &Next, columns: &Columns, next: Option<&[Index]>) -> Value {
    let places = next.map(|rows| places(scope, columns, rows));
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
        (Buffer::SpreadNarrow(..) | Buffer::SpreadWide(..), Next::Wide(cells)) => {
            let mut packs = Vec::with_capacity(cells.len());
            for (index, cell) in cells.iter().enumerate() {
                packs.push(read(scope, cell));
                if let Some(next) = place(index).and_then(|at| gather(scope, buffer, at)) {
                    store(scope, cell, next);
                }
            }
            Value::Packs(packs)
        }
        (Buffer::Numbers(x), Next::Numbers(cells)) => {
            let mut numbers = Vec::with_capacity(cells.len());
            for (index, cell) in cells.iter().enumerate() {
                numbers.push(read(scope, cell));
                if let Some(rows) = next {
                    let next = pack::load_number::expand(scope, x.clone(), rows[index].clone());
                    store(scope, cell, next);
                }
            }
            Value::Numbers(numbers)
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
    group: &Group,
) {
    let rows = || group.rows.iter().zip(&group.is_there);
    match (buffer, value) {
        (Buffer::Numbers(y), Value::Numbers(numbers)) => {
            for ((row, is_there), number) in rows().zip(numbers) {
                pack::store_number::expand(scope, y.clone(), row.clone(), number.clone(), is_there.clone());
            }
        }
        (_, Value::Packs(packs)) if !sums.is_empty() => {
            for (packs, is_there) in packs.chunks(sums.len()).zip(&group.is_there) {
                for (sum, value) in sums.iter().zip(packs) {
                    let before = read(scope, sum);
                    let after = pack::add_where::expand(scope, before, value.clone(), is_there.clone());
                    store(scope, sum, after);
                }
            }
        }
        (_, Value::Packs(packs)) => {
            for (packs, (row, is_there)) in packs.chunks(columns.at.len()).zip(rows()) {
                for ((at, value), inside) in columns.at.iter().zip(packs).zip(&columns.is_inside) {
                    let place = pack::place::expand(scope, row.clone(), columns.count.clone(), at.clone());
                    let inside = pack::both::expand(scope, inside.clone(), is_there.clone());
                    match buffer {
                        Buffer::Narrow(y) => pack::store_narrow::expand(scope, y.clone(), place, value.clone(), inside),
                        Buffer::Wide(y) => pack::store_wide::expand(scope, y.clone(), place, value.clone(), inside),
                        _ => {}
                    }
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
