//! Regions: which can be one kernel, and how its blocks lie over the rows. Norms are regions of one step. Where rows
//! are narrower than a block and know nothing of each other's ends, several are joined to one as wide as a block.
//!
//! A region that ends in sums lies by them: the dimensions that they begin with are its rows, those before are samples,
//! those behind are columns. Blocks leave sums over chunks of a sample's rows, of which one more launch adds up those of
//! the chunks, and of columns beside each other where these are summed too.

use super::cut::{Cut, MOST_BLOCKS};
use super::{Arg, OP, RES, Select, THREADS, lanes};
use crate::cuda::kernel::Kernel;
use crate::cuda::kernels::pack::{PARTIAL_UNITS, partial_tile, sample, sum_partials};
use crate::cuda::kernels::region::{Class, Joined, Port, Region, Spread, Step};
use shardc_ir::ops::{Broadcast, Fused, FusedStep, Op, ReduceOp};
use shardc_ir::units::gcd;
use shardc_ir::{DType, TensorType};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Multiprocessors of a large device.
const PROCESSORS: u64 = 132;

/// The most units that share a row.
const MOST_UNITS: u64 = 512;

/// The most elements of a row that a block normalizes, which its units keep in registers or close by.
const MOST_COLUMNS: u64 = 1 << 20;

/// The units of a warp, and the most vectors of a row that each keeps where a warp works on a row by itself.
const WARP: u64 = 32;
const WARP_PACKS: u64 = 8;

/// The most tensors whose rows one launch adds up.
const MOST_SUMS: usize = 8;

/// Units of a block where every unit minds its own columns.
const TILE: u64 = 128;

/// The fewest rows of a sample whose sums are worth their own partial ones, and the most partial ones of one sum.
const FEWEST_ROWS: u64 = 8;
const MOST_PARTIAL: u64 = 1 << 16;

/// Whether a region on these types is one kernel.
pub fn fuses(region: &Fused, operands: &[TensorType]) -> bool {
    let Ok(sorted) = Sorted::new(region, operands) else { return false };
    let Ok(buffers) = sorted.buffers(region, operands.len()) else { return false };
    let fits = |sorted: &Sorted| match row_sums(region, sorted) {
        Some(tensors) => tensors.len() <= MOST_SUMS && sorted.types[tensors[0]].elements() < 1 << 31,
        None if region.steps.iter().all(|step| matches!(step.op, Op::Reduce(_))) => false,
        None => sorted.spreads().next().is_none() || sorted.layout(&buffers).unit() < 1 << 32,
    };
    fits(&sorted) && sorted.sums_fast(&buffers)
}

/// Per result, the operand of whose rows it is the sum, if the region is nothing but such sums of one element type.
fn row_sums(region: &Fused, sorted: &Sorted) -> Option<Vec<usize>> {
    let first = region.results.first().copied()?;
    let rows = 0..sorted.shape.len() - 1;
    let operand = |(index, step): (usize, &FusedStep)| match (&step.op, &step.operands[..]) {
        (Op::Reduce(op), [_]) if op.dims.iter().copied().ne(rows.clone()) => None,
        (Op::Reduce(_), [operand]) if *operand < first && region.results.get(index) == Some(&(first + index)) => {
            (sorted.types[*operand] == sorted.types[0]).then_some(*operand)
        }
        _ => None,
    };
    region.steps.iter().enumerate().map(operand).collect()
}

/// The dimensions that the sums of a region begin with, as far as they have them in common; all but the last without sums.
fn rows(region: &Fused, last: usize) -> Range<usize> {
    let of = |step: &FusedStep| match &step.op {
        Op::Reduce(op) => {
            let start = op.dims.first().copied().unwrap_or(last).min(last);
            let length = op.dims.iter().zip(start..last).take_while(|(dim, at)| *dim == at).count();
            Some(start..start + length)
        }
        _ => None,
    };
    region.steps.iter().filter_map(of).min_by_key(|rows| rows.end).unwrap_or(0..last)
}

/// How a copy of a smaller value lies over the elements of the larger one, if it is at most two parts of it that come again.
fn spread(op: &Broadcast, small: &[u64], large: &[u64]) -> Option<Spread> {
    let size = |dim: usize| u32::try_from(large[dim]).ok();
    let is_kept =
        |dim: usize| op.dims.iter().position(|to| *to == dim).is_some_and(|from| small.get(from) == Some(&large[dim]));
    let mut runs = vec![(false, 1)];
    for dim in (0..large.len()).rev().filter(|dim| large[*dim] != 1) {
        match runs.last_mut() {
            Some((kept, all)) if *kept == is_kept(dim) => *all = u32::checked_mul(*all, size(dim)?)?,
            _ => runs.push((is_kept(dim), size(dim)?)),
        }
    }
    let at = |index: usize| runs.get(index).map_or(1, |(_, size)| *size);
    (runs.len() <= 5).then(|| Spread { inner: at(0), low: at(1), between: at(2), high: at(3) })
}

/// The buffers of a region, and the element type of those that are not f32.
struct Buffers {
    operands: Vec<Port>,
    results: Vec<Port>,
    main: DType,
}

fn is_norm(op: &Op) -> bool {
    matches!(op, Op::LayerNorm(_) | Op::RmsNorm(_) | Op::LayerNormGrad(_) | Op::RmsNormGrad(_))
}

/// The values of a region, and how each lies.
struct Sorted {
    types: Vec<TensorType>,
    classes: Vec<Option<Class>>,
    /// The shape of what lies along rows and columns.
    shape: Vec<u64>,
    /// The dimensions that are rows of a sample; those behind are columns.
    rows: Range<usize>,
    steps: Vec<Step>,
}

impl Sorted {
    fn new(region: &Fused, operands: &[TensorType]) -> Result<Self, String> {
        let types = region.values(operands);
        let classes = vec![None; types.len()];
        let of = |step: &FusedStep| match step.op {
            Op::LayerNorm(_) | Op::RmsNorm(_) | Op::Reduce(_) => types.get(*step.operands.first()?).cloned(),
            _ => step.results.first().cloned(),
        };
        let shape = region.steps.iter().filter_map(of).max_by_key(TensorType::rank).ok_or("no steps")?.shape;
        if shape.is_empty() {
            return Err("a number has no rows".to_string());
        }
        let rows = rows(region, shape.len() - 1);
        let mut sorted = Self { types, classes, shape, rows, steps: Vec::new() };
        let mut first = operands.len();
        for step in &region.steps {
            sorted.step(step, first)?;
            first += step.results.len();
        }
        let [_, _, columns] = sorted.sizes();
        if sorted.has(Class::Row) && columns > MOST_COLUMNS {
            return Err(format!("a norm of rows of {columns} elements, more than {MOST_COLUMNS}"));
        }
        Ok(sorted)
    }

    fn step(&mut self, step: &FusedStep, first: usize) -> Result<(), String> {
        use Class::{Column, ColumnSum, Full, Row, Scalar};
        let (last, end) = (self.shape.len() - 1, self.rows.end);
        let is_column = |value: &usize| end > 0 && self.types[*value].rank() == self.shape.len() - end;
        let (takes, makes): (Vec<Class>, Vec<Class>) = match &step.op {
            // Its numbers are part of the kernel's text, where there are none of that kind.
            Op::Affine(op) if [op.scale, op.offset].iter().any(|number| !(*number as f32).is_finite()) => {
                return Err("numbers that are not finite in f32".to_string());
            }
            // Of what all rows read.
            Op::Cast(_) if step.operands.iter().all(is_column) => (vec![Column], vec![Column]),
            Op::Unary(_) | Op::UnaryGrad(_) | Op::Affine(_) | Op::Cast(_) | Op::Swiglu(_) | Op::SwigluGrad(_) => {
                (vec![Full; step.operands.len()], vec![Full; step.results.len()])
            }
            Op::Binary(_) => {
                let class = |value: &usize| if self.types[*value].rank() == 0 { Scalar } else { Full };
                (step.operands.iter().map(class).collect(), vec![Full])
            }
            Op::Broadcast(_) if self.types[step.operands[0]].rank() == 0 => (vec![Scalar], vec![Full]),
            Op::Broadcast(op) if op.dims.iter().copied().eq(end..=last) => (vec![Column], vec![Full]),
            Op::Broadcast(op) => {
                let of = spread(op, &self.types[step.operands[0]].shape, &self.shape);
                (vec![Class::Spread(of.ok_or("copies of more than two parts")?)], vec![Full])
            }
            Op::Reduce(op) if op.kind == ReduceOp::Sum && self.adds_up(&op.dims) => (vec![Full], vec![ColumnSum]),
            op if self.rows != (0..last) && is_norm(op) => return Err("a norm of rows that are not summed".to_string()),
            Op::LayerNorm(_) => (vec![Full, Column, Column], vec![Full, Row, Row]),
            Op::RmsNorm(_) => (vec![Full, Column], vec![Full, Row]),
            Op::LayerNormGrad(_) => (vec![Full, Full, Column, Row, Row], vec![Full, ColumnSum, ColumnSum]),
            Op::RmsNormGrad(_) => (vec![Full, Full, Column, Row], vec![Full, ColumnSum]),
            op => return Err(format!("{} is no step of a region", op.name())),
        };
        for (value, class) in step.operands.iter().copied().zip(takes).chain((first..).zip(makes)) {
            self.put(value, class)?;
        }
        self.steps.push(Step { op: step.op.clone(), operands: step.operands.clone(), first });
        Ok(())
    }

    /// Whether a sum over some dimensions is one over all rows of each sample, and over columns beside each other, if over
    /// any.
    fn adds_up(&self, dims: &[usize]) -> bool {
        let (rows, rank) = (self.rows.clone(), self.shape.len());
        let beside = rank - dims.len().saturating_sub(rows.len())..rank;
        !rows.is_empty() && rows.end <= beside.start && dims.iter().copied().eq(rows.chain(beside))
    }

    fn put(&mut self, value: usize, class: Class) -> Result<(), String> {
        let (rows, columns) = self.shape.split_at(self.rows.end);
        let ty = &self.types[value];
        let shape = match class {
            Class::Full => &self.shape[..],
            Class::Spread(_) | Class::ColumnSum => &ty.shape[..],
            Class::Row => rows,
            Class::Column => columns,
            Class::Scalar => &[],
        };
        let is_f32 = ty.dtype == DType::F32 || !matches!(class, Class::Row | Class::ColumnSum);
        let is_known = self.classes[value].is_none_or(|known| known == class);
        if ty.shape != shape || !ty.dtype.is_float() || ty.dtype.size() == 1 || !is_f32 || !is_known {
            return Err(format!("{ty} cannot lie by {class:?} in a region of {:?}", self.shape));
        }
        self.classes[value] = Some(class);
        Ok(())
    }

    fn port(&self, value: usize) -> Result<Port, String> {
        let class = self.classes[value].ok_or("a value that no step knows")?;
        Ok(Port { value, class, is_wide: self.types[value].dtype == DType::F32 })
    }

    fn buffers(&self, region: &Fused, count: usize) -> Result<Buffers, String> {
        let operands = (0..count).map(|value| self.port(value)).collect::<Result<Vec<_>, _>>()?;
        let results = region.results.iter().map(|value| self.port(*value)).collect::<Result<Vec<_>, _>>()?;
        if results.iter().any(|port| matches!(port.class, Class::Column | Class::Spread(_))) {
            return Err("what is the same in all rows is no result of a region".to_string());
        }
        let dtypes = operands.iter().chain(&results).map(|port| self.types[port.value].dtype);
        let narrow: BTreeSet<DType> = dtypes.filter(|dtype| *dtype != DType::F32).collect();
        if narrow.len() > 1 {
            return Err("a region of two 16-bit element types".to_string());
        }
        Ok(Buffers { operands, results, main: narrow.first().copied().unwrap_or(DType::F32) })
    }

    fn has(&self, class: Class) -> bool {
        self.classes.contains(&Some(class))
    }

    fn spreads(&self) -> impl Iterator<Item = Spread> {
        let of = |class: &Option<Class>| if let Some(Class::Spread(spread)) = class { Some(*spread) } else { None };
        self.classes.iter().filter_map(of)
    }

    /// Samples, the rows of each, and columns.
    fn sizes(&self) -> [u64; 3] {
        [0..self.rows.start, self.rows.clone(), self.rows.end..self.shape.len()]
            .map(|dims| self.shape[dims].iter().product())
    }

    /// Of how many columns beside each other a value is the sum.
    fn beside(&self, value: usize) -> u64 {
        let [samples, _, columns] = self.sizes();
        (samples * columns / self.types[value].elements().max(1)).max(1)
    }

    /// Whether the sums are over all rows and nothing else, or enough rows are added up by blocks without idle units to
    /// leave little to be added up.
    fn sums_fast(&self, buffers: &Buffers) -> bool {
        let [samples, rows, _] = self.sizes();
        let sums = buffers.results.iter().filter(|port| port.class == Class::ColumnSum);
        let most = sums.map(|port| self.beside(port.value)).max().unwrap_or(1);
        if samples == 1 && most == 1 {
            return true;
        }
        let layout = self.layout(buffers);
        let (vectors, chunks) = (layout.columns / layout.width as u64, layout.chunks());
        let is_filled = rows >= FEWEST_ROWS && vectors >= WARP && samples <= MOST_BLOCKS;
        is_filled && chunks * most <= MOST_PARTIAL
    }

    /// How blocks lie where these are read and written.
    fn layout(&self, buffers: &Buffers) -> Layout {
        let full = |ports: &[Port]| -> Vec<DType> {
            let full = ports.iter().filter(|port| port.class == Class::Full);
            full.map(|port| self.types[port.value].dtype).collect()
        };
        let (reads, writes) = (full(&buffers.operands), full(&buffers.results));
        let (moving, all) = (reads.len(), [reads, writes].concat());
        let [samples, rows, columns] = self.sizes();
        let is_flat = ![Class::Row, Class::Column, Class::ColumnSum].into_iter().any(|class| self.has(class));
        let mut layout = match is_flat {
            true => Layout::flat(samples * rows * columns, self.lanes(lanes(&all, &[samples * rows * columns]))),
            false => Layout::new(self, moving, self.lanes(lanes(&all, &[columns]))),
        };
        if self.spreads().next().is_some() {
            layout.keep_whole(self.outermost());
        }
        layout
    }

    /// Elements of each index of the outermost dimension that has several.
    fn outermost(&self) -> u64 {
        let sizes = self.shape.iter().skip_while(|size| **size == 1);
        sizes.skip(1).product()
    }

    /// The most elements of a vector, if there are so many at the most, of which each that is spread lies one behind the
    /// other.
    fn lanes(&self, most: usize) -> usize {
        let fits = |lanes: u32, Spread { inner, low, .. }: Spread| {
            inner.is_multiple_of(lanes) || lanes.is_multiple_of(inner) && (inner * low).is_multiple_of(lanes)
        };
        let mut lanes = most;
        while lanes > 1 && !self.spreads().all(|spread| fits(lanes as u32, spread)) {
            lanes /= 2;
        }
        lanes
    }
}

/// How blocks lie over the rows.
struct Layout {
    samples: u64,
    /// Rows of a sample.
    rows: u64,
    columns: u64,
    /// Rows of the tensor that are one here.
    joined: u64,
    width: usize,
    threads: u32,
    packs: u32,
    /// Rows that a block works on at a time.
    group: u32,
    /// Blocks that share a multiprocessor, if the compiler of kernels would take their registers otherwise.
    sharing: Option<u32>,
    /// Rows of a block.
    chunk: u64,
    cut: Cut,
}

impl Layout {
    /// `width` elements to a vector; rows come from `moving` tensors.
    fn new(sorted: &Sorted, moving: usize, width: usize) -> Self {
        let [samples, rows, columns] = sorted.sizes();
        let vectors = columns / width as u64;
        let (is_norm, has_sums) = (sorted.has(Class::Row), sorted.has(Class::ColumnSum));
        // Rows that know nothing of each other's ends are one where a row has less than a block does at a time.
        let joined = match is_norm {
            true => 1,
            false => 1 << (TILE / vectors.max(1)).max(1).ilog2().min(rows.max(1).trailing_zeros()),
        };
        let (rows, columns, vectors) = (rows / joined, columns * joined, vectors * joined);
        // A row that fits into the registers of a warp waits for no other.
        let is_narrow = is_norm && !has_sums && vectors <= WARP * WARP_PACKS;
        let packs = match is_norm {
            true if is_narrow => vectors.div_ceil(WARP).max(1),
            true => vectors.div_ceil(MOST_UNITS).max(1),
            false => 1,
        };
        let most = if is_norm { MOST_UNITS } else { TILE };
        // As many units in each tile of a row, with none to spare but in the last warp.
        let tiles = vectors.div_ceil(packs * most).max(1);
        let threads = vectors.div_ceil(packs * tiles).next_multiple_of(32).clamp(32, most);
        // Units of a processor, by the registers that each takes; blocks stay for all of their rows. A block that
        // waits for its sums does so for two rows at once, and one that adds up columns reads two rows at once, if
        // these come from two tensors: one brings too little for that, and three take too many registers.
        let (resident, together) = match (is_norm, has_sums) {
            (true, true) if packs == 1 => (512, 2),
            (true, true) => (576, 1),
            (true, false) if is_narrow => (512, 1),
            (true, false) => (1152, 1),
            (false, true) if moving == 2 => (640, 2),
            (false, _) => (1024, 1),
        };
        let sharing = (resident / threads).clamp(1, 16);
        let blocks = PROCESSORS * sharing / tiles / samples.max(1);
        let chunk = rows.div_ceil(blocks.clamp(1, rows.max(1))).max(1);
        let group = chunk.min(together);
        let chunk = chunk.next_multiple_of(group);
        let grid = [tiles as u32, rows.div_ceil(chunk) as u32, 1];
        // A launch takes some of the samples, or some chunks of the only one.
        let cut = match samples {
            1 => Cut { grid, axis: 1, per_unit: chunk, per_block: chunk, number: Some(0), ..Cut::rows(rows) },
            _ => Cut { grid, axis: 2, ..Cut::rows(samples) },
        };
        Self {
            samples,
            rows,
            columns,
            joined,
            width,
            threads: threads as u32,
            packs: packs as u32,
            group: group as u32,
            sharing: (group > 1).then_some(sharing as u32),
            chunk,
            cut,
        }
    }

    /// Of a region in which elements know neither row nor column: one long row.
    fn flat(elements: u64, width: usize) -> Self {
        let cut = Cut { number: Some(1), ..Cut::vectors(elements / width as u64, THREADS) };
        let (columns, threads) = (elements, THREADS);
        let (packs, group) = (1, 1);
        Self { samples: 1, rows: 1, columns, joined: 1, width, threads, packs, group, sharing: None, chunk: 1, cut }
    }

    /// Chunks of a sample.
    fn chunks(&self) -> u64 {
        self.rows.div_ceil(self.chunk)
    }

    /// Elements of one of what the launches count.
    fn counted(&self) -> u64 {
        match self.cut.axis {
            0 => self.width as u64,
            1 => self.columns,
            _ => self.rows * self.columns,
        }
    }

    /// Elements of a unit: one launch does no less.
    fn unit(&self) -> u64 {
        self.cut.per_unit * self.counted()
    }

    /// Lets no launch begin within so many elements: what is spread begins again there, or goes on.
    fn keep_whole(&mut self, elements: u64) {
        let common = gcd(self.unit(), elements).max(1);
        self.cut.per_unit = (self.cut.per_unit * (elements / common).max(1)).min(self.cut.count);
    }
}

impl Select<'_> {
    /// An operation as a region of one step.
    pub(super) fn single(&mut self, op: impl Into<Op>) -> Result<(), String> {
        let count = self.operands.len();
        let (operands, results) = ((0..count).collect(), self.results.to_vec());
        let step = FusedStep { op: op.into(), operands, results, source: None };
        self.region(&Fused { steps: vec![step], results: (count..count + self.results.len()).collect() })
    }

    pub(super) fn region(&mut self, op: &Fused) -> Result<(), String> {
        let sorted = Sorted::new(op, self.operands)?;
        let buffers = sorted.buffers(op, self.operands.len())?;
        if let Some(tensors) = row_sums(op, &sorted) {
            self.row_sums(&tensors);
            return Ok(());
        }
        let layout = sorted.layout(&buffers);
        let Buffers { operands, results, main } = buffers;
        let region = Region {
            operands,
            results,
            values: sorted.types.len(),
            threads: layout.threads,
            packs: layout.packs,
            rows: layout.group,
            is_tall: layout.chunk > u64::from(layout.group),
            has_samples: layout.samples > 1,
            joined: (layout.joined > 1).then(|| {
                let period = (layout.columns / layout.joined / layout.width as u64) as u32;
                Joined { rows: layout.joined as u32, period, width: layout.width }
            }),
            steps: sorted.steps.clone(),
        };
        self.launch_region(region, main, &sorted, &layout);
        Ok(())
    }

    fn launch_region(&mut self, region: Region, main: DType, sorted: &Sorted, layout: &Layout) {
        let (chunks, columns) = (layout.chunks(), layout.columns / layout.joined);
        // By over how many columns they are.
        let mut sums: BTreeMap<u64, Vec<(Arg, Arg)>> = BTreeMap::new();
        let mut buffers = Vec::new();
        // A unit of a launch is some chunks, or all of some samples.
        let units = layout.cut.per_unit;
        let (rows, left) =
            if layout.cut.axis == 2 { (units * layout.rows, units * chunks) } else { (units, units / layout.chunk) };
        let elements = layout.samples * layout.rows * layout.columns;
        let bytes = |port: &Port| {
            let ty = &sorted.types[port.value];
            let count = match port.class {
                Class::Full => layout.unit(),
                Class::Row => rows,
                Class::ColumnSum => left * columns,
                // Of the largest both factors are beyond 32 bits.
                Class::Spread(spread) if spread.goes_on(elements) => {
                    (u128::from(ty.elements()) * u128::from(layout.unit()) / u128::from(elements)) as u64
                }
                Class::Column | Class::Spread(_) | Class::Scalar => 0,
            };
            count * ty.dtype.size()
        };
        buffers.extend(region.operands.iter().enumerate().map(|(index, port)| (OP(index), bytes(port))));
        for (index, port) in region.results.iter().enumerate() {
            let to = match port.class {
                Class::ColumnSum => {
                    let partial = self.scratch(layout.samples * chunks * columns * 4);
                    sums.entry(sorted.beside(port.value)).or_default().push((partial, RES(index)));
                    partial
                }
                _ => RES(index),
            };
            buffers.push((to, bytes(port)));
        }
        let vectors = (layout.columns / layout.width as u64) as u32;
        let numbers = vec![layout.rows as u32, vectors, layout.chunk as u32];
        let kernel_types = [main, DType::F32, DType::F32, DType::F32];
        let (key, sharing) = (format!("{region:?}"), layout.sharing);
        let kernel =
            Kernel::new("region", &kernel_types, layout.width, layout.threads, &key, move |d| region.define(d));
        let kernel = match sharing {
            Some(blocks) => kernel.sharing(blocks),
            None => kernel,
        };
        self.launch_cut(kernel, &buffers, numbers, Vec::new(), layout.cut);
        for (beside, sums) in sums {
            self.sum_partials(&sums, [layout.samples, chunks, columns], beside as u32);
        }
    }

    /// Adds up the partial sums of each sample, and those of columns `beside` each other; each of them is
    /// `[samples, rows, columns]`.
    pub(super) fn sum_partials(&mut self, sums: &[(Arg, Arg)], [samples, rows, columns]: [u64; 3], beside: u32) {
        let (parts, has_samples) = (sums.len() as u32, samples > 1);
        let kernel = Kernel::new("sum_partials", &[], 1, PARTIAL_UNITS, &(parts, beside, has_samples), move |d| {
            let from: Vec<_> = (0..parts).map(|_| d.input::<f32>()).collect();
            let to: Vec<_> = (0..parts).map(|_| d.output::<f32>()).collect();
            let (rows, columns) = (d.number(), d.number());
            let sample = if has_samples { sample::expand(d.scope()) } else { 0usize.into() };
            for (part, (x, y)) in from.into_iter().zip(to).enumerate() {
                let (sample, rows, columns) = (sample.clone(), rows.clone(), columns.clone());
                sum_partials::expand(d.scope(), x, y, sample, rows, columns, part as u32, beside);
            }
        });
        let buffers = sums.iter().map(|(from, _)| *from).chain(sums.iter().map(|(_, to)| *to)).collect();
        let grid = [columns.div_ceil(u64::from(partial_tile(beside))) as u32, parts, samples as u32];
        self.launch(kernel, buffers, vec![rows as u32, columns as u32], Vec::new(), grid);
    }
}
